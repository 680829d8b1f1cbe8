"""What a stage is given belongs to the stage before; a stage that works in place on it gets copies instead.

Whether it does is found out by its first run in each combination of training modes, on copies. A boundary tensor that
was changed in place would be wrong for a recompute, and for the graph of the stage that made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe.run.boundary import replace_tensors, tensors_in
from gpipe.run.microbatch import Tree
from gpipe.run.skips import version

Modes = tuple[bool, ...]

BEGUN_IN_PLACE = (
    "begun to change in place what it is given, so a recompute would see the new value; run the step again, now that "
    "it is known"
)
SHARED_IN_PLACE = (
    "in place a tensor that shares its memory with another one that it is given, and behind a cut the other one does "
    "not change with it; let the layer work on a copy, or the layer before return a clone"
)


@dataclass(slots=True)
class Loan:
    """What a stage works on in one run: what it was given, or copies."""

    value: Tree
    arrived: Mapping[str, Tensor | None]
    given: Sequence[Tensor]
    lent: Sequence[Tensor]
    versions: Sequence[int]
    copied: bool


class Loans:
    """Knows of one stage whether it works in place."""

    def __init__(self) -> None:
        self.works_in_place: dict[Modes, bool] = {}

    def lend(self, value: Tree, arrived: Mapping[str, Tensor | None], modes: Modes) -> Loan:
        """Gives the stage what it may work on."""
        copied = self.works_in_place.get(modes, True)
        given = lent = _all_of(value, arrived)
        if copied:
            value, arrived = _copies(value, arrived)
            lent = _all_of(value, arrived)
        elif type(value) is not Tensor:
            value = replace_tensors(value, lambda tensor: tensor)  # a layer may change the dict that it is given
        return Loan(value, arrived, given, lent, [version(tensor) for tensor in lent], copied)

    def settle(self, loan: Loan, modes: Modes, stage: object) -> None:
        """Looks at what the stage did to what it was lent.

        Raises:
            RuntimeError: It worked in place where that would not be the same without the cut.
        """
        changed = [at for at, tensor in enumerate(loan.lent) if version(tensor) != loan.versions[at]]
        if not changed and (modes in self.works_in_place or any(tensor.is_inference() for tensor in loan.lent)):
            return
        self.works_in_place[modes] = bool(changed) or self.works_in_place.get(modes, False)
        if changed and not loan.copied:
            raise RuntimeError(f"{stage} has {BEGUN_IN_PLACE}")
        main = loan.given[: len(loan.given) - len(_tensors(loan.arrived))]
        if any(_share_memory(loan.given[at], other) for at in changed for other in main):
            raise RuntimeError(f"{stage} changes {SHARED_IN_PLACE}")

    def forget(self, modes: Modes) -> None:
        """Finds out anew: the stage may have begun to work in place, which torch refuses on a leaf."""
        self.works_in_place.pop(modes, None)


def _all_of(value: Tree, arrived: Mapping[str, Tensor | None]) -> tuple[Tensor, ...]:
    return (*tensors_in(value), *_tensors(arrived))


def _tensors(arrived: Mapping[str, Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in arrived.values() if tensor is not None]


def _copies(value: Tree, arrived: Mapping[str, Tensor | None]) -> tuple[Tree, Mapping[str, Tensor | None]]:
    return replace_tensors(value, _copy), {
        name: tensor if tensor is None else _copy(tensor) for name, tensor in arrived.items()
    }


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, so that later runs without a copy give the same bits."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor  # expanded: torch itself refuses to work on it in place
    copied = tensor.clone()
    if copied.stride() == tensor.stride():
        return copied
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
