"""Refuses buffers that several partitions would write: running statistics, those of one module or in one memory."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from gpipe.layers.buffers import Slot
from gpipe.layers.stage import Layer, Stage, stage_of_layers
from gpipe.values.layout import storage_address
from gpipe.values.tree import version


def find_shared_norm(stages: Sequence[Stage]) -> str | None:
    """Why the stages cannot be run, if running statistics of one module belong to several."""
    home: dict[nn.Module, int] = {}
    for stage in stages:
        for layer in stage.layers:
            for module in layer.module.modules():
                first = home.setdefault(module, stage.index)
                if first != stage.index and isinstance(module, _NormBase) and module.track_running_stats:
                    return (
                        f"{layer} uses a {type(module).__name__} that partition {first} uses too, and its running "
                        f"statistics would depend on which comes first; use one module for each, or put the layers "
                        f"into one partition"
                    )
    return None


def find_shared_buffers(stages: Sequence[Stage]) -> dict[Slot, str]:
    """The buffers that several partitions see, each with a layer of another: of one module, or in one memory."""
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
    """Watches the buffers that several partitions see: a change would depend on which of them comes first."""

    def __init__(self, shared_buffers: Mapping[Slot, str]) -> None:
        self._shared = shared_buffers
        tensors = [module._buffers.get(name) for module, name in shared_buffers]
        self._before = [(tensor, 0 if tensor is None else version(tensor)) for tensor in tensors]

    def check(self) -> None:
        """Checks that no shared buffer was changed.

        Raises:
            RuntimeError: Some were.
        """
        states = zip(self._shared.items(), self._before, strict=True)
        changed = [
            f"{place[1]} ({users})"
            for (place, users), (tensor, before) in states
            if place[0]._buffers.get(place[1]) is not tensor or (tensor is not None and version(tensor) != before)
        ]
        if changed:
            raise RuntimeError(
                f"a forward changed a buffer that layers of several partitions use, so that the result depends on "
                f"which comes first: {', '.join(changed)}; use one module for each, or put the layers into one "
                f"partition"
            )
