"""Finding and deleting what dead owners left in an engine's store: objects and states that nobody will ever name.

Why they can go: an owner publishes an object by creating the descriptor of its first LSN, and lists a state in the
manifest. Once a later owner has settled in, neither is possible for an earlier one. So what has an earlier epoch and is
not named then is never going to be. A name is used once, since it contains the epoch.

Invariants
- Only names that we would have built, of an earlier epoch than the sweeping owner's, are deleted; its claim is checked
  right before. Of those that a compaction made (`-c1`) also later ones, since only one that is under way switches to
  them. What a compaction makes just now, or has written down to be deleted later, is left to it.
- A state of several files is written by somebody who does not own the engine, and so may be about to be listed: it goes
  when it is older than the newest listed one, and so do files of states that no listed one has. Nothing of a compacted
  log (packs, indexes, data files) is touched here.
- An object stays unless all of its LSNs are in published objects: it may be the only copy of something.
- Few requests: published objects follow each other without overlap, so only where names overlap is the catalog asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.engine.manifest import Manifest
from tidelog.engine.references import superseded_parts
from tidelog.engine.store_link import StoreLink
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor
from tidelog.tier.keys import CheckpointId, EngineKeys, ObjectId
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.replacement import spoken_for


def sweep_store(link: StoreLink, objects: ObjectStore, keys: EngineKeys) -> list[str]:
    """Deletes them; which."""
    epoch, catalog = link.owned.epoch, link.owned.catalog
    end_lsn = catalog.next_offset()
    names = [name for info in objects.list(keys.objects_prefix) if (name := keys.parse_object(info.key)) is not None]
    spoken = spoken_for(catalog)  # behind the listing: what is in it and is being built is known to be
    suspects = [name for name in overlapping(names) if name.end < end_lsn and name not in spoken]
    suspects = [name for name in suspects if name.epoch < epoch or name.generation]
    leftover = [keys.object(name) for name in suspects if not _is_published(catalog, name)]
    manifest = link.refresh()
    leftover += _unlisted_states(manifest, objects, keys, epoch) + superseded_parts(objects, keys, manifest)
    if leftover:
        link.owned.ownership.verify()
        objects.delete(leftover)
    return leftover


def overlapping(names: Iterable[ObjectId]) -> list[ObjectId]:
    """Those that share an LSN with another one."""
    found: set[ObjectId] = set()
    widest: ObjectId | None = None
    for name in sorted(names):
        if widest is not None and name.start <= widest.end:
            found |= {name, widest}
        if widest is None or name.end > widest.end:
            widest = name
    return sorted(found)


def _is_published(catalog: Catalog, name: ObjectId) -> bool:
    found = catalog.find(name.start)
    return found is not None and isinstance(found.value, Descriptor) and found.value.object_id == str(name)


def _unlisted_states(manifest: Manifest, objects: ObjectStore, keys: EngineKeys, epoch: int) -> list[str]:
    listed = {state.key for state in manifest.checkpoints} | set(manifest.leaving)
    newest_seq = manifest.checkpoints[-1].seq if manifest.checkpoints else 0

    def is_left(name: CheckpointId) -> bool:
        return name.seq < newest_seq if name.digest else name.epoch < epoch

    return [
        info.key
        for info in objects.list(keys.checkpoints_prefix)
        if info.key not in listed and (name := keys.parse_checkpoint(info.key)) is not None and is_left(name)
    ]
