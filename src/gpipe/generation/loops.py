"""Runs the model's own `generate` for each micro-batch, paused at each forward.

`generate` calls the model for each new token and then chooses the token. In a pipe, `generate` calls a copy of the
model. The forward of this copy passes its arguments to the pipe and waits for the output. Each micro-batch therefore
has its own thread, a `Loop`. Only one of these threads runs at a time, while the pipe runs the forwards of other
micro-batches.

Note "Sampling": Without a pipe, `generate` samples for all rows at once. The first loop that needs random numbers of
`torch.multinomial` therefore draws them for all rows of the mini-batch. Each loop uses the numbers of its own rows.
"""

import copy
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipe.runtime.threads import NAME
from gpipe.stages.messages import Cancelled
from gpipe.stages.thread_state import ThreadState
from gpipe.tracing.runs import ForwardArguments

MODEL_NOT_CALLED = (
    "The generate method of {kind} calls only parts of the model. Create the pipe from the part that it calls, or "
    "call {kind}.generate without a pipe. [generate-skips-model]"
)
STATEFUL_SETTINGS = ("logits_processor", "stopping_criteria")
"""Settings that can have state. Each micro-batch has its own copy of these settings."""
BY_ROW = "prefix_allowed_tokens_fn"
"""A setting that receives the number of a row."""
ERROR_NOTE = (
    "in generate, outside of the model, with micro-batch {m} (rows {first} to {last}); each micro-batch has its own "
    "copies of logits processors and stopping criteria, which see only these rows"
)
LOGGER = "transformers.generation.utils"
"""The logger of `generate` in transformers."""
ENCODER = "_prepare_text_encoder_decoder_kwargs_for_generation"
"""The method of transformers that calls the encoder."""


class Noise:
    """Draws random numbers for all rows of a mini-batch (note "Sampling")."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows
        self._drawn: dict[int, Tensor] = {}
        self._next = [0] * len(rows)

    def take(self, m: int, weights: Tensor) -> Tensor:
        """Returns the random numbers for the next draw of micro-batch `m`, in the shape of `weights`."""
        number = self._next[m]
        self._next[m] += 1
        per_row = weights.shape[0] // self._rows[m]  # Beams or sequences per prompt.
        if number not in self._drawn:
            shape = sum(self._rows) * per_row, *weights.shape[1:]
            self._drawn[number] = torch.empty(shape, dtype=weights.dtype, device=weights.device).exponential_(1)
        first = sum(self._rows[:m]) * per_row
        noise = self._drawn[number][first : first + weights.shape[0]]
        for used in [draw for draw in self._drawn if draw < min(self._next)]:
            del self._drawn[used]
        return noise

    def end(self, m: int) -> None:
        """Frees the random numbers that only micro-batch `m` could still use."""
        self._next[m] = 1 << 62


class _SharedSampling(TorchFunctionMode):
    """Replaces `torch.multinomial` by an equal operation that uses the random numbers of the mini-batch."""

    def __init__(self, noise: Noise, m: int) -> None:
        super().__init__()
        self._noise, self._m = noise, m

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.multinomial, Tensor.multinomial):
            return self._draw(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _draw(self, input: Tensor, num_samples: int, replacement: bool = False, **other: Any) -> Tensor:
        if (replacement and num_samples > 1) or other or input.dim() != 2:
            return torch.multinomial(input, num_samples, replacement, **other)
        scores = input / self._noise.take(self._m, input)
        return scores.argmax(-1, keepdim=True) if num_samples == 1 else scores.topk(num_samples).indices


class Loop(threading.Thread):
    """A thread that runs `generate` for one micro-batch and pauses at each call of the model.

    Attributes:
        calls: The number of calls of the model so far.
        result: The result of `generate`, after it has returned.
    """

    def __init__(
        self, generate: Callable[["Loop"], Any], caller: ThreadState, threads: int, sampling: _SharedSampling
    ) -> None:
        super().__init__(name=f"{NAME}'s loop", daemon=True)
        self._outputs: SimpleQueue[tuple[Any] | None] = SimpleQueue()
        self._requests: SimpleQueue[ForwardArguments | BaseException | None] = SimpleQueue()
        self._generate, self._caller, self._threads, self._sampling = generate, caller, threads, sampling
        self.calls = 0
        self.result: Any = None

    def resume(self, output: Any = None) -> ForwardArguments | None:
        """Starts `generate`, or continues it with the output of the model.

        Returns:
            The arguments of the next call of the model. None if `generate` has returned.
        """
        if self.ident is None:
            self.start()
        else:
            self._outputs.put((output,))
        request = self._requests.get()
        if isinstance(request, BaseException):
            try:
                raise request
            finally:
                del request  # Its traceback refers to this frame, and to frames that hold a cache.
        return request

    def close(self) -> None:
        """Cancels `generate` if it has not returned."""
        if self.ident is not None:
            self._outputs.put(None)
            self.join()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the forward of the model that `generate` calls."""
        self.calls += 1
        self._requests.put(ForwardArguments(args, kwargs))
        if (output := self._outputs.get()) is None:
            raise Cancelled
        return output[0]

    def run(self) -> None:
        """Runs `generate` in this thread."""
        torch.get_num_threads()  # Otherwise the thread would later adopt the global thread count.
        torch.set_num_threads(self._threads)
        try:
            with self._caller.rank_thread(), self._caller.around_layers(), self._sampling:
                self.result = self._generate(self)
            self._requests.put(None)
        except Cancelled:
            self._requests.put(Cancelled())  # A new exception, because the frames of this one hold a cache.
        except BaseException as error:
            self._requests.put(error)


@contextmanager
def warned_once() -> Iterator[None]:
    """Logs each warning of `generate` only once, although each loop emits it."""
    logger = vars(logging.getLogger(LOGGER))
    logger["warning"] = cache(logging.getLogger(LOGGER).warning)
    try:
        yield
    finally:
        logger.pop("warning", None)


def loops_of(
    model: nn.Module,
    parts: Sequence[Mapping[str, Any]],
    rows: Sequence[int],
    settings: Mapping[str, Any],
    threads: int,
) -> list[Loop]:
    """Creates a loop for each micro-batch.

    Args:
        model: A model that has `generate`.
        parts: The prompts of each micro-batch.
        rows: The number of prompts of each micro-batch.
        settings: The arguments of `generate` that all micro-batches share.
        threads: The number of CPU threads that an operation uses in a loop.
    """
    caller, noise = ThreadState.here(), Noise(rows)
    get_base = getattr(model, "get_base_model", None)  # A model of peft.
    base = get_base() if get_base is not None else model

    def generate(m: int, loop: Loop) -> Any:
        first, arguments = sum(rows[:m]), {**parts[m], **settings}
        if (allowed := settings.get(BY_ROW)) is not None:
            arguments[BY_ROW] = lambda row, tokens: allowed(first + row, tokens)
        try:
            arguments |= {name: copy.deepcopy(settings[name]) for name in STATEFUL_SETTINGS if name in settings}
            prompts = [arguments.pop("inputs")] if "inputs" in arguments else []  # Models name this argument freely.
            result = with_forward(base, loop.call, _device_of(parts[m])).generate(*prompts, **arguments)
        except Exception as error:
            error.add_note(ERROR_NOTE.format(m=m, first=first, last=first + rows[m] - 1))
            raise
        finally:
            noise.end(m)
        if not loop.calls:
            raise ValueError(MODEL_NOT_CALLED.format(kind=type(base).__name__))
        return result

    return [Loop(partial(generate, m), caller, threads, _SharedSampling(noise, m)) for m in range(len(parts))]


def _device_of(part: Mapping[str, Any]) -> torch.device:
    return next((value.device for value in part.values() if isinstance(value, Tensor)), torch.device("cpu"))


def with_forward(model: Any, call: Callable[..., Any], device: torch.device) -> Any:
    """Returns a shallow copy of a model with a different forward and device.

    Args:
        model: The model.
        call: The function that replaces the forward.
        device: The device that the copy reports.
    """

    @wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    cls = type(model)
    attributes = {"device": property(lambda _: device), "__module__": cls.__module__}
    attributes["_supports_mm_encoder_outputs"] = lambda _: False
    if hasattr(model, ENCODER):
        attributes[ENCODER] = _encode
    copied = copy.copy(model)
    copied.__class__ = type(cls.__name__, (cls,), attributes)
    object.__setattr__(copied, "__dict__", {**vars(model), "forward": forward})
    return copied


def _encode(
    model: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any], model_input_name: str, generation_config: Any
) -> dict[str, Any]:
    """Runs the encoder in the pipe, in a forward of the whole model with the first token of the output."""
    from transformers.modeling_outputs import BaseModelOutput, MoEModelOutput

    parameters = inspect.signature(model.forward).parameters
    begin = generation_config._decoder_start_token_tensor.to(inputs_tensor.device)
    of_encoder = {name for name in parameters if not name.startswith(("decoder", "labels"))}
    arguments = {name: value for name, value in model_kwargs.items() if name in of_encoder}
    arguments |= {model_input_name: inputs_tensor, "use_cache": False, "return_dict": True}
    arguments["decoder_input_ids"] = begin.reshape(-1, 1)[:1].expand(len(inputs_tensor), 1).contiguous()
    output = model(**arguments)
    kind: Any = MoEModelOutput if hasattr(output, "encoder_router_logits") else BaseModelOutput
    return {**model_kwargs, "encoder_outputs": kind(last_hidden_state=output.encoder_last_hidden_state)}
