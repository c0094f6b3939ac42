"""How the owner of a topic changes its staging document: under its epoch; without a store, under the directory's lock.

Invariants
- A change names the version that it was made from. A node that no longer owns the topic changes nothing.
- Writers that commit staged rows change the same document: a conflict with them is no error, the change is retried.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tidelog.cold.ownership import OwnedCatalog
from tidelog.staging.document import StagingDocument, decode_staging, encode_staging
from tidelog.store.document import VersionedDocument
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.base import MetadataStore

OpenMetadata = Callable[[bool], MetadataStore | None]
Stored = VersionedDocument[StagingDocument]


class IngestLedger(ABC):
    """The owner's access to the staging document."""

    epoch: int

    def load(self) -> tuple[StagingDocument, str | None]:
        """The document and its version; an empty one while nothing was ever staged."""
        stored = self._stored(make=False)
        found = None if stored is None else stored.read()
        return (StagingDocument(), None) if found is None else found

    def store(self, document: StagingDocument, version: str | None) -> None:
        """Replaces what has this version; ConflictError when a writer was faster, FencedError when another owner is."""
        self._made().replace(document, version)

    def change(self, change: Callable[[StagingDocument], StagingDocument]) -> StagingDocument:
        """Changes whatever is there, however often writers are faster; the document as it is then."""

        def changed(known: StagingDocument | None) -> StagingDocument | None:
            before = known or StagingDocument()
            after = change(before)
            return None if known is None and after == before else after

        if self._stored(make=False) is None and changed(None) is None:
            return StagingDocument()
        return self._made().update(changed) or StagingDocument()

    def _made(self) -> Stored:
        stored = self._stored(make=True)
        assert stored is not None
        return stored

    @abstractmethod
    def _stored(self, *, make: bool) -> Stored | None:
        """Where it is kept; None when it does not exist and is not to be created."""


class OwnedLedger(IngestLedger):
    """That of a topic with a store."""

    def __init__(self, owned: OwnedCatalog) -> None:
        self.epoch = owned.epoch
        self._document = VersionedDocument(
            owned.catalog.metadata,
            owned.catalog.keys.staging,
            lambda document: encode_staging(document.owned_by(owned.epoch)),
            decode_staging,
            fence=owned.ownership,
        )

    def _stored(self, *, make: bool) -> Stored:
        return self._document


class LocalLedger(IngestLedger):
    """The ledger of a topic on this disk alone. The first writer that stages rows creates its metadata file."""

    epoch = 0

    def __init__(self, open_metadata: OpenMetadata, keys: TopicKeys) -> None:
        """`open_metadata(make)` returns None when there is no file and it is not to be made."""
        self._open_metadata = open_metadata
        self._key = keys.staging

    def _stored(self, *, make: bool) -> Stored | None:
        metadata = self._open_metadata(make)
        return None if metadata is None else VersionedDocument(metadata, self._key, encode_staging, decode_staging)
