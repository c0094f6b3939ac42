"""`tidelog import danube`: imports a Danube topic from its WAL files, its objects or both.

Invariants
- The source is found and its names are checked before a log directory is created for it.
- However the command ends, everything imported so far is on disk, and the same command run again continues after it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tidelog.cli.output import counted
from tidelog.cli.session import HeldOption, Session, command, command_group
from tidelog.errors import InputError, NotFoundError, offsets_text
from tidelog.imports.danube.frames import Event
from tidelog.imports.danube.objects import DanubeTopic, find_object_topics, find_wal_topics
from tidelog.imports.danube.transfer import ImportSummary, import_messages
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import open_store
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import parse_topic_name
from tidelog.units import human_bytes

_SHOWN_PLACES = 10


class OnDamage(enum.Enum):
    """What to do about messages that cannot be read."""

    STOP = "stop"
    SKIP = "skip"


class OnRestart(enum.Enum):
    """What to do about offsets that Danube used twice."""

    STOP = "stop"
    RENUMBER = "renumber"


class _Plan(NamedTuple):
    """One topic to import: the name it gets, its name in Danube, and the places that have it, in order."""

    topic: str
    danube_topic: str
    places: list[DanubeTopic]

    @property
    def size(self) -> int:
        return sum(place.size for place in self.places)

    @property
    def unfinished(self) -> list[str]:
        """Uploads that are left out."""
        return [name for place in self.places for name in place.unfinished]


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("Bring in topics of other systems.")
    command(group, "danube")(danube)
    app.add_typer(group, name="import")


def danube(
    session: Session,
    wal: Annotated[
        Path | None,
        typer.Option(
            "--wal", metavar="DIR", readable=False, help="A topic's WAL directory, or the root of all of them."
        ),
    ] = None,
    objects: Annotated[
        str | None,
        typer.Option("--objects", metavar="URL", help="The store with Danube's objects, s3://... and so on."),
    ] = None,
    danube_topic: Annotated[
        str | None, typer.Option("--danube-topic", metavar="NAME", help="Only this one: namespace/name in Danube.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="What it is to be called [default: as in Danube].")
    ] = None,
    on_damage: Annotated[
        OnDamage, typer.Option("--on-damage", help="Messages that cannot be read: stop, or mark them as lost.")
    ] = OnDamage.STOP,
    on_restart: Annotated[
        OnRestart, typer.Option("--on-restart", help="Offsets used twice: stop, or number on.")
    ] = OnRestart.STOP,
    take_over: HeldOption = False,
) -> None:
    """Imports topics of Danube. With their offsets, times, routing keys and attributes.

    With both --wal and --objects, what the objects do not have is taken from the WAL. Offsets stay as they are; what
    else a message of Danube carries becomes headers that begin with danube-. Nothing of Danube's is changed. Stop its
    broker first, else what it has not written yet is missing.

    The command can be interrupted and run again: it compares what was imported before, and continues after it. A topic
    that holds anything else is refused.

    \b
    tidelog import danube --wal /var/lib/danube/wal
    tidelog import danube --objects s3://bucket/prefix \\
        --danube-topic default/orders --topic shop/orders
    """
    plans = _plans(wal, objects, danube_topic, topic, on_restart)
    with session.open() as log:
        summaries = [_import(session, log, plan, on_damage, on_restart, take_over) for plan in plans]
    if session.as_json:
        session.output.document([_document(plan, summary) for plan, summary in zip(plans, summaries, strict=True)])


# What to import


def _plans(
    wal: Path | None, objects: str | None, danube_topic: str | None, topic: str | None, on_restart: OnRestart
) -> list[_Plan]:
    for name in (danube_topic, topic):
        if name is not None:
            parse_topic_name(name.removeprefix("/") if name is danube_topic else name)
    _check_places(wal, objects, on_restart)
    places = _places(wal, objects, danube_topic and danube_topic.removeprefix("/"), on_restart is OnRestart.RENUMBER)
    if topic is not None and len(places) > 1:
        found = ", ".join(sorted(places)[:3]) + (", ..." if len(places) > 3 else "")
        raise InputError(
            f"--topic names one topic, and there are {len(places)}: {found}", hint="Choose one with --danube-topic"
        )
    plans = [_Plan(topic or name, name, places[name]) for name in sorted(places)]
    for plan in plans:
        parse_topic_name(plan.topic)
    return plans


def _check_places(wal: Path | None, objects: str | None, on_restart: OnRestart) -> None:
    if wal is None and objects is None:
        raise InputError("there is nothing to import", hint="Name Danube's WAL with --wal, or its store with --objects")
    if wal is not None and objects is not None and on_restart is OnRestart.RENUMBER:
        raise InputError(
            "--on-restart renumber takes either --wal or --objects: if offsets were used twice, it is unknown "
            "which messages of the WAL are already in the objects",
            hint="Import them into two topics, with --topic",
        )


def _places(
    wal: Path | None, objects: str | None, danube_topic: str | None, by_time: bool
) -> dict[str, list[DanubeTopic]]:
    """Where each topic is found: objects before WAL."""
    in_wal = [] if wal is None else _wal_topics(wal, danube_topic)
    found: list[DanubeTopic] = []
    if objects is not None:
        is_one = danube_topic is None and len(in_wal) == 1
        name = in_wal[0].name if is_one else danube_topic
        found += find_object_topics(_open_store(objects), name, by_time=by_time)
    places: dict[str, list[DanubeTopic]] = {}
    for place in [*found, *in_wal]:
        places.setdefault(place.name, []).append(place)
    if not places:
        raise NotFoundError(f"there is no topic {danube_topic} in {wal}", hint="Its name is that of its directories")
    return places


def _wal_topics(wal: Path, danube_topic: str | None) -> list[DanubeTopic]:
    """A topic's own directory is that topic under any name; below a root, names decide."""
    found = find_wal_topics(wal)
    if danube_topic is None:
        return found
    if Path(found[0].files[0].name).parent == wal:
        return [found[0]._replace(name=danube_topic)]
    return [topic for topic in found if topic.name == danube_topic]


def _open_store(url: str) -> ObjectStore:
    """The store to read from. A directory that is not there is not made for that."""
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.strip("/") and not Path(unquote(parts.path)).is_dir():
        raise NotFoundError(f"there is no directory {unquote(parts.path)}", hint="--objects names Danube's store")
    return open_store(url)


# Importing


def _import(
    session: Session, log: LogDirectory, plan: _Plan, on_damage: OnDamage, on_restart: OnRestart, take_over: bool
) -> ImportSummary:
    summary = ImportSummary()
    limit = session.settings.log.max_message_bytes
    with session.output.progress(f"importing {plan.danube_topic}", plan.size) as on_done:
        read = _Reading(on_done, plan.size)
        try:
            import_messages(
                [partial(read.frames, place, limit) for place in plan.places],
                lambda first_offset: log.topic(plan.topic, first_offset=first_offset, take_over=take_over),
                on_damage=on_damage.value,
                on_restart=on_restart.value,
                summary=summary,
            )
        except BaseException:
            if summary.messages:
                session.output.note(f"{_sentence(plan, summary)}; run the same command again to continue")
            raise
    _tell(session, plan, summary)
    return summary


class _Reading:
    """How much of the source has been read. Some of it may be read twice, to fill what another copy misses."""

    def __init__(self, on_done: Callable[[int], None], total_bytes: int) -> None:
        self._on_done = on_done
        self._total_bytes = total_bytes
        self._done_bytes = 0

    def frames(self, place: DanubeTopic, max_payload_bytes: int) -> Iterator[Event]:
        """Everything in one place."""
        for event in place.frames(max_payload_bytes):
            yield event
            self._done_bytes += event.size
            self._on_done(min(self._done_bytes, self._total_bytes))


def _document(plan: _Plan, summary: ImportSummary) -> dict[str, object]:
    import msgspec

    names = {"topic": plan.topic, "danube_topic": plan.danube_topic}
    return {**names, **msgspec.structs.asdict(summary), "unfinished": plan.unfinished}


def _tell(session: Session, plan: _Plan, summary: ImportSummary) -> None:
    """A summary on stderr; problems are noted with --json too."""
    if not session.as_json:
        session.output.note(_sentence(plan, summary))
    for text in _remarks(plan, summary):
        session.output.note(text)


def _sentence(plan: _Plan, summary: ImportSummary) -> str:
    there = f" ({counted(summary.already_there, 'message')} there already)" if summary.already_there else ""
    if summary.first_offset is None or summary.last_offset is None:
        return f"imported no messages to {plan.topic}{there}"
    where = offsets_text(summary.first_offset, summary.last_offset)
    return f"imported {counted(summary.messages, 'message')} to {plan.topic}: {where}{there}"


def _remarks(plan: _Plan, summary: ImportSummary) -> Iterator[str]:
    for place in summary.damaged[:_SHOWN_PLACES]:
        what = "torn tail" if place.is_tail else "damage"
        yield f"{what}: {place.file}, byte {place.byte}: {place.reason} ({human_bytes(place.bytes)} left out)"
    if summary.damages > _SHOWN_PLACES:
        yield f"{counted(summary.damages - _SHOWN_PLACES, 'more place')} with damage"
    for name in plan.unfinished[:_SHOWN_PLACES]:
        yield f"left out: {name}, an upload that Danube did not finish"
    if len(plan.unfinished) > _SHOWN_PLACES:
        yield f"{counted(len(plan.unfinished) - _SHOWN_PLACES, 'more upload')} that Danube did not finish"
    if summary.renumbered:
        yield f"{counted(summary.renumbered, 'message')} got new offsets; Danube's are in the header danube-offset"
    if summary.skipped:
        ranges = "; ".join(offsets_text(first, last) for first, last in summary.lost[:_SHOWN_PLACES])
        more = " and more" if len(summary.lost) > _SHOWN_PLACES else ""
        yield f"{counted(summary.skipped, 'message')} of {plan.topic} marked as lost: {ranges}{more}"
