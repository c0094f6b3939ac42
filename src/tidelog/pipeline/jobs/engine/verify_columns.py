"""A compaction whose indexes and files agree is found to be so by columns; anything else is looked at row by row.

    index files -> what each says of every value -> by file, in order of bytes -> every blob file and data file read

Invariants
- "Sound" is said of exactly those compactions in which `verify_tasks.py` finds nothing, with the same figures. What is
  wrong, and of which version, is not told here: the rows would have to carry the names of all versions for that.
- A version and the index of values meet by the place that both tell, not by the position: versions with another place
  than the index of values has are without a partner there.
- One blob file, with what is said of its values, is in memory. Fit for executors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from tidelog import _native
from tidelog.engine.sst.blob_file import FilePointer, encode_value_pointer
from tidelog.engine.sst.block import joined
from tidelog.engine.sst.sorted_index import BlobFileInfo, Compaction
from tidelog.engine.sst.sstable import RowPart, SSTable
from tidelog.engine.wal.value import decode_value
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.jobs.engine.columns import binary, numbers, one_array, raw_numbers, whole_groups
from tidelog.pipeline.jobs.engine.rows import TOLD_SCHEMA, as_told, told_by
from tidelog.pipeline.jobs.engine.verify_tasks import (
    VALUE,
    VERSION,
    CompactionCheck,
    DataFiles,
    PlaceRow,
    file_tasks,
    read_blob_file,
)
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.pieces import bytes_column
from tidelog.pipeline.tasks import as_batches, tuples_in

if TYPE_CHECKING:
    import pyarrow as pa

    from tidelog.pipeline.flow import Flow

_JOINED_BYTES = 1 << 20
# A row that says that an index file cannot be trusted, and one that says that a blob file is there.
_DAMAGE: Final = 9
_BLOB: Final = 2

SAID_SCHEMA: Final = "file int, byte bigint, source int, said binary, name binary"
_PLACE = struct.Struct("<QIB")
_VERSION = struct.Struct("<QIBQIQI")


class SaidPart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of one of the two indexes; there are so many blob files."""

    place: EngineLocation
    part: RowPart
    is_values: bool
    blob_files: int


class BlobNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """So many blob files are to be read, whether or not anything points into them."""

    blob_files: int


def said_batches(item: SaidPart | BlobNumbers) -> Iterator[pa.RecordBatch]:
    """What one index file says of values; the last row says so if it cannot be read."""
    if isinstance(item, BlobNumbers):
        yield from as_batches(((number, -1, _BLOB, b"", b"") for number in range(item.blob_files)), SAID_SCHEMA)
        return
    try:
        yield from _said(item)
    except (DataError, NotFoundError):
        yield from as_batches([(0, -1, _DAMAGE, b"", b"")], SAID_SCHEMA)


def _said(item: SaidPart) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    table = SSTable(item.place.opened().objects, item.part, kind="values" if item.is_values else "versions")
    width = _PLACE.size if item.is_values else _VERSION.size
    source = VALUE if item.is_values else VERSION
    for raw in joined((block.raw for block in table.blocks()), _JOINED_BYTES):
        count, (files, places, said, name_ends, names) = _native.said_places(raw, item.is_values, item.blob_files)
        fixed = pa.Array.from_buffers(pa.binary(width), count, [None, pa.py_buffer(said)])
        arrays = [
            numbers(pa.int32(), files, count),
            numbers(pa.int64(), places, count),
            pa.repeat(pa.scalar(source, pa.int32()), count),
            fixed.cast(pa.binary()),
            binary(count, name_ends, names),
        ]
        yield pa.RecordBatch.from_arrays(arrays, names=[field.split()[0] for field in SAID_SCHEMA.split(", ")])


class SoundFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a task read; `is_sound` is False once something is wrong, and then figures are not all there."""

    is_sound: bool = True
    blob_files: int = 0
    blob_file_bytes: int = 0
    values: int = 0
    data_files: int = 0
    data_bytes: int = 0


class FileChecker:
    """What a task does with rows in order of (file, byte, source): one `SoundFiles` a file."""

    def __init__(self, place: EngineLocation, files: tuple[BlobFileInfo, ...]) -> None:
        self._place = place
        self._files = files

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told(self._checked(number, rows) for number, rows in whole_groups(batches, "file"))

    def _checked(self, number: int, rows: pa.Table) -> SoundFiles:
        import pyarrow.compute as pc

        if pc.any(pc.equal(rows.column("source"), _DAMAGE)).as_py():
            return SoundFiles(is_sound=False)
        said = rows.filter(pc.less(rows.column("source"), _BLOB))
        try:
            is_blob_file = number < len(self._files)
            return self._blob_file(self._files[number], said) if is_blob_file else self._data_files(said)
        except (DataError, NotFoundError, UnicodeDecodeError):
            return SoundFiles(is_sound=False)

    def _blob_file(self, file: BlobFileInfo, rows: pa.Table) -> SoundFiles:
        data = read_blob_file(self._place.opened().objects, self._place.keys, file)
        said = one_array(rows.column("said"))
        found = _native.sound_blob_file(
            data,
            raw_numbers(one_array(rows.column("byte"))),
            raw_numbers(one_array(rows.column("source"))),
            bytes_column(said),
        )
        wanted = file.values, file.live_values, file.live_bytes, file.first_position, file.last_position
        if found is None or found[:5] != wanted:
            return SoundFiles(is_sound=False)
        for row in found[5]:
            byte = rows.column("byte")[row].as_py()
            _, stored_bytes, codec, size, crc, lsn, _ = _VERSION.unpack(said[row].as_py())
            decode_value(data[byte : byte + stored_bytes], codec, size, crc, lsn)
        return SoundFiles(blob_files=1, blob_file_bytes=len(data), values=found[1])

    def _data_files(self, rows: pa.Table) -> SoundFiles:
        """Values that are files: large ones, so that an object for each is nothing."""
        told = [_place_row(*row) for row in tuples_in(rows.to_batches(), "source", "said", "name")]
        told.sort(key=lambda row: (row.position, row.source))
        found = DataFiles(self._place).check(told, len(self._files))
        return SoundFiles(
            is_sound=not found.findings and not found.mismatches,
            values=found.values,
            data_files=found.data_files,
            data_bytes=found.data_bytes,
        )


def _place_row(source: int, said: bytes, name: bytes) -> PlaceRow:
    """The row that `verify_tasks.py` makes of the same."""
    position, stored_bytes, codec = _PLACE.unpack_from(said)
    pointer = encode_value_pointer(FilePointer(codec, stored_bytes, name.decode("ascii")))
    if source == VALUE:
        return PlaceRow(source, position, "", pointer)
    _, _, _, size, crc, lsn, kept = _VERSION.unpack(said)
    return PlaceRow(source, position, "", pointer, size, crc, lsn, kept)


def sound_compaction(flow: Flow, place: EngineLocation, root: Compaction) -> CompactionCheck | None:
    """What was read of a compaction with which nothing is wrong; None for any other."""
    if not _are_apart(root.values):
        return None
    blob_files = len(root.blob_files)
    items: list[SaidPart | BlobNumbers] = [BlobNumbers(blob_files=blob_files)]
    for parts, is_values in ((root.versions, False), (root.values, True)):
        items += [SaidPart(place=place, part=part, is_values=is_values, blob_files=blob_files) for part in parts]
    rows = flow.source(said_batches, items, SAID_SCHEMA).grouped("file", file_tasks(root), ["file", "byte", "source"])
    found = told_by(rows.mapped(FileChecker(place, root.blob_files), TOLD_SCHEMA), SoundFiles)
    counts = {
        name: sum(getattr(one, name) for one in found)
        for name in ("blob_files", "blob_file_bytes", "values", "data_files", "data_bytes")
    }
    said, is_found = (root.data_files, root.data_bytes), (counts["data_files"], counts["data_bytes"])
    if said != is_found or not all(one.is_sound for one in found):
        return None
    rows_in_versions = sum(part.rows for part in root.versions)
    return CompactionCheck(generation=root.generation, seq=root.seq, version_rows=rows_in_versions, **counts)


def _are_apart(parts: tuple[RowPart, ...]) -> bool:
    """Whether no key can be in two of these files."""
    return all(one.last_key < other.first_key for one, other in pairwise(parts))
