"""Where the time of steps went, as a table whose rows sum to 100 %."""

from collections.abc import Iterator, Mapping
from math import floor

MEANING = {
    "forward": "the layers, the first time",
    "recompute": "the layers again (rematerialization)",
    "backward": "the gradients",
    "bubble": "the table has ranks wait, were all stages alike",
    "imbalance": "what some stages and micro-batches take longer",
    "late starts": "hand-over between ranks: what was needed was there",
    "communication": "messages on their way while their rank waited",
    "reduction": "gradients of replicas and of shared weights put together",
    "data": "making the next mini-batch ready",
    "weight update": "the optimizer",
    "host": "gpipe around the pipeline: splitting, checking, agreeing",
    "between steps": "your own code outside of the pipe",
}
"""The parts, in their order, and what each is."""


def percentages(shares: Mapping[str, float]) -> dict[str, float]:
    """Rounds shares that sum to 1 to tenths of a percent that sum to 100 exactly, by largest remainder.

    >>> percentages({"forward": 1 / 3, "backward": 1 / 3, "bubble": 1 / 3})
    {'forward': 33.4, 'backward': 33.3, 'bubble': 33.3}
    """
    tenths = {name: floor(share * 1000) for name, share in shares.items()}
    left = round(sum(shares.values()) * 1000) - sum(tenths.values())
    for name in sorted(shares, key=lambda name: tenths[name] - shares[name] * 1000)[:left]:
        tenths[name] += 1
    return {name: tenth / 10 for name, tenth in tenths.items()}


def breakdown_lines(shares: Mapping[str, float], seconds: float, steps: int) -> Iterator[str]:
    r"""The table of shares that sum to 1, of steps that last so long in the mean: percent, milliseconds, meaning.

    >>> print(*breakdown_lines({"forward": 0.75, "bubble": 0.25}, seconds=0.1, steps=8), sep="\n")
    time went to       share        ms  which is
    forward           75.0 %      75.0  the layers, the first time
    bubble            25.0 %      25.0  the table has ranks wait, were all stages alike
    a step           100.0 %     100.0  mean of 8
    """
    yield f"{'time went to':<16}{'share':>8}{'ms':>10}  which is"
    rounded = percentages(shares)
    for name, share in shares.items():
        yield f"{name:<16}{rounded[name]:>6.1f} %{share * seconds * 1000:>10.1f}  {MEANING.get(name, '')}".rstrip()
    yield f"{'a step':<16}{sum(rounded.values()):>6.1f} %{seconds * 1000:>10.1f}  mean of {steps}"
