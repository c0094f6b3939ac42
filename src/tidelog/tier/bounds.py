"""Which numbers a document in a metadata store may hold. What is out of bounds was not written by us.

JSON has numbers of any size. One that is believed where it cannot be moves a topic's start behind all its messages, or
ends a process with a plain OverflowError somewhere far from the document; so each is looked at when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""An offset, an epoch, a count, a size, a time since 1970."""
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def impossible_number(document: object) -> str | None:
    """The field of a document whose number has more than 64 bits, with the number; None when there is none."""
    return next((f"{path} is {number}" for path, number in _numbers(msgspec.to_builtins(document), "")), None)


def _numbers(value: object, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            yield path, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _numbers(one, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _numbers(one, f"{path}[{index}]")
