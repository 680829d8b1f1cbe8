"""What the kinds of action are called in every report, and the order in which they are listed."""

from gpipe.plan.action import Kind

NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
    Kind.SEND: "send",
    Kind.RECEIVE: "receive",
    Kind.REDUCE: "reduce gradients",
    Kind.TIE: "add shared gradients",
    Kind.COMMIT: "commit statistics",
}
