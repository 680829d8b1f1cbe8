"""transformers' Trainer through a pipe over simulated devices: the bits of one device, and losses where labels are.

python -m tests.accelerator.trainer
"""

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from gpipe.integrations.transformers import GPipeTrainer
from tests.accelerator.placing import DEVICES, SIMULATOR
from tests.integrations.trained import Outcome, apart, next_words, train

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluated": {"arguments": {"eval_strategy": "epoch", "save_strategy": "epoch"}},
    "smoothed": {"arguments": {"label_smoothing_factor": 0.1}},
    "a loss of one's own": {"compute_loss_func": next_words},
}


def trained(partitions: int, how: dict[str, Any]) -> Outcome:
    """What a training over so many devices leaves, on the CPU."""
    make: Any = partial(GPipeTrainer, partitions=partitions, devices=DEVICES[:partitions])
    with TemporaryDirectory() as folder:
        log, weights, optimizer = train(make, "llama", Path(folder), **how)
    here = [{name: tensor.cpu() for name, tensor in one.items()} for one in (weights, optimizer)]
    assert all(isinstance(tensor, Tensor) for one in here for tensor in one.values())
    return Outcome(log, *here)


def main() -> int:
    """Tells what differs, and what was reported."""
    far = {name: apart(trained(2, how), trained(1, how)) for name, how in KINDS.items()}
    reports = SIMULATOR.take_reports()
    print({name: one for name, one in far.items() if one}, *reports[:1])
    return int(any(far.values()) or bool(reports))


if __name__ == "__main__":
    sys.exit(main())
