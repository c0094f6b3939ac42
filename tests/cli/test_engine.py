"""`tidelog engine`: entries in, objects out, and the files in words."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Result, Spawn
from tests.engine.engines import copy_alive

import tidelog

ENTRIES: list[dict[str, object]] = [
    {"seq": 1, "op": "create_bucket", "bucket": "b"},
    {"seq": 2, "op": "put_object", "bucket": "b", "key": "k", "data": "hello", "metadata": {"a": 1}},
    {"seq": 3, "op": "put_object", "bucket": "b", "key": "raw", "data_base64": base64.b64encode(b"\0\1\xff").decode()},
    {
        "seq": 4,
        "op": "batch",
        "entries": [
            {"op": "copy_object", "src_bucket": "b", "src_key": "k", "dest_bucket": "b", "dest_key": "copy"},
            {"op": "delete_object", "bucket": "b", "key": "k"},
        ],
    },
    {"seq": 5, "op": "delete_bucket", "bucket": "b"},
    {"seq": 7, "op": "put_object", "bucket": "b", "key": "large", "data": "x" * 5000},
]


def lines(entries: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


@pytest.fixture
def filled(cli: Cli) -> Callable[..., Result]:
    """A small engine in ./engine, and what runs commands on it."""
    assert cli("engine", "apply", stdin=lines(ENTRIES)).code == 0
    return lambda *arguments: cli("engine", *arguments)


# Applying


def test_entries_from_a_file_and_what_became_of_them(cli: Cli, tmp_path: Path) -> None:
    """Every line gets its result; what the state does not allow is refused, and that is no error."""
    (tmp_path / "log.jsonl").write_bytes(lines(ENTRIES))
    result = cli("engine", "apply", "log.jsonl", "--json")
    rows = [json.loads(line) for line in result.lines]
    assert (result.code, [row["seq"] for row in rows]) == (0, [1, 2, 3, 4, 5, 7])
    assert [row["status"] for row in rows] == ["applied"] * 4 + ["refused", "applied"]
    assert "not empty" in rows[4]["reason"] or "objects" in rows[4]["reason"]
    assert "6 entries, 1 refused; the engine is at seq 7" in result.err


def test_the_same_lines_again_do_nothing(cli: Cli, filled: Callable[..., Result]) -> None:
    """Whoever is not sure how far a log was applied gives all of it again."""
    before = filled("digest").out
    again = cli("engine", "apply", stdin=lines(ENTRIES))
    assert (again.code, again.lines[1]) == (0, "1\tapplied\t")
    assert filled("digest").out == before


def test_a_scan_and_the_changes(filled: Callable[..., Result]) -> None:
    """Ranges of keys in both directions, with values; entries with their results; JSON has a document a line."""
    assert filled("scan", "b", "--end", "raw").lines == ["key\tbytes\tseq", "copy\t5\t4", "large\t5000\t7"]
    rows = [json.loads(line) for line in filled("scan", "b", "--reverse", "--values", "-n", 1, "--json").lines]
    assert rows == [{"key": "raw", "bytes": 3, "seq": 3, "data_base64": "AAH/", "metadata": {}}]
    assert filled("scan", "b", "--start", "l", "--prefix", "r", "--values", "--seq", 3, "--json").lines != []
    told = filled("changes", "--start-seq", 4)
    assert told.lines[:3] == [
        "seq\tstatus\top\tbucket\tkey\treason",
        "4\tapplied\tcopy_object\tb\tcopy\t",
        "4\tapplied\tdelete_object\tb\tk\t",
    ]
    assert told.lines[3].startswith("5\trefused\tdelete_bucket\tb\t\t")
    entries = [json.loads(line) for line in filled("changes", "--values", "--prefix", "b/k", "--json").lines]
    assert [one["seq"] for one in entries] == [1, 2, 4, 5]
    assert entries[1]["operations"] == [
        {"op": "put_object", "bucket": "b", "key": "k", "data": "hello", "metadata": {"a": 1}}
    ]
    assert filled("changes", "--committed").lines == told.lines[:1], "nothing is committed yet"
    assert filled("scan", "none").code == 3


def test_lines_have_conditions(cli: Cli) -> None:
    """What does not hold is refused."""
    put = {"op": "put_object", "bucket": "b", "key": "k", "data": "v"}
    copy = {"op": "copy_object", "src_bucket": "b", "src_key": "k", "dest_bucket": "b", "dest_key": "k"}
    more: list[dict[str, object]] = [
        {"seq": 1, "op": "create_bucket", "bucket": "b"},
        {"seq": 2, **put, "if_absent": True},
        {"seq": 3, **put, "if_absent": True},
        {"seq": 4, **put, "if_match": 2, "if_match_crc": tidelog.object_crc(b"v")},
        {"seq": 5, **copy, "if_match": 2},
        {"seq": 6, "op": "delete_object", "bucket": "b", "key": "k", "if_match": 4},
        {"seq": 7, "op": "delete_object", "bucket": "b", "key": "k", "if_match_crc": 0},
    ]
    rows = [json.loads(line) for line in cli("engine", "apply", "--json", stdin=lines(more)).lines]
    refused = [row["seq"] for row in rows if row["status"] == "refused"]
    assert (len(rows), refused) == (7, [3, 5, 7])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"nonsense", "malformed"),
        (b'{"op": "create_bucket", "bucket": "c"}', "`seq` is missing"),
        (b'{"seq": 9, "op": "frobnicate"}', "frobnicate"),
        (b'{"seq": 9, "op": "create_bucket"}', "bucket"),
        (b'{"seq": 9, "op": "create_bucket", "bucket": "c", "buckte": 1}', "buckte"),
        (b'{"seq": 9, "op": "create_bucket", "bucket": ""}', "empty"),
        (b'{"seq": 0, "op": "create_bucket", "bucket": "c"}', ">= 1"),
        (b'{"seq": 9, "op": "put_object", "bucket": "b", "key": "k"}', "data_base64"),
        (b'{"seq": 9, "op": "put_object", "bucket": "b", "key": "k", "data_base64": "!"}', "base64"),
        (b'{"seq": 9, "op": "put_object", "bucket": "b", "key": "k", "data": "", "metadata": {"x": []}}', "metadata"),
        (b'{"seq": 9, "op": "batch", "entries": []}', "entries"),
        (b'{"seq": 9, "op": "batch", "entries": [{"seq": 1, "op": "create_bucket", "bucket": "c"}]}', "seq"),
        (b'{"seq": 9, "op": "batch", "entries": [{"op": "batch", "entries": []}]}', "batch"),
    ],
)
def test_a_line_that_is_wrong_is_named(cli: Cli, line: bytes, text: str) -> None:
    """With its number and what is wrong with it; the lines before it are applied."""
    result = cli("engine", "apply", stdin=lines(ENTRIES[:2]) + line + b"\n" + lines(ENTRIES[2:]))
    assert result.code == 2
    assert "error: line 3: " in result.err
    assert text in result.err
    assert cli("engine", "ls", "b", "--json").json == [{"key": "k", "bytes": 5, "seq": 2}]


def test_another_entry_under_a_used_seq_ends_it(cli: Cli, filled: Callable[..., Result]) -> None:
    """The error names the seq, and what came before it is applied."""
    more: list[dict[str, object]] = [
        {"seq": 7, "op": "create_bucket", "bucket": "other"},
        {"seq": 8, "op": "create_bucket", "bucket": "c"},
    ]
    result = cli("engine", "apply", stdin=b"\n" + lines(more))
    assert (result.code, "error: line 2: seq 7" in result.err) == (2, True)
    assert filled("ls").lines == ["bucket", "b"]


def test_an_operation_that_is_not_known_names_those_that_are(cli: Cli) -> None:
    """Also when it is inside a batch, or missing."""
    for line in (
        b'{"seq": 1, "op": "put", "bucket": "b"}',
        b'{"seq": 1, "bucket": "b"}',
        b'{"seq": 1, "op": "batch", "entries": [{"op": "rename"}]}',
    ):
        told = cli("engine", "apply", stdin=line).err
        assert "error: line 1: " in told
        assert "an `op` is one of create_bucket, delete_bucket, put_object, delete_object, copy_object, batch" in told


# Looking


def test_what_is_known_about_an_object(filled: Callable[..., Result]) -> None:
    """Without its data; of an object that was not there yet, that it was not."""
    known = {"bucket": "b", "key": "copy", "size": 5, "seq": 4, "tier": "hot", "metadata": {"a": 1}}
    assert filled("stat", "b", "copy", "--json").json == known
    assert "metadata a\t1" in filled("stat", "b", "copy").lines
    assert filled("stat", "b", "copy", "--seq", 3).code == 3


def test_an_object_comes_byte_for_byte(filled: Callable[..., Result], tmp_path: Path) -> None:
    """On stdout or in a file; with --json what is known about it."""
    assert filled("get", "b", "raw").out == b"\0\1\xff"
    assert filled("get", "b", "k", "--seq", 3).out == b"hello"
    assert filled("get", "b", "copy", "-o", "out.bin", "--json").json == {
        "bucket": "b",
        "key": "copy",
        "seq": 4,
        "size": 5,
        "tier": "hot",
        "metadata": {"a": 1},
    }
    assert (tmp_path / "out.bin").read_bytes() == b"hello"


def test_listing_now_and_then(filled: Callable[..., Result]) -> None:
    """Buckets, objects by prefix, and all of it at an earlier seq."""
    assert filled("ls", "--json").json == [{"bucket": "b"}]
    assert [row["key"] for row in filled("ls", "b", "--json").json] == ["copy", "large", "raw"]
    assert [row["key"] for row in filled("ls", "b", "ra", "--json").json] == ["raw"]
    assert filled("ls", "b", "--seq", 2).lines == ["key\tbytes\tseq", "k\t5\t2"]
    assert filled("ls", "--seq", 0, "--json").json == []
    assert filled("versions", "b", "k", "--json").json == [
        {"seq": 4, "bytes": 0, "is_deleted": True, "tier": None},
        {"seq": 2, "bytes": 5, "is_deleted": False, "tier": "hot"},
    ]


def test_a_digest_is_that_of_the_library(filled: Callable[..., Result]) -> None:
    """The same for people and for programs, now and at a seq."""
    with tidelog.open_engine("engine") as engine:
        now, then = engine.digest(), engine.digest(3)
    assert filled("digest").lines == [now]
    assert filled("digest", "engine", "--seq", 3, "--json").json == {"seq": 3, "digest": then}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("get", "b", "nowhere"), 3, "there is no object 'nowhere'"),
        (("get", "x", "k"), 3, "there is no bucket 'x'"),
        (("get", "b", "raw", "--seq", 99), 2, "seq 99 is not applied yet"),
        (("ls", "x"), 3, "there is no bucket 'x'"),
        (("versions", "b", "nowhere"), 3, "nowhere"),
        (("status", "elsewhere"), 3, "there is no engine in"),
        (("dump-page", 99), 3, "page 99"),
        (("ship",), 2, "has no store"),
        (("compact",), 2, "has no store"),
        (("status", "--metadata", "bucket"), 2, "metadata is named without a store"),
        (("restore",), 2, "no directory was named"),
        (("restore", "new"), 2, "no store was named"),
    ],
)
def test_what_is_not_there_is_told(
    filled: Callable[..., Result], tmp_path: Path, arguments: tuple[object, ...], code: int, text: str
) -> None:
    """With the code that scripts know, and nothing is made on the way."""
    before = sorted(path.name for path in tmp_path.iterdir())
    result = filled(*arguments)
    assert (result.code, result.out) == (code, b"")
    assert text in result.err
    assert "hint: " in result.err or code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_looking_leaves_the_log_alone(filled: Callable[..., Result]) -> None:
    """No record is written by a command that reads."""
    before = filled("status", "--json").json["wal"]
    for arguments in (("get", "b", "raw"), ("ls",), ("versions", "b", "k"), ("digest",), ("verify",)):
        assert filled(*arguments).code == 0
    assert filled("status", "--json").json["wal"] == before


# Where it stands


def test_status_is_what_the_library_says(filled: Callable[..., Result]) -> None:
    """Marks, log and checkpoint, from the files alone."""
    with tidelog.open_engine("engine") as engine:
        engine.update_low_water_mark(3)
        engine.apply(9, tidelog.CreateBucket("later"))
        beside = filled("status", "--json").json
        known = engine.statistics()
    assert (beside["is_open"], beside["applied_seq"], beside["low_water_mark"]) == (True, 9, 3)
    assert beside["wal"]["next_lsn"] == known.wal.next_lsn
    assert beside["wal"]["next_position"] == known.wal.next_position
    assert beside["recovery"]["redo_lsn"] == known.redo_lsn
    after = filled("status", "--json").json
    assert (after["is_open"], after["checkpoint"]["seq"], after["recovery"]["redo_records"]) == (False, 9, 2)
    assert (after["store"], after["problems"]) == (None, [])
    assert filled("status").lines[:2] == ["name\tvalue", f"directory\t{after['directory']}"]


def test_status_says_what_opening_would_undo(filled: Callable[..., Result]) -> None:
    """An entry whose end never came to the disk is told, before anybody opens the engine."""
    with tidelog.open_engine("engine") as engine:
        batch = [tidelog.PutObject("b", f"part{number}", b"v" * 2000) for number in range(50)]
        synced = Path("engine/wal/wal.ckpt").read_bytes()  # what the batch is behind: it was never synced as a whole
        engine.apply(10, tidelog.Batch(batch))
        copy_alive("engine", "killed")  # as a process leaves it that is killed now
    Path("killed/wal/wal.ckpt").write_bytes(synced)
    wal = Path("killed/wal/wal.0000000000.log")
    wal.write_bytes(wal.read_bytes()[:-3000])
    found = filled("status", "killed", "--json").json
    assert (found["applied_seq"], found["recovery"]["undone_seq"], found["problems"]) == (7, 10, [])
    assert filled("verify", "killed").code == 1  # the torn tail counts
    assert filled("digest", "killed").out == filled("digest", "--seq", 7).out  # opening takes it back
    assert filled("status", "killed", "--json").json["recovery"]["undone_seq"] is None
    assert filled("verify", "killed").code == 0


def test_a_checkpoint_by_hand(filled: Callable[..., Result]) -> None:
    """It says up to which seq it is, and where opening begins from now on."""
    found = filled("checkpoint", "engine", "--json").json
    assert (found["seq"], found["state_seq"]) == (7, None)
    assert found["redo_lsn"] > 1


# In words


def test_the_log_in_words(filled: Callable[..., Result]) -> None:
    """One line a record, and everything in it as JSON."""
    rows = [json.loads(line) for line in filled("dump-wal", "--json").lines]
    assert [row["lsn"] for row in rows] == list(range(1, len(rows) + 1))
    puts = [row for row in rows if row.get("op") == "put_object"]
    assert [(row["seq"], row["key"], row["size"]) for row in puts] == [(2, "k", 5), (3, "raw", 3), (7, "large", 5000)]
    assert puts[0]["updates"] == [{"page": 1, "what": "insert", "key": "b/k @2"}]
    batch = [row for row in rows if row.get("seq") == 4]
    assert [(row["op"], row["order"], row["is_last"]) for row in batch] == [
        ("copy_object", 0, False),
        ("delete_object", 1, True),
    ]
    (refused,) = [row for row in rows if row.get("is_refused")]
    assert (refused["seq"], "refused: " in refused["text"]) == (5, True)
    assert {row["kind"] for row in rows} == {"structure", "operation", "checkpoint_begin", "checkpoint_end"}


def test_a_part_of_the_log(filled: Callable[..., Result]) -> None:
    """From an LSN on, so many records, or those of one entry."""
    table = filled("dump-wal", "engine", "--from", 3, "--limit", 2).lines
    assert [line.split("\t")[0] for line in table] == ["lsn", "3", "4"]
    assert len(filled("dump-wal", "--seq", 4).lines) == 3
    assert len(filled("dump-wal", "--from", 999).lines) == 1


def test_undone_entries_and_marks_in_words(filled: Callable[..., Result]) -> None:
    """Rollbacks, compensations and marks are told as what they are."""
    with tidelog.open_engine("engine") as engine:
        engine.update_low_water_mark(4)
        engine.apply(8, tidelog.PutObject("b", "gone", b"v"))
        engine.rollback_to(7)
    kinds = [json.loads(line)["kind"] for line in filled("dump-wal", "--json").lines]
    assert {"marks", "rollback_begin", "compensation", "rollback_end"} <= set(kinds)
    assert "low-water mark 4" in filled("dump-wal").out.decode()


def test_a_page_in_words(filled: Callable[..., Result]) -> None:
    """Its header, and every cell with what it says."""
    page = filled("dump-page", 1, "--json").json
    assert (page["page"], page["level"], page["cell_count"], page["problem"]) == (1, 0, 6, None)
    cells = {cell["key"]: cell for cell in page["cells"]}
    assert cells["b/k @4"]["is_deleted"]
    assert (cells["b/k @2"]["size"], cells["b/large @7"]["stored_bytes"]) == (5, 5004)
    assert cells["b @1"]["text"] == "the bucket was created"
    assert "the object was deleted" in filled("dump-page", 1).out.decode()
    assert filled("dump-page", 0, "--json").json["page_bytes"] == 8192


def test_inner_pages_in_words(cli: Cli, tmp_path: Path) -> None:
    """Their cells are the keys from which on a child has what is below it."""
    with tidelog.open_engine("engine") as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        engine.apply_many([(seq, tidelog.PutObject("b", f"{seq:04}", b"v" * 100)) for seq in range(2, 200)])
    root = cli("engine", "dump-page", 1, "--json").json
    assert root["level"] == 1
    children = [cell["child"] for cell in root["cells"]]
    assert all(cli("engine", "dump-page", child, "--json").json["level"] == 0 for child in children[:2])


# Beside an owner


def test_beside_the_process_that_has_it_open(filled: Callable[..., Result], cli: Cli) -> None:
    """What needs the engine says who has it and what works meanwhile; what reads files works."""
    with tidelog.open_engine("engine"):
        for arguments in (("get", "b", "raw"), ("ls",), ("digest",), ("checkpoint",), ("verify",), ("apply",)):
            result = filled(*arguments)
            assert (result.code, result.out) == (4, b""), arguments
            assert "open in" in result.err
            assert "engine verify --read-only" in result.err
        for words in (["status"], ["dump-wal"], ["dump-page", "1"], ["verify", "--read-only"]):
            assert filled(*words).code == 0, words


def test_the_log_is_read_while_it_is_written(filled: Callable[..., Result]) -> None:
    """Looking again and again beside an owner that writes finds no problem, and only whole records."""
    with tidelog.open_engine("engine", checkpoint_interval_seconds=0.2) as engine:
        for first in range(10, 400, 40):
            engine.apply_many(_puts(first, 40))
            assert filled("verify", "--read-only").code == 0
            assert filled("status", "--json").json["applied_seq"] == engine.applied_seq


def _puts(first: int, count: int) -> list[tuple[int, tidelog.PutObject]]:
    return [(seq, tidelog.PutObject("b", f"key{seq % 90}", b"v" * 700)) for seq in range(first, first + count)]


def test_help_names_every_command(cli: Cli) -> None:
    """And the default directory, which is not that of topics."""
    text = cli("engine").out.decode()
    names = "status get stat ls versions apply checkpoint ship compact restore verify digest dump-wal dump-page"
    assert all(f"\n  {name} " in text for name in names.split())
    assert "./engine]" in cli("engine", "status", "--help").out.decode()


def test_a_reader_that_goes_away_ends_it_quietly(filled: Callable[..., Result], spawn: Spawn) -> None:
    """As with `| head`: success, and nothing on stderr."""
    child = spawn("engine", "dump-wal")
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert (child.wait(60), child.stderr.read()) == (0, b"")
