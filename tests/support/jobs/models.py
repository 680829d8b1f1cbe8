"""Jobs of same bits: models with a forward of their own through a pipe over processes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from tests.support.open_models import batch_of, model_of, without_labels
from tests.support.outcomes import Outcome, gradients, optimizer_of, state
from tests.support.plain_loop import tensors_in
from tests.support.planned import pipe_by_costs
from tests.support.processes.digests import Digests, digests

MICRO_BATCHES, SEED = 4, 5
Json = Any


def piped(model: nn.Module, name: str, partitions: int, **how: Any) -> gpipe.GPipe:
    how = {"micro_batches": MICRO_BATCHES, "costs": "params", "seed": SEED, **how}
    return pipe_by_costs(model, partitions, sample=batch_of(name), **how)


def stepped(pipe: gpipe.GPipe, given: Sequence[Any]) -> Outcome:
    found: Outcome = {}
    optimizer = optimizer_of(pipe)
    for step, batch in enumerate(given):
        found[f"{step} loss"] = pipe.step(batch)
        found |= gradients(pipe, step)
        optimizer.step()
        optimizer.zero_grad()
        found |= state(pipe, step)
    return found


def batches(name: str) -> list[dict[str, Tensor]]:
    return [batch_of(name, step, length=12 - step) for step in (0, 1)]


def trained(pipe: gpipe.GPipe, name: str) -> Outcome:
    """Two steps, a call with its backward, and evaluation; what they leave."""
    found = stepped(pipe, batches(name))
    output = pipe(batch_of(name, 2), gather=True)
    found |= noted_output("call", output)
    loss_in(output).backward()
    found |= gradients(pipe, "call")
    pipe.eval()
    with torch.no_grad():
        found |= noted_output("evaluation", pipe(**batch_of(name, 3), gather=True))
        if name != "t5":  # whose decoder is given the labels
            found |= noted_output("without labels", pipe(**without_labels(batch_of(name, 3)), gather=True))
        own = pipe(**batch_of(name, 3))
    if pipe.reads_targets:
        found |= noted_output("own", own)
    else:
        assert own is None
    return found


def noted_output(when: str, output: Any) -> Outcome:
    return {f"{when} {at}": tensor.detach() for at, tensor in enumerate(tensors_in(output))}


def loss_in(output: Any) -> Tensor:
    return output["loss"]


def train(rank: int, world: int, name: str, how: dict[str, Any]) -> tuple[Digests, Digests]:
    """What a rank has of the run, and its state_dict in the end."""
    with piped(model_of(name), name, world, driver="process", **how) as pipe:
        found = digests(trained(pipe, name))
        return found, digests(pipe.state_dict())


def train_from_meta(rank: int, world: int, name: str, how: dict[str, Any]) -> tuple[Digests, list[str]]:
    """What a rank has of two steps of a model built on the meta device; what of the model object has values there."""
    model = model_of(name, "meta")
    with piped(model, name, world, driver="process", **how) as pipe:
        found = digests(stepped(pipe, batches(name)))
        own = set(pipe.parameters())
        return found, [key for key, one in model.named_parameters() if not one.is_meta and one not in own]
