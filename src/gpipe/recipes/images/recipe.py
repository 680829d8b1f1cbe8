"""AmoebaNet on images, as section 4 of the GPipe paper trains it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.recipes.data import batches
from gpipe.recipes.display import watched
from gpipe.recipes.images.evaluation import count, to_evaluation
from gpipe.recipes.images.sources import Source, open_source
from gpipe.recipes.learning import cosine, exponential
from gpipe.recipes.models import amoebanet_b, amoebanet_d, drop_path_keep, set_keep
from gpipe.recipes.options.images import ImagesOptions
from gpipe.recipes.recipe import Batch, Evaluation, Recipe, Share, load

NETWORKS = {"amoebanet-d": (amoebanet_d, "AmoebaNet-D"), "amoebanet-b": (amoebanet_b, "AmoebaNet-B")}


class ImagesRecipe(Recipe[ImagesOptions]):
    """AmoebaNet-B or -D on a folder of images, or on the digits.

    Args:
        options: All that can be told of it.
    """

    name: ClassVar[str] = "images"

    def __init__(self, options: ImagesOptions) -> None:
        super().__init__(options)
        self.source: Source = open_source(options)
        self.steps_per_epoch = self.source.rows // options.batch_size

    @property
    def title(self) -> str:
        """The network and its size."""
        return f"{NETWORKS[self.options.model][1]} ({self.options.layers}, {self.options.filters})"

    def layers(self) -> list[nn.Module]:
        """Builds the network."""
        o = self.options
        make, _ = NETWORKS[o.model]
        classes, aux_head = len(self.source.classes), o.aux_head > 0
        return make(o.layers, o.filters, classes, aux_head, dropout=o.dropout, image_size=o.image_size)

    def sample(self, replicas: int) -> Batch:
        """The first images of a mini-batch."""
        rows = torch.arange(self.options.batch_size // replicas)
        images = next(iter(self.source.train([rows], 1, Share())))
        return Batch(images.images, images.classes)

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        """Makes the mini-batches of an epoch."""
        o = self.options
        order = batches(self.source.rows, o.batch_size, seed=o.seed, epoch=epoch)[first:]
        for images in self.source.train([share.of(rows) for rows in order], epoch, share):
            yield Batch(images.images, images.classes)

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

    @property
    def data(self) -> str:
        """Tells the names and classes of the images of a folder."""
        return self.source.data

    @property
    def averaging(self) -> float:
        """How much of itself the moving average of the weights keeps at each step."""
        return self.options.ema

    def measure(self, pipe: gpipe.GPipe) -> Mapping[str, float]:
        """The share of held-out images that are classified rightly."""
        return {"accuracy": count(self._classified(pipe), len(self.source.classes)).top1}

    def evaluate(self, pipe: gpipe.GPipe) -> Evaluation:
        """Top-1, top-5 and a confusion table over the held-out images, each seen once."""
        parts = watched(self._classified(pipe), "images", self.source.held_out_parts)
        return to_evaluation(count(parts, len(self.source.classes)), self.source.classes)

    @torch.no_grad()
    def _classified(self, pipe: gpipe.GPipe) -> Iterator[tuple[Tensor, Tensor]]:
        for images in self.source.held_out(Share(reads_inputs=pipe.reads_inputs)):
            logits = pipe(images.images, gather=True)
            yield logits.float().cpu(), images.classes

    def fit(self, state: Mapping[str, Tensor], layers: Sequence[nn.Module]) -> None:
        """Gives layers the weights of another run; the softmax layers are new, of the size of these classes."""
        softmax = [name for name, layer in nn.Sequential(*layers).named_modules() if isinstance(layer, nn.Linear)]
        load(state, layers, [f"{name}.{kind}" for name in softmax for kind in ("weight", "bias")])


class DigitsRecipe(ImagesRecipe):
    """The same, with what suits the digits."""

    name: ClassVar[str] = "digits"
