"""Handles the parameters of a pipe in several processes: their names, and functions that need all parameters.

`torch.nn.utils.clip_grad_norm_` and `torch.optim.LBFGS` combine all parameters. In a pipe with several processes,
these functions would combine only the parameters of one process, and the result would depend on the number of ranks.
Muon multiplies whole matrices, in bfloat16, and Adafactor divides by norms of whole matrices. With sharded matrices,
their rounding would depend on the number of shards.
"""

import sys
import weakref
from functools import cache

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpipe.distributed.processes import SingleProcess
from gpipe.errors import innermost_code
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.stages.dtensor import local_tensor

WHOLE_MATRICES = ("Adafactor", "Muon")  # classes of torch, and of other libraries with the same name
NORMS = {innermost_code(norm): norm.__name__ for norm in (nn.utils.clip_grad_norm_, nn.utils.get_total_norm)}
_pipes: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()  # partitions of each pipe


def guard_partial_parameters(pipe: nn.Module, processes: SingleProcess) -> None:
    """Rejects functions that need all parameters but would receive only the parameters of this process.

    Call this function when a pipe is created and when its parameters are listed. If a norm function of torch lists
    the parameters, this function raises an error. For the first pipe in several processes, this function also
    registers a hook that rejects LBFGS, and with sharded weights the optimizers of `WHOLE_MATRICES`.

    Raises:
        ValueError: If `clip_grad_norm_` or `get_total_norm` of `torch.nn.utils` lists the parameters.
    """
    if processes.position is None:
        return
    _pipes[pipe] = processes.position.pp_size
    _register_optimizer_hook()
    if processes.position.pp_size == 1:
        return
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]  # None ends it
        if name := NORMS.get(frame.f_code):
            raise ValueError(
                f"torch.nn.utils.{name}() sees only the gradients of the partition of this process. Call "
                f"pipe.clip_grad_norm_(max_norm) in every process instead. [partial-norm]"
            )


@cache
def _register_optimizer_hook() -> None:
    register_optimizer_step_pre_hook(_reject_optimizer)


def _reject_optimizer(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    needs_whole = any(kind.__name__ in WHOLE_MATRICES for kind in type(optimizer).__mro__)
    if not isinstance(optimizer, torch.optim.LBFGS) and not needs_whole:
        return
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    partitions = [count for pipe, count in list(_pipes.items()) if not own.isdisjoint(pipe.parameters())]
    if isinstance(optimizer, torch.optim.LBFGS) and max(partitions, default=1) > 1:
        raise ValueError(
            "LBFGS combines all parameters, but this process has only the parameters of its partition. Train in "
            "one process, or use a different optimizer. [partial-lbfgs]"
        )
    if needs_whole and partitions:
        shapes = [tuple(weight.shape) for weight in own if local_tensor(weight).shape != weight.shape]
        if shapes:
            raise ValueError(
                f"{type(optimizer).__name__} needs whole matrices, but {len(shapes)} of its {len(own)} weights "
                f"are sharded, such as one of shape {shapes[0]}. Pass sharded weights to an elementwise optimizer "
                f"such as AdamW, or do not shard them. [sharded-whole-matrix]"
            )


def find_tied_names(engine: PipelineStages) -> dict[str, str]:
    """Returns a dict from every additional name of a tied parameter to the first name of the parameter."""
    names = {
        (layer.index, id(module), leaf): layer.full_name(f"{path}.{leaf}" if path else leaf)
        for stage in engine.all
        for layer in stage.layers
        for path, module in layer.module.named_modules()
        for leaf in module._parameters
    }
    first_of: dict[str, str] = {}
    for shared in engine.shared:
        places = [(layer, id(module), leaf) for layer, slots in shared.slots.items() for module, leaf in slots]
        first, *others = [names[place] for place in places]  # a module that is several layers has several names
        first_of |= dict.fromkeys(others, first)
    return first_of
