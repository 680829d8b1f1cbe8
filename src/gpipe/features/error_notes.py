"""Adds a note to each exception that an action raises. The note describes the place in the pipeline, and a fix."""

import torch

from gpipe._torch.autograd import OFFLOADED
from gpipe.batch.losses import own_loss
from gpipe.errors import RemoteError, frames_of, innermost_code
from gpipe.runtime.compiled_table import CompiledTable
from gpipe.runtime.feature import Feature
from gpipe.runtime.run import Rank, Run
from gpipe.schedule.action import MOVES, NAMES, STREAMS, Action, Kind
from gpipe.schedule.program import Program
from gpipe.schedule.rules import BACKWARDS
from gpipe.stages.boundary import failed_node
from gpipe.stages.messages import Cancelled
from gpipe.stages.stage import LOSS

PHASES = NAMES | {
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.UNSHARD: "gather of weights",
    Kind.RESHARD: "freeing of gathered weights",
    Kind.REDUCE: "reduction over replicas",
    Kind.TIE: "summation of shared gradients",
    Kind.COMMIT: "commit of BatchNorm statistics",
}

# How messages of torch and Python start or end.
ONE_VALUE = "Expected more than 1 value per channel"
WRONG_NUMBER = ("missing ", "takes ")
SECOND_BACKWARD = "Trying to backward through the graph a second time"
UNUSED = "appears to not have been used in the graph"
MISSING_THREAD_LOCAL = "'_thread._local' object has no attribute"
CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"
DISABLES_HOOKS = innermost_code(torch.autograd.graph.disable_saved_tensors_hooks)

# Advice that follows them.
ONE_ARGUMENT_PER_LAYER = (
    "A layer receives one argument, the output of the layer before, even if that is a tuple. Unpack it in forward: "
    "def forward(self, both): x, mask = both [one-argument-per-layer]"
)
NOT_A_TENSOR = (
    "If the layer before returns {kind}: add a missing return statement, or add a layer that returns only the "
    "tensor. [layer-input-not-tensor]"
)
TWO_ARGUMENTS_OF_LOSS = (
    "loss_fn is called as loss_fn(output, target), with the output and the target of one micro-batch. "
    "[loss-fn-arguments]"
)
NO_HOOKS = (
    "remat='offload' needs hooks on saved tensors, which this layer disables (torch.func.grad does). Use a "
    "different remat for its stage: remat=['offload', 'always']. [offload-without-hooks]"
)
NO_TARGETS = "targets= is missing. Call pipe.step(inputs, targets, loss_fn). [targets-missing]"
FOREIGN_GRAPH = (
    "A layer may have stored a tensor with its graph on a module. Return this tensor as part of the output of the "
    "layer, or stash it and pop it where it is used. [tensor-with-graph-on-module]"
)
OF_EARLIER_STAGE = (
    "Each stage has its own graph, so torch.autograd.grad cannot reach a tensor of an earlier stage. Keep the "
    "layers from that tensor to this call in one stage (partitions=[...]). [gradient-of-earlier-stage]"
)
NOT_IN_RANK_THREADS = (
    "Rank threads do not see values that the calling thread has set in a threading.local. Use a "
    "contextvars.ContextVar, or driver='lockstep'. [thread-local-state]"
)
TOO_FEW_VALUES = (
    "This micro-batch is too small to normalize. Use fewer micro-batches or a larger mini-batch, and drop a "
    "smaller last mini-batch (drop_last=True). [micro-batch-too-small]"
)
CHANGED_BY_LATER = (
    "If a forward writes this tensor (a buffer or a frozen weight), a later micro-batch has changed it before this "
    "backward pass. Compute with a clone: x * self.mean.clone(). For a buffer, remat='always' also works. "
    "[buffer-changed-before-backward]"
)


class ErrorNotes(Feature):
    """Adds a note to each exception that an action raises, with the place in the pipeline and advice."""

    def note_error(self, run: Run, rank: Rank, table: CompiledTable, position: int, error: BaseException) -> None:
        if (isinstance(error, RemoteError) and error.received) or isinstance(error, Cancelled):
            return
        if not isinstance(getattr(error, "__notes__", []), list):
            del error.__notes__  # The class of the exception uses this name for something else; Python needs a list.
        program = table.program
        action = program.table[rank.rank][position]
        layer = layer_of(rank, action, error)
        where = in_words(program, rank.rank, position, layer, run.context.name(rank.rank))
        lacks_targets = (
            layer == LOSS and run.loss_fn is not own_loss and all(target is None for target in run.targets)
        )
        disables_hooks = frames_of(error)[-1].tb_frame.f_code is DISABLES_HOOKS
        offloads = action.micro_batch in run.routes[action.stage].micro_batches[Kind.OFFLOAD]
        notes = [where, advice(error, layer), NO_TARGETS * lacks_targets, NO_HOOKS * (disables_hooks and offloads)]
        error.add_note("\n".join(filter(None, notes)))


def layer_of(rank: Rank, action: Action, error: BaseException) -> str | None:
    """Returns a description of the layer in which an action failed, of all possible layers, or None."""
    stage, m = action.stage, action.micro_batch
    if m is None or (stage, m) not in rank.states or action.kind in MOVES | STREAMS:
        return None
    layers, progress = rank.stages[stage].stage.layers, rank.states[stage, m].progress
    if action.kind in BACKWARDS:
        layer = progress.maker_of(failed_node(error), layers)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        layer = progress.found
    else:
        layer = progress.last_of(layers)
    return layer or f"one of {', '.join(map(str, layers))}"


def advice(error: BaseException, layer: str | None) -> str:
    """Returns advice on an exception of Python or torch whose message does not explain the cause in a pipe."""
    text = error.args[0] if error.args else ""  # `str(error)` may run code of the user that raises.
    if not isinstance(text, str):
        return ""
    if text.startswith(ONE_VALUE):
        return TOO_FEW_VALUES
    if text.startswith(CHANGED):
        return CHANGED_BY_LATER
    if text.startswith((SECOND_BACKWARD, OFFLOADED)):
        return FOREIGN_GRAPH
    if UNUSED in text:
        return OF_EARLIER_STAGE
    if text.startswith(MISSING_THREAD_LOCAL):
        return NOT_IN_RANK_THREADS
    before, _, kind = text.rpartition("must be Tensor, not ")
    if before and kind in ("NoneType", "tuple", "dict") and layer not in (None, LOSS):
        return NOT_A_TENSOR.format(kind="None" if kind == "NoneType" else f"a {kind}")
    function, _, rest = text.partition("() ")
    if type(error) is not TypeError or not rest.startswith(WRONG_NUMBER):
        return ""
    owner, _, method = function.rpartition(".")
    if method == "forward" and layer is not None and layer.endswith(f": {owner.rpartition('.')[2]})"):
        return ONE_ARGUMENT_PER_LAYER
    return TWO_ARGUMENTS_OF_LOSS if layer == LOSS else ""


def in_words(program: Program, rank: int, position: int, layer: str | None, name: str) -> str:
    """Describes an action of a rank, with the actions around it."""
    row = program.table[rank]
    action = row[position]
    computes_loss = layer == LOSS and action.kind in (Kind.FORWARD, Kind.RECOMPUTE)
    phase = "loss" if computes_loss else PHASES[action.kind]
    phase += "" if action.micro_batch is None else f" of micro-batch {action.micro_batch}"
    where = [name, f"stage {action.stage}", *([layer] if layer and not computes_loss else [])]
    around = program.around(rank, position)
    return f"in the {phase}, {', '.join(where)}, action {position + 1} of {len(row)}:\n    {around}"
