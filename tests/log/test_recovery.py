"""Opening: the same state with any checkpoint, a torn tail is cut, other damage is refused, nothing is made up."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.log.workbench import (
    DIRECTORY,
    contents,
    disk_with,
    everything,
    files_of,
    numbered,
    payload,
    payloads,
    until_damage,
)

from tidelog.errors import CorruptionError, DataError, GapError
from tidelog.log import Log, LogSettings
from tidelog.log.directory import CHECKPOINT
from tidelog.log.frame import HEADER_BYTES, encode
from tidelog.log.segment import describe_segments, write_checkpoint
from tidelog.testing import FaultyFiles, ManualClock

SIZE = 20
FRAME_BYTES = HEADER_BYTES + SIZE
ROTATE_BYTES = 10 * FRAME_BYTES
COUNT = 35
LAST = "wal.0000000003.log"
CHECKING = LogSettings(rotate_max_bytes=ROTATE_BYTES)
TRUSTING = LogSettings(rotate_max_bytes=ROTATE_BYTES, open_check_bytes=0)


@cache
def closed_log(count: int = COUNT) -> dict[str, bytes]:
    """The files of a log that was closed with so many messages, ten a file."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, CHECKING, files=files, clock=ManualClock())) as log:
        log.append_many(payloads(count, SIZE))
    return files_of(files)


def without_checkpoint(count: int = COUNT) -> dict[str, bytes]:
    return {name: content for name, content in closed_log(count).items() if name != CHECKPOINT}


def with_checkpoint_of(count: int) -> dict[str, bytes]:
    """As if the checkpoint had been put back from an earlier time; with 0, that before the first file."""
    return {**closed_log(), CHECKPOINT: closed_log(count)[CHECKPOINT] if count else checkpoint_of_an_empty_log()}


def checkpoint_of_an_empty_log() -> bytes:
    files = FaultyFiles()
    files.make_directories(DIRECTORY)
    write_checkpoint(files, DIRECTORY, describe_segments((), 0, 0))
    return files_of(files)[CHECKPOINT]


def with_corrupt_checkpoint() -> dict[str, bytes]:
    corrupt = bytearray(closed_log()[CHECKPOINT])
    corrupt[len(corrupt) // 2] ^= 1
    return {**closed_log(), CHECKPOINT: bytes(corrupt)}


class TestCheckpoint:
    """It is a hint: it saves time and never changes what is found."""

    @pytest.mark.parametrize("how", [CHECKING, TRUSTING])
    @pytest.mark.parametrize(
        "content",
        [
            closed_log(),
            without_checkpoint(),
            with_checkpoint_of(0),
            with_checkpoint_of(5),
            with_checkpoint_of(20),
            with_checkpoint_of(31),
            with_corrupt_checkpoint(),
            {**closed_log(), CHECKPOINT: b""},
            {**closed_log(), CHECKPOINT: b"\xff\x00" * 50},
            {**closed_log(), "wal.ckpt.tmp": b"left by a crash"},
        ],
        ids=["fresh", "none", "newborn", "stale 5", "stale 20", "stale 31", "corrupt", "empty", "garbage", "temporary"],
    )
    def test_any_checkpoint_gives_the_same_state(self, content: dict[str, bytes], how: LogSettings) -> None:
        """Offsets, messages and the next file are those of the files."""
        files = disk_with(content)
        with closing(Log.open(DIRECTORY, how, files=files)) as log:
            assert (log.start_offset, log.next_offset, log.durable_offset) == (0, COUNT, COUNT)
            assert log.recovery.torn_tail is None
            assert log.recovery.missing_synced is None
            assert contents(log) == numbered(COUNT)
            assert [offset for offset, _ in everything(log.read(17, 23))] == list(range(17, 23))
            log.append_many(payloads(10, SIZE, COUNT))
            log.flush()
            assert log.statistics().files == 5

    @pytest.mark.parametrize("how", [CHECKING, TRUSTING])
    def test_one_from_the_future_is_reported(self, how: LogSettings, caplog: pytest.LogCaptureFixture) -> None:
        """It says that more was synced than the files have: the log opens with what there is, and says what is gone."""
        content = {**closed_log(32), CHECKPOINT: closed_log(COUNT)[CHECKPOINT]}
        with closing(Log.open(DIRECTORY, how, files=disk_with(content))) as log:
            assert contents(log) == numbered(32)
            assert log.recovery.missing_synced == (32, COUNT - 1)
        assert "offsets 32 to 34 had been synced" in caplog.text

    def test_it_spares_reading_old_files(self) -> None:
        """With it, nothing is read again that is older than what is always checked."""
        with closing(Log.open(DIRECTORY, TRUSTING, files=disk_with(closed_log()))) as log:
            assert (log.recovery.checkpoint_used, log.recovery.checked_bytes) == (True, 0)
        with closing(Log.open(DIRECTORY, CHECKING, files=disk_with(closed_log()))) as log:
            assert (log.recovery.checkpoint_used, log.recovery.checked_bytes) == (False, COUNT * FRAME_BYTES)

    @pytest.mark.parametrize(("check_files", "checked"), [(0.0, 0), (0.5, 5), (1.5, 15), (2.4, 15), (3.5, 35)])
    def test_the_newest_bytes_are_always_checked(self, check_files: float, checked: int) -> None:
        """As many whole files, from the end, as open_check_bytes has room for."""
        how = LogSettings(rotate_max_bytes=ROTATE_BYTES, open_check_bytes=int(check_files * ROTATE_BYTES))
        with closing(Log.open(DIRECTORY, how, files=disk_with(closed_log()))) as log:
            assert log.recovery.checked_bytes == checked * FRAME_BYTES

    def test_damage_is_found_at_opening_where_it_is_checked(self) -> None:
        """And where the checkpoint is trusted, a reader finds it and names the same place."""
        content = damaged(closed_log(), "wal.0000000001.log", 3 * FRAME_BYTES + HEADER_BYTES)
        with pytest.raises(CorruptionError) as refused:
            Log.open(DIRECTORY, CHECKING, files=disk_with(content))
        with closing(Log.open(DIRECTORY, TRUSTING, files=disk_with(content))) as log:
            read, error = until_damage(log.read())
        assert read == numbered(13)
        assert (refused.value.path, refused.value.byte) == (error.path, error.byte)

    def test_the_creation_time_of_files_is_kept(self) -> None:
        """A log that is opened again knows how old its file is."""
        files, clock = disk_with(closed_log(5)), ManualClock()
        clock.advance(3599)
        with closing(Log.open(DIRECTORY, files=files, clock=clock)) as log:
            clock.advance(1)
            log.append(payload(5, SIZE), sync=True)
            assert log.statistics().files == 2


def damaged(content: dict[str, bytes], name: str, byte: int, bit: int = 0) -> dict[str, bytes]:
    """The same files with one bit flipped."""
    data = bytearray(content[name])
    data[byte] ^= 1 << bit
    return {**content, name: bytes(data)}


class TestTornTail:
    """The last file ends in something that is not a frame."""

    @pytest.mark.parametrize("cut", range(1, FRAME_BYTES))
    def test_it_is_cut_at_the_last_whole_frame(self, cut: int) -> None:
        """What is left of an unfinished write is removed, durably, and reported."""
        content = without_checkpoint()
        content[LAST] = content[LAST][:-cut]
        files = disk_with(content)
        with closing(Log.open(DIRECTORY, CHECKING, files=files)) as log:
            tail = log.recovery.torn_tail
            assert tail is not None
            assert (tail.file, tail.byte, tail.size) == (LAST, 4 * FRAME_BYTES, FRAME_BYTES - cut)
            assert contents(log) == numbered(34)
            assert files_of(files.after_crash("lose"))[LAST] == closed_log()[LAST][: 4 * FRAME_BYTES]
            assert log.append(payload(34, SIZE), sync=True) == 34
        assert files_of(files)[LAST] == closed_log()[LAST]

    @pytest.mark.parametrize(
        "garbage", [b"\x00" * 5000, b"\xff" * 100, encode(99, b"of another offset"), encode(35, b"cut")[:-1]]
    )
    def test_garbage_at_the_end_is_a_torn_tail(self, garbage: bytes) -> None:
        """Zeros from a file system, the frame of another log, or half a frame: none of it is a message."""
        content = {**closed_log(), LAST: closed_log()[LAST] + garbage}
        with closing(Log.open(DIRECTORY, CHECKING, files=disk_with(content))) as log:
            assert log.recovery.torn_tail is not None
            assert contents(log) == numbered(COUNT)

    def test_what_had_been_synced_is_kept_aside(self) -> None:
        """Bytes that the checkpoint vouches for are not thrown away when they no longer make a frame."""
        files = disk_with(damaged(closed_log(), LAST, 5 * FRAME_BYTES - 1))
        with closing(Log.open(DIRECTORY, CHECKING, files=files)) as log:
            assert log.recovery.missing_synced == (34, 34)
            assert contents(log) == numbered(34)
        kept = [content for path, content in files.tree().items() if "/removed/" in path]
        assert kept == [damaged(closed_log(), LAST, 5 * FRAME_BYTES - 1)[LAST][4 * FRAME_BYTES :]]

    def test_an_empty_last_file_is_gone_on_in(self) -> None:
        """A crash right after a rotation leaves one; the next message goes into it."""
        content = {**without_checkpoint(30), LAST: b""}
        files = disk_with(content)
        with closing(Log.open(DIRECTORY, CHECKING, files=files)) as log:
            assert (log.next_offset, log.recovery.torn_tail) == (30, None)
            log.append_many(payloads(5, SIZE, 30), sync=True)
        assert files_of(files)[LAST] == closed_log()[LAST]

    @pytest.mark.parametrize("content", [{}, {"wal.0000000000.log": b""}, {"wal.0000000000.log": b"\x00" * 10}])
    def test_a_log_without_a_frame_begins_where_it_is_told(self, content: dict[str, bytes]) -> None:
        """Also with an empty or torn first file."""
        with closing(Log.open(DIRECTORY, files=disk_with(content), first_offset=7)) as log:
            assert (log.start_offset, log.next_offset) == (7, 7)
            assert log.append(payload(7), sync=True) == 7
            assert contents(log) == numbered(1, first=7)

    def test_a_log_that_does_not_begin_at_zero_is_found_again(self) -> None:
        """Its first offset comes from its files, whatever the next opener would begin with."""
        files = disk_with({})
        for count in range(3):
            with closing(Log.open(DIRECTORY, files=files, first_offset=7 if count == 0 else 0)) as log:
                assert log.append(payload(7 + count), sync=True) == 7 + count
                assert log.start_offset == 7

    def test_strangers_in_the_directory_are_left_alone(self) -> None:
        """Only names of WAL files are looked at."""
        strangers = {"wal.log": b"x", "wal.1.log.bak": b"x", "wal.-1.log": b"x", "notes.txt": b"x", "wal.a.log": b"x"}
        files = disk_with({**closed_log(), **strangers})
        with closing(Log.open(DIRECTORY, CHECKING, files=files)) as log:
            assert contents(log) == numbered(COUNT)
        assert {name: files_of(files)[name] for name in strangers} == strangers


class TestRefusal:
    """Damage that has frames behind it: nothing is guessed, nothing is changed."""

    @pytest.mark.parametrize("content", [closed_log(), without_checkpoint()], ids=["checkpoint", "none"])
    @pytest.mark.parametrize("missing", ["wal.0000000001.log", "wal.0000000002.log"])
    def test_a_missing_file_is_named_by_its_offsets(self, content: dict[str, bytes], missing: str) -> None:
        """The error says which offsets are missing, and before which file."""
        files = disk_with({name: data for name, data in content.items() if name != missing})
        with pytest.raises(GapError) as caught:
            Log.open(DIRECTORY, CHECKING, files=files)
        first = 10 * int(missing[4:14])
        assert (caught.value.first, caught.value.last) == (first, first + 9)
        assert "tidelog repair" in str(caught.value)

    def test_a_missing_newest_file_is_known_by_the_checkpoint(self) -> None:
        """The log opens with what there is, and says what had been synced; without one, nothing tells of it."""
        content = {name: data for name, data in closed_log().items() if name != LAST}
        with closing(Log.open(DIRECTORY, files=disk_with(content))) as log:
            assert contents(log) == numbered(30)
            assert log.recovery.missing_synced == (30, 34)
        with closing(Log.open(DIRECTORY, files=disk_with(without_checkpoint(30)))) as log:
            assert contents(log) == numbered(30)

    @pytest.mark.parametrize("content", [closed_log(), without_checkpoint()], ids=["checkpoint", "none"])
    @pytest.mark.parametrize("how", [CHECKING, TRUSTING])
    @pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, FRAME_BYTES, 10 * FRAME_BYTES - 1])
    def test_a_file_that_ends_early_before_another_is_refused(
        self, content: dict[str, bytes], how: LogSettings, size: int
    ) -> None:
        """It is not a torn tail: later files hold later messages."""
        cut = {**content, "wal.0000000001.log": content["wal.0000000001.log"][:size]}
        files = disk_with(cut)
        with pytest.raises(DataError, match=r"wal\.000000000[12]\.log"):
            Log.open(DIRECTORY, how, files=files)
        assert files_of(files) == cut

    def test_a_file_under_the_name_of_another_is_refused(self) -> None:
        """Put back by mistake. Also where the checkpoint would be trusted: it knows how a file begins."""
        moved = {**closed_log(), "wal.0000000001.log": closed_log()["wal.0000000002.log"]}
        files = disk_with(moved)
        with pytest.raises(DataError, match=r"wal\.0000000001\.log"):
            Log.open(DIRECTORY, TRUSTING, files=files)
        assert files_of(files) == moved

    def test_a_refused_log_can_be_opened_by_the_next(self) -> None:
        """The lock is given back."""
        files = disk_with(damaged(closed_log(), LAST, HEADER_BYTES))
        for _ in range(2):
            with pytest.raises(CorruptionError, match=f"byte 0 of .*{LAST}"):
                Log.open(DIRECTORY, CHECKING, files=files)

    @pytest.mark.parametrize("bit", range(64))
    @pytest.mark.parametrize("count", [10, COUNT])
    def test_a_flipped_bit_in_the_first_offset_is_refused(self, bit: int, count: int) -> None:
        """The checksum does not cover it and no file before it vouches for it, not even a checkpoint here."""
        content = damaged(without_checkpoint(count), "wal.0000000000.log", bit // 8, bit % 8)
        files = disk_with(content)
        with pytest.raises(CorruptionError, match="byte 0 of"):
            Log.open(DIRECTORY, CHECKING, files=files)
        assert files_of(files) == content

    @pytest.mark.parametrize("bit", range(0, 64, 5))
    def test_a_young_log_knows_where_it_began(self, bit: int) -> None:
        """With a single message that nothing behind confirms, the checkpoint of its birth tells its offset."""
        young = {**without_checkpoint(1), CHECKPOINT: checkpoint_of_an_empty_log()}
        with closing(Log.open(DIRECTORY, files=disk_with(young))) as log:
            assert contents(log) == numbered(1)
        files = disk_with(damaged(young, "wal.0000000000.log", bit // 8, bit % 8))
        with pytest.raises(DataError, match=r"wal\.0000000000\.log"):
            Log.open(DIRECTORY, files=files)

    def test_a_destroyed_first_frame_is_refused(self) -> None:
        """Without a checkpoint nothing tells where the log began, but frames behind it tell that it was there."""
        content = without_checkpoint(10)
        content["wal.0000000000.log"] = b"\xa5" * FRAME_BYTES + content["wal.0000000000.log"][FRAME_BYTES:]
        with pytest.raises(CorruptionError, match="byte 0 of"):
            Log.open(DIRECTORY, CHECKING, files=disk_with(content))


class Damage(NamedTuple):
    """A bit that is flipped, or with bit 8 a cut at that byte."""

    name: str
    byte: int
    bit: int

    def apply(self, content: dict[str, bytes]) -> dict[str, bytes]:
        if self.bit == 8:
            return {**content, self.name: content[self.name][: self.byte]}
        return damaged(content, self.name, self.byte, self.bit)

    @property
    def is_in_last_file(self) -> bool:
        return self.name == LAST


@st.composite
def damages(draw: st.DrawFn, *, checkpoint: bool) -> Damage:
    names = sorted(name for name, data in (closed_log() if checkpoint else without_checkpoint()).items() if data)
    name = draw(st.sampled_from(names))
    return Damage(name, draw(st.integers(0, len(closed_log()[name]) - 1)), draw(st.integers(0, 8)))


def check_opening(content: dict[str, bytes], damage: Damage, how: LogSettings) -> int | None:
    """Opens a damaged log: how many messages it gives, which are the first ones; None when it names the damage."""
    after = damage.apply(content)
    files = disk_with(after)
    try:
        log = Log.open(DIRECTORY, how, files=files)
    except (CorruptionError, GapError) as refusal:
        check_refusal(refusal, after)
        assert files_of(files) == after
        return None
    with closing(log):
        found, error = read_all(log)
        assert found == numbered(len(found))
        if error is not None:
            check_refusal(error, after)
            return None
        assert log.next_offset == len(found)
        assert log.append(payload(len(found), SIZE), sync=True) == len(found)
        return len(found)


def check_refusal(error: CorruptionError | GapError, content: dict[str, bytes]) -> None:
    """It names a file of the log, and a byte in it."""
    assert error.path is not None
    assert error.path.name in content
    assert str(error.path) in str(error)
    if isinstance(error, CorruptionError):
        assert 0 <= error.byte <= len(content[error.path.name])


def read_all(log: Log) -> tuple[list[tuple[int, bytes]], CorruptionError | None]:
    """All that can be read, and the damage that it ended at."""
    found: list[tuple[int, bytes]] = []
    try:
        for batch in log.read("earliest"):
            found += enumerate(batch.payloads(), batch.first_offset)
    except CorruptionError as error:
        return found, error
    return found, None


class TestAnyDamage:
    """Flip any bit or cut anywhere: a wrong message is never given out."""

    @given(damages(checkpoint=True))
    @settings(max_examples=examples(100))
    def test_with_a_checkpoint(self, damage: Damage) -> None:
        """A damaged checkpoint changes nothing, a damaged file is refused, only the end of the last one may be cut."""
        found = check_opening(closed_log(), damage, CHECKING)
        if damage.name == CHECKPOINT:
            assert found == COUNT
        elif damage.is_in_last_file:
            assert found is None or found >= 30 + damage.byte // FRAME_BYTES
        else:
            assert found is None

    @given(damages(checkpoint=False))
    @settings(max_examples=examples(100))
    def test_without_a_checkpoint(self, damage: Damage) -> None:
        """The same, from the files alone."""
        found = check_opening(without_checkpoint(), damage, CHECKING)
        if damage.is_in_last_file:
            assert found is None or found >= 30 + damage.byte // FRAME_BYTES
        else:
            assert found is None

    @given(damages(checkpoint=True))
    @settings(max_examples=examples(100))
    def test_where_the_checkpoint_is_trusted(self, damage: Damage) -> None:
        """Opening may not see it; a reader does, and names it."""
        found = check_opening(closed_log(), damage, TRUSTING)
        if damage.name == CHECKPOINT:
            assert found == COUNT
        elif not damage.is_in_last_file:
            assert found is None

    @given(st.binary(max_size=3 * FRAME_BYTES), st.integers(0, 10))
    @settings(max_examples=examples(80))
    def test_any_bytes_at_the_end(self, garbage: bytes, keep: int) -> None:
        """Whatever stands where the next frame should be: the frames before it are found, and nothing else."""
        content = {"wal.0000000000.log": closed_log()["wal.0000000000.log"][: keep * FRAME_BYTES] + garbage}
        try:
            log = Log.open(DIRECTORY, files=disk_with(content))
        except DataError:
            return
        with closing(log):
            assert contents(log)[:keep] == numbered(keep)
