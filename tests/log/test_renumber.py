"""Frames with other offsets: the same payloads, and the C kernel and its twin agree about everything else too."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log.test_frame import ANY_INT, OFFSETS, PAYLOADS, assert_twins_agree

from tidelog.errors import InputError
from tidelog.log.frame import Frames, Stop, encode_many, scan

ARRAYS = st.binary(max_size=40)


@given(OFFSETS, OFFSETS, PAYLOADS, st.binary(max_size=20), st.binary(max_size=20))
def test_renumbered_frames_are_those_of_the_payloads(
    old: int, new: int, payloads: list[bytes], before: bytes, behind: bytes
) -> None:
    """Whatever lies around them in their buffer."""
    frames = encode_many(old, payloads)
    wrapped, _, _ = scan(before + frames.buffer + behind, len(before), old)
    taken = wrapped.slice(0, len(payloads))
    assert_twins_agree("renumber", taken.buffer, taken.positions, taken.lengths, new)
    assert taken.renumbered(new) == encode_many(new, payloads)


@given(OFFSETS, PAYLOADS, st.integers(0, 12), st.integers(0, 12))
def test_some_of_them_can_be_renumbered(new: int, payloads: list[bytes], start: int, stop: int) -> None:
    """A slice has the buffer of all."""
    some = encode_many(0, payloads).slice(start, stop)
    assert some.renumbered(new) == encode_many(new, payloads[start:stop])


@given(OFFSETS, OFFSETS, st.binary(min_size=1, max_size=90), st.integers(0, 7), st.data())
def test_a_damaged_frame_stays_damaged(old: int, new: int, payload: bytes, bit: int, data: st.DataObject) -> None:
    """The new checksum follows from the old one: what did not match before does not match after."""
    frames = encode_many(old, [payload])
    byte = data.draw(st.integers(12, len(frames.buffer) - 1))
    broken = bytearray(frames.buffer)
    broken[byte] ^= 1 << bit
    moved = Frames(old, bytes(broken), frames.positions, frames.lengths).renumbered(new)
    assert scan(moved.buffer, 0, new).stop is Stop.BAD_CRC


@given(st.binary(max_size=60), ARRAYS, ARRAYS, ANY_INT)
def test_the_twins_agree_about_nonsense(buffer: bytes, positions: bytes, lengths: bytes, first: int) -> None:
    """Arrays of any bytes lead nowhere outside the buffer."""
    assert_twins_agree("renumber", buffer, positions, lengths, first)


@pytest.mark.parametrize("first", [-1, (1 << 64) - 1, 1 << 64])
def test_offsets_that_cannot_be_are_refused(first: int) -> None:
    """Two frames need two offsets."""
    frames: Any = encode_many(0, [b"a", b"b"])
    with pytest.raises(InputError):
        frames.renumbered(first)
    assert_twins_agree("renumber", frames.buffer, frames.positions, frames.lengths, first)


def test_frames_that_are_not_side_by_side_are_refused() -> None:
    """A copy of what is between them would not be frames."""
    frames = encode_many(0, [b"a", b"b", b"c"])
    positions, lengths = frames.positions[:8] + frames.positions[16:], frames.lengths[:8]
    assert assert_twins_agree("renumber", frames.buffer, positions, lengths, 0)[1] is ValueError
