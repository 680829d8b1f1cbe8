"""What is set in a thread beside grad mode and autocast, how many CPU threads it uses, and if a compiler is there.

Keeps rank threads apart in autocast's cache of casts, of which torch has one for all threads.

A weight that is used twice inside an autocast is cast once, and its gradients are added up in the lower precision;
the cache is cleared when any thread leaves its outermost autocast. So a rank that leaves one would have another's
weight cast twice. Here the cache is cleared only when no rank is inside, and a rank that has left enters again only
when it was: ranks go through their autocasts in rounds, and each finds the casts that it would find alone.
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
"""The innermost `torch.autograd.graph.saved_tensors_hooks` of this thread."""


class OwnMode(torch.overrides.TorchFunctionMode):
    """A mode of ours that only watches: pipes may be called inside it."""


def modes_here() -> tuple[torch.device | None, list[object]]:
    """The default device of this thread, if one is set, and its modes: `torch.get_default_device` has one, too."""
    device, others = None, list[object]()
    for mode in torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, torch.utils._device.DeviceContext):
            device = mode.device
        elif not isinstance(mode, OwnMode):
            others.append(mode)
    return device, [*others, *torch.utils._python_dispatch._get_current_dispatch_mode_stack()]


def as_plain_tensors() -> AbstractContextManager[None]:
    """Inside, functions of torch take objects of a subclass of Tensor for plain tensors."""
    found: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return found


class paused:  # noqa: N801  # it reads as a function, like torch.no_grad
    """A context: inside, a mode of this thread sees nothing, unless another one was entered since."""

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
    """Lets an operation use so many CPU threads inside."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What attention is to the dispatcher on the CPU, of which torch does not count the operations."""
ATTENTION_ON_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

LSTM_ON_CPU = torch.ops.aten.mkldnn_rnn_layer
"""What a layer of an LSTM is to the dispatcher on the CPU, likewise; other recurrent layers are matrix products."""
LSTM_ON_CPU_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward
BILINEAR = torch.ops.aten._trilinear  # what `torch.nn.functional.bilinear` is to it, and its backward


def flop_counter(formulas: Mapping[Any, Callable[..., int]]) -> FlopCounterMode:
    """Counts floating-point operations, but not by modules: for that torch hangs hooks on what they take and give."""
    counter = FlopCounterMode(display=False, custom_mapping=dict(formulas))
    everywhere: Any = nullcontext()  # says of all operations that they are in no module
    everywhere.parents = frozenset({"Global"})
    counter.mod_tracker = everywhere
    return counter


def is_vmapped() -> bool:
    """Whether this thread is below `vmap`, `torch.func.grad` or another transform."""
    return torch._C._functorch.maybe_current_level() is not None


def is_traced_by_compiler() -> bool:
    """Whether a compiler makes a graph of what this thread runs, so that no number is really made."""
    kinds = torch._C._TorchDispatchModeKey
    stands: Callable[[Any], object] = torch._C._get_dispatch_mode
    return bool(torch._C._len_torch_dispatch_stack()) and any(map(stands, (kinds.FAKE, kinds.PROXY)))


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps `torch.compile` out of a function: it would trace locks, threads and queues.

    `torch.compiler.disable` would load the compiler, which takes seconds, and its guard takes 20 us a call.
    """
    hidden, eval_frame = torch._compile._disable_dynamo(function), torch._C._dynamo.eval_frame

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        # or the compiler looks at each frame that this thread begins
        compiles = torch.compiler.is_compiling() or eval_frame.get_eval_frame_callback() is not None
        return (hidden if compiles else function)(*args, **kwargs)

    return guarded


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is `torch.compile`'s, or `module.compile()` was called."""
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


def without_compiler(called: Any) -> Any:
    """The module or function that `torch.compile` wrapped; what it did not wrap is given back."""
    if isinstance(called, nn.Module):
        return getattr(called, "_orig_mod", called)
    return inspect.unwrap(called) if hasattr(called, "_torchdynamo_orig_callable") else called


def variables_of_torch() -> set[ContextVar[Any]]:
    """The context variables of torch's own modules, among them one for each setting of its compiler."""
    held = [vars(module) for name, module in [*sys.modules.items()] if name.partition(".")[0] == "torch"]
    configs = (config for names in held if type(config := names.get("_config")) is dict)
    settings = chain.from_iterable(config.values() for config in configs)
    overrides = (getattr(setting, "user_override", None) for setting in settings)
    found = chain(chain.from_iterable(names.values() for names in held), overrides)
    return {each for each in found if type(each) is ContextVar}  # some modules hold what warns when it is looked at


class _Rounds:
    """Who is inside an autocast, and who has left one since the casts were forgotten."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._changed = threading.Condition()
        self._inside: set[int] = set()
        self._left: set[int] = set()

    def enter(self) -> None:
        """Waits until no cast of this thread is left from before."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: me not in self._left)
            self._inside.add(me)

    def leave(self) -> None:
        """Has all casts forgotten once nobody needs any."""
        me = threading.get_ident()
        with self._changed:
            self._inside.discard(me)
            self._left.add(me)
            if not self._inside:
                self._forget()
                self._left.clear()
                self._changed.notify_all()


_enter, _forget = torch.autocast_increment_nesting, torch.clear_autocast_cache
_rounds = _Rounds(_forget)
_ranks: set[int] = set()  # the threads that are ranks of runs
_lock = threading.Lock()


def _entered() -> int:
    depth = _enter()
    if depth == 1 and threading.get_ident() in _ranks:
        _rounds.enter()
    return depth


def _cleared() -> None:
    if threading.get_ident() in _ranks:
        _rounds.leave()
    else:
        _forget()


@contextmanager
def as_rank() -> Iterator[None]:
    """While entered, this thread is a rank of a run, which has its casts for itself."""
    with _lock:
        _ranks.add(threading.get_ident())
        torch.autocast_increment_nesting, torch.clear_autocast_cache = _entered, _cleared
    try:
        yield
    finally:
        with _lock:
            _ranks.discard(threading.get_ident())
            if not _ranks:
                torch.autocast_increment_nesting, torch.clear_autocast_cache = _enter, _forget
