"""A log that is damaged or gone, beside an index that is not: opening says so, in words of engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tidelog
from tidelog.errors import CorruptionError, DataError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A closed engine with some objects."""
    with tidelog.open_engine(tmp_path / "e") as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply_many([(seq, tidelog.PutObject("b", f"{seq}", b"x" * 1000)) for seq in range(2, 20)])
    return tmp_path / "e"


def test_an_engine_whose_log_is_gone_is_not_opened(directory: Path) -> None:
    """It would look whole, and have no data; with the log back it is as it was."""
    shutil.move(directory / "wal", directory / "aside")
    for _ in range(2):
        with pytest.raises(DataError, match="no file of the log"):
            tidelog.open_engine(directory)
    shutil.move(directory / "aside", directory / "wal")
    with tidelog.open_engine(directory) as engine:
        assert engine.read("b", "7").data == b"x" * 1000


def test_damage_in_the_log_names_the_commands_of_engines(directory: Path) -> None:
    """The commands that mend topics know nothing of engines."""
    path = directory / "wal" / "wal.0000000000.log"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="tidelog engine verify") as caught:
        tidelog.open_engine(directory)
    assert "tidelog repair" not in str(caught.value)
