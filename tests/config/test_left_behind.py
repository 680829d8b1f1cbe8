"""What layers leave outside of what they give, where a cut or a recompute could change it, is told."""

import contextvars
import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.two_steps import DRIVERS, REMAT, M, X, Y, check, network

mask: contextvars.ContextVar[float] = contextvars.ContextVar("mask", default=1.0)
here = threading.local()
here.scale = 2.0


@DRIVERS
@REMAT
def test_context_variables_are_those_of_the_caller(remat: str, driver: str) -> None:
    token = mask.set(3.0)
    try:
        check(network(lambda x: x * mask.get(), lambda x: x + mask.get()), [1, 2, 1], driver, remat)
    finally:
        mask.reset(token)


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
    assert "another stage trains too" in text or "stash it and pop it where it is used" in text


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


class Delayed(torch.autograd.Function):
    """Scales by what the backward before has seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x * scale.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.scale.fill_(2.0)
        return gradient, None


@DRIVERS
@REMAT
def test_buffers_that_a_backward_writes_are_told(remat: str, driver: str) -> None:
    class Fp8(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return Delayed.apply(x, self.scale)

    pipe = gpipe.GPipe([nn.Linear(4, 4), Fp8(), nn.Linear(4, 4)], [2, 1], M, driver=driver, remat=remat)
    pipe.step(X, Y, F.mse_loss)
    assert any("The backward of stage 0" in text and "attribute scale" in text for text in pipe.findings)


def test_a_feature_that_a_hook_keeps_in_a_dict_is_refused() -> None:
    features: dict[str, Tensor] = {}
    layers = network(torch.tanh, torch.sin)
    layers[1].register_forward_hook(lambda module, args, out: features.update(x=out.detach()))
    pipe = gpipe.GPipe(layers, [2, 2], M, driver="lockstep")
    with pytest.raises(gpipe.VerificationError, match=r"hook .*features|features\['x'\]"):
        pipe.step(X, Y, lambda output, target: F.mse_loss(output, target) + features["x"].mean())


class ReadsAnother(nn.Module):
    """Reads the buffer of a layer that it refers to past torch's modules."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        mean = self.others[0].running_mean
        assert isinstance(mean, Tensor)
        return x + mean.clone()


@pytest.mark.parametrize(("partitions", "differs"), [([4], False), ([1, 3], False), ([2, 2], True)])
def test_a_layer_that_reads_the_buffers_of_another_stage_by_a_reference_is_refused(
    partitions: list[int], differs: bool
) -> None:
    norm = nn.BatchNorm1d(4)
    layers = [nn.Linear(4, 4), norm, ReadsAnother(norm), nn.Linear(4, 4)]
    pipe = gpipe.GPipe(layers, partitions, M, remat="never", driver="lockstep")
    with pytest.raises(gpipe.VerificationError, match="layer 2") if differs else nullcontext():
        pipe.step(torch.randn(2 * M, 4), torch.randn(2 * M, 4), F.mse_loss)
