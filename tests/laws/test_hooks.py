"""The users' own hooks on layers and on the pipe fire as on plain layers."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.owned import M, X, Y, build, make
from tests.support.plain_loop import (
    assert_same_bits,
    plain_loop,
    squares,
)


class Hooked:
    """Notes which hook fired for which layer, and what it was given."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.fired: list[tuple[str, int, Any]] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._note, "pre", index))
            layer.register_forward_hook(partial(self._note, "forward", index))
            if index == 0:
                continue  # no gradient comes to its input
            layer.register_full_backward_pre_hook(partial(self._note, "backward pre", index))
            layer.register_full_backward_hook(partial(self._note, "backward", index))

    def _note(self, kind: str, index: int, layer: nn.Module, *values: Any) -> None:
        bits = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().numpy().tobytes(), values)
        self.fired.append((kind, index, bits))

    def of(self, index: int) -> list[tuple[str, int, Any]]:
        return [firing for firing in self.fired if firing[1] == index]


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_hooks_fire_for_every_micro_batch_as_on_the_plain_layers(driver: str) -> None:
    reference, layers = build(), build()
    expected, found = Hooked(reference), Hooked(layers)
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
    with make(layers, driver=driver, remat="never") as pipe:
        pipe.step(X, Y, squares)
    for index in range(len(layers)):  # forwards go ahead of backwards, each of them in the order of the micro-batches
        for phase in (("pre", "forward"), ("backward pre", "backward")):
            fired, plain = ([f for f in hooked.of(index) if f[0] in phase] for hooked in (found, expected))
            assert fired == plain
    assert_same_bits(pipe, reference)


def test_with_recompute_forward_hooks_fire_again_right_before_the_backward_with_the_same_values() -> None:
    layers = build()
    hooked = Hooked(layers)
    make(layers, remat="always").step(X, Y, squares)
    for index in range(len(layers)):
        fired = hooked.of(index)
        kinds = [kind for kind, _, _ in fired]
        back = ["backward pre", "backward"] if index else []
        assert kinds == ["pre", "forward"] * M + ["pre", "forward", *back] * M
        first = fired[: 2 * M]
        again = [firing for firing in fired[2 * M :] if firing[0] in ("pre", "forward")]
        assert again == first


def triple(layer: nn.Module, given: Any, made: Any) -> Any:
    return (given[0] * 3,)


def double_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


def test_a_hook_may_change_what_it_sees() -> None:
    reference, layers = build(), build()
    for some in (reference, layers):
        some[0].register_forward_hook(lambda _, given, out: out * 2)
        some[3].register_full_backward_hook(triple)
        weight = some[5].get_parameter("weight")
        weight.register_hook(lambda gradient: gradient * 0.5)
        weight.register_post_accumulate_grad_hook(double_gradient)
    plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
    pipe = make(layers, driver="threads")
    pipe.step(X, Y, squares)
    assert_same_bits(pipe, reference)
    pipe.close()


def test_hooks_on_the_pipe_itself_fire_once_for_a_call() -> None:
    fired = []

    def behind(pipe: nn.Module, given: Any, made: Any) -> None:
        fired.append(made[0].shape)

    pipe = make()
    pipe.register_forward_hook(lambda _, given, out: fired.append(out.shape))
    pipe.register_full_backward_hook(behind)
    squares(pipe(X.clone().requires_grad_()), Y).backward()
    assert fired == [(7, 3), (7, 3)]
