"""What a query reads of topics and engines, in words: `explain(frame)`, and one event of each read that is planned.

    == tidelog ==
    shop/orders partition 0: offsets 0 to 1233, 5.0 MiB
    engine main in s3://bucket/prefix: LSNs 1 to 4711, 812.0 KiB

Spark shows nothing of a Python source in its plan but the name of the format, so the relations are looked for in the
plan and each is planned by its own reader, here in the driver's process.

Invariants
- It reads what planning reads (catalogs, indexes, for objects the log after the newest state) and changes nothing; a
  state that a query would pin is not pinned.
- Offsets and LSNs are those that a query would read if it were planned now; bytes are those in the store or the files,
  an estimate where a range does not end with an object.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from tidelog.errors import NotSupportedError
from tidelog.events import tell, turn_on_output
from tidelog.units import human_bytes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.datasource import DataSource

_logger = logging.getLogger("tidelog.pipeline")
_MOST_IN_AN_EVENT = 8
_BATCH, _STREAM, _RESOLVED = "DataSourceV2ScanRelation", "StreamingRelationV2", "DataSourceV2Relation"


class PlannedRead(msgspec.Struct, frozen=True, kw_only=True):
    """What a query reads of a partition of a topic, or of an engine: a range, `stop` not included, or a state."""

    subject: str
    unit: Literal["offset", "LSN", "seq"]
    start: int
    stop: int
    bytes: float

    def __str__(self) -> str:
        size = human_bytes(self.bytes)
        if self.unit == "seq":
            return f"{self.subject}: the state at seq {self.start}, {size}"
        if self.start >= self.stop:
            return f"{self.subject}: nothing, from {self.unit} {self.start} on"
        return f"{self.subject}: {self.unit}s {self.start} to {self.stop - 1}, {size}"


class Planned(Protocol):
    """A reader that says what it would read."""

    def planned(self) -> list[PlannedRead]: ...


def tell_planned(planned: Callable[[], list[PlannedRead]], tasks: int) -> None:
    """One event for a read of a batch that was planned, for those who want to see it."""
    turn_on_output()
    if not _logger.isEnabledFor(logging.INFO):
        return
    reads = planned()
    named = "; ".join(map(str, reads[:_MOST_IN_AN_EVENT]))
    more = len(reads) - _MOST_IN_AN_EVENT
    text = f"{named}; and {more} more" if more > 0 else named
    tell(_logger, "read_planned", reads=text, bytes=round(sum(one.bytes for one in reads)), tasks=tasks)


def explain(frame: DataFrame, mode: str | None = None) -> None:
    """Prints Spark's own `frame.explain(mode=...)`, and below it what the query reads of topics and engines.

    Topics with their partitions, offsets and bytes; LSNs of an engine's log; the seq of its state. Of a stream, what a
    query without a checkpoint would read first. NotSupportedError over Spark Connect, where the plan is at the server.
    """
    if getattr(frame, "_jdf", None) is None:
        raise NotSupportedError(
            "over Spark Connect the plan of a query is at the server",
            operation="explain",
            hint="frame.explain() shows Spark's own; TIDELOG_LOG=info where the server runs has its log name the reads",
        )
    frame.explain(mode=mode)
    lines = [f"{one}{note}" for reader, note in _readers(frame) for one in reader.planned()]
    text = "\n".join(lines or ["nothing of topics or engines"])
    sys.stdout.write(f"== tidelog ==\n{text}\n\n")


def _readers(frame: DataFrame) -> Iterator[tuple[Planned, str]]:
    """The readers of our relations in a query, each in the order of the plan, and what is to be said of them."""
    query: Any = frame._jdf.queryExecution()
    # What is read depends on the optimizer: it leaves out what is never used. It knows no streams that do not run.
    plan = query.analyzed() if frame.isStreaming else query.optimizedPlan()
    for leaf in _leaves(plan):
        kind = leaf.getClass().getSimpleName()
        if kind == _STREAM:
            found, given = leaf, leaf.extraOptions()
        elif kind in (_BATCH, _RESOLVED):
            found = leaf.relation() if kind == _BATCH else leaf
            given = found.options()
        else:
            continue
        source = _source_of(found.table().name(), dict(given.asCaseSensitiveMap()))
        if source is not None:
            yield _reader(source, found.table().schema().json(), is_stream=kind == _STREAM)


def _leaves(plan: Any) -> Iterator[Any]:
    yield from _each(plan.collectLeaves())
    for below in _each(plan.subqueriesAll()):
        yield from _each(below.collectLeaves())


def _each(found: Any) -> Iterator[Any]:
    return (found.apply(number) for number in range(found.size()))


def _source_of(name: str, given: dict[str, str]) -> DataSource | None:
    from pyspark.sql.datasource import CaseInsensitiveDict

    from tidelog.pipeline.source.entries import EntriesDataSource
    from tidelog.pipeline.source.objects import ObjectsDataSource
    from tidelog.pipeline.source.topics import TidelogDataSource

    kinds = {kind.name(): kind for kind in (TidelogDataSource, EntriesDataSource, ObjectsDataSource)}
    kind = kinds.get(name.lower())
    return None if kind is None else kind(CaseInsensitiveDict(given))


def _reader(source: DataSource, schema: str, *, is_stream: bool) -> tuple[Planned, str]:
    from pyspark.sql.types import StructType

    columns = StructType.fromJson(json.loads(schema))
    reader: Any = source.streamReader(columns) if is_stream else source.reader(columns)
    return reader, " (a stream: without a checkpoint, as of now)" if is_stream else ""
