"""The pure-Python twin of the C kernel that finds and lists the versions of objects to be seen at a seq.

The same answers as `_engine.c`, slower.
"""

from __future__ import annotations

import struct
from typing import Any

from tidelog.engine import tree_python
from tidelog.engine.cell import POINTER_BYTES, TOMBSTONE, decode_cell
from tidelog.engine.page_python import atomic, damage, key_at, lower_bound, opened, right_of, value_at
from tidelog.engine.version_keys import OBJECTS, SEQ_BYTES, at, object_prefix, seq_of

_POINTER = struct.Struct("<xIQIBQQI")
_MAX_KEY_BYTES = 2048
_LEAST_KEY_BYTES = 5 + SEQ_BYTES
LIST_STEPS = 2048
"""Cells of one call: nobody waits longer for it, however many objects were deleted."""

Pointer = tuple[int, int, int, int, int, int, int, int]
"""(seq, order, size, crc, codec, lsn, position, stored bytes) of a version whose body is in the log."""
Other = tuple[int, bytes]
"""(seq, cell) of a version that is a tombstone, or has its body in the page."""
Row = tuple[Any, ...]
"""(key, size, seq) of an object that is to be seen, and its crc where that is asked for."""
Seen = tuple[list[Row], bytes | None, int]
"""Rows, the key to go on from (None at the end), and the page that must be loaded first (0 for none)."""
_Place = tuple[bytearray, int]


def find_version(
    pages: tree_python.Pages, root: int, bucket: str, key: str, seq: int, /
) -> Pointer | Other | int | None:
    """The newest version of an object that is not after a seq; None when there is none; or a missing page."""
    wanted = at(object_prefix(bucket, key), seq)
    if len(wanted) > _MAX_KEY_BYTES:
        return None
    found = tree_python.find(pages, root, wanted)
    if found is None or isinstance(found, int):
        return found
    name, value = found
    if name[:-SEQ_BYTES] != wanted[:-SEQ_BYTES]:
        return None
    if len(value) == POINTER_BYTES and not value[0]:
        return (seq_of(name), *_POINTER.unpack(value))
    return seq_of(name), value


@atomic
def list_seen(
    pages: tree_python.Pages,
    root: int,
    start: bytes,
    stop: bytes,
    seq: int,
    created_seq: int,
    created_order: int,
    limit: int,
    has_crc: object,
    /,
) -> Seen:
    """Up to `limit` objects from `start` to before `stop` as they are at a seq, in a bucket that was created then."""
    if limit < 0:
        raise ValueError("limit must not be negative")
    if not 1 <= limit <= LIST_STEPS:
        raise ValueError(f"limit must be from 1 to {LIST_STEPS}")
    if len(start) > _MAX_KEY_BYTES:
        raise ValueError("start is longer than a key can be")
    walk = _Walk(pages, root, start, stop, seq, (created_seq, created_order), limit)
    missing_page = 0
    try:
        is_over = walk.run()
    except tree_python.MissingError as missing:
        is_over, missing_page = False, missing.page_id
    rows: list[Row] = [(key.decode(), size, at_seq, crc) for key, size, at_seq, crc in walk.rows]
    return rows if has_crc else [row[:3] for row in rows], None if is_over else walk.target, missing_page


class _Walk:
    """From key to key by seeking, never version by version. `target` is the least key that is still wanted."""

    def __init__(
        self,
        pages: tree_python.Pages,
        root: int,
        start: bytes,
        stop: bytes,
        seq: int,
        created: tuple[int, int],
        limit: int,
    ) -> None:
        self._pages = pages
        self._root = root
        self.target = start
        self._stop = stop
        self._seq = seq
        self._created = created
        self._limit = limit
        self.rows: list[tuple[bytes, int, int, int]] = []

    def run(self) -> bool:
        """Whether it has come to the end."""
        place = self._descend()
        for _ in range(LIST_STEPS):
            if place is None:
                return True
            page, index = place
            if index >= 0:
                if self._look(page, index):
                    return True
                if len(self.rows) == self._limit:
                    return False
                place = self._further(page)
            if place is not None and place[1] < 0:
                place = self._descend()
        return place is None

    def _descend(self) -> _Place | None:
        """The first cell that is wanted in the leaf of the target; where there is none, it aims behind that leaf."""
        leaf, fence = tree_python.leaf_and_fence(self._pages, self._root, self.target)
        index = self._index_in(leaf)
        if index < 0:
            if fence is None:
                return None
            self.target = fence
        return leaf, index

    def _further(self, leaf: bytearray) -> _Place | None:
        """The same in this leaf or in the one to the right; None at the end of the tree."""
        index = self._index_in(leaf)
        if index >= 0:
            return leaf, index
        if right_of(leaf) == 0:
            return None
        leaf = tree_python.visit(self._pages, self._root, right_of(leaf), 0)
        return leaf, self._index_in(leaf)

    def _index_in(self, leaf: bytearray) -> int:
        """-1 where it has none."""
        count = opened(leaf)[0]
        index = lower_bound(leaf, count, self.target)
        return index if index < count else -1

    def _look(self, page: bytearray, index: int) -> bool:
        """Whether the cell is behind all that is wanted; else it is taken if it is to be seen, and aimed behind."""
        key = key_at(page, index)
        if key >= self._stop:
            return True
        prefix, seq = key[:-SEQ_BYTES], seq_of(key)
        names = prefix.split(b"\0")
        if len(key) < _LEAST_KEY_BYTES or key[:1] != OBJECTS or len(names) != 3 or not names[1] or names[2]:
            raise damage(page, f"cell {index} is no version of an object")
        if seq > self._seq:
            self.target = at(prefix, self._seq)
            return False
        self.target = prefix[:-1] + b"\1"
        cell = decode_cell(value_at(page, index))
        if not cell.flags & TOMBSTONE and (seq, cell.order) >= self._created:
            self.rows.append((names[1], cell.size, seq, cell.crc))
        return False
