"""Lists the runtimes to compare by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.distributed import pipelining as torch_pipelining

from bench import one_process, processes
from bench.processes import in_a_loop, in_a_v
from bench.setup import Runtime


@dataclass(frozen=True)
class Entry:
    """How to start a runtime: the number of processes and of stages per partition.

    Attributes:
        schedule: The name of the schedule in this list, if the runtime has several.
        ours: Whether it is gpipe.
    """

    make: Callable[[], Runtime]
    title: str
    processes: bool = False
    stages_per_rank: int = 1
    schedule: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Family:
    """Schedules with the same placement of stages, so that all of them can use the same split points."""

    title: str
    stages_per_rank: int
    schedules: tuple[str, ...]


FAMILIES = (
    Family("One stage a rank", 1, ("gpipe", "1f1b", "zb_h1", "zb_h2")),
    Family("Two stages a rank, in a loop", 2, ("interleaved", "interleaved_zb", "breadth_first")),
    Family("Two stages a rank, in a V", 2, ("zb_v", "v_half", "v_min", "dualpipe_v")),
    Family("As the search has it, from measured seconds", 1, ("auto",)),
)


def _torch(schedule: type, title: str, name: str = "", placement: processes.Placement = processes.one_each) -> Entry:
    stages = len(placement(0, 1))
    return Entry(partial(processes.Torch, schedule, placement), f"torch {title}", True, stages, name)


def _by_schedule(family: Family) -> dict[str, Entry]:
    """Returns gpipe with each schedule of a family, in threads and in processes."""
    many = family.stages_per_rank
    return {
        f"{where}-{name}": Entry(
            partial(make, name), f"**gpipe** {name}, {where}", where == "processes", many, name, ours=True
        )
        for name in family.schedules
        for where, make in (("threads", one_process.GPipe), ("processes", processes.GPipeProcesses))
    }


COMPARED: dict[str, Entry] = {
    "plain": Entry(one_process.PlainLoop, "plain loop, one thread"),
    "newest": Entry(one_process.NewestFirst, "plain loop, newest first"),
    "whole": Entry(one_process.Whole, "whole mini-batch, two threads"),
    "stages": Entry(one_process.Stages, "stage times"),
    "gpipe": Entry(one_process.GPipe, "**gpipe** `step`"),
    "call": Entry(one_process.GPipeCall, "**gpipe** `loss.backward()`"),
    "except_last": Entry(one_process.GPipeExceptLast, "**gpipe** `step`, `except_last`"),
    "processes": Entry(processes.GPipeProcesses, "**gpipe** processes, `step`", processes=True),
    "processes-call": Entry(processes.GPipeProcessesCall, "**gpipe** processes, `loss.backward()`", processes=True),
    "naive": Entry(one_process.Naive, "naive (gpipe, M=1)"),
    "torch-gpipe": _torch(torch_pipelining.ScheduleGPipe, "GPipe", "gpipe"),
    "torch-1f1b": _torch(torch_pipelining.Schedule1F1B, "1F1B", "1f1b"),
    "torch-zbv": _torch(torch_pipelining.ScheduleZBVZeroBubble, "ZBV", "zb_v", in_a_v),
    "deepspeed": Entry(processes.DeepSpeed, "DeepSpeed", processes=True, schedule="1f1b"),
    "torchgpipe": Entry(one_process.TorchGPipe, "torchgpipe"),
    "ddp": Entry(processes.DataParallel, "DistributedDataParallel", processes=True),
}
"""The runtimes of one table of `bench.run`."""

RUNTIMES: dict[str, Entry] = {
    **COMPARED,
    "whole-1": Entry(one_process.WholeOneThread, "whole mini-batch, one thread"),
    **{name: entry for family in FAMILIES for name, entry in _by_schedule(family).items()},
    "torch-interleaved": _torch(
        torch_pipelining.ScheduleInterleaved1F1B, "interleaved 1F1B", "interleaved", in_a_loop
    ),
    "torch-interleaved_zb": _torch(
        torch_pipelining.ScheduleInterleavedZeroBubble, "interleaved zero bubble", "interleaved_zb", in_a_loop
    ),
    "torch-dualpipe_v": _torch(torch_pipelining.ScheduleDualPipeV, "DualPipeV", "dualpipe_v", in_a_v),
}
"""All, by name."""
