"""Random operations, where a thread wants to see them: each is given a generator, and all others cost nothing.

torch's dispatcher has a key that nothing uses. Kernels for the random operations stand there, above those of
autograd, and whoever enters a `Keyed` has its own thread go by that key. Operations that are made of others
(`F.dropout`, `nn.LSTM`) are seen as those; what draws and takes no generator borrows the default one under a lock.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, _ops
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._ops import OpOverload

Op = OpOverload[..., Any]

CPU = torch.device("cpu")
UNUSED_KEY = "TESTING_ONLY_GenericMode"
SLOT = "gpipe.keyed"  # of this thread, and of the engine's threads for what this one begins
TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)

borrowing = threading.RLock()  # whoever holds it may set the state of a default generator
_installing = threading.Lock()
_installed: list[Any] = []


class Generates(Protocol):
    """Whatever knows which generator to draw from."""

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator to draw from next on a device."""


class Keyed:
    """A context: inside, in this thread, what draws and was given no generator draws from `generator(device)`."""

    def __init__(self) -> None:
        self.grad = True  # whether it was entered in grad mode
        self._outer: list[tuple[Generates | None, FrameType]] = []

    @property
    def entered_by(self) -> FrameType | None:
        """The frame that entered the context: where to stop on a way up the stack."""
        return self._outer[-1][1] if self._outer else None

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator to draw from next on a device."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        key = _key()
        nested = torch._C._dispatch_tls_is_dispatch_key_included(key)
        self._outer.append((torch._C._get_obj_in_tls(SLOT) if nested else None, sys._getframe(1)))
        self.grad = torch.is_grad_enabled()
        torch._C._stash_obj_in_tls(SLOT, self)
        if not nested:
            torch._C._dispatch_tls_set_dispatch_key_included(key, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outer, _ = self._outer.pop()
        torch._C._stash_obj_in_tls(SLOT, outer)
        if outer is None:
            torch._C._dispatch_tls_set_dispatch_key_included(_key(), False)


class Known(NamedTuple):
    """A random operation, and its overload that takes a generator, if it has one."""

    func: Op
    keyed: Op | None

    @property
    def positional(self) -> int:
        """How many arguments come before the generator."""
        return next(
            (at for at, argument in enumerate(self.func._schema.arguments) if argument.name == "generator"), 99
        )


def _install() -> tuple[Any, Sequence[torch.library.Library]]:
    """The key, and the kernels, which stand there as long as they are remembered."""
    try:
        key = torch._C._dispatch_key_parse(UNUSED_KEY)
    except RuntimeError as error:
        raise RuntimeError(
            f"this torch, {torch.__version__}, has no dispatch key {UNUSED_KEY}, by which gpipe sees what draws "
            f"random numbers; use a version of torch that gpipe is tested with"
        ) from error
    rest = torch.library.Library("_", "IMPL", UNUSED_KEY)
    rest.fallback(torch.library.fallthrough_kernel)
    for (
        operator
    ) in _ops._higher_order_ops.values():  # `torch.cond` and its like, which have a dispatcher of their own
        operator.fallthrough(key)
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    libraries = {"_": rest}
    below = torch._C._dispatch_keyset_full_after(key)
    for func in random_ops():
        namespace = func.namespace
        if namespace not in libraries:
            libraries[namespace] = torch.library.Library(namespace, "IMPL", UNUSED_KEY)
        name = func._schema.name.partition("::")[2]
        kernel = _kernel(Known(func, _find_with_generator(func)), key, below)
        libraries[namespace].impl(f"{name}.{func._schema.overload_name}".rstrip("."), kernel, with_keyset=True)
    return key, tuple(libraries.values())


def _key() -> Any:
    if not _installed:
        with _installing:
            if not _installed:
                _installed.extend(_install())
    return _installed[0]


def random_ops() -> Iterator[Op]:
    """The operations that say of themselves that they draw, and are not made of others that do."""
    for name in torch._C._dispatch_get_all_op_names():
        qualified, _, overload = name.partition(".")
        tags = torch._C._get_operation_overload(qualified, overload)[2]
        made = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if torch.Tag.nondeterministic_seeded in tags and not made:
            namespace, _, packet = qualified.partition("::")
            yield getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _find_with_generator(func: Op) -> Op | None:
    if _takes_generator(func):
        return func
    ours = [argument.name for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        theirs = [argument.name for argument in other._schema.arguments]
        if _takes_generator(other) and [n for n in theirs if n != "generator"] == ours:
            return other  # type: ignore[no-any-return]  # torch does not type the attributes of a packet
    return None


def _takes_generator(func: Op) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _kernel(known: Known, own: Any, below: Any) -> Callable[..., object]:
    """What a random operation does in a thread that sees it."""
    func, keyed, most = known.func, known.keyed, known.positional

    def kernel(keys: Any, *args: object, **kwargs: object) -> object:
        given = kwargs.get("generator") or (args[most] if len(args) > most else None)
        if _is_transformed() or (given is not None and not _is_default(given)):
            return func.redispatch(keys & below, *args, **kwargs)
        device = _device_of(args, kwargs)
        if keyed is None and _is_made_of_others(keys, device):
            return func.redispatch(keys & below, *args, **kwargs)
        generator = torch._C._get_obj_in_tls(SLOT).generator(device)
        torch._C._dispatch_tls_set_dispatch_key_excluded(own, True)
        try:
            if keyed is None:
                return _borrow(generator, lambda: func(*args, **kwargs))
            kwargs["generator"] = generator
            return keyed(*args[:most], **kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(own, False)

    # It runs within compiled code too, and there dynamo would trace it.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(kernel.__code__, skip)
    return kernel


def _is_made_of_others(keys: Any, device: torch.device) -> bool:
    """Whether an operation draws by others that are seen in turn; below a mode or a subclass of Tensor none is."""
    return device.type in ("cpu", "meta") and not keys.has(torch._C.DispatchKey.Python)


def _is_transformed() -> bool:
    """Whether a compiler looks on, so that nothing is drawn, or `vmap`, under which it will be, below."""
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    return bool(torch._C._len_torch_dispatch_stack()) and any(map(torch._C._get_dispatch_mode, TRACERS))


def _is_default(generator: Any) -> bool:
    """Whether a generator that the caller passed is torch's own, which says no more than none."""
    return bool(generator._cdata == default_generator(generator.device)._cdata)  # type: ignore[attr-defined]


def _device_of(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
    if args and isinstance(args[0], Tensor):
        return _whole(args[0].device)
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, Tensor):
            return _whole(value.device)
    device = kwargs.get("device")
    return CPU if device is None else _whole(torch.device(device))  # type: ignore[call-overload]  # as the operation


def _whole(device: torch.device) -> torch.device:
    """A device with its index, but for the CPU, which has one generator whatever its name."""
    if device.type == "cpu":
        return CPU
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _borrow(generator: torch.Generator, draw: Callable[[], object]) -> object:
    """Draws from a default generator that meanwhile stands where `generator` does."""
    default = default_generator(generator.device)
    with borrowing:
        own = default.get_state()
        try:
            default.set_state(generator.get_state())
            result = draw()
            generator.set_state(default.get_state())
        finally:
            default.set_state(own)
    return result


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operations on a device take when given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


@contextmanager
def unseeded(devices: Iterable[torch.device]) -> Iterator[None]:
    """Around a run: puts back a default generator that a layer seeded; one that others drew from goes on from there.

    Layers that seed it within `torch.random.fork_rng` would else leave it seeded, where two do so at once.
    """
    found = {default: (default.initial_seed(), default.get_state()) for default in map(default_generator, devices)}
    try:
        yield
    finally:
        for default, (seed, state) in found.items():
            if default.initial_seed() != seed:
                default.set_state(state)
