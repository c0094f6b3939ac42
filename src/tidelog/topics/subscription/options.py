"""Subscription options (each with its default, effect and cost), and its timers, rate limit and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec

from tidelog.errors import InputError
from tidelog.fields import read_keywords
from tidelog.topics.subscription.queue import Delivery

Kind = Literal["exclusive", "failover", "shared", "key_shared"]
Exhausted = Literal["block", "drop", "dead_letter"]
# A hundred years: longer is a mistake, and infinite does not fit the microseconds that times are counted in.
MAX_SECONDS = 3_155_760_000
_Seconds = Annotated[float, msgspec.Meta(ge=0.001, le=MAX_SECONDS)]
_Pause = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class DeliveryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How messages are delivered. Consumers that share a subscription in one process share its options."""

    kind: Kind = "exclusive"
    """exclusive: one consumer. failover: one at a time, the next takes over. shared: the first to ask gets the next
    message. key_shared: messages of one key go to one consumer, in order.
    """

    max_unacked: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """The number of messages that may be delivered, or wait for redelivery, without being acknowledged; then new ones
    wait. A larger value keeps more consumers busy and redelivers more messages after a crash.
    """

    ack_timeout_seconds: _Seconds | None = None
    """A message that is not acknowledged for this long is redelivered. None: only when its consumer leaves."""

    max_deliveries: _Count | None = None
    """A message that came back this often is passed to `on_exhausted`. None: it is redelivered forever."""

    on_exhausted: Exhausted = "dead_letter"
    """dead_letter: it is moved to `dead_letter_topic`. drop: it counts as acknowledged. block: it is kept, and what has
    to come after it waits (all in exclusive and failover, its key in key_shared, nothing in shared) until it is
    acknowledged or the subscription is moved by a seek."""

    dead_letter_topic: str | None = None
    """Default: `<namespace>/<topic>.<subscription>.dlq`."""

    redelivery_backoff_seconds: _Pause = 1.0
    """Pause before a rejected message comes again, doubled with each time. The time-out needs none."""

    redelivery_backoff_max_seconds: _Pause = 60.0
    """The longest such pause."""

    max_rate_per_second: Annotated[float, msgspec.Meta(ge=0.000_001, le=1e9)] | None = None
    """Messages delivered per second, over all consumers; the others wait."""

    time_to_live_seconds: _Seconds | None = None
    """Messages that are older when their turn comes are passed over, and counted. The age of one with `deliver_at`
    counts from then."""

    on_gap: Literal["raise", "skip"] = "raise"
    """Offsets that a repair marked as lost: an error at that place, or passed over and counted."""

    hold_retention: bool = False
    """Retention deletes nothing that this subscription has not acknowledged."""

    progress_flush_interval_seconds: _Seconds = 5.0
    """How often the position is stored while it moves: what a crash brings again."""

    progress_min_offset_delta: _Count = 1000
    """After this many further offsets it is stored sooner, a few times a second at most."""

    @property
    def is_ordered(self) -> bool:
        """Whether one consumer gets everything, in order."""
        return self.kind in ("exclusive", "failover")


class SubscribeOptions(TypedDict, total=False):
    """`DeliveryOptions` as keywords of `subscribe`, with units where a name ends in one."""

    max_unacked: int
    ack_timeout_seconds: float | str | None
    max_deliveries: int | None
    on_exhausted: Literal["block", "dead_letter", "drop"]
    dead_letter_topic: str | None
    redelivery_backoff_seconds: float | str
    redelivery_backoff_max_seconds: float | str
    max_rate_per_second: float | None
    time_to_live_seconds: float | str | None
    on_gap: Literal["raise", "skip"]
    hold_retention: bool
    progress_flush_interval_seconds: float | str
    progress_min_offset_delta: int


def parse_options(given: Mapping[str, Any]) -> DeliveryOptions:
    """Options from keywords; InputError names the wrong one, and one that would have no effect."""
    options = DeliveryOptions(**read_keywords(DeliveryOptions, given, "an option of a subscription"))
    _refuse_in_vain(options)
    return options


def _refuse_in_vain(options: DeliveryOptions) -> None:
    """What would be accepted and then have no effect is a mistake that shows only when messages are bad."""
    if options.dead_letter_topic is not None and options.on_exhausted != "dead_letter":
        raise InputError(
            f'dead_letter_topic has no effect with on_exhausted="{options.on_exhausted}"', hint="Leave one of them out"
        )
    if options.max_deliveries is None and (options.dead_letter_topic or options.on_exhausted != "dead_letter"):
        field = "dead_letter_topic" if options.dead_letter_topic else "on_exhausted"
        raise InputError(
            f"{field} has no effect without max_deliveries: messages are redelivered without limit",
            hint="Set a limit, for example max_deliveries=5",
        )


# Messages that wait for a time: rejected ones until their delay ends, delayed ones until `deliver_at`. Pure.


_SPARE_ENTRIES = 64


class Now(NamedTuple):
    """One moment by both clocks. Pauses are measured by `steady_us`, which never jumps; only the times that messages
    carry are compared with `wall_us`, which people and machines set."""

    wall_us: int
    steady_us: int


class Waiting(NamedTuple):
    """A message, and when its time comes by the clock of its room."""

    due_us: int
    message: Delivery


class WaitingRoom:
    """Each offset waits once. What left early is found out when its time comes, or when there is too much of it."""

    def __init__(self) -> None:
        self._by_offset: dict[int, Waiting] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._by_offset)

    def __contains__(self, offset: int) -> bool:
        return offset in self._by_offset

    def add(self, message: Delivery, due_us: int) -> None:
        self._by_offset[message.offset] = Waiting(due_us, message)
        heappush(self._heap, (due_us, message.offset))

    def remove(self, offset: int) -> Waiting | None:
        found = self._by_offset.pop(offset, None)
        if found is not None and len(self._heap) > 2 * len(self._by_offset) + _SPARE_ENTRIES:
            self._heap = [(waiting.due_us, waited) for waited, waiting in self._by_offset.items()]
            heapify(self._heap)
        return found

    def offsets_below(self, offset: int) -> list[int]:
        return [waiting for waiting in self._by_offset if waiting < offset]

    @property
    def next_due_us(self) -> int | None:
        """Not later than the first one's time."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_us: int) -> list[Waiting]:
        """Those whose time has come."""
        due = []
        while self._heap and self._heap[0][0] <= now_us:
            due_us, offset = heappop(self._heap)
            found = self._by_offset.get(offset)
            if found is not None and found.due_us == due_us:
                del self._by_offset[offset]
                due.append(found)
        return due


# A rate limit in messages per second: it delays messages and never drops them. Pure.


_US = 1_000_000
_BURST_SECONDS = 0.1


class RateLimit:
    """A bucket of permits that fills with time; it holds those of a tenth of a second, and at least one."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._most = max(1.0, per_second * _BURST_SECONDS)
        self._permits = self._most
        self._filled_us: int | None = None

    def available(self, now_us: int) -> int:
        """How many messages may go now."""
        if self._filled_us is not None:
            gained = max(0, now_us - self._filled_us) * self._per_second / _US
            self._permits = min(self._most, self._permits + gained)
        self._filled_us = now_us
        return int(self._permits)

    def spend(self, count: int) -> None:
        """Counts messages that were delivered."""
        self._permits -= count

    def next_us(self, now_us: int) -> int:
        missing = max(0.0, 1.0 - self._permits)
        return now_us + int(missing * _US / self._per_second) + 1


# Statistics of a subscription since it was opened, and its current state.


class DeliveryCounters(msgspec.Struct, kw_only=True):
    """Counted since the subscription was opened in this process."""

    delivered: int = 0
    """Deliveries, redeliveries included."""
    redelivered: int = 0
    """Redeliveries among those."""
    acked: int = 0
    nacked: int = 0
    timed_out: int = 0
    filtered: int = 0
    """Passed over because they did not match the filter."""
    expired: int = 0
    """Passed over because they were too old, or deleted by retention before they were read."""
    lost: int = 0
    """Passed over because a repair had marked them as lost."""
    dropped: int = 0
    """Given up after `max_deliveries`."""
    dead_lettered: int = 0
    """Moved to the dead-letter topic."""


class SubscriptionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a subscription that is open in this process."""

    name: str
    kind: str
    consumers: tuple[str, ...]
    offset: int
    """Everything below is settled."""
    stored_offset: int
    """As far as it is stored: what a crash goes back to."""
    lag_messages: int
    unacked: int
    """With consumers now."""
    waiting: int
    """Waiting for redelivery, or delayed."""
    blocked: int
    """Kept by `on_exhausted="block"`."""
    delivered: int
    redelivered: int
    acked: int
    nacked: int
    timed_out: int
    filtered: int
    expired: int
    lost: int
    dropped: int
    dead_lettered: int
