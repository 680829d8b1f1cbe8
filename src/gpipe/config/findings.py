"""What a user is told: of the settings before the first step, of what the first steps show, and the summary.

Each finding is told once, with what to do.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from gpipe._torch.modules import AnyBatchNorm
from gpipe.config.settings import Settings
from gpipe.distributed.processes import OneProcess
from gpipe.planner.search.plan import Plan
from gpipe.planner.search.units import format_seconds
from gpipe.runtime.run import Run
from gpipe.schedule.action import Kind
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Schedule
from gpipe.schedule.simulate import Prediction, equal_bubble
from gpipe.stages.quantized import numbers_in, pieces_of

DWARFS = 1.5  # a stage this many times the mean sets the pace for all
SMALL = 0.1  # a bubble that is not worth a word


def examine_settings(settings: Settings, plan: Plan) -> list[str]:
    """Reports few micro-batches, and empty and costly stages."""
    empty = [
        f"stage {stage} has no parameters; an optimizer over it alone would be refused, and it does little work: "
        f"give costs, or join its layers to a neighbour by partitions=[...]"
        for stage, layers in enumerate(layers_of_stages(plan))
        if not any(True for name in layers for _ in settings.layers[name].parameters())
    ]
    return [*_bubble(settings.schedule, plan), *empty, *_giants(plan)]


def _bubble(schedule: Schedule, plan: Plan) -> Iterator[str]:
    k, m = plan.partitions, plan.micro_batches * plan.slices
    tables = {count: schedule.table(plan.rank_of, count) for count in (m, 4 * k)}
    if k == 1 or m >= 4 * k or not all(tables.values()):
        return
    programs = (Program.of(table or (), count, rank_of=plan.rank_of) for count, table in tables.items())
    now, then = map(equal_bubble, programs)
    if now > SMALL:
        each = f" of S={plan.slices} slices" if plan.slices > 1 else ""
        more = f"with M={-(-4 * k // plan.slices)}, four times K{'/S' * bool(each)}, it would be {then:.0%}"
        size = f"M={plan.micro_batches} micro-batches{each} for K={k} partitions"
        yield f"{size} leave a bubble of {now:.0%}; {more}"


def _giants(plan: Plan) -> Iterator[str]:
    """Finds ranks that the others wait for; where each has one stage, by the number of that."""
    costs, mean = plan.rank_seconds, sum(plan.rank_seconds) / plan.partitions
    rank_of = [
        rank for rank, count in zip(plan.rank_of, plan.layers_per_partition, strict=True) for _ in range(count)
    ]
    for rank, cost in enumerate(costs):
        if cost > DWARFS * mean:
            largest = max((at for at, own in enumerate(rank_of) if own == rank), key=plan.work.__getitem__)
            remedy = "cut that layer finer, use fewer partitions, or pass a sample, on which layers are timed"
            share = f"its largest layer is {plan.names[largest]} with {plan.work[largest] / cost:.0%} of it"
            name = f"stage {plan.rank_of.index(rank)}" if plan.stages_per_rank == 1 else f"rank {rank}"
            yield f"{name} costs {cost / mean:.1f} times the mean, so the others wait for it; {share}: {remedy}"


def layers_of_stages(plan: Plan) -> list[list[str]]:
    """The names of the layers of each stage."""
    names = iter(plan.names)
    return [[next(names) for _ in range(count)] for count in plan.layers_per_partition]


FEW_ROWS = 16  # of a micro-batch, below which BatchNorm is told of: its statistics are not the mini-batch's


def find_few_rows(layers: Iterable[nn.Module], rows: int, deferred: bool) -> list[str]:
    """Tells of BatchNorms that see too few rows of a micro-batch."""
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, AnyBatchNorm) and m.training]
    if not norms or rows >= FEW_ROWS:
        return []
    defer = (
        "; for running statistics of the whole mini-batch, as the script without a pipe has them in validation, "
        "give batch_norm='deferred'"
    )
    remedy = f"use fewer micro-batches or a larger mini-batch{'' if deferred else defer}"
    return [f"BatchNorm normalizes micro-batches of {rows} rows, too few for good statistics: {remedy}"]


def find_unused_parameters(module: nn.Module) -> list[str]:
    """Tells of parameters to which the first backward brought no gradient."""
    unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    remedy = "take them out of the optimizer, or freeze them with requires_grad_(False), if that is meant"
    names = ", ".join(unused)
    return [f"{names}: no gradient came to these parameters in the first step; {remedy}"] if unused else []


MOST_LETTERS = 40  # of the names of a stage's layers
logger = logging.getLogger("gpipe")


class Examination:
    """The findings of a pipe so far."""

    def __init__(self, settings: Settings, plan: Plan, processes: OneProcess) -> None:
        engine = processes.engine
        self.findings = [*examine_settings(settings, plan), *processes.findings()]
        self._is_first = True  # whether no mini-batch has been trained yet
        self._layers = {str(layer): layer.module for stage in engine.own for layer in stage.layers}
        self._deferred = engine.lowering.deferred_batch_norm
        self._few_rows = FEW_ROWS  # per micro-batch: fewer may be a finding
        for finding in self.findings:
            logger.info(finding)

    def compare(self, run: Run, whole: nn.Module | None = None) -> None:
        """Reports what a mini-batch has shown; `whole` is the pipe, if its gradients are complete."""
        self.tell(run.findings)
        if self._is_first:
            self._is_first = False
            self.tell(find_unused_parameters(whole) if whole is not None else [])
        if (rows := min(run.micro_batch_sizes)) < self._few_rows:
            few = find_few_rows(self._layers.values(), rows, self._deferred)
            self._few_rows = 0 if few else rows
            self.tell(few)

    def tell(self, findings: Sequence[str]) -> None:
        """Says what was found, each once, and keeps it."""
        for finding in dict.fromkeys(findings):
            if finding not in self.findings:
                self.findings.append(finding)
                logger.warning(finding)


def summary(settings: Settings, plan: Plan, prediction: Prediction, findings: Sequence[str]) -> str:
    """Describes the stages of a pipe, what a step will take, and what was found."""
    found = (f"finding: {text}" for text in findings)
    return "\n".join(
        [*_table(settings, plan, prediction), *_balance(plan), *_step(settings.schedule, plan, prediction), *found]
    )


def _balance(plan: Plan) -> Iterator[str]:
    """Says how far the slowest stage, or rank of several stages, is from the mean."""
    if plan.stages_per_rank > 1:
        over = max(plan.rank_seconds) * plan.partitions / (sum(plan.rank_seconds) or 1) - 1
        yield f"the slowest rank costs {max(0.0, over):.1%} more than the mean"
        return
    found = plan.partition
    over_mean, least = f"{found.imbalance:.1f}%", f"{found.gap:.1f}%"
    cuts = "" if over_mean == least else f", {least} more than any cuts must cost"
    yield f"the slowest stage costs {over_mean} more than the mean{cuts}"
    if (layer := found.obstacle) is not None and (share := found.layer_costs.costs[layer] / found.mean) >= 0.01:
        yield f"in the way of better cuts: layer {plan.names[layer]}, {share:.0%} of a mean stage"


def _table(settings: Settings, plan: Plan, prediction: Prediction) -> Iterator[str]:
    costs = plan.partition.seconds
    split = {action.stage for action in prediction.program.actions if action.kind is Kind.BACKWARD_WEIGHT}
    each = layers_of_stages(plan)
    spans = [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in each]
    wide = min(MOST_LETTERS, max(16, *map(len, spans)))
    yield f"stage rank  {'layers':<{wide}} device   remat          parameters      MiB   cost     W"
    for stage, (names, rank) in enumerate(zip(each, plan.rank_of, strict=True)):
        parameters = {p for name in names for p in settings.layers[name].parameters() if not is_lazy(p)}
        share = costs[stage] / (sum(costs) or 1)
        mib = sum(piece.nbytes for p in parameters for piece in pieces_of(p)) / 2**20
        of_weights = plan.costs[stage].weight_share
        part = "-" if stage not in split else "half" if of_weights is None else f"{of_weights:.0%}"
        yield (
            f"{stage:>5} {rank:>4}  {spans[stage]:<{wide}.{wide}} {settings.devices[rank]!s:<8} "
            f"{plan.remat[stage]:<12} {sum(map(numbers_in, parameters)):>12,} {mib:>8.1f} {share:>6.1%} {part:>5}"
        )
    yield "W: of a backward, the part for gradients of weights, where the schedule has that wait"


def _step(schedule: Schedule, plan: Plan, prediction: Prediction) -> Iterator[str]:
    k, m, slices = plan.partitions, plan.micro_batches, plan.slices
    paper = schedule.name == "gpipe" and plan.stages_per_rank == 1
    formula = f" (K-1)/({'MS' if slices > 1 else 'M'}+K-1) =" if paper else ""
    cut = f" of S={slices} slices" if slices > 1 else ""
    each = f" of {plan.stages_per_rank} stages" if plan.stages_per_rank > 1 else ""
    yield (
        f"K={k} partition{'s' * (k > 1)}{each}, M={m} micro-batch{'es' * (m > 1)}{cut}, "
        f"schedule {schedule.name}: bubble{formula} {equal_bubble(prediction.program):.1%} if the stages are equal"
    )
    if plan.least_seconds is not None:
        yield from plan.compared()
    takes = f"{format_seconds(prediction.timeline.seconds)}, " if prediction.unit == "seconds" else ""
    idle = f"{takes}{prediction.bubble:.1%} of it idle"
    yield f"predicted step: {idle}, recomputes counted, if each partition has a device"
