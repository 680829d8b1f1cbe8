"""Checks, in the first step, that the losses of micro-batches make the loss of the mini-batch.

The outputs and targets of several micro-batches are joined, and the loss function is called on all of their rows.
What it returns must be the weighted sum of the losses that it returned for each micro-batch. If it is not, the
comparison is repeated in float64, with the same state for every call, and several times if the loss draws random
numbers, so that rounding, state and random numbers are not reported. All state that the loss function can reach is
restored afterwards.
"""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from statistics import fmean, stdev
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe._torch.trees import tree_flatten, tree_leaves, tree_unflatten
from gpipe.batch.losses import LossAverage, LossReader, call_loss, find_average, runs_once
from gpipe.runtime.run import Run
from gpipe.stages.reachable_state import ReachableState
from gpipe.stages.rng import RankScope
from gpipe.stages.tree import Tree, replace_tensors, tensors_in

LossArguments: TypeAlias = tuple[Tree, Tree, Mapping[str, object]]
"""What a loss function is called on: the output, the target, and the stashed values that it pops."""
TOLERANCE = 1e-4
LEAST = 2  # micro-batches that are compared
ENOUGH_BYTES = 2**26  # of outputs and targets, beyond which two micro-batches are joined, not all
MOST_BYTES = 2**30  # of state that is copied before the loss function is called again
REPEATS, DEVIATIONS = 8, 8.0  # of a loss that draws random numbers: the error of the mean that is not reported
COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast", "barrier"}
)

APART = (
    "loss_fn: micro-batches {first} to {last} have the loss {together:.6g}, {how}, but loss_fn returns "
    "{whole:.6g} for the same rows in one call. Pass reduction='sum' to step() if loss_fn sums over rows, or a "
    "function that returns the weight of a micro-batch from its target. To keep this average, pass reduction='mean'."
)
UNCHECKED = (
    "loss_fn: gpipe cannot check that the losses of the micro-batches, {how}, make the loss of the mini-batch: "
    "{why}. Pass reduction= to step(): 'mean', 'sum', or a function that returns the weight of a "
    "micro-batch from its target."
)


class CannotCheckError(Exception):
    """Why the losses of micro-batches cannot be compared with the loss of the mini-batch."""


class LossWatch:
    """Watches the calls of a loss function in one run.

    Args:
        average: What the loss divides by, if it is one of torch's; then `is_of_torch`.
        checks: Whether to keep copies of outputs and targets, for `find_mistakes`.
    """

    def __init__(
        self, average: LossAverage | None = None, *, is_of_torch: bool = False, checks: bool = False
    ) -> None:
        self.average, self._is_of_torch, self._checks = average, is_of_torch, checks
        self._is_decided = is_of_torch
        self._kept: dict[int, LossArguments] = {}  # by micro-batch
        self._counts: dict[int, float | None] = {}  # what the mean that the loss function returned divided by
        self._bytes = 0

    def call_loss(
        self, run: Run, m: int, output: Tree, target: Tree, popped: Mapping[str, object]
    ) -> tuple[Tensor, object]:
        """Calls the loss function of a run; the first call decides the weights, unless they are known."""
        returned = self._call(run, m, (output, target, popped))
        if not run.loss_weights:
            run.weigh("mean" if self.average is None else self.average.reduction)
        return returned

    def _call(self, run: Run, m: int, given: LossArguments) -> tuple[Tensor, object]:
        loss_fn = run.loss_fn
        assert loss_fn is not None
        if self._is_decided and not self._checks:
            return call_loss(loss_fn, *given)
        size = sum(tensor.nbytes for tensor in tensors_in(given))
        fits = not self._is_of_torch and self._bytes + size <= ENOUGH_BYTES
        if self._checks and (len(self._kept) < LEAST or fits):
            try:
                copies: Any = replace_tensors(given, lambda tensor: tensor.detach().clone())
            except (torch.OutOfMemoryError, MemoryError):
                self._checks = False
            else:
                self._kept[m] = copies
                self._bytes += size
        reader = LossReader([])
        with nullcontext() if self._is_of_torch else reader:
            loss, metrics = call_loss(loss_fn, *given)
        made = zip(reader.calls, reader.results, strict=True)
        calls = [call._replace(is_loss=result is loss) for call, result in made]
        if not self._is_decided:
            self._is_decided = True
            self.average = find_average(calls, given[1], run.micro_batch_sizes[m], ready_made=run.ready_made)
        self._counts[m] = next((call.denominator for call in calls if call.is_loss), None)
        if self._bytes > ENOUGH_BYTES and (self._is_of_torch or self._counts[m] is not None):
            self._kept.pop(m, None)  # What it divides by is known, which is enough for a large one.
        return loss, metrics

    def check(self, run: Run) -> list[str]:
        """Compares the losses of the micro-batches with the loss of the mini-batch; returns findings."""
        if run.loss_fn is None or runs_once(run.loss_fn):
            return []
        last, layers = len(run.stages.all) - 1, len(run.stages.layers)
        stream = next(rank.stream for rank in run.ranks if last in rank.stages)
        state, scope = run.thread_state, RankScope(run.seed, run.step_number)
        stream.begin(())
        with stream.enter(), state.rank_thread(), scope, state.around_layers(), torch.no_grad():
            found = self._find_mistakes(run, partial(scope.begin_forward, layers))
        stream.end()
        return found

    def _find_mistakes(self, run: Run, draw: Callable[[int], object]) -> list[str]:
        """Compares the weighted losses with the loss of several micro-batches in one call; `draw` keys the calls."""
        assert run.loss_fn is not None
        losses, weights = run.losses, run.loss_weights
        parameters = [p for stage in run.stages.local for layer in stage.layers for p in layer.module.parameters()]
        given, self._kept = dict(sorted(self._kept.items())), {}
        if len(given) < LEAST:
            return []
        how = f"weighted by {'rows' if self.average is None else self.average.by}"
        sums = self.average is not None and self.average.by == "sum"
        try:
            with FurtherCalls(run.loss_fn, parameters, draw) as call:
                for chosen in dict.fromkeys([tuple(given), tuple(given)[:LEAST]]):  # One may agree by chance.
                    total = 1.0 if sums else sum(weights[m] for m in chosen)
                    if not total:
                        continue
                    shares = [weights[m] / total for m in chosen]
                    together = _add_up(shares, [losses[m] for m in chosen])
                    apart = _compare(call, [given[m] for m in chosen], shares, together, _shared(run.targets))
                    if apart is not None:
                        how, (together, whole) = "added up" if sums else how, apart
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
        """Whether the loss function is a loss of torch whose means divide by what the micro-batches count for."""
        counts = [self._counts.get(m) for m in range(len(weights))]
        if self._is_of_torch or None in counts:
            return self._is_of_torch
        scale = sum(count for count in counts if count) / (sum(weights) or 1)
        return all(math.isclose(count or 0, weight * scale) for count, weight in zip(counts, weights, strict=True))


def _shared(targets: Sequence[Tree]) -> list[bool]:
    """Which leaves of the targets every micro-batch takes whole."""
    columns = zip(*map(tree_leaves, targets), strict=False)
    return [all(leaf is column[0] for leaf in column) for column in columns]


class FurtherCalls:
    """Calls a loss function inside the context; all state that it can reach is restored at the end."""

    def __init__(
        self, loss_fn: Callable[..., object], parameters: Collection[Tensor], draw: Callable[[int], object]
    ) -> None:
        self._loss_fn, self._draw = loss_fn, draw
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
        """Calls it on copies of at least this precision, with the state of the beginning and new random numbers."""
        self._state.restore(generators=False)
        self._draw(next(self._keys))
        copies: Any = replace_tensors(arguments, lambda tensor: _as_precise(tensor, dtype))
        return call_loss(self._loss_fn, *copies)[0]


def _compare(
    call: FurtherCalls,
    given: Sequence[LossArguments],
    shares: Sequence[float],
    together: float,
    shared: Sequence[bool],
) -> tuple[float, float] | None:
    """Returns the weighted losses and the loss of all rows in one call, if they differ by more than rounding."""
    try:
        joined, is_whole = _join(given, shared, 0)
        whole = call(joined)
        if not is_whole and not torch.equal(whole, call(_join(given, shared, -1)[0])):
            raise CannotCheckError("it depends on values of a micro-batch that cannot be joined by rows")
        if _nearly(together, float(whole), TOLERANCE) or not math.isfinite(whole):
            return None
        if not math.isfinite(together):  # A micro-batch has nothing to average, say.
            return together, float(whole)
        for dtype in (torch.float64, torch.float32):
            with suppress(Exception):  # Tensors of its own may not mix with those of another precision.
                return _compare_precisely(call, joined, given, shares, dtype)
        return _compare_precisely(call, joined, given, shares, torch.float16)
    except CannotCheckError:
        raise
    except Exception as error:
        why = f"it raises {type(error).__name__} for the rows of several micro-batches"
        raise CannotCheckError(why) from error


def _compare_precisely(
    call: FurtherCalls,
    joined: LossArguments,
    given: Sequence[LossArguments],
    shares: Sequence[float],
    dtype: torch.dtype,
) -> tuple[float, float] | None:
    """Compares with the same state for every call, and repeatedly if the loss draws random numbers."""
    sums, wholes = list[float](), list[float]()
    for repeat in range(REPEATS):
        whole, *losses = (call(part, dtype) for part in [joined, *given])
        sums.append(_add_up(shares, losses))
        wholes.append(float(whole))
        if repeat == 1 and _nearly(sums[0], sums[1], 1e-6) and _nearly(wholes[0], wholes[1], 1e-6):
            break  # It draws none.
    gaps = [whole - part for whole, part in zip(wholes, sums, strict=True)]
    noise = DEVIATIONS * stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) == REPEATS else 0.0
    means, tolerance = (fmean(sums), fmean(wholes)), max(TOLERANCE, torch.finfo(whole.dtype).eps)
    return None if _nearly(*means, tolerance) or abs(fmean(gaps)) < noise else means


def _add_up(shares: Sequence[float], losses: Sequence[Tensor]) -> float:
    """The weighted sum of losses; one whose weight is 0 may be NaN."""
    return sum(share * float(loss) for share, loss in zip(shares, losses, strict=True) if share)


def _nearly(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)


def _as_precise(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a tensor, of at least this precision."""
    if not tensor.is_floating_point() or tensor.itemsize >= dtype.itemsize:
        return tensor.clone()
    return tensor.to(dtype)


def _join(given: Sequence[LossArguments], shared: Sequence[bool], pick: int) -> tuple[LossArguments, bool]:
    """Joins micro-batches by rows, and says whether all could be joined; what cannot be is that of one of them."""
    flat = [tree_flatten(arguments) for arguments in given]
    if any(spec != flat[0][1] for _, spec in flat):
        raise CannotCheckError("outputs or targets of micro-batches differ in their structure")
    first = len(tree_leaves(given[0][0]))
    joined, is_whole = list[object](), True
    for at, column in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        leaf = _join_leaves(column, is_shared=0 <= at - first < len(shared) and shared[at - first])
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
    with suppress(Exception):  # Their class may not compare them.
        if all(leaf is first or bool(equal(leaf, first)) for leaf in leaves):
            return first
    return NOT_JOINED
