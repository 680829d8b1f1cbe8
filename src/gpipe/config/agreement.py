"""Lets processes agree on a plan while they build a pipe, and checks that all processes have the same model."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from gpipe._torch.accelerator import memory_of
from gpipe.config import options
from gpipe.config.arguments import Arguments, Mistakes, Settings
from gpipe.config.make_plan import make_plan
from gpipe.config.resolve import RematOf, count_ranks, draw_seed, first_rows, read_schedule, resolve, trace_model
from gpipe.distributed.communicator import all_gather_checked
from gpipe.distributed.mesh import Position, find_position
from gpipe.distributed.rendezvous import BUILDING, LINKING, Rendezvous
from gpipe.planner.search.candidates import AUTO
from gpipe.planner.search.plan import Plan
from gpipe.schedule.schedules import Placement
from gpipe.stages.buffers import Slot
from gpipe.stages.digest import checksum
from gpipe.stages.remote_layers import MetaLayers, build_on_meta, materialize
from gpipe.stages.shared_weights import find_ties, tie


def find_own_position(arguments: Arguments) -> Position:
    """Returns the pipeline rank and the data-parallel replica of this process.

    Raises:
        ValueError: If the processes do not fit the arguments. The error lists all mistakes in the arguments.
    """
    ranks = count_ranks(arguments, read_schedule(arguments, Mistakes()))  # `resolve` reports these mistakes.
    position, mistakes = find_position(arguments.mesh, arguments.partitions, ranks)
    if mistakes:
        traced = trace_model(arguments)
        resolve(arguments, None, build_on_meta(arguments.model, 0) if traced is None else None, traced, *mistakes)
    assert position is not None
    return position


def memory_by_rank(position: Position, hosts: Sequence[str], memory: Sequence[float]) -> list[float]:
    """Returns the number of bytes that each pipeline rank may hold: the minimum over all replicas of this rank.

    CPU processes on the same host share the host memory evenly.
    """
    shared = position.device.type == "cpu"
    limits = [size / (hosts.count(host) if shared else 1) for size, host in zip(memory, hosts, strict=True)]
    return [
        min(limits[member] for member in position.members[row :: position.pp_size]) for row in range(position.pp_size)
    ]


def agree_on_plan(
    arguments: Arguments, position: Position, rendezvous: Rendezvous
) -> tuple[Settings, Plan, dict[str, Any], str]:
    """Makes the plan on rank 0, sends it to all ranks, and builds the layers of this process.

    Returns:
        The settings, the plan, the values that are equal in all processes, and a random name that rank 0 drew for the
        pipe.
    """
    drawn = draw_seed() if arguments.seed is None else None
    greeting = {"drawn": drawn, "memory": memory_of(position.device), "name": secrets.token_hex(8)}
    greetings = rendezvous.greet(position, greeting)
    seed = greetings[0]["drawn"] if arguments.seed is None else arguments.seed
    arguments = replace(arguments, seed=seed)
    needs_memory = arguments.fits_remat or arguments.schedule == AUTO
    if needs_memory and arguments.memory is None and arguments.sample is not None:
        memory = memory_by_rank(position, rendezvous.hosts, [greeting["memory"] for greeting in greetings])
        arguments = replace(arguments, remat=options.Remat(memory))
    received: Any = all_gather_checked(rendezvous)[0] if position.rank else None
    traced = trace_model(arguments)
    if traced is None:
        sketch = build_on_meta(arguments.model, seed if isinstance(seed, int) else 0)
    else:
        schedule = read_schedule(arguments, Mistakes())
        traced.trace_all(first_rows(arguments), schedule.slices)
        sketch = MetaLayers(dict(traced.layers), {}, 0, [])
    if received and len(received["names"]) != len(sketch.layers):
        raise ValueError(
            f"model= has {len(sketch.layers)} layers on rank {position.rank}, but {len(received['names'])} on rank "
            f"0. Build the same model in every process."
        )
    settings, placement, remat = resolve(arguments, position, sketch, traced)
    if received:
        # Measured costs differ per rank, so a local search could return a different plan.
        plan = Plan.from_json(received)
        settings = settings.with_schedule_of(plan) if arguments.schedule == AUTO else settings
    else:
        settings, plan = make_plan(arguments, settings, placement, remat)
        all_gather_checked(rendezvous, plan.to_json())
    rendezvous.phase = BUILDING
    bounds = zip(plan.rank_of, plan.partition.bounds, strict=True)
    own = [layer for row, (first, end) in bounds if row == position.pp_rank for layer in range(first, end)]
    if traced is not None:
        traced.materialize(own, settings.seed)
        weights = _checksums(settings.layers)
    else:
        layers, mistakes = materialize(sketch, own)
        Mistakes(mistakes).raise_all()
        weights = _checksums(layers)  # Before tying, which changes only the copies in the processes that hold them.
        settings = replace(settings, layers=layers, tied=_tie(layers, arguments.ties, sketch, own))
    shared = _shared_values(arguments, settings, placement, remat)
    _compare_weights(settings, all_gather_checked(rendezvous, weights, same=shared))
    rendezvous.phase = LINKING
    return settings, plan, shared, greetings[0]["name"]


def _shared_values(arguments: Arguments, settings: Settings, placement: Placement, remat: RematOf) -> dict[str, Any]:
    """Returns the values that must be equal in all processes, by name."""
    cuts = arguments.partitions
    values = {
        "partitions": cuts if isinstance(cuts, int) else tuple(cuts),
        "micro_batches": arguments.micro_batches,
        "remat": "auto" if arguments.fits_remat else remat,
        "placement": placement,
        "schedule": settings.schedule.name if arguments.schedule != AUTO else AUTO,
        "stages_per_rank": settings.schedule.stages_per_rank,
        "slices": settings.schedule.slices,
        "seed": settings.seed,
        "intra_op_threads": settings.driver.intra_op_threads,
        "batch_norm": settings.batch_norm,
        "ties": [list(group) for group in arguments.ties],
        "sample": [] if settings.traced is None else settings.traced.sample_names,
        "path": [] if settings.traced is None else settings.traced.operations(),
    }
    for name, layer in settings.layers.items():
        values |= _describe_layer(name, layer)
    return values


def _describe_layer(name: str, layer: nn.Module) -> dict[str, str]:
    """Returns the parameter shapes of a layer and the reprs of torch's modules in the layer.

    The result is the same if the layer is on the meta device.
    """
    parameters = layer.named_parameters(remove_duplicate=False)  # Tied parameters may not be tied in this process.
    shapes = (f"{path} {tuple(parameter.shape)}" for path, parameter in parameters)
    skipped = LazyModuleMixin, nn.ParameterList, nn.ParameterDict  # Their repr has devices, or no shapes yet.
    return {f"layer {name}": f"{type(layer).__name__}({', '.join(shapes)})"} | {
        f"the repr of {path}": f"{type(module).__name__}({module.extra_repr()})"
        for path, module in layer.named_modules(prefix=name)
        if type(module).__module__.startswith("torch.nn.") and not isinstance(module, skipped)
    }


def _checksums(layers: Mapping[str, nn.Module]) -> list[tuple[int, int]]:
    """Returns the index of each layer that is not on the meta device, with a checksum of its weights and buffers."""
    tensors_of = [[*layer.parameters(), *layer.buffers()] for layer in layers.values()]
    return [
        (index, checksum(tensors))
        for index, tensors in enumerate(tensors_of)
        if not any(tensor.is_meta for tensor in tensors)
    ]


def _compare_weights(settings: Settings, weights: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Raises an error if a layer has different weights in different processes, because results would depend on K."""
    layers = list(settings.layers.items())
    first: dict[int, int] = {}
    pairs = sorted(pair for gathered in weights for pair in gathered)
    different = {index: layers[index] for index, value in pairs if first.setdefault(index, value) != value}
    if different:
        labels = [f"layer {index} ({name}: {type(layer).__name__})" for index, (name, layer) in different.items()]
        message = (
            f"{', '.join(labels)}: the weights differ between processes. Call torch.manual_seed with the same seed "
            f"before you build the layers, pass callables that build the layers, or load the same weights. "
            f"[weights-differ-between-processes]"
        )
        Mistakes([message]).raise_all()


def _tie(
    layers: dict[str, nn.Module], ties: Sequence[Sequence[str]], sketch: MetaLayers, own: Collection[int]
) -> list[list[Slot]]:
    """Sets tied parameters in this process to the value of the first parameter in their group.

    Returns:
        For each group, the module and attribute name of each parameter, including parameters of other processes.
    """
    groups, _ = find_ties(layers, ties)
    index_of = {name: index for index, name in enumerate(layers)}
    held = [module for index, layer in enumerate(layers.values()) if index in own for module in layer.modules()]
    for names, slots in zip(ties, groups, strict=True):
        tied = {id(module.get_parameter(name)) for module, name in slots}
        here = [(module, name) for module in held for name, p in module._parameters.items() if id(p) in tied]
        if not here:
            continue
        first = index_of[names[0].partition(".")[0]]
        if first not in own:
            built, _ = materialize(sketch, [first])
            (((module, name), *_), *_), _ = find_ties(built, [names])
            with torch.no_grad():
                here[0][0].get_parameter(here[0][1]).copy_(module.get_parameter(name))
        tie([here])
    return groups
