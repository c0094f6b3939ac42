"""Publishing what a job without a node has made: a compaction, a state, a later start of the history.

Each is one compare-and-swap of the manifest. Its owner changes it too, often, and is not in the way: what was read is
read again and the change is made anew, as long as it is still right.

Invariants
- A compaction of generation g + 1 is published on generation g or not at all. So a file of a generation that was
  published, which the published root does not name, is never going to be named.
- A state is added behind the newest listed one or not at all, for the same reason.
- Publishing the same once more changes nothing: who was cut off may repeat it.
- The epoch stays as it was found: nobody is fenced.
"""

from __future__ import annotations

import msgspec

from tidelog.clock import Clock
from tidelog.engine.manifest import (
    Change,
    Manifest,
    StoredCheckpoint,
    StoredCompaction,
    check_manifest,
    encode_manifest,
    read_manifest,
    refuse_to_go_back,
)
from tidelog.errors import ConflictError, InputError, NotFoundError
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.store import Check, MetadataStore, Put

_ATTEMPTS = 20


def publish_compaction(
    metadata: MetadataStore,
    keys: EngineKeys,
    clock: Clock,
    *,
    base_generation: int,
    compacted: StoredCompaction,
    state: StoredCheckpoint | None = None,
) -> Manifest:
    """Makes a compaction the one that counts, and with it a state, if that is newer than the newest.

    ConflictError when another was published since: nothing is written then.
    """
    if compacted.generation != base_generation + 1:
        raise InputError(f"a compaction built on generation {base_generation} cannot be {compacted.generation}")

    def change(manifest: Manifest) -> Manifest:
        if manifest.compacted is not None and manifest.compacted.key == compacted.key:
            return manifest
        if manifest.generation != base_generation:
            raise _another_compaction(manifest, base_generation)
        changed = msgspec.structs.replace(manifest, compacted=compacted)
        return changed if state is None or not _is_newer(state, manifest) else _with_state(changed, state)

    return change_manifest(metadata, keys, clock, change)


def publish_state(metadata: MetadataStore, keys: EngineKeys, clock: Clock, state: StoredCheckpoint) -> Manifest:
    """Lists a state. ConflictError when one that is as new is listed already: nothing is written then."""

    def change(manifest: Manifest) -> Manifest:
        if any(listed.key == state.key for listed in manifest.checkpoints):
            return manifest
        if not _is_newer(state, manifest):
            newest = manifest.checkpoints[-1]
            raise ConflictError(
                f"a state of seq {newest.seq} is listed already, {newest.key}: one of seq {state.seq} is not behind it",
                hint="There is nothing left to do, unless you want a newer one: run it again then",
            )
        return _with_state(manifest, state)

    return change_manifest(metadata, keys, clock, change)


def move_history_start(metadata: MetadataStore, keys: EngineKeys, clock: Clock, seq: int) -> Manifest:
    """Seqs before this one may no longer be asked for; it never goes back. A state that is pinned stays readable."""

    def change(manifest: Manifest) -> Manifest:
        if seq > manifest.high_water_mark:
            raise InputError(f"the history cannot begin at seq {seq}: the last entry is {manifest.high_water_mark}")
        now_us = clock.now_us()
        pinned = [one.seq for one in manifest.checkpoints if manifest.is_pinned(one.key, now_us)]
        wanted = min((seq, *pinned))
        return msgspec.structs.replace(manifest, history_start_seq=max(wanted, manifest.history_start_seq))

    return change_manifest(metadata, keys, clock, change)


def change_manifest(metadata: MetadataStore, keys: EngineKeys, clock: Clock, change: Change) -> Manifest:
    """Publishes what `change` makes of the manifest, under the epoch that is found there, and returns that.

    `change` is called again where others were faster. If it changes nothing, nothing is written.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return _change_once(metadata, keys, clock, change)
        except _FasterError:
            continue
    return _change_once(metadata, keys, clock, change)


class _FasterError(ConflictError):
    """The document was changed between reading and writing it."""


def _change_once(metadata: MetadataStore, keys: EngineKeys, clock: Clock, change: Change) -> Manifest:
    found = read_manifest(metadata, keys)
    if found is None:
        raise NotFoundError(
            f"there is no engine {keys.name!r} in this store",
            hint="Check the address of the store and the name of the engine",
        )
    before, version = found
    changed = change(before)
    if changed == before:
        return before
    refuse_to_go_back(before, changed)
    after = msgspec.structs.replace(changed, revision=before.revision + 1, updated_us=clock.now_us())
    check_manifest(after, keys)
    try:
        metadata.commit([Check(keys.engine_manifest, version)], [Put(keys.engine_manifest, encode_manifest(after))])
    except ConflictError as error:
        raise _FasterError(
            f"the manifest of the engine {keys.name!r} is changed all the time", hint=error.hint
        ) from error
    return after


def _is_newer(state: StoredCheckpoint, manifest: Manifest) -> bool:
    return not manifest.checkpoints or (state.seq, state.lsn) > (
        manifest.checkpoints[-1].seq,
        manifest.checkpoints[-1].lsn,
    )


def _with_state(manifest: Manifest, state: StoredCheckpoint) -> Manifest:
    return msgspec.structs.replace(manifest, checkpoints=(*manifest.checkpoints, state))


def _another_compaction(manifest: Manifest, base_generation: int) -> ConflictError:
    other = manifest.compacted
    told = "is gone" if other is None else f"is {other.generation} up to seq {other.seq}, published meanwhile"
    return ConflictError(
        f"this compaction was built on generation {base_generation}, and the engine's {told}",
        hint="Nothing was lost and nothing written; run it again to compact what has come since then",
    )
