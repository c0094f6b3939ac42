"""The onlooker: another process tails a log by its files, and sees whole messages only."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from tests.log.counting_files import CountingFiles
from tests.log.workbench import (
    DIRECTORY,
    Threads,
    contents,
    disk_with,
    everything,
    files_of,
    flip_bit,
    lines_of,
    numbered,
    payload,
    payloads,
    start_python,
    wait_until,
    wal_paths,
)

from tidelog.errors import CorruptionError, NotFoundError, OffsetOutOfRangeError
from tidelog.log import Log, LogSettings
from tidelog.log.binding import BoundFiles
from tidelog.log.frame import HEADER_BYTES, encode
from tidelog.log.view import LogView
from tidelog.testing import FaultyFiles

FRAME_BYTES = HEADER_BYTES + 20
FIRST = "wal.0000000000.log"
SECOND = "wal.0000000001.log"

OWNER = """
import sys
from pathlib import Path
from tidelog.log import Log, LogSettings
log = Log.open(Path(sys.argv[1]), LogSettings(rotate_max_bytes=4000))
for number in range(5000):
    log.append(f"{number}:".encode().ljust(20, b"-"))
    if number % 97 == 0:
        log.flush()
    if number == 100:
        print("begun", flush=True)
log.close()
"""


def test_another_process_is_followed_while_it_writes(tmp_path: Path) -> None:
    """Over many rotations: every message once, in order, and nothing that is not whole."""
    owner = start_python(OWNER, tmp_path)
    assert next(lines_of(owner)) == "begun"
    view = LogView(tmp_path)
    assert everything(view.read(0, 5000, follow=True)) == numbered(5000)
    owner.communicate(timeout=60)
    assert owner.returncode == 0
    assert len(wal_paths(tmp_path)) > 40
    assert view.next_offset == 5000


def write(files: FaultyFiles, name: str, data: bytes) -> None:
    """As an owner would, without one."""
    file = files.open(DIRECTORY / name, write=True) if name in files_of(files) else files.create(DIRECTORY / name)
    file.write_at(file.size(), data)
    file.close()


class TestTheEnd:
    """Where the owner is just writing."""

    @pytest.mark.parametrize("cut", range(1, FRAME_BYTES, 5))
    def test_an_unfinished_frame_is_not_there_yet(self, cut: int) -> None:
        """It is neither an error nor a message; it is one when it is whole."""
        frame = encode(2, payload(2))
        files = disk_with({FIRST: encode(0, payload(0)) + encode(1, payload(1)) + frame[:cut]})
        view = LogView(DIRECTORY, files=files)
        reader = view.read(follow=True)
        first = reader.next_batch()
        assert first is not None
        assert first.next_offset == 2
        assert reader.next_batch(timeout_seconds=0.01) is None
        write(files, FIRST, frame[cut:])
        second = reader.next_batch(timeout_seconds=60)
        assert second is not None
        assert second.payloads() == [payload(2)]

    def test_a_new_file_is_noticed(self) -> None:
        """Also while it is still empty, and with an unfinished first frame."""
        files = disk_with({FIRST: encode(0, payload(0))})
        view = LogView(DIRECTORY, files=files)
        frame = encode(1, payload(1))
        for data in (b"", frame[:5], frame[5:30]):
            write(files, SECOND, data)
            assert contents(view) == numbered(1)
        write(files, SECOND, frame[30:] + encode(2, payload(2)))
        assert contents(view) == numbered(3)

    def test_an_unfinished_frame_is_not_read_again_and_again(self, tmp_path: Path) -> None:
        """A view that waits behind what a dead owner left costs next to nothing."""
        with closing(Log.open(tmp_path)) as log:
            log.append_many(payloads(5000))
        with wal_paths(tmp_path)[0].open("ab") as file:
            file.write(encode(5000, payload(5000))[:-1])
        files = CountingFiles()
        view = LogView(tmp_path, files=BoundFiles(files))
        assert view.next_offset == 5000
        files.reset()
        for _ in range(50):
            assert view.next_offset == 5000
        assert files.read_bytes < 50 * 200  # headers and ids alone

    def test_a_file_whose_first_frame_comes_while_it_is_opened_is_not_damaged(self, tmp_path: Path) -> None:
        """Its header is written with the first frame: a view may look between the two."""
        with closing(Log.open(tmp_path, LogSettings(rotate_max_bytes=FRAME_BYTES))) as log:
            log.append_many(payloads(2), sync=True)
        second = tmp_path / SECOND
        written = second.read_bytes()
        second.write_bytes(b"")

        class Overtaken(CountingFiles):
            def _count(self, size: int) -> None:
                if size == 0:
                    second.write_bytes(written)

        view = LogView(tmp_path, files=BoundFiles(Overtaken()))
        assert contents(view) == numbered(view.next_offset)
        second.write_bytes(written)
        assert contents(view) == numbered(2)

    def test_only_growth_is_read(self, tmp_path: Path) -> None:
        """What was checked once is not checked again."""
        with closing(Log.open(tmp_path)) as log:
            log.append_many(payloads(20_000), sync=True)
            files = CountingFiles()
            view = LogView(tmp_path, files=BoundFiles(files))
            files.reset()
            for number in range(20_000, 20_050):
                log.append(payload(number), sync=True)
                assert view.next_offset == number + 1
            assert files.read_bytes < 2000 * FRAME_BYTES

    def test_a_log_without_a_message_is_waited_for(self, tmp_path: Path) -> None:
        """A view may be opened before anything was appended."""
        with closing(Log.open(tmp_path)) as log, Threads() as threads:
            view = LogView(tmp_path)
            assert contents(view) == []
            found: list[tuple[int, bytes]] = []
            threads.start(lambda: found.extend(everything(view.read(0, 3, follow=True))))
            log.append_many(payloads(3))
        assert found == numbered(3)


class TestReading:
    """What a view offers."""

    def test_it_changes_nothing(self) -> None:
        """Neither files nor the lock: an owner may open the log at the same time."""
        torn = {FIRST: encode(0, payload(0)) + b"torn"}
        files = disk_with(torn)
        view = LogView(DIRECTORY, files=files)
        assert contents(view) == numbered(1)
        assert files.tree() == disk_with(torn).tree()
        with closing(Log.open(DIRECTORY, files=files)) as log:
            log.append(payload(1), sync=True)
            assert contents(view) == numbered(2)

    def test_it_sees_what_is_written_and_not_yet_synced(self) -> None:
        """As soon as it is in the file."""
        files = FaultyFiles()
        with closing(Log.open(DIRECTORY, LogSettings(fsync_interval_ms=3_600_000), files=files)) as log:
            log.append_many(payloads(10))
            view = LogView(DIRECTORY, files=files)
            wait_until(lambda: view.next_offset == 10, "the write")
            assert log.durable_offset == 0
            assert contents(view) == numbered(10)

    def test_closing_ends_its_readers(self, tmp_path: Path) -> None:
        """Those that follow get the rest and stop."""
        Log.open(tmp_path).close()
        view = LogView(tmp_path)
        with Threads() as threads:
            threads.start(lambda: everything(view.read(follow=True)))
            view.close()

    def test_tasks_can_follow(self, tmp_path: Path) -> None:
        """As with an owner's log."""

        async def play(log: Log, view: LogView) -> list[tuple[int, bytes]]:
            found: list[tuple[int, bytes]] = []
            reader = view.read(0, 20, follow=True)
            await log.append_many_async(payloads(10))
            async for batch in reader:
                found += enumerate(batch.payloads(), batch.first_offset)
                if len(found) == 10:
                    await log.append_many_async(payloads(10, first=10))
            return found

        with closing(Log.open(tmp_path)) as log:
            assert asyncio.run(asyncio.wait_for(play(log, LogView(tmp_path)), 60)) == numbered(20)

    def test_a_directory_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        """It is not made."""
        with pytest.raises(NotFoundError, match="nowhere"):
            LogView(tmp_path / "nowhere")
        assert not (tmp_path / "nowhere").exists()

    def test_damage_is_named(self, tmp_path: Path) -> None:
        """At opening, and when it comes into sight later."""
        with closing(Log.open(tmp_path, LogSettings(rotate_max_bytes=10 * FRAME_BYTES))) as log:
            log.append_many(payloads(30))
        view = LogView(tmp_path)
        flip_bit(wal_paths(tmp_path)[1], 2 * FRAME_BYTES + HEADER_BYTES)
        with pytest.raises(CorruptionError, match=f"byte {2 * FRAME_BYTES} of .*{SECOND}"):
            contents(view)
        assert everything(view.read(20)) == numbered(10, first=20)
        with pytest.raises(CorruptionError, match=f"byte {2 * FRAME_BYTES} of .*{SECOND}"):
            LogView(tmp_path)

    def test_a_start_that_moves_is_noticed(self, tmp_path: Path) -> None:
        """When the owner removes its oldest file, reads from there say so and others go on."""
        with closing(Log.open(tmp_path, LogSettings(rotate_max_bytes=10 * FRAME_BYTES))) as log:
            log.append_many(payloads(25))
        view = LogView(tmp_path)
        wal_paths(tmp_path)[0].unlink()
        assert view.next_offset == 25
        assert view.start_offset == 10
        with pytest.raises(OffsetOutOfRangeError):
            view.read(9)
        assert contents(view) == numbered(15, first=10)

    def test_a_log_that_is_removed_is_reported(self, tmp_path: Path) -> None:
        """By an error of ours, not by that of the operating system."""
        directory = tmp_path / "log"
        with closing(Log.open(directory)) as log:
            log.append(payload(0))
        view = LogView(directory)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        with pytest.raises(NotFoundError, match="removed"):
            view.read()
