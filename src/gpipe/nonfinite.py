"""Finds the layer that computes the first NaN or infinity."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from gpipe.pipeline import GPipe
from gpipe.stages.tree import tensors_in
from gpipe.tracing.parts import modules_run


@contextmanager
def detect_nonfinite(pipe: GPipe) -> Iterator[None]:
    """Raises an error when a layer computes the first NaN or infinity, in the forward or backward pass.

    The error names the layer and the micro-batch. Checking all outputs takes time, so use this context only to repeat
    a step whose loss was not finite.

    With several processes, every process must enter the context. The process that has the layer raises the error. All
    other processes raise a `RemoteError` with the same text.

    Args:
        pipe: The pipe whose steps and calls are checked.

    Raises:
        TypeError: If `pipe` is not a `gpipe.GPipe`.
        FloatingPointError: If an input, output or gradient of a layer is not finite, in a step or call inside the
            context.

    Example:
        >>> import torch, gpipe
        >>> class Log(torch.nn.Module):
        ...     def forward(self, value):
        ...         return value.log()
        >>> pipe = gpipe.GPipe([torch.nn.ReLU(), Log()], partitions=2, micro_batches=2)
        >>> with torch.no_grad(), gpipe.detect_nonfinite(pipe):
        ...     _ = pipe(torch.tensor([[1.0], [-1.0]]))
        Traceback (most recent call last):
          ...
        FloatingPointError: The output of Log (layer 1) is not finite: 1 of 1 values, the first is -inf. ...
        in the forward of micro-batch 1, rank 1, stage 1, layer 1 (1: Log), action 4 of 4:
            ...
    """
    if not isinstance(pipe, GPipe):
        raise TypeError(f"pipe is a {type(pipe).__name__}, not a gpipe.GPipe. Use gpipe.detect_nonfinite(pipe).")
    layers: dict[nn.Module, list[str]] = {}
    for stage in pipe._stages.local:
        for layer in stage.layers:
            for module in modules_run(layer.module):
                layers.setdefault(module, []).append(layer.name)
    last, is_over = pipe._stages.all[-1].layers[-1].module, False

    def check(layer: str, module: nn.Module, *values: Any) -> None:
        if not is_over:  # A hook stays registered if an interrupt comes before its handle is stored.
            _check_layer(layer, module is last, not pipe.is_model, *values)

    with ExitStack() as hooks:
        try:
            for module, names in layers.items():
                layer_name = f"{type(module).__name__} (layer {' or '.join(names)})"
                hooks.callback(module.register_forward_hook(partial(check, layer_name), with_kwargs=True).remove)
            yield
        finally:
            is_over = True


def _check_layer(layer: str, is_last: bool, is_layer: bool, args: Any, kwargs: Any, output: object) -> None:
    """Checks the inputs and the output of a layer, and registers hooks that check their gradients."""
    if is_layer:  # Modules of a traced model may receive masks that contain infinities.
        _check(f"input of {layer}", (args, kwargs))
    _check(f"output of {layer}", output)
    if is_last:
        _check_gradients(f"gradient of the loss with respect to the output of {layer}", output)
    _check_gradients(f"gradient of the input of {layer}", (args, kwargs))


def _check_gradients(name: str, value: object) -> None:
    for tensor in tensors_in(value):
        if tensor.requires_grad and tensor.is_leaf:  # An input of a stage, whose other hooks belong to the pipe.
            tensor.register_post_accumulate_grad_hook(lambda leaf: _check(name, leaf.grad))
        elif tensor.requires_grad:
            tensor.register_hook(lambda gradient: _check(name, gradient))


def _check(name: str, value: object) -> None:
    for tensor in tensors_in(value):
        wrong = tensor.detach()[~tensor.detach().isfinite()]
        if len(wrong):
            raise FloatingPointError(
                f"The {name} is not finite: {len(wrong)} of {tensor.numel()} values, the first is {wrong[0].item()}. "
                "Check this layer and the values that it receives. [value-not-finite]"
            )
