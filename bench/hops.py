"""Counts how much code a step executes: files, functions and depth of calls within gpipe.

    python -m bench.hops [--names]

Measures a warm step of two ranks and four micro-batches with a profiler. `--names` also lists the functions.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

import gpipe
from bench.report import table

HOME = str(Path(str(gpipe.__file__)).parent)
X, Y = torch.ones(8, 4), torch.ones(8, 4)


class Blocks(nn.Module):
    """A model with its own forward method, to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def inside(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of gpipe from this frame outwards."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(HOME):
            yield frame
        frame = frame.f_back


def count(call: Callable[[], object]) -> list[str]:
    """Counts the files and functions that a call enters, and its depth, in all threads."""
    functions, depths = Counter[tuple[str, str]](), set[int]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            functions[frame.f_code.co_filename.removeprefix(HOME), frame.f_code.co_qualname] += 1
            depths.add(sum(1 for _ in inside(frame)))

    threading.setprofile(note)  # of threads that begin from now on
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if "--names" in sys.argv:
        print(*(f"{times:6} {file} {name}" for (file, name), times in sorted(functions.items())), "", sep="\n")
    return [str(len({file for file, _ in functions})), str(len(functions)), str(max(depths))]


def warm(pipe: gpipe.GPipe) -> list[str]:
    """Counts a step that is not the first, in new threads."""
    for _ in range(2):
        pipe.step(X, Y, nn.functional.mse_loss)
    pipe.close()
    return count(lambda: pipe.step(X, Y, nn.functional.mse_loss))


def main() -> None:
    """Prints the table."""
    rows = []
    for driver in ("lockstep", "threads"):
        layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
        rows.append([f"a step, {driver}", *warm(gpipe.GPipe(layers, [2, 1], 4, seed=1, driver=driver))])
    made: list[gpipe.GPipe] = []

    def build() -> None:
        made.append(gpipe.GPipe(gpipe.layers_of(Blocks(), X), 2, 4, seed=1, driver="lockstep"))

    build()
    rows.append(["building a traced model", *count(build)])
    rows.append(["a step of a traced model", *warm(made[0])])
    print(table(["what", "files", "functions", "depth"], rows))


if __name__ == "__main__":
    main()
