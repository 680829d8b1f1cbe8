"""Refuses unknown arguments of `GPipe`, `step` and a call: names what to write instead of other libraries' words."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from gpipe.errors import folded, innermost_code

P = ParamSpec("P")
R = TypeVar("R")

AT_STEP = "to each step: pipe.step(inputs, targets, loss_fn)"

WORDS_OF_PIPES: Mapping[str, str] = {
    **dict.fromkeys(("chunks", "n_microbatches", "gradient_accumulation_steps"), "micro_batches="),
    **dict.fromkeys(("micro_batch_size", "batch_size"), "micro_batches=, how many, not how many rows each has"),
    **dict.fromkeys(("num_stages", "num_partitions", "pp_size"), "partitions="),
    **dict.fromkeys(("split_spec", "partition_method"), "partitions=, the number of layers of each"),
    **dict.fromkeys(
        ("checkpoint", "activation_checkpointing", "gradient_checkpointing"),
        "remat='always', 'except_last', 'never' or how many micro-batches at once keep what is inside",
    ),
    **dict.fromkeys(("module", "layers"), "model="),
    **dict.fromkeys(("process_group", "device_mesh"), "mesh=, a DeviceMesh with a dimension 'pp'"),
    **dict.fromkeys(("loss_fn", "criterion", "reduction", "scale", "scaler"), AT_STEP),
    "optimizer": "none to the pipe: make your own over pipe.parameters(), and step it after pipe.step(...)",
    "example_inputs": "sample=",
}
WORDS_OF_STEPS: Mapping[str, str] = {
    "labels": "targets=",
    **dict.fromkeys(("x", "batch", "data"), "inputs="),
    **dict.fromkeys(("input_ids", "attention_mask"), "all of the batch as one dict: pipe.step(batch)"),
    "criterion": "loss_fn=",
    **dict.fromkeys(("chunks", "n_microbatches"), "micro_batches= to GPipe itself"),
    "optimizer": "none to the step: step your optimizer after it",
    "losses": "none: the loss is what step returns",
    "return_outputs": "none: have loss_fn return (loss, output), and step returns both",
}
WORDS_OF_CALLS: Mapping[str, str] = {
    **dict.fromkeys(("x", "batch", "data"), "inputs=, or just pipe(x)"),
    **dict.fromkeys(("mask", "attention_mask", "input_ids"), "one value: pipe({'x': x, 'mask': mask})"),
    **dict.fromkeys(("targets", "labels", "loss_fn"), "it to pipe.step(inputs, targets, loss_fn)"),
}

TOO_MANY_FOR_PIPES = "give the layers as one: GPipe([layer, layer, ...], partitions, micro_batches), the rest by name"
TOO_MANY_FOR_STEPS = "step takes (inputs, targets, loss_fn), the rest by name; several inputs are a tuple or a dict"
TOO_MANY_FOR_CALLS = (
    "a pipe takes one value, as its first layer does; give several as a tuple, pipe((x, mask)), or a dict"
)


def checked_entrance(
    words: Mapping[str, str], too_many: str, unless: Callable[[Any], bool] = lambda pipe: False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """An `entrance` that refuses unknown keywords, all at once, each with our word for it, and too many values.

    It takes any of those pipes that `unless` says it of.
    """

    def read(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        code = innermost_code(function)
        positional = sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                unknown = not kwargs.keys() <= {*known} and not unless(args[0])
                if unknown or _is_layer_counts(kwargs.get("balance")):
                    raise TypeError("\n".join(_mistakes(kwargs, known, words)))
                if len(args) > positional:
                    raise TypeError(too_many)
                return function(*args, **kwargs)
            except BaseException as error:
                error.__traceback__ = folded(error, code)
                raise

        return called

    return read


def _mistakes(given: Mapping[str, object], known: list[str], words: Mapping[str, str]) -> list[str]:
    unknown = [word for word in given if word not in known]
    found = [f"there is no {word}=; {_instead(word, known, words)}" for word in unknown]
    if _is_layer_counts(balance := given.get("balance")):  # torchgpipe's word
        found.append(f"balance={balance!r}: give the layers of each partition as partitions=")
    if not all(word in words for word in unknown):
        found.append(f"known are {', '.join(name for name in known if name != 'self')}")
    return found


def _is_layer_counts(balance: object) -> bool:
    return isinstance(balance, (list, tuple)) and all(isinstance(count, int) for count in balance)


def _instead(word: str, known: list[str], words: Mapping[str, str]) -> str:
    close = [word] if word in words else get_close_matches(word, [*known, *words], 1)
    if not close:
        return "leave it out"
    return f"give {words[close[0]]}" if close[0] in words else f"give {close[0]}="
