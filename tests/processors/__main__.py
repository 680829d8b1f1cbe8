"""Same bits under several processors, by qemu: `make test-processors`. A line each; 1 if any finds a difference."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import progress

PROCESSORS = ("EPYC", "EPYC-Milan", "Haswell", "Skylake-Server")
QEMU = "qemu-x86_64"
ROOT = Path(__file__).parents[2]


def run(processor: str) -> tuple[int, str]:
    """What one processor finds, and whether that is as it must be."""
    command = [QEMU, "-cpu", processor, sys.executable, "-m", "tests.processors.same_bits"]
    done = progress.run(command, cwd=ROOT, stderr=subprocess.PIPE)
    return done.returncode, done.stdout.strip() or done.stderr.strip()


def main() -> int:
    """Runs all; at most as many at once as there are cores."""
    if platform.machine() != "x86_64" or shutil.which(QEMU) is None:
        print(f"skipped: it needs {QEMU}, on an x86-64 processor (Debian has it in qemu-user)")
        return 0
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for processor, (code, said) in zip(PROCESSORS, pool.map(run, PROCESSORS), strict=True):
            print(f"{processor:20}{said}", flush=True)
            failed |= code != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
