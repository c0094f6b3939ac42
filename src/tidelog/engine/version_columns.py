"""Rows of the version index as columns: which versions are to be seen at a seq, without an object a row.

    looking = VersionLook(seq, created, start=..., stop=...)
    for raw in ...:                                          # rows as they are in blocks, in order of key
        columns = looking.gather(raw)

Invariants
- The rule of `versions.py`: at a seq an object is its newest version that is not after it, if that is no deletion and
  belongs to the bucket that is there. With all versions, everything that is kept and not after the seq is there.
- Versions of a name may be in several pieces of rows, one behind the other: what was decided is remembered.

The loops are C (`_entries.c`); `version_columns_python` gives the same answers where it could not be built.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidelog.engine import version_columns_python
from tidelog.engine.cell import INLINE, Cell
from tidelog.engine.entry_columns import Strings

if TYPE_CHECKING:
    _kernel = version_columns_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _entries as _kernel
    except ImportError:
        _kernel = version_columns_python

KERNEL_IS_NATIVE = _kernel is not version_columns_python


@dataclass(frozen=True, slots=True)
class VersionColumns:
    """Versions of objects as arrays, little-endian: i64, u32 and u8 as `version_columns_python` lists them."""

    count: int
    seqs: bytes
    sizes: bytes
    lsns: bytes
    positions: bytes
    crcs: bytes
    orders: bytes
    stored_bytes: bytes
    flags: bytes
    codecs: bytes
    buckets: Strings
    keys: Strings
    inline: Strings

    def cells(self) -> Iterator[Cell]:
        """The cells again, one by one: for whoever reads the bodies."""
        wide = [memoryview(one).cast("Q") for one in (self.sizes, self.lsns, self.positions)]
        narrow = [memoryview(one).cast("I") for one in (self.orders, self.crcs, self.stored_bytes)]
        ends = memoryview(self.inline.ends).cast("i")
        rows = zip(self.flags, self.codecs, *wide, *narrow, ends, ends[1:], strict=False)
        for flags, codec, size, lsn, position, order, crc, stored_bytes, low, high in rows:
            stored = self.inline.data[low:high] if flags == INLINE else None
            length = stored_bytes if stored is None else high - low
            yield Cell(flags, order, size, crc, codec, lsn, position, length, stored)


class VersionLook:
    """Goes through the rows of a range of keys. `created` has the creation (seq, order) of every live bucket."""

    def __init__(
        self,
        seq: int,
        created: Mapping[str, tuple[int, int]],
        *,
        start: bytes,
        stop: bytes,
        all_versions: bool = False,
    ) -> None:
        names = sorted((name.encode(), *version) for name, version in created.items())
        ends = array("I", [0])
        for name, _, _ in names:
            ends.append(ends[-1] + len(name))
        self._buckets = (
            *(ends.tobytes(), b"".join(name for name, _, _ in names)),
            *(array("Q", [seq for _, seq, _ in names]).tobytes(), array("I", [order for *_, order in names]).tobytes()),
        )
        self._range = seq, all_versions, start, stop
        self._settled = b""

    def gather(self, raw: bytes) -> VersionColumns:
        """What is to be seen of the next rows."""
        count, self._settled, numbers, strings = _kernel.gather_versions(
            raw, *self._range, self._settled, *self._buckets
        )
        texts = [Strings(*strings[number : number + 2]) for number in range(0, len(strings), 2)]
        seqs, sizes, lsns, positions, crcs, orders, stored_bytes, flags, codecs = numbers
        return VersionColumns(*(count, seqs, sizes, lsns, positions, crcs, orders, stored_bytes, flags, codecs), *texts)
