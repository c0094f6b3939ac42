"""A table of Parquet files in a directory or a bucket (see `table_commits` for what counts and when)."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

import msgspec
import pyarrow.parquet as pq

from tidelog.clock import Clock, SystemClock
from tidelog.config import load_settings
from tidelog.errors import ConflictError, InternalError
from tidelog.pipeline.tables.commits import FORMAT, Commit, TableCommits, TableFile, TableState, staged_prefix
from tidelog.pipeline.tables.files import TableLocation, table_location
from tidelog.pipeline.tables.table import Step, TargetState
from tidelog.pipeline.tables.tasks import RewrittenFile, WrittenPart
from tidelog.pipeline.tables.types import TableShape


def parquet_table(path: str | os.PathLike[str], **settings: object) -> ParquetTable:
    """The table in a directory or at a store URL. `settings` say how the store is reached, as in `tidelog.open`."""
    return ParquetTable(table_location(path, load_settings(None, os.environ, settings).object_store))


class ParquetTable:
    """One run's view of a table: what it found when it began, and what it adds."""

    def __init__(self, place: TableLocation, clock: Clock | None = None) -> None:
        self.place = place
        self.name = place.url
        self._clock = clock or SystemClock()
        self._commits = TableCommits(place.open())
        self._state: TableState | None = None

    def begin(self) -> TargetState | None:
        self._state = self._commits.state()
        self._commits.finish(self._state, _schema_file(self._state.newest))
        newest = self._state.newest
        if newest is None:
            return None
        return TargetState(
            topic=newest.topic,
            values=newest.values,
            columns=newest.columns,
            first_offset=self._state.first_offset,
            next_offset=newest.next_offset,
            partitions=newest.partitions,
        )

    def prepare(self, shape: TableShape) -> None:
        """A directory of Parquet files needs nothing."""

    def new_key(self, attempt: str, first_offset: int, number: int) -> str:
        name = f"part-{first_offset:020}-{number:05}-{attempt}.parquet"
        return staged_prefix(self._known.next_number, attempt) + name

    def files(self) -> Sequence[str]:
        return self._commits.keys_of(self._known)

    def commit(self, step: Step) -> None:
        before = {file.name: file for file in self._known.files}
        commit = Commit(
            format=FORMAT,
            number=self._known.next_number,
            attempt=step.attempt,
            topic=step.topic,
            values=step.shape.values,
            first_offset=step.first_offset,
            next_offset=step.next_offset,
            columns=step.shape.columns,
            added=(
                *(_added(part) for part in step.written if part.went_in.messages),
                *(_replacing(one, before[_name(one.source)]) for one in step.rewritten),
            ),
            removed=tuple(_name(one.source) for one in step.rewritten),
            proof=step.proof,
            committed_us=self._clock.now_us(),
            partitions=step.partitions,
        )
        try:
            self._commits.commit(commit)
        except ConflictError:
            self.discard(step.attempt, ())
            raise
        self.begin()

    def discard(self, attempt: str, keys: Sequence[str]) -> None:
        self._commits.discard(self._known.next_number, attempt)

    @property
    def _known(self) -> TableState:
        if self._state is None:
            raise InternalError("state() must be called before the first file")
        return self._state


def _added(part: WrittenPart) -> TableFile:
    tally = part.went_in
    if tally.first_offset is None or tally.last_offset is None:
        raise InternalError("a file without messages was written")
    return TableFile(
        name=_name(part.key),
        rows=tally.messages,
        bytes=part.bytes,
        first_offset=tally.first_offset,
        last_offset=tally.last_offset,
    )


def _replacing(one: RewrittenFile, old: TableFile) -> TableFile:
    return msgspec.structs.replace(old, name=_name(one.key), bytes=one.bytes, rows=one.rows)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _schema_file(newest: Commit | None) -> bytes | None:
    """A Parquet file without rows: readers that look at one file for the columns look at this one first."""
    if newest is None:
        return None
    sink = io.BytesIO()
    pq.write_metadata(TableShape(values=newest.values, columns=newest.columns).schema, sink)
    return sink.getvalue()
