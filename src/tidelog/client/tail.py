"""Where partitions stand at their owners, and what these have on their disks, as frames.

    place = ServerPlace("http://any-node:8080")
    piece = place.frames("shop/orders", 3, offset, epoch=7)      # from the node that serves partition 3

Invariants
- Frames are checked like those of a file: the first has the offset that was asked for, and every checksum is right.
- Offsets are learnt under an epoch. An owner of a later one may not have what the one before had not shipped: from
  `kept_until_offset` on it has other messages than those that the reader was to get.
- Requests follow partitions to the nodes that serve them, and wait while no node does, for the time of the place.
- It reaches no settings and no topics: tasks of Spark read with it.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tidelog.client.bridge import Bridge
from tidelog.client.transport import Answer, Http, parse_server, path_of
from tidelog.clock import to_datetime
from tidelog.errors import CorruptionError, DataError, OffsetOutOfRangeError, ServerUnavailableError
from tidelog.files import LocalFiles
from tidelog.log.frame import Frames, scan
from tidelog.log.reader import ReadableLog
from tidelog.log.tail_cache import Batch, framed_batch
from tidelog.secret import Secret

OF_THE_STORE = -1
"""The epoch of a partition of which only the store was asked."""
_FETCH_BYTES = 4 << 20
_ATTEMPT_SECONDS = 30.0
_POLL_SECONDS = 0.2
_CONNECTIONS = 8
_KEPT_PLACES = 16
_SAID = ("first-offset", "hot-start-offset", "end-offset", "epoch")


class PartitionState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a partition stands, as the server says."""

    partition: int
    start_offset: int
    hot_start_offset: int
    shipped_offset: int
    durable_offset: int
    next_offset: int
    last_stable_offset: int
    high_watermark: int | None = None
    """Readers get what is below; None: an older server, which does not say it."""
    unshipped_bytes: int | None = None
    epoch: int = 0
    node: str | None = None

    @property
    def readable_offset(self) -> int:
        return self.next_offset if self.high_watermark is None else self.high_watermark


class TopicState(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, as the server describes it."""

    name: str
    partitions: list[PartitionState]
    settings: dict[str, Any] = {}
    effective_settings: dict[str, Any] = {}
    is_placed: bool = False


async def described(http: Http, path: str) -> TopicState:
    """A topic, each partition as its owner says."""
    found: TopicState = await http.json("GET", path, kind=TopicState)

    async def of_owner(known: PartitionState) -> PartitionState:
        """As the node says that serves it, where that did not answer before."""
        if known.epoch != OF_THE_STORE:
            return known
        again: TopicState = await http.json("GET", path, query={"partition": known.partition}, kind=TopicState)
        return again.partitions[known.partition]

    stands = await asyncio.gather(*map(of_owner, found.partitions))
    return msgspec.structs.replace(found, partitions=stands)


class Piece(NamedTuple):
    """Frames of a partition, and where it stood when its owner read them."""

    frames: Frames
    hot_start_offset: int
    end_offset: int
    epoch: int
    kept_until_offset: int
    """What the owner of the epoch that was asked for had is still there below this."""


class ServerPlace(msgspec.Struct, frozen=True):
    """A server, and how it is reached. It can be pickled."""

    url: str
    token: Secret | None = None
    authorities: str | None = None
    """Certificates in PEM, instead of those of the system."""
    timeout_seconds: float = 60.0

    def state(self, topic: str) -> TopicState:
        """Where the partitions of a topic stand now."""
        bridge, http = _opened(self, os.getpid())
        return bridge.wait(described(http, _path(topic)))

    def frames(
        self,
        topic: str,
        partition: int,
        offset: int | str,
        *,
        epoch: int | None = None,
        max_bytes: int = _FETCH_BYTES,
    ) -> Piece:
        """What there is from an offset on, `latest` or a time; OffsetOutOfRangeError for one that the owner has not."""
        bridge, http = _opened(self, os.getpid())
        query = {"partition": partition, "offset": offset, "max_bytes": max_bytes, "epoch": epoch}
        answer = bridge.wait(
            http.ask(
                "GET", f"{_path(topic)}/frames", query, accept="application/octet-stream", attempt=_ATTEMPT_SECONDS
            )
        )
        return _piece(answer, offset)


def _path(topic: str) -> str:
    return path_of("topics", *topic.split("/", 1))


def _piece(answer: Answer, asked: int | str) -> Piece:
    said = {name: answer.headers.get(f"x-tidelog-{name}", "") for name in _SAID}
    if not all(text.isascii() and text.isdigit() for text in said.values()):
        raise _odd()
    first, hot_start, end, epoch = map(int, said.values())
    kept = answer.headers.get("x-tidelog-kept-until-offset", str(end))
    if (isinstance(asked, int) and first != asked) or not kept.isdigit():
        raise _odd()
    found = scan(answer.body, 0, first)
    if found.end != len(answer.body):
        raise CorruptionError(
            found.stop.reason, path=Path("frames"), byte=found.end, operation="read", hint="Read it again"
        )
    return Piece(found.frames, hot_start, end, epoch, int(kept))


def _odd() -> DataError:
    return DataError("the server sends frames without their offsets", hint="Does the URL name a tidelog server?")


@lru_cache(_KEPT_PLACES)
def _opened(place: ServerPlace, pid: int) -> tuple[Bridge, Http]:
    """Connections of this process, `pid`; they end with it."""
    server = parse_server(place.url)
    tls = ssl.create_default_context(cadata=place.authorities) if place.authorities and server.is_tls else None
    bridge = Bridge("tidelog-tail")

    async def made() -> Http:
        return Http(server, place.token, tls, timeout_seconds=place.timeout_seconds, max_connections=_CONNECTIONS)

    http = bridge.wait(made())
    bridge.on_close = http.close
    return bridge, http


class Stands:
    """Where partitions stood when they were looked at first since `forget`."""

    def __init__(self, place: ServerPlace) -> None:
        self.place = place
        self._topics: dict[str, list[PartitionState]] = {}

    def of(self, topic: str, partition: int) -> PartitionState:
        """Waits for a partition that was added a moment ago: the server that is asked may not have heard of it."""
        deadline = time.monotonic() + self.place.timeout_seconds
        known = self._topics.get(topic, [])
        while partition >= len(known):
            known = self._topics[topic] = self.place.state(topic).partitions
            if partition >= len(known):
                if time.monotonic() >= deadline:
                    raise ServerUnavailableError(
                        f"{self.place.url} knows {len(known)} partitions of {topic}, and none of number {partition}",
                        hint="Does it serve the installation whose store is read?",
                    )
                time.sleep(_POLL_SECONDS)
        return known[partition]

    def forget(self) -> None:
        self._topics.clear()


class OwnerTail(ReadableLog):
    """The disk of the owner of a partition, as the hot end of a log that is read from the store."""

    def __init__(self, stands: Stands, topic: str, partition: int, time_field: int) -> None:
        super().__init__(Path(topic), LocalFiles(), _FETCH_BYTES, time_field)
        self.place = stands.place
        self._stands = stands
        self._topic = topic
        self._partition = partition

    @property
    def stand(self) -> PartitionState:
        """As of the last look."""
        return self._stands.of(self._topic, self._partition)

    @property
    def start_offset(self) -> int:
        return self.stand.hot_start_offset

    @property
    def next_offset(self) -> int:
        return self.stand.readable_offset

    @property
    def over(self) -> bool:
        return False

    def kept_until(self, epoch: int) -> int:
        """What was read under an epoch is still there up to this offset."""
        stand = self.stand
        return stand.readable_offset if stand.epoch == epoch else self._at("latest", epoch).kept_until_offset

    def _at(self, offset: int | str, epoch: int | None = None, max_bytes: int = 1) -> Piece:
        return self.place.frames(self._topic, self._partition, offset, epoch=epoch, max_bytes=max_bytes)

    def locate(self, offset: int, stop_offset: int) -> Batch | None:
        try:
            frames = self._at(offset, max_bytes=_FETCH_BYTES).frames
        except OffsetOutOfRangeError:
            self._stands.forget()  # it may be in the store by now
            if offset > self.stand.readable_offset:
                return None
            raise
        return framed_batch(frames, offset, stop_offset) if frames.count else None

    def wait_for_news(self, offset: int, timeout_seconds: float | None) -> bool:
        if timeout_seconds is not None and timeout_seconds <= 0:
            return False
        time.sleep(_POLL_SECONDS if timeout_seconds is None else min(_POLL_SECONDS, timeout_seconds))
        return True

    async def wait_for_news_async(self, offset: int) -> None:
        await asyncio.sleep(_POLL_SECONDS)

    def _file_for_time(self, time_us: int) -> int:
        return self.start_offset

    def offset_at(self, time_us: int, first_offset: int = 0) -> int:
        """As the owner finds it: it has an index."""
        try:
            found = self._at(to_datetime(time_us).isoformat()).frames.first_offset
        except OverflowError:
            return self.next_offset  # later than any message can be
        except OffsetOutOfRangeError:
            return max(first_offset, self.start_offset)  # nothing is older here: what is, is in the store
        return min(max(found, first_offset), self.next_offset)
