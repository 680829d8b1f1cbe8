"""The arguments of `GPipe` that a plan gives, in place of the user."""

from dataclasses import replace

from gpipe.build.arguments import Arguments
from gpipe.plan.search.found import Plan

UNSAID = {"partitions": None, "micro_batches": None, "schedule": "gpipe", "stages_per_rank": None, "remat": "always"}
"""The arguments that a plan gives, as they are where the user says nothing."""


def follow_plan(asked: Arguments) -> Arguments:
    """The arguments with what the plan says of them, if there is one.

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
    return replace(
        asked,
        partitions=list(plan.layers_per_partition),
        micro_batches=plan.micro_batches if asked.micro_batches is None else asked.micro_batches,
        schedule=plan.schedule,
        stages_per_rank=plan.stages_per_rank,
        remat=list(plan.remat),
    )
