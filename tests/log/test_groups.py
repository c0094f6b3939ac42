"""Messages that count only together: a log that ends inside such a group is cut back to before it."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.log.workbench import DIRECTORY, contents, disk_with, files_of

from tidelog.errors import LogFailedError
from tidelog.log import Log, LogSettings
from tidelog.log.frame import encode_many
from tidelog.log.segment import describe_segments
from tidelog.log.view import LogView
from tidelog.testing import FaultyFiles, History, crash_machine_everywhere

# Frames of 36 bytes, three of them in a file.
SMALL = LogSettings(rotate_max_bytes=120)
TRUSTING = LogSettings(rotate_max_bytes=120, open_check_bytes=0)


def member(number: int, total: int, name: str = "m") -> bytes:
    return f"{number}/{total}:{name}".encode().ljust(20, b"-")


def group(total: int, name: str = "m") -> list[bytes]:
    return [member(number, total, name) for number in range(total)]


def group_of(payload: bytes) -> tuple[int, int]:
    number, total = payload.partition(b":")[0].split(b"/")
    return int(number), int(total)


def written(payloads: list[bytes], first_offset: int = 0, rotate_at: tuple[int, ...] = ()) -> FaultyFiles:
    """A disk with these frames, in files that begin at these offsets."""
    starts = [0, *rotate_at, len(payloads)]
    found = {}
    for seq, (start, stop) in enumerate(pairwise(starts)):
        found[f"wal.{seq:010d}.log"] = encode_many(first_offset + start, payloads[start:stop]).buffer
    return disk_with(found)


def opened(files: FaultyFiles, settings: LogSettings = SMALL) -> Log:
    return Log.open(DIRECTORY, settings, files=files, group_of=group_of)


def values(log: Log | LogView) -> list[bytes]:
    return [payload for _, payload in contents(log)]


def test_an_unfinished_group_is_cut() -> None:
    """Two of three messages are there after a crash: neither counts, and their offsets are given again."""
    files = written([*group(1, "a"), *group(3, "b")[:2]])
    with closing(opened(files)) as log:
        assert values(log) == group(1, "a")
        assert log.recovery.unfinished == (1, 2)
        assert log.append(member(0, 1, "c"), sync=True) == 1
    with closing(opened(files)) as log:
        assert values(log) == [*group(1, "a"), *group(1, "c")]
        assert log.recovery.unfinished is None
        assert log.recovery.missing_synced is None


def test_a_finished_group_stays() -> None:
    """All of it is there, at the end and in the middle."""
    payloads = [*group(3, "a"), *group(2, "b")]
    with closing(opened(written(payloads, rotate_at=(2,)))) as log:
        assert values(log) == payloads


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.integers(1, 7), max_size=4), st.integers(2, 9), st.data())
def test_a_group_is_cut_across_files(before: list[int], total: int, data: st.DataObject) -> None:
    """However many files it lies in, wherever they begin, with an empty file behind it or not."""
    whole = [payload for name, count in enumerate(before) for payload in group(count, str(name))]
    there = data.draw(st.integers(1, total - 1))
    payloads = whole + group(total, "cut")[:there]
    first_offset = data.draw(st.sampled_from([0, 50]))
    rotate_at = tuple(sorted(data.draw(st.sets(st.integers(1, len(payloads))))))
    files = written(payloads, first_offset, rotate_at)
    view = LogView(DIRECTORY, SMALL, files=files, first_offset=first_offset, group_of=group_of)
    assert (values(view), view.next_offset) == (whole, first_offset + len(whole))
    for _ in range(2):
        with closing(Log.open(DIRECTORY, SMALL, files=files, first_offset=first_offset, group_of=group_of)) as log:
            assert (values(log), log.next_offset) == (whole, first_offset + len(whole))
            assert log.append_many(group(2, "new"), sync=True)[0] == first_offset + len(whole)
        whole = whole + group(2, "new")
        first_offset_now = log.start_offset
        assert first_offset_now == first_offset


def test_a_log_that_is_one_unfinished_group_begins_where_it_began() -> None:
    """Nothing is left, and the offsets do not start again at 0."""
    files = written(group(4)[:3], first_offset=70, rotate_at=(1, 2))
    with closing(opened(files)) as log:
        assert (log.start_offset, log.next_offset, values(log)) == (70, 70, [])
    with closing(opened(files)) as log:
        assert log.append(member(0, 1), sync=True) == 70


def test_the_checkpoint_of_a_file_that_ends_inside_a_group_is_not_believed_afterwards() -> None:
    """A file was full in the middle of a group, and the checkpoint vouched for it; after the cut other messages of
    other sizes fill it to the same byte, and the old checkpoint would count them wrongly."""
    files = FaultyFiles()
    log = opened(files, TRUSTING)
    log.append(member(0, 1, "a"), sync=True)
    log.append_many(group(4, "b"), sync=True)
    log.close()
    names = files_of(files)
    files = disk_with({"wal.0000000000.log": names["wal.0000000000.log"], "wal.ckpt": names["wal.ckpt"]})
    log = opened(files, TRUSTING)
    assert values(log) == group(1, "a")
    log.append(member(0, 1, "c").ljust(56, b"-"), sync=True)
    without_power = files.after_crash("lose")
    log.close()
    with closing(opened(without_power, TRUSTING)) as log:
        assert log.next_offset == 2
        assert values(log)[0] == member(0, 1, "a")


def test_a_trusted_file_is_not_read_to_find_its_last_message() -> None:
    """The checkpoint knows where the last frame begins; one without that field still serves."""
    files = FaultyFiles()
    with closing(opened(files, TRUSTING)) as log:
        log.append_many(group(3), sync=True)
        (segment,) = log._segments
        assert segment.last_frame_byte == 72
        assert describe_segments([segment], 0, 0).files[0].last_frame_byte == 72
    with closing(opened(files, TRUSTING)) as log:
        assert log.recovery.checkpoint_used
        assert log.recovery.checked_bytes == 0
        assert log.next_offset == 3


def test_a_payload_that_lies_about_its_group_is_kept() -> None:
    """What the first message of the group does not confirm is no reason to throw anything away."""
    payloads = [member(0, 1, "a"), member(0, 1, "b"), member(2, 9, "liar")]
    with closing(opened(written(payloads))) as log:
        assert values(log) == payloads


def test_a_group_whose_beginning_was_pruned_is_cut() -> None:
    """It is larger than a file, and age has taken its first file: the rest does not count alone."""
    files = written(group(9)[2:8], first_offset=2, rotate_at=(3,))
    with closing(opened(files)) as log:
        assert (values(log), log.next_offset) == ([], 2)


def test_an_onlooker_sees_a_group_when_it_is_whole() -> None:
    """While the owner is in the middle of writing it, the group is not there yet; then all of it is."""
    payloads = [*group(2, "a"), *group(5, "b")]
    data = encode_many(0, payloads).buffer
    files = disk_with({"wal.0000000000.log": data[: 36 * 2]})
    view = LogView(DIRECTORY, SMALL, files=files, group_of=group_of)
    for count in range(3, 7):
        file = files.open(DIRECTORY / "wal.0000000000.log", write=True)
        file.write_at(0, data[: 36 * count])
        file.close()
        assert view.next_offset == 2
        assert values(view) == group(2, "a")
    file = files.open(DIRECTORY / "wal.0000000000.log", write=True)
    file.write_at(0, data)
    file.close()
    assert view.next_offset == 7
    assert values(view) == payloads


@pytest.mark.parametrize("rotate_at", [(), (4,), (2, 4, 6), (3,), (3, 5)])
def test_cutting_can_itself_be_crashed(rotate_at: tuple[int, ...]) -> None:
    """At every call of the cut, and whatever a power failure leaves: the next opening ends at the same state."""
    whole = group(3, "a")
    torn = written([*whole, *group(6, "b")[:4]], rotate_at=rotate_at)

    def recover(files: FaultyFiles, _: History) -> None:
        opened(files, TRUSTING).close()

    def check(files: FaultyFiles, _: History) -> None:
        with closing(opened(files, TRUSTING)) as log:
            assert (values(log), log.next_offset) == (whole, 3)
            assert log.recovery.missing_synced is None
            log.append(member(0, 1, "next"), sync=True)
        with closing(opened(files, TRUSTING)) as log:
            assert values(log) == [*whole, member(0, 1, "next")]

    summary = crash_machine_everywhere(lambda call: torn.after_crash("keep", crash_at=call), recover, check)
    assert summary.cut_points > 3


def test_closing_on_a_full_disk_names_all_of_a_group() -> None:
    """Part of it is on the disk and does not count: whoever appends again what is named loses nothing."""
    files = FaultyFiles()
    log = opened(files)
    log.append(member(0, 1, "a"), sync=True)
    files.capacity_bytes = sum(len(content or b"") for content in files.tree().values()) + 36 * 3
    log.append_many(group(9, "b"))
    with pytest.raises(LogFailedError, match="offsets 1 to 9"):
        log.close()
    with closing(opened(files)) as log:
        assert values(log) == group(1, "a"), "opening does not need room"
    files.capacity_bytes = None
    with closing(opened(files)) as log:
        assert log.append(member(0, 1, "c"), sync=True) == 1
