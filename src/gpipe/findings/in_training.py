"""Tells what the first steps show: micro-batches too small for BatchNorm, parameters without a gradient."""

from collections.abc import Sequence

from torch import nn

from gpipe.torch_private.modules import AnyBatchNorm

FEW_ROWS = 8  # per micro-batch: below it the statistics of a BatchNorm are mostly noise


def find_few_rows(layers: Sequence[nn.Module], rows: int, deferred: bool) -> list[str]:
    """Tells of BatchNorms that see too few rows of a micro-batch."""
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, AnyBatchNorm) and m.training]
    if not norms or rows >= FEW_ROWS:
        return []
    remedy = "" if deferred else ", and deferred_batch_norm=True for running statistics of the whole mini-batch"
    return [
        f"BatchNorm normalizes micro-batches of {rows} rows, too few for good statistics; use fewer micro-batches or "
        f"a larger mini-batch{remedy}"
    ]


def find_unused_parameters(module: nn.Module) -> list[str]:
    """Tells of parameters to which the first backward brought no gradient."""
    unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if not unused:
        return []
    return [
        f"{', '.join(unused)}: no gradient came to these parameters in the first step; take them out of the "
        f"optimizer, or freeze them with requires_grad_(False), if that is meant"
    ]
