"""Rows handed over by hand, as a writer does that does not own the topic: what the tests of the staging stand on."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.cold.published import KEYS

from tidelog.clock import ManualClock
from tidelog.cold.fetch import ColdReadCounters, Fetcher, FetchSettings
from tidelog.log import Log, LogSettings
from tidelog.log.frame import encode_many
from tidelog.staging.area import Outcome, StagedPart, StagingArea
from tidelog.staging.ingest import Ingester
from tidelog.staging.ledger import LocalLedger
from tidelog.staging.rows import Staging
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyFiles, FaultyMetadata, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_MESSAGE_BYTES = 1 << 20


def row(version: int, number: int, size: int = 20) -> bytes:
    """The payload of a row: no two are alike."""
    return (b"v%d-%d" % (version, number)).ljust(size, b".")


def rows(version: int, count: int, size: int = 20) -> list[bytes]:
    return [row(version, number, size) for number in range(count)]


def stage(area: StagingArea, app: str, version: int, payloads: Sequence[bytes], parts: int = 1) -> list[StagedPart]:
    """The payloads in so many parts, one after the other."""
    staged: list[StagedPart] = []
    each = -(-len(payloads) // parts) if payloads else 0
    for partition in range(parts):
        mine = payloads[partition * each : (partition + 1) * each]
        with area.open_part(app, version, partition, secrets.token_hex(4)) as writer:
            if mine:
                writer.write(encode_many(0, list(mine)).buffer, len(mine))
        if writer.part is not None:
            staged.append(writer.part)
    return staged


def hand_over(area: StagingArea, app: str, version: int, payloads: Sequence[bytes], parts: int = 1) -> Outcome:
    """Staged and committed."""
    return area.commit(app, version, stage(area, app, version, payloads, parts))


def area_of(objects: ObjectStore, metadata: MetadataStore) -> StagingArea:
    return StagingArea(objects, metadata, KEYS, ManualClock())


class LocalTopic:
    """A log without a store, and its staging: on a disk, a store and metadata that can fail."""

    is_local = False
    """Whether rows are staged on the same disk: then large consignments are written beside the log first."""

    def __init__(
        self, directory: Path, files: FaultyFiles, objects: FaultyStore, metadata: FaultyMetadata, settings: LogSettings
    ) -> None:
        self.log = Log.open(directory, settings, files=files)
        self._executor = ThreadPoolExecutor(1)
        fetcher = Fetcher(objects, self._executor, ColdReadCounters(), FetchSettings(range_bytes=64))
        self.taker = Ingester(
            *(self.log, LocalLedger(lambda make: metadata, KEYS), KEYS),
            *(lambda: Staging(objects, fetcher, self.is_local), lambda: self.log.durable_offset, ManualClock()),
            max_message_bytes=MAX_MESSAGE_BYTES,
            check_seconds=1,
        )

    def payloads(self) -> list[bytes]:
        return [bytes(payload) for batch in self.log.read() for payload in batch.payloads()]

    def close(self) -> None:
        self.taker.stop()
        self._executor.shutdown()
        self.log.close()


@contextmanager
def local_topic(
    directory: Path,
    files: FaultyFiles,
    objects: FaultyStore,
    metadata: FaultyMetadata,
    settings: LogSettings | None = None,
) -> Iterator[LocalTopic]:
    """Opened, with everything taken in that waits."""
    topic = LocalTopic(directory, files, objects, metadata, settings or LogSettings())
    try:
        topic.taker.settle()
        yield topic
    finally:
        topic.close()
