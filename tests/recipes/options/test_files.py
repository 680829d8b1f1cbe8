"""Options as dataclass, TOML and flags: one set of names, and the same values whichever way they are told."""

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import tomli_w
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.cli.main import main
from gpipe.recipes.options.files import (
    CONFIG,
    NOT_SAVED,
    PRESETS,
    find_preset,
    options_before,
    read_config,
    read_options,
    recipe_of,
    to_table,
    write_config,
)
from gpipe.recipes.options.training import OPTIONS, DigitsOptions, TrainOptions, TranslationOptions, flag, key_of

WORDS = st.text("abcäöπ 0.7_", min_size=1, max_size=5)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-3, 10**9),
    float: st.floats(allow_nan=False),
    str: WORDS,
    Path: WORDS.map(Path),
    NoneType: st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an option's type, legal or not."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of(*map(values_of, inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        return st.lists(values_of(inner[0]), max_size=3).map(tuple)
    return VALUES[kind]


def options_of(recipe: str) -> st.SearchStrategy[TrainOptions]:
    made, hints = OPTIONS[recipe], get_type_hints(OPTIONS[recipe])
    names = [one.name for one in fields(made) if one.name not in NOT_SAVED]
    return st.builds(made, **{name: values_of(hints[name]) for name in names})


def told(recipe: str, *given: str) -> TrainOptions:
    """What `gpipe train` makes of flags."""
    return tyro.cli(OPTIONS[recipe], args=given, default=options_before(recipe, given))


def config(folder: Path, text: str, name: str = CONFIG) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


# The same options.


@pytest.mark.parametrize("recipe", OPTIONS)
@settings(max_examples=20)
@given(st.data())
def test_options_come_back_from_toml(
    recipe: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    options = data.draw(options_of(recipe))
    file = config(tmp_path_factory.mktemp("options"), tomli_w.dumps(to_table(recipe, options)))
    assert OPTIONS[recipe](**read_options(file, recipe)) == options


@pytest.mark.parametrize("recipe", OPTIONS)
def test_names_are_the_same_in_the_dataclass_in_toml_and_in_help(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = OPTIONS[recipe]
    names = {key_of(one.name) for one in fields(options)}
    given: dict[str, Any] = {one.name: tmp_path for one in fields(options)}  # so that none is left out
    assert to_table(recipe, options(**given)).keys() == {"recipe", *names - NOT_SAVED}
    with pytest.raises(SystemExit) as ended:
        main(["train", recipe, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    flags = {word for line in text.splitlines() for word in re.findall(r"(?<=^[│ ] )--[\w-]+", line)}
    assert flags == {flag(name) for name in names}
    for field in fields(options):
        assert field.default in (None, ()) or f"(default: {field.default})" in " ".join(text.split())
    assert "None" not in text


@pytest.mark.parametrize("file", sorted(PRESETS.rglob("*.toml")), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_preset_is_legal_and_every_recipe_has_the_papers(file: Path, tmp_path: Path) -> None:
    recipe = file.parent.name
    assert find_preset(Path(file.stem), recipe) == file
    given = ["--config", file.stem, *(["--image-folder", str(tmp_path)] if recipe == "images" else [])]
    options = told(recipe, *given)
    options.check()
    table = tomllib.loads(tomli_w.dumps(to_table(recipe, options)))
    assert read_config(file).items() <= table.items()
    assert {file.parent.name for file in PRESETS.glob("*/paper.toml")} == set(OPTIONS)


# Which file comes before which.


def test_flags_come_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    file = config(tmp_path, "layers = 5\nfilters = 16\nflip = true\nclasses = ['1', 2]\n", "my.toml")
    options = told("digits", "--filters", "48", "--config", str(file), "--no-flip")
    assert options == DigitsOptions(config=file, layers=5, filters=48, classes=("1", "2"))
    told("digits", f"--config={file}").check()


def test_a_preset_stands_behind_a_file_of_its_name_but_not_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for size, make in ((72, str), (72, lambda: Path("paper").mkdir()), (99, lambda: Path("paper").rmdir())):
        make()
        if size == 99:
            config(tmp_path, "image_size = 99", "paper")
        assert told("digits", "--config", "paper").image_size == size  # type: ignore[attr-defined]


def test_resume_takes_the_options_of_the_run_if_it_has_begun(tmp_path: Path) -> None:
    assert told("digits", "--resume", "--out", str(tmp_path)) == DigitsOptions(out=tmp_path, resume=True)
    run = DigitsOptions(out=tmp_path, filters=48, micro_batches=2, from_=tmp_path / "first", classes=("3", "4"))
    write_config(tmp_path, "digits", run)
    assert told("digits", "--resume", "--out", str(tmp_path)) == replace(run, resume=True)
    resumed = told("digits", "--resume", f"--out={tmp_path}", "--partitions", "3")
    assert resumed == replace(run, resume=True, partitions=3)
    assert told("digits", "--out", str(tmp_path)) == DigitsOptions(out=tmp_path)


def test_from_takes_the_network_of_the_run_and_nothing_else(tmp_path: Path) -> None:
    run = DigitsOptions(filters=48, layers=4, image_size=70, aux_head=0.4, model="amoebanet-b", ema=0.9, seed=7)
    write_config(tmp_path, "digits", run)
    network = DigitsOptions(filters=48, layers=4, image_size=70, aux_head=0.4, model="amoebanet-b", from_=tmp_path)
    assert told("digits", "--from", str(tmp_path)) == network
    assert told("digits", f"--from={tmp_path}", "--layers", "5") == replace(network, layers=5)
    file = config(tmp_path, tomli_w.dumps({"from": str(tmp_path), "layers": 6}), "my.toml")
    assert told("digits", "--config", str(file)) == replace(network, layers=6, config=file)
    assert told("images", "--from", str(tmp_path)).filters == 48  # type: ignore[attr-defined]
    assert recipe_of(tmp_path) == "digits"
    sizes = TranslationOptions(layers=2, ffn_dim=64, heads=2, model_dim=32, head_dim=16, vocabulary=300, matrices=1)
    write_config(tmp_path, "translation", replace(sizes, tokens=1000))
    assert told("translation", "--from", str(tmp_path)) == replace(sizes, from_=tmp_path)


# What cannot be.


def test_all_that_is_wrong_in_a_file_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        filter = 16
        whatever = 1
        steps = "many"
        flip = 1
        seed = true
        drop_path = "0.7"
        model = "amoebanet-c"
        classes = "1"
        layers = [3]
        epochs = 1.5
        out = 2026-01-01
        resume = true
        optimizer = "sgd"
        learning_rate = 1
    """
    file = config(tmp_path, text, "my.toml")
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", "--config", str(file)])
    assert ended.value.code == 2
    said = [line.strip().removeprefix("gpipe: ") for line in capsys.readouterr().err.splitlines()]
    assert said == [
        f"{file}: filter is not an option. Did you mean filters?",
        f"{file}: whatever is not an option. `gpipe train digits --help` lists all options.",
        f"{file}: steps has the invalid value 'many'. Write an integer.",
        f"{file}: flip has the invalid value 1. Write true or false.",
        f"{file}: seed has the invalid value True. Write an integer.",
        f"{file}: model has the invalid value 'amoebanet-c'. Write 'amoebanet-d' or 'amoebanet-b'.",
        f"{file}: classes has the invalid value '1'. Write a list in which each entry is a string.",
        f"{file}: layers has the invalid value [3]. Write an integer.",
        f"{file}: epochs has the invalid value 1.5. Write an integer.",
        f"{file}: out has the invalid value datetime.date(2026, 1, 1). Write a string.",
        f"{file}: resume is not an option. `gpipe train digits --help` lists all options.",
    ]


def test_what_is_no_file_of_this_recipe_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "translation", TranslationOptions(out=tmp_path))
    for flags in (["--config", str(tmp_path / CONFIG)], ["--from", str(tmp_path)], ["--resume", f"--out={tmp_path}"]):
        with pytest.raises(ValueError, match=r"contains options of the recipe translation\. Use"):
            told("digits", *flags)
    (tmp_path / "empty").mkdir()
    for flags, words in (
        (["--config", "papr"], "--config: papr is neither a file nor a preset"),
        (["--config", str(config(tmp_path, "layers: 3"))], r"config.toml: is not a valid TOML file: .*line 1"),
        (["--config", str(tmp_path)], "cannot be read: Is a directory"),
        (["--from", str(tmp_path / "empty")], r"empty: contains no config.toml\. Pass"),
    ):
        with pytest.raises(ValueError, match=words):
            told("digits", *flags)
