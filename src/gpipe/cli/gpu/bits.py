"""Checks that pipes on accelerators are bitwise identical to the reference loop on one device."""

import hashlib
import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import gpipe
from gpipe import models
from gpipe.cli.gpu.page import Finding
from gpipe.recipes.prepare import one_thread
from gpipe.schedule.schedules import SCHEDULES

SEED, STEPS, LAYERS, M = 3, 2, 8, 4
LIMIT = timedelta(seconds=480)  # Timeout of the process group, shorter than the limit of a check.
State = dict[str, Tensor]  # Results of a training: losses, gradients, parameters and buffers, on the CPU.
Settings = dict[str, Any]  # Arguments of a pipe.
Task = Callable[[], tuple[list[nn.Module], Tensor, Tensor]]  # Builds eight layers, inputs and targets.


def devices() -> list[torch.device]:
    """Returns the accelerators, at most eight."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, i) for i in range(min(8, torch.accelerator.device_count()))] if kind else []


def images() -> tuple[list[nn.Module], Tensor, Tensor]:
    """Builds an image classifier with convolutions, BatchNorm and dropout.

    Its nine rows make uneven micro-batches.
    """
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)]
    last = [nn.Dropout(0.3), nn.BatchNorm2d(8), nn.Sequential(nn.ReLU(), nn.Flatten()), nn.Linear(8 * 64, 5)]
    return [*first, *last], torch.randn(9, 3, 8, 8), torch.randint(5, (9,))


def text(*, tied: bool = False) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Builds a language model with attention and dropout. Its nine rows make uneven micro-batches."""
    torch.manual_seed(0)
    tokens = torch.randint(17, (9, 6))
    return models.transformer_lm(6, 32, 64, heads=2, vocab=17, tied=tied, dropout=0.1), tokens, tokens.flip(1)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Returns the cross-entropy of classes [N] or tokens [N, T]."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def train_reference(task: Task, device: torch.device, *, on_host: bool = False) -> State:
    """Trains with the reference loop. Uses one CPU thread, like the ranks of a pipe.

    With `on_host`, the optimizer updates copies of the weights on the host.
    """
    layers, x, y = task()
    whole = nn.Sequential(*layers).to(device)
    parts = list(zip(x.to(device).tensor_split(M), y.to(device).tensor_split(M), strict=True))

    def step(number: int) -> Tensor:
        total = torch.zeros((), device=device)
        for m, (value, target) in enumerate(parts):
            share = len(value) / len(x)
            for index, layer in enumerate(layers):
                with gpipe.rng_scope(SEED, number, index, m):
                    value = layer(value)
            loss = loss_of(value, target)
            loss.backward(torch.full_like(loss, share))
            total = total + loss.detach() * share
        return total

    with one_thread():
        return _run_steps(whole, step, on_host=on_host)


def train(task: Task, placement: Sequence[torch.device], **settings: Any) -> State:
    """Trains with a pipe that has one rank on each device of the placement."""
    layers, x, y = task()
    x, y = x.to(placement[0]), y.to(placement[-1])
    if settings.get("driver") != "process":  # A process chooses its own device.
        settings["devices"] = list(placement)
    if "weights" in settings:
        with gpipe.GPipe(layers, len(placement), M, seed=SEED, **settings) as pipe:
            return _run_steps(pipe, lambda _: pipe.step(x, y, loss_of))
    planned = {name: settings.pop(name) for name in ("schedule", "remat") if name in settings}
    costs = [1.0] * len(layers)
    plan = gpipe.find_plan(layers, None, len(placement), micro_batches=M, costs=costs, balance="variance", **planned)
    with gpipe.GPipe(layers, plan=plan, seed=SEED, **settings) as pipe:
        return _run_steps(pipe, lambda _: pipe.step(x, y, loss_of))


def _run_steps(module: nn.Module, step: Callable[[int], Tensor], *, on_host: bool = False) -> State:
    parameters, state = [*module.parameters()], State()
    updated = [p.detach().cpu().requires_grad_() for p in parameters] if on_host else parameters
    optimizer = torch.optim.SGD(updated, lr=0.1, momentum=0.9)
    for number in range(STEPS):
        module.zero_grad()
        state[f"loss {number}"] = step(number).cpu()
        for copy, p in zip(updated, parameters, strict=True) if on_host else ():
            copy.grad = None if p.grad is None else p.grad.cpu()
        optimizer.step()
        for copy, p in zip(updated, parameters, strict=True) if on_host else ():
            p.data.copy_(copy.detach())
    state |= {f"{name}.grad": p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    return state | {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def compare(
    title: str,
    task: Task,
    reference: Callable[[], State],
    placement: Sequence[torch.device],
    pipes: Sequence[Settings],
) -> Iterator[Finding]:
    """Yields findings: whether pipes with these settings are bitwise identical to the reference.

    Errors count as failures.
    """
    wrong = []
    torch.use_deterministic_algorithms(True)  # With warn_only=True, attention on GPUs would stay nondeterministic.
    try:
        expected = reference()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        yield Finding("measured", f"{title}: {error}"[:200])
        torch.use_deterministic_algorithms(True, warn_only=True)
        expected = reference()
    for settings in pipes:
        try:
            state = train(task, placement, **settings)
            different = [name for name in expected if not torch.equal(state[name], expected[name])]
            differ = f"{len(different)} of {len(expected)} tensors differ: {', '.join(different[:3])} ..."
            problem = differ if different else ""
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"[:200]
        wrong += [f"{' '.join(map(str, settings.values()))}: {problem}"] if problem else []
    for line in wrong[:3]:
        yield Finding("failed", f"{title}: {line}")
    verdict, right = "failed" if wrong else "passed", len(pipes) - len(wrong)
    yield Finding(verdict, f"{title}: {right} of {len(pipes)} pipes", {"pipes": len(pipes), "wrong": wrong})


def fitting(ranks: int) -> list[str]:
    """Returns the schedules that this number of ranks can run with the layers and micro-batches of the tasks."""
    fit = [name for name, schedule in SCHEDULES.items() if schedule.stages_per_rank * ranks <= LAYERS]
    return [name for name in fit if name != "dualpipe_v" or 2 * ranks <= M]


def bits(every: int) -> Iterator[Finding]:
    """Checks all schedules, recomputation modes and drivers, with two ranks on the first device."""
    placement = devices()[:1] * 2
    each = product(SCHEDULES, ("always", "except_last", "never"), ("threads", "lockstep"))
    pipes = [{"schedule": name, "remat": remat, "driver": driver} for name, remat, driver in each][::every]
    loop = partial(train_reference, images, placement[0])
    yield from compare("convolutions, BatchNorm and dropout, like the reference loop", images, loop, placement, pipes)
    tied = partial(text, tied=True)
    # The reference loop would sum gradients of shared weights in a different order.
    one_rank = partial(train, tied, placement[:1])
    yield from compare("attention and tied weights, like a pipe with K=1", tied, one_rank, placement, pipes)


def shared(every: int) -> Iterator[Finding]:
    """Checks 1, 2, 4 and 8 ranks on one device."""
    first = devices()[0]
    each = product(("gpipe", "1f1b", "zb_h1"), ("always", "never"))
    pipes = [{"schedule": name, "remat": remat} for name, remat in each][::every]
    for ranks in (1, 2, 4, 8):
        loop = partial(train_reference, text, first)
        yield from compare(f"K={ranks} on {first}", text, loop, [first] * ranks, pipes)


def weights(every: int) -> Iterator[Finding]:
    """Checks pipes with weights on the host. The optimizer of the reference loop runs on the host, too."""
    first = devices()[0]
    each = product((2, 4), (1, 2, 3), ("always", "offload_inputs"), ("threads", "lockstep"))
    pipes = [
        {"schedule": gpipe.BreadthFirst(stages, resident), "remat": remat, "driver": driver, "weights": "host"}
        for stages, resident, remat, driver in each
    ]
    for name, task in (("images", images), ("text", text)):
        loop = partial(train_reference, task, first, on_host=True)
        yield from compare(f"{name}, weights on the host", task, loop, [first] * 2, pipes[::every])


def several(every: int) -> Iterator[Finding]:
    """Checks copies between devices, then pipes with one rank per device. Inputs start on the first device."""
    placement, numbers = devices(), torch.arange(2**20)
    if len(placement) < 2:
        yield Finding("not run", f"Requires two accelerators, but there is only {placement[0]}.")
        return
    pairs = product(placement, placement)
    broken = [f"{a} to {b}" for a, b in pairs if not numbers.to(a).to(b).cpu().equal(numbers)]
    if broken:
        yield Finding("failed", f"Copies by torch change the values: {', '.join(broken)}.")
    ranks = len(placement)
    pipes = [{"schedule": name, "remat": remat} for name in fitting(ranks) for remat in ("always", "never")]
    for name, task in (("images", images), ("text", text)):
        loop = partial(train_reference, task, placement[0])
        yield from compare(f"{name}, K={ranks} on {ranks} devices", task, loop, placement, pipes[::every])


def has_nccl() -> bool:
    """Whether NCCL is available, with at least two devices."""
    return torch.cuda.is_available() and len(devices()) > 1 and dist.is_nccl_available()


def nccl(every: int) -> Iterator[Finding]:
    """Checks that one process per device computes the same results as a single process, with several schedules."""
    all_devices = devices()
    if len(all_devices) < 2:
        yield Finding("not run", f"Requires two accelerators, but there is only {all_devices[0]}.")
        return
    names = fitting(len(all_devices))[::every]
    torch.use_deterministic_algorithms(True)
    expected = _digests(train(text, all_devices[:1]))
    digests = in_processes(_train, len(all_devices), names)
    title = f"{len(all_devices)} processes over {'NCCL' if has_nccl() else 'gloo and host memory'}"
    right = []
    for name in names:
        merged = {tensor: digest for rank in digests for tensor, digest in rank[name].items()}
        different = [tensor for tensor, digest in expected.items() if merged.get(tensor) != digest]
        right += [] if different else [name]
        if different:
            yield Finding("failed", f"{title}, {name}: {len(different)} of {len(expected)} differ: {different[0]}")
    yield Finding("passed" if right else "failed", f"{title}, like one process: {', '.join(right) or 'none'}")
    if not has_nccl():
        yield Finding("not run", f"NCCL is not available for {all_devices[0].type}.")


def _train(rank: int, names: list[str]) -> dict[str, dict[str, str]]:
    """Returns, for each schedule, digests of the losses and of the tensors in this process."""
    torch.use_deterministic_algorithms(True)
    placement = [devices()[rank]] * dist.get_world_size()
    return {name: _digests(train(text, placement, driver="process", schedule=name)) for name in names}


def _digests(state: State) -> dict[str, str]:
    each = {name: tensor.contiguous().view(-1).view(torch.uint8).numpy() for name, tensor in state.items()}
    return {name: hashlib.sha256(data.tobytes()).hexdigest() for name, data in each.items()}


def in_processes(job: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """Runs a job in the processes of a group, each with its own device. Returns their results, decoded from JSON."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_enter, (count, folder, job, arguments), count)
        return [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(count)]


def _enter(rank: int, count: int, folder: str, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if all_devices := devices():
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{all_devices[rank].type}:{'nccl' if has_nccl() else 'gloo'}"
    dist.init_process_group(backend, f"file://{folder}/meeting", LIMIT, rank=rank, world_size=count)
    Path(folder, str(rank)).write_text(json.dumps(job(rank, *arguments)), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # Skips the destruction of the process group, which might hang.
