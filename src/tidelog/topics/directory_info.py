"""`tidelog.json`: the identity of a log directory, recorded when it is first opened.

Invariants
- The file records the directory's store, its metadata store and the root of its catalog. An open that does not name
  them uses the recorded ones; an open that names different ones is refused, because it would leave the topics'
  histories behind. Other members of the same etcd cluster are not a different location: the ones named last are
  recorded. A metadata store binds a directory once something is in it: where every topic was refused, because the
  bucket has only the copy of a catalog, the right one may follow.
- A store is recorded only after it has answered, so a mistyped name has no lasting effect.
- A directory without a store may be given one later. In-memory stores are not recorded: there would be nothing to
  reopen.
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
from tidelog.codec import JSON_ERRORS, from_json
from tidelog.errors import ConfigError, DataError, Hint, InputError, NotFoundError
from tidelog.files import Files, LocalFiles, explained
from tidelog.store.keys import DEFAULT_ROOT, MAX_PART_LENGTH, is_part
from tidelog.store.metadata.open import MEMORY, canonical_metadata_url, is_same_metadata
from tidelog.store.urls import canonical_url

DIRECTORY_FILE = "tidelog.json"
_ENGINE_FILE = "engine.json"
METADATA_FILE = "metadata.db"
INSIDE = "sqlite"
"""The metadata is an SQLite file in the directory itself."""
_FORMAT = 1


class Place(NamedTuple):
    """Where a directory's history is, as URLs and the root of its catalog; None: not named, or local mode."""

    store: str | None = None
    metadata: str | None = None
    metadata_root: str | None = None


LOCAL = Place()


class DirectoryInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of `tidelog.json`. `node` is how this directory is called as an owner of topics."""

    format: int
    created_us: int
    node: str = ""
    store: str | None = None
    metadata: str | None = None
    metadata_root: str | None = None

    @property
    def place(self) -> Place:
        return Place(self.store, self.metadata, self.metadata_root)


def read_info(files: Files, root: Path) -> DirectoryInfo | None:
    """What the directory says about itself; None when it says nothing."""
    path = root / DIRECTORY_FILE
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    try:
        info = from_json(data, DirectoryInfo)
    except JSON_ERRORS as error:
        raise DataError(
            f"{path.name} cannot be understood: {error}",
            path=path,
            hint="Put it back from a copy, or move it away: it is written again; messages are in other files",
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
    return {} if info is None else info.place._asdict()


def look_at(files: Files, root: Path, named: Place) -> DirectoryInfo:
    """What the directory is, for reading only; a place that is named is enough without one."""
    is_there = files.is_directory(root)
    with explained("open", root):
        known = read_info(files, root) if is_there else None
    if known is None and named.store is None:
        why = f"there is no {DIRECTORY_FILE} in it" if is_there else "there is no such directory"
        raise NotFoundError(
            f"this is not a log directory: {why}",
            path=root,
            hint="Check the path; a log directory is made when a topic is first written there",
        )
    known = known or DirectoryInfo(format=_FORMAT, created_us=0)
    settled = settle_place(root, known.place, named, is_bound=is_there and _is_bound(files, root))
    return msgspec.structs.replace(known, **settled._asdict())


def introduce(files: Files, root: Path, clock: Clock, named: Place) -> DirectoryInfo:
    """What the directory is, with what was named now. Nothing is written yet: the store may not even be there."""
    known = read_info(files, root)
    if known is None and files.exists(root / _ENGINE_FILE):
        raise ConfigError(
            "this directory holds an engine",
            path=root,
            hint=Hint(
                "Open it with tidelog.open_engine, or name another one",
                command="Use `tidelog engine`, or name another directory with --dir",
            ),
        )
    settled = settle_place(
        root, LOCAL if known is None else known.place, named, is_bound=known is None or _is_bound(files, root)
    )
    return DirectoryInfo(
        format=_FORMAT,
        created_us=clock.now_us() if known is None else known.created_us,
        node=(known.node if known is not None else "") or ("" if settled.store is None else _new_node()),
        **settled._asdict(),
    )


def _is_bound(files: Files, root: Path) -> bool:
    """Whether there is anything whose metadata would be left behind: namespaces of topics, or the metadata itself."""
    names = files.list(root)
    return METADATA_FILE in names or any(files.is_directory(root / name) for name in names)


def is_remembered(files: Files, root: Path, info: DirectoryInfo) -> bool:
    """Whether the directory knows all of this already."""
    return read_info(files, root) == _lasting(info)


def remember(files: Files, root: Path, info: DirectoryInfo) -> None:
    """Writes down what the directory is; durable when it returns."""
    files.write_atomically(root / DIRECTORY_FILE, pretty(_lasting(info)))


def _lasting(info: DirectoryInfo) -> DirectoryInfo:
    """What is in memory only is not remembered."""
    return msgspec.structs.replace(info, **LOCAL._asdict()) if info.store == MEMORY else info


def settle_place(root: Path, known: Place, named: Place, *, is_bound: bool = True) -> Place:
    """The place that is meant; ConfigError when it is not the one that the directory has."""
    store = None if named.store is None else canonical_url(named.store)
    if known.store is not None and store not in (None, known.store):
        raise _moved(root, "store", f"keeps its store in {known.store}, not in {store}", "what is there")
    store = store or known.store
    if store is None:
        _refuse_without_store(named)
        return LOCAL
    metadata = None if named.metadata is None else canonical_metadata_url(named.metadata)
    is_named = known.metadata is not None and metadata is not None
    if is_bound and is_named and not is_same_metadata(str(known.metadata), str(metadata)):
        raise _moved(root, "metadata", f"keeps its metadata in {known.metadata}, not in {metadata}", "what is there")
    metadata = metadata or known.metadata or (MEMORY if store == MEMORY else INSIDE)
    return Place(store, metadata, _settle_metadata_root(root, known.metadata_root, named.metadata_root))


def _settle_metadata_root(root: Path, known: str | None, named: str | None) -> str:
    if known is not None and named not in (None, known):
        problem = f"has its catalog below metadata_root {known}, not below {named}"
        raise _moved(root, "metadata_root", problem, f"what is below {known}/")
    chosen = named or known or DEFAULT_ROOT
    if not is_part(chosen):
        raise ConfigError(
            f"metadata_root must be 1 to {MAX_PART_LENGTH} of the characters A-Z a-z 0-9 . _ - and no dot in front, "
            f"not {chosen[: MAX_PART_LENGTH + 1]!r}"
        )
    return chosen


def _refuse_without_store(named: Place) -> None:
    given = "metadata" if named.metadata is not None else "metadata_root"
    if named != LOCAL:
        raise ConfigError(
            f"{given} is named without a store",
            hint=Hint('Name both: store="s3://bucket/prefix"', "Name both: --store s3://bucket/prefix"),
        )


def _moved(root: Path, what: str, problem: str, source: str) -> ConfigError:
    return ConfigError(
        f"this directory {problem}",
        path=root / DIRECTORY_FILE,
        hint=(
            f"To move: copy {source} to the new place while nobody has the directory open, then change "
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
