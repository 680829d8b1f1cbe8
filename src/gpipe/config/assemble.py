"""Builds the stages of a pipe from the arguments of `GPipe`, in one process or in several processes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from gpipe.batch.microbatch import plain
from gpipe.config import options
from gpipe.config.agreement import agree_on_plan, find_own_position
from gpipe.config.arguments import Arguments, Mistakes, Settings
from gpipe.config.forward_writes import find_scaled_weights, find_shared_norms
from gpipe.config.make_plan import make_plan
from gpipe.config.resolve import RematOf, first_rows, read_driver, resolve, trace_model
from gpipe.distributed.elastic import ElasticProcesses
from gpipe.distributed.folder_rendezvous import FolderRendezvous, variables
from gpipe.distributed.launcher import end_with_launcher, warn_of_restarts
from gpipe.distributed.mesh import Position, is_joined
from gpipe.distributed.processes import Processes, SingleProcess
from gpipe.distributed.rendezvous import Rendezvous
from gpipe.distributed.sync_batchnorm import find_norms
from gpipe.planner.search.plan import Plan
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.schedule.lowering import Lowering
from gpipe.schedule.schedules import Placement
from gpipe.stages.host_weights import find_unsupported
from gpipe.stages.remote_layers import build_on_meta, drop_remote_weights
from gpipe.stages.sequence import split_into_stages
from gpipe.stages.shared_weights import tie
from gpipe.stages.stage import Layer, Stage
from gpipe.tracing.stage import TracedStage


def assemble(arguments: Arguments) -> tuple[Settings, Plan, SingleProcess]:
    """Connects the processes, reads the layers, makes a plan, and builds the stages of this process."""
    arguments = replace(arguments.follow_plan(), sample=plain(arguments.sample))
    driver = read_driver(arguments, Mistakes())  # `resolve` reports the mistakes.
    if not isinstance(driver, options.Processes):
        return _assemble_one_process(arguments)
    end_with_launcher()
    survives = driver.survive is True
    if not is_joined():
        find_own_position(arguments)  # Raises an error that says what is missing.
    warn_of_restarts()
    with Rendezvous() as rendezvous:
        position = find_own_position(arguments)
        if survives:
            variables()
            if arguments.seed is None:
                raise ValueError("survive=True requires a seed. Pass the same seed= in all replicas.")
            if position.replicas != 1:
                raise ValueError(
                    f"survive=True: this launcher started {position.replicas * position.pp_size} processes for "
                    f"{position.replicas} replicas. Start K={position.pp_size} processes for each replica, with a "
                    f"launcher of its own."
                )
        settings, plan, shared, name = agree_on_plan(arguments, position, rendezvous)
        engine, costs, measured = build(settings, plan, position), plan.partition.seconds, plan.measured
        if survives:  # GPipe.join connects this replica with the others.
            meeting = FolderRendezvous(position.pp_rank, position.pp_size, name, position.timeout, shared)
            processes: Processes = ElasticProcesses(meeting, engine, position, costs=costs, measured=measured)
            rendezvous.close()
        else:
            synchronized = settings.batch_norm == "synchronized"
            processes = Processes(engine, position, sync_batch_norm=synchronized, costs=costs, measured=measured)
            processes.link(rendezvous)
        if settings.traced is None:
            drop_remote_weights(engine.all, engine.local)
        else:
            drop_remote_weights(engine.all, engine.local, settings.traced.buffers_between())
            settings.traced.release_remote_parameters()
        return settings, plan, processes


def _assemble_one_process(arguments: Arguments) -> tuple[Settings, Plan, SingleProcess]:
    settings, plan = make_plan(arguments, *read(arguments))
    if (traced := settings.traced) is not None:
        if plan.slices > 1:
            traced.prove_slices(first_rows(arguments), plan.slices)
        traced.materialize(range(len(settings.layers)), settings.seed)
    return settings, plan, SingleProcess(build(settings, plan, None))


def read(arguments: Arguments, *, builds: bool = True) -> tuple[Settings, Placement, RematOf]:
    """Reads the layers and all arguments in one process, and ties the parameters that `ties` lists.

    Args:
        arguments: The arguments.
        builds: Whether to build layers that are passed as callables. If False, these layers stay on the meta device.
    """
    traced = trace_model(arguments)
    sketch = None if builds or traced is not None else build_on_meta(arguments.model, 0)
    settings, placement, remat = resolve(arguments, None, sketch, traced)
    tie(settings.tied)
    return replace(settings, tied=()), placement, remat


def build(settings: Settings, plan: Plan, position: Position | None) -> PipelineStages:
    """Groups the layers into stages and moves the stages of this process to their devices."""
    on_host, bounds = plan.resident is not None, plan.partition.bounds
    mistakes = Mistakes([*find_scaled_weights(settings, plan), *find_shared_norms(settings, plan)])
    pp_rank = None if position is None else position.pp_rank
    own = [stage for stage, rank in enumerate(plan.rank_of) if pp_rank in (None, rank)]
    if on_host:
        layers = [*settings.layers.items()]
        mistakes += find_unsupported(dict(pair for stage in own for pair in layers[slice(*bounds[stage])]))
    mistakes.raise_all()
    devices = [settings.devices[rank] for rank in plan.rank_of]
    make_stage: Callable[[int, Sequence[Layer], torch.device], Stage] = Stage
    if (traced := settings.traced) is not None:
        stage_of = [stage for stage, count in enumerate(plan.layers_per_partition) for _ in range(count)]
        make_stage = partial(TracedStage, parts=traced.parts, traces=traced.traces, stage_of=stage_of)
    stages = split_into_stages(settings.layers, plan.layers_per_partition, devices, own, make_stage, on_host=on_host)
    if settings.batch_norm == "synchronized":
        find_norms([layer for stage in stages for layer in stage.layers])  # Raises the same error in every process.
    lowering = Lowering(
        plan.rank_of,
        settings.schedule,
        plan.remat,
        unsplit=plan.unsplit or (),
        deferred_batch_norm=settings.batch_norm == "deferred",
    )
    return PipelineStages(
        stages,
        plan.micro_batches,
        lowering,
        traced=traced,
        tied=settings.tied,
        threaded=isinstance(settings.driver, options.Threads),
        intra_op_threads=settings.driver.intra_op_threads,
        pp_rank=pp_rank,
        replicas=1 if position is None else position.replicas,
        resident=plan.resident,
    )
