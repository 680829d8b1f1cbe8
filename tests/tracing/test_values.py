"""Tests that a model on the meta device is initialized by its own code, layer by layer."""

import copy
import math
import random
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe.tracing.meta_model import give_values
from tests.families import catalogue as families
from tests.support.plain_loop import same_bits

LAW = settings(derandomize=True, deadline=None, max_examples=40, database=None)
FAMILIES = ["llama", "gemma", "gpt2", "gpt_neox", "mixtral", "mamba2", "bert", "deberta-v2", "t5", "vit", "resnet"]


def build(family: str, device: str) -> nn.Module:
    with torch.random.fork_rng(), torch.device(device):
        return families.build(families.named(family), dropout=False)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def cut(model: nn.Module, sizes: Sequence[int] = (1, 5, 2, 13)) -> list[list[str]]:
    """Splits the tensors into layers anywhere, also within modules."""
    names, layers = list(tensors(model)), list[list[str]]()
    while names:
        size = sizes[len(layers) % len(sizes)]
        layers.append(names[:size])
        names = names[size:]
    return layers


def given_at_once(model: nn.Module, seed: int = 7) -> nn.Module:
    layers = cut(model)
    give_values(model, layers, range(len(layers)), seed)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_a_model_that_was_built_for_real(family: str) -> None:
    real, model = build(family, "cpu"), given_at_once(build(family, "meta"))
    found, wanted = tensors(model), tensors(real)
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        mine, value = found[name].detach(), one.detach()
        assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device), name
        assert (one.requires_grad, type(one)) == (found[name].requires_grad, type(found[name])), name
        if not isinstance(one, nn.Parameter) or value.min() == value.max():
            assert same_bits(mine, value), name
        elif value.numel() >= 200 and not torch.equal(mine, value):  # those are computed
            assert float(mine.std()) == pytest.approx(float(value.std()), rel=0.25), name
            assert abs(float(mine.mean() - value.mean())) < 5 * float(value.std()) / math.sqrt(value.numel()), name
    for name, part in real.named_modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            assert not found[f"{name}.weight"][part.padding_idx].any(), name
    assert model.state_dict().keys() == real.state_dict().keys()
    firsts = ({id(one): name for name, one in reversed(some.items())} for some in (found, wanted))
    assert [*next(firsts).values()] == [*next(firsts).values()], "ties"


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_the_same_one_layer_at_a_time_in_any_order_and_in_processes(family: str) -> None:
    model = build(family, "meta")
    whole = tensors(given_at_once(copy.deepcopy(model)))
    layers = cut(model)
    order = list(range(len(layers)))
    for seed in range(2):
        one_by_one = copy.deepcopy(model)
        random.Random(seed).shuffle(order)
        for index in order:
            give_values(one_by_one, layers, [index], 7)
        assert [name for name, one in tensors(one_by_one).items() if not same_bits(one, whole[name])] == []
    for index, names in enumerate(layers):
        alone = copy.deepcopy(model)
        give_values(alone, layers, [index], 7)
        held = {id(one) for name, one in tensors(alone).items() if name in names}
        for name, one in tensors(alone).items():
            assert one.is_meta == (id(one) not in held), name
            assert one.is_meta or same_bits(one, whole[name]), name


def test_another_seed_gives_other_values_and_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    one, again, other = (
        given_at_once(on_meta(lambda: nn.Linear(3, 3)), seed).get_parameter("weight") for seed in (1, 1, 2)
    )
    assert same_bits(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Blocks(nn.Module):
    """Modules of torch, with a buffer, a tied weight, and a `reset_parameters` for the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.LSTM(8, 8, num_layers=2)
        self.norm = nn.BatchNorm1d(8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(8), requires_grad=False)
        self.angles = nn.Buffer(torch.empty(4), persistent=False)
        self.mask = nn.Buffer(torch.empty(4, 4, dtype=torch.bool))
        self.taps = [self.scale]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(3.0)
            self.angles.copy_(torch.arange(4) / 4)
            self.mask.copy_(torch.ones(4, 4).tril())
            self.conv.weight.data.mul_(0.5)


@given(st.data())
@LAW
def test_a_model_of_torchs_modules_gets_their_values_wherever_it_is_cut(data: st.DataObject) -> None:
    model = on_meta(Blocks)
    names = list(tensors(model))
    layers = cut(model, data.draw(st.lists(st.integers(1, len(names)), min_size=1, max_size=6)))
    whole = copy.deepcopy(model)
    give_values(whole, layers, range(len(layers)), 0)
    own = data.draw(st.sets(st.sampled_from(range(len(layers)))))
    give_values(model, layers, own, 0)
    held = {name for index in own for name in layers[index]}
    found, wanted, real = tensors(model), tensors(whole), tensors(Blocks())
    for name in names:
        assert name not in held or same_bits(found[name], wanted[name])
        assert not wanted[name].is_meta
        if real[name].min() == real[name].max() or not isinstance(real[name], nn.Parameter):
            assert same_bits(wanted[name], real[name]), name
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert not whole.get_parameter("embed.weight")[2].any()


def test_parameters_stay_the_objects_that_they_were() -> None:
    model = on_meta(Blocks)
    weakly = weakref.ref(
        model.get_parameter("norm.weight")
    )  # as torch has of the weights of the recurrent part: these are replaced
    before = tensors(model)
    before["head.bias"].told = "me"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([model.get_parameter("head.bias")], lr=1.0)
    given_at_once(model)
    recurrent = model.get_submodule("recurrent")
    for name, one in tensors(model).items():
        assert (one is before[name]) == (name != "norm.weight" and not name.startswith("recurrent")), name
    assert weakly() is before["norm.weight"]
    assert not model.get_parameter("norm.weight").is_meta
    assert model.taps[0] is model.get_parameter("scale")  # type: ignore[index]
    assert not model.get_parameter("scale").requires_grad
    assert model.get_parameter("head.bias").told == "me"  # type: ignore[attr-defined]
    assert optimizer.param_groups[0]["params"][0] is model.get_parameter("head.bias")
    assert recurrent(torch.ones(2, 1, 8))[0].isfinite().all()


def test_what_has_values_keeps_them() -> None:
    model = on_meta(Blocks)
    model.head.bias = nn.Parameter(torch.arange(11.0))  # type: ignore[union-attr]
    given_at_once(model)
    assert torch.equal(model.get_parameter("head.bias"), torch.arange(11.0))
    assert same_bits(model.get_parameter("conv.weight"), given_at_once(on_meta(Blocks)).get_parameter("conv.weight"))


def test_what_belongs_to_no_layer_is_given_to_all() -> None:
    found = []
    for own in ([0], [1]):
        model = on_meta(Blocks)
        give_values(model, [["embed.weight"], ["head.weight", "head.bias"]], own, 0, free=["angles", "scale"])
        assert not model.get_buffer("angles").is_meta
        assert model.get_buffer("mask").is_meta
        found.append(model)
    assert same_bits(found[0].get_parameter("embed.weight"), found[1].get_parameter("head.weight"))
    assert same_bits(found[0].get_parameter("scale"), found[1].get_parameter("scale"))
    assert found[0].get_parameter("head.bias").is_meta


def test_nobody_else_is_asked() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))

        def reset_parameters(self) -> None:
            raise OSError("no such table")

    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Failing()))
    layers = [["0.weight", "0.bias"], ["1.weight"]]
    give_values(model, layers, [0], 0)
    with pytest.raises(OSError, match="no such table") as raised:
        give_values(model, layers, [1], 0)
    assert raised.value.__notes__ == ["This happened while gpipe initialized the weights of layer 1."]
    assert model.get_parameter("1.weight").is_meta


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))
        self.partly = nn.Parameter(torch.ones(4))
        self.register_buffer("flags", torch.ones(2, dtype=torch.bool))
        self.register_buffer("count", torch.ones(2, dtype=torch.uint8))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.partly[:2] = 1


def test_what_nothing_gives_values_to_is_refused_and_nothing_changes() -> None:
    model = on_meta(lambda: nn.Sequential(Raw(), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"^0.gain, 0.partly, 0.flags, 0.count: .*\[meta-not-initialized\]"):
        given_at_once(model)
    assert all(tensor.is_meta for tensor in tensors(model).values())
    give_values(model, [["1.weight", "1.bias"]], [0], 0)  # whoever does not hold them has no complaint


def test_tensors_that_are_no_buffers_and_hooks_are_refused() -> None:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Linear(2, 2))
        made[0].alias, made[0].factor = made[0].weight, torch.ones(2)
        made[0].get_parameter("weight").register_hook(lambda gradient: None)
        return made

    refused = r"^0.factor: .*\[meta-plain-tensor\]\n0.alias: .*\[meta-tensor-hooks\]"
    with pytest.raises(ValueError, match=refused):
        given_at_once(on_meta(build))


def test_a_model_that_applies_its_init_weights_gets_them() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(100, 30), nn.LayerNorm(30)])
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(5.0, 0.5)
                module.bias.data = torch.full_like(module.bias, 2.0)

    model = given_at_once(on_meta(Own))
    weight = model.get_parameter("parts.0.weight").detach()
    assert float(weight.mean()) == pytest.approx(5.0, abs=0.1)
    assert float(weight.std()) == pytest.approx(0.5, rel=0.1)
    assert torch.equal(model.get_parameter("parts.0.bias"), torch.full((30,), 2.0))
    assert torch.equal(model.get_parameter("parts.1.weight"), torch.ones(30))
