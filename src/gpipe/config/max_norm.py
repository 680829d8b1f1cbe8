"""Finds embeddings that scale their weight in each forward, where a stage would do so more often than the loop."""

from collections.abc import Iterator

from torch import nn

from gpipe.config.settings import Settings
from gpipe.planner.search.plan import Plan
from gpipe.stages.shared_weights import find_shared

SCALED = (
    "{layer} scales its weight in each forward (max_norm={most}), and {why}. {fix}, or leave out max_norm and scale "
    "the weight after optimizer.step(), under torch.no_grad(): weight.renorm_({p}, 0, {most})"
)


def find_scaled_weights(settings: Settings, plan: Plan) -> Iterator[str]:
    """Finds embeddings with `max_norm` that recompute, or share their weight with another stage; says what to do."""
    layers = [*enumerate(settings.layers.items())]
    stage_of = [stage for stage, count in enumerate(plan.layers_per_partition) for _ in range(count)]
    shared = find_shared([*settings.layers.values()], settings.tied)
    users = {slot: [*one.slots] for one in shared for slots in one.slots.values() for slot in slots}
    words = [f"layer {at} ({name}: {vars(one).get('stands_for', type(one).__name__)})" for at, (name, one) in layers]
    for at, (_, layer) in layers:
        stage = stage_of[at]
        for module in layer.modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
                continue
            wrong, remat = {}, plan.remat[stage]
            others = [other for other in users.get((module, "weight"), ()) if stage_of[other] != stage]
            if others:
                wrong[f"{words[others[0]]}, in another stage, uses this weight too"] = (
                    "Put both layers into one stage"
                )
            if remat not in ("never", "offload"):
                why = f"stage {stage} recomputes its forwards (remat={remat!r})"
                wrong[why] = "Pass remat='never' for this stage"
            for why, fix in wrong.items():
                yield SCALED.format(layer=words[at], most=module.max_norm, why=why, fix=fix, p=module.norm_type)
