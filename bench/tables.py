"""Compares schedules from the search, and the best named schedules, with a lower bound: `python -m bench.tables`.

With `--many`, only compares all named schedules for 1024 ranks and 4096 micro-batches with a bound.
"""

import random
import sys
import time
from collections.abc import Sequence

from gpipe.planner.search.candidates import AUTO, Choices
from gpipe.planner.search.device import Device
from gpipe.planner.search.profile import LayerProfile, Line, Profile
from gpipe.planner.search.search import search
from gpipe.schedule.cost import StageCost
from gpipe.schedule.large_tables import LargeTable
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import table_of
from gpipe.schedule.schedules.writing import Rows


def many() -> None:
    """Prints a row for each schedule and each relative difference between the costs of the stages of 1024 ranks."""
    head = "| schedule | costs differ by | takes | bound | over it | held, micro-batches | CPU s, with a row |"
    print(f"{head}\n|" + " ---: |" * 7)
    for name in SCHEDULES:
        rows, placement = table_of(name, ranks=1024, micro_batches=4096)
        for share in (0.0, 0.05):
            drawn, began = random.Random(1), time.process_time()
            f, i, w = ([1 + drawn.uniform(-share, share) for _ in placement] for _ in range(3))
            costs = [StageCost(a, b + c, b, c) for a, b, c in zip(f, i, w, strict=True)]
            assert isinstance(rows, Rows)
            found, _ = LargeTable(rows, placement).figures(costs), rows[511]
            cpu, bound = (
                time.process_time() - began,
                _bound(placement, f, [sum(each) for each in zip(f, i, w, strict=True)]),
            )
            over, held = f"{found.seconds / bound - 1:.2%}", f"{min(found.peaks):g} to {max(found.peaks):g}"
            print(
                f"| {name} | {share:.0%} | {found.seconds:.0f} | {bound:.0f} | {over} | {held} | {cpu:.1f} |",
                flush=True,
            )


def _bound(placement: Sequence[int], forward: Sequence[float], work: Sequence[float]) -> float:
    """Returns a lower bound: each rank does all its work, after the first forward passes of the ranks before it."""
    own = [0.0] * 1024
    for rank, each in zip(placement, work, strict=True):
        own[rank] += 4096 * each
    return max(sum(forward[: placement.index(rank)]) + took for rank, took in enumerate(own))


def main() -> None:
    """Prints a row for each number of ranks, micro-batches and memory limit, with stages of equal costs."""
    if "--many" in sys.argv:
        many()
        return
    one = Line(fixed=1.0)
    layer = LayerProfile("layer", one, Line(fixed=2.0), activations=one, parts=(one, one))
    print("| K | M | limit, micro-batches | bound | searched | best by name | CPU s |\n|" + " ---: |" * 7)
    for ranks in (2, 4, 8):
        for micro_batches in (8, 16, 32, 64):
            for limit in sorted({ranks, (ranks + 2) // 2, (ranks + 4) // 3}, reverse=True):
                began = time.process_time()
                devices = [Device(memory=2.0 * limit, flops=1.0)] * ranks  # two stages a rank hold a micro-batch
                choices = Choices((ranks,), (micro_batches,), (AUTO,))
                plan = search(Profile((layer,) * (2 * ranks), "seconds"), devices, micro_batches, choices)
                named = min((p for p in (plan, *plan.alternatives) if p.table is None), key=lambda p: p.seconds)
                took = time.process_time() - began
                row = f"{plan.least_seconds:g} | {plan.seconds:g} | {named.seconds:g}, {named.schedule}"
                print(f"| {ranks} | {micro_batches} | {limit} | {row} | {took:.1f} |", flush=True)


if __name__ == "__main__":
    main()
