"""What users do to networks: the bits of the reference loop, or an error or a word that names the culprit.

All kinds of `tests.support.kinds`, judged as the soak judges thousands of each.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gpipe
from tests.soak.judge import FAILED, Make, judge
from tests.soak.trainers import Trainer, by_loop
from tests.support.kinds import KINDS
from tests.support.kinds.case import Case, Setting
from tests.support.odd_layers import Apply
from tests.support.plain_loop import REMATS, Loop, one_thread
from tests.support.two_steps import DRIVERS, M, X, Y

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
@settings(LAW, max_examples=16)
@given(st.integers(0, 10**6))
def test_what_users_do_is_right_or_refused_or_told(name: str, number: int) -> None:
    with one_thread():
        found = judge(KINDS[name], number)
    assert found.verdict not in FAILED, f"python -m tests.soak.run --only {name} --seed {number} -v\n{found.why}"


class LastBit(Trainer):
    """One gradient is off by one unit in the last place."""

    def run(self, inputs: Any, targets: Any) -> Any:
        loss = super().run(inputs, targets)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None and p.grad.is_floating_point()]
        last = gradients[-1].view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))
        return loss


class ZeroForNone(Trainer):
    """A parameter without a gradient gets a gradient of zeros."""

    def run(self, inputs: Any, targets: Any) -> Any:
        loss = super().run(inputs, targets)
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return loss


class Vague(Trainer):
    def run(self, inputs: Any, targets: Any) -> Any:
        raise RuntimeError("something went wrong")


class Copied(Loop):
    """Each micro-batch is a copy with another alignment."""

    def run(self, m: int, part: Any, held: dict[str, Any]) -> Any:
        return super().run(m, pytree.tree_map_only(Tensor, Tensor.clone, part), held)


class Twice(Loop):
    """Every forward runs twice, as a recomputation that leaves its traces does."""

    def run(self, m: int, part: Any, held: dict[str, Any]) -> Any:
        with torch.no_grad():
            super().run(m, pytree.tree_map_only(Tensor, Tensor.clone, part), {})
        return super().run(m, part, held)


def wrong(trainer: type[Trainer] = Trainer, loop: type[Loop] = Loop, seed: int = 0) -> Make:
    def make(case: Case, setting: Setting) -> Trainer:
        return trainer(case, setting, by_loop(case, replace(setting, seed=setting.seed + seed), loop).model)

    return make


@pytest.mark.parametrize(
    ("make", "names", "verdict", "least"),
    [
        (by_loop, ["s1_tensor_hook", "s2_slice_of_data", "s5_undefined_gradients", "s7_unseen_writes"], "equal", 12),
        (wrong(LastBit), ["s2_view_between", "checkpoint_with_dropout"], "SILENT", 11),
        (wrong(ZeroForNone), ["unused_parameters", "mixture_of_experts", "s5_undefined_gradients"], "SILENT", 4),
        (wrong(loop=Copied), ["s2_slice_of_data", "s2_strided_inputs"], "SILENT", 3),
        (wrong(seed=1), ["everything_random", "ambient_generator_left_alone"], "SILENT", 10),
        (wrong(loop=Twice), ["s7_unseen_writes", "s7_begins_later"], "SILENT", 6),
        (wrong(Vague), ["s2_slice_of_data", "checkpoint_with_dropout"], "CRASH", 12),
        (wrong(Vague), ["s9_weight_in_loss"], "MISLEADING", 12),
    ],
)
def test_the_judge_detects_a_wrong_library(make: Make, names: list[str], verdict: str, least: int) -> None:
    with one_thread():
        found = [judge(KINDS[names[at % len(names)]], at // len(names), make).verdict for at in range(12)]
    assert found.count(verdict) >= least, found


# Layers that come later.


@pytest.mark.parametrize("change", [lambda net: net.append(nn.ReLU()), lambda net: net.__setitem__(0, nn.ReLU())])
def test_layers_that_come_to_the_sequence_later_are_refused(change: Callable[[nn.Sequential], object]) -> None:
    """Bug story: the pipe went on with the old ones, silently."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = gpipe.GPipe(net, 2, M)
    copied = copy.deepcopy(pipe)
    pipe.step(X, X, F.mse_loss)
    change(net)
    with pytest.raises(ValueError, match=r"\[sequential-changed\]"):
        pipe.step(X, X, F.mse_loss)
    with pytest.raises(ValueError, match=r"\[sequential-changed\]"):
        pipe(X)
    copied.step(X, X, F.mse_loss)


@pytest.mark.parametrize("remat", REMATS)
def test_a_hook_that_would_see_a_part_of_a_gradient_is_refused(remat: str) -> None:
    def hooks(pair: tuple[Tensor, Tensor]) -> Tensor:
        if pair[0].requires_grad:
            pair[0].register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return pair[0] + pair[1]

    layers = [nn.Linear(4, 4), Apply(lambda x: (y := x * 2, y.sin())), Apply(hooks), nn.Linear(4, 4)]
    gpipe.GPipe(layers, [1, 3], M, remat=remat).step(X, Y, F.mse_loss)
    with pytest.raises(RuntimeError, match=r"\[hook-on-partial-gradient\]"):
        gpipe.GPipe(layers, [2, 2], M, remat=remat).step(X, Y, F.mse_loss)


# Parameters that are frozen, unused, or not there.


def test_frozen_layers_in_front_keep_nothing_for_a_backward() -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    layers = [nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2)]
    pipe = gpipe.GPipe(layers, [2, 1], M, remat="never")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = pipe(X)
    assert len(saved) <= 2 * M  # input and weight of the last layer
    output.sum().backward()


def test_a_model_without_anything_to_train_evaluates() -> None:
    pipe = gpipe.GPipe([nn.Tanh(), nn.ReLU()], 2, M)
    with torch.no_grad():
        assert torch.equal(pipe(X), X.tanh().relu())
    assert not pipe(X).requires_grad
    with pytest.raises(ValueError, match=r"\[loss-without-gradient\]"):
        pipe.step(X, Y, F.mse_loss)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_modules_are_refused_with_the_reason() -> None:
    scripted = torch.jit.script(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"layer 1 \(Sequential\).*\[torchscript-module\]"):
        gpipe.GPipe([nn.Linear(4, 4), nn.Sequential(scripted)], 99, M)


@DRIVERS
@pytest.mark.parametrize("way", ["step", "call"])
def test_numbers_too_small_to_be_normal_are_flushed_where_the_caller_does_so(way: str, driver: str) -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1e-20) * 1e-20 * 1e38

    pipe, ones, seen = gpipe.GPipe([Small(), nn.Identity()], 2, 2, driver=driver), torch.ones(4, 2), []
    for flushes in (False, True, False):
        if not torch.set_flush_denormal(flushes):
            pytest.skip("this processor has no such mode")
        try:
            with torch.no_grad():
                out = pipe(ones) if way == "call" else pipe.step(ones, ones, lambda output, _: output.mean())
        finally:
            torch.set_flush_denormal(False)
        seen.append(bool((out == 0).all()))
    assert seen == [False, True, False]
