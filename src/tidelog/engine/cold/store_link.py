"""An engine's claim on its store: how it is made, and what lives as long as it: the manifest and the ship watermark.

Invariants
- It exists only after the claim: everything that it publishes is published under the epoch, or raises FencedError.
- The manifest never says more than the catalog has. It may say less after a crash; then it catches up here.
- The returned high-water mark was read back from the published manifest.
- Other processes may change the manifest too: they publish compactions and snapshots, set pins, and move the start of
  history. The engine follows what it learns here: states before the start are no longer readable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, Owner
from tidelog.cold.lease import NodeLease
from tidelog.cold.rewrite_commit import settle
from tidelog.cold.shipper import Shipper
from tidelog.cold.takeover import Taken, Takeover, fenced_files, read_claim
from tidelog.engine.cold.manifest import Manifest, OwnedManifest
from tidelog.engine.core import Core
from tidelog.engine.wal.ship_watermark import EntryEnd, LsnRange, SeqIndex
from tidelog.errors import DataError, FencedError, Hint, InputError
from tidelog.files import Files
from tidelog.log.binding import bound
from tidelog.log.directory import wal_files
from tidelog.store.keys import EngineKeys
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import Lazy

# Claiming an engine in the store: the next epoch, and the end of the shipped log.
#
# An engine cannot continue from the store alone: its pages belong to its WAL. So where a topic sets aside files that
# are no longer its end, an engine refuses to open its store, and says how to make a new copy.
#
# Invariants
# - Nothing in the directory is moved or deleted.
# - A directory that is not the end of what is in the store is refused before anything is claimed.


_logger = logging.getLogger("tidelog.engine")
RESTORE_HINT = "Make a new copy from the store: `tidelog.restore_engine` into an empty directory"


class RefuseTail:
    """Refuses where a topic would set files aside."""

    refuses = True

    def before_claim(self, takeover: Takeover) -> None:
        files, directory, catalog, objects = takeover.files, takeover.directory, takeover.catalog, takeover.objects
        if takeover.has_files and read_claim(files, directory) is None:
            refuse_occupied(catalog, objects, directory)
        fenced = fenced_files(files, directory, catalog, objects, takeover.clock)
        found = catalog.owner()
        if fenced is not None or (found is not None and self._is_left_behind(takeover, found[0])):
            who = "another node" if found is None else f"{found[0].who}, with epoch {found[0].epoch},"
            raise FencedError(
                f"{who} owns the engine now, and has gone on where this directory has not",
                path=directory,
                hint=RESTORE_HINT,
            )
        if takeover.has_files:
            self._refuse_other_store(takeover, found is None)
            next_lsn = catalog.next_offset()
            if (end := takeover.view(next_lsn).next_offset) < next_lsn:
                raise _set_back(takeover, end, next_lsn)

    def _is_left_behind(self, takeover: Takeover, owner: Owner) -> bool:
        """A restored copy that has logged nothing yet has no files to compare, but pages and a claim."""
        local = None if takeover.has_files else read_claim(takeover.files, takeover.directory)
        return local is not None and local.claim is not None and not local.knows(owner.incarnation)

    def _refuse_other_store(self, takeover: Takeover, is_unknown: bool) -> None:
        """A WAL whose beginning is gone from this disk has it in some store: refuses one that knows nothing of it."""
        if is_unknown and (start := takeover.view(1).start_offset) > 1:
            raise InputError(
                f"the log begins at LSN {start} here, and {takeover.objects.url} has nothing before that",
                path=takeover.directory,
                hint="Open the engine with the store that has its older log",
            )

    def fell_behind(self, takeover: Takeover, owner: Owner, end: int, next_offset: int) -> None:
        raise _set_back(takeover, end, next_offset)


def _set_back(takeover: Takeover, end: int, next_lsn: int) -> FencedError:
    return FencedError(
        f"the log ends at LSN {end - 1} here, and {takeover.objects.url} has it up to LSN {next_lsn - 1}: this "
        "directory was set back",
        path=takeover.directory,
        hint=RESTORE_HINT,
    )


def refuse_occupied(catalog: Catalog, objects: ObjectStore, directory: Path) -> None:
    """Raises InputError if there is an engine in the store: a directory that has claimed nothing is not that one."""
    if (found := catalog.owner()) is not None:
        raise InputError(
            f"{objects.url} already has an engine, owned by {found[0].who}, and this directory is not it",
            path=directory,
            hint=Hint(
                "To continue that one, use its directory, or `tidelog.restore_engine` into an empty one if it is lost; "
                "for a new engine, name a prefix of its own",
                command="To continue that one, use its directory, or `tidelog engine restore` into an empty one if it "
                "is lost; for a new engine, name a prefix of its own",
            ),
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
    """Takes the next epoch for the WAL in this directory; the caller holds its lock.

    HeldError while another node has the engine open, unless `take_over`.
    """
    files = bound(files)
    files.make_directories(directory)
    is_new = catalog.owner() is None and not wal_files(files.list(directory))
    takeover = Takeover(files, directory, catalog, objects, clock, lease, RefuseTail())
    taken = takeover.take(1 if is_new else 0, take_over=take_over)
    _settle_compactions(catalog, clock)
    return taken


def _settle_compactions(catalog: Catalog, clock: Clock) -> None:
    """Finishes or cancels a compaction that an earlier owner has begun. Nothing else depends on its documents."""
    try:
        settle(catalog, clock)
    except DataError as error:
        _logger.warning("an earlier compaction of the engine cannot be finished: %s", error)


class StoreLink:
    """The store, as the engine that owns it uses it: the catalog, and the manifest beside it."""

    def __init__(self, core: Core, objects: ObjectStore, keys: EngineKeys, taken: Taken, shipper: Shipper) -> None:
        self._core = core
        self.objects = objects
        self.owned = taken.catalog
        self.shipper = shipper
        self.manifest = OwnedManifest(taken.catalog, keys, core.clock)
        self.published = published = self.manifest.settle_in()
        """The newest manifest that is known to be published."""
        self._noting = Lock()
        take_over_start(core, published)
        _refuse_lost_objects(published, taken.next_offset)
        last = EntryEnd(published.high_water_mark, published.high_water_lsn)
        self._index = Lazy(lambda: SeqIndex(core.wal.batches, last, published.shipped_lsn))

    def gate(self, last_seq: int) -> int:
        """The first LSN that may not be shipped yet, if entries up to a seq may. That was decided before the durable
        LSN is looked at here: see `engine/wal/ship_watermark.py`.
        """
        return self._index().gate(last_seq, self._core.wal.log.durable_offset)

    @property
    def is_behind(self) -> bool:
        """Whether objects are published that the manifest does not cover."""
        return self.shipper.shipped_offset > self.published.shipped_lsn

    def publish(self, before: Callable[[Manifest], None]) -> Manifest:
        """Publishes everything that was shipped, and reads it back. `before` may refuse: then nothing is published."""
        shipped_lsn, position = self.shipper.shipped_offset, self.shipper.shipped_position
        self._index().learn(self._core.wal.log.durable_offset)
        last = self._index().last_entry_below(shipped_lsn)
        ranges = self._index().rolled_back_below(shipped_lsn)
        history_start_seq = self._core.checkpointer.history_start_seq

        def advance(manifest: Manifest) -> Manifest:
            return msgspec.structs.replace(
                manifest,
                high_water_mark=last.seq,
                high_water_lsn=last.lsn,
                shipped_lsn=shipped_lsn,
                shipped_position=position,
                history_start_seq=max(history_start_seq, manifest.history_start_seq),
                rolled_back=merged((*manifest.rolled_back, *ranges)),
            )

        before(advance(self.published))
        self.manifest.change(advance)
        self.note(self.manifest.read())
        self._index().forget_below(shipped_lsn)
        return self.published

    def note(self, manifest: Manifest) -> None:
        """Called with a manifest that was published or read, from any thread; the newest one counts."""
        with self._noting:
            if manifest.revision > self.published.revision:
                self.published = manifest
        take_over_start(self._core, self.published)

    def refresh(self) -> Manifest:
        """Reads the manifest again: a process that does not own the engine may have changed it."""
        self.note(self.manifest.read())
        return self.published


def take_over_start(core: Core, manifest: Manifest) -> None:
    """Adopts a start of history that another process moved. A pinned reader of an older state keeps what is here.

    Never past the applied seq: the newest state can always be read.
    """
    start_seq = min(manifest.history_start_seq, core.marks.applied_seq)
    if start_seq > core.history.start_seq:
        core.history.move_start(start_seq)


def merged(ranges: Iterable[LsnRange]) -> tuple[LsnRange, ...]:
    """Merges ranges of LSNs: returns them in order, none of which touch each other."""
    found: list[LsnRange] = []
    for one in sorted(ranges):
        if found and one.first <= found[-1].last + 1:
            found[-1] = LsnRange(found[-1].first, max(found[-1].last, one.last))
        else:
            found.append(one)
    return tuple(found)


def _refuse_lost_objects(manifest: Manifest, next_lsn: int) -> None:
    if manifest.shipped_lsn > next_lsn:
        raise DataError(
            f"the manifest says that LSN {manifest.shipped_lsn - 1} is in the store, and the catalog ends at "
            f"{next_lsn - 1}",
            operation="open",
            hint="Put the descriptors back from a replica, or restore the engine from one",
        )
