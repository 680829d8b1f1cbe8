"""Other ways to train: optimizers, several forwards before backwards, copies, checkpoints, threads, retries."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn, optim

from ..blocks import Apply, network, plain
from ..case import Case, Draw, Observed, kind
from ..reference import Loop, Trainer, observe

OPTIMIZERS: tuple[Callable[[Any], optim.Optimizer], ...] = (
    lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    lambda p: optim.Adam(p, 0.01),
    lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    lambda p: optim.RMSprop(p, 0.01, centered=True),
    lambda p: optim.Adagrad(p, 0.1),
    lambda p: optim.Adadelta(p),
    lambda p: optim.Adamax(p),
    lambda p: optim.NAdam(p),
    lambda p: optim.RAdam(p),
    lambda p: optim.ASGD(p),
    lambda p: optim.Rprop(p),
    lambda p: optim.Adam(p, 0.01, foreach=True),
    lambda p: optim.Adafactor(p),
    lambda p: optim.SGD(p, 0.1, maximize=True, weight_decay=0.1, fused=True),
)


@kind()
def optimizers(draw: Draw) -> Case:
    width = draw.width()
    draw.steps = 3
    make = draw.choice(OPTIMIZERS)
    case = network(draw, width, [plain(draw, width), nn.Dropout(0.1)])
    case.optimizer = lambda parameters: make(list(parameters))
    clipping = draw.maybe(0.4)

    def clipped(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        held = list(parameters)
        optimizer = make(held)
        optimizer.register_step_pre_hook(lambda *_: (torch.nn.utils.clip_grad_norm_(held, 0.1), None)[1])
        return optimizer

    if clipping:
        case.optimizer = clipped
    return case


def scripted(draw: Draw, script: Callable[[Trainer, Observed], None], *, steps: int = 2, core: Any = None) -> Case:
    """A network trained by a script."""
    width, draw.steps = draw.width(), steps
    case = network(draw, width, core or [nn.Dropout(0.2), plain(draw, width)])
    case.script = script
    return case


def forward_loss(trainer: Trainer, number: int) -> tuple[Any, torch.Tensor]:
    x, y = trainer.case.batches[number]
    output = trainer.forward(x)
    return output, trainer.case.loss(output, y)


@kind()
def several_forwards(draw: Draw) -> Case:
    """Several forwards precede their backwards, in any order; perhaps an output is dropped."""
    order = draw.choice(((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2), (1,), (2, 0)))

    def script(trainer: Trainer, into: Observed) -> None:
        made = [forward_loss(trainer, i) for i in range(3)]
        for i in order:
            trainer.backward(made[i][1], made[i][0])
            into[f"{i} loss"] = made[i][1].detach()
            observe(trainer, into, f"{i}")
        trainer.run(*trainer.case.batches[0])
        observe(trainer, into, "last")

    return scripted(draw, script, steps=3)


@kind()
def loss_of_two_calls(draw: Draw) -> Case:
    """A step between a call and its backward; then both again."""

    def script(trainer: Trainer, into: Observed) -> None:
        output, loss = forward_loss(trainer, 0)
        into["step"] = trainer.step(*trainer.case.batches[1])
        observe(trainer, into, "between")
        trainer.backward(loss, output)
        observe(trainer, into, "after")

    return scripted(draw, script)


@kind()
def copies_in_mid_training(draw: Draw) -> Case:
    """A deep copy goes its own way; the original is as if it had none."""

    def script(trainer: Trainer, into: Observed) -> None:
        trainer.run(*trainer.case.batches[0])
        twin = trainer.copy()
        observe(twin, into, "copied")
        into["twin"] = twin.run(*trainer.case.batches[1])
        observe(twin, into, "twin")
        observe(trainer, into, "original")
        into["original"] = trainer.run(*trainer.case.batches[1])
        observe(trainer, into, "again")
        twin.close()

    return scripted(draw, script, core=[nn.Dropout(0.3), nn.Tanh()])


@kind()
def state_dict_round_trip(draw: Draw) -> Case:
    """State is taken, perhaps pickled, training goes on, state is put back; keys are those of plain layers."""
    pickled, assign = draw.maybe(), draw.maybe(0.3)

    def script(trainer: Trainer, into: Observed) -> None:
        state = {name: t.clone() for name, t in trainer.model.state_dict().items()}
        into["keys"] = list(state)
        trainer.run(*trainer.case.batches[0])
        optim.SGD(list(trainer.model.parameters()), 0.1).step()
        trainer.model.zero_grad()
        trainer.model.load_state_dict(pickle.loads(pickle.dumps(state)) if pickled else state, assign=assign)
        into["loss"] = trainer.run(*trainer.case.batches[1])
        observe(trainer, into, "after")
        observe(trainer, into, "after", gradients=False)

    return scripted(draw, script)


@kind()
def gradients_of_inputs(draw: Draw) -> Case:
    """`pipe(x)` with an x that requires a gradient: a leaf, a view, the output of another network."""
    how = draw.randint(0, 3)

    def script(trainer: Trainer, into: Observed) -> None:
        x, y = trainer.case.batches[0]
        leaf = x.clone().requires_grad_()
        given = (leaf, leaf * 2, leaf.view(-1).view(x.shape), leaf.tanh())[how]
        given.retain_grad()
        cut = given.detach().requires_grad_() if isinstance(trainer, Loop) and how else given
        output = trainer.forward(cut)
        loss = trainer.case.loss(output, y)
        trainer.backward(loss, output)
        if cut is not given:
            given.backward(cut.grad)
        into["loss"], into["input"], into["leaf"] = loss.detach(), given.grad, leaf.grad
        observe(trainer, into, "after")

    return scripted(draw, script, steps=1)


@kind()
def several_pipes_in_threads(draw: Draw) -> Case:
    """Three copies train at once, each in its own thread."""

    def script(trainer: Trainer, into: Observed) -> None:
        twins = [trainer.copy() for _ in range(3)]

        def job(twin: Trainer, index: int) -> Callable[[], None]:
            def do() -> None:
                for number in range(2):
                    into[f"{index} {number}"] = twin.run(*twin.case.batches[number])
                observe(twin, into, f"{index}")

            return do

        trainer.together([job(twin, index) for index, twin in enumerate(twins)])
        for twin in twins:
            twin.close()

    return scripted(draw, script, core=[nn.Dropout(0.3), nn.Tanh()])


class Breaks(nn.Module):
    """Raises when armed, at a call of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed is not None:
            self.armed -= 1
            if self.armed < 0:
                raise OverflowError("armed")
        return x * 1.0


@kind()
def failure_then_retry(draw: Draw) -> Case:
    """A step fails anywhere; after zero_grad the pipe works again."""
    at = 0  # a step of one micro-batch runs no more

    def script(trainer: Trainer, into: Observed) -> None:
        for number in range(2):
            into[f"{number} loss"] = trainer.run(*trainer.case.batches[number])
            observe(trainer, into, f"{number}")
            trainer.model.zero_grad()
            if not isinstance(trainer, Loop):
                fail(trainer, at)

    def fail(trainer: Trainer, at: int) -> None:
        breaks = next(m for m in trainer.model.modules() if isinstance(m, Breaks))
        breaks.armed = at
        with contextlib.suppress(OverflowError):
            trainer.run(*trainer.case.batches[0])
        breaks.armed = None
        trainer.model.zero_grad()

    core = [Breaks(), nn.Tanh()]
    return scripted(draw, script, core=core[:: draw.choice((1, -1))])


@kind()
def second_backward(draw: Draw) -> Case:
    """A second backward, create_graph and autograd.grad of parameters are refused with the reason."""
    how = draw.randint(0, 2)

    def script(trainer: Trainer, into: Observed) -> None:
        _output, loss = forward_loss(trainer, 0)
        match how:
            case 0:
                loss.backward(retain_graph=True)
                loss.backward()
            case 1:
                loss.backward(create_graph=True)
            case _:
                torch.autograd.grad(loss, list(trainer.model.parameters()))

    case = scripted(draw, script, steps=1, core=[nn.Tanh()])
    words = (r"second|twice|again", r"create_graph", r"autograd\.grad|used in the graph")
    case.must_refuse, case.refusal = True, (words[how],)
    return case


@kind()
def output_changed_in_place(draw: Draw) -> Case:
    """The output of a call is changed in place, viewed, or detached before the loss."""
    changes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda o: o.mul_(2),
        lambda o: o[:, :1] * 2,
        lambda o: o.clone().relu_(),
        lambda o: o.t(),
    )
    change = draw.choice(changes)

    def script(trainer: Trainer, into: Observed) -> None:
        output = trainer.forward(trainer.case.batches[0][0])
        mine = output * 1.0 if isinstance(trainer, Loop) else output
        loss = change(mine).pow(2).mean()
        trainer.backward(loss, output)
        into["loss"] = loss.detach()
        observe(trainer, into, "after")

    return scripted(draw, script, steps=1)


@kind()
def batches_of_changing_size(draw: Draw) -> Case:
    """Mini-batches of other sizes, N < M among them, one after another."""
    width = draw.width()
    case = network(draw, width, [plain(draw, width), nn.Dropout(0.2), Apply(lambda x: x * len(x))])
    sizes = [draw.choice((1, 2, 3, 5, 8, 13)) for _ in range(4)]
    case.batches = [(draw.data(n, width), draw.data(n, width)) for n in sizes]
    return case


@kind()
def each_layer_a_stage(draw: Draw) -> Case:
    """K = L, and K = 1."""
    width = draw.width()
    case = network(draw, width, [plain(draw, width), plain(draw, width)])
    case.cut = draw.choice(((1,) * len(case.layers), (len(case.layers),)))
    return case


@kind()
def gradient_scaler(draw: Draw) -> Case:
    """A gradient scaler's factor goes into the step; the optimizer is stepped through it."""
    width, scale = draw.width(), draw.choice((2.0**10, 2.0**16))
    case = network(draw, width, [plain(draw, width)], ways=("step",))
    case.scale = scale

    def script(trainer: Trainer, into: Observed) -> None:
        optimizer = optim.SGD(list(trainer.model.parameters()), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for number, (x, y) in enumerate(trainer.case.batches):
            scaler.scale(torch.ones(()))
            into[f"{number} loss"] = trainer.step(x, y)
            scaler.step(optimizer)
            scaler.update()
            observe(trainer, into, f"{number}")
            observe(trainer, into, f"{number}", gradients=False)
            optimizer.zero_grad()

    case.script = script
    return case
