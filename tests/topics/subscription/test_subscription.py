"""Subscriptions on real topics: kinds, positions, acknowledgements, time, seeks, filters and dead letters."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.clock import ManualClock
from tidelog.errors import ClosedError, ConflictError, DataError, FencedError, GapError, InputError, NotFoundError
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.topic import Topic

NAME = "shop/orders"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Iterator[LogDirectory]:
    with LogDirectory(tmp_path / "data", clock=clock) as opened:
        yield opened


@pytest.fixture
def topic(log: LogDirectory) -> Topic:
    return log.topic(NAME)


def fill(topic: Topic, count: int, first: int = 0) -> None:
    topic.append_many([b"%d" % number for number in range(first, first + count)])


def offsets(sub: Consumer, count: int = 100) -> list[int]:
    """What it gets now."""
    return [message.offset for message in sub.receive_many(count, timeout=0)]


# Positions


def test_a_new_subscription_begins_at_the_earliest_message(topic: Topic) -> None:
    """Nothing that is in the topic is skipped unless that is asked for."""
    fill(topic, 3)
    assert offsets(topic.subscribe("billing")) == [0, 1, 2]


@pytest.mark.parametrize(("start", "expected"), [("latest", []), ("earliest", [0, 1, 2]), (2, [2])])
def test_a_new_subscription_begins_where_it_is_told(topic: Topic, start: Any, expected: list[int]) -> None:
    """The start is that of the moment of the call."""
    fill(topic, 3)
    assert offsets(topic.subscribe("billing", start=start)) == expected


def test_a_new_subscription_begins_at_a_time(topic: Topic, clock: ManualClock) -> None:
    """Messages of that time and later are its own."""
    fill(topic, 2)
    clock.advance(10)
    moment = datetime.fromtimestamp(clock.now_us() / 1e6, UTC)
    fill(topic, 2)
    assert offsets(topic.subscribe("billing", start=moment)) == [2, 3]


def test_the_start_counts_only_once(topic: Topic) -> None:
    """A subscription that exists goes on where it was."""
    fill(topic, 3)
    with topic.subscribe("billing") as sub:
        sub.ack(sub.receive(0) or 0)
    assert offsets(topic.subscribe("billing", start="latest")) == [1, 2]


def test_acknowledged_messages_do_not_come_again_after_a_clean_close(tmp_path: Path) -> None:
    """Those in the middle are remembered as well as those at the front."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        fill(topic, 10)
        sub = topic.subscribe("billing", "shared")
        for offset in offsets(sub):
            if offset in (0, 1, 4, 5, 8):
                sub.ack(offset)
    with tidelog.open(tmp_path) as log:
        assert offsets(log.topic(NAME).subscribe("billing", "shared")) == [2, 3, 6, 7, 9]


def test_a_subscription_is_stored_when_it_is_made(tmp_path: Path) -> None:
    """A process that is killed at once leaves a subscription that begins where it was made."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        fill(topic, 3)
        topic.subscribe("billing", start="latest")
        assert topic.subscription_info("billing").offset == 3


def test_the_position_is_stored_after_enough_messages(topic: Topic) -> None:
    """A long run is not only stored by time."""
    fill(topic, 50)
    topic.flush()
    sub = topic.subscribe("billing", progress_min_offset_delta=10, progress_flush_interval_seconds=3600)
    sub.ack_many(sub.receive_many(50))
    deadline = time.monotonic() + 120
    while topic.statistics().subscriptions[0].stored_offset < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert topic.statistics().subscriptions[0].stored_offset == 50


def test_a_position_is_never_stored_beyond_what_is_durable(topic: Topic) -> None:
    """After a crash of the machine offsets are used again: a position beyond them would skip messages."""
    sub = topic.subscribe("billing")
    fill(topic, 5)
    sub.ack_many(sub.receive_many(5))
    sub._subscription.store()
    assert topic.subscription_info("billing").offset == 5
    assert sub._subscription.position.offset <= topic.durable_offset


def test_a_cursor_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """It is never taken for a new subscription."""
    with tidelog.open(tmp_path) as log:
        log.topic(NAME).subscribe("billing").close()
        metadata = log._metadata(False)
        assert metadata is not None
        metadata.put("tidelog/storage/topics/shop/orders/subscriptions/billing", b"{}")
        with pytest.raises(DataError):
            log.topic(NAME).subscribe("billing")


@pytest.mark.parametrize("store", [None, "sqlite", "bucket"])
def test_a_cursor_that_cannot_be_read_can_be_deleted(tmp_path: Path, store: str | None) -> None:
    """The remedy that the error names works, and the subscription can be made anew."""
    url = None if store is None else f"file://{tmp_path / 'store'}"
    with tidelog.open(tmp_path / "data", store=url, metadata=store) as log:
        topic = log.topic(NAME)
        topic.append(b"one")
        topic.subscribe("billing").close()
        metadata = log._metadata(False) if log._tier is None else log._tier.metadata
        assert metadata is not None
        metadata.put("tidelog/storage/topics/shop/orders/subscriptions/billing", b"{}")
        topic.delete_subscription("billing")
        assert topic.subscriptions() == []
        with topic.subscribe("billing") as again:
            assert offsets(again) == [0]
        with pytest.raises(NotFoundError):
            topic.delete_subscription("never-made")


# Kinds


def test_an_exclusive_subscription_has_one_consumer(topic: Topic) -> None:
    """The second is refused, and told who has it."""
    topic.subscribe("billing", consumer="first")
    with pytest.raises(ConflictError, match="first"):
        topic.subscribe("billing", consumer="second")


def test_failover_goes_to_the_next_when_the_first_leaves(topic: Topic) -> None:
    """What the first one had not acknowledged comes to the second, in order."""
    fill(topic, 4)
    first, second = topic.subscribe("billing", "failover"), topic.subscribe("billing", "failover")
    assert offsets(second) == []
    assert offsets(first, 3) == [0, 1, 2]
    first.ack(1)
    first.close()
    assert offsets(second) == [0, 2, 3]


def test_a_shared_subscription_divides_messages(topic: Topic) -> None:
    """Each message goes to one of the consumers."""
    fill(topic, 6)
    subs = [topic.subscribe("work", "shared") for _ in range(3)]
    got = [sub.receive(0) for _ in range(2) for sub in subs]
    assert sorted(message.offset for message in got if message is not None) == list(range(6))


def test_key_shared_keeps_a_key_with_one_consumer(topic: Topic) -> None:
    """The messages of a key go to one consumer in order, whoever asks when."""
    for number in range(60):
        topic.append(b"%d" % number, key=b"k%d" % (number % 6))
    subs = [topic.subscribe("work", "key_shared") for _ in range(3)]
    seen: dict[bytes | None, list[tuple[str, int]]] = {}
    while any(batch := [(sub, message) for sub in subs for message in sub.receive_many(4, timeout=0)]):
        for sub, message in batch:
            seen.setdefault(message.key, []).append((sub.consumer, message.offset))
            sub.ack(message)
    assert {len({consumer for consumer, _ in got}) for got in seen.values()} == {1}
    assert all([offset for _, offset in got] == sorted(offset for _, offset in got) for got in seen.values())
    assert sum(map(len, seen.values())) == 60


def test_consumers_of_one_subscription_share_its_options(topic: Topic) -> None:
    """Another option is refused while it is open."""
    topic.subscribe("work", "shared", max_unacked=5)
    with pytest.raises(ConflictError, match="max_unacked"):
        topic.subscribe("work", "shared", max_unacked=6)


# Acknowledging


def test_the_window_holds_back_new_messages(topic: Topic) -> None:
    """Only `max_unacked` messages are out at a time."""
    fill(topic, 5)
    sub = topic.subscribe("billing", max_unacked=2)
    assert offsets(sub) == [0, 1]
    assert sub.receive(0) is None
    sub.ack(0)
    assert offsets(sub) == [2]


def test_cumulative_acknowledgement_settles_all_before(topic: Topic) -> None:
    """One call for a whole batch."""
    fill(topic, 5)
    sub = topic.subscribe("billing")
    offsets(sub)
    sub.ack_cumulative(3)
    assert sub.lag.messages == 1
    with pytest.raises(InputError):
        topic.subscribe("work", "shared").ack_cumulative(1)


def test_a_rejected_message_comes_again_after_its_pause(topic: Topic, clock: ManualClock) -> None:
    """It says how often it came; the others go on meanwhile."""
    fill(topic, 3)
    sub = topic.subscribe("billing")
    message = sub.receive(0)
    assert message is not None
    sub.nack(message, delay=5)
    assert offsets(sub) == [1, 2]
    clock.advance(6)
    again = sub.receive(0)
    assert again is not None
    assert (again.offset, again.delivery_count) == (0, 2)


def test_the_pause_doubles(topic: Topic, clock: ManualClock) -> None:
    """A message that keeps failing comes less and less often, up to a limit."""
    fill(topic, 1)
    sub = topic.subscribe("billing", redelivery_backoff_seconds=1, redelivery_backoff_max_seconds=4)
    pauses = []
    for _ in range(5):
        message = sub.receive(0)
        assert message is not None
        sub.nack(message)
        begin = clock.now_us()
        while not sub._subscription.state.ready_count:
            clock.advance(0.5)
            sub._subscription.state.tick(sub._subscription._now())
        pauses.append((clock.now_us() - begin) / 1e6)
    assert pauses == [1, 2, 4, 4, 4]


def test_a_message_that_times_out_comes_again(topic: Topic, clock: ManualClock) -> None:
    """A consumer that says nothing loses it."""
    fill(topic, 1)
    sub = topic.subscribe("billing", ack_timeout_seconds=30)
    assert offsets(sub) == [0]
    clock.advance(29)
    assert offsets(sub) == []
    clock.advance(2)
    assert offsets(sub) == [0]


def test_what_nobody_wrote_cannot_be_acknowledged(topic: Topic) -> None:
    """An offset from elsewhere is a mistake that is told."""
    with pytest.raises(InputError, match="no message 7"):
        topic.subscribe("billing").ack(7)


# Time and place


def test_seek_goes_back_and_forth(topic: Topic) -> None:
    """All consumers go on there, and it is stored."""
    fill(topic, 5)
    sub = topic.subscribe("billing")
    sub.ack_many(sub.receive_many(5))
    sub.seek(1)
    assert offsets(sub) == [1, 2, 3, 4]
    sub.seek("latest")
    assert offsets(sub) == []
    sub.seek("earliest")
    assert topic.subscription_info("billing").offset == 0
    assert len(offsets(sub)) == 5


def test_delayed_messages_come_when_they_are_due(topic: Topic, clock: ManualClock) -> None:
    """Those behind them go on."""
    due = datetime.fromtimestamp(clock.now_us() / 1e6, UTC) + timedelta(seconds=10)
    topic.append(b"later", deliver_at=due)
    topic.append(b"now")
    sub = topic.subscribe("billing")
    assert offsets(sub) == [1]
    clock.advance(11)
    assert offsets(sub) == [0]


def test_messages_that_are_too_old_are_passed_over(topic: Topic, clock: ManualClock) -> None:
    """They are counted, and count as acknowledged."""
    fill(topic, 2)
    clock.advance(100)
    fill(topic, 1)
    sub = topic.subscribe("billing", time_to_live_seconds=50)
    assert offsets(sub) == [2]
    assert topic.statistics().subscriptions[0].expired == 2
    assert sub.lag.messages == 1


@pytest.mark.parametrize("matches", [{"kind": b"a"}, lambda message: message.headers["kind"] == b"a"])
def test_a_filter_passes_over_what_does_not_match(topic: Topic, matches: Any) -> None:
    """What does not match is not lag either."""
    for kind in (b"a", b"b", b"a"):
        topic.append(b"", headers={"kind": kind})
    sub = topic.subscribe("billing", filter=matches)
    assert offsets(sub) == [0, 2]
    assert sub.lag.messages == 2


def test_lag_says_how_many_and_how_old(topic: Topic, clock: ManualClock) -> None:
    """Seconds are the age of the oldest message that is not acknowledged."""
    sub = topic.subscribe("billing")
    assert sub.lag == (0, 0.0)
    fill(topic, 2)
    clock.advance(7)
    assert sub.lag == (2, 7.0)


def test_a_lost_offset_stops_a_subscription_or_is_passed_over(topic: Topic) -> None:
    """Nothing is skipped unless that is asked for."""
    fill(topic, 1)
    topic._append_lost(1)
    fill(topic, 1)
    sub = topic.subscribe("careful")
    assert offsets(sub) == [0]
    with pytest.raises(GapError):
        sub.receive(0)
    sub.seek(2)
    assert offsets(sub) == [2]
    assert offsets(topic.subscribe("fast", on_gap="skip")) == [0, 2]


# Giving up


def test_exhausted_messages_go_to_the_dead_letters(log: LogDirectory, topic: Topic) -> None:
    """With their origin in the headers, and only they."""
    fill(topic, 2)
    sub = topic.subscribe("billing", max_deliveries=2)
    for _ in range(2):
        message = sub.receive(0)
        assert message is not None
        sub.nack(message, delay=0)
    assert offsets(sub) == [1]
    sub.ack(1)
    sub.close()
    (letter,) = log.topic("shop/orders.billing.dlq").read()
    assert letter.value == b"0"
    assert letter.headers["tidelog-origin-topic"] == b"shop/orders"
    assert letter.headers["tidelog-origin-offset"] == b"0"
    assert letter.headers["tidelog-origin-deliveries"] == b"2"
    assert topic.subscription_info("billing").offset == 2


def test_a_dead_letter_is_not_written_twice_after_a_crash(log: LogDirectory, topic: Topic) -> None:
    """It was written, and the process died before that counted as acknowledged."""
    fill(topic, 1)
    for _ in range(2):
        sub = topic.subscribe("billing", max_deliveries=1)
        before = topic._registry.cursors.load("billing")
        message = sub.receive(0)
        assert message is not None
        sub.nack(message)
        sub._subscription.bury()
        sub.close()
        assert before is not None
        topic._registry.cursors.store("billing", before)  # as if the acknowledgement had been lost
    assert len(list(log.topic("shop/orders.billing.dlq").read())) == 1


def test_exhausted_messages_can_be_dropped_or_block(topic: Topic) -> None:
    """A dropped one is settled; a blocking one holds up what must come after it until it is acknowledged."""
    fill(topic, 2)
    drop = topic.subscribe("drop", max_deliveries=1, on_exhausted="drop")
    drop.nack(drop.receive(0) or 0)
    assert offsets(drop) == [1]
    block = topic.subscribe("block", max_deliveries=1, on_exhausted="block")
    block.nack(block.receive(0) or 0)
    assert offsets(block) == []
    block.ack(0)
    assert offsets(block) == [1]


# Listing and deleting


def test_subscriptions_are_listed_described_and_deleted(topic: Topic) -> None:
    """What is deleted begins anew."""
    fill(topic, 3)
    with topic.subscribe("billing", "shared") as sub:
        sub.ack(sub.receive_many(2, timeout=0)[1])
        with pytest.raises(ConflictError):
            topic.delete_subscription("billing")
    assert topic.subscriptions() == ["billing"]
    info = topic.subscription_info("billing")
    assert (info.kind, info.offset, info.acked_above, info.lag_messages) == ("shared", 0, 1, 2)
    topic.delete_subscription("billing")
    assert topic.subscriptions() == []
    with pytest.raises(NotFoundError):
        topic.subscription_info("billing")
    sub = topic.subscribe("billing")
    assert offsets(sub) == [0, 1, 2]
    sub.unsubscribe()
    assert topic.subscriptions() == []


def test_a_topic_that_is_made_again_has_no_subscriptions(log: LogDirectory) -> None:
    """Old positions do not skip new messages."""
    topic = log.topic(NAME)
    fill(topic, 3)
    with topic.subscribe("billing") as sub:
        sub.ack_many(sub.receive_many(3))
    log.delete_topic(NAME)
    topic = log.topic(NAME)
    fill(topic, 1)
    assert offsets(topic.subscribe("billing")) == [0]


# Another owner


def test_a_subscription_moves_with_its_topic(tmp_path: Path) -> None:
    """After a seal another node goes on with what was not acknowledged, and nothing else."""
    store = f"file://{tmp_path}/store"
    with tidelog.open(tmp_path / "a", store=store, metadata="bucket") as first:
        topic = first.topic(NAME)
        fill(topic, 6)
        sub = topic.subscribe("billing", "shared")
        for offset in offsets(sub):
            if offset in (0, 2, 3):
                sub.ack(offset)
        topic.seal()
        with pytest.raises(ClosedError):
            sub.receive(0)
    with tidelog.open(tmp_path / "b", store=store, metadata="bucket") as second:
        assert offsets(second.topic(NAME).subscribe("billing", "shared")) == [1, 4, 5]


@pytest.mark.parametrize("metadata", ["sqlite", "bucket"])
def test_positions_come_along_when_a_local_directory_is_given_a_store(tmp_path: Path, metadata: str) -> None:
    """Wherever the catalog is from then on."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic(NAME)
        fill(topic, 4)
        with topic.subscribe("billing", "shared") as sub:
            assert offsets(sub, 3) == [0, 1, 2]
            sub.ack_many([0, 2])
    for _ in range(2):
        with tidelog.open(tmp_path / "data", store=f"file://{tmp_path}/store", metadata=metadata) as log:
            assert offsets(log.topic(NAME).subscribe("billing", "shared")) == [1, 3]


def test_a_fenced_owner_hands_out_nothing_and_stores_nothing(tmp_path: Path) -> None:
    """Whoever took the topic over decides from then on."""
    store = f"file://{tmp_path}/store"
    with tidelog.open(tmp_path / "a", store=store, metadata=f"sqlite://{tmp_path}/m.db") as first:
        topic = first.topic(NAME)
        fill(topic, 4)
        topic.ship()
        sub = topic.subscribe("billing")
        assert offsets(sub, 2) == [0, 1]
        with tidelog.open(tmp_path / "b", store=store, metadata=f"sqlite://{tmp_path}/m.db") as second:
            taken = second.topic(NAME, take_over=True).subscribe("billing")
            sub.ack(0)
            with pytest.raises(FencedError):
                sub.flush()
            with pytest.raises(FencedError):
                sub.receive(0)
            assert offsets(taken) == [0, 1, 2, 3]


def test_a_takeover_without_the_tail_skips_nothing(tmp_path: Path) -> None:
    """Offsets of messages that only the lost disk had are used again, and their new messages are handed out."""
    store, metadata = f"file://{tmp_path}/store", f"sqlite://{tmp_path}/m.db"
    with tidelog.open(tmp_path / "a", store=store, metadata=metadata) as first:
        topic = first.topic(NAME)
        fill(topic, 2)
        topic.ship()
        fill(topic, 3)
        with topic.subscribe("billing") as sub:
            sub.ack_many(sub.receive_many(5))
    with tidelog.open(tmp_path / "b", store=store, metadata=metadata) as second:
        topic = second.topic(NAME)
        fill(topic, 2, first=10)
        messages = topic.subscribe("billing").receive_many(5, timeout=0)
        assert [(message.offset, message.value) for message in messages] == [(2, b"10"), (3, b"11")]


def test_a_stuck_consumer_holds_up_no_other_subscription(topic: Topic) -> None:
    """One that takes a full window and never acknowledges costs the others nothing."""
    fill(topic, 100)
    stuck = topic.subscribe("stuck", max_unacked=10)
    assert len(offsets(stuck)) == 10
    assert offsets(stuck) == []
    quick = topic.subscribe("quick")
    assert offsets(quick) == list(range(100))


def test_a_filter_that_matches_nothing_does_not_hold_a_caller_for_ever(tmp_path: Path) -> None:
    """Who gave a time gets an answer soon after it, and goes on from there next time."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        for _ in range(10):
            topic.append_many([b"x"] * 1000)
        topic.flush()

        seen: list[int] = []

        def slowly(message: tidelog.Message) -> bool:
            seen.append(message.offset)
            if message.offset < 1000:
                time.sleep(0.0002)
            return message.offset == 9_999

        sub = topic.subscribe("billing", filter=slowly)
        assert sub.receive(timeout=0) is None
        assert len(seen) < 10_000
        found = sub.receive(timeout=300)
        assert found is not None
        assert found.offset == 9_999


def test_a_killed_process_loses_nothing_and_repeats_only_what_was_not_stored(tmp_path: Path) -> None:
    """What it had stored does not come again; everything else does."""
    with tidelog.open(tmp_path / "data") as log:
        fill(log.topic(NAME), 1000)
        log.topic(NAME).subscribe("billing").close()
    program = (
        "import sys, tidelog\n"
        "sub = tidelog.open(sys.argv[1]).topic('shop/orders').subscribe('billing')\n"
        "for message in sub:\n"
        "    sub.ack(message)\n"
        "    if message.offset % 50 == 49:\n"
        "        sub.flush()\n"
        "        print(message.offset, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        stored = [int(child.stdout.readline()) for _ in range(5)]
        child.kill()
        stored += [int(line) for line in child.stdout.read().split()]
    with tidelog.open(tmp_path / "data") as log:
        again = offsets(log.topic(NAME).subscribe("billing"), 10_000)
        assert again == list(range(again[0], 1000)) if again else stored[-1] == 999
        assert not again or again[0] > stored[-1]
