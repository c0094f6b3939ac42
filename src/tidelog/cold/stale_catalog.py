"""Detects a catalog older than its bucket: metadata from a backup, or a machine that was reset to a snapshot.

Continuing from such a catalog would hide what was shipped since then, and reuse its offsets for other messages.

Signs of it
- `cur` names a descriptor that does not exist, at or after the catalog's end. It is written together with that
  descriptor, or after it.
- An object begins where the catalog ends, and its epoch is higher than that of any owner the catalog has had.
- An object begins there, and another one after it. The owner of a topic uploads nothing before the preceding object is
  published. (An engine's does, so there this is no sign.)
- A compacted object reaches there or beyond it: only published objects are compacted. One that begins earlier is looked
  for where the newest object of the catalog is gone: it has been replaced, and the oldest are deleted first.
One object alone, of a known epoch, is no sign: a crash between its upload and its publishing leaves that.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.cold.catalog import Catalog
from tidelog.errors import DataError, NotFoundError
from tidelog.store.keys import ObjectId
from tidelog.store.metadata.open import asked_anew
from tidelog.store.object_store import ObjectStore


def refuse_lost_descriptor(catalog: Catalog) -> None:
    """Raises DataError where the newest descriptor was lost. Asks the metadata store alone."""
    current = catalog.current()
    if current is not None and current[0] >= (end := catalog.next_offset()) and catalog.find(current[0]) is None:
        raise _error(f"it ends at offset {end}, and had a descriptor of offset {current[0]}")


def refuse_stale_catalog(catalog: Catalog, objects: ObjectStore, known_epoch: int | None = None) -> None:
    """Raises DataError where the bucket has more of the topic than the catalog knows.

    `known_epoch` is that of the last owner; None: of the one that the catalog names. A concurrent shipper moves the
    catalog's end, and does not count as a sign: the end is asked for anew, whatever the catalog remembers.
    """
    newly = Catalog(asked_anew(catalog.metadata), catalog.keys)
    while True:
        end = catalog.next_offset()
        found = list(_objects_at(catalog, objects, end))
        owner = catalog.owner()
        known = known_epoch if known_epoch is not None else 0 if owner is None else owner[0].epoch
        sign = next((name for name in found if _is_sign(name, known, catalog, objects)), None)
        sign = sign or _compacted_across(catalog, objects, end)
        if sign is None:
            return
        if newly.next_offset() == end:
            raise _error(f"it ends at offset {end}, and {objects.url} goes on with {catalog.keys.object(sign)}")
        catalog = newly


def _is_sign(name: ObjectId, known_epoch: int, catalog: Catalog, objects: ObjectStore) -> bool:
    if name.generation or name.epoch != known_epoch:
        return name.generation > 0 or name.epoch > known_epoch
    if catalog.keys.sends_ahead:
        return False
    return any(behind.epoch >= name.epoch for behind in _objects_at(catalog, objects, name.end + 1))


def _compacted_across(catalog: Catalog, objects: ObjectStore, end: int) -> ObjectId | None:
    """A compacted object that begins before the catalog's end and extends past it. One request where all is well."""
    newest = catalog.newest()
    if newest is None:
        return None
    try:
        objects.head(catalog.keys.object(newest.name))
    except NotFoundError:
        names = (catalog.keys.parse_object(info.key) for info in objects.list(catalog.keys.objects_prefix))
        return next((one for one in names if one is not None and one.generation and one.start < end <= one.end), None)
    return None


def _objects_at(catalog: Catalog, objects: ObjectStore, start_offset: int) -> Iterator[ObjectId]:
    """The objects that begin at an offset: they are next to each other in a listing."""
    prefix = catalog.keys.objects_prefix
    beginning = f"{prefix}data-{start_offset}-"
    for info in objects.list(prefix, start_after=beginning):
        if not info.key.startswith(beginning):
            return
        name = catalog.keys.parse_object(info.key)
        if name is not None:
            yield name


def _error(what: str) -> DataError:
    return DataError(
        f"the catalog is older than the bucket: {what}",
        operation="open",
        hint="Restore newer metadata, or rebuild the catalog with `tidelog topic rebuild-catalog --replace`",
    )
