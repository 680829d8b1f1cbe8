"""Jobs on norms and checkpoints of a model, of which each process has a part."""

from typing import Any

import torch

import gpipe
from tests.support.jobs.models import piped
from tests.support.open_models import batch_of, model_of
from tests.support.outcomes import Outcome, state
from tests.support.processes.digests import Digests, digests

NORM = 0.5


def optimizer_of(pipe: gpipe.GPipe) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.01)


def clipped(pipe: gpipe.GPipe, optimizer: torch.optim.Optimizer, name: str, steps: int) -> Outcome:
    found: Outcome = {}
    for _ in range(steps):
        at = pipe.step_number
        found[f"{at} loss"] = pipe.step(batch_of(name, at))
        found[f"{at} norm"] = pipe.clip_grad_norm_(NORM)
        optimizer.step()
        optimizer.zero_grad()
    return found | state(pipe, "end")


def save(rank: int, world: int, name: str, folder: str, how: dict[str, Any]) -> tuple[Digests, Digests]:
    with piped(model_of(name), name, world, driver="process", **how) as pipe:
        optimizer = optimizer_of(pipe)
        before = digests(clipped(pipe, optimizer, name, 2))
        gpipe.save(folder, pipe, optimizer)
        return before, digests(clipped(pipe, optimizer, name, 2))


def other(name: str) -> torch.nn.Module:
    """A model of the same shapes and other values."""
    model = model_of(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def resumed(name: str, world: int, folder: str, **how: Any) -> Digests:
    with piped(other(name), name, world, **how) as pipe:
        optimizer = optimizer_of(pipe)
        gpipe.load(folder, pipe, optimizer)
        return digests(clipped(pipe, optimizer, name, 2))


def resume(rank: int, world: int, name: str, folder: str, how: dict[str, Any]) -> Digests:
    return resumed(name, world, folder, driver="process", **how)


def save_weights(rank: int, world: int, name: str, folder: str) -> Digests:
    """A step, and the weights behind it; gives those of this rank."""
    model: Any = model_of(name)
    with piped(model, name, world, driver="process") as pipe:
        optimizer = optimizer_of(pipe)
        clipped(pipe, optimizer, name, 1)
        gpipe.save_weights(folder, pipe)
        if rank == 0 and hasattr(model, "config"):
            model.config.save_pretrained(folder)
        return digests(pipe.state_dict())


def load_weights(rank: int, world: int, name: str, folder: str) -> Digests:
    """Loads weights into a model built on the meta device."""
    with piped(model_of(name, "meta"), name, world, driver="process") as pipe:
        gpipe.load_weights(folder, pipe)
        found = digests(pipe.state_dict())
        assert pipe.step(batch_of(name)).isfinite()
        return found
