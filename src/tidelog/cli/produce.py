"""`tidelog produce`: appends lines as messages.

Invariants
- Input is appended as soon as it arrives, in one batch: a typed line is a message as soon as Enter is pressed, and a
  file of a million lines is a few hundred batches.
- A record is the bytes between two separators, unchanged: no decoding, no stripping. An empty line is an empty message.
- After an error or Ctrl-C, everything accepted before is synced, and the note says how much that is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tidelog.cli.errors import command_hint
from tidelog.cli.output import counted, from_json_line
from tidelog.cli.session import HeldOption, Session, command
from tidelog.cli.topic.names import require_kept
from tidelog.errors import InputError, MessageTooLargeError, RetryError, TidelogError, offsets_text
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import Message
from tidelog.topics.names import parse_topic_name
from tidelog.topics.partitioned import PartitionedTopic
from tidelog.topics.topic import Topic

_READ_BYTES = 1 << 20
# Well below what the log lets wait at once, so that a batch never has to be split by the log.
_BATCH_MESSAGES = 4096

ToMessage = Callable[[bytes], "bytes | Message"]


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "produce", remote="produce")(produce)


def produce(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/name; made when absent.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", readable=False, help="Where the lines come from [default: stdin]."),
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(metavar="SEP", help="What stands between the key and the value of a line.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header of every message.")
    ] = None,
    sync: Annotated[bool, typer.Option("--sync", help="Sync to the disk before reading on.")] = False,
    null: Annotated[bool, typer.Option("--null", "-0", help="Messages end with a NUL byte, not a line end.")] = False,
    no_ship: Annotated[
        bool, typer.Option("--no-ship", help="Leave it to the owner, or to `topic ship`, to bring it to the store.")
    ] = False,
    from_json: Annotated[
        bool, typer.Option("--from-json", help="Lines are messages as `consume --json` writes them.")
    ] = False,
    partition: Annotated[
        int | None, typer.Option("--partition", metavar="N", help="The partition, instead of that of the key.")
    ] = None,
    take_over: HeldOption = False,
) -> None:
    """Appends a message a line from FILE or stdin to TOPIC.

    Bytes are taken as they are. Everything is on the disk when the command ends, and in the store if there is one; a
    note on stderr (a document on stdout with --json) says how many messages there were and which offsets they got. With
    --sync what was read is on the disk before more is read. Beside `tidelog serve` the server appends, and ships as it
    always does. With --from-json a line gives key, headers and time too;
    offsets are assigned again. A topic that another node has open is refused: produce there, or say --take-over.

    \b
    tidelog produce shop/orders orders.jsonl
    echo 'c7:two apples' | tidelog produce shop/orders --key-separator :
    find . -print0 | tidelog produce files/names --null
    """
    parse_topic_name(topic)  # before anything is made for it
    to_message = json_reader(key_separator, header, null) if from_json else message_maker(key_separator, header or [])
    separator = b"\x00" if null else b"\n"
    with source(session, file) as (stream, on_read), session.open() as log:
        require_kept(log, topic)  # a live topic of this process has no readers
        opened: Topic | PartitionedTopic = log.topic(topic, reliable=True, take_over=take_over)
        pieces = split_records(stream, separator, session.settings.log.max_message_bytes, on_read)
        if isinstance(opened, PartitionedTopic) and partition is None:
            _spread(session, opened, pieces, to_message, sync, no_ship or log._tier is None)
            return
        target = opened.partition(partition or 0)
        count = _Count(target)
        try:
            for records in pieces:
                append_records(target, records, to_message, sync, count.accepted)
            target.flush()
        except BaseException as error:
            _tell_end(session, count, error)
            raise
        _tell(session, count)
        if not no_ship:
            _ship(session, log, target)


def _spread(
    session: Session,
    topic: PartitionedTopic,
    pieces: Iterator[list[bytes]],
    to_message: ToMessage,
    sync: bool,
    no_ship: bool,
) -> None:
    """Appends to the partitions of the keys; a record that cannot be a message ends it."""
    done: Counter[int] = Counter()
    try:
        for records in pieces:
            for start in range(0, len(records), _BATCH_MESSAGES):
                batch = list(map(to_message, records[start : start + _BATCH_MESSAGES]))
                done.update(offset.partition for offset in topic.append_many(batch, sync=sync))
        topic.flush()
        if not no_ship:
            topic.ship()
    finally:
        by_partition = {str(number): done[number] for number in range(topic.partitions)}
        if session.as_json:
            session.output.document({"topic": topic.name, "messages": done.total(), "partitions": by_partition})
        else:
            where = counted(len(done), "partition")
            session.output.note(f"produced {counted(done.total(), 'message')} to {where} of {topic.name}")


def _ship(session: Session, log: LogDirectory, topic: Topic) -> None:
    """Ships at once, because no process does later; if the store does not answer, the messages stay on the disk."""
    if log._tier is None:
        return
    try:
        with session.output.progress(f"shipping {topic.name}", topic.next_offset - topic.shipped_offset):
            topic.ship()
    except RetryError as error:
        waiting = topic.next_offset - topic.shipped_offset
        session.output.note(f"the store was not reached, {waiting} messages are on this disk only: {error.message}")
        session.output.note(session.pasteable(f"hint: `tidelog topic ship {topic.name}` ships them later"))


class _Count:
    """How many messages this run has put on the disk, and which offsets they got: only this process appends."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self._first_offset = topic.next_offset

    @property
    def accepted(self) -> int:
        return self.topic.next_offset - self._first_offset

    @property
    def on_disk(self) -> range:
        return range(self._first_offset, max(self._first_offset, self.topic.durable_offset))

    @property
    def waiting(self) -> int:
        """Accepted, and not on the disk."""
        return self.topic.next_offset - self.on_disk.stop

    def sentence(self) -> str:
        offsets = self.on_disk
        if not offsets:
            return f"produced no messages to {self.topic.name}"
        noun = "message" if len(offsets) == 1 else "messages"
        where = offsets_text(offsets[0], offsets[-1])
        return f"produced {len(offsets)} {noun} to {self.topic.name}: {where}"


def _tell_end(session: Session, count: _Count, error: BaseException) -> None:
    """What of the input is on the disk although the command did not get to its end."""
    with suppress(TidelogError):  # the disk may be what failed; then the error says so
        count.topic.flush()
    is_interrupted = isinstance(error, KeyboardInterrupt)
    if count.on_disk or is_interrupted:
        session.output.note(count.sentence() + (" (interrupted)" if is_interrupted else ""))
    if count.waiting:
        session.output.note(f"{counted(count.waiting, 'more message')} accepted, and not on the disk")


def _tell(session: Session, count: _Count) -> None:
    offsets = count.on_disk
    if not session.as_json:
        session.output.note(count.sentence())
        return
    session.output.document(
        {
            "topic": count.topic.name,
            "partition": count.topic._partition,
            "messages": len(offsets),
            "first_offset": offsets[0] if offsets else None,
            "last_offset": offsets[-1] if offsets else None,
        }
    )


def append_records(topic: Topic, records: Sequence[bytes], to_message: ToMessage, sync: bool, done: int) -> None:
    """Appends in batches; a record that cannot be a message ends it, after those before it were appended."""
    for start in range(0, len(records), _BATCH_MESSAGES):
        batch = records[start : start + _BATCH_MESSAGES]
        try:
            topic.append_many(list(map(to_message, batch)), sync=sync)
        except InputError:
            _append_up_to_the_culprit(topic, batch, to_message, done + start)


def _append_up_to_the_culprit(topic: Topic, records: Sequence[bytes], to_message: ToMessage, done: int) -> None:
    """None of the batch was accepted; one by one, the one that is wrong can be named. What is before it is synced."""
    for number, record in enumerate(records, done + 1):
        try:
            topic.append(to_message(record))
        except InputError as error:
            before = "The records before it were produced" if number > 1 else None
            raise InputError(f"record {number}: {error.message}", hint=command_hint(error) or before) from None


@contextmanager
def source(session: Session, path: Path | None) -> Iterator[tuple[BinaryIO, Callable[[int], None]]]:
    """The stream, and whom to tell how far it has been read."""
    if path is None or str(path) == "-":
        yield sys.stdin.buffer, lambda done: None
        return
    with path.open("rb") as stream, session.output.progress(f"producing {path.name}", path.stat().st_size) as on_read:
        yield stream, on_read


def split_records(
    stream: BinaryIO, separator: bytes, max_bytes: int, on_read: Callable[[int], None]
) -> Iterator[list[bytes]]:
    """Whole records, as many at a time as have arrived; the last one needs no separator after it."""
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
            hint = "Split it, raise max_message_bytes, or use --null if messages do not end with a line end"
            raise MessageTooLargeError(f"a record is longer than max_message_bytes ({max_bytes})", hint=hint)
        on_read(done)
    if begun_bytes:
        yield [b"".join(begun)]


def json_reader(key_separator: str | None, header: Sequence[str] | None, null: bool) -> ToMessage:
    """What turns a line of JSON into a message; InputError for options that it has no use for."""
    if key_separator is not None or header or null:
        raise InputError("--from-json cannot be combined with --key-separator, --header or --null")
    return from_json_line


def message_maker(key_separator: str | None, headers: Sequence[str]) -> ToMessage:
    """What turns a record into a message; bytes stay bytes where there is nothing to add."""
    fixed = parse_headers(headers)
    if key_separator == "":
        raise InputError("the key separator is empty", hint="Give it one character or more")
    if key_separator is None:
        return (lambda record: Message(record, headers=fixed)) if fixed else (lambda record: record)
    separator = key_separator.encode("utf-8", "surrogateescape")

    def split(record: bytes) -> Message:
        key, found, value = record.partition(separator)
        if not found:
            raise InputError(f"there is no key separator {key_separator!r}")
        return Message(value, key=key, headers=fixed)

    return split


def parse_headers(headers: Sequence[str]) -> dict[str, bytes]:
    """`NAME=VALUE` each; a value may contain another `=`."""
    parsed: dict[str, bytes] = {}
    for text in headers:
        name, found, value = text.partition("=")
        if not found or not name:
            raise InputError(f"the header {text!r} is not NAME=VALUE", hint="For example: -H source=till")
        if name in parsed:
            raise InputError(f"the header {name!r} is given twice")
        parsed[name] = value.encode("utf-8", "surrogateescape")
    return parsed
