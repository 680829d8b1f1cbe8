"""Micro-batches are weighed as torch's own losses average: the step's loss is that of the whole mini-batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.stages.losses import find_reduction
from tests.support.plain_loop import assert_same_bits, plain_loop, same_bits, weights_of

ROWS, CLASSES, PIXELS = 7, 3, 2
IGNORED = 1
WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


def one_hot_targets() -> Tensor:
    return torch.rand(ROWS, CLASSES, dtype=torch.float64).softmax(1)


def labels(*shape: int, ignored: int = -100) -> Tensor:
    """Labels of which those of the first rows are mostly to be ignored."""
    found = torch.randint(CLASSES, (ROWS, *shape))
    flat = found.view(ROWS, -1)
    flat[:3, 0] = ignored
    flat[3, -1] = ignored
    flat[-1, 0] = 0 if ignored else 2
    return found


Case = tuple[Callable[..., Any], Callable[[], Tensor]]
real = partial(torch.rand, ROWS, CLASSES, dtype=torch.float64)


class Inherits(nn.CrossEntropyLoss):
    """One of torch's own, in all but name."""


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
    """Gives scores of each class for each pixel."""

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
    """A step gives the loss and the gradients that the layers give of the whole mini-batch, also in a second run."""
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
def test_given_the_weights_the_bits_are_those_of_the_plain_loop(driver: str, remat: str, name: str) -> None:
    loss_fn, targets = ALL[name]
    x, y = torch.randn(ROWS, 4, dtype=torch.float64), targets()
    pipe = gpipe.GPipe(build_for(name), 2, 3, seed=0, driver=driver, remat=remat)
    plain = build_for(name)
    reduction = find_reduction(loss_fn)
    assert reduction is not None
    expected = plain_loop(plain, x, y, loss_fn, micro_batches=3, seed=0, reduction=reduction)
    assert same_bits(pipe.step(x, y, loss_fn), expected)
    assert_same_bits(pipe, plain)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy, weight=WEIGHT)])
def test_a_micro_batch_of_ignored_labels_alone_is_left_out(loss_fn: Callable[..., Any]) -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([-100, -100, 0, 2, 1, -100])
    pipe = gpipe.GPipe(build(None), 2, 3, seed=0)
    assert_whole(pipe, build(None), x, y, loss_fn)
    with pytest.raises(ValueError, match="weights of all micro-batches are 0: there is nothing to average"):
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


def test_a_loss_for_each_row_is_refused_before_anything_runs() -> None:
    for loss_fn in (
        nn.MSELoss(reduction="none"),
        partial(F.cross_entropy, reduction="none"),
        partial(F.mse_loss, reduce=False),
    ):
        pipe = gpipe.GPipe(build(None), 2, 2)
        with pytest.raises(ValueError, match=r"reduction='none', .* add \.mean\(\)"):
            pipe.step(torch.randn(4, 4).double(), torch.rand(4, CLASSES).double(), loss_fn)
        assert pipe.step_number == 0


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_bug_a_target_that_every_micro_batch_takes_whole_leaves_the_mean_to_the_rows() -> None:
    """Its elements were counted, though they say nothing of a micro-batch's rows."""
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
    assert find_reduction(torch.compile(nn.MSELoss(reduction="sum"), backend="eager")) == "sum"
    assert find_reduction(torch.compile(F.mse_loss, backend="eager")) == "mean"
    assert [find_reduction(loss_fn) for loss_fn in UNREAD] == [None] * len(UNREAD)


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


def findings_on_losses(loss_fn: Callable[..., Any], y: Tensor) -> list[str]:
    pipe = gpipe.GPipe(build(None), 2, 2)
    for _ in range(2):
        pipe.step(torch.randn(len(y), 4, dtype=torch.float64), y, loss_fn)
    return [text for text in pipe.findings if "loss_fn" in text]


def test_what_cannot_be_read_of_a_loss_is_told() -> None:
    y = labels()
    (told,) = findings_on_losses(lambda o, t: -o.log_softmax(1).gather(1, t.clamp(0)[:, None])[t >= 0].mean(), y)
    assert "reduction=lambda target: (target != -100).sum()" in told
    (told,) = findings_on_losses(lambda o, t: F.cross_entropy(o[1:], t[1:].flip(0), ignore_index=0), y.clamp(0))
    assert told.startswith("loss_fn calls cross_entropy on labels")
    assert not findings_on_losses(
        lambda o, t: F.cross_entropy(o, t, reduction="none", ignore_index=0).mean(), y.clamp(0)
    )
    y = torch.tensor([0, 1, 2, 0, 1, 0, 2, 0])  # as many labels count in the halves of each micro-batch
    for masked in (
        lambda o, t: F.cross_entropy(o, t, reduction="none", ignore_index=0).sum() / (t != 0).sum(),
        lambda o, t: F.cross_entropy(o[t != 0], t[t != 0]),
    ):
        (told,) = findings_on_losses(masked, y)
        assert told.startswith("loss_fn calls cross_entropy on labels")


MORE: dict[str, Callable[..., Any]] = {
    "squares of all rows": lambda o, t: F.cross_entropy(o, t) + F.mse_loss(o, torch.zeros_like(o)),
    "a little of them": lambda o, t: F.cross_entropy(o, t) + 0.1 * o.pow(2).mean(),
    "their entropy": lambda o, t: F.cross_entropy(o, t) + 0.5 * (o.softmax(1) * o.log_softmax(1)).sum(1).mean(),
    "weighed": lambda o, t: F.cross_entropy(o, t, weight=WEIGHT) + F.mse_loss(o, torch.zeros_like(o)),
}
ALONE: dict[str, Callable[..., Any]] = {
    "alone": lambda o, t: F.cross_entropy(o, t),
    "halved": lambda o, t: 0.5 * F.cross_entropy(o, t) + 1,
    "smoothed": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2),
    "weighed": lambda o, t: F.cross_entropy(o, t, weight=WEIGHT),
    "twice": lambda o, t: F.cross_entropy(o, t) + 0.1 * F.cross_entropy(o.sin(), t),
    "squares of the rows that count": lambda o, t: (
        F.cross_entropy(o, t) + (o.pow(2).mean(1) * (t >= 0)).sum() / (t >= 0).sum()
    ),
}


@pytest.mark.parametrize("rows", [4, 7, 16])
def test_bug_what_averages_over_rows_beside_a_mean_over_labels_is_told_of(rows: int) -> None:
    """It was weighed by labels in silence: the first micro-batch was tried on halves that count alike."""
    some = (torch.arange(rows) % CLASSES).where(torch.arange(rows) != rows - 1, -100)
    for micro_batches in (2, 4):
        for y, told in ((some, MORE), (torch.ones_like(some), {})):
            for name, loss_fn in (MORE | {f"right: {name}": one for name, one in ALONE.items()}).items():
                pipe = gpipe.GPipe(build(None), 2, micro_batches)
                x, expected = torch.randn(len(y), 4, dtype=torch.float64), name in told
                for _ in range(2):
                    loss = pipe.step(x, y, loss_fn)
                whole = loss_fn(nn.Sequential(*build(None))(x), y).detach()
                assert close(loss, whole) != expected, name
                assert len([text for text in pipe.findings if "labels that count" in text]) == expected, name


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


def test_a_criterion_that_sums_is_told_of_and_one_that_averages_is_not() -> None:
    y = torch.rand(8, CLASSES, dtype=torch.float64)
    assert not findings_on_losses(lambda o, t: (o - t).pow(2).mean(), y)
    (told,) = findings_on_losses(lambda o, t: (o - t).pow(2).sum(), y)
    assert "step(..., reduction='sum'), or have it end in .mean()" in told
    (told,) = findings_on_losses(lambda o, t: F.mse_loss(o, t, reduction="sum"), y[:2])  # of one row each
    assert "step(..., reduction='sum'), or have it end in .mean()" in told
    assert not findings_on_losses(lambda o, t: F.mse_loss(o, t), y[:2])
    (told,) = findings_on_losses(lambda o, t: (o - t).pow(2).mean().sqrt() + o.std(), y)
    assert "a function of the target that gives the weight of a micro-batch" in told


def test_a_loss_of_ready_made_micro_batches_of_several_lengths_is_told_of() -> None:
    def told(lengths: tuple[int, int], **how: Any) -> list[str]:
        parts = [torch.rand(2, length, 4) for length in lengths]
        pipe = gpipe.GPipe([nn.Linear(4, 4)], 1, 2)
        pipe.step(gpipe.MicroBatches(parts), gpipe.MicroBatches(parts), lambda o, t: (o - t).pow(2).mean(), **how)
        return [text for text in pipe.findings if "several lengths" in text]

    assert "target.numel()" in told((3, 5))[0]
    assert not told((3, 5), reduction="mean")
    assert not told((4, 4))


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


def test_a_loss_that_counts_its_calls_is_called_once_for_each_micro_batch() -> None:
    calls: list[int] = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.get_buffer("calls").data.add_(1)
            return (output - target).pow(2).sum()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return (output - target).pow(2).sum()

    y, counts = torch.rand(8, CLASSES, dtype=torch.float64), Counts()
    findings_on_losses(loss_fn, y)
    findings_on_losses(lambda output, target: counts(output, target), y)
    assert calls == [4] * 4
    assert float(counts.get_buffer("calls")) == 4


@pytest.mark.parametrize(
    ("loss_fn", "out"),
    [(nn.CrossEntropyLoss(), "labels"), (nn.CrossEntropyLoss(), "probabilities"), (nn.MSELoss(), "")],
)
def test_ready_made_micro_batches_count_by_what_the_loss_averages_over(loss_fn: Callable[..., Any], out: str) -> None:
    x = [torch.randn(2, CLASSES, length, dtype=torch.float64) for length in (2, 5)]
    y = [torch.randint(CLASSES, (2, part.shape[-1])) for part in x]
    targets: list[Tensor] = {
        "labels": y,
        "probabilities": [F.one_hot(part, CLASSES).movedim(-1, 1).double() for part in y],
        "": [torch.rand_like(part) for part in x],
    }[out]
    pipe = gpipe.GPipe([nn.Identity()], 1, 2)
    with torch.no_grad():
        found = pipe.step(gpipe.MicroBatches(x), gpipe.MicroBatches(targets), loss_fn)
    flat = [
        torch.cat([part.movedim(1, -1).reshape(-1, CLASSES) for part in parts])
        for parts in (x, targets if out != "labels" else x)
    ]
    assert close(found, loss_fn(flat[0], torch.cat([part.flatten() for part in y]) if out == "labels" else flat[1]))


def test_weights_of_rows_that_the_loss_holds_are_refused() -> None:
    x, y, wide, narrow = torch.randn(4, 4).double(), *torch.rand(3, 4, CLASSES).double()
    by_rows: Any = partial(F.mse_loss, weight=wide)  # type: ignore[call-arg]  # newer than its types
    for loss_fn in (by_rows, nn.BCEWithLogitsLoss(weight=narrow[:, :1])):
        with pytest.raises(ValueError, match="hand it over among the targets, which are split"):
            gpipe.GPipe(build(None), 2, 4).step(x, y, loss_fn)
        gpipe.GPipe(build(None), 2, 1).step(x, y, loss_fn)


def test_a_loss_that_averages_otherwise_than_the_step_is_told_of() -> None:
    for own, given in (("sum", "mean"), ("mean", "sum"), ("sum", "sum")):
        pipe = gpipe.GPipe([nn.Linear(3, CLASSES)], 1, 2, driver="lockstep")
        for _ in range(2):
            how: Any = {"reduction": given}
            pipe.step(torch.randn(ROWS, 3), torch.zeros(ROWS).long(), nn.CrossEntropyLoss(reduction=own), **how)
        assert sum(f"reduction={own!r} and step was given" in text for text in pipe.findings) == (own != given)
