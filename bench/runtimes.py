"""The runtimes that are compared, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from bench import one_process, processes
from bench.setup import Runtime


@dataclass(frozen=True)
class Entry:
    """How a runtime is started: in how many processes for each partition, and with how many stages for each."""

    make: Callable[[], Runtime]
    title: str
    processes: bool = False
    stages_per_rank: int = 1


RUNTIMES: dict[str, Entry] = {
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
    "torch-gpipe": Entry(processes.TorchFillDrain, "torch GPipe", processes=True),
    "torch-1f1b": Entry(processes.Torch1F1B, "torch 1F1B", processes=True),
    "torch-zbv": Entry(processes.TorchZBV, "torch ZBV", processes=True, stages_per_rank=2),
    "deepspeed": Entry(processes.DeepSpeed, "DeepSpeed", processes=True),
    "torchgpipe": Entry(one_process.TorchGPipe, "torchgpipe"),
    "ddp": Entry(processes.DataParallel, "DistributedDataParallel", processes=True),
}
