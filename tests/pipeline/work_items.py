"""Functions that the tests run on Spark's workers, which find them by name."""

from __future__ import annotations

import os

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


def damaged(item: Number) -> Square:
    raise CorruptionError("a bad frame", path=f"object-{item.value}", byte=item.value, hint="Mend it")


def broken(item: Number) -> Square:
    raise ZeroDivisionError(f"a bug at {item.value}")
