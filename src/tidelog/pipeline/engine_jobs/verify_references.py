"""What the documents of an engine refer to in its store, for comparing one store with another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidelog.engine.compacted import read_compaction
from tidelog.engine.manifest import Manifest
from tidelog.engine.row_file import RowPart
from tidelog.engine.store_checkpoint import StoredState
from tidelog.errors import DataError, NotFoundError
from tidelog.tier.catalog import Catalog
from tidelog.tier.keys import EngineKeys
from tidelog.tier.object_store import ObjectStore


class References(NamedTuple):
    """Keys, with the size that they have to have (None: not known); and the body index, which names the data files."""

    files: dict[str, int | None]
    bodies: tuple[RowPart, ...]


def references_of(objects: ObjectStore, catalog: Catalog, keys: EngineKeys, manifest: Manifest) -> References:
    """Everything that a manifest and a catalog name. What cannot be read of it is left out: others tell of that."""
    files: dict[str, int | None] = dict(_log_objects(catalog, keys))
    bodies: tuple[RowPart, ...] = ()
    for state in manifest.checkpoints:
        files[state.key] = state.size
        try:
            files |= {part.key: part.size for part in StoredState(objects, state).parts()}
        except (DataError, NotFoundError):
            continue
    if manifest.compacted is not None:
        files[manifest.compacted.key] = manifest.compacted.size
        try:
            root = read_compaction(objects, keys, manifest.compacted)
        except (DataError, NotFoundError):
            return References(files, ())
        files |= {pack.key: pack.size for pack in root.packs}
        files |= {part.key: part.size for part in (*root.versions, *root.bodies)}
        bodies = root.bodies
    return References(files, bodies)


def _log_objects(catalog: Catalog, keys: EngineKeys) -> Iterator[tuple[str, int]]:
    try:
        for descriptor in catalog.between(catalog.start_offset(), 1 << 63):
            yield keys.object(descriptor.name), descriptor.size
    except DataError:
        return  # a descriptor that cannot be understood is told as such
