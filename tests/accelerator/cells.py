"""Cells of LSTM and GRU as devices have them: one kernel for all gates, which torch does not have for CPUs."""

import torch
from torch import Tensor
from torch.library import Library


def _sums(gates: Tensor, has_bias: bool) -> Tensor | None:
    return gates.sum(0) if has_bias else None


def _lstm(
    of_input: Tensor, of_hidden: Tensor, before: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = of_input + of_hidden
    if bias is not None and other is not None:
        gates = gates + bias + other
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * before + i * g
    return o * cell.tanh(), cell, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    of_hidden: Tensor | None, of_cell: Tensor | None, before: Tensor, cell: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    if of_hidden is None and of_cell is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    squashed = cell.tanh()
    of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    total = of_hidden * o * (1 - squashed * squashed)
    total = total if of_cell is None else total + of_cell
    gates = torch.cat(
        [
            total * g * i * (1 - i),
            total * before * f * (1 - f),
            total * i * (1 - g * g),
            of_hidden * squashed * o * (1 - o),
        ],
        1,
    )
    return gates, total * f, _sums(gates, has_bias)


def _gru(
    of_input: Tensor, of_hidden: Tensor, before: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if bias is not None and other is not None:
        of_input, of_hidden = of_input + bias, of_hidden + other
    (r, z, n), (hr, hz, hn) = of_input.chunk(3, 1), of_hidden.chunk(3, 1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (before - n), torch.cat([r, z, n, before, hn], 1)


def _gru_backward(of_hidden: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    r, z, n, before, hn = workspace.chunk(5, 1)
    of_n = of_hidden * (1 - z) * (1 - n * n)
    of_r, of_z = of_n * hn * r * (1 - r), of_hidden * (before - n) * z * (1 - z)
    of_input, of_gates = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    return of_input, of_gates, of_hidden * z, _sums(of_input, has_bias), _sums(of_gates, has_bias)


KERNELS = {
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
}


def register() -> Library:
    """Gives the simulated accelerator its cells, for as long as the library lives."""
    library = Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    return library
