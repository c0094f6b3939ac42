"""Live topics on the command line: they are listed, and what needs their messages says where those are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli

import tidelog

NAME = "shop/clicks"


def make_topics(tmp_path: Path, store: str | None = None) -> None:
    """One live topic and one that is reliable, in the directory that the commands take by themselves."""
    with tidelog.open(tmp_path / "data", store=store) as log:
        log.topic(NAME, reliable=False).append(b"x")
        log.topic("shop/orders").append(b"x", sync=True)


@pytest.mark.parametrize("command", ["topic list", "verify", "topic prune --all", f"topic describe {NAME}", "sub list"])
def test_a_live_topic_stands_in_no_ones_way(cli: Cli, tmp_path: Path, command: str) -> None:
    """What goes over all topics goes over it too, and finds nothing."""
    make_topics(tmp_path)
    assert cli(*command.split(), "--dir", "data").code == 0


def test_its_messages_are_elsewhere(cli: Cli, tmp_path: Path) -> None:
    """Reading it is an error that says so, and nothing is appended where nobody could read it."""
    make_topics(tmp_path)
    consumed = cli("consume", NAME, "--dir", "data")
    assert consumed.code == 2
    assert "memory of the process" in consumed.err
    produced = cli("produce", NAME, "--dir", "data", stdin=b"one\n")
    assert produced.code == 2
    assert "reliable=False" in produced.err
    assert "in that program" in produced.err


COMMANDS = (
    f"consume {NAME} --subscription screens",
    f"sub list {NAME}",
    f"sub lag {NAME}",
    f"sub describe {NAME} screens",
    f"sub seek {NAME} screens 0",
    f"sub delete {NAME} screens --yes",
    f"topic prune {NAME}",
    f"topic ship {NAME}",
    f"topic seal {NAME}",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_cannot_be_done_with_it_is_refused(cli: Cli, tmp_path: Path, command: str) -> None:
    """With the reason, and not by success that means nothing or by an internal error."""
    make_topics(tmp_path, f"file://{tmp_path}/bucket")
    refused = cli(*command.split(), "--dir", "data")
    assert refused.code == 2
    assert "live topic" in refused.err


@pytest.mark.parametrize("command", ["topic ship --all", "topic prune --all"])
def test_what_goes_over_all_topics_leaves_it_out(cli: Cli, tmp_path: Path, command: str) -> None:
    """There is nothing of it to show."""
    make_topics(tmp_path, f"file://{tmp_path}/bucket")
    done = cli(*command.split(), "--dir", "data", "--json")
    assert [row["topic"] for row in done.json] == ["shop/orders"]


def test_a_topic_that_cannot_be_read_does_not_hide_the_others(cli: Cli, tmp_path: Path) -> None:
    """Whether it is live is in a file that may be damaged."""
    make_topics(tmp_path)
    (tmp_path / "data" / NAME / "topic.json").write_bytes(b"{")
    done = cli("topic", "prune", "--all", "--dir", "data", "--json")
    assert done.code == 1
    assert {row["topic"]: row.get("problem") is None for row in done.json} == {NAME: False, "shop/orders": True}


@pytest.mark.parametrize("has_store", [False, True])
def test_lists_say_that_it_is_live(cli: Cli, tmp_path: Path, has_store: bool) -> None:
    """How many messages it has is not known to another process, and 0 would be wrong."""
    make_topics(tmp_path, f"file://{tmp_path}/bucket" if has_store else None)
    live, kept = cli("topic", "list", "--dir", "data", "--json").json
    assert (live["state"], live["reliable"], live["messages"], live["next_offset"]) == ("live", False, None, None)
    assert (kept["state"], kept["reliable"], kept["messages"]) == ("ok", True, 1)
    assert cli("topic", "list", "--dir", "data").lines[1].endswith("\tlive")
    described = cli("topic", "describe", NAME, "--dir", "data", "--json").json
    assert (described["reliable"], described["messages"]) == (False, None)
    assert "owner" not in described
    assert cli("topic", "describe", "shop/orders", "--dir", "data", "--json").json["reliable"] is True


class TestCreating:
    """`tidelog topic create --live`."""

    def test_the_program_that_opens_it_finds_it_live(self, cli: Cli, tmp_path: Path) -> None:
        """It is remembered in the directory."""
        created = cli("topic", "create", NAME, "--live", "--dir", "data", "--json")
        assert created.json["reliable"] is False
        with tidelog.open(tmp_path / "data") as log:
            assert not log.topic(NAME).is_reliable
        again = cli("topic", "create", NAME, "--live", "--if-missing", "--dir", "data", "--json")
        assert again.json["created"] is False

    @pytest.mark.parametrize(("name", "flags"), [(NAME, ["--if-missing"]), ("shop/orders", ["--if-missing", "--live"])])
    def test_a_topic_stays_what_it_is(self, cli: Cli, tmp_path: Path, name: str, flags: list[str]) -> None:
        """Who wants the other kind is told, whether an existing topic is fine or not."""
        make_topics(tmp_path)
        refused = cli("topic", "create", name, *flags, "--dir", "data")
        assert refused.code == 2
        assert "live" in refused.err
        assert "delete it first" in refused.err

    def test_it_takes_no_settings_of_what_is_kept(self, cli: Cli, tmp_path: Path) -> None:
        """And is not made then."""
        refused = cli("topic", "create", NAME, "--live", "--set", "retention_seconds=60", "--dir", "data")
        assert refused.code == 2
        assert "reliable=False" in refused.err
        assert cli("topic", "list", "--dir", "data", "--json").json == []


@pytest.mark.parametrize("has_store", [False, True])
def test_it_has_no_settings(cli: Cli, tmp_path: Path, has_store: bool) -> None:
    """With a store neither: nothing is left in the catalog of a topic that is not there."""
    make_topics(tmp_path, f"file://{tmp_path}/bucket" if has_store else None)
    refused = cli("topic", "set", NAME, "retention_seconds=60", "--dir", "data")
    assert refused.code == 2
    assert "reliable=False" in refused.err
    shipped = cli("topic", "ship", "--all", "--dir", "data")
    assert shipped.code == (0 if has_store else 2)
    with tidelog.open(tmp_path / "data") as log:
        assert log.configure_topic(NAME) == {}
