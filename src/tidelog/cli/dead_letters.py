"""`tidelog dlq`: shows dead letters and sends them back.

A topic holds dead letters if it is named `<topic>.<subscription>.dlq`, the default unless a program chose another name,
or if the headers of its newest message say where it came from.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import count, islice
from typing import Annotated

import typer

from tidelog.cli.errors import text_of
from tidelog.cli.output import Row
from tidelog.cli.session import Session, command, command_group
from tidelog.cli.subscriptions import OptionalTopic, TakeOverOption
from tidelog.cli.topic.names import (
    catalog_of,
    exit_if_any_failed,
    require_kept,
    require_ours,
    require_topic,
    show_with_problems,
    topic_names,
)
from tidelog.clock import SystemClock
from tidelog.errors import (
    ConflictError,
    HeldError,
    IngestPendingError,
    InputError,
    MessageTooLargeError,
    TidelogError,
)
from tidelog.log.frame import encode_many
from tidelog.pipeline.address import Root
from tidelog.pipeline.ingest import ingest, open_area
from tidelog.staging.area import StagedPart, StagingArea
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import Message, PayloadEncoder
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.dead_letters import Letter, dead_letter_name
from tidelog.topics.topic import Topic

_SUFFIX = ".dlq"
_TOPIC_COLUMNS = ("topic", "start_offset", "next_offset", "messages", "newest_origin", "newest_subscription", "problem")
_TOPIC_NARROWER = (("topic", "next_offset", "messages", "newest_origin"), ("topic", "messages"))
_LETTER_COLUMNS = (
    *("topic", "offset", "origin_topic", "origin_offset", "subscription", "deliveries", "reason", "timestamp", "bytes"),
    *("nack_reason", "problem"),
)
_LETTER_NARROWER = (
    ("offset", "origin_topic", "origin_offset", "subscription", "deliveries", "nack_reason", "timestamp"),
    ("offset", "origin_topic", "origin_offset", "deliveries", "nack_reason"),
)
_SHORT_REASON = 60
_REPLAYED_COLUMNS = ("into", "messages", "skipped", "first_offset", "last_offset", "problem")


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("List dead letters, and send them back to where they came from.")
    commands: dict[str, Callable[..., None]] = {"list": list_letters, "replay": replay}
    remotes = {"list": "list_letters", "replay": "replay"}
    for name, work in commands.items():
        command(group, name, remote=remotes[name], is_local_beside=True)(work)
    app.add_typer(group, name="dlq")


def list_letters(
    session: Session,
    topic: OptionalTopic = None,
    max_messages: Annotated[
        int, typer.Option("--max-messages", "--max", "-n", metavar="N", min=1, help="Show at most N letters.")
    ] = 1000,
) -> None:
    """Lists the topics with dead letters, or the letters of one. With TOPIC: origin, deliveries and why they were given
    up.

    TOPIC is a topic with dead letters, or one whose subscriptions gave up messages. What is in a letter is shown by
    `tidelog consume`. Looking claims nothing. A topic that cannot be read is listed with its problem, and the exit code
    is 1 then.
    """
    with session.look() as log:
        if topic is None:
            rows = [_topic_row(log, name) for name in topic_names(log) if _has_letters(log, name)]
            show_with_problems(session, rows, _TOPIC_COLUMNS, _TOPIC_NARROWER)
            return
        require_topic(log, topic)
        rows = list(islice(_letter_rows(log, topic), max_messages + 1))
    if len(rows) > max_messages:
        session.output.note(f"there are more than {max_messages}: show them with --max-messages")
    shown = rows[:max_messages] if session.as_json else [_with_short_reason(row) for row in rows[:max_messages]]
    show_with_problems(session, shown, _LETTER_COLUMNS, _LETTER_NARROWER)


def _with_short_reason(row: Row) -> Row:
    """A line of a table has no room for all that a program may say; --json has all of it."""
    reason = row.get("nack_reason")
    if not isinstance(reason, str):
        return row
    line = " ".join(reason.split())
    return {**row, "nack_reason": line if len(line) <= _SHORT_REASON else line[: _SHORT_REASON - 3] + "..."}


def _has_letters(log: LogDirectory, name: str) -> bool:
    """A topic that cannot be read does not hide the others; `tidelog topic list` tells about it."""
    try:
        newest = _newest(log.topic(name))
    except TidelogError:
        return name.endswith(_SUFFIX)
    return name.endswith(_SUFFIX) or (newest is not None and newest.origin_topic is not None)


def _newest(topic: Topic) -> Letter | None:
    newest = topic.next_offset - 1
    if newest < topic.start_offset:
        return None
    return next((Letter(topic.name, message) for message in topic.read(newest, follow=False, on_gap="skip")), None)


def _topic_row(log: LogDirectory, name: str) -> Row:
    try:
        return {**_described(log.topic(name)), "problem": None}
    except TidelogError as error:
        return {"topic": name, "problem": text_of(error)}


def _described(topic: Topic) -> Row:
    newest = _newest(topic)
    start, end = topic.start_offset, topic.next_offset
    return {
        "topic": topic.name,
        "start_offset": start,
        "next_offset": end,
        "messages": max(0, end - start),
        "newest_origin": None if newest is None else newest.origin_topic,
        "newest_subscription": None if newest is None else newest.subscription,
    }


def _letter_rows(log: LogDirectory, name: str) -> Iterator[Row]:
    """The letters in the topic itself, or those that came from it."""
    if _has_letters(log, name):
        yield from ({**letter.row(), "problem": None} for letter in _letters(log, name))
        return
    for source in topic_names(log):
        if not _has_letters(log, source):
            continue
        try:
            for letter in _letters(log, source):
                if letter.origin_topic == name:
                    yield {**letter.row(), "problem": None}
        except TidelogError as error:
            yield {"topic": source, "problem": text_of(error)}


def _letters(log: LogDirectory, name: str) -> Iterator[Letter]:
    messages = log.topic(name).read("earliest", follow=False, on_gap="skip")
    return (Letter(name, message) for message in messages)


def dead_letter_topic_of(log: LogDirectory, topic: str, subscription: str) -> str | None:
    """Where the letters of a subscription are, by the usual name or by what the newest letter of a topic says."""
    names = topic_names(log)
    usual = dead_letter_name(topic, subscription, None)
    return usual if usual in names else next((name for name in names if _is_from(log, name, topic, subscription)), None)


def _is_from(log: LogDirectory, name: str, topic: str, subscription: str) -> bool:
    try:
        newest = _newest(log.topic(name))
    except TidelogError:
        return False
    return newest is not None and (newest.origin_topic, newest.subscription) == (topic, subscription)


def replay(
    session: Session,
    dead_letters: Annotated[str, typer.Argument(metavar="DLQ_TOPIC", help="The topic with the dead letters.")],
    into: Annotated[str | None, typer.Option("--into", metavar="TOPIC", help="Send all of them there instead.")] = None,
    max_messages: Annotated[
        int | None, typer.Option("--max-messages", "--max", "-n", metavar="N", min=1, help="Send at most N letters.")
    ] = None,
    take_over: TakeOverOption = False,
) -> None:
    """Appends dead letters again to the topics that they came from. Each once, however often this is run or killed.

    They are new messages there: at the end, with the current time, without the headers of a dead letter, and with the
    header tidelog-replayed-from. All subscriptions of the topic get them, not only the one that gave them up. The
    letters stay where they are; letters that were sent before are skipped. A letter without an origin, or with one that
    is gone, is a problem: it can be sent with --into, and the exit code is 1.

    A program that has the topics open keeps running: it ingests the letters. If it does not within a minute they are
    committed all the same, and the exit code is 4; they are ingested when the topic is opened the next time.
    """
    from tidelog.cli.pipeline.job import job_root

    with session.look() as log:  # nothing is made by a mistyped path
        named = [dead_letters, *([] if into is None else [into])]
        for name in named:
            require_topic(log, name)
        if take_over:
            claimed(session, named if into is not None else [dead_letters, *_origins(log, dead_letters)])
        for name in named:
            require_open_to_us(log, name)
    with session.look() as log:
        rows = Replay(job_root(session, None), log, log.topic(dead_letters), into).run(max_messages)
    session.output.rows(_REPLAYED_COLUMNS, rows)
    exit_if_any_failed(rows)


def _origins(log: LogDirectory, dead_letters: str) -> list[str]:
    """The topics that the letters in a topic came from, those that are there."""
    origins = {letter.origin_topic for letter in _letters(log, dead_letters)}
    return sorted(name for name in origins if name is not None and name != dead_letters and log.has_topic(name))


# Sends dead letters back, each once into each topic, beside the owners of the topics or without any.
#
# The letters are read and staged for their topics in chunks: a chunk is committed as a version of an application that
# is named after the topic of the letters, and its version is the offset of its last letter. The owner of the topic
# ingests it; if there is none, this process does (see `pipeline/ingest.py`).
#
# Invariants
# - The target records what was sent, in its staging document: the newest version says up to which letter. A chunk is
#   committed only if that has not changed since the chunk was chosen, so two concurrent runs send no letter twice.
# - A chunk is ingested atomically, and the next one is staged after that. What a killed run has committed is ingested,
#   and the next run continues after it.
# - A dead letter topic that was deleted and created again counts from 0 again: its letters are not mistaken for those
#   of the old one. The last letter that was sent is looked up in the target, and if it is a different one, the
#   application gets the next name.


WAIT_SECONDS = 60.0
# The name of an application is shorter than a topic's may be.
_READABLE_LETTERS = 100
_CHUNK_LETTERS = 5000
_CHUNK_BYTES = 4 << 20


def claimed(session: Session, names: Sequence[str]) -> None:
    """Takes topics over from the nodes that own them; those that are this directory's anyway stay as they are."""
    with session.open(runs_in_background=False) as log:
        for name in names:
            log.topic(name, take_over=True)


def require_open_to_us(log: LogDirectory, name: str) -> None:
    """ConflictError for a topic of another node that is not running, or that is sealed: nobody would take letters in,
    or it would be taken from the node that it is meant for."""
    catalog = catalog_of(log, name)
    found = None if catalog is None else catalog.owner()
    if log._tier is not None and found is not None:
        try:
            log._tier.lease.refuse_held(found[0], "topic", log.root)
        except HeldError:
            return
    require_ours(log, name, take_over=False)


class Replay:
    """One run over the letters of a topic. `log` is open for reading only."""

    def __init__(self, root: Root, log: LogDirectory, letters: Topic, into: str | None) -> None:
        self._root = root
        self._log = log
        self._letters = letters
        self._into = into
        self._targets: dict[str | None, _Target] = {}

    def run(self, max_messages: int | None) -> list[Row]:
        """Sends letters, at most the given number; returns a row for each topic that they belong to."""
        sent = 0
        with ExitStack() as areas:
            for message in self._letters.read("earliest", follow=False, on_gap="skip"):
                if sent == max_messages:
                    break
                letter = Letter(self._letters.name, message)
                sent += self._target(self._into or letter.origin_topic, areas).send(letter)
            for target in self._targets.values():
                target.hand_over()
        return [target.row() for target in self._targets.values()]

    def _target(self, name: str | None, areas: ExitStack) -> _Target:
        if name not in self._targets:
            target = self._targets[name] = _Target(self._root, name)
            try:
                topic = self._checked(name)
                area = areas.enter_context(open_area(self._root, parse_topic_name(topic.name)))
                target.open(area, topic, self._letters)
            except IngestPendingError:
                raise  # what an earlier run sent is on its way: no reason to send it elsewhere
            except TidelogError as error:
                target.problem = f"{text_of(error)}; --into sends the letters elsewhere"
        return self._targets[name]

    def _checked(self, name: str | None) -> Topic:
        if name is None:
            raise InputError("the letter has no header that names its origin")
        if name == self._letters.name:
            raise InputError("dead letters cannot be sent to the topic that they are in")
        require_topic(self._log, name)
        require_kept(self._log, name)
        require_open_to_us(self._log, name)
        return self._log.topic(name)


class _Target:
    """A topic that letters go to, or one that cannot take them: then they stay."""

    def __init__(self, root: Root, name: str | None) -> None:
        self.problem: str | None = None
        self._root = root
        self._name = name
        self._area: StagingArea | None = None
        self._app = ""
        self._handed_over = -1
        self._max_message_bytes = root.load().log.max_message_bytes
        self._payload = PayloadEncoder(SystemClock().now_us).one
        self._chunk: list[bytes] = []
        self._chunk_bytes = 0
        self._last_in_chunk = -1
        self._first_offset: int | None = None
        self._last_offset: int | None = None
        self._sent = 0
        self._skipped = 0

    def open(self, area: StagingArea, topic: Topic, letters: Topic) -> None:
        """Finds out what was sent before."""
        for generation in count():
            self._app = _app_name(letters.name, generation)
            self._handed_over = self._last_in_chunk = area.newest(self._app)
            if self._handed_over < 0 or self._are_these(area, topic, letters):
                break
        self._area = area

    def _are_these(self, area: StagingArea, topic: Topic, letters: Topic) -> bool:
        """Whether the last letter that was sent is the one that is there now. What retention took is believed."""
        version = self._handed_over
        status = ingest(self._root, parse_topic_name(topic.name), area, self._app, version, WAIT_SECONDS)
        if version >= letters.next_offset:
            return False
        letter = _at(letters, version)
        if letter is None or status.next_offset is None:
            return True
        found = _at(topic, status.next_offset - 1)
        return found is None or _content(found) == _content(Letter(letters.name, letter).reborn())

    def send(self, letter: Letter) -> bool:
        """Whether it goes out in this run."""
        if self._area is None or letter.offset <= self._last_in_chunk:
            self._skipped += 1
            return False
        payload = self._payload(letter.reborn(), None, None, None)
        if len(payload) > self._max_message_bytes:
            raise MessageTooLargeError(
                f"the letter at offset {letter.offset} has {len(payload)} bytes, and {self._name} takes "
                f"{self._max_message_bytes}",
                hint="Raise max_message_bytes where the topic is opened, and here",
            )
        self._chunk.append(payload)
        self._chunk_bytes += len(payload)
        self._last_in_chunk = letter.offset
        if len(self._chunk) >= _CHUNK_LETTERS or self._chunk_bytes >= _CHUNK_BYTES:
            self.hand_over()
        return True

    def hand_over(self) -> None:
        """The chunk is in the topic when this returns; IngestPendingError when its owner does not take it in."""
        if self._area is None or self._name is None or not self._chunk:
            return
        app, version = self._app, self._last_in_chunk
        with self._area.open_part(app, version, 0, secrets.token_hex(8)) as writer:
            writer.write(encode_many(0, self._chunk).buffer, len(self._chunk))
        assert writer.part is not None
        self._commit(self._area, version, writer.part)
        self._handed_over = version
        status = ingest(self._root, parse_topic_name(self._name), self._area, app, version, WAIT_SECONDS)
        self._count(status.first_offset, status.next_offset)

    def _commit(self, area: StagingArea, version: int, part: StagedPart) -> None:
        """ConflictError when another run has sent letters since these were chosen: this chunk is not sent then."""
        try:
            if area.commit(self._app, version, [part], after=self._handed_over) != "committed":
                area.drop(self._app, version, [part])
                raise ConflictError(f"another run sends these letters to {self._name}", hint="Run it again")
        except TidelogError:
            with suppress(TidelogError):
                area.discard(self._app, version, [part.key])
            raise

    def _count(self, first_offset: int | None, next_offset: int | None) -> None:
        if self._first_offset is None:
            self._first_offset = first_offset
        self._last_offset = None if next_offset is None else next_offset - 1
        self._sent += len(self._chunk)
        self._chunk, self._chunk_bytes = [], 0

    def row(self) -> Row:
        return {
            "into": self._name,
            "messages": self._sent,
            "skipped": self._skipped,
            "first_offset": self._first_offset,
            "last_offset": self._last_offset,
            "problem": self.problem,
        }


def _app_name(letters: str, generation: int) -> str:
    digest = hashlib.blake2b(letters.encode(), digest_size=8).hexdigest()
    return f"dlq-replay {letters[:_READABLE_LETTERS]} {digest} {generation}"


def _content(message: Message) -> tuple[bytes | None, bytes | None, dict[str, bytes]]:
    return message.value, message.key, message.headers


def _at(topic: Topic, offset: int) -> Message | None:
    if not topic.start_offset <= offset < topic.next_offset:
        return None
    return next(iter(topic.read(offset, offset + 1, follow=False, on_gap="skip")), None)
