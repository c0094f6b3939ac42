"""Opening a topic for writing: who was there before, where to go on, and that nobody else can go on beside us.

Where a new owner starts, in this order
1. The sealed marker, if nobody claimed the topic since: behind its last offset.
2. The files on this disk, if they are still the end of the topic (nobody else has accepted anything since).
3. The catalog: behind its last offset.
4. A topic without a past: at the offset that was asked for, else at 0.

Invariants
- An error while reading any of these is an error, never "empty".
- Files that are no longer the end of the topic are put aside before the claim: a crash in between leaves nothing that
  could be taken for ours.
- What a living node holds is not touched, unless the caller says `take_over`. A sealed topic is held by nobody.
- The claim comes before the catalog's end is believed, and before anything is accepted.
- The claim is made on the owner document that the marker was read with. Another node that is faster makes it fail; what
  looks damaged only because of that node is told as a conflict.
- A catalog that knows nothing beside a bucket with objects of the topic is a lost catalog, not a new topic. One that
  knows less than the bucket has is an old one, and is not gone on from.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import NamedTuple

from tidelog.clock import Clock
from tidelog.errors import DataError, GapError, InputError, OtherLogError, RetryError, TidelogError, offsets_text
from tidelog.files import Files
from tidelog.log.bound_files import bound, known_log_id, write_log_id
from tidelog.log.names import wal_files
from tidelog.log.settings import LogSettings
from tidelog.log.view import LogView
from tidelog.tier.catalog import Catalog
from tidelog.tier.fenced_tail import FencedTail, remove_files, secure_tails, set_aside
from tidelog.tier.local_claim import LocalClaim, read_local_claim, write_local_claim
from tidelog.tier.node_lease import NodeLease
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.older_catalog import refuse_lost_descriptor, refuse_older_catalog
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.owner import Owner, SealedMarker
from tidelog.tier.ownership import FoundOwner, claim_topic, claimed_meanwhile, new_claim
from tidelog.tier.sweep import finish_deletion
from tidelog.tier.uploader_checkpoint import read_uploader_checkpoint

_logger = logging.getLogger("tidelog.tier")
_IN_MEMORY = "memory://"


class Taken(NamedTuple):
    """A topic that is ours: the right to write, and where a log without files has to begin."""

    catalog: OwnedCatalog
    next_offset: int


class Takeover:
    """One attempt to open a topic for writing. The caller holds the lock of its directory."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        catalog: Catalog,
        objects: ObjectStore,
        clock: Clock,
        lease: NodeLease,
    ) -> None:
        self._files = bound(files)
        self._directory = directory
        self._catalog = catalog
        self._objects = objects
        self._clock = clock
        self._lease = lease

    def take(self, first_offset: int = 0, *, take_over: bool = False) -> Taken:
        """Claims the topic and finds out where to go on. HeldError while another node holds it, unless `take_over`.

        ConflictError when another node claims it at the same moment.
        """
        secure_tails(self._files, self._directory)
        found, marker = self._admitted(take_over)
        if self._finish_deletion(found):
            found, marker = self._admitted(take_over)
        self._check_before_claim(found, marker)
        owned = self._claim(found, read_claim(self._files, self._directory))
        try:
            return self._settle_in(owned, marker, first_offset)
        except BaseException:
            with contextlib.suppress(TidelogError):
                owned.ownership.release()
            raise

    def _admitted(self, take_over: bool) -> tuple[FoundOwner, SealedMarker | None]:
        """The owner document to claim on, with the marker that belongs to it."""
        found = self._catalog.owner()
        marker = self._believed_marker(None if found is None else found[0])
        if found is not None and marker is None and not take_over:
            self._refuse_held(found[0])
        return found, marker

    def _refuse_held(self, owner: Owner) -> None:
        self._lease.refuse_held(owner, self._catalog.keys.noun, self._directory)

    def _check_before_claim(self, found: FoundOwner, marker: SealedMarker | None) -> None:
        try:
            # Before the claim, which ends the marker: who tries again must not get what was refused just now.
            self._check_marker(marker, None if marker is None else self._catalog.next_offset())
            if found is not None:
                self._refuse_older_catalog(found[0])
            self._settle_fenced_files()
            if found is not None:
                self._refuse_other_log(found[0])
        except DataError as error:
            if self._catalog.owner() != found:
                raise claimed_meanwhile(self._catalog) from error
            raise

    def _settle_in(self, owned: OwnedCatalog, marker: SealedMarker | None, first_offset: int) -> Taken:
        next_offset = owned.settle_in(self._first_of_all(first_offset))
        self._check_marker(marker, next_offset)
        owned.unseal()
        self._put_aside_what_is_behind(owned, next_offset)
        self._keep_log_id(owned.ownership.owner)
        return Taken(owned, next_offset)

    @property
    def _has_files(self) -> bool:
        return bool(wal_files(self._files.list(self._directory)))

    def _believed_marker(self, owner: Owner | None) -> SealedMarker | None:
        marker = self._catalog.sealed()
        if marker is None or owner is None or not marker.sealed or marker.epoch != owner.epoch:
            return None
        return marker

    def _check_marker(self, marker: SealedMarker | None, next_offset: int | None) -> None:
        if marker is None:
            return
        sealed_at = 0 if marker.last_committed_offset is None else marker.last_committed_offset + 1
        if sealed_at != next_offset:
            raise DataError(
                f"{marker.node} sealed the topic at offset {sealed_at}, but the catalog ends at {next_offset}",
                operation="open",
                hint="Restore the metadata, or make the catalog anew with `tidelog topic rebuild-catalog`",
            )

    def _refuse_older_catalog(self, owner: Owner) -> None:
        """Who goes on with files asks the store only before the first object is shipped: it may be out of reach now."""
        refuse_lost_descriptor(self._catalog)
        local = read_claim(self._files, self._directory)
        if self._has_files and local is not None and local.knows(owner.lineage):
            return
        try:
            refuse_older_catalog(self._catalog, self._objects)
        except RetryError as error:
            _logger.warning("%s: not known whether the bucket has more than the catalog: %s", self._directory, error)

    def _finish_deletion(self, found: FoundOwner) -> bool:
        """A topic that was being deleted is deleted first; what is here of it goes with it. Whether it was one."""
        mark = self._catalog.start_mark()
        if mark is None or found is None or not mark[0].deleted:
            return False
        local = read_claim(self._files, self._directory)
        if self._has_files and local is not None and local.knows(found[0].lineage):
            remove_files(self._files, self._directory)
        elif self._has_files and not _were_a_topic(local):
            raise _foreign_files(self._directory, found[0])
        finish_deletion(self._claim(found, local), self._objects)
        return True

    # The files of an earlier time

    def _settle_fenced_files(self) -> None:
        put_fenced_files_aside(self._files, self._directory, self._catalog, self._objects, self._clock)

    def _put_aside_what_is_behind(self, owned: OwnedCatalog, next_offset: int) -> None:
        """The files here are the topic's own, but end before the catalog does: the newest are lost, and the store has
        them."""
        if not self._has_files:
            return
        view = self._view(next_offset)
        if view.next_offset < next_offset:
            _logger.warning(
                "%s: the files end at offset %d, the catalog at %d; going on behind the catalog",
                *(self._directory, view.next_offset, next_offset),
            )
            owner = owned.ownership.owner
            now_us = self._clock.now_us()
            tail = FencedTail(
                epoch=owner.epoch,
                claim=owner.claim,
                first_offset=view.next_offset,
                next_offset=view.next_offset,
                set_aside_us=now_us,
            )
            set_aside(self._files, self._directory, tail)
        elif view.start_offset > next_offset:
            raise GapError(
                f"{offsets_text(next_offset, view.start_offset - 1)} are neither in the store nor in the files here",
                first=next_offset,
                last=view.start_offset - 1,
                path=self._directory,
                hint="Put the missing files back",
            )

    # Which log it is

    def _refuse_other_log(self, owner: Owner) -> None:
        """Files that are bound to another log than the catalog names are not the end of this one."""
        local = known_log_id(self._files, self._directory) if self._has_files else None
        if local is not None and local != owner.log_id:
            raise OtherLogError(
                path=self._directory,
                expected=owner.log_id,
                found=local,
                operation="open",
                hint=f"Move {self._directory} out of the log directory: the {self._catalog.keys.noun} goes on from "
                "the store",
            )

    def _keep_log_id(self, owner: Owner) -> None:
        if known_log_id(self._files, self._directory) != owner.log_id:
            write_log_id(self._files, self._directory, owner.log_id)

    # The claim

    def _claim(self, found: FoundOwner, local: LocalClaim | None) -> OwnedCatalog:
        claim = new_claim()
        epoch = 0 if local is None else local.epoch
        known = None if local is None else self._claim_to_keep(local)
        undecided = () if local is None else local.undecided_claims
        intent = LocalClaim(epoch=epoch, claim=known, intended=claim, given_up=undecided)
        write_local_claim(self._files, self._directory, intent)
        log_id = known_log_id(self._files, self._directory)
        ownership = claim_topic(
            *(self._catalog, found, self._lease, self._clock, claim), min_epoch=epoch + 1, log_id=log_id
        )
        done = LocalClaim(epoch=ownership.epoch, claim=claim, intended=None)
        write_local_claim(self._files, self._directory, done)
        return OwnedCatalog(ownership, self._clock)

    def _claim_to_keep(self, local: LocalClaim) -> str | None:
        """Of those that a crash left behind, the one that the store knows."""
        found = self._catalog.owner()
        return found[0].lineage if found is not None and local.knows(found[0].lineage) else local.claim

    def _first_of_all(self, asked: int) -> int:
        """Where the topic begins if it has no past: messages that were here before there was a store count."""
        if not self._has_files:
            return asked
        return self._view(asked).start_offset

    def _view(self, first_offset: int) -> LogView:
        """The files here. Where a crash left one without a frame, they say nothing about where they begin."""
        files, clock = self._files, self._clock
        return LogView(self._directory, LogSettings(), files=files, clock=clock, first_offset=first_offset)


# The files of an owner that was fenced. Nothing below claims anything.


def fenced_files(
    files: Files, directory: Path, catalog: Catalog, objects: ObjectStore, clock: Clock
) -> FencedTail | None:
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
    return FencedTail(
        epoch=local.epoch,
        claim=local.claim or local.intended or "0",
        first_offset=_shipped_by(local.epoch, min(start_offset, next_offset), next_offset, catalog),
        next_offset=next_offset,
        set_aside_us=clock.now_us(),
    )


def put_fenced_files_aside(
    files: Files, directory: Path, catalog: Catalog, objects: ObjectStore, clock: Clock
) -> FencedTail | None:
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
            *(directory, offsets),
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
    who = "nobody" if owner is None else owner.node
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
    past = catalog.epoch_floor()
    listed = ((info, catalog.keys.parse_object(info.key)) for info in objects.list(catalog.keys.objects_prefix))
    stray = next((info for info, name in listed if name is not None and name.epoch > past), None)
    if stray is not None:
        raise DataError(
            f"the catalog does not know this topic, but {objects.url} has objects of it, such as {stray.key}",
            operation="open",
            hint=(
                "If another directory owns the topic, both must have the same metadata, such as metadata=bucket. "
                "If the metadata was lost, `tidelog topic rebuild-catalog` makes it anew from the objects"
            ),
        )
    shipped = read_uploader_checkpoint(files, directory)
    if shipped is not None and shipped.epoch > past and objects.url != _IN_MEMORY:
        raise DataError(
            f"offsets up to {shipped.next_offset - 1} were shipped from here, but neither the catalog nor "
            f"{objects.url} knows this topic any more",
            operation="open",
            path=directory,
            hint="Is it the right store and the right metadata, and is the directory of a file:// store mounted?",
        )


def _are_the_end(local: LocalClaim | None, owner: Owner | None, catalog: Catalog) -> bool:
    """Whether nobody has written the topic since the files here were. Without any owner: whether it was deleted.

    Files without a claim are from before there was a store. If their first claim was interrupted, they still are.
    """
    if owner is not None:
        return local is not None and local.knows(owner.lineage)
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


def _shipped_by(epoch: int, start_offset: int, next_offset: int, catalog: Catalog) -> int:
    """The first of the offsets here that was not published under our epochs: somebody else's, or nobody's."""
    reached = start_offset
    for descriptor in catalog.walk(start_offset):
        until = descriptor.written_until(epoch)
        if until <= reached or descriptor.start_offset > reached or reached >= next_offset:
            break
        reached = until
    return min(reached, next_offset)
