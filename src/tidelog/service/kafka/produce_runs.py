"""Small Produce requests of all connections that are ready at once: one look, one append a partition, one call back.

    bytes of each connection -> plain requests (C) -> a run for each partition -> frames (C) -> one append
    one sync -> one call back a run -> one write a connection

Most producers send one batch for one partition in a request, and what such a request costs is not its bytes. So what
arrives in one turn of the event loop is looked at together. Whatever is not plain (`native/produce_requests.h`) goes
the usual way, request by request (`produce.py`), and so does everything behind it on its connection.

Invariants
- Batches of a connection for a partition are appended in the order in which they came, and answers are queued in the
  order of the requests, whichever way each of them goes.
- A batch of a producer is checked when everything before it is recorded: a run never has two batches of one producer.
- What cannot be appended at once (a full queue, a duplicate) is appended by a task that has the partition's next turn;
  until then nothing is appended there at once (`Partition.delay`).
- Only where everybody may do everything, and no client has a quota: nobody is asked here.
- A run is answered as a whole, when its last batch is on the disk: they share one write and one sync anyway.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from typing import Protocol

from tidelog import _native
from tidelog.errors import TidelogError
from tidelog.log.frame import MAX_PAYLOAD_BYTES, writable_frames
from tidelog.service.kafka.broker import Broker, error_code
from tidelog.service.kafka.codec import RequestHeader, encode_response, wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.partitions import Partition
from tidelog.service.kafka.primitives import Buffer
from tidelog.service.kafka.produce import PRODUCE, LaterAnswer, Produce
from tidelog.service.kafka.records import decode_produced
from tidelog.service.kafka.requests import known_name

_ALL, _FILES = -1, 1
_CORRELATION_ID = struct.Struct(">i")
_BASE_OFFSET = struct.Struct(">q")
_KEPT_TEMPLATES = 1000
_MARK = 0x0102_0304_0506_0708

Key = tuple[str, int, int, int]
"""Topic, partition, acks and timeout of a request."""
_Request = tuple[Key, int, int, int, int, int, int, int, int, int, int, int]
"""As `produce_requests` of the extension says it."""


class Client(Protocol):
    """A connection."""

    def takes_at_once(self, count: int) -> bool:
        """Whether so many requests may be begun now."""
        ...

    def feed(self, data: bytes) -> None:
        """Begins the requests in these bytes the usual way."""
        ...

    def queue_later(self, answer: LaterAnswer) -> None:
        """The answer to the next request, which is not there yet."""
        ...

    def answered(self) -> None:
        """Answers may be complete."""
        ...


class RunAnswer(LaterAnswer):
    """The answer to one request of a run."""

    __slots__ = ("base_offset", "client", "code", "correlation_id", "encoded", "is_done", "message", "version")

    def __init__(self, client: Client, version: int, correlation_id: int) -> None:
        self.client = client
        self.version = version
        self.correlation_id = correlation_id
        self.base_offset = -1
        self.code = ErrorCode.NONE
        self.message: str | None = None
        self.is_done = False
        self.encoded: Buffer = b""

    def refuse(self, code: ErrorCode, message: str | None = None) -> None:
        self.code, self.message, self.base_offset = code, message, -1

    def encode(self) -> Buffer:
        return self.encoded


class ProduceRun:
    """Batches for one partition that are appended together."""

    __slots__ = (
        "_finished",
        "answers",
        "batches",
        "began",
        "count",
        "deadline",
        "is_done",
        "key",
        "max_batch_bytes",
        "max_message_bytes",
        "partition",
        "stored",
    )

    def __init__(
        self, key: Key, partition: Partition, deadline: float, began: float, finished: Callable[[ProduceRun], None]
    ) -> None:
        self.key = key
        self.partition = partition
        self.max_batch_bytes = partition.serving.max_batch_bytes
        self.max_message_bytes = partition.max_message_bytes
        self.deadline = deadline
        self.began = began
        self._finished = finished
        self.answers: list[RunAnswer] = []
        self.batches: list[tuple[bytes, int, int]] = []
        self.stored: list[tuple[int, int, int, int, int, int]] = []
        """For each batch: messages before it, messages, producer, epoch, sequence and newest time (ms)."""
        self.count = 0
        self.is_done = False

    @property
    def syncs(self) -> bool:
        return self.partition.syncs(self.key[2] == _ALL)

    def append(self) -> bool:
        """Appends everything; False where that has to wait."""
        frames = writable_frames(0, *_native.batches_to_frames(self.batches, MAX_PAYLOAD_BYTES))
        first = self.partition.append_joined(frames, self.stored, sync=self.syncs)
        if first is None:
            return False
        for answer, batch in zip(self.answers, self.stored, strict=True):
            answer.base_offset = first + batch[0]
        self._await_disk(first + frames.count)
        return True

    async def append_each(self) -> None:
        """Appends one batch after the other, with all that may have to be waited for, in one turn."""
        reached = 0
        try:
            async with self.partition.delayed_turn():
                for answer, (data, start, stop) in zip(self.answers, self.batches, strict=True):
                    try:
                        limit = self.partition.max_message_bytes
                        batch = decode_produced(memoryview(data)[start:stop], max_message_bytes=limit)
                        appended = await self.partition.append_in_turn(batch)
                    except TidelogError as error:
                        self._refuse(answer, error)
                        continue
                    if not self.is_done:
                        answer.code, answer.base_offset = appended.error, appended.first_offset
                    reached = max(reached, appended.next_offset)
            self._await_disk(reached)
        except TidelogError as error:
            self.settle(error)

    def _await_disk(self, next_offset: int) -> None:
        if not self.partition.reach(self.key[2] == _ALL)(next_offset, self.settle):
            self.settle(None)

    def settle(self, error: TidelogError | None) -> None:
        """The disk has it, or why it never will."""
        if self.is_done:
            return
        if error is not None:
            for answer in self.answers:
                if answer.code is ErrorCode.NONE:
                    self._refuse(answer, error)
        self._finish()

    def time_out(self) -> None:
        """The requests are answered as timed out; what they wait for may happen all the same."""
        for answer in self.answers:
            if answer.code is ErrorCode.NONE:
                answer.refuse(ErrorCode.REQUEST_TIMED_OUT)
        self._finish()

    def _refuse(self, answer: RunAnswer, error: TidelogError) -> None:
        if not self.is_done:
            answer.refuse(error_code(error), error.message)

    def _finish(self) -> None:
        self.is_done = True
        self._finished(self)
        self._encode_all()
        for answer in self.answers:
            answer.client.answered()

    def _encode_all(self) -> None:
        """Before the first of them is sent: a connection sends all that are done at once."""
        name, index = self.key[0], self.key[1]
        start_offset = self.partition.start_offset
        version, template, at = -1, b"", 0
        for answer in self.answers:
            answer.is_done = True
            if answer.code is not ErrorCode.NONE:
                what = (-1, -1, answer.code, answer.message)
                answer.encoded = _encoded(answer.version, answer.correlation_id, name, index, *what)
                continue
            if answer.version != version:
                version = answer.version
                template, at = _template(version, name, index, start_offset)
            answer.encoded = out = bytearray(template)
            _CORRELATION_ID.pack_into(out, 4, answer.correlation_id)
            _BASE_OFFSET.pack_into(out, at, answer.base_offset)


class ProduceRuns:
    """Gathers what arrives in one turn of the event loop."""

    def __init__(self, broker: Broker, produce: Produce, took: Callable[[int, float, int], None]) -> None:
        """`took` hears of requests that were answered: their API, when they began, how many."""
        self._broker = broker
        self._produce = produce
        self._took = took
        self._arrived: list[tuple[Client, bytes]] = []
        self._runs: dict[Key, ProduceRun] = {}
        self._producers: set[tuple[Partition, int]] = set()
        """Whose batches are in the runs."""
        self._delayed: set[asyncio.Task[None]] = set()
        self.received_bytes = 0
        """Of requests that were begun here."""

    def add(self, client: Client, data: bytes) -> None:
        """Bytes that begin with a Produce request; they are looked at before the next ones are received."""
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._begin_all)
        self._arrived.append((client, data))

    def _begin_all(self) -> None:
        arrived, self._arrived = self._arrived, []
        found = _native.produce_requests([data for _, data in arrived], MAX_PAYLOAD_BYTES)
        left: dict[Client, bytes] = {}
        now, began = asyncio.get_running_loop().time(), time.perf_counter()
        for (client, data), (requests, end) in zip(arrived, found, strict=True):
            if client in left:
                left[client] += data
                continue
            begun = 0
            if client.takes_at_once(len(requests)):
                begun = end
                for request in requests:
                    left_at = self._begin(client, data, request, now, began)
                    if left_at is not None:
                        begun = left_at
                        break
            if begun < len(data):
                left[client] = data[begun:]
            self.received_bytes += begun
        self._append_all()
        for client, data in left.items():
            client.feed(data)

    def _begin(self, client: Client, data: bytes, request: _Request, now: float, began: float) -> int | None:
        """Puts a request into a run; where it begins if that cannot be."""
        key, version, correlation_id, begin, start, stop, producer_id, epoch, sequence, count, largest, newest_ms = (
            request
        )
        run = self._runs.get(key) or self._new_run(key, now, began)
        if run is None or stop - start > run.max_batch_bytes or largest > run.max_message_bytes:
            return begin
        if producer_id >= 0 and not run.partition.is_delayed:
            partition = run.partition
            if (partition, producer_id) in self._producers:
                self._append_all()
                run = self._runs[key] = self._made(key, partition, now, began)
            verdict = partition.producers.check(producer_id, epoch, sequence, count)
            if verdict.error is not ErrorCode.NONE or verdict.duplicate_offset is not None:
                # Alone: the state that it is judged by again must have all that came before it.
                self._append_all()
                run = self._made(key, partition, now, began)
                self._delay(run)
            else:
                self._producers.add((partition, producer_id))
        answer = RunAnswer(client, version, correlation_id)
        run.answers.append(answer)
        run.batches.append((data, start, stop))
        run.stored.append((run.count, count, producer_id, epoch, sequence, newest_ms))
        run.count += count
        client.queue_later(answer)
        return None

    def _new_run(self, key: Key, now: float, began: float) -> ProduceRun | None:
        name = known_name(key[0])
        served = None if name is None else self._broker.find(name)
        partition = None if served is None else self._broker.opened(served, key[1])
        if partition is None or key[2] not in (_ALL, _FILES) or partition.serving.uses_append_time:
            return None
        run = self._runs[key] = self._made(key, partition, now, began)
        return run

    def _made(self, key: Key, partition: Partition, now: float, began: float) -> ProduceRun:
        return ProduceRun(key, partition, now + max(key[3] / 1000, 0.001), began, self._finished)

    def _append_all(self) -> None:
        runs, self._runs = self._runs, {}
        self._producers.clear()
        for run in runs.values():
            if not run.batches:
                continue
            try:
                if run.append():
                    if not run.is_done:
                        self._produce.watch(run)
                else:
                    self._delay(run)
            except TidelogError as error:
                run.settle(error)

    def _delay(self, run: ProduceRun) -> None:
        run.partition.delay()
        self._produce.watch(run)
        task = asyncio.get_running_loop().create_task(run.append_each())
        self._delayed.add(task)
        task.add_done_callback(self._delayed.discard)

    def _finished(self, run: ProduceRun) -> None:
        self._produce.unwatch(run)
        self._took(PRODUCE, run.began, len(run.answers))


_templates: dict[tuple[int, str, int, int], tuple[bytes, int]] = {}


def _template(version: int, name: str, index: int, start_offset: int) -> tuple[bytes, int]:
    """An answer without an error as the codec encodes it, and where its base offset is."""
    key = (version, name, index, start_offset)
    found = _templates.get(key)
    if found is None:
        if len(_templates) >= _KEPT_TEMPLATES:
            _templates.clear()
        # Whatever the name has in it: what changes with the base offset is the base offset.
        one = _encoded(version, 0, name, index, _MARK, start_offset, ErrorCode.NONE, None)
        other = _encoded(version, 0, name, index, ~_MARK, start_offset, ErrorCode.NONE, None)
        at = next(place for place in range(len(one)) if one[place] != other[place])
        found = _templates[key] = (bytes(one), at)
    return found


def _encoded(
    version: int,
    correlation_id: int,
    name: str,
    index: int,
    base_offset: int,
    start_offset: int,
    code: ErrorCode,
    message: str | None,
) -> bytearray:
    module = wire(PRODUCE)
    partition = module.ProduceResponsePartitionProduceResponse(index=index, base_offset=base_offset)
    partition.error_code, partition.error_message, partition.log_start_offset = code, message, start_offset
    topic = module.ProduceResponseTopicProduceResponse(name=name, partition_responses=[partition])
    header = RequestHeader(PRODUCE, version, correlation_id, None, 0)
    return encode_response(header, module.ProduceResponse(responses=[topic]))
