"""Opens a topic for writing: finds the previous owner and the offset to continue from, and fences all other writers.

Where a new owner starts, in this order
1. The sealed marker, if nobody claimed the topic since: after its last offset.
2. The files on this disk, if they are still the end of the topic (nobody else has accepted anything since).
3. The catalog: after its last offset.
4. A topic without a past: at the requested offset, else at 0.

Invariants
- An error while reading any of these is an error, never "empty".
- Files that are no longer the end of the topic are set aside before the claim: a crash in between leaves nothing that
  could be mistaken for ours.
- Under which claim files were written is durable before the first of them: where there are none, it is written once,
  after the claim.
- What a live node holds is not touched, unless the caller passes `take_over`. A sealed topic is held by nobody.
- The claim precedes trusting the catalog's end, and accepting anything.
- Who gives a new topic partitions records that under a claim of its name, and ends the claim. So who claims the name
  after that reads of them, and who has claimed it before keeps them from being recorded.
- The claim is made on the owner document that the marker was read with. Another node that is faster makes it fail;
  apparent damage that is only that node's work is reported as a conflict.
- An empty catalog beside a bucket with objects of the topic is a lost catalog, not a new topic. One that knows less
  than the bucket has is stale, and no owner continues from it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tidelog.clock import Clock
from tidelog.codec import decode_document, encode_document
from tidelog.cold.catalog import Catalog, EpochStarts, Owner, SealedMarker
from tidelog.cold.gc import finish_deletion
from tidelog.cold.lease import NodeLease
from tidelog.cold.ownership import (
    FoundOwner,
    LocalClaim,
    OwnedCatalog,
    Ownership,
    claim_topic,
    claimed_meanwhile,
    new_claim,
    read_local_claim,
    write_local_claim,
)
from tidelog.cold.shipper import read_uploader_checkpoint
from tidelog.cold.stale_catalog import refuse_lost_descriptor, refuse_stale_catalog
from tidelog.errors import (
    ConflictError,
    DataError,
    GapError,
    Hint,
    InputError,
    NotFoundError,
    OtherLogError,
    RetryError,
    TidelogError,
    offsets_text,
)
from tidelog.events import subject_of, tell
from tidelog.files import Files
from tidelog.log.binding import bound, known_log_id, write_log_id
from tidelog.log.directory import (
    CHECKPOINT,
    INGESTED_RANGES,
    KAFKA_PRODUCERS,
    LOG_ID,
    PRODUCERS,
    start_name,
    start_offsets,
    wal_files,
)
from tidelog.log.recovery import remove_start
from tidelog.log.settings import LogSettings
from tidelog.log.view import LogView
from tidelog.store.metadata.open import asked_anew
from tidelog.store.object_store import ObjectStore

# The divergent tail that a fenced owner left on its disk: set aside, never dropped, never mixed into the new owner's
# offsets.
#
#     <topic>/fenced/e{epoch}-{claim}/    the files of the log as they were, and tail.json
#
# Invariants
# - Files are moved newest first. A crash leaves a shorter log that begins where it began, and the next attempt moves
#   the rest to the same directory.
# - `tail.json` is written first: a directory with files in it always says whose they are.
# - Nothing in here is deleted except by `discard`, which a user requests by name.


FENCED = "fenced"
_TAIL = "tail.json"
_KIND = "fenced-tail"
_VERSION = 1
_NAME = re.compile(r"e(\d{1,20})-([0-9a-z]{1,32})", re.ASCII)


class DivergentTail(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets from `first_offset` up to `next_offset` (exclusive) that were accepted here and never shipped."""

    epoch: int
    claim: str
    first_offset: int
    next_offset: int
    set_aside_us: int

    @property
    def name(self) -> str:
        """How it is called on the command line."""
        return f"e{self.epoch}-{self.claim}"

    @property
    def count(self) -> int:
        return max(0, self.next_offset - self.first_offset)


def set_aside(files: Files, directory: Path, tail: DivergentTail) -> None:
    """Moves the files of the log out of the way; safe to be cut anywhere and done again."""
    folder = directory / FENCED / tail.name
    files.make_own_directory(directory / FENCED)
    files.make_own_directory(folder)
    if not files.exists(folder / _TAIL):
        files.write_atomically(folder / _TAIL, encode_document(_KIND, _VERSION, tail))
    names = [name for _, name in reversed(wal_files(files.list(directory)))]
    # What is said about the messages first: it must not be believed beside others.
    marks = map(start_name, start_offsets(files.list(directory)))
    moved = (PRODUCERS, KAFKA_PRODUCERS, INGESTED_RANGES, *names, CHECKPOINT, *marks, LOG_ID)
    for name in [name for name in moved if files.exists(directory / name)]:
        files.rename(directory / name, folder / name)
        files.sync_directory(folder)
        if files.exists(directory / name):
            # A crash left one file under both names, and renaming one of them to the other changes nothing.
            files.remove(directory / name)
        files.sync_directory(directory)


def secure_tails(files: Files, directory: Path) -> None:
    """Makes sure of what an interrupted attempt moved: else the next change here could outlive its move there."""
    for folder in (directory / FENCED, *(directory / FENCED / tail.name for tail in divergent_tails(files, directory))):
        if files.is_directory(folder):
            files.sync_directory(folder)


def remove_files(files: Files, directory: Path) -> None:
    """Deletes the files of a log whose messages are all elsewhere, or are meant to go.

    Oldest first, each for good before the next: what a crash leaves is still the end of the log, and nothing says any
    more where it began.
    """
    remove_start(files, directory)
    names = [name for _, name in wal_files(files.list(directory))]
    for name in [PRODUCERS, KAFKA_PRODUCERS, INGESTED_RANGES, *names, CHECKPOINT, LOG_ID]:
        if files.exists(directory / name):
            files.remove(directory / name)
            files.sync_directory(directory)


def divergent_tails(files: Files, directory: Path) -> list[DivergentTail]:
    """All that were put aside here, oldest first."""
    folder = directory / FENCED
    if not files.has_own_directory(folder):
        return []
    found = [name for name in files.list(folder) if _NAME.fullmatch(name) and files.exists(folder / name / _TAIL)]
    tails = [decode_document(_KIND, _VERSION, files.read(folder / name / _TAIL), DivergentTail) for name in found]
    return sorted(tails, key=lambda tail: (tail.epoch, tail.set_aside_us))


def tail_directory(files: Files, directory: Path, name: str) -> Path:
    """Where the files of a tail are: a log directory of its own."""
    folder = directory / FENCED / name
    files.has_own_directory(directory / FENCED)
    if not _NAME.fullmatch(name) or not files.has_own_directory(folder) or not files.exists(folder / _TAIL):
        raise NotFoundError(f"there is no fenced tail {name}", path=directory)
    return folder


def discard(files: Files, directory: Path, name: str) -> None:
    """Deletes a tail for good."""
    files.remove_tree(tail_directory(files, directory, name))
    files.sync_directory(directory / FENCED)


_logger = logging.getLogger("tidelog.cold")
_IN_MEMORY = "memory://"


class Taken(NamedTuple):
    """A topic that is ours: the right to write, and where a log without files has to begin."""

    catalog: OwnedCatalog
    next_offset: int


class TailPolicy(Protocol):
    """What happens to files here that are not the end of the log: a topic sets them aside, an engine refuses them.

    One that `refuses` is asked before a holder is: taking the log over would not help a directory that is refused.
    """

    @property
    def refuses(self) -> bool: ...

    def before_claim(self, takeover: Takeover) -> None:
        """Another node may have gone on since the files here were written. Nothing is claimed yet."""
        ...

    def fell_behind(self, takeover: Takeover, owner: Owner, end: int, next_offset: int) -> None:
        """The files here are the log's own and end at `end`; the catalog has it up to `next_offset`."""
        ...


class SetAside:
    """A topic goes on from the store, and keeps the divergent tail for a rescue."""

    refuses = False

    def before_claim(self, takeover: Takeover) -> None:
        put_fenced_files_aside(takeover.files, takeover.directory, takeover.catalog, takeover.objects, takeover.clock)

    def fell_behind(self, takeover: Takeover, owner: Owner, end: int, next_offset: int) -> None:
        _logger.warning(
            "%s: the files end at offset %d, the catalog at %d; going on behind the catalog",
            takeover.directory,
            end,
            next_offset,
        )
        tail = DivergentTail(
            epoch=owner.epoch,
            claim=owner.claim,
            first_offset=end,
            next_offset=end,
            set_aside_us=takeover.clock.now_us(),
        )
        set_aside(takeover.files, takeover.directory, tail)


class Takeover:
    """One attempt to open a log for writing. The caller holds the lock of its directory."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        catalog: Catalog,
        objects: ObjectStore,
        clock: Clock,
        lease: NodeLease,
        tail_policy: TailPolicy | None = None,
    ) -> None:
        self.files = bound(files)
        self.directory = directory
        self.catalog = catalog
        self.objects = objects
        self.clock = clock
        self._lease = lease
        self._tail_policy: TailPolicy = tail_policy or SetAside()
        self._syncs_later = False
        """Whether `owner.json` is durable only once the directory is synced, before there is any file of the log."""

    def take(self, first_offset: int = 0, *, take_over: bool = False) -> Taken:
        """Claims the topic and finds out where to go on. HeldError while another node holds it, unless `take_over`.

        ConflictError when another node claims it at the same moment.
        """
        secure_tails(self.files, self.directory)
        found, marker = self._admitted(take_over)
        if self._finish_deletion(found):
            found, marker = self._admitted(take_over)
        self._check_before_claim(found, marker)
        owned = self._claim(found, read_claim(self.files, self.directory), is_sealed=marker is not None)
        try:
            if found is None:
                self._refuse_partitions(owned.ownership)
            taken = self._settle_in(owned, marker, first_offset)
            self._tell(taken, None if found is None else found[0])
            return taken
        except BaseException:
            with contextlib.suppress(TidelogError):
                owned.ownership.release()
            raise

    def _tell(self, taken: Taken, before: Owner | None) -> None:
        owner = taken.catalog.ownership.owner
        is_another = before is not None and before.node != owner.node
        tell(
            _logger,
            "taken_over" if is_another else "claimed",
            **subject_of(self.catalog.keys.noun, self.directory),
            node=owner.node,
            epoch=owner.epoch,
            next_offset=taken.next_offset,
            from_node=None if before is None else before.node,
            from_epoch=None if before is None else before.epoch,
        )

    def _admitted(self, take_over: bool) -> tuple[FoundOwner, SealedMarker | None]:
        """The owner document to claim on, with the marker that belongs to it."""
        found = self.catalog.owner()
        marker = self.catalog.sealed_by(None if found is None else found[0])
        if found is not None and marker is None and not take_over:
            if self._tail_policy.refuses:
                self._tail_policy.before_claim(self)
            self._lease.refuse_held(found[0], self.catalog.keys.noun, self.directory)
        return found, marker

    def _check_before_claim(self, found: FoundOwner, marker: SealedMarker | None) -> None:
        try:
            # Before the claim, which ends the marker: a retry must not get what was refused just now.
            self._check_marker(marker, None if marker is None else self.catalog.next_offset())
            if found is not None:
                self._refuse_stale_catalog(found[0])
            self._tail_policy.before_claim(self)
            if found is not None:
                self._refuse_other_log(found[0])
        except DataError as error:
            # Read again: the catalog may have cached what was found.
            if Catalog(asked_anew(self.catalog.metadata), self.catalog.keys).owner() != found:
                raise claimed_meanwhile(self.catalog) from error
            raise

    def _refuse_partitions(self, claim: Ownership) -> None:
        """Whether a new topic has partitions was asked before it was claimed."""
        catalog = Catalog(asked_anew(self.catalog.metadata), self.catalog.keys)
        layout = catalog.partitions_document().read()
        if layout is not None and not layout.value.has_grown:
            claim.remove()
            raise ConflictError(
                f"another node created {catalog.keys.subject} with partitions at the same moment", hint="Open it again"
            )

    def _settle_in(self, owned: OwnedCatalog, marker: SealedMarker | None, first_offset: int) -> Taken:
        next_offset = owned.settle_in(self._first_of_all(first_offset))
        self._check_marker(marker, next_offset)
        owned.unseal()
        self._settle_files(owned.ownership.owner, next_offset)
        self._keep_log_id(owned.ownership.owner)
        return Taken(owned, next_offset)

    @property
    def has_files(self) -> bool:
        """Whether there are messages in the directory."""
        return bool(wal_files(self.files.list(self.directory)))

    def _check_marker(self, marker: SealedMarker | None, next_offset: int | None) -> None:
        if marker is None:
            return
        sealed_at = 0 if marker.last_committed_offset is None else marker.last_committed_offset + 1
        if sealed_at != next_offset:
            raise DataError(
                f"{marker.node} sealed the topic at offset {sealed_at}, but the catalog ends at {next_offset}",
                operation="open",
                hint="Restore the metadata, or rebuild the catalog with `tidelog topic rebuild-catalog`",
            )

    def _refuse_stale_catalog(self, owner: Owner) -> None:
        """An owner that continues with files asks the store only before the first object is shipped: it may be
        unreachable now."""
        refuse_lost_descriptor(self.catalog)
        local = read_claim(self.files, self.directory)
        if self.has_files and local is not None and local.knows(owner.incarnation):
            return
        try:
            refuse_stale_catalog(self.catalog, self.objects)
        except RetryError as error:
            _logger.warning("%s: not known whether the bucket has more than the catalog: %s", self.directory, error)

    def _finish_deletion(self, found: FoundOwner) -> bool:
        """A topic that was being deleted is deleted first; what is here of it goes with it. Whether it was one."""
        mark = self.catalog.start_mark()
        if mark is None or found is None or not mark[0].deleted:
            return False
        local = read_claim(self.files, self.directory)
        if self.has_files and local is not None and local.knows(found[0].incarnation):
            remove_files(self.files, self.directory)
        elif self.has_files and not _were_a_topic(local):
            raise _foreign_files(self.directory, found[0])
        finish_deletion(self._claim(found, local), self.objects)
        return True

    # The files of an earlier time

    def _settle_files(self, owner: Owner, next_offset: int) -> None:
        """The files here may end before the catalog does: the newest are lost, and the store has them."""
        if not self.has_files:
            return
        view = self.view(next_offset)
        if view.next_offset < next_offset:
            self._tail_policy.fell_behind(self, owner, view.next_offset, next_offset)
        elif view.start_offset > next_offset:
            raise GapError(
                f"{offsets_text(next_offset, view.start_offset - 1)} are neither in the store nor in the files here",
                first=next_offset,
                last=view.start_offset - 1,
                path=self.directory,
                hint="Put the missing files back",
            )

    # Which log it is

    def _refuse_other_log(self, owner: Owner) -> None:
        """Files that are bound to another log than the catalog names are not the end of this one."""
        local = known_log_id(self.files, self.directory) if self.has_files else None
        if local is not None and local != owner.log_id:
            raise OtherLogError(
                path=self.directory,
                expected=owner.log_id,
                found=local,
                operation="open",
                hint=f"Move {self.directory} out of the log directory: the {self.catalog.keys.noun} goes on from "
                "the store",
            )

    def _keep_log_id(self, owner: Owner) -> None:
        if known_log_id(self.files, self.directory) != owner.log_id:
            write_log_id(self.files, self.directory, owner.log_id)
        elif self._syncs_later:
            self.files.sync_directory(self.directory)
        self._syncs_later = False

    # The claim

    def _claim(self, found: FoundOwner, local: LocalClaim | None, *, is_sealed: bool = False) -> OwnedCatalog:
        claim = new_claim()
        epoch = 0 if local is None else local.epoch
        is_bare = local is None and not self.has_files
        if not is_bare:
            known = None if local is None else self._claim_to_keep(local)
            undecided = () if local is None else local.undecided_claims
            intent = LocalClaim(epoch=epoch, claim=known, intended=claim, given_up=undecided)
            write_local_claim(self.files, self.directory, intent)
        log_id = known_log_id(self.files, self.directory)
        ownership = claim_topic(
            *(self.catalog, found, self._lease, self.clock, claim),
            min_epoch=epoch + 1,
            log_id=log_id,
            is_sealed=is_sealed,
        )
        done = LocalClaim(epoch=ownership.epoch, claim=claim, intended=None)
        write_local_claim(self.files, self.directory, done, syncs_directory=not is_bare)
        self._syncs_later = is_bare
        return OwnedCatalog(ownership, self.clock)

    def _claim_to_keep(self, local: LocalClaim) -> str | None:
        """Of the claims that a crash left, the one that the store knows."""
        found = self.catalog.owner()
        return found[0].incarnation if found is not None and local.knows(found[0].incarnation) else local.claim

    def _first_of_all(self, asked: int) -> int:
        """Where the topic begins if it has no past: messages that were here before there was a store count."""
        if not self.has_files:
            return asked
        return self.view(asked).start_offset

    def view(self, first_offset: int) -> LogView:
        """The files here. Where a crash left one without a frame, they say nothing about where they begin."""
        files, clock = self.files, self.clock
        return LogView(self.directory, LogSettings(), files=files, clock=clock, first_offset=first_offset)


# The files of an owner that was fenced. Nothing below claims anything.


def fenced_files(
    files: Files, directory: Path, catalog: Catalog, objects: ObjectStore, clock: Clock
) -> DivergentTail | None:
    """The log in this directory, where it is no longer the end of the topic; None where it is, or there is none.

    Changes nothing. A catalog that was lost raises DataError: nobody can tell then.
    """
    found = catalog.owner()
    owner = None if found is None else found[0]
    if owner is None:
        _refuse_lost_catalog(files, directory, catalog, objects)
    if not files.is_directory(directory) or not wal_files(files.list(directory)):
        return None
    local = read_claim(files, directory)
    if _are_the_end(local, owner, catalog):
        return None
    if local is None or not _were_a_topic(local):
        raise _foreign_files(directory, owner)
    view = LogView(directory, LogSettings(), files=bound(files), clock=clock)
    noted_offset = _noted_as_shipped(files, directory, local.epoch, catalog)
    start_offset, next_offset = max(view.start_offset, noted_offset), view.next_offset
    shipped = _shipped_by(local.epoch, min(start_offset, next_offset), next_offset, catalog)
    return DivergentTail(
        epoch=local.epoch,
        claim=local.claim or local.intended or "0",
        first_offset=max(shipped, min(_recovered_by_others(local.epoch, catalog), next_offset)),
        next_offset=next_offset,
        set_aside_us=clock.now_us(),
    )


def put_fenced_files_aside(
    files: Files, directory: Path, catalog: Catalog, objects: ObjectStore, clock: Clock
) -> DivergentTail | None:
    """Moves what `fenced_files` finds out of the way. The caller holds the lock of the directory."""
    tail = fenced_files(files, directory, catalog, objects, clock)
    if tail is None:
        return None
    set_aside(files, directory, tail)
    if tail.count:
        offsets = offsets_text(tail.first_offset, tail.next_offset - 1)
        _logger.error(
            "%s: another node took the topic over; %s, accepted here and never shipped, are kept aside: "
            "`tidelog topic rescue` returns them",
            directory,
            offsets,
        )
    return tail


def read_claim(files: Files, directory: Path) -> LocalClaim | None:
    """Under which claim the files here were written; DataError where that cannot be told."""
    try:
        return read_local_claim(files, directory)
    except DataError as error:
        raise DataError(
            f"it is not known whose files these are: {error.message}",
            operation="open",
            path=directory,
            hint="Put owner.json back from a copy, or move the directory away: the topic goes on from the store",
        ) from error


def _were_a_topic(local: LocalClaim | None) -> bool:
    """Whether the files here were ever written under a claim: one that was only intended has accepted nothing."""
    return local is not None and local.claim is not None


def _foreign_files(directory: Path, owner: Owner | None) -> InputError:
    who = "nobody" if owner is None else owner.who
    return InputError(
        f"there are messages in this directory that were never part of this topic, which {who} owns",
        operation="open",
        path=directory,
        hint=(
            f"Move {directory} out of the log directory, and the topic goes on from the store; what was moved can be "
            "read with `tidelog inspect`"
        ),
    )


def _refuse_lost_catalog(files: Files, directory: Path, catalog: Catalog, objects: ObjectStore) -> None:
    # What an owner of a deleted topic sends late has an epoch that is known to be past.
    past, noun = catalog.epoch_floor(), catalog.keys.noun
    listed = ((info, catalog.keys.parse_object(info.key)) for info in objects.list(catalog.keys.objects_prefix))
    stray = next((info for info, name in listed if name is not None and name.epoch > past), None)
    if stray is not None:
        raise DataError(
            f"the catalog does not know this {noun}, but {objects.url} has objects of it, such as {stray.key}",
            operation="open",
            hint=Hint(
                f"If another directory owns the {noun}, both must have the same metadata, such as metadata=bucket. "
                f"If the metadata was lost, {catalog.keys.rebuilt_by}",
                command=f"If another directory owns the {noun}, both must have the same metadata, such as --metadata "
                f"bucket. If the metadata was lost, {catalog.keys.rebuilt_by}",
            ),
        )
    shipped = read_uploader_checkpoint(files, directory)
    if shipped is not None and shipped.epoch > past and objects.url != _IN_MEMORY:
        raise DataError(
            f"offsets up to {shipped.next_offset - 1} were shipped from here, but neither the catalog nor "
            f"{objects.url} knows this {noun} any more",
            operation="open",
            path=directory,
            hint="Is it the right store and the right metadata, and is the directory of a file:// store mounted?",
        )


def _are_the_end(local: LocalClaim | None, owner: Owner | None, catalog: Catalog) -> bool:
    """Whether nobody has written the topic since the files here were. Without any owner: whether it was deleted.

    Files without a claim are from before there was a store. If their first claim was interrupted, they still are.
    """
    if owner is not None:
        return local is not None and local.knows(owner.incarnation)
    return local is None or local.claim is None or catalog.epoch_floor() < local.epoch


def _noted_as_shipped(files: Files, directory: Path, epoch: int, catalog: Catalog) -> int:
    """What this disk remembers of its last object: the catalog forgets what retention has deleted since.

    A note of an earlier epoch may be about another log of the same name, and of a topic that was deleted everything
    here is kept: it is the last copy.
    """
    noted = read_uploader_checkpoint(files, directory)
    if noted is None or noted.epoch != epoch or catalog.epoch_floor() >= epoch:
        return 0
    return noted.next_offset


def _recovered_by_others(epoch: int, catalog: Catalog) -> int:
    """Where the next owner after an epoch began, if that is recorded: it has everything before that, from objects or
    from flushes."""
    found = catalog.document(catalog.keys.epochs, EpochStarts).read()
    starts = () if found is None else found.value.starts
    return next((offset for later, offset in starts if later > epoch), 0)


def _shipped_by(epoch: int, start_offset: int, next_offset: int, catalog: Catalog) -> int:
    """The first of the offsets here that was not published under our epochs: another owner's, or nobody's."""
    reached = start_offset
    for descriptor in catalog.walk(start_offset):
        until = descriptor.written_until(epoch)
        if until <= reached or descriptor.start_offset > reached or reached >= next_offset:
            break
        reached = until
    return min(reached, next_offset)
