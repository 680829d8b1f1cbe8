"""Messages between ranks, and the labels that identify them."""

from enum import IntEnum, StrEnum
from typing import NamedTuple, TypeAlias

import torch

from gpipe.stages.boundary import BoundaryValue, Gradients

Message: TypeAlias = BoundaryValue | Gradients
ReadyEvent: TypeAlias = torch.Event | float | None
"""Signals that a tensor is complete: an event on the stream that computes the tensor, or on a CPU the time."""


class Control(IntEnum):
    """Kinds of messages between processes that the schedule does not contain. In a label, they replace the route."""

    AGREEMENT = -1  # values that must be equal in all processes
    TIED_GRADIENTS = -2  # gradients of shared weights, between the stages that use them
    GRADIENTS = -3  # which gradients a replica has and then these gradients, to the replica that sums them
    SUMMED_GRADIENTS = -4  # the sum over all replicas
    HEADER = -5  # properties of a run, from the first stage to the others
    WEIGHT = -6  # the weight of a replica's micro-batches in the loss
    OUTPUT = -7  # the output of the last stage, for the other processes
    DEFERRED_STATISTICS = -8  # statistics of BatchNorm over the mini-batch of a replica
    MICRO_BATCHES = -9  # the number of micro-batches of a replica
    REDUCTION = -10  # the factors by which a replica averages and scales losses
    INPUT_GRADIENTS = -11  # gradients of a call's inputs, for processes whose inputs require them
    DECODED = -12  # a micro-batch in generation, from a stage to the next
    PROMPTS = -13  # the prompts of a generation, for all processes
    STATE = -14  # the state of a replica, for one that rejoins
    SHARDS = -15  # shards of weights under `fully_shard`, and of their gradients
    BATCHNORM = -16  # statistics of a micro-batch at a stage's first BatchNorm; the next BatchNorms use -17, -18, ...


class Request(StrEnum):
    """The method of the pipe that the user called."""

    STEP = "step"
    CALL = "the pipe itself"
    BACKWARD = "backward"
    NORMS = "clip_grad_norm_"
    EXCHANGE = "saving or the like"
    GENERATE = "generate"


class Label(NamedTuple):
    """Identifies a message.

    Attributes:
        route: The index of the route in the program, or a `Control`.
        micro_batch: The index of the micro-batch.
        gradient: Whether the message carries gradients instead of values.
    """

    route: int
    micro_batch: int
    gradient: bool


class Cancelled(BaseException):
    """Ends a rank that waits for a message which will not arrive, because another rank has failed."""
