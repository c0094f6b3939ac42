"""The read path of an engine: objects, listings, versions, digests and metadata, at any seq. Also argument checks, and
the check whether the engine may be used at all (`Standing`).

    read(bucket, key, seq)    version index -> value in the log, on this disk or in the store

Invariants
- Readers take no lock and never wait for a writer: an applied seq identifies one immutable state.
- Reading what retention has removed raises an error; it is never reported as absent.
- Long reads (a listing, a digest) pin their seq, so that retention keeps its state. If that state is rolled back
  meanwhile, the read ends with ConflictError: no reader sees a mixture of two states.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice, starmap
from pathlib import Path
from threading import Lock
from typing import Protocol

from tidelog._native import plain_data
from tidelog.clock import Stopwatch
from tidelog.engine.cold.reader import ColdReader, Value
from tidelog.engine.cold.value_store import ColdValue
from tidelog.engine.core import Core
from tidelog.engine.entry import (
    MAX_METADATA_BYTES,
    MetadataValue,
    ObjectInfo,
    ObjectStat,
    PutObject,
    StoredObject,
    Tier,
    VersionInfo,
    is_large,
    operations,
)
from tidelog.engine.mvcc.cells import MAX_SEQ, Cell
from tidelog.engine.mvcc.digest import Digest
from tidelog.engine.mvcc.retention import History, Marks, Pin, forgotten
from tidelog.engine.mvcc.versions import INFO, WITH_CRC, Buckets, BucketVersion, Found, Pointer, Row
from tidelog.engine.object_file import ObjectFile, RawObject, ReadAheadValue
from tidelog.engine.sst.value_file import Reference, reference_of
from tidelog.engine.txn.read_set import Carried, batch_of
from tidelog.engine.value_files import OpenValue, ValueFiles
from tidelog.engine.wal.scan_values import ScannedRows
from tidelog.engine.wal.value import CODEC_FILE, CODEC_NONE, LENGTH_BYTES, decode_metadata, decode_value, object_crc
from tidelog.errors import (
    ClosedError,
    GapError,
    Hint,
    InputError,
    InternalError,
    LogFailedError,
    NotFoundError,
    TidelogError,
)

# Checks of callers' arguments before anything is done: seqs, entries and names.
#
# Invariants
# - Invalid arguments raise InputError naming the argument; nothing has changed then.
# - A lookup of a name that no object can have (too long, with a NUL) is valid: there is no such object.


def checked_seq(seq: int, *, least: int = 1) -> int:
    """Returns the seq if it is valid."""
    if type(seq) is not int or not least <= seq <= MAX_SEQ:
        raise InputError(f"seq must be a whole number from {least} to 2**64 - 1, not {seq!r}")
    return seq


def checked_entries(entries: object, large_bytes: int) -> tuple[list[tuple[int, Carried]], bool]:
    """Returns the entries if they are valid and their seqs increase, and whether one of them may have data of more
    bytes than this. Exceptions raised by the iterable itself propagate.
    """
    if not hasattr(entries, "__iter__"):
        raise InputError(f"entries must be pairs of a seq and an entry, not {type(entries).__name__}")
    wanted: list[tuple[int, Carried]] = list(entries)
    before, has_large = 0, False
    try:
        for seq, entry in wanted:
            if checked_seq(seq) <= before:
                raise InputError(f"seq {seq} comes after {before}: entries must be in the order of their seqs")
            if type(entry) is not PutObject:
                has_large |= _may_be_large(entry, large_bytes)
            elif type(entry.data) is not bytes or len(entry.data) > large_bytes:
                has_large = True
            before = seq
    except InputError:  # a ValueError that says by itself what is wrong with the entry
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"entries must be pairs of a seq and an entry: {error}") from error
    return wanted, has_large


def _may_be_large(entry: Carried, large_bytes: int) -> bool:
    """Whether an entry is one, and whether it puts data of more bytes than this."""
    parts = operations(batch_of(entry))
    return any(isinstance(part, PutObject) and is_large(part.data, large_bytes) for part in parts)


def check_names(bucket: object, key: object = "") -> None:
    """Checks that names to look up are text that can be encoded as UTF-8."""
    check_text("the name of a bucket", bucket)
    check_text("the name of a key", key)


def check_text(what: str, text: object) -> None:
    """Checks that an argument is text that can be encoded as UTF-8."""
    if not isinstance(text, str):
        raise InputError(f"{what} must be str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} contains half a surrogate pair, which is not UTF-8") from error


def check_limit(limit: object) -> None:
    """Checks how many items are wanted at most; None for all."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InputError(
            f"limit must be 1 or more, or None, not {limit!r}",
            hint=Hint("Give a whole number from 1 on, or None", "Give a whole number from 1 on, or leave it out"),
        )


# Whether an engine may be used: it is open, closed, failed, or has lost its store to another node.
#
# Invariants
# - It references the parts of an engine and not the engine: background work checks here, and does not keep an engine
#   alive that its user has dropped.
# - Every call reports the first failure, until the engine is opened again.


class Refusing(Protocol):
    """A store that may have another owner: `refusal` makes the error then."""

    @property
    def refusal(self) -> Callable[[], TidelogError] | None: ...


class News:
    """Wakes those who wait for entries. Thread-safe."""

    def __init__(self) -> None:
        self._wakers: tuple[Callable[[], object], ...] = ()
        self._mutex = Lock()

    def tell(self) -> None:
        """Something was applied, or became final, or the engine was closed."""
        for wake in self._wakers:
            wake()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits."""
        return bool(self._wakers)

    @contextlib.contextmanager
    def listening(self, wake: Callable[[], object]) -> Iterator[None]:
        """Calls it at every news, from any thread."""
        with self._mutex:
            self._wakers = (*self._wakers, wake)
        try:
            yield
        finally:
            with self._mutex:
                self._wakers = tuple(one for one in self._wakers if one is not wake)


class Standing:
    """The status of an engine. Thread-safe."""

    def __init__(self, core: Core, cold: Refusing | None) -> None:
        self._core = core
        self._cold = cold
        self._failure: str | None = None
        self.is_closed = False

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed and must be reopened."""
        return self._failure is not None

    def check(self) -> None:
        """Raises if the engine cannot be used."""
        if self.is_closed:
            raise self.closed_error()
        if self._cold is not None and self._cold.refusal is not None:
            raise self._cold.refusal()
        if self._failure is not None:
            raise LogFailedError(self._failure, path=self._core.directory, hint="Close it and open it again")

    def fail(self, error: BaseException) -> None:
        """Marks pages and WAL as inconsistent: nothing is made durable from here on."""
        if self._failure is None:
            self._failure = f"the engine failed and must be opened again: {error}"
            self._core.fail()

    def closed_error(self) -> ClosedError:
        """The error for calls on a closed engine."""
        return ClosedError("the engine is closed", path=self._core.directory, hint="Open it again")

    def __str__(self) -> str:
        if self.is_closed:
            return "closed"
        return "open" if self._failure is None else "failed"


# What is read from: the parts of an open engine (`Core`), or those of its store alone (`reader.py`).


class VersionIndex(Protocol):
    """Which version of an object is visible at a seq: `Versions`, or `StoredVersions`."""

    def renew(self) -> None: ...

    def find(self, bucket: str, key: str, seq: int) -> Found | None: ...

    def find_in(self, created: BucketVersion, bucket: str, key: str, seq: int) -> Found | None: ...

    def pointer(self, created: BucketVersion, bucket: str, key: str, seq: int) -> Pointer | None: ...

    def history(self, bucket: str, key: str, seq: int) -> Iterator[Found]: ...

    def objects(
        self,
        bucket: str,
        key_prefix: str,
        seq: int,
        *,
        after: str | None = None,
        start: str | None = None,
        end: str | None = None,
        reverse: bool = False,
        columns: int = INFO,
        delimiter: str = "",
    ) -> Iterator[list[Row]]: ...


class LocalValues(Protocol):
    """Values that are on this disk, by their positions in the log: the WAL."""

    @property
    def first_position(self) -> int: ...

    def read_stored(self, position: int, length: int) -> bytes | None: ...

    def read_values(self, scanned: ScannedRows) -> None: ...


class ReadParts(Protocol):
    """What is needed for reading."""

    @property
    def directory(self) -> Path | None: ...

    @property
    def marks(self) -> Marks: ...

    @property
    def history(self) -> History: ...

    @property
    def buckets(self) -> Buckets: ...

    @property
    def versions(self) -> VersionIndex: ...

    @property
    def wal(self) -> LocalValues: ...

    @property
    def values(self) -> ValueFiles: ...


class ReadStanding(Protocol):
    """Whether an engine is closed."""

    is_closed: bool

    def closed_error(self) -> ClosedError: ...


Place = Callable[[str, str, int, Cell], Cell]
"""Where the store has the value of a version (bucket, key, seq): its cell, in terms of the log that is shipped."""


def _at_its_place(bucket: str, key: str, seq: int, cell: Cell) -> Cell:
    """This log is the one that is shipped."""
    return cell


# A value is moved now and then, which takes long; a read that meets several moves of one is hardly possible.
_MOVES = 8
_TIMED_EVERY = 64


class EngineReading:
    """The read-only methods of an engine."""

    def __init__(self, parts: ReadParts, reader: ColdReader | None, standing: ReadStanding) -> None:
        self._directory = parts.directory
        self._reads = 0
        self._hot_read_seconds = Stopwatch()
        self._standing = standing
        self._marks = parts.marks
        self._local = parts.wal
        self._versions = parts.versions
        self._buckets = parts.buckets
        self._history = parts.history
        self._cold = reader
        self._find_in = parts.versions.find_in
        self._pointer = parts.versions.pointer
        self._read_stored = parts.wal.read_stored
        self._value_files = parts.values
        self._placed: Place = _at_its_place
        self._is_placed_elsewhere = False

    def read(
        self, bucket: str, key: str, seq: int | None = None, *, offset: int = 0, length: int | None = None
    ) -> StoredObject:
        """Returns an object as of a seq; by default the last applied one. With `offset` and `length`, its data from
        that byte on, so many bytes at most.

        Of a value in a file of its own (from `large_value_bytes` on) only the blocks that have these bytes are read,
        here or from the store. Any other is read whole: its one checksum could not verify a part.
        """
        if offset or length is not None:
            part = self._read_range(bucket, key, seq, offset, length, may_wait=True)
            assert part is not None, "who may wait gets an answer"
            return part
        self._reads = reads = self._reads + 1
        if not reads % _TIMED_EVERY:
            return self._timed_read(bucket, key, seq)
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

    def _timed_read(self, bucket: str, key: str, seq: int | None) -> StoredObject:
        """One read of many, for the histogram: measuring each would cost a hot read noticeably."""
        began = time.perf_counter()
        found = self.read(bucket, key, seq)
        if found.tier == "hot":
            self._hot_read_seconds.add(time.perf_counter() - began)
        return found

    def _begins(self) -> float:
        """When a read of another kind began, if it is the one of many that is timed; otherwise 0."""
        self._reads = reads = self._reads + 1
        return 0.0 if reads % _TIMED_EVERY else time.perf_counter()

    def _ends_hot(self, began: float) -> None:
        """It was served from this disk."""
        if began:
            self._hot_read_seconds.add(time.perf_counter() - began)

    def _read_any(self, created: BucketVersion | None, bucket: str, key: str, seq: int | None, at: int) -> StoredObject:
        """The slow path: an object that is not in the local WAL, or is small, compressed, has metadata, is damaged or
        missing.
        """
        found = None if created is None else self._find_in(created, bucket, key, at)
        if found is None:
            return self._look_again(bucket, key, seq, at)
        for _ in range(_MOVES):
            here = self._found_here(found)
            if here is not None:
                return here
            try:
                data, metadata = self._read_cold(self._placed(bucket, key, found.seq, found.cell))
            except (GapError, NotFoundError):
                if at < self._kept_from():
                    return self._look_again(bucket, key, seq, at)
                moved = self._moved(bucket, key, at, found)
                if moved is None:
                    raise
                found = moved
            else:
                return StoredObject(data, metadata, found.seq, "cold")
        raise InternalError(f"the value of {key!r} was moved {_MOVES} times while it was read")

    def _moved(self, bucket: str, key: str, seq: int, found: Found) -> Found | None:
        """The same version, if its value was moved since it was looked up and is somewhere else now."""
        self._versions.renew()
        again = self._versions.find(bucket, key, seq)
        return None if again is None or again == found else again

    def _read_here(self, bucket: str, key: str, seq: int | None) -> StoredObject | None:
        """Like `read`, from this disk alone; None if the value has left it."""
        began = self._begins()
        check_names(bucket, key)
        at = self._marks.applied_seq if seq is None else self._checked_seq(seq)
        created = self._buckets.created(bucket, at)
        found = None if created is None else self._find_in(created, bucket, key, at)
        if found is None:
            return self.read(bucket, key, seq)  # it is not there, and that error says why
        here = self._found_here(found)
        if here is not None:
            self._ends_hot(began)
        return here

    def _found_here(self, found: Found) -> StoredObject | None:
        """A version with its value; None if that has left this disk."""
        cell, stored = found.cell, self._stored_here(found.cell)
        if stored is None:
            return None
        return StoredObject(*decode_value(stored, cell.codec, cell.size, cell.crc, cell.lsn), found.seq, "hot")

    def _stored_here(self, cell: Cell) -> bytes | None:
        """The stored value, if it is on this disk."""
        if cell.inline is None:
            stored = self._read_stored(cell.position, cell.stored_bytes)
            return self._cold.on_disk(cell) if stored is None and self._cold is not None else stored
        if cell.codec != CODEC_FILE:
            return cell.inline
        opened = self._open_here(reference_of(cell))
        if opened is None:
            return None
        with contextlib.closing(opened):
            return opened.value()

    def _open_here(self, reference: Reference) -> OpenValue | None:
        """The file of a large value, if it is on this disk."""
        opened = self._value_files.open(reference)
        return self._cold.open_on_disk(reference) if opened is None and self._cold is not None else opened

    # Parts of an object

    def open_object(self, bucket: str, key: str, seq: int | None = None) -> ObjectFile:
        """Opens an object as of a seq (by default the last applied one) as a file object: buffered, seekable, read by
        pieces. It has `size`, `metadata`, `seq` and `tier`, and shows this version until it is closed.
        """
        opened = self._open_object(bucket, key, seq, may_wait=True)
        assert opened is not None, "who may wait gets an answer"
        return opened

    def _open_object(self, bucket: str, key: str, seq: int | None, *, may_wait: bool) -> ObjectFile | None:
        """The same, or without `may_wait` None if the value has left this disk."""
        check_names(bucket, key)
        pin = self.pin(seq)
        opened: ObjectFile | None = None
        try:
            found = self._versions.find(bucket, key, pin.seq)
            if found is None:
                raise self._not_found(bucket, key, pin.seq)
            opened = self._opened_here(found, pin)
            if opened is None and may_wait:
                opened = self._opened_cold(found, bucket, key, pin)
            return opened
        finally:
            if opened is None:
                pin.release()

    def _opened_here(self, found: Found, pin: Pin) -> ObjectFile | None:
        if found.cell.codec != CODEC_FILE:
            whole = self._found_here(found)
            return None if whole is None else _in_memory(whole, pin)
        opened = self._open_here(reference_of(found.cell))
        if opened is None:
            return None
        try:
            metadata = opened.metadata()
        except BaseException:
            opened.close()
            raise

        def read(offset: int, length: int) -> bytes:
            began = self._begins()
            data = opened.data(offset, length)
            self._ends_hot(began)
            return data

        raw = RawObject(found.cell.size, read, pin, opened.close)
        return ObjectFile(raw, size=found.cell.size, metadata=metadata, seq=found.seq, tier="hot")

    def _opened_cold(self, found: Found, bucket: str, key: str, pin: Pin) -> ObjectFile:
        cell = found.cell
        if cell.codec != CODEC_FILE:
            return _in_memory(self.read(bucket, key, pin.seq), pin)
        value = self._cold_value(cell)
        ahead = ReadAheadValue(value, cell.size)
        raw = RawObject(cell.size, ahead.read, pin, ahead.forget)
        return ObjectFile(raw, size=cell.size, metadata=value.metadata(), seq=found.seq, tier="cold")

    def _read_range(
        self, bucket: str, key: str, seq: int | None, offset: int, length: int | None, *, may_wait: bool
    ) -> StoredObject | None:
        """Only the blocks of a value file that have these bytes are read; any other value is read whole, since its
        checksum covers all of it. Without `may_wait` None if the value has left this disk.
        """
        for what, number in (("offset", offset), ("length", length)):
            if number is not None and (type(number) is not int or number < 0):
                raise InputError(f"{what} must be a whole number from 0 on, not {number!r}")
        began = self._begins()
        check_names(bucket, key)
        with self.pin(seq) as at:
            found = self._versions.find(bucket, key, at)
            if found is None:
                raise self._not_found(bucket, key, at)
            here = self._range_here(found, offset, length)
            if here is not None:
                self._ends_hot(began)
            if here is not None or not may_wait:
                return here
            if found.cell.codec != CODEC_FILE:
                return _part_of(self.read(bucket, key, at), offset, length)
            with contextlib.closing(self._cold_value(found.cell)) as value:
                return _part_in_file(value, found, offset, length, "cold")

    def _range_here(self, found: Found, offset: int, length: int | None) -> StoredObject | None:
        if found.cell.codec != CODEC_FILE:
            whole = self._found_here(found)
            return None if whole is None else _part_of(whole, offset, length)
        opened = self._open_here(reference_of(found.cell))
        if opened is None:
            return None
        with contextlib.closing(opened) as value:
            return _part_in_file(value, found, offset, length, "hot")

    def _cold_value(self, cell: Cell) -> ColdValue:
        if self._cold is None:
            raise self._left(f"value file {reference_of(cell).name}")
        return self._cold.open_value(reference_of(cell))

    def _left(self, what: str) -> NotFoundError:
        return NotFoundError(
            f"the {what} has left this disk, and no store is known",
            path=self._directory,
            hint="Open the engine with the store that it was shipped to",
        )

    def _kept_from(self) -> int:
        """The first seq whose values are in the store: another process may have moved it while a state was pinned
        here.
        """
        published = 0 if self._cold is None else self._cold.history_start_seq
        return max(self._history.start_seq, published)

    def _look_again(self, bucket: str, key: str, seq: int | None, at: int) -> StoredObject:
        """Checks an object that was not found: if it was removed since this read began, the newest state has
        changed.
        """
        if seq is None and at < self._history.start_seq and not self._standing.is_closed:
            return self.read(bucket, key)
        raise self._not_found(bucket, key, at)

    def _read_cold(self, cell: Cell) -> Value:
        if self._cold is None:
            raise self._left(f"value at position {cell.position}")
        return self._cold.read(cell)

    def list_objects(
        self,
        bucket: str,
        prefix: str = "",
        seq: int | None = None,
        *,
        start_after: str | None = None,
        limit: int | None = None,
        delimiter: str = "",
    ) -> Iterator[ObjectInfo]:
        """Yields the objects of a bucket whose keys start with the prefix, in key order, as of a seq.

        `start_after` and `limit` paginate: pass the last key of one page as the start of the next. With a `delimiter`,
        keys that contain it after the prefix are grouped into one item, their common prefix (`is_prefix`), as in S3.
        """
        check_names(bucket)
        check_text("prefix", prefix)
        check_text("start_after", "" if start_after is None else start_after)
        check_text("delimiter", delimiter)
        check_limit(limit)
        pin = self.pin(seq)
        if self._buckets.created(bucket, pin.seq) is None:
            pin.check()
            raise self._no_bucket(bucket, pin.seq)
        most = None if limit is None else min(limit, sys.maxsize)
        return islice(chain.from_iterable(self._listed(pin, bucket, prefix, start_after, delimiter)), most)

    def _listed(
        self, pin: Pin, bucket: str, prefix: str, start_after: str | None, delimiter: str
    ) -> Iterator[Iterator[ObjectInfo]]:
        with pin as seq:
            for rows in self._versions.objects(bucket, prefix, seq, after=start_after, delimiter=delimiter):
                pin.check()
                if delimiter:
                    yield (ObjectInfo(key, size, put_seq, not put_seq) for key, size, put_seq in rows)
                else:
                    yield starmap(ObjectInfo, rows)

    def has_bucket(self, bucket: str, seq: int | None = None) -> bool:
        """Whether a bucket exists at a seq; by default the last applied one."""
        check_names(bucket)
        with self.pin(seq) as at:
            return self._buckets.created(bucket, at) is not None

    def find_object(self, bucket: str, key: str, seq: int | None = None) -> ObjectInfo | None:
        """Returns size and seq of an object without reading it; None if the object or the bucket does not exist."""
        check_names(bucket, key)
        with self.pin(seq) as at:
            found = self._versions.find(bucket, key, at)
        return None if found is None else ObjectInfo(key, found.cell.size, found.seq)

    def list_buckets(self, seq: int | None = None) -> list[str]:
        """Returns the names of all buckets at a seq, sorted."""
        at = self._checked_read_seq(self._marks.applied_seq if seq is None else seq)
        return [name for name, _ in self._buckets.alive(at)]

    def versions(self, bucket: str, key: str) -> list[VersionInfo]:
        """Returns all kept versions of an object, newest first, including deletions."""
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
        """Returns a digest of the whole state at a seq: equal on every replica and after every restore."""
        digest = Digest()
        with self.pin(seq) as at:
            for bucket, created in self._buckets.alive(at):
                name = bucket.encode()
                digest.add_bucket(name, created.seq)
                rows = chain.from_iterable(self._versions.objects(bucket, "", at, columns=WITH_CRC))
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
                # If nothing was applied meanwhile, the start of history in a checkpoint is meaningless.
                if seq is not None or at == self._marks.applied_seq:
                    raise
                continue
            if at <= self._marks.applied_seq:
                return pin  # any rollback from here on ends it
            pin.release()

    def _tier_of(self, cell: Cell) -> Tier | None:
        if cell.is_tombstone:
            return None
        if cell.inline is None:
            is_here = cell.position >= self._local.first_position
        else:
            is_here = cell.codec != CODEC_FILE or self._value_files.has(reference_of(cell).name)
        return "hot" if is_here or (self._cold is not None and self._cold.has_on_disk(cell)) else "cold"

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
        """Makes reads that follow find nothing, so that they check why."""
        self._standing.is_closed = True
        self._buckets = Buckets()


# Object metadata without the data: from the version index, and if there is user metadata, from the value.
#
# Invariants
# - An object without metadata needs no read of its value, wherever that is. Of a value file the first block is enough.
# - Metadata of a value in the store is read alone: exactly that of an uncompressed one, and the first block of a
#   compressed one (at most 128 KiB). Where the store has records in compressed blocks, a block is the least to read.
# - On this disk that of a large, uncompressed value is read alone. The checksum covers the whole value and is not
#   verified where metadata is read alone; lengths are, against the index. Everything else is read and verified as by
#   `read`.


# Up to this size, reading the whole value from this disk costs about as much as its beginning, and can be verified.
_CHECKED_BYTES = 64 << 10


class EngineStat(EngineReading):
    """The `stat` method of an engine."""

    def stat(self, bucket: str, key: str, seq: int | None = None) -> ObjectStat:
        """Returns an object as of a seq (by default the last applied one), without its data."""
        known = self._stat_alone(bucket, key, seq)
        if known is not None:
            return known
        found = self._large_object(bucket, key, seq)
        if found is None:
            return self._stat_cold(bucket, key, seq) or _stat_of(self.read(bucket, key, seq))
        metadata = self._cold_value(found.cell).metadata()
        return ObjectStat(found.cell.size, metadata, found.seq, "cold", found.cell.crc)

    def _stat_cold(self, bucket: str, key: str, seq: int | None) -> ObjectStat | None:
        """By the beginning of a value in the store; None if it is to be read whole, which also says what is wrong."""
        at = self._checked_seq(self._marks.applied_seq if seq is None else seq)
        found = self._versions.find(bucket, key, at)
        if found is None or self._cold is None or found.cell.inline is not None or self._where(found) != "cold":
            return None
        with contextlib.suppress(TidelogError):
            cell = self._placed(bucket, key, found.seq, found.cell)
            metadata = self._cold.metadata(cell)
            if metadata is not None:
                return ObjectStat(cell.size, metadata, found.seq, "cold", cell.crc)
        return None

    def _large_object(self, bucket: str, key: str, seq: int | None) -> Found | None:
        """A version whose value has a file of its own."""
        at = self._checked_seq(self._marks.applied_seq if seq is None else seq)
        found = self._versions.find(bucket, key, at)
        return None if found is None or found.cell.codec != CODEC_FILE else found

    def _stat_here(self, bucket: str, key: str, seq: int | None) -> ObjectStat | None:
        """Like `stat`, without asking the store; None if that has to be asked."""
        known = self._stat_alone(bucket, key, seq)
        if known is None and self._large_object(bucket, key, seq) is not None:
            return None
        whole = self._read_here(bucket, key, seq) if known is None else None
        return known if whole is None else _stat_of(whole)

    def _stat_alone(self, bucket: str, key: str, seq: int | None) -> ObjectStat | None:
        """By what the index knows; None if the value is needed, or the object does not exist."""
        check_names(bucket, key)
        at = self._checked_seq(self._marks.applied_seq if seq is None else seq)
        found = self._versions.find(bucket, key, at)
        known = None if found is None else self._metadata_alone(found.cell)
        if found is None or known is None:
            return None
        return ObjectStat(found.cell.size, known, found.seq, self._where(found), found.cell.crc)

    def _metadata_alone(self, cell: Cell) -> dict[str, MetadataValue] | None:
        """Returns the metadata, if it can be read without the whole value, and without the store."""
        if cell.codec == CODEC_FILE:
            return self._metadata_in_file(cell)
        head_bytes = cell.stored_bytes - cell.size
        if cell.codec == CODEC_NONE and head_bytes == LENGTH_BYTES:
            return {}
        if not _is_head_enough(cell):
            return None
        head = self._read_stored(cell.position, head_bytes)
        return None if head is None else decode_metadata(head, cell.lsn)

    def _metadata_in_file(self, cell: Cell) -> dict[str, MetadataValue] | None:
        reference = reference_of(cell)
        if not reference.metadata_bytes:
            return {}
        opened = self._open_here(reference)
        if opened is None:
            return None
        with contextlib.closing(opened):
            return opened.metadata()

    def _where(self, found: Found) -> Tier:
        tier = self._tier_of(found.cell)
        assert tier is not None  # a deletion is not found
        return tier


def _nothing() -> None:
    """There is nothing to close."""


def _in_memory(whole: StoredObject, pin: Pin) -> ObjectFile:
    view = memoryview(whole.data)
    raw = RawObject(len(view), lambda offset, length: view[offset : offset + length], pin, _nothing)
    return ObjectFile(raw, size=len(view), metadata=whole.metadata, seq=whole.seq, tier=whole.tier)


def _part_of(whole: StoredObject, offset: int, length: int | None) -> StoredObject:
    stop = None if length is None else offset + length
    return StoredObject(whole.data[offset:stop], whole.metadata, whole.seq, whole.tier)


def _part_in_file(
    value: OpenValue | ColdValue, found: Found, offset: int, length: int | None, tier: Tier
) -> StoredObject:
    data = value.data(offset, found.cell.size if length is None else length)
    return StoredObject(data, value.metadata(), found.seq, tier)


def _is_head_enough(cell: Cell) -> bool:
    """Whether the metadata of a value in the log on this disk is read without its data."""
    head_bytes = cell.stored_bytes - cell.size
    is_possible = cell.codec == CODEC_NONE and LENGTH_BYTES < head_bytes <= LENGTH_BYTES + MAX_METADATA_BYTES
    return is_possible and cell.stored_bytes > _CHECKED_BYTES


def _stat_of(whole: StoredObject) -> ObjectStat:
    crc = object_crc(whole.data, whole.metadata)
    return ObjectStat(len(whole.data), whole.metadata, whole.seq, whole.tier, crc)
