"""A state in the store: every version up to a seq, as the tree has it, in one object. A restore begins with it.

    "TCKP" u32 version | block ... block | footer: msgpack | footer bytes u32, crc32 of the footer u32, "TCKPEND1"

The footer says what it is a state of (seq, LSN from which on the log goes on, epoch), how many rows there are, their
digest, and of every block its place, its number of rows and its first and last key.

Invariants
- It is written from a stream and read as one: about one block is in memory.
- It appears whole or not at all, and counts when the manifest names it.
- What is read is compared with all of that, and the digest at last: a state that was read to its end is the one that
  was written. Damage is named with its byte.
- Rows up to a seq do not change once the seq is at or below the low-water mark, so it may be written while entries are
  applied.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import msgspec

from tidelog.engine.cell_blocks import (
    HEADER_BYTES,
    CellBlock,
    Row,
    block_bytes,
    count_of,
    decode_block,
    encode_blocks,
    rows_in,
)
from tidelog.engine.manifest import StoredCheckpoint
from tidelog.errors import CorruptionError, DataError
from tidelog.log.frame import crc32
from tidelog.tier.keys import CheckpointId, EngineKeys
from tidelog.tier.object_store import ObjectStore

MAGIC = b"TCKP"
END_MAGIC = b"TCKPEND1"
VERSION = 1
MAX_FOOTER_BYTES = 256 << 20
_RANGE_BYTES = 4 << 20
_DIGEST_BYTES = 32

_HEAD = struct.Struct("<4sI")
_TAIL = struct.Struct("<II8s")
Result = TypeVar("Result")
_HINT = "A restore begins with the state before it; `engine.create_checkpoint()` writes a new one"


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a block is, and what it holds."""

    byte: int
    size: int
    count: int
    first_key: bytes
    last_key: bytes


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """What a state says about itself."""

    seq: int
    lsn: int
    epoch: int
    history_start_seq: int
    rows: int
    digest: str
    created_us: int
    blocks: tuple[BlockPlace, ...]


def write_checkpoint(
    objects: ObjectStore,
    keys: EngineKeys,
    name: CheckpointId,
    rows: Iterable[Row],
    *,
    level: int,
    created_us: int,
    history_start_seq: Callable[[], int],
) -> StoredCheckpoint:
    """Writes a state; rows are in order of key. `history_start_seq` is asked for when all of them were read."""
    digest, places = hashlib.blake2b(digest_size=_DIGEST_BYTES), list[BlockPlace]()
    with objects.open_writer(keys.checkpoint(name)) as writer:
        writer.write(_HEAD.pack(MAGIC, VERSION))
        for block in encode_blocks(rows, level):
            digest.update(block.raw)
            places.append(_place(block, writer.bytes_written))
            writer.write(block.data)
        footer = Footer(
            seq=name.seq,
            lsn=name.lsn,
            epoch=name.epoch,
            history_start_seq=history_start_seq(),
            rows=sum(place.count for place in places),
            digest=digest.hexdigest(),
            created_us=created_us,
            blocks=tuple(places),
        )
        encoded = msgspec.msgpack.encode(footer)
        writer.write(encoded + _TAIL.pack(len(encoded), crc32(encoded), END_MAGIC))
    return StoredCheckpoint(
        key=keys.checkpoint(name),
        seq=name.seq,
        lsn=name.lsn,
        epoch=name.epoch,
        rows=footer.rows,
        size=writer.bytes_written,
        digest=footer.digest,
        created_us=created_us,
    )


def _place(block: CellBlock, byte: int) -> BlockPlace:
    return BlockPlace(byte, len(block.data), block.count, block.first_key, block.last_key)


class StoredState:
    """A state in a store, opened: its footer is read and checked, its rows are not."""

    def __init__(self, objects: ObjectStore, listed: StoredCheckpoint) -> None:
        self._objects = objects
        self._listed = listed
        self.key = listed.key
        self.footer = self._checked(0, self._read_footer)

    def rows(self) -> Iterator[Row]:
        """All rows in order. Whoever has seen the last of them has seen what was written."""
        digest, last_key, rows = hashlib.blake2b(digest_size=_DIGEST_BYTES), b"", 0
        for place, block in self._blocks():
            raw = self._checked(place.byte, partial(decode_block, block))
            digest.update(raw)
            found = rows_in(raw, place.count, last_key)
            for key, value in self._checked_rows(place, found):
                last_key = key
                rows += 1
                yield key, value
            if last_key != place.last_key:
                raise self._damage(place.byte, "a block that does not end with the key that it must")
        if digest.hexdigest() != self.footer.digest or rows != self.footer.rows:
            raise self._damage(0, "a state with a digest that does not match")

    def _checked_rows(self, place: BlockPlace, rows: Iterator[Row]) -> Iterator[Row]:
        try:
            yield from rows
        except DataError as error:
            raise self._damage(place.byte, error.message) from error

    def _blocks(self) -> Iterator[tuple[BlockPlace, memoryview]]:
        """Several blocks are fetched with one request."""
        waiting: list[BlockPlace] = []
        for place in self.footer.blocks:
            if waiting and place.byte + place.size - waiting[0].byte > _RANGE_BYTES:
                yield from self._fetched(waiting)
                waiting = []
            waiting.append(place)
        if waiting:
            yield from self._fetched(waiting)

    def _fetched(self, places: list[BlockPlace]) -> Iterator[tuple[BlockPlace, memoryview]]:
        start, last = places[0].byte, places[-1]
        data = self._objects.read_range(self.key, start, last.byte + last.size - start)
        for place in places:
            block = data[place.byte - start : place.byte - start + place.size]
            if self._checked(place.byte, partial(block_bytes, block)) != place.size or count_of(block) != place.count:
                raise self._damage(place.byte, "a block of another size than it must have")
            yield place, block

    # The footer

    def _read_footer(self) -> Footer:
        listed = self._listed
        size = self._objects.head(self.key).size
        if size != listed.size or size < _HEAD.size + _TAIL.size:
            raise DataError(f"a state of {size} bytes, and the manifest says {listed.size}")
        if bytes(self._objects.read_range(self.key, 0, _HEAD.size)) != _HEAD.pack(MAGIC, VERSION):
            raise DataError(f"not the beginning of a state of version {VERSION}")
        length, crc, magic = _TAIL.unpack(self._objects.read_range(self.key, size - _TAIL.size, _TAIL.size))
        begin = size - _TAIL.size - length
        if magic != END_MAGIC or length > MAX_FOOTER_BYTES or begin < _HEAD.size:
            raise DataError("not the end of a state")
        data = bytes(self._objects.read_range(self.key, begin, length))
        if crc32(data) != crc:
            raise DataError("a footer with a checksum that does not match")
        return _checked_footer(data, listed, begin)

    def _checked(self, byte: int, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except struct.error as error:
            raise self._damage(byte, "an object that is cut short") from error
        except CorruptionError:
            raise
        except DataError as error:
            raise self._damage(byte, error.message) from error

    def _damage(self, byte: int, message: str) -> CorruptionError:
        return CorruptionError(message, path=self.key, byte=byte, operation="read", hint=_HINT)


def _checked_footer(data: bytes, listed: StoredCheckpoint, end: int) -> Footer:
    try:
        footer = msgspec.msgpack.decode(data, type=Footer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"a footer that cannot be understood: {error}") from error
    said = (footer.seq, footer.lsn, footer.epoch, footer.rows, footer.digest)
    if said != (listed.seq, listed.lsn, listed.epoch, listed.rows, listed.digest):
        raise DataError("a footer that says something else than the manifest")
    byte = _HEAD.size
    for place in footer.blocks:
        if place.byte != byte or place.size <= HEADER_BYTES or place.count <= 0:
            raise DataError("a footer whose blocks do not follow each other")
        byte += place.size
    if byte != end or sum(place.count for place in footer.blocks) != footer.rows:
        raise DataError("a footer whose blocks do not add up")
    return footer
