"""The log's bytes in the store: which object holds an LSN, and ranges of it.

An uncompressed object is the log's own bytes after a header: a position maps to a byte of it. A compressed object is
decoded block by block; the position of a block in the log follows from a record in it, whose position its pointer
gives.

Invariants
- An object's header is checked against its descriptor before memory is allocated. The caller verifies the checksums
  of values.
- Descriptors are cached, and read again if their object is missing: it may have been replaced by another.
- Those who want the same descriptor at the same time share one request, which began after the last one was forgotten.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from functools import partial
from threading import Lock
from typing import NamedTuple

from tidelog.cold import blocks
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.fetch import Shared
from tidelog.engine.cold.compacted_values import Stretch
from tidelog.engine.cold.manifest import Manifest, read_manifest
from tidelog.engine.mvcc.cells import Cell
from tidelog.engine.wal.record_header import decode_header
from tidelog.errors import DataError, GapError, NotFoundError, RetryError
from tidelog.log.frame import Frames
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.open import BUCKET, open_metadata_store
from tidelog.store.object_store import ObjectStore

_REMEMBERED = 1024
_FOLLOWING = 32


class ColdObject(NamedTuple):
    """A shipped object: its key and its descriptor."""

    key: str
    descriptor: Descriptor

    @property
    def end_position(self) -> int:
        return self.descriptor.start_position + self.descriptor.raw_size

    def holds(self, lsn: int) -> bool:
        return self.descriptor.start_offset <= lsn <= self.descriptor.end_offset

    def byte_of(self, cell: Cell) -> int:
        """The byte to name in an error: that of the value, or the one where its block is expected."""
        descriptor = self.descriptor
        if descriptor.codec == "none":
            return self.byte_at(cell.position)
        return descriptor.position_of(cell.lsn)[1]

    def byte_at(self, position: int) -> int:
        """The byte of an uncompressed object at a position of the log."""
        return position - self.descriptor.start_position + self.descriptor.header_bytes


class ColdObjects:
    """The objects of an engine's log. Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._starts: list[int] = []
        self._known: OrderedDict[int, ColdObject] = OrderedDict()
        self._mutex = Lock()
        self._learning = Lock()
        self._under_way: Shared[tuple[int, int], ColdObject | None] = Shared()
        self._times_forgotten = 0
        # It never goes back, so records below it need no request.
        self._start_lsn = 0

    @property
    def keys(self) -> EngineKeys:
        keys = self._catalog.keys
        assert isinstance(keys, EngineKeys)
        return keys

    def known(self, lsn: int) -> ColdObject | None:
        """The object of a record, if it is cached."""
        with self._mutex:
            at = bisect_right(self._starts, lsn)
            if at and lsn <= (found := self._known[self._starts[at - 1]]).descriptor.end_offset:
                self._known.move_to_end(found.descriptor.start_offset)
                return found
        return None

    def known_plain(self) -> list[ColdObject]:
        """Those that are cached and not compressed, in the order of the log."""
        with self._mutex:
            found = [self._known[start] for start in self._starts]
        return [one for one in found if one.descriptor.codec == "none"]

    def find_kept(self, lsn: int) -> ColdObject | None:
        """The object of a record; None if there is none: it was dropped, or never shipped."""
        found = self.known(lsn)
        if found is not None or lsn < self._start_lsn:
            return found
        found = self._looked_up(lsn)
        if found is None:
            self._start_lsn = max(self._start_lsn, self._catalog.start_offset())
        return found

    def _looked_up(self, lsn: int) -> ColdObject | None:
        """Asks the catalog, together with others who begin to look at the same descriptor."""
        looked_from = -1
        while (start := self._catalog.nearest_start(lsn)) is not None and start > looked_from:
            of_another: list[bool] = []
            found = self._under_way.get(
                (start, self._times_forgotten), lambda: self._asked(lsn), on_joined=partial(of_another.append, True)
            )
            if not of_another or (found is not None and found.holds(lsn)):
                return found
            looked_from = start  # the other one looked for an LSN elsewhere, and more starts may be known by now
        return self._asked(lsn)

    def _asked(self, lsn: int) -> ColdObject | None:
        found = self.known(lsn)  # from a request that has ended since
        if found is not None:
            return found
        descriptor = self._catalog.at(lsn)
        return None if descriptor is None else self._remember(descriptor)

    def find_on(self, lsn: int) -> ColdObject | None:
        """The same for a reader that goes on: those after it are read too, and found by the next one."""
        with self._learning:
            found = self.known(lsn)
            if found is not None:
                return found
            found = self.find_kept(lsn)
            if found is not None:
                for behind in self._catalog.following(found.descriptor.next_offset, limit=_FOLLOWING):
                    self._remember(behind)
        return found

    def found_in(self, replica: ObjectStore, lsn: int) -> ColdObject | None:
        """The object of a record in a replica: one that lags behind a compaction has other objects."""
        keys = self._catalog.keys
        try:
            with open_metadata_store(BUCKET, replica, read_only=True) as metadata:
                descriptor = Catalog(metadata, keys).at(lsn)
        except (DataError, NotFoundError, RetryError):
            descriptor = None  # its object may be there all the same
        return self.find_kept(lsn) if descriptor is None else ColdObject(keys.object(descriptor.name), descriptor)

    def forget(self, found: ColdObject) -> None:
        """Evicts a record's descriptor after its object was missing or bad, so that the catalog is read again."""
        with self._mutex:
            self._times_forgotten += 1
            self._drop(found.descriptor.start_offset)

    def _remember(self, descriptor: Descriptor) -> ColdObject:
        found = ColdObject(self._catalog.keys.object(descriptor.name), descriptor)
        start = descriptor.start_offset
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
    """Which objects of a store are known to belong to their log: the header of each is read once."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._mutex = Lock()
        self._under_way: Shared[tuple[str, str, str], None] = Shared()

    def check(self, store: ObjectStore, found: ColdObject) -> bool:
        """Returns whether this call had to read the header. DataError names an object that belongs to another log."""
        one = store.url, found.key, found.descriptor.checksum
        if self._is_known(one):
            return False
        was_read = False

        def check() -> None:
            nonlocal was_read
            was_read = self._checked(store, found, one)

        self._under_way.get(one, check)
        return was_read

    def _is_known(self, one: tuple[str, str, str]) -> bool:
        with self._mutex:
            if one in self._known:
                self._known.move_to_end(one)
                return True
        return False

    def _checked(self, store: ObjectStore, found: ColdObject, one: tuple[str, str, str]) -> bool:
        if self._is_known(one):  # by a call that has ended since
            return False
        found.descriptor.check_header(store.read_range(found.key, 0, found.descriptor.header_bytes), found.key)
        with self._mutex:
            self._known[one] = None
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return True


def missing(lsn: int) -> GapError:
    """The error for a record that is nowhere."""
    return GapError(
        f"LSN {lsn} is neither on the disk nor in the store",
        first=lsn,
        last=lsn,
        hint="Is it the right store? `tidelog engine restore` tells what it has",
    )


def read_plain(store: ObjectStore, found: ColdObject, position: int, length: int) -> Stretch:
    """Reads bytes of an uncompressed object; all of them, or DataError."""
    descriptor = found.descriptor
    byte, first_byte = found.byte_at(position), descriptor.header_bytes
    is_plain = descriptor.size == first_byte + descriptor.raw_size
    if byte < first_byte or byte + length > descriptor.size or not is_plain:
        raise DataError(f"{length} bytes from byte {byte} on are not in an object of {descriptor.size} bytes")
    data = store.read_range(found.key, byte, length)
    if len(data) != length:
        raise DataError(f"object ends at byte {byte + len(data)}, expected {descriptor.size} bytes")
    return Stretch(position, data)


def read_blocks(store: ObjectStore, found: ColdObject, cell: Cell, *, whole: bool) -> list[Stretch]:
    """Reads and decodes the block that holds a value; with `whole` also the blocks that are fetched with it, in
    order.
    """
    descriptor = found.descriptor
    offset, byte = descriptor.position_of(cell.lsn)
    length = descriptor.end_of(cell.lsn) - byte
    data = store.read_range(found.key, byte, length)
    if len(data) != length:
        raise DataError(f"object ends at byte {byte + len(data)}, expected {descriptor.size} bytes")
    decoded = _decoded(data, descriptor, offset, None if whole else cell.lsn)
    middle = next((index for index, frames in enumerate(decoded) if cell.lsn < frames.next_offset), len(decoded))
    if middle == len(decoded) or cell.lsn < decoded[middle].first_offset:
        raise DataError(f"no block for LSN {cell.lsn}")
    return _stretches_of(decoded, middle, cell.position - _value_in(decoded[middle], cell))


def _decoded(data: memoryview, descriptor: Descriptor, offset: int, wanted_lsn: int | None) -> list[Frames]:
    """Decodes consecutive blocks; only that of a record if nothing else is wanted."""
    found: list[Frames] = []
    at = 0
    while at < len(data):
        header = blocks.parse_header(data, at, offset, descriptor.raw_size, descriptor.most_frame_bytes)
        if header is None or at + header.size > len(data):
            raise DataError("truncated block")
        if wanted_lsn is None or header.first_offset <= wanted_lsn < header.next_offset:
            found.append(blocks.decode_block(header, data[at : at + header.size]))
        at += header.size
        offset = header.next_offset
    return found


def _value_in(frames: Frames, cell: Cell) -> int:
    """The offset of a value in its block: before the page updates of its record."""
    index = cell.lsn - frames.first_offset
    start = memoryview(frames.positions).cast("Q")[index]
    length = memoryview(frames.lengths).cast("I")[index]
    updates_offset = decode_header(memoryview(frames.buffer)[start : start + length], cell.lsn).updates_offset
    if cell.stored_bytes > updates_offset:
        raise DataError(f"a record has no value of {cell.stored_bytes} bytes, LSN {cell.lsn}")
    return start + updates_offset - cell.stored_bytes


def _stretches_of(decoded: list[Frames], middle: int, position: int) -> list[Stretch]:
    """All blocks with their positions, given that of one of them."""
    position -= sum(frames.end for frames in decoded[:middle])
    placed = []
    for frames in decoded:
        placed.append(Stretch(position, frames.buffer))
        position += frames.end
    return placed


def manifest_in(objects: ObjectStore, keys: EngineKeys) -> Manifest | None:
    """Reads an engine's manifest in a store; None if there is none. For stores that are rarely read."""
    with open_metadata_store(BUCKET, objects, read_only=True) as metadata:
        found = read_manifest(metadata, keys)
    return None if found is None else found[0]
