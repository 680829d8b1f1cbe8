"""Checks the time and the memory of steps on any device."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from gpipe.cli.gpu.bits import devices
from gpipe.cli.gpu.page import Finding
from tests.support.planned import pipe_by_costs

LAYERS, M = 16, 8
PRODUCT_SECONDS = 3e-4  # of a matrix product, at most: layers are as wide as it allows
WIDTHS = (128, 256, 512, 1024, 2048)
AHEAD = 2.0
"""Above what a plan says a rank may hold the inside of so many micro-batches: what is queued, what kernels need."""
LEAD = 1.2  # of what 1F1B holds with M=8, so much may be with M=32: the host is held back


def speed(every: int) -> Iterator[Finding]:
    """Compares the time of a step with the reference loop on one device, and measures steps without work."""
    there = places()
    width, m = width_of_work(there[0]), max(M, 2 * len(there))
    steps = {"plain loop": plain_step(there[0], width, m)}
    for name in ("gpipe", "1f1b", "zb_h1", "zb_v"):
        steps[name] = step_of(there, width, m, schedule=name, remat="never")
    seconds = medians(steps | {"gpipe with remat": step_of(there, width, m)})
    where = f"K={len(there)} on {len(set(there))} device{'s' * (len(set(there)) > 1)}, M={m}, width {width}"
    yield Finding("measured", f"a step, {where}: {milliseconds(seconds)}", seconds)
    empty = {f"remat {remat}": step_of(there, 8, 16, schedule="1f1b", remat=remat) for remat in ("never", "always")}
    cells = {remat: each / (16 * len(there)) for remat, each in medians(empty).items()}
    yield Finding("measured", f"the host's own time, of a micro-batch at a stage: {milliseconds(cells)}", cells)


def memory(every: int) -> Iterator[Finding]:
    """Compares the peak memory of a step with the plan, by schedule, and checks that it does not grow with M."""
    there = places()
    width = width_of_work(there[0])
    plans = {name: _plan(there, width, name) for name in ("gpipe", "1f1b", "zb_h1", "interleaved", "zb_v")}
    small = gpipe.Device(memory=0.6 * max(plans["gpipe"].peak_bytes))
    plans["gpipe with remat"] = _plan(there, width, "gpipe", small)
    above = {name: _above(plan, there, width) for name, plan in plans.items()}
    said = ", ".join(f"{name} {each:.2f}" for name, each in above.items())
    verdict = "passed" if max(above.values()) <= AHEAD else "failed"
    yield Finding(verdict, f"micro-batches that a rank holds above its plan: {said}; at most {AHEAD:g}", above)
    few, many = (sum(held_in(step_of(there, width, m, schedule="1f1b", remat="never"))) for m in (M, 4 * M))
    said = f"1f1b with M={4 * M} holds {many / few:.2f} of what it holds with M={M}; at most {LEAD}"
    yield Finding("passed" if many <= LEAD * few else "failed", said, {"bytes": [few, many]})


def places() -> list[torch.device]:
    """Returns one device per rank, or the only device twice."""
    return devices() if len(devices()) > 1 else devices() * 2


def width_of_work(device: torch.device) -> int:
    """Returns the largest width of square layers whose matrix product takes at most PRODUCT_SECONDS."""
    widest = WIDTHS[0]
    for width in WIDTHS:
        matrix = torch.ones(width, width, device=device)
        if medians({"": partial(torch.mm, matrix, matrix)})[""] > PRODUCT_SECONDS:
            break
        widest = width
    return widest


def layers_of(width: int) -> list[nn.Module]:
    """Returns layers of one size, with the same weights in each process."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]


def step_of(there: Sequence[torch.device], width: int, micro_batches: int, **how: Any) -> Callable[[], object]:
    """Returns a function that runs a step of a pipe and clears the gradients."""
    cuts: dict[str, Any] = {"partitions": len(there), "costs": [1] * LAYERS}
    make: Any = gpipe.GPipe if "plan" in how else partial(pipe_by_costs, **cuts)
    pipe = make(layers_of(width), micro_batches=micro_batches, devices=list(there), **how)
    x, y = (torch.ones(micro_batches * width, width, device=device) for device in (there[0], there[-1]))

    def step() -> None:
        pipe.step(x, y, F.mse_loss)
        pipe.zero_grad()

    return step


def plain_step(device: torch.device, width: int, micro_batches: int) -> Callable[[], object]:
    """Returns a function that runs the same step with the reference loop."""
    whole = nn.Sequential(*layers_of(width)).to(device)
    x = torch.ones(micro_batches * width, width, device=device)

    def step() -> None:
        for part in x.tensor_split(micro_batches):
            (F.mse_loss(whole(part), part) / micro_batches).backward()
        whole.zero_grad()

    return step


def medians(steps: Mapping[str, Callable[[], object]], meet: Callable[[], object] = list) -> dict[str, float]:
    """Returns the median seconds of steps that take turns. The first two rounds do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(7):
        for name, step in steps.items():
            synchronize()
            meet()
            begin = time.perf_counter()
            step()
            synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return {name: median(each[2:]) for name, each in seconds.items()}


def milliseconds(seconds: Mapping[str, float]) -> str:
    """Formats seconds by name."""
    return ", ".join(f"{name} {1e3 * each:.3g}" for name, each in seconds.items()) + " ms"


def _plan(there: Sequence[torch.device], width: int, schedule: str, each: gpipe.Device | None = None) -> gpipe.Plan:
    with torch.device("meta"):
        layers = layers_of(width)
    settled: dict[str, Any] = {"partitions": len(there), "micro_batches": M, "schedule": schedule}
    x = torch.ones(M * width, width)
    return gpipe.find_plan(layers, x, [each or gpipe.Device()] * len(there), **settled, optimizer_numbers=0)


def _above(plan: gpipe.Plan, there: Sequence[torch.device], width: int) -> float:
    """Returns by how much memory a rank exceeds its plan, in activations of a micro-batch, on the worst device."""
    excess = dict(zip(devices(), held_in(step_of(there, width, M, plan=plan)), strict=True))
    for device, peak in zip(there, plan.peak_bytes, strict=True):
        excess[device] -= peak
    for count, rank in zip(plan.layers_per_partition, plan.program.rank_of, strict=True):
        excess[there[rank]] += count * 4 * (width * width + width)  # weights, which are there between steps
    inside = LAYERS / len(there) * 2 * 4 * width * width  # of each layer two tensors
    return max(excess[device] / there.count(device) for device in there) / inside


def held_in(step: Callable[[], object]) -> list[int]:
    """Returns the peak bytes on each device in a step, relative to the bytes between steps.

    Memory that is freed but still in use by a stream counts.
    """
    step()
    step()
    synchronize()
    before = [_active(device, "current") for device in devices()]
    for device in devices():
        torch.accelerator.reset_peak_memory_stats(device)
    step()
    synchronize()
    return [_active(device, "peak") - base for device, base in zip(devices(), before, strict=True)]


def _active(device: torch.device, which: str) -> int:
    return int(torch.accelerator.memory_stats(device)[f"active_bytes.all.{which}"])


def synchronize() -> None:
    """Waits for all devices."""
    for device in devices():
        torch.accelerator.synchronize(device)
