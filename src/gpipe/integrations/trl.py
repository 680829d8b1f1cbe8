"""Runs trl's `SFTTrainer`, `DPOTrainer` and `GRPOTrainer` on a pipe. See `gpipe.integrations.transformers`.

In these trainers, the model computes log-probabilities of tokens instead of logits, in an `autograd.Function`. This
module wraps the function so that gpipe can trace its calls. The wrapper has no other effect.

For DPO, the reference model runs before the step, for all batches of the step. The reference model is a separate pipe
on the same devices. If only adapters are trained, the reference model is the same pipe with the adapters turned off.

For GRPO, `GPipe.generate` generates the completions of a step before the step, with the weights of the step.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import chain
from time import perf_counter
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from accelerate.utils import (
    convert_to_fp32,
    find_device,
    gather_object,
    is_peft_model,
    recursively_apply,
    send_to_device,
    set_seed,
)
from torch import Tensor, distributed
from transformers import Trainer

import gpipe
from gpipe.integrations import transformers
from gpipe.integrations.within_step import set_attributes

try:
    import trl.trainer.utils
    from trl import DPOTrainer, GRPOTrainer, SFTTrainer
    from trl.trainer import grpo_trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "trl is not installed. Run pip install '.[trl]' in a clone of the gpipe repository.", name=error.name
    ) from error

UNSUPPORTED = {
    "activation_offloading": "activation_offloading= is set, but cannot see the pipe's threads. Pass remat= instead.",
    "sync_ref_model": "sync_ref_model= is set, but the reference model is a frozen pipe. Remove it.",
    "use_liger_kernel": "use_liger_kernel= is set, but it would change the model after the split. Remove it.",
}
UNSUPPORTED_IN_GRPO = {
    "use_vllm": "use_vllm= is set, but the pipe generates the completions. Remove it.",
    "use_transformers_continuous_batching": (
        "use_transformers_continuous_batching= is set, but the pipe generates the completions. Remove it."
    ),
}
SAMPLE = "sample= is not an argument, because gpipe makes a sample without prompts. Remove it."
IMAGES = "processing_class= is a processor, but GRPO of images is not supported. Pass a tokenizer and a text model."
ONCE = {"tools": "_standalone_tools", "environment_factory": "environment_factories", "rollout_func": "rollout_func"}
TIED = (
    "model= is a {kind} with tied embeddings, which GRPO on a pipe cannot generate with. Untie them: set "
    "model.config.tie_word_embeddings=False and model.lm_head.weight=nn.Parameter(model.lm_head.weight.clone()). "
    "[generate-with-tied-embeddings]"
)
IN_EACH_PROCESS = (
    "{name}= would run in all K processes of a replica, which could then get different completions. Remove it, or "
    "use one process."
)
NOT_DIVISIBLE = (
    "{name}={count} does not divide {product} = {size}. All K processes of a replica read the same rows. Change "
    "{name} or a batch size."
)
SAMPLE_TOKENS = 8
LOGITS = (
    "{cause} needs the logits of all tokens, which trl computes by a second call of the model. Remove it, override "
    "compute_loss, or pass prediction_loss_only=True to predict. [logits-needed]"
)


_Function = trl.trainer.utils._ChunkedLogProbFunction


@torch.overrides.wrap_torch_function(lambda hidden, *_: (hidden,))
def chunked_log_probs(hidden: Any, *args: Any) -> Any:
    """Computes log-probabilities with trl's function. Modes of torch functions can intercept this call."""
    return _Function.apply(hidden, *args)


class _Traceable:
    apply = staticmethod(chunked_log_probs)


trl.trainer.utils._ChunkedLogProbFunction = _Traceable


class _Accelerator(transformers._Accelerator):
    """An Accelerator for losses that gather the values to log."""

    loss_device: torch.device | None = None
    _loss_group: Any = None  # the processes that compute losses, one of each replica

    @property
    def device(self) -> torch.device:
        device: torch.device = super().device
        return (self.loss_device if self.in_loss else None) or device

    def gather(self, tensor: Any) -> Any:
        """Gathers tensors. In a loss, gathers only from the processes that compute losses."""
        if not self.in_loss:
            return super().gather(tensor)
        if self.num_processes == 1:
            return tensor
        if self._loss_group is None:
            first, world = self.state.process_index % self.partitions, self.state.num_processes
            ranks = [*range(first, world, self.partitions)]
            self._loss_group = distributed.new_group(ranks, use_local_synchronization=True)

        def of_replicas(tensor: Tensor) -> Tensor:
            own = tensor.contiguous()[None] if tensor.dim() == 0 else tensor.contiguous()
            gathered = [torch.empty_like(own) for _ in range(self.num_processes)]
            distributed.all_gather(gathered, own, self._loss_group)
            return torch.cat(gathered)

        return recursively_apply(of_replicas, tensor)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepares a model as accelerate does. Returns a reference model unchanged, because it gets its own pipe."""
        if evaluation_mode and not device_placement:  # A reward model is placed.
            return model
        return super().prepare_model(model, device_placement, evaluation_mode)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces a tensor over replicas."""
        if self.state.num_processes == 1 or reduction not in ("sum", "mean"):
            return super().reduce(tensor, reduction, scale)
        return getattr(self.gather(tensor[None]), reduction)(0)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads the end of a tensor to the longest of all replicas. Outside a loss, pads as accelerate does."""
        if not self.in_loss:
            return super().pad_across_processes(tensor, dim, pad_index, pad_first)
        missing = int(self.gather(torch.tensor([tensor.shape[dim]], device=tensor.device)).max()) - tensor.shape[dim]
        return torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - dim - 1) + [0, missing], value=pad_index)


class _Pipelined(transformers.Pipelined):
    """The methods and attributes that both trainers share."""

    _metrics: dict[str, dict[str, list[float]]]
    _assigned_in_loss: Sequence[str] = ("_total_train_tokens",)  # attributes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if mistakes := [LOGITS.format(cause=f"{name}=") for name in self._arguments_that_need_logits()]:
            raise ValueError("\n".join(mistakes))

    def _arguments_that_need_logits(self) -> list[str]:
        return [name for name in ("compute_metrics", "compute_loss_func") if getattr(self, name, None) is not None]

    def _mistakes(self) -> list[str]:
        return [text for name, text in UNSUPPORTED.items() if getattr(self.args, name, None)]

    def create_accelerator_and_postprocess(self) -> None:
        if mistakes := self._mistakes():
            raise ValueError("\n".join(mistakes))
        self.args.activation_checkpointing = False  # trl's default is True; the pipe's `remat` replaces it
        if self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_disable()
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _Accelerator

    def _run_window(self, count: Any) -> Sequence[Tensor]:
        """Runs a step. With several processes, the last process of a replica sends its logged values to all."""
        if not self._has_processes:
            return super()._run_window(count)
        metrics, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        losses = super()._run_window(count)
        attributes = {name: getattr(self, name) for name in self._assigned_in_loss}
        message = json.dumps([attributes, self._metrics["train"]]).encode()
        reports = map(json.loads, self.accelerator.pipe.exchange(message))
        attributes, new_metrics = max(reports, key=lambda report: len(report[1]))
        set_attributes(self, attributes)
        for name, values in new_metrics.items():
            metrics[name] = values if name == "num_tokens" else metrics[name] + values
        self._metrics["train"] = metrics
        return losses

    def _loss_of(self, inputs: Sequence[Any], count: Any, output: Any, index: int) -> Tensor:
        self.accelerator.loss_device = find_device(output)
        return super()._loss_of(inputs, count, output, index)

    def _predict(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            raise ValueError(LOGITS.format(cause="This prediction"))
        return super()._predict(*args, **kwargs)


class GPipeSFTTrainer(_Pipelined, SFTTrainer):  # type: ignore[misc]  # untyped
    """`trl.SFTTrainer` on a pipe. See `gpipe.integrations.transformers.Pipelined` for the arguments."""

    def _arguments_that_need_logits(self) -> list[str]:
        smooths = self.args.label_smoothing_factor and self.args.loss_type == "nll"
        return super()._arguments_that_need_logits() + ["label_smoothing_factor"] * bool(smooths)


class _WithReference(_Pipelined):
    """The methods of trainers that compute log-probabilities of a reference model.

    Attributes:
        reference_pipe: The pipe of the reference model. None before the first call of the reference model, and if
            there is no reference model.
    """

    reference_pipe: gpipe.GPipe | None = None
    ref_model: Any
    aux_loss_enabled: bool
    _reference: Any = None

    def _run_reference(self, batches: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """Returns the outputs of the reference model. Without one, uses the model without its adapters."""
        if self._piped is not self.model:
            self._make_pipe({**batches[0], **self._router})
        if self._reference is None:
            with _initial_adapters(self.model) if is_peft_model(self.model) else nullcontext():
                return self._run_model(batches)
        inputs = [{name: value for name, value in batch.items() if name not in self._router} for batch in batches]
        self.reference_pipe = self.reference_pipe or self._pipe_of_reference(inputs[0])
        return self._without_gradients(self.reference_pipe, inputs)

    def _run_model(self, batches: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """Returns the outputs of the pipe for batches, without gradients."""
        counted = {transformers.COUNT: torch.ones(())} if transformers.COUNT in self._sample else {}
        inputs = [{**batch, **self._router, **counted} for batch in batches]
        return self._without_gradients(self.accelerator.pipe, inputs)

    def _without_gradients(self, pipe: gpipe.GPipe, inputs: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        outputs, most = list[Any](), pipe.micro_batches
        with torch.no_grad(), self.accelerator.autocast():
            for first in range(0, len(inputs), most):
                outputs += pipe(gpipe.MicroBatches(inputs[first : first + most]), gather=True)
        return [convert_to_fp32(output) for output in outputs] if self.args.mixed_precision != "no" else outputs

    @property
    def _router(self) -> dict[str, bool]:
        return {"output_router_logits": True} if self.aux_loss_enabled else {}

    def _pipe_of_reference(self, batch: Mapping[str, Any]) -> gpipe.GPipe:
        same = {name: self._settings[name] for name in ("devices", "driver") if name in self._settings}
        return gpipe.GPipe(
            self._reference.requires_grad_(False),
            partitions=self.accelerator.pipe.partitions,
            micro_batches=self.args.gradient_accumulation_steps,
            sample=gpipe.MicroBatches([batch]),
            seed=self.args.seed,
            **same,
        )


class GPipeDPOTrainer(_WithReference, DPOTrainer):  # type: ignore[misc]  # untyped
    """`trl.DPOTrainer` on a pipe, with a second pipe for the reference model. See `Pipelined` for the arguments."""

    precompute_ref_logps: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reference_outputs: Sequence[Any] = ()  # of the batches of this step
        self._reference_output: Any = None  # for the current loss
        super().__init__(*args, **kwargs)
        self._reference = self.ref_model
        if not self.precompute_ref_logps:
            self.ref_model = transformers._Model(self._reference or self.model, self._run_reference_once)

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        self._reference = self.ref_model
        self.ref_model = transformers._Model(model, self._run_reference_once)
        try:
            return super().compute_ref_log_probs(self.ref_model, inputs)
        finally:
            self.ref_model = self._reference

    def _run_window(self, count: Any) -> Sequence[Tensor]:
        if not self.precompute_ref_logps:
            self.accelerator.pipe.train()
            self._reference_outputs = self._run_reference([self._called_with(batch, count) for batch in self._window])
        return super()._run_window(count)

    def _loss_of(self, inputs: Sequence[Any], count: Any, output: Any, index: int) -> Tensor:
        if self._reference_outputs:
            self._reference_output = send_to_device(self._reference_outputs[index], find_device(output))
        return super()._loss_of(inputs, count, output, index)

    def _run_reference_once(self, **batch: Any) -> Any:
        return self._reference_output if self.accelerator.in_loss else self._run_reference([batch])[0]


class GPipeGRPOTrainer(_WithReference, GRPOTrainer):  # type: ignore[misc]  # untyped
    """`trl.GRPOTrainer` on a pipe, which also generates the completions. See `Pipelined` for the arguments.

    Each reward is computed once, also with several processes: by the first process of its replica.
    """

    _assigned_in_loss = ("entropy_coef", "_last_world_entropy")
    _step: int
    _train_batch_size: int
    model_wrapped: Any
    beta: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _make_forward_copyable(self.model.get_base_model() if is_peft_model(self.model) else self.model)
        # trl has seeded each process differently, but the processes of a replica draw the same random numbers.
        set_seed(self.args.seed + self.accelerator.process_index)
        self._reference = self.ref_model
        if self.beta and self._reference is None:
            self.ref_model = transformers._Model(self.model, self.model)  # the model without its adapters

    def _mistakes(self) -> list[str]:
        mistakes = [text for name, text in UNSUPPORTED_IN_GRPO.items() if getattr(self.args, name, None)]
        mistakes += [SAMPLE] * ("sample" in self._settings)
        mistakes += [IMAGES] * self._is_vlm
        embeddings, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if head is not None and head.weight is embeddings.weight:
            mistakes.append(TIED.format(kind=type(self.model).__name__))
        if self._has_processes:
            mistakes += [IN_EACH_PROCESS.format(name=name) for name, value in ONCE.items() if getattr(self, value)]
        return super()._mistakes() + mistakes

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        args, replicas = self.args, self.accelerator.num_processes
        # trl counts processes instead of replicas.
        args.generation_batch_size = args.per_device_train_batch_size * replicas * args.steps_per_generation
        product = "per_device_train_batch_size * replicas * steps_per_generation"
        sizes = {"num_generations": (product, args.generation_batch_size)}
        if args.eval_strategy != "no":
            product = "per_device_eval_batch_size * replicas"
            sizes["num_generations_eval"] = product, args.per_device_eval_batch_size * replicas
        if mistakes := [
            NOT_DIVISIBLE.format(name=name, count=count, product=product, size=size)
            for name, (product, size) in sizes.items()
            if size % (count := getattr(self, name))
        ]:
            raise ValueError("\n".join(mistakes))

    # Before a step.

    def _first_batch(self) -> Any:
        """Returns a batch of made-up tokens, because completions can be generated only after the pipe was created."""
        shape = self._train_batch_size, SAMPLE_TOKENS
        tokens = (torch.arange(shape[0] * shape[1]) % len(self._tokenizer)).view(shape)
        batch = {f"{part}_ids": tokens for part in ("prompt", "completion")}
        batch |= {f"{part}_mask": torch.ones_like(tokens) for part in ("prompt", "completion")}
        return {**batch, "advantages": torch.zeros(shape[0]), "num_items_in_batch": torch.tensor(tokens.numel())}

    def _run_window(self, count: Any) -> Sequence[Tensor]:
        """Generates completions for the batches of a step if trl would, and runs the step."""
        start, first, times = perf_counter(), self._step, self._metrics["train"]["step_time"][:]
        self.accelerator.pipe.train()
        for index, rows in enumerate(self._window):
            self._step = first + index
            self._window[index] = self._prepare_inputs(rows)
        losses = super()._run_window(count)
        self._step = first + len(self._window)
        if len(self._metrics["train"]["step_time"]) > len(times):  # trl has measured only the losses.
            self._metrics["train"]["step_time"] = [*times, perf_counter() - start]
        return losses

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self.accelerator.in_loss:  # `_run_window` has prepared the batch.
            return Trainer._prepare_inputs(self, generation_batch)
        return super()._prepare_inputs(generation_batch)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        training, wrapped, self.model_wrapped = self.model.training, self.model_wrapped, self.model
        try:
            with self._generating_by_pipe(in_one_process=True), self.accelerator.autocast():
                return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.model_wrapped = wrapped
            self.accelerator.pipe.train(training)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs all calls of the model or of the reference model as micro-batches, except in a loss."""
        compute = super()._get_per_token_logps_and_entropies
        if model is not self.model and model is not self.ref_model:  # in a loss
            return compute(model, *args, **kwargs)
        calls: list[Mapping[str, Any]] = []

        def note(**batch: Any) -> Any:
            calls.append(batch)
            return SimpleNamespace(log_probs=torch.zeros(batch["labels"][:, 1:].shape))

        compute(transformers._Model(model, note), *args, **kwargs)
        outputs = deque((self._run_model if model is self.model else self._run_reference)(calls))
        take = transformers._Model(model, lambda **_: send_to_device(outputs.popleft(), self.accelerator.device))
        return compute(take, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self._has_processes:
            return super()._generate_and_score_completions(inputs)
        functions = {"gather": lambda tensor: tensor, "gather_object": self._gather_object}
        originals = {name: vars(grpo_trainer)[name] for name in functions}
        set_attributes(grpo_trainer, functions)
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            set_attributes(grpo_trainer, originals)

    def _gather_object(self, values: Sequence[Any]) -> list[Any]:
        """Gathers lists from the first process of each replica."""
        return [*chain.from_iterable(gather_object([values])[:: self.accelerator.partitions])]

    def _calculate_rewards(self, *args: Any) -> Any:
        """Returns the rewards of all replicas. The first process of each replica computes its rewards."""
        if not self._has_processes:
            return super()._calculate_rewards(*args)
        partitions, report, raised = self.accelerator.partitions, None, None
        try:
            if self.args.process_index % partitions == 0:
                report = super()._calculate_rewards(*args).tolist()
        except Exception as error:
            report, raised = f"{type(error).__name__}: {error}", error
        reports = [*map(json.loads, self.accelerator.pipe.exchange(json.dumps(report).encode()))]
        if raised is not None:
            raise raised
        for rank, other in enumerate(reports):
            if isinstance(other, str):
                raise gpipe.RemoteError(f"rank {rank} failed: {other}", rank, other.partition(":")[0])
        rewards = [*chain.from_iterable(reports[::partitions])]
        return torch.tensor(rewards, dtype=torch.float32, device=self.accelerator.device)

    # In a step.

    def _loss_of(self, inputs: Sequence[Any], count: Any, output: Any, index: int) -> Tensor:
        state = self.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(index == len(inputs) - 1)  # trl logs and adapts the coefficient of the entropy
        try:
            return super()._loss_of(inputs, count, output, index)
        finally:
            state._set_sync_gradients(before)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        training = self.model.training
        self._prepare_pipe()  # Completions can be generated only by the pipe.
        self.accelerator.pipe.train(training)
        return super().prediction_step(*args, **kwargs)


def _make_forward_copyable(model: Any) -> None:
    """Replaces trl's forward, which calls this model in generation, also on a copy: stages run copies."""
    fused, original = model.forward.__func__, type(model).forward

    @wraps(original)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return fused(self, *args, fused_lm_head=True, **kwargs) if fused_lm_head else original(self, *args, **kwargs)

    model.forward = MethodType(forward, model)


@contextmanager
def _initial_adapters(model: Any) -> Iterator[None]:
    """Turns adapters off, or switches to trl's adapters "ref", which keep the weights from before training.

    Changes only the layers. If peft's settings of the model changed, gpipe would trace the model again.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    ]
    if not layers:
        raise ValueError(
            "The model has trained parts that cannot be turned off by layer, such as prompts, but DPO needs the "
            "model without them as a reference. Pass ref_model=<the model without them>. [reference-model-needed]"
        )
    active_adapters = [layer.active_adapters for layer in layers]
    has_reference = "ref" in model.peft_config
    for layer in layers:
        layer.set_adapter(["ref"], inference_mode=True) if has_reference else layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, active in zip(layers, active_adapters, strict=True):
            layer.set_adapter(active) if has_reference else layer.enable_adapters(True)
