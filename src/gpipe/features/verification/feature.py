"""Verifies a step: records the step while it runs, and then compares the record with replays.

The first step of each combination of model, modes, inputs and program is verified.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import TypeAlias

from torch import Tensor
from torch.nn.parameter import is_lazy

from gpipe._torch.modes import variables_of_torch
from gpipe._torch.modules import count_forward_hooks
from gpipe.features.verification.comparison import NOT_REPLAYED, Comparison, in_words
from gpipe.features.verification.evidence import Evidence, StagesState
from gpipe.features.verification.replay import Replays, wait_for_ranks
from gpipe.features.verification.step_record import OUT_OF_MEMORY, StageRecord, StepRecord
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import MicroBatchState, Rank, Run
from gpipe.schedule.action import Kind
from gpipe.stages.boundary import BoundaryInput
from gpipe.stages.dtensor import is_sharded
from gpipe.stages.stage import Stage, StageCall
from gpipe.stages.tree import Tree, tensors_in

THREAD_LOCALS = (
    "{places}: rank threads do not see values that the calling thread has set in a threading.local. Use a "
    "contextvars.ContextVar, or driver='lockstep'. [thread-local-state]"
)
NO_MEMORY = "there is not enough memory"
ABSENT = object()
OF_PYTHON_AND_COMPILERS = ("decimal_context", "torch.")  # prefixes of names
SETS_VARIABLES = (
    "Layers set the context variables {names}, but layers of other partitions do not see the values. Return the "
    "values as part of the output. [context-variable-set]"
)

Combination: TypeAlias = tuple[object, ...]
"""The properties of a step. Steps with the properties of a verified step are not verified again."""
MOST_ATTEMPTS = 3  # The most steps of one combination that are recorded if none of them can be verified.

_NOTHING = nullcontext()


@dataclass
class Verifier:
    """Decides which steps of a pipe are verified, and keeps the findings of their replays.

    Attributes:
        enabled: Whether any step is verified.
        findings: The findings of all verified steps.
        compared: The number of results that were compared in all verified steps.
        written: Weights that steps have written. The next recorded step copies them.
    """

    enabled: bool = True
    _verified: set[object] = field(default_factory=set)
    _attempts: dict[object, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    compared: int = 0
    written: list[Tensor] = field(default_factory=list)

    def __reduce__(self) -> tuple[type["Verifier"], tuple[bool]]:
        """Copies and pickles as a new verifier, because the copy of a pipe has different modules."""
        return Verifier, (self.enabled,)

    def is_new(self, combination: Combination | None) -> bool:
        """Returns whether a step of this combination must be verified."""
        if combination is None or combination in self._verified:
            return False
        return self._attempts.get(combination, 0) < MOST_ATTEMPTS

    def count_attempt(self, combination: Combination | None) -> None:
        self._attempts[combination] = self._attempts.get(combination, 0) + 1

    def finish(self, combination: Combination | None) -> None:
        self._verified.add(combination)

    def combination_of(self, run: Run) -> Combination | None:
        """Returns the combination of a step. None if the step is not verified (no gradients, or not enabled)."""
        if not self.enabled or not run.trains:
            return None
        model = list[tuple[int, bool, int, list[bool]]]()
        for stage in run.stages.local:
            for part in stage.modules:
                requires_grad = [p is not None and p.requires_grad for p in part._parameters.values()]
                model.append((id(part), part.training, count_forward_hooks(part), requires_grad))
        program = len(run.micro_batch_sizes), run.slices, run.path, run.thread_state.autocasts
        loss = getattr(run.loss_fn, "__code__", type(run.loss_fn))
        return repr(model), program, loss, tuple([_kind(crossing.value) for crossing in run.inputs[:2]])


class Verification(Feature):
    """Verifies a step if no step with the same combination of properties has been verified.

    Attributes:
        wanted: Whether to verify this step. All processes have the same value.
        combination: The properties of the step. Later steps with the same properties are not verified.
        record: The record of the step while it runs. None if the step is not verified.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.wanted = verifier, False
        self.combination: Combination | None = None
        self.record: StepRecord | None = None
        self._evidence: Evidence | None = None
        self._caller = 0, copy_context()
        self._variables: list[Context] = []  # context variables of rank threads

    def decide(self, run: Run) -> None:
        """Decides whether to verify a step. Later, `Context.agree` sends one decision to all processes."""
        self.combination = self.verifier.combination_of(run)
        self.wanted = self.verifier.is_new(self.combination)

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work |= {kind: partial(self._perform, work[kind]) for kind in StepRecord.kinds & work.keys()}
        work[Kind.SEND] = partial(self._send, work[Kind.SEND])

    def _perform(self, perform: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        if self.record is None:
            perform(run, rank, task)
            return
        self.record.perform(perform, run, rank, task)
        if get_ident() != self._caller[0]:
            self._variables.append(copy_context())

    def _send(self, send: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        if self.record is None:
            send(run, rank, task)
        else:
            self.record.send(send, run, rank, task)

    @contextmanager
    def around_pass(self, run: Run, table: CompiledTable) -> Iterator[None]:
        self._caller, self._variables = (get_ident(), copy_context()), []
        try:
            if table is not run.compiled.backward:
                self._begin(run)
            if self.record is not None:
                self.record.begin_pass(run, only_forward=table is run.compiled.forward)
                for rank in run.ranks:  # Ranks wait for the copies that this thread has queued.
                    rank.stream.begin([*rank.stream.caller_events])
            yield
            run.findings += self._variables_set()
            if self.record is not None and table is run.compiled.forward:
                self.record.check_gradients(run)
            elif self.record is not None:
                self._verify(run)
        except BaseException:
            self.record = self._evidence = None
            raise

    def around_layers(
        self, run: Run, rank: Rank, state: MicroBatchState, attached: Sequence[BoundaryInput], call: StageCall
    ) -> AbstractContextManager[object]:
        record = self.record
        return _NOTHING if record is None else record.around_layers(run, rank, state, attached, call)

    def _begin(self, run: Run) -> None:
        """Starts the record of a step, after the aliases of shared weights have been created."""
        stages = run.stages.local
        self.verifier.count_attempt(self.combination)
        if reason := _reason_against(stages):
            self._give_up(run, reason)
            return
        if any(is_lazy(p) for stage in stages for layer in stage.layers for p in layer.module.parameters()):
            return  # Parameters are initialized in this step. The next one is verified.
        try:
            evidence = Evidence.of(run, self.verifier.written)
        except OUT_OF_MEMORY:
            self._give_up(run, NO_MEMORY)
            return
        if run.stages.threaded and (places := evidence.began.thread_locals):
            run.findings.append(THREAD_LOCALS.format(places=in_words(places)))
        if evidence.began.uncopyable:
            self._give_up(run, f"state cannot be copied: {in_words(evidence.began.uncopyable)}")
            return
        self._evidence = evidence
        self.record = StepRecord(stages, len(run.micro_batch_sizes), run.slices, calls_loss=evidence.calls_loss)
        run.context.keep_exchanges(self.record.count)

    def _give_up(self, run: Run, why: str) -> None:
        finding = NOT_REPLAYED.format(why=why)
        run.findings.append(finding)
        self.verifier.findings.append(finding)
        if why != NO_MEMORY:  # The next step may have enough memory.
            self.verifier.finish(self.combination)

    def _verify(self, run: Run) -> None:
        """Replays the recorded micro-batches of a step, and compares the results.

        Raises:
            VerificationError: If the results may differ from the reference loop.
        """
        record, evidence = self.record, self._evidence
        assert record is not None
        assert evidence is not None
        self.record = self._evidence = None
        if record.is_dropped:
            self._give_up(run, NO_MEMORY)
            return
        leaves = {key: leaf for each in record.stages.values() for key, leaf in each.reached.items()}
        gradients = {key: leaf.grad for key, leaf in leaves.items()}
        for leaf in leaves.values():
            leaf.grad = None
        wait_for_ranks(run)
        ended = None
        try:
            written = evidence.written_weights(run)
            copied = [*written.values(), *evidence.copied]
            ended = StagesState.of(run, copied, evidence.began, calls_loss=evidence.calls_loss)
            ended.leave_unused_generators(evidence.began)
            replays = Replays(run, record, evidence.began)
            comparison = Comparison(run, record, evidence, ended, written, replays)
            findings = comparison.find(in_threads=bool(self._variables))
            self.verifier.written += comparison.writing
            if comparison.is_conclusive:
                self.verifier.finish(self.combination)
        except OUT_OF_MEMORY:
            findings = [NOT_REPLAYED.format(why=NO_MEMORY)]
        finally:
            wait_for_ranks(run)
            if ended is not None:
                ended.restore()
            for key, leaf in leaves.items():
                leaf.grad = gradients[key]
        self.verifier.compared += sum(map(StageRecord.count_results, record.stages.values()))
        self.verifier.findings += findings
        run.findings += findings

    def _variables_set(self) -> list[str]:
        """Returns a finding if layers have set context variables in rank threads."""
        (_, caller), ignored = self._caller, variables_of_torch()
        pairs = (pair for context in self._variables for pair in context.items())
        names = [
            variable.name
            for variable, value in pairs
            if caller.get(variable, ABSENT) is not value
            and variable not in ignored
            and not variable.name.startswith(OF_PYTHON_AND_COMPILERS)
        ]
        return [SETS_VARIABLES.format(names=", ".join(dict.fromkeys(names)))] if names else []


def _reason_against(stages: Sequence[Stage]) -> str:
    modules = [module for stage in stages for module in stage.modules]
    parameters = (p for module in modules for p in module._parameters.values() if p is not None)
    if any(map(is_sharded, modules)) or any(hasattr(p, "device_mesh") for p in parameters):
        return "its weights are sharded (fully_shard, parallelize_module), and a replay would communicate"
    return ""


def _kind(value: Tree) -> object:
    """Returns the structure of a value, with the dtype, device and number of dimensions of its tensors."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.dim(), value.requires_grad
    if kind is dict:
        return tuple((key, _kind(item)) for key, item in value.items())  # type: ignore[attr-defined]  # The value is a dict.
    if kind is list or kind is tuple:
        return kind, *map(_kind, value)  # type: ignore[call-overload]  # The value is a list or tuple.
    return kind, *map(_kind, tensors_in(value))  # Does not run code of other classes.
