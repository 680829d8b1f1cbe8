"""Refuses stages that reach into each other: weights in a backward, buffers in a forward.

All of a weight's gradient must come from one stage, to be added up in order; what a buffer holds would depend on
which of its stages comes first.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from torch import Tensor, nn

from gpipe._torch.modules import NormWithStatistics
from gpipe.stages.boundary import leaves_of
from gpipe.stages.buffers import Slot
from gpipe.stages.layout import storage_address
from gpipe.stages.stage import Layer, Stage, stage_of_layers
from gpipe.stages.tree import version

FOREIGN = (
    "the backward of {stage} reaches {name}, which is not its own: by a reference past the layers, in loss_fn, or in "
    "a tensor that was left on a module{left}. Several partitions would add to its gradient at once. Hand on what is "
    "needed as part of the value, or stash it and pop it where it is used, in the loss too (loss_fn.pop); let a "
    "weight that several layers use be a parameter of each of them"
)
HOOKED = (
    "{stage} puts a hook on a tensor that it is given (or retains its gradient), and another tensor that crosses the "
    "cut with it was made from it: behind the cut the hook would see a part of the gradient. Put the hook where the "
    "tensor is made, return a clone of the tensor for those who hook it, or keep both layers in one partition"
)


class WeightOwners:
    """Which stage each weight of a run belongs to."""

    def __init__(self, stages: Sequence[Stage], shared: Iterable[Tensor]) -> None:
        self._stages = stages
        self._home: dict[int, int] = {}
        for stage in stages:
            for layer in stage.layers:
                self._home.update(dict.fromkeys(map(id, layer.module.parameters()), stage.index))
        for weight in shared:  # layers have aliases of these, and nothing else may use them
            self._home[id(weight)] = -1
        self._claims: dict[int, tuple[int, Tensor]] = {}  # of what belongs to no layer, the first stage that came
        self._checked: set[int] = set()

    def check(self, stage: int, roots: Sequence[Tensor], given: Iterable[Tensor]) -> None:
        """Checks that a stage's first backward in a run reaches no weight of others; `given` are its input leaves."""
        if stage in self._checked:
            return
        self._checked.add(stage)
        own = set(map(id, given))
        for leaf in leaves_of(roots):
            if id(leaf) in own:
                continue
            first, _ = self._claims.setdefault(id(leaf), (stage, leaf))
            if self._home.get(id(leaf), stage) != stage or first != stage:
                self._refuse(stage, leaf, first)

    def _refuse(self, at: int, leaf: Tensor, first: int) -> NoReturn:
        names = [
            f"{name} of {layer}"
            for stage in self._stages
            for layer in stage.layers
            for name, parameter in layer.module.named_parameters()
            if parameter is leaf
        ]
        name = names[-1] if names else f"a weight of shape {tuple(leaf.shape)}, which stage {first} uses too"
        graphs = tensors_left_on(self._stages, graphs=True)
        left = f" ({graphs})" if graphs else ""
        (own,) = (stage for stage in self._stages if stage.index == at)
        raise RuntimeError(FOREIGN.format(stage=own, name=name, left=left))


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


def find_shared_norm(stages: Sequence[Stage]) -> str | None:
    """Why the stages cannot be run, if running statistics of one module belong to several."""
    home: dict[nn.Module, int] = {}
    for stage in stages:
        for layer in stage.layers:
            for module in layer.module.modules():
                first = home.setdefault(module, stage.index)
                if first != stage.index and isinstance(module, NormWithStatistics) and module.track_running_stats:
                    return (
                        f"{layer} uses a {type(module).__name__} that stage {first} uses too, and its running "
                        f"statistics would depend on which comes first; use one module for each, or put the layers "
                        f"into one stage"
                    )
    return None


def find_shared_buffers(stages: Sequence[Stage]) -> dict[Slot, str]:
    """The buffers that several stages see, each with a layer of another: of one module, or in one memory."""
    home: dict[object, Layer] = {}
    stage_of = stage_of_layers(stages)
    found: dict[Slot, str] = {}
    for layer in (layer for stage in stages for layer in stage.layers):
        for module in layer.module.modules():
            for name, buffer in module._buffers.items():
                for seen in (
                    module,
                    *([storage_address(buffer)] if buffer is not None and storage_address(buffer) else []),
                ):
                    first = home.setdefault(seen, layer)
                    if stage_of[first.index] != stage_of[layer.index]:
                        found[module, name] = f"{first} and {layer}"
    return found


class SharedBufferCheck:
    """Watches the buffers that several stages see: a change would depend on which of them comes first."""

    def __init__(self, shared_buffers: Mapping[Slot, str]) -> None:
        self._shared = shared_buffers
        tensors = [module._buffers.get(name) for module, name in shared_buffers]
        self._before = [(tensor, 0 if tensor is None else version(tensor)) for tensor in tensors]

    def check(self) -> None:
        """Checks that no shared buffer was changed."""
        states = zip(self._shared.items(), self._before, strict=True)
        changed = [
            f"{place[1]} ({users})"
            for (place, users), (tensor, before) in states
            if place[0]._buffers.get(place[1]) is not tensor or (tensor is not None and version(tensor) != before)
        ]
        if changed:
            raise RuntimeError(
                f"a forward changed a buffer that layers of several stages use, so that the result depends on "
                f"which comes first: {', '.join(changed)}; use one module for each, or put the layers into one "
                f"stage"
            )
