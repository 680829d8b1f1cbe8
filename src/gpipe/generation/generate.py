"""Generates with a model that is in stages: one micro-batch's next token on each rank at a time.

Two ranks and two micro-batches; a b c are the tokens of the first, x y z of the second:

    rank 0   a x b y c z
    rank 1     a x b y c z

Each rank goes through its forwards of all micro-batches that go on, round after round, so it is never idle where
there are as many micro-batches as ranks. Over processes each runs all loops, and all are given the outputs; in one
process the rank of the first stage does.
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
from gpipe.generation.caches import Place, bytes_of, grow, layers_in, marks
from gpipe.generation.loops import Loop, loops_of, said_once
from gpipe.generation.paths import KEY, Passing, Path, cache_in, find_path, foretell
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

APART = (
    "rank {rank} has chosen other words than the rank before it: what the loops of the processes were given, or what "
    "they do with it (a clock, a random number), differs. Give all processes the same, and seed what draws alike"
)
NO_GENERATE = "{kind} has no generate; pipe.generate is for models that have one, as those of transformers"
TRAINS = "the pipe is in training mode, in which dropout would draw anew for each word: call pipe.eval() first"
CLOCK = "max_time= is given; each process has a clock of its own, and would end elsewhere: give max_new_tokens"
PROMPTED = "the model has learned prompts of peft, which its own generate puts before each prompt: generate by that"
FIXED = (
    "cache_implementation={found!r}: over processes the size of a cache must show how full it is on other ranks, so "
    "it has to grow: give cache_implementation='dynamic'"
)
CACHE, PIECES = "cache_implementation", "prefill_chunk_size"
LENGTH = "neither max_new_tokens= nor max_length= is given, and what caches will hold depends on it: give one"
INSTEAD = {
    "assistant_early_exit": "the layers that it leaves out are stages of the pipe: call generate of the model itself",
    "assistant_model": "a second model would have to be cut as well: call generate of the model itself",
    "past_key_values": "each rank makes the cache of its own layers",
    "return_dict_in_generate": "tokens are given alone: what comes of rows that end at different times does not fit",
    "streamer": "the words of the micro-batches come one beside the other: call generate of the model itself",
}
"""What `generate` of a model takes and that of a pipe does not, and why."""


class Generation:
    """One call of `generate` in one process."""

    def __init__(
        self,
        engine: PipelineStages,
        traced: TracedModel,
        context: Context,
        paths: dict[object, Path],
        loops: Sequence[Loop],
    ) -> None:
        self._engine, self._traced, self._context, self._paths, self._loops = engine, traced, context, paths, loops
        self._one_process = engine.pp_rank is None
        in_turn = self._one_process and not engine.threaded
        self._placement = (0,) * len(engine.all) if in_turn else tuple(engine.placement)
        self._table = forward_only_table(self._placement, len(loops))
        self._around = ThreadState.here()
        self._passing: dict[int, Passing | None] = {}  # the forward that each loop asks for; None: it has ended
        self._handed: dict[tuple[int, Label], Any] = {}  # what stages of one rank have for each other
        self._quiet = threading.Condition()
        self._busy = 0  # ranks that run layers

    def run(self) -> list[Any]:
        engine = self._engine
        own = torch.get_num_threads()
        engine.threads.generation_threads = self._loops
        try:
            for stage in engine.local:
                stage.begin()
            if engine.threaded and self._one_process:
                jobs = [partial(self._serve, rank) for rank in range(max(self._placement) + 1)]
                engine.threads.run(jobs, self._context.cancel)
            else:
                with intra_op_threads(engine.intra_op_threads):
                    self._serve(engine.pp_rank or 0)
        finally:
            for loop in self._loops:
                loop.close()
            engine.threads.generation_threads = ()
            torch.set_num_threads(own)  # a loop's number is also the default of threads to come
        return [loop.result for loop in self._loops]

    def _serve(self, rank: int) -> None:
        """Does the forwards of one rank, round after round, until all micro-batches have ended."""
        row, alive = self._table[rank], set(range(len(self._loops)))
        drives = not self._one_process or rank == self._placement[0]
        with self._around.rank_thread(), as_rank():
            for turn in count():
                self._context.reach(turn)
                ended, begun = set[int](), set[int]()
                for action in row:
                    m = _of(action)
                    if m not in alive:
                        continue
                    if self._context.cancelled:
                        raise Cancelled
                    if drives and m not in begun:
                        begun.add(m)
                        self._go_on(rank, m, begins=turn == 0)
                    if not self._forward(rank, action):
                        ended.add(m)
                alive -= ended
                if not alive:
                    return

    def _go_on(self, rank: int, m: int, *, begins: bool) -> None:
        output = None
        if not begins:
            outcome = self._receive(rank, self._placement[-1], Control.OUTPUT, m)
            passing = self._passing[m]
            assert passing is not None
            output = passing.output if self._one_process else passing.end(self._own(passing.path), outcome)
        given = self._loops[m].go_on(output)
        self._passing[m] = None if given is None else Passing.begin(self._path(given), given)

    def _forward(self, rank: int, action: Action) -> bool:
        """Does the forward of a stage and hands it on; False if the micro-batch has ended."""
        m, at, stage = _of(action), action.stage, self._engine.all[action.stage]
        arrived = self._receive(rank, self._placement[at - 1], Control.DECODED, m) if at else None
        # the driver may be at the next forward of this micro-batch by now, where one is handed on as it is
        passing: Passing | None = arrived if at and self._one_process else self._passing[m]
        if at and not self._one_process:
            words = None if passing is None else _checksum(passing)
            if words != (None if arrived is None else arrived["words"]):
                raise ValueError(APART.format(rank=rank))
            if passing is not None:
                passing.arrive(stage.layers[0].index, arrived)
        if passing is not None:
            self._run_layers(passing, stage, m)
        is_last = at + 1 == len(self._placement)
        if not is_last:
            message = (
                passing
                if passing is None or self._one_process
                else {**passing.message(), "words": _checksum(passing)}
            )
            self._send(rank, self._placement[at + 1], Control.DECODED, m, message)
        elif passing is not None:
            for other in [self._placement[0]] if self._one_process else range(len(self._table)):
                self._send(rank, other, Control.OUTPUT, m, None if self._one_process else passing.result())
        return passing is not None

    def _run_layers(self, passing: Passing, stage: Any, m: int) -> None:
        def make(trace: Any, values: Any, log: Any, wanted: Any) -> Any:
            return stage.interpreter(trace, values, log, wanted, KEY, LayerProgress())

        with self._quiet:
            self._busy += 1
        try:
            layers = [layer.index for layer in stage.layers]
            with self._around.around_layers():
                passing.through(layers, stage.device, make, tells=not self._one_process)
        except Exception as error:
            names = ", ".join(map(str, stage.layers))
            error.add_note(f"in generate, in stage {stage.index} (layers {names}), with micro-batch {m}")
            raise
        finally:
            with self._quiet:
                self._busy -= 1
                self._quiet.notify_all()

    def _path(self, given: ForwardArguments) -> Path:
        """The path of a forward: found while no rank runs layers, if it is not known yet."""
        (key,) = self._traced.keys([take_apart(tuple(given))])
        cache = cache_in(given)
        known = (*key, cache is not None and any(marks(cache).values()))
        if known not in self._paths:
            with self._quiet:
                while self._busy:
                    self._quiet.wait()
                fills = {place: layer for path in self._paths.values() for place, layer in path.fills.items()}
                self._paths[known] = find_path(self._traced, given, self._engine.all, fills)
        return self._paths[known]

    def _own(self, path: Path) -> frozenset[Place]:
        return path.filled_by([layer.index for stage in self._engine.local for layer in stage.layers])

    def _send(self, rank: int, to: int, kind: Control, m: int, value: Any) -> None:
        label = Label(kind, m, gradient=False)
        if to == rank:
            self._handed[rank, label] = value
        else:
            self._context.send(to, label, BoundaryValue(value, []), None)

    def _receive(self, rank: int, sender: int, kind: Control, m: int) -> Any:
        label = Label(kind, m, gradient=False)
        if sender == rank:
            return self._handed.pop((rank, label))
        message, _ = self._context.receive(rank, sender, label)
        assert isinstance(message, BoundaryValue)
        return message.value


def _of(action: Action) -> int:
    assert action.micro_batch is not None
    return action.micro_batch


def _checksum(passing: Passing) -> int:
    """Of the words and whatever else of whole numbers a forward is given."""
    found = 0
    for leaf in passing.inputs:
        if isinstance(leaf, Tensor) and not leaf.is_floating_point():
            found = crc32(leaf.detach().cpu().contiguous().numpy().tobytes(), found)
    return found


def _cut(
    model: Any, micro_batches: int, given: Mapping[str, Any]
) -> tuple[Sequence[Mapping[str, Any]], Sequence[int], Mapping[str, Any]]:
    """What was given, cut into micro-batches; their rows, one where nothing is a prompt; and the settings of all."""
    config = getattr(model, "generation_config", None)
    batch = {name: value for name, value in given.items() if any(one.dim() for one in tensors_in(value))}
    batch = {name: value for name, value in batch.items() if not hasattr(config, name)}
    if not batch:
        return [{}], [1], given
    rows, (parts,) = split_alike(micro_batches, inputs=batch)
    named: list[Any] = parts
    return named, rows, {name: value for name, value in given.items() if name not in batch}


def _setting(model: Any, given: Mapping[str, Any], name: str) -> Any:
    """What holds of a setting: as given, else by the config that is given, else by that of the model."""
    if name in given:
        return given[name]
    configs = given.get("generation_config"), getattr(model, "generation_config", None)
    return next((found for one in configs if (found := getattr(one, name, None)) is not None), None)


def check_generates(
    traced: TracedModel | None, given: Mapping[str, Any], *, training: bool, processes: bool
) -> TracedModel:
    """The model that is to generate.

    Raises:
        ValueError: It cannot, or not with what is given; says all that is wrong.
    """
    model = traced and traced.model
    found = {name: _setting(model, given, name) for name in (*INSTEAD, "max_time", CACHE)}
    mistakes = [f"{name}= is given; {why}" for name, why in INSTEAD.items() if found[name] not in (None, False)]
    if not hasattr(model, "generate"):
        kind = "a sequence of layers" if model is None else f"the {type(model).__name__}"
        mistakes.append(NO_GENERATE.format(kind=kind))
    if processes and found["max_time"]:
        mistakes.append(CLOCK)
    if processes and found[CACHE] not in (None, "dynamic", "hybrid"):  # which is by now another name of none
        mistakes.append(FIXED.format(found=found[CACHE]))
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        mistakes.append(PROMPTED)
    if training:
        mistakes.append(TRAINS)
    if mistakes:
        raise ValueError("\n".join(mistakes))
    assert traced is not None
    return traced


def generate(
    engine: PipelineStages,
    traced: TracedModel | None,
    context: Context,
    paths: dict[object, Path],
    given: Mapping[str, Any],
    *,
    training: bool,
) -> Any:
    """See `GPipe.generate`; `paths` are those that are known."""
    with torch.no_grad(), context.run_scope():
        traced = check_generates(traced, given, training=training, processes=engine.pp_rank is not None)
        parts, rows, settings = _cut(traced.model, engine.micro_batches, context.begin_to_generate(given))
        loops = loops_of(traced.model, parts, rows, settings, engine.intra_op_threads)
        with engine.threads.turn(), said_once():
            results = Generation(engine, traced, context, paths, loops).run()
        context.end_generation()
    return _together(results, rows, _filling(traced.model, settings))


@torch.no_grad()
def cache_bytes(
    engine: PipelineStages, traced: TracedModel | None, given: Mapping[str, Any], *, training: bool
) -> list[int]:
    """See `GPipe.cache_bytes`."""
    traced = check_generates(traced, given, training=training, processes=engine.pp_rank is not None)
    new, length = (_setting(traced.model, given, name) for name in ("max_new_tokens", "max_length"))
    if new is None and length is None:
        raise ValueError(LENGTH)
    if _setting(traced.model, given, PIECES):
        given = {**given, PIECES: None}
    parts, rows, settings = _cut(traced.model, engine.micro_batches, given)
    stage_of, found = engine.stage_of, [0] * (max(engine.placement) + 1)
    for size, times in Counter(rows).items():
        part = parts[rows.index(size)]
        (loop,) = loops_of(traced.model, [part], [size], settings, engine.intra_op_threads)
        output, foretold = None, None
        with engine.threads.turn(), torch.random.fork_rng(devices=[]), closing(loop):
            while (foretold is None or foretold.cache is None) and (begun := loop.go_on(output)) is not None:
                foretold = foretell(traced, begun, {})
                output = map_tensors(foretold.output, zeros)  # it may encode first
        assert foretold is not None
        for place, layer in layers_in(foretold.cache).items() if foretold.cache is not None else ():
            if place in foretold.path.fills:
                grow(layer, *((new, length) if place[0] == 0 else (0, 0)))
                found[engine.placement[stage_of[foretold.path.fills[place]]]] += times * bytes_of(layer)
    return found


def _filling(model: Any, settings: Mapping[str, Any]) -> int:
    """What rows are filled up with that ended before others."""
    given = (_setting(model, settings, name) for name in ("eos_token_id", "pad_token_id"))
    end, padding = (None if one is None else int(torch.as_tensor(one).flatten()[0]) for one in given)
    if (_setting(model, settings, "num_beams") or 1) > 1:
        return -1 if end is None else padding or end
    return (end if padding is None else padding) or 0


def _together(results: Sequence[Any], rows: Sequence[int], filling: int) -> Any:
    if not all(isinstance(one, Tensor) and one.dim() == 2 for one in results):
        return merge(results, [getattr(one, "shape", [n])[0] for one, n in zip(results, rows, strict=True)])
    longest = max(one.shape[1] for one in results)
    return torch.cat([nn.functional.pad(one, (0, longest - one.shape[1]), value=filling) for one in results])
