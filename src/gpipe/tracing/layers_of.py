"""Shows a model as the layers that a pipe cuts it into.

Tells a model from a sequence of layers, and traces it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import overload

import torch
from torch import nn

from gpipe._torch.modes import is_compiled
from gpipe.stages.invalid_layers import OF_TORCHSCRIPT
from gpipe.stages.quantized import numbers_in
from gpipe.stages.skips import Sequential
from gpipe.stages.tree import Tree
from gpipe.tracing.model import TracedModel
from gpipe.tracing.trace import Trace, ValueId


@dataclass(frozen=True)
class LiveValue:
    """A tensor that crosses a cut.

    >>> LiveValue("embed", (2, 3), torch.float32).bytes
    24

    Attributes:
        name: What made it: a module, a function, or an input.
        shape: On the sample.
        dtype: Its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size on the sample."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ModelLayer:
    """One layer of a model.

    >>> layers = layers_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.ones(2, 2))
    >>> layers[0].name, layers[0].kind, layers[0].parameters, len(layers[0].live)
    ('0', 'Linear', 9, 1)

    Attributes:
        index: Its number, which keys its randomness (`gpipe.rng_scope`).
        name: That of the block, or of a module beside blocks.
        kind: The class of that.
        modules: The names of the modules that run in it.
        parameters: How many numbers it learns; what is tied counts in each layer.
        seconds: What its forward took on the sample, once.
        live: What crosses a cut behind it.
    """

    index: int
    name: str
    kind: str
    modules: tuple[str, ...]
    parameters: int
    seconds: float
    live: tuple[LiveValue, ...]


class ModelLayers(Sequence[ModelLayer]):
    """The layers of a model, in order; `gpipe.GPipe` takes them in place of the model.

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
    def __getitem__(self, at: int) -> ModelLayer: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ModelLayer]: ...
    def __getitem__(self, at: int | slice) -> ModelLayer | Sequence[ModelLayer]:
        return self._layers[at]

    def rng_scope(self, seed: int, step: int, micro_batch: int) -> AbstractContextManager[None]:
        """A context around one forward of the model itself: it draws random numbers as a pipe of it does.

        By forward hooks of the blocks it enters `gpipe.rng_scope(seed, step, layer, micro_batch)` for one layer after
        another: the next begins where a block has returned, and behind the first where the first block is called.
        """
        return self.traced.rng_scope(seed, step, micro_batch)

    def __str__(self) -> str:
        wide = max(len(layer.name) for layer in self)
        lines = [f"{'layer':>5}  {'name':<{wide}}  {'parameters':>12}  {'ms':>7}  live behind it"]
        for layer in self:
            live = ", ".join(f"{value.name} {'x'.join(map(str, value.shape))}" for value in layer.live)
            milliseconds = f"{layer.seconds * 1e3:.2f}"
            lines.append(
                f"{layer.index:>5}  {layer.name:<{wide}}  {layer.parameters:>12,}  {milliseconds:>7}  {live}"
            )
        return "\n".join(lines)


def _live(trace: Trace, value_id: ValueId) -> LiveValue:
    shape, dtype = trace.layouts[value_id]
    if value_id.op < 0:
        return LiveValue(f"input {value_id.leaf}", shape, dtype)
    return LiveValue(trace.ops[value_id.op].name + (f"[{value_id.leaf}]" if value_id.leaf else ""), shape, dtype)


def layers_of(model: nn.Module, sample: Tree, blocks: Sequence[str] | None = None) -> ModelLayers:
    """The layers that a pipe would cut a model into, and what lives at each cut between them.

    Args:
        model: Any module; it stays as it is.
        sample: An example micro-batch: what a call of the model is given.
        blocks: The names of the modules between which it may be cut; by default those that the model says are not
            to be split, else the members of its lists of modules.

    Raises:
        ValueError: The model cannot be cut so that it gives the same bits; says why, and what to do.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = nn.Embedding(10, 4)
        ...         self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        ...     def forward(self, words):
        ...         value = self.embed(words)
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


COMPILED = (
    "give the model itself (torch.compile(model) keeps it as ._orig_mod; after model.compile() make it anew), and "
    "compile its blocks: for block in model.layers: block.compile()"
)
SCRIPTED = "give the model that was scripted"
LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_model(given: object) -> bool:
    """Whether what is given as layers is a model with a forward of its own.

    >>> class Net(nn.Sequential):
    ...     def forward(self, x): return super().forward(x) + x
    >>> is_model(nn.Sequential()), is_model(Net()), is_model(nn.Linear(2, 2)), is_model([nn.Linear(2, 2)])
    (False, True, True, False)
    """
    if isinstance(given, (ModelLayers, torch.jit.ScriptModule)):
        return True
    own = (nn.Sequential.forward, Sequential.forward)
    return isinstance(given, nn.Module) and type(given).forward not in own and not isinstance(given, LISTS)


def read_model(given: object, sample: Tree) -> TracedModel | None:
    """The model as layers; None if these are layers already, or there is no sample to trace it on."""
    if isinstance(given, ModelLayers):
        return given.traced
    if not isinstance(given, nn.Module) or not is_model(given):
        return None
    _check_is_plain(given)
    return None if sample is None else TracedModel(given, sample, None)


def _check_is_plain(given: nn.Module) -> None:
    """Rejects a model that is compiled or scripted, or has scripted parts: what it does cannot be traced."""
    if is_compiled(given) or isinstance(given, torch.jit.ScriptModule):
        what, instead = ("compiled", COMPILED) if is_compiled(given) else ("scripted", SCRIPTED)
        raise ValueError(f"the model is {what} as a whole, and what it does cannot be seen any more; {instead}")
    if scripted := [name for name, part in given.named_modules() if isinstance(part, torch.jit.ScriptModule)]:
        raise ValueError(f"{scripted[0]} in the {type(given).__name__} {OF_TORCHSCRIPT}")


def why_not_layers(given: object) -> list[str]:
    """What is wrong with what is to be layers, since there is no sample to make a model some on."""
    if is_model(given):
        return [
            f"a {type(given).__name__} is no sequence of layers; give sample=, an example mini-batch, on which its "
            f"forward is recorded to be cut into layers, or give an nn.Sequential of its layers"
        ]
    return []
