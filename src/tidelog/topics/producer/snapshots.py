"""Where snapshots of producers' state are: a file beside the log and, with a store, an entry in its catalog.

Both are hints that avoid reading the topic from its beginning; sequences whose messages retention deleted are recorded
only there. The library's own producers have one kind of snapshot, those of Kafka's protocol another.

Invariants
- A snapshot never covers more than its location is certain to have: the file, what is synced to the local disk; the
  catalog, what is shipped.
- A snapshot is used only if the last message below its offset is the one that it was taken with. A file that lies
  beside other messages (the topic continued on another node meanwhile) is ignored.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from tidelog.codec import decode_document, encode_document
from tidelog.cold.ownership import OwnedCatalog
from tidelog.errors import ConflictError, DataError
from tidelog.log import Log
from tidelog.store.document import Step, decode_json, encode_json
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.base import MAX_VALUE_BYTES, Put
from tidelog.topics.producer.dedup import AnchoredSnapshot

_logger = logging.getLogger("tidelog.topics")
MAX_SHIPPED_BYTES = MAX_VALUE_BYTES * 9 // 10
PayloadAt = Callable[[int], bytes | None]


Snapshot = TypeVar("Snapshot", bound=AnchoredSnapshot)


class SnapshotKind(NamedTuple, Generic[Snapshot]):
    """What one kind differs in. `within` shrinks a snapshot to so many bytes; None: it cannot be."""

    name: str
    version: int
    file: str
    key: Callable[[TopicKeys], str]
    type: type[Snapshot]
    within: Callable[[Snapshot, int], Snapshot | None]


class SnapshotPlaces(Generic[Snapshot]):
    """Reads and writes both. `payload_at` gives the payload at an offset, None where it is not kept any more."""

    def __init__(
        self, log: Log, owned: OwnedCatalog | None, payload_at: PayloadAt, kind: SnapshotKind[Snapshot]
    ) -> None:
        self._log = log
        self._owned = owned
        self._payload_at = payload_at
        self._kind = kind

    @property
    def epoch(self) -> int:
        """The owner's, which is part of a snapshot; 0 without a store."""
        return 0 if self._owned is None else self._owned.epoch

    def crc32_below(self, offset: int) -> int:
        """The fingerprint of what is below an offset."""
        payload = self._payload_at(offset - 1) if offset else None
        return 0 if payload is None else zlib.crc32(payload)

    def newest(self, stop: int | None = None) -> Snapshot | None:
        """The one that knows most, of those that can be believed and know nothing of `stop` and what comes after it."""
        found = [one for one in (self.local(), self.shipped()) if one and (stop is None or one.as_of_offset <= stop)]
        believed = [snapshot for snapshot in found if self.is_true(snapshot)]
        return max(believed, key=lambda snapshot: snapshot.as_of_offset, default=None)

    def is_true(self, snapshot: Snapshot) -> bool:
        """Whether it was taken of the messages that are here."""
        offset = snapshot.as_of_offset
        if not 0 <= offset <= self._log.next_offset:
            return False
        payload = self._payload_at(offset - 1) if offset else None
        return payload is None or zlib.crc32(payload) == snapshot.last_crc32

    # The file

    def local(self) -> Snapshot | None:
        kind = self._kind
        try:
            data = self._log.files.read(self._log.directory / kind.file)
            snapshot = decode_document(kind.name, kind.version, data, kind.type)
        except FileNotFoundError:
            return None
        except (OSError, DataError) as error:
            _logger.warning("%s: %s cannot be used: %s", self._log.directory, kind.file, error)
            return None
        if self._owned is not None and snapshot.as_of_offset <= self._log.start_offset:
            return None  # of a time before the files here: the catalog knows better
        return snapshot

    def write_local(self, snapshot: Snapshot) -> None:
        """All of it must be synced."""
        if self._owned is not None and snapshot.as_of_offset <= self._log.start_offset:
            return
        data = encode_document(self._kind.name, self._kind.version, snapshot)
        try:
            self._log.files.write_atomically(self._log.directory / self._kind.file, data)
        except OSError as error:
            _logger.warning("%s: %s could not be written: %s", self._log.directory, self._kind.file, error)

    # The catalog

    @property
    def is_in_catalog(self) -> bool:
        """Whether there is one, which may be damaged."""
        return self._owned is not None and self._owned.catalog.metadata.get(self._key(self._owned)) is not None

    def _key(self, owned: OwnedCatalog) -> str:
        return self._kind.key(owned.catalog.keys)

    def shipped(self) -> Snapshot | None:
        if self._owned is None:
            return None
        key = self._key(self._owned)
        entry = self._owned.catalog.metadata.get(key)
        if entry is None:
            return None
        try:
            return decode_json(entry.value, key, self._kind.type)
        except DataError as error:
            _logger.warning("%s cannot be used: %s", key, error)
            return None

    def write_shipped(self, snapshot: Snapshot) -> None:
        """All of it must be published. Only the owner can; somebody who was faster is the owner that it once was."""
        assert self._owned is not None
        key = self._key(self._owned)
        fitting = self._kind.within(snapshot, MAX_SHIPPED_BYTES)
        if fitting is None:
            _logger.warning("%s: the state of producers is too large for the catalog", key)
            return
        entry = self._owned.catalog.metadata.get(key)
        step = Step(Put(key, encode_json(fitting)), None if entry is None else entry.version)
        try:
            self._owned.ownership.change([step])
        except ConflictError as error:
            _logger.warning("%s was changed meanwhile: %s", key, error)
