"""What is built is what users get: the sdist, the wheel made of it, its types, README's code and commands.

`make test-package`. Everything here runs the wheel, in environments without the sources.
"""

import json
import re
import shlex
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.docs.pages import ROOT, blocks_of
from tests.package.environment import Environment, ended_well, installed

pytestmark = pytest.mark.package

README = ROOT / "README.md"
SOURCE = ROOT / "src"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
EXTRAS = ("digits", "hf", "images", "lightning", "plots", "quantized", "tensorboard", "trackio", "translation")
SMALL = "--steps 1 --filters 16 --image-size 32"
SHORT = {  # how a command of README is run here, where it would take long or names what one has
    "gpipe train digits --plan auto": f"gpipe train digits --plan auto {SMALL}",
    "gpipe train images --image-folder DIR": f"gpipe train images --image-folder photos {SMALL} --batch-size 16",
    "gpipe train translation": "gpipe train translation --steps 1 --languages de --vocabulary 500",
    "gpipe evaluate RUN": "gpipe evaluate out/digits",
    "gpipe translate --run RUN": "gpipe translate --run out/translation --beam 1",
}
NOT_HERE = {"gpipe doctor --gpu"}  # it needs an accelerator, and says so
WHERE = "import gpipe, importlib.metadata as m; print(gpipe.__file__, gpipe.__version__, m.version('gpipe'))"
IMPORT_ALL = """
import importlib, pkgutil, gpipe
for found in pkgutil.walk_packages(gpipe.__path__, "gpipe."):
    if found.name != "gpipe.__main__":
        try:
            importlib.import_module(found.name)
        except ImportError:
            print("lost", found.name)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    ended_well([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"gpipe-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What `pip install gpipe` brings."""
    return installed(wheel, tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With the extras that README's commands need."""
    return installed(wheel, tmp_path_factory.mktemp("full"), EXTRAS)


def test_the_wheel_has_all_of_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {str(path.relative_to(SOURCE)) for path in files}
    assert "gpipe/py.typed" in names


def test_the_sdist_has_what_one_needs_to_build_and_to_test(built: Path) -> None:
    with tarfile.open(built / f"gpipe-{VERSION}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"}
    assert needed | {"src/gpipe/__init__.py", "tests/conftest.py", "docs/index.md"} <= names
    assert not [name for name in names if name.startswith((".venv", "out/", "dist/"))]


def test_it_is_imported_from_where_it_was_installed(bare: Environment, tmp_path: Path) -> None:
    file, *versions = bare.run("python", "-c", WHERE, cwd=tmp_path).split()
    assert Path(file).is_relative_to(bare.site_packages)
    assert versions == [VERSION, VERSION]


@pytest.mark.parametrize("command", [("gpipe",), ("python", "-m", "gpipe")], ids=" ".join)
def test_the_command_says_its_version(bare: Environment, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert bare.run(*command, "--version", cwd=tmp_path) == f"gpipe {VERSION}\n"


def test_modules_import_what_the_wheel_asks_for_alone(bare: Environment, full: Environment, tmp_path: Path) -> None:
    """But for those that are of another framework, and import that."""
    lost = re.findall(r"^lost (.*)$", bare.run("python", "-c", IMPORT_ALL, cwd=tmp_path), re.MULTILINE)
    assert lost
    assert [name for name in lost if not name.startswith("gpipe.integrations.")] == []
    lost = re.findall(r"^lost (.*)$", full.run("python", "-c", IMPORT_ALL, cwd=tmp_path), re.MULTILINE)
    assert {*lost} <= {"gpipe.integrations.trl"}  # the extra that is not installed for tests


def test_users_have_its_types(bare: Environment, tmp_path: Path) -> None:
    """Without them `assert_type` would fail; the environment has no pytest."""
    shutil.copy(ROOT / "tests" / "test_types.py", tmp_path / "users.py")
    options = {"include": ["users.py"], "enableTypeIgnoreComments": False, "reportMissingImports": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    said = ended_well([sys.executable, "-m", "pyright", "--pythonpath", str(bare.python)], tmp_path)
    assert "0 errors" in said


def test_each_block_of_readme_runs_alone(bare: Environment, full: Environment, tmp_path: Path) -> None:
    blocks = [block.text for block in blocks_of(README) if block.language == "python"]
    printed = ""
    for block in blocks:
        (tmp_path / "script.py").write_text(block)
        printed += (full if "transformers" in block else bare).run("python", "script.py", cwd=tmp_path)
    assert "of the held-out rows are right" in printed
    assert (tmp_path / "counting" / "model.safetensors").is_file()


def test_all_commands_of_readme_run(full: Environment, tmp_path: Path) -> None:
    """One after another, as one goes on with what another leaves."""
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for at in range(20):
            pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{at}.png")
    named = [" ".join(words.split()) for words in re.findall(r"`(gpipe\s[^`]+)`", README.read_text())]
    assert len(set(named)) > 5
    trains_first = sorted(set(named) - NOT_HERE, key=lambda command: not command.startswith("gpipe train"))
    for command in trains_first:
        full.run(*shlex.split(SHORT.get(command, command)), cwd=tmp_path)
    made = [
        tmp_path / "out" / name for name in ("digits/report.html", "digits/evaluation.json", "images/report.json")
    ]
    assert [path for path in made if not path.is_file()] == []
