"""Replicas after a compaction of the engine's own store: large objects take the place of small ones there too.

Invariants
- A large object is copied whole and checked before its descriptor takes the key of the first small one. The others go
  then, the first one first, so that every LSN is found at every moment; their objects go last.
- It can be cut off anywhere and is done again: what is left to do is seen from what is there.
- Only where the engine's own catalog has a compacted object does anything change.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

from tidelog.errors import ConflictError, DataError
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Descriptor, encode_descriptor
from tidelog.tier.keys import ObjectId
from tidelog.tier.metadata.store import Check, Delete, Put
from tidelog.tier.object_store import ObjectStore

CopyObject = Callable[[Descriptor], None]


def follow_compaction(origin: Catalog, copied: Catalog, objects: ObjectStore, copy_object: CopyObject) -> int:
    """Brings what a replica has to the objects that the engine's own catalog has by now; how many it changed."""
    starts = _starts(copied)
    if not starts:
        return 0
    behind = copied.next_offset()
    compacted = [one for one in origin.between(starts[0], behind) if one.name.generation]
    changed = [one for one in compacted if _put_in_place(copied, one, starts, copy_object)]
    if compacted:
        _delete_replaced(copied, objects, compacted)
    return len(changed)


def _starts(copied: Catalog) -> list[int]:
    keys = copied.keys
    found = (keys.parse_descriptor(key) for key in copied.metadata.keys(keys.segments_prefix))
    return sorted(start for start in found if start is not None)


def _put_in_place(copied: Catalog, new: Descriptor, starts: Sequence[int], copy_object: CopyObject) -> bool:
    """Whether something had to be done."""
    inside = starts[bisect_right(starts, new.start_offset) : bisect_right(starts, new.end_offset)]
    found = copied.find(new.start_offset)
    if found is None or not isinstance(found.value, Descriptor):
        if bisect_left(starts, new.start_offset) == 0:
            return False  # the replica begins inside of it
        raise DataError(
            f"the replica has no object that begins at LSN {new.start_offset}, where {new.object_id} does",
            operation="replicate",
            hint="Is it the replica of another engine? Give each engine a place of its own",
        )
    if found.value.object_id != new.object_id:
        copy_object(new)
        key = copied.keys.descriptor(new.start_offset)
        copied.metadata.commit([Check(key, found.version)], [Put(key, encode_descriptor(new))])
    elif not inside:
        return False
    _take_away(copied, inside)
    _move_hint(copied, new, inside)
    return True


def _take_away(copied: Catalog, inside: Iterable[int]) -> None:
    gone = []
    for start in inside:
        key = copied.keys.descriptor(start)
        entry = copied.metadata.get(key)
        if entry is not None:
            copied.metadata.commit([Check(key, entry.version)], [Delete(key)])
        gone.append(key)
    copied.metadata.purge(gone)


def _move_hint(copied: Catalog, new: Descriptor, inside: Sequence[int]) -> None:
    """`cur` is a hint: who is faster may keep it."""
    current = copied.current()
    if current is not None and current[0] in inside:
        changed: tuple[bytes, str | None] | None = copied.moved_current(new.start_offset)
    else:
        changed = copied.current_without(inside)
    if changed is not None:
        value, version = changed
        with contextlib.suppress(ConflictError):
            copied.metadata.commit([Check(copied.keys.current, version)], [Put(copied.keys.current, value)])


def _delete_replaced(copied: Catalog, objects: ObjectStore, compacted: Sequence[Descriptor]) -> None:
    """Objects of an earlier generation that are wholly inside of one that took their place."""
    keys = copied.keys
    named = {one.name for one in copied.between(0, copied.next_offset())}
    large = [one.name for one in compacted if one.name in named]
    firsts = [name.start for name in large]

    def is_replaced(name: ObjectId) -> bool:
        at = bisect_right(firsts, name.start) - 1
        return at >= 0 and name.end <= large[at].end and name.generation < large[at].generation and name not in named

    listed = ((info.key, keys.parse_object(info.key)) for info in objects.list(keys.objects_prefix))
    objects.delete([key for key, name in listed if name is not None and is_replaced(name)])
