"""Checks random pipes on the simulated accelerator: identical to the reference loop, and no reports of the detector.

    python -m tests.accelerator.matrix --first 0 --count 200

Each pipe is determined by its number. They run in a separate process, because torch supports one kind of accelerator
per process.
"""

import argparse
import copy
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.schedule.schedules import SCHEDULES
from tests.accelerator import models
from tests.accelerator.placing import (
    CPU,
    DEVICES,
    FIRST,
    SIMULATOR,
    NoSuch,
    moved,
    on_cpu,
    on_streams,
    onto,
    placed,
    some_devices,
)
from tests.support import mixed_tasks, runs_alive
from tests.support.mixed_tasks import Task, Way, generate_task, generate_way, is_statistic, run_plain, twin
from tests.support.odd_layers import Apply
from tests.support.outcomes import Outcome, differences
from tests.support.plain_loop import REMATS, plain_loop, same_bits, weights_of

# What is tried. Each gives the names of what differs, and says what it tried.


def mixed(draw: Random) -> tuple[list[str], str]:
    """Any model, in any cut, schedule, remat and driver; inputs and targets on any device."""
    task = generate_task(draw)
    name, ranks = draw.choice(list(SCHEDULES)), draw.randint(1, 4)
    if name == "dualpipe_v":
        task = replace(task, micro_batches=max(task.micro_batches, 2 * ranks))
    if task.model.norms and min(task.rows) < 2 * task.micro_batches:
        raise NoSuch
    way = generate_way(draw, task.model, ranks * SCHEDULES[name].stages_per_rank)
    if way is None:
        raise NoSuch
    return compare(draw, task, replace(way, schedule=name), ranks)


def on_host(draw: Random) -> tuple[list[str], str]:
    """Any model with weights on the host, of which a few stages are on a device at once."""
    task, ranks, each = generate_task(draw), draw.randint(1, 3), draw.randint(1, 4)
    if task.model.norms and min(task.rows) < 2 * task.micro_batches:
        raise NoSuch
    way = generate_way(draw, task.model, ranks * each)
    if way is None:
        raise NoSuch
    schedule, remat = gpipe.BreadthFirst(each, draw.randint(1, 3)), draw.choice(["always", "offload_inputs"])
    way = replace(way, schedule=schedule, weights="host", remat=(remat,) * len(way.cut))
    return compare(draw, task, way, ranks)


class Clamps(nn.Linear):
    """May write its weight in the forward pass, and may raise in the backward pass."""

    writes, fails = True, False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.writes:
                self.weight.clamp_(-0.2, 0.2)
        output = super().forward(x)
        if self.fails:
            output.register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> Tensor:
        raise KeyError


def written_on_host(draw: Random) -> tuple[list[str], str]:
    """Weights that layers write, and an exception in a backward pass, after which gradients on the host are whole."""
    with weights_of(1):
        reference = [Clamps(WIDTH, WIDTH) for _ in range(6)]
    for layer in reference if draw.random() < 0.5 else ():
        layer.writes = False
    layers = copy.deepcopy(reference)
    moved(reference, FIRST)
    total = plain_loop(reference, X.to(FIRST), Y.to(FIRST), F.mse_loss, micro_batches=M, seed=3, step=0)
    expected: Outcome = {"loss": total}
    expected = on_cpu(expected | {f"{at} {name}": t for at, name, t in tensors_of(reference)})
    layers[2].fails = draw.random() < 0.7
    schedule, driver = gpipe.BreadthFirst(6, draw.randint(1, 3)), draw.choice(["threads", "lockstep"])
    with on_streams(draw):
        pipe = gpipe.GPipe(layers, 1, M, schedule=schedule, weights="host", driver=driver, seed=3, devices=FIRST)
        pipe.verify_steps = False
        found: Outcome = {}
        with suppress(KeyError):
            found["loss"] = pipe.step(X, Y, F.mse_loss)
        found = on_cpu(found) | {f"{at} {name}": t for at, name, t in tensors_of(layers)}
    if layers[2].fails:  # The gradients of the layers after it are whole.
        expected = {name: t for name, t in expected.items() if name[0] in "345"}
        found = {name: t for name, t in found.items() if name in expected}
    return differences(found, expected), f"{schedule}, {driver}, writes: {layers[0].writes}, fails: {layers[2].fails}"


def tensors_of(layers: Sequence[nn.Module]) -> Iterator[tuple[int, str, Tensor | None]]:
    for at, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            yield at, name, parameter.detach()
            yield at, f"{name}.grad", parameter.grad


def compare(draw: Random, task: Task, way: Way, ranks: int) -> tuple[list[str], str]:
    """Runs a task on drawn devices and by the plain loop, and returns the names of results that differ."""
    devices = some_devices(draw, ranks)
    model = twin(task.model)
    moved(model.layers, FIRST)
    inputs_on, targets_on = (draw.choice([*DEVICES, CPU]) for _ in range(2))
    if inputs_on == CPU:  # a part of a mini-batch lies as it does where it was copied to, not as a part of a copy
        model.layers[0].register_forward_pre_hook(lambda _, given: onto(given, FIRST))
    first, second = (device if device == CPU else FIRST for device in (inputs_on, targets_on))
    expected = on_cpu(run_plain(placed(task, first, second, model)))
    given = placed(task, inputs_on, targets_on)
    with (
        on_streams(draw),
        mixed_tasks.make(twin(task.model), task, way, devices=devices) as pipe,
    ):
        found = on_cpu(mixed_tasks.run(given, pipe))
    said = f"{way}, {devices}, {inputs_on}, {targets_on}, {task.way}, {task.model.kinds}"
    if apart := set(found) ^ set(expected):
        return sorted(apart), said
    return differences(found, expected, leave_out=is_statistic(task)), said


def alive(draw: Random) -> tuple[list[str], str]:
    """Calls whose backwards come later, steps and evaluations between, of two pipes, one of a traced model."""
    story = [(draw.choice(runs_alive.ACTS), draw.randrange(4)) for _ in range(draw.randint(3, 9))]
    how: dict[str, Any] = {
        "driver": draw.choice(["threads", "lockstep"]),
        "remat": [draw.choice(REMATS) for _ in range(2)],
        "schedule": draw.choice(["gpipe", "1f1b", "zb_h1"]),
        "devices": some_devices(draw, 2),
    }
    plain = runs_alive.plain()
    for side in plain:
        moved([side.module], FIRST)
        side.device = FIRST
    expected = runs_alive.tell(story, plain), runs_alive.state_of(plain)
    with on_streams(draw):
        pipes = runs_alive.pipes(2, **how)
        for pipe in pipes:
            pipe.device = draw.choice(DEVICES)
        found = runs_alive.tell(story, pipes), runs_alive.state_of(pipes)
        came = [tensor.cpu() for tensor in found[0]]
        state = on_cpu(found[1])
    pairs = enumerate(zip(came, expected[0], strict=True))
    wrong = [f"{at} of the story" for at, (one, other) in pairs if not same_bits(one, other.cpu())]
    return wrong + differences(state, on_cpu(expected[1])), f"{story}, {how}"


WIDTH, M = 8, 4
X, Y = (torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(at)) for at in range(2))


def network(before: Callable[[Tensor], Tensor] = lambda x: x) -> list[nn.Module]:
    with weights_of(1):
        return [
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Dropout(0.3),
            Apply(before),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
        ]


def some_pipe(draw: Random, layers: Sequence[nn.Module], **settings: Any) -> tuple[gpipe.GPipe, str]:
    how = {
        "remat": draw.choice(REMATS),
        "driver": draw.choice(["threads", "lockstep"]),
        "schedule": draw.choice(["gpipe", "1f1b", "zb_h1"]),
        "devices": some_devices(draw, 3),
    } | settings
    return gpipe.GPipe(layers, [2, 3, 2], M, seed=3, **how), str(how)


def recorded(draw: Random) -> tuple[list[str], str]:
    """Trained with autocast and a scaler, while it is recorded and saved in the background; then loaded elsewhere."""
    reference = network()
    moved(reference, FIRST)
    model, casts = nn.Sequential(*reference), draw.random() < 0.5
    deferred = draw.random() < 0.5
    cast: Callable[[], Any] = partial(torch.autocast, "sim", torch.bfloat16) if casts else nullcontext
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected: Outcome = {}
    for step in range(3):
        with cast():
            expected[f"{step} loss"] = plain_loop(
                reference, X.to(FIRST), Y.to(FIRST), F.mse_loss, micro_batches=M, seed=3, step=step
            )
        plain.step()
        plain.zero_grad()
    expected |= {name: tensor.detach() for name, tensor in model.state_dict().items()}
    found: Outcome = {}
    with on_streams(draw), tempfile.TemporaryDirectory() as folder:
        pipe, said = some_pipe(draw, network(), batch_norm="deferred" if deferred else "micro")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        scaler = gpipe.GradScaler(pipe, init_scale=1024.0)
        for step in range(3):
            with cast(), gpipe.record(pipe) if step == 1 else nullcontext() as recording:
                x, y = X.pin_memory(), Y.pin_memory()
                found[f"{step} loss"] = pipe.step(x, y, F.mse_loss, scaler=scaler)
                for given in (x, y):
                    given.zero_()  # as who reads the next mini-batch into the same memory
            if recording is not None:
                recording.breakdown()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            saving = gpipe.save(folder, pipe, optimizer, background=True) if step == 1 else None
            if step == 2 and draw.random() < 0.5:
                break
            if saving is not None and draw.random() < 0.5:
                saving.wait()
        found |= {name: tensor.detach() for name, tensor in pipe.state_dict().items()}
        found = on_cpu(found)
        pipe.close()
        again, _ = some_pipe(draw, network(), batch_norm="deferred" if deferred else "micro")
        late = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
        gpipe.load(folder, again, late)
        with cast():
            found["2 loss of the loaded"] = again.step(X, Y, F.mse_loss).cpu()
        expected["2 loss of the loaded"] = expected["2 loss"]
        again.close()
    statistics = {name for name, _ in model.named_buffers()} if deferred else set()
    found = {name: tensor for name, tensor in found.items() if name not in statistics}
    return differences(found, {name: on_cpu(expected)[name] for name in found}), f"{said}, {casts=}, {deferred=}"


def cast(draw: Random) -> tuple[list[str], str]:
    """Autocasts of CPUs and of devices at once, with a scaler, over ranks on either; inputs that may be pinned.

    The loop is one over layers each of which is on its rank's device.
    """
    devices = [draw.choice([CPU, *DEVICES[:2]]) for _ in range(3)]
    kinds = {"cpu": torch.bfloat16, "sim": draw.choice([torch.float16, torch.bfloat16])}
    pinned = draw.random() < 0.5

    def brought(at: torch.device) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
        return lambda _, given: given[0].to(at)

    reference = network()
    for layer, at in zip(reference, [devices[rank] for rank in (0, 0, 1, 1, 1, 2, 2)], strict=True):
        moved([layer], at)
        layer.register_forward_pre_hook(brought(at))
    model, scale = nn.Sequential(*reference), 1024.0
    found, expected = Outcome(), Outcome()
    with on_streams(draw):
        pipe, said = some_pipe(draw, network(), devices=devices)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, pipe)]
        scaler = gpipe.GradScaler(pipe, init_scale=scale)
        for step in range(2):
            with torch.autocast("cpu", kinds["cpu"]), torch.autocast("sim", kinds["sim"]):
                x, y = (tensor.pin_memory() if pinned else tensor for tensor in (X, Y))
                found[f"{step} loss"] = pipe.step(x, y, F.mse_loss, scaler=scaler).cpu()
                total = plain_loop(
                    reference, X, Y.to(devices[-1]), F.mse_loss, micro_batches=M, seed=3, step=step, scale=scale
                )
                expected[f"{step} loss"] = total.cpu()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scale
            optimizers[0].step()
            scaler.step(optimizers[1])
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        found |= on_cpu(pipe.state_dict())
        expected |= on_cpu(model.state_dict())
        pipe.close()
    return differences(found, expected), f"{said}, {kinds}, {pinned=}"


def beside_cpus(draw: Random) -> tuple[list[str], str]:
    """Ranks on CPUs and on devices, whose kernels differ by alignment: numbers are near, and the orders as ever."""
    devices = draw.choice([[CPU, FIRST, CPU], [FIRST, CPU, DEVICES[1]], [DEVICES[2], FIRST, CPU]])
    reference = network()
    expected = plain_loop(reference, X, Y, F.mse_loss, micro_batches=M, seed=3)
    with on_streams(draw):
        pipe, said = some_pipe(draw, network(), devices=devices)
        inputs, targets = (tensor.to(draw.choice([FIRST, CPU])) * 1 for tensor in (X, Y))  # queued, where it can be
        found = pipe.step(inputs, targets, F.mse_loss)
        pipe.close()
    torch.testing.assert_close(found.cpu(), expected)
    for parameter, plain in zip(pipe.parameters(), nn.Sequential(*reference).parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), plain.grad)
    return [], said


class Failed(Exception):  # noqa: N818
    """As a layer or a loss fails."""


class Fails(torch.autograd.Function):
    """The identity; its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
        ctx.now = now
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.now:
            raise Failed
        return gradient, None


def failing(draw: Random) -> tuple[list[str], str]:
    """A step that fails in some phase, or in whose middle the pipe is closed; then one that does not."""
    phase, at = draw.choice(["forward", "backward", "loss", "close", "inputs"]), draw.randrange(M)
    seen: list[int] = []
    fails = True

    def before(x: Tensor) -> Tensor:
        seen.append(0)
        now = fails and len(seen) == at + 1
        if now and phase == "forward":
            raise Failed
        if now and phase == "close":
            pipe.close()
        return Fails.apply(x, now and phase == "backward")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and phase == "loss":
            raise Failed
        return F.mse_loss(output, target)

    with on_streams(draw):
        pipe, said = some_pipe(draw, network(before))
        given = X.to(draw.choice([*DEVICES, CPU]))
        with suppress(Failed, RuntimeError):
            pipe.step(given[:, :3] if phase == "inputs" else given, Y.to(draw.choice(DEVICES)), loss)
        fails = False
        pipe.zero_grad()
        for buffer in pipe.buffers():
            buffer.detach().fill_(1)
        pipe.step_number = 7
        found: Outcome = {"loss": pipe.step(given, Y, loss)}
        found |= {name: p.grad for name, p in pipe.named_parameters()} | dict(pipe.named_buffers())
        found = on_cpu(found)
        pipe.close()
    reference = network()
    moved(reference, FIRST)
    model = nn.Sequential(*reference)
    for buffer in model.buffers():
        buffer.fill_(1)
    total = plain_loop(reference, X.to(FIRST), Y.to(FIRST), F.mse_loss, micro_batches=M, seed=3, step=7)
    expected: Outcome = {"loss": total}
    expected |= {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    return differences(found, on_cpu(expected)), f"{phase} {at}, {said}"


KINDS: dict[str, Callable[[Random], tuple[list[str], str]]] = {
    "mixed": mixed,
    "alive": alive,
    "recorded": recorded,
    "failing": failing,
    "beside_cpus": beside_cpus,
}
ON_HOST = 300_000
LATER: dict[int, dict[str, Callable[[Random], tuple[list[str], str]]]] = {
    100_000: {"trained": models.trained, "told": models.told},
    200_000: {"cast": cast},
    ON_HOST: {"on_host": on_host, "written_on_host": written_on_host},
}
"""The kinds that are drawn from such a number on: numbers before stay what they were."""


def attempt(number: int) -> tuple[str, str]:
    """The verdict on a number, and what is to be said of it."""
    draw = Random(number)
    kinds = LATER.get(number // 100_000 * 100_000, KINDS)
    kind = draw.choice(["mixed", "mixed", "mixed", *kinds] if kinds is KINDS else [*kinds])
    for device in DEVICES:
        torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=device.index, device_type=20))
    torch.accelerator.set_device_index(0)
    SIMULATOR.take_reports()
    try:
        wrong, said = kinds[kind](draw)
        for at in range(len(DEVICES)):
            torch.accelerator.synchronize(at)
    except NoSuch:
        return "none", ""
    except Exception:
        return "failed", f"{kind}: {traceback.format_exc()}"
    if reports := SIMULATOR.take_reports():
        return "reported", f"{kind}: {said}: {len(reports)} reports\n{reports[0]}"
    return ("differs", f"{kind}: {said}: {wrong}") if wrong else ("equal", kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    found: Counter[str] = Counter()
    for number in range(asked.first, asked.first + asked.count):
        verdict, said = attempt(number)
        found[verdict] += 1
        if verdict in ("failed", "differs", "reported"):
            print(f"{verdict} {number}: {said}", flush=True)
    print(dict(found), flush=True)
    raise SystemExit(any(found[verdict] for verdict in ("failed", "differs", "reported")))


if __name__ == "__main__":
    main()
