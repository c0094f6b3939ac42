"""`tidelog sub`: what subscriptions there are, how far they are, and moving or deleting one.

Invariants
- Looking claims nothing: it works beside whoever owns the topic, and shows the positions that are stored, which are a
  few seconds behind where the owner is.
- Moving and deleting are the owner's: a topic that another node owns is refused, unless it is to be taken over.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.confirming import is_confirmed
from tidelog.cli.consume import parse_position, settled
from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session, command, command_group
from tidelog.cli.topic_show import TopicArgument

if TYPE_CHECKING:
    from tidelog.cli.output import Row
    from tidelog.topics.storage import LogDirectory
    from tidelog.topics.subscription_registry import SubscriptionInfo
    from tidelog.topics.topic import Topic

_COLUMNS = ("topic", "subscription", "kind", "offset", "acked_above", "lag_messages", "moved", "problem")
_NARROWER = (
    ("topic", "subscription", "kind", "offset", "lag_messages", "moved"),
    ("topic", "subscription", "offset", "lag_messages"),
)
_LAG_COLUMNS = ("topic", "subscription", "lag_messages", "lag_seconds", "oldest", "problem")
_LAG_NARROWER = (("topic", "subscription", "lag_messages", "lag_seconds"),)

OptionalTopic = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="namespace/name; all without it.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")]
TakeOverOption = Annotated[
    bool, typer.Option("--take-over", help="Also if another node owns the topic, which is fenced, or it is sealed.")
]
_Describe = Callable[["Topic", "SubscriptionInfo"], "Row"]


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("List, describe, move and delete subscriptions, and see how far they are behind.")
    commands: dict[str, Callable[..., None]] = {
        "list": list_subscriptions,
        "describe": describe,
        "lag": lag,
        "delete": delete,
    }
    for name, work in commands.items():
        command(group, name)(work)
    command(group, "seek", takes_negative_numbers=True)(seek)
    app.add_typer(group, name="sub")


# Looking


def list_subscriptions(
    session: Session,
    topic: OptionalTopic = None,
    every: Annotated[bool, typer.Option("--all", help="Of all topics, as without TOPIC.")] = False,
) -> None:
    """Lists subscriptions with their kind, how far they are, and how many messages are not acknowledged.

    Everything below offset is acknowledged, and so are acked_above messages behind it. One that cannot be read is
    listed as well, with its problem, and the exit code is 1 then.
    """
    from tidelog.errors import InputError

    if topic is not None and every:
        raise InputError("a topic is named together with --all", hint="Give one of them")
    _show(session, topic, None, _COLUMNS, _NARROWER, lambda _, info: _row(info))


def lag(
    session: Session,
    topic: OptionalTopic = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The subscription; all without it.")] = None,
) -> None:
    """Shows how far subscriptions are behind: messages that are not acknowledged, and the age of the oldest of them."""
    _show(session, topic, name, _LAG_COLUMNS, _LAG_NARROWER, _lag_row)


def _show(
    session: Session,
    topic: str | None,
    name: str | None,
    columns: tuple[str, ...],
    narrower: tuple[tuple[str, ...], ...],
    describe_one: _Describe,
) -> None:
    from tidelog.cli.topic_choice import exit_if_any_failed, require_kept
    from tidelog.cli.topic_names import require_topic, topic_names

    with session.look() as log:
        if topic is not None:
            require_topic(log, topic)
            require_kept(log, topic)
        topics = topic_names(log) if topic is None else [topic]
        rows = [row for one in topics for row in _rows(log, one, name, describe_one)]
    has_problems = any(row.get("problem") is not None for row in rows)
    if session.as_json:
        session.output.document(rows)
    else:
        session.output.table(columns if has_problems else columns[:-1], rows, narrower=narrower)
        for row in rows:
            if row["problem"] is not None:
                session.output.note(f"problem: {row['topic']} {row['subscription'] or ''}: {row['problem']}")
    exit_if_any_failed(rows)


def _rows(log: LogDirectory, topic: str, name: str | None, describe_one: _Describe) -> list[Row]:
    """One topic; a name that was asked for has to be there, and what cannot be read does not hide the others."""
    from tidelog.cli.errors import text_of
    from tidelog.errors import NotSupportedError, TidelogError

    try:
        opened = log.topic(topic)
        names = opened.subscriptions()
    except TidelogError as error:
        if name is None and isinstance(error, NotSupportedError):
            return []  # a topic that keeps no positions has none to show
        if name is not None:
            raise
        return [{"topic": topic, "subscription": None, "problem": text_of(error)}]
    if name is not None:
        require_subscription(opened, name)
        names = [name]
    return [_one_row(opened, one, describe_one) for one in names]


def _one_row(topic: Topic, name: str, describe_one: _Describe) -> Row:
    from tidelog.cli.errors import text_of
    from tidelog.errors import TidelogError

    known = {"topic": topic.name, "subscription": name}
    try:
        return {**known, **describe_one(topic, topic.subscription_info(name)), "problem": None}
    except TidelogError as error:
        return {**known, "problem": text_of(error)}


def _row(info: SubscriptionInfo) -> Row:
    return {
        "kind": info.kind,
        "offset": info.offset,
        "acked_above": info.acked_above,
        "lag_messages": info.lag_messages,
        "moved": info.moved,
    }


def _lag_row(topic: Topic, info: SubscriptionInfo) -> Row:
    oldest = _oldest_open(topic, info)
    age_seconds = 0.0 if oldest is None else max(0.0, (datetime.now(UTC) - oldest).total_seconds())
    return {"lag_messages": info.lag_messages, "lag_seconds": age_seconds, "oldest": oldest}


def _oldest_open(topic: Topic, info: SubscriptionInfo) -> datetime | None:
    """The time of the first message that is not acknowledged; what retention has deleted counts no more."""
    start = max(info.offset, topic.start_offset)
    if not info.lag_messages or start >= topic.next_offset:
        return None
    return next((message.timestamp for message in topic.read(start, follow=False, on_gap="skip")), None)


def describe(session: Session, topic: TopicArgument, name: NameArgument) -> None:
    """Shows one subscription: its kind, how far it is, how far behind, and where its dead letters are."""
    from tidelog.cli.dlq import dead_letter_topic_of
    from tidelog.cli.topic_choice import require_kept
    from tidelog.cli.topic_names import require_topic

    with session.look() as log:
        require_topic(log, topic)
        require_kept(log, topic)
        opened = log.topic(topic)
        require_subscription(opened, name)
        info = opened.subscription_info(name)
        described = {
            "topic": topic,
            "subscription": name,
            **_row(info),
            **_lag_row(opened, info),
            "next_offset": opened.next_offset,
            "created": info.created,
            "hold_retention": info.hold_retention,
            "dead_letter_topic": dead_letter_topic_of(log, topic, name),
        }
    session.output.record(described)


def require_subscription(topic: Topic, name: str) -> None:
    """NotFoundError where there is none of this name; it suggests the nearest one."""
    from tidelog.errors import NotFoundError

    names = topic.subscriptions()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        question = f"Did you mean {near[0]}? " if near else ""
        hint = f"{question}All of them: `tidelog sub list {topic.name}`"
        raise NotFoundError(f"{topic.name} has no subscription {name}", hint=hint)


# Changing


def seek(
    session: Session,
    topic: TopicArgument,
    name: NameArgument,
    position: Annotated[str, typer.Argument(metavar="POSITION", help="earliest, latest, an offset, a time, or -N.")],
    take_over: TakeOverOption = False,
) -> None:
    """Moves a subscription: what is at POSITION and behind it comes (again), what is before it does not.

    A time is ISO 8601, UTC unless it says otherwise. -N is for the last N messages. The subscription must not have
    consumers: its owner moves it with `seek` in the program.
    """
    parsed = parse_position("POSITION", position)
    with session.open(runs_in_background=False) as log:
        opened = _owned(log, topic, name, take_over)
        before = opened.subscription_info(name)
        _move(opened, before, settled(opened, parsed))
        after = opened.subscription_info(name)
    if session.as_json:
        moved = {"topic": topic, "subscription": name, "offset_before": before.offset, "offset": after.offset}
        session.output.document({**moved, "lag_messages": after.lag_messages})
        return
    session.output.note(f"{name} of {topic} went from offset {before.offset} to {after.offset}")


def _move(topic: Topic, info: SubscriptionInfo, position: int | str | datetime) -> None:
    # Its own kind and hold: what a consumer says is stored with the position.
    with topic.subscribe(info.name, info.kind, hold_retention=info.hold_retention) as consumer:  # type: ignore[arg-type]
        consumer.seek(position)


def delete(
    session: Session,
    topic: TopicArgument,
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    take_over: TakeOverOption = False,
) -> None:
    """Forgets a subscription and how far it was; the messages stay. Made again, it begins where it is told to.

    It asks first; where nobody can answer, it needs --yes. After a no the exit code is 1.
    """
    with session.open(runs_in_background=False) as log:
        opened = _owned(log, topic, name, take_over)
        question = f"Forget the subscription {name} of {topic} and how far it is?"
        if not yes and not is_confirmed(question, f"deleting the subscription {name}"):
            session.output.note("nothing was deleted")
            raise typer.Exit(ExitCode.FOUND_WRONG)
        opened.delete_subscription(name)
    if session.as_json:
        session.output.document({"topic": topic, "subscription": name, "deleted": True})
    else:
        session.output.note(f"deleted the subscription {name} of {topic}")


def _owned(log: LogDirectory, topic: str, name: str, take_over: bool) -> Topic:
    """The topic, opened for writing once it is sure that nobody else is concerned."""
    from tidelog.cli.topic_choice import require_kept, require_ours
    from tidelog.cli.topic_names import require_topic

    require_topic(log, topic)
    require_kept(log, topic)
    require_ours(log, topic, take_over)
    opened = log.topic(topic, take_over=take_over)
    require_subscription(opened, name)
    return opened
