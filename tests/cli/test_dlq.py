"""`tidelog dlq`: dead letters are seen with where they came from, and go back once each."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Spawn

import tidelog
from tidelog.cli import dead_letters as dlq_replay
from tidelog.pipeline.address import find_root
from tidelog.topics.subscription.dead_letters import ORIGIN_TOPIC

DEAD = "shop/orders.billing.dlq"
LETTERS = 50_000


def give_up(directory: Path, values: list[bytes]) -> None:
    """Appends messages to shop/orders that its subscription billing gives up."""
    with tidelog.open(directory) as log:
        topic = log.topic("shop/orders")
        topic.append_many([tidelog.Message(value, key=b"k", headers={"h": b"1"}) for value in values])
        with topic.subscribe("billing", "shared", max_deliveries=1, redelivery_backoff_seconds=0) as sub:
            for message in sub.receive_many(len(values), timeout=120):
                sub.nack(message)


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A log directory with three dead letters of shop/orders."""
    give_up(tmp_path / "data", [b"one", b"two", b"three"])
    return tmp_path / "data"


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("wal.*.log"))


def values_of(directory: Path, topic: str) -> list[bytes]:
    with tidelog.open(directory, read_only=True) as log:
        return [message.value or b"" for message in log.topic(topic).read()]


@pytest.mark.usefixtures("dead")
def test_list_shows_topics_and_letters(cli: Cli) -> None:
    """Without a topic those that have dead letters; with one, each letter with its origin, whichever side is named."""
    (row,) = cli("dlq", "list", "--json").json
    assert (row["topic"], row["messages"], row["newest_origin"], row["newest_subscription"]) == (
        *(DEAD, 3, "shop/orders"),
        "billing",
    )
    for topic in (DEAD, "shop/orders"):
        letters = cli("dlq", "list", topic, "--json").json
        assert [letter["origin_offset"] for letter in letters] == [0, 1, 2]
        assert {(one["origin_topic"], one["deliveries"], one["reason"]) for one in letters} == {
            ("shop/orders", 1, "max_deliveries")
        }
    shortened = cli("dlq", "list", DEAD, "-n", "2")
    assert (len(shortened.lines), "more than 2" in shortened.err) == (3, True)


def test_list_shows_why_a_message_was_rejected(cli: Cli, tmp_path: Path) -> None:
    """The table has the beginning on one line, --json all of it; a letter without a reason has none."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("shop/orders")
        topic.append_many([b"one", b"two"])
        with topic.subscribe("billing", "shared", max_deliveries=1) as sub:
            first, second = sub.receive_many(2, timeout=120)
            sub.nack(first, reason="no such customer\n" + "x" * 100)
            sub.nack(second)
    reasons = [letter["nack_reason"] for letter in cli("dlq", "list", DEAD, "--json").json]
    assert reasons == ["no such customer\n" + "x" * 100, None]
    shown = cli("dlq", "list", DEAD)
    assert len(shown.lines) == 3
    assert "no such customer xxx" in shown.lines[1]
    assert cli("dlq", "replay", DEAD).code == 0
    with tidelog.open(tmp_path / "data", read_only=True) as log:
        replayed = list(log.topic("shop/orders").read())[2:]
    assert [list(message.headers) for message in replayed] == [["tidelog-replayed-from"]] * 2


def test_a_topic_that_cannot_be_read_does_not_hide_the_others(cli: Cli, dead: Path) -> None:
    """It is listed with its problem, and the exit code is 1."""
    broken = "shop/orders.audit.dlq"
    with tidelog.open(dead) as log:
        log.topic(broken)
    (dead / broken / "topic.json").write_bytes(b"{")
    listed = cli("dlq", "list", "--json")
    assert listed.code == 1
    assert {row["topic"]: row["problem"] is None for row in listed.json} == {DEAD: True, broken: False}
    letters = cli("dlq", "list", "shop/orders", "--json")
    assert letters.code == 1
    assert [row.get("origin_offset") for row in letters.json] == [None, 0, 1, 2]
    shown = cli("dlq", "list")
    assert "topic.json" in shown.err
    assert cli("dlq", "list", broken).code == 5
    assert cli("dlq", "list", DEAD).code == 0


def test_a_subscription_is_described_with_where_its_letters_are(cli: Cli, dead: Path) -> None:
    """By the usual name or by another one that the program chose; a name too long for letters is described too."""
    with tidelog.open(dead) as log:
        topic = log.topic("shop/orders")
        topic.subscribe("n" * 198).close()
        with pytest.raises(tidelog.TopicNameError, match=r"too long.*dead_letter_topic"):
            topic.subscribe("m" * 198, max_deliveries=1)
        with topic.subscribe("audit", max_deliveries=1, dead_letter_topic="shop/dead") as sub:
            message = sub.receive(timeout=120)
            assert message is not None
            sub.nack(message)

    def told(name: str) -> object:
        return cli("sub", "describe", "shop/orders", name, "--json").json["dead_letter_topic"]

    assert [told("billing"), told("audit"), told("n" * 198)] == [DEAD, "shop/dead", None]


def test_letters_go_back_once(cli: Cli, dead: Path) -> None:
    """However often it is run, each letter is appended once, as it was, with a header that tells where it was."""
    (first,) = cli("dlq", "replay", DEAD, "--max", "1", "--json").json
    assert (first["into"], first["messages"], first["skipped"], first["first_offset"]) == ("shop/orders", 1, 0, 3)
    (rest,) = cli("dlq", "replay", DEAD, "--json").json
    assert (rest["messages"], rest["skipped"], rest["first_offset"], rest["last_offset"]) == (2, 1, 4, 5)
    (none,) = cli("dlq", "replay", DEAD, "--json").json
    assert (none["messages"], none["skipped"]) == (0, 3)
    assert values_of(dead, "shop/orders") == [b"one", b"two", b"three"] * 2
    with tidelog.open(dead, read_only=True) as log:
        (last,) = log.topic("shop/orders").read(5)
    assert (last.key, last.headers) == (b"k", {"h": b"1", "tidelog-replayed-from": f"{DEAD}@2".encode()})


def test_a_killed_replay_goes_on(cli: Cli, spawn: Spawn, tmp_path: Path) -> None:
    """Killed at any moment and run again, it neither loses nor doubles a letter."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append(b"before")
        headers = {ORIGIN_TOPIC: b"a/b"}
        letters = [tidelog.Message(b"%d" % number, headers=headers) for number in range(LETTERS)]
        log.topic("a/b.s.dlq").append_many(letters)
    expected = [b"before", *(b"%d" % number for number in range(LETTERS))]
    for _ in range(2):
        before = size_of(tmp_path / "data/a/b")
        child = spawn("dlq", "replay", "a/b.s.dlq")
        while size_of(tmp_path / "data/a/b") == before and child.poll() is None:
            time.sleep(0.001)
        child.kill()
        assert child.wait() in (0, -signal.SIGKILL)  # on a busy machine it may be done before it is killed
        stored = values_of(tmp_path / "data", "a/b")
        assert len(stored) > 1
        assert stored == expected[: len(stored)]
    assert cli("dlq", "replay", "a/b.s.dlq").code == 0
    assert values_of(tmp_path / "data", "a/b") == expected


def test_letters_go_back_beside_a_live_owner(cli: Cli, dead: Path) -> None:
    """A service need not stop for it: it takes the letters in, each once, among its own messages."""
    with tidelog.open(dead, ingest_check_seconds=0.05) as log:
        topic = log.topic("shop/orders")
        (first,) = cli("dlq", "replay", DEAD, "--max", "1", "--json").json
        assert (first["messages"], first["first_offset"]) == (1, 3)
        assert topic.append(b"its own") == 4
        (rest,) = cli("dlq", "replay", DEAD, "--json").json
        assert (rest["messages"], rest["skipped"], rest["first_offset"], rest["last_offset"]) == (2, 1, 5, 6)
        assert [message.value for message in topic.read(3)] == [b"one", b"its own", b"two", b"three"]
    (none,) = cli("dlq", "replay", DEAD, "--json").json
    assert (none["messages"], none["skipped"]) == (0, 3)
    assert len(values_of(dead, "shop/orders")) == 7


def test_letters_go_back_to_a_topic_on_another_node(cli: Cli, tmp_path: Path) -> None:
    """Through the store: the node that has the topic open keeps it, and takes the letters in."""
    options = ["--store", f"file://{tmp_path}/store", "--metadata", "bucket"]
    cli("topic", "create", "shop/orders", *options)
    give_up(tmp_path / "data", [b"one"])
    cli("topic", "ship", "--all")
    cli("topic", "create", "x/y", "-d", "other", *options)
    with tidelog.open(tmp_path / "data", ingest_check_seconds=0.05) as log:
        topic, letters = log.topic("shop/orders"), log.topic(DEAD)
        (row,) = cli("dlq", "replay", DEAD, "-d", "other", "--json").json
        assert (row["messages"], row["problem"]) == (1, None)
        assert [message.value for message in topic.read(0)] == [b"one", b"one"]
        assert (topic.append(b"still its own"), letters.next_offset) == (2, 1)


def test_letters_that_nobody_takes_in_are_sent_once_all_the_same(
    cli: Cli, dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner does not have the topic open: the letters wait for that, and a second run sends nothing twice."""
    monkeypatch.setattr(dlq_replay, "WAIT_SECONDS", 0.0)
    with tidelog.open(dead):
        for _ in range(2):
            late = cli("dlq", "replay", DEAD, "--json")
            assert (late.code, json.loads(late.err)["error"]["type"]) == (4, "IngestPendingError")
    (row,) = cli("dlq", "replay", DEAD, "--json").json
    assert (row["messages"], row["skipped"]) == (0, 3)
    assert values_of(dead, "shop/orders") == [b"one", b"two", b"three"] * 2


def test_a_run_that_dies_before_letters_are_taken_in(cli: Cli, dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was committed comes in, and the next run knows it."""
    with monkeypatch.context() as patched:
        patched.setattr(dlq_replay, "ingest", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli("dlq", "replay", DEAD, "--max", "2").code == 130
    (row,) = cli("dlq", "replay", DEAD, "--json").json
    assert (row["messages"], row["skipped"]) == (1, 2)
    assert values_of(dead, "shop/orders")[3:] == [b"one", b"two", b"three"]


@pytest.mark.parametrize("slower_sends", [2, 3, None])
def test_two_runs_at_once_send_no_letter_twice(
    dead: Path, monkeypatch: pytest.MonkeyPatch, slower_sends: int | None
) -> None:
    """The slower one finds that its letters were chosen from what is not true any more, and is told to run again."""
    root, hand_over = find_root(dead), dlq_replay._Target.hand_over
    give_up(dead, [b"four"])
    with tidelog.open(dead, read_only=True) as log:

        def overtaken(target: dlq_replay._Target) -> None:
            monkeypatch.setattr(dlq_replay._Target, "hand_over", hand_over)
            assert dlq_replay.Replay(root, log, log.topic(DEAD), None).run(3)[0]["messages"] == 3
            hand_over(target)

        monkeypatch.setattr(dlq_replay._Target, "hand_over", overtaken)
        with pytest.raises(tidelog.ConflictError):
            dlq_replay.Replay(root, log, log.topic(DEAD), None).run(slower_sends)
    assert values_of(dead, "shop/orders")[4:] == [b"one", b"two", b"three"]


def test_into_another_topic(cli: Cli, dead: Path) -> None:
    """Letters can be sent elsewhere; that counts on its own."""
    cli("topic", "create", "shop/again")
    assert cli("dlq", "replay", DEAD).code == 0
    (row,) = cli("dlq", "replay", DEAD, "--into", "shop/again", "--json").json
    assert (row["into"], row["messages"]) == ("shop/again", 3)
    assert values_of(dead, "shop/again") == [b"one", b"two", b"three"]
    assert cli("dlq", "replay", DEAD, "--into", "shop/agian").code == 3


def test_letters_that_cannot_go_back_are_told(cli: Cli, dead: Path) -> None:
    """One without an origin, or from a topic that is gone, stays; the others go, and the exit code says so."""
    with tidelog.open(dead) as log:
        log.topic(DEAD).append(b"by hand")
        log.topic(DEAD).append(b"gone", headers={ORIGIN_TOPIC: b"shop/gone"})
        log.topic(DEAD).append(b"hostile", headers={ORIGIN_TOPIC: b"../../etc"})
    result = cli("dlq", "replay", DEAD, "--json")
    told = {row["into"]: (row["messages"], row["skipped"], row["problem"] is None) for row in result.json}
    assert told == {"shop/orders": (3, 0, True), None: (0, 2, False), "shop/gone": (0, 1, False)}
    assert result.code == 1
    assert "--into" in result.json[1]["problem"]
    assert cli("topic", "list", "--json").json[0]["topic"] == "shop/orders"


def test_dead_letters_made_anew_are_not_taken_for_the_old_ones(cli: Cli, dead: Path) -> None:
    """Deleted and made again, the topic counts from 0 again, and its letters are sent all the same, once."""
    cli("dlq", "replay", DEAD)
    cli("topic", "delete", DEAD, "--yes")
    cli("sub", "seek", "shop/orders", "billing", "latest")
    give_up(dead, [b"four", b"five", b"six", b"seven"])
    (row,) = cli("dlq", "replay", DEAD, "--json").json
    assert (row["messages"], row["skipped"]) == (4, 0)
    (row,) = cli("dlq", "replay", DEAD, "--json").json
    assert (row["messages"], row["skipped"]) == (0, 4)
    assert values_of(dead, "shop/orders")[-4:] == [b"four", b"five", b"six", b"seven"]


def test_a_topic_of_another_node_is_refused(cli: Cli, tmp_path: Path) -> None:
    """One that is not running takes nothing in: its topics are left alone, unless there is the word to take over."""
    options = ["--store", f"file://{tmp_path}/store", "--metadata", "bucket"]
    cli("topic", "create", "shop/orders", *options)
    give_up(tmp_path / "data", [b"one"])
    cli("topic", "ship", "--all")
    cli("topic", "create", "x/y", "-d", "other", *options)
    assert cli("dlq", "list", DEAD, "--json", "-d", "other").json[0]["origin_topic"] == "shop/orders"
    refused = cli("dlq", "replay", DEAD, "-d", "other")
    assert (refused.code, "--take-over" in refused.err) == (4, True)
    assert cli("dlq", "replay", DEAD, "-d", "other", "--take-over").code == 0
    assert values_of(tmp_path / "other", "shop/orders") == [b"one", b"one"]


def test_missing_topics(cli: Cli, tmp_path: Path) -> None:
    """A mistyped topic or directory is an error, and makes nothing."""
    assert cli("dlq", "replay", "a/b.dlq", "-d", "nowhere").code == 3
    assert not (tmp_path / "nowhere").exists()
    cli("topic", "create", "a/b")
    assert cli("dlq", "list", "--json").json == []
    assert cli("dlq", "replay", "a/c").code == 3
