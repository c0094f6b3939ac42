"""Replicas after a collection in the engine's own store: their log begins where that one's does by now.

Invariants
- The start of a replica's log moves after its manifest was written, and never past a state that this lists: what the
  manifest tells of can be restored at every moment.
- Below the start descriptors go first, then objects; it can be cut off anywhere, and is done again.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.engine.manifest import Manifest
from tidelog.errors import RetryError
from tidelog.tier.catalog import Catalog
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.retention import published_below


def refuse_outdated(manifest: Manifest, start_lsn: int, generations: Iterable[int] = ()) -> None:
    """RetryError when the engine's store has dropped what this manifest still speaks of: there is a newer one.

    The same when compactions of these generations were published, and it does not know of one: what values of records
    that were dropped are in is not said in it.
    """
    is_compacted_since = any(generation > manifest.generation for generation in generations)
    if is_compacted_since or any(state.lsn < start_lsn for state in manifest.checkpoints):
        raise RetryError("the engine's store was cleaned up meanwhile", operation="replicate", hint="Try again")


def drop_below_start(copied: Catalog, objects: ObjectStore) -> None:
    """Removes what a replica has below the start of its log."""
    start = copied.start_offset()
    for descriptor in list(published_below(copied, start)):
        found = copied.find(descriptor.start_offset)
        if found is not None and found.value == descriptor:
            copied.metadata.remove(copied.keys.descriptor(descriptor.start_offset), found.version)
    listed = ((info.key, copied.keys.parse_object(info.key)) for info in objects.list(copied.keys.objects_prefix))
    below = [key for key, name in listed if name is not None and name.end < start]
    if below:
        objects.delete(below)
