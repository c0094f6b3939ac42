"""`tidelog engine verify` finds what is damaged, wherever it is, and touches nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Result
from tests.engine.engines import copy_alive

import tidelog
from tidelog.engine.verify.overlay import OverlayFiles
from tidelog.files import LocalFiles

PAGE_BYTES = 8192
Engine = Callable[..., Result]


@pytest.fixture
def engine(cli: Cli, tmp_path: Path) -> Engine:
    """An engine in ./engine whose older half is in ./store alone; what runs commands on it."""
    store = f"file://{tmp_path}/store"
    with tidelog.open_engine("engine", store=store, rotate_max_bytes=40_000, local_retention_bytes=60_000) as one:
        one.apply(1, tidelog.CreateBucket("b"))
        for seq in range(2, 202):
            one.apply(seq, tidelog.PutObject("b", f"k{seq % 120:03}", b"%d" % seq * 300, {"n": seq}))
        one.apply(202, tidelog.DeleteObject("b", "k007"))
        one.update_low_water_mark(150)
        one.ship()
        one.create_checkpoint()
        one.ship()
        assert one.read("b", "k002", 2).tier == "cold"
    return lambda *arguments: cli("engine", *arguments)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x10
    path.write_bytes(data)


def fingerprint(directory: Path) -> dict[str, str]:
    """Every file but the lock, which says who had it last."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def problems(result: Result) -> list[str]:
    assert result.code == 1, result.err
    return [f"{found['kind']}: {found['text']}" for found in result.json["findings"]]


def last_file(tmp_path: Path) -> Path:
    return sorted((tmp_path / "engine/wal").glob("wal.*.log"))[-1]


def objects(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").rglob("data-*.tlog"))


def test_a_good_engine_is_good_and_stays_as_it_is(engine: Engine, tmp_path: Path) -> None:
    """Everything is read, hot and cold, and no file of directory or store is other than before."""
    before = fingerprint(tmp_path)
    result = engine("verify", "--json")
    assert (result.code, result.json["findings"], result.json["verdict"]) == (0, [], "ok")
    assert result.json["hot_values"] + result.json["cold_values"] == 200
    assert result.json["cold_values"] > 50
    assert result.json["objects"] == len(objects(tmp_path))
    assert result.json["states"] == 1
    assert engine("verify", "--no-cold", "--json").json["cold_values"] == 0
    assert engine("verify", "--read-only").code == 0
    assert fingerprint(tmp_path) == before


def test_a_crashed_engine_is_recovered_beside_its_files(engine: Engine, tmp_path: Path) -> None:
    """What opening would redo and undo is done in an overlay: the files stay as the crash left them."""
    with tidelog.open_engine("engine") as one:
        for seq in range(203, 400):
            one.apply(seq, tidelog.PutObject("b", f"k{seq % 120:03}", b"%d" % seq * 100))
        one.apply(400, tidelog.Batch([tidelog.PutObject("b", f"new{n}", b"v" * 500) for n in range(20)]))
        copy_alive("engine", "killed")
    wal = sorted((tmp_path / "killed/wal").glob("wal.*.log"))[-1]
    wal.write_bytes(wal.read_bytes()[:-700])
    before = fingerprint(tmp_path)
    (only,) = problems(engine("verify", "killed", "--json"))
    assert "torn tail" in only
    assert fingerprint(tmp_path) == before


def test_a_flipped_bit_in_the_log(engine: Engine, tmp_path: Path) -> None:
    """It is named with file and byte, and what follows from the log is not looked at."""
    flip(last_file(tmp_path), 3000)
    result = engine("verify", "--json")
    assert any(last_file(tmp_path).name in problem and "byte" in problem for problem in problems(result))
    assert "versions" not in result.json
    assert "engine restore --dir NEW_DIR --store file://" in result.err


def test_damage_where_opening_reads(engine: Engine) -> None:
    """An engine that cannot be opened says how to get another, not how to repair a topic."""
    with tidelog.open_engine("engine") as one:
        one.apply_many([(seq, tidelog.PutObject("b", "k", b"%d" % seq * 300)) for seq in range(300, 320)])
        copy_alive("engine", "killed")
    wal = sorted(Path("killed/wal").glob("wal.*.log"))[-1]
    flip(wal, wal.read_bytes().index(b"305" * 300) + 10)
    for arguments in (["ls"], ["digest"], ["checkpoint"]):
        result = engine(*arguments, "-d", "killed")
        assert (result.code, wal.name in result.err) == (5, True)
        assert "engine restore --dir NEW_DIR --store file://" in result.err
        assert "tidelog repair" not in result.err
    about = engine("status", "killed", "--json")
    assert (about.code, len(about.json["problems"])) == (0, 1)
    assert about.json["applied_seq"] == 304  # as far as the log can be read


def test_records_behind_damage_are_shown(engine: Engine, tmp_path: Path) -> None:
    """The log in words goes on behind a bad place, and shows it."""
    before = [json.loads(line) for line in engine("dump-wal", "--json").lines]
    victim = next(row for row in before if row["file"] == last_file(tmp_path).name and row["byte"] > 0)
    flip(last_file(tmp_path), victim["byte"] + 40)
    after = [json.loads(line) for line in engine("dump-wal", "--json").lines]
    (bad,) = [row for row in after if row["kind"] == "damaged"]
    assert (bad["lsn"], bad["last_lsn"], bad["byte"]) == (victim["lsn"], victim["lsn"], victim["byte"])
    assert [row["lsn"] for row in after] == [row["lsn"] for row in before]
    status = engine("status", "--json")
    assert (status.code, status.json["applied_seq"]) == (0, 202)  # it lies before the checkpoint


def test_a_flipped_bit_in_a_page(engine: Engine, tmp_path: Path) -> None:
    """It is named with page and byte; the page is shown as far as it can be read."""
    flip(tmp_path / "engine/pages.db", 2 * PAGE_BYTES - 100)
    found = problems(engine("verify", "--json"))
    assert any("page 1: checksum does not match" in problem for problem in found)
    page = engine("dump-page", 1, "--json")
    assert (page.code, page.json["page"], page.json["problem"]) == (5, 1, "checksum does not match")
    assert page.json["cells"]


@pytest.mark.parametrize("byte", [6, 24, 26, 40, 41, 8000])
def test_any_damaged_page_can_be_shown(engine: Engine, tmp_path: Path, byte: int) -> None:
    """Whatever is in it, the exit code is 5 and nothing is a bug."""
    data = bytearray((tmp_path / "engine/pages.db").read_bytes())
    data[PAGE_BYTES + byte : PAGE_BYTES + byte + 2] = b"\xff\xff"
    (tmp_path / "engine/pages.db").write_bytes(data)
    for arguments in (("dump-page", 1), ("dump-page", 1, "--json")):
        assert engine(*arguments).code == 5


def test_a_page_that_the_log_makes_anew_may_be_torn(engine: Engine, tmp_path: Path) -> None:
    """A page that was changed since the checkpoint is whole in the log: its place in the file does not matter."""
    with tidelog.open_engine("engine") as one:
        one.apply(300, tidelog.PutObject("b", "k000", b"v"))
        copy_alive("engine", "killed")
    changed = [json.loads(line) for line in engine("dump-wal", "killed", "--json").lines][-1]["updates"][0]["page"]
    flip(tmp_path / "killed/pages.db", changed * PAGE_BYTES + 100)
    assert engine("verify", "killed").code == 0
    assert engine("verify", "killed", "--read-only").code == 0


def test_the_page_file_is_cut_short(engine: Engine, tmp_path: Path) -> None:
    """Pages that are gone are missed, although the log can make some of them anew."""
    os.truncate(tmp_path / "engine/pages.db", PAGE_BYTES)
    assert any("ends before page 1" in problem for problem in problems(engine("verify", "--json")))


def test_a_checkpoint_that_the_log_does_not_know(engine: Engine, tmp_path: Path) -> None:
    """One of an older backup is told, and one that is damaged."""
    shutil.copy("engine/engine.ckpt", "old.ckpt")
    engine("checkpoint")
    shutil.copytree("engine", "newer")
    shutil.rmtree("engine/wal")
    shutil.copytree("newer/wal", "engine/wal")
    flip(tmp_path / "engine/engine.ckpt", 60)
    assert any("engine.ckpt" in problem for problem in problems(engine("verify", "--json")))
    assert "engine.ckpt cannot be used" in engine("status").err


def test_an_object_of_the_store_is_damaged(engine: Engine, tmp_path: Path) -> None:
    """The object is named, and so is every version whose value it holds there."""
    victim = objects(tmp_path)[0]
    flip(victim, victim.read_bytes().index(b"20" * 300) + 100)
    found = problems(engine("verify", "--json"))
    assert any(problem.startswith("object: ") and victim.name in problem for problem in found)
    assert any(
        problem.startswith("value: ") and "b/k020 @20: " in problem and victim.name in problem for problem in found
    )
    result = engine("get", "b", "k020", "--seq", 20)
    assert (result.code, victim.name in result.err) == (5, True)
    assert engine("verify", "--no-cold").code == 0


def test_an_object_of_the_store_is_gone(engine: Engine, tmp_path: Path) -> None:
    """The same, and the engine can still be looked at."""
    objects(tmp_path)[1].unlink()
    found = problems(engine("verify", "--json"))
    assert any("the object is missing" in problem for problem in found)
    assert engine("status").code == 0


def test_a_state_in_the_store_is_damaged(engine: Engine, tmp_path: Path) -> None:
    """A restore could not begin with it: that is told before one is needed."""
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and "checkpoints" in path.parts]
    assert len(files) == 2  # the document, and a sorted file
    for path in files:
        flip(path, path.stat().st_size // 3)
        (only,) = problems(engine("verify", "--json"))
        assert only.startswith("snapshot: ")
        flip(path, path.stat().st_size // 3)


@pytest.mark.parametrize("name", ["engine.json", "manifest", "owner", "start", "cur", "00000000000000000001"])
def test_a_damaged_document(engine: Engine, tmp_path: Path, name: str) -> None:
    """Whatever says something about the engine is checked, and one that cannot be read hides nothing else."""
    victims = [path for path in tmp_path.rglob(name) if path.is_file()]
    assert len(victims) == 1
    victims[0].write_bytes(victims[0].read_bytes()[:-9] + b"#########")
    result = engine("verify", "--json")
    assert len(problems(result)) >= 1
    assert result.json["versions"] == 202
    if name != "engine.json":  # which says where the store is
        assert result.json["objects"] >= len(objects(tmp_path)) - 1
    assert engine("status").code == 0


def test_a_store_that_is_away(engine: Engine, tmp_path: Path) -> None:
    """What is on the disk can be read, and what is not there is told with its fix."""
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert engine("get", "b", "k070").code == 0
    result = engine("get", "b", "k100")
    assert (result.code, "Is it the right store" in result.err) == (5, True)
    assert engine("verify", "--no-cold").code == 0
    assert engine("status").code == 0


def test_another_store_is_refused(engine: Engine) -> None:
    """An engine knows where its values are."""
    result = engine("get", "b", "k100", "--dir", "engine", "--store", "file:///somewhere")
    assert (result.code, "Leave the store out" in result.err) == (2, True)


# The overlay


def test_the_overlay_is_a_file_system_that_keeps_nothing(tmp_path: Path) -> None:
    """Writing, cutting, renaming and removing are seen through it, and nowhere else."""
    (tmp_path / "a").write_bytes(b"0123456789" * 2000)
    with OverlayFiles() as files:
        reader = files.open(tmp_path / "a")
        writer = files.open(tmp_path / "a", write=True)
        writer.write_at(8190, b"ABCD")
        assert reader.read_at(8188, 8) == b"89ABCD45"
        writer.truncate(8191)
        assert (reader.size(), reader.read_at(8189, 100)) == (8191, b"9A")
        writer.truncate(20_000)
        assert reader.read_at(8190, 4) == b"A\0\0\0"
        files.write_atomically(tmp_path / "b", b"new")
        files.rename(tmp_path / "a", tmp_path / "c")
        files.make_directories(tmp_path / "d" / "e")
        assert files.list(tmp_path) == ["b", "c", "d"]
        assert (files.read(tmp_path / "b"), files.exists(tmp_path / "a")) == (b"new", False)
        files.remove(tmp_path / "c")
        with pytest.raises(FileNotFoundError):
            files.open(tmp_path / "c")
        with pytest.raises(FileExistsError):
            files.create(tmp_path / "b")
    assert LocalFiles().list(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"0123456789" * 2000
