"""torch's dispatcher: kernels of one's own for operations, operations as they are done, tensors without values."""

import ctypes
import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch._ops
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe._torch.trees import tree_leaves

Operator: TypeAlias = torch._ops.OpOverload[..., Any]
"""One overload of an operation of torch, such as `torch.ops.aten.add.Tensor`."""
UNUSED_KEY = "TESTING_ONLY_GenericMode"


def unused_key() -> Any:
    """The dispatch key that torch keeps for its own tests, above those of autograd and below those of modes."""
    return torch._C._dispatch_key_parse(UNUSED_KEY)


goes_by: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
"""Whether operations of this thread go by the kernels of a key."""
go_by: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
"""Has operations of this thread go by the kernels of a key, or no longer."""
leave_out: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
"""Has operations of this thread leave out the kernels of a key though they go by it, or no longer."""


SLOT = "gpipe.keyed"
"""Where something is kept for a thread, and for the threads of the autograd engine where it runs what this begins."""


def _stash_holds() -> bool:
    """Whether torch holds what it keeps: 2.11 lets go of it all the same, and it would be freed in use."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(SLOT, probe)
    holds = sys.getrefcount(probe) > before
    if not holds:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    torch._C._remove_obj_from_tls(SLOT)
    return holds


def _stash_and_hold(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(SLOT, value)


stash: Callable[[object], None] = partial(torch._C._stash_obj_in_tls, SLOT) if _stash_holds() else _stash_and_hold
"""Keeps something in the slot."""
forget_stashed: Callable[[], None] = partial(torch._C._remove_obj_from_tls, SLOT)
"""Forgets what was stashed for this thread, which is about to end.

Torch itself would let go of it when the thread has ended for Python, and would need the interpreter for that, which
may end at the same time: then the process is aborted.
"""
stashed: Callable[[], Any] = partial(torch._C._get_obj_in_tls, SLOT)  # what was stashed last


keys_below: Callable[[Any], Any] = torch._C._dispatch_keyset_full_after
"""The keys that come after a key, as what `redispatch` is given."""


def are_below_a_mode(keys: Any) -> bool:
    """Whether a call comes through Python below a key: there is a mode, or a subclass of Tensor."""
    return bool(keys.has(torch._C.DispatchKey.Python))


CHECKS_MASK_ALIGNMENT: str = "_nested_tensor_from_mask_left_aligned"
"""By what `nn.TransformerEncoder` asks whether it may compute in nested tensors."""
ATTENTION_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"


def random_operators() -> Iterator[Operator]:
    """The operations that say of themselves that they draw, and are not made of others that do.

    Attention as the CPU has it says so and never does: it refuses dropout.
    """
    for name in torch._C._dispatch_get_all_op_names():
        qualified, _, overload = name.partition(".")
        tags = torch._C._get_operation_overload(qualified, overload)[2]
        made = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if torch.Tag.nondeterministic_seeded in tags and not made and qualified != ATTENTION_ON_CPU:
            namespace, _, packet = qualified.partition("::")
            yield getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def arguments_of(operator: Operator) -> list[str]:
    """The names of an operation's arguments, in order."""
    return [argument.name for argument in operator._schema.arguments]


def let_control_flow_pass(key: Any) -> None:
    """Has `torch.cond` and its like, which have a dispatcher of their own, leave a key alone."""
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)


def is_one_generator(generator: torch.Generator, other: torch.Generator) -> bool:
    """Whether two objects of Python stand for one generator."""
    return bool(generator._cdata == other._cdata)  # type: ignore[attr-defined]  # not in torch's types


class Operations(TorchDispatchMode):
    """Sees the tensors that operations inside make; it may be entered again and again, by one thread at a time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given, came = tree_leaves((args, kwargs or {})), tree_leaves(made)
        self.see([leaf for leaf in given if isinstance(leaf, Tensor)], [t for t in came if isinstance(t, Tensor)])
        return made

    @abstractmethod
    def see(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Is told of an operation's tensors."""


NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What an operation raises that cannot tell its output, or its layout, without values."""


GROUPED_PRODUCT = torch.ops.aten._grouped_mm  # rows of groups by a matrix for each: what experts of transformers do


class _FakeMode(FakeTensorMode):
    """Has grouped products of any dtype, which torch without values refuses but in bfloat16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not GROUPED_PRODUCT.default:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        with self:
            return _grouped_product(*args, **(kwargs or {}))


def _grouped_product(
    a: Tensor, b: Tensor, ends: Any = None, bias: object = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    groups = [(ends if a.dim() == 2 else a).shape[0]] if a.dim() == b.dim() else []
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)


class Fakes:
    """Makes tensors without values, and has operations do without."""

    def __init__(self) -> None:
        self._mode = _FakeMode(allow_non_fake_inputs=True)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, operations do without values, also of tensors that have some; what cannot is raised, not logged."""
        logger = logging.getLogger(FakeTensor.__module__)
        before, logger.disabled = logger.disabled, True
        try:
            with self._mode:
                yield
        finally:
            logger.disabled = before

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of this layout that says to be on the CPU; a parameter if this is one."""
        with self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def without_memory(
    kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Tensor:
    """A tensor of a class with a `__torch_dispatch__`; no fake, though this thread makes fakes of what it makes."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device, requires_grad=requires_grad)


def is_fake(tensor: object) -> bool:
    """Whether a tensor has no values, though it says to be somewhere."""
    return isinstance(tensor, FakeTensor)
