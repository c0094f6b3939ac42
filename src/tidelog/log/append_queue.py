"""The append queue: sits between the appending threads and the writer, and is the only code that assigns offsets.

Invariants
- One mutex guards everything. One critical section reserves room, assigns the offset and makes the message visible to
  both the writer and the readers; so offsets, frames and deliveries all have the same order.
- An append that cannot be queued uses no offset, and no reader sees it. No offset above `MAX_OFFSET` is assigned.
- `durable_offset <= written_offset <= next_offset`, and none of them ever decreases. Each is exclusive: everything
  below it is synced, is in a file, has been accepted.
- Payloads that come framed are given their offset here, and the headers of their frames when they are written: what is
  done under the mutex takes the same time for any number of them.
- Threads that wait for room are served in order of arrival, so small messages do not starve a large one.
- While appends are held back, only the holder's are accepted, so its messages have consecutive offsets. All others
  wait in the same order of arrival, within their timeout.
- The writer adopts files that the holder prepared once everything accepted before them is in a file.
- The writer is a worker that many logs share. One worker at a time serves this log (`begin_service`), until it finds
  nothing to do under the mutex (`end_service`); anything queued after that calls another one. So no work is stranded.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import TIMEOUT_MAX, Event, Lock

from tidelog.codec import MAX_OFFSET
from tidelog.errors import BackpressureError, InputError, MessageTooLargeError, TidelogError
from tidelog.log.frame import Frames
from tidelog.log.segment import Segment
from tidelog.log.settings import LogSettings
from tidelog.log.tail_cache import Cache, Chunk

# How threads and tasks wait for the writer, and how it wakes them.
#
# The waiting thread or task creates a waiter and queues it under the log's mutex; the thread that removes it from its
# list finishes it, exactly once. A thread sleeps on a lock of its own. A task awaits a plain future of its loop, and
# one call into a loop finishes all its futures, since waking a loop costs more than everything else.


MakeError = Callable[[], BaseException]


def _lock_timeout(seconds: float | None) -> float:
    return -1 if seconds is None else min(max(0.0, seconds), TIMEOUT_MAX)


class ThreadWaiter:
    """A blocked thread."""

    __slots__ = ("_error", "_lock")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lock = Lock()
        self._lock.acquire()

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._lock.release()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """False when the time passed (the waiter may still be on its list then); raises what it was finished with."""
        in_time = self._lock.acquire(timeout=_lock_timeout(timeout_seconds))
        if self._error is not None:
            raise self._error
        return in_time


class Bell:
    """Wakes a thread that waits for several things at once: the first waiter that is finished rings it."""

    def __init__(self) -> None:
        self._rung = Event()

    def waiter(self) -> ThreadWaiter:
        return _BellWaiter(self._rung)

    def wait(self, timeout_seconds: float | None) -> bool:
        """False when the time passed. What a waiter was finished with is for the next look."""
        return self._rung.wait(timeout_seconds)


class _BellWaiter(ThreadWaiter):
    __slots__ = ("_rung",)

    def __init__(self, rung: Event) -> None:
        self._rung = rung

    def finish(self, error: BaseException | None) -> None:
        self._rung.set()


TaskWaiter = asyncio.Future[None]
Waiter = ThreadWaiter | TaskWaiter


def task_waiter() -> TaskWaiter:
    """A waiter for the running task, to be awaited."""
    return asyncio.get_running_loop().create_future()


def finish_all(waiters: Iterable[Waiter], make_error: MakeError | None = None) -> None:
    """Wakes them all. Each gets an error of its own, so that tracebacks do not mix."""
    loops: dict[asyncio.AbstractEventLoop, list[TaskWaiter]] = {}
    for waiter in waiters:
        if isinstance(waiter, ThreadWaiter):
            waiter.finish(None if make_error is None else make_error())
        elif isinstance(waiter, asyncio.Future):
            loops.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, futures in loops.items():
        try:
            loop.call_soon_threadsafe(_finish_futures, futures, make_error)
        except RuntimeError:
            continue  # the loop was closed: there is no waiter


def _finish_futures(futures: list[TaskWaiter], make_error: MakeError | None) -> None:
    """Runs in the loop. A task that was cancelled meanwhile no longer listens.

    asyncio's handler of SIGINT cancels tasks between any two steps, so that asking first is not enough.
    """
    for future in futures:
        if future.done():
            continue
        try:
            if make_error is None:
                future.set_result(None)
            else:
                future.set_exception(make_error())
        except asyncio.InvalidStateError:
            continue


# Appends that wait for room in the queue, in order of arrival.
#
# Invariants (every method is called under the log's mutex)
# - A thread that frees room accepts the waiting appends on their behalf, so no append is retried and none overtakes.
# - A request that does not fit yet holds back those after it: small messages do not starve a large one.


Appended = Sequence[bytes] | Frames
"""What one append brings: bare payloads, or frames whose offsets are not final."""


def count_of(appended: Appended) -> int:
    """How many messages these are."""
    return appended.count if isinstance(appended, Frames) else len(appended)


class CapacityRequest:
    """One waiting append; `offset` is set when it has been accepted."""

    __slots__ = ("appended", "count", "offset", "size", "waiter")

    def __init__(self, appended: Appended, size: int, waiter: Waiter) -> None:
        self.appended = appended
        self.count = count_of(appended)
        self.size = size
        self.waiter = waiter
        self.offset: int | None = None


class CapacityQueue:
    """The waiting appends."""

    def __init__(self, fits: Callable[[int, int], bool], accept: Callable[[Appended, int], int]) -> None:
        self._fits = fits
        self._accept = accept
        self._requests: deque[CapacityRequest] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def ask(self, appended: Appended, size: int, waiter: Waiter) -> CapacityRequest:
        request = CapacityRequest(appended, size, waiter)
        self._requests.append(request)
        return request

    def withdraw(self, request: CapacityRequest) -> bool:
        """Takes a request back; False when it has been answered already."""
        if request not in self._requests:
            return False
        self._requests.remove(request)
        return True

    def grant(self) -> None:
        """Accepts as many as there is room for."""
        granted: list[Waiter] = []
        while self._requests and self._fits(self._requests[0].count, self._requests[0].size):
            request = self._requests.popleft()
            request.offset = self._accept(request.appended, request.size)
            granted.append(request.waiter)
        finish_all(granted)

    def refuse_all(self, make_error: MakeError) -> None:
        requests, self._requests = self._requests, deque()
        finish_all([request.waiter for request in requests], make_error)


# A holder always has more to append: it fills no more than this much of the queue, so that its memory is bounded.
_MAX_HELD_BYTES = 8 << 20
# The writer needs the interpreter's lock a few times a chunk, and may wait 5 ms for it each time beside a thread that
# appends without pause: chunks this large let it keep up all the same.
_MAX_CHUNK_BYTES = 8 << 20


class Listened(ABC):
    """Something that messages come to, and that threads and tasks can wait for."""

    @abstractmethod
    def listen(self, waiter: Waiter, offset: int) -> bool:
        """Finishes the waiter with the next news. False when there is some already, or nothing will ever come."""

    @abstractmethod
    def stop_listening(self, waiter: Waiter) -> bool:
        """Whether it was still listening: only then must the caller finish it."""

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


class AppendQueue(Listened):
    """Accepts payloads, assigns offsets, and tracks the waiters."""

    def __init__(self, next_offset: int, settings: LogSettings) -> None:
        self.mutex = Lock()
        self.next_offset = next_offset
        self.written_offset = next_offset
        self.durable_offset = next_offset
        self._cache_limits = settings.cache_max_messages, settings.cache_max_bytes
        self.cache = Cache(next_offset, *self._cache_limits)
        # Why appends are refused, why nothing becomes durable, and whether the writer has ended.
        self.refusal: Callable[[], TidelogError] | None = None
        self.stall: Callable[[], TidelogError] | None = None
        self.closing = False
        self.over = False
        self._barred: Callable[[], TidelogError] | None = None
        self._chunk_bytes = min(_MAX_CHUNK_BYTES, max(1, settings.fsync_max_batch_bytes // 2))
        self._max_bytes = settings.append_queue_max_bytes
        self._max_messages = settings.append_queue_max_messages
        self._max_message_bytes = settings.max_message_bytes
        self._append_timeout_seconds = settings.append_timeout_ms / 1000
        self._is_held = False
        self._room_queue = CapacityQueue(self._fits, self._accept)
        self._holder: ThreadWaiter | None = None
        self._adoption: tuple[Sequence[Segment], ThreadWaiter] | None = None
        self._sync_waiters: list[tuple[int, Waiter]] = []
        self._sync_target = 0
        """Everything below it is to be synced soon, for callers that `on_durable` tells."""
        self._file_end_waiters: list[tuple[int, Waiter]] = []
        self._listeners: list[Waiter] = []
        self.call: Callable[[], None] = _nobody
        """Calls a worker to serve this log. Set by the writer before the first append."""
        self._is_called = False
        self._is_served = False
        self.on_written: Callable[[], None] | None = None
        self.on_durable: tuple[Callable[[], None], ...] = ()
        """Called after each write and after each sync, by the thread that made it, and `on_written` also when the log
        stalls or ends: quick, and raising nothing."""
        # What `try_append` reads, kept ready so that a message costs as few steps as possible: the open chunk, the
        # room left, the room at which the chunk is full, the first offset without room (0: take the slow path), and
        # whether the writer or a reader sleeps.
        self._open_payloads = self.cache.open.payloads
        self._room_bytes = settings.append_queue_max_bytes
        self._seal_at_room = self._room_bytes - self._chunk_bytes
        self._offset_limit = min(next_offset + self._max_messages, MAX_OFFSET + 1)
        self._somebody_sleeps = False

    # For appending threads

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
        return self._append(payloads, self._measure(payloads), timeout_seconds)

    def append_frames(self, frames: Frames, timeout_seconds: float | None = None) -> int:
        """As `append_many`, with payloads that are framed. The writer gives the frames their offsets."""
        return self._append(frames, self._measure_frames(frames), timeout_seconds)

    def append_frames_at_once(self, frames: Frames, *, sync: bool) -> int | None:
        """As `append_frames`, None where that has to wait. With `sync`, `on_durable` tells when they are on the
        disk."""
        size, count = self._measure_frames(frames), frames.count
        with self.mutex:
            fits = size <= self._room_bytes and self.next_offset + count <= self._offset_limit
            if not fits and not self._admits(count, size):
                return None
            offset = self._accept(frames, size)
            if sync:
                self._sync_target = self.next_offset
            return offset

    async def append_many_async(self, payloads: Sequence[bytes], timeout_seconds: float | None = None) -> int:
        """As `append_many`, with the task suspended while there is no room."""
        return await self._append_async(payloads, self._measure(payloads), timeout_seconds)

    async def append_frames_async(self, frames: Frames, timeout_seconds: float | None = None) -> int:
        """As `append_frames`, with the task suspended while there is no room."""
        return await self._append_async(frames, self._measure_frames(frames), timeout_seconds)

    def _append(self, appended: Appended, size: int, timeout_seconds: float | None) -> int:
        with self.mutex:
            if self._admits(count_of(appended), size):
                return self._accept(appended, size)
            waiter = ThreadWaiter()
            request = self._ask_for_room(appended, size, waiter)
        limit = self._append_timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            waiter.wait(limit)
        except BaseException:
            self._withdraw(request)
            raise
        return self._outcome(request, limit)

    async def _append_async(self, appended: Appended, size: int, timeout_seconds: float | None) -> int:
        with self.mutex:
            if self._admits(count_of(appended), size):
                return self._accept(appended, size)
            waiter = task_waiter()
            request = self._ask_for_room(appended, size, waiter)
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
        # Checked here, because the writer could not report it. A bytearray could still change.
        if set(map(type, payloads)) - {bytes} or not all(payloads):
            raise InputError("payload must be non-empty bytes", operation="append")
        sizes = list(map(len, payloads))
        self._check_size(max(sizes, default=0))
        return sum(sizes)

    def _measure_frames(self, frames: Frames) -> int:
        # The checksums are not looked at: that would cost more than everything else, and the frames are our own.
        size, largest = frames.measure()
        self._check_size(largest)
        return size

    def _check_size(self, largest: int) -> None:
        if largest > self._max_message_bytes:
            raise MessageTooLargeError(
                f"a message of {largest} bytes is over max_message_bytes ({self._max_message_bytes})",
                operation="append",
                hint="Split it, or raise max_message_bytes",
            )

    def _admits(self, count: int, size: int) -> bool:
        """Whether it is this append's turn and there is room."""
        if self.refusal is not None:
            raise self.refusal()
        self._check_offsets_left(count)
        return not self._room_queue and self._fits(count, size)

    def _check_offsets_left(self, count: int) -> None:
        if count > self._offsets_left:
            raise InputError(
                f"{count} more messages need offsets up to {self.next_offset + count - 1}; the largest offset is "
                f"{MAX_OFFSET}",
                operation="append",
                hint="No offset was used, and all messages stay readable; append to another topic",
            )

    @property
    def _offsets_left(self) -> int:
        return MAX_OFFSET + 1 - self.next_offset

    def _fits(self, count: int, size: int) -> bool:
        return not self._is_held and count <= self._offsets_left and self._has_room(count, size)

    def _has_room(self, count: int, size: int) -> bool:
        """A payload larger than the whole queue is accepted alone, when the queue is empty."""
        waiting = self.next_offset - self.written_offset
        return waiting == 0 or (size <= self._room_bytes and waiting + count <= self._max_messages)

    def _accept(self, appended: Appended, size: int) -> int:
        offset = self.next_offset
        count = count_of(appended)
        if not count:
            return offset
        if self._somebody_sleeps:
            self._wake()
        if isinstance(appended, Frames):
            self._add_framed(Frames(offset, appended.buffer, appended.positions, appended.lengths), size)
            return offset
        self.next_offset = offset + count
        self._room_bytes -= size
        self._open_payloads.extend(appended)
        if self._room_bytes <= self._seal_at_room:
            self._seal()
        return offset

    def _add_framed(self, frames: Frames, size: int) -> None:
        if self._open_payloads:
            self._seal()
        next_offset, room = frames.next_offset, self._room_bytes - size
        self.cache.add_framed(frames, size)
        # No calls from here on: Ctrl-C may raise after any.
        self.next_offset = next_offset
        self._room_bytes = room
        self._open_payloads = self.cache.open.payloads
        self._seal_at_room = room - self._chunk_bytes

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

    def _ask_for_room(self, appended: Appended, size: int, waiter: Waiter) -> CapacityRequest:
        request = self._room_queue.ask(appended, size, waiter)
        self._set_offset_limit()
        return request

    def _outcome(self, request: CapacityRequest, limit_seconds: float) -> int:
        if not self._withdraw(request) and request.offset is not None:
            return request.offset
        if self.refusal is not None:
            raise self.refusal()
        self._check_offsets_left(request.count)
        if self._is_held:
            raise BackpressureError(
                f"appends waited {limit_seconds:g} s for the ingest of staged rows",
                operation="append",
                hint="No offset was used; append again later, or wait longer",
            )
        raise BackpressureError(
            f"the append queue stayed full for {limit_seconds:g} s: the disk does not keep up",
            operation="append",
            hint="No offset was used; append again later, or raise append_queue_max_bytes or append_queue_max_messages",
        )

    def _withdraw(self, request: CapacityRequest) -> bool:
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
        self._offset_limit = min(self.written_offset + self._max_messages, MAX_OFFSET + 1) if may_append else 0

    # For a holder, which appends many messages that must stay together

    def ends_whole_at(self, offset: int) -> bool:
        """Whether all that was accepted is below an offset, and nothing is being appended piece by piece."""
        with self.mutex:
            return offset == self.next_offset and not self._is_held

    def hold(self) -> None:
        """From here on only `append_held` appends, until `release`. One holder at a time."""
        with self.mutex:
            assert not self._is_held, "appends are already held back"
            self._is_held = True
            self._set_offset_limit()

    def release(self) -> None:
        """Serves the appends that waited, in order of arrival."""
        with self.mutex:
            self._is_held = False
            self._grant_room()

    def append_held(self, frames: Frames) -> None:
        """By the holder, as `append_frames`. Waits for room as long as it takes, and raises what keeps the log from
        accepting anything."""
        size, _ = frames.measure()
        while True:
            with self.mutex:
                assert self._is_held
                if self.refusal is not None:
                    raise self.refusal()
                self._check_offsets_left(frames.count)
                if self._has_room_for_holder(frames.count, size):
                    self._accept(frames, size)
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
            self._check_offsets_left(prepared[-1].next_offset - self.next_offset)
            self._adoption = prepared, waiter
            if self._somebody_sleeps:
                self._wake()
        waiter.wait()

    def _has_room_for_holder(self, count: int, size: int) -> bool:
        if self.has_work and self.held_bytes + size > _MAX_HELD_BYTES:
            return False
        return self._has_room(count, size)

    def _wake_holder(self) -> None:
        """Whether there is room now, or appends are no longer accepted."""
        holder, self._holder = self._holder, None
        finish_all([] if holder is None else [holder])

    # For waiters

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

    def request_sync(self, target: int) -> None:
        """Everything below `target` is synced soon, or when the disk has room again, and `on_durable` tells; raises
        what keeps it from that for good."""
        with self.mutex:
            if self.durable_offset >= target:
                return
            if self.over and self.stall is not None:
                raise self.stall()
            self._sync_target = max(self._sync_target, target)
            if self._somebody_sleeps:
                self._wake()

    def wait_file_end(self) -> None:
        """Returns once everything that was accepted before is in sealed files."""
        waiter = ThreadWaiter()
        with self.mutex:
            if self.stall is not None:
                raise self.stall()
            self._file_end_waiters.append((self.next_offset, waiter))
            if self._somebody_sleeps:
                self._wake()
        waiter.wait()

    def stop_listening(self, waiter: Waiter) -> bool:
        with self.mutex:
            if waiter in self._listeners:
                self._listeners.remove(waiter)
                return True
            return False

    def listen(self, waiter: Waiter, offset: int) -> bool:
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
        return bool(self._sync_waiters) or self._sync_target > self.durable_offset

    @property
    def file_end_due(self) -> bool:
        """Whether a caller waits for the end of the file, and everything that belongs in it has been written."""
        return any(target <= self.written_offset for target, _ in self._file_end_waiters)

    @property
    def has_work(self) -> bool:
        """Whether something waits to be written."""
        return self.next_offset > self.written_offset

    def files_to_adopt(self) -> Sequence[Segment] | None:
        """The files that the holder has prepared, if everything accepted before is in a file."""
        with self.mutex:
            return None if self._adoption is None or self.has_work else self._adoption[0]

    def adopted(self, next_offset: int) -> None:
        """The prepared files are part of the log, up to this offset, and everything before it is on the disk."""
        with self.mutex:
            assert self._adoption is not None and not self._open_payloads
            waiter, self._adoption = self._adoption[1], None
            self.next_offset = self.written_offset = next_offset
            # What it holds is in files, and it cannot continue after a gap.
            self.cache = Cache(next_offset, *self._cache_limits)
            self._open_payloads = self.cache.open.payloads
            self._wake()
        if self.on_written is not None:
            self.on_written()
        self.synced(next_offset)
        finish_all([waiter])

    def ring(self) -> None:
        """Calls a worker, unless one is serving or has been called."""
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
            has_errand = self.sync_wanted or self._file_end_waiters or self._adoption is not None
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
        """The worker leaves to serve other logs, and another one is called."""
        with self.mutex:
            self._is_served = False
            self._call_writer()

    def _let_writer_go(self) -> None:
        self._is_served = False
        self._somebody_sleeps = True

    def take(self) -> list[Chunk]:
        """The oldest chunks that are not in a file yet and go into it together, closed for appends; none when all are
        there."""
        with self.mutex:
            if self.cache.is_all_open:
                if not self._open_payloads:
                    return []
                self._seal()
            return self.cache.oldest_unwritten()

    def wrote(self, offset: int) -> None:
        """Everything below `offset` is in a file."""
        with self.mutex:
            self.written_offset = offset
            self._set_offset_limit()

    def chunks_written(self, chunks: Sequence[Chunk], frames: Frames) -> None:
        """All of the taken chunks are in a file: their room is free again."""
        size = sum(chunk.payload_bytes for chunk in chunks)
        with self.mutex:
            self.cache.written(chunks, frames)
            self._room_bytes += size
            self._seal_at_room += size
            self._grant_room()
        if self.on_written is not None:
            self.on_written()

    def shrink_cache(self, max_bytes: int) -> int:
        """As the common bound of all caches asks; what the cache holds now."""
        with self.mutex:
            self.cache.shrink_to(max_bytes)
            return self.cache.cached_bytes

    def synced(self, offset: int) -> None:
        """Everything below `offset` is on the disk: wakes its waiters."""
        with self.mutex:
            self.durable_offset = offset
            done = [waiter for target, waiter in self._sync_waiters if target <= offset]
            self._sync_waiters = [entry for entry in self._sync_waiters if entry[0] > offset]
        finish_all(done)
        for callback in self.on_durable:
            callback()

    def file_ended(self) -> None:
        """The file is closed for good, synced: wakes the waiters for that."""
        with self.mutex:
            done = [waiter for target, waiter in self._file_end_waiters if target <= self.written_offset]
            self._file_end_waiters = [entry for entry in self._file_end_waiters if entry[0] > self.written_offset]
        finish_all(done)

    # When it ends, for now or for good

    def forget(self) -> None:
        """Releases the memory after the end."""
        with self.mutex:
            self.cache = Cache(self.next_offset, 0, 0)

    def bar(self, make_error: Callable[[], TidelogError] | None) -> None:
        """Refuses new appends and lets everything else continue: accepted messages are written and readable. None ends
        it."""
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
        """Refuses new appends from now on; accepted messages are still written."""
        with self.mutex:
            self.closing = True
            self._refuse(self._barred or make_error)
            self._call_writer()

    def stop_short(self, make_error: Callable[[], TidelogError], *, over: bool) -> None:
        """Stalls or stops the log and fails all waiters with the
        reason."""
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
        if self.on_written is not None:
            self.on_written()

    def resume(self) -> None:
        """There is room on the disk again: resumes normal operation."""
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
