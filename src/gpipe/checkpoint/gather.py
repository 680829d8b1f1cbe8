"""Collects what a rank adds to a checkpoint: values by the names of the model, and the state of its optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpipe._torch.accelerator import copied_to_host
from gpipe._torch.modes import intra_op_threads
from gpipe.checkpoint.files import File, why_not_storable
from gpipe.checkpoint.manifest import Encoder, Group
from gpipe.checkpoint.parts import EXTRA
from gpipe.stages.digest import checksum
from gpipe.stages.dtensor import full_tensor
from gpipe.stages.quantized import is_quantized

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe

NO_OPTIONS = ("params", "param_names")  # keys of a parameter group that are not options


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

    def copy_to_host(self) -> None:
        """Replaces the tensors by copies on the host, which training does not change."""
        with intra_op_threads(1):  # One thread saturates the memory. Several would wait for busy cores.
            for tensors in self.files.values():
                tensors.update(zip(tensors, copied_to_host(tensors.values()), strict=True))

    def encoder(self, file: Callable[[str], str]) -> Encoder:
        """Returns an encoder that stores the tensors of a value in files.

        Args:
            file: A function that returns the file name for the path of a tensor, such as `0.weight/exp_avg`.

        Returns:
            The encoder. It adds messages about values that cannot be saved to `mistakes`.
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
