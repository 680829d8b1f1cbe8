"""Reads and sets modes of a thread (except grad mode and autocast) and its CPU threads, and detects the compiler.

This module also protects autocast's cache of casts, which all threads share. A weight that is used twice inside an
autocast is cast once, and its gradients are summed in the lower precision. But torch clears the cache when any thread
leaves its outermost autocast. Another rank could then cast a weight twice.

With this module, the cache is cleared only when no rank is inside an autocast. A rank that has left an autocast waits
for this before it enters an autocast again. Each rank therefore uses the same casts as without other ranks.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch
import torch._compile
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

P = ParamSpec("P")
R = TypeVar("R")


saved_tensor_hooks: Callable[[], tuple[Callable[[Tensor], object], Callable[[object], Tensor]] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)
"""Returns the innermost `torch.autograd.graph.saved_tensors_hooks` of this thread."""


class OwnMode(torch.overrides.TorchFunctionMode):
    """A mode of gpipe that only observes function calls. Pipes may be called inside this mode."""


def modes_here() -> tuple[torch.device | None, list[object]]:
    """Returns the default device of this thread, or None, and all other modes of the thread except gpipe's modes."""
    device, modes = None, list[object]()
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, torch.utils._device.DeviceContext):
            device = mode.device
        elif not isinstance(mode, OwnMode):
            modes.append(mode)
    return device, [*modes, *torch.utils._python_dispatch._get_current_dispatch_mode_stack()]


def as_plain_tensors() -> AbstractContextManager[None]:
    """Makes torch functions treat objects of a Tensor subclass as plain tensors inside the context."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


class paused:  # noqa: N801  # it reads as a function, like torch.no_grad
    """Turns a mode off inside the context, if it is the innermost mode of this thread."""

    def __init__(self, mode: torch.overrides.TorchFunctionMode) -> None:
        self._mode: object = mode

    def __enter__(self) -> None:
        if torch.overrides._get_current_function_mode() is self._mode:
            torch.overrides._pop_mode()
        else:
            self._mode = None

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            torch.overrides._push_mode(self._mode)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Sets the number of CPU threads that an operator uses inside the context."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The operator for attention on the CPU. torch does not count its floating-point operations."""
ATTENTION_ON_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

LSTM_ON_CPU = torch.ops.aten.mkldnn_rnn_layer
"""The operator for an LSTM layer on the CPU. Other recurrent layers consist of matrix products."""
LSTM_ON_CPU_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward
BILINEAR = torch.ops.aten._trilinear  # the dispatcher's name of `torch.nn.functional.bilinear` and its backward


def flop_counter(formulas: Mapping[Any, Callable[..., int]]) -> FlopCounterMode:
    """Returns a counter of floating-point operations without counts by module, which would need hooks."""
    counter = FlopCounterMode(display=False, custom_mapping=dict(formulas))
    no_tracker: Any = nullcontext()  # attributes all operations to no module
    no_tracker.parents = frozenset({"Global"})
    counter.mod_tracker = no_tracker
    return counter


_level_of_transforms: Callable[[], int | None] = torch._C._functorch.maybe_current_level
_count_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def is_vmapped() -> bool:
    """Whether this thread is inside `vmap`, `torch.func.grad` or another transform of `torch.func`."""
    return _level_of_transforms() is not None


def is_traced_by_compiler() -> bool:
    """Whether a compiler traces the operators of this thread, so that they compute no values."""
    if not _count_of_modes():
        return False
    kinds = torch._C._TorchDispatchModeKey
    get_mode: Callable[[Any], object] = torch._C._get_dispatch_mode
    return any(map(get_mode, (kinds.FAKE, kinds.PROXY)))


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Excludes a function from `torch.compile`, which would trace the function's locks, threads and queues.

    `torch.compiler.disable` would import the compiler, which takes seconds, and would take 20 us per call.
    """
    hidden, eval_frame = torch._compile._disable_dynamo(function), torch._C._dynamo.eval_frame

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        # The second condition: the compiler examines each new frame of this thread.
        compiles = torch.compiler.is_compiling() or eval_frame.get_eval_frame_callback() is not None
        return (hidden if compiles else function)(*args, **kwargs)

    return guarded


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was returned by `torch.compile`, or its `compile()` was called."""
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


def without_compiler(called: Any) -> Any:
    """Returns the module or function that `torch.compile` wrapped. Returns anything else unchanged."""
    if isinstance(called, nn.Module):
        return getattr(called, "_orig_mod", called)
    return inspect.unwrap(called) if hasattr(called, "_torchdynamo_orig_callable") else called


def variables_of_torch() -> set[ContextVar[Any]]:
    """Returns the context variables of torch's own modules, including one for each setting of its compiler."""
    modules = [vars(module) for name, module in [*sys.modules.items()] if name.partition(".")[0] == "torch"]
    configs = (config for names in modules if type(config := names.get("_config")) is dict)
    settings = chain.from_iterable(config.values() for config in configs)
    overrides = (getattr(setting, "user_override", None) for setting in settings)
    values = chain(chain.from_iterable(names.values() for names in modules), overrides)
    return {value for value in values if type(value) is ContextVar}  # isinstance would make some values warn


class _Rounds:
    """Tracks which rank threads are inside an autocast, and which have left it since the cache was last cleared."""

    def __init__(self, clear_cache: Callable[[], None]) -> None:
        self._clear_cache = clear_cache
        self._changed = threading.Condition()
        self._inside: set[int] = set()
        self._left: set[int] = set()

    def enter(self) -> None:
        """If this thread has left an autocast, waits until the cache has been cleared."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: me not in self._left)
            self._inside.add(me)

    def leave(self) -> None:
        """Records that this thread has left its autocast. Clears the cache if no rank is inside an autocast."""
        me = threading.get_ident()
        with self._changed:
            self._inside.discard(me)
            self._left.add(me)
            if not self._inside:
                self._clear_cache()
                self._left.clear()
                self._changed.notify_all()


_increment_nesting, _clear_cache = torch.autocast_increment_nesting, torch.clear_autocast_cache
_rounds = _Rounds(_clear_cache)
_ranks: set[int] = set()  # the ids of rank threads
_lock = threading.Lock()


def _increment_nesting_in_rounds() -> int:
    depth = _increment_nesting()
    if depth == 1 and threading.get_ident() in _ranks:
        _rounds.enter()
    return depth


def _clear_cache_in_rounds() -> None:
    if threading.get_ident() in _ranks:
        _rounds.leave()
    else:
        _clear_cache()


@contextmanager
def as_rank() -> Iterator[None]:
    """Marks this thread as a rank inside the context, so that other ranks do not clear its casts."""
    with _lock:
        _ranks.add(threading.get_ident())
        torch.autocast_increment_nesting = _increment_nesting_in_rounds
        torch.clear_autocast_cache = _clear_cache_in_rounds
    try:
        yield
    finally:
        with _lock:
            _ranks.discard(threading.get_ident())
            if not _ranks:
                torch.autocast_increment_nesting, torch.clear_autocast_cache = _increment_nesting, _clear_cache
