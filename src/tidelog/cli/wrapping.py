"""Lines of text for people: wrapped at words on a terminal, left alone in a pipe.

A command in backticks is meant to be pasted, so it is never broken; the terminal itself wraps it where it must.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from typing import TextIO

_COMMAND = re.compile(r"`[^`]*`")
# Stands for a blank inside a command while lines are broken at blanks.
_HELD_BLANK = "\x00"


def say(text: str, stream: TextIO, indent: str = "") -> None:
    """Writes a paragraph; `indent` is what its further lines begin with."""
    if stream.isatty():
        text = wrapped(text, terminal_columns(stream), indent)
    print(text, file=stream, flush=True)


def wrapped(text: str, columns: int, indent: str = "") -> str:
    """The text in lines of at most so many columns, where its words and commands allow that."""
    held = _COMMAND.sub(lambda found: found[0].replace(" ", _HELD_BLANK), text)
    lines = textwrap.wrap(
        held,
        max(columns, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return "\n".join(lines).replace(_HELD_BLANK, " ")


def terminal_columns(stream: TextIO) -> int:
    """How wide the terminal behind a stream is; COLUMNS in the environment wins."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
