"""An engine's own garbage collection: removes versions that are no longer kept, then the pieces of its log that nobody
needs without them. A piece is an object in the store, or a file on the disk of an engine without a store.

    horizon -> manifest -> VACUUM record, synced -> versions removed -> synced -> pieces of the log dropped

History is contiguous from its start, so pieces are dropped from the front only. If too little of the log is live
(`compaction_live_ratio`), the values that are still needed are moved out of the pieces at the front (`relocation.py`),
which go then: at once, or with the next collection, which is due as soon as an entry can be shipped behind the moves.

Room is bounded by what is stored, not by time. With the live bytes L, a `compaction_live_ratio` of 0.5 and D = L / 4,
which is what makes a collection due (`next_due_bytes`), log and index take

    2 L - D        when a collection looks, and of what was there then
    + D            until the next one begins, what entries have written during this one included
    + D / 2        by entries during it, which then wait for its end (`maintenance.py`), whatever slows it down
    + D            by values that were moved and whose old copies are there still; half of that while entries come

which is 2 3/8 L. To that come the objects that the store keeps for an hour after they were merged into others (L / 8 at
a time, `merge.py`), a snapshot while it is written, and the entries of one call for each thread that applies. Small
engines take more: below 64 MiB of live bytes D is 16 MiB, or `rotate_max_bytes` if that is less. What holds back the
horizon, a low-water mark that stays behind or a snapshot that is pinned, is not garbage and no part of this. A store
that has answered nothing for some seconds holds nobody up: the log that has gathered meanwhile comes on top, on the
disk first and then in the store. Checkpoints and snapshots, which cost as much as the index, are made only if a piece
waits for one.

Invariants
- One collection at a time. Entries are applied and read meanwhile, and a reader that has pinned a state reads it to the
  end.
- Versions are counted and removed in one scan of the index. A version that is written meanwhile points to a value that
  is new, or to one that a version counted by the scan points to: only visible versions are copied, and those are never
  removed.
- A piece is dropped if no kept version points into it or all of its values are in compacted data too, if neither a
  restore nor crash recovery nor a rollback would read it, and if the same holds for every piece before it. The newest
  piece stays: the log continues there.
- Bytes of values are counted once per version that points to them, and never for more than the size of their piece:
  live bytes are an upper bound, and a piece without any is certainly dead.
- Live bytes of the log are those of its pieces and those behind them, where values are moved to; dead bytes are those
  of pieces that are still there.
- What was moved counts as moved for a piece in the store only when a restore would find it moved: the records of the
  moves are at or before the last entry that the manifest covers.
- A plan is an upper bound: everything that it names is checked again before it is removed.
- A collection can be interrupted anywhere. The next one finds what is left.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Literal, NamedTuple, Self, cast

import msgspec

from tidelog._native import pointing_cells
from tidelog.cold.catalog import Catalog
from tidelog.cold.retention import finish_cold, remove_published
from tidelog.engine.cold.gc import objects_below, whole_objects_below
from tidelog.engine.cold.manifest import KeptFrom, Manifest, read_manifest
from tidelog.engine.cold.shipping import Shipping
from tidelog.engine.cold.store_link import take_over_start
from tidelog.engine.core import Core
from tidelog.engine.mvcc.cells import decode_cell
from tidelog.engine.mvcc.relocation import Moved, Relocation
from tidelog.engine.mvcc.retention import Retention
from tidelog.engine.mvcc.retention_time import LocalTimes, ShippedTimes
from tidelog.engine.mvcc.vacuum import Vacuum, Vacuumed
from tidelog.engine.mvcc.vacuum_rules import LiveBytes, Rule
from tidelog.engine.sst.value_file import ValueName, reference_of
from tidelog.engine.wal.record_header import OPERATION, decode_header
from tidelog.errors import TidelogError
from tidelog.events import tell
from tidelog.log.frame import Frames
from tidelog.store.document import retried
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore

_logger = logging.getLogger("tidelog.engine")
# Less garbage than this is not worth a look.
_LEAST_GARBAGE_BYTES = 16 << 20
_LEAST_FREE_BYTES = 64 << 20
# The part of the garbage that may be there that makes a collection due; and that of the live bytes that a piece takes.
_DUE_PART = 0.25
_PIECE_PART = 0.125
_SCAN_CELLS = 1024
_LONGEST_PAUSE_SECONDS = 1.0
# How long entries that come all the time are waited for, behind which moves are shipped, and how often it is looked.
_ENTRY_SECONDS = 10.0
_LOOKS = 200
_MAX_LSN = (1 << 64) - 1

Fate = Literal["drop", "live", "replay", "behind", "newest"]
REASONS: dict[Fate, str] = {
    "drop": "no version that is kept is in it, or all of them are in compacted data too",
    "live": "versions that are kept are in it",
    "replay": "a restore, a start after a crash or a rollback reads it",
    "behind": "dead, behind a piece that is needed: for a compaction",
    "newest": "the newest one: the log goes on behind it",
}


# Plan and report


class Piece(NamedTuple):
    """An object or a file: its records, its bytes in the log, and its stored bytes."""

    name: str
    first_lsn: int
    next_lsn: int
    log_bytes: int
    size: int


class PieceUse(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a piece is in use, and the decision about it. `size` is the space that dropping it frees."""

    name: str
    first_lsn: int
    next_lsn: int
    size: int
    live_bytes: int
    dead_bytes: int
    fate: Fate

    @property
    def reason(self) -> str:
        """The reason for the decision, as text."""
        return REASONS[self.fate]


class GarbagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection would do now. `place` is where the pieces are: "store" or "disk".

    `versions` stay and `removable_versions` go, with `removable_bytes` of values. Pieces whose records are all below
    `drop_below_lsn` are dropped, which frees `droppable_bytes`. `live_bytes` are those of values that stay, in the
    pieces and in the log behind them, which no object has yet; `dead_bytes` are the rest of the pieces.
    """

    horizon_seq: int
    history_start_seq: int
    keep_versions: int
    versions: int
    removable_versions: int
    removable_bytes: int
    place: Literal["store", "disk"]
    drop_below_lsn: int
    droppable_bytes: int
    live_bytes: int
    dead_bytes: int
    pieces: tuple[PieceUse, ...]
    held_back_by: str | None = None
    """Why `horizon_seq` is not where the settings, or the caller, would have it."""

    @property
    def is_empty(self) -> bool:
        return not self.removable_versions and not self.droppable_bytes

    @property
    def dropped(self) -> tuple[PieceUse, ...]:
        return tuple(piece for piece in self.pieces if piece.fate == "drop")


class GarbageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did, and what is left: `live_bytes` of values that stay, in the log, moved ones where they are
    now; and `dead_bytes`, the rest of the pieces that are still there.
    """

    history_start_seq: int
    versions: int
    removed_versions: int
    removed_bytes: int
    dropped_pieces: int
    dropped_bytes: int
    live_bytes: int
    dead_bytes: int
    seconds: float
    moved_values: int = 0
    moved_bytes: int = 0


class GarbageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Collections since the engine was opened; live and dead bytes of the log as of the last one."""

    collections: int = 0
    failed_collections: int = 0
    last_error: str | None = None
    versions_removed: int = 0
    bytes_removed: int = 0
    pieces_dropped: int = 0
    bytes_dropped: int = 0
    values_moved: int = 0
    bytes_moved: int = 0
    live_bytes: int = 0
    dead_bytes: int = 0
    pins: int = 0
    seconds: float = 0.0


class Usage(LiveBytes):
    """Counts the references into each piece, and behind them: what is not shipped, or written meanwhile."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        behind_lsn = pieces[-1].next_lsn if pieces else 0
        super().__init__([*((piece.first_lsn, piece.next_lsn) for piece in pieces), (behind_lsn, _MAX_LSN)])
        self.pieces = pieces

    @property
    def behind_bytes(self) -> int:
        """The bytes that are pointed to behind all pieces."""
        return self.of_pieces()[-1]

    @property
    def value_files(self) -> set[ValueName]:
        """Those that kept versions refer to."""
        return {reference_of(decode_cell(value)).name for value in self.in_files}

    def judged(self, needed_from_lsn: int, compacted_lsn: int = 0) -> tuple[PieceUse, ...]:
        """Decides about each piece. Records from `needed_from_lsn` on are needed regardless; values of records below
        the compacted LSN are in compacted data.
        """
        found: list[PieceUse] = []
        for piece, live in zip(self.pieces, self.of_pieces()[:-1], strict=True):
            live_bytes = min(live, piece.log_bytes)
            if live and piece.next_lsn > compacted_lsn:
                fate: Fate = "live"
            elif piece is self.pieces[-1]:
                fate = "newest"
            elif piece.next_lsn > needed_from_lsn:
                fate = "replay"
            else:
                fate = "drop" if not found or found[-1].fate == "drop" else "behind"
            use = PieceUse(
                name=piece.name,
                first_lsn=piece.first_lsn,
                next_lsn=piece.next_lsn,
                size=piece.size,
                live_bytes=live_bytes,
                dead_bytes=piece.log_bytes - live_bytes,
                fate=fate,
            )
            found.append(use)
        return tuple(found)


def move_below(uses: Sequence[PieceUse], most_bytes: int, least_bytes: int) -> int:
    """The LSN below which values are to be moved so that the log has so many bytes; 0 if it has no more already, or if
    less than `least_bytes` is garbage.

    What is dropped anyway does not count. The newest piece stays.
    """
    stored_bytes = sum(use.live_bytes + use.dead_bytes for use in uses if use.fate != "drop")
    if stored_bytes <= most_bytes or sum(use.dead_bytes for use in uses if use.fate != "drop") < least_bytes:
        return 0
    below = 0
    for use in uses:
        if use.fate == "newest" or stored_bytes <= most_bytes:
            break
        below = use.next_lsn
        stored_bytes -= use.dead_bytes if use.fate != "drop" else 0
    return below


def move_parts(uses: Sequence[PieceUse], below: int, most_bytes: int) -> list[int]:
    """The LSNs up to which values are moved one after the other, the last of which is `below`; about so many bytes each
    time: what is moved is there twice until its old pieces go.
    """
    parts, size = list[int](), 0
    for use in uses:
        if use.next_lsn >= below:
            break
        size += use.live_bytes
        if size >= most_bytes:
            parts.append(use.next_lsn)
            size = 0
    return [*parts, below] if below else []


def drop_below(uses: Sequence[PieceUse]) -> int:
    """The LSN below which everything is dropped; 0 for nothing."""
    return max([use.next_lsn for use in uses if use.fate == "drop"], default=0)


# Where the pieces are


class Pieces(ABC):
    """The pieces of an engine's log, in a store or on a disk."""

    place: Literal["store", "disk"]
    awaits_entry = False
    """Whether a collection waits for an entry."""

    @property
    def answers(self) -> int:
        """How many requests a store has answered."""
        return 0

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """Oldest first."""

    @abstractmethod
    def needed_from_lsn(self) -> int:
        """The LSN from which on records are read by a restore, by crash recovery or by a rollback."""

    @abstractmethod
    def drop_below(self, lsn: int) -> tuple[int, int]:
        """Drops the pieces whose records are all below an LSN; returns their number and bytes."""

    @abstractmethod
    def index_bytes(self) -> int:
        """What the index takes beside the log: pages, or snapshots."""

    def compacted_lsn(self) -> int:
        """The LSN below which all values are in compacted data; 0 where there is none."""
        return 0

    def limit(self, horizon: int) -> int:
        """The horizon, limited by readers that have pinned something here."""
        return horizon

    def move_start(self, horizon: int, keep_versions: int) -> int:
        """Publishes the new start of history and the removals below it; returns the resulting start."""
        return horizon

    def finish(self) -> None:
        """Resumes an interrupted collection."""
        return

    def remove_value_files(self, used: Collection[ValueName], up_to_seq: int) -> None:
        """Removes the value files of entries up to a seq that no version refers to, where they are not on this disk."""
        return

    def prepare(self, below_lsn: int) -> None:
        """Before values are moved out of pieces below an LSN: restores and crash recovery begin after those then."""
        return

    def settle(self, go_on: Callable[[], None], *, entries_come: bool) -> None:
        """After values were moved: brings about that they would be found there after the loss of everything else."""
        return

    def knows_moves(self) -> bool:
        """Whether all values that were moved would be found where they are after the loss of everything else."""
        return True


class DiskPieces(Pieces):
    """WAL files of an engine without a store.

    Invariants
    - The last file stays, and so does everything from the beginning of the last complete checkpoint on: redo starts
      there.
    - Everything that a rollback would read stays. Entries that count are in the order of their seqs: if the first
      operation after a file is at or below the low-water mark, no rollback ever looks further back than that.
    - Files are deleted oldest first, so a crash leaves a log that begins later and has no hole.
    """

    place = "disk"

    def __init__(self, core: Core) -> None:
        self._core = core

    def pieces(self) -> list[Piece]:
        sizes = ((span, span.next_position - span.first_position) for span in self._core.wal.spans())
        return [Piece(span.path.name, span.first_lsn, span.next_lsn, size, size) for span, size in sizes]

    def needed_from_lsn(self) -> int:
        """The last file boundary below which neither redo nor a rollback reads."""
        if self._core.marks.high_water_mark:
            return 0  # a store has the beginning of this log, and is not at hand: its files are not ours to drop
        redo_lsn = self._core.checkpointer.redo_lsn
        boundaries = [span.next_lsn for span in self._core.wal.spans()[:-1] if span.next_lsn <= redo_lsn]
        return next((lsn for lsn in reversed(boundaries) if self._is_behind_rollbacks(lsn)), 0)

    def _is_behind_rollbacks(self, lsn: int) -> bool:
        wal = self._core.wal
        found = (_first_seq(frames) for frames in wal.batches(lsn, wal.durable_lsn + 1))
        seq = next((seq for seq in found if seq is not None), None)
        return seq is not None and seq <= self._core.marks.low_water_mark

    def prepare(self, below_lsn: int) -> None:
        if self._core.checkpointer.redo_lsn < below_lsn:
            self._core.checkpointer.checkpoint()

    def index_bytes(self) -> int:
        return self._core.tree.next_page * self._core.settings.page_bytes

    def drop_below(self, lsn: int) -> tuple[int, int]:
        wal = self._core.wal
        before = len(wal.spans())
        freed = wal.remove_below(min(lsn, self.needed_from_lsn()))
        return before - len(wal.spans()), freed


def _first_seq(frames: Frames) -> int | None:
    for index, at in enumerate(memoryview(frames.positions).cast("Q")):
        if frames.buffer[at] == OPERATION:
            lsn = frames.first_offset + index
            return decode_header(frames.payloads(index, index + 1)[0], lsn).transaction
    return None


class StorePieces(Pieces):
    """Objects of an engine's log in its store.

        manifest: start of history -> catalog: start of the log -> descriptors -> objects

    Invariants
    - The start of the log in the catalog is the persisted plan: once it has moved, nobody reads below it, and the next
      collector finishes an interrupted collection.
    - The manifest moves the start of history before anything is dropped that older states need. A pinned snapshot holds
      it back.
    - Values below the LSN of the published compaction are in compacted data: they need no object of the log.
    - Nothing is dropped from the LSN on at which replay after the oldest listed snapshot starts: a restore may begin
      with any of them. Without a snapshot nothing is dropped at all.
    - Only whole objects are dropped, oldest first, and their descriptors before them; the claim is checked before each.
    - Other processes may drop the log concurrently without a claim (`gc.py`): a lost race is retried on the new state.
    """

    place = "store"

    def __init__(self, core: Core, shipping: Shipping) -> None:
        self._core = core
        self._shipping = shipping
        self._has_swept = False

    def prepare(self, below_lsn: int) -> None:
        """Not after moves: no snapshot is written while their records are not in the store, behind which an entry has
        to come first.
        """
        if self._core.checkpointer.redo_lsn < below_lsn:
            self._core.checkpointer.checkpoint()  # the disk too: what was shipped may go when redo does not need it
        if self.needed_from_lsn() < below_lsn:
            self._shipping.write_state()

    @property
    def answers(self) -> int:
        return self._shipping.answers

    def settle(self, go_on: Callable[[], None], *, entries_come: bool) -> None:
        """Ships the moves, behind an entry if entries keep coming: then the old copies go now, and not only after as
        much again was written.
        """
        marks = self._core.marks
        moved_seq = marks.applied_seq
        self.awaits_entry = entries_come
        try:
            for _ in range(_LOOKS if self.awaits_entry else 0):
                if marks.low_water_mark > moved_seq:
                    break
                go_on()
                time.sleep(_ENTRY_SECONDS / _LOOKS)
        finally:
            self.awaits_entry = False
        self._shipping.ship()

    def remove_value_files(self, used: Collection[ValueName], up_to_seq: int) -> None:
        self._shipping.remove_unused_values(used, up_to_seq)

    def knows_moves(self) -> bool:
        """Only a version that was moved points behind the last entry that its own entry is not behind."""
        published = self._manifest()
        first_lsn, last_seq = published.high_water_lsn + 1, published.high_water_mark
        return not any(
            pointing_cells(cells, first_lsn, _MAX_LSN, last_seq)
            for cells in self._core.tree.steps(most_cells=_SCAN_CELLS)
        )

    def pieces(self) -> list[Piece]:
        with self._shipping.linked() as link:
            catalog = link.owned.catalog
            found = catalog.between(catalog.start_offset(), link.published.shipped_lsn)
            return [Piece(one.object_id, one.start_offset, one.next_offset, one.raw_size, one.size) for one in found]

    def needed_from_lsn(self) -> int:
        """The LSN where replay after the oldest snapshot starts."""
        return min([state.lsn for state in self._manifest().checkpoints], default=0)

    def index_bytes(self) -> int:
        """A snapshot has less than the pages, and there are two of them."""
        return self._core.tree.next_page * self._core.settings.page_bytes

    def compacted_lsn(self) -> int:
        compacted = self._manifest().compacted
        return 0 if compacted is None else compacted.lsn

    def limit(self, horizon: int) -> int:
        return allowed_by_pins(self._manifest(), horizon, self._shipping.now_us())

    def _manifest(self) -> Manifest:
        with self._shipping.linked() as link:
            return link.refresh()

    def move_start(self, horizon: int, keep_versions: int) -> int:
        with self._shipping.linked() as link:
            now_us = self._shipping.now_us()

            def begun(manifest: Manifest) -> Manifest:
                return _beginning_at(manifest, allowed_by_pins(manifest, horizon, now_us), keep_versions)

            link.note(link.manifest.change(begun))
            return allowed_by_pins(link.published, horizon, now_us)

    def drop_below(self, lsn: int) -> tuple[int, int]:
        with self._shipping.linked() as link:
            catalog = link.owned.catalog
            doomed = whole_objects_below(catalog, min(lsn, self.needed_from_lsn()))
            if doomed:
                link.owned.move_start(doomed[-1].next_offset)
                retried(lambda: remove_published(link.owned, link.objects, doomed), catalog.keys.segments_prefix)
                if link.published.compacted is None:  # else values that are read here may be there
                    self._shipping.purge_below(doomed[-1].next_offset)
            return len(doomed), sum(one.size for one in doomed)

    def finish(self) -> None:
        """Resumes an interrupted collection, and removes the objects without a descriptor that it left, once."""
        with self._shipping.linked() as link:
            catalog = link.owned.catalog
            retried(lambda: finish_cold(link.owned, link.objects), catalog.keys.segments_prefix)
            if not self._has_swept and catalog.metadata.copy_is_current(catalog.keys.metadata_prefix):
                left_over = objects_below(catalog, link.objects, catalog.start_offset())
                link.owned.ownership.verify()
                link.objects.delete([key for key, _ in left_over])
                self._has_swept = True


def allowed_by_pins(manifest: Manifest, horizon: int, now_us: int) -> int:
    """The horizon, limited by the pins on snapshots in the store."""
    read = [state.seq for state in manifest.checkpoints if manifest.is_pinned(state.key, now_us)]
    return min([horizon, *read])


def _beginning_at(manifest: Manifest, seq: int, keep_versions: int) -> Manifest:
    before, collected = manifest.collected, KeptFrom(seq=seq, versions=keep_versions)
    if before is not None and (before.seq, -before.versions) >= (seq, -keep_versions):
        collected = before
    start_seq = max(seq, manifest.history_start_seq)
    return msgspec.structs.replace(manifest, history_start_seq=start_seq, collected=collected)


class ViewedStore:
    """A store for planning a collection without owning it: it has what a plan asks of an owner's link, and no more.

    Nothing in the store is changed, and its owner is not disturbed. The local engine is advanced to its owner's state:
    the marks and the start of history come from the manifest.
    """

    def __init__(self, core: Core, objects: ObjectStore, metadata: MetadataStore, keys: EngineKeys) -> None:
        self._core = core
        self.objects = objects
        self.catalog = Catalog(metadata, keys)
        found = read_manifest(metadata, keys)
        self.published = Manifest(epoch=0) if found is None else found[0]
        shipped_seq, marks = self.published.high_water_mark, core.marks
        if shipped_seq > marks.low_water_mark:
            marks.raise_low_water_mark(shipped_seq)
        marks.raise_high_water_mark(shipped_seq)
        take_over_start(core, self.published)

    @property
    def owned(self) -> Self:
        """Its catalog is there; what an owner could change is not."""
        return self

    @contextmanager
    def linked(self) -> Iterator[Self]:
        """Like an owner's link, for readers."""
        yield self

    def refresh(self) -> Manifest:
        """The manifest as it was read: one plan is about one moment."""
        return self.published

    def now_us(self) -> int:
        """The clock by which pins in the manifest expire."""
        return self._core.clock.now_us()


# The collector


class Garbage:
    """The garbage collector of one engine.

    `check` raises if the engine is closed or has failed, `on_failure` is called for failures that require reopening,
    and `least_read_seq` returns the oldest seq that transactions read at. With a `view` it plans only, and collects
    nothing.
    """

    def __init__(
        self,
        core: Core,
        cold: object | None,
        *,
        check: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        least_read_seq: Callable[[], int | None],
        view: ViewedStore | None = None,
    ) -> None:
        store = cast(Shipping, view) if view is not None else cold if isinstance(cold, Shipping) else None
        self._core = core
        self._history = history = core.history
        self._place: Pieces = DiskPieces(core) if store is None else StorePieces(core, store)
        times = LocalTimes(core) if store is None else ShippedTimes(core, store)
        self.retention = Retention(
            core.settings,
            core.marks,
            history,
            has_store=store is not None,
            seq_at=times.seq_at,
            least_read_seq=least_read_seq,
            now_us=core.clock.now_us,
        )
        self._check = check
        self.progress_seconds = core.clock.monotonic()
        """When a collection last did something, by the monotonic clock."""
        self.awaited_seq: int | None = None
        """Pieces wait for the first final entry after this seq: shipped, it has the moves out of them found."""
        self._answers = self._begun_seq = 0
        self._outrun = set[object]()
        self._vacuum = Vacuum(core, self._go_on, on_failure)
        read_cold = store.reader.read_many if isinstance(store, Shipping) else None
        self._relocation = Relocation(core, self._go_on, on_failure, read_cold, self._pause)
        self._collecting = Lock()
        self._live_bytes = 0
        self._statistics = GarbageStatistics()

    def plan(self, horizon: int | None = None) -> GarbagePlan:
        """Returns what a collection would do. Changes nothing."""
        self._check()
        with self._collecting:
            start_seq, is_wanted = self._history.start_seq, horizon is not None or self.retention.is_set
            allowed = self.retention.horizon(horizon) if is_wanted else 0
            wanted = max(start_seq, self._place.limit(allowed))
            usage = Usage(self._place.pieces())
            found = self._vacuum.look(self._rule(wanted if is_wanted else 0), usage)
            return self._planned(wanted, found, usage, self._held_back_by(horizon, allowed, wanted))

    def _held_back_by(self, horizon: int | None, allowed: int, wanted: int) -> str | None:
        if wanted < allowed:
            return f"a restore that reads the state of seq {wanted} in the store"
        return self.retention.held_back_by(horizon)

    def _judged(self, usage: Usage) -> tuple[PieceUse, ...]:
        return usage.judged(self._place.needed_from_lsn(), self._place.compacted_lsn())

    def _rule(self, horizon: int) -> Rule:
        """A horizon of 0 keeps everything: the settings do not ask for removal."""
        return self._vacuum.rule(horizon, self.retention.keep_versions)

    def _planned(self, horizon: int, found: Vacuumed, usage: Usage, held_back_by: str | None) -> GarbagePlan:
        uses = self._judged(usage)
        return GarbagePlan(
            horizon_seq=horizon,
            history_start_seq=self._history.start_seq,
            keep_versions=self.retention.keep_versions,
            versions=found.kept,
            removable_versions=found.removed,
            removable_bytes=found.removed_bytes,
            place=self._place.place,
            drop_below_lsn=drop_below(uses),
            droppable_bytes=sum(use.size for use in uses if use.fate == "drop"),
            live_bytes=sum(use.live_bytes for use in uses) + usage.behind_bytes,
            dead_bytes=sum(use.dead_bytes for use in uses),
            pieces=uses,
            held_back_by=held_back_by,
        )

    def collect(self, plan: GarbagePlan | None = None, horizon: int | None = None) -> GarbageReport:
        """Executes the plan, or what is to be done now."""
        self._check()
        with self._collecting:
            try:
                moves = plan is None and horizon is None and self.retention.is_set
                report = self._collect(plan, self._wanted(plan, horizon), moves=moves)
            except (TidelogError, OSError) as error:
                failures = self._statistics.failed_collections + 1
                self._change_statistics(failed_collections=failures, last_error=str(error))
                self._check()  # an engine that was closed meanwhile has no files any more, which is no failure of them
                raise
            self._count(report)
            return report

    def _wanted(self, plan: GarbagePlan | None, horizon: int | None) -> int | None:
        """The horizon up to which versions are removed; None for none."""
        if plan is not None:
            return plan.horizon_seq if plan.removable_versions else None
        return self.retention.horizon(horizon) if horizon is not None or self.retention.is_set else None

    def _collect(self, plan: GarbagePlan | None, wanted: int | None, *, moves: bool) -> GarbageReport:
        begin = self._core.clock.monotonic()
        self.awaited_seq, self._begun_seq = None, self._core.marks.applied_seq
        self._place.finish()
        start_seq = self._history.start_seq if wanted is None else self._move_start(self.retention.horizon(wanted))
        usage, final_seq = Usage(self._place.pieces()), self._core.marks.low_water_mark
        found = self._vacuum.run(self._rule(0 if wanted is None else start_seq), usage)
        self._remove_value_files(usage.value_files, final_seq)
        self._live_bytes = usage.live_bytes
        uses = self._judged(usage)
        move_to = self._move_below(uses) if moves else 0
        if move_to:
            self._place.prepare(move_to)
            uses = self._judged(usage)
        below = drop_below(uses) if plan is None else min(drop_below(uses), plan.drop_below_lsn)
        gone_lsn, dropped, dropped_bytes = self._drop(below)
        moved_values = moved_bytes = 0
        waiting_bytes = 0
        for part in move_parts(uses, move_to, self.piece_bytes):
            moved, usage = self._move_values(usage, part)
            uses = self._judged(usage)
            moved_values, moved_bytes = moved_values + moved.values, moved_bytes + moved.bytes
            below = max(below, drop_below(uses))
            below_lsn, *more = self._drop(below)
            gone_lsn = max(gone_lsn, below_lsn)
            dropped, dropped_bytes = dropped + more[0], dropped_bytes + more[1]
            waiting_bytes = 0 if below_lsn else waiting_bytes + moved.bytes
            if waiting_bytes + self.piece_bytes > self.next_due_bytes:
                break  # the old copies go first, with the collection that is due when an entry has come
        left = [use for use in uses if use.next_lsn > gone_lsn]
        return GarbageReport(
            history_start_seq=start_seq,
            versions=found.kept,
            removed_versions=found.removed,
            removed_bytes=found.removed_bytes,
            dropped_pieces=dropped,
            dropped_bytes=dropped_bytes,
            live_bytes=sum(use.live_bytes for use in left) + usage.behind_bytes,
            dead_bytes=sum(use.dead_bytes for use in left),
            seconds=self._core.clock.monotonic() - begin,
            moved_values=moved_values,
            moved_bytes=moved_bytes,
        )

    def _remove_value_files(self, used: set[ValueName], up_to_seq: int) -> None:
        """Removes the value files of final entries that no version refers to. One that is put meanwhile has a later
        seq, also if its entry takes the place of one that was rolled back; only versions that were counted are copied.
        """
        here = self._core.values
        here.remove(name for name in here.names() if name.seq <= up_to_seq and name not in used)
        self._place.remove_value_files(used, up_to_seq)

    def _drop(self, below_lsn: int) -> tuple[int, int, int]:
        """Drops pieces; returns the LSN below which all are gone, their number and bytes. What a restore would not find
        moved is not dropped yet.
        """
        self.awaited_seq = None
        if below_lsn and not self._place.knows_moves():
            self.awaited_seq = self._core.marks.applied_seq
            return 0, 0, 0
        return (below_lsn, *self._place.drop_below(below_lsn)) if below_lsn else (0, 0, 0)

    # Moving values: `relocation.py`

    def _move_values(self, usage: Usage, below: int) -> tuple[Moved, Usage]:
        """Moves values out of the pieces below an LSN, which are the oldest; returns how the log is used then."""
        core = self._core
        if core.files.free_bytes(core.directory) < _LEAST_FREE_BYTES:
            return Moved(), usage
        uses = self._judged(usage)
        moved = self._relocation.run(self._place.compacted_lsn(), below)
        if uses[-1].dead_bytes > max(uses[-1].live_bytes, self._least_bytes):
            with core.turns:
                self._check()
                core.wal.seal()  # its garbage can go with a later collection
        entries_come = bool(self._outrun) or core.marks.applied_seq > self._begun_seq
        self._place.settle(self._go_on, entries_come=entries_come)
        usage = Usage(self._place.pieces())
        for cells in core.tree.steps(most_cells=_SCAN_CELLS):
            self._go_on()
            usage.count(cells)
        return moved, usage

    @property
    def _least_bytes(self) -> int:
        return min(self._core.settings.rotate_max_bytes, _LEAST_GARBAGE_BYTES)

    def _move_below(self, uses: Sequence[PieceUse]) -> int:
        ratio = self._core.settings.compaction_live_ratio
        if not ratio:
            return 0
        most_bytes = int(self._live_bytes / ratio) - self.next_due_bytes - self._place.index_bytes()
        return move_below(uses, max(most_bytes, sum(use.live_bytes for use in uses)), self._least_bytes)

    @property
    def awaits_entry(self) -> bool:
        """Whether the collection waits for an entry: those must not wait for it then."""
        return self._place.awaits_entry

    @contextmanager
    def outrun(self) -> Iterator[None]:
        """While entries wait for the collection."""
        entries = object()
        self._outrun.add(entries)
        try:
            yield
        finally:
            self._outrun.discard(entries)

    def note_answers(self) -> None:
        """A store that answers gets on with a collection, however slowly."""
        if (answers := self._place.answers) != self._answers:
            self._answers = answers
            self.progress_seconds = self._core.clock.monotonic()

    def _go_on(self) -> None:
        self._check()
        self.progress_seconds = self._core.clock.monotonic()

    def _pause(self, moved_bytes: int) -> None:
        time.sleep(min(_LONGEST_PAUSE_SECONDS, moved_bytes / self._core.settings.compaction_bytes_per_second))

    @property
    def next_due_bytes(self) -> int:
        """How much the log may grow before it is worth looking again: a part of the garbage that may be there."""
        ratio = self._core.settings.compaction_live_ratio or 0.5
        return max(self._least_bytes, int(self._live_bytes * (1 / ratio - 1) * _DUE_PART))

    @property
    def piece_bytes(self) -> int:
        """How large a piece of the log should be at most, so that one which is dead is not kept by what is live."""
        return max(self._least_bytes // 4, int(self._live_bytes * _PIECE_PART))

    def _move_start(self, horizon: int) -> int:
        """Moves the start in the store first, then in the local WAL: when this returns, nobody reads below it."""
        before = self._history.start_seq
        if horizon < before:
            return before
        allowed = self._place.move_start(horizon, self.retention.keep_versions)
        start_seq = self._history.move_start(max(before, allowed))
        if start_seq > before:
            self._vacuum.announce(start_seq)
        return start_seq

    def _count(self, report: GarbageReport) -> None:
        before = self._statistics
        self._change_statistics(
            collections=before.collections + 1,
            last_error=None,
            versions_removed=before.versions_removed + report.removed_versions,
            bytes_removed=before.bytes_removed + report.removed_bytes,
            pieces_dropped=before.pieces_dropped + report.dropped_pieces,
            bytes_dropped=before.bytes_dropped + report.dropped_bytes,
            values_moved=before.values_moved + report.moved_values,
            bytes_moved=before.bytes_moved + report.moved_bytes,
            live_bytes=report.live_bytes,
            dead_bytes=report.dead_bytes,
            seconds=report.seconds,
        )
        if report.removed_versions or report.dropped_pieces or report.moved_values:
            tell(
                _logger,
                "garbage_collected",
                engine=self._core.directory,
                history_start_seq=report.history_start_seq,
                versions=report.removed_versions,
                bytes=report.removed_bytes,
                dropped_pieces=report.dropped_pieces,
                dropped_bytes=report.dropped_bytes,
                moved_bytes=report.moved_bytes,
                seconds=report.seconds,
            )

    def _change_statistics(self, **changes: object) -> None:
        self._statistics = msgspec.structs.replace(self._statistics, **changes)

    def statistics(self) -> GarbageStatistics:
        return msgspec.structs.replace(self._statistics, pins=self._history.pins)
