"""Row files: all rows come back, one is found with one request, and every damage is noticed."""

from __future__ import annotations

import random
from bisect import bisect_left
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.stations import KEYS, new_store

from tidelog.cold.fetch import ColdCache
from tidelog.engine.sst.block import Row, rows_in
from tidelog.engine.sst.sstable import RowPart, SSTable, encode_sstable, opened_in_memory
from tidelog.errors import CorruptionError, DataError, InputError, NotFoundError
from tidelog.store.keys import CompactedId
from tidelog.store.scheduler import DaemonPool
from tidelog.testing import FaultyStore

ROWS = st.dictionaries(
    st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=60), min_size=1, max_size=60
).map(lambda rows: sorted(rows.items()))


def written(store: FaultyStore, rows: list[Row]) -> RowPart:
    """A file with these rows. (Of values: values may be anything.)"""
    encoded = encode_sstable("values", rows)
    key = KEYS.compacted(CompactedId("values", 1, encoded.digest))
    store.put(key, encoded.data)
    return encoded.part(key)


def many_rows(count: int) -> list[Row]:
    """Rows for several blocks: they do not compress well."""
    chance = random.Random(count)
    return [(b"key-%08d" % (2 * number), chance.randbytes(chance.randrange(1, 200))) for number in range(count)]


@given(ROWS)
def test_what_was_written_is_read(rows: list[Row]) -> None:
    """All rows in order, from the store and from memory; the same rows give the same file."""
    store = new_store()
    part = written(store, rows)
    file = SSTable(store, part, kind="values")
    assert list(file.rows()) == rows
    assert (part.rows, part.first_key, part.last_key) == (len(rows), rows[0][0], rows[-1][0])
    assert (file.footer.kind, file.footer.rows, file.footer.digest) == ("values", len(rows), part.digest)
    assert list(opened_in_memory(store.contents()[part.key], part).rows()) == rows
    assert encode_sstable("values", rows).digest in part.key


@given(ROWS, st.binary(max_size=40), st.none() | st.binary(max_size=40))
def test_ranges_of_rows(rows: list[Row], start: bytes, stop: bytes | None) -> None:
    """From a key on, up to another."""
    store = new_store()
    file = SSTable(store, written(store, rows))
    assert list(file.rows(start, stop)) == [row for row in rows if row[0] >= start and (stop is None or row[0] < stop)]
    at = bisect_left(rows, (start,))
    assert file.at_or_after(start) == (rows[at] if at < len(rows) else None)


def test_a_row_costs_one_request() -> None:
    """Of one block, once the footer is known; none when the block is in the cache."""
    store, rows = new_store(), many_rows(4000)
    file = SSTable(store, written(store, rows), cache=ColdCache(1 << 20))
    assert len(file.footer.blocks) > 4
    for number in (0, 1777, 3999):
        key, value = rows[number]
        store.reset_traffic()
        assert file.at_or_after(key) == (key, value)
        assert store.traffic.requests["read_range"] == 1
        assert file.at_or_after(b"key-%08d" % max(0, 2 * number - 1)) == (key, value)
        assert file.at_or_after(key + b"\0") == (rows[number + 1] if number < 3999 else None)
        assert store.traffic.requests["read_range"] <= 2
    store.reset_traffic()
    assert list(file.rows()) == rows
    assert store.traffic.requests["read_range"] == 1


def test_blocks_behind_those_that_are_warmed_come_with_the_same_request() -> None:
    """As many times as many as is said: who goes on there makes no request, a short look fetches nothing more."""
    store, rows = new_store(), many_rows(8000)
    file = SSTable(store, written(store, rows), cache=ColdCache(8 << 20))
    blocks = file.footer.blocks
    assert len(blocks) > 9
    store.reset_traffic()
    file.warm(blocks[0].first_key, blocks[0].last_key, ahead=3)  # one block is read when it is looked at
    assert "read_range" not in store.traffic.requests
    file.warm(blocks[0].first_key, blocks[1].last_key, ahead=3)
    file.warm(blocks[2].first_key, blocks[7].last_key, ahead=3)
    assert store.traffic.requests["read_range"] == 1
    assert len(list(file.raw_blocks(blocks[0].first_key, blocks[7].last_key))) == 8
    assert store.traffic.requests["read_range"] == 1
    file.warm(blocks[7].first_key, blocks[8].last_key)
    assert store.traffic.requests["read_range"] == 2


def test_blocks_are_fetched_ahead_of_who_reads_on() -> None:
    """Single ones are not; of those that come together the next are asked for when some are read, also where no thread
    is free for that, or all are gone.
    """
    store, rows = new_store(), many_rows(9000)
    file = SSTable(store, written(store, rows), kind="values")
    blocks, ends = len(file.footer.blocks), (rows[0][0], rows[-1][0] + b"\0")
    assert blocks > 8
    for threads in (DaemonPool(1, "test"), _NobodyFree(), _Closed()):
        store.reset_traffic()
        found = file.blocks_between(*ends, iter([1, 2, 3, blocks]), threads)
        whole = [next(found)]
        assert store.traffic.requests["read_range"] == 1
        whole.append(next(found))  # the first of two
        if isinstance(threads, DaemonPool):
            threads.submit(int).result()  # after what was asked for ahead
            assert store.traffic.requests["read_range"] == 3
        whole += found
        assert [row for raw, count in whole for row in rows_in(raw, count, b"")] == rows
        assert store.traffic.requests["read_range"] == 4
    left = file.blocks_between(*ends, iter([2, 3, 4]), threads)
    next(left)
    left.close()  # type: ignore[attr-defined]


class _NobodyFree(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()


class _Closed(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise RuntimeError("closed")


def test_the_cache_is_bounded() -> None:
    """What was not used for the longest time goes."""
    cache = ColdCache(3000)
    for number in range(5):
        cache.add(number, bytes(1000), "file")
        cache.get_block("file", 0)
    assert cache.statistics().bytes <= 3000
    assert cache.get_block("file", 0) is not None
    assert cache.get_block("file", 1) is None
    assert cache.get_block("other", 0) is None
    assert cache.get(0, 1) is None
    cache.add(9, bytes(5000), "file")
    assert cache.get_block("file", 9) is None


def test_every_flipped_bit_is_noticed() -> None:
    """Whatever is changed in the file, not all rows are handed out without an error that names the file."""
    store = new_store()
    part = written(store, [(b"key-%d" % number, b"value") for number in range(9)])
    good = store.contents()[part.key]
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        store.put(part.key, bytes(bad))
        with pytest.raises(CorruptionError) as caught:
            list(SSTable(store, part, kind="values").rows())
        assert str(caught.value.path) == part.key
        with pytest.raises(CorruptionError):
            opened_in_memory(bytes(bad), part)


def test_the_byte_of_a_damaged_block_is_named() -> None:
    """So that it can be looked at."""
    store, rows = new_store(), many_rows(2000)
    part = written(store, rows)
    place = SSTable(store, part).footer.blocks[2]
    bad = bytearray(store.contents()[part.key])
    bad[place.byte + 100] ^= 4
    store.put(part.key, bytes(bad))
    with pytest.raises(CorruptionError) as caught:
        list(SSTable(store, part).rows())
    assert caught.value.byte == place.byte
    assert SSTable(store, part).at_or_after(rows[0][0]) == rows[0], "other blocks can be read"
    with pytest.raises(CorruptionError):
        SSTable(store, part).at_or_after(place.first_key)


def test_a_file_that_is_cut_short_or_longer() -> None:
    """It has the size that it must have."""
    store = new_store()
    part = written(store, many_rows(100))
    good = store.contents()[part.key]
    for data in (good[:-1], good[:10], b"", good + b"x"):
        store.put(part.key, data)
        with pytest.raises(CorruptionError):
            list(SSTable(store, part).rows())
    store.delete(part.key)
    with pytest.raises(NotFoundError):
        list(SSTable(store, part).rows())


@pytest.mark.parametrize(
    "change", [{"rows": 8}, {"digest": "00"}, {"first_key": b"a"}, {"last_key": b"z"}, {"size": 9}]
)
def test_a_file_that_is_another(change: dict[str, object]) -> None:
    """What a root or a state says about it must be so."""
    store = new_store()
    part = written(store, many_rows(9))
    with pytest.raises(CorruptionError):
        list(SSTable(store, msgspec.structs.replace(part, **change)).rows())


def test_a_file_of_another_kind() -> None:
    """Values are not taken for versions."""
    store = new_store()
    with pytest.raises(CorruptionError, match="expected versions"):
        list(SSTable(store, written(store, many_rows(9)), kind="versions").rows())


def test_versions_have_cells() -> None:
    """A value that has none is noticed before a restore takes it."""
    store = new_store()
    encoded = encode_sstable("versions", [(b"key", b"\xff\xff")])
    key = KEYS.compacted(CompactedId("versions", 1, encoded.digest))
    store.put(key, encoded.data)
    with pytest.raises(DataError, match="no cell"):
        list(SSTable(store, encoded.part(key)).rows())


@pytest.mark.parametrize("rows", [[], [(b"b", b"1"), (b"a", b"2")], [(b"a", b"1"), (b"a", b"2")], [(b"", b"1")]])
def test_rows_that_cannot_be_a_file(rows: list[Row]) -> None:
    """None at all, out of order, a key twice, an empty key."""
    with pytest.raises(InputError):
        encode_sstable("versions", rows)
