"""Exit codes, and what is said about an error.

    0    done
    1    a check found something wrong (verify, repair without --yes, doctor, demo), or a question was answered with no
    2    the command line, the settings or the input is wrong
    3    no such topic, offset, file or log directory
    4    owned by another process or node, or busy, or a store gives no answer: try again later
    5    data on the disk or in the store is damaged
    6    the disk is full, or reading or writing it failed
    70   a bug in tidelog
    130  interrupted by Ctrl-C

Scripts rely on these numbers: they never change their meaning. With --json an error is one line of JSON, the last on
stderr:

    {"error": {"type": "NotFoundError", "message": "there is no topic a/b", "hint": "...", "exit_code": 3}}
"""

from __future__ import annotations

import enum
import functools
import os
import shlex
import shutil
import sys
from pathlib import Path

from tidelog.errors import (
    ConflictError,
    DataError,
    DiskFullError,
    FencedError,
    GapError,
    HeldError,
    InputError,
    LeaseLostError,
    LockedError,
    NotFoundError,
    ReopenError,
    RetryError,
    StoreUnavailableError,
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
    (FencedError, ExitCode.TRY_LATER),
    (LeaseLostError, ExitCode.TRY_LATER),
    (ReopenError, ExitCode.IO_FAILED),
    (DataError, ExitCode.DAMAGED),
    (FileNotFoundError, ExitCode.NOT_FOUND),
    (PermissionError, ExitCode.BAD_INPUT),
    (IsADirectoryError, ExitCode.BAD_INPUT),
    (NotADirectoryError, ExitCode.BAD_INPUT),
    (OSError, ExitCode.IO_FAILED),
)


# What the command line says in the place of the error's own hint, where that has no words for it.
_HINTS: tuple[tuple[type[BaseException], str], ...] = (
    (
        HeldError,
        "Do it there, or close it there; once its lease has run out, this works too. To take it away from there on "
        "purpose, and fence that node: --take-over",
    ),
    (
        LockedError,
        "Stop that process or wait for it; consume without --subscription, topic list, sub list, dlq list, dlq "
        "replay, inspect and verify work meanwhile",
    ),
    (DiskFullError, "Free some space, then append again what is not on the disk yet"),
    (
        FencedError,
        "Run it where the topic is owned now; `tidelog topic rescue` shows what was accepted here and not shipped",
    ),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """The code for an error that ended a command."""
    return exit_code_of_class(type(error))


def exit_code_of_class(found: type[BaseException]) -> ExitCode:
    """The same for an error of which only the class is known."""
    return next((code for kind, code in _CODES if issubclass(found, kind)), ExitCode.BUG)


def _is_met_while_reading(error: GapError) -> bool:
    """In a log that could be opened: one that cannot names its directory, and history names an object's key."""
    return error.path is None or not error.path.exists()


def text_of(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, TidelogError):
        return error.text
    if isinstance(error, OSError) and error.errno is not None:
        reason = error.strerror or os.strerror(error.errno)
        return f"{error.filename}: {reason}" if error.filename is not None else reason
    return f"{type(error).__name__}: {error}"


def hint_of(error: BaseException) -> str | None:
    """What to do about it, in the words of the command line where the error speaks those of the library."""
    for kind, own in _HINTS:
        if isinstance(error, kind):
            return getattr(error, "command_hint", None) or own
    if isinstance(error, GapError) and _is_met_while_reading(error):
        return f"Skip the lost messages with --skip-gaps, or start after them with --from {error.last + 1}"
    hint = command_hint(error) if isinstance(error, TidelogError) else None
    if isinstance(error, StoreUnavailableError):
        return hint or "Try again; `tidelog doctor` says whether the store can be reached"
    if isinstance(error, TidelogError):
        return hint
    if isinstance(error, PermissionError):
        return "Check its owner and mode, or name another one"
    if isinstance(error, OSError):
        return None
    return "This is a bug in tidelog. Run it again with --debug and report what it prints"


def command_hint(error: TidelogError) -> str | None:
    """The hint of an error of the library in the words of the command line."""
    return error.command_hint or error.hint


# What to type to run this very program again, so that a command in a hint works when it is pasted.


_NAME = "tidelog"


@functools.cache
def program() -> str:
    """`tidelog` where the shell finds this one under that name, else its path, else the module."""
    script = _script()
    if script is None:
        return f"{shlex.quote(sys.executable)} -m tidelog.cli.main"
    on_path = shutil.which(_NAME)
    if on_path is not None and Path(on_path).resolve() == script.resolve():
        return _NAME
    return shlex.quote(str(_from_here(script)))


def _script() -> Path | None:
    """The installed script: the one that was started, or the one beside the interpreter."""
    started = Path(sys.argv[0])
    candidates = [started] if started.name == _NAME else []
    candidates.append(Path(sys.executable).with_name(_NAME))
    return next((path.absolute() for path in candidates if path.is_file()), None)


def _from_here(path: Path) -> Path:
    """Relative to the current directory where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
