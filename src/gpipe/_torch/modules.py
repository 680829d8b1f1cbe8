"""Wraps internals of modules, process groups, gradient scalers and `fully_shard`."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

AnyBatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm
"""The base class of all BatchNorm modules of torch: of every dimension, lazy or synchronized."""


def refresh_weights_of_rnn(module: nn.Module) -> None:
    """Makes an RNN use its current parameters. Other modules always use their current parameters."""
    if isinstance(module, nn.RNNBase):  # also keeps its weights in a list
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Returns the `reset_parameters` or `_reset_parameters` method of a module, or None."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def hold_state_of(module: nn.Module, other: nn.Module) -> None:
    """Makes `module` share the submodules, parameters and buffers of `other`. Assignments to one change both."""
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        module.__dict__[name] = vars(other)[name]


def hooks_of(module: nn.Module) -> list[object]:
    """Returns all hooks of a module."""
    registries = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for registry in registries for hook in registry.values()]


def count_forward_hooks(module: nn.Module) -> int:
    """Returns the number of hooks that a module calls before and after its forward."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def global_hooks() -> list[object]:
    """Returns the hooks that every module calls, for example from `register_module_forward_hook`."""
    values = (value for name, value in vars(nn.modules.module).items() if name.startswith("_global_"))
    return [hook for registry in values if isinstance(registry, dict) for hook in registry.values() if callable(hook)]


def is_called_by_forward(module: nn.Module) -> bool:
    """Whether calling a module only calls its forward: it has no hooks and is not compiled."""
    return not hooks_of(module) and vars(module).get("_compiled_call_impl") is None


def check_dimensions(norm: AnyBatchNorm, tensor: Tensor) -> None:
    """Raises a ValueError if a BatchNorm does not accept a tensor, as its forward does."""
    norm._check_input_dim(tensor)


is_wrapper: Callable[[Tensor], bool] = torch.utils._python_dispatch.is_traceable_wrapper_subclass
"""Whether the class of a tensor wraps other tensors, as DTensor does."""


def seconds_of_group(group: dist.ProcessGroup) -> float:
    """Returns the timeout of a process group in seconds."""
    backend = group._get_backend(group.bound_device_id or torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout.total_seconds()


def store_host() -> str:
    """Returns the host of the default process group's store, or "" if the store is not a TCP store."""
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else ""


class LocalGradScaler(torch.amp.GradScaler):
    """A scaler for this process's shards of gradients. torch's scaler does not support both tensors and DTensors."""

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *options: Any) -> dict[torch.device, Tensor]:
        shards = list[Tensor]()
        for gradient in (parameter.grad for group in optimizer.param_groups for parameter in group["params"]):
            if gradient is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                shards.append(local.detach())
                shards[-1].grad = local
        local_optimizer: Any = SimpleNamespace(param_groups=[{"params": shards}])
        return super()._unscale_grads_(local_optimizer, *options)


def awaits_unscale(scaler: torch.amp.GradScaler, optimizer: object) -> bool:
    """Whether a scaler has not unscaled the gradients of an optimizer since its last update."""
    ready = torch.amp.grad_scaler.OptState.READY
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is ready


def found_infinite(scaler: torch.amp.GradScaler, optimizer: object) -> Mapping[torch.device, Tensor]:
    """Returns, by device, a flag of the last unscaling, which is 1 if a gradient was not finite."""
    flags: Mapping[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return flags


def note_infinite(scaler: torch.amp.GradScaler, optimizer: object, flags: dict[torch.device, Tensor]) -> None:
    """Marks an optimizer's gradients as unscaled, with these flags, so that `GradScaler.step` accepts them."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"], state["found_inf_per_device"] = torch.amp.grad_scaler.OptState.UNSCALED, flags


SET_FOR_STEPS = (
    "all_reduce_grads",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "force_sum_reduction_for_comms",
    "gradient_divide_factor",
    "post_forward_mesh_info",  # from `reshard_after_forward`
    "reduce_grads",
    "reshard_after_backward",
)


def settings_of(module: nn.Module) -> Callable[[], None]:
    """Saves the settings of a module under `fully_shard`. Returns a function that restores them."""
    groups = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    saved = [{name: getattr(group, name) for name in SET_FOR_STEPS} for group in groups]

    def restore() -> None:
        for group, settings in zip(groups, saved, strict=True):
            vars(group).update(settings)

    return restore


def end_backwards(module: nn.Module) -> None:
    """Runs the final callback of `fully_shard` after the backward pass, if the module is a root."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    if state._is_root:
        state._root_post_backward_final_callback()


def break_off(module: nn.Module) -> None:
    """Resets a module under `fully_shard` after a failed forward or backward pass. Drops partial gradients."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    for group in state._fsdp_param_groups:
        group._all_gather_result = None  # from an all-gather in flight
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    if state._is_root and hasattr(state, "_reset_iter_state"):  # older versions of torch have no such state
        state._reset_iter_state()


def carry_gradients(module: nn.Module) -> list[Tensor]:
    """Copies gradients of shards to the unsharded parameters if the mesh has one process. Returns these shards."""
    carried = []
    for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
        for parameter in group.fsdp_params:
            shard, whole = parameter.sharded_param, parameter._unsharded_param
            if shard.grad is None or shard.device_mesh.size() > 1 or hasattr(whole, "to_local"):
                continue
            gradient = shard.grad.to_local()
            if (gradient.dtype, gradient.device) == (whole.dtype, whole.device) and parameter.reduce_dtype is None:
                whole.grad = gradient.clone()  # a copy, because the run may fail
                carried.append(shard)
    return carried


def gradients_of(module: nn.Module) -> list[tuple[Tensor | None, int]]:
    """Returns the gradient (or None) and the sharded dimension of each parameter under `fully_shard`."""
    groups = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    gradients = list[tuple[Tensor | None, int]]()
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
        accumulated = parameter.unsharded_accumulated_grad
        gradients.append((accumulated if gradient is None else gradient, parameter.fsdp_placement.dim))
    return gradients
