"""Topics with partitions on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli


def rows(text: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_messages_are_produced_by_key_and_consumed_merged(cli: Cli) -> None:
    """Each key is in one partition, and all of them are read."""
    assert cli("topic", "create", "shop/orders", "--partitions", "3").code == 0
    lines = "".join(f"k{number % 5}:{number}\n" for number in range(50))
    result = cli("--json", "produce", "shop/orders", "--key-separator", ":", stdin=lines.encode())
    document = json.loads(result.out)
    assert document["messages"] == 50
    assert sum(document["partitions"].values()) == 50
    assert sorted(map(int, cli("consume", "shop/orders").out.split())) == list(range(50))
    found = [rows(cli("--json", "consume", "shop/orders", "--partition", str(n)).out) for n in range(3)]
    assert sum(map(len, found)) == 50
    keys = [{row["key"] for row in part} for part in found]
    assert sum(map(len, keys)) == 5, "no key is in two partitions"
    by_partition = {number: {row["partition"] for row in part} for number, part in enumerate(found)}
    assert by_partition == {number: {number} for number in range(3)}
    assert {row["partition"] for row in rows(cli("--json", "consume", "shop/orders").out)} == {0, 1, 2}
    assert list(document["partitions"]) == ["0", "1", "2"]


def test_one_partition_is_produced_to(cli: Cli) -> None:
    """Whatever the key says; one that does not exist is refused by name."""
    cli("topic", "create", "shop/orders", "--partitions", "2")
    assert "shop/orders-part-1: offset 0" in cli("produce", "shop/orders", "--partition", "1", stdin=b"v\n").err
    assert cli("--json", "produce", "shop/orders", "--partition", "0", stdin=b"v\n").json["partition"] == 0
    result = cli("produce", "shop/orders", "--partition", "2", stdin=b"v\n")
    assert (result.code, "partitions 0 to 1, not 2" in result.err) == (2, True)


def test_partitions_are_listed_and_described(cli: Cli) -> None:
    """Each with its own offsets; commands for one log name its partitions."""
    cli("topic", "create", "shop/orders", "--partitions", "2")
    cli("produce", "shop/orders", "--partition", "1", stdin=b"v\n")
    listed = json.loads(cli("--json", "topic", "list").out)
    assert [(row["topic"], row["next_offset"]) for row in listed] == [
        ("shop/orders-part-0", 0),
        ("shop/orders-part-1", 1),
    ]
    described = json.loads(cli("--json", "topic", "describe", "shop/orders").out)
    assert [row["next_offset"] for row in described["partitions"]] == [0, 1]
    result = cli("consume", "shop/orders", "--subscription", "billing")
    assert (result.code, "Name one of them, for example shop/orders-part-0" in result.err) == (2, True)
    assert cli("consume", "shop/orders", "--partition", "1", "--subscription", "billing").out == b"v\n"
    assert b"shop/orders-part-1" in cli("sub", "list", "shop/orders").out


def test_existing_topic_gets_partitions(cli: Cli) -> None:
    """What it has becomes partition 0; deleting it deletes all."""
    cli("produce", "shop/orders", stdin=b"old\n")
    assert cli("topic", "create", "shop/orders", "--partitions", "3").code == 2
    assert cli("topic", "create", "shop/orders", "--partitions", "3", "--if-missing").code == 0
    cli("produce", "shop/orders", "--partition", "2", stdin=b"new\n")
    assert cli("consume", "shop/orders").out.split() == [b"old", b"new"]
    assert len(json.loads(cli("--json", "topic", "list").out)) == 3
    assert cli("topic", "delete", "shop/orders", "--yes").code == 0
    assert json.loads(cli("--json", "topic", "list").out) == []


def test_commands_for_one_log_name_the_partitions(cli: Cli) -> None:
    """They said that all was well, and had looked at nothing."""
    cli("topic", "create", "shop/orders", "--partitions", "2")
    for command in ("inspect", "repair"):
        result = cli(command, "shop/orders")
        assert (result.code, "Name one of them, for example shop/orders-part-1" in result.err) == (2, True)


def test_verify_of_a_topic_reads_all_its_partitions(cli: Cli, tmp_path: Path) -> None:
    """Also of one that got them later, whose first partition has the plain name; damage in any of them is found."""
    cli("topic", "create", "shop/orders", "--partitions", "2")
    cli("produce", "shop/grown", stdin=b"v\n")
    cli("topic", "create", "shop/grown", "--partitions", "2", "--if-missing")
    for topic, logs in (
        ("shop/orders", ["shop/orders-part-0", "shop/orders-part-1"]),
        ("shop/grown", ["shop/grown", "shop/grown-part-1"]),
    ):
        for number in "01":
            cli("produce", topic, "--partition", number, stdin=b"v\n")
        found = cli("--json", "verify", topic)
        assert (found.code, [row["target"] for row in found.json]) == (0, logs)
        assert all(row["frames"] for row in found.json)
        (damaged,) = tmp_path.rglob(f"{topic}-part-1/wal.*.log")
        damaged.write_bytes(b"\xff" + damaged.read_bytes()[1:])
        again = cli("--json", "verify", topic)
        assert (again.code, [bool(row["problems"]) for row in again.json]) == (1, [False, True])
    assert [row["target"] for row in cli("--json", "verify", "shop/orders-part-0").json] == ["shop/orders-part-0"]
