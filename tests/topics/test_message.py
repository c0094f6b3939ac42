"""Messages: the envelope, what is refused, and that the C codec and its pure-Python twin always agree."""

from __future__ import annotations

import contextlib
import copy
import mmap
import pickle
import struct
from array import array
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.log.workbench import assert_nothing_leaks
from tests.oracles import envelopes
from tests.twins import agreed, outcome

from tidelog import _native
from tidelog.errors import DataError, InputError
from tidelog.log import frame
from tidelog.topics import message
from tidelog.topics.message import Headers, Message, with_headers, without_headers

codec: Any = _native
twin: Any = envelopes
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LEAST_US = (datetime.min.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
MOST_US = (datetime.max.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)

PAIRS = st.lists(
    st.tuples(st.sampled_from("abc") | st.text(max_size=8), st.none() | st.binary(max_size=12)), max_size=12
)
HEADERS = st.dictionaries(st.text(max_size=8), st.binary(max_size=12), max_size=4)
TIMES = st.integers(LEAST_US, MOST_US) | st.sampled_from([LEAST_US, -1, 0, 951_782_400_000_000, MOST_US])
KEYS = st.none() | st.binary(max_size=12)
EXTENSIONS = st.binary(max_size=12) | st.just(b"\x03\x08" + bytes(8)) | st.just(b"\x01\x00\x03\x08" + bytes(8))
assert_twins_agree = partial(agreed, codec, twin)


def decoded(payload: bytes, offset: int = 0) -> Message:
    """The message of one payload."""
    (result,) = message.decode_payloads(offset, [payload])
    return result


# ---- round trips ----


@settings(max_examples=examples(80))
@given(st.binary(max_size=60), KEYS, HEADERS, TIMES, st.integers(-5, 1 << 66))
def test_a_message_is_read_back(
    value: bytes, key: bytes | None, headers: dict[str, bytes], timestamp_us: int, offset: int
) -> None:
    """Value, key, headers, time and offset survive the envelope, in both codecs."""
    payload = assert_twins_agree("encode", value, key, headers, timestamp_us)[1]
    assert payload == assert_twins_agree("encode", value, key, headers, timestamp_us, b"")[1]
    expected = Message(value, key, headers, EPOCH + timedelta(microseconds=timestamp_us), offset)
    assert assert_twins_agree("decode_payloads", Message, offset, [payload]) == ("returned", [expected])


@settings(max_examples=examples(80))
@given(st.none() | st.binary(max_size=60), KEYS, PAIRS, st.sampled_from([b"", b"\x03\x08" + bytes(8)]))
def test_nulls_and_repeated_names_are_read_back(
    value: bytes | None, key: bytes | None, pairs: list[tuple[str, bytes | None]], extension: bytes
) -> None:
    """Headers as a list, or as `Headers`: order, repetition and null survive; what a dict can hold is a dict."""
    payload = assert_twins_agree("encode", value, key, pairs, 5, extension)[1]
    assert payload == assert_twins_agree("encode", value, key, Headers(pairs), 5, extension)[1]
    assert payload == message.encode_message(value, key, tuple(pairs), 5, extension)
    (found,) = assert_twins_agree("decode_payloads", Message, 7, [payload])[1]
    assert (found.value, found.key, found.header_list) == (value, key, tuple(pairs))
    assert found.headers == {name: content or b"" for name, content in pairs} or not Headers(pairs).is_plain
    assert (type(found.headers) is dict) == Headers(pairs).is_plain
    assert payload == twin.encode(found.value, found.key, found.headers, 5, extension)


@given(PAIRS, PAIRS)
def test_headers_are_a_mapping_that_cannot_be_changed(one: Any, other: Any) -> None:
    """The last value of a name counts, and null is empty; they are equal where all pairs are, and can be pickled."""
    headers = Headers(one)
    assert dict(headers) == {name: content or b"" for name, content in one}
    assert (headers == Headers(other)) == (tuple(one) == tuple(other))
    assert (headers != dict(headers)) == (dict(headers) != headers) == (not headers.is_plain)
    assert pickle.loads(pickle.dumps(headers)).pairs == copy.copy(headers).pairs == Headers(headers).pairs == tuple(one)
    assert repr(headers) == f"Headers({one})"
    for name in ("update", "pop", "setdefault", "popitem", "clear", "__setitem__", "__delitem__", "__ior__"):
        with pytest.raises(TypeError, match="dict"):
            getattr(headers, name)("a", b"")
    assert headers.pairs == tuple(one)


@given(PAIRS, st.dictionaries(st.sampled_from("abc"), st.binary(max_size=3), max_size=2))
def test_headers_are_added_and_left_out_by_name(pairs: Any, added: dict[str, bytes]) -> None:
    """All of one name go, the others stay as they are."""
    for headers in (Headers(pairs), dict(Headers(pairs))):
        kept = [pair for pair in Message(b"", headers=headers).header_list if pair[0] not in added]
        assert Message(b"", headers=without_headers(headers, added)).header_list == tuple(kept)
        found = Message(b"", headers=with_headers(headers, added)).header_list
        assert dict(found) == dict([*kept, *added.items()])
        assert [pair for pair in found if pair[0] not in added] == kept


def test_the_envelope_has_the_documented_bytes() -> None:
    """Each length stands at its fixed place, little-endian, and the value comes last."""
    payload = message.encode_message(b"value", b"key", {"h": b"head"}, -2)
    header = struct.pack("<HI", 1, 4) + b"h" + b"head"
    assert payload == struct.pack("<BBHIqII", 1, 1, 1, 3, -2, len(header), 0) + b"key" + header + b"value"
    assert struct.unpack_from("<q", payload, message.TIMESTAMP_FIELD) == (-2,)


def test_an_empty_key_is_not_no_key() -> None:
    """A key of no bytes and no key at all are told apart."""
    assert decoded(message.encode_message(b"", b"", None, 0)).key == b""
    assert decoded(message.encode_message(b"", None, None, 0)).key is None


def test_headers_keep_their_order_and_are_the_readers_own() -> None:
    """Headers come back in the order they were given, in a dict that no other message shares."""
    payload = message.encode_message(b"", None, {"b": b"1", "a": b"", "é": b"3"}, 0)
    first, second = message.decode_payloads(0, [payload, payload])
    assert list(first.headers.items()) == [("b", b"1"), ("a", b""), ("é", b"3")]
    assert first.headers is not second.headers


def test_the_time_is_in_utc() -> None:
    """A timestamp is aware, and its zone is the one UTC that Python has."""
    timestamp = decoded(message.encode_message(b"", None, None, 1_720_000_000_123_456)).timestamp
    assert timestamp == datetime(2024, 7, 3, 9, 46, 40, 123456, tzinfo=UTC)
    assert timestamp.tzinfo is UTC


def test_neighbours_in_time_are_told_apart() -> None:
    """Equal, close and distant timestamps in one batch each come out right, over days, leap days and centuries."""
    day_us = 86_400_000_000
    times = [0, 0, 1, day_us - 1, day_us, -1, -day_us, 951_782_399_999_999, 951_782_400_000_000, -2_203_891_200_000_000]
    times += [day * day_us + day for day in range(-150_000, 150_000, 97)]
    payloads = [twin.encode(b"", None, None, time) for time in times]
    assert_twins_agree("decode_payloads", Message, 0, payloads)


@given(st.lists(st.tuples(st.binary(max_size=20), KEYS, HEADERS), max_size=6), st.integers(-1, 8), st.integers(-1, 8))
def test_frames_are_decoded_in_place(parts: list[tuple[Any, ...]], start: int, stop: int) -> None:
    """Messages of a batch of frames are those of its payloads, with the offsets of the frames."""
    payloads = [twin.encode(*part, 5) for part in parts]
    frames = frame.encode_many(40, payloads)
    places = frames.buffer, frames.positions, frames.lengths
    got = assert_twins_agree("decode_frames", Message, 40, *places, start, stop)
    if start >= 0 and stop >= 0:
        assert got[1] == twin.decode_payloads(Message, 40, payloads)[start:stop]


def test_other_kinds_of_bytes_are_taken_and_come_back_as_bytes() -> None:
    """Bytearrays and views of bytes do for values, keys and headers; any mapping does for headers."""
    view = memoryview(b"--view--")[2:6]
    headers = MappingProxyType({"a": bytearray(b"1"), "v": view})
    payload = assert_twins_agree("encode", bytearray(b"value"), view, headers, 0)[1]
    assert payload == twin.encode(b"value", b"view", {"a": b"1", "v": b"view"}, 0)
    kinds = (bytearray(payload), memoryview(payload))
    for got in assert_twins_agree("decode_payloads", Message, 0, kinds)[1]:
        assert [type(part) for part in (got.value, got.key, got.headers["v"])] == [bytes, bytes, bytes]


# ---- what is refused ----


class NotBytes:
    """Something without bytes in it."""


NO_BYTES = [
    "text",
    7,
    NotBytes(),
    array("B", b"1"),
    [b"list"],
    memoryview(b"12345678").cast("I"),
    memoryview(b"1234")[::2],
]


@pytest.mark.parametrize("wrong", NO_BYTES, ids=lambda wrong: type(wrong).__name__)
def test_what_is_not_bytes_is_refused(wrong: Any) -> None:
    """Text, numbers and views of anything but consecutive bytes raise TypeError, wherever they stand."""
    assert assert_twins_agree("encode", wrong, None, None, 0)[1] is TypeError
    assert assert_twins_agree("encode", b"", wrong, None, 0)[1] is TypeError
    assert assert_twins_agree("encode", b"", None, {"h": wrong}, 0)[1] is TypeError
    assert assert_twins_agree("encode", b"", None, None, 0, wrong)[1] is TypeError
    with pytest.raises(InputError):
        message.encode_message(wrong, None, None, 0)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({b"bytes": b""}, TypeError),
        ({1: b""}, TypeError),
        ({"\ud800": b""}, InputError),
        ({"n" * 65_536: b""}, InputError),
        ({str(number): b"" for number in range(65_536)}, InputError),
        ([["a", b""]], TypeError),
        ([("a", b"", b"")], TypeError),
        ({("a", b"")}, AttributeError),
        ([*[("a", b"")] * 2032, ("a", None)], InputError),
    ],
    ids=["bytes name", "int name", "surrogate", "long name", "too many", "list", "triple", "set", "late null"],
)
def test_headers_that_do_not_fit_are_refused(headers: Any, error: type[Exception]) -> None:
    """Names must be text of at most 65535 bytes, and there are at most 65535 of them."""
    assert assert_twins_agree("encode", b"", None, headers, 0)[1] is error
    with pytest.raises(InputError):
        message.encode_message(b"", None, headers, 0)


def test_as_many_headers_as_fit_are_taken() -> None:
    """65535 headers, and a name of 65535 bytes, are still fine."""
    headers = {str(number): b"" for number in range(65_534)} | {"n" * 65_535: b"x"}
    payload = assert_twins_agree("encode", b"", None, headers, 0)[1]
    assert decoded(payload).headers == headers


@pytest.mark.parametrize("timestamp_us", [-(1 << 63) - 1, 1 << 63, 1 << 100])
def test_a_timestamp_over_64_bits_is_refused(timestamp_us: int) -> None:
    """A time that the envelope cannot hold is an error, not a wrapped number."""
    assert assert_twins_agree("encode", b"", None, None, timestamp_us)[1] is OverflowError
    with pytest.raises(InputError, match="64 bits"):
        message.encode_message(b"", None, None, timestamp_us)


@pytest.mark.parametrize("timestamp_us", [-(1 << 63), LEAST_US - 1, MOST_US + 1, (1 << 63) - 1])
def test_a_timestamp_that_no_datetime_holds_is_refused(timestamp_us: int) -> None:
    """What could not be read back is not written."""
    got = assert_twins_agree("encode", b"", None, None, timestamp_us)
    assert got[1] is InputError
    assert "years 1 to 9999" in got[2]


def test_lengths_over_32_bits_are_refused() -> None:
    """Keys and headers of 4 GiB are an error before any byte of them is copied."""
    with mmap.mmap(-1, 1 << 32, prot=mmap.PROT_READ) as huge, memoryview(huge) as view, view[:-1] as nearly:
        assert assert_twins_agree("encode", b"", view, None, 0)[1] is OverflowError
        assert assert_twins_agree("encode", b"", None, None, 0, view)[1] is OverflowError
        assert assert_twins_agree("encode", b"", None, {"h": view}, 0)[1] is OverflowError
        assert assert_twins_agree("encode", b"", None, {"h": nearly}, 0)[1] is OverflowError


def test_text_gets_a_hint() -> None:
    """Whoever passes text is told how to make bytes of it."""
    text: Any = "text"
    with pytest.raises(InputError, match=r"value must be bytes, not str.*encode"):
        message.encode_message(text, None, None, 0)


def test_the_culprit_is_named() -> None:
    """With a bytearray for a value and text for a key, it is the key that is complained about."""
    value: Any = bytearray(b"fine")
    key: Any = "text"
    with pytest.raises(InputError, match="key must be bytes"):
        message.encode_message(value, key, None, 0)


# ---- damaged envelopes ----


def envelope(*, flags: int = 0, count: int = 0, sizes: tuple[int, int, int] = (0, 0, 0), rest: bytes = b"") -> bytes:
    """A fixed part that says what it is told to say; sizes are those of key, headers and extension."""
    return struct.pack("<BBHIqII", 1, flags, count, sizes[0], 0, sizes[1], sizes[2]) + rest


MAX_U32 = (1 << 32) - 1
DAMAGED = {
    "is too short for an envelope": b"\x01" * 23,
    "has envelope version 2": b"\x02" + bytes(23),
    "has unknown envelope flags 0x82": envelope(flags=0x82),
    "lengths do not fit": envelope(flags=1, sizes=(MAX_U32, MAX_U32, MAX_U32), rest=b"short"),
    r"an envelope whose": envelope(sizes=(1, 0, 0), rest=b"k"),
    "has an impossible timestamp": struct.pack("<BBHIqII", 1, 0, 0, 0, MOST_US + 1, 0, 0),
    "has headers that do not fit": envelope(count=1, sizes=(0, 6, 0), rest=struct.pack("<HI", 1, 0)),
    "headers that do not": envelope(count=1, sizes=(0, 6, 0), rest=struct.pack("<HI", 65_535, MAX_U32)),
    "headers that": envelope(count=1, sizes=(0, 5, 0), rest=bytes(5)),
    "has headers": envelope(count=0, sizes=(0, 6, 0), rest=bytes(6)),
    "has an extension that does not fit": envelope(sizes=(0, 0, 1), rest=b"\x03"),
    "has an extension that does": envelope(sizes=(0, 0, 3), rest=b"\x07\x02x"),
    "has an extension that": envelope(sizes=(0, 0, 3), rest=b"\x03\x01x"),
    "has an extension": envelope(sizes=(0, 0, 20), rest=(b"\x03\x08" + bytes(8)) * 2),
    "has an impossible time of delivery": twin.encode(b"", None, None, 0, b"\x03\x08" + b"\xff" * 7 + b"\x7f"),
    "has a header name that is not UTF-8": envelope(count=1, sizes=(0, 7, 0), rest=struct.pack("<HI", 1, 0) + b"\xff"),
}


@pytest.mark.parametrize("words", DAMAGED)
def test_a_damaged_envelope_is_named(words: str) -> None:
    """What is wrong with an envelope is said, with the message's offset, and never read past."""
    got = assert_twins_agree("decode_payloads", Message, 7, [DAMAGED[words]])
    assert got[1] is DataError
    assert got[2].startswith("message 7 ")
    assert words in got[2]


def test_an_extension_is_skipped() -> None:
    """What a later version puts between headers and value does not hinder this one."""
    read = decoded(envelope(sizes=(0, 0, 5), rest=b"\xfe\x03newvalue"))
    assert (read.value, read.deliver_at) == (b"value", None)


@given(st.binary(max_size=8), KEYS, HEADERS, TIMES)
def test_a_time_of_delivery_is_read_back(
    value: bytes, key: bytes | None, headers: dict[str, bytes], at_us: int
) -> None:
    """It is a time in UTC, whatever else the message carries."""
    extension = b"\xfe\x00\x03\x08" + at_us.to_bytes(8, "little", signed=True)
    payload = assert_twins_agree("encode", value, key, headers, 5, extension)[1]
    (read,) = assert_twins_agree("decode_payloads", Message, 0, [payload])[1]
    assert (read.value, read.key, read.headers) == (value, key, headers)
    assert read.deliver_at == EPOCH + timedelta(microseconds=at_us)


@given(st.lists(st.tuples(KEYS, HEADERS, st.binary(max_size=9)), max_size=6), st.integers(-1, 8), st.integers(-1, 8))
def test_extensions_are_gathered_from_a_batch(parts: list[tuple[Any, ...]], start: int, stop: int) -> None:
    """Each message's own, None where it has none, and None alone when nobody has one."""
    payloads = [twin.encode(b"v", key, headers, 5, extension) for key, headers, extension in parts]
    frames = frame.encode_many(40, [*payloads, b"\x00"])
    got = assert_twins_agree("extensions", frames.buffer, frames.positions, frames.lengths, start, stop)
    if start >= 0 and stop >= 0:
        expected = [extension or None for _, _, extension in [*parts, (None, None, b"")]][start:stop]
        assert got[1] == (expected if any(expected) else None)


PRODUCERS = st.builds(
    message.encode_extension,
    producer=st.builds(message.ProducerMark, st.just(1), st.integers(0, 9), st.sampled_from(["", "a", "b", "é"])),
    deliver_at_us=st.none() | TIMES,
)


@settings(max_examples=examples(100))
@given(
    st.lists(st.one_of(st.just(b""), PRODUCERS, PRODUCERS, EXTENSIONS), max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 40), st.integers(0, 255)), max_size=3),
    st.integers(-1, 13),
)
def test_newest_message_of_each_producer_is_found(
    extensions: list[bytes], changes: list[tuple[int, int, int]], stop: int
) -> None:
    """A name counts where its extension is sound; one that is damaged names nobody."""
    payloads = [bytearray(twin.encode(b"", None, None, 5, extension)) for extension in extensions]
    for number, at, byte in changes:
        if number < len(payloads):
            payloads[number][(24 + at) % len(payloads[number])] = byte
    frames = frame.encode_many(40, [bytes(payload) for payload in payloads])
    places = frames.buffer, frames.positions, frames.lengths
    assert_twins_agree("newest_producers", 40, *places, 0, stop)
    assert_twins_agree("newest_producers", 40, *places, 1, 99)


@settings(max_examples=examples(100))
@given(
    st.tuples(st.binary(max_size=20), KEYS, HEADERS, TIMES, EXTENSIONS),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 255)), max_size=4),
    st.integers(0, 90),
)
def test_twins_agree_on_mutated_payloads(parts: Any, changes: list[tuple[int, int]], size: int) -> None:
    """Changed bytes and cut ends give the same message or the same complaint."""
    payload = bytearray(twin.encode(*parts))
    for at, byte in changes:
        payload[at % len(payload)] = byte
    assert_twins_agree("decode_payloads", Message, 1 << 63, [bytes(payload)])
    assert_twins_agree("decode_payloads", Message, 0, [bytes(payload[:size])])
    places = bytes(payload), struct.pack("=Q", 0), struct.pack("=I", len(payload))
    assert_twins_agree("extensions", *places, 0, 1)


@settings(max_examples=examples(80))
@given(
    st.binary(max_size=90), st.integers(0, 1), st.integers(0, 3), st.lists(st.integers(0, 40), min_size=3, max_size=3)
)
def test_twins_agree_on_random_payloads(data: bytes, flags: int, count: int, sizes: list[int]) -> None:
    """Noise, bare and behind a plausible beginning, gives the same message or the same complaint."""
    assert_twins_agree("decode_payloads", Message, 0, [data])
    plausible = envelope(flags=flags, count=count, sizes=(sizes[0], sizes[1], sizes[2]), rest=data)
    assert_twins_agree("decode_payloads", Message, 0, [plausible])


@given(st.lists(st.tuples(st.integers(0, 80) | st.just((1 << 64) - 1), st.integers(0, 80)), max_size=4))
def test_twins_agree_on_places_that_lie(places: list[tuple[int, int]]) -> None:
    """Positions and lengths that point outside the buffer raise in both and read nothing."""
    buffer = frame.encode(0, twin.encode(b"value", None, None, 0))
    positions = struct.pack(f"={len(places)}Q", *(at for at, _ in places))
    lengths = struct.pack(f"={len(places)}I", *(length for _, length in places))
    assert_twins_agree("decode_frames", Message, 0, buffer, positions, lengths, 0, 9)
    assert_twins_agree("decode_frames", Message, 0, buffer, positions, lengths + b"x", 0, 9)
    assert_twins_agree("extensions", buffer, positions, lengths, 0, 9)
    assert_twins_agree("newest_producers", 0, buffer, positions, lengths, 0, 9)


# ---- memory ----


def failing_type(*_: object) -> Message:
    """A message type whose making fails."""
    raise LookupError("no message today")


def test_an_error_of_the_message_type_is_passed_on() -> None:
    """What the caller's own type raises reaches the caller."""
    got = assert_twins_agree("decode_payloads", failing_type, 0, [envelope()])
    assert got == ("raised", LookupError, "no message today")


def test_a_buffer_is_held_while_the_message_type_runs() -> None:
    """Nobody can pull the bytes away from under the decoder."""
    buffer = bytearray(twin.encode(b"value", None, None, 0))

    def meddling_type(value: bytes, *_: object) -> bytes:
        with contextlib.suppress(BufferError):
            buffer.clear()
        return value

    assert codec.decode_payloads(meddling_type, 0, [buffer]) == [b"value"]


class OddMapping(Mapping[str, bytes]):
    """A mapping that is no dict, with one header that cannot be."""

    def __getitem__(self, name: str) -> bytes:
        return b"x"

    def __iter__(self) -> Iterator[str]:
        return iter(["fine", "\ud800"])

    def __len__(self) -> int:
        return 2


def every_path(message_type: Any = Message) -> None:
    """Each function with good and with bad arguments."""
    payload = codec.encode(memoryview(b"value"), bytearray(b"key"), {"a": b"1", "b": memoryview(b"2")}, 5)
    frames = frame.encode_many(0, [payload] * 8)
    places = frames.buffer, frames.positions, frames.lengths
    codec.decode_frames(message_type, 1 << 64, *places, 0, 8)
    extended = frame.encode_many(0, [payload, codec.encode(b"v", None, None, 5, b"\x03\x08" + bytes(8))])
    codec.decode_frames(message_type, 0, extended.buffer, extended.positions, extended.lengths, 0, 2)
    codec.extensions(extended.buffer, extended.positions, extended.lengths, 0, 2)
    codec.extensions(*places, 0, 8)
    special = codec.encode(None, None, Headers([("a", None), ("a", b"2")]), 5)
    codec.decode_payloads(message_type, 0, [special, codec.encode(None, None, [("a", None)], 5), payload])
    outcome(codec.encode, None, None, [("a", None), ("b",)], 5)
    for wrong in ("text", memoryview(b"12")[::2], None):
        outcome(codec.encode, wrong, None, None, 0)
        outcome(codec.encode, b"", b"", {"a": b"1", "b": wrong}, 0)
        outcome(codec.decode_payloads, message_type, 0, [payload, wrong])
    outcome(codec.encode, b"", None, OddMapping(), 0)
    outcome(codec.encode, b"", None, {"a": b"1"}, 1 << 70)
    for damaged in DAMAGED.values():
        outcome(codec.decode_payloads, message_type, 0, [payload, damaged])
    outcome(codec.decode_frames, message_type, 0, *places[:2], b"odd", 0, 8)
    outcome(codec.decode_payloads, failing_type, 0, [payload])
    outcome(codec.decode_payloads, failing_type, 0, [special])
    outcome(codec.decode_payloads, message_type, "0", [payload])


def test_no_path_leaks_memory_or_references() -> None:
    """Hundreds of calls, failing ones too, leave no more memory behind than a few."""
    assert_nothing_leaks(every_path, 200)


@given(
    st.lists(st.binary(max_size=20) | st.sampled_from([None, "text", bytearray(b"x")]), max_size=5),
    TIMES,
    st.none() | st.binary(max_size=240),
    st.integers(0, 1 << 32),
    st.integers(0, 1 << 32),
)
@settings(max_examples=examples(200))
def test_values_of_a_batch_are_encoded_together(
    values: list[object], time: int, name: bytes | None, epoch: int, sequence: int
) -> None:
    """All at once or not at all, with the marks of batch and producer, as one by one."""
    assert_twins_agree("encode_values", values, time, name, epoch, sequence)


def test_encoding_values_leaks_nothing() -> None:
    """Neither what is encoded nor what is refused stays."""

    def use() -> None:
        _native.encode_values([b"a" * 600, b"b"], 1, b"name", 1, 2)
        _native.encode_values([b"a" * 600, None], 1, None, 0, 0)

    assert_nothing_leaks(use, 300)
