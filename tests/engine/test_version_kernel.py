"""Finding a version in one step, and the data of a plain value: the kernel gives the answers of its twin."""

from __future__ import annotations

import random
from pathlib import Path

from tests.engine.engines import RandomEntries, open_local
from tests.oracles import records, results, versions
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.btree.page import ROOT
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
