"""Where the entries of a replay come from: the log, or, where that no longer has its beginning, a state and the log.

Invariants
- Only what the manifest tells of: entries up to its high-water mark, none that was rolled back.
- The oldest listed state is the one to begin with: it leaves the most to the log, which has every entry as it was.
- A copy that stands before the beginning of history cannot be led on from a state: what was deleted since then and is
  forgotten by now would stay in it. That is refused.
- Entries are in order of seq, whichever of both they come from.
- Rows of Spark hold seqs as its numbers, which end at 2**63 - 1: an engine with larger ones is refused by name there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine.entry_columns import packed_ranges
from tidelog.engine.manifest import Manifest, StoredCheckpoint
from tidelog.engine.store_checkpoint import StoredState
from tidelog.errors import DataError, InputError
from tidelog.pipeline.arrow_map import map_in_arrow
from tidelog.pipeline.engine_jobs.log_rows import first_lsn_above, plan_log
from tidelog.pipeline.engine_jobs.replay_entries import entries_of
from tidelog.pipeline.engine_jobs.replay_state import (
    ENTRY_SCHEMA,
    VERSION_SCHEMA,
    ReadVersions,
    RebuildEntries,
    as_batches,
    bucket_histories,
    state_pieces,
)
from tidelog.pipeline.engine_jobs.restore_log import cut_log
from tidelog.pipeline.engines.entry_log import refuse_large_seqs
from tidelog.pipeline.engines.log_part import LogPart
from tidelog.pipeline.engines.place import OpenedEngine
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.work import run_on_workers

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_PART_BYTES = 8 << 20
_FIRST_LSN = 1


class Beginning(NamedTuple):
    """Where the entries begin: with the versions of a state, or with the log alone; and the first LSN of the log."""

    state: StoredCheckpoint | None
    lsn: int


class ReplaySource:
    """The entries of one engine, as its store has them now."""

    def __init__(self, spark: SparkSession, opened: OpenedEngine, place: EnginePlace, until_seq: int | None) -> None:
        self._spark = spark
        self._opened = opened
        self._place = place
        self.manifest: Manifest = opened.manifest
        self.until_seq = _checked_until(self.manifest, until_seq)

    def beginning(self, after_seq: int) -> Beginning:
        """From where on entries behind a seq are to be read."""
        manifest, start_lsn = self.manifest, max(_FIRST_LSN, self._opened.catalog.start_offset())
        known = [state for state in manifest.checkpoints if state.seq <= after_seq and state.lsn >= start_lsn]
        if known:
            return Beginning(None, known[-1].lsn)
        if start_lsn == _FIRST_LSN:
            return Beginning(None, _FIRST_LSN)
        if 0 < after_seq < manifest.history_start_seq:
            raise InputError(
                f"the copy stands at seq {after_seq}, and history begins at seq {manifest.history_start_seq} by now",
                operation="replay",
                hint="Begin with an empty directory, or an empty topic",
            )
        if not manifest.checkpoints:
            raise DataError(
                f"the log begins at LSN {start_lsn}, and there is no state to begin with",
                operation="replay",
                hint="`tidelog pipeline checkpoint --engine` writes one",
            )
        return Beginning(manifest.checkpoints[0], manifest.checkpoints[0].lsn)

    def state_entries(self, listed: StoredCheckpoint, after_seq: int) -> DataFrame:
        """The entries that lead to a state, in order, from one seq (exclusive) on: seq, time_us, value."""
        refuse_large_seqs(self.manifest)
        state = StoredState(self._opened.objects, listed)
        up_to = min(self.until_seq, listed.seq)
        pieces = state_pieces(self._opened.objects, self._place, state, after_seq, up_to)
        versions = self._rows(ReadVersions(pieces), len(pieces), VERSION_SCHEMA)
        tasks = max(1, len(pieces))
        in_order = versions.repartitionByRange(tasks, "seq").sortWithinPartitions("seq", "place")
        return map_in_arrow(in_order, RebuildEntries(bucket_histories(pieces)), ENTRY_SCHEMA)

    def log_entries(self, parts: Sequence[LogPart]) -> DataFrame:
        """The entries of parts of the log, in order: seq, time_us, value."""
        refuse_large_seqs(self.manifest)
        return self._rows(ReadEntries(parts), len(parts), ENTRY_SCHEMA)

    def _rows(self, function: ReadVersions | ReadEntries, tasks: int, schema: str) -> DataFrame:
        return map_in_arrow(self._spark.range(0, tasks, 1, max(1, tasks)), function, schema)

    def lsn_behind(self, first_lsn: int) -> int:
        """Where the first entry begins that is behind the last one that is wanted, in the log from an LSN on."""
        manifest = self.manifest
        end_lsn = manifest.high_water_lsn + 1
        if self.until_seq == manifest.high_water_mark:
            return end_lsn
        works = plan_log(
            *(self._opened.catalog, self._place, first_lsn, end_lsn),
            max_seq=self.until_seq,
            rolled_back=manifest.rolled_back,
        )
        found = run_on_workers(self._spark, first_lsn_above, works)
        return min((lsn for lsn in found if lsn is not None), default=end_lsn)

    def parts(self, first_lsn: int, after_seq: int = 0, stop_lsn: int | None = None) -> list[LogPart]:
        """The log from an LSN on, as parts for tasks; entries up to `after_seq` are left out.

        With a `stop_lsn` all entries that begin before it, whatever their seqs: it decides alone.
        """
        manifest = self.manifest
        end_lsn = manifest.high_water_lsn + 1
        stop = end_lsn if stop_lsn is None else min(stop_lsn, end_lsn)
        return [
            LogPart(
                place=self._place,
                start=start,
                stop=behind,
                end_lsn=end_lsn,
                first_seq=after_seq + 1,
                last_seq=self.until_seq if stop_lsn is None else manifest.high_water_mark,
                dead=packed_ranges([one for one in manifest.rolled_back if one.last >= start and one.first < behind]),
            )
            for start, behind in cut_log(self._opened.catalog.between(first_lsn, stop), first_lsn, stop, _PART_BYTES)
        ]


def _checked_until(manifest: Manifest, until_seq: int | None) -> int:
    if until_seq is None:
        return manifest.high_water_mark
    if not manifest.history_start_seq <= until_seq <= manifest.high_water_mark:
        raise InputError(
            f"seq {until_seq} cannot be reached: the store has seqs {manifest.history_start_seq} to "
            f"{manifest.high_water_mark}",
            operation="replay",
        )
    return until_seq


class ReadEntries:
    """Reads the parts of the log whose numbers a task gets."""

    def __init__(self, parts: Sequence[LogPart]) -> None:
        self._parts = parts

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from as_batches(entries_of(self._parts[number]), ENTRY_SCHEMA)
