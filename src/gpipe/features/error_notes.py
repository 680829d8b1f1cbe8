"""Adds notes to an exception before it reaches the user: where in the pipeline it was raised, and what to do."""

import torch

from gpipe._torch.autograd import OFFLOADED
from gpipe.batch.losses import own_loss
from gpipe.errors import RemoteError, frames_of, innermost_code
from gpipe.runtime.compiled_table import CompiledTable
from gpipe.runtime.feature import Feature
from gpipe.runtime.run import Rank, Run
from gpipe.schedule.action import MOVES, NAMES, Action, Kind
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

ONE_VALUE = "Expected more than 1 value per channel"  # how torch's normalizations begin to refuse
WRONG_NUMBER = ("missing ", "takes ")  # so Python goes on where arguments are too few or too many
ONE_VALUE_A_LAYER = (
    "\na layer is given one value, what the layer before returned, also where that is a tuple: let forward take one "
    "argument and unpack it there, as in def forward(self, both): x, mask = both"
)
NOT_TENSORS = {
    "NoneType": "does its forward lack a return?",
    "tuple": "a layer is given all of it, as of an LSTM or an attention; put one between that takes the tensor out",
    "dict": "a layer is given all of it; put one between that takes the tensor out",
}
TWO_VALUES_A_LOSS = "\nthe loss is called as loss_fn(output, target), with what one micro-batch gave and its targets"
DISABLES_HOOKS = innermost_code(torch.autograd.graph.disable_saved_tensors_hooks)
NO_HOOKS = (
    "\nremat='offload' hooks what autograd saves, which this layer does not allow (torch.func.grad and its like, "
    "disable_saved_tensors_hooks): give its stage another remat, as in remat=['offload', 'always']"
)
NO_TARGETS = "\nstep was given no targets: give them behind the inputs, as in pipe.step(inputs, targets, loss_fn)"
SECOND_BACKWARD = "Trying to backward through the graph a second time"
GRAPH_OF_ANOTHER = (
    "\nif a layer leaves a tensor with a graph on a module, and another layer or the loss uses it: return it as part "
    "of the value, or stash it and pop it where it is used (loss_fn.pop for a loss)"
)
UNUSED = "appears to not have been used in the graph"
OF_AN_EARLIER_STAGE = (
    "\nthe graph is cut between stages: torch.autograd.grad with respect to a tensor of an earlier stage finds only "
    "what this stage computes from it, and allow_unused=True would give a wrong gradient. Keep the layers from where "
    "the tensor is made to this call in one stage (partitions=[...])."
)
OF_A_THREAD = "'_thread._local' object has no attribute"
NOT_OF_THIS_THREAD = (
    "\na threading.local has what each thread has set there, and rank threads have set nothing: use a "
    "contextvars.ContextVar, which they see as the caller has it, or driver='lockstep'"
)
TOO_FEW_VALUES = (
    "\nthis micro-batch is too small to normalize: use fewer micro-batches or a larger mini-batch, "
    "and leave out a last mini-batch that is smaller (drop_last=True)"
)
CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"
OF_ANOTHER = (
    "\nIf a forward writes this tensor (a buffer or a frozen weight), a later micro-batch has changed it "
    "before this backward. Compute with a clone: x * self.mean.clone(). For a buffer, remat='always' also helps."
)


class ErrorNotes(Feature):
    """Adds a note to each exception of an action."""

    def note_error(self, run: Run, rank: Rank, table: CompiledTable, at: int, error: BaseException) -> None:
        is_of_another = isinstance(error, RemoteError) and error.received
        if not is_of_another and not isinstance(error, Cancelled):
            add_note(error, run, rank, table.program, at)


def add_note(error: BaseException, run: Run, rank: Rank, program: Program, at: int) -> None:
    """Adds a note to an exception: where it was raised, and what to do."""
    if not isinstance(getattr(error, "__notes__", []), list):
        del error.__notes__  # something of the user's own, where Python wants a list
    action = program.table[rank.rank][at]
    layer = layer_of(rank, action, error)
    where = in_words(program, rank.rank, at, layer, run.context.name(rank.rank))
    lacks_targets = layer == LOSS and run.loss_fn is not own_loss and all(target is None for target in run.targets)
    wants_no_hooks = frames_of(error)[-1].tb_frame.f_code is DISABLES_HOOKS
    offloads = action.micro_batch in run.routes[action.stage].micro_batches[Kind.OFFLOAD]
    error.add_note(
        where + advice(error, layer) + NO_TARGETS * lacks_targets + NO_HOOKS * (wants_no_hooks and offloads)
    )


def layer_of(rank: Rank, action: Action, error: BaseException) -> str | None:
    """Describes the layer in which an action failed, as far as that can be known."""
    at, m = action.stage, action.micro_batch
    if m is None or (at, m) not in rank.states or action.kind in MOVES:
        return None
    layers, progress = rank.stages[at].stage.layers, rank.states[at, m].progress
    if action.kind in BACKWARDS:
        layer = progress.maker_of(failed_node(error), layers)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        layer = progress.found
    else:
        layer = progress.last_of(layers)
    return layer or f"one of {', '.join(map(str, layers))}"


def advice(error: BaseException, layer: str | None) -> str:
    """What to do about an exception of Python's or torch's whose text does not say it of a pipe."""
    said = error.args[0] if error.args else ""  # an exception's own text may be code that raises
    if not isinstance(said, str):
        return ""
    if said.startswith(ONE_VALUE):
        return TOO_FEW_VALUES
    if said.startswith(CHANGED):
        return OF_ANOTHER
    if said.startswith((SECOND_BACKWARD, OFFLOADED)):
        return GRAPH_OF_ANOTHER
    if UNUSED in said:
        return OF_AN_EARLIER_STAGE
    if said.startswith(OF_A_THREAD):
        return NOT_OF_THIS_THREAD
    for kind, remedy in NOT_TENSORS.items():
        if said.endswith(f"must be Tensor, not {kind}") and layer not in (None, LOSS):
            return f"\nif it is what the layer before returned: {remedy}"
    called, _, rest = said.partition("() ")
    if type(error) is not TypeError or not rest.startswith(WRONG_NUMBER):
        return ""
    owner, _, method = called.rpartition(".")
    if method == "forward" and layer is not None and layer.endswith(f": {owner.rpartition('.')[2]})"):
        return ONE_VALUE_A_LAYER
    return TWO_VALUES_A_LOSS if layer == LOSS else ""


def in_words(program: Program, rank: int, at: int, layer: str | None, name: str) -> str:
    """A place in the row of a rank, with the row around it."""
    row = program.table[rank]
    action = row[at]
    computes_loss = layer == LOSS and action.kind in (Kind.FORWARD, Kind.RECOMPUTE)
    phase = "loss" if computes_loss else PHASES[action.kind]
    what = phase + ("" if action.micro_batch is None else f" of micro-batch {action.micro_batch}")
    where = [name, f"stage {action.stage}", *([layer] if layer and not computes_loss else [])]
    return f"in the {what}, {', '.join(where)}, action {at + 1} of {len(row)}:\n    {program.around(rank, at)}"
