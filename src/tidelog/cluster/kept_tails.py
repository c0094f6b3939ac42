"""What this disk keeps of topics that another node went on with: `tidelog topic rescue` brings it back.

Invariants
- A look changes nothing and claims nothing.
- A tail counts until a rescue of it has begun, or it was discarded.
- Files of a partition that is open here are the end of its log: only what was set aside before is looked for. Those of
  one that is not open are compared with the catalog until they are known to be a tail; from then on they are one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from tidelog.clock import Clock
from tidelog.errors import TidelogError
from tidelog.service.cluster_control import Unshipped
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName
from tidelog.topics.rescue import RescuableTail, Rescue

_LOOK_SECONDS = 30.0


class _Known(NamedTuple):
    bytes: int
    since_us: int


class KeptTails:
    """The tails in one log directory, looked for now and then. One thread at a time uses it."""

    def __init__(self, directory: LogDirectory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._found: dict[str, Unshipped] = {}
        self._in_place: dict[TopicName, RescuableTail] = {}
        self._known: dict[tuple[TopicName, str], _Known] = {}
        self._look_at = float("-inf")

    def by_topic(self, opened: Callable[[], Collection[TopicName]]) -> dict[str, Unshipped]:
        """As of the last half minute. `opened`: the logs that are open here."""
        now = self._clock.monotonic()
        if now >= self._look_at:
            self._found = self._look(opened())
            self._look_at = now + _LOOK_SECONDS
        return self._found

    def _look(self, opened: Collection[TopicName]) -> dict[str, Unshipped]:
        found: dict[str, Unshipped] = {}
        known: dict[tuple[TopicName, str], _Known] = {}
        now_us = self._clock.now_us()
        for name in self._directory._opener.views.local():
            try:
                tails = self._tails(name, name in opened)
                known |= {(name, tail.name): self._known_of(name, tail, now_us) for tail in tails}
            except (TidelogError, OSError):
                continue  # it is being opened or moved; what is wrong with it, opening says
            for tail in tails:
                topic = str(name if (parent := name.parent()) is None else parent[0])
                found[topic] = _with(found.get(topic), tail.count, known[name, tail.name], now_us)
        self._known = known
        return found

    def _known_of(self, name: TopicName, tail: RescuableTail, now_us: int) -> _Known:
        """The messages of a tail do not change: their size is read once, and it is found once."""
        known = self._known.get((name, tail.name))
        if known is not None:
            return known
        since_us = now_us if tail.set_aside_us is None else tail.set_aside_us
        return _Known(Rescue(self._directory, str(name), clock=self._clock).message_bytes(tail), since_us)

    def _tails(self, name: TopicName, is_open: bool) -> list[RescuableTail]:
        rescue = Rescue(self._directory, str(name), clock=self._clock)
        known = self._in_place.get(name)
        if is_open or (known is not None and not rescue.has_files):
            self._in_place.pop(name, None)
            known = None
        tails = rescue.tails(in_place=not is_open and known is None)
        if known is not None:
            tails.append(known)
        for tail in tails:
            if tail.set_aside_us is None:
                self._in_place[name] = tail
        return [tail for tail in tails if tail.count and not rescue.has_begun(tail)]


def _with(sum_before: Unshipped | None, count: int, known: _Known, now_us: int) -> Unshipped:
    before = sum_before or Unshipped(messages=0, bytes=0, seconds=0.0)
    return Unshipped(
        messages=before.messages + count,
        bytes=before.bytes + known.bytes,
        seconds=round(max(before.seconds, max(0, now_us - known.since_us) / 1e6), 3),
    )
