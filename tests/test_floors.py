"""Imports go down only.

Floor 1 (`plan`) stands on the standard library and numpy, floor 2 (`run`) on floor 1, floor 3 (the facade: `gpipe`
itself and the modules beside it) on both, and floor 4 on what a user has: the public names of `gpipe`, and the plan.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PLAN, RUN, FACADE, TOP = 1, 2, 3, 4
FLOORS = {"plan": PLAN, "run": RUN} | dict.fromkeys(["models", "data", "train", "report", "cli", "__main__"], TOP)


def floor_of(module: str) -> int:
    """The floor of a module of gpipe; what is not listed stands with the facade."""
    part = module.split(".")[1] if "." in module else ""
    return FLOORS.get(part, FACADE)


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules that code imports, anywhere in it; a name that is a module counts as one."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module, names, level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                origin = ".".join([*above, *([module] if module else [])])
                for alias in names:
                    inner = f"{origin}.{alias.name}"
                    yield inner if is_module(inner) else origin
            case ast.Attribute(ast.Name("gpipe"), attribute) if attribute in FLOORS:
                yield f"gpipe.{attribute}"


def is_allowed(module: str, target: str) -> bool:
    """Whether a module of gpipe may import another module."""
    floor, root = floor_of(module), target.split(".")[0]
    if root != "gpipe":
        return floor != PLAN or root in sys.stdlib_module_names or root == "numpy"
    if floor == TOP:
        return target == "gpipe" or floor_of(target) in {PLAN, TOP}
    return floor_of(target) <= floor


def climbing(source: str, module: str, package: str) -> list[str]:
    targets = imported(ast.parse(source), package)
    return sorted({target for target in targets if not is_allowed(module, target)})


FILES = sorted((SOURCE / "gpipe").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_down_only(file: Path) -> None:
    module = name_of(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    assert climbing(file.read_text(), module, package) == []


def test_importing_gpipe_imports_nothing_but_the_standard_library() -> None:
    face = SOURCE / "gpipe" / "__init__.py"
    if not face.is_file():
        pytest.skip("gpipe is a namespace")
    now = [node for node in ast.parse(face.read_text()).body if not is_for_types(node)]
    found = {target for node in now if not is_later(node) for target in imported(node, "gpipe")}
    assert {target for target in found if target.split(".")[0] not in sys.stdlib_module_names} == set()


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def is_later(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef)


@pytest.mark.parametrize(
    ("module", "source", "refused"),
    [
        ("gpipe.plan.order", "import random, numpy.linalg; from gpipe.plan.rules import needs", []),
        ("gpipe.plan.order", "import torch", ["torch"]),
        ("gpipe.plan.order", "def late():\n    from gpipe import run", ["gpipe.run"]),
        ("gpipe.plan.order", "from gpipe import find_plan", ["gpipe"]),
        ("gpipe.plan.order", "from . import rules; from .action import Kind; from ..run import store", ["gpipe.run"]),
        ("gpipe.run.worker", "import torch; from gpipe.plan.action import Kind; from gpipe.run import store", []),
        ("gpipe.run.worker", "from gpipe.pipeline import GPipe", ["gpipe.pipeline"]),
        ("gpipe.run.worker", "import gpipe; gpipe.GPipe", ["gpipe"]),
        ("gpipe.run.worker", "from gpipe.report import svg", ["gpipe.report"]),
        ("gpipe.pipeline", "from gpipe.run.worker import Worker; from gpipe import checkpoint", []),
        ("gpipe.pipeline", "import gpipe.models", ["gpipe.models"]),
        ("gpipe.train.digits", "import gpipe; from gpipe import GPipe, data; from gpipe.plan.lower import Remat", []),
        ("gpipe.train.digits", "import gpipe\ngpipe.run.worker", ["gpipe.run"]),
        ("gpipe.train.digits", "from gpipe.pipeline import GPipe", ["gpipe.pipeline"]),
        ("gpipe.cli", "from gpipe.run.recorder import record", ["gpipe.run.recorder"]),
    ],
)
def test_the_floors_are_told_apart(module: str, source: str, refused: list[str]) -> None:
    found = climbing(source, module, module.rpartition(".")[0])
    assert [target.split(".")[:2] for target in found] == [target.split(".")[:2] for target in refused]
