"""Entries that come again: an orchestrator that starts anew may repeat what it has given before.

    table of results      the last entries, whatever has become of their records (`known_results.py`)
    log on this disk      older ones, as long as their records are here
    versions              what is left of all others: enough to contradict, not to confirm

Invariants
- The same entry under the same seq gives the same result as the first time, and changes nothing.
- Another entry under a seq that was used, and a seq that was passed over, are refused with what is known about it.
- Where neither can be told any more the result is "unverified", with the reason. Nobody is told what is only likely.
- The store is not asked: whoever applies does not wait for it.
"""

from __future__ import annotations

from tidelog.engine.body import encode_body
from tidelog.engine.entry import Entry, Operation, PutObject, operations
from tidelog.engine.gate import EntryEnd, SeqIndex
from tidelog.engine.known_results import ResultTable, print_of
from tidelog.engine.operation_record import OperationRecord, decode_operation, names_of, same_entry
from tidelog.engine.results import Result
from tidelog.engine.versions import Versions
from tidelog.engine.wal import Wal
from tidelog.errors import InputError, OffsetOutOfRangeError
from tidelog.log.frame import crc32


class Replayed:
    """Finds out what became of entries that were applied before."""

    def __init__(self, wal: Wal, versions: Versions, results: ResultTable) -> None:
        self._wal = wal
        self._versions = versions
        self._results = results
        self._index: SeqIndex | None = None

    def result(self, seq: int, entry: Entry) -> Result:
        """What became of it the first time; InputError when it was not this one."""
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
        if self._index is None:
            self._index = SeqIndex(self._wal.batches, EntryEnd(0, 0), self._wal.first_lsn)
        self._index.learn(self._wal.next_lsn)
        self._index.left_disk_below(self._wal.first_lsn)
        end = self._index.at_or_before(seq)
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
        is refused, and nobody can be told more."""
        # Of several operations of a batch on one key, the last one made the version.
        last = {names_of(operation)[1:3]: operation for operation in operations(entry)}
        for operation in last.values():
            self._check_made(operation, seq)
        return Result(
            *(seq, "unverified"),
            f"seq {seq} was used long ago: its records have left this disk, and results are kept from seq "
            f"{self._results.floor + 1} on. Nothing was changed",
        )

    def _check_made(self, operation: Operation, seq: int) -> None:
        if isinstance(operation, PutObject):
            found = self._made(operation.bucket, operation.key, seq)
            put = len(operation.data), crc32(encode_body(operation.data, operation.metadata))
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
    return InputError(f"seq {seq}: {why}", operation="apply", hint="Seqs grow and are used once")
