"""Weights on the host: the bits of the plain loop, few stages on the device, and weights that come back."""

import copy
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.features import streamed_weights
from gpipe.features.streamed_weights import _LoadedStages
from gpipe.schedule.action import Kind
from gpipe.stages.host_memory import is_in_file
from tests.support.jobs import same_bits as jobs
from tests.support.mixed_tasks import generate_task, generate_way, is_statistic, run_pipe, run_plain, whole
from tests.support.outcomes import differences
from tests.support.plain_loop import Loop, all_same_bits, assert_same_bits, same_bits, weights_of
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
X, Y = torch.randn(8, 4), torch.randn(8, 4)


@settings(LAW, max_examples=60)
@given(st.randoms(use_true_random=True), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_weights_on_the_host_give_the_bits_of_the_plain_loop(
    draw: Random, ranks: int, each: int, resident: int
) -> None:
    task = generate_task(draw)
    way = generate_way(draw, task.model, ranks * each)
    assume(way is not None)
    assert way is not None
    remat = draw.choice(["always", "offload_inputs"])
    schedule = gpipe.BreadthFirst(each, resident)
    found = run_pipe(task, replace(way, schedule=schedule, weights="host", remat=(remat,) * len(way.cut)))
    assert differences(found, run_pipe(task, whole(task.model))) == []
    assert differences(found, run_plain(task), leave_out=is_statistic(task)) == []
    assert not streamed_weights._loaded


@pytest.mark.parametrize("batch_norm", ["micro", "deferred", "synchronized"])
@pytest.mark.parametrize(("partitions", "remat"), [(1, "always"), (2, "offload_inputs")])
def test_two_replicas_train_the_same_with_weights_on_the_host(
    partitions: int, remat: str, batch_norm: str, pool: WorkerPool
) -> None:
    found = {
        weights: answers(pool.run(jobs.replicated, partitions, weights, mode, batch_norm, world=2 * partitions))
        for weights, mode in (("device", "always"), ("host", remat))
    }
    assert all("3 loss" in own and len(own) > 20 for own in found["host"])
    assert found["host"] == found["device"]
    first, second = ({k: v for k, v in found["host"][rank].items() if "running" not in k} for rank in (0, partitions))
    assert first == second  # losses, gradients and weights
    is_alike = found["host"][0] == found["host"][partitions]
    assert is_alike == (batch_norm != "micro")  # else each replica has the statistics of its rows


def linear(count: int = 6) -> list[nn.Module]:
    with weights_of(1):
        return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]


def pipe_of(layers: list[nn.Module], partitions: int = 1, resident: int = 2, **options: object) -> gpipe.GPipe:
    schedule = gpipe.BreadthFirst(len(layers) // partitions, resident)
    options = {"seed": 0, "weights": "host", **options}
    return gpipe.GPipe(layers, partitions, 4, schedule=schedule, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_at_most_resident_stages_are_in_memory(resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = list[int]()
    load = _LoadedStages.load

    def counted(stages: _LoadedStages, *args: object, **options: object) -> None:
        load(stages, *args, **options)  # type: ignore[arg-type]
        held.append(len(stages.weights))

    monkeypatch.setattr(_LoadedStages, "load", counted)
    pipe = pipe_of(linear(), resident=resident)
    pipe.verify_steps = False
    pipe.step(X, Y, mse_loss)
    assert max(held) == resident
    assert len(held) == 2 * 6 - resident


def test_a_step_adds_to_gradients_that_were_there() -> None:
    pipe, loop = pipe_of(linear()), Loop(linear(), 4, 0)
    assert same_bits(pipe.step(X, Y, mse_loss), loop.step(X, Y, mse_loss))
    first = [p.grad for p in pipe.parameters()]
    for _ in range(2):
        assert same_bits(pipe.step(X, Y, mse_loss), loop.step(X, Y, mse_loss))
        assert all(a is p.grad for a, p in zip(first, pipe.parameters(), strict=True))  # in place
    assert_same_bits(pipe, [*loop])


class Writes(nn.Linear):
    """Changes its weights in the forward pass, as spectral normalization or a clamp does."""

    def __init__(self, through_data: bool) -> None:
        super().__init__(4, 4)
        self.through_data = through_data

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.weight.data if self.through_data else self.weight).clamp_(-0.1, 0.1)
        return super().forward(x)


def test_weights_that_a_forward_writes_reach_the_host() -> None:
    def layers() -> list[nn.Module]:
        with weights_of(1):
            return [nn.Linear(4, 4), Writes(through_data=False), nn.Linear(4, 4)]

    pipe, loop = pipe_of(layers()), Loop(layers(), 4, 0)
    pipe.verify_steps = False
    pipe.step(X, Y, mse_loss), loop.step(X, Y, mse_loss)
    assert_same_bits(pipe, [*loop])


@pytest.mark.parametrize("through_data", [False, True])
def test_a_verified_step_treats_written_weights_as_on_a_device(through_data: bool) -> None:
    """Writes through .data have no version, so a verified step copies all weights back."""
    results = []
    for weights in ("device", "host"):
        with weights_of(1):
            pipe = pipe_of([nn.Linear(4, 4), Writes(through_data), nn.Linear(4, 4)], weights=weights)
        losses = [pipe.step(X, Y, mse_loss) for _ in range(2)]
        results.append(([*losses, *pipe.parameters()], pipe.findings))
    (ours, findings), (others, wanted) = results
    assert all_same_bits(ours, others)
    assert findings == wanted


class AddsInForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        super().forward(x.detach()).square().mean().backward()
        return output


def test_a_gradient_that_a_forward_adds_is_rejected() -> None:
    pipe = pipe_of([AddsInForward(4, 4), *linear(3)])
    pipe.verify_steps = False
    with pytest.raises(RuntimeError, match=r"\[backward-in-forward\]"):
        pipe.step(X, Y, mse_loss)


class Fails(nn.Module):
    """Raises in the forward or in the backward pass of one micro-batch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight, self.where, self.left = nn.Parameter(torch.ones(4)), where, 3

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.where == "forward" and self.left == 0:
            raise KeyError("forward")
        output = x * self.weight
        if self.where == "backward" and self.left < 0:
            output.register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> Tensor:
        raise KeyError("backward")


@pytest.mark.parametrize("where", ["forward", "backward", "loss", "load", "free"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("partitions", [1, 2])
def test_an_exception_leaves_weights_on_the_host(
    where: str, driver: str, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [*linear(3), Fails(where), *linear(4)]
    pipe = pipe_of(layers, partitions, driver=driver)
    pipe.verify_steps = False
    before = [p.detach().clone() for p in pipe.parameters()]
    addresses = [p.data_ptr() for p in pipe.parameters()]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            raise KeyError("loss")
        return mse_loss(output, target)

    with monkeypatch.context() as patch:
        if where in ("load", "free"):
            name = {"load": "copy_of", "free": "allocate_in_file"}[where]
            patch.setattr(streamed_weights, name, raise_key_error)
        with pytest.raises(KeyError):
            pipe.step(X, Y, loss_fn)
    assert [p.data_ptr() for p in pipe.parameters()] == addresses
    assert all(map(is_in_file, pipe.parameters()))
    assert all_same_bits(pipe.parameters(), before)
    assert all(p.grad is None or is_in_file(p.grad) for p in pipe.parameters())
    assert not streamed_weights._loaded
    layers[3].where = ""  # type: ignore[assignment]
    pipe.zero_grad()
    loop = Loop(copy.deepcopy(layers), 4, 0, step=pipe.step_number)
    assert same_bits(pipe.step(X, Y, mse_loss), loop.step(X, Y, mse_loss))
    assert_same_bits(pipe, [*loop])


def raise_key_error(*_: object) -> Tensor:
    raise KeyError("copy")


def test_a_call_without_a_backward_pass_keeps_no_weights_in_memory() -> None:
    pipe, loop = pipe_of(linear()), Loop(linear(), 4, 0)
    output = pipe(X)
    assert all(map(is_in_file, pipe.parameters()))
    second = pipe(X)
    assert same_bits(output, loop(X))
    mse_loss(second, Y).backward()
    mse_loss(loop(X), Y).backward()
    assert all(map(is_in_file, pipe.parameters()))
    assert_same_bits(pipe, [*loop])


def test_frozen_weights_are_loaded_and_have_no_gradient() -> None:
    layers, others = linear(), linear()
    for parameter in [*layers[1].parameters(), *others[1].parameters()]:
        parameter.requires_grad_(False)
    pipe, loop = pipe_of(layers), Loop(others, 4, 0)
    assert same_bits(pipe.step(X, Y, mse_loss), loop.step(X, Y, mse_loss))
    assert_same_bits(pipe, [*loop])


def test_checkpoints_go_between_the_host_and_devices(tmp_path: object) -> None:
    loop = Loop(linear(), 4, 0)
    losses = [loop.step(X, Y, mse_loss)]
    first = pipe_of(linear())
    optimizer, theirs = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (first, loop))
    assert same_bits(first.step(X, Y, mse_loss), losses[0])
    optimizer.step(), theirs.step()
    gpipe.save(f"{tmp_path}/1", first, optimizer)
    theirs.zero_grad()
    wanted = loop.step(X, Y, mse_loss)
    for partitions, weights in ((2, "host"), (3, "device")):
        with weights_of(2):
            layers: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)]
        pipe = pipe_of(layers, partitions, weights=weights)
        gpipe.load(f"{tmp_path}/1", pipe, torch.optim.Adam(pipe.parameters(), lr=0.1))
        assert same_bits(pipe.step(X, Y, mse_loss), wanted)
        assert_same_bits(pipe, [*loop])
        assert all(is_in_file(p) == (weights == "host") for p in pipe.parameters())


def test_a_plan_with_weights_on_the_host_is_built_again() -> None:
    plan = pipe_of(linear(), 2, resident=3, remat="offload_inputs").plan
    assert plan.resident == 3
    again = gpipe.GPipe(linear(), plan=gpipe.Plan.from_json(plan.to_json()), seed=0)
    assert again.plan.resident == 3
    assert [str(action) for action in again.program.actions if "LOAD" in str(action)]
    assert plan.program == again.program


def test_evaluation_loads_each_stage_once() -> None:
    pipe = pipe_of(linear()).eval()
    with torch.no_grad(), gpipe.record(pipe) as recording:
        pipe(X)
    loads = [str(span.action) for span in recording.timelines[0].spans if span.action.kind is Kind.LOAD]
    assert loads == [f"{stage}LOAD0" for stage in range(6)]


def test_what_weights_on_the_host_do_not_support_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="weights='host'") as caught:
        gpipe.GPipe(linear(), 2, 4, weights="host", remat="never")
    assert "BreadthFirst" in str(caught.value)
    assert "remat='never'" in str(caught.value)
    with pytest.raises(ValueError, match="weights='disk' is unknown"):
        gpipe.GPipe(linear(), 2, 4, weights="disk")
    with pytest.raises(ValueError, match="resident=0") as caught:
        pipe_of(linear(), resident=0)
    assert "requires schedule=" not in str(caught.value)


class KeepsAlias(nn.Linear):
    """Has a buffer that shares memory with its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("kept", self.weight.detach())


def test_a_buffer_that_shares_memory_with_a_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3\.kept shares memory with 3\.weight.*\[weights-share-memory\]"):
        pipe_of([*linear(3), KeepsAlias()])


class Empty(nn.Linear):
    """Has a weight without elements."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum()


def test_weights_without_elements_are_trained() -> None:
    with weights_of(1):
        layers = [Empty(), *linear(3)]
    pipe, loop = pipe_of(layers), Loop(copy.deepcopy(layers), 4, 0)
    assert same_bits(pipe.step(X, Y, mse_loss), loop.step(X, Y, mse_loss))
    assert_same_bits(pipe, [*loop])


def test_weights_that_share_memory_are_refused() -> None:
    layers = linear()
    shared = layers[0][0].weight  # type: ignore[index]
    layers[1][0].weight = nn.Parameter(shared.detach().view(4, 4))  # type: ignore[index]
    with pytest.raises(ValueError, match=r"1\.0\.weight shares memory with 0\.0\.weight.*\[weights-share-memory\]"):
        pipe_of(layers)
