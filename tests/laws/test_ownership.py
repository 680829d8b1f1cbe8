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
    run_layers,
    same_bits,
    squares,
)

NAMES = [
    "step",
    "prediction",
    "recorder",
    "step_number",
    "_engine",
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


def test_inside_a_parent_module_names_have_its_prefix_as_those_of_a_sequential_have() -> None:
    parent = nn.ModuleDict({"head": nn.Linear(5, 5), "body": make(named())})
    plain = nn.ModuleDict({"head": parent["head"], "body": named()})
    assert_same_state(parent, plain)
    parent.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    plain.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    assert_same_state(parent["body"], plain["body"])


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


def test_a_shallow_copy_of_the_layers_is_another_pipe_over_the_same_modules() -> None:
    layers = build()
    one, two = make(layers), make(layers, partitions=2, micro_batches=2)
    train(one, 1)
    assert_same_state(one, two)
    train(two, 1)
    assert_same_state(one, two)


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


def test_parameter_groups_of_some_layers() -> None:
    reference, pipe = build(), make(driver="threads")
    optimizers = []
    for layers in (reference, list(pipe.children())):
        groups: list[dict[str, Any]] = [
            {"params": layers[0].parameters(), "lr": 0.5},
            {"params": layers[5].parameters()},
        ]
        optimizers.append(torch.optim.AdamW(groups, lr=0.01))
    for step in range(3):
        pipe.step(X, Y, squares)
        plain_loop(reference, X, Y, squares, micro_batches=M, seed=4, step=step)
        for optimizer in optimizers:
            optimizer.step()
        pipe.zero_grad()
        nn.Sequential(*reference).zero_grad()
        assert_same_bits(pipe, reference)
    pipe.close()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
        lambda ps: torch.optim.RMSprop(ps, lr=0.01),
        lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    ],
)
@pytest.mark.parametrize("partitions", [1, 3])
def test_any_optimizer_and_gradient_clipping_see_what_they_see_without_a_pipe(
    optimizer: Callable[[Any], torch.optim.Optimizer], partitions: int
) -> None:
    reference, pipe = build(), make(partitions=partitions)
    mine, other = optimizer(pipe.parameters()), optimizer(nn.Sequential(*reference).parameters())
    for step in range(3):
        pipe.step(X, Y, squares)
        plain_loop(reference, X, Y, squares, micro_batches=M, seed=4, step=step)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3) for m in (pipe, nn.Sequential(*reference))]
        assert same_bits(*norms)
        assert float(norms[0]) > 0.3
        mine.step()
        other.step()
        assert_same_bits(pipe, reference)
        mine.zero_grad(set_to_none=step == 0)
        other.zero_grad(set_to_none=step == 0)


def test_the_pipes_own_clipping_is_the_same_for_every_k() -> None:
    norms, gradients = [], []
    for partitions in (1, 2, 3):
        pipe = make(partitions=partitions)
        pipe.step(X, Y, squares)
        norms.append(pipe.clip_grad_norm_(0.3))
        gradients.append(torch.cat([p.grad.flatten() for p in pipe.parameters() if p.grad is not None]))
    assert all(same_bits(norm, norms[0]) for norm in norms)
    assert all(same_bits(gradient, gradients[0]) for gradient in gradients)
    assert float(gradients[0].norm()) == pytest.approx(0.3, rel=1e-4)  # torch adds 1e-6 to the norm it divides by


def test_gradients_are_added_until_they_are_zeroed() -> None:
    reference, pipe = build(), make(driver="threads")
    for step in range(2):
        pipe.step(X, Y, squares)
        plain_loop(reference, X, Y, squares, micro_batches=M, seed=4, step=step)
    assert_same_bits(pipe, reference)
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())
    pipe.close()


def test_layers_may_be_frozen_and_thawed_between_steps() -> None:
    reference, pipe = build(), make(driver="threads")
    for step, frozen in enumerate([(0,), (0, 1, 3), (), (5,)]):
        for layers in (reference, list(pipe.children())):
            nn.Sequential(*layers).requires_grad_(True).zero_grad()
            for index in frozen:
                layers[index].requires_grad_(False)
        pipe.step(X, Y, squares)
        plain_loop(reference, X, Y, squares, micro_batches=M, seed=4, step=step)
        assert_same_bits(pipe, reference)
        assert all(p.grad is None for index in frozen for p in list(pipe.children())[index].parameters())
    pipe.close()


def test_train_and_eval_may_change_at_any_time_for_all_or_some() -> None:
    reference, pipe = build(), make(driver="threads")
    modes: list[Callable[[nn.Module], object]] = [
        lambda module: module.eval(),
        lambda module: module.train(),
        lambda module: list(module.children())[1].eval(),
        lambda module: list(module.children())[2].eval(),
        lambda module: module.train(),
    ]
    for change in modes:
        for module in (pipe, nn.Sequential(*reference)):
            change(module)
        step = pipe.step_number
        pipe.step(X, Y, squares)
        plain_loop(reference, X, Y, squares, micro_batches=M, seed=4, step=step)
        assert_same_bits(pipe, reference)
    assert pipe.step_number == 4  # all but the one in evaluation
    pipe.close()


def test_a_layer_cannot_be_put_in_place_of_another_that_would_go_on_running() -> None:
    pipe = make()
    for value in (nn.Linear(5, 6), None):
        with pytest.raises(TypeError, match="layer '0' stands in a partition and cannot be replaced"):
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


def test_an_error_while_a_layer_is_built_says_which() -> None:
    with pytest.raises(TypeError, match="missing 2 required positional arguments") as raised:
        make([nn.ReLU, lambda: nn.Linear()], partitions=2)  # type: ignore[call-arg]
    assert raised.value.__notes__ == ["while layer 1 was built"]


def test_the_seed_is_drawn_from_torchs_generator_once() -> None:
    torch.manual_seed(3)
    first = make(seed=None)
    torch.manual_seed(3)
    again, other = make(seed=None), make(seed=None)
    assert first.seed == again.seed != other.seed


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


def test_a_stage_without_parameters_trains() -> None:
    reference = [nn.Linear(5, 3), nn.Tanh(), nn.ReLU()]
    pipe = make(copy.deepcopy(reference), partitions=[1, 1, 1], driver="threads")
    pipe.step(X, Y, squares)
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
    assert_same_bits(pipe, reference)
    pipe.close()


def test_evaluation_leaves_buffers_alone_and_equals_the_plain_layers() -> None:
    pipe = make(driver="threads")
    train(pipe, 2)
    before = copy.deepcopy(pipe.state_dict())
    with torch.no_grad(), one_thread():
        output = pipe.eval()(X)
        plain = list(pipe.children())
        outputs = [run_layers(plain, x, seed=4, step=0, micro_batch=m) for m, x in enumerate(X.tensor_split(M))]
    assert same_bits(output, torch.cat(outputs))  # type: ignore[arg-type]  # tensors
    assert all(same_bits(value, before[name]) for name, value in pipe.state_dict().items())
    assert pipe.step_number == 2
    pipe.close()
