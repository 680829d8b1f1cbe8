from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe.models import transformer_lm

tiny = partial(transformer_lm, model_dim=16, ffn_dim=32, heads=4, vocab=11)


def count(network: list[nn.Module]) -> int:
    return sum(p.numel() for p in nn.Sequential(*network).parameters())


@pytest.mark.parametrize(("layers", "total"), [(3, 282_179_008), (13, 785_762_368), (103, 5_318_012_608)])
def test_counts_of_parameters(layers: int, total: int) -> None:
    with torch.device("meta"):
        network = transformer_lm(layers)
    assert len(network) == layers + 2
    assert [count([block]) for block in network[1:-1]] == [50_358_336] * layers
    assert count(network) == total


def test_a_tied_head_uses_the_very_parameter_of_the_embedding() -> None:
    with torch.device("meta"):
        network = transformer_lm(3, tied=True)
    assert network[-1].weight is network[0].weight
    assert count(network) == 282_179_008 - 32_000 * 2048


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_learns(tied: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*tiny(2, tied=tied))
    tokens = torch.randint(11, (2, 9))
    logits = network(tokens[:, :-1])
    assert logits.shape == (2, 8, 11)
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_later_token_does_not_change_earlier_logits() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*tiny(3)).eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    with torch.no_grad():
        before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(dim=2).any()


def test_positions_matter_and_any_length_will_do() -> None:
    torch.manual_seed(0)
    embedding = tiny(1)[0]
    same = embedding(torch.zeros(1, 50, dtype=torch.long))[0]
    assert len(torch.unique(same, dim=0)) == 50
    assert torch.equal(embedding(torch.zeros(1, 3, dtype=torch.long))[0], same[:3])


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(11, (2, 8))
    quiet = nn.Sequential(*tiny(1))
    assert torch.equal(quiet(tokens), quiet(tokens))
    noisy = nn.Sequential(*tiny(1, dropout=0.5))
    assert not torch.equal(noisy(tokens), noisy(tokens))
    noisy.eval()
    assert torch.equal(noisy(tokens), noisy(tokens))


@pytest.mark.parametrize("layers", [2, 128])
def test_logits_start_at_unit_scale_at_any_depth(layers: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*tiny(layers))
    with torch.no_grad():
        logits = network(torch.randint(11, (8, 16)))
    assert 0.5 < logits.std().item() < 2


@pytest.mark.parametrize(("scaled", "factor"), [(True, 4), (False, 1)])
def test_feed_forward_weights_start_smaller_the_deeper_the_stack(scaled: bool, factor: int) -> None:
    bound = (6 / (16 + 32)) ** 0.5 / factor
    for block in tiny(16, scaled_init=scaled)[1:-1]:
        assert 0.9 * bound < block.get_parameter("ffn.0.weight").abs().max() <= bound


def test_logits_are_clipped_in_training_only() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*tiny(1, clip_logits=0.5))
    tokens = torch.randint(11, (2, 8))
    clipped, whole = network(tokens), network.eval()(tokens)
    assert whole.abs().max() > 0.5
    assert torch.equal(clipped, whole.clamp(-0.5, 0.5))


def test_clipping_all_logits_away_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_logits=0"):
        tiny(1, clip_logits=0)


@pytest.mark.parametrize(("layers", "dim", "heads"), [(0, 16, 4), (1, 18, 4), (1, 15, 3)])
def test_impossible_sizes_are_refused(layers: int, dim: int, heads: int) -> None:
    with pytest.raises(ValueError, match=f"got layers={layers}, model_dim={dim}, heads={heads}"):
        transformer_lm(layers, model_dim=dim, heads=heads, vocab=5)
