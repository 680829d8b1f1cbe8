"""The first step of each combination is verified: a replay in the order of the reference loop gives equal results."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.config import reference
from gpipe.features import loss_check
from gpipe.features.verification import evidence, replay, step_record
from gpipe.features.verification.feature import Verification
from gpipe.runtime import actions
from gpipe.stages.reachable_state import ReachableState
from tests.support.plain_loop import assert_same_bits, plain_loop, squares
from tests.support.planned import pipe_by_costs

Layers = Callable[[], list[nn.Module]]
DRIVERS = pytest.mark.parametrize("driver", ["lockstep", "threads"])


def batch(rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


def layers_around(*inner: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Tanh(), *(make() for make in inner), nn.Linear(4, 4)]


def train(layers: list[nn.Module], steps: int = 2, micro_batches: int = 4, **options: Any) -> gpipe.GPipe:
    options = {"remat": "never", "costs": "params", "seed": 3, **options}
    with pipe_by_costs(layers, [2, len(layers) - 2], micro_batches, **options) as pipe:
        for _ in range(steps):
            pipe.zero_grad()
            pipe.step(*batch(), squares)
    return pipe


# Layers that differ from the reference loop.


class WritesByData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.clamp_(-0.2, 0.2)
        return x * 2


class WritesByNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.detach().numpy()[...] *= 0.5
        return x * 2


class WritesByDLPack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.utils.dlpack.from_dlpack(x.detach()).add_(0.5)
        return x * 2


class WritesStorage(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()).mul_(0.5)
        return x * 2


LEFT: dict[str, Any] = {}


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        LEFT["x"] = x.detach()
        return x * 1.5


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left: Tensor = LEFT["x"]
        return x + left


class Decays(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class CallsBackward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x.detach()).sum().backward()
        return super().forward(x)


class StepsOptimizer(nn.Linear):
    def __init__(self, given: int, made: int) -> None:
        super().__init__(given, made)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.write)

    @staticmethod
    def write(parameter: Any) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None


class ReturnsWorkspace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.room = torch.zeros(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.room.data.copy_(x.detach())
        return x, self.room


class AddsBoth(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


class DrawsFromNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.rand())


class Shared(nn.Module):
    """State that two layers of different stages change: a number, a buffer through .data, a view."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.register_buffer("mean", torch.zeros(4))
        self.view = self.get_buffer("mean")[:]

    def forward(self, x: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        if self.kind == "number":
            self.calls += 1
            return x * (1 + 0.1 * self.calls)
        place = self.view if self.kind == "view" else mean
        place.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x if self.kind == "statistics" else x - place.clone()


def shared(kind: str) -> list[nn.Module]:
    module = Shared(kind)
    torch.manual_seed(0)
    return [nn.Linear(4, 4), module, nn.Linear(4, 4), module, nn.Linear(4, 4)]


def one_leaf() -> list[nn.Module]:
    leaf = torch.ones(4, requires_grad=True)

    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * leaf

    return [nn.Linear(4, 4), Scales(), nn.Tanh(), Scales(), nn.Linear(4, 4)]


def foreign_weight() -> list[nn.Module]:
    layers = layers_around(nn.Tanh)
    first: Any = layers[0]

    class Penalizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + first.weight.sum()

    return [*layers, Penalizes()]


DIFFERENT: dict[str, tuple[Layers, str]] = {
    "an input written through .data": (
        lambda: layers_around(WritesByData),
        r"layer 2 .* \[input-written-unnoticed\]",
    ),
    "an input written by numpy": (lambda: layers_around(WritesByNumpy), r"layer 2 .* \[input-written-unnoticed\]"),
    "an input written through DLPack": (
        lambda: layers_around(WritesByDLPack),
        r"layer 2 .* \[input-written-unnoticed\]",
    ),
    "an input written in its storage": (
        lambda: layers_around(WritesStorage),
        r"layer 2 .* \[input-written-unnoticed\]",
    ),
    "a value left for another stage": (lambda: [nn.Linear(4, 4), Leaves(), Reads(), nn.Linear(4, 4)], "layer 2"),
    "a weight written in a forward": (lambda: layers_around(partial(Decays, 4, 4)), r"writes the weights 2\.weight"),
    "a backward in a forward": (lambda: layers_around(partial(CallsBackward, 4, 4)), r"the gradient of 2\.weight"),
    "an optimizer in a backward": (lambda: layers_around(partial(StepsOptimizer, 4, 4)), "writes the weights 2"),
    "a workspace that is returned": (
        lambda: [nn.Linear(4, 4), ReturnsWorkspace(), AddsBoth(), nn.Linear(4, 4)],
        r"\[output-written-again\]",
    ),
    "numbers that two stages draw": (
        lambda: [DrawsFromNumpy(), nn.Linear(4, 4), DrawsFromNumpy(), nn.Linear(4, 4)],
        "generator of numpy",
    ),
    "a number that two stages change": (partial(shared, "number"), "attribute calls"),
    "a buffer that two stages change": (partial(shared, "buffer"), "differs from the reference loop"),
    "a view that two stages change": (partial(shared, "view"), "differs from the reference loop"),
    "statistics that two stages collect": (partial(shared, "statistics"), "its buffers"),
    "a tensor that two stages train": (one_leaf, r"\[weight-of-different-stage\]"),
    "a weight of another stage": (foreign_weight, r"reaches 0\.weight"),
}


@DRIVERS
@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_layer_that_differs_from_the_reference_loop_is_rejected_with_the_likely_cause(
    kind: str, driver: str
) -> None:
    make, words = DIFFERENT[kind]
    if driver == "threads":  # By their timing, the step may have been that of the reference loop.
        words += r"|\[state-of-different-stage\]"
    LEFT["x"] = torch.zeros(4, 4)
    with pytest.raises(gpipe.VerificationError, match=words):
        train(make(), driver=driver)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_whatever_the_schedule_a_layer_gives_the_bits_of_the_reference_loop_or_is_rejected(
    kind: str, remat: str, schedule: str
) -> None:
    make, _ = DIFFERENT[kind]
    layers, options = make(), dict[str, Any](remat=remat, schedule=schedule, seed=3)
    reference = copy.deepcopy(layers)
    np.random.seed(0)
    expected = [
        plain_loop(reference, *batch(), squares, micro_batches=4, seed=3, step=step).item() for step in range(2)
    ]
    np.random.seed(0)
    stages = [2, len(layers) - 2]
    if schedule == "interleaved":
        stages = [1, 1, 1, len(layers) - 3]
    with gpipe.GPipe(layers, stages, 4, **options) as pipe:
        try:
            losses = [pipe.step(*batch(), squares).item() for _ in range(2)]
        except RuntimeError:  # a VerificationError, a RecomputeError, or torch's own
            return
        buffers = zip(pipe.buffers(), nn.Sequential(*reference).buffers(), strict=True)
        equal = losses == expected and all(torch.equal(buffer, other) for buffer, other in buffers)
        assert equal or pipe._verifier.findings


# Layers that do not differ.


class MovingMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        out = x - mean
        mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return out


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class UsesWorkspace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.room: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.room = torch.zeros_like(x) if self.room is None else self.room
        self.room.data.copy_(x)
        return x + self.room


class Clamps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "a buffer that each forward reads and writes": MovingMean,
    "a number that each forward changes": Counts,
    "a workspace": UsesWorkspace,
    "numbers that one stage draws": DrawsFromNumpy,
    "a weight that a second write leaves alone": partial(Clamps, 4, 4),
    "dropout": partial(nn.Dropout, 0.5),
    "BatchNorm": partial(nn.BatchNorm1d, 4),
    "an in-place operation": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
}


@DRIVERS
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("kind", EQUAL)
def test_a_layer_that_the_schedule_does_not_change_is_no_finding(kind: str, schedule: str, driver: str) -> None:
    layers = layers_around(EQUAL[kind])
    reference = copy.deepcopy(layers)
    np.random.seed(0)
    pipe = train(layers, 1, schedule=schedule, driver=driver)
    drawn = np.random.rand()
    assert pipe._verifier.findings == []
    assert pipe._verifier.compared > 0
    np.random.seed(0)
    plain_loop(reference, *batch(), squares, micro_batches=4, seed=3)
    assert np.random.rand() == drawn
    assert_same_bits(pipe, reference)


class WritesSparse(nn.Module):
    """Writes the values of a sparse buffer in place."""

    edges: Tensor

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        blocks = (2, 2) if layout is torch.sparse_bsr else None
        self.register_buffer("edges", torch.eye(4).to_sparse(layout=layout, blocksize=blocks))

    def forward(self, x: Tensor) -> Tensor:
        values = self.edges._values() if self.edges.layout is torch.sparse_coo else self.edges.values()
        values.mul_(1.5)
        return x + self.edges.to_dense().mean()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr], ids=str)
def test_a_sparse_buffer_that_each_forward_writes_ends_as_in_the_reference_loop(
    layout: torch.layout, remat: str
) -> None:
    """Bug story: a replay left compressed buffers as it had written them."""
    layers, reference = (layers_around(partial(WritesSparse, layout)) for _ in range(2))
    pipe = train(layers, 1, remat=remat)
    plain_loop(reference, *batch(), squares, micro_batches=4, seed=3)
    assert pipe._verifier.findings == []
    assert torch.equal(pipe[2].edges.to_dense(), reference[2].edges.to_dense())  # type: ignore[operator]


def test_an_optimizer_in_the_backward_of_one_micro_batch_is_that_of_the_reference_loop() -> None:
    pipe = train(layers_around(partial(StepsOptimizer, 4, 4)), 3, micro_batches=1)
    (finding,) = pipe._verifier.findings
    assert "[weights-written-in-step]" in finding


# State that is reported.


class Scaled(nn.Module):
    """A hook on its backward keeps a scale that its next forward reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.amax: Any = 1.0 if kind == "number" else torch.ones(())
        if kind == "buffer":
            del self.amax
            self.register_buffer("amax", torch.ones(()))
        self.register_full_backward_hook(self.see)

    def see(self, module: nn.Module, given: Any, came: Any) -> None:
        largest = came[0].abs().max()
        if self.kind == "buffer":
            self.amax.copy_(largest)
        else:
            self.amax = float(largest) if self.kind == "number" else largest

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * (1 + self.amax)
        return out


@pytest.mark.parametrize("kind", ["number", "tensor", "buffer"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_state_that_a_backward_writes_and_a_forward_reads_is_a_finding(kind: str, schedule: str) -> None:
    layers = [nn.Linear(4, 4), Scaled(kind), *layers_around()]
    pipe = train(layers, schedule=schedule)
    (finding,) = [text for text in pipe.findings if "amax" in text]
    assert finding.startswith("stage 0")
    assert "[state-written-in-backward]" in finding


def test_state_that_a_recomputation_changes_once_more_is_a_finding() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.rows.append(len(x))
            return x

    pipe = train(layers_around(Logs), remat="always")
    (finding,) = pipe._verifier.findings
    assert "its attribute rows" in finding
    assert train(layers_around(Logs))._verifier.findings == []


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.default_rng().random())


def test_what_cannot_be_replayed_is_a_finding() -> None:
    (finding,) = train(layers_around(Noisy))._verifier.findings
    assert "layer 2 (2: Noisy)" in finding

    class Iterates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = (number for number in range(100))

        def forward(self, x: Tensor) -> Tensor:
            return x + next(self.numbers)

    (finding,) = train(layers_around(Iterates))._verifier.findings
    assert "cannot be copied" in finding
    assert "numbers" in finding


# When steps are verified.


def verified(pipe: gpipe.GPipe, step: Callable[[], object]) -> bool:
    before = pipe._verifier.compared
    step()
    return pipe._verifier.compared > before


def test_a_step_is_verified_once_for_each_combination_of_modes_and_inputs() -> None:
    layers = layers_around(nn.Tanh)
    pipe = gpipe.GPipe(layers, 2, 4)
    x, y = batch()
    step = partial(pipe.step, x, y, squares)
    assert verified(pipe, step)
    assert not verified(pipe, step)
    assert not verified(pipe, partial(pipe.step, x[:12], y[:12], squares))
    assert verified(pipe, lambda: pipe.train(False) and step())
    layers[0].get_parameter("weight").requires_grad_(False)
    assert verified(pipe, step)
    layers[1].register_forward_hook(lambda *_: None)
    assert verified(pipe, step)
    assert verified(pipe, lambda: pipe.double() and pipe.step(x.double(), y.double(), squares))
    assert not verified(pipe, lambda: squares(pipe(x.double()), y.double()))  # its backward is to come
    assert verified(pipe, lambda: squares(pipe(x.double()), y.double()).backward())
    with torch.no_grad():
        assert not verified(pipe, lambda: pipe(x.double()[:8]))


def test_a_call_whose_forward_adds_to_gradients_is_rejected_before_its_backward() -> None:
    pipe = gpipe.GPipe(layers_around(partial(CallsBackward, 4, 4)), partitions=2, micro_batches=4)
    with pytest.raises(gpipe.VerificationError, match=r"\[backward-in-forward\]"):
        pipe(torch.ones(8, 4))


def test_gradients_of_a_forward_in_another_order_are_rejected_even_if_their_sums_are_equal() -> None:
    with torch.random.fork_rng():
        layers = layers_around(partial(CallsBackward, 4, 4))
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.fill_(0.25)  # All sums are exact in every order.
    exact: list[nn.Module] = [layer for layer in layers if not isinstance(layer, nn.Tanh)]
    x = torch.ones(8, 4)
    with gpipe.GPipe(exact, [1, 2], 1, remat="never") as pipe:  # the order of the reference loop
        pipe.step(x, x, squares)
    with gpipe.GPipe(exact, [1, 2], 2, remat="never") as pipe:
        pipe.zero_grad()
        with pytest.raises(
            gpipe.VerificationError, match=r"the order of gradients in a sum.*\[backward-in-forward\]"
        ):
            pipe.step(x, x, squares)


def test_no_step_is_verified_if_verify_steps_is_false() -> None:
    pipe = gpipe.GPipe(layers_around(partial(CallsBackward, 4, 4)), 2, 4, remat="never")
    assert pipe.verify_steps
    pipe.verify_steps = False
    pipe.step(*batch(), squares)
    assert pipe._verifier.compared == 0


def halved(gradients: Any, kept: Any = ()) -> None:
    for some in gradients:
        some[:] = [gradient / 2 for gradient in some]


@pytest.mark.parametrize(("name", "fault"), [("clone_shared_gradients", halved), ("run_backward", lambda *_: None)])
def test_a_fault_of_the_runtime_is_caught(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs with the fault, the replay without."""

    verify = Verification._verify

    def verify_without_fault(verification: Verification, run: Any) -> None:
        monkeypatch.undo()
        verify(verification, run)

    monkeypatch.setattr(actions, name, fault)
    monkeypatch.setattr(Verification, "_verify", verify_without_fault)
    pipe = gpipe.GPipe(layers_around(nn.Tanh), 2, 4, driver="lockstep")
    with pytest.raises(gpipe.VerificationError, match="gradient"):
        pipe.step(*batch(), squares)


# Memory.


def fail_from(first: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes all copies and digests of verification fail, from call number `first` on; returns the names of calls."""
    calls: list[str] = []

    def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        if len(calls) > first:
            raise MemoryError
        return function(*args, **kwargs)

    for module in (step_record, evidence, replay, loss_check):
        for name in ("copy_of", "copy_boundary", "digest", "replace_tensors"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, partial(counted, getattr(module, name)))
    monkeypatch.setattr(ReachableState, "of", partial(counted, ReachableState.of))
    return calls


@DRIVERS
@pytest.mark.parametrize("way", ["step", "call"])
def test_without_memory_for_its_proof_a_step_has_the_same_results_and_a_finding(
    way: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(first: float) -> tuple[gpipe.GPipe, list[str], int]:
        with monkeypatch.context() as patch:
            calls = fail_from(first, patch)  # type: ignore[arg-type]  # infinity, too
            pipe = gpipe.GPipe(layers_around(MovingMean), 2, 4, seed=3, driver=driver)
            before = len(calls)
            inputs, targets = batch()
            if way == "step":
                pipe.step(inputs, targets, squares)
            else:
                squares(pipe(inputs), targets).backward()
            return pipe, calls, before

    right, calls, before = run(float("inf"))
    assert not any("verified" in text for text in right.findings)
    most = len(calls)
    ends = most - 1 - calls[::-1].index("of") if way == "step" else most  # then the loss is checked
    for first in [*range(before, most, 7), most - 1]:
        pipe, calls, _ = run(first)
        assert_same_bits(pipe, [*right])
        found = any("could not be verified: there is not enough memory" in text for text in pipe.findings)
        assert found == (first < ends)


# What a replay leaves.


def test_a_replay_leaves_state_as_the_step_left_it() -> None:
    heard: list[str] = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.rows, self.by = 0, [0], {"n": 0}
            self.register_buffer("seen", torch.zeros(()))
            self.scratch = np.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.rows.append(len(x))
            self.by["n"] += 1
            self.get_buffer("seen").add_(1)
            self.scratch += 1
            return x

    layers = layers_around(Keeps, nn.Dropout)
    layers[-1].register_forward_hook(lambda *_: heard.append("forward"))
    layers[-1].register_full_backward_hook(lambda *_: heard.append("backward"))
    losses: list[float] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        losses.append(len(output))
        return squares(output, target)

    with gpipe.GPipe(layers, 2, 4, remat="never") as pipe:
        np.random.seed(3)
        torch.manual_seed(3)
        pipe.step(*batch(), loss_fn)
        assert pipe._verifier.compared
    kept: Any = layers[2]
    assert (kept.calls, kept.rows, kept.by, kept.seen.item()) == (4, [0, 4, 4, 4, 4], {"n": 4}, 4)
    assert kept.scratch.tolist() == [4, 4, 4]
    assert sorted(heard) == ["backward"] * 4 + ["forward"] * 4
    assert losses == [4] * 4
    first, second = np.random.rand(), torch.rand(1)
    np.random.seed(3)
    torch.manual_seed(3)
    assert (first, second) == (np.random.rand(), torch.rand(1))


# pipe.verify


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_verify_compares_with_the_whole_reference_loop_and_leaves_the_pipe_as_it_was(driver: str) -> None:
    layers = [*layers_around(nn.Dropout, partial(nn.BatchNorm1d, 4))]
    with gpipe.GPipe(layers, 2, 4, driver=driver) as pipe:
        before = copy.deepcopy(pipe.state_dict())
        pipe.step(*batch(), squares)
        gradients = [parameter.grad for parameter in pipe.parameters()]
        pipe.load_state_dict(before)
        report = pipe.verify(*batch(), F.mse_loss, against="model")
        assert report.equal, str(report)
        assert report.compared > 30
        assert [parameter.grad for parameter in pipe.parameters()] == gradients
        assert all(torch.equal(value, pipe.state_dict()[name]) for name, value in before.items())
        assert pipe.step_number == 1


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_verify_weights_micro_batches_like_a_step(reduction: str) -> None:
    """Bug story: verify weighted a function that calls a loss of torch by rows, and reported equal gradients."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction=reduction, ignore_index=0)

    targets = torch.tensor([0, 0, 0, 2, 3, 1, 1, 1])
    with gpipe.GPipe([nn.Linear(4, 4), nn.Linear(4, 4)], 2, 4) as pipe:
        report = pipe.verify(batch(8)[0], targets, loss_fn, against="model")
    assert report.equal, str(report)


def test_verify_reports_what_differs() -> None:
    with gpipe.GPipe(layers_around(WritesByData), [2, 2], 4, remat="never") as pipe:
        report = pipe.verify(*batch(), squares)
        assert not report.equal
        assert "[input-written-unnoticed]" in str(report)
        with pytest.raises(ValueError, match="against='plain' is unknown"):
            pipe.verify(*batch(), squares, against="plain")  # type: ignore[arg-type]


def test_verify_reports_a_gradient_that_one_side_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = reference._reference_loop

    def without_one(pipe: gpipe.GPipe, *given: Any) -> Any:
        expected = loop(pipe, *given)
        next(pipe.parameters()).grad = None
        return expected

    monkeypatch.setattr(reference, "_reference_loop", without_one)
    with gpipe.GPipe(layers_around(nn.Tanh), 2, 4) as pipe:
        report = pipe.verify(*batch(), squares, against="model")
    assert report.differences == ("the gradient of 0.weight differs from the reference loop",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("factor", "is_found"), [(1.0, False), (2.0, True), (0.0, True)])
def test_verify_compares_gradients_of_tied_weights_up_to_rounding(
    dtype: torch.dtype, factor: float, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug story: they were not compared at all if both sides had one."""
    loop, tied = reference._reference_loop, nn.Linear(4, 4).to(dtype)

    def scaled(pipe: gpipe.GPipe, *given: Any) -> Any:
        expected = loop(pipe, *given)
        assert tied.weight.grad is not None
        tied.weight.grad *= factor
        return expected

    monkeypatch.setattr(reference, "_reference_loop", scaled)
    with gpipe.GPipe([tied, nn.Tanh(), tied, nn.Linear(4, 4).to(dtype)], 2, 4) as pipe:
        x, y = (part.to(dtype) for part in (torch.randn(8, 4), torch.randn(8, 4)))
        report = pipe.verify(x, y, squares, against="model")
    message = "the gradient of 0.weight differs from the reference loop by more than rounding"
    assert report.differences == ((message,) if is_found else ())


def test_verify_runs_no_backward_of_the_reference_loop_under_the_autocast_of_the_caller() -> None:
    queries = torch.rand(8, 2, 6, 4)

    class Attends(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)

    pipe = gpipe.GPipe([Attends(4, 4), nn.Linear(4, 1)], 2, 4)
    with pipe, torch.autocast("cpu", torch.bfloat16):
        report = pipe.verify(queries, queries[..., :1], F.mse_loss, against="model")
    assert report.equal, str(report)
