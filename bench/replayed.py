"""Measures the cost of running a traced model instead of a list of layers: `python -m bench.replayed`.

The first table compares the forward pass of models with 32 tiny blocks in K stages with the model's own, without
gradients. The second trains blocks of realistic sizes as a model and as a list of layers, in turns in one run.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn

import gpipe
from bench.building import BLOCKS, WORDS, bert, gpt2, llama, t5
from bench.cells import blocks
from bench.machine import facts
from bench.report import describe, table, write

STAGES = (1, 2, 8)
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
}
Batch: TypeAlias = dict[str, Tensor]


def mixtral() -> nn.Module:
    """Builds a tiny Mixtral, with a mixture of four experts in each block."""
    sizes = SIZES | WORDS | {"num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def gemma3() -> nn.Module:
    """Builds a tiny Gemma 3, whose blocks alternate between local and global attention with separate masks."""
    sizes = SIZES | WORDS | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))


def vit() -> nn.Module:
    """Builds a tiny ViT."""
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=16, patch_size=4))


def words(rows: int) -> Batch:
    found = torch.randint(64, (rows, 16))
    return {"input_ids": found, "labels": found}


def images(rows: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(2, (rows,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "Llama": (llama, words),
    "GPT-2": (gpt2, words),
    "BERT": (bert, words),
    "T5": (t5, words),
    "Mixtral": (mixtral, words),
    "Gemma 3": (gemma3, words),
    "ViT": (vit, images),
}


def run_alone(model: nn.Module, parts: Sequence[Batch]) -> None:
    for part in parts:
        model(**part)


def walks(rounds: int) -> tuple[list[Sequence[str]], dict[str, object]]:
    """Measures the CPU time of a forward pass of one micro-batch relative to the model's own, by model, M and K."""
    lines: list[Sequence[str]] = []
    every: dict[str, object] = {}
    for name, (make, draw) in MODELS.items():
        model = make().train()
        for m in (4, 32):
            batch = draw(2 * m)
            parts = [{key: value[at : at + 2] for key, value in batch.items()} for at in range(0, 2 * m, 2)]
            runs: dict[str, Callable[[], object]] = {"own": partial(run_alone, model, parts)}
            for k in STAGES:
                pipe = gpipe.GPipe(gpipe.layers_of(model, parts[0]), k, m, driver="lockstep", seed=1)
                runs[str(k)] = partial(pipe.step, batch)
            found: dict[str, list[float]] = {k: [] for k in runs}
            with torch.no_grad():
                for turn in range(rounds + 3):
                    for kind, run in runs.items():
                        start = time.process_time()
                        run()
                        if turn > 2:  # what is found out once is known then
                            found[kind].append((time.process_time() - start) / m)
            own = found.pop("own")
            each = [1e3 * median(some) for some in found.values()]
            ratios = [median(a / b for a, b in zip(some, own, strict=True)) for some in found.values()]
            times = [f"{ms:.1f} ({ratio:.2f} x)" for ms, ratio in zip(each, ratios, strict=True)]
            lines.append([name, str(m), f"{1e3 * median(own):.1f}", *times])
            every[f"{name}, M={m}"] = {"own": own, **found}
    return lines, every


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.replayed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=192)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about = facts()
    stages, forwards = walks(options.rounds)
    by_hand, steps = blocks(max(5, options.rounds // 3), options.blocks, options.rows, options.length)
    head = ["model", "M", "its own forward, ms", *(f"K={k} (over its own)" for k in STAGES)]
    parts = [
        "# A model replayed, beside layers by hand",
        describe(about),
        "CPU time of the forward of a micro-batch: models of 32 blocks, each of nearly nothing, in lockstep.",
        table(head, stages),
        "Blocks as users have them, K=2, M=8, remat always, threads; dropout 0.1; the losses have the same bits.",
        table(["block, ms forward", "by hand, CPU s a step", "the model, CPU s a step", "ratio (95 %)"], by_hand),
    ]
    write("replayed", "\n\n".join(parts), {"facts": about, "forwards": forwards, "steps": steps})


if __name__ == "__main__":
    main()
