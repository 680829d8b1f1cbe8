"""Makes random operations independent of threads: their results depend on seed, step, layer and micro-batch only.

torch has one generator per device and process, and rank threads would use it in an unpredictable order. An
`rng_scope` therefore has its own generators, and passes them to the random operations that run inside it.

**Interception.** torch's dispatcher has a dispatch key that nothing else uses. gpipe registers kernels for all random
operations under this key, with a higher priority than autograd. Entering an `rng_scope` enables the key in the
current thread. Other operations have no overhead. Composite operations (`F.dropout`, `nn.LSTM`) reach the kernels
through the operations that they consist of. Operations without a generator argument use the default generator, which
is replaced under a lock.

**Checkpoints.** A recomputation by `torch.utils.checkpoint` must draw the same numbers as its forward. torch's
checkpoint saves the state of the default generator before the forward, and restores it before the recomputation. At
the first draw inside a checkpoint, gpipe therefore overwrites the saved state with the state of the scope's
generator. The recomputation starts from this state, in whichever thread it runs. gpipe finds the checkpoints around a
draw in Python's stack frames.
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

MARK = "_gpipe_drew_here"
"""Name of the attribute that marks a saved generator state as overwritten by gpipe."""
GENERATORS = "_gpipe_generators"
"""Name of the local variable in which gpipe stores the generators of a recomputation, in its stack frame."""

CHECKPOINT_WITHOUT_RNG_STATE = (
    "A random operation runs inside torch.utils.checkpoint with preserve_rng_state=False. Remove "
    "preserve_rng_state=False, or use remat='always' instead. [checkpoint-without-rng-state]"
)
CHECKPOINT_ON_OTHER_DEVICE = (
    "A random operation on {device} runs inside torch.utils.checkpoint, but none of the checkpoint's inputs is on "
    "{device}. Pass an input on {device}, or use remat='always' instead. [checkpoint-without-rng-state]"
)
UNSEEN_FORWARD = (
    "A recomputation of torch.utils.checkpoint draws random numbers, but its forward did not. Draw the same numbers "
    "in both, and call torch.utils.checkpoint.checkpoint directly. [checkpoint-draws-differ]"
)
COMPILED_CHECKPOINT = (
    "A random operation runs inside torch.utils.checkpoint in compiled code, and the compiler backend recomputes it "
    "with torch's default generator. Use backend='inductor', or compile only the code inside the checkpoint. "
    "[checkpoint-in-compiled-code]"
)


Generators: TypeAlias = dict[torch.device, torch.Generator]
"""The generators of a scope or recomputation by device, created at the first draw on each device."""


def _get_or_create(
    generators: Generators, device: torch.device, start: Callable[[torch.Generator], object]
) -> torch.Generator:
    generator = generators.get(device)
    if generator is None:
        generator = torch.Generator("cpu" if device.type == "meta" else device)
        start(generator)
        generators[device] = generator
    return generator


def _save_state(
    forward: CheckpointFrame, device: torch.device, generator: torch.Generator, *, needed: bool, releases: bool
) -> None:
    """Replaces the state that a checkpoint's forward has saved by the state of `generator`, at the first draw.

    Args:
        forward: The frame of the checkpoint's forward.
        device: The device of the draw.
        generator: The generator of the scope.
        needed: Whether a backward may follow, which runs the recomputation.
        releases: Whether the recomputation can leave torch's default generators unchanged.
    """
    state = forward.state(device)
    if state is None:
        if needed and not forward.preserves:
            raise RuntimeError(CHECKPOINT_WITHOUT_RNG_STATE)
        if needed:
            raise RuntimeError(CHECKPOINT_ON_OTHER_DEVICE.format(device=device))
    elif not hasattr(state, MARK):
        state.copy_(generator.get_state())
        setattr(state, MARK, True)
        if releases:
            forward.release()


def _recompute_generator(
    frame: FrameType, checkpoint: CheckpointFrame, device: torch.device, *, strict: bool
) -> torch.Generator:
    """Returns the generator of a recomputation on a device.

    Args:
        frame: The frame of the recomputation.
        checkpoint: The checkpoint to which the frame belongs.
        device: The device of the draw.
        strict: Whether to raise a RuntimeError if the forward did not draw inside a scope.
    """

    def start(generator: torch.Generator) -> None:
        state = checkpoint.state(device)
        if state is None or (strict and not hasattr(state, MARK)):
            raise RuntimeError(UNSEEN_FORWARD)
        generator.set_state(state)

    return _get_or_create(frame.f_locals.setdefault(GENERATORS, {}), device, start)


MAX_CODES = 10_000
_ordinary_codes: dict[int, CodeType] = {}
"""Code objects that do not belong to checkpoints, by id. Each draw searches the whole stack and skips them."""


def _find_checkpoints(
    until: FrameType | None,
) -> tuple[list[CheckpointFrame], tuple[FrameType, CheckpointFrame] | None]:
    """Finds the checkpoints in which the current draw runs.

    Args:
        until: The frame at which the search stops.

    Returns:
        The forwards of checkpoints, innermost first, and the recomputation that contains them, or None.
    """
    forwards: list[CheckpointFrame] = []
    frame, ordinary = sys._getframe(1).f_back, _ordinary_codes
    while frame is not until and frame is not None:
        if id(code := frame.f_code) not in ordinary:
            checkpoint = read_checkpoint(frame)
            if checkpoint is not None and checkpoint.recomputes:
                return forwards, (frame, checkpoint)
            if checkpoint is not None:
                forwards.append(checkpoint)
            elif reruns_by_default_generator(code):
                raise RuntimeError(COMPILED_CHECKPOINT)
            elif not is_of_checkpoints(code):
                if len(_ordinary_codes) > MAX_CODES:
                    _ordinary_codes.clear()
                _ordinary_codes[id(code)] = code
        frame = frame.f_back
    return forwards, None


_installing = threading.Lock()
_installed: list[Any] = []


def _install() -> None:
    """Registers the kernels with torch's dispatcher at the first call. `_installed` keeps them registered."""
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
    """Returns the overload of an operator that also has a generator argument, or None if there is none."""
    packet = func.overloadpacket
    for other in (func, *(getattr(packet, name) for name in packet.overloads())):
        names = dispatcher.arguments_of(other)
        if "generator" in names and {*names, "generator"} == {*dispatcher.arguments_of(func), "generator"}:
            overload: dispatcher.Operator = other
            return overload
    return None


def _kernel(func: dispatcher.Operator, key: Any, below: Any) -> Callable[..., object]:
    """Returns the kernel of a random operation for threads inside an `rng_scope`.

    Args:
        func: The operator.
        key: The dispatch key under which the kernel is registered.
        below: The dispatch keys with lower priority.
    """
    with_generator, names = _find_with_generator(func), dispatcher.arguments_of(func)
    most = names.index("generator") if "generator" in names else len(names)
    dropout = names.index("dropout_p") if "dropout_p" in names else None

    def kernel(keys: Any, *args: object, **kwargs: object) -> object:
        argument: Any = kwargs.get("generator") or (args[most] if len(args) > most else None)
        unchanged = argument is not None and not dispatcher.is_one_generator(
            argument, default_generator(argument.device)
        )
        if dropout is not None:  # Attention is random only with dropout.
            unchanged = not (args[dropout] if len(args) > dropout else kwargs.get("dropout_p", 0.0))
        if unchanged or is_vmapped() or is_traced_by_compiler():  # Under `vmap`, the draw happens below it.
            return func.redispatch(keys & below, *args, **kwargs)
        device = _device_of(args, kwargs)
        if with_generator is None and device.type in ("cpu", "meta") and not dispatcher.are_below_a_mode(keys):
            return func.redispatch(keys & below, *args, **kwargs)  # Composite: its operations reach their kernels.
        generator = dispatcher.stashed().generator(device)
        dispatcher.exclude_key(key, True)
        try:
            if with_generator is None:
                # Dropout, fused attention and cuDNN's RNNs on GPUs, and dropout on CPUs below a mode or subclass.
                with standing_in(generator):
                    return func(*args, **kwargs)
            kwargs["generator"] = generator
            return with_generator.redispatch(keys & below, *args[:most], **kwargs)
        finally:
            dispatcher.exclude_key(key, False)

    return untraced(kernel)  # Otherwise dynamo would trace it when it runs in compiled code.


def _device_of(args: Sequence[object], kwargs: Mapping[str, Any]) -> torch.device:
    """Returns the device on which an operation draws random numbers, with its index. The CPU has no index."""
    if args and type(args[0]) is Tensor and args[0].is_cpu:
        return CPU  # most draws
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return numbered(value.device)
    argument = kwargs.get("device")
    return CPU if argument is None else numbered(torch.device(argument))


@contextmanager
def unseeded(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restores the states of default generators that layers seed inside the context. Does not undo random draws.

    `torch.random.fork_rng` is not enough if two layers use it at the same time. Each layer restores the state that it
    found, which the other layer may have seeded.
    """
    states: dict[torch.device, tuple[int, Tensor]] = {}
    for device in devices:
        with own_generator(device) as default:
            states[device] = default.initial_seed(), default.get_state()
    try:
        yield
    finally:
        for device, (seed, state) in states.items():
            with own_generator(device) as default:
                if default.initial_seed() != seed:
                    default.set_state(state)


DRAW_IN_BACKWARD = (
    "{layer} draws random numbers in its backward, so the numbers would depend on the order of the ranks. Draw them "
    "in the forward, or recompute with torch.utils.checkpoint or remat='always'. [random-in-backward]"
)


def rng_seed(seed: int, step: int, layer: int, micro_batch: int) -> int:
    """Returns the 63-bit seed of a scope's generators.

    Raises:
        ValueError: If an argument is not a 64-bit integer.
    """
    try:
        packed = struct.pack("<4q", seed, step, layer, micro_batch)
    except struct.error as error:
        raise ValueError(
            f"seed={seed!r}, step={step!r}, layer={layer!r}, micro_batch={micro_batch!r}: all must be 64-bit "
            f"integers. Pass integers from -2**63 to 2**63 - 1."
        ) from error
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class rng_scope:  # noqa: N801  # it reads as a function at every use, like torch.no_grad
    """A context in which random numbers depend only on seed, step, layer and micro-batch.

    The scope affects all random operations of torch in the current thread. A loop without a pipeline draws the same
    numbers as the pipe if each layer runs inside a scope. The backward can run outside.

    Args:
        seed: The seed of the pipe.
        step: The number of the step.
        layer: The index of the layer.
        micro_batch: The number of the micro-batch.

    >>> import gpipe, torch
    >>> with gpipe.rng_scope(seed=0, step=3, layer=1, micro_batch=2):
    ...     first = torch.rand(2)
    >>> with gpipe.rng_scope(seed=0, step=3, layer=1, micro_batch=2):
    ...     again = torch.rand(2)
    >>> torch.equal(first, again)
    True
    """

    in_backward = False
    piped = False  # Whether the pipe runs the backward, so that recomputations draw inside a scope.
    grad = True  # Whether grad mode was enabled on entering.
    _entered: tuple[Any, ...] = (None, None)  # The outer scope, the frame that entered, and the previous `_entered`.

    def __init__(self, seed: int, step: int, layer: int, micro_batch: int) -> None:
        self._seed, self._step, self._layer, self._micro_batch = seed, step, layer, micro_batch
        self._generators: Generators = {}

    def __enter__(self) -> Self:
        if not _installed:
            _install()
        nested = dispatcher.is_key_included(_installed[0])
        self._entered = (dispatcher.stashed() if nested else None, sys._getframe(1), self._entered)
        self.grad = torch.is_grad_enabled()
        try:
            dispatcher.stash(self)
            if not nested:
                dispatcher.include_key(_installed[0], True)
        except BaseException:  # An interrupt, after which `with` does not call __exit__.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        outer, _, self._entered = self._entered
        if outer is None:
            dispatcher.include_key(_installed[0], False)
            dispatcher.forget_stashed()  # A thread of the user must not end with a scope.
        else:
            dispatcher.stash(outer)

    def set_layer(self, layer: int) -> None:
        """Uses the random key of a different layer from now on."""
        self._layer, self._generators = layer, {}

    def generator(self, device: torch.device) -> torch.Generator:
        """Returns the generator for the next draw on a device."""
        forwards, recompute = _find_checkpoints(self._entered[1])
        known = None if self.in_backward else self._generators.get(device)
        if recompute is None:
            generator = self._scope_generator(device) if known is None else known
        else:
            generator = _recompute_generator(*recompute, device, strict=self.in_backward)
        if forwards:
            needed = self.in_backward or self.grad or torch.is_grad_enabled()  # Otherwise no backward follows.
            for forward in forwards:
                _save_state(forward, device, generator, needed=needed, releases=self.piped)
        return generator

    def _scope_generator(self, device: torch.device) -> torch.Generator:
        return _get_or_create(self._generators, device, self._seed_generator)

    def _seed_generator(self, generator: torch.Generator) -> None:
        generator.manual_seed(rng_seed(self._seed, self._step, self._layer, self._micro_batch))


class PipeRngScope(rng_scope):
    """The scope of a run in which the pipe also runs the backward."""

    piped = True


class RankScope(PipeRngScope):
    """The scope of all actions of a rank in a run. The rank enters the scope once, and sets the key for each action.

    During a backward, only recomputations of checkpoints may draw random numbers. A recomputation draws the same
    numbers as its forward.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__(seed, step, 0, 0)
        self._maker: Callable[[int | None], str | None] = repr

    def begin_forward(self, layer: int, micro_batch: int) -> None:
        """Uses the random key of a layer's forward from now on. The loss function counts as one more layer."""
        self._layer, self._micro_batch, self._generators, self.in_backward = layer, micro_batch, {}, False

    def begin_backward(self, maker: Callable[[int | None], str | None]) -> None:
        """Rejects draws from now on, except in recomputations of checkpoints.

        Args:
            maker: A function that returns a description of the layer that created an autograd node. Its argument is
                the sequence number of the node.
        """
        self.in_backward, self._maker = True, maker

    def _scope_generator(self, device: torch.device) -> torch.Generator:
        if not self.in_backward:
            return super()._scope_generator(device)
        node = running_node()
        for frame, _ in walk_stack(sys._getframe()):  # Find the outermost node: a backward can create inner ones.
            if frame is self._entered[1]:
                break
            candidate = frame.f_locals.get("self")
            if isinstance(candidate, torch.autograd.function.BackwardCFunction):
                node = candidate
        layer = self._maker(None if node is None else node_number(node)) or "a layer"
        raise RuntimeError(DRAW_IN_BACKWARD.format(layer=layer))
