"""What the engine commands have in common: locating the engine, opening it, and reporting errors.

Invariants
- A read-only command claims nothing in the store: the owner of the engine is not disturbed.
- Nothing is created where there is no engine, except by the commands that create one.
- Errors that the library words for programs are reworded for the command line.
"""

from __future__ import annotations

import functools
import inspect
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
import typer

from tidelog.cli.session import Session, command, run_reporting
from tidelog.clock import SystemClock
from tidelog.cold.catalog import Catalog
from tidelog.config import EngineConfig, load_engine_config
from tidelog.engine.cold.reader import ColdReader
from tidelog.engine.core import Core
from tidelog.engine.directory import ENGINE_FILE, EngineDirectory, remembered, resolved
from tidelog.engine.engine import Engine
from tidelog.engine.reader import EngineReader
from tidelog.engine.recovery.checkpoint import RestoreMarker, read_marker, refuse_half_restored
from tidelog.engine_wiring import open_engine_at, open_reader
from tidelog.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    FencedError,
    GapError,
    HeldError,
    InputError,
    LockedError,
    NotFoundError,
    RetryError,
    TidelogError,
)
from tidelog.files import Files, LocalFiles, explained
from tidelog.store.keys import DEFAULT_ENGINE
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import canonical_url, open_store

if TYPE_CHECKING:
    from tidelog.client.client import Client
    from tidelog.client.engine import RemoteEngine

DEFAULT_DIRECTORY = "engine"
# Text, not a path: it may be the URL of a store.
EngineDirectoryOption = Annotated[
    str | None,
    typer.Option(
        "--dir",
        "-d",
        metavar="DIR",
        help="The engine's directory [default: TIDELOG_DIR, the settings, ./engine].",
    ),
]
PlaceArgument = Annotated[str | None, typer.Argument(metavar="DIR", help="The engine's directory; the same as --dir.")]
NameOption = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="Its name at --server [default: the only one there]."),
]
SeqOption = Annotated[
    int | None, typer.Option("--seq", "-s", metavar="N", min=0, help="As it was at this seq [default: now].")
]
TakeOverOption = Annotated[
    bool, typer.Option("--take-over", help="Even if another node has the engine open; that node is fenced.")
]
LOCKED_HINT = (
    "Close it there, or wait; `tidelog engine status`, `tidelog engine dump-wal`, `tidelog engine dump-page` and "
    "`tidelog engine verify --read-only` work meanwhile; with a store get, stat, ls, scan, versions and digest do too"
)

_GAP_HINT = "Is it the right store, and is all of it there? `tidelog engine verify` says what is missing"


def engine_command(
    group: typer.Typer,
    name: str,
    work: Callable[..., None],
    *,
    takes_place: bool = False,
    takes_server: bool = False,
    reads_stores: bool = False,
    is_hidden: bool = False,
) -> None:
    """Registers a command about an engine; with `takes_place` its directory may also be an argument, with
    `takes_server` it asks `served` who does it. One that `reads_stores` takes the URL of one for a directory, too.
    """
    more = {"place": PlaceArgument} if takes_place else {}
    more |= {"engine": NameOption} if takes_server else {}
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(one, keyword, default=None, annotation=kind) for one, kind in more.items()]
    parameters = [*inspect.signature(work).parameters.values(), *added]

    @functools.wraps(work)
    def run(session: Session, engine: str | None = None, **arguments: Any) -> None:
        here = replace(_at_store(session, reads_stores=reads_stores), engine=engine)
        code = run_reporting(lambda: _told(work, here, arguments), here)
        if code:
            raise typer.Exit(code)

    hints = get_type_hints(work, include_extras=True)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, **more}
    command(group, name, EngineDirectoryOption, is_hidden=is_hidden, takes_server=takes_server, takes_urls=True)(run)


def _at_store(session: Session, *, reads_stores: bool) -> Session:
    """A store that was named in place of a directory is the one to read."""
    url = session.place_url
    if url is None:
        return session
    if not reads_stores:
        session.refuse_url("the directory of an engine")
    if session.store not in (None, url):
        raise InputError(f"two stores were named, {url} and {session.store}", hint="Name one of them")
    return replace(session, store=url, place_url=None)


def _told(work: Callable[..., None], session: Session, arguments: dict[str, Any]) -> None:
    try:
        work(session, **arguments)
    except HeldError:
        raise
    except LockedError as error:
        raise RetryError(error.message, path=error.path, hint=LOCKED_HINT) from error
    except CorruptionError as error:
        if not error.path or not error.path.is_relative_to(engine_root(session)):
            raise
        hint = f"`tidelog engine verify` lists all damage; {restore_hint(session)} makes a new copy from the store"
        raise DataError(error.message, operation=error.operation, path=error.path, hint=hint) from error
    except GapError as error:
        raise DataError(error.message, path=error.path, hint=_GAP_HINT) from error
    except FencedError as error:
        hint = f"Use the directory that owns it now; {restore_hint(session)} makes a new copy from the store"
        raise RetryError(error.message, path=error.path, hint=hint) from error


def restore_hint(session: Session) -> str:
    """The command that makes a new copy of this engine."""
    try:
        store = described(session, engine_root(session)).store or "URL"
    except TidelogError:
        store = "URL"  # what the directory remembers is damaged too
    return f"`tidelog engine restore --dir NEW_DIR --store {shlex.quote(store)}`"


def engine_config(session: Session) -> EngineConfig:
    """The settings of the engine, from the file, the variables and the options."""
    directory = None if session.directory is None else str(session.directory)
    named = {"dir": directory, "store": session.store, "metadata": session.metadata}
    return load_engine_config(session.config, os.environ, named)


def engine_root(session: Session) -> Path:
    """The engine's directory, there or not."""
    return Path(os.path.abspath(engine_config(session).dir or DEFAULT_DIRECTORY))


def is_engine(root: Path) -> bool:
    """Whether there is an engine in a directory, or the beginning of one."""
    return (root / ENGINE_FILE).exists() or (root / "wal").is_dir()


def find_engine(session: Session) -> Path:
    """The engine's directory; NotFoundError where there is no engine, InputError where a restore was cut off."""
    root = engine_root(session)
    with explained("open engine", root):
        if not is_engine(root):
            refuse_half_restored(LocalFiles(), root)
            raise NotFoundError(
                f"there is no engine in {root}",
                hint="Name its directory with --dir; `tidelog engine apply` begins one, `tidelog engine restore` "
                "brings one back from its store",
            )
        refuse_half_restored(LocalFiles(), root)
    return root


def described(session: Session, root: Path) -> EngineDirectory:
    """What the directory says about itself, with what was named if it has claimed no store."""
    config = engine_config(session)
    own = config.storage_engine
    return resolved(LocalFiles(), root, config.store or own.store_url, own.metadata, own.metadata_root)


def open_objects(session: Session, url: str) -> ObjectStore:
    """The store of an engine."""
    return open_store(url, engine_config(session).object_store)


def open_metadata(session: Session, info: EngineDirectory, objects: ObjectStore) -> MetadataStore:
    """The catalog of an engine, for reading."""
    settings = engine_config(session).metadata_store
    return open_metadata_store(info.metadata, objects, read_only=True, settings=settings)


@contextmanager
def changing(session: Session, *, take_over: bool, creates: bool = False) -> Iterator[Engine]:
    """The engine, open and with its store claimed; nothing runs beside the command but its heartbeat."""
    root = engine_root(session) if creates else find_engine(session)
    with open_engine_at(root, engine_config(session), runs_in_background=False, take_over=take_over) as engine:
        yield engine


@contextmanager
def changing_anywhere(session: Session, *, take_over: bool, creates: bool = False) -> Iterator[Engine | RemoteEngine]:
    """The engine for changing it: through its server where there is one, else as `changing` has it."""
    with ExitStack() as opened:
        remote = opened.enter_context(served(session))
        yield remote or opened.enter_context(changing(session, take_over=take_over, creates=creates))


def statistics_of(engine: Engine | RemoteEngine) -> dict[str, Any]:
    """All statistics, as a server tells them."""
    if isinstance(engine, Engine):
        found: dict[str, Any] = msgspec.to_builtins(engine.statistics())
        return found
    return engine._bridge.wait(engine._statistics_of())


@contextmanager
def served(session: Session) -> Iterator[RemoteEngine | None]:
    """The engine behind the server that was named, or behind the one that serves its directory; None where there is
    neither.
    """
    is_named = session.server is not None
    if session.engine is not None and not is_named:
        raise InputError("--engine goes with --server", hint="Name the engine here by its directory: --dir")
    client = session.connect(None if is_named else engine_root(session))
    if client is None:
        yield None
        return
    with client:
        name = _name_at(client, session.engine) if is_named else _name_of(client, engine_root(session))
        yield None if name is None else client.engine(name)


def _name_at(client: Client, wanted: str | None) -> str:
    """As the server calls the engine that is meant; which one is not guessed."""
    names = client.engines()
    if wanted is None and len(names) != 1:
        what = f"it has {', '.join(names)}" if names else "it has none that the token may see"
        raise InputError(f"which engine of {client.url} is not clear: {what}", hint="Name it with --engine NAME")
    return wanted or names[0]


def _name_of(client: Client, root: Path) -> str | None:
    """As the server of this machine calls the engine in a directory."""
    found = client._bridge.wait(client._http.json("GET", "/v1/engines"))["engines"]
    places = {one["name"]: one.get("directory") for one in found}
    return next((name for name, place in places.items() if place and _is_same(Path(place), root)), None)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def store_alone(session: Session) -> str | None:
    """The store that was named, where the directory was not, and is not that of its engine."""
    named = engine_config(session).store
    if session.store is None or named is None or session.directory is not None or session.server is not None:
        return None
    known = remembered(LocalFiles(), engine_root(session))
    is_here = known is not None and known.store is not None and canonical_url(known.store) == canonical_url(named)
    return None if is_here else named


@contextmanager
def reading_anywhere(session: Session) -> Iterator[Engine | EngineReader | RemoteEngine]:
    """The engine for looking at it: through its server where there is one, else as `reading` has it. A store that was
    named is read, whatever engine is in the default directory.
    """
    with ExitStack() as opened:
        if (store := store_alone(session)) is not None:
            yield opened.enter_context(shipped(session, store, is_alone=True))
            return
        yield opened.enter_context(served(session)) or opened.enter_context(reading(session))


@contextmanager
def reading(session: Session) -> Iterator[Engine | EngineReader]:
    """The engine for looking at it, with nothing claimed: recovered here, with values of the store within reach. From
    its store alone where its owner has it open, where a lazy restore fills the directory, and where a store is named
    and there is no engine in the directory.
    """
    config, root = engine_config(session), engine_root(session)
    if (lazy := _lazily_restored(root)) is not None:
        with _meanwhile(config, lazy) as reader:
            session.output.note(f"a restore fills {root}: this is what its store has, up to seq {reader.applied_seq}")
            yield reader
        return
    named = config.store or config.storage_engine.store_url
    if named is not None and not is_engine(root):
        with shipped(session, named) as reader:
            yield reader
        return
    root = find_engine(session)
    info = described(session, root)
    with ExitStack() as opened:
        try:
            core = opened.enter_context(opened_core(session, root))
        except LockedError:
            if info.store is None:
                raise
            reader = opened.enter_context(shipped(session, info.store))
            session.output.note(
                f"the engine is open in another process: this is what its store has, up to seq {reader.applied_seq}"
            )
            yield reader
            return
        engine = Engine(core, opened.enter_context(cold_reading(session, core, info)), runs_in_background=False)
        try:
            yield engine
        finally:
            engine.close(checkpoint=False)  # nothing was changed that would be worth one


def _lazily_restored(root: Path) -> RestoreMarker | None:
    """The beginning of a lazy restore that has not come to its end, if there is one."""
    try:
        marker = read_marker(LocalFiles(), root)
    except FileNotFoundError:
        return None
    return marker if marker.is_lazy else None


@contextmanager
def _meanwhile(config: EngineConfig, marker: RestoreMarker) -> Iterator[EngineReader]:
    """What the store of a lazy restore has, until the directory is filled."""
    own = msgspec.structs.replace(config.storage_engine, metadata=marker.metadata, metadata_root=marker.metadata_root)
    there = msgspec.structs.replace(config, dir=None, store=marker.store, storage_engine=own)
    with _newest(there, marker.name or DEFAULT_ENGINE) as reader:
        yield reader


@contextmanager
def shipped(session: Session, store: str, *, is_alone: bool = False) -> Iterator[EngineReader]:
    """What the store has of an engine now. `is_alone`: the directory has nothing to do with it."""
    config = engine_config(session)
    is_here = not is_alone and is_engine(engine_root(session))
    here = config if is_here else msgspec.structs.replace(config, dir=None)
    with _newest(msgspec.structs.replace(here, store=store), DEFAULT_ENGINE) as reader:
        yield reader


@contextmanager
def _newest(config: EngineConfig, name: str) -> Iterator[EngineReader]:
    """All that a store has now."""
    with open_reader(config, runs_in_background=False, name=name) as reader:
        reader.refresh()
        yield reader


@contextmanager
def opened_core(session: Session, root: Path, files: Files | None = None) -> Iterator[Core]:
    """The hot half. It is closed without a checkpoint: nothing was changed that would be worth one."""
    core = Core.open(root, engine_config(session).storage_engine, files or LocalFiles(), SystemClock())
    try:
        yield core
    finally:
        core.close()


@contextmanager
def cold_reading(session: Session, core: Core, info: EngineDirectory) -> Iterator[Any]:
    """What reads values from the store; None where there is none."""
    if info.store is None:
        yield None
        return
    settings = core.settings
    objects = open_objects(session, info.store)
    replicas = [open_objects(session, url) for url in settings.replicas]
    with open_metadata(session, info, objects) as metadata:
        reader = ColdReader(Catalog(metadata, info.keys), objects, settings.cold_cache_bytes, lambda: replicas)
        try:
            yield reader
        finally:
            reader.close()


def require_store(engine: Engine | RemoteEngine, session: Session) -> None:
    """ConfigError for an engine that is on this disk alone. A server says so itself."""
    if isinstance(engine, Engine) and engine._upkeep.cold is None:
        raise ConfigError(
            f"the engine in {engine_root(session)} has no store",
            hint="Name one: --store s3://bucket/prefix; the directory remembers it",
        )
