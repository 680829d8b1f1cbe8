"""Saves again and again, killed at one operation on files after another, and looks at what is left each time.

python -m tests.support.killed FOLDER CASE    prints what was found, as JSON
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gpipe
from tests.support.checkpointed import differences, remembered, snapshot, train, trained
from tests.support.thread_ranks import RankPipe, all_well, optimizer_of, rank_pipes, run_ranks, save_in_ranks

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "close")

Run = tuple[gpipe.GPipe, torch.optim.Optimizer]
Save = Callable[[Path, Run], object]


def save_in_parts(folder: Path, run: Run, **options: Any) -> None:
    """Saves as processes on different hosts would, each to its folder."""

    def save(own: RankPipe) -> None:
        mine = optimizer_of(*run, own)
        gpipe.save(folder / f"host_{own._processes.rank}", own, mine, **options).wait()  # type: ignore[arg-type]

    all_well(run_ranks(save, rank_pipes(run[0])))


def merged(folder: Path) -> Path:
    """The folder, or what somebody would merge from the folders of the hosts."""
    for host in sorted(folder.glob("host_*")):
        shutil.copytree(host, folder / "merged", dirs_exist_ok=True)
    return folder / "merged" if (folder / "merged").exists() else folder


CASES: dict[str, tuple[int, Save]] = {
    "first": (0, lambda folder, run: gpipe.save(folder, *run)),
    "pruning": (2, lambda folder, run: gpipe.save(folder, *run, keep=1)),
    "background": (1, lambda folder, run: gpipe.save(folder, *run, background=True).wait()),
    "ranks": (1, lambda folder, run: save_in_ranks(folder, *run, replicas=2, extra={"tensor": torch.ones(2)})),
    "ranks in background": (1, lambda folder, run: save_in_ranks(folder, *run, background=True, keep=2)),
    "parts": (1, lambda folder, run: save_in_parts(folder, run)),
    "parts in background": (2, lambda folder, run: save_in_parts(folder, run, background=True, keep=1)),
}
"""How many checkpoints there are before, and how the next is saved."""


def kill_at(number: int) -> None:
    """Has this process killed at its n-th operation on files, in the midst of it if it writes."""
    count = 0

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def operate(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return operate

    for name in OPERATIONS:
        setattr(os, name, counting(name))


def survives(number: int, save: Callable[[], object]) -> bool:
    child = os.fork()
    if not child:
        kill_at(number)
        save()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL), status
    return status == 0


def look(folder: Path, known: dict[int, dict[str, Any]], run: Run) -> tuple[int | None, list[str]]:
    """The step that would be loaded, and all that is wrong in a folder."""
    wrong = []
    found = gpipe.find_checkpoint(folder) if folder.exists() else None
    for path in [folder, *folder.glob("step_*")] if found else []:
        if ".tmp-" not in path.name and (path == folder or gpipe.find_checkpoint(path)):
            step = gpipe.load(path, *run).step_number
            wrong += [f"{path.name}: {name}" for name in differences(remembered(*run), known[step])]
    strange = [path.name for path in folder.glob("*") if not path.name.startswith("step_") and path.name != "latest"]
    wrong += [name for name in strange if ".tmp-" not in name]
    return (gpipe.load(found).step_number if found else None), wrong


def go_on(folder: Path, run: Run) -> list[str]:
    saved = gpipe.save(folder, run[0]).wait()
    wrong = [] if gpipe.load(folder).path == saved else ["not the latest"]
    return wrong + [path.name for path in folder.glob("step_*.tmp-*")]


def find(case: str, base: Path) -> dict[str, list[Any]]:
    """The step that is found after each operation at which a save is killed, and all that is wrong then."""
    before, save = CASES[case]
    pipe, optimizer = trained(partitions=2, steps=1)
    known = {}
    for _ in range(before):
        known[pipe.step_number] = snapshot(pipe, optimizer)
        if "parts" in case:
            save_in_parts(base / "before", (pipe, optimizer))
        else:
            gpipe.save(base / "before", pipe, optimizer)
        train(pipe, optimizer, 1)
    known[pipe.step_number] = snapshot(pipe, optimizer)
    other = trained(partitions=3, steps=0)
    steps: list[int | None] = []
    wrong = []
    number, done = 0, False
    while not done:
        number += 1
        folder = base / f"killed_{number}"
        if before:
            shutil.copytree(base / "before", folder)
        done = survives(number, lambda folder=folder: save(folder, (pipe, optimizer)))  # type: ignore[misc]
        view = merged(folder)
        step, found = look(view, known, other)
        steps.append(step)
        wrong += [f"{number}: {each}" for each in [*found, *go_on(view, other)]]
        shutil.rmtree(folder)
    return {"steps": steps, "wrong": wrong}


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(find(sys.argv[2], Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
