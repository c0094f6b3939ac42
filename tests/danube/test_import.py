"""`tidelog import danube`: a topic arrives whole, with its offsets, from files, from objects and from both."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Spawn
from tests.danube.danube_bytes import (
    VECTOR,
    frame,
    frames,
    older_frames,
    older_sent,
    sent,
    write_objects,
    write_wal,
)
from tests.servers import S3Server

import tidelog
from tidelog.imports.danube.message import to_message
from tidelog.store.urls import open_store
from tidelog.topics.message import Message


def imported(root: Path, topic: str = "default/orders") -> list[Message]:
    """All messages of a topic."""
    with tidelog.open(root / "data", read_only=True) as log:
        return list(log.topic(topic).read())


def expected(offsets: range) -> list[Message]:
    return [to_message(sent(offset), offset, offset) for offset in offsets]


@pytest.fixture
def wal(tmp_path: Path) -> Path:
    """The WAL directory of a topic whose first files are gone already."""
    directory = tmp_path / "wal" / "default" / "orders"
    write_wal(directory, frames(range(100, 200)), frames(range(200, 300)), frames(range(300, 310)))
    return directory


def test_a_topic_arrives_with_its_offsets(cli: Cli, wal: Path, tmp_path: Path) -> None:
    """Offsets, times, keys, attributes and all the rest are as they were, and the log goes on behind them."""
    result = cli("import", "danube", "--wal", wal)
    assert (result.code, result.out) == (0, b"")
    assert "imported 210 messages to default/orders: offsets 100 to 309" in result.err
    assert imported(tmp_path) == expected(range(100, 310))
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("default/orders")
        assert (topic.start_offset, topic.append(b"next")) == (100, 310)
    assert cli("verify").code == 0


def test_the_vector_arrives(cli: Cli, tmp_path: Path) -> None:
    """The frame of the format's description is one message at offset 70000."""
    write_wal(tmp_path / "ns" / "t", VECTOR)
    assert cli("import", "danube", "--wal", "ns/t").code == 0
    (message,) = imported(tmp_path, "ns/t")
    assert (message.offset, message.value, message.key, message.headers["k"]) == (70000, b"hi", b"rk", b"v")


def test_the_summary_as_json(cli: Cli, wal: Path) -> None:
    """A document a topic says what was imported, and what was not."""
    (document,) = cli("import", "danube", "--wal", wal, "--topic", "shop/orders", "--json").json
    assert document == {
        "topic": "shop/orders",
        "danube_topic": "default/orders",
        "first_offset": 100,
        "last_offset": 309,
        "messages": 210,
        "bytes": sum(len(frame(offset)) for offset in range(100, 310)),
        "already_there": 0,
        "repeated": 0,
        "renumbered": 0,
        "skipped": 0,
        "lost": [],
        "damages": 0,
        "damaged": [],
        "unfinished": [],
    }


def test_all_topics_below_a_root(cli: Cli, wal: Path, tmp_path: Path) -> None:
    """A WAL root brings every topic in it, or the one that was chosen."""
    write_wal(tmp_path / "wal" / "default" / "refunds", frames(range(3)))
    (tmp_path / "wal" / "default" / "empty").mkdir()
    chosen = cli("import", "danube", "--wal", "wal", "--danube-topic", "/default/refunds", "--json")
    assert [document["topic"] for document in chosen.json] == ["default/refunds"]
    everything = cli("import", "danube", "--wal", "wal", "--json").json
    assert [(each["topic"], each["messages"]) for each in everything] == [
        ("default/orders", 210),
        ("default/refunds", 0),
    ]
    assert imported(tmp_path, "default/refunds") == expected(range(3))
    refused = cli("import", "danube", "--wal", "wal", "--topic", "shop/orders")
    assert (refused.code, "--danube-topic" in refused.err) == (2, True)
    assert wal.is_dir()


def test_objects_arrive(cli: Cli, tmp_path: Path) -> None:
    """Objects of a store are read in the order of their offsets, however their names sort."""
    write_objects(tmp_path / "store", [(0, 50, frames(range(9))), (9, 60, frames(range(9, 40))), (40, 70, frame(40))])
    result = cli("import", "danube", "--objects", (tmp_path / "store").as_uri())
    assert result.code == 0, result.err
    assert imported(tmp_path) == expected(range(41))


def test_objects_of_older_versions_arrive(cli: Cli, tmp_path: Path) -> None:
    """A bucket that saw every version of Danube has objects of three kinds and messages of two: it is one topic."""
    older = [(0, 8, older_frames(range(9))), (9, 39, older_frames(range(9, 40))), (40, 1_770_000_000, frame(40))]
    write_objects(tmp_path / "store", older, folder="objects")
    write_objects(tmp_path / "store", [(41, 1_780_000_000, frames(range(41, 50)))])
    write_objects(tmp_path / "store", older[:1], "default/refunds", folder="objects")
    arguments = ("import", "danube", "--objects", (tmp_path / "store").as_uri())
    assert cli(*arguments, "--danube-topic", "default/orders").code == 0
    ours = [to_message(older_sent(offset), offset, offset) for offset in range(40)]
    assert imported(tmp_path) == ours + expected(range(40, 50))
    assert [document["messages"] for document in cli(*arguments, "--json").json] == [0, 9]
    assert imported(tmp_path, "default/refunds") == ours[:9]


def test_a_wal_of_both_encodings_arrives(cli: Cli, tmp_path: Path) -> None:
    """A broker that was updated appends to the file that the older one wrote; the next run goes on in there."""
    write_wal(tmp_path / "a" / "b", older_frames(range(20)))
    assert cli("import", "danube", "--wal", "a/b").code == 0
    write_wal(tmp_path / "a" / "b", older_frames(range(20)) + frames(range(20, 30)))
    (document,) = cli("import", "danube", "--wal", "a/b", "--json").json
    assert (document["already_there"], document["messages"]) == (20, 10)
    ours = [to_message(older_sent(offset), offset, offset) for offset in range(20)]
    assert imported(tmp_path, "a/b") == ours + expected(range(20, 30))


def test_objects_arrive_from_s3(cli: Cli, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from a bucket, below the prefix that Danube was given, with the usual variables."""
    settings = s3_server.settings()
    url = s3_server.url("danube/prefix")
    store = open_store(url, settings)
    store.put("storage/topics/default/orders/segments/data-0-50.dnb1", frames(range(5)))
    store.put("storage/topics/default/orders/segments/data-5-60.dnb1", frames(range(5, 9)))
    assert settings.store_endpoint is not None
    assert settings.store_access_key_id is not None
    assert settings.store_secret_access_key is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", settings.store_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", settings.store_access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", settings.store_secret_access_key.reveal())
    result = cli("import", "danube", "--objects", url)
    assert result.code == 0, result.err
    assert imported(tmp_path) == expected(range(9))


def test_objects_then_the_wal_behind_them(cli: Cli, wal: Path, tmp_path: Path) -> None:
    """History comes from the store, what is not exported yet from the WAL; what both have is used once."""
    write_objects(tmp_path / "store", [(0, 50, frames(range(120))), (120, 60, frames(range(120, 250)))])
    arguments = ("import", "danube", "--wal", wal, "--objects", (tmp_path / "store").as_uri(), "--json")
    (document,) = cli(*arguments).json
    assert (document["messages"], document["repeated"]) == (310, 150)
    assert imported(tmp_path) == expected(range(310))


def test_running_it_again_goes_on(cli: Cli, tmp_path: Path) -> None:
    """What is there is compared and left alone; only what is new is appended."""
    directory = tmp_path / "default" / "orders"
    write_wal(directory, frames(range(50)))
    assert cli("import", "danube", "--wal", directory).code == 0
    write_wal(directory, frames(range(50)), frames(range(50, 80)))
    (document,) = cli("import", "danube", "--wal", directory, "--json").json
    assert (document["already_there"], document["first_offset"], document["last_offset"]) == (50, 50, 79)
    again = cli("import", "danube", "--wal", directory)
    assert (again.code, "imported no messages" in again.err) == (0, True)
    assert imported(tmp_path) == expected(range(80))


def test_the_source_may_have_lost_its_beginning_meanwhile(cli: Cli, tmp_path: Path) -> None:
    """Files that Danube deleted since the first run are not needed, as long as no message is missing in between."""
    directory = tmp_path / "default" / "orders"
    write_wal(directory, frames(range(50)))
    cli("import", "danube", "--wal", directory)
    write_wal(directory, frames(range(40, 60)))
    assert cli("import", "danube", "--wal", directory).code == 0
    assert imported(tmp_path) == expected(range(60))
    write_wal(directory, frames(range(70, 80)))
    gap = cli("import", "danube", "--wal", directory)
    assert (gap.code, "offsets 60 to 69 missing" in gap.err) == (5, True)


def test_an_import_that_is_killed_can_be_run_again(cli: Cli, spawn: Spawn, tmp_path: Path) -> None:
    """Killed at any moment it leaves a beginning of the topic, and the next run completes it."""
    directory = tmp_path / "default" / "orders"
    write_wal(directory, *(frames(range(start, start + 5000)) for start in range(7, 20_007, 5000)))
    for seconds in (0.5, 0.7, 0.9, 1.1):
        child = spawn("import", "danube", "--wal", directory)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        child.kill()
        child.wait()
    assert cli("import", "danube", "--wal", directory).code == 0
    assert imported(tmp_path) == expected(range(7, 20_007))


@pytest.mark.parametrize("first", [0, 10, 11])
def test_a_topic_with_other_content_is_refused(cli: Cli, tmp_path: Path, first: int) -> None:
    """Nothing is mixed into a topic that does not come from this source, also where only its last message differs."""
    directory = tmp_path / "default" / "orders"
    write_wal(directory, frames(range(10)))
    cli("import", "danube", "--wal", directory)
    cli("produce", "default/orders", stdin=b"another\n")
    before = imported(tmp_path)
    write_wal(directory, frames(range(first, 20)))
    result = cli("import", "danube", "--wal", directory)
    if first == 11:  # it only shares offsets that the topic does not have
        assert result.code == 0
        return
    assert result.code == 2
    assert "holds another message at offset 10" in result.err
    assert imported(tmp_path) == before


def test_a_topic_that_begins_elsewhere_is_refused(cli: Cli, tmp_path: Path) -> None:
    """A topic that begins later than the source is not its target; an empty one is, wherever the source begins."""
    write_wal(tmp_path / "a" / "b", frames(range(20, 30)))
    write_wal(tmp_path / "a" / "c", frames(range(30)))
    cli("import", "danube", "--wal", "a/b")
    late = cli("import", "danube", "--wal", "a/c", "--topic", "a/b")
    assert (late.code, "begins at offset 20" in late.err) == (2, True)
    cli("topic", "create", "a/empty")
    cli("produce", "a/used", stdin=b"x\n")
    assert cli("import", "danube", "--wal", "a/b", "--topic", "a/empty").code == 0
    assert imported(tmp_path, "a/empty") == expected(range(20, 30))
    used = cli("import", "danube", "--wal", "a/c", "--topic", "a/used")
    assert (used.code, "another message at offset 0" in used.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "--wal"),
        (("--wal", "nowhere"), 3, "no directory nowhere"),
        (("--wal", "."), 3, "no WAL of Danube"),
        (("--wal", "wal", "--danube-topic", "default/none"), 3, "no topic default/none"),
        (("--wal", "wal", "--danube-topic", "none"), 2, "needs a namespace and a name"),
        (("--wal", "wal", "--topic", "a b/c"), 2, "not allowed"),
        (("--objects", "http://x"), 2, "not the URL of a store"),
        (("--objects", "file:///nowhere/at/all"), 3, "no directory /nowhere/at/all"),
        (("--wal", "wal", "--on-damage", "ignore"), 2, "--on-damage"),
        (("--wal", "wal", "--objects", "memory://", "--on-restart", "renumber"), 2, "two topics"),
        (("--objects", "memory://"), 3, "no objects of Danube"),
    ],
)
@pytest.mark.usefixtures("wal")
def test_a_wrong_command_line_changes_nothing(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    """What is wrong is named before a log directory is made."""
    result = cli("import", "danube", *arguments)
    assert result.code == code, result.err
    assert words in result.err
    assert not (tmp_path / "data").exists()
    assert not Path("/nowhere").exists()


def test_a_topic_of_tidelog_is_not_one_of_danube(cli: Cli, tmp_path: Path) -> None:
    """Pointed at a log directory of ours, it says so."""
    cli("produce", "a/b", stdin=b"x\n")
    result = cli("import", "danube", "--wal", tmp_path / "data", "--dir", "other")
    assert (result.code, "is a topic of tidelog" in result.err) == (2, True)


def test_two_files_of_one_number_are_refused(cli: Cli, wal: Path) -> None:
    """Nobody can tell which of the two comes first."""
    (wal / "wal.0.log").write_bytes(frames(range(3)))
    result = cli("import", "danube", "--wal", wal)
    assert (result.code, "both file 0" in result.err) == (2, True)


def test_an_empty_wal_imports_nothing(cli: Cli, tmp_path: Path) -> None:
    """A topic without messages is no error, and makes no topic."""
    write_wal(tmp_path / "a" / "b", b"")
    assert cli("import", "danube", "--wal", "a/b").code == 0
    assert cli("topic", "list", "--json").json == []


def test_a_message_that_is_too_large_is_named(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over max_message_bytes stops the import with its place; with a larger limit it continues from there."""
    write_wal(tmp_path / "a" / "b", frames(range(3)) + frame(3, b"x" * 100_000) + frames(range(4, 6)))
    monkeypatch.setenv("TIDELOG_MAX_MESSAGE_BYTES", "1000")
    result = cli("import", "danube", "--wal", "a/b")
    assert result.code == 2
    assert f"offset 3, byte {len(frames(range(3)))} of a/b/wal.log" in result.err
    assert "max_message_bytes" in result.err
    assert "imported 3 messages" in result.err
    monkeypatch.delenv("TIDELOG_MAX_MESSAGE_BYTES")
    assert cli("import", "danube", "--wal", "a/b").code == 0
    assert [message.offset for message in imported(tmp_path, "a/b")] == list(range(6))


def test_nothing_of_danube_is_changed(cli: Cli, wal: Path, tmp_path: Path) -> None:
    """The source is only read."""
    store = write_objects(tmp_path / "store", [(0, 50, frames(range(120)) + b"torn")])
    before = {path: path.read_bytes() for path in [*wal.iterdir(), *store]}
    cli("import", "danube", "--wal", wal, "--objects", (tmp_path / "store").as_uri())
    assert {path: path.read_bytes() for path in [*wal.iterdir(), *store]} == before
