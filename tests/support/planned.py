"""Pipes that are split by given costs, so that nothing is measured."""

from typing import Any

import gpipe
from gpipe.batch.microbatch import TWO_ROWS, first_micro_batch, plain
from gpipe.schedule.schedules import SCHEDULES
from gpipe.tracing.layers_of import ModelLayers, is_model


def staged(schedule: str, stages: int) -> str | gpipe.Interleaved:
    """Returns a schedule with this number of stages on each rank."""
    return schedule if SCHEDULES[schedule].stages_per_rank == stages else gpipe.Interleaved(stages, schedule)


def pipe_by_costs(
    model: Any,
    partitions: Any,
    micro_batches: Any,
    *,
    costs: Any = "params",
    sample: Any = None,
    schedule: Any = "gpipe",
    remat: Any = "always",
    balance: Any = "variance",
    blocks: Any = None,
    **how: Any,
) -> gpipe.GPipe:
    """Builds a pipe that follows a plan made by these costs."""
    if sample is not None and is_model(model) and not isinstance(model, ModelLayers):
        model = gpipe.layers_of(model, first_micro_batch(plain(sample), micro_batches, least=TWO_ROWS), blocks)
    plan = gpipe.find_plan(
        model,
        sample,
        1,
        partitions=partitions,
        micro_batches=micro_batches,
        schedule=schedule,
        remat=remat,
        costs=costs,
        balance=balance,
    )
    return gpipe.GPipe(model, plan=plan, sample=sample, **how)
