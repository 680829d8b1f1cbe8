"""A pipe is put together: settled in one process or, the same everywhere, in several, each with its own layers."""

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from gpipe._torch.accelerator import memory_of
from gpipe.config.check import Arguments, Mistakes, check, count_ranks, draw_seed, read_schedule
from gpipe.config.settings import Settings, settle
from gpipe.distributed.agree import agree
from gpipe.distributed.launcher import end_with_launcher
from gpipe.distributed.mesh import Position, find_position, is_joined
from gpipe.distributed.processes import OneProcess, Processes
from gpipe.distributed.rendezvous import BUILDING, LINKING, Rendezvous
from gpipe.distributed.survivors import Meeting, Survivors, variables
from gpipe.distributed.sync_batchnorm import find_norms
from gpipe.errors import is_count
from gpipe.planner.search.shapes import AUTO
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.schedule.cost import StageCost
from gpipe.schedule.lowering import Lowering
from gpipe.schedule.schedules.by_name import from_json
from gpipe.stages.buffers import Slot
from gpipe.stages.digest import checksum
from gpipe.stages.microbatch import TWO_ROWS, first_micro_batch, plain
from gpipe.stages.sequence import Outline, cut_into_stages, outline, realize, release
from gpipe.stages.shared_weights import find_shared, find_ties, tie
from gpipe.stages.stage import Layer, Stage
from gpipe.stages.tree import Tree
from gpipe.tracing.layers_of import is_model, read_model
from gpipe.tracing.model import TracedModel
from gpipe.tracing.stage import TracedStage


def assemble(asked: Arguments) -> tuple[Settings, OneProcess]:
    """Settles what the pipe is made of, and puts its layers into stages on their devices; links processes up."""
    asked = replace(asked.follow_plan(), sample=plain(asked.sample))
    survives = asked.survive is True  # or it is a mistake
    if asked.driver != "process" and asked.mesh is None and not survives:
        settings = settle(asked, traced=_read_model(asked))
        if settings.traced is not None:
            if settings.slices > 1:
                settings.traced.prove_slices(_first(asked), settings.slices)
            settings.traced.realize(range(len(settings.layers)), settings.seed)
        return settings, OneProcess(_engine(settings, None))
    end_with_launcher()
    if not is_joined():
        _find_position(asked)  # says what is missing
    with Rendezvous() as rendezvous:
        position = _find_position(asked)
        if survives:
            variables()
            if asked.seed is None or position.replicas != 1:
                raise ValueError(
                    f"survive=True: give seed=, the same to all replicas, and start K={position.rows} processes for "
                    f"each of them by a launcher of its own; this one has {position.replicas * position.rows}"
                )
        settings, drawn = _settle_together(asked, position, rendezvous)
        engine, costs, measured = _engine(settings, position), settings.partition.seconds, settings.in_seconds
        if survives:  # `join` links up with the other replicas
            meeting = Meeting(position.row, position.rows, drawn, position.timeout, _words_of(settings, asked))
            processes: Processes = Survivors(meeting, engine, position, costs=costs, measured=measured)
            rendezvous.close()
        else:
            processes = Processes(
                engine, position, sync_batch_norm=settings.sync_batch_norm, costs=costs, measured=measured
            )
            processes.link(rendezvous)
        if settings.traced is None:
            release(engine.all, engine.own)
        else:
            release(engine.all, engine.own, settings.traced.buffers_between())
            settings.traced.let_go()
        return settings, processes


def _read_model(asked: Arguments) -> TracedModel | None:
    """The model, recorded on the first micro-batch of the sample; None of a sequence of layers."""
    fits = is_model(asked.model) and is_count(asked.micro_batches)
    return read_model(asked.model, _first(asked) if fits else asked.sample, asked.blocks)


def _first(asked: Arguments) -> Tree:
    return first_micro_batch(asked.sample, asked.micro_batches, least=TWO_ROWS)


SCALED = (
    "{layer} scales its weight in each forward (max_norm={most}), and {why}. {fix}, or leave out max_norm and scale "
    "the weight after optimizer.step(), under torch.no_grad(): weight.renorm_({p}, 0, {most})"
)


def find_scaled_weights(settings: Settings) -> Iterator[str]:
    """Finds embeddings with `max_norm` that recompute, or share their weight with another stage; says what to do."""
    layers = [*enumerate(settings.layers.items())]
    stage_of = [stage for stage, count in enumerate(settings.layers_per_partition) for _ in range(count)]
    shared = find_shared([*settings.layers.values()], settings.tied)
    users = {slot: [*one.slots] for one in shared for slots in one.slots.values() for slot in slots}
    words = [f"layer {at} ({name}: {vars(one).get('stands_for', type(one).__name__)})" for at, (name, one) in layers]
    for at, (_, layer) in layers:
        stage = stage_of[at]
        for module in layer.modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
                continue
            wrong, remat = {}, settings.remat[stage]
            others = [other for other in users.get((module, "weight"), ()) if stage_of[other] != stage]
            if others:
                wrong[f"{words[others[0]]}, in another stage, uses this weight too"] = (
                    "Put both layers into one stage"
                )
            if remat not in ("never", "offload"):
                why = f"stage {stage} recomputes its forwards (remat={remat!r})"
                wrong[why] = "Pass remat='never' for this stage"
            for why, fix in wrong.items():
                yield SCALED.format(layer=words[at], most=module.max_norm, why=why, fix=fix, p=module.norm_type)


def _engine(settings: Settings, position: Position | None) -> PipelineStages:
    Mistakes(find_scaled_weights(settings)).raise_all()
    row = None if position is None else position.row
    own = [stage for stage, rank in enumerate(settings.placement) if row in (None, rank)]
    devices = [settings.devices[rank] for rank in settings.placement]
    make: Callable[[int, Sequence[Layer], torch.device], Stage] = Stage
    if (traced := settings.traced) is not None:
        stage_of = [stage for stage, count in enumerate(settings.layers_per_partition) for _ in range(count)]
        make = partial(TracedStage, parts=traced.parts, traces=traced.traces, stage_of=stage_of)
    stages = cut_into_stages(settings.layers, settings.layers_per_partition, devices, own, make)
    if settings.sync_batch_norm:
        find_norms([layer for stage in stages for layer in stage.layers])  # refused everywhere alike
    return PipelineStages(
        stages,
        settings.micro_batches,
        Lowering(
            settings.placement,
            settings.schedule,
            settings.remat,
            unsplit=settings.unsplit,
            deferred_batch_norm=settings.deferred_batch_norm,
        ),
        traced=traced,
        tied=settings.tied,
        threaded=position is None and settings.driver != "lockstep",
        intra_op_threads=settings.intra_op_threads,
        row=row,
        replicas=1 if position is None else position.replicas,
    )


def _find_position(asked: Arguments) -> Position:
    ranks = count_ranks(asked, read_schedule(asked, Mistakes()))  # what is wrong with these is said when all meet
    position, found = find_position(asked.mesh, asked.partitions, ranks)
    if asked.driver in ("threads", "lockstep"):
        remedy = "mesh= and survive= for several; leave one of them out"
        found = [*found, f"driver={asked.driver!r} is for one process, and {remedy}"]
    if found:
        traced = _read_model(asked)
        check(asked, None, outline(asked.model, 0) if traced is None else None, traced, *found)
    assert position is not None
    return position


def memory_by_row(position: Position, hosts: Sequence[str], memory: Sequence[float]) -> list[float]:
    """The bytes that a rank of each row may hold: the least of its replicas; processes of a host share its CPU's."""
    shared = position.device.type == "cpu"
    each = [own / (hosts.count(host) if shared else 1) for own, host in zip(memory, hosts, strict=True)]
    return [min(each[member] for member in position.members[row :: position.rows]) for row in range(position.rows)]


def _settle_together(asked: Arguments, position: Position, rendezvous: Rendezvous) -> tuple[Settings, str]:
    """Settles what the pipe is made of, the same in all processes, and builds its layers here; gives a drawn name."""
    drawn = draw_seed() if asked.seed is None else None
    own_name = secrets.token_hex(8)
    every = rendezvous.greet(position, {"drawn": drawn, "memory": memory_of(position.device), "name": own_name})
    seed = every[0]["drawn"] if asked.seed is None else asked.seed
    if AUTO in (asked.remat, asked.schedule) and asked.memory is None and asked.sample is not None:
        asked = replace(asked, memory=memory_by_row(position, rendezvous.hosts, [one["memory"] for one in every]))
    told: Mapping[str, Any] = agree(rendezvous)[0] if position.rank else {}
    costs: Any = told.get("costs", asked.costs)  # who measures by himself would cut elsewhere
    traced = _read_model(asked)
    if traced is None:
        sketch = outline(asked.model, seed if isinstance(seed, int) else 0)
    else:
        traced.learn_all(_first(asked), asked.slices if is_count(asked.slices) else 1)
        sketch = Outline(dict(traced.layers), {}, 0, [])
    if position.rank and len(costs) != len(sketch.layers):
        raise ValueError(f"there are {len(costs)} layers on rank 0 and {len(sketch.layers)} on rank {position.rank}")
    searched: dict[str, Any] = told.get("searched") or {}  # who searches by his own seconds finds another table
    if searched:
        searched |= {"schedule": from_json(searched["schedule"]), "memory": None}
    settings = settle(replace(asked, seed=seed, costs=costs, **searched), position, sketch, traced)
    if not position.rank:
        told = {
            "costs": list(settings.costs),
            "stages": [list(astuple(cost)) for cost in settings.stage_costs or ()],
            "in_seconds": settings.in_seconds,
            "unsplit": sorted(settings.unsplit),
            "remat": settings.remat,
            "searched": None if settings.searched is None else settings.arguments,
        }
        agree(rendezvous, told)
    stages = tuple(StageCost(*numbers) for numbers in told["stages"]) or None
    unsplit = frozenset(told["unsplit"])
    remat = tuple(told["remat"]) if asked.remat == AUTO else settings.remat
    settings = replace(settings, stage_costs=stages, in_seconds=told["in_seconds"], unsplit=unsplit, remat=remat)
    rendezvous.phase = BUILDING
    bounds = zip(settings.placement, settings.partition.bounds, strict=True)
    own = [at for row, (first, end) in bounds if row == position.row for at in range(first, end)]
    if traced is not None:
        traced.realize(own, settings.seed)
        weights = _checksums(settings.layers)
    else:
        named, found = realize(sketch, own)
        Mistakes(found).raise_all()
        weights = _checksums(named)  # before some are tied, which is done only where they are held
        settings = replace(settings, layers=named, tied=_tie(named, asked.ties, sketch, own))
    agree(rendezvous, same=_words_of(settings, asked))
    rendezvous.phase = LINKING
    _compare_weights(rendezvous, settings, weights)
    return settings, every[0]["name"]


def _words_of(settings: Settings, asked: Arguments) -> dict[str, Any]:
    """What must be the same in all processes, by name."""
    chosen = ["micro_batches", "slices", "remat", "placement", "seed", "intra_op_threads", "deferred_batch_norm"]
    same = {name: getattr(settings, name) for name in [*chosen, "sync_batch_norm"]} | {
        "partitions": settings.layers_per_partition,
        "schedule": settings.schedule.name,
        "stages_per_rank": asked.stages_per_rank,
        "ties": [list(group) for group in asked.ties],
        "sample": [] if settings.traced is None else settings.traced.sample_names,
        "path": [] if settings.traced is None else settings.traced.outlines(),
    }
    for name, layer in settings.layers.items():
        same |= _words(name, layer)
    return same


def _words(name: str, layer: nn.Module) -> dict[str, str]:
    """What a layer is, built or on the meta device: its shapes, and what torch's modules in it say of themselves."""
    every = layer.named_parameters(remove_duplicate=False)  # `ties` are tied only where they are held
    shapes = (f"{path} {tuple(parameter.shape)}" for path, parameter in every)
    odd = LazyModuleMixin, nn.ParameterList, nn.ParameterDict  # these tell devices, or have no shape yet
    return {f"layer {name}": f"{type(layer).__name__}({', '.join(shapes)})"} | {
        f"the repr of {path}": f"{type(module).__name__}({module.extra_repr()})"
        for path, module in layer.named_modules(prefix=name)
        if type(module).__module__.startswith("torch.nn.") and not isinstance(module, odd)
    }


def _checksums(layers: Mapping[str, nn.Module]) -> list[tuple[int, int]]:
    """Of the weights and buffers of those layers that are built, by index."""
    held = [(at, [*layer.parameters(), *layer.buffers()]) for at, layer in enumerate(layers.values())]
    return [(at, checksum(tensors)) for at, tensors in held if not any(tensor.is_meta for tensor in tensors)]


def _compare_weights(rendezvous: Rendezvous, settings: Settings, mine: Sequence[tuple[int, int]]) -> None:
    """Checks that a layer has the same weights in all processes that have it: which counts would depend on K."""
    layers = list(settings.layers.items())
    first: dict[int, int] = {}  # checksums
    pairs = [pair for theirs in agree(rendezvous, mine) for pair in theirs]
    different = {at: layers[at] for at, found in sorted(pairs) if first.setdefault(at, found) != found}
    apart = [f"layer {at} ({name}: {type(each).__name__})" for at, (name, each) in different.items()]
    remedy = "build the layers alike on every rank (torch.manual_seed before, or callables), or load the same weights"
    if apart:
        Mistakes([f"the weights of {', '.join(apart)} differ between processes: {remedy}"]).raise_all()


def _tie(
    named: dict[str, nn.Module], ties: Sequence[Sequence[str]], sketch: Outline, own: Collection[int]
) -> list[list[Slot]]:
    """Gives this process's copies of tied weights the value of the first; places of each group, in all processes."""
    groups, _ = find_ties(named, ties)
    index_of = {name: index for index, name in enumerate(named)}
    held = [module for index, layer in enumerate(named.values()) if index in own for module in layer.modules()]
    for group, places in zip(ties, groups, strict=True):
        same = {id(module.get_parameter(leaf)) for module, leaf in places}
        here = [(module, leaf) for module in held for leaf, p in module._parameters.items() if id(p) in same]
        if not here:
            continue
        first = index_of[group[0].partition(".")[0]]
        if first not in own:
            built, _ = realize(sketch, [first])
            (((module, name), *_), *_), _ = find_ties(built, [group])
            with torch.no_grad():
                here[0][0].get_parameter(here[0][1]).copy_(module.get_parameter(name))
        tie([here])
    return groups
