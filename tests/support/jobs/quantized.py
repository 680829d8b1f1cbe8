"""Jobs: a quantized model with adapters over processes."""

from typing import Any

from tests.support.processes.digests import Digests, digests
from tests.support.quantized import adapted, batch, piped, three_steps


def train(rank: int, world: int, name: str, how: dict[str, Any]) -> Digests:
    """What three steps leave in a rank."""
    with piped(adapted(name), world, driver="process", **how) as pipe:
        return digests(three_steps(pipe, lambda _: pipe.step(batch())))
