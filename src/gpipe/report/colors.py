"""The colours of the kinds, and how the stages of one rank are told apart: later ones are lighter."""

from gpipe.plan.action import Kind
from gpipe.plan.timeline import Timeline

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

    >>> from gpipe.plan.figures import figures
    >>> from gpipe.plan.schedules.by_name import program_of
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
