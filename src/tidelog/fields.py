"""The fields of settings: names and aliases, units, and the values that they accept, declared once by a struct.

    class LogSettings(msgspec.Struct):
        rotate_max_bytes: Annotated[int, Meta(ge=32)] = 64 * MIB      "64MiB" and 67108864 are accepted

Invariants
- The type of a field says what it accepts, and the suffix of its name gives the unit (`units.py`).
- One thing has one name. A struct may accept other names for it (`ALIASES`), and naming both is an error.
- The errors are worded here and not by msgspec, which knows neither units nor which values are secret.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from tidelog.errors import InputError
from tidelog.secret import Secret
from tidelog.units import Unit, unit_of

_TRUTH_VALUES = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class Field(NamedTuple):
    """One field. `kind` is its type as msgspec sees it, without the `| None`."""

    name: str
    type: Any
    kind: inspect.Type

    @property
    def is_secret(self) -> bool:
        return isinstance(self.kind, inspect.CustomType) and self.kind.cls is Secret

    @property
    def is_table(self) -> bool:
        """Whether it holds settings of several things, secret ones among them."""
        return isinstance(self.kind, inspect.DictType) and isinstance(self.kind.value_type, inspect.StructType)

    @property
    def is_number(self) -> bool:
        return isinstance(self.kind, inspect.IntType | inspect.FloatType)

    @property
    def unit(self) -> Unit | None:
        """What its number counts; None when its name does not say."""
        return unit_of(self.name) if self.is_number else None

    def read(self, value: object, *, is_text: bool = False) -> object:
        """The typed value; ValueError when it is none. What `is_text` came as text, whatever its type."""
        if isinstance(value, str):
            value = self._read_text(value, is_text)
        unit = self.unit
        if unit is None or not isinstance(value, int | float) or value <= unit.largest:
            try:
                return msgspec.convert(value, self.type, dec_hook=_to_secret)
            except msgspec.ValidationError:
                pass
        # Outside the except block, so that nothing which knows the value hangs on to the error.
        raise ValueError(f"must be {self.expected}")

    def _read_text(self, text: str, is_text: bool) -> object:
        """The number or truth value in a text, where there should be one; otherwise the text, for the type to judge."""
        read: object = None
        if self.unit is not None:
            read = self.unit.parse(text)
        elif is_text and isinstance(self.kind, inspect.BoolType):
            read = _TRUTH_VALUES.get(text.strip().lower())
        elif is_text and self.is_number:
            read = _read_number(text)
        elif isinstance(self.kind, inspect.DictType):
            read = _read_table(text)
        elif isinstance(self.kind, inspect.VarTupleType):
            read = [part.strip() for part in text.split(",") if part.strip()]
        return text if read is None else read

    @property
    def expected(self) -> str:
        """In words, what it accepts."""
        kind, unit = self.kind, self.unit
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
        if isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.StructType):
            names = ", ".join(field.name for field in kind.value_type.fields if field.name != self.name)
            return f"a table of tables that have some of {names}"
        return "text"


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """All fields by name. Looked up once: to evaluate the annotations of a large struct takes milliseconds."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return {field.name: Field(field.name, types[field.name], _without_none(field.type)) for field in info.fields}


def aliases_of(struct: type[msgspec.Struct]) -> Mapping[str, str]:
    """Other names that are accepted, with the names that they stand for."""
    aliases: Mapping[str, str] = getattr(struct, "ALIASES", {})
    return aliases


_TIMES = ("seconds", "ms", "secs", "s", "milliseconds", "us", "minutes", "hours", "days")
_SIZES = ("bytes", "kb", "mb", "gb", "kib", "mib", "gib", "size")


def read_keywords(
    struct: type[msgspec.Struct],
    given: Mapping[str, object],
    noun: str,
    error: type[InputError] = InputError,
    *,
    is_text: bool = False,
) -> dict[str, Any]:
    """Keywords as typed values under their own names; the error names a wrong one. `noun` says what they are, `is_text`
    that their values came as text."""
    fields, aliases = fields_of(struct), aliases_of(struct)
    found: dict[str, object] = {}
    for keyword, value in given.items():
        name = aliases.get(keyword, keyword)
        if name not in fields:
            hint = f"{nearest(keyword, fields) or ''} There are {', '.join(sorted(fields))}".strip()
            raise error(f"{keyword} is not {noun}", hint=hint)
        if name in found:
            raise error(f"{keyword} is given twice: it is another name of {name}", hint="Give one of them")
        try:
            found[name] = fields[name].read(value, is_text=is_text)
        except ValueError as problem:
            raise error(f"{keyword} {problem}, not {value!r}") from None
    return found


def nearest(name: str, candidates: Collection[str]) -> str | None:
    """A question that helps after a mistyped name, or one with another unit (`retention_ms`)."""
    matches = _in_other_unit(name, candidates) or difflib.get_close_matches(name, sorted(candidates), n=1)
    return f"Did you mean {matches[0]}?" if matches else None


def _in_other_unit(name: str, candidates: Collection[str]) -> list[str]:
    """The names that say the same in another unit of time or size. Case and dots count as in variables and Kafka."""
    stem, _, unit = name.lower().replace(".", "_").rpartition("_")
    same = next((units for units in (_TIMES, _SIZES) if unit in units), ())
    return [one for one in sorted(candidates) if one.lower().replace(".", "_") in {f"{stem}_{other}" for other in same}]


def _without_none(kind: inspect.Type) -> inspect.Type:
    """`int | None` accepts what `int` accepts: no file or variable can say None."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    others = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    return others[0] if len(others) == 1 else kind


def _to_secret(expected: type, value: object) -> object:
    if expected is Secret and isinstance(value, str | Secret):
        return Secret(value) if isinstance(value, str) else value
    raise TypeError


def _read_table(text: str) -> object:
    """A table in JSON, as variables have it."""
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def _read_number(text: str) -> int | float | None:
    for reader in (int, float):
        try:
            number = reader(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def _bounds(kind: inspect.IntType | inspect.FloatType, unit: Unit | None) -> str:
    upper = kind.le if kind.le is not None or unit is None else unit.largest
    bounds = {"at least": kind.ge, "more than": kind.gt, "at most": upper, "less than": kind.lt}
    return "".join(f", {words} {bound}" for words, bound in bounds.items() if bound is not None)
