"""Measures what verification adds to the first step, and what later steps pay: each pair of pipes in turns."""

import argparse
import statistics
import time
from collections.abc import Callable

import gpipe
from bench.machine import facts
from bench.workloads import WORKLOADS, Workload

MICRO_BATCHES = 8
LATER = 3  # steps after the first, of each pipe


def pipe_of(work: Workload, remat: str, driver: str, *, verify: bool) -> gpipe.GPipe:
    cuts = work.cuts(work.partitions) or work.partitions
    pipe = gpipe.GPipe(work.layers(), cuts, MICRO_BATCHES, remat=remat, driver=driver, seed=0)
    pipe.verify_steps = verify
    return pipe


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def measure(work: Workload, remat: str, driver: str, rounds: int) -> str:
    """Returns the median ratios of the first step and of later steps, with verification relative to without."""
    x, y = work.data()
    first, later = list[float](), list[float]()
    for number in range(rounds):
        times: dict[bool, tuple[float, float]] = {}
        for verify in (True, False) if number % 2 else (False, True):
            with pipe_of(work, remat, driver, verify=verify) as pipe:

                def step(pipe: gpipe.GPipe = pipe) -> None:
                    pipe.step(x, y, work.loss_fn)
                    pipe.zero_grad()

                begun = seconds(step)
                step()
                times[verify] = begun, min(seconds(step) for _ in range(LATER))
        first.append(times[True][0] / times[False][0])
        later.append(times[True][1] / times[False][1])
    low, high = min(later), max(later)
    return (
        f"| {work.name} | {driver} | {remat} | {statistics.median(first):.2f} | {statistics.median(later):.3f} "
        f"({low:.2f} to {high:.2f}) |"
    )


def main() -> None:
    """Prints a table for the Transformer and the conv net."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", nargs="+", default=["transformer", "conv"])
    options = parser.parse_args()
    print("\n".join(f"- {name}: {value}" for name, value in facts().items()))
    print(f"\nM={MICRO_BATCHES}, {options.rounds} rounds in turns, medians; in brackets the extremes\n")
    print("| workload | driver | remat | first step, over none verified | later steps, over none verified |")
    print("|---|---|---|---|---|")
    for name in options.workloads:
        for driver in ("threads", "lockstep"):
            for remat in ("always", "never"):
                print(measure(WORKLOADS[name], remat, driver, options.rounds), flush=True)


if __name__ == "__main__":
    main()
