"""A pipe in words: its stages, what they cost, what a step will take, and the findings."""

from collections.abc import Iterator, Sequence

from torch.nn.parameter import is_lazy

from gpipe.config.findings import layers_of_stages
from gpipe.config.settings import Settings
from gpipe.schedule.action import Kind
from gpipe.schedule.simulate import Prediction, equal_bubble


def summary(settings: Settings, plan: Prediction, findings: Sequence[str]) -> str:
    """Describes the stages of a pipe, what a step will take, and what was found."""
    lines = [*_table(settings, plan), *_balance(settings), *_step(settings, plan)]
    return "\n".join([*lines, *(f"finding: {text}" for text in findings)])


def _table(settings: Settings, plan: Prediction) -> Iterator[str]:
    costs, shares = settings.partition.seconds, _weight_shares(settings, plan)
    yield (
        f"{'stage':>5} {'rank':>4}  {'layers':<16} {'device':<8} {'remat':<12} "
        f"{'parameters':>12} {'MiB':>8} {'cost':>6} {'W':>5}"
    )
    for stage, (names, rank) in enumerate(zip(layers_of_stages(settings), settings.placement, strict=True)):
        parameters = {
            id(p): p for name in names for p in settings.layers[name].parameters() if not is_lazy(p)
        }.values()
        share = costs[stage] / (sum(costs) or 1)
        mib = sum(p.numel() * p.element_size() for p in parameters) / 2**20
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        yield (
            f"{stage:>5} {rank:>4}  {span:<16} {settings.devices[rank]!s:<8} {settings.remat[stage]:<12} "
            f"{sum(p.numel() for p in parameters):>12,} {mib:>8.1f} {share:>6.1%} {shares[stage]:>5}"
        )


def _weight_shares(settings: Settings, plan: Prediction) -> list[str]:
    """The share of W in the backward of each stage that is split: as measured, or half, as the plan takes it."""
    split = {action.stage for action in plan.program.actions if action.kind is Kind.BACKWARD_WEIGHT}
    costs = settings.stage_costs or [None] * plan.program.stages
    shares = [None if cost is None else cost.weight_share for cost in costs]
    words = ["half" if share is None else f"{share:.0%}" for share in shares]
    return [word if stage in split else "-" for stage, word in enumerate(words)]


def _balance(settings: Settings) -> Iterator[str]:
    found = settings.partition
    yield (
        f"the slowest stage costs {found.imbalance:.1f}% more than the mean, {found.gap:.1f}% more than any cuts "
        f"must cost"
    )
    if (layer := found.obstacle) is not None:
        share = found.chain.costs[layer] / found.mean
        yield f"in the way of better cuts: layer {list(settings.layers)[layer]}, {share:.0%} of a mean stage"


def _step(settings: Settings, plan: Prediction) -> Iterator[str]:
    k, m = plan.program.ranks, plan.program.micro_batches
    paper = settings.schedule.name == "gpipe" and k == plan.program.stages
    formula = " (K-1)/(M+K-1) =" if paper else ""
    each = f" of {plan.program.stages // k} stages" if plan.program.stages > k else ""
    yield (
        f"K={k} partitions{each}, M={m} micro-batches, schedule {settings.schedule.name}: bubble{formula} "
        f"{equal_bubble(plan.program):.1%} if the stages are equal"
    )
    takes = f"{plan.timeline.seconds:.4g} s, " if plan.unit == "seconds" else ""
    yield f"predicted step: {takes}{plan.bubble:.1%} of it idle, if every partition has a device of its own"
