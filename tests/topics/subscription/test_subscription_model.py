"""One topic with subscriptions of all kinds, restarted, killed and moved between nodes, against a simple model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.campaign import run_machine

import tidelog
from tidelog.errors import ClosedError
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.options import Kind
from tidelog.topics.subscription.queue import Delivery

NAME = "shop/orders"
# Each run opens and closes nodes; shrinking a failure to the last step would take longer than finding it by hand.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
KINDS: list[Kind] = ["exclusive", "failover", "shared", "key_shared"]
KEYS = [None, b"a", b"b", b"c"]


class SubscriptionMachine(RuleBasedStateMachine):
    """The model: what each subscription has acknowledged, and what of that is surely stored."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="tidelog-subscriptions-"))
        self.node = 0
        self.count = 0
        self.acked: dict[str, set[int]] = {kind: set() for kind in KINDS}
        self.may_return: dict[str, set[int]] = {kind: set() for kind in KINDS}
        self.forgotten: dict[str, set[int]] = {kind: set() for kind in KINDS}
        self.keys: list[bytes | None] = []
        self.open()
        self.publish([None, b"a", b"b", b"a", b"c", b"b"])

    def open(self) -> None:
        store, metadata = f"file://{self.root}/store", f"sqlite://{self.root}/metadata.db"
        self.log: LogDirectory = tidelog.open(self.root / f"node-{self.node}", store=store, metadata=metadata)
        self.topic = self.log.topic(NAME)
        self.consumers: dict[str, list[Consumer]] = {kind: [] for kind in KINDS}
        self.held: dict[str, dict[int, Consumer]] = {kind: {} for kind in KINDS}
        for kind in KINDS:
            self.join(kind)

    def join(self, kind: Kind) -> None:
        if kind != "exclusive" or not self.consumers[kind]:
            consumer = self.topic.subscribe(kind, kind, redelivery_backoff_seconds=0.0)
            self.consumers[kind].append(consumer)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8))
    def publish(self, keys: list[bytes | None]) -> None:
        self.topic.append_many([tidelog.Message(b"", key=key) for key in keys], sync=True)
        self.keys += keys
        self.count += len(keys)

    @rule(seed=st.integers(0, 1 << 32))
    def work(self, seed: int) -> None:
        random = Random(seed)
        for _ in range(20):
            kind = random.choice(KINDS)
            action = random.choice(
                [self.receive, self.receive, self.receive, self.settle, self.settle, self.come_or_go]
            )
            action(kind, random)

    def receive(self, kind: Kind, random: Random) -> None:
        consumer = random.choice(self.consumers[kind])
        for message in consumer.receive_many(random.choice([1, 3]), timeout=0):
            self.check(kind, consumer, message)
            self.held[kind][message.offset] = consumer

    def check(self, kind: Kind, consumer: Consumer, message: Delivery) -> None:
        assert message.key == self.keys[message.offset]
        assert message.offset not in self.held[kind]
        assert message.offset not in self.acked[kind] - self.may_return[kind], "acknowledged, stored, and here again"
        self.acked[kind].discard(message.offset)
        self.forgotten[kind].discard(message.offset)
        if kind == "key_shared" and message.key is not None:
            earlier = [one for one in range(message.offset) if self.keys[one] == message.key]
            still_open = [one for one in earlier if one not in self.acked[kind]]
            assert all(self.held[kind].get(one) is consumer for one in still_open), "order of a key"

    def settle(self, kind: Kind, random: Random) -> None:
        if not self.held[kind]:
            return
        offset = random.choice(sorted(self.held[kind]))
        consumer = self.held[kind].pop(offset)
        if random.random() < 0.7:
            consumer.ack(offset)
            self.acked[kind].add(offset)
            self.may_return[kind].add(offset)
        else:
            consumer.nack(offset)

    def come_or_go(self, kind: Kind, random: Random) -> None:
        consumers = self.consumers[kind]
        if len(consumers) < 3 and random.random() < 0.5:
            self.join(kind)
        elif len(consumers) > 1:
            leaving = consumers.pop(random.randrange(len(consumers)))
            leaving.close()
            self.held[kind] = {offset: one for offset, one in self.held[kind].items() if one is not leaving}

    def stored(self) -> None:
        """Everything acknowledged so far is stored, but for what a crash made the subscription forget."""
        self.may_return = {kind: set(self.forgotten[kind]) for kind in KINDS}

    @rule()
    def restart(self) -> None:
        self.log.close()
        self.stored()
        self.open()

    @rule()
    def crash(self) -> None:
        """Nothing more is stored; what was acknowledged since may come again, and nothing is lost."""
        for consumers in self.consumers.values():
            consumers[0]._subscription.stop(lambda: ClosedError("killed"))
        self.forgotten = {kind: set(self.may_return[kind]) for kind in KINDS}
        self.log.close()
        self.open()

    @rule()
    def move(self) -> None:
        """The topic is sealed, and goes on at another node."""
        self.topic.seal()
        self.log.close()
        self.stored()
        self.node += 1
        self.open()

    def teardown(self) -> None:
        """Consumers that keep asking get everything that is open."""
        if not hasattr(self, "root"):
            return
        for kind in KINDS:
            for offset, consumer in self.held[kind].items():
                consumer.ack(offset)
                self.acked[kind].add(offset)
            self.held[kind] = {}
            quiet = 0
            while quiet < 2:
                quiet += 1
                for consumer in self.consumers[kind]:
                    for message in consumer.receive_many(100, timeout=0):
                        self.check(kind, consumer, message)
                        consumer.ack(message)
                        self.acked[kind].add(message.offset)
                        quiet = 0
            assert self.acked[kind] == set(range(self.count))
            assert self.topic.subscription_info(kind).lag_messages == 0
        self.log.close()
        shutil.rmtree(self.root)


@pytest.mark.deeper
def test_subscriptions_survive_restarts_crashes_and_moves() -> None:
    """Nothing open is lost, order per key holds, and what was acknowledged before a clean close does not return."""
    run_machine(SubscriptionMachine, 12, steps=10, phases=PHASES)
