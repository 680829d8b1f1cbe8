"""What it costs to replay a model's forward in place of layers given by hand: `python -m bench.replayed`.

Overhead: a Llama of 32 tiny layers, whose forward in K stages is compared with the model's own, without gradients.
Recording: the same model, made into layers. Cells: blocks of a size that users have, trained as a model and as layers
by hand, in turns in one run.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gpipe
from bench.machine import facts
from bench.report import describe, interval, table, write

LAYERS, STAGES = 32, (2, 4, 8)
WORDS, WIDTH, HEADS = 512, 512, 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, value: Tensor) -> Tensor:
        return self.out(self.norm(value))


class Language(nn.Module):
    """A model as one writes it: no sequence of layers."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = Embedding(), Head()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(blocks)
        )

    def forward(self, words: Tensor) -> Tensor:
        value = self.embed(words)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def overhead(rounds: int) -> tuple[list[Sequence[str]], float, dict[str, object]]:
    """Milliseconds of Python for each stage and micro-batch, and of a recording."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        vocab_size=16,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    words = torch.randint(0, 16, (2, 16))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    pipes = {k: gpipe.GPipe(model, k, 1, sample=batch, driver="lockstep", costs="params") for k in (1, *STAGES)}
    runs: dict[int, Callable[[], object]] = {0: lambda: model(**batch)}
    runs |= {k: lambda pipe=pipe: pipe(**batch) for k, pipe in pipes.items()}  # type: ignore[misc]  # of its own
    found: dict[int, list[float]] = {k: [] for k in runs}
    with torch.no_grad():
        for _ in range(rounds + 1):
            for k, run in runs.items():
                found[k].append(timed(run))
    found = {k: seconds[1:] for k, seconds in found.items()}
    lines: list[Sequence[str]] = []
    for k in STAGES:
        each = [1e3 * (of_k - of_one) / (k - 1) for of_k, of_one in zip(found[k], found[1], strict=True)]
        whole = [1e3 * (of_k - own) / k for of_k, own in zip(found[k], found[0], strict=True)]
        lines.append([str(k), f"{1e3 * median(found[k]):.2f}", f"{median(each):.2f}", f"{median(whole):.2f}"])
    recording = [timed(lambda: gpipe.layers_of(model, batch)) for _ in range(max(3, rounds // 3))]
    return lines, 1e3 * median(recording), {str(k): seconds for k, seconds in found.items()}


def cells(rounds: int, blocks: int, rows: int, length: int) -> tuple[list[Sequence[str]], dict[str, object]]:
    """Steps of the model beside those of the same blocks by hand."""
    torch.manual_seed(0)
    model = Language(blocks)
    by_hand = nn.Sequential(model.embed, *model.blocks, model.head)
    words = torch.randint(0, WORDS, (8 * rows, length))
    with torch.no_grad():
        value = model.embed(words[:rows])
        block = 1e3 * median(timed(lambda: model.blocks[0](value)) for _ in range(5))
    cuts = [blocks // 2 + 1, blocks - blocks // 2 + 1]
    pipes = {
        "by hand": gpipe.GPipe(by_hand, cuts, 8, seed=0),
        "the model": gpipe.GPipe(model, cuts, 8, sample=words[:8], seed=0, costs="params"),
    }

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    found: dict[str, list[float]] = {name: [] for name in pipes}
    losses = dict[str, Tensor]()
    for _ in range(rounds + 1):
        for name, pipe in pipes.items():
            pipe.step_number = 0
            start = time.perf_counter()
            losses[name] = pipe.step(words, words, loss_fn)
            found[name].append(time.perf_counter() - start)
            model.zero_grad()
    assert torch.equal(*losses.values())
    found = {name: seconds[1:] for name, seconds in found.items()}
    ratios = [one / other for one, other in zip(found["the model"], found["by hand"], strict=True)]
    low, high = interval(ratios)
    seconds = [f"{median(found[name]):.3f}" for name in found]
    return [[f"{block:.0f}", *seconds, f"{median(ratios):.4f} ({low:.4f}-{high:.4f})"]], dict(found)


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
    stages, recording, forwards = overhead(options.rounds)
    blocks, steps = cells(max(5, options.rounds // 3), options.blocks, options.rows, options.length)
    head = ["stages", "forward, ms", "ms more for each stage more", "ms over the model's own, a stage"]
    parts = [
        "# A model replayed, beside layers by hand",
        describe(about),
        f"Llama of {LAYERS} layers, each of nearly nothing; recording takes {recording:.0f} ms.",
        table(head, stages),
        "Blocks as users have them, K=2, M=8, remat always, threads; dropout 0.1; the losses have the same bits.",
        table(["block, ms forward", "by hand, s a step", "the model, s a step", "ratio (95 %)"], blocks),
    ]
    write("replayed", "\n\n".join(parts), {"facts": about, "forwards": forwards, "steps": steps})


if __name__ == "__main__":
    main()
