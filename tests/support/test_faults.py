"""The faults themselves: they strike where they say, once, whatever is recomputed and whoever turns the crank."""

import builtins
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, squares, weights_of
from tests.support.processes.faults import (
    EXCEPTIONS,
    LAYER_PHASES,
    TEXTS,
    Fault,
    FaultError,
    Faulty,
    Visit,
    faulty_loss,
)

M = 3
X, Y = torch.randn(2, 7, 4), torch.randn(2, 7, 4)
TYPES = vars(builtins) | {"FaultError": FaultError, "SIGINT": KeyboardInterrupt}


def build(fault: Fault | None = None) -> list[nn.Module]:
    with weights_of(1):
        layers: list[nn.Module] = [nn.Linear(4, 4), Faulty(4, M), nn.Tanh(), nn.Dropout(0.5), Faulty(4, M)]
    if fault is not None and fault.layer >= 0:
        layer = layers[fault.layer]
        assert isinstance(layer, Faulty)
        layer.fault = fault
    return layers


def train(pipe: gpipe.GPipe, steps: Sequence[int] = (0, 1)) -> list[Tensor]:
    losses = []
    for step in steps:
        pipe.zero_grad()
        losses.append(pipe.step(X[step], Y[step], squares))
    return losses


def parts(order: Sequence[int], phase: str, step: int) -> list[Visit]:
    return [Visit(phase, step, m) for m in order]


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("layer", [1, 4])
def test_a_faulty_layer_knows_each_phase_step_and_micro_batch(layer: int, remat: str, driver: str) -> None:
    pipe = gpipe.GPipe(build(), [3, 2], M, remat=remat, driver=driver, seed=0)
    train(pipe)
    faulty = list(pipe.children())[layer]
    assert isinstance(faulty, Faulty)
    recomputed = {"always": [0, 1, 2], "except_last": [1, 2], "never": []}[remat]
    for step in (0, 1):
        seen = [visit for visit in faulty.log if visit.step == step]
        assert [visit for visit in seen if visit.phase == "forward"] == parts(range(M), "forward", step)
        assert [visit for visit in seen if visit.phase == "recompute"] == parts(recomputed, "recompute", step)
        assert [visit for visit in seen if visit.phase == "backward"] == parts(range(M), "backward", step)


@pytest.mark.parametrize("phase", LAYER_PHASES)
@pytest.mark.parametrize("layer", [1, 4])
@pytest.mark.parametrize("kind", [*EXCEPTIONS, "SIGINT"])
def test_exceptions_are_raised_there_and_nowhere_else(kind: str, layer: int, phase: str) -> None:
    pipe = gpipe.GPipe(build(Fault(kind, phase, layer)), [3, 2], M, seed=0, driver="lockstep")
    train(pipe, [0])
    with pytest.raises(TYPES[kind]) as raised:
        train(pipe, [1])
    assert str(raised.value) == TEXTS[kind]
    assert f"in the {phase} of micro-batch 1, " in raised.value.__notes__[0]
    assert f"layer {layer} " in raised.value.__notes__[0]


def test_a_loss_function_strikes_at_its_micro_batch() -> None:
    fault = Fault("FaultError", "loss", micro_batch=2)
    pipe = gpipe.GPipe(build(), [3, 2], M, seed=0)
    with pytest.raises(FaultError) as raised:
        pipe.step(X[0], Y[0], faulty_loss(squares, fault, Y[0].tensor_split(M)[2]))
    assert "in the loss of micro-batch 2, rank 1, stage 1" in raised.value.__notes__[0]


@pytest.mark.parametrize(("kind", "phase"), [("shape", "recompute"), ("nan", "recompute"), ("nan", "forward")])
def test_a_recompute_that_is_not_its_forward_is_refused(kind: str, phase: str) -> None:
    pipe = gpipe.GPipe(build(Fault(kind, phase, 1, step=0)), [3, 2], M, seed=0)
    with pytest.raises(RuntimeError, match="a recompute gave other values") as raised:
        train(pipe, [0])
    assert "stage 0" in raised.value.__notes__[0]
