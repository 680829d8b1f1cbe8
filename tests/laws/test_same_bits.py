"""Same bits: losses, gradients, parameters after steps and buffers are those of the plain loop, to the last bit."""

import copy
from dataclasses import replace
from functools import partial
from random import Random
from typing import TypedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe.runtime import steps
from gpipe.schedule.rules import linearize
from gpipe.stages.microbatch import Reduction
from tests.support.addresses import twins
from tests.support.plain_loop import (
    REMATS,
    Tree,
    assert_same_bits,
    one_thread,
    plain_call,
    plain_loop,
    run_layers,
    same_bits,
    tensors_in,
)
from tests.support.random_cases import Case, cases, check_case, count_valid, mean_of_valid, run

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(LAW, max_examples=120)
@given(cases)
def test_any_model_run_in_any_way_gives_the_bits_of_the_plain_loop(case: Case) -> None:
    check_case(case)


def trained(case: Case) -> list[nn.Module]:
    """A copy of a case's layers after one mini-batch."""
    case = replace(case, layers=twins(case.layers))
    with case.pipe() as pipe:
        run(case, pipe, case.inputs(0), 0)
    return case.layers


@settings(LAW, max_examples=40)
@given(cases)
def test_threads_and_lockstep_give_the_same_bits(case: Case) -> None:
    threads, in_turn = (trained(replace(case, driver=driver)) for driver in ("threads", "lockstep"))
    assert_same_bits(nn.Sequential(*threads), in_turn)


@settings(LAW, max_examples=40)
@given(cases, st.integers(0, 10_000))
def test_any_legal_order_gives_the_same_bits(case: Case, order: int) -> None:
    case = replace(case, driver="lockstep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "linearize", partial(linearize, rng=Random(order)))
        layers = trained(case)
    assert_same_bits(nn.Sequential(*layers), trained(case))


def network() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    ]  # fmt: skip


def data(rows: int = 11) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    valid = torch.arange(rows) % 3 == 0
    return torch.randn(rows, 5, generator=generator), {"y": torch.randn(rows, generator=generator), "valid": valid}


@pytest.fixture
def pair() -> tuple[gpipe.GPipe, list[nn.Module]]:
    """A pipe, and the same layers plain."""
    layers = network()
    return gpipe.GPipe(layers, partitions=3, micro_batches=4, seed=2), copy.deepcopy(layers)


class Keys(TypedDict):
    micro_batches: int
    seed: int


KEYS = Keys(micro_batches=4, seed=2)


@pytest.mark.parametrize("reduction", ["mean", "sum", count_valid])
@pytest.mark.parametrize("scale", [1.0, 0.1, 65536.0])
def test_reductions_and_scales(pair: tuple[gpipe.GPipe, list[nn.Module]], reduction: Reduction, scale: float) -> None:
    pipe, plain = pair
    x, y = data()
    loss = pipe.step(x, y, mean_of_valid, reduction=reduction, scale=scale)
    assert same_bits(loss, plain_loop(plain, x, y, mean_of_valid, reduction=reduction, scale=scale, **KEYS))
    assert_same_bits(pipe, plain)


def test_a_micro_batch_of_weight_0_has_no_say_though_its_loss_is_nan(
    pair: tuple[gpipe.GPipe, list[nn.Module]],
) -> None:
    pipe, plain = pair
    x, y = data()
    y["valid"][3:6] = False  # the second of four micro-batches
    losses: list[Tensor] = []

    def loss_fn(output: Tree, target: Tree) -> Tensor:
        losses.append(mean_of_valid(output, target))
        return losses[-1]

    loss = pipe.step(x, y, loss_fn, reduction=count_valid)
    assert sum(bool(loss.isnan()) for loss in losses) == 1
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pipe.parameters())
    assert same_bits(loss, plain_loop(plain, x, y, mean_of_valid, reduction=count_valid, **KEYS))
    assert_same_bits(pipe, plain)


def test_weights_are_asked_for_once_a_micro_batch_before_any_forward(
    pair: tuple[gpipe.GPipe, list[nn.Module]],
) -> None:
    asked: list[object] = []

    def weight(target: Tree) -> int:
        assert not losses
        asked.append(target)
        return 1

    losses: list[Tensor] = []

    def loss_fn(output: Tree, target: Tree) -> Tensor:
        losses.append(mean_of_valid(output, target))
        return losses[-1]

    pair[0].step(*data(), loss_fn, reduction=weight)
    assert len(asked) == len(losses) == 4


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_loss_is_unscaled(scale: float) -> None:
    loss = gpipe.GPipe(network(), 2, 4, seed=2).step(*data(), mean_of_valid, scale=scale)
    assert same_bits(loss, gpipe.GPipe(network(), 2, 4, seed=2).step(*data(), mean_of_valid))
    assert not loss.requires_grad
    assert loss.shape == ()


def test_two_steps_before_zero_grad_add(pair: tuple[gpipe.GPipe, list[nn.Module]]) -> None:
    pipe, plain = pair
    for step in (0, 1):
        pipe.step(*data(), mean_of_valid)
        plain_loop(plain, *data(), mean_of_valid, step=step, **KEYS)
    assert_same_bits(pipe, plain)


def test_two_calls_before_zero_grad_add(pair: tuple[gpipe.GPipe, list[nn.Module]]) -> None:
    pipe, plain = pair
    x, y = data()
    for step in (0, 1):
        mean_of_valid(pipe(x), y).backward()
        plain_call(plain, x, y, mean_of_valid, step=step, **KEYS)
    assert_same_bits(pipe, plain)


def test_two_forwards_may_precede_their_backwards(pair: tuple[gpipe.GPipe, list[nn.Module]]) -> None:
    pipe, plain = pair
    x, y = data()
    first, second = pipe(x), pipe(x)
    for output in (second, first):
        mean_of_valid(output, y).backward()
    for step in (1, 0):
        plain_call(plain, x, y, mean_of_valid, step=step, **KEYS)
    gradients = zip(pipe.parameters(), nn.Sequential(*plain).parameters(), strict=True)
    assert all(same_bits(p.grad, q.grad) for p, q in gradients)


def test_metrics_come_one_a_micro_batch_in_order(pair: tuple[gpipe.GPipe, list[nn.Module]]) -> None:
    pipe, plain = pair
    x, y = data()

    def loss_fn(output: Tree, target: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        (out,), (goal, *_) = tensors_in(output), tensors_in(target)
        return mean_of_valid(output, target), {"first": goal[0], "rows": torch.tensor(len(out))}

    loss, metrics = pipe.step(x, y, loss_fn)
    assert [int(metric["rows"]) for metric in metrics] == [3, 3, 3, 2]
    assert torch.equal(torch.stack([metric["first"] for metric in metrics]), y["y"][[0, 3, 6, 9]])
    assert same_bits(loss, plain_loop(plain, x, y, mean_of_valid, **KEYS))


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_under_no_grad_step_gives_the_loss_only(pair: tuple[gpipe.GPipe, list[nn.Module]], training: bool) -> None:
    pipe, plain = pair
    x, y = data()
    pipe.train(training)
    nn.ModuleList(plain).train(training)
    for step in (0, 1 if training else 0):
        assert pipe.step_number == step
        loss = pipe.step(x, y, mean_of_valid, reduction=count_valid)
        assert same_bits(loss, plain_loop(plain, x, y, mean_of_valid, step=step, reduction=count_valid, **KEYS))
    assert all(p.grad is None for p in pipe.parameters())
    assert_same_bits(pipe, plain)


def test_evaluation_under_grad_gives_gradients(pair: tuple[gpipe.GPipe, list[nn.Module]]) -> None:
    pipe, plain = pair
    x, y = data()
    pipe.eval()
    nn.ModuleList(plain).eval()
    assert same_bits(pipe.step(x, y, mean_of_valid), plain_loop(plain, x, y, mean_of_valid, **KEYS))
    assert_same_bits(pipe, plain)
    assert pipe.step_number == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_grad_gives_the_output_of_the_plain_loop(mode: type[torch.no_grad]) -> None:
    layers = network()
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, partitions=3, micro_batches=4, seed=2)
    x, _ = data()
    with mode(), one_thread():
        output = pipe(x)
        parts = [run_layers(plain, part, seed=2, step=0, micro_batch=m) for m, part in enumerate(x.tensor_split(4))]
        assert same_bits(output, torch.cat([part for part in parts if isinstance(part, Tensor)]))
    assert not output.requires_grad


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_training_of_twenty_steps_does_not_depend_on_the_cut(remat: str, driver: str) -> None:
    x, y = data(13)

    def losses(partitions: int | list[int]) -> list[Tensor]:
        layers = network()
        optimizer = torch.optim.Adam(nn.Sequential(*layers).parameters(), lr=0.01)
        with gpipe.GPipe(layers, partitions, 4, seed=2, remat=remat, driver=driver) as pipe:
            found = []
            for _ in range(20):
                found.append(pipe.step(x, y, mean_of_valid, reduction=count_valid))
                optimizer.step()
                optimizer.zero_grad()
        return found

    one, two, seven = losses(1), losses([3, 4]), losses(7)
    assert torch.equal(torch.stack(one), torch.stack(two))
    assert torch.equal(torch.stack(one), torch.stack(seven))
