"""Reports the lag of streaming queries behind their topics, at every micro-batch.

    lag = LagListener(warn_messages=1_000_000)
    spark.streams.addListener(lag)
    lag.lags()          # one entry for each query, topic and partition, as of its newest batch

At every batch Spark asks the source where the topics end (`reportLatestOffset`); the lag is the distance from the end
of the batch to that. It costs no further request to a store or a topic.

Invariants
- A query that has ended has no lag: it is forgotten, or its last lag would be shown forever.
- Exceptions of the callback are logged. A query must not fail because its lag could not be reported.
- Sources of other kinds are skipped: their offsets mean something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        SourceProgress,
        StreamingQueryProgress,
    )

_logger = logging.getLogger("tidelog.pipeline")
# Spark does not say which format a source has. Those in Python have this in common, and ours the form of its offsets.
_PYTHON_SOURCE = "PythonMicroBatchStream"
_Partition = tuple[str, int]


class TopicLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far a query is with one partition of a topic; a topic without partitions has the partition 0.

    Both offsets are exclusive ends, so their difference is what is left.
    """

    query_id: str
    query_name: str | None
    batch_id: int
    topic: str
    read_offset: int
    latest_offset: int
    rows_per_second: float
    """What the query got through of this source, of all its topics together, in its newest batch."""
    moment: str
    """When that batch began, as Spark says it."""
    partition: int = 0

    @property
    def where(self) -> str:
        """The topic, and the partition where it is not the first."""
        return self.topic if self.partition == 0 else f"{self.topic}, partition {self.partition}"

    @property
    def lag_messages(self) -> int:
        return max(0, self.latest_offset - self.read_offset)


OnLag = Callable[[Sequence[TopicLag]], None]


class LagListener(StreamingQueryListener):
    """Reports the lag of queries that read topics: by a callback, in the log, and when asked."""

    def __init__(self, on_lag: OnLag | None = None, *, warn_messages: int | None = None) -> None:
        """`on_lag` gets the topics of one batch; a topic that lags by `warn_messages` or more is a warning."""
        self._on_lag = on_lag
        self._warn_messages = warn_messages
        self._guard = Lock()
        self._newest: dict[tuple[str, str, int], TopicLag] = {}

    def lags(self) -> tuple[TopicLag, ...]:
        """The queries that run now with their topics and partitions, the largest lag first."""
        with self._guard:
            found = list(self._newest.values())
        return tuple(sorted(found, key=lambda one: (-one.lag_messages, one.query_id, one.topic, one.partition)))

    # What Spark tells

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """There is nothing to say before its first batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        found = list(lags_of(event.progress))
        if not found:
            return
        with self._guard:
            self._newest |= {(one.query_id, one.topic, one.partition): one for one in found}
        for one in found:
            self._log(one)
        self._tell(found)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing new has arrived: its newest batch is as true as it was."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        query_id = str(event.id)
        with self._guard:
            self._newest = {key: one for key, one in self._newest.items() if key[0] != query_id}

    def _log(self, one: TopicLag) -> None:
        is_late = self._warn_messages is not None and one.lag_messages >= self._warn_messages
        level = logging.WARNING if is_late else logging.INFO
        name = one.query_name or one.query_id
        _logger.log(level, "query %s is %d messages behind the end of %s", name, one.lag_messages, one.where)

    def _tell(self, found: Sequence[TopicLag]) -> None:
        if self._on_lag is None:
            return
        try:
            self._on_lag(found)
        except Exception:  # the caller's code, in a thread of Spark's, where nobody would see it
            _logger.exception("the callback for lags failed")


def lags_of(progress: StreamingQueryProgress) -> Iterator[TopicLag]:
    """The topics in the progress of a query, each with where it stands."""
    for source in progress.sources:
        read, latest = _offsets(source, source.endOffset), _offsets(source, source.latestOffset)
        for (topic, partition), offset in read.items():
            if (topic, partition) in latest:
                yield TopicLag(
                    query_id=str(progress.id),
                    query_name=progress.name,
                    batch_id=progress.batchId,
                    topic=topic,
                    read_offset=offset,
                    latest_offset=latest[topic, partition],
                    rows_per_second=source.processedRowsPerSecond,
                    moment=progress.timestamp,
                    partition=partition,
                )


def _offsets(source: SourceProgress, text: str) -> dict[_Partition, int]:
    """The offsets of the partitions in a position of the source; none when it is not one of ours."""
    if _PYTHON_SOURCE not in source.description:
        return {}
    try:
        found = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    except msgspec.MsgspecError:
        return {}
    return {
        (topic, int(number)): end
        for topic, ends in found.items()
        for number, end in ends.items()
        if "/" in topic and number.isdecimal() and isinstance(end, int)
    }
