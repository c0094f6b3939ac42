"""Row files, written by workers and read back by them: those of the version index, the body index, and states.

Invariants
- A file is named by its bytes, and the same rows give the same bytes: written twice, it is the same file.
- What was written is read back and compared, before anybody hears of it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import msgspec

from tidelog.engine.cell_blocks import Row
from tidelog.engine.place import cell_of, encode_version
from tidelog.engine.row_file import RowFile, RowKind, RowPart, encode_row_file
from tidelog.engine.version_keys import SEQ_BYTES
from tidelog.errors import CorruptionError
from tidelog.pipeline.engine_jobs.index_rows import TOLD_SCHEMA, Created, as_told, in_batches, rows_of, told_by
from tidelog.pipeline.engine_jobs.index_survey import Seen, Survey, Surveyor, summed
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.compacted_names import DIGEST_BYTES, CompactedId, StatePartId
from tidelog.tier.keys import EngineKeys
from tidelog.tier.object_store import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

    from tidelog.pipeline.engine_jobs.compact_flow import Flow, Rows

FILED_SCHEMA = "kind int, file int, key binary, value binary"
VERSION_ROW, BODY_ROW, TOLD_ROW = 0, 1, 2
_RANGE_BYTES = 8 << 20


def as_filed(rows: Iterable[Row], cuts: Sequence[bytes], kind: int = VERSION_ROW) -> Iterator[pa.RecordBatch]:
    """Rows of a row file with the number of the file that they belong to, as batches of `FILED_SCHEMA`."""
    import pyarrow as pa

    for some in in_batches(rows):
        columns = [
            pa.array([kind] * len(some), pa.int32()),
            pa.array([bisect_right(cuts, row[0]) for row in some], pa.int32()),
            pa.array([row[0] for row in some], pa.binary()),
            pa.array([row[1] for row in some], pa.binary()),
        ]
        yield pa.RecordBatch.from_arrays(columns, names=["kind", "file", "key", "value"])


class Unplaced:
    """Rows of a tree as those of row files, without places: what a state consists of."""

    def __init__(self, cuts: Sequence[bytes]) -> None:
        self._cuts = cuts

    def of(self, rows: Rows) -> Rows:
        """The rows, with the numbers of their files."""
        return rows.mapped(self, FILED_SCHEMA)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_filed(((key, encode_version(cell, None)) for key, cell in rows_of(batches)), self._cuts)


class FileNames(msgspec.Struct, frozen=True, kw_only=True):
    """How files are called: those of a generation of a compaction, or those of a state."""

    kind: Literal["versions", "bodies", "state"]
    generation: int = 0
    seq: int = 0
    lsn: int = 0

    @property
    def row_kind(self) -> RowKind:
        """What the rows are."""
        return "bodies" if self.kind == "bodies" else "versions"

    @property
    def row_number(self) -> int:
        """The kind of the rows on their way."""
        return BODY_ROW if self.kind == "bodies" else VERSION_ROW

    def key(self, keys: EngineKeys, digest: str) -> str:
        """The key of the file with these bytes."""
        if self.kind == "state":
            return keys.state_part(StatePartId(self.seq, self.lsn, digest))
        return keys.compacted(CompactedId(self.kind, self.generation, digest))


class FileWriter:
    """Writes the rows of a task, which has them file by file in order of key."""

    def __init__(self, place: EnginePlace, names: FileNames) -> None:
        self._place = place
        self._names = names

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told(self._parts(batches))

    def _parts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[RowPart]:
        rows = (
            row
            for batch in batches
            for row in zip(*(batch.column(name).to_pylist() for name in ("file", "key", "value")), strict=True)
        )
        for _, of_file in groupby(rows, key=lambda row: row[0]):
            yield self.written((key, value) for _, key, value in of_file)

    def written(self, rows: Iterable[Row]) -> RowPart:
        """One file."""
        opened, encoded = self._place.opened(), encode_row_file(self._names.row_kind, rows)
        key = self._names.key(opened.keys, encoded.digest)
        write_checked(opened.objects, key, encoded.data, encoded.digest)
        return encoded.part(key)


def write_checked(objects: ObjectStore, key: str, data: bytes, digest: str) -> None:
    """Writes a file, reads it back, and compares."""
    with objects.open_writer(key) as writer:
        for start in range(0, len(data), _RANGE_BYTES):
            writer.write(memoryview(data)[start : start + _RANGE_BYTES])
    found, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    for start in range(0, len(data) + 1, _RANGE_BYTES):
        part = objects.read_range(key, start, _RANGE_BYTES)
        found.update(part)
        size += len(part)
    if size != len(data) or found.hexdigest() != digest:
        raise CorruptionError(
            "what was written is not what is there", path=key, byte=0, operation="write", hint="Run the job again"
        )


def write_files(filed: Rows, files: int, place: EnginePlace, names: FileNames) -> list[RowPart]:
    """All files, a task for each; in order of key."""
    grouped = filed.where("kind", names.row_number).grouped("file", files, ["file", "key"])
    parts = told_by(grouped.mapped(FileWriter(place, names), TOLD_SCHEMA), RowPart)
    return sorted(parts, key=lambda part: part.first_key)


# Reading them back, for the proof


class ReadBackWork(msgspec.Struct, frozen=True, kw_only=True):
    """A file of versions, and the last key of the one before it."""

    place: EnginePlace
    part: RowPart
    before: bytes


class _ReadBack:
    def __init__(self, created: Created, seq: int) -> None:
        self._surveyor = Surveyor(created, seq, every=0)

    def __call__(self, work: ReadBackWork) -> Iterator[pa.RecordBatch]:
        rows = RowFile(work.place.opened().objects, work.part, kind="versions").rows()
        settled = work.before[:-SEQ_BYTES]
        return as_told([self._surveyor.seen(((key, cell_of(value)) for key, value in rows), settled)])


def read_back(flow: Flow, place: EnginePlace, parts: Sequence[RowPart], created: Created, seq: int) -> Survey:
    """The same survey as of the rows that were to be written, from what was."""
    befores = [b"", *(part.last_key for part in parts)]
    works = [ReadBackWork(place=place, part=part, before=before) for part, before in zip(parts, befores, strict=False)]
    seen = told_by(flow.source(_ReadBack(created, seq), works, TOLD_SCHEMA), Seen) if works else []
    return summed(seen, created)


def require_equal(went_in: Survey, came_out: Survey, seq: int) -> None:
    """CorruptionError when what was written is not what was read: then nothing is published."""
    if (went_in.rows, went_in.things, went_in.digest) != (came_out.rows, came_out.things, came_out.digest):
        raise CorruptionError(
            f"the rows that were written for seq {seq} are not those that were read: {came_out.rows} rows with the "
            f"digest {came_out.digest}, and there were {went_in.rows} with {went_in.digest}",
            path="index",
            byte=0,
            hint="Nothing was published; run it again",
        )
