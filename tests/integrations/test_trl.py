"""Tests that trl's trainers have the same log, weights and optimizer state with a pipe as without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.trained import apart
from tests.support.jobs import trl as jobs
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

pytest.importorskip("trl", reason="the extra trl is not installed for tests: pip install -c constraints.txt '.[trl]'")

pytestmark = pytest.mark.filterwarnings("ignore")

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
}


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


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "sync_ref_model= is set": (
        "dpo", {"reference": 1, "sync_ref_model": True},
    ),
    "activation_offloading= is set.*remat=": ("sft", {"activation_offloading": True}),
    r"label_smoothing_factor= .*\[logits-needed\]": ("sft", {"label_smoothing_factor": 0.1}),
    r"compute_loss_func= .*\[logits-needed\]": ("sft", {"compute_loss_func": lambda *_, **__: 0.0}),
    r"compute_metrics= .*\[logits-needed\]": ("dpo", {"reference": 1, "compute_metrics": lambda _: {}}),
}  # fmt: skip


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
