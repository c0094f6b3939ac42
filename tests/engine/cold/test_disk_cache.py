"""Cold values that are read often come back to this disk, bounded, by second chance; a prefetch brings them at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.campaign import examples
from tests.engine.stations import DIRECTORY, EngineNode, new_store
from tests.log.workbench import wait_until

from tidelog.engine.cold.disk_cache import CACHE, DiskCache, DiskCacheStatistics
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.engine.mvcc.cells import POINTER, Cell
from tidelog.engine.wal.value import CODEC_NONE, encode_value, object_crc
from tidelog.errors import NotFoundError, StoreUnavailableError
from tidelog.files import LocalFiles
from tidelog.testing import FaultyFiles, FaultyStore
from tidelog.testing.survival import POLICIES

SETTINGS: dict[str, Any] = {"local_retention_bytes": 0, "inline_value_bytes": 0, "cold_cache_bytes": 0}
COUNT = 40


def data_of(number: int) -> bytes:
    """The value of an object."""
    return random.Random(number).randbytes(300) * 5


def key_of(number: int) -> str:
    return f"{'even' if number % 2 == 0 else 'odd'}/{number:03d}"


@pytest.fixture
def node() -> Iterator[EngineNode]:
    """An engine whose values have all left its disk."""
    with cold_node() as node:
        yield node


def cold_node(**settings: Any) -> EngineNode:
    node = EngineNode(new_store(), **{**SETTINGS, **settings}).open()
    puts = [(number + 2, PutObject("b", key_of(number), data_of(number))) for number in range(COUNT)]
    node.apply_these([(1, CreateBucket("b")), *puts])
    put_away(node)
    return node


def put_away(node: EngineNode) -> None:
    """Everything leaves the disk."""
    node.ship_all()
    node.engine.create_checkpoint()
    node.apply_these([(node.engine.applied_seq + 1, PutObject("b", "end", b"x" * 40_000))])
    node.ship_all()
    node.engine.create_checkpoint()
    node.ship_all()


def statistics(node: EngineNode) -> DiskCacheStatistics:
    found = node.shipping.reader.statistics().disk_cache
    assert found is not None
    return found


def requests(node: EngineNode) -> int:
    return node.shipping.reader.statistics().requests


def cell_of(position: int, data: bytes) -> Cell:
    stored = encode_value(data, {})
    return Cell(POINTER, 0, len(data), object_crc(data), CODEC_NONE, position, position, len(stored), None)


def test_value_that_is_read_twice_comes_back_to_the_disk(node: EngineNode) -> None:
    """The first read fetches it, the second brings it back, and from then on the store is not needed."""
    engine, key = node.engine, key_of(7)
    assert [engine.read("b", key).tier for _ in range(4)] == ["cold", "cold", "hot", "hot"]
    before = requests(node)
    assert engine.read("b", key).data == data_of(7)
    assert engine.stat("b", key).tier == engine.versions("b", key)[0].tier == "hot"
    assert asyncio.run(engine.read_async("b", key)).tier == "hot"
    assert [one and one.tier for one in engine.read_many([("b", key), ("b", key_of(8))])] == ["hot", "cold"]
    assert requests(node) == before + 1
    assert statistics(node).admitted == 1


def test_value_that_came_back_is_read_while_the_store_is_away(node: EngineNode) -> None:
    """Others are not."""
    store = node.objects
    assert isinstance(store, FaultyStore)
    for _ in range(2):
        node.engine.read("b", key_of(3))
    store.fail("*", times=None)
    assert node.engine.read("b", key_of(3)).data == data_of(3)
    with pytest.raises(StoreUnavailableError):
        node.engine.read("b", key_of(4))


def test_values_that_came_back_are_there_after_a_reopen(node: EngineNode) -> None:
    """A file of the cache has its index, and is used again; what is not whole in it is removed."""
    for _ in range(2):
        node.engine.read("b", key_of(3))
    node.close()
    (path,) = (DIRECTORY / CACHE / name for name in node.files.list(DIRECTORY / CACHE))
    node.open()
    assert node.engine.read("b", key_of(3)).tier == "hot"
    node.close()
    file = node.files.open(path, write=True)
    file.truncate(file.size() - 1)
    file.close()
    node.open()
    assert node.engine.read("b", key_of(3)).tier == "cold"
    assert path.name not in node.files.list(DIRECTORY / CACHE)


def test_damage_in_the_cache_is_a_miss(node: EngineNode) -> None:
    """Bytes that are not what they must be are fetched again; no read returns them or fails."""
    for _ in range(2):
        node.engine.read("b", key_of(3))
    (name,) = node.files.list(DIRECTORY / CACHE)
    file = node.files.open(DIRECTORY / CACHE / name, write=True)
    file.write_at(700, b"damage")
    file.close()
    found = node.engine.read("b", key_of(3))
    assert (found.data, found.tier) == (data_of(3), "cold")


def test_scans_displace_nothing(node: EngineNode) -> None:
    """Reading everything in order, however often, brings nothing back."""
    for _ in range(3):
        assert len(list(node.engine.scan("b", prefix="even/", with_values=True))) == COUNT // 2
    assert statistics(node).admitted == 0


@pytest.mark.parametrize("settings", [{}, {"wal_compression": "zstd"}, {"ship_compression": "zstd"}])
def test_prefetch_brings_a_prefix_to_the_disk(settings: dict[str, Any]) -> None:
    """All values of the prefix are hot afterwards, with few requests; others are as they were."""
    with cold_node(**settings) as node:
        before = requests(node)
        report = node.engine.prefetch("b", "even/")
        assert (report.objects, report.already_here, report.left_out) == (COUNT // 2, 0, 0)
        assert "ship_compression" in settings or requests(node) - before <= COUNT // 4
        before = requests(node)
        for number in range(0, COUNT, 2):
            found = node.engine.read("b", key_of(number))
            assert (found.data, found.tier) == (data_of(number), "hot")
        assert requests(node) == before
        assert node.engine.read("b", key_of(1)).tier == "cold"
        again = node.engine.prefetch("b", "even/")
        assert (again.objects, again.already_here) == (0, COUNT // 2)
        assert asyncio.run(node.engine.prefetch_async("b", "odd/")).objects == COUNT // 2
        with pytest.raises(NotFoundError):
            node.engine.prefetch("nowhere")


def test_prefetch_stops_where_there_is_no_room() -> None:
    """It fills the room, and says what is left out."""
    with cold_node(disk_cache_bytes=16 << 10) as node:
        report = node.engine.prefetch("b", "odd/")
        assert 0 < report.objects < COUNT // 2
        assert report.objects + report.left_out == COUNT // 2
        assert statistics(node).bytes <= 16 << 10


def test_nothing_comes_back_without_room() -> None:
    """With disk_cache_bytes=0 there is no folder."""
    with cold_node(disk_cache_bytes=0) as node:
        assert [node.engine.read("b", key_of(1)).tier for _ in range(4)] == ["cold"] * 4
        assert node.engine.prefetch("b").objects == 0
        assert not node.files.is_directory(DIRECTORY / CACHE)


def test_large_value_that_is_read_twice_comes_back() -> None:
    """In the background, as the file that it is; the bytes are the same before and afterwards, also of ranges."""
    with cold_node(large_value_bytes=1024) as node:
        engine, key = node.engine, key_of(5)
        for _ in range(2):
            assert engine.read("b", key).data == data_of(5)
        wait_until(lambda: statistics(node).values == 1, "it came back")
        before = requests(node)
        with engine.open_object("b", key) as file:
            assert (file.read(), file.tier) == (data_of(5), "hot")
        assert engine.read("b", key, offset=100, length=9).data == data_of(5)[100:109]
        assert engine.stat("b", key).tier == "hot"
        assert requests(node) == before
        assert engine.prefetch("b", "odd/").objects == COUNT // 2 - 1
        node.close()
        node.open()
        assert node.engine.read("b", key).tier == "hot"


def test_read_values_get_a_second_chance_and_others_leave(tmp_path: Path) -> None:
    """The oldest leave first, except those that were read since; the room is never exceeded."""
    files = FaultyFiles()
    files.make_directories(tmp_path)
    cache = DiskCache(files, tmp_path, 512 << 10)
    cells = [cell_of(number * 10_000, random.Random(number).randbytes(2000)) for number in range(600)]
    datas = [encode_value(random.Random(number).randbytes(2000), {}) for number in range(600)]
    for number, (cell, stored) in enumerate(zip(cells, datas, strict=True)):
        assert cache.add(cell.position, stored)
        assert cache.get(cells[0]) == datas[0]  # read all the time
        assert cache.statistics().bytes <= 512 << 10
        assert cache.get(cells[number]) == stored or number == 0
    assert cache.get(cells[1]) is None
    assert cache.get(cells[599]) == datas[599]
    found = cache.statistics()
    assert found.kept > 0
    assert found.evicted == found.admitted - found.values
    cache.close()


@pytest.mark.deeper
def test_cache_gives_what_was_put_in_or_nothing_whatever_fails(tmp_path: Path) -> None:
    """A full disk, crashes and reopens cost values their place; no read fails, and none returns another's bytes."""
    for seed in range(examples(6)):
        choose, files = random.Random(f"cache-{seed}"), FaultyFiles()
        files.make_directories(tmp_path)
        capacity = choose.choice((8 << 10, 200 << 10, 1 << 20))
        cache = DiskCache(files, tmp_path, capacity)
        for _ in range(300):
            number = choose.randrange(80)
            data = _data(number)
            cell = cell_of(number * 10_000, data)
            found = cache.get(cell)
            assert found in (None, encode_value(data, {}))
            if found is None and cache.is_read_again(cell.position, cell.stored_bytes):
                cache.add(cell.position, encode_value(data, {}))
            assert cache.statistics().bytes <= capacity
            match choose.randrange(60):
                case 0:
                    files.capacity_bytes = choose.choice((0, 10_000, None))
                case 1:
                    files = files.after_crash(choose.choice(POLICIES), seed=seed)
                    cache = DiskCache(files, tmp_path, capacity)
                case 2:
                    cache.close()
                    cache = DiskCache(files, tmp_path, capacity)


def _data(number: int) -> bytes:
    choose = random.Random(f"data-{number}")
    return choose.randbytes(choose.randrange(5000))


def test_threads_share_the_cache(tmp_path: Path) -> None:
    """Readers and writers of few values in little room: each gets the value that it asked for, or none."""
    cache = DiskCache(LocalFiles(), tmp_path, 64 << 10)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(200):
            number = choose.randrange(60)
            cell = cell_of(number * 10_000, _data(number))
            if cache.get(cell) is None:
                cache.add(cell.position, encode_value(_data(number), {}))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
    assert cache.statistics().bytes <= 64 << 10
