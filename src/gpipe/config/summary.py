"""Formats the summary of a pipe: its stages, their balance, the predicted step and the findings."""

from collections.abc import Iterator, Sequence

from torch.nn.parameter import is_lazy

from gpipe.config.arguments import Settings
from gpipe.planner.search.plan import Plan
from gpipe.planner.search.units import format_bytes, format_seconds
from gpipe.schedule.action import Kind
from gpipe.schedule.schedules import Schedule
from gpipe.schedule.simulate import Prediction, equal_bubble
from gpipe.stages.quantized import numbers_in, pieces_of

MOST_LETTERS = 40  # of the column with the names of layers


def summary(settings: Settings, plan: Plan, prediction: Prediction, findings: Sequence[str]) -> str:
    """Returns a table of the stages, the predicted step, and the findings."""
    return "\n".join(
        [
            *_table(settings, plan, prediction),
            *_balance(plan),
            *_step(settings.schedule, plan, prediction),
            *(f"finding: {message}" for message in findings),
        ]
    )


def _table(settings: Settings, plan: Plan, prediction: Prediction) -> Iterator[str]:
    seconds, layers = plan.partition.seconds, list(settings.layers.values())
    split = {action.stage for action in prediction.program.actions if action.kind is Kind.BACKWARD_WEIGHT}
    bounds = plan.partition.bounds
    names = [(plan.names[first], plan.names[end - 1]) for first, end in bounds]
    spans = [first if first == last else f"{first} to {last}" for first, last in names]
    width = min(MOST_LETTERS, max(16, *map(len, spans)))
    yield f"stage rank  {'layers':<{width}} device   remat          parameters      MiB   cost     W"
    for stage, ((first, end), rank) in enumerate(zip(bounds, plan.rank_of, strict=True)):
        parameters = {p for layer in layers[first:end] for p in layer.parameters() if not is_lazy(p)}
        cost = seconds[stage] / (sum(seconds) or 1)
        mib = sum(piece.nbytes for p in parameters for piece in pieces_of(p)) / 2**20
        measured = plan.costs[stage].weight_share
        deferred = "-" if stage not in split else "half" if measured is None else f"{measured:.0%}"
        yield (
            f"{stage:>5} {rank:>4}  {spans[stage]:<{width}.{width}} {settings.devices[rank]!s:<8} "
            f"{plan.remat[stage]:<12} {sum(map(numbers_in, parameters)):>12,} {mib:>8.1f} {cost:>6.1%} {deferred:>5}"
        )
    yield "W: the share of the backward pass that the schedule defers (gradients of weights)"


def _balance(plan: Plan) -> Iterator[str]:
    """Compares the slowest stage with the mean, or the slowest rank if ranks have several stages."""
    if plan.stages_per_rank > 1:
        ratio = max(plan.rank_seconds) * plan.partitions / (sum(plan.rank_seconds) or 1)
        yield f"the slowest rank costs {max(0.0, ratio - 1):.1%} more than the mean"
        return
    cuts = plan.partition
    over_mean, over_bound = f"{cuts.imbalance:.1f}%", f"{cuts.gap:.1f}%"
    bound = "" if over_mean == over_bound else f", {over_bound} more than the lower bound for any split"
    yield f"the slowest stage costs {over_mean} more than the mean{bound}"
    if (layer := cuts.obstacle) is not None and (share := cuts.layer_costs.costs[layer] / cuts.mean) >= 0.01:
        yield f"layer {plan.names[layer]} prevents a better split: it costs {share:.0%} of a mean stage"


def _step(schedule: Schedule, plan: Plan, prediction: Prediction) -> Iterator[str]:
    k, m, slices = plan.partitions, plan.micro_batches, plan.slices
    is_paper = schedule.name == "gpipe" and plan.stages_per_rank == 1
    formula = f" (K-1)/({'MS' if slices > 1 else 'M'}+K-1) =" if is_paper else ""
    cut = f" of S={slices} slices" if slices > 1 else ""
    each = f" of {plan.stages_per_rank} stages" if plan.stages_per_rank > 1 else ""
    yield (
        f"K={k} partition{'s' * (k > 1)}{each}, M={m} micro-batch{'es' * (m > 1)}{cut}, "
        f"schedule {schedule.name}: bubble{formula} {equal_bubble(prediction.program):.1%} if the stages are equal"
    )
    if plan.least_seconds is not None:
        yield from plan.compared()
    seconds = f"{format_seconds(prediction.timeline.seconds)}, " if prediction.unit == "seconds" else ""
    yield (
        f"predicted step: {seconds}{prediction.bubble:.1%} idle, including recomputation, if each partition has its "
        f"own device"
    )
    yield from plan.explain_host()
    if plan.resident is not None and prediction.peak_bytes is not None:
        yield f"predicted memory of a rank: at most {format_bytes(max(prediction.peak_bytes))}"
    yield from plan.explain_load()
