"""trl's trainers over a pipe: `SFTTrainer` and `DPOTrainer`; see `gpipe.integrations.transformers`.

Both have a model compute log-probabilities of words in place of scores, by a function of autograd. That calls of it
can be seen, torch is told of them here; elsewhere nothing changes.

What a loss of DPO is told by the reference model is computed before the step, for all batches of it. That model is a
pipe of its own on the same devices; where adapters are trained, it is the same pipe, with the adapters turned off.
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
    raise ModuleNotFoundError("this needs trl: pip install 'gpipe[trl]'", name=error.name) from error

REFUSED = {
    "activation_offloading": "it would see nothing of what layers keep, in the pipe's threads; give remat=",
    "sync_ref_model": "the reference model is a frozen pipe; leave it out",
    "use_liger_kernel": "it changes the model after it was cut; leave it out",
}
SCORES = (
    "{what} asks for the scores of all words, which trl computes by calling the model once more in another way (and "
    "will not, from version 2 on): leave it out. Losses of one's own override compute_loss, and use what the model "
    "gives for fused_lm_head=True; to predict, give prediction_loss_only=True"
)

NO_ADAPTERS = (
    "the model has trained parts that cannot be turned off layer by layer, as prompts are, and its answers without "
    "them are the reference: give ref_model=, the model without them"
)

_Function = trl.trainer.utils._ChunkedLogProbFunction


@torch.overrides.wrap_torch_function(lambda hidden, *_: (hidden,))
def chunked_log_probs(hidden: Any, *args: Any) -> Any:
    """The log-probabilities, by trl's function, as one that torch shows to whoever listens."""
    return _Function.apply(hidden, *args)


class _Shown:
    apply = staticmethod(chunked_log_probs)


trl.trainer.utils._ChunkedLogProbFunction = _Shown


class _Accelerator(transformers._Accelerator):
    """That of a pipe, for losses that gather what they log."""

    loss_device: torch.device | None = None
    _last: Any = None  # the processes that compute losses, one of each replica

    @property
    def device(self) -> torch.device:
        found: torch.device = super().device
        return (self.loss_device if self.in_loss else None) or found

    def gather(self, tensor: Any) -> Any:
        """Gathers, in a loss, of the processes that compute losses."""
        if not self.in_loss:
            return super().gather(tensor)
        if self.num_processes == 1:
            return tensor
        if self._last is None:
            first, world = self.state.process_index % self.partitions, self.state.num_processes
            ranks = [*range(first, world, self.partitions)]
            self._last = distributed.new_group(ranks, use_local_synchronization=True)

        def of_replicas(tensor: Tensor) -> Tensor:
            own = tensor.contiguous()[None] if tensor.dim() == 0 else tensor.contiguous()
            found = [torch.empty_like(own) for _ in range(self.num_processes)]
            distributed.all_gather(found, own, self._last)
            return torch.cat(found)

        return recursively_apply(of_replicas, tensor)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """accelerate's, but for a reference model, which stays as it is: it gets a pipe of its own."""
        return model if evaluation_mode else super().prepare_model(model, device_placement)


class _Pipelined(transformers.Pipelined):
    """What both trainers need."""

    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if wrong := [SCORES.format(what=f"{name}=") for name in self._asking_for_scores()]:
            raise ValueError("\n".join(wrong))

    def _asking_for_scores(self) -> list[str]:
        return [name for name in ("compute_metrics", "compute_loss_func") if getattr(self, name, None) is not None]

    def create_accelerator_and_postprocess(self) -> None:
        if wrong := [
            f"{name}= is given, and {why}" for name, why in REFUSED.items() if getattr(self.args, name, None)
        ]:
            raise ValueError("\n".join(wrong))
        self.args.activation_checkpointing = False  # trl's default is on; the pipe's `remat` does that
        if self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_disable()
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _Accelerator

    def _run_window(self, count: Any) -> Sequence[Tensor]:
        """Over processes the last of each replica notes what is to be logged, and tells it to all."""
        if not self._apart:
            return super()._run_window(count)
        noted, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        losses = super()._run_window(count)
        mine = json.dumps([self._total_train_tokens, self._metrics["train"]])
        tokens, found = max(map(json.loads, self.accelerator.pipe.exchange(mine.encode())), key=lambda one: one[0])
        for name, values in found.items():
            noted[name] += values
        self._total_train_tokens, noted["num_tokens"] = tokens, [tokens]
        self._metrics["train"] = noted
        return losses

    def _loss_of(self, inputs: Sequence[Any], count: Any, output: Any, at: int) -> Tensor:
        self.accelerator.loss_device = find_device(output)
        return super()._loss_of(inputs, count, output, at)

    def _predict(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            raise ValueError(SCORES.format(what="this prediction"))
        return super()._predict(*args, **kwargs)


class GPipeSFTTrainer(_Pipelined, SFTTrainer):  # type: ignore[misc]  # untyped
    """`trl.SFTTrainer` through a pipe; see `gpipe.integrations.transformers.Pipelined` for its arguments."""

    def _asking_for_scores(self) -> list[str]:
        smooths = self.args.label_smoothing_factor and self.args.loss_type == "nll"
        return super()._asking_for_scores() + ["label_smoothing_factor"] * bool(smooths)


class GPipeDPOTrainer(_Pipelined, DPOTrainer):  # type: ignore[misc]  # untyped
    """`trl.DPOTrainer` through a pipe, its reference model through another; see `Pipelined` for its arguments.

    Attributes:
        reference_pipe: The pipe of the reference model, once it was asked; None where there is no such model.
    """

    reference_pipe: gpipe.GPipe | None = None
    precompute_ref_logps: bool
    ref_model: Any
    aux_loss_enabled: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reference: Any = None
        self._told: Sequence[Any] = ()  # what it gave for the batches of this step,
        self._now: Any = None  # and for the one whose loss is computed
        super().__init__(*args, **kwargs)
        self._reference = self.ref_model
        if not self.precompute_ref_logps:
            self.ref_model = transformers._Model(self._reference or self.model, self._ask_one)

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        self._reference = self.ref_model
        self.ref_model = transformers._Model(model, self._ask_one)
        try:
            return super().compute_ref_log_probs(self.ref_model, inputs)
        finally:
            self.ref_model = self._reference

    def _run_window(self, count: Any) -> Sequence[Tensor]:
        if not self.precompute_ref_logps:
            self.accelerator.pipe.train()
            self._told = self._ask([self._called_with(batch, count) for batch in self._window])
        return super()._run_window(count)

    def _loss_of(self, inputs: Sequence[Any], count: Any, output: Any, at: int) -> Tensor:
        if self._told:
            self._now = send_to_device(self._told[at], find_device(output))
        return super()._loss_of(inputs, count, output, at)

    def _ask_one(self, **batch: Any) -> Any:
        return self._now if self.accelerator.in_loss else self._ask([batch])[0]

    def _ask(self, batches: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """What the reference model gives; where there is none, what the model gives without its adapters."""
        routed = {"output_router_logits": True} if self.aux_loss_enabled else {}
        given = [{name: one[name] for name in one if name not in routed} for one in batches]
        if self._piped is not self.model:
            self._make_pipe({**given[0], **routed})
        adapters: Any = nullcontext()
        if self._reference is None:
            counted = {transformers.COUNT: torch.ones(())} if transformers.COUNT in self._sample else {}
            pipe, given = self.pipe, [{**one, **routed, **counted} for one in given]
            if is_peft_model(self.model):
                adapters = _as_at_first(self.model)
        else:
            pipe = self.reference_pipe = self.reference_pipe or self._pipe_of_reference(given[0])
        assert pipe is not None
        with torch.no_grad(), self.accelerator.autocast(), adapters:
            found: Sequence[Any] = pipe(gpipe.MicroBatches(given), gather=True)
        return [convert_to_fp32(one) for one in found] if self.args.mixed_precision != "no" else found

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
def _as_at_first(model: Any) -> Iterator[None]:
    """Turns adapters off, or to those that trl calls "ref", as they were before training.

    It is done in the layers alone: what peft notes in the model would make it another one to the pipe.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers: list[Any] = [
        one for one in model.modules() if isinstance(one, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    ]
    if not layers:
        raise ValueError(NO_ADAPTERS)
    before = [layer.active_adapters for layer in layers]
    has_first = "ref" in model.peft_config
    for layer in layers:
        layer.set_adapter(["ref"], inference_mode=True) if has_first else layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer.set_adapter(active) if has_first else layer.enable_adapters(True)
