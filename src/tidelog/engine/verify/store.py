"""Verifies what an engine has in its store: log objects, catalog, manifest, snapshots and files named by their content.

Invariants
- Nothing is changed, and no lock is taken: it runs beside the owner, and beside jobs that change the store.
- Every record is decoded with its page updates, and every value in a record or in a file of its own is compared with
  its checksum.
- Descriptors follow each other in LSNs and in positions; the manifest's marks are where the objects end, and the record
  at the high-water LSN completes the entry of the high-water mark.
- From the oldest snapshot on every record is present: otherwise a restore from it would fail.
- Fit for executors: Spark's tasks call the same checks.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from tidelog._native import sound_records
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.verify import LOOKS, ColdCheck, ObjectFinding, check_object
from tidelog.engine.btree.page import Update
from tidelog.engine.btree.page import decode as decode_updates
from tidelog.engine.cold.manifest import Manifest, read_manifest
from tidelog.engine.cold.value_store import stored_values
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.sorted_index import read_compaction
from tidelog.engine.sst.sstable import RowPart
from tidelog.engine.sst.value_file import ValueName, check_value_file, decode_reference
from tidelog.engine.wal.operations import OperationRecord
from tidelog.engine.wal.records import Record, decode_record
from tidelog.engine.wal.value import CODEC_FILE, decode_value
from tidelog.errors import DataError, NotFoundError
from tidelog.findings import About, Finding, OnStep, VerifyReport, ignore_step
from tidelog.log.frame import Frames
from tidelog.log.repair import is_lost
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore

FIRST_LSN = 1
RANGE_BYTES = 4 << 20
# How many problems of one object are reported: the first ones say what happened.
_MOST_FINDINGS = 20
FIX = "`tidelog engine restore` makes a new copy; what is damaged in the store is read from replicas"


def about_engine(name: str, fix: str = FIX) -> About:
    """The subject of findings about an engine."""
    return About(f"engine {name}", "LSN", fix)


def checked_record(payload: bytes, lsn: int) -> tuple[Record, list[Update]]:
    """A record and its page updates; DataError says what is wrong with it."""
    if is_lost(payload):
        raise DataError(f"LSN {lsn}: a record that a repair could not save")
    record = decode_record(payload, lsn)
    return record, list(decode_updates(getattr(record, "updates", b""), lsn))


def check_stored(record: OperationRecord, lsn: int) -> None:
    """Checks the value in a record, or the reference to its file; DataError says what is wrong."""
    if record.codec == CODEC_FILE:
        decode_reference(record.stored, record.size, record.crc, lsn)
    else:
        decode_value(record.stored, record.codec, record.size, record.crc, lsn)


class LogObject(ObjectFinding, frozen=True, kw_only=True):
    """What an object of the log has. `high_water_seq` is the entry that ends at the high-water LSN."""

    records: int = 0
    entries: int = 0
    values: int = 0
    high_water_lsn: int = 0
    high_water_seq: int | None = None


def check_log_object(
    objects: ObjectStore,
    keys: EngineKeys,
    descriptor: Descriptor,
    high_water_lsn: int,
    on_bytes: Callable[[int], None] | None = None,
) -> LogObject:
    """Reads all of it."""
    reading = _Records(about_engine(keys.name), keys.object(descriptor.name), high_water_lsn)
    found = check_object(objects, keys, descriptor, reading.about, on_bytes=on_bytes, check=reading.take)
    return LogObject(
        **msgspec.structs.asdict(found),
        records=reading.records,
        entries=reading.entries,
        values=reading.values,
        high_water_lsn=high_water_lsn,
        high_water_seq=reading.high_water_seq,
    )


class _Records:
    """The records of one object."""

    def __init__(self, about: About, key: str, high_water_lsn: int) -> None:
        self.about = about
        self._key = key
        self._high_water_lsn = high_water_lsn
        self._found = 0
        self.records = 0
        self.entries = 0
        self.values = 0
        self.high_water_seq: int | None = None

    def take(self, frames: Frames) -> Iterator[Finding]:
        """The next records; of those that are sound by C alone, no object is made."""
        entries, values, others = sound_records(frames.first_offset, frames.buffer, frames.positions, frames.lengths)
        self.records += frames.count
        self.entries += entries
        self.values += values
        for index in others:
            lsn = frames.first_offset + index
            try:
                record, _ = checked_record(frames.payloads(index, index + 1)[0], lsn)
                if isinstance(record, OperationRecord):
                    self._check_operation(record, lsn)
            except DataError as error:
                self._found += 1
                if self._found <= _MOST_FINDINGS:
                    yield self.about.finding("record", self._key, error.message)
        self._look_at_mark(frames)

    def _check_operation(self, record: OperationRecord, lsn: int) -> None:
        self.entries += record.is_last
        if record.stored_bytes:
            check_stored(record, lsn)
            self.values += 1

    def _look_at_mark(self, frames: Frames) -> None:
        """Which entry ends with the record that the manifest calls the last entry's."""
        index = self._high_water_lsn - frames.first_offset
        if 0 <= index < frames.count:
            with contextlib.suppress(DataError):  # told above
                record, _ = checked_record(frames.payloads(index, index + 1)[0], self._high_water_lsn)
                if isinstance(record, OperationRecord) and record.is_last:
                    self.high_water_seq = record.transaction


class EngineLog(ColdCheck[LogObject]):
    """What is known of an engine's shipped log so far."""

    def __init__(self, metadata: MetadataStore, keys: EngineKeys) -> None:
        super().__init__(about_engine(keys.name), Catalog(metadata, keys), FIRST_LSN)
        self.manifest: Manifest | None = None
        self._keys = keys
        self._has_owner = True

    def look_at(self, manifest: Manifest | None) -> None:
        """Reads the catalog, again; the manifest was read before it."""
        self.catalog = Catalog(self.catalog.metadata, self._keys)  # one remembers which descriptors it has seen
        self.manifest = manifest
        self.look()
        with contextlib.suppress(DataError):  # the look tells of it
            self._has_owner = self.catalog.owner() is not None

    @property
    def high_water_lsn(self) -> int:
        """Which record the manifest calls the last entry's."""
        return 0 if self.manifest is None else self.manifest.high_water_lsn

    def findings(self) -> Iterator[Finding]:
        """All that is wrong, in the order of the catalog; then the marks of the manifest."""
        yield from super().findings()
        if self.descriptors and not self._has_owner:
            yield self.about.finding("catalog", None, "nobody is written down as the owner of the engine")
        yield from self._position_findings()
        if self.manifest is not None:
            yield from self._mark_findings(self.manifest)

    def _position_findings(self) -> Iterator[Finding]:
        expected: int | None = None
        for one in self.descriptors:
            key = self._keys.descriptor(one.start_offset)
            if not isinstance(one.position, int):
                yield self.about.finding("catalog", key, "it does not say its position in the log")
                expected = None
                continue
            if expected is not None and one.position != expected:
                reason = f"it begins at position {one.position}, and the object before ends at {expected}"
                yield self.about.finding("catalog", key, reason)
            expected = one.position + one.raw_size

    def _mark_findings(self, manifest: Manifest) -> Iterator[Finding]:
        end_lsn = self.next_offset
        if manifest.shipped_lsn > max(1, end_lsn):
            shipped = manifest.shipped_lsn - 1
            yield self._mark(f"it says that LSN {shipped} is shipped, and the catalog ends at {end_lsn - 1}")
        last = next((one for one in self.descriptors if one.next_offset == manifest.shipped_lsn), None)
        if last is not None and isinstance(last.position, int):
            position = last.position + last.raw_size
            if position != manifest.shipped_position:
                yield self._mark(f"it says position {manifest.shipped_position}, the objects end at {position}")
        yield from self._high_water_findings(manifest)
        start = FIRST_LSN if self.seen is None else self.seen.start_offset
        if not manifest.checkpoints and start > FIRST_LSN:
            yield self._mark(f"it names no snapshot, and the log begins at LSN {start}")
        for state in manifest.checkpoints:
            if state.lsn < start:
                reason = f"it goes on with LSN {state.lsn}, and the log begins at LSN {start}"
                yield self.about.finding("snapshot", state.key, reason)

    def _high_water_findings(self, manifest: Manifest) -> Iterator[Finding]:
        lsn = manifest.high_water_lsn
        holder = next((one for one in self.descriptors if one.start_offset <= lsn <= one.end_offset), None)
        found = None if holder is None else self.found.get(holder.object_id)
        if found is None or found.is_gone or found.findings or found.high_water_lsn != lsn:
            return  # dropped behind a compaction, told already, or read for another mark
        if found.high_water_seq != manifest.high_water_mark:
            said = f"it says that seq {manifest.high_water_mark} is complete with LSN {lsn}"
            there = "no entry ends there" if found.high_water_seq is None else f"seq {found.high_water_seq} ends there"
            yield self._mark(f"{said}, and {there}")

    def _mark(self, reason: str) -> Finding:
        return self.about.finding("manifest", self._keys.engine_manifest, reason)


def check_named_file(objects: ObjectStore, keys: EngineKeys, part: RowPart) -> Iterator[Finding]:
    """A file that is named by its content has that content."""
    name = keys.parse_compacted(part.key) or keys.parse_state_part(part.key)
    try:
        digest, size = content_digest(objects, part.key)
        if size != part.size:
            raise DataError(f"it has {size} bytes, and {part.size} are written down")
        if name is None or digest != name.digest:
            raise DataError("content does not match the digest in the name")
    except (DataError, NotFoundError) as error:
        yield about_engine(keys.name).finding_of(error, "index", part.key)


def check_stored_value(objects: ObjectStore, keys: EngineKeys, name: ValueName, size: int) -> Finding | None:
    """A value file has what its name says; NotFoundError if nobody refers to it any more, and it is gone."""
    key = keys.values_prefix + str(name)
    try:
        for _ in check_value_file(name, size, partial(objects.read_range, key), key):
            pass
    except DataError as error:
        return about_engine(keys.name).finding_of(error, "value", key)
    return None


def content_digest(objects: ObjectStore, key: str) -> tuple[str, int]:
    """Digest and size of a file, as it is named by them; one range of it is in memory."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    while data := objects.read_range(key, size, RANGE_BYTES):
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size


def verify_store(
    objects: ObjectStore,
    metadata: MetadataStore,
    keys: EngineKeys,
    applied_seq: int | None = None,
    on_step: OnStep = ignore_step,
) -> VerifyReport:
    """Reads every object, snapshot and index file. `applied_seq` is that of the engine on this disk, if it is known."""
    return _StoreCheck(objects, metadata, keys, on_step).run(applied_seq)


class _StoreCheck:
    """The store of one engine, read by this process."""

    def __init__(self, objects: ObjectStore, metadata: MetadataStore, keys: EngineKeys, on_step: OnStep) -> None:
        self._objects = objects
        self._metadata = metadata
        self._keys = keys
        self._on_step = on_step
        self._about = about_engine(keys.name)
        self._log = EngineLog(metadata, keys)
        self._findings: list[Finding] = []
        self._snapshots = 0
        self._value_files = 0

    def run(self, applied_seq: int | None) -> VerifyReport:
        self._read_log()
        manifest = self._log.manifest
        if manifest is not None:
            if applied_seq is not None and manifest.high_water_mark > applied_seq:
                text = f"seq {manifest.high_water_mark} is in the store, and this directory is at seq {applied_seq}"
                reason = f"{text}: it was set back, or is owned elsewhere"
                self._findings.append(self._about.finding("manifest", self._keys.engine_manifest, reason))
            self._read_snapshots(manifest)
            self._read_index(manifest)
        self._read_values()
        read = [one for one in self._log.read() if not one.is_gone]
        return VerifyReport(
            subject=self._about.subject,
            findings=tuple(self._findings),
            read={
                "objects": len(read),
                "object_bytes": sum(one.size for one in read),
                "records_in_store": sum(one.records for one in read),
                "states": self._snapshots,
                "value_files": self._value_files,
            },
        )

    def _manifest(self) -> Manifest | None:
        found = read_manifest(self._metadata, self._keys)
        return None if found is None else found[0]

    def _read_log(self) -> None:
        try:
            manifest = self._manifest()
        except DataError as error:
            manifest = None
            self._findings.append(self._about.finding_of(error, "manifest", self._keys.engine_manifest))
        for _ in range(LOOKS):
            self._log.look_at(manifest)
            self._read_objects()
            if self._log.is_settled:
                break
            manifest = manifest and self._manifest()
        self._findings += self._log.findings()

    def _read_objects(self) -> None:
        works = self._log.works()
        done, total = 0, sum(one.size for one in works)

        def on_bytes(size: int) -> None:
            nonlocal done
            done += size
            self._on_step("reading the store", done, total)

        for one in works:
            self._log.found[one.object_id] = check_log_object(
                self._objects, self._keys, one, self._log.high_water_lsn, on_bytes
            )

    def _read_snapshots(self, manifest: Manifest) -> None:
        for number, listed in enumerate(manifest.checkpoints):
            self._on_step("reading snapshots", number, len(manifest.checkpoints))
            try:
                for _ in StoredState(self._objects, listed).rows():
                    pass
                self._snapshots += 1
            except (DataError, NotFoundError) as error:
                newest = self._manifest()
                if newest is None or listed in newest.checkpoints:  # else it was superseded while it was read
                    found = self._about.finding_of(error, "snapshot")
                    self._findings.append(msgspec.structs.replace(found, path=listed.key))

    def _read_values(self) -> None:
        """Every value file has what its name says."""
        for name, size in stored_values(self._objects, self._keys).items():
            with contextlib.suppress(NotFoundError):
                found = check_stored_value(self._objects, self._keys, name, size)
                self._value_files += found is None
                self._findings += [] if found is None else [found]

    def _read_index(self, manifest: Manifest) -> None:
        if manifest.compacted is None:
            return
        found: list[Finding] = []
        try:
            root = read_compaction(self._objects, self._keys, manifest.compacted)
            for part in (*root.versions, *root.values):
                found += check_named_file(self._objects, self._keys, part)
        except (DataError, NotFoundError) as error:
            found.append(self._about.finding_of(error, "index", manifest.compacted.key))
        newest = self._manifest() if found else None
        if newest is None or newest.compacted == manifest.compacted:
            self._findings += found
