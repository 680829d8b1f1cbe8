"""A pipe reads like an `nn.Sequential`, takes a scaler, and says each thing once."""

import logging
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import assert_same_bits, plain_loop, same_bits, weights_of
from tests.support.planned import pipe_by_costs

X, Y = torch.randn(8, 4), torch.randn(8, 4)
HALVES = slice(4), slice(4, 8)


def layers() -> list[nn.Module]:
    with weights_of(2):
        return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]


def test_a_pipe_has_the_layers_of_a_sequence() -> None:
    mine = layers()
    pipe = gpipe.GPipe(mine, 2, 2)
    assert len(pipe) == 3
    assert list(pipe) == mine
    assert (pipe[0], pipe[-1], pipe[-3]) == (mine[0], mine[2], mine[0])
    assert mine[1] in pipe
    assert nn.Tanh() not in pipe
    assert bool(pipe)
    assert list(pipe[1:]) == mine[1:]
    assert torch.equal(pipe[:2](X), nn.Sequential(*mine[:2])(X))
    assert list(pipe[1:].state_dict()) == ["2.weight", "2.bias"]
    for wrong in (3, -4, "0"):
        with pytest.raises(IndexError, match=r"no layer .* from 0 to 2"):
            pipe[wrong]  # type: ignore[index]


# What a call passes by name.


class Recalls(nn.Module):
    """Its forward has arguments with the names that a pipe uses, and none of them is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers())

    def forward(self, memory: Tensor | None = None, inputs: Tensor | None = None, x: Tensor | None = None) -> Any:
        value = sum(n * given for n, given in ((2, inputs), (3, memory), (5, x)) if given is not None)
        for block in self.blocks:
            value = block(value)
        return value


@pytest.mark.parametrize("names", [["inputs"], ["memory"], ["x", "inputs"], ["memory", "inputs", "x"]], ids=str)
def test_a_call_passes_arguments_to_a_model_by_their_names(names: list[str]) -> None:
    model, batch = Recalls(), {name: X + at for at, name in enumerate(names)}
    pipe = pipe_by_costs(model, 2, 2, sample=batch, costs="params").eval()
    with torch.no_grad():
        assert torch.equal(pipe(**batch), torch.cat([model(**{n: b[r] for n, b in batch.items()}) for r in HALVES]))
        assert torch.equal(pipe(**batch), pipe(batch))


def test_a_mini_batch_has_no_name() -> None:
    model: Any = pipe_by_costs(Recalls(), 2, 2, sample={"x": X}, costs="params")
    of_layers: Any = gpipe.GPipe(layers(), 2, 2)
    for pipe in (model, of_layers):
        with pytest.raises(TypeError, match="Pass the mini-batch by position"):
            pipe.step(inputs=X, targets=Y, loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="Pass the mini-batch by position"):
        of_layers(inputs=X)
    with pytest.raises(TypeError, match=r"both by position and by name \(inputs=, x=\)"):
        model(X, inputs=X, x=X)


# A gradient scaler.


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_takes_a_scaler(enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    plain = layers()
    pipe = gpipe.GPipe(layers(), 2, 2, seed=0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    loss = pipe.step(X, Y, F.mse_loss, scaler=scaler)
    scale = 1024.0 if enabled else 1.0
    assert same_bits(loss, plain_loop(plain, X, Y, F.mse_loss, micro_batches=2, seed=0, scale=scale))
    assert_same_bits(pipe, plain)
    before = [p.clone() for p in pipe.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(p, q) for p, q in zip(pipe.parameters(), before, strict=True))
    assert scaler.get_scale() == scale


def test_a_scale_beside_a_scaler_and_what_is_none_are_refused() -> None:
    pipe: Any = gpipe.GPipe(layers(), 2, 2)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"scale=2\.0 cannot be combined with scaler="):
        pipe.step(X, Y, F.mse_loss, scale=2.0, scaler=scaler)
    with pytest.raises(TypeError, match=r"losses is a tuple"):
        pipe.step(X, Y, F.mse_loss, losses=())
    with pytest.raises(TypeError, match=r"scaler= is a float"):
        pipe.step(X, Y, F.mse_loss, scaler=2.0)
    with pytest.raises(TypeError, match=r"scale=.* is not a number"):
        pipe.step(X, Y, F.mse_loss, scale=scaler)
    assert pipe.step_number == 0


def test_a_pipe_without_replicas_lives_alone_and_joins_none() -> None:
    pipe = gpipe.GPipe([nn.Linear(1, 1)], 1, 1)
    assert pipe.living == [0]
    with pytest.raises(ValueError, match=r"join\(\) requires a pipe with survive=True"):
        pipe.join()


# What the doctor says.


def test_a_finding_of_a_later_step_is_told_once_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipe_by_costs([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)], 1, 4, costs=[1, 1, 1])
    targets = torch.randint(3, (64,))

    def train(rows: int) -> list[str]:
        caplog.clear()
        pipe.step(torch.randn(rows, 4), targets[:rows], nn.functional.cross_entropy)
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING, "gpipe"):
        assert train(64) == []
        (few,) = train(16)
        assert "BatchNorm normalizes micro-batches of 4 rows" in few
        assert train(12) == []
    assert pipe.findings[-1] == few
    assert f"finding: {few}" in pipe.summary()


# Short tracebacks.


class Breaks(nn.Linear):
    where = "forward"

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self.fail()
        out = super().forward(x)
        if self.where == "backward" and out.requires_grad:
            out.register_hook(lambda gradient: self.fail())
        return out

    def fail(self) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("mine") from error


def frames_of(error: BaseException) -> list[str]:
    """The functions in a traceback, those of ours with their file."""
    found = traceback.extract_tb(error.__traceback__)
    return [f"gpipe.{frame.name}" if "/src/gpipe/" in frame.filename else frame.name for frame in found]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ["step", "call"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_a_traceback_shows_the_entrance_and_the_users_frames(driver: str, way: str, where: str) -> None:
    broken = Breaks(4, 4)
    broken.where = where
    pipe = gpipe.GPipe([nn.Linear(4, 4), broken], 2, 2, driver=driver)
    run = {"step": lambda: pipe.step(X, Y, F.mse_loss), "call": lambda: pipe(X).sum().backward()}[way]
    with pytest.raises(RuntimeError, match="mine") as raised:
        run()
    names = frames_of(raised.value)
    assert names[-1] == "fail"
    entrance = {("step", "forward"): "step", ("call", "forward"): "forward"}.get((way, where), "backward")
    if (way, where) == ("step", "backward"):
        entrance = "step"
    assert [name for name in names if name.startswith("gpipe.")] == [f"gpipe.{entrance}"]
    assert isinstance(raised.value.__cause__, KeyError)
    assert frames_of(raised.value.__cause__) == ["fail"]
    assert any("layer 1 (1: Breaks)" in note for note in raised.value.__notes__)


def test_what_is_refused_shows_the_callers_line_and_at_most_the_entrance() -> None:
    with pytest.raises(ValueError, match="cannot be built") as raised:
        gpipe.GPipe(layers(), 9, 0)
    assert [name for name in frames_of(raised.value) if name.startswith("gpipe.")] == ["gpipe.__init__"]
    with pytest.raises(TypeError, match="numpy") as refused:
        gpipe.GPipe(layers(), 2, 2)(X.numpy())
    assert [name for name in frames_of(refused.value) if name.startswith("gpipe.")] == ["gpipe.forward"]


def test_a_bug_of_ours_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = gpipe.GPipe(layers(), 2, 2)
    monkeypatch.delattr("gpipe.schedule.lowering.Lowering.program")
    with pytest.raises(AttributeError) as raised:
        pipe.step(X, Y, F.mse_loss)
    assert len([name for name in frames_of(raised.value) if name.startswith("gpipe.")]) > 2


def test_what_a_pipe_returns_prints_in_one_line(tmp_path: Path) -> None:
    """Bug story: `print(pipe.prediction)` printed 7,171 characters, and a recording its address."""
    pipe = gpipe.GPipe([nn.Linear(4, 4) for _ in range(4)], 4, 64)
    with gpipe.record(pipe) as recording:
        pipe.step(torch.randn(64, 4), torch.randn(64, 4), F.mse_loss)
    saving = gpipe.save(tmp_path, pipe, background=True)
    saving.wait()
    assert repr(pipe.program).startswith("Program(ranks=4, stages=4, micro_batches=64, ")
    assert repr(pipe.prediction) == "Prediction(partitions=4, micro_batches=64, bubble=3.4%)"
    assert repr(pipe.prediction.timeline).startswith("Timeline(ranks=4, seconds=")
    assert repr(recording).startswith("Recording(1 step, ")
    assert repr(saving) == f"Saving({str(tmp_path / 'step_1')!r}, written)"
