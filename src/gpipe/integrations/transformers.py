"""transformers' Trainer over a pipe: the name of the class changes, and `partitions=` is added.

Trainer fetches the M batches of an optimizer step ahead, and then calls `training_step` for one after the other. The
first of these calls runs all M through the pipe, as its micro-batches, and call m gives loss m. So the sums, the log,
the filter of NaN, callbacks, the optimizer, evaluation and checkpoints stay Trainer's own.

Batches and losses are Trainer's, too. Its `training_step` is run up to where it calls the model: what the model is
called with goes through the pipe. At the last stage it is run once more, with the pipe's output for what the model
gives, up to where it calls `backward` with the loss. So what a subclass makes of a batch or a loss stays its own.

Over processes accelerate is told of replicas, where it asks for processes: the K processes of one read the same rows.
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
from transformers import Seq2SeqTrainer, Trainer

import gpipe
from gpipe.integrations.whole_checkpoints import WholeCheckpoints
from gpipe.integrations.within_step import WEIGHTS, Bindings, WithheldGradients, rebind, versions_of

logger = logging.getLogger(__name__)
INSTEAD = {
    "micro_batches": "M is gradient_accumulation_steps= of the TrainingArguments",
    "mesh": "the processes of a replica are K in a row; leave it out",
}
PIPES = inspect.signature(gpipe.GPipe).parameters.keys() - {"model", *INSTEAD}  # the arguments that go to the pipe
SLICED = "schedule=Sliced(...): compute_loss has losses of whole sequences; write the loop with pipe.step instead"
COUNT = "num_items_in_batch"
UNTOUCHED = ("_window", "accelerator")  # attributes of ours, whatever they hold

REFUSED = {
    "deepspeed": "DeepSpeed would cut the model again",
    "fsdp": "FSDP would cut the model again; for more than one replica start a multiple of K processes",
    "parallelism_config": "the pipe alone says how the model is spread",
    "torch_compile": "a compiled model cannot be cut; leave torch_compile out",
}
LOMO = "LOMO optimizers step inside of the backward of each batch; take another one, such as optim='adamw_torch'"
WRAPPED = "the model is a {kind} already; give the plain model, and the trainer makes the pipe of it"
SPREAD = "the model is spread over devices already (device_map or tp_plan); leave that out, the pipe spreads it"
ODD = "compute_loss, run twice for a batch, calls the model otherwise the second time: draw in the collator instead"
PAST = (
    "accelerator.backward was called past the pipe: training_step is overridden and does not call "
    "super().training_step, which runs all batches of a step through the pipe; override compute_loss instead"
)
OWN_OPTIMIZER = (
    "create_optimizer is overridden and does not call super().create_optimizer, and over processes each optimizer "
    "has its own partition's parameters alone; give optimizer_cls_and_kwargs=(class, kwargs)"
)
ONCE = "the training data can be gone through once; give sample=, a batch as the collator makes it, to see"
BACKWARDS = "for a batch training_step called accelerator.backward {times}: call it once, for the sum, or 0 x a loss"
ENDED = "an epoch was ended between batches of a step, which run at once: set should_epoch_stop in on_step_end"
BEHIND = (
    "Of a Trainer, loss_fn is what compute_loss does behind its call of the model: it uses what that gives, no "
    "weight or module of the model; nor is what it calls the model with made of these"
)
TWICE = "compute_loss calls the model twice for a batch; a pipe runs it once. Give both in one call, rows behind rows"
EXPERTS = (
    "peft keeps what adapters make of the parameters of experts in one place for all threads, where ranks would take "
    "each other's: start K processes, give driver='lockstep', or leave experts out of target_modules"
)
FEW = (
    "gradient_accumulation_steps=%d is less than partitions=%d, so that most partitions wait: raise it, and "
    "lower per_device_train_batch_size as much, for steps of the same rows"
)
GATHERS = "compute_loss gathers over processes, and the last of a replica alone computes it: gather in a callback"
APART = (
    "the processes of replica {replica} were given different batches: all K must read the same rows. Collators that "
    "draw must draw alike in all (dataloader_num_workers=0 has them draw from the generators that Trainer seeds)"
)


class _Called(Exception):  # noqa: N818  # no error: this is how far a training step is run
    """What the model was called with."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        named = inspect.signature(model.forward).bind_partial(*args).arguments if args else {}
        self.inputs: dict[str, Any] = {**named, **kwargs}


class _Model:
    """The model to whoever asks for its class or attributes; when it is called, what the pipe gives."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], modes: nn.Module | None = None) -> None:
        self._model, self._call, self._modes = model, call, modes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property  # type: ignore[misc]  # isinstance looks here
    def __class__(self) -> type:
        found: type = self._model.__class__
        return found

    def train(self, mode: bool = True) -> "_Model":
        """Sets the mode of what runs; the loss of one micro-batch sets none, while others are under way."""
        if self._modes is not None:
            self._modes.train(mode)
        return self

    def eval(self) -> "_Model":
        return self.train(False)


class _Accelerator(Accelerator):  # type: ignore[misc]  # untyped
    """accelerate for a pipe: a replica of K processes counts as one process, and a loss is kept for the pipe."""

    pipe: gpipe.GPipe
    weights: nn.Module  # of the pipe: while ranks are at work, aliases may stand in their places
    partitions = 1  # K, over processes
    in_loss = False  # whether a training step is run for the pipe
    loss: Tensor | None = None  # of that step
    withheld: WithheldGradients | None = None  # from its backward to its end
    withholds = False  # whether they are to be

    @property
    def num_processes(self) -> int:
        return int(self.state.num_processes // self.partitions)

    @property
    def process_index(self) -> int:
        return int(self.state.process_index // self.partitions)

    def gather(self, tensor: Any) -> Any:
        """Gathers of one process of each replica."""
        if self.in_loss and self.state.num_processes > 1:
            raise ValueError(GATHERS)
        gathered = super().gather(tensor)
        if self.partitions == 1:
            return gathered

        def of_replicas(tensor: Tensor) -> Tensor:
            whole: Tensor = tensor.unflatten(0, (self.state.num_processes, -1))
            return whole[:: self.partitions].flatten(0, 1)

        return recursively_apply(of_replicas, gathered)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Keeps the loss, whose backward is the pipe's."""
        if not self.in_loss:
            raise ValueError(PAST)
        if self.loss is not None:
            raise ValueError(BACKWARDS.format(times="twice"))
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
                self.withheld.give_back()
                self.withheld = None

    def clip_grad_norm_(self, parameters: object, max_norm: float, norm_type: float = 2) -> Tensor:
        self.unscale_gradients()
        return self.pipe.clip_grad_norm_(max_norm, norm_type)


class Pipelined(WholeCheckpoints):
    """Makes a Trainer train through a pipe: `class Mine(Pipelined, SomeTrainer)`.

    Args:
        *args: What the Trainer takes. `gradient_accumulation_steps` of its arguments is M, the number of
            micro-batches; `per_device_train_batch_size` the rows of each.
        partitions: K, as of `gpipe.GPipe`; under torchrun a divisor of the number of processes.
        plan: What `gpipe.find_plan` gave, in place of `partitions`.
        **kwargs: What the Trainer takes by name, and further arguments of `gpipe.GPipe`: `schedule`, `remat`,
            `devices` and others. A `sample` is a batch as the collator makes it; by default the first rows of the
            training data, or the first batch to be evaluated.

    Attributes:
        pipe: The pipe, once training or evaluation has begun; until then None.

    Raises:
        ValueError: An argument of the Trainer cannot be had with a pipe; or, in the first step, batches or losses.

    >>> from transformers import Trainer
    >>> class WithoutDecay(Trainer):
    ...     def get_decay_parameter_names(self, model):
    ...         return []
    >>> class PipelinedWithoutDecay(Pipelined, WithoutDecay): ...
    """

    def __init__(
        self, *args: Any, partitions: int | Sequence[int] | None = None, plan: gpipe.Plan | None = None, **kwargs: Any
    ) -> None:
        wrong = [f"{name}=: {why}" for name, why in INSTEAD.items() if name in kwargs]
        if wrong := wrong + [SLICED] * isinstance(kwargs.get("schedule"), gpipe.Sliced):
            raise TypeError("; ".join(wrong))
        self._settings: dict[str, Any] = {name: kwargs.pop(name) for name in PIPES & kwargs.keys()}
        self._settings |= {"partitions": partitions, "plan": plan}
        self._piped: object = None  # the model that the pipe was made of
        self._loader: Any = None
        self._window: list[Any] = []  # the batches of this optimizer step
        self._losses: deque[Tensor] = deque()  # of those whose turn comes
        self._loss_device: torch.device | None = None
        self._withheld: WithheldGradients | None = None  # until the last of them
        self._again: dict[str, Any] | None = None  # before a step's first loss: what to bind anew for the second run
        self._tried = False  # whether losses were seen to be computed of what the pipe was given
        super().__init__(*args, **kwargs)

    # Before the pipe is there.

    def create_accelerator_and_postprocess(self) -> None:
        args, world = self.args, self.args.world_size
        ranks = self._ranks() if world > 1 else 1
        apart = _mistakes_apart(args, world, ranks, self._settings) if world > 1 else ()
        if wrong := [*_mistakes(self.model, args), *apart]:
            raise ValueError("\n".join(wrong))
        if world > 1:
            self._settings["driver"] = self._settings.get("driver") or "process"
            args.accelerator_config.dispatch_batches = False
        if args.n_gpu > 1:
            args._n_gpu = 1  # the pipe has the others: no DataParallel
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _Accelerator
        self.accelerator.partitions = ranks

    def _ranks(self) -> int:
        given, plan = self._settings["partitions"], self._settings["plan"]
        if plan is not None:
            return int(plan.partitions)
        if isinstance(given, int):
            return given
        raise ValueError("under a launcher give partitions=K, the number of processes of each replica, or plan=")

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Moves nothing: the pipe puts each layer where it runs."""

    def get_train_dataloader(self) -> Any:
        self._loader = super().get_train_dataloader()
        return self._loader

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Makes the pipe, and Trainer's optimizer of its parameters: over processes, of this partition's."""
        if self._apart and self.optimizer is not None and self._piped is not self.model:
            raise ValueError(
                "optimizers= holds an optimizer of all parameters, and over processes each has its own "
                "partition's alone; give optimizer_cls_and_kwargs=(class, kwargs)"
            )
        self._prepare_pipe()
        found: torch.optim.Optimizer = super().create_optimizer(self.pipe)
        return found

    def _prepare_pipe(self) -> None:
        if self._piped is not self.model:
            batch = self._first_batch()
            count = self._get_num_items_in_batch([batch], self.args.device)
            self.model.train()
            self._make_pipe_of(self._called_with, batch, count)

    def _first_batch(self) -> Any:
        """The first rows of the training data, as a batch; nobody's randomness is used up for it."""
        if (sample := self._settings.get("sample")) is not None:
            return sample
        loader = self.get_train_dataloader() if self._loader is None else self._loader
        data: Any = loader.dataset
        rows = self._train_batch_size
        if isinstance(data, IterableDataset) and iter(data) is data:
            raise ValueError(ONCE)
        with _randomness_kept():
            # it may draw from a generator of its own, and refer to what is as large as the model
            known = {id(one): one for one in (self.model, self.processing_class, data)}
            collate = copy.deepcopy(loader.collate_fn, known)
            if isinstance(data, IterableDataset):
                return collate(list(islice(data, rows)))
            return collate([data[at] for at in range(min(rows, len(data)))])

    def _make_pipe_of(self, called: Callable[..., Any], *args: Any) -> None:
        """Makes the pipe by what a step calls the model with, of which no other trace is left."""
        before = Bindings(self, UNTOUCHED)
        sample = called(*args)
        rebind(self, before.changed())
        with _in_words_of_trainer():
            self._make_pipe(sample)

    def _make_pipe(self, sample: Any) -> gpipe.GPipe:
        if self.pipe is not None:
            self.pipe.close()
        driver = self._settings.get("driver")
        threaded = driver in (None, "threads") or isinstance(driver, gpipe.Threads)
        if threaded and any(type(module).__name__ == "ParamWrapper" for module in self.model.modules()):
            raise ValueError(EXPERTS)
        if self.args.device.type == "cpu" and not self._apart:
            self._settings.setdefault("devices", "cpu")
        settings = {"seed": self.args.seed, **self._settings, "sample": gpipe.MicroBatches([sample])}
        self.pipe = gpipe.GPipe(self.model, micro_batches=self.args.gradient_accumulation_steps, **settings)
        self._piped, self.accelerator.pipe, self._sample = self.model, self.pipe, sample
        if self.pipe.micro_batches < self.pipe.partitions:
            logger.warning(FEW, self.pipe.micro_batches, self.pipe.partitions)
        if self._apart and self.accelerator.scaler is not None:
            self.accelerator.scaler = gpipe.GradScaler(self.pipe)
        return self.pipe

    # A mini-batch.

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's: the batches of one optimizer step, and the number of their labels that count."""
        if self._withheld is not None:
            raise ValueError(ENDED)
        found = super().get_batch_samples(*args, **kwargs)
        self._window = found[0]
        self._losses.clear()
        return found

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss of one batch; for the first of an optimizer step, all of them run through the pipe."""
        if self._withheld is not None:
            self._withheld.check()
        if not self._losses:
            self._losses.extend(self._run_window(num_items_in_batch))
        loss = self._losses.popleft()
        if not self._losses:
            self._give_back()
        elif self._withheld is None:
            self._withheld = WithheldGradients(self.accelerator.pipe)
        return loss

    def _give_back(self) -> None:
        if self._withheld is not None:
            self._withheld.give_back()
            self._withheld = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self._give_back()  # of a step that was broken off

    def _run_window(self, count: Any) -> Sequence[Tensor]:
        accelerator = self.accelerator
        pipe: gpipe.GPipe = accelerator.pipe
        pipe.train()
        pipe.step_number = self.state.global_step  # it keys dropout: resumed, it goes on where it was
        versions, before_calls = versions_of(pipe), Bindings(self, UNTOUCHED)
        inputs = [self._called_with(batch, count) for batch in self._window]
        if versions_of(pipe) != versions:  # else its backward would tell, in torch's words
            raise ValueError(WEIGHTS)
        self._again = before_calls.changed()
        accelerator.weights = nn.ParameterList(pipe.parameters())
        before = self._check_alike() if self._apart else 0
        losses: list[Tensor] = []
        loss_fn = partial(self._loss_of, inputs, count)
        loss_fn.runs_once = True  # type: ignore[attr-defined]  # callbacks of a subclass must not hear of it twice
        with accelerator.autocast(), _in_words_of_trainer():
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
        self._tried = True
        return [loss.to(self.args.device) for loss in losses[before : before + len(inputs)]]

    def _called_with(self, batch: Any, count: Any) -> Any:
        with self.accelerator.step_for_pipe():
            return self._called_in(super().training_step, batch, count)

    def _called_in(self, step: Callable[..., Any], *args: Any) -> Any:
        """What a step of Trainer's calls the model with, which is as far as it runs."""
        model = self.model

        def call(*args: Any, **kwargs: Any) -> None:
            raise _Called(model, args, kwargs)

        try:
            step(_Model(model, call), *args)
        except _Called as called:
            return called.inputs
        raise ValueError(
            f"{type(self).__name__}.compute_loss did not call the model that it is given, or a part of it alone"
        )

    def _loss_of(self, inputs: Sequence[Any], count: Any, output: Any, at: int) -> Tensor:
        """The loss that Trainer computes of what the model gave for batch `at`, as it would be for `backward`."""
        given = deque([convert_to_fp32(output) if self.args.mixed_precision != "no" else output])

        def call(*args: Any, **kwargs: Any) -> Any:
            if not given:
                raise ValueError(TWICE)
            if not self._tried and not _same(inputs[at], _Called(self.model, args, kwargs).inputs):
                raise ValueError(ODD)
            return given.popleft()

        again, self._again = self._again, None
        rebind(self, again or {})
        self._loss_device = find_device(output)
        plain = torch.autocast(self.args.device.type, enabled=False)  # as behind the forward of a plain model
        try:
            with plain, self.accelerator.step_for_pipe(withholds=again is not None):  # no backward has begun
                super().training_step(_Model(self.model, call), self._window[at], self._prepare_input(count))
        finally:
            self._loss_device = None
        loss: Tensor | None = self.accelerator.loss
        if loss is None:
            raise ValueError(BACKWARDS.format(times="not at all"))
        return loss

    def _prepare_input(self, data: Any) -> Any:
        """Trainer's, which moves a batch to its device; for a loss, to that of the last stage."""
        if self._loss_device is not None and isinstance(data, Tensor):
            return data.to(self._loss_device)
        return super()._prepare_input(data)

    # Around it.

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if not training:
            return _Model(self.model, self._predict, self.pipe or self.model)
        if self._apart and self._piped is not self.model:
            raise ValueError(OWN_OPTIMIZER)
        self._prepare_pipe()
        return self.pipe

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with the pipe for the model: one batch at a time, as one micro-batch."""
        if self._apart and self._piped is not self.model:
            self._make_pipe_of(self._called_in, super().prediction_step, inputs, True)
        with self._generating_by_pipe():
            return super().prediction_step(_Model(self.model, self._predict, self.pipe), inputs, *args, **kwargs)

    @contextmanager
    def _generating_by_pipe(self) -> Iterator[None]:
        """Over processes, has the model's `generate`, which Seq2SeqTrainer calls once, be that of the pipe."""
        own = vars(self.model)
        if not self._apart or "generate" in own:
            yield
            return

        def generate(**given: Any) -> Any:
            del own["generate"]  # the pipe looks for the model's
            return self.accelerator.pipe.eval().generate(**given)

        own["generate"] = generate
        try:
            yield
        finally:
            own.pop("generate", None)

    def _predict(self, *args: Any, **kwargs: Any) -> Any:
        inputs = _Called(self.model, args, kwargs).inputs
        if self._piped is not self.model:
            self._make_pipe(inputs)
        if COUNT in self._sample:  # without labels it says nothing
            inputs.setdefault(COUNT, torch.ones(()))
        with self.accelerator.autocast():
            (output,) = self.accelerator.pipe(gpipe.MicroBatches([inputs]), gather=True)
        return convert_to_fp32(output) if self.args.mixed_precision != "no" else output

    # Over processes.

    def _check_alike(self) -> int:
        """Checks that the processes of each replica read the same; gives the number of batches before this one's."""
        digest = 0
        for value in chain.from_iterable(batch.values() for batch in self._window):
            if isinstance(value, Tensor):
                digest = zlib.crc32(value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
        ranks, mine = self.accelerator.partitions, json.dumps([len(self._window), digest]).encode()
        told = [json.loads(one) for one in self.accelerator.pipe.exchange(mine)]
        for replica, first in enumerate(range(0, len(told), ranks)):
            if any(one != told[first] for one in told[first : first + ranks]):
                raise ValueError(APART.format(replica=replica))
        return sum(batches for batches, _ in told[: self.accelerator.process_index * ranks : ranks])

    def floating_point_ops(self, inputs: Any) -> int:
        """Trainer's, counted once in a replica."""
        first = not self._apart or not self.args.process_index % self.accelerator.partitions
        return super().floating_point_ops(inputs) if first else 0

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Trainer's; the mean of a loss over K processes that have the same is to be that same, to the last bit."""
        if not (self._apart and self.control.should_log and self.state.global_step > self._globalstep_last_logged):
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
            return
        mean = self.accelerator.gather(tr_loss).mean().double()
        tr_loss.zero_()
        super()._maybe_log_save_evaluate(mean, *args, **kwargs)


class GPipeTrainer(Pipelined, Trainer):
    """`transformers.Trainer` through a pipe; see `Pipelined` for its arguments.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    >>> sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> rows = [{"input_ids": words, "labels": words} for words in torch.randint(64, (16, 8))]
    >>> folder = TemporaryDirectory()
    >>> args = TrainingArguments(folder.name, gradient_accumulation_steps=4, report_to="none", use_cpu=True)
    >>> trainer = GPipeTrainer(model, args, train_dataset=rows, partitions=2)
    >>> trainer.get_total_train_batch_size(args)  # trainer.train() trains
    32
    >>> folder.cleanup()
    """


class GPipeSeq2SeqTrainer(Pipelined, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` through a pipe; see `Pipelined` for its arguments.

    >>> issubclass(GPipeSeq2SeqTrainer, Pipelined) and issubclass(GPipeSeq2SeqTrainer, Seq2SeqTrainer)
    True
    """


def _mistakes(model: Any, args: Any) -> Iterator[str]:
    yield from [f"{name}= is given, and {why}" for name, why in REFUSED.items() if getattr(args, name, None)]
    if "lomo" in str(args.optim).lower():
        yield LOMO
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel, gpipe.GPipe)):
        yield WRAPPED.format(kind=type(model).__name__)
    devices = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(devices) > 1 or (getattr(model, "tp_size", None) or 1) > 1:
        yield SPREAD


def _mistakes_apart(args: Any, world: int, ranks: int, settings: Mapping[str, Any]) -> Iterator[str]:
    if world % ranks:
        yield f"{world} processes are no multiple of partitions={ranks}"
    if settings.get("driver") not in (None, "process") and not isinstance(settings["driver"], gpipe.Processes):
        yield f"driver={settings['driver']!r} is for one process, and there are {world}; leave it out"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size is for one process: the others would not see that memory is short"
    if args.train_sampling_strategy == "batch_rebalance":
        yield "train_sampling_strategy='batch_rebalance' gives each process rows of its own"
    if args.accelerator_config.dispatch_batches:
        yield "dispatch_batches=True sends each process rows of its own; leave it out"
    if args.eval_use_gather_object:
        yield "eval_use_gather_object would count what K processes have alike K times; leave it out"
    if args.fp16 and world > ranks:
        yield "fp16 with replicas: take bf16, whose gradients need no scale"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other.to(one.device))
    return not isinstance(one, Tensor) and not isinstance(other, Tensor)


@contextmanager
def _in_words_of_trainer() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if "loss_fn" in str(error):
            error.add_note(BEHIND)
        raise


@contextmanager
def _randomness_kept() -> Iterator[None]:
    """Puts the generators back that a data set or a collator may use."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
