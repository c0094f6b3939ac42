"""What this disk keeps of topics that another node went on with: `tidelog topic rescue` brings it back.

Invariants
- A look changes nothing and claims nothing.
- A tail counts until a rescue of it has begun, or it was discarded.
- Files of a partition that is open here are the end of its log: only what was set aside before is looked for. Those of
  one that is not open are compared with the catalog until they are known to be a tail; from then on they are one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from tidelog.clock import Clock
from tidelog.errors import TidelogError
from tidelog.service.cluster_control import Unshipped
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName
from tidelog.topics.rescue import RescuableTail, Rescue

_LOOK_SECONDS = 30.0


class KeptTails:
    """The tails in one log directory, looked for now and then. One thread at a time uses it."""

    def __init__(self, directory: LogDirectory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._found: dict[str, Unshipped] = {}
        self._in_place: dict[TopicName, RescuableTail] = {}
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
        for name in self._directory._opener.views.local():
            try:
                tails = self._tails(name, name in opened)
            except (TidelogError, OSError):
                continue  # it is being opened or moved; what is wrong with it, opening says
            for tail in tails:
                topic = str(name if (parent := name.parent()) is None else parent[0])
                found[topic] = _with(found.get(topic), tail, self._clock.now_us())
        return found

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


def _with(known: Unshipped | None, tail: RescuableTail, now_us: int) -> Unshipped:
    seconds = 0.0 if tail.set_aside_us is None else max(0, now_us - tail.set_aside_us) / 1e6
    known = known or Unshipped(messages=0, bytes=0, seconds=0.0)
    return Unshipped(
        messages=known.messages + tail.count,
        bytes=known.bytes + tail.file_bytes,
        seconds=round(max(known.seconds, seconds), 3),
    )
