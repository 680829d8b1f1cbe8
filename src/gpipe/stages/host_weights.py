"""Moves the weights of layers to the host, where they stay while other stages use the device."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gpipe._torch.accelerator import CPU, put_data, queues
from gpipe._torch.autograd import PLAIN
from gpipe.stages.host_memory import in_file, is_in_file
from gpipe.stages.memory_layout import alignment, moved, storage_address

UNSUPPORTED = (
    "weights='host': {name} is a {kind}, which cannot be copied to a device and back. Use weights='device', or plain "
    "parameters. [weight-not-streamable]"
)
SHARES = (
    "weights='host': {name} shares memory with {other}, but weights on the host cannot share memory. Use the same "
    "Parameter in both places, or weights='device'. [weights-share-memory]"
)


def find_unsupported(layers: Mapping[str, nn.Module]) -> list[str]:
    """Returns a message for each parameter that cannot be on the host."""
    mistakes, users = list[str](), dict[int, tuple[str, Tensor]]()
    for layer_name, layer in layers.items():
        for parameter_name, parameter in layer.named_parameters():
            name = f"{layer_name}.{parameter_name}"
            if type(parameter) not in PLAIN or parameter.layout is not torch.strided or parameter.is_quantized:
                kind = f"{type(parameter).__name__} with layout {parameter.layout}"
                mistakes.append(UNSUPPORTED.format(name=name, kind=kind))
            elif address := storage_address(parameter):
                other, user = users.setdefault(address, (name, parameter))
                if user is not parameter:
                    mistakes.append(SHARES.format(name=name, other=other))
    for layer_name, layer in layers.items():
        for buffer_name, buffer in layer.named_buffers():
            if (address := storage_address(buffer)) in users:
                name = f"{layer_name}.{buffer_name}"
                mistakes.append(SHARES.format(name=name, other=users[address][0]))
    return mistakes


def is_on_host(weight: Tensor, device: torch.device) -> bool:
    """Whether a weight is in host memory, and is copied to the device of its stage before its use."""
    return weight.is_cpu if queues(device) else is_in_file(weight)


def move_to_host(module: nn.Module, device: torch.device) -> None:
    """Moves the parameters of a module to the host, and its buffers to a device."""
    for parameter in module.parameters():
        gradient, parameter.grad = parameter.grad, None
        put_data(parameter, _on_host(parameter.detach(), device))
        parameter.grad = None if gradient is None else moved(gradient, CPU)
    parameters = set(map(id, module.parameters()))
    gradients = {id(parameter.grad) for parameter in module.parameters()}
    module._apply(lambda tensor: tensor if id(tensor) in parameters | gradients else moved(tensor, device))


def _on_host(weight: Tensor, device: torch.device) -> Tensor:
    """Copies a weight to the host, with its strides and alignment.

    A CPU keeps a weight as it is if it is empty, or if its elements are not dense in memory.
    """
    if queues(device):
        return torch.empty_like(weight, device=CPU, pin_memory=True).copy_(weight)
    aligned, is_dense = alignment(weight), torch.empty_like(weight, device="meta").stride() == weight.stride()
    if not weight.numel() or not is_dense or aligned % weight.itemsize or is_in_file(weight):
        return weight
    return in_file(weight, aligned)
