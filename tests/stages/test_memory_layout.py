"""A tensor that is copied or moved goes on lying in memory as it did: strides, and address modulo 64."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import gpipe
from gpipe.distributed.mesh import Position
from gpipe.distributed.reduce import add_over_replicas
from gpipe.stages.memory_layout import alignment, allocate, allocate_like, copy_of, moved
from tests.support.addresses import in_the_middle
from tests.support.endpoints import endpoints, together

CPU = torch.device("cpu")
TENSORS: dict[str, Callable[[], Tensor]] = {
    "fresh": lambda: torch.randn(3, 5),
    "a slice": lambda: torch.randn(9, 5)[2:7],
    "every second": lambda: torch.randn(9, 5)[1:, ::2],
    "turned": lambda: torch.randn(9, 5)[2:].t(),
    "expanded": lambda: torch.randn(9, 1)[2:].expand(7, 4),
    "unfolded": lambda: torch.arange(10.0)[1:].unfold(0, 4, 2),
    "channels last": lambda: torch.randn(3, 3, 4, 5)[1:].to(memory_format=torch.channels_last)[1:],
    "a number": lambda: torch.arange(7.0)[3],
    "empty": lambda: torch.randn(4, 0)[1:],
    "complex": lambda: torch.randn(7, dtype=torch.complex64)[1:].conj(),
    "imaginary": lambda: torch.randn(7, dtype=torch.complex64)[1:].conj().imag,
    "over bytes": lambda: torch.frombuffer(bytearray(100), dtype=torch.float32, offset=7, count=20),
    "bytes": lambda: torch.arange(90, dtype=torch.uint8)[13:],
    "a parameter": lambda: nn.Parameter(torch.randn(9, 5)[2:7]),
}


@pytest.mark.parametrize("name", TENSORS)
@torch.no_grad()
def test_a_copy_lies_like_the_tensor_in_memory_of_its_own(name: str) -> None:
    tensor = TENSORS[name]()
    for copied in (copy_of(tensor), allocate_like(tensor)):
        assert copied.stride() == tensor.stride()
        assert copied.data_ptr() % 64 == tensor.data_ptr() % 64
        assert (copied.shape, copied.dtype) == (tensor.shape, tensor.dtype)
        assert not tensor.numel() or copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert not copied._is_view() or copied.is_conj() or copied.is_neg()
    assert torch.equal(copy_of(tensor), tensor)
    assert moved(tensor, CPU) is tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.bfloat16])
def test_there_is_room_at_every_address(dtype: torch.dtype) -> None:
    for aligned, strides in product(range(64), [(3, 1), (1, 2), (0, 1), (7, 2)]):
        found = allocate(dtype, (2, 3), strides, aligned, CPU)
        assert (found.data_ptr() % 64, found.stride(), found.dtype) == (aligned, strides, dtype)


def test_a_copy_is_in_the_graph_and_its_gradient_comes_back_as_it_is() -> None:
    x = torch.randn(9, 5, requires_grad=True)
    for tensor in (x * 2, (x * 2)[3:]):
        seen: list[int] = []
        tensor.register_hook(lambda gradient, seen=seen: seen.append(gradient.data_ptr()))
        gradient = torch.randn(12, 5)[-len(tensor) :]
        copy_of(tensor).backward(gradient)
        assert seen == [gradient.data_ptr()]


def test_what_is_no_plain_memory_has_no_alignment_and_copies_itself() -> None:
    sparse = torch.eye(3).to_sparse()
    with FakeTensorMode():
        fake = torch.empty(3)
    meta = torch.empty(9, device="meta")[3:]
    for tensor in (sparse, fake, meta):
        assert alignment(tensor) == 0
        assert type(copy_of(tensor)) is type(tensor)
        assert copy_of(tensor).layout is tensor.layout
    assert moved(torch.zeros(9)[3:], torch.device("meta")).is_meta


def test_gradients_that_are_added_over_replicas_stay_where_they_are() -> None:
    shapes = [(5, 3), (7,), (300, 200)]

    def replica(number: int) -> list[Tensor]:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for at, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * number + at))
            parameter.grad = in_the_middle(gradient.t(), 3).t() if gradient.dim() > 1 else in_the_middle(gradient, 3)
        return list(parameters)

    replicas = [replica(number) for number in range(2)]
    expected = [replica(0)[at].grad + replica(1)[at].grad for at in range(len(shapes))]  # type: ignore[operator]
    before = [[(p.grad.data_ptr(), p.grad.stride()) for p in some if p.grad is not None] for some in replicas]
    with endpoints(2) as made:
        places = [Position(0, number, 1, 2, (0, 1), CPU, 60.0) for number in range(2)]
        sums = [add_over_replicas(made[n], places[n], 0, replicas[n]) for n in range(2)]
        for n in range(2):
            made[n].start_async(sums[n])
        together(*(lambda n=n: made[n].wait_async(sums[n]) for n in range(2)))
    for some, lay in zip(replicas, before, strict=True):
        found = [p.grad for p in some if p.grad is not None]
        assert [(gradient.data_ptr(), gradient.stride()) for gradient in found] == lay
        assert all(map(torch.equal, found, expected))


def test_a_checkpoint_is_loaded_into_what_stands_there(tmp_path: Path) -> None:
    layers = [nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)]
    for parameter in nn.Sequential(*layers).parameters():
        parameter.data = in_the_middle(parameter.data, 3)
    with gpipe.GPipe(layers, 2, 2, driver="lockstep") as pipe:
        gpipe.save(tmp_path, pipe)
        before = [tensor.data_ptr() for tensor in (*pipe.parameters(), *pipe.buffers())]
        gpipe.load(tmp_path, pipe)
        assert [tensor.data_ptr() for tensor in (*pipe.parameters(), *pipe.buffers())] == before
