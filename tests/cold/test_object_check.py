"""An object that is read to its last byte gives the descriptor that its shipper published."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
from tests.cold.published import KEYS, LOG_ID, TIME_FIELD, put_object

from tidelog.clock import ManualClock
from tidelog.cold import verify as object_check
from tidelog.cold.blocks import MAX_FRAME_BYTES
from tidelog.cold.catalog import Codec
from tidelog.cold.verify import ObjectCheck
from tidelog.errors import ConflictError
from tidelog.log.binding import encode_binding
from tidelog.log.frame import encode_many
from tidelog.store.keys import ObjectId
from tidelog.testing import FaultyStore

NOW_US = 1_700_000_000_000_000


@pytest.mark.parametrize("range_bytes", [17, 64, 1000])
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("ahead", [None, ThreadPoolExecutor(1)], ids=["now", "ahead"])
def test_any_range_size_gives_the_same_descriptor(
    range_bytes: int, codec: Codec, ahead: ThreadPoolExecutor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames and blocks that are larger than a range, and cut anywhere; each byte is asked for once."""
    store = FaultyStore(clock=ManualClock(NOW_US))
    expected = put_object(store, ObjectId(5, 60, 3), NOW_US, codec)
    monkeypatch.setattr(object_check, "RANGE_BYTES", range_bytes)
    (info,) = store.list(KEYS.objects_prefix)
    before = store.traffic.bytes_read
    found = ObjectCheck(
        store, info, expected.name, LOG_ID, TIME_FIELD, most_frame_bytes=MAX_FRAME_BYTES, ahead=ahead
    ).descriptor()
    assert found == expected
    assert store.traffic.bytes_read - before == info.size


class _BadOnce(FaultyStore):
    """The first answer for a range that is not the first of its object has a flipped bit."""

    is_damaged = False

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        data = bytearray(super().read_range(key, start, length))
        if start and not self.is_damaged:
            self.is_damaged = True
            data[len(data) // 2] ^= 1
        return memoryview(bytes(data))


class _AtOnce(ThreadPoolExecutor):
    """What is read ahead is there before it is asked for."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        wait([future])
        return future


def test_a_range_that_arrived_damaged_ahead_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad transfer is no bad object, whoever fetched it."""
    store = _BadOnce(clock=ManualClock(NOW_US))
    expected = put_object(store, ObjectId(5, 60, 3), NOW_US, "none")
    (info,) = store.list(KEYS.objects_prefix)
    monkeypatch.setattr(object_check, "RANGE_BYTES", info.size // 5)
    with _AtOnce(1) as ahead:
        found = ObjectCheck(
            store, info, expected.name, LOG_ID, TIME_FIELD, most_frame_bytes=MAX_FRAME_BYTES, ahead=ahead
        ).descriptor()
    assert (found, store.is_damaged) == (expected, True)


def test_an_object_that_goes_while_it_is_read_ahead_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the range is read by the one who needs it."""
    store = FaultyStore(clock=ManualClock(NOW_US))
    expected = put_object(store, ObjectId(5, 60, 3), NOW_US, "none")
    (info,) = store.list(KEYS.objects_prefix)
    monkeypatch.setattr(object_check, "RANGE_BYTES", 100)
    with ThreadPoolExecutor(1) as ahead, pytest.raises(ConflictError, match="was deleted while it was read"):
        ObjectCheck(
            *(store, info, expected.name, LOG_ID, TIME_FIELD),
            most_frame_bytes=MAX_FRAME_BYTES,
            on_frames=lambda frames, at: store.delete(info.key),
            ahead=ahead,
        ).descriptor()


def test_an_index_has_an_entry_every_thousand_messages_and_four_mebibytes() -> None:
    """By the same rule as the shipper's, so that seeking costs the same after a rebuild."""
    store = FaultyStore()
    many = encode_many(0, [b"m"] * 2500 + [b"x" * (3 << 20)] * 3)
    name = ObjectId(0, many.count - 1, 1)
    store.put(KEYS.object(name), encode_binding(LOG_ID, 0) + many.buffer)
    (info,) = store.list(KEYS.objects_prefix)
    descriptor = ObjectCheck(store, info, name, None, None, most_frame_bytes=MAX_FRAME_BYTES).descriptor()
    assert [offset for offset, _ in descriptor.offset_index][:3] == [0, 1000, 2000]
    assert descriptor.offset_index[-1][0] == 2502
    assert (descriptor.first_time_us, descriptor.last_time_us) == (None, None)
    assert store.traffic.bytes_read == info.size
