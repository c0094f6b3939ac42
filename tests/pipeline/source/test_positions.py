"""Where a read begins and ends, beside an owner that appends."""

from __future__ import annotations

import pytest

from tidelog.errors import InputError
from tidelog.pipeline.source.options import Positions, alone, parse_offsets, parse_timestamp, resolve_range

TOPIC = alone("shop/orders")
NEVER = parse_timestamp("9999999")
LATEST = Positions(everywhere="latest")


class GrowingLog:
    """A log to which somebody appends a message each time that it is looked at; each is a second later."""

    def __init__(self, messages: int, grows: bool = True) -> None:
        self._messages = messages
        self._grows = grows

    @property
    def start_offset(self) -> int:
        return 0

    @property
    def next_offset(self) -> int:
        self._messages += self._grows
        return self._messages

    def offset_at(self, time_us: int) -> int:
        return min(self.next_offset, -(-time_us // 1_000_000))


def test_a_beginning_at_the_end_is_not_behind_it() -> None:
    """Messages that come while both ends are looked up do not make a query fail."""
    start, stop = resolve_range(NEVER, LATEST, TOPIC, GrowingLog(100), "latest")
    assert 100 <= start <= stop
    start, stop = resolve_range(parse_timestamp("102000"), LATEST, TOPIC, GrowingLog(100), "latest")
    assert 100 <= start <= stop


def test_a_time_that_nothing_has_reached_reads_nothing_before_an_end() -> None:
    """With the strategy `latest` it begins at the end, also where that end is an offset."""
    ending = parse_offsets('{"shop/orders": 50}')
    assert resolve_range(NEVER, ending, TOPIC, GrowingLog(100), "latest") == (50, 50)
    with pytest.raises(InputError, match="no message of the starting time"):
        resolve_range(NEVER, ending, TOPIC, GrowingLog(100), "error")


def test_ends_the_wrong_way_round_are_refused() -> None:
    """A time or an offset behind the end is a slip."""
    ending = parse_offsets('{"shop/orders": 50}')
    for starting in (parse_timestamp("60000"), parse_offsets('{"shop/orders": 60}')):
        with pytest.raises(InputError, match="starting offset 60 is after the ending offset 50"):
            resolve_range(starting, ending, TOPIC, GrowingLog(100, grows=False), "latest")
