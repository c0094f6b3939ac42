"""What is known about an object without its data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.compacting import compact_by_hand
from tests.engine.engines import SMALL, open_local
from tests.engine.stations import KEYS, EngineNode, new_store

from tidelog.engine.cold.gc import drop_wal
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CreateBucket, DeleteObject, Entry, PutObject
from tidelog.engine.wal.value import object_crc
from tidelog.errors import ClosedError, DataError, InputError, NotFoundError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyStore

METADATA = {"type": "image/png", "n": 3, "raw": b"\0\1"}
LARGE = b"x" * 200_000
ENTRIES: list[tuple[int, Entry]] = [
    (1, CreateBucket("b")),
    (2, PutObject("b", "tiny", b"t", METADATA)),
    (3, PutObject("b", "plain", LARGE)),
    (4, PutObject("b", "large", LARGE, METADATA)),
    (5, PutObject("b", "empty", b"")),
    (6, PutObject("b", "tiny", b"tt")),
    (7, DeleteObject("b", "empty")),
]


@pytest.fixture(params=["none", "zstd"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Objects of all kinds, as they are and compressed."""
    settings = msgspec.structs.replace(SMALL, wal_compression=request.param)
    with open_local(tmp_path / "e", settings=settings) as engine:
        engine.apply_many(ENTRIES)
        yield engine


def test_it_says_what_a_read_says(engine: Engine) -> None:
    """At every seq, for every object that is there."""
    for seq in range(1, 8):
        for one in engine.list_objects("b", seq=seq):
            found, whole = engine.stat("b", one.key, seq), engine.read("b", one.key, seq)
            assert (found.size, found.metadata) == (len(whole.data), whole.metadata)
            assert (found.seq, found.tier) == (whole.seq, whole.tier)
    assert engine.stat("b", "tiny").seq == 6


def test_what_is_not_there_is_told_as_by_a_read(engine: Engine) -> None:
    """No bucket, no object, not yet, not any more, and an engine that is closed."""
    for bucket, key, seq in (("c", "k", None), ("b", "k", None), ("b", "large", 3), ("b", "empty", None)):
        with pytest.raises(NotFoundError):
            engine.stat(bucket, key, seq)
    with pytest.raises(InputError, match="not applied yet"):
        engine.stat("b", "large", 99)
    with pytest.raises(InputError, match="must be str"):
        engine.stat("b", 5)  # type: ignore[arg-type]
    engine.close()
    with pytest.raises(ClosedError):
        engine.stat("b", "large")


def test_the_metadata_of_a_large_value_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without metadata nothing is."""
    with open_local(tmp_path / "e") as engine:
        engine.apply_many(ENTRIES)
        asked: list[int] = []
        real = engine._read_stored

        def read_stored(position: int, length: int) -> bytes | None:
            asked.append(length)
            return real(position, length)

        monkeypatch.setattr(engine, "_read_stored", read_stored)
        assert engine.stat("b", "large").metadata == METADATA
        assert engine.stat("b", "plain").size == len(LARGE)
        assert len(asked) == 1
        assert asked[0] < 100


def test_a_head_that_is_damaged_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lengths must be those that the index knows."""
    with open_local(tmp_path / "e") as engine:
        engine.apply_many(ENTRIES)
        monkeypatch.setattr(engine, "_read_stored", lambda position, length: b"\xff" * length)
        with pytest.raises(DataError, match="cannot hold"):
            engine.stat("b", "large")


def test_in_the_store_only_metadata_is_a_reason_to_ask() -> None:
    """An object without any costs no request."""
    with EngineNode(FaultyStore(), local_retention_bytes=0).open() as node:
        node.apply_these(ENTRIES)
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(60)
        node.ship_all()
        reader = node.shipping.reader
        assert node.engine.versions("b", "plain")[0].tier == "cold"
        before = reader.statistics().requests
        found = node.engine.stat("b", "plain", 7)
        assert (found.size, found.metadata, found.tier) == (len(LARGE), {}, "cold")
        assert reader.statistics().requests == before
        found = node.engine.stat("b", "large", 7)
        assert (found.size, found.metadata, found.tier) == (len(LARGE), METADATA, "cold")
        assert reader.statistics().requests == before + 2  # the header of the object, and its record


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("size", [60_000, 4_000_000])
@pytest.mark.parametrize("place", ["log", "blob file", "data file"])
def test_stat_of_a_cold_value_without_a_file_of_its_own_fetches_no_data(place: str, size: int, codec: str) -> None:
    """Two stats of 4 MB fetched 8 MB, and those of 60 kB as much: of an uncompressed value its metadata is enough, and
    of a compressed one its first block.
    """
    store, data = new_store(), (b"runs" * 40 + random.Random(1).randbytes(10_000)) * 400
    data, most = data[:size], 130_000 if codec == "zstd" else 1000
    settings: dict[str, Any] = {"large_value_bytes": 8 << 20, "local_retention_bytes": 0, "wal_compression": codec}
    with EngineNode(store, **settings).open() as node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "k", data, METADATA))])
        node.ship_all()
        node.apply_these([(3, PutObject("b", "other", b"o" * 9000))])
        node.ship_all()
    if place != "log":
        compact_by_hand(store, large_bytes=8 << 20 if place == "blob file" else 1500)
        drop_wal(store, BucketMetadataStore(store), KEYS, 1 << 60)
    other = EngineNode(store, name="b", local_retention_bytes=0)
    other.restore()
    with other.open() as node:
        reader = node.shipping.reader
        node.engine.stat("b", "k")  # finds the value, and may read an index for that
        before = reader.statistics().bytes_fetched
        found = node.engine.stat("b", "k")
        assert (found.size, found.metadata, found.tier) == (len(data), METADATA, "cold")
        assert found.crc == object_crc(data, METADATA)
        assert 0 < reader.statistics().bytes_fetched - before <= most
        assert before < most + 5000


@pytest.mark.parametrize("damage", ["bytes", "gone"])
def test_stat_of_a_damaged_cold_value_reads_another_copy(damage: str) -> None:
    """A beginning that cannot be the right one is not believed: the value is read whole, and verified."""
    store, replica, data = new_store(), new_store(), b"x" * 200_000
    node = EngineNode(store, replicas=[replica], local_retention_bytes=0).open()
    with node:
        node.apply_these([(1, CreateBucket("b")), (2, PutObject("b", "k", data, METADATA))])
        node.ship_all()
        node.engine.create_checkpoint()
        node.apply(60)
        node.ship_all()
        assert node.engine.versions("b", "k")[0].tier == "cold"
        for key, good in store.contents().items():
            replica.put(key, good)
            if len(good) > len(data) and data in good:
                begin = good.index(data) - 10
                store.delete([key]) if damage == "gone" else store.put(
                    key, good[:begin] + b"\xff" * 10 + good[begin + 10 :]
                )
        assert node.engine.stat("b", "k").metadata == METADATA
        assert node.shipping.reader.statistics().from_replicas == 1
