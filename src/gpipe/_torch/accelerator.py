"""Supports devices of any vendor through `torch.accelerator` (CUDA, ROCm, XPU and others), and CPUs.

A device *queues* if it runs kernels asynchronously, on several streams. CPUs have no streams, and MPS has only one
stream.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
WITHOUT_STREAMS = frozenset({"cpu", "meta", "mps"})


def queues(device: torch.device) -> bool:
    """Whether a device has several streams."""
    return device.type not in WITHOUT_STREAMS


def accelerators() -> list[torch.device]:
    """Returns the accelerators of this process. The list is empty if there are only CPUs."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())] if kind else []


@cache
def kinds() -> tuple[str, ...]:
    """Returns the device types for which a thread may have an autocast."""
    kind = torch.accelerator.current_accelerator()
    return ("cpu",) if kind is None else ("cpu", kind.type)


def initialized_accelerators() -> list[torch.device]:
    """Returns the accelerators if torch has initialized them. Reading a generator would initialize its device."""
    devices = accelerators()
    return devices if devices and torch.get_device_module(devices[0]).is_initialized() else []


def numbered(device: torch.device) -> torch.device:
    """Returns a device with its index. Returns the CPU without an index."""
    if device.type == "cpu":
        return CPU
    if device.index is None and device.type != "meta":
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that random operations on a device use by default."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    return generators[numbered(device).index]


_generator_locks: defaultdict[torch.device, threading.RLock] = defaultdict(threading.RLock)


@contextmanager
def own_generator(device: torch.device) -> Iterator[torch.Generator]:
    """Yields the default generator of a device. Waits while `standing_in` replaces its state."""
    with _generator_locks[numbered(device)]:
        yield default_generator(device)


@contextmanager
def standing_in(generator: torch.Generator) -> Iterator[None]:
    """Replaces the state of a device's default generator by the state of `generator` inside the context.

    A lock makes other threads that use random numbers on this device wait. CUDA generators swap states by reference.
    """
    default = default_generator(generator.device)
    with _generator_locks[numbered(generator.device)]:
        if _shares_states(generator.device.type):
            original = default.graphsafe_get_state()
            default.graphsafe_set_state(generator)
            try:
                yield
            finally:
                default.graphsafe_set_state(original)
        else:
            default_state = default.get_state()
            default.set_state(generator.get_state())
            try:
                yield
                generator.set_state(default.get_state())
            finally:
                default.set_state(default_state)


@cache
def _shares_states(kind: str) -> bool:
    try:
        torch.Generator(kind).graphsafe_get_state()
    except NotImplementedError:
        return False
    return True


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the stream on which this thread queues kernels."""
    return torch.accelerator.current_stream(device)


@contextmanager
def queued_on(stream: torch.Stream | None) -> Iterator[None]:
    """Queues kernels on a stream inside the context. Does nothing if `stream` is None.

    In contrast to a `torch.Stream`, two threads can enter the context at the same time.
    """
    if stream is None:
        yield
        return
    before, device = current_stream(stream.device), torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # also sets the device
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def put_data(parameter: Tensor, data: Tensor) -> None:
    """Assigns `parameter.data = data`, also between device types for which torch rejects this, such as CPU and NPU.

    Keeps hooks, but not gradients.
    """
    if torch._has_compatible_shallow_copy_type(parameter, data):
        parameter.data = data
        return
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, data.detach().requires_grad_(parameter.requires_grad))
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def keep_parameters(module: nn.Module, device: torch.device, move: Callable[[Tensor], Tensor]) -> None:
    """Moves parameters that `module.to(device)` would replace by new objects, for example on an NPU."""
    for parameter in module.parameters():
        is_plain = not hasattr(parameter, "__tensor_flatten__")  # `to` moves the inner tensors of wrapper subclasses
        if is_plain and not torch._has_compatible_shallow_copy_type(parameter, torch.empty(0, device=device)):
            gradient = parameter.grad
            put_data(parameter, move(parameter.data))
            parameter.grad = None if gradient is None else move(gradient)


def copied_to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies tensors to the CPU. Queues all copies, and then waits for each device once."""
    originals = list(tensors)
    copies = [tensor.to(CPU, copy=True, non_blocking=queues(tensor.device)) for tensor in originals]
    for device in {tensor.device for tensor in originals if queues(tensor.device)}:
        current_stream(device).synchronize()
    return copies


def synchronize(device: torch.device) -> None:
    """Waits until a device has finished all queued kernels."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def memory_of(device: torch.device) -> int:
    """Returns the total memory of a device in bytes. For a CPU, this is the memory of the machine."""
    if queues(device):
        return int(torch.accelerator.get_memory_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def name_of(device: torch.device) -> str:
    """Returns the product name of a device, or the torch name of the device if the product name is unknown."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)
