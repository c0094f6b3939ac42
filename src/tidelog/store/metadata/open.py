"""Opens a metadata store from a URL.

memory://    sqlite:///path    etcd://host:port,host:port    etcds://host:port (TLS)    bucket (the object store itself)
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from tidelog.errors import ConfigError, Hint, NotFoundError
from tidelog.store.metadata.base import Check, DelegatingMetadata, Entry, MetadataStore, Write, end_of
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.metadata.published import PublishedMetadata
from tidelog.store.metadata.sqlite import SqliteMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.settings import MetadataSettings

BUCKET = "bucket"
MEMORY = "memory://"
DEFAULT_ETCD_PORT = 2379
_ETCD = ("etcd", "etcds")
_HINT = "It is memory://, sqlite:///path, etcd://host:port (several with commas, etcds:// with TLS) or bucket"


class _Cluster(NamedTuple):
    """The URL of an etcd cluster taken apart."""

    scheme: str
    members: tuple[tuple[str, int], ...]

    @property
    def url(self) -> str:
        shown = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members)
        return f"{self.scheme}://{','.join(shown)}"


def open_metadata_store(
    url: str,
    objects: ObjectStore | None = None,
    *,
    read_only: bool = False,
    proves_late: bool = False,
    settings: MetadataSettings | None = None,
    runs_in_background: bool = False,
) -> MetadataStore:
    """The store at this URL. `bucket` needs the object store; with `read_only` it is not probed and takes no writes.

    With `proves_late` it is probed before the first write, so that a store that is out of reach can be opened.
    What is written to any other is published in the object store too, if one is given (`published.py`).
    """
    cluster = _cluster_of(url)
    _refuse_what_means_nothing(settings, cluster)
    store = _open(url, cluster, objects, settings, read_only=read_only, proves_late=proves_late)
    if objects is None or url == BUCKET or read_only or not objects.supports_conditional_update:
        return store
    return PublishedMetadata(store, objects, runs_in_background=runs_in_background)


def _open(
    url: str,
    cluster: _Cluster | None,
    objects: ObjectStore | None,
    settings: MetadataSettings | None,
    *,
    read_only: bool,
    proves_late: bool,
) -> MetadataStore:
    if cluster is not None:
        return _open_etcd(cluster, settings)
    if url == BUCKET:
        if objects is None:
            raise ConfigError("the metadata store `bucket` needs an object store", hint="Name one: s3://bucket/prefix")
        return BucketMetadataStore(objects, read_only=read_only, proves_late=proves_late)
    parts = urlsplit(url)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError("the URL of a metadata store has no query, fragment or user", hint=_HINT)
    if parts.scheme == "sqlite":
        return _open_sqlite(parts, read_only)
    if parts.scheme == "memory" and not parts.netloc and not parts.path:
        return MemoryMetadataStore()
    raise ConfigError(f"{url!r} is not the URL of a metadata store", hint=_HINT)


def canonical_metadata_url(url: str) -> str:
    """The one way to write the URL of an etcd cluster; others are as they are. ConfigError when it is none."""
    cluster = _cluster_of(url)
    return url if cluster is None else cluster.url


def is_same_metadata(one: str, other: str) -> bool:
    """Whether both lead to the same place: an etcd cluster does by whichever of its members."""
    first, second = _cluster_of(one), _cluster_of(other)
    if first is None or second is None:
        return one == other
    return not set(first.members).isdisjoint(second.members)


def _cluster_of(url: str) -> _Cluster | None:
    """None for the URL of another kind of store."""
    parts = urlsplit(url)
    if parts.scheme not in _ETCD:
        return None
    if "@" in parts.netloc:
        hint = "Set etcd_user and etcd_password: a URL is remembered and shown"
        raise ConfigError("the URL of an etcd cluster has no user", hint=hint)
    members = tuple(_member(text) for text in parts.netloc.split(","))
    if parts.path.strip("/") or parts.query or parts.fragment or len(set(members)) < len(members):
        raise _no_cluster()
    return _Cluster(parts.scheme, members)


def _member(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    try:
        port = DEFAULT_ETCD_PORT if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not parts.hostname or not port:
        raise _no_cluster()
    return parts.hostname, port


def _no_cluster() -> ConfigError:
    return ConfigError(
        "an etcd cluster is named by the hosts and ports of its members", hint="etcd://h1:2379,h2:2379,h3:2379"
    )


def _refuse_what_means_nothing(settings: MetadataSettings | None, cluster: _Cluster | None) -> None:
    if settings is None or cluster is not None:
        return
    given = [name for name, value in msgspec.structs.asdict(settings).items() if value is not None]
    if given:
        raise ConfigError(
            f"{given[0]} is for etcd, and the metadata is elsewhere",
            hint=Hint(
                'Leave it out, or name the cluster: metadata="etcd://host:2379"',
                command="Leave it out, or name the cluster: --metadata etcd://host:2379",
            ),
        )


def _open_sqlite(parts: SplitResult, read_only: bool) -> MetadataStore:
    if parts.netloc or not parts.path.strip("/") or not parts.path.startswith("/"):
        raise ConfigError("an SQLite file is named by its whole path", hint="Three slashes: sqlite:///srv/metadata.db")
    path = Path(os.path.normpath(unquote(parts.path)))
    if read_only and not path.exists():
        hint = 'Name the one that is meant, such as metadata="bucket", or the directory that it is in'
        raise NotFoundError("there is no catalog here, and reading makes none", path=path, hint=hint)
    return SqliteMetadataStore(path)


def _open_etcd(cluster: _Cluster, settings: MetadataSettings | None) -> MetadataStore:
    try:
        from tidelog.store.metadata.etcd import EtcdMetadataStore
        from tidelog.store.metadata.etcd_client import Endpoint
    except ImportError as error:
        raise ConfigError("the client of etcd is not installed", hint="pip install 'tidelog[cluster]'") from error
    endpoints = [Endpoint(*member) for member in cluster.members]
    return EtcdMetadataStore(endpoints, settings, is_tls=cluster.scheme == "etcds")


# A metadata store as the opening of a topic sees it: what was read is remembered until something is written.
#
# Opening asks for the same few documents again and again, each part for itself. Here all that the store has below the
# prefix of the topic is read at once, where the store can and as long as that is little, once before the claim and once
# after it. What it knows of a topic that has more, as one of many objects, is its beginning; the documents that are
# expected to be asked for are read together then.
#
# Invariants
# - Every write forgets all that was read: what is read after a claim was read after it.
# - What was read before is as old as the opening at most, and decides nothing by itself: a claim names the version that
#   it was made from, and fails when that has changed since. Whoever wants to know whether something has changed asks
#   the store itself (`asked_anew`).
# - A key counts as absent, and a listing as whole, only where the range that was read reaches beyond it.
# - When the topic is open nothing is remembered any more (`forget_all_but`), but for small documents that only its
#   owner changes, each until it is written: if another one owns the topic by then, what is written on them is refused.


_REMEMBERED_ENTRIES = 64
_KEPT_BYTES = 4096


def asked_anew(metadata: MetadataStore) -> MetadataStore:
    """The store itself: what it answers was not remembered."""
    return metadata.store if isinstance(metadata, RememberedMetadata) else metadata


class RememberedMetadata(DelegatingMetadata):
    """`keys` are those that will be asked for, of which most are below `prefix`. Closing it is not its user's business,
    and does nothing."""

    def __init__(self, store: MetadataStore, keys: Sequence[str], prefix: str | None = None) -> None:
        super().__init__(store)
        self._expected = keys if store.reads_many_at_once else ()
        self._prefix = prefix if store.reads_many_at_once else None
        self._guard = Lock()
        self._known: dict[str, Entry | None] = {}
        self._below: list[Entry] = []
        """What is below the prefix, in order, before the key `_reach`."""
        self._reach = ""
        self._is_over = False

    def forget_all_but(self, own: Sequence[str]) -> None:
        """From now on everything is asked for again, each time, except `own`, which only the owner changes."""
        with self._guard:
            kept = {key: self._known_entry(key) for key in own if self._is_known(key)}
            self._is_over = True
            self._forget_known()
            self._known = {key: one for key, one in kept.items() if one is None or len(one.value) <= _KEPT_BYTES}

    def get(self, key: str) -> Entry | None:
        if self._is_over and key not in self._known:
            return self.store.get(key)
        with self._guard:
            if not self._is_known(key) and not self._is_over:
                self._read(key)
            return self._known_entry(key) if self._is_known(key) else self.store.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        if self._is_over:
            return self.store.get_many(keys)
        with self._guard:
            if not all(map(self._is_known, keys)):
                return self.store.get_many(keys)
            return {key: one for key in keys if (one := self._known_entry(key)) is not None}

    def _is_known(self, key: str) -> bool:
        return key in self._known or self._reaches(key, key + "\0")

    def _reaches(self, start: str, end: str) -> bool:
        return self._prefix is not None and self._prefix <= start and end <= self._reach

    def _known_entry(self, key: str) -> Entry | None:
        if key in self._known:
            return self._known[key]
        at = bisect_left(self._below, key, key=_key_of)
        return self._below[at] if at < len(self._below) and self._below[at].key == key else None

    def _read(self, key: str) -> None:
        """What is asked for, and all that can be read with it."""
        if self._prefix is not None and not self._reach and key.startswith(self._prefix):
            self._read_below(self._prefix)
        if self._is_known(key):
            return
        if key in self._expected:
            wanted = [expected for expected in self._expected if not self._is_known(expected)]
            found = self.store.get_many(wanted)
            self._known |= {expected: found.get(expected) for expected in wanted}
        else:
            self._known[key] = self.store.get(key)

    def _read_below(self, prefix: str) -> None:
        found = self.store.range(prefix, limit=_REMEMBERED_ENTRIES)
        self._below = found
        self._reach = end_of(prefix) if len(found) < _REMEMBERED_ENTRIES else found[-1].key + "\0"

    def purge(self, keys: Sequence[str]) -> None:
        self._forget(keys)
        self.store.purge(keys)

    def close(self) -> None:
        return

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        known = self._listed(prefix, start)
        return self.store._range(prefix, start, limit) if known is None else known[:limit]

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        known = self._listed(prefix, start)
        return self.store._keys(prefix, start, limit) if known is None else [entry.key for entry in known[:limit]]

    def _listed(self, prefix: str, start: str) -> list[Entry] | None:
        """What is below a prefix from a key on; None where that is not known."""
        with self._guard:
            if self._is_over or self._prefix is None or not prefix.startswith(self._prefix):
                return None
            if not self._reach:
                self._read_below(self._prefix)
            first, end = max(start, prefix), end_of(prefix)
            if not self._reaches(first, end):
                return None
            at = bisect_left(self._below, first, key=_key_of)
            return self._below[at : bisect_left(self._below, end, key=_key_of)]

    def _forget(self, written: Iterable[str]) -> None:
        with self._guard:
            if self._is_over:
                for key in written:
                    self._known.pop(key, None)
            else:
                self._forget_known()

    def _forget_known(self) -> None:
        self._known, self._below, self._reach = {}, [], ""

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        try:
            return self.store._commit(checks, writes)
        finally:
            self._forget([*(check.key for check in checks), *(write.key for write in writes)])


def _key_of(entry: Entry) -> str:
    return entry.key
