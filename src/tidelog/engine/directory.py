"""`engine.json`: the identity of an engine's directory: its store, its metadata store, its name there, and its node.

Invariants
- It is written before the first entry, and replaced only to name the store of an engine that has claimed none.
- Opening with another store, or another metadata store, than the claimed one is refused: what was shipped would not be
  found again. Other members of the same etcd cluster are not another store.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.cold.ownership import NAME as CLAIM_FILE
from tidelog.engine.core import WAL
from tidelog.errors import ConfigError, DataError, Hint
from tidelog.files import Files, explained
from tidelog.store.keys import DEFAULT_ENGINE, DEFAULT_ROOT, EngineKeys
from tidelog.store.metadata.open import BUCKET, is_same_metadata

ENGINE_FILE = "engine.json"
_TOPICS_FILE = "tidelog.json"
_KIND = "engine"
_VERSION = 1


class EngineDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `engine.json`. `node` distinguishes directories that claim the same engine.

    `is_drill`: a copy that a restore drill has made. It never claims anything. `shares_store`: a replica whose store
    others use too; it claims it if there is no other owner, or when it takes over.
    """

    node: str
    store: str | None = None
    name: str = DEFAULT_ENGINE
    is_drill: bool = False
    shares_store: bool = False
    metadata: str = BUCKET
    metadata_root: str = DEFAULT_ROOT

    @property
    def keys(self) -> EngineKeys:
        return EngineKeys(self.name, self.metadata_root)

    def placed(self, store: str | None, metadata: str | None, metadata_root: str | None) -> EngineDirectory:
        named = {"store": store, "metadata": metadata, "metadata_root": metadata_root}
        return msgspec.structs.replace(self, **{name: value for name, value in named.items() if value is not None})


def remembered(files: Files, directory: Path) -> EngineDirectory | None:
    """Reads the file; None for a directory that has never been an engine."""
    # Checked first: a caught exception keeps its frames, and an engine in them, alive until the next collection.
    with explained("open engine", directory):
        if not files.exists(directory / ENGINE_FILE):
            return None
        data = files.read(directory / ENGINE_FILE)
    try:
        return decode_document(_KIND, _VERSION, data, EngineDirectory)
    except DataError as error:
        hint = "Restore the engine from its store into a new directory"
        raise DataError(error.message, operation="open engine", path=directory / ENGINE_FILE, hint=hint) from error


def settled(
    files: Files,
    directory: Path,
    store: str | None,
    metadata: str | None = None,
    metadata_root: str | None = None,
    name: str = DEFAULT_ENGINE,
) -> EngineDirectory:
    """Returns the effective identity and persists it. `name` is that of a new engine in its store."""
    info = resolved(files, directory, store, metadata, metadata_root, name)
    if info != remembered(files, directory):
        remember(files, directory, info)
    return info


def resolved(
    files: Files,
    directory: Path,
    store: str | None,
    metadata: str | None = None,
    metadata_root: str | None = None,
    name: str = DEFAULT_ENGINE,
) -> EngineDirectory:
    """Returns the effective identity: the stored one, with the given store if none was claimed before.

    A store URL that was wrong, or that of another engine, is therefore never bound: the right one may follow.
    """
    known = remembered(files, directory)
    if known is None and files.exists(directory / _TOPICS_FILE):
        raise ConfigError(
            "this directory holds topics",
            path=directory,
            hint="Give the engine a directory of its own",
        )
    is_bound = files.exists(directory / WAL / CLAIM_FILE) or (
        known is not None and (known.is_drill or known.shares_store)
    )
    if known is not None and store is not None and known.store not in (None, store) and is_bound:
        raise ConfigError(
            f"this engine is shipped to {known.store}, not to {store}",
            path=directory,
            hint="Leave the store out; to move, restore from the old store and open the copy with the new one",
        )
    if known is not None and is_bound:
        refuse_other_metadata(directory, known, metadata, metadata_root)
    own = known or EngineDirectory(node=secrets.token_hex(8), name=name)
    info = own.placed(store, metadata, metadata_root)
    if info.store is None and (metadata is not None or metadata_root is not None):
        raise ConfigError(
            "metadata is named without a store",
            hint=Hint('Name both: store="s3://bucket/prefix"', "Name both: --store s3://bucket/prefix"),
        )
    return info


def refuse_other_metadata(
    directory: Path, known: EngineDirectory, metadata: str | None, metadata_root: str | None
) -> None:
    """ConfigError where other metadata is named than that of the engine."""
    is_other = metadata is not None and not is_same_metadata(known.metadata, metadata)
    if is_other or metadata_root not in (None, known.metadata_root):
        raise ConfigError(
            f"this engine keeps its metadata in {known.metadata}, below {known.metadata_root}",
            path=directory,
            hint="Leave metadata and metadata_root out; to move, restore it and open the copy with a new store",
        )


def remember(files: Files, directory: Path, info: EngineDirectory) -> None:
    """Writes the file durably."""
    with explained("open engine", directory):
        files.make_directories(directory)
        files.write_atomically(directory / ENGINE_FILE, encode_document(_KIND, _VERSION, info))
