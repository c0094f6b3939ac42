"""An open subscription: adds threads, tasks, reading and persistence to the state machine of `delivery.py`.

Invariants
- One lock guards the state. It is held briefly: never during a read, a write, a store request or a wait.
- One thread or task at a time reads for all consumers, and only when a consumer wants a message that is not ready.
- A position is stored before the first message is delivered, and later as described in `cursors.py`.
- Once the topic has another owner, or is closed, nothing is delivered and nothing can be acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import NamedTuple

import msgspec

from tidelog.errors import ClosedError, FencedError, Hint, InputError, RetryError, TidelogError
from tidelog.log import Log
from tidelog.log.append_queue import Bell, ThreadWaiter, Waiter, finish_all, task_waiter
from tidelog.store.scheduler import Background, Task, in_store_thread
from tidelog.topics.live_log import LiveLog
from tidelog.topics.message import Message
from tidelog.topics.subscription.cursors import StoredPosition
from tidelog.topics.subscription.dead_letters import DeadLetters
from tidelog.topics.subscription.delivery import MAX_HOLES, DeliveryState, Holder
from tidelog.topics.subscription.feed import Fed, Feed, Source
from tidelog.topics.subscription.options import Now, SubscriptionStatistics
from tidelog.topics.subscription.queue import Delivery

# The threads and tasks that wait for a message of a subscription. Every method is called under the subscription's lock.
#
# Invariants
# - A waiter is completed exactly once: by the log if it was the lookout and messages arrived, else by this class.
# - At most one waiter, the lookout, listens to the log: an append wakes one waiter, which reads a batch and wakes the
#   others.


class Waiters:
    """The waiters, in order of arrival."""

    def __init__(self, log: Log | LiveLog) -> None:
        self._log = log
        self._waiting: list[Waiter] = []
        self.is_empty = True
        self._lookout: Waiter | None = None
        self.alarm_us: int | None = None
        """When the one who came last looks again by itself."""

    @property
    def has_lookout(self) -> bool:
        """A waiter whose event loop was closed is never woken: the next one is woken in its place."""
        if self._lookout is not None and _is_lost(self._lookout):
            self.remove(self._lookout)
        return self._lookout is not None

    def add(self, waiter: Waiter, due_us: int | None) -> None:
        """A consumer begins to wait."""
        self._waiting.append(waiter)
        self.is_empty = False
        self.alarm_us = due_us

    def look_out(self, waiter: Waiter, offset: int) -> bool:
        """This one is woken by news at an offset. False: there is some already, or nothing will ever come."""
        if not self._log.listen(waiter, offset):
            self._waiting.remove(waiter)
            self.is_empty = not self._waiting
            return False
        self._lookout = waiter
        return True

    def remove(self, waiter: Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self.is_empty = not self._waiting
        if self._lookout is waiter:
            self._lookout = None
            self._log.stop_listening(waiter)
        self.alarm_us = None

    def wake(self, count: int | None = None) -> None:
        if count is not None:
            self._waiting = [waiter for waiter in self._waiting if not _is_lost(waiter)]
        woken = self._waiting[:count]
        del self._waiting[: len(woken)]
        self.is_empty = not self._waiting
        lookout = self._lookout
        if lookout is not None and lookout in woken:
            self._lookout = None
            if not self._log.stop_listening(lookout):
                woken.remove(lookout)  # the log has woken it
        finish_all(woken)


def _is_lost(waiter: Waiter) -> bool:
    return isinstance(waiter, asyncio.Future) and waiter.get_loop().is_closed()


_logger = logging.getLogger("tidelog.topics")
# Acknowledgements come by the hundred thousand a second; a metadata store is asked this seldom all the same.
_STORE_PAUSE_SECONDS = 0.25
_RETRY_SECONDS = 0.5
# Without waiting, existing messages are still returned; that may take a few reads, or very many with a filter.
_GRACE_SECONDS = 0.1
_HOUR_SECONDS = 3600.0


class _Step(NamedTuple):
    """What a consumer that asks does next: it has messages, reads on, or waits."""

    taken: Sequence[Delivery] = ()
    must_read: bool = False
    waiter: Waiter | None = None
    seconds: float | None = None


class Subscription:
    """The consumers of one name share it. `topics/subscription/consumer.py` is what they see of it."""

    def __init__(
        self,
        name: str,
        state: DeliveryState,
        source: Source,
        feed: Feed,
        position: StoredPosition,
        now: Callable[[], Now],
        background: Background,
        dead_letters: DeadLetters | None,
    ) -> None:
        self.name = name
        self.state = state
        self.source = source
        self.position = position
        self._now = now
        self._feed = feed
        self._dead_letters = dead_letters
        self._lock = Lock()
        self._burying = Lock()
        self._bury_again_at = 0.0
        self._waiters = Waiters(source.log)
        self._is_reading = False
        self._moves = 0
        self._failure: Callable[[], TidelogError] | None = None
        self._fenced: FencedError | None = None
        self.is_unstored = False
        """It was closed, and its position could not be stored yet."""
        self._background = background
        self._upkeep_task: Task = background.add(self._upkeep, state.options.progress_flush_interval_seconds)

    # Consumers

    def join(self, consumer: str) -> Holder:
        with self._lock:
            self._check_usable()
            holder = self.state.join(consumer)
            self._waiters.wake()
            return holder

    def leave(self, holder: Holder) -> bool:
        """What it had goes to the others; True when it was the last one."""
        with self._lock:
            if self.state.holders.get(holder.name) is holder:
                self.state.leave(holder)
                self._waiters.wake()
            return not self.state.holders

    def _check_usable(self, holder: Holder | None = None) -> None:
        if self._failure is not None:
            raise self._failure()
        if holder is not None and holder.has_left:
            raise ClosedError(f"this consumer of {self.name} is closed", hint="Subscribe again")

    # Receiving

    def receive_one(self, holder: Holder, timeout: float | None) -> Delivery | None:
        """As `receive`; most messages are ready, and nothing but their order matters."""
        with self._lock:
            message = None
            if self._failure is None and not holder.has_left:
                message = self.state.take_plain(holder)
        if message is not None:
            return message
        taken = self.receive(holder, 1, timeout)
        return taken[0] if taken else None

    def receive(self, holder: Holder, limit: int, timeout: float | None) -> Sequence[Delivery]:
        """Messages for a consumer as soon as there are some; none when the time passed."""
        step = self._step(holder, limit, ThreadWaiter)
        if step.taken:
            return step.taken
        deadline = None if timeout is None else time.monotonic() + timeout
        while not step.taken:
            if step.must_read:
                self._pause_after(self._read(deadline))
            elif isinstance(step.waiter, ThreadWaiter):
                try:
                    step.waiter.wait(_sooner(step.seconds, deadline))
                finally:
                    self._waited(step.waiter)
            late_seconds = _late_seconds(deadline)
            step = self._step(holder, limit, ThreadWaiter if late_seconds < 0 else None, late_seconds < _GRACE_SECONDS)
            if late_seconds >= 0 and not step.must_read:
                break
        return step.taken

    async def receive_async(self, holder: Holder, limit: int, timeout: float | None) -> Sequence[Delivery]:
        """As `receive`, suspending the task; files and stores are read in a worker thread."""
        step = self._step(holder, limit, task_waiter)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not step.taken:
            if step.must_read:
                await asyncio.sleep(await self._read_async(deadline))
            elif isinstance(step.waiter, asyncio.Future):
                try:
                    await asyncio.wait([step.waiter], timeout=_sooner(step.seconds, deadline))
                finally:
                    self._waited(step.waiter)
            late_seconds = _late_seconds(deadline)
            step = self._step(holder, limit, task_waiter if late_seconds < 0 else None, late_seconds < _GRACE_SECONDS)
            if late_seconds >= 0 and not step.must_read:
                break
        return step.taken

    def step(self, holder: Holder, limit: int, make_waiter: Callable[[], Waiter], deadline: float | None) -> _Step:
        """Messages for a consumer, or a waiter that is finished when it should look again; reads what it must."""
        while True:
            late_seconds = _late_seconds(deadline)
            step = self._step(holder, limit, make_waiter if late_seconds < 0 else None, late_seconds < _GRACE_SECONDS)
            if not step.must_read:
                return step
            self._pause_after(self._read(deadline))

    async def step_async(self, holder: Holder, limit: int, deadline: float | None) -> _Step:
        """As `step`, suspending the task."""
        while True:
            late_seconds = _late_seconds(deadline)
            step = self._step(holder, limit, task_waiter if late_seconds < 0 else None, late_seconds < _GRACE_SECONDS)
            if not step.must_read:
                return step
            await asyncio.sleep(await self._read_async(deadline))

    def _step(
        self, holder: Holder, limit: int, make_waiter: Callable[[], Waiter] | None, may_read: bool = True
    ) -> _Step:
        """The next messages for a consumer; without `make_waiter` it does not wait."""
        with self._lock:
            self._check_usable(holder)
            state, now = self.state, self._now()
            taken = state.take(holder, limit, now)
            if state.dead:
                self._bury_soon()
            if taken:
                if not self._waiters.is_empty:
                    self._set_alarm(now)
                return _Step(taken)
            wants_more = not self._is_reading and state.wants_more(holder)
            if wants_more and may_read and self.source.log.next_offset > self._feed.news_from(state.read_offset):
                self._is_reading = True
                return _Step(must_read=True)
            if make_waiter is None:
                self._waiters.wake(1)  # another waiter takes over
                return _Step()
            return self._wait(make_waiter(), wants_more, now)

    def _wait(self, waiter: Waiter, wants_more: bool, now: Now) -> _Step:
        due_us = self.state.next_due_us(now)
        self._waiters.add(waiter, due_us)
        has_to_look_out = wants_more and not self._waiters.has_lookout
        if has_to_look_out and not self._waiters.look_out(waiter, self._feed.news_from(self.state.read_offset)):
            if self.source.log.over:
                raise _closed_error(self.name)
            return _Step()
        return _Step(waiter=waiter, seconds=None if due_us is None else max(0.0, (due_us - now.steady_us) / 1e6))

    def _waited(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiters.remove(waiter)
            if not self._waiters.is_empty and not self._waiters.has_lookout:
                self._waiters.wake(1)

    def _set_alarm(self, now: Now) -> None:
        """A message delivered just now may time out before any waiter would check."""
        due_us = self.state.next_due_us(now)
        if due_us is not None and (self._waiters.alarm_us is None or due_us < self._waiters.alarm_us):
            self._waiters.wake(1)

    # Reading

    def _read(self, deadline: float | None) -> float:
        """Reads on for all; returns the seconds to pause before the next attempt, 0 when it went well."""
        fed, offset, moves = None, self.state.read_offset, self._moves
        try:
            with self._lock:
                offset, moves = self.state.read_offset, self._moves
            fed = self._feed.read(offset)
        except RetryError as error:
            if deadline is not None and time.monotonic() + _RETRY_SECONDS >= deadline:
                raise
            _logger.warning("%s: reading at %d failed and is tried again: %s", self.name, offset, error)
            return _RETRY_SECONDS
        finally:
            self._did_read(fed, moves)
        return 0.0

    async def _read_async(self, deadline: float | None) -> float:
        if self._feed.is_in_memory(self.state.read_offset):
            return self._read(deadline)
        turn = Lock()

        def read() -> float:
            return self._read(deadline) if turn.acquire(blocking=False) else 0.0

        try:
            # What is on this disk does not wait for the threads that others have waiting for a store.
            in_thread = asyncio.to_thread if self._feed.is_on_disk(self.state.read_offset) else in_store_thread
            return await in_thread(read)
        finally:
            # Cancelled, or refused by a loop that ends, before a thread was free for it: nothing was read.
            if turn.acquire(blocking=False):
                self._did_read(None, self._moves)

    def _did_read(self, fed: Fed | None, moves: int) -> None:
        with self._lock:
            self._is_reading = False
            if fed is not None and moves == self._moves:
                self.state.feed(fed.messages, fed.next_offset, self._now())
                counters = self.state.counters
                counters.filtered += fed.filtered
                counters.lost += fed.lost
                counters.expired += fed.expired
                self._store_if_far()
            if not self._waiters.is_empty:
                self._waiters.wake()

    def _pause_after(self, seconds: float) -> None:
        if seconds:
            time.sleep(seconds)

    # Settling

    def ack(self, holder: Holder, offset: int, *, has_receipt: bool = False) -> None:
        """Settles one message. `has_receipt`: the caller has a received message, not only an offset."""
        with self._lock:
            if self._failure is not None or holder.has_left:
                self._check_usable(holder)
            if not self._waiters.is_empty:
                self._ack_and_wake(holder, ((offset, has_receipt),))
            else:
                self._ack_one(holder, offset, has_receipt)
            if self.state.progress.floor >= self.position.soon_at:
                self._store_if_far()

    def ack_many(self, holder: Holder, offsets: Iterable[tuple[int, bool]]) -> None:
        """Several messages are done with; each is an offset, and whether the caller has the message."""
        with self._lock:
            self._check_usable(holder)
            self._ack_and_wake(holder, offsets)
            self._store_if_far()

    def _ack_and_wake(self, holder: Holder, offsets: Iterable[tuple[int, bool]]) -> None:
        """Others may get on when the window was full, a message blocked them, or a key is free now."""
        state = self.state
        held_up = state.is_held_up
        try:
            for offset, has_receipt in offsets:
                self._ack_one(holder, offset, has_receipt)
        finally:
            if held_up or state.ready_count:
                self._waiters.wake()

    def _ack_one(self, holder: Holder, offset: int, has_receipt: bool) -> None:
        if offset not in holder.unacked and offset not in holder.stale:
            self._check_can_be_acked(offset, has_receipt)
        self.state.ack(holder, offset)

    def _check_can_be_acked(self, offset: int, has_receipt: bool) -> None:
        """A message that this consumer does not hold. It may have been received before the subscription was opened
        here, and a caller that has the message knows that; an offset alone may be a mistake, and the message would be
        lost.
        """
        if offset >= self.source.log.next_offset:
            raise InputError(f"there is no message {offset} to acknowledge", operation=f"subscription {self.name}")
        if self.state.was_handed_out(offset):
            return
        if not has_receipt:
            raise self._not_handed_out(offset)
        if self.state.progress.range_count >= MAX_HOLES:
            raise InputError(
                f"message {offset} was not delivered yet, and too many others are acknowledged out of order",
                operation=f"subscription {self.name}",
                hint="Receive messages before they are acknowledged",
            )

    def _not_handed_out(self, offset: int) -> InputError:
        return InputError(
            f"message {offset} was not delivered since the subscription was opened or moved",
            operation=f"subscription {self.name}",
            hint="Receive it first: it is delivered again",
        )

    def ack_cumulative(self, holder: Holder, offset: int) -> None:
        """This message and all before it are done with."""
        options = self.state.options
        if not options.is_ordered:
            raise InputError(f"cumulative acknowledgement needs an order; {options.kind} has none")
        with self._lock:
            self._check_usable(holder)
            if offset >= self.state.unseen_from or not (offset in holder.stale or self.state.was_handed_out(offset)):
                raise self._not_handed_out(offset)
            self.state.ack_below(holder, offset + 1)
            self._waiters.wake()
            self._store_if_far()

    def nack(self, holder: Holder, offset: int, delay: float | None, reason: str | None = None) -> None:
        """One message is to come again."""
        with self._lock:
            self._check_usable(holder)
            if not self.state.nack(holder, offset, delay, self._now(), reason):
                self._check_can_be_nacked(holder, offset)
            if self.state.dead:
                self._bury_soon()
            self._waiters.wake()

    def _check_can_be_nacked(self, holder: Holder, offset: int) -> None:
        """One that this consumer does not have. If it lost that to a time-out or a seek, it cannot know what others did
        with it since; what waits to come again does so anyway."""
        if offset in holder.timed_out or offset in holder.stale:
            return
        if self.state.progress.is_settled(offset):
            raise InputError(
                f"message {offset} is settled: it was acknowledged or given up and is not delivered again",
                operation=f"subscription {self.name}",
                hint=Hint(
                    "Use ack() or nack() once per message; sub.seek(offset) goes back to it",
                    command="`tidelog sub seek` goes back to it",
                ),
            )
        if not self.state.was_handed_out(offset):
            raise self._not_handed_out(offset)

    def seek(self, offset: int) -> None:
        """Moves all consumers to an offset. The new position is stored when this returns."""
        if offset > self.source.log.durable_offset:
            self.source.log.flush()  # a position beyond what is durable would be stored only up to there
        with self._burying:
            letters_end = self._forget_dead_letters()
            with self._lock:
                self._check_usable()
                self._moves += 1
                self.state.move_to(offset)
                self.state.dead_letter_offset = letters_end
                self._waiters.wake()
        self.store()

    def _forget_dead_letters(self) -> int:
        """Messages that fail again are given up again, in letters after the end that is returned."""
        if self._dead_letters is None:
            return self.state.dead_letter_offset
        end_offset = self._dead_letters.end_offset()
        self._dead_letters.forget()
        return end_offset

    # How it stands

    @property
    def lag_messages(self) -> int:
        """Unacknowledged messages, delivered or not."""
        with self._lock:
            progress = self.state.progress
            return max(0, self.source.log.next_offset - progress.floor - progress.settled_above)

    def oldest_open(self) -> Message | None:
        feed = Feed(self.source, None, on_gap="skip")
        try:
            fed = feed.read(self.state.progress.floor)
            while fed is not None and not fed.messages:
                fed = feed.read(fed.next_offset)
        finally:
            feed.close()
        return None if fed is None else fed.messages[0]

    def statistics(self) -> SubscriptionStatistics:
        lag_messages = self.lag_messages
        with self._lock:
            state = self.state
            return SubscriptionStatistics(
                name=self.name,
                kind=state.options.kind,
                consumers=tuple(state.holders),
                offset=state.progress.floor,
                stored_offset=self.position.offset,
                lag_messages=lag_messages,
                unacked=state.unacked_count,
                waiting=state.waiting_count,
                blocked=len(state.blocked),
                **msgspec.structs.asdict(state.counters),
            )

    # Upkeep

    def _store_if_far(self) -> None:
        if self.state.progress.floor >= self.position.soon_at:
            self.position.wanted()
            self._upkeep_soon(_STORE_PAUSE_SECONDS)

    def _upkeep_soon(self, delay_seconds: float) -> None:
        self._background.schedule(self._upkeep_task, delay_seconds)

    def _bury_soon(self) -> None:
        """Limits retries while dead letters cannot be written."""
        if time.monotonic() >= self._bury_again_at:
            self._upkeep_soon(0.0)

    def _upkeep(self) -> float:
        """Dead letters that cannot be written do not keep the position from being stored, nor the other way round."""
        if self._failure is not None:
            return _HOUR_SECONDS
        interval_seconds = self.state.options.progress_flush_interval_seconds
        if not self._succeeds("moving its dead letters", self.bury):
            self._bury_again_at = time.monotonic() + interval_seconds
        is_stored = self._succeeds("storing its position", self._store_as_owner)
        return interval_seconds if is_stored else min(_RETRY_SECONDS, interval_seconds)

    def _succeeds(self, what: str, work: Callable[[], None]) -> bool:
        try:
            work()
        except TidelogError as error:
            _logger.warning("subscription %s: %s failed and is tried again: %s", self.name, what, error)
            return False
        return True

    def _store_as_owner(self) -> None:
        """Wakes the waiters of a topic that moved to another owner, also if there is nothing to store."""
        self._as_owner(self.source.check_owned)
        self.store()

    def store(self, *, is_last: bool = False) -> None:
        """Stores the position now. FencedError, and from then on always, when the topic has another owner."""
        self._as_owner(lambda: self.position.store(self.state, self._lock, is_last=is_last))

    def flush(self) -> None:
        """Stores all acknowledgements now; raises if they are lost."""
        try:
            self.store(is_last=True)
        except FencedError:
            self._fenced = None
            raise

    def _as_owner(self, work: Callable[[], None]) -> None:
        try:
            work()
        except FencedError as error:
            message, hint = error.message, error.hint
            self._fenced = error
            self.stop(lambda: FencedError(message, hint=hint))
            raise

    def bury(self) -> None:
        """Moves what was given up to the dead letters. Each is acknowledged once it is durable there."""
        if self._dead_letters is None:
            return
        with self._burying:
            with self._lock:
                dead, settled_offset = list(self.state.dead.values()), self.state.dead_letter_offset
                reasons = dict(self.state.reasons)
            if not dead:
                return
            written = self._dead_letters.write(dead, settled_offset, reasons)
            with self._lock:
                for offset in written.offsets:
                    self.state.bury(offset)
                self.state.dead_letter_offset = self._dead_letters.settled_offset(self.state.progress.is_settled)
                self._waiters.wake()
        if written.refused is not None:
            raise written.refused

    # Ending

    def stop(self, make_error: Callable[[], TidelogError]) -> None:
        """Nothing is delivered or acknowledged from now on; waiters get the reason."""
        with self._lock:
            if self._failure is None:
                self._failure = make_error
            self._waiters.wake()

    def close(self, make_error: Callable[[], TidelogError] | None = None) -> None:
        """Stores everything that was acknowledged and ends it. Closing twice is fine, and tries again what failed.

        Consumers get `make_error()` from then on, else that it is closed.

        FencedError when the topic has another owner, which does not know of acknowledgements that were not stored yet.
        """
        if self._failure is None:
            self.is_unstored = True
        self.stop(make_error or (lambda: _closed_error(self.name)))
        self._background.cancel(self._upkeep_task)
        try:
            if self.is_unstored:
                self._store_for_good()
        finally:
            self._feed.close()
            self._refuse_if_lost()

    def _refuse_if_lost(self) -> None:
        """Says once that acknowledgements are lost with the ownership of the topic."""
        fenced, self._fenced = self._fenced, None
        with self._lock:
            is_lost = fenced is not None and self.position.misses_acknowledgements(self.state)
        if fenced is not None and is_lost:
            raise FencedError(
                f"acknowledgements of the subscription {self.name} are lost: {fenced.message}",
                hint="The new owner delivers those messages again",
            )

    def _store_for_good(self) -> None:
        try:
            self.bury()
        finally:
            with contextlib.suppress(FencedError):  # the new owner has it; what is lost is reported
                self.store(is_last=True)
            self.is_unstored = False


def _closed_error(name: str) -> ClosedError:
    return ClosedError(f"the subscription {name} is closed", hint="Subscribe again")


def _late_seconds(deadline: float | None) -> float:
    """The time since a deadline; negative before it, and without one."""
    return -1.0 if deadline is None else time.monotonic() - deadline


class Part(NamedTuple):
    """A consumer's place in one of the subscriptions that it receives from."""

    subscription: Subscription
    holder: Holder


def receive_from_any(parts: Sequence[Part], limit: int, timeout: float | None) -> Sequence[Delivery]:
    """As `Subscription.receive`, from the first of several that has messages, in the order that is given."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        bell, soonest = Bell(), _left(deadline)
        waiting: list[tuple[Subscription, Waiter]] = []
        try:
            for part in parts:
                step = part.subscription.step(part.holder, limit, bell.waiter, deadline)
                if step.taken:
                    return step.taken
                if step.waiter is not None:
                    waiting.append((part.subscription, step.waiter))
                soonest = _soonest(soonest, step.seconds)
            if _late_seconds(deadline) >= 0:
                return ()
            if len(waiting) == len(parts):
                bell.wait(soonest)
        finally:
            for subscription, waiter in waiting:
                subscription._waited(waiter)


async def receive_from_any_async(parts: Sequence[Part], limit: int, timeout: float | None) -> Sequence[Delivery]:
    """As `receive_from_any`, suspending the task."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        waiting: list[tuple[Subscription, asyncio.Future[None]]] = []
        soonest = _left(deadline)
        try:
            for part in parts:
                step = await part.subscription.step_async(part.holder, limit, deadline)
                if step.taken:
                    return step.taken
                if isinstance(step.waiter, asyncio.Future):
                    waiting.append((part.subscription, step.waiter))
                soonest = _soonest(soonest, step.seconds)
            if _late_seconds(deadline) >= 0:
                return ()
            if len(waiting) == len(parts):
                futures = [waiter for _, waiter in waiting]
                await asyncio.wait(futures, timeout=soonest, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for subscription, waiter in waiting:
                subscription._waited(waiter)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _soonest(one: float | None, other: float | None) -> float | None:
    return min((seconds for seconds in (one, other) if seconds is not None), default=None)


def _sooner(seconds: float | None, deadline: float | None) -> float | None:
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if seconds is None or left is None:
        return left if seconds is None else seconds
    return min(seconds, left)
