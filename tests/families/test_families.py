"""Tests families of transformers in pipes: the twelve most different ones, and five with every schedule.

Each of the five runs with every remat, schedule and driver.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gpipe
from gpipe.schedule.schedules import SCHEDULES
from gpipe.tracing.layers_of import ModelLayers, layers_of
from tests.families.catalogue import DOZEN, FAMILIES, NOT_BUILT, Task, batch, build, named
from tests.families.law import (
    SEED,
    Batch,
    Reference,
    Verdict,
    compare,
    judge,
    parts_of,
    pipe_of,
    quiet,
    reference,
    sample_of,
    state_of,
)
from tests.support.plain_loop import REMATS, one_thread, same_bits
from tests.support.planned import pipe_by_costs

FIVE = ("llama", "gpt2", "t5", "swin", "bert")
OF_OTHER_TASKS = (
    *("audio-spectrogram-transformer", "blip", "canine", "data2vec-audio", "data2vec-vision"),
    *("openai_privacy_filter", "timesformer"),
)
EXPERTS = (
    *("mixtral", "qwen2_moe", "olmoe", "jetmoe", "phimoe", "gpt_oss", "granitemoe"),
    *("deepseek_v4", "ernie4_5_moe", "flex_olmo", "flint", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("jamba", "laguna", "mellum", "minimax", "minimax_m2", "minimax_m3_vl_text", "qwen3_5_moe_text", "qwen3_moe"),
    *("qwen3_next",),
)
DRIVERS = ("threads", "lockstep")
MICRO_BATCHES, ROWS = 8, 11  # so that some have two rows and others one


@pytest.mark.parametrize("name", [*DOZEN, *OF_OTHER_TASKS])
def test_a_family_trains_to_the_bits_of_the_loop_over_the_model(name: str) -> None:
    found = judge(named(name))

    assert found.right, [found.refused, *found.mistakes]
    if name in DOZEN:
        assert found.mini_batch < 1e-6
        assert not found.output


@pytest.mark.parametrize("name", ["xlnet", "llava", "deepseek_vl"])
def test_outputs_without_rows_are_refused_and_given_for_each_micro_batch(name: str) -> None:
    family = named(name)
    model, parts = build(family, dropout=False).eval(), parts_of(batch(family))
    with quiet(), one_thread(), torch.no_grad(), pipe_of(model, sample_of(family), 2) as pipe:
        pipe.eval()
        with pytest.raises(TypeError, match=r"output\['(mems|image_hidden_states)'\].*outputs-cannot-be-joined"):
            pipe(**batch(family))
        found = pipe(gpipe.MicroBatches([*parts]))
        assert len(found) == len(parts)
        assert all(same_bits(one.logits, model(**part).logits) for one, part in zip(found, parts, strict=True))


@pytest.mark.parametrize("name", ["data2vec-vision", "dpt", "upernet"])
def test_losses_of_two_heads_over_the_same_labels_are_that_of_the_mini_batch(name: str) -> None:
    family = named(name)
    model, given = build(family, dropout=False).eval(), batch(family)
    given["labels"][:3] = 255  # ignored, in all of the first micro-batch
    with quiet(), one_thread(), torch.no_grad(), pipe_of(model, sample_of(family), 2) as pipe:
        pipe.eval()
        torch.testing.assert_close(pipe(**given).loss, model(**given).loss)
        if name == "dpt":  # a head beside runs with labels alone
            with pytest.raises(
                ValueError, match=r"has 27 layers, .* 28 with the sample\. .*\[number-of-layers-differs\]"
            ):
                pipe(pixel_values=given["pixel_values"])


@pytest.mark.parametrize("name", EXPERTS)
def test_the_auxiliary_loss_of_experts_trains_to_the_bits_of_the_loop(name: str) -> None:
    family = named(name)
    found = judge(replace(family, config={**family.config, "output_router_logits": True}))

    assert found.right, [found.refused, *found.mistakes]
    assert found.mini_batch > 5e-4  # each micro-batch adds its own, as under Trainer


def test_models_with_experts_are_planned_and_offloaded() -> None:
    family = named("mixtral")
    with quiet(), one_thread():
        model, given = build(family, dropout=False), batch(family)
        plan = gpipe.find_plan(model, given, [gpipe.Device(flops=1e9)] * 2, micro_batches=2, schedule="1f1b")
        assert plan.partitions == 2
        for settings in ({"remat": gpipe.Remat(2**30)}, {"remat": "offload"}, {"schedule": "auto"}):
            with pipe_by_costs(model, 2, 2, sample=given, **settings) as pipe:
                assert pipe.prediction.peak_bytes


def test_each_family_stands_in_the_catalogue_once() -> None:
    names = [family.name for family in FAMILIES]
    assert len({*names, *NOT_BUILT}) == len(names) + len(NOT_BUILT)
    assert {family.task for family in FAMILIES} == set(Task)


class Example(NamedTuple):
    """A model with dropout, split into layers, and the expected results of a step."""

    model: nn.Module
    layers: ModelLayers
    batch: Batch
    expected: Reference


@cache
def example(name: str) -> Example:
    family = named(name)
    with quiet(), one_thread():
        given, model = batch(family, rows=ROWS), build(family, dropout=True)
        expected = reference(family, model, given, MICRO_BATCHES)
        return Example(model, layers_of(model, sample_of(family)), given, expected)


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FIVE)
def test_schedule_remat_and_driver_change_no_bit(name: str, schedule: str, other: bool) -> None:
    model, layers, given, expected = example(name)
    at = FIVE.index(name) + [*SCHEDULES].index(schedule) + other
    for remat, driver in ((remat, DRIVERS[(at + one) % 2]) for one, remat in enumerate(REMATS)):
        settings: dict[str, Any] = {"schedule": schedule, "remat": remat, "driver": driver}
        with quiet(), pipe_by_costs(layers, 2, MICRO_BATCHES, seed=SEED, costs="params", **settings) as pipe:
            trained = state_of(model, pipe.step(given))
        model.zero_grad()
        assert not compare(expected, trained, Verdict(name, "")), (remat, driver)
