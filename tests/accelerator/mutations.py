"""Removes each synchronization between streams from gpipe in turn. The detector must report every one.

    python -m tests.accelerator.mutations

The synchronizations are read from the source: each wait, event, record of a stream and synchronization.
"""

import argparse
import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "gpipe"
METHODS = frozenset({"wait_event", "wait_stream", "record_stream", "synchronize", "wait"})
OF_A_RANK = frozenset({"begin", "end", "enter"})  # of its stream
FUNCTIONS = frozenset({"event_on", "synchronize"})
TELLING = (126, 237, 326, 773, 922)
"""Numbers of the matrix that show orders which few show; others are tried behind them."""
ELSEWHERE = {
    "distributed/nccl.py": "NCCL cannot be had on the simulator: left to a machine with GPUs",
    "distributed/rendezvous.py": "threads wait for each other there, no streams",
    "planner/measure.py": "a clock is read behind it: without it, times are wrong, and nothing else",
    "cli/doctor.py": "a file is waited for",
    "cli/gpu/page.py": "a process is waited for",
    "recipes/training.py": "a clock is read behind the one, and a file is waited for by the other",
    "synchronize": "what planner/measure.py calls",
    "Shards.gather": "it frees what the gather took sooner; torch waits before it uses a weight, anyway",
    "DeviceStream.limit_queue": "it bounds memory, and orders nothing: memory.py counts it",
}
"""Orders that the detector cannot miss, and why; by their module or function."""
NOTICED = ("reported", "differs", "failed")  # torch itself refuses times of events that are not over
OVER_PROCESSES = {"DeferredBatchNorm.around_pass": "replicas"}
"""Functions whose orders are needed where there are several processes alone, and what of `processes` shows it."""


class Order(NamedTuple):
    """A call in the source that orders streams."""

    path: str
    function: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.text}"

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"

    @property
    def elsewhere(self) -> str | None:
        return ELSEWHERE.get(self.path) or ELSEWHERE.get(self.function)


def orders() -> list[Order]:
    """All of them, in all modules."""
    return [order for path in sorted(SOURCE.rglob("*.py")) for order in _orders_in(path)]


def _orders_in(path: Path) -> Iterator[Order]:
    text = path.read_text()

    def walk(node: ast.AST, name: str) -> Iterator[Order]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from walk(child, f"{name}.{child.name}".lstrip("."))
                continue
            if isinstance(child, ast.Call) and _is_order(child):
                code = ast.get_source_segment(text, child) or ""
                yield Order(path.relative_to(SOURCE).as_posix(), name, child.lineno, child.col_offset, code)
            yield from walk(child, name)

    yield from walk(ast.parse(text), "")


def _is_order(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(attr=name, value=ast.Attribute(attr="stream")):
            return name in METHODS | OF_A_RANK
        case ast.Attribute(attr=name):
            return name in METHODS
        case ast.Name(id=name):
            return name in FUNCTIONS
    return False


class _LeaveOut(ast.NodeTransformer):
    """Puts None for a call, or a context that does nothing; for an event one that is never recorded."""

    def __init__(self, line: int, column: int) -> None:
        self.place = line, column

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if (node.lineno, node.col_offset) != self.place or not _is_order(node):
            return node
        if isinstance(node.func, ast.Name) and node.func.id == "event_on":
            made = ast.parse("(lambda stream, **how: torch.Event(stream.device, **how))", mode="eval").body
            return ast.copy_location(ast.Call(made, node.args, node.keywords), node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "enter":
            return ast.copy_location(ast.parse("__import__('contextlib').nullcontext()", mode="eval").body, node)
        return ast.copy_location(ast.Constant(None), node)


def leave_out(place: str) -> None:
    """Has the function that gives an order be one that does not give it."""
    path, line, column = place.split(":")
    (order,) = (order for order in orders() if order.place == place)
    found: Any = import_module("gpipe." + path.removesuffix(".py").replace("/", "."))
    for name in order.function.split("."):
        found = getattr(found, name)
    tree = _LeaveOut(int(line), int(column)).visit(ast.parse((SOURCE / path).read_text()))
    within = [compile(ast.fix_missing_locations(tree), str(SOURCE / path), "exec")]
    for code in within:
        within += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    (inspect.unwrap(found).__code__,) = (code for code in within if code.co_qualname == order.function)


def try_without(place: str, count: int) -> str:
    """What is first noticed without an order, and at which number of the matrix."""
    leave_out(place)
    from tests.accelerator import matrix

    others = (
        range(matrix.ON_HOST, matrix.ON_HOST + count) if "streamed_weights" in place else (*TELLING, *range(count))
    )
    for number in others:
        verdict, said = matrix.attempt(number)
        if verdict not in ("equal", "none"):
            return (
                f"{verdict} at {number}: {said.splitlines()[1] if verdict == 'reported' else said.splitlines()[-1]}"
            )
    return f"nothing in {count}"


def program_without(order: Order, count: int = 1000) -> list[str]:
    """The program that tells what is noticed without an order, in a process of its own, or in several."""
    if order.function in OVER_PROCESSES:
        return ["processes", "--without", order.place, "--world", "2", "--part", OVER_PROCESSES[order.function]]
    return ["mutations", "--without", order.place, "--count", str(count)]


def notice(order: Order, count: int) -> str:
    """What it tells."""
    module, *arguments = program_without(order, count)
    command = [sys.executable, "-m", f"tests.accelerator.{module}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() or f"ended by {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", help="PATH:LINE:COLUMN of one order")
    parser.add_argument("--count", type=int, default=1000, help="numbers of the matrix to try without each")
    asked = parser.parse_args()
    if asked.without:
        print(try_without(asked.without, asked.count))
        return
    missed = 0
    for order in orders():
        found = order.elsewhere or notice(order, asked.count)
        missed += order.elsewhere is None and not found.startswith(NOTICED)
        print(f"{order}\n    {found}\n", flush=True)
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
