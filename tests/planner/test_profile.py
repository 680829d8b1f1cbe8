"""What layers cost by their rows: counted to the byte, without values."""

import copy
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from gpipe.models import unet
from gpipe.planner.profile import ADAM, count, profile_layers
from gpipe.planner.search.profile import Line
from tests.support.plain_loop import plain_loop, weights_of
from tests.support.planned import pipe_by_costs


def profile(layers: list[nn.Module], *shape: int) -> list:  # type: ignore[type-arg]
    samples = {rows: torch.ones(rows, *shape) for rows in (2, 4)}
    return list(profile_layers(layers, samples, [str(at) for at in range(len(layers))]).layers)


def test_each_storage_counts_once_where_it_is_first_kept() -> None:
    linear, tanh, second = profile([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)], 4)
    assert (linear.boundary, linear.activations, linear.keeps_input) == (Line(0, 16.0), Line(0, 0.0), Line(0, 16.0))
    assert (tanh.boundary, tanh.activations, tanh.keeps_input) == (Line(0, 32.0), Line(0, 32.0), Line(0, 0.0))
    assert (second.boundary, second.activations, second.keeps_input) == (Line(0, 32.0), Line(0, 0.0), Line(0, 0.0))
    assert linear.state == (4 * 8 + 8) * 4 * (2 + ADAM)
    assert linear.forward == Line(0, 2.0 * 4 * 8)


def test_inside_is_what_torch_keeps() -> None:
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(144, 5),
    ]
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[id(storage)] = storage
        return tensor

    whole = nn.Sequential(*layers)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        out = whole(x)
    own = {id(tensor.untyped_storage()) for tensor in (*whole.parameters(), *whole.buffers())}
    measured = sum(storage.nbytes() for at, storage in saved.items() if at not in own)
    counted = count(layers, x)
    assert sum(each.activations + each.keeps_input for each in counted) == measured
    assert out.shape == (4, 5)


def test_skips_count_where_they_are_popped() -> None:
    with torch.device("meta"):
        layers = unet(1, 4)
    counted = count(layers, torch.ones(2, 3, 64, 64))
    joins = [at for at, each in enumerate(counted) if each.popped]
    stashed = [source for at in joins for source in counted[at].popped]
    assert stashed == sorted(stashed, reverse=True)
    assert counted[joins[-1]].popped == {stashed[-1]: 2 * 4 * 64 * 64 * 4.0}


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_counted_by_their_weights(kind: Callable[..., nn.Module], gates: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = kind(6, 5, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inside(x)[0]
            return found

    (each,) = count([Recurrent()], torch.ones(3, 7, 6, requires_grad=True))
    weights = 2 * gates * 5 * (6 + 5 + 10 + 5)
    assert each.forward == 2 * 3 * 7 * weights
    assert each.backward == pytest.approx(2 * each.forward, rel=0.1)  # the first state wants no gradient


def test_attention_a_matrix_by_a_vector_and_a_bilinear_layer_are_counted() -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    class ByVector(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.mv(self.weight, row) for row in input])

    class Both(nn.Bilinear):
        def forward(self, input1: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(input1, input1)

    (attends,) = count([Attends()], torch.ones(2, 3, 16, 8, requires_grad=True))
    assert attends.forward == 2 * 2 * 2 * 3 * 16 * 16 * 8
    assert attends.backward == 2.5 * attends.forward
    by_vector, both = count([ByVector(8, 6), Both(6, 6, 3)], torch.ones(2, 8, requires_grad=True))
    assert by_vector.forward == 2 * 2 * 8 * 6
    assert by_vector.backward >= by_vector.forward
    assert both.forward == 2 * 2 * 3 * 6 * 6
    assert both.backward == 3 * both.forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_are_counted_in_each_precision(dtype: torch.dtype) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 8, 16, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(x, self.weight, offs=torch.tensor([2, 6, 7], dtype=torch.int32))

    x = torch.ones(7, 8, dtype=dtype, requires_grad=True)
    (each,) = count([Experts()], x)
    assert (each.forward, each.backward) == (2 * 7 * 8 * 16, 2 * 2 * 7 * 8 * 16)
    assert each.leaving == Experts()(x).nbytes


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Selects(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[(x[:, 0] > -100).nonzero()[:, 0]])


class Sparse(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm(x.to_sparse(), torch.eye(4)))


class SparseGradient(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(given, made, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.embedding((x > 0).long()).sum(1)
        return made


UNCOUNTABLE = pytest.mark.parametrize("kind", [Branches, Selects, Sparse, SparseGradient])
HOW: list[dict[str, Any]] = [{"remat": "auto"}, {"schedule": "auto"}, {"costs": "flops"}]


@UNCOUNTABLE
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_layer_that_cannot_be_counted_is_named_with_what_to_do(how: Any, kind: Any) -> None:
    text = rf"layer 1 \({kind.__name__}\) .*\[layer-needs-values\]"
    make: Any = pipe_by_costs if "costs" in how else gpipe.GPipe
    with pytest.raises(ValueError, match=text):
        make([nn.Linear(4, 4), kind(4, 4)], 2, 2, sample=torch.ones(4, 4), **how)


@UNCOUNTABLE
def test_it_is_offloaded_as_any_other(kind: Callable[..., nn.Module]) -> None:
    with weights_of(3):
        layers = [nn.Linear(4, 4), kind(4, 4), nn.Linear(4, 4)]
    plain, x = copy.deepcopy(layers), torch.linspace(-1, 1, 32).view(8, 4)
    expected = plain_loop(plain, x, x, F.mse_loss, micro_batches=2, seed=0)
    pipe = gpipe.GPipe(layers, 2, 2, sample=x, remat="offload", seed=0)
    assert torch.equal(pipe.step(x, x, F.mse_loss), expected)
    for one, other in zip(nn.Sequential(*layers).parameters(), nn.Sequential(*plain).parameters(), strict=True):
        pair = [parameter.grad for parameter in (one, other) if parameter.grad is not None]
        assert not pair or torch.equal(*(grad.to_dense() for grad in pair))


def test_seconds_are_measured_by_direction() -> None:
    layers = [nn.Linear(64, 64), nn.Tanh()]
    samples = {2: torch.ones(2, 64), 4: torch.ones(4, 64)}
    found = profile_layers(layers, samples, ["a", "b"], measured_on=torch.device("cpu"))
    assert found.unit == "seconds"
    assert all(0 < layer.forward.at(4) < 1 for layer in found.layers)
    assert found.layers[0].boundary == Line(0, 256.0)


def layers_in_turn(times: int, *makers: Callable[[], nn.Module]) -> list[nn.Module]:
    return [make() for _ in range(times) for make in makers]


class Scaled(nn.Module):
    """Says nothing of its factor where it is printed, and holds a tensor that is no buffer."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.wide, self.factor = wide, torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.factor).repeat(1, self.wide)[:, :8].contiguous()


@pytest.mark.parametrize(
    "layers",
    [
        layers_in_turn(4, lambda: nn.Linear(8, 8)),
        layers_in_turn(3, nn.Tanh, nn.Tanh, lambda: nn.Linear(8, 8), nn.Identity, lambda: nn.ReLU(inplace=True)),
        layers_in_turn(3, lambda: nn.BatchNorm1d(8), nn.Dropout, nn.Flatten, lambda: nn.Linear(8, 8, bias=False)),
        [Scaled(2), Scaled(2), Scaled(3), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)],
        [nn.Linear(8, 8).eval(), *[nn.Dropout(0.1), nn.Dropout(0.1).eval()] * 3],
    ],
)
@pytest.mark.parametrize("wants", [False, True])
def test_layers_that_are_alike_count_as_if_each_were_run(
    layers: list[nn.Module], wants: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4, 8, requires_grad=wants)
    found = count(layers, x)
    monkeypatch.setattr("gpipe.planner.profile.fingerprint_of", lambda layer, value, kept=(): None)
    assert found == count(layers, x)


def test_of_layers_that_are_alike_few_run_backward() -> None:
    class Counted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            input.register_hook(lambda gradient: runs.put(self.out_features))
            return super().forward(input)

    runs = SimpleQueue[int]()
    assert len(count([Counted(8, 8) for _ in range(100)], torch.ones(4, 8, requires_grad=True))) == 100
    assert runs.qsize() == 2  # and the last hands on what it keeps
