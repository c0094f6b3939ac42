"""Messages and bytes over time: which bins there are, and how much falls into each.

Of an object or file only its first and its last time are known, so its messages are spread evenly between them. An
exact histogram, counted from the messages, has the same bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tidelog.pipeline.jobs.report_figures import Stretch, TopicFigures

_SECOND_US = 1_000_000
_MAX_BINS = 60
_HOUR, _DAY = 3600, 86_400
_WIDTHS_SECONDS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(_HOUR, 2 * _HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR),
    *(_DAY, 2 * _DAY, 7 * _DAY, 14 * _DAY, 28 * _DAY, 91 * _DAY, 182 * _DAY, 364 * _DAY),
)


class TimeBins(msgspec.Struct, frozen=True):
    """`count` neighbouring stretches of time, each `width_us` long. They begin at a multiple of their width."""

    start_us: int
    width_us: int
    count: int

    def index_of(self, time_us: int) -> int:
        """The bin of a moment; one outside belongs to the nearest."""
        return min(max((time_us - self.start_us) // self.width_us, 0), self.count - 1)

    def bounds_us(self, index: int) -> tuple[int, int]:
        """When a bin begins, and when the next one does."""
        first = self.start_us + index * self.width_us
        return first, first + self.width_us


class TimeCounts(msgspec.Struct):
    """Messages and bytes of each bin: those that the store has, and those that are on a disk alone."""

    cold_messages: list[float]
    cold_bytes: list[float]
    hot_messages: list[float]
    hot_bytes: list[float]

    @classmethod
    def empty(cls, bins: TimeBins) -> TimeCounts:
        return cls(*([0.0] * bins.count for _ in range(4)))

    def add(self, other: TimeCounts) -> None:
        """Sums up two topics."""
        for mine, theirs in zip(self._lists(), other._lists(), strict=True):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    def _lists(self) -> tuple[list[float], ...]:
        return self.cold_messages, self.cold_bytes, self.hot_messages, self.hot_bytes


def choose_bins(topics: Iterable[TopicFigures], max_bins: int = _MAX_BINS) -> TimeBins | None:
    """Bins for all times of these topics; None when there is no message with a time."""
    times = [
        time
        for topic in topics
        for stretch in (*topic.objects, *topic.files)
        for time in (stretch.first_time_us, stretch.last_time_us)
        if time is not None
    ]
    if not times:
        return None
    first, last = min(times), max(times)
    width = _width_us(first, last, max_bins)
    return TimeBins(first // width * width, width, last // width - first // width + 1)


def _width_us(first_us: int, last_us: int, max_bins: int) -> int:
    """The smallest width that people count in; beyond years, which only wrong clocks reach, any doubling of it."""
    widths = [seconds * _SECOND_US for seconds in _WIDTHS_SECONDS]
    while last_us // widths[-1] - first_us // widths[-1] >= max_bins:
        widths.append(widths[-1] * 2)
    return next(width for width in widths if last_us // width - first_us // width < max_bins)


def spread(topic: TopicFigures, bins: TimeBins) -> TimeCounts:
    """A topic over time, as far as descriptors and files tell."""
    counts = TimeCounts.empty(bins)
    for stretch in topic.objects:
        _spread_one(stretch, bins, counts.cold_messages, counts.cold_bytes)
    for stretch in topic.only_hot():
        _spread_one(stretch, bins, counts.hot_messages, counts.hot_bytes)
    return counts


def _spread_one(stretch: Stretch, bins: TimeBins, messages: list[float], size: list[float]) -> None:
    if stretch.first_time_us is None or stretch.last_time_us is None:
        return
    first, last = bins.index_of(stretch.first_time_us), bins.index_of(stretch.last_time_us)
    for index, share in zip(range(first, last + 1), _shares(stretch, bins, first, last), strict=True):
        messages[index] += stretch.messages * share
        size[index] += stretch.raw_bytes * share


def _shares(stretch: Stretch, bins: TimeBins, first: int, last: int) -> Sequence[float]:
    """How much of the time between the first and the last message lies in each bin."""
    assert stretch.first_time_us is not None and stretch.last_time_us is not None
    begin, end = stretch.first_time_us, stretch.last_time_us + 1
    bounds = (bins.bounds_us(index) for index in range(first, last + 1))
    parts = [max(0, min(end, upper) - max(begin, lower)) for lower, upper in bounds]
    return [part / sum(parts) for part in parts]
