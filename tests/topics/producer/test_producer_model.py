"""Producers against a model: two nodes, one bucket; appends, repetitions, restarts, moves and losses in any order."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.campaign import run_machine
from tests.crash.tier_promises import NAME, open_node, tier_settings

from tidelog.testing import World
from tidelog.topics.directory import LogDirectory
from tidelog.topics.producer.producer import Producer
from tidelog.topics.topic import Topic

NODES = st.sampled_from(["a", "b"])
NAMES = st.sampled_from(["p", "q"])
STEPS = st.integers(1, 3)


class Producers(RuleBasedStateMachine):
    """The model: all messages of the topic in order, as (name, sequence). Who appends retries until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.log: LogDirectory | None = None
        self.node = "a"
        self.open: dict[str, Producer] = {}
        self.stored: list[tuple[str, int]] = []
        self.tail_of: str | None = None  # the node that has one unshipped message more, and nobody has written since

    @initialize(node=NODES)
    def begin(self, node: str) -> None:
        self._open(node)

    def teardown(self) -> None:
        if self.log is not None:
            self.log.close()

    def _open(self, node: str) -> None:
        self.node, self.open = node, {}
        self.log = open_node(self.world, node, tier_settings())

    @property
    def topic(self) -> Topic:
        assert self.log is not None
        return self.log.topic(NAME, take_over=True)

    def _producer(self, name: str) -> Producer:
        if name not in self.open:
            self.open[name] = self.topic.producer(name)
        return self.open[name]

    def _last(self, name: str) -> int | None:
        return max((sequence for who, sequence in self.stored if who == name), default=None)

    @rule(name=NAMES, step=STEPS, count=STEPS, sync=st.booleans())
    def append(self, name: str, step: int, count: int, sync: bool) -> None:
        """New sequences, with a gap or without."""
        last = self._last(name)
        first = (-1 if last is None else last) + step
        offsets = self._producer(name).append_many([b"%d" % n for n in range(count)], sequence=first, sync=sync)
        assert offsets == list(range(len(self.stored), len(self.stored) + count))
        self.stored += [(name, first + number) for number in range(count)]
        self.tail_of = None

    @rule(name=NAMES, data=st.data())
    def append_again(self, name: str, data: Any) -> None:
        """A sequence that is stored, or was passed over."""
        last = self._last(name)
        if last is None:
            return
        sequence = data.draw(st.integers(0, last))
        offset = self._producer(name).append(b"again", sequence=sequence)
        expected = self.stored.index((name, sequence)) if (name, sequence) in self.stored else -1
        assert offset == expected

    @rule()
    def append_plainly(self) -> None:
        """Messages of nobody lie between."""
        self.topic.append(b"plain")
        self.stored.append(("", 0))
        self.tail_of = None

    @rule(name=NAMES)
    def replace(self, name: str) -> None:
        """A new producer of the name goes on."""
        self.open[name] = self.topic.producer(name)

    @rule()
    def ship(self) -> None:
        self.topic.ship()

    @rule()
    def restart(self) -> None:
        """Closed and opened on the same node."""
        assert self.log is not None
        self.log.close()
        self._open(self.node)

    @rule()
    def crash(self) -> None:
        """Killed, the disk as the system had it: what was flushed before is there."""
        self.topic.flush()
        self._die()
        self._open(self.node)

    @rule(node=NODES)
    def move(self, node: str) -> None:
        """Sealed here, opened there: a node whose tail nobody has replaced goes on with it."""
        assert self.log is not None
        self.topic.seal()
        self.log.close()
        self._open(node)
        if node == self.tail_of:
            self.stored.append(("", 0))
            self.tail_of = None

    @rule(node=NODES, loses_disk=st.booleans())
    def take_over(self, node: str, loses_disk: bool) -> None:
        """The owner is gone: what it had not shipped is not part of the topic where somebody else goes on."""
        shipped = self.topic.ship()
        self.topic.append(b"never shipped", sync=True)
        self.stored.append(("", 0))
        before = self.node
        self._die()
        if loses_disk:
            self.world = self.world.lose_disk(before)
        self._open(node)
        if loses_disk or node != before:
            del self.stored[shipped:]
        self.tail_of = None if loses_disk or node == before else before

    def _die(self) -> None:
        world, log = self.world, self.log
        world.crash()
        self.world = world.after_crash("keep")
        if log is not None:
            with contextlib.suppress(BaseException):  # it is dead, whatever it says
                log.close()

    @precondition(lambda self: self.log is not None)
    @invariant()
    def last_sequences_are_known(self) -> None:
        """What each producer says of itself is what is in the topic."""
        assert self.topic.next_offset == len(self.stored)
        for name, producer in self.open.items():
            assert producer.last_sequence == self._last(name)


@pytest.mark.deeper
def test_producers_behave_like_the_model() -> None:
    """Whatever producers repeat, lose and move, each sequence number is in the topic once, and in order."""
    run_machine(Producers, 30, steps=25)
