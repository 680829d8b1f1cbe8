"""`pipe(inputs)` under grad: one autograd node, whose backward is pipelined, or refused with the reason."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.runtime.streams import RankStream
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.tree import replace_tensors, tensors_in
from tests.support.plain_loop import (
    Loop,
    assert_same_bits,
    copied,
    one_thread,
    plain_call,
    same_bits,
    squares,
    weights_of,
)

M = 3
X, Y = torch.randn(7, 5), torch.randn(7, 3)
KINDS = [("lockstep", "never"), ("threads", "always")]
pytestmark = pytest.mark.parametrize(("driver", "remat"), KINDS, ids=["lockstep", "threads"])


def total(output: Any, target: object = None) -> Tensor:
    loss: Tensor = output.square().sum()
    return loss


def build() -> list[nn.Module]:
    with weights_of(1):
        return [nn.Linear(5, 6), nn.GELU(), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]


def make(driver: str, remat: str, layers: list[nn.Module] | None = None, **changes: Any) -> gpipe.GPipe:
    layers = layers or build()
    return gpipe.GPipe(
        layers,
        **{
            "partitions": min(3, len(layers)),
            "micro_batches": M,
            "driver": driver,
            "remat": remat,
            "seed": 4,
            **changes,
        },
    )


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def test_a_second_backward_is_refused_with_the_reason(driver: str, remat: str) -> None:
    pipe, reference = make(driver, remat), build()
    loss = squares(pipe(X), Y)
    loss.backward(retain_graph=True)
    plain_call(reference, X, Y, squares, micro_batches=M, seed=4)
    assert_same_bits(pipe, reference)
    once = copy.deepcopy(gradients(pipe))
    with pytest.raises(RuntimeError, match=r"\[second-backward\]"):
        loss.backward()
    assert all(map(same_bits, gradients(pipe), once))
    output = pipe(X)
    first, second = output[:2].sum(), output[2:].sum()
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"\[second-backward\]"):
        second.backward()


SOME = r"\[gradients-of-some-inputs\]"
UNUSED = "appears to not have been used in the graph"


@pytest.mark.parametrize(
    ("differentiate", "reason"),
    [
        (lambda loss, x, w: loss.backward(create_graph=True), r"\[higher-derivatives\]"),
        (lambda loss, x, w: torch.autograd.grad(loss, x, create_graph=True), r"\[higher-derivatives\]"),
        (lambda loss, x, w: torch.autograd.grad(loss, x), SOME),
        (lambda loss, x, w: torch.autograd.grad(loss, [x, *w], allow_unused=True), SOME),
        (lambda loss, x, w: loss.backward(inputs=x), SOME),
        (lambda loss, x, w: loss.backward(inputs=[x, *w]), SOME),
        (lambda loss, x, w: torch.autograd.grad(loss, w), UNUSED),
    ],
)
def test_what_a_pipelined_backward_cannot_do_is_refused_and_changes_no_gradient(
    differentiate: Callable[[Tensor, Tensor, list[nn.Parameter]], object], reason: str, driver: str, remat: str
) -> None:
    pipe, head = make(driver, remat), nn.Linear(5, 5)
    x = head(X)  # requires a gradient, as behind a layer of a parent module
    loss = squares(pipe(x), Y)
    with pytest.raises(RuntimeError, match=reason):
        differentiate(loss, x, list(pipe.parameters()))
    assert all(gradient is None for gradient in [*gradients(pipe), *gradients(head)])


def test_gradients_of_some_parameters_alone_are_never_added_silently(driver: str, remat: str) -> None:
    pipe = make(driver, remat)
    weights = list(pipe.parameters())
    assert torch.autograd.grad(squares(pipe(X), Y), weights, allow_unused=True) == (None,) * len(weights)
    assert all(gradient is None for gradient in gradients(pipe))


class Parent(nn.Module):
    """A module with layers before and behind a part of it."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        with weights_of(2):
            self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
            self.tail = nn.Linear(3, 3)
            self.last = nn.Linear(5, 3)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        out: Tensor = self.tail(self.middle(x)) + self.last(x)
        return out


def test_inside_a_parent_module_all_gradients_are_those_of_plain_layers(driver: str, remat: str) -> None:
    parent, plain = Parent(make(driver, remat)), Parent(Loop(build(), M, 4))
    inputs = [torch.linspace(-1, 1, 28).reshape(7, 4).requires_grad_() for _ in range(2)]
    with one_thread():
        losses = [squares(module(x), Y) for module, x in zip((parent, plain), inputs, strict=True)]
        for loss in losses:
            loss.backward()
    assert same_bits(*losses)
    assert same_bits(*(x.grad for x in inputs))
    found, expected = dict(parent.named_parameters()), dict(plain.named_parameters())
    assert list(found) == list(expected)
    assert [name for name in found if not same_bits(found[name].grad, expected[name].grad)] == []


def test_gradients_of_inputs_are_those_of_plain_layers(driver: str, remat: str) -> None:
    leaves = [{"x": X.clone().requires_grad_(), "unused": X.clone().requires_grad_()} for _ in range(2)]

    class First(nn.Module):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return inputs["x"] * inputs["x"].exp()

    pipe = make(driver, remat, [First(), *build()])
    squares(pipe(leaves[0]), Y).backward()
    plain_call([First(), *build()], leaves[1], Y, squares, micro_batches=M, seed=4)
    assert same_bits(leaves[0]["x"].grad, leaves[1]["x"].grad)
    assert leaves[0]["unused"].grad is None


def test_the_gradient_of_a_whole_input_is_added_up_as_in_the_plain_loop(driver: str, remat: str) -> None:
    class Scaled(nn.Module):
        def forward(self, inputs: tuple[Tensor, Tensor | gpipe.Whole]) -> Tensor:
            x, scale = inputs
            return x * (scale.tensor if isinstance(scale, gpipe.Whole) else scale)

    scales = [torch.full((1, 5), 1.1).requires_grad_() for _ in range(2)]
    squares(make(driver, remat, [Scaled(), *build()])((X, gpipe.Whole(scales[0]))), Y).backward()
    inputs = (X, gpipe.Whole(scales[1]))
    plain_call([Scaled(), *build()], inputs, Y, squares, micro_batches=M, seed=4)
    assert same_bits(*(scale.grad for scale in scales))


def test_gradients_of_inputs_come_back_from_another_device(
    driver: str, remat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(stream: RankStream, crossing: BoundaryValue, mark: object) -> BoundaryValue:
        """What crosses to another device has other leaves there."""
        there = {id(t): copied(t.detach()).requires_grad_(t.requires_grad) for t in tensors_in(crossing.value)}
        value = replace_tensors(crossing.value, lambda tensor: there[id(tensor)])
        return BoundaryValue(value, [there[id(leaf)] for leaf in crossing.leaves])

    monkeypatch.setattr(RankStream, "receive_value", moved)
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    squares(make(driver, remat)(inputs[0]), Y).backward()
    plain_call(build(), inputs[1], Y, squares, micro_batches=M, seed=4)
    assert same_bits(*(x.grad for x in inputs))


class Many(nn.Module):
    """Gives a tree of all kinds of values."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        hard = x.argmax(1)
        return {"soft": x, "both": (x, x * 2), "hard": hard, "plain": x.detach(), "name": "many", "n": 3, "no": None}


def test_outputs_may_be_any_tree(driver: str, remat: str) -> None:
    reference, pipe = [*build(), Many()], make(driver, remat, [*build(), Many()])
    output = pipe(X)
    assert output["soft"].shape == (7, 3)
    assert output["hard"].shape == (7,)
    assert output["hard"].dtype == torch.int64
    assert (output["name"], output["n"], output["no"]) == ("many", 3, None)
    wants = {"soft": True, "hard": False, "plain": False}
    assert {name: output[name].requires_grad for name in wants} == wants

    def loss_fn(output: Any, target: Any) -> Tensor:
        loss: Tensor = (
            output["both"][1].sub(target).square().mean() + output["soft"].mean() + total(output["both"][0])
        )
        return loss

    loss_fn(output, Y).backward()
    plain_call(reference, X, Y, loss_fn, micro_batches=M, seed=4)
    assert_same_bits(pipe, reference)


def test_a_model_in_which_nothing_requires_a_gradient(driver: str, remat: str) -> None:
    pipe = make(driver, remat).requires_grad_(False)
    output = pipe(X)
    assert not output.requires_grad
    assert output.grad_fn is None
    x = X.clone().requires_grad_()
    squares(pipe(x), Y).backward()
    assert x.grad is not None
    assert all(gradient is None for gradient in gradients(pipe))


def test_eval_under_grad_trains_without_counting_a_step(driver: str, remat: str) -> None:
    reference, pipe = build(), make(driver, remat).eval()
    squares(pipe(X), Y).backward()
    nn.Sequential(*reference).eval()
    plain_call(reference, X, Y, squares, micro_batches=M, seed=4)
    assert_same_bits(pipe, reference)
    assert pipe.step_number == 0


@pytest.mark.parametrize("micro_batches", [1, M])
def test_an_output_may_be_changed_in_place_where_torch_allows_it(micro_batches: int, driver: str, remat: str) -> None:
    reference, pipe = build(), make(driver, remat, micro_batches=micro_batches)
    output = pipe(X)
    output.mul_(2).add_(1)
    squares(output, Y).backward()
    plain_call(reference, X, Y, lambda out, y: squares(out * 2 + 1, y), micro_batches=micro_batches, seed=4)
    assert_same_bits(pipe, reference)


def test_an_output_that_its_layer_needs_again_may_not_be_changed_in_place(driver: str, remat: str) -> None:
    pipe = make(driver, "never", [nn.Linear(5, 4), nn.Sigmoid()], micro_batches=1)
    output = pipe(X)
    output.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("micro_batches", [1, M])
def test_hooks_on_the_output_see_and_change_its_gradient(micro_batches: int, driver: str, remat: str) -> None:
    reference, pipe = build(), make(driver, remat, micro_batches=micro_batches)
    output = pipe(X)
    seen: list[Tensor] = []
    output.register_hook(lambda gradient: seen.append(gradient) or gradient * 0.5)  # type: ignore[func-returns-value]
    output.retain_grad()
    squares(output, Y).backward()
    plain_call(reference, X, Y, lambda out, y: squares(out, y) * 0.5, micro_batches=micro_batches, seed=4)
    assert_same_bits(pipe, reference)
    assert same_bits(output.grad, seen[0] * 0.5)


def test_a_call_keeps_the_step_number_that_it_began_with(driver: str, remat: str) -> None:
    reference, pipe = build(), make(driver, remat)
    pipe.step_number = 5
    loss = squares(pipe(X), Y)
    assert pipe.step_number == 6
    pipe.step_number = 99
    loss.backward()
    plain_call(reference, X, Y, squares, micro_batches=M, seed=4, step=5)
    assert_same_bits(pipe, reference)


def test_the_pipe_as_input_of_itself(driver: str, remat: str) -> None:
    def layers() -> list[nn.Module]:
        with weights_of(3):
            return [nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)]

    pipe, plain = make(driver, remat, layers(), micro_batches=1), nn.Sequential(*layers())
    pipe(pipe(X)).square().sum().backward()
    with one_thread():
        plain(plain(X)).square().sum().backward()
    assert_same_bits(pipe, list(plain))


def test_a_backward_after_a_parameter_has_changed_is_refused(driver: str, remat: str) -> None:
    pipe = make(driver, remat)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    first, second = squares(pipe(X), Y), squares(pipe(X), Y)
    first.backward()
    optimizer.step()
    reason = "modified by an inplace operation" if remat == "never" else r"\[changed-before-backward\]"
    with pytest.raises(RuntimeError, match=reason):
        second.backward()


def test_a_call_with_other_parameters_gives_their_gradients_or_is_refused(driver: str, remat: str) -> None:
    pipe, reference = make(driver, remat), build()
    others = {name: (p.detach() * 2).requires_grad_() for name, p in pipe.named_parameters()}
    loss = squares(torch.func.functional_call(pipe, others, (X,)), Y)
    if remat == "always":
        with pytest.raises(RuntimeError, match=r"\[changed-before-backward\]"):
            loss.backward()
        return
    loss.backward()
    with torch.no_grad():
        for p in nn.Sequential(*reference).parameters():
            p.mul_(2)
    plain_call(reference, X, Y, squares, micro_batches=M, seed=4)
    for name, p in nn.Sequential(*reference).named_parameters():
        assert same_bits(others[name].grad, p.grad)
    assert all(gradient is None for gradient in gradients(pipe))


def test_a_backward_whose_recompute_would_run_in_another_mode_is_refused(driver: str, remat: str) -> None:
    pipe = make(driver, remat)
    loss = squares(pipe(X), Y)
    pipe.eval()
    if remat == "never":
        loss.backward()
        return
    with pytest.raises(RuntimeError, match=r"\[changed-before-backward\]"):
        loss.backward()
    pipe.train()
    squares(pipe(X), Y).backward()
