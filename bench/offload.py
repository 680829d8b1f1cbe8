"""Measures training with activations in a file, four times as large as the available memory.

    python -m bench.offload

Also measures an optimizer whose state is in memory-mapped files. Each training runs in a separate process. A process
without offloading measures by how much its steps increase the memory. Other processes then get a quarter of this by
the limit of a control group (as root, on Linux). The limit also counts mapped pages and the page cache, and kills a
process without offloading. Each round runs all variants one by one.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from bench.machine import facts
from bench.report import RESULTS, describe, interval, spread, table, write

WIDTH, BLOCKS, PARTITIONS, MICRO_BATCHES, ROWS = 1024, 16, 2, 16, 16 * 256
NARROW, MANY = 512, 100  # blocks whose optimizer has 200 MiB of state
STEPS, PART, MIB = 3, 4, 2**20
OLD = Path("/sys/fs/cgroup/memory")
GROUP = (OLD if OLD.is_dir() else OLD.parent) / "gpipe_bench_offload"
LIMIT, STAT, ANONYMOUS = (
    ("memory.limit_in_bytes", "memory.stat", "rss") if OLD.is_dir() else ("memory.max", "memory.stat", "anon")
)


def resident(what: str) -> int:
    """Returns the resident memory of this process with mapped pages: now (`VmRSS`) or its peak (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def limit(more: int) -> None:
    """Limits the control group to this number of bytes more than now. The present page cache does not count."""
    (own,) = (
        int(line.split()[1]) for line in (GROUP / STAT).read_text().splitlines() if line.split()[0] == ANONYMOUS
    )
    (GROUP / LIMIT).write_text(str(own + more))


def network(width: int, blocks: int = BLOCKS) -> list[nn.Module]:
    """Builds blocks that each keep two tensors as large as their input."""
    return [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks)]


def train(remat: str, given: int) -> dict[str, Any]:
    """Trains some steps. Returns their durations, the memory before and its peak, and the prediction."""
    torch.manual_seed(0)
    small = torch.randn(ROWS, 16)
    with gpipe.GPipe(network(16), PARTITIONS, MICRO_BATCHES, remat=remat) as pipe:  # brings in code, and threads
        pipe.step(small, small, F.mse_loss)
        torch.optim.Adam(pipe.parameters()).step()
    before = resident("VmRSS")
    x = torch.randn(ROWS, WIDTH)
    layers, costs = network(WIDTH), [1.0] * BLOCKS
    how: Any = {"micro_batches": MICRO_BATCHES, "remat": remat, "costs": costs, "balance": "variance"}
    pipe = gpipe.GPipe(layers, plan=gpipe.find_plan(layers, x, PARTITIONS, **how), seed=0)
    optimizer = torch.optim.Adam(pipe.parameters())
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = resident("VmRSS")
    if given:
        limit(given)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    seconds, losses = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(float(pipe.step(x, x, F.mse_loss)))
        seconds.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    peaks = pipe.prediction.peak_bytes
    predicted = None if peaks is None else before + x.nbytes + sum(peaks)
    return {"seconds": seconds, "state": state, "most": resident("VmHWM"), "predicted": predicted, "losses": losses}


def update(way: str, given: int) -> dict[str, Any]:
    """Runs steps of AdamW. Returns their durations, the memory before the state exists, and its peak."""
    torch.manual_seed(0)
    whole = nn.Sequential(*network(NARROW, MANY))
    adamw = torch.optim.AdamW(whole.parameters())
    if way == "offload":
        gpipe.offload(adamw)
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = resident("RssAnon")
    if given:
        limit(given)
    seconds = []
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        adamw.step()
        seconds.append(time.perf_counter() - start)
    held = {name: resident(name) for name in ("RssAnon", "RssFile", "VmHWM")}
    size = sum(value.nbytes for state in adamw.state.values() for value in state.values())
    weights = float(torch.stack([parameter.detach().sum() for parameter in whole.parameters()]).sum())
    return {"seconds": seconds, "before": before, **held, "state": size, "weights": weights}


def run(what: str, given: int) -> dict[str, Any] | None:
    """Runs a training in a separate process with a memory limit. Returns None if the limit kills it."""
    command = f"exec {sys.executable} -m bench.offload --process {what} --given {given}"
    if given:
        GROUP.mkdir(exist_ok=True)
        command = f"echo $$ > {GROUP / 'cgroup.procs'} && {command}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    if given:
        time.sleep(0.5)  # a group is empty a little later
        GROUP.rmdir()
    if done.returncode == -9:
        return None
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_rounds(work: str, ways: Mapping[str, tuple[str, int]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Runs each variant with these memory limits, and returns the results by round."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (way, most) in ways.items():
            done = run(f"{work} {way}", most)
            assert done is not None, f"{name} was killed"
            found[name].append(done)
    return found


def activations(rounds: int) -> dict[str, Any]:
    """Trains with all variants."""
    first = run("train never", 0)
    assert first is not None
    more = first["most"] - first["state"]
    given = more // PART
    ways = {"never": ("never", 0), "offload": ("offload", given), "always": ("always", 0)}
    found = in_rounds("train", ways, rounds)
    killed = run("train never", given) is None
    assert all(one["losses"] == first["losses"] for some in found.values() for one in some)
    steps = {name: [took for one in some for took in one["seconds"][1:]] for name, some in found.items()}
    each = zip(found["offload"], found["never"], strict=True)
    ratios = [took / median(base["seconds"][1:]) for one, base in each for took in one["seconds"][1:]]
    low, high = interval(ratios)
    most, predicted = (median(one[what] for one in found["offload"]) for what in ("most", "predicted"))
    rows = [
        [
            name,
            f"{given / MIB:.0f}" if ways[name][1] else "any",
            f"{median(one['most'] - one['state'] for one in some) / MIB:.0f}",
            spread(steps[name], 1.0),
            f"{median(steps[name]) / median(steps['never']):.2f}",
        ]
        for name, some in found.items()
    ]
    text = [
        "# What autograd keeps, in a file",
        describe(facts()),
        f"{BLOCKS} blocks of Linear({WIDTH}) and GELU on {PARTITIONS} partitions, threads, M = {MICRO_BATCHES} of "
        f"{ROWS // MICRO_BATCHES} rows, Adam. Before a step the process has {first['state'] / MIB:.0f} MiB; a step "
        f"that keeps all adds {more / MIB:.0f}, and the control group gives a quarter of that. One that keeps "
        f"all in it is {'killed' if killed else 'not killed'}. Losses are the same bits in all. MiB are resident, "
        f"mapped pages included, the most above what was there before.",
        table(["remat", "MiB given", "MiB more", "s a step", "times"], rows),
        f"Offloading takes {median(ratios):.2f} (95 %: {low:.2f}-{high:.2f}) times as long as what fits, pairs of a "
        f"round compared; wanted: at most 1.3. Predicted are {predicted / MIB:.0f} MiB of the process at the most, "
        f"measured {most / MIB:.0f}: {predicted / most - 1:+.1%}; wanted: within 10 %.",
    ]
    return {"text": "\n\n".join(text), "facts": facts(), "given": given, "first": first, "found": found}


def optimizer(rounds: int) -> dict[str, Any]:
    """Runs steps with the state in memory and in files, without a limit and with a quarter of the state's size."""
    first = run("update plain", 0)
    assert first is not None
    given = first["state"] // PART
    ways = {"in memory": ("plain", 0), "in files": ("offload", 0), "in files, in a group": ("offload", given)}
    found = in_rounds("update", ways, rounds)
    killed = run("update plain", given) is None
    assert all(one["weights"] == first["weights"] for some in found.values() for one in some)
    steps = {name: [took for one in some for took in one["seconds"][1:]] for name, some in found.items()}
    rows = [
        [
            name,
            f"{given / MIB:.0f}" if ways[name][1] else "any",
            f"{median(one['RssAnon'] - one['before'] for one in some) / MIB:.0f}",
            f"{median(one['RssFile'] for one in some) / MIB:.0f}",
            spread(steps[name], 1.0),
            f"{median(steps[name]) / median(steps['in memory']):.2f}",
        ]
        for name, some in found.items()
    ]
    text = [
        "## An optimizer's state, in mapped files",
        describe(facts()),
        f"AdamW of {MANY} x Linear({NARROW}), {first['state'] / MIB:.0f} MiB of state, steps of the optimizer "
        f"alone. The control group gives a quarter of the state beside weights and gradients; what keeps its state "
        f"in memory is {'killed' if killed else 'not killed'} in it. Weights are the same bits in all. MiB are of "
        f"the process behind the steps: its own, above what it had before there was state, and those mapped of "
        f"files, code among them.",
        table(["state", "MiB given", "MiB more of its own", "MiB of files", "s a step", "times"], rows),
    ]
    return {"text": "\n\n".join(text), "facts": facts(), "given": given, "first": first, "found": found}


def main() -> None:
    """Measures all variants, and writes the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.offload", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parts = {"activations": activations, "optimizer": optimizer}
    parser.add_argument("--only", choices=parts, help="measure this alone; the other stays as it was")
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--given", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.process:
        work, way = asked.process
        print(json.dumps({"train": train, "update": update}[work](way, asked.given)))
        return
    kept = RESULTS / "offload.json"
    data: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    data |= {name: measure(asked.rounds) for name, measure in parts.items() if asked.only in (None, name)}
    write("offload", "\n\n".join(data[name]["text"] for name in parts if name in data), data)


if __name__ == "__main__":
    main()
