"""Human-readable sizes and durations: "64MiB", "10 kB", "5s", "1h".

The arithmetic is exact: "0.1s" is 100 ms and not 99 or 101. Text that is not a quantity gives None; the caller, which
knows the name of the setting, decides what to report.

One rule covers all settings, options and arguments: the suffix of a name gives the unit of its number (`unit_of`), and
text with a unit is accepted wherever such a number is (`fields.py`, `to_seconds`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

from tidelog.errors import InputError

_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([a-z]*)")

_BYTES_OF = {"": Fraction(1), "b": Fraction(1)}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTES_OF[f"{_letter}b"] = Fraction(1000**_power)
    _BYTES_OF[f"{_letter}ib"] = Fraction(1024**_power)

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_SECONDS_OF = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_PLAIN_SECONDS_OF = {**_SECONDS_OF, "": Fraction(1)}
_PLAIN_MILLISECONDS_OF = {**{unit: 1000 * seconds for unit, seconds in _SECONDS_OF.items()}, "": Fraction(1)}


def human_bytes(count: float) -> str:
    """A size in the largest unit that leaves a number before the point."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_BYTE_UNITS[unit]}"


def parse_bytes(text: str) -> int | float | None:
    """Bytes; KiB, MiB, ... are powers of 1024 and kB, MB, ... of 1000, in any case of letters."""
    return _parse(text, _BYTES_OF)


def parse_seconds(text: str) -> int | float | None:
    """Seconds; a number without a unit is seconds."""
    return _parse(text, _PLAIN_SECONDS_OF)


def parse_milliseconds(text: str) -> int | float | None:
    """Milliseconds; a number without a unit is milliseconds."""
    return _parse(text, _PLAIN_MILLISECONDS_OF)


def _parse(text: str, factors: Mapping[str, Fraction]) -> int | float | None:
    """A whole result is an int, so that callers that need whole numbers can tell them from the others."""
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in factors:
        return None
    quantity = Fraction(match[1]) * factors[match[2]]
    return quantity.numerator if quantity.denominator == 1 else float(quantity)


class Unit(NamedTuple):
    """What a name's ending promises. The largest value is one that no clock, timer or file system chokes on."""

    parse: Callable[[str], int | float | None]
    noun: str
    example: str
    largest: int


_UNITS = {
    "_bytes": Unit(parse_bytes, "bytes", "64MiB", 1 << 50),
    "_ms": Unit(parse_milliseconds, "milliseconds", "100ms", 10 * 365 * 86400 * 1000),
    "_seconds": Unit(parse_seconds, "seconds", "1h", 10 * 365 * 86400),
}


def unit_of(name: str) -> Unit | None:
    """What a number of this name counts; None when its name does not say."""
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), None)


def to_seconds(value: float | str | None, name: str = "timeout") -> float | None:
    """Seconds to wait, from a number or a text such as "500ms"; None stays None. InputError names the argument."""
    seconds = parse_seconds(value) if isinstance(value, str) else value
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if value is not None and (not is_number or seconds is None or not seconds >= 0):
        raise InputError(f'{name} must be a number of seconds, 0 or more, or text such as "5s", not {value!r}')
    return seconds
