"""What a job must know of rows before it writes them: how many there are, where to cut them into files, and the digest
of what is to be seen of them.

Invariants
- Cuts depend on the rows alone. Of their keys a share is chosen by a checksum, the same of the same rows, and every so
  many of those begins a file: files have about as many rows as they should, and nobody sorts all of them to know.
- The digest is the engine's own (`engine/digest.py`), as a sum of what the tasks have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.cell import decode_cell
from tidelog.engine.cell_blocks import Row
from tidelog.engine.digest import Digest
from tidelog.engine.version_keys import OBJECTS, SEQ_BYTES, seq_of
from tidelog.log.frame import crc32
from tidelog.pipeline.engine_jobs.index_rows import TOLD_SCHEMA, Created, as_told, rows_of, told_by
from tidelog.pipeline.jobs.proof import Proof, Side

if TYPE_CHECKING:
    import pyarrow as pa

    from tidelog.pipeline.engine_jobs.compact_flow import Rows

ROWS_PER_FILE = 250_000
_SAMPLES_PER_FILE = 64
_DIGEST_BYTES = 32


class LiveDigest:
    """The digest of the objects that are to be seen at a seq, from rows in order of key.

    `settled` is the name whose version to be seen came before the first of these rows.
    """

    def __init__(self, created: Created, seq: int, settled: bytes = b"") -> None:
        self.digest = Digest()
        self._created = created
        self._seq = seq
        self._settled = settled

    def add(self, key: bytes, cell: bytes) -> None:
        """The next row."""
        name, seq = key[:-SEQ_BYTES], seq_of(key)
        if name == self._settled or seq > self._seq:
            return
        self._settled = name
        if name.startswith(OBJECTS):
            self._add_newest(name, seq, cell)

    def _add_newest(self, name: bytes, seq: int, cell: bytes) -> None:
        bucket, _, key = name[1:-1].partition(b"\0")
        created, version = self._created.get(bucket), decode_cell(cell)
        if created is None or version.is_tombstone or (seq, version.order) < (created.seq, created.order):
            return
        self.digest.add_object(bucket, key, seq, version.size, version.crc)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one task saw: rows, and the digest of its part of the objects that are to be seen."""

    rows: int
    count: int
    total: bytes
    samples: tuple[bytes, ...] = ()


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What all of them saw: rows, and the objects and buckets that are to be seen.

    `cuts` are the first keys of all files but the first.
    """

    rows: int
    things: int
    digest: str
    cuts: tuple[bytes, ...] = ()


class Surveyor:
    """Looks at the rows of a task, which has all versions of a name."""

    def __init__(self, created: Created, seq: int, every: int) -> None:
        self._created = created
        self._seq = seq
        self._every = every

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return as_told([self.seen(rows_of(batches))])

    def seen(self, rows: Iterable[Row], settled: bytes = b"") -> Seen:
        """What these rows are, in order of key."""
        live, count, samples = LiveDigest(self._created, self._seq, settled), 0, list[bytes]()
        for key, cell in rows:
            live.add(key, cell)
            count += 1
            if self._every and not crc32(key) % self._every:
                samples.append(key)
        total = live.digest.total.to_bytes(_DIGEST_BYTES, "little")
        return Seen(rows=count, count=live.digest.count, total=total, samples=tuple(samples))


def survey(rows: Rows, created: Created, seq: int, rows_per_file: int = ROWS_PER_FILE) -> Survey:
    """Everything about rows at once."""
    every = max(1, rows_per_file // _SAMPLES_PER_FILE)
    seen = told_by(rows.mapped(Surveyor(created, seq, every), TOLD_SCHEMA), Seen)
    samples = sorted(key for one in seen for key in one.samples)
    step = max(1, rows_per_file // every)
    return summed(seen, created, cuts=tuple(samples[step::step]))


def look(rows: Rows, created: Created, seq: int) -> Survey:
    """The same without cuts: for rows that are not going to be written as they are."""
    return summed(told_by(rows.mapped(Surveyor(created, seq, every=0), TOLD_SCHEMA), Seen), created)


def summed(seen: Iterable[Seen], created: Created, cuts: tuple[bytes, ...] = ()) -> Survey:
    """What tasks saw, all of them together."""
    digest, rows = Digest(), 0
    for one in seen:
        digest.add(Digest(int.from_bytes(one.total, "little"), one.count))
        rows += one.rows
    for bucket, version in created.items():
        digest.add_bucket(bucket, version.seq)
    return Survey(rows=rows, things=digest.count, digest=digest.text(), cuts=cuts)


def state_proof(engine: str, seq: int, went_in: Survey, came_out: Survey) -> Proof:
    """What was to be seen in the rows that were read, and in those that were written."""
    return Proof(subject=f"engine {engine} at seq {seq}", went_in=_side(went_in), came_out=_side(came_out))


def _side(found: Survey) -> Side:
    return Side(
        messages=found.things, first_offset=None, last_offset=None, checksum=f"digest:{found.digest}", unit="things"
    )
