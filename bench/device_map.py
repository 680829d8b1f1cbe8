"""Measures a Llama on two devices, one device at a time and as a pipeline: `python -m bench.device_map`.

`device_map="balanced"` of accelerate runs the layers one after the other, so one device at a time computes. Sleeping
devices show the effect without GPUs: each block sleeps in proportion to its rows. The model of `device_map` runs
without the hooks of accelerate, which cost additional time.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import gpipe
from bench.machine import facts
from bench.packing import Sleep
from bench.report import describe, spread, table

K, M, ROWS, TOKENS, BLOCKS = 2, 8, 16, 64, 8


class SleepingBlock(LlamaDecoderLayer):
    """A block of Llama on a device that computes for `seconds` per row."""

    seconds = 0.015

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(Sleep.apply(hidden_states, self.seconds * len(hidden_states)), *args, **kwargs)


def build(width: int, *, sleeps: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": BLOCKS,
        "vocab_size": 256,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    if sleeps:
        for block in model.model.layers:
            block.__class__ = SleepingBlock
    return model


def measure(width: int, rounds: int, *, sleeps: bool) -> list[tuple[str, list[float]]]:
    """Returns the durations of steps. Checks that losses and gradients are bitwise identical."""
    tokens = torch.randint(256, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    naive, piped = build(width, sleeps=sleeps), build(width, sleeps=sleeps)
    pipe = gpipe.GPipe(piped, partitions=K, micro_batches=M, sample=batch, remat="never", devices="cpu")

    def accumulated() -> Tensor:
        total, labels = torch.zeros(()), ROWS * (TOKENS - 1)
        for part in tokens.tensor_split(M):
            loss = naive(input_ids=part, labels=part, num_items_in_batch=torch.tensor(labels)).loss
            loss.backward()
            total = total + loss.detach()
        return total

    def whole() -> Tensor:
        loss: Tensor = naive(**batch).loss
        loss.backward()
        return loss.detach()

    ways: dict[str, Callable[[], Tensor]] = {
        "device_map, M=8 accumulated": accumulated,
        "device_map, the whole mini-batch": whole,
        "gpipe, K=2, M=8": lambda: pipe.step(batch),
    }
    took: dict[str, list[float]] = {way: [] for way in ways}
    with pipe:
        for _ in range(rounds + 1):
            losses, gradients = dict[str, Tensor](), dict[str, list[Tensor | None]]()
            for way, step in ways.items():
                start = time.perf_counter()
                losses[way] = step()
                took[way].append(time.perf_counter() - start)
                model = piped if way.startswith("gpipe") else naive
                gradients[way] = [weight.grad for weight in model.parameters()]
                model.zero_grad()
            first, _, third = list(ways)[:3]
            assert torch.equal(losses[first], losses[third])
            pairs = zip(gradients[first], gradients[third], strict=True)
            assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
    return [(way, values[1:]) for way, values in took.items()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.device_map", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe(facts()))
    for title, width, sleeps in (("two sleeping devices", 32, True), ("two cores", 256, False)):
        found = measure(width, options.rounds, sleeps=sleeps)
        first = found[0][1]
        rows = [[way, spread(values), f"{median(first) / median(values):.2f}"] for way, values in found]
        print("\n" + table([title, "ms per step", "speed"], rows), flush=True)
    print("\nLosses and gradients of gpipe and of device_map with M=8 are bitwise identical.")


if __name__ == "__main__":
    main()
