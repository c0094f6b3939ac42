"""Columns from frames and back: what is in them, what is refused, and that C and its twin always agree."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.log.workbench import assert_nothing_leaks
from tests.oracles import columns as columns_oracle
from tests.twins import agreed, outcome

from tidelog import _native
from tidelog.errors import DataError, InputError, MessageTooLargeError
from tidelog.log import frame
from tidelog.log.frame import Frames, encode_many
from tidelog.topics.columns import (
    Columns,
    Ended,
    HeadersColumn,
    TimesColumn,
    VarColumn,
    check_readable,
    encode_columns,
    frames_digest,
    gather_columns,
    lost_until,
    read_error,
    unreadable_frames,
)
from tidelog.topics.message import Message, decode_frames, encode_message

kernel: Any = _native
twin: Any = columns_oracle
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LOST, REMOVED = b"\x00", b"\x01"
CONTROL = b"\x02\x01" + bytes(22)
EVERYTHING = 31
NO_LIMIT = 1 << 40

HEADERS = st.dictionaries(st.text(max_size=8), st.binary(max_size=12), max_size=4)
KEYS = st.none() | st.binary(max_size=12)
TIMES = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
EXTENSIONS = st.sampled_from([b"", b"\x03\x08" + bytes(8), b"\x09\x02ab"])
PAYLOADS = st.builds(encode_message, st.binary(max_size=40), KEYS, HEADERS, TIMES, EXTENSIONS)
# What is null and has bytes is damage, and so is an entry that is there twice or has no flags.
NULLS = st.sampled_from(
    [b"\x04\x01\x01", b"\x04\x02\x00\x05", b"\x04\x03\x01\xff\xff", b"\x04\x00", b"\x04\x01\x01" * 2]
)
SPARSE = st.dictionaries(st.text(max_size=3), st.binary(max_size=1), max_size=4)
NULLABLE = st.builds(encode_message, st.binary(max_size=1), KEYS, SPARSE, TIMES, NULLS)
SPECIAL = st.sampled_from([REMOVED, REMOVED, CONTROL, LOST])
assert_twins_agree = partial(agreed, kernel, twin)


def places(frames: Frames) -> tuple[bytes, bytes, bytes]:
    """What a kernel is given of a batch of frames."""
    return frames.buffer, frames.positions, frames.lengths


def items(column: VarColumn) -> list[bytes | None]:
    """The rows of a column of bytes."""
    data, ends = bytes(column.data), memoryview(bytes(column.ends)).cast("i")
    bits = None if column.validity is None else int.from_bytes(bytes(column.validity), "little")
    return [
        data[ends[row] : ends[row + 1]] if bits is None or bits >> row & 1 else None
        for row in range(column.first, len(ends) - 1)
    ]


def lists(column: HeadersColumn) -> list[dict[str, bytes]]:
    """The headers of every row."""
    ends = memoryview(bytes(column.ends)).cast("i")
    pairs = list(zip(items(column.names), items(column.contents), strict=True))
    return [
        {(name or b"").decode(): content or b"" for name, content in pairs[ends[row] : ends[row + 1]]}
        for row in range(len(ends) - 1)
    ]


def numbers(column: bytes | None) -> list[int]:
    """The rows of a column of 64-bit numbers."""
    assert column is not None
    return [number for (number,) in struct.iter_unpack("<q", column)]


def messages_of(found: Columns) -> list[Message]:
    """Columns as the messages that they were."""
    assert found.keys is not None
    assert found.values is not None
    assert found.headers is not None
    times = [EPOCH + timedelta(microseconds=time_us) for time_us in numbers(found.timestamps)]
    rows = zip(items(found.values), items(found.keys), lists(found.headers), times, numbers(found.offsets), strict=True)
    return [Message(value or b"", key, headers, time, offset) for value, key, headers, time, offset in rows]


def without_delivery(messages: list[Message]) -> list[Message]:
    """Messages without what has no column."""
    return [Message(each.value, each.key, each.headers, each.timestamp, each.offset) for each in messages]


# ---- gathering ----


@settings(max_examples=examples(80))
@given(st.lists(PAYLOADS, max_size=20), st.integers(0, 1 << 62), st.integers(0, 21), st.integers(0, 21))
def test_columns_hold_what_the_messages_hold(payloads: list[bytes], first: int, start: int, stop: int) -> None:
    """Row by row, columns say the same as decoded messages."""
    frames = encode_many(first, payloads)
    found = gather_columns(frames, start, stop, headers=True)
    assert messages_of(found) == without_delivery(decode_frames(frames, start, stop))
    assert found.ended is Ended.ALL


@settings(max_examples=examples(80))
@given(
    st.lists(PAYLOADS | NULLABLE | SPECIAL, max_size=12),
    st.integers(0, 13),
    st.integers(0, 13),
    st.integers(0, EVERYTHING),
    st.integers(0, 14),
    st.integers(0, 200) | st.just(NO_LIMIT),
)
def test_the_twins_gather_the_same(
    payloads: list[bytes], start: int, stop: int, wanted: int, max_rows: int, max_bytes: int
) -> None:
    """Any range, any choice of columns and any limits give the same buffers in C and in Python."""
    frames = encode_many(7, payloads)
    assert_twins_agree("gather_columns", 7, *places(frames), start, stop, wanted, max_rows, max_bytes)


def test_only_the_columns_asked_for_are_made() -> None:
    """A column that nobody wants costs nothing."""
    frames = encode_many(0, [encode_message(b"v", b"k", {"h": b"1"}, 5)])
    found = gather_columns(frames, 0, 1, keys=False, values=False, offsets=False, timestamps=False)
    assert found == Columns(
        count=1,
        stopped_at=1,
        ended=Ended.ALL,
        offsets=None,
        timestamps=None,
        keys=None,
        values=None,
        headers=None,
    )


def test_keys_have_a_validity_only_where_one_is_missing() -> None:
    """An empty key is a key, no key is a null, and without nulls there is no bitmap."""
    keyed, empty, bare = (encode_message(b"", key, None, 0) for key in (b"k", b"", None))
    complete = gather_columns(encode_many(0, [keyed, empty]), 0, 2).keys
    partial = gather_columns(encode_many(0, [keyed, empty, bare]), 0, 3).keys
    assert complete is not None
    assert partial is not None
    assert complete.validity is None
    assert partial.validity == b"\x03"
    assert items(partial) == [b"k", b"", None]


def test_what_compaction_removed_gives_no_row() -> None:
    """Emptied frames are stepped over; the offsets of the others stay what they were."""
    message = encode_message(b"v", None, None, 0)
    frames = encode_many(10, [REMOVED, message, REMOVED, REMOVED, message, REMOVED])
    found = gather_columns(frames, 0, 6)
    assert (found.count, found.stopped_at, numbers(found.offsets)) == (2, 6, [11, 14])


def test_columns_end_before_what_was_lost() -> None:
    """Everything before a lost offset is handed out; gathering goes on behind the gap."""
    message = encode_message(b"v", None, None, 0)
    frames = encode_many(10, [message, LOST, LOST, message])
    found = gather_columns(frames, 0, 4)
    assert (found.count, found.stopped_at, found.ended) == (1, 1, Ended.LOST)
    assert lost_until(frames, 1, 4) == 3
    assert lost_until(frames, 1, 2) == 2
    rest = gather_columns(frames, 3, 4)
    assert (numbers(rest.offsets), rest.ended) == ([13], Ended.ALL)


def test_limits_leave_the_rest_for_the_next_call() -> None:
    """A batch ends at the limit of rows or bytes, but never takes nothing."""
    frames = encode_many(0, [encode_message(b"1234", b"56", None, 0)] * 5)
    by_rows = gather_columns(frames, 0, 5, max_rows=2)
    by_bytes = gather_columns(frames, 2, 5, max_bytes=12)
    small = gather_columns(frames, 4, 5, max_bytes=1)
    assert [(each.count, each.stopped_at) for each in (by_rows, by_bytes, small)] == [(2, 2), (2, 4), (1, 5)]
    assert [each.ended for each in (by_rows, by_bytes, small)] == [Ended.LIMIT, Ended.LIMIT, Ended.ALL]
    with pytest.raises(InputError, match="1 or more"):
        gather_columns(frames, 0, 5, max_rows=0)


def test_a_large_batch_lets_other_threads_run() -> None:
    """Gathering in two threads at once, with the GIL given away, gives what one alone gives."""
    frames = encode_many(0, [encode_message(b"x" * 900, b"k", {"h": b"c"}, 9)] * 3000)
    alone = gather_columns(frames, 0, 3000, headers=True)
    found: list[Columns] = []
    threads = [
        threading.Thread(target=lambda: found.append(gather_columns(frames, 0, 3000, headers=True))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone, alone]


# ---- hostile bytes ----


def is_refused(frames: Frames) -> bool:
    """Whether the first frame cannot be read as a message."""
    return bool(outcome(decode_frames, frames, 0, 1)[0] == "raised")


@settings(max_examples=examples(100))
@given(st.data())
def test_a_damaged_envelope_is_refused_as_a_message_is(data: st.DataObject) -> None:
    """After any change to any byte, columns either say what the message says or end before it."""
    payload = bytearray(data.draw(PAYLOADS | NULLABLE))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, min(len(payload) - 1, 60)))
        payload[position] = data.draw(st.integers(0, 255))
    frames = encode_many(41, [bytes(payload)[: data.draw(st.integers(2, len(payload)))]])
    decoded = outcome(decode_frames, frames, 0, 1)
    gathered = gather_columns(frames, 0, 1, headers=True)
    if decoded[0] == "raised":
        assert (gathered.count, gathered.ended) == (0, Ended.UNREADABLE)
        assert str(read_error(frames, 0)) == decoded[2]
    else:
        assert messages_of(gathered) == without_delivery(decoded[1])
    for wanted in (0, EVERYTHING):
        assert_twins_agree("gather_columns", 41, *places(frames), 0, 1, wanted, 9, NO_LIMIT)


def encoded_characters() -> Iterator[bytes]:
    """Every shape of a character at the edges of UTF-8, right and wrong."""
    for code in (0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF):
        yield chr(code).encode("utf-8", "surrogatepass")
    yield from (
        b"\xc0\x80",
        b"\xc1\xbf",
        b"\xe0\x9f\xbf",
        b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\xf5\x80\x80\x80",
    )
    yield from (b"\x80", b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xe2\x28\xa1", b"\xf0\x9f\x28\x80", b"\xc3(")


@pytest.mark.parametrize("character", list(encoded_characters()))
def test_header_names_are_utf8(character: bytes) -> None:
    """The rules of UTF-8 are Python's own, at every edge and at every place of a name."""
    for name in (character, b"twelve bytes" + character, character + b"twelve bytes"):
        block = struct.pack("<HI", len(name), 1) + name + b"c"
        payload = struct.pack("<BBHIqII", 1, 0, 1, 0, 0, len(block), 0) + block
        frames = encode_many(3, [payload])
        assert is_refused(frames) is (gather_columns(frames, 0, 1).ended is Ended.UNREADABLE)
        assert_twins_agree("gather_columns", 3, *places(frames), 0, 1, EVERYTHING, 9, NO_LIMIT)


@given(st.binary(max_size=6))
def test_any_bytes_as_a_name_are_judged_as_python_does(name: bytes) -> None:
    """Short names of any bytes are taken or refused alike."""
    block = struct.pack("<HI", len(name), 0) + name
    payload = struct.pack("<BBHIqII", 1, 0, 1, 0, 0, len(block), 0) + block
    assert_twins_agree("gather_columns", 3, *places(encode_many(3, [payload])), 0, 1, EVERYTHING, 9, NO_LIMIT)


def test_claims_about_places_are_checked() -> None:
    """Places outside the buffer, arrays that do not match and offsets that no column holds are refused alike."""
    buffer = encode_many(0, [encode_message(b"v", None, None, 0)]).buffer
    outside = struct.pack("=Q", 1 << 63), struct.pack("=I", 4)
    assert assert_twins_agree("gather_columns", 0, buffer, *outside, 0, 1, 31, 9, 99)[1] is ValueError
    assert assert_twins_agree("gather_columns", 0, buffer, b"", b"1234", 0, 1, 31, 9, 99)[1] is ValueError
    fine = struct.pack("=Q", 16), struct.pack("=I", 25)
    for first in (-1, (1 << 63) - 1, 1 << 64):
        assert assert_twins_agree("gather_columns", first, buffer, *fine, 0, 1, 31, 9, 99)[1] is InputError
    for start, stop in ((-1, 1), (0, -1)):
        assert assert_twins_agree("gather_columns", 0, buffer, *fine, start, stop, 31, 9, 99)[1] is ValueError


def test_what_is_no_message_ends_the_columns_before_it() -> None:
    """The rows before it are there, and it is named; the next call may begin behind it."""
    payloads = [encode_message(b"v" * 100, b"k", {"h": b"1"}, 0)] * 1000
    payloads[700] = b"\x02" + payloads[700][1:]
    frames = frame.encode_many(1000, payloads)
    found = gather_columns(frames, 0, 1000, headers=True)
    assert (found.count, found.stopped_at, found.ended) == (700, 700, Ended.UNREADABLE)
    assert messages_of(found) == decode_frames(frames, 0, 700)
    assert "message 1700 has envelope version 2" in str(read_error(frames, 700))
    assert read_error(frames, 701) is None
    assert gather_columns(frames, 701, 1000).count == 299


def test_headers_of_a_row_that_is_not_taken_are_left_out() -> None:
    """One damaged header, or no room, takes the row's other headers out as well."""
    good = encode_message(b"v", None, {"a": b"1", "b": b"2"}, 0)
    bad = good.replace(b"b2", b"\xff2")
    frames = frame.encode_many(0, [good, bad])
    found = gather_columns(frames, 0, 2, headers=True)
    assert (messages_of(found), found.ended) == (decode_frames(frames, 0, 1), Ended.UNREADABLE)
    twice = frame.encode_many(0, [good, good])
    assert messages_of(gather_columns(twice, 0, 2, headers=True, max_bytes=20)) == decode_frames(twice, 0, 1)
    for limit in (20, 1000):
        assert_twins_agree("gather_columns", 0, *places(frames), 0, 2, EVERYTHING, 9, limit)


def test_every_frame_that_is_no_message_is_found() -> None:
    """Lost and removed ones are not among them, and what cannot be read is refused as a row."""
    good = encode_message(b"v", None, None, 0)
    frames = frame.encode_many(7, [good, b"\x02" * 30, b"\x00", b"\x00", b"\x01", b"short", good])
    found = list(unreadable_frames(frames))
    assert [index for index, _ in found] == [1, 5]
    assert [reason.partition(" has ")[0].partition(" is ")[0] for _, reason in found] == ["message 8", "message 12"]
    with pytest.raises(DataError, match="a row is no message: message 8 has envelope version 2"):
        check_readable(frames)
    check_readable(frame.encode_many(7, [good, b"\x00", b"\x01"]))


# ---- the way back ----


def bitmap(bits: list[bool], first: int) -> bytes:
    """Bits behind `first` others, the lowest of a byte first."""
    number = sum(1 << index for index, bit in enumerate(bits, first) if bit)
    return number.to_bytes((first + len(bits) + 7) // 8, "little")


def column_of(rows: list[bytes | None], first: int = 0, end_bytes: int = 4) -> VarColumn:
    """Arrow's layout of some rows, behind `first` others; data of rows before them is there too."""
    ends, data = [2 * index for index in range(first)], b"--" * first
    ends.append(len(data))
    for row in rows:
        data += b"gone" if row is None else row  # what is null may have bytes all the same
        ends.append(len(data))
    packed = struct.pack(f"<{len(ends)}{'i' if end_bytes == 4 else 'q'}", *ends)
    validity = bitmap([row is not None for row in rows], first) if None in rows else None
    return VarColumn(validity, packed, data + b"--", first, end_bytes)


def headers_of(rows: list[dict[str, Any] | None], first: int = 0, end_bytes: int = 4) -> HeadersColumn:
    """Arrow's layout of some lists of headers, behind `first` empty ones."""
    pairs = [pair for row in rows for pair in (row or {}).items()]
    ends = [0] * (first + 1)
    for row in rows:
        ends.append(ends[-1] + len(row or {}))
    packed = struct.pack(f"<{len(ends)}{'i' if end_bytes == 4 else 'q'}", *ends)
    validity = bitmap([row is not None for row in rows], first) if None in rows else None
    names, contents = (
        column_of([name.encode() for name, _ in pairs]),
        column_of([content for _, content in pairs], 3, 8),
    )
    return HeadersColumn(validity, packed, names, contents, first, end_bytes)


def times_of(rows: list[int | None], first: int = 0) -> TimesColumn:
    """Arrow's layout of some times, behind `first` others."""
    packed = struct.pack(f"<{first + len(rows)}q", *[1 << 62] * first, *(row or 0 for row in rows))
    return TimesColumn(bitmap([row is not None for row in rows], first), packed, first)


ROWS = st.tuples(st.binary(max_size=20), KEYS, st.none() | HEADERS, st.none() | TIMES)


@settings(max_examples=examples(80))
@given(st.lists(ROWS, max_size=9), st.integers(0, 9), st.sampled_from([4, 8]), st.integers(0, 1 << 63))
def test_rows_become_the_frames_that_their_messages_would(
    rows: list[tuple[bytes, bytes | None, dict[str, bytes] | None, int | None]],
    skipped: int,
    end_bytes: int,
    first_offset: int,
) -> None:
    """Byte for byte: wherever the arrays begin, with ends of 32 or 64 bits, with nulls and without."""
    values, keys, headers, times = ([row[part] for row in rows] for part in range(4))
    given_columns: tuple[Any, ...] = (
        column_of(values, skipped, end_bytes),  # type: ignore[arg-type]
        column_of(keys, skipped, end_bytes),  # type: ignore[arg-type]
        headers_of(headers, skipped, end_bytes),  # type: ignore[arg-type]
        times_of(times, skipped),  # type: ignore[arg-type]
    )
    payloads = [encode_message(row[0], row[1], row[2], 77 if row[3] is None else row[3]) for row in rows]
    expected = encode_many(first_offset, payloads)
    got = assert_twins_agree("encode_columns", first_offset, len(rows), 77, 1 << 30, *given_columns)[1]
    assert got == (0, *places(expected))


def test_a_value_is_all_that_a_row_needs() -> None:
    """Without keys, headers and times the messages have none, and the one time."""
    frames = encode_columns(5, 2, column_of([b"a", b"b"]), timestamp_us=9)
    assert frames == encode_many(5, [encode_message(value, None, None, 9) for value in (b"a", b"b")])
    assert encode_columns(5, 0, VarColumn(None, b"", b""), timestamp_us=9).count == 0


def test_what_was_gathered_goes_back_as_it_is() -> None:
    """Columns that came out of frames make the same frames again."""
    payloads = [
        encode_message(b"v" * size, b"k" if size % 2 else None, {"a": b"1", "b": b""}, size) for size in range(40)
    ]
    frames = encode_many(3, payloads)
    found = gather_columns(frames, 0, 40, headers=True)
    assert found.values is not None
    assert found.timestamps is not None
    times = TimesColumn(None, found.timestamps)
    again = encode_columns(
        3, 40, found.values, keys=found.keys, headers=found.headers, timestamps=times, timestamp_us=0
    )
    assert again == frames


@settings(max_examples=examples(80))
@given(
    st.lists(st.none() | st.binary(max_size=6), min_size=1, max_size=9),
    st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.binary(max_size=3)), max_size=20),
)
def test_nulls_and_repeated_names_go_there_and_back(
    values: list[bytes | None], headers: list[tuple[str, bytes | None]]
) -> None:
    """A null value, null values of headers and names that repeat are in the frames, in their order."""
    names, contents = column_of([name.encode() for name, _ in headers], 1), column_of([each for _, each in headers], 2)
    ends = struct.pack(f"<{len(values) + 1}i", *[0] * len(values), len(headers))
    lists_column = HeadersColumn(None, ends, names, contents)
    given_columns = (column_of(values, 3), None, lists_column, None)
    made = assert_twins_agree("encode_columns", 0, len(values), 77, 1 << 30, *given_columns)[1]
    found = gather_columns(Frames(0, *made[1:]), 0, len(values), headers=True)
    assert found.ended is Ended.ALL
    assert found.values is not None
    assert found.headers is not None
    assert items(found.values) == values
    assert items(found.headers.names) == [name.encode() for name, _ in headers]
    assert items(found.headers.contents) == [content for _, content in headers]
    assert (found.values.validity is None) is (None not in values)
    again = encode_columns(0, len(values), found.values, headers=found.headers, timestamp_us=77)
    assert (0, *places(again)) == made


def one_header(name: bytes | None, content: bytes | None, *more: bytes) -> HeadersColumn:
    """A row with a header, and more of them with nothing in them."""
    names = column_of([name, *more])
    ends = struct.pack("<2i", 0, 1 + len(more))
    return HeadersColumn(None, ends, names, column_of([content, *(b"" for _ in more)]))


def nulls_far_behind(count: int) -> HeadersColumn:
    """A row with so many headers, the last of which is null."""
    names, contents = column_of([b"n"] * count), column_of([*[b""] * (count - 1), None])
    return HeadersColumn(None, struct.pack("<2i", 0, count), names, contents)


def test_the_last_header_that_may_be_null() -> None:
    """The bitmap of an extension reaches so far."""
    frames = encode_columns(0, 1, column_of([b"v"]), headers=nulls_far_behind(2032), timestamp_us=0)
    found = gather_columns(frames, 0, 1, headers=True).headers
    assert found is not None
    assert items(found.contents) == [*[b""] * 2031, None]


@pytest.mark.parametrize(
    ("given_columns", "message"),
    [
        ({"values": column_of([])}, "fewer rows than were announced"),
        ({"keys": column_of([b"k"], 1)._replace(first=2)}, "fewer rows than were announced"),
        ({"keys": VarColumn(None, struct.pack("<2i", 3, 2), b"1234")}, "row 0 lies outside the data"),
        ({"keys": VarColumn(None, struct.pack("<2i", -1, 2), b"1234")}, "row 0 lies outside the data"),
        ({"values": VarColumn(None, struct.pack("<2q", 0, 1 << 62), b"1234", 0, 8)}, "row 0 lies outside the data"),
        ({"headers": one_header(None, b"c")}, "row 0 has a header without a name"),
        ({"headers": nulls_far_behind(2033)}, "row 0 has a null among its header values after the first 2032"),
        ({"headers": one_header(b"\xff", b"c")}, "row 0 has a header name that is not UTF-8"),
        ({"headers": one_header(b"n" * 65_536, b"c")}, "row 0 has a header name of more than 65535 bytes"),
        ({"headers": one_header(b"n", b"c", *[b""] * 65_535)}, "row 0 has 65536 headers"),
        ({"headers": one_header(b"n", b"c")._replace(ends=struct.pack("<2i", 0, 2))}, "row 0 lies outside the data"),
        ({"timestamps": times_of([1 << 62])}, "row 0 has a time outside of the years 1 to 9999"),
        ({"timestamps": TimesColumn(b"", b"")}, "fewer rows than were announced"),
    ],
)
def test_a_row_that_cannot_be_a_message_is_named(given_columns: dict[str, Any], message: str) -> None:
    """Before anything is written, in both kernels alike."""
    whole: dict[str, Any] = {"values": column_of([b"v"]), "keys": None, "headers": None, "timestamps": None}
    whole |= given_columns
    with pytest.raises(InputError, match=message):
        encode_columns(0, 1, whole.pop("values"), **whole, timestamp_us=0)
    whole = {"values": column_of([b"v"]), "keys": None, "headers": None, "timestamps": None} | given_columns
    assert_twins_agree("encode_columns", 0, 1, 0, 1 << 30, *whole.values())


def test_a_message_that_is_too_large_is_named() -> None:
    """The bound is that of the whole payload, and the row is the one that breaks it."""
    values = column_of([b"", b"1234567"])
    assert encode_columns(0, 2, values, timestamp_us=0, max_message_bytes=31).count == 2
    with pytest.raises(MessageTooLargeError, match=r"row 1 makes a message of 31 bytes.*\(30\)"):
        encode_columns(0, 2, values, timestamp_us=0, max_message_bytes=30)


@settings(max_examples=examples(100))
@given(st.data())
def test_any_buffers_are_judged_alike(data: st.DataObject) -> None:
    """Buffers of any content and any size: both kernels give the same frames or find the same fault."""

    def some_ends() -> bytes:
        numbers = data.draw(
            st.lists(st.integers(0, 6), max_size=5).map(sorted) | st.lists(st.integers(-3, 12), max_size=5)
        )
        return struct.pack(f"<{len(numbers)}i", *numbers) + data.draw(st.binary(max_size=3))

    def some_column() -> VarColumn:
        validity = data.draw(st.none() | st.binary(max_size=2))
        return VarColumn(validity, some_ends(), data.draw(st.binary(max_size=12)), data.draw(st.integers(0, 2)))

    headers = HeadersColumn(None, some_ends(), some_column(), some_column(), data.draw(st.integers(0, 1)))
    times = TimesColumn(data.draw(st.none() | st.binary(max_size=1)), data.draw(st.binary(max_size=40)))
    given_columns = (
        some_column(),
        *(data.draw(st.sampled_from([None, each])) for each in (some_column(), headers, times)),
    )
    most = data.draw(st.integers(20, 60))
    assert_twins_agree("encode_columns", 0, data.draw(st.integers(0, 4)), 0, most, *given_columns)


def test_wrong_calls_are_refused_alike() -> None:
    """Numbers out of range and things that are no columns raise the same in both kernels."""
    fine = column_of([b"v"])
    for arguments in [
        (-1, 1, 0, 99, fine, None, None, None),
        (1 << 64, 1, 0, 99, fine, None, None, None),
        ((1 << 64) - 1, 2, 0, 99, column_of([b"v", b"w"]), None, None, None),
        (0, -1, 0, 99, fine, None, None, None),
        (0, 1, 1 << 63, 99, fine, None, None, None),
        (0, 1, 0, -1, fine, None, None, None),
        (0, 1, 0, 99, fine._replace(first=-1), None, None, None),
        (0, 1, 0, 99, fine._replace(end_bytes=2), None, None, None),
    ]:
        assert assert_twins_agree("encode_columns", *arguments)[0] == "raised"
    for wrong in ((), (None, b"", b"", 0), 5):
        with pytest.raises(TypeError):
            kernel.encode_columns(0, 1, 0, 99, wrong, None, None, None)


# ---- digests ----


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=9), st.integers(0, 1 << 64), st.integers(0, 9))
def test_digests_of_parts_add_up(payloads: list[bytes], first: int, middle: int) -> None:
    """However frames are split, the sum is that of the whole, in both kernels."""
    frames = encode_many(min(first, (1 << 64) - 10), payloads)
    whole = frames_digest(frames)
    parts = frames_digest(frames, 0, middle) + frames_digest(frames, middle)
    assert parts % (1 << 64) == whole
    assert_twins_agree("frames_digest", frames.first_offset, *places(frames), 0, middle)


def test_a_digest_sees_every_change() -> None:
    """Another byte, another length, another offset, and two messages that changed places."""
    frames = encode_many(7, [b"one", b"two"])
    others = [
        (7, [b"onf", b"two"]),
        (7, [b"one", b"two\0"]),
        (8, [b"one", b"two"]),
        (7, [b"two", b"one"]),
        (7, [b"one"]),
    ]
    digests = {frames_digest(encode_many(first, payloads)) for first, payloads in others}
    assert len(digests) == len(others)
    assert frames_digest(frames) not in digests
    assert frames_digest(frames, 0, 0) == 0


def test_the_digests_of_the_formats_page_are_right() -> None:
    """A proof can be worked out again from the page alone."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text("utf-8")
    for first, payloads in ((7, [b"one"]), (8, [b"two"]), (7, [b"one", b"two"])):
        assert f"`{frames_digest(encode_many(first, payloads)):016x}`" in page


def test_a_digest_speaks_of_the_bytes_that_are_there() -> None:
    """A payload that no longer fits the checksum in its header has another digest."""
    frames = encode_many(7, [b"payload"])
    damaged = Frames(7, frames.buffer[:-1] + b"!", frames.positions, frames.lengths)
    assert frames_digest(damaged) != frames_digest(frames)
    outside = struct.pack("=Q", 1 << 63), struct.pack("=I", 4)
    assert assert_twins_agree("frames_digest", 0, b"1234", *outside, 0, 1)[1] is ValueError


# ---- memory ----


def every_path() -> None:
    """Each function with good and with bad arguments."""
    payload = encode_message(b"value", b"key", {"a": b"1", "b": b""}, 5)
    good = encode_many(0, [payload, REMOVED, encode_message(b"v", None, None, 5), LOST])
    damaged = encode_many(0, [payload, payload[:-20]])
    for frames in (good, damaged):
        for wanted in (0, EVERYTHING):
            outcome(kernel.gather_columns, 0, *places(frames), 0, 9, wanted, 9, NO_LIMIT)
    outcome(kernel.gather_columns, -1, *places(good), 0, 9, EVERYTHING, 9, NO_LIMIT)
    outcome(kernel.gather_columns, 0, b"", good.positions, good.lengths, 0, 9, EVERYTHING, 9, NO_LIMIT)
    headers = one_header(b"n", b"c", *(b"%d" % each for each in range(20)))
    for column in (
        column_of([b"v"]),
        column_of([None]),
        column_of([]),
        (None, b"", None, 0, 4),
        (None, b"", b"", 0, 3),
    ):
        outcome(kernel.encode_columns, 0, 1, 0, 99, column_of([b"v"]), column, headers, times_of([5]))
        outcome(kernel.encode_columns, 0, 1, 0, 1 << 20, column, column, headers, times_of([5]))
    outcome(kernel.encode_columns, -1, 1, 0, 99, column_of([b"v"]), None, None, None)
    outcome(kernel.frames_digest, 0, *places(good), 0, 9)
    outcome(kernel.frames_digest, 0, b"", good.positions, good.lengths, 0, 9)


def test_nothing_leaks() -> None:
    """Neither memory nor references stay behind, whether a call succeeds or not."""
    assert_nothing_leaks(every_path, 200)
