"""Putting the runs of a Danube topic in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.danube.danube_bytes import frame, frames, older_frames

from tidelog.errors import CorruptionError
from tidelog.imports.danube.frames import Event, Run, read_frames
from tidelog.imports.danube.objects import WINDOW_BYTES, Gap, find_object_topics, in_order
from tidelog.store.urls import open_store


class Taken:
    """What comes out, as a topic would keep it."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}
        self.gaps: list[tuple[int, int]] = []

    def difference(self, run: Run) -> int | None:
        found = enumerate(run.frames.payloads(), run.first_offset)
        return next((n - run.first_offset for n, payload in found if self.payloads.get(n) != payload), None)

    def take(self, events: list[Event], *, renumber: bool = False) -> None:
        for step in in_order(events, self.difference, renumber=renumber):
            if isinstance(step, Run):
                self.payloads |= dict(enumerate(step.frames.payloads(), step.first_offset))
            elif isinstance(step, Gap):
                self.gaps.append((step.first, step.last))


def events_of(data: bytes) -> list[Event]:
    return list(read_frames("wal.log", len(data), lambda position, size: data[position : position + size], 1 << 20))


def taken(data: bytes, *, renumber: bool = False) -> Taken:
    result = Taken()
    result.take(events_of(data), renumber=renumber)
    return result


@st.composite
def shuffled_a_little(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Offsets of a log, some of them out of place by a few, some written twice."""
    first, count = draw(st.integers(0, 1000)), draw(st.integers(1, 60))
    places = [(n + draw(st.integers(0, 5)), n) for n in range(first, first + count)]
    order = [n for _, n in sorted(places)]
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(order) - 1))
        order.insert(draw(st.integers(place, len(order))), order[place])
    return first, order


@given(shuffled_a_little())
def test_a_little_disorder_is_undone(drawn: tuple[int, list[int]]) -> None:
    """Frames that are out of place or there twice come out once each, in order, with nothing missing."""
    first, order = drawn
    result = taken(frames(order))
    assert list(result.payloads) == list(range(first, max(order) + 1))
    assert result.gaps == []


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_lives_follow_each_other(lengths: list[int]) -> None:
    """With renumbering, every life of a topic comes behind the one before it, and none is lost."""
    lives = [frames(range(length), life=f" of life {n}") for n, length in enumerate(lengths)]
    result = taken(b"".join(lives), renumber=True)
    assert list(result.payloads) == list(range(sum(lengths)))
    sent = [
        payload
        for life in lives
        for event in events_of(life)
        if isinstance(event, Run)
        for payload in event.frames.payloads()
    ]
    assert list(result.payloads.values()) == sent


def test_a_second_life_is_refused() -> None:
    """Without renumbering, the byte is named where offsets are used again."""
    with pytest.raises(CorruptionError) as caught:
        taken(frames(range(10)) + frames(range(5), life=" again"))
    assert caught.value.byte == len(frames(range(10)))


def test_waiting_ends() -> None:
    """What is missing is given up once enough was read behind it: memory does not grow with the file."""
    value = b"x" * (1 << 18)
    behind = 2 * WINDOW_BYTES // len(value)
    order = [0, 1, *range(3, 3 + behind), 2]
    events = events_of(b"".join(frame(n, value) for n in order))
    result = Taken()
    with pytest.raises(CorruptionError):  # it comes after all, much too late, where a gap was told before
        result.take(events)
    assert result.gaps == [(2, 2)]
    assert max(result.payloads) > 3


def test_nothing_comes_of_nothing() -> None:
    """A file without a good frame has neither messages nor gaps."""
    result = taken(b"no frames at all, only text")
    assert (result.payloads, result.gaps) == ({}, [])


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=6), st.data())
def test_every_offset_of_a_mixed_bucket_is_taken_or_missing(parts: list[tuple[int, int]], data: st.DataObject) -> None:
    """Older and newer objects that overlap, an older one cut: what any of them has is taken, the rest is a gap."""
    older = data.draw(st.integers(0, len(parts)))
    cut = data.draw(st.integers(0, older - 1)) if older else None
    first_newer = sum(count for count, _ in parts[:older])
    store, kept, stop = open_store("memory://"), set[int](), 0
    for index, (count, overlap) in enumerate(parts):
        start, stop = max(0, stop - overlap), stop + count
        name = f"objects/data-{start}-{stop - 1}" if index < older else f"segments/data-{start}-{1_780_000_000 + index}"
        held = [(older_frames if offset < first_newer else frames)([offset]) for offset in range(start, stop)]
        if index == cut:
            whole = data.draw(st.integers(0, len(held) - 1))
            held[whole:] = [held[whole][: data.draw(st.integers(0, len(held[whole]) - 1))]]
            kept |= set(range(start, start + whole))
        else:
            kept |= set(range(start, stop))
        store.put(f"storage/topics/a/b/{name}.dnb1", b"".join(held))
    (topic,) = find_object_topics(store)
    result = Taken()
    result.take(list(topic.frames(1 << 20)))
    missing = {offset for first, last in result.gaps for offset in range(first, last + 1)}
    assert set(result.payloads) == kept
    assert missing == set(range(min(kept, default=stop - 1), stop)) - kept
