"""Runs the checks of `gpipe doctor --gpu`, each in a separate process, and prints one page with their findings."""

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

LIMIT = 540.0  # Seconds per check, far more than it needs.
GRACE = 5.0  # Seconds for a stopped process to print its stack traces.
QUICK = 7  # Runs every seventh pipe. A prime number, so that all schedules and settings still occur.
WIDTH = 112
CHECKOUT = Path(__file__).parents[4]
MODULES = {
    "gpipe.cli.gpu.bits": ("bits", "shared", "weights", "several", "nccl"),
    "tests.gpu.work": ("memory", "speed"),  # The modules of tests need a checkout.
    "tests.gpu.parts": ("beside", "host", "graphs", "sanitizer", "tests"),
}
PARTS = {name: f"{module}:{name}" for module, names in MODULES.items() for name in names}
"""The checks in the order in which they run. Each check is a generator of findings."""
VERDICTS = ("error", "failed", "passed", "measured", "not run")  # From worst to best. The worst finding decides.
FAILURES = VERDICTS[:2]


class Finding(NamedTuple):
    """A verdict, a line that explains the verdict, and optional numbers."""

    verdict: str
    text: str
    numbers: dict[str, Any] | None = None


def examine(folder: Path, chosen: Sequence[str], facts: Mapping[str, Mapping[str, str]], every: int) -> bool:
    """Runs checks and prints the results of all checks in the folder.

    Args:
        folder: The folder of the results, including results of earlier calls.
        chosen: Names of the checks to run. If empty, runs all checks.
        facts: The versions and devices that `gpipe doctor` prints.
        every: Each check runs only every n-th pipe, where n is this number.

    Returns:
        True if no check failed.
    """
    if unknown := [name for name in chosen if name not in PARTS]:
        raise ValueError(f"--part: {', '.join(unknown)} is not a check. Choose from {', '.join(PARTS)}.")
    if "accelerators" in facts["devices"]:
        raise ValueError(
            f"--gpu: torch {facts['installed']['torch']}, finds no accelerator. Install a build for your device from "
            "https://pytorch.org/get-started/locally."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _record_hardware(folder / "hardware.txt")
    print(*_header(facts), "", sep="\n", flush=True)
    parts = {}
    for name, part in PARTS.items():
        if name in chosen or not chosen:
            _run(part, folder / f"{name}.json", every)
        parts[name] = _read(folder / f"{name}.json", f"Run it with --part {name}.")
        print(*_lines(name, parts[name]), sep="\n", flush=True)
    (folder / "page.json").write_text(json.dumps({**facts, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    print("", *_summary(parts, folder), sep="\n")
    return not any(part["verdict"] in FAILURES for part in parts.values())


def _run(part: str, file: Path, every: int) -> None:
    """Runs a check in a process that writes its findings to `file`, and adds a finding if the process fails."""
    file.unlink(missing_ok=True)
    log, begin = file.with_suffix(".log"), time.perf_counter()
    if part.startswith("tests.") and not (CHECKOUT / "tests" / "gpu").is_dir():
        _write(file, [{"verdict": "not run", "text": "Requires a checkout of gpipe. Run `make gpu` there."}], 0.0)
        return
    environment = {"PYTHONFAULTHANDLER": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ
    command = [sys.executable, "-m", "gpipe.cli.gpu.page", part, str(file.absolute()), str(every)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True,
            cwd=CHECKOUT if part.startswith("tests.") else None,
        )  # fmt: skip
        failure = ""
        try:
            code = process.wait(LIMIT)
            failure = f"killed by {signal.Signals(-code).name}" if code < 0 else _reason(log, code) if code else ""
        except subprocess.TimeoutExpired:
            failure = f"stopped after {LIMIT:g} s"
        finally:
            _kill_group(process)
    findings = _read(file)["findings"]
    failure = failure or ("" if findings else "reported nothing")
    findings += [{"verdict": "error", "text": f"{failure} (see {log.name})"}] if failure else []
    _write(file, findings, time.perf_counter() - begin)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Stops the process of a check and all processes that the check started.

    Python writes stack traces of its threads to the log.
    """
    for number, seconds in ((signal.SIGABRT, GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _reason(log: Path, code: int) -> str:
    lines = ["", *filter(str.strip, log.read_text(encoding="utf-8", errors="replace").splitlines())]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return f"status {code}, {(errors or lines)[-1].strip() or 'no output'}"[:300]


def _write(file: Path, findings: list[dict[str, Any]], seconds: float) -> None:
    verdict = min((finding["verdict"] for finding in findings), key=VERDICTS.index)
    part = {"verdict": verdict, "seconds": round(seconds, 1), "findings": findings}
    file.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")


def _read(file: Path, reason: str = "") -> dict[str, Any]:
    """Returns the results of a check from its file. If there is no file, returns the reason as a finding."""
    if file.exists():
        part: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return part
    findings = [{"verdict": "not run", "text": reason}] if reason else []
    return {"verdict": "not run", "seconds": 0.0, "findings": findings}


def _header(facts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    devices = [text for name, text in facts["devices"].items() if name != "between processes"]
    counts = ", ".join(f"{devices.count(device)} x {device}" for device in dict.fromkeys(devices))
    yield f"gpipe {facts['installed']['gpipe']} on {counts}"
    yield f"torch {facts['installed']['torch']}; between processes {facts['devices']['between processes']}"


def _lines(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a check: its verdict, followed by its findings."""
    head = f"{name:<10} {part['verdict']:<12}{part['seconds']:>4.0f} s  "
    for finding in part["findings"]:
        verdict = "" if finding["verdict"] == part["verdict"] else f"{finding['verdict']}: "
        for line in wrap(verdict + finding["text"], WIDTH - len(head)):
            yield head + line
            head = " " * len(head)


def _summary(parts: Mapping[str, Mapping[str, Any]], folder: Path) -> Iterator[str]:
    failed = [name for name, part in parts.items() if part["verdict"] in FAILURES]
    missing = [name for name, part in parts.items() if part["verdict"] == "not run"]
    yield f"Failed: {', '.join(failed)}." if failed else "No check failed."
    if missing:
        yield f"Not run: {', '.join(missing)}."
    yield f"Please send us {folder} in any case: tar czf gpu.tgz {folder}"
    yield "The folder contains this page with all numbers, the logs, versions, hardware and environment variables."


def _record_hardware(file: Path) -> None:
    """Writes the output of the vendors' tools about devices and their links."""
    commands = ("nvidia-smi", "nvidia-smi topo -m", "rocm-smi --showtopo", "xpu-smi topology -m")
    with file.open("w", encoding="utf-8") as out:
        for command in map(str.split, commands):
            if shutil.which(command[0]):
                subprocess.run(command, stdout=out, stderr=out, check=False)


def run_here(part: str, file: str, every: str) -> None:
    """Runs a check in this process. Rewrites the file after each finding, so that a crash loses none."""
    logging.getLogger("gpipe").setLevel(logging.ERROR)  # Tiny models cause performance findings.
    module, _, function = part.partition(":")
    findings = []
    for finding in getattr(import_module(module), function)(int(every)):
        findings.append(finding._asdict())
        Path(f"{file}.part").write_text(json.dumps({"findings": findings}), encoding="utf-8")
        Path(f"{file}.part").replace(file)


if __name__ == "__main__":
    run_here(*sys.argv[1:])
