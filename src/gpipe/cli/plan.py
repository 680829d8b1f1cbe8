"""Implements `gpipe plan`: predicts the fastest plan for a model and devices, without the devices."""

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gpipe.cli import exit_on_user_errors
from gpipe.planner.search.candidates import AUTO
from gpipe.planner.search.device import GIB, PRESETS, parse_devices
from gpipe.recipes.options.training import (
    INTEGER,
    NUMBER,
    Count,
    NotNegative,
    Positive,
    optional,
    out_of_bounds,
    raise_all,
)
from gpipe.schedule.schedules import SCHEDULES

IMAGE = (3, 224, 224)
NETWORKS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "amoebanet_d": (IMAGE, {"layers": 18, "filters": 256}),
    "amoebanet_b": (IMAGE, {"layers": 18, "filters": 512}),
    "unet": ((3, 192, 192), {"b": 5, "c": 64}),
    "transformer_lm": ((1024,), {"layers": 48}),
    "transformer": ((64,), {"layers": 6}),
}
"""The models of `gpipe.models`, with the shape of one input row (one dimension for tokens) and default arguments."""
SAMPLE_ROWS = 4

MODEL = (
    f"A model of gpipe.models: {', '.join(NETWORKS)}. Or MODULE:FUNCTION, a function that returns your model (a "
    "module, or a list of layers) and an example mini-batch."
)
DEVICES = (
    "The devices, as COUNTxPRESET, such as 4xa100. For other devices, use COUNTxGiBxTFLOP/sxGB/s with the memory, "
    "the speed reached in training and the link to the next device, such as 1x16x9.3x12. Pass several values in the "
    f"order in which the devices are linked. Presets: {', '.join(PRESETS)}."
)
SIZE = (
    "Arguments of a model of gpipe.models. By default "
    + "; ".join(
        f"{' '.join(f'{argument}={number}' for argument, number in sizes.items())} for {name}"
        for name, (_, sizes) in NETWORKS.items()
    )
    + "."
)
SCHEDULE = f"Schedule: {', '.join(SCHEDULES)}, or auto to search for one. By default, the fastest named schedule."


def plan(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=MODEL)],
    devices: Annotated[tuple[str, ...], tyro.conf.arg(metavar="DEVICES [DEVICES ...]", help=DEVICES)] = ("4xtpuv2",),
    size: Annotated[tuple[str, ...], optional("NAME=INT [NAME=INT ...]", help=SIZE)] = (),
    batch: Count = 128,
    partitions: Annotated[Count | None, optional("INT", aliases=["-k"]), INTEGER] = None,
    micro_batches: Annotated[Count | None, optional("INT", aliases=["-m"]), INTEGER] = None,
    schedule: Annotated[str | None, optional("NAME", help=SCHEDULE)] = None,
    optimizer_numbers: NotNegative = 2.0,
    host_bandwidth: Annotated[NotNegative | None, optional("FLOAT"), NUMBER] = None,
    host_memory: Annotated[Positive | None, optional("FLOAT"), NUMBER] = None,
    weights: Annotated[Literal["device", "host"] | None, optional("{device,host}")] = None,
    measure: bool = False,
) -> None:
    """Predicts the fastest plan to train a model. The devices need not be available.

    Args:
        model: The model.
        devices: The devices.
        size: Arguments of the model.
        batch: Number of rows in a mini-batch.
        partitions: K: the number of partitions. Default: the fastest K.
        micro_batches: M: the number of micro-batches per mini-batch. Default: the fastest M.
        schedule: The schedule.
        optimizer_numbers: How many numbers the optimizer keeps per parameter: 2 for Adam, 1 for SGD with momentum.
        host_bandwidth: GB/s from each device to host memory, and back. Then stages offload activations where this is
            not slower than recomputation. With 0, nothing is offloaded. Default: the speed of a preset's PCI-E, or 0.
        host_memory: GiB of the host, for weights in host memory. Default: unlimited.
        weights: Where the weights are: on each device, or on the host, from which a device loads a few stages at a
            time. Default: on the host only if nothing else fits.
        measure: Measure the time of each layer on this machine, and use the measured time for the first device
            instead of its TFLOP/s.
    """
    fixed: dict[str, Any] = {"partitions": partitions, "micro_batches": micro_batches, "schedule": schedule}
    fixed["optimizer_numbers"] = optimizer_numbers
    with exit_on_user_errors():
        numbers = {"batch": batch, "host_bandwidth": host_bandwidth, "host_memory": host_memory, **fixed}
        problems = [*_find_problems(model, size), *out_of_bounds(plan, numbers)]
        if schedule not in (None, *SCHEDULES, AUTO):
            known = ", ".join([*SCHEDULES, AUTO])
            problems.append(f"--schedule: {schedule} is not a schedule. Choose one of {known}.")
        if not devices:
            problems.append("--devices: got no device. Pass at least one, such as 4xa100.")
        try:
            fleet = [device for text in devices for device in parse_devices(text)]
        except ValueError as error:
            problems.append(f"--devices: {error}")
        raise_all(problems)
        if host_bandwidth is not None:
            fleet = [replace(device, host=host_bandwidth * 1e9) for device in fleet]
        if host_memory is not None:
            fixed["host_memory"] = host_memory * GIB
        fixed["weights"] = weights
        import gpipe  # Imports torch, which takes a second, after the errors above.

        layers, sample = _call_user_function(model) if ":" in model else _build_model(model, size, measure)
        best = gpipe.find_plan(layers, sample, fleet, batch, measure=measure, **fixed)
    print(best.explain())
    print(f"The sample has rows of {' and '.join(_shapes(sample))}.")


def _find_problems(model: str, size: Sequence[str]) -> Iterator[str]:
    """Yields a message for each error in these arguments that can be detected without importing torch."""
    module, colon, function = model.partition(":")
    if not colon and model not in NETWORKS:
        yield f"MODEL: {model} is not a model. Choose one of {', '.join(NETWORKS)}, or pass MODULE:FUNCTION."
    if colon and not (module and function):
        yield f"MODEL: {model} lacks a module or function. Pass MODULE:FUNCTION, such as my_module:make_model."
    if colon and size:
        yield f"--size: cannot be combined with {model}. Set sizes in your function."
    for text in size:
        name, _, number = text.partition("=")
        if not (name and number.isascii() and number.isdecimal()):
            yield f"--size: {text} is not NAME=INT. Pass, for example, layers=18."


def _build_model(model: str, size: Sequence[str], measure: bool) -> tuple[Any, Any]:
    import torch

    from gpipe import models

    make = getattr(models, model)
    parameters = inspect.signature(make).parameters
    shape, sizes = NETWORKS[model]
    arguments = {name: int(number) for name, _, number in (text.partition("=") for text in size)}
    for name, number in arguments.items():
        if name not in parameters:
            raise ValueError(f"--size: {model} has no argument {name}. Choose from {', '.join(parameters)}.")
        default = parameters[name].default
        if not number and not isinstance(default, bool | float | None) and default != 0:  # Here 0 has no meaning.
            raise ValueError(f"--size: {name}={number} is out of range. Choose at least 1.")
    with torch.device("cpu" if measure else "meta"):
        layers = make(**sizes | arguments)
    sample = torch.zeros(SAMPLE_ROWS, *shape, dtype=torch.long if len(shape) == 1 else None)
    return layers, (sample, sample) if model == "transformer" else sample


def _shapes(sample: Any) -> Iterator[str]:
    """Yields the shape of one row of each tensor in a sample, such as "3x192x192 float32"."""
    if isinstance(sample, dict | list | tuple):
        for part in sample.values() if isinstance(sample, dict) else sample:
            yield from _shapes(part)
    elif hasattr(sample, "shape"):
        size = "x".join(map(str, sample.shape[1:])) or "1"
        yield f"{size} {str(sample.dtype).removeprefix('torch.')}"


def _call_user_function(path: str) -> tuple[Any, Any]:
    module, _, name = path.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # `gpipe` is a script, so Python does not search the current folder.
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # The module imports something that is missing.
        raise ValueError(f"MODEL: {path}: {error}. Pass MODULE:FUNCTION that Python can import.") from error
    if not callable(function):
        raise ValueError(f"MODEL: {path} is not a function. Pass MODULE:FUNCTION that Python can import.")
    try:
        returned = function()
    except Exception as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # It happened inside the user's function.
        raise ValueError(
            f"MODEL: {path} cannot be called without arguments ({error}). Pass MODULE:FUNCTION."
        ) from error
    if not isinstance(returned, tuple) or len(returned) != 2:
        kind = type(returned).__name__
        raise ValueError(f"MODEL: {path} returned {kind}. Return a tuple of the model and an example mini-batch.")
    return returned
