"""`tidelog dlq`: dead letters, seen and sent back.

A topic has dead letters when it is called `<topic>.<subscription>.dlq`, as it is unless a program chose another name,
or when its newest message says in its headers where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.session import Session, command, command_group
from tidelog.cli.sub import OptionalTopic, TakeOverOption

if TYPE_CHECKING:
    from tidelog.cli.dlq_letter import Letter
    from tidelog.cli.output import Row
    from tidelog.topics.storage import LogDirectory
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
    for name, work in commands.items():
        command(group, name)(work)
    app.add_typer(group, name="dlq")


def list_letters(
    session: Session,
    topic: OptionalTopic = None,
    max_messages: Annotated[
        int, typer.Option("--max-messages", "--max", "-n", metavar="N", min=1, help="Show so many letters at most.")
    ] = 1000,
) -> None:
    """Lists the topics with dead letters; with TOPIC its letters: origin, deliveries and why they were given up.

    TOPIC is a topic with dead letters, or one whose subscriptions gave up messages. What is in a letter is shown by
    `tidelog consume`. Looking claims nothing. A topic that cannot be read is listed with its problem, and the exit code
    is 1 then.
    """
    from tidelog.cli.topic_names import require_topic, topic_names

    with session.look() as log:
        if topic is None:
            rows = [_topic_row(log, name) for name in topic_names(log) if _has_letters(log, name)]
            _show(session, rows, _TOPIC_COLUMNS, _TOPIC_NARROWER)
            return
        require_topic(log, topic)
        rows = list(islice(_letter_rows(log, topic), max_messages + 1))
    if len(rows) > max_messages:
        session.output.note(f"there are more than {max_messages}: show them with --max-messages")
    _show(session, rows[:max_messages], _LETTER_COLUMNS, _LETTER_NARROWER)


def _show(session: Session, rows: list[Row], columns: Sequence[str], narrower: Sequence[Sequence[str]]) -> None:
    from tidelog.cli.topic_choice import exit_if_any_failed

    problems = [row for row in rows if row["problem"] is not None]
    if session.as_json:
        session.output.document(rows)
    else:
        shown = [_with_short_reason(row) for row in rows]
        session.output.table(columns if problems else columns[:-1], shown, narrower=narrower)
        for row in problems:
            session.output.note(f"problem: {row['topic']}: {row['problem']}")
    exit_if_any_failed(rows)


def _with_short_reason(row: Row) -> Row:
    """A line of a table has no room for all that a program may say; --json has all of it."""
    reason = row.get("nack_reason")
    if not isinstance(reason, str):
        return row
    line = " ".join(reason.split())
    return {**row, "nack_reason": line if len(line) <= _SHORT_REASON else line[: _SHORT_REASON - 3] + "..."}


def _has_letters(log: LogDirectory, name: str) -> bool:
    """A topic that cannot be read does not hide the others; `tidelog topic list` tells about it."""
    from tidelog.errors import TidelogError

    try:
        newest = _newest(log.topic(name))
    except TidelogError:
        return name.endswith(_SUFFIX)
    return name.endswith(_SUFFIX) or (newest is not None and newest.origin_topic is not None)


def _newest(topic: Topic) -> Letter | None:
    from tidelog.cli.dlq_letter import Letter

    newest = topic.next_offset - 1
    if newest < topic.start_offset:
        return None
    return next((Letter(topic.name, message) for message in topic.read(newest, follow=False, on_gap="skip")), None)


def _topic_row(log: LogDirectory, name: str) -> Row:
    from tidelog.cli.errors import text_of
    from tidelog.errors import TidelogError

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
    from tidelog.cli.errors import text_of
    from tidelog.cli.topic_names import topic_names
    from tidelog.errors import TidelogError

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
    from tidelog.cli.dlq_letter import Letter

    messages = log.topic(name).read("earliest", follow=False, on_gap="skip")
    return (Letter(name, message) for message in messages)


def dead_letter_topic_of(log: LogDirectory, topic: str, subscription: str) -> str | None:
    """Where the letters of a subscription are, by the usual name or by what the newest letter of a topic says."""
    from tidelog.cli.topic_names import topic_names
    from tidelog.topics.dead_letters import dead_letter_name

    names = topic_names(log)
    usual = dead_letter_name(topic, subscription, None)
    return usual if usual in names else next((name for name in names if _is_from(log, name, topic, subscription)), None)


def _is_from(log: LogDirectory, name: str, topic: str, subscription: str) -> bool:
    from tidelog.errors import TidelogError

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
        int | None, typer.Option("--max-messages", "--max", "-n", metavar="N", min=1, help="Send so many at most.")
    ] = None,
    take_over: TakeOverOption = False,
) -> None:
    """Appends dead letters again to the topics that they came from, each once, however often this is run or killed.

    They are new messages there: at the end, with the time of now, without the headers of a dead letter, and with the
    header tidelog-replayed-from. All subscriptions of the topic get them, not only the one that gave them up. The
    letters stay where they are; what was sent before is skipped. A letter without an origin, or with one that is gone,
    is a problem: it can be sent with --into, and the exit code is 1.
    """
    from tidelog.cli.dlq_replay import Replay
    from tidelog.cli.topic_choice import exit_if_any_failed, require_ours
    from tidelog.cli.topic_names import require_topic

    session.look().close()  # nothing is made by a mistyped path
    with session.open(runs_in_background=False) as log:
        for name in (dead_letters, *([] if into is None else [into])):
            require_topic(log, name)
            require_ours(log, name, take_over)
        rows = Replay(log, log.topic(dead_letters, take_over=take_over), into, take_over).run(max_messages)
    session.output.rows(_REPLAYED_COLUMNS, rows)
    exit_if_any_failed(rows)
