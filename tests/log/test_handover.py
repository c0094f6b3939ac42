"""The hand-over to the writer: bounded, first come first served, and an append that does not get in leaves no trace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest
from tests.log.workbench import DIRECTORY, Gate, Threads, contents, numbered, payload, payloads, wait_until

from tidelog.errors import BackpressureError, ClosedError, InputError, MessageTooLargeError
from tidelog.log import Log, LogSettings
from tidelog.log.append_queue import finish_all, task_waiter
from tidelog.testing import FaultyFiles

TEN_MESSAGES = LogSettings(append_queue_max_messages=10)
TWO_HUNDRED_BYTES = LogSettings(append_queue_max_bytes=200)


@contextmanager
def stuck_log(settings: LogSettings) -> Iterator[tuple[Log, Gate]]:
    """A log whose writer hangs in its first write; the gate lets it go on."""
    files = FaultyFiles()
    with Gate(files) as gate, closing(Log.open(DIRECTORY, settings, files=files)) as log:
        yield log, gate
        gate.open()


@contextmanager
def full_log(settings: LogSettings = TEN_MESSAGES) -> Iterator[tuple[Log, Gate]]:
    """A stuck log with ten messages of twenty bytes that wait for the file: no more fit."""
    with stuck_log(settings) as (log, gate):
        for number in range(10):
            log.append(payload(number))
        gate.wait_until_reached()
        yield log, gate


def wait_for_line(log: Log, count: int) -> None:
    """Until so many appends wait for room. Nothing public tells that: an append that waits has left no trace."""
    wait_until(lambda: len(log._append_queue._room_queue) == count, f"{count} in line")


@pytest.mark.parametrize("settings", [TEN_MESSAGES, TWO_HUNDRED_BYTES])
def test_a_full_hand_over_blocks_until_there_is_room(settings: LogSettings) -> None:
    """An append that finds no room waits, and gets the next offset once the writer has caught up."""
    with full_log(settings) as (log, gate), Threads() as threads:
        offsets: list[int] = []
        waiting = threads.start(lambda: offsets.append(log.append(payload(10))))
        waiting.join(0.05)
        assert (waiting.is_alive(), log.next_offset) == (True, 10)
        gate.open()
        waiting.join(60)
        assert offsets == [10]
        assert contents(log) == numbered(11)


@pytest.mark.parametrize("settings", [TEN_MESSAGES, TWO_HUNDRED_BYTES])
def test_a_timeout_uses_no_offset(settings: LogSettings) -> None:
    """What was refused is in no file, no reader sees it, and the next append gets the offset."""
    with full_log(settings) as (log, gate):
        for timeout_seconds in (0, 0.01):
            with pytest.raises(BackpressureError, match="No offset was used"):
                log.append(b"refused", timeout_seconds=timeout_seconds)
            with pytest.raises(BackpressureError):
                log.append_many([b"refused"] * 2, timeout_seconds=timeout_seconds)
        assert log.next_offset == 10
        assert contents(log) == numbered(10)
        gate.open()
        assert log.append(payload(10)) == 10
        assert contents(log) == numbered(11)


def test_the_timeout_of_the_settings_is_the_default() -> None:
    """With an append_timeout_ms of 0, a full hand-over raises at once."""
    settings = LogSettings(append_queue_max_messages=10, append_timeout_ms=0)
    with full_log(settings) as (log, _), pytest.raises(BackpressureError):
        log.append(payload(10))


def test_room_is_given_in_order_of_arrival() -> None:
    """Ten threads that wait for room get their offsets in the order in which they came."""
    with full_log() as (log, gate), Threads() as threads:
        for number in range(10, 20):
            threads.start(partial(log.append, payload(number)))
            wait_for_line(log, number - 9)
        gate.open()
        wait_until(lambda: log.next_offset == 20, "all ten")
        assert contents(log) == numbered(20)


def test_a_large_message_is_not_starved_by_small_ones() -> None:
    """A message for which there is no room yet holds back those behind it, though they would fit."""
    with stuck_log(TWO_HUNDRED_BYTES) as (log, gate), Threads() as threads:
        log.append(payload(0))
        gate.wait_until_reached()
        threads.start(partial(log.append, payload(1, 190)))
        wait_for_line(log, 1)
        with pytest.raises(BackpressureError):
            log.append(b"small", timeout_seconds=0.01)
        gate.open()
        wait_until(lambda: log.next_offset == 2, "the large one")
        assert contents(log) == [(0, payload(0)), (1, payload(1, 190))]


def test_who_gives_up_lets_those_behind_go_on() -> None:
    """When the first in line times out, the ones behind it get the room that it did not."""
    with stuck_log(TWO_HUNDRED_BYTES) as (log, gate), Threads() as threads:
        log.append(payload(0))
        gate.wait_until_reached()
        refused: list[BackpressureError] = []

        def give_up() -> None:
            with pytest.raises(BackpressureError) as caught:
                log.append(payload(99, 190), timeout_seconds=0.2)
            refused.append(caught.value)

        threads.start(give_up)
        wait_until(lambda: bool(log._append_queue._room_queue or refused), "the first in line")
        assert log.append(payload(1)) == 1
        assert len(refused) <= 1
        gate.open()
    assert len(refused) == 1


@pytest.mark.parametrize("settings", [TEN_MESSAGES, TWO_HUNDRED_BYTES])
def test_more_than_the_whole_hand_over_gets_in_alone(settings: LogSettings) -> None:
    """append_many of more than fits at once is accepted as a whole, once nothing else waits."""
    with closing(Log.open(DIRECTORY, settings, files=FaultyFiles())) as log:
        log.append(payload(0))
        assert log.append_many(payloads(500, first=1)) == range(1, 501)
        assert log.append(payload(501), sync=True) == 501
        assert contents(log) == numbered(502)


def test_all_of_several_messages_are_accepted_or_none() -> None:
    """They have consecutive offsets, also while other threads append."""
    with closing(Log.open(DIRECTORY, LogSettings(append_queue_max_messages=50), files=FaultyFiles())) as log:
        given: list[tuple[range, list[bytes]]] = []

        def produce(name: int) -> None:
            for number in range(50):
                values = [b"%d/%d/%d" % (name, number, index) for index in range(number % 9 + 1)]
                given.append((log.append_many(values), values))

        with Threads() as threads:
            for name in range(4):
                threads.start(partial(produce, name))
        found = dict(contents(log))
        for offsets, values in given:
            assert [found[offset] for offset in offsets] == values
        assert sum(len(values) for _, values in given) == log.next_offset


def test_nothing_is_a_message_too() -> None:
    """append_many of nothing accepts nothing, and uses no offset."""
    with closing(Log.open(DIRECTORY, files=FaultyFiles())) as log:
        assert log.append_many([]) == range(0)
        log.append(payload(0))
        assert log.append_many([], sync=True) == range(1, 1)
        assert log.next_offset == 1


@pytest.mark.parametrize("bad", [b"", "text", bytearray(b"may change"), memoryview(b"may change"), 5, None])
def test_what_is_not_a_payload_is_refused_at_once(bad: object) -> None:
    """A wrong type or an empty payload raises where it is appended, and the log goes on."""
    with closing(Log.open(DIRECTORY, files=FaultyFiles())) as log:
        with pytest.raises((InputError, TypeError)):
            log.append(bad)  # type: ignore[arg-type]
        with pytest.raises((InputError, TypeError)):
            log.append_many([b"good", bad])  # type: ignore[list-item]
        assert log.append(payload(0), sync=True) == 0


def test_a_message_that_is_too_large_is_refused() -> None:
    """It names the limit and uses no offset; one of exactly the limit is accepted."""
    with closing(Log.open(DIRECTORY, LogSettings(max_message_bytes=100), files=FaultyFiles())) as log:
        with pytest.raises(MessageTooLargeError, match="101 bytes is over max_message_bytes"):
            log.append(b"x" * 101)
        with pytest.raises(MessageTooLargeError):
            log.append_many([b"good", b"x" * 101])
        assert log.append(b"x" * 100, sync=True) == 0


def test_closing_answers_those_who_wait_for_room() -> None:
    """An append that waits while the log is closed raises, and was not accepted."""
    with full_log() as (log, gate), Threads() as threads:
        errors: list[ClosedError] = []

        def append() -> None:
            with pytest.raises(ClosedError) as caught:
                log.append(payload(10))
            errors.append(caught.value)

        threads.start(append)
        wait_for_line(log, 1)
        threads.start(log.close)
        wait_until(lambda: len(errors) == 1, "the refusal")
        gate.open()
        wait_until(lambda: log.statistics().state == "closed", "closing")
        assert (log.next_offset, log.durable_offset) == (10, 10)


class TestTasks:
    """The same for tasks: they are suspended, and the loop goes on."""

    def test_a_task_waits_without_blocking_its_loop(self) -> None:
        """Other tasks run while one waits for room."""

        async def play(log: Log, gate: Gate) -> int:
            waiting = asyncio.create_task(log.append_async(payload(10)))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            gate.open()
            return await waiting

        with full_log() as (log, gate):
            assert asyncio.run(play(log, gate)) == 10
            assert contents(log) == numbered(11)

    def test_a_cancelled_wait_uses_no_offset(self) -> None:
        """A task that is cancelled while it waits for room leaves no trace, and those behind it go on."""

        async def play(log: Log, gate: Gate) -> int:
            waiting = asyncio.create_task(log.append_async(b"cancelled"))
            behind = asyncio.create_task(log.append_async(payload(10)))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert log.next_offset == 10
            gate.open()
            return await behind

        with full_log() as (log, gate):
            assert asyncio.run(play(log, gate)) == 10
            assert contents(log) == numbered(11)

    def test_a_timeout_uses_no_offset(self) -> None:
        """It raises BackpressureError, as for a thread."""

        async def play(log: Log) -> None:
            with pytest.raises(BackpressureError):
                await log.append_async(b"refused", timeout_seconds=0.01)
            with pytest.raises(BackpressureError):
                await log.append_many_async([b"refused"] * 2, timeout_seconds=0)

        with full_log() as (log, _):
            asyncio.run(play(log))
            assert log.next_offset == 10

    def test_closing_answers_a_task_that_waits(self) -> None:
        """It raises ClosedError."""

        async def play(log: Log, gate: Gate) -> None:
            waiting = asyncio.create_task(log.append_async(b"late"))
            await asyncio.sleep(0.02)
            closing_thread = threading.Thread(target=log.close)
            closing_thread.start()
            with pytest.raises(ClosedError):
                await waiting
            gate.open()
            await asyncio.to_thread(closing_thread.join)

        with full_log() as (log, gate):
            asyncio.run(play(log, gate))
            assert log.durable_offset == 10

    def test_many_tasks_are_served_by_few_syncs(self) -> None:
        """A thousand tasks that wait for their message share the syncs, and each gets an offset of its own."""
        files = FaultyFiles()

        async def play(log: Log) -> list[int]:
            return await asyncio.gather(*(log.append_async(payload(n), sync=True) for n in range(1000)))

        with closing(Log.open(DIRECTORY, LogSettings(fsync_interval_ms=3_600_000), files=files)) as log:
            assert sorted(asyncio.run(play(log))) == list(range(1000))
            assert log.durable_offset == 1000
            assert log.statistics().sync_seconds.count < 500

    def test_a_flush_of_a_task_makes_all_durable(self) -> None:
        """As for a thread."""

        async def play(log: Log) -> None:
            assert await log.append_many_async(payloads(50)) == range(50)
            await log.flush_async()

        with closing(Log.open(DIRECTORY, LogSettings(fsync_interval_ms=3_600_000), files=FaultyFiles())) as log:
            asyncio.run(play(log))
            assert log.durable_offset == 50


class _Interrupted(asyncio.Future[None]):
    """A waiter that is cancelled right after somebody asked whether it is done, as asyncio's handler of SIGINT may."""

    def done(self) -> bool:
        was_done = super().done()
        self.cancel()
        return was_done


def test_waiter_cancelled_by_a_signal_does_not_keep_others_waiting() -> None:
    """The loss: Ctrl-C in the middle of an answer was an exception in a callback, and the waiters after it hung."""

    async def main() -> None:
        interrupted: asyncio.Future[None] = _Interrupted()
        other = task_waiter()
        finish_all([interrupted, other])
        await asyncio.wait_for(other, 60)
        assert interrupted.cancelled()

    asyncio.run(main())
