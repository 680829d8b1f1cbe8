"""Runs the parts of `gpipe doctor --gpu`, each in a process of its own, and prints one page of what they found."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

LIMIT = 540.0  # seconds of a part, far above what it takes
GRACE = 5.0  # in which what is stopped says where it is
QUICK = 7  # one of so many that are alike is tried; prime, so that all that they are made of comes
WIDTH = 112
CHECKOUT = Path(__file__).parents[4]
MODULES = {
    "gpipe.cli.gpu.bits": ("bits", "shared", "several", "nccl"),
    "tests.gpu.work": ("memory", "speed"),  # this and the next in a checkout alone
    "tests.gpu.parts": ("beside", "host", "graphs", "sanitizer", "tests"),
}
PARTS = {name: f"{module}:{name}" for module, names in MODULES.items() for name in names}
"""The parts in their order, each a generator of findings."""
VERDICTS = ("failed", "fell short", "held", "measured", "not run")  # from the worst: that of a part is its worst
SPOIL = VERDICTS[:2]


class Finding(NamedTuple):
    """A verdict, a line about it, and numbers."""

    verdict: str
    said: str
    numbers: dict[str, Any] | None = None


def examine(folder: Path, chosen: Sequence[str], found: Mapping[str, Mapping[str, str]], every: int) -> bool:
    """Runs the chosen parts, or all, and prints what the folder has of each then; whether nothing fell short."""
    if unknown := [name for name in chosen if name not in PARTS]:
        raise ValueError(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if "accelerators" in found["devices"]:
        remedy = "https://pytorch.org/get-started/locally has builds by kind of device"
        raise ValueError(f"torch {found['installed']['torch']}, sees no accelerator here; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    _note_hardware(folder / "hardware.txt")
    print(*_header(found), "", sep="\n", flush=True)
    parts = {}
    for name, part in PARTS.items():
        if name in chosen or not chosen:
            _run(part, folder / f"{name}.json", every)
        parts[name] = _read(folder / f"{name}.json", f"not yet: --part {name}")
        print(*_lines(name, parts[name]), sep="\n", flush=True)
    (folder / "page.json").write_text(json.dumps({**found, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    print("", *_end(parts, folder), sep="\n")
    return not any(part["verdict"] in SPOIL for part in parts.values())


def _run(part: str, file: Path, every: int) -> None:
    """Has a part write what it finds, and adds how it ended, whatever becomes of it."""
    file.unlink(missing_ok=True)
    log, begin = file.with_suffix(".log"), time.perf_counter()
    if part.startswith("tests.") and not (CHECKOUT / "tests" / "gpu").is_dir():
        _write(file, [{"verdict": "not run", "said": "it comes with a checkout of gpipe: `make gpu` there"}], 0.0)
        return
    environment = {"PYTHONFAULTHANDLER": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ
    command = [sys.executable, "-m", "gpipe.cli.gpu.page", part, str(file.absolute()), str(every)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True,
            cwd=CHECKOUT if part.startswith("tests.") else None,
        )  # fmt: skip
        ended = ""
        try:
            code = process.wait(LIMIT)
            ended = f"ended by {signal.Signals(-code).name}" if code < 0 else _reason(log, code) if code else ""
        except subprocess.TimeoutExpired:
            ended = f"stopped, since it was not done after {LIMIT:g} s"
        finally:
            _end_group(process)
    findings = _read(file)["findings"]
    ended = ended or ("" if findings else "it found nothing")
    findings += [{"verdict": "failed", "said": f"{ended} (more in {log.name})"}] if ended else []
    _write(file, findings, time.perf_counter() - begin)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends all that a part has started; Python says in the log where its threads are."""
    for number, seconds in ((signal.SIGABRT, GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _reason(log: Path, code: int) -> str:
    lines = ["", *filter(str.strip, log.read_text(encoding="utf-8", errors="replace").splitlines())]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return f"status {code}, {(errors or lines)[-1].strip() or 'nothing said'}"[:300]


def _write(file: Path, findings: list[dict[str, Any]], seconds: float) -> None:
    verdict = min((finding["verdict"] for finding in findings), key=VERDICTS.index)
    part = {"verdict": verdict, "seconds": round(seconds, 1), "findings": findings}
    file.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")


def _read(file: Path, otherwise: str = "") -> dict[str, Any]:
    """What a part has left, or why it has left nothing."""
    if file.exists():
        part: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return part
    findings = [{"verdict": "not run", "said": otherwise}] if otherwise else []
    return {"verdict": "not run", "seconds": 0.0, "findings": findings}


def _header(found: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    named = [said for name, said in found["devices"].items() if name != "between processes"]
    kinds = ", ".join(f"{named.count(kind)} x {kind}" for kind in dict.fromkeys(named))
    yield f"gpipe {found['installed']['gpipe']} on {kinds}"
    yield f"torch {found['installed']['torch']}; between processes {found['devices']['between processes']}"


def _lines(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    """A part: its verdict, and what it found, one below the other."""
    head = f"{name:<10} {part['verdict']:<12}{part['seconds']:>4.0f} s  "
    for finding in part["findings"]:
        verdict = "" if finding["verdict"] == part["verdict"] else f"{finding['verdict']}: "
        for line in wrap(verdict + finding["said"], WIDTH - len(head)):
            yield head + line
            head = " " * len(head)


def _end(parts: Mapping[str, Mapping[str, Any]], folder: Path) -> Iterator[str]:
    spoilt = [name for name, part in parts.items() if part["verdict"] in SPOIL]
    missing = [name for name, part in parts.items() if part["verdict"] == "not run"]
    yield f"Fell short: {', '.join(spoilt)}." if spoilt else "All that was run held."
    if missing:
        yield f"Not run: {', '.join(missing)}."
    yield f"Please send us {folder}, whatever it says: tar czf gpu.tgz {folder}"
    yield "It has this page with all numbers, what each part printed, versions, hardware, and environment variables."


def _note_hardware(file: Path) -> None:
    """What the makers' own tools say of devices and their links."""
    asked = ("nvidia-smi", "nvidia-smi topo -m", "rocm-smi --showtopo", "xpu-smi topology -m")
    with file.open("w", encoding="utf-8") as out:
        for command in (asking.split() for asking in asked if shutil.which(asking.split()[0])):
            subprocess.run(command, stdout=out, stderr=out, check=False)


def run_here(part: str, file: str, every: str) -> None:
    """Writes what a part finds into a file, anew with each finding: a crash leaves those before it."""
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # networks of no size have findings of their own
    module, _, function = part.partition(":")
    findings = []
    for finding in getattr(import_module(module), function)(int(every)):
        findings.append(finding._asdict())
        Path(f"{file}.part").write_text(json.dumps({"findings": findings}), encoding="utf-8")
        Path(f"{file}.part").replace(file)


if __name__ == "__main__":
    run_here(*sys.argv[1:])
