"""What the Transformers are made of beside attention: embeddings, feed-forward layers, the softmax layer."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sinusoids(length: int, dim: int, device: torch.device) -> Tensor:
    """Gives positions 0 ... length-1 as sines and cosines, (length, dim), of wavelengths 2 pi to 20000 pi.

    See Vaswani et al., "Attention Is All You Need" (2017), section 3.5; the sines come first.

    >>> sinusoids(2, 4, torch.device("cpu"))[0]
    tensor([0., 0., 1., 1.])
    """
    timescales = torch.logspace(0, 4, dim // 2, device=device)
    angles = torch.arange(length, device=device)[:, None] / timescales
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def vocabulary(vocab: int, model_dim: int) -> nn.Parameter:
    """Makes a vector of expected length 1 for each word, (vocab, model_dim).

    >>> vocabulary(1000, 64).square().sum(dim=1).mean().round().item()
    1.0
    """
    return nn.Parameter(nn.init.normal_(torch.empty(vocab, model_dim), std=model_dim**-0.5))


def init_xavier(linear: nn.Linear, gain: float = 1.0) -> None:
    """Draws the weights of a layer after Glorot and Bengio, uniformly, and sets its bias to 0.

    >>> linear = nn.Linear(3, 3)
    >>> init_xavier(linear)
    >>> linear.weight.abs().max().item() <= 1, linear.bias.any().item()
    (True, False)
    """
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    nn.init.zeros_(linear.bias)


def feed_forward(model_dim: int, ffn_dim: int, depth: int) -> nn.Sequential:
    """Makes a feed-forward layer, (..., model_dim) -> (..., model_dim), for a stack of `depth` layers.

    Its weights start smaller the deeper the stack is: each matrix by 1 / sqrt(depth), so their product by
    1 / depth, as section 5 of the GPipe paper scales them to train deep models. A depth of 1 leaves them.

    >>> feed_forward(8, 32, depth=4)(torch.zeros(2, 8)).shape
    torch.Size([2, 8])
    """
    widen, narrow = nn.Linear(model_dim, ffn_dim), nn.Linear(ffn_dim, model_dim)
    for linear in (widen, narrow):
        init_xavier(linear, gain=depth**-0.5)
    return nn.Sequential(widen, nn.ReLU(), narrow)


class Embedding(nn.Module):
    """Token ids (N, T) -> vectors (N, T, model_dim) with the position added; T may change with each call."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks tokens up, at unit variance, and adds their position."""
        dim = self.weight.shape[1]
        x: Tensor = F.embedding(tokens, self.weight) * math.sqrt(dim)
        return x + sinusoids(tokens.shape[1], dim, x.device).to(x.dtype)


class Head(nn.Module):
    """The softmax layer: (N, T, model_dim) -> logits (N, T, vocab).

    Its input grows with every residual added, so it is normalized first; `affine` gives the norm parameters.
    `clip_logits` keeps logits within -clip_logits ... clip_logits in training mode.
    """

    def __init__(self, weight: nn.Parameter, clip_logits: float | None = None, *, affine: bool) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))
        self.norm = nn.LayerNorm(weight.shape[1], elementwise_affine=affine)
        self.clip_logits = clip_logits

    def forward(self, x: Tensor) -> Tensor:
        """Scores every word of the vocabulary at every position."""
        logits: Tensor = F.linear(self.norm(x), self.weight, self.bias)
        if self.training and self.clip_logits is not None:
            logits = logits.clamp(-self.clip_logits, self.clip_logits)
        return logits
