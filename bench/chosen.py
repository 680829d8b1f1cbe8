"""What `find_plan(measure=True)` chooses, beside all that one would try by hand: `python -m bench.chosen`.

All are trained in turns, each step of one after a step of the others in an order drawn anew, by two threads on two
cores. The choice is as good as the best where the interval of the ratio of their medians reaches 1.
"""

import argparse
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import median

import torch

import gpipe
from bench.foreseen import NETWORKS, Configuration, Network
from bench.machine import facts
from bench.report import describe, interval, table, with_time_left, write
from gpipe.profiling.memory import Meter

NAMES = ("transformer", "amoebanet", "mlp", "conv")


def by_hand(name: str) -> list[Configuration]:
    """All that one would try of a network: K, M, remat, schedule."""
    ways = product((2, 4, 8, 16), ("never", "always"), ("gpipe", "1f1b", "zb_h1"))
    return [
        *(Configuration(name, 1, m, "never", "gpipe") for m in (1, 2, 4, 8)),
        *(Configuration(name, 2, *way) for way in ways),
    ]


def pipe_by_hand(network: Network, tried: Configuration) -> gpipe.GPipe:
    """As a user would set it up: cut by what layers take."""
    return gpipe.GPipe(
        network.build(),
        tried.partitions,
        tried.micro_batches,
        schedule=tried.schedule,
        remat=tried.remat,
        sample=network.batch()[0],
        intra_op_threads=1,
    )


def pipes_of(name: str) -> tuple[dict[str, gpipe.GPipe], gpipe.Plan]:
    """Each way to train, by name, and what was chosen, under the name `chosen`."""
    network = NETWORKS[name]
    plan = gpipe.find_plan(network.build(), network.batch()[0], 2, measure=True, intra_op_threads=1)
    pipes = {str(tried): pipe_by_hand(network, tried) for tried in by_hand(name)}
    pipes["chosen"] = gpipe.GPipe(network.build(), plan=plan, intra_op_threads=1)
    return pipes, plan


def in_turns(network: Network, pipes: Mapping[str, gpipe.GPipe], rounds: int) -> dict[str, list[float]]:
    """The seconds of steps of each, behind one that warms up."""
    inputs, targets = network.batch()
    found: dict[str, list[float]] = {name: [] for name in pipes}
    order, chance = list(pipes), random.Random(0)
    for number in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            start = time.perf_counter()
            pipes[name].step(inputs, targets, network.loss_fn)
            if number:
                found[name].append(time.perf_counter() - start)
            pipes[name].zero_grad()
    return found


def compared(found: Mapping[str, Sequence[float]]) -> tuple[str, float, tuple[float, float]]:
    """The best by hand, how much longer the chosen one takes (1: as long), and the interval of that."""
    best = min((name for name in found if name != "chosen"), key=lambda name: median(found[name]))
    ratios = [one / other for one, other in zip(found["chosen"], found[best], strict=True)]
    return best, median(found["chosen"]) / median(found[best]), interval(ratios)


def lines_of(rounds: int, data: dict[str, object]) -> Iterator[list[str]]:
    """A line of the table for each network."""
    for name in with_time_left(NAMES, "networks"):
        torch.manual_seed(0)
        meter = Meter()
        pipes, plan = pipes_of(name)
        found = in_turns(NETWORKS[name], pipes, rounds)
        meter.stop()
        for pipe in pipes.values():
            pipe.close()
        best, ratio, (low, high) = compared(found)
        others, milliseconds = meter.others(), {each: 1e3 * median(seconds) for each, seconds in found.items()}
        place = sorted(milliseconds, key=milliseconds.__getitem__).index("chosen") + 1
        chosen = f"K={plan.partitions} M={plan.micro_batches} {plan.schedule} remat {', '.join(map(str, plan.remat))}"
        data[name] = {"chosen": chosen, "foretold": plan.seconds, "seconds": found}
        yield [
            name,
            chosen,
            f"{milliseconds['chosen']:.1f}",
            best,
            f"{milliseconds[best]:.1f}",
            f"{ratio:.3f} ({low:.3f}-{high:.3f})",
            f"{place} of {len(found)}",
            "" if others is None else f"{others.cores:.1f}",
        ]


def main() -> None:
    """Trains all ways in turns, and keeps the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.chosen", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--keep", default="chosen", help="write the result under another name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # of small micro-batches, of which some are tried
    data: dict[str, object] = {"facts": facts()}
    lines = list(lines_of(options.rounds, data))
    head = ["network", "chosen", "ms", "best by hand", "ms", "longer (95 %)", "place", "cores of others"]
    text = [
        "# The plan that is chosen, beside all that one would try",
        describe(facts()),
        f"{len(by_hand(NAMES[0]))} ways by hand: K=1 and 2, M from 1 to 16, three schedules, remat never and always, "
        f"cut by what layers take. {options.rounds} steps of each, in turns.",
        table(head, lines),
    ]
    write(options.keep, "\n\n".join(text), data)


if __name__ == "__main__":
    main()
