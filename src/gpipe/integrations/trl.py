"""Runs trl's `SFTTrainer` and `DPOTrainer` on a pipe. See `gpipe.integrations.transformers`.

In both trainers, the model computes log-probabilities of tokens instead of logits, in an `autograd.Function`. This
module wraps the function so that gpipe can trace its calls. The wrapper has no other effect.

For DPO, the reference model runs before the step, for all batches of the step. The reference model is a separate pipe
on the same devices. If only adapters are trained, the reference model is the same pipe with the adapters turned off.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import convert_to_fp32, find_device, is_peft_model, recursively_apply, send_to_device
from torch import Tensor, distributed

import gpipe
from gpipe.integrations import transformers

try:
    import trl.trainer.utils
    from trl import DPOTrainer, SFTTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "trl is not installed. Run pip install '.[trl]' in a clone of the gpipe repository.", name=error.name
    ) from error

UNSUPPORTED = {
    "activation_offloading": "activation_offloading= is set, but cannot see the pipe's threads. Pass remat= instead.",
    "sync_ref_model": "sync_ref_model= is set, but the reference model is a frozen pipe. Remove it.",
    "use_liger_kernel": "use_liger_kernel= is set, but it would change the model after the split. Remove it.",
}
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
        return model if evaluation_mode else super().prepare_model(model, device_placement)


class _Pipelined(transformers.Pipelined):
    """The methods and attributes that both trainers share."""

    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if mistakes := [LOGITS.format(cause=f"{name}=") for name in self._arguments_that_need_logits()]:
            raise ValueError("\n".join(mistakes))

    def _arguments_that_need_logits(self) -> list[str]:
        return [name for name in ("compute_metrics", "compute_loss_func") if getattr(self, name, None) is not None]

    def create_accelerator_and_postprocess(self) -> None:
        if mistakes := [text for name, text in UNSUPPORTED.items() if getattr(self.args, name, None)]:
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
        message = json.dumps([self._total_train_tokens, self._metrics["train"]]).encode()
        reports = map(json.loads, self.accelerator.pipe.exchange(message))
        tokens, new_metrics = max(reports, key=lambda report: report[0])
        for name, values in new_metrics.items():
            metrics[name] += values
        self._total_train_tokens, metrics["num_tokens"] = tokens, [tokens]
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


class GPipeDPOTrainer(_Pipelined, DPOTrainer):  # type: ignore[misc]  # untyped
    """`trl.DPOTrainer` on a pipe, with a second pipe for the reference model. See `Pipelined` for the arguments.

    Attributes:
        reference_pipe: The pipe of the reference model. None before the first call of the reference model, and if
            there is no reference model.
    """

    reference_pipe: gpipe.GPipe | None = None
    precompute_ref_logps: bool
    ref_model: Any
    aux_loss_enabled: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reference: Any = None
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

    def _run_reference(self, batches: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """Returns the outputs of the reference model. Without one, uses the model without its adapters."""
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        inputs = [{name: value for name, value in batch.items() if name not in router} for batch in batches]
        if self._piped is not self.model:
            self._make_pipe({**inputs[0], **router})
        adapters: Any = nullcontext()
        if self._reference is None:
            counted = {transformers.COUNT: torch.ones(())} if transformers.COUNT in self._sample else {}
            pipe, inputs = self.pipe, [{**batch, **router, **counted} for batch in inputs]
            if is_peft_model(self.model):
                adapters = _initial_adapters(self.model)
        else:
            pipe = self.reference_pipe = self.reference_pipe or self._pipe_of_reference(inputs[0])
        assert pipe is not None
        with torch.no_grad(), self.accelerator.autocast(), adapters:
            outputs: Sequence[Any] = pipe(gpipe.MicroBatches(inputs), gather=True)
        return [convert_to_fp32(output) for output in outputs] if self.args.mixed_precision != "no" else outputs

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
