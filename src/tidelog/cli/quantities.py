"""Sizes on the command line: a number of bytes, or a text with a unit such as 64MiB."""

from __future__ import annotations

import typer


def parse_size(text: str | int) -> int:
    """The parser of an option that is a size."""
    from tidelog.units import parse_bytes

    found = parse_bytes(str(text))
    if not isinstance(found, int):
        raise typer.BadParameter(f"{text!r} is not a size; expected bytes or a text such as 64MiB")
    return found
