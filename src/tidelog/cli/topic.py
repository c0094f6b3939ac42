"""`tidelog topic`: the group of commands about topics; making, setting and deleting them is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tidelog.cli.confirming import is_confirmed
from tidelog.cli.errors import ExitCode
from tidelog.cli.session import HeldOption, Session, command, command_group
from tidelog.cli.topic_rebuild import rebuild_catalog
from tidelog.cli.topic_rescue import rescue
from tidelog.cli.topic_show import TopicArgument, describe, list_topics, usage
from tidelog.cli.topic_sweep import sweep
from tidelog.cli.topic_upkeep import prune, seal, ship

if TYPE_CHECKING:
    from tidelog.topics.storage import LogDirectory


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("List, create, describe, ship, hand over, mend and delete topics.")
    commands: dict[str, Callable[..., None]] = {
        "list": list_topics,
        "create": create,
        "describe": describe,
        "set": set_settings,
        "delete": delete,
        "ship": ship,
        "seal": seal,
        "prune": prune,
        "sweep": sweep,
        "rescue": rescue,
        "rebuild-catalog": rebuild_catalog,
    }
    for name, work in commands.items():
        command(group, name)(work)
    app.add_typer(group, name="topic")


def create(
    session: Session,
    topic: TopicArgument,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="An existing topic is fine.")] = False,
    own: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of its own: retention_seconds=7d")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="It keeps nothing: messages are for who reads now.")] = False,
) -> None:
    """Makes an empty topic, and the log directory where there is none.

    `tidelog produce` makes topics by itself; this is for those who want them to exist before, or with settings of
    their own. With --live, the program that opens this directory hands its messages to whoever reads them there at that
    moment (`reliable=False`). That is remembered in this directory, and cannot be changed.
    """
    from tidelog.cli.topic_choice import is_live
    from tidelog.cli.topic_settings import parse_own_settings
    from tidelog.topics.names import parse_topic_name

    parse_topic_name(topic)  # before a directory is made for it
    settings = parse_own_settings(own or [])
    with session.open() as log:
        exists = log.has_topic(topic)
        if exists:
            _check_existing(topic, is_live(log, topic), live, if_missing, bool(settings))
        else:
            log.topic(topic, reliable=not live, **settings)
        directory = log.topic_directory(topic)
    made = {"topic": topic, "directory": str(directory), "created": not exists, "reliable": not live}
    if session.as_json:
        session.output.document(made)
    else:
        session.output.note(f"{'kept' if exists else 'created'} {topic} in {made['directory']}")


def _check_existing(topic: str, is_live: bool, wants_live: bool, if_missing: bool, has_settings: bool) -> None:
    """What is there has to be what was asked for."""
    from tidelog.errors import InputError

    hint = None if if_missing else "Allow that with --if-missing"
    if is_live != wants_live:
        hint = "Take another name, or delete it first"
        raise InputError(f"the topic {topic} exists already, and is {'' if is_live else 'not '}live", hint=hint)
    if has_settings:
        hint = "Change its settings with `tidelog topic set` instead"
    if hint is not None:
        raise InputError(f"the topic {topic} exists already", hint=hint)


def set_settings(
    session: Session,
    topic: TopicArgument,
    settings: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="The value default takes one back.")],
) -> None:
    """Gives a topic settings of its own, in the place of the directory's: retention_seconds=7d, ship_compression=zstd.

    They count from the next opening of the topic on. With a store they are kept in the catalog and move with the topic;
    its owner is not disturbed, whichever node that is.
    """
    from tidelog.cli.topic_choice import catalog_of
    from tidelog.cli.topic_names import require_topic
    from tidelog.cli.topic_settings import change_in_catalog, own_settings, parse_own_settings

    changes = parse_own_settings(settings)
    with session.open(runs_in_background=False) as log:
        require_topic(log, topic)
        directory, catalog = log.topic_directory(topic), catalog_of(log, topic)
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
        from tidelog.cli.output import counted, human_bytes

        here = f"{counted(self.files, 'file')}, {human_bytes(self.bytes)}"
        return f"{here}; {counted(self.objects, 'object')}, {human_bytes(self.object_bytes)} in the store"


def _size_of(log: LogDirectory, topic: str) -> _Size:
    from tidelog.cli.topic_choice import catalog_of

    files, size = usage(log.topic_directory(topic))
    catalog = catalog_of(log, topic)
    if catalog is None or log.tier is None:
        return _Size(files, size, 0, 0)
    sizes = [info.size for info in log.tier.objects.list(catalog.keys.objects_prefix)]
    return _Size(files, size, len(sizes), sum(sizes))


def delete(
    session: Session,
    topic: TopicArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    take_over: HeldOption = False,
) -> None:
    """Deletes a topic and every message in it, for good, from the disk and from the store, whichever node owns it.

    One that another node has open is refused, unless --take-over says so. It asks first; where nobody can answer, it
    needs --yes. After a no the exit code is 1.
    """
    from tidelog.cli.topic_names import require_topic

    with session.open(runs_in_background=False) as log:
        require_topic(log, topic)
        size = _size_of(log, topic)
        if not yes and not is_confirmed(f"Delete {topic} ({_told(log, size)}) for good?", f"deleting {topic}"):
            session.output.note("nothing was deleted")
            raise typer.Exit(ExitCode.FOUND_WRONG)
        log.delete_topic(topic, take_over=take_over)
    if session.as_json:
        session.output.document({"topic": topic, "deleted": True, **size._asdict()})
    else:
        session.output.note(f"deleted {topic}")


def _told(log: LogDirectory, size: _Size) -> str:
    return str(size) if log.tier is not None else str(size).partition(";")[0]
