"""Finds the fastest plan with weights in host memory, for models that are larger than all devices together."""

from collections.abc import Sequence
from dataclasses import replace
from operator import add, attrgetter, itemgetter

from gpipe.planner.search.candidates import Choices, Shape
from gpipe.planner.search.device import Device
from gpipe.planner.search.fitting import HOST, Misfit, largest_misfit
from gpipe.planner.search.plan import Plan, Rejection
from gpipe.planner.search.profile import Profile, SizedProfile
from gpipe.planner.search.trial import message_costs, most_even
from gpipe.planner.search.units import format_seconds
from gpipe.schedule.lower import Remat

MAX_ACTIONS = 100_000  # the simulated forwards and backwards of all plans
FIRST_RESIDENT = 2
"""The number of loaded stages that is tried first: the next stage is loaded while a stage computes."""


class HostWeightsSearch:
    """Tries the schedule `"breadth_first"` with all micro-batches recomputed, for several numbers of stages.

    Each shape keeps two stages on a device, three if they fit, or one. Inputs are offloaded if they do not fit
    otherwise. Adds to the rejected shapes, and to the shapes that need too much memory, with the reason.
    """

    def __init__(self, profile: Profile, devices: Sequence[Device], global_batch: int, choices: Choices) -> None:
        self.profile, self.devices, self.global_batch, self.choices = profile, devices, global_batch, choices
        self.speeds = profile.speeds(devices)
        self.plans: list[Plan] = []
        self.rejected: list[Rejection] = []
        self.misfits: list[tuple[Misfit, Shape]] = []

    def best(self, wanted: int) -> list[Plan]:
        """Returns the fastest plans that fit."""
        layers, actions = len(self.profile.layers), 0
        listed = self.choices.shapes_with_host_weights(len(self.devices), self.global_batch, layers)
        for (least, _), shape in sorted([(self.bound(shape), shape) for shape in listed], key=itemgetter(0)):
            enough = sorted(plan.seconds for plan in self.plans)[wanted - 1 : wanted]
            if actions > MAX_ACTIONS or (enough and least >= enough[0]):
                self.rejected.append(Rejection(shape, "slower", f"takes at least {format_seconds(least)}"))
            else:
                actions += self.attempt_all(shape)
        # Times with the same three digits count as equal. Then fewer stages are better.
        plans = sorted(self.plans, key=lambda plan: (float(f"{plan.seconds:.3g}"), plan.shape.stages))
        slower = plans[wanted:]
        self.rejected += [Rejection(plan.shape, "slower", f"takes {format_seconds(plan.seconds)}") for plan in slower]
        return plans[:wanted]

    def sized(self, shape: Shape) -> SizedProfile:
        return self.profile.of_micro_batch(self.global_batch // shape.micro_batches)

    def bound(self, shape: Shape) -> tuple[float, int]:
        """Returns a lower bound on the seconds, from computation and from copies, and the number of stages."""
        sized, ranks = self.sized(shape), slice(shape.partitions)
        computation = shape.micro_batches * sum(sized.work) / sum(self.speeds[ranks])
        weights = sum(layer.weights for layer in self.profile.layers)
        copies = weights / sum(device.host for device in self.devices[ranks])
        return float(f"{max(computation, copies):.9g}"), shape.stages

    def attempt_all(self, shape: Shape) -> int:
        """Tries numbers of loaded stages, and to offload inputs. Returns the number of simulated actions."""
        before = len(self.plans)
        tried = [self._attempt(replace(shape, resident=FIRST_RESIDENT))]
        fits = len(self.plans) > before
        if shape.stages_per_rank > FIRST_RESIDENT or not fits:
            tried.append(self._attempt(replace(shape, resident=FIRST_RESIDENT + 1 if fits else 1)))
        return sum(tried)

    def _attempt(self, shape: Shape) -> int:
        """Adds a plan if it fits. Returns the number of simulated actions."""
        simulated, misfit = 0, None
        for remat in ("always", "offload_inputs"):
            plan = self._plan(shape, remat)
            limits = [device.memory for device in plan.devices]
            misfit = largest_misfit(least_bytes(plan), limits, is_bound=True)  # So many plans need not be simulated.
            if misfit is None:
                plan, simulated = plan.timed(), simulated + shape.actions
                misfit = largest_misfit(plan.peak_bytes, limits)
            if misfit is None:
                break
        if plan.host_bytes > self.choices.host_memory:
            host = Misfit(0, plan.host_bytes, self.choices.host_memory, HOST)
            both = sorted(filter(None, (host, misfit)), key=attrgetter("excess"))
            misfit = replace(both[-1], other=both[0] if len(both) > 1 else None)
        if misfit is None:
            self.plans.append(plan)
        else:
            self.misfits.append((misfit, shape))
            self.rejected.append(Rejection(shape, "too big", str(misfit)))
        return simulated

    def _plan(self, shape: Shape, remat: Remat) -> Plan:
        sized, used = self.sized(shape), slice(shape.partitions)
        devices, speeds, rank_of = self.devices[used], self.speeds[used], shape.rank_of
        assert rank_of is not None
        work = tuple(map(add, sized.work, sized.forward))
        layers = most_even(work, tuple(speeds[rank] for rank in rank_of))
        return Plan(
            micro_batches=shape.micro_batches,
            layers_per_partition=layers,
            rank_of=tuple(rank_of),
            schedule=shape.schedule,
            remat=(remat,) * shape.stages,
            names=tuple(layer.name for layer in sized.layers),
            work=tuple(each / speeds[0] for each in sized.work),
            costs=message_costs(sized, devices, speeds, layers, rank_of, host_remat=remat),
            costs_by="time" if self.profile.unit == "seconds" else "operations",
            resident=shape.resident,
            global_batch=self.global_batch,
            devices=tuple(devices),
        )


def least_bytes(plan: Plan) -> list[int]:
    """Returns a lower bound on the bytes of each rank.

    A backward needs the weights, gradients, input and activations of its stage. Gradients of the rank's next stage
    exist until the weights of this stage are freed. At the first backward of a stage, its rank also has the inputs of
    all micro-batches at its earlier stages, unless these are offloaded.
    """
    least, inputs, before = ([0] * plan.partitions for _ in range(3))
    for stage, (rank, cost, remat) in enumerate(zip(plan.rank_of, plan.costs, plan.remat, strict=True)):
        following = before[rank] + cost.gradients  # in the backward of the preceding stage of the rank
        before[rank] = inputs[rank] + cost.loaded + cost.gradients + cost.boundary + cost.activations + cost.working
        least[rank] = max(least[rank], before[rank], following)
        inputs[rank] += plan.micro_batches * cost.boundary if remat == "always" or stage == 0 else 0
    return least
