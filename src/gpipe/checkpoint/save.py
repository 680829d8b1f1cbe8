"""Saves a checkpoint: all ranks write their parts into one temporary folder, and rank 0 makes it final.

    calling thread of each rank    gather, copy | agree: where |                          wait | agree: all well
    its writing thread                                         | its part, then a note
    rank 0's                                                   | the same, awaits all notes, makes it final

In the foreground the calling thread does all of it, and the ranks agree before rank 0 makes it final. Only calling
threads exchange with other ranks; writing threads meet in the folder.
"""

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gpipe.checkpoint.folder import begin
from gpipe.checkpoint.part import Part, Writing, begin_part, copied, finish, gather, note_failure, write_part
from gpipe.distributed.agree import Communicator, FirstError, agree, communicator_of

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe


logger = logging.getLogger("gpipe")

_under_way: "WeakKeyDictionary[nn.Module, Saving]" = WeakKeyDictionary()  # what the next save or load waits for


class Saving:
    """A checkpoint on its way to the disk, or there already.

    >>> import gpipe, tempfile
    >>> pipe = gpipe.GPipe([nn.Linear(2, 3)], partitions=1, micro_batches=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = gpipe.save(folder, pipe, background=True)
    ...     saving.wait().name, saving.done
    ('step_0', True)
    """

    def __init__(self, writing: Writing, team: Communicator) -> None:
        self._writing, self._team = writing, team
        self._thread: threading.Thread | None = None
        self._name: str | None = None
        self._failed = FirstError()
        self._sign: int | None = None  # that this process lives and writes
        self._settled = False

    def wait(self) -> Path:
        """Waits until the checkpoint is on the disk for good, whole, and gives its folder.

        In several processes every one of them must call it, or none: the next save or load does it too.

        Raises:
            OSError: The disk is full, or the like; what was saved before is as it was. Raised once.
            RemoteError: Another rank failed.
        """
        self.wait_once()
        if self._name is None:
            raise RuntimeError("this checkpoint was not saved, as was said when it was first waited for")
        return self._writing.path.parent / self._name

    def wait_once(self) -> None:
        """Waits and raises what went wrong on any rank, unless that was done before."""
        self.wait_here()
        if self._settled:
            return
        try:
            self._end(agree(self._team, self._name, error=self._failed.error)[0])
        except BaseException:
            self._end(None)
            raise

    def wait_here(self, folder: Path | None = None) -> None:
        """Waits until this rank has written, if it is into this folder; whoever saves is told what went wrong."""
        if self._thread is not None and folder in (None, self._writing.path.parent):
            self._thread.join()

    def _end(self, name: str | None) -> None:
        """Lets go of everything, once all ranks have said how it went."""
        self._settled, self._name, sign, self._sign = True, name, self._sign, None
        if self._writing.draft is not None:
            self._writing.draft.end()
        if sign is not None:
            os.close(sign)

    @property
    def done(self) -> bool:
        """Whether `wait` would not have to wait for this rank."""
        return self._thread is None or not self._thread.is_alive()

    def in_foreground(self) -> None:
        """Writes it now."""
        try:
            with self._failed:
                write_part(self._writing)
            agree(self._team, error=self._failed.error)
            with self._failed:
                self._name = finish(self._writing)
            self.wait_once()
        except BaseException:
            self._end(None)
            raise

    def in_background(self) -> None:
        """Begins to write it."""
        with self._failed:
            self._sign = begin_part(self._writing)
        self._thread = threading.Thread(target=self._write, name="gpipe-save")  # no daemon: it outlives the script
        self._thread.start()

    def _write(self) -> None:
        if self._failed.error is None:
            with self._failed:
                write_part(self._writing)
                self._name = finish(self._writing)
        error = self._failed.error
        if error is not None:
            logger.error("a checkpoint could not be saved: %s: %s", type(error).__name__, error)
            with suppress(OSError):  # rank 0 will notice all the same, by its limit
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
    """Saves a checkpoint, which after a crash at any instant is all there or not at all.

    It is `folder/step_N`, N being `pipe.step_number`. It can be loaded with any number of partitions and replicas, in
    one process or several, and by plain PyTorch. Randomness needs no saving beyond the pipe's seed and step number.
    In several processes every one calls it, with the same arguments; each of the first replica's writes its stages.

    Args:
        folder: Of this run and this pipe alone, on a file system that all processes share.
        pipe: Whose parameters, buffers, step number and seed are saved, shared parameters once.
        optimizer: Any torch optimizer of the pipe's parameters; None where a stage has none.
        extra: What else the run needs to go on: numbers, text, tensors, None, and lists, tuples and dicts of
            them. Say, the epoch, the place in it, and `scheduler.state_dict()`. In several processes that of rank 0.
        background: Copies the tensors, which is all that training waits for, and writes from a thread. The next save
            or load waits for it, and raises what went wrong; so does `wait()` of what is returned.
        keep: How many checkpoints stay, this one included; older ones go once it is there. By default all stay.
        limit: Seconds that the first process waits, in the background, for one of which nothing more comes.

    Returns:
        The checkpoint on its way: `wait()` gives its folder when it is on the disk for good.

    Raises:
        OSError: The disk is full, or the like. What was saved before is as it was, and training can go on.
        TypeError: It is no pipe.
        ValueError: Something cannot be saved: all of it is listed. Or the ranks were given different things.
        RemoteError: Another rank failed.

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
    settle(pipe)
    root, team, part, draft, failed = Path(os.path.abspath(folder)), communicator_of(pipe), Part(), None, FirstError()
    with failed:
        part = gather(pipe, optimizer, extra, keep, team.rank)
        if background:
            part.files = copied(part.files)
        if team.rank == 0:
            draft = begin(root, pipe.step_number)
    same = {"folder": str(root), "step_number": getattr(pipe, "step_number", None), "background": background}
    try:
        name = agree(team, draft and draft.path.name, same=same, error=failed.error)[0]
    except BaseException:
        if draft is not None:
            draft.end()
        raise
    numbers = {
        "step_number": pipe.step_number,
        "seed": pipe.seed,
        "world": team.size,
        "layers_per_partition": list(pipe.layers_per_partition),
        "micro_batches": pipe.micro_batches,
    }
    writers = min(team.size, pipe.partitions)  # the first replica, or one process for all stages
    writing = Writing(team.rank, writers, root / name, part, numbers, draft, keep, limit, team.gone)
    saving = Saving(writing, team)
    if background:
        _under_way[pipe] = saving
        saving.in_background()
    else:
        saving.in_foreground()
    return saving


def check_order(folder: object, pipe: object, name: str, optimizer: object = None) -> None:
    """Checks that what saves or loads was given a folder, a pipe and perhaps an optimizer, in this order."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(
            f"folder is a {type(folder).__name__}; give the folder's path first: gpipe.{name}(folder, pipe, ...)"
        )
    if pipe is not None and not isinstance(pipe, nn.Module):
        raise TypeError(f"pipe is a {type(pipe).__name__}; give the gpipe.GPipe: gpipe.{name}(folder, pipe, ...)")
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give the torch optimizer itself, not its state_dict(); "
            f"that of schedulers and scalers goes into save(..., extra=...)"
        )


def settle(pipe: nn.Module | None, folder: str | os.PathLike[str] | None = None) -> None:
    """Waits for the checkpoint that is being written of a pipe, if nobody did yet, or of any pipe into a folder."""
    before = None if pipe is None else _under_way.pop(pipe, None)
    if before is not None:
        before.wait_once()
    if folder is not None:
        for saving in list(_under_way.values()):
            saving.wait_here(Path(os.path.abspath(folder)))
