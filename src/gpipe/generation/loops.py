"""The loops of `generate`, one for each micro-batch, which a pipe calls in turn.

A model's own `generate` calls the model for each new token, and chooses the token of what comes back. Here it calls
a copy of the model, whose forward hands the arguments over and waits for the output. So each loop has a thread, of
which one at a time runs, while whoever has it go on waits; the pipe has forwards of others on their way meanwhile.

Note "Draws". A model by itself draws for all rows at once. So what `torch.multinomial` draws is drawn here for all
rows of the mini-batch, by whichever loop comes to it first, and each takes its own rows.
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

PARTLY = (
    "generate of the {kind} does not call the model but parts of it, which are not in a pipe: generate by the model "
    "itself, or make the pipe of the part that generates"
)
COUNTING = ("logits_processor", "stopping_criteria")
"""Settings that may count what they have seen: each micro-batch has its own."""
BY_ROW = "prefix_allowed_tokens_fn"
"""A setting that is asked by the number of a row."""
BESIDE = (
    "in generate, outside of the model, with micro-batch {m} (rows {first} to {last}): each has copies of its own of "
    "processors and criteria, which see its rows alone"
)
SAYS = "transformers.generation.utils"
"""The logger of what `generate` of transformers says."""
ENCODER = "_prepare_text_encoder_decoder_kwargs_for_generation"


class Noise:
    """What is drawn for all rows of a mini-batch (note "Draws")."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows
        self._drawn: dict[int, Tensor] = {}
        self._next = [0] * len(rows)

    def take(self, m: int, weights: Tensor) -> Tensor:
        """The noise for the weights of a micro-batch, whose next draw this is."""
        number = self._next[m]
        self._next[m] += 1
        each = weights.shape[0] // self._rows[m]  # beams, or sequences, of each row
        if number not in self._drawn:
            shape = sum(self._rows) * each, *weights.shape[1:]
            self._drawn[number] = torch.empty(shape, dtype=weights.dtype, device=weights.device).exponential_(1)
        first = sum(self._rows[:m]) * each
        taken = self._drawn[number][first : first + weights.shape[0]]
        for done in [one for one in self._drawn if one < min(self._next)]:
            del self._drawn[done]
        return taken

    def end(self, m: int) -> None:
        self._next[m] = 1 << 62


class _Draws(TorchFunctionMode):
    """Draws as `torch.multinomial` does, with the noise of the mini-batch."""

    def __init__(self, noise: Noise, m: int) -> None:
        super().__init__()
        self._noise, self._m = noise, m

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in (torch.multinomial, Tensor.multinomial):
            return self._draw(*args, **given)
        return func(*args, **given)

    def _draw(self, input: Tensor, num_samples: int, replacement: bool = False, **other: Any) -> Tensor:
        if (replacement and num_samples > 1) or other or input.dim() != 2:
            return torch.multinomial(input, num_samples, replacement, **other)
        scores = input / self._noise.take(self._m, input)
        return scores.argmax(-1, keepdim=True) if num_samples == 1 else scores.topk(num_samples).indices


class Loop(threading.Thread):
    """The `generate` of one micro-batch, up to where it calls the model, again and again."""

    def __init__(self, generate: Callable[["Loop"], Any], around: ThreadState, threads: int, draws: _Draws) -> None:
        super().__init__(name=f"{NAME}'s loop", daemon=True)
        self._given: SimpleQueue[tuple[Any] | None] = SimpleQueue()
        self._asked: SimpleQueue[ForwardArguments | BaseException | None] = SimpleQueue()
        self._generate, self._around, self._threads, self._draws = generate, around, threads, draws
        self.calls = 0
        self.result: Any = None

    def go_on(self, output: Any = None) -> ForwardArguments | None:
        """Has it go on with an output, or begin; gives what it calls the model with next, None at its end."""
        if self.ident is None:
            self.start()
        else:
            self._given.put((output,))
        asked = self._asked.get()
        if isinstance(asked, BaseException):
            try:
                raise asked
            finally:
                del asked  # its traceback holds this frame, and frames that hold a cache
        return asked

    def close(self) -> None:
        if self.ident is not None:
            self._given.put(None)
            self.join()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model, as the loop sees it."""
        self.calls += 1
        self._asked.put(ForwardArguments(args, kwargs))
        if (given := self._given.get()) is None:
            raise Cancelled
        return given[0]

    def run(self) -> None:
        torch.get_num_threads()  # else it would take on the global number later on
        torch.set_num_threads(self._threads)
        try:
            with self._around.rank_thread(), self._around.around_layers(), self._draws:
                self.result = self._generate(self)
            self._asked.put(None)
        except Cancelled:
            self._asked.put(Cancelled())  # another, without frames: they hold a cache
        except BaseException as error:
            self._asked.put(error)


@contextmanager
def said_once() -> Iterator[None]:
    """Has all loops of a call say the same only once."""
    logger = vars(logging.getLogger(SAYS))
    logger["warning"] = cache(logging.getLogger(SAYS).warning)
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
    """A loop for each micro-batch of a model that has `generate`."""
    around, noise = ThreadState.here(), Noise(rows)
    get_base = getattr(model, "get_base_model", None)  # of peft's
    generating = get_base() if get_base is not None else model

    def generate(m: int, loop: Loop) -> Any:
        first, given = sum(rows[:m]), {**parts[m], **settings}
        if (allowed := settings.get(BY_ROW)) is not None:
            given[BY_ROW] = lambda row, words: allowed(first + row, words)
        try:
            given |= {name: copy.deepcopy(settings[name]) for name in COUNTING if name in settings}
            prompts = [given.pop("inputs")] if "inputs" in given else []  # may have another name there
            found = standing_in(generating, loop.call, _device_of(parts[m])).generate(*prompts, **given)
        except Exception as error:
            error.add_note(BESIDE.format(m=m, first=first, last=first + rows[m] - 1))
            raise
        finally:
            noise.end(m)
        if not loop.calls:
            raise ValueError(PARTLY.format(kind=type(generating).__name__))
        return found

    return [Loop(partial(generate, m), around, threads, _Draws(noise, m)) for m in range(len(parts))]


def _device_of(part: Mapping[str, Any]) -> torch.device:
    return next((value.device for value in part.values() if isinstance(value, Tensor)), torch.device("cpu"))


def standing_in(model: Any, call: Callable[..., Any], device: torch.device) -> Any:
    """What is the model but for its forward, which is this function, and its device."""

    @wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    kind = type(model)
    own = {"device": property(lambda _: device), "__module__": kind.__module__}
    own["_supports_mm_encoder_outputs"] = lambda _: False
    if hasattr(model, ENCODER):
        own[ENCODER] = _encoded
    made = copy.copy(model)
    made.__class__ = type(kind.__name__, (kind,), own)
    object.__setattr__(made, "__dict__", {**vars(model), "forward": forward})
    return made


def _encoded(
    model: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any], model_input_name: str, generation_config: Any
) -> dict[str, Any]:
    """Has the pipe encode: by a forward of the whole model, on the first word of what is to be decoded."""
    from transformers.modeling_outputs import BaseModelOutput, MoEModelOutput

    taken = inspect.signature(model.forward).parameters
    begin = generation_config._decoder_start_token_tensor.to(inputs_tensor.device)
    encoded = {name for name in taken if not name.startswith(("decoder", "labels"))}
    given = {name: value for name, value in model_kwargs.items() if name in encoded}
    given |= {model_input_name: inputs_tensor, "use_cache": False, "return_dict": True}
    given["decoder_input_ids"] = begin.reshape(-1, 1)[:1].expand(len(inputs_tensor), 1).contiguous()
    output = model(**given)
    kind: Any = MoEModelOutput if hasattr(output, "encoder_router_logits") else BaseModelOutput
    return {**model_kwargs, "encoder_outputs": kind(last_hidden_state=output.encoder_last_hidden_state)}
