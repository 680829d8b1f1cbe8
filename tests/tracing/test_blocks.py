"""Which modules a model is cut between."""

import copy

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.tracing.blocks import find_blocks
from gpipe.tracing.trace import CannotSplitError
from tests.support.clock import Clock
from tests.support.plain_loop import same_bits


class Repeated(nn.Module):
    """One block, called again and again."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh())])
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(self.times):
            x = self.blocks[0](x)
        return self.head(x).square().mean()


def test_a_block_that_stands_alone_is_found_and_each_call_of_it_is_a_layer() -> None:
    # A list of one block was none: albert, whose layers share all their weights, had to be told blocks=.
    torch.manual_seed(0)
    model, x = Repeated(3), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    losses = []
    for part in x.tensor_split(2):
        losses.append(plain(part))
        losses[-1].backward(torch.tensor(0.5))

    assert find_blocks(model) == [["blocks.0"]]
    gradients = []
    for partitions in (1, 2, 5):
        own = copy.deepcopy(model)
        with gpipe.GPipe(own, partitions, 2, sample=x, costs="params") as pipe:
            assert same_bits(pipe.step(x), losses[0].detach() * 0.5 + losses[1].detach() * 0.5)
        gradients.append({name: parameter.grad for name, parameter in own.named_parameters()})
    for name, parameter in plain.named_parameters():
        assert all(same_bits(one[name], gradients[0][name]) for one in gradients)
        torch.testing.assert_close(gradients[0][name], parameter.grad, rtol=1e-6, atol=1e-8)
    assert same_bits(gradients[0]["head.weight"], plain.head.weight.grad)


def test_several_lists_come_before_one_module_that_stands_alone() -> None:
    model = nn.ModuleDict(
        {"alone": nn.ModuleList([nn.Linear(2, 2)]), "several": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}
    )

    assert find_blocks(model) == [["several.0", "several.1"]]


def test_a_model_without_any_list_is_refused() -> None:
    with pytest.raises(CannotSplitError, match="there is no list of blocks"):
        find_blocks(nn.ModuleDict({"one": nn.Linear(2, 2)}))


def test_the_seconds_of_a_layer_are_those_of_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # The proof runs each block once more, on smaller numbers, and layers_of told the time of both.
    clock, slept = Clock(monkeypatch), []

    class Sleeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.max() < 1:
                clock.sleep(1)
                slept.append(x)
            return x + 0 * super().forward(x)

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Sleeps(3, 3), Sleeps(3, 3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    layers = gpipe.layers_of(Sleeper(), torch.ones(2, 3))
    assert len(slept) == 2
    assert [layer.seconds for layer in layers] == [0] * len(layers)
