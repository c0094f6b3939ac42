"""The rows of one staged commit: verified before the first of them is appended, then read out.

Invariants
- `verify` reads every part to its end. Damage is reported before anything is in the log.
- A small staged commit is read once, and kept in memory until it is appended. A large one is read twice, or once if
  its rows can be written beside the log meanwhile (see `IngestedFiles`).
- If damage is found only after some rows are already in the log, marks of lost rows replace the unreadable ones: every
  other row gets the offset that was meant for it, and readers see the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate
from threading import Event
from typing import NamedTuple

from tidelog.cold.fetch import Fetcher
from tidelog.errors import ClosedError, DataError, MessageTooLargeError, NotFoundError
from tidelog.log import Log
from tidelog.log.frame import Frames, encode_many
from tidelog.log.repair import LOST_PAYLOAD
from tidelog.log.segment import Segment
from tidelog.log.writer import IngestedSegments
from tidelog.staging.area import StagedPart, decode_manifest, read_part, read_whole_part
from tidelog.staging.document import StagedCommit
from tidelog.store.object_store import ObjectStore

_logger = logging.getLogger("tidelog.cold")
_KEPT_BYTES = 16 << 20
_ROWS_AT_ONCE = 16384

CheckRows = Callable[[Frames], None]
"""Raises when rows must not become messages."""


class Staging(NamedTuple):
    """Where staged rows are, and what fetches them."""

    objects: ObjectStore
    fetcher: Fetcher
    others_may_wait: bool = False
    """Whether appends may be held while rows are read: on the disk of the log that takes no longer than appending them,
    and nobody else appends to the log of a job."""


class StagedRows:
    """Reads one staged commit."""

    def __init__(self, staging: Staging, staged_commit: StagedCommit) -> None:
        self.lost_rows = 0
        self._staging = staging
        self._staged = staged_commit
        self._parts: tuple[StagedPart, ...] | None = None
        self._kept: list[Frames] | None = None

    @property
    def is_read_once(self) -> bool:
        """Whether it is to be written beside the log while it is looked through."""
        return self._staging.others_may_wait and self._staged.bytes > _KEPT_BYTES

    def verify(self, check_rows: CheckRows) -> None:
        """Reads all. DataError or NotFoundError when it is not what was committed, or what `check_rows` raises."""
        kept: list[Frames] | None = [] if self._staged.bytes <= _KEPT_BYTES else None
        for part in self.parts():
            for frames in read_whole_part(self._staging.fetcher, part):
                check_rows(frames)
                if kept is not None:
                    kept.append(frames)
        self._kept = kept

    def frames(self, first_row: int) -> Iterator[Frames]:
        """The rows from one on, some at a time, numbered somehow. Where the store does not answer, ask from there."""
        if self._kept is not None:
            return _from_frames(self._kept, first_row)
        return self._from_parts(first_row)

    def whole_part(self, part: StagedPart) -> Iterator[Frames]:
        return read_whole_part(self._staging.fetcher, part, self._letting_go(part))

    def parts(self) -> tuple[StagedPart, ...]:
        if self._parts is None:
            self._parts = parts_of(self._staging.objects, self._staged)
        return self._parts

    def _from_parts(self, first_row: int) -> Iterator[Frames]:
        try:
            parts = self.parts()
        except (DataError, NotFoundError) as damage:
            yield from self._lost(self._staged.rows - first_row, damage)
            return
        begin = 0
        for part in parts:
            if begin + part.rows > first_row:
                yield from self._from_part(part, max(0, first_row - begin))
            begin += part.rows

    def _from_part(self, part: StagedPart, row: int) -> Iterator[Frames]:
        try:
            for frames in read_part(self._staging.fetcher, part, row, self._letting_go(part)):
                for some in _some_at_a_time(frames):
                    yield some
                    row += some.count
        except (DataError, NotFoundError) as damage:
            yield from self._lost(part.rows - row, damage)

    def _letting_go(self, part: StagedPart) -> Callable[[int], None]:
        return lambda position: self._staging.objects.let_go_below(part.key, position)

    def _lost(self, count: int, damage: Exception) -> Iterator[Frames]:
        self.lost_rows += count
        _logger.error("%d rows of %s are lost in ingest: %s", count, self._staged.id, damage)
        while count:
            some = min(count, _ROWS_AT_ONCE)
            yield encode_many(0, [LOST_PAYLOAD] * some)
            count -= some


def parts_of(objects: ObjectStore, one: StagedCommit) -> tuple[StagedPart, ...]:
    """What the manifest of a staged commit lists; DataError or NotFoundError when it is not what was committed."""
    data = objects.get(one.manifest).data
    parts = decode_manifest(data, one.manifest, one.checksum).parts
    if (sum(part.rows for part in parts), sum(part.bytes for part in parts)) != (one.rows, one.bytes):
        raise DataError(f"{one.manifest} does not list the {one.rows} rows that were committed")
    return parts


def check_sizes(frames: Frames, max_message_bytes: int) -> None:
    """MessageTooLargeError when a row is larger than the topic allows."""
    largest = max(memoryview(frames.lengths).cast("I"))
    if largest > max_message_bytes:
        raise MessageTooLargeError(
            f"a row of {largest} bytes is over max_message_bytes ({max_message_bytes})",
            hint="Raise max_message_bytes of the topic's owner, and write it again",
        )


def _from_frames(kept: list[Frames], first_row: int) -> Iterator[Frames]:
    begin = 0
    for frames in kept:
        if begin + frames.count > first_row:
            yield from _some_at_a_time(frames.slice(max(0, first_row - begin), frames.count))
        begin += frames.count


def _some_at_a_time(frames: Frames) -> Iterator[Frames]:
    for start in range(0, frames.count, _ROWS_AT_ONCE):
        yield frames.slice(start, min(start + _ROWS_AT_ONCE, frames.count))


# The rows of a large staged commit as files that can become the log's next ones: read, verified and written once.
#
# Invariants
# - Nothing is in the log before all of it was read and verified to be what was committed.
# - Several threads write, each the rows of some consecutive parts: the manifest gives where the rows of a part begin,
#   and files are in order of the parts.
# - One that fails stops the others, and nothing of it is left.


_LANES = 2
_LEAST_LANE_BYTES = 32 << 20


class IngestedFiles:
    """Files beside the log with all rows of a staged commit. `check` is called repeatedly, and raises to end it."""

    def __init__(self, log: Log, rows: StagedRows, first_offset: int, check: Callable[[], None]) -> None:
        self.segments: list[Segment] = []
        self._rows = rows
        self._check = check
        self._has_failed = Event()
        lanes = _lanes(rows.parts())
        begins = accumulate((sum(part.rows for part in lane) for lane in lanes), initial=first_offset)
        self._lanes = [(lane, log.prepare_files(next(begins), number)) for number, lane in enumerate(lanes)]

    def write(self, check_frames: Callable[[Frames], None]) -> None:
        """Reads and writes everything. An error leaves nothing on the disk."""
        try:
            if len(self._lanes) == 1:
                self.segments = self._write_lane(*self._lanes[0], check_frames)
            else:
                self._write_lanes(check_frames)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes the files, unless they are the log's."""
        for _, files in self._lanes:
            files.discard()

    def _write_lanes(self, check_frames: Callable[[Frames], None]) -> None:
        with ThreadPoolExecutor(len(self._lanes), "tidelog-ingest-lane") as threads:
            futures = [threads.submit(self._write_lane, *lane, check_frames) for lane in self._lanes]
            try:
                wait(futures)
            except BaseException:  # Ctrl-C: leaving this block waits for the threads, which need not go on to their end
                self._has_failed.set()
                raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, _StoppedError)), errors[0])
        self.segments = [segment for future in futures for segment in future.result()]

    def _write_lane(
        self, parts: Sequence[StagedPart], files: IngestedSegments, check_frames: Callable[[Frames], None]
    ) -> list[Segment]:
        try:
            for part in parts:
                for frames in self._rows.whole_part(part):
                    self._check_going_on()
                    check_frames(frames)
                    files.write(frames)
            return files.finish()
        except BaseException:
            self._has_failed.set()
            raise

    def _check_going_on(self) -> None:
        self._check()
        if self._has_failed.is_set():
            raise _StoppedError("another part of the same rows cannot be ingested")


class _StoppedError(ClosedError):
    """Another thread has failed, and its error is the one to be seen."""


def _lanes(parts: Sequence[StagedPart]) -> list[Sequence[StagedPart]]:
    """The parts in order, cut into about equal halves where that is worth a thread."""
    total = sum(part.bytes for part in parts)
    if total < _LANES * _LEAST_LANE_BYTES:
        return [parts]
    ends = list(accumulate(part.bytes for part in parts))
    cut = min(range(1, len(parts) + 1), key=lambda count: abs(2 * ends[count - 1] - total))
    return [lane for lane in (parts[:cut], parts[cut:]) if lane]
