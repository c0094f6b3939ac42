"""`engine.json`: what an engine's directory remembers about itself: its store, its name there, and whose it is.

Invariants
- It is written before the first entry, and replaced only to name the store of an engine that has claimed none.
- Opening with another store than the one that was claimed is refused: what was shipped would not be found again.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.engine.core import WAL
from tidelog.errors import ConfigError, DataError
from tidelog.files import Files, explained
from tidelog.tier.keys import DEFAULT_ENGINE
from tidelog.tier.local_claim import NAME as CLAIM_FILE

ENGINE_FILE = "engine.json"
_TOPICS_FILE = "tidelog.json"
_KIND = "engine"
_VERSION = 1


class EngineDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered. `node` tells one directory from another that claims the same engine.

    `is_drill`: a copy that a restore drill has made. It claims nothing, ever.
    """

    node: str
    store: str | None = None
    name: str = DEFAULT_ENGINE
    is_drill: bool = False


def remembered(files: Files, directory: Path) -> EngineDirectory | None:
    """What the directory says; None for one that has never been an engine."""
    # Asked first: an error that is caught keeps its frames, and an engine in them, until the next collection.
    with explained("open engine", directory):
        if not files.exists(directory / ENGINE_FILE):
            return None
        data = files.read(directory / ENGINE_FILE)
    try:
        return decode_document(_KIND, _VERSION, data, EngineDirectory)
    except DataError as error:
        hint = "Restore the engine from its store into a new directory"
        raise DataError(error.message, operation="open engine", path=directory / ENGINE_FILE, hint=hint) from error


def settled(files: Files, directory: Path, store: str | None) -> EngineDirectory:
    """What holds from now on, written down: the remembered, with the store that is named if none was claimed before.

    A name that was wrong, or the place of another engine, so stays nobody's: the right one may follow.
    """
    known = remembered(files, directory)
    if known is None and files.exists(directory / _TOPICS_FILE):
        raise ConfigError(
            "this directory holds topics",
            path=directory,
            hint="Give the engine a directory of its own",
        )
    is_bound = files.exists(directory / WAL / CLAIM_FILE) or (known is not None and known.is_drill)
    if known is not None and store is not None and known.store not in (None, store) and is_bound:
        raise ConfigError(
            f"this engine is shipped to {known.store}, not to {store}",
            path=directory,
            hint="Leave the store out; to move, restore from the old store and open the copy with the new one",
        )
    info = known or EngineDirectory(node=secrets.token_hex(8))
    if store is not None:
        info = msgspec.structs.replace(info, store=store)
    if info != known:
        remember(files, directory, info)
    return info


def remember(files: Files, directory: Path, info: EngineDirectory) -> None:
    """Writes it down, durably."""
    with explained("open engine", directory):
        files.make_directories(directory)
        files.write_atomically(directory / ENGINE_FILE, encode_document(_KIND, _VERSION, info))
