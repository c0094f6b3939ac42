"""What `import tidelog` offers: the public names, and nothing that gets in the way."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

import tidelog
from tidelog.errors import NotFoundError, NotSupportedError


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    """An editor offers what is meant to be used."""
    assert dir(tidelog) == sorted([*tidelog.__all__, "open"])
    assert [name for name in dir(tidelog) if not hasattr(tidelog, name)] == []


def test_a_star_import_leaves_open_alone() -> None:
    """`from tidelog import *` does not put `tidelog.open` in the place of Python's own."""
    names: dict[str, object] = {}
    exec("from tidelog import *", names)
    assert names.get("open", builtins.open) is builtins.open
    assert names["Message"] is tidelog.Message


def test_sealing_without_a_store_is_refused() -> None:
    """There is nobody to hand the topic to; it stays open."""
    with tidelog.open(None) as log:
        topic = log.topic("shop/orders")
        with pytest.raises(NotSupportedError, match="no object store"):
            topic.seal()
        assert topic.append(b"goes on") == 0


def test_opening_what_must_be_there_makes_nothing(tmp_path: Path) -> None:
    """With `create=False` a mistyped path is an error, and no empty log or engine."""
    with pytest.raises(NotFoundError, match="no log directory at"):
        tidelog.open(tmp_path / "daat", create=False)
    with pytest.raises(NotFoundError, match="no engine in"):
        tidelog.open_engine(tmp_path / "engien", create=False)
    assert list(tmp_path.iterdir()) == []
    tidelog.open(tmp_path / "data").close()
    tidelog.open(tmp_path / "data", create=False).close()
    tidelog.open_engine(tmp_path / "engine").close()
    tidelog.open_engine(tmp_path / "engine", create=False).close()
