"""What surrounds a call in its thread, carried into the rank threads: modes that threads do not inherit.

Note "Casts". Autocast keeps the casts of weights, for all threads together, and forgets them all when any thread
leaves its outermost autocast: another rank's weight that is used twice would be cast twice, and its gradients added
up in another precision. So a rank is run as if inside an autocast, and a run forgets before and after, lest a cast
outlive its weight's value. Autocasts of the layers' own are kept apart by `gpipe._torch.modes`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe._torch.modes import modes_here, saved_tensor_hooks

_NOTHING = nullcontext()
Hooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]


@dataclass(frozen=True)
class ThreadState:
    """The caller's modes: grad and inference mode, autocast, default device, saved-tensor hooks, denormal numbers."""

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    device: torch.device | None
    hooks: Hooks | None
    flushes: bool
    unsupported: tuple[str, ...]

    @classmethod
    def here(cls) -> "ThreadState":
        """Reads the modes of this thread."""
        device, unsupported = modes_here()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(_autocasts()),
            device,
            saved_tensor_hooks(),
            flushes_denormals(),
            tuple(type(mode).__name__ for mode in unsupported),
        )

    def refuse_unsupported(self) -> None:
        """Refuses modes that cannot be carried into other threads."""
        if self.unsupported:
            raise ValueError(
                f"{', '.join(self.unsupported)} is active in the calling thread and would not see what the rank "
                f"threads do; leave it outside, or use driver='lockstep', which runs in the calling thread"
            )

    @contextmanager
    def rank_thread(self) -> Iterator[None]:
        """For all actions of a rank: grad and inference mode, and no autocast, which is for layers alone."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), ExitStack() as stack:
            if self.autocasts:  # note "Casts"
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            for kind, _, _ in _autocasts():  # the calling thread's
                stack.enter_context(torch.autocast(kind, enabled=False))
            if (own := flushes_denormals()) != self.flushes:
                torch.set_flush_denormal(self.flushes)
                stack.callback(torch.set_flush_denormal, own)
            yield

    def around_layers(self) -> AbstractContextManager[object]:
        """What layers, and they alone, must be run in: a recompute may be far from the call."""
        if not self.autocasts and self.device is None and self.hooks is None:
            return _NOTHING
        stack = ExitStack()
        for kind, dtype, cache in self.autocasts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        if self.device is not None:
            stack.enter_context(self.device)
        if self.hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
        return stack


def flushes_denormals() -> bool:
    """Whether this thread takes numbers too small to be normal for 0, as `torch.set_flush_denormal` has it."""
    return _SMALLEST * 1.0 == 0.0


_SMALLEST = 5e-324


def _autocasts() -> Iterator[tuple[str, torch.dtype, bool]]:
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            yield kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
