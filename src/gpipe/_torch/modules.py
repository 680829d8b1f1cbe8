"""What modules, process groups and gradient scalers keep to themselves."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.utils._python_dispatch
from torch import Tensor, nn

AnyBatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm
"""What every BatchNorm of torch is, of whatever dimensions, lazy or synchronized."""


def refresh_weights_of_rnn(module: nn.Module) -> None:
    """Has an RNN use the parameters that it has now; other modules do so by themselves."""
    if isinstance(module, nn.RNNBase):  # keeps a list of its weights beside its parameters
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """What gives a module's parameters and buffers their initial values anew, where it has that by torch's names."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def hold_state_of(module: nn.Module, other: nn.Module) -> None:
    """Has a module hold the parts, parameters and buffers of another: what is put into one stands in both."""
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        module.__dict__[name] = vars(other)[name]


def hooks_of(module: nn.Module) -> list[object]:
    """All hooks of a module."""
    held = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for hooks in held for hook in hooks.values()]


def count_forward_hooks(module: nn.Module) -> int:
    """How many hooks a module calls around its forward."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def global_hooks() -> list[object]:
    """The hooks that every module calls (`torch.nn.modules.module.register_module_forward_hook` and its like)."""
    held = (value for name, value in vars(nn.modules.module).items() if name.startswith("_global_"))
    return [hook for hooks in held if isinstance(hooks, dict) for hook in hooks.values() if callable(hook)]


def is_called_by_forward(module: nn.Module) -> bool:
    """Whether a call of a module is one of its forward, and no more."""
    return not hooks_of(module) and vars(module).get("_compiled_call_impl") is None


def check_dimensions(norm: AnyBatchNorm, given: Tensor) -> None:
    """Raises a ValueError for a tensor that a BatchNorm does not take, as its forward does."""
    norm._check_input_dim(given)


is_wrapper: Callable[[Tensor], bool] = torch.utils._python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor is of a class whose objects hold other tensors, as a DTensor does."""


def seconds_of_group(group: dist.ProcessGroup) -> float:
    """How long a process group waits for others."""
    backend = group._get_backend(group.bound_device_id or torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout.total_seconds()


class LocalGradScaler(torch.amp.GradScaler):
    """A scaler that divides what this process holds of each gradient, and looks at that; torch mixes no DTensors."""

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *options: Any) -> dict[torch.device, Tensor]:
        held = list[Tensor]()
        for gradient in (one.grad for group in optimizer.param_groups for one in group["params"]):
            if gradient is not None:
                own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                held.append(own.detach())
                held[-1].grad = own
        parts: Any = SimpleNamespace(param_groups=[{"params": held}])
        return super()._unscale_grads_(parts, *options)


def awaits_unscale(scaler: torch.amp.GradScaler, optimizer: object) -> bool:
    """Whether a scaler has not divided the gradients of an optimizer since its last update."""
    ready = torch.amp.grad_scaler.OptState.READY
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is ready


def found_infinite(scaler: torch.amp.GradScaler, optimizer: object) -> Mapping[torch.device, Tensor]:
    """What a scaler noted when it divided the gradients of an optimizer: 1 where one was not finite, by device."""
    found: Mapping[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found


def note_infinite(scaler: torch.amp.GradScaler, optimizer: object, found: dict[torch.device, Tensor]) -> None:
    """Has a scaler take the gradients of an optimizer for divided, with this found; as `step` asks for it."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"], state["found_inf_per_device"] = torch.amp.grad_scaler.OptState.UNSCALED, found


SET_FOR_STEPS = (
    "all_reduce_grads",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "force_sum_reduction_for_comms",
    "gradient_divide_factor",
    "post_forward_mesh_info",  # of `reshard_after_forward`
    "reduce_grads",
    "reshard_after_backward",
)


def settings_of(module: nn.Module) -> Callable[[], None]:
    """Notes what `fully_shard` was told to do with a module; gives what tells it so again."""
    groups = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    noted = [{name: getattr(group, name) for name in SET_FOR_STEPS} for group in groups]

    def put_back() -> None:
        for group, one in zip(groups, noted, strict=True):
            vars(group).update(one)

    return put_back


def end_backwards(module: nn.Module) -> None:
    """Has a module that `fully_shard` was told of do what it does behind a backward, if none holds it."""
    state = module._get_fsdp_state()  # type: ignore[operator]  # no mere attribute
    if state._is_root:
        state._root_post_backward_final_callback()


def break_off(module: nn.Module) -> None:
    """Has a module that `fully_shard` was told of forget a forward or backward that failed, and gradients of it."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    for group in state._fsdp_param_groups:
        group._all_gather_result = None  # of one under way
        for one in group.fsdp_params:
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
    if state._is_root and hasattr(state, "_reset_iter_state"):  # older ones forget nothing
        state._reset_iter_state()


def carry_gradients(module: nn.Module) -> list[Tensor]:
    """Has what was gathered from this process alone go on from the gradients of its shards; gives these shards."""
    carried = []
    for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
        for one in group.fsdp_params:
            shard, whole = one.sharded_param, one._unsharded_param
            if shard.grad is None or shard.device_mesh.size() > 1 or hasattr(whole, "to_local"):
                continue
            before = shard.grad.to_local()
            if (before.dtype, before.device) == (whole.dtype, whole.device) and one.reduce_dtype is None:
                whole.grad = before.clone()  # as the run may fail
                carried.append(shard)
    return carried


def gradients_of(module: nn.Module) -> list[tuple[Tensor | None, int]]:
    """Of the weights that `fully_shard` gathers with a module, the gradient if there is one, and the axis it cuts."""
    groups = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    own = [parameter for group in groups for parameter in group.fsdp_params]
    gathered = (getattr(one, "_unsharded_param", None) for one in own)
    kept = (None if parameter is None else parameter.grad for parameter in gathered)
    added = (one.unsharded_accumulated_grad for one in own)
    return [(a if k is None else k, one.fsdp_placement.dim) for one, a, k in zip(own, added, kept, strict=True)]
