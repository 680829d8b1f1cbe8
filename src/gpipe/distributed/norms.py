"""Clips the norm of the gradients of all processes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpipe.distributed.communicator import check_same_on_ranks
from gpipe.distributed.processes import Processes, SingleProcess
from gpipe.distributed.reduce import is_sharded_over_replicas
from gpipe.stages.dtensor import full_tensor, local_tensor
from gpipe.stages.messages import Request


def clip_grad_norm_(
    processes: SingleProcess,
    module: nn.Module,
    device: torch.device,
    max_norm: float,
    norm_type: float,
    parameter_names: Sequence[str] = (),
) -> Tensor:
    """Scales the gradients of all processes so that their total norm is at most `max_norm`.

    The total norm does not depend on the partitions, because the norms of parameters are combined on one device, in
    the order of the layers or of `parameter_names`. Each parameter counts once.

    Returns:
        The total norm before scaling.

    Raises:
        ValueError: If `max_norm` is negative or NaN, or if ranks pass different values.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} is not a number of at least 0. Pass the maximum norm.")
    named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    norms = [_norm(gradient, norm_type).to(device) for _, gradient in named]
    if isinstance(processes, Processes):
        arguments = {"max_norm": str(float(max_norm)), "norm_type": str(float(norm_type))}
        gathered = processes.gather(Request.NORMS, (arguments, [name for name, _ in named], norms))
        check_same_on_ranks({rank: remote_arguments for rank, (remote_arguments, *_) in enumerate(gathered)})
        ranks = processes.position.replica_ranks
        norm_of = {name: norm for rank in ranks for name, norm in zip(*gathered[rank][1:], strict=True)}
        layers = [layer.name for stage in processes.engine.all for layer in stage.layers]
        order = {name: index for index, name in enumerate(layers)}
        names = parameter_names or sorted(norm_of, key=lambda name: order[name.partition(".")[0]])
        norms = [norm_of[name] for name in names if name in norm_of]
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
    for _, gradient in named:
        local_tensor(gradient).mul_(factor.to(gradient.device))
    return total


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Returns the norm of a gradient. Gathers shards first, because combined norms of shards round differently."""
    whole = full_tensor(gradient) if is_sharded_over_replicas(gradient) else gradient
    return full_tensor(torch.linalg.vector_norm(whole, norm_type))
