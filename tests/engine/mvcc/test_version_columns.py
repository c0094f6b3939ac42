"""Rows of the version index as columns: which versions are to be seen, and the kernel held against its twin."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.engines import RandomEntries, open_local
from tests.oracles import version_columns as version_columns_oracle
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.mvcc.cells import (
    OBJECTS,
    at,
    decode_cell,
    encode_inline,
    encode_pointer,
    encode_tombstone,
    object_prefix,
    parse,
    prefix_end,
)
from tidelog.engine.mvcc.versions import VersionColumns, VersionLook
from tidelog.errors import DataError

kernel: Any = _native
NAMES = st.sampled_from(["a", "b", "ab", "ä", "b" * 50])
SEQS = st.integers(1, 40)
CELLS = st.one_of(
    st.builds(encode_tombstone, st.integers(0, 3)),
    st.builds(
        encode_inline, st.integers(0, 3), st.just(2), st.integers(0, 99), st.integers(0, 1), st.binary(max_size=9)
    ),
    st.builds(encode_pointer, st.integers(0, 3), SEQS, SEQS, st.integers(0, 1), SEQS, SEQS, SEQS),
)
ROWS = st.dictionaries(st.tuples(NAMES, NAMES, SEQS), CELLS, max_size=30)
CREATED = st.dictionaries(NAMES, st.tuples(SEQS, st.integers(0, 3)))


def raw_of(rows: dict[tuple[str, str, int], bytes]) -> list[bytes]:
    """Rows as they are in a block, in order, one by one."""
    keys = sorted((at(object_prefix(bucket, key), seq), cell) for (bucket, key, seq), cell in rows.items())
    return [struct.pack("<HH", len(key), len(cell)) + key + cell for key, cell in keys]


def versions_in(columns: VersionColumns) -> list[tuple[Any, ...]]:
    """The columns as rows: bucket, key, seq, cell."""
    names = []
    for one in (columns.buckets, columns.keys):
        ends = memoryview(one.ends).cast("i")
        names.append([one.data[ends[at] : ends[at + 1]].decode() for at in range(columns.count)])
    return list(zip(*names, memoryview(columns.seqs).cast("Q"), columns.cells(), strict=True))


def seen(rows: dict[tuple[str, str, int], bytes], created: dict[str, tuple[int, int]], seq: int) -> list[Any]:
    """The rule, said in the plainest way."""
    found = []
    for bucket, key in sorted({name[:2] for name in rows}, key=lambda name: object_prefix(*name)):
        newest = max((one for b, k, one in rows if (b, k) == (bucket, key) and one <= seq), default=None)
        if newest is None or bucket not in created:
            continue
        cell = decode_cell(rows[bucket, key, newest])
        if not cell.is_tombstone and (newest, cell.order) >= created[bucket]:
            found.append((bucket, key, newest, cell))
    return found


@given(ROWS, CREATED, SEQS, st.integers(1, 9))
def test_what_is_to_be_seen_is_what_the_rule_says(
    rows: dict[tuple[str, str, int], bytes], created: dict[str, tuple[int, int]], seq: int, step: int
) -> None:
    """However the rows are cut into pieces, the newest versions that belong to their buckets come, with their cells."""
    look = VersionLook(seq, created, start=OBJECTS, stop=prefix_end(OBJECTS))
    raw = raw_of(rows)
    found = [
        version
        for begin in range(0, len(raw), step)
        for version in versions_in(look.gather(b"".join(raw[begin : begin + step])))
    ]
    assert found == seen(rows, created, seq)


@given(ROWS, CREATED, SEQS, st.booleans(), st.data())
def test_the_kernel_and_its_twin_agree(
    rows: dict[tuple[str, str, int], bytes],
    created: dict[str, tuple[int, int]],
    seq: int,
    all_versions: bool,
    data: st.DataObject,
) -> None:
    """On good rows and on damaged ones, for any range."""
    start, stop = (object_prefix(data.draw(NAMES), data.draw(NAMES)) for _ in range(2))
    for limits in ((start, stop), (b"", b"\xff")):
        look = VersionLook(seq, created, start=limits[0], stop=limits[1], all_versions=all_versions)
        raw = bytearray(b"".join(raw_of(rows)))
        for _ in range(data.draw(st.integers(0, 2)) if raw else 0):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        agreed(kernel, version_columns_oracle, "gather_versions", bytes(raw), *look._range, b"", *look._buckets)
        for columns in range(5):
            agreed(
                kernel, version_columns_oracle, "gather_rows", bytes(raw), *look._range, b"", *look._buckets, columns
            )


def test_all_versions_are_those_of_the_tree(tmp_path: Any) -> None:
    """The rows of an engine's tree come out as they went in."""
    with open_local(tmp_path) as engine:
        engine.apply_many(RandomEntries("tree").entries(60))
        rows = list(engine._core.tree.scan(OBJECTS, prefix_end(OBJECTS)))
    raw = b"".join(struct.pack("<HH", len(key), len(cell)) + key + cell for key, cell in rows)
    look = VersionLook(1 << 40, {}, start=b"", stop=b"\xff", all_versions=True)
    assert versions_in(look.gather(raw)) == [(*parse(key), decode_cell(cell)) for key, cell in rows]


@pytest.mark.parametrize("raw", [b"\1", b"\1\0\1\0x", struct.pack("<HH", 13, 17) + b"x" * 30])
def test_what_is_no_version_is_refused(raw: bytes) -> None:
    """Rows that are cut short, and keys that are none."""
    look = VersionLook(1, {}, start=b"", stop=b"\xff")
    with pytest.raises(DataError):
        look.gather(raw)
