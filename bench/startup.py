"""Measures the start of a pipe over N processes on this host: `python -m bench.startup`.

Seconds count from the moment at which the first process is spawned. Messages of the rendezvous are those that gpipe
sends while it connects the processes; gloo sends its own. Each process has one layer. The last two columns are for
processes that treat each other as processes on other hosts.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import gpipe
from bench.machine import facts
from bench.report import describe, table, write
from gpipe.distributed import linking, rendezvous
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.rendezvous import WorldChannel

PROCESSES = (2, 4, 8, 16)
M = 4
SPAWNED = "GPIPE_BENCH_SPAWNED"  # the variable with the time at which the first process was spawned


class Counted:
    """Counts messages from now on, and their bytes during the rendezvous."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0
        sends, sending = WorldChannel.send, Endpoint.sending

        def send(channel: WorldChannel, message: bytes) -> None:
            self.messages += len(channel.peers)
            self.bytes += len(message) * len(channel.peers)
            sends(channel, message)

        def send_to_peer(*given: Any, **options: Any) -> Any:
            self.messages += 1
            return sending(*given, **options)

        WorldChannel.send, Endpoint.sending = send, send_to_peer  # type: ignore[assignment, method-assign]

    def take(self) -> tuple[int, int]:
        """Returns the messages and bytes since the last call."""
        found = self.messages, self.bytes
        self.messages = self.bytes = 0
        return found


def resources() -> tuple[int, int]:
    """Returns the numbers of open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@contextmanager
def apart(rank: int) -> Iterator[None]:
    """Makes this process treat the other processes as processes on other hosts."""
    with (
        patch.object(rendezvous, "host_name", return_value=f"host {rank}"),
        patch.object(linking, "own_host", return_value="127.0.0.1"),
    ):
        yield


def serve(processes: int) -> None:
    """Runs one of the processes, and prints its measurements as JSON."""
    spawned, found = float(os.environ[SPAWNED]), dict[str, Any]()

    def note(name: str) -> None:
        found[name] = {"seconds": time.time() - spawned, "resources": resources()}

    counted = Counted()
    note("imported")
    dist.init_process_group("gloo")
    dist.barrier()
    note("group")
    torch.manual_seed(0)
    before = time.process_time()
    layers = [[nn.Linear(8, 8) for _ in range(processes)] for _ in range(2)]
    with gpipe.GPipe(layers[0], processes, M, driver="process", seed=0) as pipe:
        found["cpu"] = time.process_time() - before
        note("pipe")
        found["rendezvous"] = counted.take()
        rows = torch.ones(M, 8)
        pipe.step(rows, rows, mse_loss)
        note("step")
        counted.take()
        pipe.step(rows, rows, mse_loss)
        found["messages"] = counted.take()[0]
    dist.barrier()
    with apart(dist.get_rank()), gpipe.GPipe(layers[1], processes, M, driver="process", seed=0) as pipe:
        pipe.step(rows, rows, mse_loss)
        note("apart")
        dist.barrier()
    if dist.get_rank():
        dist.gather_object(found, None)
    else:
        gathered: list[Any] = [None] * processes
        dist.gather_object(found, gathered)
        print(json.dumps(gathered), flush=True)
    dist.destroy_process_group()


def start(processes: int) -> list[dict[str, Any]]:
    """Starts the processes, and returns the measurements of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    common = {**os.environ, **meeting, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", SPAWNED: str(time.time())}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.startup", "--serve", str(processes)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(processes)
    ]
    said = [process.communicate()[0] for process in started]
    found: list[dict[str, Any]] = json.loads(said[0])
    return found


def row_of(processes: int, rounds: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Returns a row of the table: medians over rounds of the latest process, and the largest numbers."""

    def seconds(name: str) -> float:
        return median(max(each[name]["seconds"] for each in found) for found in rounds)

    last = rounds[-1]
    messages, size = map(max, zip(*(each["rendezvous"] for each in last), strict=True))
    steps = [each["messages"] for each in last]
    group, pipe, hosts = (
        [max(each[name]["resources"][at] for each in last) for at in (0, 1)] for name in ("group", "step", "apart")
    )
    return [
        str(processes),
        f"{seconds('imported'):.1f}",
        f"{seconds('group') - seconds('imported'):.2f}",
        f"{seconds('pipe') - seconds('group'):.2f}",
        f"{median(median(each['cpu'] for each in found) for found in rounds):.2f}",
        f"{seconds('step') - seconds('pipe'):.2f}",
        f"{seconds('step'):.1f}",
        f"{messages} ({size / 1000:.1f} kB)",
        f"{steps[0]}, {max(steps[1:])}",
        f"{group[0]} -> {pipe[0]}",
        f"{group[1]} -> {pipe[1]}",
        str(hosts[0]),
        str(hosts[1]),
    ]


HEAD = (
    "processes",
    "import, s",
    "group, s",
    "GPipe, s",
    "of it, CPU s of a process",
    "first step, s",
    "spawn to end of first step, s",
    "messages of the rendezvous, of a process",
    "messages of a later step: rank 0, most of another",
    "descriptors, with the group -> with the pipe",
    "threads, with the group -> with the pipe",
    "descriptors between hosts",
    "threads between hosts",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.serve:
        serve(options.serve)
        return
    about, rows, found = facts(), list[list[str]](), dict[str, Any]()
    for processes in PROCESSES:
        rounds = [start(processes) for _ in range(options.rounds)]
        rows.append(row_of(processes, rounds))
        found[str(processes)] = rounds
        print(*rows[-1], flush=True)
    text = (
        "Seconds are medians of rounds, until the last process is ready. All processes share the cores. "
        "Descriptors and threads are those of the process that has most."
    )
    parts = ["# The start of a pipe over N processes on one host", describe(about), text, table(HEAD, rows)]
    write("startup", "\n\n".join(parts), {"facts": about, "processes": found})


if __name__ == "__main__":
    main()
