"""Scales gradients for mixed precision with several processes, so that all processes skip the same steps."""

from typing import Any

import torch
import torch.distributed as dist

from gpipe._torch.modules import LocalGradScaler, awaits_unscale, found_infinite, note_infinite
from gpipe.batch.inputs import scaler_device
from gpipe.distributed.communicator import all_gather_checked
from gpipe.pipeline import GPipe


class GradScaler(LocalGradScaler):
    """Scales gradients like `torch.amp.GradScaler`. If a process has an infinity or NaN, all processes skip the step.

    Every process creates a scaler and calls the same methods, so the scale is the same in all processes. With one
    process, the scaler behaves like torch's scaler. Parameters can be sharded over processes, for example with
    `fully_shard`.

    Pass the scaler to each step as `scaler=`. Do not pass `scale=scaler.get_scale()`, because `scaler.step` and
    `scaler.update` would then raise an error. If the partition of a process has no parameters, and therefore no
    optimizer, pass None instead of an optimizer.

    Args:
        pipe: The pipe whose gradients are scaled.
        device: The type of the pipe's devices. Default: the type of its first device.
        stop_after: The maximum number of steps in a row that may be skipped. If a further step must be skipped,
            `step` raises an error in all processes. Default: None (no maximum).
        **options: Other arguments of `torch.amp.GradScaler`, such as `init_scale`.

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

    agrees = True  # Scalers of all processes agree on the steps to skip; torch's do not.

    def __init__(
        self, pipe: GPipe, device: str | None = None, *, stop_after: int | None = None, **options: Any
    ) -> None:
        if not isinstance(pipe, GPipe):
            raise TypeError(
                f"pipe is a {type(pipe).__name__}, not a gpipe.GPipe. Use gpipe.GradScaler(pipe), and pass the "
                "optimizer to scaler.step(optimizer)."
            )
        super().__init__(device or pipe.devices[0].type, **options)
        self._pipe = pipe
        self._stop_after = stop_after
        self._skipped = 0

    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divides the gradients by the scale, and checks whether any process has a non-finite gradient."""
        if not self.is_enabled():
            return
        if optimizer is not None:
            super().unscale_(optimizer)
        is_infinite = optimizer is not None and any(
            bool(flag.item()) for flag in found_infinite(self, optimizer).values()
        )
        groups = [] if optimizer is None else optimizer.param_groups
        meshes = [p.device_mesh for group in groups for p in group["params"] if hasattr(p, "device_mesh")]
        for mesh in dict.fromkeys(meshes):  # A mesh may have ranks outside this pipe.
            flag = torch.full((), float(is_infinite), device=mesh.device_type)
            for group in mesh.get_all_groups():
                dist.all_reduce(flag, dist.ReduceOp.MAX, group)
            is_infinite = bool(flag)
        is_infinite = any(all_gather_checked(self._pipe._processes, is_infinite))
        device = scaler_device(self._pipe.devices)
        flags = {device: torch.full((), float(is_infinite), device=device)}
        note_infinite(self, self if optimizer is None else optimizer, flags)
        self._skipped = self._skipped + 1 if is_infinite else 0

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Runs `optimizer.step`, unless a process has a non-finite gradient.

        Args:
            optimizer: The optimizer. None if the partition of this process has no parameters.
            *args: Positional arguments of `optimizer.step`.
            **kwargs: Keyword arguments of `optimizer.step`.

        Returns:
            The result of `optimizer.step`. None if the step was skipped, or if there is no optimizer.

        Raises:
            FloatingPointError: If more than `stop_after` steps in a row would be skipped.
        """
        if self.is_enabled() and awaits_unscale(self, self if optimizer is None else optimizer):
            self.unscale_(optimizer)
        if self._stop_after is not None and self._skipped > self._stop_after:
            raise FloatingPointError(
                f"stop_after={self._stop_after}: gradients were not finite in {self._skipped} steps in a row. The "
                f"scale is {self.get_scale():g}. Run a step under gpipe.detect_nonfinite(pipe) to find the layer. "
                "[gradients-not-finite]"
            )
        return None if optimizer is None else super().step(optimizer, *args, **kwargs)
