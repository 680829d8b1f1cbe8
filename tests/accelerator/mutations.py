"""Each order between streams that gpipe gives is left out in turn: the detector must report every one.

    python -m tests.accelerator.mutations

The orders are read from the source: each wait, event, record of a stream and synchronization.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "gpipe"
METHODS = frozenset({"wait_event", "wait_stream", "record_stream", "synchronize", "wait"})
OF_A_RANK = frozenset({"begin", "end", "enter"})  # of its stream
FUNCTIONS = frozenset({"_event", "synchronize"})
TELLING = (126, 237, 326, 922)
"""Numbers of the matrix that show orders which few show; others are tried behind them."""
ELSEWHERE = {
    "distributed/nccl.py": "NCCL cannot be had on the simulator: left to a machine with GPUs",
    "distributed/rendezvous.py": "threads wait for each other there, no streams",
    "planner/measure.py": "a clock is read behind it: without it, times are wrong, and nothing else",
    "cli/doctor.py": "a file is waited for",
    "recipes/training.py": "a clock is read behind the one, and a file is waited for by the other",
    "synchronize": "what planner/measure.py calls",
    "_share_commits": "what it queues is for other processes: left to a machine with GPUs",
    "DeviceStream.keep_pace": "it bounds memory, and orders nothing: test_accelerator.py counts it",
}
"""Orders that the detector cannot miss, and why; by their module or function."""


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
        if isinstance(node.func, ast.Name) and node.func.id == "_event":
            made = ast.parse("(lambda stream, **how: torch.Event(stream.device, **how))", mode="eval").body
            return ast.copy_location(ast.Call(made, node.args, node.keywords), node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "enter":
            return ast.copy_location(ast.parse("__import__('contextlib').nullcontext()", mode="eval").body, node)
        return ast.copy_location(ast.Constant(None), node)


class Without(MetaPathFinder):
    """Imports one module without one of its orders."""

    def __init__(self, path: Path, line: int, column: int) -> None:
        self.path, self.leave_out = path, _LeaveOut(line, column)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin != str(self.path):
            return None
        spec.loader = _Loader(name, spec.origin, self.leave_out)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, leave_out: _LeaveOut) -> None:
        super().__init__(name, path)
        self.leave_out = leave_out

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.fix_missing_locations(self.leave_out.visit(ast.parse(self.get_data(self.path))))
        code: CodeType = compile(tree, self.path, "exec")
        return code


def try_without(place: str, count: int) -> str:
    """What is first noticed without an order, and at which number of the matrix."""
    path, line, column = place.split(":")
    sys.meta_path.insert(0, Without(SOURCE / path, int(line), int(column)))
    from tests.accelerator import matrix

    for number in (*TELLING, *range(count)):
        verdict, said = matrix.attempt(number)
        if verdict not in ("equal", "none"):
            return (
                f"{verdict} at {number}: {said.splitlines()[1] if verdict == 'reported' else said.splitlines()[-1]}"
            )
    return f"nothing in {count}"


def notice(order: Order, count: int) -> str:
    """The same, in a process of its own."""
    command = [sys.executable, "-m", "tests.accelerator.mutations", "--without", order.place, "--count", str(count)]
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
        missed += order.elsewhere is None and not found.startswith(
            ("reported", "failed", "differs")
        )  # torch itself may refuse
        print(f"{order}\n    {found}\n", flush=True)
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
