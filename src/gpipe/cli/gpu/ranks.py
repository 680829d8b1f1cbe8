"""A process for each device, which send each other tensors: the bits of one process."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from gpipe.cli.gpu.bits import Left, devices, fitting, text, train
from gpipe.cli.gpu.page import Finding

LIMIT = timedelta(seconds=480)  # of a message, below that of a part


def has_nccl() -> bool:
    """Whether torch has it here, for two devices or more."""
    return torch.cuda.is_available() and len(devices()) > 1 and dist.is_nccl_available()


def nccl(every: int) -> Iterator[Finding]:
    """A process for each device, by several schedules."""
    there = devices()
    if len(there) < 2:
        yield Finding("not run", f"it takes two accelerators, and there is {there[0]} alone")
        return
    names = fitting(len(there))[::every]
    torch.use_deterministic_algorithms(True)
    expected = _digests(train(text, there[:1]))
    told = in_processes(_train, len(there), names)
    way = f"{len(there)} processes over {'NCCL' if has_nccl() else 'gloo and the memory of the host'}"
    right = []
    for name in names:
        found = {tensor: digest for rank in told for tensor, digest in rank[name].items()}
        apart = [tensor for tensor, digest in expected.items() if found.get(tensor) != digest]
        right += [] if apart else [name]
        if apart:
            yield Finding(
                "fell short", f"{way}, {name}: {len(apart)} of {len(expected)} tensors differ: {apart[0]} ..."
            )
    yield Finding("held" if right else "fell short", f"{way}, as one process: {', '.join(right) or 'none'}")
    if not has_nccl():
        yield Finding("not run", f"NCCL, which {there[0].type} has not")


def _train(rank: int, names: list[str]) -> dict[str, dict[str, str]]:
    """What this process has in the end, by schedule: losses, and tensors of its own layers."""
    torch.use_deterministic_algorithms(True)
    there = [devices()[rank]] * dist.get_world_size()
    return {name: _digests(train(text, there, driver="process", schedule=name)) for name in names}


def _digests(left: Left) -> dict[str, str]:
    each = {name: tensor.contiguous().view(-1).view(torch.uint8).numpy() for name, tensor in left.items()}
    return {name: hashlib.sha256(data.tobytes()).hexdigest() for name, data in each.items()}


def in_processes(job: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """What a job gives, as JSON, in processes of one group, each with its own device."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_enter, (count, folder, job, arguments), count)
        return [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(count)]


def _enter(rank: int, count: int, folder: str, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if there := devices():
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{there[rank].type}:{'nccl' if has_nccl() else 'gloo'}"
    dist.init_process_group(backend, f"file://{folder}/meeting", LIMIT, rank=rank, world_size=count)
    Path(folder, str(rank)).write_text(json.dumps(job(rank, *arguments)), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # a process group that hangs in its end is none of this
