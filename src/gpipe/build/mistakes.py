"""Collects what is wrong with the arguments of `GPipe`, to raise all of it at once."""

from collections.abc import Iterable


class Mistakes:
    """The mistakes noted so far."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def check(self, condition: bool, text: str) -> bool:
        """Notes a mistake unless the condition holds."""
        if not condition:
            self.found.append(text)
        return condition

    def check_known(self, name: str, value: object, known: Iterable[str]) -> None:
        """Notes a mistake unless the value is one of those known."""
        self.check(value in tuple(known), f"{name}={value!r}; known are {', '.join(map(repr, known))}")

    def raise_all(self) -> None:
        """Raises what was found, if anything.

        Raises:
            ValueError: Lists every mistake.
        """
        if self.found:
            raise ValueError(
                "GPipe cannot be built:\n" + "\n".join(f"- {text}" for text in dict.fromkeys(self.found))
            )
