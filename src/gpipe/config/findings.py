"""Finds problems that make a pipe slow or change its results, in its settings and its first steps."""

import logging
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from gpipe._torch.modules import AnyBatchNorm
from gpipe.distributed.processes import SingleProcess
from gpipe.planner.search.plan import Plan
from gpipe.runtime.run import Run
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import Schedule
from gpipe.schedule.simulate import equal_bubble

SLOW_RANK = 1.5  # A rank that takes this many times the mean is reported.
SMALL_BUBBLE = 0.1  # A bubble up to this share is not reported.
FEW_ROWS = 16  # BatchNorm with fewer rows per micro-batch is reported.

logger = logging.getLogger("gpipe")


class Findings:
    """Collects the findings of a pipe and logs each finding once. The finding about a large bubble is not logged."""

    def __init__(self, layers: Sequence[nn.Module], schedule: Schedule, plan: Plan, processes: SingleProcess) -> None:
        engine = processes.engine
        logged = [*examine_settings(layers, plan), *processes.findings()]
        self.messages = [*_find_large_bubble(schedule, plan), *logged]  # M is a choice, so the bubble is not logged.
        self._is_first_step = True
        self._layers = [layer.module for stage in engine.local for layer in stage.layers]
        self._deferred = engine.lowering.deferred_batch_norm
        self._few_rows = FEW_ROWS  # Micro-batches with fewer rows are examined.
        for message in logged:
            logger.info(message)

    def examine_step(self, run: Run, whole: nn.Module | None = None) -> None:
        """Adds and logs the findings of a training step.

        Args:
            run: The run of the step.
            whole: The pipe, if its gradients are complete.
        """
        self.report(run.findings)
        if self._is_first_step:
            self._is_first_step = False
            self.report(find_unused_parameters(whole) if whole is not None else [])
        if (rows := min(run.micro_batch_sizes)) < self._few_rows:
            messages = find_few_rows(self._layers, rows, self._deferred)
            self._few_rows = 0 if messages else rows
            self.report(messages)

    def report(self, messages: Sequence[str]) -> None:
        """Adds and logs the findings that have not been reported before."""
        for message in dict.fromkeys(messages):
            if message not in self.messages:
                self.messages.append(message)
                logger.warning(message)


def examine_settings(layers: Sequence[nn.Module], plan: Plan) -> list[str]:
    """Returns a finding for each stage without parameters and for each slow rank."""
    empty = [
        f"Stage {stage} has no parameters, so it does little work, and torch rejects an optimizer of this stage "
        f"only. Join its layers with a neighboring stage by partitions=[...]. [stage-without-parameters]"
        for stage, (first, end) in enumerate(plan.partition.bounds)
        if not any(True for layer in layers[first:end] for _ in layer.parameters())
    ]
    return [*empty, *_find_slow_ranks(plan)]


def _find_large_bubble(schedule: Schedule, plan: Plan) -> Iterator[str]:
    k, m = plan.partitions, plan.micro_batches * plan.slices
    tables = {count: schedule.table(plan.rank_of, count) for count in (m, 4 * k)}
    if k == 1 or m >= 4 * k or not all(tables.values()):
        return
    programs = (Program.of(table or (), count, rank_of=plan.rank_of) for count, table in tables.items())
    bubble, smaller = map(equal_bubble, programs)
    if bubble > SMALL_BUBBLE:
        yield (
            f"partitions={k} and micro_batches={plan.micro_batches} leave a bubble of {bubble:.0%}. Use "
            f"micro_batches={-(-4 * k // plan.slices)} to reduce it to {smaller:.0%}. [large-bubble]"
        )


def _find_slow_ranks(plan: Plan) -> Iterator[str]:
    """Yields a finding for each slow rank. The finding names the stage instead if every rank has only one stage."""
    seconds = plan.rank_seconds
    mean = sum(seconds) / plan.partitions
    rank_of = [
        rank for rank, count in zip(plan.rank_of, plan.layers_per_partition, strict=True) for _ in range(count)
    ]
    for rank, cost in enumerate(seconds):
        if cost > SLOW_RANK * mean:
            largest = max((layer for layer, own in enumerate(rank_of) if own == rank), key=plan.work.__getitem__)
            name = f"Stage {plan.rank_of.index(rank)}" if plan.stages_per_rank == 1 else f"Rank {rank}"
            fix = "Split that layer, use fewer partitions, or pass sample= so that gpipe measures the layers"
            if plan.measured:
                fix = "Split that layer, or use fewer partitions"
            yield (
                f"{name} costs {cost / mean:.1f} times the mean, so the other ranks wait for it. Its largest layer "
                f"is {plan.names[largest]}, with {plan.work[largest] / cost:.0%} of its cost. {fix}. "
                "[unbalanced-stages]"
            )


def find_few_rows(layers: Iterable[nn.Module], rows: int, deferred: bool) -> list[str]:
    """Returns a finding if a BatchNorm in training mode normalizes too few rows."""
    modules = (module for layer in layers for module in layer.modules())
    if rows >= FEW_ROWS or not any(isinstance(module, AnyBatchNorm) and module.training for module in modules):
        return []
    advice = "" if deferred else " Pass batch_norm='deferred' for running statistics of the whole mini-batch."
    return [
        f"BatchNorm normalizes micro-batches of {rows} rows, too few for good statistics. Use fewer micro-batches or "
        f"a larger mini-batch.{advice} [batchnorm-small-batches]"
    ]


def find_unused_parameters(module: nn.Module) -> list[str]:
    """Returns a finding if trainable parameters have no gradient after the first backward pass."""
    unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if not unused:
        return []
    return [
        f"{', '.join(unused)}: no gradient reached these parameters in the first step. Remove them from the "
        f"optimizer, or freeze these parameters with requires_grad_(False). [no-gradient]"
    ]
