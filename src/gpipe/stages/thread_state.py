"""The modes of a calling thread, carried into the threads of ranks, which do not inherit them.

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

from gpipe._torch.accelerator import kinds
from gpipe._torch.modes import modes_here, saved_tensor_hooks

_NOTHING = nullcontext()


@dataclass(frozen=True)
class ThreadState:
    """The caller's modes: grad and inference mode, autocast, default device, saved-tensor hooks, denormal numbers."""

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    caches_casts: bool
    device: torch.device | None
    hooks: tuple[Callable[[Tensor], object], Callable[[object], Tensor]] | None
    flushes: bool
    unsupported: list[object]

    @classmethod
    def here(cls) -> "ThreadState":
        device, unsupported = modes_here()
        casting = tuple(filter(torch.is_autocast_enabled, kinds()))
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(zip(casting, map(torch.get_autocast_dtype, casting), strict=True)),
            torch.is_autocast_cache_enabled(),
            device,
            saved_tensor_hooks(),
            flushes_denormals(),
            unsupported,
        )

    def refuse_unsupported(self, message: str) -> None:
        """Raises an error with this message if a mode is active that gpipe cannot activate where layers run.

        The message has a placeholder `{modes}`.
        """
        if self.unsupported:
            modes = ", ".join(type(mode).__name__ for mode in self.unsupported)
            raise ValueError(message.format(modes=modes))

    @contextmanager
    def without_kept_casts(self) -> Iterator[None]:
        """For a pass, which begins and ends with no casts kept: note "Casts"."""
        if not self.autocasts:
            yield
            return
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()

    @contextmanager
    def rank_thread(self) -> Iterator[None]:
        """For all actions of a rank: grad and inference mode, and no autocast, which is for layers alone."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), ExitStack() as stack:
            if self.autocasts:  # note "Casts"
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            for kind in filter(torch.is_autocast_enabled, kinds()):  # the calling thread's
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
        for kind, dtype in self.autocasts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.caches_casts))
        if self.device is not None:
            stack.enter_context(self.device)
        if self.hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
        return stack


def flushes_denormals() -> bool:
    """Whether this thread takes numbers too small to be normal for 0, as `torch.set_flush_denormal` has it."""
    return _SMALLEST * 1.0 == 0.0


_SMALLEST = 5e-324
