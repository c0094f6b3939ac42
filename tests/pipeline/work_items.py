"""Functions that the tests run on Spark's workers, which find them by name."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from tidelog.errors import CorruptionError


class Number(msgspec.Struct, frozen=True):
    """An item of work."""

    value: int


class Square(msgspec.Struct, frozen=True):
    """Its result, and who made it."""

    value: int
    square: int
    process: int


def square(item: Number) -> Square:
    return Square(item.value, item.value**2, os.getpid())


class Stop(msgspec.Struct, frozen=True):
    """An item that is done at once, or when a file is there."""

    value: int
    until: str | None


def wait_for_file(item: Stop) -> Square:
    while item.until is not None and not Path(item.until).exists():
        time.sleep(0.05)
    return Square(item.value, item.value**2, os.getpid())


def damaged(item: Number) -> Square:
    raise CorruptionError("a bad frame", path=f"object-{item.value}", byte=item.value, hint="Mend it")


def broken(item: Number) -> Square:
    raise ZeroDivisionError(f"a bug at {item.value}")
