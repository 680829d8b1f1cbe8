"""What a user is told: of the settings before the first step, of what the first steps show, and the summary.

Each finding is told once, with what to do.
"""

import logging
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpipe._torch.modules import AnyBatchNorm
from gpipe.config.settings import Settings
from gpipe.distributed.processes import OneProcess
from gpipe.planner.search.device import lasts
from gpipe.runtime.run import Run
from gpipe.schedule.action import Kind
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import Prediction, equal_bubble
from gpipe.stages.quantized import numbers_in, pieces_of
from gpipe.stages.side_effects import Place, Snapshot, TensorVersion, read_by_called, references, snapshot
from gpipe.stages.tree import version

READ = "which it reads"  # so end the words of `references` for what is no attribute
TENSORS = (
    "{places}: a forward leaves tensors there. If that is a cache of the module's own, never mind. Whoever else "
    "reads it, another layer, a hook or the loss, may see it of another micro-batch, since several are under way, or "
    "of a recompute: have the layer stash it (stash = ('aux',), returning (out, {{'aux': tensor}})) and pop it where "
    "it is used; a loss does so too, by loss_fn.pop = ('aux',) and an argument of that name"
)
COUNTS = (
    "{places}: a forward changes it, and a recompute will again; keep what counts in a buffer (register_buffer), "
    "which recomputes leave as they found it, or use remat='never'"
)
BUFFERS = (
    "{places}, of which a forward changes buffers: since several micro-batches are under way, they may be those of "
    "another one when they are read there. Have the layer stash what is needed of them (stash = ('aux',)), and pop "
    "it where it is used; a loss does so too, by loss_fn.pop = ('aux',)"
)
THREAD_LOCALS = (
    "{places}: a threading.local, and rank threads do not see what the caller's thread has set there. Use a "
    "contextvars.ContextVar, which they do see, or driver='lockstep'"
)


def _told(text: str, places: Sequence[Place]) -> list[str]:
    """The finding of these references, each once, if there are any."""
    words = "; ".join(dict.fromkeys(f"{layer}, {where}" for layer, where in places))
    return [text.format(places=words)] if places else []


def find_side_effects(before: Snapshot, after: Snapshot, seen: Sequence[str], *, recomputes: bool) -> list[str]:
    """Tells of attributes, globals and closures that a step has changed, but for what was seen to in a backward."""
    said = "\n".join(seen)
    changed = {
        place: now for place, now in after.items() if before.get(place) != now and ", ".join(place) not in said
    }
    tensors = [place for place, now in changed.items() if _has_tensors(now)]
    counts = [place for place in changed if place in before and place not in tensors] if recomputes else []
    return _told(TENSORS, tensors) + _told(COUNTS, counts)


def buffers_of(layers: Mapping[str, nn.Module]) -> dict[nn.Module, list[TensorVersion]]:
    """The versions of the buffers of modules, to be compared with later."""
    modules = {module: None for root in layers.values() for module in root.modules()}
    return {m: [TensorVersion(b, version(b)) for b in m._buffers.values() if b is not None] for m in modules}


def find_buffer_readers(
    layers: Mapping[str, nn.Module],
    own: Mapping[str, set[nn.Module]],
    loss_fn: object,
    before: Mapping[nn.Module, list[TensorVersion]],
) -> list[str]:
    """Tells of the loss, and of layers, that refer to modules of other stages of which a step has changed buffers.

    An attribute that leads to the layer itself, too, as to the model that it is part of, says little.
    """
    after = buffers_of(layers)
    changed = {module for module, versions in after.items() if before.get(module, []) != versions}
    reads = [(("loss_fn", f"{name}, {READ}"), value) for name, value in read_by_called(loss_fn)]
    places = [
        place
        for place, value in chain(reads, references(layers))
        if not changed.isdisjoint((found := _modules_in(value)) - own.get(place[0], set()))
        if place[1].endswith(READ) or found.isdisjoint(layers[place[0]].modules())
    ]
    return _told(BUFFERS, places)


def _modules_in(value: object) -> set[nn.Module]:
    """A module with its parts, or those in a container."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return {part for module in held if isinstance(module, nn.Module) for part in module.modules()}


def _has_tensors(value: object) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, TensorVersion)


UNKEYED = (
    "such draws are not keyed: they depend on what was drawn before, and the recompute of a forward draws others, so "
    "that its gradients are wrong; draw by torch's functions, without a generator"
)


def find_own_generators(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Tells of generators that modules have as attributes."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    for name, layer in layers.items():
        for path, module in layer.named_modules(prefix=name):
            for attribute, value in vars(module).items():
                if isinstance(value, kinds):
                    yield f"{path}.{attribute} is a random generator of its own: {UNKEYED}"


def random_states() -> dict[str, object]:
    """The states of the generators of Python and numpy, by the name of their module, to be compared behind a step."""
    state = np.random.get_state(legacy=False)
    words = [getattr(value, "tobytes", value.__repr__)() for value in state["state"].values()]  # arrays, or numbers
    return {"random": random.getstate(), "numpy.random": state | {"state": words}}


def find_unkeyed_draws(layers: Mapping[str, nn.Module], drawn: Iterable[str], step: int) -> list[str]:
    """Tells that somebody drew in a step from the generators of these modules, Python's and numpy's."""
    libraries = (random, np, np.random)
    mention = [words for (words, _), value in references(layers) if any(value is one for one in libraries)]
    where = f"perhaps in {', '.join(dict.fromkeys(mention)) or 'a layer or loss_fn'}, or in another thread"
    return [f"something was drawn by the module {name} in step {step}, {where}: {UNKEYED}" for name in drawn]


DWARFS = 1.5  # a stage this many times the mean sets the pace for all
SMALL = 0.1  # a bubble that is not worth a word


def examine_settings(settings: Settings) -> list[str]:
    """Tells of few micro-batches, empty and costly stages, and generators without a key."""
    empty = [
        f"stage {stage} has no parameters; an optimizer over it alone would be refused, and it does little work: "
        f"give costs, or join its layers to a neighbour by partitions=[...]"
        for stage, layers in enumerate(layers_of_stages(settings))
        if not any(True for name in layers for _ in settings.layers[name].parameters())
    ]
    return [*_bubble(settings), *empty, *_giants(settings), *find_own_generators(settings.layers)]


def _bubble(settings: Settings) -> Iterator[str]:
    k, m = len(settings.devices), settings.micro_batches * settings.slices
    tables = {count: settings.schedule.table(settings.placement, count) for count in (m, 4 * k)}
    if k == 1 or m >= 4 * k or not all(tables.values()):
        return
    programs = (Program.of(table or (), count, rank_of=settings.placement) for count, table in tables.items())
    now, then = map(equal_bubble, programs)
    if now > SMALL:
        each = f" of S={settings.slices} slices" if settings.slices > 1 else ""
        more = f"with M={-(-4 * k // settings.slices)}, four times K{'/S' * bool(each)}, it would be {then:.0%}"
        size = f"M={settings.micro_batches} micro-batches{each} for K={k} partitions"
        yield f"{size} leave a bubble of {now:.0%}; {more}"


def _giants(settings: Settings) -> Iterator[str]:
    found, costs, names = settings.partition, settings.costs, list(settings.layers)
    for stage, ((first, end), cost) in enumerate(zip(found.bounds, found.seconds, strict=True)):
        if cost > DWARFS * found.mean:
            largest = max(range(first, end), key=costs.__getitem__)
            remedy = "cut that layer finer, use fewer partitions, or give measured costs"
            share = f"its largest layer is {names[largest]} with {costs[largest] / cost:.0%} of it"
            waited = f"stage {stage} costs {cost / found.mean:.1f} times the mean, so the others wait for it"
            yield f"{waited}; {share}: {remedy}"


def layers_of_stages(settings: Settings) -> list[list[str]]:
    """The names of the layers of each stage."""
    names = iter(settings.layers)
    return [[next(names) for _ in range(count)] for count in settings.layers_per_partition]


FEW_ROWS = 16  # of a micro-batch, below which BatchNorm is told of: its statistics are not the mini-batch's


def find_few_rows(layers: Iterable[nn.Module], rows: int, deferred: bool) -> list[str]:
    """Tells of BatchNorms that see too few rows of a micro-batch."""
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, AnyBatchNorm) and m.training]
    if not norms or rows >= FEW_ROWS:
        return []
    defer = (
        "; for running statistics of the whole mini-batch, as the script without a pipe has them in validation, "
        "give deferred_batch_norm=True"
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


class Before(NamedTuple):
    """What there was before a mini-batch: its step number, states of generators, what modules refer to."""

    step: int
    random_states: Mapping[str, object]
    snapshot: Snapshot | None  # only before the first
    buffers: Mapping[nn.Module, list[TensorVersion]]  # likewise


class Examination:
    """The findings of a pipe so far, and what is still to be looked at."""

    def __init__(self, settings: Settings, processes: OneProcess) -> None:
        engine = processes.engine
        self.findings = [*examine_settings(settings), *processes.findings()]
        self._enough = min(2, settings.micro_batches)
        self.fresh = True  # no mini-batch was trained yet that had so many micro-batches
        self._layers = {str(layer): layer.module for stage in engine.own for layer in stage.layers}
        self._own = {
            str(layer): {part for other in stage.layers for part in other.module.modules()}
            for stage in engine.own
            for layer in stage.layers
        }
        self._recomputes = settings.recomputes
        self._deferred, self._threaded = engine.deferred_batch_norm, engine.threaded
        self._few_rows = FEW_ROWS  # per micro-batch: with fewer there may be something to tell
        self._drawn: set[str] = set()  # the generators of which it was told that they were drawn from
        for finding in self.findings:
            logger.info(finding)

    def look(self, step: int) -> Before:
        if not self.fresh:
            return Before(step, random_states(), None, {})
        return Before(step, random_states(), snapshot(self._layers), buffers_of(self._layers))

    def compare(self, before: Before, run: Run, whole: nn.Module | None = None) -> None:
        """Tells what a mini-batch has shown: most of it the first one, the rest whenever it comes.

        `whole` is the pipe, if its gradients are there.
        """
        if before.snapshot is not None:
            # whether a forward that follows a backward is still to come
            self.fresh = len(run.micro_batch_sizes) < self._enough
            self.tell(run.findings)
            self.tell(find_unused_parameters(whole) if whole is not None else [])
            after = snapshot(self._layers)
            self.tell(find_side_effects(before.snapshot, after, run.findings, recomputes=self._recomputes))
            self.tell(find_buffer_readers(self._layers, self._own, run.loss_fn, before.buffers))
            read = references(self._layers) if self._threaded else ()
            self.tell(_told(THREAD_LOCALS, [at for at, value in read if isinstance(value, threading.local)]))
        if (states := random_states()) != before.random_states:
            drawn = [n for n, state in states.items() if n not in self._drawn and state != before.random_states[n]]
            self._drawn.update(drawn)
            self.tell(find_unkeyed_draws(self._layers, drawn, before.step))
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


def summary(settings: Settings, plan: Prediction, findings: Sequence[str]) -> str:
    """Describes the stages of a pipe, what a step will take, and what was found."""
    found = settings.partition
    over, least = f"{found.imbalance:.1f}%", f"{found.gap:.1f}%"
    cuts = "" if over == least else f", {least} more than any cuts must cost"
    lines = [*_table(settings, plan), f"the slowest stage costs {over} more than the mean{cuts}"]
    if (layer := found.obstacle) is not None and (share := found.chain.costs[layer] / found.mean) >= 0.01:
        lines.append(f"in the way of better cuts: layer {list(settings.layers)[layer]}, {share:.0%} of a mean stage")
    return "\n".join([*lines, *_step(settings, plan), *(f"finding: {text}" for text in findings)])


def _table(settings: Settings, plan: Prediction) -> Iterator[str]:
    costs = settings.partition.seconds
    split = {action.stage for action in plan.program.actions if action.kind is Kind.BACKWARD_WEIGHT}
    each = layers_of_stages(settings)
    spans = [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in each]
    wide = min(MOST_LETTERS, max(16, *map(len, spans)))
    yield f"stage rank  {'layers':<{wide}} device   remat          parameters      MiB   cost     W"
    for stage, (names, rank) in enumerate(zip(each, settings.placement, strict=True)):
        parameters = {p for name in names for p in settings.layers[name].parameters() if not is_lazy(p)}
        share = costs[stage] / (sum(costs) or 1)
        mib = sum(piece.nbytes for p in parameters for piece in pieces_of(p)) / 2**20
        of_weights = settings.stage_costs[stage].weight_share if settings.stage_costs else None
        part = "-" if stage not in split else "half" if of_weights is None else f"{of_weights:.0%}"
        yield (
            f"{stage:>5} {rank:>4}  {spans[stage]:<{wide}.{wide}} {settings.devices[rank]!s:<8} "
            f"{settings.remat[stage]:<12} {sum(map(numbers_in, parameters)):>12,} {mib:>8.1f} {share:>6.1%} {part:>5}"
        )
    yield "W: of a backward, the part for gradients of weights, where the schedule has that wait"


def _step(settings: Settings, plan: Prediction) -> Iterator[str]:
    k, slices = plan.program.ranks, plan.program.slices
    m = plan.program.micro_batches // slices
    paper = settings.schedule.name == "gpipe" and k == plan.program.stages
    formula = f" (K-1)/({'MS' if slices > 1 else 'M'}+K-1) =" if paper else ""
    cut = f" of S={slices} slices" if slices > 1 else ""
    each = f" of {plan.program.stages // k} stages" if plan.program.stages > k else ""
    yield (
        f"K={k} partition{'s' * (k > 1)}{each}, M={m} micro-batch{'es' * (m > 1)}{cut}, "
        f"schedule {settings.schedule.name}: bubble{formula} {equal_bubble(plan.program):.1%} if the stages are equal"
    )
    if settings.searched is not None:
        yield from settings.searched.compared()
    takes = f"{lasts(plan.timeline.seconds)}, " if plan.unit == "seconds" else ""
    yield f"predicted step: {takes}{plan.bubble:.1%} of it idle, recomputes counted, if each partition has a device"
