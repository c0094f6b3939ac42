"""Locates Danube's files and objects, reads their frames in bounded memory, and orders them by offset.

    <wal_root>/<namespace>/<topic>/wal.log               the first file of a topic
    <wal_root>/<namespace>/<topic>/wal.<seq>.log         the files after it
    storage/topics/<namespace>/<topic>/segments/data-<start>-<unix seconds>.dnb1      an object, below the store's URL
    storage/topics/<namespace>/<topic>/objects/data-<start>-<unix seconds>.dnb1       the same of Danube 0.6.2 to 0.8
    storage/topics/<namespace>/<topic>/objects/data-<start>-<last offset>.dnb1        the same of Danube 0.5 to 0.6.1
    storage/topics/<namespace>/<topic>/objects/data-<start>-pending.dnb1              an unfinished upload of those

Invariants
- Danube's files and objects are never modified.
- Names only determine the order in which files are read. The frames determine the offsets: Danube records a wrong start
  for some files, and uploads some of them repeatedly. The last offset in a name is that of the last frame: an object
  without that frame is damaged, even if it ends with a whole frame.
- A bucket may hold objects of all versions. They form one topic, even where they overlap.
- Uploads that Danube did not finish are reported and left out: it sent their messages again, or reassigned their
  offsets.
- A directory or a store that cannot be read is an error, never an empty topic.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tidelog.errors import CorruptionError, InputError, NotFoundError
from tidelog.files import File, Files, LocalFiles
from tidelog.imports.danube.frames import Damage, Event, ReadAt, Run, read_frames
from tidelog.imports.danube.message import decode_danube_message
from tidelog.log.frame import HEADER_BYTES
from tidelog.store.object_store import ObjectInfo, ObjectStore

_FIRST_WAL_FILE = "wal.log"
_WAL_FILE = re.compile(r"wal\.([0-9]{1,19})\.log", re.ASCII)
_OBJECT = re.compile(
    r"storage/topics/([^/]+/[^/]+)/(segments|objects)/data-([0-9]{1,20})-([0-9]{1,20}|pending)\.dnb1", re.ASCII
)
_OBJECTS_PREFIX = "storage/topics/"
_TIDELOG_FILE = "topic.json"
_PENDING = "pending"
# September 2020. Danube uploaded nothing before.
_FIRST_SECONDS = 1_600_000_000


class DanubeFile(NamedTuple):
    """A file or an object: `order` is its place among those of its topic, `last_offset` the last one by its name."""

    name: str
    size: int
    order: tuple[int, ...]
    opened: Callable[[], AbstractContextManager[ReadAt]]
    last_offset: int | None = None

    def frames(self, max_payload_bytes: int) -> Iterator[Event]:
        """Everything in the file, from the beginning."""
        with self.opened() as read_at:
            events = read_frames(self.name, self.size, read_at, max_payload_bytes)
            yield from events if self.last_offset is None else _up_to(self.last_offset, self, events)


class DanubeTopic(NamedTuple):
    """A topic in one place: `namespace/topic`, and its files in the order in which they are read.

    `unfinished` are the names of uploads that Danube did not finish.
    """

    name: str
    files: tuple[DanubeFile, ...]
    unfinished: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def frames(self, max_payload_bytes: int) -> Iterator[Event]:
        """Everything in the files, from the beginning."""
        for file in self.files:
            yield from file.frames(max_payload_bytes)


def _up_to(last_offset: int, file: DanubeFile, events: Iterator[Event]) -> Iterator[Event]:
    """The frames of an object that has its last offset in its name, where others have the time of the upload."""
    is_whole = False
    tail: Damage | None = None
    for event in events:
        if isinstance(event, Run):
            is_whole = last_offset < event.next_offset
            yield replace(event, is_dated=False)
        elif event.is_tail:
            tail = event
        else:
            yield event
    if not is_whole:
        reason = f"an end before offset {last_offset}, the last one by its name,"
        tail = (tail or Damage(file.name, file.size, 0, reason, True))._replace(last_offset=last_offset)
    if tail is not None:
        yield tail


# WAL files


def find_wal_topics(directory: Path, files: Files | None = None) -> list[DanubeTopic]:
    """The topic whose WAL directory this is, or all topics below a WAL root."""
    files = files or LocalFiles()
    if not files.is_directory(directory):
        raise NotFoundError(f"there is no directory {directory}", hint="--wal names Danube's WAL directory")
    topic = _wal_topic(files, directory)
    found = [topic] if topic is not None else [*_topics_below(files, directory)]
    if not found:
        raise NotFoundError(
            f"there is no WAL of Danube in {directory}",
            hint="--wal names the directory of a topic, with wal.log in it, or the root with <namespace>/<topic> below",
        )
    return found


def _topics_below(files: Files, root: Path) -> Iterator[DanubeTopic]:
    for namespace in _directories(files, root):
        for directory in _directories(files, namespace):
            if (topic := _wal_topic(files, directory)) is not None:
                yield topic


def _directories(files: Files, parent: Path) -> list[Path]:
    return [parent / name for name in files.list(parent) if files.is_directory(parent / name)]


def _wal_topic(files: Files, directory: Path) -> DanubeTopic | None:
    names = files.list(directory)
    numbered = sorted((seq, name) for name in names if (seq := _wal_seq(name)) is not None)
    if not numbered:
        return None
    if _TIDELOG_FILE in names:
        raise InputError(f"{directory} is a topic of tidelog, not of Danube", hint="Read it with `tidelog consume`")
    for (seq, name), (other_seq, other) in pairwise(numbered):
        if seq == other_seq:
            raise InputError(f"{name} and {other} in {directory} are both file {seq}", hint="Move one of them away")
    whole = directory.absolute()
    found = (_wal_file(files, directory / name, seq) for seq, name in numbered)
    return DanubeTopic(f"{whole.parent.name}/{whole.name}", tuple(found))


def _wal_seq(name: str) -> int | None:
    if name == _FIRST_WAL_FILE:
        return 0
    match = _WAL_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def _wal_file(files: Files, path: Path, seq: int) -> DanubeFile:
    file = files.open(path)
    try:
        return DanubeFile(str(path), file.size(), (seq, 0), partial(_opened, files, path))
    finally:
        file.close()


@contextmanager
def _opened(files: Files, path: Path) -> Iterator[ReadAt]:
    file: File = files.open(path)
    try:
        yield file.read_at
    finally:
        file.close()


# Objects


def find_object_topics(store: ObjectStore, name: str | None = None, *, by_time: bool = False) -> list[DanubeTopic]:
    """The topics that have objects in a store, or the one of this name.

    Objects are read in the order of their offsets; `by_time` in the order in which they were uploaded, which tells the
    lives of a topic apart that used their offsets twice.
    """
    prefix = _OBJECTS_PREFIX if name is None else f"{_OBJECTS_PREFIX}{name}/"
    topics: dict[str, list[DanubeFile]] = {}
    unfinished: dict[str, list[str]] = {}
    for info in store.list(prefix):
        match = _OBJECT.fullmatch(info.key)
        if match is None:
            continue
        topic, folder, start, end = match.groups()
        files = topics.setdefault(topic, [])
        if end != _PENDING:
            files.append(_object(store, info, int(start), int(end), folder == "objects", by_time))
        else:
            unfinished.setdefault(topic, []).append(info.key)
    if not topics:
        raise NotFoundError(
            f"there are no objects of Danube in {store.url}/{prefix}",
            hint="The URL must name the parent of storage/topics/, including the prefix in the settings of Danube",
        )
    return [
        DanubeTopic(topic, _ordered(topics[topic]), tuple(sorted(unfinished.get(topic, ()))))
        for topic in sorted(topics)
    ]


def _ordered(files: Iterable[DanubeFile]) -> tuple[DanubeFile, ...]:
    return tuple(sorted(files, key=lambda file: (file.order, file.name)))


def _object(store: ObjectStore, info: ObjectInfo, start: int, end: int, is_older: bool, by_time: bool) -> DanubeFile:
    """Without a time in its name an object is older than all that have one, and the store knows when it came."""
    opened = partial(_ranges, store, info.key)
    if is_older and not _is_time(end, start, info.size):
        time = (0, info.modified_us)
        return DanubeFile(info.key, info.size, (*time, start) if by_time else (start, *time), opened, end)
    return DanubeFile(info.key, info.size, (1, end, start) if by_time else (start, 1, end), opened)


def _is_time(number: int, start: int, size: int) -> bool:
    """Whether the second number of an older name is a time. As a last offset it asks for more frames than fit in."""
    return number >= _FIRST_SECONDS and (number - start) * HEADER_BYTES > size


@contextmanager
def _ranges(store: ObjectStore, key: str) -> Iterator[ReadAt]:
    yield lambda position, size: bytes(store.read_range(key, position, size))


# Orders the runs of a Danube topic: yields each offset once and reports everything that is missing or repeated.
#
# Invariants
# - The output is contiguous, except across a `Gap`, which is yielded in its position.
# - A repeated offset is used once: `first_difference` compares it with the one used before. If they differ, Danube has
#   restarted with offsets that it had already used. That is refused, or those messages get the next free offsets.
# - The missing end of a file that no other source has is reported: a `Gap` follows the last run, too.
# - Frames that arrive early wait for those that belong before them, until `WINDOW_BYTES` have been read, no longer.
# - A lone frame far ahead is not trusted: the checksum does not cover its offset, and one flipped bit must not create a
#   gap of billions of messages that never existed.


WINDOW_BYTES = 16 << 20
_FIRST_MESSAGES = 1000
_FIRST_BYTES = 4 << 20
# How far out of place a frame may be at the very beginning, where nothing before it tells.
_LITTLE = 64
_CREDIBLE_JUMP = 1 << 16


class Gap(NamedTuple):
    """Offsets `first` to `last` (inclusive) are missing everywhere they should be. `damage` may be the reason.

    `after` is the run that follows, None at the end; if it is not credible, nothing is missing but its own frame is
    misplaced.
    """

    first: int
    last: int
    after: Run | None
    damage: Damage | None
    is_credible: bool


Step = Run | Gap | Damage
FirstDifference = Callable[[Run], "int | None"]


def in_order(events: Iterable[Event], first_difference: FirstDifference, *, renumber: bool) -> Iterator[Step]:
    """Runs and gaps in the order of offsets, and every damage as it is met.

    A step must have been dealt with before the next one is asked for: what was taken may come again.
    """
    order = _Order(first_difference, renumber)
    for event in events:
        yield from order.add(event)
    yield from order.finish()


class _Order:
    """`_next` is the offset that comes next; while `_is_beginning`, runs gather until it is clear where they begin."""

    def __init__(self, first_difference: FirstDifference, renumber: bool) -> None:
        self._first_difference = first_difference
        self._renumber = renumber
        self._next: int | None = None
        self._shift = 0
        self._is_beginning = True
        self._beginning: list[Event] = []
        self._early: list[tuple[int, int, Run]] = []
        self._damage: Damage | None = None
        self._promise: tuple[int, Damage] | None = None
        self._read_bytes = 0
        self._waiting_since_bytes = 0
        self._arrivals = 0

    def add(self, event: Event) -> Iterator[Step]:
        """Takes what comes next in the files."""
        if not self._is_beginning:
            yield from self._meet(event) if isinstance(event, Damage) else self._add(event)
            return
        self._beginning.append(event)
        runs = _runs(self._beginning)
        if sum(run.count for run in runs) >= _FIRST_MESSAGES or sum(run.size for run in runs) >= _FIRST_BYTES:
            yield from self._begin()

    def finish(self) -> Iterator[Step]:
        """Ends the input: waiting runs are released."""
        while self._beginning or self._early:
            yield from self._begin() if self._beginning else self._give_up_waiting()
        yield from self._end()

    # Beginnings

    def _begin(self) -> Iterator[Step]:
        """The first offset of what has gathered comes next."""
        events, self._beginning = self._beginning, []
        self._is_beginning = False
        if runs := _runs(events):
            first = _first_of(runs)
            self._next = first if self._next is None else self._next
            self._shift = self._next - first
        for event in events:
            yield from self.add(event)

    def _begin_again(self, run: Run, index: int) -> Iterator[Step]:
        """Another message where one was taken before: after a restart, offsets were used a second time."""
        if not self._renumber:
            raise _restart_error(run, index)
        is_first = not self._is_beginning
        self._is_beginning = True
        while self._early and is_first:
            yield from self._give_up_waiting()
        if is_first:
            yield from self._end()
        self._beginning.append(run.slice(index))

    # In the middle

    def _meet(self, damage: Damage) -> Iterator[Step]:
        """It explains what is missing next, unless something is missing already."""
        if not self._early and self._damage is None:
            self._damage = damage
        if damage.last_offset is not None:
            promised = damage.last_offset + self._shift
            if self._promise is None or self._promise[0] < promised:
                self._promise = promised, damage
        yield damage

    def _add(self, run: Run) -> Iterator[Step]:
        self._read_bytes += run.size
        run = run.shifted(self._shift)
        if run.first_offset != self._position and _has_wrong_offset(run, self._position - self._shift):
            yield from self._meet(
                Damage(run.file, run.byte(), run.size, "an offset that is not the message's own", False)
            )
        elif run.first_offset > self._position:
            self._wait(run)
        else:
            yield from self._place(run)
            yield from self._place_early()
        while self._early and self._read_bytes - self._waiting_since_bytes > WINDOW_BYTES:
            yield from self._give_up_waiting()

    def _wait(self, run: Run) -> None:
        if not self._early:
            self._waiting_since_bytes = self._read_bytes
        self._arrivals += 1
        heapq.heappush(self._early, (run.first_offset, self._arrivals, run.alone()))

    def _place_early(self) -> Iterator[Step]:
        """Those that waited for what has just been placed."""
        while self._early and self._early[0][0] <= self._position:
            yield from self._place(heapq.heappop(self._early)[2])
            self._waiting_since_bytes = self._read_bytes

    def _place(self, run: Run) -> Iterator[Step]:
        """A run that begins at the next offset or before it."""
        again = run.slice(0, max(0, min(run.count, self._position - run.first_offset)))
        difference = self._first_difference(again) if again.count else None
        if difference is not None:
            yield from self._begin_again(run, difference)
            return
        new = run.slice(again.count)
        if new.count:
            self._damage = None
            self._next = new.next_offset
            yield new

    def _give_up_waiting(self) -> Iterator[Step]:
        """What the earliest of those that wait was waiting for does not come."""
        run = heapq.heappop(self._early)[2]
        is_credible = self._is_credible(run)
        yield Gap(self._position, run.first_offset - 1, run, self._damage, is_credible)
        self._waiting_since_bytes = self._read_bytes
        if is_credible:
            self._next = run.first_offset
            yield from self._place(run)
            yield from self._place_early()

    def _end(self) -> Iterator[Step]:
        """Nothing follows in this life of the topic: what a file should have ended with does not come."""
        promise, self._promise = self._promise, None
        if promise is None or (self._next is not None and promise[0] < self._next):
            return
        last, damage = promise
        yield Gap(last if self._next is None else self._next, last, None, damage, True)
        self._next = last + 1

    def _is_credible(self, run: Run) -> bool:
        if run.count > 1 or run.first_offset - self._position <= _CREDIBLE_JUMP:
            return True
        return bool(self._early) and self._early[0][0] == run.next_offset

    @property
    def _position(self) -> int:
        assert self._next is not None
        return self._next


def _runs(events: list[Event]) -> list[Run]:
    return [event for event in events if isinstance(event, Run)]


def _has_wrong_offset(run: Run, expected: int) -> bool:
    """Whether a lone frame's message says that it is the one that is expected, and its header another offset.

    The checksum covers the message alone: it is the header that is damaged.
    """
    if run.count > 1 or expected == 0:
        return False
    try:
        message = decode_danube_message(run.frames.payloads()[0], expected, run.file, run.byte())
    except CorruptionError:
        return False
    return message.topic_offset == expected


def _first_of(runs: list[Run]) -> int:
    """Where these runs begin, in Danube's offsets. A lone frame ahead of two that agree is not believed.

    The run that begins there comes before any that goes far back, so something is placed before that one is looked at.
    """
    confirmed = next((index for index, run in enumerate(runs) if run.count > 1), 0)
    first = anchor = min(run.frames.first_offset for run in runs[: confirmed + 1])
    for run in runs:
        if run.frames.first_offset < anchor - _LITTLE:
            break
        first = min(first, run.frames.first_offset)
    return first


def _restart_error(run: Run, index: int) -> CorruptionError:
    offset = run.frames.first_offset + index
    return CorruptionError(
        f"offset {offset} occurs twice with different messages: "
        "Danube used its offsets a second time, as it does after a restart without sealing",
        path=run.file,
        byte=run.byte(index),
        hint="--on-restart renumber imports all of them: from here on messages get the offsets that come next, and "
        "keep Danube's in the header danube-offset",
    )
