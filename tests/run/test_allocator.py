"""Freed memory is kept where glibc is, and nothing happens elsewhere. In fresh processes: it cannot be undone."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpipe
from gpipe.run import allocator

FAULTS = """
import resource, sys, threading
import torch, gpipe
mib, way = int(sys.argv[1]), sys.argv[2]
if way != "leave":
    assert gpipe.keep_freed_memory(one_heap=way == "one heap")
def fill():
    for _ in range(4):
        torch.empty(mib * 2**18).fill_(1.0)
def in_thread():
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
torch.set_num_threads(1)
for _ in range(6):  # gaps of a few bytes between blocks can cost a round more
    in_thread()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
in_thread()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() // 2**20)
"""

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
on_glibc = pytest.mark.skipif(not allocator._is_glibc(), reason="needs Linux with glibc")


def fresh_mib(mib: int, way: str) -> int:
    """How many MiB of fresh pages a thread takes that fills and frees a tensor four times, after six that did."""
    command = [sys.executable, "-c", FAULTS, str(mib), way]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=170, env=own)
    return int(done.stdout)


@on_glibc
@pytest.mark.parametrize(("mib", "way"), [(40, "keep"), (80, "one heap")])
def test_freed_memory_is_used_again(mib: int, way: str) -> None:
    assert fresh_mib(mib, way) <= mib


@on_glibc
@pytest.mark.skipif("[always]" in PAGES.read_text() if PAGES.exists() else False, reason="faults are of huge pages")
def test_nothing_is_kept_unasked() -> None:
    assert fresh_mib(40, "leave") >= 4 * 40


def no_confstr(name: str) -> str:
    raise ValueError("unrecognized configuration name")


def test_elsewhere_it_says_that_it_does_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "confstr", no_confstr)
    with caplog.at_level(logging.WARNING, logger="gpipe"):
        assert not gpipe.keep_freed_memory()
    assert "it needs Linux with glibc" in caplog.text
    monkeypatch.delattr(os, "confstr")
    assert not gpipe.keep_freed_memory()


@on_glibc
def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn:
        def __init__(self, name: None) -> None:
            self.mallopt = lambda option, value: 0

    monkeypatch.setattr("ctypes.CDLL", Stubborn)
    with caplog.at_level(logging.WARNING, logger="gpipe"):
        assert not gpipe.keep_freed_memory()
    assert "refused" in caplog.text
