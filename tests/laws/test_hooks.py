"""The users' own hooks on layers and on the pipe fire as on plain layers."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.owned import M, X, Y, build, make
from tests.support.plain_loop import assert_same_bits, plain_loop, squares

FORWARD = ("pre", "forward")


class Hooked:
    """Hooks of every kind on each layer: what fired for which, and what it was given."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.fired: list[tuple[str, int, Any]] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._note, "pre", index))
            layer.register_forward_hook(partial(self._note, "forward", index))
            if index:  # no gradient comes to the input of the first
                layer.register_full_backward_pre_hook(partial(self._note, "backward pre", index))
                layer.register_full_backward_hook(partial(self._note, "backward", index))
            for parameter in layer.parameters():
                parameter.register_hook(partial(self._note, "gradient", index, layer))

    def _note(self, kind: str, index: int, layer: nn.Module, *values: Any) -> None:
        bits = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().numpy().tobytes(), values)
        self.fired.append((kind, index, bits))

    def of(self, index: int, *, forward: bool) -> list[tuple[str, int, Any]]:
        """Forwards go ahead of backwards, each of them in the order of the micro-batches."""
        return [firing for firing in self.fired if firing[1] == index and (firing[0] in FORWARD) == forward]


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_hooks_fire_for_every_micro_batch_as_on_the_plain_layers(driver: str, remat: str) -> None:
    reference, layers = build(), build()
    expected, found = Hooked(reference), Hooked(layers)
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
    with make(layers, driver=driver, remat=remat) as pipe:
        pipe.step(X, Y, squares)
    runs = 2 if remat == "always" else 1  # forward hooks fire again in the recompute, with the same values
    for index in range(len(layers)):
        assert found.of(index, forward=True) == expected.of(index, forward=True) * runs
        assert found.of(index, forward=False) == expected.of(index, forward=False)
    assert_same_bits(pipe, reference)


def test_hooks_on_the_pipe_itself_fire_once_for_a_call() -> None:
    fired = []
    pipe = make()
    pipe.register_forward_hook(lambda _, given, out: fired.append(out.shape))
    pipe.register_full_backward_hook(lambda _, given, made: fired.append(made[0].shape))  # type: ignore[index]
    squares(pipe(X.clone().requires_grad_()), Y).backward()
    assert fired == [(7, 3), (7, 3)]


def test_hooks_that_pytorch_calls_for_every_module_are_called_in_rank_threads_too() -> None:
    heard: list[str] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.Linear):
            heard.append(f"{module.out_features}")

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        with make(driver="threads", remat="never") as pipe:
            pipe.step(X, Y, squares)
    finally:
        handle.remove()
    assert sorted(heard) == ["3"] * M + ["6"] * 2 * M
