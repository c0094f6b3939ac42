"""Between the appending threads and the writer: the one place where an offset is given out.

Invariants
- One mutex guards all of it. Room is taken, the offset is given and the message becomes both the writer's and the
  readers' in one critical section; so the order of offsets, of frames and of delivery is one order.
- An append that cannot be handed over uses no offset and is seen by nobody.
- `durable_offset <= written_offset <= next_offset`, and none of them ever goes back. Each is exclusive: everything
  below it is synced, is in a file, has been accepted.
- Who waits for room is served in order of arrival, so a large message is not starved by small ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

from tidelog.errors import BackpressureError, InputError, MessageTooLargeError, TidelogError
from tidelog.log.cache import Cache, Chunk
from tidelog.log.frame import Frames
from tidelog.log.settings import LogSettings
from tidelog.log.waiting import Doorbell, TaskWaiter, ThreadWaiter, Waiter, finish_all, task_waiter

# Large enough for the file system, small enough to stay in the processor's cache on its way through.
CHUNK_BYTES = 1 << 20


class _RoomRequest:
    """An append that waits for room; whoever makes room accepts it on its behalf."""

    __slots__ = ("offset", "payloads", "size", "waiter")

    def __init__(self, payloads: Sequence[bytes], size: int, waiter: Waiter) -> None:
        self.payloads = payloads
        self.size = size
        self.waiter = waiter
        self.offset: int | None = None


class Handover:
    """Accepts payloads, gives offsets, and knows who waits for what."""

    def __init__(self, next_offset: int, settings: LogSettings) -> None:
        self.mutex = Lock()
        self.next_offset = next_offset
        self.written_offset = next_offset
        self.durable_offset = next_offset
        self.cache = Cache(next_offset, settings.cache_max_messages, settings.cache_max_bytes)
        self.bell = Doorbell(self.mutex)
        # Why appends are refused, why nothing becomes durable any more, and whether the writer has ended.
        self.refusal: Callable[[], TidelogError] | None = None
        self.stall: Callable[[], TidelogError] | None = None
        self.closing = False
        self.over = False
        self._room_bytes = settings.handover_max_bytes
        self._max_bytes = settings.handover_max_bytes
        self._max_messages = settings.handover_max_messages
        self._max_message_bytes = settings.max_message_bytes
        self._append_timeout_seconds = settings.append_timeout_ms / 1000
        self._room_requests: deque[_RoomRequest] = deque()
        self._sync_waiters: list[tuple[int, Waiter]] = []
        self._listeners: list[Waiter] = []

    # For those who append

    def append(self, payload: bytes, timeout_seconds: float | None = None) -> int:
        """Accepts one payload: its offset."""
        offset = self.try_append(payload)
        return offset if offset is not None else self.append_many((payload,), timeout_seconds)

    def try_append(self, payload: bytes) -> int | None:
        """Accepts one payload if that is possible at once. Every message takes this way, so it is written out."""
        size = len(payload)
        with self.mutex:
            offset = self.next_offset
            if (
                size > self._room_bytes
                or not 0 < size <= self._max_message_bytes
                or type(payload) is not bytes
                or offset - self.written_offset >= self._max_messages
                or self.refusal is not None
                or self._room_requests
            ):
                return None
            self.next_offset = offset + 1
            self._room_bytes -= size
            chunk = self.cache.open
            chunk.payloads.append(payload)
            chunk.payload_bytes += size
            if chunk.payload_bytes >= CHUNK_BYTES:
                self.cache.seal()
            if self.bell.sleeping:
                self.bell.ring()
            if self._listeners:
                self._tell_listeners()
            return offset

    def append_many(self, payloads: Sequence[bytes], timeout_seconds: float | None = None) -> int:
        """Accepts all payloads with consecutive offsets, or none of them: the first offset."""
        size = self._measure(payloads)
        with self.mutex:
            if self._admits(len(payloads), size):
                return self._accept(payloads, size)
            waiter = ThreadWaiter()
            request = self._ask_for_room(payloads, size, waiter)
        limit = self._append_timeout_seconds if timeout_seconds is None else timeout_seconds
        waiter.wait(limit)
        return self._outcome(request, limit)

    async def append_many_async(self, payloads: Sequence[bytes], timeout_seconds: float | None = None) -> int:
        """As `append_many`, with the task suspended while there is no room."""
        size = self._measure(payloads)
        with self.mutex:
            if self._admits(len(payloads), size):
                return self._accept(payloads, size)
            waiter = task_waiter()
            request = self._ask_for_room(payloads, size, waiter)
        limit = self._append_timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            await asyncio.wait([waiter], timeout=limit)
        except BaseException:
            self._withdraw(request)
            raise
        if waiter.done():
            waiter.result()
        return self._outcome(request, limit)

    def _measure(self, payloads: Sequence[bytes]) -> int:
        # Checked here, because the writer thread has nobody to tell. A bytearray could still change.
        if set(map(type, payloads)) - {bytes} or not all(payloads):
            raise InputError("a payload is bytes, and at least one of them", operation="append")
        sizes = list(map(len, payloads))
        if sizes and max(sizes) > self._max_message_bytes:
            raise MessageTooLargeError(
                f"a message of {max(sizes)} bytes is over max_message_bytes ({self._max_message_bytes})",
                operation="append",
                hint="Split it, or raise max_message_bytes",
            )
        return sum(sizes)

    def _admits(self, count: int, size: int) -> bool:
        """Whether it is this append's turn and there is room."""
        if self.refusal is not None:
            raise self.refusal()
        return not self._room_requests and self._fits(count, size)

    def _fits(self, count: int, size: int) -> bool:
        """What is larger than the whole hand-over gets in alone, when it is empty."""
        waiting = self.next_offset - self.written_offset
        return waiting == 0 or (size <= self._room_bytes and waiting + count <= self._max_messages)

    def _accept(self, payloads: Sequence[bytes], size: int) -> int:
        offset = self.next_offset
        if not payloads:
            return offset
        self.next_offset = offset + len(payloads)
        self._room_bytes -= size
        chunk = self.cache.open
        chunk.payloads.extend(payloads)
        chunk.payload_bytes += size
        if chunk.payload_bytes >= CHUNK_BYTES:
            self.cache.seal()
        self.bell.ring()
        self._tell_listeners()
        return offset

    def _ask_for_room(self, payloads: Sequence[bytes], size: int, waiter: Waiter) -> _RoomRequest:
        request = _RoomRequest(payloads, size, waiter)
        self._room_requests.append(request)
        self.bell.ring()
        return request

    def _outcome(self, request: _RoomRequest, limit_seconds: float) -> int:
        if not self._withdraw(request) and request.offset is not None:
            return request.offset
        if self.refusal is not None:
            raise self.refusal()
        raise BackpressureError(
            f"the hand-over to the writer stayed full for {limit_seconds:g} s: the disk does not keep up",
            operation="append",
            hint="No offset was used; append again later, or raise handover_max_bytes or handover_max_messages",
        )

    def _withdraw(self, request: _RoomRequest) -> bool:
        """Takes a request back; False when it has been answered already."""
        with self.mutex:
            if request not in self._room_requests:
                return False
            self._room_requests.remove(request)
            self._grant_room()
            return True

    def _grant_room(self) -> None:
        """In order of arrival; a request that does not fit yet holds back those behind it."""
        while self._room_requests and self._fits(len(self._room_requests[0].payloads), self._room_requests[0].size):
            request = self._room_requests.popleft()
            request.offset = self._accept(request.payloads, request.size)
            finish_all([request.waiter])

    # For those who wait

    def wait_durable(self, target: int) -> None:
        """Returns once everything below `target` is synced."""
        waiter = ThreadWaiter()
        if self._wait_for_sync(target, waiter):
            waiter.wait()

    def durable_future(self, target: int) -> TaskWaiter | None:
        """To be awaited by a task until everything below `target` is synced; None when it is already."""
        waiter = task_waiter()
        return waiter if self._wait_for_sync(target, waiter) else None

    def _wait_for_sync(self, target: int, waiter: Waiter) -> bool:
        with self.mutex:
            if self.durable_offset >= target:
                return False
            if self.stall is not None:
                raise self.stall()
            self._sync_waiters.append((target, waiter))
            self.bell.ring()
            return True

    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool:
        """Returns once something was accepted at `offset` or nothing ever will be; False when the time passed."""
        waiter = ThreadWaiter()
        if not self._listen(waiter, offset) or waiter.wait(timeout_seconds):
            return True
        with self.mutex:
            if waiter in self._listeners:
                self._listeners.remove(waiter)
        return False

    async def wait_for_news_async(self, offset: int) -> None:
        """As `wait_for_news`, with the task suspended."""
        waiter = task_waiter()
        if self._listen(waiter, offset):
            await waiter

    def _listen(self, waiter: Waiter, offset: int) -> bool:
        """False when there is news already, or nothing will ever come."""
        with self.mutex:
            if self.next_offset > offset or self.over:
                return False
            self._listeners.append(waiter)
            return True

    def _tell_listeners(self) -> None:
        if self._listeners:
            listeners, self._listeners = self._listeners, []
            finish_all(listeners)

    # For the writer

    @property
    def held_bytes(self) -> int:
        """Accepted and not yet in a file."""
        return self._max_bytes - self._room_bytes

    @property
    def sync_wanted(self) -> bool:
        return bool(self._sync_waiters)

    @property
    def has_work(self) -> bool:
        """Whether something waits to be written."""
        return self.next_offset > self.written_offset

    def sleep(self, timeout_seconds: float | None) -> None:
        """Puts the writer to sleep until there is something to write, sync or finish, or the time passes."""
        with self.mutex:
            if self.has_work or self._sync_waiters or self.closing:
                return
            self.bell.prepare()
        self.bell.sleep(timeout_seconds)

    def sleep_while_full(self, timeout_seconds: float) -> None:
        """Puts the writer to sleep between two attempts on a full disk; closing wakes it."""
        with self.mutex:
            if self.closing:
                return
            self.bell.prepare()
        self.bell.sleep(timeout_seconds)

    def take(self) -> Chunk | None:
        """The oldest chunk that is not in a file yet."""
        with self.mutex:
            return self.cache.take()

    def chunk_written(self, chunk: Chunk, frames: Frames) -> None:
        """All of a taken chunk is in a file: its room is free again."""
        with self.mutex:
            self.cache.written(chunk, frames)
            self._room_bytes += chunk.payload_bytes
            self._grant_room()

    def synced(self, offset: int) -> None:
        """Everything below `offset` is on the disk: wakes those who waited for it."""
        with self.mutex:
            self.durable_offset = offset
            done = [waiter for target, waiter in self._sync_waiters if target <= offset]
            self._sync_waiters = [entry for entry in self._sync_waiters if entry[0] > offset]
        finish_all(done)

    def forget(self) -> None:
        """After the end: nothing is kept in memory any more."""
        with self.mutex:
            self.cache = Cache(self.next_offset, 0, 0)

    def close(self, make_error: Callable[[], TidelogError]) -> None:
        """No new appends from now on; what was accepted goes on its way."""
        with self.mutex:
            self.closing = True
            self._refuse(make_error)
            self.bell.ring()

    def stop_short(self, make_error: Callable[[], TidelogError], *, over: bool) -> None:
        """Neither appends nor durability for now, or for ever: everybody who waits is told why."""
        with self.mutex:
            if not self.closing:
                self._refuse(make_error)
            self.stall = make_error
            self.over = self.over or over
            waiters = [waiter for _, waiter in self._sync_waiters]
            self._sync_waiters = []
            if self.over:
                self._tell_listeners()
        finish_all(waiters, make_error)

    def resume(self) -> None:
        """There is room on the disk again: goes on as before."""
        with self.mutex:
            self.stall = None
            if not self.closing:
                self.refusal = None

    def _refuse(self, make_error: Callable[[], TidelogError]) -> None:
        self.refusal = make_error
        requests, self._room_requests = self._room_requests, deque()
        finish_all([request.waiter for request in requests], make_error)
