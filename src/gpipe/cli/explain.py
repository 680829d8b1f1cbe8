"""Explains the name at the end of a message: `gpipe explain branch-on-value`."""

from difflib import get_close_matches

from tyro.conf import Positional

from gpipe.cli import exit_on_user_errors
from gpipe.explanations import as_text, explanations


def explain(slug: Positional[str] = "") -> None:
    """Explains an error or a finding: its cause, and how to fix it.

    Example: gpipe explain branch-on-value

    Args:
        slug: The name in brackets at the end of the message. Without a name, lists all names.
    """
    entries = explanations()
    slug = slug.strip("[]")
    if not slug:
        print("\n".join(entries))
    elif slug in entries:
        print(as_text(entries[slug]), end="")
    else:
        close = get_close_matches(slug, entries, 1)
        fix = f"Did you mean {close[0]}?" if close else "`gpipe explain` lists all names."
        with exit_on_user_errors():
            raise ValueError(f"{slug!r} is not the name of a message. {fix}")
