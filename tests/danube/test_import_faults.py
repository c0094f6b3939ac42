"""What Danube's faults leave in its files, and what an import makes of it; each test opens with a loss to prevent."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.cli.conftest import Cli, Result
from tests.danube.danube_bytes import (
    PUBLISHED_MS,
    encode,
    encode_message,
    frame,
    frames,
    older_frames,
    sent,
    write_objects,
    write_wal,
)

import tidelog

TOPIC = "default/orders"


def values(root: Path, topic: str = TOPIC) -> dict[int, bytes]:
    """The messages of a topic by offset; lost ones are left out."""
    with tidelog.open(root / "data", read_only=True) as log:
        return {message.offset: message.value or b"" for message in log.topic(topic).read(on_gap="skip")}


def numbered(*offsets: int) -> dict[int, bytes]:
    return {offset: b"message %d" % offset for offset in offsets}


def flipped(data: bytes, byte: int, mask: int = 0x10) -> bytes:
    changed = bytearray(data)
    changed[byte] ^= mask
    return bytes(changed)


class Danube:
    """A topic of Danube in a directory of its own, and the command that imports it."""

    def __init__(self, cli: Cli, root: Path) -> None:
        self.cli = cli
        self.root = root
        self.wal = root / "wal" / "default" / "orders"
        self.store = root / "store"

    def import_wal(self, *contents: bytes, options: tuple[str, ...] = ()) -> Result:
        write_wal(self.wal, *contents)
        return self.cli("import", "danube", "--wal", self.wal, *options)

    def write_older(self, *objects: tuple[int, int | str, bytes]) -> list[Path]:
        """Objects as Danube 0.5 to 0.8 wrote them, each a second younger than the one before."""
        paths = write_objects(self.store, objects, folder="objects")
        for seconds, path in enumerate(paths, 1_760_000_000):
            os.utime(path, (seconds, seconds))
        return paths

    def import_objects(self, *objects: tuple[int, int, bytes], options: tuple[str, ...] = ()) -> Result:
        write_objects(self.store, objects)
        return self.cli("import", "danube", "--objects", self.store.as_uri(), *options)

    @property
    def values(self) -> dict[int, bytes]:
        return values(self.root)


@pytest.fixture
def danube(cli: Cli, tmp_path: Path) -> Danube:
    return Danube(cli, tmp_path)


RENUMBER = ("--on-restart", "renumber")
SKIP = ("--on-damage", "skip")


def test_1_offsets_that_begin_again_are_refused(danube: Danube) -> None:
    """Loses one of two messages in silence: after a restart another one was written at the same offset."""
    before = frames(range(50))
    result = danube.import_wal(before + frames(range(30), life=" again"))
    assert result.code == 5
    assert "offset 0 occurs twice" in result.err
    assert f"byte {len(before)} of {danube.wal / 'wal.log'}" in result.err
    assert "--on-restart renumber" in result.err
    assert danube.values == numbered(*range(50))


def test_1_all_lives_of_a_topic_can_be_imported(danube: Danube) -> None:
    """Loses a life of the topic: its messages get the offsets that come next, and say which ones they had."""
    contents = [
        frames(range(50)) + frames(range(30), life=" again"),
        frames(range(30, 40), life=" again") + frames(range(20), life=" once more"),
    ]
    danube.import_wal(*contents)  # stops at the first restart, and is gone on with
    result = danube.import_wal(*contents, options=(*RENUMBER, "--json"))
    assert result.code == 0, result.err
    assert (result.json[0]["already_there"], result.json[0]["renumbered"]) == (50, 60)
    expected = numbered(*range(50))
    expected |= {50 + n: b"message %d again" % n for n in range(40)}
    expected |= {90 + n: b"message %d once more" % n for n in range(20)}
    assert danube.values == expected
    with tidelog.open(danube.root / "data", read_only=True) as log:
        headers = {message.offset: message.headers.get("danube-offset") for message in log.topic(TOPIC).read()}
    assert (headers[49], headers[50], headers[89], headers[109]) == (None, b"0", b"39", b"19")
    assert danube.import_wal(*contents, options=RENUMBER).code == 0
    assert danube.values == expected


def test_1_a_torn_message_before_the_restart_changes_nothing(danube: Danube) -> None:
    """Loses the next life of the topic: it is appended right behind the message that the crash tore."""
    torn = frame(50)[:-5]
    result = danube.import_wal(frames(range(50)) + torn + frames(range(30), life=" again"), options=RENUMBER)
    assert result.code == 0, result.err
    assert len(danube.values) == 80
    assert "damage: " in result.err


def test_1_lives_in_objects_are_told_apart_by_their_time(danube: Danube) -> None:
    """Loses messages of an object: two lives of a topic have objects that begin at the same offset."""
    objects = [
        (0, 100, frames(range(10))),
        (10, 110, frames(range(10, 20))),
        (0, 200, frames(range(15), life=" again")),
    ]
    refused = danube.import_objects(*objects)
    assert refused.code == 5
    assert "byte 0 of storage/topics/default/orders/segments/data-0-200.dnb1" in refused.err
    assert danube.import_objects(*objects, options=RENUMBER).code == 0
    assert danube.values == numbered(*range(20)) | {20 + n: b"message %d again" % n for n in range(15)}


def test_4_a_batch_that_was_written_twice_is_used_once(danube: Danube) -> None:
    """Doubles messages, or stops at a torn one: a write that failed half-way was made again as a whole."""
    batch = frames(range(10, 20))
    result = danube.import_wal(frames(range(10)) + batch[:-30] + batch + frames(range(20, 30)))
    assert result.code == 0, result.err
    assert danube.values == numbered(*range(30))
    assert "a frame that is cut short" in result.err or "checksum" in result.err


def test_5_objects_uploaded_again_and_again_are_used_once(danube: Danube) -> None:
    """Doubles messages: the same file was uploaded whenever it had grown, under the same or a wrong start."""
    result = danube.import_objects(
        (0, 100, frames(range(10))),
        (0, 101, frames(range(10))),
        (0, 102, frames(range(25))),
        (10, 103, frames(range(5, 30))),
        (28, 104, frames(range(30, 40))),
        options=("--json",),
    )
    assert result.code == 0, result.err
    assert danube.values == numbered(*range(40))
    assert result.json[0]["repeated"] == 10 + 10 + 20


def test_5_objects_that_disagree_are_refused(danube: Danube) -> None:
    """Takes the wrong one of two messages: overlapping objects hold the same offset and not the same bytes."""
    second = frames(range(5, 15))
    third = frames(range(5, 8)) + frame(8, b"another") + frames(range(9, 20))
    result = danube.import_objects((0, 100, frames(range(10))), (5, 101, second), (5, 102, third))
    assert result.code == 5
    assert f"byte {len(frames(range(5, 8)))} of storage/topics/default/orders/segments/data-5-102.dnb1" in result.err


def test_12_frames_out_of_order_are_put_in_order(danube: Danube) -> None:
    """Loses or doubles messages: concurrent producers wrote their frames in another order than their offsets."""
    order = [1, 0, 3, 2, 4, 7, 6, 5, 8, 11, 10, 9]
    assert danube.import_wal(frames(order[:8]), frames(order[8:])).code == 0
    assert danube.values == numbered(*range(12))
    assert danube.import_wal(frames(order[:8]), frames(order[8:])).code == 0


def test_12_a_swap_right_after_a_restart(danube: Danube) -> None:
    """Makes a gap that never was: the first two frames of a new life are swapped."""
    lives = frames(range(5)) + frames([1, 0, *range(2, 9)], life=" again")
    assert danube.import_wal(lives, options=RENUMBER).code == 0
    assert list(danube.values.values())[5:] == [b"message %d again" % n for n in range(9)]


def test_13_a_bad_checksum_stops_the_import(danube: Danube) -> None:
    """Swallows everything behind a damaged message: a bad checksum was taken for the end."""
    start = len(frames(range(20)))
    result = danube.import_wal(flipped(frames(range(40)), start + 30), frames(range(40, 50)))
    assert result.code == 5
    assert f"offset 20 cannot be read, there is a checksum that does not match at byte {start} of " in result.err
    assert "--on-damage skip" in result.err
    assert danube.values == numbered(*range(20))


MASKS = (0x01, 0x10, 0x40, 0x80)
BYTES = (0, 3, 7, 8, 10, 11, 12, 40)


@pytest.mark.parametrize(
    ("byte", "mask"),
    [
        pytest.param(byte, mask, marks=() if number % 4 == number_of_mask else pytest.mark.long)
        for number, byte in enumerate(BYTES)
        for number_of_mask, mask in enumerate(MASKS)
    ],
)
def test_13_everything_but_the_damaged_message_can_be_imported(danube: Danube, byte: int, mask: int) -> None:
    """Loses good messages with a bad one: whichever byte of a frame is damaged, only that message is marked as lost."""
    start = len(frames(range(20)))
    contents = flipped(frames(range(40)), start + byte, mask), frames(range(40, 50))
    result = danube.import_wal(*contents, options=(*SKIP, "--json"))
    assert result.code == 0, result.err
    assert (result.json[0]["skipped"], result.json[0]["lost"]) == (1, [[20, 20]])
    assert danube.values == numbered(*range(20), *range(21, 50))
    assert danube.cli("consume", TOPIC).code == 5
    assert danube.cli("verify").code == 0
    again = danube.import_wal(*contents, options=(*SKIP, "--json"))
    assert (again.code, again.json[0]["messages"], again.json[0]["lost"]) == (0, 0, [[20, 20]])


def test_13_missing_messages_stop_the_import(danube: Danube) -> None:
    """Closes a gap in silence: a file in the middle is gone."""
    result = danube.import_wal(frames(range(20)), frames(range(30, 40)))
    assert result.code == 5
    assert "offsets 20 to 29 missing before byte 0 of " in result.err
    skipped = danube.import_wal(frames(range(20)), frames(range(30, 40)), options=SKIP)
    assert skipped.code == 0
    assert "10 messages of default/orders marked as lost: offsets 20 to 29" in skipped.err
    assert danube.values == numbered(*range(20), *range(30, 40))


def test_13_what_an_object_misses_is_taken_from_the_wal(danube: Danube) -> None:
    """Loses messages that are still there: an export has a gap or damage, the WAL has the messages."""
    start = len(frames(range(10, 15)))
    write_wal(danube.wal, frames(range(5, 30)), frames(range(30, 50)))
    write_objects(
        danube.store,
        [
            (0, 1, frames(range(10))),
            (10, 2, flipped(frames(range(10, 20)), start + 30)),
            (25, 3, frames(range(25, 40))),
        ],
    )
    result = danube.cli("import", "danube", "--wal", danube.wal, "--objects", danube.store.as_uri())
    assert result.code == 0, result.err
    assert danube.values == numbered(*range(50))


def test_13_a_wal_of_another_life_fills_no_gap(danube: Danube) -> None:
    """Takes a message of another life: the WAL has the offsets that an object misses, and other messages."""
    write_wal(danube.wal, frames(range(50), life=" again"))
    write_objects(danube.store, [(0, 1, frames(range(10))), (15, 3, frames(range(15, 40)))])
    result = danube.cli("import", "danube", "--wal", danube.wal, "--objects", danube.store.as_uri())
    assert (result.code, "offset 0 occurs twice" in result.err) == (5, True)
    assert danube.values == numbered(*range(10))


def test_13_a_message_that_cannot_be_understood(danube: Danube) -> None:
    """Loses what a newer Danube adds: a message with an unknown field is refused by name, or marked as lost."""
    newer = encode(3, encode_message(sent(3)) + b"\x01new")
    contents = frames(range(3)) + newer + frames(range(4, 8))
    result = danube.import_wal(contents)
    assert result.code == 5
    assert "4 bytes after the last known field" in result.err
    assert danube.import_wal(contents, options=SKIP).code == 0
    assert danube.values == numbered(0, 1, 2, 4, 5, 6, 7)


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 60])
def test_a_torn_tail_is_left_out_and_told(danube: Danube, kept: int) -> None:
    """Hides that a message is gone: the last write before a crash is incomplete."""
    whole = frames(range(20))
    result = danube.import_wal(whole + frame(20)[:kept])
    assert result.code == 0, result.err
    assert f"torn tail: {danube.wal / 'wal.log'}, byte {len(whole)}: " in result.err
    assert danube.values == numbered(*range(20))
    assert danube.import_wal(whole + frame(20)).code == 0
    assert danube.values == numbered(*range(21))


def test_a_lone_offset_far_ahead_makes_no_gap(danube: Danube) -> None:
    """Fills the disk with lost messages: a flipped bit in an offset looks like billions of missing ones."""
    alone = encode(20 + (1 << 44), encode_message(msgspec.structs.replace(sent(20), topic_offset=0)))
    contents = frames(range(20)) + alone + frames(range(21, 40))
    assert danube.import_wal(contents).code == 5
    result = danube.import_wal(contents, options=(*SKIP, "--json"))
    assert (result.code, result.json[0]["lost"]) == (0, [[20, 20]])
    assert danube.values == numbered(*range(20), *range(21, 40))
    assert any("does not belong there" in place["reason"] for place in result.json[0]["damaged"])


def test_a_gap_that_cannot_be_true_is_refused(danube: Danube) -> None:
    """Fills the disk with lost messages: two frames that agree on an offset far ahead are believed, and refused."""
    result = danube.import_wal(frames(range(5)) + frames([1 << 40, (1 << 40) + 1]), options=SKIP)
    assert result.code == 5
    assert "too many to be marked as lost" in result.err


def test_an_offset_that_is_damaged_in_the_first_frame(danube: Danube) -> None:
    """Begins the topic at an offset that never was: the first header is damaged."""
    contents = flipped(frames(range(7, 40)), 5)
    assert danube.import_wal(contents).code == 5
    assert danube.import_wal(contents, options=SKIP).code == 0
    assert danube.values == numbered(*range(8, 40))


def test_messages_that_hold_frames_are_not_taken_for_the_log(danube: Danube) -> None:
    """Imports messages that nobody sent: a damaged message carries a copy of a log inside."""
    inner = frame(6, b"x" * 50 + frames(range(7, 12), life=" inside"))
    start = len(frames(range(6)))
    contents = flipped(frames(range(6)) + inner + frames(range(7, 12)), start + 20)
    assert danube.import_wal(contents, options=SKIP).code == 0
    assert danube.values == numbered(*range(6), *range(7, 12))


def test_times_stay_as_they_were(danube: Danube) -> None:
    """Moves history to today: the time of a message is when it was published, not when it was imported."""
    danube.import_wal(frames(range(3)))
    result = danube.cli("consume", TOPIC, "--format", r"%T\n")
    assert result.lines == [str(PUBLISHED_MS + n) for n in range(3)]


@pytest.mark.parametrize("first", [2**63 - 3, 2**63 - 1, 2**63 + 5])
def test_offsets_that_no_message_can_have_are_named(danube: Danube, first: int) -> None:
    """Fails the whole topic when they come to be written, after what is before them was accepted."""
    result = danube.import_wal(frames(range(first, first + 3)))
    assert result.code == 5
    byte = 2 * len(frame(first)) if first == 2**63 - 3 else 0
    assert f"the last that a message may have is {2**63 - 2}, at byte {byte} of {danube.wal / 'wal.log'}" in result.err


# Objects of Danube 0.5 to 0.8, below objects/


def test_objects_of_several_versions_that_overlap_are_used_once(danube: Danube) -> None:
    """Doubles messages: older and newer objects of one bucket number the same offsets."""
    danube.write_older(
        (0, 9, older_frames(range(10))),
        (8, 14, older_frames(range(8, 15))),
        (15, 1_770_000_000, frames(range(15, 25))),
    )
    result = danube.import_objects((12, 1_780_000_000, older_frames(range(12, 15)) + frames(range(15, 30))))
    assert result.code == 0, result.err
    assert danube.values == numbered(*range(30))
    again = danube.import_objects(options=("--json",))
    assert (again.json[0]["already_there"], again.json[0]["messages"]) == (30, 0)


@pytest.mark.parametrize("folder", ["segments", "objects"])
def test_older_and_newer_objects_that_disagree_are_refused(danube: Danube, folder: str) -> None:
    """Takes the wrong one of two messages: a newer Danube did not see older objects, and began again at 0."""
    danube.write_older((0, 19, older_frames(range(20))))
    write_objects(danube.store, [(0, 1_700_000_000, frames(range(5), life=" again"))], folder=folder)
    refused = danube.import_objects()
    assert refused.code == 5
    assert "offset 0 occurs twice" in refused.err
    assert f"byte 0 of storage/topics/default/orders/{folder}/data-0-1700000000.dnb1" in refused.err
    assert danube.import_objects(options=RENUMBER).code == 0
    assert danube.values == numbered(*range(20)) | {20 + n: b"message %d again" % n for n in range(5)}


@pytest.mark.parametrize("kept", ["0 frames", "7 frames", "7 frames and a half"])
def test_an_older_object_that_was_cut_is_told_by_its_name(danube: Danube, kept: str) -> None:
    """Loses the newest messages in silence: the last object is cut, maybe at the end of a frame."""
    cut = {"0 frames": b"", "7 frames": older_frames(range(10, 17))}.get(kept, older_frames(range(10, 18))[:-20])
    danube.write_older((0, 9, older_frames(range(10))), (10, 19, cut))
    first = 10 if kept == "0 frames" else 17
    byte = len(older_frames(range(10, first)))
    result = danube.import_objects()
    assert result.code == 5
    assert f"offsets {first} to 19 cannot be read, there is " in result.err
    assert f"byte {byte} of storage/topics/default/orders/objects/data-10-19.dnb1" in result.err
    assert danube.values == numbered(*range(first))
    skipped = danube.import_objects(options=(*SKIP, "--json"))
    assert (skipped.json[0]["lost"], skipped.json[0]["damages"]) == ([[first, 19]], 1)
    again = danube.import_objects(options=(*SKIP, "--json"))
    assert (again.json[0]["lost"], again.json[0]["messages"]) == ([[first, 19]], 0)
    assert danube.cli("verify").code == 0


def test_what_a_cut_object_misses_is_taken_from_elsewhere(danube: Danube) -> None:
    """Loses messages that are still there: the last object is cut, and another one or the WAL has its end."""
    danube.write_older((0, 9, older_frames(range(10))), (10, 19, older_frames(range(10, 12))))
    write_wal(danube.wal, older_frames(range(11, 22)) + frames(range(22, 25)))
    result = danube.cli("import", "danube", "--wal", danube.wal, "--objects", danube.store.as_uri())
    assert result.code == 0, result.err
    assert danube.values == numbered(*range(25))


def test_a_topic_of_which_nothing_can_be_read(danube: Danube) -> None:
    """Takes a topic for an empty one: its only object is empty, and its name says that there was something."""
    danube.write_older((5, 9, b""))
    result = danube.import_objects()
    assert (result.code, "offset 9 cannot be read" in result.err) == (5, True)
    assert danube.import_objects(options=SKIP).code == 0
    assert danube.cli("topic", "list", "--json").json == []


def test_missing_and_damaged_older_objects_stop_the_import(danube: Danube) -> None:
    """Closes a gap in silence: an object is gone, and one has a damaged message."""
    danube.write_older((0, 9, older_frames(range(10))), (15, 19, older_frames(range(15, 20))))
    gone = danube.import_objects()
    assert (gone.code, "offsets 10 to 14 missing before byte 0 of " in gone.err) == (5, True)
    start = len(older_frames(range(10, 12)))
    danube.write_older((0, 9, older_frames(range(10))), (10, 14, flipped(older_frames(range(10, 15)), start + 40)))
    damaged = danube.import_objects()
    assert (
        damaged.code,
        f"offset 12 cannot be read, there is a checksum that does not match at byte {start}" in damaged.err,
    ) == (5, True)


def test_lives_in_objects_without_a_time_are_told_apart_by_the_store(danube: Danube) -> None:
    """Mixes the lives of a topic: Danube 0.5.0 began at 0 with each start, and its names have no time."""
    danube.write_older(
        (0, 49, older_frames(range(50))),
        (50, 20, older_frames(range(50, 60)) + older_frames(range(21), life=" again")),
        (21, 40, older_frames(range(21, 41), life=" again")),
        (10, 45, older_frames(range(10, 46), life=" again")),
        (0, 9, older_frames(range(10), life=" once more")),
    )
    assert danube.import_objects().code == 5
    result = danube.import_objects(options=RENUMBER)
    assert result.code == 0, result.err
    expected = numbered(*range(60))
    expected |= {60 + n: b"message %d again" % n for n in range(46)}
    expected |= {106 + n: b"message %d once more" % n for n in range(10)}
    assert danube.values == expected


def test_a_life_that_was_cut_ends_where_its_objects_say(danube: Danube) -> None:
    """Hides that messages are gone: behind a cut object, the next life takes their offsets."""
    danube.write_older((0, 9, older_frames(range(8))))
    newer = (0, 1_780_000_000, frames(range(5), life=" again"))
    refused = danube.import_objects(newer, options=RENUMBER)
    assert (refused.code, "offsets 8 to 9 cannot be read" in refused.err) == (5, True)
    assert danube.import_objects(newer, options=(*RENUMBER, *SKIP)).code == 0
    assert danube.values == numbered(*range(8)) | {10 + n: b"message %d again" % n for n in range(5)}


def test_lives_in_a_copy_of_the_store_are_refused(danube: Danube) -> None:
    """Mixes the lives of a topic: a copy of the bucket has the times of the copying."""
    danube.write_older(
        (0, 49, older_frames(range(50))),
        (50, 99, older_frames(range(50, 100), life=" again")),
        (0, 48, older_frames(range(49), life=" again")),
        (50, 90, older_frames(range(50, 91))),
    )
    result = danube.import_objects(options=(*RENUMBER, *SKIP))
    assert result.code == 5
    assert "which life of the topic was first" in result.err
    assert "byte 0 of storage/topics/default/orders/objects/data-0-48.dnb1" in result.err


def test_an_upload_that_was_not_finished_is_named(danube: Danube) -> None:
    """Brings back messages whose offsets were given away since: Danube never reads what it did not finish."""
    danube.write_older((0, 9, older_frames(range(10))), (5, "pending", older_frames(range(5, 15), life=" of yore")))
    name = "storage/topics/default/orders/objects/data-5-pending.dnb1"
    result = danube.import_objects()
    assert (result.code, f"left out: {name}, an upload that Danube did not finish" in result.err) == (0, True)
    assert danube.values == numbered(*range(10))
    assert danube.import_objects(options=("--json",)).json[0]["unfinished"] == [name]


def test_a_message_that_fits_in_two_ways_is_refused(danube: Danube) -> None:
    """Imports a message that nobody sent: its bytes are one in bincode 1 and another one in bincode 2."""
    both = (63 << 40).to_bytes(8, "little") + bytes(65)
    danube.write_older((0, 5, encode(0, both) + older_frames(range(1, 6))))
    result = danube.import_objects()
    assert result.code == 5
    assert "ambiguous which was sent" in result.err
    assert "byte 16 of storage/topics/default/orders/objects/data-0-5.dnb1" in result.err
    assert danube.import_objects(options=SKIP).code == 0
    assert danube.values == numbered(*range(1, 6))
