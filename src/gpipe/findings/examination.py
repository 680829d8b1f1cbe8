"""Asks everything in this package of a pipe that trains, and tells the user each finding once."""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from gpipe.findings.in_training import FEW_ROWS, find_few_rows, find_unused_parameters
from gpipe.findings.randomness import RandomStates, find_unkeyed_draws, random_states
from gpipe.findings.side_effects import (
    Snapshot,
    TensorVersion,
    buffers_of,
    find_buffer_readers,
    find_grad_fn_readers,
    find_side_effects,
    find_thread_locals,
    snapshot,
)
from gpipe.layers.stage import Layer

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
            self.tell(find_side_effects(before.snapshot, snapshot(named), recomputes=self._recomputes))
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
