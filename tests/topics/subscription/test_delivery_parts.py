"""The parts of delivery on their own: settled ranges, rings of consumers, rate limits, waiting rooms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.clock import to_datetime
from tidelog.cold.cursor import Cursor
from tidelog.store.document import encode_json
from tidelog.store.metadata.base import MAX_VALUE_BYTES
from tidelog.topics.subscription.delivery import MAX_HOLES, DeliveryState
from tidelog.topics.subscription.options import Now, RateLimit, WaitingRoom, parse_options
from tidelog.topics.subscription.queue import Delivery, HashRing, KeyQueues, OpenQueue, Progress

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=20)


def settled_offsets(progress: Progress) -> set[int]:
    return {offset for offset in range(100) if progress.is_settled(offset)}


@given(floor=st.integers(0, 10), spans=spans)
def test_progress_is_a_set_of_offsets(floor: int, spans: list[tuple[int, int]]) -> None:
    """Whatever is settled in whatever order, it remembers exactly that, in as few ranges as there are holes."""
    progress, model = Progress(floor), set(range(floor))
    for start, length in spans:
        if length == 1:
            assert progress.settle(start) == (start not in model)
        else:
            progress.settle_range(start, start + length)
        model |= set(range(start, start + length))
    assert settled_offsets(progress) == model
    assert progress.floor not in model
    assert set(range(progress.floor)) <= model
    assert progress.settled_above == len([offset for offset in model if offset > progress.floor])
    starts = [start for start, _ in progress.ranges]
    assert starts == [offset for offset in sorted(model) if offset > progress.floor and offset - 1 not in model]


@given(spans=spans, limit=st.integers(0, 80))
def test_clipped_progress_forgets_what_is_above(spans: list[tuple[int, int]], limit: int) -> None:
    """What is stored never says more than is durable."""
    progress = Progress(0)
    for start, length in spans:
        progress.settle_range(start, start + length)
    clipped = progress.clipped(limit)
    assert settled_offsets(clipped) == {offset for offset in settled_offsets(progress) if offset < limit}


def test_a_consumer_that_joins_or_leaves_moves_only_its_own_keys() -> None:
    """Consistent hashing: the others keep what they have."""
    keys = [b"key-%d" % number for number in range(2000)]
    before, after = HashRing(["a", "b", "c"]), HashRing(["a", "b", "c", "d"])
    moved = [key for key in keys if before.owner(key) != after.owner(key)]
    assert {after.owner(key) for key in moved} == {"d"}
    assert 200 < len(moved) < 900
    shares = [sum(before.owner(key) == name for key in keys) for name in ("a", "b", "c")]
    assert min(shares) > 300


def test_a_key_stays_until_nothing_of_it_is_left_at_its_consumer() -> None:
    """A consumer that joins gets a key only when the old one has settled all that it had of it."""
    queues = KeyQueues()
    queues.set_consumers(["a"])
    keys = [b"key-%d" % number for number in range(50)]
    ring = HashRing(["a", "b"])
    moving = next(key for key in keys if ring.owner(key) == "b")
    first, second = (Delivery(b"", key=moving, offset=offset) for offset in (0, 1))
    queues.add([first, second])
    assert queues.take("a", 1) == [first]
    queues.set_consumers(["a", "b"])
    assert queues.take("b", 5) == []
    queues.released(first)
    assert queues.take("a", 5) == []
    assert queues.take("b", 5) == [second]


def test_what_came_back_goes_first() -> None:
    """In order of offsets, before what was never handed out."""
    queue = OpenQueue()
    messages = [Delivery(b"", offset=offset) for offset in range(6)]
    queue.add(messages[4:])
    for offset in (3, 1, 2):
        queue.put_back(messages[offset])
    queue.discard(2)
    assert [message.offset for message in queue.take("a", 3)] == [1, 3, 4]


def test_a_message_that_becomes_due_waits_for_older_ones_that_were_read_with_it() -> None:
    """Order of offsets holds among what is ready: nothing that was never handed out is left behind what was."""
    queue = OpenQueue()
    queue.add([Delivery(b"", offset=offset) for offset in (0, 1, 3)])
    queue.put_back(Delivery(b"", offset=2))
    assert [message.offset for message in queue.take("a", 3)] == [0, 1, 2]
    assert queue.unseen_from == 3


@pytest.mark.parametrize("kind", ["exclusive", "failover"])
def test_a_cumulative_acknowledgement_settles_nothing_that_was_not_handed_out(kind: str) -> None:
    """A delayed message among older ones that were read with it becomes due: older ones came first, and all is settled
    that came, nothing else, and once."""
    state = DeliveryState(parse_options({"kind": kind, "max_unacked": 4}), Progress(0))
    holder = state.join("a")
    due = to_datetime(1_000_000)
    messages = [Delivery(b"", offset=offset, deliver_at=due if offset == 2 else None) for offset in range(4)]
    state.feed(messages, 4, Now(0, 0))
    now = Now(2_000_000, 0)
    first = state.take(holder, 1, now)
    state.ack_below(holder, first[0].offset + 1)
    assert [message.offset for message in first] == [0]
    assert [message.offset for message in state.take(holder, 2, now)] == [1, 2]
    state.ack_below(holder, 3)
    assert (state.progress.floor, state.progress.ranges) == (3, [])
    assert [message.offset for message in state.take(holder, 5, now)] == [3]


def test_an_acknowledgement_from_before_two_seeks_settles_nothing() -> None:
    """What a consumer had before the subscription was moved is to come again, also when it is moved once more."""
    state = DeliveryState(parse_options({"kind": "shared"}), Progress(0))
    holder, messages = state.join("a"), [Delivery(b"", offset=offset) for offset in range(3)]
    state.feed(messages, 3, Now(0, 0))
    assert len(state.take(holder, 3, Now(0, 0))) == 3
    for _ in range(2):
        state.move_to(0)
    assert not state.ack(holder, 1)
    assert not state.ack(holder, 1)
    state.feed(messages, 3, Now(0, 0))
    assert state.take(holder, 3, Now(0, 0)) == messages


def test_an_acknowledgement_after_a_seek_counts_once_the_message_came_again() -> None:
    """Also when it timed out in between, as any other that is late."""
    state = DeliveryState(parse_options({"kind": "shared", "ack_timeout_seconds": 5.0}), Progress(0))
    holder, messages = state.join("a"), [Delivery(b"", offset=0)]
    state.feed(messages, 1, Now(0, 0))
    state.take(holder, 1, Now(0, 0))
    state.move_to(0)
    state.feed(messages, 1, Now(0, 0))
    assert state.take(holder, 1, Now(0, 0)) == messages
    state.tick(Now(0, 6_000_000))
    assert state.ack(holder, 0)
    assert state.take(holder, 1, Now(0, 6_000_000)) == []


def test_a_rate_limit_counts_over_time() -> None:
    """So many a second, with a small burst, however often it is asked."""
    rate, sent = RateLimit(50), 0
    for step in range(1001):
        count = rate.available(step * 10_000)
        rate.spend(count)
        sent += count
    assert 500 <= sent <= 506


def test_the_waiting_room_forgets_who_left_early() -> None:
    """A message that was settled while it waited does not come."""
    room = WaitingRoom()
    for offset, due_us in ((0, 30), (1, 10), (2, 20)):
        room.add(Delivery(b"", offset=offset), due_us)
    assert room.remove(1) is not None
    assert [waiting.message.offset for waiting in room.take_due(25)] == [2]
    assert (len(room), room.next_due_us) == (1, 30)


def test_options_have_the_documented_defaults() -> None:
    """The guide and the design speak of these numbers."""
    options = parse_options({})
    assert (options.kind, options.max_unacked, options.ack_timeout_seconds) == ("exclusive", 1000, None)
    assert (options.progress_flush_interval_seconds, options.progress_min_offset_delta) == (5, 1000)


def test_reading_pauses_before_the_position_has_too_many_holes() -> None:
    """What could not be stored is not handed out: no acknowledgement is ever forgotten."""
    state = DeliveryState(parse_options({"kind": "shared", "max_unacked": 10_000}), Progress(0))
    holder = state.join("a")
    due = to_datetime(10_000_000)
    while state.wants_more(holder):
        first = state.read_offset
        state.feed(
            [
                Delivery(b"", offset=offset, deliver_at=due if offset % 2 else None)
                for offset in range(first, first + 1000)
            ],
            first + 1000,
            Now(0, 0),
        )
        for message in state.take(holder, 1000, Now(0, 0)):
            state.ack(holder, message.offset)
    assert state.progress.range_count <= MAX_HOLES
    assert len(encode_json(Cursor(offset=0, epoch=1, moved_us=0, acked=tuple(state.progress.ranges)))) < MAX_VALUE_BYTES
    late = state.take(holder, 10_000, Now(20_000_000, 0))
    assert late
    for message in late:
        state.ack(holder, message.offset)
    assert state.wants_more(holder)
