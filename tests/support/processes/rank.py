"""One rank of `launch`: a process that does what it is told, a line of JSON on stdin each, and writes how that ended.

It leaves `ready_<pid>` in FOLDER once it can do a job.
"""

import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.processes.marks import FOLDER


@dataclass(frozen=True)
class Order:
    """What a rank is told to do."""

    job: str  # the function, `module:name`; it is called with (rank, world, *args)
    args: Sequence[Any]  # JSON values
    world: int  # how many ranks take part
    folder: str  # where they meet, and where each leaves `rank_<number>.json`
    port: int  # what MASTER_PORT says: a free one, on which nobody listens yet
    timeout: float  # seconds that the process group waits for a message
    join: bool  # the ranks find a process group made; else the job makes its own, say from `env://`
    last: bool  # the process ends with the job, as a user's script would


def main(rank: int, folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file of torch takes seconds to write
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # whoever hangs can be asked where
    torch.set_num_threads(1)
    Path(folder, f"ready_{os.getpid()}").touch()
    for line in sys.stdin:
        order = Order(**json.loads(line))
        try:
            perform(rank, order)
        except BaseException:
            if order.last:
                raise
        if order.last:
            return


def perform(rank: int, order: Order) -> None:
    _settle_in(rank, order)
    record: dict[str, object] = {}
    try:
        job = _find(order.job)  # takes its time, and nobody waits yet
        if order.join:
            _join(rank, order)
        torch.manual_seed(0)  # layers begin alike on all ranks
        answer = job(rank, order.world, *order.args)
        json.dumps(answer)  # what cannot be said is the job's mistake
        _leave()
        record = {"answered": True, "answer": answer}
    except BaseException as error:
        record = {"raised": time.monotonic(), **_describe(error)}
        if not order.last:  # a script that fails does not tidy up
            _leave()
        raise
    finally:
        path = Path(order.folder, f"rank_{rank}.json")
        path.with_suffix(".part").write_text(json.dumps(record))
        path.with_suffix(".part").rename(path)


def _settle_in(rank: int, order: Order) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order.world, "LOCAL_WORLD_SIZE": order.world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order.port), FOLDER: order.folder}


def _join(rank: int, order: Order) -> None:
    """Meets the others at a file, in a folder that only this user may enter: no port is opened for it.

    Gloo lets a rank go on, and leave, while another is still connecting to it; so here each waits for all.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order.folder}/meeting",
        rank=rank,
        world_size=order.world,
        timeout=timedelta(seconds=order.timeout),
    )
    joined = [Path(order.folder, f"joined_{number}") for number in range(order.world)]
    joined[rank].touch()
    until = time.monotonic() + order.timeout
    while not all(file.exists() for file in joined) and time.monotonic() < until:
        time.sleep(0.001)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _find(job: str) -> Callable[..., object]:
    module, _, name = job.partition(":")
    return getattr(import_module(module), name)


def _describe(error: BaseException) -> dict[str, str]:
    return {
        "error": type(error).__name__,
        "told": "\n".join([str(error), *getattr(error, "__notes__", [])]),
        "text": "".join(traceback.format_exception(error)),
    }
