"""The command `gpipe doctor`: what a bug report needs, and what this machine can do, on one page."""

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import tyro

from gpipe.cli import ending_by_mistakes
from gpipe.cli.gpu.page import PARTS, examine
from gpipe.cli.gpu.page import QUICK as QUICKLY

GIB = 2**30
SPEAK = ("CUDA_", "GLOO_", "GPIPE_", "HIP_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_")
"""What names of environment variables begin with by which torch and its libraries are told something."""
OF_DEVELOPERS = ("extra == 'dev'", "extra == 'docs'", "extra == 'bench'")

OUT = "Writes the page as JSON too; with --gpu a folder of results, by default gpu-results."
GPU = "Tries what only accelerators can show, in parts of minutes, and prints one page of it."
PART = f"With --gpu: these parts alone, of {', '.join(PARTS)}; the page has what others left in the folder."
QUICK = "With --gpu: a seventh of the pipes, for a first look."


def doctor(
    out: Annotated[Path | None, tyro.conf.arg(help=OUT)] = None,
    gpu: Annotated[bool, tyro.conf.arg(help=GPU)] = False,
    part: Annotated[tuple[str, ...], tyro.conf.arg(help=PART)] = (),
    quick: Annotated[bool, tyro.conf.arg(help=QUICK)] = False,
) -> None:
    """Says what is installed, what this machine has, and whether pipes work here; for a bug report, too.

    Status 1 if something does not work.
    """
    if (part or quick) and not gpu:
        with ending_by_mistakes():
            raise ValueError("--part and --quick are of --gpu: give that too")
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SPEAK)}
    environment = told or {"variables": f"none that begin with {', '.join(SPEAK)}"}
    found = {"installed": _installed(), "machine": _machine(), "devices": _devices(), "environment": environment}
    if gpu:
        with ending_by_mistakes():
            held = examine(out or Path("gpu-results"), part, found, QUICKLY if quick else 1)
        sys.exit(0 if held else 1)
    tried = {name: _try(check) for name, check in CHECKS.items()}
    for title, lines in {**found, "tried here": tried}.items():
        print(title)
        for name, said in lines.items():
            print(f"    {name:<22}{said}")
    if out is not None:
        out.write_text(json.dumps({**found, "tried here": tried}, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, said in tried.items() if said.startswith("FAILED")]
    print(f"{len(failed)} of {len(tried)} failed: {', '.join(failed)}" if failed else "All that was tried works.")
    sys.exit(1 if failed else 0)


def _installed() -> dict[str, str]:
    import torch

    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built = ", ".join(f"{name} {number}" for name, number in kinds.items() if number)
    found = {"Python": platform.python_version(), "gpipe": ""}
    found["torch"] = f"{torch.__version__}, built for {built or 'CPUs'}"
    names = ["gpipe"]
    with suppress(PackageNotFoundError):  # not installed, but on the path
        wanted = [line for line in requires("gpipe") or [] if not line.endswith(OF_DEVELOPERS)]
        names += sorted({re.split(r"[^\w-]", line)[0] for line in wanted} - {"gpipe", "torch"})
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _machine() -> dict[str, str]:
    named = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    memory = {line.split(":")[0]: line.split()[1] for line in _read("/proc/meminfo").splitlines() if line}
    total, free = (int(memory.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return {
        "system": platform.platform(),
        "processor": named[0].partition(": ")[2] if named else platform.processor(),
        "cores": f"{len(os.sched_getaffinity(0))} for this process, of {os.cpu_count()}",
        "memory": f"{total / GIB:.1f} GiB, {free / GIB:.1f} available",
        "shared memory": f"{shared / GIB:.1f} GiB free in /dev/shm",
        "open files": f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} at most",
    }


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace") if os.path.exists(path) else ""


def _devices() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    kind = torch.accelerator.current_accelerator(check_available=True)
    found = {}
    for index in range(torch.accelerator.device_count() if kind else 0):
        name = getattr(torch.get_device_module(kind), "get_device_name", lambda _: kind)(index)
        found[f"{kind}:{index}"] = f"{name}, {torch.accelerator.get_memory_info(index)[1] / GIB:.1f} GiB"
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    return (found or {"accelerators": "none that torch sees"}) | {"between processes": ", ".join(backends)}


def _try(check: Callable[[], str]) -> str:
    """What a check says, and its seconds; if it fails, with what."""
    start = time.perf_counter()
    try:
        said = check()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"FAILED: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return f"{said}, {time.perf_counter() - start:.1f} s"


def _same_bits() -> str:
    """Verifies convolutions, BatchNorm and dropout against the reference loop, for several schedules and K."""
    import gpipe
    from gpipe.cli.gpu.bits import images, loss_of

    ways = [(2, "gpipe"), (3, "1f1b"), (3, "zb_h1"), (2, "dualpipe_v")]
    for ranks, schedule in ways:
        layers, x, y = images()
        with gpipe.GPipe(layers, ranks, 4, schedule=schedule, devices=["cpu"] * ranks) as pipe:
            report = pipe.verify(x, y, loss_of, against="model")
        if report.differences or report.findings:
            raise ValueError(f"schedule={schedule!r}, partitions={ranks}: {report}")
    return f"equal in {len(ways)} ways"


def _processes() -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, "-m", "gpipe.cli.doctor"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError([f"status {done.returncode}", *done.stderr.strip().splitlines()][-1])
    return f"trained a step, to a loss of {float(done.stdout):.4f}"


def _files() -> str:
    from torch import nn

    import gpipe

    with tempfile.TemporaryDirectory() as folder, gpipe.GPipe([nn.Linear(4, 4)], 1, 1) as pipe:
        gpipe.load(gpipe.save(folder, pipe).wait(), pipe)
    return f"saved and loaded in {tempfile.gettempdir()}"


def _tls() -> str:
    from gpipe.distributed.tls import identity

    own = identity()
    return "off: GPIPE_TLS_CERT, GPIPE_TLS_KEY and GPIPE_TLS_CA are not set" if own is None else own.about


CHECKS: dict[str, Callable[[], str]] = {
    "same bits": _same_bits,
    "two processes": _processes,
    "checkpoint": _files,
    "TLS between hosts": _tls,
}


def train_in_two_processes() -> None:
    """Trains a step in the processes that `_processes` has torchrun start; prints the loss, on rank 0."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import gpipe

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    layers = [lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 4)]
    with gpipe.GPipe(layers, 2, 4, seed=0, driver="process") as pipe:
        loss = pipe.step(torch.ones(8, 8), torch.zeros(8, 4), nn.functional.mse_loss)
    if dist.get_rank() == 0:
        print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    train_in_two_processes()
