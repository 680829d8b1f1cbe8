"""What checkers and editors know of a user's calls is what these give: `make lint` has mypy and pyright read it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe

ROWS = torch.ones(4, 2)


class Loss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target)


class Counted(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return mse_loss(output, target), len(output)


def named(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, int]]:
    return mse_loss(output, target), {"rows": len(output)}


@pytest.fixture
def pipe() -> gpipe.GPipe:
    return gpipe.GPipe([nn.Linear(2, 2)], partitions=1, micro_batches=2)


def test_a_step_without_metrics_gives_a_tensor(pipe: gpipe.GPipe) -> None:
    either: nn.Module = Loss()
    losses = [
        assert_type(pipe.step(ROWS, ROWS, mse_loss), Tensor),
        assert_type(pipe.step(ROWS, targets=ROWS, loss_fn=partial(mse_loss, reduction="sum")), Tensor),
        assert_type(pipe.step(ROWS, ROWS, nn.MSELoss(), reduction="mean", scale=2.0), Tensor),
        assert_type(pipe.step(ROWS, ROWS, Loss(), losses=[]), Tensor),
        assert_type(pipe.step(ROWS, ROWS, either), Tensor),
        assert_type(pipe.step(ROWS, ROWS, lambda output, target: mse_loss(output, target)), Tensor),
        assert_type(pipe.step(gpipe.MicroBatches([ROWS]), gpipe.MicroBatches([ROWS]), mse_loss), Tensor),
    ]
    assert all(type(loss) is Tensor for loss in losses)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"output": x} if y is None else {"output": x, "loss": mse_loss(x, y)}


def test_a_step_of_a_models_own_loss_gives_a_tensor() -> None:
    batch = {"x": ROWS, "y": ROWS}
    model = gpipe.GPipe(Model(), 2, 2, sample=batch)
    assert type(assert_type(model.step(batch), Tensor)) is Tensor


def test_a_step_with_metrics_gives_those_of_each_micro_batch(pipe: gpipe.GPipe) -> None:
    _, of_function = assert_type(pipe.step(ROWS, ROWS, named), tuple[Tensor, list[dict[str, int]]])
    _, of_module = assert_type(pipe.step(ROWS, ROWS, Counted()), tuple[Tensor, list[int]])
    assert of_function == [{"rows": 2}, {"rows": 2}]
    assert of_module == [2, 2]


def test_a_call_is_known_by_its_own_arguments(pipe: gpipe.GPipe) -> None:
    assert type(assert_type(pipe(ROWS), Any)) is Tensor
    assert type(assert_type(pipe(ROWS, gather=False), Any)) is Tensor
    of_each = assert_type(pipe(gpipe.MicroBatches([ROWS, ROWS]), gather=True), list[Any])
    assert [type(one) for one in of_each] == [Tensor, Tensor]
    with pytest.raises(TypeError, match="pipe takes one value"):
        pipe(ROWS, ROWS)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def test_a_call_of_a_model_takes_a_batch(pipe: gpipe.GPipe) -> None:
    batch = {"x": ROWS}
    model = gpipe.GPipe(Model(), 2, 2, sample=batch)
    assert set(assert_type(model(**batch), Any)) == {"output"}
    with pytest.raises(TypeError, match=r"pipe\(\) got an unexpected keyword argument 'x'"):
        pipe(**batch)


def test_what_checkers_refuse_is_refused(pipe: gpipe.GPipe) -> None:
    """An ignore that nothing needs is an error itself."""
    with pytest.raises(TypeError, match=r"In GPipe\(\.\.\.\), use micro_batches="):
        pipe.step(ROWS, ROWS, mse_loss, chunks=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        pipe.step(ROWS, ROWS, "mse")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_what_stands_around_a_step_has_types(pipe: gpipe.GPipe, tmp_path: Path) -> None:
    with gpipe.record(pipe) as recording:
        assert_type(recording, gpipe.Recording)
        for rows in assert_type(recording.loading([ROWS]), Iterator[Tensor]):
            pipe.step(rows, rows, mse_loss)
    assert_type(pipe.clip_grad_norm_(1.0), Tensor)
    assert_type(recording.metrics(), dict[str, float])
    assert_type(pipe.findings, list[str])
    assert_type(recording.save(tmp_path / "step.svg"), Path)
    assert_type(gpipe.models.transformer_lm(10, 8, 2, 1), list[nn.Module])
    assert_type(gpipe.__version__, str)
