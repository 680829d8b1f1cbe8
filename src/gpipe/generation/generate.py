"""Runs `generate` through a pipe, one token per micro-batch and forward.

The following example has two ranks, and two micro-batches with the tokens a b c and x y z::

    rank 0   a x b y c z
    rank 1     a x b y c z

In each round, a rank runs its stages for all micro-batches that have not ended. The rank is never idle if M is at
least K. In one process, the rank of the first stage resumes the loops that choose the tokens. With several processes,
each process runs all loops and receives all outputs.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from gpipe._torch.modes import as_rank, intra_op_threads
from gpipe._torch.trees import map_tensors
from gpipe.batch.inputs import split_alike
from gpipe.batch.microbatch import merge
from gpipe.generation.caches import Place, bytes_of, fingerprints, grow, layers_in
from gpipe.generation.loops import Loop, loops_of, warned_once
from gpipe.generation.paths import KEY, Path, StagedForward, cache_in, dry_forward, find_path
from gpipe.runtime.context import Context
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.schedule.action import Action
from gpipe.schedule.schedules import forward_only_table
from gpipe.stages.boundary import BoundaryValue
from gpipe.stages.messages import Cancelled, Control, Label
from gpipe.stages.stage import LayerProgress
from gpipe.stages.thread_state import ThreadState
from gpipe.stages.tree import tensors_in
from gpipe.tracing.meta_model import zeros
from gpipe.tracing.model import TracedModel
from gpipe.tracing.runs import ForwardArguments
from gpipe.tracing.trace import take_apart

PROCESSES_DIFFER = (
    "Rank {rank} chose different tokens than the rank before it, so their arguments or random numbers differ. Pass "
    "the same arguments and seeds in all processes. [generation-differs-between-processes]"
)
NO_GENERATE = (
    "The pipe was created from {kind}, which has no generate method. Create it from a model of transformers. "
    "[model-without-generate]"
)
TRAINING_MODE = (
    "The pipe is in training mode, in which dropout changes the tokens. Call pipe.eval() first. "
    "[generate-in-training-mode]"
)
HOST_WEIGHTS = (
    "generate(): the weights of this pipe are on the host, and each token would copy them to the devices. Use a pipe "
    "with weights='device'. [host-weights-cannot-generate]"
)
MAX_TIME = (
    "max_time= is not supported with several processes, because each has its own clock. Use max_new_tokens=. "
    "[generate-option-not-supported]"
)
PROMPT_LEARNING = (
    "The model has prompts that peft has learned, which only its own generate adds to the inputs. Call generate of "
    "the model itself. [generate-with-learned-prompts]"
)
FIXED_CACHE = (
    "cache_implementation={implementation!r} is not supported with several processes. Use "
    "cache_implementation='dynamic'. [generate-option-not-supported]"
)
NO_LENGTH = (
    "cache_bytes() got neither max_new_tokens= nor max_length=, on which the size of the cache depends. Pass one of "
    "them."
)
CACHE_IMPLEMENTATION, PREFILL_CHUNKS = "cache_implementation", "prefill_chunk_size"
UNSUPPORTED = {
    "assistant_early_exit": "it skips layers, which are in different stages. Call model.generate without a pipe",
    "assistant_model": "a pipe has only one model. Call model.generate without a pipe",
    "past_key_values": "each rank creates the cache of its own layers. Remove it",
    "return_dict_in_generate": "a pipe returns only the tokens of all micro-batches. Remove it",
    "streamer": "the tokens of several micro-batches arrive in turns. Call model.generate without a pipe",
}
"""Arguments of a model's `generate` that a pipe rejects, with the reason and a fix."""


class Generation:
    """One call of `generate` in one process."""

    def __init__(
        self,
        stages: PipelineStages,
        traced: TracedModel,
        context: Context,
        paths: dict[object, Path],
        loops: Sequence[Loop],
    ) -> None:
        self._stages, self._traced, self._context, self._paths, self._loops = stages, traced, context, paths, loops
        self._one_process = stages.pp_rank is None
        in_turn = self._one_process and not stages.threaded
        self._placement = (0,) * len(stages.all) if in_turn else tuple(stages.placement)
        self._table = forward_only_table(self._placement, len(loops))
        self._caller = ThreadState.here()
        self._forwards: dict[int, StagedForward | None] = {}  # The next forward of each loop; None after its end.
        self._local_messages: dict[tuple[int, Label], Any] = {}  # Messages between stages of the same rank.
        self._idle = threading.Condition()
        self._busy = 0  # Ranks that are running layers.

    def run(self) -> list[Any]:
        """Runs all loops to their end, and returns their results."""
        stages = self._stages
        threads_before = torch.get_num_threads()
        stages.threads.generation_threads = self._loops
        try:
            for stage in stages.local:
                stage.begin()
            if stages.threaded and self._one_process:
                jobs = [partial(self._run_rank, rank) for rank in range(max(self._placement) + 1)]
                stages.threads.run(jobs, self._context.cancel)
            else:
                with intra_op_threads(stages.intra_op_threads):
                    self._run_rank(stages.pp_rank or 0)
        finally:
            for loop in self._loops:
                loop.close()
            stages.threads.generation_threads = ()
            torch.set_num_threads(threads_before)  # A loop also sets the default of threads that start later.
        return [loop.result for loop in self._loops]

    def _run_rank(self, rank: int) -> None:
        """Runs the forwards of one rank, round after round, until all micro-batches have ended."""
        row, alive = self._table[rank], set(range(len(self._loops)))
        resumes_loops = not self._one_process or rank == self._placement[0]
        with self._caller.rank_thread(), as_rank():
            for round_number in count():
                self._context.reach(round_number)
                ended, resumed = set[int](), set[int]()
                for action in row:
                    m = _micro_batch_of(action)
                    if m not in alive:
                        continue
                    if self._context.cancelled:
                        raise Cancelled
                    if resumes_loops and m not in resumed:
                        resumed.add(m)
                        self._resume(rank, m, begins=round_number == 0)
                    if not self._forward(rank, action):
                        ended.add(m)
                alive -= ended
                if not alive:
                    return

    def _resume(self, rank: int, m: int, *, begins: bool) -> None:
        """Passes the output of a micro-batch to its loop, and stores the loop's next forward."""
        output = None
        if not begins:
            result = self._receive(rank, self._placement[-1], Control.OUTPUT, m)
            forward = self._forwards[m]
            assert forward is not None
            output = forward.output if self._one_process else forward.end(self._own_places(forward.path), result)
        arguments = self._loops[m].resume(output)
        self._forwards[m] = None if arguments is None else StagedForward.begin(self._path(arguments), arguments)

    def _forward(self, rank: int, action: Action) -> bool:
        """Runs a stage and sends the result to the next stage. Returns False if the micro-batch has ended."""
        m, index, stage = _micro_batch_of(action), action.stage, self._stages.all[action.stage]
        received = self._receive(rank, self._placement[index - 1], Control.DECODED, m) if index else None
        # In one process, stages pass the forward itself: the first rank may already have stored the next one.
        forward: StagedForward | None = received if index and self._one_process else self._forwards[m]
        if index and not self._one_process:
            checksum = None if forward is None else _checksum(forward)
            if checksum != (None if received is None else received["checksum"]):
                raise ValueError(PROCESSES_DIFFER.format(rank=rank))
            if forward is not None:
                forward.receive(stage.layers[0].index, received)
        if forward is not None:
            self._run_layers(forward, stage, m)
        if index + 1 < len(self._placement):
            message: Any = forward
            if forward is not None and not self._one_process:
                message = {**forward.message(), "checksum": _checksum(forward)}
            self._send(rank, self._placement[index + 1], Control.DECODED, m, message)
        elif forward is not None:
            for other in [self._placement[0]] if self._one_process else range(len(self._table)):
                self._send(rank, other, Control.OUTPUT, m, None if self._one_process else forward.result())
        return forward is not None

    def _run_layers(self, forward: StagedForward, stage: Any, m: int) -> None:
        def make(trace: Any, values: Any, log: Any, wanted: Any) -> Any:
            return stage.interpreter(trace, values, log, wanted, KEY, LayerProgress())

        with self._idle:
            self._busy += 1
        try:
            layers = [layer.index for layer in stage.layers]
            with self._caller.around_layers():
                forward.run(layers, stage.device, make, records_layouts=not self._one_process)
        except Exception as error:
            names = ", ".join(map(str, stage.layers))
            error.add_note(f"in generate, in stage {stage.index} (layers {names}), with micro-batch {m}")
            raise
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def _path(self, arguments: ForwardArguments) -> Path:
        """Returns the path of a forward. A new path is traced while no rank runs layers."""
        (key,) = self._traced.keys([take_apart(tuple(arguments))])
        cache = cache_in(arguments)
        path_key = (*key, cache is not None and any(fingerprints(cache).values()))
        if path_key not in self._paths:
            with self._idle:
                while self._busy:
                    self._idle.wait()
                fills = {place: layer for path in self._paths.values() for place, layer in path.fills.items()}
                self._paths[path_key] = find_path(self._traced, arguments, self._stages.all, fills)
        return self._paths[path_key]

    def _own_places(self, path: Path) -> frozenset[Place]:
        return path.filled_by([layer.index for stage in self._stages.local for layer in stage.layers])

    def _send(self, rank: int, to: int, kind: Control, m: int, value: Any) -> None:
        label = Label(kind, m, gradient=False)
        if to == rank:
            self._local_messages[rank, label] = value
        else:
            self._context.send(to, label, BoundaryValue(value, []), None)

    def _receive(self, rank: int, sender: int, kind: Control, m: int) -> Any:
        label = Label(kind, m, gradient=False)
        if sender == rank:
            return self._local_messages.pop((rank, label))
        message, _ = self._context.receive(rank, sender, label)
        assert isinstance(message, BoundaryValue)
        return message.value


def _micro_batch_of(action: Action) -> int:
    assert action.micro_batch is not None
    return action.micro_batch


def _checksum(forward: StagedForward) -> int:
    """Returns a checksum of the integer inputs of a forward, such as tokens."""
    checksum = 0
    for leaf in forward.inputs:
        if isinstance(leaf, Tensor) and not leaf.is_floating_point():
            checksum = crc32(leaf.detach().cpu().contiguous().numpy().tobytes(), checksum)
    return checksum


def _split(
    model: Any, micro_batches: int, arguments: Mapping[str, Any]
) -> tuple[Sequence[Mapping[str, Any]], Sequence[int], Mapping[str, Any]]:
    """Splits the arguments of `generate` into micro-batches.

    Tensors with rows are split, unless they are settings of a `GenerationConfig`.

    Returns:
        The arguments of each micro-batch, the number of rows of each micro-batch (1 without prompts), and the shared
        arguments.
    """
    config = getattr(model, "generation_config", None)
    prompts = {name: value for name, value in arguments.items() if any(tensor.dim() for tensor in tensors_in(value))}
    prompts = {name: value for name, value in prompts.items() if not hasattr(config, name)}
    if not prompts:
        return [{}], [1], arguments
    rows, (parts,) = split_alike(micro_batches, inputs=prompts)
    named: list[Any] = parts
    return named, rows, {name: value for name, value in arguments.items() if name not in prompts}


def _setting(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """Returns a setting from the arguments, else from a `GenerationConfig` in them, else from the model's config."""
    if name in arguments:
        return arguments[name]
    configs = arguments.get("generation_config"), getattr(model, "generation_config", None)
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def check_generates(
    traced: TracedModel | None, arguments: Mapping[str, Any], stages: PipelineStages, *, training: bool
) -> TracedModel:
    """Checks that the pipe can generate with these arguments, and returns the model of the pipe.

    Args:
        traced: The model. None for a sequence of layers.
        arguments: The arguments of `generate`.
        stages: The stages of the pipe.
        training: Whether the pipe is in training mode.

    Raises:
        ValueError: If the pipe cannot generate. The message lists all reasons.
    """
    model = traced and traced.model
    settings = {name: _setting(model, arguments, name) for name in (*UNSUPPORTED, "max_time", CACHE_IMPLEMENTATION)}
    errors = [
        f"{name}= is not supported, because {reason}. [generate-option-not-supported]"
        for name, reason in UNSUPPORTED.items()
        if settings[name] not in (None, False)
    ]
    if not hasattr(model, "generate"):
        kind = "a sequence of layers" if model is None else f"a {type(model).__name__}"
        errors.append(NO_GENERATE.format(kind=kind))
    if stages.pp_rank is not None and settings["max_time"]:
        errors.append(MAX_TIME)
    if stages.pp_rank is not None and settings[CACHE_IMPLEMENTATION] not in (
        None,
        "dynamic",
        "hybrid",
    ):  # "hybrid" now means None.
        errors.append(FIXED_CACHE.format(implementation=settings[CACHE_IMPLEMENTATION]))
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        errors.append(PROMPT_LEARNING)
    if training:
        errors.append(TRAINING_MODE)
    if stages.resident is not None:
        errors.append(HOST_WEIGHTS)
    if errors:
        raise ValueError("\n".join(errors))
    assert traced is not None
    return traced


def generate(
    stages: PipelineStages,
    traced: TracedModel | None,
    context: Context,
    paths: dict[object, Path],
    arguments: Mapping[str, Any],
    *,
    training: bool,
) -> Any:
    """Runs `GPipe.generate`.

    Args:
        stages: The stages of the pipe.
        traced: The model. None for a sequence of layers.
        context: The context of the run.
        paths: The known control-flow paths of the model. New paths are added.
        arguments: The arguments of `generate`.
        training: Whether the pipe is in training mode.
    """
    with torch.no_grad(), context.run_scope():
        traced = check_generates(traced, arguments, stages, training=training)
        parts, rows, settings = _split(traced.model, stages.micro_batches, context.begin_to_generate(arguments))
        loops = loops_of(traced.model, parts, rows, settings, stages.intra_op_threads)
        with stages.threads.turn(), warned_once():
            results = Generation(stages, traced, context, paths, loops).run()
        context.end_generation()
    return _join(results, rows, _padding(traced.model, settings))


@torch.no_grad()
def cache_bytes(
    stages: PipelineStages, traced: TracedModel | None, arguments: Mapping[str, Any], *, training: bool
) -> list[int]:
    """Runs `GPipe.cache_bytes`: returns the size of the cache on each rank at the end of a generation."""
    traced = check_generates(traced, arguments, stages, training=training)
    new, length = (_setting(traced.model, arguments, name) for name in ("max_new_tokens", "max_length"))
    if new is None and length is None:
        raise ValueError(NO_LENGTH)
    if _setting(traced.model, arguments, PREFILL_CHUNKS):
        arguments = {**arguments, PREFILL_CHUNKS: None}
    parts, rows, settings = _split(traced.model, stages.micro_batches, arguments)
    stage_of, sizes = stages.stage_of, [0] * (max(stages.placement) + 1)
    for size, times in Counter(rows).items():
        part = parts[rows.index(size)]
        (loop,) = loops_of(traced.model, [part], [size], settings, stages.intra_op_threads)
        output, forward = None, None
        with stages.threads.turn(), torch.random.fork_rng(devices=[]), closing(loop):
            # An encoder-decoder model first runs a forward without a cache, to encode.
            while (forward is None or forward.cache is None) and (request := loop.resume(output)) is not None:
                forward = dry_forward(traced, request, {})
                output = map_tensors(forward.output, zeros)
        assert forward is not None
        for place, layer in layers_in(forward.cache).items() if forward.cache is not None else ():
            if place in forward.path.fills:
                grow(layer, *((new, length) if place[0] == 0 else (0, 0)))
                sizes[stages.placement[stage_of[forward.path.fills[place]]]] += times * bytes_of(layer)
    return sizes


def _padding(model: Any, settings: Mapping[str, Any]) -> int:
    """Returns the token with which `generate` of the model pads rows that end before other rows."""
    values = (_setting(model, settings, name) for name in ("eos_token_id", "pad_token_id"))
    end, padding = (None if value is None else int(torch.as_tensor(value).flatten()[0]) for value in values)
    if (_setting(model, settings, "num_beams") or 1) > 1:
        return -1 if end is None else padding or end
    return (end if padding is None else padding) or 0


def _join(results: Sequence[Any], rows: Sequence[int], padding: int) -> Any:
    """Concatenates the tokens of the micro-batches, padded to the longest micro-batch."""
    if not all(isinstance(tokens, Tensor) and tokens.dim() == 2 for tokens in results):
        return merge(results, [getattr(part, "shape", [n])[0] for part, n in zip(results, rows, strict=True)])
    longest = max(tokens.shape[1] for tokens in results)
    return torch.cat([nn.functional.pad(tokens, (0, longest - tokens.shape[1]), value=padding) for tokens in results])
