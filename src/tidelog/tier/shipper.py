"""The shipper: turns what is synced on the disk into objects, and objects into history.

    plan -> upload -> publish (descriptor and `cur`) -> uploader.ckpt

Invariants
- Everything below `shipped_offset` is in a published object. It only grows.
- One object after the other, each beginning where the one before ended. Several may be sent at once (`outgoing.py`),
  and are published in order. An object is part of the topic when its descriptor is published, under this owner's epoch;
  until then it is nothing, and a sweep removes it.
- An attempt that failed is made again as it was planned, under the same name; one whose publishing is undecided is
  published again, not uploaded again.
- Nothing at or above the gate is shipped, whoever asks. Messages that count only together are in one object.
- A damaged frame stops shipping there, with its file and byte in the statistics. Nothing behind it counts as shipped.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.errors import ClosedError, DataError, FencedError, NotFoundError, StoreUnavailableError, TidelogError
from tidelog.files import explained
from tidelog.log import Log
from tidelog.log.groups import GroupOf
from tidelog.tier.background import NEVER
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import ObjectId
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.older_catalog import refuse_older_catalog
from tidelog.tier.outgoing import Outgoing, OutgoingQueue
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.shipment import Place, Shipment, bytes_behind, plan_shipment, whole_groups
from tidelog.tier.shipper_statistics import ShipperCounters, ShipperStatistics
from tidelog.tier.tier_settings import TierSettings
from tidelog.tier.upload import Uploaded, upload_of
from tidelog.tier.uploader_checkpoint import (
    UploaderCheckpoint,
    read_uploader_checkpoint,
    write_uploader_checkpoint,
)

_logger = logging.getLogger("tidelog.tier")
_FIRST_PAUSE_SECONDS = 0.5
Gate = Callable[[], int]
Send = Callable[[Shipment, str], Uploaded]


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
        """Called with the new `shipped_offset` after each object; what it raises is logged, and shipping goes on."""
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
        self._reached_time_us: int | None = None
        self._position = first_position
        self._knows_newest = False
        self._has_looked = False
        self._outgoing = OutgoingQueue(concurrency)
        self._unpublished: tuple[Descriptor, Place] | None = None
        self._waiting_since: float | None = None
        self._failures = 0
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
                self._counters.cycle_seconds.add(self._clock.monotonic() - begin)
            self._counters.succeeded()
            if self.shipped_offset < self._log.next_offset:
                self._waiting_since = begin  # what is left came while the rest was shipped
        return self.shipped_offset

    def _allowed(self) -> int:
        durable = self._log.durable_offset
        return durable if self.gate is None else min(durable, self.gate())

    def _ship_up_to(self, stop_offset: int, max_objects: int | None) -> None:
        left = sys.maxsize if max_objects is None else max_objects
        while self.shipped_offset < stop_offset and left > 0:
            self._ship_one(stop_offset)
            left -= 1

    def _ship_one(self, stop_offset: int) -> None:
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
            shipment = plan_shipment(
                *(self._log, offset, stop_offset, self._settings.max_object_bytes, resume), group_of=self._group_of
            )
            assert shipment is not None, "what is synced is in the files"
            name = ObjectId(shipment.first_offset, shipment.next_offset - 1, self._owned.epoch)
            self._outgoing.add(Outgoing(name, shipment))

    def _sent(self) -> Descriptor:
        """The first of those that are planned, once it is in the store; others are on their way meanwhile."""
        self._check_open()
        self._learn_from_newest()  # what may fail comes before the upload, which is not to be made twice
        self._outgoing.begin_all(self._refuse_to_overwrite, self._send)
        outgoing = self._outgoing.first
        return self._describe(outgoing.name, outgoing.shipment, outgoing.sent(self._send))

    def _send(self, name: ObjectId, shipment: Shipment) -> Uploaded:
        with self._counters.uploading(str(name), shipment.raw_bytes):
            uploaded = self.send(shipment, self._owned.catalog.keys.object(name))
        self._counters.uploaded(uploaded.info.size, shipment.raw_bytes)
        return uploaded

    def _send_from_here(self, shipment: Shipment, key: str) -> Uploaded:
        upload = upload_of(self._log.files, shipment, self._log_id, self._settings, self._time_field)
        return upload.send(self._objects, key)

    @property
    def _log_id(self) -> str:
        return self._owned.ownership.owner.log_id

    def _refuse_to_overwrite(self, outgoing: Outgoing) -> None:
        """A name is used by one owner, so what is there under a new one was sent by somebody with the same epoch."""
        key = self._owned.catalog.keys.object(outgoing.name)
        with contextlib.suppress(NotFoundError):
            self._objects.head(key)
            raise DataError(
                f"{key} is there already: somebody else ships this {self._owned.catalog.keys.noun} to "
                f"{self._objects.url}",
                operation="ship",
                hint="Every owner of it must use the same metadata; name it when the directory is opened",
            )
        if not self._has_looked:
            self._refuse_older_catalog()
            self._has_looked = True

    def _refuse_older_catalog(self) -> None:
        """Once, before the first object: a machine that was set back would ship other messages under known offsets."""
        ownership = self._owned.ownership
        known_epoch = ownership.epoch - 1 if ownership.previous is None else ownership.previous.epoch
        try:
            refuse_older_catalog(self._owned.catalog, self._objects, known_epoch)
        except DataError:
            ownership.verify()  # a later owner has objects that are not ours to wonder about
            raise

    def _describe(self, name: ObjectId, shipment: Shipment, uploaded: Uploaded) -> Descriptor:
        times = [time for time in (self._reached_time_us, uploaded.last_time_us) if time is not None]
        return Descriptor(
            object_id=str(name),
            start_offset=name.start,
            end_offset=name.end,
            first_time_us=uploaded.first_time_us,
            last_time_us=uploaded.last_time_us,
            reached_time_us=max(times, default=None),
            size=uploaded.info.size,
            raw_size=shipment.raw_bytes,
            etag=uploaded.info.etag,
            checksum=uploaded.checksum,
            codec=self._settings.ship_compression,
            epoch=name.epoch,
            created_us=self._clock.now_us(),
            log_id=self._log_id,
            offset_index=uploaded.offset_index,
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
    def shipped_position(self) -> int:
        """How many bytes of frames are before `shipped_offset`; only for a log whose objects say so."""
        self._learn_from_newest()
        assert self._position is not None
        return self._position

    # In the background

    def ship_if_due(self) -> float:
        """One look in the background; returns the seconds until the next. Only FencedError gets out.

        `NEVER` when there is nothing to ship: whoever brings something to the disk wakes it.
        """
        try:
            if self._is_due():
                self.ship()
            self._failures = 0
            is_all_shipped = self.shipped_offset >= self._log.next_offset
            return NEVER if is_all_shipped else self._settings.ship_interval_seconds
        except FencedError:
            raise
        except ClosedError:
            return self._settings.ship_retry_max_seconds
        except TidelogError as error:
            return self._pause_after(error)

    def _is_due(self) -> bool:
        if self.shipped_offset >= self._allowed():
            self._waiting_since = None if self.shipped_offset >= self._log.next_offset else self._waiting_since
            return False
        now = self._clock.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now - self._age_at_opening_seconds()
        if self._failures or now - self._waiting_since >= self._settings.ship_max_delay_seconds:
            return True
        return bytes_behind(self._log, self.shipped_offset, self._resume) >= self._settings.ship_min_bytes

    def _age_at_opening_seconds(self) -> float:
        """How long what is unshipped had waited when the log was opened: restarts must not put shipping off for ever.

        A message's own time counts where it can be true: after the last object, and not in the future. Otherwise it
        may have waited since the last object, or always.
        """
        if self.shipped_offset >= self._next_at_opening:
            return 0.0
        now_us, said_us = self._clock.now_us(), self._oldest_unshipped_us()
        can_be_true = said_us is not None and self._published_us <= said_us <= now_us
        since_us = said_us if said_us is not None and can_be_true else self._published_us
        return max(0, now_us - since_us) / 1_000_000

    def _pause_after(self, error: TidelogError) -> float:
        """Doubled each time, with some chance in it, so that many shippers do not come back all at once."""
        log_it = _logger.warning if isinstance(error, StoreUnavailableError) else _logger.error
        log_it("%s: shipping failed and is tried again: %s", self._log.directory, error)
        longest = self._settings.ship_retry_max_seconds
        pause = min(longest, _FIRST_PAUSE_SECONDS * (1 << min(self._failures, 30)))
        self._failures += 1
        return pause * random.uniform(0.5, 1.0)

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
        """Keys of objects that are on their way, or are there and about to be published."""
        names, unpublished = self._outgoing.names(), self._unpublished
        names += [] if unpublished is None else [unpublished[0].name]
        return [self._owned.catalog.keys.object(name) for name in names]

    def statistics(self) -> ShipperStatistics:
        """One moment of it."""
        next_offset = self._log.next_offset
        waiting = next_offset - self.shipped_offset
        return self._counters.snapshot(
            shipped_offset=self.shipped_offset,
            lag_messages=waiting,
            lag_bytes=bytes_behind(self._log, self.shipped_offset, self._resume) if waiting else 0,
            oldest_unshipped_us=self._oldest_unshipped_us() if waiting else None,
            now_us=self._clock.now_us(),
        )

    def _oldest_unshipped_us(self) -> int | None:
        """The time of the first message that is not shipped, as it says itself."""
        if self._time_field is None:
            return None
        offset = self.shipped_offset
        try:
            batch = self._log.read(offset, offset + 1).next_batch()
        except TidelogError:
            return None
        if batch is None:
            return None
        payload = batch.payloads()[0]
        field = payload[self._time_field : self._time_field + 8]
        return int.from_bytes(field, "little", signed=True) if len(field) == 8 else None
