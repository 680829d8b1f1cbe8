"""How far the host runs ahead of the devices: memory that waits for streams, by micro-batches.

    python -m tests.accelerator.pace

In 1F1B a rank holds the activations of K micro-batches, whatever M is. What was freed while another stream may use it
counts until the host knows that it does not: were the host not held back, that would grow with M.
"""

import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from gpipe.runtime import streams
from tests.accelerator import load

SIMULATOR = load()
WIDTH, ROWS, DEVICES = 512, 64, 3


def peaks(micro_batches: int) -> list[int]:
    """The most bytes on each device in a step."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEVICES)]
    x, y = (torch.ones(ROWS * micro_batches, WIDTH, device=f"sim:{d}") for d in (0, DEVICES - 1))
    with gpipe.GPipe(
        layers, DEVICES, micro_batches, schedule="1f1b", devices=[f"sim:{d}" for d in range(DEVICES)]
    ) as pipe:
        pipe.step(x, y, F.mse_loss)
        for device in range(DEVICES):
            torch.accelerator.synchronize(device)
            SIMULATOR.reset_peak(device)
        before = [SIMULATOR.peak_bytes(device) for device in range(DEVICES)]  # what is held between steps
        pipe.step(x, y, F.mse_loss)
        return [SIMULATOR.peak_bytes(device) - base for device, base in enumerate(before)]


def main() -> None:
    few, many = peaks(8), peaks(64)
    streams.MOST_QUEUED = 10**9
    free = peaks(64)
    for device in range(DEVICES):
        print(f"device {device}: {few[device]} bytes, {many[device]} with M=64, {free[device]} if not held back")
    raise SystemExit(any(m > 1.2 * f for f, m in zip(few, many, strict=True)))


if __name__ == "__main__":
    main()
