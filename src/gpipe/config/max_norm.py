"""Rejects embeddings with `max_norm` whose weight would be scaled more often than in the reference loop."""

from collections.abc import Iterator

from torch import nn

from gpipe.config.arguments import Settings
from gpipe.planner.search.plan import Plan
from gpipe.stages.shared_weights import find_shared

SCALED = (
    "{layer} scales its weight in each forward pass (max_norm={max_norm}), and {reason}. {fix} max_norm and "
    "call weight.renorm_({p}, 0, {max_norm}) under torch.no_grad() after optimizer.step(). [embedding-max-norm]"
)


def find_scaled_weights(settings: Settings, plan: Plan) -> Iterator[str]:
    """Yields an error message for each embedding with `max_norm` that is recomputed or used in several stages."""
    layers = [*enumerate(settings.layers.items())]
    stage_of = [stage for stage, count in enumerate(plan.layers_per_partition) for _ in range(count)]
    shared = find_shared([*settings.layers.values()], settings.tied)
    users = {slot: [*weight.slots] for weight in shared for slots in weight.slots.values() for slot in slots}
    labels = [
        f"layer {i} ({name}: {vars(layer).get('stands_for', type(layer).__name__)})" for i, (name, layer) in layers
    ]
    for index, (_, layer) in layers:
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
