"""What a job works on: the topics that were named, or all of them, and the store that they are in.

Invariant: only None stands for all topics. A program that has found no topic to name gets nothing done, and not all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidelog.errors import NotFoundError, NotSupportedError
from tidelog.pipeline.open_topics import cold_place
from tidelog.pipeline.part import ColdPlace
from tidelog.pipeline.root import Root
from tidelog.topics.names import parse_topic_name
from tidelog.topics.storage import LogDirectory


def chosen_topics(known: Sequence[str], topics: Sequence[str] | None, where: str) -> list[str]:
    """Each of them once; NotFoundError names one that is not among those that are known."""
    if topics is None:
        return list(known)
    names = list(dict.fromkeys(str(parse_topic_name(name)) for name in topics))
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        raise NotFoundError(f"there is no topic {missing}", path=where, hint="`tidelog topic list` shows them")
    return names


def notes_on(names: Sequence[str], where: str) -> Iterator[str]:
    """Of a place without topics: that there is nothing wrong with nothing may be a slip in its name."""
    if not names:
        yield f"there are no topics in {where}"


def cataloged_topics(log: LogDirectory) -> list[str]:
    """The topics that the catalog of a store knows, sorted. Those that are on a disk alone are not among them."""
    assert log.tier is not None, "there is a store"
    return sorted("/".join(topic) for topic in log.tier.topics())


def store_of(root: Root, log: LogDirectory, otherwise: str) -> ColdPlace:
    """The store of a root; NotSupportedError says why a job has nothing to do without one."""
    place = cold_place(root, log)
    if place is None:
        raise NotSupportedError("these topics have no store", path=log.root, hint=otherwise)
    return place
