"""Connects one process of a pipe with the other processes during a run: messages, checks, reductions, progress."""

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
from gpipe.distributed.communicator import CALLED, GRADIENTS, broadcast_header, differences
from gpipe.distributed.endpoint import Endpoint, Exchange
from gpipe.distributed.failures import Status
from gpipe.distributed.mesh import host_name
from gpipe.distributed.reduce import (
    Shards,
    add_over_replicas,
    add_over_stages,
    is_sharded_over_replicas,
    shards_over_replicas,
)
from gpipe.distributed.sync_batchnorm import SyncBatchNormRun, find_norms
from gpipe.features.error_notes import in_words
from gpipe.features.recorder import Recorder, RemoteRecord
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
from gpipe.stages.dtensor import any_sharded, is_sharded
from gpipe.stages.messages import Control, Label, Message, ReadyEvent, Request
from gpipe.stages.shared_weights import WeightAliases
from gpipe.stages.stage import LayerProgress, layer_at
from gpipe.stages.traffic import Traffic
from gpipe.stages.tree import Tree, tensors_in

if TYPE_CHECKING:
    from gpipe.distributed.processes import Processes

logger = logging.getLogger("gpipe")


class ProcessContext(Context):
    """The `Context` of a run for a pipe in several processes."""

    cancelled = False

    def __init__(self, processes: "Processes") -> None:
        self.processes, self.engine, self.position = processes, processes.engine, processes.position
        self.replica, self.replicas = self.position.replica, self.position.replicas
        self.runs_every_backward = processes.sync_batch_norm and self.replicas > 1
        self.first, self.last = (self.position.rank_of(self.engine.placement[stage]) for stage in (0, -1))
        self._sync: SyncBatchNormRun | None = None

    @contextmanager
    def run_scope(self) -> Iterator[None]:
        processes = self.processes
        with self.engine.threads.exclusive(), processes.linked().in_run(records=self.notes_messages) as self.endpoint:
            self._began, self._waited = time.perf_counter(), self.endpoint.waited
            yield

    def agree(self, run: Run, request: Request) -> None:
        verification = run.feature(Verification)  # may be None in a backward pass, whose forward pass has decided
        sharded = self._find_sharded_weights() if self.replicas > 1 else {}
        self._sharded = [(stage, *weights) for stage, weights in sharded.items()]
        self.engine.gather(sharded)
        same = {
            CALLED: request,
            "the step number": run.step_number,
            GRADIENTS: run.trains,
            "whether the pipe is in training mode": run.training,
            "gather": run.gathers,
            "the call that backward belongs to": run.call,
            "whether the loss is the model's own": run.loss_fn is own_loss,
            "pipe.seed": run.seed,
            "the active autocast dtype": ", ".join(str(dtype) for _, dtype in run.thread_state.autocasts) or "none",
        }

        def apply(rows: list[int], path: int, own_weights: list[float], ready_made: bool, verifies: bool) -> int:
            run.micro_batch_sizes, run.path = tuple(rows), path
            if verification is not None:
                verification.wanted |= verifies
            run.own_weights, run.ready_made = tuple(own_weights), ready_made
            return run.compiled_program().checksum

        wanted = verification is not None and verification.wanted
        values = run.micro_batch_sizes, run.path, run.own_weights, run.ready_made, wanted
        broadcast_header(self.endpoint, self.position, self.first, same, values, apply)

    def check_same(self, **settings: object) -> None:
        if self.replicas == 1:
            return
        texts = {name: repr(value) for name, value in settings.items()}
        gathered = self.of_replicas(Control.REDUCTION, texts)
        if mistakes := differences(dict(zip(self.position.dp_ranks, gathered, strict=True))):
            raise ValueError(
                f"Replicas have different arguments: {'; '.join(mistakes)}. In every process, pass the same loss_fn, "
                f"reduction, scale and scaler to step, under the same autocast and with the same seed. "
                f"[replicas-differ]"
            )

    def sum_over_replicas(self, number: float) -> float:
        return float(sum(self.of_replicas(Control.WEIGHT, number)))

    def of_replicas(self, kind: Control, value: Tree, number: int = 0) -> list[Any]:
        label = Label(kind, number, gradient=False)
        return self.endpoint.all_to_all(label, dict.fromkeys(self.position.dp_ranks, value))

    def gather_outputs(self, outputs: Sequence[Output], micro_batches: int) -> list[Output]:
        own = [(output.value, output.wants_gradient) for output in outputs]
        values = own if self.endpoint.rank == self.last else [None] * micro_batches
        labels = [Label(Control.OUTPUT, m, gradient=False) for m in range(micro_batches)]
        peers = self.position.replica_ranks
        return [
            Output(*self.endpoint.broadcast(self.last, peers, *each)) for each in zip(labels, values, strict=True)
        ]

    def check_inputs(self, shapes: Sequence[Any]) -> None:
        for rank, own in enumerate(shapes):  # every rank checks all shapes, so that all raise the same error
            first = self.position.rank_of(self.engine.placement[0], rank // self.position.pp_size)
            if own and own != shapes[first]:
                raise ValueError(
                    f"Inputs that require gradients have shapes {own} on rank {rank}, but {shapes[first]} on rank "
                    f"{first}, which reads them. Pass the same inputs in all processes, or None where "
                    f"pipe.reads_inputs is False. [input-gradients-differ]"
                )

    def share_input_gradients(self, gradients: Gradients, shapes: Sequence[Any]) -> Gradients:
        peers = [peer for peer in self.position.replica_ranks if shapes[peer] or peer == self.first]
        if self.endpoint.rank not in peers:
            return []
        value = [gradient if isinstance(gradient, Tensor) else None for gradient in gradients]
        label = Label(Control.INPUT_GRADIENTS, 0, gradient=False)
        return list(self.endpoint.broadcast(self.first, peers, label, value))

    def finish(self, run: Run, value: Tree = None, *, trains: bool = False) -> list[Any]:
        endpoint, recorder = self.endpoint, run.feature(Recorder)
        busy = time.perf_counter() - self._began - (endpoint.waited - self._waited)
        seconds = torch.tensor(busy, dtype=torch.float64, device="cpu")  # a float would change the layout every step
        record = None if recorder is None else _record_as_json(recorder, run, endpoint)
        try:
            gathered = self.processes.finish_run((value, seconds, record, self._sharded))
        except TypeError as error:
            error.add_note(f"rank {endpoint.rank} was sending the results of loss_fn to other ranks")
            raise
        for _, _, _, sharded in gathered:
            self.engine.gather({stage: GatheredWeights(*each) for stage, *each in sharded})
        if recorder is not None:
            _join_records(recorder, endpoint.rank, [text for _, _, text, _ in gathered], run.slices)
        run.hooks.complete(run)
        if trains and not endpoint.rank:
            for finding in self.processes.stragglers.record([float(busy) for _, busy, _, _ in gathered]):
                logger.warning(finding)
        return [remote_value for remote_value, *_ in gathered]

    def begin_to_generate(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        is_first, peers = self.endpoint.rank == self.first, self.position.replica_ranks
        tensors = {name: value for name, value in settings.items() if value is None or tensors_in(value)}
        others = {name: _shown(value) for name, value in settings.items() if name not in tensors}
        same = {CALLED: Request.GENERATE, **{f"{name}=": text for name, text in others.items()}}
        broadcast_header(self.endpoint, self.position, self.first, same)
        label = Label(Control.PROMPTS, 0, gradient=False)
        prompts = (tensors, torch.get_rng_state()) if is_first else None
        tensors, state = self.endpoint.broadcast(self.first, peers, label, prompts)
        torch.set_rng_state(state)
        others_of_replica = {*peers} - {self.endpoint.rank}
        self.endpoint.expect({}, others_of_replica, lambda _, status: f"in generate, in round {status.at}")
        return {**{name: settings[name] for name in others}, **tensors}

    def end_generation(self) -> None:
        self.endpoint.reach(-1)
        self.processes.finish_run(None)

    def name(self, rank: int) -> str:
        return f"rank {self.endpoint.rank}"

    def new_progress(self) -> LayerProgress:
        return LayerProgress(_PublishedLayers(self.endpoint.status))

    @contextmanager
    def running(self, table: CompiledTable, aliases: WeightAliases) -> Iterator[None]:
        (due, senders), row = table.inbound[self.position.pp_rank], table.program.table[self.position.pp_rank]
        describe = partial(describe_peer, self.engine, table.program)
        self.endpoint.expect(due, set(map(self.position.rank_of, senders)), describe)
        self.aliases, self._ties_are_summed = aliases, False
        self._earlier_gradients = self._remove_gradients(row)
        self._exchanges: dict[Action, Exchange[None]] = {}
        self._shards = Shards(self.endpoint, self.position, {})
        well = False
        try:
            with self._prepare_replicas(table.program):
                yield
            well = True
        finally:
            self._shards.end(well=well)
            del self.aliases, self._earlier_gradients, self._exchanges, self._shards
        self.endpoint.reach(-1)

    def reach(self, at: int) -> None:
        self.endpoint.reach(at)

    def send(self, rank: int, label: Label, message: Message, mark: ReadyEvent) -> None:
        self.endpoint.send(self.position.rank_of(rank), label, message)

    def receive(self, rank: int, sender: int, label: Label) -> tuple[Message, ReadyEvent]:
        return self.endpoint.receive(self.position.rank_of(sender), label)

    def cancel(self) -> None:
        """Does nothing, because this process has only one rank. `Endpoint.fail` informs the other processes."""

    def start_exchange(self, action: Action) -> None:
        """Starts an UNSHARD or REDUCE action, which overlaps the next actions of this rank.

        Two exchanges with the same replicas must not overlap. So if the layers of the next actions may exchange
        messages with the replicas themselves, this method does nothing, and `finish_exchange` starts the action.
        """
        if not (self.runs_every_backward or self._shards.uses_torch):
            self._start(action)

    def finish_exchange(self, action: Action) -> None:
        """Completes an UNSHARD or REDUCE action, or performs a RESHARD or TIE action."""
        if action.kind is Kind.RESHARD:
            self._shards.free(action.stage)
        elif action.kind is not Kind.TIE:
            if action not in self._exchanges:
                self._start(action)
            self.endpoint.wait_async(self._exchanges.pop(action))
        elif not self._ties_are_summed:  # the first TIE sums the gradients of all stages of this process
            add_over_stages(self.endpoint, self.position, self.engine.placement, self.engine.stage_of, self.aliases)
            self._ties_are_summed = True

    def _start(self, action: Action) -> None:
        exchange = self._reduce if action.kind is Kind.REDUCE else self._shards.gather
        self._exchanges[action] = exchange(action.stage)
        self.endpoint.start_async(self._exchanges[action])

    def _reduce(self, stage: int) -> Exchange[None]:
        earlier = self._earlier_gradients[stage]
        yield from add_over_replicas(self.endpoint, self.position, stage, [parameter for parameter, _ in earlier])
        for parameter, gradient in earlier:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        yield from self._shards.reduce(stage)

    def keep_exchanges(self, micro_batches: int) -> None:
        if self._sync is not None:
            self._sync.recorded_micro_batches = micro_batches

    def repeat(self, action: Action) -> None:
        if self._sync is not None:
            self._sync.replay(action)

    def _prepare_replicas(self, program: Program) -> AbstractContextManager[object]:
        """Prepares the communication of `fully_shard` and of synchronized BatchNorm between replicas in a run."""
        layers = [layer for stage in self.engine.local for layer in stage.layers]
        stages = self.engine.local if any_sharded(self.engine.modules) else ()
        sharded = {stage.index: [*filter(is_sharded, stage.modules)] for stage in stages}
        norms = find_norms(layers) if self.runs_every_backward else []
        synchronizes, gathers = any(norm.training for norm in norms), any(sharded.values())
        if synchronizes or gathers:
            counts = self.of_replicas(Control.MICRO_BATCHES, program.micro_batches)
            if len(set(counts)) > 1:
                feature = "Layers under fully_shard need" if gathers else "batch_norm='synchronized' needs"
                raise ValueError(
                    f"{feature} the same number of micro-batches in all replicas, but they have {counts}. Pass at "
                    f"least M rows to each replica in every step, for example by drop_last=True. [replicas-uneven]"
                )
        row = program.table[self.position.pp_rank]
        if gathers:
            if any(is_sharded_over_replicas(parameter) for parameter in self.aliases.sources.values()):
                raise ValueError(
                    "A weight that several layers share is under fully_shard, which replaces it while a layer runs. "
                    "Do not apply fully_shard to layers that share weights. [shared-weight-sharded]"
                )
            trains = any(action.kind in BACKWARDS for action in row)
            self._shards = Shards(self.endpoint, self.position, sharded, trains=trains)
        if not synchronizes:
            return nullcontext()
        self._sync = self._sync or SyncBatchNormRun(self.position, program.micro_batches)
        return self._sync.installed(self.endpoint, norms, lambda: row[self.endpoint.at])

    def _find_sharded_weights(self) -> dict[int, GatheredWeights]:
        """Returns the size of the weights that are sharded over the replicas, for each stage with sharded weights."""
        gathered = {}
        for stage in self.engine.local:
            modules = [m for m in stage.modules if is_sharded(m) and shards_over_replicas(m, self.position)]
            sharded = {p: p.nbytes for m in modules for p in m.parameters() if is_sharded_over_replicas(p)}
            if sharded:
                every = {p: p.nbytes for layer in stage.layers for p in layer.module.parameters() if not is_lazy(p)}
                size = sum(sharded.values())
                gathered[stage.index] = GatheredWeights(size, size / sum(every.values()))
        return gathered

    def _remove_gradients(self, row: Sequence[Action]) -> dict[int, list[tuple[Tensor, Tensor | None]]]:
        """Removes the gradients of earlier steps, which a REDUCE action must not sum, and returns them by stage.

        A weight that several stages use is listed only for the first of these stages in this process.
        """
        reduced = {action.stage for action in row if action.kind is Kind.REDUCE}
        seen = {id(leaf) for leaves in self.aliases.leaves.values() for leaf in leaves.values()}
        removed: dict[int, list[tuple[Tensor, Tensor | None]]] = {}
        for stage in self.engine.local:
            layers = {layer.index for layer in stage.layers}
            parameters: list[Tensor] = [p for layer in stage.layers for p in layer.module.parameters()]
            parameters += [  # layers have aliases in place of shared weights
                source for index, source in self.aliases.sources.items() if layers & self.aliases.leaves[index].keys()
            ]
            new = {id(p): p for p in parameters if id(p) not in seen and not is_sharded_over_replicas(p)}
            seen |= new.keys()
            if stage.index in reduced:
                removed[stage.index] = [(parameter, parameter.grad) for parameter in new.values()]
                for parameter in new.values():
                    parameter.grad = None
        return removed


def _shown(value: object) -> str:
    """Returns the repr of a value. Returns only the type if the repr contains a memory address."""
    return type(value).__name__ if " at 0x" in (text := repr(value)) else text


def describe_peer(engine: PipelineStages, program: Program, peer: int, status: Status) -> str:
    """Returns a description of the action and layer of another process, for messages."""
    rank = peer % program.ranks
    row = program.table[rank]
    if not 0 <= status.at < len(row):
        return "in a different program"
    layers = engine.all[row[status.at].stage].layers
    layer = layer_at(layers, status.layers - 1) or f"one of {', '.join(map(str, layers))}"
    return in_words(program, rank, status.at, layer, f"rank {peer}")


class _PublishedLayers(list[int]):
    """A list of the layers that have begun. The status, which other processes read, contains the number of layers."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def append(self, number: int) -> None:
        super().append(number)
        self._status.layers = len(self)


def _record_as_json(recorder: Recorder, run: Run, endpoint: Endpoint) -> str:
    assert recorder.ended is not None
    timeline, program = recorder.ended.timeline, run.compiled.program
    spans = [(str(span.action), span.start, span.end) for span in timeline.spans]
    traffic = Traffic(tuple(map(str, program.routes)), program.micro_batches, tuple(endpoint.crossings or ()))
    size = (recorder.ended.rows, recorder.ended.tokens) if run.stages.reads_inputs else (0, 0)
    return json.dumps([host_name(), recorder.began, timeline.seconds, spans, traffic.moved(-recorder.began), size])


def _join_records(recorder: Recorder, rank: int, texts: Sequence[str | None], slices: int) -> None:
    """Joins the timelines of all processes into one timeline. Logs a warning if a process does not record."""
    records = []
    for remote, text in enumerate(texts):
        if text is not None:
            host, began, seconds, spans, traffic, size = json.loads(text)
            actions = tuple(Span(remote, parse_action(action, slices), start, end) for action, start, end in spans)
            records.append(RemoteRecord(host, began, Timeline(1, actions, seconds), Traffic.of_json(traffic), *size))
    if len(records) == len(texts):
        recorder.join(rank, records)
        return
    recorder.ended = None
    logger.warning(
        "The recording does not include this step, because these ranks do not record: %s. Call gpipe.record(pipe) in "
        "every process. [recording-incomplete]",
        ", ".join(str(remote) for remote, text in enumerate(texts) if text is None),
    )
