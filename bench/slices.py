"""Compares steps of a Llama with whole sequences and with slices: `python -m bench.slices`.

Measures wall time, CPU time, and the tensor memory of ranks without weights and gradients. Kinds take turns in one
process.
"""

import argparse
import time
from statistics import median

import torch
import transformers
from torch import Tensor

import gpipe
from bench.machine import facts
from bench.report import describe, table
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import figures

K, M, TOKENS, LAYERS, WIDTH, VOCABULARY = 2, 2, 1024, 4, 256, 1024
KINDS = [
    (schedule, slices, remat)
    for schedule, remat in (("1f1b", "never"), ("1f1b", "always"), ("gpipe", "never"))
    for slices in (1, 2, 4)
]


def piped(schedule: str, slices: int, remat: str, batch: dict[str, Tensor]) -> gpipe.GPipe:
    """Builds a pipe of a Llama with seeded weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=688,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        max_position_embeddings=TOKENS,
    )
    model = transformers.LlamaForCausalLM(config)
    layers = gpipe.layers_of(model, batch)
    return gpipe.GPipe(layers, K, M, schedule=gpipe.Sliced(schedule, slices), remat=remat, sample=batch)


def main() -> None:
    """Measures all kinds in turn, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    words = torch.randint(VOCABULARY, (M, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": words, "labels": words}
    pipes = [piped(*kind, batch) for kind in KINDS]
    held, losses = [], []
    for pipe in pipes:
        with gpipe.record(pipe, memory=True) as recording:
            losses.append(pipe.step(batch).item())
        held.append([(one.boundary or 0) + (one.inside or 0) for one in recording.memory().values()])
        pipe.zero_grad()
    took: list[list[tuple[float, float]]] = [[] for _ in KINDS]
    for _ in range(turns):
        for found, pipe in zip(took, pipes, strict=True):
            began, used = time.perf_counter(), time.process_time()
            pipe.step(batch)
            found.append((time.perf_counter() - began, time.process_time() - used))
            pipe.zero_grad()
    rows = []
    for (schedule, slices, remat), some, bytes_, loss in zip(KINDS, took, held, losses, strict=True):
        paper = figures(program_of(schedule, K, M, slices=slices))
        wall, cpu = (f"{median(column):.2f}" for column in zip(*some, strict=True))
        peaks, mib = (", ".join(f"{one:.3g}" for one in each) for each in (paper.peaks, [b / 2**20 for b in bytes_]))
        rows.append(
            [f"{schedule}, {remat}", str(slices), f"{paper.bubble:.1%}", peaks, mib, wall, cpu, f"{loss:.6f}"]
        )
    heads = [
        "schedule, remat",
        "S",
        "bubble on paper",
        "micro-batches held on paper",
        "MiB held",
        "s",
        "CPU s",
        "loss",
    ]
    print(describe(facts()))
    print()
    print(table(heads, rows))


if __name__ == "__main__":
    main()
