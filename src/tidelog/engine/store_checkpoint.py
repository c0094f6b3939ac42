"""A state in the store: every version up to a seq, as the tree has it. A restore begins with it.

    "TCKP" u32 version | block ... block | footer: msgpack | footer bytes u32, crc32 of the footer u32, "TCKPEND1"

The footer says what it is a state of (seq, LSN from which on the log goes on, epoch), how many rows there are, their
digest, what became of the last entries (`known_results`), and

    version 1   of every block its place, its number of rows and its first and last key: all in one object
    version 2   which row files (`row_file`) have the rows, in order of key. There are no blocks then, and the digest is
                that of the digests of the files. A compaction and its state have the same files.

Invariants
- It is written from a stream and read as one: about one block is in memory, and what is fetched ahead.
- No time of day is in one of version 2, and its name has its digest: who writes it again writes the same.
- It appears whole or not at all, and counts when the manifest names it.
- What is read is compared with all of that, and the digest at last: a state that was read to its end is the one that
  was written. Damage is named with its byte.
- Rows up to a seq do not change once the seq is at or below the low-water mark, so it may be written while entries are
  applied.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

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
from tidelog.engine.known_results import KnownResults
from tidelog.engine.manifest import StoredCheckpoint
from tidelog.engine.place import cell_of
from tidelog.engine.row_file import RowPart
from tidelog.engine.row_parts import open_parts
from tidelog.engine.rows import check_rows
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.log.frame import crc32
from tidelog.tier.compacted_names import digest_of
from tidelog.tier.keys import CheckpointId, EngineKeys
from tidelog.tier.object_store import ObjectStore

MAGIC = b"TCKP"
END_MAGIC = b"TCKPEND1"
VERSION = 1
VERSION_OF_PARTS = 2
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


class Footer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a state says about itself: it has blocks (version 1) or parts (version 2)."""

    seq: int
    lsn: int
    epoch: int
    history_start_seq: int
    rows: int
    digest: str
    created_us: int
    blocks: tuple[BlockPlace, ...]
    parts: tuple[RowPart, ...] = ()
    results: KnownResults | None = None


def write_checkpoint(
    objects: ObjectStore,
    keys: EngineKeys,
    name: CheckpointId,
    rows: Iterable[Row],
    *,
    level: int,
    created_us: int,
    history_start_seq: Callable[[], int],
    results: KnownResults | None = None,
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
            results=results,
        )
        writer.write(_encoded_footer(footer))
    return _listed(keys, name, footer, writer.bytes_written, created_us)


def write_parts_state(
    objects: ObjectStore,
    keys: EngineKeys,
    name: CheckpointId,
    parts: Sequence[RowPart],
    *,
    created_us: int,
    history_start_seq: int,
    results: KnownResults | None = None,
) -> StoredCheckpoint:
    """Writes a state whose rows are in row files, which are there already, in order of key.

    Its name gets its digest. `created_us` is for the manifest alone.
    """
    if any(before.last_key >= part.first_key for before, part in pairwise(parts)):
        raise InputError("the files of a state are not in order of key")
    footer = Footer(
        seq=name.seq,
        lsn=name.lsn,
        epoch=name.epoch,
        history_start_seq=history_start_seq,
        rows=sum(part.rows for part in parts),
        digest=digest_of_parts(parts),
        created_us=0,
        blocks=(),
        parts=tuple(parts),
        results=results,
    )
    data = _HEAD.pack(MAGIC, VERSION_OF_PARTS) + _encoded_footer(footer)
    named = name._replace(digest=digest_of(data))
    objects.put(keys.checkpoint(named), data)
    return _listed(keys, named, footer, len(data), created_us)


def digest_of_parts(parts: Sequence[RowPart]) -> str:
    """The digest of a state of these files."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part.digest.encode())
    return digest.hexdigest()


def _encoded_footer(footer: Footer) -> bytes:
    encoded = msgspec.msgpack.encode(footer)
    return encoded + _TAIL.pack(len(encoded), crc32(encoded), END_MAGIC)


def _listed(keys: EngineKeys, name: CheckpointId, footer: Footer, size: int, created_us: int) -> StoredCheckpoint:
    return StoredCheckpoint(
        key=keys.checkpoint(name),
        seq=name.seq,
        lsn=name.lsn,
        epoch=name.epoch,
        rows=footer.rows,
        size=size,
        digest=footer.digest,
        created_us=created_us,
    )


def _place(block: CellBlock, byte: int) -> BlockPlace:
    return BlockPlace(byte, len(block.data), block.count, block.first_key, block.last_key)


class StateBlock(NamedTuple):
    """A block of a state: as it is stored, and what is in it."""

    data: memoryview
    raw: bytes


class StoredState:
    """A state in a store, opened: its footer is read and checked, its rows are not."""

    def __init__(self, objects: ObjectStore, listed: StoredCheckpoint) -> None:
        self._objects = objects
        self._listed = listed
        self.key = listed.key
        version, footer = self._checked(0, self._read_footer)
        self._set(objects, listed, footer, has_places=version == VERSION_OF_PARTS)

    def _set(self, objects: ObjectStore, listed: StoredCheckpoint, footer: Footer, *, has_places: bool) -> None:
        self._objects = objects
        self._listed = listed
        self.key = listed.key
        self.footer = footer
        self.has_places = has_places
        """Whether the values of its blocks are those of a version index: cells with places behind them."""

    def parts(self) -> tuple[RowPart, ...]:
        """The row files of a state that consists of such."""
        return self.footer.parts

    @property
    def stored_bytes(self) -> int:
        """What it has in the store, its row files included."""
        return self._listed.size + sum(part.size for part in self.parts())

    def rows(self, fetchers: Executor | None = None) -> Iterator[Row]:
        """All rows in order: keys of the tree and their cells. Whoever has seen the last has seen what was written.

        With `fetchers` row files are fetched ahead.
        """
        for block in self.blocks(fetchers):
            for key, value in rows_in(block.raw, count_of(block.data), b""):
                yield key, cell_of(value) if self.has_places else value

    def blocks(self, fetchers: Executor | None = None) -> Iterator[StateBlock]:
        """The same as blocks, checked."""
        return self._own_blocks() if not self.has_places else self._blocks_of_parts(fetchers)

    def _blocks_of_parts(self, fetchers: Executor | None) -> Iterator[StateBlock]:
        for file in open_parts(self._objects, self.parts(), "versions", fetchers):
            for block in file.blocks():
                yield StateBlock(block.data, block.raw)

    def _own_blocks(self) -> Iterator[StateBlock]:
        digest, last_key = hashlib.blake2b(digest_size=_DIGEST_BYTES), b""
        for place, data in self._blocks():
            raw = self._checked(place.byte, partial(decode_block, data))
            digest.update(raw)
            last_key = self._checked(place.byte, partial(check_rows, raw, place.count, last_key, False))
            if last_key != place.last_key:
                raise self._damage(place.byte, "a block that does not end with the key that it must")
            yield StateBlock(data, raw)
        if digest.hexdigest() != self.footer.digest:
            raise self._damage(0, "a state with a digest that does not match")

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

    def _read_footer(self) -> tuple[int, Footer]:
        listed = self._listed
        size = self._objects.head(self.key).size
        if size != listed.size or size < _HEAD.size + _TAIL.size:
            raise DataError(f"a state of {size} bytes, and the manifest says {listed.size}")
        magic, version = _HEAD.unpack(self._objects.read_range(self.key, 0, _HEAD.size))
        if magic != MAGIC or version not in (VERSION, VERSION_OF_PARTS):
            raise DataError(f"not the beginning of a state of version {VERSION} or {VERSION_OF_PARTS}")
        length, crc, magic = _TAIL.unpack(self._objects.read_range(self.key, size - _TAIL.size, _TAIL.size))
        begin = size - _TAIL.size - length
        if magic != END_MAGIC or length > MAX_FOOTER_BYTES or begin < _HEAD.size:
            raise DataError("not the end of a state")
        data = bytes(self._objects.read_range(self.key, begin, length))
        if crc32(data) != crc:
            raise DataError("a footer with a checksum that does not match")
        footer = _checked_footer(data, listed)
        _check_blocks(footer, begin) if version == VERSION else _check_parts(footer, begin)
        return version, footer

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


def _checked_footer(data: bytes, listed: StoredCheckpoint) -> Footer:
    try:
        footer = msgspec.msgpack.decode(data, type=Footer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"a footer that cannot be understood: {error}") from error
    said = (footer.seq, footer.lsn, footer.epoch, footer.rows, footer.digest)
    if said != (listed.seq, listed.lsn, listed.epoch, listed.rows, listed.digest):
        raise DataError("a footer that says something else than the manifest")
    return footer


def _check_blocks(footer: Footer, end: int) -> None:
    byte = _HEAD.size
    for place in footer.blocks:
        if place.byte != byte or place.size <= HEADER_BYTES or place.count <= 0:
            raise DataError("a footer whose blocks do not follow each other")
        byte += place.size
    if byte != end or sum(place.count for place in footer.blocks) != footer.rows:
        raise DataError("a footer whose blocks do not add up")
    if footer.parts:
        raise DataError("a footer with blocks and with parts")


def _check_parts(footer: Footer, end: int) -> None:
    parts = footer.parts
    if end != _HEAD.size or footer.blocks:
        raise DataError("a footer of parts behind something else")
    if any(part.rows <= 0 or part.size <= 0 or part.first_key > part.last_key for part in parts):
        raise DataError("a footer with a part without rows")
    if any(before.last_key >= part.first_key for before, part in pairwise(parts)):
        raise DataError("a footer whose parts are not in order of key")
    if sum(part.rows for part in parts) != footer.rows or digest_of_parts(parts) != footer.digest:
        raise DataError("a footer whose parts do not add up")
