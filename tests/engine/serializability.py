"""A checker of histories: whether transactions that appended to lists and read them could have run one by one.

Each list is an object whose value only grows, by elements that are there once. So what a transaction has read of a list
tells all that came before it, and the longest one that anybody has read is the order of the list's versions. From that
follow the edges that every serial order has to obey, without a look at the log or at seqs:

    ww    who appended an element -> who appended the next one
    wr    who appended the last element that was read -> who read it
    rw    who read a list -> who appended the first element that was not there yet

A circle among them is an anomaly, and so are elements of transactions that were never committed, and reads of one list
that are not beginnings of one another. Reads of transactions that failed later count as well: a program acts on what it
has read before it learns of its failure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

Elements = tuple[str, ...]


class ListTransaction(NamedTuple):
    """What one transaction did: lists as it has read them before its own appends, and what it appended to which."""

    name: str
    reads: dict[str, Elements]
    appends: dict[str, str]


def anomalies(history: list[ListTransaction]) -> list[str]:
    """What cannot have been if transactions ran one by one; nothing when they could have."""
    writers = {(key, element): one.name for one in history for key, element in one.appends.items()}
    orders, found = _version_orders(history)
    found += [
        f"{element!r} in {key} was never committed"
        for key, order in orders.items()
        for element in order
        if (key, element) not in writers
    ]
    return found or _circles(history, orders, writers)


def _version_orders(history: list[ListTransaction]) -> tuple[dict[str, Elements], list[str]]:
    orders: dict[str, Elements] = {}
    for one in history:
        for key, elements in one.reads.items():
            if len(elements) > len(orders.get(key, ())):
                orders[key] = elements
    torn = [
        f"{one.name} read {elements} of {key}, where {orders[key]} was read too"
        for one in history
        for key, elements in one.reads.items()
        if elements != orders.get(key, ())[: len(elements)]
    ]
    return orders, torn


def _circles(
    history: list[ListTransaction], orders: dict[str, Elements], writers: dict[tuple[str, str], str]
) -> list[str]:
    before: defaultdict[str, set[str]] = defaultdict(set)
    for earlier, later in _edges(history, orders, writers):
        if earlier != later:
            before[later].add(earlier)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return ["a circle: " + " -> ".join(error.args[1])]
    return []


def _edges(
    history: list[ListTransaction], orders: dict[str, Elements], writers: dict[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    """Which transaction comes before which, in every serial order."""
    for key, order in orders.items():
        for element, following in pairwise(order):
            yield writers[key, element], writers[key, following]
    for one in history:
        for key, elements in one.reads.items():
            for last in elements[-1:]:
                yield writers[key, last], one.name
            for following in orders.get(key, ())[len(elements) : len(elements) + 1]:
                yield one.name, writers[key, following]
