"""Ready-made micro-batches: the bits of the plain loop over them, however many rows and whatever length each has."""

import copy
import pickle
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import gpipe
from gpipe.schedule.schedules import SCHEDULES
from tests.support.networks import WIDTH, WORDS, network, normed
from tests.support.plain_loop import (
    REMATS,
    Tree,
    assert_same_bits,
    plain_call,
    plain_loop,
    same_bits,
    squares,
    tensors_in,
    weights_of,
)
from tests.support.planned import pipe_by_costs

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SEED, MOST = 7, 5
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=MOST)
"""The rows and the length of each micro-batch."""


def parts(sizes: Sequence[tuple[int, int]], seed: int = 0) -> gpipe.MicroBatches:
    generator = torch.Generator().manual_seed(seed)
    return gpipe.MicroBatches([torch.randn(*size, WIDTH, generator=generator) for size in sizes])


def draw_pipe(draw: st.DataObject, schedule: str, layers: list[nn.Module], most: int = MOST) -> gpipe.GPipe:
    """The layers as a pipe by this schedule, of any number of partitions that it can have."""
    ranks, each = draw.draw(st.integers(1, 4)), SCHEDULES[schedule].stages_per_rank
    assume(ranks * each <= len(layers))
    return gpipe.GPipe(
        layers,
        ranks,
        max(most, 2 * ranks if schedule == "dualpipe_v" else 1),
        schedule=schedule,
        remat=draw.draw(st.sampled_from(REMATS)),
        driver=draw.draw(st.sampled_from(["threads", "lockstep"])),
        seed=SEED,
    )


@each_schedule
@settings(LAW, max_examples=12)
@given(st.data(), sizes)
def test_a_step_gives_the_bits_of_the_plain_loop_over_the_parts(
    schedule: str, draw: st.DataObject, sizes: list[tuple[int, int]]
) -> None:
    reference, inputs, targets = network(), parts(sizes), parts(sizes, 1)
    how: Any = {"reduction": draw.draw(st.sampled_from(["mean", "sum", of_rows])), "scale": 0.3}
    with draw_pipe(draw, schedule, network()) as pipe:
        for step in (0, 1):
            loss = pipe.step(inputs, targets, F.mse_loss, **how)
            expected = plain_loop(
                reference, inputs, targets, F.mse_loss, micro_batches=MOST, seed=SEED, step=step, **how
            )
            assert same_bits(loss, expected)
        assert_same_bits(pipe, reference)


def of_rows(target: Tree) -> float:
    assert isinstance(target, Tensor)
    return float(len(target) ** 2)


@each_schedule
@settings(LAW, max_examples=12)
@given(st.data(), sizes)
def test_a_call_gives_the_output_of_each_and_any_of_them_may_be_in_the_loss(
    schedule: str, draw: st.DataObject, sizes: list[tuple[int, int]]
) -> None:
    reference, inputs, theirs = network(), parts(sizes), parts(sizes)
    used = draw.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=MOST))  # in any order, also twice
    for own, other in zip(tensors_in(inputs.parts), tensors_in(theirs.parts), strict=True):
        wants = draw.draw(st.booleans())
        own.requires_grad_(wants)
        other.requires_grad_(wants)

    def loss_of(outputs: Any, weights: Any) -> Tensor:
        return torch.stack([(outputs[at] * weights[at]).sum() for at in used]).prod()

    weights = parts(sizes, 1)
    with draw_pipe(draw, schedule, network()) as pipe:
        outputs = pipe(inputs)
        assert type(outputs) is list
        loss = loss_of(outputs, weights)
        loss.backward()
        assert same_bits(loss, plain_call(reference, theirs, weights, loss_of, micro_batches=MOST, seed=SEED))
        assert_same_bits(pipe, reference)
    for own, other in zip(tensors_in(inputs.parts), tensors_in(theirs.parts), strict=True):
        assert same_bits(own.grad, other.grad)


def make(layers: list[nn.Module], partitions: int = 2, micro_batches: int = MOST, **how: Any) -> gpipe.GPipe:
    return gpipe.GPipe(layers, partitions, micro_batches, seed=SEED, **how)


def test_statistics_of_batch_norm_are_those_of_all_rows_if_they_are_deferred() -> None:
    inputs, targets = (
        gpipe.MicroBatches([x.flatten(0, 1) for x in tensors_in(parts([(3, 2), (2, 1), (5, 1)], seed).parts)])
        for seed in (0, 1)
    )
    assert make(normed()).verify(inputs, targets, squares, against="model").equal
    pipe, whole = make(normed(), batch_norm="deferred"), nn.BatchNorm1d(8)
    pipe.step(inputs, targets, squares)
    whole(pipe[0](torch.cat(tensors_in(inputs.parts))))
    torch.testing.assert_close(pipe[1].running_mean, whole.running_mean)
    torch.testing.assert_close(pipe[1].running_var, whole.running_var)


class Masked(nn.Module):
    """Takes words and how many of them count; an embedding of each."""

    def __init__(self) -> None:
        super().__init__()
        with weights_of(1):
            self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, value: dict[str, Any]) -> Tensor:
        mask = torch.arange(value["words"].shape[1]) < value["lengths"][:, None]
        return self.embed(value["words"]) * mask[..., None] * value["factors"][:, None] * value["twice"]


def sentences(seed: int) -> tuple[gpipe.MicroBatches, gpipe.MicroBatches]:
    """Words of any length, padded micro-batch by micro-batch, and those behind them, the padding ignored."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = [], []
    for rows, longest in [(3, 6), (2, 2), (4, 3)]:
        lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
        lengths[0] = longest
        words = torch.randint(WORDS, (rows, longest), generator=generator)
        factors = gpipe.Whole(torch.linspace(1, 2, WIDTH)[None])
        inputs.append({"factors": factors, "words": words, "lengths": lengths, "twice": 2.0})  # rows: those of words
        targets.append(words.roll(-1, 1).masked_fill(torch.arange(longest) >= lengths[:, None], -100).flatten())
    return gpipe.MicroBatches(inputs), gpipe.MicroBatches(targets)


def of_words(target: Tree) -> float:
    assert isinstance(target, Tensor)
    return float((target != -100).sum())


class Words(nn.Module):
    """What a loss of torch takes: a row for each word."""

    def __init__(self) -> None:
        super().__init__()
        with weights_of(2):
            self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).flatten(0, 1)


def test_trees_wholes_and_targets_of_other_rows_weighed_as_the_loss_averages() -> None:
    inputs, targets = sentences(0)
    pipe, plain = make([Masked(), *network(), Words()], 3), [Masked(), *network(), Words()]
    rows_of = {len(target): len(given["words"]) for target, given in zip(targets, inputs, strict=True)}  # type: ignore[arg-type, index]
    weights: list[Any] = [of_words, lambda target: rows_of[len(target)]]
    for step, weight in enumerate(weights):  # by words, or by rows if told to
        told: Any = {"reduction": "mean"} if step else {}
        loss = pipe.step(inputs, targets, F.cross_entropy, **told)
        how: Any = {"micro_batches": MOST, "seed": SEED, "reduction": weight, "step": step}
        assert same_bits(loss, plain_loop(plain, inputs, targets, F.cross_entropy, **how))
        assert_same_bits(pipe, plain)
    pipe = make([Masked(), *network(), Words()], 3)
    pipe.step(inputs, targets, lambda output, target: -output[target >= 0].log_softmax(1)[:, 0].mean())
    assert any(finding.startswith("loss_fn: micro-batches 0 to") for finding in pipe.findings)


def test_outputs_and_metrics_come_for_each_and_a_sample_may_be_ready_made() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    inputs = parts([(3, 2), (1, 4)])
    pipe = pipe_by_costs([*network(), Mean()], 2, MOST, sample=inputs, costs="flops", seed=SEED)
    plain = nn.Sequential(*network(), Mean())
    with torch.no_grad():
        outputs = pipe.eval()(inputs)
        assert [output.item() for output in outputs] == [plain.eval()(part).item() for part in inputs]
    _, metrics = pipe.step(inputs, gpipe.MicroBatches([1.0, 2.0]), lambda output, target: (output * target, target))
    assert metrics == [1.0, 2.0]


def test_a_sparse_tensor_is_taken_as_it_is() -> None:
    class Neighbours(nn.Module):
        def forward(self, graph: tuple[Tensor, Tensor]) -> Tensor:
            return torch.sparse.mm(*graph)

    def graph(nodes: int) -> tuple[Tensor, Tensor]:
        edges = torch.arange(nodes * nodes).reshape(nodes, nodes) % 3 == 0
        return edges.float().to_sparse(), torch.linspace(-1, 1, nodes * WIDTH).reshape(nodes, WIDTH)

    graphs = gpipe.MicroBatches([graph(nodes) for nodes in (4, 2, 7)])
    targets = parts([(4, 1), (2, 1), (7, 1)])
    targets = gpipe.MicroBatches([target.flatten(0, 1) for target in tensors_in(targets.parts)])
    assert make([Neighbours(), *network()]).verify(graphs, targets, squares, against="model").equal


def test_it_is_a_frozen_sequence_equal_to_itself_alone() -> None:
    made = gpipe.MicroBatches(part for part in [torch.ones(1), {"x": 2}, "three"])
    assert len(made) == 3
    assert made[2] == list(made)[2] == made[-1] == "three"
    assert isinstance(made, Sequence)
    assert type(made[:2]) is gpipe.MicroBatches
    assert made[1:].parts == ({"x": 2}, "three")
    assert {made: 1}[made] == 1
    assert made != gpipe.MicroBatches(made)
    with pytest.raises(AttributeError, match="parts"):
        made.parts = ()  # type: ignore[misc]
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(*tensors_in((twin[0], made[0])))
        assert twin.parts[1:] == made.parts[1:]


# Refusals.

X, Y = torch.ones(4, WIDTH), torch.ones(4, WIDTH)
two, three = gpipe.MicroBatches([X] * 2), gpipe.MicroBatches([X] * 3)


@pytest.mark.parametrize(
    ("inputs", "targets", "text"),
    [
        (two, Y, "gpipe.MicroBatches, but targets are not"),
        (two, None, "gpipe.MicroBatches, but targets are not"),
        (X, two, "gpipe.MicroBatches, but inputs are not"),
        (three, two, "inputs has 3 and targets has 2 micro-batches"),
        (gpipe.MicroBatches([X] * 6), gpipe.MicroBatches([Y] * 6), "micro_batches=5. Create the pipe with"),
        (gpipe.MicroBatches([X, None]), two, "inputs[1] is None and has no tensor"),
        (
            gpipe.MicroBatches([torch.tensor(1.0), X]),
            two,
            "inputs[0] is a Tensor and has no tensor",
        ),
        (
            gpipe.MicroBatches([[1, 2], X]),
            two,
            "inputs[0] is a list of numbers and has no tensor",
        ),
        (
            gpipe.MicroBatches([X, gpipe.Whole(X)]),
            two,
            "inputs[1] is a Whole and has no tensor",
        ),
        (gpipe.MicroBatches([X, X[:0]]), two, "inputs[1]: the micro-batch has no rows"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(inputs: Tree, targets: Tree, text: str) -> None:
    pipe = make(network())
    with pytest.raises(ValueError, match=re.escape(text)):
        pipe.step(inputs, targets, squares)
    pipe.step(two, two, squares)
    assert pipe.step_number == 1


@pytest.mark.parametrize("given", [(two, X), [X, {"x": two}], gpipe.Whole(two), gpipe.MicroBatches([X, (X, two)])])  # type: ignore[arg-type]  # that is what is refused
def test_none_is_inside_of_another_value(given: Any) -> None:
    pipe = make(network())
    for call in (lambda: pipe.step(given, Y, squares), lambda: pipe.step(X, given, squares), lambda: pipe(given)):
        with pytest.raises(TypeError, match=r"\[nested-micro-batches\]"):
            call()


@pytest.mark.parametrize("parts", [X, {"x": X}, "words", 3, None])
def test_one_value_is_no_list_of_micro_batches(parts: Any) -> None:
    with pytest.raises(TypeError, match=r"gpipe\.MicroBatches\(\) got a \w+, not a list"):
        gpipe.MicroBatches(parts)


def test_there_is_at_least_one_and_none_is_made_of_others() -> None:
    nothings: list[Iterable[Tree]] = [[], (), iter([])]
    for nothing in nothings:
        with pytest.raises(ValueError, match="got no micro-batches"):
            gpipe.MicroBatches(nothing)
    with pytest.raises(ValueError, match=r"gpipe\.MicroBatches\(\[\*first"):
        gpipe.MicroBatches([X, two])


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is (deprecated|not supported):DeprecationWarning"
)  # torch itself
def test_an_input_that_wants_a_gradient_or_has_a_tangent() -> None:
    pipe = make(network())
    with pytest.raises(ValueError, match=r"\[input-requires-grad\]"):
        pipe.step(gpipe.MicroBatches([X, X.clone().requires_grad_()]), two, squares)
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"\[forward-mode-derivative\]"):
        pipe(gpipe.MicroBatches([X, {"x": forward_ad.make_dual(X, X)}]))
