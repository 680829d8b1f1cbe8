"""Saves and loads Trainer checkpoints of the whole model, although each process has only a partition.

The files and the order of their contents are the same as for a model in one process. Trainer can therefore resume
from these checkpoints with any K, or without gpipe.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

import gpipe

_Trainer: Any = object  # a subclass also inherits from a Trainer, whose methods `super()` finds


class WholeCheckpoints(_Trainer):  # type: ignore[misc]  # Any
    """Overrides the methods of a Trainer that save and load."""

    pipe: gpipe.GPipe | None = None
    model: Any
    optimizer: Any

    @property
    def _has_processes(self) -> bool:
        return bool(self.args.world_size > 1)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with _config_kept(self.model):
            if self._has_processes and self.pipe is not None:
                self._save_whole(output_dir, self.pipe)
            else:
                super()._save(output_dir, state_dict)

    def _save_whole(self, output_dir: str | None, pipe: gpipe.GPipe) -> None:
        folder = Path(output_dir or self.args.output_dir) / "weights-of-partitions"
        gpipe.save_weights(folder, pipe)
        if self.args.should_save:
            files = sorted(folder.glob("*.safetensors"))
            super()._save(output_dir, dict(chain.from_iterable(load_file(file).items() for file in files)))
            shutil.rmtree(folder)
        pipe.exchange(b"saved")

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with _remote_parameters_skipped():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with _remote_parameters_skipped():
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves the optimizer state of all partitions, in the order of a model in one process."""
        if not self._has_processes:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        groups, names, places = self._groups()
        state = self.optimizer.state_dict()
        own_state = {name: state["state"][index] for index, name in enumerate(names) if index in state["state"]}
        folder, rank = Path(output_dir), self.args.process_index
        parts = [
            folder / f"optimizer-of-partition-{partition}.pt" for partition in range(self.accelerator.partitions)
        ]
        if rank < len(parts):
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(own_state, parts[rank])
        self.accelerator.pipe.exchange(b"written")
        if self.args.should_save:
            whole: dict[str, Any] = {}
            for part in parts:
                whole |= torch.load(part, weights_only=True)
                part.unlink()
            state["state"] = dict(sorted((places[name], value) for name, value in whole.items()))
            for group, group_names in zip(state["param_groups"], groups, strict=True):
                group["params"] = [places[name] for name in group_names]
        with self._optimizer_with(state_dict=lambda: state):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._has_processes or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        _, names, places = self._groups()

        def load(state: dict[str, Any]) -> None:
            saved = state["state"]
            own_state = {index: saved[places[name]] for index, name in enumerate(names) if places[name] in saved}
            pairs = zip(state["param_groups"], self.optimizer.state_dict()["param_groups"], strict=True)
            groups = [{**whole, "params": own["params"]} for whole, own in pairs]
            optimizer.load_state_dict({"state": own_state, "param_groups": groups})

        optimizer = self.optimizer
        with self._optimizer_with(load_state_dict=load, state_dict=optimizer.state_dict):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _groups(self) -> tuple[list[list[str]], list[str], dict[str, int]]:
        """Returns parameter names by group, this process's names in order, and each name's index in the model."""
        pipe: gpipe.GPipe = self.accelerator.pipe
        names = {id(parameter): name for name, parameter in pipe.named_parameters()}
        own = [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]
        order = {name: index for index, (name, _) in enumerate(self.model.named_parameters())}
        reports = map(json.loads, pipe.exchange(json.dumps(own).encode()))
        groups = [
            sorted(set(chain.from_iterable(parts)), key=order.__getitem__) for parts in zip(*reports, strict=True)
        ]
        places = {name: index for index, name in enumerate(chain.from_iterable(groups))}
        return groups, list(chain.from_iterable(own)), places

    @contextmanager
    def _optimizer_with(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Replaces the Trainer's optimizer by an object with these methods inside the context."""
        optimizer, self.optimizer = self.optimizer, SimpleNamespace(**methods)
        try:
            yield
        finally:
            self.optimizer = optimizer

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads this process's random state. If the checkpoint has none, loads the first process's random state."""
        index = self.args.process_index
        names = [f"rng_state_{index}.pth", "rng_state.pth", "rng_state_0.pth"]
        files = [file for name in names if checkpoint and (file := Path(checkpoint, name)).is_file()]
        with TemporaryDirectory() as folder:
            for name in names[:2] if files else ():
                shutil.copy(files[0], Path(folder, name))
            super()._load_rng_state(folder if files else None)


@contextmanager
def _config_kept(model: Any) -> Iterator[None]:
    """Restores settings that `save_pretrained` changes. Otherwise gpipe would trace the model again."""
    config = getattr(model, "config", None)
    settings = dict(getattr(config, "__dict__", {}))
    yield
    if settings:
        vars(config).update(settings)


@contextmanager
def _remote_parameters_skipped() -> Iterator[None]:
    """Hides a warning that torch would print for each parameter of other processes.

    peft loads the whole checkpoint. Here, parameters of other processes are on the meta device, and loading
    skips them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r".*copying from a non-meta parameter in the checkpoint to a meta parameter"
        )
        yield
