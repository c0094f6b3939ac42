"""Taking in: the rows of committed consignments become messages of the topic, each once.

What makes it exactly once is the place. Before the first row of a consignment is appended, it is written down in the
intake document at which offset it begins; while its rows are appended, all other appends are held back. So from the
place and the end of the log anybody can tell how many of its rows are there:

    end <= first_offset             none: what there was went with the end of the log. It is placed anew
    first_offset < end < behind it  some: it goes on with row `end - first_offset`, before anything else is appended
    behind it <= end                all

Invariants
- The place is durable before the first row is accepted. As long as it is not known whether it was written, nothing else
  is appended: it is tried until the store has answered.
- A consignment stays in the document, and its parts in the store, until the rows are where the loss of a disk cannot
  take them. A new owner that has fewer rows than were taken in takes the rest in again.
- A consignment that is not what was committed is refused before any of it is in the log, and the others go on.
- Only the owner of the topic changes anything here; who lost it gets FencedError.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from threading import Event, Lock

import msgspec

from tidelog.clock import Clock
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
from tidelog.log import Log
from tidelog.log.frame import Frames
from tidelog.tier.background import NEVER
from tidelog.tier.intake_document import Consignment, IntakeDocument
from tidelog.tier.intake_ledger import IntakeLedger
from tidelog.tier.intake_prepared import PreparedRows
from tidelog.tier.intake_rows import CheckRows, ConsignmentRows, Staging, check_sizes
from tidelog.tier.keys import TopicKeys
from tidelog.tier.placed_rows import PlacedRows

_logger = logging.getLogger("tidelog.tier")
_DELETED_AT_ONCE = 200
_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.5)
_HELD_RETRY_SECONDS = 1.0
# A topic to which nothing was handed over for so long is looked at less often, where a look costs money.
_QUIET_SECONDS = 60.0
_QUIET_FACTOR = 5


class IntakeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken in since the topic was opened; `pending` and `refused` as they were at the last look."""

    consignments: int = 0
    rows: int = 0
    bytes: int = 0
    lost_rows: int = 0
    pending: int = 0
    refused: int = 0
    last_error: str | None = None


@dataclass
class _Held:
    """A consignment that is being appended: as long as there is one, the appends of others are held back."""

    consignment: Consignment
    rows: ConsignmentRows
    prepared: PreparedRows | None = None
    is_placed: bool = False
    may_be_placed: bool = False

    def __post_init__(self) -> None:
        self.may_be_placed = self.is_placed


class IntakeTaker:
    """Takes in what was handed over to one topic, for its owner."""

    def __init__(
        self,
        log: Log,
        ledger: IntakeLedger,
        keys: TopicKeys,
        open_staging: Callable[[], Staging],
        safe_offset: Callable[[], int],
        clock: Clock,
        *,
        max_message_bytes: int,
        check_seconds: float,
        looks_are_paid: bool = False,
        placed_rows: PlacedRows | None = None,
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
        """Whether somebody tells it when the document has changed: it looks by itself only while something is open."""
        self._placed_rows = placed_rows
        self._check_rows = check_rows
        self._guard = Lock()
        self._stopping = Event()
        self._held: _Held | None = None
        self.has_moved_places = False
        """Whether what an earlier owner has on its disk is not where the intake document says any more."""
        self._has_open_entries = True
        self._last_taken_seconds = clock.monotonic()
        self._statistics = IntakeStatistics()

    def statistics(self) -> IntakeStatistics:
        return self._statistics

    # When

    def settle(self) -> None:
        """When the log was opened, before anything is appended: finishes what was begun, and takes in what waits.

        What cannot be read now waits for a later look, unless some of its rows are in the log: then this raises.
        """
        with self._guard:
            end = self._log.next_offset
            document = self._ledger.change(lambda known: self._settled(known, end))
            self._remember_places(document)
            for one in document.waiting:
                if one.first_offset is not None and not one.is_within(end):
                    self._log.hold_appends()
                    self._held = _Held(one, ConsignmentRows(self._open_staging(), one), is_placed=True)
                    self._go_on()
            try:
                self._take_all()
            except RetryError as error:
                if self._held is not None:
                    raise
                self._note_error(error)

    def _settled(self, known: IntakeDocument, end: int) -> IntakeDocument:
        settled = known.settled(end)
        self.has_moved_places = self.has_moved_places or settled != known
        return settled

    def take_in(self) -> int:
        """Takes in everything that waits; returns how many consignments."""
        with self._guard:
            return self._take_all()

    def look(self) -> float:
        """The same in the background; seconds until it wants to look again."""
        if self._stopping.is_set() or self._log.over or not self._guard.acquire(blocking=False):
            return self._check_seconds
        try:
            self._take_all()
        except FencedError:
            raise
        except ReopenError:
            return self._check_seconds  # the log was closed, or failed: whoever opens it goes on
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
        """Nothing is taken in meanwhile, and nothing is half taken in."""
        with self._guard:
            if self._held is not None:
                self._go_on()
            yield

    def stop(self) -> None:
        """Ends what is under way, soon: the log is about to be closed. Whoever opens it goes on."""
        self._stopping.set()

    # What

    def _take_all(self) -> int:
        if self._held is not None:
            self._go_on()
        self._has_open_entries = True
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

    def _take(self, one: Consignment) -> int:
        if one.is_within(self._log.next_offset):
            self._finish(one)  # its rows are there; that this is so could not be written down the last time
            return 1
        rows = ConsignmentRows(self._open_staging(), one)
        try:
            self._held = self._prepared(one, rows) if rows.is_read_once else self._verified(one, rows)
        except (DataError, NotFoundError, MessageTooLargeError) as error:
            self._refuse(one, error)
            return 0
        self._go_on()
        return 1

    def _verified(self, one: Consignment, rows: ConsignmentRows) -> _Held:
        """Looked through while others append."""
        rows.verify(self._check_frames)
        return _Held(self._placed_at(one, self._log.hold_appends()), rows)

    def _prepared(self, one: Consignment, rows: ConsignmentRows) -> _Held:
        """Looked through, and written into files that may become the next ones of the log; others wait meanwhile."""
        first_offset = self._log.hold_appends()
        try:
            prepared = PreparedRows(self._log, rows, first_offset, self._check_going_on)
            prepared.write(self._check_frames)
        except BaseException:
            self._log.release_appends()
            raise
        return _Held(self._placed_at(one, first_offset), rows, prepared)

    def _check_frames(self, frames: Frames) -> None:
        check_sizes(frames, self._max_message_bytes)
        if self._check_rows is not None:
            self._check_rows(frames)

    def _placed_at(self, one: Consignment, first_offset: int) -> Consignment:
        return msgspec.structs.replace(one, first_offset=first_offset, epoch=self._ledger.epoch)

    def _refuse(self, one: Consignment, error: TidelogError) -> None:
        _logger.error("%s: what %s handed over is refused: %s", self._log.directory, one.app, error)
        now_us = self._clock.now_us()
        self._ledger.change(lambda known: known.refuse(one.id, str(error), now_us))

    def _go_on(self) -> None:
        """Places what is to be placed, appends what is to be appended; then others may append again."""
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
        self._finish(held.consignment)

    def _let_go(self) -> None:
        self._held = None
        self._log.release_appends()

    def _place(self, held: _Held) -> None:
        """Writes down where it begins. Where the store gives no answer, it is asked until it does, now or later:
        the place may be written, or will be, and another message there would be taken for a row."""
        one = held.consignment
        assert one.first_offset is not None
        for pause_seconds in (*_PAUSES_SECONDS, None):
            try:
                document, version = self._ledger.load()
                placed = document.placed(one.id, one.first_offset, one.epoch)
                if placed.find(one.id) != one:
                    held.may_be_placed = False
                    raise DataError(f"{one.id} was changed by somebody else in the intake document")
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

    def _remember_places(self, document: IntakeDocument) -> None:
        if self._placed_rows is not None:
            self._placed_rows.remember(document)

    def _check_going_on(self) -> None:
        if self._stopping.is_set() or self._log.over:
            raise ClosedError("the log is closing", path=self._log.directory)

    def _append_rows(self, held: _Held) -> None:
        """Goes on with the first row that is not in the log, to the last."""
        one = held.consignment
        assert one.first_offset is not None
        if held.prepared is not None:
            self._log.adopt_held(held.prepared.segments)
            held.prepared = None
        for frames in held.rows.frames(self._log.next_offset - one.first_offset):
            self._check_going_on()
            self._log.append_held(frames)
        if one.rows and self._log.next_offset != one.next_offset:
            raise InternalError(f"{one.id} ends at {one.next_offset}, and the log at {self._log.next_offset}")

    def _finish(self, one: Consignment) -> None:
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
            consignments=counted.consignments + 1,
            rows=counted.rows + one.rows,
            bytes=counted.bytes + one.bytes,
        )

    def _clear_away(self, document: IntakeDocument) -> None:
        """Removes the parts of what can no longer be lost, then its entries: a crash in between leaves no orphan."""
        safe = self._safe_offset()
        done = {one.id for one in document.pending if one.is_taken and one.is_within(safe)}
        if not done:
            return
        objects = self._open_staging().objects
        for id in done:
            names = (info.key for info in objects.list(self._keys.consignment_prefix(id)))
            while some := list(islice(names, _DELETED_AT_ONCE)):
                objects.delete(some)
            objects.remove_folder(self._keys.consignment_prefix(id))
        self._ledger.change(lambda known: known.without(done))

    # Telling

    def _note(self, document: IntakeDocument) -> None:
        pending, refused = len(document.waiting), len(document.refused)
        self._statistics = msgspec.structs.replace(self._statistics, pending=pending, refused=refused)

    def _note_error(self, error: TidelogError) -> None:
        if self._statistics.last_error != str(error):
            _logger.warning("%s: nothing can be taken in now: %s", self._log.directory, error)
        self._statistics = msgspec.structs.replace(self._statistics, last_error=str(error))
