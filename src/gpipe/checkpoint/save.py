"""Saves checkpoints: all ranks write their files into one temporary folder, which rank 0 publishes.

    calling thread of each rank    collect, copy | agree on the folder |                    wait | agree on success
    writing thread of each rank                                        | write part, write note
    writing thread of rank 0                                           | write part, await all notes, publish

In the foreground, the calling thread also does the work of the writing threads, and the ranks agree before rank 0
publishes. Only calling threads communicate with other ranks. Writing threads communicate through files in the folder:

all      in the background, rank 2 writes part_2.begun, which is locked while the process runs
rank 2   for each of its stages, such as 5, stage_5.safetensors and stage_5.optimizer.safetensors, all synced;
         then part_2.json with their hashes
rank 0   the same; after all parts are there: writes manifest.json, removes the notes, renames, writes latest

If the ranks do not share a folder, or if the folder is a URL, each rank writes its part to its folder, as `parts.py`
describes. Then no rank waits for the parts of other ranks. A checkpoint is complete when all parts exist.
"""

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from gpipe._torch.accelerator import copied_to_host
from gpipe._torch.modes import intra_op_threads
from gpipe.checkpoint.files import File, encode_file, opened, put_file, why_not_storable
from gpipe.checkpoint.folder import Draft, begin, clear_leftovers, lock, prune, publish
from gpipe.checkpoint.manifest import MANIFEST, Encoder, Group, Manifest, from_bytes, to_bytes
from gpipe.checkpoint.parts import EXTRA, Seen, join, look, next_id, part_name, prune_parts, saves_in, unused_name
from gpipe.checkpoint.places import Url, commit_file, create_folder, remove_files, to_place, write_file
from gpipe.distributed.communicator import Communicator, FirstError, all_gather_checked, communicator_of, differences
from gpipe.distributed.reduce import is_sharded_over_replicas
from gpipe.errors import RemoteError
from gpipe.stages.digest import checksum
from gpipe.stages.dtensor import full_tensor
from gpipe.stages.quantized import is_quantized

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe

NO_OPTIONS = ("params", "param_names")  # keys of a parameter group that are not options
POLL = 0.05  # seconds between checks for the parts of other ranks

logger = logging.getLogger("gpipe")

_warned: "WeakSet[nn.Module]" = WeakSet()  # the pipes whose processes are known to share no folder
_pending: "WeakKeyDictionary[nn.Module, Saving]" = WeakKeyDictionary()  # The next save or load waits for these.


@dataclass
class Part:
    """The tensors and manifest entries that one rank adds to a checkpoint."""

    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # the tensors of each file, by name
    fields: dict[str, Any] = field(default_factory=dict)  # its entries in fields of the manifest
    mistakes: list[str] = field(default_factory=list)  # messages about values that cannot be saved
    written: dict[str, File] = field(default_factory=dict)  # the files that were written
    is_committed: bool = False  # whether the part file of a checkpoint in parts was written

    def put(self, file: str, name: str, tensor: Tensor) -> str:
        """Adds a tensor to a file, and returns the name of the tensor in the file."""
        tensors = self.files.setdefault(file, {})
        while name in tensors:
            name += "'"
        tensors[name] = full_tensor(tensor.detach())
        return name

    def encoder(self, file: Callable[[str], str]) -> Encoder:
        """Returns an encoder that stores the tensors of a value in files.

        Args:
            file: A function that returns the file name for the path of a tensor, such as `0.weight/exp_avg`.
        """
        return Encoder(lambda where, tensor: self.put(file(where), where, tensor), self.mistakes)


def first_names(module: nn.Module) -> dict[str, str]:
    """Returns a dict from each name in the state_dict to the first name of the same tensor in the whole model."""
    known: dict[int, str] = {}
    ties: Mapping[str, str] = getattr(module, "ties_of_names", {})
    names = {}
    for name, value in module.state_dict(keep_vars=True).items():
        first = known.setdefault(id(value), name) if isinstance(value, Tensor) else name
        names[name] = ties.get(name, ties.get(first, first))
    return names


QUANTIZED = "a quantized weight, of which nothing is saved but the checksum "
EIGHT_BIT_KEYS = ("SCB", "weight_format")  # additional entries of bitsandbytes for 8-bit weights


def state_to_save(module: nn.Module) -> dict[str, Any]:
    """Returns the state_dict of a module, with checksums instead of frozen quantized weights.

    bitsandbytes cannot load quantized values. Before loading, users must quantize the same base model again.
    """
    state: dict[str, Any] = module.state_dict()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_quantized(parameter):
            path = name.rpartition(".")[0]
            extra = {f"{path}.{it}" for it in EIGHT_BIT_KEYS}
            for key in [key for key in state if key.startswith(f"{name}.") or key in extra]:
                del state[key]
            state[name] = f"{QUANTIZED}{checksum([parameter])}"
    return state


def is_kept_weight(value: object) -> bool:
    """Returns whether a value of `state_to_save` is the checksum of a quantized weight, which is not saved."""
    return isinstance(value, str) and value.startswith(QUANTIZED)


def names_of_parameters(module: nn.Module) -> dict[Tensor, str]:
    """Returns the first name of each parameter."""
    firsts = first_names(module)
    return {parameter: firsts.get(name, name) for name, parameter in module.named_parameters()}


def gather(
    pipe: "GPipe", optimizer: torch.optim.Optimizer | None, extra: object, keep: int | None, rank: int
) -> Part:
    """Collects the tensors and manifest entries that a rank writes.

    Only the first replica writes. Ranks of other replicas help to gather sharded tensors, and then return an empty
    `Part`.
    """
    if not hasattr(pipe, "layers_per_partition"):
        raise TypeError(f"pipe is a {type(pipe).__name__}. Pass the gpipe.GPipe itself, without a wrapper.")
    part = Part()
    stage_of = pipe.stage_of

    def file(name: str, kind: str = "") -> str:
        """Returns the file for a name in the state_dict. Names without a layer are stored with the first stage."""
        stage = stage_of.get(name, stage_of.get(name.partition(".")[0], min(stage_of.values())))
        return f"stage_{stage}{kind}.safetensors"

    part.files |= {f"stage_{stage}.safetensors": {} for stage in stage_of.values()}
    _gather_state(pipe, part, file)
    if optimizer is not None:
        _gather_optimizer(pipe, optimizer, part, part.encoder(lambda name: file(name, ".optimizer")))
    if rank == 0:
        part.fields["extra"] = part.encoder(lambda name: EXTRA)(extra, "extra")
    if keep is not None and not (isinstance(keep, int) and keep >= 1):
        part.mistakes.append(f"keep={keep!r} is invalid. Pass the number of checkpoints to keep, or None for all.")
    if part.mistakes:
        raise ValueError("Nothing was saved:\n" + "\n".join(f"- {mistake}" for mistake in part.mistakes))
    return part if rank < pipe.partitions else Part()


def _gather_state(pipe: "GPipe", part: Part, file: Callable[..., str]) -> None:
    """Adds all values of the state_dict. Shared parameters and buffers are added once."""
    firsts = first_names(pipe)
    encode = part.encoder(lambda name: file(name, ".values"))
    names, values = [], {}
    for name, value in state_to_save(pipe).items():
        if firsts[name] != name or name in pipe.held_before:
            continue
        if not isinstance(value, Tensor):
            values[name] = encode(value, name)
            continue
        if wrong := why_not_storable(value):
            part.mistakes.append(f"{name} {wrong}.")
        names.append(part.put(file(name), name, value))
    ties = {name: first for name, first in firsts.items() if name != first}
    part.fields |= {"names": names, "values": values, "ties": ties}


def _gather_optimizer(pipe: "GPipe", optimizer: torch.optim.Optimizer, part: Part, encode: Encoder) -> None:
    """Adds the optimizer state and the group options of each parameter, under the first name of the parameter."""
    part.mistakes += why_not_by_name(optimizer)
    names = names_of_parameters(pipe)
    foreign = {*part.fields["ties"].values(), *pipe.held_before} - set(part.fields["names"])  # saved by others
    groups, state = list[Group](), {}
    for index, group in enumerate(optimizer.param_groups):
        if unknown := [tuple(parameter.shape) for parameter in group["params"] if parameter not in names]:
            part.mistakes.append(
                f"group {index} of the optimizer has parameters of shapes {unknown} that are not in the pipe. Use a "
                f"separate optimizer for these parameters, and pass its state as extra=."
            )
        own = {names[p]: p for p in group["params"] if p in names and names[p] not in foreign}
        options = {
            key: encode(value, f"group {index}/{key}") for key, value in group.items() if key not in NO_OPTIONS
        }
        groups.append({"parameters": list(own), "options": options})
        for name, parameter in own.items():
            if parameter in optimizer.state:
                entries = optimizer.state[parameter].items()
                state[name] = {key: encode(value, f"{name}/{key}") for key, value in entries}
    part.fields["optimizer"] = {"type": type(optimizer).__name__, "groups": groups, "state": state}


def why_not_by_name(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns a message for each reason why the state of an optimizer cannot be stored per parameter."""
    kind = type(optimizer).__name__
    if hasattr(optimizer, "consolidate_state_dict"):
        return [f"optimizer is a {kind}, whose state is sharded over replicas. Use a different optimizer."]
    mistakes = []
    if more := sorted(set(optimizer.state_dict()) - {"state", "param_groups"}):
        mistakes.append(f"{kind} has {', '.join(more)} in addition to its state per parameter. Pass it as extra=.")
    if keys := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        mistakes.append(f"{kind} has state without a parameter: {keys}. Move it into a parameter group.")
    return mistakes


@dataclass(frozen=True)
class Writing:
    """The tensors and manifest entries that a rank writes, and the folder of its files."""

    rank: int
    ranks: int  # the number of ranks that write
    path: Path  # the temporary folder, or the final folder of a checkpoint in parts
    part: Part  # Its tensors are removed as they are written.
    numbers: Mapping[str, Any]  # the fields of the manifest that every rank knows
    draft: Draft | None  # only on rank 0
    keep: int | None  # the number of checkpoints to keep, or None for all
    limit: float  # seconds that rank 0 waits for ranks that write nothing
    gone: Callable[[], Collection[int]]  # ranks without a connection, which may still be writing
    in_parts: bool = False  # whether each rank writes a complete part, for which no other rank waits

    @property
    def writes(self) -> bool:
        """Whether this rank writes. Only the ranks of the first replica do."""
        return self.rank < self.ranks

    @property
    def part_path(self) -> Path:
        """The path of the part file of this rank."""
        return self.path / part_name(self.rank, self.ranks, self.numbers["save_id"])

    def manifest(self) -> bytes:
        """Returns the manifest of the files that this rank has written."""
        fields = {"optimizer": None, "extra": None, **self.part.fields, **self.numbers}
        return to_bytes(Manifest(files=self.part.written, **fields))

    def note_path(self, rank: int, what: str) -> Path:
        """Returns the path of a note of a rank. Writing has `begun`, has `failed`, or is complete (`json`)."""
        return self.path / f"part_{rank}.{what}"

    def write_note(self, what: str, content: bytes) -> None:
        """Writes a note of this rank, which other ranks read."""
        path = self.note_path(self.rank, what)
        put_file(path, path.with_suffix(f".{what}.tmp"), content)

    def discard_part(self) -> None:
        """Removes the files of this rank, unless its part is complete."""
        if self.in_parts and self.writes and not self.part.is_committed:
            remove_files(self.path, [*self.part.written, *self.part.files])


def write_part(writing: Writing) -> None:
    """Writes the files of this rank, and then the note that all files are complete."""
    if not writing.writes:
        return
    part = writing.part
    if writing.in_parts:
        create_folder(writing.path)
    elif writing.rank == 0:
        clear_leftovers(writing.path.parent)
    for name in list(part.files):
        part.written[name] = write_file(writing.path / name, encode_file(part.files[name]))
        del part.files[name]
    if not writing.in_parts:
        writing.write_note("json", writing.manifest())


def begin_part(writing: Writing, held: ExitStack) -> None:
    """Creates and locks a note. While the lock exists, other ranks know that this process is alive and will write."""
    if writing.in_parts or not writing.writes:
        return
    shown = writing.note_path(writing.rank, "begun")
    hidden = shown.with_suffix(".begun.tmp")
    with opened(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as made:
        with suppress(OSError):  # Some file systems have no locks.
            fcntl.flock(made, fcntl.LOCK_EX)
        os.rename(hidden, shown)
        held.callback(os.close, os.dup(made))  # The duplicate keeps the lock.


def _is_gone(writing: Writing, rank: int) -> bool:
    try:
        sign, is_left = lock(writing.note_path(rank, "begun"), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return rank in writing.gone() and not writing.note_path(rank, "begun").exists()
    os.close(sign)
    return is_left and not any(writing.note_path(rank, what).exists() for what in ("json", "failed"))


def note_failure(writing: Writing, error: Exception) -> None:
    """Writes a note for rank 0 that this rank failed, and removes its files."""
    if writing.in_parts or writing.draft is not None:
        writing.discard_part()
        return  # Rank 0 needs no note, and the ranks of a checkpoint in parts read none.
    for stage in {name.partition(".")[0] for name in writing.part.files}:
        for file in writing.path.glob(f"{stage}.*"):
            file.unlink()  # Makes room for the note on a full disk.
    writing.write_note("failed", json.dumps([type(error).__name__, str(error)]).encode())


def _await_parts(writing: Writing) -> None:
    size, since = -1, time.monotonic()
    while missing := [rank for rank in range(writing.ranks) if not writing.note_path(rank, "json").exists()]:
        for rank in missing:
            failed = writing.note_path(rank, "failed")
            if failed.exists():
                kind, text = json.loads(failed.read_text())
                raise RemoteError(f"rank {rank} failed: {kind}: {text}", rank, kind)
            if _is_gone(writing, rank):
                raise RemoteError(f"rank {rank} ended before it had written its part of the checkpoint.", rank)
        written = 0
        for entry in os.scandir(writing.path):
            with suppress(FileNotFoundError):  # The file was renamed in the meantime.
                written += entry.stat().st_size
        if written != size:
            size, since = written, time.monotonic()
        if time.monotonic() - since > writing.limit:
            raise TimeoutError(
                f"ranks {missing} wrote nothing to {writing.path} for {writing.limit:g} seconds. Check that these "
                f"processes are alive, and that all hosts share the folder."
            )
        time.sleep(POLL)


def finish(writing: Writing) -> str | None:
    """Publishes the checkpoint and returns its name, or None on ranks that do not publish.

    Rank 0 publishes the checkpoint, and removes old checkpoints. For a checkpoint in parts, each rank publishes its
    part.
    """
    if writing.in_parts and writing.writes:
        commit_file(writing.part_path, writing.manifest())
        writing.part.is_committed = True
        return writing.path.name
    if writing.draft is None:
        return None
    _await_parts(writing)
    notes = [writing.note_path(rank, "json") for rank in range(writing.ranks)]
    manifest = join([from_bytes(path.read_bytes()) for path in notes])
    data = to_bytes(manifest)
    write_file(writing.path / MANIFEST, [data])
    for path in [*notes, *writing.path.glob("part_*.begun")]:
        os.unlink(path)
    name = publish(writing.draft, manifest.step_number, hashlib.sha256(data).hexdigest())
    if writing.keep is not None:
        with _warning_if_not_removed(name):
            prune(writing.path.parent, writing.keep, name)
    return name


@contextmanager
def _warning_if_not_removed(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("%s is saved, but old checkpoints were not removed: %s. [leftover-files]", name, error)


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
            with failed, _warning_if_not_removed(self._name):
                seen = look(folder)
            gathered = all_gather_checked(self._ranks, seen, error=failed.error, doing="looked for old checkpoints")
            with _warning_if_not_removed(self._name):
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
    root, ranks, part, draft, failed = to_place(folder), communicator_of(pipe), Part(), None, FirstError()
    rank, size = ranks.rank, ranks.size  # Both may change later, if a replica is lost.
    own: tuple[str | None, int] = None, 0
    seen: Seen = {}
    with ExitStack() as held:  # locks
        with failed:
            part = gather(pipe, optimizer, extra, keep, rank)
            with intra_op_threads(1):  # One thread saturates the memory. Several would wait for busy cores.
                for tensors in part.files.values() if background else ():
                    tensors.update(zip(tensors, copied_to_host(tensors.values()), strict=True))
            own = _optimizer_and_checksum(pipe, optimizer, size // pipe.partitions)
            if "." in (seen := look(root)):
                raise ValueError(f"folder: {root} is a checkpoint itself. Save to {root.parent}.")
            if rank == 0 and not isinstance(root, Url):
                draft = begin(root, pipe.step_number)
                held.callback(draft.end)
        same = {"step_number": getattr(pipe, "step_number", None), "background": background}
        mine = [None if rank else draft.path.name if draft else str(root), *own, [time.time_ns(), seen]]
        gathered = all_gather_checked(
            ranks, mine, same=same, error=failed.error, doing=f"collected values to save to {root}"
        )
        name, folders = gathered[0][0] or "", [each[3][1] for each in gathered]
        _compare_ranks(gathered, pipe.partitions)
        writers = min(size, pipe.partitions)  # The ranks of the first replica, or one process for all stages.
        in_parts = bool(name) and not _is_shared(root, name, rank < writers, ranks)
        if in_parts:
            held.close()  # Removes the draft.
            draft, name = None, unused_name(folders, pipe.step_number)
            if rank == 0 and not isinstance(root, Url) and pipe not in _warned:
                _warned.add(pipe)
                logger.warning(NOT_SHARED, root)
        held = held.pop_all()  # Keeps the locks until the checkpoint is written.
    numbers = {"step_number": pipe.step_number, "seed": pipe.seed, "plan": pipe.plan.to_json(), "world": size}
    if in_parts or any(saves_in(folders)):  # Otherwise equal checkpoints have equal manifests.
        numbers["save_id"] = next_id(folders, gathered[0][3][0])
    writing = Writing(rank, writers, root / name, part, numbers, draft, keep, limit, ranks.gone, in_parts)
    held.callback(writing.discard_part)
    saving = Saving(writing, ranks, held)
    if background and name:
        _pending[pipe] = saving
        saving.in_background()
    elif not name or not saving.in_foreground():  # The first replica was lost, so a different one writes.
        return save(folder, pipe, optimizer, extra=extra, background=background, keep=keep, limit=limit)
    return saving


NOT_SHARED = (
    "%s is not shared by all processes, so each process writes its part of the checkpoint to its folder. To load the "
    "checkpoint, keep the folders of all hosts, or merge them. [checkpoint-in-parts]"
)


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


def _compare_ranks(gathered: Sequence[tuple[object, str | None, int, object]], partitions: int) -> None:
    """Raises an error if the types of optimizers differ between ranks. Logs a warning if replica weights differ."""
    if mistakes := differences({rank: {"optimizer": kind} for rank, (_, kind, _, _) in enumerate(gathered) if kind}):
        raise ValueError(f"save: {'; '.join(mistakes)}. Pass the same type of optimizer on all ranks.")
    if apart := [rank for rank, own in enumerate(gathered) if own[2] != gathered[rank % partitions][2]]:
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
