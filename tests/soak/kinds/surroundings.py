"""The pipe among other things that people use: scalers, averages, casts, parents, the protocol of a Sequential."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

from ..blocks import network, plain
from ..case import Case, Draw, Observed, kind
from ..piped import Piped
from ..reference import Trainer, observe
from .scripts import scripted


@kind("errors")
def scaler_argument(draw: Draw) -> Case:
    """`step(..., scaler=scaler)`: gradients scaled by it, the loss not; infinite ones skip the step."""
    width, overflow = draw.width(), draw.maybe(0.3)
    case = network(draw, width, [plain(draw, width)], ways=("step",), loss=nn.functional.mse_loss)

    def script(trainer: Trainer, into: Observed) -> None:
        optimizer = optim.SGD(list(trainer.model.parameters()), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if overflow else 2.0**12, growth_interval=1)
        for number, (x, y) in enumerate(trainer.case.batches):
            if isinstance(trainer, Piped):
                step: Any = trainer.pipe.step
                into[f"{number} loss"] = step(x, y, trainer.case.loss, scaler=scaler)
            else:
                trainer.case.scale = float(scaler.scale(torch.ones(())))
                into[f"{number} loss"] = trainer.step(x, y)
            observe(trainer, into, f"{number}")
            scaler.step(optimizer)
            scaler.update()
            into[f"{number} scale"] = scaler.get_scale()
            observe(trainer, into, f"{number} after", gradients=False)
            optimizer.zero_grad()

    case.script = script
    return case


@kind("errors")
def sequence_protocol(draw: Draw) -> Case:
    """`len(pipe)`, `pipe[0]`, `pipe[-1]` and iteration, as of a Sequential."""

    def script(trainer: Trainer, into: Observed) -> None:
        model: Any = trainer.model
        into["length"] = len(model)
        into["types"] = [type(layer).__name__ for layer in model]
        into["ends"] = [type(model[0]).__name__, type(model[-1]).__name__]
        into["loss"] = trainer.run(*trainer.case.batches[0])
        weight = next(model[-1].parameters())
        into["gradient"] = weight.grad

    return scripted(draw, script, steps=1)


@kind()
def averaged_model(draw: Draw) -> Case:
    """An average of the weights, kept by torch's own copy of the whole."""

    def script(trainer: Trainer, into: Observed) -> None:
        average = AveragedModel(trainer.model, use_buffers=draw.number % 2 == 0)
        optimizer = optim.SGD(list(trainer.model.parameters()), 0.1)
        for number, batch in enumerate(trainer.case.batches):
            into[f"{number} loss"] = trainer.run(*batch)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(trainer.model)
        for name, parameter in average.named_parameters():
            into[name] = parameter.detach().clone()

    return scripted(draw, script, steps=3, core=[nn.Tanh(), nn.Dropout(0.2)])


@kind()
def cast_in_mid_training(draw: Draw) -> Case:
    """`.double()`, `.to(dtype)` or `.bfloat16()` between steps; also `apply` and `zero_grad`."""
    dtype = draw.choice((torch.float64, torch.bfloat16, torch.float16))

    def script(trainer: Trainer, into: Observed) -> None:
        (x, y), (x2, y2) = trainer.case.batches
        into["first"] = trainer.run(x, y)
        trainer.model.zero_grad()
        trainer.model.to(dtype)
        into["second"] = trainer.run(x2.to(dtype), y2.to(dtype))
        observe(trainer, into, "cast")
        observe(trainer, into, "cast", gradients=False)

    return scripted(draw, script)


@kind()
def inside_a_parent(draw: Draw) -> Case:
    """The pipe is a child of another module, whose state and parameters name it."""

    def script(trainer: Trainer, into: Observed) -> None:
        parent = nn.ModuleDict({"body": trainer.model, "head": nn.Identity()})
        into["keys"] = list(parent.state_dict())
        optimizer = optim.Adam(list(parent.parameters()), 0.01)
        parent.train()
        for number, batch in enumerate(trainer.case.batches):
            into[f"{number} loss"] = trainer.run(*batch)
            torch.nn.utils.clip_grad_value_(list(parent.parameters()), 0.01)
            optimizer.step()
            parent.zero_grad()
            observe(trainer, into, f"{number}", gradients=False)
        parent.eval()
        with torch.no_grad():
            into["validation"] = trainer.forward(trainer.case.batches[0][0])

    return scripted(draw, script)
