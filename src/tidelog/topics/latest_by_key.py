"""The newest message of every key: a topic as a table.

Invariants
- A refreshed view is what a new one would be: keys whose newest message retention has deleted leave it.
- Keys are in order of the offset of their newest message, oldest first: a key that gets a new one moves to the end.
- A compaction by key changes nothing in it: what it removes was not in the view.
- Every message is read once, in batches, over store, disk and memory; `refresh` reads only what came since.
- After an error the view is the topic as of an earlier offset, and `refresh` goes on from there.

A message with a key and an empty value is a tombstone: it takes the key out, as in a compacted topic of Kafka, where
the value is null. Messages without a key have no place in a table and are passed over. An empty key is a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import NamedTuple

from tidelog.errors import InputError, OffsetOutOfRangeError
from tidelog.log.readable import Position
from tidelog.log.reader import Reader
from tidelog.tier.daemon_pool import in_store_thread
from tidelog.tier.joined import JoinedReader
from tidelog.topics.message import Message
from tidelog.topics.reading import OnGap, read_messages


class ReadableTopic(NamedTuple):
    """The topic as a view sees it; `open_reader` takes where to begin and where to stop (exclusive)."""

    open_reader: Callable[[int, int | None], Reader | JoinedReader]
    resolve: Callable[[Position], int]
    start_offset: Callable[[], int]


class LatestByKey(Mapping[bytes, Message]):
    """The newest message of every key, as of the last `refresh`. Any number of threads may use it at once.

    With `values=False` it keeps keys and offsets only, and a message is read from the topic when it is asked for: one
    that retention or a compaction has removed meanwhile raises OffsetOutOfRangeError until the next `refresh`.
    """

    def __init__(
        self, topic: ReadableTopic, *, prefix: bytes | None, stop: Position | None, values: bool, on_gap: OnGap
    ) -> None:
        """Use `topic.latest_by_key()`."""
        if prefix is not None and not isinstance(prefix, bytes):
            raise InputError(f"prefix must be bytes, not {type(prefix).__name__}")
        self._topic = topic
        self._prefix = prefix
        self._stop = stop if stop is None or isinstance(stop, int) else topic.resolve(stop)
        self._on_gap: OnGap = on_gap
        self._refreshing = Lock()
        self._guard = Lock()  # a key that moves to the end is never seen missing
        self._next_offset = 0
        self._offsets: dict[bytes, int] = {}
        self._messages: dict[bytes, Message] | None = {} if values else None
        self.refresh()

    @property
    def next_offset(self) -> int:
        """The view is the topic as of this offset: everything below has been looked at."""
        return self._next_offset

    def refresh(self) -> int:
        """Takes in what was appended since, and lets go of what was deleted; returns how far the view is now."""
        with self._refreshing:
            while True:
                start = self._topic.start_offset()
                self._forget_below(start)
                try:
                    self._read_from(max(start, self._next_offset))
                    return self._next_offset
                except OffsetOutOfRangeError:
                    # Retention may overtake the reader; anything else that is out of range is an error.
                    if self._topic.start_offset() <= max(start, self._next_offset):
                        raise

    async def refresh_async(self) -> int:
        """As `refresh`, in a worker thread, so that the loop goes on."""
        return await in_store_thread(self.refresh)

    def _read_from(self, offset: int) -> None:
        if self._stop is not None and offset >= self._stop:
            return
        reader = self._topic.open_reader(offset, self._stop)
        try:
            for message in read_messages(reader, self._on_gap):
                self._take(message)
                self._next_offset = message.offset + 1
            self._next_offset = reader.offset  # lost messages at the end were passed over
        finally:
            reader.close()

    def _take(self, message: Message) -> None:
        key = message.key
        if key is None or (self._prefix is not None and not key.startswith(self._prefix)):
            return
        with self._guard:
            self._drop(key)  # also when a newer one follows: it belongs at the end
            if message.value:
                if self._messages is not None:
                    self._messages[key] = message
                self._offsets[key] = message.offset

    def _drop(self, key: bytes) -> None:
        self._offsets.pop(key, None)
        if self._messages is not None:
            self._messages.pop(key, None)

    def _forget_below(self, start_offset: int) -> None:
        """The oldest are first, so this costs only what it removes."""
        while (key := next(iter(self._offsets), None)) is not None and self._offsets[key] < start_offset:
            with self._guard:
                self._drop(key)

    # As a mapping

    def __getitem__(self, key: bytes) -> Message:
        with self._guard:
            if self._messages is not None:
                return self._messages[key]
            offset = self._offsets[key]
        found = list(read_messages(self._topic.open_reader(offset, offset + 1), self._on_gap))
        if not found:
            message = f"offset {offset} was removed by a compaction: a later message has its key"
            raise OffsetOutOfRangeError(message, operation="read", hint="refresh() takes it in")
        return found[0]

    def offset_of(self, key: bytes) -> int:
        """The offset of the newest message of a key; KeyError when there is none. Reads nothing."""
        with self._guard:
            return self._offsets[key]

    def __contains__(self, key: object) -> bool:
        with self._guard:
            return key in self._offsets

    def __iter__(self) -> Iterator[bytes]:
        with self._guard:  # those of this moment: another thread may refresh while they are gone through
            return iter(list(self._offsets))

    def __len__(self) -> int:
        return len(self._offsets)

    def __repr__(self) -> str:
        return f"<LatestByKey {len(self)} keys as of {self._next_offset}>"
