"""`tidelog sub` and `tidelog consume --subscription`: positions seen, moved and used from the shell."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Spawn

import tidelog
from tidelog.topics.subscription.group_offsets import GroupOffset, OffsetKey

COUNT = 20
VALUES = [b"v%d" % number for number in range(COUNT)]


@pytest.fixture
def billing(tmp_path: Path) -> None:
    """Twenty messages in a/b, of which the subscription billing has acknowledged five and the seventh."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/b")
        topic.append_many(VALUES)
        with topic.subscribe("billing", "shared", hold_retention=True) as sub:
            messages = sub.receive_many(7, timeout=120)
            sub.ack_many([*messages[:5], messages[6]])


@pytest.fixture
def store(tmp_path: Path) -> list[str]:
    """A topic a/b with the subscription billing, in a store; the options that name it."""
    url = f"file://{tmp_path}/store"
    with tidelog.open(tmp_path / "data", store=url, metadata="bucket") as log:
        topic = log.topic("a/b")
        topic.append_many(VALUES)
        with topic.subscribe("billing") as sub:
            sub.ack_many(sub.receive_many(5, timeout=120))
        topic.ship()
    return ["--store", url, "--metadata", "bucket"]


def shown(*offsets: int) -> bytes:
    """What consume prints of these messages."""
    return b"".join(VALUES[offset] + b"\n" for offset in offsets)


# Looking


@pytest.mark.usefixtures("billing")
def test_list_and_describe(cli: Cli) -> None:
    """Kind, position and what is open are shown as they are stored."""
    cli("topic", "create", "a/other")
    for options in ((), ("--all",), ("a/b",)):
        (row,) = cli("sub", "list", *options, "--json").json
        assert (row["topic"], row["subscription"], row["kind"]) == ("a/b", "billing", "shared")
        assert (row["offset"], row["acked_above"], row["lag_messages"], row["problem"]) == (5, 1, 14, None)
    assert cli("sub", "list", "a/other", "--json").json == []
    described = cli("sub", "describe", "a/b", "billing", "--json").json
    assert (described["next_offset"], described["hold_retention"], described["dead_letter_topic"]) == (20, True, None)
    header, line = cli("sub", "list").lines
    assert dict(zip(header.split("\t"), line.split("\t"), strict=True))["lag_messages"] == "14"


@pytest.mark.usefixtures("billing")
def test_lag_in_messages_and_seconds(cli: Cli) -> None:
    """The lag is counted from the first message that is not acknowledged, and is nothing once all are."""
    (row,) = cli("sub", "lag", "a/b", "billing", "--json").json
    assert row["lag_messages"] == 14
    assert 0 < row["lag_seconds"] < 600
    assert row["oldest"] is not None
    cli("consume", "a/b", "--subscription", "billing")
    (row,) = cli("sub", "lag", "--json").json
    assert (row["lag_messages"], row["lag_seconds"], row["oldest"]) == (0, 0, None)


def test_looking_works_beside_the_owner(cli: Cli, tmp_path: Path) -> None:
    """A process that has the topic open does not keep others from seeing its subscriptions, and is not disturbed."""
    with tidelog.open(tmp_path / "data") as log, log.topic("a/b").subscribe("billing") as sub:
        log.topic("a/b").append_many(VALUES, sync=True)
        sub.ack_many(sub.receive_many(3, timeout=120))
        sub.flush()
        (row,) = cli("sub", "list", "--json").json
        assert (row["offset"], row["lag_messages"]) == (3, 17)
        assert cli("sub", "seek", "a/b", "billing", "0").code == 4
        log.topic("a/b").append(b"more", sync=True)


def test_looking_at_a_store_claims_nothing(cli: Cli, store: list[str], tmp_path: Path) -> None:
    """Another directory sees the subscriptions of a topic, and its owner goes on."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/b")
        for command in (("list",), ("lag",), ("describe", "a/b", "billing")):
            result = cli("sub", *command, "-d", "other", "--json", *store)
            assert result.code == 0, result.err
        topic.append(b"more", sync=True)
        topic.ship()
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("billing")
def test_a_damaged_position_does_not_hide_the_others(cli: Cli, tmp_path: Path) -> None:
    """A position that cannot be read is listed with its problem, and the exit code says so."""
    from tidelog.store.keys import TopicKeys
    from tidelog.store.metadata.sqlite import SqliteMetadataStore

    metadata = SqliteMetadataStore(tmp_path / "data" / "metadata.db")
    metadata.put(TopicKeys("a", "b").subscription("broken"), b"{")
    metadata.close()
    result = cli("sub", "list", "--json")
    good, bad = result.json
    assert (result.code, good["offset"], bad["subscription"]) == (1, 5, "broken")
    assert "cannot be understood" in bad["problem"]
    assert "problem: a/b broken: " in cli("sub", "list").err


@pytest.mark.usefixtures("billing")
@pytest.mark.parametrize(
    "command", [("describe", "a/b", "biling"), ("lag", "a/b", "biling"), ("seek", "a/b", "biling", "0")]
)
def test_a_missing_subscription_suggests_the_nearest(cli: Cli, command: tuple[str, ...]) -> None:
    """A mistyped name is an error that names what was meant."""
    result = cli("sub", *command)
    assert (result.code, "Did you mean billing?" in result.err) == (3, True)
    assert [row["subscription"] for row in cli("sub", "list", "--json").json] == ["billing"]


# Changing


@pytest.mark.usefixtures("billing")
def test_an_option_that_seek_does_not_know_is_refused(cli: Cli) -> None:
    """Though -4 is a position."""
    assert cli("sub", "seek", "a/b", "billing", "0", "--jsno").code == 2
    assert "--jsno" in cli("sub", "seek", "a/b", "billing", "--jsno").err


@pytest.mark.usefixtures("billing")
@pytest.mark.parametrize(
    ("position", "offset"),
    [(("3",), 3), (("earliest",), 0), (("latest",), 20), (("--", "-4"), 16), (("-4",), 16)],
)
def test_seek(cli: Cli, position: tuple[str, ...], offset: int) -> None:
    """A subscription is moved by offset, by name or from the end, and stays what it was otherwise."""
    moved = cli("sub", "seek", "a/b", "billing", "--json", *position).json
    assert (moved["offset_before"], moved["offset"], moved["lag_messages"]) == (5, offset, COUNT - offset)
    described = cli("sub", "describe", "a/b", "billing", "--json").json
    assert (described["kind"], described["hold_retention"]) == ("shared", True)
    assert cli("consume", "a/b", "--subscription", "billing").out == shown(*range(offset, COUNT))


@pytest.mark.usefixtures("billing")
def test_seek_to_a_time(cli: Cli) -> None:
    """A time in the past is the beginning; one in the future is the end."""
    assert cli("sub", "seek", "a/b", "billing", "2020-01-01", "--json").json["offset"] == 0
    assert cli("sub", "seek", "a/b", "billing", "2999-01-01T00:00:00Z", "--json").json["offset"] == COUNT


@pytest.mark.usefixtures("billing")
@pytest.mark.parametrize("position", ["21", "soon"])
def test_positions_that_cannot_be(cli: Cli, position: str) -> None:
    """A position that is not in the topic is refused, and nothing moves."""
    assert cli("sub", "seek", "a/b", "billing", position).code in (2, 3)
    assert cli("sub", "list", "--json").json[0]["offset"] == 5


@pytest.mark.usefixtures("billing")
def test_delete_asks_first(cli: Cli) -> None:
    """Where nobody can answer it needs --yes; the messages stay."""
    result = cli("sub", "delete", "a/b", "billing")
    assert (result.code, "--yes" in result.err) == (2, True)
    assert cli("sub", "delete", "a/b", "billing", "--yes").code == 0
    assert cli("sub", "list", "--json").json == []
    assert cli("consume", "a/b").out == shown(*range(COUNT))


@pytest.mark.parametrize(
    "command",
    [
        ("sub", "seek", "a/b", "billing", "earliest"),
        ("sub", "delete", "a/b", "billing", "--yes"),
        ("consume", "a/b", "--subscription", "billing"),
    ],
)
def test_a_topic_of_another_node_is_refused(cli: Cli, store: list[str], command: tuple[str, ...]) -> None:
    """What needs the owner is not done from elsewhere, unless the topic is to be taken over."""
    refused = cli(*command, "-d", "other", *store)
    if refused.code == 3:  # consuming makes no directory
        cli("topic", "create", "x/y", "-d", "other", *store)
        refused = cli(*command, "-d", "other", *store)
    assert (refused.code, "--take-over" in refused.err) == (4, True)
    assert cli("sub", "list", "--json").json[0]["offset"] == 5
    assert cli(*command, "-d", "other", "--take-over", *store).code == 0
    positions = [row["offset"] for row in cli("sub", "list", "a/b", "--json").json]
    assert positions == {"seek": [0], "delete": [], "a/b": [COUNT]}[command[1]]


# Consuming


@pytest.mark.usefixtures("billing")
def test_consuming_goes_on_where_it_was_left(cli: Cli) -> None:
    """Each run shows what no run before has acknowledged, in the form that was asked for."""
    assert cli("consume", "a/b", "--subscription", "billing", "--max", "2").out == shown(5, 7)
    assert cli("consume", "a/b", "-s", "billing", "-n", "1", "--format", "%o %v\n").out == b"8 v8\n"
    assert cli("consume", "a/b", "-s", "billing").out == shown(*range(9, COUNT))
    assert cli("consume", "a/b", "-s", "billing").out == b""
    cli("produce", "a/b", stdin=b"new\n")
    assert cli("consume", "a/b", "-s", "billing", "--json", "--no-ack").json["delivery_count"] == 1
    assert cli("consume", "a/b", "-s", "billing", "--json").json["value"] == "new"


def test_a_new_subscription_begins_where_it_is_told(cli: Cli) -> None:
    """--from counts for a new one only, and who gives it for another one is told."""
    cli("produce", "a/b", stdin=b"".join(value + b"\n" for value in VALUES))
    assert cli("consume", "a/b", "-s", "tail", "--kind", "shared", "--start", "-2").out == shown(18, 19)
    again = cli("consume", "a/b", "-s", "tail", "--from", "earliest")
    assert (again.out, "resumes at offset 20" in again.err) == (b"", True)
    assert cli("consume", "a/b", "-s", "all").out == shown(*range(COUNT))
    kinds = {row["subscription"]: row["kind"] for row in cli("sub", "list", "--json").json}
    assert kinds == {"all": "exclusive", "tail": "shared"}
    assert "changes its kind from shared to failover" in cli("consume", "a/b", "-s", "tail", "--kind", "failover").err


@pytest.mark.usefixtures("billing")
def test_looking_without_acknowledging(cli: Cli) -> None:
    """With --no-ack the same messages come again."""
    for _ in range(2):
        assert cli("consume", "a/b", "-s", "billing", "--no-ack", "-n", "2").out == shown(5, 7)


@pytest.mark.parametrize("options", [(), ("--follow",), ("-n", "10030")])
def test_looking_ends_where_nothing_more_is_handed_out(cli: Cli, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Without acknowledgements it shows the first ten thousand and says so, rather than waiting for ever."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("a/b").append_many([b"x"] * 10_050)
    result = cli("consume", "a/b", "-s", "peek", "--no-ack", *options)
    assert (result.code, len(result.lines), "only the first 10,000" in result.err) == (0, 10_000, True)


@pytest.mark.usefixtures("billing")
def test_a_broken_pipe_acknowledges_nothing_that_was_not_written(spawn: Spawn, cli: Cli) -> None:
    """When the reader is gone before anything could be written, everything comes again."""
    child = spawn("consume", "a/b", "-s", "billing")
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(timeout=120) == 0
    assert cli("sub", "list", "--json").json[0]["offset"] == 5


def wait_until_idle(pid: int) -> None:
    """Until all threads of a process have been seen to wait many times in a row."""
    idle, threads = 0, Path(f"/proc/{pid}/task")
    while idle < 30:
        states = {one.read_text("ascii").rpartition(")")[2].split()[0] for one in threads.glob("*/stat")}
        idle = idle + 1 if states == {"S"} else 0
        time.sleep(0.01)


@pytest.mark.usefixtures("billing")
def test_following_shows_at_once_and_ends_with_ctrl_c(spawn: Spawn, cli: Cli) -> None:
    """What is there is written at once; interrupted, what was written is acknowledged and stored."""
    child = spawn("consume", "a/b", "-s", "billing", "--follow")
    assert child.stdout is not None
    assert child.stdout.read(len(shown(5, 7))) == shown(5, 7)
    assert child.stdout.read(len(shown(*range(8, COUNT)))) == shown(*range(8, COUNT))
    wait_until_idle(child.pid)  # interrupted between writing and acknowledging, they would come again
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=120) == 130
    assert cli("sub", "list", "--json").json[0]["lag_messages"] == 0


@pytest.mark.usefixtures("billing")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--kind", "shared"), "--subscription"),
        (("--no-ack",), "--subscription"),
        (("-s", "x", "--to", "5"), "--max-messages"),
        (("-s", "x", "--kind", "sharde"), "key_shared"),
    ],
)
def test_options_that_do_not_fit(cli: Cli, options: tuple[str, ...], text: str) -> None:
    """Each is refused with what to do instead, and no subscription is made."""
    result = cli("consume", "a/b", *options)
    assert (result.code, text in result.err) == (2, True)
    assert [row["subscription"] for row in cli("sub", "list", "--json").json] == ["billing"]


def test_consuming_makes_no_directory(cli: Cli, tmp_path: Path) -> None:
    """A mistyped directory is an error, not a new one."""
    assert cli("consume", "a/b", "-s", "x", "-d", "nowhere").code == 3
    assert not (tmp_path / "nowhere").exists()


# Consumer groups


@pytest.fixture
def group(tmp_path: Path) -> None:
    """A topic a/p with two partitions of ten messages each, and the consumer group readers, at 4 and 7."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/p", partitions=2)
        for number in (0, 1):
            topic.partition(number).append_many(VALUES[:10])
        offsets = {OffsetKey("readers", "a/p", number): GroupOffset(4 + 3 * number, 1, "m") for number in (0, 1)}
        assert log._group_offsets.store(offsets) == {}


@pytest.mark.usefixtures("billing", "group")
def test_groups_are_listed_beside_subscriptions(cli: Cli) -> None:
    """With the kind group, one row a partition, and their lag."""
    rows = cli("sub", "list", "--json").json
    assert [(row["topic"], row["subscription"], row["kind"], row["offset"], row["lag_messages"]) for row in rows] == [
        ("a/b", "billing", "shared", 5, 14),
        ("a/p-part-0", "readers", "group", 4, 6),
        ("a/p-part-1", "readers", "group", 7, 3),
    ]
    rows = cli("sub", "lag", "a/p", "readers", "--json").json
    assert [(row["lag_messages"], row["oldest"] is None) for row in rows] == [(6, False), (3, False)]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("position", "expected"), [("earliest", [0, 0]), ("latest", [10, 10]), ("8", [8, 8]), ("-2", [8, 8])]
)
def test_a_group_is_moved_in_all_partitions(cli: Cli, position: str, expected: list[int]) -> None:
    """Its next consumers begin there; what was committed with the old offset is gone."""
    moved = cli("sub", "seek", "a/p", "readers", position, "--json").json
    assert [(row["offset_before"], row["offset"]) for row in moved["partitions"]] == list(
        zip([4, 7], expected, strict=True)
    )
    assert [row["offset"] for row in cli("sub", "list", "a/p", "--json").json] == expected


@pytest.mark.usefixtures("group")
def test_a_group_is_deleted_in_all_partitions(cli: Cli) -> None:
    """After a confirmation."""
    assert cli("sub", "delete", "a/p", "readers").code != 0
    assert len(cli("sub", "list", "a/p", "--json").json) == 2
    cli("sub", "delete", "a/p", "readers", "--yes")
    assert cli("sub", "list", "a/p", "--json").json == []


@pytest.mark.usefixtures("billing")
def test_a_name_that_two_have_is_not_guessed(cli: Cli, tmp_path: Path) -> None:
    """Neither the subscription nor the group is moved or deleted."""
    with tidelog.open(tmp_path / "data") as log:
        log._group_offsets.store({OffsetKey("billing", "a/b", 0): GroupOffset(1)})
    for words in (("seek", "a/b", "billing", "0"), ("delete", "a/b", "billing", "--yes")):
        refused = cli("sub", *words)
        assert refused.code == 2
        assert "consumer group" in refused.err
    assert [row["kind"] for row in cli("sub", "list", "--json").json] == ["shared", "group"]
