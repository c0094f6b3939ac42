"""What users call to have garbage collected, in threads and in tasks."""

from __future__ import annotations

from tidelog.engine.engine_tasks import TaskThreads
from tidelog.engine.garbage import Garbage
from tidelog.engine.garbage_plan import GarbagePlan, GarbageReport
from tidelog.engine.version_keys import MAX_SEQ
from tidelog.errors import InputError


class GarbageCalls:
    """The part of an engine that is about garbage."""

    _garbage: Garbage
    _tasks: TaskThreads

    def plan_garbage(self, horizon: int | None = None) -> GarbagePlan:
        """What a collection would do now: which versions, and which pieces of the log, with what is in use of each.

        Versions go that the settings no longer keep (`keep_versions`, `keep_seconds`), or with a `horizon` those that
        no state from that seq on needs. Changes nothing.
        """
        return self._garbage.plan(_checked(horizon))

    def collect_garbage(self, plan: GarbagePlan | None = None, horizon: int | None = None) -> GarbageReport:
        """Removes versions that are no longer kept, and drops what of the log nobody needs any more.

        With a `plan`, that and nothing else; without one, what `plan_garbage` would plan now. States before
        `history_start_seq` of the report cannot be read any more.
        """
        if plan is not None and horizon is not None:
            raise InputError("a plan has its own horizon", hint="Give one of them")
        return self._garbage.collect(plan, _checked(horizon))

    async def plan_garbage_async(self, horizon: int | None = None) -> GarbagePlan:
        """As `plan_garbage`."""
        return await self._tasks.reach_store(lambda: self.plan_garbage(horizon))

    async def collect_garbage_async(self, plan: GarbagePlan | None = None, horizon: int | None = None) -> GarbageReport:
        """As `collect_garbage`."""
        return await self._tasks.reach_store(lambda: self.collect_garbage(plan, horizon))


def _checked(horizon: int | None) -> int | None:
    if horizon is not None and (type(horizon) is not int or not 0 <= horizon <= MAX_SEQ):
        raise InputError(f"{horizon!r} is not a seq: a whole number from 0 to 2**64 - 1")
    return horizon
