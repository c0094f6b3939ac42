"""The flush log of a node: what its topics have synced and not shipped yet, in the bucket before it is acknowledged.

A topic with `durability = "shipped"` acknowledges a message when the bucket has it. Objects of its own would be many
and small. So a node writes the newest messages of all such topics into one shared object, some times a second, and one
document that makes the object count:

    {root}/storage/flushes/{node}/{session}/{generation:010}/{number:020}            `FlushDocument`, in the metadata
    storage/flushes/{node}/{session}/{generation:010}/{number:020}-{token}.tflush    the object, in the bucket

    "TLFLUSH1" | bytes of the table u32 | crc32 of the table u32 | table, as JSON | frames, section by section

The topics ship their messages into objects of their own as ever: a flush is read only when a topic is opened that has
less in its catalog and on this disk than was acknowledged, and it is deleted once the catalogs have all of it.

Invariants
- A round looks at the topics that have synced something since, or are waited for, however many a node has.
- A message is acknowledged after the document of its flush is in the metadata store, and after the owner document of
  its topic names the session and the epoch under which it was flushed (`Owner.flushed`).
- What the owner document names, together with the catalog, has everything that was ever acknowledged: the first flush
  of an owner begins where the catalog ends, and the owner document is changed after it.
- The documents of a generation are numbered without a gap, and each is created once. A new owner creates the next one
  as a fence, after its claim: from then on nothing can be added to the generation. Documents that it found before the
  fence are all there are.
- A generation is begun before the owners of its topics are verified. So who was replaced before that is told, and who
  is replaced later finds the fence.
- A fence is never deleted: a process that slept for days must still find it.
- An attempt has an object of its own name, so that a late write never changes what a document names.
- Every byte that is read back is checked, by the table's checksum and by the frames' own.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from threading import Condition
from typing import NamedTuple

import msgspec

from tidelog.clock import Stopwatch
from tidelog.codec import JSON_ERRORS, MAX_OFFSET, from_json
from tidelog.cold.catalog import Catalogs
from tidelog.cold.lease import NodeLease
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.settings import FlushStatistics
from tidelog.cold.upload import Place, UploadPlan, frames_of, plan_upload, whole_groups
from tidelog.errors import (
    ClosedError,
    ConflictError,
    DataError,
    FencedError,
    NotFoundError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.log import Log
from tidelog.log.atomic_batches import GroupOf
from tidelog.log.frame import Frames, Stop, crc32, scan
from tidelog.store.document import encode_json
from tidelog.store.keys import (
    DEFAULT_ROOT,
    FlushKey,
    FlushSource,
    flush_key,
    flush_object,
    flush_objects_prefix,
    flushes_prefix,
    parse_flush_key,
)
from tidelog.store.metadata.base import Check, Delete, MetadataStore, Put
from tidelog.store.object_store import ObjectStore
from tidelog.store.scheduler import NEVER, Background, Task, with_backoff

_logger = logging.getLogger("tidelog.cold")
FLUSH_SECONDS = 0.125
"""A flush begins so long after the one before: all topics of the node share it. Eight a second are clearly less than
the ten that stores and prices are planned for."""
_MAX_FLUSH_BYTES = 16 << 20
_LOOK_SECONDS = 1.0
"""How often it is looked for flushes that the catalogs have by now."""
_COLLECT_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 5.0
_TRUSTED_SECONDS = 30.0
"""A flush that took longer verifies the owners again before it acknowledges anything."""
_KEYS_AT_ONCE = 100
_ATTEMPTS = 20
_HEAD = struct.Struct("<8sII")
_MAGIC = b"TLFLUSH1"
_KEPT_TABLES = 1000
_USUAL_TABLE_BYTES = 32 << 10
_MAX_TABLE_BYTES = 64 << 20


class FlushDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a generation: its beginning (no object), a flush, or the fence that ends it."""

    object: str = ""
    size: int = 0
    is_fence: bool = False
    is_clean: bool = False
    """Of a fence: nothing else is left of the generation."""


class Section(msgspec.Struct, frozen=True, array_like=True):
    """The frames of one topic in a flush: bytes `position` to `position + length` of the object."""

    topic: str
    log_id: str
    epoch: int
    first_offset: int
    next_offset: int
    position: int
    length: int


# Writing


class FlushedLog:
    """The part of one topic in the flush log of its node. Threads may share it."""

    def __init__(
        self,
        flush_log: FlushLog,
        topic: str,
        log: Log,
        owned: OwnedCatalog,
        shipped_offset: Callable[[], int],
        group_of: GroupOf | None,
        fenced: Callable[[FencedError], None],
    ) -> None:
        """`shipped_offset` is the end of the catalog. `fenced` is told that another node owns the topic."""
        self.topic = topic
        self.log = log
        self.owned = owned
        self.fenced = fenced
        self.shipped_offset = shipped_offset
        self.on_flushed: Callable[[], None] = lambda: None
        """Called when more is flushed than before, or never will be: quick, and it raises nothing."""
        self.verified_in: int | None = None
        """The generation in which it was verified that the topic is ours."""
        self.is_closed = False
        self.stop_listening: Callable[[], None] = lambda: None
        self._flush_log = flush_log
        self._group_of = group_of
        self._flushed_offset = shipped_offset()
        self._resume: Place | None = None
        self._waiting: list[tuple[int, Future[None]]] = []

    @property
    def source(self) -> FlushSource:
        """What the owner document names while messages are acknowledged by this."""
        return FlushSource(self._flush_log.node, self._flush_log.session, self.owned.epoch)

    @property
    def is_named(self) -> bool:
        return self.owned.ownership.owner.flushed == self.source

    @property
    def flushed_offset(self) -> int:
        """Everything below is in the bucket, flushed or shipped; 0 where the owner document does not say so yet."""
        return max(self._flushed_offset if self.is_named else 0, self.shipped_offset())

    def join(self, offset: int) -> Future[None]:
        """Done once the message at `offset`, which must be accepted already, is in the bucket."""
        answer: Future[None] = Future()
        answer.set_running_or_notify_cancel()
        with self._flush_log.changed:
            if self.is_closed:
                answer.set_exception(ClosedError("the topic is closed", path=self.log.directory))
                return answer
            if self.flushed_offset > offset:
                answer.set_result(None)
                return answer
            self._waiting.append((offset, answer))
        try:
            self.log.request_sync(offset + 1)
        except TidelogError as error:
            self.fail(error)
        self._flush_log.touch(self)
        self._flush_log.flush_for(self, offset, answer)
        return answer

    def plan(self, max_bytes: int) -> UploadPlan | None:
        """What is to be flushed next; None when nothing is."""
        begin = max(self._flushed_offset, self.shipped_offset())
        stop = whole_groups(self.log, self.log.durable_offset, self._group_of)
        if stop <= begin:
            return None
        return plan_upload(self.log, begin, stop, max_bytes, self._resume, group_of=self._group_of)

    def flushed(self, plan: UploadPlan) -> None:
        """It is in the bucket, and the owner document says where."""
        with self._flush_log.changed:
            self._flushed_offset, self._resume = plan.next_offset, plan.end
        self.answer()

    def answer(self) -> None:
        """Answers those whose messages are in the bucket."""
        with self._flush_log.changed:
            end = self.flushed_offset
            done = [answer for offset, answer in self._waiting if offset < end]
            self._waiting = [one for one in self._waiting if one[0] >= end]
        for one in done:
            one.set_result(None)
        self.on_flushed()

    def fail(self, error: TidelogError) -> None:
        """Those who wait get the error. Their messages are on the disk, and are flushed later if they can be."""
        with self._flush_log.changed:
            waiting, self._waiting = self._waiting, []
        for _, answer in waiting:
            answer.set_exception(error)
        self.on_flushed()

    def close(self) -> None:
        """Nothing of it is flushed from here on; returns when a flush that is under way has ended."""
        self._flush_log.remove(self)
        self.fail(ClosedError("the topic is closed", path=self.log.directory))


class _Flush(NamedTuple):
    """A flush that is not deleted yet, and how far each topic must be shipped for that."""

    key: str
    object: str
    needs: tuple[tuple[FlushedLog, int], ...]

    @property
    def is_shipped(self) -> bool:
        return all(log.shipped_offset() >= offset for log, offset in self.needs)

    @property
    def is_left(self) -> bool:
        """Whether nobody here knows any more how far one of the topics is shipped."""
        return any(log.is_closed and log.shipped_offset() < offset for log, offset in self.needs)


class FlushLog:
    """Flushes the topics of one node. It has a thread of its own, once there is something to do."""

    def __init__(
        self,
        metadata: MetadataStore,
        objects: ObjectStore,
        lease: NodeLease,
        root: str = DEFAULT_ROOT,
        *,
        runs_in_background: bool = True,
    ) -> None:
        """Without `runs_in_background` who waits for a message flushes it."""
        self._runs_in_background = runs_in_background
        self.node = lease.node
        self.session = lease.session
        self._is_alive = lease.is_alive
        self.changed = Condition()
        self._metadata = metadata
        self._objects = objects
        self._root = root
        self._logs: set[FlushedLog] = set()
        self._due: dict[FlushedLog, None] = {}
        """Those that the next round looks at, in this order."""
        self._generation = -1
        self._next_number = 0
        """0: the next flush begins a generation."""
        self._is_flushing = False
        self._begun_at = float("-inf")
        self._collected_at = time.monotonic()
        self._kept: deque[_Flush] = deque()
        self._seconds = Stopwatch()
        self._bytes = 0
        self._errors = 0
        self._background = Background(2, "tidelog-flush")
        self._task: Task = self._background.add(self._retried(self._work), NEVER)
        # Apart from the flushes, which wait for nothing else.
        self._collecting: Task = self._background.add(self._retried(self._collect), NEVER)

    def _retried(self, work: Callable[[], float]) -> Callable[[], float]:
        return with_backoff(work, _LONGEST_PAUSE_SECONDS, self._tell_error)

    def add(
        self,
        topic: str,
        log: Log,
        owned: OwnedCatalog,
        shipped_offset: Callable[[], int],
        group_of: GroupOf | None,
        fenced: Callable[[FencedError], None],
    ) -> FlushedLog:
        """From here on everything that the topic has synced is flushed soon."""
        found = FlushedLog(self, topic, log, owned, shipped_offset, group_of, fenced)
        with self.changed:
            self._logs.add(found)
        found.stop_listening = log.on_durable(lambda: self.touch(found))
        self.touch(found)
        return found

    def remove(self, log: FlushedLog) -> None:
        """No flush has it from here on."""
        log.stop_listening()
        with self.changed:
            log.is_closed = True
            self._logs.discard(log)
            self._due.pop(log, None)
            self.changed.wait_for(lambda: not self._is_flushing, _LONGEST_PAUSE_SECONDS)

    def touch(self, log: FlushedLog) -> None:
        """There may be something of this topic to flush."""
        with self.changed:
            if log in self._logs:
                self._due[log] = None
        self.wake()

    def wake(self) -> None:
        """Something may have to be flushed: at once, or as soon as the flush before is long enough ago."""
        if self._runs_in_background:
            self._task.wake(max(0.0, self._begun_at + FLUSH_SECONDS - time.monotonic()))

    def flush_for(self, log: FlushedLog, offset: int, answer: Future[None]) -> None:
        """Flushes in this thread until the waiter has its answer, where nothing runs in the background."""
        if self._runs_in_background:
            return
        try:
            log.log.wait_durable(offset, 1)
            while self._round() and not answer.done():
                pass
        except TidelogError as error:
            log.fail(error)
        if not answer.done():
            log.fail(ClosedError("the topic was closed before its messages were flushed", path=log.log.directory))

    def statistics(self) -> FlushStatistics:
        """One moment of it."""
        seconds = self._seconds.snapshot()
        return FlushStatistics(
            flushes=seconds.count,
            bytes=self._bytes,
            seconds=seconds,
            waiting_objects=len(self._kept),
            errors=self._errors,
        )

    def close(self) -> None:
        """The topics are closed before. What was flushed and is not shipped stays for who opens them next."""
        self._background.close()

    def _tell_error(self, error: TidelogError) -> None:
        self._errors += 1
        log_it = _logger.warning if isinstance(error, StoreUnavailableError) else _logger.error
        log_it("flushing to %s failed and is tried again: %s", self._objects.url, error)

    # One round

    def _work(self) -> float:
        begin = time.monotonic()
        if begin < self._begun_at + FLUSH_SECONDS:
            return self._begun_at + FLUSH_SECONDS - begin
        self._begun_at = begin
        return max(0.0, begin + FLUSH_SECONDS - time.monotonic()) if self._round() else NEVER

    def _round(self) -> bool:
        """Whether more is waiting."""
        with self.changed:
            self._is_flushing = True
            logs, self._due = list(self._due), {}
        again = logs
        try:
            has_more, again = self._flush(logs)
            return has_more
        except TidelogError as error:
            for log in logs:
                log.fail(error)
            raise
        finally:
            with self.changed:
                self._due = dict.fromkeys(log for log in (*again, *self._due) if log in self._logs)
                self._is_flushing = False
                self.changed.notify_all()

    def _flush(self, logs: Sequence[FlushedLog]) -> tuple[bool, list[FlushedLog]]:
        """Whether more is waiting, and which the next round looks at: first those that were left out of this one."""
        left_out: list[FlushedLog] = []
        plans: list[tuple[FlushedLog, UploadPlan]] = []
        room = _MAX_FLUSH_BYTES
        for log in logs:
            plan = self._planned(log, room)
            if plan is None:
                log.answer()  # its own objects may have caught up
                continue
            if plan.raw_bytes > room and plans:
                left_out.append(log)
                continue
            plans.append((log, plan))
            room = max(1, room - plan.raw_bytes)
        if plans:
            begin = time.monotonic()
            has_more = self._write(plans)
            self._seconds.add(time.monotonic() - begin)
            return has_more or bool(left_out), [*left_out, *(log for log, _ in plans)]
        return False, []

    def _planned(self, log: FlushedLog, room: int) -> UploadPlan | None:
        try:
            return log.plan(room)
        except TidelogError as error:  # damage, or a log that was closed: the others are flushed
            log.fail(error)
            return None

    def _write(self, plans: Sequence[tuple[FlushedLog, UploadPlan]]) -> bool:
        began = time.monotonic()
        if self._next_number == 0:
            self._begin_generation()
        plans = self._still_owned(plans, [log for log, _ in plans if log.verified_in != self._generation])
        if not plans:
            return False
        data, sections = encode_flush([(log.topic, log.log, log.owned, plan) for log, plan in plans])
        key = FlushKey(self.node, self.session, self._generation, self._next_number)
        name = flush_object(key, secrets.token_hex(8))
        self._objects.put(name, data)
        document = FlushDocument(object=name, size=len(data))
        try:
            self._create(key, document)
        except ConflictError:
            # Somebody has taken over a topic of ours: the next round asks which.
            self._next_number = 0
            with contextlib.suppress(TidelogError):
                self._objects.delete(name)
            return True
        self._next_number += 1
        self._bytes += len(data)
        needs = tuple((log, section.next_offset) for (log, _), section in zip(plans, sections, strict=True))
        self._kept.append(_Flush(flush_key(key, self._root), name, needs))
        if self._runs_in_background:
            self._collecting.wake(_LOOK_SECONDS)
        if time.monotonic() - began > _TRUSTED_SECONDS:
            plans = self._still_owned(plans, [log for log, _ in plans])
        for log, plan in self._named(plans):
            log.flushed(plan)
        return True

    def _begin_generation(self) -> None:
        self._generation += 1
        self._create(FlushKey(self.node, self.session, self._generation, 0), FlushDocument())
        self._next_number = 1

    def _create(self, key: FlushKey, document: FlushDocument) -> None:
        text = flush_key(key, self._root)
        self._metadata.commit([Check(text, None)], [Put(text, encode_json(document))])

    def _still_owned(
        self, plans: Sequence[tuple[FlushedLog, UploadPlan]], asked: Sequence[FlushedLog]
    ) -> list[tuple[FlushedLog, UploadPlan]]:
        """Those of the plans whose topics are ours, after the store was asked about some of them."""
        lost: set[FlushedLog] = set()
        keys = [log.owned.catalog.keys.owner for log in asked]
        found = self._metadata.get_many(keys) if keys else {}
        for log, key in zip(asked, keys, strict=True):
            entry = found.get(key)
            if entry is not None and entry.version == log.owned.ownership.version:
                log.verified_in = self._generation
            elif not self._is_ours(log):
                lost.add(log)
        return [one for one in plans if one[0] not in lost]

    def _is_ours(self, log: FlushedLog) -> bool:
        try:
            log.owned.ownership.verify()
        except FencedError as error:
            self._lose(log, error)
            return False
        log.verified_in = self._generation
        return True

    def _lose(self, log: FlushedLog, error: FencedError) -> None:
        log.stop_listening()
        with self.changed:
            self._logs.discard(log)
        log.fail(error)
        log.fenced(error)

    def _named(self, plans: Sequence[tuple[FlushedLog, UploadPlan]]) -> Iterator[tuple[FlushedLog, UploadPlan]]:
        """Those whose owner document names this session, which it does before anything is acknowledged."""
        for log, plan in plans:
            if not log.is_named:
                try:
                    log.owned.ownership.name_flushes(log.source)
                except FencedError as error:
                    self._lose(log, error)
                    continue
            yield log, plan

    # Deleting what the catalogs have

    def _collect(self) -> float:
        gone: list[_Flush] = []
        # Only here anything is taken out of it.
        while self._kept and (self._kept[0].is_shipped or self._kept[0].is_left):
            first = self._kept.popleft()
            if first.is_shipped:
                gone.append(first)
        for some in _chunks(gone):
            self._remove([one.key for one in some], [one.object for one in some])
        if time.monotonic() - self._collected_at > _COLLECT_SECONDS:
            self._collected_at = time.monotonic()
            self._collect_left()
        return _LOOK_SECONDS if self._kept else NEVER

    def _collect_left(self) -> None:
        """What sessions that ended have left, and what this one has left of topics that others own now."""
        kept = {one.key for one in list(self._kept)}
        newest = self._generation, self._next_number

        def is_needed(key: FlushKey) -> bool:
            is_own = (key.node, key.session) == (self.node, self.session)
            return not is_own or flush_key(key, self._root) in kept or (key.generation, key.number) >= newest

        collect_flushes(self._metadata, self._objects, self._root, is_needed, self._is_alive)

    def _remove(self, keys: Sequence[str], objects: Sequence[str]) -> None:
        _delete_documents(self._metadata, keys)
        self._objects.delete(objects)


def _chunks(flushes: Sequence[_Flush]) -> Iterator[Sequence[_Flush]]:
    return (flushes[at : at + _KEYS_AT_ONCE] for at in range(0, len(flushes), _KEYS_AT_ONCE))


def _delete_documents(metadata: MetadataStore, keys: Sequence[str]) -> None:
    """Before their objects: a document never names what is not there."""
    if metadata.supports_multi_key:
        metadata.commit([], [Delete(key) for key in keys])
        return
    for key in keys:
        metadata.delete(key)


# The object


def encode_flush(parts: Iterable[tuple[str, Log, OwnedCatalog, UploadPlan]]) -> tuple[bytes, list[Section]]:
    """The bytes of a flush, and what is where in them. The frames are read from the files, and checked."""
    frames: list[bytes | memoryview] = []
    sections: list[Section] = []
    position = 0
    for topic, log, owned, plan in parts:
        owner, begin = owned.ownership.owner, position
        for piece in plan.pieces:
            for some in frames_of(log.files, piece, _MAX_FLUSH_BYTES):
                data = memoryview(some.buffer)[: some.end]
                frames.append(data)
                position += len(data)
        places = (plan.first_offset, plan.next_offset, begin, position - begin)
        sections.append(Section(topic, owner.log_id, owner.epoch, *places))
    table = msgspec.json.encode(sections)
    return b"".join((_HEAD.pack(_MAGIC, len(table), crc32(table)), table, *frames)), sections


def read_sections(objects: ObjectStore, document: FlushDocument) -> list[Section]:
    """The table of a flush, with positions in the object; DataError when it is damaged."""
    name = document.object
    begin = bytes(objects.read_range(name, 0, min(document.size, _HEAD.size + _USUAL_TABLE_BYTES)))
    if len(begin) < _HEAD.size:
        raise DataError(f"{name} is too short to be a flush: {len(begin)} bytes")
    magic, size, checksum = _HEAD.unpack_from(begin)
    if magic != _MAGIC or size > min(_MAX_TABLE_BYTES, document.size - _HEAD.size):
        raise DataError(f"{name} is no flush: it begins with {begin[:8]!r}")
    table = begin[_HEAD.size : _HEAD.size + size]
    if len(table) < size:
        table += objects.read_range(name, _HEAD.size + len(table), size - len(table))
    if len(table) != size or crc32(table) != checksum:
        raise DataError(f"the checksum of the table of {name} does not match")
    try:
        found = from_json(table, list[Section])
    except JSON_ERRORS as error:
        raise DataError(f"the table of {name} is damaged: {error}") from error
    first = _HEAD.size + size
    placed = [msgspec.structs.replace(one, position=one.position + first) for one in found]
    for one in placed:
        is_inside = first <= one.position and one.length > 0 and one.position + one.length <= document.size
        if not is_inside or not 0 <= one.first_offset < one.next_offset <= MAX_OFFSET + 1:
            raise DataError(f"the table of {name} names bytes or offsets that cannot be: {one}")
    return placed


# Reading it back


class FlushReader:
    """Finds what was acknowledged and is in no catalog yet, for topics that are opened. Threads may share it."""

    def __init__(self, metadata: MetadataStore, objects: ObjectStore, session: str, root: str = DEFAULT_ROOT) -> None:
        """`session` is that of this node: its own flushes need no fence."""
        self._metadata = metadata
        self._objects = objects
        self._session = session
        self._root = root
        self._tables: dict[str, dict[tuple[str, int], Section]] = {}
        self._known: dict[tuple[str, str], list[_Step]] = {}
        """The session that was fenced last: nothing is added to what it had then."""

    def frames(self, source: FlushSource, log_id: str, first_offset: int) -> Iterator[Frames]:
        """The frames of a topic from an offset on, after the flushes of its earlier owner are fenced.

        An error is an error: nothing is taken for empty that could not be read.
        """
        position = first_offset
        for key, document in self._fenced(source):
            section = self._table(key, document).get((log_id, source.epoch))
            if section is None or section.next_offset <= position:
                continue
            if section.first_offset > position:
                raise DataError(
                    f"offsets {position} to {section.first_offset - 1} were flushed by {source.node}, and neither the "
                    "catalog nor a flush has them",
                    operation="open",
                )
            yield self._frames(document.object, section, position)
            position = section.next_offset

    def _fenced(self, source: FlushSource) -> list[_Step]:
        """Of a session that was fenced before, only whether it has begun another generation is asked: many topics of a
        node that ended are opened at once."""
        if source.session == self._session:
            return self._documents(source)
        known = self._known.get(source[:2])
        if known:
            prefix = flushes_prefix(self._root, source.node, source.session)
            behind = flush_key(known[-1][0], self._root) + "0"
            if not self._metadata.keys(prefix, start=behind, limit=1):
                return known
        found = _fenced(self._metadata, self._root, source.node, source.session)
        self._known = {source[:2]: found}
        return found

    def _documents(self, source: FlushSource) -> list[_Step]:
        return _documents(self._metadata, flushes_prefix(self._root, source.node, source.session), self._root)

    def _table(self, key: FlushKey, document: FlushDocument) -> dict[tuple[str, int], Section]:
        if not document.object:
            return {}
        found = self._tables.get(document.object)
        if found is None:
            try:
                sections = read_sections(self._objects, document)
            except NotFoundError:
                if self._metadata.get(flush_key(key, self._root)) is not None:
                    raise
                return {}  # the catalogs have all of it: it was deleted meanwhile
            found = {(one.log_id, one.epoch): one for one in sections}
            if len(self._tables) >= _KEPT_TABLES:
                self._tables.clear()
            self._tables[document.object] = found
        return found

    def _frames(self, name: str, section: Section, position: int) -> Frames:
        data = bytes(self._objects.read_range(name, section.position, section.length))
        found = scan(data, 0, section.first_offset)
        if found.stop is not Stop.END or found.frames.next_offset != section.next_offset:
            raise DataError(
                f"{section.topic} in {name} is damaged at byte {section.position + found.end}: {found.stop.reason}",
                operation="open",
            )
        return found.frames.slice(position - section.first_offset, found.frames.count)


_Step = tuple[FlushKey, FlushDocument]


def _fenced(metadata: MetadataStore, root: str, node: str, session: str) -> list[_Step]:
    """The documents of a session, after which nothing can be added to any of its generations."""
    for _ in range(_ATTEMPTS):
        found = _documents(metadata, flushes_prefix(root, node, session), root)
        last = [list(some)[-1] for _, some in groupby(found, key=lambda one: one[0].generation)]
        unfenced = [key for key, document in last if not document.is_fence]
        if not unfenced:
            return found
        for key in unfenced:
            text = flush_key(key._replace(number=key.number + 1), root)
            with contextlib.suppress(ConflictError):  # it has flushed once more
                metadata.commit([Check(text, None)], [Put(text, encode_json(FlushDocument(is_fence=True)))])
    raise StoreUnavailableError(
        f"the flushes of {node} could not be fenced in {_ATTEMPTS} attempts", hint="Open the topic again"
    )


def _documents(metadata: MetadataStore, prefix: str, root: str) -> list[_Step]:
    found = []
    for entry in metadata.range(prefix):
        key = parse_flush_key(entry.key, root)
        if key is None:
            continue
        try:
            found.append((key, from_json(entry.value, FlushDocument)))
        except JSON_ERRORS as error:
            raise DataError(f"{entry.key} in the metadata store is no document of a flush: {error}") from error
    return found


def collect_flushes(
    metadata: MetadataStore,
    objects: ObjectStore,
    root: str,
    is_needed: Callable[[FlushKey], bool],
    is_alive: Callable[[str, str], bool],
) -> None:
    """Deletes the flushes that the catalogs have all of, and what interrupted flushes of sessions that ended have left.

    `is_needed` says of a flush of a session that is alive whether it stays. Of a session that ended a fence stays for
    each generation.
    """
    covered = _Covered(Catalogs(metadata, root, lambda: None), objects)
    found = _documents(metadata, flushes_prefix(root), root)
    for (node, session), steps in groupby(found, key=lambda one: one[0][:2]):
        if is_alive(node, session):
            gone = [one for one in steps if one[1].object and not is_needed(one[0]) and covered.has(one[1])]
            _delete_flushes(metadata, objects, root, gone)
            continue
        if all(document.is_clean for _, document in steps):
            continue
        fenced = _fenced(metadata, root, node, session)
        for _, generation in groupby(fenced, key=lambda one: one[0].generation):
            _collect_generation(metadata, objects, root, list(generation), covered)


def _collect_generation(
    metadata: MetadataStore, objects: ObjectStore, root: str, steps: Sequence[_Step], covered: _Covered
) -> None:
    """Of a generation to which nothing can be added."""
    flushes, (fence, document) = [one for one in steps if one[1].object], steps[-1]
    gone = [one for one in flushes if covered.has(one[1])]
    _delete_flushes(metadata, objects, root, gone)
    if document.is_clean or len(gone) < len(flushes):
        return
    # No document names any of its objects, or ever will.
    objects.delete([info.key for info in objects.list(flush_objects_prefix(fence))])
    _delete_documents(metadata, [flush_key(key, root) for key, one in steps if not (one.is_fence or one.object)])
    metadata.put(flush_key(fence, root), encode_json(FlushDocument(is_fence=True, is_clean=True)))


def _delete_flushes(metadata: MetadataStore, objects: ObjectStore, root: str, gone: Sequence[_Step]) -> None:
    for at in range(0, len(gone), _KEYS_AT_ONCE):
        some = gone[at : at + _KEYS_AT_ONCE]
        _delete_documents(metadata, [flush_key(key, root) for key, _ in some])
        objects.delete([document.object for _, document in some])


class _Covered:
    """What the catalogs have by now; each is asked once."""

    def __init__(self, catalogs: Catalogs, objects: ObjectStore) -> None:
        self._catalogs = catalogs
        self._objects = objects
        self._ends: dict[tuple[str, str], int] = {}

    def has(self, document: FlushDocument) -> bool:
        try:
            sections = read_sections(self._objects, document)
        except NotFoundError:
            return False  # another node deletes it
        return all(self._end(one.topic, one.log_id) >= one.next_offset for one in sections)

    def _end(self, topic: str, log_id: str) -> int:
        known = self._ends.get((topic, log_id))
        if known is None:
            catalog = self._catalogs.of(*topic.split("/", 1))
            owner = catalog.owner()
            is_there = owner is not None and owner[0].log_id == log_id
            # Nobody reads the flushes of a topic that was deleted.
            known = self._ends[topic, log_id] = catalog.next_offset() if is_there else MAX_OFFSET + 1
        return known
