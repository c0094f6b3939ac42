"""The oracle of frames: the same answers as `native/frames.c`, slower.

Arrays travel as bytes, positions as native u64 and lengths as native u32.

Numbers that are only compared (offsets, max_payload, minimum) may be any int. Positions and indices must not be
negative; indices past the end are cut, as in a slice. Places of payloads are claims: each is checked before it is used.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

from tidelog.errors import InputError
from tidelog.log.frame import Buffer, Stop

_HEADER = struct.Struct("<QII")
_FIELD = struct.Struct("<q")
_CLAIMS = struct.Struct("<QI")
_HEADER_BYTES = _HEADER.size
_MAX_OFFSET = (1 << 64) - 1
_MAX_LENGTH = (1 << 32) - 1


def crc32(data: Buffer, value: int = 0, /) -> int:
    """CRC-32 as zlib computes it."""
    return zlib.crc32(data, value)


def frame_crc(offset: int, payload: Buffer, /) -> int:
    """The checksum of a frame: over its payload, then over its offset and length."""
    view = byte_view(payload)
    return zlib.crc32(_CLAIMS.pack(offset & _MAX_OFFSET, len(view) & _MAX_LENGTH), zlib.crc32(view))


def encode_many(first_offset: int, payloads: Iterable[Buffer], /) -> tuple[bytes, bytes, bytes]:
    """All payloads as consecutive frames: (buffer, payload positions, payload lengths)."""
    payloads = tuple(payloads)
    if not 0 <= first_offset <= _MAX_OFFSET - max(len(payloads) - 1, 0):
        raise InputError("offsets of frames must be in the range 0 to 2**64 - 1")
    parts: list[Buffer] = []
    positions, lengths = array("Q"), array("I")
    end = 0
    for offset, payload in enumerate(map(_checked_payload, payloads), first_offset):
        parts.append(_HEADER.pack(offset, len(payload), frame_crc(offset, payload)))
        parts.append(payload)
        positions.append(end + _HEADER_BYTES)
        lengths.append(len(payload))
        end += _HEADER_BYTES + len(payload)
    return b"".join(parts), positions.tobytes(), lengths.tobytes()


def _checked_payload(payload: Buffer) -> Buffer:
    checked = payload if isinstance(payload, bytes) else byte_view(payload)
    if not checked:
        raise InputError("a frame must hold at least one byte")
    if len(checked) > _MAX_LENGTH:
        raise InputError(f"a frame holds at most {_MAX_LENGTH} bytes, this payload has {len(checked)}")
    return checked


def scan_frames(
    buffer: Buffer, position: int, offset: int, max_payload: int, payload_only: bool = False, /
) -> tuple[bytes, bytes, int, int]:
    """Whole frames from `position` on, the first of which must carry `offset`.

    `payload_only`: the checksums cover the payloads alone, as in Danube's frames.

    Returns (payload positions, payload lengths, end of the last whole frame, why it stopped).
    """
    view = byte_view(buffer)
    _check_position(view, position)
    positions, lengths = array("Q"), array("I")
    while True:
        stop, length = _judge(view, position, offset, max_payload, payload_only)
        if stop is not None:
            return positions.tobytes(), lengths.tobytes(), position, stop
        positions.append(position + _HEADER_BYTES)
        lengths.append(length)
        position += _HEADER_BYTES + length
        offset += 1


def _judge(
    view: memoryview, position: int, offset: int, max_payload: int, payload_only: bool
) -> tuple[int | None, int]:
    """Why there is no whole frame with `offset` at `position`; None, and its length, when there is one."""
    size = len(view)
    if position == size:
        return Stop.END, 0
    if position + _HEADER_BYTES > size:
        return Stop.PARTIAL, 0
    found, length, crc = _HEADER.unpack_from(view, position)
    if found != offset:
        return Stop.WRONG_OFFSET, 0
    if not 0 < length <= max_payload:
        return Stop.BAD_LENGTH, 0
    start = position + _HEADER_BYTES
    if start + length > size:
        return Stop.PARTIAL, 0
    payload = view[start : start + length]
    if (zlib.crc32(payload) if payload_only else frame_crc(offset, payload)) != crc:
        return Stop.BAD_CRC, 0
    return None, length


def find_frame(
    buffer: Buffer, position: int, min_offset: int, max_offset: int, max_payload: int, payload_only: bool = False, /
) -> tuple[int, int] | None:
    """The first whole frame at or after `position` whose offset is in the range: (position, offset)."""
    view = byte_view(buffer)
    _check_position(view, position)
    for start in range(position, len(view) - _HEADER_BYTES + 1):
        offset = _HEADER.unpack_from(view, start)[0]
        if not min_offset <= offset <= max_offset:
            continue
        if _judge(view, start, offset, max_payload, payload_only)[0] is None:
            return start, offset
    return None


def payloads(buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /) -> list[bytes]:
    """Copies of the payloads `start` to `stop` (exclusive)."""
    view = byte_view(buffer)
    return [bytes(view[at : at + length]) for _, at, length in places(view, positions, lengths, start, stop)]


def renumber(buffer: Buffer, positions: Buffer, lengths: Buffer, first_offset: int, /) -> tuple[bytes, bytes]:
    """A copy of frames that lie one behind the other, with other offsets: (frames, payload positions)."""
    view = byte_view(buffer)
    more = max(_count_of(byte_view(positions), byte_view(lengths)) - 1, 0)
    if not 0 <= first_offset <= _MAX_OFFSET - more:
        raise InputError("offsets of frames must be in the range 0 to 2**64 - 1")
    frames, moved, end = bytearray(), array("Q"), 0
    for index, position, length in places(view, positions, lengths, 0):
        if position < _HEADER_BYTES or (index and position - _HEADER_BYTES != end):
            raise ValueError(f"frame {index} is not right behind the one before")
        end = position + length
        moved.append(len(frames) + _HEADER_BYTES)
        frames += _renumbered_header(view, position - _HEADER_BYTES, first_offset + index) + view[position:end]
    return bytes(frames), moved.tobytes()


def renumber_in_place(buffer: Buffer, positions: Buffer, lengths: Buffer, first_offset: int, /) -> None:
    """The same where the frames are, in a buffer that can be written to."""
    moved, _ = renumber(buffer, positions, lengths, first_offset)
    view = byte_view(buffer)
    if view.readonly:
        raise BufferError("frames are renumbered in a buffer that can be written to")
    for _, position, _ in places(view, positions, lengths, 0):
        begin = position - _HEADER_BYTES
        view[begin : begin + len(moved)] = moved
        return


def join_frames(first_offset: int, pieces: Sequence[tuple[Buffer, Buffer, Buffer]], /) -> tuple[bytes, bytes, bytes]:
    """All frames of several pieces, one behind the other, with other offsets."""
    counts = [len(renumber(*piece, 0)[1]) // 8 for piece in pieces]
    if not 0 <= first_offset <= _MAX_OFFSET - max(sum(counts) - 1, 0):
        raise InputError("offsets of frames must be in the range 0 to 2**64 - 1")
    joined, positions, lengths = bytearray(), array("Q"), b""
    for piece in pieces:
        frames, places_in_it = renumber(*piece, first_offset + len(positions))
        positions.extend(len(joined) + position for position in memoryview(places_in_it).cast("Q"))
        joined += frames
        lengths += bytes(piece[2])
    return bytes(joined), positions.tobytes(), lengths


def measure_frames(buffer: Buffer, positions: Buffer, lengths: Buffer, /) -> tuple[int, int]:
    """Bytes of all payloads and of the largest, of frames whose headers agree with the arrays."""
    renumber(buffer, positions, lengths, 0)
    view, sizes, first = byte_view(buffer), [], 0
    for index, position, length in places(view, positions, lengths, 0):
        offset, said, _ = _HEADER.unpack_from(view, position - _HEADER_BYTES)
        first = first if index else offset
        if not length or (offset, said) != ((first + index) & _MAX_OFFSET, length):
            raise InputError(f"the header of frame {index} does not say what the frames say")
        sizes.append(length)
    return sum(sizes), max(sizes, default=0)


def _renumbered_header(view: memoryview, position: int, offset: int) -> bytes:
    """The header with another offset. Checksums are linear: they differ as those of the two headers alone do."""
    old, length, crc = _HEADER.unpack_from(view, position)
    crc ^= zlib.crc32(_CLAIMS.pack(old, length)) ^ zlib.crc32(_CLAIMS.pack(offset, length))
    return _HEADER.pack(offset, length, crc)


def field_range(buffer: Buffer, positions: Buffer, lengths: Buffer, field: int, /) -> tuple[int, int] | None:
    """Least and greatest i64 at byte `field` of the payloads; those too short for one do not count."""
    found = [number for _, number in _fields(buffer, positions, lengths, field, 0)]
    return (min(found), max(found)) if found else None


def first_at_least(buffer: Buffer, positions: Buffer, lengths: Buffer, field: int, minimum: int, start: int, /) -> int:
    """Index of the first payload from `start` on whose i64 at byte `field` is at least `minimum`, or -1."""
    for index, number in _fields(buffer, positions, lengths, field, start):
        if number >= minimum:
            return index
    return -1


def _fields(buffer: Buffer, positions: Buffer, lengths: Buffer, field: int, start: int) -> Iterator[tuple[int, int]]:
    """(index, i64 at byte `field`) of the payloads from `start` on that are long enough."""
    _check_index("field", field)
    view = byte_view(buffer)
    for index, at, length in places(view, positions, lengths, start):
        if length >= field + _FIELD.size:
            yield index, _FIELD.unpack_from(view, at + field)[0]


def places(
    view: memoryview, positions: Buffer, lengths: Buffer, start: int, stop: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """(index, position, length) of the payloads from `start` to `stop`, each checked to lie inside the buffer."""
    _check_index("start", start)
    if stop is not None:
        _check_index("stop", stop)
    position_bytes, length_bytes = byte_view(positions), byte_view(lengths)
    _count_of(position_bytes, length_bytes)
    pairs = zip(position_bytes.cast("Q")[start:stop], length_bytes.cast("I")[start:stop], strict=True)
    for index, (position, length) in enumerate(pairs, start):
        if position + length > len(view):
            raise ValueError(f"payload {index} is outside the buffer of {len(view)} bytes")
        yield index, position, length


def _count_of(position_bytes: memoryview, length_bytes: memoryview) -> int:
    if len(length_bytes) % 4 or len(position_bytes) != 2 * len(length_bytes):
        raise ValueError("positions and lengths are not arrays of the same count")
    return len(length_bytes) // 4


def byte_view(buffer: Buffer) -> memoryview:
    """The bytes of a contiguous buffer, whatever the format of its items."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BufferError("memoryview: underlying buffer is not C-contiguous")
    return view.cast("B")


def _check_position(view: memoryview, position: int) -> None:
    if not 0 <= position <= len(view):
        raise ValueError(f"position {position} is outside the buffer of {len(view)} bytes")


def _check_index(name: str, index: int) -> None:
    if index < 0:
        raise ValueError(f"{name} must not be negative")
