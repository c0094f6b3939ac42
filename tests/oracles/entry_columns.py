"""The oracle of records as columns: `native/entries.c` gives the same answers, faster.

Invariants
- Bytes are hostile: nothing is read that was not checked to lie inside of its record; what cannot be an operation
  raises DataError with its LSN.
- No object a row comes out: columns are arrays, little-endian, and strings are ends (i32, one more than rows) and
  bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from tests.oracles.frames import byte_view, crc32, places

from tidelog.engine.wal.record_header import (
    HEADER_BYTES,
    LAST,
    OPERATION,
    REFUSED,
    ROLLBACK_END,
    VACUUM,
    OperationHead,
    decode_operation_head,
)
from tidelog.engine.wal.replay import (
    COUNTS,
    NEVER_COMPLETE,
    STILL_OPEN,
    WANT_METADATA,
    WANT_NAMES,
    WANT_REASONS,
    WANT_SOURCES,
    WANT_VALUES,
)
from tidelog.errors import DataError
from tidelog.log.frame import Buffer
from tidelog.pipeline.source.entry_batches import as_text

_LENGTH = struct.Struct("<I")
_PUT_OBJECT = 4
_CODEC_FILE = 2
# Which names each op has besides its bucket: key, src_bucket, src_key.
_NAMES = {
    1: (False, False, False),
    2: (False, False, False),
    3: (False, False, False),
    4: (True, False, False),
    5: (True, False, False),
    6: (True, True, True),
}

Selected = tuple[int, bytes, bytes, int, bool]
Gathered = tuple[int, int, int, tuple[bytes, ...], tuple[bytes, ...]]


def select_entries(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    stop: int,
    owned_stop: int,
    dead: Buffer,
    first_seq: int,
    last_seq: int,
    open_seq: int,
    removals: bool,
    /,
) -> Selected:
    """Which records of operations count, of those at `start` to `stop` (exclusive).

    (fate of what was open before, indexes that count, indexes of an entry that is open at the end, its seq or 0,
    whether the first entry that begins at or behind `owned_stop` was met). `dead` are pairs of LSNs, in order: ranges
    that were rolled back. An entry counts when its last record is there and its seq is between the two. With
    `removals` records of retention count too, rolled back or not. The end of a rollback that is in no range says that
    ranges were forgotten: DataError.
    """
    view, ranges = byte_view(buffer), _DeadRanges(dead)
    selection = _Selection(owned_stop, first_seq, last_seq, open_seq)
    met_next = False
    for index, position, length in places(view, positions, lengths, start, stop):
        lsn = first_lsn + index
        kind = view[position] if length else 0
        if kind != OPERATION and length < HEADER_BYTES:
            raise DataError(f"a record of {length} bytes has no header, LSN {lsn}")
        if removals and kind == VACUUM and index < owned_stop:
            selection.chosen.append(index)
        if kind == ROLLBACK_END and index < owned_stop and not ranges.has(lsn):
            raise DataError(f"what was rolled back before LSN {lsn} is no longer known")
        if kind == OPERATION and not ranges.has(lsn):
            head = decode_operation_head(view[position : position + length], lsn)
            met_next = selection.look_at(index, head.flags, head.seq, head.previous_lsn)
        if met_next:
            break
    chosen, pending = selection.chosen.tobytes(), selection.pending.tobytes()
    return selection.fate, chosen, pending, selection.open_seq, met_next


class _DeadRanges:
    """Ranges of LSNs that were rolled back, asked about LSNs that grow."""

    def __init__(self, dead: Buffer) -> None:
        self._numbers = memoryview(dead).cast("B").cast("Q")
        self._at = 0

    def has(self, lsn: int) -> bool:
        while self._at < len(self._numbers) and self._numbers[self._at + 1] < lsn:
            self._at += 2
        return self._at < len(self._numbers) and self._numbers[self._at] <= lsn


class _Selection:
    """What is known while records are looked at."""

    def __init__(self, owned_stop: int, first_seq: int, last_seq: int, open_seq: int) -> None:
        self.fate = STILL_OPEN
        self.chosen, self.pending = array("I"), array("I")
        self.open_seq = open_seq
        self._owned_stop = owned_stop
        self._seqs = range(first_seq, last_seq + 1)

    def look_at(self, index: int, flags: int, seq: int, previous_lsn: int) -> bool:
        """One operation; whether it begins an entry that is not ours, and so ends what is."""
        if not previous_lsn or seq != self.open_seq:
            self._settle(NEVER_COMPLETE)
            if index >= self._owned_stop:
                return True
            if previous_lsn:
                return False  # the entry began before the first record here: it is somebody else's
        if seq in self._seqs:
            self.pending.append(index)
        if flags & LAST:
            self.chosen.extend(self.pending)
            self._settle(COUNTS)
        else:
            self.open_seq = seq
        return False

    def _settle(self, fate: int) -> None:
        if self.fate == STILL_OPEN and self.open_seq:
            self.fate = fate
        self.pending, self.open_seq = array("I"), 0


class _Strings:
    """A column of bytes on its way."""

    def __init__(self) -> None:
        self.ends = array("i", [0])
        self.data = bytearray()

    def add(self, text: Buffer) -> None:
        self.data += text
        self.ends.append(len(self.data))


def gather_entries(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    indexes: Buffer,
    start: int,
    wanted: int,
    max_rows: int,
    max_bytes: int,
    /,
) -> Gathered:
    """Columns of the operations at `indexes[start:]`, as many as the limits allow, but one at least.

    (rows, where in `indexes` to go on, rows with a compressed value, numbers, strings). Numbers are seq, lsn, time,
    size (i64), crc (u32), order (i32), op, flags, codec (u8); strings are bucket, key, src_bucket, src_key, reason,
    metadata, value, each as ends and bytes. Those that are not wanted are empty, and so are metadata and value of a
    compressed value.
    """
    view = byte_view(buffer)
    wide = [array("q") for _ in range(4)]
    crcs, orders, codes = array("I"), array("i"), [bytearray() for _ in range(3)]
    strings = [_Strings() for _ in range(7)]
    count = compressed = 0
    for index in memoryview(indexes).cast("B").cast("I")[start:]:
        if count >= max_rows or (count and sum(len(one.data) for one in strings) >= max_bytes):
            break
        lsn = first_lsn + index
        _, position, length = next(places(view, positions, lengths, index))
        record = view[position : position + length]
        head = _checked(record, lsn)
        for column, number in zip(wide, (head.seq, lsn, head.time_us, head.size), strict=True):
            column.append(_signed(number))
        crcs.append(head.crc)
        orders.append(_signed_32(head.order))
        for code, number in zip(codes, (head.op, head.flags, head.codec), strict=True):
            code.append(number)
        for text, one in zip(_texts(record, head, wanted), strings, strict=False):
            one.add(text)
        metadata, value = _value(record, head, lsn, wanted) if head.stored_bytes and not head.codec else (b"", b"")
        strings[5].add(metadata)
        strings[6].add(value)
        compressed += bool(head.stored_bytes and head.codec)
        count += 1
    numbers = tuple(bytes(column) for column in (*wide, crcs, orders, *codes))
    texts = tuple(part for one in strings for part in (one.ends.tobytes(), bytes(one.data)))
    return count, start + count, compressed, numbers, texts


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _signed_32(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _checked(record: memoryview, lsn: int) -> OperationHead:
    head = decode_operation_head(record, lsn)
    bucket, *names, _ = head.lengths
    has_value = head.op == _PUT_OBJECT and not head.flags & REFUSED
    has_names = head.op in _NAMES and _NAMES[head.op] == tuple(map(bool, names)) and bool(bucket)
    if not has_names or not head.seq or head.codec > _CODEC_FILE or bool(head.stored_bytes) != has_value:
        raise DataError(f"a record that cannot be an operation, LSN {lsn}")
    return head


def _texts(record: memoryview, head: OperationHead, wanted: int) -> Iterator[memoryview]:
    start = head.names_offset
    asked = (WANT_NAMES, WANT_NAMES, WANT_SOURCES, WANT_SOURCES, WANT_REASONS)
    for length, flag in zip(head.lengths, asked, strict=True):
        yield record[start : start + (length if wanted & flag else 0)]
        start += length


def _value(record: memoryview, head: OperationHead, lsn: int, wanted: int) -> tuple[Buffer, Buffer]:
    """Metadata and data of a value that is stored as it is; nobody looks at it who wants neither."""
    if not wanted & (WANT_METADATA | WANT_VALUES):
        return b"", b""
    size, value = head.size, record[head.value_offset : head.updates_offset]
    if crc32(value) != head.crc:
        raise DataError(f"the checksum of the object's value does not match, LSN {lsn}")
    metadata_bytes = _LENGTH.unpack_from(value)[0] if len(value) >= _LENGTH.size else 0
    if len(value) != _LENGTH.size + metadata_bytes + size:
        raise DataError(f"a value of {len(value)} bytes cannot hold {metadata_bytes} and {size} bytes, LSN {lsn}")
    start = _LENGTH.size + metadata_bytes
    return (
        value[_LENGTH.size : start] if wanted & WANT_METADATA else b"",
        value[start:] if wanted & WANT_VALUES else b"",
    )


def metadata_columns(ends: bytes, data: bytes) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes] | None:
    """(ends, name ends, names, value ends, values, a byte a value: 0 for null); None where only a decoder helps."""
    if len(ends) < 4 or len(ends) % 4:
        raise ValueError("ends are not an array of one more than the rows")
    bounds, counts = memoryview(ends).cast("I"), [0]
    names, values = list[bytes](), list[str | None]()
    for start, end in pairwise(bounds):
        if start > end or end > len(data):
            raise ValueError("a row lies outside of its column")
        found = _plain_map(data[start:end])
        if found is None:
            return None
        names += found
        values += [None if value is None else as_text(value) for value in found.values()]
        counts.append(len(names))
    texts = [(value or "").encode() for value in values]
    return (
        array("I", counts).tobytes(),
        array("I", accumulate(map(len, names), initial=0)).tobytes(),
        b"".join(names),
        array("I", accumulate(map(len, texts), initial=0)).tobytes(),
        b"".join(texts),
        bytes(value is not None for value in values),
    )


def _plain_map(packed: bytes) -> dict[bytes, Any] | None:
    """A map whose names are text in strict order, and its values nothing that has a fraction or parts."""
    if not packed:
        return {}
    try:
        found = msgspec.msgpack.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        return None
    said = {0xDE: packed[1:3], 0xDF: packed[1:5]}.get(packed[0], bytes([packed[0] & 15]))
    named = {name.encode(): value for name, value in found.items()}
    is_plain = all(value is None or type(value) in (str, bool, int, bytes) for value in named.values())
    return named if is_plain and list(named) == sorted(named) and int.from_bytes(said, "big") == len(named) else None
