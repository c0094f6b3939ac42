"""`tidelog consume --subscription`: messages of a subscription on stdout, acknowledged once they are written.

Invariants
- A message is acknowledged after its bytes were handed to the reader of stdout: one that goes away in the middle gets
  the rest, or all of the last piece, again. A message may be shown twice and is never passed over.
- It ends with what was ready when it is not told to follow; what is due later stays for later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.topics.message import Message
    from tidelog.topics.storage import LogDirectory
    from tidelog.topics.subscription_consumer import Consumer
    from tidelog.topics.subscription_registry import SubscriptionInfo

_PIECE_MESSAGES = 500
# What a subscription hands out at most without an acknowledgement.
_MAX_UNACKED = 10_000


class SubscriptionChoice(NamedTuple):
    """What was asked for, as it was written; None: not said."""

    name: str
    kind: str | None
    start: str | None
    stop: str | None
    max_messages: int | None
    follow: bool
    acknowledges: bool | None
    skip_gaps: bool


def refuse_without_name(options: Mapping[str, object]) -> None:
    """InputError for an option that only a subscription understands."""
    from tidelog.errors import InputError

    given = next((option for option, value in options.items() if value is not None), None)
    if given is not None:
        raise InputError(f"{given} is about a subscription", hint="Name one with --subscription")


def consume_subscription(
    session: Session, topic: str, choice: SubscriptionChoice, to_bytes: Callable[[Message], bytes], take_over: bool
) -> None:
    """Shows what the subscription has not acknowledged, and acknowledges it unless told otherwise."""
    from tidelog.cli.topic_choice import require_kept, require_ours
    from tidelog.cli.topic_names import require_topic
    from tidelog.errors import InputError

    if choice.stop is not None:
        raise InputError("--to and --subscription cannot be combined", hint="Say how many with --max-messages")
    session.look().close()  # a directory that is not there is not made by somebody who only wants to see
    with session.open() as log:
        require_topic(log, topic)
        require_kept(log, topic)
        require_ours(log, topic, take_over)
        log.topic(topic, take_over=take_over)
        with _consumer(session, log, topic, choice) as consumer:
            _Shower(consumer, to_bytes, choice).show()
            _tell_if_full(session, consumer, choice)


def _consumer(session: Session, log: LogDirectory, name: str, choice: SubscriptionChoice) -> Consumer:
    from tidelog.cli.consume import parse_position, settled

    topic = log.topic(name)
    start = parse_position("--from", choice.start or "earliest")
    _check_kind(choice.kind)
    known = topic.subscription_info(choice.name) if choice.name in topic.subscriptions() else None
    if known is not None:
        start = "earliest"
        _tell_what_stays(session, known, choice)
    return topic.subscribe(
        choice.name,
        choice.kind or ("exclusive" if known is None else known.kind),  # type: ignore[arg-type]
        start=settled(topic, start),
        consumer="tidelog-consume",
        max_unacked=_MAX_UNACKED,
        on_gap="skip" if choice.skip_gaps else "raise",
        hold_retention=known is not None and known.hold_retention,  # as a program has said before
    )


def _check_kind(kind: str | None) -> None:
    from typing import get_args

    from tidelog.errors import InputError
    from tidelog.topics.delivery_options import Kind

    kinds = get_args(Kind)
    if kind is not None and kind not in kinds:
        raise InputError(f"--kind {kind!r} is not a kind of subscription", hint=f"Give {', '.join(kinds)}")


def _tell_what_stays(session: Session, known: SubscriptionInfo, choice: SubscriptionChoice) -> None:
    """What was said about a new one, of one that is not: its position stays, its kind changes."""
    if choice.start is not None:
        session.output.note(f"{known.name} is not new: it goes on at offset {known.offset}, whatever --from says")
    if choice.kind not in (None, known.kind):
        session.output.note(f"{known.name} was {known.kind}, and is {choice.kind} from now on")


class _Shower:
    """Brings messages to stdout piece by piece, and no more of them than were asked for."""

    def __init__(self, consumer: Consumer, to_bytes: Callable[[Message], bytes], choice: SubscriptionChoice) -> None:
        self._consumer = consumer
        self._to_bytes = to_bytes
        self._left = _limit(choice)
        self._acknowledges = choice.acknowledges is not False
        self._timeout = None if choice.follow else 0.0

    def show(self) -> None:
        while self._left != 0:
            limit = _PIECE_MESSAGES if self._left is None else min(_PIECE_MESSAGES, self._left)
            messages = self._consumer.receive_many(limit, self._timeout)
            if not messages:
                return
            sys.stdout.buffer.write(b"".join(map(self._to_bytes, messages)))
            sys.stdout.buffer.flush()
            if self._acknowledges:
                self._consumer.ack_many(messages)
            if self._left is not None:
                self._left -= len(messages)


def _limit(choice: SubscriptionChoice) -> int | None:
    """How many are shown; without acknowledgements no more than are handed out, rather than waiting for ever."""
    if choice.acknowledges is not False:
        return choice.max_messages
    return _MAX_UNACKED if choice.max_messages is None else min(choice.max_messages, _MAX_UNACKED)


def _tell_if_full(session: Session, consumer: Consumer, choice: SubscriptionChoice) -> None:
    """Whoever asked for more than are handed out hears that there are more."""
    if _limit(choice) != choice.max_messages and consumer.lag.messages > _MAX_UNACKED:
        session.output.note(f"only the first {_MAX_UNACKED:,} were shown: more are not handed out unacknowledged")
