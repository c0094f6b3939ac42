"""Records: what is encoded comes back, and nothing is believed that does not fit together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.oracles.records import put_head, value_position
from tests.test_docs import hex_block

from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
    operations,
)
from tidelog.engine.wal import records
from tidelog.engine.wal.operations import (
    OperationRecord,
    decode_operation,
    encode_operation,
    operation_of,
    same_entry,
)
from tidelog.engine.wal.record_header import HEADER_BYTES, LAST, PART_OF_BATCH, REFUSED, decode_header
from tidelog.engine.wal.records import CheckpointState, Record, decode_record
from tidelog.engine.wal.value import StoredValue, ValueEncoder
from tidelog.errors import DataError
from tidelog.log.frame import encode_many

LSN = 5000
TIME_US = 1_700_000_000_000_000
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
NUMBERS = st.integers(0, (1 << 64) - 1)
STATE = CheckpointState(
    begin_lsn=3,
    begin_position=99,
    time_us=TIME_US,
    applied_seq=7,
    low_water_mark=6,
    high_water_mark=5,
    history_start_seq=0,
    next_page=12,
    dirty_pages={1: 2, 3: 4},
    transactions={7: 2},
)

LONE = st.one_of(
    st.builds(CreateBucket, NAMES),
    st.builds(DeleteBucket, NAMES, st.booleans()),
    st.builds(
        PutObject, NAMES, NAMES, st.binary(max_size=100), st.dictionaries(st.text(max_size=5), st.integers(0, 9))
    ),
    st.builds(DeleteObject, NAMES, NAMES),
    st.builds(CopyObject, NAMES, NAMES, NAMES, NAMES),
)
ENTRIES = st.one_of(LONE, st.builds(Batch, st.lists(LONE, min_size=1, max_size=4)))


def value_of(operation: Operation) -> StoredValue:
    """What is stored of it; a copy knows the crc and size of its source."""
    if isinstance(operation, PutObject):
        return ValueEncoder("zstd").store(operation.data, operation.metadata)
    return StoredValue(b"", 0, 17, 18) if isinstance(operation, CopyObject) else StoredValue(b"", 0, 0, 0)


def payloads_of(entry: Entry, seq: int = 9, flags: int = 0, updates: bytes = b"") -> list[bytes]:
    """The records of an entry."""
    lone = operations(entry)
    is_batch = PART_OF_BATCH if isinstance(entry, Batch) else 0
    return [
        encode_operation(
            *(operation, seq),
            flags=flags | is_batch | (LAST if order == len(lone) - 1 else 0),
            previous_lsn=LSN + order - 1 if order else 0,
            time_us=TIME_US,
            order=order,
            value=value_of(operation),
            updates=updates,
        )
        for order, operation in enumerate(lone)
    ]


def records_of(entry: Entry, flags: int = 0) -> list[OperationRecord]:
    return [decode_operation(payload, LSN + order) for order, payload in enumerate(payloads_of(entry, flags=flags))]


def refusal(payload: bytes) -> str:
    """What is said about a payload that is no record."""
    with pytest.raises(DataError) as caught:
        decode_record(payload, LSN)
    assert f"LSN {LSN}" in str(caught.value)
    return str(caught.value)


@given(ENTRIES)
def test_an_entry_comes_back_from_its_records(entry: Entry) -> None:
    """Operations, their order, and data with metadata are all in the log."""
    found = records_of(entry)
    assert [operation_of(record, LSN) for record in found] == list(operations(entry))
    assert [record.order for record in found] == list(range(len(found)))
    assert [record.is_last for record in found] == [False] * (len(found) - 1) + [True]
    assert all(record.time_us == TIME_US and record.transaction == 9 for record in found)


@given(ENTRIES, ENTRIES)
def test_records_are_of_the_same_entry_only_if_they_are(one: Entry, other: Entry) -> None:
    """An entry that comes again is known by its records, and another one is told apart, refused or not."""
    for flags in (0, REFUSED):
        assert same_entry(records_of(one, flags), one)
        assert same_entry(records_of(one, flags), other) == (operations(one) == operations(other))


def test_what_a_copy_found_is_not_part_of_it() -> None:
    """The source may have been anything: it is the same entry on every replica and at every time."""
    entry = CopyObject("a", "b", "c", "d")
    (record,) = records_of(entry)
    assert (record.size, record.crc) == (17, 18)
    assert same_entry([record], entry)


def test_a_part_of_a_batch_is_not_the_batch() -> None:
    """The number of operations counts."""
    entry = Batch([CreateBucket("a"), CreateBucket("b")])
    assert not same_entry(records_of(entry)[:1], entry)
    assert not same_entry(records_of(entry), CreateBucket("a"))


@given(NAMES, NAMES, st.binary(max_size=100), st.binary(max_size=50))
def test_the_short_way_for_puts_is_the_same(bucket: str, key: str, data: bytes, updates: bytes) -> None:
    """Both ways of encoding a put give the same bytes."""
    entry = PutObject(bucket, key, data)
    value = ValueEncoder().store(data, {})
    names, flags = (bucket.encode(), key.encode()), LAST | PART_OF_BATCH
    short = b"".join((put_head(9, flags, 4, TIME_US, 0, *names, value), *names, value.stored, updates))
    long = encode_operation(entry, 9, flags=flags, previous_lsn=4, time_us=TIME_US, value=value, updates=updates)
    assert short == long
    record = decode_operation(short, LSN)
    assert (record.stored, record.updates, record.previous_lsn) == (value.stored, updates, 4)


@given(NAMES, NAMES, st.binary(max_size=100))
def test_the_place_of_a_value_is_known_beforehand(bucket: str, key: str, data: bytes) -> None:
    """What a cell points to is where the record has it, in the frame of the log."""
    value = ValueEncoder().store(data, {})
    names = bucket.encode(), key.encode()
    head = put_head(9, LAST, 0, TIME_US, 0, *names, value)
    payload = b"".join((head, *names, value.stored, b"updates"))
    frames = encode_many(LSN, [b"before", payload])
    place = value_position(frames.start_of(1), head, *names)
    assert frames.buffer[place : place + len(value.stored)] == value.stored
    assert payload[decode_operation(payload, LSN).value_offset :].startswith(value.stored)


def test_a_refused_operation_keeps_what_it_was_but_not_its_value() -> None:
    """Crc and size tell whether the same entry comes again; its bytes are not kept."""
    entry = PutObject("b", "k", b"data" * 100)
    value = ValueEncoder().store(entry.data, {})
    payload = encode_operation(entry, 9, flags=LAST | REFUSED, time_us=TIME_US, value=value, reason="no bucket 'b'")
    record = decode_operation(payload, LSN)
    assert (record.is_refused, record.reason, record.stored, record.size) == (True, "no bucket 'b'", b"", 400)
    with pytest.raises(DataError):
        operation_of(record, LSN)


def test_a_long_reason_is_cut_between_two_characters() -> None:
    """However long the names in it are, the record stays one."""
    payload = encode_operation(CreateBucket("b"), 9, flags=LAST | REFUSED, time_us=TIME_US, reason="é" * 100_000)
    reason = decode_operation(payload, LSN).reason
    assert set(reason) == {"é"}
    assert 1000 < len(reason) < 10_000


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (records.encode_structure(b"updates"), records.StructureRecord(b"updates")),
        (records.encode_vacuum(9, b"updates"), records.VacuumRecord(9, b"updates")),
        (records.encode_compensation(9, 8, 7, 6, b"updates"), records.CompensationRecord(9, 8, 7, 6, b"updates")),
        (records.encode_checkpoint_begin(1 << 40, TIME_US), records.CheckpointBeginRecord(1 << 40, TIME_US)),
        (records.encode_checkpoint_end(STATE), records.CheckpointEndRecord(STATE)),
        (records.encode_rollback_begin(5, 900), records.RollbackBeginRecord(5, 900)),
        (records.encode_rollback_end(5, 901), records.RollbackEndRecord(5, 901)),
        (records.encode_marks(44), records.MarksRecord(44)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_comes_back(payload: bytes, expected: Record) -> None:
    """Decoding gives what was encoded; cut anywhere or with something behind it, it is refused or another record."""
    assert decode_record(payload, LSN) == expected
    for size in range(len(payload)):
        try:
            assert decode_record(payload[:size], LSN) != expected
        except DataError as error:
            assert f"LSN {LSN}" in error.message  # noqa: PT017 - some cuts are records
    has_updates = isinstance(expected, records.StructureRecord | records.VacuumRecord | records.CompensationRecord)
    if not has_updates:
        assert "page updates" in refusal(payload + b"x")


def test_the_header_alone_tells_kind_and_chain() -> None:
    """Whoever follows the records of an entry needs no more."""
    header = decode_header(records.encode_compensation(9, 8, 7, 6, b"updates"), LSN)
    assert (header.kind, header.transaction, header.previous_lsn, header.undo_next_lsn) == (3, 9, 8, 7)
    assert header.flags == 0
    last = decode_header(payloads_of(Batch([CreateBucket("a")]))[0], LSN)
    assert last.flags == LAST | PART_OF_BATCH


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(payload: bytes) -> None:
    """Nothing but DataError comes out of bytes that nobody wrote."""
    try:
        decode_record(payload, LSN)
    except DataError as error:
        assert f"LSN {LSN}" in error.message  # noqa: PT017 - a few are records


@given(ENTRIES, st.randoms())
def test_flipped_bits_raise_data_errors_only(entry: Entry, chance: random.Random) -> None:
    """A frame's checksum keeps such bytes away; where it does not, they raise, or are another record."""
    for payload in payloads_of(entry, updates=b"updates"):
        for _ in range(10):
            flipped = bytearray(payload)
            flipped[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
            try:
                record = decode_operation(bytes(flipped), LSN)
                operation_of(record, LSN)
            except DataError as error:
                assert f"LSN {LSN}" in error.message  # noqa: PT017 - some flips are harmless


def test_wrong_headers_are_named() -> None:
    """Each field is compared with what it can be."""
    good = bytearray(records.encode_marks(1))
    assert "no header" in refusal(bytes(good[: HEADER_BYTES - 1]))
    for byte, value, said in [
        (0, 0, "kind 0"),
        (0, 11, "kind 11"),
        (1, 8, "flags 8"),
        (2, 1, "flags"),
        (4, 200, "at 200"),
    ]:
        bad = good.copy()
        bad[byte] = value
        assert said in refusal(bytes(bad))
    later = records.encode_compensation(9, LSN, 7, 6, b"")
    assert "not before" in refusal(later)


def changed(payload: bytes, byte: int, value: int) -> bytes:
    return payload[:byte] + bytes([value]) + payload[byte + 1 :]


def test_operations_that_contradict_themselves_are_refused() -> None:
    """A record whose parts cannot belong together is damage, whatever its checksum says."""
    create = payloads_of(CreateBucket("bb"))[0]
    op_byte, seq_byte, stored_byte = 14, 15, 17
    assert "names that do not go with it" in refusal(changed(create, op_byte, 5))
    assert "names that do not go with it" in refusal(changed(create, op_byte, 0))
    assert "codec 9" in refusal(changed(create, op_byte, 0x91))
    assert "do not add up" in refusal(changed(create, stored_byte, 3))
    assert "do not add up" in refusal(create[:-1])
    assert "do not add up" in refusal(changed(create[: seq_byte + 1], seq_byte, 0x80))
    assert "not UTF-8" in refusal(changed(create, len(create) - 2, 0xFF))
    assert "seq 0" in refusal(changed(create, seq_byte, 0))
    put = payloads_of(PutObject("b", "k", b"data"))[0]
    assert "with a value of" in refusal(changed(put, op_byte, 5))
    refused = encode_operation(CreateBucket("b"), 9, flags=LAST | REFUSED, time_us=TIME_US, updates=b"updates")
    assert "changes pages" in refusal(refused)


def test_a_lone_operation_has_no_place_for_what_only_batches_have() -> None:
    """It would be lost on its way to the log."""
    with pytest.raises(ValueError, match="no part of a batch"):
        encode_operation(CreateBucket("b"), 9, flags=LAST, time_us=TIME_US, order=1)
    with pytest.raises(ValueError, match="none before it"):
        encode_operation(CreateBucket("b"), 9, flags=LAST, time_us=TIME_US, previous_lsn=4)
    with pytest.raises(ValueError, match="reason"):
        encode_operation(CreateBucket("b"), 9, flags=LAST, time_us=TIME_US, reason="none")


def test_names_in_the_log_are_checked_like_those_of_callers() -> None:
    """A NUL in a name of the log would make a key of the tree that means something else."""
    payload = payloads_of(CreateBucket("bb"))[0]
    record = decode_operation(changed(payload, len(payload) - 2, 0), LSN)
    with pytest.raises(DataError, match=f"LSN {LSN}"):
        operation_of(record, LSN)


def test_only_operations_are_decoded_as_such() -> None:
    """Another kind is named."""
    with pytest.raises(DataError, match="kind 9"):
        decode_operation(records.encode_marks(1), LSN)


@given(st.dictionaries(NUMBERS, NUMBERS, max_size=20), NUMBERS)
def test_tables_of_checkpoints_come_back(dirty_pages: dict[int, int], seq: int) -> None:
    """Pages and transactions are numbers of 64 bits."""
    state = structs.replace(STATE, applied_seq=seq, dirty_pages=dirty_pages, transactions={seq: 2})
    assert decode_record(records.encode_checkpoint_end(state), LSN) == records.CheckpointEndRecord(state)


def test_a_checkpoint_of_another_shape_is_refused() -> None:
    """The state of a checkpoint is typed."""
    good = records.encode_checkpoint_end(STATE)
    assert "checkpoint cannot be read" in refusal(good[:HEADER_BYTES] + b"\x80" + good[HEADER_BYTES + 1 :])


def test_the_bytes_of_a_record_are_those_of_the_formats_page() -> None:
    """A reader written from the page alone reads what the code writes."""
    entry = PutObject("shop", "cart-7", b"paid", {"by": "web"})
    value = ValueEncoder().store(entry.data, entry.metadata)
    payload = encode_operation(entry, 42, flags=LAST, time_us=1_767_225_600_000_000, value=value)
    assert payload == hex_block("hex engine put")
