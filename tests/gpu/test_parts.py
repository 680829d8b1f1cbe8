"""Tests checks of `make gpu` that the simulated accelerator does not support, as far as a CPU can."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe.cli.gpu.bits import in_processes
from tests.gpu import parts


@pytest.mark.skipif(torch.accelerator.is_available(), reason="in place of `make gpu`, where no accelerator is")
def test_torchs_schedules_take_turns_with_ours() -> None:
    seconds = in_processes(parts.in_turns, 2, 8, 8)[0]
    assert [*seconds] == [title for name in parts.THEIRS for title in (name, f"torch {name}")]
    assert min(seconds.values()) > 0


@pytest.mark.parametrize(("ours", "verdict"), [(1.0, "passed"), (1.2, "failed")])
def test_slower_than_torch_falls_short(ours: float, verdict: str) -> None:
    seconds = {name: 1.0 for each in parts.THEIRS for name in (each, f"torch {each}")} | {"zb_v": ours}
    *_, judged = parts.judge(seconds)
    assert judged.verdict == verdict
    assert f"zb_v {ours:.2f}" in judged.text


def graphed(layer: nn.Module, sample: tuple[Tensor]) -> Callable[[Tensor], Tensor]:
    """Imitates a CUDA graph: input, activations, output and gradients use the same memory each time."""
    given = sample[0].detach().requires_grad_(sample[0].requires_grad)
    kept: list[Tensor] = []
    out = torch.empty_like(layer(given))
    inputs = [*([given] if given.requires_grad else []), *layer.parameters()]
    gradients = [torch.empty_like(each) for each in inputs]

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            given.detach().copy_(x)
            with torch.enable_grad():
                kept[:] = [layer(given)]
            return out.copy_(kept[0].detach()).detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            made = torch.autograd.grad(kept[0], inputs, gradient, retain_graph=True)
            found = [same.copy_(each).detach() for same, each in zip(gradients, made, strict=True)]
            return tuple(found) if given.requires_grad else (None, *found)

    class Graphed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Graph.apply(x, *layer.parameters())
            return made

    return Graphed()


def test_graphs_are_right_where_a_backward_follows_its_forward() -> None:
    found = [*parts.beside_graphs(torch.device("cpu"), 8, graphed)]
    assert [finding.verdict for finding in found] == ["passed", "passed", "measured"]
    assert [finding.text.partition(";")[0].partition(" ms")[0].split(": ")[1].split(",")[0] for finding in found] == [
        "the same bits",
        "the same bits",
        "other bits",
    ]


@pytest.mark.parametrize(
    ("name", "prints", "status", "verdict", "said"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0, "passed", "memcheck: 0 reports"),
        ("memcheck", "========= ERROR SUMMARY: 3 errors", 1, "failed", "memcheck: 3 reports, status 1"),
        ("racecheck", "RACECHECK SUMMARY: 2 hazards displayed", 0, "failed", "racecheck: 2 reports"),
        ("memcheck", "Error: it cannot attach", 255, "failed", "status 255, Error: it cannot attach"),
        ("torch.cuda._sanitizer", "CSAN detected a possible data race on tensor", 1, "failed", ": 1 reports"),
    ],
)
def test_reports_of_tools_are_counted(name: str, prints: str, status: int, verdict: str, said: str) -> None:
    tool = [sys.executable, "-c", f"print({prints!r}); raise SystemExit({status})"]
    found = parts.under(name, tool, {})
    assert found.verdict == verdict
    assert said in found.text
