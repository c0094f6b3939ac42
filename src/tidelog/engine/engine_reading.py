"""Reading an engine: objects, listings, versions and digests, at any seq.

    read(bucket, key, seq)    version index -> value in the log, on this disk or in the store

Invariants
- Readers take no lock and never wait for whoever applies: a seq that was applied means one state for ever.
- What retention has removed is told as such, and never as something that was not there.
- What takes long (a listing, a digest) pins its seq, so that retention leaves its state alone. If that state is rolled
  back meanwhile, it ends with ConflictError: nobody gets a mixture of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, starmap

from tidelog.engine.arguments import check_names, checked_seq
from tidelog.engine.body import decode_body
from tidelog.engine.buckets import Buckets, BucketVersion
from tidelog.engine.cell import Cell
from tidelog.engine.cold import Body, ColdReader
from tidelog.engine.core import Core
from tidelog.engine.digest import Digest
from tidelog.engine.put_record import plain_data
from tidelog.engine.results import ObjectInfo, StoredObject, Tier, VersionInfo
from tidelog.engine.retention import Pin, forgotten
from tidelog.engine.standing import Standing
from tidelog.errors import GapError, InputError, NotFoundError, TidelogError


class EngineReading:
    """The half of an engine that looks."""

    def __init__(self, core: Core, reader: ColdReader | None, standing: Standing) -> None:
        self._core = core
        self._standing = standing
        self._marks = core.marks
        self._wal = core.wal
        self._versions = core.versions
        self._buckets = core.buckets
        self._history = core.history
        self._cold = reader
        self._find_in = core.versions.find_in
        self._pointer = core.versions.pointer
        self._read_stored = core.wal.read_stored

    def read(self, bucket: str, key: str, seq: int | None = None) -> StoredObject:
        """An object as it is at a seq; by default at the last one that was applied."""
        try:
            at = self._marks.applied_seq if seq is None else self._checked_seq(seq)
            created = self._buckets.created(bucket, at)
            if created is not None:
                pointer = self._pointer(created, bucket, key, at)
                if pointer is not None:
                    found_seq, _, size, crc, codec, _, position, stored_bytes = pointer
                    stored = self._read_stored(position, stored_bytes)
                    data = None if stored is None or codec else plain_data(stored, size, crc)
                    if data is not None:
                        return StoredObject(data, {}, found_seq, "hot")
            return self._read_any(created, bucket, key, seq, at)
        except (TypeError, UnicodeEncodeError):
            check_names(bucket, key)
            raise

    def _read_any(self, created: BucketVersion | None, bucket: str, key: str, seq: int | None, at: int) -> StoredObject:
        """An object that is not in the log of this disk, or small, compressed, with metadata, damaged or not there."""
        found = None if created is None else self._find_in(created, bucket, key, at)
        if found is None:
            return self._look_again(bucket, key, seq, at)
        cell = found.cell
        if cell.inline is not None:
            stored: bytes | None = cell.inline
        else:
            stored = self._read_stored(cell.position, cell.stored_bytes)
        if stored is None:
            try:
                data, metadata = self._read_cold(cell)
            except (GapError, NotFoundError):
                if at < self._kept_from():
                    return self._look_again(bucket, key, seq, at)
                raise
            return StoredObject(data, metadata, found.seq, "cold")
        data, metadata = decode_body(stored, cell.codec, cell.size, cell.crc, cell.lsn)
        return StoredObject(data, metadata, found.seq, "hot")

    def _kept_from(self) -> int:
        """From which seq on values are in the store: somebody may have moved it there while a state was pinned here."""
        published = 0 if self._cold is None else self._cold.history_start_seq
        return max(self._history.start_seq, published)

    def _look_again(self, bucket: str, key: str, seq: int | None, at: int) -> StoredObject:
        """For what was not found: it may have been removed since this read began. Then the newest state has changed."""
        if seq is None and at < self._history.start_seq and not self._standing.is_closed:
            return self.read(bucket, key)
        raise self._not_found(bucket, key, at)

    def _read_cold(self, cell: Cell) -> Body:
        if self._cold is None:
            raise NotFoundError(
                f"the value at position {cell.position} has left this disk, and no store is known",
                path=self._core.directory,
                hint="Open the engine with the store that it was shipped to",
            )
        return self._cold.read(cell)

    def list_objects(
        self,
        bucket: str,
        prefix: str = "",
        seq: int | None = None,
        *,
        start_after: str | None = None,
        limit: int | None = None,
    ) -> Iterator[ObjectInfo]:
        """The objects of a bucket whose keys begin like this, in order of key, as they are at a seq.

        `start_after` and `limit` make pages of it: the last key of one is where the next starts.
        """
        check_names(bucket, prefix)
        if start_after is not None:
            check_names(bucket, start_after)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InputError(f"a limit of {limit!r} objects is none", hint="Give a whole number from 1 on, or None")
        pin = self.pin(seq)
        if self._buckets.created(bucket, pin.seq) is None:
            pin.check()
            raise self._no_bucket(bucket, pin.seq)
        return islice(chain.from_iterable(self._listed(pin, bucket, prefix, start_after)), limit)

    def _listed(self, pin: Pin, bucket: str, prefix: str, start_after: str | None) -> Iterator[Iterator[ObjectInfo]]:
        with pin as seq:
            for rows in self._versions.objects(bucket, prefix, seq, after=start_after):
                pin.check()
                yield starmap(ObjectInfo, rows)

    def has_bucket(self, bucket: str, seq: int | None = None) -> bool:
        """Whether there is a bucket at a seq; by default at the last one that was applied."""
        check_names(bucket)
        with self.pin(seq) as at:
            return self._buckets.created(bucket, at) is not None

    def find_object(self, bucket: str, key: str, seq: int | None = None) -> ObjectInfo | None:
        """Size and seq of an object, without reading it; None where there is none, or no such bucket."""
        check_names(bucket, key)
        with self.pin(seq) as at:
            found = self._versions.find(bucket, key, at)
        return None if found is None else ObjectInfo(key, found.cell.size, found.seq)

    def list_buckets(self, seq: int | None = None) -> list[str]:
        """The names of all buckets at a seq, sorted."""
        at = self._checked_read_seq(self._marks.applied_seq if seq is None else seq)
        return [name for name, _ in self._buckets.alive(at)]

    def versions(self, bucket: str, key: str) -> list[VersionInfo]:
        """All versions of an object that are kept, newest first, deletions included."""
        check_names(bucket, key)
        with self.pin() as at:
            found = [
                VersionInfo(version.seq, version.cell.size, version.cell.is_tombstone, self._tier_of(version.cell))
                for version in self._versions.history(bucket, key, at)
            ]
        if not found:
            raise self._not_found(bucket, key, at)
        return found

    def digest(self, seq: int | None = None) -> str:
        """A number for the whole state at a seq: equal on every replica, after every restore."""
        digest = Digest()
        with self.pin(seq) as at:
            for bucket, created in self._buckets.alive(at):
                name = bucket.encode()
                digest.add_bucket(name, created.seq)
                rows = chain.from_iterable(self._versions.objects(bucket, "", at, has_crc=True))
                for key, size, put_seq, crc in rows:
                    digest.add_object(name, key.encode(), put_seq, size, crc)
        return digest.text()

    def pin(self, seq: int | None = None) -> Pin:
        """Keeps every state from a seq on readable until the end of the `with` block, for long reads of one state.

        A state above the low-water mark may be rolled back meanwhile; then the block ends with ConflictError.
        """
        while True:
            at = self._checked_seq(self._marks.applied_seq if seq is None else seq)
            try:
                pin = self._history.pin(at)
            except NotFoundError:
                if seq is not None:
                    raise
                continue
            if at <= self._marks.applied_seq:
                return pin  # any rollback from here on ends it
            pin.release()

    def _tier_of(self, cell: Cell) -> Tier | None:
        if cell.is_tombstone:
            return None
        return "hot" if cell.inline is not None or cell.position >= self._wal.first_position else "cold"

    def _checked_read_seq(self, seq: int) -> int:
        start = self._history.start_seq
        if self._checked_seq(seq) < start:
            raise forgotten(start)
        return seq

    def _checked_seq(self, seq: int) -> int:
        if self._standing.is_closed:
            raise self._standing.closed_error()
        checked_seq(seq, least=0)
        if seq > self._marks.applied_seq:
            raise InputError(
                f"seq {seq} is not applied yet, the last one is {self._marks.applied_seq}",
                operation="read",
                hint="Apply the entries up to it first",
            )
        return seq

    def _not_found(self, bucket: str, key: str, seq: int) -> TidelogError:
        if self._standing.is_closed:
            return self._standing.closed_error()
        if seq < self._kept_from():
            return forgotten(self._kept_from())
        if self._buckets.created(bucket, seq) is None:
            return self._no_bucket(bucket, seq)
        return NotFoundError(f"there is no object {key!r} in bucket {bucket!r} at seq {seq}")

    def _no_bucket(self, bucket: str, seq: int) -> TidelogError:
        return NotFoundError(f"there is no bucket {bucket!r} at seq {seq}")

    def _end_reading(self) -> None:
        """From here on reads find nothing, and look why."""
        self._standing.is_closed = True
        self._buckets = Buckets()
