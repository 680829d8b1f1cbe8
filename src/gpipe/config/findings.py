"""Tells before the first step what in the settings of a pipe will cost time, and what to do about it.

Asks everything in this package of a pipe that trains, and tells the user each finding once.

Tells what the first steps show: micro-batches too small for BatchNorm, parameters without a gradient.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from gpipe._torch.modules import AnyBatchNorm
from gpipe.config.settings import Settings
from gpipe.config.side_effects import (
    RandomStates,
    buffers_of,
    find_buffer_readers,
    find_grad_fn_readers,
    find_own_generators,
    find_side_effects,
    find_thread_locals,
    find_unkeyed_draws,
    random_states,
)
from gpipe.schedule.program import Program
from gpipe.schedule.simulate import equal_bubble
from gpipe.stages.side_effects import Snapshot, TensorVersion, snapshot
from gpipe.stages.stage import Layer

DWARFS = 1.5  # a stage this many times the mean sets the pace for all

SMALL = 0.1  # a bubble that is not worth a word


def examine_settings(settings: Settings) -> list[str]:
    """Tells of few micro-batches, empty and costly stages, and generators without a key."""
    return [
        *_bubble(settings),
        *_empty_stages(settings),
        *_giants(settings),
        *find_own_generators(settings.layers),
    ]


def _bubble(settings: Settings) -> Iterator[str]:
    k, m = len(settings.devices), settings.micro_batches
    if k == 1 or m >= 4 * k:
        return
    now, then = _equal_bubble(settings, m), _equal_bubble(settings, 4 * k)
    if now is not None and then is not None and now > SMALL:
        yield (
            f"M={m} micro-batches for K={k} partitions leave a bubble of {now:.0%}; with M={4 * k}, four times K, it "
            f"would be {then:.0%}"
        )


def _equal_bubble(settings: Settings, micro_batches: int) -> float | None:
    """The bubble of the schedule's table for so many micro-batches; None where it has none."""
    rows = settings.schedule.rows(settings.placement, micro_batches)
    return None if rows is None else equal_bubble(Program.of(rows, micro_batches, rank_of=settings.placement))


def _empty_stages(settings: Settings) -> Iterator[str]:
    for stage, layers in enumerate(layers_of_stages(settings)):
        if not any(True for name in layers for _ in settings.layers[name].parameters()):
            yield (
                f"stage {stage} has no parameters; an optimizer over it alone would be refused, and it does "
                f"little work: give costs, or join its layers to a neighbour by partitions=[...]"
            )


def _giants(settings: Settings) -> Iterator[str]:
    names = list(settings.layers)
    cost = dict(zip(names, settings.costs, strict=True))
    shares = [sum(cost[name] for name in layers) for layers in layers_of_stages(settings)]
    mean = sum(shares) / len(shares)
    for stage, share in enumerate(shares):
        if mean and share > DWARFS * mean:
            largest = max(layers_of_stages(settings)[stage], key=cost.__getitem__)
            yield (
                f"stage {stage} costs {share / mean:.1f} times the mean, so the others wait for it; its largest "
                f"layer is {largest} with {cost[largest] / share:.0%} of it: cut that layer finer, use fewer "
                f"partitions, or give measured costs"
            )


def layers_of_stages(settings: Settings) -> list[list[str]]:
    """The names of the layers of each stage."""
    names = iter(settings.layers)
    return [[next(names) for _ in range(count)] for count in settings.layers_per_partition]


FEW_ROWS = 16
"""Rows of a micro-batch below which BatchNorm is told of: its statistics are not those of the mini-batch."""


def find_few_rows(layers: Sequence[nn.Module], rows: int, deferred: bool) -> list[str]:
    """Tells of BatchNorms that see too few rows of a micro-batch."""
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, AnyBatchNorm) and m.training]
    if not norms or rows >= FEW_ROWS:
        return []
    remedy = (
        ""
        if deferred
        else "; for running statistics of the whole mini-batch, as the script without a pipe has them in validation, "
        "give deferred_batch_norm=True"
    )
    return [
        f"BatchNorm normalizes micro-batches of {rows} rows, too few for good statistics: use fewer micro-batches or "
        f"a larger mini-batch{remedy}"
    ]


def find_unused_parameters(module: nn.Module) -> list[str]:
    """Tells of parameters to which the first backward brought no gradient."""
    unused = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if not unused:
        return []
    return [
        f"{', '.join(unused)}: no gradient came to these parameters in the first step; take them out of the "
        f"optimizer, or freeze them with requires_grad_(False), if that is meant"
    ]


logger = logging.getLogger("gpipe")


class Before(NamedTuple):
    """What there was before a mini-batch: its step number, states of generators, what modules refer to."""

    step: int
    random_states: RandomStates
    snapshot: Snapshot | None  # only before the first
    buffers: Mapping[nn.Module, list[TensorVersion]]  # likewise


class Examination:
    """The findings of a pipe so far, and what is still to be looked at.

    Attributes:
        findings: In words, each with what to do; for the user.
        fresh: Whether no mini-batch was trained yet.
    """

    def __init__(
        self,
        findings: Sequence[str],
        layers: Sequence[Layer],
        *,
        deferred: bool,
        recomputes: bool,
        threaded: bool,
    ) -> None:
        self.findings = list(findings)
        self._layers = tuple(layers)  # of this process
        self.fresh = True
        self._deferred, self._recomputes, self._threaded = deferred, recomputes, threaded
        self._few_rows = FEW_ROWS  # per micro-batch: with fewer there may be something to tell
        self._drawn: set[str] = set()  # the generators of which it was told that they were drawn from
        for finding in self.findings:
            logger.info(finding)

    def look(self, step: int) -> Before:
        """Notes what there is before a mini-batch that trains."""
        if not self.fresh:
            return Before(step, random_states(self._drawn), None, {})
        named = self._named()
        return Before(step, random_states(self._drawn), snapshot(named), buffers_of(named))

    def _named(self) -> dict[str, nn.Module]:
        """The layers in words."""
        return {str(layer): layer.module for layer in self._layers}

    def compare(
        self, before: Before, rows: int, seen: Sequence[str], whole: nn.Module | None = None, loss_fn: object = None
    ) -> None:
        """Tells what a mini-batch has shown: most of it the first one, the rest whenever it comes.

        Args:
            before: What there was.
            rows: Of its smallest micro-batch.
            seen: What the ranks found.
            whole: The pipe, if its gradients are there.
            loss_fn: The loss, if there was one.
        """
        self.tell(seen)
        if before.snapshot is not None:
            self.fresh = False
            self.tell(find_unused_parameters(whole) if whole is not None else [])
            named = self._named()
            self.tell(find_side_effects(before.snapshot, snapshot(named), seen, recomputes=self._recomputes))
            self.tell(find_buffer_readers(named, loss_fn, before.buffers))
            self.tell(find_grad_fn_readers(named))
            self.tell(find_thread_locals(named) if self._threaded else [])
        if before.random_states:
            drawn = find_unkeyed_draws(self._named(), before.random_states, random_states(self._drawn), before.step)
            self._drawn |= drawn.keys()
            self.tell(list(drawn.values()))
        if rows < self._few_rows:
            few = find_few_rows([layer.module for layer in self._layers], rows, self._deferred)
            self._few_rows = 0 if few else rows
            self.tell(few)

    def tell(self, findings: Sequence[str]) -> None:
        """Says what was found, each once, and keeps it."""
        for finding in dict.fromkeys(findings):
            if finding not in self.findings:
                self.findings.append(finding)
                logger.warning(finding)
