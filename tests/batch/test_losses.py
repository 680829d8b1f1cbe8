"""Micro-batches are weighed as torch's own losses average: the step's loss is that of the whole mini-batch."""

import re
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.batch.losses import read_loss
from tests.support.plain_loop import same_bits, weights_of
from tests.support.planned import pipe_by_costs

ROWS, CLASSES, PIXELS = 7, 3, 2
IGNORED = 1
WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


def one_hot_targets() -> Tensor:
    return torch.rand(ROWS, CLASSES, dtype=torch.float64).softmax(1)


def labels(*shape: int, ignored: int = -100) -> Tensor:
    """Returns labels of which most in the first rows are ignored."""
    found = torch.randint(CLASSES, (ROWS, *shape))
    flat = found.view(ROWS, -1)
    flat[:3, 0] = ignored
    flat[3, -1] = ignored
    flat[-1, 0] = 0 if ignored else 2
    return found


Case = tuple[Callable[..., Any], Callable[[], Tensor]]
real = partial(torch.rand, ROWS, CLASSES, dtype=torch.float64)


class Inherits(nn.CrossEntropyLoss):
    """A loss that equals one of torch, under a different name."""


ELEMENTWISE: dict[str, Case] = {
    "mse": (nn.MSELoss(), real),
    "mse function": (F.mse_loss, real),
    "huber function": (partial(F.huber_loss, delta=0.3), real),
    "bce with logits": (nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=2 * WEIGHT), real),
    "bce with logits function": (partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHT), real),
    "kl div batchmean": (nn.KLDivLoss(reduction="batchmean"), one_hot_targets),
    "kl div function": (partial(F.kl_div, reduction="batchmean", log_target=True), real),
    "poisson": (nn.PoissonNLLLoss(), real),
    "gaussian": (partial(F.gaussian_nll_loss, var=1.5), real),
    "multi-margin": (nn.MultiMarginLoss(weight=WEIGHT), lambda: torch.randint(CLASSES, (ROWS,))),
    "sum": (nn.MSELoss(reduction="sum"), real),
    "sum, nested": (partial(partial(F.l1_loss, reduction="mean"), reduction="sum"), real),
    "mean of old": (partial(F.mse_loss, size_average=True), real),
    "sum function of old": (partial(F.mse_loss, size_average=False), real),
    "partial of a module": (partial(nn.MSELoss(reduction="sum")), real),
}
ENTROPIES: dict[str, Case] = {
    "entropy": (nn.CrossEntropyLoss(), labels),
    "entropy function": (F.cross_entropy, labels),
    "entropy inherited": (Inherits(ignore_index=2), partial(labels, ignored=2)),
    "entropy index": (nn.CrossEntropyLoss(ignore_index=IGNORED), partial(labels, ignored=IGNORED)),
    "entropy weight": (nn.CrossEntropyLoss(WEIGHT), labels),
    "entropy weight index": (nn.CrossEntropyLoss(WEIGHT, ignore_index=0), partial(labels, ignored=0)),
    "entropy smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), labels),
    "entropy all": (nn.CrossEntropyLoss(WEIGHT, ignore_index=0, label_smoothing=0.2), partial(labels, ignored=0)),
    "entropy function all": (
        partial(partial(F.cross_entropy, weight=WEIGHT), ignore_index=0, label_smoothing=0.1),
        partial(labels, ignored=0),
    ),
    "entropy sum": (nn.CrossEntropyLoss(WEIGHT, reduction="sum"), labels),
    "entropy sum function": (partial(F.cross_entropy, reduction="sum", label_smoothing=0.1), labels),
    "entropy sum of old": (partial(F.cross_entropy, size_average=False), labels),
    "probabilities": (nn.CrossEntropyLoss(), one_hot_targets),
    "probabilities weight smoothing": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2), one_hot_targets),
}
NLL: dict[str, Case] = {
    "nll": (nn.NLLLoss(), labels),
    "nll weight": (nn.NLLLoss(WEIGHT, ignore_index=2), partial(labels, ignored=2)),
    "nll function": (partial(F.nll_loss, weight=WEIGHT), labels),
}
IMAGES: dict[str, Case] = {
    "images": (nn.CrossEntropyLoss(), partial(labels, PIXELS, PIXELS)),
    "images all": (
        nn.CrossEntropyLoss(WEIGHT, ignore_index=0, label_smoothing=0.2),
        partial(labels, PIXELS, PIXELS, ignored=0),
    ),
    "images probabilities": (
        nn.CrossEntropyLoss(WEIGHT),
        lambda: torch.rand(ROWS, CLASSES, PIXELS, PIXELS, dtype=torch.float64).softmax(1),
    ),
}


class Images(nn.Module):
    """Returns logits of each class for each pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), CLASSES, PIXELS, PIXELS)


def build(last: nn.Module | None, out: int = CLASSES) -> list[nn.Module]:
    with weights_of(5):
        return [nn.Linear(4, 6).double(), nn.Tanh(), nn.Linear(6, out).double(), *([last] if last else [])]


def build_for(name: str) -> list[nn.Module]:
    if name in NLL:
        return build(nn.LogSoftmax(1))
    return build(Images(), CLASSES * PIXELS**2) if name in IMAGES else build(None)


ALL = {**ELEMENTWISE, **ENTROPIES, **NLL, **IMAGES}


def close(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def assert_whole(
    pipe: gpipe.GPipe, layers: list[nn.Module], x: Tensor, y: Tensor, loss_fn: Callable[..., Any]
) -> None:
    """A step returns the loss and gradients of the whole mini-batch, also in a second run."""
    plain = nn.Sequential(*layers)

    def loss_of(found: Any) -> Tensor:
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    expected = loss_of(loss_fn(plain(x), y))
    expected.backward()
    for _ in range(2):
        pipe.zero_grad()
        assert close(loss_of(pipe.step(x, y, loss_fn)), expected.detach())
        pairs = zip(pipe.parameters(), plain.parameters(), strict=True)
        assert all(close(one.grad, other.grad) for one, other in pairs)
    with torch.no_grad():
        assert close(loss_of(pipe.step(x, y, loss_fn)), expected.detach())
    assert not [text for text in pipe.findings if "loss_fn" in text]


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("name", ALL)
def test_a_step_gives_the_loss_of_the_whole_mini_batch(name: str) -> None:
    loss_fn, targets = ALL[name]
    x, y = torch.randn(ROWS, 4, dtype=torch.float64), targets()
    for micro_batches in (1, 2, 3, 4):
        pipe = gpipe.GPipe(build_for(name), 2, micro_batches, seed=0)
        assert_whole(pipe, build_for(name), x, y, loss_fn)


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("name", ["mse", "entropy", "entropy all", "nll weight", "images all", "sum", "entropy sum"])
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_the_bits_are_those_of_the_reference_loop(driver: str, remat: str, name: str) -> None:
    loss_fn, targets = ALL[name]
    with gpipe.GPipe(build_for(name), 2, 3, seed=0, driver=driver, remat=remat) as pipe:
        x = torch.randn(ROWS, 4, dtype=torch.float64)
        assert pipe.verify(x, targets(), loss_fn, against="model").equal


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy, weight=WEIGHT)])
def test_a_micro_batch_of_ignored_labels_alone_is_left_out(loss_fn: Callable[..., Any]) -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([-100, -100, 0, 2, 1, -100])
    pipe = gpipe.GPipe(build(None), 2, 3, seed=0)
    assert_whole(pipe, build(None), x, y, loss_fn)
    with pytest.raises(ValueError, match=r"\[all-weights-zero\]"):
        pipe.step(x, torch.full((6,), -100), loss_fn)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("driver", ["threads", "lockstep"])
def test_the_losses_of_micro_batches_are_as_the_loss_gave_them(driver: str, trains: bool) -> None:
    given = labels()
    given[2:4] = -100  # one micro-batch has no say, and its loss is NaN
    pipe = gpipe.GPipe(build(None), 2, 4, seed=3, driver=driver)
    seen, losses = list[Tensor](), [torch.ones(())]

    def noted(output: Tensor, target: Tensor) -> Tensor:
        seen.append(F.cross_entropy(output, target))
        return seen[-1]

    def count(target: Any) -> Tensor:
        return (target != -100).sum()

    x = torch.randn(ROWS, 4, dtype=torch.float64)
    with torch.set_grad_enabled(trains):
        whole = pipe.step(x, given, noted, reduction=count, scale=2.0, losses=losses)
    assert len(losses) == 4
    assert all(map(same_bits, losses, [one.detach() for one in seen]))
    counts = [int(count(part)) for part in given.tensor_split(4)]
    assert not counts[1]
    together = sum(loss * n for loss, n in zip(losses, counts, strict=True) if n) / sum(counts)
    torch.testing.assert_close(whole, together)
    assert not any(one.requires_grad for one in losses)


def test_a_loss_for_each_row_is_rejected() -> None:
    for loss_fn in (nn.MSELoss(reduction="none"), partial(F.cross_entropy, reduction="none")):
        pipe = gpipe.GPipe(build(None), 2, 2)
        with pytest.raises(TypeError, match=r"\[loss-not-scalar\]"):
            pipe.step(torch.randn(4, 4).double(), torch.rand(4, CLASSES).double(), loss_fn)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_bug_a_target_that_every_micro_batch_takes_whole_leaves_the_mean_to_the_rows() -> None:
    """Its elements were counted, although they do not depend on the rows of a micro-batch."""
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for target in (y, gpipe.Whole(y.view(1, 1))):
        pipe = gpipe.GPipe(build(None), 2, 2)
        assert close(pipe.step(x, target, nn.MSELoss()), nn.Sequential(*pipe.children())(x).pow(2).mean().detach())


class Own(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * 2


class Called(nn.MSELoss):
    def __call__(self, *given: Any) -> Any:
        return super().__call__(*given) * 2


UNREAD: list[Callable[..., Any]] = [
    lambda output, target: F.cross_entropy(output, target),
    Own(),
    Called(),
    partial(lambda output, target, k: F.cross_entropy(output, target), k=1),
    partial(F.mse_loss, torch.ones(1)),
    F.relu,
    partial(nn.MSELoss(), target=3),
]


def test_what_torch_wrote_is_read_though_compiled_and_nothing_else() -> None:
    for whole, reduction in ((nn.MSELoss(reduction="sum"), "sum"), (F.mse_loss, "mean")):
        loss = read_loss(torch.compile(whole, backend="eager"))
        assert loss is not None
        assert (loss.name, loss.reduction) == ("mse_loss", reduction)
    assert [read_loss(loss_fn) for loss_fn in UNREAD] == [None] * len(UNREAD)


class Wraps(nn.Module):
    """A criterion of one's own around one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(WEIGHT, ignore_index=0)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.inner(output.flatten(0, -2), target.flatten())
        return loss


WRAPPERS: dict[str, Callable[..., Any]] = {
    "ignored": lambda output, target: F.cross_entropy(output, target, ignore_index=0),
    "weighed": lambda output, target: F.cross_entropy(output.flatten(0, -2), target.flatten(), weight=WEIGHT),
    "module": Wraps(),
    "smoothed, twice": lambda output, target: (
        F.cross_entropy(output, target, ignore_index=0)
        + 0.5 * F.cross_entropy(output, target, ignore_index=0, label_smoothing=0.5)
    ),
    "with metrics": lambda output, target: (F.cross_entropy(output, target, ignore_index=0), len(target)),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    ("partitions", "schedule", "remat"), [(1, "gpipe", "never"), (2, "gpipe", "always"), (2, "1f1b", "never")]
)
def test_a_loss_around_one_of_torch_is_that_of_the_whole_mini_batch(
    partitions: int, schedule: str, remat: str, name: str
) -> None:
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 2, 0, 1, 1])
    pipe = gpipe.GPipe(build(None), partitions, 4, schedule=schedule, remat=remat)
    assert_whole(pipe, build(None), x, y, WRAPPERS[name])


def test_labels_of_the_next_word_are_counted_from_the_second_on() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    x, y = torch.randn(4, 3, 4, dtype=torch.float64), torch.tensor([[1, 0, 0], [1, 2, 0], [0, 1, 2], [2, 1, 1]])
    expected = loss_fn(nn.Sequential(*build(None))(x), y).detach()
    pipe = gpipe.GPipe(build(None), 2, 4)
    assert close(pipe.step(x, {"words": y}, lambda output, target: loss_fn(output, target["words"])), expected)


def test_sums_divided_by_numbers_of_the_mini_batch_are_put_together() -> None:
    """What the finding says to do."""

    def loss_fn(o: Tensor, t: Any) -> Tensor:
        labels, counting, rows = t
        return F.cross_entropy(o, labels, reduction="sum") / counting + o.pow(2).mean(1).sum() / rows

    y, x = labels(), torch.randn(ROWS, 4, dtype=torch.float64)
    pipe = gpipe.GPipe(build(None), 2, 4)
    found = pipe.step(x, (y, (y != -100).sum(), ROWS), loss_fn, reduction="sum")
    o = nn.Sequential(*build(None))(x)
    assert close(found, (F.cross_entropy(o, y) + o.pow(2).mean()).detach())
    assert not [text for text in pipe.findings if "loss" in text]


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_a_loss_may_call_a_pipe_of_its_own(driver: str) -> None:
    """Bug story: what watches the loss was taken for a mode of the user's."""
    teacher, pipe = (gpipe.GPipe([nn.Linear(4, 4), nn.Tanh()], 2, 2, driver=driver) for _ in range(2))

    def loss_fn(output: Tensor, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher(inputs)
        return F.mse_loss(output, goal)

    x = torch.rand(4, 4)
    loss = pipe.step(x, x, loss_fn)
    with torch.no_grad():
        assert torch.allclose(loss, F.mse_loss(pipe(x), teacher(x)))


def test_in_lockstep_a_loss_may_call_its_own_pipe() -> None:
    pipe = gpipe.GPipe([nn.Linear(4, 4), nn.Tanh()], 2, 2, driver="lockstep")
    x, y = torch.rand(2, 4, 4)

    def loss_fn(output: Tensor, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            goal = pipe(inputs)
        return F.mse_loss(output, goal)

    loss = pipe.step(x, y, loss_fn)
    with torch.no_grad():
        assert torch.allclose(loss, F.mse_loss(pipe(x), pipe(y)))


def test_weights_of_rows_that_the_loss_holds_are_refused() -> None:
    x, y, wide, narrow = torch.randn(4, 4).double(), *torch.rand(3, 4, CLASSES).double()
    by_rows: Any = partial(F.mse_loss, weight=wide)  # type: ignore[call-arg]  # newer than its types
    for loss_fn in (by_rows, nn.BCEWithLogitsLoss(weight=narrow[:, :1])):
        with pytest.raises(ValueError, match=r"\[loss-weight-per-row\]"):
            gpipe.GPipe(build(None), 2, 4).step(x, y, loss_fn)
        gpipe.GPipe(build(None), 2, 1).step(x, y, loss_fn)


def test_a_loss_that_averages_otherwise_than_the_step_is_told_of() -> None:
    for own, given in (("sum", "mean"), ("mean", "sum"), ("sum", "sum")):
        pipe = gpipe.GPipe([nn.Linear(3, CLASSES)], 1, 2, driver="lockstep")
        for _ in range(2):
            how: Any = {"reduction": given}
            pipe.step(torch.randn(ROWS, 3), torch.zeros(ROWS).long(), nn.CrossEntropyLoss(reduction=own), **how)
        assert sum(f"reduction={own!r}, but step() got" in text for text in pipe.findings) == (own != given)


# Whether the loss of the step is that of the mini-batch is checked in the first step.


def findings_of(pipe: gpipe.GPipe) -> list[str]:
    return [text for text in pipe.findings if text.startswith("loss_fn: ")]


def ccc(o: Tensor, t: Tensor) -> Tensor:
    apart = (o.mean() - t.mean()) ** 2
    return 1 - 2 * ((o - o.mean()) * (t - t.mean())).mean() / (o.var(unbiased=False) + t.var(unbiased=False) + apart)


def barlow(o: Tensor, t: Tensor) -> Tensor:
    o, t = ((z - z.mean(0)) / z.std(0) for z in (o, t))
    return (o.T @ t / len(o) - torch.eye(o.shape[1])).pow(2).sum()


def contrastive(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.normalize(o) @ F.normalize(t).T, torch.arange(len(o)))


def masked_entropy(o: Tensor, t: Tensor) -> Tensor:
    counted = t[:, 0] > 0
    return (F.cross_entropy(o, t.argmax(1), reduction="none") * counted).sum() / counted.sum()


def of_kept_rows(o: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(o[t[:, 0] > 0], t[t[:, 0] > 0])


WRONG: dict[str, Callable[..., Any]] = {
    "ccc": ccc,
    "pearson": lambda o, t: 1 - torch.corrcoef(torch.stack([o.flatten(), t.flatten()]))[0, 1],
    "barlow": barlow,
    "variance": lambda o, t: F.mse_loss(o, t) + F.relu(1 - o.std(0)).mean(),
    "root": lambda o, t: F.mse_loss(o, t).sqrt(),
    "dice": lambda o, t: 1 - 2 * (o.sigmoid() * (t > 0)).sum() / (o.sigmoid().sum() + (t > 0).sum()),
    "of positives": lambda o, t: (o - t).pow(2).sum() / (t > 0).sum(),
    "contrastive": contrastive,
    "sum": lambda o, t: (o - t).pow(2).sum(),
    "sum, twice": lambda o, t: 2 * F.mse_loss(o, t, reduction="sum"),
    "masked mean": lambda o, t: ((o - t).pow(2) * (t > 0)).sum() / (t > 0).sum(),
    "masked mean beside a mean": lambda o, t: F.l1_loss(o, t) + masked_entropy(o, t),
    "masked entropy": masked_entropy,
    "kept rows": of_kept_rows,
    "maximum": lambda o, t: (o - t).abs().max(),
    "all pairs": lambda o, t: F.l1_loss(o[:, :1], t[:, 0]),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_is_not_made_of_those_of_micro_batches_is_reported(name: str) -> None:
    for seed in range(12):
        with weights_of(seed):
            layers, x, y = [nn.Linear(4, CLASSES)], torch.randn(32, 4), torch.randn(32, CLASSES)
        pipe = gpipe.GPipe(layers, 1, 4)
        loss, whole = pipe.step(x, y, WRONG[name]), WRONG[name](layers[0](x), y)
        assert not torch.isclose(loss, whole, rtol=1e-4)
        (finding,) = findings_of(pipe)
        numbers = [float(number) for number in re.findall(r"(?:have the loss|returns) (-?[\d.e+-]+\d)", finding)]
        torch.testing.assert_close(torch.tensor(numbers), torch.stack([loss, whole.detach()]), rtol=1e-4, atol=0)
        pipe.step(x, y, WRONG[name])
        assert findings_of(pipe) == [finding]


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_a_mean_over_rows_beside_a_mean_over_labels_is_reported_where_these_are_uneven(weight: float) -> None:
    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return 0.5 * F.cross_entropy(o, t, label_smoothing=0.1) + weight * o.pow(2).mean()

    for count in range(4):
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % CLASSES
        y[:count] = -100
        pipe = gpipe.GPipe(build(None), 2, 4)
        loss = pipe.step(x, y, loss_fn)
        is_right = not weight or not count
        assert close(loss, loss_fn(nn.Sequential(*build(None))(x), y).detach()) == is_right
        assert bool(findings_of(pipe)) != is_right


def test_a_micro_batch_without_anything_to_average_is_reported() -> None:
    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return ((o - t).pow(2).sum(1) * (t[:, 0] > 0)).sum() / (t[:, 0] > 0).sum()

    y = torch.rand(8, CLASSES)
    y[2:4] = -1
    pipe = gpipe.GPipe([nn.Linear(4, CLASSES)], 1, 4)
    assert pipe.step(torch.randn(8, 4), y, loss_fn).isnan()
    (finding,) = findings_of(pipe)
    assert "have the loss nan" in finding


def near_zero(o: Tensor, t: Tensor) -> Tensor:
    return (o - o.detach()).mean() + 1e-5 * (t + 100).mean() - 1e-5 * t.mean() - 1e-3


RIGHT: dict[str, Callable[..., Any]] = {
    "mean": lambda o, t: (o - t).pow(2).mean(),
    "of torch": lambda o, t: F.smooth_l1_loss(o, t),
    "halved, plus one": lambda o, t: 0.5 * F.mse_loss(o, t) + 1,
    "sum of torch": lambda o, t: F.mse_loss(o, t, reduction="sum"),
    "sum by rows": lambda o, t: F.mse_loss(o, t, reduction="sum") / len(o),
    "autoencoder": lambda o, t: (
        F.binary_cross_entropy_with_logits(o, t.sigmoid(), reduction="sum") / len(o)
        - 0.5 * (1 + o - o**2 - o.exp()).sum(1).mean()
    ),
    "dropout": lambda o, t: F.mse_loss(F.dropout(o), t),
    "noise": lambda o, t: (o + torch.randn_like(o) - t).pow(2).mean(),
    "numpy's noise": lambda o, t: (o + torch.from_numpy(np.random.randn(*o.shape)).float() - t).pow(2).mean(),
    "near zero": near_zero,
    "class weights": lambda o, t: F.cross_entropy(o, t.argmax(1), weight=WEIGHT.float(), reduction="none").mean(),
    "half precision": lambda o, t: F.mse_loss(o.bfloat16(), t.bfloat16()),
    "changes in place": lambda o, t: o.sub_(t).pow(2).mean(),
    "metrics": lambda o, t: (F.l1_loss(o, t), {"rows": len(o)}),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("rows", [7, 64])
def test_a_loss_that_is_made_of_those_of_micro_batches_is_not_reported(rows: int, name: str) -> None:
    for seed in range(4):
        with weights_of(seed):
            layers, x, y = [nn.Linear(4, CLASSES), nn.Identity()], torch.randn(rows, 4), torch.randn(rows, CLASSES)
        pipe = gpipe.GPipe(layers, 1, 4)
        pipe.step(x, y, RIGHT[name])
        assert not findings_of(pipe)


def test_outputs_of_half_precision_are_compared_without_their_rounding() -> None:
    x, y = torch.randn(256, 4).bfloat16(), torch.randn(256, CLASSES).bfloat16()
    for loss_fn, reported in ((RIGHT["mean"], False), (lambda o, t: F.mse_loss(o, t), False), (WRONG["root"], True)):
        pipe = gpipe.GPipe([nn.Linear(4, CLASSES).bfloat16()], 1, 8)
        pipe.step(x, y, loss_fn)
        assert bool(findings_of(pipe)) == reported


# The call of the loss on several micro-batches leaves no trace.


class Centred(nn.Module):
    """A loss with a centre, as of DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES))
        self.momentum = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        centre = self.get_buffer("centre")
        loss = (output - target - centre - self.momentum).pow(2).mean()
        centre.mul_(0.9).add_(0.1 * target.mean(0))
        self.momentum.data += 0.25
        return loss


class Meter:
    def __init__(self) -> None:
        self.rows, self.total, self.last = 0, torch.zeros(()), deque([0.0], maxlen=2)
        self.seen, self.counts, self.noise = set[int](), np.zeros(2), np.random.default_rng(3)

    def update(self, value: Tensor, rows: int) -> None:
        self.rows, self.total = self.rows + rows, self.total + value.detach()
        self.last.append(value.item())
        self.seen.add(len(self.seen))
        self.counts[0] += self.noise.random()


class OfTrainer:
    """A trainer that holds its criteria in a dict, meters, and a counter for all of its objects."""

    calls = 0

    def __init__(self) -> None:
        self.criteria, self.meters = {"main": Centred()}, SimpleNamespace(train=Meter())

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.criteria["main"](output, target)
        self.meters.train.update(loss, len(output))
        OfTrainer.calls += 1
        return loss

    def state(self) -> str:
        meter = {name: repr(value) for name, value in vars(self.meters.train).items() if name != "noise"}
        noise = self.meters.train.noise.bit_generator.state
        return repr((self.criteria["main"].state_dict(), meter, noise, self.calls))


HOLDERS: dict[str, Callable[[OfTrainer], Callable[..., Any]]] = {
    "bound method": lambda trainer: trainer.loss,
    "partial": lambda trainer: partial(lambda held, o, t: held["trainer"].loss(o, t), {"trainer": trainer}),
    "closure": lambda trainer: lambda o, t: trainer.loss(o, t),
    "nested": lambda trainer: partial(SimpleNamespace(held=[trainer]).held[0].loss),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_the_state_of_a_loss_is_that_of_the_reference_loop(name: str) -> None:
    def train(step: Callable[[Callable[..., Any], Tensor, Tensor], object]) -> str:
        trainer, OfTrainer.calls = OfTrainer(), 0
        with weights_of(3):
            step(HOLDERS[name](trainer), torch.randn(8, 4), torch.rand(8, CLASSES))
        return trainer.state()

    def reference(loss_fn: Callable[..., Any], x: Tensor, y: Tensor) -> None:
        layer = nn.Linear(4, CLASSES)
        for some, targets in zip(x.split(2), y.split(2), strict=True):
            loss_fn(layer(some), targets)

    def piped(loss_fn: Callable[..., Any], x: Tensor, y: Tensor) -> None:
        pipe = gpipe.GPipe([nn.Linear(4, CLASSES)], 1, 4)
        pipe.step(x, y, loss_fn)
        assert not findings_of(pipe)

    assert train(piped) == train(reference)


def test_a_loss_with_state_that_cannot_be_copied_is_called_for_each_micro_batch_only() -> None:
    calls, weights = list[int](), (1.0 for _ in range(4))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return next(weights) * (output - target).pow(2).mean()

    pipe = gpipe.GPipe([nn.Linear(4, CLASSES)], 1, 4)
    pipe.step(torch.randn(8, 4), torch.rand(8, CLASSES), loss_fn)
    assert calls == [2] * 4
    (finding,) = findings_of(pipe)
    assert "closure variable weights (a generator)" in finding


def test_one_micro_batch_and_large_losses_of_torch_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        print(len(output), end=" ")  # what a list would note is restored
        return F.mse_loss(output, target)

    x, y = torch.randn(8, 4), torch.rand(8, CLASSES)
    for micro_batches, enough, expected in ((1, 2**26, "8 "), (4, 2**26, "2 2 2 2 8 4 "), (4, 0, "2 2 2 2 ")):
        monkeypatch.setattr("gpipe.features.loss_check.ENOUGH_BYTES", enough)
        pipe = gpipe.GPipe([nn.Linear(4, CLASSES)], 1, micro_batches)
        # A replay would print too.
        monkeypatch.setattr(
            "gpipe.features.verification.feature.Verification._begin", lambda *_: None
        )  # a replay would print too
        pipe.step(x, y, loss_fn)
        assert capsys.readouterr().out == expected
        assert not findings_of(pipe)


# Ready-made micro-batches, whose rows have different lengths.


def flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


lengths = (2, 12, 5)
xs = [(1 + at) * torch.linspace(-1, 1, 2 * length).view(2, length).cos() for at, length in enumerate(lengths)]
signs = [torch.where(x.sin() > 0.6, 1.0, -1.0) for x in xs]
units = [x.sin().abs() for x in xs]
OF_ELEMENTS: dict[str, tuple[Any, Callable[..., Any], list[Tensor]]] = {
    "mse": (nn.MSELoss(), F.mse_loss, units),
    "l1": (nn.L1Loss(), F.l1_loss, units),
    "smooth l1": (nn.SmoothL1Loss(), F.smooth_l1_loss, units),
    "huber": (nn.HuberLoss(), F.huber_loss, units),
    "bce with logits": (nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, units),
    "soft margin": (nn.SoftMarginLoss(), F.soft_margin_loss, signs),
    "poisson": (nn.PoissonNLLLoss(), F.poisson_nll_loss, units),
    "hinge": (nn.HingeEmbeddingLoss(), F.hinge_embedding_loss, signs),
    "kl": (nn.KLDivLoss(reduction="mean"), F.kl_div, units),
    "sum": (nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum"), units),
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class WithLoss(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.loss_fn = loss_fn

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x)
        return {"loss": self.loss_fn(x, y)}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_ready_made_micro_batches_are_weighted_by_elements(name: str) -> None:
    module, function, ys = OF_ELEMENTS[name]
    whole = function(flat(xs), flat(ys))
    for loss_fn in (module, function, lambda o, t: function(o, t), lambda o, t: module(o, t)):
        pipe = gpipe.GPipe([Scaled()], 1, 3)
        torch.testing.assert_close(pipe.step(gpipe.MicroBatches(xs), gpipe.MicroBatches(ys), loss_fn), whole)
        assert not findings_of(pipe)
    parts = gpipe.MicroBatches([{"x": x, "y": y} for x, y in zip(xs, ys, strict=True)])
    pipe = pipe_by_costs(WithLoss(function), 2, 3, sample=parts, costs="params")
    torch.testing.assert_close(pipe.step(parts), whole)


def pooled(x: Tensor) -> Tensor:
    """The means of three rows each."""
    return x.view(-1, 3, CLASSES).mean(1)


OF_ROWS: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "multi-margin": (nn.MultiMarginLoss(), lambda rows: torch.arange(rows) % CLASSES),
    "multi-label margin": (
        nn.MultiLabelMarginLoss(),
        lambda rows: torch.tensor([[2, 0, -1]] * rows).where(torch.arange(rows)[:, None] > 0, -1),
    ),
    "multi-label soft margin": (
        nn.MultiLabelSoftMarginLoss(),
        lambda rows: torch.eye(CLASSES).repeat(rows, 1)[:rows],
    ),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), lambda rows: torch.rand(rows, CLASSES)),
    "entropy": (nn.CrossEntropyLoss(), lambda rows: torch.arange(rows) % CLASSES),
    "gaussian": (partial(F.gaussian_nll_loss, var=1.5), lambda rows: torch.rand(rows, CLASSES)),
    "cosine": (
        lambda o, t: F.cosine_embedding_loss(o, t[0], t[1]),
        lambda rows: (torch.rand(rows, CLASSES), torch.ones(rows)),
    ),
    "triplet": (
        lambda o, t: F.triplet_margin_loss(o, *t),
        lambda rows: (torch.rand(rows, CLASSES), torch.rand(rows, CLASSES)),
    ),
    "ranking": (
        lambda o, t: F.margin_ranking_loss(o[:, 0], *t),
        lambda rows: (torch.rand(rows), torch.ones(rows)),
    ),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_ready_made_micro_batches_are_weighted_by_rows_of_targets(name: str) -> None:
    """Their inputs have several rows for each row of the target, and not as many in each micro-batch."""
    loss_fn, target = OF_ROWS[name]
    x, y = [torch.rand(3 * rows, CLASSES) for rows in (2, 5)], [target(rows) for rows in (2, 5)]
    x[1] = x[1].repeat_interleave(4, 0)

    class Graphs(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(pooled(x if len(x) < 12 else x[::4]))

    joined = tuple(map(torch.cat, zip(*y, strict=True))) if isinstance(y[0], tuple) else torch.cat(y)
    whole = loss_fn(torch.cat([pooled(x[0]), pooled(x[1][::4])]), joined)
    for called in (loss_fn, lambda o, t: loss_fn(o, t)):
        pipe = gpipe.GPipe([Graphs()], 1, 2)
        torch.testing.assert_close(pipe.step(gpipe.MicroBatches(x), gpipe.MicroBatches(y), called), whole)
        assert not findings_of(pipe)


def test_what_cannot_be_joined_and_is_not_a_loss_of_torch_is_reported() -> None:
    for loss_fn, reduction, why in (
        (lambda o, t: (o - t).pow(2).mean(), None, "cannot be joined by rows"),
        (lambda o, t: (o - t).pow(2).mean(), "mean", ""),
        (lambda o, t: F.mse_loss(o, t), None, ""),
        (lambda o, t: F.mse_loss(o[t > 0.5], t[t > 0.5]), None, "cannot be joined by rows"),
    ):
        pipe, how = gpipe.GPipe([Scaled()], 1, 3), dict[str, Any](reduction=reduction)
        pipe.step(gpipe.MicroBatches(xs), gpipe.MicroBatches(units), loss_fn, **how)
        assert [why in text for text in findings_of(pipe)] == [True] * bool(why)
