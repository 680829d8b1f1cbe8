"""Tests that gpipe rejects models that it cannot split bitwise, and names the cause, the place and the fix."""

import contextvars
import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe.tracing.model import TracedModel
from tests.support.beside_plain import M, squared
from tests.support.handwritten import W, blocks, vectors
from tests.support.planned import pipe_by_costs


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Net(nn.Module):
    """Blocks, with code of a test in between."""

    def __init__(self, between: Callable[["Net", Tensor, int], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(W, W)
        self.layers = blocks()
        self.mean = nn.Buffer(torch.zeros(W))
        self.plain = nn.Identity()
        self.layerdrop = 0.3
        self.history: list[object] = []
        self.count = 0
        self.seen: object = None
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for at, layer in enumerate(self.layers):
            x = self.between(self, layer(x), at)
        return x


class Written(nn.Module):
    """Modules in a list, with a forward that a test defines."""

    def __init__(self, forward: Callable[..., Tensor], layers: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or blocks())
        self.written = forward

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.written(self.layers, *args, **kwargs)


def through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def made(model: nn.Module, partitions: int = 2, **settings: Any) -> gpipe.GPipe:
    given: dict[str, Any] = {"sample": vectors(5), "seed": 1}
    return pipe_by_costs(model, partitions, M, **given | settings)


def step(pipe: gpipe.GPipe, rows: int = 8) -> Tensor:
    loss: Tensor = pipe.step(vectors(rows), torch.ones(rows, W), squared)
    return loss


def counts(net: Net, x: Tensor, at: int) -> Tensor:
    net.count += 1
    return x


def keeps(net: Net, x: Tensor, at: int) -> Tensor:
    net.seen = x
    return x


def collects(net: Net, x: Tensor, at: int) -> Tensor:
    net.history.append(x)
    return x


def collects_numbers(net: Net, x: Tensor, at: int) -> Tensor:
    net.history.append(at)
    return x


def assigns_buffer(net: Net, x: Tensor, at: int) -> Tensor:
    net.mean = net.mean * 0.9 + x.detach().mean(0) * 0.1  # type: ignore[assignment]  # a tensor is one
    return x


def writes_buffer(net: Net, x: Tensor, at: int) -> Tensor:
    net.mean.mul_(0.9).add_(x.detach().mean(0))
    return x


def writes_data(net: Net, x: Tensor, at: int) -> Tensor:
    net.mean.data.mul_(0.9).add_(x.detach().mean(0))
    return x


def drops(net: Net, x: Tensor, at: int) -> Tensor:
    return x if torch.rand([]) < net.layerdrop else x * 2


def fills(net: Net, x: Tensor, at: int) -> Tensor:
    made = torch.zeros(len(x), W)
    made[:, :3] = x[:, :3]
    return made


def by_numpy(net: Net, x: Tensor, at: int) -> Tensor:
    return x * float(x.detach().numpy().mean())


REFUSED: dict[str, tuple[Callable[[Net, Tensor, int], Tensor], str]] = {
    "autograd.Function": (lambda net, x, at: Doubled.apply(x), "layers.1: .*untraceable-tensor"),
    "reentrant checkpoint": (
        lambda net, x, at: checkpoint(torch.tanh, x, use_reentrant=True), "untraceable-tensor",
    ),
    "vmap": (lambda net, x, at: torch.vmap(lambda row: row * 2)(x), "untraceable-tensor"),
    "Python's random": (lambda net, x, at: x * random.random(), "Python's random generator.*random-between-blocks"),
    "numpy's random": (lambda net, x, at: x * float(np.random.rand()), "numpy's .*random-between-blocks"),
    "layers dropped": (drops, "random number.*random-between-blocks"),
    "a tensor left": (keeps, r"Net\.seen.*tensor-left-on-module"),
    "tensors collected": (collects, r"Net\.history.*tensor-left-on-module"),
    "numbers collected": (collects_numbers, r"Net\.history.*state-between-blocks"),
    "a count": (counts, r"Net\.count.*state-between-blocks"),
    "a buffer in place": (writes_buffer, "buffer mean .*buffer-between-blocks"),
    "a buffer by .data": (writes_data, "buffer mean .*buffer-between-blocks"),
    "another buffer": (assigns_buffer, "buffer mean .*buffer-between-blocks"),
    "made of nothing": (fills, "untraceable-tensor"),
    "numpy": (by_numpy, r"between blocks \.mean .*value-missing-at-boundary"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_between_blocks_is_refused_when_recorded(name: str) -> None:
    between, message = REFUSED[name]
    model = Net(between)
    torch.manual_seed(2)
    with pytest.raises(ValueError, match=rf"(?s){message}.*\]$"):
        made(model)
    assert model.count == 0
    assert model.seen is None
    assert not model.mean.any()


def test_what_is_left_the_same_each_time_is_taken_and_layers_that_are_never_dropped() -> None:
    class Says(Written):
        def forward(self, x: Tensor) -> Tensor:
            self.width = x.shape[-1]
            return through(self.layers, x)

    layers = [nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W)) for _ in range(3)]
    step(made(Says(through, layers), blocks=["layers.0", "layers.1", "layers.2"]))
    model = Net(drops)
    model.layerdrop = 0.0
    step(made(model))


@pytest.mark.parametrize("grad", [True, False])
def test_a_function_of_autograd_whose_output_crosses_a_cut_is_refused(grad: bool) -> None:
    """Without remat, the gradients of the layers before the function were lost."""

    def kept(function: Callable[[Tensor], Tensor]) -> nn.Module:
        return Written(lambda layers, x: through(layers[1:], layers[0](x)) + function(layers[0](x)))

    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"\[untraceable-tensor\]"):
        made(kept(Doubled.apply), remat="never")
    step(made(kept(torch.tanh)))


@pytest.mark.parametrize(
    "between",
    [lambda net, x, at: x.mul(2) if len(x) > 1 else x, lambda net, x, at: x.mul(2) if len(x) > 1 else x.add(x)],
)
def test_a_branch_on_a_size_of_one_is_rejected_with_the_size_and_advice_that_works(between: Any) -> None:
    """einx, which x-transformers uses, has such branches."""
    model = Net(between)
    with pytest.raises(ValueError, match=r"shape \[1, 6\] .* \[3, 6\].*\[branch-on-shape\]"):
        step(made(model), M)
    expected = sum(squared(model(row), torch.ones(1, W)) / M for row in vectors(M).split(1))
    torch.testing.assert_close(step(made(model, sample=vectors(1)), M), expected.detach())  # type: ignore[union-attr]
    step(made(model), 8)


def test_a_branch_on_a_value_that_goes_another_way_is_refused() -> None:
    def branch(net: Net, x: Tensor, at: int) -> Tensor:
        return x.mul(2) if float(x.detach().abs().max()) < 50 else x.div(3)

    pipe = made(Net(branch))
    step(pipe)
    with pytest.raises(ValueError, match=r"reaches (div|mul) .*\[branch-on-value\]"):
        pipe.step(vectors(8) * 1e5, torch.ones(8, W), squared)
    step(pipe)


class Padded(nn.Module):
    """torch's encoder, whose forward checks for overrides of torch functions, and whether gradients are recorded."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(W, W)
        layer = nn.TransformerEncoderLayer(W, 2, W, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested)

    def forward(self, x: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if causal else None
        return self.encoder(self.embed(x), mask=later, src_key_padding_mask=mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("left_aligned", [True, False])
def test_an_encoder_that_computes_in_nested_tensors_is_refused_where_it_may(
    training: bool, left_aligned: bool
) -> None:
    """In evaluation without gradients it silently took the other path, because gpipe verified it with gradients."""
    mask = torch.zeros(8, 5, dtype=torch.bool)
    mask[::2, 3:] = True
    given = {"x": torch.randn(8, 5, W), "mask": mask if left_aligned else mask.flip(1)}
    for nested in (True, False):
        model = Padded(nested=nested).train(training)
        with pipe_by_costs(model, 2, 2, sample=given, costs="params") as pipe:
            pipe.step(given, torch.ones(8, 5, W), squared)
            pipe.eval()
            assert torch.equal(pipe(given), model(**given))
            bare = {**given, "mask": None}
            causal = {**given, "mask": mask, "causal": True}
            with torch.no_grad():
                assert torch.equal(pipe(bare), model(**bare))
                assert torch.equal(pipe(causal), model(**causal))  # with both masks it takes the path of training
                if nested:
                    with pytest.raises(ValueError, match=r"\[nested-tensor-encoder\]"):
                        pipe(given)
                    model.encoder.use_nested_tensor = False
                assert torch.equal(pipe(given), model(**given))


def test_an_encoder_that_is_frozen_later_is_refused_too() -> None:
    """Without trainable parameters it takes the other path even if gradients are recorded."""
    mask = torch.zeros(8, 5, dtype=torch.bool)
    mask[::2, 3:] = True
    given = {"x": torch.randn(8, 5, W), "mask": mask}
    model = Padded(nested=True).eval()
    with pipe_by_costs(model, 2, 2, sample=given, costs="params") as pipe:
        assert torch.equal(pipe(given), model(**given))
        model.requires_grad_(False)
        with pytest.raises(ValueError, match=r"\[nested-tensor-encoder\]"):
            pipe(given)


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_without_values_is_refused_where_it_may_compute_in_nested_tensors(training: bool) -> None:
    given = {"x": torch.randn(8, 5, W), "mask": torch.zeros(8, 5, dtype=torch.bool)}
    with torch.device("meta"):
        traced = TracedModel(Padded(nested=True).train(training), given)
    traced.trace_all(given)
    traced.model.train()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert traced.begin([given])
    traced.model.eval()
    assert traced.begin([given])
    with torch.no_grad(), pytest.raises(ValueError, match=r"\[nested-tensor-encoder\]"):
        traced.begin([given])


@pytest.mark.parametrize("training", [True, False])
def test_a_path_is_proven_with_gradients_and_without(training: bool) -> None:
    """No operation may show that a forward behaves differently without gradients."""

    def unseen(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        return through(layers, x) * (
            1.0 if torch.is_grad_enabled() or torch.overrides.has_torch_function((x,)) else 2.0
        )

    model = Written(unseen).train(training)
    with made(model) as pipe:
        step(pipe)
        for _ in range(2):
            with torch.no_grad(), pytest.raises(ValueError, match=r"\[split-output-differs\]"):
                pipe(vectors(8))
        step(pipe)


def in_training(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = through(layers, x)
    return x + torch.randn_like(x) if layers.training else x


def in_evaluation(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = through(layers, x)
    return x if layers.training else x.softmax(1)


def with_gradients(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = layers[0](x)
    return through(layers[1:], x * 2 if torch.is_grad_enabled() else x)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (
            in_training,
            r"has 5 layers, .* 6 with the sample\. .* fewer operations: randn_like, add.*number-of-layers-differs",
        ),
        (
            in_evaluation,
            r"has 6 layers, .* 5 with the sample\. .* more operations: softmax\. .*\[number-of-layers-differs\]",
        ),
        (with_gradients, r"reaches layers\.1 instead of mul.*\[branch-on-value\]"),
    ],
)
def test_what_one_mode_does_beside_is_named_with_the_mode(written: Callable[..., Tensor], why: str) -> None:
    with made(Written(written)) as pipe:
        step(pipe)
        pipe.eval()
        with torch.no_grad(), pytest.raises(ValueError, match=rf"In evaluation, under torch.no_grad\(\): .*{why}"):
            pipe(vectors(8))


def test_a_change_through_a_view_across_a_cut_is_refused() -> None:
    def views(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        base = layers[0](x) * 1
        part = base[:, :2]
        x = through(layers[1:], x)
        part.mul_(2)
        return x + base

    with pytest.raises(ValueError, match=r"\[split-output-differs\]"):
        made(Written(views))


class Table(nn.Module):
    """A module without parameters that replaces its buffer for many rows."""

    def __init__(self, made: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.made = made
        self.table = nn.Buffer(made(1))

    def forward(self, rows: int) -> Tensor:
        if rows > 5:
            self.table = nn.Buffer(self.made(rows))
        return self.table


def test_a_buffer_may_grow_between_blocks_but_not_change() -> None:
    def scaled_by(made: Callable[[int], Tensor]) -> Net:
        net = Net(lambda net, x, at: x * net.plain(len(x)).mean())
        net.plain = Table(made)  # type: ignore[assignment]  # any module will do
        return net

    step(made(scaled_by(lambda rows: torch.ones(rows))), 32)
    with pytest.raises(ValueError, match=r"buffer plain\.table .*\[buffer-between-blocks\]"):
        step(made(scaled_by(lambda rows: torch.full((1,), float(rows)))), 32)


def test_hooks_on_open_modules_are_refused() -> None:
    model = Net(lambda net, x, at: x)
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"Net has a hook.*\[hook-around-blocks\]"):
        made(model)
    hook.remove()
    pipe = made(model)
    step(pipe)
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"Net has a hook.*\[hook-around-blocks\]"):
        step(pipe)


def test_hooks_on_modules_without_parameters_run_once() -> None:
    seen = []
    model = Net(lambda net, x, at: net.plain(x))
    model.plain.register_forward_hook(lambda module, args, output: seen.append(float(output.detach().sum())))
    pipe = made(model, remat="never")
    seen.clear()
    step(pipe)
    assert len(seen) == 5 * M
    later = Net(lambda net, x, at: net.plain(x))
    pipe = made(later)
    later.plain.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"plain has a hook.*\[hook-around-blocks\]"):
        step(pipe)


def test_a_forward_that_is_set_on_a_module_is_walked_through_if_it_is_a_method() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 2
        return x

    model = Net(same)
    model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    plain = copy.deepcopy(model)
    loss = step(made(model))
    torch.testing.assert_close(loss, squared(plain(vectors(8)), torch.ones(8, W)).detach())
    model.forward = partial(forward, model)  # type: ignore[method-assign]  # as accelerate does
    with pytest.raises(ValueError, match=r"\[replaced-forward\]"):
        made(model)
    model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    for inner, names in ((model, [f"inner.layers.{at}" for at in range(5)]), (model.layers[1], ["block"])):
        around = nn.Module()  # as peft has it
        around.inner, around.block, around.forward = model, model.layers[1], inner.forward
        loss = step(made(around, min(len(names), 2), blocks=names))
        torch.testing.assert_close(loss, squared(inner(vectors(8)), torch.ones(8, W)).detach())
    block = Net(same)
    block.layers[1].forward = partial(type(block.layers[1]).forward, block.layers[1])
    step(made(block))


class Averages(nn.Module):
    """A block that keeps a moving average between calls."""

    def __init__(self, *, as_buffer: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(W, W)
        self.mean = nn.Buffer(torch.zeros(W)) if as_buffer else torch.zeros(W)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def test_what_a_block_keeps_is_to_be_a_buffer() -> None:
    def whole(*, as_buffer: bool) -> nn.Module:
        torch.manual_seed(1)
        return Written(through, [Averages(as_buffer=as_buffer) for _ in range(3)])

    differs = r"output differs: .* \d+ / 18 .*absolute difference: 0.\d+ .*\[split-output-differs\]"
    with pytest.raises(ValueError, match=differs):
        made(whole(as_buffer=False))
    model, plain = whole(as_buffer=True), whole(as_buffer=True)
    step(made(model))
    for part in vectors(8).tensor_split(M):
        plain(part)
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), plain.buffers(), strict=True))


def test_a_replaced_module_is_refused() -> None:
    model = Net(lambda net, x, at: x)
    pipe = made(model)
    step(pipe)
    model.layers[1] = nn.Linear(W, W)
    with pytest.raises(ValueError, match=r"layers: .*\[module-replaced\]"):
        step(pipe)


class Biased(nn.Module):
    """A block that uses a module from an argument or a reference."""

    def __init__(self, bias: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(W, W)
        self.__dict__["known"] = bias

    def forward(self, x: Tensor, bias: nn.Module | None = None) -> Tensor:
        known = self.__dict__["known"]
        return torch.tanh(self.inner(x)) + (x @ known.weight if bias is None else bias(x))


class Shares(nn.Module):
    """A model whose blocks share a module: by a reference to it or to the model, or as an argument."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.bias, self.weight = nn.Linear(W, W), nn.Parameter(torch.randn(W, W))
        known = {"argument": None, "reference": self.bias, "parent": self}[by]
        self.layers = nn.ModuleList(Biased(known) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if layer.__dict__["known"] else layer(x, self.bias)
        return x


@pytest.mark.parametrize("by", ["argument", "reference"])
def test_parameters_of_a_module_that_is_used_in_a_block_are_that_blocks_too(by: str) -> None:
    # Where it was not called, as Perceiver's embedding in its decoder, the first step with several partitions failed.
    found = []
    for partitions in (1, 2, 4):
        torch.manual_seed(1)
        model = Shares(by)
        pipe = made(model, partitions=partitions)
        step(pipe)
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for some in found[1:] for pair in zip(found[0], some, strict=True))


def test_a_block_that_uses_a_parameter_of_its_parent_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layers\.0 uses weight .*\[parameter-by-reference\]"):
        made(Shares("parent"))


def test_blocks_that_are_not_called_are_refused() -> None:
    def forward(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer.get_submodule("inner")(x)
        return x

    with pytest.raises(ValueError, match=r"Written .* layers\.0, .*\[blocks-not-called\]"):
        made(Written(forward))
    step(made(Written(forward), blocks=[f"layers.{at}.inner" for at in range(5)]))


class Asks(nn.Module):
    """A block that reads shared objects: a dict and the model."""

    def __init__(self, model: nn.Module, ask: Callable[[Any, dict[str, Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(W, W)
        self.ask = ask
        self.__dict__["model"] = model

    def forward(self, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.inner(x)) + self.ask(self.__dict__["model"], kept, x)


class Puts(nn.Module):
    """A model that temporarily stores a tensor on itself, and passes a dict to its blocks."""

    def __init__(self, *asked: Callable[[Any, dict[str, Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(W, W)
        self.layers = nn.ModuleList(Asks(self, ask) for ask in asked)

    def forward(self, x: Tensor) -> Tensor:
        x = self.state = self.embed(x)
        kept: dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, kept)
        del self.state
        return x


def test_a_block_that_reads_what_was_put_past_its_arguments_is_refused_by_name() -> None:
    def puts(model: Any, kept: dict[str, Tensor], x: Tensor) -> Tensor:
        return kept.setdefault("x", x)

    def reads(model: Any, kept: dict[str, Tensor], x: Tensor) -> Tensor:
        return kept["x"]

    def reads_parent(model: Any, kept: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = model.state
        return found

    with pytest.raises(ValueError, match=r"layers.1 fails with KeyError: 'x' .* split Puts.*\[split-forward-fails\]"):
        made(Puts(puts, reads))
    with pytest.raises(
        ValueError,
        match=r"layers.0 fails with AttributeError.* stores tensors in Puts.state.*\[split-forward-fails\]",
    ):
        made(Puts(reads_parent, puts))
    with pytest.raises(KeyError, match="x") as raised:
        made(Puts(reads, puts))
    assert "[model-rejects-sample]" in "\n".join(raised.value.__notes__)


def test_a_tuple_is_one_argument_and_the_note_says_so() -> None:
    class Sum(Written):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return through(self.layers, x) + y

    with pytest.raises(TypeError, match="missing 1 required positional argument") as raised:
        made(Sum(through), sample=(vectors(5), vectors(5)))
    assert "The tuple was passed to the forward as one argument." in raised.value.__notes__[0]
    assert raised.value.__notes__[0].endswith("x, y. [sample-is-one-argument]")
    made(Sum(through), sample={"x": vectors(5), "y": vectors(5)})


@pytest.mark.parametrize("of_blocks", [True, False])
def test_a_state_that_is_stacked_between_blocks_is_refused_by_name(of_blocks: bool) -> None:
    def stacks(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        stacked, _ = torch.func.stack_module_state(list(layers[:5] if of_blocks else layers[5:]))
        return through(layers[:5], x) @ stacked["weight"].sum(0)

    with pytest.raises(ValueError, match="stack_module_state"):
        made(Written(stacks, [nn.Linear(W, W) for _ in range(8)]), blocks=[f"layers.{at}" for at in range(5)])


def same(net: Net, x: Tensor, at: int) -> Tensor:
    return x


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (lambda: torch.compile(Net(same), backend="eager"), {}, "compiled-model"),
        (lambda: torch.jit.script(Scripted()), {}, "torchscript-module"),
        (
            lambda: Written(through, [*map(torch.jit.script, blocks())]), {},
            r"layers\.0: .* Written .*torchscript-module",
        ),
        (Scripted, {}, "Scripted .*no-list-of-blocks"),
        (nn.Identity, {}, "Identity .*no-list-of-blocks"),
        (lambda: Net(same), {"blocks": ["layers.9"]}, r"'layers\.9'.*block-not-found"),
        (lambda: Net(same), {"blocks": "layers.1"}, "blocks-not-names"),
        (lambda: Net(same), {"blocks": []}, "empty-blocks"),
        (lambda: Net(same), {"blocks": ["layers", "layers.1"]}, r"'layers\.1' .*nested-blocks"),
        (lambda: Net(same), {"sample": None}, "Net .*sample-required"),
        (lambda: Net(same), {"ties": [("a", "b")]}, r"ties= is only for a sequence of layers"),
    ],
    ids=["compiled", "scripted", "scripted blocks", "no blocks", "no parameters", "unknown", "text", "empty",
         "inside", "no sample", "ties"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_arguments_that_cannot_be_are_refused(
    model: Callable[[], nn.Module], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        made(model(), **settings)


def held(model: nn.Module) -> dict[tuple[str, str], list[object]]:
    """Returns all attributes of all modules, with dicts item by item."""
    return {
        (name, key): [*value, *value.values()] if isinstance(value, dict) else [value]
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }


def test_a_pipe_changes_nothing_of_the_model() -> None:
    """Neither making one nor stepping changes attributes, hooks or parameters of any module."""
    model = Net(lambda net, x, at: F.dropout(x * net.mean.exp(), 0.1))
    before = held(model)
    pipe = made(model)
    step(pipe)
    after = held(model)
    assert [*after] == [*before]
    changed = [at for at, some in after.items() if [*map(id, some)] != [*map(id, before[at])]]
    assert not changed


class Slotted:
    """Holds a tensor in a slot, where a search of attributes does not find it."""

    __slots__ = ("value",)
    value: Any


HIDDEN = Slotted()
SEEN: dict[str, float] = {}
LAST = contextvars.ContextVar[Any]("LAST", default=0)
WAYS: dict[str, tuple[Callable[[Tensor], object], Callable[[], Any]]] = {
    "a slot": (lambda x: setattr(HIDDEN, "value", x.detach()), lambda: HIDDEN.value),
    "a number": (lambda x: SEEN.update(x=x.mean().item()), lambda: SEEN["x"]),
    "a context": (lambda x: LAST.set(x.detach()), LAST.get),
}


def test_an_object_with_tensors_of_an_earlier_layer_is_named() -> None:
    """Prefix tuning of peft computes such a cache, and passes it to all blocks."""

    class Reads(nn.Linear):
        def forward(self, x: Tensor, cache: Slotted) -> Tensor:  # type: ignore[override]  # as users do
            return super().forward(x + cache.value)

    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        cache = Slotted()
        cache.value = x = layers[0](x)
        for layer in layers[1:]:
            x = layer(x, cache=cache)
        return x

    with pytest.raises(ValueError, match=r"layers\.2: argument cache is a Slotted .*\[tensors-in-object\]"):
        made(Written(forward, [nn.Linear(W, W), Reads(W, W), Reads(W, W)]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 6])
def test_what_goes_from_block_to_block_past_the_forward_is_refused(way: str, rows: int) -> None:
    # One micro-batch after another was proven; in a pipeline a later block took what another micro-batch had left.
    put, get = WAYS[way]

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            put(made)
            return made.tanh()

    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + get()

    with pytest.raises(ValueError, match=r"Written .*\[split-output-differs\]"):
        gpipe.GPipe(Written(through, [First(3, 3), nn.Linear(3, 3), Last(3, 3)]), 2, 1, sample=torch.randn(rows, 3))


FOUND: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("FOUND")


@pytest.mark.parametrize("returned", [False, True])
def test_blocks_that_look_into_a_list_that_others_add_to_are_refused(*, returned: bool) -> None:
    # A list that is returned crosses the cuts, past some stages: these failed, and not before the first step.
    class Adds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            FOUND.get().append(super().forward(x))
            return x.tanh()

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + FOUND.get()[0]

    def opens(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        token = FOUND.set([])
        x = through(layers, x)
        found = FOUND.get()
        FOUND.reset(token)
        return x + sum(found) if returned else x

    layers = [Adds(3, 3), nn.Linear(3, 3), Looks(3, 3), nn.Linear(3, 3)]
    with pytest.raises(ValueError, match=r"\[value-missing-at-boundary\]"):
        gpipe.GPipe(Written(opens, layers), 2, 1, sample=torch.randn(6, 3))


@pytest.mark.parametrize("found", [lambda x: x, lambda x: None])
def test_a_list_that_is_not_added_to_as_on_the_sample_is_refused(found: Callable[[Tensor], Tensor | None]) -> None:
    class Adds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            FOUND.get().extend([made] if x.sum() > 0 else [found(x)] * 2)
            return made

    def opens(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        token = FOUND.set([])
        x = through(layers, x)
        more = FOUND.get()[0]
        FOUND.reset(token)
        return x + more

    model, ones = Written(opens, [Adds(3, 3) for _ in range(3)]), torch.ones(4, 3)
    with gpipe.GPipe(model, 2, 2, sample=ones) as pipe:
        assert torch.equal(pipe(ones), torch.cat([model(part) for part in ones.split(2)]))
        with pytest.raises(ValueError, match=r"\[block-structure-differs\]"):
            pipe(-ones)


def test_rows_that_are_taken_apart_and_cross_a_cut_are_as_many_as_on_the_sample() -> None:
    def apart(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        first, *others = layers
        rows = first(x).unbind()
        for layer in others:
            x = layer(torch.stack(rows))
        return x

    model, x = Written(apart, [nn.Linear(3, 3) for _ in range(4)]), torch.randn(8, 3)
    with gpipe.GPipe(model, 3, 2, sample=x) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.split(4)]))
        with pytest.raises(ValueError, match=r"unbind: .*\[block-structure-differs\]"):
            pipe(x[:6])


@dataclass
class State:
    """The state that blocks pass on."""

    x: Tensor


def test_blocks_may_be_given_dataclasses() -> None:
    class Step(nn.Linear):
        def forward(self, state: State) -> State:  # type: ignore[override]  # whatever a user writes
            return State(super().forward(state.x).relu())

    def steps(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        state = State(x)
        for layer in layers:
            state = layer(state)
        return state.x

    model, x = Written(steps, [Step(3, 3) for _ in range(3)]), torch.randn(4, 3)
    with gpipe.GPipe(model, 3, 2, sample=x) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.split(2)]))
