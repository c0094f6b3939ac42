"""Entries that come again: an orchestrator that starts anew may repeat what it has given before.

Invariants
- The same entry under the same seq gives the same result as the first time, and changes nothing.
- Another entry under a seq that was used, and a seq that was passed over, are refused with what is known about it.
- Which entries count is learned from the log as it grows, rollbacks included.
- As long as its records are on this disk an entry is compared with them; afterwards with the versions that it made,
  as far as they are kept.
"""

from __future__ import annotations

from tidelog.engine.body import encode_body
from tidelog.engine.entry import CopyObject, Entry, Operation, PutObject, operations
from tidelog.engine.gate import EntryEnd, SeqIndex
from tidelog.engine.operation_record import OperationRecord, decode_operation, names_of, same_entry
from tidelog.engine.results import Result
from tidelog.engine.versions import Versions
from tidelog.engine.wal import Wal
from tidelog.errors import InputError, OffsetOutOfRangeError
from tidelog.log.frame import crc32


class Replayed:
    """Finds out what became of entries that were applied before."""

    def __init__(self, wal: Wal, versions: Versions) -> None:
        self._wal = wal
        self._versions = versions
        self._index: SeqIndex | None = None

    def result(self, seq: int, entry: Entry) -> Result:
        """What became of it the first time; InputError when it was not this one."""
        records = self._records(seq)
        if records is None:
            return self._from_versions(seq, entry)
        if not records:
            raise _refused(seq, "a later entry was applied before, and none with this seq")
        if not same_entry(records, entry):
            raise _refused(seq, "another entry was applied under this seq")
        last = records[-1]
        if last.is_refused:
            return Result(seq, "refused", last.reason)
        changed = any(record.updates for record in records)
        return Result(seq, "applied" if changed else "nothing")

    def _records(self, seq: int) -> list[OperationRecord] | None:
        """The records of an entry; an empty list when there never were any, None when they are not on this disk."""
        if self._index is None:
            self._index = SeqIndex(self._wal.batches, EntryEnd(0, 0), self._wal.first_lsn)
        try:
            self._index.learn(self._wal.next_lsn)
            self._index.left_disk_below(self._wal.first_lsn)
            end = self._index.at_or_before(seq)
        except OffsetOutOfRangeError:  # more files have left just now
            return None
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
        """The log does not reach back that far: what is left of the entry is what it made, if it made anything.

        What contradicts that is refused. What cannot be told any more (it was refused, or vacuumed since) does nothing.
        """
        # Of several operations of a batch on one key, the last one made the version.
        last = {names_of(operation)[1:3]: operation for operation in operations(entry)}
        made = [self._made_by(operation, seq) for operation in last.values()]
        return Result(seq, "applied" if any(made) else "nothing")

    def _made_by(self, operation: Operation, seq: int) -> bool:
        match operation:
            case PutObject(bucket, key, data, metadata):
                found = self._made(bucket, key, seq)
                if found is not None and found != (len(data), crc32(encode_body(data, metadata))):
                    raise _refused(seq, f"it was applied long ago, and put something else as {bucket!r}/{key!r}")
                return found is not None
            case CopyObject(_, _, bucket, key):
                return self._made(bucket, key, seq) is not None
            case _:
                return True

    def _made(self, bucket: str, key: str, seq: int) -> tuple[int, int] | None:
        """Size and checksum of the version that this seq made, if it made one."""
        newest = next(self._versions.history(bucket, key, seq), None)
        if newest is None or newest.seq != seq or newest.cell.is_tombstone:
            return None
        return newest.cell.size, newest.cell.crc


def _refused(seq: int, why: str) -> InputError:
    return InputError(f"seq {seq}: {why}", operation="apply", hint="Seqs grow and are used once")
