"""Options as a TOML file, and what a file says as flags: a file and the command line have one set of names.

The arguments of the command become one line of flags, of which the later ones hold:

    gpipe train digits  [the network of --from RUN]  [--config FILE, or with --resume OUT/config.toml]  flags given

Which values of a file an option takes, by the type that its dataclass gives it.

The options of each recipe, by its name.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w

from gpipe.recipes.options.images import DigitsOptions, ImagesOptions
from gpipe.recipes.options.training import TrainOptions, flag, name_of
from gpipe.recipes.options.translation import TranslationOptions

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a text"}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of TOML is of a type; whole numbers are numbers, and paths are texts.

    >>> fits(1, float), fits(["cat"], tuple[str, ...]), fits(7, int | None)
    (True, True, True)
    >>> fits(True, int), fits("cat", Literal["dog"]), fits([1], tuple[str, ...])
    (False, False, False)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if origin is tuple:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is (str if kind is Path else kind)


def in_words(kind: Any) -> str:
    """What to give for a type.

    >>> in_words(int | None), in_words(tuple[str, ...]), in_words(Literal["cat", "dog"])
    ('a whole number', 'a list, each a text', "'cat' or 'dog'")
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(in_words(one) for one in inner if one is not NoneType)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return f"a list, each {in_words(inner[0])}"
    return WORDS[kind]


CONFIG = "config.toml"
RECIPE = "recipe"
"""The key that says whose options they are."""
PRESETS = Path(__file__).parent / "presets"
READ = ("from_", "tsv", "image_folder")
NOT_SAVED = frozenset({"config", "resume"})
"""What a file cannot say: it would send on to itself."""


def write_config(folder: Path, recipe: str, options: TrainOptions) -> None:
    """Writes the options of a run to `folder`/config.toml; what was read is named from the root."""
    there = {name: path.absolute() for name in READ if (path := getattr(options, name, None)) is not None}
    table = to_table(recipe, replace(options, **there))
    (folder / CONFIG).write_text(tomli_w.dumps(table), encoding="utf-8")


def to_table(recipe: str, options: TrainOptions) -> dict[str, Any]:
    """The options as a TOML table; those that say nothing are left out.

    >>> to_table("digits", TrainOptions(steps=7))["steps"], "from" in to_table("digits", TrainOptions())
    (7, False)
    """
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in NOT_SAVED}
    return {RECIPE: recipe} | {
        name_of(name): _plain(value) for name, value in values.items() if value is not None and value != ()
    }


def _plain(value: Any) -> Any:
    match value:
        case Path():
            return str(value)
        case tuple():
            return list(value)
        case _:
            return value


def read_config(file: Path) -> dict[str, Any]:
    """The table in a file of options.

    Raises:
        ValueError: It is no TOML, or there is no such file.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no TOML file: {error}") from None


def recipe_of(run: Path) -> str:
    """Which recipe a run is of.

    Raises:
        ValueError: The folder is none of a run.
    """
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} has no {CONFIG}: give the folder of a run, such as `gpipe train` writes")
    return str(read_config(run / CONFIG).get(RECIPE))


def find_preset(name: Path, recipe: str) -> Path:
    """The file that `--config` names: a preset's, or the file itself.

    Raises:
        ValueError: There is neither.

    >>> find_preset(Path("paper"), "digits").name
    'paper.toml'
    """
    presets = {file.stem: file for file in sorted((PRESETS / recipe).glob("*.toml"))}
    if str(name) in presets and not name.is_file():  # a folder of that name does not stand in its way
        return presets[str(name)]
    if not name.exists():
        raise ValueError(f"--config is {name}, neither a file nor a preset: of those there are {', '.join(presets)}")
    return name


def expanded(recipe: str, options: type[TrainOptions], given: Sequence[str]) -> list[str]:
    """Puts before the given flags those that files say, to which `--config`, `--resume` and `--from` send.

    Raises:
        ValueError: A file says what cannot be: a line for each mistake.
    """
    if problems := list(_unreadable(given, get_type_hints(options))):
        raise ValueError("\n".join(problems))
    config, out, start = (_value(given, name) for name in ("--config", "--out", "--from"))
    before: list[str] = []
    folder = Path(out) if out is not None else Path(str(options.out))
    if config is not None:
        file = find_preset(Path(config), recipe)
        table = read_config(file)
        before = to_flags(table, recipe, options, file)
        start = start or table.get("from")
    elif "--resume" in given and (folder / CONFIG).is_file():
        before = to_flags(read_config(folder / CONFIG), recipe, options, folder / CONFIG)
        start = None
    if start is not None:
        before = _network(Path(start), recipe, options) + before
    return [*before, *given]


def _unreadable(given: Sequence[str], kinds: Mapping[str, Any]) -> Iterator[str]:
    """A line for each flag whose value is none of its option; the parser of the command names the first alone."""
    by_flag = {flag(name): kind for name, kind in kinds.items()}
    for i, word in enumerate(given):
        name, equals, value = word.partition("=")
        kind = by_flag.get(name)
        if not equals:
            value = given[i + 1] if i + 1 < len(given) else "--"
        if kind in (None, bool) or get_origin(kind) is tuple or (value.startswith("--") and not equals):
            continue  # no option, a list, or without a value: the parser says so
        if not any(
            _reads(value, one) for one in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,))
        ):
            yield f"{name} is {value}: give {in_words(kind)}"


def _reads(text: str, kind: Any) -> bool:
    """Whether a text can be read as a type."""
    if get_origin(kind) is Literal:
        return text in map(str, get_args(kind))
    if kind in (int, float):
        try:
            kind(text)
        except ValueError:
            return False
    return kind is not NoneType or text == "None"


def _network(run: Path, recipe: str, options: type[TrainOptions]) -> list[str]:
    """The flags that say which network a run has trained."""
    recipe_of(run)
    table = read_config(run / CONFIG)
    kept = {name: value for name, value in table.items() if name in (RECIPE, *options.NETWORK)}
    return to_flags(kept, recipe, options, run / CONFIG)


def to_flags(table: Mapping[str, Any], recipe: str, options: type[TrainOptions], file: Path) -> list[str]:
    """What a table says, as flags.

    Raises:
        ValueError: A name is no option, or a value none of an option: a line for each.

    >>> to_flags({"steps": 7, "bf16": False}, "digits", TrainOptions, Path("my.toml"))
    ['--steps=7', '--no-bf16']
    """
    if problems := list(_problems(table, recipe, options, file)):
        raise ValueError("\n".join(problems))
    return [word for name, value in table.items() if name != RECIPE for word in _words(name, value)]


def _problems(table: Mapping[str, Any], recipe: str, options: type[TrainOptions], file: Path) -> Iterator[str]:
    if (other := table.get(RECIPE, recipe)) not in SAME.get(recipe, (recipe,)):
        yield f"{file} is of the recipe {other}, and this is `gpipe train {recipe}`"
        return
    hints = get_type_hints(options)
    kinds = {name_of(one.name): hints[one.name] for one in fields(options) if one.name not in NOT_SAVED}
    for name, value in table.items():
        if name == RECIPE:
            continue
        if name not in kinds:
            near = get_close_matches(name, kinds, 1)
            instead = f"; did you mean {near[0]}?" if near else f": see `gpipe train {recipe} --help`"
            yield f"{file}: {name} is no option{instead}"
        elif not fits(value, kinds[name]):
            yield f"{file}: {name} is {value!r}: give {in_words(kinds[name])}"


SAME = {"digits": ("digits", "images"), "images": ("digits", "images")}
"""Recipes with the same options."""


def _words(name: str, value: Any) -> Iterable[str]:
    match value:
        case bool():
            return [flag(name) if value else f"--no-{name.replace('_', '-')}"]
        case list():
            return [flag(name), *map(str, value)]
        case _:
            return [f"{flag(name)}={value}"]


def _value(given: Sequence[str], name: str) -> str | None:
    """What was given for a flag, the last time."""
    found = None
    for i, word in enumerate(given):
        if word == name and i + 1 < len(given):
            found = given[i + 1]
        elif word.startswith(f"{name}="):
            found = word.removeprefix(f"{name}=")
    return found


OPTIONS: dict[str, type[TrainOptions]] = {
    "digits": DigitsOptions,
    "images": ImagesOptions,
    "translation": TranslationOptions,
}
