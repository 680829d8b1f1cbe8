"""Options as a TOML file, and what files say before flags: a file and the command line have one set of names.

What holds is the last that says something:

    gpipe train digits  [the network of --from RUN]  [--config FILE, or with --resume OUT/config.toml]  flags given
"""

import tomllib
from argparse import ArgumentParser
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from gpipe.recipes.options.training import OPTIONS, TrainOptions, name_of, refuse

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a text"}
CONFIG = "config.toml"
RECIPE = "recipe"  # the key that says whose options they are
PRESETS = Path(__file__).parent / "presets"
READ = ("from_", "tsv", "image_folder")
NOT_SAVED = frozenset({"config", "resume"})  # a file that said these would send on to itself


def read(value: Any, kind: Any) -> Any:
    """A value of a file as an option of this type has it; a ValueError says what to give."""
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        with suppress(ValueError):
            return _read_as(value, one)
    raise ValueError(f"give {in_words(kind)}")


def _read_as(value: Any, kind: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_read_as(one, inner[0]) for one in value)
    if origin is Literal:
        return inner[list(map(str, inner)).index(str(value))]
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float, str, Path) and isinstance(value, str | int | float) and not isinstance(value, bool):
        return kind(str(value))
    raise ValueError


def in_words(kind: Any) -> str:
    """What to give for a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(in_words(one) for one in inner if one is not NoneType)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    return f"a list, each {in_words(inner[0])}" if origin is tuple else WORDS[kind]


def write_config(folder: Path, recipe: str, options: TrainOptions) -> None:
    """Writes the options of a run to `folder`/config.toml; what was read is named from the root."""
    there = {name: path.absolute() for name in READ if (path := getattr(options, name, None)) is not None}
    table = to_table(recipe, replace(options, **there))
    (folder / CONFIG).write_text(tomli_w.dumps(table), encoding="utf-8")


def to_table(recipe: str, options: TrainOptions) -> dict[str, Any]:
    """The options as a TOML table; those that say nothing are left out."""
    values = {name: value for name, value in vars(options).items() if name not in NOT_SAVED}
    said = {name_of(name): value for name, value in values.items() if value is not None and value != ()}
    return {RECIPE: recipe} | {name: str(value) if isinstance(value, Path) else value for name, value in said.items()}


def read_config(file: Path) -> dict[str, Any]:
    """The table in a file of options; a ValueError says if there is none."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no TOML file: {error}") from None


def recipe_of(run: Path) -> str:
    """Which recipe a run is of; a ValueError says if the folder is none of a run."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} has no {CONFIG}: give the folder of a run, such as `gpipe train` writes")
    return str(read_config(run / CONFIG).get(RECIPE))


def read_options(file: Path, recipe: str, wanted: Container[str] | None = None) -> dict[str, Any]:
    """The options that a file has of a recipe, by field, all or those wanted; a ValueError lists all mistakes."""
    table = read_config(file)
    other = table.pop(RECIPE, recipe)
    if other != recipe and {other, recipe} != {"digits", "images"}:
        raise ValueError(f"{file} is of the recipe {other}, and this is `gpipe train {recipe}`")
    hints = get_type_hints(OPTIONS[recipe])
    known = {name_of(one.name): one.name for one in fields(OPTIONS[recipe]) if one.name not in NOT_SAVED}
    values, problems = {}, []
    for name, value in table.items():
        if wanted is not None and name not in wanted:
            continue
        if name not in known:
            near = get_close_matches(name, known, 1)
            instead = f"; did you mean {near[0]}?" if near else f": see `gpipe train {recipe} --help`"
            problems.append(f"{file}: {name} is no option{instead}")
            continue
        try:
            values[known[name]] = read(value, hints[known[name]])
        except ValueError as mistake:
            problems.append(f"{file}: {name} is {value!r}: {mistake}")
    refuse(problems)
    return values


def find_preset(name: Path, recipe: str) -> Path:
    """The file that `--config` names: a preset's, or the file itself."""
    presets = {file.stem: file for file in sorted((PRESETS / recipe).glob("*.toml"))}
    if str(name) in presets and not name.is_file():  # a folder of that name does not stand in its way
        return presets[str(name)]
    if not name.exists():
        raise ValueError(f"--config is {name}, neither a file nor a preset: of those there are {', '.join(presets)}")
    return name


def options_before(recipe: str, given: Sequence[str]) -> TrainOptions:
    """What holds where flags say nothing: what files say to which `--config`, `--resume` and `--from` send."""
    options = OPTIONS[recipe]
    flags = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--config", "--out", "--from"):
        flags.add_argument(name, nargs="?")
    config, out, start = vars(flags.parse_known_args(given)[0]).values()
    values: dict[str, Any] = {}
    saved = Path(out or options.out) / CONFIG
    if config is not None:
        values = read_options(find_preset(Path(config), recipe), recipe)
        start = start or values.get("from_")
    elif "--resume" in given and saved.is_file():
        values, start = read_options(saved, recipe), None
    if start is not None:
        recipe_of(Path(start))
        values = read_options(Path(start) / CONFIG, recipe, options.NETWORK) | values
    return options(**values)
