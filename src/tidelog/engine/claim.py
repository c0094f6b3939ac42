"""Claiming an engine's place in the store: the next epoch, and the end of what is shipped.

An engine does not go on from the store alone: its pages belong to its log. So where a topic puts files aside that are
no longer its end, an engine refuses to open its store, and says how to make a new copy.

Invariants
- Nothing in the directory is moved or deleted.
- A directory that is not the end of what is in the store is refused before anything is claimed.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tidelog.clock import Clock
from tidelog.errors import DataError, FencedError, InputError
from tidelog.files import Files
from tidelog.log.bound_files import bound
from tidelog.log.names import wal_files
from tidelog.tier.catalog import Catalog
from tidelog.tier.node_lease import NodeLease
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.owner import Owner
from tidelog.tier.replacement_switch import settle
from tidelog.tier.takeover import Taken, Takeover, fenced_files, read_claim

_logger = logging.getLogger("tidelog.engine")
RESTORE_HINT = "Make a new copy from the store: `tidelog.restore_engine` into an empty directory"


class EngineTakeover(Takeover):
    """A takeover that refuses where that of a topic would put files aside."""

    def _settle_fenced_files(self) -> None:
        if self._has_files and read_claim(self._files, self._directory) is None:
            refuse_occupied(self._catalog, self._objects, self._directory)
        if fenced_files(self._files, self._directory, self._catalog, self._objects, self._clock) is not None:
            found = self._catalog.owner()
            who = "another node" if found is None else f"{found[0].node}, with epoch {found[0].epoch},"
            raise FencedError(
                f"{who} owns the engine now, and has gone on where this directory has not",
                path=self._directory,
                hint=RESTORE_HINT,
            )
        self._refuse_other_store()
        self._refuse_older_files(self._catalog.next_offset())

    def _refuse_held(self, owner: Owner) -> None:
        """A directory that could not go on anyway hears of that: to take the engine over would not help it."""
        self._settle_fenced_files()
        super()._refuse_held(owner)

    def _refuse_other_store(self) -> None:
        """A log whose beginning is gone from this disk has it in some store: not in one that knows nothing of it."""
        if self._has_files and self._catalog.owner() is None and (start := self._view(1).start_offset) > 1:
            raise InputError(
                f"the log begins at LSN {start} here, and {self._objects.url} has nothing before that",
                path=self._directory,
                hint="Open the engine with the store that has its older log",
            )

    def _refuse_older_files(self, next_lsn: int) -> None:
        if self._has_files and (end := self._view(next_lsn).next_offset) < next_lsn:
            raise FencedError(
                f"the log ends at LSN {end - 1} here, and {self._objects.url} has it up to LSN {next_lsn - 1}: this "
                "directory was set back",
                path=self._directory,
                hint=RESTORE_HINT,
            )

    def _put_aside_what_is_behind(self, owned: OwnedCatalog, next_offset: int) -> None:
        self._refuse_older_files(next_offset)


def refuse_occupied(catalog: Catalog, objects: ObjectStore, directory: Path) -> None:
    """InputError if there is an engine in the store: a directory that has claimed nothing is not that one."""
    if (found := catalog.owner()) is not None:
        raise InputError(
            f"there is an engine in {objects.url} already, which {found[0].node} owns, and this directory is not it",
            path=directory,
            hint="To go on with that one, use its directory, or `tidelog.restore_engine` into an empty one if it is "
            "lost; for a new engine, name a prefix of its own",
        )


def claim_engine(
    files: Files,
    directory: Path,
    catalog: Catalog,
    objects: ObjectStore,
    clock: Clock,
    lease: NodeLease,
    *,
    take_over: bool = False,
) -> Taken:
    """Takes the next epoch for the log in this directory; the caller holds its lock.

    HeldError while another node has the engine open, unless `take_over`.
    """
    files = bound(files)
    files.make_directories(directory)
    is_new = catalog.owner() is None and not wal_files(files.list(directory))
    takeover = EngineTakeover(files, directory, catalog, objects, clock, lease)
    taken = takeover.take(1 if is_new else 0, take_over=take_over)
    _settle_compactions(catalog, clock)
    return taken


def _settle_compactions(catalog: Catalog, clock: Clock) -> None:
    """A compaction that an earlier owner has begun is finished, or ended. Nothing else depends on its documents."""
    try:
        settle(catalog, clock)
    except DataError as error:
        _logger.warning("an earlier compaction of the engine cannot be finished: %s", error)
