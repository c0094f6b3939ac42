"""The job `restore`: restores a lost engine from its store into a new directory, in parallel on many workers.

    newest good snapshot, piece by piece -> the log after it, piece by piece -> claim -> what was shipped meanwhile
    -> leaves of key ranges -> their numbers -> pages.db -> engine.ckpt, engine.json

It is the restore of `engine/recovery/restore.py`, in the same order: that module decides what is read, what is claimed
when, and what a crash leaves. Workers do the long steps (`restore.py`).

Invariants
- Driver and workers see one directory: on this machine always, on a cluster it must be a shared one. A worker that does
  not find the driver's file in it reports that.
- The directory can be opened as an engine once the job has ended, and not before. A job killed at any point is rerun
  with the same arguments, and starts over.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tidelog.clock import Clock, SystemClock
from tidelog.cold.catalog import Catalog
from tidelog.engine.btree.bulk_load import FIRST_LEAF, Child, empty_root, inner_pages
from tidelog.engine.btree.page import ROOT, divider_of
from tidelog.engine.btree.page_file import PageFile
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.core import PAGES
from tidelog.engine.directory import EngineDirectory, remember
from tidelog.engine.mvcc.applier import results_behind
from tidelog.engine.mvcc.cells import MAX_SEQ
from tidelog.engine.recovery.restore import CHANGES_BYTES, RESTORING, Restore, RestoreProgress, RestoreReport
from tidelog.engine.recovery.sorted_runs import Changes, Run
from tidelog.engine.sst.snapshot import StoredState
from tidelog.engine.sst.sstable import BlockHandle, SSTable
from tidelog.engine.wal.replay import OnBytes, Replay
from tidelog.errors import AccessDeniedError, ConfigError, DataError, HeldError, NotFoundError, RetryError
from tidelog.files import LocalFiles
from tidelog.pipeline.address import EngineRoot
from tidelog.pipeline.jobs.engine.restore_tasks import (
    Leaves,
    LogPiece,
    PlaceWork,
    RangeWork,
    RunWriter,
    StatePiece,
    Workshop,
    fill_leaves,
    keep_state,
    place_leaves,
    read_log,
)
from tidelog.pipeline.jobs.job import (
    JobReport,
    OnProgress,
    Progress,
    Reconciliation,
    Totals,
    counted_progress,
    ignore_progress,
    logged,
)
from tidelog.pipeline.location import EngineLocation
from tidelog.pipeline.source.entry_batches import objects_of, plan_log
from tidelog.pipeline.work import run_on_workers
from tidelog.store.scheduler import in_parallel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# A restore whose long steps run on Spark's workers: fetching a snapshot, reading the log, filling pages.
#
# Invariants
# - Everything from the store is fetched and checked before the engine is claimed; after the claim, the driver reads
#   only what was shipped meanwhile.
# - The cuts between key ranges depend on the rows alone: any number of workers builds the same tree.
# - Leaves are numbered in the order of their keys, whichever worker filled them.


Item = TypeVar("Item")
Result = TypeVar("Result")

_PIECE_BYTES = 32 << 20
_STATE_PIECE_BYTES = 8 << 20
_RANGE_ROWS = 250_000
_DONE_BY_DRIVER = 1
# Until three steps of tasks are started, a driver has done as much: it fetches, decompresses and writes in two threads.
_ALONE_BYTES = 48 << 20
_ALONE_THREADS = 2
# What the driver reads after the claim comes after all pieces.
_BEHIND_ALL = 1 << 30
_MODULUS = 1 << 64


class SparkSteps:
    """The long steps of a restore, done by workers of a Spark session; where there is little to read, by the driver."""

    filled = 0, 0
    """Rows that went into pages, and their sum."""
    placed = 0, 0
    """Rows that were read back from the page file, and their sum."""
    next_page = FIRST_LEAF

    def __init__(
        self,
        spark: SparkSession,
        place: EngineLocation,
        catalog: Catalog,
        directory: Path,
        remembered: EngineDirectory,
        on_progress: OnProgress,
    ) -> None:
        """`remembered` is what the directory says about itself in the end."""
        self._spark = spark
        self._place = place
        self._catalog = catalog
        self._directory = directory
        self._files = LocalFiles()
        self._remembered = remembered
        self._on_step = on_progress
        self._workshop = Workshop(folder=str(directory / RESTORING), probe=f"probe-{secrets.token_hex(8)}")
        self._late_runs = RunWriter(self._workshop, _BEHIND_ALL)
        self._read_bytes = 0
        """What the state and the log have in the store."""
        self._state_runs: list[Run] = []
        self._log_runs: list[Run] = []

    def on_progress(self, progress: RestoreProgress) -> None:
        """Steps of workers tell for themselves how far they are."""
        if progress.phase == "claim":
            self._on_step(Progress("claiming the engine", progress.done, progress.total))

    def _done(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """By workers; a single item, or little data, is done here, sooner than tasks are started."""
        if len(items) <= _DONE_BY_DRIVER:
            return map(function, items)
        if self._read_bytes <= _ALONE_BYTES:
            return iter(in_parallel(function, items, _ALONE_THREADS, "tidelog-restore"))
        return run_on_workers(self._spark, function, items)

    def changes(self) -> Changes:
        """What the driver reads after the claim."""
        return Changes(self._late_runs, CHANGES_BYTES)

    def prepare(self) -> None:
        """The file by which workers recognise the directory."""
        self._files.create(self._directory / RESTORING / self._workshop.probe).close()

    # The state

    def keep(self, state: StoredState, fetchers: Executor, on_bytes: OnBytes) -> None:
        """Workers fetch pieces of its files."""
        pieces = [
            StatePiece(place=self._place, workshop=self._workshop, number=number, key=key, blocks=tuple(blocks))
            for number, (key, blocks) in enumerate(self._state_pieces(state))
        ]
        self._read_bytes = state.stored_bytes
        results = self._done(keep_state, pieces)
        self._state_runs = list(counted_progress(results, "fetching the state", len(pieces), self._on_step))

    def _state_pieces(self, state: StoredState) -> Iterator[tuple[str, Sequence[BlockHandle]]]:
        for part in state.parts():
            for group in SSTable(self._place.opened().objects, part, kind="versions").block_groups(_STATE_PIECE_BYTES):
                yield part.key, group

    # The log

    def replay_ahead(self, replay: Replay, manifest: Manifest) -> None:
        """Workers replay all that is shipped; after the claim, the driver replays what came since."""
        stop_lsn = manifest.high_water_lsn + 1
        parts = plan_log(self._catalog, self._place, manifest, replay.lsn, part_bytes=_PIECE_BYTES)
        pieces = [LogPiece(part=part, workshop=self._workshop, number=number) for number, part in enumerate(parts)]
        self._read_bytes += sum(one.raw_size for one in objects_of(parts))
        results = self._done(read_log, pieces)
        done = sorted(
            counted_progress(results, "reading the log", len(pieces), self._on_step), key=lambda one: one.number
        )
        replay.entries = sum(one.entries for one in done)
        replay.history_start_seq = max((one.history_start_seq for one in done), default=0)
        assert replay.results is not None
        opened = self._place.opened()
        replay.results = results_behind(
            self._catalog,
            opened.objects,
            opened.fetchers,
            manifest.rolled_back,
            replay.results.known_up_to(MAX_SEQ),
            replay.lsn,
            stop_lsn,
        )
        replay.lsn = max(replay.lsn, stop_lsn)
        self._log_runs = [run for one in done for run in one.runs]

    # The index

    def build(self, lsn: int) -> tuple[int, int]:
        """Workers fill leaves of key ranges, and write them."""
        runs = (*self._state_runs, *self._log_runs, *self._late_runs.runs)
        works = [
            RangeWork(
                workshop=self._workshop,
                number=number,
                start=start,
                stop=stop,
                runs=tuple(part for run in runs if (part := run.between(start, stop)).blocks),
                lsn=lsn,
            )
            for number, (start, stop) in enumerate(key_ranges(runs, _RANGE_ROWS))
        ]
        results = self._done(fill_leaves, works)
        filled = sorted(
            counted_progress(results, "filling pages", len(works), self._on_step), key=lambda one: one.number
        )
        leaves = [one for one in filled if one.pages]
        self.filled = sum(one.rows for one in leaves), sum(one.checksum for one in leaves) % _MODULUS
        self._write_pages(leaves, lsn)
        return self.filled[0], self.next_page

    def _write_pages(self, leaves: Sequence[Leaves], lsn: int) -> None:
        path = self._directory / PAGES
        page_file = PageFile.create(self._files, path, made_lsn=lsn)
        try:
            works = list(_places(leaves, str(path), lsn))
            results = self._done(place_leaves, works)
            done = list(counted_progress(results, "writing pages", len(works), self._on_step))
            self.placed = sum(one.rows for one in done), sum(one.checksum for one in done) % _MODULUS
            if self.placed != self.filled:
                raise DataError("the page file does not have the rows that were written to it", path=path)
            above, self.next_page = _above(leaves, lsn)
            for page_id, page in above:
                page_file.write_page(page_id, page)
            page_file.sync()
        finally:
            page_file.close()

    def finish(self) -> None:
        """The directory knows its engine."""
        remember(self._files, self._directory, self._remembered)


def key_ranges(runs: Sequence[Run], rows: int) -> list[tuple[bytes, bytes | None]]:
    """All keys, cut into ranges of about so many rows, where blocks begin."""
    cuts, gathered = [b""], 0
    for first_key, count in sorted((block.first_key, block.rows) for run in runs for block in run.blocks):
        if gathered >= rows and first_key > cuts[-1]:
            cuts.append(first_key)
            gathered = 0
        gathered += count
    return [*pairwise(cuts), (cuts[-1], None)] if gathered else []


def _places(leaves: Sequence[Leaves], path: str, lsn: int) -> Iterator[PlaceWork]:
    """Consecutive numbers for all leaves; a lone one is the root itself."""
    if sum(one.pages for one in leaves) == 1:
        yield PlaceWork(leaves=leaves[0], pages_path=path, first_page=ROOT, right=0, lsn=lsn)
        return
    first_page = FIRST_LEAF
    for index, one in enumerate(leaves, 1):
        behind = first_page + one.pages
        right = behind if index < len(leaves) else 0
        yield PlaceWork(leaves=one, pages_path=path, first_page=first_page, right=right, lsn=lsn)
        first_page = behind


def _above(leaves: Sequence[Leaves], lsn: int) -> tuple[list[tuple[int, bytes]], int]:
    """The pages above the leaves, and the first number that is free."""
    if not leaves:
        return [(ROOT, empty_root(lsn))], FIRST_LEAF
    children = [Child(key, page_id) for page_id, key in enumerate(_least_keys(leaves), FIRST_LEAF)]
    return inner_pages(children, lsn) if len(children) > 1 else ([], FIRST_LEAF)


def _least_keys(leaves: Sequence[Leaves]) -> Iterator[bytes]:
    last_key = b""
    for one in leaves:
        yield divider_of(last_key, one.first_key)
        yield from one.dividers
        last_key = one.last_key


# A bucket that is gone and a key that no longer counts are mistakes of the settings as long as there is no replica.
_UNUSABLE = (AccessDeniedError, ConfigError, DataError, NotFoundError, RetryError)


class RestoreJobReport(JobReport, frozen=True, kw_only=True):
    """What was restored, and from what: `seq` is the last entry, `state_seq` that of the state it began with."""

    directory: str
    store: str
    seq: int
    state_seq: int
    damaged_states: tuple[str, ...]
    entries: int
    rows: int
    pages: int
    next_lsn: int
    epoch: int


@logged
def restore_engine_directory(
    spark: SparkSession,
    root: EngineRoot,
    directory: str | os.PathLike[str],
    *,
    replicas: Sequence[EngineRoot] = (),
    on_progress: OnProgress = ignore_progress,
    clock: Clock | None = None,
    take_over: bool = False,
) -> RestoreJobReport:
    """Restores a lost engine into an empty directory, which can then be opened as that engine.

    Raises HeldError while another node has the engine open, unless `take_over`. The orchestrator has to send entries
    above `seq` of the report again. If the store cannot be read or has no good copy, the first of the `replicas` that
    has one replaces it for good.
    """
    path = Path(os.path.abspath(os.path.expanduser(directory)))
    failed: list[str] = []
    for one in (root, *replicas[:-1]) if replicas else ():
        try:
            return _restore(spark, one, path, on_progress, clock or SystemClock(), failed, take_over)
        except HeldError:
            raise  # the store is well, and so is the engine
        except _UNUSABLE as error:
            failed.append(f"{one.store_url} could not be used: {error.message}")
    return _restore(spark, (root, *replicas)[-1], path, on_progress, clock or SystemClock(), failed, take_over)


def _restore(
    spark: SparkSession,
    root: EngineRoot,
    path: Path,
    on_progress: OnProgress,
    clock: Clock,
    failed: Sequence[str],
    take_over: bool,
) -> RestoreJobReport:
    config = root.load()
    node = f"restore-{os.getpid()}-{secrets.token_hex(4)}"
    with root.open(read_only=False) as opened:
        remembered = EngineDirectory(node=node, store=root.store_url, name=root.name)
        steps = SparkSteps(spark, root.place, opened.catalog, path, remembered, on_progress)
        report = Restore(
            path,
            opened.objects,
            opened.metadata,
            keys=opened.keys,
            node=node,
            settings=config.storage_engine,
            files=LocalFiles(),
            clock=clock,
            take_over=take_over,
            lease_seconds=config.lease_seconds,
            on_progress=steps.on_progress,
            steps=steps,
        ).run()
    return _report(steps, report, root, path, failed)


def _report(
    steps: SparkSteps, report: RestoreReport, root: EngineRoot, path: Path, failed: Sequence[str]
) -> RestoreJobReport:
    damaged = (f"the state {key} could not be used; an older one was" for key in report.damaged_states)
    return RestoreJobReport(
        job="restore",
        reconciliations=(
            Reconciliation(subject=f"rows of {path}", went_in=_side(*steps.filled), came_out=_side(*steps.placed)),
        ),
        notes=(*failed, *damaged, f"entries above seq {report.seq} come from the orchestrator"),
        directory=str(path),
        store=root.store_url,
        seq=report.seq,
        state_seq=report.state_seq,
        damaged_states=report.damaged_states,
        entries=report.entries,
        rows=report.rows,
        pages=steps.next_page - 1,
        next_lsn=report.next_lsn,
        epoch=report.epoch,
    )


def _side(rows: int, checksum: int) -> Totals:
    return Totals(messages=rows, first_offset=None, last_offset=None, checksum=f"cells:{checksum:016x}", unit="rows")
