"""Reads Avro container files: the rows of files that other programs have written, with the schema in their head.

    file    "Obj\\x01", metadata (a map of text to bytes: avro.schema, avro.codec), sync (16 bytes), blocks
    block   rows (long), bytes (long), the rows in the codec, sync (the same 16 bytes)
    codec   null, deflate (raw), zstandard, snappy (with the CRC-32 of the rows behind it, big-endian), bzip2, xz

Spark's own reader of Avro is a jar that PySpark does not include.

Invariants
- Every byte is checked before it is believed: lengths against the bytes that are left, a block against its limit while
  it is decompressed, its end against the sync of the file. What does not fit is a DataError with the file and the byte.
- A file is read to its last byte; one that was cut short gives no row of the block that is not whole.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import zstandard

from tidelog.errors import DataError, InputError
from tidelog.pipeline.tables.avro import Cursor, avro_decoder, avro_fields
from tidelog.pipeline.tables.fitting import MisfitError, fitter

MAGIC = b"Obj\x01"
SYNC_BYTES = 16
BATCH_ROWS = 8192
_MOST_BLOCK_BYTES = 1 << 30
_MOST_WINDOW_BYTES = 128 << 20  # what zstandard itself takes without being told to
_CRC_BYTES = _ADLER_BYTES = 4
_MORE = "a block has more than 1 GiB of rows"


class Head(NamedTuple):
    """What a file says about itself, and where its blocks begin."""

    schema: str
    codec: str
    sync: bytes
    begin: int


def read_head(data: bytes, path: str) -> Head:
    """The head of a file, of which these are the first bytes."""
    cursor = Cursor(data)
    try:
        if cursor.take(len(MAGIC)) != MAGIC:
            raise MisfitError("it is no Avro file: it does not begin with Obj and 1")
        found: dict[str, bytes] = {}
        while count := cursor.count():
            for _ in range(count):
                name = cursor.take(cursor.long()).decode("utf-8", "replace")
                found[name] = cursor.take(cursor.long())
        sync = cursor.take(SYNC_BYTES)
    except MisfitError as error:
        raise DataError(f"{path}: {error.reason}", operation="read Avro") from None
    codec = found.get("avro.codec", b"null").decode("utf-8", "replace")
    if codec not in _CODECS:
        raise InputError(f"{path} has the codec {codec}", hint=f"Files may have {', '.join(_CODECS)}")
    schema = found.get("avro.schema", b"").decode("utf-8", "replace")
    return Head(schema, codec, sync, cursor.position)


def columns_of(head: Head) -> pa.Schema:
    """The columns of the rows of a file."""
    return pa.schema(list(avro_fields(head.schema)))


def read_rows(data: bytes, path: str, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file in these columns, by name: one that the file does not have is null in all of its rows."""
    head = read_head(data, path)
    of_file = columns_of(head)
    for field in of_file:
        if field.name not in columns.names or columns.field(field.name).type != field.type:
            raise DataError(
                f"{path}: its column {field.name} is {field.type}, and the first file has no such column",
                operation="read Avro",
                hint="Give files of another schema a run of their own",
            )
    decode, fit = avro_decoder(head.schema), fitter(avro_fields(head.schema))
    rows: list[Any] = []
    for count, block, begin in _blocks(data, path, head):
        try:
            for row in decode.several(block, count):
                rows.append(fit(row))
                if len(rows) == BATCH_ROWS:
                    yield _batch(rows, columns, of_file)
                    rows = []
        except MisfitError as error:
            raise DataError(f"{path}: byte {begin}: {error}", operation="read Avro") from None
    if rows:
        yield _batch(rows, columns, of_file)


def _batch(rows: list[Any], columns: pa.Schema, of_file: pa.Schema) -> pa.RecordBatch:
    made = pa.RecordBatch.from_pylist(rows, schema=of_file)  # they fit
    arrays = [
        made.column(field.name) if field.name in of_file.names else pa.nulls(len(rows), field.type) for field in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _blocks(data: bytes, path: str, head: Head) -> Iterator[tuple[int, bytes, int]]:
    """Rows, their bytes, and where the block begins."""
    cursor, unpack = Cursor(data, head.begin), _CODECS[head.codec]
    while not cursor.is_at_end:
        begin = cursor.position
        try:
            count, stored = cursor.long(), cursor.take(cursor.long())
            if count < 0 or cursor.take(SYNC_BYTES) != head.sync:
                raise MisfitError("a block does not end with the mark of the file")
            block = unpack(stored)
            if count > len(block) or (block and not count):  # a row of no bytes (nulls alone) is not worth more
                raise MisfitError(f"a block claims {count} rows and has {len(block)} bytes")
        except MisfitError as error:
            raise DataError(f"{path}: byte {begin}: {error.reason}", operation="read Avro") from None
        yield count, block, begin


# Codecs


def _deflated(data: bytes) -> bytes:
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = decompressor.decompress(data, _MOST_BLOCK_BYTES)
    except zlib.error as error:
        raise MisfitError(f"a block cannot be decompressed: {error}") from None
    # Writers in Python cut zlib's head off, and leave some of its checksum behind.
    if not decompressor.eof or len(decompressor.unused_data) > _ADLER_BYTES:
        raise MisfitError(_MORE if len(found) == _MOST_BLOCK_BYTES else "a block is not one deflated stream")
    return found


def _zstandard(data: bytes) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES).stream_reader(data) as reader:
            found: bytes = reader.read(_MOST_BLOCK_BYTES + 1)
    except zstandard.ZstdError as error:
        raise MisfitError(f"a block cannot be decompressed: {error}") from None
    if len(found) > _MOST_BLOCK_BYTES:
        raise MisfitError(_MORE)
    return found


def _snappy(data: bytes) -> bytes:
    packed, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
    size = _snappy_bytes(packed)
    if size > _MOST_BLOCK_BYTES or size > 64 * max(1, len(packed)):  # a copy of three bytes makes 64
        raise MisfitError("a block says that it has more rows than its bytes can be")
    try:
        found: bytes = pa.decompress(packed, decompressed_size=size, codec="snappy", asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise MisfitError(f"a block cannot be decompressed: {error}") from None
    if zlib.crc32(found).to_bytes(_CRC_BYTES, "big") != crc:
        raise MisfitError("a block is not what its checksum says")
    return found


def _snappy_bytes(data: bytes) -> int:
    """The size that a snappy block begins with."""
    size = 0
    for place, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return size
    raise MisfitError("a block has no size")


def _unpacked(make: Callable[[], Any]) -> Callable[[bytes], bytes]:
    def unpack(data: bytes) -> bytes:
        decompressor = make()
        try:
            found: bytes = decompressor.decompress(data, _MOST_BLOCK_BYTES)
        except (OSError, lzma.LZMAError) as error:
            raise MisfitError(f"a block cannot be decompressed: {error}") from None
        if not decompressor.eof:
            raise MisfitError(_MORE if len(found) == _MOST_BLOCK_BYTES else "a block is cut short")
        return found

    return unpack


_CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": bytes,
    "deflate": _deflated,
    "zstandard": _zstandard,
    "snappy": _snappy,
    "bzip2": _unpacked(bz2.BZ2Decompressor),
    "xz": _unpacked(lzma.LZMADecompressor),
}
