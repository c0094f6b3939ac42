"""Frames: the format, why a scan stops, and that the C kernel and its pure-Python twin always agree."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.log.workbench import assert_nothing_leaks
from tests.oracles import frames as frames_oracle
from tests.twins import agreed, outcome

from tidelog import _native
from tidelog.errors import InputError
from tidelog.log import frame
from tidelog.log.frame import HEADER, HEADER_BYTES, Stop

kernel: Any = _native
twin: Any = frames_oracle
MAX_PAYLOAD = frame.MAX_PAYLOAD_BYTES
MAX_OFFSET = (1 << 64) - 1
DANUBE_FRAME = bytes.fromhex(
    "7011010000000000280000000859f6e5fb2c010101740162fc70110100026869fd0030fd779001000001700001016b01760105000102726b"
)

OFFSETS = st.sampled_from([0, 1, 255, 70_000, 1 << 32, MAX_OFFSET - 12]) | st.integers(0, MAX_OFFSET - 12)
PAYLOADS = st.lists(st.binary(min_size=1, max_size=90), max_size=12)
ANY_INT = st.integers(-3, 200) | st.sampled_from([-(1 << 63) - 1, -(1 << 63), (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 70])
assert_twins_agree = partial(agreed, kernel, twin)


def flip(data: bytes, at: int, by: int) -> bytes:
    """One bit is another."""
    return data[:at] + bytes([data[at] ^ (1 << by % 8)]) + data[at + 1 :] if at < len(data) else data


DAMAGES: list[Callable[[bytes, int, int], bytes]] = [
    flip,
    lambda data, at, by: data[: max(at, by % (len(data) + 1))],
    lambda data, at, by: data[:at] + data[at + by :],
    lambda data, at, by: data[:at] + bytes(by) + data[at:],
    lambda data, at, by: data[:at] + b"\xff" * by + data[at + by :],
    lambda data, at, by: data[:at] + bytes(by) + data[at + by :],
    lambda data, at, by: data[: at + by] + data[at:],
]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[int, bytes]:
    """Frames to which up to three things were done, and the offset they began with."""
    first_offset = draw(OFFSETS)
    data = twin.encode_many(first_offset, draw(PAYLOADS))[0]
    for damage in draw(st.lists(st.sampled_from(DAMAGES), max_size=3)):
        data = damage(data, draw(st.integers(0, len(data))), draw(st.integers(0, 40)))
    return first_offset, data


# ---- checksums ----


@pytest.mark.parametrize("name", ["crc32", "crc32_portable"])
def test_crc32_is_zlibs_at_every_length_and_alignment(name: str) -> None:
    """Lengths 0 to 2048 at each of 16 alignments give zlib's checksum, on both ways to work it out."""
    crc32 = getattr(kernel, name, kernel.crc32)
    data = memoryview(os.urandom(2048 + 16))
    for alignment in range(16):
        for length in range(2049):
            part = data[alignment : alignment + length]
            assert crc32(part) == zlib.crc32(part)


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(-(1 << 33), 1 << 33))
def test_crc32_goes_on_from_an_earlier_value(first: bytes, second: bytes, value: int) -> None:
    """A checksum may be continued, from any start value."""
    assert kernel.crc32(second, kernel.crc32(first)) == zlib.crc32(first + second)
    assert kernel.crc32(first, value) == zlib.crc32(first, value)


# ---- round trips ----


@given(OFFSETS, PAYLOADS)
def test_what_is_encoded_is_scanned_back(first_offset: int, payloads: list[bytes]) -> None:
    """A scan of encoded frames finds all payloads, in place, and stops at the end."""
    frames = frame.encode_many(first_offset, payloads)
    found = frame.scan(frames.buffer, 0, first_offset)
    assert found.frames == frames
    assert found.frames.payloads() == payloads
    assert (found.end, found.stop) == (len(frames.buffer), Stop.END)
    assert_twins_agree("encode_many", first_offset, payloads)


def test_a_frame_has_the_documented_bytes() -> None:
    """Offset, length and checksum stand little-endian in front of the payload; the checksum covers all but itself."""
    claims = struct.pack("<QI", 7, 5)
    assert frame.encode(7, b"hello") == claims + struct.pack("<I", zlib.crc32(b"hello" + claims)) + b"hello"


@pytest.mark.parametrize("offset", [0, 1, 1 << 31, 1 << 63, MAX_OFFSET])
def test_a_frames_checksum_is_that_of_payload_offset_and_length(offset: int) -> None:
    """At every length from 0 to 300, with carry-less multiplication and without."""
    for length in range(301):
        payload = os.urandom(length)
        expected = zlib.crc32(payload + struct.pack("<QI", offset, length))
        assert assert_twins_agree("frame_crc", offset, payload)[1] == expected


def test_no_payloads_are_no_bytes() -> None:
    """An empty list encodes to nothing, and nothing scans to an empty list."""
    frames = frame.encode_many(5, [])
    assert (frames.buffer, frames.count, frames.end) == (b"", 0, 0)
    assert frame.scan(b"", 0, 5) == (frame.Frames(5, b"", b"", b""), 0, Stop.END)


def test_a_payload_of_a_mebibyte_is_whole() -> None:
    """Large payloads come back byte for byte."""
    payload = os.urandom(1 << 20)
    found = frame.scan(frame.encode(3, payload), 0, 3)
    assert found.frames.payloads() == [payload]
    assert_twins_agree("encode_many", 3, [payload])


@pytest.mark.parametrize("sizes", [(1,), (200,), (1, 3000), (3000, 1)], ids=str)
def test_thousands_of_frames_are_scanned_at_once(sizes: tuple[int, ...]) -> None:
    """However many frames a buffer holds, and however their sizes change on the way, each has its place."""
    payloads = [b"x" * size for size in sizes for _ in range(3000)]
    frames = frame.encode_many(9, payloads)
    assert frame.scan(frames.buffer, 0, 9).frames == frames
    assert_twins_agree("scan_frames", frames.buffer, 0, 9, MAX_PAYLOAD)


def test_any_contiguous_buffer_is_a_payload_and_is_scanned() -> None:
    """Bytes, bytearrays and views, also of wider items, are encoded and scanned alike."""
    payloads = [b"abcd", bytearray(b"efgh"), memoryview(b"--ijkl--")[2:6], memoryview(b"mnopqrst").cast("I")]
    buffer = assert_twins_agree("encode_many", 0, payloads)[1][0]
    for same in (bytearray(buffer), memoryview(buffer), memoryview(b"??" + buffer)[2:]):
        assert assert_twins_agree("scan_frames", same, 0, 0, MAX_PAYLOAD) == outcome(
            twin.scan_frames, buffer, 0, 0, MAX_PAYLOAD
        )


def test_payloads_come_from_any_iterable() -> None:
    """A tuple and a generator do as well as a list."""
    expected = twin.encode_many(0, [b"a", b"b"])
    for module in (kernel, twin):
        assert module.encode_many(0, (b"a", b"b")) == expected
        assert module.encode_many(0, (payload for payload in (b"a", b"b"))) == expected


def test_danubes_frame_is_read() -> None:
    """The checksum of Danube's frames covers the payload alone: they are read only by one who says so."""
    assert scanned(DANUBE_FRAME, 70_000) == (0, 0, Stop.BAD_CRC)
    assert frame.find_frame(DANUBE_FRAME, 0, 0, 70_000) is None
    assert frame.find_frame(DANUBE_FRAME, 0, 0, 70_000, payload_only=True) == (0, 70_000)
    found = frame.scan(DANUBE_FRAME, 0, 70_000, payload_only=True)
    assert (found.frames.count, found.end, found.stop) == (1, len(DANUBE_FRAME), Stop.END)
    assert found.frames.payloads()[0].endswith(b"\x02rk")


# ---- why a scan stops ----


def scanned(buffer: bytes, offset: int = 0, max_payload: int = MAX_PAYLOAD) -> tuple[int, int, Stop]:
    """(frames, end, reason), after the twins agreed."""
    _, lengths, end, stop = assert_twins_agree("scan_frames", buffer, 0, offset, max_payload)[1]
    return len(lengths) // 4, end, Stop(stop)


THREE = twin.encode_many(0, [b"one", b"two", b"three"])[0]
SECOND, THIRD = 19, 38


def test_a_scan_stops_at_the_end() -> None:
    """All frames are whole and nothing follows them."""
    assert scanned(THREE) == (3, len(THREE), Stop.END)


@pytest.mark.parametrize("size", range(THIRD + 1, len(THREE)))
def test_a_scan_stops_at_a_frame_cut_short(size: int) -> None:
    """Wherever the last frame is cut, in header or payload, the boundary is where it began."""
    assert scanned(THREE[:size]) == (2, THIRD, Stop.PARTIAL)


@pytest.mark.parametrize("byte", [SECOND + 12, SECOND + HEADER_BYTES, THIRD - 1])
def test_a_scan_stops_at_a_bad_checksum(byte: int) -> None:
    """A bit that flipped in the payload or in its checksum is found."""
    assert scanned(flip(THREE, byte, 3)) == (1, SECOND, Stop.BAD_CRC)


def test_a_scan_stops_at_a_wrong_offset() -> None:
    """A frame that is not the next one is damage, however whole it is."""
    assert scanned(THREE[:SECOND] + THREE[THIRD:]) == (1, SECOND, Stop.WRONG_OFFSET)
    assert scanned(THREE, offset=1) == (0, 0, Stop.WRONG_OFFSET)


@pytest.mark.parametrize("shift", [-1, 1, 5])
def test_a_frame_copied_to_another_offset_is_damage(shift: int) -> None:
    """The checksum covers the offset: another number in the header does not make it another message."""
    copy = struct.pack("<Q", 1 + shift) + THREE[SECOND + 8 : THIRD]
    assert scanned(copy, 1 + shift) == (0, 0, Stop.BAD_CRC)


@pytest.mark.parametrize("bit", range(8 * HEADER_BYTES))
def test_no_bit_of_a_header_may_flip(bit: int) -> None:
    """Whatever offset the reader expects, the one that was or the one that is."""
    changed = flip(THREE[SECOND:THIRD], bit // 8, bit)
    for offset in {1, HEADER.unpack_from(changed)[0]}:
        assert scanned(changed, offset)[0] == 0


@pytest.mark.parametrize("length", [0, MAX_PAYLOAD + 1, (1 << 32) - 1])
def test_a_scan_stops_at_an_impossible_length(length: int) -> None:
    """No length at all and one over the bound are damage, not a frame that is still being written."""
    broken = THREE[: SECOND + 8] + struct.pack("<I", length) + THREE[SECOND + 12 :]
    assert scanned(broken) == (1, SECOND, Stop.BAD_LENGTH)


def test_the_bound_on_lengths_is_inclusive() -> None:
    """A payload of exactly max_payload passes, one byte more does not."""
    assert scanned(THREE, max_payload=5)[2] == Stop.END
    assert scanned(THREE, max_payload=4) == (2, THIRD, Stop.BAD_LENGTH)


def test_every_reason_has_words() -> None:
    """Reports can say in words why a scan stopped."""
    assert len({stop.reason for stop in Stop}) == len(Stop)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 4096])
def test_zeros_are_never_frames(size: int) -> None:
    """A hole that a file system left is not taken for frames, whichever offset is expected."""
    assert scanned(bytes(size))[0] == 0
    assert assert_twins_agree("find_frame", bytes(size), 0, 0, MAX_OFFSET, MAX_PAYLOAD)[1] is None


def test_the_last_offset_of_all_has_no_next() -> None:
    """After offset 2**64 - 1 nothing can follow; a frame with offset 0 is not its successor."""
    last = twin.encode_many(MAX_OFFSET, [b"last"])[0]
    assert scanned(last, MAX_OFFSET) == (1, 20, Stop.END)
    assert scanned(last + THREE, MAX_OFFSET) == (1, 20, Stop.WRONG_OFFSET)
    assert scanned(last + b"torn", MAX_OFFSET) == (1, 20, Stop.PARTIAL)
    assert assert_twins_agree("encode_many", MAX_OFFSET, [b"a", b"b"])[1] is InputError
    assert assert_twins_agree("find_frame", last, 0, 0, 1 << 70, MAX_PAYLOAD)[1] == (0, MAX_OFFSET)


# ---- finding the next frame ----


def test_a_frame_after_damage_is_found() -> None:
    """Something valid after the damage: this is no torn tail."""
    broken = flip(THREE, SECOND + HEADER_BYTES, 0)
    assert frame.find_frame(broken, SECOND, 1, 100) == (THIRD, 2)
    assert frame.find_frame(broken, SECOND, 3, 100) is None


@pytest.mark.parametrize("size", range(THIRD, len(THREE)))
def test_nothing_is_found_in_a_torn_tail(size: int) -> None:
    """The rest of a frame that was cut anywhere holds no frame."""
    assert frame.find_frame(THREE[:size], THIRD, 0, MAX_OFFSET) is None


# ---- the twins on hostile input ----


@settings(max_examples=examples(100))
@given(damaged(), st.integers(-1, 200), st.sampled_from([MAX_PAYLOAD, 40, 0, -1, 1 << 70]))
def test_twins_agree_on_damaged_frames(case: tuple[int, bytes], position: int, max_payload: int) -> None:
    """Whatever was done to the bytes, scans and searches of both end alike."""
    offset, data = case
    assert_twins_agree("scan_frames", data, 0, offset, max_payload)
    assert_twins_agree("scan_frames", data, position, offset, max_payload)
    assert_twins_agree("find_frame", data, position, offset, offset + 12, max_payload)
    assert_twins_agree("scan_frames", data, 0, offset, max_payload, True)
    assert_twins_agree("find_frame", data, 0, offset, offset + 12, max_payload, True)


@settings(max_examples=examples(80))
@given(st.binary(max_size=200), ANY_INT, ANY_INT, ANY_INT, ANY_INT)
def test_twins_agree_on_random_bytes(data: bytes, position: int, least: int, most: int, bound: int) -> None:
    """Noise with numbers of any size gives the same answer or the same error."""
    assert_twins_agree("scan_frames", data, position, least, bound)
    assert_twins_agree("find_frame", data, position, least, most, bound)
    assert_twins_agree("encode_many", least, [data])


@settings(max_examples=examples(100))
@given(
    st.binary(max_size=60),
    st.lists(st.tuples(st.integers(0, 70) | st.just(MAX_OFFSET), st.integers(0, 70)), max_size=6),
    ANY_INT,
    ANY_INT,
    ANY_INT,
)
def test_twins_agree_on_places_that_lie(
    data: bytes, places: list[tuple[int, int]], start: int, stop: int, field: int
) -> None:
    """Positions and lengths that point outside the buffer raise in both and read nothing."""
    positions = struct.pack(f"={len(places)}Q", *(at for at, _ in places))
    lengths = struct.pack(f"={len(places)}I", *(length for _, length in places))
    assert_twins_agree("payloads", data, positions, lengths, start, stop)
    assert_twins_agree("field_range", data, positions, lengths, field)
    assert_twins_agree("first_at_least", data, positions, lengths, field, stop, start)
    assert_twins_agree("payloads", data, positions, lengths[1:], 0, stop)


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=12), st.integers(0, 15), st.integers(-(1 << 63), 1 << 62))
def test_fields_of_payloads_are_compared(payloads: list[bytes], field: int, minimum: int) -> None:
    """The least, the greatest and the first large enough i64 are those of the payloads long enough to hold one."""
    frames = frame.encode_many(0, payloads)
    numbers = [int.from_bytes(p[field : field + 8], "little", signed=True) for p in payloads if len(p) >= field + 8]
    assert frames.field_range(field) == ((min(numbers), max(numbers)) if numbers else None)
    places = frames.buffer, frames.positions, frames.lengths
    assert_twins_agree("first_at_least", *places, field, minimum, 0)
    assert assert_twins_agree("field_range", *places, field)[1] == frames.field_range(field)


@pytest.mark.parametrize("position", [-1, len(THREE) + 1, 1 << 70, -(1 << 70)])
def test_a_position_outside_the_buffer_is_refused(position: int) -> None:
    """Scans and searches begin inside the buffer or at its end."""
    assert assert_twins_agree("scan_frames", THREE, position, 0, MAX_PAYLOAD)[1] is ValueError
    assert assert_twins_agree("find_frame", THREE, position, 0, 9, MAX_PAYLOAD)[1] is ValueError


@pytest.mark.parametrize(
    ("payload", "error"), [(b"", InputError), (bytearray(), InputError), ("text", TypeError), (None, TypeError)]
)
def test_what_is_no_payload_is_refused(payload: object, error: type[Exception]) -> None:
    """Nothing, text and None raise; bytes before them in the list are not leaked into frames."""
    for module in (kernel, twin):
        with pytest.raises(error):
            module.encode_many(0, [b"good", payload])


def test_buffers_with_holes_are_refused() -> None:
    """A view that takes every other byte is not a buffer that was read from anywhere."""
    holes = memoryview(THREE)[::2]
    assert assert_twins_agree("scan_frames", holes, 0, 0, MAX_PAYLOAD)[1] is BufferError
    assert assert_twins_agree("encode_many", 0, [holes])[1] is BufferError


def test_a_payload_over_32_bits_is_refused() -> None:
    """A length that the header cannot hold is an error, not a wrapped number."""
    with mmap.mmap(-1, 1 << 32, prot=mmap.PROT_READ) as huge:
        assert assert_twins_agree("encode_many", 0, [b"small", huge])[1] is InputError


# ---- memory and threads ----


def every_path() -> None:
    """Each function once with good and once with bad arguments."""
    frames = kernel.encode_many(0, [b"one", bytearray(b"two"), memoryview(b"three")] * 10)
    lies = frames[1], bytes(len(frames[2]) - 1) + b"\xff"
    kernel.payloads(*frames, 0, 30)
    kernel.field_range(*frames, 0)
    kernel.scan_frames(frames[0] * 2, 0, 0, MAX_PAYLOAD)
    kernel.find_frame(frames[0], 1, 5, 9, MAX_PAYLOAD)
    kernel.join_frames(3, [frames, frames])
    kernel.renumber_in_place(bytearray(frames[0]), *frames[1:], 5)
    kernel.measure_frames(*frames)
    outcome(kernel.join_frames, 3, [frames, (frames[0], *lies), frames])
    outcome(kernel.join_frames, 3, [frames, frames[:2]])
    outcome(kernel.join_frames, -1, [frames])
    outcome(kernel.renumber_in_place, *frames, 5)
    outcome(kernel.renumber_in_place, bytearray(frames[0]), *lies, 5)
    outcome(kernel.measure_frames, frames[0][:-1] + b"x", *lies)
    outcome(kernel.measure_frames, bytes(len(frames[0])), *frames[1:])
    outcome(kernel.encode_many, 0, [bytearray(b"a")] * 40 + [b""])
    outcome(kernel.encode_many, 0, [bytearray(b"a")] * 40 + [None])
    outcome(kernel.encode_many, -1, [b"a"] * 40)
    outcome(kernel.payloads, frames[0], *lies, 0, 30)
    outcome(kernel.payloads, frames[0], frames[1], b"odd", 0, 30)
    outcome(kernel.payloads, frames[0], frames[1], None, 0, 30)
    outcome(kernel.field_range, frames[0], *lies, 0)
    outcome(kernel.first_at_least, frames[0], *lies, 0, 1 << 80, 0)
    outcome(kernel.scan_frames, frames[0], -1, 0, MAX_PAYLOAD)
    outcome(kernel.scan_frames, frames[0], 0, "0", MAX_PAYLOAD)
    outcome(kernel.crc32, "text")
    outcome(kernel.frame_crc, 0, "text")
    outcome(kernel.frame_crc, "0", b"text")


def test_no_path_leaks_memory_or_references() -> None:
    """Hundreds of calls, failing ones too, leave no more memory behind than a few."""
    assert_nothing_leaks(every_path, 300)


def test_a_failed_call_lets_go_of_its_buffers() -> None:
    """A bytearray can be resized after an error: nothing still holds a view of it."""
    held = bytearray(THREE)
    outcome(kernel.scan_frames, held, -1, 0, MAX_PAYLOAD)
    outcome(kernel.payloads, held, b"odd", held, 0, 1)
    outcome(kernel.encode_many, 0, [held, b""])
    held.append(0)
    assert len(held) == len(THREE) + 1


def test_other_threads_run_during_long_work() -> None:
    """A scan of megabytes gives the interpreter away, so that appends go on meanwhile."""
    buffer = kernel.encode_many(0, [bytes(1 << 20)] * 24)[0]
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    thread.start()
    sys.setswitchinterval(1000)  # from now on a thread runs only when another lets it
    try:
        assert any(ticks_during(ticks, buffer) for _ in range(100))
    finally:
        done.set()
        sys.setswitchinterval(interval)
        thread.join()


def ticks_during(ticks: list[int], buffer: bytes) -> int:
    """How often the other thread came round during one scan."""
    before = ticks[0]
    kernel.scan_frames(buffer, 0, 0, MAX_PAYLOAD)
    return ticks[0] - before


def test_the_header_is_sixteen_bytes() -> None:
    """The size of a header is part of the format."""
    assert HEADER_BYTES == HEADER.size == 16
