"""What somebody's code has put on parameters and tensors stays there when a pipe moves them to devices.

    python -m tests.accelerator.kept

Torch gives a module other parameters where it moves it to a device of such a kind, unlike on CUDA.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.accelerator.placing import CPU, DEVICES, FIRST, SIMULATOR
from tests.support.odd_layers import Apply
from tests.support.plain_loop import same_bits, weights_of

X, Y = (torch.randn(8, 6, generator=torch.Generator().manual_seed(at)) for at in range(2))


class Own(nn.Parameter):
    """A parameter of somebody's own kind."""


def layers() -> list[nn.Module]:
    with weights_of(0):
        made: list[nn.Module] = [nn.Linear(6, 6) for _ in range(4)]
    made[1].weight = Own(made[1].get_parameter("weight").detach())
    return made


def on_parameters() -> None:
    """Objects, kinds, attributes, gradients and hooks, as an optimizer that was made before needs them."""
    own, called = layers(), list[str]()
    parameters = [parameter for layer in own for parameter in layer.parameters()]
    for at, parameter in enumerate(parameters):
        vars(parameter)["at"] = at
    parameters[0].grad = torch.ones(6, 6)
    hooks: list[Any] = [parameters[2].register_hook(lambda gradient: called.append("gradient"))]
    hooks.append(parameters[2].register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated")))
    held = (parameters[0] * 2).sum()  # a graph, as a trial run leaves one
    pipe = gpipe.GPipe(own, 4, 2, devices=[*DEVICES[:3], CPU], costs="params")
    assert [*map(id, pipe.parameters())] == [*map(id, parameters)]
    assert [vars(parameter)["at"] for parameter in parameters] == [*range(8)]
    assert type(parameters[2]) is Own
    assert [parameter.device for parameter in parameters[::2]] == [*DEVICES[:3], CPU]
    assert parameters[0].grad is not None
    assert parameters[0].grad.device == FIRST
    pipe.step(X, Y, F.mse_loss)
    assert sorted(set(called)) == ["accumulated", "gradient"]
    for hook in hooks:
        hook.remove()
    called.clear()
    pipe.step(X, Y, F.mse_loss)
    assert not called
    del held


def shared_with_a_cpu() -> None:
    """A weight of layers of which one is on a CPU."""
    for devices in ([FIRST, CPU], [CPU, FIRST], [FIRST, DEVICES[1]]):
        own = layers()
        own[3].weight = own[0].weight
        weight = own[0].weight
        pipe = gpipe.GPipe(own, 2, 2, devices=devices)
        assert own[0].weight is own[3].weight is weight
        assert weight.device == devices[0]
        pipe.step(X, Y, F.mse_loss)
        other = layers()
        other[3].weight = other[0].weight
        gpipe.GPipe(other, 2, 2, devices=CPU).step(X, Y, F.mse_loss)
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad.cpu(), other[0].weight.grad)


def on_values() -> None:
    """An attribute of a tensor that crosses, on the same device, to another, to a CPU and back."""

    def put(x: Tensor) -> Tensor:
        x = x * 1
        vars(x)["unit"] = "metre"
        return x

    def read(x: Tensor) -> Tensor:
        assert vars(x)["unit"] == "metre"
        return x * 2

    for devices in ([FIRST, FIRST], [FIRST, DEVICES[1]], [FIRST, CPU], [CPU, FIRST]):
        for driver in ("threads", "lockstep"):
            linear, *_ = layers()
            pipe = gpipe.GPipe([linear, Apply(put), Apply(read)], [2, 1], 2, devices=devices, driver=driver)
            pipe.step(X, Y, F.mse_loss)


def scaled() -> None:
    """Gradients by a scaler on CPUs beside devices: torch's own would read on the CPU what has not come yet."""
    own = layers()
    pipe = gpipe.GPipe(own, 2, 2, devices=[CPU, FIRST])
    with pytest.raises(TypeError, match=r"make it gpipe.GradScaler\(pipe\)"):
        pipe.step(X, Y, F.mse_loss, scaler=torch.amp.GradScaler("cpu"))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = gpipe.GradScaler(pipe, init_scale=1024.0)
    pipe.step(X, Y, F.mse_loss, scaler=scaler)
    before = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    scaler.unscale_(optimizer)
    for one, parameter in zip(before, pipe.parameters(), strict=True):
        assert same_bits((one / 1024).cpu(), None if parameter.grad is None else parameter.grad.cpu())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024


def measured() -> None:
    """Costs that are measured on a device, from which layers come back."""
    own = layers()
    weight = own[0].get_parameter("weight")
    before = weight.detach().clone()
    pipe = gpipe.GPipe(own, 2, 2, sample=X, costs="time", devices=[FIRST, CPU])
    assert next(pipe.parameters()) is weight
    assert same_bits(weight.cpu(), before)


def main() -> None:
    for program in (on_parameters, shared_with_a_cpu, on_values, scaled, measured):
        program()
        for at in range(len(DEVICES)):
            torch.accelerator.synchronize(at)
        reports = SIMULATOR.take_reports()
        assert not reports, reports[0]
        print(f"{program.__name__}: kept")


if __name__ == "__main__":
    main()
