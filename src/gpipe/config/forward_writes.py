"""Rejects layers that write to a weight or a buffer in their forward pass, if the result would depend on the split.

Embeddings with `max_norm` scale their weight. BatchNorm updates its running statistics.
"""

from collections.abc import Iterator

from torch import nn

from gpipe._torch.modules import AnyBatchNorm
from gpipe.config.arguments import Settings
from gpipe.planner.search.plan import Plan
from gpipe.stages.shared_weights import find_shared

SCALED = (
    "{layer} scales its weight in each forward pass (max_norm={max_norm}), and {reason}. {fix} max_norm and "
    "call weight.renorm_({p}, 0, {max_norm}) under torch.no_grad() after optimizer.step(). [embedding-max-norm]"
)
SHARED_NORM = (
    "{layer} and {other}, in another stage, update the running statistics of the same BatchNorm, in an order that "
    "depends on the schedule. Use two BatchNorms, put both layers into one stage, or call eval() on the BatchNorm "
    "before you create the pipe. [batchnorm-in-several-stages]"
)


def find_scaled_weights(settings: Settings, plan: Plan) -> Iterator[str]:
    """Yields an error message for each embedding with `max_norm` that is recomputed or used in several stages."""
    stage_of, labels = _stage_of(plan), _labels(settings)
    shared = find_shared([*settings.layers.values()], settings.tied)
    users = {slot: [*weight.slots] for weight in shared for slots in weight.slots.values() for slot in slots}
    for index, layer in enumerate(settings.layers.values()):
        stage = stage_of[index]
        for module in layer.modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
                continue
            fixes, remat = {}, plan.remat[stage]
            if others := [user for user in users.get((module, "weight"), ()) if stage_of[user] != stage]:
                reason = f"{labels[others[0]]}, in another stage, uses this weight too"
                fixes[reason] = "Put both layers into one stage, or remove"
            if remat not in ("never", "offload"):
                reason = f"stage {stage} recomputes its forward passes (remat={remat!r})"
                never = "Pass remat='never' for this stage, or remove"
                fixes[reason] = never if plan.resident is None else "Remove"
            for reason, fix in fixes.items():
                yield SCALED.format(
                    layer=labels[index], max_norm=module.max_norm, reason=reason, fix=fix, p=module.norm_type
                )


def find_shared_norms(settings: Settings, plan: Plan) -> Iterator[str]:
    """Yields an error message for each BatchNorm in training mode that layers of several stages use."""
    stage_of, labels = _stage_of(plan), _labels(settings)
    first: dict[nn.Module, int] = {}  # the index of the first layer
    for index, layer in enumerate(settings.layers.values()):
        for module in layer.modules():
            if not isinstance(module, AnyBatchNorm) or not module.training or module.running_mean is None:
                continue
            other = first.setdefault(module, index)
            if stage_of[other] != stage_of[index]:
                yield SHARED_NORM.format(layer=labels[index], other=labels[other])


def _stage_of(plan: Plan) -> list[int]:
    """Returns the stage of each layer."""
    return [stage for stage, count in enumerate(plan.layers_per_partition) for _ in range(count)]


def _labels(settings: Settings) -> list[str]:
    """Returns the name of each layer in messages."""
    return [
        f"layer {index} ({name}: {vars(layer).get('stands_for', type(layer).__name__)})"
        for index, (name, layer) in enumerate(settings.layers.items())
    ]
