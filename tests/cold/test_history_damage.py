"""Reading around damage in the store: exactly what is damaged is left out, and its offsets are named."""

from __future__ import annotations

import logging
import tracemalloc
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from tests.cold.cold import ColdTopic, everything, numbered

import tidelog
from tidelog.clock import SystemClock
from tidelog.cold.catalog import Codec, Descriptor
from tidelog.cold.reader import History
from tidelog.cold.rebuild import rebuild_catalog
from tidelog.errors import CorruptionError, StoreUnavailableError
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.frame import HEADER_BYTES
from tidelog.testing import FaultyMetadata, FaultyStore

CODECS: tuple[Codec, ...] = get_args(Codec)
END = 1 << 64
PER_OBJECT, PER_BLOCK = 30, 10
PAYLOADS = [f"message {number} ".encode() * (1 + number % 7) for number in range(90)]


class Damaged:
    """A topic with one object whose bytes can be changed."""

    def __init__(self, codec: Codec) -> None:
        self.store = FaultyStore()
        self.topic = ColdTopic(self.store, FaultyMetadata(), codec=codec, index_every=PER_BLOCK)
        self.topic.fill(PAYLOADS, PER_OBJECT)
        self.codec = codec

    @property
    def descriptor(self) -> Descriptor:
        return self.topic.descriptors[1]

    @property
    def key(self) -> str:
        return self.topic.key_of(self.descriptor)

    def flip(self, *positions: int) -> None:
        data = bytearray(self.store.contents()[self.key])
        for position in positions:
            data[position] ^= 0x04
        self.store.tamper(self.key, bytes(data))

    def hit(self, position: int) -> set[int]:
        """The offsets that a flipped bit at this byte costs: a frame, or all of a block."""
        entries = self.descriptor.offset_index
        if self.codec == "zstd":
            first = max(offset for offset, byte in entries if byte <= position)
            return set(range(first, min(first + PER_BLOCK, self.descriptor.next_offset)))
        offset, byte = entries[0]
        while byte + HEADER_BYTES + len(PAYLOADS[offset]) <= position:
            byte += HEADER_BYTES + len(PAYLOADS[offset])
            offset += 1
        return {offset}

    def expected(self, *positions: int) -> list[tuple[int, bytes]]:
        lost = set[int]().union(*map(self.hit, positions))
        return [entry for entry in numbered(PAYLOADS) if entry[0] not in lost]


@pytest.fixture(params=CODECS)
def damaged(request: pytest.FixtureRequest) -> Damaged:
    return Damaged(request.param)


def read_skipping(history: History, start: int = 0) -> list[tuple[int, bytes]]:
    return everything(history.read(start, END, on_gap="skip"))


@pytest.mark.parametrize("range_bytes", [64, 4 << 20])
@pytest.mark.parametrize("share", [number / 40 for number in range(40)])
def test_exactly_what_is_damaged_is_skipped(damaged: Damaged, share: float, range_bytes: int) -> None:
    """A flipped bit anywhere in an object costs the frame, or the block, that it is in."""
    position = BINDING_BYTES + int(share * (damaged.descriptor.size - BINDING_BYTES))
    damaged.flip(position)
    with damaged.topic.history(range_bytes=range_bytes) as history:
        assert read_skipping(history) == damaged.expected(position)
        assert history.counters.snapshot().skipped_messages == len(damaged.hit(position))


def test_several_damaged_places_are_skipped(damaged: Damaged) -> None:
    """Two in a row, one at the very beginning and one at the very end."""
    size = damaged.descriptor.size
    places = [BINDING_BYTES, BINDING_BYTES + 20, size // 2, size - 1]
    damaged.flip(*places)
    with damaged.topic.history() as history:
        assert read_skipping(history) == damaged.expected(*places)


def test_skipped_offsets_are_named(damaged: Damaged, caplog: pytest.LogCaptureFixture) -> None:
    """The log says which offsets of which object were passed over."""
    damaged.flip(damaged.descriptor.size - 1)
    lost = damaged.hit(damaged.descriptor.size - 1)
    text = "offset 59 damaged" if lost == {59} else "offsets 50 to 59 damaged"
    with damaged.topic.history() as history, caplog.at_level(logging.WARNING, "tidelog"):
        read_skipping(history)
    assert text in caplog.text
    assert damaged.key in caplog.text


def test_damage_before_what_is_wanted_does_not_matter(damaged: Damaged) -> None:
    """The error names the way around; reading from the next good offset on works without skipping."""
    damaged.flip(BINDING_BYTES)
    last = max(damaged.hit(BINDING_BYTES))
    with damaged.topic.history() as history:
        with pytest.raises(CorruptionError, match='on_gap="skip"'):
            everything(history.read(30, END))
        assert everything(history.read(last + 1, END)) == numbered(PAYLOADS)[last + 1 :]


def test_damage_that_reaches_what_is_wanted_is_raised(damaged: Damaged) -> None:
    """Reading begins at a boundary before the offset: damage from there up to it is no reason to leave it out."""
    descriptor, wanted = damaged.descriptor, 45
    begin = descriptor.position_of(wanted)[1]
    damaged.flip(*range(begin, descriptor.end_of(wanted)))
    with damaged.topic.history() as history:
        reader = history.read(wanted, END)
        for _ in range(2):
            with pytest.raises(CorruptionError):
                reader.next_batch()
        reader.close()


def test_a_reader_raises_again_where_it_raised(damaged: Damaged) -> None:
    """Damage is not passed over by asking once more."""
    damaged.flip(BINDING_BYTES)
    with damaged.topic.history() as history:
        reader = history.read(30, END)
        for _ in range(2):
            with pytest.raises(CorruptionError, match=r'on_gap="skip".*--skip-gaps.*failOnDataLoss=false'):
                reader.next_batch()
        reader.close()


def test_an_object_that_is_cut_short_is_read_as_far_as_it_goes(damaged: Damaged) -> None:
    """What is behind the cut is skipped, and the next object is read."""
    position = damaged.descriptor.size * 2 // 3
    data = damaged.store.contents()[damaged.key]
    damaged.store.tamper(damaged.key, data[:position])
    first = min(damaged.hit(position))
    with damaged.topic.history() as history:
        assert read_skipping(history) == numbered(PAYLOADS)[:first] + numbered(PAYLOADS)[60:]


@pytest.mark.parametrize("byte", range(0, BINDING_BYTES, 7))
def test_an_object_without_a_good_header_is_skipped_whole(damaged: Damaged, byte: int) -> None:
    """Nothing says any more that it is this log's object, so none of it is believed."""
    damaged.flip(byte)
    with damaged.topic.history() as history:
        assert read_skipping(history) == numbered(PAYLOADS)[:30] + numbered(PAYLOADS)[60:]


def test_an_outage_does_not_pass_for_damage(damaged: Damaged) -> None:
    """While the store does not answer nothing is skipped; the same call goes on afterwards."""
    damaged.flip(BINDING_BYTES)
    with damaged.topic.history() as history:
        reader = history.read(30, END, on_gap="skip")
        damaged.store.fail("read_range", times=None)
        with pytest.raises(StoreUnavailableError):
            reader.next_batch()
        damaged.store.heal()
        assert everything(reader) == [entry for entry in damaged.expected(BINDING_BYTES) if entry[0] >= 30]


def test_a_frame_inside_a_damaged_message_is_not_taken_for_one() -> None:
    """A message that holds a copy of a log is lost as a whole: nothing in it passes for a message of the topic."""
    from tidelog.log.frame import encode_many

    copy = encode_many(1, [b"not a message", b"nor this"]).buffer
    store = FaultyStore()
    topic = ColdTopic(store, FaultyMetadata(), codec="none", index_every=100)
    topic.fill([copy + b"end", b"one", b"two"], 3)
    key = topic.key_of(topic.descriptors[0])
    data = bytearray(store.contents()[key])
    data[BINDING_BYTES + HEADER_BYTES + len(copy)] ^= 1
    store.tamper(key, bytes(data))
    with topic.history() as history:
        assert read_skipping(history) == [(1, b"one"), (2, b"two")]


# Messages that are larger than anybody allowed

LARGE = bytes(40 << 20)
ALLOWED = 16 << 20


def large_topic(codec: Codec) -> ColdTopic:
    """One object: a message of a few bytes, one of 40 MiB, and another small one."""
    topic = ColdTopic(FaultyStore(), FaultyMetadata(), codec=codec, index_every=1)
    topic.fill([b"before", LARGE, b"behind"], 3)
    return topic


def without_size(topic: ColdTopic) -> None:
    """Its catalog says nothing about a large message: the object is not what was shipped."""
    (descriptor,) = topic.descriptors
    topic.publish(msgspec.structs.replace(descriptor, largest_bytes=msgspec.UNSET))


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_that_nobody_allowed_takes_no_memory(codec: Codec) -> None:
    """Else an object of some KiB makes every reader take up to 1 GiB. The error names object, byte and setting."""
    topic = large_topic(codec)
    without_size(topic)
    with topic.history(max_message_bytes=ALLOWED, range_bytes=1 << 16) as history:
        tracemalloc.start()
        with pytest.raises(CorruptionError, match=f"read it with max_message_bytes = {len(LARGE)}") as caught:
            everything(history.read(0, END))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
        assert str(caught.value.path) == topic.key_of(topic.descriptors[0])
        assert caught.value.byte == topic.descriptors[0].offset_index[1][1]
        left = everything(history.read(0, END, on_gap="skip"))
    assert left == [(0, b"before"), (2, b"behind")]
    with topic.history(max_message_bytes=len(LARGE)) as history:
        assert [len(payload) for _, payload in everything(history.read(0, END))] == [6, len(LARGE), 6]


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_that_was_allowed_when_it_was_shipped_stays_readable(codec: Codec) -> None:
    """Whoever lowers `max_message_bytes`, or reads with the default, reads what the catalog says is there."""
    topic = large_topic(codec)
    assert topic.descriptors[0].largest_bytes == HEADER_BYTES + len(LARGE)
    with topic.history(max_message_bytes=1) as history:
        assert [len(payload) for _, payload in everything(history.read(0, END))] == [6, len(LARGE), 6]


def test_a_lowered_setting_leaves_what_is_shipped_readable(tmp_path: Path) -> None:
    """The shipper writes down how large the largest message is, a rebuilt catalog too, if the setting allows it."""
    store, name = (tmp_path / "store").as_uri(), "shop/orders"
    large = bytes(9 << 20)
    with tidelog.open(tmp_path / "a", store=store, metadata="bucket", ship_compression="zstd") as log:
        topic = log.topic(name)
        topic.append_many([b"small", large], sync=True)
        topic.ship()
        topic.seal()
    with tidelog.open(tmp_path / "b", store=store, metadata="bucket", max_message_bytes=1000) as log:
        assert [len(message.value or b"") for message in log.topic(name).read(0)] == [5, len(large)]
        assert log._tier is not None
        catalog = log._tier.catalog("shop", "orders")
        before = catalog.oldest()
        assert before is not None
        assert before.most_frame_bytes > len(large)

        def rebuilt(max_message_bytes: int) -> object:
            return rebuild_catalog(
                *(catalog.metadata, catalog.keys, log._tier.objects),  # type: ignore[union-attr]  # it has one, see above
                clock=SystemClock(),
                replace=True,
                max_message_bytes=max_message_bytes,
            )

        with pytest.raises(CorruptionError, match="max_message_bytes = "):
            rebuilt(1000)
        rebuilt(10 << 20)
        after = catalog.oldest()
        assert after is not None
        assert after.most_frame_bytes == before.most_frame_bytes
