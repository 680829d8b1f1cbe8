"""What one of several processes shares with the others in a mini-batch: messages, agreement, reductions, progress."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gpipe.batch.losses import own_loss
from gpipe.distributed.agree import CALLED, GRADIENTS, differences, follow_first
from gpipe.distributed.endpoint import Endpoint, Exchange
from gpipe.distributed.failures import Status
from gpipe.distributed.mesh import host_name
from gpipe.distributed.reduce import Shards, add_over_replicas, add_over_stages, goes_over_replicas, reduces_itself
from gpipe.distributed.sync_batchnorm import LOCKSTEP, Synced, find_norms
from gpipe.features.error_notes import in_words
from gpipe.features.recorder import Recorder, RemoteRecord
from gpipe.features.sharding import any_sharded
from gpipe.features.verification.feature import Verification
from gpipe.runtime.compiled_table import CompiledTable
from gpipe.runtime.context import Context
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.runtime.run import Run
from gpipe.schedule.action import Action, Kind, parse_action
from gpipe.schedule.cost import GatheredWeights
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARDS
from gpipe.schedule.timeline import Span, Timeline
from gpipe.stages.boundary import Gradients, Output
from gpipe.stages.dtensor import is_sharded
from gpipe.stages.messages import Control, Label, Message, ReadyEvent, Request
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.stage import LayerProgress, layer_at
from gpipe.stages.traffic import Traffic
from gpipe.stages.tree import Tree, tensors_in

if TYPE_CHECKING:
    from gpipe.distributed.processes import Processes

logger = logging.getLogger("gpipe")
SPREAD = "layers under fully_shard are gathered from all replicas"


class ProcessContext(Context):
    """One process of several, in one mini-batch."""

    cancelled = False

    def __init__(self, processes: "Processes") -> None:
        self.processes, self.engine, self.position = processes, processes.engine, processes.position
        self.replica, self.replicas = self.position.replica, self.position.replicas
        self.runs_every_backward = processes.sync_batch_norm and self.replicas > 1
        self.first, self.last = (self.position.rank_of(self.engine.placement[stage]) for stage in (0, -1))
        self._sync: Synced | None = None

    @contextmanager
    def run_scope(self) -> Iterator[None]:
        """Around a step, a call or a backward: if it fails in one process, it fails in all."""
        processes = self.processes
        with self.engine.threads.exclusive(), processes.linked().in_run(notes=self.notes_messages) as self.endpoint:
            self._began, self._waited = time.perf_counter(), self.endpoint.waited
            yield

    def agree(self, run: Run, request: Request) -> None:
        verification = run.feature(Verification)  # perhaps None in a backward: its forward has decided
        found = self._find_sharded() if self.replicas > 1 else {}
        self._sharded = [(stage, *each) for stage, each in found.items()]
        self.engine.gather(found)
        same = {
            CALLED: request,
            "the step number": run.step_number,
            GRADIENTS: run.trains,
            "whether the pipe is in training mode": run.training,
            "gather": run.gathers,
            "the call that backward belongs to": run.call,
            "whether the loss is the model's own": run.loss_fn is own_loss,
            "pipe.seed": run.seed,
            "the autocast that is active": ", ".join(str(dtype) for _, dtype in run.thread_state.autocasts) or "none",
        }

        def take(
            rows: Sequence[int], path: int, own_weights: Sequence[float], ready_made: bool, verifies: bool
        ) -> int:
            run.micro_batch_sizes, run.path = tuple(rows), path
            if verification is not None:
                verification.wanted |= verifies
            run.own_weights, run.ready_made = tuple(own_weights), ready_made
            return run.compiled_program().checksum

        wanted = verification is not None and verification.wanted
        given = run.micro_batch_sizes, run.path, run.own_weights, run.ready_made, wanted
        follow_first(self.endpoint, self.position, self.first, same, given, take)

    def check_same(self, **settings: object) -> None:
        if self.replicas == 1:
            return
        texts = {name: repr(value) for name, value in settings.items()}
        gathered = self.of_replicas(Control.REDUCTION, texts)
        if mistakes := differences(dict(zip(self.position.ranks_of_row, gathered, strict=True))):
            raise ValueError(
                f"the replicas were given different things: {'; '.join(mistakes)}. Give step the same loss_fn, "
                f"reduction, scale and scaler in every process, under the same autocast, and set the same seed"
            )

    def sum_over_replicas(self, number: float) -> float:
        return float(sum(self.of_replicas(Control.WEIGHT, number)))

    def of_replicas(self, kind: Control, value: Tree, number: int = 0) -> list[Any]:
        label = Label(kind, number, gradient=False)
        return self.endpoint.swap(label, dict.fromkeys(self.position.ranks_of_row, value))

    def gather_outputs(self, outputs: Sequence[Output], micro_batches: int) -> list[Output]:
        own = [(output.value, output.wants_gradient) for output in outputs]
        given = own if self.endpoint.rank == self.last else [None] * micro_batches
        labels = [Label(Control.OUTPUT, m, gradient=False) for m in range(micro_batches)]
        peers = self.position.ranks_of_replica
        return [Output(*self.endpoint.spread(self.last, peers, *each)) for each in zip(labels, given, strict=True)]

    def check_inputs(self, shapes: Sequence[Any]) -> None:
        for rank, own in enumerate(shapes):
            first = self.position.rank_of(self.engine.placement[0], rank // self.position.rows)
            if own and own != shapes[first]:  # said by all alike
                raise ValueError(
                    f"the inputs of rank {rank} that require a gradient have the shapes {own}, those of rank "
                    f"{first}, which reads them, {shapes[first]}; give all processes the same, or those that do not "
                    f"read inputs None"
                )

    def share_input_gradients(self, gradients: Gradients, shapes: Sequence[Any]) -> Gradients:
        peers = [peer for peer in self.position.ranks_of_replica if shapes[peer] or peer == self.first]
        if self.endpoint.rank not in peers:
            return []
        value = [gradient if isinstance(gradient, Tensor) else None for gradient in gradients]
        return list(self.endpoint.spread(self.first, peers, Label(Control.INPUT_GRADIENTS, 0, gradient=False), value))

    def finish(self, run: Run, value: Tree = None, *, trains: bool = False) -> list[Any]:
        endpoint, recorder = self.endpoint, run.feature(Recorder)
        busy = time.perf_counter() - self._began - (endpoint.waited - self._waited)
        seconds = torch.tensor(busy, dtype=torch.float64, device="cpu")  # a number would make the layout a new one
        record = None if recorder is None else _recorded(recorder, run, endpoint)
        try:
            gathered = self.processes.end((value, seconds, record, self._sharded))
        except TypeError as error:
            error.add_note(f"rank {endpoint.rank} was telling the others the metrics that loss_fn returned")
            raise
        for _, _, _, sharded in gathered:
            self.engine.gather({stage: GatheredWeights(*each) for stage, *each in sharded})
        if recorder is not None:
            _join_records(recorder, endpoint.rank, [text for _, _, text, _ in gathered], run.slices)
        run.hooks.complete(run)
        if trains and not endpoint.rank:
            for finding in self.processes.stragglers.note([float(theirs) for _, theirs, _, _ in gathered]):
                logger.warning(finding)
        return [theirs for theirs, *_ in gathered]

    def begin_to_generate(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        is_first, peers = self.endpoint.rank == self.first, self.position.ranks_of_replica
        tensors = {name: value for name, value in settings.items() if value is None or tensors_in(value)}
        others = {name: _in_words(value) for name, value in settings.items() if name not in tensors}
        same = {CALLED: Request.GENERATE, **{f"{name}=": text for name, text in others.items()}}
        follow_first(self.endpoint, self.position, self.first, same)
        label = Label(Control.PROMPTS, 0, gradient=False)
        given = (tensors, torch.get_rng_state()) if is_first else None
        tensors, state = self.endpoint.spread(self.first, peers, label, given)
        torch.set_rng_state(state)
        others_of_replica = {*peers} - {self.endpoint.rank}
        self.endpoint.expect({}, others_of_replica, lambda _, seen: f"in generate, in round {seen.at}")
        return {**{name: settings[name] for name in others}, **tensors}

    def end_generation(self) -> None:
        self.endpoint.reach(-1)
        self.processes.end(None)

    def name(self, rank: int) -> str:
        return f"rank {self.endpoint.rank}"

    def new_progress(self) -> LayerProgress:
        return LayerProgress(_Watched(self.endpoint.status))

    @contextmanager
    def running(self, table: CompiledTable, aliases: WeightAliases) -> Iterator[None]:
        """Around the actions of this process: expects its messages, and meets the replicas where they run in step."""
        (due, senders), row = table.inbound[self.position.row], table.program.table[self.position.row]
        sees = partial(describe_peer, self.engine, table.program)
        self.endpoint.expect(due, set(map(self.position.rank_of, senders)), sees)
        self.aliases, self._tied = aliases, False
        self._aside = self._set_gradients_aside(row)
        self._beside: dict[Action, Exchange[None]] = {}
        self._shards = Shards(self.endpoint, self.position, {})
        well = False
        try:
            with self._meet_replicas(table.program):
                yield
            well = True
        finally:
            self._shards.end(well=well)
            del self.aliases, self._aside, self._beside, self._shards
        self.endpoint.reach(-1)

    def reach(self, at: int) -> None:
        self.endpoint.reach(at)

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        self.endpoint.send(self.position.rank_of(rank), label, message)

    def receive(self, rank: int, sender: int, label: Label) -> tuple[Message, ReadyEvent]:
        return self.endpoint.receive(self.position.rank_of(sender), label)

    def cancel(self) -> None:
        """Nothing to wake: this process has one rank, and the others learn of it by `Endpoint.fail`."""

    def begin(self, action: Action) -> None:
        """Begins an UNSHARD or REDUCE, which goes on beside what this rank does next."""
        if not (self.runs_every_backward or self._shards.goes_beyond):  # else others have messages meanwhile
            self._begin(action)

    def close(self, action: Action) -> None:
        """Adds up gradients of shared weights, or ends an exchange with the replicas, or frees what one gathered."""
        if action.kind is Kind.RESHARD:
            self._shards.free(action.stage)
        elif action.kind is not Kind.TIE:
            if action not in self._beside:
                self._begin(action)
            self.endpoint.end_beside(self._beside.pop(action))
        elif not self._tied:  # all stages of this process, which have run their backwards, at once
            add_over_stages(self.endpoint, self.position, self.engine.placement, self.engine.stage_of, self.aliases)
            self._tied = True

    def _begin(self, action: Action) -> None:
        begun = self._reduce if action.kind is Kind.REDUCE else self._shards.gather
        self._beside[action] = begun(action.stage)
        self.endpoint.begin_beside(self._beside[action])

    def _reduce(self, stage: int) -> Exchange[None]:
        aside = self._aside[stage]
        yield from add_over_replicas(self.endpoint, self.position, stage, [parameter for parameter, _ in aside])
        for parameter, before in aside:
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        yield from self._shards.reduce(stage)

    def keep_exchanges(self, micro_batches: int) -> None:
        if self._sync is not None:
            self._sync.recorded_micro_batches = micro_batches

    def repeat(self, action: Action) -> None:
        if self._sync is not None:
            self._sync.replay(action)

    def _meet_replicas(self, program: Program) -> AbstractContextManager[object]:
        """Prepares what replicas do together while they run: layers of `fully_shard`, and BatchNorm if asked."""
        layers = [layer for stage in self.engine.local for layer in stage.layers]
        own = self.engine.local if any_sharded(self.engine.modules) else ()
        spread = {stage.index: [*filter(is_sharded, stage.modules)] for stage in own}
        norms = find_norms(layers) if self.runs_every_backward else []
        reasons = [SPREAD] * any(spread.values()) + [LOCKSTEP] * any(norm.training for norm in norms)
        if reasons:
            counts = self.of_replicas(Control.MICRO_BATCHES, program.micro_batches)
            if len(set(counts)) > 1:
                raise ValueError(
                    f"{' and '.join(reasons)}, but the replicas have {counts} of them; give each replica at least M "
                    f"rows in every step, and leave out a last mini-batch that is smaller (drop_last=True)"
                )
        if any(spread.values()) and any(reduces_itself(parameter) for parameter in self.aliases.sources.values()):
            raise ValueError(
                "a weight that several layers share is under fully_shard, which puts another in its place while a "
                "layer runs; leave layers that share weights as they are"
            )
        if any(spread.values()):
            trains = any(action.kind in BACKWARDS for action in program.table[self.position.row])
            self._shards = Shards(self.endpoint, self.position, spread, trains=trains)
        if LOCKSTEP not in reasons:
            return nullcontext()
        self._sync = self._sync or Synced(self.position, program.micro_batches)
        row = program.table[self.position.row]
        return self._sync.in_place(self.endpoint, norms, lambda: row[self.endpoint.at])

    def _find_sharded(self) -> dict[int, GatheredWeights]:
        """What is spread over the replicas of the weights of the stages of this process, where anything is."""
        found = {}
        for stage in self.engine.local:
            own = [m for m in stage.modules if is_sharded(m) and goes_over_replicas(m, self.position)]
            sizes = {p: p.nbytes for module in own for p in module.parameters() if reduces_itself(p)}
            if sizes:
                every = {p: p.nbytes for layer in stage.layers for p in layer.module.parameters() if not is_lazy(p)}
                found[stage.index] = GatheredWeights(sum(sizes.values()), sum(sizes.values()) / sum(every.values()))
        return found

    def _set_gradients_aside(self, row: Sequence[Action]) -> dict[int, list[tuple[Tensor, Tensor | None]]]:
        """Sets aside what gradients there are, by the first stage of this process that uses each weight."""
        reduced = {action.stage for action in row if action.kind is Kind.REDUCE}
        seen = {id(leaf) for leaves in self.aliases.leaves.values() for leaf in leaves.values()}
        aside: dict[int, list[tuple[Tensor, Tensor | None]]] = {}
        for stage in self.engine.local:
            layers = {layer.index for layer in stage.layers}
            found: list[Tensor] = [p for layer in stage.layers for p in layer.module.parameters()]
            found += [  # in their places are the aliases
                source for at, source in self.aliases.sources.items() if layers & self.aliases.leaves[at].keys()
            ]
            own = {id(p): p for p in found if id(p) not in seen and not reduces_itself(p)}
            seen |= own.keys()
            if stage.index in reduced:
                aside[stage.index] = [(parameter, parameter.grad) for parameter in own.values()]
                for parameter in own.values():
                    parameter.grad = None
        return aside


def _in_words(value: object) -> str:
    return type(value).__name__ if " at 0x" in (text := repr(value)) else text


def describe_peer(engine: PipelineStages, program: Program, peer: int, seen: Status) -> str:
    """In words, where another process of this host was last seen."""
    rank = peer % program.ranks
    row = program.table[rank]
    if not 0 <= seen.at < len(row):
        return "in a row of its own"
    layers = engine.all[row[seen.at].stage].layers
    layer = layer_at(layers, seen.layers - 1) or f"one of {', '.join(map(str, layers))}"
    return in_words(program, rank, seen.at, layer, f"rank {peer}")


class _Watched(list[int]):
    """Sequence numbers of the layers begun, whose count the other processes can see."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def append(self, number: int) -> None:
        super().append(number)
        self._status.layers = len(self)


# Timelines of all processes, put together: each sends what it recorded of a run.


def _recorded(recorder: Recorder, run: Run, endpoint: Endpoint) -> str:
    assert recorder.ended is not None
    timeline, program = recorder.ended.timeline, run.compiled.program
    spans = [(str(span.action), span.start, span.end) for span in timeline.spans]
    traffic = Traffic(tuple(map(str, program.routes)), program.micro_batches, tuple(endpoint.noted or ()))
    moved = traffic.moved(-recorder.began)
    return json.dumps([host_name(), recorder.began, timeline.seconds, spans, moved])


def _join_records(recorder: Recorder, rank: int, texts: Sequence[str | None], slices: int) -> None:
    """Makes one timeline of those of all processes, if all of them record."""
    records = []
    for remote, text in enumerate(texts):
        if text is not None:
            host, began, seconds, spans, traffic = json.loads(text)
            actions = tuple(Span(remote, parse_action(action, slices), start, end) for action, start, end in spans)
            records.append(RemoteRecord(host, began, Timeline(1, actions, seconds), Traffic.of_json(traffic)))
    if len(records) == len(texts):
        recorder.join(rank, records)
        return
    recorder.ended = None
    logger.warning(
        "this step is not in the recording, since rank %s does not record: gpipe.record(pipe) in every process",
        ", ".join(str(remote) for remote, text in enumerate(texts) if text is None),
    )
