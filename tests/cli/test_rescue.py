"""`tidelog topic rescue`: what a fenced owner had accepted is listed, written, appended or deleted, and never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Cli

import tidelog
from tidelog.cli.session import Session, run_reporting
from tidelog.topics.partitioned import partition_of
from tidelog.topics.rescue import Rescue
from tidelog.topics.topic import Topic

SHIPPED = b"".join(b"shipped %d\n" % number for number in range(10))
MINE = [b"mine %d" % number for number in range(3)]


@pytest.fixture
def store(tmp_path: Path) -> list[str]:
    """The options of a store with its catalog."""
    return ["--store", f"file://{tmp_path}/store", "--metadata", "bucket"]


@pytest.fixture
def fenced(cli: Cli, store: list[str]) -> list[str]:
    """In ./data three messages were accepted behind ten that are shipped; then ./other took `a/b` over."""
    cli("produce", "a/b", "--no-ship", *store, stdin=SHIPPED)
    cli("topic", "ship", "a/b")
    with tidelog.open("data", ship_max_delay_seconds=1000) as log:
        log.topic("a/b").append_many(
            [tidelog.Message(value, key=b"k\xff", headers={"h": value}) for value in MINE], sync=True
        )
    cli("produce", "a/b", "--no-ship", "-d", "other", *store, stdin=b"theirs\n")
    cli("topic", "ship", "a/b", "-d", "other")
    return store


def messages(topic: str, directory: str = "data") -> list[tidelog.Message]:
    with tidelog.open(directory, read_only=True) as log:
        return list(log.topic(topic).read())


# Listing


@pytest.mark.usefixtures("fenced")
def test_a_tail_is_found_where_it_lies(cli: Cli, tmp_path: Path) -> None:
    """Though the topic was not opened again since, the tail is listed, and nothing is changed by looking."""
    before = sorted((tmp_path / "data/a/b").rglob("*"))
    (tail,) = cli("topic", "rescue", "a/b", "--json").json
    assert (tail["first_offset"], tail["last_offset"], tail["messages"], tail["set_aside"]) == (10, 12, 3, None)
    assert tail["tail"].startswith(f"e{tail['epoch']}-")
    assert sorted((tmp_path / "data/a/b").rglob("*")) == before


@pytest.mark.usefixtures("fenced")
def test_a_tail_that_was_put_aside_is_the_same(cli: Cli) -> None:
    """Taking the topic back puts the tail aside; it is listed with its time, and the topic has the other's messages."""
    (before,) = cli("topic", "rescue", "a/b", "--json").json
    cli("produce", "a/b", "--no-ship", stdin=b"mine again\n")
    (tail,) = cli("topic", "rescue", "a/b", "--json").json
    assert tail["set_aside"] is not None
    assert {**tail, "set_aside": None} == before
    assert cli("consume", "a/b").out == SHIPPED + b"theirs\nmine again\n"


@pytest.mark.usefixtures("fenced")
def test_describe_counts_what_a_rescue_would_return(cli: Cli) -> None:
    """The same number while the tail lies in place, once it is put aside, and when it is gone."""

    def to_rescue() -> int:
        return int(cli("topic", "describe", "a/b", "--json").json["to_rescue"])

    assert to_rescue() == 3
    cli("produce", "a/b", "--no-ship", stdin=b"mine again\n")
    assert to_rescue() == 3
    cli("topic", "rescue", "a/b", "--discard", "--yes")
    assert to_rescue() == 0


def test_the_fenced_process_may_still_run(cli: Cli, fenced: list[str]) -> None:
    """Listing works beside it; what moves files waits for its end."""
    with tidelog.open("third", store=fenced[1], metadata="bucket", ship_max_delay_seconds=1000) as log:
        log.topic("a/b").append(b"unlucky", sync=True)
        cli("produce", "a/b", "--no-ship", "--take-over", "-d", "other", stdin=b"x\n")
        (tail,) = cli("topic", "rescue", "a/b", "-d", "third", "--json").json
        assert tail["messages"] == 1
        assert cli("topic", "rescue", "a/b", "-d", "third", "--output", "-").code == 4


def test_nothing_to_rescue(cli: Cli, store: list[str]) -> None:
    """A topic that nobody took has no tails, with a store or without."""
    cli("produce", "a/b", "--no-ship", *store, stdin=SHIPPED)
    cli("produce", "a/b", "--no-ship", "-d", "local", stdin=SHIPPED)
    for options in ((), ("-d", "local"), ("--into", "a/c"), ("--discard",)):
        result = cli("topic", "rescue", "a/b", *options)
        assert (result.code, "nothing of a/b to rescue" in result.err) == (0, True)


# Writing


@pytest.mark.usefixtures("fenced")
def test_written_and_produced_again(cli: Cli, tmp_path: Path) -> None:
    """Lines as of consume --json; produced from them, values, keys, headers and times are the same."""
    assert cli("topic", "rescue", "a/b", "--output", "tail.jsonl").code == 0
    lines = [json.loads(line) for line in (tmp_path / "tail.jsonl").read_text().splitlines()]
    assert [line["offset"] for line in lines] == [10, 11, 12]
    assert cli("produce", "a/again", "--no-ship", "tail.jsonl", "--from-json").code == 0
    again = messages("a/again")
    assert [(m.value, m.key, m.headers) for m in again] == [(value, b"k\xff", {"h": value}) for value in MINE]
    assert [line["timestamp"] for line in lines] == [
        line["timestamp"] for line in map(json.loads, cli("consume", "a/again", "--json").lines)
    ]


@pytest.mark.usefixtures("fenced")
def test_writing_overwrites_nothing(cli: Cli, tmp_path: Path) -> None:
    """A file that is there stays; stdout is -."""
    (tmp_path / "there").write_text("precious")
    assert cli("topic", "rescue", "a/b", "--output", "there").code == 2
    assert (tmp_path / "there").read_text() == "precious"
    assert len(cli("topic", "rescue", "a/b", "--output", "-").lines) == 3


@pytest.mark.parametrize(
    "line",
    [b"nonsense", b'{"key": "k"}', b'{"value": 1}', b'{"value": "x", "value_encoding": "rot13"}', b"\xff", b"[]"],
)
def test_lines_that_are_no_messages(cli: Cli, line: bytes) -> None:
    """The record is named, and those before it were produced."""
    result = cli("produce", "a/b", "--no-ship", "--from-json", stdin=b'{"value": "good"}\n' + line + b"\n")
    assert (result.code, "record 2: not a message in JSON" in result.err) == (2, True)
    assert cli("consume", "a/b").out == b"good\n"


# Appending


@pytest.mark.usefixtures("fenced")
def test_appended_with_where_it_comes_from(cli: Cli) -> None:
    """New messages with two more headers; the tail is kept."""
    (tail,) = cli("topic", "rescue", "a/b", "--json").json
    assert cli("topic", "rescue", "a/b", "--into", "a/saved").code == 0
    saved = messages("a/saved")
    assert [(m.value, m.key, m.headers["h"]) for m in saved] == [(value, b"k\xff", value) for value in MINE]
    assert {m.headers["tidelog-rescued-from"] for m in saved} == {f"a/b {tail['tail']}".encode()}
    assert [m.headers["tidelog-rescued-offset"] for m in saved] == [b"10", b"11", b"12"]
    assert len(cli("topic", "rescue", "a/b", "--json").json) == 1


@pytest.mark.usefixtures("fenced")
def test_appending_again_appends_nothing_twice(cli: Cli) -> None:
    """What is there already is found, behind other messages too."""
    cli("topic", "rescue", "a/b", "--into", "a/saved")
    cli("produce", "a/saved", "--no-ship", stdin=b"something else\n")
    (again,) = cli("topic", "rescue", "a/b", "--into", "a/saved", "--json").json
    assert (again["appended"], again["already_there"], again["lost"]) == (0, 3, 0)
    assert [m.value for m in messages("a/saved")] == [*MINE, b"something else"]


@pytest.mark.usefixtures("fenced")
def test_an_interrupted_rescue_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an end between any two batches, each message is there once when it is run again."""
    monkeypatch.setattr("tidelog.topics.rescue._BATCH_MESSAGES", 1)
    append_many, calls = Topic.append_many, 0

    def interrupted(self: Topic, *arguments: object, **options: object) -> list[int]:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise KeyboardInterrupt
        return append_many(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Topic, "append_many", interrupted)
    done = None
    while done is None:
        with tidelog.open("data") as log:
            rescue = Rescue(log, "a/b")
            (tail,) = rescue.set_aside()
            try:
                done = rescue.append_to(tail, log.topic("a/saved"))
            except KeyboardInterrupt:
                continue
    assert calls > 3
    assert [m.value for m in messages("a/saved")] == MINE


@pytest.mark.usefixtures("fenced")
def test_into_a_topic_of_another_node(cli: Cli) -> None:
    """It is not taken from there unless that is asked for; the hint says how to do it there."""
    refused = cli("topic", "rescue", "a/b", "--into", "a/b")
    assert (refused.code, "--from-json" in refused.err) == (4, True)
    assert cli("topic", "rescue", "a/b", "--into", "a/b", "--take-over").code == 0
    assert [m.value for m in messages("a/b")][10:] == [b"theirs", *MINE]


# Deleting


@pytest.mark.usefixtures("fenced")
def test_deleting_needs_a_yes(cli: Cli, tmp_path: Path) -> None:
    """Without one nothing goes; with it the files are gone, and the topic is as it was."""
    refused = cli("topic", "rescue", "a/b", "--discard")
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert len(cli("topic", "rescue", "a/b", "--json").json) == 1
    assert cli("topic", "rescue", "a/b", "--discard", "--yes", "--json").json["messages"] == 3
    assert cli("topic", "rescue", "a/b", "--json").json == []
    assert list((tmp_path / "data/a/b").rglob("wal.*.log")) == []
    assert cli("consume", "a/b").out == SHIPPED + b"theirs\n"


@pytest.mark.usefixtures("fenced")
def test_one_tail_of_several(cli: Cli) -> None:
    """Each has its name; another name is not found."""
    cli("produce", "a/b", "--no-ship", stdin=b"mine again\n")
    cli("produce", "a/b", "--no-ship", "-d", "other", stdin=b"theirs again\n")
    first, second = cli("topic", "rescue", "a/b", "--json").json
    assert first["epoch"] < second["epoch"]
    assert cli("topic", "rescue", "a/b", "--tail", "e9-0").code == 3
    assert cli("topic", "rescue", "a/b", "--tail", second["tail"], "--discard", "--yes").code == 0
    assert [tail["tail"] for tail in cli("topic", "rescue", "a/b", "--json").json] == [first["tail"]]


def test_one_thing_at_a_time(cli: Cli) -> None:
    """Writing and deleting in one go is refused: look at what was written first."""
    assert cli("topic", "rescue", "a/b", "--output", "x", "--discard").code == 2


def test_a_fenced_owner_is_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """The command in the hint can be pasted: it has the topic and the directory."""

    def fail() -> None:
        raise tidelog.FencedError("other owns the topic now", hint="for programs")

    assert run_reporting(fail, Session(directory=Path("data"), topic="a/b")) == 4
    assert "topic rescue a/b --dir data`" in capsys.readouterr().err


# Topics with partitions


KEYS = [b"k%d" % number for number in range(12)]


@pytest.fixture
def divided(cli: Cli, store: list[str]) -> list[str]:
    """In ./data two messages a key were accepted behind what is shipped; then ./other took all partitions over."""
    with tidelog.open("data", store=store[1], metadata="bucket", ship_max_delay_seconds=1000) as log:
        topic = log.topic("a/p", partitions=3, ship_on_close=False)
        topic.append_many([tidelog.Message(b"shipped", key=key) for key in KEYS], sync=True)
        topic.ship()
        topic.append_many([tidelog.Message(b"%d" % turn, key=key) for turn in range(2) for key in KEYS], sync=True)
    with tidelog.open("other", store=store[1], metadata="bucket", ship_max_delay_seconds=1000) as log:
        log.topic("a/p").append_many([tidelog.Message(b"theirs", key=key) for key in KEYS], sync="shipped")
        log.topic("a/p").seal()
    return store


def by_partition(topic: str) -> dict[int, list[tuple[bytes | None, bytes | None]]]:
    """Keys and values of what is not `shipped` nor `theirs`, in order."""
    with tidelog.open("data", read_only=True) as log:
        opened = log.topic(topic)
        found = {number: list(opened.partition(number).read()) for number in range(opened.partitions)}
    return {
        number: [(one.key, one.value) for one in some if one.value not in (b"shipped", b"theirs")]
        for number, some in found.items()
    }


def placed(partitions: int) -> dict[int, list[tuple[bytes | None, bytes | None]]]:
    """Where they belong by their keys."""
    found: dict[int, list[tuple[bytes | None, bytes | None]]] = {number: [] for number in range(partitions)}
    for turn in range(2):
        for key in KEYS:
            found[partition_of(key, partitions)].append((key, b"%d" % turn))
    return found


@pytest.mark.usefixtures("divided")
def test_tails_of_all_partitions_are_listed_with_their_numbers(cli: Cli) -> None:
    """Nothing of a topic with partitions was found, since it has no log of its own name."""
    tails = cli("topic", "rescue", "a/p", "--json").json
    assert [one["partition"] for one in tails] == [0, 1, 2]
    assert [one["messages"] for one in tails] == [len(some) for some in placed(3).values()]
    assert cli("topic", "rescue", "a/p").lines[0].split("\t")[0] == "partition"


@pytest.mark.usefixtures("divided")
def test_messages_get_the_partition_they_came_from(cli: Cli) -> None:
    """In their own topic: all of them had arrived in partition 0. Run again, nothing is stored twice."""
    assert cli("topic", "rescue", "a/p", "--into", "a/p").code == 4  # it is another node's, and nothing was appended
    assert cli("topic", "rescue", "a/p", "--into", "a/p", "--take-over").code == 0
    assert by_partition("a/p") == placed(3)
    again = cli("topic", "rescue", "a/p", "--into", "a/p", "--json").json
    assert [one["appended"] for one in again] == [0, 0, 0]
    assert by_partition("a/p") == placed(3)


@pytest.mark.usefixtures("divided")
def test_absent_topic_is_created_with_as_many_partitions(cli: Cli) -> None:
    """So messages keep their partition and their order."""
    assert cli("topic", "rescue", "a/p", "--into", "a/saved").code == 0
    assert by_partition("a/saved") == placed(3)


@pytest.mark.usefixtures("divided")
def test_keys_decide_where_the_numbers_of_partitions_differ(cli: Cli) -> None:
    """They still do when partitions were added between two attempts: then nothing is stored twice."""
    cli("topic", "create", "a/five", "--partitions", "5")
    assert cli("topic", "rescue", "a/p", "--into", "a/five").code == 0
    found = by_partition("a/five")
    assert {number: sorted(some) for number, some in found.items()} == {
        number: sorted(some) for number, some in placed(5).items()
    }
    cli("topic", "create", "a/five", "--partitions", "7", "--if-missing")
    again = cli("topic", "rescue", "a/p", "--into", "a/five", "--json").json
    assert sum(one["appended"] for one in again) == 0


@pytest.mark.usefixtures("divided")
def test_an_interrupted_rescue_by_key_goes_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an end between any two appends, each message is there once when it is run again."""
    monkeypatch.setattr("tidelog.topics.rescue._BATCH_MESSAGES", 3)
    cli("topic", "create", "a/five", "--partitions", "5")
    append_many, calls = Topic.append_many, 0

    def interrupted(self: Topic, *arguments: object, **options: object) -> list[int]:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise KeyboardInterrupt
        return append_many(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Topic, "append_many", interrupted)
    while cli("topic", "rescue", "a/p", "--into", "a/five").code != 0:
        assert calls < 200
    found = by_partition("a/five")
    assert {number: sorted(some) for number, some in found.items()} == {
        number: sorted(some) for number, some in placed(5).items()
    }


@pytest.mark.usefixtures("divided")
def test_tails_of_all_partitions_are_written_and_deleted(cli: Cli, tmp_path: Path) -> None:
    """Each line has its partition."""
    assert cli("topic", "rescue", "a/p", "--output", "tail.jsonl").code == 0
    lines = [json.loads(line) for line in (tmp_path / "tail.jsonl").read_text().splitlines()]
    assert {one["partition"]: one["topic"] for one in lines} == dict.fromkeys(range(3), "a/p")
    assert len(lines) == 24
    assert cli("topic", "rescue", "a/p", "--discard", "--yes").code == 0
    assert cli("topic", "rescue", "a/p", "--json").json == []
