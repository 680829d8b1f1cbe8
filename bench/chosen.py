"""Compares the plan of `find_plan(measure=True)` with all settings one would try: `python -m bench.chosen`.

All settings are trained in turns in random order, with two threads on two cores. Then the chosen plan and the
`FINALISTS` fastest settings are trained `LONGER` times as long. The ratio is from these turns only, because the
fastest of many settings in a short measurement is partly luck. The best finalist is selected in every other turn, and
compared in the turns between.

With `--busy 1`, another process keeps one core busy.
"""

import argparse
import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from operator import truediv
from statistics import median
from typing import Any

import torch
from torch import Tensor

import gpipe
from bench.foreseen import NETWORKS, Configuration, Network
from bench.machine import facts
from bench.report import RESULTS, describe, interval, table, with_time_left, write
from gpipe.planner.other_processes import Meter

FINALISTS, LONGER = 4, 3
NAMES = ("transformer", "amoebanet", "mlp", "conv")


def by_hand(name: str) -> list[Configuration]:
    """Returns all settings to try for a network: K, M, recomputation and schedule."""
    ways = product((2, 4, 8, 16), ("never", "always"), ("gpipe", "1f1b", "zb_h1"))
    return [
        *(Configuration(name, 1, m, "never", "gpipe") for m in (1, 2, 4, 8)),
        *(Configuration(name, 2, *way) for way in ways),
    ]


def pipe_by_hand(network: Network, tried: Configuration) -> gpipe.GPipe:
    """Builds a pipe like a user would: split by the measured times of layers."""
    return gpipe.GPipe(
        network.build(),
        tried.partitions,
        tried.micro_batches,
        schedule=tried.schedule,
        remat=tried.remat,
        sample=network.batch()[0],
    )


def pipes_of(name: str) -> tuple[dict[str, gpipe.GPipe], gpipe.Plan]:
    """Returns a pipe for each setting by name. The pipe of the planner is `chosen`."""
    network = NETWORKS[name]
    plan = gpipe.find_plan(network.build(), network.batch()[0], 2, measure=True, intra_op_threads=1)
    pipes = {str(tried): pipe_by_hand(network, tried) for tried in by_hand(name)}
    pipes["chosen"] = gpipe.GPipe(network.build(), plan=plan)
    return pipes, plan


def in_turns(
    pipes: Mapping[str, gpipe.GPipe],
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    rounds: int,
) -> dict[str, list[float]]:
    """Measures steps of each pipe, after one warm-up step."""
    found: dict[str, list[float]] = {name: [] for name in pipes}
    order, chance = list(pipes), random.Random(0)
    for number in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            pipes[name].exchange(b"")  # where there are several processes, all begin at once
            start = time.perf_counter()
            pipes[name].step(*batch, loss_fn)
            if number:
                found[name].append(time.perf_counter() - start)
            pipes[name].zero_grad()
    return found


def compared(found: Mapping[str, Sequence[float]]) -> tuple[str, float, tuple[float, float]]:
    """Returns the best setting, the median time of the chosen plan relative to it, and its interval.

    >>> compared({"chosen": [3.0, 2.0], "a": [1.0, 4.0], "b": [2.0, 2.0]})
    ('b', 1.0, (0.5, 1.5))
    """
    by_hand, ratios = [name for name in found if name != "chosen"], list[float]()
    for at in (0, 1):
        best = min(by_hand, key=lambda name: median(found[name][1 - at :: 2]))
        ratios += map(truediv, found["chosen"][at::2], found[best][at::2])
    return min(by_hand, key=lambda name: median(found[name])), median(ratios), interval(ratios)


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keeps this number of cores busy inside the context."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def compare(names: Sequence[str], rounds: int, data: dict[str, Any]) -> None:
    """Adds the results of a network to the data, and its row to the table."""
    for name in with_time_left(names, "networks"):
        torch.manual_seed(0)
        meter = Meter()
        pipes, plan = pipes_of(name)
        network = NETWORKS[name]
        batch = network.batch()
        found = in_turns(pipes, batch, network.loss_fn, rounds)
        milliseconds = {each: 1e3 * median(seconds) for each, seconds in found.items()}
        fastest = sorted(milliseconds.keys() - {"chosen"}, key=milliseconds.__getitem__)[:FINALISTS]
        again = {each: pipes[each] for each in (*fastest, "chosen")}
        final = in_turns(again, batch, network.loss_fn, LONGER * rounds)
        meter.stop()
        for pipe in pipes.values():
            pipe.close()
        best, ratio, (low, high) = compared(final)
        others = meter.others()
        place = sorted(milliseconds, key=milliseconds.__getitem__).index("chosen") + 1
        chosen = f"K={plan.partitions} M={plan.micro_batches} {plan.schedule} remat {', '.join(map(str, plan.remat))}"
        line = [
            name,
            chosen,
            f"{1e3 * median(final['chosen']):.1f}",
            best,
            f"{1e3 * median(final[best]):.1f}",
            f"{ratio:.3f} ({low:.3f}-{high:.3f})",
            f"{place} of {len(found)}",
            "" if others is None else f"{others.cores:.1f}",
        ]
        data[name] = {"line": line, "chosen": chosen, "foretold": plan.seconds, "seconds": found, "final": final}


def main() -> None:
    """Trains with all settings in turns, and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.chosen", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="networks whose name contains this; those of the same commit stay")
    parser.add_argument("--busy", type=int, default=0, help="cores that others use meanwhile")
    parser.add_argument("--keep", default="chosen", help="write the result under another name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # of small micro-batches, of which some are tried
    kept = RESULTS / f"{options.keep}.json"
    data: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if data.get("facts", {}).get("commit") != facts()["commit"]:
        data = {}
    data["facts"] = facts()
    with busy(options.busy):
        compare([name for name in NAMES if options.only in name], options.rounds, data)
    head = ["network", "chosen", "ms", "best by hand", "ms", "longer (95 %)", "place", "cores of others"]
    text = [
        "# The plan that is chosen, beside all that one would try",
        describe(facts()),
        f"{len(by_hand(NAMES[0]))} ways by hand: K=1 and 2, M from 1 to 16, three schedules, remat never and always, "
        f"cut by what layers take. {options.rounds} steps of each, in turns; then {LONGER * options.rounds} of the "
        f"{FINALISTS} best and of the choice, of which are the milliseconds and their ratio: to what is best in "
        "every other turn, in those between. All at one commit.",
        table(head, [data[name]["line"] for name in NAMES if name in data]),
    ]
    write(options.keep, "\n\n".join(text), data)


if __name__ == "__main__":
    main()
