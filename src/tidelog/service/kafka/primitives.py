"""What Kafka's messages are made of: variable-length numbers and tagged fields, for the modules of `wire/`.

    uvarint         7 bits a byte, low ones first; the top bit says that more follow; at most 5 bytes, 32 bits
    tagged fields   [uvarint count] then count x [uvarint tag][uvarint size][`size` bytes]

Numbers are big-endian. Bytes come from a network: what does not fit raises ProtocolError, or IndexError and
struct.error at the end of the buffer, which `codec.py` turns into one.
"""

from __future__ import annotations

from tidelog.errors import InputError

Buffer = bytes | bytearray | memoryview
ZERO_UUID = bytes(16)
NULL_STRING = b"\xff\xff"
NULL_BYTES = b"\xff\xff\xff\xff"
_MAX_UVARINT_BYTES = 5
_MAX_UVARINT = 0xFFFF_FFFF


class ProtocolError(InputError):
    """A client sent bytes that are not a message of the protocol. There is no answer to it: close the connection."""


def read_uvarint(b: Buffer, at: int) -> tuple[int, int]:
    """The number at a position, and where it ends."""
    number = shift = 0
    for position in range(at, at + _MAX_UVARINT_BYTES):
        byte = b[position]
        number |= (byte & 127) << shift
        if byte < 128:
            if number > _MAX_UVARINT:
                break
            return number, position + 1
        shift += 7
    raise ProtocolError("a number of variable length has more than 32 bits")


def put_uvarint(out: bytearray, number: int) -> None:
    """Appends a number."""
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def read_tags(b: Buffer, at: int, end: int) -> tuple[list[tuple[int, int, int]], int]:
    """Tag, start and stop of each tagged field, and where they all end."""
    count, at = read_uvarint(b, at)
    if count * 2 > end - at:
        raise ProtocolError("a message has more tagged fields than fit into it")
    tags = []
    for _ in range(count):
        tag, at = read_uvarint(b, at)
        size, at = read_uvarint(b, at)
        if size > end - at:
            raise ProtocolError("a tagged field is longer than its message")
        tags.append((tag, at, at + size))
        at += size
    return tags, at


def skip_tags(b: Buffer, at: int, end: int) -> int:
    """Where tagged fields end, none of which is known here."""
    return read_tags(b, at, end)[1]


def put_tags(out: bytearray, tags: list[tuple[int, bytearray]]) -> None:
    """Appends tagged fields, which are in ascending order."""
    put_uvarint(out, len(tags))
    for tag, body in tags:
        put_uvarint(out, tag)
        put_uvarint(out, len(body))
        out += body
