"""Verifies that a model trains in a pipe bitwise like the usual training loop over the unsplit model.

The loop follows transformers' Trainer with gradient accumulation. If a forward uses `num_items_in_batch`, every
micro-batch gets the number of labels of the whole mini-batch, and the losses are summed. Otherwise micro-batches are
weighted so that the losses add up to the loss of the undivided mini-batch.
"""

import copy
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gpipe
from gpipe.tracing.layers_of import ModelLayers, layers_of
from gpipe.tracing.trace import CannotSplitError
from tests.families.batches import IGNORED, batch
from tests.families.family import Family, build
from tests.support.plain_loop import accumulated, one_thread, same_bits
from tests.support.planned import pipe_by_costs

MICRO_BATCHES, CUTS, SEED = 4, (1, 2, 4), 7
NEAR = 2e-6  # of what several layers use: the parts of a gradient are added up in another order
COUNT = "num_items_in_batch"

Batch: TypeAlias = Mapping[str, Tensor]


class Weighing(NamedTuple):
    """How the losses of micro-batches combine: the number of labels passed to each, if any, and its weight."""

    labels: int | None
    shares: Sequence[float]

    @property
    def told(self) -> dict[str, Tensor]:
        """Returns the additional arguments of a forward."""
        return {} if self.labels is None else {COUNT: torch.tensor(self.labels)}


class Trained(NamedTuple):
    """The results of one step."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


class Reference(NamedTuple):
    """The expected results."""

    trained: Trained
    shared: frozenset[str]  # the names of the parameters that several layers use
    weighing: Weighing
    layers: int
    recording: float  # seconds


@dataclass
class Verdict:
    """The outcome for a family."""

    name: str
    task: str
    layers: int = 0
    recording: float = 0.0  # seconds
    gradients: float = 0.0  # how far they are from those of the loop, relative to the largest
    shared: float | None = None  # likewise those of parameters that several layers use
    mini_batch: float = 0.0  # how far the loss is from that of the undivided mini-batch
    mistakes: list[str] = field(default_factory=list)
    refused: str = ""  # why it cannot be trained in parts
    output: str = ""  # why the outputs of micro-batches cannot be put together

    @property
    def right(self) -> bool:
        """Whether the family trains, with bitwise identical results."""
        return not self.refused and not self.mistakes


def judge(family: Family) -> Verdict:
    """Verifies a family with dropout and without."""
    found = Verdict(family.name, family.task.name.lower())
    with quiet(), one_thread():
        try:
            for dropout in (False, True):
                judge_mode(family, found, dropout=dropout)
        except CannotSplitError as error:
            found.refused = str(error)
        except Exception as error:
            found.mistakes.append(f"{type(error).__name__}: {error}")
    return found


def judge_mode(family: Family, found: Verdict, *, dropout: bool) -> None:
    """Verifies a family in one of these two modes."""
    given, sample, model = batch(family), sample_of(family), build(family, dropout=dropout)
    expected = reference(family, model, given)
    found.layers, found.recording = expected.layers, expected.recording
    if not dropout:
        found.mini_batch = distance(expected.trained.loss, loss_of(build(family, dropout=False), given))
    outcomes = []
    for partitions in dict.fromkeys(min(cut, found.layers) for cut in CUTS):
        own = copy.deepcopy(model)
        where = f"{'dropout, ' if dropout else ''}K={partitions}: "
        with pipe_of(own, sample, partitions) as pipe:
            outcomes.append(state_of(own, pipe.step(given)))
            mistakes = compare(expected, outcomes[-1], found)
            mistakes += [] if outcomes[-1].loss.isfinite() else ["a loss that is no number"]
            if list(pipe.state_dict()) != list(model.state_dict()):
                mistakes.append("other names in state_dict()")
            if not dropout:
                mistakes += compare_outputs(pipe, own, given, expected.weighing, found)
        found.mistakes += [where + one for one in mistakes]
    if unsteady := {name for one in outcomes for name in changed(outcomes[0].gradients, one.gradients)}:
        found.mistakes.append(f"{len(unsteady)} gradients depend on K, as {min(unsteady)}")


def sample_of(family: Family) -> Batch:
    """Returns a sample for tracing, with different rows and lengths than the training batch."""
    return batch(family, rows=12, length=9, seed=5)


def pipe_of(model: nn.Module, sample: Batch, partitions: int, **settings: Any) -> gpipe.GPipe:
    """Returns a pipe that is split by parameters, because a split by time may differ between runs."""
    settings = {"micro_batches": MICRO_BATCHES, "seed": SEED, **settings}
    return pipe_by_costs(model, partitions, sample=dict(sample), **settings)


def parts_of(given: Batch, micro_batches: int = MICRO_BATCHES) -> list[Batch]:
    """Returns the micro-batches of a mini-batch."""
    columns = zip(*(value.tensor_split(micro_batches) for value in given.values()), strict=True)
    return [dict(zip(given, column, strict=True)) for column in columns]


def reference(family: Family, model: nn.Module, given: Batch, micro_batches: int = MICRO_BATCHES) -> Reference:
    """Runs the loop on a copy of a model: forward, loss and backward for one micro-batch after another."""
    model, parts = copy.deepcopy(model), parts_of(given, micro_batches)
    weighing = weigh(build(family, dropout=False), given, parts)
    before = time.perf_counter()
    layers = layers_of(model, parts_of(sample_of(family))[0])
    recording = time.perf_counter() - before

    def loss_of_part(m: int, part: Batch) -> Tensor:
        with layers.rng_scope(SEED, 0, m):  # what is drawn at random is that of a pipe
            loss: Tensor = model(**part, **weighing.told).loss
            return loss

    total = accumulated((loss_of_part(m, part) for m, part in enumerate(parts)), weighing.shares)
    return Reference(
        state_of(model, total.reshape(())), shared_names(model, layers), weighing, len(layers), recording
    )


def state_of(model: nn.Module, loss: Tensor) -> Trained:
    """Returns the state of a model after a step."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Trained(loss, gradients, dict(model.named_buffers()))


def shared_names(model: nn.Module, layers: ModelLayers) -> frozenset[str]:
    """Returns the names of the parameters that several layers use."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users = [names[id(p)] for part in layers.traced.layers.values() for p in part.parameters()]
    return frozenset(name for name in users if users.count(name) > 1)


def weigh(model: nn.Module, given: Batch, parts: Sequence[Batch]) -> Weighing:
    """Finds, by experiment, how the losses of micro-batches combine to the loss of the mini-batch."""
    whole, ones = float(loss_of(model, given)), [1.0] * len(parts)
    by_labels = [
        [labels_that_count(part, shifted=shifted) for part in parts]
        for shifted in (shifts_labels(model), True, False)
    ]
    if "labels" in given and uses_count(model, parts[0]):
        ways = [Weighing(sum(counts), ones) for counts in by_labels]
    else:
        rows = [len(next(iter(part.values()))) for part in parts]
        ways = [*(Weighing(None, shares_of(counts)) for counts in (*by_labels, rows)), Weighing(None, ones)]

    def off(way: Weighing) -> float:
        losses = [float(loss_of(model, part, way.told)) for part in parts]
        together = sum(loss * share for loss, share in zip(losses, way.shares, strict=True))
        return round(abs(whole - together) / abs(whole), 6)

    return min(ways, key=off)


def uses_count(model: nn.Module, part: Batch) -> bool:
    """Whether a model's loss depends on the number of labels that is passed to it."""
    try:
        one, two = (loss_of(model, part, {COUNT: torch.tensor(count)}) for count in (1, 2))
    except TypeError:  # it takes no such keyword
        return False
    return not torch.equal(one, two)


def shifts_labels(model: nn.Module) -> bool:
    """Whether Trainer does not count the first label of each row."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss  # late: it takes a second

    of_causal = LOSS_MAPPING.get(str(getattr(model, "loss_type", None))) is ForCausalLMLoss
    return of_causal and not getattr(model.config, "is_encoder_decoder", False)


def labels_that_count(part: Batch, *, shifted: bool) -> int:
    """Returns the number of labels of a micro-batch, or of its rows if it has none."""
    if "labels" not in part:
        return len(next(iter(part.values())))
    labels = part["labels"]
    return int((labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(IGNORED).sum())


def shares_of(counts: Sequence[int]) -> list[float]:
    """Returns the weight of each micro-batch."""
    return [count / sum(counts) for count in counts]


def loss_of(model: nn.Module, given: Batch, told: Mapping[str, Tensor] | None = None) -> Tensor:
    """Returns a model's own loss. Restores buffers that it changes."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loss: Tensor = model(**given, **(told or {})).loss
    return loss


def compare(expected: Reference, trained: Trained, found: Verdict) -> list[str]:
    """Compares a step with the loop."""
    own = expected.trained
    mistakes = [] if same_bits(trained.loss, own.loss) else [f"loss off by {distance(trained.loss, own.loss):.0e}"]
    wrong: dict[str, float] = {}
    for name in changed(own.gradients, trained.gradients):
        one, other = own.gradients[name], trained.gradients[name]
        apart = float("inf") if one is None or other is None else distance(other, one)
        if name in expected.shared:
            found.shared = max(apart, found.shared or 0.0)
        else:
            found.gradients = max(apart, found.gradients)
        if name not in expected.shared or not apart <= NEAR:
            wrong[name] = apart
    if wrong:
        name = next(iter(wrong))
        mistakes.append(f"{len(wrong)} of {len(own.gradients)} gradients off by {max(wrong.values()):.0e}, as {name}")
    if expected.shared:
        found.shared = found.shared or 0.0
    return mistakes + [f"buffer {name}" for name in changed(own.buffers, trained.buffers)]


def changed(own: Mapping[str, Tensor | None], others: Mapping[str, Tensor | None]) -> list[str]:
    """Returns the names of tensors that differ in any bit."""
    return [name for name, one in own.items() if not same_bits(one, others[name])]


def distance(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference of two tensors, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=torch.finfo(other.dtype).tiny))


def compare_outputs(
    pipe: gpipe.GPipe, model: nn.Module, given: Batch, weighing: Weighing, found: Verdict
) -> list[str]:
    """Compares the output of a pipe in evaluation with the outputs of the model for the micro-batches."""
    pipe.eval()
    with torch.no_grad():
        outputs = [model(**part, **weighing.told) for part in parts_of(given)]
        loss = sum(output.loss * share for output, share in zip(outputs, weighing.shares, strict=True))
        try:
            output = pipe(**given)
        except TypeError as error:
            found.output = str(error)
            return []
    mistakes = [] if same_bits(output.loss, loss) else ["loss in evaluation"]
    columns = [pytree.tree_leaves({**one, "loss": None}) for one in outputs]
    leaves = pytree.tree_leaves({**output, "loss": None})
    if [*output] != [*outputs[0]] or len(leaves) != len(columns[0]):
        return [*mistakes, f"output has {[*output]}, the model's {[*outputs[0]]}"]
    joined = [
        torch.cat(column) if column[0].dim() else loss  # luke gives its loss under two names
        for column in zip(*columns, strict=True)
        if isinstance(column[0], Tensor)
    ]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    wrong = sum(not same_bits(one, other) for one, other in zip(tensors, joined, strict=True))
    return mistakes + [f"{wrong} tensors of the output"] * bool(wrong)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings about tiny configurations and mini-batches."""
    logger = logging.getLogger("gpipe")
    import transformers

    before, own = transformers.logging.get_verbosity(), logger.level
    transformers.logging.set_verbosity_error()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        logger.setLevel(own)
