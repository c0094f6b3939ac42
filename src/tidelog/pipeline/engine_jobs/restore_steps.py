"""A restore whose long steps are done by Spark's workers: fetching a state, reading the log, filling pages.

Invariants
- Everything that comes from the store is fetched and checked before the engine is claimed; behind the claim only what
  was shipped meanwhile is read, by the driver.
- Where the ranges of keys are cut follows from the rows alone: the same tree is built by any number of workers.
- Leaves have their numbers in the order of their keys, whoever filled them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tidelog.engine.core import PAGES
from tidelog.engine.engine_directory import EngineDirectory, remember
from tidelog.engine.manifest import Manifest
from tidelog.engine.page import ROOT
from tidelog.engine.page_file import PageFile
from tidelog.engine.restore import CHANGES_BYTES, RESTORING, Phase, Restore
from tidelog.engine.restore_replay import Replay
from tidelog.engine.restore_runs import Changes
from tidelog.engine.row_file import BlockPlace, RowFile
from tidelog.engine.shipped_results import results_behind
from tidelog.engine.store_checkpoint import StoredState
from tidelog.engine.tree_pieces import FIRST_LEAF, Child, empty_root, inner_pages
from tidelog.engine.tree_python import divider_of
from tidelog.engine.version_keys import MAX_SEQ
from tidelog.errors import DataError
from tidelog.pipeline.engine_jobs.restore_files import Run, Values, Workshop
from tidelog.pipeline.engine_jobs.restore_log import (
    LogPiece,
    RunWriter,
    StatePiece,
    cut_log,
    keep_state,
    read_log,
)
from tidelog.pipeline.engine_jobs.restore_pages import Leaves, PlaceWork, RangeWork, fill_leaves, place_leaves
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.jobs.job import OnProgress, Progress, counted_progress
from tidelog.pipeline.work import run_on_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Result = TypeVar("Result")

_PIECE_BYTES = 32 << 20
_STATE_PIECE_BYTES = 8 << 20
_RANGE_ROWS = 250_000
_DONE_BY_DRIVER = 1
# What the driver reads behind the claim comes behind all pieces.
_BEHIND_ALL = 1 << 30
_MODULUS = 1 << 64


class SparkRestore(Restore):
    """One restore. `use` says who does the work, before it is run."""

    filled = 0, 0
    """Rows that went into pages, and their sum."""
    placed = 0, 0
    """Rows that were read back from the page file, and their sum."""
    next_page = FIRST_LEAF

    def use(
        self, spark: SparkSession, place: EnginePlace, remembered: EngineDirectory, on_progress: OnProgress
    ) -> None:
        """Workers of this session do it; `remembered` is what the directory says about itself in the end."""
        self._spark = spark
        self._place = place
        self._remembered = remembered
        self._on_step = on_progress
        folder = self._directory / RESTORING
        self._workshop = Workshop(folder=str(folder), probe=f"probe-{secrets.token_hex(8)}")
        self._late_runs = RunWriter(self._workshop, _BEHIND_ALL)
        self._state_runs: list[Run] = []
        self._log_runs: list[Run] = []
        self._has_replayed = False

    def _done(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """By workers; a single item is done here, sooner than a task is started."""
        if len(items) <= _DONE_BY_DRIVER:
            return map(function, items)
        return run_on_workers(self._spark, function, items)

    def _changes(self) -> Changes:
        return Changes(self._late_runs, CHANGES_BYTES)

    def _prepare(self) -> None:
        super()._prepare()
        self._files.create(self._directory / RESTORING / self._workshop.probe).close()

    # The state

    def _keep(self, state: StoredState) -> None:
        pieces = [
            StatePiece(
                place=self._place, workshop=self._workshop, number=number, key=key, values=values, blocks=tuple(blocks)
            )
            for number, (key, values, blocks) in enumerate(self._state_pieces(state))
        ]
        results = self._done(keep_state, pieces)
        self._state_runs = list(counted_progress(results, "fetching the state", len(pieces), self._on_step))

    def _state_pieces(self, state: StoredState) -> Iterator[tuple[str, Values, Sequence[BlockPlace]]]:
        for key, values, blocks in self._state_objects(state):
            for group in _grouped(blocks, _STATE_PIECE_BYTES):
                yield key, values, group

    def _state_objects(self, state: StoredState) -> Iterator[tuple[str, Values, Sequence[BlockPlace]]]:
        """The objects that a state consists of, with their blocks."""
        if not state.parts():
            blocks = [
                BlockPlace(one.byte, one.size, one.count, one.first_key, one.last_key) for one in state.footer.blocks
            ]
            yield state.key, "cells", blocks
        for part in state.parts():
            found = RowFile(self._objects, part, kind="versions").footer.blocks
            yield part.key, "versions", found

    # The log

    def _replay(self, replay: Replay, manifest: Manifest) -> None:
        """The first time by workers; behind the claim, what has come since, by the driver."""
        if self._has_replayed:
            super()._replay(replay, manifest)
            return
        self._has_replayed = True
        stop_lsn = manifest.high_water_lsn + 1
        pieces = [
            LogPiece(
                place=self._place,
                workshop=self._workshop,
                number=number,
                first_lsn=first,
                stop_lsn=stop,
                manifest=_about(manifest, first),
            )
            for number, (first, stop) in enumerate(
                cut_log(self._catalog.between(replay.lsn, stop_lsn), replay.lsn, stop_lsn, _PIECE_BYTES)
            )
        ]
        results = self._done(read_log, pieces)
        done = sorted(
            counted_progress(results, "reading the log", len(pieces), self._on_step), key=lambda one: one.number
        )
        replay.entries = sum(one.entries for one in done)
        replay.history_start_seq = max((one.history_start_seq for one in done), default=0)
        assert replay.results is not None
        assert self._fetchers is not None
        replay.results = results_behind(
            *(self._catalog, self._objects, self._fetchers, manifest.rolled_back),
            *(replay.results.known_up_to(MAX_SEQ), replay.lsn, stop_lsn),
        )
        replay.lsn = max(replay.lsn, stop_lsn)
        self._log_runs = [run for one in done for run in one.runs]

    # The index

    def _build(self, next_lsn: int) -> tuple[int, int]:
        lsn = next_lsn - 1
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

    def _finish(self) -> None:
        remember(self._files, self._directory, self._remembered)
        super()._finish()

    def _tell(self, phase: Phase, done: int, total: int) -> None:
        """Steps of workers tell for themselves how far they are."""
        if phase == "claim":
            self._on_step(Progress("claiming the engine", done, total))


def _grouped(blocks: Sequence[BlockPlace], size: int) -> Iterator[Sequence[BlockPlace]]:
    """Blocks that follow each other, about so many bytes of them at a time."""
    first = 0
    for index, block in enumerate(blocks, 1):
        if block.byte + block.size - blocks[first].byte >= size or index == len(blocks):
            yield blocks[first:index]
            first = index


def _about(manifest: Manifest, first_lsn: int) -> Manifest:
    """What of a manifest matters to a piece of the log."""
    ranges = tuple(one for one in manifest.rolled_back if one.last >= first_lsn)
    return msgspec.structs.replace(manifest, rolled_back=ranges, checkpoints=(), leaving=(), pins=())


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
    """Numbers for all leaves, one behind the other; a lone one is the root itself."""
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
    """For each leaf the least key that may be in it."""
    last_key = b""
    for one in leaves:
        yield divider_of(last_key, one.first_key)
        yield from one.dividers
        last_key = one.last_key
