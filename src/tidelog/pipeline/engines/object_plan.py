"""The driver's view of an engine's objects: with which state to begin, what the log behind it changed, and the parts.

    newest usable state or compaction -> rows of buckets -> the log behind it, once -> ranges of keys for tasks

Invariants
- Nothing is read behind the manifest's last entry, and nothing before the start of history is handed out: what was
  removed there cannot be told from what never was.
- The log behind the state is read once, by the driver, and what it changed travels with the parts. There is a limit to
  it (`maxTailBytes`), and an error that says how to make it shorter.
- A state whose footer is damaged is passed over for the one before it. Damage in its rows is told by the task that
  meets it.
"""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from tidelog.clock import SystemClock
from tidelog.engine.buckets import Buckets
from tidelog.engine.cell_blocks import Row, rows_in
from tidelog.engine.compacted import read_compaction
from tidelog.engine.manifest import Manifest, Pinning, StoredCheckpoint, StoredCompaction
from tidelog.engine.restore_replay import Replay
from tidelog.engine.retention import forgotten
from tidelog.engine.row_file import RowFile, RowPart
from tidelog.engine.store_checkpoint import BlockPlace, StoredState
from tidelog.engine.version_keys import OBJECTS, SEQ_BYTES, behind, objects_of
from tidelog.errors import DataError, InputError, NotFoundError, NotSupportedError, RetryError
from tidelog.pipeline.engines.entry_log import refuse_large_seqs
from tidelog.pipeline.engines.object_batches import BODY_COLUMNS
from tidelog.pipeline.engines.object_part import ObjectPart, RowBlocks
from tidelog.pipeline.engines.options import ObjectOptions
from tidelog.pipeline.engines.place import OpenedEngine
from tidelog.pipeline.engines.state_rows import merged_rows, packed_rows
from tidelog.pipeline.reading_ahead import reading_ahead

_logger = logging.getLogger("tidelog.pipeline")
_ROWS_PER_TASK = 200_000
_ROWS_WITH_BODIES_PER_TASK = 20_000
_TAIL_ROWS_PER_PIECE = 1000
_ROW_OVERHEAD_BYTES = 200


class Base(NamedTuple):
    """What the rows begin with: a state, or nothing (all from the log). `key` is that of a listed state."""

    lsn: int
    history_start_seq: int
    key: str | None = None
    state: RowBlocks | None = None
    files: tuple[RowPart, ...] = ()


class _Piece(NamedTuple):
    """Rows that begin with a key: about how many."""

    first_key: bytes
    rows: int


class TailRows:
    """What the log changed, in memory: the last value of each row."""

    def __init__(self, max_bytes: int) -> None:
        self._rows: dict[bytes, bytes] = {}
        self._bytes = 0
        self._max_bytes = max_bytes

    def set(self, key: bytes, value: bytes) -> None:
        """The row is this from here on; an empty value takes it away."""
        if key not in self._rows:
            self._bytes += len(key) + len(value) + _ROW_OVERHEAD_BYTES
            if self._bytes > self._max_bytes:
                raise NotSupportedError(
                    f"the log behind the newest state changes more than {self._max_bytes} bytes of rows, which the "
                    "driver must hold",
                    operation="read objects",
                    hint="`tidelog pipeline checkpoint --engine` writes a newer state; maxTailBytes allows for more",
                )
        self._rows[key] = value

    def sorted(self) -> list[Row]:
        """All of them, in order of key."""
        return sorted(self._rows.items())


class ObjectPlan:
    """One read of objects, planned on the manifest that is published now."""

    def __init__(self, options: ObjectOptions, engine: OpenedEngine) -> None:
        self._options = options
        self._engine = engine
        self._manifest = engine.manifest
        refuse_large_seqs(self._manifest)
        self._seq = self._checked_seq()
        self._known_files: dict[str, RowBlocks] = {}
        self._base = find_base(engine, self._manifest)
        self._pin()
        self._tail = self._read_tail()
        self._buckets = self._read_buckets()

    def parts(self) -> list[ObjectPart]:
        """The keys that are asked for, divided among tasks."""
        start, stop = self._range()
        cuts = [start, *self._cuts(start, stop), stop]
        created = {name: (one.seq, one.order) for name, one in self._buckets.alive(self._seq)}
        return [self._part(low, high, created) for low, high in pairwise(cuts) if low < high]

    def _checked_seq(self) -> int:
        seq, mark = self._options.seq, self._manifest.high_water_mark
        if seq is not None and seq > mark:
            raise InputError(
                f"the engine has shipped entries up to seq {mark}, and seq {seq} was asked for",
                operation="read objects",
                hint="Leave seq out for the newest state in the store",
            )
        return mark if seq is None else seq

    def _pin(self) -> None:
        """Keeps the state, and the log behind it, for as long as the options say."""
        seconds, key = self._options.pin_seconds, self._base.key
        if seconds is None or key is None:
            return
        name = f"spark-{secrets.token_hex(8)}"
        if not Pinning(self._engine.metadata, self._engine.keys, SystemClock(), name, seconds).pin(key):
            raise RetryError(
                f"the state {key} was replaced by a newer one while the read was planned",
                operation="read objects",
                hint="Run the query again",
            )

    def _read_tail(self) -> list[Row]:
        engine, rows = self._engine, TailRows(self._options.max_tail_bytes)
        executor = reading_ahead(self._options.root.store_url)
        replay = Replay(engine.catalog, engine.objects, executor, rows, self._base.lsn)
        replay.run(self._manifest, lambda size: None)
        known = (self._manifest.history_start_seq, self._base.history_start_seq, replay.history_start_seq)
        if self._seq < max(known):
            raise forgotten(max(known))
        return rows.sorted()

    # Buckets: few, and all tasks need them

    def _read_buckets(self) -> Buckets:
        buckets = Buckets()
        buckets.load(self)
        bucket = self._options.bucket
        if bucket is not None and not self._options.all_versions and buckets.created(bucket, self._seq) is None:
            raise NotFoundError(f"there is no bucket {bucket!r} at seq {self._seq}", operation="read objects")
        return buckets

    def scan(self, start: bytes, stop: bytes) -> Iterator[Row]:
        """Rows of a range, as the tree would have them."""
        tail = packed_rows(self._tail_in(start, stop))
        for raw, count in merged_rows(self._engine.objects, self._files_in(start, stop), tail):
            yield from (row for row in rows_in(raw, count, b"") if start <= row[0] < stop)

    def _files_in(self, start: bytes, stop: bytes) -> tuple[RowBlocks, ...]:
        """Blocks that may have rows of a range; the footers of row files are read when they are first needed."""
        state, found = self._base.state, list[RowBlocks]()
        if state is not None:
            found.append(state.between(start, stop))
        for part in self._base.files:
            if part.last_key >= start and part.first_key < stop:
                found.append(self._opened(part).between(start, stop))
        return tuple(one for one in found if one.blocks)

    def _opened(self, part: RowPart) -> RowBlocks:
        known = self._known_files.get(part.key)
        if known is None:
            footer = RowFile(self._engine.objects, part, kind="versions").footer
            blocks = (BlockPlace(one.byte, one.size, one.rows, one.first_key, one.last_key) for one in footer.blocks)
            known = self._known_files[part.key] = RowBlocks(part.key, True, tuple(blocks))
        return known

    # Ranges

    def _range(self) -> tuple[bytes, bytes]:
        bucket = self._options.bucket
        return (OBJECTS, behind(OBJECTS)) if bucket is None else objects_of(bucket, self._options.prefix)

    def _cuts(self, start: bytes, stop: bytes) -> list[bytes]:
        """Names at which one task ends and the next begins, so that all have about the same number of rows."""
        pieces = sorted(self._pieces(start, stop))
        total = sum(piece.rows for piece in pieces)
        most = _ROWS_WITH_BODIES_PER_TASK if BODY_COLUMNS.intersection(self._options.columns) else _ROWS_PER_TASK
        tasks = max(self._options.min_partitions or 1, round(total / most))
        cuts: list[bytes] = []
        seen = 0
        for piece in pieces:
            name = piece.first_key[:-SEQ_BYTES]
            if seen * tasks >= total * (len(cuts) + 1) and start < name < stop and (not cuts or cuts[-1] < name):
                cuts.append(name)
            seen += piece.rows
        return cuts

    def _pieces(self, start: bytes, stop: bytes) -> Iterator[_Piece]:
        for file in self._files_in(start, stop):
            for place in file.blocks:
                yield _Piece(place.first_key, place.count)
        tail = self._tail_in(start, stop)
        per_piece = min(_TAIL_ROWS_PER_PIECE, max(1, len(tail) // (4 * (self._options.min_partitions or 1))))
        for at in range(0, len(tail), per_piece):
            yield _Piece(tail[at][0], min(per_piece, len(tail) - at))

    def _tail_in(self, start: bytes, stop: bytes) -> Sequence[Row]:
        first, last = (bisect_left(self._tail, key, key=_key_of) for key in (start, stop))
        return self._tail[first:last]

    def _part(self, start: bytes, stop: bytes, created: dict[str, tuple[int, int]]) -> ObjectPart:
        return ObjectPart(
            place=self._options.root.place,
            seq=self._seq,
            start=start,
            stop=stop,
            all_versions=self._options.all_versions,
            created=created,
            files=self._files_in(start, stop),
            tail=packed_rows(self._tail_in(start, stop)),
        )


def find_base(engine: OpenedEngine, manifest: Manifest) -> Base:
    """The newest state or compaction that can be read; the beginning of the log where there is none."""
    # Of a state and a compaction with the same seq the state comes first: it is as good, and can be pinned.
    candidates = [((listed.seq, 1), partial(_of_state, engine, listed)) for listed in manifest.checkpoints]
    if (compacted := manifest.compacted) is not None:
        candidates.append(((compacted.seq, 0), partial(_of_compaction, engine, compacted)))
    for _, open_base in sorted(candidates, key=lambda one: one[0], reverse=True):
        try:
            return open_base()
        except (DataError, NotFoundError) as error:
            _logger.warning("%s: a state in the store cannot be used: %s", engine.objects.url, error)
    start_lsn = engine.catalog.start_offset()
    if start_lsn > 1:
        raise DataError(
            f"no state in the store can be read, and its log begins at LSN {start_lsn}",
            operation="read objects",
            hint="Read from a replica, or put a good copy of a state in its place",
        )
    return Base(1, 0)


def _of_compaction(engine: OpenedEngine, compacted: StoredCompaction) -> Base:
    root = read_compaction(engine.objects, engine.keys, compacted)
    return Base(root.lsn, root.history_start_seq, files=tuple(root.versions))


def _of_state(engine: OpenedEngine, listed: StoredCheckpoint) -> Base:
    state = StoredState(engine.objects, listed)
    footer = state.footer
    if state.parts():
        return Base(footer.lsn, footer.history_start_seq, state.key, files=state.parts())
    return Base(footer.lsn, footer.history_start_seq, state.key, RowBlocks(state.key, False, footer.blocks))


def _key_of(row: Row) -> bytes:
    return row[0]
