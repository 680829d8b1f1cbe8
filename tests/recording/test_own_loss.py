"""How the losses that a model gives itself for micro-batches make that of the mini-batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe


class Head(nn.Module):
    """A head that has the loss, of words that are looked for so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.to_words = nn.Linear(6, 5)
        self.times = times

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        words = torch.cat([self.to_words(x * (1 + at)) for at in range(self.times)])
        return F.cross_entropy(words.flatten(0, 1), labels.repeat(self.times, 1).flatten())


class Words(nn.Module):
    """A model of words."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = Head(times)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"loss": self.head(x, labels)}


@pytest.mark.parametrize("times", [1, 3])
def test_the_labels_of_a_loss_inside_a_head_are_counted(times: int) -> None:
    # Losses were only seen between modules: those of flaubert and xlm, whose heads have them, were weighed by rows.
    # So were those of prophetnet, which gives its loss all labels several times, for the words ahead.
    torch.manual_seed(0)
    model, words = Words(times), torch.randint(5, (4, 7))
    labels = words.where(torch.arange(7) < torch.tensor([[7], [6], [2], [1]]), -100)
    whole = copy.deepcopy(model)(words, labels)["loss"]

    with gpipe.GPipe(model, 2, 2, sample={"words": words, "labels": words}) as pipe:
        loss = pipe.step({"words": words, "labels": labels})

    torch.testing.assert_close(loss, whole.detach())
    assert not any("cannot be known how it averages" in finding for finding in pipe.findings)
