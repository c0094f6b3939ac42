"""Ownership of a log: claimed by compare-and-swap, checked with every change; and the catalog as its owner changes it.

Invariants
- An epoch is used once. A claim takes the next one, on the version of the entry that was read.
- Every change of a topic goes through `change`. Where the store can, the owner's entry is checked in the same commit:
  once another node has claimed the topic, no change of ours succeeds, however long we slept.
- Where it cannot (one key at a time), the owner's entry is read before each change, and every entry that an earlier
  owner may be about to change has been rewritten by the new owner when it took over: the change then fails on the
  entry's own version. `bucket.py` has the whole argument.
- A claim is made on the owner document that its reasons were read from: if that has changed since, ConflictError.
- A descriptor is created once, under the key of its first offset, which is the next offset of the catalog. Publishing
  the same one again (its first answer was lost) does nothing.
- The start only moves forward, and moves before anything below it is removed: it is the recorded plan of a deletion.
- Descriptors are removed oldest first, and before their objects.

Epochs are what makes this safe. `lease.py` ensures that nobody claims what a live node holds by accident.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.codec import decode_document, encode_document
from tidelog.cold.catalog import (
    Catalog,
    Descriptor,
    EpochFloor,
    EpochStarts,
    Found,
    Owner,
    Reservation,
    SealedMarker,
    StartMark,
    encode_descriptor,
)
from tidelog.cold.cursor import Cursor
from tidelog.cold.lease import NodeLease
from tidelog.errors import (
    ConflictError,
    DataError,
    FencedError,
    Hint,
    InputError,
    StoreUnavailableError,
    TidelogError,
    offsets_text,
)
from tidelog.files import Files
from tidelog.log.binding import new_log_id
from tidelog.store.document import Step, VersionedDocument, decode_mapping, encode_json, retried
from tidelog.store.keys import FlushSource
from tidelog.store.metadata.base import Check, Delete, MetadataStore, Put
from tidelog.store.scheduler import Background, Task

RESCUE_HINT = "What it had accepted and not shipped stays on its disk: `tidelog topic rescue` shows it"
_HINTS = {
    "engine": Hint(
        "Its orchestrator still has what it had not shipped; `tidelog.restore_engine` makes a new copy of it. "
        "A replica that shares its store with others is opened again, and follows the new owner",
        command="Its orchestrator still has what it had not shipped; `tidelog engine restore` makes a new copy of it. "
        "A replica that shares its store with others is opened again, and follows the new owner",
    )
}


class Ownership:
    """One claim. It is valid until another node claims the topic; then every use of it raises FencedError.

    It is the fence of every document of the topic that its owner alone changes.
    """

    def __init__(self, catalog: Catalog, owner: Owner, version: str, previous: Owner | None) -> None:
        self.catalog = catalog
        self.owner = owner
        self.previous = previous
        self._version = version
        # Held while the owner document is rewritten under this claim: a writer that finds another version then waits.
        self._rewriting = Lock()

    @property
    def version(self) -> str:
        """Of the owner's entry, as this claim left it."""
        return self._version

    @property
    def epoch(self) -> int:
        return self.owner.epoch

    def verify(self) -> None:
        """Asks the store whether the claim still holds."""
        found = self.catalog.owner()
        if found is not None and found[1] == self._version:
            return
        with self._rewriting:
            found = self.catalog.owner()
            if found is None or found[1] != self._version:
                raise self._fenced(None if found is None else found[0])

    def change(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """All steps at once where the store can, else one after the other in this order. Returns the new versions."""
        metadata = self.catalog.metadata
        if not metadata.supports_multi_key:
            self.verify()
            return {key: version for step in steps for key, version in self._change_one(step).items()}
        version = self._version
        checks = [Check(self.catalog.keys.owner, version)]
        checks += [Check(step.write.key, step.version) for step in steps]
        try:
            return metadata.commit(checks, [step.write for step in steps])
        except ConflictError:
            self.verify()
            if version == self._version:
                raise
        # The owner document was rewritten under this claim meanwhile, as the first flush does.
        checks[0] = Check(self.catalog.keys.owner, self._version)
        return metadata.commit(checks, [step.write for step in steps])

    def _change_one(self, step: Step) -> Mapping[str, str]:
        try:
            return self.catalog.metadata.commit([Check(step.write.key, step.version)], [step.write])
        except ConflictError:
            self.verify()
            if not step.is_hint:
                raise
            return {}

    def give_back_incarnation(self) -> None:
        """Nothing was accepted under this claim: what the one before left on its disk is still the end of the topic."""
        if self.previous is None or self.previous.incarnation == self.owner.incarnation:
            return
        self._rewrite(msgspec.structs.replace(self.owner, incarnation=self.previous.incarnation, session=""))

    def give_back_incarnation_with(self, step: Step) -> None:
        """The same in one transaction with another change: one that failed gives nothing back.
        In a store of single keys it follows, unless the next owner is faster."""
        metadata, key = self.catalog.metadata, self.catalog.keys.owner
        if self.previous is None or self.previous.incarnation == self.owner.incarnation:
            self.change([step])
            return
        if not metadata.supports_multi_key:
            self.change([step])
            with contextlib.suppress(ConflictError):
                self.give_back_incarnation()
            return
        owner = msgspec.structs.replace(self.owner, incarnation=self.previous.incarnation)
        try:
            with self._rewriting:
                checks = [Check(key, self._version), Check(step.write.key, step.version)]
                self._version = metadata.commit(checks, [Put(key, encode_json(owner)), step.write])[key]
                self.owner = owner
        except ConflictError:
            self.verify()
            raise

    def release(self) -> None:
        """This node no longer has it open, and runs on: others may open it at once."""
        if self.owner.session:
            self._rewrite(msgspec.structs.replace(self.owner, session=""))

    def name_flushes(self, source: FlushSource) -> None:
        """From here on the next owner looks there for messages that the catalog does not have."""
        try:
            self._rewrite(msgspec.structs.replace(self.owner, flushed=source))
        except ConflictError:
            self.verify()
            raise

    def _rewrite(self, owner: Owner) -> None:
        with self._rewriting:
            self._version = self.catalog.owner_document().replace(owner, self._version)
            self.owner = owner

    def remove(self) -> None:
        """The last change of a topic that is being deleted: from here on nobody owns it."""
        key = self.catalog.keys.owner
        try:
            self.catalog.metadata.commit([Check(key, self._version)], [Delete(key)])
        except ConflictError:
            self.verify()
            raise

    def _fenced(self, by: Owner | None) -> FencedError:
        noun = self.catalog.keys.noun
        who = (
            f"this {noun} was deleted elsewhere"
            if by is None
            else f"this {noun} was taken over by node {by.who} (epoch {by.epoch})"
        )
        hint = _HINTS.get(noun, RESCUE_HINT)
        return FencedError(f"{who}; this copy (epoch {self.epoch}) can no longer ship", hint=hint)


def new_claim() -> str:
    """A name for a claim that nobody else has."""
    return secrets.token_hex(8)


FoundOwner = tuple[Owner, str] | None
"""An owner document and its version; None where there is none."""


def claim_topic(
    catalog: Catalog,
    found: FoundOwner,
    lease: NodeLease,
    clock: Clock,
    claim: str,
    min_epoch: int = 1,
    log_id: str | None = None,
    is_sealed: bool = False,
) -> Ownership:
    """Claims the epoch after that of the owner document that was found; ConflictError when it is another by now.

    `log_id` is that of the files here: a log that nobody has claimed before keeps it. `is_sealed`: the catalog has all
    of it.
    """
    previous = None if found is None else found[0]
    before = catalog.epoch_floor() if previous is None else previous.epoch
    lease.hold()
    owner = Owner(
        epoch=max(before + 1, min_epoch),
        claim=claim,
        incarnation=claim,
        node=lease.node,
        claimed_us=clock.now_us(),
        session=lease.session,
        log_id=previous.log_id if previous is not None else log_id or new_log_id(),
        flushed=None if previous is None or is_sealed else previous.flushed,
        node_name=lease.node_name or msgspec.UNSET,
    )
    try:
        version = catalog.owner_document().replace(owner, None if found is None else found[1])
    except ConflictError as error:
        raise claimed_meanwhile(catalog) from error
    return Ownership(catalog, owner, version, previous)


def give_back_unknown_claim(catalog: Catalog, lease: NodeLease) -> None:
    """For what is not open here: a claim of this session whose answer was lost does not stay closed to others."""
    found = catalog.owner()
    if found is not None and found[0].session == lease.session:
        catalog.owner_document().replace(msgspec.structs.replace(found[0], session=""), found[1])


def claimed_meanwhile(catalog: Catalog) -> ConflictError:
    """Another node was faster."""
    return ConflictError(
        f"another node claimed the {catalog.keys.noun} at the same moment", operation="claim", hint="Open it again"
    )


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
        self._start().update(lambda mark: mark or self._mark(first_offset))
        if self.catalog.metadata.supports_multi_key:
            return self.catalog.next_offset()
        self._rewrite_what_others_may_change()
        return self._reserve()

    def _rewrite_what_others_may_change(self) -> None:
        """Each gets a new version under this epoch: what an earlier owner is about to write on the old one fails."""

        def own_mark(known: StartMark | None) -> StartMark | None:
            if known is None or known.epoch == self.epoch:
                return known
            return self._mark(known.start_offset, deleted=known.deleted)

        def own_cursor(known: Cursor | None) -> Cursor | None:
            return known if known is None or known.epoch == self.epoch else self._own(known)

        self._start().update(own_mark)
        staging = VersionedDocument(
            *(self.catalog.metadata, self._keys.staging, msgspec.json.encode, decode_mapping),
            fence=self.ownership,
        )
        staging.update(lambda known: None if known is None else {**known, "epoch": self.epoch}, rewrites=True)
        for name in self.catalog.cursors():
            self._cursor(name).update(own_cursor)

    def _reserve(self) -> int:
        """Takes the key of the next object. An earlier owner that is about to publish there gets it or loses it now."""
        return retried(self._reserve_once, self._keys.segments_prefix)

    def _reserve_once(self) -> int:
        offset = self.catalog.next_offset()
        found = self.catalog.find(offset)
        if found is not None and found.value.epoch > self.epoch:
            self.ownership.verify()
        reservation = Reservation(start_offset=offset, epoch=self.epoch)
        write = Put(self._keys.descriptor(offset), encode_descriptor(reservation))
        self.ownership.change([Step(write, None if found is None else found.version)])
        return offset

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
                f"{descriptor.object_id} cannot be published: the catalog continues at offset {expected}",
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

    def seal(self, next_offset: int, *, is_unused: bool = False) -> None:
        """Writes the marker that says where the next owner continues. Everything below must have been published.

        `is_unused`: nothing was accepted under this claim, and what the owner before has on its disk is the end of the
        topic again, as after `give_back`.
        """
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
        write = Put(self._keys.state, encode_json(marker))
        step = Step(write, None if found is None else found.version)
        if is_unused:
            self.ownership.give_back_incarnation_with(step)
            self._restore_cursors()  # not before it: an owner that goes on would give their offsets to other messages
        else:
            self.ownership.change([step])

    def unseal(self) -> None:
        """The topic is owned again. A marker that remains is of an older epoch, and is not trusted."""
        found = self.catalog.metadata.get(self._keys.state)
        if found is not None:
            self._delete(self._keys.state, found.version)

    # The start, and what is below it

    def move_start(self, offset: int) -> None:
        """Nothing below is to be read any more. It never goes back: a smaller offset changes nothing."""
        self._start().update(lambda mark: self._mark(offset) if mark is None or mark.start_offset < offset else mark)

    def mark_deleted(self) -> None:
        """Records that the whole topic is to be deleted. The next owner finishes that first."""
        self._start().update(lambda _: self._mark(self.catalog.next_offset(), deleted=True), rewrites=True)

    def _start(self) -> VersionedDocument[StartMark]:
        return self.catalog.start_document(self.ownership)

    def _mark(self, offset: int, *, deleted: bool = False) -> StartMark:
        return StartMark(start_offset=offset, epoch=self.epoch, moved_us=self._clock.now_us(), deleted=deleted)

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

        def moved(known: Cursor | None) -> Cursor:
            cursor = known or Cursor(offset=offset, epoch=0, moved_us=0)
            return self._own(msgspec.structs.replace(cursor, offset=offset, acked=(), failures=()))

        self._cursor(name).update(moved, rewrites=True)

    def record_epoch(self, next_offset: int) -> EpochStarts:
        """Records that this owner appends from an offset on; returns the starts of all epochs."""
        document = self.catalog.document(self._keys.epochs, EpochStarts, self.ownership)

        def change(known: EpochStarts | None) -> EpochStarts:
            return (known or EpochStarts()).with_owner(self.epoch, next_offset)

        return document.update(change)

    def store_cursor(self, name: str, cursor: Cursor) -> None:
        """Remembers a subscription as it stands now, under this owner's epoch."""
        self._cursor(name).update(lambda _: self._own(cursor), rewrites=True)

    def cursor_step(self, name: str, cursor: Cursor | None) -> Put | Delete:
        """What stores a cursor under this owner's epoch, or deletes it (None), in a transaction that checks the owner.

        Whatever is stored there is of this owner or of an earlier one, so its version need not be read.
        """
        key = self._keys.subscription(name)
        return Delete(key) if cursor is None else Put(key, encode_json(self._own(cursor)))

    def _cursor(self, name: str) -> VersionedDocument[Cursor]:
        return self.catalog.document(self._keys.subscription(name), Cursor, self.ownership)

    def _own(self, cursor: Cursor) -> Cursor:
        return msgspec.structs.replace(cursor, epoch=self.epoch, moved_us=self._clock.now_us())

    def clip_cursors(self, next_offset: int) -> None:
        """Before anything is accepted: what an earlier owner had accepted and nobody else has seen is not the topic's.

        A cursor that is beyond the end would pass over the messages that get those offsets now. If none does in the
        end, `give_back` restores what was cut off.
        """
        self._clipped_at = next_offset
        for name in self.catalog.cursors():
            self._clip_cursor(name, next_offset)

    def _clip_cursor(self, name: str, next_offset: int) -> None:
        original: Cursor | None = None

        def clipped(known: Cursor | None) -> Cursor | None:
            nonlocal original
            original = known
            cut = None if known is None else known.clipped(next_offset)
            return None if cut is None or cut == known else self._own(cut)

        if self._cursor(name).update(clipped) is not None and original is not None:
            self._unclipped[name] = original

    def give_back(self) -> None:
        """Nothing was accepted under this claim: what the owner before has on its disk is the end of the topic again,
        and so are the acknowledgements of that.

        Cursors first: after a crash in between they are clipped by the next owner, as they were by this one.
        """
        self._restore_cursors()
        self.ownership.give_back_incarnation()

    def _restore_cursors(self) -> None:
        for name, original in self._unclipped.items():
            with contextlib.suppress(ConflictError, StoreUnavailableError):  # messages come again
                self._restore_cursor(name, original)

    def _restore_cursor(self, name: str, original: Cursor) -> None:
        def restored(known: Cursor | None) -> Cursor | None:
            whole = None if known is None else known.restored(original, self._clipped_at)
            return None if whole is None or whole == known else self._own(whole)

        self._cursor(name).update(restored)

    def delete_cursor(self, name: str) -> None:
        """Forgets a subscription. A missing one is not an error.

        On its version, whatever that leaves in the store: a new owner continues with the one that it has rewritten.
        """
        self._cursor(name).delete()

    # Deleting the topic

    def remove_everything(self) -> None:
        """Removes all entries of the topic; the owner's last, so that the next owner can finish after a crash."""
        metadata = self.catalog.metadata
        self._raise_epoch_floor()
        keys = metadata.keys(self._keys.metadata_prefix)
        for key in sorted(keys, key=lambda key: key == self._keys.start):
            if key != self._keys.owner and (entry := metadata.get(key)) is not None:
                self._delete(key, entry.version)
        self.ownership.remove()

    def _raise_epoch_floor(self) -> None:
        """Kept in one entry for all topics: a deleted topic leaves nothing of its own."""
        floor = self.catalog.document(self._keys.epoch_floor, EpochFloor)
        floor.update(
            lambda known: known if known is not None and known.epoch >= self.epoch else EpochFloor(epoch=self.epoch)
        )


# `owner.json` in a topic's directory: under which claims the files beside it were written.
#
# It is written before a claim is made and again after it: a crash in between leaves both, and whichever the metadata
# store names as the topic's incarnation says that nobody else has written since. A claim without an answer may still be
# made later, also after others were tried: those are kept until one of ours is made, and none of them can be made any
# more. Where there are no files and no `owner.json`, it is written after the claim alone, before the first file: until
# then it would say nothing of anything.


NAME = "owner.json"
_KIND = "local-claim"
_VERSION = 1
# A request that was sent so many attempts ago has long been done or lost.
MAX_GIVEN_UP = 16


class LocalClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`claim` is the one that was made, `intended` one that may have been, `given_up` are earlier ones of those."""

    epoch: int
    claim: str | None
    intended: str | None
    given_up: tuple[str, ...] = ()

    def knows(self, incarnation: str) -> bool:
        """Whether the files here are the end of a topic of that incarnation."""
        return incarnation in (self.claim, self.intended, *self.given_up)

    @property
    def undecided_claims(self) -> tuple[str, ...]:
        """The last of those that may have been made, or may yet be."""
        return (*self.given_up, *(() if self.intended is None else (self.intended,)))[-MAX_GIVEN_UP:]


def read_local_claim(files: Files, directory: Path) -> LocalClaim | None:
    """What is written down here; None in a directory that never belonged to an owner. Damage raises DataError."""
    try:
        data = files.read(directory / NAME)
    except FileNotFoundError:
        return None
    return decode_document(_KIND, _VERSION, data, LocalClaim)


def write_local_claim(files: Files, directory: Path, claim: LocalClaim, *, syncs_directory: bool = True) -> None:
    """Durable when it returns, or when the caller has synced the directory."""
    files.write_atomically(directory / NAME, encode_document(_KIND, _VERSION, claim), syncs_directory=syncs_directory)


# Polls keys of many topics with few requests, and reports whose entry has changed.
#
# An idle topic has two keys that others may change at any time: its owner, and its staging document. Reading each by
# itself costs two requests for every topic every few seconds; here all keys of a store are read together.
#
# Invariants
# - A change is reported within the interval of its key, once the store answers; only the fact of a change is reported.
# - A key that was added is read in the next round, whatever is known of the store by then.
# - Where the store can tell that nothing at all has changed (`change_mark`), a round is one small request, or none.
# - A round that fails is repeated after the interval: an unreachable store reports nothing, and changes nothing.


OpenedMetadata = Callable[[], MetadataStore | None]
NEVER_SEEN = ""
"""Instead of a version: that there is an entry at all is a change."""


class Watched:
    """A key that is looked at, until it is cancelled. `version` is the one that is known; None: there is no entry."""

    def __init__(self, key: str, version: str | None, on_change: Callable[[], None], round: KeyRound) -> None:
        self.key = key
        self.version = None if version == NEVER_SEEN else version
        self.on_change = on_change
        self._round = round

    def cancel(self) -> None:
        """It is not looked at any more. A round that is under way may still tell of it."""
        self._round.remove(self)


class KeyRound:
    """The keys that are looked at with the same interval."""

    def __init__(self, metadata: OpenedMetadata, seconds: float) -> None:
        self._metadata = metadata
        self._seconds = seconds
        self._guard = Lock()
        self._watched: dict[str, Watched] = {}
        self._mark: object | None = None
        self._additions = 0
        self.task: Task | None = None

    def add(self, watched: Watched) -> None:
        with self._guard:
            self._watched[watched.key] = watched
            self._additions += 1
            self._mark = None

    def remove(self, watched: Watched) -> None:
        with self._guard:
            if self._watched.get(watched.key) is watched:
                del self._watched[watched.key]

    def look(self) -> float:
        """One round, in the background; the seconds until the next."""
        with contextlib.suppress(TidelogError):
            metadata = self._metadata()
            if metadata is not None:
                self._compare(metadata)
        return self._seconds

    def _compare(self, metadata: MetadataStore) -> None:
        with self._guard:
            watched, known_mark, additions = list(self._watched.values()), self._mark, self._additions
        if not watched:
            return
        mark = metadata.change_mark()
        if mark is not None and mark == known_mark:
            return
        found = metadata.get_many([each.key for each in watched])
        for each in watched:
            version = found[each.key].version if each.key in found else None
            if version != each.version:
                each.version = version
                each.on_change()
        with self._guard:
            if self._additions == additions:  # else one was added meanwhile, and must be looked at
                self._mark = mark


class KeyWatch:
    """All keys of one metadata store that this process wants to know about."""

    def __init__(self, metadata: OpenedMetadata, background: Background) -> None:
        self._metadata = metadata
        self._background = background
        self._guard = Lock()
        self._rounds: dict[float, KeyRound] = {}

    def add(self, key: str, version: str | None, on_change: Callable[[], None], seconds: float) -> Watched:
        """Calls `on_change`, which must be quick, whenever the entry has another version than the one known last."""
        with self._guard:
            round = self._rounds.get(seconds)
            if round is None:
                round = self._rounds[seconds] = KeyRound(self._metadata, seconds)
                round.task = self._background.add(round.look, seconds)
        watched = Watched(key, version, on_change, round)
        round.add(watched)
        return watched
