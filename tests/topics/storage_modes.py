"""The modes of a log directory, over real stores: each test that takes `storage` runs in all of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, EtcdServer, S3Server

import tidelog
from tidelog.secret import Secret
from tidelog.store.keys import DEFAULT_ROOT, TopicKeys
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

LOCAL = "local"
WITH_STORE = ["shared_fs-sqlite", "shared_fs-bucket", "object_store-etcd", "object_store-bucket"]
MODES = [LOCAL, "shared_fs-sqlite", "object_store-bucket"]


class Storage:
    """Opens log directories that share one place for their history, if the mode has one."""

    def __init__(self, mode: str, store: str | None, metadata: str | None, settings: dict[str, Any]) -> None:
        self.mode = mode
        self._store = store
        self._metadata = metadata
        self._settings = settings

    @property
    def has_store(self) -> bool:
        return self._store is not None

    def open(self, directory: Path, *, read_only: bool = False, **settings: Any) -> tidelog.LogDirectory:
        """As a user would."""
        given = {**self._settings, **settings}
        return tidelog.open(directory, store=self._store, metadata=self._metadata, read_only=read_only, **given)

    def objects(self) -> ObjectStore:
        """What is in the store, to be looked at."""
        assert self._store is not None
        given = {key: value for key, value in self._settings.items() if key.startswith("store_")}
        if "store_secret_access_key" in given:
            given["store_secret_access_key"] = Secret(given["store_secret_access_key"])
        return open_store(self._store, StoreSettings(**given))

    def metadata_keys(self, name: str) -> list[str]:
        """What the metadata store knows of a topic."""
        assert self._metadata is not None
        namespace, topic = name.split("/")
        keys = TopicKeys(namespace, topic, self._settings.get("metadata_root", DEFAULT_ROOT))
        with open_metadata_store(self._metadata, self.objects()) as metadata:
            return list(metadata.keys(keys.metadata_prefix))


def make_storage(mode: str, directory: Path, get_server: Callable[[str], Any]) -> Storage:
    """A place of its own for one test."""
    kind, _, metadata = mode.partition("-")
    if kind == LOCAL:
        return Storage(kind, None, None, {})
    name, settings = f"t{uuid.uuid4().hex}", dict[str, Any]()
    store = f"file://{directory}/bucket"
    if kind == "object_store":
        server: S3Server = get_server("s3_server")
        store = server.url(name)
        settings = {
            "store_endpoint": server.endpoint,
            "store_access_key_id": ACCESS_KEY_ID,
            "store_secret_access_key": SECRET_ACCESS_KEY,
        }
    if metadata == "etcd":
        etcd: EtcdServer = get_server("etcd_server")
        return Storage(kind, store, etcd.url, {**settings, "metadata_root": name})
    return Storage(kind, store, f"sqlite://{directory}/metadata.db" if metadata == "sqlite" else metadata, settings)


def storage_fixture(modes: list[str]) -> Any:
    """A fixture that goes through these modes."""

    @pytest.fixture(params=modes)
    def storage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Storage:
        return make_storage(request.param, tmp_path_factory.mktemp("place"), request.getfixturevalue)

    return storage
