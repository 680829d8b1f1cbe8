"""Reads the values of a checkpoint, checks that they fit a model and its optimizer, and puts them there."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn, optim

from gpipe._torch.trees import map_tensors
from gpipe.checkpoint.files import TensorFiles, why_not_storable
from gpipe.checkpoint.gather import (
    NO_OPTIONS,
    first_names,
    is_kept_weight,
    names_of_parameters,
    state_to_save,
    why_not_by_name,
)
from gpipe.checkpoint.manifest import MAX_LISTED, Json, Manifest, decode
from gpipe.stages.dtensor import distribute_like


@dataclass
class LoadedState:
    """The values that were read, and messages about values that do not fit."""

    values: dict[str, object] = field(default_factory=dict)  # the state_dict of the module
    extra: Any = None  # the user's additional value
    options: list[dict[str, object]] = field(default_factory=list)  # the options of each parameter group
    state: dict[Tensor, dict[str, object]] = field(default_factory=dict)  # the optimizer state of each parameter
    names: set[str] = field(default_factory=set)  # saved names of the values of the module
    trained: set[str] = field(default_factory=set)  # saved names of the parameters of the optimizer
    findings: list[str] = field(default_factory=list)

    def report_missing(self, names: Sequence[str]) -> None:
        """Adds a message that the checkpoint lacks these names. Adds no message if `names` is empty."""
        if names:
            self.findings.append(f"The checkpoint lacks {list_names(names)}. Build the model that was saved.")


def list_names(names: Sequence[str]) -> str:
    """Returns text for a message: the first few names, and the number of remaining names."""
    return ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")


def read_weights(
    module: nn.Module, files: TensorFiles, stored_as: Callable[[str], list[str]], ready: LoadedState
) -> None:
    """Reads all tensors of a module's state_dict.

    Args:
        module: The module.
        files: The safetensors files.
        stored_as: A function that returns the possible names of a tensor in the files, with the preferred name first.
        ready: The object to which this function adds tensors and messages.
    """
    firsts, missing = first_names(module), []
    ready.names |= {stored_as(name)[0] for name in {*firsts, *firsts.values()}}
    first: dict[int, str] = {}  # the stored name of each tensor that was read under its first name
    kept = state_to_save(module)
    for name, target in module.state_dict(keep_vars=True).items():
        if not isinstance(kept.get(name), Tensor):
            continue
        candidates = [*stored_as(name), *stored_as(firsts[name])]
        stored = next((candidate for candidate in candidates if candidate in files.file_of), None)
        if stored is None:
            missing.append(name)
            continue
        before = first.setdefault(id(target), stored)
        if wrong := why_not_storable(target) or _why_different(files.map(stored), target):
            ready.findings.append(f"{name} {wrong}.")
        elif before != stored and not _same_bits(files.read(stored), files.read(before)):
            ready.findings.append(
                f"{name} and {before} are tied in the model, but differ in the files. Untie these parameters."
            )
        else:
            ready.values[name] = _like(files.read(stored), target)
    ready.report_missing(missing)


def _why_different(value: Tensor, target: Tensor) -> str | None:
    """Returns the reason why a stored tensor does not fit the target, or None if it fits."""
    if value.shape == target.shape and value.dtype == target.dtype:
        return None
    there, here = (f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in (value, target))
    fix = "Convert the model with .to(dtype)" if value.shape == target.shape else "Build the model that was saved"
    return f"is {there} in the checkpoint, but {here} in the model. {fix}"


def _like(value: Tensor, target: Tensor) -> Tensor:
    """Returns a copy of a value with the device, the memory format and the sharding of the target."""
    if hasattr(target, "device_mesh"):
        return distribute_like(value.to(target.device), target)
    if value.stride() == target.stride():
        return value.to(target.device)
    return torch.empty_like(target, dtype=value.dtype, requires_grad=False).copy_(value)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def read_state(
    module: nn.Module, manifest: Manifest, weights: TensorFiles, others: TensorFiles, ready: LoadedState
) -> None:
    """Reads the state_dict of a module from a checkpoint."""
    read_weights(module, weights, lambda name: [name, manifest.first_name(name)], ready)
    own = {name: value for name, value in state_to_save(module).items() if not isinstance(value, Tensor)}
    ready.report_missing([name for name in own if name not in manifest.values])
    values = {name: decoded(manifest.values[name], others, name, ready) for name in own if name in manifest.values}
    kept = [name for name in values if is_kept_weight(own[name])]
    if different := [name for name in kept if values.pop(name) != own[name]]:
        ready.findings.append(f"{list_names(different)}: the quantized weights differ. Quantize the same base model.")
    if values and not ready.findings:
        _try_values(module, values, ready)
    ready.values |= values


def _try_values(module: nn.Module, values: Mapping[str, object], ready: LoadedState) -> None:
    """Checks that values other than tensors can be loaded, and restores the old values. Adds a message if not."""
    before = _loadable_state(module)
    before.update(deepcopy({name: before[name] for name in values}))
    after = copy(before)  # It also contains the versions of the modules.
    after.update(deepcopy(values))
    try:
        module.load_state_dict(after, strict=False)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        ready.findings.append(f"{list_names([*values])} cannot be loaded ({why}). Build the model that was saved.")
    finally:
        module.load_state_dict(before, strict=False)


def _loadable_state(module: nn.Module) -> dict[str, Any]:
    state = state_to_save(module)
    for name in [name for name, value in state.items() if is_kept_weight(value)]:
        del state[name]
    return state


def decoded(value: Json, files: TensorFiles, where: str, ready: LoadedState) -> Any:
    """Decodes a value from the manifest. Adds a message and returns None if decoding fails."""
    lost: list[str] = []

    def read(name: str) -> Tensor:
        if name in files.file_of:
            return files.read(name)
        lost.append(name)
        return torch.empty(0)

    try:
        result = decode(value, read)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # RecursionError too
        ready.findings.append(f"{where} cannot be read: {error}.")
        return None
    if lost:
        ready.findings.append(f"{where} needs {list_names(lost)}, which no file contains.")
    return result


def decoded_dict(value: Json, files: TensorFiles, where: str, ready: LoadedState) -> dict[str, Any]:
    """Decodes a dictionary from the manifest. Adds a message if the result is not a dictionary with string keys."""
    result = decoded(value, files, where, ready)
    if isinstance(result, dict) and all(isinstance(key, str) for key in result):
        return result
    ready.findings.append(f"{where}: the manifest has {shorten(repr(result), 80)} instead of options by name.")
    return {}


def read_optimizer(
    module: nn.Module, optimizer: optim.Optimizer, manifest: Manifest, files: TensorFiles, ready: LoadedState
) -> None:
    """Reads the state and the options of an optimizer from a checkpoint."""
    ready.findings += why_not_by_name(optimizer)
    saved, kind = manifest.optimizer, type(optimizer).__name__
    if saved is None:
        ready.findings.append("The checkpoint has no optimizer state. Load it without an optimizer.")
        return
    if saved["type"] != kind:
        ready.findings.append(f"optimizer is a {kind}, but a {saved['type']} was saved. Pass the same type.")
        return
    options = {name: group["options"] for group in saved["groups"] for name in group["parameters"]}
    names = {parameter: manifest.first_name(name) for parameter, name in names_of_parameters(module).items()}
    for index, group in enumerate(optimizer.param_groups):
        here = {parameter: names[parameter] for parameter in group["params"] if parameter in names}
        ready.trained |= set(here.values())
        own = [name for name in here.values() if name in options]
        label = f"group {index} of the optimizer"
        kept = decoded_dict(options[own[0]], files, f"the options of {label}", ready) if own else {}
        ready.options.append(kept)
        ready.findings += _check_group(label, group, here, own, options)
        ready.findings += _check_options(label, group, kept)
        for parameter, name in here.items():
            where = f"the optimizer state of {name}"
            if remembered := decoded_dict(saved["state"].get(name, {}), files, where, ready):
                ready.state[parameter] = _placed(remembered, parameter, group)
                ready.findings += _check_state(where, optimizer, parameter, remembered)
    if not ready.findings:
        _try_state(optimizer, ready)


def _check_options(label: str, group: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """Yields messages about saved options whose type does not fit the options of the group."""
    for key, value in kept.items():
        if key in NO_OPTIONS or (key in group and not _is_same_kind(group[key], value)):
            yield f"{label}: {key} cannot be {shorten(repr(value), 80)}. Load a checkpoint of this optimizer."


def _is_same_kind(own: object, value: object) -> bool:
    """Returns whether a value can replace an option. None can replace any value, and a number any number."""
    if own is None or value is None:
        return True
    if isinstance(own, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(own):
            return False
        return all(map(_is_same_kind, own, value))
    return (_is_number(own) and _is_number(value)) or type(own) is type(value)


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (bool, int, float))


def _check_state(where: str, optimizer: object, parameter: Tensor, remembered: Mapping[str, Any]) -> Iterator[str]:
    """Yields messages about impossible state of the optimizers in `ELEMENTWISE`. Skips other optimizers."""
    if type(optimizer) not in ELEMENTWISE:
        return
    for key, value in remembered.items():
        is_like_parameter = isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
        if not (value is None or _is_number(value) or is_like_parameter):
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            yield f"{where}: {key} cannot be {shorten(shown, 80)}. Load a checkpoint of this optimizer."


def _try_state(optimizer: optim.Optimizer, ready: LoadedState) -> None:
    """Loads state and options into a copy of the optimizer. Adds a message if loading fails."""
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        return  # It is around another optimizer.
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    groups = [{**group, **options} for group, options in zip(optimizer.param_groups, ready.options, strict=True)]
    state = {parameter: dict(remembered) for parameter, remembered in ready.state.items()}
    try:
        trial.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        ready.findings.append(f"The state of the optimizer cannot be loaded ({why}). Load a checkpoint of this type.")


def _check_group(
    label: str, group: Mapping[str, Any], here: Mapping[Tensor, str], own: Sequence[str], options: Mapping[str, Any]
) -> Iterator[str]:
    """Yields messages about the parameters of an optimizer group that differ from the saved optimizer.

    Args:
        label: The name of the group in messages.
        group: The parameter group.
        here: The name of each parameter of the group that belongs to the model.
        own: The names in `here` that have saved options.
        options: The saved options by parameter name.

    Yields:
        The messages.
    """
    if unknown := [list(parameter.shape) for parameter in group["params"] if parameter not in here]:
        yield f"{label} has parameters of shapes {unknown} that are not in the model. Remove them."
    if absent := [name for name in here.values() if name not in options]:
        yield f"{label} has {list_names(absent)}, which the saved optimizer did not have. Remove them."
    other = next((name for name in own if options[name] != options[own[0]]), None)
    if other is not None:
        first, second = options[own[0]], options[other]
        keys = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
        yield f"{label} has {own[0]} and {other}, whose saved {list_names(keys)} differ. Use separate groups."


def _placed(remembered: dict[str, object], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, object]:
    """Returns the state of a parameter on the device and in the memory format that the optimizer expects."""
    on_host = not (group.get("capturable") or group.get("fused"))

    def place(value: Tensor) -> Tensor:
        return _like(value, parameter) if value.shape == parameter.shape else value.to(parameter.device)

    return {
        key: value if key == "step" and on_host else map_tensors(value, place) for key, value in remembered.items()
    }


def put(ready: LoadedState, module: nn.Module, optimizer: optim.Optimizer | None) -> None:
    """Copies the values in `ready` into the module and the optimizer."""
    state = _loadable_state(module)  # The result also contains the versions of the modules.
    state.update(ready.values)
    module.load_state_dict(state, strict=False)  # Nothing is missing: all names have been checked.
    if optimizer is None:
        return
    for group, options in zip(optimizer.param_groups, ready.options, strict=True):
        group.update(options)
    # load_state_dict would convert the state to the dtype of the parameter, which changes its values.
    optimizer.__setstate__({"state": defaultdict(dict, ready.state), "param_groups": optimizer.param_groups})


ELEMENTWISE = frozenset({
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip
"""The optimizers whose state contains only numbers and tensors with the shape of the parameter."""
