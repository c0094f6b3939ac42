"""Two nodes and one bucket: whatever they do, in whatever order, and whatever dies or is out of reach meanwhile.

The model is the ledger of `tests.crash.tier_promises`: what was acknowledged must be readable, or lie on the disk of
the node that was replaced, or have gone with a disk before it was shipped.

Leases are modelled too: `holder` is the node whose heartbeat keeps the others out, and since when it was not renewed.
Who opens the topic then, and does not mean to take it over, hears that and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.campaign import run_machine
from tests.crash.tier_promises import DIRECTORY, NAME, Ledger, check_life_goes_on, check_topic, open_node, tier_settings

from tidelog.clock import ManualClock
from tidelog.cold.lease import DEFAULT_LEASE_SECONDS
from tidelog.errors import ClosedError, FencedError, HeldError, StoreUnavailableError, TidelogError
from tidelog.log.directory import wal_files
from tidelog.testing import Crash, History, Policy, World
from tidelog.testing.crash import quiet_crashes
from tidelog.topics.directory import LogDirectory

nodes = st.sampled_from("ab")
policies = st.sampled_from(["lose", "keep", "tear", "reorder"])
LEASE_US = int(DEFAULT_LEASE_SECONDS * 1_000_000)
store_faults = st.sampled_from(["unavailable", "unanswered", "late"])


class Holder(NamedTuple):
    """A node that the owner document names, and when its heartbeat was renewed."""

    node: str
    renewed_us: int


class TwoNodes(RuleBasedStateMachine):
    """Each node has its disk; they share the store and the metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.history = History()
        self.ledger = Ledger(self.history)
        self.logs: dict[str, LogDirectory] = {}
        self.claimant: str | None = None
        self.idle_at: int | None = None
        self.is_sick = False
        self.holder: Holder | None = None
        self.knows_holder = True
        self.clock = ManualClock()
        self.world = World(clock=self.clock, part_bytes=150)
        self.settings = tier_settings()

    @initialize(multi_key=st.booleans(), zstd=st.booleans(), prunes=st.booleans())
    def begin(self, multi_key: bool, zstd: bool, prunes: bool) -> None:
        self.world = World(multi_key=multi_key, clock=self.clock, part_bytes=150)
        changes = {"local_retention_bytes": 1} if prunes else {}
        self.settings = tier_settings("zstd" if zstd else "none", **changes)

    # Opening and closing

    @rule(node=nodes, take_over=st.booleans())
    def open(self, node: str, take_over: bool) -> None:
        if node in self.logs:
            return
        if self._is_held_for(node) and not take_over and not self.is_sick:
            with open_node(self.world, node, self.settings, ends_leases=False) as log, pytest.raises(HeldError):
                log.topic(NAME)
            return
        before, self.claimant, self.idle_at = self.claimant, node, None
        with contextlib.ExitStack() as undo:
            try:
                log = self.ledger.open(self.world, node, self.settings, ends_leases=False)
                undo.callback(log.close)
                topic = log.topic(NAME, take_over=take_over)
            except HeldError:
                assert not take_over
                assert not self.knows_holder
                self.claimant = before
                return
            except TidelogError:
                assert self.is_sick
                self.knows_holder = False
                return
            undo.pop_all()
        self.logs[node] = log
        self.holder, self.knows_holder = Holder(node, self.clock.now_us()), not self.is_sick
        if not self._has_files(node):
            self.idle_at = topic.next_offset

    def _is_held_for(self, node: str) -> bool:
        """Whether another node is known to hold the topic."""
        if not self.knows_holder or self.holder is None or self.holder.node == node:
            return False
        return self.clock.now_us() - self.holder.renewed_us < LEASE_US

    @rule(seconds=st.sampled_from([1.0, 4.0, DEFAULT_LEASE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(node=nodes)
    def heartbeat(self, node: str) -> None:
        if node not in self.logs:
            return
        tier = self.logs[node]._tier
        assert tier is not None
        try:
            tier.lease.renew()
        except StoreUnavailableError:
            assert self.is_sick
            self.knows_holder = False
            return
        if self.holder is not None and self.holder.node == node:
            self.holder = Holder(node, self.clock.now_us())

    @rule(node=nodes)
    def close(self, node: str) -> None:
        log = self.logs.pop(node, None)
        if log is None:
            return
        is_idle = node == self.claimant and not self._has_files(node) and not self.is_sick
        is_idle = is_idle and log.topic(NAME).next_offset == self.idle_at
        log.close()
        self._let_go(node)
        if is_idle:
            self.ledger.gave_back(node)

    def _let_go(self, node: str) -> None:
        if self.holder is not None and self.holder.node == node:
            self.holder = None
        if self.is_sick:
            self.knows_holder = False

    def _has_files(self, node: str) -> bool:
        files = self.world.files(node)
        return files.is_directory(DIRECTORY) and bool(wal_files(files.list(DIRECTORY)))

    # Working

    @rule(node=nodes, count=st.integers(1, 4), size=st.sampled_from([5, 40, 500]), sync=st.booleans())
    def append(self, node: str, count: int, size: int, sync: bool) -> None:
        if node in self.logs:
            with contextlib.suppress(FencedError):
                self.ledger.append(self.logs[node].topic(NAME), node, count, size=size, sync=sync)

    @rule(node=nodes)
    def ship(self, node: str) -> None:
        with self._may_be_refused(node):
            self.ledger.ship(self.logs[node].topic(NAME), node)

    @rule(node=nodes)
    def prune(self, node: str) -> None:
        with self._may_be_refused(node):
            self.logs[node].topic(NAME).prune()

    @rule(node=nodes)
    def remove_orphans(self, node: str) -> None:
        with self._may_be_refused(node):
            topic = self.logs[node].topic(NAME)
            topic.remove_orphans(topic.plan_orphans())

    @rule(node=nodes)
    def seal(self, node: str) -> None:
        with self._may_be_refused(node):
            topic = self.logs[node].topic(NAME)
            next_offset = topic.next_offset
            topic.seal()
            self.ledger.sealed(node, next_offset)
            self._let_go(node)
            self.logs.pop(node).close()

    @contextlib.contextmanager
    def _may_be_refused(self, node: str) -> Iterator[None]:
        """By the store, or because another node has the topic: never for any other reason, and never else."""
        if node not in self.logs:
            with contextlib.suppress(KeyError):
                yield
            return
        try:
            yield
        except FencedError:
            assert self.claimant != node or self.is_sick
        except (StoreUnavailableError, ClosedError):
            assert self.is_sick

    @rule(node=nodes)
    def read(self, node: str) -> None:
        if node in self.logs and node == self.claimant and not self.is_sick:
            check_topic(self.world, self.logs[node].topic(NAME), self.ledger)

    # Dying and failing

    @rule(policy=policies, seed=st.integers(0, 1000))
    def crash(self, policy: Policy, seed: int) -> None:
        self._die()
        self.world = self.world.after_crash(policy, seed=seed)

    @rule(node=nodes)
    def lose_disk(self, node: str) -> None:
        self._die()
        self.world = self.world.lose_disk(node)
        self.ledger.lost_disk(node)

    def _die(self) -> None:
        self.world.crash()
        with quiet_crashes():
            for log in self.logs.values():
                with contextlib.suppress(Crash, TidelogError):
                    log.close()
        self.logs, self.claimant, self.is_sick = {}, None, False

    @rule(fault=store_faults, nth=st.integers(1, 4), in_store=st.booleans())
    def stumble(self, fault: str, nth: int, in_store: bool) -> None:
        """One request fails, was done unheard, or is done later."""
        self.is_sick, self.knows_holder = True, False
        if in_store:
            self.world.store.fail("publish", fault, nth=1)  # type: ignore[arg-type]
        else:
            self.world.metadata.fail("commit", fault, nth=nth)  # type: ignore[arg-type]

    @rule()
    def outage(self) -> None:
        self.is_sick, self.knows_holder = True, False
        self.world.store.fail("*", times=None)
        self.world.metadata.fail("*", times=None)

    @precondition(lambda self: self.is_sick)
    @rule()
    def heal(self) -> None:
        self._heal()

    def _heal(self) -> None:
        self.world.heal()
        self.world.store.land_late_writes()
        self.world.metadata.land_late_writes()
        self.is_sick = False

    def teardown(self) -> None:
        """At last everything is well: each node in turn finds what was promised, and goes on."""
        self._heal()
        for log in self.logs.values():
            log.close()
        self.clock.advance(DEFAULT_LEASE_SECONDS)  # of those that were killed
        for node in "aba":
            check_life_goes_on(self.world, self.history, self.settings, node)


@pytest.mark.deeper
def test_two_nodes_behave_like_the_model() -> None:
    """Whatever two nodes, their disks and their stores go through, what was promised is there at the end."""
    run_machine(TwoNodes, 25, steps=25)
