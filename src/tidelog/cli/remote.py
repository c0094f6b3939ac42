"""Commands that are done by a server: the one of the directory, or the one that --server names.

Invariants
- A command has the options, the output and the exit codes that it has without a server, as far as the server knows what
  is shown: sizes of files on its disk and progress it does not tell.
- What the server refuses raises the error of the library, with its fix.
- --take-over means nothing here: the server owns its topics already, and says so if it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tidelog.cli.consume import (
    Choice,
    Shower,
    SubscriptionChoice,
    check_committed,
    check_kind,
    check_order,
    converter,
    parse_position,
    refuse_without_name,
    settled,
    write_messages,
)
from tidelog.cli.output import Row, counted
from tidelog.cli.produce import append_records, json_reader, message_maker, source, split_records
from tidelog.cli.session import Session, confirm
from tidelog.cli.topic.admin import DUE_COLUMNS, due_row, orphans_of, tell_orphans
from tidelog.cli.topic.group import parse_own_settings
from tidelog.cli.topic.names import exit_if_any_failed, rows_of_each
from tidelog.cli.topic.rescue import COLUMNS, appended_row, appended_text, write_tails
from tidelog.cli.verify import show_reports
from tidelog.client.client import Client
from tidelog.client.topic import RemotePartitionedTopic, RemoteTopic
from tidelog.client.transport import ended_operation, path_of
from tidelog.client.wire import MSGPACK, TailPage, decode_tail_page, unpacked
from tidelog.cold.gc import Plan, Report
from tidelog.cold.retention import RetentionPlan
from tidelog.errors import InputError, NotFoundError, NotSupportedError, offsets_text
from tidelog.log.isolation import READ_COMMITTED, check_isolation
from tidelog.log.reader import Position
from tidelog.topics.message import Message
from tidelog.topics.names import parse_topic_name
from tidelog.topics.partitioned import PartitionOffset

_PATIENCE_SECONDS = 5.0
_TOPIC_COLUMNS = ("topic", "partition", "start_offset", "shipped_offset", "next_offset", "messages")
_SUB_COLUMNS = ("topic", "subscription", "kind", "offset", "acked_above", "lag_messages", "moved")
_LAG_COLUMNS = ("topic", "subscription", "lag_messages", "lag_seconds")
_LETTER_COLUMNS = ("topic", "offset", "origin_topic", "origin_offset", "subscription", "deliveries", "reason")


def _ask(client: Client, method: str, path: str, document: object = None, **query: object) -> Any:
    return client._bridge.wait(client._http.json(method, path, document, query=query))


def _path(topic: str, *further: str) -> str:
    name = parse_topic_name(topic)
    return path_of("topics", name.namespace, name.name, *further)


def _existing(client: Client, topic: str) -> RemoteTopic | RemotePartitionedTopic:
    """A topic that is there: looking at one that is not must not create it."""
    if not client.has_topic(topic):
        raise NotFoundError(f"there is no topic {topic}", hint="All of them: `tidelog topic list`")
    return client.topic(topic)


def _refuse(option: str, value: object, why: str) -> None:
    if value:
        raise NotSupportedError(f"{option} does not work through a server: {why}")


# Messages


class _Counting:
    """A topic that remembers which offsets were given."""

    def __init__(self, topic: RemoteTopic | RemotePartitionedTopic) -> None:
        self._topic = topic
        self.offsets: list[int] = []

    def append_many(self, messages: Iterable[bytes | Message], *, sync: bool) -> list[int]:
        made = self._topic.append_many(messages, sync=sync)
        self.offsets += made
        return made

    def append(self, message: bytes | Message) -> int:
        made = self._topic.append(message)
        self.offsets.append(made)
        return made


def produce(
    session: Session,
    client: Client,
    topic: str,
    file: Path | None,
    key_separator: str | None,
    header: list[str] | None,
    sync: bool,
    null: bool,
    no_ship: bool,
    from_json: bool,
    partition: int | None,
    take_over: bool,
) -> None:
    """`tidelog produce`."""
    parse_topic_name(topic)
    to_message = json_reader(key_separator, header, null) if from_json else message_maker(key_separator, header or [])
    with source(session, file) as (stream, on_read):
        opened = client.topic(topic)
        target = _Counting(opened if partition is None else opened.partition(partition))
        try:
            separator = b"\x00" if null else b"\n"
            for records in split_records(stream, separator, session.settings.log.max_message_bytes, on_read):
                append_records(target, records, to_message, sync, len(target.offsets))  # type: ignore[arg-type]
            opened.flush()
        finally:
            _tell_produced(session, topic, target.offsets, partition)


def _tell_produced(session: Session, topic: str, offsets: list[int], partition: int | None) -> None:
    document: dict[str, object] = {"topic": topic, "messages": len(offsets)}
    if any(isinstance(offset, PartitionOffset) for offset in offsets):
        numbers = [one.partition if isinstance(one, PartitionOffset) else 0 for one in offsets]
        document["partitions"] = {str(number): numbers.count(number) for number in sorted(set(numbers))}
        where = f"to {counted(len(set(numbers)), 'partition')} of {topic}"
    else:
        document |= {"partition": partition or 0, "first_offset": min(offsets, default=None)}
        document["last_offset"] = max(offsets, default=None)
        where = f"to {topic}" + (f": {offsets_text(min(offsets), max(offsets))}" if offsets else "")
    text = f"produced {counted(len(offsets), 'message') if offsets else 'no messages'} {where}"
    if session.as_json:
        session.output.document(document)
    else:
        session.output.note(text)


def consume(
    session: Session,
    client: Client,
    topic: str,
    start: str | None,
    stop: str | None,
    max_messages: int | None,
    follow: bool,
    template: str | None,
    null: bool,
    skip_gaps: bool,
    subscription: str | None,
    kind: str | None,
    acknowledges: bool | None,
    take_over: bool,
    isolation: str | None,
    partition: int | None,
) -> None:
    """`tidelog consume`."""
    to_bytes = converter(session, topic, template, null)
    if subscription is not None:
        check_committed(isolation)
        choice = SubscriptionChoice(subscription, kind, start, stop, max_messages, follow, acknowledges, skip_gaps)
        _refuse("--partition with --subscription", partition is not None, "a subscription has all partitions")
        consume_subscription(session, client, topic, choice, to_bytes)
        return
    level: Any = isolation or READ_COMMITTED
    check_isolation(level)
    refuse_without_name({"--kind": kind, "--ack or --no-ack": acknowledges, "--take-over": take_over or None})
    first, last = parse_position("--from", start or "earliest"), None if stop is None else parse_position("--to", stop)
    check_order(start or "earliest", first, stop, last)
    opened = _existing(client, topic)
    wanted = opened if partition is None else opened.partition(partition)
    write_messages(wanted, first, last, Choice(to_bytes, skip_gaps, max_messages, follow, level))


def consume_subscription(
    session: Session, client: Client, topic: str, choice: SubscriptionChoice, to_bytes: Callable[[Message], bytes]
) -> None:
    """`tidelog consume --subscription`."""
    if choice.stop is not None:
        raise InputError("--to and --subscription cannot be combined", hint="Limit the count with --max-messages")
    check_kind(choice.kind)
    opened = _existing(client, topic)
    known = _subscription(client, topic, choice.name)
    start: Position = parse_position("--from", choice.start or "earliest")
    if known is not None and choice.start is not None:
        session.output.note(f"{choice.name} exists: it resumes where it was; --from is ignored")
    if isinstance(opened, RemoteTopic):
        start = settled(opened, start)
    used: Any = choice.kind or ("exclusive" if known is None else known["kind"])
    with opened.subscribe(choice.name, used, start=start, on_gap="skip" if choice.skip_gaps else "raise") as consumer:
        if not choice.follow:
            waiting = consumer.lag.messages
            most = waiting if choice.max_messages is None else min(waiting, choice.max_messages)
            choice = choice._replace(max_messages=most)
        Shower(consumer, to_bytes, choice, _PATIENCE_SECONDS).show()


# Topics


def list_topics(session: Session, client: Client) -> None:
    """`tidelog topic list`."""
    rows = [row for name in client.topics() for row in _topic_rows(client, name)]
    session.output.rows(_TOPIC_COLUMNS, rows)


def _topic_rows(client: Client, topic: str) -> list[Row]:
    found = _ask(client, "GET", _path(topic))
    return [
        {
            "topic": topic,
            "partition": one["partition"],
            "start_offset": one["start_offset"],
            "hot_start_offset": one["hot_start_offset"],
            "shipped_offset": one["shipped_offset"],
            "next_offset": one["next_offset"],
            "messages": one["next_offset"] - one["start_offset"],
        }
        for one in found["partitions"]
    ]


def describe_topic(session: Session, client: Client, topic: str, transactions: bool) -> None:
    """`tidelog topic describe`."""
    _refuse("--transactions", transactions, "the server does not tell")
    found = _ask(client, "GET", _path(topic))
    partitions = _topic_rows(client, topic)
    shown: dict[str, object] = {"topic": topic, "id": found["id"], "settings": found["settings"]}
    if len(partitions) == 1:
        shown |= {name: value for name, value in partitions[0].items() if name != "partition"}
    else:
        shown["partitions"] = partitions
    session.output.record(shown)


def create_topic(
    session: Session,
    client: Client,
    topic: str,
    if_missing: bool,
    own: list[str] | None,
    live: bool,
    partitions: int | None,
) -> None:
    """`tidelog topic create`."""
    _refuse("--live", live, "its messages would be the server's own")
    settings: Any = parse_own_settings(own or [])
    exists = client.has_topic(topic)
    if exists and (settings or not if_missing):
        hint = "Change its settings with `tidelog topic set` instead" if settings else "Allow that with --if-missing"
        raise InputError(f"the topic {topic} already exists", hint=hint)
    if partitions is not None:
        client.topic(topic, partitions=partitions, **settings)
    elif not exists:
        client.topic(topic, **settings)
    made = {"topic": topic, "created": not exists, "reliable": True, "partitions": partitions or 1}
    session.output.result(made, f"{'kept' if exists else 'created'} {topic} at {client.url}")


def set_settings(session: Session, client: Client, topic: str, settings: list[str]) -> None:
    """`tidelog topic set`."""
    changes: Any = parse_own_settings(settings)
    _existing(client, topic)
    session.output.record({"topic": topic, "settings": client.configure_topic(topic, **changes)})


def delete_topic(session: Session, client: Client, topic: str, yes: bool, take_over: bool) -> None:
    """`tidelog topic delete`."""
    messages = sum(int(str(row["messages"])) for row in _topic_rows(client, topic))
    confirm(session, yes, f"Delete {topic} ({counted(messages, 'message')}) for good?", f"delete {topic}")
    client.delete_topic(topic)
    session.output.result({"topic": topic, "deleted": True, "messages": messages}, f"deleted {topic}")


def _chosen(client: Client, topics: list[str] | None, every: bool) -> list[str]:
    if bool(topics) == every:
        raise InputError("name the topics, or give --all", hint="All topics: `tidelog topic list`")
    return client.topics() if every else list(dict.fromkeys(topics or []))


def ship(session: Session, client: Client, topics: list[str] | None, every: bool, take_over: bool) -> None:
    """`tidelog topic ship`."""

    def one(name: str) -> Row:
        shipped = _existing(client, name).ship()
        return {"topic": name, "shipped_offset": shipped}

    rows = rows_of_each(session, _chosen(client, topics, every), one)
    session.output.rows(("topic", "shipped_offset"), rows)
    exit_if_any_failed(rows)


def seal(session: Session, client: Client, topic: str, take_over: bool) -> None:
    """`tidelog topic seal`."""
    _existing(client, topic).seal()
    text = f"{topic} is sealed: its next owner continues without a gap"
    session.output.result({"topic": topic, "sealed": True}, text)


def _operate(client: Client, method: str, path: str, **query: object) -> Any:
    """An operation that has ended."""
    given = {name: value for name, value in query.items() if value is not None}
    return client._bridge.wait(ended_operation(client._http, path, given, method))


def _refuse_several(plan_id: str | None, topics: list[str]) -> None:
    if plan_id is not None and len(topics) != 1:
        raise InputError("a plan is about one topic", hint="Name that topic alone")


def prune(
    session: Session,
    client: Client,
    topics: list[str] | None,
    every: bool,
    dry_run: bool,
    plan_id: str | None,
    take_over: bool,
) -> None:
    """`tidelog topic prune`."""
    chosen = _chosen(client, topics, every)
    _refuse_several(plan_id, chosen)
    if dry_run and plan_id is not None:
        raise InputError("--dry-run makes a plan, and --plan applies one", hint="Give one of them")

    def look(name: str) -> Row:
        found = _operate(client, "GET", _path(name, "retention"))
        plans = msgspec.convert(list(found["result"]["plans"].values()), list[RetentionPlan])
        return {**due_row(name, plans), "plan": found["id"]}

    def one(name: str) -> Row:
        before = _topic_rows(client, name)
        _operate(client, "POST", _path(name, "retention"), plan=plan_id)
        after = _topic_rows(client, name)
        gone = sum(int(str(b["messages"])) for b in before) - sum(int(str(a["messages"])) for a in after)
        return {"topic": name, "messages": max(0, gone)}

    rows = rows_of_each(session, chosen, look if dry_run else one)
    session.output.rows((*DUE_COLUMNS, "plan") if dry_run else ("topic", "messages"), rows)
    exit_if_any_failed(rows)


def remove_orphans(
    session: Session,
    client: Client,
    topics: list[str] | None,
    every: bool,
    apply: bool,
    drop_lost: bool,
    drop_uncovered: bool,
    plan_id: str | None,
    take_over: bool,
) -> None:
    """`tidelog topic remove-orphans`."""
    chosen = _chosen(client, topics, every)
    _refuse_several(plan_id, chosen)
    if plan_id is not None and not apply:
        raise InputError("--plan goes with --apply", hint="Give --apply --plan ID")

    def one(name: str) -> Row:
        path = _path(name, "orphans")
        planned = _orphan_plan(client, plan_id) if plan_id else _operate(client, "GET", path)
        plans = msgspec.convert(list(planned["result"]["plans"].values()), list[Plan])
        reports: list[Report | None] = [None] * len(plans)
        if apply:
            drops = {"drop_lost": drop_lost, "drop_uncovered": drop_uncovered}
            done = _operate(client, "POST", f"{path}/remove", plan=planned["id"], **drops)
            reports = msgspec.convert(list(done["result"]["reports"].values()), list[Report | None])
        found = [orphans_of(name, plan, report) for plan, report in zip(plans, reports, strict=True)]
        return {**found[0], **_joined(found), "plan": planned["id"]}

    tell_orphans(session, rows_of_each(session, chosen, one), apply)


def rescue(
    session: Session,
    client: Client,
    topic: str,
    tail: str | None,
    output: Path | None,
    into: str | None,
    discard: bool,
    yes: bool,
    take_over: bool,
) -> None:
    """`tidelog topic rescue`."""
    chosen = (output is not None) + (into is not None) + discard
    if chosen > 1:
        raise InputError("--output, --into and --discard cannot be combined", hint="Give one of them")
    _check_whole(client, topic)
    if into is not None:
        parse_topic_name(into)
    tails = _tails(client, topic, tail)
    if chosen == 0:
        has_nodes = any(one.get("node") for one in tails)
        session.output.rows(("node", *COLUMNS) if has_nodes else COLUMNS, [_tail_row(one) for one in tails])
    if not tails:
        session.output.note(f"there is nothing of {topic} to rescue")
    elif output is not None:
        _write_tails(session, client, topic, tails, output)
    elif into is not None:
        _append_tails(session, client, topic, tails, into)
    elif discard:
        _discard_tails(session, client, topic, tails, yes)


def _tails(client: Client, topic: str, wanted: str | None) -> list[Any]:
    found = [one for one in _ask(client, "GET", _path(topic, "rescue"))["tails"] if wanted in (None, one["name"])]
    if wanted is not None and not found:
        raise NotFoundError(f"there is no tail {wanted}", hint=f"`tidelog topic rescue {topic}` lists them")
    return found


def _discard_tails(session: Session, client: Client, topic: str, tails: list[Any], yes: bool) -> None:
    count = sum(one["next_offset"] - one["first_offset"] for one in tails)
    text = f"Delete {counted(len(tails), 'tail')} of {topic} ({counted(count, 'message')}) for good?"
    confirm(session, yes, text, f"delete the tails of {topic}")
    rows: list[Row] = []
    for one in tails:
        done = _rescue_one(client, topic, one, discard=True)
        rows.append({"partition": one["partition"], "tail": one["name"], **done})
    session.output.rows(("partition", "tail", "discarded"), rows)


def _check_whole(client: Client, topic: str) -> None:
    """NotFoundError for a topic that is not there; it may be the name of a partition."""
    parent = parse_topic_name(topic).parent()
    if client.has_topic(topic):
        return
    if parent is not None and client.has_topic(str(parent[0])):
        hint = f"`tidelog topic rescue {parent[0]}` shows the tails of all its partitions; --tail NAME chooses one"
        raise NotFoundError(f"{topic} is a partition of {parent[0]}", hint=hint)
    raise NotFoundError(f"there is no topic {topic}", hint="All of them: `tidelog topic list`")


def _rescue_one(client: Client, topic: str, tail: Any, **wanted: object) -> Any:
    """The result for one tail."""
    document = {"name": tail["name"], "partition": tail["partition"], "node": tail.get("node", ""), **wanted}
    return client._bridge.wait(ended_operation(client._http, _path(topic, "rescue"), document=document))["result"]


def _append_tails(session: Session, client: Client, topic: str, tails: list[Any], into: str) -> None:
    rows = []
    for one in tails:
        row = appended_row(one["partition"], one["name"], into, _rescue_one(client, topic, one, into=into))
        rows.append(row)
        if not session.as_json:
            session.output.note(appended_text(row))
    if session.as_json:
        session.output.document(rows)
    else:
        session.output.note("the tails are kept; --discard deletes them")


def _write_tails(session: Session, client: Client, topic: str, tails: list[Any], path: Path) -> None:
    first = [_tail_page(client, topic, one, one["first_offset"]) for one in tails]
    handed_over = sum(page.handed_over for page in first)
    total = sum(one["next_offset"] - one["first_offset"] for one in tails) - handed_over

    def messages() -> Iterator[Message]:
        for one in tails:
            offset: int | None = one["first_offset"]
            while offset is not None:
                page = _tail_page(client, topic, one, offset)
                yield from unpacked(page.messages)
                offset = page.next_offset

    write_tails(session, topic, path, messages(), total, handed_over)


def _tail_page(client: Client, topic: str, tail: Any, offset: int) -> TailPage:
    query = {"partition": tail["partition"], "node": tail.get("node") or None, "offset": offset}
    path = _path(topic, "rescue", tail["name"], "messages")
    answer = client._bridge.wait(client._http.ask("GET", path, query, accept=MSGPACK))
    return decode_tail_page(answer.body)


def _tail_row(one: Any) -> Row:
    count = one["next_offset"] - one["first_offset"]
    return {
        **({"node": one["node"]} if one.get("node") else {}),
        "partition": one["partition"],
        "tail": one["name"],
        "epoch": one["epoch"],
        "first_offset": one["first_offset"] if count else None,
        "last_offset": one["next_offset"] - 1 if count else None,
        "messages": count,
        "file_bytes": one["bytes"],
        "set_aside": one["is_set_aside"],
    }


def verify(session: Session, client: Client, targets: list[str] | None, cold: bool) -> None:
    """`tidelog verify`."""
    reports = [_existing(client, name).verify(cold=cold) for name in targets or client.topics()]
    show_reports(session, reports, cold)


def _orphan_plan(client: Client, plan_id: str) -> Any:
    """A plan that the server has shown before."""
    found = _ask(client, "GET", path_of("operations", plan_id))
    if found["kind"] != "plan-orphans" or found["state"] != "done":
        raise NotFoundError(f"{plan_id} is no plan of orphans", hint="`tidelog topic remove-orphans` makes one")
    return found


def _joined(found: list[Any]) -> Row:
    """Of all partitions."""
    reports = [one["report"] for one in found if one["report"] is not None]
    names = ("objects", "kept")
    joined = {name: tuple(item for one in reports for item in one[name]) for name in names}
    return {
        "is_whole": all(one["is_whole"] for one in found),
        "bytes": sum(one["bytes"] for one in found),
        "found": [row for one in found for row in one["found"]],
        "report": {**joined, "bytes": sum(one["bytes"] for one in reports)} if reports else None,
    }


# Subscriptions


def _subscription(client: Client, topic: str, name: str) -> Any:
    """What the server says of a subscription; None where there is none."""
    found = _ask(client, "GET", _path(topic, "subscriptions"))["subscriptions"]
    return next((one for one in found if one["name"] == name), None)


def _subscription_rows(client: Client, topic: str | None, name: str | None, age: bool) -> list[Row]:
    rows: list[Row] = []
    for one in client.topics() if topic is None else [topic]:
        found = _ask(client, "GET", _path(one, "subscriptions"), age=age)["subscriptions"]
        chosen = [sub for sub in found if name in (None, sub["name"])]
        rows += [{"topic": one, "subscription": sub["name"], **sub} for sub in chosen]
    if name is not None and not rows:
        raise NotFoundError(f"{topic} has no subscription {name}", hint=f"All of them: `tidelog sub list {topic}`")
    return rows


def list_subscriptions(session: Session, client: Client, topic: str | None, every: bool) -> None:
    """`tidelog sub list`."""
    if topic is not None and every:
        raise InputError("TOPIC and --all cannot be combined", hint="Give one of them")
    rows = [
        {
            **{name: row.get(name) for name in ("topic", "subscription", "kind", "lag_messages", "moved")},
            "partition": part["partition"],
            "offset": part["offset"],
            "acked_above": part["acked_above"],
        }
        for row in _subscription_rows(client, topic, None, False)
        for part in _parts(row)
    ]
    session.output.rows(_SUB_COLUMNS, rows)


def _parts(row: Row) -> list[dict[str, Any]]:
    parts = row["partitions"]
    assert isinstance(parts, list)
    return parts


def lag(session: Session, client: Client, topic: str | None, name: str | None) -> None:
    """`tidelog sub lag`."""
    rows = [
        {
            "topic": row["topic"],
            "subscription": row["subscription"],
            "lag_messages": row["lag_messages"],
            "lag_seconds": max((part.get("lag_seconds") or 0.0 for part in _parts(row)), default=0.0),
        }
        for row in _subscription_rows(client, topic, name, True)
    ]
    session.output.rows(_LAG_COLUMNS, rows)


def seek(session: Session, client: Client, topic: str, name: str, position: str, take_over: bool) -> None:
    """`tidelog sub seek`."""
    parsed = parse_position("POSITION", position)
    known = _subscription(client, topic, name)
    if known is None:
        raise NotFoundError(f"{topic} has no subscription {name}", hint=f"All of them: `tidelog sub list {topic}`")
    if known["kind"] == "group":
        raise NotSupportedError(
            f"{name} is a consumer group: while a server runs, Kafka's tools move it",
            hint="Use kafka-consumer-groups --reset-offsets",
        )
    document: dict[str, object]
    if isinstance(parsed, int) and parsed < 0:
        states = _topic_rows(client, topic)
        offsets = {
            str(row["partition"]): max(int(str(row["start_offset"])), int(str(row["next_offset"])) + parsed)
            for row in states
        }
        document = {"offsets": offsets}
    elif isinstance(parsed, datetime):
        moment = parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)
        document = {"position": moment.isoformat()}
    else:
        document = {"position": str(parsed)}
    after = _ask(client, "POST", _path(topic, "subscriptions", name, "seek"), document)
    before, now = [part["offset"] for part in known["partitions"]], [part["offset"] for part in after["partitions"]]
    is_one = len(now) == 1
    moved = {"topic": topic, "subscription": name, "offset_before": before[0] if is_one else before}
    moved |= {"offset": now[0] if is_one else now, "lag_messages": after["lag_messages"]}
    went = ", ".join(f"{old} to {new}" for old, new in zip(before, now, strict=False))
    session.output.result(moved, f"{name} of {topic} went from offset {went}")


def delete_subscription(session: Session, client: Client, topic: str, name: str, yes: bool, take_over: bool) -> None:
    """`tidelog sub delete`."""
    confirm(session, yes, f"Forget the subscription {name} of {topic} and how far it is?", f"delete {name}")
    _ask(client, "DELETE", _path(topic, "subscriptions", name))
    session.output.result(
        {"topic": topic, "subscription": name, "deleted": True}, f"deleted the subscription {name} of {topic}"
    )


# Dead letters


def list_letters(session: Session, client: Client, topic: str | None, max_messages: int) -> None:
    """`tidelog dlq list`."""
    if topic is None:
        raise InputError("name the topic of dead letters", hint="All topics: `tidelog topic list`")
    rows: list[Row] = []
    offset: int | None = 0
    while offset is not None and len(rows) < max_messages:
        limit = min(1000, max_messages - len(rows))
        found = _ask(client, "GET", _path(topic, "dead-letters"), offset=offset, limit=limit)
        rows += [{"topic": topic, **{n: v for n, v in one.items() if n != "message"}} for one in found["letters"]]
        offset = found["next"]
    session.output.rows(_LETTER_COLUMNS, rows)


def replay(
    session: Session,
    client: Client,
    dead_letters: str,
    into: str | None,
    max_messages: int | None,
    take_over: bool,
) -> None:
    """`tidelog dlq replay`."""
    document: dict[str, object] = {} if into is None else {"into": into}
    if max_messages is not None:
        found = _ask(client, "GET", _path(dead_letters, "dead-letters"), limit=min(1000, max_messages))
        document["offsets"] = [one["offset"] for one in found["letters"]]
    done = _ask(client, "POST", _path(dead_letters, "dead-letters", "replay"), document)
    for one in done["refused"]:
        session.output.note(f"problem: letter {one['offset']}: {one['detail']}")
    problem = f"{counted(len(done['refused']), 'letter')} not sent" if done["refused"] else None
    where = into or "the topics that they came from"
    rows: list[Row] = [{"into": where, "messages": done["sent"], "skipped": done["already_sent"], "problem": problem}]
    session.output.rows(("into", "messages", "skipped", "problem"), rows)
    exit_if_any_failed(rows)
