"""Entries of an engine's shipped log, as they can be given to another engine: what a worker makes of records.

Invariants
- Entries come in the order of the log, each once, whole, and as a batch where they were one (`engines/log_reader.py`
  knows which records count).
- A refused entry has its seq, and is given again, so that the seqs of the copy are those of the original. Data of its
  puts is not in the log any more: they are given without. It is guarded by what is never true, with the reason why it
  was refused: no engine applies it, whatever its state is, and every engine gives that reason.
- A guarded batch that was applied is given as the batch that it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tidelog.engine.entry import Batch, Operation, PutObject
from tidelog.engine.entry_codec import Carried, encode_entry
from tidelog.engine.guard import Guarded, NeverTrue
from tidelog.engine.operation_record import (
    PUT_OBJECT,
    OperationRecord,
    decode_operation,
    operation_of,
)
from tidelog.engine.record_header import PART_OF_BATCH
from tidelog.pipeline.engines.log_part import LogPart
from tidelog.pipeline.engines.log_reader import read_chosen


class LoggedEntry(NamedTuple):
    """An entry in bytes (`entry_codec`), with its seq and the time at which it was applied."""

    seq: int
    time_us: int
    value: bytes


class Entries(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a part, which has a number."""

    number: int
    entries: tuple[tuple[int, bytes], ...]


class EntriesWork(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log to be decoded."""

    number: int
    part: LogPart


def decode_entries(work: EntriesWork) -> Entries:
    """All entries of a part."""
    found = tuple((one.seq, one.value) for one in entries_of(work.part))
    return Entries(number=work.number, entries=found)


def entries_of(part: LogPart) -> Iterator[LoggedEntry]:
    """The entries of a part, one after the other."""
    gathered: list[Operation] = []
    for record, lsn in _records(part):
        gathered.append(_operation(record, lsn))
        if record.is_last:
            yield LoggedEntry(record.transaction, record.time_us, encode_entry(_entry(record, gathered)))
            gathered = []


def _entry(last: OperationRecord, operations: list[Operation]) -> Carried:
    if last.is_refused:
        return Guarded(Batch(operations), (NeverTrue(last.reason),))
    return Batch(operations) if last.flags & PART_OF_BATCH else operations[0]


def _records(part: LogPart) -> Iterator[tuple[OperationRecord, int]]:
    for frames, indexes in read_chosen(part, skips_gaps=False):
        for index in memoryview(indexes).cast("I"):
            lsn = frames.first_offset + index
            yield decode_operation(frames.payloads(index, index + 1)[0], lsn), lsn


def _operation(record: OperationRecord, lsn: int) -> Operation:
    if record.is_refused and record.op == PUT_OBJECT:
        return PutObject(record.bucket, record.key, b"")
    return operation_of(record, lsn)
