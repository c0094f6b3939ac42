"""From a URL to an open metadata store.

memory://    sqlite:///path    etcd://host:port    bucket (the object store itself)
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from tidelog.errors import ConfigError, NotFoundError
from tidelog.tier.metadata.bucket import BucketMetadataStore
from tidelog.tier.metadata.memory import MemoryMetadataStore
from tidelog.tier.metadata.sqlite import SqliteMetadataStore
from tidelog.tier.metadata.store import MetadataStore
from tidelog.tier.object_store import ObjectStore

BUCKET = "bucket"
DEFAULT_ETCD_PORT = 2379
_HINT = "It is memory://, sqlite:///path, etcd://host:port or bucket"


def open_metadata_store(url: str, objects: ObjectStore | None = None, *, read_only: bool = False) -> MetadataStore:
    """The store at this URL. `bucket` needs the object store; with `read_only` it is not probed and takes no writes."""
    if url == BUCKET:
        if objects is None:
            raise ConfigError("the metadata store `bucket` needs an object store", hint="Name one: s3://bucket/prefix")
        return BucketMetadataStore(objects, read_only=read_only)
    parts = urlsplit(url)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError("the URL of a metadata store has no query, fragment or user", hint=_HINT)
    if parts.scheme == "sqlite":
        return _open_sqlite(parts, read_only)
    if parts.scheme == "etcd":
        return _open_etcd(parts)
    if parts.scheme == "memory" and not parts.netloc and not parts.path:
        return MemoryMetadataStore()
    raise ConfigError(f"{url!r} is not the URL of a metadata store", hint=_HINT)


def _open_sqlite(parts: SplitResult, read_only: bool) -> MetadataStore:
    if parts.netloc or not parts.path.strip("/") or not parts.path.startswith("/"):
        raise ConfigError("an SQLite file is named by its whole path", hint="Three slashes: sqlite:///srv/metadata.db")
    path = Path(os.path.normpath(unquote(parts.path)))
    if read_only and not path.exists():
        hint = 'Name the one that is meant, such as metadata="bucket", or the directory that it is in'
        raise NotFoundError("there is no catalog here, and reading makes none", path=path, hint=hint)
    return SqliteMetadataStore(path)


def _open_etcd(parts: SplitResult) -> MetadataStore:
    try:
        port = parts.port or DEFAULT_ETCD_PORT
    except ValueError:
        port = 0
    if not parts.hostname or not port or parts.path.strip("/") or "," in parts.netloc:
        raise ConfigError("etcd is named by one host and its port", hint="etcd://host:2379")
    try:
        from tidelog.tier.metadata.etcd import EtcdMetadataStore
    except ImportError as error:
        raise ConfigError("the client of etcd is not installed", hint="pip install 'tidelog[cluster]'") from error
    return EtcdMetadataStore(parts.hostname, port)
