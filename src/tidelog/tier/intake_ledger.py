"""How the owner of a topic changes its intake document: under its epoch; without a store, under the directory's lock.

Invariants
- A change names the version that it was made from. Who does not own the topic any more changes nothing.
- Writers that commit consignments change the same document: a conflict with them is no error, the change is made again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tidelog.errors import ConflictError
from tidelog.tier.intake_document import IntakeDocument, decode_intake, encode_intake
from tidelog.tier.keys import TopicKeys
from tidelog.tier.metadata.store import Check, Entry, MetadataStore, Put
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.ownership import Step

_ATTEMPTS = 20
OpenMetadata = Callable[[bool], MetadataStore | None]


class IntakeLedger(ABC):
    """The intake document in the hands of an owner."""

    epoch: int

    def load(self) -> tuple[IntakeDocument, str | None]:
        """The document and its version; an empty one while nothing was ever handed over."""
        entry = self._entry()
        if entry is None:
            return IntakeDocument(), None
        return decode_intake(entry.value, entry.key), entry.version

    @abstractmethod
    def store(self, document: IntakeDocument, version: str | None) -> None:
        """Replaces what has this version; ConflictError when a writer was faster, FencedError when another owner is."""

    def change(self, change: Callable[[IntakeDocument], IntakeDocument]) -> IntakeDocument:
        """Changes whatever is there, however often writers are faster; the document as it is then."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._change_once(change)
            except ConflictError:
                continue
        return self._change_once(change)

    def _change_once(self, change: Callable[[IntakeDocument], IntakeDocument]) -> IntakeDocument:
        document, version = self.load()
        changed = change(document)
        if changed != document:
            self.store(changed, version)
        return changed

    @abstractmethod
    def _entry(self) -> Entry | None: ...


class OwnedLedger(IntakeLedger):
    """That of a topic with a store."""

    def __init__(self, owned: OwnedCatalog) -> None:
        self.epoch = owned.epoch
        self._owned = owned
        self._key = owned.catalog.keys.intake

    def store(self, document: IntakeDocument, version: str | None) -> None:
        write = Put(self._key, encode_intake(document.owned_by(self.epoch)))
        self._owned.ownership.change([Step(write, version)])

    def _entry(self) -> Entry | None:
        return self._owned.catalog.metadata.get(self._key)


class LocalLedger(IntakeLedger):
    """That of a topic on this disk alone. Its metadata file is made by whoever hands something over."""

    epoch = 0

    def __init__(self, open_metadata: OpenMetadata, keys: TopicKeys) -> None:
        """`open_metadata(make)` returns None when there is no file and it is not to be made."""
        self._open_metadata = open_metadata
        self._key = keys.intake

    def store(self, document: IntakeDocument, version: str | None) -> None:
        metadata = self._open_metadata(True)
        assert metadata is not None
        metadata.commit([Check(self._key, version)], [Put(self._key, encode_intake(document))])

    def _entry(self) -> Entry | None:
        metadata = self._open_metadata(False)
        return None if metadata is None else metadata.get(self._key)
