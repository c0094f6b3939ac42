"""From URLs to metadata stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog.errors import ConfigError
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.urls import open_store


def test_every_form_opens_its_store(tmp_path: Path) -> None:
    """And a store shows where it is."""
    objects = open_store("memory://")
    for url, shown in (
        ("memory://", "memory://"),
        (f"sqlite://{tmp_path}/a%20b.db", f"sqlite://{tmp_path}/a b.db"),
        ("etcd://localhost", "etcd://localhost:2379"),
        ("etcd://127.0.0.1:1234", "etcd://127.0.0.1:1234"),
        ("etcd://h1,h2:1234,[::1]:5", "etcd://h1:2379,h2:1234,[::1]:5"),
        ("etcds://h1", "etcds://h1:2379"),
        ("bucket", "bucket:memory://"),
    ):
        with open_metadata_store(url, objects) as store:
            assert store.url == shown
            assert shown in repr(store)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sqlite",
        "sqlite://",
        "sqlite:///",
        "sqlite://relative/path",
        "sqlite:relative",
        "etcd://",
        "etcd://host:port",
        "etcd://a:1,",
        "etcd://a:1,a:1",
        "etcd://a:1,b:port",
        "etcd://host:0",
        "etcd://host:1/path",
        "etcds://user:secret@a:1,b:2",
        "etcd://user:secret@host:1",
        "memory://name",
        "postgres://host",
        "bucket://name",
        "sqlite:///x?mode=ro&secret=1",
    ],
)
def test_urls_that_are_none_are_refused(url: str) -> None:
    """At once, and without a secret that was in the wrong place."""
    with pytest.raises(ConfigError) as refused:
        open_metadata_store(url, open_store("memory://"))
    assert "secret" not in str(refused.value)


def test_a_bucket_needs_a_store() -> None:
    """The error says what to name."""
    with pytest.raises(ConfigError, match="s3://"):
        open_metadata_store("bucket")
