"""Rescues the messages that a fenced owner accepted but did not ship: inspects them, appends them to a topic, or
discards them.

    <log>/fenced/e{epoch}-{claim}/rescued.json    the logs to which the tail was appended, and from which offset

Invariants
- A divergent tail never regains its offsets in its topic. It is appended as new messages, which carry their origin in
  two headers: `tidelog-rescued-from` ("namespace/name e{epoch}-{claim}") and `tidelog-rescued-offset`.
- Appending can be interrupted and repeated: it finds by these headers the part of the tail that the target already has
  and continues after it. (If retention has deleted all of that part from the target meanwhile, it is appended again.)
- Each partition of a topic has tails of its own. In their own topic, and in one with as many partitions, messages get
  the partition that they came from; in another one that of their key. That is settled when a tail is appended for the
  first time: partitions that are added later get nothing of it.
- Where a tail was appended is written down by the names of logs, not of nodes: a log that has moved to another
  node is the same target.
- Only `discard` deletes anything.
- A fenced log that was not opened since is still in the topic's own directory. It is moved aside first, under the lock
  of the log directory, while nobody opens it here, and without claiming anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.codec import decode_document, encode_document
from tidelog.cold.takeover import (
    DivergentTail,
    discard,
    divergent_tails,
    fenced_files,
    put_fenced_files_aside,
    secure_tails,
    tail_directory,
)
from tidelog.cold.upload import bytes_from, place_of
from tidelog.errors import ConflictError, DataError, InputError
from tidelog.files import Files
from tidelog.log.binding import bound
from tidelog.log.directory import wal_files
from tidelog.log.isolation import Isolation, decided_batches
from tidelog.log.segment import FilePart
from tidelog.log.view import LogView
from tidelog.staging.ingest import read_ingested_ranges
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import BatchDecoder, Message, OnGap, group_of, with_headers
from tidelog.topics.names import parse_topic_name
from tidelog.topics.partitioned import partition_of

RESCUED_FROM = "tidelog-rescued-from"
RESCUED_OFFSET = "tidelog-rescued-offset"
_PROGRESS_FILE = "rescued.json"
_KIND = "rescued"
_VERSION = 1
_BATCH_MESSAGES = 1000

OnDone = Callable[[int], None]


class RescuableTail(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that were accepted under an epoch and never shipped.

    `file_bytes` is the size of all its files, in which there may be shipped messages too. `set_aside_us` is None while
    the files lie where the topic's own are.
    """

    topic: str
    name: str
    epoch: int
    first_offset: int
    next_offset: int
    file_bytes: int
    set_aside_us: int | None

    @property
    def count(self) -> int:
        return max(0, self.next_offset - self.first_offset)

    @property
    def origin(self) -> bytes:
        """What its messages have in the header `tidelog-rescued-from`."""
        return f"{self.topic} {self.name}".encode()


class Rescued(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for a tail: messages appended now, found in the target already, marked as lost by an earlier repair,
    and staged by other processes: the topic's current owner has ingested these from where they were staged.
    """

    appended: int
    already_there: int
    lost: int
    handed_over: int = 0


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    """`into` has by log the offset that was next in it when the first message was about to be appended; `partitions`
    has by topic over how many the messages are spread."""

    into: dict[str, int]
    partitions: dict[str, int] = {}


class Origin(NamedTuple):
    """Whose log this is: that of one of the partitions of a topic."""

    topic: str
    number: int
    partitions: int


class RescueTarget(Protocol):
    """What is asked of the log that messages are appended to."""

    @property
    def name(self) -> str: ...
    @property
    def start_offset(self) -> int: ...
    @property
    def next_offset(self) -> int: ...
    def append_many(self, messages: Iterable[bytes | Message], *, sync: bool = False) -> list[int]: ...
    def read(self, start: int, *, on_gap: OnGap, isolation: Isolation) -> Iterable[Message]: ...


class RescueInto(NamedTuple):
    """A topic that a tail is appended to: the names of its logs by number of partition, and what opens one."""

    topic: str
    logs: Sequence[str]
    opened: Callable[[int], RescueTarget]


class Rescue:
    """The fenced tails of one log, which is a topic or a partition of one, in a log directory. What changes anything
    needs that open for writing."""

    def __init__(
        self,
        log: LogDirectory,
        topic: str,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.topic = topic
        self.origin = origin or Origin(topic, 0, 1)
        self._log = log
        self._name = parse_topic_name(topic)
        self._directory = self._name.directory(log.root)
        self._files = bound(files)
        self._clock = clock or SystemClock()

    @classmethod
    def of_partitions(cls, log: LogDirectory, topic: str) -> list[Rescue]:
        """Those of all logs that a topic consists of."""
        names = log.partition_logs(topic)
        return [cls(log, name, origin=Origin(topic, number, len(names))) for number, name in enumerate(names)]

    # Finding

    def tails(self, *, in_place: bool = True) -> list[RescuableTail]:
        """All of them, oldest first; one that still lies in the topic's own files is the last (left out on request)."""
        if not self._files.is_directory(self._directory):
            return []
        aside = [self._shown(tail, is_aside=True) for tail in divergent_tails(self._files, self._directory)]
        return [*aside, *self._found_in_place(aside)] if in_place else aside

    def _found_in_place(self, aside: list[RescuableTail]) -> list[RescuableTail]:
        in_place = self._in_place()
        if in_place is None or in_place.name in {tail.name for tail in aside}:
            return []
        return [self._shown(in_place, is_aside=False)]

    @property
    def has_files(self) -> bool:
        """Whether the topic's own directory has files of a log."""
        return self._files.is_directory(self._directory) and bool(wal_files(self._files.list(self._directory)))

    def has_begun(self, tail: RescuableTail) -> bool:
        """Whether some of a tail was appended to a topic, or was about to be."""
        return tail.set_aside_us is not None and self._files.exists(self._folder(tail) / _PROGRESS_FILE)

    def _in_place(self) -> DivergentTail | None:
        if self._log._tier is None:
            return None
        catalog = self._log._tier.catalog(self._name.namespace, self._name.name)
        return fenced_files(self._files, self._directory, catalog, self._log._tier.objects, self._clock)

    def _shown(self, tail: DivergentTail, *, is_aside: bool) -> RescuableTail:
        folder = tail_directory(self._files, self._directory, tail.name) if is_aside else self._directory
        return RescuableTail(
            topic=self.topic,
            name=tail.name,
            epoch=tail.epoch,
            first_offset=tail.first_offset,
            next_offset=tail.next_offset,
            file_bytes=sum(self._size_of(folder / name) for _, name in wal_files(self._files.list(folder))),
            set_aside_us=tail.set_aside_us if is_aside else None,
        )

    def message_bytes(self, tail: RescuableTail) -> int:
        """What the messages of a tail take in its files."""
        view = LogView(self._place_of(tail), files=self._files, clock=self._clock)
        offset = tail.first_offset
        parts = [FilePart(one, max(offset, one.first_offset)) for one in view.segments() if one.next_offset > offset]
        return bytes_from(parts, offset, place_of(self._files, parts, offset)) if tail.count else 0

    def _place_of(self, tail: RescuableTail) -> Path:
        return self._directory if tail.set_aside_us is None else self._folder(tail)

    def _size_of(self, path: Path) -> int:
        file = self._files.open(path)
        try:
            return file.size()
        finally:
            file.close()

    def set_aside(self) -> list[RescuableTail]:
        """Puts away what still lies in the topic's own files, unless it is open here; returns all tails."""
        self._require_lock()
        with self._log._opening_alone(self._name):
            is_open = self._name in self._log._topics  # it put its tail away when it was opened
            if self._log._tier is not None and not is_open and self._files.is_directory(self._directory):
                catalog = self._log._tier.catalog(self._name.namespace, self._name.name)
                secure_tails(self._files, self._directory)
                put_fenced_files_aside(self._files, self._directory, catalog, self._log._tier.objects, self._clock)
        return self.tails()

    def _require_lock(self) -> None:
        if self._log.read_only:
            raise InputError("the log directory was opened with read_only=True", path=self._log.root)

    # Reading

    def messages(self, tail: RescuableTail, first_offset: int | None = None) -> Iterator[Message]:
        """The messages of a tail with the offsets that they had here, without those that a repair marked as lost, a
        batch whose end never reached the disk, those staged by other processes (these are ingested again), and those of
        transactions that the tail does not know to be committed.
        """
        folder = self._place_of(tail)
        view = LogView(folder, files=self._files, clock=self._clock)
        start = tail.first_offset if first_offset is None else first_offset
        if view.next_offset < tail.next_offset or view.start_offset > tail.first_offset:
            raise DataError(
                f"the tail has offsets {view.start_offset} up to {view.next_offset} (exclusive) only",
                path=folder,
                hint="Put its files back; `tidelog inspect` shows what is there",
            )
        whole = LogView(folder, files=self._files, clock=self._clock, group_of=group_of)
        end = min(tail.next_offset, whole.next_offset)
        ranges = read_ingested_ranges(self._files, folder)
        decode = BatchDecoder(Message, "skip", whole.place_of).decode
        batches = decided_batches(lambda: whole.read(min(start, end), end))
        found = (message for batch in batches for message in decode(batch))
        return (message for message in found if not any(first <= message.offset < stop for first, stop in ranges))

    def handed_over(self, tail: RescuableTail, first_offset: int | None = None) -> int:
        """Counts the messages of a tail that other processes had staged: they are not part of a rescue."""
        start = tail.first_offset if first_offset is None else first_offset
        folder = self._place_of(tail)
        ranges = read_ingested_ranges(self._files, folder)
        return sum(max(0, min(stop, tail.next_offset) - max(first, start)) for first, stop in ranges)

    def _folder(self, tail: RescuableTail) -> Path:
        return tail_directory(self._files, self._directory, tail.name)

    # Appending

    def append_to(self, tail: RescuableTail, target: RescueTarget, on_done: OnDone | None = None) -> Rescued:
        """Appends a tail to one log, and returns once it is on the disk there. A repeated call continues."""
        return self.append_into(tail, RescueInto(target.name, (target.name,), lambda number: target), on_done)

    def append_into(self, tail: RescuableTail, into: RescueInto, on_done: OnDone | None = None) -> Rescued:
        """The same to a topic, each message to the partition where it belongs."""
        self._require_lock()
        self._require_aside(tail)
        place = self._placing(tail, into)
        targets: dict[int, tuple[RescueTarget, int]] = {}
        appended = already = 0
        messages = self.messages(tail)
        while some := list(islice(messages, _BATCH_MESSAGES)):
            for number, group in _grouped(some, place).items():
                if number not in targets:
                    target = into.opened(number)
                    targets[number] = target, self._already_in(tail, into.logs[number], target)
                target, reached = targets[number]
                missing = [_marked(message, tail) for message in group if message.offset >= reached]
                if missing:
                    target.append_many(missing, sync=True)
                appended, already = appended + len(missing), already + len(group) - len(missing)
            if on_done is not None:
                on_done(some[-1].offset + 1 - tail.first_offset)
        handed_over = self.handed_over(tail)
        lost = tail.count - already - appended - handed_over
        return Rescued(appended=appended, already_there=already, lost=lost, handed_over=handed_over)

    def _require_aside(self, tail: RescuableTail) -> None:
        if tail.set_aside_us is None:
            raise ConflictError(
                f"the tail {tail.name} is not set aside yet: its log is open here",
                path=self._directory,
                hint="Another node took it over a moment ago, and this one is about to close it: try again in a moment",
            )

    def _placing(self, tail: RescuableTail, into: RescueInto) -> Callable[[Message], int]:
        """Which partition a message goes to; written down with the first attempt."""
        known = self._progress(tail)
        count = known.partitions.get(into.topic, len(into.logs))
        if into.topic not in known.partitions:
            partitions = {**known.partitions, into.topic: count}
            self._note(tail, msgspec.structs.replace(known, partitions=partitions))
        number = self.origin.number
        if count == self.origin.partitions or into.topic == self.origin.topic:
            return lambda message: number
        return lambda message: number % count if message.key is None else partition_of(message.key, count)

    def _already_in(self, tail: RescuableTail, log: str, target: RescueTarget) -> int:
        """The first offset of the tail that the target has not; written down is where to look."""
        known = self._progress(tail)
        since = known.into.get(log)
        if since is None or since > target.next_offset:
            self._note(tail, msgspec.structs.replace(known, into={**known.into, log: target.next_offset}))
            return tail.first_offset
        found = target.read(max(since, target.start_offset), on_gap="skip", isolation="read_uncommitted")
        offsets = [_rescued_offset(message) for message in found if message.headers.get(RESCUED_FROM) == tail.origin]
        return max([tail.first_offset, *(offset + 1 for offset in offsets)])

    def _progress(self, tail: RescuableTail) -> _Progress:
        path = self._folder(tail) / _PROGRESS_FILE
        if not self._files.exists(path):
            return _Progress(into={})
        return decode_document(_KIND, _VERSION, self._files.read(path), _Progress)

    def _note(self, tail: RescuableTail, progress: _Progress) -> None:
        self._files.write_atomically(self._folder(tail) / _PROGRESS_FILE, encode_document(_KIND, _VERSION, progress))

    # Giving up

    def discard(self, tail: RescuableTail) -> None:
        """Deletes a tail for good."""
        self._require_lock()
        self._require_aside(tail)
        discard(self._files, self._directory, tail.name)


def _grouped(messages: Iterable[Message], place: Callable[[Message], int]) -> dict[int, list[Message]]:
    """By partition, in their order."""
    found: dict[int, list[Message]] = defaultdict(list)
    for message in messages:
        found[place(message)].append(message)
    return found


def _marked(message: Message, tail: RescuableTail) -> Message:
    origin = {RESCUED_FROM: tail.origin, RESCUED_OFFSET: str(message.offset).encode()}
    return Message(
        message.value,
        key=message.key,
        headers=with_headers(message.headers, origin),
        timestamp=message.timestamp,
        deliver_at=message.deliver_at,
    )


def _rescued_offset(message: Message) -> int:
    text = message.headers.get(RESCUED_OFFSET, b"")
    return int(text) if text.isdigit() and len(text) <= 20 else -1
