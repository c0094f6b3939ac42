"""Finding a version in one step, and the data of a plain value: the kernel gives the answers of its twin."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
from tests.engine.engines import RandomEntries, open_local
from tests.oracles import records, results, vacuum_rows, versions
from tests.twins import agreed, outcome

from tidelog import _native
from tidelog.engine.btree.page import ROOT
from tidelog.engine.mvcc.cells import (
    at,
    bucket_prefix,
    encode_inline,
    encode_pointer,
    encode_tombstone,
    object_prefix,
)
from tidelog.engine.mvcc.versions import BucketVersion
from tidelog.engine.wal.value import encode_value
from tidelog.log.frame import crc32, encode_many

engine_kernel = _native
record_kernel = _native


def test_every_version_is_found_as_the_twin_finds_it(tmp_path: Path) -> None:
    """Pointers, small ones, tombstones, what is not there, names that are too long, and pages that are missing."""
    entries = RandomEntries("twin", keys=400)
    with open_local(tmp_path / "e") as engine:
        engine.apply_many(entries.entries(1500))
        pages = engine._core.pool.pages
        chance = random.Random(4)
        for _ in range(2000):
            bucket = f"bucket-{chance.randrange(4)}"
            key = chance.choice(entries._keys) if chance.random() < 0.9 else "nothing" * chance.randrange(1, 500)
            wanted = (
                pages,
                ROOT,
                bucket,
                key,
                chance.choice((0, 1, engine.applied_seq, chance.randrange(9000), 2**64 - 1)),
            )
            agreed(engine_kernel, versions, "find_version", *wanted)
        some = {page: pages[page] for page in list(pages)[:2]}
        for key in entries._keys:
            wanted = some, ROOT, "bucket-0", key, engine.applied_seq
            agreed(engine_kernel, versions, "find_version", *wanted)


def test_the_data_of_a_value() -> None:
    """Whole, cut short, with metadata, with another checksum."""
    for data in (b"", b"x", b"y" * 5000):
        for metadata in ({}, {"a": 1}):
            stored = encode_value(data, metadata)
            for size in (len(data), len(data) + 1, 2**63):
                for crc in (crc32(stored), 0):
                    found = agreed(record_kernel, records, "plain_data", stored, size, crc)
                    is_good = not metadata and size == len(data) and crc == crc32(stored)
                    assert found == ("returned", data if is_good else None)


def test_records_are_surveyed_as_the_twin_does() -> None:
    """Random bytes as records, and records that are too short."""
    chance = random.Random(9)
    for _ in range(300):
        payloads = []
        for _ in range(chance.randint(1, 20)):
            size = chance.randint(1, 31) if chance.random() < 0.02 else chance.randint(32, 90)
            payloads.append(bytes((chance.randrange(9), chance.randrange(8))) + chance.randbytes(size))
        frames = encode_many(7, payloads)
        arguments = 7, frames.buffer, frames.positions, frames.lengths
        agreed(engine_kernel, results, "survey", *arguments, 3, 5)
        agreed(engine_kernel, results, "entry_ends", *arguments)


def some_cells(chance: random.Random) -> list[tuple[bytes, bytes]]:
    """Versions of a few names in the order of the tree, of all kinds, some of them damaged."""
    cells: dict[bytes, bytes] = {}
    for _ in range(chance.randrange(40)):
        prefix = object_prefix(chance.choice("ab"), chance.choice(("k", "kk", "l")))
        if chance.random() < 0.1:
            prefix = bucket_prefix(chance.choice("ab"))
        stored, codec = chance.randbytes(chance.randrange(9)), chance.choice((0, 0, 2))
        kinds = [
            encode_tombstone(0),
            encode_inline(1, 5, 7, codec, stored),
            *[encode_pointer(1, 5, 7, 0, chance.randrange(60), 1000, chance.randrange(99)) for _ in range(4)],
        ]
        value = chance.choice(kinds)
        if chance.random() < 0.01:
            value = value[: chance.randrange(len(value))]
        cells[at(prefix, chance.randrange(30))] = value
    return sorted(cells.items())


def test_a_collection_counts_and_judges_cells_as_the_twin_does() -> None:
    """All kinds of versions, of buckets that are there, are not, or were made later, and of names that are cut off."""
    chance, judged, given_back = random.Random(5), 0, 0
    for _ in range(3000):
        cells, is_last = some_cells(chance), chance.random() < 0.5
        bounds = sorted(chance.sample(range(60), 6))
        usages = [array("Q", [0, *bounds[:2], 0, *bounds[2:4], 0, *bounds[4:], 0]) for _ in range(2)]
        created = {
            name: BucketVersion(chance.randrange(20), 0, False) for name in (b"a", b"b") if chance.random() < 0.9
        }
        rule = is_last, chance.randrange(30), chance.randrange(1, 4), created
        found = [
            outcome(judge, cells, *rule, usage)
            for judge, usage in zip((_native.judge_cells, vacuum_rows.judge_cells), usages, strict=True)
        ]
        assert found[0] == found[1]
        if found[0][0] == "returned":
            assert usages[0] == usages[1]
            judged += len(found[0][1][1])
            given_back += len(found[0][1][4])
        agreed(
            _native, vacuum_rows, "pointing_cells", cells, *sorted(chance.sample(range(70), 2)), chance.randrange(30)
        )
        counted = [
            outcome(count, cells, usage)
            for count, usage in zip((_native.count_cells, vacuum_rows.count_cells), usages, strict=True)
        ]
        assert counted[0] == counted[1]
    assert judged > 300
    assert given_back > 1000


def test_what_is_no_cell_is_refused() -> None:
    """Not read: cells that are no pairs of bytes, keys without a seq, arrays that are no pieces."""
    good = [(at(object_prefix("b", "k"), 1), encode_tombstone(0))]
    for cells in ([1], [(b"k",)], [("k", b"")], [(b"short", b"")], tuple(good)):
        with pytest.raises((TypeError, ValueError)):
            _native.count_cells(cells, array("Q", [0]))  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError)):
            _native.pointing_cells(cells, 0, 1, 1)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError)):
            _native.judge_cells(cells, True, 1, 1, {}, array("Q", [0]))  # type: ignore[arg-type]
    for usage in (array("Q"), array("Q", [0, 1]), array("B", [0]), b"\0" * 8):
        with pytest.raises((TypeError, ValueError, BufferError)):
            _native.count_cells(good, usage)  # type: ignore[arg-type]
