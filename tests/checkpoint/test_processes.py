"""Real processes, over gloo: they go on with what one process saved, and it with theirs; shards are put together."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.checkpoint import places, writing
from tests.support.checkpointed import M, X, Y, build_tied, differences, make, remembered, train, trained
from tests.support.progress import wait_until


def run_processes(job: str, size: int, folder: Path, killed: int | None = None) -> list[Any]:
    """What each process of a job of this module wrote to its standard output, last of all, as JSON."""
    command = [sys.executable, "-m", "tests.checkpoint.test_processes", job, str(folder), str(size)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(size)]
    try:
        watched = [rank for number, rank in enumerate(ranks) if number != killed]
        wait_until(lambda: all(rank.poll() == 0 for rank in watched) or any(rank.poll() for rank in watched))
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-9 if number == killed else 0 for number in range(size)]
    return [json.loads(output.splitlines()[-1]) for output in outputs if output.strip()]


def stages(folder: Path, rank: int) -> list[str]:
    """Loads a run, goes on with it, and saves it while it goes on further."""
    pipe = gpipe.GPipe(build_tied(5), 2, M, driver="process", seed=99)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=9.0)
    gpipe.load(folder, pipe, optimizer)
    losses = train(pipe, optimizer, 2)
    saving = gpipe.save(folder, pipe, optimizer, extra={"rank": rank}, background=True, keep=1)
    losses += train(pipe, optimizer, 1)
    assert saving.wait().name == "step_4"
    return [float(loss).hex() for loss in losses]


def test_processes_go_on_with_what_one_process_saved_and_back(tmp_path: Path) -> None:
    pipe, optimizer = trained(build_tied(), partitions=3)
    gpipe.save(tmp_path, pipe, optimizer)
    expected = train(pipe, optimizer, 3)
    assert run_processes("stages", 2, tmp_path) == [[float(loss).hex() for loss in expected]] * 2
    again = make(build_tied(7), partitions=4, seed=None)
    other = torch.optim.AdamW(again.parameters())
    checkpoint = gpipe.load(tmp_path, again, other)
    assert (checkpoint.path.name, checkpoint.extra) == ("step_4", {"rank": 0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_4"]
    train(again, other, 1)
    assert differences(remembered(again, other), remembered(pipe, optimizer)) == []


def step(layers: Any, optimizer: torch.optim.Optimizer) -> None:
    value: Tensor = X
    for layer in layers:
        value = layer(value)
    F.mse_loss(value, Y).backward()
    optimizer.step()
    optimizer.zero_grad()


def shards(folder: Path, rank: int) -> list[str]:
    """Loads, trains and saves shards: each of two replicas holds a half of every parameter."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)]
    pipe = gpipe.GPipe(layers, 1, M, driver="process", seed=4)
    for layer in (layers[0], layers[2]):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=9.0)
    gpipe.load(folder, pipe, optimizer)
    step(pipe.children(), optimizer)
    pipe.step_number = 1
    gpipe.save(folder, pipe, optimizer, background=rank < 2)
    gpipe.save_weights(folder / "weights", pipe)
    return [type(parameter.data).__name__ for parameter in pipe.parameters()]


def test_sharded_parameters_are_put_together_and_taken_apart(tmp_path: Path) -> None:
    plain = make([nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)], 2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    step(plain.children(), optimizer)
    gpipe.save(tmp_path, plain, optimizer)
    step(plain.children(), optimizer)
    assert run_processes("shards", 2, tmp_path) == [["DTensor"] * 4] * 2
    again = make([nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)], 1)
    other = torch.optim.AdamW(again.parameters(), lr=0.01)
    gpipe.load(tmp_path, again, other)
    for found, expected in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
        for key, value in optimizer.state[expected].items():
            assert torch.allclose(other.state[found][key], value, atol=1e-6)
    weights = make([nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)], 1)
    gpipe.load_weights(tmp_path / "weights", weights)
    assert differences(weights.state_dict(), again.state_dict()) == []


def own_folder(folder: Path, rank: int) -> Path:
    return folder / f"host_{rank}"


def apart(folder: Path, rank: int, background: bool = False) -> str:
    """Saves to folders of which each process sees one; then rank 1 is killed in the middle of the next save."""
    pipe = gpipe.GPipe(build_tied(), 2, M, driver="process", seed=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    train(pipe, optimizer, 2)
    gpipe.save(own_folder(folder, rank), pipe, optimizer, extra={"rank": rank}, keep=1).wait()
    train(pipe, optimizer, 1)
    if rank:
        original = places.write_file

        def write_and_die(path: Path, chunks: Any) -> Any:
            if path.name == "stage_1.optimizer.safetensors":
                original(path, [b"half"])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(path, chunks)

        writing.write_file = write_and_die  # type: ignore[attr-defined]
    try:
        gpipe.save(own_folder(folder, rank), pipe, optimizer, background=background, keep=1).wait()
    except gpipe.RemoteError as error:
        return str(error)
    return ""


def resumes(folder: Path, rank: int) -> list[str]:
    """Loads the parts, goes on, and saves again."""
    size = dist.get_world_size()
    pipe = gpipe.GPipe(build_tied(5), size, M, driver="process", seed=99)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=9.0)
    assert gpipe.find_checkpoint(own_folder(folder, rank), pipe) == own_folder(folder, rank) / "step_2"
    checkpoint = gpipe.load(own_folder(folder, rank), pipe, optimizer)
    assert (checkpoint.step_number, checkpoint.extra) == (2, {"rank": 0})
    losses = train(pipe, optimizer, 2)
    saving = gpipe.save(own_folder(folder, rank), pipe, optimizer, background=True)
    losses += train(pipe, optimizer, 1)
    assert saving.wait() == own_folder(folder, rank) / "step_4"
    return [float(loss).hex() for loss in losses]


@pytest.mark.parametrize("background", [False, True])
def test_hosts_without_a_shared_folder_resume_after_a_rank_was_killed_in_a_save(
    background: bool, tmp_path: Path
) -> None:
    (said,) = run_processes("apart in background" if background else "apart", 2, tmp_path / "run", killed=1)
    assert "rank 1" in said
    pipe, optimizer = trained(build_tied(), partitions=3)
    expected = [float(loss).hex() for loss in train(pipe, optimizer, 3)]
    for size in (2, 3):  # with 3, a new host has no part
        run = shutil.copytree(tmp_path / "run", tmp_path / str(size) / "run")
        assert run_processes("resumes", size, run) == [expected] * size
        for rank in range(size):
            shutil.copytree(own_folder(run, rank), run / "merged", dirs_exist_ok=True)
        again = make(build_tied(7), partitions=4, seed=None)
        other = torch.optim.AdamW(again.parameters())
        assert gpipe.load(run / "merged", again, other).path.name == "step_4"
        train(again, other, 1)
        assert differences(remembered(again, other), remembered(pipe, optimizer)) == []


def main() -> None:
    job, folder, size, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}.meeting", rank=rank, world_size=size)
    jobs: dict[str, Callable[[Path, int], Any]] = {
        "stages": stages,
        "shards": shards,
        "resumes": resumes,
        "apart": apart,
        "apart in background": partial(apart, background=True),
    }
    made = jobs[job](folder, rank)
    print(json.dumps(made), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
