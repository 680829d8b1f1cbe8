"""The randomness of a visit: a function of (seed, step, layer, micro-batch) and of nothing else.

torch keeps one generator for each device of a process, and rank threads would draw from it in any order. So around a
layer that draws, a dispatch mode gives every random operation a generator of the visit's own. Operations that take
no generator borrow the default one for the length of the call, under a lock.
"""

import hashlib
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

CHECKPOINTED = (
    "something random is drawn inside torch.utils.checkpoint, which would draw other numbers when it runs the layer "
    "again for the backward; let the pipeline recompute instead, with remat='always', or draw outside of it"
)

_borrowing = threading.Lock()  # whoever holds it may set the state of a default generator


def visit_key(seed: int, step: int, layer: int, micro_batch: int) -> int:
    """The number, of 63 bits, from which a visit's generators are seeded."""
    packed = struct.pack("<4q", seed, step, layer, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class visit(TorchDispatchMode):  # noqa: N801  # it reads as a function at every use, like torch.no_grad
    """A context in which every random operation draws from the key (seed, step, layer, micro-batch) alone.

    The plain loop that a pipeline equals bit for bit enters it around each layer.

    >>> import gpipe, torch
    >>> with gpipe.visit(seed=0, step=3, layer=1, micro_batch=2):
    ...     first = torch.rand(2)
    >>> with gpipe.visit(seed=0, step=3, layer=1, micro_batch=2):
    ...     again = torch.rand(2)
    >>> torch.equal(first, again)
    True
    """

    def __init__(self, seed: int, step: int, layer: int, micro_batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type its modes
        self.key = visit_key(seed, step, layer, micro_batch)
        self.generators: dict[torch.device, torch.Generator] = {}
        self.drew = False  # whether anything random was drawn

    def __enter__(self) -> Self:
        _push_mode(self)  # not by super(), which keeps flags for the whole process that rank threads would mix up
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what dynamo would be kept out of draws and does nothing else; keeping it out imports it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run compiled: it draws its seeds by an operation that this mode sees."""
        return True

    def generator(self, device: torch.device) -> torch.Generator:
        """The visit's generator of a device."""
        if device not in self.generators:
            where = torch.device("cpu") if device.type == "meta" else device
            self.generators[device] = torch.Generator(where).manual_seed(self.key)
        return self.generators[device]

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Hands random operations the visit's generator; passes all others on."""
        keywords = dict(kwargs or {})
        if not is_random(func):
            return func(*args, **keywords)
        if given_generator(func, args, keywords):
            return func(*args, **keywords)  # the user's own generator is the user's own business
        generator = self.generator(_device_of(func, args, keywords))
        keyed = _with_generator(func)
        if keyed is None:
            result, drew = _borrow(generator, lambda: func(*args, **keywords))
        else:
            result, drew = keyed(*args, **{**keywords, "generator": generator}), True
        self.drew |= drew
        if drew and _is_checkpointed():
            raise RuntimeError(CHECKPOINTED)
        return result


# Dynamo would trace the method whenever a module that it leaves alone runs within a compiled call.
set_code_exec_strategy(visit.__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def _is_checkpointed() -> bool:
    """Whether the operation is called from within `torch.utils.checkpoint`, which will call it again."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None behind the last one
    return False


def is_random(func: OpOverload[..., Any]) -> bool:
    """Whether an operation draws from a generator."""
    found = _IS_RANDOM.get(func)
    if found is None:
        found = _IS_RANDOM[func] = torch.Tag.nondeterministic_seeded in func.tags
    return found


_IS_RANDOM: dict[OpOverload[..., Any], bool] = {}  # a memo of what the operations themselves say
_KEYED: dict[OpOverload[..., Any], OpOverload[..., Any] | None] = {}  # likewise


def _with_generator(func: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """The overload of an operation that takes a generator, if it has one."""
    if func not in _KEYED:
        _KEYED[func] = _find_with_generator(func)
    return _KEYED[func]


def _find_with_generator(func: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    if _takes_generator(func):
        return func
    ours = [argument.name for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        theirs = [argument.name for argument in other._schema.arguments]
        if _takes_generator(other) and [n for n in theirs if n != "generator"] == ours:
            return other  # type: ignore[no-any-return]  # torch does not type the attributes of a packet
    return None


def _takes_generator(func: OpOverload[..., Any]) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def given_generator(func: OpOverload[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether the caller passed a generator of its own."""
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _device_of(func: OpOverload[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            return leaf.device
    device = kwargs.get("device")
    if device is None:
        return torch.device("cpu")
    found = torch.device(device)  # type: ignore[call-overload]  # whatever the operation itself accepts
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(found)


def _borrow(generator: torch.Generator, draw: Callable[[], object]) -> tuple[object, bool]:
    """Draws from a default generator that meanwhile stands where `generator` does; says if anything was drawn.

    Attention may draw and mostly does not: with no dropout its layers then need no visit.
    """
    with _borrowing:
        default = default_generator(generator.device)
        own, before = default.get_state(), generator.get_state()
        default.set_state(before)
        try:
            result = draw()
            after = default.get_state()
        finally:
            default.set_state(own)
        generator.set_state(after)
        return result, not torch.equal(before, after)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operations on a device take when given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
