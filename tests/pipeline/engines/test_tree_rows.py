"""Rows of the tree as columns: each kernel held against its oracle, with arrays from anywhere and damaged rows."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pytest
from tests.engine.stations import EngineNode, new_store
from tests.oracles import tree_rows as oracle
from tests.pipeline.engines.test_log_rows import planned
from tests.twins import agreed

from tidelog import _native
from tidelog.engine.mvcc.cells import at, encode_bucket, encode_inline, encode_pointer, encode_tombstone
from tidelog.engine.mvcc.vacuum_rules import Rule, judged
from tidelog.engine.mvcc.versions import BucketVersion, CreatedColumns
from tidelog.engine.sst.blob_file import (
    BlobPointer,
    FilePointer,
    Place,
    encode_value_pointer,
    encode_version,
    value_key,
)
from tidelog.engine.sst.block import pack_rows
from tidelog.engine.wal.replay import counting
from tidelog.engine.wal.value import CODEC_NONE, CODEC_ZSTD
from tidelog.pipeline.jobs.engine.columns import (
    going_rows,
    live_values,
    pointing_elsewhere,
    raw_numbers,
    whole_groups,
    whole_names,
)
from tidelog.pipeline.jobs.engine.rows import ROW_SCHEMA, Retained, rows_of
from tidelog.pipeline.pieces import _column, bytes_column
from tidelog.pipeline.source.log_changes import change_columns
from tidelog.pipeline.tasks import as_batches

kernel: Any = _native
Row = tuple[bytes, bytes]
ROUNDS = 60


def rows_by(chance: random.Random) -> list[Row]:
    """Versions of some names in two buckets, in order: pointers, small values, deletions; and rows of the buckets."""
    rows = [(at(b"bone\0", 3), encode_bucket(chance.randrange(3), is_deleted=chance.random() < 0.2))]
    for bucket in (b"one", b"two"):
        for number in range(chance.randrange(1, 9)):
            seqs = sorted({chance.randrange(1, 40) for _ in range(chance.randrange(1, 6))}, reverse=True)
            rows += [(at(b"o%b\0key-%02d\0" % (bucket, number), seq), cell_by(chance, seq)) for seq in seqs]
    return rows


def cell_by(chance: random.Random, seq: int) -> bytes:
    kind, order = chance.random(), chance.randrange(3)
    if kind < 0.2:
        return encode_tombstone(order)
    if kind < 0.4:
        return encode_inline(order, 3, chance.randrange(1 << 32), 0, b"small")
    return encode_pointer(order, chance.randrange(1 << 20), seq, chance.randrange(2), seq, 1000 * seq, seq)


def arrays_of(chance: random.Random, rows: list[Row]) -> tuple[pa.Array, pa.Array]:
    """Keys and cells, in arrays that begin behind others."""
    before = chance.randrange(3)
    extra: list[Row] = [(b"x" * 9, b"y")] * before
    keys = pa.array([key for key, _ in extra + rows], pa.binary()).slice(before)
    return keys, pa.array([cell for _, cell in extra + rows], pa.binary()).slice(before)


def damaged(chance: random.Random, rows: list[Row]) -> list[Row]:
    """One byte of a key or a cell is another, or it is cut short."""
    row = chance.randrange(len(rows))
    key, cell = rows[row]
    if chance.random() < 0.3:
        key = key[: chance.randrange(len(key))]
    elif chance.random() < 0.5:
        cell = cell[: chance.randrange(len(cell))]
    else:
        place = chance.randrange(len(cell))
        cell = cell[:place] + bytes((chance.randrange(256),)) + cell[place + 1 :]
    return [*rows[:row], (key, cell), *rows[row + 1 :]]


def created_by(chance: random.Random) -> CreatedColumns:
    names = [name for name in (b"one", b"two", b"three") if chance.random() < 0.7]
    return CreatedColumns.of({name: BucketVersion(chance.randrange(20), chance.randrange(3), False) for name in names})


@pytest.mark.parametrize("is_damaged", [False, True])
def test_surveys_and_verdicts_are_those_of_the_oracle(is_damaged: bool) -> None:
    """The digest of what is to be seen, the sample, and what retention lets go; or the error."""
    chance = random.Random(11)
    for _ in range(ROUNDS):
        rows = rows_by(chance)
        keys, cells = arrays_of(chance, damaged(chance, rows) if is_damaged else rows)
        given = bytes_column(keys), bytes_column(cells), len(keys)
        created, settled = created_by(chance), chance.choice([b"", rows[-1][0][:-8]])
        agreed(kernel, oracle, "survey_rows", *given, chance.randrange(45), chance.randrange(4), settled, *created)
        agreed(kernel, oracle, "judge_rows", *given, chance.randrange(45), chance.randrange(1, 4), *created)


def test_retention_lets_go_what_its_rules_say() -> None:
    """By columns, the same rows go as the engine itself removes."""
    chance = random.Random(17)
    for _ in range(ROUNDS):
        rows = sorted(dict(rows_by(chance)).items())
        keys, cells = arrays_of(chance, rows)
        created = {b"one": BucketVersion(chance.randrange(20), chance.randrange(3), False)}
        horizon, keep = chance.randrange(45), chance.randrange(1, 4)
        verdicts = judged(rows, Rule(horizon, keep, created), lambda cell: None)
        gone = {key for verdict in verdicts for key in verdict.doomed()}
        going = going_rows(keys, cells, horizon, keep, CreatedColumns.of(created)).to_pylist()
        assert going == [key in gone for key, _ in rows]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_rows_that_point_to_values_are_those_of_the_oracle(is_damaged: bool) -> None:
    """Windows of the log, or units that are cut; columns have room for all rows, and so much of it is used."""
    chance = random.Random(12)
    for _ in range(ROUNDS):
        rows = rows_by(chance)
        keys, cells = arrays_of(chance, damaged(chance, rows) if is_damaged else rows)
        cuts = struct.pack("=3Q", 5000, 9000, 30_000)
        for window, some in ((0, cuts), (4096, b"")):
            given = bytes_column(keys), bytes_column(cells), len(keys), window, some
            try:
                count, columns = kernel.point_rows(*given)
            except Exception:  # noqa: BLE001 - the oracle must raise the same
                agreed(kernel, oracle, "point_rows", *given)
                continue
            cut = tuple(data[: count * width] for data, width in zip(columns, (4, 4, 8), strict=True))
            assert (count, cut) == oracle.point_rows(*given)


def unit_by(chance: random.Random) -> list[tuple[int, bytes | None, bytes]]:
    rows: list[tuple[int, bytes | None, bytes]] = []
    for position in sorted(chance.sample(range(1, 10_000), chance.randrange(1, 12))):
        if chance.random() < 0.5:
            place: Place = chance.choice((BlobPointer(0, 3, position, 7), FilePointer(1, 9, "bucket/key/1")))
            rows.append((position, None, encode_value_pointer(place)))
        for number in range(chance.randrange(3)):
            size = 5 if chance.random() < 0.97 else 6
            rows.append((position, b"key-%d" % number, encode_pointer(number, size, 4, 0, position, position, 9)))
    return rows


def test_values_of_units_are_those_of_the_oracle() -> None:
    """Places come before versions, values without one are dead, and versions must agree."""
    chance = random.Random(13)
    for round_number in range(3 * ROUNDS):
        rows = unit_by(chance)
        if round_number % 3 == 2 and rows:
            row = chance.randrange(len(rows))
            position, key, value = rows[row]
            rows[row] = (position, key, value[: chance.randrange(len(value))])
        positions = pa.array([position for position, _, _ in rows], pa.int64())
        keys = pa.array([key for _, key, _ in rows], pa.binary())
        values = pa.array([value for *_, value in rows], pa.binary())
        given = raw_numbers(positions), bytes_column(keys), bytes_column(values), len(rows)
        try:
            count, columns = kernel.merge_values(*given)
        except Exception:  # noqa: BLE001 - the oracle must raise the same
            agreed(kernel, oracle, "merge_values", *given)
            continue
        widths = (4, 4, 4, 8, 8, 8, 4, 4, 1, 8, 8, 4, 1)
        cut = tuple(data[: count * width] for data, width in zip(columns, widths, strict=True))
        assert (count, cut) == oracle.merge_values(*given)


def test_values_are_gathered_from_records_as_the_oracle_does() -> None:
    """What cells of a real log point to; a bit that is flipped in a record is an error in both, or the same bytes."""
    chance = random.Random(14)
    with EngineNode(new_store(), name="values", rotate_max_bytes=1 << 20).open() as node:
        node.apply(200)
        node.ship_all()
        (work,) = planned(node, 1 << 30)
        frames, _ = next(iter(counting(work.log(), work, removals=True)))
        rows = [
            (0, key, cell)
            for _, columns in change_columns(work)
            for key, cell in zip(columns.key.to_pylist(), columns.cell.to_pylist(), strict=True)
            if key[:1] == b"o" and cell is not None and cell[0] & 15 == 4
        ]
        unit = pa.table(
            {
                "position": pa.array([oracle._cell(cell).position for _, _, cell in rows], pa.int64()),
                "key": pa.array([key for _, key, _ in rows], pa.binary()),
                "value": pa.array([cell for *_, cell in rows], pa.binary()),
            }
        ).sort_by("position")
        live = live_values(unit)
        within = [
            lsn for lsn in live.lsn.to_pylist() if frames.first_offset <= lsn < frames.first_offset + frames.count
        ]
        assert len(within) > 5
        claims = [raw_numbers(one) for one in (live.lsn, live.size, live.stored_bytes, live.crc, live.codec)]
        for damage in range(200):
            buffer = bytearray(frames.buffer)
            if damage:
                buffer[chance.randrange(len(buffer))] ^= 1 << chance.randrange(8)
            given = frames.first_offset, bytes(buffer), frames.positions, frames.lengths, *claims, 0, len(within)
            outcome = agreed(kernel, oracle, "gather_values", *given)
            assert damage or outcome[0] == "returned"


def test_values_are_cut_out_of_files_as_the_oracle_does() -> None:
    """Values in a part of a blob file, compressed ones unchecked; places outside of it and flipped bits are errors."""
    chance = random.Random(19)
    values = [struct.pack("<I", 3) + b"\x81\1\2" + chance.randbytes(chance.randrange(1, 90)) for _ in range(20)]
    first, places = 1000, list(accumulate((len(value) for value in values), initial=1000))
    for damage in range(200):
        buffer, codecs, at = bytearray(b"".join(values)), bytearray(20), places[:20]
        if damage % 4 == 1:
            buffer[chance.randrange(len(buffer))] ^= 1 << chance.randrange(8)
        elif damage % 4 == 2:
            at[chance.randrange(20)] = chance.choice([0, first - 1, 4000, (1 << 64) - 1])
        codecs[chance.randrange(20)] = damage % 2
        columns = (
            struct.pack("<20Q", *at),
            struct.pack("<20I", *map(len, values))[: 76 if damage % 8 == 3 else 80],
            struct.pack("<20Q", *range(20)),
            struct.pack("<20Q", *(len(value) - 7 for value in values)),
            struct.pack("<20I", *map(len, values)),
            struct.pack("<20I", *map(zlib.crc32, values)),
            bytes(codecs),
        )
        rows = chance.randrange(5), 21 if damage % 8 == 7 else 20
        outcome = agreed(kernel, oracle, "cut_values", first, bytes(buffer), *columns, *rows)
        assert damage or outcome[0] == "returned"


def test_blocks_and_files_are_those_of_the_oracle() -> None:
    """Blocks taken apart and packed again, cuts, versions with pointers, directories and keys of positions."""
    chance = random.Random(15)
    for _ in range(ROUNDS):
        rows = sorted(dict(rows_by(chance)).items())
        versions = [
            (key, encode_version(cell, BlobPointer(0, 1, 2, 3) if chance.random() < 0.5 else None))
            for key, cell in rows
        ]
        (packed,) = pack_rows(versions, 1 << 20)
        raw = packed.raw if chance.random() < 0.7 else packed.raw[: chance.randrange(len(packed.raw))]
        for has_places in (False, True):
            agreed(kernel, oracle, "block_rows", raw, has_places)
        keys, values = arrays_of(chance, versions)
        columns = bytes_column(keys), bytes_column(values), len(keys)
        for start, target, after in ((0, 1 << 20, b""), (0, 100, b""), (2, 1, b"a"), (0, 9, b"p")):
            agreed(kernel, oracle, "pack_rows", *columns, start, target, after)
        cuts = tuple(sorted(chance.sample([key for key, _ in rows], min(3, len(rows)))))
        agreed(kernel, oracle, "file_numbers", bytes_column(keys), len(keys), cuts)
        pointers = pa.array([None if chance.random() < 0.3 else b"place" for _ in rows], pa.binary())
        agreed(kernel, oracle, "join_versions", bytes_column(values), bytes_column(pointers), len(rows))


def test_numbers_in_fixed_forms_are_those_of_the_oracle() -> None:
    """Pointers, directories and keys; columns of different lengths and positions out of order are refused."""
    positions, lengths, crcs = struct.pack("=3Q", 5, 9, 12), struct.pack("=3I", 4, 3, 1), struct.pack("=3I", 7, 8, 9)
    agreed(kernel, oracle, "blob_directory", positions, lengths, crcs)
    agreed(kernel, oracle, "blob_directory", struct.pack("=3Q", 5, 5, 12), lengths, crcs)
    agreed(kernel, oracle, "blob_directory", positions, struct.pack("=3I", 4, 0, 1), crcs)
    agreed(kernel, oracle, "blob_directory", positions, lengths[4:], crcs)
    agreed(kernel, oracle, "encode_pointers", b"\0\1\0", lengths, positions, crcs)
    agreed(kernel, oracle, "encode_pointers", b"\0\1", lengths, positions, crcs)
    agreed(kernel, oracle, "position_keys", positions)
    for keys in ([value_key(5), value_key(1 << 40)], [value_key(5), b"short"]):
        column = bytes_column(pa.array(keys, pa.binary()))
        agreed(kernel, oracle, "place_units", column, 2, 4096, b"")
        agreed(kernel, oracle, "place_units", column, 2, 0, struct.pack("=2Q", 5, 6))


def test_pointers_that_may_name_a_file_are_all_but_sound_ones_into_blob_files() -> None:
    """Those of either codec are passed over; a file's, one of another codec or length, and none at all are not."""
    sound = [encode_value_pointer(BlobPointer(codec, 7, 8, 9)) for codec in (CODEC_NONE, CODEC_ZSTD)]
    others = [encode_value_pointer(FilePointer(0, 9, "b/k/v0000000003.dat")), sound[0][:-1], sound[0] + b"x"]
    others += [b"", b"\1", b"\1\2" + sound[0][2:], b"\3" + sound[0][1:]]
    found = pointing_elsewhere(pa.array([*sound, *others], pa.binary()))
    assert found.to_pylist() == [False] * len(sound) + [True] * len(others)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_names_and_groups_stay_together_however_rows_are_divided(size: int) -> None:
    """Retention looks at all versions of a name at once; a unit, or a file, is one thing."""
    rows = rows_by(random.Random(16))
    table = pa.Table.from_batches(as_batches(rows, ROW_SCHEMA))
    names = [{key[:-8] for key in one.column("key").to_pylist()} for one in whole_names(table.to_batches(size))]
    assert sum(len(one) for one in names) == len(set().union(*names))
    numbered = pa.table({"unit": pa.array([1, 1, 2, 5, 5, 5], pa.int32()), "row": range(6)})
    groups = [(unit, one.column("row").to_pylist()) for unit, one in whole_groups(numbered.to_batches(size), "unit")]
    assert groups == [(1, [0, 1]), (2, [2]), (5, [3, 4, 5])]
    kept = list(rows_of(Retained(20, 1, {b"one": BucketVersion(1, 0, False)})(iter(table.to_batches(size)))))
    whole = list(rows_of(Retained(20, 1, {b"one": BucketVersion(1, 0, False)})(iter(table.to_batches()))))
    assert kept == whole
    assert 0 < len(kept) < len(rows)


def columns_by(chance: random.Random, count: int) -> list[pa.Array]:
    """Columns that are sorted by: few or many different values, some null, all of them behind others."""
    before = chance.randrange(10)
    prefixes = [chance.randbytes(chance.randrange(20)) for _ in range(chance.randrange(1, 5))]

    def name() -> bytes:
        return chance.choice(prefixes) + bytes(chance.randrange(3) for _ in range(chance.randrange(12)))

    def number(bits: int) -> int:
        return chance.randrange(-(1 << bits - 1), 1 << bits - 1)

    few, nulls = chance.random() < 0.5, chance.choice([0.0, 0.0, 0.3, 1.0])
    makers: dict[pa.DataType, Callable[[], object]] = {
        pa.binary(): lambda: chance.choice(prefixes) if few else name(),
        pa.int64(): lambda: chance.randrange(3) if few else number(chance.choice([8, 40, 64])),
        pa.int32(): lambda: 7 if few else number(32),
    }
    found = []
    for _ in range(chance.randrange(1, 5)):
        kind = chance.choice(list(makers))
        rows = [None if chance.random() < nulls else makers[kind]() for _ in range(before + count)]
        found.append(pa.array(rows, kind).slice(before))
    return found


def test_rows_are_in_the_order_of_the_oracle() -> None:
    """By any columns, whatever their rows have in common; equal ones stay as they were."""
    chance = random.Random(29)
    for _ in range(4 * ROUNDS):
        count = chance.choice([0, 1, 2, 20, 200, 900])
        columns = columns_by(chance, count)
        agreed(kernel, oracle, "order_rows", tuple(_column(one) for one in columns), count)


def test_rows_of_long_equal_beginnings_are_in_order() -> None:
    """Keys that are told apart only far behind their beginning, and by their length alone."""
    chance = random.Random(31)
    keys = [b"x" * 400 + bytes(chance.randrange(9)) + b"y" * chance.randrange(3) for _ in range(500)]
    keys += [b"x" * chance.randrange(700) for _ in range(500)]
    agreed(kernel, oracle, "order_rows", (_column(pa.array(keys, pa.binary())),), len(keys))


def test_rows_outside_of_their_column_are_refused() -> None:
    """Ends that lead out of the data, columns that are too short, and numbers of another width."""
    ends = struct.pack("<4i", 0, 2, 9, 3)
    with pytest.raises(ValueError, match="outside of its column"):
        kernel.order_rows(((None, ends, b"abc", 0, 4),), 3)
    with pytest.raises(ValueError, match="fewer rows"):
        kernel.order_rows(((None, bytes(16), 0, 8),), 3)
    with pytest.raises(ValueError, match="4 or 8 bytes"):
        kernel.order_rows(((None, bytes(16), 0, 2),), 3)
