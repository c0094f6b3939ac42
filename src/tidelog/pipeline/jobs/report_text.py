"""Numbers, times and foreign text as they stand on the page.

Invariants
- Whatever was not written in this package goes through `escaped`: it can neither end an element or an attribute nor
  hold a character that no document may hold.
"""

from __future__ import annotations

import html
import re

from tidelog.clock import to_datetime

_NOT_IN_DOCUMENTS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# They change the direction of the text around them, so that a name could pose as another one.
_STEERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", "k", "M", "G", "T")
_DAY_US = 86_400_000_000
_MINUTE_US = 60_000_000


def escaped(text: object) -> str:
    """Text that stands for nothing but itself, between elements and in attributes."""
    harmless = _STEERING.sub("\ufffd", _NOT_IN_DOCUMENTS.sub("\ufffd", str(text)))
    return html.escape(harmless, quote=True)


def counted(count: float, noun: str) -> str:
    """`1 message`, `2,000 messages`."""
    number = round(count)
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def byte_text(count: float) -> str:
    """A size in the largest unit that leaves a number before the point."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{_short(size)} {_BYTE_UNITS[unit]}"


def count_text(count: float) -> str:
    """A count short enough for an axis: 950, 1.5k, 20M."""
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_COUNT_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{_short(size)}{_COUNT_UNITS[unit]}"


def _short(size: float) -> str:
    return f"{size:.0f}" if size >= 100 or size == round(size) else f"{size:.1f}"


def moment_text(time_us: int) -> str:
    """A moment in UTC, to the second."""
    return _format(time_us, "%Y-%m-%d %H:%M:%S")


def tick_text(time_us: int, width_us: int) -> str:
    """A moment on an axis whose bins are this wide: as much of it as is needed to tell them apart."""
    if width_us >= _DAY_US:
        return _format(time_us, "%Y-%m-%d")
    return _format(time_us, "%m-%d %H:%M" if width_us >= _MINUTE_US else "%H:%M:%S")


def _format(time_us: int, pattern: str) -> str:
    try:
        return to_datetime(time_us).strftime(pattern)
    except OverflowError:
        return f"{time_us} us"
