"""A pipe in words: its partitions, what they cost, the bubble, and what the doctor found."""

from collections.abc import Sequence

from gpipe.arguments import Settings
from gpipe.doctor import partitions
from gpipe.plan.timeline import bubble


def summary(settings: Settings, findings: Sequence[str]) -> str:
    """Describes the partitions, and says where there is something to gain."""
    cost = dict(zip(settings.layers, settings.costs, strict=True))
    total = sum(settings.costs) or 1
    lines = [
        f"{'partition':>9}  {'layers':<16} {'device':<8} {'remat':<12} {'parameters':>12} {'MiB':>8} {'cost':>6}"
    ]
    for stage, names in enumerate(partitions(settings)):
        parameters = {id(p): p for name in names for p in settings.layers[name].parameters()}.values()
        mib = sum(p.numel() * p.element_size() for p in parameters) / 2**20
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(
            f"{stage:>9}  {span:<16} {settings.devices[stage]!s:<8} {settings.remat[stage]:<12} "
            f"{sum(p.numel() for p in parameters):>12,} {mib:>8.1f} {sum(map(cost.__getitem__, names)) / total:>6.1%}"
        )
    k, m = len(settings.layers_per_partition), settings.micro_batches
    lines.append(
        f"K={k} partitions, M={m} micro-batches: bubble (K-1)/(M+K-1) = {bubble(k, m):.1%} if they are equal"
    )
    return "\n".join([*lines, *(f"finding: {text}" for text in findings)])
