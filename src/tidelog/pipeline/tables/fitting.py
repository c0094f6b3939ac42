"""Converts decoded values to the types of a table's columns; what does not fit is reported, never forced.

Invariants
- A value fits, or `MisfitError` says where in it the first mismatch is, and why.
- Conversion is lossless: a number that a type cannot hold exactly does not fit (except that a whole number may become a
  double), and text holds anything, as its JSON.
"""

from __future__ import annotations

import datetime
import decimal
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import types

Fit = Callable[[Any], Any]
_EXACT = decimal.Context(prec=1000)
_BITS = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}


class MisfitError(Exception):
    """A value is not of the type of its column."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.reason = reason
        self.path = path

    def below(self, name: str) -> MisfitError:
        """The same, as seen from one level further up."""
        return MisfitError(self.reason, f"{name}.{self.path}" if self.path else name)


def fitter(kind: pa.DataType, *, ignores_unknown: bool = False) -> Fit:
    """A function that brings values into a type; built once, so that a row costs no look at types."""
    if types.is_struct(kind):
        return _struct_fitter(kind, ignores_unknown)
    if types.is_list(kind):
        return _list_fitter(kind, ignores_unknown)
    if kind in _BITS:
        return _whole_fitter(_BITS[kind])
    if types.is_decimal(kind):
        return _decimal_fitter(kind)
    return _SIMPLE[kind]


def _struct_fitter(kind: pa.DataType, ignores_unknown: bool) -> Fit:
    fits = {field.name: fitter(field.type, ignores_unknown=ignores_unknown) for field in kind}

    def fit(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _misfit(value, "an object")
        result = {}
        for name, one in value.items():
            found = fits.get(name)
            if found is None:
                if one is not None and not ignores_unknown:
                    raise MisfitError("it has no column", name)
            elif one is not None:
                try:
                    result[name] = found(one)
                except MisfitError as error:
                    raise error.below(name) from None
        return result

    return fit


def _list_fitter(kind: pa.DataType, ignores_unknown: bool) -> Fit:
    one = fitter(kind.value_type, ignores_unknown=ignores_unknown)

    def fit(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _misfit(value, "an array")
        try:
            return [None if item is None else one(item) for item in value]
        except MisfitError as error:
            raise error.below("[]") from None

    return fit


def _whole_fitter(bits: int) -> Fit:
    limit = 1 << (bits - 1)

    def fit(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _misfit(value, "a whole number")
        if not -limit <= value < limit:
            raise MisfitError(f"{value} does not fit into {bits} bits")
        return value

    return fit


def _decimal_fitter(kind: pa.DataType) -> Fit:
    def fit(value: Any) -> decimal.Decimal:
        if isinstance(value, bool) or not isinstance(value, int | float | str | decimal.Decimal):
            raise _misfit(value, "a number")
        try:
            # By its text: a double has more digits than were written.
            exact = decimal.Decimal(str(value))
            scaled = _EXACT.quantize(exact, decimal.Decimal(1).scaleb(-kind.scale))
        except decimal.InvalidOperation:
            raise _misfit(value, "a number") from None
        if scaled != exact or len(scaled.as_tuple().digits) > kind.precision:
            raise MisfitError(f"{exact} does not fit into {kind}")
        return scaled

    return fit


def _fit_boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _misfit(value, "true or false")
    return value


def _fit_double(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _misfit(value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise MisfitError(f"{value} does not fit into a double") from None


def _fit_float(value: Any) -> float:
    found = _fit_double(value)
    try:
        struct.pack("<f", found)  # the native one does not notice
    except OverflowError:
        raise MisfitError(f"{value} does not fit into a float") from None
    return found


def _fit_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        raise MisfitError("bytes where text is expected")
    return msgspec.json.encode(value).decode()


def _fit_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise _misfit(value, "text")


def _fit_time(value: Any) -> datetime.datetime:
    if isinstance(value, datetime.datetime):
        return value
    try:
        found = datetime.datetime.fromisoformat(value)
        return found.astimezone(datetime.UTC) if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)
    except (TypeError, ValueError):
        raise _misfit(value, "a time such as 2026-01-31T12:00:00Z") from None
    except OverflowError:
        raise MisfitError(f"{value} is outside the years 1 to 9999 in UTC") from None


def _fit_date(value: Any) -> datetime.date:
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(value)
    except (TypeError, ValueError):
        raise _misfit(value, "a date such as 2026-01-31") from None


_SIMPLE: dict[pa.DataType, Fit] = {
    pa.bool_(): _fit_boolean,
    pa.float32(): _fit_float,
    pa.float64(): _fit_double,
    pa.string(): _fit_text,
    pa.binary(): _fit_bytes,
    pa.timestamp("us", tz="UTC"): _fit_time,
    pa.date32(): _fit_date,
}
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number with a fraction"),
    (str, "text"),
    (dict, "an object"),
    (list, "an array"),
)


def _misfit(value: object, expected: str) -> MisfitError:
    found = next((name for kind, name in _KINDS if isinstance(value, kind)), type(value).__name__)
    return MisfitError(f"{found} where {expected} is expected")
