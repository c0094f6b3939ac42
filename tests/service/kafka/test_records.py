"""Record batches to frames and back: against the oracle, against kafka-python, compressed, damaged and hostile."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import crc32c as other_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.oracles import record_batches as oracle
from tests.oracles.record_batches import Record, batch_bytes, put_record
from tests.service.kafka.kafka_python import DefaultRecordBatch, DefaultRecordBatchBuilder

import tidelog
from tidelog import _native
from tidelog.errors import DataError
from tidelog.log.frame import MAX_PAYLOAD_BYTES, encode_many, writable_frames
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.records import (
    HEADER,
    HEADER_BYTES,
    BatchHeader,
    Compression,
    Control,
    RecordError,
    compress,
    compressed_batch,
    control_payload,
    decode_produced,
    decompress,
    encode_batches,
    read_control,
    read_header,
    stored_batches,
)
from tidelog.topics.message import decode_extension, decode_frames, raw_extensions

NOW_MS = 1_700_000_000_000
nullable = st.none() | st.binary(max_size=40)
names = st.text(max_size=8).map(str.encode)
headers = st.lists(st.tuples(names, nullable), max_size=4)
producers = st.just((-1, -1, -1)) | st.tuples(
    st.integers(0, 1 << 60), st.integers(0, 32767), st.integers(0, 5) | st.integers((1 << 31) - 4, (1 << 31) - 1)
)


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Records as a client sends them."""
    count = draw(st.integers(1, 6))
    deltas = st.integers(-5, 5) | st.integers(-(1 << 40), 1 << 40)
    return [
        Record(0 if index == 0 else draw(deltas), index, draw(nullable), draw(nullable), draw(headers))
        for index in range(count)
    ]


def make_batch(
    batch: list[Record], producer: tuple[int, int, int] = (-1, -1, -1), attributes: int = 0, base_ms: int = NOW_MS
) -> bytes:
    last = len(batch) - 1
    return batch_bytes(0, last, 0, attributes, producer, base_ms, base_ms, [put_record(one) for one in batch])


def read_batches(data: bytes) -> list[tuple[BatchHeader, list[tuple[int, int, Record]]]]:
    """All batches with offset, time in ms and content of their records, by the oracle."""
    found, at = [], 0
    while at < len(data):
        header = read_header(data, at)
        rest = oracle.Bytes(data[at + HEADER_BYTES : at + header.size], oracle.CUT)
        contents = []
        for _ in range(header.record_count):
            body = oracle.Bytes(rest.take(rest.number(5)), oracle.LENGTH)
            body.take(1)
            time_delta, offset_delta = body.number(10), body.number(5)
            key, value = body.sized(), body.sized()
            record = Record(time_delta, offset_delta, key, value, oracle._read_headers(body))
            contents.append((header.base_offset + offset_delta, header.base_timestamp + time_delta, record))
        assert not rest.data
        found.append((header, contents))
        at += header.size
    return found


def content(record: Record) -> tuple[object, ...]:
    return record.key, record.value, record.headers


@given(batch=records(), producer=producers, atomic=st.booleans(), time_us=st.none() | st.integers(0, 1 << 50))
def test_records_become_the_frames_that_the_oracle_makes(
    batch: list[Record], producer: tuple[int, int, int], atomic: bool, time_us: int | None
) -> None:
    """Byte by byte, for every kind of null and every kind of producer."""
    body = b"".join(put_record(one) for one in batch)
    mark = b"" if producer[0] < 0 else struct.pack("<qhiB", *producer, 1)
    arguments = (body, len(batch), 7, NOW_MS, time_us, atomic, mark, MAX_PAYLOAD_BYTES)
    assert _native.records_to_frames(*arguments) == oracle.records_to_frames(*arguments)


@given(batch=records(), producer=producers)
def test_what_a_client_sends_is_what_a_client_gets(batch: list[Record], producer: tuple[int, int, int]) -> None:
    """Null and empty, keys, headers in their order, repeated names, times and the producer."""
    transactional = producer[0] >= 0 and producer[1] % 2 == 1
    sent = make_batch(batch, producer, 0x10 if transactional else 0)
    decoded = decode_produced(sent, first_offset=100)
    answered = read_batches(encode_batches(decoded.frames, leader_epoch=3))
    assert len(answered) == 1
    header, contents = answered[0]
    assert [content(one) for _, _, one in contents] == [content(one) for one in batch]
    assert [offset for offset, _, _ in contents] == list(range(100, 100 + len(batch)))
    assert [time for _, time, _ in contents] == [NOW_MS + one.time_delta for one in batch]
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == producer
    assert (header.is_transactional, header.leader_epoch, header.record_count) == (transactional, 3, len(batch))
    assert header.max_timestamp == max(time for _, time, _ in contents)


@st.composite
def logs(draw: st.DrawFn) -> tuple[int, list[bytes]]:
    """The payloads of a log: messages of several producers and of none, control records, removed and lost ones."""
    first, payloads = draw(st.integers(0, 50)), []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["batch", "batch", "batch", "removed", "lost", "control", "plain"]))
        if kind == "batch":
            producer = draw(producers)
            mark = b"" if producer[0] < 0 else struct.pack("<qhiB", *producer, draw(st.integers(0, 1)))
            made = draw(records())
            body = b"".join(put_record(one) for one in made)
            time_us = draw(st.none() | st.integers(NOW_MS * 1000, NOW_MS * 1000 + 1500))
            frames = _native.records_to_frames(body, len(made), 0, NOW_MS, time_us, draw(st.booleans()), mark, 1 << 30)
            assert len(frames) == 3
            payloads += writable_frames(0, *frames).payloads()
        elif kind == "control":
            control = Control(draw(st.booleans()), draw(st.integers(0, 3)), 2, 9, NOW_MS * 1000 + 7)
            payloads.append(control_payload(control))
        elif kind == "plain":
            payloads.append(_native.encode(b"v", None, {"h": b"x"}, NOW_MS * 1000 + 999, b"\x03\x08" + bytes(8)))
        else:
            payloads += [b"\1" if kind == "removed" else b"\0"] * draw(st.integers(1, 2))
    for index in range(len(payloads)):
        if draw(st.integers(0, 9)) == 0:
            payloads[index] = b"\1"
    return first, payloads


@given(log=logs(), max_batch_bytes=st.sampled_from([0, 61, 200, 1 << 20]), data=st.data())
def test_frames_become_the_batches_that_the_oracle_makes(
    log: tuple[int, list[bytes]], max_batch_bytes: int, data: st.DataObject
) -> None:
    """Byte by byte, from any range of a log."""
    frames = encode_many(*log)
    start = data.draw(st.integers(0, frames.count))
    stop = data.draw(st.integers(start, frames.count))
    arguments = (frames.first_offset, frames.buffer, frames.positions, frames.lengths, start, stop)
    made = _native.frames_to_batches(*arguments, max_batch_bytes, 5)
    assert made == oracle.frames_to_batches(*arguments, max_batch_bytes, 5)
    assert _native.producer_batches(*arguments) == oracle.producer_batches(*arguments)
    marks = oracle.transaction_marks(*arguments)
    assert _native.transaction_marks(*arguments) == marks
    bare = frames.payloads(start, stop)
    assert _native.payload_transaction_marks(frames.first_offset + start, bare) == marks


@given(log=logs())
def test_batches_cover_every_offset(log: tuple[int, list[bytes]]) -> None:
    """Also those that a compaction removed, or a consumer would ask for them for ever."""
    frames = encode_many(*log)
    covered: list[int] = []
    for header, contents in read_batches(encode_batches(frames, max_batch_bytes=300)):
        covered += range(header.base_offset, header.base_offset + header.last_offset_delta + 1)
        assert all(header.base_offset <= offset <= covered[-1] for offset, _, _ in contents)
    assert covered == list(range(frames.first_offset, frames.next_offset))


def test_stored_batches_are_those_that_were_produced() -> None:
    """The state of producers is rebuilt from them."""
    one = [Record(0, index, None, b"v", []) for index in range(3)]
    first = decode_produced(make_batch(one, (7, 1, 5), 0x10)).frames.payloads()
    second = decode_produced(make_batch(one[:1], (8, 0, 0))).frames.payloads()
    third = decode_produced(make_batch(one, (7, 1, 8), 0x10)).frames.payloads()
    plain = decode_produced(make_batch(one)).frames.payloads()
    end = control_payload(Control(True, 7, 1, 4, 123))
    found = stored_batches(encode_many(10, [*first, *third, *second, *plain, end]))
    assert [(item.first_offset, item.last_offset, item.producer_id, item.base_sequence) for item in found] == [
        (10, 12, 7, 5),
        (13, 15, 7, 8),
        (16, 16, 8, 0),
        (20, 20, 7, 4),
    ]
    assert [item.is_control for item in found] == [False, False, False, True]
    assert found[3].is_commit
    assert [item.is_transactional for item in found] == [True, True, False, True]


def test_nulls_of_kafka_are_nulls_of_messages() -> None:
    """Null and empty values, null headers and repeated names."""
    batch = [Record(0, 0, b"k", None, [(b"a", None), (b"a", b"2")]), Record(1, 1, None, b"", [])]
    frames = decode_produced(make_batch(batch)).frames
    messages = decode_frames(frames, 0, 2)
    assert [(one.key, one.value) for one in messages] == [(b"k", None), (None, b"")]
    assert [one.header_list for one in messages] == [(("a", None), ("a", b"2")), ()]
    extensions = raw_extensions(frames, 0, 2)
    assert extensions is not None
    assert [decode_extension(one).batch for one in extensions if one is not None] == [(0, 2), (1, 2)]
    assert extensions[0] == struct.pack("<BBII", 1, 8, 0, 2) + bytes([4, 2, 1, 1])
    assert extensions[1] == struct.pack("<BBII", 1, 8, 1, 2)


def test_messages_of_the_library_are_served() -> None:
    """What `Topic.append` wrote has no nulls and no producer; times are cut to ms."""
    payloads = [_native.encode(b"one", None, None, 1_500), _native.encode(b"", b"k", {"h": b"x"}, -1)]
    [(header, contents)] = read_batches(encode_batches(encode_many(3, payloads)))
    assert [(offset, time, content(one)) for offset, time, one in contents] == [
        (3, 1, (None, b"one", [])),
        (4, -1, (b"k", b"", [(b"h", b"x")])),
    ]
    assert (header.producer_id, header.base_sequence) == (-1, -1)


@settings(max_examples=examples(30))
@given(batch=records(), compression=st.sampled_from([0, 1]))
def test_kafka_python_reads_our_batches_and_we_read_its(batch: list[Record], compression: int) -> None:
    """An independent implementation of the format agrees."""
    served = encode_batches(decode_produced(make_batch(batch), first_offset=9).frames)
    if compression:
        served = compressed_batch(served, compression)
    theirs = DefaultRecordBatch(served)
    assert theirs.validate_crc()
    got: list[Any] = list(theirs)
    assert [(one.key, one.value) for one in got] == [(one.key, one.value) for one in batch]
    assert [one.timestamp for one in got] == [NOW_MS + one.time_delta for one in batch]
    assert [one.offset for one in got] == list(range(9, 9 + len(batch)))
    assert [[(n.encode(), v) for n, v in one.headers] for one in got] == [one.headers for one in batch]
    builder = DefaultRecordBatchBuilder(2, compression, False, -1, -1, -1, 1 << 20)
    for index, one in enumerate(batch):
        builder.append(index, NOW_MS + one.time_delta, one.key, one.value, [(n.decode(), v) for n, v in one.headers])
    sent = decode_produced(bytes(builder.build()))
    [(_, contents)] = read_batches(encode_batches(sent.frames))
    assert [content(one) for _, _, one in contents] == [content(one) for one in batch]


@given(data=st.binary(max_size=100), value=st.integers(0, (1 << 32) - 1), seed=st.integers(0, 1 << 20))
def test_the_checksum_is_crc32c(data: bytes, value: int, seed: int) -> None:
    """By the instruction and by tables, against bits and another library."""
    assert _native.crc32c(data, value) == oracle.crc32c(data, value) == _native.crc32c_portable(data, value)
    chance = random.Random(seed)
    large = memoryview(chance.randbytes(chance.randrange(20_000)))[chance.randrange(8) :]
    expected = other_crc32c.crc32c(large, value)
    assert _native.crc32c(large, value) == expected == _native.crc32c_portable(large, value)


@given(data=st.binary(max_size=5000), compression=st.sampled_from(list(Compression)))
def test_records_are_decompressed(data: bytes, compression: int) -> None:
    """Every kind, and not a byte more than allowed."""
    packed = compress(compression, data)
    assert bytes(decompress(compression, packed, max(len(data), 1))) == data
    if len(data) > 1:
        with pytest.raises(RecordError):
            decompress(compression, packed, len(data) - 1)


def test_raw_snappy_is_decompressed_as_java_s_is() -> None:
    """librdkafka sends the one, Java the other."""
    import cramjam

    data = b"abc" * 50_000
    assert bytes(decompress(2, bytes(cramjam.snappy.compress_raw(data)), 1 << 20)) == data
    assert bytes(decompress(2, compress(2, data), 1 << 20)) == data
    for hostile in (b"\xff\xff\xff\xff\x07", b"", compress(2, data)[:-5], compress(2, data)[:18]):
        with pytest.raises(RecordError):
            decompress(2, hostile, 1 << 40)


@given(compression=st.integers(1, 7), data=st.binary(max_size=60))
def test_hostile_compressed_bytes_are_refused(compression: int, data: bytes) -> None:
    """Whatever they are, they decompress within the limit or raise the error that has a code."""
    code = ErrorCode.NONE
    try:
        assert len(decompress(compression, data, 10_000)) <= 10_000
    except RecordError as error:
        code = error.code
    refusals = {ErrorCode.CORRUPT_MESSAGE, ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE}
    assert code in {ErrorCode.NONE, *refusals}


def test_a_bomb_is_refused_before_it_fills_the_memory() -> None:
    """A gigabyte of zeros in a megabyte of gzip."""
    bomb = compress(Compression.GZIP, bytes(50 << 20))
    with pytest.raises(RecordError, match="decompress"):
        decompress(Compression.GZIP, bomb, 1 << 20)


@settings(max_examples=examples(150))
@given(
    batch=records(),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 400),
)
def test_hostile_records_get_the_answer_of_the_oracle(
    batch: list[Record], changes: list[tuple[int, int]], cut: int
) -> None:
    """Changed and cut bytes are refused for the same reason at the same record, or give the same frames."""
    body = bytearray(b"".join(put_record(one) for one in batch))
    for at, byte in changes:
        body[at % len(body)] = byte
    if cut < len(body) // 2:
        del body[-cut:]
    arguments = (bytes(body), len(batch), 0, NOW_MS, None, True, b"", 1 << 16)
    assert _native.records_to_frames(*arguments) == oracle.records_to_frames(*arguments)


@settings(max_examples=examples(150))
@given(log=logs(), changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=6))
def test_hostile_frames_give_batches_or_a_data_error(
    log: tuple[int, list[bytes]], changes: list[tuple[int, int]]
) -> None:
    """Bytes from a disk are no better than bytes from a network."""
    frames = encode_many(*log)
    buffer = bytearray(frames.buffer)
    for at, byte in changes:
        buffer[at % len(buffer)] = byte
    arguments = (frames.first_offset, bytes(buffer), frames.positions, frames.lengths, 0, frames.count)
    assert _native.transaction_marks(*arguments) == oracle.transaction_marks(*arguments)
    results = []
    for module in (_native, oracle):
        try:
            results.append(module.frames_to_batches(*arguments, 1 << 20, 0))
        except DataError:
            results.append("refused")
    assert results[0] == results[1]
    if results[0] != "refused":
        assert _native.producer_batches(*arguments) == oracle.producer_batches(*arguments)


def refused(batch: bytes, **changes: Any) -> ErrorCode:
    """The code for a batch whose header was changed."""
    header = BatchHeader._make(HEADER.unpack_from(batch))._replace(**changes)
    changed = bytearray(batch)
    HEADER.pack_into(changed, 0, *header)
    if "crc" not in changes:
        struct.pack_into(">I", changed, 17, _native.crc32c(changed[21:]))
    with pytest.raises(RecordError) as caught:
        decode_produced(bytes(changed))
    return caught.value.code


def test_batches_that_kafka_would_refuse_are_refused_with_its_code() -> None:
    """Each rule of a broker, one by one."""
    batch = make_batch([Record(0, 0, b"k", b"v", []), Record(0, 1, b"k", b"v", [])])
    assert refused(batch, crc=1) == ErrorCode.CORRUPT_MESSAGE
    assert refused(batch, magic=1) == ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT
    assert refused(batch, length=10) == ErrorCode.CORRUPT_MESSAGE
    assert refused(batch, length=1 << 20) == ErrorCode.CORRUPT_MESSAGE
    assert refused(batch, record_count=3) == ErrorCode.INVALID_RECORD
    assert refused(batch, record_count=3, last_offset_delta=2) == ErrorCode.CORRUPT_MESSAGE
    assert refused(batch, record_count=1, last_offset_delta=0) == ErrorCode.INVALID_RECORD
    assert refused(batch, record_count=0, last_offset_delta=-1) == ErrorCode.INVALID_RECORD
    assert refused(batch, record_count=1 << 30, last_offset_delta=(1 << 30) - 1) == ErrorCode.CORRUPT_MESSAGE
    assert refused(batch, attributes=0x20) == ErrorCode.INVALID_RECORD
    assert refused(batch, attributes=0x10) == ErrorCode.INVALID_RECORD
    assert refused(batch, attributes=6) == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert refused(batch, producer_id=5, producer_epoch=0) == ErrorCode.INVALID_RECORD
    assert refused(batch, base_timestamp=1 << 62) == ErrorCode.INVALID_TIMESTAMP
    for data in (b"", batch[:60], batch + b"\0"):
        with pytest.raises(RecordError):
            decode_produced(data)
    with pytest.raises(RecordError) as caught:
        decode_produced(make_batch([Record(0, 0, None, bytes(2000), [])]), max_message_bytes=1000)
    assert caught.value.code == ErrorCode.MESSAGE_TOO_LARGE


def test_headers_beyond_what_an_envelope_holds_are_refused() -> None:
    """65,535 headers and 65,535 bytes of a name; a null value among the first 2,032."""
    many = Record(0, 0, None, b"", [(b"", b"")] * 0xFFFF)
    assert decode_produced(make_batch([many])).frames.count == 1
    late: list[tuple[bytes, bytes | None]] = [*[(b"h", b"")] * 2031, (b"h", None)]
    [(_, [(_, _, found)])] = read_batches(
        encode_batches(decode_produced(make_batch([Record(0, 0, None, b"", late)])).frames)
    )
    assert found.headers == late
    wrongs: list[list[tuple[bytes, bytes | None]]] = [
        [(b"", b"")] * 0x10000,
        [(b"x" * 0x10000, b"")],
        [*[(b"h", b"")] * 2032, (b"h", None)],
    ]
    for wrong in wrongs:
        with pytest.raises(RecordError, match="too many headers"):
            decode_produced(make_batch([Record(0, 0, None, b"", wrong)]))


def test_the_time_of_append_replaces_that_of_the_client() -> None:
    """`message.timestamp.type=LogAppendTime`."""
    frames = decode_produced(make_batch([Record(0, 0, None, b"v", [])]), append_time_us=1_234_567).frames
    [(_, [(_, time, _)])] = read_batches(encode_batches(frames))
    assert time == 1234


def test_batches_say_whose_time_their_records_have() -> None:
    """A consumer takes the newest time of such a batch for all its records, so each time has a batch of its own."""
    sent = make_batch([Record(0, 0, None, b"a", []), Record(9, 1, None, b"b", [])])
    parts = [
        decode_produced(sent, append_time_us=time_us).frames for time_us in (5_000_000, 5_000_999, 6_000_000, None)
    ]
    frames = encode_many(0, [payload for part in parts for payload in part.payloads()])
    for data in (encode_batches(frames), b"".join(encode_batches(frames, at, at + 1) for at in range(frames.count))):
        found = [
            (header.attributes, header.max_timestamp, time, record.value)
            for header, contents in read_batches(data)
            for _, time, record in contents
        ]
        assert found[:6] == [
            (0x08, 5000, 5000, b"a"),
            (0x08, 5000, 5000, b"b"),
            (0x08, 5000, 5000, b"a"),
            (0x08, 5000, 5000, b"b"),
            (0x08, 6000, 6000, b"a"),
            (0x08, 6000, 6000, b"b"),
        ]
        assert [(attributes, time) for attributes, _, time, _ in found[6:]] == [(0, NOW_MS), (0, NOW_MS + 9)]


def test_control_records_are_read_back() -> None:
    """And nothing else is one."""
    control = Control(False, 1 << 40, 3, 17, NOW_MS * 1000)
    assert read_control(control_payload(control)) == control
    message = _native.encode(b"", None, None, 0)
    assert len(message) == 24
    assert read_control(message) is None
    assert read_control(b"\1") is None
    with pytest.raises(DataError):
        read_control(b"\2\7" + bytes(22))
    [(header, [(_, _, record)])] = read_batches(encode_batches(encode_many(5, [control_payload(control)])))
    assert (header.is_control, header.is_transactional, header.producer_id) == (True, True, 1 << 40)
    assert content(record) == (b"\0\0\0\0", b"\0\0\0\0\0\x11", [])


def test_decoded_records_are_appended_without_a_copy(tmp_path: Path) -> None:
    """The log gives the frames their offsets in the buffer that they were decoded into."""
    with tidelog.open(tmp_path) as logs:
        topic = logs.topic("ns/t")
        topic.append(b"before")
        decoded = decode_produced(
            make_batch([Record(0, index, None, value, []) for index, value in enumerate((b"a", b"b"))])
        )
        assert topic.append_frames(decoded.frames, sync=True) == 1
        assert [message.value for message in topic.read()] == [b"before", b"a", b"b"]
        assert bytes(decoded.frames.buffer[:8]) == (1).to_bytes(8, "little")
