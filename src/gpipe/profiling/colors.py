"""The colours of the kinds, and how the stages of one rank are told apart: later ones are lighter.

Times, bytes and shares in words, short enough to be read at a glance.

Where the time of steps went, as a table whose rows sum to 100 %.
"""

from collections.abc import Iterator, Mapping
from math import floor, log10

from gpipe.schedule.action import Kind
from gpipe.schedule.timeline import Timeline

COLORS = {
    Kind.FORWARD: "#4477aa",
    Kind.RECOMPUTE: "#ccbb44",
    Kind.BACKWARD: "#228833",
    Kind.BACKWARD_INPUT: "#7cae2e",
    Kind.BACKWARD_WEIGHT: "#66ccee",
    Kind.SEND: "#ee6677",
    Kind.RECEIVE: "#aa3377",
    Kind.REDUCE: "#ee7733",
    Kind.TIE: "#cc3311",
    Kind.COMMIT: "#009988",
}
LIGHTEST = 0.55
"""The share of white in the colours of a rank's last stage, if it has several."""
BRIGHT = 0.3
"""The luminance from which on dark type is easier to read."""


def nth_stages(timeline: Timeline) -> dict[tuple[int, int], int]:
    """By rank and stage, which of the stages of its rank it is, from 0.

    >>> from gpipe.schedule.simulate import figures
    >>> from gpipe.schedule.schedules.by_name import program_of
    >>> nth_stages(figures(program_of("zb_v", ranks=2, micro_batches=2)).timeline)
    {(0, 0): 0, (0, 3): 1, (1, 1): 0, (1, 2): 1}
    """
    stages: dict[int, set[int]] = {}
    for span in timeline.spans:
        stages.setdefault(span.rank, set()).add(span.action.stage)
    return {(rank, stage): nth for rank in sorted(stages) for nth, stage in enumerate(sorted(stages[rank]))}


def shade(kind: Kind, nth: int, stages: int) -> str:
    """The colour of a kind at the n-th of so many stages of a rank.

    >>> [shade(Kind.FORWARD, nth, stages=3) for nth in range(3)]
    ['#4477aa', '#779cc1', '#abc2d9']
    """
    white = LIGHTEST * nth / max(1, stages - 1)
    parts = (int(COLORS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def is_bright(color: str) -> bool:
    """Whether type on this colour is to be dark.

    >>> is_bright("#4477aa"), is_bright("#abc2d9")
    (False, True)
    """
    red, green, blue = ((int(color[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5))
    luminance: float = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return luminance > BRIGHT


def percent(share: float) -> str:
    """A share in whole percent.

    >>> percent(0.254)
    '25 %'
    """
    return f"{100 * share:.0f} %"


def lasts(seconds: float) -> str:
    """A time, in three digits and the unit that suits it.

    >>> lasts(0.01234), lasts(0.9996), lasts(2e-7), lasts(0.0)
    ('12.3 ms', '1.00 s', '0.200 µs', '0 ms')
    """
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    return _in_units(seconds, units, "ms")


def held(count: float) -> str:
    """A number of bytes likewise.

    >>> held(123), held(5 * 2**20)
    ('123 B', '5.00 MiB')
    """
    return _in_units(count, {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}, "B")


def _in_units(amount: float, units: Mapping[str, float], of_zero: str) -> str:
    if not amount:
        return f"0 {of_zero}"
    name, size = next(((n, s) for n, s in units.items() if amount >= s * 0.9995), list(units.items())[-1])
    value = amount / size
    return f"{value:.{max(0, 2 - floor(log10(float(f'{value:.3g}'))))}f} {name}"


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
