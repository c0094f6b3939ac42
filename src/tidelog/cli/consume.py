"""`tidelog consume`: messages of a topic on stdout.

The topic is opened for reading only, so another process may own it. What is there already is written in large pieces;
what comes while following is flushed message by message. With a subscription it is another matter:
`consume_subscription.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple

import typer

from tidelog.cli.session import Session, command

if TYPE_CHECKING:
    from tidelog.log import Position
    from tidelog.topics.message import Message
    from tidelog.topics.reading import OnGap
    from tidelog.topics.topic import Topic

_PIECE_BYTES = 256 << 10


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "consume")(consume)


def consume(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name.")],
    start: Annotated[
        str | None,
        typer.Option(
            *("--from", "--start"), metavar="POSITION", help="earliest (default), latest, an offset, a time, or -N."
        ),
    ] = None,
    stop: Annotated[
        str | None, typer.Option("--to", metavar="POSITION", help="Where to end; that message is not shown any more.")
    ] = None,
    max_messages: Annotated[
        int | None, typer.Option("--max-messages", "--max", "-n", metavar="N", min=0, help="End after so many.")
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
        str | None, typer.Option("--subscription", "-s", metavar="NAME", help="Go on where it was left; made when new.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="exclusive (default), failover, shared or key_shared.")
    ] = None,
    acknowledges: Annotated[
        bool | None, typer.Option("--ack/--no-ack", help="Whether what was shown comes no more.", show_default=False)
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="With --subscription: also if another node owns the topic.")
    ] = False,
) -> None:
    r"""Writes the messages of TOPIC to stdout, values only unless told otherwise.

    Works while another process produces; with --follow it shows what that process writes, until Ctrl-C. A POSITION is
    earliest, latest, an offset, an ISO 8601 time (UTC unless it says otherwise), or -N for the last N messages.

    In a TEMPLATE %o is the offset, %t the time, %T the time in Unix milliseconds, %k the key, %v the value, %h the
    headers, %s the size of the value, %% a percent sign; \n, \t, \r, \0 and \\ are escapes. With --json a line is an
    object; a key, value or header that is not UTF-8 is base64 there, marked by key_encoding and so on.

    With --subscription it shows what that subscription has not acknowledged, and acknowledges it once it is written to
    stdout: what was not written comes again. That needs the topic for itself. --from says where a new one begins.
    """
    from tidelog.cli.consume_subscription import SubscriptionChoice, consume_subscription, refuse_without_name

    to_bytes = _converter(session, topic, template, null)
    if subscription is not None:
        choice = SubscriptionChoice(subscription, kind, start, stop, max_messages, follow, acknowledges, skip_gaps)
        consume_subscription(session, topic, choice, to_bytes, take_over)
        return
    refuse_without_name({"--kind": kind, "--ack or --no-ack": acknowledges, "--take-over": take_over or None})
    first, last = parse_position("--from", start or "earliest"), None if stop is None else parse_position("--to", stop)
    _check_order(start or "earliest", first, stop, last)
    _consume(session, topic, first, last, _Choice(to_bytes, skip_gaps, max_messages, follow))


class _Choice(NamedTuple):
    """In which form, and how many."""

    to_bytes: Callable[[Message], bytes]
    skip_gaps: bool
    max_messages: int | None
    follow: bool


def _consume(session: Session, topic: str, first: Position, last: Position | None, choice: _Choice) -> None:
    from tidelog.cli.topic_names import require_topic

    with session.look() as log:
        require_topic(log, topic)
        opened = log.topic(topic)
        _check_start(opened, first)
        on_gap: OnGap = "skip" if choice.skip_gaps else "raise"
        writer = _Writer(opened, choice.to_bytes, on_gap, choice.max_messages)
        end = opened.next_offset
        writer.write(settled(opened, first), end if last is None else settled(opened, last), follow=False)
        if choice.follow and (last is None or isinstance(last, int)):
            writer.write(end, last, follow=True)


class _Writer:
    """Brings messages to stdout, and no more of them than were asked for."""

    def __init__(
        self, topic: Topic, to_bytes: Callable[[Message], bytes], on_gap: OnGap, max_messages: int | None
    ) -> None:
        self._topic = topic
        self._to_bytes = to_bytes
        self._on_gap: OnGap = on_gap
        self._left = max_messages

    def write(self, start: Position, stop: Position | None, *, follow: bool) -> None:
        """Messages from one position to another: large pieces of what is there, each at once of what is waited for."""
        if self._left == 0:
            return
        messages = self._topic.read(start, stop, follow=follow, on_gap=self._on_gap)
        written = 0
        with _Pieces(sys.stdout.buffer, 0 if follow else _PIECE_BYTES) as pieces:
            for message in islice(messages, self._left):
                pieces.add(self._to_bytes(message))
                written += 1
        if self._left is not None:
            self._left -= written


class _Pieces:
    """Gathers bytes and writes them in pieces of at least `piece_bytes`; the rest at the end, whatever ended it."""

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


def _converter(session: Session, topic: str, template: str | None, null: bool) -> Callable[[Message], bytes]:
    from tidelog.cli.message_format import compile_template, json_lines
    from tidelog.errors import InputError

    if session.as_json:
        if template is not None or null:
            raise InputError("--json cannot be combined with --format or --null")
        return json_lines(topic)
    if template is not None:
        return compile_template(template)
    end = b"\x00" if null else b"\n"
    return lambda message: message.value + end


def parse_position(option: str, text: str) -> Position:
    """A position as the log knows it; the last N messages are the number -N."""
    from tidelog.errors import InputError

    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.removeprefix("-").isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        hint = "Give earliest, latest, an offset, -N for the last N, or a time such as 2026-01-31T12:00:00Z"
        raise InputError(f"{option} {text!r} is not a position", hint=hint) from None


def _check_order(start: str, first: Position, stop: str | None, last: Position | None) -> None:
    """A range that ends before it begins is a mistake; positions of two kinds can only be compared by the topic."""
    from tidelog.errors import InputError

    if isinstance(first, int) and isinstance(last, int):
        is_reversed = first > last and (first < 0) == (last < 0)
    else:
        is_reversed = isinstance(first, datetime) and isinstance(last, datetime) and _utc(first) > _utc(last)
    if is_reversed:
        raise InputError(f"--from {start} lies behind --to {stop}", hint="Exchange them")


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _check_start(topic: Topic, first: Position) -> None:
    from tidelog.errors import OffsetOutOfRangeError, offsets_text

    if not isinstance(first, int) or first < 0:
        return
    oldest, end = topic.start_offset, topic.next_offset
    if not oldest <= first <= end:
        holds = f"which holds {offsets_text(oldest, end - 1)}" if end > oldest else "which is empty"
        hint = f"Give --from an offset from {oldest} to {end}, earliest, or latest for what comes next"
        raise OffsetOutOfRangeError(f"offset {first} is not in the topic {topic.name}, {holds}", hint=hint)


def settled(topic: Topic, position: Position) -> Position:
    """With the last N messages counted back from where the topic ends now."""
    if isinstance(position, int) and position < 0:
        return max(topic.start_offset, topic.next_offset + position)
    return position
