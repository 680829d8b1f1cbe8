"""R: recomputes the activations of a stage before its backward pass (activation checkpointing).

The forward pass keeps only the inputs of the stage, a copy of its buffers, and a digest of its outputs. The outputs
of the recomputation must have the same digest, so that gradients are bitwise identical.
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
    "remat: the recomputation of {layer} gave different values than its forward pass. Draw random numbers with "
    "torch, keep changing state in buffers, stash values for other layers, or use remat='never' for this stage. "
    "[recomputation-differs]"
)
WRITES_WEIGHTS = (
    "remat: the recomputation of {layer} gave different values than its forward pass, which writes the weights "
    "{names}. Use remat='never' for this stage, or update these weights after pipe.step(...). "
    "[weights-written-in-forward]"
)
LEFT = (
    "A layer has stored a tensor on a module ({left}), and a later micro-batch may have replaced it. Stash the "
    "tensor in the layer that computes it, and pop it where it is used."
)
CHANGED = (
    "backward(): a parameter has changed, or train() or eval() was called, since the forward pass of this call, and "
    "remat would recompute with the new state. Call backward() first, or use remat='never'. "
    "[changed-before-backward]"
)
UNSEEN_MODES = (
    "{modes} is active, but has no effect on the recomputation in backward(). Use pipe.step(...), or remat='never'. "
    "[mode-not-in-recomputation]"
)


class RecomputeError(RuntimeError):
    """Raised if the recomputation of a stage differs from its forward pass, so that gradients would be wrong."""


class Fingerprint(NamedTuple):
    """A digest of the outputs of a stage, and the leaf tensors that a backward pass from these outputs reaches."""

    digest: Digest
    reached: frozenset[int]

    @classmethod
    def of(cls, output: StageOutput, *, outlives: bool = True) -> "Fingerprint":
        """Computes the fingerprint of an output. Pass `outlives=False` if the output is kept as well."""
        reached = frozenset(map(id, leaves_of(chain.from_iterable(map(tensors_in, output.values)))))
        return cls(digest([*output.values, *output.for_loss.values()], outlives=outlives), reached)

    def differs(self, output: StageOutput, stage: Stage, inputs: Sequence[BoundaryValue]) -> bool | Tensor:
        """Returns whether the output of a recomputation differs (see `differ`) or reaches different leaf tensors."""
        other = Fingerprint.of(output, outlives=False)
        if changed := self.reached ^ other.reached:  # Leaf tensors that layers create are new in each run.
            lasting = {id(leaf) for boundary in inputs for leaf in boundary.leaves}
            if changed & lasting.union(*(map(id, layer.module.parameters()) for layer in stage.layers)):
                return True
        return differ(self.digest, other.digest)


class Recompute(Feature):
    """Discards the activations of forward passes and recomputes them, on all ranks of this process."""

    def __init__(self) -> None:
        # What forward passes keep for their recomputation, in addition to their inputs, by stage and micro-batch.
        self._kept: dict[tuple[int, int], tuple[SavedBuffers, Fingerprint]] = {}
        # Results of comparisons on a GPU, by rank. They are read at the end, because reading waits for the GPU.
        self._deferred_mismatches = defaultdict[int, list[Tensor]](list)
        self._versions: object = None  # parameters and modes after the forward pass of a call
        self._variables: Context | None = None  # context variables, if autograd's device thread recomputes

    def wrap_actions(self, run: Run, work: dict[Kind, Work]) -> None:
        work[Kind.FORWARD] = partial(self._forward, work[Kind.FORWARD])
        work[Kind.RECOMPUTE] = self._recompute

    @contextmanager
    def around_pass(self, run: Run, table: CompiledTable) -> Iterator[None]:
        """In the backward half of a call, checks that parameters and modes are the same as in the forward half."""
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
            self._versions = _versions(run)  # after the forward pass, which initializes lazy modules

    def _forward(self, forward: Work, run: Run, rank: Rank, task: CompiledAction) -> None:
        """F: discards the activations of the micro-batch if they will be recomputed."""
        if task.micro_batch not in run.routes[task.stage].micro_batches[Kind.RECOMPUTE]:
            forward(run, rank, task)
            return
        state = new_state(run, rank, task)
        buffers = state.stage_run.buffers
        before = buffers.before()
        output = run_layers(run, rank, state)
        buffers.after(before)
        send_outputs(run, rank, task, state, output)
        self._kept[task.stage, task.micro_batch] = before, Fingerprint.of(output)
        state.roots, state.gradients = [], []

    def _recompute(self, run: Run, rank: Rank, task: CompiledAction) -> None:
        """R: runs the layers of a stage again, to create their graph."""
        state = rank.states[task.stage, task.micro_batch]
        saved, fingerprint = self._kept.pop((task.stage, task.micro_batch))
        state.progress = run.context.new_progress()
        as_before = partial(state.stage_run.buffers.as_before, saved)
        variables = self._variables
        with as_before():
            if variables is None:
                output = run_layers(run, rank, state)
            else:
                output = variables.run(run_layers, run, rank, state)
            differs = fingerprint.differs(output, state.stage_run.stage, state.inputs)
            if differs is True:
                _raise_difference(run, state, as_before)
        if isinstance(differs, Tensor):
            self._deferred_mismatches[rank.rank].append(differs)
        del saved, fingerprint, as_before
        state.roots = roots_of(run, rank, state, output)


def _stages(run: Run) -> list[Stage]:
    return [stage for stage in run.stages.local if run.routes[stage.index].micro_batches[Kind.RECOMPUTE]]


def _versions(run: Run) -> tuple[list[tuple[int, int]], list[bool]]:
    """Returns the version of each parameter that recomputations use, and the training mode of each module."""
    modules = [layer.module for stage in _stages(run) for layer in stage.layers]
    weights = chain(run.aliases.replaced, *(module.parameters() for module in modules))
    versions = [(id(weight), version(weight)) for weight in weights]
    parts = [part for module in modules for part in module.modules()]
    return [] if any(map(is_sharded, parts)) else versions, [part.training for part in parts]


def _raise_difference(
    run: Run, state: MicroBatchState, as_before: Callable[[], AbstractContextManager[None]]
) -> None:
    """Raises an error. Runs the layers again, to name the layer whose recomputation differs in the message."""
    skips = {name: crossing.value for name, crossing in zip(state.routes.skips_in, state.inputs, strict=False)}
    call, layer = StageCall(skips, run.rng_key(state.micro_batch), state.progress), None
    layers = state.stage_run.stage.layers
    weights = {each.full_name(name): p for each in layers for name, p in each.module.named_parameters()}
    versions = {name: version(weight) for name, weight in weights.items()}
    if not run.context.runs_every_backward:  # Otherwise BatchNorm would wait for messages of other replicas.
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
        left: A description of tensors that layers have stored on modules.
        written: Names of weights that the forward of the layer writes.
    """
    if written:
        return RecomputeError(WRITES_WEIGHTS.format(layer=layer, names=", ".join(written)))
    error = RecomputeError(DIFFERS.format(layer=layer))
    if left:
        error.add_note(LEFT.format(left=left))
    return error


def tensors_left_on(stages: Iterable[Stage]) -> str:
    """Describes the attributes of modules in which forward passes have stored tensors."""
    attributes = [
        f"{name} of {layer}"
        for stage in stages
        for layer in stage.layers
        for module in layer.module.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not (value.is_leaf and value.requires_grad)
    ]
    return ", ".join(dict.fromkeys(attributes))
