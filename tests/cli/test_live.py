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
