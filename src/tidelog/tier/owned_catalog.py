"""The catalog in the hands of an owner: publishing, sealing, moving the start, all under its epoch.

Invariants
- A descriptor is created once, under the key that its first offset gives it, and that is the next offset of the
  catalog. Publishing the same one again (its first answer was lost) does nothing.
- The start only moves forward, and moves before anything below it is removed: it is the written plan of a deletion.
- Descriptors are removed oldest first, and before their objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec

from tidelog.clock import Clock
from tidelog.errors import ConflictError, DataError, InputError, StoreUnavailableError, offsets_text
from tidelog.tier import owner as documents
from tidelog.tier.catalog import Catalog, Found
from tidelog.tier.descriptor import Descriptor, Reservation, encode_descriptor
from tidelog.tier.intake_document import decode_intake, encode_intake
from tidelog.tier.metadata.store import Check, Delete, Put
from tidelog.tier.owner import Cursor, EpochFloor, SealedMarker, StartMark
from tidelog.tier.ownership import Ownership, Step

_ATTEMPTS = 20
Result = TypeVar("Result")


class OwnedCatalog:
    """What an owner may do with the catalog of its topic."""

    def __init__(self, ownership: Ownership, clock: Clock) -> None:
        self.ownership = ownership
        self.catalog: Catalog = ownership.catalog
        self._keys = ownership.catalog.keys
        self._clock = clock
        self._clipped_at = 0
        # As they were before they were clipped.
        self._unclipped: dict[str, Cursor] = {}

    @property
    def epoch(self) -> int:
        return self.ownership.epoch

    # Taking over

    def settle_in(self, first_offset: int) -> int:
        """After the claim and before anything is accepted: no earlier owner can change anything from here on.

        Returns the catalog's next offset, which is final then. `first_offset` is where a topic without a past begins.
        """
        mark = self.catalog.start_mark()
        if mark is None:
            self._put_start(first_offset, None)
        if self.catalog.metadata.supports_multi_key:
            return self.catalog.next_offset()
        self._rewrite_what_others_may_change()
        return self._reserve()

    def _rewrite_what_others_may_change(self) -> None:
        self._retried(self._rewrite_start)
        self._retried(self._rewrite_intake)
        for name in self.catalog.subscriptions():
            self._retried(partial(self._rewrite_cursor, name))

    def _rewrite_intake(self) -> None:
        entry = self.catalog.metadata.get(self._keys.intake)
        if entry is not None:
            document = decode_intake(entry.value, entry.key).owned_by(self.epoch)
            self.ownership.change([Step(Put(entry.key, encode_intake(document)), entry.version)])

    def _rewrite_start(self) -> None:
        mark = self.catalog.start_mark()
        if mark is not None and mark[0].epoch != self.epoch:
            self._put_start(mark[0].start_offset, mark[1], deleted=mark[0].deleted)

    def _rewrite_cursor(self, name: str) -> None:
        found = self.catalog.cursor(name)
        if found is not None and found[0].epoch != self.epoch:
            self._put_cursor(name, found[0], found[1])

    def _reserve(self) -> int:
        """Takes the key of the next object. An earlier owner that is about to publish there gets it or loses it now."""
        return self._retried(self._reserve_once)

    def _reserve_once(self) -> int:
        offset = self.catalog.next_offset()
        found = self.catalog.find(offset)
        if found is not None and found.value.epoch > self.epoch:
            self.ownership.verify()
        reservation = Reservation(start_offset=offset, epoch=self.epoch)
        write = Put(self._keys.descriptor(offset), encode_descriptor(reservation))
        self.ownership.change([Step(write, None if found is None else found.version)])
        return offset

    def _retried(self, change: Callable[[], Result]) -> Result:
        """Others may be faster, but not for ever: each of them gets one change through at most."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return change()
            except ConflictError:
                continue
        return change()

    # Publishing

    def publish(self, descriptor: Descriptor) -> None:
        """Makes an object part of the topic. Publishing the same one twice is fine."""
        found = self.catalog.find(descriptor.start_offset)
        if found is not None and isinstance(found.value, Descriptor):
            self._already_published(found.value, descriptor)
        else:
            self._check_continues(descriptor)
            self.ownership.change([self._descriptor_step(descriptor, found), self._current_step(descriptor)])

    def _descriptor_step(self, descriptor: Descriptor, found: Found | None) -> Step:
        key = self._keys.descriptor(descriptor.start_offset)
        return Step(Put(key, encode_descriptor(descriptor)), None if found is None else found.version)

    def _current_step(self, descriptor: Descriptor) -> Step:
        value, version = self.catalog.moved_current(descriptor.start_offset)
        return Step(Put(self._keys.current, value), version, is_hint=True)

    def _check_continues(self, descriptor: Descriptor) -> None:
        expected = self.catalog.next_offset()
        if descriptor.start_offset != expected:
            self.ownership.verify()
            raise DataError(
                f"{descriptor.object_id} cannot be published: the catalog goes on at offset {expected}",
                operation="publish",
            )

    def _already_published(self, there: Descriptor, wanted: Descriptor) -> None:
        self.ownership.verify()
        if (there.object_id, there.checksum) != (wanted.object_id, wanted.checksum):
            raise DataError(
                f"{offsets_text(there.start_offset, there.end_offset)} are published already, as {there.object_id}",
                operation="publish",
            )
        current = self.catalog.current()
        if current is None or current[0] < there.start_offset:
            self.ownership.change([self._current_step(there)])

    # Sealing

    def seal(self, next_offset: int) -> None:
        """Writes the marker that says where the next owner goes on. Everything below must have been published."""
        published = self.catalog.next_offset()
        if published != next_offset:
            raise DataError(f"the topic ends at {next_offset}, the catalog at {published}", operation="seal")
        marker = SealedMarker(
            sealed=True,
            last_committed_offset=next_offset - 1 if next_offset else None,
            node=self.ownership.owner.node,
            epoch=self.epoch,
            sealed_us=self._clock.now_us(),
        )
        found = self.catalog.metadata.get(self._keys.state)
        write = Put(self._keys.state, documents.encode(marker))
        self.ownership.change([Step(write, None if found is None else found.version)])

    def unseal(self) -> None:
        """The topic is owned again. A marker that stays behind is of an older epoch, and is not believed."""
        found = self.catalog.metadata.get(self._keys.state)
        if found is not None:
            self._delete(self._keys.state, found.version)

    # The start, and what is below it

    def move_start(self, offset: int) -> None:
        """Nothing below is to be read any more. It never goes back: a smaller offset changes nothing."""
        mark = self.catalog.start_mark()
        if mark is None or mark[0].start_offset < offset:
            self._put_start(offset, None if mark is None else mark[1])

    def mark_deleted(self) -> None:
        """Writes down that all of the topic is to go. Whoever owns it next finishes that first."""
        mark = self.catalog.start_mark()
        self._put_start(self.catalog.next_offset(), None if mark is None else mark[1], deleted=True)

    def _put_start(self, offset: int, version: str | None, *, deleted: bool = False) -> None:
        now_us = self._clock.now_us()
        mark = StartMark(start_offset=offset, epoch=self.epoch, moved_us=now_us, deleted=deleted)
        self.ownership.change([Step(Put(self._keys.start, documents.encode(mark)), version)])

    def remove_descriptors(self, descriptors: Iterable[Descriptor]) -> None:
        """Takes objects out of the catalog. They are below the start, or lost.

        ConflictError when a compaction replaces one in that moment: what it is replaced by may have more than it.
        """
        for descriptor in descriptors:
            found = self.catalog.find(descriptor.start_offset)
            if found is not None and found.value == descriptor:
                self._remove_descriptor(self._keys.descriptor(descriptor.start_offset), found.version)

    def _remove_descriptor(self, key: str, version: str) -> None:
        if self.catalog.metadata.supports_multi_key:
            self.ownership.change([Step(Delete(key), version)])
        else:
            self.ownership.verify()
            self.catalog.metadata.remove(key, version)

    def _delete(self, key: str, version: str) -> None:
        """Removes an entry that nobody else may change any more.

        In a store of single keys on no condition: a conditional deletion leaves a stamp there, and they would add up.
        """
        if self.catalog.metadata.supports_multi_key:
            self.ownership.change([Step(Delete(key), version)])
        else:
            self.ownership.verify()
            self.catalog.metadata.delete(key)

    # Cursors

    def move_cursor(self, name: str, offset: int) -> None:
        """Remembers how far a subscription is: everything below an offset is done with, and nothing else."""
        if offset < 0:
            raise InputError(f"a cursor is an offset, not {offset}")
        found = self.catalog.cursor(name)
        known = Cursor(offset=offset, epoch=0, moved_us=0) if found is None else found[0]
        moved = msgspec.structs.replace(known, offset=offset, acked=(), failures=())
        self._put_cursor(name, moved, None if found is None else found[1])

    def store_cursor(self, name: str, cursor: Cursor) -> None:
        """Remembers a subscription as it stands now, under this owner's epoch."""
        found = self.catalog.cursor(name)
        self._put_cursor(name, cursor, None if found is None else found[1])

    def clip_cursors(self, next_offset: int) -> None:
        """Before anything is accepted: what an earlier owner had accepted and nobody else has seen is not the topic's.

        A cursor that is beyond the end would pass over the messages that get those offsets now. If none does in the
        end, `give_back` restores what was cut off.
        """
        self._clipped_at = next_offset
        for name in self.catalog.subscriptions():
            self._retried(partial(self._clip_cursor, name, next_offset))

    def _clip_cursor(self, name: str, next_offset: int) -> None:
        found = self.catalog.cursor(name)
        if found is not None and (clipped := found[0].clipped(next_offset)) != found[0]:
            self._put_cursor(name, clipped, found[1])
            self._unclipped[name] = found[0]

    def give_back(self) -> None:
        """Nothing was accepted under this claim: what the owner before has on its disk is the end of the topic again,
        and so are the acknowledgements of that.

        Cursors first: after a crash in between they are clipped by the next owner, as they were by this one.
        """
        for name, original in self._unclipped.items():
            with contextlib.suppress(ConflictError, StoreUnavailableError):  # messages come again
                self._retried(partial(self._restore_cursor, name, original))
        self.ownership.give_back_lineage()

    def _restore_cursor(self, name: str, original: Cursor) -> None:
        found = self.catalog.cursor(name)
        if found is not None and (restored := found[0].restored(original, self._clipped_at)) != found[0]:
            self._put_cursor(name, restored, found[1])

    def _put_cursor(self, name: str, cursor: Cursor, version: str | None) -> None:
        own = msgspec.structs.replace(cursor, epoch=self.epoch, moved_us=self._clock.now_us())
        self.ownership.change([Step(Put(self._keys.subscription(name), documents.encode(own)), version)])

    def delete_cursor(self, name: str) -> None:
        """Forgets a subscription. That there is none is fine.

        On its version, whatever that leaves in the store: a new owner goes on with the one that it has rewritten.
        """
        self._retried(partial(self._delete_cursor, name))

    def _delete_cursor(self, name: str) -> None:
        found = self.catalog.metadata.get(self._keys.subscription(name))
        if found is not None:
            self.ownership.change([Step(Delete(found.key), found.version)])

    # Deleting the topic

    def remove_everything(self) -> None:
        """All entries of the topic; the owner's last, so that a crash on the way can be finished by the next owner."""
        metadata = self.catalog.metadata
        self._raise_epoch_floor()
        keys = metadata.keys(self._keys.metadata_prefix)
        for key in sorted(keys, key=lambda key: key == self._keys.start):
            if key != self._keys.owner and (entry := metadata.get(key)) is not None:
                self._delete(key, entry.version)
        self.ownership.remove()

    def _raise_epoch_floor(self) -> None:
        """Kept for all topics in one place: a deleted topic leaves nothing of its own behind."""

        def raise_it() -> None:
            key, metadata = self._keys.epoch_floor, self.catalog.metadata
            entry = metadata.get(key)
            known = 0 if entry is None else documents.decode(entry.value, key, EpochFloor).epoch
            if known < self.epoch:
                write = Put(key, documents.encode(EpochFloor(epoch=self.epoch)))
                metadata.commit([Check(key, None if entry is None else entry.version)], [write])

        self._retried(raise_it)
