"""Defines and checks the options of the recipes: first the shared options, then the options of each recipe."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec


class Bounds(NamedTuple):
    """Declares the allowed range of a number, as text and as a predicate. Use it as `Annotated[int, Bounds(...)]`."""

    words: str
    hold: Callable[[float], bool]


def at_least(minimum: int) -> Bounds:
    """Returns the bounds of a number that is `minimum` or more."""
    return Bounds(f"at least {minimum}", lambda value: value >= minimum)


def optional(metavar: str, **settings: Any) -> Any:
    """Describes an option that is unset by default. `--help` prints `metavar`, but no default such as None."""
    return tyro.conf.arg(
        metavar=metavar,
        help_behavior_hint=lambda default: "" if default in ("", "''", "None") else f"(default: {default})",
        **settings,
    )


def _number(kind: type[int] | type[float], name: str) -> PrimitiveConstructorSpec[Any]:
    """Describes an option that is a number or None. Errors do not name Python types, unlike tyro's own messages."""

    def read(words: list[str]) -> float:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r} is not {name}.") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, kind | int),
        str_from_instance=lambda value: [str(value)],
    )


INTEGER, NUMBER = _number(int, "an integer"), _number(float, "a number")
DIGITS = 10  # Number of classes of digits.
Count = Annotated[int, at_least(1), INTEGER]
OptionalCount = Annotated[Count | None, optional("INT"), INTEGER]
OptionalPath = Annotated[Path | None, optional("PATH")]
# The help of an option whose default subclasses override. They would not inherit a comment.
OUT = (
    "Folder of the run, for config.toml, metrics.jsonl, model.safetensors, checkpoints, timeline.svg, trace.json and "
    "report.json. Existing files are replaced, and existing checkpoints are renamed to checkpoints.old. Hosts need "
    "not share this folder: each process then saves its part of a checkpoint, and the first host has all other files."
)
Folder = Annotated[Path, tyro.conf.arg(help=OUT)]
Positive = Annotated[float, Bounds("a finite number greater than 0", lambda value: 0 < value < inf), NUMBER]
NotNegative = Annotated[float, Bounds("a finite number of at least 0", lambda value: 0 <= value < inf), NUMBER]
Share = Annotated[float, Bounds("at least 0 and at most 1", lambda value: 0 <= value <= 1), NUMBER]
Part = Annotated[float, Bounds("at least 0 and less than 1", lambda value: 0 <= value < 1), NUMBER]
Rest = Annotated[float, Bounds("a number greater than 0 and at most 1", lambda value: 0 < value <= 1), NUMBER]


def bounds_of(kind: Any) -> Iterator[Bounds]:
    """Yields all bounds in a type annotation, also inside unions and nested annotations."""
    yield from (note for note in getattr(kind, "__metadata__", ()) if isinstance(note, Bounds))
    for part in get_args(kind):
        yield from bounds_of(part)


def out_of_bounds(typed: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each value that is out of bounds.

    `typed` is the dataclass or function that declares the bounds.
    """
    for name, kind in get_type_hints(typed, include_extras=True).items():
        value = values.get(name)
        for bounds in bounds_of(kind):
            if value is not None and not bounds.hold(value):
                yield f"{flag(name)}: {value} is out of range. Choose {bounds.words}."


def raise_all(problems: Iterable[str]) -> None:
    """Raises a ValueError with one line per problem, if there are any."""
    if lines := list(problems):
        raise ValueError("\n".join(lines))


def check_bounds(typed: Any, values: Mapping[str, Any]) -> None:
    """Raises a ValueError if values are out of bounds.

    `typed` is the dataclass or function that declares the bounds.
    """
    raise_all(out_of_bounds(typed, values))


def key_of(field: str) -> str:
    """Returns the name of an option in a TOML file."""
    return field.rstrip("_")


def flag(field: str) -> str:
    """Returns the name of an option on the command line."""
    return "--" + key_of(field).replace("_", "-")


@dataclass(frozen=True)
class TrainOptions:
    """Options that all recipes share: how the model is partitioned, trained and saved."""

    UNDECISIVE: ClassVar[frozenset[str]] = frozenset(
        {"config", "partitions", "remat", "schedule", "plan", "paper"}  # Execution.
        | {"out", "checkpoint_every", "resume", "from_", "report_to"}  # Files and reports.
    )
    """Options that do not change results. A resumed run may use different values."""
    NETWORK: ClassVar[tuple[str, ...]] = ()
    """TOML keys of the options that define the model. `--from RUN` copies these options from RUN."""

    #: Read options from this TOML file, such as config.toml in the folder of a run, or from a preset, such as paper.
    #: Other options on the command line override it.
    config: Annotated[Path | None, optional("FILE")] = None
    #: K: the number of partitions of the model, each run by one thread. Under torchrun, each is run by one process:
    #: if K is smaller than the number of processes and divides it, they form replicas that share each mini-batch.
    #: Results do not depend on K. By default 2, or all processes of torchrun.
    partitions: OptionalCount = None
    #: M: the number of micro-batches per mini-batch. Use at least 4 times K for a small bubble (idle time).
    micro_batches: Count = 8
    #: Which micro-batches recompute their activations in the backward pass, to save memory: all (always), all except
    #: the one whose backward pass comes first (except_last), or none (never). With offload, activations move to host
    #: memory instead. With offload_inputs, all recompute, and the inputs of stages move to host memory. Results do
    #: not depend on it.
    remat: Literal["always", "except_last", "never", "offload", "offload_inputs"] = "always"
    #: The pipeline schedule: the order of forward and backward passes, and the stages that each partition holds. To
    #: draw it, use `gpipe schedule NAME`. Results do not depend on it.
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved",
        "zb_h1",
        "zb_h2",
        "interleaved_zb",
        "zb_v",
        "v_half",
        "v_min",
        "dualpipe_v",
        "breadth_first",
    ] = "gpipe"
    #: Use auto to measure the layers at the start, and choose the split points, --schedule and --remat that are
    #: predicted to be fastest on this machine. Results do not depend on it.
    plan: Annotated[Literal["auto"] | None, optional("{auto}")] = None
    #: Require the method of the GPipe paper: --schedule gpipe and --remat always. Other values raise an error.
    paper: bool = False
    #: Compute in bfloat16 under torch.autocast, which halves the memory of activations. Weights stay in float32.
    bf16: bool = False
    epochs: Count = 15  # Number of passes over the training data.
    steps: OptionalCount = None  # Total number of training steps (mini-batches). Overrides --epochs.
    #: Random seed of the initial weights, the order and augmentation of the data, and dropout.
    seed: Annotated[int, Bounds("at least 0 and less than 2^63", lambda seed: 0 <= seed < 2**63), INTEGER] = 0

    out: Folder = Path("out/run")
    #: Save a checkpoint to OUT/checkpoints each time this number of epochs is complete. The last two are kept. A
    #: checkpoint is also saved at the end, and at the end of the current step after Ctrl-C or SIGTERM.
    checkpoint_every: Count = 1
    #: Where to log the loss of each step, the metrics of each epoch and, at the end, where the time of a step went:
    #: tensorboard writes to OUT/tensorboard, trackio to its project gpipe. Install the extra of the same name.
    report_to: Annotated[Literal["tensorboard", "trackio"] | None, optional("{tensorboard,trackio}")] = None
    #: Resume from the latest checkpoint in OUT/checkpoints, if there is one, with the options in OUT/config.toml.
    #: Results are bitwise identical to an uninterrupted run, also with different --partitions. A run that torchrun
    #: restarts always resumes.
    resume: bool = False
    #: Start from the weights of the run in this folder, and with its model options.
    from_: Annotated[Path | None, optional("RUN", name="from")] = None

    def resolved(self, processes: int | None = None) -> Self:
        """Checks the options, and returns the options with the number of partitions filled in.

        Args:
            processes: The number of processes that a launcher started. None for a single process without a launcher.

        Raises:
            ValueError: If options are invalid, or partitions or micro-batches cannot be divided over the processes.
        """
        resolved = self if self.partitions is not None else replace(self, partitions=processes or 2)
        resolved.check()
        k = resolved.partitions or 1
        if processes and processes % k:
            divisors = ", ".join(str(k) for k in range(1, processes + 1) if processes % k == 0)
            raise ValueError(
                f"--partitions: {processes} processes are not divisible by {k} partitions. Choose one of {divisors}."
            )
        if processes and self.micro_batches % (processes // k):
            raise ValueError(
                f"--micro-batches: {self.micro_batches} micro-batches are not divisible by {processes // k} replicas "
                f"({processes} processes with {k} partitions per replica). Choose a multiple of {processes // k}."
            )
        return resolved

    def check(self) -> None:
        """Raises a ValueError with one line per invalid option."""
        raise_all(self.problems())

    def problems(self) -> Iterator[str]:
        """Yields a message for each invalid option."""
        yield from out_of_bounds(type(self), vars(self))
        defaults = {"schedule": "gpipe", "remat": "always"}
        changed = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.plan is not None and changed:
            flags = " and ".join(map(flag, changed))
            yield f"--plan: {self.plan} cannot be combined with {flags}. Remove {flags}, or --plan."
        if self.paper and (changed or self.plan):
            flags = " and ".join(map(flag, [*changed, *["plan"] * (self.plan is not None)]))
            yield f"--paper: requires --schedule gpipe and --remat always. Remove {flags}, or --paper."
        if self.from_ is not None and not self.resume and self.from_.absolute() == self.out.absolute():
            yield f"--out: {self.out} is also the folder of --from. Choose a different folder for this run."


@dataclass(frozen=True)
class ImagesOptions(TrainOptions):
    """Trains AmoebaNet on your images, in one folder per class. `--config paper` uses the settings of the paper."""

    UNDECISIVE: ClassVar[frozenset[str]] = TrainOptions.UNDECISIVE | {"workers"}
    NETWORK: ClassVar[tuple[str, ...]] = ("model", "layers", "filters", "image_size", "aux_head")

    out: Folder = Path("out/images")

    model: Literal["amoebanet-d", "amoebanet-b"] = "amoebanet-d"  # The model architecture.
    #: Number of normal cells, at least 3. The model has 6 more layers: the stem, the reductions and the head.
    layers: Annotated[int, at_least(3), INTEGER] = 3
    #: Number of filters in the first stack of normal cells, at least 16, because some convolutions have a sixteenth
    #: as many. The two reductions after this stack double the number.
    filters: Annotated[int, at_least(16), INTEGER] = 32
    #: Folder of the images, with one subfolder per class, or with subfolders train and val that contain these. By
    #: default, the handwritten digits that are part of scikit-learn.
    image_folder: OptionalPath = None
    #: Number of processes that read the images of --image-folder. 0: none.
    workers: Annotated[int, at_least(0), INTEGER] = 2
    image_size: Annotated[int, at_least(16), INTEGER] = 64  # Height and width of the images in pixels.
    #: Classes to train on: names of folders, or digits. By default all.
    classes: Annotated[tuple[str, ...], optional("NAME [NAME ...]")] = ()
    #: Number of training images to keep per class, chosen randomly by --seed. By default all.
    per_class: OptionalCount = None
    batch_size: Count = 128  # Number of images per mini-batch.
    #: Minimum share of an image's area that a random crop keeps in training. 1: no cropping. For --image-folder only.
    crop: Rest = 1.0
    flip: bool = False  # Mirror each training image horizontally with probability 1/2.
    cutout: int = 0  # Size in pixels of a random square that is blanked in each training image. 0: none.
    jitter: bool = True  # Shift and rotate training images slightly. For digits only.
    dropout: Part = 0.5  # Dropout probability before the softmax layer.
    #: Weight of the loss of an auxiliary classifier before the last reduction. 0: no classifier. The paper uses 0.4.
    aux_head: Share = 0.0
    #: Probability of keeping an operation's output at the end of training (ScheduledDropPath). It decreases linearly
    #: from 1. The paper uses 0.7.
    drop_path: Rest = 1.0
    label_smoothing: Part = 0.0  # Share of each target that is spread over all classes.
    optimizer: Literal["sgd", "rmsprop"] = "sgd"  # SGD with Nesterov momentum, or RMSProp as in the paper.
    learning_rate: Positive = 0.2  # Peak learning rate, after the warm-up.
    momentum: Part = 0.9  # Momentum of SGD or RMSProp.
    rmsprop_decay: Part = 0.9  # Smoothing constant of RMSProp for the mean of squared gradients.
    rmsprop_epsilon: NotNegative = 0.1  # Constant that RMSProp adds to the root of that mean.
    #: L2 penalty (weight decay) of convolution and linear weights. Biases and BatchNorm parameters have none.
    weight_decay: NotNegative = 5e-4
    warm_up: Share = 0.15  # Share of all steps in which the learning rate increases linearly to its peak.
    #: How the learning rate decreases after the warm-up: to 0 along a cosine, or exponentially.
    decay: Literal["cosine", "exponential"] = "cosine"
    decay_rate: Positive = 0.97  # Factor of each exponential decrease of the learning rate.
    decay_epochs: Positive = 2.0  # Number of epochs between two exponential decreases.
    #: Decay of a moving average of the weights, which is evaluated instead of the weights. At step n the decay is at
    #: most (1 + n) / (10 + n). BatchNorm statistics are not averaged. 0: no average.
    ema: Part = 0.0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.micro_batches > self.batch_size:
            yield f"--micro-batches: {self.micro_batches} exceeds the --batch-size. Choose at most {self.batch_size}."
        if self.classes and (len(set(self.classes)) < len(self.classes) or len(self.classes) < 2):
            yield f"--classes: {' '.join(self.classes)} is not a list of different classes. Pass two or more."
        elif self.image_folder is None and (unknown := set(self.classes) - set(map(str, range(DIGITS)))):
            yield f"--classes: {' '.join(sorted(unknown))} is not a digit. Choose from 0 to 9."
        if not 0 <= self.cutout <= self.image_size:
            yield f"--cutout: {self.cutout} is out of range. Choose 0 to {self.image_size}, the --image-size."
        if self.image_folder is None and self.crop != 1:
            yield f"--crop: {self.crop} requires --image-folder, because digits fill their images. Remove --crop."
        if self.bf16 and 16 <= self.image_size < 19:  # The last reduction would read single pixels.
            yield (
                f"--image-size: {self.image_size} is too small for --bf16, because torch computes wrong bfloat16 "
                "gradients for strided convolutions of single pixels on CPUs. Choose at least 19."
            )


@dataclass(frozen=True)
class DigitsOptions(ImagesOptions):
    """Trains AmoebaNet on scikit-learn's handwritten digits: 1797 real images, scaled to 64x64 pixels."""

    out: Folder = Path("out/digits")


@dataclass(frozen=True)
class TranslationOptions(TrainOptions):
    """Trains one Transformer to translate from many languages to English."""

    UNDECISIVE: ClassVar[frozenset[str]] = TrainOptions.UNDECISIVE | {"epochs", "steps", "beam", "sentences"}
    NETWORK: ClassVar[tuple[str, ...]] = (
        *("model", "layers", "ffn_dim", "heads", "model_dim", "head_dim", "vocabulary", "matrices"),
    )

    out: Folder = Path("out/translation")

    #: The model architecture: an encoder and a decoder, as in section 5 of the paper, or a decoder-only language
    #: model with 2 L layers, as in its Table 1, which continues a sentence with its English translation.
    model: Literal["encoder-decoder", "decoder"] = "encoder-decoder"
    layers: Count = 1  # L: the number of encoder layers, and of decoder layers.
    ffn_dim: Count = 512  # H: the hidden size of the feed-forward layers.
    heads: Count = 4  # A: the number of attention heads.
    model_dim: Count = 128  # Size of the embeddings and layer outputs. The paper uses 1024.
    #: Size of each attention head. The paper uses 64. With --model decoder it is --model-dim / --heads.
    head_dim: Count = 32
    #: Maximum size of the vocabulary: the number of tokens (subwords) of all languages. The paper uses 64000.
    vocabulary: Annotated[int, at_least(300), INTEGER] = 4000
    #: Number of different matrices for the source embedding, the target embedding and the softmax layer. 3: all
    #: separate. 2: the target embedding and the softmax layer share one. 1: all share one. A decoder has only one
    #: embedding, which shares its matrix with the softmax layer unless this is 3.
    matrices: Literal[1, 2, 3] = 3
    dropout: Part = 0.1  # Dropout probability of attention weights and layer outputs.
    scaled_init: bool = True  # Start feed-forward layers with smaller weights the more layers there are.
    clip_logits: NotNegative = 0.0  # Clamp logits to plus or minus this value in training. 0: no clamping.
    #: Training data: a text file with one language code, sentence and English translation per line, separated by
    #: tabs. By default Django's translations in 96 languages.
    tsv: OptionalPath = None
    #: Codes of the languages to train on, such as de fr. By default all.
    languages: Annotated[tuple[str, ...], optional("CODE [CODE ...]")] = ()
    #: Sampling temperature T of languages: each is sampled in proportion to its number of sentences to the power 1/T.
    #: Large values sample all languages nearly equally. The default is the value of multilingual BERT and the paper.
    temperature: Annotated[float, Bounds("a number greater than 0", lambda value: value > 0), NUMBER] = 1.43
    tokens: Annotated[int, at_least(64), INTEGER] = (
        4096  # Maximum number of tokens per mini-batch, including padding.
    )
    longest: Count = 100  # Maximum number of tokens of a training sentence. Longer pairs are not used.
    learning_rate: Positive = 3e-3  # Peak learning rate of Adam. After the warm-up it falls as 1 / sqrt(step).
    warm_up: Count = 400  # Number of steps in which the learning rate increases linearly to its peak.
    label_smoothing: Part = 0.1  # Share of each target that is spread over the vocabulary.
    clip_norm: NotNegative = 0.0  # Maximum norm of all gradients together; larger ones are scaled. 0: no limit.
    #: Number of beams of the beam search in an evaluation, which also translates greedily. 1: no beam search.
    beam: Count = 4
    #: Maximum number of test sentences per language that an evaluation translates. By default all.
    sentences: OptionalCount = None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.tokens < (minimum := 2 * self.longest + 4):
            yield f"--tokens: {self.tokens} is too small for two sentences of --longest. Choose at least {minimum}."


OPTIONS: dict[str, type[TrainOptions]] = {
    "digits": DigitsOptions,
    "images": ImagesOptions,
    "translation": TranslationOptions,
}
"""The options class of each recipe, by the recipe's name. Digits and images have the same options."""
