"""Output text on its way to a reader that may need more of it: readers are generators that yield where they must wait.

How the text was cut makes no difference to them, as each waits until what it holds decides.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

JSON_BLANKS = " \t\r\n"
_JSON_PLAIN = frozenset(JSON_BLANKS + ":,+-.0123456789truefalsnE")

Step = Generator[None, None, Any]  # one reader's work


class OutputOver(Exception):
    """The output is over where a reader needs more of it."""


class Feed:
    """What is not read yet, and whether more may come."""

    def __init__(self) -> None:
        self.held = ""
        self.is_last = False

    def more(self) -> Step:
        """Wait for more text. Raises OutputOver when there is none."""
        if self.is_last:
            raise OutputOver
        yield


class JsonEnd:
    """Finds where one JSON object ends, reading it piece by piece; constant work per character.

    is_inside: the object's brace has been read already. `is_broken`: this cannot become a JSON object any more, from
    character `n_read` of the last text on.
    """

    def __init__(self, *, is_inside: bool = False) -> None:
        self._closers: list[str] = ["}"] if is_inside else []
        self._is_in_string = False
        self._is_escaped = False
        self.is_broken = False
        self.n_read = 0

    def feed(self, text: str) -> int | None:
        """One past the object's last character in `text`, or None when it is not there yet (or broken)."""
        for i, char in enumerate(text):
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_in_string = False
            elif self._closers and char == self._closers[-1]:
                self._closers.pop()
                if not self._closers:
                    return i + 1
            elif char in "{[" and (self._closers or char == "{"):
                self._closers.append("}" if char == "{" else "]")
            elif char == '"' and self._closers:
                self._is_in_string = True
            elif char not in (_JSON_PLAIN if self._closers else JSON_BLANKS):
                self.is_broken = True
                self.n_read = i
                return None
        return None
