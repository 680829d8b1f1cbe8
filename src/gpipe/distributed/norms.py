"""Norms of gradients, and names of parameters, over all processes: each parameter counts once."""

import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpipe.distributed.agree import differences
from gpipe.distributed.processes import OneProcess, Processes
from gpipe.distributed.reduce import reduces_itself
from gpipe.errors import innermost_code
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.stages.dtensor import full_tensor, local_tensor
from gpipe.stages.messages import Request

NORMS = (nn.utils.clip_grad_norm_, nn.utils.get_total_norm)


def clip_grad_norm_(
    processes: OneProcess,
    module: nn.Module,
    device: torch.device,
    max_norm: float,
    norm_type: float,
    parameter_names: Sequence[str] = (),
) -> Tensor:
    """Scales the gradients of all processes so that their norm together is at most `max_norm`; gives what it was.

    The norms of parameters are put together in the order of the layers, or of `parameter_names`, on one device.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}; give a number of at least 0")
    named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    norms = [_norm(gradient, norm_type).to(device) for _, gradient in named]
    if isinstance(processes, Processes):  # those of all parameters of the replica, each once
        given = {"max_norm": str(float(max_norm)), "norm_type": str(float(norm_type))}
        gathered = processes.gather(Request.NORMS, (given, [name for name, _ in named], norms))
        if mistakes := differences({rank: theirs for rank, (theirs, *_) in enumerate(gathered)}):
            raise ValueError(f"all ranks must be given the same: {'; '.join(mistakes)}")
        ranks = processes.position.ranks_of_replica
        found = {name: norm for rank in ranks for name, norm in zip(*gathered[rank][1:], strict=True)}
        layers = [layer.name for stage in processes.engine.all for layer in stage.layers]
        order = {name: at for at, name in enumerate(layers)}
        names = parameter_names or sorted(found, key=lambda name: order[name.partition(".")[0]])
        norms = [found[name] for name in names if name in found]
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
    for _, gradient in named:
        local_tensor(gradient).mul_(factor.to(gradient.device))
    return total


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Of all of a gradient: put together where replicas have shards, whose norms would add up to other bits."""
    whole = full_tensor(gradient) if reduces_itself(gradient) else gradient
    return full_tensor(torch.linalg.vector_norm(whole, norm_type))


_parts: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # pipes of which other processes have other parameters


def guard_part(pipe: nn.Module, processes: OneProcess) -> None:
    """Refuses parameters of a part of a pipe to torch's norms, which would take them for all, and later to LBFGS."""
    if processes.position is None or processes.position.rows == 1:
        return
    _parts.add(pipe)
    codes = {innermost_code(norm): norm.__name__ for norm in NORMS}
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]  # None ends it
        if name := codes.get(frame.f_code):
            raise ValueError(
                f"torch.nn.utils.{name} would see the gradients of this process's partition alone, and what it does "
                f"would depend on how the layers are cut; have all processes call pipe.clip_grad_norm_(max_norm)"
            )


def _refuse_part(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Refuses a step that puts all parameters together, where these are a part."""
    if isinstance(optimizer, torch.optim.LBFGS):
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if not own.isdisjoint(parameter for pipe in list(_parts) for parameter in pipe.parameters()):
            raise ValueError(
                "LBFGS puts all parameters together, and would see those of this process's partition alone; train in "
                "one process, or take another optimizer"
            )


register_optimizer_step_pre_hook(_refuse_part)


def find_tied_names(engine: PipelineStages) -> dict[str, str]:
    """The name of each parameter that has an earlier name, and that name."""
    names = {
        (layer.index, id(module), leaf): layer.full_name(f"{path}.{leaf}" if path else leaf)
        for stage in engine.all
        for layer in stage.layers
        for path, module in layer.module.named_modules()
        for leaf in module._parameters
    }
    found: dict[str, str] = {}
    for shared in engine.shared:
        places = [(at, id(module), leaf) for at, slots in shared.slots.items() for module, leaf in slots]
        first, *others = [names[place] for place in places]  # a module that is several layers has several names
        found |= dict.fromkeys(others, first)
    return found
