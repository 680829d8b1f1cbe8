"""Tests that trl's trainers have the same log, weights and optimizer state with a pipe as without."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gpipe
from tests.integrations.trained import apart, log_of, outcome
from tests.support.jobs import trl as jobs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

pytest.importorskip("trl", reason="trl is not installed: make test-all installs it, or pip install '.[trl]'")

pytestmark = pytest.mark.filterwarnings("ignore")

ENTROPY = {
    "entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 4.1456, "top_entropy_quantile": 0.5,
    "eval_strategy": "no",
}  # fmt: skip
ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "texts": ("sft", {}),
    "texts, three partitions": ("sft", {"pipe": {"partitions": 3, "schedule": "1f1b", "remat": "never"}}),
    "texts, adapters": ("sft", {"lora": True}),
    "texts, in bf16": ("sft", {"bf16": True}),
    "texts, another loss": ("sft", {"loss_type": "dft"}),
    "texts, packed": ("sft", {"packing": True, "packing_strategy": "wrapped", "max_length": 8}),
    "texts, of a mixture of experts": ("sft", {"family": "mixtral", "router_aux_loss_coef": 0.02}),
    "pairs": ("dpo", {"reference": 1}),
    "pairs, wave by wave": ("dpo", {"reference": 1, "pipe": {"schedule": "zb_v", "remat": 1}}),
    "pairs, in bf16": ("dpo", {"reference": 1, "bf16": True}),
    "pairs, adapters": ("dpo", {"lora": True}),
    "pairs, adapters that go on": ("dpo", {"adapted": True}),
    "pairs, adapters and a reference": ("dpo", {"lora": True, "reference": 1}),
    "pairs, weighted": ("dpo", {"reference": 1, "use_weighting": True, "ld_alpha": 0.5}),
    "pairs, two losses": (
        "dpo", {"reference": 1, "loss_type": ["exo_pair", "sft"], "loss_weights": [0.5, 1.0], "label_smoothing": 0.1},
    ),
    "pairs, of a mixture of experts": ("dpo", {"family": "mixtral", "reference": 1, "router_aux_loss_coef": 0.02}),
    "pairs, precomputed": ("dpo", {"reference": 1, "precompute_ref_log_probs": True}),
    "pairs, precomputed by the model": ("dpo", {"precompute_ref_log_probs": True}),
    "pairs, precomputed without adapters": ("dpo", {"lora": True, "precompute_ref_log_probs": True}),
    "completions": ("grpo", {}),
    "completions, three partitions": ("grpo", {"eval_strategy": "no", "pipe": {"partitions": 3, "schedule": "1f1b"}}),
    "completions, and a reference": ("grpo", {"reference": 1, "beta": 0.1, "eval_strategy": "no"}),
    "completions, for a step and a half": (
        "grpo", {"steps_per_generation": 6, "num_train_epochs": 3, "family": "mixtral", "router_aux_loss_coef": 0.02},
    ),
    "completions, used twice": ("grpo", {"steps_per_generation": 2, "num_iterations": 2, "eval_strategy": "no"}),
    "completions, adapters": ("grpo", {"lora": True, "beta": 0.1, "eval_strategy": "no"}),
    "completions, adapters that go on": ("grpo", {"adapted": True, "beta": 0.1, "eval_strategy": "no"}),
    "completions, in bf16": ("grpo", {"bf16": True, "cast_lm_head_to_fp32": True, "eval_strategy": "no"}),
    "completions, more entropy": ("grpo", {**ENTROPY, "pipe": {"schedule": "zb_v", "remat": 1}}),
    "completions, another loss": (
        "grpo",
        {"loss_type": "cispo", "scale_rewards": "batch", "mask_truncated_completions": True, "eval_strategy": "no"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_a_training_leaves_the_same(name: str, tmp_path: Path) -> None:
    kind, how = ALIKE[name]
    plain = {key: value for key, value in how.items() if key != "pipe"}
    piped = dict(how.get("pipe", {}))
    partitions = piped.pop("partitions", 2)
    _, found = jobs.trained(kind, partitions, str(tmp_path / "piped"), {**how, "pipe": piped})
    _, expected = jobs.trained(kind, 0, str(tmp_path / "plain"), plain)
    assert any("entropy" in one for one in found.log)
    assert apart(found, expected) == 0.0


def test_the_reference_model_is_a_frozen_pipe_of_its_own(tmp_path: Path) -> None:
    trainer: Any = jobs.trained("dpo", 2, str(tmp_path), {"reference": 1})[0]
    assert trainer.reference_pipe is not trainer.pipe
    assert trainer.reference_pipe.partitions == 2
    assert not any(parameter.requires_grad for parameter in trainer.reference_pipe.parameters())


WORLDS: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "texts": (2, 2, "sft", {}),
    "texts, two replicas": (4, 2, "sft", {}),
    "pairs": (2, 2, "dpo", {"reference": 1, "pipe": {"schedule": "1f1b"}}),
    "pairs, adapters": (2, 2, "dpo", {"lora": True}),
    "pairs, wave by wave": (2, 2, "dpo", {"reference": 1, "pipe": {"schedule": "zb_v"}}),
    "pairs, two replicas": (4, 2, "dpo", {"reference": 1, "ld_alpha": 0.5}),
    "completions": (2, 2, "grpo", {"log_completions": True, "pipe": {"schedule": "1f1b"}}),
    "completions, three processes": (3, 3, "grpo", {"steps_per_generation": 6, "eval_strategy": "no"}),
    "completions, adapters": (2, 2, "grpo", {"lora": True, "beta": 0.1, "eval_strategy": "no"}),
    "completions, more entropy": (2, 2, "grpo", {**ENTROPY, "pipe": {"schedule": "zb_v"}}),
    "completions, two replicas": (
        4, 2, "grpo", {"reference": 1, "beta": 0.1, "scale_rewards": "batch", "top_entropy_quantile": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_over_processes_a_training_leaves_the_same(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    world, partitions, kind, how = WORLDS[name]
    plain = {key: value for key, value in how.items() if key != "pipe"}
    piped, by_itself = str(tmp_path / "piped"), str(tmp_path / "plain")
    found = answers(pool.run(jobs.train, kind, partitions, piped, how, world=world))
    expected = answers(pool.run(jobs.train, kind, 0, by_itself, plain, world=world // partitions))
    assert found == [expected[0]] * world
    weights, others = (
        {key: value for file in Path(folder).glob("*.safetensors") for key, value in load_file(file).items()}
        for folder in (piped, by_itself)
    )
    assert weights
    assert weights.keys() == others.keys()
    assert all(torch.equal(value, others[key]) for key, value in weights.items())
    tables = [sorted(Path(folder, "completions").glob("*.parquet")) for folder in (piped, by_itself)]
    assert len(tables[0]) == len(tables[1]) == how.get("log_completions", False) * len(tables[0])
    for table, other in zip(*tables, strict=True):
        pandas = pytest.importorskip("pandas")
        pandas.testing.assert_frame_equal(pandas.read_parquet(table), pandas.read_parquet(other))


def test_completions_are_generated_by_the_pipe_and_evaluation_may_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, generate = [], gpipe.GPipe.generate

    def count(pipe: gpipe.GPipe, *args: Any, **how: Any) -> Any:
        calls.append(pipe.training)
        return generate(pipe, *args, **how)

    monkeypatch.setattr(gpipe.GPipe, "generate", count)
    found = []
    for partitions in (2, 0):
        trainer = jobs.quietly(partial(jobs.made, "grpo", partitions, str(tmp_path), {"max_steps": 2}))
        jobs.quietly(trainer.evaluate)
        jobs.quietly(trainer.train)
        found.append(log_of(trainer))
    assert found[0] == found[1]
    assert calls == [False] * 8  # three for each of two evaluations, one for each of two steps


def test_a_reward_that_raises_ends_all_processes(pool: WorkerPool, tmp_path: Path) -> None:
    told = answers(pool.run(jobs.spoil, str(tmp_path), world=2))
    assert told[0].startswith("ValueError: no reward")
    assert told[1].startswith("RemoteError: rank 0 failed: ValueError: no reward")


def test_a_training_goes_on_with_another_number_of_partitions(tmp_path: Path) -> None:
    how = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no", "max_steps": 6}
    expected = jobs.trained("grpo", 2, str(tmp_path), how)[1]
    found = []
    for partitions in (3, 0):
        trainer = jobs.quietly(partial(jobs.made, "grpo", partitions, str(tmp_path / "on"), how))
        jobs.quietly(partial(trainer.train, resume_from_checkpoint=f"{tmp_path}/checkpoint-3"))
        found.append(outcome(trainer))
    assert apart(found[0], found[1]) == 0.0
    assert apart(found[0]._replace(log=[]), expected._replace(log=[])) == 0.0


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "sync_ref_model= is set": (
        "dpo", {"reference": 1, "sync_ref_model": True},
    ),
    "activation_offloading= is set.*remat=": ("sft", {"activation_offloading": True}),
    r"label_smoothing_factor= .*\[logits-needed\]": ("sft", {"label_smoothing_factor": 0.1}),
    r"compute_loss_func= .*\[logits-needed\]": ("sft", {"compute_loss_func": lambda *_, **__: 0.0}),
    r"compute_metrics= .*\[logits-needed\]": ("dpo", {"reference": 1, "compute_metrics": lambda _: {}}),
    "use_vllm= is set(.|\n)*continuous_batching= is set(.|\n)*sample= is not an argument": (
        "grpo", {"use_vllm": True, "use_transformers_continuous_batching": True, "pipe": {"sample": []}},
    ),
    r"tied embeddings, .*\[generate-with-tied-embeddings\]": ("grpo", {"tied": True}),
}  # fmt: skip


APART: dict[str, dict[str, Any]] = {
    "num_generations=4 does not divide .* = 2(.|\n)*num_generations_eval=4 does not divide .* = 2": {
        "steps_per_generation": 1, "per_device_eval_batch_size": 2,
    },
    "rollout_func= would run in all K processes": {"rollout": True},
}  # fmt: skip


@pytest.mark.parametrize("said", APART)
def test_what_processes_cannot_do_together_is_refused(said: str, pool: WorkerPool, tmp_path: Path) -> None:
    told = answers(pool.run(jobs.refuse, str(tmp_path), APART[said], world=2))
    assert all(re.search(said, one) for one in told), told


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_pipe_cannot_do_is_refused(said: str, tmp_path: Path) -> None:
    kind, how = REFUSED[said]
    with pytest.raises(ValueError, match=said):
        jobs.quietly(lambda: jobs.made(kind, 2, str(tmp_path), how))


def test_prompts_that_are_trained_need_a_reference_model(tmp_path: Path) -> None:
    from peft import PromptTuningConfig, TaskType

    how = {"peft_config": PromptTuningConfig(TaskType.CAUSAL_LM, num_virtual_tokens=2)}
    with pytest.raises(ValueError, match=r"\[reference-model-needed\]"):
        jobs.trained("dpo", 2, str(tmp_path), how)


def test_predictions_are_losses(tmp_path: Path) -> None:
    trainer: Any = jobs.trained("sft", 2, str(tmp_path), {"max_steps": 1})[0]
    with pytest.raises(ValueError, match=r"\[logits-needed\]"):
        jobs.quietly(lambda: trainer.predict(trainer.eval_dataset))
    trainer.args.prediction_loss_only = True
    expected = trainer.evaluate()["eval_loss"]
    assert jobs.quietly(lambda: trainer.predict(trainer.eval_dataset)).metrics["test_loss"] == expected
