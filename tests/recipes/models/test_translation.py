import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.models import transformer
from gpipe.recipes.models.transformer import EncoderLayer
from tests.support.plain_loop import Tree, assert_same_bits, plain_loop, same_bits
from tests.support.shared_weights import lent

VOCAB = 13
tiny = partial(transformer, 2, 20, 3, model_dim=12, head_dim=5, vocab=VOCAB)


def words(rows: int, length: int) -> Tensor:
    """Random sentences without padding."""
    return torch.randint(1, VOCAB, (rows, length))


def padded(sentence: Tensor, length: int) -> Tensor:
    return F.pad(sentence, (0, length - sentence.shape[1]))


def run(network: list[nn.Module], source: Tensor, target: Tensor) -> Tensor:
    logits = gpipe.Sequential(*network)((source, target))
    assert isinstance(logits, Tensor)
    return logits


@pytest.fixture
def quiet() -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer.eval() for layer in tiny()]


@pytest.mark.parametrize(
    ("layers", "ffn_dim", "heads", "matrices", "count"),
    [
        (6, 8192, 16, 3, 473_745_920),
        (6, 8192, 16, 2, 408_209_920),
        (6, 8192, 16, 1, 342_673_920),
        (24, 8192, 16, 3, 1_304_955_392),
        (24, 8192, 16, 2, 1_239_419_392),
        (12, 16384, 32, 3, 1_304_771_072),
        (32, 16384, 32, 3, 3_151_596_032),
        (64, 16384, 32, 3, 6_106_515_968),
        (64, 16384, 32, 2, 6_040_979_968),
    ],
)
def test_counts_of_parameters(layers: int, ffn_dim: int, heads: int, matrices: int, count: int) -> None:
    with torch.device("meta"):
        network = transformer(layers, ffn_dim, heads, matrices=matrices)
    assert len(network) == 2 * layers + 3
    assert sum(p.numel() for p in nn.Sequential(*network).parameters()) == count


def test_transformer_base_has_the_published_count() -> None:
    with torch.device("meta"):
        network = nn.Sequential(*transformer(6, 2048, 8, model_dim=512))
    assert sum(p.numel() for p in network.parameters()) == 142_508_544


@pytest.mark.parametrize("matrices", [1, 2, 3])
def test_so_many_matrices_have_a_vector_for_each_word(matrices: int) -> None:
    first, _, _, bridge, *_, head = tiny(matrices=matrices)
    source, target = (layer.get_parameter("embedding.weight") for layer in (first, bridge))
    assert len({source, target, head.weight}) == matrices
    assert (target is head.weight) == (matrices < 3)


@pytest.mark.parametrize("matrices", [1, 2, 3])
def test_every_parameter_learns(matrices: int) -> None:
    torch.manual_seed(0)
    network = tiny(matrices=matrices)
    logits = run(network, words(2, 7), words(2, 4))
    assert logits.shape == (2, 4, VOCAB)
    F.cross_entropy(logits.flatten(0, 1), words(2, 4).flatten()).backward()
    idle = [name for name, p in nn.Sequential(*network).named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in idle if "key.bias" not in name] == []  # a softmax does not feel a shift of all keys


def test_a_padded_batch_gives_the_logits_of_each_row_alone(quiet: list[nn.Module]) -> None:
    lengths = [(7, 2), (3, 5), (1, 1)]
    pairs = [(words(1, s), words(1, t)) for s, t in lengths]
    batch = [torch.cat([padded(sentence, 9) for sentence in side]) for side in zip(*pairs, strict=True)]
    together = run(quiet, *batch)
    for row, (source, target) in enumerate(pairs):
        torch.testing.assert_close(together[row, : target.shape[1]], run(quiet, source, target)[0])


def test_padding_changes_no_gradient(quiet: list[nn.Module]) -> None:
    source, target, labels = words(2, 4), words(2, 3), words(2, 3)
    gradients = []
    for more in (0, 3):
        network = copy.deepcopy(quiet)
        logits = run(network, padded(source, 4 + more), padded(target, 3 + more))
        F.cross_entropy(logits.flatten(0, 1), padded(labels, 3 + more).flatten(), ignore_index=0).backward()
        gradients.append([p.grad for p in nn.Sequential(*network).parameters()])
    for alone, with_padding in zip(*gradients, strict=True):
        torch.testing.assert_close(alone, with_padding)


def test_a_source_of_padding_alone_is_one_word(quiet: list[nn.Module]) -> None:
    target, source = words(2, 3), padded(words(2, 2), 6)
    source[1] = 0
    logits = run(quiet, source, target)
    torch.testing.assert_close(logits[1:], run(quiet, torch.zeros(1, 1, dtype=torch.long), target[1:]))
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in nn.Sequential(*quiet).parameters())


def test_another_token_may_be_the_padding() -> None:
    torch.manual_seed(0)
    network = [layer.eval() for layer in tiny(pad=VOCAB - 1)]
    source, target = words(1, 4) % (VOCAB - 1), words(1, 3)
    torch.testing.assert_close(
        run(network, source, target), run(network, F.pad(source, (0, 2), value=VOCAB - 1), target)
    )


def test_a_later_target_token_does_not_change_earlier_logits(quiet: list[nn.Module]) -> None:
    source, target = words(2, 6), words(2, 8)
    changed = target.clone()
    changed[:, 5] = target[:, 5] % (VOCAB - 1) + 1
    before, after = run(quiet, source, target), run(quiet, source, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(dim=2).any()


def test_every_word_of_the_source_changes_every_logit(quiet: list[nn.Module]) -> None:
    source, target = words(1, 6), words(1, 4)
    before = run(quiet, source, target)
    for at in range(6):
        changed = source.clone()
        changed[:, at] = source[:, at] % (VOCAB - 1) + 1
        assert not torch.isclose(before, run(quiet, changed, target)).all(dim=2).any()


def test_dropout_acts_in_training_only(quiet: list[nn.Module]) -> None:
    source, target = words(2, 4), words(2, 3)
    assert torch.equal(run(quiet, source, target), run(quiet, source, target))
    noisy = [layer.train() for layer in quiet]
    assert not torch.equal(run(noisy, source, target), run(noisy, source, target))


@pytest.mark.parametrize("scaled", [False, True])
def test_feed_forward_weights_start_smaller_the_deeper_the_stack(scaled: bool) -> None:
    network = transformer(16, 64, 2, model_dim=32, head_dim=16, vocab=VOCAB, scaled_init=scaled)
    bound = (6 / (32 + 64)) ** 0.5 / (4 if scaled else 1)
    for layer in (network[1], network[16], network[18], network[33]):
        for matrix in ("ffn.0.weight", "ffn.2.weight"):
            assert 0.9 * bound < layer.get_parameter(matrix).abs().max() <= bound
        assert layer.get_parameter("attention.query.weight").abs().max() > 0.9 * (6 / (32 + 32)) ** 0.5


def test_logits_are_clipped_in_training_only() -> None:
    torch.manual_seed(0)
    network = tiny(clip_logits=0.5, dropout=0.0)
    source, target = words(2, 4), words(2, 3)
    clipped = run(network, source, target)
    whole = run([layer.eval() for layer in network], source, target)
    assert whole.abs().max() > 0.5
    assert torch.equal(clipped, whole.clamp(-0.5, 0.5))


@pytest.mark.parametrize("layers", [2, 64])
def test_logits_start_at_unit_scale_at_any_depth(layers: int) -> None:
    torch.manual_seed(0)
    network = transformer(layers, 20, 3, model_dim=12, head_dim=5, vocab=VOCAB)
    with torch.no_grad():
        assert 0.5 < run(network, words(8, 9), words(8, 9)).std().item() < 2


def loss_of(logits: Tree, labels: Tree) -> Tensor:
    assert isinstance(logits, Tensor)
    assert isinstance(labels, Tensor)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def batch_of(rows: int, source: int, target: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Sentences of different lengths, made as long as these by padding."""
    given, wanted = words(rows, source), words(rows, target + 1)
    for row in range(rows):
        given[row, max(1, source - row) :] = 0
        wanted[row, max(2, target + 1 - row) :] = 0
    return (given, wanted[:, :-1]), wanted[:, 1:]


@pytest.mark.parametrize("matrices", [1, 2, 3])
def test_it_trains_to_the_bits_of_the_plain_loop_for_every_cut_and_changing_lengths(matrices: int) -> None:
    torch.manual_seed(0)
    layers = tiny(matrices=matrices, clip_logits=1.0)
    batches = [batch_of(5, 6, 4), batch_of(4, 3, 8)]
    plain = copy.deepcopy(layers)
    losses = []
    for step, (inputs, labels) in enumerate(batches):
        with lent(plain) as own:
            losses.append(plain_loop(own, inputs, labels, loss_of, micro_batches=2, seed=3, step=step))
    for partitions, remat in [(1, "always"), (2, "always"), (3, "except_last"), (3, "never")]:
        with gpipe.GPipe(copy.deepcopy(layers), partitions, 2, remat=remat, seed=3) as pipe:
            for (inputs, labels), loss in zip(batches, losses, strict=True):
                assert same_bits(pipe.step(inputs, labels, loss_of, reduction="mean"), loss)
            assert_same_bits(pipe, plain)


def test_the_memory_is_stashed_once_for_all_decoder_layers() -> None:
    network = tiny()
    stashed = [name for layer in network for name in getattr(layer, "stash", ())]
    assert stashed == ["target", "mask", "memory"]
    assert sum("memory" in getattr(layer, "pop", ()) for layer in network) == 2
    assert sum(isinstance(layer, EncoderLayer) for layer in network) == 2


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="layers=0") as refused:
        transformer(0, heads=0, model_dim=15, vocab=5, matrices=4, clip_logits=0.0, pad=5)
    text = str(refused.value)
    assert all(name in text for name in ("heads=0", "model_dim=15", "matrices=4", "clip_logits=0.0", "pad=5"))
    assert len(text.splitlines()) == 6
