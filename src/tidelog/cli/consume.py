"""`tidelog consume`: prints messages of a topic, or of a subscription, to stdout.

Without a subscription the topic is opened for reading only, so another process may own it. Existing messages are
written in large pieces; messages that arrive while following are flushed one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, BinaryIO, NamedTuple

import typer

from tidelog.cli.output import compile_template, json_lines
from tidelog.cli.session import Session, command
from tidelog.cli.topic.names import require_kept, require_one_log, require_ours, require_topic
from tidelog.client.topic import RemotePartitionedTopic, RemoteTopic
from tidelog.errors import InputError, OffsetOutOfRangeError, offsets_text
from tidelog.log import Position
from tidelog.log.isolation import READ_COMMITTED, Isolation, check_isolation
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import Message, OnGap
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.options import Kind
from tidelog.topics.subscription.registry import SubscriptionInfo
from tidelog.topics.topic import Topic

_PIECE_BYTES = 256 << 10
Readable = Topic | PartitionedTopic | RemoteTopic | RemotePartitionedTopic


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "consume", remote="consume", is_local_beside=True)(consume)


def consume(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name.")],
    start: Annotated[
        str | None,
        typer.Option(
            "--from", "--start", metavar="POSITION", help="earliest (default), latest, an offset, a time, or -N."
        ),
    ] = None,
    stop: Annotated[str | None, typer.Option("--to", metavar="POSITION", help="Stop before this position.")] = None,
    max_messages: Annotated[
        int | None, typer.Option("--max-messages", "--max", "-n", metavar="N", min=0, help="Stop after N messages.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more at the end.")] = False,
    template: Annotated[
        str | None, typer.Option("--format", metavar="TEMPLATE", help=r"Default: %v\n, or %v\0 with --null.")
    ] = None,
    null: Annotated[bool, typer.Option("--null", "-0", help="Values end with a NUL byte, not a line end.")] = False,
    skip_gaps: Annotated[
        bool, typer.Option("--skip-gaps", help="Leave out messages that are lost or damaged.")
    ] = False,
    subscription: Annotated[
        str | None,
        typer.Option("--subscription", "-s", metavar="NAME", help="Resume this subscription; created if absent."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="exclusive (default), failover, shared or key_shared.")
    ] = None,
    acknowledges: Annotated[
        bool | None,
        typer.Option(
            "--ack/--no-ack", help="Acknowledge messages after printing them (default: yes).", show_default=False
        ),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="With --subscription: even if another node owns the topic.")
    ] = False,
    isolation: Annotated[
        str | None,
        typer.Option("--isolation", metavar="LEVEL", help="read_committed (default), or read_uncommitted."),
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", metavar="N", help="Only this partition [default: all, merged by time].")
    ] = None,
) -> None:
    r"""Writes the messages of TOPIC to stdout. Values only, unless told otherwise.

    Works while another process produces; with --follow it shows what that process writes, until Ctrl-C. A POSITION is
    earliest, latest, an offset, an ISO 8601 time (UTC unless it says otherwise), or -N for the last N messages.

    In a TEMPLATE %o is the offset, %t the time, %T the time in Unix milliseconds, %k the key, %v the value, %h the
    headers, %s the size of the value, %% a percent sign; \n, \t, \r, \0 and \\ are escapes. With --json a line is an
    object; a key, value or header that is not UTF-8 is base64 there, marked by key_encoding and so on. A null value is
    null, which is not an empty one. Where names of headers repeat, header_list has all of them.

    With --subscription it shows what that subscription has not acknowledged, and acknowledges it once it is written to
    stdout: what was not written comes again. That needs the topic for itself. --from says where a new one begins.

    Messages of transactions are shown once they are committed; at one that is open it ends, or waits with --follow.
    With --isolation read_uncommitted all are shown, those of aborted transactions too.
    """
    to_bytes = converter(session, topic, template, null)
    if partition is not None:
        with session.look() as log:
            require_topic(log, topic)
            topic = log.topic(topic).partition(partition).name
    if subscription is not None:
        check_committed(isolation)
        choice = SubscriptionChoice(subscription, kind, start, stop, max_messages, follow, acknowledges, skip_gaps)
        consume_subscription(session, topic, choice, to_bytes, take_over)
        return
    level: Any = isolation or READ_COMMITTED
    check_isolation(level)
    refuse_without_name({"--kind": kind, "--ack or --no-ack": acknowledges, "--take-over": take_over or None})
    first, last = parse_position("--from", start or "earliest"), None if stop is None else parse_position("--to", stop)
    check_order(start or "earliest", first, stop, last)
    _consume(session, topic, first, last, Choice(to_bytes, skip_gaps, max_messages, follow, level))


def check_committed(isolation: str | None) -> None:
    """InputError for another isolation: a subscription has one."""
    if isolation not in (None, READ_COMMITTED):
        raise InputError(
            f"a subscription delivers committed messages only, not --isolation {isolation}",
            hint="Leave out --subscription to look at the others",
        )


class Choice(NamedTuple):
    """In which form, and how many."""

    to_bytes: Callable[[Message], bytes]
    skip_gaps: bool
    max_messages: int | None
    follow: bool
    isolation: Isolation


def _consume(session: Session, topic: str, first: Position, last: Position | None, choice: Choice) -> None:
    with session.look() as log:
        require_topic(log, topic)
        write_messages(log.topic(topic), first, last, choice)


def write_messages(opened: Readable, first: Position, last: Position | None, choice: Choice) -> None:
    """Writes the messages between two positions to stdout, and what follows."""
    writer = _Writer(opened, choice)
    if isinstance(opened, PartitionedTopic | RemotePartitionedTopic):
        writer.write(first, last, follow=choice.follow)
        return
    _check_start(opened, first)
    end = opened.next_offset
    start = end if first == "latest" else settled(opened, first)
    writer.write(start, end if last is None else settled(opened, last), follow=False)
    if choice.follow and (last is None or isinstance(last, int)):
        # Not from `end` on: what is before it may be held up by an open transaction.
        writer.write(start if writer.reached is None else writer.reached, last, follow=True)


class _Writer:
    """Writes messages to stdout, at most as many as requested."""

    def __init__(self, topic: Readable, choice: Choice) -> None:
        self._topic = topic
        self._choice = choice
        self._left = choice.max_messages
        self.reached: int | None = None
        """Behind the last message that was written; None before the first."""

    def write(self, start: Position, stop: Position | None, *, follow: bool) -> None:
        """Messages from one position to another: existing ones in large pieces, new ones at once."""
        if self._left == 0:
            return
        on_gap: OnGap = "skip" if self._choice.skip_gaps else "raise"
        messages = self._topic.read(start, stop, follow=follow, on_gap=on_gap, isolation=self._choice.isolation)
        written = 0
        with _Pieces(sys.stdout.buffer, 0 if follow else _PIECE_BYTES) as pieces:
            for message in islice(messages, self._left):
                pieces.add(self._choice.to_bytes(message))
                written += 1
                self.reached = message.offset + 1
        if self._left is not None:
            self._left -= written


class _Pieces:
    """Gathers bytes and writes them in pieces of at least `piece_bytes`; the rest at the end, also after an error."""

    def __init__(self, stream: BinaryIO, piece_bytes: int) -> None:
        self._stream = stream
        self._piece_bytes = piece_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size >= self._piece_bytes:
            self._write()

    def _write(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        self._stream.write(b"".join(parts))
        self._stream.flush()

    def __enter__(self) -> _Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()


def converter(session: Session, topic: str, template: str | None, null: bool) -> Callable[[Message], bytes]:
    """What turns a message into what is written."""
    if session.as_json:
        if template is not None or null:
            raise InputError("--json cannot be combined with --format or --null")
        return json_lines(topic)
    if template is not None:
        return compile_template(template)
    end = b"\x00" if null else b"\n"
    return lambda message: (message.value or b"") + end


def parse_position(option: str, text: str) -> Position:
    """A position as the log knows it; the last N messages are the number -N."""
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.removeprefix("-").isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        hint = "Give earliest, latest, an offset, -N for the last N, or a time such as 2026-01-31T12:00:00Z"
        raise InputError(f"{option} {text!r} is not a position", hint=hint) from None


def check_order(start: str, first: Position, stop: str | None, last: Position | None) -> None:
    """A range that ends before it begins is a mistake; positions of two kinds can only be compared by the topic."""
    if isinstance(first, int) and isinstance(last, int):
        is_reversed = first > last and (first < 0) == (last < 0)
    else:
        is_reversed = isinstance(first, datetime) and isinstance(last, datetime) and _utc(first) > _utc(last)
    if is_reversed:
        raise InputError(f"--from {start} is after --to {stop}", hint="Swap them")


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _check_start(topic: Topic | RemoteTopic, first: Position) -> None:
    if not isinstance(first, int) or first < 0:
        return
    oldest, end = topic.start_offset, topic.next_offset
    if not oldest <= first <= end:
        holds = f"which holds {offsets_text(oldest, end - 1)}" if end > oldest else "which is empty"
        hint = f"Give --from an offset from {oldest} to {end}, earliest, or latest for what comes next"
        raise OffsetOutOfRangeError(f"offset {first} is not in the topic {topic.name}, {holds}", hint=hint)


def settled(topic: Topic | RemoteTopic, position: Position) -> Position:
    """With the last N messages counted back from where the topic ends now."""
    if isinstance(position, int) and position < 0:
        return max(topic.start_offset, topic.next_offset + position)
    return position


# `tidelog consume --subscription`: prints messages of a subscription and acknowledges them once they are written.
#
# Invariants
# - A message is acknowledged after its bytes were passed to the reader of stdout: a reader that exits midway gets the
#   rest, or all of the last piece, again. A message may be shown twice and is never skipped.
# - Without following, it ends with the messages that were ready; messages that are due later stay for later.


_PIECE_MESSAGES = 500
# The most that a subscription delivers without an acknowledgement.
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
    given = next((option for option, value in options.items() if value is not None), None)
    if given is not None:
        raise InputError(f"{given} applies to a subscription", hint="Name one with --subscription")


def consume_subscription(
    session: Session, topic: str, choice: SubscriptionChoice, to_bytes: Callable[[Message], bytes], take_over: bool
) -> None:
    """Shows what the subscription has not acknowledged, and acknowledges it unless told otherwise."""
    if choice.stop is not None:
        raise InputError("--to and --subscription cannot be combined", hint="Limit the count with --max-messages")
    client = session.connect()
    if client is not None:
        from tidelog.cli import remote

        with client:
            remote.consume_subscription(session, client, topic, choice, to_bytes)
        return
    session.look().close()  # a missing directory is not created by a command that only reads
    with session.open() as log:
        require_topic(log, topic)
        require_kept(log, topic)
        require_one_log(log, topic)
        require_ours(log, topic, take_over)
        log.topic(topic, take_over=take_over)
        with _consumer(session, log, topic, choice) as consumer:
            Shower(consumer, to_bytes, choice).show()
            _tell_if_full(session, consumer, choice)


def _consumer(session: Session, log: LogDirectory, name: str, choice: SubscriptionChoice) -> Consumer:
    topic = log.topic(name)
    start = parse_position("--from", choice.start or "earliest")
    check_kind(choice.kind)
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


def check_kind(kind: str | None) -> None:
    """InputError for what is no kind of subscription."""
    from typing import get_args

    kinds = get_args(Kind)
    if kind is not None and kind not in kinds:
        raise InputError(f"--kind {kind!r} is not a kind of subscription", hint=f"Give {', '.join(kinds)}")


def _tell_what_stays(session: Session, known: SubscriptionInfo, choice: SubscriptionChoice) -> None:
    """Notes which options of an existing subscription are ignored, and that its kind changes."""
    if choice.start is not None:
        session.output.note(f"{known.name} exists: it resumes at offset {known.offset}; --from is ignored")
    if choice.kind not in (None, known.kind):
        session.output.note(f"{known.name} changes its kind from {known.kind} to {choice.kind}")


class Shower:
    """Writes messages to stdout piece by piece, at most as many as requested."""

    def __init__(
        self,
        consumer: Consumer,
        to_bytes: Callable[[Message], bytes],
        choice: SubscriptionChoice,
        patience_seconds: float = 0.0,
    ) -> None:
        """`patience_seconds`: how long it waits for the next message where it does not follow."""
        self._consumer = consumer
        self._to_bytes = to_bytes
        self._left = _limit(choice)
        self._acknowledges = choice.acknowledges is not False
        self._timeout = None if choice.follow else patience_seconds

    def show(self) -> None:
        """Until there are no more."""
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
    """How many are shown; without acknowledgements no more than are delivered, rather than waiting forever."""
    if choice.acknowledges is not False:
        return choice.max_messages
    return _MAX_UNACKED if choice.max_messages is None else min(choice.max_messages, _MAX_UNACKED)


def _tell_if_full(session: Session, consumer: Consumer, choice: SubscriptionChoice) -> None:
    """Notes that there are more messages, if more were requested than are delivered."""
    if _limit(choice) != choice.max_messages and consumer.lag.messages > _MAX_UNACKED:
        session.output.note(
            f"only the first {_MAX_UNACKED:,} were shown: no more are delivered without acknowledgements"
        )
