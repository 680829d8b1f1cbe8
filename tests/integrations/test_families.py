"""Tests that Trainer has the same log, weights and optimizer state with a pipe as without."""

from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import Trainer

from gpipe.integrations.transformers import GPipeTrainer
from tests.families.catalogue import DOZEN
from tests.integrations.trained import LAST, MIDDLE, MODES, Outcome, apart, train

SHARED = {("t5", mode) for mode in MODES if mode != "lora"}
"""Where a table of words that encoder and decoder share learns: gradients of the two are added in another order."""
NEAR = 2e-6


@cache
def by_itself(name: str, mode: str) -> Outcome:
    with TemporaryDirectory() as folder:
        found = train(Trainer, name, Path(folder), mode)
        if mode == "resumed":
            found = train(Trainer, name, Path(folder), mode, resume=f"{folder}/checkpoint-{MIDDLE}")
        return found


@pytest.mark.parametrize("partitions", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DOZEN)
def test_trainer_through_a_pipe_leaves_what_it_leaves_by_itself(
    name: str, mode: str, partitions: int, tmp_path: Path
) -> None:
    make = partial(GPipeTrainer, partitions=partitions)
    found = train(make, name, tmp_path, mode)
    if mode == "resumed":  # in the middle of an epoch, at another K
        make = partial(GPipeTrainer, partitions=5 - partitions)
        found = train(make, name, tmp_path, mode, resume=f"{tmp_path}/checkpoint-{MIDDLE}")

    expected = by_itself(name, mode)
    assert expected.log[-1]["step"] == LAST
    assert apart(found, expected) <= (NEAR if (name, mode) in SHARED else 0.0)


@pytest.mark.parametrize(("name", "mode"), [("mixtral", "evaluated"), ("jetmoe", "lora")])
def test_trainer_with_the_auxiliary_loss_of_experts_leaves_what_it_leaves_by_itself(
    name: str, mode: str, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"model": {"output_router_logits": True, "router_aux_loss_coef": 0.5, "aux_loss_coef": 0.5}}
    expected = train(Trainer, name, tmp_path, mode, **how)
    found = train(partial(GPipeTrainer, partitions=3), name, tmp_path, mode, **how)
    assert apart(found, expected) == 0.0
    assert apart(found, by_itself(name, mode)) > 1e-3


def moved(outcome: Outcome) -> Outcome:
    """Log and weights without the biases of keys: softmax takes these out, and their gradient is rounding alone."""
    weights = dict(outcome.weights)
    for name in outcome.weights:
        if name.endswith("key.bias"):
            del weights[name]
        elif name.endswith("c_attn.bias"):  # of queries, keys and values
            query, _, value = weights[name].chunk(3)
            weights[name] = torch.cat([query, value])
    return Outcome(outcome.log, weights, {})


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "whisper"])
def test_where_scores_have_the_weights_of_words_it_is_near(name: str, optim: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": {"tied": True}, "arguments": {"optim": optim}}
    expected = train(Trainer, name, tmp_path, **how)
    found = train(partial(GPipeTrainer, partitions=2), name, tmp_path, **how)
    assert 0.0 < apart(moved(found), moved(expected)) <= NEAR
