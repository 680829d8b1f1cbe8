"""Lightning's Trainer through a pipe over simulated devices: the bits of one device, and losses where labels are.

python -m tests.accelerator.lightning_trainer
"""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint

from gpipe.integrations.lightning import GPipeStrategy
from tests.accelerator.placing import DEVICES, SIMULATOR
from tests.integrations.test_lightning import OfAnyModel, Outcome, Quiet, WithHead, data, train

KINDS: dict[str, tuple[Callable[[], LightningModule], str]] = {
    "layers": (Quiet, "gpipe"),
    "a model": (OfAnyModel, "1f1b"),
    "weights behind the pipe": (WithHead, "zb_h1"),
}


class Simulated(Accelerator):
    """What Lightning asks of a kind of devices."""

    def setup_device(self, device: torch.device) -> None:
        """There is nothing to do."""

    def teardown(self) -> None:
        """There is nothing to do."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return DEVICES[:devices]

    @staticmethod
    def auto_device_count() -> int:
        return len(DEVICES)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


def trained(devices: int, kind: Callable[[], LightningModule], schedule: str = "gpipe", **how: Any) -> Outcome:
    """What a training over so many devices leaves, on the CPU."""
    strategy = GPipeStrategy(2, module="net", schedule=schedule)
    with TemporaryDirectory() as folder:
        found = train(Path(folder), strategy, kind, accelerator=Simulated(), devices=devices, **how)
    weights, optimizer = (
        {name: one.cpu() for name, one in some.items()} for some in (found.weights, found.optimizer)
    )
    return found._replace(weights=weights, optimizer=optimizer)


def resumed() -> Outcome:
    """What a training over two devices leaves that began in another Trainer."""
    with TemporaryDirectory() as folder:
        keep = ModelCheckpoint(folder, filename="kept")
        trained(2, Quiet, loader=data(), max_epochs=1, enable_checkpointing=True, callbacks=[keep])
        return trained(2, Quiet, loader=data(), ckpt_path=Path(folder, "kept.ckpt"))


def same(one: Outcome, other: Outcome) -> bool:
    tensors = [(one.weights, other.weights), (one.optimizer, other.optimizer)]
    return all(torch.equal(value, others[name]) for some, others in tensors for name, value in some.items())


def main() -> int:
    """Tells what differs, and what was reported."""
    differs = [name for name, given in KINDS.items() if not same(trained(2, *given), trained(1, *given))]
    differs += [] if same(resumed(), trained(1, Quiet, loader=data())) else ["resumed"]
    reports = SIMULATOR.take_reports()
    print(differs, *reports[:1])
    return int(bool(differs or reports))


if __name__ == "__main__":
    sys.exit(main())
