"""The subscriptions of one topic: creates, opens, lists and deletes them.

Invariants
- A subscription is open once in a process: its consumers share one state. No other process can have it open, since only
  the owner of the topic can.
- Its position is stored at creation, before the first message is delivered.
- It is closed with its last consumer, and all acknowledgements are stored then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from threading import RLock
from typing import Any

import msgspec

from tidelog.clock import Clock, to_datetime
from tidelog.cold.cursor import Cursor
from tidelog.errors import (
    ConflictError,
    DiskFullError,
    ExhaustedError,
    FencedError,
    Hint,
    InputError,
    NotFoundError,
    TidelogError,
)
from tidelog.log.reader import Position
from tidelog.store.keys import MAX_PART_LENGTH, group_cursor, is_subscription
from tidelog.store.scheduler import Background
from tidelog.topics.subscription.consumer import Consumer, Lag
from tidelog.topics.subscription.cursors import CursorStore, StoredPosition
from tidelog.topics.subscription.dead_letters import DeadLetters, DeadLetterTopic, check_dead_letter_name
from tidelog.topics.subscription.delivery import DeliveryState
from tidelog.topics.subscription.feed import Feed, Filter, Source
from tidelog.topics.subscription.options import DeliveryOptions, Now, SubscriptionStatistics, parse_options
from tidelog.topics.subscription.queue import Progress
from tidelog.topics.subscription.subscription import Subscription

_logger = logging.getLogger("tidelog.topics")


class SubscriptionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a subscription, or how it stands when it is open here."""

    name: str
    kind: str
    offset: int
    """Everything below is acknowledged."""
    acked_above: int
    """Messages above `offset` that are acknowledged too."""
    lag_messages: int
    created: datetime
    moved: datetime
    hold_retention: bool
    is_open: bool


class SubscriptionRegistry:
    """The subscriptions of a topic that this process owns, or looks at (then they can only be listed)."""

    def __init__(
        self,
        topic: str,
        source: Source | None,
        next_offset: Callable[[], int],
        cursors: CursorStore,
        clock: Clock,
        background: Background,
        open_topic: Callable[[str], DeadLetterTopic],
    ) -> None:
        self._topic = topic
        self._source = source
        self._next_offset = next_offset
        self.cursors = cursors
        self._clock = clock
        self._background = background
        self._open_topic = open_topic
        self._guard = RLock()
        self._open: dict[str, Subscription] = {}
        self._filters: dict[str, Filter | None] = {}
        self._numbers = itertools.count(1)

    # Subscribing

    def subscribe(
        self, name: str, *, start: Position, consumer: str | None, matches: Filter | None, options: dict[str, Any]
    ) -> Consumer:
        """A new consumer of a subscription, which is made when there is none of that name."""
        check_names(name, consumer)
        parsed = parse_options(options)
        dead_letters = self._dead_letters(name, parsed)  # before the guard: it asks the directory, which may ask us
        with self._guard:
            subscription = self._open.get(name)
            if subscription is not None and subscription.is_unstored:
                self._end(subscription)
                subscription = None
            if subscription is None:
                subscription = self._open_one(name, start, matches, parsed, dead_letters)
                self._open[name], self._filters[name] = subscription, matches
            else:
                self._check_same(subscription, matches, parsed)
            holder = subscription.join(consumer or f"consumer-{next(self._numbers)}")
        return Consumer(subscription, holder, self._left, self._delete_open, self._lag)

    def _open_one(
        self,
        name: str,
        start: Position,
        matches: Filter | None,
        options: DeliveryOptions,
        dead_letters: DeadLetters | None,
    ) -> Subscription:
        source = self._required_source()
        feed = Feed(source, matches, on_gap=options.on_gap)
        cursor = self.cursors.load(name)
        if cursor is None:
            letters_end = 0 if dead_letters is None else dead_letters.end_offset()
            cursor = self._create(name, source.resolve(start), options, letters_end)
        cursor = cursor.clipped(source.log.next_offset)
        state = DeliveryState(options, Progress(cursor.offset, cursor.acked), dict(cursor.failures))
        state.dead_letter_offset = cursor.dead_letter_offset
        return Subscription(
            name,
            state,
            source,
            feed,
            StoredPosition(
                name,
                cursor.clipped(source.log.durable_offset),
                self.cursors,
                source.log,
                options.progress_min_offset_delta,
            ),
            self._now,
            self._background,
            dead_letters,
        )

    def _now(self) -> Now:
        return Now(self._clock.now_us(), int(self._clock.monotonic() * 1_000_000))

    def _create(self, name: str, offset: int, options: DeliveryOptions, letters_end: int) -> Cursor:
        now_us = self._clock.now_us()
        cursor = Cursor(
            offset=offset,
            epoch=0,
            moved_us=now_us,
            kind=options.kind,
            created_us=now_us,
            hold_retention=options.hold_retention,
            dead_letter_offset=letters_end,
        )
        log = self._required_source().log
        if offset > log.durable_offset:
            with contextlib.suppress(DiskFullError, ExhaustedError):
                log.flush()
        # On a full disk what is durable is stored, and the rest when there is room: after a crash that is all there is.
        self.cursors.store(name, cursor.clipped(log.durable_offset))
        return cursor

    def _dead_letters(self, name: str, options: DeliveryOptions) -> DeadLetters | None:
        if options.max_deliveries is None or options.on_exhausted != "dead_letter":
            return None
        target = check_dead_letter_name(self._topic, name, options.dead_letter_topic)
        open_target = partial(self._open_topic, target)
        open_target()  # the next subscribe() raises it when it cannot be had
        return DeadLetters(open_target, self._topic, name)

    def _check_same(self, subscription: Subscription, matches: Filter | None, options: DeliveryOptions) -> None:
        for field in DeliveryOptions.__struct_fields__:
            known, given = getattr(subscription.state.options, field), getattr(options, field)
            if known != given:
                raise ConflictError(
                    f"the subscription {subscription.name} is open with {field}={known!r}, not {given!r}",
                    hint="Consumers share the options of a subscription: pass the same ones, or close the others first",
                )
        if self._filters[subscription.name] != matches:
            raise ConflictError(f"the subscription {subscription.name} is open with a different filter")

    def _required_source(self) -> Source:
        if self._source is None:
            raise InputError(
                "the log directory was opened with read_only=True",
                operation=f"topic {self._topic}",
                hint=Hint(
                    "Subscribe in the process that owns the topic, or open the directory without read_only",
                    command="Do it in the process that owns the topic",
                ),
            )
        return self._source

    # Leaving and deleting

    def _left(self, subscription: Subscription) -> None:
        """The last consumer has left, unless another one came meanwhile."""
        with self._guard:
            if self._open.get(subscription.name) is subscription and not subscription.state.holders:
                self._end(subscription)

    def _end(self, subscription: Subscription) -> None:
        """Closes it. A subscription that cannot be stored now is kept: the next close, or the next use, tries again."""
        try:
            subscription.close()
        finally:
            if not subscription.is_unstored:
                del self._open[subscription.name], self._filters[subscription.name]

    def _delete_open(self, subscription: Subscription) -> None:
        with self._guard:
            if len(subscription.state.holders) > 1:
                others = ", ".join(subscription.state.holders)
                raise ConflictError(f"the subscription {subscription.name} has other consumers: {others}")
            self.delete(subscription.name, is_asked_by_consumer=True)

    def delete(self, name: str, *, is_asked_by_consumer: bool = False) -> None:
        """Deletes a subscription; NotFoundError if it does not exist."""
        check_names(name, None)
        with self._guard:
            self._required_source()
            subscription = self._open.get(name)
            if subscription is not None:
                if not is_asked_by_consumer and subscription.state.holders:
                    raise ConflictError(f"the subscription {name} has consumers", hint="Close them first")
                self._end(subscription)
            elif name not in self.cursors.names():  # not loaded: one that is damaged can be deleted too
                raise subscription_not_found(name, self._topic)
            self.cursors.delete(name)

    def close(self, make_error: Callable[[], TidelogError] | None = None) -> list[FencedError]:
        """Stores and closes all of them. A position that cannot be stored holds nothing up: messages come again.

        Nor does a store that does not answer: all that there are to close are waited for no longer than one. Returns
        what was lost because the topic has another owner. Consumers get `make_error()` from then on.
        """
        lost = []
        with self._guard:
            for subscription in self._taken():
                problem: TidelogError | str = "the store does not answer"
                try:
                    self._background.attempt(partial(subscription.close, make_error))
                except TidelogError as error:
                    problem = error
                if subscription.is_unstored:
                    _logger.warning("%s: the position of %s is not stored: %s", self._topic, subscription.name, problem)
                elif isinstance(problem, FencedError):
                    _logger.warning("%s: %s", self._topic, problem)
                    lost.append(problem)
        return lost

    def _taken(self) -> Iterator[Subscription]:
        while self._open:
            name, subscription = self._open.popitem()
            self._filters.pop(name, None)
            yield subscription

    # How they stand

    def names(self) -> list[str]:
        """All subscriptions, open or not."""
        return sorted(self.cursors.names())

    def info(self, name: str) -> SubscriptionInfo:
        """Describes a subscription; NotFoundError if it does not exist."""
        with self._guard:
            subscription = self._open.get(name)
            check_names(name, None)
            cursor = self.cursors.load(name)
            if cursor is None:
                raise subscription_not_found(name, self._topic)
            progress = Progress(cursor.offset, cursor.acked) if subscription is None else subscription.state.progress
            return self._info(name, cursor, progress, is_open=subscription is not None)

    def _info(self, name: str, cursor: Cursor, progress: Progress, *, is_open: bool) -> SubscriptionInfo:
        acked_above = progress.settled_above
        return SubscriptionInfo(
            name=name,
            kind=cursor.kind,
            offset=progress.floor,
            acked_above=acked_above,
            lag_messages=max(0, self._next_offset() - progress.floor - acked_above),
            created=to_datetime(cursor.created_us),
            moved=to_datetime(cursor.moved_us),
            hold_retention=cursor.hold_retention,
            is_open=is_open,
        )

    # Consumer groups of Kafka's protocol, which have offsets here and their members elsewhere

    def groups(self) -> list[str]:
        """All that have committed an offset."""
        return sorted(self.cursors.groups())

    def group_info(self, group: str) -> SubscriptionInfo:
        """How far a group is; NotFoundError if it has committed nothing."""
        cursor = self._group_cursor(group)
        return self._info(group, cursor, Progress(cursor.offset), is_open=False)

    def move_group(self, group: str, position: Position) -> None:
        """Commits another offset for a group that has no members."""
        cursor = self._group_cursor(group)
        offset = self._required_source().resolve(position)
        moved = msgspec.structs.replace(cursor, offset=offset, leader_epoch=-1, metadata="")
        self.cursors.store(group_cursor(group), moved)

    def delete_group(self, group: str) -> None:
        """Forgets the offset of a group; a damaged one, too."""
        if group not in self.cursors.groups():
            raise subscription_not_found(group, self._topic)
        self.cursors.delete(group_cursor(group))

    def _group_cursor(self, group: str) -> Cursor:
        cursor = self.cursors.load(group_cursor(group))
        if cursor is None:
            raise subscription_not_found(group, self._topic)
        return cursor

    def statistics(self) -> tuple[SubscriptionStatistics, ...]:
        """Those that are open here."""
        with self._guard:
            opened = list(self._open.values())
        return tuple(subscription.statistics() for subscription in opened)

    def lowest_held_offset(self) -> int | None:
        """What retention has to keep: everything that a holding subscription would get again. None: nothing."""
        with self._guard:
            held = [sub.position.offset for sub in self._open.values() if sub.state.options.hold_retention]
            closed = [self.cursors.load(name) for name in self.cursors.names() if name not in self._open]
        held += [cursor.offset for cursor in closed if cursor is not None and cursor.hold_retention]
        return min(held, default=None)

    def _lag(self, subscription: Subscription) -> Lag:
        messages = subscription.lag_messages
        oldest = subscription.oldest_open() if messages else None
        if oldest is None or oldest.timestamp is None:
            return Lag(messages, 0.0)
        age = to_datetime(self._clock.now_us()) - oldest.timestamp
        return Lag(messages, max(0.0, age.total_seconds()))


def check_names(name: object, consumer: object) -> None:
    """InputError when a subscription or a consumer cannot be called that."""
    if not isinstance(name, str) or not is_subscription(name):
        raise InputError(
            f"{name!r} cannot be the name of a subscription",
            hint=f"Use 1 to {MAX_PART_LENGTH} of the characters A-Z a-z 0-9 . _ - and no dot in front",
        )
    if consumer is not None and (not isinstance(consumer, str) or not consumer):
        raise InputError(f"{consumer!r} cannot be the name of a consumer", hint="Pass a str, or leave it out")


def subscription_not_found(name: str, topic: str) -> NotFoundError:
    """For a name that the topic does not know."""
    hint = Hint("`topic.subscriptions()` has their names", command=f"`tidelog sub list {topic}` has their names")
    return NotFoundError(f"{topic} has no subscription {name}", hint=hint)
