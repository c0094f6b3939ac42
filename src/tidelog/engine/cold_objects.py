"""Where in the store the bytes of the log are: the object of an LSN, and reading stretches of it.

An object without compression is the log's own bytes behind a header: a position is a byte of it. One of blocks is
decoded block by block; where the block of a record lies in the log is known from the record, whose position its pointer
tells.

Invariants
- What an object says is compared with its descriptor before memory is taken for it. Checksums of bodies are the
  caller's to check.
- Descriptors are remembered, and asked for again when their object is not there: it may have been replaced by another.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

from tidelog.engine.cell import Cell
from tidelog.engine.record_header import HEADER, HEADER_BYTES
from tidelog.errors import DataError, GapError, NotFoundError, RetryError
from tidelog.log.frame import Frames
from tidelog.tier import blocks
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.object_store import ObjectStore

_REMEMBERED = 1024


class Stretch(NamedTuple):
    """Bytes of the log, and the position of the first of them."""

    position: int
    data: bytes | memoryview


class ColdObject(NamedTuple):
    """A shipped object: its key and its descriptor."""

    key: str
    descriptor: Descriptor

    @property
    def end_position(self) -> int:
        return self.descriptor.start_position + self.descriptor.raw_size

    def byte_of(self, cell: Cell) -> int:
        """The byte to name in an error: of the body itself, or of the place where its block is looked for."""
        descriptor = self.descriptor
        if descriptor.codec == "none":
            return self.byte_at(cell.position)
        return descriptor.position_of(cell.lsn)[1]

    def byte_at(self, position: int) -> int:
        """Where in the object, which is not compressed, a position of the log is."""
        return position - self.descriptor.start_position + self.descriptor.header_bytes


class ColdObjects:
    """The objects of an engine's log. Threads may share it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._starts: list[int] = []
        self._known: OrderedDict[int, ColdObject] = OrderedDict()
        self._mutex = Lock()
        # It never goes back, so what is below it need not be asked for again.
        self._start_lsn = 0

    @property
    def keys(self) -> EngineKeys:
        """Those of the engine."""
        keys = self._catalog.keys
        assert isinstance(keys, EngineKeys)
        return keys

    def known(self, lsn: int) -> ColdObject | None:
        """The object of a record, if it was asked for before."""
        with self._mutex:
            at = bisect_right(self._starts, lsn)
            if at and lsn <= (found := self._known[self._starts[at - 1]]).descriptor.end_offset:
                self._known.move_to_end(found.descriptor.start_offset)
                return found
        return None

    def find_kept(self, lsn: int) -> ColdObject | None:
        """The object of a record; None when none has it: it was dropped, or never shipped."""
        found = self.known(lsn)
        if found is not None or lsn < self._start_lsn:
            return found
        descriptor = self._catalog.at(lsn)
        if descriptor is None:
            self._start_lsn = max(self._start_lsn, self._catalog.start_offset())
            return None
        return self._remember(ColdObject(self._catalog.keys.object(descriptor.name), descriptor))

    def found_in(self, replica: ObjectStore, lsn: int) -> ColdObject | None:
        """The object of a record as a replica has it: one that follows a compaction later has other objects."""
        keys = self._catalog.keys
        try:
            with open_metadata_store(BUCKET, replica, read_only=True) as metadata:
                descriptor = Catalog(metadata, keys).at(lsn)
        except (DataError, NotFoundError, RetryError):
            descriptor = None  # its object may be there all the same
        return self.find_kept(lsn) if descriptor is None else ColdObject(keys.object(descriptor.name), descriptor)

    def forget(self, found: ColdObject) -> None:
        """Its object is gone or bad: what the catalog says of it is asked for again."""
        with self._mutex:
            self._drop(found.descriptor.start_offset)

    def _remember(self, found: ColdObject) -> ColdObject:
        start = found.descriptor.start_offset
        with self._mutex:
            self._drop(start)
            self._known[start] = found
            insort(self._starts, start)
            if len(self._starts) > _REMEMBERED:
                self._drop(next(iter(self._known)))
        return found

    def _drop(self, start: int) -> None:
        if self._known.pop(start, None) is not None:
            self._starts.remove(start)


class CheckedHeaders:
    """Which objects of a store are known to belong to their log: each is asked for its header once."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._mutex = Lock()

    def check(self, store: ObjectStore, found: ColdObject) -> bool:
        """Whether it had to be asked for. DataError, by name, when the object belongs to another log."""
        one = store.url, found.key, found.descriptor.checksum
        with self._mutex:
            if one in self._known:
                self._known.move_to_end(one)
                return False
        found.descriptor.check_header(store.read_range(found.key, 0, found.descriptor.header_bytes), found.key)
        with self._mutex:
            self._known[one] = None
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return True


def missing(lsn: int) -> GapError:
    """What whoever wants a record that is nowhere is told."""
    return GapError(
        f"LSN {lsn} is neither on the disk nor in the store",
        first=lsn,
        last=lsn,
        hint="Is it the right store? `tidelog engine restore` tells what it has",
    )


def read_plain(store: ObjectStore, found: ColdObject, position: int, length: int) -> Stretch:
    """Bytes of an object without compression; all of them, or DataError."""
    descriptor = found.descriptor
    byte, first_byte = found.byte_at(position), descriptor.header_bytes
    is_plain = descriptor.size == first_byte + descriptor.raw_size
    if byte < first_byte or byte + length > descriptor.size or not is_plain:
        raise DataError(f"{length} bytes from byte {byte} on are not in an object of {descriptor.size} bytes")
    data = store.read_range(found.key, byte, length)
    if len(data) != length:
        raise DataError(f"an object that ends at byte {byte + len(data)} and must have {descriptor.size}")
    return Stretch(position, data)


def read_blocks(store: ObjectStore, found: ColdObject, cell: Cell, *, whole: bool) -> list[Stretch]:
    """The block that a body is in, decoded; with `whole` also those that are fetched with it, in order."""
    descriptor = found.descriptor
    offset, byte = descriptor.position_of(cell.lsn)
    length = descriptor.end_of(cell.lsn) - byte
    data = store.read_range(found.key, byte, length)
    if len(data) != length:
        raise DataError(f"an object that ends at byte {byte + len(data)} and must have {descriptor.size}")
    decoded = _decoded(data, offset, None if whole else cell.lsn)
    middle = next((index for index, frames in enumerate(decoded) if cell.lsn < frames.next_offset), len(decoded))
    if middle == len(decoded) or cell.lsn < decoded[middle].first_offset:
        raise DataError(f"no block where that of LSN {cell.lsn} must be")
    return _placed(decoded, middle, cell.position - _body_in(decoded[middle], cell))


def _decoded(data: memoryview, offset: int, wanted_lsn: int | None) -> list[Frames]:
    """Blocks one after the other; only the one of a record where that is all that is wanted."""
    found: list[Frames] = []
    at = 0
    while at < len(data):
        header = blocks.parse_header(data, at, offset)
        if header is None or at + header.size > len(data):
            raise DataError("a block that is cut short")
        if wanted_lsn is None or header.first_offset <= wanted_lsn < header.next_offset:
            found.append(blocks.decode_block(header, data[at : at + header.size]))
        at += header.size
        offset = header.next_offset
    return found


def _body_in(frames: Frames, cell: Cell) -> int:
    """Where in its block a body begins: in front of the page updates of its record."""
    index = cell.lsn - frames.first_offset
    start = memoryview(frames.positions).cast("Q")[index]
    length = memoryview(frames.lengths).cast("I")[index]
    if length < HEADER_BYTES:
        raise DataError(f"a record of {length} bytes has no header, LSN {cell.lsn}")
    updates_offset = int(HEADER.unpack_from(frames.buffer, start)[3])
    if not HEADER_BYTES + cell.stored_bytes <= updates_offset <= length:
        raise DataError(f"a record has no body of {cell.stored_bytes} bytes, LSN {cell.lsn}")
    return start + updates_offset - cell.stored_bytes


def _placed(decoded: list[Frames], middle: int, position: int) -> list[Stretch]:
    """All blocks with their positions, given that of one of them."""
    position -= sum(frames.end for frames in decoded[:middle])
    placed = []
    for frames in decoded:
        placed.append(Stretch(position, frames.buffer))
        position += frames.end
    return placed
