"""The doctor: what it finds before the first step and behind it, and that it leaves a healthy pipe alone."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.planned import pipe_by_costs


def linears(count: int = 8) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


def train(pipe: gpipe.GPipe, rows: int = 136) -> None:
    pipe.step(torch.randn(rows, 4), torch.randn(rows, 4), F.mse_loss)


def about(pipe: gpipe.GPipe, *words: str) -> list[str]:
    """The findings that have all these words."""
    return [finding for finding in pipe.findings if all(word in finding for word in words)]


def healthy() -> gpipe.GPipe:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)]
    return pipe_by_costs(layers, [2, 2], 8, costs=[1, 1, 1, 1])


def test_a_healthy_pipe_has_no_findings_before_or_after_a_step() -> None:
    pipe = healthy()
    assert pipe.findings == []
    train(pipe)
    assert pipe.findings == []
    assert "finding" not in pipe.summary()


def test_few_micro_batches_are_found_with_the_bubble_that_they_cost() -> None:
    for k, m, bubble, better in ((2, 4, "20%", "11%"), (4, 4, "43%", "16%"), (8, 1, "88%", "18%")):
        (finding,) = gpipe.GPipe(linears(), k, m).findings
        assert f"partitions={k} and micro_batches={m} leave a bubble of {bubble}" in finding
        assert f"micro_batches={4 * k} to reduce it to {better}. [large-bubble]" in finding


def test_a_partition_without_parameters_is_found_by_number() -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 4)]
    pipe = pipe_by_costs(layers, [1, 2, 1], 12, costs=[1, 0.5, 0.5, 1])
    (finding,) = pipe.findings
    assert finding.startswith("Stage 1 has no parameters")
    assert finding.endswith("[stage-without-parameters]")


def test_a_partition_that_dwarfs_the_others_is_found_with_its_largest_layer() -> None:
    layers = [*linears(3), nn.Linear(4, 400), nn.Linear(400, 4)]
    (finding,) = pipe_by_costs(layers, [2, 2, 1], 12, costs=[1, 1, 1, 20, 1]).findings
    assert finding.startswith("Stage 1 costs 2.6 times the mean")
    assert "largest layer is 3, with 95% of its cost" in finding
    assert not pipe_by_costs(linears(4), [2, 1, 1], 12, costs=[1, 1, 1.5, 1]).findings
    assert not pipe_by_costs(linears(4), [1, 3], 8, costs=[0, 0, 0, 0]).findings


@pytest.mark.parametrize("deferred_batch_norm", [False, True])
def test_a_batch_norm_of_tiny_micro_batches_is_found_behind_the_first_step(deferred_batch_norm: bool) -> None:
    layers = [nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)), nn.Linear(4, 4)]
    pipe = pipe_by_costs(
        layers, [2, 1], 8, costs=[1, 0, 1], batch_norm="deferred" if deferred_batch_norm else "micro"
    )
    assert pipe.findings == []
    train(pipe, 127)
    (finding,) = pipe.findings
    assert "BatchNorm normalizes micro-batches of 15 rows" in finding
    assert finding.endswith("[batchnorm-small-batches]")
    assert ("batch_norm='deferred'" in finding) is not deferred_batch_norm
    train(pipe, 127)
    assert pipe.findings == [finding]


def test_a_batch_norm_in_evaluation_may_have_tiny_micro_batches_and_evaluation_is_not_the_first_step() -> None:
    pipe = healthy()
    list(pipe.children())[1].eval()
    train(pipe, 16)
    assert pipe.findings == []
    pipe = healthy()
    pipe.eval()
    train(pipe, 16)
    with torch.no_grad():
        train(pipe.train(), 16)
    assert pipe.findings == []
    train(pipe, 16)
    assert about(pipe, "BatchNorm")


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_unused_parameters_are_found_by_name_behind_the_first_step() -> None:
    pipe = gpipe.GPipe([nn.Linear(4, 4), Idle()], 2, 8)
    assert pipe.findings == []
    train(pipe)
    (finding,) = pipe.findings
    assert finding.startswith("1.unused: no gradient")
    assert finding.endswith("[no-gradient]")


# Where findings are said.


def test_findings_are_logged_when_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gpipe"):
        pipe = pipe_by_costs([nn.ReLU(), Idle()], [1, 1], 8, costs=[1, 1])
        train(pipe)
    assert [record.getMessage() for record in caplog.records] == pipe.findings
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_large_bubble_is_a_finding_and_in_the_summary_but_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Bug story: it was in the log of nearly every start, though M belongs to the run and may change results."""
    with caplog.at_level(logging.DEBUG, "gpipe"):
        pipe = gpipe.GPipe(linears(), 2, 4)
        train(pipe)
    assert "[large-bubble]" in "".join(pipe.findings)
    assert pipe.summary().count("[large-bubble]") == 1
    assert not caplog.records


def test_the_summary_shows_partitions_bubble_and_findings() -> None:
    layers = [nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256, bias=False), nn.Tanh()]
    pipe = pipe_by_costs(layers, [1, 3], 2, costs=[1, 1, 1, 1], remat=["always", "never"], devices="cpu")
    lines = pipe.summary().splitlines()
    assert lines[0].split() == ["stage", "rank", "layers", "device", "remat", "parameters", "MiB", "cost", "W"]
    assert lines[1].split() == ["0", "0", "0", "cpu", "always", "65,536", "0.2", "25.0%", "-"]
    assert lines[2].split() == ["1", "1", "1", "to", "3", "cpu", "never", "65,536", "0.2", "75.0%", "-"]
    assert (
        "K=2 partitions, M=2 micro-batches, schedule gpipe: bubble (K-1)/(M+K-1) = 33.3% if the stages are equal"
        in lines
    )
    assert [line for line in lines if line.startswith("finding: ")] == [f"finding: {text}" for text in pipe.findings]
    assert len(pipe.findings) == 1
