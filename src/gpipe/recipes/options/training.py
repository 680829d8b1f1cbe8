"""Options of the recipes, first those of all, and what they refuse."""

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


DIGITS = 10
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


@dataclass(frozen=True)
class ImagesOptions(TrainOptions):
    """Trains AmoebaNet on a folder that has a folder of images for each class; --config paper: as the paper does."""

    UNDECISIVE: ClassVar[frozenset[str]] = TrainOptions.UNDECISIVE | {"workers"}
    NETWORK: ClassVar[tuple[str, ...]] = ("model", "layers", "filters", "image_size", "aux_head")

    out: Path = Path("out/images")

    model: Literal["amoebanet-d", "amoebanet-b"] = "amoebanet-d"  # Which of the two cells is stacked.
    #: How many normal cells there are, 3 or more; 6 more layers (stem, reductions, head) stand around them.
    layers: Annotated[int, at_least(3)] = 3
    #: How many filters the first stack of normal cells has, 16 or more; both reductions after it double them.
    filters: Annotated[int, at_least(16, "; cells have as few as a sixteenth of them")] = 32
    #: A folder of a folder of images for each class, perhaps within train and val; by default scikit-learn's
    #: handwritten digits, which come with it.
    image_folder: Path | None = None
    workers: Annotated[int, at_least(0)] = 2  # How many processes read the images of a folder; 0: this one does.
    image_size: Annotated[int, at_least(16)] = 64  # Height and width in pixels.
    classes: tuple[str, ...] = ()  # Classes to learn, by the names of their folders or as digits; by default all.
    #: How many training images of each class are kept; which, decides --seed. By default all.
    per_class: Count | None = None
    batch_size: Count = 128  # How many images a mini-batch has.
    #: Trains on random parts of images, of at least this share of their area; 1: on all of it. Of the digits: 1.
    crop: Rest = 1.0
    flip: bool = False  # Mirrors each image, left to right, every other time.
    cutout: int = 0  # Blanks a square of so many pixels at a random place of each image.
    jitter: bool = True  # Shifts and turns each of the digits a little.
    dropout: Part = 0.5  # How much of what the softmax layer reads is dropped.
    #: The weight of the loss of an auxiliary head, before the last reduction; 0: there is none. 0.4 in the paper's
    #: network.
    aux_head: Share = 0.0
    #: The share of the outputs of a cell's operations that is kept at the end of training; it falls from 1. 0.7 in
    #: the paper's network.
    drop_path: Rest = 1.0
    label_smoothing: Part = 0.0  # How much of each target is spread over all classes.
    optimizer: Literal["sgd", "rmsprop"] = "sgd"  # sgd is with Nesterov's momentum; rmsprop is the paper's.
    learning_rate: Positive = 0.2  # The largest.
    momentum: Part = 0.9  # Of either optimizer.
    rmsprop_decay: Part = 0.9  # How much of the mean of squared gradients rmsprop keeps.
    rmsprop_epsilon: NotNegative = 0.1  # What rmsprop adds to the root of that mean.
    #: Added to the gradients of all weights but of BatchNorm's and biases, times the weight.
    weight_decay: NotNegative = 5e-4
    warm_up: Share = 0.15  # For which share of all steps the learning rate rises, from nearly 0.
    #: How it falls then: to 0 as a cosine, or by --decay-rate after every --decay-epochs.
    decay: Literal["cosine", "exponential"] = "cosine"
    decay_rate: Positive = 0.97  # By how much the learning rate is multiplied at once.
    decay_epochs: Positive = 2.0  # After how many epochs.
    #: Evaluates a moving average of the weights, which keeps this share of itself at each step, and at step n no more
    #: than (1 + n) / (10 + n), so that the first ones are soon forgotten; 0: the weights themselves. The statistics
    #: of BatchNorm are as they are.
    ema: Part = 0.0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.classes and (len(set(self.classes)) < len(self.classes) or len(self.classes) < 2):
            yield f"--classes is {' '.join(self.classes)}: choose two or more, each once"
        elif self.image_folder is None and (odd := set(self.classes) - set(map(str, range(DIGITS)))):
            yield f"--classes has {' '.join(sorted(odd))}, which is no digit: choose of 0 to 9"
        if not 0 <= self.cutout <= self.image_size:
            yield f"--cutout is {self.cutout}: choose 0 to {self.image_size}, --image-size"
        if self.image_folder is None and self.crop != 1:
            yield "--crop is for --image-folder: digits fill their images"
        if self.bf16 and 16 <= self.image_size < 19:  # the last reduction would read single pixels
            why = "in bfloat16 torch's gradients of strided convolutions of single pixels are wrong on CPUs"
            yield f"--bf16 needs images of 19 pixels or more, and --image-size is {self.image_size}: {why}"


@dataclass(frozen=True)
class DigitsOptions(ImagesOptions):
    """Trains AmoebaNet on scikit-learn's handwritten digits, 1797 real images, here of 64x64 pixels."""

    out: Path = Path("out/digits")


@dataclass(frozen=True)
class TranslationOptions(TrainOptions):
    """Trains one Transformer to translate from many languages to English."""

    UNDECISIVE: ClassVar[frozenset[str]] = TrainOptions.UNDECISIVE | {"epochs", "steps", "beam", "sentences"}
    NETWORK: ClassVar[tuple[str, ...]] = (
        *("model", "layers", "ffn_dim", "heads", "model_dim", "head_dim", "vocabulary", "matrices"),
    )

    out: Path = Path("out/translation")

    #: encoder-decoder: T(L, H, A) of the paper's section 5; decoder: its Table 1's language model, of 2 L layers,
    #: which reads a sentence and goes on in English.
    model: Literal["encoder-decoder", "decoder"] = "encoder-decoder"
    layers: Count = 1  # L: how many layers the encoder has, and how many the decoder.
    ffn_dim: Count = 512  # H: how wide feed-forward layers are inside.
    heads: Count = 4  # A: how many heads attention has.
    model_dim: Count = 128  # How wide the values between layers are; 1024 in the paper.
    head_dim: Count = 32  # How wide a head is; 64 in the paper. A decoder's are --model-dim / --heads.
    #: How many subwords there are at most, of all languages; 64000 in the paper.
    vocabulary: Annotated[int, at_least(300)] = 4000
    #: How many matrices of the vocabulary there are: tables of source and of target words and the softmax layer, of
    #: which 2 share the last two, 1 all. Of a decoder 3 keeps both its own.
    matrices: Literal[1, 2, 3] = 3
    dropout: Part = 0.1  # How much of what attention and feed-forward layers add is dropped.
    #: Weights of feed-forward layers start the smaller the more layers there are, which deep models need.
    scaled_init: bool = True
    clip_logits: NotNegative = 0.0  # In training, logits are kept between this and its opposite; 0: they are not.
    #: A file of lines of language, sentence and English sentence, with tabs between them; by default the catalogues
    #: of Django, 96 languages.
    tsv: Path | None = None
    languages: tuple[str, ...] = ()  # Codes of the languages that are learnt; by default all.
    #: T: languages are drawn in proportion to the 1/T-th power of their numbers of sentences. 1.43 is multilingual
    #: BERT's, which the paper takes; with 5 they are drawn nearly alike.
    temperature: Annotated[float, Bounds("more than 0", lambda value: value > 0)] = 1.43
    #: How many subwords, of both languages and with padding, a mini-batch has at most.
    tokens: Annotated[int, at_least(64)] = 4096
    longest: Count = 100  # Pairs with more subwords than this, on either side, are not trained on.
    learning_rate: Positive = 3e-3  # The largest; Adam's, which falls as the inverse root of steps.
    warm_up: Count = 400  # For how many steps the learning rate rises.
    label_smoothing: Part = 0.1  # How much of each target is spread over the vocabulary.
    clip_norm: NotNegative = 0.0  # Gradients are scaled down to this norm; 0: they are not.
    #: How many translations of a sentence are followed at once in an evaluation, beside the greedy one; 1: none.
    beam: Count = 4
    #: How many sentences of each language an evaluation translates at most; by default all of the test.
    sentences: Count | None = None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.tokens < 2 * self.longest + 4:
            yield f"--tokens is {self.tokens}: choose {2 * self.longest + 4} or more, for a pair of --longest each"


OPTIONS: dict[str, type[TrainOptions]] = {
    "digits": DigitsOptions,
    "images": ImagesOptions,
    "translation": TranslationOptions,
}
"""The options of each recipe, by its name; the first two have the same."""
