"""Metadata of objects as Spark has it: map<string, string>, null where there is none to speak of.

    text as it is        numbers and truth values as JSON writes them        bytes in base64        None as null

Invariants
- No metadata is an empty map; null is for rows that have no body: a deletion, a bucket, a refused entry.
- Where no row has metadata, nothing is done for any row.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import compute

METADATA_TYPE = pa.map_(pa.string(), pa.string())


def as_text(value: object) -> str | None:
    """One value of an object's metadata."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return msgspec.json.encode(value).decode()


def metadata_array(rows: Iterable[dict[str, Any] | None]) -> pa.Array:
    """A map for each row; None is null."""
    ends: list[int | None] = []
    names: list[str] = []
    values: list[str | None] = []
    for metadata in rows:
        ends.append(None if metadata is None else len(names))
        for name, value in (metadata or {}).items():
            names.append(name)
            values.append(as_text(value))
    offsets = pa.array([*ends, len(names)], pa.int32())
    return pa.MapArray.from_arrays(offsets, pa.array(names, pa.string()), pa.array(values, pa.string()))


def empty_metadata_array(has_body: pa.Array) -> pa.Array:
    """An empty map for each row with a body, null for the others."""
    zero = pa.scalar(0, pa.int32())
    offsets = pa.concat_arrays(
        [compute.if_else(has_body, zero, pa.scalar(None, pa.int32())), pa.array([0], pa.int32())]
    )
    return pa.MapArray.from_arrays(offsets, pa.array([], pa.string()), pa.array([], pa.string()))
