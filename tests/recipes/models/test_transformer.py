"""The Transformers: what the paper counts, and what each position may know."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.models import transformer, transformer_lm

VOCAB = 13
Build = Callable[..., list[nn.Module]]
tiny_lm = partial(transformer_lm, model_dim=16, ffn_dim=32, heads=4, vocab=VOCAB)
tiny = partial(transformer, ffn_dim=20, heads=3, model_dim=12, head_dim=5, vocab=VOCAB, dropout=0.0)
BOTH = pytest.mark.parametrize("build", [tiny_lm, tiny], ids=["lm", "translation"])


def words(rows: int, length: int) -> Tensor:
    """Random sentences without padding."""
    return torch.randint(1, VOCAB, (rows, length))


def padded(sentence: Tensor, length: int) -> Tensor:
    return F.pad(sentence, (0, length - sentence.shape[1]))


def run(network: list[nn.Module], target: Tensor, source: Tensor | None = None) -> Tensor:
    """Logits of targets, by default behind two words as the source."""
    source = torch.arange(1, 3).expand(len(target), -1) if source is None else source
    logits = gpipe.Sequential(*network)((source, target) if hasattr(network[0], "stash") else target)
    assert isinstance(logits, Tensor)
    return logits


def evaluated(network: list[nn.Module]) -> list[nn.Module]:
    return [layer.eval() for layer in network]


@pytest.fixture
def quiet() -> list[nn.Module]:
    torch.manual_seed(0)
    return evaluated(tiny(2, dropout=0.1))


def count(network: list[nn.Module]) -> int:
    return sum(p.numel() for p in nn.Sequential(*network).parameters())


def test_counts_of_parameters() -> None:
    with torch.device("meta"):
        for layers, total in ((3, 282_179_008), (13, 785_762_368), (103, 5_318_012_608)):
            network = transformer_lm(layers)
            assert (len(network), count(network)) == (layers + 2, total)
            assert [count([block]) for block in network[1:-1]] == [50_358_336] * layers
        assert count(transformer_lm(3, tied=True)) == 282_179_008 - 32_000 * 2048
        for sizes, matrices, total in (
            ((6, 8192, 16), 3, 473_745_920),
            ((6, 8192, 16), 2, 408_209_920),
            ((6, 8192, 16), 1, 342_673_920),
            ((24, 8192, 16), 3, 1_304_955_392),
            ((24, 8192, 16), 2, 1_239_419_392),
            ((12, 16384, 32), 3, 1_304_771_072),
            ((32, 16384, 32), 3, 3_151_596_032),
            ((64, 16384, 32), 3, 6_106_515_968),
            ((64, 16384, 32), 2, 6_040_979_968),
        ):
            network = transformer(*sizes, matrices=matrices)
            assert (len(network), count(network)) == (2 * sizes[0] + 3, total)
        assert count(transformer(6, 2048, 8, model_dim=512)) == 142_508_544  # as published of Transformer base


def test_so_many_matrices_have_a_vector_for_each_word() -> None:
    for matrices in (1, 2, 3):
        first, _, bridge, _, head = tiny(1, matrices=matrices)
        source, target = (layer.get_parameter("embedding.weight") for layer in (first, bridge))
        assert len({source, target, head.weight}) == matrices
        assert (target is head.weight) == (matrices < 3)
    tied = tiny_lm(3, tied=True)
    assert tied[-1].weight is tied[0].weight


@pytest.mark.parametrize(
    "network",
    [
        *(lambda tied=tied: tiny_lm(2, tied=tied) for tied in (False, True)),
        *(lambda matrices=matrices: tiny(2, matrices=matrices) for matrices in (1, 2, 3)),
    ],
)
def test_every_parameter_learns(network: Callable[[], list[nn.Module]]) -> None:
    torch.manual_seed(0)
    layers = network()
    logits = run(layers, words(2, 8))
    assert logits.shape == (2, 8, VOCAB)
    F.cross_entropy(logits.flatten(0, 1), words(2, 8).flatten()).backward()
    idle = [name for name, p in nn.Sequential(*layers).named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in idle if "key.bias" not in name] == []  # a softmax does not feel a shift of all keys


@BOTH
def test_a_later_token_does_not_change_earlier_logits(build: Build) -> None:
    torch.manual_seed(0)
    network, tokens = evaluated(build(3)), words(2, 8)
    changed = tokens.clone()
    changed[:, 5] = tokens[:, 5] % (VOCAB - 1) + 1
    before, after = run(network, tokens), run(network, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(dim=2).any()


@BOTH
def test_dropout_and_clipping_act_in_training_only(build: Build) -> None:
    torch.manual_seed(0)
    tokens = words(2, 8)
    clipped = build(1, clip_logits=0.5)
    assert torch.equal(run(clipped, tokens), run(clipped, tokens))
    whole = run(evaluated(copy.deepcopy(clipped)), tokens)
    assert whole.abs().max() > 0.5
    assert torch.equal(run(clipped, tokens), whole.clamp(-0.5, 0.5))
    noisy = build(1, dropout=0.5)
    assert not torch.equal(run(noisy, tokens), run(noisy, tokens))
    assert torch.equal(run(evaluated(noisy), tokens), run(noisy, tokens))


@BOTH
@pytest.mark.parametrize("layers", [2, 64])
def test_logits_start_at_unit_scale_at_any_depth(build: Build, layers: int) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        assert 0.5 < run(build(layers), words(8, 16)).std().item() < 2


@pytest.mark.parametrize("scaled", [False, True])
def test_feed_forward_weights_start_smaller_the_deeper_the_stack(scaled: bool) -> None:
    stacks = [
        tiny_lm(16, model_dim=32, ffn_dim=64, scaled_init=scaled)[1:-1],
        [tiny(16, model_dim=32, ffn_dim=64, head_dim=16, scaled_init=scaled)[at] for at in (1, 16, 18, 33)],
    ]
    bound = (6 / (32 + 64)) ** 0.5 / (4 if scaled else 1)
    for layer in (layer for stack in stacks for layer in stack):
        for matrix in ("ffn.0.weight", "ffn.2.weight"):
            assert 0.9 * bound < layer.get_parameter(matrix).abs().max() <= bound
    assert stacks[1][0].get_parameter("attention.query.weight").abs().max() > 0.9 * (6 / (32 + 48)) ** 0.5


def test_a_padded_batch_gives_the_logits_of_each_row_alone(quiet: list[nn.Module]) -> None:
    pairs = [(words(1, source), words(1, target)) for source, target in ((7, 2), (3, 5), (1, 1))]
    sources, targets = (torch.cat([padded(one, 9) for one in side]) for side in zip(*pairs, strict=True))
    together = run(quiet, targets, sources)
    for row, (source, target) in enumerate(pairs):
        torch.testing.assert_close(together[row, : target.shape[1]], run(quiet, target, source)[0])
    other = evaluated(tiny(2, pad=VOCAB - 1))
    source = words(1, 4) % (VOCAB - 1)
    longer = F.pad(source, (0, 2), value=VOCAB - 1)
    torch.testing.assert_close(run(other, targets, source.expand(3, -1)), run(other, targets, longer.expand(3, -1)))


def test_a_source_of_padding_alone_is_one_word(quiet: list[nn.Module]) -> None:
    target, source = words(2, 3), padded(words(2, 2), 6)
    source[1] = 0
    logits = run(quiet, target, source)
    torch.testing.assert_close(logits[1:], run(quiet, target[1:], torch.zeros(1, 1, dtype=torch.long)))
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in nn.Sequential(*quiet).parameters())


def test_every_word_of_the_source_changes_every_logit(quiet: list[nn.Module]) -> None:
    source, target = words(1, 6), words(1, 4)
    before = run(quiet, target, source)
    for at in range(6):
        changed = source.clone()
        changed[:, at] = source[:, at] % (VOCAB - 1) + 1
        assert not torch.isclose(before, run(quiet, target, changed)).all(dim=2).any()


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="layers=0") as refused:
        transformer(0, heads=0, model_dim=15, vocab=5, matrices=4, clip_logits=0.0, pad=5)
    text = str(refused.value)
    assert all(name in text for name in ("heads=0", "model_dim=15", "matrices=4", "clip_logits=0.0", "pad=5"))
    assert len(text.splitlines()) == 6
    with pytest.raises(ValueError, match="clip_logits=0"):
        tiny_lm(1, clip_logits=0)
    for layers, dim, heads in ((0, 16, 4), (1, 18, 4), (1, 15, 3)):
        sizes: dict[str, Any] = {"model_dim": dim, "heads": heads}
        with pytest.raises(
            ValueError, match=f"layers={layers}, model_dim={dim}, heads={heads} are not a Transformer"
        ):
            transformer_lm(layers, vocab=5, **sizes)
