"""Tests adapters on a quantized base with 4 or 8 bits: bitwise results, and the planner's bytes."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer

import gpipe
from gpipe.integrations.transformers import GPipeTrainer
from gpipe.planner.profile import count_parameters, profile_layers
from gpipe.profiling.memory import Watches
from gpipe.stages.quantized import stored_in
from gpipe.stages.remote_layers import drop_remote_weights
from gpipe.stages.stage import Layer, Stage
from tests.families.law import quiet
from tests.integrations.quantized import WAYS
from tests.integrations.trained import Outcome as Trained
from tests.integrations.trained import apart, outcome, trainer_of
from tests.support.plain_loop import one_thread, same_bits, squares, weights_of
from tests.support.processes.digests import digests, wrong
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers
from tests.support.quantized import (
    QUANTIZERS,
    adapted,
    allocated,
    base,
    batch,
    left,
    optimizer_of,
    piped,
    three_steps,
    train_rank,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # quantizers warn of much
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]


def asks_for(package: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not installed")


EACH = [pytest.param(name, marks=asks_for(package)) for name, (package, _) in QUANTIZERS.items()]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_adapters_have_the_bits_of_one_device_and_the_base_stays(name: str, way: dict[str, Any]) -> None:
    model = adapted(name)
    before = left(model)
    with piped(model, **way) as pipe:
        assert pipe.verify(batch(), against="model").equal
        found = three_steps(model, lambda _: pipe.step(batch()))
        assert pipe.verify(batch(), against="model").equal
    changed = {key for key, value in before.items() if not same_bits(value, found[key])}
    assert changed == {key for key in before if "lora" in key}


@pytest.mark.parametrize(("name", "how"), [("nf4", {"schedule": "1f1b"}), ("int8", {"schedule": "zb_v"})])
def test_over_processes_too(name: str, how: dict[str, Any], pool: WorkerPool) -> None:
    pytest.importorskip(QUANTIZERS[name][0])
    told = answers(pool.run(train_rank, name, how, world=2))
    assert not wrong(told, trained(name, 1, driver="lockstep"))


@asks_for("torchao")
@pytest.mark.parametrize("remat", ["always", "never"])
def test_layers_that_were_quantized_by_hand(remat: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(32, 32)
            self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.base(x) + self.up(self.down(x)))

    with weights_of(2):
        layers = [Adapted() for _ in range(4)]
        x = torch.randn(8, 32)
    for layer in layers:
        layer.base.requires_grad_(False)
        quantize_(layer.base, Int8WeightOnlyConfig())
    with gpipe.GPipe(layers, 3, 4, remat=remat, sample=x) as pipe:
        assert pipe.verify(x, x, squares, against="model").equal
        pipe.step(x, x, squares)
    assert len(left(nn.Sequential(*layers), gradients=True)) == 8


@pytest.mark.parametrize("name", [None, *EACH])
@pytest.mark.parametrize("ran", [False, True])
def test_bytes_are_counted_as_the_allocator_has_them(name: str | None, ran: bool) -> None:
    model = adapted(name)
    if ran:
        model(**batch())
    held, counted = allocated(model)
    assert counted == held


@pytest.mark.parametrize("name", [None, *EACH])
def test_the_planner_counts_bytes_as_stored(name: str | None) -> None:
    """And the optimizer's for what trains alone; a quantized base makes the plan smaller."""
    model = adapted(name)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in model.buffers())  # of no layer: every rank makes its own
    stored = sum(piece.nbytes for piece in stored_in([model])) - buffers
    devices = [gpipe.Device(memory=2**30, flops=1e9)] * 2
    plan = gpipe.find_plan(model, batch(), devices, schedule="1f1b", micro_batches=4)
    with gpipe.GPipe(model, plan=plan, sample=batch()) as pipe:
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad])
        pipe.step(batch())
        optimizer.zero_grad()
        with gpipe.record(pipe, memory=True) as recording:
            pipe.step(batch())
            optimizer.step()
    ranks = [held for _, held in sorted(recording.memory().items())]
    assert sum(held.weights for held in ranks) == stored
    assert sum(held.gradients for held in ranks) == trained
    state = (
        profile_layers([model.get_submodule("base_model.model.lm_head")], {2: torch.zeros(2, 64)}, [""])
        .layers[0]
        .state
    )
    assert state == 64 * 64 * 4  # frozen: no gradient, nothing of the optimizer's
    for held, predicted in zip(ranks, plan.peak_bytes, strict=True):
        assert predicted > held.weights + 3 * held.gradients
        if name != "8 bits":  # which keeps what it is given where autograd does not see it
            assert predicted == pytest.approx(held.total, rel=0.15)


@asks_for("bitsandbytes")
def test_a_view_of_packed_weights_is_no_memory_more() -> None:
    # Each forward views them: a recording counted them twice, 8 of 34 MiB where the planner was right.
    weight = base("nf4").get_parameter("model.layers.0.mlp.up_proj.weight")
    watch = Watches().by_rank[0]
    with watch:
        kept = weight.view(-1, 1)
    watch.end([])
    assert kept.numel()
    assert watch.peak == 0


@asks_for("bitsandbytes")
def test_a_weight_of_four_bits_costs_what_its_numbers_cost() -> None:
    packed, plain = base("nf4"), base(None)
    assert count_parameters([packed]) == count_parameters([plain])
    assert gpipe.layers_of(packed, batch())[1].parameters == gpipe.layers_of(plain, batch())[1].parameters


@asks_for("bitsandbytes")
def test_a_pipe_that_is_made_of_a_model_in_evaluation_leaves_its_weights_as_they_are() -> None:
    """On some processors bitsandbytes packs weights of 4 bits at the first look in evaluation, and loses bits."""
    model = adapted("nf4").eval()
    before = left(model)
    with piped(model, 2) as pipe:
        pipe.train()
        found = three_steps(model, lambda _: pipe.step(batch()))
    assert digests(found) == trained("nf4", 1, driver="lockstep")
    assert all(same_bits(value, found[key]) for key, value in before.items() if "lora" not in key)


@pytest.mark.parametrize("name", ["nf4", "8 bits", "int8"])
def test_a_process_keeps_nothing_of_what_others_have(name: str) -> None:
    pytest.importorskip(QUANTIZERS[name][0])
    model = adapted(name)
    model(**batch())  # after which 8 bits of bitsandbytes lie in another place
    first, last = (model.get_submodule(f"base_model.model.model.layers.{at}") for at in (0, 2))
    mine = sum(piece.nbytes for piece in stored_in([first]))
    stages = [Stage(at, [Layer(at, "layer", one)], torch.device("cpu")) for at, one in enumerate((first, last))]
    drop_remote_weights(stages, stages[:1])
    assert sum(piece.nbytes for piece in stored_in([first])) == mine
    assert all(piece.is_meta for piece in stored_in([last]))


@pytest.mark.parametrize("name", EACH)
def test_a_checkpoint_has_the_adapters_and_goes_on_at_another_k(name: str, tmp_path: Path) -> None:
    """Of the base it has checksums, so it is small, and another base is refused before anything changes."""
    model = adapted(name)
    with piped(model, 2) as pipe:
        optimizer = optimizer_of(pipe)
        pipe.step(batch())
        optimizer.step()
        saved = gpipe.save(tmp_path, pipe, optimizer).wait()
        optimizer.zero_grad()
        pipe.step(batch())
        expected = left(model, gradients=True)
    again = adapted(name)
    with torch.no_grad():
        for key, parameter in again.named_parameters():
            if "lora" in key:
                parameter.zero_()
    with piped(again, 3) as pipe:
        gpipe.load(saved, pipe, optimizer_of(pipe))
        pipe.step(batch())
    found = left(again, gradients=True)
    assert not [key for key, value in found.items() if not same_bits(value, expected[key])]
    whole, held = left(model), left(again)
    assert not [key for key, value in whole.items() if not same_bits(value, held[key])]
    other = adapted(name, hidden_act="gelu", initializer_range=0.05)
    before = left(other)
    with piped(other, 2) as pipe, pytest.raises(gpipe.CheckpointError, match="Quantize the same base"):
        gpipe.load(saved, pipe)
    assert all(same_bits(value, before[key]) for key, value in left(other).items())


@pytest.mark.parametrize("name", [param for param in EACH if param.values[0] in ("nf4", "int8")])
def test_weights_that_a_quantizer_made_are_no_file_of_the_hub(name: str, tmp_path: Path) -> None:
    with piped(adapted(name), 2) as pipe:
        if name == "nf4":
            gpipe.save_weights(tmp_path, pipe)  # as transformers does, which reads them
            with pytest.raises(gpipe.CheckpointError, match="are quantized"):
                gpipe.load_weights(tmp_path, pipe)
        else:
            with pytest.raises(ValueError, match="not a plain tensor"):
                gpipe.save_weights(tmp_path, pipe)


@pytest.mark.parametrize("name", [param for param in EACH if param.values[0] in ("nf4", "8 bits", "int8")])
def test_trainer_leaves_what_it_leaves_on_one_device(name: str, tmp_path: Path) -> None:
    rows = [{key: value[at] for key, value in batch(11).items()} for at in range(11)]

    def train(make: Any, folder: str) -> Trained:
        with quiet(), one_thread():
            trainer = trainer_of(make, adapted(name, dropout=False), "llama", tmp_path / folder, train_dataset=rows)
            trainer.train()
            trainer.save_model(str(tmp_path / folder))
        found = outcome(trainer)
        assert isinstance(trainer.model, nn.Module)
        return Trained(
            found.log, {key: one for key, one in left(trainer.model).items() if one is not None}, found.optimizer
        )

    assert apart(train(partial(GPipeTrainer, partitions=2), "piped"), train(Trainer, "plain")) == 0.0
    adapters = [load_file(tmp_path / one / "adapter_model.safetensors") for one in ("piped", "plain")]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(same_bits(tensor, adapters[1][key]) for key, tensor in adapters[0].items())
