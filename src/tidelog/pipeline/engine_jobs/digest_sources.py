"""What the state of an engine can be computed from: states, the version index of the compaction, and the log.

    log from LSN 1 (where it is still there) -> oldest source -> ... -> newest source -> log up to the high-water mark

Invariants
- A source is the state at its LSN: with the records from there on it leads to every later one. Sources are in order of
  LSN, and what is between two neighbours is read once.
- Planning believes the manifest and the catalog; whether they are right is for others to find out. What cannot be read
  is told as damage of that source, which is then left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from tidelog.engine.compacted import Compaction, read_compaction
from tidelog.engine.gate import LsnRange
from tidelog.engine.manifest import StoredCheckpoint
from tidelog.engine.row_file import RowPart
from tidelog.engine.store_checkpoint import StoredState
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.engine_jobs.digest_rows import BASE, LogRange, PartRows, RowItem, StateRows, Unreadable, reason_of
from tidelog.pipeline.engines.place import OpenedEngine
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.descriptor import Descriptor

_TASK_BYTES = 16 << 20


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that are the state at an LSN: a state (`state`), or the index of the compaction, or nothing at LSN 1."""

    key: str
    seq: int = 0
    lsn: int = 1
    size: int = 0
    history_start_seq: int = 0
    state: StoredCheckpoint | None = None
    parts: tuple[RowPart, ...] = ()

    def items(self, place: EnginePlace, source: int = BASE) -> list[RowItem]:
        """What workers read of it."""
        if self.state is not None and not self.parts:
            return [StateRows(place=place, state=self.state, source=source)]
        return [PartRows(place=place, part=part, source=source) for part in self.parts]


NOTHING = Source(key="the empty engine")
"""What there was before the first record."""


class Sources(NamedTuple):
    """Everything that a state can be computed from, oldest first; and what should be among it and cannot be read."""

    found: tuple[Source, ...]
    unreadable: tuple[Unreadable, ...]
    compaction: Compaction | None


def sources_of(opened: OpenedEngine) -> Sources:
    """The sources that the manifest names; the empty engine is the first while the log begins with LSN 1."""
    found, unreadable = [NOTHING] if opened.catalog.start_offset() <= 1 else [], list[Unreadable]()
    for state in opened.manifest.checkpoints:
        try:
            found.append(_state_source(opened, state))
        except (DataError, NotFoundError) as error:
            unreadable.append(_unreadable(state.key, error))
    compaction = None
    if opened.manifest.compacted is not None:
        try:
            compaction = read_compaction(opened.objects, opened.keys, opened.manifest.compacted)
            found.append(_compaction_source(opened.manifest.compacted.key, compaction))
        except (DataError, NotFoundError) as error:
            unreadable.append(_unreadable(opened.manifest.compacted.key, error))
    return Sources(tuple(sorted(found, key=lambda one: (one.lsn, one.seq))), tuple(unreadable), compaction)


def _state_source(opened: OpenedEngine, state: StoredCheckpoint) -> Source:
    stored = StoredState(opened.objects, state)
    parts = tuple(stored.parts())
    return Source(
        key=state.key,
        seq=state.seq,
        lsn=state.lsn,
        size=state.size + sum(part.size for part in parts),
        history_start_seq=stored.footer.history_start_seq,
        state=state,
        parts=parts,
    )


def _compaction_source(key: str, compaction: Compaction) -> Source:
    return Source(
        key=key,
        seq=compaction.seq,
        lsn=compaction.lsn,
        size=sum(part.size for part in compaction.versions),
        history_start_seq=compaction.history_start_seq,
        parts=compaction.versions,
    )


def _unreadable(key: str, error: DataError | NotFoundError) -> Unreadable:
    byte = getattr(error, "byte", None)
    return Unreadable(key if byte is None else f"{key}, byte {byte}", reason_of(error))


class LogPlan(NamedTuple):
    """What workers read of a range of the log, and how many bytes that is."""

    items: list[RowItem]
    size: int


def plan_log(opened: OpenedEngine, place: EnginePlace, first_lsn: int, stop_lsn: int) -> LogPlan:
    """The log from an LSN up to another (exclusive), in tasks of some objects each. Of a hole its task will say so."""
    items, size = list[RowItem](), 0
    for group in _groups(_descriptors(opened, first_lsn, stop_lsn)):
        stop = min(stop_lsn, group[-1].next_offset)
        size += sum(one.raw_size for one in group)
        items.append(_log_range(opened, place, first_lsn, stop, tuple(group)))
        first_lsn = stop
    if first_lsn < stop_lsn:
        items.append(_log_range(opened, place, first_lsn, stop_lsn, ()))
    return LogPlan(items, size)


def _descriptors(opened: OpenedEngine, first_lsn: int, stop_lsn: int) -> list[Descriptor]:
    """None where one of them cannot be understood: the task that reads the range tells of that."""
    try:
        return list(opened.catalog.between(first_lsn, stop_lsn)) if first_lsn < stop_lsn else []
    except DataError:
        return []


def _log_range(
    opened: OpenedEngine, place: EnginePlace, first_lsn: int, stop_lsn: int, descriptors: tuple[Descriptor, ...]
) -> LogRange:
    ranges = opened.manifest.rolled_back
    return LogRange(
        place=place,
        first_lsn=first_lsn,
        stop_lsn=stop_lsn,
        dead=tuple(LsnRange(*one) for one in ranges if one.last >= first_lsn and one.first < stop_lsn),
        descriptors=descriptors,
    )


def _groups(descriptors: Iterable[Descriptor]) -> Iterator[list[Descriptor]]:
    """Neighbours that are enough for a task, without a hole between them."""
    group: list[Descriptor] = []
    for one in descriptors:
        size = sum(other.raw_size for other in group)
        if group and (size >= _TASK_BYTES or one.start_offset != group[-1].next_offset):
            yield group
            group = []
        group.append(one)
    if group:
        yield group
