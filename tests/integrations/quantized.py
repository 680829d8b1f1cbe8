"""Writes bench/results/quantized.md, which quantizers were tried: `python -m tests.integrations.quantized`.

For each: the entries that differ from the plain loop's, and the bytes that are predicted beside those that there are.
"""

import logging
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpipe
from tests.soak.results import facts
from tests.support.quantized import QUANTIZERS, adapted, allocated, batch, piped

FILE = Path(__file__).parents[2] / "bench" / "results" / "quantized.md"
WAYS: list[dict[str, Any]] = [
    {"partitions": 1},
    {"partitions": 2, "remat": "never"},
    {"partitions": 3, "schedule": "1f1b", "remat": "except_last"},
    {"partitions": 2, "schedule": "zb_h1", "remat": "never"},
    {"partitions": 2, "schedule": "zb_v", "remat": 1},
]
PAGE = """# Quantized bases with adapters

A Llama of three blocks, hidden size {wide} and, for bits, 64, read by `from_pretrained` with each quantizer; LoRA by
peft on two projections of each block, with dropout. A step on four micro-batches: losses, outputs, gradients and
buffers beside the reference loop on one device, in {ways} ways (K=1, 2, 3; gpipe, 1f1b, zb_h1, zb_v; remat never,
except_last, always of some).
Bytes are MiB: those that torch's allocator is asked for when the model is copied; what the planner counts of them;
and the peaks of two ranks by 1f1b, predicted and held.

{table}

What bitsandbytes' 8 bits keep for their backward lies where autograd does not see it, and is lacking in the
predictions: here it is little, with longer micro-batches more. torchao's makes each weight anew in float32 for its
product, and autograd keeps it. No kernel here has a backward, on one device either, of its Int4WeightOnlyConfig
(which needs mslk, CUDA or XPU) and those with dynamic activations. IntxWeightOnlyConfig holds int4 in 8 bits each;
Trainer by itself refuses that one.

{about}
"""


def differing(name: str) -> tuple[int, int]:
    """How many values differ from those of the reference loop in all ways, and how many there are."""
    wrong, entries = 0, 0
    for way in WAYS:
        with piped(adapted(name), **way) as pipe:
            report = pipe.verify(batch(), against="model")
        wrong, entries = wrong + len(report.differences), entries + report.compared
    return wrong, entries


def peaks(model: nn.Module) -> tuple[list[int], list[int]]:
    """The bytes of two ranks at their peaks, as predicted and as held."""
    devices = [gpipe.Device(memory=2**36, flops=1e9)] * 2
    plan = gpipe.find_plan(model, batch(), devices, partitions=2, schedule="1f1b", micro_batches=4)
    with gpipe.GPipe(model, plan=plan, sample=batch()) as pipe:
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad])
        pipe.step(batch())
        with gpipe.record(pipe, memory=True) as recording:
            pipe.step(batch())
            optimizer.step()
    return list(plan.peak_bytes), [held.total for _, held in sorted(recording.memory().items())]


def main(wide: int = 1024) -> None:
    """Writes the page."""
    warnings.simplefilter("ignore")
    logging.disable()
    rows = ["| base | differ | of | allocated | counted | predicted | held |", "|---|--:|--:|--:|--:|--:|--:|"]
    for name in (None, *QUANTIZERS):
        wrong, entries = differing(name) if name else (0, 0)
        model = adapted(name, hidden_size=wide, intermediate_size=2 * wide)
        predicted, held = peaks(model)
        asked, counted = allocated(model)
        sizes = [asked, counted, *predicted, *held]
        mib = [f"{size / 2**20:.2f}" for size in sizes]
        cells = [mib[0], mib[1], f"{mib[2]}, {mib[3]}", f"{mib[4]}, {mib[5]}"]
        package = f"{name} ({QUANTIZERS[name][0]})" if name else "float32, not quantized"
        rows.append(f"| {package} | {wrong if name else ''} | {entries or ''} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    versions = {one: version(one) for one in ("torchao", "bitsandbytes", "peft", "transformers")}
    about = ", ".join(f"{one} {value}" for one, value in {**facts(), **versions}.items())
    FILE.write_text(PAGE.format(wide=wide, ways=len(WAYS), table="\n".join(rows), about=about), encoding="utf-8")


if __name__ == "__main__":
    main()
