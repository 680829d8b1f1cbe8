"""Same bits where a rank holds several stages, wherever the first and the last are."""

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import gpipe
from tests.support.mixed_tasks import generate_task, generate_way, is_statistic, run_pipe, run_plain, whole
from tests.support.outcomes import differences
from tests.support.placements import PLACEMENTS, placed
from tests.support.plain_loop import assert_same_bits, plain_loop, squares

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
placements = st.sampled_from(sorted(PLACEMENTS))


@settings(LAW, max_examples=60)
@given(st.randoms(use_true_random=False), placements, st.integers(1, 3), st.integers(2, 3))
def test_any_placement_gives_the_bits_of_the_plain_loop(draw: Random, name: str, ranks: int, each: int) -> None:
    task = generate_task(draw)
    way = generate_way(draw, task.model, ranks * each)
    assume(way is not None)
    assert way is not None
    with placed(name, each):
        found = run_pipe(task, way)
    assert differences(found, run_pipe(task, whole(task.model))) == []
    assert differences(found, run_plain(task), leave_out=is_statistic(task)) == []


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
        expected = [nn.Linear(4, 4) for _ in range(6)]
        for own, other in zip(layers, expected, strict=True):
            other.load_state_dict(own.state_dict())
        loss = pipe.step(x, y, squares)
        assert torch.equal(loss, plain_loop(expected, x, y, squares, micro_batches=3, seed=0, step=0))
        assert_same_bits(nn.Sequential(*layers), expected)
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
        with pytest.raises(ValueError, match="has 3 stages, and the schedule puts 2 on each rank"):
            gpipe.GPipe(layers, [2, 2, 2], 2)
        with pytest.raises(ValueError, match="only 6 layers"):
            gpipe.GPipe(layers, 4, 2)
