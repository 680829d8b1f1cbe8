"""Gradient scaling over processes: all ranks skip the same steps."""

from typing import Any

import torch
import torch.distributed as dist

from gpipe._torch.modules import LocalGradScaler, awaits_unscale, found_infinite, note_infinite
from gpipe.batch.inputs import scaler_device
from gpipe.distributed.agree import agree
from gpipe.pipeline import GPipe


class GradScaler(LocalGradScaler):
    """A `torch.amp.GradScaler` whose ranks agree: what is not finite on one of them skips the step on all.

    Every process makes one and calls the same; the scale stays the same everywhere. In one process it is torch's own.
    Give it to each step as `scaler=`: by `scale=scaler.get_scale()` it would not learn that it is in use, and `step`
    and `update` would fail. Some parameters may be spread over processes, as by `fully_shard`, and others whole.
    A process without an optimizer, because its partition has no parameters, gives None instead.

    Args:
        pipe: Whose gradients are scaled.
        device: The type of its devices; theirs by default.
        stop_after: How many steps in a row may be skipped; the next one that would be raises on all ranks. None
            for any number.
        options: `init_scale` and all else that `torch.amp.GradScaler` takes.

    Example:
        >>> import torch, gpipe
        >>> pipe = gpipe.GPipe([torch.nn.Linear(4, 1)], partitions=1, micro_batches=2)
        >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        >>> scaler = gpipe.GradScaler(pipe, init_scale=1024.0)
        >>> loss = pipe.step(torch.ones(8, 4), torch.ones(8, 1), torch.nn.functional.mse_loss, scaler=scaler)
        >>> scaler.unscale_(optimizer)
        >>> norm = pipe.clip_grad_norm_(1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """

    agrees = True  # with those of other processes, as torch's own does not

    def __init__(
        self, pipe: GPipe, device: str | None = None, *, stop_after: int | None = None, **options: Any
    ) -> None:
        if not isinstance(pipe, GPipe):
            why = f"gpipe.GradScaler was given a {type(pipe).__name__}; give the pipe whose gradients it scales"
            raise TypeError(f"{why}: gpipe.GradScaler(pipe), and the optimizer to scaler.step(optimizer)")
        super().__init__(device or pipe.devices[0].type, **options)
        self._pipe = pipe
        self._stop_after = stop_after
        self._skipped = 0

    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divides the gradients by the scale; notes whether any on any rank is not finite."""
        if not self.is_enabled():
            return
        if optimizer is not None:
            super().unscale_(optimizer)
        found = optimizer is not None and any(bool(one.item()) for one in found_infinite(self, optimizer).values())
        groups = [] if optimizer is None else optimizer.param_groups
        spread = [one.device_mesh for group in groups for one in group["params"] if hasattr(one, "device_mesh")]
        for mesh in dict.fromkeys(spread):  # ranks of it may be of other pipes
            told = torch.full((), float(found), device=mesh.device_type)
            for group in mesh.get_all_groups():
                dist.all_reduce(told, dist.ReduceOp.MAX, group)
            found = bool(told)
        found = any(agree(self._pipe._processes, found))
        device = scaler_device(self._pipe.devices)
        everywhere = {device: torch.full((), float(found), device=device)}
        note_infinite(self, self if optimizer is None else optimizer, everywhere)
        self._skipped = self._skipped + 1 if found else 0

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Does a step of the optimizer, or on all ranks none; gives what the optimizer returns.

        Raises:
            FloatingPointError: More than `stop_after` steps in a row would be skipped.
        """
        if self.is_enabled() and awaits_unscale(self, self if optimizer is None else optimizer):
            self.unscale_(optimizer)
        if self._stop_after is not None and self._skipped > self._stop_after:
            raise FloatingPointError(
                f"the gradients of {self._skipped} steps in a row were not finite; the scale is now "
                f"{self.get_scale():g}. Run a step under gpipe.detect_nonfinite(pipe), which names the layer"
            )
        return None if optimizer is None else super().step(optimizer, *args, **kwargs)
