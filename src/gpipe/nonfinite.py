"""Finds the layer that makes the first NaN or infinity."""

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
    """Inside, a step or call fails where the first NaN or infinity comes up, in the forward or the backward.

    The error says in which layer and micro-batch; over processes it is raised where the layer is, and the others
    raise `RemoteError` with its text, so that all leave out the same steps. All outputs are looked at, which takes
    time: when a loss is not finite, do that step again inside. Over processes all use it at the same time.

    Raises:
        FloatingPointError: A layer made something that is not finite; so do the inputs, if it was given that.

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
        FloatingPointError: the output of Log (layer 1) is not finite: 1 of 1 values, the first is -inf
        in the forward of micro-batch 1, rank 1, stage 1, layer 1 (1: Log), action 4 of 4:
            ...
    """
    if not isinstance(pipe, GPipe):
        raise TypeError(f"gpipe.detect_nonfinite was given a {type(pipe).__name__}; give the gpipe.GPipe itself")
    layers: dict[nn.Module, list[str]] = {}
    for stage in pipe._engine.own:
        for layer in stage.layers:
            for module in modules_run(layer.module):
                layers.setdefault(module, []).append(layer.name)
    last, is_over = pipe._engine.all[-1].layers[-1].module, False

    def look(words: str, module: nn.Module, *seen: Any) -> None:
        if not is_over:  # as it is where an interrupt came before there was a handle to remove this hook by
            _look(words, module is last, not pipe.is_model, *seen)

    with ExitStack() as hooks:
        try:
            for module, names in layers.items():
                words = f"{type(module).__name__} (layer {' or '.join(names)})"
                hooks.callback(module.register_forward_hook(partial(look, words), with_kwargs=True).remove)
            yield
        finally:
            is_over = True


def _look(layer: str, is_last: bool, is_layer: bool, args: Any, kwargs: Any, output: object) -> None:
    """Looks at what goes into a layer and comes out of it, and at the gradients that it gives back."""
    if is_layer:  # and not a part of a model, to which masks with infinities are given
        _check(f"the input of {layer}", (args, kwargs))
    _check(f"the output of {layer}", output)
    if is_last:
        _watch_gradients(f"the gradient of the loss, as it came to {layer},", output)
    _watch_gradients(f"the gradient of the input of {layer}", (args, kwargs))


def _watch_gradients(what: str, value: object) -> None:
    for tensor in tensors_in(value):
        if tensor.requires_grad and tensor.is_leaf:  # what a stage was given: its other hooks are the pipe's own
            tensor.register_post_accumulate_grad_hook(lambda leaf: _check(what, leaf.grad))
        elif tensor.requires_grad:
            tensor.register_hook(lambda gradient: _check(what, gradient))


def _check(what: str, value: object) -> None:
    for tensor in tensors_in(value):
        wrong = tensor.detach()[~tensor.detach().isfinite()]
        if len(wrong):
            found = f"{len(wrong)} of {tensor.numel()} values, the first is {wrong[0].item()}"
            raise FloatingPointError(f"{what} is not finite: {found}")
