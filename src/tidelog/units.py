"""Sizes and durations as people write them: "64MiB", "10 kB", "5s", "1h".

The arithmetic is exact: "0.1s" is 100 ms and not 99 or 101. A text that is no such quantity gives None; what to say
about it is the decision of the caller, who knows the name of the setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([a-z]*)")

_BYTES_OF = {"": Fraction(1), "b": Fraction(1)}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTES_OF[f"{_letter}b"] = Fraction(1000**_power)
    _BYTES_OF[f"{_letter}ib"] = Fraction(1024**_power)

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
    """A whole result is an int, so that whoever wants whole numbers can tell them from the others."""
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in factors:
        return None
    quantity = Fraction(match[1]) * factors[match[2]]
    return quantity.numerator if quantity.denominator == 1 else float(quantity)
