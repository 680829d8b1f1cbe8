"""What layers do that people write, and that a cut could change: each is as in the plain loop, or told."""

import contextvars
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.plain_loop import REMATS, assert_same_bits, one_thread, plain_loop, same_bits, weights_of

M = 3
X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))

CUTS = pytest.mark.parametrize("cut", [[4], [2, 2], [1, 1, 1, 1]], ids=str)
DRIVERS = pytest.mark.parametrize("driver", ["threads", "lockstep"])
REMAT = pytest.mark.parametrize("remat", REMATS)


class Do(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, work: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.work = work

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.work(x))


def network(*middle: Callable[[Tensor], Any]) -> list[nn.Module]:
    with weights_of(3):
        return [nn.Linear(4, 4), *map(Do, middle), nn.Linear(4, 4)]


def check(
    layers: list[nn.Module],
    cut: Sequence[int],
    driver: str,
    remat: str,
    loss_fn: Callable[..., Tensor] = F.mse_loss,
    plain_loss_fn: Callable[..., Tensor] | None = None,
) -> None:
    """Two steps of a pipe are those of the plain loop."""
    reference = copy.deepcopy(layers)
    with gpipe.GPipe(layers, cut, M, driver=driver, remat=remat, seed=5) as pipe:
        for step in range(2):
            loss = pipe.step(X, Y, loss_fn, reduction="mean")
            plain = plain_loop(reference, X, Y, plain_loss_fn or loss_fn, micro_batches=M, seed=5, step=step)
            assert same_bits(loss, plain)
            assert_same_bits(pipe, reference)


def halves_what_comes_back(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


def halves_behind_a_view(x: Tensor) -> Tensor:
    view = x[:, 1:]
    if x.requires_grad:
        view.register_hook(lambda gradient: gradient * 0.5)
        x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return torch.cat([view, x[:, :1]], 1)


def hears_two_at_once(x: Tensor) -> Tensor:
    y = x * 2
    if x.requires_grad:
        torch.autograd.graph.register_multi_grad_hook((x, y), lambda gradients: None)
        x.register_hook(lambda gradient: gradient + 1)
    return y


def keeps_the_gradient(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.retain_grad()
    return x


HOOKS = [halves_what_comes_back, halves_behind_a_view, hears_two_at_once, keeps_the_gradient]


@CUTS
@DRIVERS
@REMAT
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_what_a_layer_is_given_fire_as_in_the_plain_loop(
    hook: Callable[[Tensor], Tensor], remat: str, driver: str, cut: list[int]
) -> None:
    check(network(hook, hook), cut, driver, remat)


@DRIVERS
@REMAT
def test_module_hooks_on_what_a_layer_is_given_fire_as_in_the_plain_loop(remat: str, driver: str) -> None:
    layers = network(lambda x: x, lambda x: x)

    def halved(module: nn.Module, ins: Any, outs: Any) -> Any:
        return tuple(gradient if gradient is None else gradient * 0.5 for gradient in ins)

    def before(module: nn.Module, args: tuple[Tensor]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda gradient: gradient * 3)

    for layer in layers[1:]:
        layer.register_forward_pre_hook(before)
        layer.register_full_backward_hook(halved)
    check(layers, [1, 1, 1, 1], driver, remat)


class CentredLoss(nn.Module):
    """Keeps a moving centre of what it sees."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - self.centre - target).pow(2).mean()
        self.centre.lerp_(output.detach().mean(0), 0.5)
        return loss


@CUTS
@DRIVERS
@REMAT
def test_a_loss_that_keeps_state_sees_the_micro_batches_in_order(remat: str, driver: str, cut: list[int]) -> None:
    ours, plain = CentredLoss(), CentredLoss()
    check(network(torch.tanh, torch.sin), cut, driver, remat, ours, plain)
    assert torch.equal(ours.centre, plain.centre)


class Stop(torch.autograd.Function):
    """Lets no gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Times(torch.autograd.Function):
    """A product with a weight, which is given zeros where no gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Times.apply(x, self.weight)


class StopLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Stop.apply(x)


@DRIVERS
@REMAT
@pytest.mark.parametrize("cut", [[4], [1, 3], [2, 2], [3, 1], [1, 1, 1, 1]], ids=str)
def test_a_gradient_that_a_backward_leaves_out_is_left_out_behind_a_cut_too(
    cut: list[int], remat: str, driver: str
) -> None:
    layers = [Scale(), nn.Linear(4, 4), StopLayer(), nn.Linear(4, 4)]
    check(layers, cut, driver, remat)
    assert torch.equal(torch.zeros(4), layers[0].weight.grad)  # type: ignore[arg-type]  # not None, as in plain torch
    assert layers[1].weight.grad is None


class Attributes(dict):  # type: ignore[type-arg]  # as people write it
    """A dict that can be read by attribute."""

    __getattr__ = dict.__getitem__


class Slots:
    __slots__ = ("deep",)

    def __init__(self, tensor: Tensor) -> None:
        self.deep = [{"tensor": tensor}]


HIDING: dict[str, Callable[[Tensor], object]] = {
    "a dict of one's own": lambda h: Attributes(h=h),
    "slots": Slots,
    "a namespace": lambda h: SimpleNamespace(inner=SimpleNamespace(h=h)),
    "a set": lambda h: {h},
    "a function": lambda h: lambda: h,
    "a partial": lambda h: partial(torch.add, h),
    "a method": lambda h: h.sum,
    "an iterator": lambda h: iter([h]),
    "numpy's array of objects": lambda h: [Slots(h)],
}


@DRIVERS
@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("kind", HIDING)
def test_what_hides_tensors_is_refused_at_a_cut_and_at_the_end(kind: str, partitions: int, driver: str) -> None:
    class Hides(nn.Module):
        def forward(self, x: Tensor) -> object:
            return HIDING[kind](x), x * 2

    pipe = gpipe.GPipe(
        [nn.Linear(4, 4), Hides(), nn.Identity()], [2, 1] if partitions == 2 else [3], 1, driver=driver
    )
    with pytest.raises(TypeError, match="holds tensors where torch cannot see them") as raised:
        pipe(X)
    assert f"layer {1 if partitions == 2 else 2} (" in raised.value.__notes__[0]


def test_objects_without_tensors_cross_a_cut() -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> object:
            return x, SimpleNamespace(length=3), range(4), np.arange(3)

    class Takes(nn.Module):
        def forward(self, value: Any) -> Tensor:
            x, box, numbers, array = value
            return x * box.length * len(numbers) * int(array.sum())

    with torch.no_grad():
        assert torch.equal(gpipe.GPipe([Gives(), Takes()], 2, M)(X), X * 3 * 4 * 3)


class Bound(nn.Module):
    """Keeps ways to itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act: Any = {
            "method": self.inner,
            "lambda": lambda x: self.linear(x).tanh(),
            "partial": partial(Bound.inner, self),
            "list": [self.inner],
            "hook": None,
        }[kind]
        if kind == "hook":
            self.register_forward_pre_hook(lambda module, args: (self.inner(args[0]),))

    def inner(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        act = self.act[0] if isinstance(self.act, list) else self.act
        return x if act is None else x + act(x)


@pytest.mark.parametrize("kind", ["method", "lambda", "partial", "list", "hook"])
@DRIVERS
@REMAT
def test_a_block_that_is_several_layers_and_refers_to_itself_gives_the_same_for_every_k(
    remat: str, driver: str, kind: str
) -> None:
    found = []
    for partitions in (1, 2, 3):
        torch.manual_seed(0)
        block = Bound(kind)
        with gpipe.GPipe([block] * 3, partitions, 6, driver=driver, remat=remat, seed=0) as pipe:
            pipe.step(X, Y, F.mse_loss)
        found.append(block.linear.weight.grad)
    assert all(same_bits(one, found[0]) for one in found)


@DRIVERS
@REMAT
def test_a_weight_that_another_partition_uses_past_its_layers_is_refused(remat: str, driver: str) -> None:
    layers = network(torch.tanh, torch.sin)
    weight = layers[0].weight
    assert isinstance(weight, Tensor)
    with gpipe.GPipe(layers, [2, 2], M, driver=driver, remat=remat) as pipe:
        with pytest.raises(RuntimeError, match=r"reaches weight of layer 0 \(0: Linear\), which is not its own"):
            pipe.step(X, Y, lambda o, t: (o @ weight.t() - t).pow(2).mean())
        pipe.zero_grad()
        pipe.step(X, Y, F.mse_loss)


@DRIVERS
def test_a_weight_that_two_partitions_use_past_all_layers_is_refused(driver: str) -> None:
    weight = torch.ones(4, requires_grad=True)
    pipe = gpipe.GPipe(network(lambda x: x * weight, lambda x: x + weight), [2, 2], M, driver=driver)
    with pytest.raises(RuntimeError, match=r"a weight of shape \(4,\), which partition \d uses too"):
        pipe.step(X, Y, F.mse_loss)


class Gate(nn.Module):
    """Gives a balancing loss beside its output."""

    stash = ("balance",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        share = self.linear(x).softmax(-1)
        return x * share, {"balance": (share.mean(0) ** 2).sum()}


class Balanced:
    """A loss that pops it."""

    pop = ("balance",)

    def __call__(self, output: Tensor, target: Tensor, balance: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * balance


@CUTS
@DRIVERS
@REMAT
def test_a_loss_pops_what_a_layer_stashed(remat: str, driver: str, cut: list[int]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Gate(), nn.Tanh(), nn.Linear(4, 4)]
    reference = copy.deepcopy(layers)
    with gpipe.GPipe(layers, cut, M, driver=driver, remat=remat, seed=5) as pipe:
        loss = pipe.step(X, Y, Balanced())
        with torch.no_grad():
            checked = pipe.step(X, Y, Balanced())
    total = torch.zeros(())
    with one_thread():
        for m, (x, y) in enumerate(zip(X.tensor_split(M), Y.tensor_split(M), strict=True)):
            value, held = reference[1](reference[0](x))
            part = Balanced()(reference[3](reference[2](value)), y, **held)
            part.backward(torch.full_like(part, len(x) / len(X)))
            total = total + part.detach() * (len(x) / len(X)) if m else part.detach() * (len(x) / len(X))
    assert same_bits(loss, total)
    assert same_bits(checked, total)
    assert_same_bits(pipe, reference)


def test_a_stash_that_nobody_pops_is_refused_at_the_first_step_and_dropped_by_a_call() -> None:
    pipe = gpipe.GPipe([nn.Linear(4, 4), Gate(), nn.Linear(4, 4)], 3, M)
    with pytest.raises(
        ValueError, match=r"layer 1 \(Gate\) stashes 'balance', which neither a later layer nor loss_fn"
    ):
        pipe.step(X, Y, F.mse_loss)
    assert pipe(X).shape == X.shape
    assert gpipe.Sequential(nn.Linear(4, 4), Gate())(X).shape == X.shape


def test_a_loss_that_pops_what_nobody_stashes_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_fn pops 'balance', which no layer stashes"):
        gpipe.GPipe(network(), 2, M).step(X, Y, Balanced())


mask: contextvars.ContextVar[float] = contextvars.ContextVar("mask", default=1.0)
here = threading.local()
here.scale = 2.0


@DRIVERS
@REMAT
def test_context_variables_are_those_of_the_caller(remat: str, driver: str) -> None:
    token = mask.set(3.0)
    try:
        check(network(lambda x: x * mask.get(), lambda x: x + mask.get()), [1, 2, 1], driver, remat)
    finally:
        mask.reset(token)


@DRIVERS
@pytest.mark.parametrize("way", ["step", "call"])
def test_numbers_too_small_to_be_normal_are_flushed_where_the_caller_does_so(way: str, driver: str) -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1e-20) * 1e-20 * 1e38

    pipe = gpipe.GPipe([Small(), nn.Identity()], 2, 2, driver=driver)
    seen = []
    for flushes in (False, True, False):
        if not torch.set_flush_denormal(flushes):
            pytest.skip("this processor has no such mode")
        try:
            with torch.no_grad():
                ones = torch.ones(4, 2)
                out = pipe(ones) if way == "call" else pipe.step(ones, ones, lambda output, _: output.mean())
        finally:
            torch.set_flush_denormal(False)
        seen.append(bool((out == 0).all()))
    assert seen == [False, True, False]


@DRIVERS
@REMAT
def test_attributes_on_tensors_cross_a_cut(remat: str, driver: str) -> None:
    def tag(x: Tensor) -> Tensor:
        y = x * 2
        y.factor = 3.0  # type: ignore[attr-defined]
        return y

    class Tags(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return tag(x)

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * getattr(x, "factor", 1.0)

    check([nn.Linear(4, 4), Tags(), Reads(), nn.Linear(4, 4)], [2, 2], driver, remat)


def test_attributes_that_are_tensors_are_refused_at_a_cut() -> None:
    class Tags(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.mask = x  # type: ignore[attr-defined]
            return y

    with pytest.raises(TypeError, match="the attribute 'mask' of a tensor holds tensors"):
        gpipe.GPipe([nn.Linear(4, 4), Tags(), nn.Linear(4, 4)], [2, 1], M)(X)


UNSTEADY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: x.roll(1 + int(np.random.randint(0, 3)), 1),
    "roll rows": lambda x: x.roll(int(np.random.randint(0, 10_000)), 0) if len(x) > 1 else x * np.random.rand(),
    "sign": lambda x: x * (1 if np.random.rand() < 0.5 else -1),
    "permute": lambda x: x[:, torch.from_numpy(np.random.permutation(4))],
    "last bit": lambda x: x * (1 + float(np.random.randint(0, 1000)) * 1e-7),
}


@DRIVERS
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("kind", UNSTEADY)
def test_a_recompute_that_differs_is_an_error_that_names_the_layer(kind: str, place: int, driver: str) -> None:
    np.random.seed(0)
    layers = network(lambda x: x, lambda x: x)
    layers[place] = Do(UNSTEADY[kind])
    pipe = gpipe.GPipe(layers, [2, 2], M, remat="always", driver=driver)

    def train() -> None:
        for _ in range(8):
            pipe.step(X, Y, F.mse_loss)

    with pytest.raises(RuntimeError, match=rf"layer {place} \({place}: Do\) depends on what no key reaches"):
        train()


def test_a_sparse_embedding_tied_to_the_head_trains() -> None:
    def build() -> tuple[nn.Embedding, nn.Linear]:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 20, bias=False)
        head.weight = embedding.weight
        return embedding, head

    words, found = torch.arange(6) % 5, []
    for partitions in (1, 2):
        layers = build()
        gpipe.GPipe(layers, partitions, 2).step(words, words, F.cross_entropy)
        found.append(layers[0].weight.grad)
    plain = build()
    F.cross_entropy(nn.Sequential(*plain)(words), words).backward()
    assert same_bits(*found)
    assert found[0] is not None
    assert torch.allclose(found[0], plain[0].weight.grad)  # type: ignore[arg-type]  # there is one


class LeavesItsLoss(nn.Module):
    """Leaves a balancing loss on itself, as layers of experts do."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.linear, self.detached = nn.Linear(4, 4), detached
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.linear(x).softmax(-1)
        aux = (share.mean(0) ** 2).sum()
        self.aux = aux.detach() if self.detached else aux
        return x * share


@DRIVERS
def test_a_tensor_that_a_layer_leaves_on_itself_is_told_once(driver: str, caplog: pytest.LogCaptureFixture) -> None:
    layer = LeavesItsLoss(detached=True)
    pipe = gpipe.GPipe([nn.Linear(4, 4), layer, nn.Linear(4, 4)], 2, M, driver=driver)
    for _ in range(2):
        pipe.step(X, Y, lambda o, t: F.mse_loss(o, t) + layer.aux)
    told = [
        text
        for text in pipe.findings
        if text.startswith("layer 1 (1: LeavesItsLoss), its attribute aux: a forward leaves tensors there")
    ]
    assert len(told) == 1
    assert "loss_fn.pop = ('aux',)" in told[0]
    assert [record.message for record in caplog.records].count(told[0]) == 1


@DRIVERS
@REMAT
def test_a_graph_that_a_layer_leaves_on_itself_is_refused_where_another_partition_reads_it(
    remat: str, driver: str
) -> None:
    layer = LeavesItsLoss(detached=False)
    pipe = gpipe.GPipe([layer, nn.Linear(4, 4)], 2, M, driver=driver, remat=remat)
    with pytest.raises(RuntimeError, match=r"reaches linear\.\w+ of layer 0 \(0: LeavesItsLoss\)"):
        pipe.step(X, Y, lambda o, t: F.mse_loss(o, t) + layer.aux)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x


@pytest.mark.parametrize(("remat", "told"), [("always", True), ("never", False)])
def test_a_count_that_a_recompute_would_raise_again_is_told(remat: str, told: bool) -> None:
    pipe = gpipe.GPipe([nn.Linear(4, 4), Counts()], 2, M, remat=remat)
    pipe.step(X, Y, F.mse_loss)
    assert (
        any(
            text.startswith("layer 1 (1: Counts), its attribute forwards: a forward changes it")
            for text in pipe.findings
        )
        is told
    )


def test_layers_that_keep_nothing_are_not_mentioned() -> None:
    layers = [nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Dropout(0.1)]
    pipe = gpipe.GPipe(layers, 2, M)
    pipe.step(X, Y, F.mse_loss)
    assert not [text for text in pipe.findings if "a forward" in text]


@pytest.mark.parametrize(("driver", "told"), [("threads", True), ("lockstep", False)])
def test_what_each_thread_has_for_itself_is_told(driver: str, told: bool) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * getattr(here, "scale", 1.0)

    pipe = gpipe.GPipe([nn.Linear(4, 4), Reads()], 2, M, driver=driver)
    pipe.step(X, Y, F.mse_loss)
    assert (
        any(text.startswith("layer 1 (1: Reads), here, which it reads: a threading.local") for text in pipe.findings)
        is told
    )


@pytest.mark.parametrize(("driver", "told"), [("threads", True), ("lockstep", False)])
def test_context_variables_that_layers_set_are_told(driver: str, told: bool) -> None:
    class Sets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask.set(2.0)
            return x

    def train() -> list[str]:
        pipe = gpipe.GPipe([nn.Linear(4, 4), Sets()], 2, M, driver=driver)
        pipe.step(X, Y, F.mse_loss)
        return pipe.findings

    findings = contextvars.copy_context().run(train)
    assert any("set the context variables mask" in text for text in findings) is told


class Delayed(torch.autograd.Function):
    """Scales by what the backward before has seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x * scale.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.scale.fill_(2.0)
        return gradient, None


@DRIVERS
@REMAT
def test_buffers_that_a_backward_writes_are_told(remat: str, driver: str) -> None:
    class Fp8(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return Delayed.apply(x, self.scale)

    pipe = gpipe.GPipe([nn.Linear(4, 4), Fp8(), nn.Linear(4, 4)], [2, 1], M, driver=driver, remat=remat)
    pipe.step(X, Y, F.mse_loss)
    assert any("writes buffers of it (Fp8.scale)" in text for text in pipe.findings)


def test_a_hook_that_would_see_a_part_of_a_gradient_is_refused() -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, (x * 2).sin()

    class Leans(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y.sin()

    class Hooks(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            if pair[0].requires_grad:
                pair[0].register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return pair[0] + pair[1]

    for remat in REMATS:
        check([nn.Linear(4, 4), Gives(), Hooks(), nn.Linear(4, 4)], [2, 2], "threads", remat)
        check([nn.Linear(4, 4), Leans(), Hooks(), nn.Linear(4, 4)], [1, 3], "threads", remat)
        pipe = gpipe.GPipe([nn.Linear(4, 4), Leans(), Hooks(), nn.Linear(4, 4)], [2, 2], M, remat=remat)
        with pytest.raises(RuntimeError, match="another tensor that crosses the cut with it was made from it"):
            pipe.step(X, Y, F.mse_loss)


@DRIVERS
def test_a_recompute_that_takes_another_path_to_the_same_values_is_an_error(driver: str) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.forwards = 0

        def forward(self, x: Tensor) -> Tensor:
            self.forwards += 1
            value: Tensor = self.paths[0](x)
            return value if self.forwards <= M else value.detach() + self.paths[1](x) * 0

    pipe = gpipe.GPipe([nn.Linear(4, 4), Chooses(), nn.Linear(4, 4)], [2, 1], M, remat="always", driver=driver)
    with pytest.raises(RuntimeError, match="a recompute gave other values than its forward"):
        pipe.step(X, Y, F.mse_loss)


@CUTS
@DRIVERS
@REMAT
def test_an_image_by_itself_keeps_every_stride(remat: str, driver: str, cut: list[int]) -> None:
    """Convolutions go by the strides of dimensions of size 1 too."""

    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        layers = [nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(1, 6), nn.Conv2d(6, 6, 3, padding=1)]
        head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
        whole: Any = nn.Sequential(*layers, head)
        return [*whole.to(memory_format=torch.channels_last)]

    layers, reference = build(), build()
    images, y = torch.randn(M, 6, 5, 7).to(memory_format=torch.channels_last), torch.randn(M, 3)
    with gpipe.GPipe(layers, cut, M, driver=driver, remat=remat, seed=5) as pipe:
        loss = pipe.step(images, y, F.mse_loss)
    assert same_bits(loss, plain_loop(reference, images, y, F.mse_loss, micro_batches=M, seed=5))
    assert_same_bits(pipe, reference)


class Prototypes(nn.Module):
    """Keeps a mean, and hands it on where asked to."""

    mean: Tensor

    def __init__(self, hands_on: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.hands_on = hands_on

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x, self.mean) if self.hands_on else x


class Meets(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] * (1 + both[1])


@DRIVERS
@REMAT
def test_a_buffer_that_is_handed_on_and_written_again_arrives_as_it_was(remat: str, driver: str) -> None:
    check([nn.Linear(4, 4), Prototypes(True), Meets(), nn.Linear(4, 4)], [2, 2], driver, remat)


@DRIVERS
def test_a_workspace_that_is_handed_on_and_written_again_is_refused(driver: str) -> None:
    class Works(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.space = torch.zeros(1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.space.copy_(x.detach().mean())
            return x, self.space

    layers = [nn.Linear(4, 4), Works(), Meets(), nn.Linear(4, 4)]
    with pytest.raises(RuntimeError, match="has been changed in place since it was handed on"):
        gpipe.GPipe(layers, [2, 2], M, driver="lockstep").step(X, Y, F.mse_loss)


def test_a_loss_that_reads_a_layer_whose_buffers_change_is_told() -> None:
    layers = [nn.Linear(4, 4), Prototypes(), nn.Linear(4, 4)]
    pipe = gpipe.GPipe(layers, 2, M)
    pipe.step(X, Y, lambda output, target: F.mse_loss(output, layers[1].get_buffer("mean").clone().expand_as(output)))
    assert any(
        text.startswith("loss_fn, which reads layers, of which a forward changes buffers") for text in pipe.findings
    )


def test_a_feature_that_a_hook_keeps_in_a_dict_is_told() -> None:
    features: dict[str, Tensor] = {}
    layers = network(torch.tanh, torch.sin)
    layers[1].register_forward_hook(lambda module, args, out: features.update(x=out.detach()))
    pipe = gpipe.GPipe(layers, [2, 2], M)
    pipe.step(X, Y, lambda output, target: F.mse_loss(output, target) + features["x"].mean())
    assert any("features, which it reads: a forward leaves tensors there" in text for text in pipe.findings)


@DRIVERS
@REMAT
def test_a_buffer_in_two_modules_of_two_partitions_is_refused_once_it_changes(remat: str, driver: str) -> None:
    first, second = Prototypes(), Prototypes()
    second.mean = first.mean
    layers = [nn.Linear(4, 4), first, nn.Linear(4, 4), second]
    with pytest.raises(RuntimeError, match="a forward changed a buffer that layers of several partitions use"):
        gpipe.GPipe(layers, [2, 2], M, driver=driver, remat=remat).step(X, Y, F.mse_loss)
    check([nn.Linear(4, 4), first, nn.Linear(4, 4), second], [4], driver, remat)


def test_buffers_in_one_memory_cannot_be_recomputed_with() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("flat", torch.zeros(8))
            self.register_buffer("mean", self.get_buffer("flat")[:4])

        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("mean").add_(x.detach().mean(0))
            return x * self.get_buffer("flat").sum()

    layers = [nn.Linear(4, 4), Flat(), nn.Linear(4, 4)]
    with pytest.raises(RuntimeError, match=r"Flat\.flat, Flat\.mean: buffers that lie in one memory"):
        gpipe.GPipe(layers, 1, M, remat="always").step(X, Y, F.mse_loss)


@DRIVERS
@REMAT
def test_a_layer_that_calls_backward_in_its_forward_is_refused(remat: str, driver: str) -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x.detach())
            if torch.is_grad_enabled():
                out.pow(2).mean().backward()
            return self.linear(x)

    with pytest.raises(RuntimeError, match="a layer calls backward"):
        gpipe.GPipe([nn.Linear(4, 4), Greedy()], 2, M, driver=driver, remat=remat).step(X, Y, F.mse_loss)


@DRIVERS
@REMAT
def test_a_stash_whose_value_is_changed_in_place_behind_the_cut_is_refused(remat: str, driver: str) -> None:
    class Stashes(nn.Module):
        stash = ("a",)

        def forward(self, x: Tensor) -> Any:
            return x, {"a": x}

    class Pops(nn.Module):
        pop = ("a",)

        def forward(self, x: Tensor, a: Tensor) -> Tensor:
            return x + a

    layers = [nn.Linear(4, 4), Stashes(), nn.ReLU(inplace=True), nn.Linear(4, 4), Pops()]
    for cut in ([5], [2, 3], [2, 1, 2], [1, 2, 2]):
        pipe = gpipe.GPipe(copy.deepcopy(layers), cut, M, driver=driver, remat=remat)
        with pytest.raises(RuntimeError, match="in place"):
            pipe.step(X, Y, F.mse_loss)


@CUTS
@DRIVERS
@REMAT
def test_the_loss_may_work_in_place_on_its_output_and_its_target(remat: str, driver: str, cut: list[int]) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        target[target > 1] = 0.0
        return F.mse_loss(output.clamp_(-0.5, 0.5), target)

    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity(), nn.Identity()]
    reference = copy.deepcopy(layers)
    y, z = Y.clone(), Y.clone()
    with gpipe.GPipe(layers, cut, M, driver=driver, remat=remat, seed=5) as pipe:
        loss = pipe.step(X, y, loss_fn)
    assert same_bits(loss, plain_loop(reference, X, z, loss_fn, micro_batches=M, seed=5))
    assert_same_bits(pipe, reference)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("remat", REMATS)
def test_lazy_conjugates_and_quantized_tensors_cross_a_cut(remat: str) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x).conj()

    class Imaginary(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            assert z.is_conj()
            return z.imag.sum(1, keepdim=True).expand(-1, 4)

    check([nn.Linear(4, 4), Spectrum(), Imaginary(), nn.Linear(4, 4)], [2, 2], "threads", remat)

    class Quantizes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)

    class Dequantizes(nn.Module):
        def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
            return both[0] + both[1].dequantize()

    check([nn.Linear(4, 4), Quantizes(), Dequantizes(), nn.Linear(4, 4)], [2, 2], "threads", remat)
