"""Describes the machine, and measures how busy other processes keep it."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def facts() -> dict[str, str]:
    """Returns the facts about the machine and the software that each result includes."""
    return {
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB",
        "python": platform.python_version(),
        "torch": version("torch"),
        "torchgpipe": _version("torchgpipe"),
        "deepspeed": _version("deepspeed"),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "priority": _group_priority(),
        "command": " ".join(["python -m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    main = sys.modules["__main__"].__spec__
    return main.name if main else Path(sys.argv[0]).name


def _group_priority() -> str:
    """Returns the nice value of this session, if Linux schedules by session."""
    try:
        return Path("/proc/self/autogroup").read_text().split()[-1]
    except OSError:
        return "0"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Returns the commit, with a plus if the working copy of the package differs from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "../src"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def busy_seconds() -> float:
    """Returns the CPU seconds that all processes have used since the machine started, including stolen time."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / TICK


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Returns the peak resident memory of this process since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> None:
    """Resets `peak_resident_bytes`."""
    Path("/proc/self/clear_refs").write_text("5")
