"""`tidelog topic rebuild-catalog`: the bucket alone gives a topic back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.session import Session
from tidelog.cli.topic_choice import exit_if_any_failed, require_store, rows_of_each

if TYPE_CHECKING:
    from tidelog.cli.output import Row
    from tidelog.tier.keys import TopicKeys
    from tidelog.tier.object_store import ObjectStore
    from tidelog.tier.rebuild import RebuildReport
    from tidelog.topics.storage import LogDirectory

_COLUMNS = ("topic", "start_offset", "next_offset", "messages", "objects", "bytes", "epoch")


def rebuild_catalog(
    session: Session,
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC...", help="namespace/name [default: all in the store that have no catalog]."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All topics that the store has objects of.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where there is a catalog; whoever owns the topic is fenced.")
    ] = False,
    allow_gaps: Annotated[
        bool, typer.Option("--allow-gaps", help="Go on where objects are missing, and without damaged ones.")
    ] = False,
    start_offset: Annotated[
        int | None, typer.Option("--from", metavar="OFFSET", min=0, help="Leave out what is before.")
    ] = None,
    keep_local: Annotated[
        bool, typer.Option("--keep-local", help="The files on this disk are still the end of the topic.")
    ] = False,
) -> None:
    """Makes the catalog anew from the objects in the store: every one is read and checked, none is changed.

    For when the metadata is lost, or is not to be believed any more. Messages on this disk that are not shipped are put
    aside when the topic is opened next, for `tidelog topic rescue`, unless they are known to be its end: because the
    catalog was in this directory alone, or by --keep-local.
    """
    with session.open(runs_in_background=False) as log:
        names = _chosen(session, log, topics, every, replace)
        rows = rows_of_each(
            session,
            names,
            lambda name: _rebuild(
                session, log, name, allow_gaps=allow_gaps, replace=replace, start_offset=start_offset, keep=keep_local
            ),
        )
    session.output.rows(_COLUMNS, rows)
    if not names:
        session.output.note("every topic that the store has objects of has a catalog; nothing was done")
    exit_if_any_failed(rows)


def _chosen(session: Session, log: LogDirectory, names: list[str] | None, every: bool, replace: bool) -> list[str]:
    from tidelog.errors import InputError
    from tidelog.tier.rebuild import topics_in
    from tidelog.topics.names import parse_topic_name

    tier = require_store(log)
    if names and every:
        raise InputError("name the topics, or give --all, not both")
    if names:
        return [str(parse_topic_name(name)) for name in dict.fromkeys(names)]
    found = topics_in(tier.objects)
    if every and replace:
        return sorted("/".join(topic) for topic in found)
    without = [topic for topic in found if tier.catalog(*topic).owner() is None]
    for topic in sorted(set(found) - set(without)) if every else []:
        session.output.note(f"left out: {'/'.join(topic)} has a catalog; --replace makes it anew all the same")
    return sorted("/".join(topic) for topic in without)


def _rebuild(
    session: Session,
    log: LogDirectory,
    name: str,
    *,
    allow_gaps: bool,
    replace: bool,
    start_offset: int | None,
    keep: bool,
) -> Row:
    from tidelog.clock import SystemClock
    from tidelog.tier import rebuild
    from tidelog.topics.message import TIMESTAMP_FIELD
    from tidelog.topics.names import parse_topic_name

    tier, parsed = require_store(log), parse_topic_name(name)
    keys = tier.catalog(parsed.namespace, parsed.name).keys
    total_bytes = sum(info.size for info in tier.objects.list(keys.objects_prefix))
    with session.output.progress(f"reading {name}", total_bytes) as on_done:
        report = rebuild.rebuild_catalog(
            *(tier.metadata, keys, tier.objects),
            clock=SystemClock(),
            node=log.info.node,
            time_field=TIMESTAMP_FIELD,
            progress=lambda done_bytes, _: on_done(done_bytes),
            allow_gaps=allow_gaps,
            replace=replace,
            start_offset=start_offset,
            lineage=_local_lineage(log, name, keys, tier.objects, keep),
        )
    _tell_what_is_missing(session, name, report)
    return {"topic": name, **_document(report)}


def _local_lineage(log: LogDirectory, name: str, keys: TopicKeys, objects: ObjectStore, keep: bool) -> str | None:
    """The claim of the files here, where they are the end of the topic: nobody has shipped under a later epoch, and
    nobody else can have claimed it, or that is what we were told."""
    from tidelog.files import LocalFiles
    from tidelog.tier.local_claim import read_local_claim
    from tidelog.topics.directory_info import INSIDE

    directory = log.root / name
    local = read_local_claim(LocalFiles(), directory) if directory.is_dir() else None
    if local is None or not (keep or log.info.metadata == INSIDE):
        return None
    names = (keys.parse_object(info.key) for info in objects.list(keys.objects_prefix))
    newest = max((found.epoch for found in names if found is not None), default=0)
    return (local.claim or local.intended) if local.epoch >= newest else None


def _tell_what_is_missing(session: Session, name: str, report: RebuildReport) -> None:
    from tidelog.cli.output import counted
    from tidelog.errors import offsets_text

    for first, last in report.gaps:
        session.output.note(f"missing: {name}: {offsets_text(first, last)} are in no object")
    for one in report.damaged:
        session.output.note(f"damaged: {name}: {one.key}: {one.reason}")
    unused = len(report.orphans) + len(report.below_start)
    if unused:
        session.output.note(f"{name}: {counted(unused, 'object')} not used; `tidelog topic sweep {name}` shows them")


def _document(report: RebuildReport) -> dict[str, object]:
    import msgspec

    found = msgspec.to_builtins(report)
    assert isinstance(found, dict)
    return found
