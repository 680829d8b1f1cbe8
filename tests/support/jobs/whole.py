"""Jobs on what belongs to the whole model, of which a process has a part: its loss, its norm, its weights."""

import copy
import io
import operator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gpipe
from gpipe.stages.dtensor import local_tensor
from tests.support.jobs.values import First
from tests.support.plain_loop import weights_of
from tests.support.said import said

CLASSES, SEED = 3, 5
WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
LOSSES = {
    "entropy": nn.CrossEntropyLoss(WEIGHT, ignore_index=0, label_smoothing=0.1),
    "sum": nn.CrossEntropyLoss(reduction="sum", ignore_index=0),
}
Json = Any


def network() -> list[nn.Module]:
    with weights_of(2):
        return [nn.Linear(4, 6), nn.Tanh(), nn.LSTM(6, 6), First(), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)]


def plain() -> list[nn.Module]:
    with weights_of(2):
        return [layer.double() for layer in (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, CLASSES))]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    return x, torch.tensor([0, 0, 0, 1, 2, 0, 1, 1, 0, 2])


def losses(rank: int, world: int, stages: int) -> Json:
    """Losses and gradients of steps whose replicas share the mini-batch unevenly."""
    found = {}
    for name, loss_fn in LOSSES.items():
        pipe = gpipe.GPipe(plain(), stages, 3, seed=SEED, driver="process")
        x, y = (part.split([4, 6])[rank // stages] if world > stages else part for part in data())
        loss = pipe.step(x, y, loss_fn)
        found[name] = [loss.item(), [p.grad.tolist() for p in pipe.parameters() if p.grad is not None]]
    return found


def ignored(rank: int, world: int) -> Json:
    """What each rank reports of a loss that leaves labels out."""
    pipe = gpipe.GPipe(plain(), world, 2, seed=SEED, driver="process")
    x, y = data()
    for _ in range(2):
        pipe.step(x, y - 100 * (y == 0), lambda output, target: -output.log_softmax(1)[target >= 0].mean())
    return [finding for finding in pipe.findings if finding.startswith("loss_fn: ")]


def norms(rank: int, world: int) -> Json:
    """What torch's own functions for norms are told, then the pipe's own norm."""
    pipe = gpipe.GPipe(plain(), world, 2, seed=SEED, driver="process")
    pipe.step(*data(), LOSSES["entropy"])
    told = [
        said(lambda: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)),
        said(lambda: nn.utils.clip_grad_norm_((p for p in pipe.parameters()), 1.0)),
        said(lambda: nn.utils.get_total_norm(p.grad for p in pipe.parameters() if p.grad is not None)),
    ]
    nn.utils.clip_grad_value_(pipe.parameters(), 100.0)
    return [told, float(pipe.clip_grad_norm_(100.0))]


def apart(rank: int, world: int, name: str) -> None:
    """Steps and clips where the last rank is at something else."""
    odd = rank == world - 1
    layers = [
        *plain()[:2],
        nn.Sequential(plain()[2], nn.Dropout(0.5 if odd and name == "layer" else 0.1)),
        plain()[3],
    ]
    pipe = gpipe.GPipe(layers, 2, 2, seed=SEED, driver="process")
    if odd and name == "seed":
        pipe.seed = SEED + 1
    with torch.autocast("cpu", torch.bfloat16, enabled=odd and name == "autocast"):
        pipe.step(*data(), LOSSES["entropy"])
    pipe.clip_grad_norm_(0.5 if odd and name == "max_norm" else 0.1, 1.0 if odd and name == "norm_type" else 2.0)


def lbfgs(rank: int, world: int, stages: int) -> Json:
    """What an optimizer that puts all parameters together says: given to, as a list of layers', and of a copy."""
    pipe = gpipe.GPipe(plain(), stages, 2, seed=SEED, driver="process")
    found = []
    for parameters in (pipe.parameters(), [p for layer in pipe for p in layer.parameters()]):
        optimizer = torch.optim.LBFGS(parameters, max_iter=2)
        found.append(said(lambda: optimizer.step(lambda: pipe.step(*data(), LOSSES["entropy"]))))  # noqa: B023
    copied = copy.deepcopy(pipe)
    optimizer = torch.optim.LBFGS(copied.parameters(), max_iter=2)
    found.append(said(lambda: optimizer.step(lambda: copied.step(*data(), LOSSES["entropy"]))))
    alone = torch.optim.LBFGS(nn.Linear(2, 1).parameters())
    alone.step(lambda: 0.0)
    return found


class Soap(torch.optim.Optimizer):
    """Steps in the eigenbasis of the second moments of whole matrices, which it keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    moments = self.state[weight].setdefault("moments", torch.eye(len(weight)))
                    moments.mul_(0.9).addmm_(weight.grad, weight.grad.T)
                    basis = torch.linalg.eigh(moments).eigenvectors
                    weight.sub_(basis @ (basis.T @ weight.grad).sign(), alpha=group["lr"])


OPTIMIZERS: dict[str, Any] = {
    "muon": partial(torch.optim.Muon, lr=0.02),
    "soap": Soap,
    "foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.02),
}


def matrices() -> list[nn.Module]:
    """Layers with matrices only, the first and the last but one tied."""
    with weights_of(2):
        linear = partial(nn.Linear, bias=False)
        layers = [linear(6, 6), nn.Tanh(), linear(6, 8), linear(8, 6), linear(6, 6), linear(6, CLASSES)]
    layers[4].weight = layers[0].weight
    return layers


def rows(replica: int, replicas: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 6, generator=generator), torch.randint(CLASSES, (12,), generator=generator)
    return x.chunk(replicas)[replica], y.chunk(replicas)[replica]


def whole_matrices(rank: int, world: int, stages: int, name: str, folder: str, first: int = 0) -> Json:
    """Two steps by an optimizer from a checkpoint of step `first`; then saves. The weights by their names."""
    with gpipe.GPipe(matrices(), stages, 3, seed=SEED, driver="process") as pipe:
        optimizer = OPTIMIZERS[name](pipe.parameters())
        if first:
            gpipe.load(folder, pipe, optimizer)
        for step in (first, first + 1):
            pipe.step(*rows(rank // stages, world // stages, step), F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        gpipe.save(folder, pipe, optimizer)
        return {key: weight.tolist() for key, weight in pipe.state_dict().items()}


def sharded_matrices(rank: int, world: int) -> Json:
    """What optimizers say to weights of which one is sharded and to the other alone, and AdamW to the sharded one."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "pp"))
    layers: list[nn.Module] = [nn.Linear(6, 6, bias=False), nn.Linear(6, CLASSES, bias=False)]
    pipe = gpipe.GPipe(layers, 1, 2, seed=SEED, mesh=mesh)
    fully_shard(next(pipe.children()), mesh=mesh["dp"])
    pipe.step(*rows(rank, world, 0), F.cross_entropy)
    sharded, whole = pipe.parameters()
    kinds: list[Any] = [torch.optim.Muon, torch.optim.Adafactor, transformers.optimization.Adafactor]
    before = [parameter.detach().clone() for parameter in (local_tensor(sharded), whole)]
    told = [said(kind([sharded, whole]).step) for kind in kinds]
    unchanged = all(map(torch.equal, before, (local_tensor(sharded), whole)))
    return [told, unchanged, said(torch.optim.AdamW([sharded]).step), *(said(kind([whole]).step) for kind in kinds)]


def released(rank: int, world: int) -> Json:
    """What is left of the user's modules: those on the meta device, and what using them says."""
    layers = network()
    model = nn.Sequential(*layers)
    pipe = gpipe.GPipe(model, world, 2, seed=SEED, driver="process")
    gone = sorted(name for name, tensor in model.state_dict().items() if tensor.is_meta)
    own = sorted(pipe.state_dict())
    told = [
        said(lambda: model(torch.ones(2, 4))),
        said(lambda: layers[2](torch.ones(2, 6))),
        said(lambda: gpipe.GPipe(model, world, 2)),
    ]
    again = said(lambda: gpipe.GPipe(model, world, 2, driver="process"))
    return {"gone": gone, "own": own, "told": told, "again": again}


def shared(rank: int, world: int) -> Json:
    """Weights that an own layer has too stay."""
    with weights_of(0):
        layers = [nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)]
    layers[2].weight = layers[0].weight
    pipe = gpipe.GPipe(layers, [1, 1, 1], 2, seed=0, driver="process")
    x = torch.arange(7)
    pipe.step(x, x, F.cross_entropy)
    return [[p.is_meta for p in layer.parameters()] for layer in layers]


def refused(rank: int, world: int) -> Json:
    """A construction that is refused leaves the user's modules as they are."""
    layers = plain()
    with suppress(ValueError, gpipe.RemoteError):
        gpipe.GPipe(layers, world, 2, ties=[("0.weight", "no")], driver="process")
    return [p.is_meta for p in nn.Sequential(*layers).parameters()]


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("mine")


def broken(rank: int, world: int) -> Json:
    gpipe.GPipe([*plain()[:3], Breaks()], world, 2, driver="process").step(*data(), LOSSES["entropy"])


def places(rank: int, world: int) -> Json:
    pipe = gpipe.GPipe(plain(), world, 2, driver="process")
    return [[said(partial(operator.getitem, pipe, at)) for at in range(len(pipe))], len(list(pipe))]


def asked(rank: int, world: int) -> Json:
    """What the user's own model says of gradients that other processes hold, and what can be done with it still."""
    layers = network()
    model = nn.Sequential(*layers)
    pipe = gpipe.GPipe(model, world, 2, seed=SEED, driver="process")
    optimizer = torch.optim.Adam(model.parameters())
    told = [
        said(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        said(lambda: [p.grad for p in model.parameters()]),
        said(lambda: [p.grad for p in copy.deepcopy(model).parameters()]),
        said(optimizer.step),
        said(model.zero_grad),
    ]
    for parameter in model.parameters():
        parameter.grad = None
    bytes_of = io.BytesIO()
    torch.save(model, bytes_of)
    bytes_of.seek(0)
    loaded = torch.load(bytes_of, weights_only=False)
    kinds = {type(p).__name__ for p in loaded.parameters()} | {type(t).__name__ for t in model.state_dict().values()}
    model.double().float()
    x, y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
    loss = pipe.step(x, y, F.cross_entropy)
    return {
        "told": told,
        "kinds": sorted(kinds),
        "loss": loss.item(),
        "grads": len([p.grad for p in pipe.parameters()]),
    }
