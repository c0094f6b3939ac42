"""Commands that need a topic or an engine for themselves: they leave a living node alone, unless told --take-over."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Cli

import tidelog

NAME = "a/b"


@pytest.fixture
def store(tmp_path: Path) -> list[str]:
    """The options of a store with its catalog."""
    return ["--store", f"file://{tmp_path}/store", "--metadata", "bucket"]


def owner(tmp_path: Path) -> tidelog.LogDirectory:
    """A node of its own, which has the store open."""
    return tidelog.open(tmp_path / "owner", store=f"file://{tmp_path}/store", metadata="bucket")


@pytest.mark.parametrize("command", [("produce", NAME), ("topic", "delete", NAME, "--yes")])
def test_topic_of_a_living_node_is_left_alone(
    cli: Cli, store: list[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    """The error names the node and the option; the node goes on, and loses the topic when that is meant."""
    with owner(tmp_path) as log:
        topic = log.topic(NAME)
        topic.append(b"its own")
        assert topic.ship() == 1
        refused = cli(*command, *store, stdin=b"late\n")
        assert refused.code == 4
        for part in (f"open on {log._info.node}", str(tmp_path / "owner"), "pid ", "--take-over"):
            assert part in refused.err
        topic.append(b"still its own")
        assert topic.ship() == 2
        assert cli(*command, *store, "--take-over", stdin=b"late\n").code == 0
        with pytest.raises(tidelog.FencedError):
            topic.ship()


@pytest.mark.parametrize("command", ["ship", "prune", "seal"])
def test_upkeep_takes_a_topic_from_a_living_node_on_demand(
    cli: Cli, store: list[str], tmp_path: Path, command: str
) -> None:
    """Whatever the lease says: --take-over is meant."""
    assert cli("produce", NAME, "--no-ship", *store, stdin=b"here\n").code == 0
    with owner(tmp_path) as log:
        topic = log.topic(NAME)
        topic.append(b"there")
        topic.ship()
        refused = cli("topic", command, NAME)
        assert (refused.code, "--take-over" in refused.err) == (4, True)
        assert cli("topic", command, NAME, "--take-over").code == 0
        with pytest.raises(tidelog.FencedError):
            topic.ship()


def test_topic_is_free_once_a_command_has_ended(cli: Cli, store: list[str], tmp_path: Path) -> None:
    """A command closes what it opened, and so does a program."""
    assert cli("produce", NAME, *store, stdin=b"one\n").code == 0
    with owner(tmp_path) as log:
        assert log.topic(NAME).append(b"two") == 1
        log.topic(NAME).ship()
    assert "offset 2" in cli("produce", NAME, *store, stdin=b"three\n").err


def engine_of(path: Path, url: str) -> tidelog.Engine:
    engine = tidelog.open_engine(path, store=url)
    engine.apply(1, tidelog.CreateBucket("b"))
    engine.apply(2, tidelog.PutObject("b", "k", b"v" * 500))
    engine.update_low_water_mark(2)
    assert engine.ship() == 2
    return engine


def test_engine_of_a_living_node_is_not_restored(cli: Cli, tmp_path: Path) -> None:
    """Nothing is made; with --take-over it is, and the node is fenced."""
    url = f"file://{tmp_path}/store"
    with engine_of(tmp_path / "engine", url) as engine:
        refused = cli("engine", "restore", "new", "--store", url)
        assert (refused.code, "--take-over" in refused.err, "pid " in refused.err) == (4, True, True)
        assert not (tmp_path / "new").exists()
        assert cli("engine", "restore", "new", "--store", url, "--take-over", "--json").json["applied_seq"] == 2
        with pytest.raises(tidelog.FencedError):
            engine.ship()
    assert cli("engine", "restore", "newer", "--store", url).code == 0, "the command has closed it"


def test_drill_leaves_a_living_engine_alone(cli: Cli, tmp_path: Path) -> None:
    """The copy is there for those who look, and for nobody else; both have the same digest."""
    url = f"file://{tmp_path}/store"
    with engine_of(tmp_path / "engine", url) as engine:
        drill = cli("engine", "restore", "drill", "--store", url, "--drill")
        assert (drill.code, "was not touched" in drill.err) == (0, True)
        assert cli("engine", "get", "b", "k", "-d", "drill").out == b"v" * 500
        assert cli("engine", "digest", "-d", "drill", "--json").json["digest"] == engine.digest()
        assert cli("engine", "verify", "-d", "drill").code == 0
        status = cli("engine", "status", "-d", "drill", "--json").json
        assert (status["is_drill"], status["problems"], status["store"]["lag_bytes"]) == (True, [], None)
        assert cli("engine", "status", "--json").json["is_drill"] is False
        for change in (("ship",), ("checkpoint",), ("compact",), ("gc", "--apply")):
            refused = cli("engine", *change, "-d", "drill")
            assert (refused.code, "restore drill" in refused.err) == (2, True), change
        assert cli("engine", "restore", "other", "--store", url, "--drill", "--take-over").code == 2
        engine.apply(3, tidelog.DeleteObject("b", "k"))
        engine.update_low_water_mark(3)
        assert engine.ship() == 3
