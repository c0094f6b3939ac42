"""Records, indexes and blob files with nothing wrong are found to be so in C; the rest is left to Python."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.oracles import sound
from tests.pipeline.engines.damaged import StoredEngine
from tests.twins import outcome

from tidelog import _native
from tidelog.engine.sst.sstable import SSTable
from tidelog.errors import DataError
from tidelog.log.frame import Frames, encode_many, scan
from tidelog.pipeline.pieces import bytes_column

CHANGES = 300


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredEngine:
    """An engine with everything that one can have in a store."""
    return StoredEngine.make(tmp_path_factory.mktemp("sound") / "store")


def frames_of(stored: StoredEngine, number: int) -> Frames:
    """The records of an object of the log, as they were shipped."""
    descriptor = stored.descriptors[number]
    data = stored.log_object(number).read_bytes()[descriptor.header_bytes :]
    found = scan(data, 0, descriptor.start_offset).frames
    assert found.next_offset == descriptor.end_offset + 1
    return found


def places_of(lsn: int, record: bytes) -> tuple[bytes, bytes, bytes]:
    """One record, as the kernel takes it."""
    frames = encode_many(lsn, [record])
    return frames.buffer, frames.positions, frames.lengths


def same(name: str, *arguments: Any) -> Any:
    """What both give; where bytes are no index at all, both say so in words of their own."""
    kernel, oracle = (outcome(getattr(module, name), *arguments) for module in (_native, sound))
    if kernel[0] == "raised":
        assert kernel[1] is oracle[1] is DataError
        return None
    assert kernel == oracle
    return kernel[1]


def flipped(data: bytes, chance: random.Random) -> bytes:
    """One bit is another, or the end is missing."""
    at = chance.randrange(len(data))
    if chance.random() < 0.1:
        return data[:at] or data
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def test_records_are_sound_where_all_decoders_say_so(stored: StoredEngine) -> None:
    """As they were written, and with one bit of one record changed."""
    chance, judged = random.Random(11), set[bool]()
    payloads = list[bytes]()
    for number in range(len(stored.descriptors)):
        frames = frames_of(stored, number)
        payloads += map(bytes, frames.payloads())
        same("sound_records", frames.first_offset, frames.buffer, frames.positions, frames.lengths)
    lsn = len(payloads)
    is_sound = [not same("sound_records", lsn, *places_of(lsn, one))[2] for one in payloads]
    sound_ones = [payload for payload, is_one in zip(payloads, is_sound, strict=True) if is_one]
    assert 0 < len(sound_ones) < len(payloads)
    for _ in range(CHANGES):
        record = flipped(chance.choice(sound_ones), chance)
        judged.add(bool(same("sound_records", lsn, *places_of(lsn, record))[2]))
    assert judged == {False, True}


def blocks_of(stored: StoredEngine, *, is_values: bool) -> list[bytes]:
    """Rows of one of the indexes, without those of values that are files."""
    root = stored.compaction
    parts = root.values if is_values else root.versions
    kind: Any = "values" if is_values else "versions"
    return [block.raw for part in parts for block in SSTable(stored.objects, part, kind=kind).blocks()]


def said_of(stored: StoredEngine) -> list[tuple[int, int, int, bytes]]:
    """What both indexes say: file, byte, source, and of the value."""
    rows: list[tuple[int, int, int, bytes]] = []
    for is_values in (True, False):
        for raw in blocks_of(stored, is_values=is_values):
            count, (files, places, said, *_) = same("said_places", raw, is_values, len(stored.compaction.blob_files))
            width = len(said) // max(1, count)
            numbers = zip(struct.unpack(f"={count}I", files), struct.unpack(f"={count}Q", places), strict=True)
            rows += [
                (file, byte, 0 if is_values else 1, said[at * width : (at + 1) * width])
                for at, (file, byte) in enumerate(numbers)
            ]
    return sorted(rows)


def test_indexes_say_what_their_decoders_say(stored: StoredEngine) -> None:
    """As they were written, with too few blob files, and with one bit changed."""
    chance = random.Random(12)
    for is_values in (True, False):
        blocks = blocks_of(stored, is_values=is_values)
        for raw in blocks:
            same("said_places", raw, is_values, 0)
        for _ in range(CHANGES):
            changed = flipped(chance.choice(blocks), chance)
            if outcome(sound.said_places, changed, is_values, 9)[0] == "returned":
                same("said_places", changed, is_values, 9)


def columns(rows: list[tuple[int, int, int, bytes]]) -> tuple[bytes, bytes, Any]:
    """Rows as the kernel takes them."""
    places = struct.pack(f"={len(rows)}Q", *(byte for _, byte, _, _ in rows))
    sources = struct.pack(f"={len(rows)}I", *(source for _, _, source, _ in rows))
    return places, sources, bytes_column(pa.array([said for *_, said in rows], pa.binary()))


def test_blob_files_are_sound_where_indexes_and_directory_agree(stored: StoredEngine) -> None:
    """Each as it was written; with a bit of the file, a row too few or too many, and a bit of a row."""
    chance, judged = random.Random(13), set[bool]()
    rows = said_of(stored)
    for number, file in enumerate(stored.compaction.blob_files):
        data = stored.path(file.key).read_bytes()
        own = [row for row in rows if row[0] == number]
        found = same("sound_blob_file", data, *columns(own))
        assert found[:3] == (file.values, file.live_values, file.live_bytes)
        for _ in range(CHANGES // len(stored.compaction.blob_files)):
            same("sound_blob_file", flipped(data, chance), *columns(own))
            at = chance.randrange(len(own))
            one = (*own[at][:3], flipped(own[at][3], chance))
            for changed in (own[:at] + own[at + 1 :], own[: at + 1] + own[at:], [*own[:at], one, *own[at + 1 :]]):
                judged.add(same("sound_blob_file", data, *columns(changed)) is None)
    assert judged == {False, True}


def test_what_the_kernels_are_given_is_checked(tmp_path: Path) -> None:
    """Columns that do not go together are refused."""
    column = bytes_column(pa.array([b"said"], pa.binary()))
    with pytest.raises(ValueError, match="different numbers of rows"):
        _native.sound_blob_file(b"", bytes(16), bytes(4), column)
    with pytest.raises(ValueError, match="outside the buffer"):
        _native.sound_records(1, b"short", struct.pack("=Q", 3), struct.pack("=I", 3))
    assert _native.sound_blob_file(b"no blob file", bytes(8), bytes(4), column) is None
