"""The engine's log: what it promises about LSNs, positions, durability, and reading both ways."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.log.counting_files import CountingFiles
from tests.log.workbench import Threads, calls_of, wait_until

from tidelog.engine.settings import EngineSettings
from tidelog.engine.wal import files as wal_files
from tidelog.engine.wal import wal as wal_reading
from tidelog.engine.wal.records import encode_checkpoint_begin
from tidelog.engine.wal.wal import FIRST, Anchor, Wal
from tidelog.errors import (
    BackpressureError,
    ClosedError,
    CorruptionError,
    DataError,
    DiskFullError,
    InputError,
    InternalError,
    LogFailedError,
    OffsetOutOfRangeError,
)
from tidelog.files import Files
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.frame import HEADER_BYTES, encode
from tidelog.testing import FaultyFiles

DIRECTORY = Path("/engine/wal")
WAL_FILES = "wal.*.log"
SMALL = EngineSettings(rotate_max_bytes=4096)


def payload(number: int, size: int = 100) -> bytes:
    return f"{number}:".encode().ljust(size, b"-")


@contextmanager
def opened(
    files: Files, settings: EngineSettings = SMALL, anchor: Anchor = FIRST, directory: Path = DIRECTORY
) -> Iterator[Wal]:
    with closing(Wal.open(directory, settings, files=files, anchor=anchor)) as wal:
        yield wal


def filled(wal: Wal, count: int, size: int = 100) -> list[tuple[int, bytes]]:
    """So many committed records: their positions and payloads."""
    placed = []
    for _ in range(count):
        placed.append((wal.next_position, payload(wal.next_lsn, size)))
        assert wal.add(placed[-1][1]) == wal.next_lsn - 1
    wal.commit()
    return placed


def is_durable(wal: Wal, lsn: int) -> bool:
    """Whether a record is on the disk; not while that is full."""
    try:
        wal.wait_durable(lsn)
    except DiskFullError:
        return False
    return True


def everything(wal: Wal, first_lsn: int = 1, stop_lsn: int | None = None) -> list[tuple[int, bytes]]:
    return [
        found
        for frames in wal.batches(first_lsn, stop_lsn)
        for found in enumerate(frames.payloads(), frames.first_offset)
    ]


class TestAdding:
    """LSNs and positions are known beforehand."""

    def test_lsns_begin_at_one_and_positions_at_zero(self) -> None:
        """0 is free to mean "none"."""
        with opened(FaultyFiles()) as wal:
            assert (wal.next_lsn, wal.next_position, wal.durable_lsn) == (1, 0, 0)
            assert wal.add(b"abc") == 1
            assert (wal.next_lsn, wal.next_position) == (2, HEADER_BYTES + 3)
            assert wal.commit() == wal.durable_lsn == 1

    @settings(max_examples=examples(25), deadline=None)
    @given(st.lists(st.lists(st.integers(1, 3000), max_size=8), min_size=1, max_size=8))
    def test_positions_are_those_of_the_bytes(self, groups: list[list[int]]) -> None:
        """Put together, the files are the frames in order, and each frame is where it was said to be."""
        files = FaultyFiles()
        with opened(files) as wal:
            placed = [place for sizes in groups for place in filled_with(wal, sizes)]
            wal.commit()
            data = b"".join(files.read(span.path)[BINDING_BYTES:] for span in wal.spans())
            for lsn, (position, content) in enumerate(placed, 1):
                assert data[position:].startswith(encode(lsn, content))
                assert wal.position_of(lsn) == position
            assert wal.next_position == len(data) == wal.position_of(wal.next_lsn)

    def test_nothing_is_written_before_a_commit(self) -> None:
        """Records of an entry that is not complete need not go to the disk."""
        files = FaultyFiles()
        with opened(files) as wal:
            wal.add(b"abc")
            assert wal.statistics().pending_bytes == HEADER_BYTES + 3
            assert calls_of(files, "write_at") == []

    def test_much_is_handed_over_before_the_commit(self) -> None:
        """The disk works while the engine does, and memory stays bounded."""
        with opened(FaultyFiles(), EngineSettings()) as wal:
            for number in range(5):
                wal.add(payload(number, 1 << 20))
            assert wal.statistics().pending_bytes < 4 << 20
            assert wal.log.next_offset > 1

    def test_a_record_that_fits_into_no_frame_is_refused(self) -> None:
        """It takes neither LSN nor position."""

        class Large(bytes):
            def __len__(self) -> int:
                return 1 << 30

        with opened(FaultyFiles()) as wal:
            with pytest.raises(InputError, match="does not fit"):
                wal.add(Large(b"x"))
            assert (wal.next_lsn, wal.next_position) == (1, 0)

    def test_an_empty_commit_costs_nothing(self) -> None:
        """There is nothing to wait for."""
        files = FaultyFiles()
        with opened(files) as wal:
            filled(wal, 1)
            before = len(files.calls)
            assert wal.commit() == 1
            assert len(files.calls) == before


def filled_with(wal: Wal, sizes: list[int]) -> list[tuple[int, bytes]]:
    return [
        place for size in sizes for place in [(wal.next_position, payload(wal.next_lsn, size))] if wal.add(place[1])
    ]


class TestDurability:
    """What a commit waits for."""

    @pytest.mark.parametrize("mode", ["fsync", "fdatasync"])
    def test_what_was_committed_survives_a_power_failure(self, mode: str) -> None:
        """Both ways to sync keep the promise."""
        files = FaultyFiles()
        settings = EngineSettings(wal_sync_mode=mode)  # type: ignore[arg-type]
        with opened(files, settings) as wal:
            placed = filled(wal, 10)
            wal.add(b"not committed")
            with opened(files.after_crash("lose")) as found:
                assert [content for _, content in everything(found)] == [content for _, content in placed]

    def test_without_syncs_a_commit_means_written(self) -> None:
        """A killed process loses nothing then, and no file is synced."""
        files = FaultyFiles()
        with opened(files, EngineSettings(wal_sync_mode="none")) as wal:
            placed = filled(wal, 10)
            assert wal.durable_lsn == 10
            assert not any(call.operation == "sync" for call in files.calls)
            with opened(files.after_crash("keep")) as found:
                assert [content for _, content in everything(found)] == [content for _, content in placed]

    @pytest.mark.parametrize("mode", ["fsync", "fdatasync", "none"])
    def test_each_mode_makes_its_own_system_call(
        self, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a real disk the mode decides what is called for the contents of the log."""
        called: list[str] = []

        def note(name: str) -> Callable[[int], None]:
            return lambda descriptor: called.append(name)

        settings = EngineSettings(wal_sync_mode=mode)  # type: ignore[arg-type]
        with closing(Wal.open(tmp_path, settings)) as wal:
            filled(wal, 1)
            filled(wal, 1)  # a new file has been noted by then
            for name in ("fsync", "fdatasync"):
                monkeypatch.setattr(f"os.{name}", note(name))
            filled(wal, 1)
            monkeypatch.undo()
        assert set(called) == ({mode} - {"none"})

    def test_whoever_needs_a_record_on_the_disk_brings_it_there(self) -> None:
        """A page may be written before the entry is complete, if its records are durable first."""
        files = FaultyFiles()
        with opened(files) as wal:
            wal.add(b"abc")
            wal.wait_durable(1)
            assert wal.durable_lsn == 1
            wal.wait_durable(0)
            with pytest.raises(InternalError, match="LSN 2 is waited for"):
                wal.wait_durable(2)
            with opened(files.after_crash("lose")) as found:
                assert everything(found) == [(1, b"abc")]


class TestDiscarding:
    """What was added can be taken back until it is handed over."""

    def test_what_was_not_handed_over_is_gone(self) -> None:
        """LSNs and positions go back, and the next record gets them."""
        with opened(FaultyFiles()) as wal:
            filled(wal, 2)
            before = wal.next_lsn, wal.next_position
            wal.add(b"abc")
            wal.add(b"def")
            assert wal.discard() is False
            assert (wal.next_lsn, wal.next_position) == before
            assert wal.add(b"ghi") == 3
            wal.commit()
            assert everything(wal, 3) == [(3, b"ghi")]

    def test_what_was_handed_over_is_said(self) -> None:
        """It is in the log for good, and the engine must know."""
        with opened(FaultyFiles()) as wal:
            wal.add(b"abc")
            wal.wait_durable(1)
            wal.add(b"def")
            assert wal.discard() is True
            assert wal.next_lsn == 2
            wal.commit()
            assert everything(wal) == [(1, b"abc")]
            assert wal.discard() is False

    def test_what_is_complete_is_not_missed(self) -> None:
        """Records that were handed over as complete need no commit: to discard later ones does not touch them."""
        with opened(FaultyFiles()) as wal:
            wal.add(b"abc")
            wal.hand_over()
            wal.add(b"def")
            assert wal.discard() is False
            wal.commit()
            assert everything(wal) == [(1, b"abc")]

    def test_a_full_hand_over_leaves_everything_as_it_was(self) -> None:
        """The same commit succeeds when there is room."""
        with opened(FaultyFiles()) as wal:
            wal.add(b"abc")
            wal.log.refuse_appends(lambda: BackpressureError("full"))
            with pytest.raises(BackpressureError):
                wal.hand_over()
            assert wal.next_lsn == 2
            wal.log.refuse_appends(None)
            assert wal.commit() == 1

    def test_a_full_disk_is_told_and_goes_on_by_itself(self) -> None:
        """What was handed over is written when there is room, and waiting again tells so."""
        files = FaultyFiles(capacity_bytes=6000)
        with opened(files, EngineSettings()) as wal:
            filled(wal, 1)
            wal.add(payload(2, 10_000))
            with pytest.raises(DiskFullError):
                wal.commit()
            assert wal.discard() is True
            files.capacity_bytes = 1 << 20
            wait_until(lambda: is_durable(wal, 2), "room")
            assert wal.commit() == 2

    def test_a_failed_sync_ends_it(self) -> None:
        """The engine must be opened again."""
        files = FaultyFiles()
        wal = Wal.open(DIRECTORY, SMALL, files=files)
        filled(wal, 1)
        files.fail("sync", error=errno.EIO, matching=WAL_FILES)
        wal.add(b"abc")
        with pytest.raises(LogFailedError):
            wal.commit()
        with pytest.raises(LogFailedError):
            wal.close()


class TestReadingByPosition:
    """The way to the value of an object."""

    def test_every_byte_is_found_across_files(self) -> None:
        """In old files, in the newest one, and in one that did not exist at the last look."""
        with opened(FaultyFiles()) as wal:
            placed = []
            for _ in range(10):
                placed += filled(wal, 10, 200)
                for position, content in placed:
                    assert wal.read_stored(position + HEADER_BYTES, len(content)) == content
            assert len(wal.spans()) > 4

    def test_what_is_still_in_memory_is_found_too(self) -> None:
        """A reader that comes before the commit brings it to the disk."""
        with opened(FaultyFiles()) as wal:
            wal.add(b"abc")
            assert wal.read_stored(HEADER_BYTES, 3) == b"abc"

    def test_what_left_the_disk_is_none(self) -> None:
        """Below the first file the answer is to look elsewhere."""
        with opened(FaultyFiles()) as wal:
            placed = filled(wal, 100)
            second = wal.spans()[1]
            freed = wal.remove_below(second.next_lsn)
            assert freed == second.next_position
            assert wal.first_lsn == second.next_lsn
            assert wal.first_position == second.next_position
            for position, content in placed:
                found = wal.read_stored(position + HEADER_BYTES, len(content))
                assert found == (content if position >= second.next_position else None)

    def test_a_file_that_goes_under_a_reader_is_none(self) -> None:
        """Who looked at the files before the removal does not stumble over it."""
        with opened(FaultyFiles()) as wal:
            filled(wal, 100)
            wal.log.remove_below(wal.spans()[1].next_lsn)
            assert wal.read_stored(HEADER_BYTES, 10) is None

    def test_a_file_that_ends_early_is_named(self) -> None:
        """Bytes that were committed and are not there are damage."""
        files = FaultyFiles()
        with opened(files) as wal:
            ((position, content),) = filled(wal, 1)
            handle = files.open(wal.spans()[0].path, write=True)
            handle.truncate(BINDING_BYTES + 50)
            with pytest.raises(CorruptionError, match="at byte 50") as caught:
                wal.read_stored(position + HEADER_BYTES, len(content))
            assert caught.value.path == wal.spans()[0].path

    def test_a_failed_log_is_still_read(self) -> None:
        """What was committed before the disk failed is there, in files too that nobody has looked at yet."""
        files = FaultyFiles()
        wal = Wal.open(DIRECTORY, SMALL, files=files)
        placed = filled(wal, 100)
        files.fail("sync", error=errno.EIO, matching=WAL_FILES)
        wal.add(b"abc")
        with pytest.raises(LogFailedError):
            wal.commit()
        for position, content in placed:
            assert wal.read_stored(position + HEADER_BYTES, len(content)) == content
        with pytest.raises(LogFailedError):
            wal.close()

    def test_a_closed_log_opens_no_files(self, tmp_path: Path) -> None:
        """Whoever reads too late is told, and no file stays open."""
        wal = Wal.open(tmp_path, SMALL)
        ((position, content),) = filled(wal, 1)
        assert wal.read_stored(position + HEADER_BYTES, 100) == content
        wal.close()
        with pytest.raises(ClosedError):
            wal.read_stored(position + HEADER_BYTES, 100)

    def test_behind_the_end_is_a_mistake(self) -> None:
        """No pointer goes there."""
        with opened(FaultyFiles()) as wal:
            filled(wal, 1)
            with pytest.raises(InternalError, match="after the end"):
                wal.read_stored(wal.next_position - 1, 2)

    def test_only_so_many_files_are_open(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Old files are closed and opened again when they are read."""
        monkeypatch.setattr(wal_files, "_MAX_OPEN_FILES", 3)
        with closing(Wal.open(tmp_path, SMALL)) as wal:
            placed = filled(wal, 300)
            for position, content in placed + placed[::-1]:
                assert wal.read_stored(position + HEADER_BYTES, len(content)) == content
            assert len(wal.spans()) > 6
            descriptors = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
            assert sum(path.parent == tmp_path.resolve() and path.suffix == ".log" for path in descriptors) <= 4

    def test_readers_and_rotation_at_the_same_time(self, tmp_path: Path) -> None:
        """Threads that read what was committed always get it, or hear that it has left."""
        with closing(Wal.open(tmp_path, SMALL)) as wal:
            placed: list[tuple[int, bytes]] = filled(wal, 1)
            finished = threading.Event()

            def read() -> None:
                while not finished.is_set():
                    for position, content in placed[-200:]:
                        found = wal.read_stored(position + HEADER_BYTES, len(content))
                        assert found == content or (found is None and position < wal.first_position)

            with Threads() as threads:
                for _ in range(3):
                    threads.start(read)
                for _ in range(100):
                    placed.extend(filled(wal, 5))
                    wal.remove_below(wal.next_lsn - 150)
                finished.set()


class TestReadingRecords:
    """For recovery and undo."""

    def test_forwards_from_anywhere_to_anywhere(self) -> None:
        """Every range is handed out exactly."""
        with opened(FaultyFiles()) as wal:
            contents = [content for _, content in filled(wal, 120)]
            for first, stop in [(1, 121), (1, 2), (40, 90), (120, 121), (60, 60)]:
                assert everything(wal, first, stop) == list(enumerate(contents[first - 1 : stop - 1], first))

    def test_backwards_from_anywhere_to_anywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Newest first, across files and small chunks, after opening without an index too."""
        monkeypatch.setattr(wal_reading, "_BACKWARD_CHUNK_BYTES", 700)
        files = FaultyFiles()
        with opened(files) as wal:
            contents = [content for _, content in filled(wal, 120)]
        with opened(files) as again:
            for last, first in [(120, 1), (1, 1), (90, 40), (120, 120)]:
                expected = list(enumerate(contents[first - 1 : last], first))[::-1]
                assert list(again.backwards(last, first)) == expected
            filled(again, 30)
            assert [lsn for lsn, _ in again.backwards(150, 1)] == list(range(150, 0, -1))

    def test_backwards_takes_little_memory(self, tmp_path: Path) -> None:
        """The way back over a long log reads each piece about once, and holds one at a time."""
        files = CountingFiles()
        with closing(Wal.open(tmp_path, EngineSettings(), files=files)) as wal:
            filled(wal, 4000, 1000)
            before = files.read_bytes
            assert sum(1 for _ in wal.backwards(4000, 1)) == 4000
            assert files.read_bytes - before < 3 * wal.next_position

    def test_large_records_are_read_both_ways(self) -> None:
        """A record may be larger than any chunk."""
        with opened(FaultyFiles(), EngineSettings()) as wal:
            sizes = [10, 300_000, 20, 5_000_000, 30]
            contents = [payload(number, size) for number, size in enumerate(sizes)]
            for content in contents:
                wal.add(content)
            wal.commit()
            assert [content for _, content in everything(wal)] == contents
            assert [content for _, content in wal.backwards(5, 1)] == contents[::-1]
            assert wal.record(4) == contents[3]

    def test_one_record(self) -> None:
        """By its LSN, committed or not; one that is not there is named."""
        with opened(FaultyFiles()) as wal:
            contents = [content for _, content in filled(wal, 60)]
            wal.add(b"abc")
            assert [wal.record(lsn) for lsn in (1, 30, 60, 61)] == [contents[0], contents[29], contents[59], b"abc"]
            with pytest.raises(InputError, match="LSN 62 is after the end"):
                wal.record(62)
            wal.remove_below(61)
            with pytest.raises(OffsetOutOfRangeError, match="LSN 1 is not in the files"):
                wal.record(1)
            with pytest.raises(OffsetOutOfRangeError):
                list(wal.batches(1))
            with pytest.raises(InputError, match="LSN 1 is not in the files"):
                wal.position_of(1)

    def test_damage_is_named(self) -> None:
        """A flipped bit stops reading at its frame, in both directions."""
        files = FaultyFiles()
        with opened(files) as wal:
            placed = filled(wal, 30)
            path, byte = wal.spans()[0].path, placed[9][0]
            handle = files.open(path, write=True)
            handle.write_at(BINDING_BYTES + byte + HEADER_BYTES, b"\xff")
            for read in (lambda: list(wal.batches(1)), lambda: list(wal.backwards(30, 1))):
                with pytest.raises(CorruptionError) as caught:
                    read()
                assert (caught.value.path, caught.value.byte) == (path, byte)


class TestFiles:
    """Which file holds what."""

    def test_a_sealed_file_is_never_written_again(self) -> None:
        """What was added is in it, and what comes later is in the next one."""
        with opened(FaultyFiles()) as wal:
            filled(wal, 3)
            wal.add(b"abc")
            wal.seal()
            sealed = wal.spans()[-1]
            assert sealed.next_lsn == 5
            filled(wal, 1)
            assert wal.spans()[:-1] == [sealed]
            assert wal.spans()[-1].first_lsn == 5
            wal.seal()
            wal.seal()
            assert len(wal.spans()) == 2

    def test_positions_follow_from_any_anchor(self) -> None:
        """Whatever record is known, in whatever file, all positions come out the same."""
        files = FaultyFiles()
        with opened(files) as wal:
            filled(wal, 100)
            spans, places = wal.spans(), [wal.position_of(lsn) for lsn in range(1, 102)]
        for lsn in (1, 2, 20, 50, 99, 100, 101):
            with opened(files, anchor=Anchor(lsn, places[lsn - 1])) as wal:
                assert wal.spans() == spans
                assert (wal.next_lsn, wal.next_position) == (101, places[100])

    def test_a_log_may_go_on_where_another_ended(self) -> None:
        """After a restore LSNs and positions continue behind what was shipped."""
        files = FaultyFiles()
        with opened(files, anchor=Anchor(1000, 123_456)) as wal:
            assert (wal.next_lsn, wal.next_position) == (1000, 123_456)
            assert wal.read_stored(5, 1) is None
            ((position, content),) = filled(wal, 1)
            assert position == 123_456
            assert wal.read_stored(position + HEADER_BYTES, 100) == content
            assert wal.read_stored(123_455, 1) is None
        with opened(files, anchor=Anchor(1000, 123_456)) as wal:
            assert wal.next_position == 123_456 + HEADER_BYTES + 100

    def test_without_an_anchor_a_checkpoint_in_the_log_tells(self) -> None:
        """Whoever lost the place finds it again in the files."""
        files = FaultyFiles()
        with opened(files) as wal:
            filled(wal, 60)
            checkpoint = wal.add(encode_checkpoint_begin(wal.next_position, 5))
            filled(wal, 60)
            wal.remove_below(50)
            spans = wal.spans()
            assert 1 < spans[0].first_lsn < checkpoint
        with opened(files) as wal:
            assert wal.spans() == spans
            wal.remove_below(100)
        with pytest.raises(DataError), opened(files):
            pass

    def test_an_anchor_of_another_log_is_refused(self) -> None:
        """Files that do not belong to the engine's state are not guessed about."""
        files = FaultyFiles()
        with opened(files) as wal:
            filled(wal, 100)
            wal.remove_below(90)
        for anchor in (Anchor(1, 0), Anchor(102, 9999), Anchor(100, 3)):
            with pytest.raises(DataError, match=f"about LSN {anchor.lsn}"), opened(files, anchor=anchor):
                pass

    def test_files_that_are_read_are_known(self) -> None:
        """What is read stays on the disk longer; the question is about the time since it was asked last."""
        with opened(FaultyFiles()) as wal:
            filled(wal, 100)
            wal.read_stored(HEADER_BYTES, 10)
            assert [wal.was_read_lately(span) for span in wal.spans()[:2]] == [True, False]
            assert not wal.was_read_lately(wal.spans()[0])
            wal.remove_below(50)
            assert not wal.was_read_lately(wal.spans()[0]._replace(first_lsn=1))

    def test_it_counts(self) -> None:
        """Statistics are those of the log and of what waits."""
        with opened(FaultyFiles()) as wal:
            filled(wal, 100)
            wal.add(b"abc")
            found = wal.statistics()
            assert (found.first_lsn, found.next_lsn, found.durable_lsn) == (1, 102, 100)
            assert found.files == len(wal.spans()) == found.rotations + 1
            assert found.file_bytes == found.written_bytes == found.next_position - found.pending_bytes
            assert found.write_seconds.count > 0
            assert found.sync_seconds.count > 0
