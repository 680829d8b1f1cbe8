"""Refuses unknown arguments of `GPipe`, `step` and a call: names what to write instead of other libraries' words."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from gpipe.errors import entrance

P = ParamSpec("P")
R = TypeVar("R")

HOW_MANY = "micro_batches=, how many, not how many rows each has"
WORDS_OF_PIPES = {
    "chunks": "micro_batches=",
    "n_microbatches": "micro_batches=",
    "micro_batch_size": HOW_MANY,
    "batch_size": HOW_MANY,
    "num_stages": "partitions=",
    "num_partitions": "partitions=",
    "checkpoint": "remat='always', 'except_last', 'never' or how many micro-batches at once keep what is inside",
    "layers": "model=",
    "device_mesh": "mesh=, a DeviceMesh with a dimension 'pp'",
    "loss_fn": "to each step: pipe.step(inputs, targets, loss_fn)",
    "optimizer": "none to the pipe: make your own over pipe.parameters(), and step it after pipe.step(...)",
}
WORDS_OF_STEPS = {
    "labels": "targets=",
    "x": "inputs=",
    "input_ids": "all of the batch as one dict: pipe.step(batch)",
    "criterion": "loss_fn=",
    "chunks": "micro_batches= to GPipe itself",
    "optimizer": "none to the step: step your optimizer after it",
}
WORDS_OF_CALLS = {
    "x": "inputs=, or just pipe(x)",
    "mask": "one value: pipe({'x': x, 'mask': mask})",
    "targets": "it to pipe.step(inputs, targets, loss_fn)",
}
ENTRANCES = {
    "__init__": (
        WORDS_OF_PIPES,
        "give the layers as one: GPipe([layer, layer, ...], partitions, micro_batches), the rest by name",
    ),
    "step": (
        WORDS_OF_STEPS,
        "step takes (inputs, targets, loss_fn), the rest by name; several inputs are a tuple or a dict",
    ),
    "forward": (
        WORDS_OF_CALLS,
        "a pipe takes one value, as its first layer does; give several as a tuple, pipe((x, mask)), or a dict",
    ),
}
"""What is said at each entrance of a pipe for words of others, and for too many values."""


def checked_entrance(function: Callable[P, R]) -> Callable[P, R]:
    """An `entrance` that refuses unknown keywords, all at once, each with our word for it, and too many values.

    Where the function takes any keywords, they are those of a model's forward: of other pipes they are refused too.
    """
    words, too_many = ENTRANCES[function.__name__]
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes_any = len(known) < len(parameters)
    positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    @entrance
    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        pipe: Any = args[0]
        if not (takes_any and pipe.is_model) and (mistakes := _mistakes(kwargs, known, words)):
            raise TypeError("\n".join(mistakes))
        if len(args) > positional:
            raise TypeError(too_many)
        return function(*args, **kwargs)

    return called


def _mistakes(given: Mapping[str, object], known: list[str], words: Mapping[str, str]) -> list[str]:
    unknown = [word for word in given if word not in known]
    found = [f"there is no {word}=; {_instead(word, known, words)}" for word in unknown]
    if isinstance(balance := given.get("balance"), (list, tuple)):  # torchgpipe's word
        found.append(f"balance={balance!r}: give the layers of each partition as partitions=")
    if not all(word in words for word in unknown):
        found.append(f"known are {', '.join(name for name in known if name != 'self')}")
    return found


def _instead(word: str, known: list[str], words: Mapping[str, str]) -> str:
    close = [word] if word in words else get_close_matches(word, [*known, *words], 1)
    if not close:
        return "leave it out"
    return f"give {words[close[0]]}" if close[0] in words else f"give {close[0]}="
