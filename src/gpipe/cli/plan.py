"""The command `gpipe plan`: the fastest way to train a network on devices, found without them."""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from gpipe.cli.ending import ending_by_mistakes
from gpipe.planner.search.device import PRESETS, Device, parse_devices
from gpipe.schedule.schedules import SCHEDULES

IMAGE = (3, 224, 224)
EXAMPLES = {
    "amoebanet_d": IMAGE,
    "amoebanet_b": IMAGE,
    "unet": (3, 192, 192),
    "transformer_lm": (1024,),
    "transformer": (64,),
}
"""The networks of `gpipe.models`, and what one row of their input is."""
READERS = {"transformer_lm", "transformer"}
"""Of these, what reads tokens."""
SIZES = {
    "amoebanet_d": {"layers": 18, "filters": 256},
    "amoebanet_b": {"layers": 18, "filters": 512},
    "unet": {"b": 5, "c": 64},
    "transformer_lm": {"layers": 48},
    "transformer": {"layers": 6},
}
"""Their sizes, if nothing is said."""
ARGUMENTS = {
    "amoebanet_d": ("layers", "filters", "classes", "aux_head", "dropout", "image_size"),
    "amoebanet_b": ("layers", "filters", "classes", "aux_head", "dropout", "image_size"),
    "unet": ("b", "c", "inputs", "outputs", "dropout"),
    "transformer_lm": (
        *("layers", "model_dim", "ffn_dim", "heads", "vocab", "tied", "dropout"),
        *("scaled_init", "clip_logits"),
    ),
    "transformer": (
        *("layers", "ffn_dim", "heads", "model_dim", "head_dim", "vocab", "matrices", "dropout"),
        *("scaled_init", "clip_logits", "pad"),
    ),
}
"""All that they take, so that mistakes are reported before torch loads."""
MAY_BE_NONE = {"aux_head", "dropout", "tied", "scaled_init", "pad"}
"""Of these, what may be 0."""
SAMPLE_ROWS = 4

# What help says of options; the lines of a docstring would be kept as they are, whatever the width.
MODEL = (
    f"A network of gpipe.models: {', '.join(EXAMPLES)}; or MODULE:FUNCTION of your own, which gives (model, sample): "
    "layers or any module, and an example mini-batch."
)
DEVICES = (
    "COUNTxPRESET or COUNTxGiBxTFLOP/sxGB/s: how many, and memory, speed in training and link of each; several in "
    f"the order in which they are linked, as 2xtpuv2 1x16x9.3x12. Presets: {', '.join(PRESETS)}."
)
SIZE = "Arguments of the network, by default " + "; ".join(
    f"of {name} {' '.join(f'{argument}={number}' for argument, number in sizes.items())}"
    for name, sizes in SIZES.items()
)
SCHEDULE = f"The schedule, if it is settled: {', '.join(SCHEDULES)}."


class Network(NamedTuple):
    """What is to be planned."""

    model: Any
    sample: Any


@dataclass(frozen=True)
class PlanOptions:
    """What is planned, and for which devices."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help=MODEL)]

    devices: Annotated[tuple[str, ...], tyro.conf.arg(help=DEVICES)] = ("4xtpuv2",)

    size: Annotated[tuple[str, ...], tyro.conf.arg(help=SIZE)] = ()

    batch: int = 128
    """The rows of a mini-batch."""

    partitions: Annotated[int | None, tyro.conf.arg(aliases=["-k"])] = None
    """K, if it is settled."""

    micro_batches: Annotated[int | None, tyro.conf.arg(aliases=["-m"])] = None
    """M, if it is settled."""

    schedule: Annotated[str | None, tyro.conf.arg(help=SCHEDULE)] = None

    optimizer_numbers: float = 2.0
    """How many numbers the optimizer keeps of each that it trains: Adam 2, the paper's RMSProp 1."""

    measure: bool = False
    """Measures the seconds of each layer here, and takes them for those on the first device."""

    def problems(self) -> Iterator[str]:
        """A line for each option that cannot be, as far as that is known without the network."""
        yield from _about_model(self.model)
        for name in ("batch", "partitions", "micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"--{name.replace('_', '-')} is {value}: choose 1 or more"
        if self.micro_batches and self.batch > 0 and self.batch % self.micro_batches:
            yield f"--micro-batches is {self.micro_batches}: choose a number that divides --batch {self.batch}"
        if self.schedule is not None and self.schedule not in SCHEDULES:
            yield f"--schedule is {self.schedule}: choose one of {', '.join(SCHEDULES)}"
        yield from _about_size(self.model, self.size)
        if not 0 <= self.optimizer_numbers < math.inf:
            yield f"--optimizer-numbers is {self.optimizer_numbers}: choose 0 or more, as 2 for Adam"
        if not self.devices:
            yield "--devices has none: give at least one, as 4xtpuv2"
        devices = 0
        for text in self.devices:
            try:
                devices += len(parse_devices(text))
            except ValueError as error:
                yield f"--devices: {error}"
        if self.partitions is not None and self.partitions > devices > 0:
            yield f"--partitions is {self.partitions}: choose at most {devices}, as many as there are devices"

    @property
    def fleet(self) -> list[Device]:
        """All devices."""
        return [device for text in self.devices for device in parse_devices(text)]


def _about_model(model: str) -> Iterator[str]:
    """A line if there is no such network, as far as that is known without torch."""
    module, colon, function = model.partition(":")
    if not colon:
        if model not in EXAMPLES:
            yield f"{model} is no network of gpipe.models ({', '.join(EXAMPLES)}), and no MODULE:FUNCTION"
    elif not (module and function):
        yield f"{model} has no {'function' if module else 'module'}; give MODULE:FUNCTION, as my_module:network"
    elif not _is_there(module):
        yield f"there is no module {module!r}; give MODULE:FUNCTION, MODULE as Python imports it from this folder"


def _about_size(model: str, size: Sequence[str]) -> Iterator[str]:
    """A line for each argument that the network does not take."""
    if size and ":" in model:
        yield "--size is for the networks of gpipe.models; leave it to your function"
        return
    for one in size:
        name, _, number = one.partition("=")
        taken = ARGUMENTS.get(model, (name,))
        if not (name and number.isascii() and number.isdecimal()):
            yield f"--size has {one}: write NAME=NUMBER, as layers=18"
        elif name not in taken:
            yield f"--size has {one}: {model} takes {', '.join(taken)}"
        elif int(number) == 0 and name not in MAY_BE_NONE:
            yield f"--size has {one}: choose 1 or more"


def plan(options: Annotated[PlanOptions, tyro.conf.arg(name="")]) -> None:
    """Finds the fastest way to train a network on devices, without them."""
    with ending_by_mistakes():
        if problems := list(options.problems()):
            raise ValueError("\n".join(problems))
        import gpipe  # torch loads here, so that mistakes are reported at once

        network = _network(options)
        found = gpipe.find_plan(
            network.model,
            network.sample,
            options.fleet,
            options.batch,
            partitions=options.partitions,
            micro_batches=options.micro_batches,
            schedule=options.schedule,
            measure=options.measure,
            optimizer_numbers=options.optimizer_numbers,
        )
    print(found.explain())


def _network(options: PlanOptions) -> Network:
    if ":" in options.model:
        given = _own(options.model)()
        if not isinstance(given, tuple) or len(given) != len(Network._fields):
            kind = type(given).__name__
            raise ValueError(f"{options.model} gives {kind}; return (model, sample), sample an example mini-batch")
        return Network(*given)
    import torch

    from gpipe import models

    sizes = SIZES[options.model] | {
        name: int(number) for name, _, number in (one.partition("=") for one in options.size)
    }
    example = torch.zeros(SAMPLE_ROWS, *EXAMPLES[options.model])
    with torch.device("cpu" if options.measure else "meta"):
        layers = getattr(models, options.model)(**sizes)
    if options.model in READERS:
        example = example.long()
    return Network(layers, (example, example) if options.model == "transformer" else example)


def _is_there(module: str) -> bool:
    """Whether a module can be imported, from the folder in which the command runs too."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _own(where: str) -> Callable[[], Any]:
    """The user's function."""
    module, _, name = where.partition(":")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ValueError(f"{module} has no {name}; give MODULE:FUNCTION") from None
    if not callable(found):
        raise ValueError(f"{where} is no function; give MODULE:FUNCTION")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ValueError(f"{where} is called without arguments: {error}; give them defaults") from None
    except ValueError:  # of C, without a signature
        pass
    return found
