"""The first opening with a store: what is wrong with it is told, and leaves nothing behind that is in the way later."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidelog
from tidelog.errors import ConfigError, InputError, LockedError


def url(path: Path) -> str:
    """A store in this directory."""
    return f"file://{path}"


def shipped_engine(directory: Path, store: str) -> None:
    """An engine of two entries in its store."""
    with tidelog.open_engine(directory, store=store) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply(2, tidelog.PutObject("b", "k", b"v"))
        engine.update_low_water_mark(2)
        assert engine.ship() == 2


def test_a_url_that_is_none_makes_no_directory(tmp_path: Path) -> None:
    """The right one is given next, to the same directory."""
    with pytest.raises(ConfigError, match="not the URL of a store"):
        tidelog.open_engine(tmp_path / "e", store="ftp://x")
    assert not (tmp_path / "e").exists()
    shipped_engine(tmp_path / "e", url(tmp_path / "store"))


def test_a_new_directory_is_not_the_engine_that_the_store_has(tmp_path: Path) -> None:
    """Opening an empty directory with the store of a lost engine says to restore it, which works in that directory."""
    store = url(tmp_path / "store")
    shipped_engine(tmp_path / "e", store)
    with pytest.raises(InputError, match=r"file://.* already has an engine.*restore_engine"):
        tidelog.open_engine(tmp_path / "new", store=store)
    with tidelog.restore_engine(tmp_path / "new", store=store) as engine:
        assert engine.applied_seq == 2


def test_an_engine_of_its_own_is_not_mixed_with_that_of_a_store(tmp_path: Path) -> None:
    """It is refused in words of engines, keeps what it has, and may be given another store."""
    shipped_engine(tmp_path / "e", url(tmp_path / "store"))
    with tidelog.open_engine(tmp_path / "own") as engine:
        engine.apply(1, tidelog.CreateBucket("mine"))
    with pytest.raises(InputError, match="already has an engine"):
        tidelog.open_engine(tmp_path / "own", store=url(tmp_path / "store"))
    with tidelog.open_engine(tmp_path / "own", store=url(tmp_path / "free")) as engine:
        engine.update_low_water_mark(1)
        assert (engine.list_buckets(), engine.ship()) == (["mine"], 1)


def test_a_store_that_was_claimed_stays(tmp_path: Path) -> None:
    """Another one would not have what was shipped."""
    shipped_engine(tmp_path / "e", url(tmp_path / "store"))
    with pytest.raises(ConfigError, match="is shipped to"):
        tidelog.open_engine(tmp_path / "e", store=url(tmp_path / "other"))


def test_a_second_opening_is_told_what_works_meanwhile(tmp_path: Path) -> None:
    """An engine has no read-only opening, so none is offered."""
    with tidelog.open_engine(tmp_path / "e"), pytest.raises(LockedError, match="tidelog engine status") as caught:
        tidelog.open_engine(tmp_path / "e")
    assert "read_only" not in str(caught.value)
