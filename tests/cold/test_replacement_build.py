"""Which objects become one, and that the one has all that they had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.cold.published import KEYS, LOG_ID, TIME_FIELD, PublishedTopic
from tests.cold.replacing import build, built, plan_of

from tidelog.cold import blocks
from tidelog.cold import rewrite as replacement_build
from tidelog.cold import rewrite as replacement_plan
from tidelog.cold.catalog import MAX_BLOCK_BYTES, Codec, Descriptor
from tidelog.cold.reader import History
from tidelog.cold.retention import is_safe_to_remove
from tidelog.cold.rewrite import FramesTally, RemovedOffsets, build_object, plan_merges, read_old
from tidelog.cold.rewrite_commit import begin
from tidelog.cold.takeover import _shipped_by
from tidelog.cold.verify import ColdCopy, ObjectCheck
from tidelog.errors import CorruptionError, InputError
from tidelog.log.binding import encode_binding
from tidelog.log.frame import REMOVED_PAYLOAD, Frames, encode_many
from tidelog.store.keys import ObjectId
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyStore
from tidelog.topics.columns import frames_digest

# Planning


def test_runs_are_neighbours_of_the_right_size() -> None:
    """No larger than asked for, the newest one left out, large ones left alone."""
    topic = PublishedTopic()
    for count in (10, 10, 500, 10, 10, 10, 10):
        topic.publish(count)
    size = topic.descriptors()[0].size
    runs = plan_of(topic, target_bytes=size * 4)
    assert [(run.start_offset, run.next_offset) for run in runs] == [(0, 20), (520, 550)]
    assert [len(run.replaced) for run in runs] == [2, 3]
    assert plan_merges(topic.catalog, target_bytes=size * 4, keep_newest=2).runs[1].next_offset == 540


def test_a_plan_comes_in_rounds() -> None:
    """So that a long job loses little when it is killed."""
    topic = PublishedTopic()
    for _ in range(9):
        topic.publish(10)
    size = topic.descriptors()[-1].size
    first = plan_merges(topic.catalog, target_bytes=size * 2, max_runs=3)
    assert ([run.start_offset for run in first.runs], first.next_offset) == ([0, 20, 40], 60)
    assert first.next_offset is not None
    rest = plan_merges(topic.catalog, target_bytes=size * 2, max_runs=3, from_offset=first.next_offset)
    assert ([run.start_offset for run in rest.runs], rest.next_offset) == ([60], None)


def test_nonsense_is_refused() -> None:
    """The newest object is never replaced, and an object has bytes."""
    topic = PublishedTopic()
    with pytest.raises(InputError):
        plan_merges(topic.catalog, target_bytes=0)
    with pytest.raises(InputError):
        plan_merges(topic.catalog, target_bytes=10, keep_newest=0)


def test_what_is_copied_grows_slowly() -> None:
    """Compacting after every object copies each message a few times, not once for each compaction."""
    topic = PublishedTopic()
    copied = 0
    for _ in range(128):
        topic.publish(1)
        work = begin(topic.catalog, topic.store, topic.clock, take_over=True)
        runs = plan_of(topic)
        copied += sum(len(run.descriptors) and run.next_offset - run.start_offset for run in runs)
        work.switch(built(topic, work, runs)) if runs else work.abandon()
    assert copied <= 128 * 8
    assert len(topic.descriptors()) < 12


# Building


def objects_of(store: ObjectStore, payloads: list[list[bytes]], epoch: int = 1) -> list[Descriptor]:
    """Objects with these payloads, one after the other."""
    found, offset = [], 0
    for some in payloads:
        name = ObjectId(offset, offset + len(some) - 1, epoch)
        with store.open_writer(KEYS.object(name)) as writer:
            writer.write(encode_binding(LOG_ID, offset))
            writer.write(encode_many(offset, some).buffer)
        assert writer.published is not None
        found.append(
            ObjectCheck(
                *(store, writer.published, name, LOG_ID, None), most_frame_bytes=blocks.MAX_FRAME_BYTES
            ).descriptor()
        )
        offset += len(some)
    return found


def payloads_in(store: ObjectStore, descriptor: Descriptor) -> list[bytes]:
    found: list[bytes] = []
    read_old(store, KEYS, [descriptor], lambda frames: found.extend(frames.payloads()))
    return found


PAYLOADS = st.lists(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), min_size=1, max_size=6)


@settings(max_examples=examples(60))
@given(payloads=PAYLOADS, codec=st.sampled_from(["none", "zstd"]), block_bytes=st.integers(20, 400))
def test_the_bytes_depend_on_the_messages_alone(payloads: list[list[bytes]], codec: Codec, block_bytes: int) -> None:
    """However they were divided into objects before: the same object comes out, with all that went in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replacement_build, "TARGET_BLOCK_BYTES", block_bytes)
        patch.setattr(replacement_build, "MAX_BLOCK_BYTES", block_bytes + 30)
        together = [payload for some in payloads for payload in some]
        made = []
        for division in (payloads, [together], [[payload] for payload in together]):
            store = FaultyStore()
            old = objects_of(store, division)
            made.append(build_object(store, KEYS, old, 3, codec=codec, digest=frames_digest))
            assert payloads_in(store, made[-1].descriptor) == together
            assert made[-1].went_in == made[-1].came_out
            assert made[-1].descriptor.name == ObjectId(0, len(together) - 1, 1, 3)
        assert made[0].descriptor.checksum == made[1].descriptor.checksum == made[2].descriptor.checksum


def test_a_message_that_is_larger_than_a_block_has_one_of_its_own() -> None:
    """In front of others, between them and behind them."""
    huge = bytes(MAX_BLOCK_BYTES + 1)
    store = FaultyStore()
    old = objects_of(store, [[huge, b"a", b"b"], [huge], [b"c", huge, huge]])
    made = build_object(store, KEYS, old, 1, codec="zstd", digest=frames_digest)
    assert payloads_in(store, made.descriptor) == [huge, b"a", b"b", huge, b"c", huge, huge]


@pytest.mark.parametrize("codec", ["none", "zstd"])
@settings(max_examples=examples(40), deadline=None)
@given(payloads=PAYLOADS, data=st.data())
def test_messages_are_removed_and_offsets_stay(codec: Codec, payloads: list[list[bytes]], data: st.DataObject) -> None:
    """What is left is summed up before and behind; what was removed before is not counted again."""
    count = sum(map(len, payloads))
    gone = data.draw(st.sets(st.integers(0, count - 1)))
    bits = sum(1 << offset for offset in gone).to_bytes(count // 8 + 1, "little")
    store = FaultyStore()
    old = objects_of(store, payloads)
    made = build_object(
        *(store, KEYS, old, 1), codec=codec, digest=frames_digest, removed=RemovedOffsets(first_offset=0, bits=bits)
    )
    together = [payload for some in payloads for payload in some]
    expected = [REMOVED_PAYLOAD if offset in gone else payload for offset, payload in enumerate(together)]
    assert payloads_in(store, made.descriptor) == expected
    assert made.went_in == made.came_out
    assert made.went_in.messages == sum(payload != REMOVED_PAYLOAD for payload in expected)
    assert made.removed == sum(together[offset] != REMOVED_PAYLOAD for offset in gone)


def test_a_message_that_is_gone_is_noticed() -> None:
    """The sum behind is not the sum before: nothing is described then."""
    store = FaultyStore()
    old = objects_of(store, [[b"a", b"b"], [b"c"]])
    sums = iter(range(100))

    def wrong(frames: Frames, start: int, stop: int) -> int:
        return next(sums)

    with pytest.raises(CorruptionError, match="not what the store gives back"):
        build_object(store, KEYS, old, 1, codec="none", digest=wrong)


def test_damage_in_an_old_object_is_not_carried_on() -> None:
    """An object that is not what its descriptor says is named, and no new one appears."""
    topic = PublishedTopic()
    topic.publish_hourly(4)
    (run,) = plan_of(topic)
    key = KEYS.object(run.descriptors[1].name)
    data = bytearray(topic.store.get(key).data)
    data[-1] ^= 1
    topic.store.put(key, bytes(data))
    with pytest.raises(CorruptionError) as caught:
        build(topic, run, 1)
    assert str(caught.value.path) == key
    assert [name.generation for name in topic.object_names()] == [0] * 4


def topic_of_three_owners() -> PublishedTopic:
    """Ten messages of the first, twenty of the second, and the newest object of the third."""
    topic = PublishedTopic()
    topic.publish(10)
    topic.take_over("b")
    topic.publish(10)
    topic.publish(10)
    topic.take_over("c")
    topic.publish(10)
    return topic


def test_it_is_told_who_wrote_what() -> None:
    """Also when what was put together is put together again, and when the descriptor was stored and read."""
    topic = topic_of_three_owners()
    (run,) = plan_of(topic)
    work = begin(topic.catalog, topic.store, topic.clock)
    work.switch(built(topic, work, [run]))
    found = topic.descriptors()[0]
    assert (found.epoch, found.epochs) == (2, ((0, 1), (10, 2)))
    assert [found.written_until(epoch) for epoch in (0, 1, 2, 3)] == [0, 10, 30, 30]
    topic.publish(40)
    topic.take_over("d")
    topic.publish(1)
    (run,) = plan_of(topic)
    assert build(topic, run, 2).descriptor.epochs == ((0, 1), (10, 2), (30, 3))


def test_whose_messages_they_are_is_the_same_after_a_compaction() -> None:
    """Loses, without this: a former owner takes what it has shipped for its unshipped tail, and returns it twice."""
    topic = topic_of_three_owners()

    def look() -> list[object]:
        return [
            *(is_safe_to_remove(topic.catalog, topic.store, 0, end, max_epoch=1) for end in (5, 10, 11, 30)),
            *(is_safe_to_remove(topic.catalog, topic.store, 0, 30, max_epoch=epoch) for epoch in (0, 1, 2)),
            *(_shipped_by(epoch, 0, 35, topic.catalog) for epoch in (0, 1, 2, 3)),
            *(_shipped_by(1, start, 35, topic.catalog) for start in (5, 9, 10, 20)),
            *(copied(topic, epoch) for epoch in (0, 1, 2)),
        ]

    before = look()
    work = begin(topic.catalog, topic.store, topic.clock)
    work.switch(built(topic, work, plan_of(topic)))
    assert len(topic.descriptors()) == 2
    assert look() == before
    assert before[:2] == [True, True]


def copied(topic: PublishedTopic, epoch: int) -> list[tuple[int, int]]:
    with ThreadPoolExecutor(2) as executor:
        return ColdCopy(History(topic.catalog, topic.store, executor), epoch).ranges(3, 25)


def test_a_descriptor_stays_small_however_many_owners_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends where it would have to tell too many of them."""
    monkeypatch.setattr(replacement_plan, "MAX_EPOCHS", 3)
    topic = PublishedTopic()
    for number in range(9):
        topic.take_over(f"n{number}")
        topic.publish(10)
    assert [(run.start_offset, run.next_offset) for run in plan_of(topic)] == [(0, 30), (30, 60), (60, 80)]


def test_the_descriptor_tells_what_those_before_told() -> None:
    """Times, epoch and the time that was reached so far."""
    topic = PublishedTopic()
    first = topic.publish(10)
    topic.clock.advance(60)
    topic.take_over("b")
    second = topic.publish(10)
    topic.publish(1)
    (run,) = plan_of(topic)
    made = build(topic, run, 1).descriptor
    assert (made.first_time_us, made.last_time_us) == (first.first_time_us, second.last_time_us)
    assert (made.reached_time_us, made.created_us, made.epoch) == (second.reached_time_us, second.created_us, 2)
    assert TIME_FIELD == 0
    assert FramesTally(messages=20, digest=build(topic, run, 1).went_in.digest) == build(topic, run, 1).came_out
