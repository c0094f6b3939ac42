"""`tidelog.json`: what a log directory is, remembered from its first opening.

Invariants
- A directory keeps its store and its metadata: opened without naming them it uses them, and naming others is refused,
  because the topics' histories would stay behind.
- A store is remembered once it has answered: a name that was mistyped binds nobody.
- A directory without a store may be given one. What is in memory only is not remembered: there is nothing to come back
  to.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from tidelog.clock import Clock
from tidelog.codec import JSON_ERRORS
from tidelog.errors import ConfigError, DataError, InputError
from tidelog.files import Files, LocalFiles
from tidelog.tier.stores import canonical_url

DIRECTORY_FILE = "tidelog.json"
_ENGINE_FILE = "engine.json"
METADATA_FILE = "metadata.db"
INSIDE = "sqlite"
"""The metadata is an SQLite file in the directory itself."""
_FORMAT = 1
MEMORY = "memory://"


class Place(NamedTuple):
    """Where a directory's history is, as URLs; None: not named, or local mode."""

    store: str | None = None
    metadata: str | None = None


LOCAL = Place()


class DirectoryInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of `tidelog.json`. `node` is how this directory is called as an owner of topics."""

    format: int
    created_us: int
    node: str = ""
    store: str | None = None
    metadata: str | None = None

    @property
    def place(self) -> Place:
        return Place(self.store, self.metadata)


def read_info(files: Files, root: Path) -> DirectoryInfo | None:
    """What the directory says about itself; None when it says nothing."""
    path = root / DIRECTORY_FILE
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    try:
        info = msgspec.json.decode(data, type=DirectoryInfo)
    except JSON_ERRORS as error:
        raise DataError(
            f"{path.name} cannot be understood: {error}",
            path=path,
            hint="Put it back from a copy, or move it away: it is written anew, messages are elsewhere",
        ) from error
    if info.format != _FORMAT:
        raise InputError(
            f"the log directory has format {info.format}, this tidelog knows format {_FORMAT}",
            path=root,
            hint="Use the tidelog that made it, or a newer one",
        )
    return info


def remembered_place(root: Path) -> dict[str, str | None]:
    """The settings that a directory remembers, by name; none where there is no directory."""
    info = read_info(LocalFiles(), root)
    return {} if info is None else {"store": info.store, "metadata": info.metadata}


def introduce(files: Files, root: Path, clock: Clock, named: Place) -> DirectoryInfo:
    """What the directory is, with what was named now. Nothing is written yet: the store may not even be there."""
    known = read_info(files, root)
    if known is None and files.exists(root / _ENGINE_FILE):
        raise ConfigError(
            "this directory holds an engine", path=root, hint="Open it with tidelog.open_engine, or name another one"
        )
    settled = settle_place(root, LOCAL if known is None else known.place, named)
    return DirectoryInfo(
        format=_FORMAT,
        created_us=clock.now_us() if known is None else known.created_us,
        node=(known.node if known is not None else "") or ("" if settled.store is None else _new_node()),
        store=settled.store,
        metadata=settled.metadata,
    )


def is_remembered(files: Files, root: Path, info: DirectoryInfo) -> bool:
    """Whether the directory knows all of this already."""
    return read_info(files, root) == _lasting(info)


def remember(files: Files, root: Path, info: DirectoryInfo) -> None:
    """Writes down what the directory is; durable when it returns."""
    files.write_atomically(root / DIRECTORY_FILE, pretty(_lasting(info)))


def _lasting(info: DirectoryInfo) -> DirectoryInfo:
    """What is in memory only is not remembered."""
    return msgspec.structs.replace(info, store=None, metadata=None) if info.store == MEMORY else info


def settle_place(root: Path, known: Place, named: Place) -> Place:
    """The place that is meant; ConfigError when it is not the one that the directory has."""
    store = _one_of(root, "store", known.store, None if named.store is None else canonical_url(named.store))
    if store is None and named.metadata is not None:
        raise ConfigError("metadata is named without a store", hint='Name both: store="s3://bucket/prefix"')
    metadata = _one_of(root, "metadata", known.metadata, named.metadata)
    if store is not None and metadata is None:
        metadata = MEMORY if store == MEMORY else INSIDE
    return Place(store, metadata)


def _one_of(root: Path, what: str, known: str | None, named: str | None) -> str | None:
    if known is None or named is None or known == named:
        return named or known
    raise ConfigError(
        f"this directory keeps its {what} in {known}, not in {named}",
        path=root / DIRECTORY_FILE,
        hint=(
            "To move: copy what is there to the new place while nobody has the directory open, then change "
            f"`{what}` in {DIRECTORY_FILE}. Or open another directory"
        ),
    )


def metadata_url(root: Path, metadata: str) -> str:
    """The URL of a directory's metadata: what is inside it is found again after it was moved."""
    inside = quote(str(Path(os.path.abspath(root)) / METADATA_FILE))  # a path may have a # or a % in it
    return f"sqlite://{inside}" if metadata == INSIDE else metadata


def _new_node() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40] or "node"
    return f"{host}-{secrets.token_hex(4)}"


def pretty(info: msgspec.Struct) -> bytes:
    """JSON for people."""
    return msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"
