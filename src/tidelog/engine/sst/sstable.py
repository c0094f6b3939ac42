"""Sorted files (SSTables): rows in key order in one object; a lookup costs one range request. The version index, the
value index and snapshots are made of them.

    "TROW" u32 version | block ... block | footer: msgpack | footer bytes u32, crc32 of the footer u32, "TROWEND1"

Blocks have the format of `block.py`, about 64 KiB before compression. The footer holds the kind of rows, their number,
their digest (BLAKE2b, 32 bytes, over all blocks before compression), and for each block its location, its number of
rows and its first and last key.

The module also reads a sequence of sorted files from beginning to end (`open_parts`), prefetching several at a time.

Invariants
- The same rows produce the same bytes. A sorted file is never empty.
- The footer is read once and cached; after that a key lookup costs one request for one block.
- Everything read is verified against the part that names the file and against the footer. Errors name the corrupted
  byte. A scan that reaches the end of the file has returned exactly the rows that were written.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import pairwise
from operator import attrgetter
from threading import Lock
from typing import Literal, NamedTuple

import msgspec

from tidelog._native import check_rows, find_row
from tidelog.cold.fetch import ByteSource, ColdCache, coalesced, fetch_many
from tidelog.engine.sst.block import (
    HEADER_BYTES,
    PackedRows,
    Row,
    block_bytes,
    count_of,
    decode_block,
    encode_packed_blocks,
    pack_rows,
    rows_in,
)
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.log.frame import crc32
from tidelog.store.keys import digest_of

# Row operations on encoded blocks in C, without a Python object per row (`native/rows.h`).
#
#     check_rows(raw, count, after_key, has_places)          the last key; DataError when they are not sound
#     find_row(raw, key)                                     the first row that is not before a key
#     merge_rows(sources, drops_removed)                     several blocks as one, as far as the shortest of them goes
#     fill_page(page, raw, at, reserved_bytes, lsn)          rows into a page of the tree
#
# `has_places` says that the values are those of the version index (cell and value pointer): then only the cells are
# used.


Source = tuple[bytes, int, bool]
"""Rows, where the next one is, and whether they have places."""

MAGIC = b"TROW"
END_MAGIC = b"TROWEND1"
VERSION = 1
TARGET_BLOCK_BYTES = 64 << 10
MAX_FOOTER_BYTES = 64 << 20
_RANGE_BYTES = 4 << 20
_TAIL_GUESS_BYTES = 64 << 10
_MOST_AHEAD = 32
_DIGEST_BYTES = 32

_HEAD = struct.Struct("<4sI")
_TAIL = struct.Struct("<II8s")
_HINT = "Put a good copy of the file in its place; a replica has one"

RowKind = Literal["versions", "values"]


class RowPart(msgspec.Struct, frozen=True, kw_only=True):
    """A sorted file as compaction roots and snapshots name it. `digest` covers its rows; the digest of its bytes is in
    its key.
    """

    key: str
    size: int
    rows: int
    digest: str
    first_key: bytes
    last_key: bytes


class BlockHandle(msgspec.Struct, frozen=True, array_like=True):
    """The location of a block, its number of rows and its key range."""

    byte: int
    size: int
    rows: int
    first_key: bytes
    last_key: bytes


class SSTableFooter(msgspec.Struct, frozen=True, kw_only=True):
    """The decoded footer of a sorted file."""

    kind: RowKind
    rows: int
    digest: str
    blocks: tuple[BlockHandle, ...]


class RowBlock(NamedTuple):
    """A block of a file: its stored bytes and its decoded rows."""

    place: BlockHandle
    data: memoryview
    raw: bytes


class EncodedSSTable(NamedTuple):
    """An encoded sorted file. `digest` goes into its name, `rows_digest` into its part."""

    data: bytes
    digest: str
    rows: int
    rows_digest: str
    first_key: bytes
    last_key: bytes

    def part(self, key: str) -> RowPart:
        """Returns the part that names this file once it is uploaded."""
        return RowPart(
            key=key,
            size=len(self.data),
            rows=self.rows,
            digest=self.rows_digest,
            first_key=self.first_key,
            last_key=self.last_key,
        )


def encode_sstable(kind: RowKind, rows: Iterable[Row], level: int = 3) -> EncodedSSTable:
    """Encodes rows, in key order and at least one, as a file."""
    return encode_packed(kind, pack_rows(_in_order(rows), TARGET_BLOCK_BYTES), level)


def encode_packed(kind: RowKind, blocks: Iterable[PackedRows], level: int = 3) -> EncodedSSTable:
    """Encodes rows that are packed into blocks already, in key order, as a file."""
    digest, places = hashlib.blake2b(digest_size=_DIGEST_BYTES), list[BlockHandle]()
    written, byte = [_HEAD.pack(MAGIC, VERSION)], _HEAD.size
    for block in encode_packed_blocks(blocks, level):
        digest.update(block.raw)
        places.append(BlockHandle(byte, len(block.data), block.count, block.first_key, block.last_key))
        written.append(block.data)
        byte += len(block.data)
    if not places:
        raise InputError("a row file has at least one row")
    count = sum(place.rows for place in places)
    footer = SSTableFooter(kind=kind, rows=count, digest=digest.hexdigest(), blocks=tuple(places))
    encoded = msgspec.msgpack.encode(footer)
    data = b"".join((*written, encoded, _TAIL.pack(len(encoded), crc32(encoded), END_MAGIC)))
    return EncodedSSTable(data, digest_of(data), count, footer.digest, places[0].first_key, places[-1].last_key)


def _in_order(rows: Iterable[Row]) -> Iterator[Row]:
    last_key = b""
    for row in rows:
        if row[0] <= last_key:
            raise InputError("rows of a file are not in order, or a key comes twice")
        last_key = row[0]
        yield row


class SSTable:
    """A sorted file in a store. Thread-safe."""

    def __init__(
        self, objects: ByteSource, part: RowPart, *, kind: RowKind | None = None, cache: ColdCache | None = None
    ) -> None:
        self._objects = objects
        self._kind = kind
        self._cache = cache
        self._footer: SSTableFooter | None = None
        self._last_keys: list[bytes] = []
        self._warming = Lock()
        self.part = part

    @property
    def footer(self) -> SSTableFooter:
        """The footer, read at the first call and then cached."""
        if self._footer is None:
            try:
                footer = self._read_footer()
            except DataError as error:
                raise _damage(self.part.key, 0, error.message) from error
            self._last_keys = [place.last_key for place in footer.blocks]
            self._footer = footer
        return self._footer

    def at_or_after(self, key: bytes) -> Row | None:
        blocks = self.footer.blocks
        index = bisect_left(self._last_keys, key)
        if index == len(blocks):
            return None
        return find_row(self._raw(blocks[index]), key)

    def warm(self, low: bytes, high: bytes, *, ahead: int = 0) -> None:
        """Fetches the blocks between two keys, both included, that are not cached, several with one request.

        If there are such, `ahead` times as many behind them come too: who goes on there, or waits for these here, has
        them then.
        """
        cache, blocks = self._cache, self.footer.blocks
        begin, end = bisect_left(self._last_keys, low), bisect_left(self._last_keys, high) + 1
        if cache is None or len(blocks[begin:end]) < 2:
            return
        with self._warming:
            if all(cache.get_block(self.part.key, one.byte) is not None for one in blocks[begin:end]):
                return
            wanted = blocks[begin : end + min(ahead * (end - begin), _MOST_AHEAD)]
            missing = [one for one in wanted if cache.get_block(self.part.key, one.byte) is None]
            for block in read_row_blocks(self._objects, self.part.key, missing, self.footer.kind):
                cache.add(block.place.byte, block.raw, self.part.key)

    def raw_blocks(self, low: bytes, high: bytes) -> Iterator[bytes]:
        """Yields the blocks between two keys, both included, from the cache or one by one."""
        blocks = self.footer.blocks
        for place in blocks[bisect_left(self._last_keys, low) : bisect_left(self._last_keys, high) + 1]:
            yield self._raw(place)

    def in_block(self, key: bytes) -> Iterator[Row]:
        """Yields the rows at or after a key, up to the end of the block that the key is in."""
        blocks = self.footer.blocks
        index = bisect_left(self._last_keys, key)
        if index < len(blocks):
            rows = rows_in(self._raw(blocks[index]), blocks[index].rows, b"")
            yield from (row for row in rows if row[0] >= key)

    def rows(self, start: bytes = b"", stop: bytes | None = None) -> Iterator[Row]:
        """Yields rows in order, from one key up to another. A full scan is verified against the digest."""
        if not start and stop is None:
            for block in self.blocks():
                yield from rows_in(block.raw, block.place.rows, b"")
            return
        blocks = self.footer.blocks
        first = bisect_left(self._last_keys, start)
        wanted = [place for place in blocks[first:] if stop is None or place.first_key < stop]
        for block in read_row_blocks(self._objects, self.part.key, wanted, self.footer.kind):
            for row in rows_in(block.raw, block.place.rows, b""):
                if row[0] >= start and (stop is None or row[0] < stop):
                    yield row

    def blocks(self) -> Iterator[RowBlock]:
        """Yields all blocks, decoded and verified. A caller that consumes the last one has seen exactly what was
        written.
        """
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for block in read_row_blocks(self._objects, self.part.key, self.footer.blocks, self.footer.kind):
            digest.update(block.raw)
            yield block
        if digest.hexdigest() != self.part.digest:
            raise _damage(self.part.key, 0, "row file digest does not match")

    def blocks_between(
        self, low: bytes, high: bytes, together: Iterator[int], fetchers: Executor | None = None
    ) -> Iterator[tuple[bytes, int]]:
        """Yields the blocks that may have rows between two keys, decoded and verified, with their number of rows.

        `together` says how many come with each request. Single ones are cached. With `fetchers`, the next ones are
        fetched while some that came together are read.
        """
        blocks = self.footer.blocks
        end = bisect_left(blocks, high, key=attrgetter("first_key"))
        begin = bisect_left(self._last_keys, low)
        ahead: tuple[Sequence[BlockHandle], Future[list[RowBlock]] | None] | None = None
        try:
            while begin < end:
                some, wanted = ahead or (blocks[begin : min(end, begin + next(together))], None)
                begin, ahead = begin + len(some), None
                if len(some) == 1 and wanted is None:
                    yield self._raw(some[0]), some[0].rows
                    continue
                # One that no thread has begun is not waited for.
                found = self._read(some) if wanted is None or wanted.cancel() else wanted.result()
                if begin < end and fetchers is not None:
                    following = blocks[begin : min(end, begin + next(together))]
                    ahead = following, None
                    with contextlib.suppress(RuntimeError):  # closed: nobody reads on
                        ahead = following, fetchers.submit(self._read, following)
                yield from ((block.raw, block.place.rows) for block in found)
        finally:
            if ahead is not None and ahead[1] is not None:
                ahead[1].cancel()

    def _read(self, places: Sequence[BlockHandle]) -> list[RowBlock]:
        return list(read_row_blocks(self._objects, self.part.key, places, self.footer.kind))

    def block_before(self, key: bytes) -> bytes | None:
        """The first key of the last block that begins before a key."""
        blocks = self.footer.blocks
        index = bisect_left(blocks, key, key=lambda place: place.first_key)
        return blocks[index - 1].first_key if index else None

    def block_groups(self, size: int) -> Iterator[list[BlockHandle]]:
        """Yields its blocks in groups of about so many bytes, for tasks."""
        return coalesced(self.footer.blocks, _span, range_bytes=size)

    def _raw(self, place: BlockHandle) -> bytes:
        """Returns one block, decoded and verified; from the cache if it is there."""
        raw = None if self._cache is None else self._cache.get_block(self.part.key, place.byte)
        if raw is None:
            (block,) = read_row_blocks(self._objects, self.part.key, [place], self.footer.kind)
            raw = block.raw
            if self._cache is not None:
                self._cache.add(place.byte, raw, self.part.key)
        return raw

    # The footer

    def _read_footer(self) -> SSTableFooter:
        size = self.part.size
        if size < _HEAD.size + _TAIL.size:
            raise DataError(f"row file too short: {size} bytes")
        guess = min(size, _TAIL_GUESS_BYTES)
        tail = self._objects.read_range(self.part.key, size - guess, guess + 1)
        if len(tail) != guess:
            raise DataError(f"row file is not {size} bytes long")
        length, crc, magic = _TAIL.unpack_from(tail, guess - _TAIL.size)
        begin = size - _TAIL.size - length
        if magic != END_MAGIC or length > MAX_FOOTER_BYTES or begin < _HEAD.size:
            raise DataError("row file has no valid trailer")
        data = bytes(self._footer_bytes(tail, begin, length))
        if len(data) != length or crc32(data) != crc:
            raise DataError("footer checksum does not match")
        return _checked_footer(data, self.part, begin, self._kind)

    def _footer_bytes(self, tail: memoryview, begin: int, length: int) -> memoryview:
        at = begin - (self.part.size - len(tail))
        return tail[at : at + length] if at >= 0 else self._objects.read_range(self.part.key, begin, length)


def read_row_blocks(
    objects: ByteSource, key: str, places: Sequence[BlockHandle], kind: RowKind = "versions"
) -> Iterator[RowBlock]:
    """Reads blocks of a sorted file, in order, several with one request: verified, and with the rows that their handles
    say.
    """
    last_key = b""
    for place, data in fetch_many(objects, key, places, _span, range_bytes=_RANGE_BYTES):
        try:
            block = _without_head(key, place, data)
            if len(block) != place.size or block_bytes(block) != place.size or count_of(block) != place.rows:
                raise DataError("block size does not match the footer")
            raw = decode_block(block)
            last_key = check_rows(raw, place.rows, last_key, kind == "versions")
            first = find_row(raw, b"")
            if first is None or first[0] != place.first_key or last_key != place.last_key:
                raise DataError("first or last key of a block does not match the footer")
        except CorruptionError:
            raise
        except DataError as error:
            raise _damage(key, place.byte, error.message) from error
        yield RowBlock(place, block, raw)


def _span(place: BlockHandle) -> tuple[int, int]:
    """The bytes of a block; the head of the file comes with the first."""
    return 0 if place.byte == _HEAD.size else place.byte, place.byte + place.size


def _without_head(key: str, place: BlockHandle, data: memoryview) -> memoryview:
    if place.byte != _HEAD.size:
        return data
    if data[: _HEAD.size] != _HEAD.pack(MAGIC, VERSION):
        raise _damage(key, 0, f"not a row file of version {VERSION}")
    return data[_HEAD.size :]


def _damage(key: str, byte: int, message: str) -> CorruptionError:
    return CorruptionError(message, path=key, byte=byte, operation="read", hint=_HINT)


def _checked_footer(data: bytes, part: RowPart, end: int, kind: RowKind | None) -> SSTableFooter:
    try:
        footer = msgspec.msgpack.decode(data, type=SSTableFooter)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"cannot decode footer: {error}") from error
    blocks = footer.blocks
    if not blocks or kind not in (None, footer.kind):
        raise DataError(f"footer has {len(blocks)} blocks of {footer.kind}, expected {kind}")
    said = (footer.rows, footer.digest, blocks[0].first_key, blocks[-1].last_key)
    if said != (part.rows, part.digest, part.first_key, part.last_key):
        raise DataError("footer does not match the file's entry in the root")
    byte = _HEAD.size
    for place in blocks:
        if place.byte != byte or place.size <= HEADER_BYTES or place.rows <= 0 or place.first_key > place.last_key:
            raise DataError("blocks in the footer are not contiguous")
        byte += place.size
    if byte != end or sum(place.rows for place in blocks) != footer.rows:
        raise DataError("blocks in the footer do not add up to the file")
    if any(a.last_key >= b.first_key for a, b in pairwise(blocks)):
        raise DataError("blocks in the footer are not in key order")
    return footer


class _InMemory:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        return self._data[start : start + length]


def opened_in_memory(data: bytes, part: RowPart, kind: RowKind | None = None) -> SSTable:
    """Opens a whole file that is in memory already, after verifying it against the digest in its name."""
    if digest_of(data) not in part.key:
        raise CorruptionError(
            "content does not match the digest in the name", path=part.key, byte=0, operation="read", hint=_HINT
        )
    return SSTable(_InMemory(data), part, kind=kind)


# A sequence of sorted files, read from beginning to end: one request per file, several at a time.
#
# Invariants
# - At most a few files are in memory. A file that is fetched whole is verified against the digest in its name.


# The writer chooses the file size. Files up to this size are fetched whole.
_MAX_WHOLE_BYTES = 128 << 20
_MAX_AHEAD_BYTES = 64 << 20


def open_parts(
    objects: ByteSource, parts: Sequence[RowPart], kind: RowKind, fetchers: Executor | None = None
) -> Iterator[SSTable]:
    """Opens these files one after the other. With `fetchers`, the next files are prefetched while one is read."""
    waiting: deque[tuple[RowPart, Future[bytes] | None]] = deque()
    ahead_bytes, remaining = 0, deque(parts)
    while remaining or waiting:
        while remaining and (not waiting or ahead_bytes + remaining[0].size <= _MAX_AHEAD_BYTES):
            part = remaining.popleft()
            waiting.append((part, _begun(objects, part, fetchers)))
            ahead_bytes += part.size
        part, fetched = waiting.popleft()
        ahead_bytes -= part.size
        if part.size > _MAX_WHOLE_BYTES:
            yield SSTable(objects, part, kind=kind)
        else:
            data = _fetched(objects, part) if fetched is None else fetched.result()
            yield opened_in_memory(data, part, kind)


def _begun(objects: ByteSource, part: RowPart, fetchers: Executor | None) -> Future[bytes] | None:
    if fetchers is None or part.size > _MAX_WHOLE_BYTES:
        return None
    return fetchers.submit(_fetched, objects, part)


def _fetched(objects: ByteSource, part: RowPart) -> bytes:
    return bytes(objects.read_range(part.key, 0, part.size + 1))
