"""What layers leave outside of what they give, where a cut or a recompute could change it, is told."""

import contextvars
import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.two_steps import DRIVERS, REMAT, M, X, Y, network

mask: contextvars.ContextVar[float] = contextvars.ContextVar("mask", default=1.0)
here = threading.local()
here.scale = 2.0


class LeavesItsLoss(nn.Module):
    """Leaves a balancing loss on itself, as layers of experts do."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.linear, self.detached = nn.Linear(4, 4), detached
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.linear(x).softmax(-1)
        aux = (share.mean(0) ** 2).sum()
        self.aux = aux.detach() if self.detached else aux
        return x * share


@DRIVERS
@REMAT
def test_a_graph_that_a_layer_leaves_on_itself_is_refused_where_another_partition_reads_it(
    remat: str, driver: str
) -> None:
    layer = LeavesItsLoss(detached=False)
    pipe = gpipe.GPipe([layer, nn.Linear(4, 4)], 2, M, driver=driver, remat=remat)
    with pytest.raises(RuntimeError) as caught:
        pipe.step(X, Y, lambda o, t: F.mse_loss(o, t) + layer.aux)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "[weight-of-different-stage]" in text or "[tensor-with-graph-on-module]" in text


class Graph(nn.Module):
    """Has a sparse buffer, whose values it may change."""

    edges: Any

    def __init__(self, layout: torch.layout, factor: float) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(4).to_sparse(layout=layout))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(self.edges.clone(), x.t()).t()
        if self.factor:
            (self.edges._values() if self.edges.is_sparse else self.edges.values()).mul_(self.factor)
        else:  # its numbers stay and move
            edges = self.edges.data  # of which writes raise no version
            places = edges._indices()[1] if edges.is_sparse else edges.col_indices()
            places.copy_(places.roll(1))
        return out


@REMAT
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("factor", [1.0, 1.5, 0.0])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_buffer_is_as_it_was_in_a_recompute(factor: float, layout: torch.layout, remat: str) -> None:
    found = []
    for how in (remat, "never"):
        torch.manual_seed(0)
        graph = Graph(layout, factor)
        pipe = gpipe.GPipe([nn.Linear(4, 4), nn.Linear(4, 4), graph], [1, 2], M, remat=how)
        found.append([pipe.step(X, Y, F.mse_loss), *(p.grad for p in pipe.parameters()), graph.edges.to_dense()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class FixedGraph(nn.Module):
    """Has a sparse buffer that stays as it is."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(self.edges, x.t()).t()
        return out


@pytest.mark.parametrize("how", [{"remat": "auto"}, {"remat": "offload"}, {"schedule": "auto"}], ids=str)
def test_layers_with_a_sparse_buffer_are_planned(how: Any) -> None:
    """Bug story: torch knows no nbytes of sparse tensors."""
    layers = [nn.Linear(4, 4), FixedGraph(), nn.Linear(4, 4)]
    losses = [
        gpipe.GPipe(copy.deepcopy(layers), 2, M, sample=X, **ways).step(X, Y, F.mse_loss)
        for ways in (how, {"remat": "never"})
    ]
    assert torch.equal(*losses)


def test_layers_that_keep_nothing_are_not_mentioned() -> None:
    layers = [nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Dropout(0.1)]
    pipe = gpipe.GPipe(layers, 2, M)
    pipe.step(X, Y, F.mse_loss)
    assert not [text for text in pipe.findings if "A forward changes" in text]


@DRIVERS
def test_what_each_thread_has_for_itself_and_context_variables_that_layers_set_are_told(driver: str) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * getattr(here, "scale", 1.0)

    class Sets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask.set(2.0)
            return x

    def train(layer: nn.Module) -> list[str]:
        pipe = gpipe.GPipe([nn.Linear(4, 4), layer], 2, M, driver=driver)
        pipe.step(X, Y, F.mse_loss)
        return pipe.findings

    text = "layer 1 (1: Reads), global here: rank threads do not see"
    assert any(finding.startswith(text) for finding in train(Reads())) == (driver == "threads")
    findings = contextvars.copy_context().run(train, Sets())
    assert any("set the context variables mask" in text for text in findings) == (driver == "threads")


@DRIVERS
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at what is no leaf
def test_what_a_compiler_keeps_is_no_finding(driver: str) -> None:
    layers = [torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="aot_eager") for _ in range(2)]
    pipe = gpipe.GPipe(layers, 2, 8, driver=driver)
    pipe.step(torch.ones(32, 4), torch.ones(32, 4), F.mse_loss)
    assert not pipe.findings


def test_a_feature_that_a_hook_keeps_in_a_dict_is_refused() -> None:
    features: dict[str, Tensor] = {}
    layers = network(torch.tanh, torch.sin)
    layers[1].register_forward_hook(lambda module, args, out: features.update(x=out.detach()))
    pipe = gpipe.GPipe(layers, [2, 2], M, driver="lockstep")
    with pytest.raises(gpipe.VerificationError, match=r"hook .*features|features\['x'\]"):
        pipe.step(X, Y, lambda output, target: F.mse_loss(output, target) + features["x"].mean())
