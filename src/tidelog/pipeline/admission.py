"""How much of what is there goes into one micro-batch: shared out among the topics by what each of them has waiting."""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.pipeline.open_topics import OpenTopics


def admit_rows(starts: Mapping[str, int], ends: Mapping[str, int], max_rows: int) -> dict[str, int]:
    """Ends with at most so many rows before them; every topic moves in the end, since remainders are given out too."""
    waiting = {topic: ends[topic] - starts[topic] for topic in ends}
    total = sum(waiting.values())
    if total <= max_rows:
        return dict(ends)
    shares = {topic: max_rows * rows // total for topic, rows in waiting.items()}
    left = max_rows - sum(shares.values())
    # Those that have waited for longest by their own measure first; names decide between equals, so it is repeatable.
    for topic in sorted(waiting, key=lambda one: (-(max_rows * waiting[one] % total), one))[:left]:
        shares[topic] += 1
    return {topic: starts[topic] + min(shares[topic], waiting[topic]) for topic in ends}


def admit_bytes(
    starts: Mapping[str, int], ends: Mapping[str, int], max_bytes: int, topics: OpenTopics
) -> dict[str, int]:
    """Ends with about so many bytes before them; at least one message of every topic that has any."""
    sizes = {topic: topics.bytes_between(topic, starts[topic], ends[topic]) for topic in ends}
    total = sum(sizes.values())
    if total <= max_bytes:
        return dict(ends)
    share = max_bytes / total
    return {topic: topics.offset_behind(topic, starts[topic], ends[topic], share) for topic in ends}
