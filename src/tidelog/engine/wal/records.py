"""WAL records: the payloads of the engine's log, one type per kind.

    OPERATION         one operation of an entry: `operation_record`
    STRUCTURE         the tree's own changes (splits, page images)                      own: nothing
    COMPENSATION      the undo of one operation                                         own: compensated_lsn u64
    CHECKPOINT_BEGIN  a fuzzy checkpoint begins                                         own: position u64, time_us u64
    CHECKPOINT_END    it is complete                                                    own: msgpack of its state
    ROLLBACK_BEGIN    entries above a seq are going to be undone                        own: target_seq, from_lsn u64
    ROLLBACK_END      they are                                                          own: target_seq, begin_lsn u64
    VACUUM            versions that retention removes, or a value that moves here     own: history_start_seq u64, value
    MARKS             the orchestrator's low-water mark                                 own: low_water_mark u64
    REPACK            from here on the pages of the index have other numbers            own: cells u64

The bytes before and after `own` are described in `record_header.py`. Only operations are ever undone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

import msgspec

from tidelog.engine.mvcc.known_results import KnownResults
from tidelog.engine.wal.operations import OperationRecord, decode_operation
from tidelog.engine.wal.record_header import (
    CHECKPOINT_BEGIN,
    CHECKPOINT_END,
    COMPENSATION,
    HEADER_BYTES,
    MARKS,
    OPERATION,
    REPACK,
    ROLLBACK_BEGIN,
    ROLLBACK_END,
    STRUCTURE,
    VACUUM,
    Header,
    decode_header,
    encode_header,
)
from tidelog.errors import DataError


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says. Tables and marks are those of the moment at which it began."""

    begin_lsn: int
    begin_position: int
    time_us: int
    applied_seq: int
    low_water_mark: int
    high_water_mark: int
    history_start_seq: int
    next_page: int
    dirty_pages: dict[int, int]
    transactions: dict[int, int]
    results: KnownResults | None = None
    """What became of the last entries; None where that is not known."""


_ONE = struct.Struct("<Q")
_TWO = struct.Struct("<QQ")
_decode_state = msgspec.msgpack.Decoder(CheckpointState).decode


class StructureRecord(msgspec.Struct, frozen=True, gc=False):
    """A change of the tree's shape, or a page's image before its first change."""

    updates: bytes


class CompensationRecord(msgspec.Struct, frozen=True, gc=False):
    """The undo of one operation's updates (a CLR). `undo_next_lsn` is the next record to undo, 0 for none."""

    transaction: int
    previous_lsn: int
    undo_next_lsn: int
    compensated_lsn: int
    updates: bytes


class CheckpointBeginRecord(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a fuzzy checkpoint: the position of this record's own frame."""

    position: int
    time_us: int


class CheckpointEndRecord(msgspec.Struct, frozen=True):
    """The end of a checkpoint: the state as of its beginning."""

    state: CheckpointState


class RollbackBeginRecord(msgspec.Struct, frozen=True, gc=False):
    """Entries above `target_seq` will be undone, backwards from the newest, which is at `from_lsn`."""

    target_seq: int
    from_lsn: int


class RollbackEndRecord(msgspec.Struct, frozen=True, gc=False):
    """The rollback that began at `begin_lsn` is complete."""

    target_seq: int
    begin_lsn: int


class VacuumRecord(msgspec.Struct, frozen=True, gc=False):
    """Versions that retention removes, and the oldest seq that may be read from here on. Or the versions whose value is
    in the record from here on: `stored_bytes` of it.
    """

    history_start_seq: int
    updates: bytes
    stored_bytes: int = 0


class MarksRecord(msgspec.Struct, frozen=True, gc=False):
    """The orchestrator's low-water mark."""

    low_water_mark: int


class RepackRecord(msgspec.Struct, frozen=True, gc=False):
    """The index was rewritten in full pages from all of its cells, `cells` of them."""

    cells: int


Record = (
    OperationRecord
    | StructureRecord
    | CompensationRecord
    | CheckpointBeginRecord
    | CheckpointEndRecord
    | RollbackBeginRecord
    | RollbackEndRecord
    | VacuumRecord
    | MarksRecord
    | RepackRecord
)

_Decoder = Callable[[Header, bytes, bytes, int], Record]

_STRUCTURE_HEADER: Final = encode_header(STRUCTURE, 0)
VACUUM_OWN_BYTES: Final = _ONE.size
"""What a VACUUM record has before the value in it."""
_VACUUM_HEADER: Final = encode_header(VACUUM, VACUUM_OWN_BYTES)


def encode_structure(updates: bytes) -> bytes:
    """Encodes a change of the tree's shape."""
    return _STRUCTURE_HEADER + updates


def encode_vacuum(history_start_seq: int, updates: bytes = b"", stored: bytes = b"") -> bytes:
    """Encodes the removal of versions; without any, it announces the start of history before they are removed. With a
    stored value, the updates move versions that point to it here.
    """
    header = encode_header(VACUUM, VACUUM_OWN_BYTES + len(stored)) if stored else _VACUUM_HEADER
    return b"".join((header, _ONE.pack(history_start_seq), stored, updates))


def encode_compensation(
    transaction: int, previous_lsn: int, undo_next_lsn: int, compensated_lsn: int, updates: bytes
) -> bytes:
    """Encodes the undo of an operation."""
    header = encode_header(
        COMPENSATION, _ONE.size, transaction=transaction, previous_lsn=previous_lsn, undo_next_lsn=undo_next_lsn
    )
    return b"".join((header, _ONE.pack(compensated_lsn), updates))


def encode_checkpoint_begin(position: int, time_us: int) -> bytes:
    """Encodes the beginning of a checkpoint; `position` is that of its own frame."""
    return encode_header(CHECKPOINT_BEGIN, _TWO.size) + _TWO.pack(position, time_us)


def encode_checkpoint_end(state: CheckpointState) -> bytes:
    """Encodes the end of a checkpoint."""
    own = msgspec.msgpack.encode(state)
    return encode_header(CHECKPOINT_END, len(own)) + own


def encode_rollback_begin(target_seq: int, from_lsn: int) -> bytes:
    """Encodes the beginning of a rollback."""
    return encode_header(ROLLBACK_BEGIN, _TWO.size) + _TWO.pack(target_seq, from_lsn)


def encode_rollback_end(target_seq: int, begin_lsn: int) -> bytes:
    """Encodes the end of a rollback."""
    return encode_header(ROLLBACK_END, _TWO.size) + _TWO.pack(target_seq, begin_lsn)


def encode_marks(low_water_mark: int) -> bytes:
    """Encodes a new low-water mark."""
    return encode_header(MARKS, _ONE.size) + _ONE.pack(low_water_mark)


def encode_repack(cells: int) -> bytes:
    """Encodes a rewrite of the index."""
    return encode_header(REPACK, _ONE.size) + _ONE.pack(cells)


def decode_record(payload: bytes, lsn: int) -> Record:
    """Decodes a record of any kind; DataError if it is invalid."""
    header = decode_header(payload, lsn)
    if header.kind == OPERATION:
        return decode_operation(payload, lsn)
    own, updates = payload[HEADER_BYTES : header.updates_offset], payload[header.updates_offset :]
    if updates and header.kind not in _WITH_UPDATES:
        raise DataError(f"a record of kind {header.kind} has page updates, LSN {lsn}")
    return _DECODERS[header.kind](header, own, updates, lsn)


def _decode_structure(header: Header, own: bytes, updates: bytes, lsn: int) -> Record:
    _expect_bytes(header, own, 0, lsn)
    return StructureRecord(updates)


def _decode_vacuum(header: Header, own: bytes, updates: bytes, lsn: int) -> Record:
    if len(own) < VACUUM_OWN_BYTES:
        _expect_bytes(header, own, VACUUM_OWN_BYTES, lsn)
    return VacuumRecord(_ONE.unpack_from(own)[0], updates, len(own) - VACUUM_OWN_BYTES)


def _decode_compensation(header: Header, own: bytes, updates: bytes, lsn: int) -> Record:
    _expect_bytes(header, own, _ONE.size, lsn)
    (compensated_lsn,) = _ONE.unpack(own)
    return CompensationRecord(header.transaction, header.previous_lsn, header.undo_next_lsn, compensated_lsn, updates)


def _decode_checkpoint_end(header: Header, own: bytes, updates: bytes, lsn: int) -> Record:
    try:
        return CheckpointEndRecord(_decode_state(own))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"the state of a checkpoint cannot be read, LSN {lsn}: {error}") from error


def _decode_numbers(make: Callable[..., Record], numbers: struct.Struct) -> _Decoder:
    """Decodes the kinds that consist of a few integers."""

    def decode(header: Header, own: bytes, updates: bytes, lsn: int) -> Record:
        _expect_bytes(header, own, numbers.size, lsn)
        return make(*numbers.unpack(own))

    return decode


def _expect_bytes(header: Header, own: bytes, size: int, lsn: int) -> None:
    if len(own) != size:
        raise DataError(f"a record of kind {header.kind} has {len(own)} bytes of its own, not {size}, LSN {lsn}")


_WITH_UPDATES = {STRUCTURE, COMPENSATION, VACUUM}
_DECODERS: dict[int, _Decoder] = {
    STRUCTURE: _decode_structure,
    COMPENSATION: _decode_compensation,
    CHECKPOINT_BEGIN: _decode_numbers(CheckpointBeginRecord, _TWO),
    CHECKPOINT_END: _decode_checkpoint_end,
    ROLLBACK_BEGIN: _decode_numbers(RollbackBeginRecord, _TWO),
    ROLLBACK_END: _decode_numbers(RollbackEndRecord, _TWO),
    VACUUM: _decode_vacuum,
    MARKS: _decode_numbers(MarksRecord, _ONE),
    REPACK: _decode_numbers(RepackRecord, _ONE),
}
