"""Runs one runtime in a new process, controlled by `teams`."""

import gc
import os
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed.pipelining  # imported here, so that no process does it in its first step
import torch.fx.experimental.symbolic_shapes  # likewise: torch imports it at a first backward
from torch import Tensor

import gpipe
from bench.machine import forget_peak, peak_resident_bytes, resident_bytes
from bench.one_process import Stages
from bench.runtimes import RUNTIMES
from bench.setup import Runtime, Setup
from gpipe.schedule.program import Program
from two_hosts.relay import enter

WARM_UP = 2


@dataclass
class Answer:
    """The results of a process.

    Attributes:
        seconds: Duration of each step.
        forwards: If the runtime times stages, the seconds of each stage for each micro-batch.
        backwards: Likewise for backward passes.
        peak_bytes: Bytes by which the first steps increased the memory of the process.
        program: The schedule as run, if the runtime is gpipe.
        gradients: Gradients of the last step, if requested.
        failure: The reason why there are no other results.
    """

    seconds: list[float] = field(default_factory=list)
    forwards: list[list[float]] = field(default_factory=list)
    backwards: list[list[float]] = field(default_factory=list)
    peak_bytes: int = 0
    program: Program | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    failure: str = ""


def serve(orders: Connection, name: str, setup: Setup) -> None:
    """Prepares, warms up, then executes requests: a number of steps, `"gradients"`, or None to end."""
    try:
        if setup.networks:
            enter(setup.networks[setup.rank])
        runtime = RUNTIMES[name].make()
        runtime.prepare(setup)
        gc.collect()
        before = resident_bytes()
        forget_peak()
        answer = run(runtime, WARM_UP)
        answer.peak_bytes = peak_resident_bytes() - before
        pipe = getattr(runtime, "pipe", None)
        answer.program = pipe.program if isinstance(pipe, gpipe.GPipe) else None
        orders.send(answer)
        while (order := orders.recv()) is not None:
            if order == "gradients":
                orders.send(Answer(gradients=dict(runtime.gradients())))
            else:
                orders.send(run(runtime, order))
    except EOFError:
        pass
    except BaseException:
        orders.send(Answer(failure=traceback.format_exc()))
    os._exit(0)  # threads and process groups need no farewell


def run(runtime: Runtime, steps: int) -> Answer:
    """Runs and times this number of steps."""
    answer = Answer()
    parameters = _parameters(runtime)
    if isinstance(runtime, Stages):
        for times in (*runtime.forwards, *runtime.backwards):
            times.clear()
    barrier = getattr(runtime, "barrier", None)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = None
        if barrier is not None:
            barrier()
        start = time.perf_counter()
        runtime.step()
        answer.seconds.append(time.perf_counter() - start)
    if isinstance(runtime, Stages):
        answer.forwards, answer.backwards = runtime.forwards, runtime.backwards
    return answer


def _parameters(runtime: Any) -> list[torch.nn.Parameter]:
    modules = [runtime.whole] if hasattr(runtime, "whole") else runtime.parts
    return [parameter for module in modules for parameter in module.parameters()]
