"""Lightning's Trainer over a pipe: its strategy is a `GPipeStrategy`, and all else stays.

Lightning calls `training_step` for one batch after the other, and the optimizer after `accumulate_grad_batches`. Each
training step runs in a thread of its own up to where it calls the network, and waits there. With the last batch all
go through the pipe, as its micro-batches; as each comes out, its training step goes on, to its loss. So it runs
once, in the order of Lightning's hooks: what it draws, counts and logs is what it does without a pipe.
"""

import inspect
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, partialmethod
from itertools import chain
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import gpipe
from gpipe.schedule.schedules.by_name import Named, schedule_of

try:
    from lightning.fabric.utilities import move_data_to_device
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning_utilities.core.apply_func import apply_to_collection
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("this needs Lightning: pip install 'gpipe[lightning]'", name=error.name) from error

INSTEAD = {
    "micro_batches": "M is accumulate_grad_batches= of the Trainer",
    "sample": "the first batch is the sample",
    "mesh": "ranks are threads",
}
MANY = 1000  # entries of a vocabulary, which no training step changes
PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
PROCESSES = "{count} processes are to be started, and ranks are threads: start one, or write the loop with pipe.step"
MANUAL = "manual optimization: take no strategy, and call step of a gpipe.GPipe(...) made in the module"
BACKWARD = "the module overrides backward(), which a pipe does not call: change the loss instead"
COMPILED = "a compiled module cannot be cut; leave torch.compile out"
ITERATOR = "training_step(dataloader_iter) fetches its own batches; take the batch"
PRECISION = "precision plugin {name} changes how layers compute; 32, 64, 16 and bf16, true and mixed, can be had"
WHICH = "which module is the network? {found}: give GPipeStrategy(module=), its name in the LightningModule"
CHANGED = "accumulate_grad_batches is {now} by now and was {before}: a callback changes it, and the pipe's M is fixed"
NOT_CALLED = "training_step ended without a call of {name}, whose forward goes through the pipe, no method or part"
NO_LOSS = "training_step gave no loss for batch {at} of a step: a pipe cannot leave one out; give 0 x its loss"
TWICE = "training_step calls {name} twice for a batch; a pipe runs it once. Give both in one call, rows behind rows"
BEFORE = "weights are used before {name}, and a pipe gives its inputs no gradient: put them into {name}, or detach"
BOTH = "training_step changes {what} both before {name} and behind it, and a pipe has all calls first: take two names"
REUSED = "batch {at} is written over before {name} runs with it: the loader or a hook fills its tensors again; clone"
DRAWS = "numbers are drawn both before {name} and behind it: through a pipe all calls come first, so they are others"
AFTER = "on_after_backward runs once for each optimizer step here, and changes the sum of its batches' gradients"
MODES = "training_step calls {name} under no_grad or an autocast of its own, and the pipe runs it under Lightning's"


class GPipeStrategy(SingleDeviceStrategy):
    """A strategy of Lightning's Trainer that trains through a pipe.

    The Trainer's `accumulate_grad_batches` is M, the number of micro-batches; a batch of the loader is one of them.
    The log, the weights and the optimizer's state are those of Lightning on one device.

    Args:
        partitions: K, as of `gpipe.GPipe`.
        module: The name of the network in the LightningModule; by default that of its only child with parameters.
        **settings: Further arguments of `gpipe.GPipe`: `schedule`, `remat`, `plan`, `devices` and others.

    Attributes:
        pipe: The pipe, once the network has been called; until then None.

    Raises:
        TypeError: An argument is not for a pipe in Lightning.
        ValueError: When the Trainer begins, it or the LightningModule asks for what cannot be had.

    >>> from lightning.pytorch import Trainer
    >>> strategy = GPipeStrategy(partitions=2, schedule="1f1b")
    >>> trainer = Trainer(strategy=strategy, accumulate_grad_batches=8, accelerator="cpu", logger=False)
    """

    strategy_name = "gpipe"

    def __init__(self, partitions: Any = None, *, module: str | None = None, **settings: Any) -> None:
        other = settings.keys() - (inspect.signature(gpipe.GPipe).parameters.keys() - {"model", *INSTEAD})
        if other:
            raise TypeError(
                "; ".join(f"{name}=: {INSTEAD.get(name, 'gpipe.GPipe has none')}" for name in sorted(other))
            )
        if (driver := settings.get("driver", "threads")) != "threads" and not isinstance(driver, gpipe.Threads):
            raise TypeError("driver=: ranks are threads")
        super().__init__()
        self.parallel_devices: list[torch.device] | None = None  # Trainer sets it
        self.pipe: gpipe.GPipe | None = None
        self._settings, self._name = {"partitions": partitions, **settings}, module
        self._steps: list[_TrainingStep] = []  # those that wait for the pipe
        self._now: _TrainingStep | None = None  # the one that runs
        self._made: list[Tensor | None] = []  # gradients, until Lightning asks for the backward
        self._looked = False  # whether batches of one step were seen to have tensors of their own

    # Before the pipe is there.

    @property
    def root_device(self) -> torch.device:
        """That of the last partition, where losses are computed."""
        devices = self._devices()
        return torch.device(devices if isinstance(devices, (str, torch.device)) else devices[-1])

    def _devices(self) -> Any:
        given, plan, some = self._settings.get("devices"), self._settings.get("plan"), self.parallel_devices
        if given is not None or not some or some[0].type == "cpu":
            return given or "cpu"
        ranks = plan.partitions if plan is not None else self._settings["partitions"]
        if not isinstance(ranks, int):
            schedule = self._settings.get("schedule", "gpipe")
            ranks = len(ranks) // (schedule_of(schedule).stages_per_rank if isinstance(schedule, Named) else 1)
        return [some[rank % len(some)] for rank in range(ranks)]

    def setup(self, trainer: Any) -> None:
        """Refuses what no pipe can have, and does what Lightning does for one device."""
        self._trainer = trainer
        self._lightning = lightning = cast(Any, self.lightning_module)
        self._precision: Any = self.precision_plugin
        self._micro_batches, self.pipe = trainer.accumulate_grad_batches, None
        self._refuse(lightning)
        self._network = lightning.get_submodule(self._name)
        self._stand_in = _stand_in(self._network, self._call)
        every = [module._modules for module in lightning.modules()]
        self._places = [(some, name) for some in every for name, child in some.items() if child is self._network]
        self._beside = {*lightning.modules()} - {*self._network.modules()}
        hooks = (is_overridden("on_after_backward", one) for one in (lightning, *trainer.callbacks))
        if self._micro_batches > 1 and any(hooks):
            warnings.warn(AFTER, stacklevel=2)
        warnings.filterwarnings("ignore", ".*`training_step` returned `None`")  # as it does until its turn has come
        super().setup(trainer)

    def _refuse(self, lightning: LightningModule) -> None:
        count = max(int(os.environ.get("WORLD_SIZE", 1)), self._trainer.num_nodes)
        wrong = {
            PROCESSES.format(count=count): count > 1,
            MANUAL: not lightning.automatic_optimization,
            BACKWARD: is_overridden("backward", lightning),
            COMPILED: getattr(lightning, "_compiler_ctx", None) is not None,
            ITERATOR: "dataloader_iter" in inspect.signature(lightning.training_step).parameters,
            PRECISION.format(name=type(self._precision).__name__): type(self._precision) not in PRECISIONS,
        }
        found = [name for name, child in lightning.named_children() if any(True for _ in child.parameters())]
        if self._name is None and len(found) == 1:
            self._name = found[0]
        elif not self._name or self._name not in dict(lightning.named_modules()):
            wrong[WHICH.format(found=f"it has no {self._name}" if self._name else f"{len(found)} have weights")] = (
                True
            )
        if any(wrong.values()):
            raise ValueError("\n".join(text for text, holds in wrong.items() if holds))

    def model_to_device(self) -> None:
        """Moves what is not in the pipe, which puts each layer where it runs."""
        with self._in_place_of_network(nn.Module()):
            super().model_to_device()

    def _pipe_for(self, inputs: Any) -> gpipe.GPipe:
        """The pipe, made by how the network is called first."""
        if self.pipe is None:
            sample = gpipe.MicroBatches([move_data_to_device(inputs, next(self._network.parameters()).device)])
            settings = {"seed": torch.initial_seed() % 2**63, **self._settings, "devices": self._devices()}
            self.pipe = gpipe.GPipe(self._network, micro_batches=self._micro_batches, sample=sample, **settings)
            if self.root_device.type != "cpu":
                for optimizer in self.optimizers:  # what was loaded goes to where the parameters are now
                    optimizer.load_state_dict(optimizer.state_dict())
        self.pipe.training = self._network.training  # not train(), as modules may have modes of their own
        return self.pipe

    # A mini-batch.

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Runs a training step up to the network's call; with the last of an optimizer step, all to their ends."""
        trainer, lightning = self._trainer, self._lightning
        if trainer.fit_loop._skip_backward:  # SWA only counts statistics of BatchNorm anew
            return self._evaluate("training_step", batch, *args)
        if trainer.accumulate_grad_batches != self._micro_batches:
            raise ValueError(CHANGED.format(now=trainer.accumulate_grad_batches, before=self._micro_batches))
        begins = trainer.fit_loop.batch_idx % self._micro_batches == 0
        if begins:
            self._end_steps()  # those of an optimizer step that Lightning broke off
        self._begin(batch, args)
        if trainer.fit_loop._should_accumulate():
            return None
        if begins:  # Lightning zeroes gradients behind this call, so those made here are kept until `backward`
            lightning.optimizer_zero_grad(trainer.current_epoch, trainer.fit_loop.batch_idx, self.optimizers[0])
        self._run([step.inputs for step in self._steps])
        if begins:
            self._made = [parameter.grad for parameter in lightning.parameters()]
            lightning.zero_grad()
        for step in self._end_steps():
            trainer._results.batch, trainer._results.batch_size = step.batch, None
            for some, named in step.logged:
                lightning.log(*some, **named)
        return step.result

    def _begin(self, batch: Any, args: Any) -> None:
        with self._precision.train_step_context():
            run = partial(self._lightning.training_step, batch, *args)
            step = _TrainingStep(run, batch, _autocast(self.root_device.type))
            self._steps.append(step)
            for at, (home, name, value, _) in self._go_on(step).items():
                step.left[at] = home, name, value if getattr(value, "requires_grad", False) else _now(value)
        if step.inputs is None:
            skips = step.result is None
            raise ValueError((NO_LOSS if skips else NOT_CALLED).format(at=len(self._steps) - 1, name=self._name))
        if len(self._steps) == 1:
            self._drawn = _drawn(self.root_device)
        if not self._looked:
            step.copies = [(tensor, tensor.clone()) for tensor in _tensors([batch, step.inputs])]

    def _run(self, inputs: list[Any]) -> None:
        for at, step in enumerate(self._steps):
            if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in step.copies):
                raise ValueError(REUSED.format(at=at, name=self._name))
        self._looked = self._looked or len(inputs) > 1
        drawn = _drawn(self.root_device)

        def loss_of(output: Any, at: int) -> Tensor:
            step = self._steps[at]
            if 0 < at == len(inputs) - 1 and self._drawn != drawn != _drawn(self.root_device):
                warnings.warn(DRAWS.format(name=self._name), stacklevel=2)
            for home, name, value in step.left.values():
                home[name] = value
            changed = self._go_on(step, output).items()
            both = [str(name) for at, (_, name, value, _) in changed if at in step.left and value is not None]
            if both and len(inputs) > 1:
                raise ValueError(BOTH.format(what=", ".join(both), name=self._name))
            whole = isinstance(step.result, Mapping)
            loss = step.result.get("loss") if whole else step.result
            if not isinstance(loss, Tensor):
                raise ValueError(NO_LOSS.format(at=at))
            step.result = {**step.result, "loss": loss.detach()} if whole else loss.detach()
            return loss.div(self._micro_batches)

        with self._precision.train_step_context():
            pipe = self._pipe_for(inputs[0])
            pipe.step_number = self._trainer.global_step  # it keys dropout: resumed, it goes on where it was
            scaler = getattr(self._precision, "scaler", None)
            numbers = gpipe.MicroBatches(range(len(inputs)))
            loss_of.runs_once = True  # type: ignore[attr-defined]  # a training step ends with its loss
            pipe.step(gpipe.MicroBatches(inputs), numbers, loss_of, reduction="sum", scaler=scaler)

    def _go_on(self, step: "_TrainingStep", output: Any = None) -> dict[Any, Any]:
        """Has a training step go on, and gives what it changes; what it logs is kept until all of it has run."""
        before = _held(self._beside)
        self._now, self._lightning.log = step, step.log
        try:
            with self._in_place_of_network(self._stand_in):
                step.go_on(output)
        finally:
            self._now = None
            del self._lightning.log
        return {at: one for at, one in _held(self._beside).items() if before.get(at, (None,))[-1] != one[-1]}

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """What the network gives, called by a step of the LightningModule: the pipe runs it."""
        inputs: Any = {**inspect.signature(self._network.forward).bind_partial(*args).arguments, **kwargs}
        if isinstance(self._network, nn.Sequential):
            (inputs,) = inputs.values()
        if (step := self._now) is None:
            (output,) = self._pipe_for(inputs)(gpipe.MicroBatches([inputs]))
            return output
        if step.inputs is not None:
            raise ValueError(TWICE.format(name=self._name))
        if not torch.is_grad_enabled() or _autocast(self.root_device.type) != step.autocast:
            raise ValueError(MODES.format(name=self._name))
        if any(tensor.requires_grad for tensor in _tensors(inputs)):
            raise ValueError(BEFORE.format(name=self._name))
        return step.pause(inputs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Calls the hooks around a backward; the pipe's has run."""
        closure_loss = self._precision.pre_backward(closure_loss, self._lightning)
        for parameter, gradient in zip(self._lightning.parameters(), self._made, strict=False):
            parameter.grad = gradient
        self._made = []
        loss: Tensor = self._precision.post_backward(closure_loss, self._lightning)
        return loss

    # Around it.

    def _evaluate(self, kind: str, *args: Any) -> Any:
        """Lightning's, with the pipe for the network: one batch at a time, as one micro-batch."""
        with self._in_place_of_network(self._stand_in):
            return getattr(super(), kind)(*args)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    @contextmanager
    def _in_place_of_network(self, other: nn.Module) -> Iterator[None]:
        for modules, name in self._places:
            modules[name] = other
        try:
            yield
        finally:
            for modules, name in self._places:
                modules[name] = self._network

    def _end_steps(self) -> list["_TrainingStep"]:
        steps, self._steps = self._steps, []
        for step in steps:
            step.end()
        return steps

    def teardown(self) -> None:
        self._end_steps()
        if self.pipe is not None:
            self.pipe.close()
        super().teardown()


class _Ended(BaseException):
    """Unwinds a training step whose output never comes."""


class _TrainingStep(Thread):
    """A training step in a thread of its own, which waits where the network is called."""

    def __init__(self, run: Callable[[], Any], batch: Any, autocast: tuple[Any, ...]) -> None:
        super().__init__(daemon=True, name="gpipe training step")
        self.batch, self.autocast, self._run, self._threads = batch, autocast, run, torch.get_num_threads()
        self.inputs: Any = None  # what the network is called with
        self.result: Any = None
        self.logged: list[tuple[Any, Any]] = []
        self.left: dict[Any, Any] = {}  # what it changed on modules, up to the call
        self.copies: list[tuple[Tensor, Tensor]] = []  # of the tensors of its batch
        self._error: BaseException | None = None
        self._to: SimpleQueue[Any] = SimpleQueue()
        self._from: SimpleQueue[None] = SimpleQueue()

    def go_on(self, output: Any = None) -> None:
        """Runs it until it waits or ends, on the caller's stream; raises what it raises."""
        if self.ident is None:
            self.start()
        self._to.put((output, torch.accelerator.current_stream() if torch.accelerator.is_available() else None))
        self._from.get()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        if self.is_alive():
            self._to.put((_Ended(), None))
            self.join()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """In place of the LightningModule's, whose turn comes; values are those of now."""
        self.logged.append(([*map(_now, args)], {name: _now(value) for name, value in kwargs.items()}))

    def pause(self, inputs: Any) -> Any:
        self.inputs = inputs
        self._from.put(None)
        return self._next()

    def _next(self) -> Any:
        output, stream = self._to.get()
        if stream is not None:
            torch.accelerator.set_stream(stream)
        if isinstance(output, _Ended):
            raise output
        return output

    def run(self) -> None:
        try:
            self._next()
            torch.set_num_threads(self._threads)
            kind, enabled, dtype, caches = self.autocast
            with torch.autocast(kind, dtype, enabled, caches):
                self.result = self._run()
        except BaseException as error:
            self._error = error
        self._from.put(None)


def _autocast(kind: str) -> tuple[str, bool, torch.dtype, bool]:
    """The autocast of this thread, as `torch.autocast` takes it."""
    enabled = torch.is_autocast_enabled(kind)
    return kind, enabled, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _now(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else [*value] if type(value) is list else value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return [tensor for tensor in found if tensor.layout is torch.strided]


def _drawn(device: torch.device) -> str:
    """How far the generators have come that are drawn from by default."""
    kinds = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    states = [kind.get_rng_state().numpy().tobytes() for kind in kinds]
    _, words, *place = np.random.get_state(legacy=True)
    return repr((states, random.getstate(), words.tobytes(), place))  # type: ignore[union-attr]  # of the legacy form


def _held(modules: Iterable[nn.Module]) -> dict[Any, Any]:
    """What is in attributes, buffers and dicts: where, under which name, the value, and what tells of a change."""
    found = chain.from_iterable((vars(module), *vars(module).values()) for module in modules)
    homes = [home for home in found if type(home) is dict and len(home) < MANY]
    return {(id(home), name): (home, name, value, _mark(value)) for home in homes for name, value in home.items()}


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_inference():
        return id(value), value._version
    return [id(value), *map(id, value[-MANY:] if type(value) is list else ())]


def _stand_in(network: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """The network to whoever asks it anything; when it is called, what `call` gives."""
    kind = type(network)
    other: nn.Module = object.__new__(type(kind.__name__, (kind,), {"__call__": lambda self, *a, **k: call(*a, **k)}))
    other.__dict__ = network.__dict__
    return other
