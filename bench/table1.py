"""Computes the paper's Table 1, the largest models that fit, with the planner: `python -m bench.table1`.

Transformer-L on TPUv3 cores with 16 GiB, mini-batches of 32 sequences with 1024 tokens. AmoebaNet-D with the paper's
sizes on TPUv2 cores with 8 GiB, mini-batches of 128 images. All with fill-drain in float32, and 12 bytes per
parameter (RMSProp). Layers are on the meta device, so nothing is allocated.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from bench.machine import facts
from bench.report import describe, table, write
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.planner.profile import profile_layers
from gpipe.planner.search.candidates import Choices
from gpipe.planner.search.device import GIB, PRESETS, Device
from gpipe.planner.search.plan import Plan
from gpipe.planner.search.profile import Profile
from gpipe.planner.search.search import search

RMSPROP = 1
"""Numbers that the optimizer keeps of each parameter."""
SEQUENCES, WORDS, MOST_M = 32, 1024, 32
TRANSFORMERS = {
    0: (3, 3.15, 11.7),
    1: (13, 8.8, 6.4),
    8: (103, 59.5, 50.9),
    32: (415, 235.1, 199.9),
    128: (1663, 937.9, 796.1),
}
"""By the number of accelerators, 0 for one without a pipeline: the paper's layers, and its GiB of parameters and of
activations."""
AMOEBANETS = {
    0: (18, 208, 1.05, 6.26),
    1: (18, 416, 3.8, 3.46),
    2: (18, 544, 6.45, 8.11),
    4: (36, 544, 12.53, 15.21),
    8: (72, 512, 24.62, 26.24),
}
"""Likewise its layers, filters, GB of parameters and of activations."""
IMAGES, PIXELS = 128, 224


def transformer() -> Callable[[int], Profile]:
    """Returns a function from the number of layers to their costs. Every block has the same costs."""
    with torch.device("meta"):
        layers = transformer_lm(layers=1)
    samples = {rows: torch.zeros(rows, WORDS, dtype=torch.int64) for rows in (1, 2)}
    embedding, block, head = profile_layers(
        layers, samples, ["embedding", "block", "head"], optimizer_numbers=RMSPROP
    ).layers
    return lambda count: Profile((embedding, *[block] * count, head))


def amoebanet(layers: int, filters: int) -> Profile:
    """Returns the costs of AmoebaNet-D with these sizes."""
    with torch.device("meta"):
        network = amoebanet_d(layers, filters)
    samples = {rows: torch.zeros(rows, 3, PIXELS, PIXELS) for rows in (2, 4)}
    return profile_layers(network, samples, list(map(str, range(len(network)))), optimizer_numbers=RMSPROP)


def naive(profile: Profile, rows: int) -> tuple[float, float]:
    """Returns the bytes of state and activations without partitions and recomputation."""
    whole = profile.of_micro_batch(rows).cost(0, len(profile.layers), speed=1.0)
    return whole.state, whole.boundary + whole.activations


def plan_of(profile: Profile, devices: Sequence[Device], batch: int, micro_batches: Sequence[int]) -> Plan | None:
    """Returns the fill-drain plan on all devices, or None if none fits."""
    choices = Choices([len(devices)], micro_batches, ["gpipe"])
    try:
        return search(profile, devices, batch, choices, alternatives=0)
    except ValueError as error:
        if "[nothing-fits]" not in str(error):
            raise
        return None


def largest(fits: Callable[[int], bool], near: int) -> int:
    """Returns the largest number that fits, starting the search at a guess. 0 if none fits."""
    low, high = 0, near
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def state_and_rest(plan: Plan) -> tuple[float, float]:
    """Returns the bytes of state and of activations on all ranks."""
    state = sum(cost.state for cost in plan.costs)
    return state, sum(plan.peak_bytes) - state


def transformer_rows(most: int) -> list[list[float]]:
    """Returns, by number of accelerators, the number of layers and the bytes of state and activations."""
    of_layers, device, found = transformer(), PRESETS["tpuv3"], []
    for count, (near, _, _) in TRANSFORMERS.items():
        if count > most:
            continue
        if not count:
            layers = largest(lambda n: sum(naive(of_layers(n), SEQUENCES)) <= device.memory, near)
            found.append([count, layers, *naive(of_layers(layers), SEQUENCES)])
            continue
        devices = [device] * count
        layers = largest(lambda n: plan_of(of_layers(n), devices, SEQUENCES, [MOST_M]) is not None, near)  # noqa: B023 called here
        plan = plan_of(of_layers(layers), devices, SEQUENCES, [MOST_M])
        assert plan is not None
        found.append([count, layers, *state_and_rest(plan)])
        print(f"Transformer, {count} accelerators: {layers} layers", flush=True)
    return found


def amoebanet_rows() -> list[list[float]]:
    """Returns, by number of accelerators, the bytes of state and activations. Infinite if the model does not fit."""
    found, device = [], PRESETS["tpuv2"]
    for count, (layers, filters, _, _) in AMOEBANETS.items():
        profile = amoebanet(layers, filters)
        if not count:
            found.append([count, *naive(profile, IMAGES)])
            continue
        plan = plan_of(profile, [device] * count, IMAGES, [1, 2, 4, 8, 16, 32, 64, 128])
        found.append([count, *((0.0, float("inf")) if plan is None else state_and_rest(plan))])
        print(f"AmoebaNet-D ({layers}, {filters}), {count} accelerators", flush=True)
    return found


def planning_seconds() -> float:
    """Measures the CPU time to plan 1663 layers on 128 devices without restrictions."""
    start = time.process_time()
    search(transformer()(1663), [PRESETS["tpuv3"]] * 128, SEQUENCES)
    return time.process_time() - start


def beside(paper: Sequence[float], ours: Sequence[float], unit: float) -> list[str]:
    """Returns the paper's numbers and gpipe's in the same unit."""
    return [f"{one:.4g} / {other / unit:.1f}" for one, other in zip(paper, ours, strict=True)]


def _name(count: float) -> str:
    return f"Pipeline-{count:.0f}" if count else "Naive-1"


def main() -> None:
    """Plans, and writes both tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.table1", description=__doc__)
    parser.add_argument("--most", type=int, default=128, help="the most accelerators")
    parser.add_argument("--keep", default="table1", help="write the result under another name")
    options = parser.parse_args()
    transformers, amoebanets, planning = transformer_rows(options.most), amoebanet_rows(), planning_seconds()
    rows = [
        [
            _name(count),
            f"{TRANSFORMERS[int(count)][0]}",
            f"{layers:.0f}",
            *(
                f"{paper:.1f} / {ours / GIB:.1f}"
                for paper, ours in zip(TRANSFORMERS[int(count)][1:], bytes_, strict=True)
            ),
        ]
        for count, layers, *bytes_ in transformers
    ]
    nets = [
        [
            _name(count),
            "({}, {})".format(*AMOEBANETS[int(count)][:2]),
            *(
                f"{paper:.2f} / {ours / 1e9:.2f}"
                for paper, ours in zip(AMOEBANETS[int(count)][2:], bytes_, strict=True)
            ),
        ]
        for count, *bytes_ in amoebanets
    ]
    text = [
        "# Table 1: the largest networks, by the planner",
        describe(facts()),
        table(["Transformer, 16 GiB", "paper L", "L here", "state GiB, paper / here", "activations GiB"], rows),
        table(["AmoebaNet-D, 8 GiB", "(L, D)", "state GB, paper / here", "activations GB, paper / here"], nets),
        "Activations here are what the plan keeps: as much as fits, to recompute less. Attention is fused here, its "
        "scores are never kept, and more layers fit than in the paper. Naive-1 of AmoebaNet-D does not fit here.",
        f"1663 layers on 128 devices, any schedule, M and number of ranks: planned in {planning:.1f} s of a core.",
    ]
    data = {"facts": facts(), "transformer": transformers, "amoebanet": amoebanets, "planning_seconds": planning}
    write(options.keep, "\n\n".join(text), data)


if __name__ == "__main__":
    main()
