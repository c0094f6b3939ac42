"""Where transactions and the ids of producers are kept: documents in the metadata store of the installation.

    {root}/storage/transactions/{transactional id}    `TransactionRecord`, as JSON
    {root}/storage/producer-ids                       {"next_id": the first id that nobody has}

Invariants
- A record is written on the version that was read or written last: what another coordinator wrote since is never
  overwritten. It is returned instead, and is what counts.
- Records that come together are one commit, where the store can do that. Writing a record twice is the same as once:
  after an error without an answer the same call is simply made again.
- Ids are taken in blocks by compare-and-swap, so none is given twice. A block that was taken and not used is lost.
- The first id of an installation is made from its time. One that has lost its metadata, and not its topics, so begins
  above the ids that are known in its partitions.
- Calls wait for the store: they belong in a thread. One call at a time writes records.
- Where several nodes share the transactional ids, every commit checks the claims of their slots (`slots.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.errors import ConflictError, DataError, FencedError
from tidelog.service.kafka.slots import Slots
from tidelog.service.kafka.transactions.state_machine import Persist, TransactionRecord, decode_record, encode_record
from tidelog.service.placement import slot_of
from tidelog.store.document import VersionedDocument, decode_json, encode_json
from tidelog.store.keys import DEFAULT_ROOT, producer_ids_key, transaction_key, transactions_prefix
from tidelog.store.metadata.base import MAX_VALUE_BYTES, Check, Delete, Entry, MetadataStore, Put, Write
from tidelog.store.scheduler import in_parallel

_logger = logging.getLogger("tidelog.kafka")
PRODUCER_ID_BLOCK = 1000
MAX_RECORD_BYTES = MAX_VALUE_BYTES - 4096
"""A transaction that is open may have so much; the rest is for the records that end it."""
_KEYS_AT_ONCE = 100  # as many as etcd takes
_KEYS_WITH_SLOTS = 64  # with a check for each slot beside them
_WRITES_AT_ONCE = 8


class Superseded(NamedTuple):
    """Another coordinator has changed the transactional id: this is what it has now; None if it is gone."""

    transactional_id: str
    record: TransactionRecord | None


class _ProducerIds(msgspec.Struct, frozen=True):
    next_id: int


class _Change(NamedTuple):
    persist: Persist
    write: Write

    @property
    def size(self) -> int:
        return len(self.write.value) if isinstance(self.write, Put) else 0


class TransactionStore:
    """The records of one installation."""

    def __init__(
        self,
        metadata: MetadataStore,
        root: str = DEFAULT_ROOT,
        clock: Clock | None = None,
        slots: Slots | None = None,
    ) -> None:
        self._slots = slots
        self._metadata = metadata
        self._root = root
        self._clock = clock or SystemClock()
        self._versions: dict[str, str] = {}
        key = producer_ids_key(root)
        self._ids = VersionedDocument(metadata, key, encode_json, partial(decode_json, kind=_ProducerIds))

    # Records

    def load(self) -> list[TransactionRecord]:
        """All of them. A damaged one is as good as none: it is logged, and its transactional id begins again.

        Where there are slots, what was read of those that other nodes have is for looking only."""
        if self._slots is None:
            self._versions.clear()
        records = []
        for entry in self._metadata.range(transactions_prefix(self._root)):
            record = _decoded(entry)
            if record is not None:
                if self._slots is None or self._slots.is_unloaded(record.transactional_id):
                    self._versions[record.transactional_id] = entry.version
                records.append(record)
        return records

    def read(self, transactional_id: str) -> TransactionRecord | None:
        """What is durable of a transactional id, also of other coordinators."""
        entry = self._metadata.get(transaction_key(transactional_id, self._root))
        return None if entry is None else _decoded(entry)

    def find(self, producer_ids: Collection[int]) -> dict[int, TransactionRecord]:
        """What is durable of the transactions of producers, also of other coordinators. It reads all records."""
        found = map(_decoded, self._metadata.range(transactions_prefix(self._root)))
        return {one.producer_id: one for one in found if one is not None and one.producer_id in producer_ids}

    def write(self, persists: Sequence[Persist]) -> list[Superseded]:
        """Makes the records durable, one for each transactional id; returns those that were not, and never will be.

        After an error some may be written: call it again with the same ones.
        """
        superseded = [Superseded(one.transactional_id, None) for one in persists if not self._is_ours(one)]
        changes = [self._change(one) for one in persists if self._is_ours(one)]
        if not self._metadata.supports_multi_key:
            found = in_parallel(self._write_one, changes, _WRITES_AT_ONCE, "tidelog-transactions")
            return [one for one in found if one is not None]
        for some in _chunks(changes, _KEYS_AT_ONCE if self._slots is None else _KEYS_WITH_SLOTS):
            try:
                self._commit(some)
            except (ConflictError, FencedError):
                # At least one of them: each by itself says which.
                found = [self._write_one(one) for one in some]
                superseded += [one for one in found if one is not None]
        return superseded

    def _is_ours(self, persist: Persist) -> bool:
        return self._slots is None or self._slots.is_claimed(persist.transactional_id)

    def _change(self, persist: Persist) -> _Change:
        key = transaction_key(persist.transactional_id, self._root)
        return _Change(persist, Delete(key) if persist.record is None else Put(key, encode_record(persist.record)))

    def _commit(self, changes: Sequence[_Change]) -> None:
        checks = [Check(one.write.key, self._versions.get(one.persist.transactional_id)) for one in changes]
        if self._slots is not None:
            checks += map(self._slots.check, {slot_of(one.persist.transactional_id) for one in changes})
        versions = self._metadata.commit(checks, [one.write for one in changes])
        for one in changes:
            self._know(one.persist.transactional_id, versions.get(one.write.key))

    def _know(self, transactional_id: str, version: str | None) -> None:
        if version is None:
            self._versions.pop(transactional_id, None)
        else:
            self._versions[transactional_id] = version

    def _write_one(self, change: _Change) -> Superseded | None:
        transactional_id = change.persist.transactional_id
        try:
            self._commit([change])
        except FencedError:
            return Superseded(transactional_id, None)
        except ConflictError as error:
            if self._slots is not None:
                self._slots.conflict(slot_of(transactional_id), error)
            return self._looked_up(change)
        return None

    def _looked_up(self, change: _Change) -> Superseded | None:
        """What is there now; an attempt before, whose answer was lost, may have written just this."""
        entry = self._metadata.get(change.write.key)
        record = None if entry is None else _decoded(entry)
        self._know(change.persist.transactional_id, None if entry is None else entry.version)
        return None if record == change.persist.record else Superseded(change.persist.transactional_id, record)

    # Producer ids

    def take_producer_ids(self) -> range:
        """A block of ids that nobody else gets."""

        def change(known: _ProducerIds | None) -> _ProducerIds:
            next_id = self._clock.now_us() if known is None else known.next_id
            return _ProducerIds(next_id + PRODUCER_ID_BLOCK)

        stop = self._ids.update(change).next_id
        return range(stop - PRODUCER_ID_BLOCK, stop)


def is_too_large(record: TransactionRecord) -> bool:
    """Whether an open transaction has more partitions and offsets than a record can hold."""
    return len(encode_record(record)) > MAX_RECORD_BYTES


def _chunks(changes: Sequence[_Change], at_once: int) -> Iterator[list[_Change]]:
    """As many as one commit takes, by number and by bytes."""
    some: list[_Change] = []
    size = 0
    for one in changes:
        if some and (len(some) == at_once or size + one.size > MAX_VALUE_BYTES):
            yield some
            some, size = [], 0
        some.append(one)
        size += one.size
    if some:
        yield some


def _decoded(entry: Entry) -> TransactionRecord | None:
    try:
        return decode_record(entry.value)
    except DataError as error:
        _logger.error("%s in the metadata store cannot be used, and a new one replaces it: %s", entry.key, error)
        return None
