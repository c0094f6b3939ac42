"""Describes records, page updates and cells of an engine as text and as JSON-compatible values.

Corruption is described as such: nothing here raises because of the contents of the bytes.
"""

from __future__ import annotations

from typing import Any

from tidelog.engine.btree.page import Update
from tidelog.engine.btree.page import decode as decode_updates
from tidelog.engine.mvcc.cells import BUCKETS, OBJECTS, SEQ_BYTES, Cell, decode_bucket, decode_cell, parse
from tidelog.engine.sst.value_file import reference_of
from tidelog.engine.wal.operations import OperationRecord
from tidelog.engine.wal.record_header import PART_OF_BATCH
from tidelog.engine.wal.records import (
    CheckpointBeginRecord,
    CheckpointEndRecord,
    CompensationRecord,
    MarksRecord,
    Record,
    RepackRecord,
    RollbackBeginRecord,
    RollbackEndRecord,
    StructureRecord,
    VacuumRecord,
    decode_record,
)
from tidelog.engine.wal.value import CODEC_FILE
from tidelog.errors import DataError
from tidelog.log.repair import is_lost

_OPS = {
    1: "create_bucket",
    2: "delete_bucket",
    3: "delete_bucket",
    4: "put_object",
    5: "delete_object",
    6: "copy_object",
}
_WHATS = {1: "insert", 2: "replace", 3: "remove", 4: "image", 5: "truncate", 7: "split"}
_CODECS = {0: "none", 1: "zstd", 2: "file"}
_SHOWN_BYTES = 32

Words = dict[str, Any]


def describe_record(payload: bytes, lsn: int) -> Words:
    """A record of the log; `kind` and `text` are always there."""
    if is_lost(payload):
        return {"kind": "lost", "text": "a repair could not save it"}
    try:
        record = decode_record(payload, lsn)
        return {**_described(record), "updates": _updates(record, lsn)}
    except DataError as error:
        return {"kind": "damaged", "text": error.message}


def _described(record: Record) -> Words:
    match record:
        case OperationRecord():
            return _operation(record)
        case RollbackBeginRecord() | RollbackEndRecord():
            return _rollback(record)
        case CompensationRecord():
            text = f"undo of LSN {record.compensated_lsn}, seq {record.transaction}; next: LSN {record.undo_next_lsn}"
            return {
                "kind": "compensation",
                "seq": record.transaction,
                "previous_lsn": record.previous_lsn,
                "undo_next_lsn": record.undo_next_lsn,
                "compensated_lsn": record.compensated_lsn,
                "text": text,
            }
        case _:
            return _own_record(record)


def _own_record(record: Record) -> Words:
    """What the engine writes by itself."""
    match record:
        case StructureRecord():
            return {"kind": "structure", "text": "pages before a change, or a split"}
        case VacuumRecord():
            start = record.history_start_seq
            if record.stored_bytes:
                text = f"a value of {record.stored_bytes} bytes that was moved here, with the versions that point to it"
                return {"kind": "vacuum", "history_start_seq": start, "stored_bytes": record.stored_bytes, "text": text}
            text = f"versions that are no longer kept; states are readable from seq {start} on"
            return {"kind": "vacuum", "history_start_seq": start, "text": text}
        case RepackRecord():
            text = f"the index was rewritten, {record.cells} cells; pages have other numbers from here on"
            return {"kind": "repack", "cells": record.cells, "text": text}
        case MarksRecord():
            mark = record.low_water_mark
            return {"kind": "marks", "low_water_mark": mark, "text": f"low-water mark {mark}"}
        case CheckpointBeginRecord():
            text = f"a checkpoint begins, at position {record.position}"
            return {"kind": "checkpoint_begin", "position": record.position, "time_us": record.time_us, "text": text}
        case CheckpointEndRecord():
            return _checkpoint_end(record)
        case _:
            return {"kind": "other", "text": ""}


def _rollback(record: RollbackBeginRecord | RollbackEndRecord) -> Words:
    if isinstance(record, RollbackBeginRecord):
        text = f"entries above seq {record.target_seq} go, from LSN {record.from_lsn} back"
        return {"kind": "rollback_begin", "target_seq": record.target_seq, "text": text}
    text = f"back at seq {record.target_seq}; it began at LSN {record.begin_lsn}"
    return {"kind": "rollback_end", "target_seq": record.target_seq, "text": text}


def _checkpoint_end(record: CheckpointEndRecord) -> Words:
    state = record.state
    text = (
        f"the checkpoint from LSN {state.begin_lsn} is complete: seq {state.applied_seq}, low-water mark "
        f"{state.low_water_mark}, high-water mark {state.high_water_mark}, {len(state.dirty_pages)} dirty pages"
    )
    known = {name: getattr(state, name) for name in state.__struct_fields__ if name != "dirty_pages"}
    return {"kind": "checkpoint_end", **known, "dirty_pages": len(state.dirty_pages), "text": text}


def _operation(record: OperationRecord) -> Words:
    op = _OPS[record.op]
    words: Words = {
        "kind": "operation",
        "seq": record.transaction,
        "op": op,
        "bucket": record.bucket,
        "key": record.key or None,
        "is_last": record.is_last,
        "is_refused": record.is_refused,
        "order": record.order if record.flags & PART_OF_BATCH else None,
        "previous_lsn": record.previous_lsn,
        "time_us": record.time_us,
    }
    if record.op == 3:
        words["force"] = True
    if record.op == 6:
        words |= {"src_bucket": record.src_bucket, "src_key": record.src_key}
    if record.op in (4, 6):
        words |= {"size": record.size, "crc32": f"{record.crc:08x}"}
    if record.stored_bytes:
        words |= {"stored_bytes": record.stored_bytes, "codec": _CODECS[record.codec]}
    if record.reason:
        words["reason"] = record.reason
    return {**words, "text": _operation_text(record, op)}


def _operation_text(record: OperationRecord, op: str) -> str:
    name = record.bucket if not record.key else f"{record.bucket}/{record.key}"
    text = f"seq {record.transaction}: {op} {name}"
    if record.op == 6:
        text += f" from {record.src_bucket}/{record.src_key}"
    if record.op == 4:
        text += f", {record.size} bytes"
    if record.op == 3:
        text += ", with all in it"
    if record.flags & PART_OF_BATCH:
        text += f", number {record.order} of a batch" + ("" if record.is_last else " that goes on")
    return text + (f", refused: {record.reason}" if record.is_refused else "")


def _updates(record: Record, lsn: int) -> list[Words]:
    updates = getattr(record, "updates", b"")
    return [_update(one) for one in decode_updates(updates, lsn)]


def _update(update: Update) -> Words:
    what = _WHATS.get(update.what, str(update.what))
    words: Words = {"page": update.page, "what": what}
    if what == "image":
        return {**words, "image_bytes": len(update.value)}
    words["key"] = describe_key(update.key)
    if what == "truncate":
        return {**words, "right_sibling": int.from_bytes(update.value, "little")}
    if what == "split":
        return {**words, "from_page": int.from_bytes(update.value, "little")}
    return words


def describe_key(key: bytes) -> str:
    """A key of the tree: `photos/cat @7` for a version of an object, `photos @1` for one of a bucket."""
    if key[:1] in (OBJECTS, BUCKETS) and len(key) > SEQ_BYTES + 1:
        try:
            bucket, name, seq = parse(key)
        except UnicodeDecodeError:
            return key.hex()
        return f"{bucket} @{seq}" if name is None else f"{bucket}/{name} @{seq}"
    return key.hex()


def describe_cell(key: bytes, value: bytes, *, is_leaf: bool) -> Words:
    """A cell of a page; `text` is always there."""
    if not is_leaf:
        child = int.from_bytes(value, "little")
        return {"key": describe_key(key), "child": child, "text": f"page {child}"}
    try:
        if key[:1] == BUCKETS:
            bucket = decode_bucket(value)
            text = "the bucket was deleted" if bucket.is_deleted else "the bucket was created"
            return {"key": describe_key(key), "is_deleted": bucket.is_deleted, "order": bucket.order, "text": text}
        return {"key": describe_key(key), **describe_version(decode_cell(value))}
    except DataError as error:
        return {"key": describe_key(key), "value_hex": value.hex(), "text": f"damaged: {error.message}"}


def describe_version(cell: Cell) -> Words:
    """What a cell says about a version of an object."""
    if cell.is_tombstone:
        return {"is_deleted": True, "order": cell.order, "text": "the object was deleted"}
    words: Words = {
        "order": cell.order,
        "size": cell.size,
        "crc32": f"{cell.crc:08x}",
        "codec": _CODECS.get(cell.codec, "unknown"),
    }
    if cell.codec == CODEC_FILE:
        name = str(reference_of(cell).name)
        return {**words, "file": name, "text": f"{cell.size} bytes, in {name}"}
    if cell.inline is not None:
        shown = cell.inline[4 : 4 + _SHOWN_BYTES]
        return {**words, "inline_bytes": len(cell.inline), "text": f"{cell.size} bytes, here: {shown!r}"}
    text = f"{cell.size} bytes, in the log: LSN {cell.lsn}, position {cell.position}, {cell.stored_bytes} bytes stored"
    place = {"lsn": cell.lsn, "position": cell.position, "stored_bytes": cell.stored_bytes}
    return {**words, **place, "text": text}
