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
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

Op = OpOverload[..., Any]

CHECKPOINTED = (
    "something random is drawn inside torch.utils.checkpoint, which would draw other numbers when it runs the layer "
    "again for the backward; let the pipeline recompute instead, with remat='always', or draw outside of it"
)

CPU = torch.device("cpu")
borrowing = threading.RLock()  # whoever holds it may set the state of a default generator


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
        self.rests = False  # while a visit inside of it borrows the default generator

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
        func: Op,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Hands random operations the visit's generator; passes all others on."""
        known = _KNOWN.get(id(func)) or _look_up(func)
        if not known.random:
            return func(*args, **kwargs) if kwargs else func(*args)
        keywords = kwargs or {}
        if self.rests or given_generator(args, keywords):  # the user's own generator is the user's own business
            return func(*args, **keywords)
        drew, result = self.draw(known, args, keywords)
        self.drew |= drew
        if drew and _is_checkpointed():
            raise RuntimeError(CHECKPOINTED)
        return result

    def draw(self, known: "Known", args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[bool, object]:
        """Does a random operation with the visit's generator; says if anything was drawn."""
        generator = self.generator(_device_of(args, kwargs))
        if known.keyed is None:
            return _borrow(generator, lambda: known.func(*args, **kwargs))
        return True, known.keyed(*args, **{**kwargs, "generator": generator})


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


class Known(NamedTuple):
    """What an operation says of itself: whether it draws, and its overload that takes a generator, if it has one."""

    func: Op
    random: bool
    keyed: Op | None


_KNOWN: dict[int, Known] = {}  # by id, since an operation's own hash is slow; it lives on in its entry


def _look_up(func: Op) -> Known:
    random = torch.Tag.nondeterministic_seeded in func.tags
    known = _KNOWN[id(func)] = Known(func, random, _find_with_generator(func) if random else None)
    return known


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


def given_generator(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether the caller passed a generator of its own."""
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _device_of(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
    if args and isinstance(args[0], Tensor):
        return args[0].device
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            return leaf.device
    device = kwargs.get("device")
    if device is None:
        return CPU
    found = torch.device(device)  # type: ignore[call-overload]  # whatever the operation itself accepts
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(found)


def _borrow(generator: torch.Generator, draw: Callable[[], object]) -> tuple[bool, object]:
    """Draws from a default generator that meanwhile stands where `generator` does; says if anything was drawn.

    Attention may draw and mostly does not: with no dropout its layers then need no visit.
    """
    outer = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, visit)]
    default, before = default_generator(generator.device), generator.get_state()
    with borrowing:
        own = default.get_state()
        try:
            for mode in outer:
                mode.rests = True
            default.set_state(before)
            result = draw()
            after = default.get_state()
        finally:
            default.set_state(own)
            for mode in outer:
                mode.rests = False
    generator.set_state(after)
    return not torch.equal(before, after), result


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operations on a device take when given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
