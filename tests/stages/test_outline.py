"""What stands for a parameter of another process tells whoever computes with it, and is a parameter otherwise."""

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from gpipe.stages.sequence import RemoteParameter, stand_in

TOLD = re.escape("this parameter is held by another process (layer 3); ")


def remote(*size: int) -> RemoteParameter:
    made = stand_in(nn.Parameter(torch.empty(size or (2, 3), device="meta")), 3)
    assert isinstance(made, RemoteParameter)
    return made


def with_remote(module: nn.Module) -> nn.Module:
    """A module of another process."""
    for part in module.modules():
        part._parameters.update({name: remote(*one.shape) for name, one in part.named_parameters(recurse=False)})
        part._buffers.update({name: one.to("meta") for name, one in part.named_buffers(recurse=False)})
        if isinstance(part, nn.RNNBase):
            part._flat_weights = list(part._parameters.values())
    return module


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (torch.ones(1, 3),)),
    "embedding": (lambda: nn.Embedding(3, 2), (torch.tensor([1]),)),
    "batch norm": (lambda: nn.BatchNorm1d(3), (torch.ones(2, 3),)),
    "rnn": (lambda: nn.LSTM(3, 3), (torch.ones(1, 1, 3),)),
    "attention": (lambda: nn.MultiheadAttention(2, 1), (torch.ones(2, 1, 2),) * 3),
}  # fmt: skip


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_compute_with_it_say_so(name: str, evaluates: bool) -> None:
    make, inputs = MODULES[name]
    with pytest.raises(RuntimeError, match=TOLD + "compute by"), torch.set_grad_enabled(not evaluates):
        with_remote(make()).train(not evaluates)(*inputs)


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "product": lambda weight: torch.ones(1, 2) @ weight,
    "sum": lambda weight: weight.sum(),
    "item": lambda weight: weight[0, 0].item(),
    "equal": lambda weight: torch.equal(weight, torch.ones(2, 3)),
    "in place": lambda weight: torch.no_grad()(weight.zero_)(),
    "many at once": lambda weight: torch._foreach_mul([weight, torch.ones(1)], 2),
    "a vector": lambda weight: parameters_to_vector([weight]),
    "into another": lambda weight: torch.ones(2, 3).copy_(weight),
    "to a device": lambda weight: weight.to("cpu"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_that_need_its_values_say_so(name: str) -> None:
    with pytest.raises(RuntimeError, match=TOLD + "compute by"):
        OPERATIONS[name](remote())


def test_its_gradient_is_refused() -> None:
    with pytest.raises(RuntimeError, match=TOLD + "use pipe.parameters"):
        nn.utils.clip_grad_norm_([remote()], 1.0)
    with pytest.raises(RuntimeError, match=TOLD + "use pipe.parameters"):
        torch.optim.SGD([remote()], lr=1.0).step()


def test_what_it_is_can_be_read() -> None:
    weight = remote()
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.size(0), weight.ndim, len(weight)) == ((2, 3), 2, 2, 2)
    assert (weight.numel(), weight.nbytes, weight.stride(), weight.itemsize) == (6, 24, (3, 1), 4)
    assert (weight.dtype, weight.device.type, weight.is_meta) == (torch.float32, "meta", True)
    assert (weight.layout, weight.is_floating_point()) == (torch.strided, True)
    assert (weight.requires_grad, weight.is_leaf, weight.grad_fn) == (True, True, None)
    assert "device='meta'" in repr(weight)
    assert weight in {weight: 1}
    assert (weight.is_contiguous(), weight.is_shared(), weight.data_ptr()) == (True, False, 0)


def test_it_can_be_frozen_copied_and_moved() -> None:
    weight = remote()
    weight.requires_grad_(False)
    assert not weight.requires_grad
    weight.requires_grad = True
    copied = copy.deepcopy(weight)
    assert (type(copied), copied.layer) == (RemoteParameter, 3)
    assert copied.requires_grad
    for plain in (
        weight.data,
        weight.detach(),
        torch.empty_like(weight),
        weight.clone(),
        weight.to(torch.float16),
    ):
        assert type(plain) is Tensor
        assert plain.is_meta
    with torch.no_grad():
        weight.copy_(torch.ones(2, 3))  # as load_state_dict does, for whom it warns
    stream = io.BytesIO()
    torch.save({"weight": weight}, stream)
    stream.seek(0)
    loaded = torch.load(stream)["weight"]
    assert type(loaded) is nn.Parameter
    assert loaded.is_meta
