"""Which topics a command is about, and whether they are this directory's to work on.

Opening a topic for writing claims it, and whoever owned it is fenced. A command that does upkeep must not do that by
accident: it leaves topics alone that another node owns, or that were sealed for the next one, unless it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.errors import ExitCode, hint_of, text_of
from tidelog.cli.topic_names import require_topic, topic_names
from tidelog.errors import ConflictError, InputError, NotSupportedError, TidelogError
from tidelog.files import LocalFiles
from tidelog.topics.names import parse_topic_name
from tidelog.topics.topic_info import read_topic_info

if TYPE_CHECKING:
    from tidelog.cli.output import Row
    from tidelog.cli.session import Session
    from tidelog.tier.catalog import Catalog
    from tidelog.tier.owner import Owner, SealedMarker
    from tidelog.tier.tier import Tier
    from tidelog.topics.storage import LogDirectory

TopicsArgument = Annotated[list[str] | None, typer.Argument(metavar="TOPIC...", help="namespace/name.")]
AllOption = Annotated[bool, typer.Option("--all", help="All topics that are this directory's.")]
TakeOverOption = Annotated[
    bool, typer.Option("--take-over", help="Also if another node owns it, which is fenced, or if it is sealed.")
]


def require_store(log: LogDirectory) -> Tier:
    """The cold side; NotSupportedError where there is none."""
    if log.tier is None:
        raise NotSupportedError(
            "this log directory has no store", path=log.root, hint="Name one with --store s3://bucket/prefix"
        )
    return log.tier


def catalog_of(log: LogDirectory, name: str) -> Catalog | None:
    """What a topic's catalog says; None without a store."""
    parsed = parse_topic_name(name)
    return None if log.tier is None else log.tier.catalog(parsed.namespace, parsed.name)


def is_live(log: LogDirectory, name: str) -> bool:
    """Whether a topic has its messages in the memory of its process alone (`reliable=False`). Claims nothing."""
    directory = parse_topic_name(name).directory(log.root)
    info = read_topic_info(LocalFiles(), directory) if directory.is_dir() else None
    return info is not None and not info.reliable


def require_kept(log: LogDirectory, name: str) -> None:
    """NotSupportedError for a live topic: there is nothing of it that another process could work on."""
    if is_live(log, name):
        raise NotSupportedError(
            f"{name} is a live topic (reliable=False): its messages and subscriptions are only in the memory of the "
            "process that has it open",
            hint="Do it in that program, or use a topic that is reliable",
        )


def sealed_marker(catalog: Catalog, owner: Owner | None) -> SealedMarker | None:
    """The marker of a topic that is sealed now; one of an earlier owner is not believed."""
    marker = catalog.sealed()
    is_believed = marker is not None and marker.sealed and owner is not None and marker.epoch == owner.epoch
    return marker if is_believed else None


def is_sealed(log: LogDirectory, name: str) -> bool:
    """Whether the topic waits for its next owner."""
    catalog = catalog_of(log, name)
    found = None if catalog is None else catalog.owner()
    return catalog is not None and found is not None and sealed_marker(catalog, found[0]) is not None


def why_not_ours(log: LogDirectory, name: str) -> str | None:
    """Why opening a topic here would take it from somebody; None when nobody is concerned."""
    catalog = catalog_of(log, name)
    found = None if catalog is None else catalog.owner()
    if catalog is None or found is None:
        return None
    owner = found[0]
    if sealed_marker(catalog, owner) is not None:
        return f"{name} is sealed, for whoever opens it next"
    return None if owner.node == log.info.node else f"{owner.node} owns {name}, with epoch {owner.epoch}"


def require_ours(log: LogDirectory, name: str, take_over: bool) -> None:
    """ConflictError where opening the topic would take it from another node."""
    why = None if take_over else why_not_ours(log, name)
    if why is not None:
        raise ConflictError(why, hint="Do it there, or take the topic over with --take-over")


def chosen_topics(
    session: Session, log: LogDirectory, names: Sequence[str] | None, every: bool, take_over: bool
) -> list[str]:
    """Those that were named, all of which exist; or all that are this directory's, and those of others are told.

    Of a live topic there is nothing to work on.
    """
    if bool(names) == every:
        raise InputError("name the topics, or give --all", hint="All topics: `tidelog topic list`")
    for name in names or []:
        require_topic(log, name)
        require_kept(log, name)
        require_ours(log, name, take_over)
    if names:
        return list(dict.fromkeys(names))
    kept = [name for name in topic_names(log) if _may_be_kept(log, name)]
    return [name for name in kept if take_over or _is_ours(session, log, name)]


def _may_be_kept(log: LogDirectory, name: str) -> bool:
    """One of which that cannot be told is worked on with the others, and its problem is told then."""
    try:
        return not is_live(log, name)
    except (TidelogError, OSError):
        return True


def _is_ours(session: Session, log: LogDirectory, name: str) -> bool:
    why = why_not_ours(log, name)
    if why is not None:
        session.output.note(f"left out: {why}")
    return why is None


def rows_of_each(session: Session, names: Sequence[str], work: Callable[[str], Row | None]) -> list[Row]:
    """What the work gives for each topic. One that fails does not keep the others from being done."""
    rows: list[Row] = []
    for name in names:
        try:
            row = work(name)
        except TidelogError as error:
            if len(names) == 1:
                raise
            rows.append({"topic": name, "problem": text_of(error)})
            session.output.note(f"problem: {name}: {text_of(error)}")
            if (hint := hint_of(error)) is not None:
                session.output.note(f"hint: {session.pasteable(hint, name)}")
        else:
            rows += [] if row is None else [row]
    return rows


def exit_if_any_failed(rows: Sequence[Row]) -> None:
    """After the rows were shown."""
    if any(row.get("problem") is not None for row in rows):
        raise typer.Exit(ExitCode.FOUND_WRONG)
