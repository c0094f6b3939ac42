"""A topic as a table: the newest message of every key.

Invariants
- A refreshed view equals a newly built one: keys whose newest message was deleted by retention leave the view.
- Keys are ordered by the offset of their newest message, oldest first: a key that gets a new message moves to the end.
- Compaction by key does not change the view: the messages that it removes were not in it.
- Every message is read once, in batches, across store, disk and memory; `refresh` reads only what was appended since.
- After an error the view shows the topic as of an earlier offset, and `refresh` continues from there.

A message with a key and a null value is a tombstone: it removes the key, as in a compacted Kafka topic. One with an
empty value is a tombstone too. Messages without a key are not part of the table and are skipped. An empty key is a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from threading import Lock
from typing import NamedTuple

from tidelog.errors import InputError, OffsetOutOfRangeError
from tidelog.log.reader import BatchReader, Position
from tidelog.store.aio import twin
from tidelog.topics.message import Message, OnGap, read_messages


class ReadableTopic(NamedTuple):
    """The topic as a view sees it; `open_reader` takes where to begin and where to stop (exclusive).

    `open_at` reads one message that was found before, so that nobody looks for the end of its transaction again.
    """

    open_reader: Callable[[int, int | None], BatchReader]
    open_at: Callable[[int], BatchReader]
    resolve: Callable[[Position], int]
    start_offset: Callable[[], int]


class LatestByKey(Mapping[bytes, Message]):
    """The newest message of every key, as of the last `refresh`. Any number of threads may use it at once.

    With `values=False` it keeps keys and offsets only, and reads a message from the topic on access: one
    that retention or a compaction has removed raises OffsetOutOfRangeError until the next `refresh`.
    """

    def __init__(
        self,
        topic: ReadableTopic,
        *,
        prefix: bytes | None,
        stop: Position | None,
        values: bool,
        on_gap: OnGap,
        tombstones: bool = False,
    ) -> None:
        """Use `topic.latest_by_key()`. With `tombstones` it also keeps when keys were removed."""
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
        self._tombstones: dict[bytes, tuple[int, datetime]] | None = {} if tombstones else None
        self.refresh()

    @property
    def next_offset(self) -> int:
        """The view shows the topic as of this offset: all messages below it are applied."""
        return self._next_offset

    def refresh(self) -> int:
        """Applies the messages appended since, drops deleted ones, and returns the offset that the view has reached."""
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

    refresh_async = twin(refresh)

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
            elif self._tombstones is not None and message.timestamp is not None:
                self._tombstones[key] = message.offset, message.timestamp

    def _drop(self, key: bytes) -> None:
        self._offsets.pop(key, None)
        if self._messages is not None:
            self._messages.pop(key, None)
        if self._tombstones is not None:
            self._tombstones.pop(key, None)

    def _forget_below(self, start_offset: int) -> None:
        """The oldest are first, so this costs only what it removes."""
        while (key := next(iter(self._offsets), None)) is not None and self._offsets[key] < start_offset:
            with self._guard:
                self._drop(key)
        tombstones = self._tombstones or {}
        while (key := next(iter(tombstones), None)) is not None and tombstones[key][0] < start_offset:
            with self._guard:
                self._drop(key)

    def _removed_at(self, key: bytes) -> datetime | None:
        """The time of the tombstone that is the newest message of a key; None where there is none, or none is kept."""
        with self._guard:
            found = (self._tombstones or {}).get(key)
        return None if found is None else found[1]

    # As a mapping

    def __getitem__(self, key: bytes) -> Message:
        with self._guard:
            if self._messages is not None:
                return self._messages[key]
            offset = self._offsets[key]
        found = list(read_messages(self._topic.open_at(offset), self._on_gap))
        if not found:
            message = f"offset {offset} was removed by a compaction: a later message has its key"
            raise OffsetOutOfRangeError(message, operation="read", hint="Call refresh() to apply it")
        return found[0]

    def offset_of(self, key: bytes) -> int:
        """The offset of the newest message of a key, from memory; KeyError if the key is absent."""
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
