"""The delivery state of every kind of subscription against a simple model: random consumers, acks, nacks and time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.campaign import run_machine

from tidelog.clock import to_datetime
from tidelog.errors import ConflictError
from tidelog.topics.subscription.delivery import DeliveryState, Holder
from tidelog.topics.subscription.options import Now, parse_options
from tidelog.topics.subscription.queue import Delivery, Progress

KEYS = [None, b"a", b"b", b"c"]
DAY_US = 86_400_000_000


class DeliveryMachine(RuleBasedStateMachine):
    """What the model knows: the log, what is settled, and who has what."""

    kind = "shared"

    @initialize(
        max_unacked=st.sampled_from([1, 4, 12]),
        timeout=st.sampled_from([None, None, 5.0]),
        limit=st.sampled_from([None, None, 2, 4]),
        policy=st.sampled_from(["drop", "dead_letter", "block"]),
    )
    def begin(self, max_unacked: int, timeout: float | None, limit: int | None, policy: str) -> None:
        self.options = parse_options(
            {
                "kind": self.kind,
                "max_unacked": max_unacked,
                "ack_timeout_seconds": timeout,
                "max_deliveries": limit,
                **({} if limit is None else {"on_exhausted": policy}),
            }
        )
        self.state = DeliveryState(self.options, Progress(0))
        self.log: list[Delivery] = []
        self.now_us = DAY_US
        self.settled: set[int] = set()
        self.consumers: list[Holder] = []
        self.held: dict[int, Holder] = {}
        self.stale: set[tuple[str, int]] = set()
        self.names = 0
        self.counts: dict[int, int] = {}
        self.publish([(key, 0) for key in (*KEYS, *KEYS, *KEYS)])
        for _ in range(1 if self.kind == "exclusive" else 3):
            self.join()

    @rule(keys=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([0, 0, 0, 3])), min_size=1, max_size=6))
    def publish(self, keys: list[tuple[bytes | None, int]]) -> None:
        for key, delay in keys:
            due = to_datetime(self.now_us + delay * 1_000_000) if delay else None
            self.log.append(Delivery(b"", key=key, offset=len(self.log), deliver_at=due))

    @property
    def now(self) -> Now:
        """The steady clock began some other time."""
        return Now(self.now_us, self.now_us - DAY_US + 7)

    @precondition(lambda self: len(self.consumers) < 4)
    @rule()
    def join(self) -> None:
        self.names += 1
        if self.consumers and self.kind == "exclusive":
            with pytest.raises(ConflictError):
                self.state.join(f"c{self.names}")
        else:
            self.consumers.append(self.state.join(f"c{self.names}"))

    def leave(self, random: Random) -> None:
        holder = self.consumers.pop(random.randrange(len(self.consumers)))
        self.state.leave(holder)
        self.held = {offset: one for offset, one in self.held.items() if one is not holder}

    def join_one(self, random: Random) -> None:
        self.join()

    def receive(self, random: Random) -> None:
        self.take(random.choice(self.consumers), random.choice([1, 1, 3, 5]))

    @rule(seed=st.integers(0, 1 << 32))
    def traffic(self, seed: int) -> None:
        """A stretch of everyday work: much of it between two of the rarer events."""
        random = Random(seed)
        for _ in range(60):
            possible = [self.publish_some, self.rest, *([self.receive] * 8 if self.consumers else [])]
            possible += [self.ack, self.ack, self.nack, self.nack] if self.held else []
            possible += [self.ack_late] if self.consumers and self.counts else []
            possible += [self.ack_cumulative] if self.held and self.kind in ("exclusive", "failover") else []
            possible += [self.leave] if len(self.consumers) > 1 else [self.join_one]
            random.choice(possible)(random)
            self.agrees()

    def publish_some(self, random: Random) -> None:
        self.publish([(random.choice(KEYS), random.choice([0, 0, 0, 3])) for _ in range(5)])

    def rest(self, random: Random) -> None:
        self.wait(random.choice([0.5, 1.5]))

    def take(self, holder: Holder, limit: int) -> list[Delivery]:
        self.time_passed()
        plain = self.state.take_plain(holder) if limit == 1 else None
        taken = [plain] if plain is not None else self.state.take(holder, limit, self.now)
        if not taken and self.state.wants_more(holder) and self.state.read_offset < len(self.log):
            stop = min(len(self.log), self.state.read_offset + 4)
            self.state.feed(self.log[self.state.read_offset : stop], stop, self.now)
            taken = self.state.take(holder, limit, self.now)
        assert len(taken) <= limit
        for message in taken:
            self.check(holder, message)
            self.held[message.offset] = holder
            self.stale.discard((holder.name, message.offset))
            self.counts[message.offset] = self.counts.get(message.offset, 0) + 1
            assert message.delivery_count == self.counts[message.offset]
        return taken

    def check(self, holder: Holder, message: Delivery) -> None:
        assert message.offset not in self.settled, "what is acknowledged does not come again"
        assert message.offset not in self.held, "one consumer at a time has it"
        assert message.deliver_at is None or message.deliver_at <= to_datetime(self.now_us)
        if self.kind in ("exclusive", "failover"):
            assert holder is self.consumers[0]
        if self.kind == "key_shared" and message.key is not None:
            earlier = [one for one in self.log[: message.offset] if one.key == message.key]
            open_ones = [one for one in earlier if one.offset not in self.settled and one.deliver_at is None]
            # One that was given up never comes again: nobody waits for it to be written to the dead letters.
            coming = [one for one in open_ones if one.offset not in self.state.dead]
            assert all(self.held.get(one.offset) is holder for one in coming), "order of a key"

    def time_passed(self) -> None:
        """What timed out is no longer with its consumer; the state says so when it is asked."""
        self.state.tick(self.now)
        self.look()

    def look(self) -> None:
        self.held = {offset: one for offset, one in self.held.items() if offset in one.unacked}
        if self.options.on_exhausted == "drop":
            self.settled |= self.settled_in_state

    @property
    def settled_in_state(self) -> set[int]:
        progress = self.state.progress
        return set(range(progress.floor)).union(*(range(start, stop) for start, stop in progress.ranges))

    def ack(self, random: Random) -> None:
        offset = random.choice(sorted(self.held))
        assert self.state.ack(self.held.pop(offset), offset)
        self.settled.add(offset)

    def ack_late(self, random: Random) -> None:
        """An acknowledgement counts wherever the message is by now, unless it came before a seek and not since."""
        consumer = random.choice(self.consumers)
        stale = {offset for name, offset in self.stale if name == consumer.name}
        offset = random.choice(sorted(stale | set(self.counts)))
        self.state.ack(consumer, offset)
        if offset not in stale:
            self.held.pop(offset, None)
            self.settled.add(offset)

    def ack_cumulative(self, random: Random) -> None:
        offset = random.choice(sorted(self.held))
        self.state.ack_below(self.held[offset], offset + 1)
        unseen = {one.offset for one in self.log if one.deliver_at is not None and one.offset not in self.counts}
        self.settled |= set(range(offset + 1)) - unseen
        self.held = {one: holder for one, holder in self.held.items() if one > offset}

    def nack(self, random: Random) -> None:
        offset = random.choice(sorted(self.held))
        assert self.state.nack(self.held.pop(offset), offset, random.choice([0.0, 0.0, 1.0, None]), self.now)
        self.look()

    @rule(seconds=st.sampled_from([0.5, 1.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_us += int(seconds * 1_000_000)
        self.time_passed()

    @rule()
    def bury(self) -> None:
        """The dead letters are written."""
        for offset in list(self.state.dead):
            self.state.bury(offset)
            self.settled.add(offset)

    @rule(dice=st.integers(1, 6))
    def restart(self, dice: int) -> None:
        """The position is stored, everybody leaves, and somebody else goes on from there."""
        if dice < 6:
            return
        progress, failures = self.state.progress, self.state.stored_failures()
        self.state = DeliveryState(self.options, Progress(progress.floor, progress.ranges), failures)
        self.consumers, self.held, self.stale, self.counts = [], {}, set(), failures

    @rule(data=st.data(), dice=st.integers(1, 6))
    def seek(self, data: st.DataObject, dice: int) -> None:
        if dice < 6:
            return
        offset = data.draw(st.integers(0, len(self.log)))
        self.state.move_to(offset)
        stale = self.stale | {(holder.name, one) for one, holder in self.held.items()}
        self.stale = {(name, one) for name, one in stale if one >= offset}
        self.settled, self.held, self.counts = set(range(offset)), {}, {}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "state"):
            return
        assert self.settled_in_state == self.settled
        seen = {one.offset for one in self.log if self.state.was_handed_out(one.offset)}
        assert seen == self.settled | set(self.counts), "the state knows what was handed out"
        assert self.state.unacked_count == len(self.held) <= self.options.max_unacked

    def teardown(self) -> None:
        """Nothing is lost: consumers that keep asking get everything that is open."""
        if not hasattr(self, "state"):
            return
        if not self.consumers:
            self.join()
        for offset in list(self.state.blocked):
            self.ack_offset(offset)
        for _ in range(4 * len(self.log) + 4):
            if self.settled == set(range(len(self.log))):
                break
            self.bury()
            for offset, holder in list(self.held.items()):
                self.state.ack(holder, offset)
                self.settled.add(offset)
            self.held = {}
            self.now_us += 200_000_000
            for holder in self.consumers:
                self.take(holder, 5)
        assert self.settled == set(range(len(self.log)))

    def ack_offset(self, offset: int) -> None:
        self.state.ack(self.consumers[0], offset)
        self.settled.add(offset)


@pytest.mark.deeper
@pytest.mark.parametrize("kind", ["exclusive", "failover", "shared", "key_shared"])
def test_a_subscription_behaves_like_the_model(kind: str) -> None:
    """Nothing open is lost, nothing settled comes again, the order of a key holds, whatever consumers do."""
    machine: Any = type(f"Delivery_{kind}", (DeliveryMachine,), {"kind": kind})
    run_machine(machine, 40, steps=12)
