"""How near the tables that are searched for come to the least that there can be, beside the best schedule by name.

python -m bench.tables [--many]

With `--many` waves of ZB-H1 over 1024 ranks and 4096 micro-batches alone, beside a bound: each rank has its work to
do, behind the first forwards of the ranks ahead of it.
"""

import random
import sys
import time

from gpipe.planner.search.device import Device
from gpipe.planner.search.profile import LayerProfile, Line, Profile
from gpipe.planner.search.search import search
from gpipe.planner.search.shapes import AUTO, Choices
from gpipe.schedule.cost import StageCost
from gpipe.schedule.waves import Waves


def many() -> None:
    """Prints a row for each share by which the costs of 1024 stages differ."""
    print("| costs differ by | waves | bound | over it | CPU s, with the rows of three ranks |\n|" + " ---: |" * 5)
    for share in (0.0, 0.01, 0.05, 0.2):
        drawn, began = random.Random(1), time.process_time()
        f, i, w = ([1 + drawn.uniform(-share, share) for _ in range(1024)] for _ in range(3))
        costs = (StageCost(a, b + c, b, c, inside=1) for a, b, c in zip(f, i, w, strict=True))
        waves = Waves(tuple(costs), micro_batches=4096)
        bound = max(sum(f[:r]) + 4096 * (f[r] + i[r] + w[r]) for r in range(1024))
        took, _ = waves.seconds, (waves.peak_bytes, *map(waves.row, (0, 511, 1023)))
        cpu = time.process_time() - began
        print(f"| {share:.0%} | {took:.0f} | {bound:.0f} | {took / bound - 1:.2%} | {cpu:.1f} |", flush=True)


def main() -> None:
    """Prints a row for each number of ranks and micro-batches and each limit, of stages that cost the same."""
    if "--many" in sys.argv:
        many()
        return
    one = Line(fixed=1.0)
    layer = LayerProfile("layer", one, Line(fixed=2.0), inside=one, parts=(one, one))
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
