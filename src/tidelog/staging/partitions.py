"""Writes whose rows go to several partitions of a topic: which rows count is decided once, for all of them.

    area = PartitionedArea(objects, metadata, keys)          the keys of the topic, not of a partition
    area.commit("nightly", 7, {"shop/orders-part-0": [part], "shop/orders-part-2": [part]})
    for write in area.pending("nightly"):                    in order, what an earlier process has left among it
        ...                                                  each log's parts are committed in its own StagingArea
        area.finish(write)

The partitions of a topic have a staging document each, so that several nodes can own them. One compare-and-swap cannot
change all of these. So the document of the topic (`writes`) names a manifest first, which lists the parts of every
partition; then each partition gets its parts, as often as it takes.

Invariants
- A version is decided by one compare-and-swap: all of its rows are going to be in their partitions, or none. Whoever
  writes the version again, with whatever parts, finishes the first one. So rows may be divided differently each time.
- Versions of an application come to the partitions in their order: a later one is finished after all before it.
- What is finished is remembered as in the staging document of a log, by the newest version of each application.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgspec

from tidelog.clock import Clock
from tidelog.codec import JSON_ERRORS, from_json
from tidelog.cold.upload import checksum_text
from tidelog.errors import DataError, NotFoundError
from tidelog.log.frame import crc32
from tidelog.staging.area import StagedPart, StagedVersions, staged_commit_of
from tidelog.staging.document import StagedCommit, StagingDocument
from tidelog.store.keys import TopicKeys, staged_commit_name
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore


class PartitionedWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is decided: the parts of each log, by its name."""

    id: str
    app: str
    version: int
    is_once: bool
    logs: Mapping[str, tuple[StagedPart, ...]]


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    logs: dict[str, tuple[StagedPart, ...]]


class PartitionedArea(StagedVersions):
    """The writes over the partitions of one topic."""

    def __init__(
        self, objects: ObjectStore, metadata: MetadataStore, keys: TopicKeys, clock: Clock | None = None
    ) -> None:
        super().__init__(objects, metadata, keys, keys.writes, clock)

    def commit(self, app: str, version: int, logs: Mapping[str, Sequence[StagedPart]], *, is_once: bool) -> bool:
        """Decides that these parts are the rows of a version; False when others were, before."""
        if self._is_decided(self._load(), app, version):
            return False
        entry = self._manifested(app, version, logs, is_once)

        def decide(known: StagingDocument | None) -> StagingDocument | None:
            document = known or StagingDocument()
            return None if self._is_decided(document, app, version) else document.committed(entry)

        if self._document.update(decide) is not None:
            return True
        mine = self._load().find(entry.id)
        return mine is not None and mine.manifest == entry.manifest

    def pending(self, app: str) -> list[PartitionedWrite]:
        """The versions of an application whose parts are not all committed to their logs, in their order."""
        found = [one for one in self._load().pending if one.app == app]
        writes = (self._read(one) for one in sorted(found, key=lambda one: one.version))
        return [write for write in writes if write is not None]

    def is_finished(self, app: str, version: int) -> bool:
        """Whether every log has its parts of a version."""
        document = self._load()
        return document.find(staged_commit_of(app, version)) is None and self._is_decided(document, app, version)

    def finish(self, write: PartitionedWrite) -> None:
        """Every log has its parts."""
        now_us = self._clock.now_us()

        def finished(known: StagingDocument | None) -> StagingDocument | None:
            if known is None or known.find(write.id) is None:
                return None
            return known.placed(write.id, 0, 0).taken(write.id, now_us).without([write.id])

        self._document.update(finished)
        prefix = self._prefix(write.app, write.version)
        self._objects.delete([info.key for info in self._objects.list(prefix)])
        self._objects.remove_folder(prefix)

    def bar(self, app: str, version: int) -> bool:
        """Makes sure that nobody decides on a version with what it has seen so far; False when it is decided."""

        def unchanged(known: StagingDocument | None) -> StagingDocument | None:
            document = known or StagingDocument()
            return None if self._is_decided(document, app, version) else document

        return self._document.update(unchanged, rewrites=True) is not None

    def _is_decided(self, document: StagingDocument, app: str, version: int) -> bool:
        return document.status(app, version).state != "unknown"

    def _prefix(self, app: str, version: int) -> str:
        """A folder of its own: that of the name itself is the first partition's, in a topic that has grown."""
        return self._keys.staged_commit_prefix(staged_commit_name(f"\0{app}", version))

    def _manifested(
        self, app: str, version: int, logs: Mapping[str, Sequence[StagedPart]], is_once: bool
    ) -> StagedCommit:
        id = staged_commit_of(app, version)
        parts = [part for each in logs.values() for part in each]
        data = msgspec.json.encode(_Manifest(id=id, logs={log: tuple(each) for log, each in logs.items()}))
        key = f"{self._prefix(app, version)}manifest-{secrets.token_hex(8)}.json"
        return self._put_manifest(key, data, app, version, parts, is_once)

    def _read(self, entry: StagedCommit) -> PartitionedWrite | None:
        """None when another process has finished it meanwhile."""
        try:
            data = self._objects.get(entry.manifest).data
        except NotFoundError as error:
            if self._load().find(entry.id) is None:
                return None
            raise DataError(
                f"{entry.manifest} is gone, before version {entry.version} of {entry.app} was in all partitions",
                operation="commit",
                hint="Some partitions may have its rows. Compare them, and write the rest under another name",
            ) from error
        if checksum_text(crc32(data, 0)) != entry.checksum:
            raise DataError(f"{entry.manifest} is not the manifest that was committed", operation="commit")
        try:
            logs = from_json(data, _Manifest).logs
        except JSON_ERRORS as error:
            raise DataError(f"{entry.manifest} cannot be understood: {error}", operation="commit") from error
        return PartitionedWrite(id=entry.id, app=entry.app, version=entry.version, is_once=entry.is_once, logs=logs)
