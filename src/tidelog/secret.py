"""A value that must not be disclosed: it always prints as `***`.

Settings that hold a password or a key have this type, so that no error, log line, repr or traceback shows them by
accident. It cannot be serialized to JSON either; code that needs the text calls `reveal()`.
"""

from __future__ import annotations

HIDDEN = "***"


class Secret:
    """Text that only `reveal()` shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself. Keep it out of messages."""
        return self._text

    def __repr__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)
