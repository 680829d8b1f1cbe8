"""The arguments of `GPipe` that a plan gives, in place of the user."""

from dataclasses import replace

from gpipe.build.arguments import Arguments
from gpipe.plan.cost import StageCost
from gpipe.plan.search.found import Plan

UNSAID = {"partitions": None, "micro_batches": None, "schedule": "gpipe", "stages_per_rank": None, "remat": "always"}
"""The arguments that a plan gives, as they are where the user says nothing."""


def follow_plan(asked: Arguments) -> Arguments:
    """The arguments with what the plan says of them, if there is one.

    What the plan has measured is taken for the costs of the layers, where the user gives none; what it has counted,
    if there is no sample on which to measure them.

    M may be given beside a plan, and is taken instead: a loss curve depends on it, and on nothing else in a plan.

    Raises:
        TypeError: The plan is none.
        ValueError: The user says what the plan says.
    """
    plan = asked.plan
    if plan is None:
        return asked
    if not isinstance(plan, Plan):
        raise TypeError(f"plan= is a {type(plan).__name__}; give what gpipe.find_plan gave")
    said = [name for name, unsaid in UNSAID.items() if getattr(asked, name) != unsaid and name != "micro_batches"]
    if said:
        raise ValueError(f"plan= says {', '.join(f'{name}=' for name in said)} already; leave them out, or plan=")
    followed = replace(
        asked,
        partitions=list(plan.layers_per_partition),
        micro_batches=plan.micro_batches if asked.micro_batches is None else asked.micro_batches,
        schedule=plan.schedule,
        stages_per_rank=plan.stages_per_rank,
        remat=list(plan.remat),
    )
    fits = asked.costs is None and followed.micro_batches == plan.micro_batches
    return replace(followed, costs=plan.work) if fits and (plan.measured or asked.sample is None) else followed


def planned_costs(asked: Arguments) -> tuple[StageCost, ...] | None:
    """What the plan foretells of each stage, if nothing is to be measured anew: for its M, and by its costs."""
    return asked.plan.costs if asked.plan is not None and asked.costs is asked.plan.work else None


def planned_bytes(asked: Arguments) -> tuple[StageCost, ...] | None:
    """What the plan foretells that each stage holds, if M is its own: the cuts are, whatever the layers' costs."""
    return asked.plan.costs if asked.plan is not None and asked.micro_batches == asked.plan.micro_batches else None


def has_measured(asked: Arguments) -> bool:
    """Whether what the plan foretells was measured."""
    return planned_costs(asked) is not None and asked.plan is not None and asked.plan.measured
