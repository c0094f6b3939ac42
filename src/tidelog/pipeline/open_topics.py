"""The driver's view of the topics under a root: which there are, from where to where they go, and how to read them.

Invariants
- Nothing is changed. A topic is looked at when it is asked about, so that one that is made later is found.
- A range that cannot be read as asked is an error that names what is missing, or, where loss is allowed, the part of it
  that can be read. It is never moved back, so no row is read twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from tidelog.errors import InputError, NotFoundError, OffsetOutOfRangeError
from tidelog.log.view import LogView
from tidelog.pipeline.options import SourceOptions
from tidelog.pipeline.packing import packed
from tidelog.pipeline.part import ColdPlace, ReadPart
from tidelog.pipeline.planning import Limits, TopicPlan, plan_parts
from tidelog.pipeline.root import Root
from tidelog.tier.joined import JoinedLog
from tidelog.topics.directory_info import metadata_url
from tidelog.topics.storage import LogDirectory

_logger = logging.getLogger("tidelog.pipeline")


def cold_place(root: Root, directory: LogDirectory) -> ColdPlace | None:
    """Where a task finds objects and catalog; None without a store."""
    info = directory.info
    if info.store is None or info.metadata is None:
        return None
    settings = root.load()
    url = metadata_url(directory.root, info.metadata)
    return ColdPlace(info.store, settings.object_store, url, settings.metadata_root)


class OpenTopics:
    """The topics that the options ask for. Close it, or use it in a `with` statement."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._directory = options.root.open()
        self.place = cold_place(options.root, self._directory)

    def __enter__(self) -> OpenTopics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._directory.close()

    def names(self) -> list[str]:
        """The topics, sorted; a pattern may match none, or others later."""
        if self._options.topics is not None:
            return sorted(self._options.topics)
        pattern = re.compile(self._options.pattern or "")
        return [name for name in self._directory.topics() if pattern.fullmatch(name)]

    def log(self, topic: str) -> JoinedLog | LogView:
        """Where its messages are read from; NotFoundError when there is no such topic."""
        try:
            readable = self._directory.topic(topic).readable
        except NotFoundError as error:
            raise NotFoundError(f"{error.message} in {self._options.root.location}", hint=error.hint) from error
        if not isinstance(readable, JoinedLog | LogView):
            raise InputError(f"{topic} keeps nothing: it was made with reliable=False, so there is nothing to read")
        return readable

    def check_start(self, topic: str, start: int) -> None:
        """A read that is to begin where the topic has not come to yet would give nothing and say nothing."""
        latest = self.log(topic).next_offset
        if start > latest:
            self.lost(f"{topic}: it ends at offset {latest}, and was to be read from {start} on")

    def readable_range(self, topic: str, start: int, stop: int) -> tuple[int, int]:
        """The same range if all of it is there; see the head of the module for what happens otherwise."""
        log = self.log(topic)
        earliest, latest = log.start_offset, log.next_offset
        if start < earliest < stop or (start < stop <= earliest):
            self.lost(
                f"{topic}: offsets {start} to {min(earliest, stop) - 1} are no longer kept; {earliest} is the oldest"
            )
        if start < stop and stop > latest:
            self.lost(f"{topic}: it ends at offset {latest}, and {start} up to {stop} were to be read")
        start, stop = max(start, earliest), min(stop, latest)
        return start, max(start, stop)

    def lost(self, problem: str) -> None:
        """Something that was to be read is not there: an error, or a warning where that is allowed."""
        if self._options.fail_on_data_loss:
            raise OffsetOutOfRangeError(problem, operation="read", hint="failOnDataLoss=false reads what is there")
        _logger.warning("%s; what is there is read (failOnDataLoss=false)", problem)

    def plan(self, ranges: Mapping[str, tuple[int, int]]) -> list[ReadPart]:
        """The parts of these ranges, which can be read."""
        plans = [self._plan_topic(topic, *ends) for topic, ends in sorted(ranges.items()) if ends[0] < ends[1]]
        return plan_parts(plans, self._limits)

    def plan_tasks(self, ranges: Mapping[str, tuple[int, int]]) -> list[tuple[ReadPart, ...]]:
        """The same parts, as they go to tasks: small ones of very many topics together."""
        return packed(self.plan(ranges), self._limits)

    @property
    def _limits(self) -> Limits:
        options = self._options
        return Limits(options.max_partition_bytes, options.max_records_per_partition, options.min_partitions)

    def _plan_topic(self, topic: str, start: int, stop: int) -> TopicPlan:
        log = self.log(topic)
        if isinstance(log, LogView):
            return TopicPlan(topic, start, stop, catalog=None, view=log, cold_end=0)
        # Before the catalog: what is pruned between the two looks is in the catalog by then.
        hot = log.hot
        view = hot if isinstance(hot, LogView) else None
        catalog = log.history.catalog
        cold_end = catalog.next_offset() if view is not None else stop
        return TopicPlan(topic, start, stop, catalog=catalog, view=view, cold_end=cold_end)

    def bytes_between(self, topic: str, start: int, stop: int) -> float:
        """About how many bytes a range has."""
        return self._plan_topic(topic, start, stop).bytes if start < stop else 0.0

    def offset_behind(self, topic: str, start: int, stop: int, share: float) -> int:
        """The offset behind about this share of a range's bytes, and behind one message at least."""
        if start >= stop:
            return stop
        plan = self._plan_topic(topic, start, stop)
        return min(stop, max(start + 1, plan.offset_behind(share)))
