"""Simulates an accelerator: four devices without kernels of their own, and a detector of missing synchronization.

`load()` builds it once per torch version, and makes it torch's accelerator in this process, named "sim".
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.library import Library

from tests.accelerator import cells

HERE = Path(__file__).parent
SOURCES = ("accelerator.cpp", "clocks.h")
NAME = "sim"
COMPILER = os.environ.get("CXX", "c++")


def lacking() -> str:
    """Returns what this machine lacks to build the simulator, or an empty string."""
    if shutil.which(COMPILER) is None:
        return f"the simulated accelerator is built by a C++ compiler, and there is no {COMPILER}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"the simulated accelerator is built with {header}, which is not there"


def built() -> Path:
    """Returns the library, built if necessary. This takes two minutes, per torch version and source."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    library = HERE / "_built" / f"{NAME}_{digest.hexdigest()[:16]}.so"
    library.parent.mkdir(exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of all that begin at once, one builds
        if not library.exists():
            from torch.utils import cpp_extension  # slow to import

            made = library.with_suffix(".part")
            headers = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
            compiled = [
                COMPILER,
                "-shared",
                "-fPIC",
                "-O1",
                "-std=c++20",
                f"-DTORCH_EXTENSION_NAME={NAME}_accelerator",
            ]
            places = [f"-I{path}" for path in headers] + [f"-L{path}" for path in cpp_extension.library_paths()]
            linked = ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10", "-o", str(made)]
            subprocess.run([*compiled, *places, str(HERE / SOURCES[0]), *linked], check=True)
            made.replace(library)
    return library


class _Device(ModuleType):
    """`torch.sim`: the functions that torch requires of a device module."""

    def __init__(self, simulator: Any) -> None:
        super().__init__(f"torch.{NAME}")
        self.simulator = simulator

    _initialized = True
    device = staticmethod(torch.accelerator.device_index)
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(torch.accelerator.current_device_index)
    set_device = staticmethod(torch.accelerator.set_device_index)
    current_stream = staticmethod(torch.accelerator.current_stream)
    synchronize = staticmethod(torch.accelerator.synchronize)
    Stream, Event = torch.Stream, torch.Event
    stream = staticmethod(lambda stream: stream)

    def device_count(self) -> int:
        return int(self.simulator.DEVICES)

    @property
    def default_generators(self) -> list[torch.Generator]:
        return [self.simulator.default_generator(at) for at in range(self.device_count())]

    def get_rng_state(self, device: int | torch.device = 0) -> torch.Tensor:
        return self.default_generators[device if isinstance(device, int) else device.index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: int | torch.device = 0) -> None:
        self.default_generators[device if isinstance(device, int) else device.index].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)


_kept: list[Library] = []  # what it holds is registered for as long as it lives


@cache
def load() -> Any:
    """Returns the module with `take_reports()`, `kernels()`, `reset_peak(device)` and `peak_bytes(device)`."""
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location(f"{NAME}_accelerator", built())
    assert spec is not None
    assert spec.loader is not None
    simulator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(simulator)
    torch._register_device_module(NAME, _Device(simulator))
    utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _kept.append(cells.register())
    return simulator
