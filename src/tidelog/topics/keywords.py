"""Keywords held against a struct: which one is wrong, and what it may be instead, in words.

Sizes and durations may have units: `read_units` first, then `find_wrong_keyword`.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import inspect

from tidelog.units import number_of, unit_of


class WrongKeyword(NamedTuple):
    """What to say about it."""

    text: str
    hint: str | None = None


def read_units(struct: type[msgspec.Struct], given: Mapping[str, object]) -> dict[str, object]:
    """The keywords with texts such as "64MiB" and "365d" as the numbers that they stand for."""
    numbers = _numbers(struct) if given else frozenset()
    return {name: number_of(name, value) if name in numbers else value for name, value in given.items()}


@functools.cache
def _numbers(struct: type[msgspec.Struct]) -> frozenset[str]:
    """The fields that are numbers, looked up once, as `_fields` are."""
    return frozenset(name for name, kind in _fields(struct).items() if _is_number(inspect.type_info(kind)))


def _is_number(kind: inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return any(isinstance(each, inspect.IntType | inspect.FloatType) for each in kinds)


def find_wrong_keyword(struct: type[msgspec.Struct], given: Mapping[str, object], noun: str) -> WrongKeyword | None:
    """The first that is not a field of the struct, or not a value of it; `noun` says what its fields are called."""
    fields = _fields(struct) if given else {}
    for name, value in given.items():
        if name not in fields:
            return WrongKeyword(f"{name} is not {noun}", _names_hint(name, sorted(fields)))
        try:
            msgspec.convert(value, fields[name])
        except msgspec.ValidationError:
            kind = inspect.type_info(fields[name])
            unit = unit_of(name) if _is_number(kind) else None
            example = "" if unit is None else f', in {unit.noun} or with a unit as in "{unit.example}"'
            return WrongKeyword(f"{name} must be {_expected(kind)}{example}, not {value!r}")
    return None


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, object]:
    """Looked up once: to evaluate the annotations of a large struct takes milliseconds."""
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


def _names_hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    question = f"Did you mean {near[0]}? " if near else ""
    return f"{question}There are {', '.join(known)}"


def _expected(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_expected(each) for each in kind.types)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return ("a whole number" if isinstance(kind, inspect.IntType) else "a number") + _bounds(kind)
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(f'"{value}"' for value in kind.values)
    if isinstance(kind, inspect.NoneType):
        return "None"
    return "True or False" if isinstance(kind, inspect.BoolType) else "text"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge:,} to {kind.le:,}"
    bounds = {"at least": kind.ge, "more than": kind.gt, "at most": kind.le, "less than": kind.lt}
    return "".join(f", {words} {bound:,}" for words, bound in bounds.items() if bound is not None)
