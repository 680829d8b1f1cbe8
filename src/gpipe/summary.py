"""A pipe in words: its partitions, what they cost, and the bubble."""

from gpipe.arguments import Settings
from gpipe.plan.timeline import bubble


def summary(settings: Settings) -> str:
    """Describes the partitions, and says where there is something to gain."""
    counts, costs = settings.layers_per_partition, settings.costs
    names = list(settings.layers)
    lines = [f"{'partition':>9}  {'layers':<16} {'device':<8} {'remat':<12} {'parameters':>12} {'share of cost':>13}"]
    first = 0
    for stage, count in enumerate(counts):
        own = names[first : first + count]
        parameters = {id(p): p.numel() for name in own for p in settings.layers[name].parameters()}
        share = sum(costs[first : first + count]) / (sum(costs) or 1)
        span = own[0] if count == 1 else f"{own[0]} to {own[-1]}"
        lines.append(
            f"{stage:>9}  {span:<16} {settings.devices[stage]!s:<8} {settings.remat[stage]:<12} "
            f"{sum(parameters.values()):>12,} {share:>13.1%}"
        )
        first += count
    k, m = len(counts), settings.micro_batches
    lines.append(
        f"K={k} partitions, M={m} micro-batches: bubble (K-1)/(M+K-1) = {bubble(k, m):.1%} if they are equal"
    )
    if k > 1 and m < 4 * k:
        lines.append(f"hint: with M={4 * k}, four times K, the bubble would be {bubble(k, 4 * k):.1%}")
    return "\n".join(lines)
