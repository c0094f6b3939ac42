"""`tidelog topic`: list, create, describe, delete."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli

import tidelog


def test_create_list_describe_delete(cli: Cli, tmp_path: Path) -> None:
    """The life of a topic."""
    assert cli("topic", "create", "shop/orders").code == 0
    cli("produce", "shop/orders", stdin=b"a\nbb\n")
    cli("topic", "create", "shop/empty")
    (empty, orders) = cli("topic", "list", "--json").json
    assert (empty["topic"], empty["messages"], empty["state"]) == ("shop/empty", 0, "ok")
    assert (orders["topic"], orders["next_offset"], orders["files"]) == ("shop/orders", 2, 1)
    described = cli("topic", "describe", "shop/orders", "--json").json
    assert described["messages"] == 2
    assert described["bytes"] == sum(p.stat().st_size for p in (tmp_path / "data/shop/orders").glob("wal.*.log"))
    assert described["first_timestamp"] <= described["last_timestamp"]
    assert cli("topic", "delete", "shop/orders", "--yes").code == 0
    assert [row["topic"] for row in cli("topic", "list", "--json").json] == ["shop/empty"]


def test_tables_in_a_pipe(cli: Cli) -> None:
    """In a pipe a table is a header and tab-separated lines, and a record is a line a property."""
    cli("produce", "a/b", stdin=b"x\n")
    header, row = cli("topic", "list").lines
    expected = "topic start_offset hot_start_offset shipped_offset next_offset messages files bytes state"
    assert header.split("\t") == expected.split()
    assert row.split("\t")[:6] == ["a/b", "0", "0", "", "1", "1"]
    record = dict(line.split("\t") for line in cli("topic", "describe", "a/b").lines)
    assert record["next_offset"] == "1"


def test_an_empty_list_is_still_a_table(cli: Cli) -> None:
    """Without topics there is a header alone, and an empty array."""
    cli("topic", "create", "a/b")
    cli("topic", "delete", "a/b", "-y")
    assert len(cli("topic", "list").lines) == 1
    assert cli("topic", "list", "--json").json == []


def test_an_empty_topic_is_described(cli: Cli) -> None:
    """A topic without messages has no times."""
    cli("topic", "create", "a/b")
    described = cli("topic", "describe", "a/b", "--json").json
    assert (described["messages"], described["first_timestamp"], described["last_timestamp"]) == (0, None, None)


def test_creating_twice(cli: Cli) -> None:
    """A topic that exists already is an error, unless that is allowed."""
    cli("topic", "create", "a/b")
    result = cli("topic", "create", "a/b")
    assert result.code == 2
    assert "--if-missing" in result.err
    assert cli("topic", "create", "a/b", "--if-missing", "--json").json["created"] is False


def test_deleting_asks_first(cli: Cli) -> None:
    """Where nobody can answer, nothing is deleted without --yes."""
    cli("produce", "a/b", stdin=b"x\n")
    result = cli("topic", "delete", "a/b")
    assert result.code == 2
    assert "--yes" in result.err
    assert cli("consume", "a/b").out == b"x\n"


@pytest.mark.parametrize("command", [("describe", "x/y"), ("delete", "x/y", "-y")])
def test_topics_that_are_not_there(cli: Cli, command: tuple[str, ...]) -> None:
    """A missing topic is an error of its own kind."""
    cli("topic", "create", "a/b")
    result = cli("topic", *command)
    assert result.code == 3
    assert "error: there is no topic x/y" in result.err


def test_a_damaged_topic_does_not_hide_the_others(cli: Cli, tmp_path: Path) -> None:
    """A topic that cannot be opened is marked in the list, told once with a hint, and all others are shown as usual."""
    with tidelog.open(tmp_path / "data") as log:
        for name in ("a/bad", "a/good"):
            log.topic(name).append_many([b"x" * 50] * 100)
    (path,) = (tmp_path / "data/a/bad").glob("wal.*.log")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    bad, good = cli("topic", "list", "--json").json
    assert bad["state"] == "damaged"
    assert path.name in bad["problem"]
    listed = cli("topic", "list")
    assert listed.code == 0
    assert listed.lines[1].split("\t")[-1] == "damaged"
    problem, hint = listed.err.splitlines()
    assert problem.startswith("problem: a/bad: ")
    assert "repair a/bad`" in hint
    assert (good["state"], good["messages"]) == ("ok", 100)
