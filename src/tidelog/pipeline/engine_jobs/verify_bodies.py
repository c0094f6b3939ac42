"""What workers do with the files of a compaction: every pack and every data file read, and every body in them.

    rows of `verify_places`, in order of (file, byte)  ->  one `BodiesResult` a task

Invariants
- A pack is read whole: it has the bytes that its name tells, every body in it has its checksum, and the bodies that are
  pointed to are as many, with as many bytes, as the root says.
- Every body that a version points to is where the index says, decodes, and has the checksum and size that the version
  says. So has every data file, which is no longer and no shorter than that body.
- One pack, or one body, is in memory. Fit for executors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Final

import msgspec

from tidelog.engine.body import decode_body
from tidelog.engine.compacted import PackInfo
from tidelog.engine.pack import DirectoryEntry, check_pack
from tidelog.engine.place import PackPlace, decode_place
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.engine_jobs.verify_places import MISMATCH_FILE, PROBLEM_FILE, BodyRow, pack_file
from tidelog.pipeline.engine_jobs.verify_words import engine_problem, problem_of
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.jobs.job import Problem
from tidelog.tier.compacted_names import digest_of

if TYPE_CHECKING:
    import pyarrow as pa

RESULT_SCHEMA: Final = "result binary"
_MOST_PROBLEMS = 20


class BodiesResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a task read, and what is wrong. `mismatches` are between the indexes: they follow from a damaged one."""

    packs: int = 0
    pack_bytes: int = 0
    bodies: int = 0
    data_files: int = 0
    data_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    mismatches: tuple[Problem, ...] = ()
    damage: tuple[Problem, ...] = ()


class BodyChecker:
    """The function of a task."""

    def __init__(self, place: EnginePlace, packs: tuple[PackInfo, ...]) -> None:
        self._place = place
        self._packs = packs

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        result = _Checking(self._place, self._packs).result(_body_rows(batches))
        yield pa.record_batch([pa.array([msgspec.msgpack.encode(result)], pa.binary())], names=["result"])


def _body_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[BodyRow]:
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in BodyRow._fields]
        yield from map(BodyRow._make, zip(*columns, strict=True))


class _Checking:
    """The files of one task, one after the other."""

    def __init__(self, place: EnginePlace, packs: tuple[PackInfo, ...]) -> None:
        self._name = place.name
        self._keys = place.keys
        self._objects = place.opened().objects
        self._packs = {pack_file(number): pack for number, pack in enumerate(packs)}
        self._packs_read = 0
        self._pack_bytes = 0
        self._bodies = 0
        self._data_files = 0
        self._data_bytes = 0
        self._problems: list[Problem] = []
        self._told: dict[str, list[Problem]] = {PROBLEM_FILE: [], MISMATCH_FILE: []}

    def result(self, rows: Iterable[BodyRow]) -> BodiesResult:
        for file, bodies in groupby(rows, key=lambda row: row.file):
            if file in self._told:
                self._told[file] += [msgspec.msgpack.decode(row.place, type=Problem) for row in bodies]
            elif file in self._packs:
                self._check_pack(self._packs[file], bodies)
            else:
                self._check_data_files(bodies)
        return BodiesResult(
            packs=self._packs_read,
            pack_bytes=self._pack_bytes,
            bodies=self._bodies,
            data_files=self._data_files,
            data_bytes=self._data_bytes,
            problems=tuple(self._problems),
            mismatches=tuple(self._told[MISMATCH_FILE]),
            damage=tuple(self._told[PROBLEM_FILE]),
        )

    # Packs

    def _check_pack(self, pack: PackInfo, rows: Iterable[BodyRow]) -> None:
        try:
            data = self._pack_data(pack)
            directory = {entry.position: entry for entry in check_pack(data, pack.key)}
        except (DataError, NotFoundError) as error:
            self._add(problem_of(self._name, error, pack.key))
            return
        self._packs_read += 1
        self._pack_bytes += len(data)
        self._check_live(pack, directory, [self._check_packed(pack, data, directory, one) for one in rows])

    def _pack_data(self, pack: PackInfo) -> bytes:
        data = bytes(self._objects.read_range(pack.key, 0, pack.size + 1))
        name = self._keys.parse_compacted(pack.key)
        if len(data) != pack.size:
            raise DataError(f"it has not the {pack.size} bytes that the root says")
        if name is None or digest_of(data) != name.digest:
            check_pack(data, pack.key)  # says what, and at which byte, where it can be told
            raise DataError("not the bytes that its name tells")
        return data

    def _check_packed(
        self, pack: PackInfo, data: bytes, directory: dict[int, DirectoryEntry], row: BodyRow
    ) -> int | None:
        """The bytes of a body; None for the row of the pack itself."""
        if row.byte < 0:
            return None
        place = decode_place(row.place)
        assert isinstance(place, PackPlace), "it came with those of a pack"
        entry = directory.get(row.position)
        if entry is None or (entry.byte, entry.stored_bytes) != (place.byte, place.stored_bytes):
            reason = f"{row.name}: the index says that its body is at byte {place.byte}, where it is not"
            self._add(engine_problem(self._name, pack.key, reason))
        else:
            self._check_body(pack.key, data[place.byte : place.byte + place.stored_bytes], place.codec, row)
        return place.stored_bytes

    def _check_live(self, pack: PackInfo, directory: dict[int, DirectoryEntry], sizes: list[int | None]) -> None:
        live = [size for size in sizes if size is not None]
        said = (pack.bodies, pack.live_bodies, pack.live_bytes, pack.first_position, pack.last_position)
        found = (len(directory), len(live), sum(live), min(directory), max(directory))
        if said != found:
            names = "bodies, live bodies, live bytes, first and last position"
            self._add(engine_problem(self._name, pack.key, f"the root says {said} of it ({names}), and it has {found}"))

    # Data files

    def _check_data_files(self, rows: Iterable[BodyRow]) -> None:
        for number, row in enumerate(rows):
            place = decode_place(row.place)
            assert not isinstance(place, PackPlace), "packs are looked at elsewhere"
            key = self._keys.data_file_named(place.name)
            if key is None or number:
                reason = "its file has no name of ours" if key is None else f"its file {place.name} is another's too"
                self._add(engine_problem(self._name, row.name, reason))
                continue
            try:
                data = bytes(self._objects.read_range(key, 0, place.stored_bytes + 1))
            except NotFoundError:
                self._add(engine_problem(self._name, key, f"the data file of {row.name} is missing"))
                continue
            if len(data) != place.stored_bytes:
                reason = f"the data file of {row.name} has not the {place.stored_bytes} bytes that the index says"
                self._add(engine_problem(self._name, key, reason))
                continue
            self._data_files += 1
            self._data_bytes += len(data)
            self._check_body(key, data, place.codec, row)

    def _check_body(self, key: str, stored: bytes, codec: int, row: BodyRow) -> None:
        try:
            decode_body(stored, codec, row.size, row.crc, row.lsn)
            self._bodies += 1
        except DataError as error:
            self._add(engine_problem(self._name, key, f"{row.name}: {error.message}"))

    def _add(self, problem: Problem) -> None:
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(problem)
