"""Reading history: whole and in order, fetching little, and saying what is missing or damaged."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.cold.cold import ColdTopic, everything, numbered
from tests.servers import EtcdServer, S3Server

from tidelog.cold.catalog import Codec, Descriptor
from tidelog.cold.reader import History, HistoryReader
from tidelog.errors import (
    CorruptionError,
    DataError,
    GapError,
    OffsetOutOfRangeError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.frame import encode_many
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store
from tidelog.testing import FaultyMetadata, FaultyStore

CODECS: tuple[Codec, ...] = get_args(Codec)
END = 1 << 64
PAYLOADS = [f"message {number} ".encode() * (1 + number % 7) for number in range(95)]


@pytest.fixture(params=CODECS)
def topic(request: pytest.FixtureRequest) -> ColdTopic:
    """95 messages in objects of 30, over a store that can be made to fail."""
    topic = ColdTopic(FaultyStore(), FaultyMetadata(), codec=request.param)
    topic.fill(PAYLOADS, 30)
    return topic


@pytest.fixture
def store(topic: ColdTopic) -> FaultyStore:
    assert isinstance(topic.objects, FaultyStore)
    return topic.objects


@pytest.fixture
def history(topic: ColdTopic) -> Iterator[History]:
    """In ranges so small that every frame and block crosses some of them."""
    with topic.history(range_bytes=64, read_ahead_ranges=2) as history:
        yield history


def drain(reader: HistoryReader, *, close: bool = True) -> tuple[list[tuple[int, bytes]], TidelogError]:
    """All that a reader gives before it raises, and what it raises."""
    found: list[tuple[int, bytes]] = []
    try:
        while (batch := reader.next_batch()) is not None:
            found += enumerate(batch.payloads(), batch.first_offset)
    except TidelogError as error:
        return found, error
    finally:
        if close:
            reader.close()
    raise AssertionError(f"nothing was raised, {len(found)} messages were read")


# In order


@pytest.mark.parametrize("range_bytes", [1, 17, 64, 1000, 4 << 20])
@pytest.mark.parametrize(("offset", "stop"), [(0, END), (0, 95), (13, 14), (29, 31), (30, 60), (59, 94), (94, 95)])
def test_messages_come_in_order_across_objects(topic: ColdTopic, range_bytes: int, offset: int, stop: int) -> None:
    """From any offset to any other, whatever the size of the ranges."""
    with topic.history(range_bytes=range_bytes) as history:
        assert everything(history.read(offset, stop)) == numbered(PAYLOADS)[offset:stop]


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_layout_reads_back(data: st.DataObject) -> None:
    """However messages are spread over objects, blocks and ranges, what was put is read."""
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=40))
    payloads = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    codec, index_every = data.draw(st.sampled_from(CODECS)), data.draw(st.integers(1, 15))
    topic = ColdTopic(FaultyStore(), FaultyMetadata(), codec=codec, index_every=index_every)
    topic.fill(payloads, data.draw(st.integers(1, 20)), first_offset=1000)
    offset = data.draw(st.integers(0, len(payloads) - 1))
    stop = data.draw(st.integers(offset, len(payloads) + 5))
    with topic.history(range_bytes=data.draw(st.integers(1, 400)), read_ahead_ranges=1) as history:
        assert everything(history.read(1000 + offset, 1000 + stop)) == numbered(payloads, 1000)[offset:stop]


def test_a_message_larger_than_a_range_is_read(topic: ColdTopic) -> None:
    """A frame over many ranges is put together from them."""
    large = [b"a" * 10, random.Random(3).randbytes(1 << 20), b"b" * 10]
    topic.publish(topic.put_object(large, 95))
    with topic.history(range_bytes=10_000) as history:
        assert everything(history.read(94, END)) == numbered([PAYLOADS[94], *large], 94)


def test_what_is_published_meanwhile_is_read(topic: ColdTopic, history: History) -> None:
    """A reader that came to the end goes on when there is more."""
    reader = history.read(90, END)
    assert [batch.next_offset for batch in iter(reader.next_batch, None)][-1] == 95
    assert reader.next_batch() is None
    topic.publish(topic.put_object([b"new"], 95))
    batch = reader.next_batch()
    assert batch is not None
    assert (batch.first_offset, batch.payloads()) == (95, [b"new"])
    reader.close()


def test_a_closed_reader_gives_nothing(history: History) -> None:
    """Closing ends it, also twice, also while another thread reads."""
    reader = history.read(0, END)
    assert reader.next_batch() is not None
    reader.close()
    reader.close()
    assert reader.next_batch() is None


def test_a_reader_can_be_closed_by_another_thread(topic: ColdTopic, store: FaultyStore) -> None:
    """Whoever waits for a range when it is closed comes to an end soon, and without an error."""
    arrived, go_on = threading.Event(), threading.Event()

    def hold(operation: str, key: str) -> None:
        if operation == "read_range":
            arrived.set()
            assert go_on.wait(120)

    with topic.history(range_bytes=64) as history, ThreadPoolExecutor(1) as thread:
        reader = history.read(0, END)
        assert reader.next_batch() is not None
        store.on_request = hold
        answer = thread.submit(lambda: list(iter(reader.next_batch, None)))
        assert arrived.wait(120)
        reader.close()
        go_on.set()
        assert sum(len(batch.payloads()) for batch in answer.result(120)) < 60
        assert reader.next_batch() is None


def test_threads_that_are_gone_are_not_needed(topic: ColdTopic) -> None:
    """When the threads that fetch ahead were stopped, a reader fetches for itself."""
    with topic.history(range_bytes=64) as history:
        reader = history.read(0, END)
    assert everything(reader) == numbered(PAYLOADS)


# Little is fetched


def test_a_few_messages_in_the_middle_of_an_object_fetch_little() -> None:
    """The index leads to them, and nothing is fetched ahead of what the stop needs."""
    store, payloads = FaultyStore(), [bytes(1000)] * 20_000
    topic = ColdTopic(store, FaultyMetadata(), index_every=1000)
    topic.fill(payloads, len(payloads))
    store.reset_traffic()
    with topic.history(range_bytes=256 << 10) as history:
        assert len(everything(history.read(10_100, 10_900))) == 800
    assert store.traffic.bytes_read <= BINDING_BYTES + 1000 * 1016
    assert set(store.traffic.requests) == {"read_range"}


def test_who_stops_after_the_first_range_has_fetched_one(topic: ColdTopic, store: FaultyStore) -> None:
    """Reading ahead begins when the first range was used up."""
    with topic.history(range_bytes=512) as history:
        reader = history.read(0, END)
        assert reader.next_batch() is not None
        reader.close()
    assert store.traffic.requests["read_range"] == 1


def test_ranges_are_fetched_ahead_up_to_the_bound() -> None:
    """While the second range is used, so many behind it are on their way, and no more."""
    store = FaultyStore()
    topic = ColdTopic(store, FaultyMetadata())
    topic.fill([bytes(84)] * 100, 100)
    with topic.history(range_bytes=200 + BINDING_BYTES, read_ahead_ranges=3) as history:
        reader = history.read(0, END)
        assert [batch.next_offset for batch in (reader.next_batch(), reader.next_batch()) if batch] == [2, 4]
    reader.close()
    assert store.traffic.requests["read_range"] == 1 + 1 + 3


def test_a_sequential_read_fetches_every_byte_once(topic: ColdTopic, store: FaultyStore) -> None:
    """No range is fetched twice on the way through all objects, and its counters say what it did."""
    with topic.history(range_bytes=100) as history:
        assert len(everything(history.read(0, END))) == 95
        counted = history.counters.snapshot()
    size = sum(descriptor.size for descriptor in topic.descriptors)
    assert store.traffic.bytes_read == size
    assert (counted.fetched_bytes, counted.objects_opened) == (size, 4)
    assert counted.requests == store.traffic.requests["read_range"] == counted.request_seconds.count
    assert counted.failed_requests == counted.repeated_ranges == counted.skipped_messages == 0
    assert counted.query_seconds.count > 0


# What fails and passes


@pytest.mark.parametrize("nth", range(1, 12))
def test_an_outage_is_passed_on_and_the_same_call_goes_on(
    topic: ColdTopic, store: FaultyStore, history: History, nth: int
) -> None:
    """Whichever request fails, asking again continues at the same offset."""
    store.fail("read_range", nth=nth)
    reader = history.read(0, END)
    found, error = drain(reader, close=False)
    assert isinstance(error, StoreUnavailableError)
    assert found + everything(reader) == numbered(PAYLOADS)
    assert history.counters.snapshot().failed_requests == 1


def test_an_outage_of_the_catalog_is_passed_on(topic: ColdTopic, history: History) -> None:
    """No answer of the catalog is not "nothing there"."""
    metadata = topic.catalog.metadata
    assert isinstance(metadata, FaultyMetadata)
    metadata.fail("*", times=None)
    reader = history.read(0, END)
    with pytest.raises(StoreUnavailableError):
        reader.next_batch()
    metadata.heal()
    assert everything(reader) == numbered(PAYLOADS)


@pytest.mark.parametrize("fault", ["truncated", "flipped"])
@pytest.mark.parametrize("nth", range(1, 12))
def test_a_bad_transfer_is_not_a_bad_object(
    topic: ColdTopic, store: FaultyStore, history: History, fault: str, nth: int
) -> None:
    """A range that arrives damaged once is fetched again, and nobody notices."""
    store.fail("read_range", fault, nth=nth)  # type: ignore[arg-type]
    assert everything(history.read(0, END)) == numbered(PAYLOADS)
    assert history.counters.snapshot().repeated_ranges == 1


# What is damaged


@pytest.mark.parametrize("position", range(0, 1200, 37))
def test_a_flipped_bit_at_rest_is_found(topic: ColdTopic, store: FaultyStore, position: int) -> None:
    """It is named by object and byte after one more try; what is before it is handed out, nothing wrong ever is."""
    descriptor = topic.descriptors[1]
    key = topic.key_of(descriptor)
    data = bytearray(store.contents()[key])
    data[position % len(data)] ^= 0x04
    store.tamper(key, bytes(data))
    with topic.history(range_bytes=200) as history:
        found, error = drain(history.read(0, END))
        assert history.counters.snapshot().repeated_ranges == 1
    assert isinstance(error, CorruptionError)
    assert str(error.path) == key
    assert error.byte <= position % len(data)
    assert found == numbered(PAYLOADS)[: len(found)]
    assert 30 <= len(found) < 60


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:200], lambda data: data + b"\0"])
def test_another_size_is_damage(topic: ColdTopic, store: FaultyStore, change: object) -> None:
    """An object that is shorter or longer than its descriptor says is not believed."""
    assert callable(change)
    key = topic.key_of(topic.descriptors[1])
    store.tamper(key, change(store.contents()[key]))
    with topic.history() as history:
        found, error = drain(history.read(0, END))
    assert isinstance(error, CorruptionError)
    assert str(error.path) == key
    assert found == numbered(PAYLOADS)[: len(found)]
    assert 30 <= len(found) < 60


def test_an_emptied_object_is_damage(topic: ColdTopic, store: FaultyStore, history: History) -> None:
    """Nothing in it is not the end of history."""
    store.tamper(topic.key_of(topic.descriptors[0]), b"")
    _, error = drain(history.read(0, END))
    assert isinstance(error, CorruptionError)
    assert error.byte == 0


def replaced(topic: ColdTopic, descriptor: Descriptor, **changes: object) -> None:
    """Another descriptor under the same key."""
    topic.publish(msgspec.structs.replace(descriptor, **changes))


def test_a_descriptor_that_promises_less_than_the_object_has_is_refused(topic: ColdTopic, history: History) -> None:
    """Messages behind its end offset are not handed out."""
    descriptor = topic.descriptors[-1]
    short = topic.put_object(PAYLOADS[90:94], 90)
    replaced(topic, short, size=descriptor.size, offset_index=((90, BINDING_BYTES),), raw_size=descriptor.raw_size)
    topic.objects.copy(topic.key_of(descriptor), topic.key_of(short))
    found, error = drain(history.read(90, END))
    assert isinstance(error, CorruptionError)
    assert len(found) < 4


def test_a_descriptor_that_promises_more_than_the_object_has_is_refused(topic: ColdTopic, history: History) -> None:
    """An object that ends before its end offset is damaged."""
    descriptor = topic.descriptors[-1]
    long = topic.put_object([*PAYLOADS[90:], b"more"], 90)
    topic.objects.copy(topic.key_of(descriptor), topic.key_of(long))
    replaced(topic, long, size=descriptor.size, offset_index=descriptor.offset_index)
    _, error = drain(history.read(90, END))
    assert isinstance(error, CorruptionError)


def test_an_index_that_points_elsewhere_gives_no_other_messages(topic: ColdTopic, history: History) -> None:
    """Frames say their offsets, so those that are wanted are found all the same; a block in between is refused."""
    descriptor = topic.descriptors[0]
    replaced(topic, descriptor, offset_index=((0, BINDING_BYTES), (10, descriptor.offset_index[1][1] + 1)))
    if descriptor.codec == "none":
        assert everything(history.read(12, 15)) == numbered(PAYLOADS)[12:15]
    else:
        _, error = drain(history.read(12, 15))
        assert isinstance(error, CorruptionError)


def test_a_wrong_codec_is_refused(topic: ColdTopic, history: History) -> None:
    """An object of another codec than its descriptor says is not guessed at."""
    descriptor = topic.descriptors[0]
    other = "zstd" if descriptor.codec == "none" else "none"
    replaced(topic, descriptor, codec=other)
    _, error = drain(history.read(0, END))
    assert isinstance(error, CorruptionError)


def test_a_descriptor_that_is_nonsense_is_named(topic: ColdTopic, history: History) -> None:
    """What cannot be understood is an error with its key, never the end of history."""
    key = topic.catalog.keys.descriptor(30)
    topic.catalog.metadata.put(key, b'{"completed": true, "size": -1}')
    found, error = drain(history.read(0, END))
    assert isinstance(error, DataError)
    assert key in str(error)
    assert found == numbered(PAYLOADS)[:30]


def test_a_frame_that_says_it_is_huge_takes_no_memory() -> None:
    """A length is compared with the index before anything is fetched for it."""
    store = FaultyStore()
    topic = ColdTopic(store, FaultyMetadata(), index_every=5)
    (descriptor,) = topic.fill([bytes(100_000)] * 20, 20)
    data = bytearray(store.contents()[topic.key_of(descriptor)])
    struct.pack_into("<I", data, BINDING_BYTES + 8, 1 << 30)
    store.tamper(topic.key_of(descriptor), bytes(data))
    store.reset_traffic()
    with topic.history(range_bytes=1000) as history, pytest.raises(CorruptionError, match="too far"):
        history.read(0, END).next_batch()
    assert store.traffic.bytes_read <= 4000


# What is gone


def test_an_object_that_is_gone_is_a_gap(topic: ColdTopic, store: FaultyStore, history: History) -> None:
    """The error says which offsets are missing and which object they were in."""
    store.delete(topic.key_of(topic.descriptors[1]))
    found, error = drain(history.read(0, END))
    assert isinstance(error, GapError)
    assert (error.first, error.last, str(error.path)) == (30, 59, topic.key_of(topic.descriptors[1]))
    assert found == numbered(PAYLOADS)[:30]


def test_a_hole_in_the_catalog_is_a_gap(topic: ColdTopic, history: History) -> None:
    """A descriptor that is not there, with one behind it, is told with first and last."""
    topic.withdraw(topic.descriptors[1])
    found, error = drain(history.read(45, END))
    assert isinstance(error, GapError)
    assert (found, error.first, error.last) == ([], 45, 59)


@pytest.mark.parametrize("kind", ["object", "descriptor"])
def test_gaps_are_passed_over_when_asked_to(topic: ColdTopic, store: FaultyStore, history: History, kind: str) -> None:
    """With `on_gap="skip"` reading goes on behind what is missing, and it is counted."""
    if kind == "object":
        store.delete(topic.key_of(topic.descriptors[1]))
    else:
        topic.withdraw(topic.descriptors[1])
    assert everything(history.read(0, END, on_gap="skip")) == numbered(PAYLOADS)[:30] + numbered(PAYLOADS)[60:]
    assert history.counters.snapshot().skipped_messages == 30


def test_a_gap_is_not_passed_over_beyond_the_stop(topic: ColdTopic, store: FaultyStore, history: History) -> None:
    """A reader that stops inside a gap stands at its stop."""
    store.delete(topic.key_of(topic.descriptors[1]))
    reader = history.read(20, 40, on_gap="skip")
    assert everything(reader) == numbered(PAYLOADS)[20:30]
    assert reader.offset == 40


def test_what_retention_removes_under_a_reader_is_no_longer_kept(
    topic: ColdTopic, store: FaultyStore, history: History
) -> None:
    """Removed on purpose is not lost: the error says so, and where the topic begins now."""
    reader = history.read(0, END)
    assert reader.next_batch() is not None
    topic.move_start(60)
    for descriptor in topic.descriptors[:2]:
        topic.withdraw(descriptor)
        store.delete(topic.key_of(descriptor))
    _, error = drain(reader)
    assert isinstance(error, OffsetOutOfRangeError)
    assert "the oldest is 60" in str(error)


def test_what_retention_removed_to_the_last_object_is_no_longer_kept(topic: ColdTopic, history: History) -> None:
    """Also when nothing is left behind it."""
    topic.move_start(95)
    for descriptor in topic.descriptors:
        topic.withdraw(descriptor)
    with pytest.raises(OffsetOutOfRangeError, match="the oldest is 95"):
        history.read(0, END).next_batch()


def test_a_reader_that_may_skip_goes_on_where_the_topic_begins_now(topic: ColdTopic, history: History) -> None:
    """With `on_gap="skip"` what retention removed is passed over as well."""
    topic.move_start(60)
    for descriptor in topic.descriptors[:2]:
        topic.withdraw(descriptor)
    assert everything(history.read(0, END, on_gap="skip")) == numbered(PAYLOADS)[60:]


def test_an_object_that_was_replaced_is_found(topic: ColdTopic, store: FaultyStore, history: History) -> None:
    """When other objects have taken its place meanwhile, reading goes on in those."""
    reader = history.read(0, 60)
    batch = reader.next_batch()
    assert batch is not None
    first = topic.descriptors[0]
    for start in (0, 15):
        topic.publish(topic.put_object(PAYLOADS[start : start + 15], start))
    store.delete(topic.key_of(first))
    assert everything(reader) == numbered(PAYLOADS)[batch.next_offset : 60]


# Times


def test_the_first_message_of_a_time_is_found(topic: ColdTopic) -> None:
    """In whichever object it is, also when times are not in order."""
    times = [100, 300, 200, 250, 400, 350, 100, 500]
    payloads = [struct.pack("<q", time_us) for time_us in times]
    timed = ColdTopic(FaultyStore(), FaultyMetadata(), time_field=0)
    timed.fill(payloads, 2, first_offset=10)
    expected = {
        time_us: next((10 + n for n, t in enumerate(times) if t >= time_us), None) for time_us in range(50, 600, 25)
    }
    with timed.history() as history:
        assert {time_us: history.offset_at(0, time_us, END) for time_us in expected} == expected
        assert history.offset_at(0, 450, below_offset=16) is None


def test_a_time_is_looked_for_behind_the_start(topic: ColdTopic) -> None:
    """Messages below the start of the topic are not found, although their objects are still there."""
    timed = ColdTopic(FaultyStore(), FaultyMetadata(), time_field=0)
    timed.fill([struct.pack("<q", time_us) for time_us in (900, 1, 2, 3, 901, 4)], 2)
    timed.move_start(1)
    with timed.history() as history:
        assert history.offset_at(0, 500, END) == 4


# Real servers


@pytest.mark.parametrize("codec", CODECS)
def test_history_is_read_from_real_servers(s3_server: S3Server, etcd_server: EtcdServer, codec: Codec) -> None:
    """Over SeaweedFS and etcd, with ranges that end in the middle of everything."""
    objects = open_store(s3_server.url(f"history-{codec}"), s3_server.settings())
    with open_metadata_store(etcd_server.url) as metadata:
        topic = ColdTopic(objects, metadata, codec=codec, topic=f"history-{codec}", index_every=100)
        payloads = [random.Random(number).randbytes(500) * 2 for number in range(3000)]
        topic.fill(payloads, 1000)
        with topic.history(range_bytes=100_000) as history:
            assert everything(history.read(0, END)) == numbered(payloads)
            assert everything(history.read(1990, 2010)) == numbered(payloads)[1990:2010]
            objects.delete(topic.key_of(topic.descriptors[1]))
            with pytest.raises(GapError) as caught:
                everything(history.read(500, END))
            assert (caught.value.first, caught.value.last) == (1000, 1999)
            data = bytearray(encode_many(2000, payloads[2000:]).buffer)
            objects.put(topic.key_of(topic.descriptors[2]), bytes(data[:-5]))
            with pytest.raises(CorruptionError):
                everything(history.read(2000, END))
