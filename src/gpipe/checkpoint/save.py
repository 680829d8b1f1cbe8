"""Saves a checkpoint: all ranks write their parts into one temporary folder, and rank 0 makes it final.

    calling thread of each rank    gather, copy | agree: where |                          wait | agree: all well
    its writing thread                                         | its part, then a note
    rank 0's                                                   | the same, awaits all notes, makes it final

In the foreground the calling thread does all of it, and the ranks agree before rank 0 makes it final. Only calling
threads exchange with other ranks; writing threads meet in the folder:

all      in the background: of rank 2 part_2.begun, locked for as long as the process lives
rank 2   of each of its stages, say 5, stage_5.safetensors and stage_5.optimizer.safetensors, all synced;
         then part_2.json, which has their hashes
rank 0   the same; once all parts are there: manifest.json, the parts' notes removed, rename, latest
"""

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gpipe._torch.accelerator import copied_to_host
from gpipe._torch.modes import intra_op_threads
from gpipe.checkpoint.files import encoded, opened, put_file, why_not_storable, write_file
from gpipe.checkpoint.folder import Draft, begin, clear_leftovers, lock, prune, publish
from gpipe.checkpoint.manifest import MANIFEST, Encoder, Group, Manifest, Optimizer, to_bytes
from gpipe.distributed.communicator import Communicator, FirstError, all_gather_checked, communicator_of, differences
from gpipe.distributed.reduce import is_sharded_over_replicas
from gpipe.errors import RemoteError
from gpipe.stages.digest import checksum
from gpipe.stages.dtensor import full_tensor
from gpipe.stages.quantized import is_quantized

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe

EXTRA = "extra.safetensors"
NO_OPTIONS = ("params", "param_names")  # of a parameter group: these say whose options they are
POLL = 0.05  # seconds between two looks for the parts of other ranks

logger = logging.getLogger("gpipe")

_under_way: "WeakKeyDictionary[nn.Module, Saving]" = WeakKeyDictionary()  # what the next save or load waits for


@dataclass
class Part:
    """The part of a rank."""

    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # the tensors of each, by name
    said: dict[str, Any] = field(default_factory=dict)  # what the fields of the manifest get from it
    mistakes: list[str] = field(default_factory=list)  # what cannot be saved, each with what to do

    def put(self, file: str, name: str, tensor: Tensor) -> str:
        tensors = self.files.setdefault(file, {})
        while name in tensors:
            name += "'"
        tensors[name] = full_tensor(tensor.detach())
        return name

    def encoder(self, file: Callable[[str], str]) -> Encoder:
        """Puts the tensors of values into files, by where they were found."""
        return Encoder(lambda where, tensor: self.put(file(where), where, tensor), self.mistakes)


def first_names(module: nn.Module) -> dict[str, str]:
    """For each name of the state_dict the first name of the same tensor, over all ranks."""
    known: dict[int, str] = {}
    ties: Mapping[str, str] = getattr(module, "ties_of_names", {})
    names = {}
    for name, value in module.state_dict(keep_vars=True).items():
        first = known.setdefault(id(value), name) if isinstance(value, Tensor) else name
        names[name] = ties.get(name, ties.get(first, first))
    return names


QUANTIZED = "a quantized weight, of which nothing is saved but the checksum "
BESIDE = ("SCB", "weight_format")  # what bitsandbytes saves beside a weight of 8 bits


def state_to_save(module: nn.Module) -> dict[str, Any]:
    """A module's state_dict; of frozen weights that a quantizer made it has checksums.

    Whoever loads has quantized the same base, and no way to put other bits into it: bitsandbytes takes none.
    """
    state: dict[str, Any] = module.state_dict()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_quantized(parameter):
            path = name.rpartition(".")[0]
            beside = {f"{path}.{it}" for it in BESIDE}
            for key in [key for key in state if key.startswith(f"{name}.") or key in beside]:
                del state[key]
            state[name] = f"{QUANTIZED}{checksum([parameter])}"
    return state


def stays(value: object) -> bool:
    """Whether a value of `state_to_save` stands for a weight that stays as it is."""
    return isinstance(value, str) and value.startswith(QUANTIZED)


def names_of_parameters(module: nn.Module) -> dict[Tensor, str]:
    """The first name of each parameter."""
    firsts = first_names(module)
    return {parameter: firsts.get(name, name) for name, parameter in module.named_parameters()}


def gather(
    pipe: "GPipe", optimizer: torch.optim.Optimizer | None, extra: object, keep: int | None, rank: int
) -> Part:
    """Collects what a rank has to save; those of other replicas than the first only help to put shards together."""
    if not hasattr(pipe, "layers_per_partition"):
        raise TypeError(f"a {type(pipe).__name__} cannot be saved; give the gpipe.GPipe itself, not what wraps it")
    part = Part()
    stage_of = pipe.stage_of

    def file(name: str, kind: str = "") -> str:
        """The file for what belongs to a name of the state_dict; what is of no layer goes with the first."""
        stage = stage_of.get(name, stage_of.get(name.partition(".")[0], min(stage_of.values())))
        return f"stage_{stage}{kind}.safetensors"

    part.files |= {f"stage_{stage}.safetensors": {} for stage in stage_of.values()}
    _gather_state(pipe, part, file)
    if optimizer is not None:
        _gather_optimizer(pipe, optimizer, part, part.encoder(lambda name: file(name, ".optimizer")))
    if rank == 0:
        part.said["extra"] = part.encoder(lambda name: EXTRA)(extra, "extra")
    if keep is not None and not (isinstance(keep, int) and keep >= 1):
        part.mistakes.append(f"keep={keep!r}; give how many checkpoints stay, at least 1, or None for all")
    if part.mistakes:
        raise ValueError("nothing was saved:\n" + "\n".join(f"- {mistake}" for mistake in part.mistakes))
    return part if rank < pipe.partitions else Part()


def _gather_state(pipe: "GPipe", part: Part, file: Callable[..., str]) -> None:
    """Collects parameters and buffers, each once, and whatever else a state_dict holds."""
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
            part.mistakes.append(f"{name} {wrong}")
        names.append(part.put(file(name), name, value))
    ties = {name: first for name, first in firsts.items() if name != first}
    part.said |= {"names": names, "values": values, "ties": ties}


def _gather_optimizer(pipe: "GPipe", optimizer: torch.optim.Optimizer, part: Part, encode: Encoder) -> None:
    """Collects the state of each parameter, and its group's options, by the parameter's first name."""
    part.mistakes += why_not_by_name(optimizer)
    names = names_of_parameters(pipe)
    foreign = {*part.said["ties"].values(), *pipe.held_before} - set(part.said["names"])  # others save these
    groups, state = list[Group](), {}
    for at, group in enumerate(optimizer.param_groups):
        if strange := [tuple(parameter.shape) for parameter in group["params"] if parameter not in names]:
            why = f"group {at} of the optimizer has parameters of shapes {strange} that are not the pipe's"
            part.mistakes.append(f"{why}; give them an optimizer of their own, and put its state into extra=")
        own = {names[p]: p for p in group["params"] if p in names and names[p] not in foreign}
        options = {key: encode(value, f"group {at}/{key}") for key, value in group.items() if key not in NO_OPTIONS}
        groups.append({"parameters": list(own), "options": options})
        for name, parameter in own.items():
            if parameter in optimizer.state:
                remembered = optimizer.state[parameter]
                state[name] = {key: encode(value, f"{name}/{key}") for key, value in remembered.items()}
    part.said["optimizer"] = {"type": type(optimizer).__name__, "groups": groups, "state": state}


def why_not_by_name(optimizer: torch.optim.Optimizer) -> list[str]:
    """Why the state of an optimizer cannot be split by parameter, if so."""
    kind = type(optimizer).__name__
    if hasattr(optimizer, "consolidate_state_dict"):
        return [f"{kind} spreads its state over the replicas, and no rank has all of it; save with another optimizer"]
    mistakes = []
    if more := sorted(set(optimizer.state_dict()) - {"state", "param_groups"}):
        mistakes.append(f"{kind} has {', '.join(more)} beside its state by parameter; put that into extra=")
    if keys := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        mistakes.append(f"{kind} has state of no parameter, {keys}, which no stage can hold; move it into a group")
    return mistakes


@dataclass(frozen=True)
class Writing:
    """What a rank has to write, and where."""

    rank: int
    ranks: int  # that write; others do nothing
    path: Path  # of the temporary folder
    part: Part  # emptied on the way
    numbers: Mapping[str, Any]  # the fields of the manifest that every rank knows
    draft: Draft | None  # of rank 0 alone
    keep: int | None  # how many checkpoints stay, if not all
    limit: float  # seconds that rank 0 waits for ranks of which nothing more comes
    gone: Callable[[], Collection[int]]  # which have no connection any more: they may have closed it, and write on

    def said(self, rank: int, what: str) -> Path:
        """Where a rank says that its part has `begun`, has `failed`, or is there (`json`)."""
        return self.path / f"part_{rank}.{what}"

    def say(self, what: str, content: object) -> None:
        path = self.said(self.rank, what)
        put_file(path, path.with_suffix(f".{what}.tmp"), json.dumps(content).encode())


def write_part(writing: Writing) -> None:
    """Writes this rank's part, and then the note that it is there."""
    if writing.rank >= writing.ranks:
        return
    if writing.rank == 0:
        clear_leftovers(writing.path.parent)
    part = writing.part
    files = {name: write_file(writing.path / name, encoded(part.files.pop(name))) for name in list(part.files)}
    writing.say("json", part.said | {"files": files})


def begin_part(writing: Writing, held: ExitStack) -> None:
    """Shows the others that this rank lives and will write: a lock, which ends with the process."""
    if writing.rank >= writing.ranks:
        return
    shown = writing.said(writing.rank, "begun")
    hidden = shown.with_suffix(".begun.tmp")
    with opened(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as made:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(made, fcntl.LOCK_EX)
        os.rename(hidden, shown)
        held.callback(os.close, os.dup(made))  # which holds the lock on


def _is_gone(writing: Writing, rank: int) -> bool:
    try:
        sign, is_left = lock(writing.said(rank, "begun"), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return rank in writing.gone() and not writing.said(rank, "begun").exists()
    os.close(sign)
    return is_left and not any(writing.said(rank, what).exists() for what in ("json", "failed"))


def note_failure(writing: Writing, error: Exception) -> None:
    """Lets rank 0 know that this part will not come."""
    if writing.draft is not None:
        return  # it is rank 0's
    for stage in {name.partition(".")[0] for name in writing.part.files}:
        for file in writing.path.glob(f"{stage}.*"):
            file.unlink()  # on a full disk there is no room for the note else
    writing.say("failed", [type(error).__name__, str(error)])


def _await_parts(writing: Writing) -> None:
    size, since = -1, time.monotonic()
    while missing := [rank for rank in range(writing.ranks) if not writing.said(rank, "json").exists()]:
        for rank in missing:
            failed = writing.said(rank, "failed")
            if failed.exists():
                kind, text = json.loads(failed.read_text())
                raise RemoteError(f"rank {rank} failed: {kind}: {text}", rank, kind)
            if _is_gone(writing, rank):
                text = f"rank {rank} is gone; it ended before its part of the checkpoint was written"
                raise RemoteError(text, rank)
        now = 0
        for entry in os.scandir(writing.path):
            with suppress(FileNotFoundError):  # renamed meanwhile
                now += entry.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > writing.limit:
            remedy = "look whether they are alive, and whether the folder is one that all hosts share"
            silent = f"ranks {missing} wrote nothing into {writing.path} for {writing.limit:g} seconds"
            raise TimeoutError(f"{silent}; {remedy}")
        time.sleep(POLL)


def finish(writing: Writing) -> str | None:
    """On rank 0, makes the parts one checkpoint, the latest, and removes what is too much; gives its name."""
    if writing.draft is None:
        return None
    _await_parts(writing)
    notes = [writing.said(rank, "json") for rank in range(writing.ranks)]
    manifest = _joined([json.loads(path.read_text()) for path in notes], writing.numbers)
    data = to_bytes(manifest)
    write_file(writing.path / MANIFEST, [data])
    for path in [*notes, *writing.path.glob("part_*.begun")]:
        os.unlink(path)
    name = publish(writing.draft, manifest.step_number, hashlib.sha256(data).hexdigest())
    if writing.keep is not None:
        try:
            prune(writing.path.parent, writing.keep, name)
        except OSError as error:
            logger.warning("%s is saved, but older checkpoints could not be removed: %s", name, error)
    return name


def _joined(parts: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any]) -> Manifest:
    optimizers = [part["optimizer"] for part in parts if "optimizer" in part]
    return Manifest(
        files={name: file for part in parts for name, file in part["files"].items()},
        names=[name for part in parts for name in part["names"]],
        ties={name: first for part in parts for name, first in part["ties"].items()},
        values={name: value for part in parts for name, value in part["values"].items()},
        optimizer=_joined_optimizer(optimizers) if optimizers else None,
        extra=parts[0]["extra"],
        **numbers,
    )


def _joined_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer:
    """One optimizer; parameters of the same options make one group, whichever rank they are of."""
    groups: dict[str, Group] = {}
    for group in [group for optimizer in optimizers for group in optimizer["groups"] if group["parameters"]]:
        key = json.dumps(group["options"], sort_keys=True)
        same = groups.setdefault(key, {"parameters": [], "options": group["options"]})
        same["parameters"] += group["parameters"]
    state = {name: remembered for optimizer in optimizers for name, remembered in optimizer["state"].items()}
    return {"type": optimizers[0]["type"], "groups": list(groups.values()), "state": state}


class Saving:
    """A checkpoint on its way to the disk, or there already.

    >>> import gpipe, tempfile
    >>> pipe = gpipe.GPipe([nn.Linear(2, 3)], partitions=1, micro_batches=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = gpipe.save(folder, pipe, background=True)
    ...     saving.wait().name, saving.done
    ('step_0', True)
    """

    def __init__(self, writing: Writing, team: Communicator, held: ExitStack) -> None:
        self._writing, self._team, self._held = writing, team, held
        self._thread: threading.Thread | None = None
        self._name: str | None = None
        self._failed = FirstError()
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
        doing = f"waited for what is saved to {self._writing.path.parent}"
        try:
            self._end(all_gather_checked(self._team, self._name, error=self._failed.error, doing=doing)[0])
            if self._name is None and self._thread is not None:
                logger.warning("%s was not saved: the replica that writes it is lost", self._writing.path.name)
        except BaseException as error:
            self._end(None)
            if self._failed.error not in (None, error):  # the others did not wait for it to be said
                raise self._failed.error from None
            raise

    def wait_here(self, folder: Path | None = None) -> None:
        """Waits until this rank has written, if it is into this folder; whoever saves is told what went wrong."""
        if self._thread is not None and folder in (None, self._writing.path.parent):
            self._thread.join()

    def _end(self, name: str | None) -> None:
        """Lets go of everything, once all ranks have said how it went."""
        if not self._settled:
            self._settled, self._name = True, name
            self._held.close()

    @property
    def done(self) -> bool:
        """Whether `wait` would not have to wait for this rank."""
        return self._thread is None or not self._thread.is_alive()

    def in_foreground(self) -> bool:
        """Writes it now; whether it is there."""
        try:
            with self._failed:
                write_part(self._writing)
            all_gather_checked(
                self._team, error=self._failed.error, doing=f"wrote their parts to {self._writing.path.parent}"
            )
            with self._failed:
                self._name = finish(self._writing)
            self.wait_once()
            return self._name is not None
        except BaseException:
            self._end(None)
            raise

    def in_background(self) -> None:
        with self._failed:
            begin_part(self._writing, self._held)
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
    rank, size = team.rank, team.size  # others, once a replica is lost
    own: tuple[str | None, int] = None, 0
    with ExitStack() as held:  # locks
        with failed:
            part = gather(pipe, optimizer, extra, keep, rank)
            with intra_op_threads(1):  # which copies as fast as the memory goes; several wait whenever a core is busy
                for tensors in part.files.values() if background else ():
                    tensors.update(zip(tensors, copied_to_host(tensors.values()), strict=True))
            own = _look(pipe, optimizer, size // pipe.partitions)
            if rank == 0:
                draft = begin(root, pipe.step_number)
                held.callback(draft.end)
        same = {"folder": str(root), "step_number": getattr(pipe, "step_number", None), "background": background}
        mine, doing = [draft and draft.path.name, *own], f"collected what to save to {root}"
        gathered = all_gather_checked(team, mine, same=same, error=failed.error, doing=doing)
        name = gathered[0][0] or ""
        _compare(gathered, pipe.partitions)
        held = held.pop_all()  # until it is written
    numbers = {"step_number": pipe.step_number, "seed": pipe.seed, "plan": pipe.plan.to_json(), "world": size}
    writers = min(size, pipe.partitions)  # the first replica, or one process for all stages
    writing = Writing(rank, writers, root / name, part, numbers, draft, keep, limit, team.gone)
    saving = Saving(writing, team, held)
    if background and name:
        _under_way[pipe] = saving
        saving.in_background()
    elif not name or not saving.in_foreground():  # the first replica was lost, so that another one writes
        return save(folder, pipe, optimizer, extra=extra, background=background, keep=keep, limit=limit)
    return saving


def _look(pipe: "GPipe", optimizer: object, replicas: int) -> tuple[str | None, int]:
    """The type of a rank's optimizer, None where there is nothing to train, and a checksum of its weights."""
    own = list(pipe.parameters())
    kind = "None" if any(parameter.requires_grad for parameter in own) else None
    weights = [parameter for parameter in own if replicas > 1 and not is_sharded_over_replicas(parameter)]
    return kind if optimizer is None else type(optimizer).__name__, checksum(weights)


def _compare(gathered: Sequence[tuple[object, str | None, int]], partitions: int) -> None:
    """Checks that all ranks have optimizers of one type; tells of replicas whose weights have drifted apart."""
    if mistakes := differences({rank: {"optimizer": kind} for rank, (_, kind, _) in enumerate(gathered) if kind}):
        raise ValueError(f"all ranks must be given the same: {'; '.join(mistakes)}")
    if apart := [rank for rank, own in enumerate(gathered) if own[2] != gathered[rank % partitions][2]]:
        told = "the weights of ranks %s are not those of the first replica, which are saved"
        logger.warning(f"{told}: have all replicas take every optimizer step, and load this checkpoint", apart)


def check_order(folder: object, pipe: object, name: str, optimizer: object = None) -> None:
    """Checks that what saves or loads was given a folder, a pipe and perhaps an optimizer, in this order."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder is a {type(folder).__name__}; give its path first: gpipe.{name}(folder, pipe, ...)")
    if pipe is not None and not isinstance(pipe, nn.Module):
        raise TypeError(f"pipe is a {type(pipe).__name__}; give the gpipe.GPipe: gpipe.{name}(folder, pipe, ...)")
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        why = f"optimizer is a {type(optimizer).__name__}; give the torch optimizer itself, not its state_dict()"
        raise TypeError(f"{why}; that of schedulers and scalers goes into save(..., extra=...)")


def settle(pipe: nn.Module | None, folder: str | os.PathLike[str] | None = None) -> None:
    """Waits for the checkpoint that is being written of a pipe, if nobody did yet, or of any pipe into a folder."""
    if pipe is not None and (before := _under_way.pop(pipe, None)) is not None:
        before.wait_once()
    if folder is not None:
        for saving in list(_under_way.values()):
            saving.wait_here(Path(os.path.abspath(folder)))
