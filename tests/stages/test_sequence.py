"""Layers given as callables: known in outline without their weights, and built for real wherever they run.

What stands for a parameter of another process tells whoever computes with it, and is a parameter otherwise.
"""

import copy
import io
import random
import re
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations

from gpipe.stages.remote_layers import MetaLayers, RemoteParameter, build_on_meta, materialize, stand_in
from gpipe.stages.sequence import build_layers, split_into_stages
from gpipe.stages.shared_weights import find_shared, find_ties
from gpipe.stages.skips import find_pops
from tests.support.odd_layers import Pop, Stash
from tests.support.plain_loop import same_bits

LAW = settings(derandomize=True, deadline=None, max_examples=100, database=None)
W = 4
CPU = torch.device("cpu")
Made = nn.Module | Callable[[], nn.Module]


class Rotary(nn.Module):
    """Has buffers computed in its constructor, one of them random, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(W, dtype=torch.float32) / W)
        self.register_buffer("noise", torch.rand(3, W))
        self.register_buffer("mask", torch.ones(W, W).tril().bool(), persistent=False)


class Attribute(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer, and a number drawn by each of three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(W)
        self.drawn = [random.random(), float(np.random.rand())]
        self.weight = nn.Parameter(torch.full((2,), self.drawn[0]) + torch.tensor(self.drawn[1]))


class Reads(nn.Module):
    """Reads values of tensors while it is built, which the meta device cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.arange(3)]  # transformers makes `linspace` give values there
        self.linear = nn.Linear(W, W)
        self.again = self.linear
        self.rnn = nn.LSTM(W, W)
        self.register_buffer("scale", torch.randn(3))


class OnCPU(nn.Linear):
    """Says itself where it lives."""

    def __init__(self) -> None:
        super().__init__(W, W, device="cpu")


class TwiceTheSame(nn.Module):
    """Shares a weight within itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(W, W), nn.Linear(W, W)
        self.second.weight = self.first.weight


def orthogonal() -> nn.Module:
    layer = nn.Linear(W, W)
    nn.init.orthogonal_(layer.weight)
    return layer.double().requires_grad_(False)


def reads_and_has_parts_of_all_kinds() -> nn.Module:
    frozen = nn.Linear(W, round(torch.tensor(2.0).item())).requires_grad_(False)
    return nn.Sequential(frozen, nn.LazyLinear(W), nn.BatchNorm1d(W))


BUILT = nn.Linear(W, W)
ZOO: list[Made] = [
    lambda: nn.Linear(W, W),
    nn.Tanh,
    lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
    lambda: nn.Embedding(7, W, padding_idx=0),
    lambda: nn.TransformerEncoderLayer(W, 2, 8),
    lambda: nn.LSTM(W, W, num_layers=2),
    lambda: parametrizations.spectral_norm(nn.Linear(W, W)),
    lambda: parametrizations.weight_norm(nn.Linear(W, W)),
    lambda: nn.LazyLinear(W),
    lambda: BUILT,
    nn.Linear(W, W),
    orthogonal,
    Rotary,
    Attribute,
    Reads,
    reads_and_has_parts_of_all_kinds,
    OnCPU,
    TwiceTheSame,
]
zoos = st.lists(st.sampled_from(ZOO), min_size=1, max_size=6)
seeds = st.integers(0, 9)


def held(module: nn.Module) -> dict[str, Tensor]:
    """All tensors of a module: parameters, buffers, and attributes."""
    found = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name[-1] != "."}
    for path, part in module.named_modules():
        tensors = {**part._buffers, **vars(part)}
        found |= {f"{path}.{name}": tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    return {name: tensor for name, tensor in found.items() if not nn.parameter.is_lazy(tensor)}


def assert_same_layer(layer: nn.Module, expected: nn.Module) -> None:
    mine, theirs = held(layer), held(expected)
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert tensor.device == CPU
        assert same_bits(tensor, theirs[name]), name
        assert tensor.requires_grad == theirs[name].requires_grad
        assert type(tensor) is type(theirs[name])


def generators() -> tuple[object, ...]:
    """Where all generators stand that a constructor may draw from."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def outlined(layers: Iterable[object], seed: int = 0) -> MetaLayers:
    found = build_on_meta(layers, seed)
    assert not found.mistakes
    return found


def realized(found: MetaLayers, own: Collection[int]) -> dict[str, nn.Module]:
    layers, mistakes = materialize(found, own)
    assert not mistakes
    return layers


@LAW
@given(zoos, seeds, st.data())
def test_own_layers_are_those_of_a_model_built_whole_and_the_others_have_no_values(
    zoo: list[Made], seed: int, data: st.DataObject
) -> None:
    whole, _ = build_layers(zoo, seed)
    torch.rand(()), random.random(), np.random.rand()  # each process may stand elsewhere
    before = generators()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(zoo))] * 2)))
    found = outlined(zoo, seed)
    layers = realized(found, range(start, stop))
    assert generators() == before
    assert list(layers) == list(found.layers) == list(whole)
    for index, (name, layer) in enumerate(layers.items()):
        if isinstance(zoo[index], nn.Module):
            assert layer is zoo[index]
        elif start <= index < stop:
            assert_same_layer(layer, whole[name])
        else:
            assert layer is found.layers[name]
            assert all(tensor.is_meta for tensor in held(layer).values())


@LAW
@given(zoos, seeds)
def test_an_outline_knows_all_but_values(zoo: list[Made], seed: int) -> None:
    whole, _ = build_layers(zoo, seed)
    for name, layer in outlined(zoo, seed).layers.items():
        assert str(layer) == str(whole[name])
        known, real = held(layer), held(whole[name])
        assert {n: (type(t), t.shape, t.dtype, t.requires_grad) for n, t in known.items()} == {
            n: (type(t), t.shape, t.dtype, t.requires_grad) for n, t in real.items()
        }
        assert len(list(layer.parameters())) == len(list(whole[name].parameters()))  # shared ones once


def test_a_model_too_big_to_build_is_outlined_and_a_part_of_it_built() -> None:
    makers = [lambda: nn.Linear(10**6, 10**6), lambda: nn.Linear(W, W), lambda: nn.Embedding(10**9, 10**4)]
    layers = realized(outlined(makers), [1])
    assert [sum(p.numel() for p in layer.parameters()) for layer in layers.values()] == [10**12 + 10**6, 20, 10**13]
    assert [next(layer.parameters()).is_meta for layer in layers.values()] == [True, False, True]


def test_layers_that_cannot_be_built_without_values_are_in_memory_one_at_a_time() -> None:
    built: list[weakref.ref[Tensor]] = []
    in_memory: list[int] = []

    def maker() -> nn.Module:
        layer = Reads()
        built.extend(weakref.ref(parameter) for parameter in layer.parameters())
        in_memory.append(sum(parameter() is not None for parameter in built))
        return layer

    found = outlined([maker] * 5)
    assert in_memory == [6] * 5
    assert all(parameter() is None for parameter in built)
    assert len(realized(found, range(5))) == 5


def test_routes_costs_and_shared_weights_are_found_in_the_outline() -> None:
    embedding = nn.Linear(W, W)

    def tied() -> nn.Module:
        layer = nn.Linear(W, W)
        layer.weight = embedding.weight
        return layer

    zoo: list[Made] = [tied, lambda: Stash("e0", W), lambda: embedding, Reads, tied, lambda: Pop({"e0": W}, W)]
    found, (whole, _) = outlined(zoo).layers, build_layers(zoo, 0)
    assert find_pops(list(found.values())) == find_pops(list(whole.values()))
    assert [list(s.slots) for s in find_shared(list(found.values()))] == [[0, 2, 4]]
    ties = [("0.weight", "3.linear.weight"), ("3.linear.bias", "nowhere")]
    assert find_ties(found, ties)[1] == find_ties(whole, ties)[1] == find_ties(whole, ties[1:])[1]
    assert embedding.weight.device == CPU


@pytest.mark.parametrize("first", [True, False])
def test_a_weight_shared_between_a_module_and_a_callable_is_found_in_the_outline(first: bool) -> None:
    embedding = nn.Linear(W, W)
    zoo: list[Made] = [embedding, lambda: nn.Sequential(nn.Tanh(), embedding, nn.Linear(W, W))]
    found = outlined(zoo if first else zoo[::-1]).layers
    assert [list(shared.slots) for shared in find_shared(list(found.values()))] == [[0, 1], [0, 1]]
    assert found["0" if first else "1"] is embedding
    assert [p.is_meta for p in found["1" if first else "0"].parameters()] == [False, False, True, True]


def test_stages_of_others_stay_where_they_are() -> None:
    layers = realized(outlined([lambda: nn.Linear(W, W)] * 4), [2, 3])
    layers["0"].bias = layers["1"].weight  # shared, and of another process
    stages = split_into_stages(layers, [2, 2], [CPU, CPU], own=[1])
    assert [next(layer.module.parameters()).is_meta for stage in stages for layer in stage.layers] == [
        *(True, True),
        *(False, False),
    ]


@pytest.mark.parametrize("wrong", ["relu", 3, lambda: 3, None])
def test_what_builds_no_layer_is_refused_as_it_is_where_all_are_built(wrong: object) -> None:
    assert build_on_meta([nn.Tanh, wrong], 0).mistakes == build_layers([nn.Tanh, wrong], 0)[1] != []
    assert build_on_meta(wrong, 0).mistakes == build_layers(wrong, 0)[1] != []


def test_an_error_in_a_callable_is_raised_once_and_names_its_layer() -> None:
    with pytest.raises(TypeError, match="missing 2 required positional arguments") as raised:
        build_on_meta([nn.ReLU, lambda: nn.Linear()], 0)  # type: ignore[call-arg]
    assert raised.value.__notes__ == ["while building layer 1"]
    assert raised.value.__context__ is None


def test_all_that_a_second_call_does_otherwise_is_named_at_once() -> None:
    """A callable that counts, one that keeps what it built, and one that takes a weight of another."""
    sizes = iter([3, 5])
    embedding: list[nn.Linear] = []

    def embed() -> nn.Module:
        embedding.append(nn.Linear(W, W))
        return embedding[-1]

    def tied() -> nn.Module:
        layer = nn.Linear(W, W)
        layer.weight = embedding[-1].weight
        return layer

    numbers = iter([nn.Tanh(), 3])
    found = outlined([embed, lambda: nn.Linear(2, next(sizes)), cache(Rotary), tied, lambda: next(numbers)])
    assert [list(shared.slots) for shared in find_shared(list(found.layers.values()))] == [[0, 3]]
    beginnings = [
        "layer 1: its callable built a Linear in the first call and a Linear in the second "
        "(weight: (3, 2), then (5, 2); bias: (3,), then (5,)).",
        "layer 2: its callable did not initialize angles, noise, mask.",
        "layer 3: its callable did not initialize weight.",
        "layer 4: its callable built a Tanh in the first call and a int in the second ().",
    ]
    for text, beginning in zip(materialize(found, range(1, 5))[1], beginnings, strict=True):
        assert text.startswith(beginning)


def test_bug_a_module_that_a_callable_hands_over_keeps_its_values() -> None:
    """The outline must not empty what it did not make, also where a callable asks for values."""
    mine = nn.Linear(W, W)
    before = mine.weight.clone()

    def reads() -> nn.Module:
        torch.zeros(1).item()
        return nn.Sequential(mine, nn.Linear(W, W))

    found = outlined([lambda: mine, reads])
    assert same_bits(mine.weight, before)
    assert mine.weight.device == CPU
    assert all(p.is_meta for layer in found.layers.values() for p in layer.parameters())
    assert realized(found, [0])["0"] is mine


def test_only_who_builds_a_layer_for_real_is_warned() -> None:
    def pretrained() -> nn.Module:
        layer = nn.Linear(1, 1)
        layer.load_state_dict({"weight": torch.ones(1, 1, device="cpu"), "bias": torch.ones(1, device="cpu")})
        warnings.warn("old weights", FutureWarning, stacklevel=1)
        return layer

    found = outlined([pretrained])  # torch itself warns that the meta device takes no values
    with pytest.warns(FutureWarning, match="old weights"):
        layers = realized(found, [0])
    assert layers["0"].get_parameter("weight").item() == 1


def test_an_outline_leaves_a_cuda_generator_alone_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_initialized():
        monkeypatch.delattr(torch.cuda, "manual_seed_all")  # it would be remembered until there is one
    realized(outlined([Attribute]), [0])


# What stands for the parameters of others.

TOLD = re.escape("The parameter belongs to layer 3, which is in another process, and has no ")


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


def test_modules_that_compute_with_it_say_so() -> None:
    for make, inputs in MODULES.values():
        for trains in (True, False):
            with pytest.raises(RuntimeError, match=TOLD + "values"), torch.set_grad_enabled(trains):
                with_remote(make()).train(trains)(*inputs)


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


def test_operations_that_need_its_values_or_its_gradient_say_so() -> None:
    for name, operation in OPERATIONS.items():
        with pytest.raises(RuntimeError, match=TOLD + "values"):
            pytest.fail(f"{name}: {operation(remote())}")
    with pytest.raises(RuntimeError, match=TOLD + "gradient"):
        nn.utils.clip_grad_norm_([remote()], 1.0)
    with pytest.raises(RuntimeError, match=TOLD + "gradient"):
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
    for plain in (weight.data, weight.detach(), torch.empty_like(weight), weight.clone(), weight.to(torch.float16)):
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
