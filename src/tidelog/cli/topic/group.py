"""`tidelog topic`: the group of topic commands; those that create, configure and delete topics are here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import asdict

from tidelog.cli.errors import hint_of, text_of
from tidelog.cli.output import counted
from tidelog.cli.session import HeldOption, Session, command, command_group, confirm
from tidelog.cli.topic.admin import abort_transaction, prune, rebuild_catalog, remove_orphans, seal, ship
from tidelog.cli.topic.names import (
    TopicArgument,
    catalog_of,
    is_live,
    open_log,
    require_topic,
    topic_names,
    usage,
)
from tidelog.cli.topic.rescue import rescue
from tidelog.clock import to_datetime
from tidelog.cold.catalog import Catalog
from tidelog.cold.settings import TierSettings
from tidelog.config import Settings
from tidelog.config.load import Given, settings_of
from tidelog.errors import ConfigError, CorruptionError, DataError, GapError, InputError, TidelogError
from tidelog.files import LocalFiles
from tidelog.log.binding import known_log_id
from tidelog.log.transactions import read_control
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import parse_topic_name, read_topic_info, with_own
from tidelog.topics.rescue import Rescue
from tidelog.topics.topic import Topic
from tidelog.units import human_bytes

_REMOTE = {
    "list": "list_topics",
    "describe": "describe_topic",
    "create": "create_topic",
    "set": "set_settings",
    "delete": "delete_topic",
    "ship": "ship",
    "seal": "seal",
    "prune": "prune",
    "remove-orphans": "remove_orphans",
    "rescue": "rescue",
}


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("List, create, describe, ship, seal, repair and delete topics.")
    commands: dict[str, Callable[..., None]] = {
        "list": list_topics,
        "create": create,
        "describe": describe,
        "set": set_settings,
        "delete": delete,
        "ship": ship,
        "seal": seal,
        "prune": prune,
        "remove-orphans": remove_orphans,
        "rescue": rescue,
        "rebuild-catalog": rebuild_catalog,
        "abort-transaction": abort_transaction,
    }
    for name, work in commands.items():
        command(group, name, remote=_REMOTE.get(name), is_local_beside=name in ("list", "describe"))(work)
    command(group, "sweep", is_hidden=True, remote="remove_orphans")(remove_orphans)  # its name before
    app.add_typer(group, name="topic")


def create(
    session: Session,
    topic: TopicArgument,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="An existing topic is fine.")] = False,
    own: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of its own: retention_seconds=7d")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Keep no messages: deliver them to current readers only.")
    ] = False,
    partitions: Annotated[
        int | None, typer.Option("--partitions", metavar="N", help="Spread messages over N logs by their keys.")
    ] = None,
) -> None:
    """Creates an empty topic, in a new directory if absent.

    `tidelog produce` creates topics by itself; use this to create them earlier, or with settings of their own. With
    --live, the program that opens this directory delivers messages only to its current readers (`reliable=False`). That
    is recorded in this directory, and cannot be changed. With --partitions and --if-missing an existing topic gets more
    partitions if it has fewer.
    """
    parse_topic_name(topic)  # before a directory is made for it
    settings = parse_own_settings(own or [])
    with session.open() as log:
        exists = log.has_topic(topic)
        if exists:
            _check_existing(topic, is_live(log, topic), live, if_missing, bool(settings))
        if partitions is not None:
            log.topic(topic, partitions=partitions, reliable=not live, **settings)
        elif not exists:
            log.topic(topic, reliable=not live, **settings)
        directory = log._topic_directory(topic)
    made: dict[str, object] = {"topic": topic, "directory": str(directory), "created": not exists}
    made |= {"reliable": not live, "partitions": partitions or 1}
    session.output.result(made, f"{'kept' if exists else 'created'} {topic} in {made['directory']}")


def _check_existing(topic: str, is_live: bool, wants_live: bool, if_missing: bool, has_settings: bool) -> None:
    """The existing topic must match the request."""
    hint = None if if_missing else "Allow that with --if-missing"
    if is_live != wants_live:
        hint = "Choose another name, or delete it first"
        raise InputError(f"the topic {topic} already exists and is {'' if is_live else 'not '}live", hint=hint)
    if has_settings:
        hint = "Change its settings with `tidelog topic set` instead"
    if hint is not None:
        raise InputError(f"the topic {topic} already exists", hint=hint)


def set_settings(
    session: Session,
    topic: TopicArgument,
    settings: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="The value default removes a setting.")
    ],
) -> None:
    """Gives a topic settings of its own. They override those of the directory: retention_seconds=7d,
    ship_compression=zstd.

    They count from the next opening of the topic on. With a store they are kept in the catalog and move with the topic;
    its owner is not disturbed.
    """
    changes = parse_own_settings(settings)
    with session.open(runs_in_background=False) as log:
        require_topic(log, topic)
        directory, catalog = log._topic_directory(topic), catalog_of(log, topic)
        if catalog is None:
            log.topic(topic, **changes)
            own = own_settings(None, directory)
        else:
            own = change_in_catalog(catalog, directory, changes)
    session.output.record({"topic": topic, "settings": own})


class _Size(NamedTuple):
    """What a topic takes, here and in the store."""

    files: int
    bytes: int
    objects: int
    object_bytes: int

    def __str__(self) -> str:
        here = f"{counted(self.files, 'file')}, {human_bytes(self.bytes)}"
        return f"{here}; {counted(self.objects, 'object')}, {human_bytes(self.object_bytes)} in the store"


def _size_of(log: LogDirectory, topic: str) -> _Size:
    files, size = usage(log._topic_directory(topic))
    catalog = catalog_of(log, topic)
    if catalog is None or log._tier is None:
        return _Size(files, size, 0, 0)
    sizes = [info.size for info in log._tier.objects.list(catalog.keys.objects_prefix)]
    return _Size(files, size, len(sizes), sum(sizes))


def delete(
    session: Session,
    topic: TopicArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    take_over: HeldOption = False,
) -> None:
    """Deletes a topic and every message in it. For good, from the disk and from the store, even if another node owns
    it.

    One that another node has open is refused without --take-over. It asks first; without a terminal, it
    needs --yes. After a no the exit code is 1.
    """
    with session.open(runs_in_background=False) as log:
        require_topic(log, topic)
        size = _size_of(log, topic)
        confirm(session, yes, f"Delete {topic} ({_told(log, size)}) for good?", f"delete {topic}")
        log.delete_topic(topic, take_over=take_over)
    session.output.result({"topic": topic, "deleted": True, **size._asdict()}, f"deleted {topic}")


def _told(log: LogDirectory, size: _Size) -> str:
    return str(size) if log._tier is not None else str(size).partition(";")[0]


# A topic's own settings on the command line: `retention_seconds=7d`, `ship_compression=default`.
#
# Invariants
# - Values are read as those of the settings file are, units included, and a wrong one is refused before anything is
#   made.
# - Changing them claims nothing: a topic with a store has them in its catalog, and they count from its next opening on.


_DEFAULT = "default"


def parse_own_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` each; the value `default` takes a setting back, and is None here."""
    parsed: dict[str, Any] = {}
    for text in texts:
        name, found, value = text.partition("=")
        if not found or not name or not value:
            raise InputError(f"{text!r} is not NAME=VALUE", hint="For example: retention_seconds=7d")
        if name in parsed:
            raise InputError(f"the setting {name} is given twice")
        parsed[name] = None if value == _DEFAULT else _converted(name, value)
    with_own(TierSettings(), parsed)  # refuses names that are not settings of a topic
    return parsed


def _converted(name: str, value: str) -> object:
    with_own(TierSettings(), {name: None})
    return Given(settings_of(Settings)[name], value, name, is_text=True).convert()


def own_settings(catalog: Catalog | None, directory: Path) -> dict[str, object]:
    """Those that a topic has for itself: the catalog's, else those in its directory."""
    found = None if catalog is None else catalog.settings_document().read()
    if found is not None:
        return found.value
    info = read_topic_info(LocalFiles(), directory) if directory.is_dir() else None
    return {} if info is None else dict(info.settings)


def change_in_catalog(catalog: Catalog, directory: Path, changes: Mapping[str, object]) -> dict[str, object]:
    """Stores the changed settings in the catalog. Concurrent changes of other settings stay."""
    info = read_topic_info(LocalFiles(), directory) if directory.is_dir() else None
    if info is not None and not info.reliable:
        raise ConfigError(f"{info.name} has reliable=False and keeps no messages: there is nothing to set")

    def changed(known: dict[str, object] | None) -> dict[str, object]:
        merged = {**(own_settings(None, directory) if known is None else known), **changes}
        own = {name: value for name, value in merged.items() if value is not None}
        with_own(TierSettings(), own)
        return own

    return catalog.settings_document().update(changed)


# `tidelog topic list` and `tidelog topic describe`: show topics, on this disk and in the store.


_LIST_COLUMNS = (
    "topic",
    "start_offset",
    "hot_start_offset",
    "shipped_offset",
    "next_offset",
    "messages",
    "files",
    "bytes",
    "state",
)

_OFFSETS = ("start_offset", "hot_start_offset", "shipped_offset", "next_offset", "messages")

_LIST_NARROWER = (
    ("topic", "start_offset", "shipped_offset", "next_offset", "messages", "bytes", "state"),
    ("topic", "next_offset", "messages", "bytes", "state"),
    ("topic", "messages", "bytes", "state"),
)


def list_topics(session: Session) -> None:
    """Lists the topics with their offsets and sizes. Those on this disk and those in the catalog.

    Messages from start_offset on can be read; those from hot_start_offset on are on this disk, those below
    shipped_offset are in the store. Files and bytes are those on this disk. A topic whose state is live keeps nothing
    (reliable=False): what it has is known only in the process that has it open.

    A topic that cannot be opened is listed as well: its state is damaged or unreadable, and stderr (the field problem
    with --json) says why. The exit code stays 0.
    """
    problems: dict[str, Exception] = {}
    with session.look() as log:
        rows = [_row(log, name, problems) for name in topic_names(log)]
    if session.as_json:
        session.output.document(rows)
    else:
        session.output.table(_LIST_COLUMNS, rows, narrower=_LIST_NARROWER)
        _tell_problems(session, problems)


def _tell_problems(session: Session, problems: dict[str, Exception]) -> None:
    for name, error in problems.items():
        session.output.note(f"problem: {name}: {text_of(error)}")
    hints = [
        session.repair_hint(name) if isinstance(error, CorruptionError | GapError) else hint_of(error)
        for name, error in problems.items()
    ]
    for hint in dict.fromkeys(hint for hint in hints if hint is not None):
        session.output.note(f"hint: {hint}")


def _row(log: LogDirectory, name: str, problems: dict[str, Exception]) -> dict[str, object]:
    """One topic; what keeps it from being opened is put into `problems`."""
    row: dict[str, object] = dict.fromkeys(_LIST_COLUMNS) | {"topic": name, "reliable": None, "problem": None}
    try:
        row["files"], row["bytes"] = usage(log.root / name)
        row |= _offsets(log, open_log(log, name))
        row["state"] = "ok" if row["reliable"] else "live"
        read_topic_info(LocalFiles(), log.root / name)
    except (TidelogError, OSError) as error:
        problems[name] = error
        state = "damaged" if isinstance(error, DataError) else "unreadable"
        row |= {"state": state, "problem": text_of(error)}
    return row


def _offsets(log: LogDirectory, topic: Topic) -> dict[str, object]:
    if not topic.is_reliable:
        return {**dict.fromkeys(_OFFSETS), "reliable": False}
    start, end = topic.start_offset, topic.next_offset
    return {
        "start_offset": start,
        "hot_start_offset": topic.hot_start_offset,
        "shipped_offset": None if log._tier is None else topic.shipped_offset,
        "next_offset": end,
        "messages": max(0, end - start),
        "reliable": True,
    }


def describe(
    session: Session,
    topic: TopicArgument,
    transactions: Annotated[
        bool, typer.Option("--transactions", help="Also which transactions are open; reads the whole topic.")
    ] = False,
) -> None:
    """Shows one topic. Where it begins and ends, its files, its bytes, its times and its own settings.

    With a store also: who owns it and under which epoch, whether it is sealed, what the store has of it, and how much
    is not there yet (lag), which is what the loss of this disk would cost. What `tidelog topic rescue` would return is
    counted as to_rescue. A topic that is not reliable is a live one: it keeps nothing, and what it has is known only in
    the process that has it open.

    With --transactions also the last stable offset, where readers of committed messages end or wait, and the open
    transactions of Kafka's clients: producer, epoch and first offset. `tidelog topic abort-transaction` ends one.
    """
    with session.look() as log:
        require_topic(log, topic)
        if (logs := log.partition_logs(topic)) != [topic]:
            _describe_partitions(session, log, topic, logs, transactions)
            return
        opened, directory, catalog = log.topic(topic), log._topic_directory(topic), catalog_of(log, topic)
        start, end = opened.start_offset, opened.next_offset
        files, size = usage(directory)
        described: dict[str, object] = {
            "topic": topic,
            "id": _log_id(directory, catalog),
            "mode": log.mode,
            "directory": str(directory),
            **_offsets(log, opened),
            "files": files,
            "bytes": size,
            "first_timestamp": _timestamp(opened, start, end),
            "last_timestamp": _timestamp(opened, end - 1, end),
            "settings": own_settings(catalog, directory),
            "to_rescue": _to_rescue(log, topic),
        }
        if catalog is not None and opened.is_reliable:
            described |= _in_store(log, opened, catalog)
        if transactions and opened.is_reliable:
            described |= _open_transactions(opened)
    session.output.record(described)


def _open_transactions(topic: Topic) -> dict[str, object]:
    opened = [asdict(one) for one in topic.open_transactions()]
    return {"last_stable_offset": topic.last_stable_offset(), "open_transactions": opened}


def _describe_partitions(session: Session, log: LogDirectory, topic: str, logs: list[str], transactions: bool) -> None:
    """The offsets of each partition; `describe` with the name of one shows all that is known about it."""
    topics = [open_log(log, name) for name in logs]
    rows = [
        {"partition": number, "log": name, **_offsets(log, opened)}
        | (_open_transactions(opened) if transactions else {})
        for number, (name, opened) in enumerate(zip(logs, topics, strict=True))
    ]
    if session.as_json:
        session.output.document({"topic": topic, "partitions": rows})
    else:
        columns = ("partition", "log", "start_offset", "shipped_offset", "next_offset", "messages")
        session.output.table((*columns, *(("last_stable_offset", "open_transactions") if transactions else ())), rows)


def _log_id(directory: Path, catalog: Catalog | None) -> str | None:
    """Which log it is; None for one that keeps nothing."""
    found = None if catalog is None else catalog.owner()
    if found is not None:
        return found[0].log_id
    return known_log_id(LocalFiles(), directory) if directory.is_dir() else None


def _to_rescue(log: LogDirectory, topic: str) -> int:
    """Messages that `tidelog topic rescue` would return, whether they were put aside already or not."""
    return sum(tail.count for tail in Rescue(log, topic).tails())


def _timestamp(topic: Topic, offset: int, end: int) -> object:
    """The time of one message, or of the end of a transaction; None if it does not exist or is marked as lost."""
    if not topic.start_offset <= offset < end:
        return None
    with closing(topic._reader(offset, offset + 1, False, "skip", "read_uncommitted")) as reader:
        batch = reader.next_batch()
        if batch is None:
            return None
        with suppress(DataError, OverflowError):  # damage is for `tidelog verify`
            control = read_control(batch.payloads()[0])
            if control is not None:
                return to_datetime(control.timestamp_us)
        return next((message.timestamp for message in topic._decoded(reader, batch, "skip")), None)


def _in_store(log: LogDirectory, topic: Topic, catalog: Catalog) -> dict[str, object]:
    found = catalog.owner()
    owner = None if found is None else found[0]
    shipped, end = topic.shipped_offset, topic.next_offset
    descriptors = list(catalog.walk(0))
    return {
        "store": log._info.store,
        "metadata": log._info.metadata,
        "owner": None if owner is None else owner.node,
        "is_owner_here": owner is not None and owner.node == log._info.node,
        "epoch": None if owner is None else owner.epoch,
        "sealed": catalog.sealed_by(owner) is not None,
        "objects": len(descriptors),
        "object_bytes": sum(descriptor.size for descriptor in descriptors),
        "lag_messages": max(0, end - shipped),
        "oldest_unshipped": _timestamp(topic, shipped, end),
    }
