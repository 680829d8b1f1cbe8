"""Which values of a file an option takes, by the type that its dataclass gives it."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

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
