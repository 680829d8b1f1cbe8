"""Whose weights a backward reaches: all of a weight's gradient must come from one stage, to be added up in order."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from gpipe.run.stage import Stage

FOREIGN = (
    "the backward of {stage} reaches {name}, which is not its own: by a reference past the layers, in loss_fn, or in "
    "a tensor that was kept on a module. Several partitions would add to its gradient at once. Hand on what is "
    "needed as part of the value, or stash it and pop it where it is used, in the loss too (loss_fn.pop); let a "
    "weight that several layers use be a parameter of each of them"
)


class Owners:
    """Which stage each weight of a run belongs to."""

    def __init__(self, stages: Sequence[Stage], shared: Iterable[Tensor]) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._home: dict[int, tuple[int, str]] = {}
        for stage in stages:
            for layer in stage.layers:
                for name, parameter in layer.module.named_parameters():
                    self._home[id(parameter)] = stage.index, f"{name} of {layer}"
        for weight in shared:  # layers have aliases of these, and nothing else may use them
            self._home[id(weight)] = -1, self._home[id(weight)][1]
        self._claims: dict[int, tuple[int, Tensor]] = {}  # of what belongs to no layer, the first stage that came
        self._checked: set[int] = set()

    def check(self, stage: int, roots: Sequence[Tensor]) -> None:
        """Checks the first backward of a stage in a run.

        Raises:
            RuntimeError: It reaches a weight of another stage.
        """
        if stage in self._checked:
            return
        self._checked.add(stage)
        for leaf in leaves_of(roots):
            home, name = self._home.get(id(leaf), (stage, ""))
            first, _ = self._claims.setdefault(id(leaf), (stage, leaf))
            if home != stage or first != stage:
                words = name or f"a weight of shape {tuple(leaf.shape)}, which partition {first} uses too"
                raise RuntimeError(FOREIGN.format(stage=self._stages[stage], name=words))


def leaves_of(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves that autograd would reach from these tensors.

    >>> import torch
    >>> weight = torch.ones(2, requires_grad=True)
    >>> [leaf is weight for leaf in leaves_of([(weight * 2).sum()])]
    [True]
    """
    todo: list[Node] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                todo.append(behind)
