"""The compaction of an engine as `verify` sees it: the two indexes, what they point to, and what the root says of it.

    index files -> rows by position -> bodies by file -> every file read

Invariants
- Every index file has the bytes that its name tells. Where one has not, what the indexes say against each other is not
  told: it follows from that.
- Whether the versions are the right ones is for `verify_states`: here it is looked at what they point to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from tidelog.engine.compacted import Compaction
from tidelog.errors import DataError, NotFoundError
from tidelog.pipeline.arrow_map import map_in_arrow
from tidelog.pipeline.engine_jobs.verify_bodies import RESULT_SCHEMA, BodiesResult, BodyChecker
from tidelog.pipeline.engine_jobs.verify_places import (
    BODY_SCHEMA,
    PLACE_SCHEMA,
    IndexItem,
    IndexPart,
    PackList,
    PlaceMerge,
    PlaceReader,
)
from tidelog.pipeline.engine_jobs.verify_words import engine_problem, problem_of
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.pipeline.jobs.job import Problem
from tidelog.pipeline.jobs.spark_errors import told_in_our_words

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PART_BYTES = 8 << 20
_FILES_BYTES = 128 << 20
_MAX_TASKS = 1024
_RANGE_BYTES = 4 << 20


class CompactionCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a compaction."""

    generation: int
    seq: int
    version_rows: int = 0
    packs: int = 0
    pack_bytes: int = 0
    bodies: int = 0
    data_files: int = 0
    data_bytes: int = 0


class NamedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is named by its content."""

    place: EnginePlace
    key: str
    size: int
    digest: str


class FileFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with such a file, if anything is."""

    key: str
    problem: Problem | None = None


def check_named_file(work: NamedFile) -> FileFinding:
    """Reads all of it, and compares it with its name."""
    try:
        if _digest(work) != work.digest:
            raise DataError("not the bytes that its name tells")
    except (DataError, NotFoundError) as error:
        return FileFinding(key=work.key, problem=problem_of(work.place.name, error, work.key))
    return FileFinding(key=work.key)


def _digest(work: NamedFile) -> str:
    objects, digest, read = work.place.opened().objects, hashlib.blake2b(digest_size=16), 0
    while data := objects.read_range(work.key, read, _RANGE_BYTES):
        digest.update(data)
        read += len(data)
    if read != work.size:
        raise DataError(f"it has {read} bytes, and {work.size} are written down")
    return digest.hexdigest()


def check_compaction(
    spark: SparkSession, place: EnginePlace, root: Compaction
) -> tuple[CompactionCheck, tuple[Problem, ...]]:
    """Reads all packs and data files; what that was, and what is wrong."""
    items: list[IndexItem] = [PackList(place=place, packs=root.packs)]
    items += [IndexPart(place=place, part=part, is_bodies=False) for part in root.versions]
    items += [IndexPart(place=place, part=part, is_bodies=True) for part in root.bodies]
    found = _results(spark, place, root, items)
    check = CompactionCheck(
        generation=root.generation,
        seq=root.seq,
        version_rows=sum(part.rows for part in root.versions),
        packs=sum(one.packs for one in found),
        pack_bytes=sum(one.pack_bytes for one in found),
        bodies=sum(one.bodies for one in found),
        data_files=sum(one.data_files for one in found),
        data_bytes=sum(one.data_bytes for one in found),
    )
    return check, tuple(_problems(place.name, root, check, found))


def _results(spark: SparkSession, place: EnginePlace, root: Compaction, items: list[IndexItem]) -> list[BodiesResult]:
    index_bytes = sum(part.size for part in (*root.versions, *root.bodies))
    file_bytes = root.data_bytes + sum(pack.size for pack in root.packs)
    numbers = spark.range(0, len(items), 1, len(items))
    rows = map_in_arrow(numbers, PlaceReader(items), PLACE_SCHEMA)
    by_position = rows.repartition(_tasks(index_bytes, _PART_BYTES), "position")
    ordered = by_position.sortWithinPartitions("position", "source", "name")
    bodies = map_in_arrow(ordered, PlaceMerge(place.name, len(root.packs)), BODY_SCHEMA)
    by_file = bodies.repartition(_tasks(file_bytes, _FILES_BYTES), "file").sortWithinPartitions("file", "byte", "name")
    checked = map_in_arrow(by_file, BodyChecker(place, root.packs), RESULT_SCHEMA)
    with told_in_our_words("checking a compaction"):
        return [msgspec.msgpack.decode(bytes(row.result), type=BodiesResult) for row in checked.collect()]


def _tasks(size: int, bytes_each: int) -> int:
    return min(_MAX_TASKS, max(2, -(-size // bytes_each)))


def _problems(name: str, root: Compaction, check: CompactionCheck, found: Iterable[BodiesResult]) -> Iterator[Problem]:
    damage = [problem for one in found for problem in one.damage]
    mismatches = [problem for one in found for problem in one.mismatches]
    problems = [problem for one in found for problem in one.problems]
    yield from sorted(
        {str(one): one for one in [*damage, *(() if damage else mismatches), *problems]}.values(), key=str
    )
    said, is_found = (root.data_files, root.data_bytes), (check.data_files, check.data_bytes)
    if said != is_found and not damage and not problems:
        reason = f"it says {said[0]} data files of {said[1]} bytes, and its index {is_found[0]} of {is_found[1]}"
        yield engine_problem(name, f"the root of generation {root.generation}", reason)
