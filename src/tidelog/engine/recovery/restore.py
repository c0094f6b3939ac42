"""Restores an engine whose disk is lost from its store into an empty directory; and the read-only store of a restore
drill (`DrillStore`).

    newest good snapshot -> records after it -> claim -> records shipped meanwhile -> pages -> engine.ckpt

Invariants
- The directory is empty, or a restore into it was interrupted: then it starts over. Until it is complete, the directory
  cannot be opened as an engine.
- An engine that another node has open is not restored, unless the caller passes `take_over`.
- The claim comes late, so that a failing restore takes nothing away from the owner. Records shipped between the first
  read and the claim are replayed too; after the claim nobody else ships.
- Exactly what the manifest covers is restored. Records after its last entry are recorded as dead: the orchestrator has
  their entries, since it truncates only what the manifest covers.
- Without a claim (a restore drill) nothing is changed in the store but a pin while snapshots are read, and the
  directory remembers that it is a copy: opening it claims nothing either. A drill by the published copy of a manifest
  pins nothing: what the owner deletes meanwhile is looked for in an older snapshot, or the drill is run again.
- LSNs and positions continue after the last shipped ones: no address is used twice.
- A corrupted snapshot is skipped for the one before it, and finally for the versions of the compaction; without any the
  whole log is replayed. Snapshots that are read are pinned in the manifest.
- If a snapshot or an object of the log is corrupted or missing in the store, a replica's copy is read, if replicas are
  configured and one has it. Nothing is claimed or changed there.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog
from tidelog.cold.lease import DEFAULT_LEASE_SECONDS, NodeLease
from tidelog.cold.ownership import LocalClaim, write_local_claim
from tidelog.engine.btree.buffer_pool import BufferPool
from tidelog.engine.btree.page_file import PageFile
from tidelog.engine.btree.tree import Tree, log_nothing
from tidelog.engine.cold.manifest import Manifest, OwnedManifest, Pinning, no_engine, read_manifest, told_of_dropped_log
from tidelog.engine.cold.reader import ColdReader
from tidelog.engine.cold.store_link import claim_engine, merged
from tidelog.engine.core import PAGES, WAL
from tidelog.engine.directory import EngineDirectory, remember
from tidelog.engine.mvcc.known_results import KnownResults, ResultTable
from tidelog.engine.recovery.checkpoint import MARKER, RestoreMarker, read_marker, write_marker, write_master
from tidelog.engine.recovery.sorted_runs import Changes, Runs
from tidelog.engine.settings import EngineSettings
from tidelog.engine.sst.snapshot import CompactionState, StoredState
from tidelog.engine.sst.sstable import RowBlock
from tidelog.engine.wal.records import CheckpointState
from tidelog.engine.wal.replay import OnBytes, Replay, ShippedLog
from tidelog.engine.wal.ship_watermark import LsnRange
from tidelog.errors import DataError, HeldError, InputError, NotFoundError, NotSupportedError, TidelogError
from tidelog.files import TEMPORARY_SUFFIX, Files, explained
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import DaemonPool

_logger = logging.getLogger("tidelog.engine")
RESTORING = "restoring"
_LOCK = "restore.lock"
_BEGUN_MARKER = MARKER + TEMPORARY_SUFFIX
CHANGES_BYTES = 64 << 20
_FETCHING_THREADS = 4
_PIN_SECONDS = 24 * 3600

Phase = Literal["state", "log", "claim", "index", "done"]


class RestoreProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a restore: its phase, and how many bytes (rows, while it builds the index) of how many."""

    phase: Phase
    done: int
    total: int


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was restored, and from what."""

    seq: int
    state_seq: int
    damaged_states: tuple[str, ...]
    entries: int
    rows: int
    next_lsn: int
    next_position: int
    epoch: int


OnProgress = Callable[[RestoreProgress], None]


class RestoreSteps(Protocol):
    """Who does the long steps of a restore."""

    def prepare(self) -> None:
        """The directory is there, and empty but for the marker and the folder of temporary files."""

    def keep(self, state: StoredState, fetchers: Executor, on_bytes: OnBytes) -> None:
        """Brings the rows of a snapshot to this disk, verified. A snapshot that fails midway does not count."""

    def changes(self) -> Changes:
        """Returns what takes the changes of the log that are replayed here."""

    def replay_ahead(self, replay: Replay, manifest: Manifest) -> None:
        """Replays what it can elsewhere, and moves `replay` on. The rest is replayed here."""

    def build(self, lsn: int) -> tuple[int, int]:
        """Writes the page file from all rows, as of an LSN; returns the number of rows and the first free page."""

    def finish(self) -> None:
        """Everything is written, and the directory is about to become an engine's."""


class LocalSteps:
    """All of it by this process, row by row."""

    def __init__(self, files: Files, directory: Path, pool_bytes: int) -> None:
        self._files = files
        self._directory = directory
        self._pool_bytes = pool_bytes
        self._runs = Runs(files, directory / RESTORING)

    def prepare(self) -> None:
        """Nothing else is needed."""

    def keep(self, state: StoredState, fetchers: Executor, on_bytes: OnBytes) -> None:
        def counted() -> Iterator[RowBlock]:
            for block in state.blocks(fetchers):
                yield block
                on_bytes(len(block.data))

        self._runs.add_blocks(counted())

    def changes(self) -> Changes:
        return Changes(self._runs, CHANGES_BYTES)

    def replay_ahead(self, replay: Replay, manifest: Manifest) -> None:
        """Nobody else does it."""

    def build(self, lsn: int) -> tuple[int, int]:
        page_file = PageFile.create(self._files, self._directory / PAGES, made_lsn=lsn)
        try:
            pool = BufferPool(page_file, self._pool_bytes)
            tree = Tree(pool, log_nothing)
            rows = 0

            def counted() -> Iterator[bytes]:
                nonlocal rows
                for merged in self._runs.merged_rows():
                    rows += merged.rows
                    yield merged.raw

            tree.bulk_load_rows(counted(), lsn)
            pool.flush(pool.dirty_pages())
            page_file.sync()
            return rows, tree.next_page
        finally:
            page_file.close()

    def finish(self) -> None:
        """Nothing is left to do."""


class Restore:
    """One restore: what is read, what is claimed when, and what a crash leaves. `steps` does the long steps."""

    def __init__(
        self,
        directory: Path,
        objects: ObjectStore,
        metadata: MetadataStore,
        *,
        keys: EngineKeys,
        node: str,
        node_name: str = "",
        settings: EngineSettings,
        files: Files,
        clock: Clock,
        on_progress: OnProgress | None = None,
        replicas: Sequence[tuple[ObjectStore, MetadataStore]] = (),
        take_over: bool = False,
        only_from_epoch: int | None = None,
        drill: EngineDirectory | None = None,
        lazy: EngineDirectory | None = None,
        pins: bool = True,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        renews_lease: bool = True,
        steps: RestoreSteps | None = None,
    ) -> None:
        """Without a claim where it is a `drill`: that is what the directory remembers then. `lazy`: what is
        to be read from its store while the directory is filled. `pins`: whether snapshots
        can be pinned while they are read. `only_from_epoch`: only the owner of this epoch is replaced."""
        self._directory = directory
        self._objects = objects
        self._replicas = [(Catalog(reading, keys), copies) for copies, reading in replicas]
        self._metadata = metadata
        self._keys = keys
        self._node = node
        self._node_name = node_name
        self._settings = settings
        self._files = files
        self._clock = clock
        self._take_over = take_over
        self._only_from_epoch = only_from_epoch
        self._drill = drill
        self._lazy = lazy
        self._lease_seconds = lease_seconds
        self._renews_lease = renews_lease
        self._lease: NodeLease | None = None
        self._on_progress = on_progress or (lambda progress: None)
        self._catalog = Catalog(metadata, keys)
        self._steps = steps or LocalSteps(files, directory, settings.buffer_pool_bytes)
        self._damaged: list[str] = []
        self._fetchers: DaemonPool | None = None
        self._pinning = None
        if pins:
            self._pinning = Pinning(metadata, keys, clock, f"restore-{secrets.token_hex(8)}", _PIN_SECONDS)

    def run(self) -> RestoreReport:
        """Runs the restore. The directory can be opened as an engine afterwards.

        ConflictError if no snapshot could be pinned and the log was dropped meanwhile: a newer snapshot exists by then.
        """
        with told_of_dropped_log(self._catalog):
            return self._run()

    def _run(self) -> RestoreReport:
        manifest = self._manifest()
        with explained("restore", self._directory), contextlib.ExitStack() as ending:
            self._lease = self._new_lease()
            if self._drill is None:
                self._refuse_held(self._lease)
            self._refuse_occupied_directory()
            lock = self._files.lock(self._directory / _LOCK)
            ending.callback(self._files.remove, self._directory / _LOCK)
            ending.callback(lock.release)
            ending.callback(self._lease.release)
            self._prepare()
            self._fetchers = fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-restore")
            try:
                report = self._restore(manifest, fetchers)
            finally:
                fetchers.shutdown(wait=False, cancel_futures=True)
                with contextlib.suppress(TidelogError):
                    if self._pinning is not None:
                        self._pinning.release()
            self._finish()
        self._tell("done", 1, 1)
        return report

    def _manifest(self) -> Manifest:
        found = read_manifest(self._metadata, self._keys)
        if found is None:
            raise no_engine(self._keys, self._objects, "restore")
        return found[0]

    def _restore(self, manifest: Manifest, fetchers: DaemonPool) -> RestoreReport:
        state = self._load_state(manifest)
        changes = self._steps.changes()
        first_lsn = self._first_lsn(state)
        log = ShippedLog(self._catalog, self._objects, fetchers, self._replicas)
        replay = Replay(log, changes, first_lsn, ResultTable(_known_in(state)))
        self._steps.replay_ahead(replay, manifest)
        self._replay(replay, manifest)
        settled = self._settled(replay) if self._drill is None else manifest
        changes.flush()
        next_lsn, position = settled.shipped_lsn, settled.shipped_position
        known = (settled.history_start_seq, replay.history_start_seq)
        history_start_seq = max(*known, 0 if state is None else state.footer.history_start_seq)
        self._tell("index", 0, 1)
        rows, next_page = self._steps.build(next_lsn - 1)
        assert replay.results is not None
        known_results = replay.results.known_up_to(settled.high_water_mark)
        self._write_master(settled, history_start_seq, next_page, known_results)
        return RestoreReport(
            seq=settled.high_water_mark,
            state_seq=0 if state is None else state.footer.seq,
            damaged_states=tuple(self._damaged),
            entries=replay.entries,
            rows=rows,
            next_lsn=next_lsn,
            next_position=position,
            epoch=settled.epoch,
        )

    def _settled(self, replay: Replay) -> Manifest:
        """The manifest as it stays: the engine is claimed, and what was shipped until then is replayed."""
        owned_manifest, next_lsn = self._claim()
        self._replay(replay, owned_manifest.settle_in())
        position = self._position_of_end()
        return owned_manifest.change(lambda one: _at_the_end(one, next_lsn, position))

    # The directory

    def _refuse_occupied_directory(self) -> None:
        self._files.make_directories(self._directory)
        names = self._files.list(self._directory)
        if set(names) - {_LOCK, _BEGUN_MARKER} and MARKER not in names:
            raise InputError(
                "a restore needs an empty directory",
                operation="restore",
                path=self._directory,
                hint="Name another one, or move away what is in this one",
            )

    def _new_lease(self) -> NodeLease:
        """A restore that was cut off here is the same node: the lock of the directory proves that it is dead."""
        if self._files.exists(self._directory / MARKER):
            self._node = read_marker(self._files, self._directory).node or self._node
        lease = NodeLease(
            self._metadata,
            self._clock,
            self._node,
            self._directory,
            lease_seconds=self._lease_seconds,
            root=self._keys.root,
            renews_itself=self._renews_lease,
        )
        lease.node_name = self._node_name
        return lease

    def _refuse_held(self, lease: NodeLease) -> None:
        """Before anything is done: it takes long to restore an engine. The claim looks again."""
        found = self._catalog.owner()
        if found is not None and not self._take_over:
            lease.refuse_held(found[0], self._keys.noun, self._directory)

    def _prepare(self) -> None:
        files, directory = self._files, self._directory
        self._remove_others(files.list(directory))
        marker = RestoreMarker(self._objects.url, self._clock.now_us(), self._node)
        if (lazy := self._lazy) is not None:
            marker = msgspec.structs.replace(
                marker, is_lazy=True, name=lazy.name, metadata=lazy.metadata, metadata_root=lazy.metadata_root
            )
        write_marker(files, directory, marker)
        files.make_directories(directory / RESTORING)
        self._steps.prepare()

    def _remove_others(self, names: list[str]) -> None:
        """What an attempt that was cut off has left. The marker stays until the end."""
        for name in names:
            path = self._directory / name
            if name not in (MARKER, _LOCK):
                self._files.remove_tree(path) if self._files.is_directory(path) else self._files.remove(path)

    def _finish(self) -> None:
        self._steps.finish()
        if self._drill is not None:
            # Before the marker goes: without this, opening the directory would claim the engine.
            remember(self._files, self._directory, self._drill)
            self._files.make_directories(self._directory / WAL)
            write_local_claim(self._files, self._directory / WAL, LocalClaim(epoch=0, claim=None, intended=None))
        self._files.remove_tree(self._directory / RESTORING)
        self._files.sync_directory(self._directory)
        self._files.remove(self._directory / MARKER)
        self._files.sync_directory(self._directory)

    # The state

    def _load_state(self, manifest: Manifest) -> StoredState | None:
        """The newest good one is on this disk then, every row of it checked; None where there is none.

        The versions of a compaction are a state too, and are there as long as the compaction is.
        """
        for listed in reversed(manifest.checkpoints):
            if self._pinning is None or self._pinning.pin(listed.key):
                state = self._kept(listed.key, partial(StoredState, listed=listed))
                if state is not None:
                    return state
        compacted = manifest.compacted
        if compacted is None:
            return None
        return self._kept(compacted.key, partial(CompactionState, keys=self._keys, compacted=compacted))

    def _kept(self, key: str, opened: Callable[[ObjectStore], StoredState]) -> StoredState | None:
        """From the store, or from the first replica that has a good copy."""
        for objects in (self._objects, *(copies for _, copies in self._replicas)):
            try:
                state = opened(objects)
                self._keep(state)
            except (DataError, NotFoundError) as error:
                _logger.warning("%s: a state in %s cannot be used: %s", self._directory, objects.url, error)
            else:
                return state
        self._damaged.append(key)
        return None

    def _keep(self, state: StoredState) -> None:
        """Brings the rows of a state to this disk."""
        assert self._fetchers is not None
        done, total = 0, state.stored_bytes
        self._tell("state", 0, total)

        def count(size: int) -> None:
            nonlocal done
            done += size
            self._tell("state", done, total)

        self._steps.keep(state, self._fetchers, count)
        self._tell("state", total, total)

    def _first_lsn(self, state: StoredState | None) -> int:
        first_lsn = 1 if state is None else state.footer.lsn
        start = self._catalog.start_offset()
        if first_lsn < start:
            raise DataError(
                f"no state in the store can be read, and its log begins at LSN {start}",
                operation="restore",
                hint="Restore from a replica, or put a good copy of a state in its place: "
                + (", ".join(self._damaged) or "there is none"),
            )
        return first_lsn

    # The log

    def _replay(self, replay: Replay, manifest: Manifest) -> None:
        total = sum(
            one.raw_size for one in self._catalog.between(replay.lsn, max(replay.lsn, manifest.high_water_lsn + 1))
        )
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done = min(total, done + size)
            self._tell("log", done, total)

        replay.run(manifest, count)

    def _claim(self) -> tuple[OwnedManifest, int]:
        self._tell("claim", 0, 1)
        assert self._lease is not None, "a restore that runs has one"
        found = self._catalog.owner()
        if self._only_from_epoch is not None and (found is None or found[0].epoch != self._only_from_epoch):
            raise HeldError(
                "another replica has taken the store over meanwhile",
                operation="take over",
                path=self._directory,
                hint="Follow that one",
            )
        taken = claim_engine(
            self._files,
            self._directory / WAL,
            self._catalog,
            self._objects,
            self._clock,
            self._lease,
            take_over=self._take_over,
        )
        return OwnedManifest(taken.catalog, self._keys, self._clock), taken.next_offset

    def _position_of_end(self) -> int:
        newest = self._catalog.newest()
        return 0 if newest is None else newest.start_position + newest.raw_size

    def _write_master(self, manifest: Manifest, history_start_seq: int, next_page: int, results: KnownResults) -> None:
        state = CheckpointState(
            begin_lsn=manifest.shipped_lsn,
            begin_position=manifest.shipped_position,
            time_us=self._clock.now_us(),
            applied_seq=manifest.high_water_mark,
            low_water_mark=manifest.high_water_mark,
            high_water_mark=manifest.high_water_mark,
            history_start_seq=history_start_seq,
            next_page=next_page,
            dirty_pages={},
            transactions={},
            results=results,
        )
        write_master(self._files, self._directory, state)

    def _tell(self, phase: Phase, done: int, total: int) -> None:
        self._on_progress(RestoreProgress(phase=phase, done=done, total=total))


def _known_in(state: StoredState | None) -> KnownResults:
    """What a state knows of the entries before it; before the first record of all there was none."""
    if state is None:
        return KnownResults(floor=0)
    return state.footer.results or KnownResults(floor=state.footer.seq)


def _at_the_end(manifest: Manifest, next_lsn: int, position: int) -> Manifest:
    """The log goes on behind everything that is in the store; what lies behind the last entry is dead."""
    dead = [LsnRange(manifest.high_water_lsn + 1, next_lsn - 1)] if manifest.high_water_lsn + 1 < next_lsn else []
    return msgspec.structs.replace(
        manifest,
        shipped_lsn=next_lsn,
        shipped_position=position,
        rolled_back=merged((*manifest.rolled_back, *dead)),
    )


# The cold tier of a restore drill's copy: it reads values from the store, and refuses everything else.
#
# Invariants
# - Nothing is claimed, shipped, published or deleted: the engine that owns the store is not affected.
# - The copy is read-only. An entry applied here would get an address that the engine itself assigns to another.


class DrillStore:
    """The store of a drill's copy, in the place of `Shipping`."""

    def __init__(
        self,
        directory: Path,
        objects: ObjectStore,
        metadata: MetadataStore,
        keys: EngineKeys,
        *,
        cache_bytes: int,
        replicas: Sequence[ObjectStore] = (),
    ) -> None:
        self._directory = directory
        self._metadata = metadata
        self.reader = ColdReader(Catalog(metadata, keys), objects, cache_bytes, lambda: replicas)

    def refusal(self) -> TidelogError:
        return NotSupportedError(
            "this directory is a copy that a restore drill has made, and is only for reading",
            path=self._directory,
            hint="Change the engine where it is owned. If that one is lost, restore it into another directory",
        )

    def ship(self) -> int:
        raise self.refusal()

    def checkpoint(self) -> None:
        raise self.refusal()

    def truncation_mark(self) -> int:
        """Nothing that an orchestrator may go by."""
        return 0

    def start(self) -> None:
        """Nothing runs by itself."""

    def stop(self) -> None:
        self.reader.close()
        self._metadata.close()
