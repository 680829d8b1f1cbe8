"""Refuses unknown arguments of `GPipe`, `step` and a call: names what to write instead of other libraries' words."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

M = "micro_batches=, M, how many micro-batches"
K = "partitions=, K, or the number of layers of each"
REMAT = "remat='always', 'except_last', 'never' or how many micro-batches at once keep what is inside"
NO_ROWS = "micro_batches=, how many micro-batches, not how many rows each has"
AT_STEP = "to each step: pipe.step(inputs, targets, loss_fn, {}=...)"
THE_LOSS = "to each step: pipe.step(inputs, targets, loss_fn)"
OPTIMIZER = "none to the pipe: make your own over pipe.parameters(), and step it after pipe.step(...)"

WORDS_OF_PIPES: Mapping[str, str] = {
    **dict.fromkeys(("chunks", "n_microbatches", "num_microbatches", "num_micro_batches", "n_micro_batches"), M),
    **dict.fromkeys(("microbatches", "micro_batch", "microbatch", "num_chunks", "n_chunks", "M", "m"), M),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps", "grad_accum_steps"), M),
    **dict.fromkeys(("micro_batch_size", "microbatch_size", "batch_size", "chunk_size"), NO_ROWS),
    **dict.fromkeys(("num_stages", "n_stages", "stages", "num_partitions", "n_partitions", "nparts", "K", "k"), K),
    **dict.fromkeys(("pp", "pp_size", "pipeline_parallel_size", "num_pipeline_stages", "partition", "split"), K),
    **dict.fromkeys(("split_spec", "split_points", "partition_method", "cuts"), K),
    **dict.fromkeys(("checkpoint", "checkpointing", "activation_checkpointing", "recompute"), REMAT),
    **dict.fromkeys(("gradient_checkpointing", "rematerialization", "rematerialize", "use_checkpoint"), REMAT),
    **dict.fromkeys(("module", "modules", "layers", "net", "network", "layer"), "model="),
    **dict.fromkeys(("device", "device_ids", "gpus"), "devices=, one for each partition, or one for all"),
    **dict.fromkeys(("example_input", "example_inputs", "sample_input", "sample_inputs", "input_sample"), "sample="),
    **dict.fromkeys(("group", "process_group", "pg", "device_mesh"), "mesh=, a DeviceMesh with a dimension 'pp'"),
    **dict.fromkeys(("sync_bn", "sync_batchnorm"), "sync_batch_norm="),
    **dict.fromkeys(("deferred_batchnorm", "deferred_bn"), "deferred_batch_norm="),
    **dict.fromkeys(("num_threads", "threads", "n_threads"), "intra_op_threads="),
    **dict.fromkeys(("backend", "engine", "mode"), "driver='threads', 'lockstep' or 'process'"),
    **dict.fromkeys(("loss_fn", "loss", "criterion", "loss_function", "output_fn"), THE_LOSS),
    **{word: AT_STEP.format(word) for word in ("reduction", "scale", "scaler")},
    **dict.fromkeys(("optimizer", "optim", "lr"), OPTIMIZER),
    "random_seed": "seed=",
    "tied": "ties=, names of parameters that are one",
}
WORDS_OF_STEPS: Mapping[str, str] = {
    **dict.fromkeys(("target", "labels", "label", "y"), "targets="),
    **dict.fromkeys(("input", "x", "batch", "data"), "inputs="),
    **dict.fromkeys(
        ("input_ids", "attention_mask", "pixel_values"), "all of the batch as one dict: pipe.step(batch)"
    ),
    **dict.fromkeys(("loss", "criterion", "loss_function", "loss_func"), "loss_fn="),
    **dict.fromkeys(("grad_scaler", "gradscaler"), "scaler="),
    **dict.fromkeys(("loss_scale", "grad_scale"), "scale="),
    **dict.fromkeys(("chunks", "micro_batches", "n_microbatches"), "micro_batches= to GPipe itself"),
    **dict.fromkeys(("optimizer", "optim", "lr"), "none to the step: step your optimizer after it"),
    "losses": "none: the loss is what step returns",
    "return_outputs": "none: have loss_fn return (loss, output), and step returns both",
    "weights": "reduction=, a function of a micro-batch's target",
}
WORDS_OF_CALLS: Mapping[str, str] = {
    **dict.fromkeys(("x", "input", "batch", "data"), "inputs=, or just pipe(x)"),
    **dict.fromkeys(("mask", "attention_mask", "input_ids", "src", "tgt"), "one value: pipe({'x': x, 'mask': mask})"),
    **dict.fromkeys(("targets", "target", "labels", "loss_fn"), "it to pipe.step(inputs, targets, loss_fn)"),
}


TOO_MANY_FOR_PIPES = "give the layers as one: GPipe([layer, layer, ...], partitions, micro_batches), the rest by name"
TOO_MANY_FOR_STEPS = "step takes (inputs, targets, loss_fn), the rest by name; several inputs are a tuple or a dict"
TOO_MANY_FOR_CALLS = (
    "a pipe takes one value, as its first layer does; give several as a tuple, pipe((x, mask)), or a dict"
)


def refuse_unknown(
    words: Mapping[str, str], too_many: str, unless: Callable[[Any], bool] = lambda pipe: False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Has a method refuse unknown keywords, all at once, each with our word for it, and too many values.

    It takes any of those pipes that `unless` says it of.
    """

    def read(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        positional = sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            known = kwargs.keys() <= parameters.keys() or unless(args[0])
            if not known or _is_counts(kwargs.get("balance")):
                raise TypeError(
                    "\n".join(
                        _mistakes(
                            kwargs,
                            [n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD],
                            words,
                        )
                    )
                )
            if len(args) > positional:
                raise TypeError(too_many)
            return function(*args, **kwargs)

        return called

    return read


def _mistakes(given: Mapping[str, object], known: list[str], words: Mapping[str, str]) -> list[str]:
    unknown = [word for word in given if word not in known]
    found = [f"there is no {word}=; {_instead(word, known, words)}" for word in unknown]
    if _is_counts(given.get("balance")):
        found.append(f"balance={given['balance']!r}: give the layers of each partition as partitions=")
    if not all(word in words for word in unknown):
        found.append(f"known are {', '.join(name for name in known if name != 'self')}")
    return found


def _is_counts(balance: object) -> bool:
    return isinstance(balance, (list, tuple)) and bool(balance) and all(isinstance(count, int) for count in balance)


def _instead(word: str, known: list[str], words: Mapping[str, str]) -> str:
    close = [word] if word in words else get_close_matches(word, [*known, *words], 1)
    if not close:
        return "leave it out"
    return f"give {words[close[0]]}" if close[0] in words else f"give {close[0]}="
