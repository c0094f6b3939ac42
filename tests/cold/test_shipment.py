"""What goes into the next object: whole files while they fit, cuts where they do not, from the place that is true."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.cold.station import DIRECTORY, FRAME_BYTES, Node, Stores

from tidelog.cold.upload import Place, UploadPlan, bytes_behind, place_of, plan_upload
from tidelog.errors import CorruptionError
from tidelog.log import LogSettings
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.directory import wal_files

FILE_BYTES = 3 * FRAME_BYTES


@pytest.fixture
def node() -> Iterator[Node]:
    """20 messages, three a file: the last file has two."""
    with Node(Stores()) as node:
        node.open_log()
        node.append(20)
        yield node


def plan(node: Node, offset: int, stop: int, max_bytes: int, resume: Place | None = None) -> UploadPlan:
    shipment = plan_upload(node.log, offset, stop, max_bytes, resume)
    assert shipment is not None
    assert shipment.first_offset == offset
    assert all(before.next_offset == behind.first_offset for before, behind in pairwise(shipment.pieces))
    return shipment


def bytes_of(node: Node, shipment: UploadPlan) -> bytes:
    return b"".join(
        node.files.read(piece.path)[BINDING_BYTES:][piece.byte : piece.end_byte] for piece in shipment.pieces
    )


def whole_log(node: Node) -> bytes:
    return b"".join(
        node.files.read(DIRECTORY / name)[BINDING_BYTES:] for _, name in wal_files(node.files.list(DIRECTORY))
    )


def test_whole_files_are_taken_while_they_fit(node: Node) -> None:
    """Two files and a half fit: two are taken, and the third waits."""
    shipment = plan(node, 0, 20, 2 * FILE_BYTES + FRAME_BYTES)
    assert (shipment.next_offset, len(shipment.pieces)) == (6, 2)
    assert shipment.raw_bytes == 2 * FILE_BYTES


def test_a_limit_that_is_reached_exactly_is_kept(node: Node) -> None:
    """Three files of exactly the limit are taken, not two."""
    assert plan(node, 0, 20, 3 * FILE_BYTES).next_offset == 9
    assert plan(node, 0, 20, 3 * FILE_BYTES - 1).next_offset == 6


def test_everything_fits_into_one_object(node: Node) -> None:
    """Across all files, byte for byte what is in them."""
    shipment = plan(node, 0, 20, 1 << 30)
    assert (shipment.next_offset, shipment.raw_bytes) == (20, 20 * FRAME_BYTES)
    assert bytes_of(node, shipment) == whole_log(node)


def test_a_file_that_is_too_large_is_cut_between_frames(node: Node) -> None:
    """The first file alone is over the limit: as many messages as fit."""
    shipment = plan(node, 0, 20, 2 * FRAME_BYTES + 5)
    assert (shipment.next_offset, shipment.raw_bytes) == (2, 2 * FRAME_BYTES)
    rest = plan(node, 2, 20, 2 * FRAME_BYTES + 5, shipment.end)
    assert (rest.next_offset, rest.pieces[0].byte) == (3, 2 * FRAME_BYTES)


def test_the_rest_of_a_cut_file_is_joined_by_the_next(node: Node) -> None:
    """An object that begins in the middle of a file goes on across files."""
    shipment = plan(node, 2, 20, FRAME_BYTES + FILE_BYTES)
    assert shipment.next_offset == 6
    assert [piece.byte for piece in shipment.pieces] == [2 * FRAME_BYTES, 0]


@pytest.mark.parametrize("max_bytes", [1, FRAME_BYTES - 1, FRAME_BYTES])
def test_an_object_has_one_message_at_least(node: Node, max_bytes: int) -> None:
    """A limit below the size of a message makes objects of one message each, and it goes on."""
    offset, resume = 0, None
    for expected in range(1, 21):
        shipment = plan(node, offset, 20, max_bytes, resume)
        assert shipment.next_offset == expected
        offset, resume = shipment.next_offset, shipment.end
    assert plan_upload(node.log, 20, 20, max_bytes, resume) is None


@pytest.mark.parametrize("stop", range(1, 21))
def test_a_stop_inside_a_file_ends_the_object_there(node: Node, stop: int) -> None:
    """Nothing at or above the stop is taken, wherever in a file it is."""
    shipment = plan(node, 0, stop, 1 << 30)
    assert (shipment.next_offset, shipment.raw_bytes) == (stop, stop * FRAME_BYTES)


def test_nothing_to_ship_is_none(node: Node) -> None:
    """An empty range, or a log without files, has no next object."""
    assert plan_upload(node.log, 20, 20, 1 << 30, None) is None
    assert plan_upload(node.log, 7, 7, 1 << 30, None) is None


@pytest.mark.parametrize("resume", [None, Place(4, 1, FRAME_BYTES)])
def test_a_place_that_is_true_is_used(node: Node, resume: Place | None) -> None:
    """With it or without it, the object begins at the same byte."""
    shipment = plan(node, 4, 20, 1 << 30, resume)
    assert shipment.pieces[0].byte == FRAME_BYTES


@pytest.mark.parametrize(
    "resume",
    [
        Place(4, 1, 0),
        Place(4, 1, FRAME_BYTES + 1),
        Place(4, 1, 2 * FRAME_BYTES),
        Place(4, 1, FILE_BYTES),
        Place(4, 1, FILE_BYTES + 1),
        Place(4, 1, 1 << 50),
        Place(4, 0, FRAME_BYTES),
        Place(4, 2, 0),
        Place(4, 99, 0),
        Place(3, 1, 2 * FRAME_BYTES),
        Place(5, 1, 2 * FRAME_BYTES),
    ],
)
def test_a_place_that_is_not_true_is_not_believed(node: Node, resume: Place) -> None:
    """Whatever a hint says, not a message is left out and none is shipped twice."""
    shipment = plan(node, 4, 20, 1 << 30, resume)
    assert bytes_of(node, shipment) == whole_log(node)[4 * FRAME_BYTES :]


def test_bytes_that_look_like_a_header_are_no_place() -> None:
    """A message that happens to contain the next offset where the hint points is not taken for a frame."""
    with Node(Stores(), settings=LogSettings(cache_max_messages=0, cache_max_bytes=0)) as node:
        node.open_log()
        node.log.append_many([b"first", (1).to_bytes(8, "little") * 8, b"third"], sync=True)
        hint = Place(1, 0, len(b"first") + 16 + 16)
        assert plan(node, 1, 3, 1 << 30, hint).pieces[0].byte == len(b"first") + 16


def test_a_place_spares_the_search(node: Node) -> None:
    """A true place is found by reading one header, not by scanning the file up to it."""
    big = Node(Stores(), settings=LogSettings(cache_max_messages=0, cache_max_bytes=0))
    with big:
        big.open_log()
        big.append(20)
        data = bytearray(big.files.read(DIRECTORY / "wal.0000000000.log"))
        data[FRAME_BYTES + 20] ^= 1  # damage before the place
        file = big.files.open(DIRECTORY / "wal.0000000000.log", write=True)
        file.write_at(0, bytes(data))
        file.close()
        assert plan(big, 10, 20, 1 << 30, Place(10, 0, 10 * FRAME_BYTES)).next_offset == 20
        with pytest.raises(CorruptionError):
            plan_upload(big.log, 10, 15, 10, None)


@settings(max_examples=examples(40), deadline=None)
@given(limits=st.lists(st.integers(1, 12 * FRAME_BYTES), min_size=1, max_size=30), use_resume=st.booleans())
def test_any_limits_ship_everything_once(limits: list[int], use_resume: bool) -> None:
    """One object after the other, whatever the limit of each: together they are the log, byte for byte."""
    with Node(Stores()) as node:
        node.open_log()
        node.append(17)
        offset, resume, sent, turn = 0, None, b"", 0
        while (shipment := plan_upload(node.log, offset, 17, limits[turn % len(limits)], resume)) is not None:
            limit = limits[turn % len(limits)]
            assert shipment.raw_bytes <= limit or shipment.next_offset == offset + 1
            sent += bytes_of(node, shipment)
            offset, turn = shipment.next_offset, turn + 1
            resume = shipment.end if use_resume else None
        assert offset == 17
        assert sent == whole_log(node)


def test_what_waits_is_counted_in_bytes(node: Node) -> None:
    """Exactly where the place is known or a file begins, never less where it is not."""
    assert bytes_behind(node.log, 0, None) == 20 * FRAME_BYTES
    assert bytes_behind(node.log, 6, None) == 14 * FRAME_BYTES
    assert bytes_behind(node.log, 7, Place(7, 2, FRAME_BYTES)) == 13 * FRAME_BYTES
    assert bytes_behind(node.log, 7, None) >= 13 * FRAME_BYTES
    assert bytes_behind(node.log, 20, None) == 0


def test_a_place_in_an_earlier_file_of_the_same_number_does_not_count(node: Node) -> None:
    """Bytes that wait were negative when a log had moved away and come back: its files begin again with number 1."""
    assert bytes_behind(node.log, 6, Place(6, 2, 1_000_000)) == 14 * FRAME_BYTES
    assert bytes_behind(node.log, 7, Place(7, 2, 1_000_000)) >= 13 * FRAME_BYTES


def test_the_place_of_an_offset_is_read_from_the_files(node: Node) -> None:
    """It makes what waits exact; an offset that is in no file has none."""
    parts = node.log.parts(7, 20)
    assert bytes_behind(node.log, 7, place_of(node.log.files, parts, 7)) == 13 * FRAME_BYTES
    assert place_of(node.log.files, parts, 20) is None


def test_the_end_of_one_is_the_place_of_the_next(node: Node) -> None:
    """Also where a file ends and the next one has not begun yet."""
    shipment = plan(node, 0, 20, 1 << 30)
    assert shipment.end == Place(20, 6, 2 * FRAME_BYTES)
    node.append(1)
    behind = plan(node, 20, 21, 1 << 30, shipment.end)
    assert behind.raw_bytes == FRAME_BYTES
    full = plan(node, 0, 3, 1 << 30)
    assert full.end == Place(3, 0, FILE_BYTES)
    assert plan(node, 3, 20, FILE_BYTES, full.end).pieces[0].seq == 1
