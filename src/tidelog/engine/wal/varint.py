"""Variable-length integers: LEB128, seven bits per byte, lowest first; the eighth bit says that more bytes follow.

    0 to 127        1 byte
    up to 16383     2 bytes
    ...
    up to 2**64-1   10 bytes

Invariants
- Encodings are minimal. Non-minimal ones are accepted on decoding: encodings are never compared.
- Input comes from a disk: a truncated or overlong number raises DataError.

`native/varint.h` is the same in C.
"""

from __future__ import annotations

from typing import Final

from tidelog.errors import DataError

U64: Final = (1 << 64) - 1
U32: Final = (1 << 32) - 1
U16: Final = (1 << 16) - 1
MAX_BYTES: Final = 10
MAX_U32_BYTES: Final = 5
_ONE_BYTE: Final = tuple(bytes((number,)) for number in range(128))


def encode(number: int, largest: int = U64) -> bytes:
    """Encodes a number; OverflowError if it is negative or too large."""
    if 0 <= number < 128:
        return _ONE_BYTE[number]
    if not 0 <= number <= largest:
        raise OverflowError(f"{number} does not fit")
    taken = bytearray()
    while number >= 128:
        taken.append(number & 127 | 128)
        number >>= 7
    taken.append(number)
    return bytes(taken)


def decode(data: bytes | memoryview, at: int, largest: int = U64) -> tuple[int, int]:
    """Decodes the number that begins at a byte; returns it and the offset after it."""
    number = shift = 0
    for byte in data[at : at + MAX_BYTES]:
        at += 1
        if byte < 128:
            number |= byte << shift
            if number > largest:
                break
            return number, at
        number |= (byte & 127) << shift
        shift += 7
    raise DataError("a number is cut short, or too large")
