"""Exit codes, and what is said about an error.

    0    done
    1    a check found something wrong (verify, repair without --yes, doctor, demo), or a question was answered with no
    2    the command line, the settings or the input is wrong
    3    no such topic, offset, file or log directory
    4    owned by another process, or busy: try again later
    5    data on the disk is damaged
    6    the disk is full, or reading or writing it failed
    70   a bug in tidelog
    130  interrupted by Ctrl-C

Scripts rely on these numbers: they never change their meaning.
"""

from __future__ import annotations

import enum
import os

from tidelog.errors import (
    ConflictError,
    DataError,
    DiskFullError,
    GapError,
    InputError,
    LockedError,
    NotFoundError,
    ReopenError,
    RetryError,
    TidelogError,
)


class ExitCode(enum.IntEnum):
    """What a command leaves for the shell."""

    OK = 0
    FOUND_WRONG = 1
    BAD_INPUT = 2
    NOT_FOUND = 3
    TRY_LATER = 4
    DAMAGED = 5
    IO_FAILED = 6
    BUG = 70
    INTERRUPTED = 130


# The first class that fits decides, so a subclass stands before its base.
_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (NotFoundError, ExitCode.NOT_FOUND),
    (InputError, ExitCode.BAD_INPUT),
    (DiskFullError, ExitCode.IO_FAILED),
    (RetryError, ExitCode.TRY_LATER),
    (ConflictError, ExitCode.TRY_LATER),
    (ReopenError, ExitCode.IO_FAILED),
    (DataError, ExitCode.DAMAGED),
    (FileNotFoundError, ExitCode.NOT_FOUND),
    (PermissionError, ExitCode.BAD_INPUT),
    (IsADirectoryError, ExitCode.BAD_INPUT),
    (NotADirectoryError, ExitCode.BAD_INPUT),
    (OSError, ExitCode.IO_FAILED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """The code for an error that ended a command."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.BUG)


def text_of(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, TidelogError):
        text = str(error)
        return text if error.hint is None else text.removesuffix(f". {error.hint}")
    if isinstance(error, OSError) and error.errno is not None:
        reason = error.strerror or os.strerror(error.errno)
        return f"{error.filename}: {reason}" if error.filename is not None else reason
    return f"{type(error).__name__}: {error}"


def hint_of(error: BaseException) -> str | None:
    """What to do about it, in the words of the command line where the error speaks those of the library."""
    if isinstance(error, LockedError):
        return "Stop that process or wait for it; consume, topic list, inspect and verify work meanwhile"
    if isinstance(error, GapError) and error.path is None:  # met while reading, in a log that could be opened
        return f"Leave the lost ones out with --skip-gaps, or begin behind them with --from {error.last + 1}"
    if isinstance(error, DiskFullError):
        return "Free some space, then go on with what is not on the disk yet"
    if isinstance(error, TidelogError):
        return error.hint
    if isinstance(error, PermissionError):
        return "Check its owner and mode, or name another one"
    if isinstance(error, OSError):
        return None
    return "This is a bug in tidelog. Run it again with --debug and report what it prints"
