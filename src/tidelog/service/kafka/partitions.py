"""A partition as Kafka's requests see it: its log, what it knows of producers, and the requests that wait for it.

Invariants
- Everything here runs in the thread of the event loop, but for `_written` and `_synced`, which the log's writer calls.
- Batches are checked against the producers' state, appended and recorded in one turn, so that their order in the log is
  that in which they were checked. An append of unknown outcome is looked up in the log before the next one.
- A batch that was appended waits while the disk is full, and is answered once there is room, or when its time is over.
  Refused, it would be taken for lost: a client that renumbers what it sends then stores it twice. What comes meanwhile
  is refused by the disk, and never for its sequence, which the one before it may have broken.
- Consumers of committed messages get nothing from a batch on that is appended and not recorded yet.
- The high watermark is what the files have: no consumer gets a message that a kill of this process could take back.
  Where messages are acknowledged by the store (`durability = "shipped"`) it is what the store has: nor one that the
  loss of this disk could.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tidelog.clock import to_microseconds
from tidelog.cold.flush_log import FlushedLog
from tidelog.errors import ClosedError, DiskFullError, ServerUnavailableError, TidelogError
from tidelog.log.frame import Frames, encode_many
from tidelog.log.log import Log
from tidelog.service.kafka.configs import Serving
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.partition_reader import ColdReads, EncodedBatches, PartitionReader
from tidelog.service.kafka.records import (
    Control,
    DecodedBatch,
    StoredBatch,
    control_payload,
)
from tidelog.service.kafka.transactions.producer_state import StoredProducers
from tidelog.service.kafka.transactions.producers import PartitionProducers
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import TopicName
from tidelog.topics.topic import Topic

Settle = Callable[[TidelogError | None], None]
"""Called once, in the event loop: what was waited for is reached, or why it never will be."""


class Appended(NamedTuple):
    """What became of a batch: the offset of its first message, or why it was refused."""

    error: ErrorCode
    first_offset: int = -1
    next_offset: int = -1


class Partition:
    """One partition that this process owns."""

    def __init__(
        self,
        name: TopicName,
        number: int,
        topic: Topic,
        stored: StoredProducers,
        producers: PartitionProducers,
        serving: Serving,
        cold: ColdReads,
        encoded: EncodedBatches,
    ) -> None:
        """`name` is the topic's, `topic` the log of this partition; `producers` were loaded from `stored`."""
        self.name = name
        self.number = number
        self.topic = topic
        self.producers = producers
        self._stored = stored
        self._unrecorded_from: int | None = None
        """While something is appended that the producers' state does not know yet: from which offset on."""
        self._settling: asyncio.Task[None] | None = None
        self._log = topic._log
        self._tiered = topic._tiered
        self._opened_at = 0 if topic._tiered is None else topic._tiered.first_own_offset
        self.undecided: set[int] = set()
        """Producers of transactions whose end may be lost (`lost_ends.py`): what they send is refused so long."""
        self.append_time_us: int | None = None
        """The time that the last batch got, where messages get the time of the broker."""
        self.serving = serving
        self.max_message_bytes = self._log._settings.max_message_bytes
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._delays = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._for_files: list[tuple[int, Settle]] = []
        self._until_files: list[tuple[int, Settle]] = []
        """As those for files, for callers that do not wait while the disk is full."""
        self._for_disk: list[tuple[int, Settle]] = []
        self._is_wake_due = False
        self._is_closed = False
        self.reader = PartitionReader(topic, cold, encoded, self.leader_epoch, serving.compression)
        self._log.on_written(self._written)
        self._log.on_durable(self._synced)
        if self._tiered is not None:
            self._tiered.add_flush_callback(self._written)

    def configure(self, serving: Serving) -> None:
        """The topic's configs have changed: what is appended and fetched from now on follows."""
        self.serving = serving
        self.reader.use_compression(serving.compression)

    # Where it stands

    @property
    def is_open(self) -> bool:
        return self.topic._is_open

    @property
    def is_fenced(self) -> bool:
        """Whether another node owns it now: what is here and was not shipped is no part of the log any more."""
        tiered = self.topic._tiered
        return tiered is not None and tiered.owner.is_fenced

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read. It never asks the store: an owner knows it."""
        return self.topic.start_offset

    @property
    def high_watermark(self) -> int:
        flushed = self._flushed
        return self._log.written_offset if flushed is None else min(flushed.flushed_offset, self._log.written_offset)

    @property
    def may_have_shown_more(self) -> bool:
        """Whether an owner before may have told a higher watermark: what it had acknowledged was recovered here, and
        the store has yet to confirm it."""
        return self._flushed is not None and self.high_watermark < self._opened_at

    @property
    def _flushed(self) -> FlushedLog | None:
        return None if self._tiered is None else self._tiered.flushed

    # What an answer waits for

    def syncs(self, is_acks_all: bool) -> bool:
        """Whether an append with these acks is to be synced soon."""
        return is_acks_all and (self.serving.syncs_all or self._flushed is not None)

    def reach(self, is_acks_all: bool) -> Callable[[int, Settle], bool]:
        """What calls back when an append with these acks may be answered: `in_store`, `on_disk` or `in_files`."""
        if not self.syncs(is_acks_all):
            return self.in_files
        return self.on_disk if self._flushed is None else self.in_store

    @property
    def last_stable_offset(self) -> int:
        """Never before the start: records of an open transaction may be deleted."""
        high = self.high_watermark
        stable = self.producers.last_stable_offset(high)
        if stable < high:
            stable = max(stable, self.start_offset)
        return stable if self._unrecorded_from is None else min(stable, self._unrecorded_from)

    @property
    def leader_epoch(self) -> int:
        """The owner's epoch; 0 without a store."""
        tiered = self.topic._tiered
        return 0 if tiered is None else tiered.owned.epoch

    # Appending

    def now_if_log_append_time(self) -> int | None:
        """The time of the broker for a batch that is appended now; None where messages keep that of their client."""
        self.append_time_us = self.topic._clock.now_us() if self.serving.uses_append_time else None
        return self.append_time_us

    def append_at_once(
        self, batch: DecodedBatch, *, sync: bool, verify: Callable[[], ErrorCode] | None = None
    ) -> Appended | None:
        """As `append` where nothing has to be waited for, else None. With `sync`, it is on the disk soon: `on_disk`."""
        log = self._log_at_once()
        if log is None:
            return None
        header, frames = batch.header, batch.frames
        if not header.has_producer:
            first = log.append_frames_at_once(frames, sync=sync)
            return None if first is None else Appended(ErrorCode.NONE, first, first + frames.count)
        who = (header.producer_id, header.producer_epoch, header.base_sequence)
        verdict = self.producers.check(*who, header.record_count)
        if verdict.error is not ErrorCode.NONE:
            return self._refused(verdict.error)
        if verdict.duplicate_offset is not None:
            return None
        if verify is not None and (refusal := self._refusal(header.producer_id, verify)) is not ErrorCode.NONE:
            return Appended(refusal)
        first = log.append_frames_at_once(frames, sync=sync)
        if first is None:
            return None
        return self._recorded(batch, first)

    def _log_at_once(self) -> Log | None:
        """None where something has to be waited for first."""
        if self._turn.locked() or self._delays or self._unrecorded_from is not None:
            return None
        return self.topic._appendable_at_once()

    def append_joined(
        self, frames: Frames, batches: Sequence[tuple[int, int, int, int, int, int]], *, sync: bool
    ) -> int | None:
        """Batches that were checked, one after the other, as `append_at_once`: the offset of the first message.

        Each has messages before it, messages, producer (-1: none), epoch, sequence and its newest time (ms); no two are
        of the same producer.
        """
        log = self._log_at_once()
        first = None if log is None else log.append_frames_at_once(frames, sync=sync)
        if first is None:
            return None
        now_us, has_producer = 0, False
        for before, count, producer_id, epoch, sequence, newest_ms in batches:
            if producer_id >= 0:
                now_us = now_us or self.topic._clock.now_us()
                has_producer = True
                start = first + before
                who = (producer_id, epoch, sequence)
                stored = StoredBatch(start, start + count - 1, *who, False, False, False, newest_ms * 1000)
                self.producers.record(stored, now_us)
        if has_producer:
            self._stored.appended(self.producers)
        return first

    @property
    def is_delayed(self) -> bool:
        """Whether a task has the next turn."""
        return self._delays > 0

    def delay(self) -> None:
        """Nothing is appended at once until the task that is made for it next has had its `delayed_turn`."""
        self._delays += 1

    @contextlib.asynccontextmanager
    async def delayed_turn(self) -> AsyncIterator[None]:
        """For `append_in_turn`, after `delay`."""
        try:
            async with self._turn:
                yield
        finally:
            self._delays -= 1

    async def append(
        self, batch: DecodedBatch, timeout_seconds: float | None = None, verify: Callable[[], ErrorCode] | None = None
    ) -> Appended:
        """Appends a batch of a client, unless its producer has sent it before or may not send it.

        `verify` is asked last before a transactional batch is appended: a marker that is written after it said yes
        comes after the batch.
        """
        async with self._turn:
            return await self.append_in_turn(batch, timeout_seconds, verify)

    async def append_in_turn(
        self, batch: DecodedBatch, timeout_seconds: float | None = None, verify: Callable[[], ErrorCode] | None = None
    ) -> Appended:
        """As `append`, for a caller whose turn it is."""
        header = batch.header
        if not header.has_producer:
            first = await self.topic.append_frames_async(batch.frames, timeout=timeout_seconds)
            return Appended(ErrorCode.NONE, first, first + batch.frames.count)
        await self._settle()
        who = (header.producer_id, header.producer_epoch, header.base_sequence)
        verdict = self.producers.check(*who, header.record_count)
        if verdict.error is not ErrorCode.NONE:
            return self._refused(verdict.error)
        if verdict.duplicate_offset is not None:
            return await self._again(batch, verdict.duplicate_offset)
        if verify is not None and (refusal := self._refusal(header.producer_id, verify)) is not ErrorCode.NONE:
            return Appended(refusal)
        return self._recorded(batch, await self._append_recorded(batch.frames, timeout_seconds))

    def _refused(self, error: ErrorCode) -> Appended:
        if error is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and (stall := self._log.stall) is not None:
            raise stall
        return Appended(error)

    def _refusal(self, producer_id: int, verify: Callable[[], ErrorCode]) -> ErrorCode:
        return ErrorCode.NOT_ENOUGH_REPLICAS if producer_id in self.undecided else verify()  # the client tries again

    def _recorded(self, batch: DecodedBatch, first: int) -> Appended:
        header = batch.header
        who = (header.producer_id, header.producer_epoch, header.base_sequence)
        last, time_us = first + batch.frames.count - 1, header.max_timestamp * 1000
        self._record(StoredBatch(first, last, *who, header.is_transactional, False, False, time_us))
        return Appended(ErrorCode.NONE, first, last + 1)

    async def _again(self, batch: DecodedBatch, first: int) -> Appended:
        """A batch with the sequences of a stored one is answered as that one was, if it has its messages.

        A client that gave a transaction up may use sequences again that it never got an answer for. To take what it
        sends then for the old batch would lose it; refused, the client aborts and goes on with a new epoch.
        """
        count = batch.frames.count
        stored = await in_store_thread(self._stored.payloads, first, count)
        if len(stored) == count and not self.serving.uses_append_time and stored != batch.frames.payloads():
            return Appended(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
        return Appended(ErrorCode.NONE, first, first + count)

    async def write_marker(self, control: Control) -> int:
        """Ends a transaction here; returns once that is where acknowledged messages are: on the disk, or in the store.
        A late one is not written, and is answered when the one before it is there."""
        if control.producer_id in self.undecided:
            raise ServerUnavailableError(
                f"{self.name}, partition {self.number}: the end of an earlier transaction is looked for",
                hint="Try again in a moment",
            )
        return await self.write_lost_end(control)

    async def write_lost_end(self, control: Control) -> int:
        """The same for a transaction whose end was lost."""
        who = (control.producer_id, control.producer_epoch, control.coordinator_epoch)
        async with self._turn:
            await self._settle()
            if self.producers.is_late(*who):
                offset = self._log.next_offset - 1
            else:
                offset = await self._append_recorded(encode_many(0, [control_payload(control)]), None)
                stored = StoredBatch(offset, offset, *who, True, True, control.is_commit, control.timestamp_us)
                self._record(stored)
        await self._log.wait_durable_async(offset, 1)
        flushed = self._flushed
        if flushed is not None and flushed.flushed_offset <= offset:
            await asyncio.wrap_future(flushed.join(offset))
        return offset

    async def _append_recorded(self, frames: Frames, timeout_seconds: float | None) -> int:
        """Appends what `_record` is to be called with. When that fails or is cancelled, the log has the outcome."""
        self._unrecorded_from = self._log.next_offset
        try:
            return await self.topic.append_frames_async(frames, timeout=timeout_seconds)
        except BaseException as error:
            if isinstance(error, DiskFullError) and error.offset is None:
                self._unrecorded_from = None  # it was not accepted
                raise
            self._settling = self._loop.create_task(self._settle_in_turn())
            raise

    def _record(self, batch: StoredBatch) -> None:
        self.producers.record(batch, self.topic._clock.now_us())
        self._unrecorded_from = None
        self._stored.appended(self.producers)

    async def _settle_in_turn(self) -> None:
        """Soon, and not only with the next batch: consumers of committed messages wait for it."""
        async with self._turn:
            with contextlib.suppress(TidelogError):  # the next batch tries again
                await self._settle()

    async def _settle(self) -> None:
        """After an append of unknown outcome: reads whether the log has it."""
        if self._unrecorded_from is None:
            return
        for batch in await in_store_thread(self._stored.batches_from, self._unrecorded_from):
            self.producers.record(batch, self.topic._clock.now_us())
        self._unrecorded_from = None
        self._wake()

    def in_files(self, next_offset: int, settle: Settle) -> bool:
        """Calls back when everything below an offset is in a file; False when it is already."""
        return self._reach_files(self._for_files, next_offset, settle)

    def _reach_files(self, waiting: list[tuple[int, Settle]], next_offset: int, settle: Settle) -> bool:
        if self._log.written_offset >= next_offset:
            return False
        waiting.append((next_offset, settle))
        if self._log.written_offset >= next_offset or self._is_closed or self._log.stall is not None:
            self._loop.call_soon(self._wake)
        return True

    async def until_in_files(self, next_offset: int) -> None:
        """Returns once everything below an offset is in a file; raises what keeps it from that for now."""
        reached: asyncio.Future[None] = self._loop.create_future()

        def settle(error: TidelogError | None) -> None:
            if reached.done():
                return
            if error is None:
                reached.set_result(None)
            else:
                reached.set_exception(error)

        if self._reach_files(self._until_files, next_offset, settle):
            await reached

    def on_disk(self, next_offset: int, settle: Settle) -> bool:
        """Calls back when everything below an offset is on the disk; False when it is already. Raises what keeps it
        from getting there."""
        if self._log.durable_offset >= next_offset:
            return False
        self._for_disk.append((next_offset, settle))
        try:
            # What happens from here on is told; what happened before it is noticed here.
            self._log.request_sync(next_offset)
        except TidelogError:
            self._for_disk.pop()
            raise
        if self._log.durable_offset >= next_offset or self._is_closed:
            self._loop.call_soon(self._wake)
        return True

    def in_store(self, next_offset: int, settle: Settle) -> bool:
        """Calls back when the store has everything below an offset; False when it has already."""
        flushed = self._flushed
        if flushed is None or flushed.flushed_offset >= next_offset:
            return False

        def tell(done: Future[None]) -> None:
            error = done.exception()
            assert error is None or isinstance(error, TidelogError)
            with contextlib.suppress(RuntimeError):  # the loop was closed: no request waits
                self._loop.call_soon_threadsafe(settle, error)

        flushed.join(next_offset - 1).add_done_callback(tell)
        return True

    # Positions

    def find_time(self, timestamp_ms: int, end: int) -> tuple[int, int] | None:
        """In a thread: the first message of a time (ms) or later below `end`, as (offset, its time)."""
        if timestamp_ms == -3:  # the newest time of all; times grow but for those that clients set
            offset, newest = -1, -1
            for message in self.topic.read(
                max(self.start_offset, end - 1), end, on_gap="skip", isolation="read_uncommitted"
            ):
                assert message.timestamp is not None
                offset, newest = message.offset, to_microseconds(message.timestamp) // 1000
            return None if offset < 0 else (offset, newest)
        offset = self.topic._readable.offset_at(timestamp_ms * 1000)
        for message in (
            self.topic.read(offset, min(end, offset + 1), on_gap="skip", isolation="read_uncommitted")
            if offset < end
            else ()
        ):
            assert message.timestamp is not None
            return message.offset, to_microseconds(message.timestamp) // 1000
        return None

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """In a thread: the last epoch up to this one, and the offset at which its messages end; -1 where that is not
        known. Without a store there is one epoch."""
        tiered, end = self.topic._tiered, self.high_watermark
        if tiered is None:
            return 0, end
        return tiered.epoch_starts().end_of(epoch, end) or (-1, -1)

    def kept_until(self, epoch: int) -> int:
        """In a thread: what was read under this epoch is still there up to here, where later owners have begun."""
        tiered, end = self.topic._tiered, self.high_watermark
        starts = () if tiered is None else tiered.epoch_starts().starts
        return next((start for written, start in starts if written > epoch), end)

    # Waiting for news

    def listen(self, waiter: asyncio.Future[None], offset: int) -> None:
        """Finishes the waiter when something at `offset` or after it can be read, or the partition is closed."""
        self._waiting.add(waiter)
        if self.high_watermark > offset or not self.is_open or self._is_closed:
            self._wake()

    def stop_listening(self, waiter: asyncio.Future[None]) -> None:
        self._waiting.discard(waiter)

    def _written(self) -> None:
        """By the writer's thread, also when nothing more is going to be written."""
        if self._waiting or self._for_files or self._until_files or (self._for_disk and self._log.over):
            self._wake_soon()

    def _synced(self) -> None:
        """By the writer's thread."""
        if self._for_disk:
            self._wake_soon()

    def _wake_soon(self) -> None:
        """One call into the loop at a time: it costs more than everything else."""
        if not self._is_wake_due:
            self._is_wake_due = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                return  # the loop was closed: no request waits

    def _wake(self) -> None:
        self._is_wake_due = False
        waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            _finish(waiter)
        self._settle_reached()

    def _settle_reached(self) -> None:
        """Answers those whose messages are in a file or on the disk. When the log is over, the others never will be."""
        # Asked first: what became durable before the log stalled is answered as such.
        is_over = self._is_closed or not self.is_open or self._log.over
        error, stall = self._why_over() if is_over else None, self._log.stall
        if self._for_files:
            self._for_files = _settled_up_to(self._log.written_offset, self._for_files, error)
        if self._until_files:
            self._until_files = _settled_up_to(self._log.written_offset, self._until_files, error or stall)
        if self._for_disk:
            self._for_disk = _settled_up_to(self._log.durable_offset, self._for_disk, error)

    def _why_over(self) -> TidelogError:
        return self._log.stall or ClosedError(f"{self.name} was closed before the messages were on the disk")

    def close(self) -> None:
        """Wakes every request that waits here, and closes the readers. The topic is closed by its directory."""
        self._is_closed = True
        self._log.on_written(None)
        self.reader.close()
        waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            _finish(waiter)
        self._settle_reached()


def _settled_up_to(reached: int, due: list[tuple[int, Settle]], error: TidelogError | None) -> list[tuple[int, Settle]]:
    """Calls those back that have reached their offset, or all with an error; those that go on waiting."""
    left = []
    for entry in due:
        if entry[0] <= reached:
            entry[1](None)
        elif error is not None:
            entry[1](error)
        else:
            left.append(entry)
    return left


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
