"""From URLs and settings to stores: every setting is used or refused, and no credentials are mixed."""

from __future__ import annotations

import errno
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cold.google_storage import google_storage
from tests.servers import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, S3Server

from tidelog.errors import (
    AccessDeniedError,
    ConfigError,
    ConflictError,
    DiskFullError,
    InputError,
    NotFoundError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.files import File, LocalFiles
from tidelog.secret import Secret
from tidelog.store.settings import StoreSettings
from tidelog.store.shared_directory import LOCK_NAME, DirectoryStore
from tidelog.store.urls import open_store

# One value for every setting; the test that uses it fails when a new one is missing.
SAMPLES: dict[str, Any] = {
    "store_endpoint": "https://store.example",
    "store_region": "eu-central-1",
    "store_access_key_id": "name",
    "store_secret_access_key": Secret("key"),
    "store_session_token": Secret("token"),
    "store_service_account_path": "/nowhere/account.json",
    "store_account_name": "account",
    "store_account_key": Secret("a2V5"),
    "store_allow_http": True,
    "store_connect_timeout_ms": 100,
    "store_request_timeout_ms": 100,
    "store_part_bytes": 8 << 20,
    "store_parts_in_flight": 2,
    "store_fetch_bytes": 1 << 20,
    "store_fetch_ahead": 1,
    "store_max_retries": 1,
    "store_retry_timeout_seconds": 1,
    "replica_stores": {"s3://elsewhere": StoreSettings(store_region="eu-north-1")},
}
FETCHED = {"store_fetch_bytes", "store_fetch_ahead", "replica_stores"}
ANYWHERE = FETCHED | {
    "store_part_bytes",
    "store_parts_in_flight",
    "store_endpoint",
    "store_allow_http",
    "store_connect_timeout_ms",
    "store_request_timeout_ms",
    "store_max_retries",
    "store_retry_timeout_seconds",
}
ACCEPTED = {
    "s3://bucket": ANYWHERE | {"store_region", "store_access_key_id", "store_secret_access_key", "store_session_token"},
    "gs://bucket": ANYWHERE | {"store_service_account_path"},
    "az://container": ANYWHERE | {"store_account_name", "store_account_key"},
    "memory://": FETCHED,
    "file://{directory}": FETCHED,
}


def test_a_store_has_the_settings_of_the_longest_url_it_is_below() -> None:
    """And nothing of the first store's: neither keys, nor what the environment says of its place. Its own keys may
    still come from there."""
    settings = StoreSettings(
        store_region="eu-central-1",
        store_access_key_id="first",
        store_secret_access_key=Secret("key"),
        replica_stores={
            "s3://second/": StoreSettings(store_region="eu-north-1"),
            "s3://second/far": StoreSettings(store_endpoint="https://far.example"),
        },
    )
    environment = {"AWS_ENDPOINT_URL": "https://first.example", "AWS_REGION": "us-east-2"}
    environment |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "of the environment"}

    def of(url: str) -> tuple[str | None, ...]:
        found = open_store(url, settings, environment).settings
        assert found is not None
        return found.store_endpoint, found.store_region, found.store_access_key_id

    assert of("s3://first/second") == ("https://first.example", "eu-central-1", "first")
    assert of("s3://second") == of("s3://second/near") == (None, "eu-north-1", "id")
    assert of("s3://second/far/away") == ("https://far.example", None, "id")
    assert of("s3://second/farther") == (None, "eu-north-1", "id")
    assert of("s3://secondary") == ("https://first.example", "eu-central-1", "first")
    nested = StoreSettings(replica_stores={"s3://b": StoreSettings(replica_stores={})})
    with pytest.raises(ConfigError, match="side by side"):
        open_store("s3://b", nested, {})


@pytest.mark.parametrize("url", list(ACCEPTED))
@pytest.mark.parametrize("name", StoreSettings.__struct_fields__)
def test_a_setting_means_something_or_is_refused(url: str, name: str, tmp_path: Path) -> None:
    """A credential that is accepted and ignored is a store that is open to nobody, or to everybody."""
    settings = StoreSettings(**{name: SAMPLES[name]})
    try:
        open_store(url.format(directory=tmp_path), settings, {})
    except ConfigError as error:
        refused = f"{name} does not apply to" in str(error)
    else:
        refused = False
    assert refused is (name not in ACCEPTED[url])


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "http://bucket/x",
        "s3://",
        "s3:///prefix",
        "s3://bucket/../other",
        "s3://bucket/a b",
        "s3://key:secret@bucket/x",
        "s3://bucket/x?secret=1",
        "s3://bucket/x#y",
        "file://",
        "file:///",
        "file://host/dir",
        "file:dir",
        "memory://name",
        "memory:///path",
    ],
)
def test_urls_that_are_none_are_refused(url: str) -> None:
    """With the right form in the error, and without a secret that was in the wrong place."""
    with pytest.raises(InputError) as refused:
        open_store(url, environment={})
    assert "secret" not in str(refused.value)


def test_a_url_is_shown_in_one_form(tmp_path: Path) -> None:
    """Slashes at the end make no other store."""
    assert open_store("s3://bucket/a/b/", environment={}).url == "s3://bucket/a/b"
    assert open_store("s3://bucket/", environment={}).url == "s3://bucket"
    assert open_store(f"file://{tmp_path}/a%20b/../x/").url == f"file://{tmp_path}/x"
    assert open_store("memory://").url == "memory://"


def test_half_a_key_is_refused() -> None:
    """A name without its key, or a token without both, would be completed from somewhere else."""
    for given in ({"store_access_key_id": "a"}, {"store_secret_access_key": Secret("b")}):
        with pytest.raises(ConfigError, match="together"):
            open_store("s3://bucket", StoreSettings(**given), {})
    for environment in ({"AWS_ACCESS_KEY_ID": "a"}, {"AWS_SECRET_ACCESS_KEY": "b"}):
        with pytest.raises(ConfigError, match="together"):
            open_store("s3://bucket", environment=environment)
    with pytest.raises(ConfigError, match="together"):
        open_store("s3://bucket", StoreSettings(store_session_token=Secret("t")), {"AWS_ACCESS_KEY_ID": "a"})


@pytest.mark.parametrize("endpoint", ["store.example", "ftp://store.example", "http://", "https://user:secret@x"])
def test_endpoints_that_are_none_are_refused(endpoint: str) -> None:
    """At once, not at the first request."""
    with pytest.raises(ConfigError) as refused:
        open_store("s3://bucket", StoreSettings(store_endpoint=endpoint), {})
    assert "secret" not in str(refused.value)


def test_plain_http_is_a_choice() -> None:
    """It needs no word on this machine, and a setting or variable elsewhere."""
    for endpoint in ("http://127.0.0.1:9000", "http://localhost:9000", "http://[::1]:9000"):
        open_store("s3://bucket", StoreSettings(store_endpoint=endpoint), {})
        with pytest.raises(ConfigError, match="not encrypted"):
            open_store("s3://bucket", StoreSettings(store_endpoint=endpoint, store_allow_http=False), {})
    away = {"AWS_ENDPOINT_URL": "http://store.example"}
    with pytest.raises(ConfigError, match="not encrypted"):
        open_store("s3://bucket", environment=away)
    open_store("s3://bucket", environment=away | {"AWS_ALLOW_HTTP": "true"})
    open_store("s3://bucket", StoreSettings(store_allow_http=True), away)


class TestRealServer:
    """What the settings do."""

    def test_the_usual_variables_are_enough(self, s3_server: S3Server) -> None:
        """And they travel with a pickled store, whose new process may not have them."""
        environment = {
            "AWS_ENDPOINT_URL": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_SESSION_TOKEN": "",
            "AWS_REGION": "us-east-1",
        }
        store = open_store(f"s3://{BUCKET}/variables", environment=environment)
        store.put("a", b"hello")
        assert pickle.loads(pickle.dumps(store)).get("a").data == b"hello"

    def test_keys_are_not_mixed_with_the_environment(
        self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else's token, key or endpoint in the variables changes nothing about a store with settings."""
        for name in ("AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "somebody-elses")
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        store = open_store(s3_server.url("settings"), s3_server.settings())
        store.put("a", b"hello")
        assert store.get("a").data == b"hello"

    @pytest.mark.parametrize(
        "wrong",
        [
            {"store_secret_access_key": Secret("wrong-secret")},
            {"store_access_key_id": "nobody"},
            {"store_session_token": Secret("wrong-secret")},
        ],
    )
    def test_wrong_keys_are_denied(self, s3_server: S3Server, wrong: dict[str, object]) -> None:
        """For good: no retry helps, and it is never taken for an empty store."""
        store = open_store(s3_server.url("denied"), s3_server.settings(**wrong), {})
        for use in (lambda: store.get("a"), lambda: store.head("a"), lambda: list(store.list())):
            with pytest.raises(AccessDeniedError) as denied:
                use()
            assert "wrong-secret" not in str(denied.value)

    def test_a_bucket_that_does_not_exist_is_no_empty_store(self, s3_server: S3Server) -> None:
        """A misspelt bucket must not look like a topic without history."""
        store = open_store("s3://no-such-bucket/prefix", s3_server.settings(), {})
        for use in (
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: store.read_range("a", 0, 1),
            lambda: list(store.list()),
            lambda: store.put("a", b""),
            lambda: store.put_if_absent("a", b""),
        ):
            with pytest.raises(ConfigError, match=r"^bucket 'no-such-bucket' does not exist"):
                use()

    def test_an_address_where_nobody_is(self) -> None:
        """Is a reason to retry, soon known with short timeouts."""
        settings = StoreSettings(
            store_endpoint="http://127.0.0.1:1",
            store_access_key_id="a",
            store_secret_access_key=Secret("b"),
            store_max_retries=0,
            store_connect_timeout_ms=200,
            store_request_timeout_ms=200,
        )
        with pytest.raises(StoreUnavailableError):
            open_store("s3://bucket", settings, {}).get("a")


def test_google_compares_generations(tmp_path: Path) -> None:
    """Conditional writes go by the generation there, since etags are no condition; callers see no difference."""
    account = tmp_path / "account.json"
    account.write_text(json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}))
    with google_storage() as address:
        settings = StoreSettings(store_endpoint=address, store_service_account_path=str(account), store_max_retries=0)
        store = open_store("gs://bucket/prefix", settings)
        first = store.put_if_absent("a", b"first")
        with pytest.raises(ConflictError):
            store.put_if_absent("a", b"again")
        assert store.get("a") == (b"first", first)
        second = store.put_if_match("a", b"second", store.head("a").etag)
        with pytest.raises(ConflictError):
            store.put_if_match("a", b"stale", first)
        assert pickle.loads(pickle.dumps(store)).get("a") == (b"second", second)
        with pytest.raises(NotFoundError):
            store.head("none")


def test_a_directory_is_synced_before_anybody_hears_of_it(tmp_path: Path) -> None:
    """An object under its name whose bytes a power failure took: content first, then name, then directory."""
    store = open_store(f"file://{tmp_path}/store")
    assert isinstance(store, DirectoryStore)
    files = store._files = RecordingFiles()
    store.put("deep/a", b"hello")
    assert files.calls[-3:] == ["sync a#", "rename a# a", "sync_directory deep"]
    store.put_if_absent("deep/b", b"hello")
    assert files.calls[-3:] == ["sync b#", "remove b#", "sync_directory deep"]
    store.delete("deep/a")
    assert files.calls[-2:] == ["remove a", "sync_directory deep"]
    assert sorted(path.name for path in (tmp_path / "store" / "deep").iterdir()) == ["b"]


def test_a_full_or_failing_directory_leaves_no_object(tmp_path: Path) -> None:
    """Nothing is published whose content could not be synced."""
    store = open_store(f"file://{tmp_path}/store")
    assert isinstance(store, DirectoryStore)
    store._files = RecordingFiles(failing_sync=OSError(errno.ENOSPC, "full"))
    with pytest.raises(DiskFullError):
        store.put("a", b"hello")
    store._files = RecordingFiles(failing_sync=OSError(errno.EIO, "broken"))
    with pytest.raises(StoreUnavailableError):
        store.put_if_absent("a", b"hello")
    assert [path.name for path in (tmp_path / "store").iterdir()] == [LOCK_NAME]


class RecordingFiles(LocalFiles):
    """Writes down what is synced and named, without the digits of unfinished names."""

    def __init__(self, failing_sync: OSError | None = None) -> None:
        self.calls: list[str] = []
        self._failing_sync = failing_sync

    def create(self, path: Path) -> File:
        return RecordingFile(super().create(path), lambda: self._synced(path))

    def _synced(self, path: Path) -> None:
        if self._failing_sync is not None:
            raise self._failing_sync
        self._note("sync", path)

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._note("remove", path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._note("rename", source, target)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._note("sync_directory", path)

    def _note(self, call: str, *paths: Path) -> None:
        self.calls.append(" ".join([call, *(path.name.rstrip("0123456789") for path in paths)]))


class RecordingFile:
    """An open file that says when it is synced."""

    def __init__(self, file: File, synced: Callable[[], None]) -> None:
        self._file = file
        self._synced = synced
        self.write_at, self.read_at, self.truncate = file.write_at, file.read_at, file.truncate
        self.read_ranges, self.size, self.close = file.read_ranges, file.size, file.close

    def sync(self) -> None:
        self._file.sync()
        self._synced()


def test_a_directory_that_is_gone_is_no_empty_store(tmp_path: Path) -> None:
    """An unmounted disk must not look like a topic without history."""
    store = open_store(f"file://{tmp_path}/store")
    (tmp_path / "store").rmdir()
    for use in (
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: list(store.list()),
        lambda: store.put("a", b""),
    ):
        with pytest.raises(StoreUnavailableError):
            use()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """At once, with the path in the error."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TidelogError) as refused:
        open_store(f"file://{tmp_path}/file/store")
    assert str(tmp_path) in str(refused.value)
