"""Does the soak see what is wrong? Wrong stand-ins for the library, each with the verdicts that it must be given.

python -m tests.soak.check
"""

import os
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .judge import Make
from .piped import Piped
from .reference import Loop


class LastBit(Loop):
    """One gradient is off by one unit in the last place."""

    def run(self, inputs: Any, targets: Any) -> Any:
        loss = super().run(inputs, targets)
        for parameter in reversed(list(self.model.parameters())):
            if parameter.grad is not None and parameter.grad.is_floating_point():
                flat = parameter.grad.view(-1)
                flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf, dtype=flat.dtype))
                break
        return loss


class ZeroForNone(Loop):
    """What has no gradient is given one of zeros."""

    def run(self, inputs: Any, targets: Any) -> Any:
        loss = super().run(inputs, targets)
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return loss


class Copied(Loop):
    """Each micro-batch is a copy, at another place modulo 64 bytes."""

    def _begin(self, inputs: Any) -> tuple[int, list[Any]]:
        number, parts = super()._begin(inputs)
        return number, pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, parts)


class WrongKey(Loop):
    """The key of all randomness is another."""

    def _begin(self, inputs: Any) -> tuple[int, list[Any]]:
        number, parts = super()._begin(inputs)
        return number + 1, parts


class Twice(Loop):
    """Every forward runs twice, as a recompute that leaves its traces does."""

    def _forward(self, x: Any, step: int, micro_batch: int) -> tuple[Any, dict[str, Any]]:
        with torch.no_grad():
            super()._forward(pytree.tree_map_only(torch.Tensor, torch.clone, x), step, micro_batch)
        return super()._forward(x, step, micro_batch)


class NoHooks(Loop):
    """Hooks on what comes into a layer are dropped: each begins a new graph, as a stage does, and loses them."""

    def step(self, inputs: Any, targets: Any) -> Any:
        register = torch.Tensor.register_hook
        torch.Tensor.register_hook = lambda tensor, hook: register(tensor, lambda g: None)  # type: ignore[method-assign]
        try:
            return super().step(inputs, targets)
        finally:
            torch.Tensor.register_hook = register  # type: ignore[method-assign]


class Vague(Loop):
    def run(self, inputs: Any, targets: Any) -> Any:
        raise RuntimeError("something went wrong")


class Late(Loop):
    """An error that names all there is, at the second step."""

    def run(self, inputs: Any, targets: Any) -> Any:
        if self.step_number:
            raise ValueError(
                "layer 1 buffer aux weight of the loss Plain Data draw rng thread scale; stash it, please use"
            )
        return super().run(inputs, targets)


class Hanging(Loop):
    def run(self, inputs: Any, targets: Any) -> Any:
        time.sleep(1000)


class Gone(Loop):
    def run(self, inputs: Any, targets: Any) -> Any:
        os._exit(3)


STAND_INS: dict[str, Make] = {
    made.__name__: made
    for made in (Loop, LastBit, ZeroForNone, Copied, WrongKey, Twice, NoHooks, Vague, Late, Hanging, Gone)
} | {"library": Piped}

# For each stand-in: kinds to try it on, and a verdict that must come up, at least this often in 12.
EXPECTED: tuple[tuple[str, tuple[str, ...], str, int], ...] = (
    ("Loop", ("s1_tensor_hook", "s2_slice_of_data", "s5_undefined_gradients", "s7_unseen_writes"), "equal", 12),
    ("LastBit", ("s2_view_between", "checkpoint_with_dropout"), "SILENT", 11),
    ("ZeroForNone", ("unused_parameters", "mixture_of_experts", "s5_undefined_gradients"), "SILENT", 4),
    ("Copied", ("s2_slice_of_data", "s2_strided_inputs"), "SILENT", 3),
    ("WrongKey", ("everything_random", "ambient_generator_left_alone"), "SILENT", 10),
    ("Twice", ("s7_unseen_writes", "s7_begins_later"), "SILENT", 6),
    ("Twice", ("s12_foreign_draws",), "SILENT", 6),
    ("NoHooks", ("s1_tensor_hook", "s1_hook_on_view"), "SILENT", 3),
    ("Vague", ("s2_slice_of_data", "checkpoint_with_dropout"), "CRASH", 12),
    ("Vague", ("s9_weight_in_loss",), "MISLEADING", 12),
    ("Late", ("s7_unseen_writes", "s9_weight_in_loss"), "MISLEADING", 3),
    ("Hanging", ("s2_slice_of_data",), "HANG", 1),
    ("Gone", ("s2_slice_of_data",), "CRASH", 1),
)


def main() -> int:
    """Tries all; 1 if one of them was not seen."""
    from .worker import Worker

    worker, failed = Worker(limit=20), 0
    for stand_in, kinds, wanted, least in EXPECTED:
        tries = 1 if stand_in in ("Hanging", "Gone") else 12
        verdicts = [worker.judge(kinds[i % len(kinds)], i // len(kinds), stand_in) for i in range(tries)]
        counts = Counter(verdict.verdict for verdict in verdicts)
        seen = counts[wanted] >= least
        failed += not seen
        print(
            f"{'seen' if seen else 'MISSED':7} {stand_in:12} {wanted} at least {least} times: {dict(counts)}",
            flush=True,
        )
    worker.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
