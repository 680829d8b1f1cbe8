"""Captures the modes of the calling thread and activates them in the threads of ranks, which do not inherit them.

Note "Casts": Autocast caches the casts of weights for all threads together, and clears this cache when any thread
leaves its outermost autocast. A weight of another rank that is used twice would then be cast twice, and its gradients
would be summed in a different precision. Each rank therefore runs as if it were inside an autocast. Each run clears
the cache at its start and at its end, so that no cast is used after its weight has changed. `gpipe._torch.modes`
handles autocasts inside layers.
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
    """The modes of a thread.

    Attributes:
        grad: Whether grad mode is enabled.
        inference: Whether inference mode is enabled.
        autocasts: The device types for which autocast is enabled, with their dtypes.
        caches_casts: Whether autocast caches the casts of weights.
        device: The default device, if one is set.
        hooks: The innermost saved-tensor hooks.
        flushes: Whether denormal numbers are flushed to zero.
        unsupported: Active modes that cannot be activated in another thread.
    """

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
        """Returns the modes of the calling thread."""
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
        """Clears the cache of casts before and after a pass over the micro-batches (note "Casts")."""
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
        """Activates the modes for all actions of a rank, except autocast, because only layers run with autocast."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), ExitStack() as stack:
            if self.autocasts:  # See note "Casts".
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            for kind in filter(torch.is_autocast_enabled, kinds()):  # In lockstep, this is the calling thread.
                stack.enter_context(torch.autocast(kind, enabled=False))
            if (flushes := flushes_denormals()) != self.flushes:
                torch.set_flush_denormal(self.flushes)
                stack.callback(torch.set_flush_denormal, flushes)
            yield

    def around_layers(self) -> AbstractContextManager[object]:
        """Returns a context for running layers: autocast, default device and saved-tensor hooks of the caller.

        Recomputations also use this context, because they may run outside of these modes.
        """
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
    """Whether this thread flushes denormal numbers to zero (`torch.set_flush_denormal`)."""
    return _SMALLEST * 1.0 == 0.0


_SMALLEST = 5e-324
