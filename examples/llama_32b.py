"""Plans to train a Llama with 32 billion parameters on one device, on paper: without values, and without the device.

gpipe plan examples.llama_32b:llama_32b --devices 1xrtx4090 --batch 32 --host-memory 512
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = 2048  # per row


def llama_32b() -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Returns a model on the meta device with the sizes of LLaMA-33B (Touvron et al., 2023), and a sample."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=6_656,
        intermediate_size=17_920,
        num_hidden_layers=60,
        num_attention_heads=52,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(4, TOKENS, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}
