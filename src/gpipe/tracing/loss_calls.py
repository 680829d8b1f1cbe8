"""The calls of torch's losses in a forward: what each of them averages over."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

OF_LABELS = ("cross_entropy", "nll_loss")
OF_ROWS = frozenset(
    {
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "soft_margin_loss",
        "multilabel_soft_margin_loss", "ctc_loss",
    }
)  # fmt: skip


class LossCall(NamedTuple):
    """A call of one of torch's losses in a forward."""

    name: str
    target: Tensor | None
    reduction: object
    ignored: object
    weight: Tensor | None


def read_loss_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossCall | None:
    """What a function of torch averages over, if it is a loss, by its name."""
    if name not in OF_LABELS and name not in OF_ROWS:
        return None
    try:
        given = inspect.signature(getattr(functional, name)).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    given.apply_defaults()
    named = given.arguments
    weight = named.get("weight")
    target = named.get("target")
    return LossCall(
        name,
        target.detach().clone() if isinstance(target, Tensor) else None,
        named.get("reduction", "mean"),
        named.get("ignore_index"),
        weight.detach() if isinstance(weight, Tensor) else None,
    )


class LossReader(TorchFunctionMode):
    """Notes the calls of torch's losses in what runs inside.

    >>> import torch
    >>> calls = []
    >>> with LossReader(calls):
    ...     loss = torch.nn.MSELoss()(torch.ones(2), torch.zeros(2))
    >>> [call.name for call in calls]
    ['mse_loss']
    """

    def __init__(self, calls: list[LossCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sees a function of torch."""
        if (loss := read_loss_call(getattr(func, "__name__", ""), args, kwargs or {})) is not None:
            self.calls.append(loss)
        return func(*args, **(kwargs or {}))
