"""Measures layers under `fully_shard`: bytes sent, time and memory of a step, compared with unsharded replicas.

    python -m bench.sharded

Two replicas with one process each run all turns one after another. Memory is the peak resident memory in a step
relative to the memory before the layers exist. It is only valid for the first case, because later cases reuse memory.
"""

import argparse
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

import gpipe

REPLICAS, LAYERS = 2, 8
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Returns the private resident bytes of this process, without the shared memory for messages."""
    every, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (every - shared) * PAGE


class Peak:
    """Samples the peak resident memory every millisecond."""

    def __enter__(self) -> "Peak":
        self.most, self._ends = resident(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ends.wait(0.001):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def pipe_of(width: int, stages: int, micro_batches: int, rows: int, mesh: Any, *, sharded: bool) -> gpipe.GPipe:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    sample = torch.zeros(rows, width)
    how: Any = {"micro_batches": micro_batches, "remat": "auto", "costs": [1] * LAYERS, "balance": "variance"}
    plan = gpipe.find_plan(layers, sample, 1, schedule=gpipe.Interleaved(stages, "gpipe"), **how)
    pipe = gpipe.GPipe(layers, plan=plan, mesh=mesh)
    for layer in pipe.children() if sharded else ():
        fully_shard(layer, mesh=mesh["dp"])
    return pipe


def turn(width: int, stages: int, micro_batches: int, steps: int, mesh: Any, *, sharded: bool) -> dict[str, Any]:
    before = resident()
    rows = 16 * micro_batches
    x, y = torch.randn(2, rows, width)
    pipe = pipe_of(width, stages, micro_batches, rows, mesh, sharded=sharded)
    optimizer = torch.optim.AdamW(pipe.parameters(), foreach=False)
    pipe.step(x, y, F.mse_loss)
    optimizer.step()
    took, worked, peaks = [], [], []
    for step in range(2 * steps):
        optimizer.zero_grad()
        dist.barrier()
        if step % 2:
            with Peak() as peak:
                pipe.step(x, y, F.mse_loss)
            peaks.append(peak.most - before)
        else:
            began, used = time.perf_counter(), time.process_time()
            pipe.step(x, y, F.mse_loss)
            took.append(time.perf_counter() - began)
            worked.append(time.process_time() - used)
        optimizer.step()
    optimizer.zero_grad()
    with gpipe.record(pipe, memory=True) as recording:
        pipe.step(x, y, F.mse_loss)
        optimizer.step()
    own = [
        message for message in recording.messages() if message.rank == dist.get_rank() and message.kind != "receive"
    ]
    (held,) = recording.memory().values()
    found = {
        "seconds": [median(took), min(took), max(took)],
        "cpu": median(worked),
        "messages": len(own),
        "bytes": sum(message.bytes for message in own),
        "held": median(peaks),
        "recorded": held.total,
        "predicted": (pipe.prediction.peak_bytes or (0,))[0],
    }
    pipe.close()
    return found


def work(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.meet}", rank=rank, world_size=REPLICAS, timeout=timedelta(seconds=120)
    )
    mesh = init_device_mesh("cpu", (REPLICAS, 1), mesh_dim_names=("dp", "pp"))
    turn(64, 1, 2, 1, mesh, sharded=True)  # brings in code
    turn(64, 1, 2, 1, mesh, sharded=False)
    for width, stages, micro_batches in options.cases:
        for sharded in (True, False):
            found = turn(width, stages, micro_batches, options.steps, mesh, sharded=sharded)
            if not rank:
                print(json.dumps({"width": width, "stages": stages, "M": micro_batches, "sharded": sharded, **found}))
                sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--meet", default=f"/tmp/gpipe_sharded_{os.getpid()}")
    parser.add_argument("--cases", type=json.loads, default=[[768, 1, 4], [768, 1, 16], [2048, 1, 4], [2048, 2, 4]])
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    start_processes(work, (parser.parse_args(),), nprocs=REPLICAS, start_method="spawn")
