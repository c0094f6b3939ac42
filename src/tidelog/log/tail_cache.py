"""The newest messages in memory: those not yet written to a file, then a bounded number of those already in one.

    oldest                                                                       newest
    | frames | frames | frames |  payloads (being written) | payloads | payloads (open) |
    '------- in a file --------'  '------------- not yet in a file -------------------'
       dropped from the left                     never dropped
       when over the bounds

Invariants (every method is called under the log's mutex)
- Chunks are contiguous: each begins at the offset where the one before ends.
- A chunk is dropped only when all of it is in a file, so every accepted message is readable from somewhere at any time.
- Appending costs one list append; everything else is done once per chunk.
- The caches of all logs of a process together hold at most what `caches` allows: beyond it, those that were written to
  longest ago give up their messages, which are in files.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple, Protocol

from tidelog.log.frame import Frames

# What the objects around a chunk cost, so that the bound on bytes holds for many small chunks as well.
_CHUNK_OVERHEAD_BYTES = 512
_MESSAGE_OVERHEAD_BYTES = 12
# Dropped chunks leave the list in groups: moving the rest of a long list for each would cost more than the append.
_COMPACT_EVERY = 1024
# Chunks that came framed, up to this size, are joined up to that size for one write.
_SMALL_BYTES = 64 << 10
_MAX_JOINED_BYTES = 1 << 20


class Batch(NamedTuple):
    """Consecutive messages for a reader, either framed (from a file or the cache) or still bare."""

    first_offset: int
    frames: Frames | None
    start: int
    stop: int
    bare: list[bytes]

    @property
    def next_offset(self) -> int:
        return self.first_offset + (self.stop - self.start)

    def payloads(self) -> list[bytes]:
        return self.bare if self.frames is None else self.frames.payloads(self.start, self.stop)


def framed_batch(frames: Frames, offset: int, stop_offset: int) -> Batch:
    """The part of some frames from `offset` up to `stop_offset` (exclusive)."""
    start = offset - frames.first_offset
    stop = min(frames.count, stop_offset - frames.first_offset)
    return Batch(offset, frames, start, stop, [])


class Chunk:
    """Consecutive messages that travel together: bare payloads until they are written, frames afterwards.

    What comes framed is so from the beginning; its headers get their offsets when it is written, so nobody but the
    writer looks at them.
    """

    __slots__ = ("first_offset", "frames", "payload_bytes", "payloads")

    def __init__(self, first_offset: int) -> None:
        self.first_offset = first_offset
        self.payloads: list[bytes] = []
        self.payload_bytes = 0
        self.frames: Frames | None = None

    @property
    def count(self) -> int:
        return self.frames.count if self.frames is not None else len(self.payloads)

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.count

    @property
    def is_small_and_framed(self) -> bool:
        """Whether it is to be written together with others."""
        return self.frames is not None and self.payload_bytes <= _SMALL_BYTES

    @property
    def cost_bytes(self) -> int:
        if self.frames is None:
            return 0
        return len(self.frames.buffer) + self.frames.count * _MESSAGE_OVERHEAD_BYTES + _CHUNK_OVERHEAD_BYTES


def _first_offset(chunk: Chunk | None) -> int:
    assert chunk is not None
    return chunk.first_offset


class Cache:
    """The chunks in order of offset; the last one is open for appends."""

    def __init__(self, next_offset: int, max_messages: int, max_bytes: int) -> None:
        self.open = Chunk(next_offset)
        self._chunks: list[Chunk | None] = [self.open]
        self._head = 0
        self._written = 0
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self.cached_messages = 0
        self.cached_bytes = 0

    @property
    def start_offset(self) -> int:
        """The oldest offset in memory."""
        return _first_offset(self._chunks[self._head])

    @property
    def is_all_open(self) -> bool:
        """Whether everything that is not in a file yet is in the open chunk."""
        return self._chunks[self._written] is self.open

    def oldest_unwritten(self) -> list[Chunk]:
        """The next chunk for the writer, or several small ones that came framed: a write costs more than a copy. They
        stay readable here while they are being written."""
        chunk = self._chunks[self._written]
        assert chunk is not None
        run, room = [chunk], _MAX_JOINED_BYTES - chunk.payload_bytes
        while (
            chunk.is_small_and_framed
            and (chunk := self._chunks[self._written + len(run)]) is not None
            and chunk.is_small_and_framed
            and chunk.payload_bytes <= room
        ):
            run.append(chunk)
            room -= chunk.payload_bytes
        return run

    def seal(self, payload_bytes: int) -> None:
        """Closes the open chunk of this many bytes, and begins the next."""
        self.open.payload_bytes = payload_bytes
        self.open = Chunk(self.open.next_offset)
        self._chunks.append(self.open)

    def add_framed(self, frames: Frames, payload_bytes: int) -> None:
        """A chunk that is framed already, in place of the open one, which is empty."""
        chunk = Chunk(frames.next_offset)
        # Calls come first: Ctrl-C may raise after each, and an empty chunk too many is harmless.
        self._chunks.append(chunk)
        self.open.payload_bytes = payload_bytes
        self.open.frames = frames
        self.open = chunk

    def written(self, chunks: Sequence[Chunk], frames: Frames) -> None:
        """The chunks that were taken are in a file now; from here on they may be dropped."""
        for chunk in chunks:
            if chunk.frames is None:
                chunk.frames = frames
                chunk.payloads = []
            self._written += 1
            self.cached_messages += chunk.count
            self.cached_bytes += chunk.cost_bytes
        self._shrink(self._max_bytes)

    def shrink_to(self, max_bytes: int) -> None:
        """Drops the oldest chunks that are in a file until the others take no more than this."""
        self._shrink(max_bytes)

    def _shrink(self, max_bytes: int) -> None:
        while self._head < self._written and (
            self.cached_messages > self._max_messages or self.cached_bytes > max_bytes
        ):
            chunk = self._chunks[self._head]
            assert chunk is not None
            self.cached_messages -= chunk.count
            self.cached_bytes -= chunk.cost_bytes
            self._chunks[self._head] = None
            self._head += 1
        if self._head >= _COMPACT_EVERY:
            del self._chunks[: self._head]
            self._written -= self._head
            self._head = 0

    def read(self, offset: int, stop_offset: int) -> Batch | None:
        """Messages from `offset` on, as far as they are in one chunk; None when it is not in memory."""
        chunk: Chunk | None = self.open
        if offset < self.open.first_offset:  # else a reader at the end, where most are
            if offset < self.start_offset:
                return None
            chunk = self._chunks[bisect_right(self._chunks, offset, lo=self._head, key=_first_offset) - 1]
        elif offset >= self.open.next_offset:
            return None
        assert chunk is not None
        if chunk.frames is not None:
            return framed_batch(chunk.frames, offset, stop_offset)
        start = offset - chunk.first_offset
        bare = chunk.payloads[start : min(len(chunk.payloads), stop_offset - chunk.first_offset)]
        return Batch(offset, None, 0, len(bare), bare)


# The caches of all logs of this process.
#
# Invariants
# - A log reports what its cache holds after each write, without its mutex; nothing here calls a log while it holds the
#   guard. So the guard and a log's mutex are never held together.
# - What is reported may be a moment old. A cache that was asked to shrink reports again with its next write.

DEFAULT_CACHES_MAX_BYTES = 256 << 20


class CachedLog(Protocol):
    """A log as the common bound sees it."""

    def shrink_cache(self, max_bytes: int) -> int:
        """Drops the oldest messages that are in files until the others take no more; what they take now."""
        ...


class CommonBound:
    """How much the caches of all logs may hold together."""

    def __init__(self, max_bytes: int = DEFAULT_CACHES_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        """A reader at the tail of a log whose messages were dropped reads them from the file."""
        self._guard = Lock()
        # The one that was written to longest ago first.
        self._used: dict[CachedLog, int] = {}
        self._total = 0

    @property
    def used_bytes(self) -> int:
        return self._total

    def report(self, log: CachedLog, cached_bytes: int) -> None:
        """By a log after a write. Where all together hold too much, the others shrink first."""
        with self._guard:
            self._total += cached_bytes - self._used.pop(log, 0)
            self._used[log] = cached_bytes
            to_shrink = self._chosen()
        for chosen, max_bytes in to_shrink:
            left = chosen.shrink_cache(max_bytes)
            with self._guard:
                if chosen in self._used:
                    self._total += left - self._used[chosen]
                    self._used[chosen] = left

    def _chosen(self) -> list[tuple[CachedLog, int]]:
        over, found = self._total - self.max_bytes, []
        if over <= 0:
            return []
        for log, cached_bytes in self._used.items():
            if cached_bytes:
                found.append((log, max(0, cached_bytes - over)))
                over -= cached_bytes
                if over <= 0:
                    break
        return found

    def forget(self, log: CachedLog) -> None:
        with self._guard:
            self._total -= self._used.pop(log, 0)

    def forget_all(self) -> None:
        """In a forked child, whose logs are abandoned."""
        self._guard = Lock()
        self._used.clear()
        self._total = 0


caches = CommonBound()
os.register_at_fork(after_in_child=caches.forget_all)
