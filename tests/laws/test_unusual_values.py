"""Values that are more than tensors, or tensors with more to them, cross a cut as they are, or are refused."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, plain_loop, same_bits
from tests.support.two_steps import CUTS, DRIVERS, REMAT, M, X, Y, check


class Attributes(dict):  # type: ignore[type-arg]  # as people write it
    """A dict that can be read by attribute."""

    __getattr__ = dict.__getitem__


class Slots:
    __slots__ = ("deep",)

    def __init__(self, tensor: Tensor) -> None:
        self.deep = [{"tensor": tensor}]


HIDING: dict[str, Callable[[Tensor], object]] = {
    "a dict of one's own": lambda h: Attributes(h=h),
    "slots": Slots,
    "a namespace": lambda h: SimpleNamespace(inner=SimpleNamespace(h=h)),
    "a set": lambda h: {h},
    "a function": lambda h: lambda: h,
    "a partial": lambda h: partial(torch.add, h),
    "a method": lambda h: h.sum,
    "an iterator": lambda h: iter([h]),
    "numpy's array of objects": lambda h: [Slots(h)],
}


@DRIVERS
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("kind", HIDING)
def test_what_hides_tensors_is_refused_at_a_cut_and_at_the_end(kind: str, partitions: int, driver: str) -> None:
    class Hides(nn.Module):
        def forward(self, x: Tensor) -> object:
            return HIDING[kind](x), x * 2

    pipe = gpipe.GPipe(
        [nn.Linear(4, 4), Hides(), nn.Identity()], [2, 1] if partitions == 2 else [3], 1, driver=driver
    )
    with pytest.raises(TypeError, match="holds tensors where torch cannot see them") as raised:
        pipe(X)
    assert f"layer {1 if partitions == 2 else 2} (" in raised.value.__notes__[0]


def test_objects_without_tensors_cross_a_cut() -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> object:
            return x, SimpleNamespace(length=3), range(4), np.arange(3)

    class Takes(nn.Module):
        def forward(self, value: Any) -> Tensor:
            x, box, numbers, array = value
            return x * box.length * len(numbers) * int(array.sum())

    with torch.no_grad():
        assert torch.equal(gpipe.GPipe([Gives(), Takes()], 2, M)(X), X * 3 * 4 * 3)


@DRIVERS
@REMAT
def test_attributes_on_tensors_cross_a_cut(remat: str, driver: str) -> None:
    def tag(x: Tensor) -> Tensor:
        y = x * 2
        y.factor = 3.0  # type: ignore[attr-defined]
        return y

    class Tags(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return tag(x)

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * getattr(x, "factor", 1.0)

    check([nn.Linear(4, 4), Tags(), Reads(), nn.Linear(4, 4)], [2, 2], driver, remat)


def test_attributes_that_are_tensors_are_refused_at_a_cut() -> None:
    class Tags(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.mask = x  # type: ignore[attr-defined]
            return y

    with pytest.raises(TypeError, match="the attribute 'mask' of a tensor holds tensors"):
        gpipe.GPipe([nn.Linear(4, 4), Tags(), nn.Linear(4, 4)], [2, 1], M)(X)


@CUTS
@DRIVERS
@REMAT
def test_an_image_by_itself_keeps_every_stride(remat: str, driver: str, cut: list[int]) -> None:
    """Convolutions go by the strides of dimensions of size 1 too."""

    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        layers = [nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(1, 6), nn.Conv2d(6, 6, 3, padding=1)]
        head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
        whole: Any = nn.Sequential(*layers, head)
        return [*whole.to(memory_format=torch.channels_last)]

    layers, reference = build(), build()
    images, y = torch.randn(M, 6, 5, 7).to(memory_format=torch.channels_last), torch.randn(M, 3)
    with gpipe.GPipe(layers, cut, M, driver=driver, remat=remat, seed=5) as pipe:
        loss = pipe.step(images, y, F.mse_loss)
    assert same_bits(loss, plain_loop(reference, images, y, F.mse_loss, micro_batches=M, seed=5))
    assert_same_bits(pipe, reference)


class Prototypes(nn.Module):
    """Keeps a mean, and hands it on where asked to."""

    mean: Tensor

    def __init__(self, hands_on: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.hands_on = hands_on

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x, self.mean) if self.hands_on else x


class Meets(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] * (1 + both[1])


@DRIVERS
@REMAT
def test_a_buffer_that_is_handed_on_and_written_again_arrives_as_it_was(remat: str, driver: str) -> None:
    check([nn.Linear(4, 4), Prototypes(True), Meets(), nn.Linear(4, 4)], [2, 2], driver, remat)


@DRIVERS
def test_a_workspace_that_is_handed_on_and_written_again_is_refused(driver: str) -> None:
    class Works(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.space = torch.zeros(1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.space.copy_(x.detach().mean())
            return x, self.space

    layers = [nn.Linear(4, 4), Works(), Meets(), nn.Linear(4, 4)]
    with pytest.raises(RuntimeError, match="has been changed in place since it was handed on"):
        gpipe.GPipe(layers, [2, 2], M, driver="lockstep").step(X, Y, F.mse_loss)


def test_a_loss_that_reads_a_layer_whose_buffers_change_is_told() -> None:
    layers = [nn.Linear(4, 4), Prototypes(), nn.Linear(4, 4)]
    pipe = gpipe.GPipe(layers, 2, M)
    pipe.step(X, Y, lambda output, target: F.mse_loss(output, layers[1].get_buffer("mean").clone().expand_as(output)))
    assert any(
        text.startswith("loss_fn, which reads layers, of which a forward changes buffers") for text in pipe.findings
    )


@DRIVERS
@REMAT
def test_a_buffer_in_two_modules_of_two_partitions_is_refused_once_it_changes(remat: str, driver: str) -> None:
    first, second = Prototypes(), Prototypes()
    second.mean = first.mean
    layers = [nn.Linear(4, 4), first, nn.Linear(4, 4), second]
    with pytest.raises(RuntimeError, match="a forward changed a buffer that layers of several stages use"):
        gpipe.GPipe(layers, [2, 2], M, driver=driver, remat=remat).step(X, Y, F.mse_loss)
    check([nn.Linear(4, 4), first, nn.Linear(4, 4), second], [4], driver, remat)


def test_buffers_in_one_memory_cannot_be_recomputed_with() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("flat", torch.zeros(8))
            self.register_buffer("mean", self.get_buffer("flat")[:4])

        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("mean").add_(x.detach().mean(0))
            return x * self.get_buffer("flat").sum()

    layers = [nn.Linear(4, 4), Flat(), nn.Linear(4, 4)]
    with pytest.raises(RuntimeError, match=r"Flat\.flat, Flat\.mean: buffers that lie in one memory"):
        gpipe.GPipe(layers, 1, M, remat="always").step(X, Y, F.mse_loss)


@DRIVERS
@REMAT
def test_a_stash_whose_value_is_changed_in_place_behind_the_cut_is_refused(remat: str, driver: str) -> None:
    class Stashes(nn.Module):
        stash = ("a",)

        def forward(self, x: Tensor) -> Any:
            return x, {"a": x}

    class Pops(nn.Module):
        pop = ("a",)

        def forward(self, x: Tensor, a: Tensor) -> Tensor:
            return x + a

    layers = [nn.Linear(4, 4), Stashes(), nn.ReLU(inplace=True), nn.Linear(4, 4), Pops()]
    for cut in ([5], [2, 3], [2, 1, 2], [1, 2, 2]):
        pipe = gpipe.GPipe(copy.deepcopy(layers), cut, M, driver=driver, remat=remat)
        with pytest.raises(RuntimeError, match="in place"):
            pipe.step(X, Y, F.mse_loss)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("remat", REMATS)
def test_lazy_conjugates_and_quantized_tensors_cross_a_cut(remat: str) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x).conj()

    class Imaginary(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            assert z.is_conj()
            return z.imag.sum(1, keepdim=True).expand(-1, 4)

    check([nn.Linear(4, 4), Spectrum(), Imaginary(), nn.Linear(4, 4)], [2, 2], "threads", remat)

    class Quantizes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)

    class Dequantizes(nn.Module):
        def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
            return both[0] + both[1].dequantize()

    check([nn.Linear(4, 4), Quantizes(), Dequantizes(), nn.Linear(4, 4)], [2, 2], "threads", remat)
