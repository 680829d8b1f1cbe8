"""What layers write beside what they return: refused or told in the first run, where the plain loop differs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import plain_loop

ROWS = 8
PLANS = [
    (1, "gpipe", "never"),
    (3, "gpipe", "never"),
    (3, "1f1b", "never"),
    (3, "zb_h1", "never"),
    (3, "gpipe", "always"),
]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 4), torch.randn(ROWS, 4)


def with_optimizers(write: Callable[[Any], None]) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(4)]
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.register_post_accumulate_grad_hook(write)
    return layers


def step_by_data(parameter: Any) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad.zero_()


@torch.no_grad()
def step_in_place(parameter: Any) -> None:
    parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


@pytest.mark.parametrize("write", [step_by_data, step_in_place])
@pytest.mark.parametrize(("partitions", "schedule", "remat"), PLANS)
def test_an_optimizer_in_a_backward_is_refused(
    write: Callable[[Any], None], partitions: int, schedule: str, remat: str
) -> None:
    pipe = gpipe.GPipe(with_optimizers(write), partitions, 4, schedule=schedule, remat=remat, driver="lockstep")
    with pytest.raises(RuntimeError, match=r"a backward of stage .* writes parameters of it \(.*3\.weight|0\.weight"):
        pipe.step(*batch(), F.mse_loss)


def test_an_optimizer_in_the_backward_of_one_micro_batch_is_that_of_the_plain_loop() -> None:
    x, t = batch()
    torch.manual_seed(0)
    plain = nn.Sequential(*with_optimizers(step_by_data))
    torch.manual_seed(0)
    pipe = gpipe.GPipe(with_optimizers(step_by_data), 2, 1)
    for _ in range(2):
        loss = F.mse_loss(plain(x), t)
        loss.backward()
        assert torch.equal(pipe.step(x, t, F.mse_loss), loss.detach())


class Decays(nn.Linear):
    """Writes its weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Clamps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


@pytest.mark.parametrize(("partitions", "schedule", "remat"), PLANS)
def test_a_weight_written_in_each_forward_is_refused(partitions: int, schedule: str, remat: str) -> None:
    layers = [nn.Linear(4, 4), Decays(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    pipe = gpipe.GPipe(layers, partitions, 4, schedule=schedule, remat=remat)
    with pytest.raises(RuntimeError, match=r"a forward of stage .* writes parameters of it \(1\.weight\)"):
        pipe.step(*batch(), F.mse_loss)


@pytest.mark.parametrize("remat", ["never", "always"])
def test_a_weight_that_a_second_write_leaves_alone_gives_the_bits_of_the_plain_loop(remat: str) -> None:
    layers = [nn.Linear(4, 4), Clamps(4, 4), nn.Linear(4, 4)]
    pipe = gpipe.GPipe(layers, 2, 4, remat=remat, seed=0)
    x, t = batch()
    found = plain_loop(copy.deepcopy(layers), x, t, F.mse_loss, micro_batches=4, seed=0)
    assert torch.equal(pipe.step(x, t, F.mse_loss), found)


@pytest.mark.parametrize("remat", ["never", "always"])
def test_an_embedding_that_torch_scales_in_its_forward_is_left_alone(remat: str) -> None:
    layers = [nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4)]
    x, t = torch.arange(8), torch.randn(8, 4)
    gpipe.GPipe(layers, 2, 4, remat=remat).step(x, t, F.mse_loss)


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
        found = came[0].abs().max()
        if self.kind == "buffer":
            self.amax.copy_(found)
        else:
            self.amax = float(found) if self.kind == "number" else found

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * (1 + self.amax)
        return out


@pytest.mark.parametrize("kind", ["number", "tensor", "buffer"])
@pytest.mark.parametrize(("partitions", "schedule"), [(1, "gpipe"), (3, "1f1b")])
def test_state_that_a_backward_writes_is_told_as_such(kind: str, partitions: int, schedule: str) -> None:
    layers = [nn.Linear(4, 4), Scaled(kind), nn.Linear(4, 4)]
    pipe = gpipe.GPipe(layers, partitions, 4, schedule=schedule, remat="never")
    pipe.step(*batch(), F.mse_loss)
    (finding,) = [text for text in pipe.findings if "amax" in text]
    assert finding.startswith("the backward of stage")
    assert ("Scaled.amax" in finding) is (kind == "buffer")


class CallsBackward(nn.Module):
    """Has a backward of its own in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            x.sum().backward(retain_graph=True)
        return x


def with_backward(output: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(output, target)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize(("loss_fn", "who"), [(F.mse_loss, "a layer"), (with_backward, "loss_fn")])
def test_a_backward_inside_of_a_forward_is_refused_behind_a_cut(loss_fn: Any, who: str, remat: str) -> None:
    """Bug story: gradients of what the stage was given were lost, silently."""
    inner = CallsBackward() if who == "a layer" else nn.Tanh()
    pipe = gpipe.GPipe([nn.Linear(3, 3), inner, nn.Linear(3, 3)], [1, 2], 2, remat=remat)
    with pytest.raises(RuntimeError, match=rf"{who} calls backward\(\) in it, whose gradients"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3), loss_fn)


WORKSPACE = torch.zeros(ROWS, 4)


class Doubled(torch.autograd.Function):
    """Has one place for all gradients, as kernels do that allocate once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.mul(gradients[0], 2, out=WORKSPACE[: len(gradients[0])])


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubled.apply(x)
        return doubled


@pytest.mark.parametrize(("schedule", "remat"), [("gpipe", "never"), ("1f1b", "always"), ("zb_h1", "never")])
def test_bug_a_gradient_in_a_place_that_the_next_micro_batch_writes_is_the_plain_loops(
    schedule: str, remat: str
) -> None:
    """A function's workspace crossed to the stage before, which read it when the next backward had written it."""
    x, t = batch()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Double(), nn.Linear(4, 4)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    for a, b in zip(x.tensor_split(4), t.tensor_split(4), strict=True):
        F.mse_loss(plain(a), b).backward(torch.tensor(0.25))
    with gpipe.GPipe(layers, [1, 2], 4, schedule=schedule, remat=remat, driver="lockstep") as pipe:
        pipe.step(x, t, F.mse_loss)
    for one, other in zip(layers[0].parameters(), plain[0].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
