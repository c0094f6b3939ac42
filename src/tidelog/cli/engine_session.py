"""What the commands about engines have in common: where the engine is, how it is opened, and how they fail.

Invariants
- A command that only looks claims nothing in the store: whoever owns the engine there goes on undisturbed.
- Nothing is made where there is no engine, except by the commands that begin one.
- Errors that the library words for programs are told in the words of these commands.
"""

from __future__ import annotations

import functools
import inspect
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tidelog.cli.session import Session, command, run_reporting

if TYPE_CHECKING:
    from tidelog.config import EngineConfig
    from tidelog.engine.core import Core
    from tidelog.engine.engine import Engine
    from tidelog.engine.engine_directory import EngineDirectory
    from tidelog.files import Files
    from tidelog.tier.keys import EngineKeys
    from tidelog.tier.object_store import ObjectStore

DEFAULT_DIRECTORY = "engine"
EngineDirectoryOption = Annotated[
    Path | None,
    typer.Option(
        *("--dir", "-d"),
        metavar="DIR",
        readable=False,
        help="The engine's directory [default: TIDELOG_DIR, the settings, ./engine].",
    ),
]
PlaceArgument = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="The engine's directory; the same as --dir.", readable=False)
]
SeqOption = Annotated[
    int | None, typer.Option("--seq", "-s", metavar="N", min=0, help="As it was at this seq [default: now].")
]
TakeOverOption = Annotated[
    bool, typer.Option("--take-over", help="Also if another node has the engine open, which is fenced then.")
]
LOCKED_HINT = (
    "Close it there, or wait; `tidelog engine status`, `tidelog engine dump-wal`, `tidelog engine dump-page` and "
    "`tidelog engine verify --read-only` work meanwhile"
)

_GAP_HINT = "Is it the right store, and is all of it there? `tidelog engine verify` says what is missing"


def engine_command(group: typer.Typer, name: str, work: Callable[..., None], *, takes_place: bool = False) -> None:
    """Registers a command about an engine; with `takes_place` its directory may also be an argument."""
    own = list(inspect.signature(work).parameters.values())
    place = inspect.Parameter("place", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=PlaceArgument)
    parameters = [*own, place] if takes_place else own

    @functools.wraps(work)
    def run(session: Session, place: Path | None = None, **arguments: Any) -> None:
        here = session if place is None else replace(session, directory=place)
        code = run_reporting(lambda: _told(work, here, arguments), here)
        if code:
            raise typer.Exit(code)

    hints = get_type_hints(work, include_extras=True)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, "place": PlaceArgument} if takes_place else hints
    command(group, name, EngineDirectoryOption)(run)


def _told(work: Callable[..., None], session: Session, arguments: dict[str, Any]) -> None:
    from tidelog.errors import CorruptionError, DataError, FencedError, GapError, HeldError, LockedError, RetryError

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
    from tidelog.errors import TidelogError

    try:
        store = described(session, engine_root(session)).store or "URL"
    except TidelogError:
        store = "URL"  # what the directory remembers is damaged too
    return f"`tidelog engine restore --dir NEW_DIR --store {shlex.quote(store)}`"


def engine_config(session: Session) -> EngineConfig:
    """The settings of the engine, from the file, the variables and the options."""
    from tidelog.config import load_engine_config
    from tidelog.errors import InputError

    if session.metadata is not None:
        raise InputError("--metadata is for topics", hint="Leave it out: the catalog of an engine is in its store")
    directory = None if session.directory is None else str(session.directory)
    return load_engine_config(session.config, os.environ, {"dir": directory, "store": session.store})


def engine_root(session: Session) -> Path:
    """The engine's directory, there or not."""
    return Path(os.path.abspath(engine_config(session).dir or DEFAULT_DIRECTORY))


def find_engine(session: Session) -> Path:
    """The engine's directory; NotFoundError where there is no engine, InputError where a restore was cut off."""
    from tidelog.engine.engine_directory import ENGINE_FILE
    from tidelog.engine.restore_marker import refuse_half_restored
    from tidelog.errors import NotFoundError
    from tidelog.files import LocalFiles, explained

    root = engine_root(session)
    with explained("open engine", root):
        if not (root / ENGINE_FILE).exists() and not (root / "wal").is_dir():
            refuse_half_restored(LocalFiles(), root)
            raise NotFoundError(
                f"there is no engine in {root}",
                hint="Name its directory with --dir; `tidelog engine put-log` begins one, `tidelog engine restore` "
                "brings one back from its store",
            )
        refuse_half_restored(LocalFiles(), root)
    return root


def described(session: Session, root: Path) -> EngineDirectory:
    """What the directory says about itself, with the store that was named if it knows none."""
    import msgspec

    from tidelog.engine.engine_directory import EngineDirectory, remembered
    from tidelog.errors import ConfigError
    from tidelog.files import LocalFiles

    config = engine_config(session)
    named = config.store or config.storage_engine.store_url
    known = remembered(LocalFiles(), root) or EngineDirectory(node="")
    if known.store is not None and named not in (None, known.store):
        raise ConfigError(
            f"this engine is shipped to {known.store}, not to {named}", path=root, hint="Leave --store out"
        )
    return msgspec.structs.replace(known, store=known.store or named)


def open_objects(session: Session, url: str) -> ObjectStore:
    """The store of an engine."""
    from tidelog.tier.stores import open_store

    return open_store(url, engine_config(session).object_store)


def keys_of(info: EngineDirectory) -> EngineKeys:
    """Where the engine is in its store."""
    from tidelog.tier.keys import EngineKeys

    return EngineKeys(info.name)


@contextmanager
def changing(session: Session, *, take_over: bool, creates: bool = False) -> Iterator[Engine]:
    """The engine, open and with its store claimed; nothing runs beside the command but its heartbeat."""
    from tidelog.engine_wiring import open_engine_at

    root = engine_root(session) if creates else find_engine(session)
    with open_engine_at(root, engine_config(session), runs_in_background=False, take_over=take_over) as engine:
        yield engine


@contextmanager
def reading(session: Session) -> Iterator[Engine]:
    """The engine for looking at it: recovered, values of the store within reach, nothing claimed."""
    from tidelog.engine.engine import Engine

    root = find_engine(session)
    info = described(session, root)
    with opened_core(session, root) as core, cold_reading(session, core, info) as reader:
        engine = Engine(core, reader, runs_in_background=False)
        try:
            yield engine
        finally:
            engine.close(checkpoint=False)  # nothing was changed that would be worth one


@contextmanager
def opened_core(session: Session, root: Path, files: Files | None = None) -> Iterator[Core]:
    """The hot half. It is closed without a checkpoint: nothing was changed that would be worth one."""
    from tidelog.clock import SystemClock
    from tidelog.engine.core import Core
    from tidelog.files import LocalFiles

    core = Core.open(root, engine_config(session).storage_engine, files or LocalFiles(), SystemClock())
    try:
        yield core
    finally:
        core.close()


@contextmanager
def cold_reading(session: Session, core: Core, info: EngineDirectory) -> Iterator[Any]:
    """What reads values from the store; None where there is none."""
    from tidelog.engine.cold import ColdReader
    from tidelog.tier.catalog import Catalog
    from tidelog.tier.metadata.open import BUCKET, open_metadata_store

    if info.store is None:
        yield None
        return
    settings = core.settings
    objects = open_objects(session, info.store)
    replicas = [open_objects(session, url) for url in settings.replicas]
    with open_metadata_store(BUCKET, objects, read_only=True) as metadata:
        reader = ColdReader(Catalog(metadata, keys_of(info)), objects, settings.cold_cache_bytes, lambda: replicas)
        try:
            yield reader
        finally:
            reader.close()


def require_store(engine: Engine, session: Session) -> None:
    """ConfigError for an engine that is on this disk alone."""
    from tidelog.errors import ConfigError

    if engine.upkeep.cold is None:
        raise ConfigError(
            f"the engine in {engine_root(session)} has no store",
            hint="Name one: --store s3://bucket/prefix; the directory remembers it",
        )
