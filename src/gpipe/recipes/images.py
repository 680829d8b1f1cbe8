"""AmoebaNet on images, as section 4 of the GPipe paper trains it: scikit-learn's digits, or a folder of images."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.recipes.data.augment import Augmentation, augment, batches, jitter
from gpipe.recipes.data.digits import CLASSES, load_digits
from gpipe.recipes.data.folder import Reader, load_folder
from gpipe.recipes.models.amoebanet import amoebanet_b, amoebanet_d, drop_path_keep, set_keep
from gpipe.recipes.options.images import ImagesOptions
from gpipe.recipes.recipe import Batch, Evaluation, Recipe, Share, cosine, exponential, load
from gpipe.recipes.training import watched

EVALUATED = 256  # images that are evaluated at once
SHOWN = 25  # classes, above which the terminal shows no confusion table
FEW = 5  # classes that are thought most likely
NETWORKS = {"amoebanet-d": (amoebanet_d, "AmoebaNet-D"), "amoebanet-b": (amoebanet_b, "AmoebaNet-B")}


class DigitImages:
    """The digits that the options name: names of `classes`, and the class of each image to `train` on and `held_out`.

    `data` tells the images to train on from others.
    """

    data = "digits"

    def __init__(self, options: ImagesOptions) -> None:
        o = self._options = options
        self.classes = o.classes or tuple(map(str, range(CLASSES)))
        chosen = tuple(map(int, self.classes))
        self._train, self._held_out = load_digits(o.image_size, chosen, o.per_class, o.seed)
        self.train, self.held_out = self._train.tensors[1], self._held_out.tensors[1]

    def read(self, batches: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yields mini-batches given by rows: to train on, changed as the options say, or for None those held out."""
        o = self._options
        how = Augmentation(o.image_size, o.crop, o.flip, o.cutout, o.seed)
        for rows in batches:
            if epoch is None:
                yield Batch(*self._held_out[rows])
                continue
            images, classes = self._train[rows]
            if o.jitter:
                images = jitter(images, rows, seed=o.seed, epoch=epoch)
            yield Batch(augment(images, rows, how, epoch), classes)


class FolderImages:
    """The images of a folder, as `DigitImages` gives the digits."""

    def __init__(self, options: ImagesOptions) -> None:
        o = options
        assert o.image_folder is not None
        train, held_out = load_folder(o.image_folder, o.classes, o.per_class, o.seed)
        how = Augmentation(o.image_size, o.crop, o.flip, o.cutout, o.seed)
        self._train, self._held_out = Reader(train, how, o.workers), Reader(held_out, how, min(1, o.workers))
        self.classes = train.classes
        self.train, self.held_out = torch.tensor(train.labels), torch.tensor(held_out.labels)
        self.data = hashlib.sha256(repr((train.names, train.labels)).encode()).hexdigest()

    def read(self, batches: Iterable[Tensor], epoch: int | None) -> Iterator[Batch]:
        """Yields mini-batches given by rows: to train on, changed as the options say, or for None those held out."""
        return (self._held_out if epoch is None else self._train).read(batches, epoch)


def evaluation_of(classified: Iterable[tuple[Tensor, Tensor]], classes: Sequence[str]) -> Evaluation:
    """Counts over logits [N, classes] and the true classes [N]: top-1, top-5, and a table where it can be read."""
    confusion, among_few = torch.zeros(len(classes) ** 2, dtype=torch.int64), 0
    for logits, right in classified:
        confusion += torch.bincount(right * len(classes) + logits.argmax(dim=1), minlength=len(confusion))
        best = logits.topk(min(FEW, len(classes)), dim=1).indices
        among_few += int((best == right[:, None]).any(dim=1).sum())
    confusion = confusion.reshape(len(classes), len(classes))
    images = int(confusion.sum())
    numbers = {"top1": int(confusion.diag().sum()) / images, "top5": among_few / images}
    lines = [
        f"{images} held-out images, each as a whole:",
        f"top-1 {numbers['top1']:.2%}, top-5 {numbers['top5']:.2%}",
    ]
    if len(classes) <= SHOWN:
        lines.append("")
        head = "is \\ taken for"
        first = max(len(head), *map(len, classes))
        width = max(len(f"{int(confusion.max())}"), *map(len, classes)) + 2
        for name, cells in [(head, classes), *zip(classes, confusion.tolist(), strict=True)]:
            lines.append(f"{name:>{first}}" + "".join(f"{cell or '.':>{width}}" for cell in cells))
    details = {"images": images, "classes": list(classes), "confusion": confusion.tolist()}
    return Evaluation(numbers, details, "\n".join(lines))


class ImagesRecipe(Recipe[ImagesOptions]):
    """AmoebaNet-B or -D on a folder of images, or on the digits."""

    name: ClassVar[str] = "images"

    def __init__(self, options: ImagesOptions) -> None:
        super().__init__(options)
        self.source = source = DigitImages(options) if options.image_folder is None else FolderImages(options)
        if len(source.classes) < 2:
            raise ValueError(f"there is one class, {source.classes[0]}, and nothing to tell apart: give two or more")
        if len(source.train) < options.batch_size:
            raise ValueError(
                f"--batch-size is {options.batch_size}, and there are {len(source.train)} images to train on: "
                "choose fewer"
            )
        self.title = f"{NETWORKS[options.model][1]} ({options.layers}, {options.filters})"
        self.steps_per_epoch = len(source.train) // options.batch_size
        self.averaging, self.data = options.ema, source.data

    def layers(self) -> list[nn.Module]:
        """Builds the network."""
        o = self.options
        make, _ = NETWORKS[o.model]
        classes, aux_head = len(self.source.classes), o.aux_head > 0
        return make(o.layers, o.filters, classes, aux_head, dropout=o.dropout, image_size=o.image_size)

    def sample(self, replicas: int) -> Batch:
        """The first images of a mini-batch."""
        return next(iter(self.source.read([torch.arange(self.options.batch_size // replicas)], 1)))

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        """Makes the mini-batches of an epoch."""
        o = self.options
        order = batches(len(self.source.train), o.batch_size, seed=o.seed, epoch=epoch)[first:]
        return self._read([share.of(rows) for rows in order], epoch, share.reads_inputs)

    def _read(self, batches: Iterable[Tensor], epoch: int | None, reads_inputs: bool) -> Iterator[Batch]:
        """The images where the first layer is; elsewhere blank ones."""
        if reads_inputs:
            yield from self.source.read(batches, epoch)
            return
        blank = torch.zeros(1, 3, self.options.image_size, self.options.image_size)
        classes = self.source.held_out if epoch is None else self.source.train
        for rows in batches:
            yield Batch(blank.expand(len(rows), -1, -1, -1), classes[rows])

    def loss(self, output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        """Cross-entropy, and that of the auxiliary head in its weight."""
        smoothing = self.options.label_smoothing
        if isinstance(output, Tensor):
            return F.cross_entropy(output, targets, label_smoothing=smoothing)
        own, auxiliary = (F.cross_entropy(logits, targets, label_smoothing=smoothing) for logits in output)
        return own + self.options.aux_head * auxiliary

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD or RMSProp; weights decay, but neither BatchNorm's nor biases."""
        o, all_ = self.options, list(parameters)
        groups = [
            {"params": [one for one in all_ if one.dim() > 1], "weight_decay": o.weight_decay},
            {"params": [one for one in all_ if one.dim() <= 1], "weight_decay": 0.0},
        ]
        if o.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=o.learning_rate, momentum=o.momentum, nesterov=o.momentum > 0)
        return torch.optim.RMSprop(
            groups, lr=o.learning_rate, alpha=o.rmsprop_decay, eps=o.rmsprop_epsilon, momentum=o.momentum
        )

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Rises, then falls as a cosine or exponentially."""
        o = self.options
        if o.decay == "cosine":
            return o.learning_rate * cosine(step, steps, o.warm_up * steps)
        every = o.decay_epochs * self.steps_per_epoch
        return o.learning_rate * exponential(step, every, o.decay_rate, o.warm_up * steps)

    def before_step(self, pipe: gpipe.GPipe, step: int, steps: int) -> None:
        """Drops more and more paths over the training."""
        if self.options.drop_path < 1:
            set_keep(pipe, drop_path_keep(step, steps, self.options.drop_path))

    def measure(self, pipe: gpipe.GPipe) -> Mapping[str, float]:
        """The share of held-out images that are classified rightly."""
        return {"accuracy": evaluation_of(self._classified(pipe), self.source.classes).numbers["top1"]}

    def evaluate(self, pipe: gpipe.GPipe) -> Evaluation:
        """Top-1, top-5 and a confusion table over the held-out images, each seen once."""
        parts = -(-len(self.source.held_out) // EVALUATED)
        return evaluation_of(watched(self._classified(pipe), "images", parts), self.source.classes)

    @torch.no_grad()
    def _classified(self, pipe: gpipe.GPipe) -> Iterator[tuple[Tensor, Tensor]]:
        rows = torch.arange(len(self.source.held_out)).split(EVALUATED)
        for images, classes in self._read(rows, None, pipe.reads_inputs):
            logits = pipe(images, gather=True)
            yield logits.float().cpu(), classes

    def fit(self, state: Mapping[str, Tensor], layers: Sequence[nn.Module]) -> None:
        """Gives layers the weights of another run; the softmax layers are new, of the size of these classes."""
        softmax = [name for name, layer in nn.Sequential(*layers).named_modules() if isinstance(layer, nn.Linear)]
        load(state, layers, [f"{name}.{kind}" for name in softmax for kind in ("weight", "bias")])


class DigitsRecipe(ImagesRecipe):
    """The same, with what suits the digits."""

    name: ClassVar[str] = "digits"
