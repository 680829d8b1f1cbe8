"""Defines the checks of `gpipe doctor --gpu` that need a checkout."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.cli.gpu.bits import compare, devices, has_nccl, images, in_processes, train_reference
from gpipe.cli.gpu.page import Finding
from gpipe.schedule.schedules import SCHEDULES
from tests.gpu.work import LAYERS, M, layers_of, medians, milliseconds, places, step_of, width_of_work

SLOWER = 1.1  # than torch's schedule of the same name: more is told as too slow
THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""torch's schedules by their names here."""
IN_A_V = ("zb_v", "dualpipe_v")
TOOL_SECONDS = 100
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--track-stream-ordered-races", "all")
RACECHECK = ("compute-sanitizer", "--tool", "racecheck")
BY_CUDA = {
    "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"
}  # memory that the tool knows, unlike torch's own pools
REPORTS = {
    "torch.cuda._sanitizer": r"CSAN detected a possible data race()",
    "memcheck": r"ERROR SUMMARY: (\d+) error",
    "racecheck": r"RACECHECK SUMMARY: (\d+) hazard",
}


def beside(every: int) -> Iterator[Finding]:
    """Compares a step over processes with torch's schedules of the same name."""
    if not has_nccl():
        yield Finding("not run", "torch's own schedules, which take two CUDA devices and NCCL")
        return
    width, ranks = width_of_work(devices()[0]), len(devices())
    yield from judge(in_processes(in_turns, ranks, width, max(M, 2 * ranks))[0])


def judge(seconds: Mapping[str, float]) -> Iterator[Finding]:
    yield Finding("measured", f"a step over processes: {milliseconds(seconds)}", dict(seconds))
    ratios = {name: seconds[name] / seconds[f"torch {name}"] for name in THEIRS}
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    verdict = "passed" if max(ratios.values()) <= SLOWER else "failed"
    yield Finding(verdict, f"of what torch's schedule of the same name takes: {said}; at most {SLOWER}", ratios)


def in_turns(rank: int, width: int, micro_batches: int) -> dict[str, float]:
    """Returns the seconds of a step with each schedule of torch and of gpipe, in one of several processes."""
    ranks, device = dist.get_world_size(), devices()[rank] if devices() else torch.device("cpu")
    x = torch.ones(micro_batches * width, width, device=device)
    steps: dict[str, Callable[[], object]] = {}
    for name in THEIRS:
        stages = ranks * SCHEDULES[name].stages_per_rank
        cuts = [LAYERS // stages] * stages
        cuts[-1] += LAYERS - sum(cuts)
        steps[name] = ours(name, cuts, x, micro_batches)
        steps[f"torch {name}"] = theirs(name, rank, ranks, cuts, x, micro_batches)
    return medians(steps, meet=dist.barrier)


def ours(name: str, cuts: Sequence[int], x: Tensor, micro_batches: int) -> Callable[[], object]:
    how: Any = {"schedule": name, "remat": "never", "seed": 0, "driver": "process"}
    pipe = gpipe.GPipe(layers_of(x.shape[1]), cuts, micro_batches, **how)

    def step() -> None:
        pipe.step(x, x, F.mse_loss)
        pipe.zero_grad()

    return step


def theirs(
    name: str, rank: int, ranks: int, cuts: Sequence[int], x: Tensor, micro_batches: int
) -> Callable[[], object]:
    from torch.distributed import pipelining  # slow to import, and of this part alone

    many = len(cuts)
    own = [rank] if many == ranks else [rank, many - 1 - rank if name in IN_A_V else ranks + rank]
    first = [sum(cuts[:stage]) for stage in own]
    layers = layers_of(x.shape[1])
    parts = [nn.Sequential(*layers[at : at + cuts[s]]).to(x.device) for at, s in zip(first, own, strict=True)]
    stages = [pipelining.PipelineStage(part, s, many, x.device) for part, s in zip(parts, own, strict=True)]
    loss = partial(_share_of_loss, micro_batches)
    made = getattr(pipelining, THEIRS[name])(
        stages if many > ranks else stages[0], micro_batches, loss, scale_grads=False
    )

    def step() -> None:
        last: dict[str, Any] = {"target": x, "losses": []} if many - 1 in own else {}
        made.step(*([x] if 0 in own else []), **last, return_outputs=False)
        for part in parts:
            part.zero_grad()

    return step


def _share_of_loss(micro_batches: int, output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) / micro_batches


def host(every: int) -> Iterator[Finding]:
    """Measures random numbers and memory pools, and whether ranks on one device need more hardware queues."""
    x = torch.ones(8, device=devices()[0])

    def draw(*, key: bool) -> None:
        with gpipe.rng_scope(0, 0, 0, 0) if key else torch.no_grad():
            for _ in range(100):
                F.dropout(x, 0.5)

    seconds = medians({"torch's own": partial(draw, key=False), "keyed": partial(draw, key=True)})
    draws = {name: each / 100 for name, each in seconds.items()}
    yield Finding("measured", f"a draw: {milliseconds(draws)}", draws)
    yield pools()
    if x.device.type != "cuda":
        yield Finding("not run", f"CUDA_DEVICE_MAX_CONNECTIONS, of which {x.device.type} knows nothing")
        return
    steps = {}
    for queues in ("8", "32"):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = queues  # for processes that begin, in which CUDA reads it once
        steps[queues] = in_processes(four_on_one, 1)[0]
    yield Finding("measured", f"K=4 on one device, CUDA_DEVICE_MAX_CONNECTIONS {milliseconds(steps)}", steps)


def pools() -> Finding:
    """Measures the memory that torch's pools, one per stream, reserve beyond the memory in use."""
    there = places()
    torch.accelerator.empty_cache()
    medians({"": step_of(there, width_of_work(there[0]), M, schedule="1f1b", remat="always")})
    stats = torch.accelerator.memory_stats(there[0])
    reserved, active = (int(stats[f"{which}_bytes.all.peak"]) for which in ("reserved", "active"))
    retries = int(stats.get("num_alloc_retries", 0))
    said = f"pools of memory reserve {reserved / active:.2f} of what is in use at most, and have {retries} retries"
    return Finding("measured", said, {"reserved": reserved, "active": active, "retries": retries})


def four_on_one(rank: int) -> float:
    first = places()[:1]
    return medians({"": step_of(first * 4, width_of_work(first[0]), M, schedule="1f1b", remat="never")})[""]


class Fresh(nn.Module):
    """Copies the output of a layer in a CUDA graph, because the graph reuses its memory."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).clone()


def graphs(every: int) -> Iterator[Finding]:
    """Compares layers as CUDA graphs with the layers themselves."""
    first = devices()[0]
    if first.type != "cuda":
        yield Finding("not run", f"CUDA graphs, which {first.type} has not")
        return
    yield from beside_graphs(first, max(128, width_of_work(first) // 4), torch.cuda.make_graphed_callables)


def beside_graphs(device: torch.device, width: int, graphed: Callable[..., Any]) -> Iterator[Finding]:
    """Checks pipes of CUDA graphs.

    A graph has memory for the activations of one forward pass. So only remat="always" with whole backward passes is
    correct.
    """
    x = torch.randn(M * 16, width, generator=torch.Generator().manual_seed(0)).to(device)

    def pipe_of(schedule: str, remat: str, *, wrapped: bool) -> gpipe.GPipe:
        torch.manual_seed(0)
        layers: list[nn.Module] = [
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(device) for _ in range(4)
        ]
        if wrapped:
            samples = [torch.ones(16, width, device=device, requires_grad=at > 0) for at in range(4)]
            layers = [Fresh(graphed(layer, (one,))) for layer, one in zip(layers, samples, strict=True)]
        how: Any = {"schedule": schedule, "remat": remat}
        pipe = gpipe.GPipe(layers, [2, 2], M, devices=[device] * 2, seed=3, **how)
        pipe.verify_steps = remat != "never"  # without remat the bits differ, which the first step would report
        return pipe

    for schedule, remat in (("gpipe", "always"), ("1f1b", "always"), ("1f1b", "never")):
        steps, left = {}, []
        for name, wrapped in (("without", False), ("with", True)):
            pipe = pipe_of(schedule, remat, wrapped=wrapped)
            for parameter in pipe.parameters():  # else `.grad` would be the graph's own memory, and written over
                parameter.grad = torch.zeros_like(parameter)
            losses = [pipe.step(x, x, F.mse_loss) for _ in range(2)]
            left.append([*losses, *(p.grad for p in pipe.parameters() if p.grad is not None)])
            steps[name] = partial(pipe.step, x, x, F.mse_loss)
        same = len(left[0]) == len(left[1]) and all(map(torch.equal, *left))
        left.clear()
        seconds = medians(steps)
        verdict = "measured" if remat == "never" else "passed" if same else "failed"
        said = f"{schedule}, remat {remat}: {'the same' if same else 'other'} bits, {milliseconds(seconds)}"
        yield Finding(verdict, said, seconds)


def few(every: int) -> Iterator[Finding]:
    """Runs a few pipes in lockstep, for tools that slow down everything or observe one thread."""
    there = devices()[:1] * 2
    ways = [{"schedule": name, "driver": "lockstep"} for name in ("1f1b", "zb_v")]
    yield from compare("in lockstep", images, partial(train_reference, images, there[0]), there, ways)


def sanitizer(every: int) -> Iterator[Finding]:
    """Runs a few pipes under tools that find unordered accesses and memory errors."""
    if devices()[0].type != "cuda":
        yield Finding("not run", "torch.cuda._sanitizer and compute-sanitizer, which are CUDA's")
        return
    yield under("torch.cuda._sanitizer", (), {"TORCH_CUDA_SANITIZER": "1"})
    if shutil.which("compute-sanitizer") is None:
        yield Finding("not run", "compute-sanitizer, which is not on PATH: the CUDA toolkit has it")
        return
    yield under("memcheck", MEMCHECK, BY_CUDA)
    yield under("racecheck", RACECHECK, {})


def under(name: str, tool: Sequence[str], settings: Mapping[str, str]) -> Finding:
    """Runs a few pipes under a tool, and returns a finding with the number of problems that it reports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *tool,
            sys.executable,
            "-m",
            "gpipe.cli.gpu.page",
            "tests.gpu.parts:few",
            f"{folder}/few.json",
            "1",
        ]
        try:
            done = subprocess.run(
                command,
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TOOL_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return Finding("not run", f"{name}: not done after {TOOL_SECONDS} s")
    print(done.stdout, flush=True)
    found = sum(int(number or 1) for number in re.findall(REPORTS[name], done.stdout))
    if found or done.returncode:
        last = done.stdout.strip().splitlines()[-1:]
        return Finding("failed", f"{name}: {found} reports, status {done.returncode}, {' '.join(last)}"[:300])
    return Finding("passed", f"{name}: 0 reports")


def tests(every: int) -> Iterator[Finding]:
    """Runs tests/gpu with pytest, and reports failed tests."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-m", "gpu", "tests/gpu"]
        subprocess.run([*command, f"--junitxml={file}"], check=False)
        cases = [*ElementTree.parse(file).getroot().iter("testcase")]
    failed = [
        case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skips = Counter(skip.get("message") for case in cases if (skip := case.find("skipped")) is not None)
    for name in failed[:5]:
        yield Finding("failed", f"{name}")
    passed = len(cases) - len(failed) - skips.total()
    verdict = "failed" if failed else "passed" if passed else "error"
    yield Finding(verdict, f"{passed} passed, {len(failed)} failed", {"failed": failed})
    for reason, count in skips.items():
        yield Finding("not run", f"{count} skipped: {reason}")
