"""Tests that an `Accelerator` loop (docs/how-to/accelerate.md) has the same results with a pipe as with the model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gpipe
from tests.support.plain_loop import one_thread

MICRO_BATCHES, ROWS = 4, 16


@pytest.fixture(autouse=True)
def _an_accelerator_of_its_own() -> Iterator[None]:
    """accelerate keeps what the first Accelerator of a process was told."""
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def parts(**how: Any) -> tuple[Accelerator, nn.Sequential, DataLoader[Any]]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    rows = torch.randn(64, 8)
    accelerator = Accelerator(cpu=True, **how)
    return (
        accelerator,
        nn.Sequential(*blocks, nn.Linear(8, 3)),
        DataLoader(TensorDataset(rows, rows.argmax(1) % 3), ROWS),
    )


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def piped(folder: Path | None = None, *, autocast: str = "no", **how: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Trains three epochs. With a folder, resumes the last of them from a checkpoint."""
    losses, epochs = [], 3
    for go in range(2 if folder else 1):
        forget()
        accelerator, model, loader = parts(mixed_precision=autocast)
        with gpipe.GPipe(model, 2, MICRO_BATCHES, **how) as pipe:
            loader, optimizer = accelerator.prepare(loader, optimizer_of(pipe.parameters()))
            accelerator.register_for_checkpointing(pipe)
            if go:
                assert folder is not None
                accelerator.load_state(str(folder))
            for _ in range(go * 2, epochs if go or not folder else 2):
                for batch in loader:
                    with accelerator.accumulate(), accelerator.autocast():
                        losses.append(pipe.step(batch[0], batch[1], cross_entropy))
                        pipe.clip_grad_norm_(0.5)
                        optimizer.step()
                        optimizer.zero_grad()
            if folder and not go:
                accelerator.save_state(str(folder))
    return losses, model.state_dict()


def plain(*, autocast: str = "no") -> tuple[list[Tensor], dict[str, Tensor]]:
    forget()
    accelerator, model, loader = parts(mixed_precision=autocast, gradient_accumulation_steps=MICRO_BATCHES)
    loader = DataLoader(loader.dataset, ROWS // MICRO_BATCHES)
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer_of(model.parameters()))
    losses, sums = [], []
    for _ in range(3):
        for rows, classes in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(rows), classes)
                accelerator.backward(loss)
                sums.append(loss.detach() / MICRO_BATCHES)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    losses.append(sum(sums, torch.zeros(())))
                    sums.clear()
                optimizer.step()
                optimizer.zero_grad()
    return losses, accelerator.unwrap_model(model).state_dict()


@pytest.mark.parametrize("autocast", ["no", "bf16"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_loop_leaves_what_it_leaves_without_a_pipe(schedule: str, autocast: str) -> None:
    with one_thread():
        (losses, weights), (others, expected) = piped(autocast=autocast, schedule=schedule), plain(autocast=autocast)
    assert losses == others
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_in_one_process_a_state_holds_the_pipe_that_was_registered(tmp_path: Path) -> None:
    with one_thread():
        losses, weights = piped(tmp_path / "state")
        others, expected = piped()
    assert losses == others
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_checkpoints_take_an_optimizer_that_was_prepared(tmp_path: Path) -> None:
    accelerator, model, _ = parts()
    with gpipe.GPipe(model, 2, MICRO_BATCHES) as pipe:
        optimizer = accelerator.prepare(optimizer_of(pipe.parameters()))
        pipe.step(torch.ones(8, 8), torch.zeros(8).long(), cross_entropy)
        optimizer.step()
        gpipe.save(tmp_path, pipe, optimizer).wait()
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        optimizer.step()
        gpipe.load(tmp_path, pipe, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_a_pipe_that_was_prepared_for_mixed_precision_is_refused() -> None:
    """Bug story: accelerate wraps forward, and steps went on without a word in 32 bits."""
    accelerator, model, _ = parts(mixed_precision="bf16")
    with gpipe.GPipe(model, 2, MICRO_BATCHES) as pipe:
        prepared = accelerator.prepare(pipe)
        with pytest.raises(ValueError, match=r"\[prepared-by-accelerate\]"):
            prepared.step(torch.ones(8, 8), torch.zeros(8).long(), cross_entropy)
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        with accelerator.autocast():
            pipe.step(torch.ones(8, 8), torch.zeros(8).long(), cross_entropy)


def test_a_backward_beside_the_pipes_is_an_error() -> None:
    accelerator, model, _ = parts()
    with gpipe.GPipe(model, 2, MICRO_BATCHES) as pipe:
        loss = pipe.step(torch.ones(8, 8), torch.zeros(8).long(), cross_entropy)
        with pytest.raises(RuntimeError, match="does not require grad"):
            accelerator.backward(loss)
