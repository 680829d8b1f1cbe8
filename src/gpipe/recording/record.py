"""Records a model on a sample, and proves that in layers it gives what it gives by itself, to the last bit."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gpipe.costs.layer_run import untouched
from gpipe.layers.stage import Layer, LayerProgress, RngKey
from gpipe.recording.arguments import Given, names_taken
from gpipe.recording.leftovers import LEAVES_TENSORS, refuse_failing_apart, refuse_kept, refusing_leftovers
from gpipe.recording.loss_calls import LossCall
from gpipe.recording.recorder import Recorder
from gpipe.replay.dry import Dry, lacks_values
from gpipe.replay.errors import CannotSplitError
from gpipe.replay.layout_log import describe
from gpipe.replay.path import Path, Tag
from gpipe.replay.replay import Replay
from gpipe.replay.skeleton import Parts
from gpipe.replay.structure import Leaves, Structure, take_apart
from gpipe.replay.visits import visiting
from gpipe.rng.visit import visit
from gpipe.torch_private.fakes import is_fake
from gpipe.torch_private.modules import hooks_of
from gpipe.torch_private.trees import keystr, tree_flatten_with_path
from gpipe.values.digest import differ, digest
from gpipe.values.layout import copy_of
from gpipe.values.tree import replace_tensors, version

T = TypeVar("T")

KEY = RngKey(0, 0, 0)
"""When a sample is, for its random numbers."""

DRAWS = (
    "the forward of the {model} draws from {whose} generator between blocks, and every layer would draw anew. Layers "
    "that are dropped at random do so (set layerdrop or layer_drop to 0), and masks over speech "
    "(apply_spec_augment=False, or mask_time_prob and mask_feature_prob 0); let anything else draw by torch, or in a "
    "block"
)
ON_SAMPLE = (
    "while the {model} ran, whole, to be recorded: on the sample, or on the first mini-batch of another kind; "
    "give what model(...) takes: a dict for keywords, anything else for its one argument"
)
ONE_ARGUMENT = (
    "the {kind} that was given is one argument of the forward; for several give a dict, with those of these keys "
    "that it needs: {names}"
)
WRITES_BUFFER = (
    "the forward of the {model} writes the buffer {name} between blocks, and every layer would do so; let a "
    "module inside of a block have it, or one of its own that is called"
)
OTHER_STRUCTURE = (
    "replayed in layers, the {model} gives an output of other parts than by itself: {parts}. What is collected "
    "on the way from inside of blocks (output_hidden_states, output_attentions, output_router_logits, caches by "
    "use_cache) is not seen by a replay; turn it off, in model.config or in what the model is given"
)
OTHER_BITS = (
    "replayed in layers, the {model} gives other values than by itself: {what}. Something between blocks depends "
    "on what is not seen there (a cache, a tensor left on a module, a random number): let it be part of what blocks "
    "are given and return, or name other blocks. Or a block keeps a tensor from call to call as an attribute, of "
    "which nothing is known: let it be a buffer, self.register_buffer(name, tensor)"
)


class Traced(NamedTuple):
    """What one run of a forward has shown."""

    output: Any
    path: Path
    parts: Parts
    losses: list[LossCall]


class Recorded(NamedTuple):
    """What was learnt of a model."""

    parts: Parts
    path: Path
    seconds: list[float]
    losses: list[LossCall]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back what recordings inside change: modules, their state, torch's generator. Inside there is a graph.

    It shows what torch does not: functions of autograd.
    """
    with untouched(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def record(parts: Parts, given: Given, traced: Traced | None = None) -> Recorded:
    """Records the path of a model's forward, in the mode that it is in, and proves it.

    Args:
        parts: The model.
        given: What the forward is given.
        traced: What a run of it with the same has shown.

    Raises:
        CannotSplitError: It cannot be replayed to the same bits.
    """
    found = trace(parts, given) if traced is None else traced
    _, path, parts, losses = found
    if lacks_values(parts.model):
        return _proven_without_values(parts, given, found)
    own, expected = _watched(parts.model, lambda: _called(parts, path, given))
    (leaves, structure, seconds), buffers = _watched(parts.model, lambda: _replayed(parts, path, given))
    _compare(parts.model, take_apart(own), (leaves, structure), expected, buffers)
    return Recorded(parts, path, seconds, losses)


def _proven_without_values(parts: Parts, given: Given, found: Traced) -> Recorded:
    """Compares what can be without values: the layouts of what the replayed layers give."""
    dry = Dry()
    with dry.faking(parts.model):
        leaves, structure, seconds = _replayed(found.parts, found.path, given, dry)
    expected, own = take_apart(found.output)
    if structure != own or describe(leaves) != describe(expected):
        raise CannotSplitError(
            OTHER_STRUCTURE.format(model=type(parts.model).__name__, parts=_in_words(own, structure))
        )
    return Recorded(found.parts, found.path, seconds, found.losses)


def trace(parts: Parts, given: Given) -> Traced:
    """The path, the parts with modules known that keep state without parameters, and the losses that were called."""
    hooked = {name for name, module in parts.skeleton().walked.items() if hooks_of(module)} - parts.opened
    parts = replace(parts, stateful=parts.stateful | hooked)
    dry = Dry() if lacks_values(parts.model) else None
    faking = nullcontext() if dry is None else dry.faking(parts.model)
    with faking:
        found, stateful = _traced(parts, given, dry)
    return trace(replace(parts, stateful=parts.stateful | stateful), given) if stateful else found


def _traced(parts: Parts, given: Given, dry: Dry | None) -> tuple[Traced, set[str]]:
    visits: dict[int, visit] = {}

    def around(layer: int) -> visit:
        if layer not in visits:
            visits[layer] = visit(KEY.seed, KEY.step, layer, KEY.micro_batch)
        return visits[layer]

    skeleton = parts.skeleton()
    skeleton.refresh()
    recorder = Recorder(skeleton, parts.model, parts.blocks, around, dry)
    before = _generators()
    try:
        (output, path), changed = _watched(parts.model, lambda: recorder.record(*given))
    except CannotSplitError:
        raise
    except Exception as error:
        if dry is None and _runs(parts.model, given):
            refuse_failing_apart(parts.model, error, recorder.left_behind())
        error.add_note(ON_SAMPLE.format(model=type(parts.model).__name__))
        if isinstance(error, TypeError) and given.args and isinstance(given.args[0], (tuple, list)):
            error.add_note(ONE_ARGUMENT.format(kind=type(given.args[0]).__name__, names=names_taken(parts.model)))
        raise
    refuse_kept(parts.model, given)
    if left := recorder.left_behind():
        raise CannotSplitError(LEAVES_TENSORS.format(model=type(parts.model).__name__, places=", ".join(left)))
    for whose, state in _generators().items():
        if not _same(before[whose], state):
            raise CannotSplitError(DRAWS.format(model=type(parts.model).__name__, whose=whose))
    apart = {part for unit in skeleton.units.values() for part in unit.modules()}
    stateful = set()
    for name, module in parts.model.named_modules():
        for leaf in module._buffers if module not in apart else ():
            buffer = f"{name}.{leaf}" if name else leaf
            if buffer in changed:
                if name in parts.opened:
                    raise CannotSplitError(WRITES_BUFFER.format(model=type(parts.model).__name__, name=buffer))
                stateful.add(name)
    return Traced(output, path, parts, recorder.losses), stateful


def _runs(model: nn.Module, given: Given) -> bool:
    """Whether a model by itself takes the sample."""
    try:
        _watched(model, lambda: model(*copied(given.args), **copied(given.kwargs)))
    except Exception:
        return False
    return True


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Has a model be in training mode or not, and puts back the mode of each module."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _generators() -> dict[str, Any]:
    return {
        "Python's": random.getstate(),
        "numpy's": np.random.get_state(),
        "torch's": torch.default_generator.get_state(),
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return bool(np.all(one == other))


def _watched(model: nn.Module, run: Callable[[], T]) -> tuple[T, dict[str, Tensor | None]]:
    """What a run gives, and the buffers that it wrote, with their new values; they are put back."""
    before = {
        f"{path}.{key}".lstrip("."): (module._buffers, key, buffer, copy_of(buffer), version(buffer))
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and not is_fake(buffer)
    }
    made = run()
    changed: dict[str, Tensor | None] = {}
    with torch.no_grad():
        for name, (held, key, buffer, copy, was) in before.items():
            now = held.get(key)
            if now is not buffer or version(buffer) != was:
                changed[name] = None if now is None else copy_of(now)
                held[key] = buffer
                buffer.copy_(copy)
    return made, changed


def _called(parts: Parts, path: Path, given: Given) -> Any:
    """What the model itself gives."""

    def call() -> Any:
        with visiting(parts, path, KEY):
            return parts.model(*copied(given.args), **copied(given.kwargs))

    def again() -> None:
        _watched(parts.model, call)

    walked = parts.skeleton().walked
    return refusing_leftovers(walked, set(parts.opened), type(parts.model).__name__, call, again)


def copied(value: Any) -> Any:
    """Inputs for a forward to keep: it may work on them in place."""
    return replace_tensors(value, copy_of)


def _replayed(
    parts: Parts, path: Path, given: Given, dry: Dry | None = None
) -> tuple[Leaves, Structure, list[float]]:
    """What the model gives when each layer is replayed by itself, and the seconds that each takes."""
    leaves, _ = take_apart(copied((given.args, given.kwargs)))
    values: dict[Tag, Tensor | None] = {tag: leaves[tag.leaf] for tag in path.carried}
    inputs = [None if Tag(-1, at) in values else leaf for at, leaf in enumerate(leaves)]
    log = [describe(leaves)]
    skeleton = parts.skeleton()
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    seconds, output = [], None
    for index in range(len(path.starts)):
        start = time.perf_counter()
        arrived = {tag: values[tag] for tag in path.live_before(index)} if index else values
        wanted = frozenset(hop.tag for hop in path.hops if hop.source <= index < hop.target)
        layer = Layer(index, str(index), parts.model)
        skeleton.refresh()
        walk = Replay(skeleton, path, [layer], arrived, log, wanted, device, KEY, LayerProgress(), dry)
        try:
            output = walk.go(inputs)
        except Exception as error:
            refuse_failing_apart(parts.model, error)
            raise
        values = dict(walk.made)
        values |= dict.fromkeys(wanted - values.keys())
        seconds.append(time.perf_counter() - start)
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
            what = f"output{_path_of(own[1], at)} {difference(one, other)}"
            raise CannotSplitError(OTHER_BITS.format(model=name, what=what))
    for buffer in {*buffers, *changed}:
        if bool(differ(digest([buffers.get(buffer)]), digest([changed.get(buffer)]))):
            raise CannotSplitError(OTHER_BITS.format(model=name, what=f"the buffer {buffer}"))


def _path_of(structure: Structure, at: int) -> str:
    """Where a leaf stands; its number, where plain dataclasses hold some."""
    paths = tree_flatten_with_path(structure.filled(range(structure.count)))[0]
    return keystr(paths[at][0]) if len(paths) == structure.count else f", leaf {at},"


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
