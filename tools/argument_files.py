"""Counts the files that the arguments of `GPipe` pass through.

    python tools/argument_files.py [folder of a checkout]

A file of `src/gpipe` counts if its code names an argument of `GPipe`, or a field that carries one. Names are read
from the same checkout, so the script works with any commit:

- the parameters of `GPipe.__init__`,
- the classes `Arguments`, `Checked`, `Settings` and `Engine`, and their fields,
- except names in `COMMON`, which the whole package uses for other purposes, too.

A name counts as a keyword of a call, as a parameter, as an attribute, as a field of a class, or as an import. A
`Plan` and a `Schedule` do not count, because they are made from arguments.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CARRIERS = {"Arguments", "Checked", "Settings", "Engine"}
COMMON = {
    *("self", "model", "layers", "sample", "partitions", "micro_batches", "plan", "schedule", "devices", "seed"),
    *("costs", "stages", "placement", "traced", "row", "replicas", "partition", "searched", "Engine", "memory"),
}


def classes(folder: Path) -> Iterator[ast.ClassDef]:
    """Returns the classes in the source."""
    for path in sorted((folder / "src/gpipe").rglob("*.py")):
        yield from (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))


def fields(carrier: ast.ClassDef) -> set[str]:
    """Returns the annotated names in the body of a class."""
    annotated = (item.target for item in carrier.body if isinstance(item, ast.AnnAssign))
    return {target.id for target in annotated if isinstance(target, ast.Name)}


def parameters(pipe: ast.ClassDef) -> set[str]:
    """Returns the parameters of `__init__`."""
    (init,) = (node for node in pipe.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)} - {"self"}


def names(tree: ast.AST) -> Iterator[str]:
    """Returns the names in a file that may count."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg=str(name)) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case ast.ClassDef():
                yield from (node.name, *fields(node))
            case ast.ImportFrom(names=imported):
                yield from (alias.name for alias in imported)


def main() -> None:
    """Prints the files and their number."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    every = list(classes(folder))
    given = set[str]().union(*(parameters(node) for node in every if node.name == "GPipe"))
    carried = set[str]().union(*(fields(node) for node in every if node.name in CARRIERS))
    wanted = (given | carried | CARRIERS) - COMMON
    count = 0
    for path in sorted((folder / "src/gpipe").rglob("*.py")):
        if found := sorted(wanted.intersection(names(ast.parse(path.read_text())))):
            count += 1
            print(f"{path.relative_to(folder)}: {', '.join(found)}")
    print(f"{len(given)} parameters, {count} files")


if __name__ == "__main__":
    main()
