"""Bitwise identity on an accelerator: several stages of one device on separate streams, also with the CPU."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe import models
from gpipe._torch.accelerator import CPU, accelerators
from gpipe.distributed.codec import decode, encode
from gpipe.schedule.schedules import SCHEDULES
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.memory_layout import copy_of
from tests.support.plain_loop import assert_same_bits, plain_loop

THERE = accelerators()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not THERE, reason="needs an accelerator")]
DEVICE = THERE[0] if THERE else CPU

Loss = Callable[[Tensor, Tensor], Tensor]


class Dawdle(nn.Module):
    """Keeps the stream busy first, so that a reader that does not wait for it reads wrong values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(2_000_000)
        return x * 1.5


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def conv_net() -> list[nn.Module]:
    return [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Dawdle(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Dropout(0.3),
        nn.BatchNorm2d(8),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 5)),
    ]


def language_model() -> list[nn.Module]:
    return models.transformer_lm(4, model_dim=32, ffn_dim=64, heads=2, vocab=17, dropout=0.1)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


CASES: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[], tuple[Tensor, Tensor]], Loss]] = {
    "conv": (conv_net, lambda: (torch.randn(10, 3, 8, 8), torch.randn(10, 5)), F.mse_loss),
    "lm": (language_model, lambda: (torch.randint(17, (10, 6)), torch.randint(17, (10, 6))), cross_entropy),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("partitions", "schedule"), [(1, "gpipe"), (2, "gpipe"), (4, "gpipe"), *((2, name) for name in SCHEDULES)]
)
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("way", ["step", "call"])
def test_bits_are_those_of_the_plain_loop_on_the_device(
    case: str, partitions: int, schedule: str, remat: str, driver: str, way: str
) -> None:
    """Several stages on each rank by some schedules, all ranks on one device; backwards whole or in two parts."""
    make, data, loss_fn = CASES[case]
    torch.manual_seed(0)
    ours = make()
    plain = [layer.to(DEVICE) for layer in copy.deepcopy(ours)]
    x, y = (tensor.to(DEVICE) for tensor in data())
    how: Any = {"schedule": schedule, "remat": remat, "driver": driver}
    pipe = gpipe.GPipe(ours, partitions, 4, devices=DEVICE, seed=3, **how)
    optimizers: list[Any] = [
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for parameters in (pipe.parameters(), nn.Sequential(*plain).parameters())
    ]
    for step in range(3):
        reference = plain_loop(plain, x, y, loss_fn, micro_batches=4, seed=3, step=step)
        if way == "step":
            assert torch.allclose(pipe.step(x, y, loss_fn), reference)
        else:
            losses = [
                loss_fn(out, target) * (len(target) / len(y))
                for out, target in zip(pipe(x).tensor_split(4), y.tensor_split(4), strict=True)
            ]
            torch.stack(losses).sum().backward()
        assert_same_bits(pipe, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(pipe, plain)


def test_stages_on_a_device_and_the_cpu_train_together() -> None:
    torch.manual_seed(0)
    layers = conv_net()
    layers[5] = nn.Identity()  # CPUs and devices draw differently
    pipe = gpipe.GPipe(layers, [3, 3, 2], 4, devices=[DEVICE, CPU, DEVICE], seed=3)
    alone = gpipe.GPipe(copy.deepcopy(layers), 1, 4, devices="cpu", seed=3)
    x, y = torch.randn(10, 3, 8, 8), torch.randn(10, 5)
    for _ in range(3):
        assert torch.allclose(pipe.step(x, y, F.mse_loss).cpu(), alone.step(x, y, F.mse_loss), atol=1e-4)
    for ours, theirs in zip(pipe.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad.cpu(), theirs.grad.cpu(), atol=1e-3, rtol=1e-3)


def test_shared_weights_over_a_device_and_the_cpu() -> None:
    torch.manual_seed(0)
    layers = models.transformer_lm(2, model_dim=16, ffn_dim=32, heads=2, vocab=11, tied=True)
    pipe = gpipe.GPipe(layers, 2, 2, devices=[DEVICE, CPU], seed=3)
    alone = gpipe.GPipe(copy.deepcopy(layers), 1, 2, devices="cpu", seed=3)
    x = torch.randint(11, (4, 5))
    pipe.step(x, x, cross_entropy)
    alone.step(x, x, cross_entropy)
    for (name, ours), (_, theirs) in zip(pipe.named_parameters(), alone.named_parameters(), strict=True):
        assert torch.allclose(ours.grad.cpu(), theirs.grad.cpu(), atol=1e-5), name  # type: ignore[union-attr]


def test_memory_on_the_device_is_flat_and_a_dropped_output_frees_all() -> None:
    pipe = gpipe.GPipe(conv_net(), 4, 4, devices=DEVICE, remat="never")
    x, y = torch.randn(16, 3, 8, 8, device=DEVICE), torch.randn(16, 5, device=DEVICE)
    levels = []
    for step in range(60):
        pipe.step(x, y, F.mse_loss)
        pipe.zero_grad()
        pipe(x)
        torch.accelerator.synchronize()
        if step % 20 == 19:
            levels.append(torch.accelerator.memory_allocated(DEVICE))
    assert levels[0] == levels[-1]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA, whose kernels can be told to sleep")
def test_recorder_measures_on_the_stream() -> None:
    pipe = gpipe.GPipe(
        [Dawdle(), nn.Linear(4, 4).requires_grad_(True), Dawdle(), nn.Linear(4, 4)], 2, 2, devices=DEVICE
    )
    with gpipe.record(pipe) as recording:
        pipe.step(torch.randn(4, 4, device=DEVICE), torch.randn(4, 4, device=DEVICE), F.mse_loss)
    forwards = [span for span in recording.timelines[0].spans if str(span.action).endswith(("F0", "F1"))]
    assert len(forwards) == 4
    assert all(span.seconds > 2e-4 for span in forwards)


def test_autocast_and_grad_scaler_on_the_device() -> None:
    torch.manual_seed(0)
    pipe = gpipe.GPipe(conv_net(), 2, 4, devices=DEVICE, seed=3)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE.type)
    x, y = torch.randn(8, 3, 8, 8, device=DEVICE), torch.randn(8, 5, device=DEVICE)
    losses = []
    for _ in range(5):
        with torch.autocast(DEVICE.type, dtype=torch.float16):
            losses.append(float(pipe.step(x, y, F.mse_loss, scale=scaler.get_scale())))
        scaler.scale(torch.zeros((), device=DEVICE))  # lets the scaler know where it works
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_what_is_copied_or_sent_begins_at_the_same_address_modulo_512() -> None:
    data = torch.randn(40, 7, device=DEVICE)
    for tensor in (data, data[1:], data[3:, ::2], data[5:].t()):
        encoded = encode(BoundaryValue(tensor, []))
        sent = decode(encoded.layout, bytearray(b"".join(map(bytes, encoded.pieces()))))
        assert isinstance(sent, BoundaryValue)
        assert sent.value.data_ptr() % 64 == tensor.data_ptr() % 64
        assert copy_of(tensor).data_ptr() % 512 == tensor.data_ptr() % 512
        assert copy_of(tensor).stride() == sent.value.stride() == tensor.stride()
