"""What a task makes of sorted rows of several sources: the digest of the state, and where two states differ.

    rows of `digest_rows`, with the number of a part, in order of (part, key, source, lsn, step)  ->  `PartResult`

All rows of a name are in one part; rows of buckets are in every part, and counted in part 0 alone. They come before
those of objects, so which bucket is there is known when an object is looked at.

Invariants
- What a state is made of is decided as the engine decides it: the newest version that is not after the seq, unless it
  is a deletion or from before the creation of its bucket (`engine/versions.py`).
- Expected is what BASE and LOG leave of a key, the last change first; it is compared with ACTUAL byte by byte.
- A row that one side alone has is no difference where retention may remove it: its horizon is the latest start of
  history that anybody knows of, and `engine/vacuum_rules.py` says what goes. A state may be written, and a node may be
  lost, while retention is at work.
- One name's versions are in memory, and all versions of buckets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tidelog.engine.buckets import BucketVersion
from tidelog.engine.cell import decode_bucket, decode_cell
from tidelog.engine.digest import Digest
from tidelog.engine.vacuum_rules import Rule, judged
from tidelog.engine.version_keys import BUCKETS, OBJECTS, SEQ_BYTES, seq_of
from tidelog.errors import DataError
from tidelog.pipeline.engine_jobs.digest_rows import ACTUAL, BASE, DAMAGE, START, Unreadable

if TYPE_CHECKING:
    import pyarrow as pa

RESULT_SCHEMA: Final = "result binary"
_NAMED = 5
_DIGEST_BYTES = 32

Row = tuple[bytes, bytes]


class Difference(msgspec.Struct, frozen=True, order=True):
    """A key of the tree, and what is wrong there: "missing", "extra" or "different"."""

    key: bytes
    kind: str


class Sum(msgspec.Struct, frozen=True):
    """A part of the digest of a state, and how many rows it was made of."""

    total: bytes = bytes(_DIGEST_BYTES)
    things: int = 0
    rows: int = 0

    def digest(self) -> Digest:
        """The part as it is added up."""
        return Digest(int.from_bytes(self.total, "little"), self.things)


class PartResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a task found. `differences` are the first ones, `counts` has all of them by kind."""

    expected: Sum = Sum()
    actual: Sum = Sum()
    counts: dict[str, int] = {}
    differences: tuple[Difference, ...] = ()
    damage: tuple[Unreadable, ...] = ()


class Merge:
    """The function of a task. `compares` is False where there is no ACTUAL."""

    def __init__(self, seq: int, horizon_seq: int, *, compares: bool) -> None:
        self._seq = seq
        self._horizon_seq = horizon_seq
        self._compares = compares

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        found = [self._encoded(part) for part in parts_in(batches)]
        if found:
            yield pa.record_batch([pa.array(found, pa.binary())], names=["result"])

    def _encoded(self, part: Part) -> bytes:
        merged = _PartMerge(self._seq, self._horizon_seq, part.number == 0, self._compares)
        return msgspec.msgpack.encode(merged.result(part.rows))


class InRow(NamedTuple):
    """A row as it comes out of the shuffle."""

    source: int
    key: bytes
    lsn: int
    cell: bytes | None


class Part(NamedTuple):
    """All rows of a part, in order."""

    number: int
    rows: Iterable[InRow]


def parts_in(batches: Iterator[pa.RecordBatch]) -> Iterator[Part]:
    """The rows of a partition, part after part. Each is taken to its end before the next one is asked for."""
    for number, rows in groupby(_rows(batches), key=lambda row: row[0]):
        yield Part(number, (row[1] for row in rows))


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, InRow]]:
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in ("part", "source", "key", "lsn", "cell")]
        for part, source, key, lsn, cell in zip(*columns, strict=True):
            yield part, InRow(source, key, lsn, cell)


class _PartMerge:
    """One part: keys one after the other, names one after the other."""

    def __init__(self, seq: int, horizon_seq: int, counts_buckets: bool, compares: bool) -> None:
        self._horizon_seq = horizon_seq
        self._compares = compares
        self._expected = StateSum(seq, counts_buckets=counts_buckets)
        self._actual = StateSum(seq, counts_buckets=counts_buckets)
        self._counts_buckets = counts_buckets
        self._alive: dict[bytes, BucketVersion] = {}
        self._counts: dict[str, int] = {}
        self._differences: list[Difference] = []
        self._damage: list[Unreadable] = []
        self._name = b""
        self._union: list[Row] = []
        self._suspects: list[Difference] = []

    def result(self, rows: Iterable[InRow]) -> PartResult:
        for key, group in groupby(rows, key=lambda row: row.key):
            if key:
                self._take_key(key, group)
            else:
                self._take_notes(group)
        self._end_name()
        return PartResult(
            expected=self._expected.sum(),
            actual=self._actual.sum(),
            counts=self._counts,
            differences=tuple(self._differences),
            damage=tuple(self._damage),
        )

    def _take_notes(self, rows: Iterable[InRow]) -> None:
        for row in rows:
            if row.source == START:
                self._horizon_seq = max(self._horizon_seq, row.lsn)
            elif row.source == DAMAGE and row.cell is not None:
                self._damage.append(msgspec.msgpack.decode(row.cell, type=Unreadable))

    def _take_key(self, key: bytes, rows: Iterable[InRow]) -> None:
        expected: bytes | None = None
        actual: bytes | None = None
        for row in rows:
            if row.source == ACTUAL:
                actual = row.cell
            else:
                expected = row.cell
        if key[:-SEQ_BYTES] != self._name:
            self._end_name()
            self._name = key[:-SEQ_BYTES]
        self._note(self._expected, key, expected, BASE)
        if self._compares:
            self._note(self._actual, key, actual, ACTUAL)
            self._compare(key, expected, actual)

    def _note(self, side: StateSum, key: bytes, cell: bytes | None, source: int) -> None:
        if cell is None:
            return
        try:
            side.add(key, cell)
        except DataError as error:
            self._damage.append(Unreadable(f"row {key.hex()}", error.message, source))

    def _compare(self, key: bytes, expected: bytes | None, actual: bytes | None) -> None:
        known = expected or actual
        if known is not None:
            self._union.append((key, known))
        if expected != actual:
            kind = "missing" if actual is None else "extra" if expected is None else "different"
            self._suspects.append(Difference(key, kind))

    def _end_name(self) -> None:
        """All versions of a name are known: what differs is wrong unless retention may have removed it."""
        if self._name[:1] == BUCKETS:
            self._note_alive()
        if self._suspects and (self._counts_buckets or self._name[:1] != BUCKETS):
            rule = Rule(self._horizon_seq, 1, self._alive)
            doomed = {key for verdict in judged(self._union, rule, _nothing) for key in verdict.doomed()}
            for suspect in self._suspects:
                if suspect.kind == "different" or suspect.key not in doomed:
                    self._add(suspect)
        self._union, self._suspects = [], []

    def _note_alive(self) -> None:
        """Whether the bucket is there at the horizon, as either side knows it: the newest row that is not after it."""
        newest = next((row for row in self._union if seq_of(row[0]) <= self._horizon_seq), None)
        with contextlib.suppress(DataError):  # it is told as damage already
            if newest is not None and not (version := decode_bucket(newest[1])).is_deleted:
                self._alive[self._name[1:-1]] = BucketVersion(seq_of(newest[0]), version.order, False)

    def _add(self, difference: Difference) -> None:
        self._counts[difference.kind] = self._counts.get(difference.kind, 0) + 1
        if len(self._differences) < _NAMED:
            self._differences.append(difference)


def _nothing(cell: bytes) -> None:
    """Cells that stay are of no interest here."""


class StateSum:
    """The digest of the state at a seq, from all rows in order of key. Rows of buckets are needed, counted or not."""

    def __init__(self, seq: int, *, counts_buckets: bool) -> None:
        self._seq = seq
        self._counts_buckets = counts_buckets
        self._digest = Digest()
        self._rows = 0
        self._created: dict[bytes, BucketVersion] = {}
        self._settled = b""

    def add(self, key: bytes, cell: bytes) -> None:
        """The next row."""
        prefix, seq = key[:-SEQ_BYTES], seq_of(key)
        is_bucket = prefix[:1] == BUCKETS
        self._rows += not is_bucket or self._counts_buckets
        if seq > self._seq or prefix == self._settled:
            return
        self._settled = prefix
        if is_bucket:
            self._add_bucket(prefix[1:-1], seq, cell)
        elif prefix[:1] == OBJECTS:
            self._add_object(prefix, seq, cell)
        else:
            raise DataError("a key of the tree that is neither of a bucket nor of an object")

    def _add_bucket(self, name: bytes, seq: int, cell: bytes) -> None:
        version = decode_bucket(cell)
        if not version.is_deleted:
            self._created[name] = BucketVersion(seq, version.order, False)
            if self._counts_buckets:
                self._digest.add_bucket(name, seq)

    def _add_object(self, prefix: bytes, seq: int, cell: bytes) -> None:
        bucket, _, name = prefix[1:-1].partition(b"\0")
        created, version = self._created.get(bucket), decode_cell(cell)
        if created is None or version.is_tombstone or (seq, version.order) < (created.seq, created.order):
            return
        self._digest.add_object(bucket, name, seq, version.size, version.crc)

    def sum(self) -> Sum:
        """What was added up."""
        return Sum(self._digest.total.to_bytes(_DIGEST_BYTES, "little"), self._digest.count, self._rows)
