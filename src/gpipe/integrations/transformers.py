"""Runs the Trainer of transformers on a pipe: use a different class name, and pass `partitions=`.

Trainer fetches the M batches of an optimizer step in advance, and then calls `training_step` for each batch. The
first of these calls runs all M batches through the pipe as micro-batches. Each call returns the loss of its batch.
Trainer's own code therefore sums and logs losses, filters NaN, and runs callbacks, the optimizer, evaluation and
checkpoints.

Trainer also prepares the batches and computes the losses. gpipe runs Trainer's `training_step` until it calls the
model, and passes the arguments of this call through the pipe. In the last stage, gpipe runs `training_step` again,
and the call of the model returns the pipe's output. The second run ends when it calls `backward` with the loss. A
subclass may therefore change batches and losses.

With several processes, accelerate sees replicas instead of processes. All K processes of a replica read the same
rows.
"""

import copy
import inspect
import json
import logging
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32, find_device, recursively_apply
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Seq2SeqTrainer, Trainer

import gpipe
from gpipe.integrations.whole_checkpoints import WholeCheckpoints
from gpipe.integrations.within_step import WEIGHTS, Attributes, WithheldGradients, set_attributes, versions_of

logger = logging.getLogger(__name__)
NOT_SETTINGS = {
    "micro_batches": "micro_batches= is not an argument. Set gradient_accumulation_steps= of the TrainingArguments.",
    "mesh": "mesh= is not an argument. Remove it; each replica is K consecutive processes.",
}
PIPE_ARGUMENTS = inspect.signature(gpipe.GPipe).parameters.keys() - {"model", *NOT_SETTINGS}
SLICED = "schedule=Sliced(...) is not supported, because compute_loss needs whole sequences. Use pipe.step."
COUNT = "num_items_in_batch"
OWN_ATTRIBUTES = ("_window", "accelerator")  # gpipe's attributes of a Trainer, which may change

UNSUPPORTED = {
    "deepspeed": "deepspeed= is set, but the pipe already splits the model. Remove it.",
    "fsdp": "fsdp= is set, but the pipe already splits the model. For replicas, start a multiple of K processes.",
    "parallelism_config": "parallelism_config= is set, but the pipe decides how to distribute the model. Remove it.",
    "torch_compile": "torch_compile= is set, but gpipe cannot split a compiled model. Remove it. [compiled-model]",
}
LOMO = "optim={optim!r} steps inside the backward pass. Use a different optimizer, such as optim='adamw_torch'."
WRAPPED = "model= is a {kind}. Pass the model that it wraps; the trainer creates the pipe."
DISTRIBUTED = "model= is already distributed by device_map or tp_plan. Load it without them."
TRAINING_STEP_OVERRIDDEN = (
    "accelerator.backward was called outside the pipe: training_step is overridden and does not call "
    "super().training_step, which runs all batches of a step through the pipe. Override compute_loss instead. "
    "[training-step-overridden]"
)
OWN_OPTIMIZER = (
    "create_optimizer is overridden and does not call super().create_optimizer, but with several processes each "
    "optimizer must have only the parameters of its own partition. Pass optimizer_cls_and_kwargs=(class, kwargs)."
)
NO_PARTITIONS = "partitions= is missing. With several processes, pass the number of processes per replica, or plan=."
ONE_PASS_DATA = "The training data can be iterated only once, so gpipe cannot take a sample. Pass sample=<a batch>."
BACKWARDS = (
    "training_step called accelerator.backward {times} for one batch. Call it once, with the sum of the losses, or "
    "with 0 times a loss to skip the batch. [backward-not-called-once]"
)
FEW = (
    "gradient_accumulation_steps=%d is less than partitions=%d, so most partitions are idle. Increase it, and "
    "decrease per_device_train_batch_size by the same factor. [few-micro-batches]"
)
DIFFERENT_BATCHES = (
    "The processes of replica {replica} received different batches, but all K must read the same rows. Use the same "
    "random numbers in all processes, for example with dataloader_num_workers=0. [different-batches-in-replica]"
)
NO_LENGTHS = (
    "pack=True needs the length of {name!r} in each row of the training data, but a row has {has}. Remove pack=True."
)
ABOUT_LOSS_FN = ("loss_fn", "[weight-of-different-stage]")  # what an error about loss_fn contains


class _Called(Exception):  # noqa: N818  # it is not an error
    """Raised to stop a training step when it calls the model. Holds the arguments of the call."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        named = inspect.signature(model.forward).bind_partial(*args).arguments if args else {}
        self.inputs: dict[str, Any] = {**named, **kwargs}


class _Model:
    """Stands for the model: it has the class and attributes of the model, but calling it runs `call`."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], modes: nn.Module | None = None) -> None:
        self._model, self._call, self._modes = model, call, modes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property  # type: ignore[misc]  # isinstance looks here
    def __class__(self) -> type:
        model_class: type = self._model.__class__
        return model_class

    def train(self, mode: bool = True) -> "_Model":
        """Sets the mode of `modes`, if any. In a loss, `modes` is None, because other micro-batches are in flight."""
        if self._modes is not None:
            self._modes.train(mode)
        return self

    def eval(self) -> "_Model":
        return self.train(False)


class _Accelerator(Accelerator):  # type: ignore[misc]  # untyped
    """An Accelerator for a pipe: each replica of K processes counts as one process.

    Attributes:
        pipe: The pipe.
        weights: The parameters of the pipe. While ranks run, aliases may replace these parameters in the modules.
        partitions: K with several processes, otherwise 1.
        in_loss: Whether a training step is running only to compute the loss of a micro-batch.
        loss: The loss that this training step passed to `backward`.
        withheld: The withheld gradients, from the call of `backward` to the end of the training step.
        withholds: Whether to withhold gradients.
    """

    pipe: gpipe.GPipe
    weights: nn.Module
    partitions = 1
    in_loss = False
    loss: Tensor | None = None
    withheld: WithheldGradients | None = None
    withholds = False

    @property
    def num_processes(self) -> int:
        return int(self.state.num_processes // self.partitions)

    @property
    def process_index(self) -> int:
        return int(self.state.process_index // self.partitions)

    def gather(self, tensor: Any) -> Any:
        """Gathers a tensor from one process of each replica."""
        if self.in_loss and self.state.num_processes > 1:
            raise ValueError(
                "compute_loss gathers over processes, but only the last process of each replica computes it. Gather "
                "in a callback instead. [gather-in-compute-loss]"
            )
        gathered = super().gather(tensor)
        if self.partitions == 1:
            return gathered

        def of_replicas(tensor: Tensor) -> Tensor:
            whole: Tensor = tensor.unflatten(0, (self.state.num_processes, -1))
            return whole[:: self.partitions].flatten(0, 1)

        return recursively_apply(of_replicas, gathered)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Keeps the loss. The pipe runs the backward pass."""
        if not self.in_loss:
            raise ValueError(TRAINING_STEP_OVERRIDDEN)
        if self.loss is not None:
            raise ValueError(BACKWARDS.format(times="2 times"))
        self.loss = loss
        if self.withholds:
            self.withheld = WithheldGradients(self.weights)

    @contextmanager
    def step_for_pipe(self, *, withholds: bool = False) -> Iterator[None]:
        self.in_loss, self.loss, self.withholds = True, None, withholds
        try:
            yield
            if self.withheld is not None:
                self.withheld.check()
        finally:
            self.in_loss = False
            if self.withheld is not None:
                self.withheld.restore()
                self.withheld = None

    def clip_grad_norm_(self, parameters: object, max_norm: float, norm_type: float = 2) -> Tensor:
        self.unscale_gradients()
        return self.pipe.clip_grad_norm_(max_norm, norm_type)


class Pipelined(WholeCheckpoints):
    """Makes a Trainer train through a pipe: `class PipelinedTrainer(Pipelined, SomeTrainer)`.

    Args:
        *args: The arguments of the Trainer. M, the number of micro-batches, is `gradient_accumulation_steps`. Each
            micro-batch has `per_device_train_batch_size` rows.
        partitions: K, as for `gpipe.GPipe`. With torchrun, the number of processes must be divisible by K.
        plan: A plan from `gpipe.find_plan`, instead of `partitions`.
        pack: Whether to distribute the rows of each optimizer step over its micro-batches with `gpipe.pack`.
            Micro-batches then have different numbers of rows. Default: False.
        **kwargs: The keyword arguments of the Trainer, and other arguments of `gpipe.GPipe`, such as `schedule` and
            `remat`. `sample` is a batch from the collator. Default: the first rows of the training data, or the
            first batch of an evaluation.

    Attributes:
        pipe: The pipe. None until training or evaluation begins.

    Raises:
        ValueError: If an argument of the Trainer does not work with a pipe. The first step also raises it if a batch
            or loss does not work with a pipe.

    >>> from transformers import Trainer
    >>> class WithoutDecay(Trainer):
    ...     def get_decay_parameter_names(self, model):
    ...         return []
    >>> class PipelinedWithoutDecay(Pipelined, WithoutDecay): ...
    """

    def __init__(
        self,
        *args: Any,
        partitions: int | Sequence[int] | None = None,
        plan: gpipe.Plan | None = None,
        pack: bool = False,
        **kwargs: Any,
    ) -> None:
        mistakes = [text for name, text in NOT_SETTINGS.items() if name in kwargs]
        mistakes += [SLICED] * isinstance(kwargs.get("schedule"), gpipe.Sliced)
        if not isinstance(pack, bool):
            mistakes.append(f"pack={pack!r} is not a bool. Pass True or False.")
        if mistakes:
            raise TypeError("\n".join(mistakes))
        self._settings: dict[str, Any] = {name: kwargs.pop(name) for name in PIPE_ARGUMENTS & kwargs.keys()}
        self._settings |= {"partitions": partitions, "plan": plan}
        self._piped: object = None  # the model of which the pipe was created
        self._pack = pack
        self._loader: Any = None
        self._collate: Any = None  # the collator of the loader
        self._window: list[Any] = []  # the batches of this optimizer step
        self._losses: deque[Tensor] = deque()  # losses that `training_step` has not yet returned
        self._loss_device: torch.device | None = None
        self._withheld: WithheldGradients | None = None  # until the last loss is returned
        self._original_attributes: dict[str, Any] | None = None  # to restore before the second run of compute_loss
        self._verified = False  # whether compute_loss was seen to call the model with the same inputs again
        super().__init__(*args, **kwargs)

    # Setup.

    def create_accelerator_and_postprocess(self) -> None:
        args, world = self.args, self.args.world_size
        ranks = self._ranks() if world > 1 else 1
        of_processes = _mistakes_of_processes(args, world, ranks, self._settings) if world > 1 else ()
        if mistakes := [*_mistakes(self.model, args), *of_processes]:
            raise ValueError("\n".join(mistakes))
        if world > 1:
            self._settings["driver"] = self._settings.get("driver") or "process"
        if world > 1 or self._pack:  # accelerate can dispatch only batches that are collated.
            args.accelerator_config.dispatch_batches = False
        if args.n_gpu > 1:
            args._n_gpu = 1  # prevents DataParallel: the pipe uses the other GPUs
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _Accelerator
        self.accelerator.partitions = ranks

    def _ranks(self) -> int:
        partitions, plan = self._settings["partitions"], self._settings["plan"]
        if plan is not None:
            return int(plan.partitions)
        if isinstance(partitions, int):
            return partitions
        raise ValueError(NO_PARTITIONS)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing, because the pipe moves each layer to its device."""

    def get_train_dataloader(self) -> Any:
        self._loader = super().get_train_dataloader()
        self._collate = self._loader.collate_fn
        if self._pack:
            # `_packed` collates. accelerate wraps the loader.
            getattr(self._loader, "base_dataloader", self._loader).collate_fn = list
        return self._loader

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Creates the pipe and the optimizer. The optimizer of a process has the parameters of its partition."""
        if self._has_processes and self.optimizer is not None and self._piped is not self.model:
            raise ValueError(
                "optimizers= has an optimizer of all parameters, but with several processes each optimizer must have "
                "only the parameters of its own partition. Pass optimizer_cls_and_kwargs=(class, kwargs)."
            )
        self._prepare_pipe()
        optimizer: torch.optim.Optimizer = super().create_optimizer(self.pipe)
        return optimizer

    def _prepare_pipe(self) -> None:
        if self._piped is not self.model:
            batch = self._first_batch()
            count = self._get_num_items_in_batch([batch], self.args.device)
            self.model.train()
            self._make_pipe_of(self._called_with, batch, count)

    def _first_batch(self) -> Any:
        """Returns the sample, or collates the first rows of the training data. The random state stays unchanged."""
        if (sample := self._settings.get("sample")) is not None:
            return sample
        loader = self.get_train_dataloader() if self._loader is None else self._loader
        data: Any = loader.dataset
        rows = self._train_batch_size
        if isinstance(data, IterableDataset) and iter(data) is data:
            raise ValueError(ONE_PASS_DATA)
        with _restored_random_state():
            # A copy, because the collator may have its own generator. Large objects to which it refers are shared.
            shared = {id(value): value for value in (self.model, self.processing_class, data)}
            collate = copy.deepcopy(self._collate, shared)
            if isinstance(data, IterableDataset):
                return collate(list(islice(data, rows)))
            return collate([data[index] for index in range(min(rows, len(data)))])

    def _make_pipe_of(self, called: Callable[..., Any], *args: Any) -> None:
        """Creates the pipe from the arguments that `called` passes to the model. Restores changed attributes."""
        before = Attributes(self, OWN_ATTRIBUTES)
        sample = called(*args)
        set_attributes(self, before.changed())
        with _note_on_loss_fn():
            self._make_pipe(sample)

    def _make_pipe(self, sample: Any) -> gpipe.GPipe:
        if self.pipe is not None:
            self.pipe.close()
        driver = self._settings.get("driver")
        threaded = driver in (None, "threads") or isinstance(driver, gpipe.Threads)
        if threaded and any(type(module).__name__ == "ParamWrapper" for module in self.model.modules()):
            raise ValueError(
                "peft keeps the adapted parameters of experts in one place for all threads, so ranks would use the "
                "parameters of other ranks. Start K processes, pass driver='lockstep', or do not adapt experts. "
                "[adapters-on-experts]"
            )
        if self.args.device.type == "cpu" and not self._has_processes:
            self._settings.setdefault("devices", "cpu")
        settings = {"seed": self.args.seed, **self._settings, "sample": gpipe.MicroBatches([sample])}
        self.pipe = gpipe.GPipe(self.model, micro_batches=self.args.gradient_accumulation_steps, **settings)
        self._piped, self.accelerator.pipe, self._sample = self.model, self.pipe, sample
        if self.pipe.micro_batches < self.pipe.partitions:
            logger.warning(FEW, self.pipe.micro_batches, self.pipe.partitions)
        if self._has_processes and self.accelerator.scaler is not None:
            self.accelerator.scaler = gpipe.GradScaler(self.pipe)
        return self.pipe

    # An optimizer step.

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any) -> Any:
        """Returns the batches of one optimizer step and the number of their labels, as Trainer does."""
        if self._withheld is not None:
            raise ValueError(
                "The epoch was ended between batches of one optimizer step, but a pipe runs them at once. Set "
                "should_epoch_stop in on_step_end of a callback. [epoch-ended-in-step]"
            )
        if self._pack:
            epoch_iterator = self._packed([*islice(epoch_iterator, num_batches)])
        samples = super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)
        self._window = samples[0]
        self._losses.clear()
        return samples

    def _packed(self, batches: Sequence[Any]) -> Iterator[Any]:
        """Distributes the rows of these batches over the same number of batches by length."""
        rows, name = [*chain.from_iterable(batches)], self.model.main_input_name
        if without := [row for row in rows if not isinstance(row, Mapping) or not hasattr(row.get(name), "__len__")]:
            kind = sorted(without[0]) if isinstance(without[0], Mapping) else f"the type {type(without[0]).__name__}"
            raise ValueError(NO_LENGTHS.format(name=name, has=kind))
        joins_rows = isinstance(self.data_collator, DataCollatorWithFlattening)
        padded = not joins_rows and not getattr(self.data_collator, "padding_free", False)
        if rows:
            for group in gpipe.pack([len(row[name]) for row in rows], len(batches), padded=padded):
                yield self._collate([rows[row] for row in group])

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Returns the loss of one batch. The first call of an optimizer step runs all batches through the pipe."""
        if self._withheld is not None:
            self._withheld.check()
        if not self._losses:
            self._losses.extend(self._run_window(num_items_in_batch))
        loss = self._losses.popleft()
        if not self._losses:
            self._restore_gradients()
        elif self._withheld is None:
            self._withheld = WithheldGradients(self.accelerator.pipe)
        return loss

    def _restore_gradients(self) -> None:
        if self._withheld is not None:
            self._withheld.restore()
            self._withheld = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self._restore_gradients()  # after an aborted step

    def _run_window(self, count: Any) -> Sequence[Tensor]:
        accelerator = self.accelerator
        pipe: gpipe.GPipe = accelerator.pipe
        pipe.train()
        pipe.step_number = self.state.global_step  # keys dropout, also after resuming from a checkpoint
        versions, attributes = versions_of(pipe), Attributes(self, OWN_ATTRIBUTES)
        inputs = [self._called_with(batch, count) for batch in self._window]
        if versions_of(pipe) != versions:  # otherwise the backward pass would raise torch's own error
            raise ValueError(WEIGHTS)
        self._original_attributes = attributes.changed()
        accelerator.weights = nn.ParameterList(pipe.parameters())
        first = self._check_same_batches() if self._has_processes else 0
        losses: list[Tensor] = []
        loss_fn = partial(self._loss_of, inputs, count)
        loss_fn.runs_once = True  # type: ignore[attr-defined]  # a subclass may log or count in its loss
        with accelerator.autocast(), _note_on_loss_fn():
            pipe.step(
                gpipe.MicroBatches(inputs),
                gpipe.MicroBatches(range(len(inputs))),
                loss_fn,
                reduction="sum",
                scale=1 / accelerator.num_processes,  # gradients are means over replicas
                scaler=accelerator.scaler,
                losses=losses,
            )
        if versions_of(pipe) != versions:
            raise ValueError(WEIGHTS)
        self._verified = True
        return [loss.to(self.args.device) for loss in losses[first : first + len(inputs)]]

    def _called_with(self, batch: Any, count: Any) -> Any:
        with self.accelerator.step_for_pipe():
            return self._called_in(super().training_step, batch, count)

    def _called_in(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs a step of Trainer until it calls the model, and returns the arguments of this call."""
        model = self.model

        def call(*args: Any, **kwargs: Any) -> None:
            raise _Called(model, args, kwargs)

        try:
            step(_Model(model, call), *args)
        except _Called as called:
            return called.inputs
        raise ValueError(
            f"{type(self).__name__}.compute_loss did not call its model argument, or only a part of it. Call the "
            f"model itself. [model-not-called]"
        )

    def _loss_of(self, inputs: Sequence[Any], count: Any, output: Any, index: int) -> Tensor:
        """Returns the loss that Trainer computes from the pipe's output for a batch and passes to `backward`."""
        outputs = deque([convert_to_fp32(output) if self.args.mixed_precision != "no" else output])

        def call(*args: Any, **kwargs: Any) -> Any:
            if not outputs:
                raise ValueError(
                    "compute_loss calls the model twice for one batch, but a pipe runs it once. Concatenate the rows "
                    "of both inputs, and call it once. [model-called-twice]"
                )
            if not self._verified and not _same(inputs[index], _Called(self.model, args, kwargs).inputs):
                raise ValueError(
                    "compute_loss runs twice per batch, and called the model with different inputs the second time. "
                    "Move random changes of a batch into the data collator. [compute-loss-not-repeatable]"
                )
            return outputs.popleft()

        original, self._original_attributes = self._original_attributes, None
        set_attributes(self, original or {})
        self._loss_device = find_device(output)
        no_autocast = torch.autocast(self.args.device.type, enabled=False)  # as after the forward of a plain model
        try:
            # Only the first loss of a step can withhold gradients: no backward pass has begun yet.
            with no_autocast, self.accelerator.step_for_pipe(withholds=original is not None):
                super().training_step(_Model(self.model, call), self._window[index], self._prepare_input(count))
        finally:
            self._loss_device = None
        loss: Tensor | None = self.accelerator.loss
        if loss is None:
            raise ValueError(BACKWARDS.format(times="0 times"))
        return loss

    def _prepare_input(self, data: Any) -> Any:
        """Moves a batch to the device, as Trainer does. In a loss, moves tensors to the device of the last stage."""
        if self._loss_device is not None and isinstance(data, Tensor):
            return data.to(self._loss_device)
        return super()._prepare_input(data)

    # Evaluation.

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if not training:
            return _Model(self.model, self._predict, self.pipe or self.model)
        if self._has_processes and self._piped is not self.model:
            raise ValueError(OWN_OPTIMIZER)
        self._prepare_pipe()
        return self.pipe

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs Trainer's prediction step with the pipe as the model. Each batch is one micro-batch."""
        if self._has_processes and self._piped is not self.model:
            self._make_pipe_of(self._called_in, super().prediction_step, inputs, True)
        with self._generating_by_pipe():
            return super().prediction_step(_Model(self.model, self._predict, self.pipe), inputs, *args, **kwargs)

    @contextmanager
    def _generating_by_pipe(self, *, in_one_process: bool = False) -> Iterator[None]:
        """Replaces the model's `generate` by the pipe's, for one call by the Trainer."""
        attributes = vars(self.model)
        if not (self._has_processes or in_one_process) or "generate" in attributes:
            yield
            return

        def generate(**kwargs: Any) -> Any:
            del attributes["generate"]  # the pipe calls the model's own
            return self.accelerator.pipe.eval().generate(**kwargs)

        attributes["generate"] = generate
        try:
            yield
        finally:
            attributes.pop("generate", None)

    def _predict(self, *args: Any, **kwargs: Any) -> Any:
        inputs = _Called(self.model, args, kwargs).inputs
        if self._piped is not self.model:
            self._make_pipe(inputs)
        if COUNT in self._sample:  # the traced forward expects it; without labels its value has no effect
            inputs.setdefault(COUNT, torch.ones(()))
        with self.accelerator.autocast():
            (output,) = self.accelerator.pipe(gpipe.MicroBatches([inputs]), gather=True)
        return convert_to_fp32(output) if self.args.mixed_precision != "no" else output

    # Several processes.

    def _check_same_batches(self) -> int:
        """Checks that the processes of a replica read the same batches. Returns the index of the first batch."""
        digest = 0
        for value in chain.from_iterable(batch.values() for batch in self._window):
            if isinstance(value, Tensor):
                digest = zlib.crc32(value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
        ranks, message = self.accelerator.partitions, json.dumps([len(self._window), digest]).encode()
        reports = [json.loads(report) for report in self.accelerator.pipe.exchange(message)]
        for replica, first in enumerate(range(0, len(reports), ranks)):
            if any(report != reports[first] for report in reports[first : first + ranks]):
                raise ValueError(DIFFERENT_BATCHES.format(replica=replica))
        return sum(batches for batches, _ in reports[: self.accelerator.process_index * ranks : ranks])

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns Trainer's count of floating-point operations in one process per replica, and 0 elsewhere."""
        first = not self._has_processes or not self.args.process_index % self.accelerator.partitions
        return super().floating_point_ops(inputs) if first else 0

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Logs, saves and evaluates as Trainer does. The logged loss is the exact mean over replicas.

        All K processes of a replica have the same loss. A mean over all processes could be rounded differently.
        """
        if not (
            self._has_processes and self.control.should_log and self.state.global_step > self._globalstep_last_logged
        ):
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
            return
        mean = self.accelerator.gather(tr_loss).mean().double()
        tr_loss.zero_()
        super()._maybe_log_save_evaluate(mean, *args, **kwargs)


class GPipeTrainer(Pipelined, Trainer):
    """`transformers.Trainer` on a pipe. See `Pipelined` for its arguments.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    >>> sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (16, 8))]
    >>> folder = TemporaryDirectory()
    >>> args = TrainingArguments(folder.name, gradient_accumulation_steps=4, report_to="none", use_cpu=True)
    >>> trainer = GPipeTrainer(model, args, train_dataset=rows, partitions=2)
    >>> trainer.get_total_train_batch_size(args)  # trainer.train() trains
    32
    >>> folder.cleanup()
    """


class GPipeSeq2SeqTrainer(Pipelined, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on a pipe. See `Pipelined` for its arguments.

    >>> issubclass(GPipeSeq2SeqTrainer, Pipelined) and issubclass(GPipeSeq2SeqTrainer, Seq2SeqTrainer)
    True
    """


def _mistakes(model: Any, args: Any) -> Iterator[str]:
    yield from [text for name, text in UNSUPPORTED.items() if getattr(args, name, None)]
    if "lomo" in str(args.optim).lower():
        yield LOMO.format(optim=str(args.optim))
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel, gpipe.GPipe)):
        yield WRAPPED.format(kind=type(model).__name__)
    devices = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(devices) > 1 or (getattr(model, "tp_size", None) or 1) > 1:
        yield DISTRIBUTED


def _mistakes_of_processes(args: Any, world: int, ranks: int, settings: Mapping[str, Any]) -> Iterator[str]:
    if world % ranks:
        yield f"{world} processes are not divisible by partitions={ranks}. Start a multiple of {ranks}."
    if settings.get("driver") not in (None, "process") and not isinstance(settings["driver"], gpipe.Processes):
        yield f"driver={settings['driver']!r} supports one process, but there are {world}. Remove it."
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True supports only one process, because others do not see its memory. Remove it."
    if args.train_sampling_strategy == "batch_rebalance":
        yield (
            "train_sampling_strategy='batch_rebalance' sends different rows to the processes of a replica. Remove it."
        )
    if args.accelerator_config.dispatch_batches:
        yield "dispatch_batches=True sends different rows to the processes of a replica. Remove it."
    if args.eval_use_gather_object:
        yield "eval_use_gather_object=True would count the results of each replica K times. Remove it."
    if args.fp16 and world > ranks:
        yield "fp16=True is not supported with several replicas. Use bf16=True, which needs no gradient scaling."


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(value, second[name]) for name, value in first.items())
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second.to(first.device))
    return not isinstance(first, Tensor) and not isinstance(second, Tensor)


@contextmanager
def _note_on_loss_fn() -> Iterator[None]:
    """Adds a note to errors about `loss_fn`, which is not a name in the user's code."""
    try:
        yield
    except Exception as error:
        if any(word in str(error) for word in ABOUT_LOSS_FN):
            error.add_note(
                "With a Trainer, loss_fn is the part of compute_loss after its call of the model. Use only the "
                "model's output there, and no weights, also not for the model's inputs. [compute-loss-uses-weights]"
            )
        raise


@contextmanager
def _restored_random_state() -> Iterator[None]:
    """Restores the default generators, which a data set or collator may use."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
