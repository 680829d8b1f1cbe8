"""Compares steps with schedules from the search and with named schedules: `python -m bench.searched`.

All are trained in turns in random order, in threads and in processes. If memory is limited, the limit is the memory
of V-Half, and schedules that need more recompute as much as necessary.
"""

import argparse
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn

import gpipe
from bench.chosen import in_turns
from bench.machine import facts
from bench.makespans import Sleeper
from bench.report import describe, interval, table, with_time_left, write
from bench.workloads import WORKLOADS, squared_error

SCHEDULES = ("auto", "1f1b", "zb_h1", "v_half")


@dataclass(frozen=True)
class Case:
    """A model, the number of ranks, and whether memory is limited."""

    name: str
    build: Callable[[], list[nn.Module]]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    partitions: int
    micro_batches: int
    limited: bool
    processes: bool = False

    def __str__(self) -> str:
        room = ", limited" if self.limited else ""
        driver = "processes" if self.processes else "threads"
        return f"{self.name}, K={self.partitions} M={self.micro_batches}{room}, {driver}"


class Timed(NamedTuple):
    """The prediction, the peak memory and the measured steps of one schedule."""

    words: str
    foretold: float
    held: int
    seconds: list[float]


def _sleeping(units: Sequence[int]) -> list[nn.Module]:
    return [Sleeper(0.003 * unit) for unit in units]


def _rows(micro_batches: int) -> tuple[Tensor, Tensor]:
    return torch.randn(micro_batches, 512, 4), torch.randn(micro_batches, 512, 4)


def cases() -> list[Case]:
    """Returns all cases, in threads and, for few ranks, in processes."""
    uneven = [1, 2, 2, 1, 3, 2, 1, 2]
    found = [
        Case("sleeping", partial(_sleeping, [2] * 8), partial(_rows, 8), squared_error, 4, 8, limited=True),
        Case("sleeping unevenly", partial(_sleeping, uneven), partial(_rows, 8), squared_error, 4, 8, limited=False),
        Case("sleeping", partial(_sleeping, [2] * 16), partial(_rows, 16), squared_error, 8, 16, limited=True),
    ]
    for name in ("halves", "conv"):
        work = WORKLOADS[name]
        found.append(Case(name, work.layers, work.data, work.loss_fn, 2, work.micro_batches, limited=False))
    few = [replace(case, processes=True) for case in found if case.partitions < 8]  # two cores start no more in time
    return sorted([*found, *few], key=lambda case: (case.partitions, case.name))


def pipe_of(case: Case, schedule: str, memory: float | None, driver: str) -> gpipe.GPipe:
    """Builds a pipe with a schedule, from measured costs and within the memory limit."""
    limits: dict[str, Any] = {} if memory is None else {"remat": gpipe.Remat(memory)}
    if memory is None and schedule != "auto":
        limits["remat"] = "never"
    torch.manual_seed(0)
    layers, (inputs, _) = case.build(), case.batch()
    return gpipe.GPipe(
        layers, case.partitions, case.micro_batches, schedule=schedule, sample=inputs, seed=0, driver=driver, **limits
    )


def timed(case: Case, rounds: int, driver: str) -> list[Timed]:
    """Trains with all schedules in turns, after a warm-up step."""
    torch.set_num_threads(1)
    memory = None
    if case.limited:
        with pipe_of(case, "v_half", 2.0**40, driver) as pipe:
            memory = max(pipe.prediction.peak_bytes or ())
    pipes, unfit = dict[str, gpipe.GPipe](), list[str]()
    for schedule in SCHEDULES:
        try:
            pipes[schedule] = pipe_of(case, schedule, memory, driver)
        except (ValueError, gpipe.RemoteError):  # it does not fit, though all is recomputed
            unfit.append(schedule)
    torch.manual_seed(1)
    found, told = in_turns(pipes, case.batch(), case.loss_fn, rounds), list[Timed]()
    for schedule, pipe in pipes.items():
        held = max(pipe.prediction.peak_bytes or (0,))
        words = f"{schedule}, layers {'+'.join(map(str, pipe.layers_per_partition))}"
        again = [remat for remat in pipe.plan.remat if remat != "never"]
        words += f", remat of {len(again)} stages" if again else ""
        told.append(Timed(words, pipe.prediction.timeline.seconds, held, found[schedule]))
        pipe.close()
    return [*told, *(Timed(f"{schedule} does not fit", 0.0, 0, []) for schedule in unfit)]


def _run_rank(rank: int, name: str, rounds: int, folder: str) -> None:
    case = next(case for case in cases() if str(case) == name)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=case.partitions
    )
    found = timed(case, rounds, "process")
    if not rank:
        torch.save([tuple(each) for each in found], f"{folder}/found")
    distributed.destroy_process_group()


def over_processes(case: Case, rounds: int) -> list[Timed]:
    """Does the same with one process per rank, and returns the times of the first."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (str(case), rounds, folder), nprocs=case.partitions)
        return [Timed(*each) for each in torch.load(f"{folder}/found")]


def lines_of(case: Case, found: Sequence[Timed]) -> list[list[str]]:
    """Returns a table row for each schedule."""
    searched, lines = found[0], []
    for each in found:
        if not each.seconds:
            lines.append([f"{case}: {each.words}", "-", "-", "-", "-"])
            continue
        ratios = [other / own for other, own in zip(each.seconds, searched.seconds, strict=True)]
        low, high = interval(ratios)
        lines.append([
            f"{case}: {each.words}", f"{1e3 * each.foretold:.0f}", f"{1e3 * median(each.seconds):.0f}",
            f"{median(ratios):.3f} ({low:.3f}-{high:.3f})", f"{each.held / 1024:.0f}" if each.held else "-",
        ])  # fmt: skip
    return lines


def main() -> None:
    """Trains with all schedules, and writes the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.searched", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--keep", default="searched", help="write the result under another name")
    options = parser.parse_args()
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # of small micro-batches
    chosen = [case for case in cases() if str(case).startswith(options.only)]
    data: dict[str, object] = {"facts": facts()}
    lines: list[list[str]] = []
    for case in with_time_left(chosen, "cases"):
        found = over_processes(case, options.rounds) if case.processes else timed(case, options.rounds, "threads")
        data[str(case)] = [each._asdict() for each in found]
        lines += lines_of(case, found)
    head = ["case: schedule", "foretold, ms", "step, ms", "over the one searched for (95 %)", "KiB held, foretold"]
    text = ["# Steps by tables that are searched for", describe(facts()), __doc__.split("\n\n")[1].replace("\n", " ")]
    write(options.keep, "\n\n".join([*text, table(head, lines)]), data)


if __name__ == "__main__":
    main()
