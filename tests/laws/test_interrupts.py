"""Ctrl-C anywhere in a step: it ends, the caller's thread and modules are as they were, and the next step works."""

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe._torch.dispatcher import is_key_included
from gpipe.features import batch_norm, streamed_weights
from gpipe.stages import rng
from gpipe.stages.host_memory import is_in_file
from tests.support.interrupts import find_places, interrupt
from tests.support.plain_loop import weights_of

X, Y = torch.randn(8, 4), torch.randn(8, 4)
MOST = 6  # places, of one to three thousand


def plain() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4)]


def shared() -> list[nn.Module]:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return [first, nn.Tanh(), last, nn.Linear(4, 4)]


def normalized() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4)]


def make(layers: Callable[[], list[nn.Module]], driver: str, remat: str) -> gpipe.GPipe:
    with weights_of(1):
        return gpipe.GPipe(
            layers(),
            3,
            4,
            seed=0,
            driver=driver,
            remat="always" if remat == "host" else remat,
            weights="host" if remat == "host" else "device",
            schedule=gpipe.BreadthFirst(1, resident=1) if remat == "host" else "gpipe",
            batch_norm="deferred" if layers is normalized else "micro",
        )


def state_of(pipe: gpipe.GPipe) -> dict[str, object]:
    """What a step leaves alone: of the pipe and of the thread that calls it."""
    return {
        "parameters": [(id(parameter), is_in_file(parameter)) for parameter in pipe.parameters()],
        "loaded stages": len(streamed_weights._loaded),
        "runs": pipe._stages.threads._runs,
        "threads of operations": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "whether randomness is keyed": bool(rng._installed) and is_key_included(rng._installed[0]),
        "modes": torch.overrides._get_current_function_mode_stack(),
    }


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of what runs when garbage is collected
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("remat", ["always", "never", "host"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("layers", [plain, shared, normalized])
def test_ctrl_c_at_any_place_of_a_step_is_as_if_it_had_not_begun(
    layers: Callable[[], list[nn.Module]], driver: str, remat: str, is_new: bool, seed: int
) -> None:
    """Bug stories: a hang; gradients of the step before; weights no longer shared; another number of threads."""
    pipe = make(layers, driver, remat)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}

    def prepare() -> None:
        pipe.zero_grad()
        pipe.load_state_dict(before)
        pipe.step_number = 0

    def step() -> torch.Tensor:
        return pipe.step(X, Y, mse_loss)

    def made() -> list[torch.Tensor]:
        prepare()
        loss = step()
        gradients = [weight.grad for weight in pipe.parameters() if weight.grad is not None]
        return [loss, *map(torch.clone, gradients), *map(torch.clone, pipe.buffers())]

    expected = made()
    if is_new:
        pipe = make(layers, driver, remat)
    prepare()
    random, found = Random(seed), find_places(step)
    # Python's own locks of threads that begin are left locked by an interrupt
    places = [place for place in found if place.code.co_filename != threading.__file__]
    for place in random.sample(places, MOST):
        if is_new:
            pipe = make(layers, driver, remat)
        prepare()
        was = state_of(pipe)
        with suppress(KeyboardInterrupt):
            interrupt(step, place, random.choice([1, found[place]]))
        assert state_of(pipe) == was, str(place)
        assert all(map(torch.equal, made(), expected)), str(place)
    pipe.close()


def test_ctrl_c_at_every_place_that_lends_a_batchnorm_buffers_is_as_if_the_step_had_not_begun() -> None:
    """Bug stories: a hook stayed at work; the momentum of the forward passes stayed, which changed later steps."""
    pipe = make(normalized, "lockstep", "never")
    before = {name: value.clone() for name, value in pipe.state_dict().items()}

    def step() -> list[torch.Tensor]:
        pipe.zero_grad()
        pipe.load_state_dict(before)
        pipe.step_number = 0
        return [pipe.step(X, Y, mse_loss), *map(torch.clone, pipe.buffers())]

    expected = step()
    for place in [place for place in find_places(step) if place.code.co_filename == batch_norm.__file__]:
        with suppress(KeyboardInterrupt):
            interrupt(step, place, 1)
        assert all(map(torch.equal, step(), expected)), str(place)


@pytest.mark.parametrize("name", ["detect_nonfinite", "catch_sigterm"])
def test_ctrl_c_at_every_place_of_a_context_leaves_it(name: str) -> None:
    pipe, handler = make(plain, "lockstep", "never"), signal.getsignal(signal.SIGTERM)

    def enter() -> None:
        with getattr(gpipe, name)(pipe):
            pass

    for place in find_places(enter):
        with suppress(KeyboardInterrupt):
            interrupt(enter, place, 1)
        assert signal.getsignal(signal.SIGTERM) is handler, str(place)
        assert pipe(torch.full_like(X, torch.nan)).isnan().any(), str(place)


def interrupted_behind(do: Callable[..., Any]) -> Callable[..., Any]:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        do(*args, **kwargs)
        raise KeyboardInterrupt

    return interrupted


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def enter_interrupted(name: str, context: AbstractContextManager[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, name, interrupted_behind(getattr(nn.Module, name)))
        with pytest.raises(KeyboardInterrupt), context:
            pass


@pytest.mark.parametrize("name", ["register_forward_pre_hook", "register_forward_hook"])
def test_bug_ctrl_c_behind_a_hook_leaves_none_at_work_that_keys_randomness(name: str) -> None:
    model = nn.Sequential(*(hooked(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))) for _ in range(3)))
    layers = gpipe.layers_of(model, X)

    def drawn() -> torch.Tensor:
        torch.manual_seed(1)
        return model(X)

    expected = drawn()
    enter_interrupted(name, layers.rng_scope(0, 0, 0))
    assert torch.equal(drawn(), expected)
