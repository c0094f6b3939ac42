"""Looks for anomalies in a history: a pure function of its events, so that each anomaly can be planted and found.

    append      lost, offset used twice, doubled, out of order, never sent, aborted but visible
    read        dirty (a message that is not there in the end), out of order, missed by a group
    group       a committed offset that went back
    transaction partial, committed but missing, never ended; a copied message that is missing or doubled

Invariants
- A topic with `durability=shipped` loses nothing acknowledged, and no reader ever saw what is not there in the end.
- A topic with `synced` may lose a tail with its owner. It is on that owner's disk then: each acknowledged message is in
  the topic, at its offset, or among those that a disk gave back. Its offsets may be used again, for other messages.
- What is unknown may be there or not; in a transaction it is there as a whole or not at all, where its topic loses
  nothing. Elsewhere it may have lost a part; what was aborted is visible nowhere, and every transaction ends.
- A subscription with one consumer may deliver again what it delivered before. What is new to it comes in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tests.cluster.chaos.history import (
    Append,
    Commit,
    Committed,
    Event,
    Final,
    Read,
    Rescued,
    Transaction,
)

Place = tuple[str, int]
"""A topic and a partition."""


class Promises(NamedTuple):
    """What was promised of the topics of a history."""

    shipped: frozenset[str] = frozenset()
    synced: frozenset[str] = frozenset()
    read_by: Mapping[str, str] = {}
    """A group or a subscription, and the topic of which it sees every message."""
    redelivers: frozenset[str] = frozenset()
    """Subscriptions: what was not acknowledged comes again."""
    copies: Mapping[str, str] = {}
    """A topic, and the one of which it has each message exactly once."""


class Anomaly(NamedTuple):
    """Something that must not be."""

    kind: str
    where: str
    text: str


class Facts:
    """A history, by what is asked of it."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.appends: list[Append] = []
        self.reads: list[Read] = []
        self.commits: list[Commit] = []
        self.committed: list[Committed] = []
        self.transactions: dict[str, str] = {}
        self.final: dict[Place, list[tuple[int, str]]] = {}
        self.unstable: dict[Place, int] = {}
        self.rescued: dict[str, set[str]] = defaultdict(set)
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Append():
                self.appends.append(event)
            case Read():
                self.reads.append(event)
            case Commit():
                self.commits.append(event)
            case Committed():
                self.committed.append(event)
            case Transaction():
                self.transactions[event.name] = event.outcome
            case Final():
                self.final[event.topic, event.partition] = event.messages
                self.unstable[event.topic, event.partition] = event.unstable
            case Rescued():
                self.rescued[event.topic].update(value for _, value in event.messages)
            case _:
                pass

    def is_promised(self, append: Append) -> bool:
        """Whether its sender was told that it is there to stay."""
        return append.outcome == "ok" and (
            not append.transaction or self.transactions.get(append.transaction) == "committed"
        )

    def values(self, topic: str) -> Counter[str]:
        """How often each value is in a topic at the end."""
        return Counter(value for (name, _), messages in self.final.items() if name == topic for _, value in messages)


def check(events: Iterable[Event], promises: Promises) -> list[Anomaly]:
    """All anomalies."""
    facts = Facts(events)
    return [anomaly for one in CHECKS.values() for anomaly in one(facts, promises)]


def lost_messages(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """Acknowledged, and not at its offset in the end."""
    final = {place: dict(messages) for place, messages in facts.final.items()}
    for append in facts.appends:
        place = (append.topic, append.partition)
        if not facts.is_promised(append) or place not in final or append.offset is None:
            continue
        if final[place].get(append.offset) == append.value:
            continue
        if append.topic in promises.shipped:
            found = final[place].get(append.offset)
            yield Anomaly("lost", _name(place), f"{append.value} was acknowledged at {append.offset}; there is {found}")
        elif append.topic in promises.synced and append.value not in facts.rescued[append.topic]:
            yield Anomaly("lost", _name(place), f"{append.value} was acknowledged at {append.offset}; no disk has it")


def offsets_used_twice(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """Two messages were acknowledged at one offset, of a topic that never gives one away again."""
    seen: dict[tuple[str, int, int], str] = {}
    for append in facts.appends:
        if append.outcome != "ok" or append.offset is None or append.topic not in promises.shipped:
            continue
        place = (append.topic, append.partition)
        before = seen.setdefault((*place, append.offset), append.value)
        if before != append.value:
            yield Anomaly("offset used twice", _name(place), f"{append.offset}: {before} and {append.value}")


def doubled_messages(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """An idempotent producer's message is in a partition at most once."""
    for place, messages in facts.final.items():
        offsets: dict[str, int] = {}
        for offset, value in messages:
            if value in offsets:
                yield Anomaly("doubled", _name(place), f"{value} is at {offsets[value]} and {offset}")
            offsets[value] = offset


def messages_out_of_order(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """A producer's numbers grow in each partition it writes to. A copy has the order of its source only."""
    for place, messages in facts.final.items():
        if place[0] in promises.copies:
            continue
        last: dict[str, int] = {}
        for offset, value in messages:
            producer, _, number = value.partition(":")
            if int(number) < last.get(producer, -1):
                yield Anomaly("out of order", _name(place), f"{value} at {offset} is after {last[producer]}")
            last[producer] = int(number)


def messages_never_sent(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """Or refused for good, or of a transaction that was aborted."""
    sent = {(append.topic, append.value): append for append in facts.appends}
    for place, messages in facts.final.items():
        if place[0] in promises.copies:
            continue
        for offset, value in messages:
            append = sent.get((place[0], value))
            if append is None or append.partition != place[1]:
                yield Anomaly("never sent", _name(place), f"{value} at {offset}")
            elif append.transaction and facts.transactions.get(append.transaction) == "aborted":
                yield Anomaly("aborted", _name(place), f"{value} at {offset} of transaction {append.transaction}")


def dirty_reads(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """A reader of a shipped topic saw what is not there in the end."""
    final = {place: dict(messages) for place, messages in facts.final.items()}
    for read in facts.reads:
        place = (read.topic, read.partition)
        if read.topic not in promises.shipped or place not in final:
            continue
        for offset, value in read.messages:
            if final[place].get(offset) != value:
                now = final[place].get(offset)
                yield Anomaly("dirty read", _name(place), f"{read.reader} read {value} at {offset}; there is {now}")


def reads_out_of_order(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """Within one life a reader's offsets grow; a subscription delivers again what was not acknowledged, and what is new
    to it in order, over all its lives."""
    last: dict[tuple[str, int, str, int], int] = {}
    delivered: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    newest: dict[tuple[str, int, str], int] = {}
    for read in facts.reads:
        if read.reader.partition("/")[0] in promises.redelivers:
            who = (read.topic, read.partition, read.reader)
            for offset, value in read.messages:
                if offset not in delivered[who]:
                    if offset < newest.get(who, -1):
                        text = f"{read.reader} first got {value} at {offset} after {newest[who]}"
                        yield Anomaly("read out of order", _name(who[:2]), text)
                    delivered[who].add(offset)
                    newest[who] = max(offset, newest.get(who, -1))
            continue
        key = (read.topic, read.partition, read.reader, read.life)
        for offset, value in read.messages:
            if offset <= last.get(key, -1):
                where = _name((read.topic, read.partition))
                yield Anomaly("read out of order", where, f"{read.reader} read {value} at {offset} after {last[key]}")
            last[key] = offset


def messages_missed(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """Every message of its topic is delivered to a group or a subscription at least once. A reader's name begins with
    its group's, and a slash."""
    seen: dict[str, set[tuple[int, int, str]]] = defaultdict(set)
    for read in facts.reads:
        group = read.reader.partition("/")[0]
        if promises.read_by.get(group) == read.topic:
            seen[group].update((read.partition, offset, value) for offset, value in read.messages)
    for group, topic in promises.read_by.items():
        for place, messages in facts.final.items():
            if place[0] == topic:
                missed = [one for one in messages if (place[1], *one) not in seen[group]]
                for offset, value in missed:
                    yield Anomaly("missed", _name(place), f"{group} never got {value} at {offset}")


def offsets_that_went_back(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """A committed offset that was acknowledged before the question is the least that the answer may say."""
    done: dict[tuple[str, str, int], list[Commit]] = defaultdict(list)
    for commit in facts.commits:
        if commit.outcome == "ok" and commit.topic in promises.shipped:
            done[commit.group, commit.topic, commit.partition].append(commit)
    ends = {key: sorted(one.end for one in commits) for key, commits in done.items()}
    highest = {
        key: list(accumulate((one.offset for one in sorted(commits, key=lambda one: one.end)), max))
        for key, commits in done.items()
    }
    for asked in facts.committed:
        key = (asked.group, asked.topic, asked.partition)
        before = bisect_left(ends.get(key, []), asked.begin)
        if not before:
            continue
        least = highest[key][before - 1]
        if asked.offset is None or asked.offset < least:
            text = f"{asked.group} committed {least}, and at {asked.begin:.3f} s it was {asked.offset}"
            yield Anomaly("went back", _name((asked.topic, asked.partition)), text)


def partial_transactions(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """All messages of a transaction are visible, or none, in topics that lose nothing."""
    visible = {topic: set(facts.values(topic)) for topic, _ in facts.final if topic in promises.shipped}
    members: dict[str, list[Append]] = defaultdict(list)
    for append in facts.appends:
        if append.transaction and append.topic in visible:
            members[append.transaction].append(append)
    for name, appends in members.items():
        there = sum(append.value in visible[append.topic] for append in appends)
        is_committed = facts.transactions.get(name) == "committed"
        if there not in (0, len(appends)) or (is_committed and there != len(appends)):
            outcome = facts.transactions.get(name, "unknown")
            yield Anomaly("partial", name, f"{outcome}: {there} of its {len(appends)} messages are visible")


def open_transactions(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """In the end, long after the last timeout, nothing is undecided."""
    for place, count in facts.unstable.items():
        if count:
            yield Anomaly("never ended", _name(place), f"the last {count} offsets are behind an open transaction")


def wrong_copies(facts: Facts, promises: Promises) -> Iterator[Anomaly]:
    """Each message of the source is in its copy, exactly once."""
    for copy, source in promises.copies.items():
        wanted, found = facts.values(source), facts.values(copy)
        for value in sorted(wanted.keys() | found.keys()):
            if found[value] != 1 or value not in wanted:
                there = "is" if value in wanted else "is not"
                yield Anomaly("not exactly once", copy, f"{value} {there} in {source}, and {found[value]} times here")


CHECKS: Mapping[str, Callable[[Facts, Promises], Iterator[Anomaly]]] = {
    "nothing acknowledged is lost": lost_messages,
    "offsets are used once": offsets_used_twice,
    "nothing is doubled": doubled_messages,
    "order is kept": messages_out_of_order,
    "nothing appears that was not sent": messages_never_sent,
    "readers see only what stays": dirty_reads,
    "readers go forward": reads_out_of_order,
    "groups and subscriptions see everything": messages_missed,
    "committed offsets do not go back": offsets_that_went_back,
    "transactions are atomic": partial_transactions,
    "transactions end": open_transactions,
    "copies are exactly once": wrong_copies,
}


def _name(place: Place) -> str:
    return f"{place[0]}/{place[1]}"


def by_check(events: Sequence[Event], promises: Promises) -> dict[str, list[Anomaly]]:
    """The anomalies of each check, for a report."""
    facts = Facts(events)
    return {name: list(one(facts, promises)) for name, one in CHECKS.items()}
