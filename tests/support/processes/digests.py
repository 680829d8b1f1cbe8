"""What a rank tells of a run: of each tensor a digest, small enough to be sent, the same for the same bits."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
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


def digests(outcome: Mapping[str, Tensor | None]) -> Digests:
    return {name: digest(tensor) for name, tensor in outcome.items()}


def own_inputs(found: Outcome, rank: int) -> Outcome:
    """Without the gradients of inputs, which only the first stage has."""
    return {name: tensor for name, tensor in found.items() if not rank or " input " not in name}


def wrong(found: Sequence[Digests], expected: Digests, leave_out: Callable[[str], bool] = lambda name: False) -> str:
    said = [
        f"{name} on rank {rank} is {digest}, not {expected.get(name)}"
        for rank, own in enumerate(found)
        for name, digest in own.items()
        if not leave_out(name) and expected.get(name) != digest
    ]
    missing = expected.keys() - {name for own in found for name in own}
    return "\n".join([*said, *(f"no rank has {name}" for name in sorted(missing))])
