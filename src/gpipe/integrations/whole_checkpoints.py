"""What Trainer saves of a pipe, and loads: files of the whole model, though each process has but a partition.

They are Trainer's own, in the order that a model in one process has, so Trainer goes on from them, and any K.
"""

import json
import shutil
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

_Trainer: Any = object  # whose methods `super()` finds is known where a class is made of both


class WholeCheckpoints(_Trainer):  # type: ignore[misc]  # see there
    """A Trainer's methods that save and load."""

    pipe: gpipe.GPipe | None = None
    model: Any
    optimizer: Any

    @property
    def _apart(self) -> bool:
        return bool(self.args.world_size > 1)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with _config_kept(self.model):
            if self._apart and self.pipe is not None:
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

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Trainer's, with the state of all partitions, in the order in which a model in one process has them."""
        if not self._apart:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        groups, own, places = self._groups()
        state = self.optimizer.state_dict()
        mine = {name: state["state"][at] for at, name in enumerate(own) if at in state["state"]}
        folder, rank = Path(output_dir), self.args.process_index
        parts = [folder / f"optimizer-of-partition-{one}.pt" for one in range(self.accelerator.partitions)]
        if rank < len(parts):
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(mine, parts[rank])
        self.accelerator.pipe.exchange(b"written")
        if self.args.should_save:
            whole: dict[str, Any] = {}
            for part in parts:
                whole |= torch.load(part, weights_only=True)
                part.unlink()
            state["state"] = {places[name]: one for name, one in sorted(whole.items(), key=lambda it: places[it[0]])}
            for group, names in zip(state["param_groups"], groups, strict=True):
                group["params"] = [places[name] for name in names]
        with self._optimizer_with(state_dict=lambda: state):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._apart or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        _, own, places = self._groups()

        def load(state: dict[str, Any]) -> None:
            mine = {at: state["state"][places[name]] for at, name in enumerate(own) if places[name] in state["state"]}
            parts = self.optimizer.state_dict()["param_groups"]
            whole = zip(state["param_groups"], parts, strict=True)
            optimizer.load_state_dict(
                {"state": mine, "param_groups": [{**group, "params": part["params"]} for group, part in whole]}
            )

        optimizer = self.optimizer
        with self._optimizer_with(load_state_dict=load, state_dict=optimizer.state_dict):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _groups(self) -> tuple[list[list[str]], list[str], dict[str, int]]:
        pipe: gpipe.GPipe = self.accelerator.pipe
        names = {id(parameter): name for name, parameter in pipe.named_parameters()}
        own = [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]
        order = {name: at for at, (name, _) in enumerate(self.model.named_parameters())}
        told = map(json.loads, pipe.exchange(json.dumps(own).encode()))
        groups = [sorted(set(chain.from_iterable(some)), key=order.__getitem__) for some in zip(*told, strict=True)]
        places = {name: at for at, name in enumerate(chain.from_iterable(groups))}
        return groups, list(chain.from_iterable(own)), places

    @contextmanager
    def _optimizer_with(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Has Trainer save or load the state of another optimizer than its own."""
        own, self.optimizer = self.optimizer, SimpleNamespace(**methods)
        try:
            yield
        finally:
            self.optimizer = own

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Trainer's; from a checkpoint of another number of processes, what the first of them had drawn."""
        index = self.args.process_index
        names = [f"rng_state_{index}.pth", "rng_state.pth", "rng_state_0.pth"]
        found = [file for name in names if checkpoint and (file := Path(checkpoint, name)).is_file()]
        with TemporaryDirectory() as folder:
            for name in names[:2] if found else ():
                shutil.copy(found[0], Path(folder, name))
            super()._load_rng_state(folder if found else None)


@contextmanager
def _config_kept(model: Any) -> Iterator[None]:
    """Puts settings back that `save_pretrained` writes: with other ones a model may take another path."""
    config = getattr(model, "config", None)
    held = dict(getattr(config, "__dict__", {}))
    yield
    if held:
        vars(config).update(held)
