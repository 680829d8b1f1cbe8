"""What `gpipe train digits` can be told, and what it refuses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class TrainOptions:
    """How the network is built, cut and trained.

    >>> TrainOptions(partitions=0, epochs=0).check()
    Traceback (most recent call last):
    ValueError: --partitions is 0: choose 1 or more
    --epochs is 0: choose 1 or more
    """

    partitions: int = 2
    """K: how many partitions the layers are cut into, each run by a thread of its own. Losses do not depend on it."""

    micro_batches: int = 8
    """M: how many micro-batches each mini-batch of 128 images is split into; 4 K or more keep the bubble small."""

    remat: Literal["always", "except_last", "never"] = "always"
    """Which micro-batches keep only what crosses partitions, and recompute the rest in the backward pass."""

    schedule: Literal["gpipe"] = "gpipe"
    """The order of the work: gpipe runs all forwards, then all backwards."""

    layers: int = 3
    """How many normal cells AmoebaNet-D has; 6 more layers (stem, reductions, head) stand around them."""

    filters: int = 32
    """How many filters the first stack of normal cells has; both reductions after it double them."""

    epochs: int = 15
    """How often the training images are gone through."""

    seed: int = 0
    """Decides the first weights, the order and the jitter of the images, and dropout."""

    out: Path = Path("out/digits")
    """The folder for metrics.jsonl, model.safetensors, timeline.svg and trace.json; older ones are replaced."""

    def check(self) -> None:
        """Refuses options that cannot be.

        Raises:
            ValueError: One line for each option that cannot be, with what to do.
        """
        least = {"partitions": 1, "micro_batches": 1, "layers": 3, "filters": 16, "epochs": 1, "seed": 0}
        problems = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}: choose {minimum} or more"
            for name, minimum in least.items()
            if getattr(self, name) < minimum
        ]
        if self.layers >= 3 and self.partitions > self.layers + 6:
            problems.append(
                f"--partitions is {self.partitions}, but --layers {self.layers} makes {self.layers + 6} layers: "
                f"choose {self.layers + 6} or fewer partitions, or more layers"
            )
        if self.out.exists() and not self.out.is_dir():
            problems.append(f"--out is {self.out}, a file: choose a folder")
        if problems:
            raise ValueError("\n".join(problems))
