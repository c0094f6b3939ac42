"""A node's part in a cluster, running: it follows the documents, keeps its lease, and leads if it is elected.

    watch (a thread) ──> state ──> placement (the service asks it), agent (opens and releases)
    heartbeat (a thread)           leader (a task): loads ──> plan ──> documents
                                     ↑ watched (a thread) while this node leads

Invariants
- The state belongs to the event loop. The watch hands changes over; the leader plans on a copy, in a thread.
- The heartbeat has a thread of its own: no plan, upload or opening keeps it from being in time.
- A store that does not answer changes nothing here, until the lease has run out: then nothing is ours (`is_alive`).
- No error ends a loop here: each step is one of `Failures`. A leader that planned no more would keep its lease.
- Stopping hands over what the node has, as long as others are there to take it, and then leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from tidelog.clock import Clock
from tidelog.cluster.agent import Agent, EngineHost, Host
from tidelog.cluster.documents import ClusterState
from tidelog.cluster.failures import Failures
from tidelog.cluster.leader import LeaderRounds, Reports, TopicSeen
from tidelog.cluster.member import Member
from tidelog.cluster.placement import ClusterPlacement
from tidelog.errors import ConflictError, HeldError, LeaseLostError, StoreUnavailableError, TidelogError
from tidelog.service.cluster_control import NodeLoad, NodeTail
from tidelog.store.metadata.base import Entry, MetadataStore
from tidelog.store.metadata.watch import Changes
from tidelog.store.scheduler import NEVER, Background, Task, in_store_thread
from tidelog.topics.names import TopicName

_logger = logging.getLogger("tidelog.cluster")
_WATCH_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_ROUND_SECONDS = 1.0
"""A leader plans this often, and at once when a document has changed."""
_REPORT_SECONDS = 5.0
_PROGRESS_SECONDS = 0.2
"""A change of what is being opened is reported after this."""
_ADOPT_SECONDS = (0.0, 30.0, 600.0)
"""When a leader looks for topics that the cluster does not know, the last of them again and again: it costs a request a
topic."""
_TRIM_SECONDS = 60.0
_DELETION_SECONDS = 120.0
"""Longer than the node that deletes a topic waits for its owners."""
_HAND_OVER_SECONDS = 30.0
Result = TypeVar("Result")


class _LoadWatch:
    """Follows what the nodes report, in a thread of its own. Only a leader does: a thousand nodes that follow the loads
    of each other would be a million events."""

    def __init__(self, metadata: MetadataStore, prefix: str, failures: Failures[str]) -> None:
        self._failures = failures
        self._watch = metadata.watch(prefix)
        self._guard = threading.Lock()
        self._reports = Reports()
        self._is_known = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="tidelog-cluster-loads", daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        while not self._watch.is_closed:
            with self._failures.step("loads", "the loads of the nodes are not followed", logging.INFO) as step:
                changes = self._watch.next(_WATCH_SECONDS)
                if changes is not None:
                    with self._guard:
                        self._reports.apply(changes)
                    self._is_known.set()
            time.sleep(step.pause_seconds)
        self._watch.end()
        self._failures.pop("loads", None)

    def loads(self) -> dict[str, NodeLoad]:
        """In a thread: what they have reported last."""
        if not self._is_known.wait(_WATCH_SECONDS):
            raise StoreUnavailableError("the loads of the nodes cannot be read")
        with self._guard:
            return dict(self._reports.loads)

    def close(self) -> None:
        self._watch.close()


class Cluster:
    """One node's membership. `load` first, then `join`, when the node listens; `stop` before it stops listening."""

    def __init__(self, metadata: MetadataStore, clock: Clock, member: Member) -> None:
        self._metadata = metadata
        self._clock = clock
        self.member = member
        self.state = ClusterState(member.keys)
        self.placement = ClusterPlacement(metadata, clock, self.state, member)
        self.agent: Agent | None = None
        self.failures = Failures[str]()
        """What fails in the loops of this node; `Agent.failures` has what cannot be opened or released."""
        self.measure: Callable[[], tuple[NodeLoad, NodeTail]] | None = None
        """Called in a thread: what this node has to do."""
        self.known_topics: Callable[[], Mapping[TopicName, TopicSeen]] | None = None
        """Called in a thread: the topics of the catalog."""
        self.remove_topic: Callable[[TopicName], Awaitable[None]] | None = None
        """Deletes what is stored of a topic that nobody has open."""
        self.rounds = LeaderRounds(metadata, member.keys, clock, member.name)
        self._watch = metadata.watch(member.keys.prefix)
        self._watching = threading.Thread(target=self._follow, name="tidelog-cluster-watch", daemon=True)
        self._loads: _LoadWatch | None = None
        self._is_empty = False
        self._heartbeat = Background(2, "tidelog-cluster-lease")
        self._holding: Task | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._loaded = asyncio.Event()
        self.deletion_seconds = _DELETION_SECONDS
        self._is_over = False
        self._deleting: dict[TopicName, float] = {}
        self._finishing: dict[TopicName, asyncio.Task[None]] = {}
        self._adopted = 0
        self._adopted_at = self._trimmed_at = float("-inf")

    # Beginning

    async def load(self) -> None:
        """Learns who the node is, and reads all documents: from here on the placement answers."""
        self._loop = asyncio.get_running_loop()
        await in_store_thread(self.member.prepare)
        self._watching.start()
        await self._loaded.wait()

    async def join(self, host: Host, engines: EngineHost | None = None) -> None:
        """Becomes a member; what is assigned to it is opened from here on."""
        self.agent = Agent(self.member.name, host, engines)
        self.agent.on_progress = self._progress.set
        await self._join()
        self._holding = self._heartbeat.add(self._hold, NEVER)
        self._heartbeat.add(self._beat, self.member.beat_seconds)
        self.agent.follow(self.state, list(self.state.versions))
        self._tasks = [asyncio.ensure_future(self._lead()), asyncio.ensure_future(self._report())]

    async def _join(self) -> None:
        """The name may be that of a node whose lease has not run out."""
        deadline = self._clock.monotonic() + self.member.lease_seconds + 2
        while True:
            try:
                return await in_store_thread(self.member.join)
            except HeldError:
                if self._clock.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    def _beat(self) -> float:
        begin, was_late = self._clock.monotonic(), "lease" in self.failures
        with self.failures.step("lease", f"the lease of {self.member.name} is not renewed") as step:
            try:
                self.member.beat()
            except LeaseLostError:
                self._rejoin()
        if step.has_failed:
            return min(_RETRY_SECONDS, self.member.beat_seconds)
        if was_late:
            _logger.warning("the lease of %s is renewed again", self.member.name)
        if self._holding is not None:
            self._holding.wake()
        return max(0.0, self.member.beat_seconds - (self._clock.monotonic() - begin))

    def _hold(self) -> float:
        """The log directory's sign of life is given after each of the node: so both end together, and who gets the
        partitions of a node that died need not wait for another lease. Apart, so that it delays no heartbeat."""
        assert self.agent is not None
        with self.failures.step("sign of life", "the log directory gives no sign of life", logging.INFO) as step:
            self.agent.renew()
        return min(_RETRY_SECONDS, self.member.beat_seconds) if step.has_failed else NEVER

    def _rejoin(self) -> None:
        """What others have claimed meanwhile is given up first: the documents may give it back at any time, and then
        nothing would tell that what is open here is not it any more."""
        assert self._loop is not None and self.agent is not None
        self.agent.renew()
        dropping = asyncio.run_coroutine_threadsafe(self.agent.drop_fenced(), self._loop)
        try:
            dropping.result(self.member.lease_seconds)
        except TimeoutError as error:
            raise StoreUnavailableError("what others have claimed is not given up yet") from error
        self.member.join()
        self._in_loop(self._wake.set)

    # Following

    def _follow(self) -> None:
        """In a thread: passes on what has changed."""
        while not self._is_over:
            with self.failures.step("documents", "the documents are not followed", logging.INFO) as step:
                changes = self._watch.next(_WATCH_SECONDS)
                if changes is not None:
                    self._in_loop(lambda changes=changes: self._take(changes))  # type: ignore[misc]
            time.sleep(step.pause_seconds)
        self._watch.end()

    def _in_loop(self, work: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(work)

    def _take(self, changes: Changes) -> None:
        changed = self.state.apply(changes)
        self._loaded.set()
        self._changed(changed)

    def _wrote(self, entries: list[Entry]) -> None:
        self.state.written(entries)
        self._changed({entry.key for entry in entries})

    def _changed(self, changed: set[str]) -> None:
        if not changed:
            return
        if self.member.keys.leader in changed:
            self.member.seen_leader(self.state.leader, self.state.versions.get(self.member.keys.leader))
        self.placement.follow(changed)
        if self.agent is not None:
            self.agent.follow(self.state, changed)
        self._wake.set()

    # Leading

    @property
    def leads(self) -> bool:
        return self.member.leads_by is not None

    async def _lead(self) -> None:
        while not self._is_over:  # a cancelled `wait_for` may return as if nothing had happened
            with self.failures.step("lead", "the cluster is not led") as step:
                try:
                    await self._campaign_or_round()
                except ConflictError:
                    _logger.info("the documents of the cluster were changed meanwhile")
                except TidelogError:
                    raise
                except Exception:
                    self.rounds.forget()  # what it has counted may be half of it
                    raise
            await asyncio.sleep(step.pause_seconds)
            await self._pause()

    async def _campaign_or_round(self) -> None:
        if self.state.leader is None:
            await self._campaign()
        if self.member.is_alive:
            await self._round()

    async def _round(self) -> None:
        leads_by = self.member.leads_by
        if leads_by is None:
            self.rounds.forget()
            self._adopted = 0
            self._close_loads()
            return
        now = self._clock.monotonic()
        if now - self._adopted_at >= _ADOPT_SECONDS[min(self._adopted, len(_ADOPT_SECONDS) - 1)]:
            self._adopted_at = now
            self._adopted += 1
            await self._adopt()
        if self._loads is None:
            self._loads = _LoadWatch(self._metadata, self.member.keys.loads_prefix, self.failures)
        loads = await in_store_thread(self._loads.loads)
        self._wrote(await in_store_thread(self.rounds.round, self.state.copy(), loads, leads_by))
        self._finish_deletions(now)
        if now - self._trimmed_at >= _TRIM_SECONDS:
            self._trimmed_at = now
            await in_store_thread(self.rounds.trim)

    def _close_loads(self) -> None:
        if self._loads is not None:
            self._loads.close()
            self._loads = None

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), _RETRY_SECONDS if self.rounds.is_gathering else _ROUND_SECONDS)
        self._wake.clear()

    async def _campaign(self) -> None:
        entry = await in_store_thread(self.member.campaign)
        if entry is not None:
            _logger.info("%s leads the cluster", self.member.name)
            self._wrote([entry])

    async def _adopt(self) -> None:
        leads_by = self.member.leads_by
        if self.known_topics is None or leads_by is None:
            return
        seen = await in_store_thread(self.known_topics)
        state = self.state.copy()
        written = await in_store_thread(self.rounds.adopt, state, seen, leads_by, lambda: uuid.uuid4().hex)
        self._wrote(written)

    def _finish_deletions(self, now: float) -> None:
        """A node that was deleting a topic may have died on the way: after a while the leader goes on with it."""
        going = {name for name, placement in self.state.topics.items() if placement.is_deleting}
        self._deleting = {name: self._deleting.get(name, now) for name in going}
        for name, since in self._deleting.items():
            if now - since >= self.deletion_seconds and name not in self._finishing:
                self._finishing[name] = asyncio.ensure_future(self._finish_deletion(name))

    async def _finish_deletion(self, name: TopicName) -> None:
        remove = self.remove_topic
        try:
            with Failures[str]().step("", f"the deletion of {name} is not finished") as step:
                if remove is not None:
                    _logger.warning("the deletion of %s did not end, and is finished", name)
                    await self.placement.delete(name, lambda: remove(name))
            if step.has_failed:
                self._deleting.pop(name, None)
        finally:
            del self._finishing[name]

    # Reporting

    async def _report(self) -> None:
        while not self._is_over:
            self._progress.clear()
            if self.measure is not None:
                with self.failures.step("load", f"the load of {self.member.name} is not reported", logging.INFO):
                    await in_store_thread(self.member.report, *await in_store_thread(self.measure))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), _REPORT_SECONDS)
                await asyncio.sleep(_PROGRESS_SECONDS)

    # Ending

    async def stop(self) -> None:
        """Hands over what the node has, if there is another node for it, and leaves."""
        agent = self.agent
        if agent is not None and self.member.is_alive and self._has_others():
            try:
                await in_store_thread(self.member.begin_to_leave)
                if not await agent.rest(_HAND_OVER_SECONDS, self._has_others) and self._has_others():
                    _logger.warning("%s leaves with %d pieces not handed over", self.member.name, len(agent.held))
            except TidelogError as error:
                _logger.warning("%s leaves without handing over: %s", self.member.name, error)
            self._is_empty = not agent.held
        self._is_over = True
        self._watch.close()
        self._close_loads()
        tasks = [*self._tasks, *self._finishing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if agent is not None:
            await agent.stop()

    async def leave(self) -> None:
        """After everything is closed: others see this node gone at once."""
        await asyncio.to_thread(self._heartbeat.close)
        await in_store_thread(lambda: self.member.leave(is_empty=self._is_empty))

    def _has_others(self) -> bool:
        """Whether another node could take what this one has."""
        return any(self.state.is_usable(name) for name in self.state.nodes if name != self.member.name)
