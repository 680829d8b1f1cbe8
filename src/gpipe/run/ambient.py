"""What surrounds a call in its thread, carried into the rank threads: modes that threads do not inherit."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Hooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]


@dataclass(frozen=True)
class Ambient:
    """The caller's modes: grad and inference mode, autocast, default device, saved-tensor hooks."""

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    device: torch.device | None
    hooks: Hooks | None
    strangers: tuple[str, ...]

    @classmethod
    def here(cls) -> "Ambient":
        """Reads the modes of this thread."""
        functions = _get_current_function_mode_stack()
        strangers = [m for m in functions if not isinstance(m, DeviceContext)] + _get_current_dispatch_mode_stack()
        devices = [mode.device for mode in functions if isinstance(mode, DeviceContext)]
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(_autocasts()),
            devices[-1] if devices else None,
            torch._C._autograd._top_saved_tensors_default_hooks(False),
            tuple(type(mode).__name__ for mode in strangers),
        )

    def refuse_strangers(self) -> None:
        """Refuses modes that cannot be carried into other threads.

        Raises:
            ValueError: Names them.
        """
        if self.strangers:
            raise ValueError(
                f"{', '.join(self.strangers)} is active in the calling thread and would not see what the rank "
                f"threads do; leave it outside, or use driver='lockstep', which runs in the calling thread"
            )

    @contextmanager
    def rank_thread(self) -> Iterator[None]:
        """In a rank thread, for a whole row: grad and inference mode."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            yield

    def around_layers(self) -> Callable[[], AbstractContextManager[object]] | None:
        """What layers, and they alone, must be run in: a recompute may be far from the call. None for nothing."""
        if not self.autocasts and self.device is None and self.hooks is None:
            return None

        def enter() -> AbstractContextManager[object]:
            stack = ExitStack()
            for kind, dtype, cache in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            if self.device is not None:
                stack.enter_context(self.device)
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            return stack

        return enter


def _autocasts() -> Iterator[tuple[str, torch.dtype, bool]]:
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            yield kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
