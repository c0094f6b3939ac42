"""States of an engine that may go, for a collection that does not own it.

Invariants
- The two newest ones are kept, as by an owner, and whatever somebody has pinned.
- A state leaves the list of the manifest before it is deleted, and is forgotten when it is gone: an owner that comes in
  between finishes the same.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tidelog.engine.manifest import Manifest
from tidelog.engine.store_states import without_old
from tidelog.errors import NotFoundError
from tidelog.pipeline.engine_jobs.gc_plan import EngineGcPlan
from tidelog.tier.object_store import ObjectStore

OLD_STATE = "older than the two newest states, and nobody reads it"


def planned_states(plan: EngineGcPlan) -> frozenset[str]:
    """The listed states that the plan lets go."""
    return frozenset(one.key for one in plan.removable if one.kind == "state" and one.why == OLD_STATE)


def old_states(manifest: Manifest, now_us: int) -> tuple[str, ...]:
    """The listed states that may go."""
    kept = {state.key for state in without_old(manifest, now_us).checkpoints}
    return tuple(state.key for state in manifest.checkpoints if state.key not in kept)


def leaving_of(manifest: Manifest, planned: Collection[str], now_us: int) -> Manifest:
    """The manifest with those of the planned states written down to be deleted that may still go."""
    going = [key for key in old_states(manifest, now_us) if key in planned]
    return msgspec.structs.replace(
        manifest,
        checkpoints=tuple(state for state in manifest.checkpoints if state.key not in going),
        leaving=(*manifest.leaving, *going),
    )


def forget_gone(manifest: Manifest, objects: ObjectStore) -> Manifest:
    """The manifest without what was to be deleted and is."""
    left = tuple(key for key in manifest.leaving if _is_there(objects, key))
    return msgspec.structs.replace(manifest, leaving=left)


def _is_there(objects: ObjectStore, key: str) -> bool:
    try:
        objects.head(key)
    except NotFoundError:
        return False
    return True
