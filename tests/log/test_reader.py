"""Readers: independent, exact, never in the way of appends, and close to the right byte at once."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from tests.log.counting_files import CountingFiles
from tests.log.workbench import (
    DIRECTORY,
    Threads,
    contents,
    everything,
    numbered,
    open_below,
    payload,
    payloads,
    wait_until,
    wal_paths,
)

from tidelog.clock import to_datetime, to_microseconds
from tidelog.errors import InputError, OffsetOutOfRangeError
from tidelog.log import Log, LogSettings
from tidelog.log.settings import KIB, MIB
from tidelog.testing import FaultyFiles

TIME_FIELD = 4
FROM_FILES = LogSettings(cache_max_messages=0)


class TestPositions:
    """Where a reader starts and stops."""

    @pytest.mark.parametrize("settings", [LogSettings(), FROM_FILES, LogSettings(rotate_max_bytes=100)])
    def test_every_range_is_exact(self, tmp_path: Path, settings: LogSettings) -> None:
        """From any offset to any other, from memory and from files."""
        with closing(Log.open(tmp_path, settings)) as log:
            log.append_many(payloads(30))
            log.flush()
            for start in range(31):
                for stop in range(0, 34, 3):
                    assert everything(log.read(start, stop)) == numbered(30)[start:stop]

    def test_the_end_is_settled_by_the_call(self) -> None:
        """Without follow, a reader ends at the offset that was next when it was made, whatever comes afterwards."""
        with closing(Log.open(DIRECTORY, files=FaultyFiles())) as log:
            log.append_many(payloads(5))
            reader = log.read()
            beyond = log.read(0, 100)
            latest = log.read("latest")
            log.append_many(payloads(5, first=5))
            assert everything(reader) == numbered(5)
            assert everything(beyond) == numbered(5)
            assert everything(latest) == []

    def test_a_stop_may_lie_ahead(self) -> None:
        """With follow, a reader waits for its stop and ends there, not later."""
        with closing(Log.open(DIRECTORY, files=FaultyFiles())) as log:
            log.append_many(payloads(3))
            reader = log.read(1, 6, follow=True)
            with Threads() as threads:
                found: list[tuple[int, bytes]] = []
                threads.start(lambda: found.extend(everything(reader)))
                for number in range(3, 10):
                    log.append(payload(number))
            assert found == numbered(5, first=1)

    @pytest.mark.parametrize("start", [-1, 4, 1 << 64])
    def test_a_start_outside_the_log_is_refused(self, start: int) -> None:
        """It names what the log holds; the offset that comes next is inside."""
        with closing(Log.open(DIRECTORY, files=FaultyFiles())) as log:
            log.append_many(payloads(3))
            assert everything(log.read(3)) == []
            with pytest.raises(OffsetOutOfRangeError):
                log.read(start)

    @pytest.mark.parametrize("start", ["newest", 1.0, True, None, b"0"])
    def test_a_start_of_the_wrong_kind_is_named(self, start: object) -> None:
        """The error says what a position may be."""
        with closing(Log.open(DIRECTORY, files=FaultyFiles())) as log:
            with pytest.raises(InputError, match='"earliest", "latest" or a datetime'):
                log.read(start)  # type: ignore[arg-type]
            with pytest.raises(InputError, match="stores no timestamps"):
                log.read(datetime.now(UTC))


class TestManyReaders:
    """Readers do not know of each other, nor does the writer wait for them."""

    def test_each_gets_everything_from_its_start(self, tmp_path: Path) -> None:
        """Twelve that follow from different offsets, while messages are appended and files are rotated."""
        settings = LogSettings(rotate_max_bytes=3000, cache_max_messages=50)
        found: dict[int, list[tuple[int, bytes]]] = {}
        with closing(Log.open(tmp_path, settings)) as log, Threads() as threads:
            log.append_many(payloads(300))

            def collect(start: int) -> None:
                found[start] = everything(log.read(start, 1500, follow=True))

            for start in range(0, 300, 25):
                threads.start(partial(collect, start))
            for first in range(300, 1500, 7):
                log.append_many(payloads(min(7, 1500 - first), first=first))
        assert sorted(found) == list(range(0, 300, 25))
        for start, messages in found.items():
            assert messages == numbered(1500 - start, first=start)

    def test_a_slow_reader_holds_up_nobody_and_costs_no_memory(self, tmp_path: Path) -> None:
        """It lags by twenty times the memory that the settings allow, and still gets every message."""
        settings = LogSettings(
            cache_max_bytes=MIB, append_queue_max_bytes=MIB, read_chunk_bytes=64 * KIB, rotate_max_bytes=4 * MIB
        )
        with closing(Log.open(tmp_path, settings)) as log:
            log.append(payload(0, KIB))
            reader = log.read(0, follow=True)
            first = reader.next_batch()
            assert first is not None
            tracemalloc.start()
            try:
                for number in range(1, 20_001, 50):
                    log.append_many(payloads(50, KIB, number))
                _, peak_bytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            statistics = log.statistics()
            assert statistics.cached_bytes <= MIB
            assert statistics.queued_bytes <= MIB
            assert peak_bytes < 10 * MIB
            for number in range(1, 20_001):
                if number == reader.offset:
                    batch = reader.next_batch()
                    assert batch is not None
                    assert batch.payloads() == payloads(batch.next_offset - number, KIB, number)
            reader.close()

    def test_a_reader_keeps_up_with_eviction(self) -> None:
        """A cache of one message, and a reader that is between memory and file all the time."""
        settings = LogSettings(cache_max_messages=1, rotate_max_bytes=500)
        with closing(Log.open(DIRECTORY, settings, files=FaultyFiles())) as log, Threads() as threads:
            found: list[tuple[int, bytes]] = []
            threads.start(lambda: found.extend(everything(log.read(0, 3000, follow=True))))
            for number in range(3000):
                log.append(payload(number))
        assert found == numbered(3000)


class TestFollowing:
    """At the end of the log."""

    def test_it_ends_when_the_log_is_closed(self) -> None:
        """A reader that waits gets what was accepted before, and then ends."""
        log = Log.open(DIRECTORY, files=FaultyFiles())
        with Threads() as threads:
            found: list[tuple[int, bytes]] = []
            threads.start(lambda: found.extend(everything(log.read(follow=True))))
            log.append_many(payloads(10))
            log.close()
        assert found == numbered(10)

    def test_it_can_wait_for_a_while(self) -> None:
        """With a timeout, a reader gives up and may be asked again."""
        with closing(Log.open(DIRECTORY, files=FaultyFiles())) as log:
            reader = log.read(follow=True)
            assert reader.next_batch(timeout_seconds=0) is None
            assert reader.next_batch(timeout_seconds=0.01) is None
            log.append(payload(0))
            batch = reader.next_batch(timeout_seconds=60)
            assert batch is not None
            assert batch.payloads() == [payload(0)]

    def test_messages_are_seen_before_they_are_in_a_file(self) -> None:
        """Delivery does not wait for the disk."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, files=files)) as log:
            for number in range(100):
                log.append(payload(number))
                assert everything(log.read(number)) == [(number, payload(number))]

    def test_tasks_follow_without_blocking_their_loop(self) -> None:
        """Several tasks read the same log, from files and live, while others append."""

        async def collect(log: Log, start: int) -> list[tuple[int, bytes]]:
            found: list[tuple[int, bytes]] = []
            async for batch in log.read(start, 500, follow=True):
                found += enumerate(batch.payloads(), batch.first_offset)
            return found

        async def play(log: Log) -> None:
            readers = [asyncio.create_task(collect(log, start)) for start in (0, 50, 100)]
            for number in range(100, 500):
                await log.append_async(payload(number))
                if number % 50 == 0:
                    await asyncio.sleep(0)
            for start, reader in zip((0, 50, 100), readers, strict=True):
                assert await asyncio.wait_for(reader, 60) == numbered(500 - start, first=start)

        with closing(Log.open(DIRECTORY, FROM_FILES, files=FaultyFiles())) as log:
            log.append_many(payloads(100), sync=True)
            asyncio.run(play(log))

    def test_a_task_that_follows_ends_at_close_and_can_be_cancelled(self) -> None:
        """Neither keeps anybody waiting."""

        async def play(log: Log) -> None:
            cancelled = asyncio.create_task(log.read(follow=True).next_batch_async())
            ended = asyncio.create_task(log.read(follow=True).next_batch_async())
            await asyncio.sleep(0.01)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await asyncio.to_thread(log.close)
            assert await asyncio.wait_for(ended, 60) is None

        asyncio.run(play(Log.open(DIRECTORY, files=FaultyFiles())))


class TestJumps:
    """The right file at once, and close to the right byte in it."""

    def test_one_message_costs_few_bytes(self, tmp_path: Path) -> None:
        """Anywhere in a file of several megabytes, after writing it and after opening it again."""
        files = CountingFiles()
        settings = LogSettings(cache_max_messages=0, read_chunk_bytes=64 * KIB)
        for _ in range(2):
            with closing(Log.open(tmp_path, settings, files=files)) as log:
                if not log.next_offset:
                    log.append_many(payloads(40_000, 100))
                    log.flush()
                for offset in (0, 1, 20_000, 39_000, 39_999):
                    files.reset()
                    assert everything(log.read(offset, offset + 1)) == [(offset, payload(offset, 100))]
                    assert files.read_bytes <= 192 * KIB

    def test_a_file_is_indexed_by_the_first_who_reads_it(self, tmp_path: Path) -> None:
        """Where opening trusted the checkpoint, the first reader walks to its place, and the next one jumps."""
        files = CountingFiles()
        with closing(Log.open(tmp_path, files=files)) as log:
            log.append_many(payloads(40_000, 100))
        settings = LogSettings(cache_max_messages=0, read_chunk_bytes=64 * KIB, open_check_bytes=0)
        with closing(Log.open(tmp_path, settings, files=files)) as log:
            assert everything(log.read(39_000, 39_001)) == [(39_000, payload(39_000, 100))]
            files.reset()
            assert everything(log.read(38_000, 38_001)) == [(38_000, payload(38_000, 100))]
            assert files.read_bytes <= 192 * KIB

    def test_only_the_files_of_the_range_are_opened(self, tmp_path: Path) -> None:
        """Reading the end of a long log does not begin at its oldest file."""
        files = CountingFiles()
        settings = LogSettings(cache_max_messages=0, rotate_max_bytes=10 * 36)
        with closing(Log.open(tmp_path, settings, files=files)) as log:
            log.append_many(payloads(200))
            log.flush()
            files.reset()
            assert everything(log.read(95, 105)) == numbered(10, first=95)
            assert files.opened == ["wal.0000000009.log", "wal.0000000010.log"]

    def test_what_is_in_memory_costs_no_reading(self, tmp_path: Path) -> None:
        """A reader at the tail does not touch the disk."""
        files = CountingFiles()
        with closing(Log.open(tmp_path, files=files)) as log:
            log.append_many(payloads(1000))
            log.flush()
            files.reset()
            assert contents(log) == numbered(1000)
            assert (files.read_bytes, files.opened) == (0, [])

    def test_a_reader_goes_on_where_it_is(self, tmp_path: Path) -> None:
        """A walk through a whole log reads each byte about once."""
        files = CountingFiles()
        settings = LogSettings(cache_max_messages=0, read_chunk_bytes=64 * KIB, rotate_max_bytes=MIB)
        with closing(Log.open(tmp_path, settings, files=files)) as log:
            log.append_many(payloads(40_000, 100))
            log.flush()
            files.reset()
            assert len(contents(log)) == 40_000
            total = sum(path.stat().st_size for path in wal_paths(tmp_path))
            assert total <= files.read_bytes <= 1.2 * total


def timed(number: int, moment: datetime) -> bytes:
    """A payload with its time at byte 4."""
    return struct.pack("<Iq", number, to_microseconds(moment)) + b"-" * 20


class TestTimes:
    """Starting at a moment."""

    def first_at(self, log: Log, moment: datetime) -> int | None:
        found = everything(log.read(moment))
        return found[0][0] if found else None

    @pytest.mark.parametrize("settings", [LogSettings(), LogSettings(rotate_max_bytes=500, cache_max_messages=0)])
    def test_the_first_message_of_that_time_or_later(self, tmp_path: Path, settings: LogSettings) -> None:
        """Between two messages it is the later one; before the first all, after the last none."""
        begin = datetime(2024, 5, 1, tzinfo=UTC)
        moments = [begin + timedelta(seconds=10 * number) for number in range(200)]
        for reopened in (False, True):
            with closing(Log.open(tmp_path, settings, time_field=TIME_FIELD)) as log:
                if not reopened:
                    log.append_many([timed(number, moment) for number, moment in enumerate(moments)])
                for number in (0, 1, 57, 199):
                    assert self.first_at(log, moments[number]) == number
                    assert self.first_at(log, moments[number] - timedelta(seconds=1)) == number
                assert self.first_at(log, moments[57] + timedelta(microseconds=1)) == 58
                assert self.first_at(log, moments[-1] + timedelta(microseconds=1)) is None
                assert self.first_at(log, datetime(1970, 1, 1, tzinfo=UTC)) == 0
                assert everything(log.read(moments[3], moments[5])) == everything(log.read(3, 5))

    def test_times_need_not_be_in_order(self, tmp_path: Path) -> None:
        """The first one in order of offsets counts, wherever later times lie."""
        seconds = [50, 10, 40, 90, 20, 30, 80, 60, 70, 100] * 20
        with closing(Log.open(tmp_path, LogSettings(rotate_max_bytes=300), time_field=TIME_FIELD)) as log:
            log.append_many([timed(n, to_datetime(s * 1_000_000)) for n, s in enumerate(seconds)])
            log.flush()
            for wanted in range(0, 120, 5):
                expected = next((n for n, s in enumerate(seconds) if s >= wanted), None)
                assert self.first_at(log, to_datetime(wanted * 1_000_000)) == expected

    def test_old_files_are_passed_over(self, tmp_path: Path) -> None:
        """Files whose times are all too early are not read."""
        files = CountingFiles()
        settings = LogSettings(rotate_max_bytes=10 * 48, cache_max_messages=0)
        with closing(Log.open(tmp_path, settings, files=files, time_field=TIME_FIELD)) as log:
            log.append_many([timed(number, to_datetime(number * 1_000_000)) for number in range(300)])
            log.flush()
            files.reset()
            assert self.first_at(log, to_datetime(295_000_000)) == 295
            assert set(files.opened) == {"wal.0000000029.log"}

    def test_a_message_without_a_time_is_passed_over(self, tmp_path: Path) -> None:
        """A payload that is too short to hold one, such as a mark of a lost message, is never the first."""
        with closing(Log.open(tmp_path, time_field=TIME_FIELD)) as log:
            log.append_many([b"\x00", timed(1, to_datetime(5)), b"\x00", timed(3, to_datetime(9))])
            log.flush()
            assert self.first_at(log, to_datetime(0)) == 1
            assert self.first_at(log, to_datetime(6)) == 3


def test_a_file_removed_under_a_reader_is_reported(tmp_path: Path) -> None:
    """It raises that the offset is gone, and does not go on behind a hole."""
    with closing(Log.open(tmp_path, LogSettings(rotate_max_bytes=360, cache_max_messages=0))) as log:
        log.append_many(payloads(30))
        log.flush()
        reader = log.read(0)
        assert reader.next_batch() is not None
        wal_paths(tmp_path)[1].unlink()
        with pytest.raises(OffsetOutOfRangeError, match="offset 10 is gone"):
            everything(reader)


def test_readers_let_go_of_their_files(tmp_path: Path) -> None:
    """A reader that was read to its end, or left in the middle, keeps no file open."""
    files = CountingFiles()
    with closing(Log.open(tmp_path, LogSettings(rotate_max_bytes=360, cache_max_messages=0), files=files)) as log:
        log.append_many(payloads(30))
        log.flush()
        before = len(open_below(tmp_path))
        for _ in range(5):
            assert everything(log.read()) == numbered(30)
            for _batch in log.read():
                break
        wait_until(lambda: len(open_below(tmp_path)) == before, "the files to be closed")
