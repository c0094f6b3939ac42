"""Restoring an engine whose disk is gone: from its store, into an empty directory.

    newest good state -> records behind it -> claim -> records that came meanwhile -> pages -> engine.ckpt

Invariants
- The directory is empty, or a restore into it was cut off: then it begins anew. Until it is complete, the directory
  cannot be opened as an engine.
- An engine that another node has open is not restored, unless the caller says `take_over`.
- The claim comes late, so that a restore that fails takes nothing away from whoever owns the engine. What is shipped
  between the first look and the claim is replayed too; behind the claim nobody else ships.
- What the manifest tells of is restored, and nothing else. Records behind its last entry are written down as dead: the
  orchestrator has their entries, since it truncates only what the manifest tells of.
- Without a claim (a restore drill) nothing is changed in the store but a pin while states are read, and the directory
  remembers that it is a copy: opening it claims nothing either.
- LSNs and positions go on behind the last shipped ones: no address is used twice.
- A damaged state is passed over for the one before it, and at last for the versions of the compaction; without any the
  whole log is replayed. States that are read are pinned in the manifest.
- Of a state, and of an object of the log, that is damaged or missing in the store a replica's copy is read, if replicas
  are named and one has it. Nothing is claimed or changed there.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from tidelog.clock import Clock
from tidelog.engine.btree import Tree
from tidelog.engine.buffer_pool import BufferPool
from tidelog.engine.claim import claim_engine
from tidelog.engine.compaction_state import CompactionState
from tidelog.engine.core import PAGES, WAL
from tidelog.engine.engine_directory import EngineDirectory, remember
from tidelog.engine.gate import LsnRange
from tidelog.engine.known_results import KnownResults, ResultTable
from tidelog.engine.manifest import Manifest, OwnedManifest, Pinning, read_manifest
from tidelog.engine.master import CheckpointState, write_master
from tidelog.engine.page_file import PageFile
from tidelog.engine.raw_log import told_of_dropped_log
from tidelog.engine.restore_marker import MARKER, RestoreMarker, read_marker, write_marker
from tidelog.engine.restore_replay import Replay
from tidelog.engine.restore_runs import Changes, Runs
from tidelog.engine.settings import EngineSettings
from tidelog.engine.store_checkpoint import StoredState
from tidelog.engine.store_link import merged
from tidelog.errors import DataError, InputError, InternalError, NotFoundError, TidelogError
from tidelog.files import Files, explained
from tidelog.tier.catalog import Catalog
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.keys import EngineKeys
from tidelog.tier.local_claim import LocalClaim, write_local_claim
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.node_lease import DEFAULT_LEASE_SECONDS, NodeLease
from tidelog.tier.object_store import ObjectStore

_logger = logging.getLogger("tidelog.engine")
RESTORING = "restoring"
_LOCK = "restore.lock"
CHANGES_BYTES = 64 << 20
_FETCHING_THREADS = 4
_PIN_SECONDS = 24 * 3600

Phase = Literal["state", "log", "claim", "index", "done"]


class RestoreProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a restore is: what it does, and how many bytes (rows, while it makes the index) of how many."""

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


class Restore:
    """One restore.

    What takes long may be done elsewhere by whoever derives from it: `_keep`, `_changes`, `_replay`, `_build`.
    """

    def __init__(
        self,
        directory: Path,
        objects: ObjectStore,
        metadata: MetadataStore,
        *,
        keys: EngineKeys,
        node: str,
        settings: EngineSettings,
        files: Files,
        clock: Clock,
        on_progress: OnProgress | None = None,
        replicas: Sequence[tuple[ObjectStore, MetadataStore]] = (),
        take_over: bool = False,
        drill: EngineDirectory | None = None,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        renews_lease: bool = True,
    ) -> None:
        """Without a claim where it is a `drill`: that is what the directory remembers then."""
        self._directory = directory
        self._objects = objects
        self._replicas = [(Catalog(reading, keys), copies) for copies, reading in replicas]
        self._metadata = metadata
        self._keys = keys
        self._node = node
        self._settings = settings
        self._files = files
        self._clock = clock
        self._take_over = take_over
        self._drill = drill
        self._lease_seconds = lease_seconds
        self._renews_lease = renews_lease
        self._lease: NodeLease | None = None
        self._on_progress = on_progress or (lambda progress: None)
        self._catalog = Catalog(metadata, keys)
        self._runs = Runs(files, directory / RESTORING)
        self._damaged: list[str] = []
        self._fetchers: DaemonPool | None = None
        self._pinning = Pinning(metadata, keys, clock, f"restore-{secrets.token_hex(8)}", _PIN_SECONDS)

    def run(self) -> RestoreReport:
        """Does it. The directory can be opened as an engine then.

        ConflictError where no state could be pinned, and the log was dropped meanwhile: a newer one is there by then.
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
                    self._pinning.release()
            self._finish()
        self._tell("done", 1, 1)
        return report

    def _manifest(self) -> Manifest:
        found = read_manifest(self._metadata, self._keys)
        if found is None:
            raise NotFoundError(
                f"there is no engine {self._keys.name!r} in {self._objects.url}",
                operation="restore",
                hint="Check the address of the store and the name of the engine",
            )
        return found[0]

    def _restore(self, manifest: Manifest, fetchers: DaemonPool) -> RestoreReport:
        state = self._load_state(manifest)
        changes = self._changes()
        first_lsn = self._first_lsn(state)
        replay = Replay(
            *(self._catalog, self._objects, fetchers, changes, first_lsn),
            results=ResultTable(_known_in(state)),
            replicas=self._replicas,
        )
        self._replay(replay, manifest)
        settled = self._settled(replay) if self._drill is None else manifest
        changes.flush()
        next_lsn, position = settled.shipped_lsn, settled.shipped_position
        known = (settled.history_start_seq, replay.history_start_seq)
        history_start_seq = max(*known, 0 if state is None else state.footer.history_start_seq)
        rows, next_page = self._build(next_lsn)
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
        if set(names) - {_LOCK} and MARKER not in names:
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
        return NodeLease(
            *(self._metadata, self._clock, self._node, self._directory),
            lease_seconds=self._lease_seconds,
            renews_itself=self._renews_lease,
        )

    def _refuse_held(self, lease: NodeLease) -> None:
        """Before anything is done: it takes long to restore an engine. The claim looks again."""
        found = self._catalog.owner()
        if found is not None and not self._take_over:
            lease.refuse_held(found[0], self._keys.noun, self._directory)

    def _prepare(self) -> None:
        files, directory = self._files, self._directory
        self._remove_others(files.list(directory))
        write_marker(files, directory, RestoreMarker(self._objects.url, self._clock.now_us(), self._node))
        files.make_directories(directory / RESTORING)

    def _remove_others(self, names: list[str]) -> None:
        """What an attempt that was cut off has left. The marker stays until the end."""
        for name in names:
            path = self._directory / name
            if name not in (MARKER, _LOCK):
                self._files.remove_tree(path) if self._files.is_directory(path) else self._files.remove(path)

    def _finish(self) -> None:
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
            if self._pinning.pin(listed.key):
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
        self._runs.add_blocks(self._counted(state), has_places=state.has_places)

    def _counted(self, state: StoredState) -> Iterator[memoryview]:
        done, total = 0, state.stored_bytes
        self._tell("state", 0, total)
        for block in state.blocks(self._fetchers):
            yield block.data
            done += len(block.data)
            self._tell("state", done, total)
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

    def _changes(self) -> Changes:
        """Takes what the log has changed."""
        return Changes(self._runs, CHANGES_BYTES)

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
        taken = claim_engine(
            *(self._files, self._directory / WAL, self._catalog, self._objects, self._clock, self._lease),
            take_over=self._take_over,
        )
        return OwnedManifest(taken.catalog, self._keys, self._clock), taken.next_offset

    def _position_of_end(self) -> int:
        newest = self._catalog.newest()
        return 0 if newest is None else newest.start_position + newest.raw_size

    # The index

    def _build(self, next_lsn: int) -> tuple[int, int]:
        """Pages from all rows; how many rows, and the first page that is free."""
        self._tell("index", 0, 1)
        page_file = PageFile.create(self._files, self._directory / PAGES, made_lsn=next_lsn - 1)
        try:
            pool = BufferPool(page_file, self._settings.buffer_pool_size)
            tree = Tree(pool, _log_nothing)
            rows = 0

            def counted() -> Iterator[bytes]:
                nonlocal rows
                for merged in self._runs.merged_rows():
                    rows += merged.rows
                    yield merged.raw

            tree.bulk_load_rows(counted(), next_lsn - 1)
            pool.flush(pool.dirty_pages())
            page_file.sync()
            return rows, tree.next_page
        finally:
            page_file.close()

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


def _log_nothing(updates: bytes) -> int:
    raise InternalError("a tree that is loaded in bulk logs nothing")
