"""The memory of this machine's devices."""

import os

import torch


def memory_of(device: torch.device) -> int:
    """The bytes that a device holds when it is empty; of a CPU, those of the machine.

    >>> memory_of(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
