"""Lists the options of the command `gpipe`, from its parsers, so that the page follows the code.

{command} schedule          arguments and options of `gpipe schedule`
{command} train             the options that all recipes share
{command} train images      the options that only this recipe has, or whose default differs
"""

import argparse
import re
import warnings
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tyro.extras import get_parser

from gpipe.cli.doctor import doctor
from gpipe.cli.explain import explain
from gpipe.cli.plan import plan
from gpipe.cli.report import report
from gpipe.cli.schedule import schedule
from gpipe.cli.train import evaluate, record, translate
from gpipe.recipes.options.training import OPTIONS, TrainOptions

COMMANDS: dict[str, Any] = {
    "train": TrainOptions,
    **{f"train {name}": options for name, options in OPTIONS.items()},
    **{
        function.__name__: function
        for function in (evaluate, translate, schedule, report, record, plan, doctor, explain)
    },
}
DEFAULT = re.compile(r" ?\((?:default: (?P<default>.*)|required|optional|repeatable)\)$", re.DOTALL)
CODE = re.compile(r"(`.*?`|--\w[\w-]*)")
NOTHING = ("", "None", "''", "False")


class Command(SphinxDirective):
    """A definition list of the arguments and options of a command."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Returns the description of the command, and the list."""
        (name,) = self.arguments
        shared = described("train") if name.startswith("train ") else {}
        own = {term: said for term, said in described(name).items() if shared.get(term) != said}
        items = nodes.definition_list()
        for term, said in own.items():
            definition = nodes.definition("", nodes.paragraph("", "", *inline(said)))
            items += nodes.definition_list_item("", nodes.term("", "", nodes.literal(text=term)), definition)
        return [items]


def described(name: str) -> dict[str, str]:
    """Returns what a parser says of each argument and option."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # The only way to a parser that tyro has.
        parser = get_parser(COMMANDS[name])
    return {term(action): sentence(action) for action in parser._actions if action.dest != "help"}


def term(action: argparse.Action) -> str:
    """Returns how an argument is written, with the kind of its value."""
    kind = str(action.metavar or "").replace("{None}|", "").replace("None,", "")
    kind = "" if kind.startswith("{") else kind
    return f"{', '.join(action.option_strings)} {kind}".strip()


def sentence(action: argparse.Action) -> str:
    """Returns the help of an argument, its choices and its default."""
    text = " ".join((action.help or "").split())
    default = (DEFAULT.search(text) or {"default": None})["default"]
    text = DEFAULT.sub("", text)
    choices = re.match(r"\{(.*,.*)\}$", str(action.metavar).replace("None,", ""))
    if choices:
        text += f" One of {', '.join(f'`{choice}`' for choice in choices[1].split(','))}."
    if default not in (None, *NOTHING):
        text += f" Default: `{default}`."
    return text


def inline(text: str) -> Iterator[nodes.Node]:
    """Returns text in which options, and parts between backticks, are code."""
    for at, part in enumerate(CODE.split(text)):
        yield nodes.literal(text=part.strip("`")) if at % 2 else nodes.Text(part)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True}
