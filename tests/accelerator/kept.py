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
from tests.support.planned import pipe_by_costs

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
    pipe = gpipe.GPipe(own, 4, 2, devices=[*DEVICES[:3], CPU])
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
    with pytest.raises(TypeError, match=r"\[scaler-on-mixed-devices\]"):
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
    pipe = gpipe.GPipe(own, 2, 2, sample=X, devices=[FIRST, CPU])
    assert next(pipe.parameters()) is weight
    assert same_bits(weight.cpu(), before)


class Reader(nn.Module):
    """A model with a loss of its own where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 6), nn.Linear(6, 20)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else {"loss": F.cross_entropy(logits.mT, labels), "logits": logits}


def evaluated() -> None:
    """A model and its sample on a device, evaluated with labels, of which a micro-batch has none, and without."""
    ids = torch.randint(20, (8, 5), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:3, 1:] = -100
    labels[4:6] = -100
    for where in (CPU, FIRST):
        for devices in (FIRST, [FIRST, DEVICES[1]]):
            batch = {"ids": ids.to(where), "labels": labels.to(where)}
            for sample in (batch, {"ids": batch["ids"]}):
                with weights_of(1):
                    model = Reader().to(where)
                pipe = pipe_by_costs(model, 2, 4, sample=sample, devices=devices, costs="params").eval()
                with torch.no_grad():
                    loss, found, logits = pipe.step(batch), pipe(batch), pipe({"ids": batch["ids"]})
                with weights_of(1):
                    own = Reader()(ids, labels)
                torch.testing.assert_close(loss.cpu(), own["loss"])
                for one in (found["logits"], logits):
                    torch.testing.assert_close(one.cpu(), own["logits"])


def together() -> None:
    """Two calls of one pipe in one loss: with ranks on several devices autograd may begin one within the other."""
    given = X.to(FIRST)

    def gradients(devices: list[torch.device], driver: str) -> list[Tensor]:
        pipe = gpipe.GPipe(layers(), len(devices), 2, devices=devices, driver=driver)
        (pipe(given * 0.3).square().mean() + pipe(given).mean()).backward()
        return [parameter.grad.cpu() for parameter in pipe.parameters() if parameter.grad is not None]

    expected = gradients([FIRST], "lockstep")
    for driver in ("lockstep", "threads"):
        for devices in ([FIRST, FIRST], [FIRST, DEVICES[1]], [FIRST, DEVICES[1]], [DEVICES[1], FIRST]):
            found: list[Tensor] | str
            try:
                found = gradients(devices, driver)
            except RuntimeError as error:
                found = str(error)
            if isinstance(found, str):
                assert "[concurrent-backwards]" in found
                assert len(set(devices)) > 1
            else:
                assert all(map(same_bits, found, expected)), (driver, devices)


def main() -> None:
    for program in (on_parameters, shared_with_a_cpu, on_values, scaled, measured, evaluated, together):
        program()
        for at in range(len(DEVICES)):
            torch.accelerator.synchronize(at)
        reports = SIMULATOR.take_reports()
        assert not reports, reports[0]
        print(f"{program.__name__}: kept")


if __name__ == "__main__":
    main()
