"""Between the appending threads and the writer: the one place where an offset is given out.

Invariants
- One mutex guards all of it. Room is taken, the offset is given and the message becomes both the writer's and the
  readers' in one critical section; so the order of offsets, of frames and of delivery is one order.
- An append that cannot be handed over uses no offset and is seen by nobody.
- `durable_offset <= written_offset <= next_offset`, and none of them ever goes back. Each is exclusive: everything
  below it is synced, is in a file, has been accepted.
- Who waits for room is served in order of arrival, so a large message is not starved by small ones.
- While appends are held back, only the holder's are accepted: what it appends has consecutive offsets. All others wait
  in the same order of arrival, within their timeout.
- Files that the holder has prepared are adopted by the writer, when everything accepted before is in a file.
- The writer is a worker that many logs share. One at a time serves this log (`begin_service`), until it finds nothing
  to do under the mutex (`end_service`); whatever comes after that calls another one. So nothing is left lying.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Lock

from tidelog.errors import BackpressureError, InputError, MessageTooLargeError, TidelogError
from tidelog.log.cache import Cache, Chunk
from tidelog.log.frame import HEADER_BYTES, Frames
from tidelog.log.room import RoomQueue, RoomRequest
from tidelog.log.segment import Segment
from tidelog.log.settings import LogSettings
from tidelog.log.waiting import TaskWaiter, ThreadWaiter, Waiter, finish_all, task_waiter

# A holder has always more to append: it fills no more than this of the hand-over, so that its memory is bounded.
_MAX_HELD_BYTES = 8 << 20
# The writer needs the interpreter's lock a few times a chunk, and may wait 5 ms for it each time beside a thread that
# appends without pause: chunks this large let it keep up all the same.
_MAX_CHUNK_BYTES = 8 << 20


class Handover:
    """Accepts payloads, gives offsets, and knows who waits for what."""

    def __init__(self, next_offset: int, settings: LogSettings) -> None:
        self.mutex = Lock()
        self.next_offset = next_offset
        self.written_offset = next_offset
        self.durable_offset = next_offset
        self._cache_limits = settings.cache_max_messages, settings.cache_max_bytes
        self.cache = Cache(next_offset, *self._cache_limits)
        # Why appends are refused, why nothing becomes durable any more, and whether the writer has ended.
        self.refusal: Callable[[], TidelogError] | None = None
        self.stall: Callable[[], TidelogError] | None = None
        self.closing = False
        self.over = False
        self._barred: Callable[[], TidelogError] | None = None
        self._chunk_bytes = min(_MAX_CHUNK_BYTES, max(1, settings.fsync_max_batch_bytes // 2))
        self._max_bytes = settings.handover_max_bytes
        self._max_messages = settings.handover_max_messages
        self._max_message_bytes = settings.max_message_bytes
        self._append_timeout_seconds = settings.append_timeout_ms / 1000
        self._is_held = False
        self._room_queue = RoomQueue(self._fits, self._accept)
        self._holder: ThreadWaiter | None = None
        self._adoption: tuple[Sequence[Segment], ThreadWaiter] | None = None
        self._sync_waiters: list[tuple[int, Waiter]] = []
        self._file_end_waiters: list[tuple[int, Waiter]] = []
        self._listeners: list[Waiter] = []
        self.call: Callable[[], None] = _nobody
        """Calls a worker to serve this log. Set by the writer before the first append."""
        self._is_called = False
        self._is_served = False
        self.on_durable: Callable[[], None] | None = None
        """Called after each sync, by whoever made it: it must be quick, and raise nothing."""
        # What `try_append` looks at, kept ready so that a message costs as few steps as possible: the open chunk, the
        # room left, the room at which the chunk is full, the first offset without room (0: take the slow way), and
        # whether the writer or a reader sleeps.
        self._open_payloads = self.cache.open.payloads
        self._room_bytes = settings.handover_max_bytes
        self._seal_at_room = self._room_bytes - self._chunk_bytes
        self._offset_limit = next_offset + self._max_messages
        self._somebody_sleeps = False

    # For those who append

    def try_append(self, payload: bytes) -> int | None:
        """Accepts one payload if that is possible at once: its offset."""
        size = len(payload)
        with self.mutex:
            offset = self.next_offset
            room = self._room_bytes - size
            if (
                room < 0
                or offset >= self._offset_limit
                or not 0 < size <= self._max_message_bytes
                or type(payload) is not bytes
            ):
                return None
            # In this order because Ctrl-C may raise after any call in here: woken for nothing is harmless, accepted
            # without waking the writer is not, and a chunk that was not sealed is sealed with the next message.
            if self._somebody_sleeps:
                self._wake()
            self.next_offset = offset + 1
            self._room_bytes = room
            self._open_payloads.append(payload)
            if room <= self._seal_at_room:
                self._seal()
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
        try:
            waiter.wait(limit)
        except BaseException:
            self._withdraw(request)
            raise
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
            waiter.cancel()
            raise
        if waiter.done():
            waiter.result()
        return self._outcome(request, limit)

    def _measure(self, payloads: Sequence[bytes]) -> int:
        # Checked here, because the writer has nobody to tell. A bytearray could still change.
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
        return not self._room_queue and self._fits(count, size)

    def _fits(self, count: int, size: int) -> bool:
        return not self._is_held and self._has_room(count, size)

    def _has_room(self, count: int, size: int) -> bool:
        """What is larger than the whole hand-over gets in alone, when it is empty."""
        waiting = self.next_offset - self.written_offset
        return waiting == 0 or (size <= self._room_bytes and waiting + count <= self._max_messages)

    def _accept(self, payloads: Sequence[bytes], size: int) -> int:
        offset = self.next_offset
        if not payloads:
            return offset
        if self._somebody_sleeps:
            self._wake()
        self.next_offset = offset + len(payloads)
        self._room_bytes -= size
        self._open_payloads.extend(payloads)
        if self._room_bytes <= self._seal_at_room:
            self._seal()
        return offset

    def _seal(self) -> None:
        """Closes the open chunk and begins the next."""
        self.cache.seal(self._seal_at_room + self._chunk_bytes - self._room_bytes)
        self._open_payloads = self.cache.open.payloads
        self._seal_at_room = self._room_bytes - self._chunk_bytes

    def _wake(self) -> None:
        self._call_writer()
        listeners, self._listeners = self._listeners, []
        finish_all(listeners)
        self._somebody_sleeps = False

    def _call_writer(self) -> None:
        # In this order because Ctrl-C may raise after any call: called twice is harmless, not called at all is not.
        if not self._is_called and not self._is_served:
            self.call()
            self._is_called = True

    def _ask_for_room(self, payloads: Sequence[bytes], size: int, waiter: Waiter) -> RoomRequest:
        request = self._room_queue.ask(payloads, size, waiter)
        self._set_offset_limit()
        return request

    def _outcome(self, request: RoomRequest, limit_seconds: float) -> int:
        if not self._withdraw(request) and request.offset is not None:
            return request.offset
        if self.refusal is not None:
            raise self.refusal()
        if self._is_held:
            raise BackpressureError(
                f"appends were held back for {limit_seconds:g} s, while rows that were handed over are taken in",
                operation="append",
                hint="No offset was used; append again later, or wait longer",
            )
        raise BackpressureError(
            f"the hand-over to the writer stayed full for {limit_seconds:g} s: the disk does not keep up",
            operation="append",
            hint="No offset was used; append again later, or raise handover_max_bytes or handover_max_messages",
        )

    def _withdraw(self, request: RoomRequest) -> bool:
        with self.mutex:
            withdrawn = self._room_queue.withdraw(request)
            self._grant_room()
            return withdrawn

    def _grant_room(self) -> None:
        self._wake_holder()
        self._room_queue.grant()
        self._set_offset_limit()

    def _set_offset_limit(self) -> None:
        may_append = self.refusal is None and not self._room_queue and not self._is_held
        self._offset_limit = self.written_offset + self._max_messages if may_append else 0

    # For one who appends much that must stay together

    def hold(self) -> None:
        """From here on only `append_held` appends, until `release`. One holder at a time."""
        with self.mutex:
            assert not self._is_held, "somebody holds the appends back already"
            self._is_held = True
            self._set_offset_limit()

    def release(self) -> None:
        """Those who waited are served, in order of arrival."""
        with self.mutex:
            self._is_held = False
            self._grant_room()

    def append_held(self, frames: Frames) -> None:
        """By the holder: frames that are numbered from the next offset on. Waits for room as long as it takes, and
        raises what keeps the log from accepting anything."""
        size = frames.end - frames.start_of(0) - frames.count * HEADER_BYTES
        while True:
            with self.mutex:
                assert self._is_held and frames.first_offset == self.next_offset
                if self.refusal is not None:
                    raise self.refusal()
                if self._has_room_for_holder(frames.count, size):
                    self._accept_framed(frames, size)
                    return
                waiter = self._holder = ThreadWaiter()
            waiter.wait()

    def adopt_held(self, prepared: Sequence[Segment]) -> None:
        """By the holder: files with the next offsets, in order. Returns when they are part of the log."""
        waiter = ThreadWaiter()
        with self.mutex:
            assert self._is_held and prepared[0].first_offset == self.next_offset
            if self.refusal is not None:
                raise self.refusal()
            self._adoption = prepared, waiter
            if self._somebody_sleeps:
                self._wake()
        waiter.wait()

    def _has_room_for_holder(self, count: int, size: int) -> bool:
        if self.has_work and self.held_bytes + size > _MAX_HELD_BYTES:
            return False
        return self._has_room(count, size)

    def _accept_framed(self, frames: Frames, size: int) -> None:
        if self._open_payloads:
            self._seal()
        if self._somebody_sleeps:
            self._wake()
        self.next_offset = frames.next_offset
        self._room_bytes -= size
        self.cache.add_framed(frames, size)
        self._open_payloads = self.cache.open.payloads
        self._seal_at_room = self._room_bytes - self._chunk_bytes

    def _wake_holder(self) -> None:
        """It looks again by itself: whether there is room now, or no more appends are accepted."""
        holder, self._holder = self._holder, None
        finish_all([] if holder is None else [holder])

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
            if self._somebody_sleeps:
                self._wake()
            return True

    def wait_file_end(self) -> None:
        """Returns once everything that was accepted before is in files that nothing is added to any more."""
        waiter = ThreadWaiter()
        with self.mutex:
            if self.stall is not None:
                raise self.stall()
            self._file_end_waiters.append((self.next_offset, waiter))
            if self._somebody_sleeps:
                self._wake()
        waiter.wait()

    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool:
        """Returns once something was accepted at `offset` or nothing ever will be; False when the time passed."""
        waiter = ThreadWaiter()
        if not self.listen(waiter, offset) or waiter.wait(timeout_seconds):
            return True
        self.stop_listening(waiter)
        return False

    async def wait_for_news_async(self, offset: int) -> None:
        """As `wait_for_news`, with the task suspended."""
        waiter = task_waiter()
        try:
            if self.listen(waiter, offset):
                await waiter
        finally:
            self.stop_listening(waiter)

    def stop_listening(self, waiter: Waiter) -> bool:
        """Whether it was still listening: only then is it the caller's to finish."""
        with self.mutex:
            if waiter in self._listeners:
                self._listeners.remove(waiter)
                return True
            return False

    def listen(self, waiter: Waiter, offset: int) -> bool:
        """Finishes the waiter with the next news. False when there is some already, or nothing will ever come."""
        with self.mutex:
            if self.next_offset > offset or self.over:
                return False
            self._listeners.append(waiter)
            self._somebody_sleeps = True
            return True

    # For the writer

    @property
    def held_bytes(self) -> int:
        """Accepted and not yet in a file."""
        return self._max_bytes - self._room_bytes

    @property
    def sync_wanted(self) -> bool:
        return bool(self._sync_waiters)

    @property
    def file_end_due(self) -> bool:
        """Whether somebody waits for the end of the file, and what belongs into it has been written."""
        return any(target <= self.written_offset for target, _ in self._file_end_waiters)

    @property
    def has_work(self) -> bool:
        """Whether something waits to be written."""
        return self.next_offset > self.written_offset

    def files_to_adopt(self) -> Sequence[Segment] | None:
        """What the holder has prepared, if everything accepted before is in a file."""
        with self.mutex:
            return None if self._adoption is None or self.has_work else self._adoption[0]

    def adopted(self, next_offset: int) -> None:
        """The prepared files are part of the log, up to this offset, and everything before it is on the disk."""
        with self.mutex:
            assert self._adoption is not None and not self._open_payloads
            waiter, self._adoption = self._adoption[1], None
            self.next_offset = self.written_offset = next_offset
            # What it holds is in files, and it cannot go on behind a gap.
            self.cache = Cache(next_offset, *self._cache_limits)
            self._open_payloads = self.cache.open.payloads
            self._wake()
        self.synced(next_offset)
        finish_all([waiter])

    def ring(self) -> None:
        """Calls a worker, unless one is there or on the way."""
        with self.mutex:
            self._call_writer()

    def begin_service(self) -> bool:
        """By a worker that was called; False when another one is there already."""
        with self.mutex:
            if self._is_served:
                return False
            self._is_served, self._is_called = True, False
            return True

    def end_service(self) -> bool:
        """The worker may go: there is nothing to write, to sync or to finish, and what comes next calls another one."""
        with self.mutex:
            has_errand = self._sync_waiters or self._file_end_waiters or self._adoption is not None
            if self.has_work or has_errand or self.closing:
                return False
            self._let_writer_go()
            return True

    def pause_service(self) -> bool:
        """The worker may go although there is something to write: the disk is full. Closing calls one at once."""
        with self.mutex:
            if self.closing:
                return False
            self._let_writer_go()
            return True

    def interrupt_service(self) -> None:
        """The worker goes for the sake of other logs, and another one is called."""
        with self.mutex:
            self._is_served = False
            self._call_writer()

    def _let_writer_go(self) -> None:
        self._is_served = False
        self._somebody_sleeps = True

    def take(self) -> Chunk | None:
        """The oldest chunk that is not in a file yet, closed for appends."""
        with self.mutex:
            if self.cache.is_all_open:
                if not self._open_payloads:
                    return None
                self._seal()
            return self.cache.oldest_unwritten

    def wrote(self, offset: int) -> None:
        """Everything below `offset` is in a file."""
        with self.mutex:
            self.written_offset = offset
            self._set_offset_limit()

    def chunk_written(self, chunk: Chunk, frames: Frames) -> None:
        """All of a taken chunk is in a file: its room is free again."""
        with self.mutex:
            self.cache.written(chunk, frames)
            self._room_bytes += chunk.payload_bytes
            self._seal_at_room += chunk.payload_bytes
            self._grant_room()

    def synced(self, offset: int) -> None:
        """Everything below `offset` is on the disk: wakes those who waited for it."""
        with self.mutex:
            self.durable_offset = offset
            done = [waiter for target, waiter in self._sync_waiters if target <= offset]
            self._sync_waiters = [entry for entry in self._sync_waiters if entry[0] > offset]
        finish_all(done)
        if self.on_durable is not None:
            self.on_durable()

    def file_ended(self) -> None:
        """The file is closed for good, synced: wakes those who waited for that."""
        with self.mutex:
            done = [waiter for target, waiter in self._file_end_waiters if target <= self.written_offset]
            self._file_end_waiters = [entry for entry in self._file_end_waiters if entry[0] > self.written_offset]
        finish_all(done)

    # When it ends, for now or for good

    def forget(self) -> None:
        """After the end: nothing is kept in memory any more."""
        with self.mutex:
            self.cache = Cache(self.next_offset, 0, 0)

    def bar(self, make_error: Callable[[], TidelogError] | None) -> None:
        """No new appends while everything else goes on: what was accepted is written and can be read. None ends it."""
        with self.mutex:
            self._barred = make_error
            if self.closing or self.over:
                return
            if make_error is not None:
                self._refuse(make_error)
            else:
                self.refusal = self.stall
                self._set_offset_limit()

    def close(self, make_error: Callable[[], TidelogError]) -> None:
        """No new appends from now on; what was accepted goes on its way."""
        with self.mutex:
            self.closing = True
            self._refuse(self._barred or make_error)
            self._call_writer()

    def stop_short(self, make_error: Callable[[], TidelogError], *, over: bool) -> None:
        """Neither appends nor durability for now, or for ever: everybody who waits is told why."""
        with self.mutex:
            if not self.closing:
                self._refuse(make_error)
            self.stall = make_error
            self.over = self.over or over
            waiters = [waiter for _, waiter in self._sync_waiters + self._file_end_waiters]
            self._sync_waiters, self._file_end_waiters = [], []
            if self._adoption is not None:
                waiters.append(self._adoption[1])
                self._adoption = None
            if self.over:
                self._wake()
        finish_all(waiters, make_error)

    def resume(self) -> None:
        """There is room on the disk again: goes on as before."""
        with self.mutex:
            self.stall = None
            if not self.closing:
                self.refusal = self._barred
            self._set_offset_limit()

    def _refuse(self, make_error: Callable[[], TidelogError]) -> None:
        self.refusal = make_error
        self._set_offset_limit()
        self._wake_holder()
        self._room_queue.refuse_all(make_error)


def _nobody() -> None:
    """Until there is a writer."""
