"""The plan of a garbage collection of an engine: data that can be shown, kept as a file, and carried out later.

Invariants
- A plan names its store and its engine, and is carried out there alone.
- What is read from a file is believed only as far as it can name nothing but objects of its own engine; whether they
  are garbage is looked at again when it is carried out.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import DataError, NotFoundError, TidelogError
from tidelog.files import LocalFiles, explained
from tidelog.pipeline.engine_jobs.gc_rules import Garbage
from tidelog.tier.keys import EngineKeys
from tidelog.tier.replacement_cleanup import CleanupPlan
from tidelog.tier.sweep_plan import SweepPlan

_KIND = "engine-gc-plan"
_VERSION = 1


class EngineGcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done. `drop_below_lsn` is up to where the log goes, `keep_from` where history is to begin."""

    store: str
    engine: str
    made_us: int
    generation: int
    grace_seconds: float
    drop_below_lsn: int = 0
    keep_from: int | None = None
    found: tuple[Garbage, ...] = ()
    sweep: SweepPlan
    cleanup: CleanupPlan

    @property
    def removable(self) -> tuple[Garbage, ...]:
        """What goes when it is carried out."""
        return tuple(one for one in self.found if one.action == "remove")


def write_engine_plan(path: Path, plan: EngineGcPlan) -> None:
    """Keeps a plan."""
    with explained("gc", path):
        LocalFiles().write_atomically(path, encode_document(_KIND, _VERSION, plan))


def read_engine_plan(path: Path) -> EngineGcPlan:
    """A plan that was kept; DataError when it is none, or names what it has no business with."""
    hint = "Make one: `tidelog pipeline gc --engine URL --plan FILE`"
    if not path.exists():
        raise NotFoundError("there is no plan", path=path, hint=hint)
    with explained("gc", path):
        data = LocalFiles().read(path.resolve())
    try:
        plan = decode_document(_KIND, _VERSION, data, EngineGcPlan)
        _check(plan)
    except TidelogError as error:
        raise DataError(f"this is not a plan of gc for an engine: {error.message}", path=path, hint=hint) from error
    return plan


def _check(plan: EngineGcPlan) -> None:
    keys = EngineKeys(plan.engine)
    prefixes = (keys.objects_prefix, keys.packs_prefix, keys.index_prefix, keys.data_prefix, keys.checkpoints_prefix)
    named = [one.key for one in plan.removable]
    named += [one.key for one in (*plan.sweep.left_over, *plan.sweep.orphans)]
    named += [one.key for one in (*plan.sweep.unfinished, *plan.sweep.staged)]
    for key in named:
        if not key.startswith((*prefixes, keys.intake_prefix)) or ".." in key:
            raise DataError(f"{key} is not an object of the engine {plan.engine}")
