"""Executor tasks of `verify` for engines: log objects, named files, copies in replicas; the indexes and values of a
compaction, row by row.

    index files -> rows by position -> one row a value -> rows by file -> every blob file and data file read

Invariants
- Tasks call the checks of `engine/verify/store.py`, and compare what only a shuffle can bring together.
- Every version that points into the log has a place in compacted data, and every other has none. The value index has
  each position once, with the place that every version of it tells; versions that share a value agree on its size,
  checksum and LSN.
- A blob file is read whole: it has the bytes that its name specifies, every value in it matches its checksum, and the
  number and size of the referenced values are those in the root. A data file is exactly as long as its value.
- If an index file cannot be read, contradictions between the indexes are not reported: they follow from that.
- One blob file, or one value, is in memory. Fit for executors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tidelog.cold.catalog import Descriptor
from tidelog.engine.mvcc.cells import BUCKETS, decode_cell, is_pointer
from tidelog.engine.sst.blob_file import (
    BlobPointer,
    DirectoryEntry,
    FilePointer,
    check_blob_file,
    decode_value_pointer,
    decode_version,
    encode_value_pointer,
    position_of,
)
from tidelog.engine.sst.sorted_index import BlobFileInfo, Compaction
from tidelog.engine.sst.sstable import RowPart, SSTable
from tidelog.engine.sst.value_file import ValueName
from tidelog.engine.verify.describe import describe_key
from tidelog.engine.verify.store import (
    LogObject,
    about_engine,
    check_log_object,
    check_named_file,
    check_stored_value,
    content_digest,
)
from tidelog.engine.wal.value import decode_value
from tidelog.errors import DataError, NotFoundError
from tidelog.findings import Finding
from tidelog.pipeline.jobs.engine.rows import TOLD_SCHEMA, as_told, told_in
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.tasks import as_batches, map_in_arrow, rows_of_items, tuples_in
from tidelog.store.keys import EngineKeys, digest_of
from tidelog.store.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_PART_BYTES = 8 << 20
_FILES_BYTES = 128 << 20
_MAX_TASKS = 1024
# Of each task; the first ones say what happened.
_MOST_FINDINGS = 20


class LogWork(msgspec.Struct, frozen=True, kw_only=True):
    """An object of the log to read, and which record the manifest calls the last entry's."""

    place: EngineLocation
    descriptor: Descriptor
    high_water_lsn: int


def check_log(work: LogWork) -> LogObject:
    """Reads all of it."""
    return check_log_object(work.place.opened().objects, work.place.keys, work.descriptor, work.high_water_lsn)


class FileWork(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is named by its content."""

    place: EngineLocation
    part: RowPart


class FileFound(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with such a file."""

    findings: tuple[Finding, ...] = ()
    is_there: bool = True


def check_file(work: FileWork) -> FileFound:
    """Reads all of it, and compares it with its name."""
    objects, keys = work.place.opened().objects, work.place.keys
    return FileFound(findings=tuple(check_named_file(objects, keys, work.part)))


class ValueFileWork(msgspec.Struct, frozen=True, kw_only=True):
    """A value file: what its name says, and its bytes."""

    place: EngineLocation
    name: ValueName
    size: int


def check_value(work: ValueFileWork) -> FileFound:
    """Reads all of it; one that is gone meanwhile is nobody's any more."""
    try:
        found = check_stored_value(work.place.opened().objects, work.place.keys, work.name, work.size)
    except NotFoundError:
        return FileFound(is_there=False)
    return FileFound(findings=() if found is None else (found,))


# A replica and the engine's store: the same files in both, byte for byte, whatever metadata says of them. A file that
# the engine's store lacks is reported elsewhere.


class CopyWork(msgspec.Struct, frozen=True, kw_only=True):
    """Files that a replica refers to, by key; or, with `values`, the data files that part of its value index names."""

    origin: EngineLocation
    copy: EngineLocation
    keys: tuple[str, ...] = ()
    values: RowPart | None = None


class CopyFound(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared: how many files, their bytes, and (key, what is wrong) where something is."""

    files: int = 0
    bytes: int = 0
    wrong: tuple[tuple[str, str], ...] = ()


def compare_copies(work: CopyWork) -> CopyFound:
    """Reads the files of both stores to their end."""
    origin, copy = work.origin.opened().objects, work.copy.opened().objects
    files, size, wrong = 0, 0, list[tuple[str, str]]()
    try:
        for key in _keys(work, copy):
            there = _digest_in(copy, key)
            reason = "it is missing in the replica" if there is None else _difference(there, _digest_in(origin, key))
            wrong += [] if reason is None else [(key, reason)]
            files += 1
            size += 0 if there is None else there[1]
    except (DataError, NotFoundError) as error:
        wrong.append(("" if work.values is None else work.values.key, error.message))
    return CopyFound(files=files, bytes=size, wrong=tuple(wrong))


def _keys(work: CopyWork, copy: ObjectStore) -> Iterator[str]:
    yield from work.keys
    for _, value in () if work.values is None else SSTable(copy, work.values, kind="values").rows():
        place = decode_value_pointer(value)
        if isinstance(place, FilePointer):
            yield work.copy.keys.data_prefix + place.name


def _digest_in(objects: ObjectStore, key: str) -> tuple[str, int] | None:
    try:
        return content_digest(objects, key)
    except NotFoundError:
        return None


def _difference(copy: tuple[str, int], origin: tuple[str, int] | None) -> str | None:
    if origin is None or copy == origin:
        return None
    if copy[1] != origin[1]:
        return f"it has {copy[1]} bytes in the replica, and {origin[1]} in the engine's store"
    return "its bytes in the replica are others than in the engine's store"


# The two indexes of a compaction: do they tell the same places, of the same values.
#
#     source   position        rows of
#     VALUE    of the value    the value index
#     VERSION  of the value    the version index, where a cell points into the log
#     BLOB     -1 - number     the list of blob files in the root: each is read, whether or not anything points into it
#     DAMAGE   0               what could not be read


VALUE: Final = 0
VERSION: Final = 1
BLOB: Final = 2
DAMAGE: Final = 9
DAMAGE_FILE: Final = ""
MISMATCH_FILE: Final = "!"


class PlaceRow(NamedTuple):
    """What one index says of a value; `name` is the version or the file that says it."""

    source: int
    position: int
    name: str
    place: bytes = b""
    size: int = 0
    crc: int = 0
    lsn: int = 0
    stored: int = 0


class ValueRow(NamedTuple):
    """A value to be read: in which file, and what it has to be. A blob file itself is the row with byte -1."""

    file: str
    byte: int = 0
    position: int = 0
    name: str = ""
    place: bytes = b""
    size: int = 0
    crc: int = 0
    lsn: int = 0


PLACE_SCHEMA: Final = (
    "source int, position bigint, name string, place binary, size bigint, crc bigint, lsn bigint, stored bigint"
)
VALUE_SCHEMA: Final = (
    "file string, byte bigint, position bigint, name string, place binary, size bigint, crc bigint, lsn bigint"
)


class IndexPart(msgspec.Struct, frozen=True, kw_only=True):
    """A file of one of the two indexes."""

    place: EngineLocation
    part: RowPart
    is_values: bool


class BlobFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The blob files that the root names."""

    files: tuple[BlobFileInfo, ...]


IndexItem = IndexPart | BlobFiles


def place_batches(item: IndexItem) -> Iterator[pa.RecordBatch]:
    """The rows of one item, as batches of `PLACE_SCHEMA`."""
    return as_batches(place_rows(item), PLACE_SCHEMA)


def place_rows(item: IndexItem) -> Iterator[PlaceRow]:
    """The rows of one item; what cannot be read is the last of them."""
    if isinstance(item, BlobFiles):
        yield from (PlaceRow(BLOB, -1 - number, file.key) for number, file in enumerate(item.files))
        return
    about = about_engine(item.place.name)
    try:
        file = SSTable(item.place.opened().objects, item.part, kind="values" if item.is_values else "versions")
        for key, value in file.rows():
            yield from _value_row(item, key, value) if item.is_values else _version_row(item, key, value)
    except (DataError, NotFoundError) as error:
        yield _damage(about.finding_of(error, "index", item.part.key))


def _value_row(item: IndexPart, key: bytes, value: bytes) -> Iterator[PlaceRow]:
    decode_value_pointer(value)
    yield PlaceRow(VALUE, position_of(key), item.part.key, value)


def _version_row(item: IndexPart, key: bytes, value: bytes) -> Iterator[PlaceRow]:
    cell, place = decode_version(value)
    name = describe_key(key)
    if key[:1] == BUCKETS or not is_pointer(cell):
        if place is not None:
            reason = f"{name} has a place, and no value elsewhere"
            yield _damage(about_engine(item.place.name).finding("index", item.part.key, reason))
        return
    version = decode_cell(cell)
    encoded = b"" if place is None else encode_value_pointer(place)
    said = version.size, version.crc, version.lsn, version.stored_bytes
    yield PlaceRow(VERSION, version.position, name, encoded, *said)


def _damage(finding: Finding) -> PlaceRow:
    return PlaceRow(DAMAGE, 0, "", msgspec.msgpack.encode(finding))


class PlaceMerge:
    """What a task does with rows in order of (position, source): rows of `VALUE_SCHEMA`, one a value."""

    def __init__(self, engine: str, blob_files: int) -> None:
        self._engine = engine
        self._blob_files = blob_files
        self._found = 0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self._found = 0
        said = map(PlaceRow._make, tuples_in(batches, *PlaceRow._fields))
        return as_batches(self.merged(said), VALUE_SCHEMA)

    def merged(self, said: Iterable[PlaceRow]) -> Iterator[ValueRow]:
        """One row a value, of rows in order of (position, source)."""
        for position, rows in groupby(said, key=lambda row: row.position):
            told: PlaceRow | None = None
            first: PlaceRow | None = None
            for row in rows:
                if row.source == DAMAGE:
                    yield ValueRow(DAMAGE_FILE, place=row.place)
                elif row.source == BLOB:
                    yield ValueRow(blob_name(-1 - position), -1, name=row.name)
                elif row.source == VALUE:
                    told = row
                else:
                    first = first or row
                    yield from self._mismatches(row, told, first)
            if told is not None:
                yield from self._to_read(told, first)

    def _mismatches(self, row: PlaceRow, told: PlaceRow | None, first: PlaceRow) -> Iterator[ValueRow]:
        if not row.place:
            yield from self._mismatch(row.name, "the version index does not say where its value is")
        elif told is None:
            yield from self._mismatch(row.name, f"its value, at position {row.position}, is not in the value index")
        elif told.place != row.place:
            yield from self._mismatch(
                row.name, f"the two indexes tell two places of its value, position {row.position}"
            )
        if row[4:] != first[4:]:
            yield from self._mismatch(
                row.name, f"it says something else than {first.name} of the value that they share"
            )

    def _to_read(self, told: PlaceRow, version: PlaceRow | None) -> Iterator[ValueRow]:
        if version is None:
            yield from self._mismatch(told.name, f"position {told.position} is in the value index, and in no version")
            return
        place = decode_value_pointer(told.place)
        wanted = told.position, version.name, told.place, version.size, version.crc, version.lsn
        if isinstance(place, FilePointer):
            yield ValueRow(place.name, 0, *wanted)
        elif place.blob_file < self._blob_files:
            yield ValueRow(blob_name(place.blob_file), place.byte, *wanted)
        else:
            yield from self._mismatch(
                version.name, f"its value is in blob file {place.blob_file} of {self._blob_files}"
            )

    def _mismatch(self, name: str, reason: str) -> Iterator[ValueRow]:
        self._found += 1
        if self._found <= _MOST_FINDINGS:
            finding = about_engine(self._engine).finding("index", name, reason)
            yield ValueRow(MISMATCH_FILE, place=msgspec.msgpack.encode(finding))


def blob_name(number: int) -> str:
    """How a blob file is called among the files that values are in."""
    return f"blob file {number}"


# Every file with values in it


class ValuesResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a task read, and what is wrong. `mismatches` are between the indexes: they follow from a damaged one."""

    blob_files: int = 0
    blob_file_bytes: int = 0
    values: int = 0
    data_files: int = 0
    data_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    mismatches: tuple[Finding, ...] = ()
    damage: tuple[Finding, ...] = ()


class DataFiles:
    """Values that are files of their own, in a task that has all that is said of them."""

    def __init__(self, place: EngineLocation) -> None:
        self._place = place

    def check(self, rows: Iterable[PlaceRow], blob_files: int) -> ValuesResult:
        """Reads them all; `rows` are in order of (position, source)."""
        return _Values(self._place, ()).result(PlaceMerge(self._place.name, blob_files).merged(rows))


class ValueChecker:
    """What a task does with rows in order of (file, byte): one `ValuesResult`."""

    def __init__(self, place: EngineLocation, files: tuple[BlobFileInfo, ...]) -> None:
        self._place = place
        self._files = files

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = map(ValueRow._make, tuples_in(batches, *ValueRow._fields))
        return as_told([_Values(self._place, self._files).result(rows)])


class _Values:
    """The files of one task, one after the other."""

    def __init__(self, place: EngineLocation, files: tuple[BlobFileInfo, ...]) -> None:
        self._about = about_engine(place.name)
        self._keys = place.keys
        self._objects = place.opened().objects
        self._files = {blob_name(number): file for number, file in enumerate(files)}
        self._counts = dict.fromkeys(("blob_files", "blob_file_bytes", "values", "data_files", "data_bytes"), 0)
        self._findings: list[Finding] = []
        self._told: dict[str, list[Finding]] = {DAMAGE_FILE: [], MISMATCH_FILE: []}

    def result(self, rows: Iterable[ValueRow]) -> ValuesResult:
        for file, values in groupby(rows, key=lambda row: row.file):
            if file in self._told:
                self._told[file] += [msgspec.msgpack.decode(row.place, type=Finding) for row in values]
            elif file in self._files:
                self._check_blob_file(self._files[file], values)
            else:
                self._check_data_files(values)
        return ValuesResult(
            **self._counts,
            findings=tuple(self._findings),
            mismatches=tuple(self._told[MISMATCH_FILE]),
            damage=tuple(self._told[DAMAGE_FILE]),
        )

    def _check_blob_file(self, file: BlobFileInfo, rows: Iterable[ValueRow]) -> None:
        try:
            data = read_blob_file(self._objects, self._keys, file)
            directory = {entry.position: entry for entry in check_blob_file(data, file.key)}
        except (DataError, NotFoundError) as error:
            self._add(self._about.finding_of(error, "blob file", file.key))
            return
        self._counts["blob_files"] += 1
        self._counts["blob_file_bytes"] += len(data)
        live = [self._check_in_blob(file, data, directory, row) for row in rows if row.byte >= 0]
        said = (file.values, file.live_values, file.live_bytes, file.first_position, file.last_position)
        found = (len(directory), len(live), sum(live), min(directory), max(directory))
        if said != found:
            names = "values, live values, live bytes, first and last position"
            self._wrong(file.key, f"the root says {said} of it ({names}), and it has {found}", "blob file")

    def _check_in_blob(
        self, file: BlobFileInfo, data: bytes, directory: dict[int, DirectoryEntry], row: ValueRow
    ) -> int:
        """The bytes of a value."""
        place = decode_value_pointer(row.place)
        assert isinstance(place, BlobPointer), "it came with those of a blob file"
        entry = directory.get(row.position)
        if entry is None or (entry.byte, entry.stored_bytes) != (place.byte, place.stored_bytes):
            self._wrong(file.key, f"{row.name}: the index says that its value is at byte {place.byte}, where it is not")
        else:
            self._check_value(file.key, data[place.byte : place.byte + place.stored_bytes], place.codec, row)
        return place.stored_bytes

    def _check_data_files(self, rows: Iterable[ValueRow]) -> None:
        for number, row in enumerate(rows):
            place = decode_value_pointer(row.place)
            assert not isinstance(place, BlobPointer), "those are looked at elsewhere"
            key = self._keys.data_file_named(place.name)
            if key is None or number:
                reason = "it names an unknown data file" if key is None else f"its file {place.name} is another's too"
                self._wrong(row.name, reason)
                continue
            try:
                data = bytes(self._objects.read_range(key, 0, place.stored_bytes + 1))
            except NotFoundError:
                self._wrong(key, f"the data file of {row.name} is missing")
                continue
            if len(data) != place.stored_bytes:
                self._wrong(key, f"the data file of {row.name} has not the {place.stored_bytes} bytes of its index")
                continue
            self._counts["data_files"] += 1
            self._counts["data_bytes"] += len(data)
            self._check_value(key, data, place.codec, row)

    def _check_value(self, key: str, stored: bytes, codec: int, row: ValueRow) -> None:
        try:
            decode_value(stored, codec, row.size, row.crc, row.lsn)
            self._counts["values"] += 1
        except DataError as error:
            self._wrong(key, f"{row.name}: {error.message}")

    def _wrong(self, path: str, message: str, kind: str = "value") -> None:
        self._add(self._about.finding(kind, path, message))

    def _add(self, finding: Finding) -> None:
        if len(self._findings) < _MOST_FINDINGS:
            self._findings.append(finding)


def read_blob_file(objects: ObjectStore, keys: EngineKeys, file: BlobFileInfo) -> bytes:
    """All of a blob file, which has the bytes that its name and the root say."""
    data = bytes(objects.read_range(file.key, 0, file.size + 1))
    name = keys.parse_compacted(file.key)
    if len(data) != file.size:
        raise DataError(f"it has not the {file.size} bytes that the root says")
    if name is None or digest_of(data) != name.digest:
        check_blob_file(data, file.key)  # says what, and at which byte, where it can be told
        raise DataError("content does not match the digest in the name")
    return data


class CompactionCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a compaction."""

    generation: int
    seq: int
    version_rows: int = 0
    blob_files: int = 0
    blob_file_bytes: int = 0
    values: int = 0
    data_files: int = 0
    data_bytes: int = 0


def check_compaction(
    spark: SparkSession, place: EngineLocation, root: Compaction
) -> tuple[CompactionCheck, tuple[Finding, ...]]:
    """Reads all blob files and data files; what that was, and what is wrong."""
    items: list[IndexItem] = [BlobFiles(files=root.blob_files)]
    items += [IndexPart(place=place, part=part, is_values=False) for part in root.versions]
    items += [IndexPart(place=place, part=part, is_values=True) for part in root.values]
    found = _results(spark, place, root, items)
    counts = {
        name: sum(getattr(one, name) for one in found)
        for name in ("blob_files", "blob_file_bytes", "values", "data_files", "data_bytes")
    }
    rows = sum(part.rows for part in root.versions)
    check = CompactionCheck(generation=root.generation, seq=root.seq, version_rows=rows, **counts)
    return check, tuple(_findings(place.name, root, check, found))


def _results(
    spark: SparkSession, place: EngineLocation, root: Compaction, items: list[IndexItem]
) -> list[ValuesResult]:
    index_bytes = sum(part.size for part in (*root.versions, *root.values))
    ordered = _by_position(rows_of_items(spark, place_batches, items, PLACE_SCHEMA), index_bytes)
    values = map_in_arrow(ordered, PlaceMerge(place.name, len(root.blob_files)), VALUE_SCHEMA)
    by_file = values.repartition(file_tasks(root), "file").sortWithinPartitions("file", "byte", "name")
    checked = map_in_arrow(by_file, ValueChecker(place, root.blob_files), TOLD_SCHEMA)
    return told_in(checked, ValuesResult, "checking a compaction")


def file_tasks(root: Compaction) -> int:
    """How many tasks share the files that values are in."""
    return _tasks(root.data_bytes + sum(file.size for file in root.blob_files), _FILES_BYTES)


def _by_position(rows: DataFrame, size: int) -> DataFrame:
    spread = rows.repartition(_tasks(size, _PART_BYTES), "position")
    return spread.sortWithinPartitions("position", "source", "name")


def _tasks(size: int, bytes_each: int) -> int:
    return min(_MAX_TASKS, max(2, -(-size // bytes_each)))


def _findings(name: str, root: Compaction, check: CompactionCheck, found: Iterable[ValuesResult]) -> Iterator[Finding]:
    damage = [finding for one in found for finding in one.damage]
    mismatches = [finding for one in found for finding in one.mismatches]
    findings = [finding for one in found for finding in one.findings]
    told = {str(one): one for one in [*damage, *(() if damage else mismatches), *findings]}
    yield from sorted(told.values(), key=str)
    said, is_found = (root.data_files, root.data_bytes), (check.data_files, check.data_bytes)
    if said != is_found and not damage and not findings:
        reason = f"it says {said[0]} data files of {said[1]} bytes, and its index {is_found[0]} of {is_found[1]}"
        yield about_engine(name).finding("index", f"the root of generation {root.generation}", reason)
