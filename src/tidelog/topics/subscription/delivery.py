"""The delivery state of a subscription: which consumer has which message. Pure: no threads, no files; the caller
supplies the time.

Delays are measured by a monotonic clock; the wall clock is used only for the times that messages carry.

    not read yet -> ready -> with a consumer -> settled
                      ^            |
                      '-- waiting <'  rejected (for a pause), timed out, or its consumer left (at once)

Invariants
- Every offset that was read and is not settled is in exactly one state: ready, with one consumer, waiting, blocked, or
  being written to the dead letters. An offset leaves only by being settled.
- An acknowledgement settles its message in any of these states, also when it arrives late.
- At most `max_unacked` messages are with consumers, waiting for redelivery or blocked. Prefetching stops before the
  position has more holes than can be stored.
- An event affects only its own message: a message that is given up, blocked or late changes no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from tidelog.clock import to_microseconds
from tidelog.errors import ConflictError, Hint
from tidelog.topics.subscription.options import DeliveryCounters, DeliveryOptions, Now, RateLimit, WaitingRoom
from tidelog.topics.subscription.queue import NO_LIMIT, Delivery, KeyQueues, OpenQueue, Progress

# The position is stored as one value of a metadata store; this many ranges fit, with any offsets.
MAX_HOLES = 16_384
READ_AHEAD = 1000
# One stuck consumer holds the messages of its keys; the others are read past them so far.
READ_AHEAD_KEYS = 10_000
_MAX_STORED_FAILURES = 1000
_MAX_TIMED_OUT = 10_000
# The wall clock may be set: messages that wait for it are checked this often.
_WALL_CLOCK_LOOK_US = 1_000_000


class ReadyQueue(Protocol):
    """What is ready, in the order in which it goes out; `OpenQueue` and `KeyQueues` say what each method means."""

    def __len__(self) -> int: ...
    def add(self, messages: Iterable[Delivery]) -> None: ...
    def put_back(self, message: Delivery) -> None: ...
    def discard(self, offset: int) -> None: ...
    def is_unseen(self, offset: int) -> bool: ...
    @property
    def unseen_from(self) -> int: ...
    def discard_below(self, offset: int) -> list[int]: ...
    def take(self, consumer: str, limit: int, below: int = NO_LIMIT) -> list[Delivery]: ...
    def take_fresh(self) -> Delivery | None: ...
    def set_consumers(self, consumers: Sequence[str]) -> None: ...
    def released(self, message: Delivery) -> None: ...
    def hold(self, message: Delivery) -> None: ...
    def unhold(self, message: Delivery) -> None: ...


class Holder:
    """A consumer, with the messages that it has not acknowledged."""

    __slots__ = ("due_us", "has_left", "name", "stale", "timed_out", "unacked")

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_left = False
        self.unacked: dict[int, Delivery] = {}
        # When each of them times out, oldest first; empty without a time-out.
        self.due_us: dict[int, int] = {}
        # What it had when the subscription was moved, until it gets that again: an acknowledgement of the message from
        # before is not one of the message to come.
        self.stale: set[int] = set()
        # What was taken from it by a time-out, oldest first: others may have settled it since.
        self.timed_out: dict[int, None] = {}

    def notes_timed_out(self, offset: int) -> None:
        self.timed_out[offset] = None
        if len(self.timed_out) > _MAX_TIMED_OUT:
            del self.timed_out[next(iter(self.timed_out))]


class DeliveryState:
    """The messages of one subscription. One thread at a time."""

    def __init__(self, options: DeliveryOptions, progress: Progress, failures: dict[int, int] | None = None) -> None:
        """`failures` are the delivery counts of messages that were rejected before."""
        self.options = options
        self.progress = progress
        self.read_offset = progress.floor
        self.counters = DeliveryCounters()
        self.holders: dict[str, Holder] = {}
        self.unacked_count = 0
        self.failures = dict(failures or {})
        self.reasons: dict[int, str] = {}
        """Why messages were rejected, as far as anybody said so: the newest reason of each that is among `failures`."""
        self.blocked: dict[int, Delivery] = {}
        self.dead: dict[int, Delivery] = {}
        self.dead_letter_offset = 0
        """Dead letters of this subscription below this offset of their topic are settled."""
        self._keyed = options.kind == "key_shared"
        self._queue: ReadyQueue = KeyQueues() if self._keyed else OpenQueue()
        self._waiting = WaitingRoom()
        self._delayed = WaitingRoom()
        self._rate = None if options.max_rate_per_second is None else RateLimit(options.max_rate_per_second)
        self._timeout_us = _microseconds(options.ack_timeout_seconds)
        self._check_timeouts_us: int | None = None
        self._live_us = _microseconds(options.time_to_live_seconds)
        limits = (self._rate, self._timeout_us, self._live_us)
        self._is_plain = options.kind in ("exclusive", "shared") and limits == (None, None, None)

    def move_to(self, offset: int) -> None:
        """Restarts at an offset: nothing at or above it is settled, and no consumer holds anything.

        Later acknowledgements of earlier deliveries do not count: a consumer that seeks back wants all of it again.
        """
        self.progress = Progress(offset)
        self.read_offset = offset
        self._queue = KeyQueues() if self._keyed else OpenQueue()
        self._waiting, self._delayed = WaitingRoom(), WaitingRoom()
        for place in (self.blocked, self.dead, self.failures, self.reasons):
            place.clear()
        for holder in self.holders.values():
            holder.stale = {one for one in (*holder.stale, *holder.unacked) if one >= offset}
            holder.unacked.clear()
            holder.due_us.clear()
        self.unacked_count = 0
        self._queue.set_consumers(list(self.holders))

    # Consumers

    def join(self, name: str) -> Holder:
        """A new consumer; ConflictError when it cannot be."""
        if name in self.holders:
            raise ConflictError(f"the consumer {name} already exists", hint="Give each consumer its own name")
        if self.holders and self.options.kind == "exclusive":
            raise ConflictError(
                f"the subscription is exclusive and in use by {next(iter(self.holders))}",
                hint=Hint(
                    'Close that one first, or use kind="failover", "shared" or "key_shared" for all of them',
                    command="Stop that one first, or use --kind failover, shared or key_shared for all of them",
                ),
            )
        holder = self.holders[name] = Holder(name)
        self._queue.set_consumers(list(self.holders))
        return holder

    def leave(self, holder: Holder) -> None:
        """What it has not acknowledged goes to the others, in order."""
        for offset in sorted(holder.unacked):
            message = self._release(holder, offset)
            self._queue.put_back(_next_delivery(message))
        self.holders.pop(holder.name, None)
        holder.has_left = True
        self._queue.set_consumers(list(self.holders))

    def is_active(self, holder: Holder) -> bool:
        """Whether it is this one's turn: with failover, only the one that has been there longest gets messages."""
        return self.options.kind != "failover" or next(iter(self.holders.values()), None) is holder

    # Reading

    def wants_more(self, holder: Holder) -> bool:
        """Whether reading on could bring something for this consumer, which found nothing ready."""
        if self._room <= 0 or not self.is_active(holder) or self._ends_below != NO_LIMIT:
            return False
        if self._has_many_holes:
            return False
        return len(self._queue) < (READ_AHEAD_KEYS if self._keyed else 1)

    @property
    def _has_many_holes(self) -> bool:
        return self.progress.range_count + len(self._delayed) >= MAX_HOLES

    def feed(self, messages: Sequence[Delivery], next_offset: int, now: Now) -> None:
        """What was read from `read_offset` up to `next_offset`; offsets that are not among it are passed over."""
        first, self.read_offset = self.read_offset, next_offset
        if len(messages) < next_offset - first:
            self._pass_over(first, messages, next_offset)
        if self.progress.end > first:
            messages = [message for message in messages if not self.progress.is_settled(message.offset)]
        if self.failures:
            messages = [self._with_count(message) for message in messages]
        self._queue.add(self._not_delayed(messages, now.wall_us))

    def _pass_over(self, first: int, messages: Sequence[Delivery], next_offset: int) -> None:
        reached = first
        for message in messages:
            self.progress.settle_range(reached, message.offset)
            reached = message.offset + 1
        self.progress.settle_range(reached, next_offset)
        for offset in [one for one in self.failures if self.progress.is_settled(one)]:
            self._forget_failure(offset)

    def _with_count(self, message: Delivery) -> Delivery:
        count = self.failures.get(message.offset)
        return message if count is None else msgspec.structs.replace(message, delivery_count=count + 1)

    def _not_delayed(self, messages: Sequence[Delivery], wall_us: int) -> Sequence[Delivery]:
        delayed = [(message, due_us) for message in messages if (due_us := _deliver_at_us(message)) > wall_us]
        if not delayed:
            return messages
        for message, due_us in delayed:
            self._delayed.add(message, due_us)
        late = {message.offset for message, _ in delayed}
        return [message for message in messages if message.offset not in late]

    # Handing out

    @property
    def _room(self) -> int:
        out = self.unacked_count + len(self._waiting) + len(self.blocked) + len(self.dead)
        return self.options.max_unacked - out

    @property
    def is_held_up(self) -> bool:
        """Whether an acknowledgement may unblock other messages although nothing is ready now."""
        return self._room <= 0 or bool(self.blocked) or self._has_many_holes

    @property
    def _ends_below(self) -> int:
        """A blocked message stops what must come after it."""
        return min(self.blocked) if self.blocked and self.options.is_ordered else NO_LIMIT

    def take(self, holder: Holder, limit: int, now: Now) -> list[Delivery]:
        """Up to `limit` messages for a consumer; they are its own until they are settled or returned."""
        self.tick(now)
        limit = min(limit, self._room)
        if self._rate is not None:
            limit = min(limit, self._rate.available(now.steady_us))
        if limit <= 0 or not len(self._queue) or not self.is_active(holder):
            return []
        taken = self._take_alive(holder, limit, now.wall_us)
        self._hand_out(holder, taken, now.steady_us)
        return taken

    def take_plain(self, holder: Holder) -> Delivery | None:
        """The next message on the short way, where only the order matters; None: `take` has to look closer."""
        # Waiting, blocked and dead messages are among the failures.
        if not self._is_plain or self.failures or self._delayed:
            return None
        if self.unacked_count >= self.options.max_unacked:
            return None
        message = self._queue.take_fresh()
        if message is not None:
            holder.unacked[message.offset] = message
            if holder.stale:
                holder.stale.discard(message.offset)
            self.unacked_count += 1
            self.counters.delivered += 1
        return message

    def _take_alive(self, holder: Holder, limit: int, wall_us: int) -> list[Delivery]:
        while taken := self._queue.take(holder.name, limit, self._ends_below):
            alive = taken if self._live_us is None else self._alive(taken, wall_us - self._live_us)
            if alive:
                return alive
        return []

    def _hand_out(self, holder: Holder, taken: list[Delivery], steady_us: int) -> None:
        for message in taken:
            holder.unacked[message.offset] = message
            self.counters.redelivered += message.delivery_count > 1
        if holder.stale:
            holder.stale.difference_update(message.offset for message in taken)
        self.unacked_count += len(taken)
        self.counters.delivered += len(taken)
        if self._rate is not None:
            self._rate.spend(len(taken))
        if self._timeout_us is not None and taken:
            due_us = steady_us + self._timeout_us
            holder.due_us.update((message.offset, due_us) for message in taken)
            self._check_timeouts_us = self._check_timeouts_us or due_us

    def _alive(self, taken: list[Delivery], oldest_us: int) -> list[Delivery]:
        alive = []
        for message in taken:
            if message.timestamp is None or _born_us(message) >= oldest_us:
                alive.append(message)
            else:
                self._queue.released(message)
                self._settle(message.offset)
                self.counters.expired += 1
        return alive

    # Settling

    def ack(self, holder: Holder, offset: int) -> bool:
        """Settles a message in any state; False if it was settled before."""
        message = holder.unacked.pop(offset, None)
        if message is None:
            return self._ack_late(holder, offset)
        self.unacked_count -= 1
        if self._timeout_us is not None:
            holder.due_us.pop(offset, None)
        if self._keyed:
            self._queue.released(message)
        if self.failures:
            self._forget_failure(offset)
        self.counters.acked += 1
        return self.progress.settle(offset)

    def _ack_late(self, holder: Holder, offset: int) -> bool:
        if self.progress.is_settled(offset) or offset in holder.stale:
            return False
        self._withdraw(offset)
        self._settle(offset)
        self.counters.acked += 1
        return True

    @property
    def unseen_from(self) -> int:
        """Nothing from this offset on was delivered. Only where one consumer gets everything in order."""
        return min(self.read_offset, self._queue.unseen_from)

    def ack_below(self, holder: Holder, offset: int) -> None:
        """Settles everything below an offset that was delivered. Only where one consumer gets everything in order.

        Delayed messages stay: the consumer that acknowledges does not know of them yet.
        """
        assert not self._keyed
        if offset - 1 in holder.stale:
            return
        before = self.progress.floor + self.progress.settled_above
        for one_holder in self.holders.values():
            for unacked in [one for one in one_holder.unacked if one < offset]:
                self._release(one_holder, unacked)
        for waiting in self._waiting.offsets_below(offset):
            self._waiting.remove(waiting)
        for place in (self.blocked, self.dead, self.failures, self.reasons):
            for found in [one for one in place if one < offset]:
                place.pop(found, None)
        unseen = sorted([*self._queue.discard_below(offset), *self._delayed.offsets_below(offset)])
        for start, stop in zip([self.progress.floor, *(one + 1 for one in unseen)], [*unseen, offset], strict=True):
            self.progress.settle_range(start, stop)
        self.counters.acked += self.progress.floor + self.progress.settled_above - before

    def _settle(self, offset: int) -> None:
        self._forget_failure(offset)
        self.progress.settle(offset)

    def _forget_failure(self, offset: int) -> None:
        self.failures.pop(offset, None)
        self.reasons.pop(offset, None)

    def _withdraw(self, offset: int) -> None:
        """Removes an open message from its queue."""
        for holder in self.holders.values():
            if offset in holder.unacked:
                self._release(holder, offset)
                return
        waiting = self._waiting.remove(offset) or self._delayed.remove(offset)
        blocked = self.blocked.pop(offset, None)
        kept = blocked if waiting is None else waiting.message
        if kept is not None:
            self._queue.unhold(kept)
        elif self.dead.pop(offset, None) is None and offset < self.read_offset:
            self._queue.discard(offset)

    def _release(self, holder: Holder, offset: int) -> Delivery:
        message = holder.unacked.pop(offset)
        holder.due_us.pop(offset, None)
        self.unacked_count -= 1
        self._queue.released(message)
        return message

    # Coming back

    def nack(
        self, holder: Holder, offset: int, delay_seconds: float | None, now: Now, reason: str | None = None
    ) -> bool:
        """Redelivers it after a pause; False if this consumer no longer has it."""
        if offset not in holder.unacked:
            return False
        message = self._release(holder, offset)
        if reason is not None:
            self.reasons[offset] = reason
        self.counters.nacked += 1
        pause_seconds = self._backoff_seconds(message.delivery_count) if delay_seconds is None else delay_seconds
        self._failed(message, now.steady_us, int(pause_seconds * 1_000_000))
        return True

    def _backoff_seconds(self, delivery_count: int) -> float:
        options = self.options
        # A power of two that is surely over any sensible maximum, and no overflow.
        doubled = options.redelivery_backoff_seconds * (1 << min(delivery_count - 1, 40))
        return min(doubled, max(options.redelivery_backoff_max_seconds, options.redelivery_backoff_seconds))

    def _failed(self, message: Delivery, steady_us: int, pause_us: int) -> None:
        self.failures[message.offset] = message.delivery_count
        limit = self.options.max_deliveries
        if limit is not None and message.delivery_count >= limit:
            self._exhausted(message)
        elif pause_us > 0:
            self._queue.hold(message)
            self._waiting.add(_next_delivery(message), steady_us + pause_us)
        else:
            self._queue.put_back(_next_delivery(message))

    def _exhausted(self, message: Delivery) -> None:
        if self.options.on_exhausted == "drop":
            self._settle(message.offset)
            self.counters.dropped += 1
        elif self.options.on_exhausted == "dead_letter":
            self.dead[message.offset] = message
        else:
            self._queue.hold(message)
            self.blocked[message.offset] = message

    def bury(self, offset: int) -> None:
        """A message is among the dead letters now."""
        if self.dead.pop(offset, None) is not None:
            self._settle(offset)
            self.counters.dead_lettered += 1

    # Time

    def tick(self, now: Now) -> None:
        """What is due by now becomes ready."""
        if self.failures:
            for waiting in self._waiting.take_due(now.steady_us):
                self._queue.unhold(waiting.message)
                self._queue.put_back(waiting.message)
        if self._delayed:
            for delayed in self._delayed.take_due(now.wall_us):
                self._queue.put_back(delayed.message)
        if self._check_timeouts_us is not None and self._check_timeouts_us <= now.steady_us:
            self._time_out(now.steady_us)

    def _time_out(self, steady_us: int) -> None:
        next_us = None
        for holder in self.holders.values():
            for offset, due_us in list(holder.due_us.items()):
                if due_us > steady_us:
                    next_us = due_us if next_us is None else min(next_us, due_us)
                    break
                self.counters.timed_out += 1
                holder.notes_timed_out(offset)
                self._failed(self._release(holder, offset), steady_us, 0)
        self._check_timeouts_us = next_us

    def next_due_us(self, now: Now) -> int | None:
        """When to look again by the monotonic clock if nothing else happens; None: never."""
        due = [self._waiting.next_due_us, self._check_timeouts_us]
        delayed_us = self._delayed.next_due_us
        if delayed_us is not None:
            due.append(now.steady_us + min(max(0, delayed_us - now.wall_us), _WALL_CLOCK_LOOK_US))
        if self._rate is not None and len(self._queue) and self._rate.available(now.steady_us) < 1:
            due.append(self._rate.next_us(now.steady_us))
        return min((one for one in due if one is not None), default=None)

    # How it stands

    @property
    def ready_count(self) -> int:
        return len(self._queue)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting) + len(self._delayed)

    def was_handed_out(self, offset: int) -> bool:
        """Whether anybody had this message since the subscription was opened here or moved, or it is settled."""
        if offset in self.failures or self.progress.is_settled(offset):
            return True
        return offset < self.read_offset and offset not in self._delayed and not self._queue.is_unseen(offset)

    def stored_failures(self) -> dict[int, int]:
        """The delivery counts worth keeping: those of the oldest messages that were rejected."""
        return {offset: self.failures[offset] for offset in sorted(self.failures)[:_MAX_STORED_FAILURES]}


def _next_delivery(message: Delivery) -> Delivery:
    return msgspec.structs.replace(message, delivery_count=message.delivery_count + 1)


def _deliver_at_us(message: Delivery) -> int:
    """0 when it may go at once."""
    return 0 if message.deliver_at is None else to_microseconds(message.deliver_at)


def _born_us(message: Delivery) -> int:
    """From when on its time to live counts: it could not be had before its time."""
    appended_us = 0 if message.timestamp is None else to_microseconds(message.timestamp)
    return max(appended_us, _deliver_at_us(message))


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1_000_000)
