"""Measures processor time and page faults of a step by allocator setting: `python -m bench.faults [WORKLOAD]`.

By default, glibc returns freed memory to the system, and the next step takes it again, page by page. With `KEPT`,
glibc keeps freed memory. Each kind of step runs in turns with the others in one process. In the last kind, two
processes run one partition each. The machine may be busy: read processor time and page faults, not wall time.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from resource import RUSAGE_SELF, getrusage
from statistics import median

import torch
from torch import nn

import gpipe
from bench.machine import facts
from bench.report import describe, table, write
from bench.workloads import WORKLOADS

KEPT = {"MALLOC_MMAP_THRESHOLD_": f"{2**25}", "MALLOC_TRIM_THRESHOLD_": f"{2**33}"}
"""Chunks up to 32 MiB, the most that glibc allows, come from memory that it keeps up to 8 GiB."""
SETTINGS: dict[str, dict[str, str]] = {"default": {}, "kept": KEPT}
SCHEDULES = ("gpipe", "1f1b")
Used = tuple[float, float, float]  # CPU seconds, those of the system, and page faults of a step


def steps_of(workload: str, *, processes: bool) -> dict[str, Callable[[], object]]:
    work = WORKLOADS[workload]
    (x, y), m = work.data(), work.micro_batches

    def plain(model: nn.Module) -> None:
        for a, b in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            (work.loss_fn(model(a), b) / m).backward()
        model.zero_grad()

    def piped(pipe: gpipe.GPipe) -> None:
        pipe.step(x, y, work.loss_fn)
        pipe.zero_grad()

    def pipe(schedule: str, driver: str) -> gpipe.GPipe:
        layers = work.layers()
        cuts = [len(layers) // 2, len(layers) - len(layers) // 2]
        return gpipe.GPipe(layers, cuts, m, schedule=schedule, driver=driver, seed=0, remat="never")

    drivers = {"process": "two processes"} if processes else {"lockstep": "lockstep", "threads": "threads"}
    steps: dict[str, Callable[[], object]] = {}
    if processes:
        torch.distributed.init_process_group("gloo")
    else:
        steps["plain loop"] = partial(plain, nn.Sequential(*work.layers()))
    for driver, title in drivers.items():
        for schedule in SCHEDULES:
            steps[f"{title}, {schedule}"] = partial(piped, pipe(schedule, driver))
    return steps


def serve(workload: str, rounds: int, *, processes: bool) -> None:
    """Prints what each step of each kind used, as JSON."""
    torch.set_num_threads(1)
    steps = steps_of(workload, processes=processes)
    used: dict[str, list[Used]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            before = getrusage(RUSAGE_SELF)
            step()
            after = getrusage(RUSAGE_SELF)
            user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
            if turn > 1:
                used[name].append((user + system, system, after.ru_minflt - before.ru_minflt))
    print(json.dumps(used))


def measure(workload: str, rounds: int, setting: dict[str, str], processes: int) -> dict[str, list[Used]]:
    """Runs `serve` in one or several processes. Returns the sum over the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | setting
    if processes > 1:
        environment |= {"WORLD_SIZE": f"{processes}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    command = [sys.executable, "-W", "ignore", "-m", "bench.faults", workload, "--rounds", f"{rounds}", "--serve"]
    running = [
        subprocess.Popen(command, env=environment | {"RANK": f"{rank}"}, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    answers = [json.loads(process.communicate()[0]) for process in running]
    return {
        name: [tuple(map(sum, zip(*each, strict=True))) for each in zip(*(a[name] for a in answers), strict=True)]  # type: ignore[misc]  # three numbers
        for name in answers[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("workload", nargs="?", default="conv", choices=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=2, help="how often the settings take turns")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.workload, options.rounds, processes="WORLD_SIZE" in os.environ)
        return
    found: dict[str, dict[str, list[Used]]] = {setting: {} for setting in SETTINGS}
    about = facts()
    for _ in range(options.repeats):
        for setting, variables in SETTINGS.items():
            for processes in (1, 2):
                for name, used in measure(options.workload, options.rounds, variables, processes).items():
                    found[setting].setdefault(name, []).extend(used)
    base = found["default"]["plain loop"]
    rows = []
    for setting, kinds in found.items():
        for name, used in kinds.items():
            seconds, system, faults = zip(*used, strict=True)
            least = f"{min(seconds) / min(one for one, _, _ in base):.2f}"
            usual = f"{median(seconds) / median(one for one, _, _ in base):.2f}"
            rows.append([setting, name, f"{1e3 * min(seconds):.0f}", least, usual, f"{1e3 * median(system):.0f}",
                         f"{median(faults):.0f}"])  # fmt: skip
    head = ["freed memory", "step", "CPU ms, least", "over the plain loop, least", "median", "system, ms", "faults"]
    title = f"# Page faults of a step: {options.workload}"
    write(f"faults-{options.workload}", "\n\n".join([title, describe(about), table(head, rows)]),
          {"facts": about, "used": found})  # fmt: skip


if __name__ == "__main__":
    main()
