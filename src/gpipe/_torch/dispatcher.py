"""Wraps internals of torch's dispatcher: custom kernels, modes that observe operators, and fake tensors."""

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
"""One overload of an operator of torch, such as `torch.ops.aten.add.Tensor`."""
UNUSED_KEY = "TESTING_ONLY_GenericMode"


def unused_key() -> Any:
    """Returns the dispatch key that torch reserves for its tests. This key has a higher priority than autograd."""
    return torch._C._dispatch_key_parse(UNUSED_KEY)


is_key_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
"""Whether operators in this thread use the kernels of a dispatch key."""
include_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
"""Sets whether operators in this thread use the kernels of a dispatch key."""
exclude_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
"""Sets whether operators in this thread skip the kernels of a dispatch key, even if the key is included."""


SLOT = "gpipe.keyed"
"""The name of a thread-local slot. Threads of the autograd engine inherit its value from the caller of backward."""


def _stash_holds() -> bool:
    """Whether torch keeps a reference to the object in a slot. torch 2.11 does not, so the object could be freed."""
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
"""Stores an object in the slot."""
forget_stashed: Callable[[], None] = partial(torch._C._remove_obj_from_tls, SLOT)
"""Clears the slot of this thread. Call this function before the thread ends.

Otherwise torch would release the object after Python has ended the thread. The release needs the interpreter. If the
interpreter exits at the same time, the process aborts.
"""
stashed: Callable[[], Any] = partial(torch._C._get_obj_in_tls, SLOT)
"""Returns the object in the slot."""


keys_below: Callable[[Any], Any] = torch._C._dispatch_keyset_full_after
"""Returns the dispatch keys with lower priority than a key, for `redispatch`."""


def are_below_a_mode(keys: Any) -> bool:
    """Whether these keys include the Python key, because a mode is active or an argument is a Tensor subclass."""
    return bool(keys.has(torch._C.DispatchKey.Python))


CHECKS_MASK_ALIGNMENT: str = "_nested_tensor_from_mask_left_aligned"
"""The function that `nn.TransformerEncoder` calls to decide whether a mask allows nested tensors."""
ATTENTION_ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"


def random_operators() -> Iterator[Operator]:
    """Yields the operators that torch tags as random and that have their own kernels.

    Skips attention on the CPU. This operator has the tag, but never uses random numbers, because it rejects dropout.
    """
    for name in torch._C._dispatch_get_all_op_names():
        qualified, _, overload = name.partition(".")
        tags = torch._C._get_operation_overload(qualified, overload)[2]
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if torch.Tag.nondeterministic_seeded in tags and not is_composite and qualified != ATTENTION_ON_CPU:
            namespace, _, packet = qualified.partition("::")
            yield getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def arguments_of(operator: Operator) -> list[str]:
    """Returns the names of an operator's arguments in order."""
    return [argument.name for argument in operator._schema.arguments]


def let_control_flow_pass(key: Any) -> None:
    """Makes `torch.cond` and other higher-order operators, which have their own dispatcher, ignore a key."""
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)


def is_one_generator(generator: torch.Generator, other: torch.Generator) -> bool:
    """Whether two Python objects wrap the same generator."""
    return bool(generator._cdata == other._cdata)  # type: ignore[attr-defined]  # not in torch's types


class Operations(TorchDispatchMode):
    """Observes the tensors of operators inside the context. Only one thread may be inside, but may enter again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tree_leaves((args, kwargs or {})), tree_leaves(result)
        self.see([leaf for leaf in inputs if isinstance(leaf, Tensor)], [t for t in outputs if isinstance(t, Tensor)])
        return result

    @abstractmethod
    def see(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Receives the tensors of one operator call."""


NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""The errors that an operator raises on fake tensors if its output or output shape depends on values."""


GROUPED_PRODUCT = torch.ops.aten._grouped_mm  # one matrix for each group of rows: experts in transformers use it


class _FakeMode(FakeTensorMode):
    """Supports grouped products of every dtype. torch's own fake kernel supports only bfloat16."""

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
    """Creates fake tensors, and runs operators on them."""

    def __init__(self) -> None:
        self._mode = _FakeMode(allow_non_fake_inputs=True)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Runs operators without values, even if arguments have values. Errors are raised, but not logged."""
        logger = logging.getLogger(FakeTensor.__module__)
        before, logger.disabled = logger.disabled, True
        try:
            with self._mode:
                yield
        finally:
            logger.disabled = before

    def like(self, tensor: Tensor) -> Tensor:
        """Returns a fake tensor of this layout that reports the CPU as its device. A parameter stays a parameter."""
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def without_memory(
    kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Tensor:
    """Returns a tensor without memory, of a class with `__torch_dispatch__`. A fake mode does not make it fake."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device, requires_grad=requires_grad)


def is_fake(tensor: object) -> bool:
    """Whether a tensor is fake: it reports a device, but has no values."""
    return isinstance(tensor, FakeTensor)
