"""The same bits: pipes beside the plain loop on the same device, wherever their ranks are, in processes too."""

import hashlib
import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import gpipe
from gpipe import models
from gpipe.cli.gpu.page import Finding
from gpipe.recipes.prepare import one_thread
from gpipe.schedule.schedules import SCHEDULES

SEED, STEPS, LAYERS, M = 3, 2, 8, 4
LIMIT = timedelta(seconds=480)  # of a message, below that of a part
Left = dict[str, Tensor]  # what a training leaves: losses, gradients, parameters and buffers, on the CPU
Net = Callable[[], tuple[list[nn.Module], Tensor, Tensor]]  # makes eight layers, inputs, targets, unevenly cut


def devices() -> list[torch.device]:
    """The accelerators, eight at most."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, at) for at in range(min(8, torch.accelerator.device_count()))] if kind else []


def images() -> tuple[list[nn.Module], Tensor, Tensor]:
    """Convolutions, BatchNorm, dropout."""
    torch.manual_seed(0)
    ahead = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)]
    behind = [nn.Dropout(0.3), nn.BatchNorm2d(8), nn.Sequential(nn.ReLU(), nn.Flatten()), nn.Linear(8 * 64, 5)]
    return [*ahead, *behind], torch.randn(9, 3, 8, 8), torch.randint(5, (9,))


def text(*, tied: bool = False) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Attention and dropout."""
    torch.manual_seed(0)
    words = torch.randint(17, (9, 6))
    return models.transformer_lm(6, 32, 64, heads=2, vocab=17, tied=tied, dropout=0.1), words, words.flip(1)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Of classes, or of words."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def train_plainly(net: Net, device: torch.device) -> Left:
    """A plain loop over micro-batches; what it has the CPU do, on one thread, as ranks do."""
    layers, x, y = net()
    whole = nn.Sequential(*layers).to(device)
    parts = list(zip(x.to(device).tensor_split(M), y.to(device).tensor_split(M), strict=True))

    def step(number: int) -> Tensor:
        total = torch.zeros((), device=device)
        for m, (value, target) in enumerate(parts):
            share = len(value) / len(x)
            for index, layer in enumerate(layers):
                with gpipe.rng_scope(SEED, number, index, m):
                    value = layer(value)
            loss = loss_of(value, target)
            loss.backward(torch.full_like(loss, share))
            total = total + loss.detach() * share
        return total

    with one_thread():
        return _left(whole, step)


def train(net: Net, there: Sequence[torch.device], **way: Any) -> Left:
    """A pipe with a rank on each device."""
    layers, x, y = net()
    x, y = x.to(there[0]), y.to(there[-1])
    if way.get("driver") != "process":  # which knows its device
        way["devices"] = list(there)
    planned = {name: way.pop(name) for name in ("schedule", "remat") if name in way}
    costs = [1.0] * len(layers)
    plan = gpipe.find_plan(layers, None, len(there), micro_batches=M, costs=costs, balance="variance", **planned)
    with gpipe.GPipe(layers, plan=plan, seed=SEED, **way) as pipe:
        return _left(pipe, lambda _: pipe.step(x, y, loss_of))


def _left(module: nn.Module, step: Callable[[int], Tensor]) -> Left:
    optimizer, left = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), Left()
    for number in range(STEPS):
        optimizer.zero_grad()
        left[f"loss {number}"] = step(number).cpu()
        optimizer.step()
    left |= {f"{name}.grad": p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    return left | {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def compare(
    what: str, net: Net, expected: Callable[[], Left], there: Sequence[torch.device], ways: Sequence[dict[str, Any]]
) -> Iterator[Finding]:
    """Whether pipes leave what is expected, to the last bit; one that raises is told, and the next one tried."""
    wrong = []
    torch.use_deterministic_algorithms(True)  # to be warned alone would leave attention on GPUs as it is
    try:
        bits = expected()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        yield Finding("measured", f"{what}: {error}"[:200])
        torch.use_deterministic_algorithms(True, warn_only=True)
        bits = expected()
    for way in ways:
        try:
            left = train(net, there, **way)
            apart = [name for name in bits if not torch.equal(left[name], bits[name])]
            said = f"{len(apart)} of {len(bits)} tensors differ: {', '.join(apart[:3])} ..." if apart else ""
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"[:200]
        wrong += [f"{' '.join(map(str, way.values()))}: {said}"] if said else []
    for line in wrong[:3]:
        yield Finding("fell short", f"{what}: {line}")
    verdict, right = "fell short" if wrong else "held", len(ways) - len(wrong)
    yield Finding(verdict, f"{what}: {right} of {len(ways)} pipes", {"pipes": len(ways), "wrong": wrong})


def fitting(ranks: int) -> list[str]:
    """The schedules for so many ranks, of these layers and micro-batches."""
    fit = [name for name, schedule in SCHEDULES.items() if schedule.stages_per_rank * ranks <= LAYERS]
    return [name for name in fit if name != "dualpipe_v" or 2 * ranks <= M]


def bits(every: int) -> Iterator[Finding]:
    """Every schedule, remat and driver, two ranks on the first device."""
    there = devices()[:1] * 2
    each = product(SCHEDULES, ("always", "except_last", "never"), ("threads", "lockstep"))
    ways = [{"schedule": name, "remat": remat, "driver": driver} for name, remat, driver in each][::every]
    plain = partial(train_plainly, images, there[0])
    yield from compare("convolutions, BatchNorm, dropout, as in the plain loop", images, plain, there, ways)
    tied = partial(text, tied=True)
    alone = partial(train, tied, there[:1])  # shared weights are added up by layer, unlike in the plain loop
    yield from compare("attention, tied weights, as with K=1", tied, alone, there, ways)


def shared(every: int) -> Iterator[Finding]:
    """More and more ranks on one device."""
    first = devices()[0]
    each = product(("gpipe", "1f1b", "zb_h1"), ("always", "never"))
    ways = [{"schedule": name, "remat": remat} for name, remat in each][::every]
    for ranks in (1, 2, 4, 8):
        yield from compare(f"K={ranks} on {first}", text, partial(train_plainly, text, first), [first] * ranks, ways)


def several(every: int) -> Iterator[Finding]:
    """A rank on each device, inputs on the first, targets on the last; first torch's own copies between them."""
    there, given = devices(), torch.arange(2**20)
    if len(there) < 2:
        yield Finding("not run", f"it takes two accelerators, and there is {there[0]} alone")
        return
    broken = [f"{a} to {b}" for a, b in product(there, there) if not given.to(a).to(b).cpu().equal(given)]
    if broken:
        yield Finding("fell short", f"torch's own copies arrive with other bits: {', '.join(broken)}")
    ways = [{"schedule": name, "remat": remat} for name in fitting(len(there)) for remat in ("always", "never")]
    for name, net in (("images", images), ("text", text)):
        plain = partial(train_plainly, net, there[0])
        yield from compare(f"{name}, K={len(there)} on as many devices", net, plain, there, ways[::every])


def has_nccl() -> bool:
    """Whether torch has it here, for two devices or more."""
    return torch.cuda.is_available() and len(devices()) > 1 and dist.is_nccl_available()


def nccl(every: int) -> Iterator[Finding]:
    """A process for each device, by several schedules."""
    there = devices()
    if len(there) < 2:
        yield Finding("not run", f"it takes two accelerators, and there is {there[0]} alone")
        return
    names = fitting(len(there))[::every]
    torch.use_deterministic_algorithms(True)
    expected = _digests(train(text, there[:1]))
    told = in_processes(_train, len(there), names)
    way = f"{len(there)} processes over {'NCCL' if has_nccl() else 'gloo and the memory of the host'}"
    right = []
    for name in names:
        found = {tensor: digest for rank in told for tensor, digest in rank[name].items()}
        apart = [tensor for tensor, digest in expected.items() if found.get(tensor) != digest]
        right += [] if apart else [name]
        if apart:
            yield Finding("fell short", f"{way}, {name}: {len(apart)} of {len(expected)} tensors differ: {apart[0]}")
    yield Finding("held" if right else "fell short", f"{way}, as one process: {', '.join(right) or 'none'}")
    if not has_nccl():
        yield Finding("not run", f"NCCL, which {there[0].type} has not")


def _train(rank: int, names: list[str]) -> dict[str, dict[str, str]]:
    """What this process has in the end, by schedule: losses, and tensors of its own layers."""
    torch.use_deterministic_algorithms(True)
    there = [devices()[rank]] * dist.get_world_size()
    return {name: _digests(train(text, there, driver="process", schedule=name)) for name in names}


def _digests(left: Left) -> dict[str, str]:
    each = {name: tensor.contiguous().view(-1).view(torch.uint8).numpy() for name, tensor in left.items()}
    return {name: hashlib.sha256(data.tobytes()).hexdigest() for name, data in each.items()}


def in_processes(job: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """What a job gives, as JSON, in processes of one group, each with its own device."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_enter, (count, folder, job, arguments), count)
        return [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(count)]


def _enter(rank: int, count: int, folder: str, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if there := devices():
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{there[rank].type}:{'nccl' if has_nccl() else 'gloo'}"
    dist.init_process_group(backend, f"file://{folder}/meeting", LIMIT, rank=rank, world_size=count)
    Path(folder, str(rank)).write_text(json.dumps(job(rank, *arguments)), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # a process group that hangs in its end is none of this
