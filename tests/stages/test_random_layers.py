"""Randomness in whole pipes, keyed by (seed, step, layer, micro-batch), however a pipe is cut and run.

Torch's own generator stays to those who draw from it: layers that touch it, and other threads.
"""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.kinds.randomness import seeds_it, sets_it_back
from tests.support.odd_layers import Apply
from tests.support.plain_loop import assert_same_bits, same_bits
from tests.support.random_layers import WIDTH, M, data, run, run_plainly


def test_evaluation_draws_nothing_from_dropout_and_noise_is_keyed_there_too() -> None:
    noise = Apply(lambda x: x + torch.randn_like(x))
    pipe = gpipe.GPipe([nn.Linear(WIDTH, WIDTH), nn.Dropout(), noise], 2, M, seed=0).eval()
    untouched = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(pipe(data()[0]), pipe(data()[0]))
    assert torch.equal(untouched, torch.get_rng_state())


def test_a_seed_is_drawn_once_from_torchs_generator() -> None:
    seeds = []
    for _ in range(2):
        torch.manual_seed(4)
        seeds.append([gpipe.GPipe([nn.Dropout(0.5)], 1, 2).seed for _ in range(2)])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


def test_a_layer_with_a_generator_of_its_own_draws_from_it() -> None:
    own, other = (torch.Generator().manual_seed(7) for _ in range(2))
    with torch.no_grad():
        output = gpipe.GPipe([nn.Identity(), Apply(lambda x: x + torch.rand(x.shape, generator=own))], 2, 2)(
            torch.zeros(4, 3)
        )
    assert torch.equal(output, torch.cat([torch.rand(2, 3, generator=other) for _ in range(2)]))


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_layers_that_seed_torchs_generator_leave_it_to_others(driver: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Apply(seeds_it), Apply(sets_it_back), nn.Linear(WIDTH, 2)]
    before = torch.get_rng_state()
    run(gpipe.GPipe(layers, 3, M, driver=driver, seed=7))
    assert torch.equal(torch.get_rng_state(), before)


# Other threads.


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_another_thread_may_draw_during_a_step_and_neither_notices(driver: str) -> None:
    asked, done = threading.Semaphore(0), threading.Semaphore(0)
    drawn: list[Tensor] = []

    def draw() -> None:
        while asked.acquire() and not over:
            drawn.append(torch.rand(1))
            done.release()

    def meanwhile(x: Tensor) -> Tensor:
        x = F.dropout(x)
        if disturbed:
            asked.release()
            done.acquire()
        return F.dropout(x)

    over, disturbed = False, True
    layers = [nn.Linear(WIDTH, WIDTH), Apply(meanwhile), nn.Linear(WIDTH, 2)]
    plain = copy.deepcopy(layers)
    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        torch.manual_seed(3)
        pipe = gpipe.GPipe(layers, 2, M, driver=driver, seed=7)
        for step in (0, 1):
            disturbed = True
            loss = run(pipe)
            disturbed = False
            assert same_bits(loss, run_plainly(plain, step=step))
        assert_same_bits(pipe, plain)
    finally:
        over = True
        asked.release()
        thread.join()
    torch.manual_seed(3)
    assert len(drawn) > M
    assert same_bits(torch.cat(drawn), torch.cat([torch.rand(1) for _ in drawn]))
