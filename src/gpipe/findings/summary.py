"""A pipe in words: its stages, what they cost, what a step will take, and the findings."""

from collections.abc import Iterator, Sequence

from torch.nn.parameter import is_lazy

from gpipe.build.settings import Settings
from gpipe.findings.before_training import partitions
from gpipe.plan.simulate import Plan
from gpipe.plan.timeline import bubble


def summary(settings: Settings, plan: Plan, findings: Sequence[str]) -> str:
    """Describes the stages of a pipe, what a step will take, and what was found."""
    lines = [*_table(settings), *_balance(settings), *_step(plan)]
    return "\n".join([*lines, *(f"finding: {text}" for text in findings)])


def _table(settings: Settings) -> Iterator[str]:
    costs = settings.partition.seconds
    yield f"{'partition':>9}  {'layers':<16} {'device':<8} {'remat':<12} {'parameters':>12} {'MiB':>8} {'cost':>6}"
    for stage, names in enumerate(partitions(settings)):
        parameters = {
            id(p): p for name in names for p in settings.layers[name].parameters() if not is_lazy(p)
        }.values()
        mib = sum(p.numel() * p.element_size() for p in parameters) / 2**20
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        yield (
            f"{stage:>9}  {span:<16} {settings.devices[settings.placement[stage]]!s:<8} {settings.remat[stage]:<12} "
            f"{sum(p.numel() for p in parameters):>12,} {mib:>8.1f} {costs[stage] / (sum(costs) or 1):>6.1%}"
        )


def _balance(settings: Settings) -> Iterator[str]:
    found = settings.partition
    yield (
        f"the slowest partition costs {found.imbalance:.1f}% more than the mean, {found.gap:.1f}% more than any cuts "
        f"must cost"
    )
    if (layer := found.obstacle) is not None:
        share = found.chain.costs[layer] / found.mean
        yield f"in the way of better cuts: layer {list(settings.layers)[layer]}, {share:.0%} of a mean partition"


def _step(plan: Plan) -> Iterator[str]:
    k, m = plan.program.ranks, plan.program.micro_batches
    yield f"K={k} partitions, M={m} micro-batches: bubble (K-1)/(M+K-1) = {bubble(k, m):.1%} if they are equal"
    takes = f"{plan.timeline.seconds:.4g} s, " if plan.unit == "seconds" else ""
    yield f"predicted step: {takes}{plan.bubble:.1%} of it idle, if every partition has a device of its own"
