"""Implements `GPipe.verify`, which replays a step, optionally runs the reference loop, and restores all state."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpipe._torch.modes import intra_op_threads
from gpipe._torch.modules import AnyBatchNorm, global_hooks
from gpipe.batch.inputs import split_alike
from gpipe.batch.losses import find_average, observe_loss, own_loss, read_average
from gpipe.batch.microbatch import MicroBatches, Reduction, loss_weights
from gpipe.errors import VerificationError
from gpipe.features.verification.feature import Verifier
from gpipe.stages.digest import differ, digest
from gpipe.stages.memory_layout import copy_of
from gpipe.stages.reachable_state import ReachableState
from gpipe.stages.rng import rng_scope
from gpipe.stages.skips import Stashed, run_layer
from gpipe.stages.stage import LOSS
from gpipe.stages.thread_state import ThreadState
from gpipe.stages.tree import Tree, replace_tensors, tensors_in
from gpipe.tracing.runs import arguments_of_each

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe

GRADIENT = "the gradient of "
MOST_SHOWN = 10  # differences in the text of a report
ROUNDING, MOST_ROUNDING = 8, 0.1
"""The accepted rounding differences of the gradients of tied weights.

The first number is in units in the last place, for each term of the sum. The second number is the maximum, as a share
of the largest gradient. Only dtypes with few digits reach the maximum.
"""


@dataclass(frozen=True)
class VerificationReport:
    """The result of `GPipe.verify`.

    Attributes:
        compared: The number of values that were compared: losses, outputs, gradients and buffers.
        differences: One sentence for each difference, in the order of computation. Empty if all values are bitwise
            identical.
        findings: One message for each value that could not be verified, and other findings of the replay.

    Example:
        >>> import torch, gpipe
        >>> pipe = gpipe.GPipe([torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)], partitions=2, micro_batches=2)
        >>> report = pipe.verify(torch.ones(4, 4), torch.ones(4, 1), torch.nn.functional.mse_loss)
        >>> report.equal, report.differences
        (True, ())
    """

    compared: int
    differences: tuple[str, ...]
    findings: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether all compared values are bitwise identical."""
        return not self.differences

    def __str__(self) -> str:
        count = len(self.differences)
        first = f"{self.compared} values compared: " + (f"{count} differ" if count else "all bitwise identical")
        shown = [f"  {text}" for text in self.differences[:MOST_SHOWN]]
        return "\n".join([first, *shown, *(f"finding: {text}" for text in self.findings)])


def verify(
    pipe: "GPipe",
    inputs: Tree,
    targets: Tree,
    loss_fn: Callable[..., object] | None,
    reduction: Reduction | None,
    *,
    against_model: bool,
) -> VerificationReport:
    """Verifies one mini-batch, as documented in `GPipe.verify`, and restores the pipe afterwards."""
    if against_model:
        _check_whole_model(pipe)
    _trace(pipe, inputs, loss_fn)
    differences, losses = list[str](), list[Tensor]()
    with torch.inference_mode(False), torch.enable_grad(), _sandbox(pipe, loss_fn) as reset:
        try:
            step: Callable[..., object] = pipe.step
            step(*_copies(inputs, targets), loss_fn, reduction=reduction, losses=losses)
        except VerificationError as error:
            differences.append(str(error))
        findings, compared = tuple(pipe._verifier.findings), pipe._verifier.compared
        if not against_model or differences:
            return VerificationReport(compared, tuple(differences), findings)
        actual = {f"the loss of micro-batch {m}": loss for m, loss in enumerate(losses)} | _results(pipe)
        reset()
        (parts,) = split_alike(pipe.micro_batches, inputs=inputs)[1]
        outputs = pipe(MicroBatches(*_copies(parts)))
        actual |= _describe(outputs)
        reset()
        with intra_op_threads(pipe._stages.intra_op_threads):
            expected = _describe(_reference_outputs(pipe, *_copies(parts)))
            reset()
            expected |= _reference_loop(pipe, _copies(inputs, targets), loss_fn, reduction)
        expected |= _results(pipe)
    terms = {name: len(losses) * layers for name, layers in _summed_by_layer(pipe).items()}
    gradients = [value for name, value in expected.items() if name.startswith(GRADIENT) and isinstance(value, Tensor)]
    scale = max(map(_largest, gradients), default=0.0)
    for name in actual | expected:
        given, wanted = actual.get(name), expected.get(name)
        if not differ(digest([given]), digest([wanted])):
            continue
        if name not in terms or given is None or wanted is None:
            differences.append(f"{name} differs from the reference loop")
        elif not _equal_up_to_rounding(given, wanted, terms[name], scale):
            differences.append(f"{name} differs from the reference loop by more than rounding")
    return VerificationReport(compared + len(actual), tuple(differences), findings)


def _trace(pipe: "GPipe", inputs: Tree, loss_fn: object) -> None:
    """Traces the model before `_sandbox` starts.

    Otherwise `_sandbox` would remove hooks that the first forward pass installs and that the trace needs.
    """
    traced = pipe._settings.traced
    if traced is None or pipe.plan.slices > 1 or pipe._processes.position is not None:
        return
    (values,) = split_alike(pipe.micro_batches, inputs=_copies(inputs)[0])[1]
    with torch.inference_mode(False), torch.enable_grad():
        traced.begin(values, float if loss_fn is None else None)
        traced.begin(values, for_output=True)


def _check_whole_model(pipe: "GPipe") -> None:
    devices = {stage.device for stage in pipe._stages.all}
    if pipe._processes.position is not None:
        raise ValueError("against='model' requires the whole model in one process. Call verify() without against=.")
    if len(devices) > 1:
        raise ValueError(
            f"against='model' requires the model on one device, but it is on {len(devices)}. Use devices='cpu'."
        )
    if pipe.plan.slices > 1:
        raise ValueError(
            "against='model' cannot compare slices, because they round differently. Use a schedule without slices."
        )


@contextmanager
def _sandbox(pipe: "GPipe", loss_fn: object) -> Iterator[Callable[[], None]]:
    """Restores weights, gradients, buffers, random generators and counters on exit.

    Yields:
        A function that restores the same values between two runs, and sets gradients to None.
    """
    roots = {**pipe._own_layers(), LOSS: loss_fn, **{f"global hook {n}": h for n, h in enumerate(global_hooks())}}
    parameters = [*pipe.parameters()]
    state = ReachableState.of(roots, parameters_too=parameters)
    gradients = [parameter.grad for parameter in parameters]
    kept = {name: getattr(pipe, name) for name in ("step_number", "_calls", "recorder", "_verifier")}

    def reset() -> None:
        state.restore()
        for name, value in kept.items():
            setattr(pipe, name, value)
        pipe.recorder = None
        pipe.zero_grad()

    reset()
    pipe._verifier = Verifier()
    try:
        yield reset
    finally:
        reset()
        pipe.recorder = kept["recorder"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _describe(outputs: Iterable[Tree]) -> dict[str, Tree]:
    """Returns the tensors of the outputs of all micro-batches, by their descriptions in messages."""
    return {
        f"the output of micro-batch {m}": [tensor.detach() for tensor in tensors_in(output)]
        for m, output in enumerate(outputs)
    }


def _copies(*values: Tree) -> Any:
    return tuple(
        MicroBatches(replace_tensors(value.parts, copy_of))  # type: ignore[arg-type]  # A tuple stays a tuple.
        if isinstance(value, MicroBatches)
        else replace_tensors(value, copy_of)
        for value in values
    )


def _results(pipe: "GPipe") -> dict[str, Tree]:
    """Returns the gradients and buffers of a pipe in a dict. The keys are their descriptions in messages."""
    deferred = pipe._stages.lowering.deferred_batch_norm
    statistics = {
        id(buffer)
        for module in pipe.modules()
        if deferred and isinstance(module, AnyBatchNorm)
        for buffer in module.buffers(recurse=False)
    }
    gradients = {GRADIENT + name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    buffers = {f"the buffer {name}": copy_of(b) for name, b in pipe.named_buffers() if id(b) not in statistics}
    return {**gradients, **buffers}


def _summed_by_layer(pipe: "GPipe") -> dict[str, int]:
    """Returns the number of layers that use each tied weight, by the keys of `_results` for their gradients.

    gpipe sums these gradients layer by layer, so that they do not depend on the number of ranks. The reference loop
    rounds them differently.
    """
    layers = {id(item.parameter): len(item.slots) for item in pipe._stages.shared}
    return {GRADIENT + name: layers[id(p)] for name, p in pipe.named_parameters() if id(p) in layers}


def _equal_up_to_rounding(actual: Any, expected: Any, terms: int, scale: float) -> bool:
    """Returns whether two sums of the same number of terms differ only by rounding.

    Args:
        actual: A gradient.
        expected: The same gradient, summed in a different order.
        terms: The number of terms of each sum.
        scale: The largest gradient of the model. A sum can be much smaller than its terms.
    """
    if (actual.shape, actual.dtype, actual.layout) != (expected.shape, expected.dtype, expected.layout):
        return False
    tolerance = min(MOST_ROUNDING, ROUNDING * terms * torch.finfo(actual.dtype).eps) * scale
    return torch.allclose(_values(actual), _values(expected), rtol=0.0, atol=tolerance, equal_nan=True)


def _values(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return torch.view_as_real(dense).double() if dense.is_complex() else dense.double()


def _largest(gradient: Tensor) -> float:
    """Returns the largest finite absolute value of a gradient."""
    values = _values(gradient.detach()).abs()
    finite = values[values.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _reference_outputs(pipe: "GPipe", values: Sequence[Tree]) -> Iterator[Tree]:
    """Runs the forward pass of one micro-batch after the other, as calls of the pipe do: without a KV cache."""
    if (traced := pipe._settings.traced) is not None:
        values = traced.begin(values, for_output=True).values
    for m, value in enumerate(values):
        yield _forward(pipe, value, m)[0]


def _reference_loop(
    pipe: "GPipe", batch: tuple[Tree, Tree], loss_fn: Callable[..., object] | None, reduction: Reduction | None
) -> dict[str, Tree]:
    """Runs the forward and backward pass of one micro-batch after the other.

    Returns:
        The losses, by their descriptions in messages.
    """
    traced, (inputs, targets), ready_made = pipe._settings.traced, batch, isinstance(batch[0], MicroBatches)
    trees = {"inputs": inputs} if loss_fn is None else {"inputs": inputs, "targets": targets}
    rows, (values, *others) = split_alike(pipe.micro_batches, **trees)
    goals: Sequence[Tree] = others[0] if others else [None] * len(values)
    weights: Sequence[float] = ()
    if traced is not None:
        begun = traced.begin(values, float if loss_fn is None else None)
        values, weights = list(begun.values), begun.shares
    expected: dict[str, Tree] = {}
    for m, (value, goal) in enumerate(zip(values, goals, strict=True)):
        output, held = _forward(pipe, value, m)
        popped = {name: held[name].pop(name) for name in getattr(loss_fn, "pop", ())}
        with rng_scope(pipe.seed, pipe.step_number, len(pipe), m):
            if loss_fn is None:
                loss = own_loss(output)
            else:
                loss, _, calls = observe_loss(loss_fn, output, goal, popped)
        expected[f"the loss of micro-batch {m}"] = loss.detach()
        if loss_fn is not None and not m:  # As in a step, the first call determines an unknown average.
            average = read_average(loss_fn, goals, rows, ready_made=ready_made)
            average = average or find_average(calls, goal, rows[0], ready_made=ready_made)
            weights = loss_weights(reduction or (average.reduction if average else "mean"), rows, goals)
        if weights[m]:
            with ThreadState.here().rank_thread():  # Without autocast, as in the backward passes of the pipe.
                loss.backward(torch.full_like(loss, weights[m]))
    return expected


def _forward(pipe: "GPipe", value: Tree, micro_batch: int) -> tuple[Tree, dict[str, Stashed]]:
    """Returns the output of the unsplit model, and the tensors that its layers stashed."""
    traced, held = pipe._settings.traced, dict[str, Stashed]()
    if traced is not None:
        (arguments,) = arguments_of_each(traced.model, [value])
        with traced.rng_scope(pipe.seed, pipe.step_number, micro_batch):
            return traced.model(*arguments.args, **arguments.kwargs), held
    for index, layer in enumerate(pipe):
        with rng_scope(pipe.seed, pipe.step_number, index, micro_batch):
            value = run_layer(layer, value, held)
    return value, held
