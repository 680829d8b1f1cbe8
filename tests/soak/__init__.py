"""Drawn networks, trained by the reference loop and by the library, compared bit for bit.

A *kind* (of `tests.support.kinds`; `tests/laws/test_users.py` judges some of each) is a function that draws one
network with its data from a random source; a *configuration* is a kind and a number, which draws the rest as well:
cut, micro-batches, rows, rematerialization, driver, seed, steps, and `step` or `loss.backward()`. What comes out of
one is a verdict:

    equal       losses, gradients, parameters after optimizer steps and buffers are those of the loop, bit for bit
    refused     an error where the contract allows one, in the first step, which names the culprit and what to do
    told        other numbers, where the contract allows them, and a warning or finding that says so
    SILENT      other numbers, and nothing said
    MISLEADING  an error that is too late, or does not name the true cause or a remedy
    CRASH       an error where there is nothing to refuse, or the interpreter is gone
    HANG        nothing came for too long; the process was ended
    void        the plain loop itself failed, or repeats itself not: a mistake of the kind, none of the library

The files of this soak: `trainers` (the loop and the library behind the same interface), `judge` (verdicts), `worker`
(one configuration in a process that may be lost), `run` (all of them, and the table).

    python -m tests.soak.run --configurations 6000 --seed 0 --minutes 20
    python -m tests.soak.run --only s1_tensor_hook --seed 17 -v        # one configuration again
    python -m tests.soak.run --list
"""
