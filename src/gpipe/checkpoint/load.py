"""Loads a checkpoint: looks for damage, reads all, and changes the model once every rank says that all is good.

What goes into a model and an optimizer is read, and what does not fit is found, before anything of them changes.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe._torch.trees import map_tensors
from gpipe.checkpoint.files import Shelf, why_not_storable
from gpipe.checkpoint.folder import LATEST, Found, age, checkpoints, find, find_damage, read_manifest
from gpipe.checkpoint.manifest import MANIFEST, SOME, CheckpointError, Json, Manifest, decode
from gpipe.checkpoint.save import (
    EXTRA,
    check_order,
    first_names,
    names_of_parameters,
    settle,
    state_to_save,
    stays,
    why_not_by_name,
)
from gpipe.distributed.communicator import Communicator, FirstError, all_gather_checked, communicator_of
from gpipe.planner.search.plan import Plan
from gpipe.stages.dtensor import distribute_like


@dataclass
class Ready:
    """What was read, and fits as far as there are no findings."""

    values: dict[str, object] = field(default_factory=dict)  # the state_dict of the module
    extra: Any = None  # what the user added
    options: list[dict[str, object]] = field(default_factory=list)  # of each parameter group
    state: dict[Tensor, dict[str, object]] = field(default_factory=dict)  # of the optimizer
    names: set[str] = field(default_factory=set)  # under which the module's were looked for, and its own
    trained: set[str] = field(default_factory=set)  # likewise of the optimizer's parameters
    findings: list[str] = field(default_factory=list)  # what does not fit, each with what to do

    def lacks(self, names: Sequence[str]) -> None:
        if names:
            self.findings.append(f"the model has {listed(names)}, which the checkpoint lacks; load into its model")


def listed(names: Sequence[str]) -> str:
    """Names for a message; of many, the first."""
    return ", ".join(names[:SOME]) + (f" and {len(names) - SOME} more" if len(names) > SOME else "")


def read_weights(module: nn.Module, shelf: Shelf, stored_as: Callable[[str], list[str]], ready: Ready) -> None:
    """Reads all tensors of a module's state_dict; `stored_as` gives what a name may be in files, its own first."""
    firsts, missing = first_names(module), []
    ready.names |= {stored_as(name)[0] for name in {*firsts, *firsts.values()}}
    first: dict[int, str] = {}  # what was found for a tensor under the first of its names
    kept = state_to_save(module)
    for name, target in module.state_dict(keep_vars=True).items():
        if not isinstance(kept.get(name), Tensor):
            continue
        known = [*stored_as(name), *stored_as(firsts[name])]
        stored = next((one for one in known if one in shelf.home), None)
        if stored is None:
            missing.append(name)
            continue
        before = first.setdefault(id(target), stored)
        if wrong := why_not_storable(target) or _why_other(shelf.look(stored), target):
            ready.findings.append(f"{name} {wrong}")
        elif before != stored and not _same_bits(shelf.read(stored), shelf.read(before)):
            ready.findings.append(f"{name} and {before} are one tensor here, and differ there; do not share them")
        else:
            ready.values[name] = _like(shelf.read(stored), target)
    ready.lacks(missing)


def _why_other(value: Tensor, target: Tensor) -> str | None:
    if value.shape == target.shape and value.dtype == target.dtype:
        return None
    there, here = (f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in (value, target))
    remedy = "convert the model with .to(dtype)" if value.shape == target.shape else "build the model that was saved"
    return f"is {there} in the checkpoint and {here} in the model; {remedy}"


def _like(value: Tensor, target: Tensor) -> Tensor:
    """A tensor of the shape of another where the other is: on its device, as it lies in memory, this rank's shard."""
    if hasattr(target, "device_mesh"):
        return distribute_like(value.to(target.device), target)
    if value.stride() == target.stride():
        return value.to(target.device)
    return torch.empty_like(target, dtype=value.dtype, requires_grad=False).copy_(value)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def read_state(module: nn.Module, manifest: Manifest, weights: Shelf, others: Shelf, ready: Ready) -> None:
    """Reads the state_dict of a module from a checkpoint."""
    read_weights(module, weights, lambda name: [name, manifest.ties.get(name, name)], ready)
    own = {name: value for name, value in state_to_save(module).items() if not isinstance(value, Tensor)}
    ready.lacks([name for name in own if name not in manifest.values])
    found = {name: decoded(manifest.values[name], others, name, ready) for name in own if name in manifest.values}
    if apart := [name for name in own if name in found and stays(own[name]) and found.pop(name) != own[name]]:
        ready.findings.append(f"{listed(apart)} are other quantized weights than were saved; quantize the same base")
    ready.values |= found


def decoded(value: Json, shelf: Shelf, where: str, ready: Ready) -> Any:
    """A value of the manifest; what cannot be read is a finding."""
    lost: list[str] = []

    def read(name: str) -> Tensor:
        if name in shelf.home:
            return shelf.read(name)
        lost.append(name)
        return torch.empty(0)

    try:
        found = decode(value, read)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # RecursionError too
        ready.findings.append(f"{where} cannot be read: {error}")
        return None
    if lost:
        ready.findings.append(f"{where} needs {listed(lost)}, which no file holds")
    return found


def read_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest, shelf: Shelf, ready: Ready
) -> None:
    """Reads what an optimizer remembers from a checkpoint."""
    ready.findings += why_not_by_name(optimizer)
    saved, kind = manifest.optimizer, type(optimizer).__name__
    if saved is None:
        ready.findings.append("the checkpoint has no state of an optimizer; load without one")
        return
    if saved["type"] != kind:
        ready.findings.append(f"the checkpoint is of the optimizer {saved['type']}, not {kind}; give one of that")
        return
    options = {name: group["options"] for group in saved["groups"] for name in group["parameters"]}
    names = {parameter: manifest.ties.get(name, name) for parameter, name in names_of_parameters(module).items()}
    for at, group in enumerate(optimizer.param_groups):
        here = {parameter: names[parameter] for parameter in group["params"] if parameter in names}
        ready.trained |= set(here.values())
        own = [name for name in here.values() if name in options]
        kept = decoded(options[own[0]], shelf, f"the options of group {at}", ready) if own else {}
        ready.options.append(kept or {})
        wrong = _why_not_of(group, here, own, options)
        ready.findings += [f"group {at} of the optimizer has {text}" for text in wrong]
        for parameter, name in here.items():
            remembered = decoded(saved["state"].get(name, {}), shelf, f"the optimizer's {name}", ready)
            if remembered:
                ready.state[parameter] = _placed(remembered, parameter, group)


def _why_not_of(
    group: Mapping[str, Any], here: Mapping[Tensor, str], own: Sequence[str], options: Mapping[str, Any]
) -> Iterator[str]:
    """What is wrong with the parameters of a group: those `here` are the model's, and `own` have options."""
    if strange := [list(parameter.shape) for parameter in group["params"] if parameter not in here]:
        yield f"parameters of shapes {strange} that are not the model's"
    if absent := [name for name in here.values() if name not in options]:
        yield f"{listed(absent)}, which the checkpoint's had not; leave it out"
    other = next((name for name in own if options[name] != options[own[0]]), None)
    if other is not None:
        one, two = options[own[0]], options[other]
        keys = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
        yield f"both {own[0]} and {other}, which differed in {listed(keys)}; give them groups of their own"


def _placed(remembered: dict[str, object], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, object]:
    """The state of a parameter where an optimizer wants it, in the parameter's memory format."""
    on_host = not (group.get("capturable") or group.get("fused"))

    def place(value: Tensor) -> Tensor:
        return _like(value, parameter) if value.shape == parameter.shape else value.to(parameter.device)

    return {
        key: value if key == "step" and on_host else map_tensors(value, place) for key, value in remembered.items()
    }


def put(ready: Ready, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Puts what was read where it belongs."""
    state = state_to_save(module)  # which also tells the versions of its modules
    for name in [name for name, value in state.items() if stays(value)]:
        del state[name]
    state.update(ready.values)
    module.load_state_dict(state, strict=False)  # nothing is missing: it has been looked through
    if optimizer is None:
        return
    for group, options in zip(optimizer.param_groups, ready.options, strict=True):
        group.update(options)
    # Not by load_state_dict, which would convert the state to the parameter's type: another number than was saved.
    optimizer.__setstate__({"state": defaultdict(dict, ready.state), "param_groups": optimizer.param_groups})


WEIGHTS, VALUES, OPTIMIZER = (rf"stage_[0-9]+{kind}\.safetensors" for kind in ("", r"\.values", r"\.optimizer"))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole: its folder, what the pipe had when it was saved, and what the user added.

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
    manifest: Manifest = field(repr=False)  # all that is known of it

    @property
    def plan(self) -> Plan:
        """The plan of the saved pipe: its cuts, schedule, M and remat, for `GPipe(model, plan=plan)`."""
        return Plan.from_json(self.manifest.plan)

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
    settle(pipe, folder)
    if pipe is None and optimizer is not None:
        raise ValueError("an optimizer can be loaded only with its pipe, whose names say whose state is whose")
    team, root = communicator_of(pipe), Path(os.path.abspath(folder))
    found = _agree_which(root, team)
    if found is None:
        if any((root / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
            raise CheckpointError(root, ["these are weights alone; use gpipe.load_weights"])
        why = f"there is no checkpoint here, neither {MANIFEST} nor {LATEST}; save one"
        raise CheckpointError(root, [f"{why}, or give the folder that one was saved to"])
    manifest = _agree_whole(found, team)
    ready = _agree_fit(found.path, manifest, pipe, optimizer, team)
    if pipe is not None:
        put(ready, pipe, optimizer)
        if hasattr(pipe, "layers_per_partition"):  # else it is plain layers, whose randomness is torch's
            pipe.step_number, pipe.seed = manifest.step_number, manifest.seed  # type: ignore[assignment]  # a GPipe's
    return Checkpoint(found.path, manifest.step_number, manifest.seed, ready.extra, manifest)


def find_checkpoint(folder: str | os.PathLike[str], pipe: nn.Module | None = None) -> Path | None:
    """Finds the checkpoint that `gpipe.load(folder)` would load; None where nothing was saved yet.

    In several processes every one calls it, with the pipe, and gets what the first one finds. A CheckpointError:
    `latest` is damaged, or names a checkpoint that is not there.

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
    known, findings, failed = None, list[str](), FirstError()
    with failed:
        try:
            if team.rank == 0 and (found := find(folder)):
                known = [os.path.relpath(found.path, folder), found.sha256]
        except CheckpointError as wrong:
            findings = wrong.findings
    same, doing = {"folder": str(folder)}, f"asked for a checkpoint in {folder}"
    known, findings = all_gather_checked(team, [known, findings], same=same, error=failed.error, doing=doing)[0]
    if findings:
        raise CheckpointError(folder, findings)
    return Found(folder / known[0], known[1]) if known else None


def _agree_whole(found: Found, team: Communicator) -> Manifest:
    """The manifest, when all ranks have looked through the files, each its share."""
    manifest, findings, failed = None, list[str](), FirstError()
    with failed:
        try:
            manifest = read_manifest(found)
            findings = find_damage(found.path, manifest, turn=team.rank, turns=team.size)
        except ValueError as wrong:
            findings = [str(wrong)]
    findings = all_of(all_gather_checked(team, findings, error=failed.error, doing=f"looked through {found.path}"))
    if manifest is None or findings:
        older = reversed(checkpoints(found.path.parent)) if age(found.path.name) else ()
        beside = [str(other) for other in older if other != found.path]
        advice = f"Restore what is damaged from a copy, or load another: {', '.join(beside)}" if beside else ""
        raise CheckpointError(found.path, findings, advice)
    return manifest


def all_of(gathered: Iterable[Sequence[str]]) -> list[str]:
    """What any rank found, once."""
    return list(dict.fromkeys(finding for findings in gathered for finding in findings))


def _agree_fit(
    path: Path,
    manifest: Manifest,
    pipe: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    team: Communicator,
) -> Ready:
    """What goes into the model, and what the user added, when all ranks have read theirs and everything fits."""
    ready, failed = Ready(), FirstError()
    with failed, torch.inference_mode(False), torch.no_grad():  # it will be trained, whatever the caller is at
        ready.extra = decoded(manifest.extra, _shelf(path, manifest, EXTRA), "extra", ready)
        if pipe is not None:
            weights, values, states = (_shelf(path, manifest, kind) for kind in (WEIGHTS, VALUES, OPTIMIZER))
            ready.findings += [*weights.findings, *values.findings, *states.findings]
            if odd := sorted(weights.home.keys() ^ set(manifest.names)):
                text = "stand in the manifest alone, or in the files alone; do not trust it"
                ready.findings.append(f"{listed(odd)} {text}")
            if not ready.findings:
                read_state(pipe, manifest, weights, values, ready)
                if optimizer is not None:
                    read_optimizer(pipe, optimizer, manifest, states, ready)
    own = [ready.findings, sorted(ready.names), sorted(ready.trained)]
    gathered = all_gather_checked(team, own, error=failed.error, doing=f"read {path}")
    findings, *every = map(all_of, zip(*gathered, strict=True))
    names, trained = map(set, every)
    if pipe is not None and not findings:
        if odd := [name for name in [*manifest.names, *manifest.values] if name not in names]:
            findings.append(f"the checkpoint holds {listed(odd)}, which the model lacks; load into its model")
        groups = manifest.optimizer["groups"] if trained and manifest.optimizer is not None else []
        before = [name for group in groups for name in group["parameters"]]
        if idle := [name for name in before if name not in trained and name in names]:
            findings.append(f"the checkpoint's optimizer trained {listed(idle)}, which this one has not; add it")
    if findings:
        raise CheckpointError(path, findings)
    return ready


def _shelf(path: Path, manifest: Manifest, pattern: str) -> Shelf:
    return Shelf(path / name for name in sorted(manifest.files) if re.fullmatch(pattern, name))
