"""Checks in the first step that the losses of micro-batches add up to the loss of the mini-batch.

The outputs and targets of several micro-batches are concatenated, and the loss function is called on all of their
rows. The result must be the weighted sum of the losses of these micro-batches. If the result differs, the comparison
is repeated in float64, with the same state in every call. If the loss draws random numbers, the comparison is
repeated several times. Differences that rounding, state or random numbers cause are therefore not reported. After the
check, all state that the loss function can reach is restored.
"""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean, stdev
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe._torch.trees import tree_flatten, tree_leaves, tree_unflatten
from gpipe.batch.losses import LossAverage, LossCall, call_loss, find_average, observe_loss, runs_once
from gpipe.runtime.run import Run
from gpipe.stages.reachable_state import ReachableState
from gpipe.stages.rng import RankScope
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

LossArguments: TypeAlias = tuple[Tree, Tree, Mapping[str, object]]
"""The arguments of a loss function: the output, the target, and the stashed values that it pops."""
TOLERANCE = 1e-4
LEAST = 2  # The smallest number of micro-batches that are compared.
ENOUGH_BYTES = 2**26  # With more bytes of outputs and targets, only two micro-batches are compared.
MOST_BYTES = 2**30  # The most bytes of state that are copied before the loss function is called again.
REPEATS, DEVIATIONS = 8, 8.0  # For losses that draw random numbers: calls, and tolerance in standard errors.
COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast", "barrier"}
)

APART = (
    "loss_fn: micro-batches {first} to {last} have the loss {together:.6g}, {how}, but loss_fn returns {whole:.6g} "
    "for their rows in one call. Pass reduction= to step(), such as 'sum' or a function that returns weights. "
    "[loss-not-additive]"
)
UNCHECKED = (
    "loss_fn: gpipe cannot check that the losses of micro-batches, {how}, add up to the loss of the mini-batch: "
    "{why}. Pass reduction= to step(), such as 'mean' or 'sum'. [loss-not-checked]"
)


class CannotCheckError(Exception):
    """Raised if the losses of micro-batches cannot be compared with the loss of the mini-batch."""


class LossWatch:
    """Observes the calls of a loss function in one run, to determine weights of micro-batches and check the average.

    Args:
        average: The reduction of the loss, if `loss_fn` is one of PyTorch's losses.
        is_of_torch: Whether the loss function is a loss of torch.
        checks: Whether to keep copies of outputs and targets, for `check`.
    """

    def __init__(
        self, average: LossAverage | None = None, *, is_of_torch: bool = False, checks: bool = False
    ) -> None:
        self.average, self._is_of_torch, self._checks = average, is_of_torch, checks
        self._is_decided = is_of_torch
        self._kept: dict[int, LossArguments] = {}  # by micro-batch
        self._counts: dict[int, float | None] = {}  # by micro-batch, the denominator of the mean that was returned
        self._bytes = 0

    def call_loss(
        self, run: Run, m: int, output: Tree, target: Tree, popped: Mapping[str, object]
    ) -> tuple[Tensor, object]:
        """Calls the loss function for micro-batch `m`. The first call may set the weights of the micro-batches."""
        returned = self._call(run, m, (output, target, popped))
        if not run.loss_weights:
            run.weigh("mean" if self.average is None else self.average.reduction)
        return returned

    def _call(self, run: Run, m: int, arguments: LossArguments) -> tuple[Tensor, object]:
        loss_fn = run.loss_fn
        assert loss_fn is not None
        if self._is_decided and not self._checks:
            return call_loss(loss_fn, *arguments)
        size = sum(tensor.nbytes for tensor in tensors_in(arguments))
        fits = not self._is_of_torch and self._bytes + size <= ENOUGH_BYTES
        if self._checks and (len(self._kept) < LEAST or fits):
            try:
                copies: Any = replace_tensors(arguments, lambda tensor: tensor.detach().clone())
            except (torch.OutOfMemoryError, MemoryError):
                self._checks = False
            else:
                self._kept[m] = copies
                self._bytes += size
        if self._is_of_torch:
            (loss, metrics), calls = call_loss(loss_fn, *arguments), list[LossCall]()
        else:
            loss, metrics, calls = observe_loss(loss_fn, *arguments)
        if not self._is_decided:
            self._is_decided = True
            self.average = find_average(calls, arguments[1], run.micro_batch_sizes[m], ready_made=run.ready_made)
        self._counts[m] = next((call.denominator for call in calls if call.is_loss), None)
        if self._bytes > ENOUGH_BYTES and (self._is_of_torch or self._counts[m] is not None):
            self._kept.pop(m, None)  # The denominator is known, so large arguments are not needed.
        return loss, metrics

    def check(self, run: Run) -> list[str]:
        """Compares the losses of the micro-batches with the loss of the mini-batch, and returns findings."""
        if run.loss_fn is None or runs_once(run.loss_fn):
            return []
        last, layers = len(run.stages.all) - 1, len(run.stages.layers)
        stream = next(rank.stream for rank in run.ranks if last in rank.stages)
        state, scope = run.thread_state, RankScope(run.seed, run.step_number)
        stream.begin(())
        with stream.enter(), state.rank_thread(), scope, state.around_layers(), torch.no_grad():
            findings = self._compare_losses(run, partial(scope.begin_forward, layers))
        stream.end()
        return findings

    def _compare_losses(self, run: Run, set_key: Callable[[int], object]) -> list[str]:
        """Compares weighted losses with the loss of several micro-batches in one call.

        `set_key` sets the random key for a call of the loss function.
        """
        assert run.loss_fn is not None
        losses, weights = run.losses, run.loss_weights
        parameters = [p for stage in run.stages.local for layer in stage.layers for p in layer.module.parameters()]
        kept, self._kept = dict(sorted(self._kept.items())), {}
        if len(kept) < LEAST:
            return []
        how = f"weighted by {'rows' if self.average is None else self.average.by}"
        sums = self.average is not None and self.average.by == "sum"
        try:
            with FurtherCalls(run.loss_fn, parameters, set_key) as call:
                for chosen in dict.fromkeys([tuple(kept), tuple(kept)[:LEAST]]):  # One of them may agree by chance.
                    total = 1.0 if sums else sum(weights[m] for m in chosen)
                    if not total:
                        continue
                    shares = [weights[m] / total for m in chosen]
                    together = _add_up(shares, [losses[m] for m in chosen])
                    difference = _compare(call, [kept[m] for m in chosen], shares, together, _shared(run.targets))
                    if difference is not None:
                        how, (together, whole) = "summed" if sums else how, difference
                        return [
                            APART.format(first=chosen[0], last=chosen[-1], how=how, together=together, whole=whole)
                        ]
        except CannotCheckError as error:
            why = str(error)
        except (torch.OutOfMemoryError, MemoryError):
            why = "there is not enough memory"
        else:
            return []
        return [] if self._is_certain(weights) else [UNCHECKED.format(how=how, why=why)]

    def _is_certain(self, weights: Sequence[float]) -> bool:
        """Returns whether loss_fn returns a loss of torch whose denominators are proportional to the weights."""
        counts = [self._counts.get(m) for m in range(len(weights))]
        if self._is_of_torch or None in counts:
            return self._is_of_torch
        scale = sum(count for count in counts if count) / (sum(weights) or 1)
        return all(math.isclose(count or 0, weight * scale) for count, weight in zip(counts, weights, strict=True))


def _shared(targets: Sequence[Tree]) -> list[bool]:
    """Returns, for each leaf of the targets, whether this leaf is the same object in all micro-batches."""
    columns = zip(*map(tree_leaves, targets), strict=False)
    return [all(leaf is column[0] for leaf in column) for column in columns]


class FurtherCalls:
    """Calls a loss function again inside a context. The exit restores all state that the function can reach."""

    def __init__(
        self, loss_fn: Callable[..., object], parameters: Collection[Tensor], set_key: Callable[[int], object]
    ) -> None:
        self._loss_fn, self._set_key = loss_fn, set_key
        self._state = ReachableState.of({"loss_fn": loss_fn}, parameters_except=parameters, most_bytes=MOST_BYTES)
        self._keys = itertools.count()

    def __enter__(self) -> Self:
        if self._state.uncopyable:
            raise CannotCheckError(f"state that cannot be copied is reachable ({self._state.uncopyable[0]})")
        if dist.is_available() and dist.is_initialized() and self._state.names & COLLECTIVES:
            raise CannotCheckError("loss_fn communicates with other processes")
        return self

    def __exit__(self, *_: object) -> None:
        self._state.restore()

    def __call__(self, arguments: LossArguments, dtype: torch.dtype = torch.float16) -> Tensor:
        """Calls the loss function on copies with at least this precision, the initial state and a new random key."""
        self._state.restore(generators=False)
        self._set_key(next(self._keys))
        copies: Any = replace_tensors(arguments, lambda tensor: _as_precise(tensor, dtype))
        return call_loss(self._loss_fn, *copies)[0]


def _compare(
    call: FurtherCalls,
    arguments: Sequence[LossArguments],
    shares: Sequence[float],
    together: float,
    shared: Sequence[bool],
) -> tuple[float, float] | None:
    """Returns the sum of weighted losses and the loss of all rows, or None if they are equal up to rounding."""
    try:
        joined, is_whole = _join(arguments, shared, 0)
        whole = call(joined)
        if not is_whole and not torch.equal(whole, call(_join(arguments, shared, -1)[0])):
            raise CannotCheckError("loss_fn depends on values of a micro-batch that cannot be joined by rows")
        if _nearly(together, float(whole), TOLERANCE) or not math.isfinite(whole):
            return None
        if not math.isfinite(together):  # For example, a micro-batch has no labels to average over.
            return together, float(whole)
        for dtype in (torch.float64, torch.float32):
            with suppress(Exception):  # The loss function may have tensors that do not support a different dtype.
                return _compare_precisely(call, joined, arguments, shares, dtype)
        return _compare_precisely(call, joined, arguments, shares, torch.float16)
    except CannotCheckError:
        raise
    except Exception as error:
        why = f"loss_fn raises {type(error).__name__} for the rows of several micro-batches"
        raise CannotCheckError(why) from error


def _compare_precisely(
    call: FurtherCalls,
    joined: LossArguments,
    arguments: Sequence[LossArguments],
    shares: Sequence[float],
    dtype: torch.dtype,
) -> tuple[float, float] | None:
    """Compares in a given precision, with the same state in every call, and several times if losses are random."""
    sums, wholes = list[float](), list[float]()
    for repeat in range(REPEATS):
        whole, *losses = (call(part, dtype) for part in [joined, *arguments])
        sums.append(_add_up(shares, losses))
        wholes.append(float(whole))
        if repeat == 1 and _nearly(sums[0], sums[1], 1e-6) and _nearly(wholes[0], wholes[1], 1e-6):
            break  # The loss does not draw random numbers.
    gaps = [whole - part for whole, part in zip(wholes, sums, strict=True)]
    noise = DEVIATIONS * stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) == REPEATS else 0.0
    means, tolerance = (fmean(sums), fmean(wholes)), max(TOLERANCE, torch.finfo(whole.dtype).eps)
    return None if _nearly(*means, tolerance) or abs(fmean(gaps)) < noise else means


def _add_up(shares: Sequence[float], losses: Sequence[Tensor]) -> float:
    """Returns the weighted sum of losses. Losses with weight 0 are ignored, because they may be NaN."""
    return sum(share * float(loss) for share, loss in zip(shares, losses, strict=True) if share)


def _nearly(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12)


def _as_precise(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy of a tensor with at least this precision."""
    if not tensor.is_floating_point() or tensor.itemsize >= dtype.itemsize:
        return tensor.clone()
    return tensor.to(dtype)


def _join(arguments: Sequence[LossArguments], shared: Sequence[bool], pick: int) -> tuple[LossArguments, bool]:
    """Concatenates the arguments of micro-batches by rows.

    Args:
        arguments: The arguments for each micro-batch.
        shared: For each leaf of the target, whether the leaf is the same object in all micro-batches.
        pick: The micro-batch whose value replaces values that cannot be concatenated.

    Returns:
        The arguments for all rows, and whether all of their values could be concatenated.
    """
    flat = [tree_flatten(each) for each in arguments]
    if any(spec != flat[0][1] for _, spec in flat):
        raise CannotCheckError("outputs or targets of micro-batches differ in their structure")
    first = len(tree_leaves(arguments[0][0]))
    joined, is_whole = list[object](), True
    for index, column in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        leaf = _join_leaves(column, is_shared=0 <= index - first < len(shared) and shared[index - first])
        is_whole &= leaf is not NOT_JOINED
        joined.append(column[pick] if leaf is NOT_JOINED else leaf)
    return tree_unflatten(joined, flat[0][1]), is_whole


NOT_JOINED = object()


def _join_leaves(leaves: Sequence[Any], *, is_shared: bool) -> object:
    first = leaves[0]
    if isinstance(first, Tensor) and first.dim() and not is_shared:
        kinds = {(type(leaf), leaf.dtype, leaf.layout, leaf.shape[1:]) for leaf in leaves}
        return torch.cat([*leaves]) if len(kinds) == 1 else NOT_JOINED
    equal = torch.equal if isinstance(first, Tensor) else operator.eq
    with suppress(Exception):  # Comparing may run code of the user that raises.
        if all(leaf is first or bool(equal(leaf, first)) for leaf in leaves):
            return first
    return NOT_JOINED
