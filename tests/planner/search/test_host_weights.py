"""Weights on the host: found when nothing else fits, within the memory, and as fast as any shape that was tried."""

from dataclasses import replace
from operator import le

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.planner.search.candidates import Choices, Shape
from gpipe.planner.search.device import Device
from gpipe.planner.search.host_weights import HostWeightsSearch, least_bytes
from gpipe.planner.search.plan import Plan
from gpipe.planner.search.profile import LayerProfile, Line, Profile
from gpipe.planner.search.search import search
from gpipe.schedule.action import Kind
from gpipe.schedule.lower import Remat
from gpipe.schedule.simulate import simulate
from tests.support.programs import LAW

WEIGHTS = 1000  # bytes of a layer
LAYER = LayerProfile(
    "layer",
    Line(per_row=1.0),
    Line(per_row=2.0),
    boundary=Line(per_row=1.0),
    activations=Line(per_row=4.0),
    state=4.0 * WEIGHTS,
    weights=WEIGHTS,
    gradients=WEIGHTS,
)


def profile(layers: int) -> Profile:
    return Profile((LAYER,) * layers)


def device(stages: float, host: float = 1e3) -> Device:
    return Device(memory=stages * WEIGHTS, flops=1.0, host=host)


@LAW
@given(st.integers(2, 24), st.integers(1, 3), st.floats(1.5, 30), st.floats(1.0, 1e4), st.sampled_from([4, 8]))
def test_the_plan_fits_and_no_other_choice_is_faster(
    layers: int, k: int, room: float, host: float, rows: int
) -> None:
    choices = Choices(weights="host")
    devices = [device(room, host)] * k
    every = HostWeightsSearch(profile(layers), devices, rows, choices)
    for shape in choices.shapes_with_host_weights(k, rows, layers):
        assert every.attempt_all(shape) >= 0
    if not every.plans:
        with pytest.raises(ValueError, match=r"\[nothing-fits\]"):
            search(profile(layers), devices, rows, choices)
        return
    plan = search(profile(layers), devices, rows, choices)
    assert plan.resident in (1, 2, 3)
    assert max(plan.peak_bytes) <= room * WEIGHTS
    assert plan.peak_bytes == simulate(plan.program, plan.costs).peak_bytes
    assert any(action.kind is Kind.LOAD for action in plan.program.actions)
    assert plan.seconds <= min(other.seconds for other in every.plans) * 1.01
    for other in every.plans:
        assert every.bound(other.shape)[0] <= other.seconds * (1 + 1e-9)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.program == plan.program


@LAW
@given(st.data(), st.integers(2, 9), st.integers(1, 3), st.sampled_from(["always", "offload_inputs"]))
def test_a_lower_bound_is_at_most_the_simulated_memory(
    data: st.DataObject, layers: int, k: int, remat: Remat
) -> None:
    lines = st.builds(Line, st.sampled_from([0.0, 3.0]), st.sampled_from([0.0, 1.0, 10.0]))
    drawn = [
        replace(LAYER, boundary=data.draw(lines), activations=data.draw(lines), leaving=data.draw(lines))
        for _ in range(layers)
    ]
    every = HostWeightsSearch(Profile(tuple(drawn)), [Device(host=1e3)] * k, 4, Choices(weights="host"))
    for shape in every.choices.shapes_with_host_weights(k, 4, layers):
        plan = every._plan(replace(shape, resident=data.draw(st.integers(1, 3))), remat)
        assert all(map(le, least_bytes(plan), plan.timed().peak_bytes))


def test_weights_are_on_the_host_only_if_nothing_else_fits() -> None:
    assert search(profile(16), [device(65)], 8).resident is None
    plan = search(profile(16), [device(8)], 8)
    assert plan.resident == 2
    assert {each.shape.schedule for each in plan.rejected if each.reason == "too big"} >= {"gpipe", "1f1b"}
    assert search(profile(16), [device(65)], 8, Choices(weights="host")).resident is not None
    for choices in (Choices(weights="device"), Choices(schedules=("1f1b",))):
        with pytest.raises(ValueError, match=r"\[nothing-fits\]"):
            search(profile(16), [device(8)], 8, choices)
    with pytest.raises(ValueError, match=r"Device\(host=...\) for weights on the host"):
        search(profile(16), [device(8, host=0.0)], 8)
    with pytest.raises(ValueError, match="the speed of copies is unknown"):
        search(profile(16), [device(8, host=0.0)], 8, Choices(weights="host"))


def test_a_plan_that_needs_too_much_host_memory_is_rejected_by_name() -> None:
    plan = search(profile(16), [device(8)], 8, Choices(host_memory=64 * WEIGHTS))
    assert plan.host_bytes == 64 * WEIGHTS
    with pytest.raises(ValueError, match=r"the host needs 62.50 KiB of 62.49 KiB.*\[nothing-fits\]"):
        search(profile(16), [device(8)], 8, Choices(host_memory=64 * WEIGHTS - 10))
    with pytest.raises(ValueError, match=r"the host needs 62.50 KiB of 39.06 KiB. Use .* a larger host_memory="):
        search(profile(16), [device(8)], 8, Choices(host_memory=40 * WEIGHTS))  # other shapes lack a little on rank 0
    both = "host needs 62.62 KiB of 19.53 KiB, and rank 0 needs at least 2.94 KiB of 1.95 KiB .*a larger host_memory="
    with pytest.raises(ValueError, match=both):
        search(profile(16), [device(2)], 8, Choices(host_memory=20 * WEIGHTS))
    offloads = search(profile(16), [device(4.6)], 512, Choices(micro_batches=(8,)))
    assert "offload_inputs" in offloads.remat
    assert offloads.host_bytes == 64 * WEIGHTS + 15 * 512


@pytest.mark.parametrize(("host", "bottleneck"), [(1e6, "computation"), (20.0, "transfers")])
def test_the_plan_names_its_bottleneck(host: float, bottleneck: str) -> None:
    plan = search(profile(16), [device(8, host)], 8)
    text = plan.explain()
    assert f"so the bottleneck is {bottleneck}" in text
    assert "62.50 KiB of host memory" in text
    free = simulate(plan.program, [replace(cost, load=0.0, unload=0.0) for cost in plan.costs]).timeline.seconds
    assert (plan.seconds > 1.05 * free) == (bottleneck == "transfers")


@pytest.mark.parametrize(("load", "seconds"), [(0, 504), (8, 520), (16, 656)])
def test_sixteen_stages_take_as_long_as_on_paper(load: int, seconds: int) -> None:
    shape = Shape(1, 8, "breadth_first", 16, 2)
    made = (
        HostWeightsSearch(profile(16), [device(9, WEIGHTS / max(load, 1e-9))], 8, Choices())
        ._plan(shape, "always")
        .timed()
    )
    assert made.seconds == pytest.approx(seconds, abs=1e-3)
