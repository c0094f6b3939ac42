"""All rows of an engine at a seq, from its store alone: the newest state that can be read, and the log behind it.

Invariants
- States that are read are pinned in the manifest meanwhile: whoever owns the engine does not delete them.
- A state that cannot be read is passed over for the one before it, and told. Where there is none, the log is read from
  its beginning, if it still has one.
- Nothing is believed to be the log's end but what the manifest tells of.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidelog.clock import Clock
from tidelog.engine.buckets import Buckets
from tidelog.engine.manifest import Manifest, Pinning
from tidelog.errors import DataError, InputError, NotFoundError, TidelogError
from tidelog.pipeline.engine_jobs.index_base import Base, base_of
from tidelog.pipeline.engine_jobs.index_rows import (
    TOLD_SCHEMA,
    Created,
    FirstAbove,
    buckets_in,
    created_at,
    first_above,
    settled_rows,
    told_by,
)
from tidelog.pipeline.engine_jobs.log_rows import LogWork, plan_log
from tidelog.pipeline.engines.store_place import EnginePlace

if TYPE_CHECKING:
    from tidelog.pipeline.engine_jobs.compact_flow import Flow, Rows
    from tidelog.pipeline.engines.place import OpenedEngine

_PIN_SECONDS = 24 * 3600
# What a row takes on its way, about: for the number of tasks.
_ROW_BYTES = 150


class RowsAt(NamedTuple):
    """The rows of an engine at a seq, which `lsn` is the first record behind; and where they were found.

    They are in so many `tasks`.
    """

    rows: Rows
    buckets: Buckets
    seq: int
    lsn: int
    base: Base | None
    log: Sequence[LogWork]
    tasks: int
    passed_over: tuple[str, ...] = ()

    @property
    def created(self) -> Created:
        """The buckets that are there at the seq."""
        return created_at(self.buckets, self.seq)


class SourceOfRows:
    """Finds the rows of one engine."""

    def __init__(self, flow: Flow, opened: OpenedEngine, place: EnginePlace) -> None:
        self._flow = flow
        self._opened = opened
        self._place = place

    def at(self, manifest: Manifest, pinning: Pinning | None, seq: int | None = None) -> RowsAt:
        """The rows at a seq, at the high-water mark by default."""
        wanted = _checked_seq(manifest, seq)
        passed_over: list[str] = []
        for listed in reversed(manifest.checkpoints):
            if listed.seq > wanted or (pinning is not None and not pinning.pin(listed.key)):
                continue
            try:
                return self.behind(base_of(self._opened.objects, listed), manifest, wanted, tuple(passed_over))
            except (DataError, NotFoundError) as error:
                if not _is_about(error, listed.key):
                    raise
                passed_over.append(f"{listed.key} was passed over: {error}")
        return self.behind(None, manifest, wanted, tuple(passed_over))

    def behind(self, base: Base | None, manifest: Manifest, seq: int, passed_over: tuple[str, ...] = ()) -> RowsAt:
        """The rows at a seq, from a base on."""
        start_lsn = 1 if base is None else base.lsn
        self._require_log_from(start_lsn, passed_over)
        lsn = self._first_lsn_behind(manifest, start_lsn, seq)
        log = self._planned(manifest, start_lsn, lsn, seq)
        base_rows = None if base is None else base.changes(self._flow, self._place)
        size = sum(one.raw_size for work in log for one in work.descriptors)
        tasks = self._flow.tasks_for(size + (0 if base is None else base.rows * _ROW_BYTES))
        rows = settled_rows(self._flow, base_rows, log, tasks)
        return RowsAt(rows, buckets_in(rows), seq, lsn, base, log, tasks, passed_over)

    def _require_log_from(self, lsn: int, passed_over: tuple[str, ...]) -> None:
        start = self._opened.catalog.start_offset()
        if lsn < start:
            raise DataError(
                f"no state in the store can be read, and its log begins at LSN {start}",
                hint="Put a good copy of a state in its place: " + ("; ".join(passed_over) or "there is none"),
            )

    def _planned(self, manifest: Manifest, start_lsn: int, end_lsn: int, max_seq: int) -> list[LogWork]:
        return plan_log(
            *(self._opened.catalog, self._place, start_lsn, end_lsn),
            max_seq=max_seq,
            rolled_back=manifest.rolled_back,
        )

    def _first_lsn_behind(self, manifest: Manifest, start_lsn: int, seq: int) -> int:
        """The record from which on the log goes on behind the state of a seq."""
        end_lsn = max(start_lsn, manifest.high_water_lsn + 1)
        if seq == manifest.high_water_mark:
            return end_lsn
        works = self._planned(manifest, start_lsn, end_lsn, seq)
        found = told_by(self._flow.source(first_above, works, TOLD_SCHEMA), FirstAbove) if works else []
        return min((one.lsn for one in found), default=end_lsn)


def _checked_seq(manifest: Manifest, seq: int | None) -> int:
    if not manifest.high_water_mark:
        raise InputError("nothing of the engine is shipped yet", hint="Raise its low-water mark, and ship")
    if seq is None:
        return manifest.high_water_mark
    if not manifest.history_start_seq <= seq <= manifest.high_water_mark or seq < 1:
        raise InputError(
            f"seq {seq} cannot be had: the store has seqs {max(1, manifest.history_start_seq)} to "
            f"{manifest.high_water_mark}",
            hint="Ask for one of those; later ones are there when the engine has shipped them",
        )
    return seq


def _is_about(error: TidelogError, key: str) -> bool:
    """Whether it is the state that cannot be read, or one of the files that it consists of."""
    folder = key.rpartition("/")[0].rpartition("/")[0]
    return any(f"{folder}/{part}/" in f"{error} {error.path}" for part in ("checkpoints", "index"))


@contextlib.contextmanager
def pinning_for(job: str, opened: OpenedEngine, clock: Clock, *, pins: bool = True) -> Iterator[Pinning | None]:
    """What a job pins while it reads; all of it is released behind it. None for one that must change nothing."""
    if not pins:
        yield None
        return
    name = f"{job}-{secrets.token_hex(8)}"
    pinning = Pinning(opened.metadata, opened.keys, clock, name, _PIN_SECONDS)
    try:
        yield pinning
    finally:
        with contextlib.suppress(TidelogError):
            pinning.release()
