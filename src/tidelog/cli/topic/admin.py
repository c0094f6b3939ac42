"""Maintenance of a topic by hand: `tidelog topic ship`, `seal`, `prune`, `rebuild-catalog`, `remove-orphans` and
`abort-transaction`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import asdict

from tidelog.cli.errors import ExitCode
from tidelog.cli.output import OnDone, Row, counted
from tidelog.cli.session import Session, confirm
from tidelog.cli.topic.names import (
    AllOption,
    PlanOption,
    TakeOverOption,
    TopicArgument,
    TopicsArgument,
    catalog_of,
    chosen_topics,
    exit_if_any_failed,
    is_sealed,
    open_log,
    owned_log,
    require_kept,
    require_one_log,
    require_ours,
    require_store,
    require_topic,
    rows_of_each,
    usage,
)
from tidelog.clock import SystemClock
from tidelog.cold import rebuild
from tidelog.cold.gc import Candidate, Collector, Plan, Report
from tidelog.cold.ownership import read_local_claim
from tidelog.cold.rebuild import RebuildReport, partitions_in, rebuild_layout, topics_in
from tidelog.cold.retention import RetentionPlan
from tidelog.cold.settings import ShipperStatistics
from tidelog.errors import InputError, offsets_text
from tidelog.files import LocalFiles
from tidelog.store.keys import TopicKeys
from tidelog.store.object_store import ObjectStore
from tidelog.topics.directory import LogDirectory
from tidelog.topics.directory_info import INSIDE
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import TopicName, parse_topic_name, read_topic_info
from tidelog.topics.topic import Topic
from tidelog.units import human_bytes

_SHIPPED_COLUMNS = ("topic", "shipped_offset", "messages", "objects", "bytes")
_PRUNED_COLUMNS = ("topic", "start_offset", "hot_start_offset", "messages", "objects", "object_bytes", "file_bytes")
DUE_COLUMNS = ("topic", "messages", "objects", "object_bytes", "file_bytes")
_LOOK_SECONDS = 0.2


def ship(
    session: Session,
    topics: TopicsArgument = None,
    every: AllOption = False,
    take_over: TakeOverOption = False,
) -> None:
    """Brings everything on this disk to the store, now. Says how far each topic is there.

    A topic of which nothing is on this disk is left as it is. One that another node owns is refused (left out with
    --all), because opening it here would take it over.
    """
    with session.open(runs_in_background=False) as log:
        require_store(log)
        names = chosen_topics(session, log, topics, every, take_over)
        rows = rows_of_each(session, names, lambda name: _ship(session, log, name, take_over))
    session.output.rows(_SHIPPED_COLUMNS, rows)
    exit_if_any_failed(rows)


def _ship(session: Session, log: LogDirectory, name: str, take_over: bool) -> Row:
    files, _ = usage(log.root / name)
    if not files:
        return _shipped(name, _shipped_offset(log, name), 0, 0, 0)
    topic = open_log(log, name, take_over=take_over)
    before = _shipper(topic)
    with session.output.progress(f"shipping {name}", before.lag_bytes) as on_done, _watched(topic, on_done):
        shipped = topic.ship()
    after = _shipper(topic)
    objects = after.objects_created - before.objects_created
    return _shipped(name, shipped, shipped - before.shipped_offset, objects, after.bytes_uploaded)


def _shipped(name: str, shipped_offset: int, messages: int, objects: int, size: int) -> Row:
    return dict(zip(_SHIPPED_COLUMNS, (name, shipped_offset, messages, objects, size), strict=True))


def _shipped_offset(log: LogDirectory, name: str) -> int:
    catalog = catalog_of(log, name)
    assert catalog is not None, "there is a store"
    return catalog.next_offset()


def _shipper(topic: Topic) -> ShipperStatistics:
    tier = topic.statistics().tier
    assert tier is not None and tier.shipper is not None, "an owner has a shipper"
    return tier.shipper


@contextmanager
def _watched(topic: Topic, on_done: OnDone) -> Iterator[None]:
    """Tells how many bytes have been shipped, object by object, while the body ships them."""
    with _repeated(lambda: on_done(_shipper(topic).raw_bytes_uploaded)):
        yield


@contextmanager
def _repeated(look: Callable[[], None]) -> Iterator[None]:
    """Looks a few times a second while the body runs."""
    done = Event()

    def run() -> None:
        while not done.wait(_LOOK_SECONDS):
            look()

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def seal(session: Session, topic: TopicArgument, take_over: TakeOverOption = False) -> None:
    """Hands a topic over to another node. Ships everything, records where the next owner continues, and removes the
    topic from this disk.

    The next node that opens it, this one included, continues without a gap. It does not ask for confirmation, because
    nothing is lost: to have the topic back, open it again, for example with `tidelog produce`.
    """
    with session.open(runs_in_background=False) as log:
        store = require_store(log).objects.url
        require_topic(log, topic)
        require_kept(log, topic)
        require_one_log(log, topic)
        was_sealed = is_sealed(log, topic)
        if not was_sealed:
            require_ours(log, topic, take_over)
            opened = open_log(log, topic, take_over=take_over)
            lag_bytes = _shipper(opened).lag_bytes
            with session.output.progress(f"shipping {topic}", lag_bytes) as on_done, _watched(opened, on_done):
                opened.ship()
            opened.seal()
        next_offset = _shipped_offset(log, topic)
    if session.as_json:
        session.output.document({"topic": topic, "sealed": True, "next_offset": next_offset, "store": store})
        return
    done = "was sealed already" if was_sealed else "is sealed"
    session.output.note(f"{topic} {done}: everything below offset {next_offset} is in {store}")
    session.output.note(f"its next owner opens it with that store and continues at offset {next_offset}")


def prune(
    session: Session,
    topics: TopicsArgument = None,
    every: AllOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and delete nothing.")] = False,
    plan_id: PlanOption = None,
    take_over: TakeOverOption = False,
) -> None:
    """Deletes what the retention settings say, now. Says what went.

    retention_seconds and retention_bytes delete messages for good; local_retention_seconds and local_retention_bytes
    remove files from this disk that the store has. Without any of them nothing is deleted. A server gives what
    --dry-run shows an id: --plan ID deletes exactly that, or fails if it is not what is due by then.
    """
    refuse_plan_here(plan_id)
    with session.open(runs_in_background=False) as log:
        names = chosen_topics(session, log, topics, every, take_over)
        work = _would_prune if dry_run else _prune
        rows = rows_of_each(session, names, lambda name: work(log, name, take_over))
    session.output.rows(DUE_COLUMNS if dry_run else _PRUNED_COLUMNS, rows)
    exit_if_any_failed(rows)


def refuse_plan_here(plan_id: str | None) -> None:
    """Plans have ids where a server has made them."""
    if plan_id is not None:
        raise InputError(
            "--plan names a plan of a server, and none serves this directory", hint="Leave it out, or give --server"
        )


def due_row(topic: str, plans: Sequence[RetentionPlan]) -> Row:
    """What retention would delete of a topic, all partitions together."""
    return {
        "topic": topic,
        "messages": sum(one.delete_before - one.start_offset for one in plans),
        "objects": sum(len(one.objects) for one in plans),
        "object_bytes": sum(one.object_bytes for one in plans),
        "file_bytes": sum(one.file_bytes for one in plans),
    }


def _would_prune(log: LogDirectory, name: str, take_over: bool) -> Row:
    return due_row(name, [open_log(log, name, take_over=take_over).plan_retention()])


def _prune(log: LogDirectory, name: str, take_over: bool) -> Row:
    topic = open_log(log, name, take_over=take_over)
    start_before, (_, bytes_before) = topic.start_offset, usage(log.root / name)
    topic.prune()
    _, bytes_after = usage(log.root / name)
    tier = topic.statistics().tier
    retention = None if tier is None else tier.retention
    return {
        "topic": name,
        "start_offset": topic.start_offset,
        "hot_start_offset": topic.hot_start_offset,
        "messages": topic.start_offset - start_before,
        "objects": None if retention is None else retention.cold_objects_removed,
        "object_bytes": None if retention is None else retention.cold_bytes_removed,
        "file_bytes": max(0, bytes_before - bytes_after),
    }


def abort_transaction(
    session: Session,
    topic: TopicArgument,
    producer_id: Annotated[
        int, typer.Option("--producer-id", metavar="N", help="Of `tidelog topic describe --transactions`.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    take_over: TakeOverOption = False,
) -> None:
    """Aborts an open transaction of a Kafka client. For one that nobody else will end, because its coordinator is gone:
    it holds up all readers of committed messages.

    Its messages are not deleted, but only readers of uncommitted messages see them from now on. It asks first; without
    a terminal it needs --yes. It reads the whole topic, and a topic with partitions is named by one: ns/name-part-0.
    """
    with session.open(runs_in_background=False) as log:
        require_topic(log, topic)
        opened = owned_log(log, topic, take_over)
        doomed = f"Abort the transaction of producer {producer_id} in {topic} for good?"
        confirm(session, yes, doomed, f"abort a transaction in {topic}")
        aborted = opened.abort_transaction(producer_id)
        made = {"topic": topic, **asdict(aborted), "last_stable_offset": opened.last_stable_offset()}
    session.output.result(
        made, f"aborted the transaction of producer {producer_id}, open since offset {aborted.first_offset}"
    )


# `tidelog topic rebuild-catalog`: recovers a topic's catalog from the bucket alone.


_COLUMNS = ("topic", "start_offset", "next_offset", "messages", "objects", "bytes", "epoch")


def rebuild_catalog(
    session: Session,
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC...", help="namespace/name [default: all in the store that have no catalog]."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All topics that the store has objects of.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Even if the topic has a catalog; its owner is fenced.")
    ] = False,
    allow_gaps: Annotated[
        bool, typer.Option("--allow-gaps", help="Continue after missing objects, and skip damaged ones.")
    ] = False,
    start_offset: Annotated[
        int | None, typer.Option("--from", metavar="OFFSET", min=0, help="Leave out what is before.")
    ] = None,
    keep_local: Annotated[
        bool, typer.Option("--keep-local", help="The files on this disk are still the end of the topic.")
    ] = False,
    take_over: TakeOverOption = False,
) -> None:
    """Rebuilds the catalog from the objects in the store. Every one is read and checked, none is changed.

    Use it if the metadata is lost, or can no longer be trusted. Messages on this disk that are not shipped are put
    aside when the topic is opened next, for `tidelog topic rescue`, unless they are known to be its end: because the
    catalog was in this directory alone, or by --keep-local. A topic with partitions is rebuilt with all of them, and
    with their number. A topic that another node has open is replaced with --take-over only.
    """
    with session.open(runs_in_background=False) as log:
        names = _chosen(session, log, topics, every, replace)
        rows = rows_of_each(
            session,
            names,
            lambda name: _rebuild(
                session,
                log,
                name,
                allow_gaps=allow_gaps,
                replace=replace,
                start_offset=start_offset,
                keep=keep_local,
                take_over=take_over,
            ),
        )
    session.output.rows(_COLUMNS, rows)
    if not names:
        session.output.note("every topic in the store has a catalog; nothing was done")
    exit_if_any_failed(rows)


def _chosen(session: Session, log: LogDirectory, names: list[str] | None, every: bool, replace: bool) -> list[str]:
    tier = require_store(log)
    if names and every:
        raise InputError("name the topics, or give --all, not both")
    if names:
        parsed = [parse_topic_name(name) for name in dict.fromkeys(names)]
        _rebuild_layouts(session, log, parsed)
        return [name for one in parsed for name in _logs_of(log, one)]
    found = topics_in(tier.objects)
    _rebuild_layouts(session, log, [TopicName(*topic) for topic in found])
    if every and replace:
        return sorted("/".join(topic) for topic in found)
    without = [topic for topic in found if tier.catalog(*topic).owner() is None]
    for topic in sorted(set(found) - set(without)) if every else []:
        session.output.note(f"left out: {'/'.join(topic)} has a catalog; --replace rebuilds it anyway")
    return sorted("/".join(topic) for topic in without)


def _rebuild_layouts(session: Session, log: LogDirectory, names: Sequence[TopicName]) -> None:
    tier = require_store(log)
    wholes = (one if (found := one.parent()) is None else found[0] for one in names)
    for name in dict.fromkeys(wholes):
        info = read_topic_info(LocalFiles(), name.directory(log.root))
        keys = tier.catalog(name.namespace, name.name).keys
        layout = rebuild_layout(tier.metadata, keys, tier.objects, None if info is None else info.partitions)
        if layout is not None:
            session.output.note(f"brought back: {name} has {counted(layout.count, 'partition')}")


def _logs_of(log: LogDirectory, name: TopicName) -> list[str]:
    """The log of a topic, or those of its partitions that have objects."""
    tier = require_store(log)
    keys = tier.catalog(name.namespace, name.name).keys
    layout = tier.catalog(name.namespace, name.name).partitions_document().read()
    if layout is None:
        return [str(name)]
    logs = [str(name.log_of(number, layout.value)) for number in partitions_in(tier.objects, keys)]
    return [str(name), *logs] if layout.value.has_grown else logs


def _rebuild(
    session: Session,
    log: LogDirectory,
    name: str,
    *,
    allow_gaps: bool,
    replace: bool,
    start_offset: int | None,
    keep: bool,
    take_over: bool,
) -> Row:
    tier, parsed = require_store(log), parse_topic_name(name)
    keys = tier.catalog(parsed.namespace, parsed.name).keys
    total_bytes = sum(info.size for info in tier.objects.list(keys.objects_prefix))
    with session.output.progress(f"reading {name}", total_bytes) as on_done:
        report = rebuild.rebuild_catalog(
            tier.metadata,
            keys,
            tier.objects,
            clock=SystemClock(),
            node=log._info.node,
            time_field=TIMESTAMP_FIELD,
            progress=lambda done_bytes, _: on_done(done_bytes),
            allow_gaps=allow_gaps,
            replace=replace,
            start_offset=start_offset,
            incarnation=_local_incarnation(log, name, keys, tier.objects, keep),
            max_message_bytes=log._log_settings.max_message_bytes,
            lease=tier.lease,
            take_over=take_over,
        )
    _tell_what_is_missing(session, name, report)
    return {"topic": name, **_document(report)}


def _local_incarnation(log: LogDirectory, name: str, keys: TopicKeys, objects: ObjectStore, keep: bool) -> str | None:
    """The claim of the files here, where they are the end of the topic: nobody has shipped under a later epoch, and
    nobody else can have claimed it, or that is what we were told."""
    directory = log.root / name
    local = read_local_claim(LocalFiles(), directory) if directory.is_dir() else None
    if local is None or not (keep or log._info.metadata == INSIDE):
        return None
    names = (keys.parse_object(info.key) for info in objects.list(keys.objects_prefix))
    newest = max((found.epoch for found in names if found is not None), default=0)
    return (local.claim or local.intended) if local.epoch >= newest else None


def _tell_what_is_missing(session: Session, name: str, report: RebuildReport) -> None:
    for first, last in report.gaps:
        session.output.note(f"missing: {name}: {offsets_text(first, last)} are in no object")
    for one in report.damaged:
        session.output.note(f"damaged: {name}: {one.key}: {one.reason}")
    unused = len(report.orphans) + len(report.below_start)
    if unused:
        session.output.note(
            f"{name}: {counted(unused, 'object')} not used; `tidelog topic remove-orphans {name}` shows them"
        )


def _document(report: RebuildReport) -> dict[str, object]:
    import msgspec

    found = msgspec.to_builtins(report)
    assert isinstance(found, dict)
    return found


# `tidelog topic remove-orphans`: finds unreferenced objects in the store. Plan, show, and with --apply remove.
#
# Orphan removal needs no claim, so it runs beside the owner, on whichever node that is. Only a step that changes the
# catalog, or drops what may be the only copy of something, claims the topic first, and says so.


_ORPHAN_COLUMNS = ("topic", "action", "kind", "reason", "object", "bytes")


class _Wanted(NamedTuple):
    """What is to be done about what is found."""

    apply: bool
    drop_lost: bool
    drop_uncovered: bool
    take_over: bool

    @property
    def drops(self) -> bool:
        return self.drop_lost or self.drop_uncovered


def remove_orphans(
    session: Session,
    topics: TopicsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="All topics in the catalog.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Do it.")] = False,
    drop_lost: Annotated[
        bool, typer.Option("--drop-lost", help="Remove lost objects from the catalog: readers then get GapError.")
    ] = False,
    drop_uncovered: Annotated[
        bool, typer.Option("--drop-uncovered", help="Delete what was never published, though it is the only copy.")
    ] = False,
    plan_id: PlanOption = None,
    take_over: TakeOverOption = False,
) -> None:
    """Shows what in the store belongs to nothing. Removes it with --apply.

    It claims nothing, so that it can run beside an owner; descriptors below the start stay then, its owner removes
    them. --drop-lost and --drop-uncovered do claim the topic, for the time that it takes. The exit code is 1 when
    objects are lost or damaged. A server that has the topics open does it: it gives each plan an id, and --apply
    --plan ID removes what was shown, or fails if that has changed.
    """
    refuse_plan_here(plan_id)
    wanted = _Wanted(apply, drop_lost, drop_uncovered, take_over)
    with session.open(runs_in_background=False) if apply and wanted.drops else session.look() as log:
        require_store(log)
        names = _chosen_for_orphans(session, log, topics, every)
        results = rows_of_each(session, names, lambda name: _remove_orphans(session, log, name, wanted))
    tell_orphans(session, results, apply)


def tell_orphans(session: Session, results: Sequence[Row], apply: bool) -> None:
    """Shows it; the exit code says whether something is lost."""
    if session.as_json:
        session.output.document(results)
    else:
        _tell(session, results, apply)
    exit_if_any_failed(results)
    if any(result["is_whole"] is False for result in results):
        raise typer.Exit(ExitCode.FOUND_WRONG)


def _chosen_for_orphans(session: Session, log: LogDirectory, names: list[str] | None, every: bool) -> list[str]:
    if bool(names) == every:
        raise InputError("name the topics, or give --all", hint="All topics: `tidelog topic list`")
    for name in names or []:
        require_topic(log, name)
    if names:
        return list(dict.fromkeys(names))
    tier = require_store(log)
    known = {"/".join(topic) for topic in tier.topics()}
    for name in sorted({"/".join(topic) for topic in topics_in(tier.objects)} - known):
        hint = session.pasteable(f"`tidelog topic rebuild-catalog {name}` makes one")
        session.output.note(f"left out: the store has objects of {name}, and there is no catalog of it; {hint}")
    return sorted(known)


def _remove_orphans(session: Session, log: LogDirectory, name: str, wanted: _Wanted) -> Row:
    if wanted.apply and wanted.drops:
        plan, report = _removed_by_owner(session, log, name, wanted)
    else:
        plan, report = _removed_beside_owner(log, name, wanted.apply)
    return orphans_of(name, plan, report)


def orphans_of(name: str, plan: Plan, report: Report | None) -> Row:
    """What was found of a topic, and what became of it."""
    found = plan.found if report is None else plan.after(report)
    return {
        "topic": name,
        "is_applied": report is not None,
        "is_whole": not any(one.is_wrong for one in plan.found),
        "is_deleted": plan.is_deleted,
        "bytes": plan.bytes,
        "found": [_row(name, one) for one in found],
        "report": None if report is None else {"objects": report.objects, "bytes": report.bytes, "kept": report.kept},
    }


def _row(topic: str, one: Candidate) -> Row:
    return dict(zip(_ORPHAN_COLUMNS, (topic, one.action, one.kind, one.reason, one.key, one.bytes), strict=True))


def _removed_beside_owner(log: LogDirectory, name: str, apply: bool) -> tuple[Plan, Report | None]:
    tier, parsed = require_store(log), parse_topic_name(name)
    collector = Collector(tier.catalog(parsed.namespace, parsed.name), tier.objects, SystemClock().now_us())
    plan = collector.plan()
    return plan, collector.apply(plan) if apply else None


def _removed_by_owner(session: Session, log: LogDirectory, name: str, wanted: _Wanted) -> tuple[Plan, Report | None]:
    require_ours(log, name, wanted.take_over)
    topic = open_log(log, name, take_over=wanted.take_over)
    tier = topic.statistics().tier
    assert tier is not None, "there is a store"
    session.output.note(f"claimed {name} for this, with epoch {tier.epoch}")
    plan = topic.plan_orphans()
    return plan, topic.remove_orphans(plan, drop_lost=wanted.drop_lost, drop_uncovered=wanted.drop_uncovered)


def _how_to_apply(looked: Sequence[Mapping[str, Any]]) -> str:
    known = [result["plan"] for result in looked if result.get("plan")]
    return f"--apply --plan {known[0]}" if len(known) == len(looked) == 1 else "--apply"


def _tell(session: Session, results: Sequence[Mapping[str, Any]], apply: bool) -> None:
    looked = [result for result in results if "found" in result]
    rows = [row for result in looked for row in result["found"]]
    if rows:
        session.output.table(_ORPHAN_COLUMNS, rows, narrower=[("action", "reason", "object", "bytes")])
    for result in looked:
        if result["is_deleted"]:
            session.output.note(f"{result['topic']} is being deleted: opening it finishes that")
        if result["report"] is not None:
            _tell_report(session, result)
    removable = [row for row in rows if row["action"] == "remove"]
    if removable and not apply:
        size = sum(row["bytes"] or 0 for row in removable)
        how = _how_to_apply(looked)
        session.output.note(f"{counted(len(removable), 'thing')} to remove, {human_bytes(size)}; do it with {how}")
    elif not rows:
        session.output.note("nothing to remove")


def _tell_report(session: Session, result: Mapping[str, Any]) -> None:
    report = result["report"]
    text = f"{result['topic']}: removed {counted(len(report['objects']), 'object')}, {human_bytes(report['bytes'])}"
    lost = [row for row in result["found"] if (row["action"], row["reason"]) == ("removed", "lost")]
    session.output.note(text + (f", and {counted(len(lost), 'descriptor')} of lost ones" if lost else ""))
    for one in report["kept"]:
        session.output.note(f"kept {one.key}: {one.why}")
