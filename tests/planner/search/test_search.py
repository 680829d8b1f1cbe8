"""The plan that is found fits, is what the simulator says, and no other is faster."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise, product
from math import inf, nan
from typing import Any, Literal
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.planner.search import candidates, table_search
from gpipe.planner.search.candidates import AUTO, Choices, Shape, least_seconds, likely_seconds
from gpipe.planner.search.device import PRESETS, Device
from gpipe.planner.search.listing import ROUNDING_FACTOR
from gpipe.planner.search.plan import MAX_STORED, Plan
from gpipe.planner.search.profile import LayerProfile, Line, Profile, bounds
from gpipe.planner.search.search import ALIKE_FACTOR, search
from gpipe.planner.search.trial import Trial, every_split
from gpipe.planner.search.units import format_seconds
from gpipe.schedule.cost import StageCost
from gpipe.schedule.laws import check
from gpipe.schedule.lower import place_recompute, place_transfers
from gpipe.schedule.simulate import Simulator, simulate

lines = st.builds(Line, st.integers(0, 3).map(float), st.integers(0, 5).map(float))


@st.composite
def profiles(draw: st.DrawFn, most: int = 5) -> Profile:
    has_parts = draw(st.booleans())
    layers = [
        LayerProfile(
            f"layer {at}",
            forward=draw(st.builds(Line, st.just(1.0), st.integers(0, 5).map(float))),
            backward=draw(st.builds(Line, st.just(1.0), st.integers(0, 9).map(float))),
            boundary=draw(lines),
            activations=draw(lines),
            keeps_input=draw(lines),
            working=draw(lines),
            state=float(draw(st.integers(0, 20))),
            popped=((0, Line(1.0)),) if at == most - 1 else (),
            parts=(draw(lines), draw(lines)) if has_parts else None,
        )
        for at in range(draw(st.integers(1, most)))
    ]
    return Profile(tuple(layers))


@st.composite
def fleets(draw: st.DrawFn, most: int = 3) -> list[Device]:
    memory = st.sampled_from([20.0, 40.0, 60.0, 90.0, 150.0, inf])
    device = st.builds(Device, memory, st.sampled_from([1.0, 2.0, 0.5]), st.sampled_from([inf, 2.0]))
    return draw(st.lists(device, min_size=1, max_size=most))


def found(profile: Profile, devices: list[Device], batch: int, choices: Choices) -> Plan | None:
    try:
        return search(profile, devices, batch, choices)
    except ValueError as error:
        if "[nothing-fits]" not in str(error):
            raise
        return None


@pytest.mark.parametrize("large", [candidates.LARGE, 0])
@settings(max_examples=40, deadline=None)
@given(profile=profiles(), devices=fleets(), batch=st.integers(1, 6))
def test_a_plan_fits_and_takes_what_the_simulator_says(
    large: int, profile: Profile, devices: list[Device], batch: int
) -> None:
    with patch.object(candidates, "LARGE", large):
        plan = found(profile, devices, batch, Choices())
    if plan is None:
        return
    for each in (plan, *plan.alternatives):
        bare = each.shape.program()
        assert bare is not None
        table = place_transfers(place_recompute(bare, each.remat))
        simulation, held = simulate(table, each.costs), each.costs
        if not large:  # `LargeTable` leaves messages that wait out
            held = tuple(replace(cost, sent_forward=0, sent_backward=0) for cost in held)
        assert each.peak_bytes == simulate(table, held).peak_bytes
        assert all(peak <= device.memory for peak, device in zip(each.peak_bytes, each.devices, strict=True))
        assert each.seconds == pytest.approx(simulation.timeline.seconds)
        assert each.communication <= each.seconds * ROUNDING_FACTOR
        assert each.bubble == pytest.approx(simulation.timeline.idle_share())
        assert each.seconds * ROUNDING_FACTOR >= plan.seconds
        assert sum(each.layers_per_partition) == len(profile.layers)
    every = [plan.shape, *(other.shape for other in plan.alternatives), *(other.shape for other in plan.rejected)]
    assert len({*every}) == len(every)
    missing = {*Choices().shapes(len(devices), batch, len(profile.layers))} ^ {*every}  # nothing is lost
    assert all(shape.partitions == 1 and shape.stages > 1 for shape in missing)  # for which memory asked


@settings(max_examples=30, deadline=None)
@given(profile=profiles(), devices=fleets(), micro_batches=st.integers(1, 4))
def test_what_is_searched_is_lawful_fits_and_takes_what_the_simulator_says_and_no_longer_than_pages(
    profile: Profile, devices: list[Device], micro_batches: int
) -> None:
    size = (len(devices),), (micro_batches,)
    pages = found(profile, devices, micro_batches, Choices(*size))
    with patch.object(table_search, "MAX_LISTED", 3_000):
        plan, same = (found(profile, devices, micro_batches, Choices(*size, (AUTO,))) for _ in range(2))
    assert plan == same
    assert (plan is None) == (pages is None)
    if plan is None or pages is None:
        return
    for each in (plan, *plan.alternatives):
        check(each.program)
        assert each.peak_bytes == each.simulation.peak_bytes
        assert all(peak <= device.memory for peak, device in zip(each.peak_bytes, devices, strict=True))
        assert each.seconds == pytest.approx(each.simulation.timeline.seconds)
        assert (each.least_seconds or 0.0) <= each.seconds * ROUNDING_FACTOR
        assert plan.seconds <= min(each.seconds, pages.seconds) * ROUNDING_FACTOR


def brute_force(profile: Profile, devices: list[Device], batch: int, choices: Choices) -> float:
    """The least seconds of all shapes, cuts and numbers of insides kept, each simulated by itself."""
    best = inf
    for shape in choices.shapes(len(devices), batch, len(profile.layers)):
        bare = shape.program() if shape.stages <= len(profile.layers) else None
        if bare is None:
            continue
        used = devices[: shape.partitions]
        sized = profile.of_micro_batch(batch // shape.micro_batches)
        trial = Trial(shape, bare, sized, used, profile.speeds(used))
        for cuts in every_split(len(profile.layers), shape.stages):
            costs = trial.costs(cuts)
            for kept in product(range(shape.micro_batches + 1), repeat=shape.stages):
                simulation = simulate(place_transfers(place_recompute(bare, kept)), costs)
                if all(peak <= device.memory for peak, device in zip(simulation.peak_bytes, used, strict=True)):
                    best = min(best, simulation.timeline.seconds)
    return best


@pytest.mark.parametrize("schedules", [("gpipe", "1f1b"), ("zb_h1", "zb_h2"), ("interleaved",), ("zb_v", "v_min")])
@settings(max_examples=6, deadline=None)
@given(profile=profiles(most=4), devices=fleets(most=2), batch=st.sampled_from([1, 2, 3]))
def test_brute_force_finds_nothing_better(
    schedules: tuple[str, ...], profile: Profile, devices: list[Device], batch: int
) -> None:
    choices = Choices(schedules=schedules)
    plan = found(profile, devices, batch, choices)
    assert (inf if plan is None else plan.seconds) == pytest.approx(brute_force(profile, devices, batch, choices))


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), devices=fleets(), batch=st.integers(1, 6), data=st.data())
def test_no_cuts_take_less_than_the_bounds(
    profile: Profile, devices: list[Device], batch: int, data: st.DataObject
) -> None:
    shape = data.draw(st.sampled_from(list(Choices().shapes(len(devices), batch, len(profile.layers)))))
    program = shape.program()
    if program is None or shape.stages > len(profile.layers):
        return
    sized, used = profile.of_micro_batch(batch // shape.micro_batches), devices[: shape.partitions]
    speeds = profile.speeds(used)
    trial = Trial(shape, program, sized, used, speeds)
    cuts = data.draw(st.sampled_from(list(every_split(len(profile.layers), shape.stages))))
    costs = trial.costs(cuts)
    seconds = Simulator(program, messages=True).seconds(costs)
    assert least_seconds(shape, sized, speeds) <= seconds * (1 + 1e-9)
    assert trial.least_seconds(costs) <= seconds
    assert likely_seconds(shape, sized, speeds) >= least_seconds(shape, sized, speeds)


def test_a_split_backward_may_end_before_its_weights_are_on_the_way() -> None:
    layer = LayerProfile("layer", Line(1.0), Line(2.0))
    sized, shape = Profile((layer,) * 16).of_micro_batch(1), Shape(8, 4, "interleaved_zb", 2)
    program = shape.program()
    assert program is not None
    trial = Trial(shape, program, sized, [Device(flops=1.0)] * 8, [1.0] * 8)
    seconds = trial.fitting.simulator.seconds(trial.costs((1,) * 16))
    assert least_seconds(shape, sized, [1.0] * 8) <= seconds < sum(sized.work)
    short = Profile((replace(layer, backward=Line(9.0), parts=(Line(1.0), Line(1.0))),) * 16).of_micro_batch(1)
    trial = Trial(shape, program, short, [Device(flops=1.0)] * 8, [1.0] * 8)
    seconds = trial.fitting.simulator.seconds(trial.costs((1,) * 16))  # the two parts take less than the whole
    assert least_seconds(shape, short, [1.0] * 8) <= seconds
    assert trial.least_seconds(trial.costs((1,) * 16)) <= seconds


def test_a_stage_costs_what_its_layers_do() -> None:
    layer = LayerProfile("a", Line(1.0), Line(2.0), Line(8.0), Line(16.0), Line(4.0), state=12.0)
    popping = LayerProfile("b", Line(1.0), Line(2.0), Line(8.0), popped=((0, Line(32.0)),))
    sized = Profile((layer, layer, popping)).of_micro_batch(1)
    assert [sized.entering(*run) for run in bounds([1, 2])] == [8.0, 40.0]
    assert [sized.entering(*run) for run in bounds([2, 1])] == [8.0, 40.0]
    whole = sized.cost(0, 3, speed=0.5)
    assert (whole.forward, whole.backward, whole.boundary) == (6.0, 12.0, 8)
    assert (whole.activations, whole.state) == (2 * 16 + 4, 24)  # the input of the first is its boundary


def test_what_does_not_fit_is_recomputed_where_and_as_often_as_memory_demands() -> None:
    layer = LayerProfile("layer", Line(1.0), Line(2.0), boundary=Line(1.0), activations=Line(10.0))
    first, second = Device(memory=45, flops=1.0), Device(memory=100, flops=1.0)
    plan = search(Profile((layer,) * 2), [first, second], 8, Choices([2], [8], ["gpipe"]))
    assert plan.remat == (2, "never")  # 8 boundaries, 2 insides and one more while it is made again
    assert plan.peak_bytes == (40, 88)  # and messages that wait


def test_what_cannot_fit_says_how_near_it_comes() -> None:
    layer = LayerProfile("layer", Line(1.0), Line(2.0), Line(1.0), activations=Line(per_row=100.0), state=10.0)
    nearest = "The closest is K=2 M=4 1f1b, in which rank 0 needs 113 bytes of 111 bytes"
    with pytest.raises(ValueError, match=nearest):
        search(Profile((layer,) * 2), [Device(memory=111)] * 2, 4)
    nearest = r"The closest is K=2 M=4 \w+, in which the model needs at least 220 bytes of 18 bytes.*\[nothing-fits\]"
    with patch.object(Trial, "attempt", side_effect=AssertionError), pytest.raises(ValueError, match=nearest):
        search(Profile((layer,) * 2), [Device(memory=9)] * 2, 4)
    with pytest.raises(ValueError, match=r"3 stages, 2 layers.*\[nothing-fits\]"):
        search(Profile((layer,) * 2), [Device()] * 3, 4, Choices(partitions=[3], schedules=["gpipe"]))


def test_mistakes_are_told_together() -> None:
    told = "\n".join(Choices([3], [3, 10**9], ["gpip"]).mistakes(1, 10**9))
    assert [re.split("[; ]", line)[0] for line in told.splitlines()] == [
        "partitions=3", "micro_batches=3", "micro_batches=1000000000", "schedule='gpip'",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"memory=0 is not positive.*\nlink=-1"):
        Device(memory=0, link=-1)


def test_a_plan_says_what_it_is_and_what_it_was_chosen_from() -> None:
    layer = LayerProfile("layer", Line(0, 1e12), Line(0, 2e12), boundary=Line(2**20), state=2**30)
    plan = search(Profile((layer,) * 4), [PRESETS["v100"]] * 2, 4)
    text = plan.explain()
    assert text.startswith(f"{plan.shape}: {format_seconds(plan.seconds)} for 4 rows")
    assert "rank 1 (v100): layer to layer" in text or "rank 1 (v100): layer, remat" in text
    assert len(plan.alternatives) == 3
    assert text.count("next: ") == 3
    assert "rejected (more stages than layers)" in text
    assert plan.rows_per_second == 4 / plan.seconds
    assert plan.simulation.peak_bytes == plan.peak_bytes


def test_the_json_of_a_plan_has_its_alternatives_and_what_was_rejected() -> None:
    layer = LayerProfile("layer", Line(0, 1e12), Line(0, 2e12), boundary=Line(2**20), state=2**30)
    plan = search(Profile((layer,) * 4), [PRESETS["v100"]] * 2, 4)
    assert plan.alternatives
    assert plan.rejected
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert read == plan
    assert read.explain() == plan.explain()
    many = replace(plan, rejected=plan.rejected[:1] * (MAX_STORED + 1))
    assert len(Plan.from_json(many.to_json()).rejected) == MAX_STORED


OTHER: dict[str, object] = {"name": "inf", "schedule": "1f1b", "unsplit": frozenset({1}), "names": ("nan", "inf")}


@pytest.mark.parametrize("number", [inf, nan, 0.1])
def test_the_json_of_a_plan_keeps_each_number(number: float) -> None:
    """Bug stories: a plan for `Device(host=inf)` could be stored, not read; others could not be stored."""
    layer = LayerProfile("layer", Line(1.0), Line(2.0), boundary=Line(1.0), state=3.0)
    plan = search(Profile((layer,) * 2), [PRESETS["v100"]] * 2, 4, Choices([2], [4], ["1f1b"]))
    plans: list[Plan] = []
    wholes: dict[type, Callable[[Any], Plan]] = {
        Plan: lambda changed: changed,
        StageCost: lambda changed: replace(plan, costs=(changed,) * 2),
        Device: lambda changed: replace(plan, devices=(changed,) * 2),
    }
    parts: list[Any] = [plan, plan.costs[0], plan.devices[0]]
    for part in parts:
        floats = [each.name for each in fields(part) if each.type in (float, float | None)]
        for name in {*floats, *(OTHER.keys() & vars(part).keys())}:
            with suppress(ValueError):  # Not every number is valid for a device.
                plans.append(wholes[type(part)](replace(part, **{name: OTHER.get(name, number)})))
    plans += [replace(plan, work=(number,) * 2), replace(plan, alternatives=(replace(plan, seconds=number),))]
    assert len(plans) > 20
    for stored in plans:
        text = json.dumps(stored.to_json(), allow_nan=False)
        read = Plan.from_json(json.loads(text))
        for each in fields(Plan):
            assert repr(getattr(read, each.name)) == repr(getattr(stored, each.name))


def test_many_layers_are_cut_evenly_and_better_than_evenly_where_that_pays() -> None:
    head = LayerProfile("head", Line(8.0), Line(1.0))
    layer = LayerProfile("layer", Line(1.0), Line(2.0))
    shape = Choices([4], [4], ["1f1b"])
    plan = search(Profile((head, *[layer] * 30)), [Device(flops=1.0)] * 4, 4, shape)
    trial = Shape(4, 4, "1f1b").program()
    assert trial is not None
    profile = Profile((head, *[layer] * 30)).of_micro_batch(1)
    cut = Trial(plan.shape, trial, profile, plan.devices, [1.0] * 4)
    every = (cut.fitting.simulator.seconds(cut.costs(layers)) for layers in every_split(31, 4))
    assert plan.seconds <= 1.02 * min(every)


def test_of_those_that_a_measurement_cannot_tell_apart_the_fewest_stages_are_taken() -> None:
    layer = LayerProfile("layer", forward=Line(per_row=1.0), backward=Line(per_row=2.0))
    devices = [Device(flops=1.0)] * 2
    some = Choices([2], [32], ["1f1b", "interleaved"])
    counted, measured = (search(Profile((layer,) * 16, unit), devices, 32, some) for unit in ("flops", "seconds"))
    assert counted.stages_per_rank > 1  # a smaller bubble, on paper
    assert measured.stages_per_rank == 1
    assert counted.seconds < measured.seconds <= ALIKE_FACTOR * counted.seconds
    assert counted.shape in [other.shape for other in measured.alternatives]
    assert "faster, with more stages" in measured.explain()


def test_a_plan_says_where_costs_are_noise_and_where_plain_torch_is_faster() -> None:
    layer = LayerProfile("layer", forward=Line(per_row=1e-6), backward=Line(per_row=2e-6))
    plan = search(Profile((layer,) * 8, "seconds"), [Device()] * 2, 8, Choices([2]))
    assert "which is less than the overhead" in plan.explain()
    slow = search(
        Profile((replace(layer, forward=Line(per_row=1.0)),) * 8, "seconds"), [Device()] * 2, 8, Choices([2])
    )
    assert "overhead" not in slow.explain()
    assert "without gpipe" not in slow.explain()
    assert "takes 1.00 s, which is faster" in replace(slow, plain_seconds=1.0).explain()
    assert "takes 1000 s, which is slower" in replace(slow, plain_seconds=1e3).explain()


def test_a_plan_warns_if_the_machine_was_busy_while_layers_were_measured() -> None:
    layer = LayerProfile("layer", forward=Line(per_row=1.0), backward=Line(per_row=2.0))
    measured = search(Profile((layer,) * 4, "seconds"), [Device()] * 2, 8, Choices([2]))
    warning = "Other processes used 1.7 cores while the layers were measured"
    assert warning in replace(measured, other_cores=1.7).explain()
    assert "Other processes" not in replace(measured, other_cores=0.1).explain()
    assert "Other processes" not in measured.explain()
    assert replace(measured, other_cores=1.7) == measured
    counted = search(Profile((layer,) * 4), [Device()] * 2, 8, Choices([2]))
    assert "Other processes" not in replace(counted, other_cores=1.7).explain()


@pytest.mark.parametrize("works", [(1.0,) * 4, (0.1, 0.2, 0.3, 0.7)])
@pytest.mark.parametrize("unit", ["flops", "seconds"])
def test_one_device_is_no_pipeline_with_itself(works: tuple[float, ...], unit: Literal["flops", "seconds"]) -> None:
    layers = tuple(LayerProfile("layer", Line(0, work), Line(0, 2 * work)) for work in works)
    plan = search(Profile(layers, unit), [Device(flops=1.0)], 6)
    assert (plan.schedule, plan.layers_per_partition) == ("gpipe", (4,))
    others = [other.shape for other in plan.alternatives] + [other.shape for other in plan.rejected]
    assert {shape.stages for shape in others} == {1}
    assert search(Profile(layers, unit), [Device()], 6, Choices(schedules=["zb_v"])).schedule == "zb_v"


def test_one_device_of_less_memory_than_a_stage_takes_recomputes_halves() -> None:
    layer = LayerProfile(
        "layer", Line(per_row=1.0), Line(per_row=2.0), Line(per_row=1.0), activations=Line(per_row=10.0)
    )
    plan = search(Profile((layer,) * 4), [Device(memory=26, flops=1.0)], 1)
    assert (plan.stages_per_rank, plan.seconds, plan.peak_bytes) == (2, 14.0, (22,))


def test_one_device_of_little_memory_holds_one_micro_batch_after_the_other() -> None:
    layer = LayerProfile(
        "layer", Line(per_row=1.0), Line(per_row=2.0), Line(per_row=1.0), activations=Line(per_row=10.0)
    )
    plan = search(Profile((layer,) * 2), [Device(memory=25, flops=1.0)], 4)
    assert (plan.schedule, plan.micro_batches, plan.remat) == ("1f1b", 4, ("never",))


@pytest.mark.parametrize("layers", [4, 16])
def test_more_devices_make_no_plan_slower(layers: int) -> None:
    profile = Profile((LayerProfile("layer", Line(per_row=1.0), Line(per_row=2.0)),) * layers)
    seconds = [search(profile, [Device(flops=1.0)] * many, 8, Choices(None, [4])).seconds for many in (8, 9, 16, 20)]
    assert all(more <= fewer * ROUNDING_FACTOR for fewer, more in pairwise(seconds))
    most = max(shape.partitions for shape in Choices().shapes(1000, 8, layers))
    assert most == layers  # stages of no layers are none


def test_more_micro_batches_than_are_enough_are_tried_only_where_memory_asks_for_them() -> None:
    layer = LayerProfile(
        "layer", Line(per_row=1.0), Line(per_row=2.0), Line(per_row=1.0), activations=Line(per_row=10.0)
    )
    profile = Profile((layer,) * 4)
    large, small = (search(profile, [Device(memory, flops=1.0)] * 2, 1024) for memory in (inf, 120))
    others = [other.shape for other in large.alternatives] + [other.shape for other in large.rejected]
    assert {shape.micro_batches for shape in others} == {1, 2, 4, 8, 16, 32, 64}
    assert small.micro_batches == 256
    assert max(small.peak_bytes) <= 120
    prime = search(profile, [Device(flops=1.0)] * 2, 101)
    assert prime.micro_batches == 101  # the least that is enough


def test_a_link_carries_one_message_after_the_other() -> None:
    layer = LayerProfile("layer", Line(per_row=1.0), Line(per_row=2.0), boundary=Line(per_row=10.0))
    devices = [Device(flops=1.0, link=1.0)] * 2
    plan = search(Profile((layer,) * 2), devices, 8, Choices([2], [8], ["gpipe"]))
    assert plan.communication == 80  # and as many seconds back, none of which begins before all have come
    assert plan.seconds == 1 + 80 + 1 + 2 + 80 + 2
    assert search(Profile((layer,) * 2), devices, 8).partitions == 1


def test_a_mini_batch_of_any_number_of_rows_is_planned_and_no_table_is_endless() -> None:
    profile = Profile((LayerProfile("layer", Line(per_row=1.0), Line(per_row=2.0)),) * 2)
    plan = search(profile, [Device(flops=1.0)] * 2, 10**12, Choices([2], schedules=["gpipe"]))
    assert plan.micro_batches == 64


@settings(max_examples=60, deadline=None)
@given(profile=profiles(), devices=fleets(), batch=st.integers(1, 6))
def test_lower_bounds_reject_no_partition_that_fits(profile: Profile, devices: list[Device], batch: int) -> None:
    """Without the bounds, the search finds the same plan, or nothing either."""
    bounded = found(profile, devices, batch, Choices())
    with patch.object(Trial, "_surely_too_big", return_value=None):
        exact = found(profile, devices, batch, Choices())
    assert (bounded and replace(bounded, rejected=())) == (exact and replace(exact, rejected=()))
