"""Where an engine is: named by its directory or its store, and opened without touching the engine itself."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import tidelog
from tidelog.errors import ConfigError, InputError, NotFoundError, NotSupportedError
from tidelog.pipeline.address import EngineRoot, find_engine


def shipped(directory: Path, store: Path) -> None:
    """An engine with one object, all of it in its store."""
    with tidelog.open_engine(directory, store=f"file://{store}") as engine:
        engine.apply_many([(1, tidelog.CreateBucket("b")), (2, tidelog.PutObject("b", "k", b"v"))])
        engine.update_low_water_mark(2)
        engine.ship()


def test_a_directory_and_its_store_lead_to_the_same_engine(tmp_path: Path) -> None:
    """Either way the manifest of the engine is found, while its owner has it open."""
    shipped(tmp_path / "engine", tmp_path / "store")
    by_directory, by_store = find_engine(tmp_path / "engine"), find_engine(f"file://{tmp_path / 'store'}")
    assert by_directory.directory == tmp_path / "engine"
    assert by_store.directory is None
    assert by_directory.place == by_store.place
    with tidelog.open_engine(tmp_path / "engine"), by_directory.open() as one, by_store.open() as other:
        assert one.manifest == other.manifest
        assert one.manifest.high_water_mark == 2
        assert one.catalog.next_offset() == one.manifest.shipped_lsn


def test_a_root_travels_and_hides_its_settings(tmp_path: Path) -> None:
    """A pickled root is the same root, and its repr shows no value of a setting."""
    shipped(tmp_path / "engine", tmp_path / "store")
    root = find_engine("s3://bucket/prefix", store_secret_access_key="hush", store_access_key_id="me")
    copy = pickle.loads(pickle.dumps(root))
    assert copy == root
    assert "hush" not in repr(root)
    assert root.place.store_settings.store_access_key_id == "me"
    assert find_engine(tmp_path / "engine").place.objects is find_engine(tmp_path / "engine").place.objects


def test_settings_of_the_environment_travel_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver's environment says about stores and engines is in the root; other places are not."""
    monkeypatch.setenv("TIDELOG_STORE", "s3://elsewhere/prefix")
    monkeypatch.setenv("TIDELOG_STORE_REGION", "eu-north-1")
    monkeypatch.setenv("TIDELOG_ENGINE_COLD_CACHE_BYTES", "1MiB")
    root = find_engine("s3://bucket/prefix", "other")
    assert root == EngineRoot(
        "s3://bucket/prefix",
        {"store_region": "eu-north-1", "cold_cache_bytes": "1MiB"},
        "s3://bucket/prefix",
        "other",
    )
    assert root.place.store_settings.store_region == "eu-north-1"
    assert root.load().storage_engine.cold_cache_bytes == 1 << 20


def test_an_engine_without_a_store_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Spark's workers cannot read what is on one disk alone."""
    tidelog.open_engine(tmp_path / "engine").close()
    with pytest.raises(NotSupportedError, match="has no store"):
        find_engine(tmp_path / "engine")


@pytest.mark.parametrize(
    ("location", "error", "says"),
    [
        ("", ConfigError, "no engine was named"),
        ("memory://", ConfigError, "inside one process"),
        ("s3:/bucket", ConfigError, "two slashes"),
        ("ftp://host/path", ConfigError, "not the URL of a store"),
        ("/nonexistent/engine", NotFoundError, "there is no engine in"),
    ],
)
def test_what_cannot_be_an_engine_is_refused(location: str, error: type[InputError], says: str) -> None:
    """The error names the place and what would be right."""
    with pytest.raises(error, match=says):
        find_engine(location)


def test_names_are_checked(tmp_path: Path) -> None:
    """A name that cannot be one, a name that is not the directory's, and a setting that is none are errors."""
    shipped(tmp_path / "engine", tmp_path / "store")
    with pytest.raises(InputError, match="part of a key"):
        find_engine("s3://bucket/prefix", "a/b")
    with pytest.raises(ConfigError, match="is called main, not other"):
        find_engine(tmp_path / "engine", "other")
    with pytest.raises(ConfigError, match="store_regoin is not a setting"):
        find_engine("s3://bucket/prefix", store_regoin="x")


def test_a_store_without_such_an_engine_is_not_found(tmp_path: Path) -> None:
    """Neither an engine of another name nor a directory that is not there is taken for an empty one."""
    shipped(tmp_path / "engine", tmp_path / "store")
    with (
        pytest.raises(NotFoundError, match="no engine called other"),
        find_engine(f"file://{tmp_path}/store", "other").open(),
    ):
        pass
    with pytest.raises(NotFoundError, match="no such directory"), find_engine(f"file://{tmp_path}/stoer").open():
        pass
    assert not (tmp_path / "stoer").exists()
