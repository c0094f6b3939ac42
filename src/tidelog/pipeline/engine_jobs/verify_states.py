"""Every state of an engine, and the version index of its compaction: each is what the log makes of the one before.

    the empty engine (while the log begins with LSN 1) + records -> oldest state? + records -> ... -> high-water mark

Invariants
- A state that is right is what the next one is computed from; one that is wrong or damaged is left out, and the next is
  computed from the one before it. So all of them are compared with the oldest thing that there is.
- What there is nothing older for, or no way from there, is read to its end, and noted. The same rows under two names
  (a compaction and the state that it published) are compared once.
- Last comes the digest of the state at the high-water mark, and whether all of its values are somewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tidelog.pipeline.engine_jobs.digest_rows import ACTUAL, LOG, Unreadable
from tidelog.pipeline.engine_jobs.digest_sources import NOTHING, Source, Sources, plan_log
from tidelog.pipeline.engine_jobs.digest_state import ComputedState, compute_state
from tidelog.pipeline.engine_jobs.verify_values import NeededValues, find_lost_values
from tidelog.pipeline.engine_jobs.verify_words import described_key, engine_problem
from tidelog.pipeline.jobs.job import Problem
from tidelog.pipeline.jobs.proof import Proof, Side

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidelog.engine.row_file import RowPart
    from tidelog.pipeline.engines.place import OpenedEngine
    from tidelog.pipeline.engines.store_place import EnginePlace


_FIRST_LSN = 1


class StateCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A state that was compared: with what, and what it is the state of."""

    key: str
    seq: int
    rows: int
    digest: str
    compared_with: str | None
    problems: int


class StatesResult(msgspec.Struct, frozen=True, kw_only=True):
    """All states, and the one at the high-water mark."""

    checks: tuple[StateCheck, ...]
    digest: str | None
    things: int
    problems: tuple[Problem, ...]
    log_problems: tuple[Problem, ...]
    """What of the log could not be read; who looks at its objects tells the same more exactly."""
    proofs: tuple[Proof, ...]
    notes: tuple[str, ...]


def check_states(
    spark: SparkSession,
    place: EnginePlace,
    opened: OpenedEngine,
    sources: Sources,
    on_done: Callable[[], None],
) -> StatesResult:
    """Compares all of them; `on_done` is called after each."""
    return _States(spark, place, opened, on_done).run(sources)


class _States:
    """One run along the log."""

    def __init__(
        self, spark: SparkSession, place: EnginePlace, opened: OpenedEngine, on_done: Callable[[], None]
    ) -> None:
        self._spark = spark
        self._place = place
        self._opened = opened
        self._manifest = opened.manifest
        self._start_lsn = opened.catalog.start_offset()
        self._on_done = on_done
        self._checks: list[StateCheck] = []
        self._problems: list[Problem] = []
        self._log_problems: list[Problem] = []
        self._proofs: list[Proof] = []
        self._notes: list[str] = []

    def run(self, sources: Sources) -> StatesResult:
        self._problems += [self._problem(one) for one in sources.unreadable]
        good: Source | None = None
        for source in sources.found:
            if source is NOTHING or (good is not None and _same_rows(good, source)):
                good = good or source
            elif self._is_right(source, self._usable(good)):
                good = source
            self._on_done()
        state = self._newest(self._usable(good), () if sources.compaction is None else sources.compaction.bodies)
        if state is not None:
            subject = f"engine {self._place.name} at seq {state.seq}"
            self._proofs.append(Proof(subject=subject, went_in=_side(state.things, state.digest)))
        return StatesResult(
            checks=tuple(self._checks),
            digest=None if state is None else state.digest,
            things=0 if state is None else state.things,
            problems=tuple(dict.fromkeys(self._problems)),
            log_problems=tuple(dict.fromkeys(self._log_problems)),
            proofs=tuple(self._proofs),
            notes=tuple(self._notes),
        )

    def _usable(self, source: Source | None) -> Source | None:
        """What something later can be computed from: the records behind it are there."""
        return source if source is not None and source.lsn >= self._start_lsn else None

    def _is_right(self, source: Source, base: Source | None) -> bool:
        state = None if base is None else self._computed(base, source, source.lsn, source.seq)
        if state is not None and any(one.source == LOG for one in state.damage):
            self._log_problems += [self._problem(one) for one in state.damage if one.source == LOG]
            state = None
        if state is None:
            base = None
            self._notes.append(f"{source.key} was read to its end, and nothing is in the store to compare it with")
            state = self._computed(source, None, source.lsn, source.seq)
        problems = [self._problem(one) for one in state.damage] or self._differences(source, base, state)
        self._problems += problems
        self._proofs += [] if problems else [_proof(source, base, state)]
        self._checks.append(_check_of(source, base, state, len(problems)))
        return not problems

    def _computed(self, base: Source, actual: Source | None, stop_lsn: int, seq: int) -> ComputedState:
        """The state that a source and the records behind it lead to, beside another one."""
        plan = plan_log(self._opened, self._place, base.lsn, stop_lsn)
        items, size = [*base.items(self._place), *plan.items], base.size + plan.size
        starts = [self._manifest.history_start_seq, base.history_start_seq]
        if actual is not None:
            items += actual.items(self._place, ACTUAL)
            size += actual.size
            starts.append(actual.history_start_seq)
        return compute_state(self._spark, items, size, seq=seq, horizon_seq=max(starts), compares=actual is not None)

    def _differences(self, source: Source, base: Source | None, state: ComputedState) -> list[Problem]:
        if not state.counts or base is None:
            return []
        counted = ", ".join(f"{state.counts[kind]:,} rows {kind}" for kind in sorted(state.counts))
        first = state.differences[0]
        reason = f"it is not the state that the log leads to from {base.key}: {counted}"
        first_text = f"the first: {described_key(first.key)} is {first.kind}"
        return [engine_problem(self._place.name, source.key, f"{reason}; {first_text}")]

    def _newest(self, good: Source | None, bodies: tuple[RowPart, ...]) -> ComputedState | None:
        """At the high-water mark; and whether its values are somewhere."""
        if good is None:
            reason = "its newest state cannot be computed: no state that is right is followed by the log"
            self._problems.append(engine_problem(self._place.name, None, reason))
            return None
        manifest = self._manifest
        state = self._computed(good, None, manifest.high_water_lsn + 1, manifest.high_water_mark)
        self._log_problems += [self._problem(one) for one in state.damage]
        if not state.damage and self._start_lsn > _FIRST_LSN:
            self._find_lost_values(good, bodies)
        return None if state.damage else state

    def _find_lost_values(self, good: Source, bodies: tuple[RowPart, ...]) -> None:
        plan = plan_log(self._opened, self._place, good.lsn, self._manifest.high_water_lsn + 1)
        items, size = [*good.items(self._place), *plan.items], good.size + plan.size
        horizon_seq = max(self._manifest.history_start_seq, good.history_start_seq)
        needed = NeededValues(self._start_lsn, horizon_seq)
        self._problems += find_lost_values(self._spark, self._place, items, size, bodies, needed)

    def _problem(self, unreadable: Unreadable) -> Problem:
        return engine_problem(self._place.name, unreadable.place, unreadable.reason)


def _check_of(source: Source, base: Source | None, state: ComputedState, problems: int) -> StateCheck:
    return StateCheck(
        key=source.key,
        seq=source.seq,
        rows=state.rows if base is None else state.actual_rows,
        digest=state.digest if base is None else state.actual_digest,
        compared_with=None if base is None else base.key,
        problems=problems,
    )


def _same_rows(one: Source, other: Source) -> bool:
    return bool(one.parts) and (one.lsn, one.parts) == (other.lsn, other.parts)


def _proof(source: Source, base: Source | None, state: ComputedState) -> Proof:
    """Retention may have taken from one side what the other still has: then there is one side to tell of."""
    expected = _side(state.things, state.digest)
    actual = _side(state.actual_things, state.actual_digest)
    subject = f"{source.key.rpartition('/')[2]} at seq {source.seq}"
    if base is None:
        return Proof(subject=subject, went_in=expected)
    return Proof(subject=subject, went_in=actual, came_out=expected if expected == actual else None)


def _side(things: int, digest: str) -> Side:
    return Side(messages=things, first_offset=None, last_offset=None, checksum=f"digest:{digest}", unit="things")
