"""Trains a tiny GPT-2 of transformers with two partitions, saves it and loads it again.

    python examples/gpt2.py out

The model learns to continue sequences that count in steps. Nothing is downloaded: the initial weights are random.
"""

import sys

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import gpipe

WORDS, PADDING, LONGEST = 64, 0, 12


def sentences(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns sequences of 6 to 12 tokens that count in a fixed step. Labels of -100 do not count."""
    start, step = torch.randint(WORDS - 1, (2, count, 1), generator=generator)
    words = (start + (step % 3 + 1) * torch.arange(LONGEST)) % (WORDS - 1) + 1
    lengths = torch.randint(6, LONGEST + 1, (count, 1), generator=generator)
    mask = torch.arange(LONGEST) < lengths
    return {
        "input_ids": words.where(mask, PADDING),
        "attention_mask": mask.long(),
        "labels": words.where(mask, -100),
    }


torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
config = GPT2Config(
    vocab_size=WORDS, n_positions=LONGEST, n_embd=64, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=1
)
model = GPT2LMHeadModel(config)

pipe = gpipe.GPipe(model, partitions=2, micro_batches=4, sample=sentences(16, generator))

decayed = [parameter for name, parameter in pipe.named_parameters() if name.endswith("weight") and "ln_" not in name]
others = [parameter for name, parameter in pipe.named_parameters() if not name.endswith("weight") or "ln_" in name]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=3e-3)

for step in range(45):
    loss = pipe.step(sentences(16, generator))  # the model's own loss, forward and backward
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 15 == 14:
        print(f"step {step + 1}: loss {loss:.3f}")

pipe.eval()
held_out = sentences(16, generator)
with torch.no_grad():
    print(f"held out: loss {pipe.step(held_out):.3f}")
    logits = pipe(held_out).logits

model.save_pretrained(sys.argv[1])
again = GPT2LMHeadModel.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    same = torch.allclose(again(**held_out).logits, logits, atol=1e-5)
print(f"read back, the model gives the same: {same}")
