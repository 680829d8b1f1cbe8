import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpipe.plan.timeline import breakdown
from gpipe.report import breakdown_table, percentages
from tests.support.timelines import pipelined


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=10).filter(any))
def test_percentages_sum_to_100_and_are_off_by_less_than_a_tenth(seconds: list[float]) -> None:
    shares = {str(i): value / sum(seconds) for i, value in enumerate(seconds)}
    rounded = percentages(shares)
    assert round(sum(rounded.values()), 6) == 100
    assert all(abs(rounded[name] - 100 * share) < 0.1 + 1e-9 for name, share in shares.items())


def test_the_table_lists_the_shares_in_the_order_of_the_paper() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80)
    console.print(breakdown_table({"other": 0.0} | breakdown(pipelined(2, 8)), seconds=0.2))
    lines = file.getvalue().splitlines()
    rows = [line.split("  ")[0].strip() for line in lines if " % " in line]
    assert rows == [
        *("forward", "recompute", "backward", "bubble", "imbalance", "communication"),
        *("data", "weight update", "other", "total"),
    ]
    assert any("100.0 %" in line and "200.0" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)
