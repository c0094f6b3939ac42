"""Binds a catalog to its object store, so that two installations that share a metadata store cannot mix up catalogs.

    storage/store.json         in the object store: {"store_id": "9f86d081884c7d659a2feaa0c55ad015", "created_us": ...}
    {root}/storage/store       in the metadata store: {"store_id": the same, "store": "s3://bucket/prefix"}

Invariants
- The store gets its id first, and once, by put-if-absent; the catalog gets that id by compare-and-swap. So nodes that
  open a new installation concurrently agree, and a crash between the two leaves a store with an id, which the next
  node writes to the catalog. A catalog with an id and a store without one are never the result of a crash: they do not
  belong together.
- Nothing is written if the catalog already has an id: a node that is refused has changed nothing.
- The id decides, not the URL: a store may have several URLs, and a copy that contains the id is the store, moved.
- Each opening costs one small request to the metadata store, before the first use of the catalog. The object store is
  read as well when a directory is bound to it (`asks_store`), and whenever its URL is not the one that the catalog
  names. Otherwise it is not: a topic can be reopened and appended to while its object store is unreachable.

A catalog in the bucket itself, in the log directory or in memory belongs to its store anyway: it needs none of this.
"""

from __future__ import annotations

import contextlib
import secrets
from threading import Lock
from typing import TypeVar

import msgspec

from tidelog.clock import Clock
from tidelog.codec import JSON_ERRORS, from_json
from tidelog.errors import ConfigError, ConflictError, DataError, Hint, NotFoundError, StoreUnavailableError
from tidelog.store.document import VersionedDocument
from tidelog.store.keys import STORE_ID, store_key
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore

Document = TypeVar("Document", bound=msgspec.Struct)


class StoreId(msgspec.Struct, frozen=True, kw_only=True):
    """`storage/store.json`."""

    store_id: str
    created_us: int


class BoundStore(msgspec.Struct, frozen=True, kw_only=True):
    """`{root}/storage/store`: whose catalog it is. `store` is for people."""

    store_id: str
    store: str


class StoreBinding:
    """Proves once that the catalog below a root is that of a store. Threads may share it."""

    def __init__(
        self, objects: ObjectStore, metadata: MetadataStore, root: str, clock: Clock, *, read_only: bool = False
    ) -> None:
        self._objects = objects
        self._metadata = metadata
        self._root = root
        self._document = VersionedDocument(
            metadata,
            store_key(root),
            msgspec.json.encode,
            lambda data, key: _decoded(data, BoundStore, f"{key} in {metadata.url}"),
        )
        self._clock = clock
        self._read_only = read_only
        self._guard = Lock()
        self._is_settled = False

    def check(self, *, asks_store: bool = False) -> None:
        """ConfigError where they do not belong together. A new installation is bound, unless it is only read.

        `asks_store`: also where the URL is the right one, which another endpoint may have too.
        """
        if self._is_settled and not asks_store:
            return
        # What is on the disk can be read although no store answers, and reading changes nothing: it is tried once.
        tolerated = contextlib.suppress(StoreUnavailableError) if self._read_only else contextlib.nullcontext()
        with self._guard:
            if not self._is_settled or asks_store:
                with tolerated:
                    self._settle(asks_store)
                self._is_settled = True

    def _settle(self, asks_store: bool) -> None:
        found = self._document.read()
        bound = None if found is None else found.value
        if bound is None and not self._read_only:
            self._bind()
        elif bound is not None and (asks_store or bound.store != self._objects.url):
            self._require_same(bound, self._store_id())

    def rebind(self) -> None:
        """Makes the catalog that of this store, whatever it was bound to: the caller has brought it here."""
        store_id = self._store_id() or self._made_id()
        ours = BoundStore(store_id=store_id, store=self._objects.url)
        self._document.update(lambda _: ours, rewrites=True)

    def _bind(self) -> None:
        store_id = self._store_id() or self._made_id()
        ours = BoundStore(store_id=store_id, store=self._objects.url)
        self._require_same(self._document.update(lambda bound: bound or ours), store_id)

    def _made_id(self) -> str:
        """A new id, or that of a faster node."""
        made = StoreId(store_id=secrets.token_hex(16), created_us=self._clock.now_us())
        with contextlib.suppress(ConflictError):
            self._objects.put_if_absent(STORE_ID, msgspec.json.encode(made))
        found = self._store_id()
        if found is None:
            raise StoreUnavailableError(f"{self._objects.url} does not return what was just written", operation="open")
        return found

    def _store_id(self) -> str | None:
        try:
            data = self._objects.get(STORE_ID).data
        except NotFoundError:
            return None
        return _decoded(data, StoreId, f"{self._objects.url}/{STORE_ID}").store_id

    def _require_same(self, bound: BoundStore, store_id: str | None) -> None:
        if store_id == bound.store_id:
            return
        ours = "which has no id" if store_id is None else f"whose id is {store_id}"
        raise ConfigError(
            f"the catalog below metadata_root {self._root} in {self._metadata.url} belongs to {bound.store} "
            f"(store id {bound.store_id}), not to {self._objects.url}, {ours}",
            operation="open",
            hint=Hint(
                f"Give this installation a metadata_root of its own, such as metadata_root={self._root + '-2'!r}. "
                f"If the objects were moved here, copy {STORE_ID} along",
                command=f"Give this installation a root of its own, such as TIDELOG_METADATA_ROOT={self._root}-2. "
                f"If the objects were moved here, copy {STORE_ID} along",
            ),
        )


def _decoded(data: bytes, kind: type[Document], place: str) -> Document:
    try:
        return from_json(data, kind)
    except JSON_ERRORS as error:
        raise DataError(
            f"{place} cannot be understood: {error}", operation="open", hint="Put it back from a copy"
        ) from error
