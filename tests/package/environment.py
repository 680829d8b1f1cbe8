"""Virtual environments that have what a wheel asks for and nothing else: it is linked from this one."""

import os
import sys
import venv
import zipfile
from collections.abc import Collection, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from tests.support import progress


class Environment(NamedTuple):
    """An environment that a wheel is installed in."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def run(self, *command: str | Path, cwd: Path) -> str:
        """What a command of the environment prints; it must end well."""
        words = [str(word) for word in command]
        words[0] = str(self.folder / "bin" / words[0])
        return ended_well(words, cwd)


def ended_well(words: list[str], cwd: Path) -> str:
    """What a command prints, that must end well, where nothing leads it to the sources."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = progress.run(words, cwd=cwd, env=env | {"COLUMNS": "100"})
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def installed(wheel: Path, folder: Path, extras: Collection[str] = ()) -> Environment:
    """An environment with a wheel and what it and its extras require; pip finds whether anything is missing."""
    made = Environment(folder)
    venv.create(folder)
    for name in sorted(required(asked_by(wheel), extras)):
        link(metadata.distribution(name), made.site_packages)
    pip = [sys.executable, "-m", "pip", "--python", str(made.python), "--disable-pip-version-check"]
    named = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    ended_well([*pip, "install", "--quiet", "--no-index", named], folder)
    return made


def asked_by(wheel: Path) -> list[str]:
    """The requirements that a wheel names."""
    (inside,) = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    return metadata.PathDistribution(inside).requires or []


def required(asked: Iterable[str], extras: Collection[str]) -> set[str]:
    """All distributions that are required, also by those that are."""
    found = dict[str, set[str]]()

    def follow(asked: Iterable[str], extras: Collection[str]) -> None:
        for each in map(Requirement, asked):
            wanted = each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if wanted and not each.extras | {""} <= found.setdefault(each.name, set()):
                found[each.name] |= each.extras | {""}
                follow(metadata.requires(each.name) or (), each.extras)

    follow(asked, extras)
    return set(found)


def link(distribution: metadata.Distribution, site_packages: Path) -> None:
    """Links what a distribution has in site-packages; several may share a folder."""
    for name in sorted(set(top_names(distribution))):
        if not (link := site_packages / name).exists():
            link.symlink_to(Path(str(distribution.locate_file(name))).resolve())


def top_names(distribution: metadata.Distribution) -> Iterator[str]:
    for file in distribution.files or ():
        if file.parts[0] not in ("..", "__pycache__"):
            yield file.parts[0]
