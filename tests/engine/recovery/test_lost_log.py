"""A log that is damaged or gone, beside an index that is not: opening says so, in words of engines."""

from __future__ import annotations

import os
import shutil
from itertools import islice
from pathlib import Path

import pytest
from tests.engine.engines import copy_alive

import tidelog
from tidelog.engine.recovery.recovery import refuse_missing_files
from tidelog.errors import CorruptionError, DataError, GapError, LockedError
from tidelog.files import LocalFiles


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


def newest_file(directory: Path) -> Path:
    """The file at the end of the log."""
    return max((directory / "wal").glob("wal.*.log"))


def killed(tmp_path: Path) -> Path:
    """What is on the disk of an engine that is killed some files behind its last checkpoint."""
    with tidelog.open_engine(tmp_path / "alive", rotate_max_bytes=64 << 10) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.create_checkpoint()
        for seq in range(2, 200):
            engine.apply(seq, tidelog.PutObject("b", f"{seq}", b"x" * 1000))
        copy_alive(tmp_path / "alive", tmp_path / "e")
    return tmp_path / "e"


# Behind what was synced when a file was begun, a killed engine has nothing to compare with: a cut there is a torn tail.
@pytest.mark.parametrize(
    ("is_killed", "kept_bytes"),
    [(False, None), (False, 0), (False, 400), (False, -1), (True, None), (True, 0), (True, 400)],
)
def test_a_log_without_its_newest_file_is_not_opened(tmp_path: Path, is_killed: bool, kept_bytes: int | None) -> None:
    """Gone, emptied or cut: what was acknowledged would be missing, and nobody would know. Put back, it opens."""
    directory = killed(tmp_path)
    if not is_killed:
        tidelog.open_engine(directory).close()
    path = newest_file(directory)
    data = path.read_bytes()
    if kept_bytes is None:
        path.unlink()
    else:
        os.truncate(path, len(data) - 1 if kept_bytes < 0 else kept_bytes)
    for _ in range(2):
        with pytest.raises(DataError, match=r"is gone, in which LSN|synced up to LSN"):
            tidelog.open_engine(directory)
    path.write_bytes(data)
    with tidelog.open_engine(directory) as engine:
        assert engine.applied_seq == 199


def test_a_log_that_ends_before_the_last_checkpoint_is_not_opened(tmp_path: Path) -> None:
    """Also when nothing is known of its files: the pages may be of entries that are gone."""
    with tidelog.open_engine(tmp_path / "alive") as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine._wal.seal()  # the checkpoint is the first thing in the next file
        engine.create_checkpoint()
        copy_alive(tmp_path / "alive", tmp_path / "e")
    (tmp_path / "e" / "wal" / "wal.ckpt").unlink()
    newest_file(tmp_path / "e").unlink()
    for _ in range(2):
        with pytest.raises(DataError, match="the last checkpoint began at LSN"):
            tidelog.open_engine(tmp_path / "e")


def test_without_syncs_the_end_may_be_missing(tmp_path: Path) -> None:
    """That is what the setting is for; the orchestrator has the rest."""
    directory = killed(tmp_path)
    newest_file(directory).unlink()
    with tidelog.open_engine(directory, wal_sync_mode="none") as engine:
        assert 1 < engine.applied_seq < 199


def test_an_engine_that_writes_elsewhere_is_locked_and_not_damaged(tmp_path: Path) -> None:
    """It may begin a file while another process looks which ones there are; that is no file that is gone."""
    root = tmp_path / "e"
    with tidelog.open_engine(root, rotate_max_bytes=4096) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        begun = iter(range(2, 100))

        class Racing(LocalFiles):
            def list(self, path: Path) -> list[str]:
                names = super().list(path)
                for seq in islice(begun, 5):
                    engine.apply(seq, tidelog.PutObject("b", f"{seq}", b"x" * 4096))
                return names

        refuse_missing_files(Racing(), root / "wal", None, "fdatasync")
        assert len(list((root / "wal").glob("wal.*.log"))) > 1
        with pytest.raises(LockedError):
            tidelog.open_engine(root)


def test_a_file_that_is_gone_from_the_middle_is_told_in_lsns(tmp_path: Path) -> None:
    """The log says which ones, in the word that engines have for an offset."""
    root = killed(tmp_path)
    sorted((root / "wal").glob("wal.*.log"))[1].unlink()
    with pytest.raises(GapError, match=r"^LSNs \d+ to \d+ missing before wal\.") as caught:
        tidelog.open_engine(root)
    error = caught.value
    assert error.message == f"LSNs {error.first} to {error.last} {error.reason}"
    assert "offset" not in str(error)
