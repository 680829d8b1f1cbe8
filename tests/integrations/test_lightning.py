"""Tests that `GPipeStrategy` does not change a bit of the log, weights and optimizer state of Lightning's Trainer."""

import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support import progress
from tests.support.plain_loop import one_thread
from tests.support.processes.fork_server import ONE_THREAD, ROOT

pytest.importorskip("lightning", reason="the extra of Lightning is not installed")

import lightning.pytorch as pl
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

import gpipe
from gpipe.integrations.lightning import GPipeStrategy

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec:FutureWarning")]  # Lightning's
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

ROWS, FEATURES, CLASSES = 30, 8, 3  # eight batches of four, the last of two


class Classifier(pl.LightningModule):
    """A typical user's module: it uses random numbers, logs in every way, and returns more than a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.network()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def network(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*blocks, nn.Linear(FEATURES, CLASSES))

    def forward(self, rows: Tensor) -> Any:
        return self.net(rows)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, labels = batch
        scores = self(rows + 0.1 * torch.randn_like(rows))
        loss = cross_entropy(scores, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"batch": float(batch_idx), "most": scores.max()}, on_step=True, on_epoch=True, reduce_fx="max")
        self.accuracy(scores, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "rows": len(rows)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("held_out", cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Quiet(Classifier):
    """Uses no random numbers, so that it resumes from a checkpoint as if it had never stopped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, rows: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        for block in self.blocks:
            rows = rows + block(rows) * scale
        return {"scores": self.head(rows)}


class OfAnyModel(Classifier):
    def network(self) -> nn.Module:
        return Residual()

    def forward(self, rows: Tensor) -> Any:
        return self.net(rows, scale=0.5)["scores"]


class PartlyFrozen(OfAnyModel):
    def network(self) -> nn.Module:
        network = Residual()
        network.blocks[0].requires_grad_(False).eval()
        return network


class BatchNormed(Classifier):
    def network(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES)
        )


class WithHead(Classifier):
    """Also has weights after the network."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES)

    def forward(self, rows: Tensor) -> Any:
        return self.head(self.net(rows))


class Hooked(Classifier):
    """Changes batches in Lightning's hooks, and records their order."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(1 + batch_idx / 8)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn_like(batch[0]), batch[1]]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Keeps(WithHead):
    """Stores the inputs of its loss on itself: by assignment, in place, in a dict, in a list, and on a child."""

    head: Any
    counted: Tensor
    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(()))
        self.kept: dict[str, Tensor] = {}
        self.many: list[Tensor] = []

    def forward(self, rows: Tensor) -> Any:
        self.mask = (rows[:, 0] > 0).float()
        self.head.mean = rows.mean()
        self.kept["scale"] = rows.std()
        self.counted += len(rows)
        self.many.append(rows.amax())
        return super().forward(rows)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = cross_entropy(self(batch[0]), batch[1], reduction="none") * (1 + cast(Tensor, self.mask))
        loss = losses.mean() * self.head.mean.cos() * self.kept["scale"] / self.counted.sqrt() + self.many[-1]
        self.log("loss", loss)
        self.log("counted", self.counted)
        self.mask = None
        return loss


class DrawsBehind(Quiet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        return cross_entropy(scores + 0.1 * torch.randn_like(scores), batch[1])


class ByLineSearch(Quiet):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Outcome(NamedTuple):
    log: str
    metrics: Mapping[str, float]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def data(rows: int = ROWS, **how: Any) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    some = torch.randn(rows, FEATURES, generator=drawn), torch.randint(CLASSES, (rows,), generator=drawn)
    return DataLoader(TensorDataset(*some), batch_size=4, **how)


def trainer_of(folder: Path, strategy: GPipeStrategy | None = None, **how: Any) -> pl.Trainer:
    given = {"strategy": strategy} if strategy else {}
    defaults = {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "log_every_n_steps": 1}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    logger = CSVLogger(folder, name="", version="")
    pl.seed_everything(7, verbose=False)
    return pl.Trainer(**{"accelerator": "cpu", "logger": logger, **defaults, **quiet, **given, **how})


def train(
    folder: Path,
    strategy: GPipeStrategy | None = None,
    kind: Callable[[], pl.LightningModule] = Classifier,
    *,
    loader: Any = None,
    ckpt_path: Path | None = None,
    **how: Any,
) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    with one_thread():
        trainer, module = trainer_of(folder, strategy, **how), kind()
        trainer.fit(
            module,
            data(shuffle=True) if loader is None else loader,
            data(10),
            ckpt_path=ckpt_path,
            weights_only=False,
        )
    log = folder / "metrics.csv"
    state = trainer.optimizers[0].state_dict()["state"]
    return Outcome(
        log.read_text() if log.exists() else "",
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        {name: tensor.clone() for name, tensor in module.state_dict().items()},
        {
            f"{at} {name}": value
            for at, one in state.items()
            for name, value in one.items()
            if isinstance(value, Tensor)
        },
    )


def check_same(found: Outcome, expected: Outcome) -> None:
    assert found.log == expected.log
    assert found.metrics == expected.metrics
    for some, others in ((found.weights, expected.weights), (found.optimizer, expected.optimizer)):
        assert some.keys() == others.keys()
        assert [name for name, value in some.items() if not torch.equal(value, others[name])] == []


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("gpipe"):
            thread.join()  # one that waits for something would stand still here, and be reported


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4], ids="M={}".format)
def test_the_log_the_weights_and_the_optimizer_are_lightnings(
    micro_batches: int, schedule: str, tmp_path: Path
) -> None:
    """Of eight batches the last step of an epoch takes two, or four, and the last batch has fewer rows."""
    how: Any = {"accumulate_grad_batches": micro_batches}
    expected = train(tmp_path / "plain", **how)
    assert len(expected.log.splitlines()) > 6
    for partitions in (2, 3):
        strategy = GPipeStrategy(partitions, schedule=schedule)
        check_same(train(tmp_path / str(partitions), strategy, **how), expected)


@pytest.mark.parametrize(
    "kind", [OfAnyModel, PartlyFrozen, BatchNormed, WithHead, Hooked, ByLineSearch, Keeps, DrawsBehind]
)
def test_modules_of_all_kinds_train_as_without_a_pipe(kind: Any, tmp_path: Path) -> None:
    expected = train(tmp_path / "plain", kind=kind)
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        strategy = GPipeStrategy(2, module="net", schedule=schedule)
        check_same(train(tmp_path / schedule, strategy, kind), expected)


class Flipped(Residual):
    def forward(self, rows: Tensor, flips: bool = False) -> Any:  # type: ignore[override]
        return super().forward(-rows if flips else rows)["scores"]


class FlipsInTurn(Quiet):
    def network(self) -> nn.Module:
        return Flipped()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.net(batch[0], flips=batch_idx % 2 == 1), batch[1])


def test_batches_that_differ_in_a_bool_are_refused_by_what_differs(tmp_path: Path) -> None:
    """Bug story: it said of both that they have a bool."""
    with pytest.raises(ValueError, match=r"flips: True instead of .*flips: False.*\[micro-batches-differ\]"):
        train(tmp_path, GPipeStrategy(2), FlipsInTurn)


class WithOperators(nn.Module):
    """Its layers are costed each by itself, in threads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = rows + nn.functional.gelu(block(rows))
        found: Tensor = self.head(rows)
        return found


class OfOperators(Quiet):
    def network(self) -> nn.Module:
        return WithOperators()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_layers_are_costed_under_the_autocast_that_the_pipe_is_made_in(precision: str, tmp_path: Path) -> None:
    expected = train(tmp_path / "plain", kind=OfOperators, precision=precision)
    check_same(train(tmp_path / "piped", GPipeStrategy(2), OfOperators, precision=precision), expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("kind", [Classifier, OfAnyModel])
def test_precisions(kind: Any, precision: str, tmp_path: Path) -> None:
    expected = train(tmp_path / "plain", kind=kind, precision=precision)
    check_same(train(tmp_path / "piped", GPipeStrategy(2), kind, precision=precision), expected)


def test_a_scale_of_fp16(tmp_path: Path) -> None:
    def run(name: str, strategy: GPipeStrategy | None) -> Outcome:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
        return train(tmp_path / name, strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])

    check_same(run("piped", GPipeStrategy(2)), run("plain", None))


class Rows(IterableDataset[Any]):
    """Of no known length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data().dataset)


SETTINGS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of 4": {"fast_dev_run": 4},
    "limit_train_batches": {"limit_train_batches": 5},
    "max_steps": {"max_steps": 4},
    "validation in the midst of a step": {"val_check_interval": 4},
    "overfit_batches": {"overfit_batches": 2},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "detect_anomaly": {"detect_anomaly": True},
    "no length": {"loader": DataLoader(Rows(), batch_size=4)},
    "two loaders": {"loader": None},
}


class OfTwoLoaders(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([torch.cat(some) for some in zip(*batch.values(), strict=True)], batch_idx)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_trainer(name: str, tmp_path: Path) -> None:
    kind, how = Classifier, SETTINGS[name]
    if name == "two loaders":
        kind, how = OfTwoLoaders, {"loader": {"one": data(), "other": data(14)}}
    expected = train(tmp_path / "plain", kind=kind, **how)
    check_same(train(tmp_path / "piped", GPipeStrategy(2, schedule="1f1b"), kind, **how), expected)


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "stops early": lambda: EarlyStopping("held_out", patience=1, min_delta=0.1),
    "EMA": EMAWeightAveraging,
    "SWA": lambda: StochasticWeightAveraging(1e-2),
    "learning rates": LearningRateMonitor,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_epochs": 4}
    expected = train(tmp_path / "plain", callbacks=[CALLBACKS[name]()], **how)
    check_same(train(tmp_path / "piped", GPipeStrategy(2), callbacks=[CALLBACKS[name]()], **how), expected)


def test_swa_counts_the_statistics_of_batch_norm_anew(tmp_path: Path) -> None:
    def run(name: str, strategy: GPipeStrategy | None) -> Outcome:
        averages = StochasticWeightAveraging(1e-2, swa_epoch_start=1)
        return train(tmp_path / name, strategy, BatchNormed, callbacks=[averages], max_epochs=3)

    check_same(run("piped", GPipeStrategy(2)), run("plain", None))


@pytest.mark.parametrize("remat", ["auto", "always"])
def test_the_first_batch_is_the_sample_of_a_sequential_too(remat: str, tmp_path: Path) -> None:
    strategy = GPipeStrategy(2, remat=remat)
    check_same(train(tmp_path / "piped", strategy, Quiet), train(tmp_path / "plain", None, Quiet))


class Told(Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


def test_what_a_step_gives_comes_with_the_last_batch(tmp_path: Path) -> None:
    plain, piped = Told(), Told()
    train(tmp_path / "plain", callbacks=[plain])
    train(tmp_path / "piped", GPipeStrategy(2), callbacks=[piped])
    lasts = [at for at in range(16) if at % 8 in (2, 5, 7)]
    assert [at for at, one in enumerate(piped.outputs) if one] == lasts
    assert [piped.outputs[at] for at in lasts] == [plain.outputs[at] for at in lasts]


@pytest.mark.parametrize("when", ["between epochs", "within one"])
def test_a_checkpoint_is_lightnings_and_goes_on_at_another_k(when: str, tmp_path: Path) -> None:
    """And without a pipe; its weights are those of the plain module."""
    how: Any = {"every_n_train_steps": 2} if when == "within one" else {}
    keep = ModelCheckpoint(tmp_path, filename="kept", save_top_k=1, **how)
    stops: Any = {"max_steps": 2} if when == "within one" else {"max_epochs": 1}
    begun = train(tmp_path / "a", GPipeStrategy(2), Quiet, enable_checkpointing=True, callbacks=[keep], **stops)
    file = tmp_path / "kept.ckpt"
    same_order: Any = {"loader": data()}
    loaded = Quiet.load_from_checkpoint(file, weights_only=False)
    assert all(torch.equal(value, begun.weights[name]) for name, value in loaded.state_dict().items())
    plain = train(tmp_path / "b", None, Quiet, ckpt_path=file, **same_order)
    check_same(train(tmp_path / "c", GPipeStrategy(3), Quiet, ckpt_path=file, **same_order), plain)
    if when == "between epochs":
        train(tmp_path / "d", GPipeStrategy(2), Quiet, max_epochs=1, enable_checkpointing=True, callbacks=[
            ModelCheckpoint(tmp_path, filename="ordered")
        ], **same_order)  # fmt: skip
        resumed = train(tmp_path / "e", GPipeStrategy(3), Quiet, ckpt_path=tmp_path / "ordered.ckpt", **same_order)
        never_stopped = train(tmp_path / "f", None, Quiet, **same_order)
        assert all(torch.equal(value, never_stopped.weights[name]) for name, value in resumed.weights.items())


def test_validating_testing_and_predicting_run_through_the_pipe(tmp_path: Path) -> None:
    with one_thread():
        strategy = GPipeStrategy(2)
        found, expected = trainer_of(tmp_path, strategy, logger=False), trainer_of(tmp_path, logger=False)
        some, other = OfAnyModel(), OfAnyModel()
        assert found.validate(some, data(10), verbose=False) == expected.validate(other, data(10), verbose=False)
        assert strategy.pipe is not None
        assert found.test(some, data(10), verbose=False) == expected.test(other, data(10), verbose=False)
        pairs = zip(found.predict(some, data(10)) or [], expected.predict(other, data(10)) or [], strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
    assert strategy.pipe.partitions == 2
    assert isinstance(some.net, Residual)


class Dropping(Quiet):
    def network(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, FEATURES), nn.Dropout(), nn.Linear(FEATURES, FEATURES), nn.Dropout(),
            nn.Linear(FEATURES, CLASSES),
        )  # fmt: skip


def test_dropout_is_the_same_for_every_k(tmp_path: Path) -> None:
    one, two, three = (train(tmp_path / str(k), GPipeStrategy(k), Dropping) for k in (1, 2, 3))
    check_same(two, one)
    check_same(three, one)


def step_of(body: Callable[[Classifier, Any, int], Any]) -> Any:
    class Other(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return body(self, batch, batch_idx)

    return Other


def without_grad(module: Classifier, batch: Any, at: int) -> Any:
    with torch.no_grad():
        return module(batch[0]).sum()


def under_autocast(module: Classifier, batch: Any, at: int) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return module(batch[0]).sum()


def counting(module: Any, batch: Any, at: int) -> Any:
    module.count = getattr(module, "count", 0) + 1
    loss = module(batch[0]).sum()
    module.count += 1
    return loss


def weights_before(module: Any, batch: Any, at: int) -> Any:
    return module(batch[0] * next(module.parameters()).mean()).sum()


def filling(module: Any, batch: Any, at: int) -> Any:
    """Calls the network with one tensor for all batches."""
    if at == 0:
        module.rows = torch.empty_like(batch[0])
    return module(module.rows.copy_(batch[0])).sum()


STEPS: dict[str, tuple[Callable[[Classifier, Any, int], Any], str]] = {
    "calls twice": (
        lambda module, batch, at: (module(batch[0]) + module(batch[0])).sum(),
        r"net twice .*\[model-called-twice\]",
    ),
    "calls parts": (lambda module, batch, at: module.net[0](batch[0]).sum(), r"\[model-not-called\]"),  # type: ignore[index]
    "no loss": (
        lambda module, batch, at: [module(batch[0]).sum(), None][at == 1],
        r"batch 1 .*\[training-step-without-loss\]",
    ),
    "skips": (
        lambda module, batch, at: module(batch[0]).sum() if at < 1 else None,
        r"batch 1 .*\[training-step-without-loss\]",
    ),
    "state": (counting, r"changes count .*\[state-before-and-after-network\]"),
    "weights before": (weights_before, r"\[weights-before-network\]"),
    "one tensor": (filling, r"batch 0 .*\[batch-overwritten\]"),
    "no_grad": (without_grad, r"\[network-under-own-mode\]"),
    "autocast": (under_autocast, r"\[network-under-own-mode\]"),
    "weights": (
        lambda module, batch, at: module(batch[0]).sum() + sum(one.sum() for one in module.net.parameters()),
        r"\[weight-of-different-stage\]",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_that_no_pipe_can_run_is_refused(name: str, tmp_path: Path) -> None:
    body, why = STEPS[name]
    with pytest.raises((ValueError, RuntimeError), match=why):
        train(tmp_path, GPipeStrategy(2), step_of(body))


class OneBuffer(IterableDataset[Any]):
    """Fills the same tensors for each batch, through torch or (unseen by torch) through numpy."""

    def __init__(self, *, by_numpy: bool) -> None:
        self.by_numpy = by_numpy

    def __iter__(self) -> Iterator[Any]:
        rows, labels = torch.empty(4, FEATURES), torch.empty(4, dtype=torch.long)
        for some, others in data(24):
            if self.by_numpy:
                rows.numpy()[:], labels.numpy()[:] = some.numpy(), others.numpy()
            else:
                rows.copy_(some), labels.copy_(others)
            yield rows, labels


@pytest.mark.parametrize("by_numpy", [False, True])
def test_a_loader_that_fills_the_same_tensors_again_is_refused(*, by_numpy: bool, tmp_path: Path) -> None:
    loader = DataLoader(OneBuffer(by_numpy=by_numpy), batch_size=None)
    with pytest.raises(ValueError, match=r"batch 0 .*\[batch-overwritten\]"):
        train(tmp_path / "piped", GPipeStrategy(2), Quiet, loader=loader)
    how: dict[str, Any] = {"accumulate_grad_batches": 1, "loader": loader}
    check_same(train(tmp_path / "m1", GPipeStrategy(2), Quiet, **how), train(tmp_path / "plain", None, Quiet, **how))


def test_the_same_batch_again_is_no_batch_that_was_written_over(tmp_path: Path) -> None:
    batch = next(iter(data()))
    batch[0][0, 0] = torch.nan
    train(tmp_path, GPipeStrategy(2), Quiet, loader=DataLoader(cast(Any, [batch] * 6), batch_size=None))


class DrawsTwice(DrawsBehind):
    def forward(self, rows: Tensor) -> Any:
        return super().forward(rows + 0.1 * torch.rand_like(rows))


class Augmented(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> Any:
        return torch.randn(FEATURES), at % CLASSES


DRAWN = r"\[random-before-and-after-network\]"


@pytest.fixture
def told_is_raised() -> Iterator[None]:
    with warnings.catch_warnings():
        for text in ("training_step uses random numbers", "on_after_backward"):
            warnings.filterwarnings("error", text, UserWarning)
        yield


@pytest.mark.usefixtures("told_is_raised")
def test_numbers_that_are_drawn_on_both_sides_are_told(tmp_path: Path) -> None:
    augmented: dict[str, Any] = {"loader": DataLoader(Augmented(), 4), "max_epochs": 1}
    with pytest.raises(UserWarning, match=DRAWN):
        train(tmp_path, GPipeStrategy(2), DrawsTwice)
    with pytest.raises(UserWarning, match=DRAWN):
        train(tmp_path, GPipeStrategy(2), DrawsBehind, **augmented)
    for kind, how in ((Classifier, {}), (DrawsBehind, {}), (Quiet, augmented)):
        expected = train(tmp_path / "plain", None, kind, **how)
        check_same(train(tmp_path / "piped", GPipeStrategy(2), kind, **how), expected)
    train(tmp_path, GPipeStrategy(2), DrawsTwice, accumulate_grad_batches=1)


class Noisy(Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None: ...


@pytest.mark.usefixtures("told_is_raised")
def test_a_hook_behind_each_backward_is_told_that_there_is_one_a_step(tmp_path: Path) -> None:
    with pytest.raises(UserWarning, match=r"\[hook-after-backward\]"):
        train(tmp_path, GPipeStrategy(2), Quiet, callbacks=[Noisy()])
    train(tmp_path, GPipeStrategy(2), Quiet, callbacks=[Noisy()], accumulate_grad_batches=1, fast_dev_run=True)


class Wrong(WithHead):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_all_mistakes_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does
    how: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    with pytest.raises(ValueError, match="2 processes") as told:
        train(tmp_path, GPipeStrategy(2), Wrong, **how)
    words = ("Name the network to split", "Manual optimization", "overrides backward()")
    assert [one for one in words if one not in str(told.value)] == []
    assert len(str(told.value).splitlines()) == 4
    with pytest.raises(ValueError, match="module='body'"):
        train(tmp_path, GPipeStrategy(2, module="body"), Classifier)


def test_arguments_that_are_the_trainers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"micro_batches= .*\npartition= "):
        GPipeStrategy(2, micro_batches=4, partition=2)


class Schedules(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.net.parameters(), 0.1)]


def test_what_changes_m_and_several_optimizers_are_refused(tmp_path: Path) -> None:
    callback = GradientAccumulationScheduler({0: 2, 1: 4})
    with pytest.raises(ValueError, match="accumulate_grad_batches changed from 1 to 2"):
        train(tmp_path, GPipeStrategy(2), callbacks=[callback], accumulate_grad_batches=1)
    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        train(tmp_path, GPipeStrategy(2), Schedules)
    with pytest.raises(Exception, match="is not supported for manual optimization"):
        train(tmp_path, GPipeStrategy(2), Wrong)


class Mine(Exception):  # noqa: N818
    pass


def raised(what: type[BaseException]) -> Any:
    def body(module: Classifier, batch: Any, at: int) -> Any:
        scores = module(batch[0])
        if at == 4:
            raise what
        return scores.sum()

    return step_of(body)


def test_a_users_own_exception_keeps_its_type_and_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(Mine) as caught:
        train(tmp_path, GPipeStrategy(2), raised(Mine))
    assert "micro-batch 1" in "".join(caught.value.__notes__)


def test_ctrl_c_leaves_no_thread(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):  # as Lightning does it
            train(tmp_path, GPipeStrategy(2), raised(KeyboardInterrupt))
    finally:
        signal.signal(signal.SIGINT, handler)


class ByHand(pl.LightningModule):
    """Follows the advice for manual optimization: no strategy, and a pipe in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        layers: Any = Classifier().net
        self.pipe = gpipe.GPipe(layers, partitions=2, micro_batches=2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.log("loss", self.pipe.step(batch[0], batch[1], cross_entropy))
        optimizer.step()

    def teardown(self, stage: str) -> None:
        self.pipe.close()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_pipe_in_a_module_that_optimizes_by_hand(tmp_path: Path) -> None:
    how: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_val_batches": 0}
    found = train(tmp_path, None, ByHand, loader=data(), **how)
    with one_thread(), gpipe.GPipe(cast(Any, Classifier().net), partitions=1, micro_batches=2) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        for batch in [*data(), *data()]:
            optimizer.zero_grad()
            pipe.step(batch[0], batch[1], cross_entropy)
            optimizer.step()
    assert all(torch.equal(value, found.weights[f"pipe.{name}"]) for name, value in pipe.state_dict().items())


def test_who_lacks_lightning_is_told_what_to_install() -> None:
    code = "import sys; sys.modules['lightning'] = None; import gpipe.integrations.lightning"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert ended.returncode == 1
    assert "pip install '.[lightning]'" in ended.stderr


def test_the_script_of_the_page_prints_the_same_without_the_strategy(tmp_path: Path) -> None:
    script = (ROOT / "examples" / "lightning" / "classify.py").read_text()
    lines = script.splitlines()
    plain = [line for line in lines if "GPipeStrategy" not in line]
    assert len(plain) == len(lines) - 2
    told = []
    for name, text in (("piped", script), ("plain", "\n".join(plain))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "script.py").write_text(text)
        ended = progress.run([sys.executable, "script.py"], cwd=folder, env={**os.environ, **ONE_THREAD})
        assert ended.returncode == 0, ended.stdout
        told.append([line for line in ended.stdout.splitlines() if ": loss " in line])
        assert list((folder / "next_letter").glob("*.ckpt"))
    assert len(told[0]) == 8
    assert told[0] == told[1]
