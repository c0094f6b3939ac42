"""`tidelog produce`: lines become messages.

Invariants
- What has arrived is appended at once, in one batch: a typed line is a message as soon as Enter is pressed, and a file
  of a million lines is a few hundred batches.
- A record is the bytes between two separators, untouched: no decoding, no stripping. An empty line is an empty message.
- When something fails, what was accepted before stays accepted, and the note says how much that is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from tidelog.cli.session import Session, command

if TYPE_CHECKING:
    from tidelog.topics.message import Message
    from tidelog.topics.topic import Topic

_READ_BYTES = 1 << 20
# Well below what the log lets wait at once, so that a batch never has to be split by the log.
_BATCH_MESSAGES = 4096

ToMessage = Callable[[bytes], "bytes | Message"]


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "produce")(produce)


def produce(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name; made when absent.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Where the lines come from [default: stdin].")
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="SEP", help="What stands between the key and the value of a line.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header of every message.")
    ] = None,
    sync: Annotated[bool, typer.Option("--sync", help="Sync to the disk before reading on.")] = False,
    null: Annotated[bool, typer.Option("--null", "-0", help="Messages end with a NUL byte, not a line end.")] = False,
) -> None:
    """Appends a message a line from FILE or stdin to TOPIC.

    Bytes are taken as they are. Everything is on the disk when the command ends; a note on stderr (a document on stdout
    with --json) says how many messages there were and which offsets they got. With --sync what was read is on the disk
    before more is read.

    \b
    tidelog produce shop/orders orders.jsonl
    echo 'c7:two apples' | tidelog produce shop/orders --key-separator : -H source=till
    find . -print0 | tidelog produce files/names --null
    """
    from tidelog.topics.names import parse_topic_name

    parse_topic_name(topic)  # before anything is made for it
    to_message = message_maker(key_separator, header or [])
    separator = b"\x00" if null else b"\n"
    count = _Count()
    with _source(session, file) as (stream, on_read), session.open() as log:
        target = log.topic(topic)
        try:
            for records in split_records(stream, separator, session.settings.log.max_message_bytes, on_read):
                _append(target, records, to_message, sync, count)
            target.flush()
        except BaseException:
            if count.messages:
                session.output.note(count.sentence("accepted", topic))
            raise
    _tell(session, topic, count)


class _Count:
    """How many messages were accepted, and where they are."""

    def __init__(self) -> None:
        self.messages = 0
        self.first_offset: int | None = None
        self.last_offset: int | None = None

    def add(self, offsets: Sequence[int]) -> None:
        if offsets:
            self.messages += len(offsets)
            self.first_offset = offsets[0] if self.first_offset is None else self.first_offset
            self.last_offset = offsets[-1]

    def sentence(self, verb: str, topic: str) -> str:
        if not self.messages:
            return f"{verb} no messages to {topic}"
        noun = "message" if self.messages == 1 else "messages"
        return f"{verb} {self.messages} {noun} to {topic}: offsets {self.first_offset} to {self.last_offset}"


def _tell(session: Session, topic: str, count: _Count) -> None:
    if not session.as_json:
        session.output.note(count.sentence("produced", topic))
        return
    session.output.document(
        {
            "topic": topic,
            "messages": count.messages,
            "first_offset": count.first_offset,
            "last_offset": count.last_offset,
        }
    )


def _append(topic: Topic, records: Sequence[bytes], to_message: ToMessage, sync: bool, count: _Count) -> None:
    """Appends in batches; a record that cannot be a message ends it, after those before it were appended."""
    from tidelog.errors import InputError

    for start in range(0, len(records), _BATCH_MESSAGES):
        batch = records[start : start + _BATCH_MESSAGES]
        try:
            count.add(topic.append_many(list(map(to_message, batch)), sync=sync))
        except InputError:
            _append_up_to_the_culprit(topic, batch, to_message, sync, count)


def _append_up_to_the_culprit(
    topic: Topic, records: Sequence[bytes], to_message: ToMessage, sync: bool, count: _Count
) -> None:
    """None of the batch was accepted; one by one, the one that is wrong can be named."""
    from tidelog.errors import InputError

    for record in records:
        try:
            count.add([topic.append(to_message(record), sync=sync)])
        except InputError as error:
            raise InputError(f"record {count.messages + 1}: {error.message}", hint=error.hint) from None


@contextmanager
def _source(session: Session, path: Path | None) -> Iterator[tuple[BinaryIO, Callable[[int], None]]]:
    """The stream, and whom to tell how far it has been read."""
    if path is None or str(path) == "-":
        yield sys.stdin.buffer, lambda done: None
        return
    with path.open("rb") as stream, session.output.progress(f"producing {path.name}", path.stat().st_size) as on_read:
        yield stream, on_read


def split_records(
    stream: BinaryIO, separator: bytes, max_bytes: int, on_read: Callable[[int], None]
) -> Iterator[list[bytes]]:
    """Whole records, as many at a time as have arrived; the last one needs no separator behind it."""
    from tidelog.errors import MessageTooLargeError

    begun: list[bytes] = []
    begun_bytes = done = 0
    while chunk := stream.read1(_READ_BYTES):  # type: ignore[attr-defined]
        done += len(chunk)
        first, *others = chunk.split(separator)
        begun.append(first)
        begun_bytes += len(first)
        if others:
            rest = others.pop()
            yield [b"".join(begun), *others]
            begun, begun_bytes = [rest], len(rest)
        if begun_bytes > max_bytes:
            hint = "Split it, raise max_message_bytes, or use --null if lines are not what separates the messages"
            raise MessageTooLargeError(f"a record is longer than max_message_bytes ({max_bytes})", hint=hint)
        on_read(done)
    if begun_bytes:
        yield [b"".join(begun)]


def message_maker(key_separator: str | None, headers: Sequence[str]) -> ToMessage:
    """What turns a record into a message; bytes stay bytes where there is nothing to add."""
    from tidelog.errors import InputError
    from tidelog.topics.message import Message

    fixed = parse_headers(headers)
    if key_separator == "":
        raise InputError("the key separator is empty", hint="Give it one character or more")
    if key_separator is None:
        return (lambda record: Message(record, headers=fixed)) if fixed else (lambda record: record)
    separator = key_separator.encode("utf-8", "surrogateescape")

    def split(record: bytes) -> Message:
        key, found, value = record.partition(separator)
        if not found:
            raise InputError(f"there is no key separator {key_separator!r}", hint="The records before it were produced")
        return Message(value, key=key, headers=fixed)

    return split


def parse_headers(headers: Sequence[str]) -> dict[str, bytes]:
    """`NAME=VALUE` each; a value may contain another `=`."""
    from tidelog.errors import InputError

    parsed: dict[str, bytes] = {}
    for text in headers:
        name, found, value = text.partition("=")
        if not found or not name:
            raise InputError(f"the header {text!r} is not NAME=VALUE", hint="For example: -H source=till")
        if name in parsed:
            raise InputError(f"the header {name!r} is given twice")
        parsed[name] = value.encode("utf-8", "surrogateescape")
    return parsed
