"""A model whose training state is larger than the memory of any process trains over several, and in no single one."""

from pathlib import Path

from tests.support.jobs import too_big as jobs
from tests.support.plain_loop import weights_of
from tests.support.processes.launch import WorkerPool
from tests.support.processes.outcome import answers

WORLD = 4


def test_it_trains_over_four_processes(pool: WorkerPool) -> None:
    found = answers(pool.run(jobs.train, "", world=WORLD))
    assert all(of["losses"] == found[0]["losses"] for of in found)
    first, *_, last = found[0]["losses"]
    assert last < first
    assert all(of["own"] * jobs.STATE * jobs.SHARE < jobs.STATE * sum(one["own"] for one in found) for of in found)


def test_one_process_has_no_room_for_it(pool: WorkerPool) -> None:
    (outcome,) = pool.run(jobs.train, "", world=1)
    assert outcome.error in ("MemoryError", "RuntimeError")
    assert "allocate" in outcome.told


def test_each_process_reads_its_own_weights(tmp_path: Path, pool: WorkerPool) -> None:
    with weights_of(3):
        whole = jobs.model("cpu")
    whole.save_pretrained(tmp_path, max_shard_size="30MB")  # type: ignore[operator]  # transformers' own
    assert len(list(tmp_path.glob("*.safetensors"))) > WORLD
    found = answers(pool.run(jobs.train, str(tmp_path), world=WORLD))
    loss = whole(**jobs.batch()).loss.detach()
    assert abs(found[0]["losses"][0] - float(loss)) < 1e-4
