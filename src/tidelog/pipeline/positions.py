"""Where a read begins and ends, topic by topic: as options and checkpoints say it, and as offsets.

    earliest | latest
    {"shop/orders": {"0": 100}}            offsets, as Kafka's users write them; -2 is earliest, -1 latest
    {"shop/orders": 100}                   the same, shorter
    a time in milliseconds, for all topics or for each

Invariants
- Ends are exclusive. A topic that is not named begins and ends where it would without the option.
- A time stands for the first message of that time or later.
- What Spark keeps in its checkpoint is `{"shop/orders": {"0": 100}}`, whatever the options were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from tidelog.errors import InputError
from tidelog.topics.names import parse_topic_name

Edge = Literal["earliest", "latest"]
PARTITION = "0"
_EDGES: dict[object, Edge] = {-2: "earliest", -1: "latest", "earliest": "earliest", "latest": "latest"}
_MICROSECONDS = 1000
_Value = int | str | dict[str, int | str]


class Positions(msgspec.Struct, frozen=True):
    """One place a topic; `everywhere` is for those that are not named, None: the default of the query."""

    offsets: dict[str, int | Edge] = {}
    times_us: dict[str, int] = {}
    everywhere: Edge | None = None
    everywhere_us: int | None = None


class Ends(Protocol):
    """What a topic's log says about itself."""

    @property
    def start_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    def offset_at(self, time_us: int) -> int: ...


def parse_offsets(text: str) -> Positions:
    """The options startingOffsets and endingOffsets."""
    plain = text.strip().lower()
    if plain in ("earliest", "latest"):
        return Positions(everywhere=_EDGES[plain])
    return Positions(offsets={topic: _offset(topic, value) for topic, value in _by_topic(text).items()})


def parse_by_timestamp(text: str) -> Positions:
    """The options startingOffsetsByTimestamp and endingOffsetsByTimestamp."""
    return Positions(times_us={topic: _time_us(topic, value) for topic, value in _by_topic(text).items()})


def parse_timestamp(text: str) -> Positions:
    """The options startingTimestamp and endingTimestamp."""
    try:
        return Positions(everywhere_us=int(text.strip()) * _MICROSECONDS)
    except ValueError:
        raise InputError(f"a timestamp is in milliseconds since 1970, not {text!r}") from None


def _by_topic(text: str) -> dict[str, int | str]:
    try:
        found = msgspec.json.decode(text, type=dict[str, _Value])
    except msgspec.MsgspecError:
        raise InputError(
            f"{text!r} is none of them", hint='earliest, latest, or JSON such as {"shop/orders": {"0": 100}}'
        ) from None
    return {str(parse_topic_name(topic)): _of_partition(topic, value) for topic, value in found.items()}


def _of_partition(topic: str, value: _Value) -> int | str:
    if not isinstance(value, dict):
        return value
    if list(value) != [PARTITION]:
        raise InputError(f'{topic} has the partition "0" alone, not {sorted(value)}')
    return value[PARTITION]


def _offset(topic: str, value: int | str) -> int | Edge:
    if value in _EDGES:
        return _EDGES[value]
    if isinstance(value, str) or value < 0:
        raise InputError(f"{topic}: an offset is 0 or more, -2 for earliest or -1 for latest, not {value!r}")
    return value


def _time_us(topic: str, value: int | str) -> int:
    if isinstance(value, str):
        raise InputError(f"{topic}: a timestamp is in milliseconds since 1970, not {value!r}")
    return value * _MICROSECONDS


# To offsets


def resolve_start(positions: Positions | None, topic: str, log: Ends, default: Edge, when_no_later: str) -> int:
    """Where a read of a topic begins."""
    found = _time_of(positions, topic)
    if found is None:
        return _edge_or_offset(positions, topic, log, default)
    latest, offset = log.next_offset, log.offset_at(found)
    if offset >= latest and when_no_later == "error":
        raise InputError(
            f"{topic} has no message of the starting time or later",
            hint='startingOffsetsByTimestampStrategy "latest" begins at the end then',
        )
    return offset


def resolve_range(
    starting: Positions | None, ending: Positions | None, topic: str, log: Ends, when_no_later: str
) -> tuple[int, int]:
    """Where a batch read of a topic begins and ends; InputError when the two were given the wrong way round.

    The beginning is looked up first: what is appended between the two looks must not make it lie behind the end.
    """
    latest = log.next_offset
    start = resolve_start(starting, topic, log, "earliest", when_no_later)
    stop = resolve_end(ending, topic, log)
    if start <= stop or starting is None or ending is None:
        return start, stop
    if start >= latest and _time_of(starting, topic) is not None:
        return stop, stop  # no message is that late, and beginning at the end of all is beginning at the end asked for
    raise InputError(f"{topic}: the starting offset {start} is behind the ending offset {stop}")


def resolve_end(positions: Positions | None, topic: str, log: Ends) -> int:
    """Where a read of a topic ends, exclusive. A time that no message has reached yet is the end."""
    found = _time_of(positions, topic)
    return _edge_or_offset(positions, topic, log, "latest") if found is None else log.offset_at(found)


def _time_of(positions: Positions | None, topic: str) -> int | None:
    return None if positions is None else positions.times_us.get(topic, positions.everywhere_us)


def _edge_or_offset(positions: Positions | None, topic: str, log: Ends, default: Edge) -> int:
    given = None if positions is None else positions.offsets.get(topic, positions.everywhere)
    place = default if given is None else given
    if place == "earliest":
        return log.start_offset
    return log.next_offset if place == "latest" else place


# In checkpoints


def to_checkpoint(offsets: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """What Spark keeps."""
    return {topic: {PARTITION: offset} for topic, offset in sorted(offsets.items())}


def from_checkpoint(found: Mapping[str, object]) -> dict[str, int]:
    """What Spark kept, back again; InputError when somebody else wrote it."""
    try:
        topics = msgspec.convert(dict(found), dict[str, dict[str, int]])
        return {topic: partitions[PARTITION] for topic, partitions in topics.items()}
    except (msgspec.ValidationError, KeyError) as error:
        raise InputError(
            f"the checkpoint of this query has offsets that are not tidelog's: {found}",
            hint="A query keeps its checkpoint location for itself; take another one",
        ) from error
