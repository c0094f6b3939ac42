"""Ingest: the rows of staged commits become messages of the topic, each exactly once.

The recorded first offset makes it exactly-once. Before the first row of a staged commit is appended, the staging
document records the offset at which it begins; while its rows are appended, all other appends are held back. So its
first offset and the end of the log tell how many of its rows are there:

    end <= first_offset             none: any there were have been lost with the end of the log. It gets a new offset
    first_offset < end < its end    some: ingest resumes at row `end - first_offset`, before any other append
    its end <= end                  all

Invariants
- The first offset is durable before the first row is accepted. While it is unknown whether it was written, nothing else
  is appended: the write is retried until the store answers.
- A staged commit stays in the document, and its parts in the store, until the loss of a disk cannot lose its rows. A
  new owner that has fewer rows than were ingested ingests the rest again.
- A staged commit that is not what was committed is refused before any of it is in the log, and the others continue.
- Only the owner of the topic changes anything here; a node that lost it gets FencedError.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.codec import decode_document, encode_document
from tidelog.cold.tiered_log import TieredLog
from tidelog.errors import (
    ClosedError,
    ConflictError,
    DataError,
    FencedError,
    InternalError,
    MessageTooLargeError,
    NotFoundError,
    ReopenError,
    RetryError,
    TidelogError,
)
from tidelog.files import Files, explained
from tidelog.log import Log
from tidelog.log.directory import INGESTED_RANGES
from tidelog.log.frame import Frames
from tidelog.staging.document import StagedCommit, StagingDocument
from tidelog.staging.ledger import IngestLedger, OwnedLedger
from tidelog.staging.rows import CheckRows, IngestedFiles, StagedRows, Staging, check_sizes
from tidelog.store.keys import TopicKeys
from tidelog.store.scheduler import NEVER

# `placed.json`: which offsets of a log are ingested rows, as far as they may not be shipped yet.
#
# If another node takes over the topic before they are shipped, it ingests them again, from the staging area. They are
# in the divergent tail here as well, and a rescue of that tail must leave them out: they would be duplicated.
#
# Invariants
# - A range is written after its first offset is in the staging document, and before the first of its rows is appended.
#   A range that the document no longer lists is removed before anything else is appended.
# - It is moved with the files of the log, before them.


_KIND = "placed-rows"
_VERSION = 1

Ranges = tuple[tuple[int, int], ...]


class _Placed(msgspec.Struct, frozen=True, kw_only=True):
    ranges: Ranges


class IngestedRanges:
    """The ranges of one log, (first, next) each; written only when they change."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._written: Ranges | None = None

    def remember(self, document: StagingDocument) -> None:
        """Records all ranges that the document places; durable when it returns."""
        placed = [one for one in document.pending if one.first_offset is not None and one.rows]
        ranges = tuple((one.next_offset - one.rows, one.next_offset) for one in placed)
        with explained("ingest", self._directory):
            if self._written is None:
                self._written = read_ingested_ranges(self._files, self._directory)
            if ranges != self._written:
                data = encode_document(_KIND, _VERSION, _Placed(ranges=ranges))
                self._files.write_atomically(self._directory / INGESTED_RANGES, data)
        self._written = ranges


def read_ingested_ranges(files: Files, directory: Path) -> Ranges:
    """What is written beside a log; nothing where there is no such file."""
    path = directory / INGESTED_RANGES
    if not files.exists(path):
        return ()
    return decode_document(_KIND, _VERSION, files.read(path), _Placed).ranges


_logger = logging.getLogger("tidelog.cold")
_DELETED_AT_ONCE = 200
_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.5)
_HELD_RETRY_SECONDS = 1.0
# A topic without new staged commits for so long is polled less often, where a poll costs money.
_QUIET_SECONDS = 60.0
_QUIET_FACTOR = 5


class IngestStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the topic was opened; `pending` and `refused` as of the last poll."""

    staged_commits: int = 0
    rows: int = 0
    bytes: int = 0
    lost_rows: int = 0
    pending: int = 0
    refused: int = 0
    last_error: str | None = None


@dataclass
class _Held:
    """A staged commit that is being appended: as long as there is one, other appends are held back."""

    staged_commit: StagedCommit
    rows: StagedRows
    prepared: IngestedFiles | None = None
    is_placed: bool = False
    may_be_placed: bool = False

    def __post_init__(self) -> None:
        self.may_be_placed = self.is_placed


class Ingester:
    """Ingests the staged commits of one topic, for its owner."""

    def __init__(
        self,
        log: Log,
        ledger: IngestLedger,
        keys: TopicKeys,
        open_staging: Callable[[], Staging],
        safe_offset: Callable[[], int],
        clock: Clock,
        *,
        max_message_bytes: int,
        check_seconds: float,
        looks_are_paid: bool = False,
        placed_rows: IngestedRanges | None = None,
        check_rows: CheckRows | None = None,
    ) -> None:
        """`safe_offset` is up to where rows cannot be lost with the disk, or with it alone where there is no store.
        `check_rows` raises DataError for rows that nobody could read again."""
        self._log = log
        self._ledger = ledger
        self._keys = keys
        self._open_staging = open_staging
        self._safe_offset = safe_offset
        self._clock = clock
        self._max_message_bytes = max_message_bytes
        self._check_seconds = check_seconds
        self.looks_are_paid = looks_are_paid
        self.is_told = False
        """Whether it is notified when the document changes: then it polls only while a commit is open."""
        self._placed_rows = placed_rows
        self._check_rows = check_rows
        self._guard = Lock()
        self._is_stopping = False
        self._held: _Held | None = None
        self.has_moved_places = False
        """Whether an earlier owner's rows on its disk are no longer where the staging document says."""
        self._has_open_entries = True
        self._last_taken_seconds = clock.monotonic()
        self._statistics = IngestStatistics()

    def statistics(self) -> IngestStatistics:
        return self._statistics

    # When

    def settle(self) -> None:
        """When the log was opened, before anything is appended: finishes what was begun, and ingests what waits.

        A commit that cannot be read now waits for a later poll, unless some of its rows are in the log: then this
        raises.
        """
        with self._guard:
            end = self._log.next_offset
            document = self._ledger.change(lambda known: self._settled(known, end))
            self._remember_places(document)
            for one in document.waiting:
                if one.first_offset is not None and not one.is_within(end):
                    self._log.hold_appends()
                    self._held = _Held(one, StagedRows(self._open_staging(), one), is_placed=True)
                    self._go_on()
            try:
                self._take_all(None if document.waiting else document)
            except RetryError as error:
                if self._held is not None:
                    raise
                self._note_error(error)

    def _settled(self, known: StagingDocument, end: int) -> StagingDocument:
        settled = known.settled(end)
        self.has_moved_places = self.has_moved_places or settled != known
        return settled

    def ingest(self) -> int:
        """Ingests all waiting staged commits; returns how many."""
        with self._guard:
            return self._take_all()

    def look(self) -> float:
        """The same in the background; seconds until it wants to look again."""
        if self._is_stopping or self._log.over or not self._guard.acquire(blocking=False):
            return self._check_seconds
        try:
            self._take_all()
        except FencedError:
            raise
        except ReopenError:
            return self._check_seconds  # the log was closed, or failed: the next opening resumes
        except TidelogError as error:
            self._note_error(error)
        finally:
            self._guard.release()
        return self._seconds_until_next_look()

    def _seconds_until_next_look(self) -> float:
        if self._held is not None:
            return min(_HELD_RETRY_SECONDS, self._check_seconds)
        if self.is_told and not self._has_open_entries:
            return NEVER
        is_quiet = self.looks_are_paid and self._clock.monotonic() - self._last_taken_seconds > _QUIET_SECONDS
        return self._check_seconds * _QUIET_FACTOR if is_quiet else self._check_seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses ingest: meanwhile nothing is ingested, and nothing is half ingested."""
        with self._guard:
            if self._held is not None:
                self._go_on()
            yield

    def stop(self) -> None:
        """Ends the current work soon: the log is about to be closed. The next opening resumes."""
        self._is_stopping = True

    # What

    def _take_all(self, document: StagingDocument | None = None) -> int:
        """`document`: as it is, where that was just read."""
        if self._held is not None:
            self._go_on()
        self._has_open_entries = True
        if document is None:
            document, _ = self._ledger.load()
        taken = 0
        while document.waiting:
            self._note(document)
            taken += self._take(document.waiting[0])
            document, _ = self._ledger.load()
        self._note(document)
        self._clear_away(document)
        self._has_open_entries = bool(document.pending)
        self._statistics = msgspec.structs.replace(self._statistics, last_error=None)
        return taken

    def _take(self, one: StagedCommit) -> int:
        if one.is_within(self._log.next_offset):
            self._finish(one)  # its rows are there; that this is so could not be written down the last time
            return 1
        rows = StagedRows(self._open_staging(), one)
        try:
            self._held = self._prepared(one, rows) if rows.is_read_once else self._verified(one, rows)
        except (DataError, NotFoundError, MessageTooLargeError) as error:
            self._refuse(one, error)
            return 0
        self._go_on()
        return 1

    def _verified(self, one: StagedCommit, rows: StagedRows) -> _Held:
        """Looked through while others append."""
        rows.verify(self._check_frames)
        return _Held(self._placed_at(one, self._log.hold_appends()), rows)

    def _prepared(self, one: StagedCommit, rows: StagedRows) -> _Held:
        """Looked through, and written into files that may become the next ones of the log; others wait meanwhile."""
        first_offset = self._log.hold_appends()
        try:
            prepared = IngestedFiles(self._log, rows, first_offset, self._check_going_on)
            prepared.write(self._check_frames)
        except BaseException:
            self._log.release_appends()
            raise
        return _Held(self._placed_at(one, first_offset), rows, prepared)

    def _check_frames(self, frames: Frames) -> None:
        check_sizes(frames, self._max_message_bytes)
        if self._check_rows is not None:
            self._check_rows(frames)

    def _placed_at(self, one: StagedCommit, first_offset: int) -> StagedCommit:
        return msgspec.structs.replace(one, first_offset=first_offset, epoch=self._ledger.epoch)

    def _refuse(self, one: StagedCommit, error: TidelogError) -> None:
        _logger.error("%s: a staged commit of %s is refused: %s", self._log.directory, one.app, error)
        now_us = self._clock.now_us()
        self._ledger.change(lambda known: known.refuse(one.id, str(error), now_us))

    def _go_on(self) -> None:
        """Places the commits to be placed, appends the rows to be appended; then others may append again."""
        held = self._held
        assert held is not None
        try:
            if not held.is_placed:
                self._place(held)
            self._append_rows(held)
        except BaseException:
            if not held.may_be_placed:
                if held.prepared is not None:
                    held.prepared.discard()
                self._let_go()
            raise
        self._let_go()
        lost_rows = self._statistics.lost_rows + held.rows.lost_rows
        self._statistics = msgspec.structs.replace(self._statistics, lost_rows=lost_rows)
        self._finish(held.staged_commit)

    def _let_go(self) -> None:
        self._held = None
        self._log.release_appends()

    def _place(self, held: _Held) -> None:
        """Records its first offset. If the store gives no answer, it is asked until it does, now or later: the record
        may be written, or will be, and another message at that offset would be mistaken for a row."""
        one = held.staged_commit
        assert one.first_offset is not None
        for pause_seconds in (*_PAUSES_SECONDS, None):
            try:
                document, version = self._ledger.load()
                placed = document.placed(one.id, one.first_offset, one.epoch)
                if placed.find(one.id) != one:
                    held.may_be_placed = False
                    raise DataError(f"{one.id} was changed by another writer in the staging document")
                if placed != document:  # else an attempt without an answer was successful
                    held.may_be_placed = True
                    self._ledger.store(placed, version)
                self._remember_places(placed)
                held.is_placed = True
                return
            except (ConflictError, RetryError) as error:
                if pause_seconds is None or not held.may_be_placed:
                    raise
                self._note_error(error)
                self._check_going_on()
                time.sleep(pause_seconds)

    def _remember_places(self, document: StagingDocument) -> None:
        if self._placed_rows is not None:
            self._placed_rows.remember(document)

    def _check_going_on(self) -> None:
        if self._is_stopping or self._log.over:
            raise ClosedError("the log is closing", path=self._log.directory)

    def _append_rows(self, held: _Held) -> None:
        """Resumes at the first row that is not in the log, and continues to the last."""
        one = held.staged_commit
        assert one.first_offset is not None
        if held.prepared is not None:
            self._log.adopt_held(held.prepared.segments)
            held.prepared = None
        for frames in held.rows.frames(self._log.next_offset - one.first_offset):
            self._check_going_on()
            self._log.append_held(frames)
        if one.rows and self._log.next_offset != one.next_offset:
            raise InternalError(f"{one.id} ends at {one.next_offset}, and the log at {self._log.next_offset}")

    def _finish(self, one: StagedCommit) -> None:
        """All rows are accepted: brings them to the disk, and writes down that they are there."""
        assert one.first_offset is not None
        if one.rows:
            self._log.wait_durable(one.first_offset, one.rows)
        now_us = self._clock.now_us()
        self._ledger.change(lambda known: known.taken(one.id, now_us))
        self._last_taken_seconds = self._clock.monotonic()
        counted = self._statistics
        self._statistics = msgspec.structs.replace(
            counted,
            staged_commits=counted.staged_commits + 1,
            rows=counted.rows + one.rows,
            bytes=counted.bytes + one.bytes,
        )

    def _clear_away(self, document: StagingDocument) -> None:
        """Removes the parts of what can no longer be lost, then its entries: a crash in between leaves no orphan."""
        safe = self._safe_offset()
        done = {one.id for one in document.pending if one.is_taken and one.is_within(safe)}
        if not done:
            return
        objects = self._open_staging().objects
        for id in done:
            names = (info.key for info in objects.list(self._keys.staged_commit_prefix(id)))
            while some := list(islice(names, _DELETED_AT_ONCE)):
                objects.delete(some)
            objects.remove_folder(self._keys.staged_commit_prefix(id))
        self._ledger.change(lambda known: known.without(done))

    # Telling

    def _note(self, document: StagingDocument) -> None:
        pending, refused = len(document.waiting), len(document.refused)
        self._statistics = msgspec.structs.replace(self._statistics, pending=pending, refused=refused)

    def _note_error(self, error: TidelogError) -> None:
        if self._statistics.last_error != str(error):
            _logger.warning("%s: nothing can be ingested now: %s", self._log.directory, error)
        self._statistics = msgspec.structs.replace(self._statistics, last_error=str(error))


def ingester_of(tiered: TieredLog, max_message_bytes: int, check_rows: CheckRows | None = None) -> Ingester:
    """What ingests the rows that are staged for a topic with a store."""
    node, log, owned = tiered.node, tiered.log, tiered.owned
    return Ingester(
        log,
        OwnedLedger(owned),
        owned.catalog.keys,
        lambda: Staging(node.objects, tiered.history.fetcher, others_may_wait=not node.runs_in_background),
        lambda: tiered.shipped_offset,
        node.clock,
        max_message_bytes=max_message_bytes,
        check_seconds=tiered.settings.ingest_check_seconds,
        looks_are_paid=not node.metadata.supports_multi_key,
        placed_rows=IngestedRanges(log.files, log.directory),
        check_rows=check_rows,
    )
