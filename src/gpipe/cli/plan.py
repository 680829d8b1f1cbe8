"""The command `gpipe plan`: the fastest way to train a network on devices, found without them."""

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from gpipe.cli import ending_by_mistakes
from gpipe.planner.search.candidates import AUTO
from gpipe.planner.search.device import PRESETS, parse_devices
from gpipe.recipes.options.training import Count, NotNegative, out_of_bounds, refuse
from gpipe.schedule.schedules import SCHEDULES
from gpipe.schedule.schedules.by_name import unknown_schedule

IMAGE = (3, 224, 224)
NETWORKS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "amoebanet_d": (IMAGE, {"layers": 18, "filters": 256}),
    "amoebanet_b": (IMAGE, {"layers": 18, "filters": 512}),
    "unet": ((3, 192, 192), {"b": 5, "c": 64}),
    "transformer_lm": ((1024,), {"layers": 48}),
    "transformer": ((64,), {"layers": 6}),
}
"""The networks of `gpipe.models`: one row of their input, of tokens if it is that of a text, and sizes by default."""
SAMPLE_ROWS = 4

# What help says of options; the lines of a docstring would be kept as they are, whatever the width.
MODEL = (
    f"A network of gpipe.models: {', '.join(NETWORKS)}; or MODULE:FUNCTION of your own, which gives (model, sample): "
    "layers or any module, and an example mini-batch."
)
DEVICES = (
    "COUNTxPRESET or COUNTxGiBxTFLOP/sxGB/s: how many, and memory, speed in training and link of each; several in "
    f"the order in which they are linked, as 2xtpuv2 1x16x9.3x12. Presets: {', '.join(PRESETS)}."
)
SIZE = "Arguments of the network, by default " + "; ".join(
    f"of {name} {' '.join(f'{argument}={number}' for argument, number in sizes.items())}"
    for name, (_, sizes) in NETWORKS.items()
)
SCHEDULE = f"The schedule, if it is settled: {', '.join(SCHEDULES)}; or auto: a table is searched for."


def plan(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=MODEL)],
    devices: Annotated[tuple[str, ...], tyro.conf.arg(help=DEVICES)] = ("4xtpuv2",),
    size: Annotated[tuple[str, ...], tyro.conf.arg(help=SIZE)] = (),
    batch: Count = 128,
    partitions: Annotated[Count | None, tyro.conf.arg(aliases=["-k"])] = None,
    micro_batches: Annotated[Count | None, tyro.conf.arg(aliases=["-m"])] = None,
    schedule: Annotated[str | None, tyro.conf.arg(help=SCHEDULE)] = None,
    optimizer_numbers: NotNegative = 2.0,
    measure: bool = False,
) -> None:
    """Finds the fastest way to train a network on devices, without them.

    Args:
        model: What is planned.
        devices: For which devices.
        size: Of the network.
        batch: The rows of a mini-batch.
        partitions: K, if it is settled.
        micro_batches: M, if it is settled.
        schedule: If it is settled.
        optimizer_numbers: How many numbers the optimizer keeps of each that it trains: Adam 2, the paper's RMSProp 1.
        measure: Measures the seconds of each layer here, and takes them for those on the first device.
    """
    settled: dict[str, Any] = {"partitions": partitions, "micro_batches": micro_batches, "schedule": schedule}
    settled["optimizer_numbers"] = optimizer_numbers
    with ending_by_mistakes():
        problems = [*_mistakes(model, size), *out_of_bounds(plan, {"batch": batch, **settled})]
        if schedule not in (None, *SCHEDULES, AUTO):
            problems.append(unknown_schedule(schedule, AUTO))
        if not devices:
            problems.append("--devices has none: give at least one, as 4xtpuv2")
        try:
            fleet = [device for text in devices for device in parse_devices(text)]
        except ValueError as error:
            problems.append(f"--devices: {error}")
        refuse(problems)
        import gpipe  # torch loads here, so that mistakes are reported at once

        network, sample = _own(model) if ":" in model else _of_ours(model, size, measure)
        found = gpipe.find_plan(network, sample, fleet, batch, measure=measure, **settled)
    print(found.explain())


def _mistakes(model: str, size: Sequence[str]) -> Iterator[str]:
    """A line if there is no such network, and for each size that is none, as far as is known without torch."""
    module, colon, function = model.partition(":")
    if not colon and model not in NETWORKS:
        yield f"{model} is no network of gpipe.models ({', '.join(NETWORKS)}), and no MODULE:FUNCTION"
    if colon and not (module and function):
        yield f"{model} has no {'function' if module else 'module'}; give MODULE:FUNCTION, as my_module:network"
    if colon and size:
        yield "--size is for the networks of gpipe.models; leave it to your function"
    for one in size:
        name, _, number = one.partition("=")
        if not (name and number.isascii() and number.isdecimal()):
            yield f"--size has {one}: write NAME=NUMBER, as layers=18"


def _of_ours(model: str, size: Sequence[str], measure: bool) -> tuple[Any, Any]:
    import torch

    from gpipe import models

    make = getattr(models, model)
    taken = inspect.signature(make).parameters
    shape, sizes = NETWORKS[model]
    given = {name: int(number) for name, _, number in (one.partition("=") for one in size)}
    for name, number in given.items():
        if name not in taken:
            raise ValueError(f"--size has {name}={number}: {model} takes {', '.join(taken)}")
        default = taken[name].default
        if not number and not isinstance(default, bool | float | None) and default != 0:  # 0 stands for none
            raise ValueError(f"--size has {name}={number}: choose 1 or more")
    with torch.device("cpu" if measure else "meta"):
        layers = make(**sizes | given)
    sample = torch.zeros(SAMPLE_ROWS, *shape, dtype=torch.long if len(shape) == 1 else None)
    return layers, (sample, sample) if model == "transformer" else sample


def _own(where: str) -> tuple[Any, Any]:
    module, _, name = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # the module may be in the folder in which the command runs
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"{where} is no function; give MODULE:FUNCTION, with MODULE as imported from this folder")
    given = function()
    if not isinstance(given, tuple) or len(given) != 2:
        kind = type(given).__name__
        raise ValueError(f"{where} gives {kind}; return (model, sample), sample an example mini-batch")
    return given
