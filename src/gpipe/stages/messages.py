"""What ranks give each other: messages, under labels that say which.

What crossed between processes in one run, as data: each end notes for itself which tensors, and when.
"""

from enum import IntEnum, StrEnum
from typing import NamedTuple, TypeAlias

import torch

from gpipe.stages.boundary import BoundaryValue, Gradients

Message: TypeAlias = BoundaryValue | Gradients
ReadyEvent: TypeAlias = torch.Event | float | None
"""When a tensor that crosses is whole: an event on its maker's stream, or on a CPU the time, for the recorder."""


class Control(IntEnum):
    """What processes tell each other outside of the program: in a label it stands where routes have their place."""

    AGREEMENT = -1  # what all processes tell each other
    TIED_GRADIENTS = -2  # of shared weights, between the stages that use them
    GRADIENTS = -3  # which gradients a replica has, and then the gradients, to the replica that adds them up
    SUMMED_GRADIENTS = -4  # of all replicas
    HEADER = -5  # what the first stage tells the others before a run
    WEIGHT = -6  # by how much the micro-batches of a replica count
    OUTPUT = -7  # of the last stage, for the others
    DEFERRED_STATISTICS = -8  # of BatchNorm over the mini-batch of a replica
    MICRO_BATCHES = -9  # how many a replica has
    REDUCTION = -10  # by what a replica averages and scales losses
    INPUT_GRADIENTS = -11  # of a call's inputs, for processes whose inputs have a graph
    DECODED = -12  # of a micro-batch in generation, from a stage for the next
    PROMPTS = -13  # what all processes generate from
    STATE = -14  # of a replica, for one that comes back
    SHARDS = -15  # of weights that `fully_shard` spreads over replicas, and of their gradients
    BATCHNORM = -16  # statistics of a micro-batch at the stage's first BatchNorm; those of others follow below


class Request(StrEnum):
    """What the user called."""

    STEP = "step"
    CALL = "the pipe itself"
    BACKWARD = "backward"
    NORMS = "clip_grad_norm_"
    EXCHANGE = "saving or the like"
    GENERATE = "generate"


class Label(NamedTuple):
    """What a message carries: a route (its place in the program, or a `Control`), micro-batch, value or gradient."""

    route: int
    micro_batch: int
    gradient: bool


class Cancelled(BaseException):
    """Ends a rank that waits for a message which will not come, because another rank failed."""
