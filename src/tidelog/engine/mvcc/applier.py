"""Applying entries: each operation becomes a WAL record and a change in the tree; and the rules that decide whether an
entry is allowed (`Rules`).

Invariants
- One at a time: the caller holds the engine's lock. The engine is the only writer of its WAL, so the LSN and the
  position of a record are known before it is built.
- The record first, then the page, with the record's LSN. No change reaches the page file before its record is durable:
  the buffer pool ensures that (write-ahead logging).
- All operations of an entry are validated before the first is written, and so are the reads of a guarded one. A refused
  entry is logged as refused, and changes nothing.
- A value is written once, in its record, or in a value file that is durable before its record. Copies and later
  versions of the tree point to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain, starmap
from typing import Final, NamedTuple

from tidelog._native import object_key, put_record, stored_record
from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog
from tidelog.cold.reader import History
from tidelog.engine.btree.page import CELL_HEADER_BYTES, REPLACE, Update, encode, encode_insert, get
from tidelog.engine.btree.tree import Tree
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.entry import (
    MAX_DATA_BYTES,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    ObjectInfo,
    Operation,
    PutFile,
    PutObject,
    Result,
    has_condition,
    operations,
)
from tidelog.engine.mvcc.cells import (
    MAX_INLINE_HEAD_BYTES,
    MAX_POINTER_BYTES,
    MAX_SEQ,
    Cell,
    at,
    bucket_prefix,
    encode_bucket,
    encode_tombstone,
    object_prefix,
    with_order,
)
from tidelog.engine.mvcc.known_results import NOTHING_KNOWN, KnownResults, ResultTable, print_of
from tidelog.engine.mvcc.versions import BucketVersion, Versions
from tidelog.engine.settings import EngineSettings
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.value_file import encode_reference
from tidelog.engine.txn.read_set import Carried, Guarded, batch_of
from tidelog.engine.value_files import StagedFile
from tidelog.engine.wal.operations import OperationRecord, decode_operation, encode_operation, names_of, same_entry
from tidelog.engine.wal.record_header import LAST, PART_OF_BATCH, REFUSED, decode_operation_head
from tidelog.engine.wal.ship_watermark import LsnRange, SeqIndex
from tidelog.engine.wal.value import CODEC_FILE, NO_VALUE, StoredValue, ValueEncoder, size_and_crc
from tidelog.engine.wal.wal import Wal
from tidelog.errors import DataError, InputError, InternalError, NotFoundError, OffsetOutOfRangeError
from tidelog.store.object_store import ObjectStore

# What the state allows: whether an entry can be applied, and why not.
#
# Invariants
# - The answer depends on the preceding entries alone, so it is the same on every replica.
# - A batch is validated as a whole, each operation after those before it; one refused operation refuses all of it.
#   Deleting an object that does not exist is allowed, and changes nothing.
# - Conditions of operations are decided here and nowhere else: what reads the log later (a restore, Spark, a replica of
#   the store) finds the verdict in the record.


class Rules:
    """The newest state, as the operations of one entry see it."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def refusal_of_guarded(self, guarded: Guarded, operations: tuple[Operation, ...], seq: int) -> str | None:
        """The same for what must also find true what was read for it."""
        return guarded.refusal(self) or self.refusal(operations, seq)

    def seq_of(self, bucket: str, key: str) -> int:
        """The seq of the newest visible version of an object; 0 for none. For guards."""
        found = self._versions.find(bucket, key, MAX_SEQ)
        return 0 if found is None else found.seq

    def listing(self, bucket: str, prefix: str) -> Iterator[ObjectInfo] | None:
        """The objects of a bucket; None when there is no such bucket. For guards."""
        if not self.allows_put(bucket):
            return None
        return starmap(ObjectInfo, chain.from_iterable(self._versions.objects(bucket, prefix, MAX_SEQ)))

    def refusal(self, operations: tuple[Operation, ...], seq: int) -> str | None:
        """Why the entry of this seq cannot be applied; None if it can."""
        state = _State(self._versions, seq)
        if len(operations) == 1:
            return state.refusal(operations[0])
        for number, operation in enumerate(operations):
            reason = state.refusal(operation)
            if reason is not None:
                return f"operation {number}: {reason}"
            state.note(operation)
        return None

    def allows_put(self, bucket: str) -> bool:
        """The fast path for the most frequent entry."""
        return self._versions.buckets.created(bucket, MAX_SEQ) is not None


class _State:
    """The state overlaid with the changes of a batch that is not applied yet."""

    def __init__(self, versions: Versions, seq: int) -> None:
        self._versions = versions
        self._seq = seq
        self._buckets: dict[str, bool] = {}
        self._objects: dict[tuple[str, str], _Object | None] = {}
        """What the batch has written, all of it with its own seq."""

    def refusal(self, operation: Operation) -> str | None:
        match operation:
            case CreateBucket(bucket):
                return f"there is a bucket {bucket!r} already" if self._has_bucket(bucket) else None
            case DeleteBucket(bucket, force):
                return self._refusal_of_delete(bucket, force=force)
            case CopyObject(src_bucket, src_key, dest_bucket, dest_key):
                return (
                    self._no_bucket(src_bucket)
                    or self._no_object(src_bucket, src_key)
                    or self._no_bucket(dest_bucket)
                    or self._unmet(operation, dest_bucket, dest_key)
                )
            case PutObject(bucket, key) | DeleteObject(bucket, key):
                return self._no_bucket(bucket) or self._unmet(operation, bucket, key)

    def note(self, operation: Operation) -> None:
        """The operation is done, as far as those after it are concerned."""
        match operation:
            case CreateBucket(bucket):
                self._buckets[bucket] = True
            case DeleteBucket(bucket):
                self._buckets[bucket] = False
                self._objects = {name: there for name, there in self._objects.items() if name[0] != bucket}
            case PutObject(bucket, key):
                self._objects[bucket, key] = _Object(self._seq, operation)
            case CopyObject(src_bucket, src_key, bucket, key):
                source = self._object(src_bucket, src_key)
                self._objects[bucket, key] = None if source is None else _Object(self._seq, source.value)
            case DeleteObject(bucket, key):
                self._objects[bucket, key] = None

    def _refusal_of_delete(self, bucket: str, *, force: bool) -> str | None:
        missing = self._no_bucket(bucket)
        if missing is not None or force or self._is_empty(bucket):
            return missing
        return f"the bucket {bucket!r} is not empty"

    def _no_bucket(self, bucket: str) -> str | None:
        return None if self._has_bucket(bucket) else f"there is no bucket {bucket!r}"

    def _no_object(self, bucket: str, key: str) -> str | None:
        return f"there is no object {key!r} in {bucket!r}" if self._object(bucket, key) is None else None

    def _unmet(self, operation: PutObject | DeleteObject | CopyObject, bucket: str, key: str) -> str | None:
        """Which condition of an operation does not hold."""
        if not has_condition(operation):
            return None
        found = self._object(bucket, key)
        if isinstance(operation, PutObject | CopyObject) and operation.if_absent:
            return None if found is None else f"if_absent: {bucket!r}/{key!r} is there, with seq {found.seq}"
        if found is None:
            return f"if_match: there is no object {key!r} in {bucket!r}"
        if operation.if_match not in (None, found.seq):
            return f"if_match: {bucket!r}/{key!r} has seq {found.seq}, not {operation.if_match}"
        if operation.if_match_crc not in (None, found.crc):
            return f"if_match_crc: {bucket!r}/{key!r} has crc {found.crc}, not {operation.if_match_crc}"
        return None

    def _has_bucket(self, bucket: str) -> bool:
        known = self._buckets.get(bucket)
        return self._versions.buckets.created(bucket, MAX_SEQ) is not None if known is None else known

    def _object(self, bucket: str, key: str) -> _Object | None:
        if (bucket, key) in self._objects:
            return self._objects[bucket, key]
        if bucket in self._buckets:
            return None  # a bucket that this batch has made has none of the objects of an earlier one of that name
        found = self._versions.find(bucket, key, MAX_SEQ)
        return None if found is None else _Object(found.seq, found.cell)

    def _is_empty(self, bucket: str) -> bool:
        if any(there is not None for (name, _), there in self._objects.items() if name == bucket):
            return False
        if bucket in self._buckets:
            return True
        return all(self._objects.get((bucket, key), self) is None for key in self._versions.names(bucket, MAX_SEQ))


class _Object(NamedTuple):
    """An object that an operation meets. The checksum of what the same batch has put is computed if it is asked for."""

    seq: int
    value: PutObject | Cell

    @property
    def crc(self) -> int:
        """The checksum of data and metadata."""
        value = self.value
        return size_and_crc(value)[1] if isinstance(value, PutObject) else value.crc


class Applier:
    """Turns entries into WAL records and changes of the tree."""

    def __init__(self, tree: Tree, wal: Wal, versions: Versions, settings: EngineSettings, clock: Clock) -> None:
        self._tree = tree
        self._pages = tree.pool.pages
        self._wal = wal
        self._versions = versions
        self._rules = Rules(versions)
        self._clock = clock
        self._inline_bytes = settings.inline_value_bytes
        self._values = ValueEncoder(settings.wal_compression, settings.wal_compression_level)
        # Data above this size is stored in the log as it is; none is where everything is compressed.
        self._plain_above = settings.inline_value_bytes if settings.wal_compression == "none" else MAX_DATA_BYTES
        self._time_us = 0

    def begin(self) -> None:
        """What is applied from here on happens at one time."""
        self._time_us = self._clock.now_us()

    def apply(self, seq: int, entry: Carried) -> Result:
        """Applies an entry, or logs why it is refused. It is durable once the WAL is committed."""
        if type(entry) is PutObject and not has_condition(entry) and self._rules.allows_put(entry.bucket):
            self._put(seq, entry, LAST, 0, 0)
            return Result(seq, "applied")
        parts = operations(batch_of(entry))
        if isinstance(entry, Guarded):
            reason = self._rules.refusal_of_guarded(entry, parts, seq)
        else:
            reason = self._rules.refusal(parts, seq)
        if reason is not None:
            return self._refuse(seq, parts, reason)
        return self._apply_all(seq, parts)

    def _apply_all(self, seq: int, parts: tuple[Operation, ...]) -> Result:
        previous_lsn, changed, last = 0, False, len(parts) - 1
        shared = PART_OF_BATCH if last else 0
        for order, operation in enumerate(parts):
            flags = shared | (LAST if order == last else 0)
            lsn = self._wal.next_lsn
            changed |= self._apply_one(seq, operation, flags, previous_lsn, order)
            # Splits and images come before the record itself, so its LSN is the newest.
            previous_lsn = self._wal.next_lsn - 1
            assert previous_lsn >= lsn
        return Result(seq, "applied" if changed else "nothing")

    def _apply_one(self, seq: int, operation: Operation, flags: int, previous_lsn: int, order: int) -> bool:
        """Whether it changed anything."""
        match operation:
            case PutObject():
                self._put(seq, operation, flags, previous_lsn, order)
            case DeleteObject():
                return self._delete(seq, operation, flags, previous_lsn, order)
            case CopyObject():
                self._copy(seq, operation, flags, previous_lsn, order)
            case CreateBucket() | DeleteBucket():
                self._change_bucket(seq, operation, flags, previous_lsn, order)
        return True

    def _refuse(self, seq: int, parts: tuple[Operation, ...], reason: str) -> Result:
        previous_lsn, last = 0, len(parts) - 1
        shared = REFUSED | (PART_OF_BATCH if last else 0)
        for order, operation in enumerate(parts):
            value = NO_VALUE
            if isinstance(operation, PutFile):
                value = StoredValue(b"", CODEC_FILE, operation.size, operation.crc)
            elif isinstance(operation, PutObject):
                value = self._values.store(operation.data, operation.metadata)
            previous_lsn = self._wal.add(
                encode_operation(
                    operation,
                    seq,
                    flags=shared | (LAST if order == last else 0),
                    previous_lsn=previous_lsn,
                    time_us=self._time_us,
                    order=order,
                    value=value,
                    reason=reason,
                )
            )
        return Result(seq, "refused", reason)

    # One of each kind

    def _put(self, seq: int, operation: PutObject, flags: int, previous_lsn: int, order: int) -> None:
        """The common one in one step: the first of its entry, large enough for the log, without metadata."""
        data = operation.data
        if order or operation.metadata or len(data) <= self._plain_above:
            self._put_any(seq, operation, flags, previous_lsn, order)
            return
        wal, bucket, name = self._wal, operation.bucket, operation.key
        key = object_key(bucket, name, seq)
        page = self._tree.prepare(key, CELL_HEADER_BYTES + len(key) + MAX_POINTER_BYTES)
        record, value = put_record(
            seq, flags, previous_lsn, self._time_us, order, bucket, name, data, page, wal.next_lsn, wal.next_position
        )
        self._tree.insert(page, key, value, wal.add(record))

    def _put_any(self, seq: int, operation: PutObject, flags: int, previous_lsn: int, order: int) -> None:
        wal, bucket, name = self._wal, operation.bucket, operation.key
        key = object_key(bucket, name, seq)
        if isinstance(operation, PutFile):
            stored, codec, size, crc = self._installed(operation, seq, order)
        else:
            stored, codec, size, crc = self._values.store(operation.data, operation.metadata)
        is_inline = codec == CODEC_FILE or len(stored) <= self._inline_bytes
        room = MAX_INLINE_HEAD_BYTES + len(stored) if is_inline else MAX_POINTER_BYTES
        page, old = self._prepare(key, room, order)
        record, value = stored_record(
            seq,
            flags,
            previous_lsn,
            self._time_us,
            order,
            bucket,
            name,
            stored,
            page,
            wal.next_lsn,
            wal.next_position,
            codec,
            size,
            crc,
            is_inline,
        )
        if old is not None:
            updates = encode(Update(page, REPLACE, key, value, old))
            record = record[: decode_operation_head(record, 0).updates_offset] + updates
        self._change(page, key, value, old, wal.add(record))

    def _installed(self, operation: PutFile, seq: int, order: int) -> StoredValue:
        """Gives a staged file its name, which is durable before the record is."""
        staged: StagedFile = operation.file
        return StoredValue(encode_reference(staged.install(seq, order)), CODEC_FILE, operation.size, operation.crc)

    def _delete(self, seq: int, operation: DeleteObject, flags: int, previous_lsn: int, order: int) -> bool:
        """Whether there was something to delete; the record is written in any case, the seq is used."""
        found = self._versions.find(operation.bucket, operation.key, seq)
        if found is None:
            self._add(operation, seq, flags, previous_lsn, order, NO_VALUE, b"")
            return False
        key = at(object_prefix(operation.bucket, operation.key), seq)
        self._log_change(operation, seq, flags, previous_lsn, order, NO_VALUE, key, encode_tombstone(order))
        return True

    def _copy(self, seq: int, operation: CopyObject, flags: int, previous_lsn: int, order: int) -> None:
        found = self._versions.find(operation.src_bucket, operation.src_key, seq)
        if found is None:
            raise InternalError(f"seq {seq} copies an object that does not exist, and was not refused")
        key = at(object_prefix(operation.dest_bucket, operation.dest_key), seq)
        source = StoredValue(b"", 0, found.cell.size, found.cell.crc)
        self._log_change(operation, seq, flags, previous_lsn, order, source, key, with_order(found.cell, order))

    def _change_bucket(
        self, seq: int, operation: CreateBucket | DeleteBucket, flags: int, previous_lsn: int, order: int
    ) -> None:
        is_deleted = isinstance(operation, DeleteBucket)
        key = at(bucket_prefix(operation.bucket), seq)
        value = encode_bucket(order, is_deleted=is_deleted)
        self._log_change(operation, seq, flags, previous_lsn, order, NO_VALUE, key, value)
        self._versions.buckets.note(operation.bucket, BucketVersion(seq, order, is_deleted))

    # Record and page

    def _log_change(
        self,
        operation: Operation,
        seq: int,
        flags: int,
        previous_lsn: int,
        order: int,
        value: StoredValue,
        key: bytes,
        cell: bytes,
    ) -> None:
        page, old = self._prepare(key, len(cell), order)
        updates = encode_insert(page, key, cell) if old is None else encode(Update(page, REPLACE, key, cell, old))
        lsn = self._add(operation, seq, flags, previous_lsn, order, value, updates)
        self._change(page, key, cell, old, lsn)

    def _add(
        self,
        operation: Operation,
        seq: int,
        flags: int,
        previous_lsn: int,
        order: int,
        value: StoredValue,
        updates: bytes,
    ) -> int:
        return self._wal.add(
            encode_operation(
                operation,
                seq,
                flags=flags,
                previous_lsn=previous_lsn,
                time_us=self._time_us,
                order=order,
                value=value,
                updates=updates,
            )
        )

    def _prepare(self, key: bytes, value_bytes: int, order: int) -> tuple[int, bytes | None]:
        """The page for a cell, with room in it, and what an earlier operation of the same batch has put there."""
        page = self._tree.prepare(key, CELL_HEADER_BYTES + len(key) + value_bytes)
        return page, get(self._pages[page], key) if order else None

    def _change(self, page: int, key: bytes, value: bytes, old: bytes | None, lsn: int) -> None:
        if old is None:
            self._tree.insert(page, key, value, lsn)
        else:
            self._tree.replace(page, key, value, lsn)


# Deduplication: an orchestrator that restarts may repeat entries that it has delivered before.
#
#     table of results      the last entries, with or without their records (`known_results.py`)
#     WAL on this disk      older ones, as long as their records are here
#     versions              what is left of all others: enough to contradict, not to confirm
#
# Invariants
# - The same entry under the same seq returns the same result as the first time, and changes nothing.
# - Another entry under a used seq, and a seq that was skipped, are refused with what is known about it.
# - If neither can be decided, the result is "unverified", with the reason. A merely likely result is never
#   returned.
# - The store is not read: applying does not wait for it.


class Replayed:
    """Looks up the results of entries that were applied before."""

    def __init__(self, wal: Wal, versions: Versions, results: ResultTable, entry_ends: Callable[[], SeqIndex]) -> None:
        self._wal = wal
        self._versions = versions
        self._results = results
        self._entry_ends = entry_ends

    def result(self, seq: int, entry: Entry) -> Result:
        """Returns the first result of an entry; InputError if it was another entry."""
        if seq <= self._results.floor:
            return self._from_disk(seq, entry)
        known = self._results.find(seq)
        if known is None:
            raise _never(seq)
        if known.print != print_of(entry):
            raise _another(seq)
        return known.result

    def _from_disk(self, seq: int, entry: Entry) -> Result:
        try:
            records = self._records(seq)
        except OffsetOutOfRangeError:  # more files have left just now
            records = None
        if records is None:
            return self._from_versions(seq, entry)
        if not records:
            raise _never(seq)
        if not same_entry(records, entry):
            raise _another(seq)
        last = records[-1]
        if last.is_refused:
            return Result(seq, "refused", last.reason)
        changed = any(record.updates for record in records)
        return Result(seq, "applied" if changed else "nothing")

    def _records(self, seq: int) -> list[OperationRecord] | None:
        """The records of an entry; an empty list when there never were any, None when they are not on this disk."""
        index = self._entry_ends()
        index.learn_disk(self._wal.next_lsn, self._wal.first_lsn)
        end = index.at_or_before(seq)
        if end.seq != seq:
            return None if end.seq == 0 and self._wal.first_lsn > 1 else []
        if end.lsn < self._wal.first_lsn:
            return None
        return self._chain(end.lsn)

    def _chain(self, lsn: int) -> list[OperationRecord]:
        found: list[OperationRecord] = []
        while lsn:
            record = decode_operation(self._wal.record(lsn), lsn)
            found.append(record)
            lsn = record.previous_lsn
        return found[::-1]

    def _from_versions(self, seq: int, entry: Entry) -> Result:
        """Nothing is known of the entry itself. What is left is what it made, if it made anything: who contradicts that
        is refused without details."""
        # Of several operations of a batch on one key, the last one made the version.
        last = {names_of(operation)[1:3]: operation for operation in operations(entry)}
        for operation in last.values():
            self._check_made(operation, seq)
        return Result(
            seq,
            "unverified",
            f"seq {seq} was used long ago: its records have left this disk, and results are kept from seq "
            f"{self._results.floor + 1} on. Nothing was changed",
        )

    def _check_made(self, operation: Operation, seq: int) -> None:
        if isinstance(operation, PutObject):
            found = self._made(operation.bucket, operation.key, seq)
            put = size_and_crc(operation)
            if found is not None and found != put:
                name = f"{operation.bucket!r}/{operation.key!r}"
                raise _refused(seq, f"it was applied long ago, and put something else as {name}")

    def _made(self, bucket: str, key: str, seq: int) -> tuple[int, int] | None:
        """Size and checksum of the version that this seq made, if it made one."""
        newest = next(self._versions.history(bucket, key, seq), None)
        if newest is None or newest.seq != seq or newest.cell.is_tombstone:
            return None
        return newest.cell.size, newest.cell.crc


def _never(seq: int) -> InputError:
    return _refused(seq, "a later entry was applied before, and none with this seq")


def _another(seq: int) -> InputError:
    return _refused(seq, "another entry was applied under this seq")


def _refused(seq: int, why: str) -> InputError:
    return InputError(f"seq {seq}: {why}", operation="apply", hint="Seqs must increase")


# The results of the last entries of a shipped log, for snapshots that are written without the engine.
#
# Invariants
# - Only as much of the log is read as needed, at most `TAIL_BYTES`: nothing is known of entries before that.
# - Entries of rolled-back ranges are skipped, as everywhere (`rolled_back` of the manifest).


TAIL_BYTES: Final = 32 << 20


def shipped_results(
    catalog: Catalog, objects: ObjectStore, executor: Executor, manifest: Manifest, seq: int, lsn: int
) -> KnownResults:
    """The results to keep in a snapshot at a seq; replay of the log starts at `lsn` after it."""
    known, first_lsn = _newest_known(catalog, objects, manifest, lsn)
    table = results_behind(catalog, objects, executor, manifest.rolled_back, known, first_lsn, lsn)
    return table.known_up_to(seq)


def results_behind(
    catalog: Catalog,
    objects: ObjectStore,
    executor: Executor,
    rolled_back: Sequence[LsnRange],
    known: KnownResults,
    first_lsn: int,
    stop_lsn: int,
) -> ResultTable:
    """The results known at an LSN, and the log from there up to another (exclusive): all of it, or its end."""
    begin, left = stop_lsn, TAIL_BYTES
    for descriptor in reversed(list(catalog.between(first_lsn, stop_lsn) if first_lsn < stop_lsn else ())):
        left -= descriptor.raw_size
        if left < 0:
            break
        begin = max(first_lsn, descriptor.start_offset)
    table = ResultTable(known if begin <= first_lsn else NOTHING_KNOWN)
    for frames in History(catalog, objects, executor).frames(begin, stop_lsn):
        table.take_live(frames, rolled_back)
    return table


def _newest_known(catalog: Catalog, objects: ObjectStore, manifest: Manifest, lsn: int) -> tuple[KnownResults, int]:
    """The results in the newest snapshot before an LSN, and the LSN where replay after it starts."""
    for listed in reversed(manifest.checkpoints):
        if listed.lsn <= lsn:
            try:
                known = StoredState(objects, listed).footer.results
            except (DataError, NotFoundError):
                continue  # others will tell of it
            if known is not None:
                return known, listed.lsn
    start_lsn = catalog.start_offset()
    return (KnownResults(floor=0), 1) if start_lsn <= 1 else (NOTHING_KNOWN, start_lsn)
