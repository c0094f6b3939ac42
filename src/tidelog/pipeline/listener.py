"""How far streaming queries are behind their topics, told at every micro-batch.

    lag = LagListener(warn_messages=1_000_000)
    spark.streams.addListener(lag)
    lag.lags()          # one entry for each query and topic, as of its newest batch

Spark asks the source at every batch where the topics end (`reportLatestOffset`); the lag is what lies between that and
the end of the batch. No store and no topic is asked for it once more.

Invariants
- A query that has ended has no lag: it is forgotten, or it would be shown for ever as it was.
- Whatever the callback raises is logged. A query must not end because nobody could be told how it is doing.
- Sources of other kinds are passed over: their offsets mean something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING

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
_PARTITION = "0"


class TopicLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far a query is with one topic. Both offsets are exclusive ends, so their difference is what is left."""

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
        self._newest: dict[tuple[str, str], TopicLag] = {}

    def lags(self) -> tuple[TopicLag, ...]:
        """The queries that run now with their topics, the largest lag first."""
        with self._guard:
            found = list(self._newest.values())
        return tuple(sorted(found, key=lambda one: (-one.lag_messages, one.query_id, one.topic)))

    # What Spark tells

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """There is nothing to say before its first batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        found = list(lags_of(event.progress))
        if not found:
            return
        with self._guard:
            self._newest |= {(one.query_id, one.topic): one for one in found}
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
        _logger.log(level, "query %s is %d messages behind the end of %s", name, one.lag_messages, one.topic)

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
        for topic, offset in read.items():
            if topic in latest:
                yield TopicLag(
                    query_id=str(progress.id),
                    query_name=progress.name,
                    batch_id=progress.batchId,
                    topic=topic,
                    read_offset=offset,
                    latest_offset=latest[topic],
                    rows_per_second=source.processedRowsPerSecond,
                    moment=progress.timestamp,
                )


def _offsets(source: SourceProgress, text: str) -> dict[str, int]:
    """The offsets of the topics in a position of the source; none when it is not one of ours."""
    if _PYTHON_SOURCE not in source.description:
        return {}
    try:
        found = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.MsgspecError:
        return {}
    return {topic: ends[_PARTITION] for topic, ends in found.items() if "/" in topic and set(ends) == {_PARTITION}}
