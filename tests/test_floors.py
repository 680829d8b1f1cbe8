"""Imports go down only, in no circle, and no room is overfull: the order of FLOORS is the order of the house."""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
FACE = "gpipe"  # the package itself: names that resolve on first use
FLOORS = (
    {"__main__"},
    {"cli"},
    {"recipes"},
    {FACE},
    {"checkpoint", "amp", "nonfinite", "observing"},
    {"pipeline"},
    {"module"},
    {"findings", "planning"},
    {"build"},
    {"distributed"},
    {"runtime"},
    {"splitting"},
    {"recording"},
    {"replay"},
    {"costs"},
    {"layers", "comm", "report"},
    {"values", "rng", "plan", "models", "datasets", "errors", "torch_private", "intra_op"},
)
"""From the roof down: a room uses those below it, and those on its own floor know nothing of each other."""
LEVEL = {room: -level for level, rooms in enumerate(FLOORS) for room in rooms}
ONLY = {
    "plan": set(),
    "errors": set(),
    "intra_op": set(),
    "torch_private": set(),
    "models": set(),
    "datasets": set(),
    "report": {"plan"},
    "comm": {"values", "errors", "torch_private"},
    "recipes": {FACE, "plan", "report", "models", "datasets"},  # what a user has
    "cli": {FACE, "plan", "report", "recipes", "models"},
}
"""Rooms that use less than all that is below."""
NO_TORCH = {"plan"}
BOTTOM = {"values", "rng"}  # these may look into errors.py and torch_private.py beside them
MOST_MODULES, MOST_LINES = 14, 350

FILES = sorted((SOURCE / "gpipe").rglob("*.py"))


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else FACE


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def package_of(file: Path) -> str:
    return name_of(file) if file.name == "__init__.py" else name_of(file).rpartition(".")[0]


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules that code imports, anywhere in it, also for types alone; a name that is a module counts as one."""
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
            case ast.Attribute(ast.Name("gpipe"), attribute) if attribute in LEVEL:
                yield f"gpipe.{attribute}"


def is_allowed(module: str, target: str) -> bool:
    """Whether a module of gpipe may import another module."""
    room, root = room_of(module), target.split(".")[0]
    if root != "gpipe":
        return room not in NO_TORCH or root in sys.stdlib_module_names or root == "numpy"
    other = room_of(target)
    if other == room:
        return True
    if room in BOTTOM and other in ("errors", "torch_private"):
        return True
    if room == "runtime" and other == "comm":  # `distributed` brings them together
        return False
    return other in ONLY.get(room, LEVEL) and LEVEL[other] < LEVEL[room]


def climbing(source: str, module: str, package: str) -> list[str]:
    targets = imported(ast.parse(source), package)
    return sorted({target for target in targets if not is_allowed(module, target)})


def find_circle(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, if there is one."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_down_only(file: Path) -> None:
    assert climbing(file.read_text(), name_of(file), package_of(file)) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {name_of(file): file for file in FILES if name_of(file) != FACE}  # names of the face resolve late
    edges = {
        module: set(imported(ast.parse(file.read_text()), package_of(file))) & modules.keys()
        for module, file in modules.items()
    }
    assert find_circle(edges) == []


@pytest.mark.parametrize(
    ("edges", "circle"), [({"a": {"b"}, "b": {"c"}}, False), ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, True)]
)
def test_circles_are_found(edges: dict[str, set[str]], circle: bool) -> None:
    assert bool(find_circle(edges)) == circle


@pytest.mark.parametrize("package", sorted({file.parent for file in FILES}), ids=lambda folder: folder.name)
def test_no_package_is_overfull(package: Path) -> None:
    assert len([file for file in package.glob("*.py") if file.name != "__init__.py"]) <= MOST_MODULES


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_module_is_long(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MOST_LINES


def test_importing_gpipe_imports_nothing_but_the_standard_library() -> None:
    now = [node for node in ast.parse((SOURCE / "gpipe" / "__init__.py").read_text()).body if not is_for_types(node)]
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
        ("gpipe.plan.order", "def late():\n    from gpipe import runtime", ["gpipe.runtime"]),
        ("gpipe.plan.order", "from gpipe import find_plan", ["gpipe"]),
        ("gpipe.plan.order", "from . import rules; from ..values import tree", ["gpipe.values"]),
        ("gpipe.runtime.worker", "import torch; from gpipe.plan.action import Kind; from ..values import tree", []),
        ("gpipe.runtime.worker", "from gpipe.pipeline import GPipe", ["gpipe.pipeline"]),
        ("gpipe.runtime.worker", "import gpipe; gpipe.GPipe", ["gpipe"]),
        ("gpipe.runtime.worker", "from gpipe.comm import net", ["gpipe.comm"]),
        (
            "gpipe.runtime.worker",
            "if TYPE_CHECKING:\n    from gpipe.distributed.session import Session",
            ["gpipe.distributed"],
        ),
        ("gpipe.distributed.session", "from gpipe.comm import net; from gpipe.runtime import worker", []),
        ("gpipe.comm.net", "from gpipe.plan.action import Kind", ["gpipe.plan"]),
        ("gpipe.layers.stage", "from gpipe.comm.net import Net", ["gpipe.comm"]),
        ("gpipe.pipeline", "from gpipe.runtime import worker; from gpipe import checkpoint", ["gpipe.checkpoint"]),
        ("gpipe.pipeline", "import gpipe.recipes", ["gpipe.recipes"]),
        ("gpipe.recipes.job", "import gpipe; from gpipe import GPipe, datasets; from gpipe.plan import lower", []),
        ("gpipe.recipes.job", "import gpipe\ngpipe.runtime.worker", ["gpipe.runtime"]),
        ("gpipe.recipes.job", "from gpipe.pipeline import GPipe", ["gpipe.pipeline"]),
        ("gpipe.cli.main", "from gpipe.runtime.recorder import record", ["gpipe.runtime.recorder"]),
    ],
)  # fmt: skip
def test_the_floors_are_told_apart(module: str, source: str, refused: list[str]) -> None:
    found = climbing(source, module, module.rpartition(".")[0])
    assert [target.split(".")[:2] for target in found] == [target.split(".")[:2] for target in refused]
