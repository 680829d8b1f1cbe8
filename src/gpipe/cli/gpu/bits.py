"""The same bits: pipes beside the plain loop on the same device, wherever their ranks are."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import models
from gpipe.cli.gpu.page import Finding
from gpipe.schedule.schedules import SCHEDULES

SEED, STEPS, LAYERS, M = 3, 2, 8, 4
Left = dict[str, Tensor]
"""What a training leaves: losses, gradients, parameters and buffers, on the CPU."""
Net = Callable[[], tuple[list[nn.Module], Tensor, Tensor]]
"""Makes eight layers, inputs and targets: micro-batches are uneven."""


def devices() -> list[torch.device]:
    """The accelerators, eight at most."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, at) for at in range(min(8, torch.accelerator.device_count()))] if kind else []


def images() -> tuple[list[nn.Module], Tensor, Tensor]:
    """Convolutions, BatchNorm, dropout."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Dropout(0.3),
        nn.BatchNorm2d(8),
        nn.Sequential(nn.ReLU(), nn.Flatten()),
        nn.Linear(8 * 64, 5),
    ]
    return layers, torch.randn(9, 3, 8, 8), torch.randint(5, (9,))


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

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _left(whole, step)
    finally:
        torch.set_num_threads(threads)


def train(net: Net, there: Sequence[torch.device], **way: Any) -> Left:
    """A pipe with a rank on each device."""
    layers, x, y = net()
    x, y = x.to(there[0]), y.to(there[-1])
    if way.get("driver") != "process":  # which knows its device
        way["devices"] = list(there)
    with gpipe.GPipe(layers, len(there), M, seed=SEED, costs=[1] * len(layers), **way) as pipe:
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
    ways = [
        {"schedule": schedule, "remat": remat, "driver": driver}
        for schedule, remat, driver in product(SCHEDULES, ("always", "except_last", "never"), ("threads", "lockstep"))
    ][::every]
    plain = partial(train_plainly, images, there[0])
    yield from compare("convolutions, BatchNorm, dropout, as in the plain loop", images, plain, there, ways)
    tied = partial(text, tied=True)
    alone = partial(train, tied, there[:1])  # shared weights are added up by layer, unlike in the plain loop
    yield from compare("attention, tied weights, as with K=1", tied, alone, there, ways)


def shared(every: int) -> Iterator[Finding]:
    """More and more ranks on one device."""
    first = devices()[0]
    ways = [
        {"schedule": schedule, "remat": remat}
        for schedule, remat in product(("gpipe", "1f1b", "zb_h1"), ("always", "never"))
    ][::every]
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
    ways = [{"schedule": name, "remat": remat} for name, remat in product(fitting(len(there)), ("always", "never"))][
        ::every
    ]
    for name, net in (("images", images), ("text", text)):
        plain = partial(train_plainly, net, there[0])
        yield from compare(f"{name}, K={len(there)} on as many devices", net, plain, there, ways)
