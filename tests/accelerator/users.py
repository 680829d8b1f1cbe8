"""What users do to networks, on the simulated accelerator: bits or refusals as anywhere, and no false report.

    python -m tests.accelerator.users --count 8

All kinds of `tests.support.kinds`, judged as `tests/laws/test_users.py` does, with all stages on one device.
What no loop can do on a device is listed with its reason.
"""

import argparse
import re
from collections import Counter
from functools import partial

import torch

from gpipe.features.recompute import RecomputeError
from tests.accelerator.placing import DEVICES, FIRST, SIMULATOR, moved, onto
from tests.soak.judge import FAILED, judge
from tests.soak.trainers import by_library
from tests.support.kinds import KINDS
from tests.support.kinds.case import Case, Kind, Setting
from tests.support.plain_loop import one_thread

RACES = ("a_buffer_of_two_modules", "loss_reads_a_buffer")
"""Kinds in which what one stage writes is read by another, past all that a pipe knows of: the reports are right."""
NAMED = {r"layer \d": r"layer (\d|of rank)", r"thread": r"thread|left somewhere"}
"""What a refused recompute says: on a device the rank, since the layer is not sought while others wait."""


REASON = re.compile(r"\w*Error: ")


class OnDevice(Kind):
    """A kind whose network and data are on the first device."""

    def case(self, number: int) -> tuple[Case, Setting]:
        case, setting = super().case(number)
        moved([*case.layers, *(case.plain or ())], FIRST)
        if case.refusal is not None:
            case.refusal = tuple(NAMED.get(words, words) for words in case.refusal)
            case.errors = (*case.errors, RecomputeError)
        case.batches = [onto(pair, FIRST) for pair in case.batches]
        return case, setting


def attempt(name: str, number: int) -> tuple[str, str]:
    """The verdict on a configuration, and why."""
    kind = KINDS[name]
    SIMULATOR.take_reports()
    with one_thread():
        found = judge(OnDevice(kind.name, kind.row, kind.make), number, partial(by_library, devices=FIRST))
    for device in range(len(DEVICES)):
        torch.accelerator.synchronize(device)
    reports = SIMULATOR.take_reports()
    if reports and found.verdict == "equal" and name not in RACES:
        return "reported", reports[0]
    return found.verdict, found.why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--only", choices=KINDS, action="append")
    asked = parser.parse_args()
    found, left_out, failed = Counter[str](), dict[str, str](), False
    for name in asked.only or KINDS:
        for number in range(asked.first, asked.first + asked.count):
            verdict, why = attempt(name, number)
            found[verdict] += 1
            if verdict == "void":  # the plain loop fails on a device
                left_out[name] = next(filter(REASON.match, why.splitlines()))
            elif verdict in FAILED or verdict == "reported":
                failed = True
                print(f"{verdict}: {name} {number}: {why}", flush=True)
    print(dict(found))
    for name, why in left_out.items():
        print(f"not all of {name}, since no loop can on a device: {why}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
