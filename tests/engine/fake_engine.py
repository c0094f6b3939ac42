"""An engine in memory, for tests of what stands on one: the model's states behind the public names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.engine.model import Model, ModelBucket

from tidelog.engine.entry import MetadataValue, ObjectInfo, Result, StoredObject
from tidelog.engine.mvcc.retention import Marks
from tidelog.engine.orchestrator.base import Turn
from tidelog.engine.txn.locks import LockStatistics
from tidelog.engine.txn.read_set import Carried, Guarded, VisibleState, batch_of
from tidelog.engine.txn.transaction import Transaction, Transactions
from tidelog.errors import InputError, NotFoundError


class FakeStatistics(NamedTuple):
    """The part of an engine's statistics that is asked for."""

    locks: LockStatistics


class FakeEngine:
    """Applies entries to the model, and keeps the marks as an engine does."""

    def __init__(self, *, settles: bool = True) -> None:
        self.model = Model()
        self.marks = Marks()
        self.transactions = Transactions()
        self.settles = settles
        self.batches: list[int] = []
        self.truncation_mark = 0
        self._driving = Turn()
        self._results: dict[int, Result] = {}

    @property
    def applied_seq(self) -> int:
        return self.model.applied_seq

    @property
    def low_water_mark(self) -> int:
        return self.marks.low_water_mark

    def transaction(self, timeout_seconds: float | None = 10.0) -> Transaction:
        return self.transactions.begin(self, timeout_seconds)

    def statistics(self) -> FakeStatistics:
        return FakeStatistics(self.transactions.statistics())

    def apply(self, seq: int, entry: Carried) -> Result:
        return self.apply_many([(seq, entry)])[0]

    def apply_many(self, entries: Iterable[tuple[int, Carried]]) -> list[Result]:
        pairs = list(entries)
        results = [self._apply_one(seq, entry) for seq, entry in pairs]
        self.batches.append(len(pairs))
        self.marks.applied(self.applied_seq)
        if self.settles:
            changed = [batch_of(pair[1]) for pair, result in zip(pairs, results, strict=True) if result.applied]
            self.transactions.settle(self.applied_seq, changed)
        return results

    def _apply_one(self, seq: int, entry: Carried) -> Result:
        if seq <= self.applied_seq:
            if self.model.entries.get(seq) == batch_of(entry):
                return self._results[seq]
            raise InputError(f"seq {seq} was applied already, with another entry")
        self._results[seq] = result = self._judged(seq, entry)
        return result

    def _judged(self, seq: int, entry: Carried) -> Result:
        refusal = entry.refusal(VisibleState(self)) if isinstance(entry, Guarded) else None
        if refusal is not None:
            self.model.refuse(seq, batch_of(entry))
            return Result(seq, "refused", refusal)
        return Result(seq, "applied" if self.model.apply(seq, batch_of(entry)) else "refused")

    def update_low_water_mark(self, seq: int) -> None:
        self.marks.raise_low_water_mark(seq)

    def rollback_to(self, seq: int) -> None:
        self.marks.rolled_back(seq)
        self.model.roll_back(seq)
        self.transactions.rolled_back(seq)

    def _bucket(self, bucket: str, seq: int | None) -> ModelBucket:
        state = self.model.at(self.applied_seq if seq is None else seq)
        if bucket not in state:
            raise NotFoundError(f"no bucket {bucket!r}")
        return state[bucket]

    def read(self, bucket: str, key: str, seq: int | None = None) -> StoredObject:
        found = self._bucket(bucket, seq).objects.get(key)
        if found is None:
            raise NotFoundError(f"no object {key!r}")
        metadata: dict[str, MetadataValue] = {
            name: value for name, value in found.metadata.items() if isinstance(value, str)
        }
        return StoredObject(found.data, metadata, found.seq, "hot")

    def has_bucket(self, bucket: str, seq: int | None = None) -> bool:
        return bucket in self.model.at(self.applied_seq if seq is None else seq)

    def find_object(self, bucket: str, key: str, seq: int | None = None) -> ObjectInfo | None:
        if not self.has_bucket(bucket, seq):
            return None
        found = self._bucket(bucket, seq).objects.get(key)
        return None if found is None else ObjectInfo(key, len(found.data), found.seq)

    def list_objects(self, bucket: str, prefix: str = "", seq: int | None = None) -> Iterator[ObjectInfo]:
        for key, item in sorted(self._bucket(bucket, seq).objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(item.data), item.seq)

    def digest(self, seq: int | None = None) -> str:
        return self.model.digest(seq)
