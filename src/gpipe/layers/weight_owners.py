"""Refuses a backward that reaches the weights of another stage: one stage alone adds to a gradient, in order."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from gpipe.layers.stage import Stage
from gpipe.values.autograd_graph import leaves_of

FOREIGN = (
    "the backward of {stage} reaches {name}, which is not its own: by a reference past the layers, in loss_fn, or in "
    "a tensor that was left on a module{left}. Several partitions would add to its gradient at once. Hand on what is "
    "needed as part of the value, or stash it and pop it where it is used, in the loss too (loss_fn.pop); let a "
    "weight that several layers use be a parameter of each of them"
)


class WeightOwners:
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

    def check(self, stage: int, roots: Sequence[Tensor], given: Iterable[Tensor]) -> None:
        """Checks the first backward of a stage in a run; `given` are the leaves of what it was given.

        Raises:
            RuntimeError: It reaches a weight of another stage.
        """
        if stage in self._checked:
            return
        self._checked.add(stage)
        own = set(map(id, given))
        for leaf in leaves_of(roots):
            if id(leaf) in own:
                continue
            home, name = self._home.get(id(leaf), (stage, ""))
            first, _ = self._claims.setdefault(id(leaf), (stage, leaf))
            if home != stage or first != stage:
                words = name or f"a weight of shape {tuple(leaf.shape)}, which partition {first} uses too"
                graphs = tensors_left_on(self._stages.values(), graphs=True)
                left = f" ({graphs})" if graphs else ""
                raise RuntimeError(FOREIGN.format(stage=self._stages[stage], name=words, left=left))


HOOKED = (
    "{stage} puts a hook on a tensor that it is given (or retains its gradient), and another tensor that crosses the "
    "cut with it was made from it: behind the cut the hook would see a part of the gradient. Put the hook where the "
    "tensor is made, return a clone of the tensor for those who hook it, or keep both layers in one partition"
)


def tensors_left_on(stages: Iterable[Stage], *, graphs: bool = False) -> str:
    """In words, the attributes of modules where forwards left tensors, or such as have a graph."""
    found = [
        f"{name} of {layer}"
        for stage in stages
        for layer in stage.layers
        for module in layer.module.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not (value.is_leaf and (graphs or value.requires_grad))
    ]
    return ", ".join(dict.fromkeys(found))
