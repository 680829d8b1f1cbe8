"""How near the tables that are searched for come to the least that there can be, beside the best schedule by name.

python -m bench.tables
"""

import time

from gpipe.planner.search.device import Device
from gpipe.planner.search.profile import LayerProfile, Line, Profile
from gpipe.planner.search.search import search
from gpipe.planner.search.shapes import AUTO, Choices


def main() -> None:
    """Prints a row for each number of ranks and micro-batches and each limit, of stages that cost the same."""
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
