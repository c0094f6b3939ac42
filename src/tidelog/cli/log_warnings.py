"""What the log itself reports while a command runs, in the form of the command line's own messages.

A failing write is reported twice: by the writer, at once, and by the error that ends the command. The first is held
back until the command's end is known, and left out when the error says the same.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tidelog.cli.wrapping import say

_LOGGER = "tidelog"
_WRITER = "writer"


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Shows on stderr what the log reports meanwhile."""
    handler, logger = _Handler(), logging.getLogger(_LOGGER)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    except BaseException as error:
        if _is_told_by(error):
            handler.held.clear()
        raise
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        handler.let_go()


def _is_told_by(error: BaseException) -> bool:
    """Whether the writer ended this way, so that its own report is a repetition."""
    from tidelog.errors import DiskFullError, LogFailedError

    return isinstance(error, DiskFullError | LogFailedError)


class _Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.held: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = f"warning: {record.getMessage()}"
        if record.module == _WRITER and record.levelno >= logging.ERROR:
            self.held.append(text)
            return
        self.let_go()
        say(text, sys.stderr)

    def let_go(self) -> None:
        """What was held back is not repeated by anything: it is shown after all."""
        held, self.held = self.held, []
        for text in held:
            say(text, sys.stderr)
