"""Measures the cost of building a pipe of a traced model: runs of each block, and the time.

    python -m bench.building [--meta]

CPU time and runs of blocks are measured in different builds. Times are relative to one forward pass of the whole
model on the sample, in training mode without gradients. With `--meta`, only measures a model of 48 GB on the meta
device.
"""

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

import gpipe
from bench.machine import facts
from bench.report import describe, table

BLOCKS, MICRO_BATCHES, TIMES = 32, 4, 5
WORDS: dict[str, Any] = {"vocab_size": 64}
HALF = BLOCKS // 2


def llama(width: int = 16, blocks: int = BLOCKS, **sizes: int) -> nn.Module:
    """Builds a Llama."""
    heads = 2 if width < 256 else width // 128
    heads_too = {"num_attention_heads": heads, "num_key_value_heads": heads}
    given = WORDS | {"intermediate_size": width} | heads_too | sizes
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=width, num_hidden_layers=blocks, **given)
    )


def gpt2() -> nn.Module:
    """Builds a tiny GPT-2."""
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=BLOCKS, n_head=2, n_positions=64, **WORDS, **ends)
    )


def bert() -> nn.Module:
    """Builds a tiny BERT."""
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=BLOCKS, num_attention_heads=2, **WORDS
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    """Builds a tiny T5. Half of its blocks are in the decoder."""
    words: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=HALF, num_decoder_layers=HALF, num_heads=2, **WORDS, **words
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # with the words of a row, and micro-batches
    "Llama": (llama, 16, MICRO_BATCHES),
    "GPT-2": (gpt2, 16, MICRO_BATCHES),
    "BERT": (bert, 16, MICRO_BATCHES),
    "T5": (t5, 16, MICRO_BATCHES),
    "Llama, 256 wide": (lambda: llama(256, intermediate_size=768), 64, MICRO_BATCHES),
    "the same, one micro-batch": (lambda: llama(256, intermediate_size=768), 64, 1),
}


def batch(words: int) -> dict[str, Tensor]:
    """Returns a batch with eight rows of tokens."""
    found = torch.randint(1, 64, (8, words), generator=torch.Generator().manual_seed(1))
    return {"input_ids": found, "labels": found}


@contextmanager
def counting(model: nn.Module) -> Iterator[Counter[nn.Module]]:
    """Counts the runs of the modules that the model declares as not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = {module for module in model.modules() if type(module).__name__ in names}
    runs = Counter(dict.fromkeys(blocks, 0))
    forwards = {kind: kind.forward for kind in {type(block) for block in blocks}}

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            runs[self] += 1
            return forward(self, *args, **kwargs)

        return run

    for kind, forward in forwards.items():
        kind.forward = counted(forward)  # put back below
    try:
        yield runs
    finally:
        for kind, forward in forwards.items():
            kind.forward = forward


def seconds(call: Callable[[], object]) -> float:
    """Returns the minimum CPU time of several calls, after a warm-up call."""
    found = []
    for _ in range(1 + TIMES):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found[1:])


def row(name: str, costs: Literal["params", "time"]) -> list[str]:
    """Measures the cost of building a pipe of one model."""
    make, words, micro_batches = MODELS[name]
    model, sample = make().train(), batch(words)

    def build() -> None:
        network: Any = model if costs == "time" else gpipe.layers_of(model, sample)
        with gpipe.GPipe(network, 2, micro_batches, sample=sample if costs == "time" else None, seed=1):
            pass

    def forwards() -> None:
        with torch.no_grad():
            model(**sample)
            model(**sample)

    with counting(model) as runs:
        build()
    counts = sorted(runs.values())
    took, two = seconds(build), seconds(forwards)
    times = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[len(counts) // 2]} ({counts[0]}-{counts[-1]})"
    return [f"{name}, by {costs}", times, f"{took * 1e3:.0f}", f"{two * 1e3:.0f}", f"{took / two:.2f}"]


def on_meta() -> list[str]:
    """Measures the CPU time to find the layers of a model of 48 GB on the meta device, and to trace it for a pipe."""
    with torch.device("meta"):
        model = llama(4096, 58, vocab_size=32000, intermediate_size=11008)
    sample = {key: value[:2] for key, value in batch(16).items()}
    start = time.process_time()
    traced = gpipe.layers_of(model, sample).traced
    layers = time.process_time() - start
    traced.trace_all(sample)
    size = sum(parameter.nbytes for parameter in model.parameters())
    return [f"{size / 1e9:.0f} GB", f"{layers:.1f}", f"{time.process_time() - start:.1f}", str(len(traced.traces))]


def main() -> None:
    """Prints the tables."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(describe(facts()))
    if "--meta" not in sys.argv:
        ways: list[Literal["params", "time"]] = ["params", "time"]
        rows = [row(name, costs) for name in MODELS for costs in ways]
        head = ["model, costs", "runs of a block", "building, CPU ms", "two forwards, CPU ms", "x"]
        print(f"\n{table(head, rows)}\n", flush=True)
    print(table(["on the meta device", "layers, CPU s", "with all traces, CPU s", "traces"], [on_meta()]))


if __name__ == "__main__":
    main()
