"""Reads and writes options as TOML files, with the same names as on the command line.

Later sources override earlier ones:

    gpipe train digits  [model options of --from RUN]  [--config FILE, or OUT/config.toml if --resume]  [flags]
"""

import secrets
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

from gpipe.recipes.options.training import OPTIONS, TrainOptions, key_of, raise_all

WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a string"}
CONFIG = "config.toml"
RECIPE = "recipe"  # The TOML key with the name of the recipe.
PRESETS = Path(__file__).parent / "presets"
INPUTS = ("from_", "tsv", "image_folder")  # Paths that a run reads.
NOT_SAVED = frozenset({"config", "resume"})  # A config.toml with these options would refer to itself.


def parse(value: Any, kind: Any) -> Any:
    """Converts a TOML value to the type of an option.

    Raises a ValueError with the allowed values if the type does not match.
    """
    for member in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        with suppress(ValueError):
            return _parse_as(value, member)
    raise ValueError(f"Write {in_words(kind)}.")


def _parse_as(value: Any, kind: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_parse_as(item, inner[0]) for item in value)
    if origin is Literal:
        return inner[list(map(str, inner)).index(str(value))]
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float, str, Path) and isinstance(value, str | int | float) and not isinstance(value, bool):
        return kind(str(value))
    raise ValueError


def in_words(kind: Any) -> str:
    """Describes the values of a type, such as "an integer" or "'sgd' or 'rmsprop'"."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(in_words(member) for member in inner if member is not NoneType)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    return f"a list in which each entry is {in_words(inner[0])}" if origin is tuple else WORDS[kind]


def write_config(folder: Path, recipe: str, options: TrainOptions) -> None:
    """Writes the options of a run to `folder`/config.toml, with absolute paths for the files that the run reads."""
    absolute = {name: path.absolute() for name in INPUTS if (path := getattr(options, name, None)) is not None}
    table = to_table(recipe, replace(options, **absolute))
    temporary = folder / f"{CONFIG}.tmp-{secrets.token_hex(4)}"  # Several processes may write at the same time.
    temporary.write_text(tomli_w.dumps(table), encoding="utf-8")
    temporary.replace(folder / CONFIG)


def to_table(recipe: str, options: TrainOptions) -> dict[str, Any]:
    """Returns the options as a TOML table, without options that are None or empty."""
    table: dict[str, Any] = {RECIPE: recipe}
    for name, value in vars(options).items():
        if name not in NOT_SAVED and value is not None and value != ():
            table[key_of(name)] = str(value) if isinstance(value, Path) else value
    return table


def read_config(file: Path) -> dict[str, Any]:
    """Reads a TOML file of options. Raises a ValueError if the file does not exist or is not valid TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror or error}. Pass an existing file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: is not a valid TOML file: {error}. Correct the file.") from None


def recipe_of(run: Path) -> str:
    """Returns the name of a run's recipe. Raises a ValueError if the folder does not contain a run."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run}: contains no {CONFIG}. Pass the folder of a run that `gpipe train` wrote.")
    return str(read_config(run / CONFIG).get(RECIPE))


def read_options(file: Path, recipe: str, selected: Container[str] | None = None) -> dict[str, Any]:
    """Reads the options of a recipe from a TOML file.

    Args:
        file: The file.
        recipe: The name of the recipe.
        selected: TOML keys to read. Default: all keys.

    Returns:
        A dict from the names of dataclass fields to their values.

    Raises:
        ValueError: If keys or values are invalid (with one line per error), or if the file belongs to a different
            recipe.
    """
    table = read_config(file)
    saved_recipe = table.pop(RECIPE, recipe)
    if saved_recipe != recipe and {saved_recipe, recipe} != {"digits", "images"}:
        raise ValueError(
            f"{file}: contains options of the recipe {saved_recipe}. Use `gpipe train {saved_recipe}` instead of "
            f"`gpipe train {recipe}`."
        )
    hints = get_type_hints(OPTIONS[recipe])
    names = {key_of(field.name): field.name for field in fields(OPTIONS[recipe]) if field.name not in NOT_SAVED}
    values, problems = {}, []
    for key, value in table.items():
        if selected is not None and key not in selected:
            continue
        if key not in names:
            close = get_close_matches(key, names, 1)
            fix = f"Did you mean {close[0]}?" if close else f"`gpipe train {recipe} --help` lists all options."
            problems.append(f"{file}: {key} is not an option. {fix}")
            continue
        try:
            values[names[key]] = parse(value, hints[names[key]])
        except ValueError as error:
            problems.append(f"{file}: {key} has the invalid value {value!r}. {error}")
    raise_all(problems)
    return values


def find_preset(name: Path, recipe: str) -> Path:
    """Returns the file that `--config` names: a preset, or the path itself. A file takes precedence over a preset."""
    presets = {file.stem: file for file in sorted((PRESETS / recipe).glob("*.toml"))}
    if str(name) in presets and not name.is_file():  # A folder with the name of a preset does not hide the preset.
        return presets[str(name)]
    if not name.exists():
        raise ValueError(
            f"--config: {name} is neither a file nor a preset. Pass a TOML file, or a preset: {', '.join(presets)}."
        )
    return name


def options_before(recipe: str, arguments: Sequence[str]) -> TrainOptions:
    """Returns the options before command-line flags are applied, from the files of --config, --resume and --from."""
    options = OPTIONS[recipe]
    flags = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--config", "--out", "--from"):
        flags.add_argument(name, nargs="?")
    config, out, start = vars(flags.parse_known_args(arguments)[0]).values()
    values: dict[str, Any] = {}
    saved = Path(out or options.out) / CONFIG
    if config is not None:
        values = read_options(find_preset(Path(config), recipe), recipe)
        start = start or values.get("from_")
    elif "--resume" in arguments and saved.is_file():
        values, start = read_options(saved, recipe), None
    if start is not None:
        recipe_of(Path(start))
        values = read_options(Path(start) / CONFIG, recipe, options.NETWORK) | values
    return options(**values)
