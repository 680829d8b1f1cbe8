"""Compares the speed of two commits: `python -m bench.commits FOLDER` measures a checkout beside this one.

One worker for each checkout stays alive, and they take turns of a few steps, so that both meet the same machine. The
ratio of each pair of turns is one sample; the table has the median ratio and its interval. Above 1, this checkout is
slower.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import machine

ROOT = Path(__file__).parents[1]
CASES = {  # name: (workload, processes, steps of a turn)
    "transformer": ("transformer", 1, 2),
    "conv": ("conv", 1, 2),
    "tiny": ("tiny", 1, 40),
    "transformer, two processes": ("transformer", 2, 2),
    "tiny, two processes": ("tiny", 2, 40),
}


class Worker:
    """The processes that run one pipe from one checkout."""

    def __init__(self, checkout: Path, workload: str, processes: int) -> None:
        path = os.pathsep.join([str(checkout / "src"), str(ROOT)])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "bench.commits", "--serve", workload]
        self._processes = [
            subprocess.Popen(
                command,
                env=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(processes)
        ]
        self._answer()

    def run(self, steps: int) -> tuple[float, float]:
        """Runs some steps; returns their wall seconds and the processor seconds of all processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = self._answer()
        return max(wall for wall, _ in answers), sum(cpu for _, cpu in answers)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def _answer(self) -> list[tuple[float, float]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            wall, cpu = json.loads(process.stdout.readline())
            answers.append((wall, cpu))
        return answers


def serve(name: str) -> None:
    """Runs steps for each number that comes on stdin, and answers with seconds."""
    import torch

    import gpipe
    from bench.workloads import WORKLOADS

    torch.set_num_threads(1)
    work = WORKLOADS[name]
    layers = work.layers()
    cuts = [len(layers) - len(layers) // 2, len(layers) // 2]  # Measured cuts would differ between the two workers.
    inputs, targets = work.data()
    in_processes = "WORLD_SIZE" in os.environ
    if in_processes:
        torch.distributed.init_process_group("gloo")
    pipe = gpipe.GPipe(layers, cuts, work.micro_batches, seed=0, driver="process" if in_processes else "threads")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)

    def turn(steps: int) -> None:
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            pipe.step(inputs, targets, work.loss_fn)
            optimizer.step()
            optimizer.zero_grad()
        print(json.dumps([time.perf_counter() - start, time.process_time() - busy]), flush=True)

    turn(3)
    for line in sys.stdin:
        turn(int(line))


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns the interval of the median that holds with a confidence of about 95 %, by order statistics."""
    ordered = sorted(ratios)
    margin = round(0.98 * len(ordered) ** 0.5)
    middle = len(ordered) // 2
    return ordered[max(0, middle - margin)], ordered[min(len(ordered) - 1, middle + margin)]


def main() -> None:
    """Measures, and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    commits = [subprocess.check_output(["git", "-C", place, "rev-parse", "--short", "HEAD"], text=True).strip()
               for place in (options.checkout, ROOT)]  # fmt: skip
    print(f"# Two commits: {commits[1]} over {commits[0]}\n\nMachine: {json.dumps(machine.facts())}\n")
    print("| work | wall, median | interval | processor time, median | interval |\n|---|---|---|---|---|")
    for case, (workload, processes, steps) in CASES.items():
        workers = [Worker(place, workload, processes) for place in (options.checkout.resolve(), ROOT)]
        walls, busy = [], []
        for number in range(options.turns):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {which: workers[which].run(steps) for which in order}
            walls.append(seconds[1][0] / seconds[0][0])
            busy.append(seconds[1][1] / seconds[0][1])
        for worker in workers:
            worker.close()
        texts = [f"{statistics.median(r):.3f} | {interval(r)[0]:.3f} to {interval(r)[1]:.3f}" for r in (walls, busy)]
        print(f"| {case} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
