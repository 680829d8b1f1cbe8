"""Tells before the first step what in the settings of a pipe will cost time, and what to do about it."""

from collections.abc import Iterator

from gpipe.build.settings import Settings
from gpipe.findings.randomness import find_own_generators
from gpipe.plan.program import Program
from gpipe.plan.simulate import equal_bubble

DWARFS = 1.5  # a stage this many times the mean sets the pace for all

SMALL = 0.1  # a bubble that is not worth a word


def examine_settings(settings: Settings) -> list[str]:
    """Tells of few micro-batches, empty and costly stages, and generators without a key."""
    return [
        *_bubble(settings),
        *_empty_stages(settings),
        *_giants(settings),
        *find_own_generators(settings.layers),
    ]


def _bubble(settings: Settings) -> Iterator[str]:
    k, m = len(settings.devices), settings.micro_batches
    if k == 1 or m >= 4 * k:
        return
    now, then = _equal_bubble(settings, m), _equal_bubble(settings, 4 * k)
    if now is not None and then is not None and now > SMALL:
        yield (
            f"M={m} micro-batches for K={k} partitions leave a bubble of {now:.0%}; with M={4 * k}, four times K, it "
            f"would be {then:.0%}"
        )


def _equal_bubble(settings: Settings, micro_batches: int) -> float | None:
    """The bubble of the schedule's table for so many micro-batches; None where it has none."""
    rows = settings.schedule.rows(settings.placement, micro_batches)
    return None if rows is None else equal_bubble(Program.of(rows, micro_batches, rank_of=settings.placement))


def _empty_stages(settings: Settings) -> Iterator[str]:
    for stage, layers in enumerate(layers_of_stages(settings)):
        if not any(True for name in layers for _ in settings.layers[name].parameters()):
            yield (
                f"stage {stage} has no parameters; an optimizer over it alone would be refused, and it does "
                f"little work: give costs, or join its layers to a neighbour by partitions=[...]"
            )


def _giants(settings: Settings) -> Iterator[str]:
    names = list(settings.layers)
    cost = dict(zip(names, settings.costs, strict=True))
    shares = [sum(cost[name] for name in layers) for layers in layers_of_stages(settings)]
    mean = sum(shares) / len(shares)
    for stage, share in enumerate(shares):
        if mean and share > DWARFS * mean:
            largest = max(layers_of_stages(settings)[stage], key=cost.__getitem__)
            yield (
                f"stage {stage} costs {share / mean:.1f} times the mean, so the others wait for it; its largest "
                f"layer is {largest} with {cost[largest] / share:.0%} of it: cut that layer finer, use fewer "
                f"partitions, or give measured costs"
            )


def layers_of_stages(settings: Settings) -> list[list[str]]:
    """The names of the layers of each stage."""
    names = iter(settings.layers)
    return [[next(names) for _ in range(count)] for count in settings.layers_per_partition]
