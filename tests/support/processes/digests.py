"""What a rank tells of a run: of each tensor a digest, small enough to be sent, the same for the same bits."""

import hashlib
from typing import TypeAlias

import torch
from torch import Tensor

from tests.support.outcomes import Outcome

Digests: TypeAlias = dict[str, str]


def digest(tensor: Tensor | None) -> str:
    """The same for the same bits, dtype and shape."""
    if tensor is None:
        return "none"
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha1(data).hexdigest()[:16]}"


def digests(outcome: Outcome) -> Digests:
    return {name: digest(tensor) for name, tensor in outcome.items()}


def own_inputs(found: Outcome, rank: int) -> Outcome:
    """Without the gradients of inputs, which only the first stage has."""
    return {name: tensor for name, tensor in found.items() if not rank or " input " not in name}
