"""Torch's own generator stays to those who draw from it: layers that touch it, other threads, other pipes."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, same_bits
from tests.support.random_layers import (
    WIDTH,
    Does,
    M,
    run,
    run_plainly,
)

# Layers that touch torch's own generator: what they draw is keyed all the same.


def seeds_inside_a_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        x = x + torch.rand(x.shape)
    return x + torch.rand(x.shape)


def sets_it_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    x = F.dropout(x)
    torch.set_rng_state(state)
    return F.dropout(x)


def seeds_it(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x + torch.rand(x.shape)


TOUCHING = [seeds_inside_a_fork, sets_it_back, seeds_it]


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("function", TOUCHING)
def test_a_layer_that_touches_torchs_generator_draws_from_the_key_and_leaves_it_to_others(
    function: Callable[[Tensor], Tensor], remat: str, driver: str
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Does(function), Does(function), nn.Linear(WIDTH, 2)]
    plain = copy.deepcopy(layers)
    pipe = gpipe.GPipe(layers, 3, M, remat=remat, driver=driver, seed=7)
    before = torch.get_rng_state()
    for step in (0, 1):
        loss = run(pipe)
        assert torch.equal(torch.get_rng_state(), before)
        assert same_bits(loss, run_plainly(plain, step=step))
        assert_same_bits(pipe, plain)
        torch.set_rng_state(before)


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
    layers = [nn.Linear(WIDTH, WIDTH), Does(meanwhile), nn.Linear(WIDTH, 2)]
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
