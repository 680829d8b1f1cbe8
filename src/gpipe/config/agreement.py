"""What processes do together while a pipe is built: they agree on a plan, and compare what they were given."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from gpipe._torch.accelerator import memory_of
from gpipe.config import options
from gpipe.config.check import (
    Arguments,
    Mistakes,
    RematOf,
    check,
    count_ranks,
    draw_seed,
    first_rows,
    read_model_of,
    read_schedule,
)
from gpipe.config.make_plan import make_plan
from gpipe.config.settings import Settings
from gpipe.distributed.agree import agree
from gpipe.distributed.mesh import Position, find_position
from gpipe.distributed.rendezvous import BUILDING, LINKING, Rendezvous
from gpipe.planner.search.candidates import AUTO
from gpipe.planner.search.plan import Plan
from gpipe.schedule.schedules import Placement
from gpipe.stages.buffers import Slot
from gpipe.stages.digest import checksum
from gpipe.stages.remote_layers import Outline, build_on_meta, materialize
from gpipe.stages.shared_weights import find_ties, tie


def position_of(asked: Arguments) -> Position:
    """Finds the position of this process in the mesh; a ValueError lists all mistakes, if it has none."""
    ranks = count_ranks(asked, read_schedule(asked, Mistakes()))  # what is wrong with these is said when all meet
    position, wrong = find_position(asked.mesh, asked.partitions, ranks)
    if wrong:
        traced = read_model_of(asked)
        check(asked, None, build_on_meta(asked.model, 0) if traced is None else None, traced, *wrong)
    assert position is not None
    return position


def memory_by_row(position: Position, hosts: Sequence[str], memory: Sequence[float]) -> list[float]:
    """The bytes that a rank of each row may hold: the least of its replicas; processes of a host share its CPU's."""
    shared = position.device.type == "cpu"
    each = [own / (hosts.count(host) if shared else 1) for own, host in zip(memory, hosts, strict=True)]
    return [min(each[member] for member in position.members[row :: position.rows]) for row in range(position.rows)]


def agree_on_plan(
    asked: Arguments, position: Position, rendezvous: Rendezvous
) -> tuple[Settings, Plan, dict[str, Any], str]:
    """Has rank 0 make the plan, and builds this process's layers; returns what all share, and a drawn name, too."""
    drawn = draw_seed() if asked.seed is None else None
    own_name = secrets.token_hex(8)
    every = rendezvous.greet(position, {"drawn": drawn, "memory": memory_of(position.device), "name": own_name})
    seed = every[0]["drawn"] if asked.seed is None else asked.seed
    asked = replace(asked, seed=seed)
    if (asked.fits_remat or asked.schedule == AUTO) and asked.memory is None and asked.sample is not None:
        memory = memory_by_row(position, rendezvous.hosts, [one["memory"] for one in every])
        asked = replace(asked, remat=options.Remat(memory))
    told: Any = agree(rendezvous)[0] if position.rank else None
    traced = read_model_of(asked)
    if traced is None:
        sketch = build_on_meta(asked.model, seed if isinstance(seed, int) else 0)
    else:
        schedule = read_schedule(asked, Mistakes())
        traced.learn_all(first_rows(asked), schedule.slices)
        sketch = Outline(dict(traced.layers), {}, 0, [])
    if told and len(told["names"]) != len(sketch.layers):
        count = len(told["names"])
        raise ValueError(f"there are {count} layers on rank 0 and {len(sketch.layers)} on rank {position.rank}")
    settings, placement, remat = check(asked, position, sketch, traced)
    if told:
        plan = Plan.from_json(told)  # who measures or searches by himself would find another
        settings = settings.following(plan) if asked.schedule == AUTO else settings
    else:
        settings, plan = make_plan(asked, settings, placement, remat)
        agree(rendezvous, plan.to_json())
    rendezvous.phase = BUILDING
    bounds = zip(plan.rank_of, plan.partition.bounds, strict=True)
    own = [at for row, (first, end) in bounds if row == position.row for at in range(first, end)]
    if traced is not None:
        traced.realize(own, settings.seed)
        weights = _checksums(settings.layers)
    else:
        named, wrong = materialize(sketch, own)
        Mistakes(wrong).raise_all()
        weights = _checksums(named)  # before some are tied, which is done only where they are held
        settings = replace(settings, layers=named, tied=_tie(named, asked.ties, sketch, own))
    same = _words_of(asked, settings, placement, remat)
    agree(rendezvous, same=same)
    rendezvous.phase = LINKING
    _compare_weights(rendezvous, settings, weights)
    return settings, plan, same, every[0]["name"]


def _words_of(asked: Arguments, settings: Settings, placement: Placement, remat: RematOf) -> dict[str, Any]:
    """What must be the same in all processes, by name."""
    cuts = asked.partitions
    same = {
        "partitions": cuts if isinstance(cuts, int) else tuple(cuts),
        "micro_batches": asked.micro_batches,
        "remat": "auto" if asked.fits_remat else remat,
        "placement": placement,
        "schedule": settings.schedule.name if asked.schedule != AUTO else AUTO,
        "stages_per_rank": settings.schedule.stages_per_rank,
        "slices": settings.schedule.slices,
        "seed": settings.seed,
        "intra_op_threads": settings.driver.intra_op_threads,
        "batch_norm": settings.batch_norm,
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
            built, _ = materialize(sketch, [first])
            (((module, name), *_), *_), _ = find_ties(built, [group])
            with torch.no_grad():
                here[0][0].get_parameter(here[0][1]).copy_(module.get_parameter(name))
        tie([here])
    return groups
