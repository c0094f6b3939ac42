"""An object that is read to its last byte gives the descriptor that its shipper published."""

from __future__ import annotations

import pytest
from tests.cold.published import KEYS, LOG_ID, TIME_FIELD, put_object

from tidelog.clock import ManualClock
from tidelog.cold import verify as object_check
from tidelog.cold.blocks import MAX_FRAME_BYTES
from tidelog.cold.catalog import Codec
from tidelog.cold.verify import ObjectCheck
from tidelog.log.binding import encode_binding
from tidelog.log.frame import encode_many
from tidelog.store.keys import ObjectId
from tidelog.testing import FaultyStore

NOW_US = 1_700_000_000_000_000


@pytest.mark.parametrize("range_bytes", [17, 64, 1000])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_any_range_size_gives_the_same_descriptor(
    range_bytes: int, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames and blocks that are larger than a range, and cut anywhere."""
    store = FaultyStore(clock=ManualClock(NOW_US))
    expected = put_object(store, ObjectId(5, 60, 3), NOW_US, codec)
    monkeypatch.setattr(object_check, "RANGE_BYTES", range_bytes)
    (info,) = store.list(KEYS.objects_prefix)
    found = ObjectCheck(store, info, expected.name, LOG_ID, TIME_FIELD, most_frame_bytes=MAX_FRAME_BYTES).descriptor()
    assert found == expected


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
