"""ScheduledDropPath: while a network of cells trains, some samples go without an operation's output.

After Zoph et al., "Learning Transferable Architectures for Scalable Image Recognition" (2018), section 3: what is
dropped falls on each sample by itself, and grows linearly over the training.
"""

from torch import Tensor, nn


class DropPath(nn.Module):
    """Keeps what each sample has with probability `keep`, times 1 / keep, and else gives it zeros: any (N, ...).

    In training mode only. A `keep` of 1, as it starts, hands x on and draws nothing.

    >>> import torch
    >>> drop_path = DropPath()
    >>> x = torch.ones(1000, 3)
    >>> drop_path(x) is x
    True
    >>> drop_path.keep = 0.5
    >>> drop_path(x).unique().tolist()
    [0.0, 2.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.keep = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Drops the rows of some samples."""
        if not self.training or self.keep == 1:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(self.keep)
        return x * kept.div_(self.keep)


def set_keep(model: nn.Module, keep: float) -> None:
    """Sets `keep` of every `DropPath` in a model or a pipe; call it before a step, never between its halves.

    >>> from gpipe.models import amoebanet_d
    >>> network = nn.Sequential(*amoebanet_d(layers=3, filters=16, classes=10))
    >>> set_keep(network, drop_path_keep(step=50, steps=100))
    >>> network[1].drop_path.keep
    0.85

    Raises:
        ValueError: A probability that is 0 or less, or more than 1.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is no share of the samples to keep: give more than 0, and at most 1")
    for module in model.modules():
        if isinstance(module, DropPath):
            module.keep = keep


def drop_path_keep(step: int, steps: int, final: float = 0.7) -> float:
    """Says what share to keep in a step, counted from 0: it falls linearly from 1 to `final`, and stays there.

    >>> [drop_path_keep(step, steps=2) for step in range(4)]
    [1.0, 0.85, 0.7, 0.7]

    Raises:
        ValueError: A step before the first, no steps at all, or a final share that is 0 or less, or more than 1.
    """
    if step < 0 or steps < 1 or not 0 < final <= 1:
        raise ValueError(
            "the share to keep falls from 1 to `final` over `steps`; give step >= 0, steps >= 1 and "
            f"0 < final <= 1: got step={step}, steps={steps}, final={final}"
        )
    done = min(step / steps, 1.0)
    return (1 - done) + done * final
