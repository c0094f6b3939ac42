"""What a manifest leads to besides its log: files of states and of a compaction; and what it will never name again.

Invariants
- Why names alone can say so: a compaction is published on the generation before it or not at all, a state is listed
  behind the newest one or not at all, and whether a body has a file is decided once. So what is not referenced, and is
  of a generation, a seq or a state that is published, is never going to be.
- What could not be read refers to everything: then nothing is said to be superfluous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from tidelog.engine.cell import Cell, decode_cell
from tidelog.engine.compacted import Compaction
from tidelog.engine.manifest import Manifest, StoredCheckpoint
from tidelog.engine.place import FilePlace, decode_version
from tidelog.engine.row_file import RowFile, RowPart
from tidelog.engine.store_checkpoint import StoredState
from tidelog.errors import DataError, NotFoundError
from tidelog.tier.keys import EngineKeys
from tidelog.tier.object_store import ObjectStore


class DataFile(NamedTuple):
    """A file with one body: how it is stored there, and a version that points to it, which has its checksum."""

    key: str
    place: FilePlace
    cell: Cell


def parts_of(objects: ObjectStore, keys: EngineKeys, state: StoredCheckpoint) -> tuple[RowPart, ...]:
    """The row files of a state; none for one that has its rows in itself."""
    name = keys.parse_checkpoint(state.key)
    return () if name is None or not name.digest else StoredState(objects, state).parts()


def data_files(objects: ObjectStore, keys: EngineKeys, root: Compaction) -> Iterator[DataFile]:
    """The files of a compaction that have one body each, some more than once: copies point to the same."""
    for part in root.versions:
        for _, value in RowFile(objects, part, kind="versions").rows():
            cell, place = decode_version(value)
            if isinstance(place, FilePlace):
                key = keys.data_file_named(place.name)
                if key is None:
                    raise DataError(f"{part.key} names {place.name!r}, which is no file of ours")
                yield DataFile(key, place, decode_cell(cell))


def is_superseded(key: str, manifest: Manifest, referenced: Collection[str], keys: EngineKeys) -> bool:
    """Whether a file of a compaction or of a state is not referenced, and never will be. Not for anything else."""
    if key in referenced:
        return False
    if (file := keys.parse_compacted(key)) is not None:
        return file.generation <= manifest.generation
    if (body := keys.parse_data_file(key)) is not None:
        return manifest.compacted is not None and body.seq <= manifest.compacted.seq
    part = keys.parse_state_part(key)
    return part is not None and bool(manifest.checkpoints) and part.seq < manifest.checkpoints[-1].seq


def superseded_parts(objects: ObjectStore, keys: EngineKeys, manifest: Manifest) -> list[str]:
    """Files of states that no listed state consists of any more. Those of a compaction are never among them."""
    listed = (info.key for info in objects.list(keys.checkpoints_prefix))
    suspects = [key for key in listed if keys.parse_state_part(key) and is_superseded(key, manifest, (), keys)]
    if not suspects:
        return []
    try:
        referenced = {part.key for state in manifest.checkpoints for part in parts_of(objects, keys, state)}
    except (DataError, NotFoundError):
        return []  # which files it has is not known
    return [key for key in suspects if key not in referenced]
