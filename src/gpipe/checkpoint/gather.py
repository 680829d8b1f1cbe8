"""What a rank has to put into a checkpoint: tensors by file, and what it has to say for the manifest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpipe._torch.modes import intra_op_threads
from gpipe.checkpoint.files import why_not_storable
from gpipe.checkpoint.manifest import Encoder
from gpipe.stages.layout import full_tensor

if TYPE_CHECKING:
    from gpipe.pipeline import GPipe


Files = dict[str, dict[str, Tensor]]

EXTRA = "extra.safetensors"
NO_OPTIONS = ("params", "param_names")  # of a parameter group: these say whose options they are


@dataclass
class Part:
    """The part of a rank.

    Attributes:
        files: The tensors of each file, by name.
        said: What the fields of the manifest get from it.
        mistakes: What cannot be saved, each with what to do.
    """

    files: Files = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def put(self, file: str, name: str, tensor: Tensor) -> str:
        """Puts a tensor into a file, and gives the name that it got there."""
        tensors = self.files.setdefault(file, {})
        while name in tensors:
            name += "'"
        tensors[name] = full_tensor(tensor.detach())
        return name


def first_names(module: nn.Module) -> dict[str, str]:
    """For each name of the state_dict the first name of the same tensor, over all ranks."""
    known: dict[int, str] = {}
    ties: Mapping[str, str] = getattr(module, "ties_of_names", {})
    names = {}
    for name, value in module.state_dict(keep_vars=True).items():
        first = known.setdefault(id(value), name) if isinstance(value, Tensor) else name
        names[name] = ties.get(name, ties.get(first, first))
    return names


def names_of_parameters(module: nn.Module) -> dict[Tensor, str]:
    """The first name of each parameter."""
    firsts = first_names(module)
    names: dict[Tensor, str] = {}
    for name, parameter in module.named_parameters():
        names.setdefault(parameter, firsts.get(name, name))
    return names


def gather(pipe: "GPipe", optimizer: torch.optim.Optimizer | None, extra: object, rank: int) -> Part:
    """Collects what a rank has to save; those of other replicas than the first only help to put shards together."""
    part = Part()
    stage_of = _Stages(pipe.stage_of)
    part.files |= {f"stage_{stage}.safetensors": {} for stage in stage_of.values()}
    _gather_state(pipe, part, stage_of)
    if optimizer is not None:
        _gather_optimizer(pipe, optimizer, part, stage_of)
    if rank == 0:
        encode = Encoder(lambda where, tensor: part.put(EXTRA, where, tensor))
        part.said["extra"] = encode(extra, "extra")
        part.mistakes += encode.mistakes
    return part if rank < pipe.partitions else Part(mistakes=part.mistakes)


class _Stages(dict[str, int]):
    """The stage of each layer, or of each tensor, by name; what belongs to no layer goes with the first."""

    def file(self, name: str, kind: str = "") -> str:
        """The file for what belongs to a name of the state_dict."""
        stage = self.get(name, self.get(name.partition(".")[0], min(self.values())))
        return f"stage_{stage}{kind}.safetensors"


def _gather_state(pipe: "GPipe", part: Part, stage_of: _Stages) -> None:
    """Collects parameters and buffers, each once, and whatever else a state_dict holds."""
    firsts = first_names(pipe)
    encode = Encoder(lambda where, tensor: part.put(stage_of.file(where, ".values"), where, tensor))
    names, values = [], {}
    for name, value in pipe.state_dict().items():
        if firsts[name] != name or name in pipe.held_before:
            continue
        if not isinstance(value, Tensor):
            values[name] = encode(value, name)
            continue
        wrong = why_not_storable(value)
        if wrong:
            part.mistakes.append(f"{name} {wrong}")
        names.append(part.put(stage_of.file(name), name, value))
    ties = {name: first for name, first in firsts.items() if name != first}
    part.said |= {"names": names, "values": values, "ties": ties}
    part.mistakes += encode.mistakes


def _gather_optimizer(pipe: "GPipe", optimizer: torch.optim.Optimizer, part: Part, stage_of: _Stages) -> None:
    """Collects the state of each parameter, and its group's options, by the parameter's first name."""
    part.mistakes += why_not_by_name(optimizer)
    names = names_of_parameters(pipe)
    foreign = {*part.said["ties"].values(), *pipe.held_before} - set(part.said["names"])  # others save these
    encode = Encoder(lambda where, tensor: part.put(stage_of.file(where, ".optimizer"), where, tensor))
    groups, state = [], {}
    for at, group in enumerate(optimizer.param_groups):
        strange = [tuple(parameter.shape) for parameter in group["params"] if parameter not in names]
        if strange:
            part.mistakes.append(
                f"group {at} of the optimizer has parameters of shapes {strange} that are not the pipe's; give them "
                f"an optimizer of their own, and put its state into extra="
            )
        own = {names[p]: p for p in group["params"] if p in names and names[p] not in foreign}
        options = {key: encode(value, f"group {at}/{key}") for key, value in group.items() if key not in NO_OPTIONS}
        groups.append({"parameters": list(own), "options": options})
        for name, parameter in own.items():
            if parameter in optimizer.state:
                remembered = optimizer.state[parameter]
                state[name] = {key: encode(value, f"{name}/{key}") for key, value in remembered.items()}
    part.said["optimizer"] = {"type": type(optimizer).__name__, "groups": groups, "state": state}
    part.mistakes += encode.mistakes


def why_not_by_name(optimizer: torch.optim.Optimizer) -> list[str]:
    """Why the state of an optimizer cannot be split by parameter, if so."""
    kind = type(optimizer).__name__
    if hasattr(optimizer, "consolidate_state_dict"):
        return [f"{kind} spreads its state over the replicas, and no rank has all of it; save with another optimizer"]
    mistakes = []
    more = sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
    if more:
        mistakes.append(f"{kind} has {', '.join(more)} beside its state by parameter; put that into extra=")
    keys = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if keys:
        mistakes.append(f"{kind} has state of no parameter, {keys}, which no stage can hold; move it into a group")
    return mistakes


def copied(files: Files) -> Files:
    """The tensors as they are now, in memory of their own.

    One thread copies as fast as the memory goes; several wait for each other whenever a core is busy otherwise.
    """
    with intra_op_threads(1):
        return {file: {name: _copy(tensor) for name, tensor in tensors.items()} for file, tensors in files.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
