"""Gives a stage that works in place copies of what it is given, which belongs to the stage before.

Whether it does is found out by its first run in each combination of training modes, on copies. A boundary tensor that
was changed in place would be wrong for a recompute, and for the graph of the stage that made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe.stages.boundary import carry_attributes
from gpipe.stages.layout import copy_of
from gpipe.stages.tree import Tree, replace_tensors, tensors_in, version

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
class StageInput:
    """What a stage works on in one run: of the main line `value` and of skips `arrived`, as they came or copies."""

    value: Tree
    arrived: Mapping[str, Tensor | None]
    main: Tree  # as it came
    given: Sequence[Tensor]  # all tensors as they came
    used: Sequence[Tensor]  # these or their copies
    versions: Sequence[int]  # of the used, before the run
    copied: bool


class InPlaceCheck:
    """Finds out of one stage whether it works in place on what it is given."""

    def __init__(self) -> None:
        self.works_in_place: dict[Modes, bool] = {}

    def prepare(self, value: Tree, arrived: Mapping[str, Tensor | None], modes: Modes) -> StageInput:
        """Gives the stage what it may work on: copies, unless it is known not to work in place."""
        copied, main = self.works_in_place.get(modes, True), value
        given = used = _tensors(value, arrived)
        if copied:
            value = replace_tensors(value, _copy)
            arrived = {name: None if tensor is None else _copy(tensor) for name, tensor in arrived.items()}
            used = _tensors(value, arrived)
        elif type(value) is not Tensor:
            value = replace_tensors(value, lambda tensor: tensor)  # a layer may change the dict that it is given
        return StageInput(value, arrived, main, given, used, [version(tensor) for tensor in used], copied)

    def check(self, inputs: StageInput, modes: Modes, stage: object) -> frozenset[int]:
        """Looks at what the stage did to what it worked on, and refuses what would differ without the cut.

        Gives the ids of what it was given and changed, or would have.
        """
        changed = [at for at, tensor in enumerate(inputs.used) if version(tensor) != inputs.versions[at]]
        ids = frozenset(id(inputs.given[at]) for at in changed)
        if not changed and (modes in self.works_in_place or any(tensor.is_inference() for tensor in inputs.used)):
            return ids
        self.works_in_place[modes] = bool(changed) or self.works_in_place.get(modes, False)
        if changed and not inputs.copied:
            raise RuntimeError(f"{stage} has {BEGUN_IN_PLACE}")
        if any(_share_storage(inputs.given[at], other) for at in changed for other in tensors_in(inputs.main)):
            raise RuntimeError(f"{stage} changes {SHARED_IN_PLACE}")
        return ids

    def forget(self, modes: Modes) -> None:
        """Finds out anew: the stage may have begun to work in place, which torch refuses on a leaf."""
        self.works_in_place.pop(modes, None)


def _tensors(value: Tree, arrived: Mapping[str, Tensor | None]) -> list[Tensor]:
    return [*tensors_in(value), *(tensor for tensor in arrived.values() if tensor is not None)]


def _copy(tensor: Tensor) -> Tensor:
    """A copy that lies like the tensor, so that later runs without a copy give the same bits."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor  # expanded: torch itself refuses to work on it in place
    return carry_attributes(tensor, copy_of(tensor))


def _share_storage(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
