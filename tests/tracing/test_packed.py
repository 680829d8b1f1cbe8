"""Tests that packed sequences train as in the unsplit model, and that their offsets are never split like rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

import gpipe
from tests.support.plain_loop import one_thread, same_bits, weights_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.digests import Digests, digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

WORDS, WIDTH = 20, 8
LENGTHS = ((3, 5), (4, 2, 6, 3), (9,))
"""Of the sequences in each micro-batch."""

Batch = dict[str, Any]


class Block(nn.Module):
    """Attention within each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        sequence = torch.searchsorted(offsets, places, right=True)
        mask = (sequence[:, None] == sequence) & (places[:, None] >= places)
        query, key, value = self.into(x).chunk(3, -1)
        made: Tensor = x + self.out(scaled_dot_product_attention(query, key, value, attn_mask=mask))
        return made


class Packed(nn.Module):
    """Predicts the next token, and computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(
        self, input_ids: Tensor, cu_seq_lens_q: Tensor, max_length_q: int, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        assert int(cu_seq_lens_q[-1]) == input_ids.shape[1]
        assert max_length_q == int(cu_seq_lens_q.diff().max())
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cu_seq_lens_q)
        output = self.head(x)
        if labels is None:
            return {"logits": output}
        return {"loss": cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": output}


def packed_model() -> Packed:
    with weights_of(3):
        return Packed()


def packed(lengths: Sequence[int], seed: int) -> Batch:
    """Returns a batch like DataCollatorWithFlattening of transformers: first tokens of sequences have no label."""
    words = torch.randint(WORDS, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    labels = words.index_fill(1, offsets[:-1], -100)
    return {"input_ids": words, "labels": labels, "cu_seq_lens_q": offsets, "max_length_q": max(lengths)}


def packs(step: int = 0) -> list[Batch]:
    return [packed(lengths, 10 * step + m) for m, lengths in enumerate(LENGTHS)]


def piped(partitions: int, **how: Any) -> gpipe.GPipe:
    sample = gpipe.MicroBatches(packs())
    return pipe_by_costs(packed_model(), partitions, len(LENGTHS), sample=sample, costs="params", **how)


def trained(pipe: gpipe.GPipe) -> tuple[list[float], Digests]:
    """Returns the losses and this process's gradients."""
    with pipe:
        losses = [pipe.step(gpipe.MicroBatches(packs(step))).item() for step in range(2)]
        return losses, digests({name: one.grad for name, one in pipe.named_parameters()})


def train_rank(rank: int, world: int, schedule: str) -> tuple[list[float], Digests]:
    return trained(piped(world, driver="process", schedule=schedule))


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_packs_with_offsets_of_their_own_train_as_the_model_weighed_by_labels(partitions: int, driver: str) -> None:
    parts = packs()
    with piped(partitions, driver=driver) as pipe:
        assert pipe.verify(gpipe.MicroBatches(parts), against="model").equal
        loss = pipe.step(gpipe.MicroBatches(parts))
    losses = [packed_model()(**part)["loss"].detach() for part in parts]
    counts = [(part["labels"][:, 1:] != -100).sum() for part in parts]
    torch.testing.assert_close(loss, sum(map(torch.mul, losses, counts)) / sum(counts))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_so_they_do_over_processes(schedule: str, pool: WorkerPool) -> None:
    expected, whole = trained(piped(1, driver="lockstep"))
    ranks = answers(pool.run(train_rank, schedule, world=2))
    for losses, found in ranks:
        assert losses == expected
        assert found.items() <= whole.items()
    assert {name for _, found in ranks for name in found} == whole.keys()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_pack_is_one_micro_batch(micro_batches: int) -> None:
    # It was refused with the advice to wrap the offsets.
    batch = packed(LENGTHS[1], 5)
    with pipe_by_costs(packed_model(), 2, micro_batches, sample=packs()[0], costs="params") as pipe, one_thread():
        assert same_bits(pipe.step(batch), packed_model()(**batch)["loss"].detach())


def test_that_halves_of_one_row_have_no_loss_is_not_told() -> None:
    # Halves of one row were tried for how the loss averages: the second had no rows, and the model failed on it.
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = packed_model()

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            starts = (labels[0] == -100).nonzero()[:, 0]
            offsets = torch.cat([starts, torch.tensor([input_ids.shape[1]])])
            return self.inner(input_ids, offsets, int(offsets.diff().max()), labels)

    batch = {key: one for key, one in packs()[0].items() if key in ("input_ids", "labels")}
    with pipe_by_costs(Packs(), 2, 8, sample=batch, costs="params") as pipe:
        pipe.step(batch)
        assert not [finding for finding in pipe.findings if "halves" in finding]


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "x": self.linear(given["x"])}


@dataclass
class Meta:
    starts: object


TOKENS = torch.zeros(6, 4)
OFFSETS = torch.tensor([0, 1, 2, 3, 4, 6])


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        ({"x": TOKENS, "cu_seqlens": OFFSETS}, "['cu_seqlens']"),  # as many as there are rows
        ({"cu_seqlens": OFFSETS[:4], "x": TOKENS}, "['cu_seqlens']"),
        ({"x": TOKENS, "cu_seqlens": [0, 2, 6]}, "['cu_seqlens']"),
        ({"x": TOKENS, "kwargs": {"cu_seq_lens_k": OFFSETS[[0, 5]]}}, "['kwargs']['cu_seq_lens_k']"),
        ({"x": TOKENS, "more": (OFFSETS[[0, 2, 5]], None)}, "['more'][0]"),  # by what they are, in the other cases
        ({"x": TOKENS, "more": ([0, 2, 2, 6], None)}, "['more'][0]"),
        ({"x": TOKENS, "more": [torch.tensor(0), torch.tensor(6)]}, "['more']"),
        ({"x": TOKENS, "more": Meta((0, 5, 6))}, "['more'].starts"),
        ({"x": TOKENS, "more": SimpleNamespace(inner=Meta([0, 5, 6]))}, "['more'].inner.starts"),
    ],
)
def test_offsets_of_rows_that_would_be_split_are_refused(inputs: dict[str, Any], name: str) -> None:
    # As many offsets as rows were split as rows, and a list went whole to every micro-batch: wrong, and nothing said.
    def loss(output: Any, target: Tensor) -> Tensor:
        return mse_loss(output["x"], target)

    with gpipe.GPipe([Looks(), Looks()], 2, 2) as pipe:
        refused: list[Callable[[], object]] = [lambda: pipe.step(inputs, TOKENS, loss), lambda: pipe(inputs)]
        for call in refused:
            with pytest.raises(ValueError, match=r"\[packed-offsets\]") as caught:
                call()
            assert f"inputs{name} has the offsets" in str(caught.value)
            assert "gpipe.MicroBatches([" in str(caught.value)
        wrapped = {"x": TOKENS, "cu_seqlens": gpipe.Whole(OFFSETS)}
        pipe.step(wrapped, TOKENS, loss)  # offsets of something else, which every micro-batch needs whole


def test_so_are_those_of_targets_and_of_a_sample() -> None:
    pipe = gpipe.GPipe([nn.Linear(4, 4)], 1, 2)
    with pytest.raises(ValueError, match=r"targets\['cu_seqlens'\] has the offsets"):
        pipe.step(TOKENS, {"y": TOKENS, "cu_seqlens": OFFSETS}, lambda output, target: output.mean())
    rows = {"input_ids": torch.zeros(4, 3, dtype=torch.int64), "cu_seq_lens_q": OFFSETS[:4], "max_length_q": 3}
    with pytest.raises(ValueError, match=r"sample\['cu_seq_lens_q'\] has the offsets"):
        gpipe.GPipe(packed_model(), 2, 2, sample=rows)


@pytest.mark.parametrize(
    "target",
    [
        torch.tensor([0, 1, 2, 3, 4, 6]),  # labels, one a row
        Meta([0, 3, 5]),
        [1, 6],
        [0, 7, 6],
        [0.0, 6.0],
        {"cu_seqlens_max": 6, "max": torch.tensor(6)},  # it was refused for its name
        {"cu_seqlens": None},
    ],
    ids=str,
)
def test_what_is_no_offsets_is_not_refused(target: Any) -> None:
    pipe = gpipe.GPipe([nn.Linear(4, 4)], 1, 2)
    pipe.step(TOKENS, (TOKENS, target), lambda output, target: mse_loss(output, target[0]))
