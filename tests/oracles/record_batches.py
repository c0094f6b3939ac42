"""The oracle of Kafka's record batches: the same answers as `native/record_batches.c`, slower.

`records.py` draws a batch, docs/formats.md the entries of an envelope's extension.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.oracles.envelopes import encode as encode_envelope
from tests.oracles.frames import byte_view, encode_many, places

from tidelog.errors import DataError
from tidelog.log.frame import Buffer
from tidelog.topics.message import LEAST_US, MOST_US

CUT, LENGTH, OFFSET, TIME, HEADERS, NAME, LIMITS, TOO_LARGE, REST = range(1, 10)
_HEADER = struct.Struct(">qiibIhiqqqhii")
_FIXED = struct.Struct("<BBHIqII")
_SEQUENCES = 1 << 31
_NOBODY = (-1, -1, -1, 0)


def crc32c(data: Buffer, value: int = 0, /) -> int:
    """Bit by bit."""
    state = ~value & 0xFFFFFFFF
    for byte in bytes(data):
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return ~state & 0xFFFFFFFF


crc32c_portable = crc32c


class FaultError(Exception):
    """A record that is refused, and why."""

    def __init__(self, kind: int) -> None:
        self.kind = kind


class Bytes:
    """What is left to be read; `fault` is what running past its end means."""

    def __init__(self, data: bytes, fault: int) -> None:
        self.data, self.fault = data, fault

    def take(self, size: int) -> bytes:
        if size > len(self.data):
            raise FaultError(self.fault)
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def number(self, max_bytes: int) -> int:
        bits = 0
        for index in range(max_bytes):
            byte = self.take(1)[0]
            bits |= (byte & 127) << 7 * index
            if byte < 128:
                bits &= (1 << 64) - 1
                found = bits >> 1 ^ -(bits & 1)
                if max_bytes == 5 and not -(1 << 31) <= found < 1 << 31:
                    break
                return found
        raise FaultError(self.fault)

    def sized(self) -> bytes | None:
        size = self.number(5)
        return None if size < 0 else self.take(size)


class Record(NamedTuple):
    """One record of a batch."""

    time_delta: int
    offset_delta: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[bytes, bytes | None]]


def _read_headers(body: Bytes) -> list[tuple[bytes, bytes | None]]:
    body.fault = HEADERS
    count = body.number(5)
    if count < 0:
        raise FaultError(HEADERS)
    if count > 0xFFFF:
        raise FaultError(LIMITS)
    headers = []
    for index in range(count):
        name = body.sized()
        if name is None:
            raise FaultError(HEADERS)
        value = body.sized()
        if len(name) > 0xFFFF or (value is None and index >= 2032):
            raise FaultError(LIMITS)
        try:
            name.decode()
        except UnicodeDecodeError:
            raise FaultError(NAME) from None
        headers.append((name, value))
    return headers


def read_record(rest: Bytes, index: int, base_ms: int, time_us: int | None) -> tuple[Record, int]:
    """One record and its time in us."""
    rest.fault = CUT
    size = rest.number(5)
    if size < 0:
        raise FaultError(CUT)
    body = Bytes(rest.take(size), LENGTH)
    body.take(1)
    time_delta, offset_delta = body.number(10), body.number(5)
    if offset_delta != index:
        raise FaultError(OFFSET)
    at_us = (base_ms + time_delta) * 1000 if time_us is None else time_us
    if not LEAST_US <= at_us <= MOST_US:
        raise FaultError(TIME)
    key, value = body.sized(), body.sized()
    headers = _read_headers(body)
    if body.data:
        raise FaultError(LENGTH)
    return Record(time_delta, offset_delta, key, value, headers), at_us


def _extension(
    record: Record, index: int, count: int, is_atomic: bool, producer: bytes, has_append_time: bool
) -> bytes:
    data = struct.pack("<BBII", 1, 8, index, count) if is_atomic else b""
    nulls = sum(1 << number for number, (_, value) in enumerate(record.headers) if value is None)
    if record.value is None or nulls:
        bitmap = nulls.to_bytes((nulls.bit_length() + 7) // 8, "little")
        data += bytes([4, 1 + len(bitmap), record.value is None]) + bitmap
    if producer:
        producer_id, epoch, sequence, flags = struct.unpack("<qhiB", producer)
        data += b"\x05\x0f" + struct.pack("<qhiB", producer_id, epoch, (sequence + index) % _SEQUENCES, flags)
    return data + b"\x06\x00" if has_append_time else data


def payload_of(record: Record, time_us: int, extension: bytes) -> bytes:
    """The envelope of a record. Names may repeat, which a mapping cannot say: they are put in by hand."""
    whole = encode_envelope(b"", record.key, None, time_us)
    block = b"".join(
        struct.pack("<HI", len(name), len(value or b"")) + name + (value or b"") for name, value in record.headers
    )
    fixed = list(_FIXED.unpack_from(whole))
    fixed[2], fixed[5], fixed[6] = len(record.headers), len(block), len(extension)
    return _FIXED.pack(*fixed) + whole[24:] + block + extension + (record.value or b"")


def records_to_frames(
    records: Buffer,
    count: int,
    first_offset: int,
    base_timestamp_ms: int,
    time_us: int | None,
    is_atomic: bool,
    producer: bytes,
    max_payload: int,
    /,
) -> tuple[bytes, bytes, bytes] | tuple[int, int]:
    """Frames of records, or what is wrong with which of them."""
    rest, payloads = Bytes(bytes(records), CUT), []
    if count > len(rest.data):
        return CUT, 0
    for index in range(count):
        try:
            record, at_us = read_record(rest, index, base_timestamp_ms, time_us)
        except FaultError as fault:
            return fault.kind, index
        payload = payload_of(record, at_us, _extension(record, index, count, is_atomic, producer, time_us is not None))
        if len(payload) > max_payload:
            return TOO_LARGE, index
        payloads.append(payload)
    return (REST, count) if rest.data else encode_many(first_offset, payloads)


def put_number(number: int) -> bytes:
    """A zigzag varint."""
    bits, out = (number << 1 ^ number >> 63) & ((1 << 64) - 1), bytearray()
    while bits > 127:
        out.append(bits & 127 | 128)
        bits >>= 7
    out.append(bits)
    return bytes(out)


def put_sized(data: bytes | None) -> bytes:
    """A length and so many bytes; -1 is null."""
    return put_number(-1) if data is None else put_number(len(data)) + data


def put_record(record: Record) -> bytes:
    """One record."""
    headers = b"".join(put_sized(name) + put_sized(value) for name, value in record.headers)
    body = b"\0" + put_number(record.time_delta) + put_number(record.offset_delta)
    return put_sized(body + put_sized(record.key) + put_sized(record.value) + put_number(len(record.headers)) + headers)


class Stored(NamedTuple):
    """What a payload says."""

    kind: str
    time_us: int = 0
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()
    producer: tuple[int, int, int, int] = _NOBODY
    after: int = 0
    control: tuple[int, int] = (0, 0)
    has_append_time: bool = False


def read_payload(payload: bytes, offset: int) -> Stored:
    """A message, a control record, or nothing; DataError otherwise."""
    if payload in (b"\0", b"\1"):
        return Stored("nothing")
    if len(payload) == 24 and payload[0] == 2:
        _, kind, epoch, coordinator, time_us, producer = struct.unpack("<BBhiqq", payload)
        return Stored("control", time_us, producer=(producer, epoch, -1, 1), control=(kind, coordinator))
    if len(payload) < 24 or payload[0] != 1 or payload[1] > 1:
        raise DataError(f"message {offset} is no envelope")
    _, flags, count, key_bytes, time_us, block_bytes, extension_bytes = _FIXED.unpack_from(payload)
    rest = Bytes(payload[24:], 0)
    try:
        key, block, extension = rest.take(key_bytes), rest.take(block_bytes), rest.take(extension_bytes)
        entries = _read_entries(Bytes(extension, 0))
        headers = _stored_headers(Bytes(block, 0), count, int.from_bytes(entries.get(4, b"\0")[1:], "little"))
    except (FaultError, struct.error):
        raise DataError(f"message {offset} has lengths that do not fit") from None
    is_null = bool(entries.get(4, b"\0")[0] & 1)
    if (key and not flags) or not LEAST_US <= time_us <= MOST_US or (is_null and rest.data):
        raise DataError(f"message {offset} is damaged")
    number, total = struct.unpack("<II", entries[1]) if 1 in entries and extension[0] == 1 else (0, 0)
    producer = struct.unpack("<qhiB", entries[5]) if 5 in entries else _NOBODY
    after = total - number - 1 if number < total else 0
    own = (producer[0], producer[1], producer[2], producer[3] & 1)
    value = None if is_null else rest.data
    return Stored("message", time_us, key if flags else None, value, headers, own, after, has_append_time=6 in entries)


def _read_entries(rest: Bytes) -> dict[int, bytes]:
    entries: dict[int, bytes] = {}
    while rest.data:
        kind, size = rest.take(2)
        body = rest.take(size)
        if (kind == 4 and (kind in entries or not body)) or (kind == 5 and size != 15) or (kind == 6 and size):
            raise FaultError(0)
        if kind == 5 and min(struct.unpack("<qhiB", body)) < 0:
            raise FaultError(0)
        if kind == 3 and (kind in entries or size != 8 or not LEAST_US <= struct.unpack("<q", body)[0] <= MOST_US):
            raise FaultError(0)
        entries[kind] = body
    return entries


def _stored_headers(block: Bytes, count: int, nulls: int) -> tuple[tuple[bytes, bytes | None], ...]:
    headers: list[tuple[bytes, bytes | None]] = []
    for index in range(count):
        name_bytes, value_bytes = struct.unpack("<HI", block.take(6))
        name, value = block.take(name_bytes), block.take(value_bytes)
        is_null = nulls >> index & 1
        if is_null and value:
            raise FaultError(0)
        headers.append((name, None if is_null else value))
    if block.data:
        raise FaultError(0)
    return tuple(headers)


def batch_bytes(
    base_offset: int,
    last_offset: int,
    leader_epoch: int,
    attributes: int,
    producer: tuple[int, int, int],
    base_ms: int,
    max_ms: int,
    records: list[bytes],
) -> bytes:
    """A whole batch with its checksum."""
    body = b"".join(records)
    after = (
        struct.pack(">hiqqqhii", attributes, last_offset - base_offset, base_ms, max_ms, *producer, len(records)) + body
    )
    head = struct.pack(">qiibI", base_offset, len(after) + 9, leader_epoch, 2, crc32c(after))
    return head + after


class Batch:
    """A batch that is being put together."""

    def __init__(self, base_offset: int) -> None:
        self.base_offset = self.last_offset = base_offset
        self.base_ms = self.max_ms = -1
        self.producer = _NOBODY
        self.has_append_time = False
        self.records: list[bytes] = []
        self.size = 61

    def fits(self, stored: Stored, offset: int, bound: int, max_batch_bytes: int) -> bool:
        """Whether a message belongs to it."""
        if not self.records:
            return True
        own, other = self.producer, stored.producer
        if self.size + bound > max_batch_bytes or (own[0], own[1], own[3]) != (other[0], other[1], other[3]):
            return False
        if self.has_append_time != stored.has_append_time:
            return False
        if self.has_append_time and self.base_ms != stored.time_us // 1000:
            return False
        return own[0] < 0 or other[2] == (own[2] + offset - self.base_offset) % _SEQUENCES

    def add(self, stored: Stored, offset: int) -> None:
        time_ms = stored.time_us // 1000
        if not self.records:
            self.base_ms = self.max_ms = time_ms
            identity, epoch, sequence, flags = stored.producer
            base = (sequence - (offset - self.base_offset)) % _SEQUENCES if identity >= 0 else sequence
            self.producer = (identity, epoch, base, flags)
            self.has_append_time = stored.has_append_time
        record = Record(
            time_ms - self.base_ms, offset - self.base_offset, stored.key, stored.value, list(stored.headers)
        )
        self.records.append(put_record(record))
        self.size += len(self.records[-1])
        self.max_ms = max(self.max_ms, time_ms)
        self.last_offset = offset

    def encoded(self, leader_epoch: int) -> bytes:
        attributes = (0x10 if self.producer[3] else 0) | (0x08 if self.has_append_time else 0)
        return batch_bytes(
            self.base_offset,
            self.last_offset,
            leader_epoch,
            attributes,
            self.producer[:3],
            self.base_ms,
            self.max_ms,
            self.records,
        )


def _control_batch(stored: Stored, offset: int, leader_epoch: int) -> bytes:
    kind, coordinator = stored.control
    if kind > 1 or not LEAST_US <= stored.time_us <= MOST_US:
        raise DataError(f"message {offset} is damaged")
    record = put_record(Record(0, 0, struct.pack(">hh", 0, kind), struct.pack(">hi", 0, coordinator), []))
    time_ms = stored.time_us // 1000
    return batch_bytes(offset, offset, leader_epoch, 0x30, stored.producer[:3], time_ms, time_ms, [record])


def frames_to_batches(
    first_offset: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    stop: int,
    max_batch_bytes: int,
    leader_epoch: int,
    /,
) -> bytes:
    """Batches, one after the other."""
    signed_epoch = leader_epoch - (1 << 32) if leader_epoch >= 1 << 31 else leader_epoch
    done, batch = b"", None
    for index, payload in _payloads(buffer, positions, lengths, start, stop):
        offset = first_offset + index
        stored = read_payload(payload, offset)
        if stored.kind == "nothing":
            batch = batch or Batch(offset)
            batch.last_offset = offset
        elif stored.kind == "control":
            done += b"" if batch is None else batch.encoded(signed_epoch)
            done, batch = done + _control_batch(stored, offset, signed_epoch), None
        else:
            bound = len(payload) + 40 + 10 * len(stored.headers)
            if batch is None or not batch.fits(stored, offset, bound, max_batch_bytes):
                done += b"" if batch is None else batch.encoded(signed_epoch)
                batch = Batch(offset)
            batch.add(stored, offset)
    return done if batch is None else done + batch.encoded(signed_epoch)


def _payloads(buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    view = byte_view(buffer)
    for index, position, length in places(view, positions, lengths, start, stop):
        yield index, bytes(view[position : position + length])


def producer_batches(
    first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[tuple[int, int, int, int, int, int, int, int, int]]:
    """(first offset, last offset, producer id, epoch, sequence, is transactional, is control, is commit, time_us)."""
    found: list[tuple[int, int, int, int, int, int, int, int, int]] = []
    after = 0
    for index, payload in _payloads(buffer, positions, lengths, start, stop):
        offset = first_offset + index
        stored = read_payload(payload, offset)
        if stored.kind == "nothing":
            continue
        identity, epoch, sequence, flags = stored.producer
        if stored.kind == "control":
            number = int.from_bytes(payload[4:8], "little", signed=True)
            found.append((offset, offset, identity, epoch, number, 1, 1, int(stored.control[0] == 1), stored.time_us))
            after = 0
        elif identity < 0:
            after = 0
        else:
            last = found[-1] if found and after > stored.after else None
            goes_on = last is not None and (identity, epoch, flags, 0) == (last[2], last[3], last[5], last[6])
            if last is not None and goes_on and sequence == (last[4] + offset - last[0]) % _SEQUENCES:
                found[-1] = (last[0], offset, *last[2:8], stored.time_us)
            else:
                found.append((offset, offset, identity, epoch, sequence, flags, 0, 0, stored.time_us))
            after = stored.after
    return found


def transaction_marks(
    first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[tuple[int, int, int, int, int]] | None:
    """(first offset, last offset, producer id, epoch, kind: 0 messages, 1 abort, 2 commit), or None."""
    return _marks(
        (first_offset + index, payload) for index, payload in _payloads(buffer, positions, lengths, start, stop)
    )


def payload_transaction_marks(
    first_offset: int, payloads: Iterable[bytes], /
) -> list[tuple[int, int, int, int, int]] | None:
    """The same of payloads that have no frames yet."""
    return _marks(enumerate(payloads, first_offset))


def _marks(messages: Iterable[tuple[int, bytes]]) -> list[tuple[int, int, int, int, int]] | None:
    found: list[tuple[int, int, int, int, int]] = []
    for offset, payload in messages:
        mark = _mark(payload)
        if mark is None:
            continue
        if found and mark[2] == 0 and found[-1][1:] == (offset - 1, *mark):
            found[-1] = (found[-1][0], offset, *mark)
        else:
            found.append((offset, offset, *mark))
    return found or None


def _mark(payload: bytes) -> tuple[int, int, int] | None:
    """Producer id, epoch and kind; None for what knows of no transaction."""
    if len(payload) == 24 and payload[0] == 2 and payload[1] <= 1:
        return int.from_bytes(payload[16:24], "little", signed=True), _i16(payload, 2), 1 + payload[1]
    if len(payload) < 24 or payload[0] != 1:
        return None
    _, _, _, key_bytes, _, block_bytes, extension_bytes = _FIXED.unpack_from(payload)
    at = 24 + key_bytes + block_bytes
    end = at + extension_bytes
    if end > len(payload):
        return None
    while at + 2 <= end and at + 2 + payload[at + 1] <= end:
        kind, size = payload[at], payload[at + 1]
        if kind == 5:
            identity = int.from_bytes(payload[at + 2 : at + 10], "little", signed=True)
            is_one = size == 15 and identity >= 0 and payload[at + 16] & 1
            return (identity, _i16(payload, at + 10), 0) if is_one else None
        at += 2 + size
    return None


def _i16(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "little", signed=True)
