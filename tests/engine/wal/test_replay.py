"""Records as columns: which entries count, what they say, and the kernel held against its twin."""

from __future__ import annotations

import random
from array import array
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.engines import RandomEntries
from tests.oracles import entry_columns as entry_columns_oracle
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.entry import CreateBucket, Operation, PutObject, operations, packed_metadata
from tidelog.engine.wal.operations import decode_operation, encode_operation
from tidelog.engine.wal.record_header import LAST, PART_OF_BATCH, REFUSED
from tidelog.engine.wal.records import encode_rollback_end, encode_structure, encode_vacuum
from tidelog.engine.wal.replay import EntrySelection, gather_entries, packed_ranges
from tidelog.engine.wal.ship_watermark import LsnRange
from tidelog.engine.wal.value import StoredValue, ValueEncoder
from tidelog.errors import DataError
from tidelog.log.frame import Frames, encode_many

kernel: Any = _native
ALL = 31
LAST_SEQ = (1 << 64) - 1


def record(operation: Operation, seq: int, flags: int = LAST, previous_lsn: int = 0, order: int = 0) -> bytes:
    """The record of an operation, as the engine writes it."""
    value = StoredValue(b"", 0, 0, 0)
    if isinstance(operation, PutObject):
        value = ValueEncoder("zstd" if seq % 5 == 0 else "none").store(operation.data, operation.metadata)
    reason = "no" if flags & REFUSED else ""
    return encode_operation(
        *(operation, seq), flags=flags, previous_lsn=previous_lsn, time_us=seq, order=order, value=value, reason=reason
    )


def random_log(seed: int, entries: int = 40) -> tuple[Frames, list[int], list[LsnRange]]:
    """Records of random entries, the LSNs of those that count, and ranges that were rolled back."""
    choose, source = random.Random(seed), RandomEntries(seed)
    payloads: list[bytes] = []
    counting: list[int] = []
    dead: list[LsnRange] = []
    for seq in range(1, entries + 1):
        parts = operations(source.entry())
        is_torn = len(parts) > 1 and choose.random() < 0.3
        is_dead = choose.random() < 0.1
        flags = (PART_OF_BATCH if len(parts) > 1 else 0) | (REFUSED if choose.random() < 0.2 else 0)
        lsns: list[int] = []
        for order, part in enumerate(parts[:-1] if is_torn else parts):
            if choose.random() < 0.3:
                payloads.append(encode_vacuum(seq) if choose.random() < 0.3 else encode_structure(b""))
            last = LAST if order + 1 == len(parts) else 0
            payloads.append(record(part, seq, flags | last, lsns[-1] if lsns else 0, order))
            lsns.append(len(payloads))
        if is_dead:
            dead.append(LsnRange(lsns[0], len(payloads)))
        elif not is_torn:
            counting += lsns
    return encode_many(1, payloads), counting, dead


def chosen(frames: Frames, start: int, stop: int, dead: list[LsnRange], step: int) -> list[int]:
    """The LSNs that a range has, read in pieces of some records."""
    selection = EntrySelection(stop, 0, LAST_SEQ, packed_ranges(dead))
    found: list[int] = []
    at = start - 1
    while not selection.is_done and at < frames.count:
        behind = min(at + step, frames.count)
        # Pieces come as buffers of their own, and as parts of one.
        piece, low, high = (frames.slice(at, behind), 0, behind - at) if step % 2 else (frames, at, behind)
        for taken, indexes in selection.feed(piece, low, high):
            found += [taken.first_offset + index for index in memoryview(indexes).cast("I")]
        at = behind
    return found


@given(st.integers(0, 10_000), st.data())
def test_ranges_side_by_side_give_every_entry_once(seed: int, data: st.DataObject) -> None:
    """Wherever the log is cut, and however it is read, the same entries come, in order, torn and dead ones never."""
    frames, counting, dead = random_log(seed)
    cuts = sorted(data.draw(st.sets(st.integers(2, frames.count), max_size=4)))
    step = data.draw(st.integers(1, 50))
    edges = [1, *cuts, frames.count + 1]
    found = [lsn for low, high in pairwise(edges) for lsn in chosen(frames, low, high, dead, step)]
    assert found == counting


@given(st.integers(0, 10_000), st.integers(0, ALL), st.integers(1, 50), st.integers(1, 5000))
def test_the_kernel_and_its_twin_agree(seed: int, wanted: int, max_rows: int, max_bytes: int) -> None:
    """Both select and gather the same, for all columns and limits."""
    frames, counting, dead = random_log(seed, 20)
    places = frames.buffer, frames.positions, frames.lengths
    half = frames.count // 2
    for owned_stop in (half, frames.count):
        arguments = (1, *places, 0, frames.count, owned_stop, packed_ranges(dead), 3, 17, 0)
        for removals in (False, True):
            agreed(kernel, entry_columns_oracle, "select_entries", *arguments, removals)
    indexes = array("I", [lsn - 1 for lsn in counting]).tobytes()
    agreed(kernel, entry_columns_oracle, "gather_entries", 1, *places, indexes, 0, wanted, max_rows, max_bytes)


@given(st.integers(0, 200), st.data())
def test_the_twins_agree_on_damage(seed: int, data: st.DataObject) -> None:
    """Whatever bytes are in a record, both say the same about it, and neither reads what is not there."""
    payload = bytearray(record(operations(RandomEntries(seed).entry())[0], seed + 1))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(payload), 120) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(payload), 80, 72, 40, 31]))
    frames = encode_many(7, [bytes(payload[:cut]) or b"\0"])
    places = frames.buffer, frames.positions, frames.lengths
    agreed(kernel, entry_columns_oracle, "select_entries", 7, *places, 0, 1, 1, b"", 0, LAST_SEQ, 0, True)
    agreed(kernel, entry_columns_oracle, "gather_entries", 7, *places, bytes(4), 0, ALL, 9, 1 << 20)


@given(st.integers(0, 10_000))
def test_columns_say_what_the_records_say(seed: int) -> None:
    """Every number and every text is the one that the record has when it is decoded by itself."""
    frames, counting, _ = random_log(seed, 15)
    indexes = array("I", [lsn - 1 for lsn in counting]).tobytes()
    rows: list[tuple[Any, ...]] = []
    for columns, _ in gather_entries(frames, indexes, ALL, 7, 1 << 20):
        texts = [_decoded(one.ends, one.data) for one in (columns.buckets, columns.keys, columns.src_keys)]
        numbers = [memoryview(one).cast("q") for one in (columns.seqs, columns.lsns, columns.sizes)]
        rows += zip(*numbers, columns.ops, *texts, strict=True)
    records = [(lsn, decode_operation(frames.payloads(lsn - 1, lsn)[0], lsn)) for lsn in counting]
    assert rows == [(one.transaction, lsn, one.size, one.op, one.bucket, one.key, one.src_key) for lsn, one in records]


def _decoded(ends: bytes, data: bytes) -> list[str]:
    places = memoryview(ends).cast("i")
    return [data[low:high].decode() for low, high in pairwise(places)]


def test_a_wrong_value_is_not_handed_out() -> None:
    """A value whose checksum does not match is named with its LSN, and only looked at by who wants it."""
    payload = bytearray(record(PutObject("b", "k", b"data"), 1))
    payload[-1] ^= 1
    frames = encode_many(9, [record(CreateBucket("b"), 1), bytes(payload)])
    indexes = array("I", [0, 1]).tobytes()
    with pytest.raises(DataError, match=r"checksum.*LSN 10"):
        list(gather_entries(frames, indexes, ALL, 10, 100))
    assert [columns.count for columns, _ in gather_entries(frames, indexes, 1, 10, 100)] == [2]


def test_forgotten_rollbacks_are_noticed() -> None:
    """A manifest forgets the oldest ranges when there are very many: what was taken back must not come back."""
    frames = encode_many(1, [record(CreateBucket("b"), 1), encode_rollback_end(0, 1), record(CreateBucket("c"), 1)])
    assert chosen(frames, 1, 4, [LsnRange(1, 2)], 3) == [3]
    with pytest.raises(DataError, match="rolled back before LSN 2"):
        chosen(frames, 1, 4, [], 3)


VALUES = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=40) | st.binary(max_size=7)
)
PLAIN_MAPS = st.dictionaries(st.text(max_size=40), VALUES, max_size=20)


def packed_maps(maps: list[dict[str, Any]]) -> tuple[bytes, bytes]:
    """Metadata of rows, as records have it; none takes no bytes."""
    packed = [packed_metadata(one) if one else b"" for one in maps]
    return array("i", accumulate(map(len, packed), initial=0)).tobytes(), b"".join(packed)


@given(st.lists(PLAIN_MAPS, max_size=5))
def test_plain_metadata_is_a_map_of_texts(maps: list[dict[str, Any]]) -> None:
    """Names and values of all rows, numbers and truth values as JSON has them, bytes in base64, null for null."""
    ends, data = packed_maps(maps)
    found = agreed(kernel, entry_columns_oracle, "metadata_columns", ends, data)[1]
    assert found is not None
    assert list(found[5]) == [value is not None for one in maps for _, value in sorted_items(one)]


def sorted_items(one: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(one.items(), key=lambda item: item[0].encode())


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}, datetime(2024, 1, 1, tzinfo=UTC)])
def test_metadata_with_parts_or_fractions_is_left_to_the_decoder(value: Any) -> None:
    """One such value among others, and there is no answer for any row."""
    packed = msgspec.msgpack.encode({"a": 1, "b": value})
    given = array("i", [0, 0, len(packed)]).tobytes(), packed
    assert agreed(kernel, entry_columns_oracle, "metadata_columns", *given)[1] is None


@given(
    st.lists(PLAIN_MAPS, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 99)), max_size=1),
)
def test_damaged_metadata_is_never_read_past_its_end(
    maps: list[dict[str, Any]], changes: list[tuple[int, int]], ends_changed: list[tuple[int, int]]
) -> None:
    """Changed bytes and bounds give the same answer as the decoder, or none, or an error."""
    packed_ends, packed = packed_maps(maps)
    data, ends = bytearray(packed), array("i", packed_ends)
    for at, byte in changes if data else ():
        data[at % len(data)] = byte
    for at, end in ends_changed:
        ends[at % len(ends)] = end
    agreed(kernel, entry_columns_oracle, "metadata_columns", ends.tobytes(), bytes(data))
    agreed(kernel, entry_columns_oracle, "metadata_columns", ends.tobytes()[:-1], bytes(data))
