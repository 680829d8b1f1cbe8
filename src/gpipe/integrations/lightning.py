"""Runs Lightning's Trainer on a pipe: pass a `GPipeStrategy` as its strategy.

Lightning calls `training_step` for one batch after another, and the optimizer after `accumulate_grad_batches`. Each
training step runs in its own thread, and waits when it calls the network. After the last batch, all batches go
through the pipe as micro-batches. When an output arrives, the training step of this batch continues and computes the
loss. Each training step therefore runs once, in the order of Lightning's hooks, with the same random numbers, state
and logs as without a pipe.
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
    raise ModuleNotFoundError(
        "Lightning is missing. Run pip install '.[lightning]' in a clone of the gpipe repository.", name=error.name
    ) from error

NOT_SETTINGS = {
    "micro_batches": "micro_batches= is not an argument. Set accumulate_grad_batches= of the Trainer.",
    "sample": "sample= is not an argument. Remove it; the first batch is the sample.",
    "mesh": "mesh= is not an argument. Remove it; ranks are threads.",
}
UNKNOWN_SETTING = "{name}= is not an argument of gpipe.GPipe. Remove it."
MANY = 1000  # larger dicts are data, such as a vocabulary, which no training step changes
PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
PROCESSES = "{count} processes start, but ranks are threads. Start one process, or write a loop with pipe.step."
MANUAL = "Manual optimization is not supported. Call step of a gpipe.GPipe(...) in the module, without a strategy."
BACKWARD = "The module overrides backward(), which a pipe does not call. Change the loss instead."
COMPILED = "The LightningModule is compiled, so gpipe cannot split it. Remove torch.compile. [compiled-model]"
ITERATOR = "training_step(dataloader_iter) fetches its own batches. Use training_step(batch)."
PRECISION = "The precision plugin {name} is not supported. Use 32-true, 64-true, or 16 or bf16 with -true or -mixed."
SEVERAL_NETWORKS = "{count} children have parameters. Name the network to split: GPipeStrategy(module=...)."
NO_SUCH_NETWORK = "module={name!r}: the LightningModule has no such module. Pass the name of its network."
CHANGED = "accumulate_grad_batches changed from {before} to {now}. Keep it constant, because a pipe's M is fixed."
NO_LOSS = (
    "training_step returned no loss for batch {index} of a step, but a pipe cannot skip a micro-batch. Return 0 "
    "times its loss instead. [training-step-without-loss]"
)
TWICE = (
    "training_step calls {name} twice for one batch, but a pipe runs it once. Concatenate the rows of both inputs, "
    "and call it once. [model-called-twice]"
)
BEFORE = (
    "training_step computes the inputs of {name} with trained weights, but the pipe does not return gradients of its "
    "inputs. Move these weights into {name}, or detach the inputs. [weights-before-network]"
)
BOTH = (
    "training_step changes {names} both before and after its call of {network}. With a pipe, all calls of a step "
    "come first, so it would see different values. Use two attributes. [state-before-and-after-network]"
)
RANDOM_ON_BOTH_SIDES = (
    "training_step uses random numbers both before and after its call of {name}, so they differ from a run without a "
    "pipe. Use them on one side of the call only. [random-before-and-after-network]"
)
AFTER_BACKWARD = (
    "on_after_backward runs once per optimizer step with a pipe, and sees the summed gradients of all batches. Make "
    "sure that your hook expects this. [hook-after-backward]"
)


class GPipeStrategy(SingleDeviceStrategy):
    """A strategy of Lightning's Trainer that trains through a pipe.

    Each batch of the loader is one micro-batch. The Trainer's `accumulate_grad_batches` is M, the number of
    micro-batches. The logs, the weights and the optimizer's state are the same as with Lightning on one device.

    Args:
        partitions: K, as for `gpipe.GPipe`.
        module: The name of the network in the LightningModule. Default: the only child with parameters.
        **settings: Other arguments of `gpipe.GPipe`, such as `schedule`, `remat`, `plan` and `devices`.

    Attributes:
        pipe: The pipe. None until the network is first called.

    Raises:
        TypeError: If an argument does not apply to a pipe in Lightning.
        ValueError: If the Trainer or the LightningModule uses an unsupported feature. Raised when the Trainer starts.

    >>> from lightning.pytorch import Trainer
    >>> strategy = GPipeStrategy(partitions=2, schedule="1f1b")
    >>> trainer = Trainer(strategy=strategy, accumulate_grad_batches=8, accelerator="cpu", logger=False)
    """

    strategy_name = "gpipe"

    def __init__(self, partitions: Any = None, *, module: str | None = None, **settings: Any) -> None:
        invalid = settings.keys() - (inspect.signature(gpipe.GPipe).parameters.keys() - {"model", *NOT_SETTINGS})
        if invalid:
            raise TypeError(
                "\n".join(NOT_SETTINGS.get(name) or UNKNOWN_SETTING.format(name=name) for name in sorted(invalid))
            )
        if (driver := settings.get("driver", "threads")) != "threads" and not isinstance(driver, gpipe.Threads):
            raise TypeError(f"driver={driver!r}: the ranks of GPipeStrategy are threads. Remove driver=.")
        super().__init__()
        self.parallel_devices: list[torch.device] | None = None  # Trainer sets it
        self.pipe: gpipe.GPipe | None = None
        self._settings, self._name = {"partitions": partitions, **settings}, module
        self._steps: list[_TrainingStep] = []  # the training steps that wait for the pipe
        self._running: _TrainingStep | None = None
        self._gradients: list[Tensor | None] = []  # until Lightning calls `backward`
        self._checked_batches = False  # whether the batches of a step were seen to have different tensors

    # Setup.

    @property
    def root_device(self) -> torch.device:
        """The device of the last partition, which computes the losses."""
        devices = self._devices()
        return torch.device(devices if isinstance(devices, (str, torch.device)) else devices[-1])

    def _devices(self) -> Any:
        devices, plan, available = self._settings.get("devices"), self._settings.get("plan"), self.parallel_devices
        if devices is not None or not available or available[0].type == "cpu":
            return devices or "cpu"
        ranks = plan.partitions if plan is not None else self._settings["partitions"]
        if not isinstance(ranks, int):
            schedule = self._settings.get("schedule", "gpipe")
            ranks = len(ranks) // (schedule_of(schedule).stages_per_rank if isinstance(schedule, Named) else 1)
        return [available[rank % len(available)] for rank in range(ranks)]

    def setup(self, trainer: Any) -> None:
        """Rejects unsupported features, and then sets up a single device, as Lightning does."""
        self._trainer = trainer
        self._lightning = lightning = cast(Any, self.lightning_module)
        self._precision: Any = self.precision_plugin
        self._micro_batches, self.pipe = trainer.accumulate_grad_batches, None
        self._check_supported(lightning)
        self._network = lightning.get_submodule(self._name)
        self._stand_in = _stand_in(self._network, self._call)
        holders = [module._modules for module in lightning.modules()]
        self._places = [(held, name) for held in holders for name, child in held.items() if child is self._network]
        self._other_modules = {*lightning.modules()} - {*self._network.modules()}
        hooks = (is_overridden("on_after_backward", owner) for owner in (lightning, *trainer.callbacks))
        if self._micro_batches > 1 and any(hooks):
            warnings.warn(AFTER_BACKWARD, stacklevel=2)
        warnings.filterwarnings("ignore", ".*`training_step` returned `None`")  # as here for all but the last batch
        super().setup(trainer)

    def _check_supported(self, lightning: LightningModule) -> None:
        count = max(int(os.environ.get("WORLD_SIZE", 1)), self._trainer.num_nodes)
        mistakes = {
            PROCESSES.format(count=count): count > 1,
            MANUAL: not lightning.automatic_optimization,
            BACKWARD: is_overridden("backward", lightning),
            COMPILED: getattr(lightning, "_compiler_ctx", None) is not None,
            ITERATOR: "dataloader_iter" in inspect.signature(lightning.training_step).parameters,
            PRECISION.format(name=type(self._precision).__name__): type(self._precision) not in PRECISIONS,
        }
        children = [name for name, child in lightning.named_children() if any(True for _ in child.parameters())]
        if self._name is None and len(children) == 1:
            self._name = children[0]
        mistakes[SEVERAL_NETWORKS.format(count=len(children))] = not self._name
        is_unknown = bool(self._name) and self._name not in dict(lightning.named_modules())
        mistakes[NO_SUCH_NETWORK.format(name=self._name)] = is_unknown
        if any(mistakes.values()):
            raise ValueError("\n".join(text for text, applies in mistakes.items() if applies))

    def model_to_device(self) -> None:
        """Moves all modules except the network, because the pipe moves each layer to its device."""
        with self._replaced_network(nn.Module()):
            super().model_to_device()

    def _pipe_for(self, inputs: Any) -> gpipe.GPipe:
        """Returns the pipe. The first call creates it, with these inputs as the sample."""
        if self.pipe is None:
            sample = gpipe.MicroBatches([move_data_to_device(inputs, next(self._network.parameters()).device)])
            settings = {"seed": torch.initial_seed() % 2**63, **self._settings, "devices": self._devices()}
            self.pipe = gpipe.GPipe(self._network, micro_batches=self._micro_batches, sample=sample, **settings)
            if self.root_device.type != "cpu":
                for optimizer in self.optimizers:  # moves loaded state to the devices of the parameters
                    optimizer.load_state_dict(optimizer.state_dict())
        self.pipe.training = self._network.training  # not train(), because modules may have different modes
        return self.pipe

    # A training step.

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Runs a training step until it calls the network. The call for the last batch completes all steps."""
        trainer, lightning = self._trainer, self._lightning
        if trainer.fit_loop._skip_backward:  # SWA recomputes the statistics of BatchNorm
            return self._evaluate("training_step", batch, *args)
        if trainer.accumulate_grad_batches != self._micro_batches:
            raise ValueError(CHANGED.format(now=trainer.accumulate_grad_batches, before=self._micro_batches))
        begins = trainer.fit_loop.batch_idx % self._micro_batches == 0
        if begins:
            self._end_steps()  # from an optimizer step that Lightning aborted
        self._begin(batch, args)
        if trainer.fit_loop._should_accumulate():
            return None
        if begins:  # Lightning zeroes gradients after this call, so the pipe's gradients are kept until `backward`
            lightning.optimizer_zero_grad(trainer.current_epoch, trainer.fit_loop.batch_idx, self.optimizers[0])
        self._run([step.inputs for step in self._steps])
        if begins:
            self._gradients = [parameter.grad for parameter in lightning.parameters()]
            lightning.zero_grad()
        for step in self._end_steps():
            trainer._results.batch, trainer._results.batch_size = step.batch, None
            for log_args, log_kwargs in step.logged:
                lightning.log(*log_args, **log_kwargs)
        return step.result

    def _begin(self, batch: Any, args: Any) -> None:
        with self._precision.train_step_context():
            run = partial(self._lightning.training_step, batch, *args)
            step = _TrainingStep(run, batch, _autocast(self.root_device.type))
            self._steps.append(step)
            for key, (home, name, value, _) in self._resume(step).items():
                step.changes[key] = home, name, value if getattr(value, "requires_grad", False) else _snapshot(value)
        if step.inputs is None:
            if step.result is None:
                raise ValueError(NO_LOSS.format(index=len(self._steps) - 1))
            raise ValueError(
                f"training_step returned without a call of {self._name}. Call its forward, not its methods or parts, "
                f"because only the forward runs through the pipe. [model-not-called]"
            )
        if len(self._steps) == 1:
            self._random_state = _random_state(self.root_device)
        if not self._checked_batches:
            step.copies = [(tensor, tensor.clone()) for tensor in _tensors([batch, step.inputs])]

    def _run(self, inputs: list[Any]) -> None:
        for index, step in enumerate(self._steps):
            if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in step.copies):
                raise ValueError(
                    f"The tensors of batch {index} were overwritten before {self._name} ran on them. Make the loader "
                    f"or hook that reuses them return clones. [batch-overwritten]"
                )
        self._checked_batches = self._checked_batches or len(inputs) > 1
        state = _random_state(self.root_device)

        def loss_fn(output: Any, index: int) -> Tensor:
            step = self._steps[index]
            if 0 < index == len(inputs) - 1 and self._random_state != state != _random_state(self.root_device):
                warnings.warn(RANDOM_ON_BOTH_SIDES.format(name=self._name), stacklevel=2)
            for home, name, value in step.changes.values():
                home[name] = value
            changes = self._resume(step, output).items()
            both = [str(name) for key, (_, name, value, _) in changes if key in step.changes and value is not None]
            if both and len(inputs) > 1:
                raise ValueError(BOTH.format(names=", ".join(both), network=self._name))
            is_mapping = isinstance(step.result, Mapping)
            loss = step.result.get("loss") if is_mapping else step.result
            if not isinstance(loss, Tensor):
                raise ValueError(NO_LOSS.format(index=index))
            step.result = {**step.result, "loss": loss.detach()} if is_mapping else loss.detach()
            return loss.div(self._micro_batches)

        with self._precision.train_step_context():
            pipe = self._pipe_for(inputs[0])
            pipe.step_number = self._trainer.global_step  # keys dropout, also after resuming from a checkpoint
            scaler = getattr(self._precision, "scaler", None)
            indices = gpipe.MicroBatches(range(len(inputs)))
            loss_fn.runs_once = True  # type: ignore[attr-defined]  # a training step cannot compute its loss twice
            pipe.step(gpipe.MicroBatches(inputs), indices, loss_fn, reduction="sum", scaler=scaler)

    def _resume(self, step: "_TrainingStep", output: Any = None) -> dict[Any, Any]:
        """Continues a training step. Returns the values that it changes on modules outside the network."""
        before = _module_values(self._other_modules)
        self._running, self._lightning.log = step, step.log
        try:
            with self._replaced_network(self._stand_in):
                step.resume(output)
        finally:
            self._running = None
            del self._lightning.log
        after = _module_values(self._other_modules)
        return {key: entry for key, entry in after.items() if before.get(key, (None,))[-1] != entry[-1]}

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs when a step of the LightningModule calls the network. Returns the output of the pipe."""
        inputs: Any = {**inspect.signature(self._network.forward).bind_partial(*args).arguments, **kwargs}
        if isinstance(self._network, nn.Sequential):
            (inputs,) = inputs.values()
        if (step := self._running) is None:
            (output,) = self._pipe_for(inputs)(gpipe.MicroBatches([inputs]))
            return output
        if step.inputs is not None:
            raise ValueError(TWICE.format(name=self._name))
        if not torch.is_grad_enabled() or _autocast(self.root_device.type) != step.autocast:
            raise ValueError(
                f"training_step calls {self._name} under no_grad or its own autocast, but the pipe runs it under "
                f"Lightning's. Remove these contexts, and set precision= of the Trainer. [network-under-own-mode]"
            )
        if any(tensor.requires_grad for tensor in _tensors(inputs)):
            raise ValueError(BEFORE.format(name=self._name))
        return step.pause(inputs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Calls Lightning's hooks around the backward pass. The pipe has already run the backward pass."""
        closure_loss = self._precision.pre_backward(closure_loss, self._lightning)
        for parameter, gradient in zip(self._lightning.parameters(), self._gradients, strict=False):
            parameter.grad = gradient
        self._gradients = []
        loss: Tensor = self._precision.post_backward(closure_loss, self._lightning)
        return loss

    # Evaluation and teardown.
    def _evaluate(self, kind: str, *args: Any) -> Any:
        """Runs Lightning's own step with the pipe as the network. Each batch is one micro-batch."""
        with self._replaced_network(self._stand_in):
            return getattr(super(), kind)(*args)

    validation_step = partialmethod(_evaluate, "validation_step")
    test_step = partialmethod(_evaluate, "test_step")
    predict_step = partialmethod(_evaluate, "predict_step")

    @contextmanager
    def _replaced_network(self, replacement: nn.Module) -> Iterator[None]:
        for modules, name in self._places:
            modules[name] = replacement
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
    """Raised inside a training step to unwind it without an output."""


class _TrainingStep(Thread):
    """A training step in its own thread. The thread waits when the training step calls the network.

    Attributes:
        inputs: The arguments with which the training step calls the network.
        result: The return value of the training step.
        logged: The arguments of each call of `log`.
        changes: The values that the training step changed on modules before it called the network.
        copies: The tensors of the batch, each with a copy.
    """

    def __init__(self, run: Callable[[], Any], batch: Any, autocast: tuple[Any, ...]) -> None:
        super().__init__(daemon=True, name="gpipe training step")
        self.batch, self.autocast, self._run, self._threads = batch, autocast, run, torch.get_num_threads()
        self.inputs: Any = None
        self.result: Any = None
        self.logged: list[tuple[Any, Any]] = []
        self.changes: dict[Any, Any] = {}
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._error: BaseException | None = None
        self._outputs: SimpleQueue[Any] = SimpleQueue()
        self._pauses: SimpleQueue[None] = SimpleQueue()

    def resume(self, output: Any = None) -> None:
        """Runs the step until it waits or ends, on the caller's stream. Raises the exception of the step, if any."""
        if self.ident is None:
            self.start()
        self._outputs.put((output, torch.accelerator.current_stream() if torch.accelerator.is_available() else None))
        self._pauses.get()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        if self.is_alive():
            self._outputs.put((_Ended(), None))
            self.join()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Replaces `LightningModule.log`. Keeps the values at the time of the call, which the strategy logs later."""
        self.logged.append(([*map(_snapshot, args)], {name: _snapshot(value) for name, value in kwargs.items()}))

    def pause(self, inputs: Any) -> Any:
        self.inputs = inputs
        self._pauses.put(None)
        return self._next()

    def _next(self) -> Any:
        output, stream = self._outputs.get()
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
        self._pauses.put(None)


def _autocast(kind: str) -> tuple[str, bool, torch.dtype, bool]:
    """Returns the autocast of this thread, in the form of arguments of `torch.autocast`."""
    enabled = torch.is_autocast_enabled(kind)
    return kind, enabled, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _snapshot(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else [*value] if type(value) is list else value


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


def _random_state(device: torch.device) -> str:
    """Returns the states of all default generators, to detect uses of random numbers."""
    kinds = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    states = [kind.get_rng_state().numpy().tobytes() for kind in kinds]
    _, words, *place = np.random.get_state(legacy=True)
    return repr((states, random.getstate(), words.tobytes(), place))  # type: ignore[union-attr]  # of the legacy form


def _module_values(modules: Iterable[nn.Module]) -> dict[Any, Any]:
    """Returns the values in attributes, buffers and dicts of modules.

    Each entry has the dict, the key, the value, and a mark that differs after the value changes.
    """
    values = chain.from_iterable((vars(module), *vars(module).values()) for module in modules)
    homes = [home for home in values if type(home) is dict and len(home) < MANY]
    return {(id(home), name): (home, name, value, _mark(value)) for home in homes for name, value in home.items()}


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_inference():
        return id(value), value._version
    return [id(value), *map(id, value[-MANY:] if type(value) is list else ())]


def _stand_in(network: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """Returns a module with the network's class and attributes that runs `call` when it is called."""
    kind = type(network)
    stub_class = type(kind.__name__, (kind,), {"__call__": lambda self, *args, **kwargs: call(*args, **kwargs)})
    stand_in: nn.Module = object.__new__(stub_class)
    stand_in.__dict__ = network.__dict__
    return stand_in
