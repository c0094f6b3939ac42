"""The command line on topics with transactions: what is shown, what is open, and how a hanging one is ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Spawn
from tests.transactional import PLAIN, Step, fill

import tidelog

STEPS = [PLAIN, Step(7), Step(8), Step(8, commits=False), PLAIN]


@pytest.fixture
def hanging(tmp_path: Path) -> None:
    """Producer 7 has an open transaction, 8 has aborted one."""
    with tidelog.open(tmp_path / "data") as log:
        fill(log.topic("a/b"), STEPS)


@pytest.mark.usefixtures("hanging")
def test_consume_shows_what_is_committed(cli: Cli) -> None:
    """Up to the last stable offset, unless everything is asked for."""
    assert cli("consume", "a/b").lines == ["0"]
    assert cli("consume", "a/b", "--isolation", "read_committed").lines == ["0"]
    assert cli("consume", "a/b", "--isolation", "read_uncommitted").lines == ["0", "1", "2", "4"]
    assert cli("consume", "a/b", "--subscription", "s").lines == ["0"]
    wrong = cli("consume", "a/b", "--isolation", "dirty")
    assert wrong.code == 2
    assert "read_uncommitted" in wrong.err
    assert cli("consume", "a/b", "--subscription", "s", "--isolation", "read_uncommitted").code == 2


@pytest.mark.usefixtures("hanging")
def test_consume_follows_behind_an_open_transaction(cli: Cli, spawn: Spawn, tmp_path: Path) -> None:
    """What was held up when it began to follow is shown once there is an outcome: nothing is left out."""
    consumer = spawn("consume", "a/b", "--follow", "-n", "3")
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == b"0\n"
    with tidelog.open(tmp_path / "data") as log:
        fill(log.topic("a/b"), [Step(7, commits=True)])
    assert consumer.stdout.read() == b"1\n4\n"
    assert consumer.wait(60) == 0


@pytest.mark.usefixtures("hanging")
def test_describe_lists_open_transactions(cli: Cli) -> None:
    """When it is asked to read the topic for that."""
    described = cli("topic", "describe", "a/b", "--transactions", "--json").json
    assert described["last_stable_offset"] == 1
    assert described["open_transactions"] == [{"producer_id": 7, "epoch": 0, "first_offset": 1, "last_offset": 1}]
    assert "open_transactions" not in cli("topic", "describe", "a/b", "--json").json
    assert "last_stable_offset" in cli("topic", "describe", "a/b", "--transactions").out.decode()


def test_describe_knows_the_time_of_the_end_of_a_transaction(cli: Cli, tmp_path: Path) -> None:
    """The last thing in a topic with transactions is no message, but has a time."""
    with tidelog.open(tmp_path / "data") as log:
        fill(log.topic("a/b"), [Step(7), Step(7, commits=True)])
    described = cli("topic", "describe", "a/b", "--json").json
    assert described["last_timestamp"] == "2023-11-14T22:13:20.000001Z"


def test_partitions_are_described_with_their_transactions(cli: Cli, tmp_path: Path) -> None:
    """Each has its own; the name of its log serves to end one."""
    with tidelog.open(tmp_path / "data") as log:
        topic = log.topic("a/b", partitions=2)
        fill(topic.partition(0), STEPS)
        fill(topic.partition(1), [PLAIN])
    first, second = cli("topic", "describe", "a/b", "--transactions", "--json").json["partitions"]
    assert (first["last_stable_offset"], second["last_stable_offset"]) == (1, 1)
    assert ([one["producer_id"] for one in first["open_transactions"]], second["open_transactions"]) == ([7], [])
    assert "last_stable_offset" in cli("topic", "describe", "a/b", "--transactions").lines[0]
    assert cli("topic", "abort-transaction", "a/b-part-0", "--producer-id", 7, "--yes").code == 0
    (first, _) = cli("topic", "describe", "a/b", "--transactions", "--json").json["partitions"]
    assert first["open_transactions"] == []


@pytest.mark.usefixtures("hanging")
def test_abort_transaction_lets_readers_go_on(cli: Cli) -> None:
    """It asks first, says what it has done, and refuses a producer without an open transaction."""
    assert cli("topic", "abort-transaction", "a/b", "--producer-id", 7).code == 2
    assert cli("consume", "a/b").lines == ["0"]
    aborted = cli("topic", "abort-transaction", "a/b", "--producer-id", 7, "--yes", "--json").json
    assert (aborted["first_offset"], aborted["last_stable_offset"]) == (1, 6)
    assert cli("consume", "a/b").lines == ["0", "4"]
    again = cli("topic", "abort-transaction", "a/b", "--producer-id", 7, "--yes")
    assert again.code != 0
    assert "no open transaction" in again.err
