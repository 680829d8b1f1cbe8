"""Options of all recipes, and what they refuse."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_type_hints

import tyro


class Bounds(NamedTuple):
    """What the number of an option must be, in words too: `Annotated[int, Bounds(...)]`."""

    words: str
    hold: Callable[[float], bool]


def at_least(least: int, why: str = "") -> Bounds:
    """So many or more."""
    return Bounds(f"{least} or more{why}", lambda value: value >= least)


Count = Annotated[int, at_least(1)]
Positive = Annotated[float, Bounds("more than 0", lambda value: 0 < value < inf)]
NotNegative = Annotated[float, Bounds("0 or more", lambda value: 0 <= value < inf)]
Share = Annotated[float, Bounds("0 to 1", lambda value: 0 <= value <= 1)]
Part = Annotated[float, Bounds("0 to less than 1", lambda value: 0 <= value < 1)]
Rest = Annotated[float, Bounds("more than 0 to 1", lambda value: 0 < value <= 1)]


def out_of_bounds(typed: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """A line for each value out of the bounds of its type in a dataclass or a function; None is always within."""
    for name, kind in get_type_hints(typed, include_extras=True).items():
        for bounds in [one for part in (kind, *get_args(kind)) for one in getattr(part, "__metadata__", ())]:
            value = values.get(name)
            if isinstance(bounds, Bounds) and value is not None and not bounds.hold(value):
                yield f"{flag(name)} is {value}: choose {bounds.words}"


def refuse(problems: Iterable[str]) -> None:
    """Refuses options for their problems, if there are any, by a ValueError with a line for each."""
    if lines := list(problems):
        raise ValueError("\n".join(lines))


def name_of(field: str) -> str:
    """An option's name in a file."""
    return field.rstrip("_")


def flag(field: str) -> str:
    """An option's name on the command line."""
    return "--" + name_of(field).replace("_", "-")


@dataclass(frozen=True)
class TrainOptions:
    """How a network is cut and trained, whichever it is."""

    UNDECISIVE: ClassVar[frozenset[str]] = frozenset(
        {"config", "partitions", "remat", "schedule", "plan", "paper"}  # how it is run
        | {"out", "checkpoint_every", "resume", "from_", "report_to"}  # what is kept and told of it
    )
    """Options that decide no number: a run may go on with others."""
    NETWORK: ClassVar[tuple[str, ...]] = ()  # which network it is: those of the run that `--from` names hold

    #: A file of options, such as config.toml in the folder of a run, or the name of a preset. Flags beside it come
    #: before what it says.
    config: Path | None = None
    #: K: how many partitions the layers are cut into, each run by a thread of its own; by default 2. Under torchrun
    #: each is run by a process, by default all; K must divide their number, and then several replicas share each
    #: mini-batch. Losses do not depend on K.
    partitions: Count | None = None
    #: M: how many micro-batches each mini-batch is split into; 4 K or more keep the bubble small.
    micro_batches: Count = 8
    #: Which micro-batches keep only what crosses partitions, and recompute the rest in the backward pass.
    remat: Literal["always", "except_last", "never", "offload"] = "always"
    #: The order of the work, and how many stages each partition is: see `gpipe schedule`. Losses do not depend on it.
    schedule: Literal[
        "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v"
    ] = "gpipe"
    #: auto: cuts, schedule and remat are those of the fastest plan for this machine, found by measuring the layers in
    #: its first seconds, in place of --schedule and --remat. Losses do not depend on it.
    plan: Literal["auto"] | None = None
    #: Trains as the paper does: fill-drain with remat always, which are the defaults too; refuses anything else.
    paper: bool = False
    #: Computes what torch.autocast does in bfloat16, which takes half the memory; weights stay in float32.
    bf16: bool = False
    epochs: Count = 15  # How often the training data are gone through.
    steps: Count | None = None  # How many mini-batches are trained on in all, in place of --epochs.
    #: Decides the first weights, the order of the data and what is done to them, and dropout.
    seed: Annotated[int, Bounds("0 to less than 2^63", lambda seed: 0 <= seed < 2**63)] = 0

    out: Path = Path("out/run")
    """The folder of the run: config.toml, metrics.jsonl, model.safetensors, checkpoints, timeline.svg, trace.json and
    report.json, which `gpipe report` draws. Older ones are replaced, and checkpoints of an earlier run are put aside
    as checkpoints.old. Several hosts must share it."""

    #: After how many epochs a checkpoint is saved to OUT/checkpoints, which keeps the last two; also at the end, and
    #: at the end of a step after Ctrl-C or SIGTERM, which end the run with status 130 or 143.
    checkpoint_every: Count = 1
    #: Who is told the loss of each step, what is measured after each epoch, and in the end where the time of a step
    #: went: TensorBoard, by files in OUT/tensorboard, or trackio, as its project gpipe. An extra of the same name
    #: brings it.
    report_to: Literal["tensorboard", "trackio"] | None = None
    #: Goes on from the latest checkpoint in OUT/checkpoints, if there is one, with the options in OUT/config.toml, to
    #: the same numbers as if the run had never ended, also with other partitions. A run that torchrun starts anew
    #: always does.
    resume: bool = False
    #: The folder of a run whose weights are where this one starts, and whose options say which network it is.
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None

    def settled(self, processes: int | None = None) -> Self:
        """Fills in the number of partitions, for one process or, under a launcher, for so many; else as `check`."""
        chosen = self if self.partitions is not None else replace(self, partitions=processes or 2)
        chosen.check()
        k = chosen.partitions or 1
        if processes and processes % k:
            fitting = ", ".join(str(k) for k in range(1, processes + 1) if processes % k == 0)
            raise ValueError(f"--partitions is {k}, but there are {processes} processes: choose one of {fitting}")
        if processes and self.micro_batches % (processes // k):
            replicas = f"{processes} processes of {k} partitions are {processes // k} replicas"
            why = f"--micro-batches is {self.micro_batches}, but {replicas}, which share them evenly"
            raise ValueError(f"{why}: choose a multiple")
        return chosen

    def check(self) -> None:
        """Refuses options that cannot be by a ValueError: a line for each, with what to do."""
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """A line for each option that cannot be, with what to do."""
        yield from out_of_bounds(type(self), vars(self))
        other = [name for name, usual in (("schedule", "gpipe"), ("remat", "always")) if getattr(self, name) != usual]
        flags = ", ".join(map(flag, other))
        if self.plan is not None and other:
            yield f"--plan {self.plan} chooses {flags} itself: leave them out, or --plan"
        if self.paper and (other or self.plan):
            flags = ", ".join(map(flag, [*other, *["plan"] * (self.plan is not None)]))
            yield f"--paper is --schedule gpipe --remat always: leave {flags} out, or --paper"
        if self.from_ is not None and not self.resume and self.from_.absolute() == self.out.absolute():
            yield f"--from and --out are {self.out} both: choose another folder for this run"
