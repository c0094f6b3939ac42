"""The job `replay` of an engine into another engine: its log once more, as of a seq.

    workers decode the log -> the driver applies, in order, many entries with one sync

Invariants
- The copy goes on behind its own `applied_seq`, so a run that was killed is run again, and one that was made before is
  led on. What it has it keeps; nothing is taken back.
- Seqs are those of the original, refused entries included (`replay_entries.py`). The digest at the seq that was reached
  is that of the original there, which Spark computes from the store: that is the proof.
- What is replayed is at or below the original's high-water mark, and never rolled back: it is below the copy's
  low-water mark at once, so a copy with a store of its own ships it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tidelog.engine.applying import BATCH_BYTES
from tidelog.engine.engine import Engine
from tidelog.engine.engine_directory import remembered
from tidelog.engine.entry_codec import decode_entry
from tidelog.engine_wiring import open_engine
from tidelog.errors import DataError, InputError
from tidelog.files import LocalFiles
from tidelog.pipeline.engine_jobs.digest import digest_engine
from tidelog.pipeline.engine_jobs.replay_entries import Entries, EntriesWork, decode_entries
from tidelog.pipeline.engine_jobs.replay_source import Beginning, ReplaySource
from tidelog.pipeline.engines.log_part import LogPart
from tidelog.pipeline.engines.place import EngineRoot
from tidelog.pipeline.jobs.job import JobReport, OnProgress, Progress, ignore_progress
from tidelog.pipeline.jobs.proof import Proof, Side
from tidelog.pipeline.work import run_on_workers
from tidelog.tier.stores import canonical_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PARTS_AT_ONCE = 16
_ENTRIES_AT_ONCE = 1000
Pair = tuple[int, bytes]


class EngineReplayReport(JobReport, frozen=True, kw_only=True):
    """What a run has applied: entries from `first_seq` to `seq`. `state_seq` is that of a state it began with, or 0."""

    source: str
    target: str
    first_seq: int
    seq: int
    entries: int
    refused: int
    state_seq: int


def replay_engine(
    spark: SparkSession,
    root: EngineRoot,
    target: str | os.PathLike[str],
    *,
    until_seq: int | None = None,
    on_progress: OnProgress = ignore_progress,
    **settings: object,
) -> EngineReplayReport:
    """Applies the entries of an engine, up to a seq, to the engine in a directory, which is made when absent.

    `settings` are those of `tidelog.open_engine` for the copy. It must have no other entries than the original's.
    """
    began, directory = time.monotonic(), Path(os.path.abspath(os.path.expanduser(target)))
    _refuse_itself(root, directory, settings)
    with root.open() as opened, open_engine(directory, **settings) as engine:  # type: ignore[arg-type]
        source = ReplaySource(spark, opened, root.place, until_seq)
        first_seq = engine.applied_seq
        if first_seq > source.until_seq:
            raise InputError(
                f"the copy stands at seq {first_seq} already, behind seq {source.until_seq}", path=directory
            )
        beginning = source.beginning(first_seq)
        replay = _Replay(spark, source, engine, on_progress)
        replay.run(beginning)
        proof = _proof(spark, root, engine, source.until_seq, on_progress)
    return EngineReplayReport(
        job="replay",
        proofs=(proof,),
        notes=_notes(beginning),
        seconds=round(time.monotonic() - began, 3),
        source=root.location,
        target=str(directory),
        first_seq=first_seq + 1,
        seq=source.until_seq,
        entries=replay.entries,
        refused=replay.refused,
        state_seq=0 if beginning.state is None else beginning.state.seq,
    )


def _refuse_itself(root: EngineRoot, directory: Path, settings: dict[str, object]) -> None:
    known = remembered(LocalFiles(), directory)
    stores = [settings.get("store"), None if known is None else known.store]
    if root.directory == directory or any(canonical_url(str(one)) == root.store_url for one in stores if one):
        raise InputError("an engine cannot be replayed into itself", path=directory, hint="Name another directory")


def _notes(beginning: Beginning) -> tuple[str, ...]:
    if beginning.state is None:
        return ()
    return (
        f"the log no longer has its beginning: entries up to seq {beginning.state.seq} were made from the versions of "
        f"{beginning.state.key}",
    )


class _Replay:
    """Applies what comes."""

    def __init__(self, spark: SparkSession, source: ReplaySource, engine: Engine, on_progress: OnProgress) -> None:
        self.entries = self.refused = 0
        self._spark = spark
        self._source = source
        self._engine = engine
        self._on_progress = on_progress

    def run(self, beginning: Beginning) -> None:
        """The state first, if there is one to begin with, then the log behind it."""
        if beginning.state is not None and self._engine.applied_seq < beginning.state.seq:
            rows = self._source.state_entries(beginning.state, self._engine.applied_seq)
            self._apply((row.seq, bytes(row.value)) for row in rows.toLocalIterator(prefetchPartitions=True))
        parts = self._source.parts(beginning.lsn, self._engine.applied_seq)
        self._apply(self._logged(parts))
        self._engine.update_low_water_mark(self._engine.applied_seq)

    def _logged(self, parts: Sequence[LogPart]) -> Iterator[Pair]:
        """Entries of parts in order; while some are applied the next ones are decoded."""
        groups = [parts[at : at + _PARTS_AT_ONCE] for at in range(0, len(parts), _PARTS_AT_ONCE)]
        with ThreadPoolExecutor(1, "tidelog-replay") as pool:
            coming = [pool.submit(self._decoded, group) for group in groups[:1]]
            for number in range(len(groups)):
                found = coming.pop().result()
                coming = [pool.submit(self._decoded, group) for group in groups[number + 1 : number + 2]]
                for entries in found:
                    yield from entries.entries
                done = min(len(parts), (number + 1) * _PARTS_AT_ONCE)
                self._on_progress(Progress("replaying", done, len(parts)))

    def _decoded(self, parts: Sequence[LogPart]) -> list[Entries]:
        works = [EntriesWork(number=number, part=part) for number, part in enumerate(parts)]
        return sorted(run_on_workers(self._spark, decode_entries, works), key=lambda one: one.number)

    def _apply(self, pairs: Iterator[Pair]) -> None:
        gathered: list[Pair] = []
        size = 0
        for pair in pairs:
            gathered.append(pair)
            size += len(pair[1])
            if len(gathered) >= _ENTRIES_AT_ONCE or size >= BATCH_BYTES:
                self._apply_some(gathered)
                gathered, size = [], 0
        self._apply_some(gathered)

    def _apply_some(self, pairs: Sequence[Pair]) -> None:
        if not pairs:
            return
        if pairs[0][0] <= self._engine.applied_seq:
            raise DataError(
                f"seq {pairs[0][0]} comes behind seq {self._engine.applied_seq}: what was rolled back is not known",
                operation="replay",
            )
        results = self._engine.apply_many([(seq, decode_entry(value)) for seq, value in pairs])
        self.entries += len(results)
        self.refused += sum(result.status == "refused" for result in results)


def _proof(spark: SparkSession, root: EngineRoot, engine: Engine, seq: int, on_progress: OnProgress) -> Proof:
    """The digest of the original at the seq, and that of the copy."""
    wanted = digest_engine(spark, root, seq, on_progress=on_progress)
    found = engine.digest(min(seq, engine.applied_seq))
    sides = [
        Side(messages=seq, first_offset=None, last_offset=None, checksum=f"digest:{one}", unit="seq")
        for one in (wanted.digest, found)
    ]
    return Proof(subject=f"{root.name} at seq {seq}", went_in=sides[0], came_out=sides[1])
