"""Tiny models whose weights a quantizer made, with adapters that train."""

import copy
import gc
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gpipe
from gpipe.stages.quantized import stored_in
from tests.families.law import quiet
from tests.support.outcomes import Outcome
from tests.support.plain_loop import weights_of
from tests.support.planned import pipe_by_costs
from tests.support.processes.digests import Digests, digests

MICRO_BATCHES, SEED, STEPS = 4, 7, 3

Quantizer: TypeAlias = Callable[[], Any]


def nf4(dtype: torch.dtype, **how: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, **{"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, **how}
    )


def eight() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def by_torchao(name: str, *given: Any) -> Any:
    import torchao.quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(torchao.quantization, name)(*given))


QUANTIZERS: Mapping[str, tuple[str, Quantizer]] = {
    "nf4": ("bitsandbytes", lambda: nf4(torch.float32)),
    "nf4 in bf16": ("bitsandbytes", lambda: nf4(torch.bfloat16)),
    "nf4 twice": ("bitsandbytes", lambda: nf4(torch.float32, bnb_4bit_use_double_quant=True)),
    "fp4": ("bitsandbytes", lambda: nf4(torch.float32, bnb_4bit_quant_type="fp4")),
    "8 bits": ("bitsandbytes", eight),
    "int8": ("torchao", lambda: by_torchao("Int8WeightOnlyConfig")),
    "int4 in int8": ("torchao", lambda: by_torchao("IntxWeightOnlyConfig", vars(torch)["int4"])),
    "float8": ("torchao", lambda: by_torchao("Float8WeightOnlyConfig")),
}
"""The quantizers of each package whose weights autograd goes through on a CPU, as transformers is told of them."""


def base(name: str | None, **config: Any) -> nn.Module:
    """A tiny Llama as `from_pretrained` gives it, quantized if a quantizer is named."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, **config}
    with weights_of(0), quiet(), tempfile.TemporaryDirectory() as folder:
        plain = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **sizes))
        plain.config.save_pretrained(folder)
        save_file(plain.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})  # transformers: rank 0 alone
        how = {"quantization_config": QUANTIZERS[name][1](), "device_map": "cpu"} if name else {}
        model: nn.Module = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return model


def adapted(name: str | None, *, dropout: bool = True, **config: Any) -> nn.Module:
    """It with adapters, and dropout in them, in training."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    prepared = prepare_model_for_kbit_training(base(name, **config), use_gradient_checkpointing=False)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1 * dropout, init_lora_weights=False
    )
    with weights_of(1):
        return get_peft_model(prepared, lora).train()


def batch(rows: int = 8) -> dict[str, Tensor]:
    words = torch.randint(1, 64, (rows, 12), generator=torch.Generator().manual_seed(3))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def raw(tensor: Tensor) -> list[Tensor]:
    """A tensor as the plain ones that are in it."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach()]
    return [piece for name in tensor.__tensor_flatten__()[0] for piece in raw(getattr(tensor, name))]


def left(model: nn.Module, gradients: bool = False) -> Outcome:
    """What is in a model's state_dict, or the gradients of its parameters."""
    found: Outcome = {}
    if gradients:
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, tensor in model.state_dict().items():
        found |= {f"{name} {at}": piece.clone() for at, piece in enumerate(raw(tensor))}
    return found


def optimizer_of(root: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in root.parameters() if p.requires_grad] or [torch.zeros(1)], lr=1e-2)


def three_steps(root: nn.Module, step: Callable[[int], object]) -> Outcome:
    """Gradients of each step, and what is left in the end."""
    found, optimizer = Outcome(), optimizer_of(root)
    for at in range(STEPS):
        optimizer.zero_grad()
        step(at)
        found |= {f"{at} {name}": gradient for name, gradient in left(root, gradients=True).items()}
        optimizer.step()
    return found | left(root)


def piped(model: nn.Module, partitions: int, **how: Any) -> gpipe.GPipe:
    how = {"costs": "params", "micro_batches": MICRO_BATCHES, "seed": SEED, **how}
    return pipe_by_costs(model, partitions, sample=batch(), **how)


def allocated(model: nn.Module) -> tuple[int, int]:
    """The bytes that torch's allocator is asked for while a model is copied, less those given back; those counted."""
    gc.collect()  # or models of before are given back meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        copied = copy.deepcopy(model)
    asked = sum(event.self_cpu_memory_usage for event in found.key_averages())
    return asked, sum(piece.nbytes for piece in stored_in([copied]))


def trained(name: str, partitions: int, **how: Any) -> Digests:
    """What three steps leave in this process."""
    with piped(adapted(name), partitions, **how) as pipe:
        return digests(three_steps(pipe, lambda _: pipe.step(batch())))


def train_rank(rank: int, world: int, name: str, how: dict[str, Any]) -> Digests:
    return trained(name, world, driver="process", **how)
