"""Trains a tiny Llama that no process builds whole, from a folder of weights, and saves the result.

    python examples/llama.py out
    torchrun --nproc-per-node 2 examples/llama.py out

Both commands print the same losses. Nothing is downloaded: the script creates the folder of weights, in the layout of
the Hugging Face Hub.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import gpipe

WORDS, ROWS = 64, 16
config = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
folder, driver = Path(sys.argv[1]), "threads"
if dist.is_torchelastic_launched():  # under torchrun, each process has one partition
    dist.init_process_group("gloo")
    driver = "process"


def sentences(generator: torch.Generator) -> gpipe.MicroBatches:
    """Returns micro-batches of sentences of similar length, padded separately. Labels of -100 do not count."""
    lengths = torch.randint(4, 17, (ROWS,), generator=generator).sort().values
    starts, steps = torch.randint(WORDS - 1, (2, ROWS), generator=generator)
    rows = [
        (start + step * torch.arange(length)) % (WORDS - 1) + 1
        for start, step, length in zip(starts, steps % 3 + 1, lengths.tolist(), strict=True)
    ]
    return gpipe.MicroBatches(padded(rows[first : first + 4]) for first in range(0, ROWS, 4))


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Pads the sentences of one micro-batch."""
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
    }


def is_first() -> bool:
    """Whether this process is the only one, or rank 0."""
    return driver == "threads" or dist.get_rank() == 0


if is_first():  # for larger models, the Hub provides this folder
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "pretrained", max_shard_size="100KB")
if driver == "process":
    dist.barrier()

with torch.device("meta"):  # only names and shapes
    model = LlamaForCausalLM(config)
generator = torch.Generator().manual_seed(0)
with gpipe.GPipe(model, partitions=2, micro_batches=4, sample=sentences(generator), driver=driver) as pipe:
    gpipe.load_weights(folder / "pretrained", pipe)  # each process reads only its own partition

    groups: list[dict[str, object]] = [
        {"params": [p for name, p in pipe.named_parameters() if "norm" not in name]},
        {"params": [p for name, p in pipe.named_parameters() if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    for step in range(45):
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(sentences(generator))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 15 == 14 and is_first():
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)

    pipe.eval()
    held_out = sentences(generator)
    with torch.no_grad():
        validation = pipe.step(held_out)

    gpipe.save_weights(folder / "trained", pipe)  # all partitions, as one model
    if is_first():
        print(f"held out: loss {validation:.6f}")
        config.save_pretrained(folder / "trained")
        again = LlamaForCausalLM.from_pretrained(folder / "trained").eval()
        with torch.no_grad():
            words = again.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=5, do_sample=False)
        print(f"3, 5, 7 goes on with {words[0, 3:].tolist()}")
if driver == "process":
    dist.destroy_process_group()
