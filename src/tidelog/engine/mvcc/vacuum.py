"""Vacuum: removes versions that are no longer kept, a few at a time, while entries are applied.

    VACUUM(start of history) -> synced -> VACUUM(the same, removals) ... -> synced

Invariants
- Nothing is removed before the start of history is durable. A crash leaves rows that are not needed, and the next run
  finds them.
- Each step is one record with the removals of a few pages, which takes about a millisecond, and several of them take
  turns with entries. It is redone and never undone: what it removes is at or below the low-water mark.
- Of one name the oldest version is removed first, so that at no moment, here or in a restore from a prefix of the
  records, an older version is visible instead of a newer one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidelog.engine.btree.page import REMOVE, Update, encode
from tidelog.engine.core import Core
from tidelog.engine.mvcc.cells import BUCKETS, parse
from tidelog.engine.mvcc.vacuum_rules import LiveBytes, Rule, sweep
from tidelog.engine.wal.records import encode_vacuum
from tidelog.errors import DiskFullError, ExhaustedError

_STEP_ROWS = 128
_GATHERED_ROWS = 4096
_SCAN_CELLS = 1024


class Vacuumed(NamedTuple):
    """How many versions went, or would; the bytes of their values, and how many versions stay."""

    removed: int
    removed_bytes: int
    kept: int


class Vacuum:
    """Removes versions from one engine. Not thread-safe.

    `check` raises if the engine is closed or has failed; `on_failure` is called for failures that require reopening.
    """

    def __init__(self, core: Core, check: Callable[[], None], on_failure: Callable[[BaseException], None]) -> None:
        self._core = core
        self._check = check
        self._on_failure = on_failure

    def rule(self, horizon: int, keep_versions: int) -> Rule:
        created = {name.encode(): version for name, version in self._core.buckets.alive(horizon)}
        return Rule(horizon, keep_versions, created)

    def look(self, rule: Rule, live: LiveBytes) -> Vacuumed:
        """What would go; what stays is counted. Changes nothing."""
        return self._swept(rule, live, lambda keys: None)

    def run(self, rule: Rule, live: LiveBytes) -> Vacuumed:
        """Removes it. The start of history is on the disk; everything that was removed is, too, when this returns."""
        swept = self._swept(rule, live, self._remove_all)
        if swept.removed:
            with self._core.turns:
                self._check()
                self._commit()
        return swept

    def announce(self, start_seq: int) -> None:
        """Brings the start of history to the disk."""
        with self._core.turns:
            self._check()
            self._core.wal.add(encode_vacuum(start_seq))
            self._commit()

    def _commit(self) -> None:
        """A full disk is no failure: what the log took is written when there is room again."""
        try:
            self._core.wal.commit()
        except (DiskFullError, ExhaustedError):
            self._core.wal.discard()
            raise
        except BaseException as error:
            self._on_failure(error)
            raise

    def _swept(self, rule: Rule, live: LiveBytes, remove: Callable[[list[bytes]], None]) -> Vacuumed:
        kept = removed = removed_bytes = 0
        waiting: list[bytes] = []
        for swept in sweep(self._core.tree.steps(most_cells=_SCAN_CELLS), rule, live):
            self._check()
            kept += swept.kept
            removed += len(swept.doomed)
            removed_bytes += swept.stored_bytes
            waiting += swept.doomed
            if len(waiting) >= _GATHERED_ROWS:
                remove(waiting)
                waiting = []
        if waiting:
            remove(waiting)
        return Vacuumed(removed, removed_bytes, kept)

    def _remove_all(self, keys: list[bytes]) -> None:
        """In a few records, and as few turns as entries leave it."""
        done = 0
        while done < len(keys):
            with self._core.turns as turn:
                self._check()
                done += self._remove_some(keys[done : done + _STEP_ROWS])
                while done < len(keys) and not turn.is_over:
                    done += self._remove_some(keys[done : done + _STEP_ROWS])

    def _remove_some(self, keys: list[bytes]) -> int:
        core, first_lsn = self._core, self._core.wal.next_lsn
        core.tree.settle()
        try:
            count = self._log_and_remove(keys)
            core.wal.hand_over()
        except BaseException as error:
            core.wal.discard()
            if core.wal.next_lsn > first_lsn:
                self._on_failure(error)
            else:
                core.tree.take_back()
            raise
        finally:
            core.tree.settle()
        for bucket in {parse(key).bucket for key in keys[:count] if key.startswith(BUCKETS)}:
            core.buckets.reload(core.tree, bucket)
        return count

    def _log_and_remove(self, keys: list[bytes]) -> int:
        """One record; how many of the keys it has. A removal needs no room, so no page is split meanwhile."""
        core, updates = self._core, list[Update]()
        for key in keys:
            updates.append(Update(core.tree.prepare(key, 0), REMOVE, key))
            if core.pool.wants_settling:
                break
        start_seq = core.checkpointer.history_start_seq
        lsn = core.wal.add(encode_vacuum(start_seq, b"".join(map(encode, updates))))
        for update in updates:
            core.tree.apply(update, lsn)
        return len(updates)
