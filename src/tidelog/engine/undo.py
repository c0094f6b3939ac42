"""Undo: takes entries back that were applied, and entries of which a crash left only a part.

    ROLLBACK_BEGIN(target) -> COMPENSATION ... COMPENSATION -> ROLLBACK_END        the orchestrator threw a tail away
    COMPENSATION ... COMPENSATION                                                  a batch without its last record

Invariants
- What is undone is found in the log, newest first, and each step is a record of its own that is never undone itself.
  `undo_next_lsn` in it says what is left, so that an undo that was cut off goes on where it was.
- Undo is by key: the cell is taken out, or put back, in whatever page it is by now. A split in between does not matter.
- Operations above the target of an earlier rollback were undone by it, and are passed over. So are those of a batch
  that was never completed: compensations without a rollback around them tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidelog.engine.btree import Tree
from tidelog.engine.operation_record import decode_operation
from tidelog.engine.record import (
    RollbackBeginRecord,
    RollbackEndRecord,
    decode_record,
    encode_compensation,
    encode_rollback_begin,
    encode_rollback_end,
)
from tidelog.engine.record_header import COMPENSATION, LAST, OPERATION, ROLLBACK_BEGIN, ROLLBACK_END, decode_header
from tidelog.engine.updates import decode, encode
from tidelog.engine.version_keys import MAX_SEQ
from tidelog.engine.wal import Wal
from tidelog.errors import DataError

# Records that are written before the log is asked to take them: what is undone may be much.
_COMMIT_EVERY = 4096


class Victim(NamedTuple):
    """An operation to undo."""

    lsn: int
    transaction: int


class Undo:
    """Takes operations back."""

    def __init__(self, tree: Tree, wal: Wal) -> None:
        self._tree = tree
        self._wal = wal

    def roll_back(self, target_seq: int) -> range:
        """Undoes all entries above a seq; the LSNs between which all that was undone lies, its own records included."""
        from_lsn = self._wal.next_lsn - 1
        begin_lsn = self._wal.add(encode_rollback_begin(target_seq, from_lsn))
        first_lsn = self._undo(list(self._victims(from_lsn, target_seq)), begin_lsn)
        return range(first_lsn, self._finish(target_seq, begin_lsn) + 1)

    def resume_rollback(self, begin_lsn: int, undo_next_lsn: int | None) -> range:
        """Goes on with a rollback that was cut off; `undo_next_lsn` is what its last compensation says, if any."""
        begin = decode_record(self._wal.record(begin_lsn), begin_lsn)
        if not isinstance(begin, RollbackBeginRecord):
            raise DataError(f"a rollback is said to begin at LSN {begin_lsn}, where there is none")
        victims = list(self._victims(begin.from_lsn, begin.target_seq))
        first_lsn = min([victim.lsn for victim in victims], default=begin_lsn)
        left = victims if undo_next_lsn is None else [v for v in victims if v.lsn <= undo_next_lsn]
        self._undo(left, begin_lsn)
        return range(first_lsn, self._finish(begin.target_seq, begin_lsn) + 1)

    def undo_transaction(self, transaction: int, last_lsn: int) -> None:
        """Undoes an entry of which the last record is missing, from its newest record that is not undone yet."""
        chain: list[Victim] = []
        lsn = last_lsn
        while lsn:
            header = decode_header(self._wal.record(lsn), lsn)
            if header.kind != OPERATION or header.transaction != transaction:
                raise DataError(f"LSN {lsn} does not belong to seq {transaction}, whose records lead to it")
            chain.append(Victim(lsn, transaction))
            lsn = header.previous_lsn
        self._undo(chain, 0)

    def _finish(self, target_seq: int, begin_lsn: int) -> int:
        end_lsn = self._wal.add(encode_rollback_end(target_seq, begin_lsn))
        self._wal.commit()
        self._tree.settle()
        return end_lsn

    def _victims(self, from_lsn: int, target_seq: int) -> Iterator[Victim]:
        """The operations above a seq that still count, newest first."""
        walk = _Walk(from_lsn)
        for lsn, payload in self._wal.backwards(from_lsn, self._wal.first_lsn):
            seq = walk.counts(lsn, payload)
            if seq is None:
                continue
            if seq <= target_seq:
                return
            yield Victim(lsn, seq)

    def _undo(self, victims: list[Victim], previous_lsn: int) -> int:
        """Undoes them in this order; the lowest LSN of them, or that of what began it."""
        for number, victim in enumerate(victims):
            next_lsn = victims[number + 1].lsn if number + 1 < len(victims) else 0
            previous_lsn = self._undo_one(victim, previous_lsn, next_lsn)
            if number % _COMMIT_EVERY == _COMMIT_EVERY - 1:
                self._wal.commit()
                self._tree.settle()
        self._wal.commit()
        self._tree.settle()
        return victims[-1].lsn if victims else previous_lsn

    def _undo_one(self, victim: Victim, previous_lsn: int, next_lsn: int) -> int:
        record = decode_operation(self._wal.record(victim.lsn), victim.lsn)
        done = decode(record.updates, victim.lsn)
        if len(done) > 1:
            raise DataError(f"an operation changes {len(done)} cells, LSN {victim.lsn}")
        steps = [self._tree.reversal(update) for update in done]
        updates = b"".join(encode(step) for step in steps)
        lsn = self._wal.add(encode_compensation(victim.transaction, previous_lsn, next_lsn, victim.lsn, updates))
        for step in steps:
            self._tree.apply(step, lsn)
        return lsn


class _Walk:
    """A way back through the log: which operations count, given what came after them."""

    def __init__(self, from_lsn: int) -> None:
        self._below_lsn = from_lsn + 1
        self._ceiling = MAX_SEQ
        self._unfinished: int | None = None

    def counts(self, lsn: int, payload: bytes) -> int | None:
        """The seq of an operation that was neither undone nor left unfinished; None for all else."""
        if lsn >= self._below_lsn:
            return None  # inside a rollback that is complete: what it did is done
        header = decode_header(payload, lsn)
        if header.kind == OPERATION:
            return self._operation(header.transaction, is_last=bool(header.flags & LAST))
        if header.kind == COMPENSATION:
            self._unfinished = header.transaction
        elif header.kind == ROLLBACK_BEGIN:
            raise DataError(f"a rollback that begins at LSN {lsn} has no end")
        elif header.kind == ROLLBACK_END:
            self._pass_over(payload, lsn)
        return None

    def _operation(self, seq: int, *, is_last: bool) -> int | None:
        if seq == self._unfinished and not is_last:
            return None
        self._unfinished = None
        return seq if seq <= self._ceiling else None

    def _pass_over(self, payload: bytes, lsn: int) -> None:
        end = decode_record(payload, lsn)
        assert isinstance(end, RollbackEndRecord)
        self._below_lsn = end.begin_lsn
        self._ceiling = min(self._ceiling, end.target_seq)
