"""Loads a checkpoint: looks for damage, reads all, and changes the model once every rank says that all is good."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe.checkpoint.fit import Ready, decoded, find_unexpected, listed, put, read_optimizer, read_state
from gpipe.checkpoint.folder import LATEST, Found, find, find_damage, others, read_manifest
from gpipe.checkpoint.manifest import MANIFEST, CheckpointError, Manifest
from gpipe.checkpoint.save import check_order, settle
from gpipe.checkpoint.tensors import Shelf
from gpipe.distributed.agree import Communicator, FirstError, agree, communicator_of

WEIGHTS, VALUES, OPTIMIZER = (rf"stage_[0-9]+{kind}\.safetensors" for kind in ("", r"\.values", r"\.optimizer"))
EXTRA = r"extra\.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole.

    Attributes:
        path: Its folder.
        step_number: Of the pipe, when it was saved.
        seed: Of the pipe.
        extra: What the user added.
        manifest: All that is known of it.

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

    def state_dict(self) -> dict[str, Any]:
        """All parameters and buffers, on the CPU, under the names that the plain layers give them."""
        weights, values = (_shelf(self.path, self.manifest, kind) for kind in (WEIGHTS, VALUES))
        state: dict[str, Any] = {name: weights.read(name) for name in self.manifest.names}
        state |= {name: decoded(value, values, name, Ready()) for name, value in self.manifest.values.items()}
        return state | {name: state[first] for name, first in self.manifest.ties.items()}


def load(
    folder: str | os.PathLike[str], pipe: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Checkpoint:
    """Loads the latest checkpoint of a run's folder, or the checkpoint that the folder is.

    Training goes on as if it had never stopped, to the bit, with any number of partitions; with other numbers of
    micro-batches or replicas as such a run would, which sums in another order and draws other random numbers. In
    several processes every one calls it, with the same arguments. Nothing changes unless the checkpoint is whole and
    fits, and nothing of it is run. The weights are in memory twice meanwhile.

    Args:
        folder: What `gpipe.save` was given, or one of the checkpoints in it: `run/step_12`.
        pipe: Gets parameters, buffers, step number and seed. It may be the plain layers, `nn.Sequential(*layers)`.
            Without it the checkpoint is only looked through; `state_dict()` of what is returned gives its weights.
        optimizer: Over the parameters of `pipe`; gets its state and the options of its groups, learning rates too.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, or does not fit; the error lists all that is wrong.
        OSError: A file cannot be read.
        RemoteError: Another rank failed.

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
    settle(pipe)
    if pipe is None and optimizer is not None:
        raise ValueError("an optimizer can be loaded only with its pipe, whose names say whose state is whose")
    team, root = communicator_of(pipe), Path(os.path.abspath(folder))
    found = _agree_which(root, team)
    if found is None:
        raise CheckpointError(root, [_why_none(root)])
    manifest = _agree_whole(found, team)
    ready, extra = _agree_fit(found.path, manifest, pipe, optimizer, team)
    if pipe is not None:
        put(ready, pipe, optimizer)
        _resume(pipe, manifest)
    return Checkpoint(found.path, manifest.step_number, manifest.seed, extra, manifest)


def find_checkpoint(folder: str | os.PathLike[str], pipe: nn.Module | None = None) -> Path | None:
    """Finds the checkpoint that `gpipe.load(folder)` would load; None where nothing was saved yet.

    In several processes every one calls it, with the pipe, and hears what the first one finds.

    Raises:
        CheckpointError: `latest` is damaged, or names a checkpoint that is not there.

    >>> import gpipe, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gpipe.find_checkpoint(folder) is None
    True
    """
    check_order(folder, pipe, "find_checkpoint")
    settle(pipe)
    found = _agree_which(Path(os.path.abspath(folder)), communicator_of(pipe))
    return None if found is None else found.path


def _agree_which(folder: Path, team: Communicator) -> Found | None:
    """The checkpoint that all ranks load: rank 0 says which, since one host may see a newer `latest` than another."""
    findings: list[str] = []
    found, failed = None, FirstError()
    with failed:
        try:
            found = find(folder) if team.rank == 0 else None
        except CheckpointError as wrong:
            findings = wrong.findings
    place = None if found is None else os.path.relpath(found.path, folder)
    told = agree(team, [place, found and found.sha256, findings], same={"folder": str(folder)}, error=failed.error)
    place, sha256, findings = told[0]
    if findings:
        raise CheckpointError(folder, findings)
    return None if place is None else Found(folder / place if place != "." else folder, sha256)


def _why_none(folder: Path) -> str:
    if any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return "these are weights alone; use gpipe.load_weights"
    return (
        f"there is no checkpoint here, neither {MANIFEST} nor {LATEST}; save one, or give the folder that one was "
        f"saved to"
    )


def _agree_whole(found: Found, team: Communicator) -> Manifest:
    """The manifest, when all ranks have looked through the files, each its share."""
    findings: list[str] = []
    manifest, failed = None, FirstError()
    with failed:
        try:
            manifest = read_manifest(found)
            findings = find_damage(found.path, manifest, turn=team.rank, turns=team.size)
        except ValueError as wrong:
            findings = [str(wrong)]
    findings = _all_of(agree(team, findings, error=failed.error))
    if manifest is None or findings:
        beside = others(found.path)
        advice = f"Restore what is damaged from a copy, or load another: {', '.join(beside)}" if beside else ""
        raise CheckpointError(found.path, findings, advice)
    return manifest


def _all_of(told: Sequence[Sequence[str]]) -> list[str]:
    """What any rank found, once."""
    return list(dict.fromkeys(finding for findings in told for finding in findings))


def _agree_fit(
    path: Path,
    manifest: Manifest,
    pipe: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    team: Communicator,
) -> tuple[Ready, Any]:
    """What goes into the model, and what the user added, when all ranks have read theirs and everything fits."""
    ready, extra, failed = Ready(), None, FirstError()
    with failed, torch.inference_mode(False), torch.no_grad():  # it will be trained, whatever the caller is at
        extra = decoded(manifest.extra, _shelf(path, manifest, EXTRA), "extra", ready)
        if pipe is not None:
            _read(path, manifest, pipe, optimizer, ready)
    told = agree(team, [ready.findings, sorted(ready.names), sorted(ready.trained)], error=failed.error)
    findings = _all_of([each[0] for each in told])
    names, trained = ({name for each in told for name in each[at]} for at in (1, 2))
    if not findings:
        findings = find_unexpected(manifest, names, trained)
    if findings:
        raise CheckpointError(path, findings)
    return ready, extra


def _shelf(path: Path, manifest: Manifest, pattern: str) -> Shelf:
    return Shelf(path / name for name in sorted(manifest.files) if re.fullmatch(pattern, name))


def _read(
    path: Path, manifest: Manifest, pipe: nn.Module, optimizer: torch.optim.Optimizer | None, ready: Ready
) -> None:
    weights, values, states = (_shelf(path, manifest, kind) for kind in (WEIGHTS, VALUES, OPTIMIZER))
    ready.findings += [*weights.findings, *values.findings, *states.findings]
    if odd := sorted(weights.home.keys() ^ set(manifest.names)):
        ready.findings.append(f"{listed(odd)} stand in the manifest alone, or in the files alone; do not trust it")
    if not ready.findings:
        read_state(pipe, manifest, weights, values, ready)
        if optimizer is not None:
            read_optimizer(pipe, optimizer, manifest, states, ready)


def _resume(pipe: nn.Module, manifest: Manifest) -> None:
    """Has the randomness of a pipe go on where it was."""
    if hasattr(pipe, "layers_per_partition"):  # else it is plain layers, whose randomness is torch's
        pipe.step_number = manifest.step_number  # type: ignore[assignment]  # a GPipe's
        pipe.seed = manifest.seed  # type: ignore[assignment]  # likewise
