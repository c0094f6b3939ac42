"""The driver's part of `compact`, without Spark: killed anywhere, two at once, beside what other people do."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.cold.published import KEYS, KINDS, LOG_ID, PublishedTopic, topic_in
from tests.transactional import STEPS, Step, last_stable_offset, payload_of, visible

from tidelog.cold.blocks import MAX_FRAME_BYTES
from tidelog.cold.reader import History as Cold
from tidelog.cold.reader import HistoryReader
from tidelog.cold.rewrite_commit import read_state
from tidelog.cold.verify import ObjectCheck
from tidelog.errors import ConflictError, CorruptionError, StoreUnavailableError
from tidelog.log.binding import encode_binding
from tidelog.log.frame import REMOVED_PAYLOAD, encode_many
from tidelog.log.tail_cache import Batch
from tidelog.pipeline.jobs import compact_topic
from tidelog.pipeline.jobs.compact_topic import (
    CompactOptions,
    SupersededOffsets,
    TopicCompaction,
    stable_end,
    transaction_works,
)
from tidelog.pipeline.jobs.compact_topic_tasks import BuildDone, BuildWork, build_in, find_transactions_in
from tidelog.pipeline.location import TopicLocation
from tidelog.store.keys import DEFAULT_ROOT, ObjectId
from tidelog.store.settings import StoreSettings
from tidelog.testing import History, World, cut_world_everywhere
from tidelog.topics.message import (
    TIMESTAMP_FIELD,
    Message,
    ProducerMark,
    encode_extension,
    encode_message,
    read_messages,
)
from tidelog.topics.producer.dedup import ProducersSnapshot

PLACE = TopicLocation("memory://", StoreSettings(), "memory://", DEFAULT_ROOT)
HOUR = 3600
NOW = CompactOptions(by_key=True, min_dirty_ratio=0.01, grace_seconds=0)


class Sent(msgspec.Struct, frozen=True):
    """A message, and who has sent it."""

    key: bytes | None
    value: bytes
    producer: str | None = None


def publish(topic: PublishedTopic, messages: Sequence[Sent], sequence: int = 0) -> None:
    """One object with these messages."""
    start = topic.catalog.next_offset()
    now_us = topic.clock.now_us()
    payloads = [
        encode_message(
            one.value,
            one.key,
            None,
            now_us,
            b""
            if one.producer is None
            else encode_extension(producer=ProducerMark(1, sequence + start + number, one.producer)),
        )
        for number, one in enumerate(messages)
    ]
    publish_payloads(topic, payloads)


def publish_payloads(topic: PublishedTopic, payloads: list[bytes]) -> None:
    """One object with these payloads."""
    start = topic.catalog.next_offset()
    name = ObjectId(start, start + len(payloads) - 1, topic.epoch)
    with topic.store.open_writer(KEYS.object(name)) as writer:
        writer.write(encode_binding(LOG_ID, start))
        writer.write(encode_many(start, payloads).buffer)
    assert writer.published is not None
    topic.owned.publish(
        ObjectCheck(
            *(topic.store, writer.published, name, LOG_ID, TIMESTAMP_FIELD), most_frame_bytes=MAX_FRAME_BYTES
        ).descriptor()
    )


class _Batches:
    """History as a reader of messages wants it."""

    def __init__(self, reader: HistoryReader) -> None:
        self._reader = reader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._reader.next_batch, None)

    def place_of(self, offset: int) -> str:
        return f"offset {offset}"


def read(topic: PublishedTopic) -> list[Message]:
    with ThreadPoolExecutor(2) as executor:
        reader = Cold(topic.catalog, topic.store, executor).read(0, topic.catalog.next_offset())
        return list(read_messages(_Batches(reader), "raise"))  # type: ignore[arg-type]


def superseded_in(topic: PublishedTopic) -> SupersededOffsets:
    """What Spark finds: all but the newest message of every key, and tombstones with nothing before them."""
    found, newest = set[int](), dict[bytes, Message]()
    for message in read(topic):
        if message.key is not None:
            before = newest.get(message.key)
            found |= set() if before is None else {before.offset or 0}
            newest[message.key] = message
    return as_bits(found)


def as_bits(offsets: Iterable[int]) -> SupersededOffsets:
    words: dict[int, int] = {}
    for offset in offsets:
        words[offset // 64] = words.get(offset // 64, 0) | 1 << offset % 64
    ordered = sorted(words)
    return SupersededOffsets(array("Q", ordered), array("Q", [words[word] for word in ordered]))


def in_process(topic: PublishedTopic, works: Sequence[BuildWork]) -> list[BuildDone]:
    return [build_in(topic.store, work) for work in works]


def compaction(topic: PublishedTopic, options: CompactOptions = NOW, build: object = None) -> TopicCompaction:
    return TopicCompaction(
        *("shop/orders", PLACE, topic.catalog, topic.store, options, topic.clock),
        build or (lambda works: in_process(topic, works)),  # type: ignore[arg-type]
    )


def compact(topic: PublishedTopic, options: CompactOptions = NOW) -> TopicCompaction:
    made = compaction(topic, options)
    made.run(superseded_in(topic))
    return made


def prices(count: int, turn: int, producer: str | None = None) -> list[Sent]:
    return [Sent(b"k%d" % number, b"%d" % turn, producer) for number in range(count)]


# By key, held to a model

KEYS_USED = st.sampled_from([None, b"", b"a", b"b", b"c"])
SENT = st.builds(Sent, KEYS_USED, st.sampled_from([b"", b"1", b"22"]), st.sampled_from([None, "p", "q"]))
OBJECTS = st.lists(st.lists(SENT, min_size=1, max_size=8), min_size=1, max_size=6)


@settings(max_examples=examples(60), deadline=None)
@given(objects=OBJECTS, more=OBJECTS, ratio=st.sampled_from([0.01, 0.5, 1.0]))
def test_what_survives_is_what_counts(objects: list[list[Sent]], more: list[list[Sent]], ratio: float) -> None:
    """The newest of every key and of every producer, and what has no key; the table is the same at every step."""
    topic = PublishedTopic()
    options = msgspec.structs.replace(NOW, min_dirty_ratio=ratio)
    for turn in (objects, more):
        for messages in turn:
            publish(topic, messages)
        before = read(topic)
        made = compact(topic, options)
        after = read(topic)
        assert table(after) == table(before)
        kept = {message.offset for message in after}
        assert kept <= {message.offset for message in before}
        assert {message.offset for message in before if message.key is None} <= kept
        sent = [one for some in (objects if turn is objects else [*objects, *more]) for one in some]
        for name in ("p", "q"):
            assert max((offset for offset, one in enumerate(sent) if one.producer == name), default=None) in {
                *kept,
                None,
            }
        result, proof = made.result(), made.proof()
        assert proof is None or proof.holds
        assert result.removed_messages == len(before) - len(after)


def table(messages: list[Message]) -> dict[bytes, Message]:
    found: dict[bytes, Message] = {}
    for message in messages:
        if message.key is not None:
            found.pop(message.key, None)
            found[message.key] = message
    return found


@given(st.sets(st.integers(0, 400)), st.integers(0, 400), st.integers(0, 100), st.integers(0, 400))
def test_bits_are_a_set_of_offsets(offsets: set[int], start: int, size: int, gone: int) -> None:
    """Any range of it, counted, and without one."""
    found = as_bits(offsets)
    stop = start + size
    assert found.count(start, stop) == len(offsets & set(range(start, stop)))
    assert found.without(gone).count(0, 500) == len(offsets - {gone})
    if size:
        frames = encode_many(start, [b"x"] * size)
        assert {start + index for index in found.between(start, stop).indexes(frames)} == offsets & set(
            range(start, stop)
        )
        wider = encode_many(0, [b"x"] * 600)
        assert set(found.between(start, stop).indexes(wider)) == offsets & set(range(start, stop))


def test_what_cannot_be_removed_is_not_written_again() -> None:
    """Each message is its producer's newest of the object: nothing changes, however often it is tried."""
    topic = PublishedTopic()
    for turn in range(3):
        publish(topic, [Sent(b"k", b"%d" % turn, "till")])
    options = msgspec.structs.replace(NOW, target_bytes=1)
    names = topic.names_in_catalog()
    for _ in range(3):
        result = compact(topic, options).result()
        assert (result.new_objects, result.removed_messages) == (0, 0)
    assert topic.object_names() == topic.names_in_catalog() == names


def test_compaction_that_does_nothing_says_why() -> None:
    """No object, too few, none small enough, not enough superseded: each is another thing to do about it."""
    topic, merging = PublishedTopic(), msgspec.structs.replace(NOW, by_key=False)
    assert _notes(topic, merging) == ["nothing to compact: it has no object in the store yet"]
    publish(topic, prices(10, 0))
    assert _notes(topic, merging) == ["nothing to compact: 1 in the store, and the 1 newest are left alone"]
    for turn in (1, 2):
        publish(topic, [Sent(b"%d-%d" % (turn, number), b"x") for number in range(10)])
    large = msgspec.structs.replace(merging, target_bytes=1)
    assert _notes(topic, large) == ["nothing to compact: no neighbours among its objects are worth merging into one of"]
    by_key = msgspec.structs.replace(large, by_key=True)
    assert _notes(topic, by_key) == ["nothing to compact: 0 superseded messages are less than 0.01 of any object"]
    assert _notes(topic, merging) == []


def _notes(topic: PublishedTopic, options: CompactOptions) -> list[str]:
    """What is said about the topic, up to what depends on its size."""
    notes = [note.partition(": ")[2] for note in compact(topic, options).notes()]
    return [re.split(r"; its owner| \(| \d+ bytes", note)[0] for note in notes]


def test_producers_that_are_left_are_those_of_the_end() -> None:
    """Loses, without this: a producer whose messages are all superseded would store its last one again."""
    topic = PublishedTopic()
    for turn in range(4):
        publish(topic, prices(10, turn, "till"))
    compact(topic)
    payloads = [message for message in read(topic) if message.offset < 30]
    assert [message.offset for message in payloads] == [29]


def test_the_message_that_a_snapshot_is_believed_by_stays() -> None:
    """The snapshot of the producers names the message before its offset."""
    topic = PublishedTopic()
    for turn in range(4):
        publish(topic, prices(10, turn))
    snapshot = ProducersSnapshot(as_of_offset=15, last_crc32=1, epoch=1, producers=())
    topic.metadata.put(KEYS.producers, msgspec.json.encode(snapshot))
    compact(topic)
    assert [message.offset for message in read(topic)] == [14, *range(30, 40)]


# Transactions


@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS, cut=st.integers(1, 9))
def test_transactions_are_the_same_after_a_compaction(steps: list[Step], cut: int) -> None:
    """The newest committed message of each key stays, and so do control records, the newest message of each producer,
    and everything from the last stable offset on."""
    topic = PublishedTopic()
    for at in range(0, len(steps), cut):
        some = steps[at : at + cut]
        publish_payloads(topic, [payload_of(step, number) for number, step in enumerate(some, at)])
    end = topic.catalog.next_offset()
    works = transaction_works(PLACE, "shop/orders", topic.catalog.walk(0))
    found = [find_transactions_in(topic.store, work) for work in works]
    assert stable_end(reversed(found), end) == last_stable_offset(steps)
    before = payloads_of(topic)
    newest = {steps[offset].key: offset for offset in visible(steps)}
    gone = {offset for offset in visible(steps) if steps[offset].key is not None and newest[steps[offset].key] > offset}
    made = compaction(topic)
    made.run(as_bits(gone))
    after = payloads_of(topic)
    kept = {offset for offset, payload in enumerate(after) if payload == before[offset]}
    assert {offset for offset in range(len(steps)) if after[offset] != REMOVED_PAYLOAD} == kept
    assert set(range(len(steps))) - kept <= gone
    assert {offset for offset, step in enumerate(steps) if step.is_control} <= kept
    assert set(newest.values()) <= kept
    for producer in (1, 2, 3):
        sent = [at for at, step in enumerate(steps) if step.producer == producer and not step.is_control]
        assert sent[-1:] == [] or sent[-1] in kept


def test_control_record_stays_whatever_is_asked_for() -> None:
    """A mistake elsewhere must not open a transaction again."""
    topic = PublishedTopic()
    steps = [Step(1, key=b"a"), Step(1, commits=True), Step(key=b"a"), Step(key=b"a")]
    publish_payloads(topic, [payload_of(step, number) for number, step in enumerate(steps)])
    publish(topic, [Sent(b"last", b"1")])
    before = payloads_of(topic)
    compaction(topic).run(as_bits({1, 2}))
    assert payloads_of(topic) == [*before[:2], REMOVED_PAYLOAD, *before[3:]]


def test_looking_for_transactions_is_spread_over_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours together, and each object once."""
    topic = PublishedTopic()
    for turn in range(4):
        publish(topic, prices(10, turn))
    descriptors = list(topic.catalog.walk(0))
    assert [work.descriptors for work in transaction_works(PLACE, "shop/orders", descriptors)] == [tuple(descriptors)]
    monkeypatch.setattr(compact_topic, "_LOOK_BYTES", 2 * descriptors[0].size)
    spread = transaction_works(PLACE, "shop/orders", descriptors)
    assert [work.descriptors for work in spread] == [tuple(descriptors[:2]), tuple(descriptors[2:])]


def payloads_of(topic: PublishedTopic) -> list[bytes]:
    """All payloads, of messages or not."""
    with ThreadPoolExecutor(2) as executor:
        reader = Cold(topic.catalog, topic.store, executor).read(0, topic.catalog.next_offset())
        return [payload for batch in iter(reader.next_batch, None) for payload in batch.payloads()]


# Two at once, and failures


def test_of_two_at_once_one_is_told_so() -> None:
    """The other one goes on undisturbed, and nothing is lost."""
    topic = PublishedTopic()
    for turn in range(4):
        publish(topic, prices(10, turn))
    expected = table(read(topic))

    def build(works: Sequence[BuildWork]) -> list[BuildDone]:
        with pytest.raises(ConflictError, match="under way"):
            compact(topic)
        return in_process(topic, works)

    made = compaction(topic, build=build)
    made.run(superseded_in(topic))
    assert made.result().removed_messages == 30
    assert table(read(topic)) == expected


def test_a_worker_that_fails_stops_nobody_else() -> None:
    """The error comes out, nothing has changed, and the next run begins at once."""
    topic = PublishedTopic()
    for turn in range(4):
        publish(topic, prices(10, turn))
    before = read(topic)

    def build(works: Sequence[BuildWork]) -> list[BuildDone]:
        raise StoreUnavailableError("the store is away")

    with pytest.raises(StoreUnavailableError):
        compaction(topic, build=build).run(superseded_in(topic))
    assert read(topic) == before
    assert read_state(topic.catalog).phase == "idle"
    assert compact(topic).result().removed_messages == 30


def test_an_object_that_is_not_what_was_asked_for_is_refused() -> None:
    """A worker says that it made something else: nothing is switched."""
    topic = PublishedTopic()
    for turn in range(4):
        publish(topic, prices(10, turn))

    def build(works: Sequence[BuildWork]) -> list[BuildDone]:
        (done,) = in_process(topic, [msgspec.structs.replace(works[0], descriptors=works[0].descriptors[:2])])
        return [done]

    names = topic.names_in_catalog()
    with pytest.raises(CorruptionError, match="lacks messages of"):
        compaction(topic, build=build).run(superseded_in(topic))
    assert topic.names_in_catalog() == names


@pytest.mark.parametrize("kind", KINDS)
def test_killed_anywhere_and_run_again_it_ends_the_same(kind: str) -> None:
    """At each changing call: the table is the same at once, and in the end only what survives is left."""
    prepared = World(multi_key=kind == "multi-key")
    with topic_in(prepared, kind) as first:
        for turn in range(4):
            publish(first, prices(3, turn, "till"))
        expected = table(read(first))
    options = msgspec.structs.replace(NOW, take_over=True)

    def workload(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            compact(topic, options)

    def check(world: World, history: History) -> None:
        with topic_in(world, kind) as topic:
            assert table(read(topic)) == expected
            compact(topic, options)
            compact(topic, options)
            assert [message.offset for message in read(topic)] == [8, 9, 10, 11]
            assert [name[:2] for name in topic.names_in_catalog()] == [(0, 8), (9, 11)]
            assert table(read(topic)) == expected

    cuts = cut_world_everywhere(workload, check, start=lambda crash_at: prepared.after_crash("keep", crash_at=crash_at))
    assert cuts.cut_points >= 10
