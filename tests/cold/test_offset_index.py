"""The sparse index of an object: true boundaries, close enough to each other, and never too many."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples

from tidelog.cold import upload as offset_index
from tidelog.cold.upload import EVERY_BYTES, EVERY_MESSAGES, MAX_ENTRIES, OffsetIndexBuilder
from tidelog.log.frame import HEADER_BYTES, encode_many

FIRST = 10_000


def built(chunks: list[list[int]]) -> tuple[tuple[tuple[int, int], ...], dict[int, int]]:
    """The index over chunks of payloads of these sizes, and where each offset really begins."""
    builder, offset, base, places = OffsetIndexBuilder(), FIRST, 0, {}
    for sizes in chunks:
        frames = encode_many(offset, [b"x" * size for size in sizes])
        builder.add_frames(frames, base)
        starts = accumulate((HEADER_BYTES + size for size in sizes), initial=base)
        places.update({offset + number: start for number, start in enumerate(list(starts)[:-1])})
        offset, base = frames.next_offset, base + frames.end
    return builder.entries(), places


def gaps_are_allowed(entries: tuple[tuple[int, int], ...], places: dict[int, int], end: tuple[int, int]) -> bool:
    """An entry stands where the first of the two limits is reached, and not before."""
    for (offset, position), (next_offset, next_position) in pairwise([*entries, end]):
        is_due = next_offset - offset >= offset_index.EVERY_MESSAGES or next_position - position >= (
            offset_index.EVERY_BYTES
        )
        before = next_offset - 1
        was_due = before > offset and (
            before - offset >= offset_index.EVERY_MESSAGES or places[before] - position >= offset_index.EVERY_BYTES
        )
        if was_due or (not is_due and (next_offset, next_position) != end):
            return False
    return True


@settings(max_examples=examples(80))
@given(
    chunks=st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=30), min_size=1, max_size=8),
    every_messages=st.integers(1, 20),
    every_bytes=st.integers(20, 2000),
)
def test_entries_are_true_and_as_close_as_asked_for(
    chunks: list[list[int]], every_messages: int, every_bytes: int
) -> None:
    """Whatever the chunks, entries are real boundaries, the first is the object's start, each comes as soon as due."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offset_index, "EVERY_MESSAGES", every_messages)
        patch.setattr(offset_index, "EVERY_BYTES", every_bytes)
        entries, places = built(chunks)
        assert entries[0] == (FIRST, 0)
        assert all(places[offset] == position for offset, position in entries)
        end_offset = FIRST + sum(map(len, chunks))
        end = end_offset, sum(HEADER_BYTES + size for sizes in chunks for size in sizes)
        assert gaps_are_allowed(entries, places, end)


def test_the_limits_are_a_thousand_messages_and_four_mebibytes() -> None:
    """Small messages are counted, large ones are measured."""
    entries, _ = built([[1] * 1500, [1] * 1500])
    assert [offset - FIRST for offset, _ in entries] == [0, 1000, 2000]
    entries, _ = built([[1 << 20] * 9])
    assert [offset - FIRST for offset, _ in entries] == [0, 4, 8]
    assert (EVERY_MESSAGES, EVERY_BYTES) == (1000, 4 << 20)


def test_the_number_of_entries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Very many messages get a coarser index: it must fit into a descriptor."""
    monkeypatch.setattr(offset_index, "EVERY_MESSAGES", 1)
    monkeypatch.setattr(offset_index, "MAX_ENTRIES", 64)
    builder, places, entries = OffsetIndexBuilder(), dict[int, int](), tuple[tuple[int, int], ...]()
    for chunk in range(100):
        frames = encode_many(FIRST + chunk * 50, [b"x"] * 50)
        builder.add_frames(frames, chunk * 50 * 17)
        places.update({FIRST + chunk * 50 + number: (chunk * 50 + number) * 17 for number in range(50)})
        entries = builder.entries()
        assert len(entries) <= 64
        assert entries[0] == (FIRST, 0)
        assert all(places[offset] == position for offset, position in entries)
        assert entries == tuple(sorted(set(entries)))
    assert len(entries) > 30
    gaps = [b[0] - a[0] for a, b in pairwise(entries)]
    assert max(gaps) <= 4 * 5000 // 64


def test_the_bound_fits_into_a_descriptor() -> None:
    """Even with the longest numbers the index stays far below what a metadata store takes."""
    assert MAX_ENTRIES * len("[18446744073709551615,68719476736],") < 512 << 10


@settings(max_examples=examples(50))
@given(
    blocks=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 3 << 20)), min_size=1, max_size=60),
)
def test_blocks_are_entered_when_one_is_due(blocks: list[tuple[int, int]]) -> None:
    """A block gets an entry once 1000 messages or 4 MiB have passed since the last one that did."""
    builder, offset, position, expected = OffsetIndexBuilder(), FIRST, 0, list[tuple[int, int]]()
    for messages, size in blocks:
        builder.add_block(offset, position)
        if not expected or offset - expected[-1][0] >= 1000 or position - expected[-1][1] >= 4 << 20:
            expected.append((offset, position))
        offset, position = offset + messages, position + size
    assert builder.entries() == tuple(expected)


def test_an_empty_run_of_frames_adds_nothing() -> None:
    """Frames without a frame are no place to begin."""
    builder = OffsetIndexBuilder()
    builder.add_frames(encode_many(FIRST, []), 0)
    assert builder.entries() == ()
