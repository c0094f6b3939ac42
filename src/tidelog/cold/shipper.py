"""The shipper: turns synced messages on the disk into objects, and objects into history.

    plan -> upload -> publish (descriptor and `cur`) -> uploader.ckpt

Invariants
- Everything below `shipped_offset` is in a published object. It only grows.
- Each object begins where the previous one ended. Several may be uploaded concurrently, and are published in order. An
  object is part of the topic when its descriptor is published, under this owner's epoch; until then it is nothing, and
  orphan removal deletes it.
- A failed attempt is retried as it was planned, under the same name; one whose publishing is undecided is published
  again, not uploaded again.
- Nothing at or above the gate is shipped, whatever the caller asks. Atomic batches are never split across objects.
- A damaged frame stops shipping there, with its file and byte in the statistics. Nothing after it counts as shipped.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from tidelog.clock import Clock, Stopwatch
from tidelog.codec import decode_document, encode_document
from tidelog.cold.catalog import Descriptor
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.settings import ShipperStatistics, TierSettings, with_live
from tidelog.cold.stale_catalog import refuse_stale_catalog
from tidelog.cold.upload import (
    Place,
    Uploaded,
    UploadPlan,
    bytes_behind,
    describe_object,
    place_of,
    plan_upload,
    upload_of,
    whole_groups,
)
from tidelog.errors import (
    ClosedError,
    DataError,
    FencedError,
    InternalError,
    TidelogError,
)
from tidelog.events import tell
from tidelog.files import Files, explained
from tidelog.log import Log
from tidelog.log.atomic_batches import GroupOf
from tidelog.store.keys import ObjectId
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, DaemonPool, in_thread
from tidelog.tracing import TRACING, record_span

# Objects that are planned and not published yet: uploaded several at a time, published one after the other.
#
# Invariants
# - They follow each other without a gap, in the order in which they will be published.
# - One that could not be uploaded stays as it was planned, and is uploaded again under the same name.
# - Without upload threads, the thread that needs the first one uploads it itself.


_Send = Callable[[ObjectId, UploadPlan], Uploaded]


class QueuedUpload:
    """One object between its plan and its publication."""

    def __init__(self, name: ObjectId, shipment: UploadPlan) -> None:
        self.name = name
        self.shipment = shipment
        self.may_be_sent = False
        """Whether it was looked for something of that name in the store, and there was nothing."""
        self._sending: Future[Uploaded] | None = None

    def begin(self, send: _Send, executor: Executor) -> None:
        """Sends it by another thread, if that is not under way or done."""
        if self._sending is None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: its waiters get the error
                self._sending = executor.submit(send, self.name, self.shipment)

    def sent(self, send: _Send) -> Uploaded:
        """The object in the store, once it is there."""
        if self._sending is None:
            return send(self.name, self.shipment)
        try:
            return self._sending.result()
        except CancelledError:
            raise ClosedError("the shipper is closed") from None
        except BaseException:
            self._sending = None
            raise


class UploadQueue:
    """The next objects of a log, at most `concurrency` of them."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._objects: deque[QueuedUpload] = deque()
        self._threads = DaemonPool(concurrency, "tidelog-ship") if concurrency > 1 else None

    def __bool__(self) -> bool:
        return bool(self._objects)

    @property
    def has_room(self) -> bool:
        return len(self._objects) < self._concurrency

    @property
    def first(self) -> QueuedUpload:
        return self._objects[0]

    @property
    def last(self) -> QueuedUpload:
        return self._objects[-1]

    def names(self) -> list[ObjectId]:
        """In order."""
        return [one.name for one in tuple(self._objects)]

    def add(self, outgoing: QueuedUpload) -> None:
        """Adds one more, after all others."""
        self._objects.append(outgoing)

    def begin_all(self, allow: Callable[[QueuedUpload], None], send: _Send) -> None:
        """Uploads what is not in flight yet, where there are threads for it. `allow` runs before the first attempt."""
        for outgoing in self._objects if self._threads is not None else (self._objects[0],):
            if not outgoing.may_be_sent:
                allow(outgoing)
                outgoing.may_be_sent = True
            if self._threads is not None:
                outgoing.begin(send, self._threads)

    def remove_first(self) -> None:
        """It is about to be published."""
        self._objects.popleft()

    def close(self) -> None:
        """Nothing more is begun; what is under way ends by itself, and nobody publishes it."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


# `uploader.ckpt`: where in the files the next object begins. A hint: the catalog says what has been shipped.
#
# Without it, or with one that the catalog or the file contradicts, the position is searched for in the files.


NAME = "uploader.ckpt"
_KIND = "uploader-checkpoint"
_VERSION = 1


class UploaderCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The offset that is next, its file and byte, and the object that was published last."""

    next_offset: int
    file_seq: int
    byte: int
    last_object_id: str
    epoch: int
    updated_us: int

    @property
    def place(self) -> Place:
        return Place(self.next_offset, self.file_seq, self.byte)


def write_uploader_checkpoint(files: Files, directory: Path, checkpoint: UploaderCheckpoint) -> None:
    """Replaces it, durably."""
    files.write_atomically(directory / NAME, encode_document(_KIND, _VERSION, checkpoint))


def read_uploader_checkpoint(files: Files, directory: Path) -> UploaderCheckpoint | None:
    """The checkpoint; None when there is none that can be used."""
    try:
        return decode_document(_KIND, _VERSION, files.read(directory / NAME), UploaderCheckpoint)
    except (OSError, DataError):
        return None


class ShipperCounters:
    """Counts for one shipper; any thread may take a snapshot."""

    def __init__(self) -> None:
        self.cycle_seconds = Stopwatch()
        self._objects_created = 0
        self._bytes_uploaded = 0
        self.raw_bytes_uploaded = 0
        self._errors = 0
        self.errors_in_a_row = 0
        self._last_error: str | None = None
        self._last_object_id: str | None = None
        self._uploading: dict[str, int] = {}

    @contextlib.contextmanager
    def uploading(self, object_id: str, raw_bytes: int) -> Iterator[None]:
        """While an object is being uploaded. Several may be."""
        self._uploading[object_id] = raw_bytes
        try:
            yield
        finally:
            self._uploading.pop(object_id, None)

    def uploaded(self, size: int, raw_bytes: int) -> None:
        self._bytes_uploaded += size
        self.raw_bytes_uploaded += raw_bytes

    def published(self, descriptor: Descriptor) -> None:
        self._objects_created += 1
        self._last_object_id = descriptor.object_id

    def failed(self, error: TidelogError) -> None:
        self._errors += 1
        self.errors_in_a_row += 1
        self._last_error = str(error)

    def succeeded(self) -> None:
        self.errors_in_a_row = 0
        self._last_error = None

    def snapshot(
        self,
        *,
        shipped_offset: int,
        lag_messages: int,
        lag_bytes: int,
        oldest_unshipped_us: int | None,
        now_us: int,
    ) -> ShipperStatistics:
        cycles = self.cycle_seconds.snapshot()
        uploading = dict(self._uploading)
        age_us = 0 if oldest_unshipped_us is None else max(0, now_us - oldest_unshipped_us)
        return ShipperStatistics(
            shipped_offset=shipped_offset,
            lag_messages=lag_messages,
            lag_bytes=lag_bytes,
            lag_seconds=age_us / 1_000_000,
            oldest_unshipped_us=oldest_unshipped_us,
            cycles=cycles.count,
            cycle_seconds=cycles,
            objects_created=self._objects_created,
            bytes_uploaded=self._bytes_uploaded,
            raw_bytes_uploaded=self.raw_bytes_uploaded,
            errors=self._errors,
            errors_in_a_row=self.errors_in_a_row,
            last_error=self._last_error,
            last_object_id=self._last_object_id,
            uploading=next(iter(uploading), None),
            uploading_raw_bytes=sum(uploading.values()),
        )


_logger = logging.getLogger("tidelog.cold")
Gate = Callable[[], int]
Send = Callable[[UploadPlan, str], Uploaded]


class Shipper:
    """Ships one log. `gate` gives the first offset that must not be shipped yet; without one, all may.

    `concurrency` objects are sent at once. `first_position` is for a log whose objects say how many bytes of frames are
    before them: how many are before `next_offset`, if nothing was shipped yet.
    """

    def __init__(
        self,
        log: Log,
        owned: OwnedCatalog,
        objects: ObjectStore,
        settings: TierSettings,
        clock: Clock,
        time_field: int | None,
        next_offset: int,
        gate: Gate | None = None,
        group_of: GroupOf | None = None,
        concurrency: int = 1,
        first_position: int | None = None,
    ) -> None:
        self.shipped_offset = next_offset
        self.gate = gate
        self.on_published: Callable[[int], None] | None = None
        """Called with the new `shipped_offset` after each object; an error it raises is logged, and shipping
        continues."""
        self.flushed_offset: Callable[[], int] = lambda: 0
        """Everything below is in the store otherwise than by shipping (`flush_log.py`), and no loss of the disk costs
        it."""
        self.send: Send = self._send_from_here
        """Sends the frames of a shipment as the object of this key. A job has that done by workers."""
        self._group_of = group_of
        self._log = log
        self._owned = owned
        self._objects = objects
        self._settings = settings
        self._clock = clock
        self._time_field = time_field
        self._shipping = Lock()
        self._is_closed = False
        self._published_us = 0
        self._next_at_opening = log.next_offset
        self._resume = self._known_place()
        self._looked_up: Place | None = None
        self._caught_up_us: int | None = None
        """When nothing was seen to wait for the last time."""
        self._reached_time_us: int | None = None
        self._position = first_position
        self._knows_newest = False
        self._has_looked = False
        self._outgoing = UploadQueue(concurrency)
        self._unpublished: tuple[Descriptor, Place] | None = None
        self._waiting_since: float | None = None
        self._object_began = 0.0
        self._counters = ShipperCounters()

    def _known_place(self) -> Place | None:
        checkpoint = read_uploader_checkpoint(self._log.files, self._log.directory)
        if checkpoint is None:
            return None
        self._published_us = checkpoint.updated_us
        return checkpoint.place if checkpoint.next_offset == self.shipped_offset else None

    # Shipping

    def ship(self, max_objects: int | None = None) -> int:
        """Ships everything that is synced and below the gate now; returns the first offset that is not shipped.

        After `max_objects` it leaves the rest for the next call.
        """
        stop_offset = whole_groups(self._log, self._allowed(), self._group_of)
        with self._shipping:
            begin = self._clock.monotonic()
            try:
                with explained("ship", self._log.directory):
                    self._ship_up_to(stop_offset, max_objects)
            except TidelogError as error:
                self._counters.failed(error)
                raise
            finally:
                seconds = self._clock.monotonic() - begin
                self._counters.cycle_seconds.add(seconds)
                if TRACING.is_on:
                    record_span("tidelog.ship", seconds, self._traced())
            self._counters.succeeded()
            if self.shipped_offset < self._log.next_offset:
                self._waiting_since = begin  # what is left came while the rest was shipped
        return self.shipped_offset

    def _traced(self) -> dict[str, Any]:
        subject = {f"tidelog.{noun}": name for noun, name in self._log.subject.items()}
        return {**subject, "tidelog.shipped_offset": self.shipped_offset}

    def _allowed(self) -> int:
        durable = self._log.durable_offset
        return durable if self.gate is None else min(durable, self.gate())

    def _ship_up_to(self, stop_offset: int, max_objects: int | None) -> None:
        left = sys.maxsize if max_objects is None else max_objects
        while self.shipped_offset < stop_offset and left > 0:
            self._ship_one(stop_offset)
            left -= 1

    def _ship_one(self, stop_offset: int) -> None:
        self._object_began = self._clock.monotonic()
        if self._unpublished is None:
            self._plan_ahead(stop_offset)
            self._unpublished = self._sent(), self._outgoing.first.shipment.end
            self._outgoing.remove_first()
        self._check_open()
        descriptor, end = self._unpublished
        self._owned.publish(descriptor)
        self._unpublished = None
        self._published(descriptor, end)

    def _plan_ahead(self, stop_offset: int) -> None:
        """What failed before is tried again as it was planned."""
        while self._outgoing.has_room:
            resume = self._outgoing.last.shipment.end if self._outgoing else self._resume
            offset = self._outgoing.last.shipment.next_offset if self._outgoing else self.shipped_offset
            if offset >= stop_offset:
                return
            shipment = plan_upload(
                self._log, offset, stop_offset, self._settings.max_object_bytes, resume, group_of=self._group_of
            )
            assert shipment is not None, "what is synced is in the files"
            name = ObjectId(shipment.first_offset, shipment.next_offset - 1, self._owned.epoch)
            self._outgoing.add(QueuedUpload(name, shipment))

    def _sent(self) -> Descriptor:
        """The first of the planned objects, once it is in the store; others are in flight meanwhile."""
        self._check_open()
        self._learn_from_newest()  # what may fail comes before the upload, which is not to be made twice
        self._outgoing.begin_all(self._refuse_to_overwrite, self._send)
        outgoing = self._outgoing.first
        return self._describe(outgoing.name, outgoing.shipment, outgoing.sent(self._send))

    def _send(self, name: ObjectId, shipment: UploadPlan) -> Uploaded:
        with self._counters.uploading(str(name), shipment.raw_bytes):
            uploaded = self.send(shipment, self._owned.catalog.keys.object(name))
        self._counters.uploaded(uploaded.info.size, shipment.raw_bytes)
        return uploaded

    def _send_from_here(self, shipment: UploadPlan, key: str) -> Uploaded:
        upload = upload_of(self._log.files, shipment, self._log_id, self._settings, self._time_field)
        return upload.send(self._objects, key)

    @property
    def _log_id(self) -> str:
        return self._owned.ownership.owner.log_id

    def _refuse_to_overwrite(self, outgoing: QueuedUpload) -> None:
        """A name is used by one owner, so an object under a new name was uploaded by another node with the same
        epoch."""
        refuse_to_overwrite(self._owned, self._objects, outgoing.name)
        if not self._has_looked:
            refuse_older_catalog(self._owned, self._objects)
            self._has_looked = True

    def _describe(self, name: ObjectId, shipment: UploadPlan, uploaded: Uploaded) -> Descriptor:
        times = [time for time in (self._reached_time_us, uploaded.last_time_us) if time is not None]
        return describe_object(
            *(name, shipment, uploaded, self._settings.ship_compression, self._log_id),
            reached_time_us=max(times, default=None),
            created_us=self._clock.now_us(),
            position=msgspec.UNSET if self._position is None else self._position,
        )

    def _learn_from_newest(self) -> None:
        if self._knows_newest:
            return
        newest = self._owned.catalog.newest()
        if newest is not None:
            self._reached_time_us = newest.reached_time_us
            if self._position is not None:
                self._position = newest.start_position + newest.raw_size
        self._knows_newest = True

    def _published(self, descriptor: Descriptor, end: Place) -> None:
        tell(
            _logger,
            "object_shipped",
            **self._log.subject,
            object=descriptor.object_id,
            first_offset=descriptor.start_offset,
            next_offset=descriptor.next_offset,
            bytes=descriptor.size,
            raw_bytes=descriptor.raw_size,
            epoch=descriptor.epoch,
            seconds=self._clock.monotonic() - self._object_began,
        )
        self._reached_time_us = descriptor.reached_time_us
        if self._position is not None:
            self._position += descriptor.raw_size
        self._resume = end
        self.shipped_offset = descriptor.next_offset
        self._waiting_since = None
        self._counters.published(descriptor)
        checkpoint = UploaderCheckpoint(
            next_offset=end.offset,
            file_seq=end.seq,
            byte=end.byte,
            last_object_id=descriptor.object_id,
            epoch=descriptor.epoch,
            updated_us=self._clock.now_us(),
        )
        try:
            write_uploader_checkpoint(self._log.files, self._log.directory, checkpoint)
        except OSError as error:
            _logger.warning("%s: uploader.ckpt could not be written: %s", self._log.directory, error)
        self._tell_published()

    def _tell_published(self) -> None:
        if self.on_published is None:
            return
        try:
            self.on_published(self.shipped_offset)
        except FencedError:
            raise
        except TidelogError as error:
            _logger.warning("%s: what goes with a published object failed: %s", self._log.directory, error)

    @property
    def raw_bytes_shipped(self) -> int:
        """How many bytes of frames were uploaded since it was made."""
        return self._counters.raw_bytes_uploaded

    @property
    def shipped_position(self) -> int:
        """How many bytes of frames are before `shipped_offset`; only for a log whose objects say so."""
        self._learn_from_newest()
        assert self._position is not None
        return self._position

    # In the background

    def configure(self, settings: TierSettings) -> None:
        """When to ship from now on. How objects are made stays: some may be under way."""
        self._settings = with_live(self._settings, settings)

    def ship_if_due(self) -> float:
        """One background round; returns the seconds until the next.

        `NEVER` when there is nothing to ship: the next write to the disk wakes it.
        """
        if self._is_due():
            self.ship()
        is_all_shipped = self.shipped_offset >= self._log.next_offset
        return NEVER if is_all_shipped else self._settings.ship_interval_seconds

    def _is_due(self) -> bool:
        if self.shipped_offset >= self._allowed():
            self._waiting_since = None if self.shipped_offset >= self._log.next_offset else self._waiting_since
            return False
        now = self._clock.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now - self._age_at_opening_seconds()
        if self._counters.errors_in_a_row or now - self._waiting_since >= self._settings.ship_max_delay_seconds:
            return True
        return bytes_behind(self._log, self.shipped_offset, self._resume) >= self._settings.ship_min_bytes

    def _age_at_opening_seconds(self) -> float:
        """How long what is unshipped had waited when the log was opened: restarts must not put shipping off for ever.

        A message's own time counts where it can be true: after the last object, and not in the future. Otherwise it
        may have waited since the last object, or always.
        """
        if self.shipped_offset >= self._next_at_opening:
            return 0.0
        now_us, said_us = self._clock.now_us(), self._time_at(self.shipped_offset)
        can_be_true = said_us is not None and self._published_us <= said_us <= now_us
        since_us = said_us if said_us is not None and can_be_true else self._published_us
        return max(0, now_us - since_us) / 1_000_000

    def close(self) -> None:
        """Nothing is sent or published from now on; what is under way is given up before it is published."""
        self._is_closed = True
        self._outgoing.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the shipper is closed", path=self._log.directory)

    # Looking at it

    def now_us(self) -> int:
        """The time by this shipper's clock."""
        return self._clock.now_us()

    def in_flight(self) -> list[str]:
        """Keys of objects that are being uploaded, or are uploaded and about to be published."""
        names, unpublished = self._outgoing.names(), self._unpublished
        names += [] if unpublished is None else [unpublished[0].name]
        return [self._owned.catalog.keys.object(name) for name in names]

    def statistics(self) -> ShipperStatistics:
        next_offset = self._log.next_offset
        safe = max(self.shipped_offset, self.flushed_offset())
        waiting, now_us = next_offset - safe, self._clock.now_us()
        if not waiting:
            self._caught_up_us = now_us
        return self._counters.snapshot(
            shipped_offset=self.shipped_offset,
            lag_messages=waiting,
            lag_bytes=bytes_behind(self._log, safe, self._place_of(safe)) if waiting else 0,
            oldest_unshipped_us=self._arrived_us(safe) if waiting else None,
            now_us=now_us,
        )

    def _place_of(self, offset: int) -> Place | None:
        """Where the frame of an offset begins; what the last object does not say is looked for once."""
        if self._resume is not None and self._resume.offset == offset:
            return self._resume
        known = self._looked_up
        if known is None or known.offset != offset:
            try:
                known = place_of(self._log.files, self._log.parts(offset, self._log.next_offset), offset)
            except (TidelogError, OSError):
                return None  # damage is met again when it is shipped
            self._looked_up = known
        return known

    def _arrived_us(self, offset: int) -> int | None:
        """When a message came: what it says itself, unless everything before it was seen in the store since. One that
        was appended again has the time that it had before."""
        said_us = self._time_at(offset)
        return said_us if said_us is None or self._caught_up_us is None else max(said_us, self._caught_up_us)

    def _time_at(self, offset: int) -> int | None:
        """The time of a message on this disk, as it says itself."""
        if self._time_field is None:
            return None
        try:
            batch = self._log.read(offset, offset + 1).next_batch()
        except TidelogError:
            return None
        if batch is None:
            return None
        payload = batch.payloads()[0]
        field = payload[self._time_field : self._time_field + 8]
        return int.from_bytes(field, "little", signed=True) if len(field) == 8 else None


def refuse_to_overwrite(owned: OwnedCatalog, objects: ObjectStore, name: ObjectId) -> None:
    """DataError where an object has the name of the owner's next one."""
    key = owned.catalog.keys.object(name)
    if objects.exists(key):
        raise DataError(
            f"{key} already exists: another process ships this {owned.catalog.keys.noun} to {objects.url}",
            operation="ship",
            hint="Every owner of it must use the same metadata; name it when the directory is opened",
        )


def refuse_older_catalog(owned: OwnedCatalog, objects: ObjectStore) -> None:
    """Once, before the first object: a machine that was set back would ship other messages under known offsets."""
    ownership = owned.ownership
    known_epoch = ownership.epoch - 1 if ownership.previous is None else ownership.previous.epoch
    try:
        refuse_stale_catalog(owned.catalog, objects, known_epoch)
    except DataError:
        ownership.verify()  # a later owner has objects that are not ours to wonder about
        raise


# Group commit to the object store: callers that wait for their messages to be shipped share one object.
#
# Invariants
# - A waiter is resolved only after an object that holds its message is published, or with the error of the round that
#   should have published it.
# - One round at a time. All waiters that arrive during a round share the next one.
# - No thread runs without waiters: the thread that runs the rounds ends with the last waiter.


class _Waiter(NamedTuple):
    offset: int
    answer: Future[None]


class ShipWaiters:
    """The waiters of one log. `ship` publishes all that is accepted and returns the first unshipped offset."""

    def __init__(self, ship: Callable[[], int]) -> None:
        self._ship = ship
        self._guard = Lock()
        self._waiting: list[_Waiter] = []
        self._is_running = False

    def join(self, offset: int) -> Future[None]:
        """Done once the message at `offset`, which must be accepted already, is in the store."""
        answer: Future[None] = Future()
        with self._guard:
            self._waiting.append(_Waiter(offset, answer))
            must_start, self._is_running = not self._is_running, True
        if must_start:
            in_thread(self._run_rounds, "tidelog-ship-now")
        return answer

    def _run_rounds(self) -> None:
        while (waiting := self._next_round()) is not None:
            try:
                shipped_offset = self._ship()
            except BaseException as error:  # noqa: BLE001 - the waiters get it
                for waiter in waiting:
                    waiter.answer.set_exception(error)
            else:
                for waiter in waiting:
                    _resolve(waiter, shipped_offset)

    def _next_round(self) -> list[_Waiter] | None:
        """The waiters that share the next round; None when there are none, and the thread ends."""
        with self._guard:
            waiting, self._waiting = self._waiting, []
            self._is_running = bool(waiting)
        if not waiting:
            return None
        return [waiter for waiter in waiting if waiter.answer.set_running_or_notify_cancel()]


def _resolve(waiter: _Waiter, shipped_offset: int) -> None:
    if waiter.offset < shipped_offset:
        waiter.answer.set_result(None)
    else:
        waiter.answer.set_exception(
            InternalError(f"a round shipped up to {shipped_offset} and left out offset {waiter.offset}")
        )
