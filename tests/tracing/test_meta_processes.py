"""A model built on the meta device gets values over processes as it does in one, and each has its own alone."""

from functools import cache

import pytest

from tests.support.jobs import models as jobs
from tests.support.jobs.models import piped, stepped
from tests.support.open_models import model_of
from tests.support.processes.digests import Digests, digests
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers


@cache
def alone(name: str) -> Digests:
    """What one process has."""
    with piped(model_of(name, "meta"), name, 1, driver="lockstep") as pipe:
        return digests(stepped(pipe, name))


@pytest.mark.parametrize(("name", "world"), [("llama", 4), ("gpt2", 4), ("mixtral", 2), ("t5", 4), ("vit", 2)])
def test_a_model_without_values_gets_them(name: str, world: int, pool: WorkerPool) -> None:
    expected = alone(name)
    ranks = answers(pool.run(jobs.train_from_meta, name, {"schedule": "1f1b"}, world=world))
    for found, others in ranks:
        assert not [what for what, one in found.items() if expected.get(what) != one]
        assert not others
    assert expected.keys() == {what for found, _ in ranks for what in found}
