"""Measures the time per token of generation with a pipe, relative to the ideal: `python -m bench.generation`.

The first model sleeps, like a host that waits for a device. With M of at least K, every rank always has a micro-batch
to work on, so one token for all micro-batches takes M times the time of a stage.

The second model is a Llama on CPU threads, compared with its own `generate` on one and two threads. With few rows, a
forward pass takes the time to read the weights, and a pipe reads them for each micro-batch. With many rows, it takes
the time to compute. The CPU time of all threads shows the difference.

Each number of tokens is measured in every round, and the minimum counts, to exclude the load of other processes.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import gpipe
from bench.machine import facts
from bench.report import describe, table, write

STAGE_SECONDS, BLOCKS = 0.012, 8
FEW, MANY = 4, 20
SLEEPING = ((1, 4), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8))
ALONE: tuple[tuple[int, int], ...] = ((0, 1), (0, 2))  # the model itself, on so many threads
COMPUTING = ((1, 1), (2, 2), (2, 4))
ROWS = 8, 256
WORDS = 4
SHARED = (
    "The machine had other work (a load of {load:.1f} before the first run), so what the Llama took by the clock is "
    "left out, and the table above has upper bounds."
)
Run: TypeAlias = tuple[float, ...]


class Block(nn.Module):
    """Sleeps for its share of the time of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.seconds = 0.0

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return value * self.scale


class Sleeper(nn.Module):
    """A model that counts, with its own `generate` method."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, words: Tensor) -> Tensor:
        value = self.embed(words[:, -1:])
        for block in self.blocks:
            value = block(value)
        return value

    def generate(self, inputs: Tensor, count: int) -> Tensor:
        """Returns the input with this number of additional tokens."""
        for _ in range(count):
            inputs = torch.cat([inputs, self(inputs).sum(-1).long() % 16], 1)
        return inputs


def timed(generate: Callable[[int], object]) -> Run:
    """Measures few and many tokens, by wall time and CPU time."""
    run = []
    for count in (FEW, MANY):
        start, worked = time.perf_counter(), time.process_time()
        generate(count)
        run += [time.perf_counter() - start, time.process_time() - worked]
    return tuple(run)


def a_token(runs: Sequence[Run]) -> tuple[float, float]:
    """Returns the wall time and CPU time per additional token, without the time before the first one."""
    few, worked_few, many, worked_many = map(min, zip(*runs, strict=True))
    return (many - few) / (MANY - FEW), (worked_many - worked_few) / (MANY - FEW)


def sleeping(ranks: int, micro_batches: int) -> Run:
    """Measures the time per token for all micro-batches of the sleeping model."""
    model, words, each = Sleeper().eval(), torch.ones(micro_batches, 2, dtype=torch.int64), BLOCKS // ranks
    cut = [each + 1, *[each] * (ranks - 1)]  # words are embedded by the first
    with gpipe.GPipe(model, cut, micro_batches, sample=words).eval() as pipe:
        pipe.generate(words, count=2)
        for block in model.blocks:
            vars(block)["seconds"] = STAGE_SECONDS / each
        return timed(lambda count: pipe.generate(words, count=count))


def llama() -> LlamaForCausalLM:
    """Builds a Llama with 8 layers that take some milliseconds each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_hidden_layers=8
    )
    return LlamaForCausalLM(config).eval()


def by_all(model: Any, rows: int, rounds: int) -> dict[tuple[int, int], list[Run]]:
    """Measures tokens of this number of rows with the model and with pipes."""
    words = torch.randint(3, 1024, (rows, WORDS))
    how: dict[str, Any] = {"attention_mask": torch.ones_like(words), "pad_token_id": 0, "eos_token_id": None}
    generate: dict[tuple[int, int], Any] = dict.fromkeys(ALONE, model.generate)
    for case in COMPUTING:
        pipe = gpipe.GPipe(gpipe.layers_of(model, {"input_ids": words, "labels": words}), *case).eval()
        pipe.generate(words, max_new_tokens=2, **how)  # in which it learns the way
        generate[case] = pipe.generate
    found: dict[tuple[int, int], list[Run]] = {case: [] for case in generate}
    for _ in range(rounds):
        for case, one in generate.items():
            torch.set_num_threads(case[1] if case in ALONE else 1)
            found[case].append(timed(partial(_tokens, one, words, how)))
    return found


def _tokens(generate: Callable[..., object], words: Tensor, how: dict[str, Any], count: int) -> None:
    generate(words, max_new_tokens=count, **how)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about, load = facts(), os.getloadavg()[0]
    slept = [(case, [sleeping(*case) for _ in range(options.rounds)]) for case in SLEEPING]
    model = llama()
    took = [(rows, [*by_all(model, rows, options.rounds).items()]) for rows in ROWS]
    measured = {"facts": about, "load": load, "slept": slept, "took": took}
    write("generation", page(measured), measured)


def page(measured: dict[str, Any]) -> str:
    """Returns tables of the measurements."""
    lines = [[str(k), str(m), f"{a_token(runs)[0] / (m * STAGE_SECONDS):.3f}"] for (k, m), runs in measured["slept"]]
    parts = ["# A token in a pipe that generates", describe(measured["facts"])]
    parts.append(table(("K", "M", "a token, over M times a stage"), lines))
    if shared := measured["load"] > 1:
        parts.append(SHARED.format(load=measured["load"]))
    for rows, cases in measured["took"]:
        (_, first), lines = cases[0], []
        for (k, m), runs in cases:
            name = f"K={k}, M={m}" if k else f"the model, {m} thread{'s' * (m > 1)}"
            (each, worked), (alone, least) = a_token(runs), a_token(first)
            clock = ["", ""] if shared else [f"{1e3 * each:.1f}", f"{alone / each:.2f}"]
            lines.append([name, f"{1e3 * worked:.1f}", f"{worked / least:.2f}", *clock])
        names = f"Llama, {rows} rows", "ms of processors a token", "over the model's", "ms by the clock", "speedup"
        parts.append(table(names, lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
