"""The format of value files: a large value has a file of its own, beside the log and in the store, read by ranges.

    +----------------+----------+----------+------------------------+----------+-----
    | metadata_bytes | metadata | crc32    | data, 256 KiB          | crc32    | ...     little-endian
    | u32            |          | u32      | (the last one less)    | u32      |
    +----------------+----------+----------+------------------------+----------+-----

Without the checksums it is the value as `engine/wal/value.py` has it. Each checksum begins with the number of its block
(0 for the head, 1, 2, ... for blocks of data), so that blocks in another order are detected.

    reference    <seq u64> <order u32> <metadata_bytes u32>    in the record and in the cell, in place of the value
    name         <seq>-<order>-<size>-<crc>.tval               the same on every replica: it follows from the entry

Invariants
- A file never changes: its name stands for its content. Size and checksum in the name are those of the cell.
- Every byte that is returned was verified with the checksum of its block. A value that is read whole has the checksum
  of its cell too.
- Memory is bounded by a few blocks, however large the value is.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple

from tidelog.engine.entry import MAX_METADATA_BYTES, MAX_STREAM_BYTES, packed_metadata
from tidelog.engine.mvcc.cells import MAX_SEQ, Cell
from tidelog.engine.wal.value import LENGTH_BYTES, decode_metadata
from tidelog.errors import CorruptionError, DataError
from tidelog.files import File
from tidelog.log.frame import crc32

BLOCK_BYTES: Final = 256 << 10
PIECE_BYTES: Final = 4 << 20
"""How much is read or written at once, in bytes of the value."""
_CRC = struct.Struct("<I")
_REFERENCE = struct.Struct("<QII")
_STORED_BLOCK_BYTES = BLOCK_BYTES + _CRC.size
_BUFFER_BLOCKS = 8
_NAME = re.compile(r"([0-9]{20})-([0-9]{1,10})-([0-9]{1,10})-([0-9a-f]{8})\.tval")
_HINT = "Put a good copy of the file in its place; an engine with replicas reads theirs"

ReadAt = Callable[[int, int], bytes | memoryview]
"""Reads bytes of a file from a position on: fewer only at its end."""


class ValueName(NamedTuple):
    """What is in the name of a value file: the entry and the operation in it that put it, size of its data, checksum of
    the value.
    """

    seq: int
    order: int
    size: int
    crc: int

    def __str__(self) -> str:
        return f"{self.seq:020d}-{self.order}-{self.size}-{self.crc:08x}.tval"


def parse_value_name(name: str) -> ValueName | None:
    """What a name says; None for one that was not built here."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    found = ValueName(int(match[1]), int(match[2]), int(match[3]), int(match[4], 16))
    return found if found.seq <= MAX_SEQ and str(found) == name else None


class Reference(NamedTuple):
    """Which file has a value, and what is in it."""

    name: ValueName
    metadata_bytes: int

    @property
    def value_bytes(self) -> int:
        return LENGTH_BYTES + self.metadata_bytes + self.name.size

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.byte_of(self.name.size)

    def byte_of(self, offset: int) -> int:
        """Where a block of data begins, or the file ends."""
        head = LENGTH_BYTES + self.metadata_bytes + _CRC.size
        return head + offset + -(-offset // BLOCK_BYTES) * _CRC.size


def encode_reference(reference: Reference) -> bytes:
    """The bytes that a cell has in place of the value."""
    return _REFERENCE.pack(reference.name.seq, reference.name.order, reference.metadata_bytes)


def decode_reference(data: bytes, size: int, crc: int, lsn: int) -> Reference:
    """The reference in a record or a cell, which also has size and checksum; DataError if it is none."""
    if len(data) != _REFERENCE.size:
        raise DataError(f"a reference to a value file has {len(data)} bytes, not {_REFERENCE.size}, LSN {lsn}")
    seq, order, metadata_bytes = _REFERENCE.unpack(data)
    if not seq or metadata_bytes > MAX_METADATA_BYTES or size > MAX_STREAM_BYTES:
        raise DataError(f"a reference to a value file cannot be one: {metadata_bytes} and {size} bytes, LSN {lsn}")
    return Reference(ValueName(seq, order, size, crc), metadata_bytes)


def reference_of(cell: Cell) -> Reference:
    """The reference in a cell with codec CODEC_FILE."""
    return decode_reference(cell.inline or b"", cell.size, cell.crc, cell.lsn)


class ValueWriter:
    """Writes a value into a file, piece by piece. Nothing is synced here."""

    def __init__(self, file: File, metadata: dict[str, Any]) -> None:
        packed = packed_metadata(metadata) if metadata else b""
        self.metadata_bytes = len(packed)
        self.size = 0
        head = struct.pack("<I", len(packed)) + packed
        self.crc = crc32(head)
        self._file = file
        self._blocks = 1
        self._buffer = memoryview(bytearray(_BUFFER_BLOCKS * _STORED_BLOCK_BYTES))
        self._begin = self._end = 0
        """Where in the buffer the last block begins, and how far it is filled."""
        file.write_at(0, head + _CRC.pack(crc32(head, 0)))
        self._position = len(head) + _CRC.size

    @property
    def room(self) -> memoryview:
        """Where the next bytes of the data may be put, before `filled` says how many there are."""
        return self._buffer[self._end : self._begin + BLOCK_BYTES]

    def filled(self, count: int) -> None:
        """So many bytes were put into the room."""
        self.size += count
        self._end += count
        if self._end == self._begin + BLOCK_BYTES:
            self._end_block()
            if self._begin == len(self._buffer):
                self._flush()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Writes the next bytes of the data."""
        view = memoryview(data)
        while len(view):
            room = self.room
            some = view[: len(room)]
            room[: len(some)] = some
            self.filled(len(some))
            view = view[len(some) :]

    def finish(self) -> None:
        """Writes the last blocks."""
        if self._end > self._begin:
            self._end_block()
        if self._begin:
            self._flush()

    def _end_block(self) -> None:
        block = self._buffer[self._begin : self._end]
        if len(block) == BLOCK_BYTES:
            # Both checksums by one look at it: what they begin with moves through a block in the same way.
            crc, moved = crc32(block), _moved_by(BLOCK_BYTES)
            self.crc, own = crc ^ moved(self.crc), crc ^ moved(self._blocks)
        else:
            self.crc, own = crc32(block, self.crc), crc32(block, self._blocks)
        self._buffer[self._end : self._end + _CRC.size] = _CRC.pack(own)
        self._blocks += 1
        self._begin = self._end = self._end + _CRC.size

    def _flush(self) -> None:
        self._file.write_at(self._position, self._buffer[: self._begin])
        self._position += self._begin
        self._begin = self._end = 0


@lru_cache(4)
def _moved_by(size: int) -> Callable[[int], int]:
    """How a checksum that a piece of this size is added to takes part in the sum: `crc32(piece, crc)` is
    `crc32(piece) ^ moved(crc)`, whatever the piece is.
    """
    zeros = bytes(size)
    nothing = crc32(zeros)
    bits = [crc32(zeros, 1 << bit) ^ nothing for bit in range(32)]

    def moved(crc: int) -> int:
        found = 0
        for bit in range(crc.bit_length()):
            if crc >> bit & 1:
                found ^= bits[bit]
        return found

    return moved


class ValueReader:
    """Reads a value from its file. `path` is for errors."""

    def __init__(self, reference: Reference, read_at: ReadAt, path: str) -> None:
        self.reference = reference
        self._read_at = read_at
        self._path = path

    def data(self, offset: int, length: int) -> bytes:
        """Bytes of the data, as far as there are any."""
        return b"".join(self.pieces(offset, length))

    def pieces(self, offset: int, length: int) -> list[memoryview]:
        """The same as it was read, without a copy."""
        stop = min(offset + length, self.reference.name.size)
        return list(self._pieces(offset, stop)) if offset < stop else []

    def metadata(self) -> dict[str, Any]:
        """The metadata, without a request for an object that has none."""
        return decode_metadata(self._head(), 0) if self.reference.metadata_bytes else {}

    def value(self) -> bytes:
        """All of it, metadata included."""
        return b"".join(self.verified())

    def verified(self) -> Iterator[memoryview]:
        """The whole value in pieces; the checksum of all of it is checked behind the last."""
        crc = 0
        for piece in chain((self._head(),), self._pieces(0, self.reference.name.size)):
            crc = crc32(piece, crc)
            yield piece
        if crc != self.reference.name.crc:
            raise self._damage(0, "the checksum of the value does not match")

    def _head(self) -> memoryview:
        head_bytes = self.reference.byte_of(0)
        return self._checked(self._read(0, head_bytes), 0, 0)

    def _pieces(self, begin: int, stop: int) -> Iterator[memoryview]:
        """Bytes of the data, verified."""
        reference, at = self.reference, begin // BLOCK_BYTES * BLOCK_BYTES
        while at < stop:
            end = min(at + PIECE_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES, reference.name.size)
            position = reference.byte_of(at)
            stored = self._read(position, reference.byte_of(end) - position)
            for low in range(at, end, BLOCK_BYTES):
                byte = reference.byte_of(low) - position
                block = stored[byte : byte + BLOCK_BYTES + _CRC.size]
                yield self._checked(block, low // BLOCK_BYTES + 1, position + byte)[max(0, begin - low) : stop - low]
            at = end

    def _read(self, position: int, length: int) -> memoryview:
        stored = memoryview(self._read_at(position, length))
        if len(stored) != length:
            raise self._damage(position + len(stored), f"it ends there, expected {self.reference.file_bytes} bytes")
        return stored

    def _checked(self, stored: memoryview, number: int, byte: int) -> memoryview:
        """A block without its checksum."""
        block = stored[: -_CRC.size]
        if crc32(block, number) != _CRC.unpack(stored[-_CRC.size :])[0]:
            raise self._damage(byte, f"the checksum of block {number} does not match")
        return block

    def _damage(self, byte: int, reason: str) -> CorruptionError:
        return CorruptionError(reason, path=self._path, byte=byte, operation="read", hint=_HINT)


def check_value_file(name: ValueName, file_bytes: int, read_at: ReadAt, path: str) -> Iterator[memoryview]:
    """Yields the bytes of a whole file, as it is stored, and verifies them: for copies and for verification, which know
    its name alone. CorruptionError behind the last good bytes.
    """
    reference = Reference(name, file_bytes - Reference(name, 0).file_bytes)
    if not 0 <= reference.metadata_bytes <= MAX_METADATA_BYTES:
        raise CorruptionError(f"{file_bytes} bytes cannot hold a value of {name.size}", path=path, byte=0, hint=_HINT)
    seen: list[bytes | memoryview] = []

    def read(position: int, length: int) -> bytes | memoryview:
        data = read_at(position, length)
        seen.append(data)
        return data

    for _ in ValueReader(reference, read, path).verified():
        while len(seen) > 1:  # those before the newest are verified
            yield memoryview(seen.pop(0))
    for data in seen:
        yield memoryview(data)
