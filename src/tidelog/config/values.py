"""From what was given to a typed value, or to an error that says what would have been right.

The type of a setting says what it accepts, and the ending of its name says in which unit. The errors are made here and
not by msgspec, which knows neither units nor which values must not be seen.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import inspect

from tidelog.config.settings import Setting
from tidelog.config.sources import Given
from tidelog.secret import Secret
from tidelog.units import Unit, unit_of

_TRUTH_VALUES = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def convert(given: Given) -> object:
    """The typed value; ConfigError names the place, the value and what is expected."""
    value = _read_text(given) if isinstance(given.value, str) else given.value
    if not _is_too_large(value, _unit_of(given.setting)):
        try:
            return msgspec.convert(value, given.setting.type, dec_hook=_to_secret)
        except msgspec.ValidationError:
            pass
    # Outside the except block, so that nothing which knows the value hangs on to the error.
    raise given.error(f"must be {_expected(given.setting)}, not {given.shown}")


def _unit_of(setting: Setting) -> Unit | None:
    return unit_of(setting.name) if setting.is_number else None


def _is_too_large(value: object, unit: Unit | None) -> bool:
    return unit is not None and isinstance(value, int | float) and value > unit.largest


def _to_secret(expected: type, value: object) -> object:
    if expected is Secret and isinstance(value, str | Secret):
        return Secret(value) if isinstance(value, str) else value
    raise TypeError


def _read_text(given: Given) -> object:
    """The number or truth value in a text, where there should be one; otherwise the text, for the type to judge."""
    text, setting, unit = str(given.value), given.setting, _unit_of(given.setting)
    read: object = None
    if unit is not None:
        read = unit.parse(text)
    elif given.is_text and isinstance(setting.kind, inspect.BoolType):
        read = _TRUTH_VALUES.get(text.strip().lower())
    elif given.is_text and setting.is_number:
        read = _read_number(text)
    elif isinstance(setting.kind, inspect.VarTupleType):
        read = [part.strip() for part in text.split(",") if part.strip()]
    return text if read is None else read


def _read_number(text: str) -> int | float | None:
    for reader in (int, float):
        try:
            number = reader(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def _expected(setting: Setting) -> str:
    """In words, what the setting accepts."""
    kind, unit = setting.kind, _unit_of(setting)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        number = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        text = f'{number} of {unit.noun} or text such as "{unit.example}"' if unit else number
        return text + _bounds(kind, unit)
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(dict.fromkeys(str(value) for value in kind.values))
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.VarTupleType):
        return "a list of texts, or one text with commas between them"
    return "text"


def _bounds(kind: inspect.IntType | inspect.FloatType, unit: Unit | None) -> str:
    upper = kind.le if kind.le is not None or unit is None else unit.largest
    bounds = {"at least": kind.ge, "more than": kind.gt, "at most": upper, "less than": kind.lt}
    return "".join(f", {words} {bound}" for words, bound in bounds.items() if bound is not None)
