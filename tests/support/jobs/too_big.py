"""A model whose training state no single process has room for, trained by several that each have little memory."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpipe

SHARE = 1.6  # the training state, in limits of one process
STATE = 4 * 4  # bytes of each parameter: itself, its gradient, two moments of Adam
STEPS, SEED = 3, 5


def model(device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=64,
        use_cache=False,
    )
    with torch.device(device):
        made: nn.Module = AutoModelForCausalLM.from_config(config)
    return made.train()


def batch() -> dict[str, torch.Tensor]:
    words = torch.randint(0, 4096, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words}


@contextmanager
def limited(extra: int) -> Iterator[None]:
    """Lets this process have so many bytes more than it has.

    RLIMIT_DATA counts memory that is private and may be written: the heap, what is mapped for tensors, stacks of
    threads. It leaves out what torch maps of its own files, of which RLIMIT_AS counts gigabytes.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    has = 1024 * int(lines["VmData"].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (has + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def train(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Three steps under the limit, of a model built from its configuration, its weights drawn or loaded.

    Files of weights may be mapped beside it: torch maps them so that they could be written, so RLIMIT_DATA counts
    them though they take no memory.
    """
    whole = model("meta")
    state = STATE * sum(parameter.numel() for parameter in whole.parameters())
    limit = int(state / SHARE) + sum(file.stat().st_size for file in Path(folder).glob("*.safetensors") if folder)
    warm_up()
    with limited(limit), gpipe.GPipe(whole, world, 2, sample=batch(), driver="process", seed=SEED) as pipe:
        if folder:
            gpipe.load_weights(folder, pipe)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        losses = []
        for _ in range(STEPS):
            losses.append(float(pipe.step(batch())))
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": losses, "own": sum(parameter.numel() for parameter in pipe.parameters())}


def warm_up() -> None:
    """Has torch load and start what it does once, beside the model: kernels, the engine of autograd."""
    small = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(small.parameters())
    small(torch.ones(2, 8)).sum().backward()
    optimizer.step()
