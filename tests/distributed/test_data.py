"""Data of any shape gives the numbers of the plain loop, or is refused on every rank: never other numbers."""

import json

import pytest

from tests.support.jobs import data as jobs
from tests.support.jobs.data import SCRIPTS
from tests.support.processes.launch import WorkerPool, run_ranks
from tests.support.processes.outcome import answers, told_by

FINE = [name for name, script in SCRIPTS.items() if script.refused == ()]
REFUSED = [name for name, script in SCRIPTS.items() if script.refused is None]
DESERTED = [name for name, script in SCRIPTS.items() if script.refused]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", FINE)
def test_batches_of_any_shape_give_the_numbers_of_the_plain_loop(name: str, world: int, pool: WorkerPool) -> None:
    right = jobs.reference(name)
    held: dict[str, object] = {}
    for answer in answers(pool.run(jobs.run, name, world=world)):
        assert json.dumps(answer["found"]) == json.dumps(right["found"])  # NaN equals NaN
        held |= answer["parameters"]
    assert json.dumps(held, sort_keys=True) == json.dumps(right["parameters"], sort_keys=True)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank_before_the_timeout(name: str, world: int, pool: WorkerPool) -> None:
    outcomes = pool.run(jobs.run, name, world=world)
    assert all(outcome.told for outcome in outcomes), told_by(outcomes)


@pytest.mark.parametrize("name", DESERTED)
def test_a_rank_that_goes_on_alone_learns_that_the_others_have_left(name: str) -> None:
    outcomes = run_ranks(2, jobs.run, name)
    alone = SCRIPTS[name].odd or 0
    assert outcomes[1 - alone].answered
    assert outcomes[alone].error == "RemoteError"
    assert f"rank {1 - alone}" in outcomes[alone].told
