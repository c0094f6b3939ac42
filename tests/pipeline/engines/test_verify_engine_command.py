"""`tidelog pipeline verify --engine`, `digest` and `cost` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.engines.computing import work_without_spark

import tidelog
from tidelog.cli.main import main

OTHER = "0" * 64


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


class Shell:
    """An engine's directory with its store, and the command line in this process."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory / "engine"
        self.store = directory / "store"
        self._capsys = capsys
        with self.opened() as engine:
            engine.apply(1, tidelog.CreateBucket("photos"))
            engine.apply_many([(seq, tidelog.PutObject("photos", f"cat-{seq}", bytes(500))) for seq in range(2, 30)])
            engine.update_low_water_mark(29)
            engine.ship()
            self.digest = engine.digest()

    def opened(self) -> tidelog.Engine:
        return tidelog.open_engine(self.directory, store=self.store.as_uri())

    def run(self, *arguments: str) -> Result:
        self._capsys.readouterr()
        code = main(["pipeline", *arguments])
        found = self._capsys.readouterr()
        return Result(code, found.out, found.err)


@pytest.fixture
def shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Shell:
    """With a session that is running already; the work is done here."""
    work_without_spark(monkeypatch)
    return Shell(tmp_path, capsys)


def test_an_engine_is_verified_with_its_own_digest(shell: Shell) -> None:
    """By its directory the node's own digest is compared too; while somebody has it open that is noted."""
    found = shell.run("verify", "--engine", str(shell.directory), "--json")
    report = json.loads(found.out)
    assert (found.code, report["digest"], report["seq"], report["notes"]) == (0, shell.digest, 29, [])
    with shell.opened():
        again = shell.run("verify", "--engine", str(shell.directory), "--json")
    assert (again.code, json.loads(again.out)["is_good"]) == (0, True)
    assert "could not be asked" in json.loads(again.out)["notes"][0]


def test_what_is_wrong_is_listed(shell: Shell) -> None:
    """On stderr, and the exit code is 1; a digest that is not the one that was given is wrong as well."""
    found = shell.run("verify", "--engine", shell.store.as_uri(), "--digest", OTHER, "--replica", shell.store.as_uri())
    assert (found.code, f"is {shell.digest}, not {OTHER}" in found.err) == (1, True)
    slip = shell.run("verify", "--engine", shell.store.as_uri(), "--digest", "00")
    assert (slip.code, "--digest 00 is not the digest of an engine" in slip.err) == (2, True)
    path = next((shell.store / "storage/engine/main/objects").glob("*.tlog"))
    path.write_bytes(path.read_bytes()[:-1])
    found = shell.run("verify", "--engine", shell.store.as_uri())
    assert (found.code, "problem: engine main: " in found.err) == (1, True)


def test_topics_and_engines_are_not_mixed(shell: Shell) -> None:
    """Options of one for the other are refused by name."""
    mixed = shell.run("verify", "shop/orders", "--engine", shell.store.as_uri())
    assert (mixed.code, "TOPIC is for topics" in mixed.err) == (2, True)
    alone = shell.run("verify", "--digest", "00")
    assert (alone.code, "--digest is for engines" in alone.err) == (2, True)


def test_a_digest_is_a_line(shell: Shell) -> None:
    """The one that the engine tells; a seq that is not in the store is refused."""
    found = shell.run("digest", "--engine", shell.store.as_uri())
    assert (found.code, found.out.splitlines()[0]) == (0, shell.digest)
    earlier = json.loads(
        shell.run("digest", "--engine", str(shell.directory), "--seq", "7", "--from-log", "--json").out
    )
    with shell.opened() as engine:
        assert (earlier["seq"], earlier["digest"]) == (7, engine.digest(7))
    later = shell.run("digest", "--engine", shell.store.as_uri(), "--seq", "30")
    assert (later.code, "the log up to seq 29" in later.err) == (2, True)


def test_costs_are_shown(shell: Shell, tmp_path: Path) -> None:
    """A row for each moment, with prices from options or a file."""
    found = shell.run("cost", "--engine", shell.store.as_uri(), "--price-get", "1000")
    assert (found.code, "after compaction and gc (estimated)" in found.out) == (0, True)
    prices = tmp_path / "prices.toml"
    prices.write_text(f'[stores."{shell.store.as_uri()}"]\nget = 7\n')
    report = json.loads(shell.run("cost", "--engine", shell.store.as_uri(), "--prices", str(prices), "--json").out)
    assert report["stores"][0]["prices"]["get"] == 7
    assert report["stores"][0]["scenarios"][0]["cold_reads"]["price"] == pytest.approx(7 * 1000)
