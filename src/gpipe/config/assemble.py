"""A pipe is put together: read, planned and built in one process or, the same everywhere, in several."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from gpipe.batch.microbatch import plain
from gpipe.config import options
from gpipe.config.agreement import agree_on_plan, position_of
from gpipe.config.check import Arguments, Mistakes, RematOf, check, first_rows, read_model_of
from gpipe.config.make_plan import make_plan
from gpipe.config.max_norm import find_scaled_weights
from gpipe.config.options import read_driver
from gpipe.config.settings import Settings
from gpipe.distributed.launcher import end_with_launcher
from gpipe.distributed.mesh import Position, is_joined
from gpipe.distributed.processes import OneProcess, Processes
from gpipe.distributed.rendezvous import Rendezvous
from gpipe.distributed.survivors import Meeting, Survivors, variables
from gpipe.distributed.sync_batchnorm import find_norms
from gpipe.planner.search.plan import Plan
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.schedule.lowering import Lowering
from gpipe.schedule.schedules import Placement
from gpipe.stages.remote_layers import build_on_meta, drop_remote_weights
from gpipe.stages.sequence import cut_into_stages
from gpipe.stages.shared_weights import tie
from gpipe.stages.stage import Layer, Stage
from gpipe.tracing.stage import TracedStage


def assemble(asked: Arguments) -> tuple[Settings, Plan, OneProcess]:
    """Joins the processes, reads the layers, makes the plan and builds the stages that run here."""
    asked = replace(asked.follow_plan(), sample=plain(asked.sample))
    driver, _ = read_driver(asked.driver, has_mesh=asked.mesh is not None)  # what is wrong is said by `check`
    if not isinstance(driver, options.Processes):
        return _assemble_alone(asked)
    end_with_launcher()
    survives = driver.survive is True
    if not is_joined():
        position_of(asked)  # says what is missing
    with Rendezvous() as rendezvous:
        position = position_of(asked)
        if survives:
            variables()
            if asked.seed is None or position.replicas != 1:
                raise ValueError(
                    f"survive=True: give seed=, the same to all replicas, and start K={position.rows} processes for "
                    f"each of them by a launcher of its own; this one has {position.replicas * position.rows}"
                )
        settings, plan, same, name = agree_on_plan(asked, position, rendezvous)
        engine, costs, measured = build(settings, plan, position), plan.partition.seconds, plan.measured
        if survives:  # `join` links up with the other replicas
            meeting = Meeting(position.row, position.rows, name, position.timeout, same)
            processes: Processes = Survivors(meeting, engine, position, costs=costs, measured=measured)
            rendezvous.close()
        else:
            synchronized = settings.batch_norm == "synchronized"
            processes = Processes(engine, position, sync_batch_norm=synchronized, costs=costs, measured=measured)
            processes.link(rendezvous)
        if settings.traced is None:
            drop_remote_weights(engine.all, engine.own)
        else:
            drop_remote_weights(engine.all, engine.own, settings.traced.buffers_between())
            settings.traced.let_go()
        return settings, plan, processes


def _assemble_alone(asked: Arguments) -> tuple[Settings, Plan, OneProcess]:
    settings, plan = make_plan(asked, *read(asked))
    if (traced := settings.traced) is not None:
        if plan.slices > 1:
            traced.prove_slices(first_rows(asked), plan.slices)
        traced.realize(range(len(settings.layers)), settings.seed)
    return settings, plan, OneProcess(build(settings, plan, None))


def read(asked: Arguments, *, builds: bool = True) -> tuple[Settings, Placement, RematOf]:
    """Reads the layers and all arguments, in one process, where ties are tied at once.

    Unless it `builds`, layers that are given as callables stay on the meta device.
    """
    traced = read_model_of(asked)
    sketch = None if builds or traced is not None else build_on_meta(asked.model, 0)
    settings, placement, remat = check(asked, None, sketch, traced)
    tie(settings.tied)
    return replace(settings, tied=()), placement, remat


def build(settings: Settings, plan: Plan, position: Position | None) -> PipelineStages:
    """Puts the layers into stages, on their devices."""
    Mistakes(find_scaled_weights(settings, plan)).raise_all()
    row = None if position is None else position.row
    own = [stage for stage, rank in enumerate(plan.rank_of) if row in (None, rank)]
    devices = [settings.devices[rank] for rank in plan.rank_of]
    make: Callable[[int, Sequence[Layer], torch.device], Stage] = Stage
    if (traced := settings.traced) is not None:
        stage_of = [stage for stage, count in enumerate(plan.layers_per_partition) for _ in range(count)]
        make = partial(TracedStage, parts=traced.parts, traces=traced.traces, stage_of=stage_of)
    stages = cut_into_stages(settings.layers, plan.layers_per_partition, devices, own, make)
    if settings.batch_norm == "synchronized":
        find_norms([layer for stage in stages for layer in stage.layers])  # refused everywhere alike
    return PipelineStages(
        stages,
        plan.micro_batches,
        Lowering(
            plan.rank_of,
            settings.schedule,
            plan.remat,
            unsplit=plan.unsplit or (),
            deferred_batch_norm=settings.batch_norm == "deferred",
        ),
        traced=traced,
        tied=settings.tied,
        threaded=isinstance(settings.driver, options.Threads),
        intra_op_threads=settings.driver.intra_op_threads,
        row=row,
        replicas=1 if position is None else position.replicas,
    )
