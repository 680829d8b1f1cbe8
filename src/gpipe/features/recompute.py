"""R: drops what a forward computed, and computes it again for the backward, with bitwise identical results.

The forward keeps the inputs of the stage, a copy of its buffers, and a digest of its outputs. The outputs of the
recomputation must have the same digest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, copy_context
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.runtime.actions import new_state, roots_of, run_layers, send_outputs
from gpipe.runtime.compiled_table import CompiledAction, CompiledTable
from gpipe.runtime.feature import Feature, Work
from gpipe.runtime.run import MicroBatchState, Rank, Run
from gpipe.schedule.action import Kind
from gpipe.stages.boundary import BoundaryValue, leaves_of
from gpipe.stages.buffers import SavedBuffers
from gpipe.stages.digest import Digest, differ, digest
from gpipe.stages.dtensor import is_sharded
from gpipe.stages.memory_layout import version
from gpipe.stages.stage import Stage, StageCall, StageOutput
from gpipe.stages.tree import tensors_in

DIFFERS = (
    "The recomputation of {layer} gave different values than its forward, so gradients would be wrong. The layer "
    "depends on state that has changed in between: random numbers of numpy or Python, a counter, the time, a value "
    "that another layer left on a module, or an attribute or weight that was changed before backward(). Draw with "
    "torch, keep state that changes in buffers (register_buffer), stash and pop values for other layers, or pass "
    "remat='never' for this stage."
)
WRITES_WEIGHTS = (
    "The recomputation of {layer} gave different values than its forward, so gradients would be wrong. Its forward "
    "writes the weights {names}, and the recomputation reads the written values. Pass remat='never' for this stage, "
    "or update these weights after pipe.step(...)."
)
LEFT = (
    "A layer left a tensor on a module ({left}), which may belong to a later micro-batch by now. Stash the tensor in "
    "the layer that makes it, and pop it where it is used."
)
CHANGED = (
    "a parameter was changed or replaced, or train() or eval() was called, between a forward and its "
    "backward, which would recompute with the new value; call backward first, or use remat='never'"
)
UNSEEN_MODES = (
    "{modes} is active, but has no effect on the recomputation in backward(). Use pipe.step(...), or remat='never'. "
    "[mode-not-in-recomputation]"
)


class RecomputeError(RuntimeError):
    """A recompute gave other values than its forward."""


class Fingerprint(NamedTuple):
    """A digest of the outputs of a stage, and the leaves that a backward from them reaches."""

    digest: Digest
    reached: frozenset[int]

    @classmethod
    def of(cls, output: StageOutput, *, outlives: bool = True) -> "Fingerprint":
        reached = frozenset(map(id, leaves_of(tensors_in(output.values))))
        return cls(digest([*output.values, *output.for_loss.values()], outlives=outlives), reached)

    def differs(self, output: StageOutput, stage: Stage, given: Sequence[BoundaryValue]) -> bool | Tensor:
        """Whether the outputs of another run differ (see `differ`), or it reaches other weights or inputs."""
        other = Fingerprint.of(output, outlives=False)
        if apart := self.reached ^ other.reached:  # Layers may create other leaves again.
            own = {id(leaf) for crossing in given for leaf in crossing.leaves}
            if apart & own.union(*(map(id, layer.module.parameters()) for layer in stage.layers)):
                return True
        return differ(self.digest, other.digest)


class _Kept(NamedTuple):
    """The state that a forward keeps for its recomputation, besides its inputs."""

    buffers: SavedBuffers
    fingerprint: Fingerprint


class Recompute(Feature):
    """Recomputes what forwards dropped, on all ranks of this process."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._deferred_mismatches = defaultdict[int, list[Tensor]](list)  # by rank, on a GPU: reading halts it
        self._versions: object = None  # of what it depends on, after the forward of a call
        self._variables: Context | None = None  # of a call, if its backward runs in autograd's thread of a device

    def perform_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work[Kind.FORWARD] = partial(self._forward, work[Kind.FORWARD])
        work[Kind.RECOMPUTE] = self._recompute

    @contextmanager
    def around_pass(self, run: Run, table: CompiledTable) -> Iterator[None]:
        """Between the halves of a call, checks that nothing has changed on which the recomputation depends."""
        if table is run.compiled.forward:
            run.thread_state.refuse_unsupported(UNSEEN_MODES)
        elif table is run.compiled.backward:
            if _versions(run) != self._versions:
                raise RuntimeError(CHANGED)
            for stage in _stages(run):
                stage.begin()
        yield
        for rank in run.ranks:
            if mismatches := self._deferred_mismatches.pop(rank.rank, []):
                with rank.stream.enter():
                    differs = bool(torch.stack(mismatches).any())
                if differs:
                    raise recompute_error(f"a layer of {run.context.name(rank.rank)}")
        if table is run.compiled.forward:
            self._variables = copy_context() if run.stages.queues else None
            self._versions = _versions(run)  # after the forward, in which lazy modules get theirs

    def _forward(self, forward: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """F: drops what the layers computed, if it will be recomputed."""
        if task.micro_batch not in run.routes[task.stage].micro_batches[Kind.RECOMPUTE]:
            forward(run, rank, task)
            return
        state = new_state(run, rank, task)
        buffers = state.stage_run.buffers
        before = buffers.before()
        output = run_layers(run, rank, state)
        buffers.after(before)
        send_outputs(run, rank, task, state, output)
        self._kept[task.stage, task.micro_batch] = _Kept(before, Fingerprint.of(output))
        state.roots, state.gradients = [], []

    def _recompute(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """R: runs the layers of a stage again, for their graph."""
        state = rank.states[task.stage, task.micro_batch]
        kept = self._kept.pop((task.stage, task.micro_batch))
        state.progress = run.context.new_progress()
        as_before = partial(state.stage_run.buffers.as_before, kept.buffers)
        variables = self._variables
        with as_before():
            if variables is None:
                output = run_layers(run, rank, state)
            else:
                output = variables.run(run_layers, run, rank, state)
            differs = kept.fingerprint.differs(output, state.stage_run.stage, state.inputs)
            if differs is True:
                _raise_difference(run, state, as_before)
        if isinstance(differs, Tensor):
            self._deferred_mismatches[rank.rank].append(differs)
        del kept, as_before
        state.roots = roots_of(run, rank, state, output)


def _stages(run: Run) -> list[Stage]:
    return [stage for stage in run.stages.local if run.routes[stage.index].micro_batches[Kind.RECOMPUTE]]


def _versions(run: Run) -> tuple[list[tuple[int, int]], list[bool]]:
    """The parameters on which recomputations depend, how often each was changed, and the modes of modules."""
    modules = [layer.module for stage in _stages(run) for layer in stage.layers]
    weights = chain(run.aliases.replaced, *(module.parameters() for module in modules))
    versions = [(id(weight), version(weight)) for weight in weights]
    parts = [part for module in modules for part in module.modules()]
    return [] if any(map(is_sharded, parts)) else versions, [part.training for part in parts]


def _raise_difference(
    run: Run, state: MicroBatchState, as_before: Callable[[], AbstractContextManager[None]]
) -> None:
    """Raises an error that names the layer whose recomputation differs, if it does so again."""
    arrived = {name: crossing.value for name, crossing in zip(state.routes.skips_in, state.inputs, strict=False)}
    call, layer = StageCall(arrived, run.rng_key(state.micro_batch), state.progress), None
    layers = state.stage_run.stage.layers
    weights = {each.full_name(name): weight for each in layers for name, weight in each.module.named_parameters()}
    versions = {name: version(weight) for name, weight in weights.items()}
    if not run.context.runs_every_backward:  # Otherwise BatchNorm would wait for what replicas do not send again.
        with run.thread_state.around_layers():
            layer = state.stage_run.stage.find_nondeterministic_layer(state.inputs[-1].value, call, as_before)
    written = [name for name, weight in weights.items() if version(weight) != versions[name]]
    if layer is None:
        raise recompute_error("a layer of this partition", tensors_left_on(run.stages.local), written)
    state.progress.found = str(layer)
    raise recompute_error(str(layer), written=written)


def recompute_error(layer: str, left: str = "", written: Sequence[str] = ()) -> RecomputeError:
    """Returns the error for a recomputation that differs from its forward.

    Args:
        layer: A description of the layer.
        left: Tensors that layers left on modules.
        written: Names of weights that the forward of the layer writes.
    """
    if written:
        return RecomputeError(WRITES_WEIGHTS.format(layer=layer, names=", ".join(written)))
    error = RecomputeError(DIFFERS.format(layer=layer))
    if left:
        error.add_note(LEFT.format(left=left))
    return error


def tensors_left_on(stages: Iterable[Stage]) -> str:
    """In words, the attributes of modules where forwards left tensors."""
    found = [
        f"{name} of {layer}"
        for stage in stages
        for layer in stage.layers
        for module in layer.module.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not (value.is_leaf and value.requires_grad)
    ]
    return ", ".join(dict.fromkeys(found))
