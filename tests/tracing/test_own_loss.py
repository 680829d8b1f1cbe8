"""Tests how the model's own losses of micro-batches combine to the loss of the mini-batch."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from tests.support.planned import pipe_by_costs


class Head(nn.Module):
    """A head that computes the loss."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.to_words = nn.Linear(6, 5)
        self.times = times

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        words = torch.cat([self.to_words(x * (1 + at)) for at in range(self.times)])
        return F.cross_entropy(words.flatten(0, 1), labels.repeat(self.times, 1).flatten())


class Words(nn.Module):
    """A language model."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = Head(times)

    def states(self, words: Tensor) -> Tensor:
        x: Tensor = self.embed(words)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(self.states(words), labels)}


@pytest.mark.parametrize("times", [1, 3])
def test_the_labels_of_a_loss_inside_a_head_are_counted(times: int) -> None:
    # Losses were only seen between modules: those of flaubert and xlm, whose heads have them, were weighed by rows.
    # So were those of prophetnet, which gives its loss all labels several times, for the words ahead.
    torch.manual_seed(0)
    model, batch = Words(times), ragged()
    whole = copy.deepcopy(model)(**batch)["loss"]

    with gpipe.GPipe(model, 2, 2, sample={"words": batch["words"], "labels": batch["words"]}) as pipe:
        loss = pipe.step(batch)

    torch.testing.assert_close(loss, whole.detach())
    assert not any("[model-loss-unknown]" in finding for finding in pipe.findings)


class Counted(Words):
    """Divides its loss by the number of labels that is passed to it."""

    def forward(self, words: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:
        words, labels = self.head.to_words(self.states(words)).flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(words, labels)}
        return {"loss": F.cross_entropy(words, labels, reduction="sum") / num_items_in_batch}


class Told(Words):
    """Takes a different path if the number of labels is passed to it, with the same loss."""

    def forward(self, words: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:
        states = self.states(words)
        if num_items_in_batch is not None:
            states = states.clone()
        return {"loss": self.head(states, labels)}


def test_a_forward_that_ignores_the_count_is_trained_on_the_way_that_it_goes_without() -> None:
    torch.manual_seed(0)
    model, batch = Told(), ragged()
    whole = copy.deepcopy(model)(**batch)["loss"]
    with pipe_by_costs(model, 2, 2, sample=batch, costs="params") as pipe:
        torch.testing.assert_close(pipe.step(batch), whole.detach())
        torch.testing.assert_close(pipe(**batch)["loss"].detach(), whole.detach())


class Summed(Words):
    """Divides the sum over its labels by their number, if it is passed."""

    def forward(self, words: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> dict[str, Tensor]:
        loss = self.head(self.states(words), labels)
        if num_items_in_batch is not None:
            loss = loss * (labels != -100).sum() / num_items_in_batch
        return {"loss": loss}


@pytest.mark.parametrize("training", [True, False])
def test_bug_a_loss_fn_is_given_the_loss_of_the_plain_loop_which_is_told_no_count(training: bool) -> None:
    # It was told a count of one, so what a loss_fn read as the loss of a micro-batch was the sum over its labels.
    torch.manual_seed(0)
    model, batch = Summed().train(training), ragged()
    plain = copy.deepcopy(model)
    parts = [
        dict(zip(batch, some, strict=True)) for some in zip(*(t.tensor_split(2) for t in batch.values()), strict=True)
    ]
    seen: list[Tensor] = []

    def loss_fn(output: dict[str, Tensor], _: Tensor) -> Tensor:
        seen.append(output["loss"].detach())
        return output["loss"]

    with pipe_by_costs(model, 2, 2, sample=batch, costs="params") as pipe:
        pipe.step(batch)
        pipe.step(batch, batch["labels"], loss_fn)
    assert [loss.item() for loss in seen] == [plain(**part)["loss"].item() for part in parts]


class Balanced(Words):
    """Its blocks have losses of their own. The last layer adds them, and they have no rows."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, beside = self.embed(words), []
        for block in self.blocks:
            x = x + block(x).tanh()
            beside.append(x.mean() ** self.power)
        return {"loss": self.head(x, labels) + sum(beside)}


@pytest.mark.parametrize("power", [1, 2])
def test_a_loss_that_blocks_have_is_tried_with_them(power: int) -> None:
    """The mean of the halves is the mean of the whole, but its square is not."""
    torch.manual_seed(0)
    batch = {"words": torch.randint(5, (4, 7)), "labels": torch.randint(5, (4, 7))}
    with pipe_by_costs(Balanced(power), 2, 1, sample=batch, costs="params") as pipe:
        pipe.step(batch)
        assert any("[model-loss-not-additive]" in finding for finding in pipe.findings) == (power == 2)


def ragged() -> dict[str, Tensor]:
    """Returns four rows of 7, 6, 2 and 1 tokens."""
    words = torch.randint(5, (4, 7))
    return {"words": words, "labels": words.where(torch.arange(7) < torch.tensor([[7], [6], [2], [1]]), -100)}


@pytest.mark.parametrize("told", [None, 16, 5])
def test_a_count_that_the_user_gives_is_the_one_that_is_used(told: int | None) -> None:
    # One of the batch, where the sample had none, was passed on and the losses weighed by their labels once more.
    torch.manual_seed(0)
    model, batch = Counted(), ragged()
    plain = copy.deepcopy(model)
    for part in zip(*(batch[key].split(2) for key in ("words", "labels")), strict=True):
        plain(*part, num_items_in_batch=torch.tensor(told or 16))["loss"].backward()
    given = batch if told is None else batch | {"num_items_in_batch": torch.tensor(told)}

    with gpipe.GPipe(model, 2, 2, sample=batch) as pipe:
        pipe.step(given)

    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=0)


def test_a_micro_batch_without_labels_that_count_weighs_nothing() -> None:
    # Its loss is a mean of nothing, NaN, and a call gave NaN for the whole.
    torch.manual_seed(0)
    model, batch = Words(1), ragged()
    batch["labels"][2:] = -100
    whole = copy.deepcopy(model)(**batch)["loss"]

    with gpipe.GPipe(model, 2, 2, sample={"words": batch["words"], "labels": batch["words"]}) as pipe:
        torch.testing.assert_close(pipe(**batch)["loss"], whole)
        torch.testing.assert_close(pipe.step(batch), whole.detach())
    assert not any(parameter.grad.isnan().any() for parameter in model.parameters() if parameter.grad is not None)


class Divided(Words):
    """A model whose loss is averaged by torch, divides a sum of losses itself, or is not a mean at all."""

    def __init__(self, by: str) -> None:
        super().__init__(1)
        self.by = by

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        words = self.head.to_words(self.states(words)).transpose(1, 2)
        if self.by == "mean":
            return {"loss": F.cross_entropy(words, labels)}
        total = F.cross_entropy(words, labels, reduction="sum")
        ways = {"labels": total / (labels != -100).sum(), "rows": total / len(labels), "root": total.sqrt()}
        return {"loss": ways[self.by]}


@pytest.mark.parametrize("by", ["mean", "labels", "rows"])
def test_the_sample_shows_what_a_forward_divides_a_sum_by(by: str) -> None:
    # Losses that a forward makes of a sum were added up: the step's loss grew with M.
    torch.manual_seed(0)
    model, batch = Divided(by), ragged()
    whole = copy.deepcopy(model)(**batch)["loss"]
    for micro_batches in (1, 2, 4):
        with gpipe.GPipe(model, 2, micro_batches, sample=batch) as pipe:
            torch.testing.assert_close(pipe.step(batch), whole.detach())
            assert not any("[model-loss-not-additive]" in finding for finding in pipe.findings)


def test_a_loss_that_no_weights_put_together_is_told_of() -> None:
    torch.manual_seed(0)
    batch = ragged()
    with gpipe.GPipe(Divided("root"), 2, 2, sample=batch) as pipe:
        pipe.step(batch)
        assert any("[model-loss-not-additive]" in finding for finding in pipe.findings)
        with torch.no_grad(), pytest.raises(TypeError, match=r"output\['loss'\] .*\[loss-in-output\]"):
            pipe(batch)


def refuses(x: Tensor) -> Tensor:
    return x


def scales(x: Tensor, **more: Tensor) -> Tensor:
    return x * 1.5 if more else x


def reads(x: Tensor, **more: Tensor) -> Tensor:
    return x * (1 + sum(float(value) for value in more.values()))


class HandsOn(Words):
    """Passes unknown arguments to a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, words: Tensor, labels: Tensor | None = None, **more: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(self.function(self.states(words), **more), labels)}


@pytest.mark.parametrize("function", [refuses, scales, reads])
def test_a_model_gets_no_argument_that_the_user_did_not_pass(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = HandsOn(function), ragged()
    whole = copy.deepcopy(model)(**batch)["loss"]
    with pipe_by_costs(model, 2, 4, sample=batch, costs="params") as pipe:
        torch.testing.assert_close(pipe.step(batch), whole.detach())
        assert not any("loss" in finding for finding in pipe.findings)


class Classes(nn.Module):
    """A model of blocks, for a custom loss."""

    def __init__(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.loss_fn = loss_fn

    def forward(self, x: Tensor, labels: Tensor, **_: object) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"loss": self.loss_fn(x, labels), "output": x}


def test_bug_a_loss_that_averages_over_rows_beside_labels_is_told_of_and_a_sample_may_begin_without_labels() -> None:
    """The sample's halves count alike, and it went in silence; one of no labels at first was refused."""
    own: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "labels": F.cross_entropy,
        "halved": lambda o, t: 0.5 * F.cross_entropy(o, t, label_smoothing=0.1) + 1,
        "summed": lambda o, t: F.cross_entropy(o, t, reduction="sum") / (t != -100).sum(),
        "two": lambda o, t: F.cross_entropy(o, t) + F.mse_loss(o, torch.zeros_like(o)),
        "a little": lambda o, t: F.cross_entropy(o, t) + 0.1 * o.pow(2).mean(),
    }
    x, y = torch.randn(16, 4), torch.arange(16) % 4
    late = y.where(torch.arange(16) >= 4, -100)
    for name, loss_fn in own.items():
        for sample in (y, late):
            model = Classes(loss_fn)
            with gpipe.GPipe(model, 2, 4, sample={"x": x, "labels": sample}) as pipe:
                for labels, told in ((y, False), (late, name in ("two", "a little"))):
                    for _ in range(2):
                        pipe.zero_grad()
                        loss = pipe.step({"x": x, "labels": labels})
                    with torch.no_grad():
                        whole = model(x, labels)["loss"]
                    assert torch.allclose(loss, whole, rtol=1e-5) != told, name
                    assert sum("[model-loss-not-additive]" in text for text in pipe.findings) == told, name


class CountedAndMore(Classes):
    """Accepts the number of labels of the mini-batch, like models of transformers."""

    def forward(  # type: ignore[override]  # whatever a user writes
        self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x).tanh()
        count = len(labels) if num_items_in_batch is None else num_items_in_batch
        return {"loss": F.cross_entropy(x, labels, reduction="sum") / count + self.loss_fn(x, labels)}


@pytest.mark.parametrize("weight", [0.0, 0.01])
def test_what_each_micro_batch_adds_to_a_mean_over_all_labels_is_told_of(weight: float) -> None:
    # Beside a sum over the labels, which was tried, it was too little to be seen: an auxiliary loss of experts, say.
    x, y = torch.randn(640, 4), torch.arange(640) % 4
    model = CountedAndMore(lambda o, t: weight * o.pow(2).mean())
    with gpipe.GPipe(model, 2, 4, sample={"x": x, "labels": y}) as pipe:
        loss = pipe.step({"x": x, "labels": y})
        assert torch.allclose(loss, model(x, y)["loss"], rtol=1e-5) == (not weight)
        assert sum("[model-loss-not-additive]" in text for text in pipe.findings) == bool(weight)


class Scored(Words):
    """Returns one number for each row."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        states = self.states(words)
        return states.mean((1, 2), keepdim=self.keeps), states


@pytest.mark.parametrize("keeps", [False, True])
def test_bug_numbers_of_single_rows_are_no_losses(*, keeps: bool) -> None:
    torch.manual_seed(0)
    model, words = Scored(keeps).eval(), ragged()["words"]

    with gpipe.GPipe(model, 2, len(words), sample=words).eval() as pipe, torch.no_grad():
        scores, states = pipe(words)

    torch.testing.assert_close((scores, states), model(words))
