"""Row files: rows in order of key, many in one object, found by key with one request. Indexes and states have them.

    "TROW" u32 version | block ... block | footer: msgpack | footer bytes u32, crc32 of the footer u32, "TROWEND1"

Blocks are those of `cell_blocks`, of about 64 KiB before they are compressed. The footer says what the rows are, how
many there are, their digest (BLAKE2b, 32 bytes, over all blocks before they were compressed), and of every block its
place, its number of rows and its first and last key.

Invariants
- The same rows give the same bytes. There is no row file without rows.
- The footer is read once and kept; then a key costs one request, of one block.
- What is read is compared with the part that names the file, and with the footer. Damage is named with its byte. Rows
  that were read to the end of the file are those that were written.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, TypeVar

import msgspec

from tidelog.engine.block_cache import BlockCache
from tidelog.engine.cell_blocks import HEADER_BYTES, Row, block_bytes, count_of, decode_block, encode_blocks, rows_in
from tidelog.engine.rows import check_rows, find_row
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.log.frame import crc32
from tidelog.tier.compacted_names import digest_of

MAGIC = b"TROW"
END_MAGIC = b"TROWEND1"
VERSION = 1
TARGET_BLOCK_BYTES = 64 << 10
MAX_FOOTER_BYTES = 64 << 20
_RANGE_BYTES = 4 << 20
_TAIL_GUESS_BYTES = 64 << 10
_DIGEST_BYTES = 32
_DIGEST_DIGITS = 2 * _DIGEST_BYTES

_HEAD = struct.Struct("<4sI")
_TAIL = struct.Struct("<II8s")
_HINT = "Put a good copy of the file in its place; a replica has one"

RowKind = Literal["versions", "bodies"]
Result = TypeVar("Result")


class ByteSource(Protocol):
    """What a row file is read from: any object store."""

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Up to `length` bytes from `start` on."""


class RowPart(msgspec.Struct, frozen=True, kw_only=True):
    """A row file as roots and states name it. `digest` is that of its rows; that of its bytes is in its key."""

    key: str
    size: int
    rows: int
    digest: str
    first_key: bytes
    last_key: bytes


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a block is, and what it holds."""

    byte: int
    size: int
    rows: int
    first_key: bytes
    last_key: bytes


class RowFooter(msgspec.Struct, frozen=True, kw_only=True):
    """What a row file says about itself."""

    kind: RowKind
    rows: int
    digest: str
    blocks: tuple[BlockPlace, ...]


class RowBlock(NamedTuple):
    """A block of a file: as it is stored, and what is in it."""

    place: BlockPlace
    data: memoryview
    raw: bytes


class EncodedRowFile(NamedTuple):
    """A row file in bytes. `digest` goes into its name, `rows_digest` into its part."""

    data: bytes
    digest: str
    rows: int
    rows_digest: str
    first_key: bytes
    last_key: bytes

    def part(self, key: str) -> RowPart:
        """How it is to be named, once it is there."""
        return RowPart(
            key=key,
            size=len(self.data),
            rows=self.rows,
            digest=self.rows_digest,
            first_key=self.first_key,
            last_key=self.last_key,
        )


def encode_row_file(kind: RowKind, rows: Iterable[Row], level: int = 3) -> EncodedRowFile:
    """Rows in order of key, at least one, as a file."""
    digest, places = hashlib.blake2b(digest_size=_DIGEST_BYTES), list[BlockPlace]()
    written, byte = [_HEAD.pack(MAGIC, VERSION)], _HEAD.size
    for block in encode_blocks(_in_order(rows), level, TARGET_BLOCK_BYTES):
        digest.update(block.raw)
        places.append(BlockPlace(byte, len(block.data), block.count, block.first_key, block.last_key))
        written.append(block.data)
        byte += len(block.data)
    if not places:
        raise InputError("a row file has at least one row")
    count = sum(place.rows for place in places)
    footer = RowFooter(kind=kind, rows=count, digest=digest.hexdigest(), blocks=tuple(places))
    encoded = msgspec.msgpack.encode(footer)
    data = b"".join((*written, encoded, _TAIL.pack(len(encoded), crc32(encoded), END_MAGIC)))
    return EncodedRowFile(data, digest_of(data), count, footer.digest, places[0].first_key, places[-1].last_key)


def _in_order(rows: Iterable[Row]) -> Iterator[Row]:
    last_key = b""
    for row in rows:
        if row[0] <= last_key:
            raise InputError("rows of a file are not in order, or a key comes twice")
        last_key = row[0]
        yield row


class RowFile:
    """A row file in a store. Threads may share it."""

    def __init__(
        self, objects: ByteSource, part: RowPart, *, kind: RowKind | None = None, cache: BlockCache | None = None
    ) -> None:
        self._objects = objects
        self._kind = kind
        self._cache = cache
        self._footer: RowFooter | None = None
        self._last_keys: list[bytes] = []
        self.part = part

    @property
    def footer(self) -> RowFooter:
        """What the file says about itself: read at the first call, and kept."""
        if self._footer is None:
            footer = self._checked(0, self._read_footer)
            self._last_keys = [place.last_key for place in footer.blocks]
            self._footer = footer
        return self._footer

    def at_or_after(self, key: bytes) -> Row | None:
        """The first row that is not before a key; None behind the last one."""
        blocks = self.footer.blocks
        index = bisect_left(self._last_keys, key)
        if index == len(blocks):
            return None
        return find_row(self._raw(blocks[index]), key)

    def in_block(self, key: bytes) -> Iterator[Row]:
        """The rows from a key on, as far as one block goes: the one that the key is in."""
        blocks = self.footer.blocks
        index = bisect_left(self._last_keys, key)
        if index < len(blocks):
            rows = rows_in(self._raw(blocks[index]), blocks[index].rows, b"")
            yield from (row for row in rows if row[0] >= key)

    def rows(self, start: bytes = b"", stop: bytes | None = None) -> Iterator[Row]:
        """Rows in order, from a key on and up to another. All of them are compared with the digest."""
        if not start and stop is None:
            for block in self.blocks():
                yield from rows_in(block.raw, block.place.rows, b"")
            return
        blocks = self.footer.blocks
        first = bisect_left(self._last_keys, start)
        wanted = [place for place in blocks[first:] if stop is None or place.first_key < stop]
        for place, data in self._fetched(wanted):
            for row in rows_in(self._decoded(place, data, b""), place.rows, b""):
                if row[0] >= start and (stop is None or row[0] < stop):
                    yield row

    def blocks(self) -> Iterator[RowBlock]:
        """All blocks, decoded and checked. Whoever has seen the last of them has seen what was written."""
        digest, last_key = hashlib.blake2b(digest_size=_DIGEST_BYTES), b""
        for place, data in self._fetched(list(self.footer.blocks)):
            raw = self._decoded(place, data, last_key)
            digest.update(raw)
            last_key = place.last_key
            yield RowBlock(place, data, raw)
        if digest.hexdigest() != self.part.digest:
            raise self._damage(0, "a row file with a digest that does not match")

    # Blocks

    def _raw(self, place: BlockPlace) -> bytes:
        """One block, decoded and checked; from memory where it is."""
        name = self.part.key, place.byte
        raw = None if self._cache is None else self._cache.get(name)
        if raw is None:
            ((_, block),) = self._fetched([place])
            raw = self._decoded(place, block, b"")
            if self._cache is not None:
                self._cache.add(name, raw)
        return raw

    def _decoded(self, place: BlockPlace, block: memoryview, after_key: bytes) -> bytes:
        """What is in a block, whose rows are those that the footer tells of."""
        raw = self._checked(place.byte, partial(decode_block, block))
        has_places = self.footer.kind == "versions"
        last_key = self._checked(place.byte, partial(check_rows, raw, place.rows, after_key, has_places))
        first = find_row(raw, b"")
        if first is None or first[0] != place.first_key or last_key != place.last_key:
            raise self._damage(place.byte, "a block that does not begin or end with the key that it must")
        return raw

    def _fetched(self, places: list[BlockPlace]) -> Iterator[tuple[BlockPlace, memoryview]]:
        """Several blocks come with one request."""
        waiting: list[BlockPlace] = []
        for place in places:
            if waiting and place.byte + place.size - waiting[0].byte > _RANGE_BYTES:
                yield from self._fetched_together(waiting)
                waiting = []
            waiting.append(place)
        if waiting:
            yield from self._fetched_together(waiting)

    def _fetched_together(self, places: list[BlockPlace]) -> Iterator[tuple[BlockPlace, memoryview]]:
        first, last = places[0].byte, places[-1]
        start = 0 if first == _HEAD.size else first
        data = self._objects.read_range(self.part.key, start, last.byte + last.size - start)
        if not start and data[: _HEAD.size] != _HEAD.pack(MAGIC, VERSION):
            raise self._damage(0, f"not the beginning of a row file of version {VERSION}")
        for place in places:
            block = data[place.byte - start : place.byte - start + place.size]
            if self._checked(place.byte, partial(block_bytes, block)) != place.size or count_of(block) != place.rows:
                raise self._damage(place.byte, "a block of another size than it must have")
            yield place, block

    # The footer

    def _read_footer(self) -> RowFooter:
        size = self.part.size
        if size < _HEAD.size + _TAIL.size:
            raise DataError(f"a row file of {size} bytes is none")
        guess = min(size, _TAIL_GUESS_BYTES)
        tail = self._objects.read_range(self.part.key, size - guess, guess + 1)
        if len(tail) != guess:
            raise DataError(f"a row file that has not the {size} bytes that it must have")
        length, crc, magic = _TAIL.unpack_from(tail, guess - _TAIL.size)
        begin = size - _TAIL.size - length
        if magic != END_MAGIC or length > MAX_FOOTER_BYTES or begin < _HEAD.size:
            raise DataError("not the end of a row file")
        data = bytes(self._footer_bytes(tail, begin, length))
        if len(data) != length or crc32(data) != crc:
            raise DataError("a footer with a checksum that does not match")
        return _checked_footer(data, self.part, begin, self._kind)

    def _footer_bytes(self, tail: memoryview, begin: int, length: int) -> memoryview:
        at = begin - (self.part.size - len(tail))
        return tail[at : at + length] if at >= 0 else self._objects.read_range(self.part.key, begin, length)

    def _checked(self, byte: int, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except CorruptionError:
            raise
        except DataError as error:
            raise self._damage(byte, error.message) from error

    def _damage(self, byte: int, message: str) -> CorruptionError:
        return CorruptionError(message, path=self.part.key, byte=byte, operation="read", hint=_HINT)


def _checked_footer(data: bytes, part: RowPart, end: int, kind: RowKind | None) -> RowFooter:
    try:
        footer = msgspec.msgpack.decode(data, type=RowFooter)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"a footer that cannot be understood: {error}") from error
    blocks = footer.blocks
    if not blocks or kind not in (None, footer.kind):
        raise DataError(f"a footer of {len(blocks)} blocks of {footer.kind}, where {kind} must be")
    said = (footer.rows, footer.digest, blocks[0].first_key, blocks[-1].last_key)
    if said != (part.rows, part.digest, part.first_key, part.last_key):
        raise DataError("a footer that says something else than what names the file")
    byte = _HEAD.size
    for place in blocks:
        if place.byte != byte or place.size <= HEADER_BYTES or place.rows <= 0 or place.first_key > place.last_key:
            raise DataError("a footer whose blocks do not follow each other")
        byte += place.size
    if byte != end or sum(place.rows for place in blocks) != footer.rows:
        raise DataError("a footer whose blocks do not add up")
    if any(a.last_key >= b.first_key for a, b in pairwise(blocks)):
        raise DataError("a footer whose blocks are not in order of key")
    return footer


class _InMemory:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        return self._data[start : start + length]


def opened_in_memory(data: bytes, part: RowPart, kind: RowKind | None = None) -> RowFile:
    """A whole file that is in memory already, and is the one that its name tells."""
    if digest_of(data) not in part.key:
        raise CorruptionError("not the bytes that its name tells", path=part.key, byte=0, operation="read", hint=_HINT)
    return RowFile(_InMemory(data), part, kind=kind)
