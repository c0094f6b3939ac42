"""`tidelog inspect`, `verify` and `repair` on logs that are whole and logs that are not."""

from __future__ import annotations

import errno
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli

import tidelog
from tidelog.cold.catalog import Codec
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.verify import LogFindings, verify_files

COUNT = 300
FRAME_BYTES = 16 + 24 + 20


@pytest.fixture
def wal(tmp_path: Path) -> Path:
    """A topic of frames that are all of one size; the path of its only file."""
    with tidelog.open(tmp_path / "data") as log:
        for number in range(COUNT):
            log.topic("a/b").append(b"%020d" % number)
    (path,) = (tmp_path / "data/a/b").glob("wal.*.log")
    assert path.stat().st_size == BINDING_BYTES + COUNT * FRAME_BYTES
    return path


def flip(path: Path, byte: int) -> None:
    """In the frames, behind the header."""
    data = bytearray(path.read_bytes())
    data[BINDING_BYTES + byte] ^= 0x10
    path.write_bytes(data)


@pytest.mark.usefixtures("wal")
def test_a_whole_log_verifies(cli: Cli) -> None:
    """Nothing wrong is exit code 0 and a count of frames."""
    result = cli("verify")
    assert (result.code, result.err) == (0, "")
    assert result.lines[1].split("\t") == ["a/b", "1", str(COUNT), str(COUNT * FRAME_BYTES), "0"]
    assert cli("repair", "a/b").code == 0


def test_damage_is_found_told_and_mended(cli: Cli, wal: Path) -> None:
    """Verify names file and byte; repair tells its plan, changes nothing without --yes, and keeps what it takes out."""
    flip(wal, 100 * FRAME_BYTES + 50)
    damaged = wal.read_bytes()
    found = cli("verify")
    assert found.code == 1
    assert f"{wal.name}, byte {100 * FRAME_BYTES}: " in found.err
    assert cli("consume", "a/b").code == 5
    planned = cli("repair", "a/b")
    assert planned.code == 1
    assert "--yes" in planned.err
    assert wal.read_bytes() == damaged
    done = cli("repair", "a/b", "--yes", "--json")
    assert (done.code, done.json["is_done"], done.json["lost"]) == (0, True, [[100, 100]])
    assert Path(done.json["kept"][0]).read_bytes() == damaged
    assert cli("verify").code == 0


def test_after_a_repair_lost_messages_are_told(cli: Cli, wal: Path) -> None:
    """Reading over a lost message is an error that says how to go on; --skip-gaps leaves it out."""
    flip(wal, 100 * FRAME_BYTES + 50)
    cli("repair", "a/b", "--yes")
    stopped = cli("consume", "a/b")
    assert stopped.code == 5
    assert len(stopped.lines) == 100
    assert "--from 101" in stopped.err
    assert len(cli("consume", "a/b", "--skip-gaps").lines) == COUNT - 1
    assert len(cli("consume", "a/b", "--from", "101").lines) == COUNT - 101


def test_verify_as_json(cli: Cli, wal: Path) -> None:
    """Every problem is an object with its file, its byte and what is lost."""
    flip(wal, 7 * FRAME_BYTES + 50)
    (row,) = cli("verify", "a/b", "--json").json
    assert (row["ok"], row["verdict"], row["problems"]) == (False, "damaged", 1)
    (found,) = row["findings"]
    assert (Path(found["path"]).name, found["byte"], found["severity"]) == (wal.name, 7 * FRAME_BYTES, "error")
    assert (found["subject"], found["first_offset"], found["last_offset"], found["unit"]) == ("a/b", 7, 7, "offset")
    assert "`tidelog repair`" in found["fix"]


def test_a_torn_tail_is_told_as_one(cli: Cli, wal: Path) -> None:
    """What a killed process leaves behind is a problem that the next opening mends by itself."""
    with wal.open("ab") as file:
        file.write(struct.pack("<QII", COUNT, 500, 0) + b"begun")
    result = cli("verify")
    assert result.code == 1
    assert "torn tail" in result.err
    assert cli("verify", "--json").json[0]["verdict"] == "torn"
    cli("produce", "a/b", stdin=b"next\n")
    assert cli("verify").code == 0


def test_a_copied_directory_is_a_target(cli: Cli, wal: Path, tmp_path: Path) -> None:
    """Files that lie elsewhere can be looked at without a log directory."""
    shutil.copytree(wal.parent, tmp_path / "copy")
    assert cli("verify", "copy").code == 0
    assert cli("inspect", "copy", "--json").json["frames"] == COUNT


@pytest.mark.parametrize("command", ["inspect", "verify", "repair"])
def test_targets_that_are_none(cli: Cli, command: str) -> None:
    """What is neither a topic nor a directory of files is not found."""
    cli("topic", "create", "a/b")
    result = cli(command, "a/c")
    assert result.code == 3
    assert "a/c is neither a topic" in result.err


def test_inspect_shows_the_files(cli: Cli, wal: Path) -> None:
    """A row a file, with its offsets, size and times, and what the checkpoint knows of it."""
    shown = cli("inspect", "a/b", "--json").json
    (file,) = shown["files"]
    assert (file["file"], file["first_offset"], file["next_offset"]) == (wal.name, 0, COUNT)
    assert (file["bytes"], file["checkpoint"], file["problems"]) == (COUNT * FRAME_BYTES, "whole", 0)
    assert shown["checkpoint"]["last_offset"] == COUNT - 1
    assert file["first_time"] <= file["last_time"]
    table = cli("inspect", "a/b")
    assert len(table.lines) == 2
    assert "checkpoint: offsets 0 to 299" in table.err


def test_inspect_without_a_checkpoint(cli: Cli, wal: Path) -> None:
    """A missing checkpoint is told, and everything else is shown as before."""
    (wal.parent / "wal.ckpt").unlink()
    shown = cli("inspect", "a/b", "--json").json
    assert (shown["checkpoint"], shown["frames"], shown["files"][0]["checkpoint"]) == (None, COUNT, "none")


def test_one_frame_in_hex(cli: Cli, tmp_path: Path) -> None:
    """A frame is shown with its header, its message, and its bytes at their places in the file."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append_many([b"first", tidelog.Message(b"hello", key=b"k", headers={"h": b"x"})])
    shown = cli("inspect", "a/b", "--offset", "1", "--json").json
    (path,) = (tmp_path / "data/a/b").glob("wal.*.log")
    assert bytes.fromhex(shown["bytes_hex"]) == path.read_bytes()[BINDING_BYTES + shown["byte"] :]
    assert (shown["offset"], shown["key"], shown["value"], shown["headers"]) == (1, "k", "hello", {"h": "x"})
    assert shown["crc32"] == shown["crc32_computed"]
    limited = cli("inspect", "a/b", "--offset", "1", "--bytes", "32")
    assert limited.lines[-2].startswith(f"{shown['byte']:010x}  01 00 00 00 00 00 00 00  ")
    assert limited.lines[-2].endswith("|")
    assert "more bytes" in limited.err


@pytest.mark.parametrize("byte_in_frame", [0, 8, 12, 30])
def test_a_damaged_frame_is_shown_as_it_is(cli: Cli, wal: Path, byte_in_frame: int) -> None:
    """A frame with a flipped bit is shown with what is wrong; those behind it are found all the same."""
    flip(wal, 10 * FRAME_BYTES + byte_in_frame)
    damaged = cli("inspect", "a/b", "--offset", "10", "--json").json
    assert damaged["byte"] == 10 * FRAME_BYTES
    assert damaged["problem"]
    behind = cli("inspect", "a/b", "--offset", "11", "--json").json
    assert (behind["byte"], behind["problem"], behind["value"]) == (11 * FRAME_BYTES, None, f"{11:020d}")


@pytest.mark.usefixtures("wal")
def test_an_offset_that_is_not_there(cli: Cli) -> None:
    """An offset behind the end is not found."""
    result = cli("inspect", "a/b", "--offset", COUNT)
    assert result.code == 3
    assert f"offset {COUNT} is not in this log, which holds offsets 0 to {COUNT - 1}" in result.err


def test_verify_goes_on_after_a_topic_that_cannot_be_read(
    cli: Cli, wal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that may not be read, or whose description is damaged, is a problem; the others are checked all the same."""
    cli("produce", "a/secret", stdin=b"x\n")
    cli("produce", "z/last", stdin=b"x\n")
    (wal.parent / "topic.json").write_bytes(b"{")

    def refuse(directory: Path, **options: Any) -> LogFindings:
        if directory.name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied", str(directory))
        return verify_files(directory, **options)

    monkeypatch.setattr("tidelog.topics.verify.verify_files", refuse)
    result = cli("verify", "--json")
    assert result.code == 1
    rows = {row["target"]: row for row in result.json}
    assert {name: len(row["findings"]) for name, row in rows.items()} == {"a/b": 1, "a/secret": 1, "z/last": 0}
    assert (rows["a/b"]["frames"], rows["a/secret"]["frames"], rows["z/last"]["frames"]) == (COUNT, None, 1)
    assert "topic.json cannot be understood" in rows["a/b"]["findings"][0]["message"]
    assert "Permission denied" in result.err


def test_synced_messages_that_are_gone_are_a_problem(cli: Cli, wal: Path) -> None:
    """A file that ends before what its checkpoint says was synced is not whole."""
    wal.write_bytes(wal.read_bytes()[: BINDING_BYTES + 100 * FRAME_BYTES])
    result = cli("verify")
    assert result.code == 1
    assert "offsets 100 to 299" in result.err


def test_repair_waits_for_the_owner(cli: Cli, wal: Path, tmp_path: Path) -> None:
    """A log that is open in another place is not rewritten under its owner."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b")
        flip(wal, 100 * FRAME_BYTES + 50)
        result = cli("repair", "a/b", "--yes")
        assert result.code == 4
        assert "hint: Stop that process" in result.err


def append_unreadable(topic: tidelog.Topic) -> None:
    """Three messages, of which the one in the middle has a time before the year 1."""
    topic.append(b"first")
    topic._log.append(struct.pack("<BBHIqII", 1, 0, 0, 0, -(1 << 62), 0, 0) + b"no time")
    topic.append(b"last", sync=True)


def test_a_message_that_nobody_can_read_is_found_and_passed_over(cli: Cli, tmp_path: Path) -> None:
    """Verify and inspect name file, byte and offset; consume says how to go on, and --skip-gaps leaves out that one."""
    with tidelog.open(tmp_path / "data") as log:
        append_unreadable(log.topic("a/b"))
    found = cli("verify")
    assert found.code == 1
    assert "wal.0000000000.log, byte 45: message 1 has an impossible timestamp" in found.err
    assert "--skip-gaps" in found.err
    assert cli("verify", "--json").json[0]["findings"][0]["kind"] == "message"
    shown = cli("inspect", "a/b")
    assert "message 1 has an impossible timestamp" in shown.err
    read = cli("consume", "a/b")
    assert read.code == 5
    assert (read.lines, "message 1 has an impossible timestamp" in read.err) == (["first"], True)
    skipped = cli("consume", "a/b", "--skip-gaps")
    assert (skipped.code, skipped.lines) == (0, ["first", "last"])
    assert "message 1 has an impossible timestamp" in skipped.err


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_verify_finds_it_in_objects_too(cli: Cli, tmp_path: Path, compression: Codec) -> None:
    """With --cold the object, the byte and the offset are named."""
    with tidelog.open(tmp_path / "data", store=(tmp_path / "store").as_uri()) as log:
        topic = log.topic("a/b", ship_compression=compression)
        append_unreadable(topic)
        topic.ship()
    found = cli("verify", "--cold", "--json")
    assert found.code == 1
    cold = [one for one in found.json[0]["findings"] if one["path"].endswith(".tlog")]
    assert [(one["first_offset"], one["last_offset"], one["kind"]) for one in cold] == [(1, 1, "message")]
    assert cold[0]["byte"] == BINDING_BYTES + (45 if compression == "none" else 0)


def test_produce_refuses_a_time_that_nobody_can_read(cli: Cli, tmp_path: Path) -> None:
    """A time that leaves the years in UTC is refused, as a line that cannot be understood is."""
    for named in ("timestamp", "deliver_at"):
        line = b'{"value": "v", "%s": "0001-01-01T00:00:00+14:00"}\n' % named.encode()
        refused = cli("produce", "a/b", "--from-json", stdin=line)
        assert refused.code != 0
        assert "years 1 to 9999" in refused.err
    assert cli("consume", "a/b").lines == []
