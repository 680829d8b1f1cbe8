"""Saves checkpoints. `writing.py` describes what each rank writes, and when a checkpoint is complete."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from gpipe.checkpoint.folder import Draft, begin
from gpipe.checkpoint.gather import Part, gather
from gpipe.checkpoint.parts import Seen, look, next_id, prune_parts, saves_in, unused_name
from gpipe.checkpoint.places import Url, to_place
from gpipe.checkpoint.writing import Writing, begin_part, finish, note_failure, warning_if_not_removed, write_part
from gpipe.distributed.communicator import Communicator, FirstError, all_gather_checked, communicator_of, differences
from gpipe.distributed.reduce import is_sharded_over_replicas
from gpipe.stages.digest import checksum

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe

logger = logging.getLogger("gpipe")

_warned: "WeakSet[nn.Module]" = WeakSet()  # the pipes whose processes are known to share no folder
_pending: "WeakKeyDictionary[nn.Module, Saving]" = WeakKeyDictionary()  # The next save or load waits for these.


class Saving:
    """A handle of a checkpoint that `gpipe.save` is writing or has written.

    >>> import gpipe, tempfile
    >>> pipe = gpipe.GPipe([nn.Linear(2, 3)], partitions=1, micro_batches=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = gpipe.save(folder, pipe, background=True)
    ...     saving.wait().name, saving.done
    ('step_0', True)
    """

    def __init__(self, writing: Writing, ranks: Communicator, held: ExitStack) -> None:
        self._writing, self._ranks, self._held = writing, ranks, held
        self._thread: threading.Thread | None = None
        self._name: str | None = None
        self._failed = FirstError()
        self._settled = False

    def __repr__(self) -> str:
        state = "writing" if not self.done else "failed" if self._failed.error is not None else "written"
        return f"Saving({str(self._writing.path.parent / (self._name or ''))!r}, {state})"

    def wait(self) -> Path:
        """Waits until the checkpoint is complete and durable, and returns its folder.

        With several processes, either all processes or none must call this method. The next save or load also waits.

        Returns:
            The absolute path of the checkpoint, `folder/step_N`. If this name was in use, the path
            is `folder/step_N.2`, `folder/step_N.3`, and so on.

        Raises:
            OSError: If writing failed, for example on a full disk. Earlier checkpoints are unchanged. Only the first
                call raises this error.
            RemoteError: If a different rank failed. Only the first call raises this error.
            RuntimeError: If the checkpoint was not saved, and an error or a log message already reported the reason.
        """
        self.wait_once()
        if self._name is None:
            raise RuntimeError("This checkpoint was not saved. The first call of wait() raised the reason.")
        return self._writing.path.parent / self._name

    def wait_once(self) -> None:
        """Waits, and raises the error of any rank unless a previous call raised it."""
        self.wait_here()
        if self._settled:
            return
        doing = f"waited for the checkpoint in {self._writing.path.parent}"
        try:
            names = all_gather_checked(self._ranks, self._name, error=self._failed.error, doing=doing)
            self._end(next((name for name in names if name is not None), None))
            if self._name is None and self._thread is not None:
                logger.warning(
                    "%s was not saved, because its replica is lost. [checkpoint-not-saved]", self._writing.path.name
                )
            self._prune_parts()
        except BaseException as error:
            self._end(None)
            if self._failed.error not in (None, error):  # The other ranks did not wait for this error.
                raise self._failed.error from None
            raise

    def _prune_parts(self) -> None:
        """Removes old checkpoints in parts, after all ranks know that the new checkpoint is complete."""
        folder, keep = self._writing.path.parent, self._writing.keep
        if self._writing.in_parts and keep is not None and self._name is not None:
            failed, seen = FirstError(), {}
            with failed, warning_if_not_removed(self._name):
                seen = look(folder)
            gathered = all_gather_checked(self._ranks, seen, error=failed.error, doing="looked for old checkpoints")
            with warning_if_not_removed(self._name):
                prune_parts(folder, gathered, keep, self._name)

    def wait_here(self, folder: Path | None = None) -> None:
        """Waits until this rank has written its files, and raises no writing errors.

        Args:
            folder: The folder of the run. If the checkpoint is in a different folder, this method returns
                immediately.
        """
        if self._thread is not None and folder in (None, self._writing.path.parent):
            self._thread.join()

    def _end(self, name: str | None) -> None:
        """Stores the result and releases locks, after all ranks have agreed."""
        if not self._settled:
            self._settled, self._name = True, name
            self._held.close()

    @property
    def is_settled(self) -> bool:
        """Whether all ranks know the result of this checkpoint."""
        return self._settled

    @property
    def done(self) -> bool:
        """Whether this rank has finished writing. Other ranks may still be writing."""
        return self._thread is None or not self._thread.is_alive()

    def in_foreground(self) -> bool:
        """Writes the checkpoint in the calling thread. Returns whether the checkpoint was saved."""
        try:
            with self._failed:
                write_part(self._writing)
            all_gather_checked(
                self._ranks, error=self._failed.error, doing=f"wrote their parts to {self._writing.path.parent}"
            )
            with self._failed:
                self._name = finish(self._writing)
            self.wait_once()
            return self._name is not None
        except BaseException:
            self._end(None)
            raise

    def in_background(self) -> None:
        """Starts a thread that writes the checkpoint."""
        with self._failed:
            begin_part(self._writing, self._held)
        # The thread is not a daemon, so the process waits for it.
        self._thread = threading.Thread(target=self._write, name="gpipe-save")
        self._thread.start()

    def _write(self) -> None:
        if self._failed.error is None:
            with self._failed:
                write_part(self._writing)
                self._name = finish(self._writing)
        error = self._failed.error
        if error is not None:
            logger.error("A checkpoint was not saved: %s: %s [checkpoint-not-saved]", type(error).__name__, error)
            with suppress(OSError):  # Without a note, rank 0 notices after its time limit.
                note_failure(self._writing, error)


def save(
    folder: str | os.PathLike[str],
    pipe: "GPipe",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: object = None,
    background: bool = False,
    keep: int | None = None,
    limit: float = 120.0,
) -> Saving:
    """Saves a checkpoint to `folder/step_N`, where N is `pipe.step_number`.

    After a crash at any time, the checkpoint either is complete or does not count as a checkpoint. You can load it
    with any number of partitions and replicas, in one or several processes, and without a pipe. The saved seed and
    step number determine the random numbers after loading.

    With several processes, call this function in all processes with the same arguments. The processes of the first
    replica write their stages. If they do not share a folder, each process writes its part to its folder. To load the
    checkpoint, the processes together must see all parts.

    Args:
        folder: A folder for this run and this pipe, or a URL that fsspec opens, such as `s3://bucket/run`. The
            folders of processes may differ.
        pipe: The pipe whose parameters, buffers, step number and seed to save. Shared parameters are saved once.
        optimizer: A torch optimizer of the pipe's parameters. None in processes whose stages have no parameters.
        extra: Additional data to save, such as the epoch or `scheduler.state_dict()`. Supported types are numbers,
            strings, tensors, None, and lists, tuples and dicts of these. With several processes, the data of rank 0
            is saved.
        background: Whether to write in a thread. Training then waits only until the tensors are copied. The next save
            or load, and `wait()`, wait for the thread and raise its errors. Default: False.
        keep: Number of checkpoints to keep, including this checkpoint. Default: None, which keeps all checkpoints.
        limit: Only if `background`: the number of seconds for which rank 0 waits while no process writes. Default:
            120.

    Returns:
        A handle of the checkpoint. Its method `wait()` returns the folder when the checkpoint is complete and
        durable.

    Raises:
        OSError: If writing failed, for example on a full disk. Earlier checkpoints are unchanged. Training can
            continue.
        TypeError: If `pipe` is not a `GPipe`.
        ValueError: If a value cannot be saved, or if processes pass different arguments. The error lists all values
            that cannot be saved.
        RemoteError: If a different rank failed.

    Example:
        >>> import gpipe, tempfile, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)], partitions=2, micro_batches=2)
        >>> optimizer = torch.optim.AdamW(pipe.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = gpipe.save(folder, pipe, optimizer, extra={"epoch": 3}).wait()
        ...     saved.name, gpipe.load(folder, pipe, optimizer).extra
        ('step_0', {'epoch': 3})
    """
    check_order(folder, pipe, "save", optimizer)
    finish_pending_saves(pipe)
    repeat = partial(save, folder, pipe, optimizer, extra=extra, background=background, keep=keep, limit=limit)
    root, ranks, failed = to_place(folder), communicator_of(pipe), FirstError()
    rank, size = ranks.rank, ranks.size  # Both may change later, if a replica is lost.
    with ExitStack() as held:  # locks
        part, draft, mine = Part(), None, list[Any]()
        with failed:
            part = gather(pipe, optimizer, extra, keep, rank)
            if background:
                part.copy_to_host()
            draft, seen = _begin(root, pipe.step_number, rank, held)
            name = None if rank else draft.path.name if draft else str(root)
            mine = [name, *_optimizer_and_checksum(pipe, optimizer, size // pipe.partitions), time.time_ns(), seen]
        same = {"step_number": getattr(pipe, "step_number", None), "background": background}
        doing = f"collected values to save to {root}"
        gathered = all_gather_checked(ranks, mine, same=same, error=failed.error, doing=doing)
        (name, *_), kinds, checksums, times, folders = zip(*gathered, strict=True)
        if name is None:  # The first replica was lost, so a different one writes.
            return repeat()
        _compare_ranks(kinds, checksums, pipe.partitions)
        writers = min(size, pipe.partitions)  # The ranks of the first replica, or one process for all stages.
        in_parts = not _is_shared(root, name, rank < writers, ranks)
        if in_parts:
            held.close()  # Removes the draft.
            draft, name = None, unused_name(folders, pipe.step_number)
            _warn_once(pipe, root, rank)
        numbers = {"step_number": pipe.step_number, "seed": pipe.seed, "plan": pipe.plan.to_json(), "world": size}
        if in_parts or any(saves_in(folders)):  # Otherwise equal checkpoints have equal manifests.
            numbers["save_id"] = next_id(folders, times[0])
        writing = Writing(rank, writers, root / name, part, numbers, draft, keep, limit, ranks.gone, in_parts)
        held.callback(writing.discard_part)
        saving = Saving(writing, ranks, held.pop_all())  # Keeps the locks until the checkpoint is written.
    if background:
        _pending[pipe] = saving
        saving.in_background()
    elif not saving.in_foreground():
        return repeat()
    return saving


def _begin(root: Path, step_number: int, rank: int, held: ExitStack) -> tuple[Draft | None, Seen]:
    """Returns the temporary folder, which rank 0 creates unless the folder is a URL, and the earlier checkpoints."""
    if "." in (seen := look(root)):
        raise ValueError(f"folder: {root} is a checkpoint itself. Save to {root.parent}.")
    if rank or isinstance(root, Url):
        return None, seen
    draft = begin(root, step_number)
    held.callback(draft.end)
    return draft, seen


NOT_SHARED = (
    "%s is not shared by all processes, so each process writes its part of the checkpoint to its folder. To load the "
    "checkpoint, keep the folders of all hosts, or merge them. [checkpoint-in-parts]"
)


def _warn_once(pipe: "GPipe", root: Path, rank: int) -> None:
    if rank == 0 and not isinstance(root, Url) and pipe not in _warned:
        _warned.add(pipe)
        logger.warning(NOT_SHARED, root)


def _is_shared(root: Path, name: str, writes: bool, ranks: Communicator) -> bool:
    """Returns whether all ranks that write see the temporary folder of rank 0. All ranks must call this function."""
    sees = not isinstance(root, Url) and (not writes or (root / name).is_dir())
    return all(all_gather_checked(ranks, sees, doing=f"looked whether they share {root}"))


def _optimizer_and_checksum(pipe: "GPipe", optimizer: object, replicas: int) -> tuple[str | None, int]:
    """Returns the type of the optimizer and a checksum of the weights.

    The type is None if this rank has no optimizer and no trainable weights. With one replica, the checksum covers no
    weights.
    """
    own = list(pipe.parameters())
    kind = "None" if any(parameter.requires_grad for parameter in own) else None
    weights = [parameter for parameter in own if replicas > 1 and not is_sharded_over_replicas(parameter)]
    return kind if optimizer is None else type(optimizer).__name__, checksum(weights)


def _compare_ranks(kinds: Sequence[str | None], checksums: Sequence[int], partitions: int) -> None:
    """Raises an error if the types of optimizers differ between ranks. Logs a warning if replica weights differ."""
    if mistakes := differences({rank: {"optimizer": kind} for rank, kind in enumerate(kinds) if kind}):
        raise ValueError(f"save: {'; '.join(mistakes)}. Pass the same type of optimizer on all ranks.")
    if apart := [rank for rank, own in enumerate(checksums) if own != checksums[rank % partitions]]:
        logger.warning(
            "The weights of ranks %s differ from the first replica, whose weights are saved. Load this checkpoint, "
            "and run every optimizer step on all replicas. [replicas-differ]",
            apart,
        )


def check_order(folder: object, pipe: object, name: str, optimizer: object = None) -> None:
    """Raises a TypeError if the arguments are not a folder, a pipe and an optimizer, in this order."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder is a {type(folder).__name__}. Pass its path first: gpipe.{name}(folder, pipe, ...).")
    if pipe is not None and not isinstance(pipe, nn.Module):
        raise TypeError(f"pipe is a {type(pipe).__name__}. Pass the gpipe.GPipe: gpipe.{name}(folder, pipe, ...).")
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}. Pass the torch optimizer itself, not its state_dict(). Save "
            f"the state of schedulers and scalers with save(..., extra=...)."
        )


def finish_pending_saves(pipe: nn.Module | None, folder: str | os.PathLike[str] | None = None) -> None:
    """Waits for the pending checkpoint of a pipe, and for the pending checkpoints of any pipe in a folder."""
    pending = None if pipe is None else _pending.pop(pipe, None)
    if pending is not None and pending.is_settled:
        pending = None
    ranks = communicator_of(pipe)
    # A replica that has come back does not know the checkpoints that other replicas began earlier.
    if any(all_gather_checked(ranks, pending is not None)) if ranks.survives else pending is not None:
        if pending is None:
            all_gather_checked(ranks, doing="waited for an earlier checkpoint")
        else:
            pending.wait_once()
    if folder is not None:
        for saving in list(_pending.values()):
            saving.wait_here(to_place(folder))
