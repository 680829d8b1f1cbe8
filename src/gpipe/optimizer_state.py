"""Keeps the state of an optimizer in host memory or files between its steps."""

import os
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpipe.stages.host_memory import give_back, in_file, is_in_file

FORKED = (
    "optimizer.step(): gpipe.offload moved the state of the optimizer to files before this process was forked, and "
    "the step would change it in the parent process, too. Call step() only in the process that called gpipe.offload. "
    "[offloaded-state-before-fork]"
)
SMALL = 4096  # Tensors with fewer bytes, such as step counts, are not moved.


def offload(optimizer: Optimizer) -> None:
    """Moves the state of an optimizer to files or host memory. Results are bitwise identical.

    Use this function if the state does not fit in memory together with the activations:

    - The state of weights on a CPU is stored in unnamed, memory-mapped files in the folder for temporary files. If
      memory is short, the operating system writes pages of these files to disk. Set `TMPDIR` to a folder on a disk.
    - The state of weights on a device is stored in pinned host memory. Each `optimizer.step()` copies it to the
      device and back.

    `state_dict()` works as usual. Loaded state is moved in the next step. Tensors of other classes, such as shards of
    `fully_shard`, sparse tensors, and tensors of less than 4 KiB are not moved.

    Args:
        optimizer: An optimizer of `torch.optim`, before or after its first step.

    Raises:
        TypeError: If `optimizer` is not an optimizer of torch.
        RuntimeError: From `optimizer.step()`, if a forked process calls it with state of its parent process.
        OSError: If a file does not fit on the disk. `optimizer.step()` can raise this error too. A note in the error
            has the folder and the number of bytes.

    >>> import gpipe
    >>> layer = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.Adam(layer.parameters())
    >>> gpipe.offload(optimizer)
    >>> layer(torch.ones(1, 64)).sum().backward()
    >>> optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}. Pass an optimizer of torch.optim.")

    process = os.getpid()

    def fetch(*_: object) -> None:
        nonlocal process
        process = _check_process(optimizer, process)
        if isinstance(optimizer.state, defaultdict):  # the class that torch uses
            optimizer.state.default_factory = _StateInFiles
        for parameter, state in optimizer.state.items():
            for name, value in _large(state):
                state[name] = value.to(parameter.device, non_blocking=True)

    def move(*_: object) -> None:
        if isinstance(optimizer.state, defaultdict):
            optimizer.state.default_factory = dict
        for parameter, state in optimizer.state.items():
            if type(state) is _StateInFiles:
                optimizer.state[parameter] = state = dict(state)  # torch.save must not see the private class.
            for name, value in _large(state):
                if not is_in_file(value):
                    state[name] = _copy_on_host(value)

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(move)
    move()


class _StateInFiles(dict[str, Any]):
    """The state of one parameter in its first step. Moves each new tensor immediately, to limit memory."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        for _, large in _large({name: value}):
            if large.is_cpu:
                try:
                    super().__setitem__(name, _copy_on_host(large))
                except OSError:
                    self.clear()  # The next step creates the whole state again.
                    raise
                give_back(0)


def _large(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    tensors = [(name, value) for name, value in state.items() if type(value) is Tensor]
    return [(name, value) for name, value in tensors if value.layout is torch.strided and value.nbytes >= SMALL]


def _check_process(optimizer: Optimizer, before: int) -> int:
    """Returns the id of this process. Raises an error if a parent process, which had the id `before`, has files."""
    process = os.getpid()
    if process != before and any(
        is_in_file(value) for state in optimizer.state.values() for _, value in _large(state)
    ):
        raise RuntimeError(FORKED)
    return process


def _copy_on_host(value: Tensor) -> Tensor:
    if value.is_cpu:
        return in_file(value)
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)
