"""A backward in two parts gives the bits of a whole one, computes nothing twice, and keeps no more than a forward."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpipe.features.split_backward import PendingWeights, backward_input, backward_weight
from gpipe.stages.boundary import UNDEFINED, BoundaryValue, Gradients, attach_boundary, run_backward
from tests.support.plain_loop import one_thread, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's

M = 3


@pytest.fixture(autouse=True)
def as_in_a_pipe() -> Iterator[None]:
    with one_thread():
        yield


# ---- networks ----


class Attention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Perceptron(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Of(nn.Module):
    """A network of some parts, with a forward of its own; of parameters, their shapes."""

    def __init__(
        self, run: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter | tuple[int, ...]
    ) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.randn(*part)) if isinstance(part, tuple) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Twice(torch.autograd.Function):
    """A product in a function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight.t() * 2, x.t() @ dy * 2


def linears(*widths: int, bias: bool = True) -> nn.Sequential:
    pairs = pairwise(widths)
    return nn.Sequential(*(one for a, b in pairs for one in (nn.Linear(a, b, bias=bias), nn.Tanh())))


def frozen(network: nn.Module, *names: str) -> nn.Module:
    for name in names:
        network.get_parameter(name).requires_grad_(False)
    return network


def by_channels(network: Any) -> nn.Module:
    laid: nn.Module = network.to(memory_format=torch.channels_last)
    return laid


def compiled(network: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(network, backend="aot_eager")  # type: ignore[assignment]  # of torch's types
    return wrapped


def words(self: Any, x: Tensor) -> Tensor:
    found = self.words((x[:, 0] * 3).long().clamp(0, 9))
    made: Tensor = self.out(torch.cat([found, x], 1))
    return made


def checkpointed(*, use_reentrant: bool) -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        made: Tensor = self.b(checkpoint(self.a, x, use_reentrant=use_reentrant))
        return made

    return Of(run, a=linears(6, 5, 4), b=nn.Linear(4, 3))


@dataclass(frozen=True)
class Case:
    """A network, the shape of a micro-batch, and which parameters wait: None for all."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    wait: tuple[str, ...] | None = None
    dtype: torch.dtype = torch.float32
    before: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    wants: bool = True  # whether a gradient of the input is wanted


def bfloat16() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


ROWS, IMAGES = (5, 6), (2, 3, 7, 7)
CASES = {
    "linear": Case(lambda: nn.Linear(6, 3), ROWS),
    "linear without bias": Case(lambda: nn.Linear(6, 3, bias=False), ROWS),
    "linear of three dimensions": Case(lambda: linears(6, 5, 3), (4, 5, 6)),
    "linear of one row": Case(lambda: nn.Linear(6, 3), (1, 6)),
    "linear of nothing": Case(lambda: nn.Linear(6, 3), (0, 6)),
    "a transposed input": Case(lambda: nn.Linear(6, 3), (6, 5), before=lambda x: x.t()),
    "an expanded input": Case(lambda: nn.Linear(6, 3), (1, 6), before=lambda x: x.expand(5, 6)),
    "deep": Case(lambda: linears(16, 64, 32, 8, 3), (33, 16)),
    "matrix": Case(lambda: Of(lambda self, x: x @ self.w, w=(6, 3)), ROWS),
    "einsum of heads": Case(
        lambda: Of(lambda self, x: torch.einsum("bsd,hdf->bhsf", x, self.w), w=(2, 6, 3)), (4, 5, 6)
    ),
    "a weight that is broadcast": Case(lambda: Of(lambda self, x: x * self.w, w=(1, 6)), ROWS, ()),
    "a weight in front": Case(lambda: Of(lambda self, x: self.w @ x, w=(3, 5)), ROWS, ()),
    "addmm": Case(lambda: Of(lambda self, x: torch.addmm(self.b, x, self.w), w=(6, 3), b=(3,)), ROWS),
    "addmm with factors": Case(
        lambda: Of(lambda self, x: torch.addmm(self.b, x, self.w, alpha=2, beta=3), w=(6, 3), b=(3,)), ROWS, ()
    ),
    "multi-head attention": Case(
        lambda: Of(
            lambda self, x: self.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(16, 2, batch_first=True)
        ),
        (2, 7, 16),
        ("a.in_proj_weight", "a.out_proj.weight", "a.out_proj.bias"),
    ),
    "blocks": Case(
        lambda: nn.Sequential(Attention(), Perceptron(), Attention()),
        (2, 7, 16),
        tuple(
            f"{part}.{one}"
            for part in ("0.qkv", "0.out", "1.inner.0", "1.inner.2", "2.qkv", "2.out")
            for one in ("weight", "bias")
        ),
    ),
    "convolution": Case(lambda: nn.Conv2d(3, 4, 3, padding=1), IMAGES),
    "transposed convolution": Case(lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (2, 3, 5, 5)),
    "convolution, channels last": Case(
        lambda: nn.Conv2d(3, 4, 3), IMAGES, before=lambda x: x.contiguous(memory_format=torch.channels_last)
    ),
    "convolution, weight of channels last": Case(lambda: by_channels(nn.Conv2d(3, 4, 3)), IMAGES),
    "convolution with a frozen weight": Case(lambda: frozen(nn.Conv2d(3, 4, 3), "weight"), IMAGES, ()),
    "batch normalization": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()), IMAGES, ("0.weight",)
    ),
    "layer normalization": Case(lambda: nn.LayerNorm(6), ROWS, ()),
    "long short-term memory": Case(
        lambda: Of(lambda self, x: self.a(x)[0], a=nn.LSTM(6, 4, batch_first=True)), (3, 5, 6), ()
    ),
    "sparse words": Case(
        lambda: Of(words, words=nn.Embedding(10, 4, sparse=True), out=nn.Linear(10, 3)),
        ROWS,
        ("out.weight", "out.bias"),
    ),
    "a weight used twice": Case(lambda: Of(lambda self, x: self.a(self.a(x).tanh()), a=nn.Linear(6, 6)), ROWS, ()),
    "a laid-out weight used twice": Case(
        lambda: Of(lambda self, x: torch.linalg.multi_dot([x, *[self.w.t()] * 2]), w=(6, 6)), ROWS, ()
    ),
    "one bias for two": Case(
        lambda: Of(lambda self, x: F.linear(F.linear(x, self.v, self.b), self.w, self.b), v=(6, 6), w=(6, 6), b=(6,)),
        ROWS,
        (),
    ),
    "a weight used otherwise too": Case(
        lambda: Of(lambda self, x: self.a(x) * self.a.weight.sum(), a=nn.Linear(6, 3)), ROWS, ()
    ),
    "a weight returned too": Case(
        lambda: Of(lambda self, x: torch.cat([self.a(x), self.a.weight]), a=nn.Linear(6, 6)), ROWS, ()
    ),
    "a product of two weights": Case(
        lambda: Of(lambda self, x: x @ (self.v @ self.w), v=(6, 2), w=(2, 3)), ROWS, ("w",)
    ),
    "weight normalization": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3)),
        ROWS,
        ("1.weight", "1.bias"),
    ),
    "a frozen weight": Case(lambda: frozen(linears(6, 5, 3), "0.weight"), ROWS, ("2.weight", "2.bias")),
    "an input that wants no gradient": Case(lambda: linears(6, 5, 3), ROWS, wants=False),
    "a convolution of such an input": Case(lambda: nn.Conv2d(3, 4, 3), IMAGES, wants=False),
    "autocast": Case(lambda: linears(6, 5, 3), ROWS, around=bfloat16),
    "complex numbers": Case(
        lambda: Of(lambda self, x: x @ self.w, w=nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))),
        ROWS,
        (),
        dtype=torch.complex64,
    ),
    "a function of one's own": Case(
        lambda: Of(lambda self, x: Twice.apply(self.a(x), self.w), a=nn.Linear(6, 5), w=(5, 3)),
        ROWS,
        ("a.weight", "a.bias"),
    ),
    "weights of no size": Case(lambda: Of(lambda self, x: x @ self.v @ self.w, v=(6, 0), w=(0, 3)), ROWS),
    "a compiled part": Case(
        lambda: nn.Sequential(compiled(linears(6, 5, 3)), nn.Linear(3, 2)), ROWS, ("1.weight", "1.bias")
    ),
    "checkpoint": Case(lambda: checkpointed(use_reentrant=False), ROWS, ("b.weight", "b.bias")),
    "reentrant checkpoint": Case(lambda: checkpointed(use_reentrant=True), ROWS, ()),
}


# ---- running them ----


@dataclass
class Run:
    """A forward, cut from what comes before as a stage's is."""

    crossing: BoundaryValue
    roots: list[Tensor]
    arriving: Gradients
    gradients: Gradients  # of the input

    @classmethod
    def of(cls, case: Case, network: nn.Module, x: Tensor, seed: int) -> "Run":
        leaf = x.detach().requires_grad_(case.wants)
        crossing = BoundaryValue(leaf, [leaf] if case.wants else [])
        entered = attach_boundary(crossing)
        with case.around():
            y = network(case.before(entered.value))
        draw = torch.Generator().manual_seed(seed)
        return cls(crossing, [y], [torch.randn(y.shape, generator=draw, dtype=y.dtype)], entered.gradients)

    def whole(self) -> Gradients:
        run_backward(self.roots, self.arriving)
        self.roots.clear()
        return self.gradients

    def split(self, owed: Sequence[PendingWeights] = ()) -> PendingWeights:
        deferred = backward_input(self.roots, self.arriving, self.crossing.leaves, owed)
        self.roots.clear()
        return deferred


def runs_of(case: Case, network: nn.Module) -> list[Run]:
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(case.shape, generator=draw, dtype=case.dtype) for _ in range(M)]
    return [Run.of(case, network, x, seed) for seed, x in enumerate(inputs)]


def both(case: Case) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    network = case.make()
    return network, copy.deepcopy(network)


def wrong(network: nn.Module, expected: nn.Module) -> list[str]:
    """The parameters whose gradients differ, in bits or in how they lie in memory."""
    others = dict(expected.named_parameters())
    return [name for name, p in network.named_parameters() if not same_gradient(p.grad, others[name].grad)]


def same_gradient(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.layout is not torch.strided:
        return one.layout == other.layout and torch.equal(one.to_dense(), other.to_dense())
    return same_bits(one, other) and one.stride() == other.stride()


def finish(owed: Iterable[PendingWeights]) -> None:
    for deferred in owed:
        backward_weight(deferred)


def flops(act: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        act()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_backward_in_two_gives_the_bits_of_a_whole_one_and_computes_nothing_twice(case: Case) -> None:
    network, expected = both(case)
    outer = [run.whole() for run in runs_of(case, expected)]
    owed: list[PendingWeights] = []
    for run, theirs in zip(runs_of(case, network), outer, strict=True):
        owed.append(run.split(owed))
        assert all(map(same_gradient, run.gradients, theirs))  # type: ignore[arg-type]  # none is undefined
    finish(owed)
    assert wrong(network, expected) == []
    network, _ = both(case)
    every = {name for name, p in network.named_parameters() if p.requires_grad}
    whole, run, *_ = runs_of(case, network)
    of_inputs = flops(lambda: owed.append(run.split()))
    assert {n for n, p in network.named_parameters() if n in every and p.grad is None} == (
        every if case.wait is None else set(case.wait)
    )
    of_weights = flops(lambda: backward_weight(owed[-1]))
    assert all(network.get_parameter(name).grad is not None for name in every)
    assert owed[-1] == PendingWeights()
    assert of_inputs + of_weights == flops(whole.whole)


# ---- hooks, and what users do in them ----


def noted(seen: list[Tensor], gradient: Tensor) -> Tensor:
    seen.append(gradient)
    return gradient


def on_output(look: Callable[[Any, list[Tensor]], object]) -> Callable[[Any, list[Tensor]], object]:
    """Looks at what the first layer gives."""

    def hooked(network: Any, seen: list[Tensor]) -> object:
        return network[0].register_forward_hook(lambda module, given, y: look(y, seen) and None)

    return hooked


def retained(y: Any, seen: list[Tensor]) -> None:
    y.retain_grad()
    y.register_hook(lambda _: seen.append(y))


HOOKS: dict[str, tuple[bool, Callable[[Any, list[Tensor]], object]]] = {  # and whether the weight waits all the same
    "a weight": (False, lambda net, seen: net[0].weight.register_hook(lambda g: noted(seen, g) * 3)),
    "an output": (True, on_output(lambda y, seen: y.register_hook(lambda g: noted(seen, g) * 3))),
    "behind a product": (
        False,
        on_output(
            lambda y, seen: y.grad_fn.register_hook(
                lambda made, came: seen.extend(one for one in made if one is not None)
            )
        ),
    ),
    "before a product": (
        True,
        on_output(lambda y, seen: y.grad_fn.register_prehook(lambda came: (noted(seen, came[0]) * 3,))),
    ),
    "behind a sum": (
        True,
        lambda net, seen: net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    ),
    "a module": (
        True,
        lambda net, seen: net[0].register_full_backward_hook(lambda module, made, came: seen.extend((*made, *came))),
    ),
    "a retained gradient": (True, on_output(retained)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_on_the_first_of_two_layers_sees_the_same_as_in_whole_backwards(name: str) -> None:
    waits, hooked = HOOKS[name]
    case = CASES["deep"]
    network, expected = both(case)
    seen: list[Tensor] = []
    also: list[Tensor] = []
    hooked(network, seen)
    hooked(expected, also)
    for run in runs_of(case, expected):
        run.whole()
    owed = [run.split() for run in runs_of(case, network)]
    assert (network.get_parameter("0.weight").grad is None) is waits
    finish(owed)
    assert wrong(network, expected) == []
    assert len(seen) == len(also) >= M
    assert all(map(same_bits, seen, also))
    assert all(same_bits(one.grad, other.grad) for one, other in zip(seen, also, strict=True) if one.retains_grad)


# ---- what is rare ----


def test_a_gradient_that_is_none_or_undefined_is_so_here() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> None:
            return None

    network = nn.Linear(6, 3)
    y = network(torch.randn(5, 6))
    for roots, gradients in (
        ([y], [None]),
        ([], []),
        ([network(torch.randn(5, 6))], [UNDEFINED]),
        ([Stops.apply(network(torch.randn(5, 6)))], [torch.ones(5, 3)]),
    ):
        deferred = backward_input(roots, gradients, [])  # type: ignore[arg-type]  # lists of several kinds
        assert not deferred.products
        backward_weight(deferred)
    assert network.weight.grad is None


def test_leaves_that_wait_in_some_micro_batches_alone_are_added_up_in_their_order() -> None:
    """A layer that uses its weight otherwise in every second micro-batch: its gradient comes in I there."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(16, 16), nn.Linear(16, 16), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.b(self.a(x))
            return y * self.a.weight.sum() if self.calls % 2 == 0 else y

    case = Case(Sometimes, (9, 16))
    network, expected = both(case)
    for run in runs_of(case, expected):
        run.whole()
    owed: list[PendingWeights] = []
    for run in runs_of(case, network):
        owed.append(run.split(owed))
    assert [len(deferred.products) for deferred in owed] == [0, 1, 2]  # the first was done before the second I
    finish(owed)
    assert wrong(network, expected) == []


@pytest.mark.parametrize("changed", ["x", "dy"])
def test_what_is_changed_before_it_is_multiplied_is_told(changed: str) -> None:
    network = nn.Linear(6, 3)
    x, dy = torch.randn(5, 6), torch.ones(5, 3)
    deferred = backward_input([network(x)], [dy], [])
    (x if changed == "x" else dy).add_(1)
    with pytest.raises(RuntimeError, match=r"\[changed-before-weight-gradient\]"):
        backward_weight(deferred)


def test_leaves_of_the_boundary_never_wait() -> None:
    weight, x = torch.randn(6, 3), torch.randn(5, 6)
    leaf = weight.requires_grad_()
    entered = attach_boundary(BoundaryValue(leaf, [leaf]))
    deferred = backward_input([x @ entered.value], [torch.ones(5, 3)], [leaf])
    assert not deferred.products
    assert isinstance(entered.gradients[0], Tensor)


# ---- what is kept ----


class Kept:
    """The tensors that autograd keeps, as long as it does."""

    def __init__(self) -> None:
        self._alive: list[weakref.ref[Tensor]] = []
        self.hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        held = tensor.detach()
        self._alive.append(weakref.ref(held))
        return held

    def tensors(self) -> list[Tensor]:
        gc.collect()
        return [tensor for ref in self._alive if (tensor := ref()) is not None]


def size(tensors: Sequence[Tensor], without: nn.Module) -> int:
    own = {p.untyped_storage().data_ptr() for p in without.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for at, size in storages.items() if at not in own)


def tensors_of(deferred: PendingWeights) -> list[Tensor]:
    return [tensor for one in deferred.products for tensor in (one.product.x, one.dy)]


class Mark:
    """Something that lives as long as a node."""


def mark_nodes(root: Tensor) -> list[tuple[str, weakref.ref[Mark]]]:
    """For each node of a graph but the leaves' its name, and something that lives as long."""
    marks: list[tuple[str, weakref.ref[Mark]]] = []
    todo = [root.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is not None and not hasattr(node, "variable") and "mark" not in node.metadata:
            node.metadata["mark"] = mark = Mark()
            marks.append((node.name(), weakref.ref(mark)))
            todo += [behind for behind, _ in node.next_functions]
    return marks


@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.Sequential(Attention(64), Perceptron(64)), (2, 32, 64)),
        lambda: (
            nn.Sequential(*(m for _ in range(3) for m in (nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))),
            (2, 8, 16, 16),
        ),
    ],
    ids=["blocks", "convolutions"],
)
def test_no_more_is_kept_between_the_two_than_behind_the_forward(
    make: Callable[[], tuple[nn.Module, tuple[int, ...]]],
) -> None:
    network, shape = make()
    x = torch.randn(shape)
    kept = Kept()
    with kept.hooks:
        network(x).sum()
        y = network(x)
    before = size(kept.tensors(), network)
    del y
    assert kept.tensors() == []
    y = network(x.clone().requires_grad_())
    alive = mark_nodes(y)
    deferred = backward_input([y], [torch.ones_like(y)], [])
    del y
    assert {name for name, mark in alive if mark() is not None} <= {"TBackward0"}  # on the way to a leaf
    assert size(tensors_of(deferred), network) <= 1.1 * before


def test_the_products_are_given_up_one_by_one() -> None:
    network = linears(16, 16, 16, 16)
    y = network(torch.randn(5, 16))
    deferred = backward_input([y], [torch.ones_like(y)], [])
    held = [weakref.ref(one.dy) for one in deferred.products]
    counts = []
    for p in network.parameters():
        p.register_post_accumulate_grad_hook(lambda _: counts.append(sum(ref() is not None for ref in held)))
    backward_weight(deferred)
    assert counts == [3, 3, 2, 2, 1, 1]
