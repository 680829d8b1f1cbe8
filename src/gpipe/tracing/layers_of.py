"""Shows a model as the layers into which a pipe splits it, and distinguishes a model from a sequence of layers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import overload

import torch
from torch import nn

from gpipe._torch.modes import is_compiled
from gpipe.stages.quantized import numbers_in
from gpipe.stages.skips import Sequential
from gpipe.stages.tree import Tree
from gpipe.tracing.model import TracedModel
from gpipe.tracing.trace import Trace, ValueId


@dataclass(frozen=True)
class LiveValue:
    """A tensor that crosses the boundary between two layers.

    >>> LiveValue("embed", (2, 3), torch.float32).bytes
    24

    Attributes:
        name: The name of the module, function or input from which the tensor comes.
        shape: The shape of the tensor on the sample.
        dtype: The dtype of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of the tensor in bytes on the sample."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ModelLayer:
    """One layer of a model.

    >>> layers = layers_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.ones(2, 2))
    >>> layers[0].name, layers[0].kind, layers[0].parameters, len(layers[0].live)
    ('0', 'Linear', 9, 1)

    Attributes:
        index: The index of the layer, which keys its random numbers (`gpipe.rng_scope`).
        name: The name of the block in the layer, or of a module outside of blocks.
        kind: The class name of that block or module.
        modules: The names of the modules that run in the layer.
        parameters: The number of parameters in the layer. Tied parameters count in each layer that uses them.
        seconds: The time of one forward on the sample.
        live: The tensors that cross the boundary after the layer.
    """

    index: int
    name: str
    kind: str
    modules: tuple[str, ...]
    parameters: int
    seconds: float
    live: tuple[LiveValue, ...]


class ModelLayers(Sequence[ModelLayer]):
    """The layers of a model, in order. Pass them to `gpipe.GPipe` in place of the model.

    >>> layers = layers_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.ones(2, 2))
    >>> len(layers), layers[-1].name
    (2, '1')
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self._layers = tuple(
            ModelLayer(
                index,
                name,
                part.stands_for,
                part.units,
                sum(map(numbers_in, part.parameters())),
                traced.seconds[index],
                tuple(_live(traced.traces[0], value_id) for value_id in traced.traces[0].live_before(index + 1)),
            )
            for index, (name, part) in enumerate(traced.layers.items())
        )

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> ModelLayer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ModelLayer]: ...
    def __getitem__(self, index: int | slice) -> ModelLayer | Sequence[ModelLayer]:
        return self._layers[index]

    def rng_scope(self, seed: int, step: int, micro_batch: int) -> AbstractContextManager[None]:
        """Returns a context in which a forward of the model itself uses the same random numbers as a pipe.

        Hooks of the blocks enter `gpipe.rng_scope(seed, step, layer, micro_batch)` for one layer after another. A
        layer ends when its block returns. The first layer also ends when the first block is called.
        """
        return self.traced.rng_scope(seed, step, micro_batch)

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self)
        lines = [f"{'layer':>5}  {'name':<{width}}  {'parameters':>12}  {'ms':>7}  live after it"]
        for layer in self:
            live = ", ".join(f"{value.name} {'x'.join(map(str, value.shape))}" for value in layer.live)
            milliseconds = f"{layer.seconds * 1e3:.2f}"
            lines.append(
                f"{layer.index:>5}  {layer.name:<{width}}  {layer.parameters:>12,}  {milliseconds:>7}  {live}"
            )
        return "\n".join(lines)


def _live(trace: Trace, value_id: ValueId) -> LiveValue:
    shape, dtype = trace.layouts[value_id]
    if value_id.op < 0:
        return LiveValue(f"input {value_id.leaf}", shape, dtype)
    return LiveValue(trace.ops[value_id.op].name + (f"[{value_id.leaf}]" if value_id.leaf else ""), shape, dtype)


def layers_of(model: nn.Module, sample: Tree, blocks: Sequence[str] | None = None) -> ModelLayers:
    """Splits a model into layers, as a pipe does. Shows the tensors that cross each boundary between layers.

    Args:
        model: Any module. `layers_of` does not change the module.
        sample: An example micro-batch: the arguments of a call of the model.
        blocks: The names of the modules between which to split the model. Default: the modules in the model's
            `_no_split_modules`, or else the members of its lists of modules.

    Returns:
        The layers. Pass them to `gpipe.GPipe` in place of the model.

    Raises:
        ValueError: If the model cannot be split with bitwise identical results. The message contains the reason and a
            fix.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = nn.Embedding(10, 4)
        ...         self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        ...     def forward(self, tokens):
        ...         value = self.embed(tokens)
        ...         for block in self.blocks:
        ...             value = value + block(value).relu()
        ...         return value
        >>> layers = layers_of(Net(), torch.zeros(2, 3, dtype=torch.int64))
        >>> [layer.name for layer in layers]
        ['embed', 'blocks.0', 'blocks.1', 'operations_3']
        >>> [value.name for value in layers[1].live]
        ['embed', 'blocks.0']
    """
    _check_is_plain(model)
    return ModelLayers(TracedModel(model, sample, blocks))


SCRIPTED = (
    "{model} is scripted, so gpipe cannot trace it. Pass the original model, which is not scripted. "
    "[torchscript-module]"
)
SCRIPTED_MODULE = (
    "{name}: this module of {model} is scripted, so gpipe cannot check its state. Use the original module, "
    "which is not scripted. [torchscript-module]"
)
LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_model(value: object) -> bool:
    """Whether a value is a model that defines its own forward, and not a sequence of layers.

    >>> class Net(nn.Sequential):
    ...     def forward(self, x): return super().forward(x) + x
    >>> is_model(nn.Sequential()), is_model(Net()), is_model(nn.Linear(2, 2)), is_model([nn.Linear(2, 2)])
    (False, True, True, False)
    """
    if isinstance(value, (ModelLayers, torch.jit.ScriptModule)):
        return True
    sequential_forwards = (nn.Sequential.forward, Sequential.forward)
    return (
        isinstance(value, nn.Module)
        and type(value).forward not in sequential_forwards
        and not isinstance(value, LISTS)
    )


def read_model(model: object, sample: Tree) -> TracedModel | None:
    """Traces a model on a sample. Returns None for a sequence of layers, or without a sample."""
    if isinstance(model, ModelLayers):
        return model.traced
    if not isinstance(model, nn.Module) or not is_model(model):
        return None
    _check_is_plain(model)
    return None if sample is None else TracedModel(model, sample, None)


def _check_is_plain(model: nn.Module) -> None:
    """Raises an error if a model is compiled or scripted, or contains scripted modules."""
    name = type(model).__name__
    if is_compiled(model):
        raise ValueError(
            f"{name} is compiled as a whole, so gpipe cannot trace it. Pass the original model (._orig_mod after "
            f"torch.compile), and compile its blocks instead. [compiled-model]"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(SCRIPTED.format(model=name))
    if scripted := [name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]:
        raise ValueError(SCRIPTED_MODULE.format(name=scripted[0], model=name))


def why_not_layers(model: object) -> list[str]:
    """Returns a message if the user passed a model that must be traced, but no sample."""
    if is_model(model):
        return [
            f"{type(model).__name__} is not a sequence of layers. Pass sample=, an example mini-batch on which gpipe "
            f"traces its forward, or pass an nn.Sequential of its layers. [sample-required]"
        ]
    return []
