"""An engine and its store from the command line: shipped, looked at from elsewhere, lost and restored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli
from tests.servers import S3Server

import tidelog
from tidelog.engine.recovery.checkpoint import RestoreMarker, write_marker
from tidelog.engine.recovery.restore import LocalSteps
from tidelog.files import LocalFiles


def entries(first: int, count: int) -> bytes:
    lines = [json.dumps({"seq": 1, "op": "create_bucket", "bucket": "b"})] if first == 1 else []
    for seq in range(max(first, 2), first + count):
        entry = {"seq": seq, "op": "put_object", "bucket": "b", "key": f"k{seq % 50}", "data": f"{seq}" * 100}
        lines.append(json.dumps(entry))
    return "\n".join(lines).encode()


@pytest.fixture
def store(cli: Cli, tmp_path: Path) -> str:
    """The URL of a store with the first 60 of 100 entries of the engine in ./engine."""
    url = f"file://{tmp_path}/store"
    assert cli("engine", "apply", "--store", url, stdin=entries(1, 100)).code == 0
    assert cli("engine", "ship", "--low-water-mark", 60).code == 0
    return url


def test_shipping_moves_the_marks(cli: Cli, store: str) -> None:
    """Only up to the low-water mark, and what waits behind it is told."""
    found = cli("engine", "ship", "engine", "--json").json
    assert (found["high_water_mark"], found["low_water_mark"], found["applied_seq"]) == (60, 60, 100)
    assert (found["objects"], found["lag_bytes"] > 0) == (0, True)
    about = cli("engine", "status", "--json").json
    assert (about["store"]["url"], about["store"]["truncation_mark"], about["store"]["is_ours"]) == (store, 60, True)
    assert about["store"]["lag_bytes"] > 0
    assert about["store"]["lag_seconds"] == 0  # what is above the low-water mark does not wait for the store
    done = cli("engine", "ship", "--low-water-mark", 100, "--json").json
    assert (done["high_water_mark"], done["objects"]) == (100, 1)


def test_lost_metadata_is_rebuilt(cli: Cli, tmp_path: Path) -> None:
    """The command that the error names brings the manifest back, and the engine goes on."""
    where = ("--store", f"file://{tmp_path}/store", "--metadata", f"sqlite://{tmp_path}/metadata.db")
    cli("engine", "apply", *where, stdin=entries(1, 100))
    cli("engine", "ship", "--low-water-mark", 60)
    for path in tmp_path.glob("metadata.db*"):
        path.unlink()
    refused = cli("engine", "ship", "--low-water-mark", 100)
    assert (refused.code, "engine rebuild-manifest" in refused.err) == (5, True)
    rebuilt = cli("engine", "rebuild-manifest", "engine", "--json")
    assert (rebuilt.code, rebuilt.json["seq"], rebuilt.json["missing"], rebuilt.json["unpublished"]) == (0, 60, 0, 0)
    assert cli("engine", "ship", "--low-water-mark", 100, "--json").json["high_water_mark"] == 100
    assert cli("engine", "rebuild-manifest", "engine").code == 2
    assert cli("engine", "verify").code == 0


def test_rebuilding_tells_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    """Objects that the copy names and the store lacks; exit code 1."""
    where = ("--store", f"file://{tmp_path}/store", "--metadata", f"sqlite://{tmp_path}/metadata.db")
    cli("engine", "apply", *where, stdin=entries(1, 100))
    cli("engine", "ship", "--low-water-mark", 100)
    (path,) = (tmp_path / "store").rglob("data-*.tlog")
    path.unlink()
    shutil.rmtree(tmp_path / "engine")
    rebuilt = cli("engine", "rebuild-manifest", *where[:3], f"sqlite://{tmp_path}/other.db")
    assert (rebuilt.code, path.name in rebuilt.err) == (1, True)


def test_the_marks_are_shown_beside_the_owner(cli: Cli, store: str) -> None:
    """What a living owner has shipped since its last checkpoint is known to the store alone; what waits is lag."""
    with tidelog.open_engine("engine", store=store, ship_interval_seconds=3600) as engine:
        engine.update_low_water_mark(80)
        assert engine.ship() == 80
        beside = cli("engine", "status", "--json").json
        assert (beside["is_open"], beside["high_water_mark"], beside["low_water_mark"]) == (True, 80, 80)
        assert beside["store"]["lag_seconds"] == 0
        engine.update_low_water_mark(100)
        engine.apply(101, tidelog.DeleteObject("b", "nothing"))  # whatever was written before is in the files by now
        beside = cli("engine", "status", "--json").json
        assert (beside["high_water_mark"], beside["low_water_mark"]) == (80, 100)
        assert beside["store"]["lag_seconds"] > 0


def test_a_mark_above_what_was_applied_is_refused(cli: Cli, store: str) -> None:
    """Nobody can have applied what this engine has not."""
    result = cli("engine", "ship", "--low-water-mark", 101)
    assert (result.code, "101" in result.err) == (2, True)


def test_all_may_be_shipped_where_there_are_no_replicas(cli: Cli, store: str) -> None:
    """`apply --low-water-mark` says so."""
    assert cli("engine", "apply", "--low-water-mark", stdin=entries(101, 10)).code == 0
    assert cli("engine", "ship", "--json").json["high_water_mark"] == 110


def test_compaction_by_hand(cli: Cli, store: str) -> None:
    """Small objects become one, the index is written anew, and the engine is the same."""
    for mark in (70, 80, 90):
        assert cli("engine", "ship", "--low-water-mark", mark).code == 0
    digest = cli("engine", "digest").out
    done = cli("engine", "compact", "--grace-seconds", 0, "--json").json
    assert done["replaced_objects"] > done["new_objects"] == 1
    assert cli("engine", "compact", "engine", "--index", "--json").json["cells"] == 100
    assert cli("engine", "digest").out == digest
    assert cli("engine", "verify").code == 0


def test_a_lost_disk(cli: Cli, store: str) -> None:
    """The engine is back up to its high-water mark, the rest comes from the log again, and the digest is the same."""
    assert cli("engine", "checkpoint").code == 0
    whole, shipped = cli("engine", "digest").out, cli("engine", "digest", "--seq", 60).out
    shutil.rmtree("engine")
    found = cli("engine", "restore", "new", "--store", store, "--json")
    assert (found.code, found.json["applied_seq"], found.json["state_seq"]) == (0, 60, 60)
    assert "entries above seq 60 come from the orchestrator" in found.err
    assert cli("engine", "digest", "new").out == shipped
    assert cli("engine", "apply", "-d", "new", stdin=entries(1, 100)).code == 0
    assert cli("engine", "digest", "new").out == whole
    assert cli("engine", "verify", "new").code == 0


def test_a_restore_needs_an_empty_place_and_an_engine(cli: Cli, store: str, tmp_path: Path) -> None:
    """What is there stays, and a store without an engine is told as such."""
    result = cli("engine", "restore", "engine", "--store", store)
    assert (result.code, "empty directory" in result.err) == (2, True)
    (tmp_path / "other").mkdir()
    result = cli("engine", "restore", "new", "--store", f"file://{tmp_path}/other")
    assert (result.code, "there is no engine" in result.err) == (3, True)
    assert cli("engine", "verify").code == 0


def test_a_restore_that_was_cut_off(cli: Cli, store: str, tmp_path: Path) -> None:
    """The directory is no engine, every command says what to do, and the same command begins anew."""
    assert cli("engine", "restore", "new", "--store", store).code == 0
    shutil.copytree("new", "half")
    for name in ("engine.ckpt", "engine.json"):
        (tmp_path / "half" / name).unlink()
    write_marker(LocalFiles(), tmp_path / "half", RestoreMarker(store, 0))
    for command in (["status"], ["ls"], ["verify"], ["dump-wal"]):
        result = cli("engine", *command, "-d", "half")
        assert (result.code, "was cut off" in result.err) == (2, True), command
    assert cli("engine", "restore", "half", "--store", store).code == 0
    assert cli("engine", "digest", "half").out == cli("engine", "digest", "new").out


@pytest.mark.parametrize("metadata", ["bucket", "sqlite"])
def test_lazy_restore_is_read_while_the_disk_is_filled(
    cli: Cli,
    tmp_path: Path,
    metadata: str,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    """Reads of the directory show what the store has, also when the restore was cut off; without --lazy none do."""
    url = f"file://{tmp_path}/store"
    where = ["--store", url, *(["--metadata", f"sqlite://{tmp_path}/m.db"] if metadata == "sqlite" else [])]
    assert cli("engine", "apply", *where, "--low-water-mark", stdin=entries(1, 60)).code == 0
    assert cli("engine", "ship").code == 0
    reads = (["get", "b", "k7"], ["ls", "b"], ["scan", "b"], ["changes"], ["versions", "b", "k7"], ["digest"])
    expected = [cli("engine", *read, "-d", "elsewhere", *where).out for read in reads]
    shutil.rmtree("engine")
    build = LocalSteps.build
    seen: list[Any] = []

    def looked_at(steps: LocalSteps, lsn: int) -> tuple[int, int]:
        seen.append(capsysbinary.readouterr().err.decode())
        seen.extend(cli("engine", *read, "-d", "new") for read in reads)
        if len(seen) > len(reads) + 1:
            return build(steps, lsn)
        raise OSError("the disk is gone")

    monkeypatch.setattr(LocalSteps, "build", looked_at)
    assert cli("engine", "restore", "new", *where, "--lazy").code != 0
    seen += [cli("engine", *read, "-d", "new") for read in reads]
    restored = cli("engine", "restore", "new", *where, "--lazy", "--json")
    assert (restored.code, restored.json["applied_seq"]) == (0, 60)
    told = [one for one in seen if isinstance(one, str)]
    assert [text.count("can be read now") for text in told] == [1, 1]
    found = [one for one in seen if not isinstance(one, str)]
    assert [one.out for one in found] == 3 * expected
    assert all("this is what its store has, up to seq 60" in one.err for one in found)
    assert cli("engine", "digest", "new").err == ""
    assert cli("engine", "verify", "new").code == 0
    seen.clear()
    assert cli("engine", "restore", "other", *where, "--take-over").code != 0
    assert {cli("engine", *read, "-d", "other").code for read in reads} == {2}


def test_who_was_replaced_is_told(cli: Cli, store: str) -> None:
    """After a restore elsewhere the old directory can be read, and changes nothing in the store any more."""
    assert cli("engine", "restore", "new", "--store", store).code == 0
    assert cli("engine", "apply", "-d", "new", stdin=entries(61, 20)).code == 0
    assert cli("engine", "ship", "new", "--low-water-mark", 80).code == 0
    result = cli("engine", "ship")
    assert result.code == 4
    assert "owns the engine now" in result.err
    assert f"engine restore --dir NEW_DIR --store {store}" in result.err
    assert cli("engine", "get", "b", "k7").code == 0
    about = cli("engine", "status")
    assert (about.code, "owns the engine in the store now" in about.err) == (0, True)


def test_looking_claims_nothing(cli: Cli, store: str) -> None:
    """An engine that is open elsewhere with the same store goes on: its epoch is the newest."""
    shutil.copytree("engine", "copy")
    epoch = cli("engine", "status", "--json").json["store"]["epoch"]
    for command in (["get", "b", "k7"], ["ls", "b"], ["digest"], ["verify"], ["status"]):
        assert cli("engine", *command, "-d", "copy").code == 0
    assert cli("engine", "status", "--json").json["store"]["epoch"] == epoch


def test_the_store_is_given_in_the_settings(cli: Cli, tmp_path: Path) -> None:
    """A file with a table for the engine is enough."""
    (tmp_path / "t.toml").write_text(
        f'dir = "here"\nstore = "file://{tmp_path}/store"\n[storage_engine]\ninline_value_bytes = 0\n'
    )
    assert cli("engine", "apply", "-c", "t.toml", "--low-water-mark", stdin=entries(1, 5)).code == 0
    assert cli("engine", "ship", "-c", "t.toml", "--json").json["high_water_mark"] == 5
    assert (tmp_path / "here" / "engine.json").exists()


def test_with_a_bucket(cli: Cli, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it against an S3 server: ship, lose, restore, verify; a server that is away is code 4."""
    settings = s3_server.settings()
    assert settings.store_secret_access_key is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(settings.store_endpoint))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(settings.store_access_key_id))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", settings.store_secret_access_key.reveal())
    url = s3_server.url("cli-engine")
    assert cli("engine", "apply", "--store", url, "--low-water-mark", stdin=entries(1, 100)).code == 0
    assert cli("engine", "checkpoint", "--json").json["state_seq"] == 100
    digest = cli("engine", "digest").out
    with tidelog.open_engine("engine") as engine:
        assert engine.truncation_mark == 100
    shutil.rmtree("engine")
    assert cli("engine", "restore", "engine", "--store", url).code == 0
    assert cli("engine", "digest").out == digest
    assert cli("engine", "verify").code == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TIDELOG_STORE_MAX_RETRIES", "0")
    monkeypatch.setenv("TIDELOG_STORE_RETRY_TIMEOUT_SECONDS", "1")
    away = cli("engine", "status")
    assert (away.code, "problem: the store: " in away.err) == (0, True)
    assert cli("engine", "ship").code == 4


def test_commands_read_from_a_bucket_and_beside_the_owner(cli: Cli, store: str, tmp_path: Path) -> None:
    """Without a directory, or while another process has the engine open: what was shipped, and the seq is told."""
    expected = {
        ("get", "b", "k7"): cli("engine", "get", "b", "k7", "--seq", 60).out,
        ("ls", "b"): cli("engine", "ls", "b", "--seq", 60).out,
        ("scan", "b", "--values", "--json"): cli("engine", "scan", "b", "--values", "--json", "--seq", 60).out,
        ("digest",): cli("engine", "digest", "--seq", 60).out,
        ("changes", "--start-seq", 58): b"".join(
            cli("engine", "changes", "--start-seq", 58).out.splitlines(keepends=True)[:4]
        ),
    }
    with tidelog.open_engine(tmp_path / "engine") as engine:
        for command, out in expected.items():
            beside = cli("engine", *command)
            assert (beside.code, beside.out, "up to seq 60" in beside.err) == (0, out, True)
        assert cli("engine", "versions", "b", "k7").code == 0
        assert cli("engine", "stat", "b", "k7", "--json").json["seq"] == 57
        assert engine.applied_seq == 100
    before = sorted(path.name for path in tmp_path.iterdir())
    for command, out in expected.items():
        elsewhere = cli("engine", *command, "--dir", "elsewhere", "--store", store)
        assert (elsewhere.code, elsewhere.out, elsewhere.err) == (0, out, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert cli("engine", "ls", "--dir", "elsewhere", "--store", f"{store}-other").code == 3


def test_store_that_is_named_is_read_whatever_the_working_directory_has(cli: Cli, store: str, tmp_path: Path) -> None:
    """With --store, or in place of the directory; the engine in ./engine has another store, and is not asked."""
    other = f"file://{tmp_path}/other"
    put = json.dumps({"seq": 2, "op": "put_object", "bucket": "b", "key": "k7", "data": "other"}).encode()
    lines = entries(1, 1) + b"\n" + put
    assert cli("engine", "apply", "-d", "second", "--store", other, "--low-water-mark", stdin=lines).code == 0
    assert cli("engine", "ship", "-d", "second").code == 0
    here = cli("engine", "get", "b", "k7").out
    assert here != b"other"
    for command in (["get", "b", "k7"], ["stat", "b", "k7"], ["ls", "b"], ["scan", "b"], ["changes"], ["digest"]):
        expected = cli("engine", *command, "-d", "second")
        for named in (["--store", other], ["--dir", other], ["--store", other, "-d", other]):
            found = cli("engine", *command, *named)
            assert (found.code, found.err) == (0, ""), command
            assert found.out.replace(b"cold", b"hot") == expected.out.replace(b"cold", b"hot")
        for before in (["-d", other], ["--dir", "engine", "-d", other]):
            found = cli(*before, "engine", *command)
            assert (found.code, found.err) == (0, ""), command
            assert found.out.replace(b"cold", b"hot") == expected.out.replace(b"cold", b"hot")
        assert cli("-d", other, "engine", *command, "-d", "second").out == expected.out  # the later one wins
    assert cli("engine", "digest", other).out == cli("engine", "digest", "second").out
    assert cli("engine", "get", "b", "k7", "--store", store).out == here  # its own: what is not shipped is there, too
    assert cli("engine", "ls", "b", "--store", store, "--json").out == cli("engine", "ls", "b", "--json").out
    refused = cli("engine", "get", "b", "k7", "-d", "engine", "--store", other)
    assert (refused.code, "is shipped to" in refused.err) == (2, True)


def test_url_of_a_store_is_no_directory_of_an_engine(cli: Cli, store: str, tmp_path: Path) -> None:
    """Where a directory is needed it is refused; two stores are one too many; a key in a URL is not shown."""
    before = sorted(path.name for path in tmp_path.iterdir())
    for command in (["ship", store], ["status", "-d", store], ["apply", "-d", store], ["verify", store]):
        refused = cli("engine", *command)
        assert (refused.code, "--store" in refused.err) == (2, True), command
    refused = cli("engine", "ls", "-d", store, "--store", f"{store}-other")
    assert (refused.code, "two stores" in refused.err) == (2, True)
    for command in (
        ["engine", "digest", "s3://key:secret@bucket/engine"],
        ["-d", "s3://key:secret@b/e", "engine", "ls"],
    ):
        refused = cli(*command)
        assert (refused.code, "secret" in refused.err) == (2, False)
    for command in (["engine", "ship"], ["topic", "list"], ["verify"]):
        refused = cli("-d", store, *command)
        assert (refused.code, "is a store, and this needs" in refused.err) == (2, True), command
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_commands_beside_the_owner_of_an_engine_without_a_store_are_refused(cli: Cli, tmp_path: Path) -> None:
    """There is nothing to read from; the hint says what works."""
    with tidelog.open_engine(tmp_path / "engine") as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        refused = cli("engine", "ls")
        assert (refused.code, "engine status" in refused.err) == (4, True)
