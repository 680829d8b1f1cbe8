"""Traced models on an accelerator are bitwise identical to the unsplit model there."""

import pytest
import torch
from torch import nn

from gpipe._torch.accelerator import CPU, accelerators
from tests.families.catalogue import batch, build, named
from tests.support.planned import pipe_by_costs

THERE = accelerators()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not THERE, reason="needs an accelerator")]
DEVICE = THERE[0] if THERE else CPU


@pytest.mark.parametrize("devices", [[DEVICE, DEVICE], [DEVICE, CPU]], ids=["one device", "device and CPU"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_trains_and_evaluates_on_devices(name: str, devices: list[torch.device]) -> None:
    family = named(name)
    model: nn.Module = build(family, dropout=True)
    given = batch(family)
    pipe = pipe_by_costs(model, 2, 4, sample=given, devices=devices, seed=7, costs="params")
    losses = [pipe.step(given) for _ in range(2)]
    assert all(loss.isfinite() for loss in losses)
    assert {parameter.device for parameter in pipe.parameters()} == set(devices)
    pipe.eval()
    with torch.no_grad():
        assert pipe(**given).loss.isfinite()


def test_a_model_on_a_device_has_the_bits_of_the_model_itself() -> None:
    family = named("llama")
    given = {name: tensor.to(DEVICE) for name, tensor in batch(family).items()}
    model = build(family, dropout=True).to(DEVICE)
    with pipe_by_costs(model, 2, 4, sample=given, devices=DEVICE, seed=7, costs="params") as pipe:
        assert pipe.verify(given, against="model").equal
