"""Does on this node what the documents of the cluster say: opens what is assigned to it, and releases what is not.

Invariants
- Everything runs in the event loop. For each piece (a partition, a slot, an engine) one task works at a time; it ends
  when the piece is as the documents want it: one that is moved away while it is being opened is released after.
- What another node still holds is asked for again every few hundredths of a second: the fencing of the cold tier says
  when it is free, not the documents.
- What fails, with whatever error, is tried again, less often each time, and said once. A partition that is not wanted
  here any more is released, whether it was opened here or not: a request of a client may have opened it first, and one
  whose opening failed may be claimed all the same, if only the answer was lost.
- A change costs as much as the topics that it is about, however many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from tidelog.clock import jittered
from tidelog.cluster.documents import ClusterState, topic_of_key
from tidelog.cluster.failures import Failures
from tidelog.errors import ConflictError, HeldError, LockedError, TidelogError
from tidelog.topics.names import TopicName

_AT_ONCE = 16
HELD_SECONDS = 0.05
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_NO_TOPIC = TopicName("", "")


class Piece(NamedTuple):
    """Something that one node at a time serves."""

    kind: Literal["partition", "slot", "engine"]
    topic: TopicName = _NO_TOPIC
    number: int = 0

    def __str__(self) -> str:
        if self.kind == "partition":
            return f"{self.topic}, partition {self.number}"
        return f"engine {self.topic.name}" if self.kind == "engine" else f"coordinator slot {self.number}"


def engine_piece(name: str) -> Piece:
    """An engine."""
    return Piece("engine", TopicName("", name))


class Host(Protocol):
    """What a node offers to the cluster. LockedError says that another node still has it."""

    async def open_partition(self, topic: TopicName, number: int) -> None: ...

    async def release_partition(self, topic: TopicName, number: int) -> None:
        """Ships what it has, and lets it go so that another node may open it at once."""

    def renew(self) -> None:
        """In a thread: gives a sign of life of the log directory, so that what is open is held again."""

    async def fenced_partitions(self) -> Sequence[tuple[TopicName, int]]:
        """Those that are open here and claimed by another node since."""

    async def acquire_slot(self, slot: int) -> None: ...

    async def release_slot(self, slot: int) -> None: ...


class EngineHost(Protocol):
    """The same for engines; a node that serves none has no such host."""

    async def open_engine(self, name: str) -> None: ...

    async def release_engine(self, name: str) -> None:
        """Ships what it may, and closes it so that another node may restore it at once."""

    async def fenced_engines(self) -> Sequence[str]:
        """Those that are open here and claimed by another node since."""


class Wanted:
    """What the documents want of one node."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.pieces: set[Piece] = set()
        self._by_topic: dict[TopicName, set[Piece]] = {}

    def follow(self, state: ClusterState, changed: Iterable[str]) -> set[Piece]:
        """Takes in what has changed, by keys; returns the pieces that have come or gone."""
        keys, before = state.keys, set[Piece]()
        after: set[Piece] = set()
        for key in changed:
            if key.startswith(keys.topics_prefix):
                topic = topic_of_key(key, keys)
                before |= self._by_topic.pop(topic, set())
                if found := self._of_topic(state, topic):
                    self._by_topic[topic] = found
                    after |= found
            elif key == keys.coordinators:
                before |= {piece for piece in self.pieces if piece.kind == "slot"}
                after |= {
                    Piece("slot", number=n) for n, node in enumerate(state.coordinators.slots) if node == self.node
                }
            elif key.startswith(keys.engines_prefix):
                piece = engine_piece(key.removeprefix(keys.engines_prefix))
                before |= {piece} & self.pieces
                placement = state.engines.get(piece.topic.name)
                after |= {piece} if placement is not None and placement.node == self.node else set()
        self.pieces = (self.pieces - before) | after
        return before ^ after

    def _of_topic(self, state: ClusterState, topic: TopicName) -> set[Piece]:
        placement = state.topics.get(topic)
        if placement is None or placement.is_deleting or self.node not in placement.partitions:
            return set()
        return {Piece("partition", topic, n) for n, node in enumerate(placement.partitions) if node == self.node}


class Agent:
    """Keeps what this node has open as the documents want it."""

    def __init__(self, node: str, host: Host, engines: EngineHost | None = None) -> None:
        self.held: set[Piece] = set()
        self.failures = Failures[Piece]()
        self._wanted = Wanted(node)
        self._host = host
        self._engines = engines
        self._doubtful: set[Piece] = set()
        self._working: dict[Piece, asyncio.Task[None]] = {}
        self._room = {True: asyncio.Semaphore(_AT_ONCE), False: asyncio.Semaphore(_AT_ONCE)}
        self._is_over = False
        self.on_progress: Callable[[], None] = lambda: None
        """Called when something was opened or released, is to be, or could not be."""

    @property
    def opening(self) -> int:
        return sum(piece.kind != "slot" for piece in self._wanted.pieces - self.held)

    @property
    def releasing(self) -> int:
        return sum(piece.kind != "slot" for piece in self.held - self._wanted.pieces)

    def follow(self, state: ClusterState, changed: Iterable[str]) -> None:
        """The documents under these keys have changed."""
        pieces = self._wanted.follow(state, changed)
        self._doubtful |= {one for one in pieces - self._wanted.pieces if one.kind == "partition"}
        for piece in sorted(pieces):
            self._begin(piece)
        if pieces:
            self.on_progress()

    def _begin(self, piece: Piece) -> None:
        if piece in self._working or self._is_over or not self._is_due(piece):
            return
        task = asyncio.get_running_loop().create_task(self._work(piece))
        self._working[piece] = task
        task.add_done_callback(lambda _: self._ended(piece))

    def _ended(self, piece: Piece) -> None:
        self._working.pop(piece, None)
        self._begin(piece)  # it may have been moved in the last moment
        self.on_progress()

    def _is_due(self, piece: Piece) -> bool:
        if piece in self._wanted.pieces:
            return piece not in self.held
        return piece in self.held or piece in self._doubtful

    async def _work(self, piece: Piece) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while self._is_due(piece):
            opens = piece in self._wanted.pieces
            try:
                async with self._room[opens]:
                    if self._is_due(piece) and opens == (piece in self._wanted.pieces):
                        if opens and piece.kind == "partition":
                            self._doubtful.add(piece)  # until it has succeeded, whatever it fails with
                        await self._change(piece, opens)
            except (HeldError, LockedError, ConflictError):
                await asyncio.sleep(jittered(HELD_SECONDS))
            except Exception as error:  # noqa: BLE001 - a disk, too, raises what it likes
                self.failures.add(piece, f"{piece} cannot be {'opened' if opens else 'released'}", error)
                self.on_progress()
                await asyncio.sleep(jittered(pause_seconds))
                pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)
            else:
                self.failures.pop(piece, None)
        self.failures.pop(piece, None)  # it may not be this node's to open any more

    async def _change(self, piece: Piece, opens: bool) -> None:
        await self._call(piece, opens)
        self._doubtful.discard(piece)
        if opens:
            self.held.add(piece)
        else:
            self.held.discard(piece)

    def _call(self, piece: Piece, opens: bool) -> Awaitable[None]:
        host, engines = self._host, self._engines
        if piece.kind == "slot":
            return host.acquire_slot(piece.number) if opens else host.release_slot(piece.number)
        if piece.kind == "partition":
            act = host.open_partition if opens else host.release_partition
            return act(piece.topic, piece.number)
        if engines is None:
            raise ConflictError(f"this node serves no engines, so it cannot serve {piece.topic.name}")
        return engines.open_engine(piece.topic.name) if opens else engines.release_engine(piece.topic.name)

    def lost(self, piece: Piece) -> None:
        """What was open here is not any more: it is opened again if it is still this node's to serve."""
        self.held.discard(piece)
        self._begin(piece)
        self.on_progress()

    def renew(self) -> None:
        """In a thread, before `drop_fenced`: what is held here is not opened by others from now on."""
        self._host.renew()

    async def drop_fenced(self) -> None:
        """Gives up what others have claimed while this node was away, and all slots: who has those now is not known."""
        fenced = {Piece("partition", topic, number) for topic, number in await self._host.fenced_partitions()}
        if self._engines is not None:
            fenced |= {engine_piece(name) for name in await self._engines.fenced_engines()}
        for piece in sorted(self.held & fenced):
            if piece.kind == "partition":
                self._doubtful.add(piece)  # until it has succeeded
            with contextlib.suppress(TidelogError, OSError):
                await self._change(piece, False)
            self.held.discard(piece)
            self._begin(piece)
        for piece in sorted(piece for piece in self.held if piece.kind == "slot"):
            await self._change(piece, False)
        for piece in self._wanted.pieces - self.held:
            self._begin(piece)

    async def rest(self, seconds: float, is_worth_it: Callable[[], bool]) -> bool:
        """Waits until nothing is left to be released; returns whether that was in time."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self.held:
            if asyncio.get_running_loop().time() >= deadline or not is_worth_it():
                return False
            await asyncio.sleep(HELD_SECONDS)
        return True

    async def stop(self) -> None:
        """Begins nothing any more. What is held stays as it is."""
        self._is_over = True
        for task in list(self._working.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, TidelogError):
                await task
