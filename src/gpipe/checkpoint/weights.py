"""Loads and saves only parameters and buffers, in the file layout of the Hugging Face Hub.

folder/model.safetensors                        or, for large models,
folder/model-00001-of-00002.safetensors, ...    and model.safetensors.index.json, which lists the file of each tensor
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
    TensorFiles,
    encode_file,
    make_folder,
    put_file,
    read_small_file,
    sync_folder,
    why_not_storable,
    write_file,
)
from gpipe.checkpoint.gather import first_names, is_kept_weight, state_to_save
from gpipe.checkpoint.load import DOES_NOT_FIT, unique
from gpipe.checkpoint.manifest import LARGEST, CheckpointError, has_type
from gpipe.checkpoint.places import Url, to_place
from gpipe.checkpoint.read import LoadedState, list_names, put, read_weights
from gpipe.checkpoint.save import check_order, finish_pending_saves
from gpipe.distributed.communicator import FirstError, all_gather_checked, communicator_of
from gpipe.stages.dtensor import full_tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
NOT_SHARED = (
    "folder={folder} is not shared by all processes. Pass a folder on a file system that all hosts share, or use "
    "gpipe.save, which does not need one. [weights-folder-not-shared]"
)

Rename = Callable[[str], str]


def load_weights(
    folder: str | os.PathLike[str], pipe: nn.Module, *, rename: Rename | None = None, strict: bool = True
) -> None:
    """Loads parameters and buffers from safetensors files in the layout of the Hugging Face Hub.

    The pipe changes only if all tensors fit. The files contain no hashes, so gpipe cannot detect damaged values.

    The files must use the names of the model. transformers saves some models with older names, unless you call
    `save_pretrained(folder, save_original_format=False)`. Load files with older names with `from_pretrained`, and
    save the model again with `save_weights`.

    Args:
        folder: A folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.
        pipe: The pipe, or any module. With several processes, all processes must call this function. Each process
            reads its stages.
        rename: A function from the name of a tensor in the pipe to its name in the files. Default: the same name.
        strict: Whether to reject files with tensors that the pipe does not have. Default: True.

    Raises:
        CheckpointError: If tensors or files are missing, are damaged, or do not fit. The error lists all reasons.

    Example:
        >>> import gpipe, tempfile, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)], partitions=2, micro_batches=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     gpipe.save_weights(folder, pipe, rename=lambda name: f"model.layers.{name}")
        ...     gpipe.load_weights(folder, pipe, rename=lambda name: f"model.layers.{name}")
    """
    check_order(folder, pipe, "load_weights")
    finish_pending_saves(pipe)
    ranks, path = communicator_of(pipe), _local(folder)
    ready, files, failed = LoadedState(), TensorFiles([]), FirstError()
    with failed:
        files = _open(path, ready)
        if not ready.findings:
            read_weights(pipe, files, lambda name: [rename(name) if rename else name], ready)
        if kept := [name for name, value in state_to_save(pipe).items() if is_kept_weight(value)]:
            ready.findings.append(f"{list_names(kept)} are quantized. Load the base model with transformers.")
    gathered = all_gather_checked(
        ranks, [ready.findings, sorted(ready.names)], same={"folder": str(path)}, error=failed.error
    )
    findings, names = map(unique, zip(*gathered, strict=True))
    known = set(names)
    odd = [name for name in files.file_of if known and name not in known]  # Empty if files cannot be read.
    if odd and (strict or findings):
        findings.append(
            f"The files contain {list_names(odd)}, which the model lacks. Pass rename= or strict=False. If "
            f"transformers saved the model with older names, load it with from_pretrained, and call "
            f"gpipe.save_weights(folder, model)."
        )
    if findings:
        raise CheckpointError(path, findings, DOES_NOT_FIT)
    put(ready, pipe, None)


def _local(folder: str | os.PathLike[str]) -> Path:
    place = to_place(folder)
    if isinstance(place, Url):
        raise ValueError(f"folder: {place} is a URL. Pass a local folder, and copy the files yourself.")
    return place


def _open(folder: Path, ready: LoadedState) -> TensorFiles:
    where: dict[str, str] = {}
    if not (folder / SINGLE).exists():
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            where = json.loads(read_small_file(folder / INDEX, LARGEST, follow=True))["weight_map"]
        if not where or not has_type(where, dict[str, str]):
            missing = f"There is neither {SINGLE} nor {INDEX}. Pass the folder that contains one of these files."
            ready.findings.append(f"{INDEX} is damaged. Download it again." if (folder / INDEX).exists() else missing)
            return TensorFiles([])
    names = sorted(set(where.values())) or [SINGLE]
    invalid = [name for name in names if not re.fullmatch(r"[\w.-]+\.safetensors", name)]
    ready.findings += [
        f"{INDEX} names {name!r}, which is not a safetensors file in this folder. Do not trust these files."
        for name in invalid
    ]
    if ready.findings:
        return TensorFiles([])
    files = TensorFiles(folder / name for name in names)
    ready.findings += files.findings
    if lost := [name for name, file in where.items() if files.file_of.get(name) != file and not files.findings]:
        ready.findings.append(
            f"{list_names(lost)} are missing, although {INDEX} lists them. Download all shards again."
        )
    return files


def save_weights(
    folder: str | os.PathLike[str], pipe: nn.Module, *, rename: Rename | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Saves parameters and buffers as safetensors files in the layout of the Hugging Face Hub.

    Replaces weights that were saved in the folder before. If the process is killed, the folder usually contains
    either the old or the new weights. The exception is an unchanged number of shards, because the old and the new
    shards have the same names. Then gpipe removes the index while it replaces the shards, so that nobody can load a
    mixture.

    Args:
        folder: The folder for `model.safetensors`, or for shards and `model.safetensors.index.json`.
        pipe: The pipe, or any module. With several processes, all processes must call this function. The processes of
            the first replica write.
        rename: A function from the name of a tensor in the pipe to its name in the files. Default: the same name.
        max_shard_bytes: Maximum size of a file, unless a single tensor is larger. Each process writes separate files.
            Default: 5 GB.

    Raises:
        OSError: If writing failed, for example on a full disk, or if the processes do not share the folder.
        ValueError: If values cannot be saved. The error lists all of these values.

    Example:
        >>> import gpipe, safetensors.torch, tempfile, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)], partitions=2, micro_batches=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     gpipe.save_weights(folder, pipe)
        ...     sorted(safetensors.torch.load_file(f"{folder}/model.safetensors"))
        ['0.bias', '0.weight', '1.bias', '1.weight']
    """
    check_order(folder, pipe, "save_weights")
    finish_pending_saves(pipe)
    ranks, path = communicator_of(pipe), _local(folder)
    shards, failed = list[dict[str, Tensor]](), FirstError()
    with failed:
        tensors = _named_tensors(pipe, rename)
        if ranks.rank < getattr(pipe, "partitions", 1):
            shards = _shards(tensors, max_shard_bytes)
        if ranks.rank == 0:
            make_folder(path)
    token = secrets.token_hex(4)
    gathered = all_gather_checked(
        ranks, [token, [list(shard) for shard in shards]], same={"folder": str(path)}, error=failed.error
    )
    token, every = gathered[0][0], [names for _, lists in gathered for names in lists]
    files = {f"model-{at:05}-of-{len(every):05}.safetensors": names for at, names in enumerate(every, 1)}
    if len(every) <= 1:
        files = {SINGLE: every[0] if every else []}
    first = sum(len(lists) for _, lists in gathered[: ranks.rank])
    temporary = {name: path / f"{name}.tmp-{token}" for name in files}
    own = dict(zip(list(files)[first:], shards, strict=False))
    try:
        with failed:
            if own and not path.is_dir():
                raise FileNotFoundError(NOT_SHARED.format(folder=path))
            for name, shard in own.items():
                write_file(temporary[name], encode_file(shard))
        sizes = all_gather_checked(
            ranks, sum(tensor.nbytes for shard in shards for tensor in shard.values()), error=failed.error
        )
        with failed:
            if ranks.rank == 0:
                if not all(file.exists() for file in temporary.values()):
                    raise FileNotFoundError(NOT_SHARED.format(folder=path))
                _put_in_place(path, files, temporary, sum(sizes))
        all_gather_checked(ranks, error=failed.error)
    finally:
        for name in own:
            temporary[name].unlink(missing_ok=True)


def _named_tensors(module: nn.Module, rename: Rename | None) -> dict[str, Tensor]:
    """Returns the tensors in a module's state_dict by their names in the files. Shared tensors occur once."""
    firsts, tensors, mistakes = first_names(module), dict[str, Tensor](), []
    elsewhere: Collection[str] = getattr(module, "held_before", ())  # Other processes save these.
    for name, value in module.state_dict().items():
        if firsts[name] != name or name in elsewhere:
            continue
        there = rename(name) if rename else name
        if there in tensors:
            mistakes.append(f"- {name} and another name are renamed to {there}. Return different names from rename=.")
        elif not isinstance(value, Tensor):
            mistakes.append(f"- {name} is not a tensor, which this layout does not support. Use gpipe.save.")
        elif wrong := why_not_storable(value):
            mistakes.append(f"- {name} {wrong}.")
        else:
            tensors[there] = full_tensor(value)
    if mistakes:
        raise ValueError("Nothing was saved:\n" + "\n".join(mistakes))
    return tensors


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = []
    size = limit + 1
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > limit:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    return shards


def _put_in_place(folder: Path, files: Mapping[str, Sequence[str]], temporary: Mapping[str, Path], size: int) -> None:
    """Renames the new files, and removes the old files. A reader can never load a mixture of old and new weights."""
    older = {entry.name for entry in folder.iterdir() if OURS.fullmatch(entry.name)}
    if SINGLE not in files and older & files.keys():
        (folder / INDEX).unlink(missing_ok=True)  # The index would refer to both old and new shards.
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
