"""Implements `gpipe doctor`: prints what a bug report needs, and checks that pipes work on this machine."""

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

from gpipe.cli import exit_on_user_errors
from gpipe.cli.gpu.page import PARTS, examine
from gpipe.cli.gpu.page import QUICK as EVERY_IF_QUICK
from gpipe.recipes.options.training import OptionalPath, optional

GIB = 2**30
PREFIXES = ("CUDA_", "GLOO_", "GPIPE_", "HIP_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_")
"""Prefixes of environment variables that torch and its libraries read."""
DEVELOPMENT_EXTRAS = ("extra == 'dev'", "extra == 'docs'", "extra == 'bench'")

PART = f"With --gpu, run only these checks: {', '.join(PARTS)}. Other results are read from the folder."
QUICK = f"With --gpu, check only every {EVERY_IF_QUICK}th pipe, for a first impression."


def doctor(
    out: OptionalPath = None,
    gpu: bool = False,
    part: Annotated[tuple[str, ...], optional("NAME [NAME ...]", help=PART)] = (),
    quick: Annotated[bool, tyro.conf.arg(help=QUICK)] = False,
) -> None:
    """Prints versions, hardware and environment variables for a bug report, and checks that pipes work here.

    Args:
        out: Also write the output to this JSON file. With --gpu, the folder for the results. Default: gpu-results.
        gpu: Run the checks for accelerators instead. Each check takes several minutes. Prints one page with all
            results.
        part: Names of checks.
        quick: Whether to check fewer pipes.
    """
    unused = [name for name, value in (("--part", part), ("--quick", quick)) if value and not gpu]
    if unused:
        with exit_on_user_errors():
            raise ValueError(f"{', '.join(unused)}: no effect without --gpu. Add --gpu.")
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    environment = variables or {"variables": f"none with prefix {', '.join(PREFIXES)}"}
    environment["torchrun restarts"] = _restarts()
    facts = {"installed": _installed(), "machine": _machine(), "devices": _devices(), "environment": environment}
    if gpu:
        with exit_on_user_errors():
            passed = examine(out or Path("gpu-results"), part, facts, EVERY_IF_QUICK if quick else 1)
        sys.exit(0 if passed else 1)
    results = {name: _run_check(check) for name, check in CHECKS.items()}
    sections = {**facts, "checks": results}
    for title, lines in sections.items():
        print(title)
        for name, text in lines.items():
            print(f"    {name:<22}{text}")
    failed = [name for name, text in results.items() if text.startswith("FAILED")]
    print(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}" if failed else "All checks passed.")
    if out is not None:
        with exit_on_user_errors():
            out.write_text(json.dumps(sections, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


def _restarts() -> str:
    from gpipe.distributed.launcher import SEPARATE_STORES

    if os.environ.get(SEPARATE_STORES) == "1":
        return f"work, because {SEPARATE_STORES}=1"
    return f"fail by chance, because {SEPARATE_STORES} is not set. Set it to 1 if you use --max-restarts."


def _installed() -> dict[str, str]:
    import torch

    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built = ", ".join(f"{name} {number}" for name, number in kinds.items() if number)
    versions = {"Python": platform.python_version(), "gpipe": ""}
    versions["torch"] = f"{torch.__version__}, built for {built or 'CPUs'}"
    names = ["gpipe"]
    with suppress(PackageNotFoundError):  # gpipe may be on the path without being installed.
        lines = [line for line in requires("gpipe") or [] if not line.endswith(DEVELOPMENT_EXTRAS)]
        names += sorted({re.split(r"[^\w-]", line)[0] for line in lines} - {"gpipe", "torch"})
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _machine() -> dict[str, str]:
    models = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    memory = {line.split(":")[0]: line.split()[1] for line in _read("/proc/meminfo").splitlines() if line}
    total, free = (int(memory.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return {
        "system": platform.platform(),
        "processor": models[0].partition(": ")[2] if models else platform.processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} available to this process",
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
    devices = {}
    for index in range(torch.accelerator.device_count() if kind else 0):
        name = getattr(torch.get_device_module(kind), "get_device_name", lambda _: kind)(index)
        devices[f"{kind}:{index}"] = f"{name}, {torch.accelerator.get_memory_info(index)[1] / GIB:.1f} GiB"
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    return (devices or {"accelerators": "none found by torch"}) | {"between processes": ", ".join(backends)}


def _run_check(check: Callable[[], str]) -> str:
    """Returns the result of a check with its duration, or the error with its source line."""
    start = time.perf_counter()
    try:
        result = check()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"FAILED: {type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    return f"{result}, {time.perf_counter() - start:.1f} s"


def _verify_schedules() -> str:
    """Verifies convolutions, BatchNorm and dropout against the reference loop.

    Tries several schedules and values of K.
    """
    import gpipe
    from gpipe.cli.gpu.bits import images, loss_of

    settings = [(2, "gpipe"), (3, "1f1b"), (3, "zb_h1"), (2, "dualpipe_v")]
    for ranks, schedule in settings:
        layers, x, y = images()
        with gpipe.GPipe(layers, ranks, 4, schedule=schedule, devices=["cpu"] * ranks, driver="threads") as pipe:
            report = pipe.verify(x, y, loss_of, against="model")
        if report.differences or report.findings:
            raise ValueError(f"schedule={schedule!r}, partitions={ranks}: {report}")
    return f"{len(settings)} pipes are bitwise identical to the reference loop"


def _run_torchrun() -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.run([*torchrun, "-m", "gpipe.cli.doctor"], capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError([f"status {process.returncode}", *process.stderr.strip().splitlines()][-1])
    return f"trained one step, loss {float(process.stdout):.4f}"


def _save_and_load() -> str:
    from torch import nn

    import gpipe

    with tempfile.TemporaryDirectory() as folder, gpipe.GPipe([nn.Linear(4, 4)], 1, 1, driver="threads") as pipe:
        gpipe.load(gpipe.save(folder, pipe).wait(), pipe)
    return f"saved and loaded in {tempfile.gettempdir()}"


def _read_certificate() -> str:
    from gpipe.distributed.tls import identity

    certificate = identity()
    if certificate is None:
        return "off: GPIPE_TLS_CERT, GPIPE_TLS_KEY and GPIPE_TLS_CA are not set"
    return certificate.about


CHECKS: dict[str, Callable[[], str]] = {
    "reproducibility": _verify_schedules,
    "two processes": _run_torchrun,
    "checkpoint": _save_and_load,
    "TLS between hosts": _read_certificate,
}


def train_in_two_processes() -> None:
    """Trains one step in the processes that `_run_torchrun` starts, and prints the loss on rank 0."""
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
