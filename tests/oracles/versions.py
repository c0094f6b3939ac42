"""The oracle of the versions of objects to be seen at a seq: finding and listing them."""

from __future__ import annotations

import zlib

from tests.oracles import tree
from tests.oracles.cells import decode_cell
from tests.oracles.pages import damage, key_at, lower_bound, opened, value_at

from tidelog.engine.btree.page import Pages, right_of
from tidelog.engine.mvcc.cells import (
    OBJECTS,
    POINTER,
    SEQ_BYTES,
    TOMBSTONE,
    Cell,
    at,
    is_pointer,
    object_prefix,
    seq_of,
)
from tidelog.engine.mvcc.versions import Other, Pointer, Row, Seen
from tidelog.errors import DataError

_MAX_KEY_BYTES = 2048
_LEAST_KEY_BYTES = 5 + SEQ_BYTES
LIST_STEPS = 2048
"""Cells of one call: nobody waits longer for it, however many objects were deleted."""

_Place = tuple[bytearray, int]


def find_version(pages: Pages, root: int, bucket: str, key: str, seq: int, /) -> Pointer | Other | int | None:
    """The newest version of an object that is not after a seq; None when there is none; or a missing page."""
    wanted = at(object_prefix(bucket, key), seq)
    if len(wanted) > _MAX_KEY_BYTES:
        return None
    found = tree.find(pages, root, wanted)
    if found is None or isinstance(found, int):
        return found
    name, value = found
    if name[:-SEQ_BYTES] != wanted[:-SEQ_BYTES]:
        return None
    return _pointer(seq_of(name), value) or (seq_of(name), value)


def _pointer(seq: int, value: bytes) -> Pointer | None:
    try:
        cell = decode_cell(value) if is_pointer(value) else None
    except DataError:
        return None  # whoever decodes it says what is wrong
    return None if cell is None else (seq, *cell[1:8])


def list_seen(
    pages: Pages,
    root: int,
    start: bytes,
    stop: bytes,
    seq: int,
    created_seq: int,
    created_order: int,
    limit: int,
    columns: int,
    is_reverse: object,
    prefix_bytes: int = 0,
    delimiter: bytes = b"",
    /,
) -> Seen:
    """Up to `limit` objects from `start` to before `stop` as they are at a seq, in a bucket that was created then.

    In reverse, those from the end on.
    """
    if limit < 0:
        raise ValueError("limit must not be negative")
    if not 1 <= limit <= LIST_STEPS:
        raise ValueError(f"limit must be from 1 to {LIST_STEPS}")
    if not 0 <= columns <= 3:
        raise ValueError("columns must be from 0 to 3")
    if is_reverse:
        start, stop = stop, start
    if len(start) > _MAX_KEY_BYTES:
        raise ValueError("it begins with more than a key can be")
    kind = _WalkBack if is_reverse else _Walk
    walk = kind(pages, root, start, stop, seq, (created_seq, created_order), limit)
    walk.prefix_bytes, walk.delimiter = prefix_bytes, delimiter
    missing_page = 0
    try:
        is_over = walk.run()
    except tree.MissingError as missing:
        is_over, missing_page = False, missing.page_id
    rows: list[Row] = [
        (key.decode(), cell.size, at_seq, cell.crc, cell.codec, *_place_of(cell)) for key, at_seq, cell in walk.rows
    ]
    plain = [plain_row(row) for row in rows] if columns == 3 else [None]
    if None not in plain:
        return [row for row in plain if row is not None], None if is_over else walk.target, missing_page
    return [row[: (3, 4, 9, 9)[columns]] for row in rows], None if is_over else walk.target, missing_page


def plain_row(row: Row) -> Row | None:
    """The row of a small value with its data; None for any other, and for one that is damaged."""
    _, size, _, crc, codec, *_, stored = row
    if stored is None or codec or stored[:4] != bytes(4) or len(stored) != 4 + size or zlib.crc32(stored) != crc:
        return None
    return *row[:4], stored[4:], {}


def _place_of(cell: Cell) -> tuple[int, int, int, bytes | None]:
    return (0, 0, 0, cell.inline) if cell.inline is not None else (cell.lsn, cell.position, cell.stored_bytes, None)


class _Walk:
    """From key to key by seeking, never version by version. `target` is the least key that is still wanted."""

    def __init__(
        self,
        pages: Pages,
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
        self.rows: list[tuple[bytes, int, Cell]] = []
        self.prefix_bytes = 0
        self.delimiter = b""

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
        leaf, fence = tree.leaf_and_fence(self._pages, self._root, self.target)
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
        leaf = tree.visit(self._pages, self._root, right_of(leaf), 0)
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
        common = self._take(names[1], seq, value_at(page, index))
        if common:
            self.target = names[0] + b"\0" + common[:-1] + bytes((common[-1] + 1,))
        return False

    def _take(self, name: bytes, seq: int, value: bytes) -> bytes:
        """The common prefix that was taken in place of an object; empty for none."""
        cell = decode_cell(value)
        if cell.flags & TOMBSTONE or (seq, cell.order) < self._created:
            return b""
        found = name.find(self.delimiter, self.prefix_bytes) if self.delimiter else -1
        if found < 0:
            self.rows.append((name, seq, cell))
            return b""
        common = name[: found + len(self.delimiter)]
        self.rows.append((common, 0, Cell(POINTER, 0, 0, 0)))
        return common


class _WalkBack(_Walk):
    """From the greatest key to the least. `target` is the least key that is not wanted any more."""

    def _descend(self) -> _Place | None:
        """The last cell before the target in the leaf where it must be; where there is none, it aims before that."""
        leaf, fence = tree.leaf_before(self._pages, self._root, self.target)
        index = self._index_in(leaf)
        if index < 0:
            if fence is None:
                return None
            if fence >= self.target:
                raise damage(leaf, "it does not lie where its parent says")
            self.target = fence
        return leaf, index

    def _further(self, leaf: bytearray) -> _Place | None:
        return leaf, self._index_in(leaf)

    def _index_in(self, leaf: bytearray) -> int:
        return lower_bound(leaf, opened(leaf)[0], self.target) - 1

    def _look(self, page: bytearray, index: int) -> bool:
        key = key_at(page, index)
        if key < self._stop:
            return True
        prefix, names = key[:-SEQ_BYTES], key[:-SEQ_BYTES].split(b"\0")
        if len(key) < _LEAST_KEY_BYTES or key[:1] != OBJECTS or len(names) != 3 or not names[1] or names[2]:
            raise damage(page, f"cell {index} is no version of an object")
        if seq_of(key) <= self._seq:
            found = tree.find(self._pages, self._root, at(prefix, self._seq))
            if isinstance(found, int):
                raise tree.MissingError(found)
            if found is None or found[0][:-SEQ_BYTES] != prefix:
                raise damage(page, "its cells are not in order")
            common = self._take(names[1], seq_of(found[0]), found[1])
            prefix = names[0] + b"\0" + common if common else prefix
        self.target = prefix
        return False
