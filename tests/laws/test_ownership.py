"""The layers stay the user's: their names, their state, their hooks, and everything that a module can do."""

import copy
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gpipe
from tests.support.owned import M, X, Y, build, make, train
from tests.support.plain_loop import (
    assert_same_bits,
    one_thread,
    plain_loop,
    same_bits,
    squares,
)

NAMES = [
    "step",
    "prediction",
    "recorder",
    "step_number",
    "_stages",
    "forward_",
]  # all but one are names that a pipe uses


def named() -> nn.Sequential:
    return nn.Sequential(OrderedDict(zip(NAMES, build(), strict=True)))


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    found, expected = one.state_dict(), other.state_dict()
    assert list(found) == list(expected)
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


@pytest.mark.parametrize("make_layers", [named, build, lambda: nn.Sequential(*build())])
def test_names_and_values_are_those_of_a_plain_sequential(make_layers: Callable[[], Any]) -> None:
    layers = make_layers()
    plain = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
    pipe = make(layers)
    assert list(pipe.children()) == list(plain.children())  # the very same modules
    assert list(pipe.named_parameters()) == list(plain.named_parameters())
    assert list(pipe.named_buffers()) == list(plain.named_buffers())
    assert list(map(id, pipe.parameters())) == list(map(id, plain.parameters()))
    assert_same_state(pipe, plain)
    train(pipe, 2)
    assert_same_state(pipe, plain)
    assert list(pipe.children()) == list(plain.children())


def test_layers_may_be_named_like_what_a_pipe_has() -> None:
    pipe, numbered = make(named()), make()
    losses = train(pipe, 2)
    pipe.step_number = 7
    with gpipe.record(pipe) as recording:
        losses += train(pipe, 1)
    assert len(recording.timelines) == 1
    assert pipe.step_number == 8
    expected = train(numbered, 2)
    numbered.step_number = 7
    expected += train(numbered, 1)
    assert all(map(same_bits, losses, expected))
    again = copy.deepcopy(pipe)
    assert all(map(same_bits, train(again, 1), train(pipe, 1)))
    assert [name for name, _ in pipe.named_children()] == NAMES


def test_state_dicts_go_both_ways() -> None:
    trained, fresh = named(), named()
    train(make(trained), 2)
    pipe = make(fresh)
    pipe.load_state_dict(trained.state_dict())
    assert_same_state(fresh, trained)
    train(pipe, 1)
    plain = named()
    plain.load_state_dict(pipe.state_dict())
    assert_same_state(plain, pipe)
    other = make(named())
    other.load_state_dict(copy.deepcopy(pipe.state_dict()), assign=True)
    assert_same_state(other, pipe)
    other.step_number = pipe.step_number
    assert all(map(same_bits, train(other, 2), train(pipe, 2)))
    parent, bare = nn.ModuleDict({"body": make(named())}), nn.ModuleDict({"body": named()})
    parent.load_state_dict({name: value + 1 for name, value in bare.state_dict().items()})
    bare.load_state_dict({name: value + 1 for name, value in bare.state_dict().items()})
    assert_same_state(parent, bare)
    two = make(list(pipe.children()), partitions=2, micro_batches=2)  # another pipe over the same modules
    train(two, 1)
    assert_same_state(two, nn.Sequential(*pipe.children()))


def pickled(pipe: gpipe.GPipe) -> Any:
    return pickle.loads(pickle.dumps(pipe))


def saved(pipe: gpipe.GPipe) -> Any:
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, pickled, saved, lambda pipe: copy.deepcopy(nn.Sequential(pipe))[0]]
)
@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_a_copy_trains_on_to_the_same_bits_with_threads_of_its_own(
    duplicate: Callable[[gpipe.GPipe], Any], driver: str
) -> None:
    with make(driver=driver) as pipe, gpipe.record(pipe):
        train(pipe, 2)
        before = set(threading.enumerate())  # of other pipes some may be about to end
        again = duplicate(pipe)
        assert set(threading.enumerate()) <= before
        assert again.recorder is None
        assert pipe.recorder is not None
        assert again.step_number == 2
        assert not {id(p) for p in again.parameters()} & {id(p) for p in pipe.parameters()}
        with again:
            assert all(map(same_bits, train(again, 2), train(pipe, 2)))
            assert_same_state(again, pipe)


def test_an_ema_copy_averages_and_evaluates() -> None:
    pipe, plain = make(driver="threads"), make()
    averages = get_ema_multi_avg_fn(0.9)
    ema = AveragedModel(pipe, multi_avg_fn=averages, use_buffers=True)
    expected = AveragedModel(nn.Sequential(*plain.children()), multi_avg_fn=averages, use_buffers=True)
    for _ in range(3):
        train(pipe, 1)
        train(plain, 1)
        ema.update_parameters(pipe)
        expected.update_parameters(nn.Sequential(*plain.children()))
    assert_same_state(ema, expected)
    assert not same_bits(next(ema.parameters()), next(pipe.parameters()))
    with torch.no_grad(), one_thread():
        outputs = [expected.eval()(x) for x in X.tensor_split(M)]
        assert same_bits(ema.eval()(X), torch.cat(outputs))
    del ema
    pipe.close()


def test_a_layer_cannot_be_put_in_place_of_another_that_would_go_on_running() -> None:
    pipe = make()
    for value in (nn.Linear(5, 6), None):
        with pytest.raises(TypeError, match="Layer '0' cannot be replaced"):
            setattr(pipe, "0", value)
    train(pipe, 1)


def test_parameters_of_a_layer_may_be_replaced() -> None:
    reference, pipe = build(), make()
    pipe.step(X, Y, squares)
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
    for layers in (reference, list(pipe.children())):
        layers[0].weight = nn.Parameter(torch.ones(6, 5))
    pipe.step(X, Y, squares)
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4, step=1)
    assert_same_bits(pipe, reference)


def test_lazily_built_layers_have_the_weights_of_any_k_and_draw_nothing_from_torchs_generator() -> None:
    makers = [
        lambda: nn.Linear(5, 6),
        nn.ReLU,
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()),
        lambda: nn.Linear(4, 3),
    ]
    before = torch.get_rng_state()
    pipes = [make(makers, partitions=k, seed=8) for k in (1, 2, 4)]
    assert torch.equal(before, torch.get_rng_state())
    mixed = make([makers[0], nn.ReLU(), *makers[2:]], partitions=2, seed=8)
    for pipe in (*pipes[1:], mixed):
        assert_same_state(pipe, pipes[0])
        assert [name for name, _ in pipe.named_children()] == ["0", "1", "2", "3"]
    assert not same_bits(make(makers, seed=9).get_parameter("0.weight"), pipes[0].get_parameter("0.weight"))
    same = make([lambda: nn.Linear(5, 5)] * 2, partitions=2)
    assert not same_bits(same.get_parameter("0.weight"), same.get_parameter("1.weight"))


def test_building_a_layer_leaves_a_cuda_generator_alone_that_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.cuda.is_initialized():
        monkeypatch.delattr(torch.cuda, "manual_seed_all")  # it would be remembered until there is one
    make([lambda: nn.Linear(5, 3)], partitions=1)


def test_the_step_number_keys_the_randomness_and_goes_into_checkpoints() -> None:
    pipe = make()
    first = train(pipe, 3)
    other = make()
    other.load_state_dict(make().state_dict())
    other.step_number = 0
    assert all(map(same_bits, first, train(other, 3)))
    assert pipe.step_number == 3
    reference = build()
    third = make()
    third.step_number = 41
    third.step(X, Y, squares)
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4, step=41)
    assert_same_bits(third, reference)
