"""Traces a model on a sample, and proves that in layers it gives what it gives by itself, to the last bit."""

import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe._torch.trees import keystr, tree_flatten_with_path
from gpipe.stages.losses import LossCall
from gpipe.stages.recompute_check import differ, digest
from gpipe.stages.stage import Layer, LayerProgress
from gpipe.tracing.checks import is_of_code, refuse_failing_apart, refusing_leftovers
from gpipe.tracing.interpreter import Enough, StageInterpreter
from gpipe.tracing.meta_model import Dry, lacks_values
from gpipe.tracing.runs import ForwardArguments, copied, watched
from gpipe.tracing.shallow_copy import Parts
from gpipe.tracing.stage import rng_scopes
from gpipe.tracing.trace import OpCall, Trace
from gpipe.tracing.tracer import SAMPLE_KEY, TracerRun, trace_forward
from gpipe.tracing.values import CannotSplitError, Leaves, Structure, ValueId, describe, is_carried, take_apart

OTHER_STRUCTURE = (
    "interpreted in layers, the {model} gives an output of other parts than by itself: {parts}. What is collected "
    "on the way from inside of blocks (output_hidden_states, output_attentions, output_router_logits, caches by "
    "use_cache) is not seen in layers; turn it off, in model.config or in what the model is given"
)
OTHER_BITS = (
    "interpreted in layers, the {model} gives other values than by itself: {what}. Something between blocks depends "
    "on what is not seen there (a cache, a value that one block leaves for another, a random number): let it be part "
    "of what blocks are given and return, or name other blocks: blocks=[...]. Or a block keeps a tensor from call to "
    "call as an attribute, of which nothing is known: let it be a buffer, self.register_buffer(name, tensor)"
)


class ProvenTrace(NamedTuple):
    """What was learnt of a model; `reads` is as of what one run has shown."""

    parts: Parts
    trace: Trace
    seconds: list[float]
    losses: list[LossCall]
    reads: str = ""


def prove(parts: Parts, given: ForwardArguments, traced: TracerRun | None = None) -> ProvenTrace:
    """Traces the trace of a model's forward, in the mode that it is in, and proves it.

    Args:
        parts: The model.
        given: What the forward is given.
        traced: What a run of it with the same has shown.

    Raises:
        CannotSplitError: It cannot be interpreted to the same bits.
    """
    found = trace_forward(parts, given) if traced is None else traced
    trace, parts, losses = found.trace, found.parts, found.losses
    if lacks_values(parts.model):
        return _proven_without_values(parts, given, found)
    own, expected = watched(parts.model, lambda: _called(parts, trace, given))
    (leaves, structure, seconds), buffers = watched(
        parts.model, lambda: _interpreted(parts, trace, given, writes=bool(expected))
    )
    _compare(parts.model, take_apart(own), (leaves, structure), expected, buffers)
    return ProvenTrace(parts, trace, seconds, losses, found.reads)


def _proven_without_values(parts: Parts, given: ForwardArguments, found: TracerRun) -> ProvenTrace:
    """Compares what can be without values: the layouts of what the interpreted layers give."""
    dry = Dry()
    with dry.faking(parts.model):
        leaves, structure, seconds = _interpreted(found.parts, found.trace, given, dry)
    expected, own = take_apart(found.output)
    if structure != own or describe(leaves) != describe(expected):
        raise CannotSplitError(
            OTHER_STRUCTURE.format(model=type(parts.model).__name__, parts=_in_words(own, structure))
        )
    return ProvenTrace(found.parts, found.trace, seconds, found.losses, found.reads)


def _called(parts: Parts, trace: Trace, given: ForwardArguments) -> Any:
    """What the model itself gives."""

    def call() -> Any:
        with rng_scopes(parts, trace, SAMPLE_KEY):
            return parts.model(*copied(given.args), **copied(given.kwargs))

    def again() -> None:
        watched(parts.model, call)

    copied_modules = parts.shallow_copy().copied_modules
    return refusing_leftovers(copied_modules, set(parts.opened), type(parts.model).__name__, call, again)


class _EchoingInterpreter(StageInterpreter):
    """Has each unit run once more behind its operation, on other inputs, and forgets what comes of it.

    So does a pipeline, whose micro-batches follow one another: what a block leaves somewhere for a later one is of
    another by the time it is read.
    """

    writes = False
    """Whether the forward writes buffers, which an echo must not."""
    seconds_of_echoes = 0.0

    def op(self, call: OpCall) -> Any:
        """Does an operation, and its echo; behind the last operation the interpreter stops by an exception."""
        is_own = self.begin <= self.at < self.end and call.unit is not None and self.dry is None
        try:
            made = super().op(call)
        except Enough:
            self._echo(call, is_own=is_own)
            raise
        self._echo(call, is_own=is_own)
        return made

    def _echo(self, call: OpCall, *, is_own: bool) -> None:
        if not is_own:
            return
        start = time.perf_counter()
        real = any(map(is_carried, call.tensors))
        other = call.given(lambda tensor: _other(tensor) if is_carried(tensor) or not real else tensor)
        try:
            if self.writes and other.unit is not None:
                watched(other.unit, other.do)
            else:
                other.do()
        except Exception as error:
            if not is_of_code(error):  # else it cannot do with them, or not twice with one cache
                error.add_note(ECHOED.format(name=call.name))
                raise
        self.seconds_of_echoes += time.perf_counter() - start


ECHOED = (
    "while {name} ran once more on rows in another order, or on smaller numbers, as another micro-batch may have "
    "them, to see that it leaves nothing behind for other layers"
)


def _other(tensor: Tensor) -> Tensor:
    """A tensor of the same kind that is another: rows in another order, or smaller numbers."""
    if isinstance(tensor, nn.Parameter) or not tensor.dim():
        return tensor
    other = tensor.detach().roll(1, 0 if len(tensor) > 1 else -1)
    if is_carried(tensor) and (len(tensor) == 1 or torch.equal(other, tensor)):
        other = tensor.detach() * 0.5
    return other.requires_grad_(tensor.requires_grad)


def _interpreted(
    parts: Parts,
    trace: Trace,
    given: ForwardArguments,
    dry: Dry | None = None,
    *,
    writes: bool = False,
    again: bool = False,
) -> tuple[Leaves, Structure, list[float]]:
    """What the model gives when each layer is interpreted by itself, and the seconds that each takes.

    `writes` is whether its forward writes buffers, `again` whether an error is to be left as it is.
    """
    leaves, _ = take_apart(copied((given.args, given.kwargs)))
    values: dict[ValueId, Tensor | None] = {value_id: leaves[value_id.leaf] for value_id in trace.carried}
    inputs = [None if ValueId(-1, at) in values else leaf for at, leaf in enumerate(leaves)]
    log = [describe(leaves)]
    shallow_copy = parts.shallow_copy()
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    seconds, output = [], None
    for index in range(len(trace.starts)):
        start = time.perf_counter()
        arrived = {value_id: values[value_id] for value_id in trace.live_before(index)} if index else values
        wanted = frozenset(edge.value_id for edge in trace.edges if edge.source <= index < edge.target)
        layer = Layer(index, str(index), parts.model)
        shallow_copy.refresh()
        interpreter = _EchoingInterpreter(
            shallow_copy, trace, [layer], arrived, log, wanted, device, SAMPLE_KEY, LayerProgress(), dry
        )
        interpreter.writes = writes
        try:
            output = interpreter.go(inputs)
        except Exception as error:
            if not again:
                run_apart = partial(_interpreted, parts, trace, given, dry, writes=writes, again=True)
                refuse_failing_apart(parts.model, given, error, run_apart)
            raise
        values = dict(interpreter.made)
        values |= dict.fromkeys(wanted - values.keys())
        seconds.append(time.perf_counter() - start - interpreter.seconds_of_echoes)
    return *take_apart(output), seconds


def _compare(
    model: nn.Module,
    own: tuple[Leaves, Structure],
    found: tuple[Leaves, Structure],
    buffers: dict[str, Tensor | None],
    changed: dict[str, Tensor | None],
) -> None:
    """Compares structure and bits of the outputs, and the buffers behind them."""
    name = type(model).__name__
    if own[1] != found[1] or len(own[0]) != len(found[0]):
        raise CannotSplitError(OTHER_STRUCTURE.format(model=name, parts=_in_words(own[1], found[1])))
    for at, (one, other) in enumerate(zip(own[0], found[0], strict=True)):
        if bool(differ(digest([one]), digest([other]))):
            what = f"output{_place_of(own[1], at)} {difference(one, other)}"
            raise CannotSplitError(OTHER_BITS.format(model=name, what=what))
    for buffer in {*buffers, *changed}:
        if bool(differ(digest([buffers.get(buffer)]), digest([changed.get(buffer)]))):
            raise CannotSplitError(OTHER_BITS.format(model=name, what=f"the buffer {buffer}"))


def _place_of(structure: Structure, at: int) -> str:
    """Where a leaf stands; its number, where plain dataclasses hold some."""
    traces = tree_flatten_with_path(structure.filled(range(structure.count)))[0]
    return keystr(traces[at][0]) if len(traces) == structure.count else f", leaf {at},"


def difference(one: Any, other: Any) -> str:
    """How one leaf of an output differs from what it should be, in words.

    >>> difference(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    'differs in 1 of 3 values, by 1 at most'
    >>> difference(torch.ones(2), torch.ones(3))
    'is torch.float32 (3,) where it should be torch.float32 (2,)'
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return f"is {other!s:.80} where it should be {one!s:.80}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"is {other.dtype} {tuple(other.shape)} where it should be {one.dtype} {tuple(one.shape)}"
    one, other = one.detach(), other.detach()
    unlike = (one != other) & ~(one.isnan() & other.isnan())
    if not unlike.any():
        return "differs in the signs of zeros, or in what NaNs hold"
    wide = torch.complex128 if one.is_complex() else torch.float64
    most = (one.to(wide) - other.to(wide)).abs()[unlike].max()
    return f"differs in {int(unlike.sum())} of {one.numel()} values, by {float(most):.3g} at most"


def _in_words(one: Structure, other: Structure) -> str:
    return f"{str(other.spec)[:200]} where it gives {str(one.spec)[:200]}"
