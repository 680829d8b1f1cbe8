"""Loads checkpoints.

All ranks check the files, read all values, and check that the values fit the model and the optimizer. The model and
the optimizer change only if no rank found a problem.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe.checkpoint.collect import DAMAGED, Files, collect
from gpipe.checkpoint.folder import CheckpointPath, checkpoints, find, find_damage, order_of, read_manifest
from gpipe.checkpoint.gather import first_names
from gpipe.checkpoint.manifest import MANIFEST, CheckpointError, Manifest
from gpipe.checkpoint.parts import EXTRA, MERGE, Save, Seen, look, saves_in, why_incomplete
from gpipe.checkpoint.places import Url, to_place
from gpipe.checkpoint.read import LoadedState, decoded, list_names, put, read_optimizer, read_state
from gpipe.checkpoint.save import check_order, finish_pending_saves
from gpipe.distributed.communicator import (
    Communicator,
    FirstError,
    all_gather_checked,
    check_same_on_ranks,
    communicator_of,
)
from gpipe.planner.search.plan import Plan

logger = logging.getLogger("gpipe")

WEIGHTS, VALUES, OPTIMIZER = (rf"stage_[0-9]+{kind}\.safetensors" for kind in ("", r"\.values", r"\.optimizer"))


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, the step number and seed of the pipe, and the user's `extra` value.

    Attributes:
        path: The folder of the checkpoint, as an absolute path.
        step_number: The `step_number` of the saved pipe.
        seed: The `seed` of the saved pipe.
        extra: The argument `extra` of `gpipe.save`, or None.
        manifest: The content of the file `manifest.json` in the checkpoint.

    >>> import gpipe, tempfile
    >>> pipe = gpipe.GPipe([nn.Linear(2, 3)], partitions=1, micro_batches=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint = gpipe.load(gpipe.save(folder, pipe).wait())
    ...     checkpoint.step_number, list(checkpoint.state_dict())
    (0, ['0.weight', '0.bias'])
    """

    path: Path
    step_number: int
    seed: int
    extra: Any
    manifest: Manifest = field(repr=False)

    @property
    def plan(self) -> Plan:
        """The plan of the saved pipe (split points, schedule, M and remat), for `GPipe(model, plan=plan)`."""
        try:
            return Plan.from_json(self.manifest.plan)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            why = f"The plan cannot be read ({type(error).__name__}: {error}). Pass split points instead of plan=."
            raise CheckpointError(self.path, [why], DAMAGED) from error

    def state_dict(self) -> dict[str, Any]:
        """Returns all parameters and buffers on the CPU, with the same names as in `nn.Sequential(*layers)`.

        Returns:
            The tensors and other values by name.

        Raises:
            CheckpointError: If parts of the checkpoint are in folders that this process does not see.
        """
        with ExitStack() as held:
            files = Files(self.manifest, self.path)
            if isinstance(self.path, Url) or not (self.path / MANIFEST).exists():  # a checkpoint in parts
                save, findings = _agree_which(self.path, Communicator())
                if not isinstance(save, Save) or findings:
                    raise CheckpointError(self.path, findings or [f"It was removed. {MERGE} [missing-part]"])
                files, _ = collect(self.path, save, Communicator(), None, held)
            weights, values = (files.tensors(kind) for kind in (WEIGHTS, VALUES))
            state: dict[str, Any] = {name: weights.read(name) for name in self.manifest.names}
            state |= {
                name: decoded(value, values, name, LoadedState()) for name, value in self.manifest.values.items()
            }
            return state | {name: state[first] for name, first in self.manifest.ties.items()}


def load(
    folder: str | os.PathLike[str], pipe: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Checkpoint:
    """Loads the latest checkpoint in a folder, or a specific checkpoint.

    Training then continues bitwise identically to a run that was not interrupted, for any number of partitions. The
    numbers of micro-batches and replicas may differ from the saved run. Then training continues like a run with the
    new numbers.

    With several processes, call this function in all processes with the same arguments. The pipe and the optimizer
    change only if the checkpoint is complete and fits. Loading does not run code from the checkpoint. Loading needs
    memory for a copy of the weights.

    Args:
        folder: The folder or URL that you passed to `gpipe.save`, or one of the checkpoints in it, such as
            `run/step_12`. If processes saved to different folders, pass the folder of each process, or a folder with
            the files of all of them. A process receives the files that it needs and does not see from the processes
            that see them.
        pipe: The pipe to load parameters, buffers, step number and seed into. To load weights without a pipe, pass
            `nn.Sequential(*layers)`. Default: None, which only checks the checkpoint. Call `state_dict()` on the
            result to get the weights.
        optimizer: The optimizer of `pipe`. Its state and the options of its parameter groups (such as learning rates)
            are loaded.

    Returns:
        The loaded checkpoint. Its attribute `extra` is the value that you passed to `gpipe.save`. `path` is the
        folder, and `step_number`, `seed` and `plan` belong to the saved pipe. The method `state_dict()` reads the
        weights.

    Raises:
        CheckpointError: If the checkpoint is missing, is damaged, or does not fit. The error lists all reasons.
        TypeError: If an argument has a wrong type, for example if the order of the arguments is wrong.
        ValueError: If you pass `optimizer` without `pipe`, or if processes pass different folders although the
            checkpoint was saved to a shared folder.
        OSError: If a file cannot be read, or if the pipe's last save in the background failed.
        RemoteError: If a different rank failed.

    Example:
        >>> import gpipe, tempfile, torch
        >>> def build():
        ...     return [torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)]
        >>> pipe, plain = gpipe.GPipe(build(), partitions=3, micro_batches=2), torch.nn.Sequential(*build())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = gpipe.save(folder, pipe, extra={"epoch": 3})
        ...     checkpoint = gpipe.load(folder)
        ...     _ = plain.load_state_dict(checkpoint.state_dict())
        >>> torch.equal(plain[2].weight, pipe.get_parameter("2.weight")), checkpoint.extra
        (True, {'epoch': 3})
    """
    check_order(folder, pipe, "load", optimizer)
    finish_pending_saves(pipe, folder)
    if pipe is None and optimizer is not None:
        raise ValueError("optimizer cannot be loaded without its pipe, which names its parameters. Pass both.")
    ranks, root = communicator_of(pipe).readers, to_place(folder)
    found, findings = _agree_which(root, ranks)
    if findings:
        raise CheckpointError(root, findings)
    if found is None:
        if any((root / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
            raise CheckpointError(
                root, ["This folder has only weights. Use gpipe.load_weights. [checkpoint-not-found]"]
            )
        raise CheckpointError(root, [NOT_FOUND])
    with ExitStack() as held:  # a temporary folder for files that this rank does not see
        if isinstance(found, Save):
            path = root / found.name
            files, manifest = collect(path, found, ranks, _wanted(pipe), held)
        else:
            path, manifest = found.path, _agree_whole(found, ranks)
            files = Files(manifest, path)
        ready = _agree_fit(files, manifest, pipe, optimizer, ranks)
    if pipe is not None:
        put(ready, pipe, optimizer)
        if hasattr(pipe, "layers_per_partition"):  # Layers without a pipe use torch's random numbers.
            pipe.step_number, pipe.seed = manifest.step_number, manifest.seed  # type: ignore[assignment]  # a GPipe's
    return Checkpoint(path, manifest.step_number, manifest.seed, ready.extra, manifest)


NOT_FOUND = "The folder has no checkpoint. Pass the folder that you passed to gpipe.save. [checkpoint-not-found]"
DOES_NOT_FIT = "Pass the model and the optimizer that were saved. [checkpoint-does-not-fit]"


def _wanted(pipe: nn.Module | None) -> Callable[[Mapping[str, str]], set[str]] | None:
    """Returns a function from the ties of a checkpoint to the names of the values that a rank reads."""
    if pipe is None:
        return None
    firsts = first_names(pipe)
    names = {*firsts, *firsts.values()}
    return lambda ties: names | {ties.get(name, name) for name in names}


def find_checkpoint(folder: str | os.PathLike[str], pipe: nn.Module | None = None) -> Path | None:
    """Returns the path of the checkpoint that `gpipe.load(folder)` would load, or None without a checkpoint.

    With several processes, call this function in all processes, and pass the pipe. All calls return the result of
    the first process.

    Args:
        folder: The folder that you passed to `gpipe.save`.
        pipe: The pipe. Required with several processes.

    Returns:
        The absolute path of the checkpoint. If `folder` is a checkpoint, the result is the path of `folder`.

    Raises:
        CheckpointError: If `folder` is a file, or if its file `latest` is damaged or names a checkpoint that does not
            exist.
        TypeError: If `folder` is not a path, or if `pipe` is not a module.
        ValueError: If processes pass different folders.
        OSError: If a file cannot be read, or if the pipe's last save in the background failed.
        RemoteError: If a different rank failed.

    >>> import gpipe, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gpipe.find_checkpoint(folder) is None
    True
    """
    check_order(folder, pipe, "find_checkpoint")
    finish_pending_saves(pipe)
    root = to_place(folder)
    found, _ = _agree_which(root, communicator_of(pipe).readers)
    if isinstance(found, Save):
        return root / found.name
    return None if found is None else found.path


def _agree_which(folder: Path, ranks: Communicator) -> tuple[CheckpointPath | Save | None, list[str]]:
    """Returns the newest complete checkpoint. Without one, the result has messages about the parts that are missing.

    Rank 0 looks for a checkpoint with a manifest, because other hosts may still see an older version of `latest`. All
    ranks together look for checkpoints in parts.
    """
    known, findings, failed = None, list[str](), FirstError()
    seen: Seen = {}
    with failed:
        try:
            seen = look(folder)
            if ranks.rank == 0 and not isinstance(folder, Url) and (found := find(folder)):
                known = [
                    os.path.relpath(found.path, folder),
                    found.sha256,
                    _save_id(found) if any(seen.values()) else "",
                ]
        except CheckpointError as wrong:
            findings = wrong.findings
    mine, doing = [known, findings, seen, str(folder)], f"looked for a checkpoint in {folder}"
    gathered = all_gather_checked(ranks, mine, error=failed.error, doing=doing)
    known, findings, _, _ = gathered[0]
    if findings:
        raise CheckpointError(folder, findings)
    saves = saves_in([each[2] for each in gathered])
    complete = [save for save in saves if not save.missing]
    if known and not (complete and complete[-1].save_id > known[2]):
        check_same_on_ranks({rank: {"folder": repr(each[3])} for rank, each in enumerate(gathered)})
        return CheckpointPath(folder / known[0], known[1]), []
    if saves and saves[-1].missing and ranks.rank == 0:
        used = f"{complete[-1].name} is the newest complete checkpoint" if complete else "there is no checkpoint"
        logger.warning(NOT_COMPLETE, saves[-1].name, ", ".join(saves[-1].missing), folder, used)
    if saves and not complete:
        return None, why_incomplete(saves[-1], saves)
    return (complete[-1] if complete else None), []


NOT_COMPLETE = (
    "%s lacks %s, which no process sees in %s, so %s. If a save was interrupted, "
    "nothing is wrong. Otherwise copy the missing part from the host that wrote it. [checkpoint-incomplete]"
)


def _save_id(found: CheckpointPath) -> str:
    try:
        return read_manifest(found).save_id
    except ValueError:
        return ""  # Loading reports the damage.


def _agree_whole(found: CheckpointPath, ranks: Communicator) -> Manifest:
    """Returns the manifest after all ranks have checked the files. Each rank hashes a share of the files."""
    manifest, findings, failed = None, list[str](), FirstError()
    with failed:
        try:
            manifest = read_manifest(found)
            findings = find_damage(found.path, manifest, turn=ranks.rank, turns=ranks.size)
        except ValueError as wrong:
            findings = [str(wrong)]
    findings = unique(all_gather_checked(ranks, findings, error=failed.error, doing=f"checked {found.path}"))
    if manifest is None or findings:
        older = reversed(checkpoints(found.path.parent)) if order_of(found.path.name) else ()
        others = [str(other) for other in older if other != found.path]
        listed = ", ".join(others)
        choice = f"Restore the files from a copy, or load one of these checkpoints: {listed}. [checkpoint-damaged]"
        advice = choice if others else DAMAGED
        raise CheckpointError(found.path, findings, advice)
    return manifest


def unique(gathered: Iterable[Sequence[str]]) -> list[str]:
    """Returns the messages of all ranks without duplicates."""
    return list(dict.fromkeys(finding for findings in gathered for finding in findings))


def _agree_fit(
    files: Files,
    manifest: Manifest,
    pipe: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    ranks: Communicator,
) -> LoadedState:
    """Reads the values for the model and the optimizer, and returns them if the values of all ranks fit.

    `files` are the files that this rank needs, and `manifest` belongs to the whole checkpoint.
    """
    ready, failed, here = LoadedState(), FirstError(), files.manifest
    with failed, torch.inference_mode(False), torch.no_grad():  # Whatever mode is active.
        ready.extra = decoded(here.extra, files.tensors(EXTRA), "extra", ready)
        weights, values, states = map(files.tensors, (WEIGHTS, VALUES, OPTIMIZER))
        ready.findings += [*weights.findings, *values.findings, *states.findings]
        if odd := sorted(weights.file_of.keys() ^ set(here.names)):
            ready.findings.append(f"{list_names(odd)} are not in both the manifest and the files.")
        if odd := sorted({*manifest.ties.values()} - {*manifest.names, *manifest.values}):
            ready.findings.append(f"{list_names(odd)} are tied to other names, but have no values.")
        if pipe is None:
            for name, value in here.values.items():
                decoded(value, values, name, ready)
        elif not ready.findings:
            read_state(pipe, here, weights, values, ready)
            if optimizer is not None:
                read_optimizer(pipe, optimizer, here, states, ready)
    own = [ready.findings, sorted(ready.names), sorted(ready.trained)]
    gathered = all_gather_checked(ranks, own, error=failed.error, doing=f"read {files.path}")
    findings, *every = map(unique, zip(*gathered, strict=True))
    names, trained = map(set, every)
    if pipe is not None and not findings:
        if odd := [name for name in [*manifest.names, *manifest.values] if name not in names]:
            findings.append(f"The model lacks {list_names(odd)} of the checkpoint. Build the model that was saved.")
        groups = manifest.optimizer["groups"] if trained and manifest.optimizer is not None else []
        before = [name for group in groups for name in group["parameters"]]
        if idle := [name for name in before if name not in trained and name in names]:
            findings.append(f"optimizer lacks {list_names(idle)}, which the saved optimizer had. Add them.")
    if findings:
        raise CheckpointError(files.path, findings, DOES_NOT_FIT)
    return ready
