"""Weights alone, in the layout of the Hugging Face Hub, which any tool reads.

folder/model.safetensors                        or, beyond a size,
folder/model-00001-of-00002.safetensors, ...    and model.safetensors.index.json, which says what is where
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor, nn

from gpipe.checkpoint.files import (
    Shelf,
    encoded,
    make_folder,
    put_file,
    read_small,
    sync_folder,
    why_not_storable,
    write_file,
)
from gpipe.checkpoint.load import Ready, all_of, listed, put, read_weights
from gpipe.checkpoint.manifest import LARGEST, CheckpointError, is_of
from gpipe.checkpoint.save import check_order, first_names, settle, state_to_save, stays
from gpipe.distributed.communicator import FirstError, all_gather_checked, communicator_of
from gpipe.stages.dtensor import full_tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

Rename = Callable[[str], str]


def load_weights(
    folder: str | os.PathLike[str], pipe: nn.Module, *, rename: Rename | None = None, strict: bool = True
) -> None:
    """Loads parameters and buffers from safetensors files in the layout of the Hugging Face Hub.

    Nothing changes unless all of it fits. These files hold no hashes: that bytes were flipped cannot be seen.

    Names are the model's own. transformers saves some models under older ones, unless asked by
    `save_pretrained(folder, save_original_format=False)`; those are read by its `from_pretrained`, and then saved by
    `save_weights`.

    Args:
        folder: Which holds `model.safetensors`, or shards and `model.safetensors.index.json`.
        pipe: Or any module. In several processes every one calls it, and reads its own.
        rename: Gives the name in the files of a name in the pipe.
        strict: Whether the files may hold nothing that the pipe lacks.

    Raises:
        CheckpointError: Something is missing, damaged, or does not fit; the error lists all that is wrong.

    Example:
        >>> import gpipe, tempfile, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)], partitions=2, micro_batches=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     gpipe.save_weights(folder, pipe, rename=lambda name: f"model.layers.{name}")
        ...     gpipe.load_weights(folder, pipe, rename=lambda name: f"model.layers.{name}")
    """
    check_order(folder, pipe, "load_weights")
    settle(pipe)
    team, path = communicator_of(pipe), Path(os.path.abspath(folder))
    ready, shelf, failed = Ready(), Shelf([]), FirstError()
    with failed:
        shelf = _open(path, ready)
        if not ready.findings:
            read_weights(pipe, shelf, lambda name: [rename(name) if rename else name], ready)
        if kept := [name for name, value in state_to_save(pipe).items() if stays(value)]:
            ready.findings.append(f"a quantizer made {listed(kept)}: have transformers read the base, or gpipe.load")
    gathered = all_gather_checked(
        team, [ready.findings, sorted(ready.names)], same={"folder": str(path)}, error=failed.error
    )
    findings, names = map(all_of, zip(*gathered, strict=True))
    known = set(names)
    odd = [name for name in shelf.home if known and name not in known]  # none is known where files cannot be read
    if odd and (strict or findings):
        findings.append(
            f"the files hold {listed(odd)}, which the model lacks; give rename=, or strict=False; if transformers "
            f"wrote them under older names, read them by from_pretrained and gpipe.save_weights(folder, model)"
        )
    if findings:
        raise CheckpointError(path, findings)
    put(ready, pipe, None)


def _open(folder: Path, ready: Ready) -> Shelf:
    where: dict[str, str] = {}
    if not (folder / SINGLE).exists():
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            where = json.loads(read_small(folder / INDEX, LARGEST, follow=True))["weight_map"]
        if not where or not is_of(where, dict[str, str]):
            missing = f"there is neither {SINGLE} nor {INDEX}; give the folder that holds one"
            ready.findings.append(f"{INDEX} is damaged; get it again" if (folder / INDEX).exists() else missing)
            return Shelf([])
    names = sorted(set(where.values())) or [SINGLE]
    strange = [name for name in names if not re.fullmatch(r"[\w.-]+\.safetensors", name)]
    text = "which is no safetensors file of the folder; do not trust it"
    ready.findings += [f"{INDEX} names {name!r}, {text}" for name in strange]
    if ready.findings:
        return Shelf([])
    shelf = Shelf(folder / name for name in names)
    ready.findings += shelf.findings
    if lost := [name for name, file in where.items() if shelf.home.get(name) != file and not shelf.findings]:
        ready.findings.append(f"{INDEX} says where {listed(lost)} would be: it is not there; get all shards again")
    return shelf


def save_weights(
    folder: str | os.PathLike[str], pipe: nn.Module, *, rename: Rename | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Saves parameters and buffers in the layout of the Hugging Face Hub, in place of what was saved so before.

    A process that is killed meanwhile leaves the old weights or the new ones. One exception: as many shards as before
    have the same names; while those are replaced there is no index, so that old and new are never mixed.

    Args:
        folder: Gets `model.safetensors`, or shards and `model.safetensors.index.json`.
        pipe: Or any module. In several processes every one calls it, and those of the first replica write.
        rename: Gives the name in the files of a name in the pipe.
        max_shard_bytes: How large a file may be, unless one tensor alone is larger. Processes share no file.

    Raises:
        OSError: The disk is full, or the like.
        ValueError: Something cannot be saved; the error lists all of it.

    Example:
        >>> import gpipe, safetensors.torch, tempfile, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)], partitions=2, micro_batches=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     gpipe.save_weights(folder, pipe)
        ...     sorted(safetensors.torch.load_file(f"{folder}/model.safetensors"))
        ['0.bias', '0.weight', '1.bias', '1.weight']
    """
    check_order(folder, pipe, "save_weights")
    settle(pipe)
    team, path = communicator_of(pipe), Path(os.path.abspath(folder))
    shards, failed = list[dict[str, Tensor]](), FirstError()
    with failed:
        tensors = _own(pipe, rename)
        if team.rank < getattr(pipe, "partitions", 1):
            shards = _shards(tensors, max_shard_bytes)
        if team.rank == 0:
            make_folder(path)
    token = secrets.token_hex(4)
    gathered = all_gather_checked(
        team, [token, [list(shard) for shard in shards]], same={"folder": str(path)}, error=failed.error
    )
    token, every = gathered[0][0], [names for _, lists in gathered for names in lists]
    files = {f"model-{at:05}-of-{len(every):05}.safetensors": names for at, names in enumerate(every, 1)}
    if len(every) <= 1:
        files = {SINGLE: every[0] if every else []}
    first = sum(len(lists) for _, lists in gathered[: team.rank])
    temporary = {name: path / f"{name}.tmp-{token}" for name in files}
    own = dict(zip(list(files)[first:], shards, strict=False))
    try:
        with failed:
            for name, shard in own.items():
                write_file(temporary[name], encoded(shard))
        sizes = all_gather_checked(
            team, sum(tensor.nbytes for shard in shards for tensor in shard.values()), error=failed.error
        )
        with failed:
            if team.rank == 0:
                _put_in_place(path, files, temporary, sum(sizes))
        all_gather_checked(team, error=failed.error)
    finally:
        for name in own:
            temporary[name].unlink(missing_ok=True)


def _own(module: nn.Module, rename: Rename | None) -> dict[str, Tensor]:
    """The tensors of a module's state_dict, shared ones once, under their names in the files."""
    firsts, tensors, mistakes = first_names(module), dict[str, Tensor](), []
    elsewhere: Collection[str] = getattr(module, "held_before", ())  # and saved there
    for name, value in module.state_dict().items():
        if firsts[name] != name or name in elsewhere:
            continue
        there = rename(name) if rename else name
        if there in tensors:
            mistakes.append(f"- {name} would get the name {there}, as another does; let rename= tell them apart")
        elif not isinstance(value, Tensor):
            mistakes.append(f"- {name} is no tensor, and this layout has only those")
        elif wrong := why_not_storable(value):
            mistakes.append(f"- {name} {wrong}")
        else:
            tensors[there] = full_tensor(value)
    if mistakes:
        raise ValueError("nothing was saved:\n" + "\n".join(mistakes))
    return tensors


def _shards(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = []
    size = most + 1
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > most:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    return shards


def _put_in_place(folder: Path, files: Mapping[str, Sequence[str]], temporary: Mapping[str, Path], size: int) -> None:
    """Gives the files their names, then removes those of another saving; at each step all that is read is of one."""
    older = {entry.name for entry in folder.iterdir() if OURS.fullmatch(entry.name)}
    if SINGLE not in files and older & files.keys():
        (folder / INDEX).unlink(missing_ok=True)  # it would lead to old and new shards
    for name in files:
        os.replace(temporary[name], folder / name)
    sync_folder(folder)
    if SINGLE not in files:
        where = {tensor: file for file, names in files.items() for tensor in names}
        index = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2)
        put_file(folder / INDEX, folder / f"{INDEX}.tmp", index.encode())
        sync_folder(folder)
    for name in sorted(older - files.keys() - ({INDEX} if SINGLE not in files else set())):
        os.unlink(folder / name)
    sync_folder(folder)
