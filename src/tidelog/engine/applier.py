"""Applying entries: each operation becomes a record in the log and a change in the tree.

Invariants
- One at a time: whoever calls holds the engine's lock. The engine is the only one that appends to its log, so the LSN
  and the position of a record are known before it is built.
- The record first, then the page, with the record's LSN. Nothing of it reaches the page file before the record is on
  the disk: the buffer pool sees to that.
- All operations of an entry are decided before the first is written, and so is what was read for a guarded one. What
  the state refuses is written down as refused, and changes nothing.
- A value is written once, in its record. Copies and later versions of the tree point to it.
"""

from __future__ import annotations

from tidelog.clock import Clock
from tidelog.engine.body import BodyEncoder, StoredBody
from tidelog.engine.btree import Tree
from tidelog.engine.buckets import BucketVersion
from tidelog.engine.cell import (
    POINTER_BYTES,
    encode_bucket,
    encode_inline,
    encode_pointer,
    encode_tombstone,
    with_order,
)
from tidelog.engine.entry import (
    MAX_DATA_BYTES,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Operation,
    PutObject,
    operations,
)
from tidelog.engine.entry_codec import Carried
from tidelog.engine.guard import Guarded, batch_of
from tidelog.engine.operation_record import body_position, encode_operation, encode_put
from tidelog.engine.page import cell_bytes, get
from tidelog.engine.put_record import object_key, put_record
from tidelog.engine.record_header import LAST, PART_OF_BATCH, REFUSED
from tidelog.engine.results import Result
from tidelog.engine.rules import Rules
from tidelog.engine.settings import EngineSettings
from tidelog.engine.updates import REPLACE, Update, encode, encode_insert, encode_put_update
from tidelog.engine.version_keys import at, bucket_prefix, object_prefix
from tidelog.engine.versions import Versions
from tidelog.engine.wal import Wal
from tidelog.errors import InternalError

_NO_BODY = StoredBody(b"", 0, 0, 0)


class Applier:
    """Turns entries into records and changes of the tree."""

    def __init__(self, tree: Tree, wal: Wal, versions: Versions, settings: EngineSettings, clock: Clock) -> None:
        self._tree = tree
        self._pages = tree.pool.pages
        self._wal = wal
        self._versions = versions
        self._rules = Rules(versions)
        self._clock = clock
        self._inline_bytes = settings.inline_value_bytes
        self._bodies = BodyEncoder(settings.wal_compression, settings.wal_compression_level)
        # Data above this size is stored in the log as it is; none is where everything is compressed.
        self._plain_above = settings.inline_value_bytes if settings.wal_compression == "none" else MAX_DATA_BYTES
        self._time_us = 0

    def begin(self) -> None:
        """What is applied from here on happens at one time."""
        self._time_us = self._clock.now_us()

    def apply(self, seq: int, entry: Carried) -> Result:
        """Applies an entry, or writes down why it cannot be. It is durable when the log is committed."""
        if type(entry) is PutObject and self._rules.allows_put(entry.bucket):
            self._put(seq, entry, LAST, 0, 0)
            return Result(seq, "applied")
        parts = operations(batch_of(entry))
        if isinstance(entry, Guarded):
            reason = self._rules.refusal_of_guarded(entry, parts)
        else:
            reason = self._rules.refusal(parts)
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
            body = _NO_BODY
            if isinstance(operation, PutObject):
                body = self._bodies.store(operation.data, operation.metadata)
            previous_lsn = self._wal.add(
                encode_operation(
                    *(operation, seq),
                    flags=shared | (LAST if order == last else 0),
                    previous_lsn=previous_lsn,
                    time_us=self._time_us,
                    order=order,
                    body=body,
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
        page = self._tree.prepare(key, cell_bytes(len(key), POINTER_BYTES))
        record, value = put_record(
            *(seq, flags, previous_lsn, self._time_us, order, bucket, name, data, page),
            *(wal.next_lsn, wal.next_position),
        )
        self._tree.insert(page, key, value, wal.add(record))

    def _put_any(self, seq: int, operation: PutObject, flags: int, previous_lsn: int, order: int) -> None:
        bucket, name = operation.bucket.encode(), operation.key.encode()
        key = at(b"o%b\0%b\0" % (bucket, name), seq)
        body = self._bodies.store(operation.data, operation.metadata)
        stored, codec, size, crc = body
        wal = self._wal
        if len(stored) <= self._inline_bytes:
            value = encode_inline(order, size, crc, codec, stored)
            page, old = self._prepare(key, len(value), order)
            updates = encode_insert(page, key, value)
        else:
            page, old = self._prepare(key, POINTER_BYTES, order)
            position = body_position(wal.next_position, bucket, name)
            value = encode_pointer(order, size, crc, codec, wal.next_lsn, position, len(stored))
            updates = encode_put_update(page, position)
        if old is not None:
            updates = encode(Update(page, REPLACE, key, value, old))
        lsn = wal.add(encode_put(seq, flags, previous_lsn, self._time_us, order, bucket, name, body, updates))
        self._change(page, key, value, old, lsn)

    def _delete(self, seq: int, operation: DeleteObject, flags: int, previous_lsn: int, order: int) -> bool:
        """Whether there was something to delete; the record is written in any case, the seq is used."""
        found = self._versions.find(operation.bucket, operation.key, seq)
        if found is None:
            self._add(operation, seq, flags, previous_lsn, order, _NO_BODY, b"")
            return False
        key = at(object_prefix(operation.bucket, operation.key), seq)
        self._log_change(operation, seq, flags, previous_lsn, order, _NO_BODY, key, encode_tombstone(order))
        return True

    def _copy(self, seq: int, operation: CopyObject, flags: int, previous_lsn: int, order: int) -> None:
        found = self._versions.find(operation.src_bucket, operation.src_key, seq)
        if found is None:
            raise InternalError(f"seq {seq} copies what is not there, and was not refused")
        key = at(object_prefix(operation.dest_bucket, operation.dest_key), seq)
        source = StoredBody(b"", 0, found.cell.size, found.cell.crc)
        self._log_change(operation, seq, flags, previous_lsn, order, source, key, with_order(found.cell, order))

    def _change_bucket(
        self, seq: int, operation: CreateBucket | DeleteBucket, flags: int, previous_lsn: int, order: int
    ) -> None:
        is_deleted = isinstance(operation, DeleteBucket)
        key = at(bucket_prefix(operation.bucket), seq)
        value = encode_bucket(order, is_deleted=is_deleted)
        self._log_change(operation, seq, flags, previous_lsn, order, _NO_BODY, key, value)
        self._versions.buckets.note(operation.bucket, BucketVersion(seq, order, is_deleted))

    # Record and page

    def _log_change(
        self,
        operation: Operation,
        seq: int,
        flags: int,
        previous_lsn: int,
        order: int,
        body: StoredBody,
        key: bytes,
        value: bytes,
    ) -> None:
        page, old = self._prepare(key, len(value), order)
        updates = encode_insert(page, key, value) if old is None else encode(Update(page, REPLACE, key, value, old))
        lsn = self._add(operation, seq, flags, previous_lsn, order, body, updates)
        self._change(page, key, value, old, lsn)

    def _add(
        self,
        operation: Operation,
        seq: int,
        flags: int,
        previous_lsn: int,
        order: int,
        body: StoredBody,
        updates: bytes,
    ) -> int:
        return self._wal.add(
            encode_operation(
                *(operation, seq),
                flags=flags,
                previous_lsn=previous_lsn,
                time_us=self._time_us,
                order=order,
                body=body,
                updates=updates,
            )
        )

    def _prepare(self, key: bytes, value_bytes: int, order: int) -> tuple[int, bytes | None]:
        """The page for a cell, with room in it, and what an earlier operation of the same batch has put there."""
        page = self._tree.prepare(key, cell_bytes(len(key), value_bytes))
        return page, get(self._pages[page], key) if order else None

    def _change(self, page: int, key: bytes, value: bytes, old: bytes | None, lsn: int) -> None:
        if old is None:
            self._tree.insert(page, key, value, lsn)
        else:
            self._tree.replace(page, key, value, lsn)
