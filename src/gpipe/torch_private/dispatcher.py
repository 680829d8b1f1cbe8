"""torch's dispatcher: kernels of one's own for operations, which a thread may go by."""

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias

import torch
import torch._ops

Operator: TypeAlias = torch._ops.OpOverload[..., Any]
"""One overload of an operation of torch, such as `torch.ops.aten.add.Tensor`."""
UNUSED_KEY = "TESTING_ONLY_GenericMode"


def unused_key() -> Any:
    """The dispatch key that torch keeps for its own tests, above those of autograd and below those of modes.

    Raises:
        RuntimeError: This torch has none.
    """
    try:
        return torch._C._dispatch_key_parse(UNUSED_KEY)
    except RuntimeError as error:
        raise RuntimeError(
            f"this torch, {torch.__version__}, has no dispatch key {UNUSED_KEY}, by which gpipe sees what draws "
            f"random numbers; use a version of torch that gpipe is tested with"
        ) from error


def goes_by(key: Any) -> bool:
    """Whether operations of this thread go by the kernels of a key."""
    return torch._C._dispatch_tls_is_dispatch_key_included(key)


def go_by(key: Any, chosen: bool) -> None:
    """Has operations of this thread go by the kernels of a key, or no longer."""
    torch._C._dispatch_tls_set_dispatch_key_included(key, chosen)


def leave_out(key: Any, chosen: bool) -> None:
    """Has operations of this thread leave out the kernels of a key though they go by it, or no longer."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, chosen)


def stash(name: str, value: object) -> None:
    """Keeps something for this thread, and for the threads of the autograd engine where it runs what this begins."""
    if not _stash_takes_hold():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


@cache
def _stash_takes_hold() -> bool:
    """Whether torch holds what it stashes: 2.11 lets go of it all the same, and it would be freed in use."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("gpipe.probe", probe)
    holds = sys.getrefcount(probe) > before
    if not holds:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return holds


def stashed(name: str) -> Any:
    """What was stashed last."""
    return torch._C._get_obj_in_tls(name)


def keys_below(key: Any) -> Any:
    """The keys that come after a key, as what `redispatch` is given."""
    return torch._C._dispatch_keyset_full_after(key)


def are_below_a_mode(keys: Any) -> bool:
    """Whether a call comes through Python below a key: there is a mode, or a subclass of Tensor."""
    return bool(keys.has(torch._C.DispatchKey.Python))


def random_operators() -> Iterator[Operator]:
    """The operations that say of themselves that they draw, and are not made of others that do."""
    for name in torch._C._dispatch_get_all_op_names():
        qualified, _, overload = name.partition(".")
        tags = torch._C._get_operation_overload(qualified, overload)[2]
        made = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if torch.Tag.nondeterministic_seeded in tags and not made:
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
