"""An optimizer's state on the host: in mapped files, or in pinned memory but for a step."""

import os
import tempfile
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer

from gpipe.features.offload import give_back, room_for

SMALL = 4096  # bytes of state that stays where it is: counts of steps


def offload(optimizer: Optimizer) -> None:
    """Has an optimizer keep its state on the host, to the same bits.

    That of weights on a CPU lies in mapped files without a name, in the folder for temporary ones (`TMPDIR`: have it
    on a disk), whose pages the system takes back for want of memory. That of weights on a device lies in pinned
    memory, and is on the device for a step alone, while no activations are: twice its bytes cross for each.
    `state_dict()` has it as ever, and what is loaded goes to the host with the next step. What is no plain tensor,
    such as shards, stays where it is, as do the few bytes of counts.

    Raises:
        TypeError: It is no optimizer of torch.
        OSError: There is no room for a file; a note tells how many bytes were to go where. So does a step.

    >>> import gpipe
    >>> layer = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.Adam(layer.parameters())
    >>> gpipe.offload(optimizer)
    >>> layer(torch.ones(1, 64)).sum().backward()
    >>> optimizer.step()
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"offload takes an optimizer of torch.optim, not {type(optimizer).__name__}")

    def bring(*_: object) -> None:
        if isinstance(optimizer.state, defaultdict):  # as torch has it
            optimizer.state.default_factory = _StateInFiles
        for parameter, state in optimizer.state.items():
            for name, value in _large(state):
                state[name] = value.to(parameter.device, non_blocking=True)

    def take(*_: object) -> None:
        if isinstance(optimizer.state, defaultdict):
            optimizer.state.default_factory = dict
        for parameter, state in optimizer.state.items():
            if type(state) is _StateInFiles:
                optimizer.state[parameter] = state = dict(state)  # plain, to be saved
            for name, value in _large(state):
                if not value.is_cpu or value.untyped_storage().filename is None:
                    state[name] = _copy_on_host(value)

    optimizer.register_step_pre_hook(bring)
    optimizer.register_step_post_hook(take)
    take()


class _StateInFiles(dict[str, Any]):
    """What a first step makes goes to its file tensor by tensor: all of it may be more than there is room for."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        for _, large in _large({name: value}):
            if large.is_cpu:
                try:
                    super().__setitem__(name, _copy_on_host(large))
                except OSError:
                    self.clear()  # it is made anew by the next step, whole
                    raise
                give_back(0)


def _large(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in state.items() if type(value) is Tensor and value.nbytes >= SMALL]


def _copy_on_host(value: Tensor) -> Tensor:
    if not value.is_cpu:
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)
    like = torch.empty_like(value, device="meta")  # laid out as densely as can be
    with tempfile.NamedTemporaryFile() as file, room_for(value.nbytes):
        if hasattr(os, "posix_fallocate"):  # else what is mapped ends the process, written on a full disk
            os.posix_fallocate(file.fileno(), 0, value.nbytes)
        storage = UntypedStorage.from_file(file.name, True, value.nbytes)
    assert isinstance(storage, UntypedStorage)
    return value.new_empty(0).set_(storage, 0, like.shape, like.stride()).copy_(value)
