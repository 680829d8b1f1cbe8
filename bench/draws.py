"""Measures the cost of keyed random numbers compared with torch's own, on the CPU: `python -m bench.draws`.

Each operation runs by itself, under a key, and under a key with 25 nested Python calls, as in a model, in turns.
TorchDynamo is imported, as it is by a model of transformers.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

import gpipe
from bench.machine import facts
from bench.report import describe, table, write

ROUNDS, DEPTH = 41, 25
SIZES = (64, 4096, 65_536, 1_048_576)


def attend(query: Tensor, *, drop: float) -> Tensor:
    return scaled_dot_product_attention(query, query, query, dropout_p=drop)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": partial(dropout, p=0.1),
    "attention, dropout": partial(attend, drop=0.1),
    "attention, no dropout": partial(attend, drop=0.0),
}


def deep(calls: int, run: Callable[[], object]) -> object:
    """Calls a function inside this number of nested calls."""
    return deep(calls - 1, run) if calls else run()


def microseconds(run: Callable[[], object], times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        run()
    return 1e6 * (time.process_time() - start) / times


def keyed(run: Callable[[], object], times: int) -> float:
    with gpipe.rng_scope(1, 2, 3, 4):
        return microseconds(run, times)


def row(name: str, size: int) -> tuple[list[str], dict[str, object]]:
    """Measures one operation on a tensor with this number of elements."""
    value = torch.randn(1, 2, max(2, size // 64), 32) if name != "dropout" else torch.randn(size)
    run = partial(OPERATIONS[name], value)
    times = max(3, 20_000 // (10 + value.numel() // 100))
    found: dict[str, list[float]] = {"alone": [], "keyed": [], "deep": []}
    with torch.no_grad():
        for _ in range(ROUNDS):
            found["alone"].append(microseconds(run, times))
            found["keyed"].append(keyed(run, times))
            found["deep"].append(keyed(partial(deep, DEPTH, run), times))
    ratio = median(a / b for a, b in zip(found["keyed"], found["alone"], strict=True))
    figures = [f"{median(some):.1f}" for some in found.values()]
    return [name, f"{value.numel():,}", *figures, f"{ratio:.3f}"], dict(found)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about, rows, every = facts(), list[list[str]](), dict[str, object]()
    for name in OPERATIONS:
        for size in SIZES if name == "dropout" else SIZES[:3]:
            line, every[f"{name}, {size}"] = row(name, size)
            rows.append(line)
            print(*line, flush=True)
    head = ["operation", "elements", "alone, us", "keyed, us", "25 deep, us", "keyed over alone"]
    write("draws", "\n\n".join(["# Draws", describe(about), table(head, rows)]), {"facts": about, "found": every})


if __name__ == "__main__":
    main()
