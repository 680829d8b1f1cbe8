"""Runs one configuration with the reference loop and with gpipe, and returns its verdict."""

import contextlib
import logging
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import gpipe
from tests.support.kinds.case import REMEDY, Case, Kind, Observed, Setting

from .trainers import Trainer, by_library, by_loop, train

VERDICTS = ("equal", "refused", "told", "SILENT", "MISLEADING", "CRASH", "HANG", "void")
FAILED = ("SILENT", "MISLEADING", "CRASH", "HANG", "void")
Make = Callable[[Case, Setting], Trainer]


@dataclass
class Outcome:
    """The result of one way of training."""

    observed: Observed = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def text(self) -> str:
        texts, error = [], self.error
        while error is not None:
            texts += [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            error = error.__cause__
        return "\n".join(texts)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a configuration, with its reason."""

    kind: str
    number: int
    verdict: str
    why: str
    setting: str
    seconds: float = 0.0


class _Listener(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__()
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@contextlib.contextmanager
def listening(into: list[str]) -> Iterator[None]:
    """Collects warnings and log records."""
    handler = _Listener(into)
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        into.extend(str(warning.message) for warning in caught)


def attempt(case: Case, setting: Setting, make: Make) -> Outcome:
    outcome = Outcome()
    torch.manual_seed(1234)
    np.random.seed(1234)
    random.seed(1234)
    trainer: Trainer | None = None
    with listening(outcome.said):
        try:
            trainer = make(case, setting)
            train(trainer, outcome.observed)
        except Exception as error:
            outcome.error = error
        finally:
            if trainer is not None and isinstance(trainer.model, gpipe.GPipe):
                outcome.said += map(str, trainer.model.findings)
                trainer.model.close()
    return outcome


def judge(kind: Kind, number: int, make: Make = by_library) -> Verdict:
    """Returns the verdict of one configuration. `make` creates the trainer that is compared with the loop."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    expected, again = loop(kind, number), loop(kind, number)
    case, setting = kind.case(number)
    if expected.error is not None and not case.must_refuse:
        verdict, why = "void", "".join(traceback.format_exception(expected.error))
    elif unlike := compare(expected.observed, again.observed):
        verdict, why = "void", f"the loop does not repeat itself: {unlike}"
    else:
        verdict, why = decide(kind, number, case, expected, attempt(case, setting, make))
    return Verdict(kind.name, number, verdict, why, str(setting), time.perf_counter() - start)


def loop(kind: Kind, number: int) -> Outcome:
    return attempt(*kind.case(number), by_loop)


def decide(kind: Kind, number: int, case: Case, expected: Outcome, got: Outcome) -> tuple[str, str]:
    if got.error is not None:
        return judge_error(case, expected, got)
    if case.must_refuse:
        return "SILENT", "nothing raised"
    wrong = differences(kind, number, case, expected, got)
    said = "\n".join(got.said)
    telling = [text for text in got.said if case.told is not None and says(text, case.told) is None]
    if telling:
        return ("told", "\n".join(telling)) if wrong or case.must_tell else ("equal", "")
    if case.must_tell and not wrong:
        return "SILENT", f"equal, but nothing was told of it; said: {said[:500]!r}"
    return ("SILENT", f"{wrong}\nsaid: {said[:1500]}") if wrong else ("equal", "")


def judge_error(case: Case, expected: Outcome, got: Outcome) -> tuple[str, str]:
    """Returns the verdict on an error: correct, misleading, or unexpected."""
    text = got.text + "\n" + "".join(traceback.format_exception(got.error))[-1500:]
    if case.refusal is None:
        return "CRASH", text
    partial = compare({name: expected.observed.get(name) for name in got.observed}, got.observed)
    told = case.told is not None and any(says(text, case.told) is None for text in got.said)
    if partial and not told and not case.must_refuse and case.oracle == "loop":
        return "SILENT", f"before the error: {partial}\n{text}"
    if not case.late and any(name.startswith("0 after") for name in got.observed):
        return "MISLEADING", f"late: not in the first step\n{text}"
    if not isinstance(got.error, case.errors):
        return "MISLEADING", f"the type\n{text}"
    missing = says(got.text, (*case.refusal, REMEDY) if case.remedy else case.refusal)
    return ("refused", got.text) if missing is None else ("MISLEADING", f"does not say /{missing}/\n{text}")


def says(text: str, words: tuple[str, ...]) -> str | None:
    return next((word for word in words if not re.search(word, text, re.IGNORECASE)), None)


def differences(kind: Kind, number: int, case: Case, expected: Outcome, got: Outcome) -> str:
    if case.oracle == "loop":
        return compare(expected.observed, got.observed)
    near = compare(expected.observed, got.observed, tolerance=1e-4)
    return near or compare(alone(kind, number).observed, got.observed)


def alone(kind: Kind, number: int) -> Outcome:
    case, setting = kind.case(number)
    return attempt(case, replace(setting, cut=(len(case.layers),), remat="never", driver="lockstep"), by_library)


def compare(expected: Observed, got: Observed, tolerance: float | None = None) -> str:
    wrong = [f"{name}: missing" for name in expected if name not in got]
    wrong += [f"{name}: unexpected" for name in got if name not in expected]
    for name in expected.keys() & got.keys():
        one, other = pytree.tree_flatten(expected[name]), pytree.tree_flatten(got[name])
        if len(one[0]) != len(other[0]):
            wrong.append(f"{name}: {expected[name]} and {got[name]}")
            continue
        wrong += [
            f"{name}: {said}" for a, b in zip(one[0], other[0], strict=True) if (said := differ(a, b, tolerance))
        ]
    return "\n".join(sorted(wrong)[:6]) + (f"\nand {len(wrong) - 6} more" if len(wrong) > 6 else "")


def differ(a: Any, b: Any, tolerance: float | None) -> str:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return "" if type(a) is type(b) and (a == b or (a != a and b != b)) else f"{a!r:.80} and {b!r:.80}"
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return f"{tuple(a.shape)} {a.dtype} {a.layout} and {tuple(b.shape)} {b.dtype} {b.layout}"
    a, b = dense(a), dense(b)
    if torch.equal(a, b) or (
        torch.equal(torch.nan_to_num(a, 7.5), torch.nan_to_num(b, 7.5)) and torch.equal(a != a, b != b)
    ):
        return ""
    off = (a.double() - b.double()).abs().max().item() if not a.is_complex() else (a - b).abs().max().item()
    size = a.abs().double().max().item()
    if tolerance is not None and off <= tolerance * size + tolerance / 100:
        return ""
    return f"off by {off:.3g} of {size:.3g}"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor
