"""Where the state of the producers is kept besides the log: a file beside it, and with a store an entry in its catalog.

Both are hints that spare reading the topic from its beginning; what retention has deleted is remembered only there.

Invariants
- A snapshot never knows more than what its place has for certain: the file what is synced on this disk, the catalog
  what is shipped.
- It is believed only where the last message below its offset is the one that it was made with. A file that lies beside
  other messages (the topic went on elsewhere meanwhile) is not.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable

from tidelog.codec import decode_document, encode_document
from tidelog.errors import ConflictError, DataError
from tidelog.log import Log
from tidelog.log.names import PRODUCERS
from tidelog.tier import owner as documents
from tidelog.tier.metadata.store import MAX_VALUE_BYTES, Put
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.ownership import Step
from tidelog.topics.producer_state import ProducersSnapshot, within

_logger = logging.getLogger("tidelog.topics")
_KIND = "producers"
_VERSION = 1
PayloadAt = Callable[[int], bytes | None]


class ProducerSnapshots:
    """Reads and writes both. `payload_at` gives the payload at an offset, None where it is not kept any more."""

    def __init__(self, log: Log, owned: OwnedCatalog | None, payload_at: PayloadAt) -> None:
        self._log = log
        self._owned = owned
        self._payload_at = payload_at

    @property
    def epoch(self) -> int:
        """The owner's, which is part of a snapshot; 0 without a store."""
        return 0 if self._owned is None else self._owned.epoch

    def crc32_below(self, offset: int) -> int:
        """The fingerprint of what is below an offset."""
        payload = self._payload_at(offset - 1) if offset else None
        return 0 if payload is None else zlib.crc32(payload)

    def newest(self) -> ProducersSnapshot | None:
        """The one that knows most, of those that can be believed."""
        found = [snapshot for snapshot in (self._local(), self._shipped()) if snapshot is not None]
        believed = [snapshot for snapshot in found if self._is_true(snapshot)]
        return max(believed, key=lambda snapshot: snapshot.as_of_offset, default=None)

    def _is_true(self, snapshot: ProducersSnapshot) -> bool:
        offset = snapshot.as_of_offset
        if not 0 < offset <= self._log.next_offset:
            return False
        payload = self._payload_at(offset - 1)
        return payload is None or zlib.crc32(payload) == snapshot.last_crc32

    # The file

    def _local(self) -> ProducersSnapshot | None:
        try:
            data = self._log.files.read(self._log.directory / PRODUCERS)
            snapshot = decode_document(_KIND, _VERSION, data, ProducersSnapshot)
        except FileNotFoundError:
            return None
        except (OSError, DataError) as error:
            _logger.warning("%s: %s cannot be used: %s", self._log.directory, PRODUCERS, error)
            return None
        if self._owned is not None and snapshot.as_of_offset <= self._log.start_offset:
            return None  # of a time before the files here: the catalog knows better
        return snapshot

    def write_local(self, snapshot: ProducersSnapshot) -> None:
        """All of it must be synced."""
        if self._owned is not None and snapshot.as_of_offset <= self._log.start_offset:
            return
        data = encode_document(_KIND, _VERSION, snapshot)
        try:
            self._log.files.write_atomically(self._log.directory / PRODUCERS, data)
        except OSError as error:
            _logger.warning("%s: %s could not be written: %s", self._log.directory, PRODUCERS, error)

    # The catalog

    def _shipped(self) -> ProducersSnapshot | None:
        if self._owned is None:
            return None
        key = self._owned.catalog.keys.producers
        entry = self._owned.catalog.metadata.get(key)
        if entry is None:
            return None
        try:
            return documents.decode(entry.value, key, ProducersSnapshot)
        except DataError as error:
            _logger.warning("%s cannot be used: %s", key, error)
            return None

    def write_shipped(self, snapshot: ProducersSnapshot) -> None:
        """All of it must be published. Only the owner can; somebody who was faster is the owner that it once was."""
        assert self._owned is not None
        key = self._owned.catalog.keys.producers
        entry = self._owned.catalog.metadata.get(key)
        data = documents.encode(within(snapshot, MAX_VALUE_BYTES * 9 // 10))
        step = Step(Put(key, data), None if entry is None else entry.version)
        try:
            self._owned.ownership.change([step])
        except ConflictError as error:
            _logger.warning("%s was changed meanwhile: %s", key, error)
