"""Same bits, and the memory that the table states, for every schedule by name."""

import copy
import time
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.schedule.cost import StageCost
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import SCHEDULES, table_in_training
from gpipe.schedule.simulate import simulate
from tests.support.placements import PLACEMENTS, placed
from tests.support.plain_loop import assert_same_bits, squares

each_schedule = pytest.mark.parametrize("name", SCHEDULES)
each_driver = pytest.mark.parametrize("driver", ["threads", "lockstep"])


class Tracked(nn.Module):
    """Keeps the memory of one tensor until its backward, or the W of it, and knows of how many it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: Tensor) -> Tensor:
        inner = x * 1.5
        self.made.append(weakref.ref(inner.untyped_storage()))
        return F.relu(self.linear(inner))

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.made)


@each_schedule
@each_driver
@pytest.mark.parametrize("micro_batches", [3, 8])
def test_what_a_rank_holds_is_what_the_table_states(name: str, driver: str, micro_batches: int) -> None:
    ranks, each = 3, SCHEDULES[name].stages_per_rank
    layers = [Tracked() for _ in range(ranks * each)]
    x, y = torch.randn(micro_batches, 8), torch.randn(micro_batches, 8)
    with gpipe.GPipe(layers, ranks, 8, schedule=name, remat="never", driver=driver, seed=0) as pipe:
        rank_of = pipe.program.rank_of
        held: list[list[int]] = [[] for _ in range(ranks)]

        def watch(layer: nn.Module, *_: object) -> None:
            rank = rank_of[layers.index(layer)]  # type: ignore[arg-type]  # it is one of them
            held[rank].append(sum(layers[stage].alive for stage, its in enumerate(rank_of) if its == rank))

        for layer in layers:
            layer.register_forward_hook(watch)
        pipe.step(x, y, squares)
    rows = table_in_training(SCHEDULES[name], rank_of, micro_batches)
    program = Program.of(rows, micro_batches, rank_of=rank_of)
    peaks = simulate(program, [StageCost(1.0, 2.0, activations=1)] * program.stages).peak_bytes
    assert tuple(map(max, held)) == peaks
    assert not sum(layer.alive for layer in layers)


@each_schedule
@each_driver
def test_casts_of_autocast_are_those_of_each_stage(name: str, driver: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())]
    layers[3] = layers[0]  # a weight that two stages use, cast in each
    expected = copy.deepcopy(layers)
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    with gpipe.GPipe(layers, 3, 6, schedule=name, driver=driver, seed=0) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(x, y, squares)
        pipes = nn.Sequential(*layers)
    one = gpipe.GPipe(expected, 1, 6, driver="lockstep", seed=0, remat="never")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss, one.step(x, y, squares))
    assert_same_bits(pipes, expected)


@each_schedule
def test_an_error_says_which_stage_and_part_it_came_from(name: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyError("no more")

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Fails.apply(x)

    each = SCHEDULES[name].stages_per_rank
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(2 * each)]
    layers[-1] = nn.Sequential(nn.Linear(8, 8), Failing())
    with gpipe.GPipe(layers, 2, 4, schedule=name) as pipe:
        with pytest.raises(KeyError, match="no more") as caught:
            pipe.step(torch.randn(4, 8), torch.randn(4, 8), squares)
        assert f"stage {2 * each - 1}, layer {2 * each - 1}" in caught.value.__notes__[0]
        assert "in the backward" in caught.value.__notes__[0]


class Shared(nn.Module):
    """A module that is two layers, on two ranks, each at work while the other is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.003)
        return self.linear(x).tanh()


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_a_module_that_is_two_layers_is_not_taken_for_one_that_calls_backward(name: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Shared() for _ in range(4)]
    layers[3].linear = layers[0].linear
    expected = copy.deepcopy(layers)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    one = gpipe.GPipe(expected, 1, 8, seed=0, driver="lockstep")
    with gpipe.GPipe(layers, 2, 8, schedule=name, seed=0) as pipe:
        for _ in range(2):
            assert torch.equal(pipe.step(x, y, squares), one.step(x, y, squares))
            assert_same_bits(nn.Sequential(*layers), expected)


# Placements that no schedule by name has.


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_stages_of_one_rank_hand_each_other_values_and_send_none(name: str, driver: str) -> None:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    with placed(name, 3), gpipe.GPipe(layers, 2, 3, seed=0, driver=driver) as pipe:
        program = pipe.program
        assert program.ranks == pipe.partitions == 2
        assert program.stages == len(pipe.layers_per_partition) == 6
        rank_of = program.rank_of
        crossing = [route for route in program.routes if rank_of[route.source] != rank_of[route.target]]
        sent = {action.route for action in program.actions if action.route is not None}
        assert sent == set(crossing)
        x, y = torch.randn(7, 4), torch.randn(7, 4)
        assert pipe.verify(x, y, squares, against="model").equal
        assert pipe.reads_inputs
        assert pipe.reads_targets
        assert pipe.summary().splitlines()[6].split()[0] == "5"  # a line for each stage
        with gpipe.record(pipe) as recording:
            pipe.step(x, y, squares)
        assert {span.rank for span in recording.timelines[-1].spans} == {0, 1}


def test_remat_and_layers_are_given_for_each_stage_and_devices_for_each_rank() -> None:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    with placed("v", 2):
        pipe = gpipe.GPipe(
            layers,
            [1, 2, 2, 1],
            2,
            remat=["never", "always", "never", "always"],
            devices=["cpu", "cpu"],
            driver="lockstep",
        )
        assert pipe.program.rank_of == (0, 1, 1, 0)
        assert pipe.layers_per_partition == (1, 2, 2, 1)
        with pytest.raises(ValueError, match="has 3 stages, but schedule= needs a multiple of 2"):
            gpipe.GPipe(layers, [2, 2, 2], 2)
        with pytest.raises(ValueError, match="only 6 layers"):
            gpipe.GPipe(layers, 4, 2)
