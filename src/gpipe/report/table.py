"""Where the time of a step went, as a table whose rows sum to 100 %."""

from collections.abc import Mapping
from math import floor

from rich import box
from rich.table import Table

MEANING = {
    "forward": "the layers, the first time",
    "recompute": "the layers again (rematerialization)",
    "backward": "the gradients",
    "bubble": "even the busiest rank waits",
    "imbalance": "ranks with less to do than the busiest",
    "communication": "tensors between partitions and replicas",
    "data": "making the next mini-batch ready",
    "weight update": "the optimizer",
}


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


def breakdown_table(shares: Mapping[str, float], seconds: float) -> Table:
    """Lays out the shares of `gpipe.plan.timeline.breakdown` for a step of `seconds`: percent, milliseconds, meaning.

    Rows are in the order of the paper's Table 4; names that it does not know come last.

    >>> table = breakdown_table({"bubble": 0.25, "forward": 0.75}, seconds=0.1)
    >>> [list(column.cells) for column in table.columns][:2]
    [['forward', 'bubble'], ['75.0 %', '25.0 %']]
    """
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    table.add_column("time went to", footer="total")
    table.add_column("share", justify="right", footer=f"{sum(percentages(shares).values()):.1f} %")
    table.add_column("ms", justify="right", footer=f"{seconds * 1000:.1f}")
    table.add_column("which is", style="dim")
    rounded = percentages(shares)
    for name in sorted(shares, key=[*MEANING, *(name for name in shares if name not in MEANING)].index):
        milliseconds = shares[name] * seconds * 1000
        table.add_row(name, f"{rounded[name]:.1f} %", f"{milliseconds:.1f}", MEANING.get(name, ""))
    return table
