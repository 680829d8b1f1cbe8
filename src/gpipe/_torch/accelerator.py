"""Devices of any maker, as `torch.accelerator` names them: CUDA, ROCm, XPU and others, and CPUs beside them.

A device *queues* if its kernels run later than they are called, on streams. CPUs do not; MPS has one stream alone.
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
    """Whether a device has streams to choose from."""
    return device.type not in WITHOUT_STREAMS


def accelerators() -> list[torch.device]:
    """The accelerators of this process; none where there are CPUs alone."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, at) for at in range(torch.accelerator.device_count())] if kind else []


@cache
def kinds() -> tuple[str, ...]:
    """The kinds of devices for which a thread may have an autocast."""
    kind = torch.accelerator.current_accelerator()
    return ("cpu",) if kind is None else ("cpu", kind.type)


def awake() -> list[torch.device]:
    """The accelerators, if torch has begun to use them: it does where it is asked for their generators."""
    found = accelerators()
    return found if found and torch.get_device_module(found[0]).is_initialized() else []


def numbered(device: torch.device) -> torch.device:
    """A device with its number, but for the CPU, which is one whatever its name."""
    if device.type == "cpu":
        return CPU
    if device.index is None and device.type != "meta":
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operations on a device take when given none."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    return generators[numbered(device).index]


_standing_in: defaultdict[torch.device, threading.RLock] = defaultdict(threading.RLock)


@contextmanager
def own_generator(device: torch.device) -> Iterator[torch.Generator]:
    """The default generator of a device, while no other stands in for it."""
    with _standing_in[numbered(device)]:
        yield default_generator(device)


@contextmanager
def standing_in(generator: torch.Generator) -> Iterator[None]:
    """Has what draws from its device's default generator draw from this one, for operations that take none.

    The lock keeps apart the threads that draw on one device. Generators of CUDA's kind change places by reference.
    """
    default = default_generator(generator.device)
    with _standing_in[numbered(generator.device)]:
        if _shares_states(generator.device.type):
            own = default.graphsafe_get_state()
            default.graphsafe_set_state(generator)
            try:
                yield
            finally:
                default.graphsafe_set_state(own)
        else:
            before = default.get_state()
            default.set_state(generator.get_state())
            try:
                yield
                generator.set_state(default.get_state())
            finally:
                default.set_state(before)


@cache
def _shares_states(kind: str) -> bool:
    try:
        torch.Generator(kind).graphsafe_get_state()
    except NotImplementedError:
        return False
    return True


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread queues on."""
    return torch.accelerator.current_stream(device)


@contextmanager
def queued_on(stream: torch.Stream | None) -> Iterator[None]:
    """Queues on a stream, if any, what is done inside. A `torch.Stream` itself cannot be entered by two at once."""
    if stream is None:
        yield
        return
    before, device = current_stream(stream.device), torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # and the device with it
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def put_data(parameter: Tensor, data: Tensor) -> None:
    """`parameter.data = data`, also where torch has none, as between a CPU and an NPU; hooks stay, not gradients."""
    if torch._has_compatible_shallow_copy_type(parameter, data):
        parameter.data = data
        return
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, data.detach().requires_grad_(parameter.requires_grad))
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def keep_parameters(module: nn.Module, device: torch.device, move: Callable[[Tensor], Tensor]) -> None:
    """Moves the parameters for which `module.to(device)` would make others, if torch does so there, as on an NPU."""
    for parameter in module.parameters():
        of_torch = not hasattr(parameter, "__tensor_flatten__")  # others are moved by what they hold
        if of_torch and not torch._has_compatible_shallow_copy_type(parameter, torch.empty(0, device=device)):
            gradient = parameter.grad
            put_data(parameter, move(parameter.data))
            parameter.grad = None if gradient is None else move(gradient)


def copied_to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies on the CPU: each is queued behind what its device has to do, and all are waited for at once."""
    given = list(tensors)
    copies = [tensor.to(CPU, copy=True, non_blocking=queues(tensor.device)) for tensor in given]
    for device in {tensor.device for tensor in given if queues(tensor.device)}:
        current_stream(device).synchronize()
    return copies


def synchronize(device: torch.device) -> None:
    """Waits until all that was queued on a device is done."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def memory_of(device: torch.device) -> int:
    """The bytes that a device holds when it is empty; of a CPU, those of the machine."""
    if queues(device):
        return int(torch.accelerator.get_memory_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def name_of(device: torch.device) -> str:
    """What a device is called by its maker, as far as torch can say."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)
