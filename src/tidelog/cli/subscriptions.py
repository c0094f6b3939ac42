"""`tidelog sub`: lists subscriptions and their positions, and moves or deletes one.

Consumer groups of Kafka's protocol are shown beside them, with the kind `group`: what they have committed, partition by
partition. Moving or deleting one does so in all partitions.

Invariants
- Listing claims nothing: it works beside the owner of the topic, and shows the stored positions, which lag a few
  seconds behind the owner's.
- Only the owner may move or delete: a topic that another node owns is refused, unless it is to be taken over. Where a
  server is the owner, it does it (`remote.py`). A group is not moved while a server runs that may have members of it:
  Kafka's tools do that.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

import typer

from tidelog.cli.consume import parse_position, settled
from tidelog.cli.errors import text_of
from tidelog.cli.output import Row
from tidelog.cli.session import Session, command, command_group, confirm
from tidelog.cli.topic.names import (
    TopicArgument,
    logs_of,
    open_log,
    owned_log,
    require_kept,
    require_one_log,
    require_ours,
    require_topic,
    show_with_problems,
    topic_names,
)
from tidelog.errors import InputError, NotFoundError, NotSupportedError, TidelogError
from tidelog.log.reader import Position
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import parse_topic_name
from tidelog.topics.subscription.registry import SubscriptionInfo
from tidelog.topics.topic import Topic

_COLUMNS = ("topic", "subscription", "kind", "offset", "acked_above", "lag_messages", "moved", "problem")
_NARROWER = (
    ("topic", "subscription", "kind", "offset", "lag_messages", "moved"),
    ("topic", "subscription", "offset", "lag_messages"),
)
_LAG_COLUMNS = ("topic", "subscription", "lag_messages", "lag_seconds", "oldest", "problem")
_LAG_NARROWER = (("topic", "subscription", "lag_messages", "lag_seconds"),)

OptionalTopic = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="namespace/name; all without it.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The subscription, or the consumer group.")]
TakeOverOption = Annotated[
    bool, typer.Option("--take-over", help="Even if another node owns the topic (that node is fenced) or it is sealed.")
]
_Describe = Callable[["Topic", "SubscriptionInfo"], "Row"]


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("Subscriptions: list, describe, move, delete, and see their lag.")
    commands: dict[str, Callable[..., None]] = {
        "list": list_subscriptions,
        "describe": describe,
        "lag": lag,
        "delete": delete,
    }
    remotes = {"list": "list_subscriptions", "lag": "lag", "delete": "delete_subscription"}
    for name, work in commands.items():
        command(group, name, remote=remotes.get(name), is_local_beside=name != "delete")(work)
    command(group, "seek", takes_negative_numbers=True, remote="seek")(seek)
    app.add_typer(group, name="sub")


# Looking


def list_subscriptions(
    session: Session,
    topic: OptionalTopic = None,
    every: Annotated[bool, typer.Option("--all", help="Of all topics, as without TOPIC.")] = False,
) -> None:
    """Lists subscriptions. Their kind, position, and number of unacknowledged messages.

    Consumer groups of Kafka's protocol have the kind group: offset is what they have committed.
    Everything below offset is acknowledged, and so are acked_above messages after it. A subscription that cannot be
    read is listed with its problem, and the exit code is then 1.
    """
    if topic is not None and every:
        raise InputError("TOPIC and --all cannot be combined", hint="Give one of them")
    _show(session, topic, None, _COLUMNS, _NARROWER, lambda _, info: _row(info))


def lag(
    session: Session,
    topic: OptionalTopic = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The subscription; all without it.")] = None,
) -> None:
    """Shows how far subscriptions are behind. Messages that are not acknowledged, and the age of the oldest of them."""
    _show(session, topic, name, _LAG_COLUMNS, _LAG_NARROWER, _lag_row)


def _show(
    session: Session,
    topic: str | None,
    name: str | None,
    columns: tuple[str, ...],
    narrower: tuple[tuple[str, ...], ...],
    describe_one: _Describe,
) -> None:
    with session.look() as log:
        if topic is not None:
            require_topic(log, topic)
            require_kept(log, topic)
        topics = topic_names(log) if topic is None else logs_of(log, topic)
        rows = [row for one in topics for row in _rows(log, one, name, describe_one)]
    show_with_problems(session, rows, columns, narrower, ("topic", "subscription"))


def _rows(log: LogDirectory, topic: str, name: str | None, describe_one: _Describe) -> list[Row]:
    """One topic; a name that was asked for has to be there, and what cannot be read does not hide the others."""
    try:
        opened = open_log(log, topic)
        names = opened.subscriptions()
        groups = opened._registry.groups()
    except TidelogError as error:
        if name is None and isinstance(error, NotSupportedError):
            return []  # a topic that keeps no positions has none to show
        if name is not None:
            raise
        return [{"topic": topic, "subscription": None, "problem": text_of(error)}]
    if name is not None:
        if name not in groups:
            require_subscription(opened, name)
        names, groups = ([one for one in found if one == name] for found in (names, groups))
    rows = [_one_row(opened, one, opened.subscription_info, describe_one) for one in names]
    return rows + [_one_row(opened, one, opened._registry.group_info, describe_one) for one in groups]


def _one_row(topic: Topic, name: str, info_of: Callable[[str], SubscriptionInfo], describe_one: _Describe) -> Row:
    known = {"topic": topic.name, "subscription": name}
    try:
        return {**known, **describe_one(topic, info_of(name)), "problem": None}
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
    """The time of the first unacknowledged message that retention has not deleted."""
    start = max(info.offset, topic.start_offset)
    if not info.lag_messages or start >= topic.next_offset:
        return None
    return next((message.timestamp for message in topic.read(start, follow=False, on_gap="skip")), None)


def describe(session: Session, topic: TopicArgument, name: NameArgument) -> None:
    """Shows one subscription. Its kind, how far it is, how far behind, and where its dead letters are."""
    from tidelog.cli.dead_letters import dead_letter_topic_of

    with session.look() as log:
        require_topic(log, topic)
        require_kept(log, topic)
        require_one_log(log, topic)
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
    names = topic.subscriptions()
    if name not in names:
        names += topic._registry.groups()
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
    """Moves a subscription. Delivery resumes at POSITION; earlier messages count as acknowledged.

    A time is ISO 8601, UTC unless it says otherwise. -N is for the last N messages. Beside `tidelog serve` the server
    moves it, whether or not it has consumers; elsewhere its owner moves it with `seek` in the program. A consumer group
    is moved in all partitions; while a server runs, use `kafka-consumer-groups --reset-offsets`.
    """
    parsed = parse_position("POSITION", position)
    with session.open(runs_in_background=False) as log:
        groups = _owned_by_group(log, topic, name, take_over)
        if groups:
            rows = [_moved_group(one, name, settled(one, parsed)) for one in groups]
            text = f"the consumer group {name} continues at {', '.join(str(row['offset']) for row in rows)} of {topic}"
            session.output.result({"topic": topic, "group": name, "partitions": rows}, text)
            return
        opened = _owned(log, topic, name, take_over)
        before = opened.subscription_info(name)
        _move(opened, before, settled(opened, parsed))
        after = opened.subscription_info(name)
    moved = {"topic": topic, "subscription": name, "offset_before": before.offset, "offset": after.offset}
    moved["lag_messages"] = after.lag_messages
    session.output.result(moved, f"{name} of {topic} went from offset {before.offset} to {after.offset}")


def _moved_group(topic: Topic, name: str, position: Position) -> Row:
    before = topic._registry.group_info(name).offset
    topic._registry.move_group(name, position)
    after = topic._registry.group_info(name)
    return {
        "partition": topic.name,
        "offset_before": before,
        "offset": after.offset,
        "lag_messages": after.lag_messages,
    }


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
    """Forgets a subscription and how far it was; the messages stay. A new one of the same name starts from scratch.

    Of a consumer group, the offsets that it has committed in this topic are forgotten.
    It asks first; without a terminal, it needs --yes. After a no the exit code is 1.
    """
    with session.open(runs_in_background=False) as log:
        groups = _owned_by_group(log, topic, name, take_over)
        what = "consumer group" if groups else "subscription"
        opened = groups or [_owned(log, topic, name, take_over)]
        question = f"Forget the {what} {name} of {topic} and how far it is?"
        confirm(session, yes, question, f"delete the {what} {name}")
        for one in opened:
            (one._registry.delete_group if groups else one.delete_subscription)(name)
    deleted = {"topic": topic, "group" if groups else "subscription": name, "deleted": True}
    session.output.result(deleted, f"deleted the {what} {name} of {topic}")


def _owned_by_group(log: LogDirectory, topic: str, name: str, take_over: bool) -> list[Topic]:
    """The partitions in which a consumer group of this name has committed, opened for writing; none if there is none.

    InputError if a subscription has the same name: neither is changed for the other.
    """
    require_topic(log, topic)
    require_kept(log, topic)
    logs = logs_of(log, topic)
    cursors = log._group_cursors(list(map(parse_topic_name, logs)))
    logs = [one for one, groups in zip(logs, cursors, strict=True) if name in groups]
    for one in logs:
        require_ours(log, one, take_over)
    opened = [open_log(log, one, take_over=take_over) for one in logs]
    if any(name in one.subscriptions() for one in opened):
        raise InputError(
            f"{topic} has a subscription and a consumer group with the name {name}",
            hint="Change the subscription in a program, or the group with Kafka's tools",
        )
    return opened


def _owned(log: LogDirectory, topic: str, name: str, take_over: bool) -> Topic:
    """The topic, opened for writing if this node may own it."""
    require_topic(log, topic)
    opened = owned_log(log, topic, take_over)
    require_subscription(opened, name)
    return opened
