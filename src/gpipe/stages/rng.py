"""Keys random operations: what a scope draws is a function of (seed, step, layer, micro-batch) alone.

torch keeps one generator for each device of a process, and rank threads would draw from it in any order. So a scope
has generators of its own, which the random operations inside of it are given.

torch's dispatcher has a key that nothing uses. Kernels for the random operations stand there, above those of
autograd, and whoever enters an `rng_scope` has its own thread go by that key; all other operations cost nothing.
Operations that are made of others (`F.dropout`, `nn.LSTM`) are seen as those; what draws and takes no generator
borrows the default one under a lock.

A recompute of `torch.utils.checkpoint`, in a backward, draws what its forward drew. torch's checkpoint notes the
state of the default generator before the forward, and sets it before the recompute. So at the first draw inside of a
checkpoint the state of the generator that is drawn from is written where torch noted the other: the recompute then
begins there, whoever runs it. Frames of Python tell which checkpoints a draw is inside of.
"""

import hashlib
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from gpipe._torch import dispatcher
from gpipe._torch.accelerator import CPU, default_generator, numbered, own_generator, standing_in
from gpipe._torch.autograd import node_number, running_node
from gpipe._torch.checkpoint import CheckpointFrame, is_of_checkpoints, read_checkpoint, reruns_by_default_generator
from gpipe._torch.modes import is_traced_by_compiler, is_vmapped, untraced

MARK = "_gpipe_drew_here"  # on a state that was noted: what stands there now is a key's
GENERATORS = "_gpipe_generators"  # beside the variables of a recompute: what it draws from

FORGETS = (
    "something random is drawn inside of torch.utils.checkpoint, which does not keep what a recompute needs to draw "
    "the same again ({}); {}, or let the pipeline recompute instead, with remat='always'"
)
UNSEEN = (
    "a recompute of torch.utils.checkpoint draws random numbers, and its forward was not seen to draw any: a layer "
    "must draw as often in a recompute as in its forward, on the same devices, and call "
    "torch.utils.checkpoint.checkpoint"
)
COMPILED = (
    "something random is drawn inside of torch.utils.checkpoint within compiled code, by a backend that runs it "
    "again by the state of torch's generator; compile by 'inductor', or what is inside of the checkpoint"
)


Generators: TypeAlias = dict[torch.device, torch.Generator]
"""What a scope or a recompute draws from: one for each device, made when first drawn from."""


def _generator(
    known: Generators, device: torch.device, start: Callable[[torch.Generator], object]
) -> torch.Generator:
    if device not in known:
        generator = torch.Generator("cpu" if device.type == "meta" else device)
        start(generator)
        known[device] = generator
    return known[device]


def _note(
    forward: CheckpointFrame, device: torch.device, generator: torch.Generator, *, needed: bool, releases: bool
) -> None:
    """Has a checkpoint's recompute begin where a generator stands now, at the first draw of its forward."""
    state = forward.state(device)
    if state is None:
        why, remedy = "preserve_rng_state=False", "leave that out"
        if forward.preserves:
            why = f"the numbers are drawn on {device}, and none of its inputs is there"
            remedy = f"give it one on {device}"
        if needed:
            raise RuntimeError(FORGETS.format(why, remedy))
    elif not hasattr(state, MARK):
        state.copy_(generator.get_state())
        setattr(state, MARK, True)
        if releases:
            forward.release()


def _generator_of(frame: FrameType, seen: CheckpointFrame, device: torch.device, *, sure: bool) -> torch.Generator:
    """What a recompute draws from on a device; if `sure`, it raises unless its forward has drawn under a key."""

    def start(generator: torch.Generator) -> None:
        state = seen.state(device)
        if state is None or (sure and not hasattr(state, MARK)):
            raise RuntimeError(UNSEEN)
        generator.set_state(state)

    return _generator(frame.f_locals.setdefault(GENERATORS, {}), device, start)


MOST_CODES = 10_000
_others: dict[int, CodeType] = {}  # code that is none of checkpoints', to pass by: each draw walks a deep stack


def _find_checkpoints(
    until: FrameType | None,
) -> tuple[list[CheckpointFrame], tuple[FrameType, CheckpointFrame] | None]:
    """The checkpoints that a draw is inside of, up to a frame: forwards, and the recompute, if any, that has them."""
    forwards: list[CheckpointFrame] = []
    frame = sys._getframe(1).f_back
    while frame is not None and frame is not until:
        if _others.get(id(frame.f_code)) is not frame.f_code:
            seen = read_checkpoint(frame)
            if seen is not None and seen.recomputes:
                return forwards, (frame, seen)
            if seen is not None:
                forwards.append(seen)
            elif reruns_by_default_generator(frame.f_code):
                raise RuntimeError(COMPILED)
            elif not is_of_checkpoints(frame.f_code):
                if len(_others) > MOST_CODES:
                    _others.clear()
                _others[id(frame.f_code)] = frame.f_code
        frame = frame.f_back
    return forwards, None


_installing = threading.Lock()
_installed: list[Any] = []


def _install() -> None:
    """Puts kernels where torch looks for them; they stand there as long as they are remembered."""
    with _installing:
        if _installed:
            return
        key = dispatcher.unused_key()
        rest = torch.library.Library("_", "IMPL", dispatcher.UNUSED_KEY)
        rest.fallback(torch.library.fallthrough_kernel)
        dispatcher.let_control_flow_pass(key)
        libraries = {"_": rest}
        below = dispatcher.keys_below(key)
        for func in dispatcher.random_operators():
            namespace, _, name = func.name().partition("::")
            if namespace not in libraries:
                libraries[namespace] = torch.library.Library(namespace, "IMPL", dispatcher.UNUSED_KEY)
            libraries[namespace].impl(name, _kernel(func, key, below), with_keyset=True)
        _installed.extend((key, *libraries.values()))


def _find_with_generator(func: dispatcher.Operator) -> dispatcher.Operator | None:
    packet = func.overloadpacket
    for other in (func, *(getattr(packet, name) for name in packet.overloads())):
        names = dispatcher.arguments_of(other)
        if "generator" in names and {*names, "generator"} == {*dispatcher.arguments_of(func), "generator"}:
            found: dispatcher.Operator = other
            return found
    return None


def _kernel(func: dispatcher.Operator, own: Any, below: Any) -> Callable[..., object]:
    """What a random operation does in a thread that sees it."""
    keyed, ours = _find_with_generator(func), dispatcher.arguments_of(func)
    most = ours.index("generator") if "generator" in ours else len(ours)
    dropout = ours.index("dropout_p") if "dropout_p" in ours else None

    def kernel(keys: Any, *args: object, **kwargs: object) -> object:
        given: Any = kwargs.get("generator") or (args[most] if len(args) > most else None)
        is_left = given is not None and not dispatcher.is_one_generator(given, default_generator(given.device))
        if dropout is not None:  # attention, which without it draws nothing
            is_left = not (args[dropout] if len(args) > dropout else kwargs.get("dropout_p", 0.0))
        if is_left or is_vmapped() or is_traced_by_compiler():  # under `vmap` it will be drawn below
            return func.redispatch(keys & below, *args, **kwargs)
        device = _device_of(args, kwargs)
        if keyed is None and device.type in ("cpu", "meta") and not dispatcher.are_below_a_mode(keys):
            return func.redispatch(keys & below, *args, **kwargs)  # it is made of others, which are seen in turn
        generator = dispatcher.stashed().generator(device)
        dispatcher.exclude_key(own, True)
        try:
            if keyed is None:
                # dropout, fused attention and cuDNN's RNNs on GPUs; dropout on the CPU below a mode or a subclass
                with standing_in(generator):
                    return func(*args, **kwargs)
            kwargs["generator"] = generator
            return keyed(*args[:most], **kwargs)
        finally:
            dispatcher.exclude_key(own, False)

    return untraced(kernel)  # it runs within compiled code too, and there dynamo would trace it


def _device_of(args: Sequence[object], kwargs: Mapping[str, Any]) -> torch.device:
    """Where an operation draws; with its index, but for the CPU, which has one generator whatever its name."""
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    given = kwargs.get("device")
    device = tensor.device if tensor is not None else CPU if given is None else torch.device(given)
    return numbered(device)


@contextmanager
def unseeded(devices: Iterable[torch.device]) -> Iterator[None]:
    """Around a run: puts back a default generator that a layer seeded; one that others drew from goes on from there.

    Layers that seed it within `torch.random.fork_rng` would else leave it seeded, where two do so at once: each puts
    back what it found, which may be the other's seed.
    """
    found: dict[torch.device, tuple[int, Tensor]] = {}
    for device in devices:
        with own_generator(device) as default:
            found[device] = default.initial_seed(), default.get_state()
    try:
        yield
    finally:
        for device, (seed, state) in found.items():
            with own_generator(device) as default:
                if default.initial_seed() != seed:
                    default.set_state(state)


IN_BACKWARD = (
    "{} draws random numbers in its backward, where no key reaches them: they would depend on which rank comes "
    "first. Draw them in the forward and keep them for the backward (ctx.save_for_backward). A layer that runs again "
    "in its backward what drew in its forward (RevNet, Reformer) can do that by torch.utils.checkpoint, whose draws "
    "are keyed, or leave it to the pipeline, by remat='always'"
)


def rng_seed(seed: int, step: int, layer: int, micro_batch: int) -> int:
    """The number, of 63 bits, from which a scope's generators are seeded."""
    try:
        packed = struct.pack("<4q", seed, step, layer, micro_batch)
    except struct.error as error:
        raise ValueError(
            f"seed={seed!r}, step={step!r}, layer={layer!r}, micro_batch={micro_batch!r} key random numbers; give "
            f"whole numbers of 64 bits"
        ) from error
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class rng_scope:  # noqa: N801  # it reads as a function at every use, like torch.no_grad
    """A context in which every random operation of this thread draws from the key (seed, step, layer, micro-batch).

    The plain loop that a pipeline equals bit for bit enters it around each layer; its backward may be outside.

    >>> import gpipe, torch
    >>> with gpipe.rng_scope(seed=0, step=3, layer=1, micro_batch=2):
    ...     first = torch.rand(2)
    >>> with gpipe.rng_scope(seed=0, step=3, layer=1, micro_batch=2):
    ...     again = torch.rand(2)
    >>> torch.equal(first, again)
    True
    """

    in_backward = False
    piped = False  # whether the pipe will run its backward, and draw there what checkpoints need
    grad = True  # whether it was entered in grad mode
    _entered: tuple[Any, ...] = (None, None)  # the scope around, the frame that entered, and the same of before

    def __init__(self, seed: int, step: int, layer: int, micro_batch: int) -> None:
        self._seed, self._step, self._layer, self._micro_batch = seed, step, layer, micro_batch
        self._generators: Generators = {}

    def __enter__(self) -> Self:
        if not _installed:
            _install()
        nested = dispatcher.is_key_included(_installed[0])
        self._entered = (dispatcher.stashed() if nested else None, sys._getframe(1), self._entered)
        self.grad = torch.is_grad_enabled()
        dispatcher.stash(self)
        if not nested:
            dispatcher.include_key(_installed[0], True)
        return self

    def __exit__(self, *_: object) -> None:
        outer, _, self._entered = self._entered
        if outer is None:
            dispatcher.forget_stashed()  # what a thread of the user's ends with
            dispatcher.include_key(_installed[0], False)
        else:
            dispatcher.stash(outer)

    def set_layer(self, layer: int) -> None:
        """Draws for another layer from now on."""
        self._layer, self._generators = layer, {}

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator to draw from next on a device, for what was given none."""
        forwards, recompute = _find_checkpoints(self._entered[1])
        if recompute is None:
            generator = self._own(device)
        else:
            generator = _generator_of(*recompute, device, sure=self.in_backward)
        needed = self.in_backward or self.grad or torch.is_grad_enabled()  # else no backward follows
        for forward in forwards:
            _note(forward, device, generator, needed=needed, releases=self.piped)
        return generator

    def _own(self, device: torch.device) -> torch.Generator:
        place = self._seed, self._step, self._layer, self._micro_batch
        return _generator(self._generators, device, lambda new: new.manual_seed(rng_seed(*place)))


class PipeRngScope(rng_scope):
    """A scope in a pipe, which runs the backward too."""

    piped = True


class RankScope(PipeRngScope):
    """The scope of all actions of a rank in a run: entered once, and told before each what it is.

    In a backward, recomputes of checkpoints draw what their forwards drew, and nothing else may.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__(seed, step, 0, 0)
        self._maker: Callable[[int | None], str | None] = repr

    def begin_forward(self, layer: int, micro_batch: int) -> None:
        """Goes on to the forward of a layer, or of the loss behind the last."""
        self._micro_batch, self.in_backward = micro_batch, False
        self.set_layer(layer)

    def begin_backward(self, maker: Callable[[int | None], str | None]) -> None:
        """Goes on to a backward; `maker` says in words which layer made the node with a sequence number."""
        self.in_backward, self._maker = True, maker

    def _own(self, device: torch.device) -> torch.Generator:
        if not self.in_backward:
            return super()._own(device)
        node = running_node()
        for frame, _ in walk_stack(sys._getframe()):  # the outermost node, since others are made in a backward
            if frame is self._entered[1]:
                break
            found = frame.f_locals.get("self")
            if isinstance(found, torch.autograd.function.BackwardCFunction):
                node = found
        raise RuntimeError(IN_BACKWARD.format(self._maker(None if node is None else node_number(node)) or "a layer"))
