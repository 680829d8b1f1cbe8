"""Parameters that are frozen, unused, or not there: gradients as in the plain loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, same_bits
from tests.support.stateful import Experts, M, W, data, train, train_plainly

# Parameters that are frozen, unused, or not there.


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [1, 2], [0, 2]], ids=str)
def test_frozen_layers_get_no_gradient_and_pass_gradients_on(frozen: list[int], remat: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 2)]
    for index in frozen:
        layers[index].requires_grad_(False)
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, 3, M, remat=remat, seed=5)
    assert same_bits(train(pipe), train_plainly(plain))
    assert_same_bits(pipe, plain)
    assert all((layers[index].weight.grad is None) == (index in frozen) for index in range(3))


def test_frozen_layers_in_front_keep_nothing_for_a_backward() -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    layers = [nn.Linear(W, W).requires_grad_(False), nn.Tanh(), nn.Linear(W, 2)]
    pipe = gpipe.GPipe(layers, [2, 1], M, remat="never")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = pipe(data()[0])
    assert len(saved) <= 2 * M  # input and weight of the last layer
    output.sum().backward()


def test_a_parameter_that_no_micro_batch_uses_has_no_gradient() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(W, W), Experts(), nn.Linear(W, 2)]
    pipe = gpipe.GPipe(layers, 3, M, seed=5)
    train(pipe)
    experts = layers[1]
    assert isinstance(experts, Experts)
    assert experts.experts[2].grad is None
    assert "1.experts.2" in "".join(pipe.findings)


def test_a_gradient_that_stays_none_is_left_alone_by_optimizers() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(W, W), Experts(), nn.Linear(W, 2)]
    before = copy.deepcopy(layers[1].state_dict())
    pipe = gpipe.GPipe(layers, 3, M, seed=5)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5)
    train(pipe)
    optimizer.step()
    assert torch.equal(layers[1].state_dict()["experts.2"], before["experts.2"])


@pytest.mark.parametrize("cut", [[1, 3], [3, 1], [1, 1, 1, 1]], ids=str)
def test_partitions_without_parameters_train_and_hand_gradients_on(cut: list[int]) -> None:
    torch.manual_seed(0)
    layers = [nn.Identity(), nn.Linear(W, 2), nn.Tanh(), nn.Softplus()]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, cut, M, seed=5)
    assert same_bits(train(pipe), train_plainly(plain))
    assert_same_bits(pipe, plain)


def test_a_model_without_anything_to_train_evaluates() -> None:
    pipe = gpipe.GPipe([nn.Tanh(), nn.ReLU()], 2, M)
    with torch.no_grad():
        assert torch.equal(pipe(data()[0]), data()[0].tanh().relu())
    assert not pipe(data()[0]).requires_grad
    with pytest.raises(ValueError, match="needs no gradient"):
        pipe.step(data()[0], data()[0], F.mse_loss)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_thawing_in_the_middle_of_training(partitions: int, remat: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(W, W), nn.Linear(W, W), nn.Dropout(0.2), nn.Linear(W, 2)]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, partitions, M, remat=remat, seed=5)
    for step, frozen in enumerate([[0, 1], [1], [], [0]]):
        for some in (layers, plain):
            for index in (0, 1):
                some[index].requires_grad_(index not in frozen)
        pipe.zero_grad()
        nn.Sequential(*plain).zero_grad()
        assert same_bits(train(pipe), train_plainly(plain, step=step))
        assert_same_bits(pipe, plain)
