"""What a worker does with an object of an engine's log for `verify`: every frame, every record, every value in it.

Invariants
- Frames are held against the descriptor as those of a topic are (`jobs/descriptor_check.py`). Every record is decoded
  with its page updates, and every body that one carries is decoded and compared with its checksum.
- An object that is not there is told as gone, for the driver to find out whether it should be. A store that gives no
  answer raises.
"""

from __future__ import annotations

import msgspec

from tidelog.engine.body import decode_body
from tidelog.engine.operation_record import OperationRecord
from tidelog.engine.record import decode_record
from tidelog.engine.updates import decode as decode_updates
from tidelog.errors import ConflictError, DataError, NotFoundError
from tidelog.log.frame import Frames
from tidelog.log.repair import is_lost
from tidelog.pipeline.engine_jobs.verify_words import engine_problem, in_lsns
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.jobs.descriptor_check import DescriptorCheck, Fault
from tidelog.pipeline.jobs.job import Problem
from tidelog.tier.descriptor import Descriptor

# What is wrong with one object is told up to here: the first ones say what happened.
_MOST_PROBLEMS = 20


class LogWork(msgspec.Struct, frozen=True, kw_only=True):
    """An object of the log to read, and which record the manifest calls the last entry's."""

    place: EnginePlace
    descriptor: Descriptor
    high_water_lsn: int


class LogFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What an object has, and what is wrong with it. `high_water_seq` is the entry that ends at the high-water LSN."""

    object_id: str
    size: int = 0
    records: int = 0
    entries: int = 0
    bodies: int = 0
    high_water_seq: int | None = None
    is_gone: bool = False
    is_rewritten: bool = False
    problems: tuple[Problem, ...] = ()


def check_log_object(work: LogWork) -> LogFinding:
    """Reads all of it."""
    return _LogCheck(work).finding()


class _LogCheck:
    """One object."""

    def __init__(self, work: LogWork) -> None:
        self._work = work
        self._name = work.place.name
        self._key = work.place.keys.object(work.descriptor.name)
        self._records = 0
        self._entries = 0
        self._bodies = 0
        self._high_water_seq: int | None = None
        self._problems: list[Problem] = []

    def finding(self) -> LogFinding:
        descriptor = self._work.descriptor
        objects = self._work.place.opened().objects
        check = DescriptorCheck(objects, self._key, descriptor, None, self._take)
        try:
            check.run()
        except (NotFoundError, ConflictError):  # the second: while it was read
            return LogFinding(object_id=descriptor.object_id, is_gone=True)
        return LogFinding(
            object_id=descriptor.object_id,
            size=descriptor.size,
            records=self._records,
            entries=self._entries,
            bodies=self._bodies,
            high_water_seq=self._high_water_seq,
            is_rewritten=check.is_rewritten,
            problems=(*(self._problem_of(fault) for fault in check.faults), *self._problems),
        )

    def _problem_of(self, fault: Fault) -> Problem:
        place = self._key if fault.byte is None else f"{self._key}, byte {fault.byte}"
        descriptor = self._work.descriptor
        problem = engine_problem(self._name, place, fault.reason)
        ranged = msgspec.structs.replace(
            problem, first_offset=descriptor.start_offset, last_offset=descriptor.end_offset
        )
        return in_lsns(ranged)

    def _take(self, frames: Frames) -> None:
        for lsn, payload in enumerate(frames.payloads(), frames.first_offset):
            self._records += 1
            try:
                self._check_record(payload, lsn)
            except DataError as error:
                self._add(error.message)

    def _check_record(self, payload: bytes, lsn: int) -> None:
        if is_lost(payload):
            raise DataError(f"a record that a repair could not save, LSN {lsn}")
        record = decode_record(payload, lsn)
        decode_updates(getattr(record, "updates", b""), lsn)
        if isinstance(record, OperationRecord):
            self._check_operation(record, lsn)

    def _check_operation(self, record: OperationRecord, lsn: int) -> None:
        if record.is_last:
            self._entries += 1
            if lsn == self._work.high_water_lsn:
                self._high_water_seq = record.transaction
        if record.stored_bytes:
            decode_body(record.stored, record.codec, record.size, record.crc, lsn)
            self._bodies += 1

    def _add(self, reason: str) -> None:
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(engine_problem(self._name, self._key, reason))
