"""Recorded steps as plain numbers by name."""

import re
from dataclasses import replace
from math import isnan
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import gpipe
from gpipe.features.recorder import count_tokens
from gpipe.profiling import Report, read_report, report_html, report_json
from gpipe.profiling.breakdown import measure_throughput
from gpipe.profiling.memory import Held
from gpipe.profiling.messages import Message
from gpipe.profiling.recording import metrics_of
from gpipe.schedule.action import Kind
from gpipe.schedule.cost import StageCost
from gpipe.schedule.program import Program
from gpipe.schedule.schedules import fill_drain
from gpipe.schedule.simulate import simulate
from tests.docs.pages import ROOT
from tests.support.jobs import recorded
from tests.support.plain_loop import squares, weights_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

X, Y = torch.randn(8, 3), torch.randn(8, 3)


def two_stages(**how: Any) -> gpipe.GPipe:
    make: Any = pipe_by_costs if "costs" in how else gpipe.GPipe
    with weights_of(1):
        return make([nn.Linear(3, 3), nn.Linear(3, 3)], 2, 4, **how)


def crossed(kind: str, size: int) -> Message:
    return Message(kind, 0, 1, 0, 0, "x:0>1", 0, "forward", size, ("float32",), (), 0.0, 0.0, 0.0)


def test_they_say_what_breakdown_memory_and_messages_say() -> None:
    """Two steps of 1.5 s by the table, which were predicted to take 1.25 s."""
    program = Program.of(fill_drain(stages=2, micro_batches=4), micro_batches=4)
    step, less = (simulate(program, [StageCost(forward=f, backward=0.2)] * 2).timeline for f in (0.1, 0.05))
    steps = Report("", timelines=(step, step), predicted=less, predicted_memory=(64, 32))
    held = {0: Held(8, 8, 0, 2, 2), 1: Held(8, 8, 0)}
    found = metrics_of(steps, [0.5, 0.25], [crossed("send", 6), crossed("receive", 6), crossed("reduce", 8)], held)
    assert found == {
        "steps": 2.0,
        "loss": 0.375,
        "step_seconds": pytest.approx(1.5),
        "pipeline_seconds": pytest.approx(1.5),
        "predicted_seconds": pytest.approx(1.25),
        "sent_bytes": 3.0,
        "reduced_bytes": 4.0,
        "table_bubble": pytest.approx(0.2),
        **{name: pytest.approx(value) for name, value in SHARES.items()},
        "bubble/filling": pytest.approx(0.1 / 3),
        "bubble/draining": pytest.approx(0.2 / 3),
        "bubble/stalls": pytest.approx(0.1),
        "busy/rank_0": pytest.approx(0.8),
        "busy/rank_1": pytest.approx(0.8),
        "stage_seconds/stage_0": pytest.approx(0.3),
        "stage_seconds/stage_1": pytest.approx(0.3),
        "memory_bytes/rank_0": 20.0,  # of the other it is not known
        "predicted_memory_bytes/rank_0": 64.0,
        "predicted_memory_bytes/rank_1": 32.0,
    }
    assert {type(value) for value in found.values()} == {float}


SHARES = {
    "share/forward": 0.4 / 1.5,
    "share/recompute": 0.0,
    "share/backward": 0.8 / 1.5,
    "share/bubble": 0.2,
    **dict.fromkeys(
        (f"share/{part}" for part in ("imbalance", "late_starts", "communication", "moving", "reduction")), 0.0
    ),
    **dict.fromkeys((f"share/{part}" for part in ("data", "weight_update", "host", "between_steps")), 0.0),
}


def test_the_loss_is_the_mean_of_the_training_steps_that_are_kept() -> None:
    pipe = two_stages()
    recording = gpipe.record(pipe, keep=3)
    losses = [pipe.step(at * X, Y, squares).item() for at in range(4)]
    assert recording.metrics()["loss"] == pytest.approx(sum(losses[1:]) / 3)
    with torch.no_grad():
        pipe.step(9 * X, Y, squares)
    recording.stop()
    pipe.step(7 * X, Y, squares)
    found = recording.metrics()
    assert found["steps"] == 3
    assert found["loss"] == pytest.approx(sum(losses[1:]) / 3)


def test_a_loss_that_is_no_number_is_none_here_either() -> None:
    pipe = two_stages()
    with gpipe.record(pipe) as recording:
        pipe.step(X * torch.nan, Y, squares)
    assert isnan(recording.metrics()["loss"])


def test_of_calls_alone_no_loss_and_no_prediction_are_known() -> None:
    pipe = two_stages(sample=X)
    with gpipe.record(pipe) as recording:
        pipe(X).sum().backward()
    found = recording.metrics()
    assert found["steps"] == 2
    assert not {"loss", "pipeline_seconds", "predicted_seconds"} & found.keys()


def test_what_was_not_asked_for_is_left_out() -> None:
    plain, planned = two_stages(costs=[1, 1]), two_stages(sample=X, remat=gpipe.Remat(2**30))
    with gpipe.record(plain) as recording, gpipe.record(planned, memory=True) as watched:
        plain.step(X, Y, squares)
        planned.step(X, Y, squares)
    odd = {"predicted_seconds"} | {f"{of}memory_bytes/rank_{k}" for of in ("", "predicted_") for k in (0, 1)}
    assert not odd & recording.metrics().keys()
    assert odd <= watched.metrics().keys()


def test_throughput_counts_training_steps_over_the_wall_time_and_mfu_needs_a_peak() -> None:
    """Two steps of 1.5 s, each with 0.5 s until the next: 12 rows in 4 s, 6e12 FLOPs of each row, 90e12 at peak.

    The rows of the first step have 5 tokens each, and of the second 7.
    """
    program = Program.of(fill_drain(stages=2, micro_batches=4), micro_batches=4)
    step = replace(simulate(program, [StageCost(forward=0.1, backward=0.2)] * 2).timeline, other={"data": 0.5})
    evaluation = replace(step, spans=tuple(span for span in step.spans if span.action.kind is Kind.FORWARD))
    timelines, rows = [step, evaluation, step], [(8, 0), (100, 0), (4, 0)]
    assert measure_throughput(timelines, rows) == {"rows_per_second": pytest.approx(3)}
    tokens = {"rows_per_second": pytest.approx(3), "tokens_per_second": pytest.approx((8 * 5 + 4 * 7) / 4)}
    assert measure_throughput(timelines, [(8, 40), (100, 900), (4, 28)]) == tokens
    flops = {"rows_per_second": pytest.approx(3), "model_flops_per_second": pytest.approx(18e12)}
    assert measure_throughput(timelines, rows, 6e12) == flops
    assert measure_throughput(timelines, rows, 6e12, 90e12) == flops | {"mfu": pytest.approx(0.2)}
    assert measure_throughput([evaluation], [(100, 900)], 6e12, 90e12) == {}


@pytest.mark.parametrize("ready_made", [False, True])
def test_a_recording_counts_the_rows_of_its_steps(ready_made: bool) -> None:
    pipe = two_stages()
    inputs: Any = gpipe.MicroBatches([X[:1], X[1:3], X[3:]]) if ready_made else X
    targets: Any = gpipe.MicroBatches([Y[:1], Y[1:3], Y[3:]]) if ready_made else Y
    with gpipe.record(pipe, flops_per_row=108, device=gpipe.Device(peak=1e6)) as recording:
        for _ in range(3):
            pipe.step(inputs, targets, squares)
        with torch.no_grad():
            pipe.step(X, Y, squares)
    steps = [timeline for timeline in recording.timelines if timeline.is_step]
    wall = sum(timeline.seconds + sum(timeline.other.values()) for timeline in steps)
    found = recording.metrics()
    assert found["rows_per_second"] == pytest.approx(3 * 8 / wall)
    assert found["model_flops_per_second"] == pytest.approx(3 * 8 * 108 / wall)
    assert found["mfu"] == pytest.approx(3 * 8 * 108 / wall / 1e6)  # Both ranks are on one device, the CPU.
    assert "rows/s, " in str(recording)
    assert ", MFU " in str(recording)
    report = recording.report("mine")
    assert read_report(report_json(report)) == report
    assert "MFU" in report_html(report)


def words(lengths: list[list[int]]) -> Any:
    """Micro-batches of token IDs, padded to the longest row of each."""
    return gpipe.MicroBatches([torch.ones(len(each), max(each), dtype=torch.int64) for each in lengths])


def test_tokens_are_the_elements_of_the_first_integers_of_rows_and_tokens() -> None:
    layers = [nn.Embedding(4, 3), nn.Linear(3, 3)]
    inputs = words([[5, 3], [9], [2, 2, 2]])
    pipe = gpipe.GPipe(layers, 2, 3)
    with gpipe.record(pipe) as recording:
        pipe.step(inputs, inputs, lambda output, _: output.mean())
    found = recording.metrics()
    assert found["tokens_per_second"] == pytest.approx(found["rows_per_second"] * (10 + 9 + 6) / 6)
    assert " tokens/s" in str(recording)
    assert " tokens/s" in report_html(recording.report("mine"))
    for others in (torch.ones(4, dtype=torch.int64), torch.ones(4, 3, 2, dtype=torch.int64), torch.ones(4, 3)):
        assert count_tokens((others, {"mask": torch.ones(4, 3, dtype=torch.bool)})) == 0
        assert count_tokens((others, {"ids": torch.ones(4, 7, dtype=torch.int32)}, torch.ones(4, 9).long())) == 28


@pytest.mark.parametrize("schedule", ["gpipe", gpipe.Sliced("gpipe", 3)])
def test_tokens_of_models_and_of_their_slices_add_up(schedule: Any) -> None:
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    batch = dict.fromkeys(("input_ids", "labels"), torch.arange(24).view(4, 6) % 16)
    with gpipe.record(gpipe.GPipe(model, 2, 2, sample=batch, schedule=schedule)) as recording:
        recording._pipe.step(batch)
    found = recording.metrics()
    assert found["tokens_per_second"] == pytest.approx(found["rows_per_second"] * 6)


def test_presets_know_their_peak_and_a_plan_keeps_it() -> None:
    with gpipe.record(two_stages(), flops_per_row=1, device="h100") as recording:
        assert recording._peak == 989e12
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    plan = gpipe.find_plan(layers, X, [gpipe.Device(peak=3e12)] * 2, micro_batches=4)
    assert [device.peak for device in gpipe.Plan.from_json(plan.to_json()).devices] == [3e12, 3e12]


def test_what_is_not_known_is_refused_together() -> None:
    with pytest.raises(ValueError, match="keep=0") as refused:
        gpipe.record(two_stages(), keep=0, device="h101")
    assert [line.split("=")[0] for line in str(refused.value).splitlines()] == ["keep", "device", "device"]
    for flops in (0, -1, float("nan"), float("inf"), True, "many"):
        with pytest.raises(ValueError, match="flops_per_row="):
            gpipe.record(two_stages(), flops_per_row=flops)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no known peak"):
        gpipe.record(two_stages(), flops_per_row=1, device=gpipe.Device())
    with pytest.raises(ValueError, match="peak=-1 is negative"):
        gpipe.Device(peak=-1)


def test_rows_and_tokens_of_replicas_add_up(pool: WorkerPool) -> None:
    found = answers(pool.run(recorded.throughput, world=4))
    assert [(rows, tokens) for rows, tokens, _ in found] == [(8, 8 * 7)] * 4
    assert all(", MFU " in text for *_, text in found)


def test_nothing_recorded_is_told() -> None:
    with pytest.raises(ValueError, match="No step was recorded"):
        gpipe.record(two_stages()).metrics()


def test_over_processes_what_was_sent_is_of_all_ranks(pool: WorkerPool) -> None:
    """Of 4 micro-batches of 2 rows of 3 numbers each crosses one cut, and its gradient comes back."""
    first, second = answers(pool.run(recorded.metrics, world=2))
    crosses = recorded.MICRO_BATCHES * (8 // recorded.MICRO_BATCHES) * 3 * 4
    assert first["sent_bytes"] == second["sent_bytes"] == 2 * crosses
    assert first["loss"] == second["loss"]
    assert {name for name in first if name.startswith("memory_bytes")} == {"memory_bytes/rank_0"}
    assert {name for name in second if name.startswith("memory_bytes")} == {"memory_bytes/rank_1"}


def test_the_page_has_every_name() -> None:
    page = (ROOT / "docs" / "reference" / "data-formats.md").read_text()
    section = page.partition("## metrics()")[2].partition("\n## ")[0]
    told = re.findall(r"`([a-z_]+(?:/\w+)?)`", "".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE)))
    tokens = torch.ones(8, 5, dtype=torch.int64)
    pipe = gpipe.GPipe([nn.Embedding(4, 3), nn.Linear(3, 3)], 2, 4, sample=tokens, remat=gpipe.Remat(2**30))
    with gpipe.record(pipe, memory=True, flops_per_row=108, device="h100") as recording:
        pipe.step(tokens, Y[:, None].expand(8, 5, 3), squares)
    names = recording.metrics().keys()
    assert {name.partition("/")[0] for name in told} == {name.partition("/")[0] for name in names}
    assert {name for name in told if not name.endswith("/PART")} <= names
