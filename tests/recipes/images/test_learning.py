"""All that images can be learnt with, beside a loop that everybody would write: the same bits."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gpipe
from gpipe.models import amoebanet_d, set_keep
from gpipe.recipes.data.augment import batches, cutout, flip, jitter
from gpipe.recipes.data.images import load_digits
from gpipe.recipes.images import DigitsRecipe
from gpipe.recipes.recipe import AVERAGE
from tests.support.plain_loop import one_thread, run_layers
from tests.support.small_images import EVERYTHING, OPTIONS, prepared, same, shown, train, weights

STEPS = replace(EVERYTHING, steps=3)
"""The second epoch has one step."""
RATES = [0.02 * 2 / 3, 0.02, 0.02 * 0.5]
"""It rises for a step and a half, and is halved after every second step."""
KEEPS = [1.0, 0.9, 0.8]
AVERAGING = [0.1, 0.15, 0.15]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run of one partition showed and left."""
    out = tmp_path_factory.mktemp("one")
    return train(replace(STEPS, partitions=1, out=out))[1], out


def mini_batches() -> Iterator[tuple[Tensor, Tensor]]:
    digits, classes = load_digits(67, classes=(0, 1, 2), per_class=6)[0].tensors
    for epoch in (1, 2):
        for rows in batches(18, 8, seed=0, epoch=epoch):
            images = jitter(digits[rows], rows, seed=0, epoch=epoch)
            images = flip(images, rows, seed=0, epoch=epoch)
            yield cutout(images, rows, 9, seed=0, epoch=epoch), classes[rows]


def plain_loop() -> tuple[list[float], nn.Module, dict[str, Tensor]]:
    """Losses, the network and the averages of its weights after three steps."""
    torch.manual_seed(0)
    network = nn.Sequential(*amoebanet_d(3, 16, 3, aux_head=True, image_size=67)).train()
    optimizer = torch.optim.RMSprop(network.parameters(), lr=0.1, alpha=0.9, eps=0.1, momentum=0.9)
    losses, averages = [], dict[str, Tensor]()
    for step, (images, classes) in zip(range(3), mini_batches(), strict=False):
        set_keep(network, KEEPS[step])
        total = torch.zeros(())
        for number, (some, right) in enumerate(zip(images.chunk(2), classes.chunk(2), strict=True)):
            output = run_layers(list(network), some, seed=0, step=step, micro_batch=number)
            assert isinstance(output, tuple)
            own, auxiliary = (cross_entropy(logits, right, label_smoothing=0.1) for logits in output)
            loss = own + 0.4 * auxiliary
            loss.backward(torch.tensor(0.5))
            total += 0.5 * loss.detach()
        for weight in network.parameters():
            assert weight.grad is not None
            if weight.dim() > 1:
                weight.grad.add_(weight.detach(), alpha=1e-2)
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        for name, weight in network.named_parameters():
            average, kept = averages.get(name, weight.detach()), AVERAGING[step]
            averages[name] = kept * average + (1 - kept) * weight.detach()
    return losses, network, averages


def test_weights_and_losses_are_those_of_a_loop_by_hand(one: tuple[str, Path]) -> None:
    with one_thread():
        losses, network, averages = plain_loop()
    text, out = one
    assert [line.split()[3] for line in shown(text)] == [f"{sum(losses[:2]) / 2:.6g}", f"{losses[2]:.6g}"]
    assert same(gpipe.load(out / "checkpoints").state_dict(), network.state_dict())
    left = weights(out)
    expected = network.state_dict() | averages
    assert left.keys() == expected.keys()
    torch.testing.assert_close(left, dict(expected), rtol=1e-5, atol=1e-6)
    assert not same(left, network.state_dict())


@pytest.mark.parametrize("k", [2, 3])
def test_another_number_of_partitions_gives_the_same_bits(k: int, one: tuple[str, Path], tmp_path: Path) -> None:
    text = train(replace(STEPS, partitions=k, out=tmp_path))[1]
    assert shown(text) == shown(one[0])
    assert same(weights(tmp_path), weights(one[1]))


def test_a_run_that_is_interrupted_within_an_epoch_goes_on_to_the_same_bits(
    one: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averages, which a checkpoint keeps, included; and at another number of partitions."""

    def told_to_end(self: DigitsRecipe, pipe: gpipe.GPipe, step: int, steps: int) -> None:
        before_step(self, pipe, step, steps)
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before_step = DigitsRecipe.before_step
    options = replace(STEPS, partitions=2, out=tmp_path, checkpoint_every=9)
    with monkeypatch.context() as patch:
        patch.setattr(DigitsRecipe, "before_step", told_to_end)
        with pytest.raises(SystemExit) as ended:
            train(options)
    assert ended.value.code == 130
    assert not (tmp_path / "model.safetensors").exists()
    job = prepared(replace(options, resume=True))
    kept = [state[AVERAGE] for state in job.optimizer.state.values()]
    assert len(kept) == len(list(job.pipe.parameters()))
    assert job.pipe.step_number == 2
    text = train(replace(options, partitions=1, resume=True))[1]
    assert "Resuming after" in text
    assert shown(text)[-1] == shown(one[0])[-1]
    assert same(weights(tmp_path), weights(one[1]))


def test_without_momentum_sgd_is_not_nesterovs() -> None:
    recipe = DigitsRecipe(replace(OPTIONS, momentum=0.0))
    group = recipe.optimizer(nn.Sequential(*recipe.layers()).parameters()).param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0, False)


def test_in_bfloat16_losses_differ_a_little_and_do_not_depend_on_partitions(tmp_path: Path) -> None:
    options = replace(OPTIONS, image_size=19, dropout=0.0, learning_rate=0.01)
    single = train(replace(options, out=tmp_path / "single"))[0]
    half = [train(replace(options, bf16=True, partitions=k, out=tmp_path / str(k)))[0] for k in (1, 2)]
    assert [epoch.loss for epoch in half[0]] == [epoch.loss for epoch in half[1]] != [epoch.loss for epoch in single]
    assert half[0][0].loss == pytest.approx(single[0].loss, rel=0.1)
    assert same(weights(tmp_path / "1"), weights(tmp_path / "2"))
    dtypes = {value.dtype for value in weights(tmp_path / "1").values()}
    assert dtypes == {torch.float32, torch.int64}  # the latter is BatchNorm's count of mini-batches
