"""How well images are classified: top-1, top-5 and which classes are taken for which."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe.recipes.recipe import Evaluation

SHOWN = 25
"""Classes, above which the terminal shows no confusion table."""
FEW = 5


@dataclass(frozen=True, eq=False)
class Counts:
    """What became of classified images.

    Attributes:
        confusion: How many of each class (row) were taken for which (column), [classes, classes].
        among_five: How many had their class among the five that were thought most likely.
    """

    confusion: Tensor
    among_five: int

    @property
    def images(self) -> int:
        """How many there were."""
        return int(self.confusion.sum())

    @property
    def top1(self) -> float:
        """The share of images that were classified rightly."""
        return int(self.confusion.diag().sum()) / self.images

    @property
    def top5(self) -> float:
        """The share of images whose class was among the five thought most likely."""
        return self.among_five / self.images


def count(classified: Iterable[tuple[Tensor, Tensor]], classes: int) -> Counts:
    """Counts over logits [N, classes] and the true classes [N].

    >>> counts = count([(torch.tensor([[2.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1]))], classes=2)
    >>> counts.confusion.tolist(), counts.top1, counts.top5
    ([[1, 0], [1, 0]], 0.5, 1.0)
    """
    confusion, among_five = torch.zeros(classes * classes, dtype=torch.int64), 0
    for logits, right in classified:
        confusion += torch.bincount(right * classes + logits.argmax(dim=1), minlength=classes * classes)
        best = logits.topk(min(FEW, classes), dim=1).indices
        among_five += int((best == right[:, None]).any(dim=1).sum())
    return Counts(confusion.reshape(classes, classes), among_five)


def to_evaluation(counts: Counts, classes: Sequence[str]) -> Evaluation:
    """The numbers, and the confusion table where it can be read."""
    numbers = {"top1": counts.top1, "top5": counts.top5}
    lines = [
        f"{counts.images} held-out images, each as a whole:",
        f"top-1 {counts.top1:.2%}, top-5 {counts.top5:.2%}",
    ]
    if len(classes) <= SHOWN:
        lines += ["", *confusion_lines(counts.confusion, classes)]
    details = {"images": counts.images, "classes": list(classes), "confusion": counts.confusion.tolist()}
    return Evaluation(numbers, details, "\n".join(lines))


def confusion_lines(confusion: Tensor, classes: Sequence[str]) -> list[str]:
    r"""A line for each class: what its images were taken for.

    >>> print(*confusion_lines(torch.tensor([[3, 0], [1, 2]]), ["cat", "dog"]), sep="\n")
    is \ taken for  cat  dog
               cat    3    .
               dog    1    2
    """
    width = max(len(f"{int(confusion.max())}"), *map(len, classes)) + 2
    head = "is \\ taken for"
    first = max(len(head), *map(len, classes))
    rows = [
        f"{name:>{first}}" + "".join(f"{number or '.':>{width}}" for number in row)
        for name, row in zip(classes, confusion.tolist(), strict=True)
    ]
    return [f"{head:>{first}}" + "".join(f"{name:>{width}}" for name in classes), *rows]
