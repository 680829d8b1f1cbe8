"""Of a model over processes each has a part: what needs all of it, or differs between them, is refused everywhere."""

from pathlib import Path

import pytest

from tests.support.jobs import refusals as jobs
from tests.support.processes.launch import Job, WorkerPool, run_ranks
from tests.support.processes.outcome import answers


def test_what_needs_the_whole_model_names_the_remedy(tmp_path: Path, pool: WorkerPool) -> None:
    first, other = answers(pool.run(jobs.of_a_part, str(tmp_path), world=2))
    assert other.pop("save") == "None"  # transformers writes on the first rank alone
    assert "meta tensor" in first.pop("save")  # torch's words, of what a state_dict has without values
    for told in (*first.values(), *other.values()):
        assert "held by another process" in told
        assert "gpipe.save_weights(folder, pipe)" in told


def test_a_rank_loads_what_it_has_itself(pool: WorkerPool) -> None:
    assert answers(pool.run(jobs.load_own, world=2)) == [True, True]


def test_inputs_of_another_kind_are_refused_everywhere(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.other_kind, world=2))
    for told, goes_on in found:
        assert "make the pipe with such a sample" in told
        assert goes_on


@pytest.mark.parametrize(
    ("job", "what"),
    [
        (jobs.other_model, "layer transformer.wte is "),
        (jobs.other_sample, "sample is ['attention_mask', 'input_ids', 'labels'] on rank 0 and "),
    ],
)
def test_what_differs_between_ranks_is_refused_everywhere(job: Job, what: str, pool: WorkerPool) -> None:
    outcomes = pool.run(job, world=2)
    for outcome in outcomes:
        assert outcome.error in ("ValueError", "RemoteError"), str(outcome)
    assert any(what in outcome.told for outcome in outcomes)


def test_a_rank_that_dies_is_noticed_by_all() -> None:
    first, _ = run_ranks(2, jobs.dies)
    assert first.error == "RemoteError", str(first)
