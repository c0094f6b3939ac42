"""Repair: every good message is kept at its offset, what is lost is marked, what is removed is kept aside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.log.workbench import DIRECTORY, disk_with, everything, files_of, payload, payloads

from tidelog.errors import LockedError, RetryError, offsets_text
from tidelog.log import Log, LogSettings
from tidelog.log.directory import CHECKPOINT
from tidelog.log.frame import HEADER_BYTES, encode
from tidelog.log.repair import is_lost, plan_repair
from tidelog.log.verify import verify_files
from tidelog.testing import CrashPlan, FaultyFiles, History, ManualClock, crash_machine_everywhere

SIZE = 20
FRAME_BYTES = HEADER_BYTES + SIZE
COUNT = 35
WAL_NAMES = FIRST, SECOND, THIRD, LAST = tuple(f"wal.{seq:010d}.log" for seq in range(4))
TEN_A_FILE = LogSettings(rotate_max_bytes=10 * FRAME_BYTES)

Content = dict[str, bytes]


@cache
def closed_log(count: int = COUNT) -> Content:
    """So many messages, ten a file."""
    files = FaultyFiles()
    with closing(Log.open(DIRECTORY, TEN_A_FILE, files=files, clock=ManualClock())) as log:
        log.append_many(payloads(count, SIZE))
    return files_of(files)


def without_checkpoint(content: Content) -> Content:
    return {name: data for name, data in content.items() if name != CHECKPOINT}


def flipped(name: str, byte: int, bit: int = 0) -> Content:
    data = bytearray(closed_log()[name])
    data[byte] ^= 1 << bit
    return {**closed_log(), name: bytes(data)}


def spliced(name: str, start: int, end: int, new: bytes) -> Content:
    """The bytes from `start` to `end` replaced by others."""
    data = closed_log()[name]
    return {**closed_log(), name: data[:start] + new + data[end:]}


def without(name: str) -> Content:
    return {other: data for other, data in closed_log().items() if other != name}


AT_13 = 3 * FRAME_BYTES
DAMAGES: dict[str, tuple[Content, list[tuple[int, int]]]] = {
    "a flipped bit in a payload": (flipped(SECOND, AT_13 + HEADER_BYTES + 5), [(13, 13)]),
    "a flipped bit in a checksum": (flipped(SECOND, AT_13 + 12), [(13, 13)]),
    "a length that is too large": (flipped(SECOND, AT_13 + 8, 7), [(13, 13)]),
    "a length that is too small": (flipped(SECOND, AT_13 + 8, 4), [(13, 13)]),
    "an impossible length": (flipped(SECOND, AT_13 + 11, 7), [(13, 13)]),
    "a wrong offset": (flipped(SECOND, AT_13, 6), [(13, 13)]),
    "a wrong offset at the start of a file": (flipped(SECOND, 5), [(10, 10)]),
    "a wrong offset at the start of the log": (flipped(FIRST, 5), [(0, 0)]),
    "damage in the last frame of a file": (flipped(SECOND, 10 * FRAME_BYTES - 1), [(19, 19)]),
    "a missing file": (without(SECOND), [(10, 19)]),
    "a file cut short": (spliced(SECOND, AT_13 + 7, 400, b""), [(13, 19)]),
    "a file cut short between two frames": (spliced(SECOND, AT_13, 400, b""), [(13, 19)]),
    "an empty file": (spliced(SECOND, 0, 400, b""), [(10, 19)]),
    "inserted garbage": (spliced(SECOND, AT_13, AT_13, b"garbage" * 9), []),
    "inserted garbage at the start": (spliced(SECOND, 0, 0, b"garbage" * 9), []),
    "a frame twice": (spliced(SECOND, AT_13, AT_13, encode(12, payload(12, SIZE))), []),
    "cut-out bytes": (spliced(SECOND, AT_13 + 5, AT_13 + FRAME_BYTES + 20, b""), [(13, 14)]),
    "a sector of zeros": (spliced(SECOND, AT_13 - 2, AT_13 + 100, bytes(102)), [(12, 15)]),
    "a file of garbage": (spliced(SECOND, 0, 400, b"\xa5" * 360), [(10, 19)]),
    "a destroyed first file": (spliced(FIRST, 0, 400, b"\xa5" * 360), [(0, 9)]),
    "a destroyed first frame": (spliced(FIRST, 0, FRAME_BYTES, b"\xa5" * FRAME_BYTES), [(0, 0)]),
    "two places at once": (
        {**flipped(FIRST, 2 * FRAME_BYTES + HEADER_BYTES), THIRD: flipped(THIRD, HEADER_BYTES)[THIRD]},
        [(2, 2), (20, 20)],
    ),
    "damage in the middle of the last file": (flipped(LAST, FRAME_BYTES + HEADER_BYTES), [(31, 31)]),
}


def offsets_in(ranges: list[tuple[int, int]]) -> set[int]:
    return {offset for first, last in ranges for offset in range(first, last + 1)}


def lost_and_kept(files: FaultyFiles) -> tuple[set[int], set[int]]:
    """Opens a repaired log: the offsets that are marked as lost, and those whose message is what was appended."""
    with closing(Log.open(DIRECTORY, TEN_A_FILE, files=files)) as log:
        found = everything(log.read())
        assert [offset for offset, _ in found] == list(range(log.start_offset, log.next_offset))
    lost = {offset for offset, data in found if is_lost(data)}
    kept = {offset for offset, data in found if data == payload(offset, SIZE)}
    assert lost | kept == {offset for offset, _ in found}
    return lost, kept


def kept_aside(files: FaultyFiles) -> list[bytes]:
    return [data for path, data in files.tree().items() if "/removed/" in path and data is not None]


@pytest.mark.parametrize("kind", DAMAGES)
class TestEachKindOfDamage:
    """With the checkpoint that a log has."""

    def test_good_messages_are_kept_and_lost_ones_marked(self, kind: str) -> None:
        """Every message outside of the damage is there at its offset; the others are known to be lost."""
        content, lost = DAMAGES[kind]
        files = disk_with(content)
        plan = plan_repair(DIRECTORY, files=files)
        assert plan.is_needed
        assert list(plan.lost) == lost
        plan.apply()
        assert lost_and_kept(files) == (offsets_in(lost), set(range(COUNT)) - offsets_in(lost))

    def test_planning_changes_nothing(self, kind: str) -> None:
        """And says in words what would be done."""
        content, lost = DAMAGES[kind]
        files = disk_with(content)
        before = files.tree()
        plan = plan_repair(DIRECTORY, files=files)
        assert files.tree() == before
        assert all(offsets_text(first, last) in " ".join(plan.actions) for first, last in lost)

    def test_what_is_removed_is_kept_aside(self, kind: str) -> None:
        """The files as they were are found in `removed`, durably, and nothing else is."""
        content, _ = DAMAGES[kind]
        files = disk_with(content)
        kept = plan_repair(DIRECTORY, files=files).apply()
        assert sorted(kept_aside(files.after_crash("lose"))) == sorted(content[path.name[:18]] for path in kept)
        rewritten = {path.name[:18] for path in kept}
        untouched = [name for name in content if name not in rewritten and name != CHECKPOINT]
        assert {name: files_of(files)[name] for name in untouched} == {name: content[name] for name in untouched}

    def test_a_repaired_log_needs_no_repair(self, kind: str) -> None:
        """It is found to be good, takes new messages, and keeps its state over a power failure."""
        files = disk_with(DAMAGES[kind][0])
        plan_repair(DIRECTORY, files=files).apply()
        assert not plan_repair(DIRECTORY, files=files).is_needed
        assert verify_files(DIRECTORY, files=files).findings == ()
        durable = files.after_crash("lose")
        assert lost_and_kept(durable) == lost_and_kept(files)
        with closing(Log.open(DIRECTORY, files=durable)) as log:
            assert log.append(payload(COUNT, SIZE), sync=True) == COUNT


@pytest.mark.parametrize("kind", DAMAGES)
def test_without_a_checkpoint_as_much_is_kept(kind: str) -> None:
    """The files tell the same, and the mark says where the log began."""
    content, lost = DAMAGES[kind]
    files = disk_with(without_checkpoint(content))
    plan_repair(DIRECTORY, files=files).apply()
    marked, kept = lost_and_kept(files)
    assert kept == set(range(COUNT)) - offsets_in(lost)
    assert marked == offsets_in(lost)


def known_to_end_at(count: int, content: Content) -> Content:
    """The same files with the checkpoint of a shorter log, or without one."""
    return {**content, CHECKPOINT: closed_log(count)[CHECKPOINT]} if count else without_checkpoint(content)


class TestTail:
    """The end of the log, where only the checkpoint can tell what was there."""

    @pytest.mark.parametrize("cut", [1, FRAME_BYTES // 2, FRAME_BYTES - 1])
    @pytest.mark.parametrize("known", [0, 34])
    def test_a_torn_tail_is_cut(self, cut: int, known: int) -> None:
        """As opening does it, and the cut bytes are kept."""
        content = known_to_end_at(known, spliced(LAST, 5 * FRAME_BYTES - cut, 400, b""))
        files = disk_with(content)
        plan_repair(DIRECTORY, files=files).apply()
        assert lost_and_kept(files) == (set(), set(range(34)))
        assert kept_aside(files) == [content[LAST]]

    @pytest.mark.parametrize("cut", [1, FRAME_BYTES, 5 * FRAME_BYTES])
    def test_what_had_been_synced_is_marked_as_lost(self, cut: int) -> None:
        """The checkpoint knows how far the log went: no offset of that is used again."""
        files = disk_with(spliced(LAST, 5 * FRAME_BYTES - cut, 400, b""))
        lost = set(range(COUNT - (cut + FRAME_BYTES - 1) // FRAME_BYTES, COUNT))
        plan_repair(DIRECTORY, files=files).apply()
        assert lost_and_kept(files) == (lost, set(range(COUNT)) - lost)

    def test_a_missing_last_file_is_marked_as_lost(self) -> None:
        """A file is made again that holds only the marks."""
        files = disk_with(without(LAST))
        plan_repair(DIRECTORY, files=files).apply()
        assert lost_and_kept(files) == (set(range(30, 35)), set(range(30)))
        assert kept_aside(files) == []

    def test_a_last_file_of_garbage_is_removed(self) -> None:
        """Without a checkpoint, the log goes on where the file before ends."""
        content = without_checkpoint(spliced(LAST, 0, 400, b"\xa5" * 180))
        files = disk_with(content)
        plan_repair(DIRECTORY, files=files).apply()
        assert lost_and_kept(files) == (set(), set(range(30)))
        assert kept_aside(files) == [content[LAST]]

    @pytest.mark.parametrize(
        "content",
        [closed_log(), known_to_end_at(30, spliced(LAST, 0, 400, b"")), {}],
        ids=["good", "empty last file", "new"],
    )
    def test_a_good_log_is_left_alone(self, content: Content) -> None:
        """An empty last file is nothing to mend either."""
        files = disk_with(content)
        plan = plan_repair(DIRECTORY, files=files)
        assert (plan.is_needed, plan.actions, plan.lost) == (False, (), ())
        assert plan.apply() == []
        assert files_of(files) == content


class TestGuards:
    """A repair does only what was announced, and only to a log that nobody uses."""

    def test_a_log_in_use_is_refused(self) -> None:
        """The owner must close it first."""
        files = disk_with(closed_log())
        with closing(Log.open(DIRECTORY, files=files)):
            plan = plan_repair(DIRECTORY, files=files)
            with pytest.raises(LockedError):
                plan.apply()

    def test_a_plan_that_no_longer_fits_is_refused(self) -> None:
        """Something changed since it was made: nothing is done."""
        files = disk_with(DAMAGES["a missing file"][0])
        plan = plan_repair(DIRECTORY, files=files)
        file = files.open(DIRECTORY / LAST, write=True)
        file.write_at(file.size(), b"more")
        before = files_of(files)
        with pytest.raises(RetryError, match="Plan the repair again"):
            plan.apply()
        assert files_of(files) == before

    def test_a_lie_about_billions_of_messages_is_not_believed(self) -> None:
        """One flipped bit in the only header of the last file must not fill a disk with marks of lost messages."""
        content = without_checkpoint(flipped(LAST, 5))
        content[LAST] = content[LAST][:FRAME_BYTES]
        plan = plan_repair(DIRECTORY, files=disk_with(content))
        assert plan.lost == ()


def apply_repair(files: FaultyFiles, _: History) -> None:
    plan_repair(DIRECTORY, files=files).apply()


def same_end_as(reference: Content, originals: list[bytes]) -> Callable[[FaultyFiles, History], None]:
    """Repairing what a crash left ends in the same files, and the damaged ones are kept aside."""

    def check(files: FaultyFiles, _: History) -> None:
        if plan_repair(DIRECTORY, files=files).is_needed:
            plan_repair(DIRECTORY, files=files).apply()
        found = {name: data for name, data in files_of(files).items() if name.endswith(".log")}
        assert found == reference
        assert set(originals) <= set(kept_aside(files))
        lost_and_kept(files)

    return check


@pytest.mark.parametrize(
    "kind",
    ["two places at once", "a missing file", "an empty file", "inserted garbage", "a file of garbage"],
)
def test_a_repair_can_be_crashed_at_every_call(kind: str) -> None:
    """Applying again ends in the same state, whatever the crash kept."""
    damaged_disk = disk_with(DAMAGES[kind][0])
    mended = damaged_disk.after_crash("lose")
    originals = [DAMAGES[kind][0][path.name[:18]] for path in plan_repair(DIRECTORY, files=mended).apply()]
    reference = {name: data for name, data in files_of(mended).items() if name.endswith(".log")}
    summary = crash_machine_everywhere(
        lambda crash_at: damaged_disk.after_crash("keep", crash_at=crash_at),
        apply_repair,
        same_end_as(reference, originals),
        CrashPlan(seeds=2),
    )
    assert summary.cut_points > 8
    assert summary.abandoned_threads == 0


def places(whole: bytes) -> st.SearchStrategy[int]:
    """Bytes of a file, but none in a header: checksums do not cover those, so where halves of two meet is a frame."""
    return st.integers(0, len(whole)).filter(lambda byte: not 0 < byte % FRAME_BYTES <= HEADER_BYTES)


class TestAnyDamage:
    """One damaged place costs the messages in it, and no other."""

    @given(st.sampled_from(WAL_NAMES), st.data(), st.booleans())
    @settings(max_examples=examples(80))
    def test_a_flipped_bit_costs_one_message(self, name: str, data: st.DataObject, checkpoint: bool) -> None:
        """At most the one whose frame it is in."""
        byte = data.draw(st.integers(0, len(closed_log()[name]) - 1))
        content = flipped(name, byte, data.draw(st.integers(0, 7)))
        files = disk_with(content if checkpoint else without_checkpoint(content))
        plan_repair(DIRECTORY, files=files).apply()
        _, kept = lost_and_kept(files)
        hit = 10 * int(name[4:14]) + byte // FRAME_BYTES
        assert set(range(COUNT)) - kept <= {hit}

    @given(
        st.sampled_from([FIRST, SECOND, THIRD, LAST]), st.sampled_from(["cut out", "overwrite", "insert"]), st.data()
    )
    @settings(max_examples=examples(100))
    def test_other_damage_costs_what_it_touches(self, name: str, way: str, data: st.DataObject) -> None:
        """Bytes taken out, overwritten or put in: every frame that they do not touch is kept."""
        whole = closed_log()[name]
        start, end = sorted(data.draw(st.tuples(places(whole), places(whole))))
        end = start if way == "insert" else end
        longest = {"cut out": 0, "overwrite": end - start, "insert": 100}[way]
        new = data.draw(st.binary(min_size=longest if way == "overwrite" else 0, max_size=longest))
        files = disk_with(spliced(name, start, end, new))
        plan_repair(DIRECTORY, files=files).apply()
        _, kept = lost_and_kept(files)
        base, count = 10 * int(name[4:14]), len(whole) // FRAME_BYTES
        hit = {n for n in range(count) if n * FRAME_BYTES < max(end, start + 1) and (n + 1) * FRAME_BYTES > start}
        if way == "cut out":
            # The frame behind, where it has come to lie inside the one that was cut into and could be a part of it; and
            # the last of the file, when it is alone behind a gap and nobody confirms its offset.
            hit |= {-(-end // FRAME_BYTES), count - 1}
        assert set(range(COUNT)) - kept <= {base + n for n in hit}


def test_examining_tells_how_far_it_is() -> None:
    """Progress grows to the whole size of the log."""
    steps: list[tuple[int, int]] = []
    examined = verify_files(
        DIRECTORY, files=disk_with(closed_log()), on_progress=lambda done, total: steps.append((done, total))
    )
    assert steps == sorted(steps)
    assert steps[-1] == (COUNT * FRAME_BYTES, COUNT * FRAME_BYTES)
    assert (examined.frames, examined.total_bytes, examined.findings) == (COUNT, COUNT * FRAME_BYTES, ())


class Elsewhere:
    """Another copy of the log, which has some of the offsets."""

    def __init__(self, *held: tuple[int, int]) -> None:
        self.held = held
        self.asked: list[tuple[int, int]] = []

    def ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        self.asked.append((first, last))
        return [(max(first, start), min(last, end)) for start, end in self.held if start <= last and end >= first]

    def payloads(self, first: int, last: int) -> Iterator[list[bytes]]:
        for start in range(first, last + 1, 3):
            yield [payload(offset, SIZE) for offset in range(start, min(start + 3, last + 1))]


class TestAnotherCopy:
    """What is damaged or missing is put back where another copy has it."""

    @pytest.mark.parametrize("kind", DAMAGES)
    def test_every_damage_is_mended_exactly(self, kind: str) -> None:
        """With a whole copy no message is lost, and a log that only needed those is what it was, byte for byte."""
        content, lost = DAMAGES[kind]
        files = disk_with(content)
        plan = plan_repair(DIRECTORY, files=files, copy=Elsewhere((0, COUNT - 1)))
        assert (plan.lost, list(plan.restored)) == ((), lost)
        plan.apply()
        assert lost_and_kept(files) == (set(), set(range(COUNT)))
        whole = b"".join(data for name, data in sorted(closed_log().items()) if name in WAL_NAMES)
        assert b"".join(data for name, data in sorted(files_of(files).items()) if name.endswith(".log")) == whole

    def test_a_copy_of_a_part(self) -> None:
        """What it does not have is marked as lost, on both sides and in the middle."""
        files = disk_with(DAMAGES["a missing file"][0])
        plan = plan_repair(DIRECTORY, files=files, copy=Elsewhere((0, 11), (14, 15), (18, 18)))
        assert list(plan.restored) == [(10, 11), (14, 15), (18, 18)]
        assert list(plan.lost) == [(12, 13), (16, 17), (19, 19)]
        plan.apply()
        assert lost_and_kept(files)[0] == offsets_in(list(plan.lost))

    def test_a_good_log_does_not_ask(self) -> None:
        """The copy may be far away: it is asked for what is damaged, and for nothing else."""
        copy = Elsewhere((0, COUNT - 1))
        plan_repair(DIRECTORY, files=disk_with(closed_log()), copy=copy)
        assert copy.asked == []

    def test_a_copy_that_gives_less_than_it_said(self) -> None:
        """The file stays as it was: nothing is replaced by half of something."""
        files = disk_with(DAMAGES["a missing file"][0])
        copy = Elsewhere((0, COUNT - 1))
        plan = plan_repair(DIRECTORY, files=files, copy=copy)
        copy.payloads = lambda first, last: iter([[b"x"]])  # type: ignore[method-assign]
        before = {name: data for name, data in files_of(files).items() if name.endswith(".log")}
        with pytest.raises(RetryError, match="has changed"):
            plan.apply()
        assert {name: data for name, data in files_of(files).items() if name.endswith(".log")} == before

    @pytest.mark.parametrize("kind", ["two places at once", "a missing file", "a file of garbage"])
    def test_mending_can_be_crashed_at_every_call(self, kind: str) -> None:
        """Whatever a crash leaves, mending again ends with every message."""
        damaged_disk = disk_with(DAMAGES[kind][0])

        def mend(files: FaultyFiles, _: History) -> None:
            plan_repair(DIRECTORY, files=files, copy=Elsewhere((0, COUNT - 1))).apply()

        def check(files: FaultyFiles, _: History) -> None:
            plan = plan_repair(DIRECTORY, files=files, copy=Elsewhere((0, COUNT - 1)))
            if plan.is_needed:
                plan.apply()
            assert lost_and_kept(files) == (set(), set(range(COUNT)))

        summary = crash_machine_everywhere(
            lambda crash_at: damaged_disk.after_crash("keep", crash_at=crash_at), mend, check, CrashPlan(seeds=2)
        )
        assert summary.cut_points > 8
