"""Trains AmoebaNet on images, as in section 4 of the GPipe paper: scikit-learn's digits, or a folder of images."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.recipes.data.augment import Augmentation, batches
from gpipe.recipes.data.images import Digits, ImageFolder, Reader, load_digits, load_folder
from gpipe.recipes.models.amoebanet import amoebanet_b, amoebanet_d, drop_path_keep, set_keep
from gpipe.recipes.options.training import DIGITS, ImagesOptions
from gpipe.recipes.recipe import Batch, Evaluation, Recipe, Share, cosine, exponential, load
from gpipe.recipes.training import with_progress

EVALUATION_BATCH = 256  # Images per mini-batch in an evaluation.
MOST_CLASSES = 25  # Maximum number of classes for which the confusion matrix is printed.
TOP = 5  # Number of most likely classes that count for the top-5 accuracy.
NETWORKS = {"amoebanet-d": (amoebanet_d, "AmoebaNet-D"), "amoebanet-b": (amoebanet_b, "AmoebaNet-B")}


def summarize(classified: Iterable[tuple[Tensor, Tensor]], classes: Sequence[str]) -> Evaluation:
    """Computes the accuracy and the confusion matrix from pairs of logits [N, classes] and targets [N]."""
    confusion, in_top = torch.zeros(len(classes) ** 2, dtype=torch.int64), 0
    for logits, targets in classified:
        confusion += torch.bincount(targets * len(classes) + logits.argmax(dim=1), minlength=len(confusion))
        best = logits.topk(min(TOP, len(classes)), dim=1).indices
        in_top += int((best == targets[:, None]).any(dim=1).sum())
    confusion = confusion.reshape(len(classes), len(classes))
    images = int(confusion.sum())
    numbers = {"top1": int(confusion.diag().sum()) / images, "top5": in_top / images}
    shares = f"top-1 {numbers['top1']:.2%}, top-5 {numbers['top5']:.2%}"
    lines = [f"Accuracy on {images} held-out images:", shares]
    if len(classes) <= MOST_CLASSES:
        lines.append("")
        head = "true \\ predicted"
        first = max(len(head), *map(len, classes))
        width = max(len(f"{int(confusion.max())}"), *map(len, classes)) + 2
        for name, cells in [(head, classes), *zip(classes, confusion.tolist(), strict=True)]:
            lines.append(f"{name:>{first}}" + "".join(f"{cell or '.':>{width}}" for cell in cells))
    details = {"images": images, "classes": list(classes), "confusion": confusion.tolist()}
    return Evaluation(numbers, details, "\n".join(lines))


class ImagesRecipe(Recipe[ImagesOptions]):
    """Trains AmoebaNet-B or AmoebaNet-D on a folder of images or on the digits."""

    name: ClassVar[str] = "images"

    def __init__(self, options: ImagesOptions) -> None:
        super().__init__(options)
        o = options
        augmentation = Augmentation(o.image_size, o.crop, o.flip, o.cutout, o.seed, o.jitter and not o.image_folder)
        if o.image_folder is None:
            self.classes, self.data, workers = o.classes or tuple(map(str, range(DIGITS))), "digits", 0
            digits = tuple(map(int, self.classes))
            parts: Sequence[Digits | ImageFolder] = load_digits(o.image_size, digits, o.per_class, o.seed)
        else:
            parts = train, _ = load_folder(o.image_folder, o.classes, o.per_class, o.seed)
            self.classes, workers = train.classes, o.workers
            self.data = hashlib.sha256(repr((train.names, train.labels)).encode()).hexdigest()
        self.train = Reader(parts[0], augmentation, workers)
        self.held_out = Reader(parts[1], augmentation, min(1, workers))
        count = len(self.train.labels)
        if len(self.classes) < 2:
            raise ValueError(
                f"--image-folder: {o.image_folder} contains only the class {self.classes[0]}. Add at least one more."
            )
        if count < o.batch_size:
            raise ValueError(
                f"--batch-size: {o.batch_size} is more than the {count} training images. Choose at most {count}."
            )
        self.title = f"{NETWORKS[o.model][1]} ({o.layers}, {o.filters})"
        self.steps_per_epoch, self.averaging = count // o.batch_size, o.ema

    def layers(self) -> list[nn.Module]:
        o = self.options
        make, _ = NETWORKS[o.model]
        classes, aux_head = len(self.classes), o.aux_head > 0
        return make(o.layers, o.filters, classes, aux_head, dropout=o.dropout, image_size=o.image_size)

    def sample(self, replicas: int) -> Batch:
        return next(self.train.read([torch.arange(self.options.batch_size // replicas)], 1))

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        o = self.options
        order = batches(len(self.train.labels), o.batch_size, seed=o.seed, epoch=epoch)[first:]
        return self._read([share.of(rows) for rows in order], epoch, share.reads_inputs)

    def _read(self, batches: Iterable[Tensor], epoch: int | None, reads_inputs: bool) -> Iterator[Batch]:
        """Yields images in the process with the first layer. Other processes get blank images of the same size."""
        images = self.held_out if epoch is None else self.train
        if reads_inputs:
            return images.read(batches, epoch)
        blank = torch.zeros(1, 3, self.options.image_size, self.options.image_size)
        return (Batch(blank.expand(len(rows), -1, -1, -1), images.labels[rows]) for rows in batches)

    def loss(self, output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        """Returns the cross-entropy of the logits.

        In training, adds the weighted cross-entropy of the auxiliary head.
        """
        smoothing = self.options.label_smoothing
        if isinstance(output, Tensor):
            return F.cross_entropy(output, targets, label_smoothing=smoothing)
        main, auxiliary = (F.cross_entropy(logits, targets, label_smoothing=smoothing) for logits in output)
        return main + self.options.aux_head * auxiliary

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Builds SGD or RMSProp. Biases and BatchNorm parameters have no weight decay."""
        o, weights = self.options, list(parameters)
        groups = [
            {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": o.weight_decay},
            {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0},
        ]
        if o.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=o.learning_rate, momentum=o.momentum, nesterov=o.momentum > 0)
        return torch.optim.RMSprop(
            groups, lr=o.learning_rate, alpha=o.rmsprop_decay, eps=o.rmsprop_epsilon, momentum=o.momentum
        )

    def learning_rate_at(self, step: int, steps: int) -> float:
        o = self.options
        if o.decay == "cosine":
            return o.learning_rate * cosine(step, steps, o.warm_up * steps)
        every = o.decay_epochs * self.steps_per_epoch
        return o.learning_rate * exponential(step, every, o.decay_rate, o.warm_up * steps)

    def before_step(self, pipe: gpipe.GPipe, step: int, steps: int) -> None:
        if self.options.drop_path < 1:
            set_keep(pipe, drop_path_keep(step, steps, self.options.drop_path))

    def measure(self, pipe: gpipe.GPipe) -> Mapping[str, float]:
        return {"accuracy": summarize(self._classify(pipe), self.classes).numbers["top1"]}

    def evaluate(self, pipe: gpipe.GPipe) -> Evaluation:
        batches = -(-len(self.held_out.labels) // EVALUATION_BATCH)
        return summarize(with_progress(self._classify(pipe), "images", batches), self.classes)

    @torch.no_grad()
    def _classify(self, pipe: gpipe.GPipe) -> Iterator[tuple[Tensor, Tensor]]:
        rows = torch.arange(len(self.held_out.labels)).split(EVALUATION_BATCH)
        for images, targets in self._read(rows, None, pipe.reads_inputs):
            logits = pipe(images, gather=True)
            yield logits.float().cpu(), targets

    def fit(self, state: Mapping[str, Tensor], layers: Sequence[nn.Module]) -> None:
        softmax = [name for name, layer in nn.Sequential(*layers).named_modules() if isinstance(layer, nn.Linear)]
        load(state, layers, [f"{name}.{kind}" for name in softmax for kind in ("weight", "bias")])


class DigitsRecipe(ImagesRecipe):
    """Trains AmoebaNet on the digits. Differs from `ImagesRecipe` only in its name and output folder."""

    name: ClassVar[str] = "digits"
