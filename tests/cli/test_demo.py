"""`tidelog demo`: it holds, it can be run again, and it says so when something does not hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, environment

from tidelog.cli.demo import cluster as demo_cluster
from tidelog.cli.demo import steps as demo_steps


@pytest.mark.long
def test_the_demo_proves_itself_with_a_bucket_and_spark(cli: Cli) -> None:
    """All proofs hold, in words, with SeaweedFS and Spark."""
    # As a process: the Java that it starts would stay with this one, in a directory that is gone after this test.
    command = [sys.executable, "-m", "tidelog.cli.main", "demo", "--messages", "2000"]
    first = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert first.returncode == 0, first.stderr
    assert "All proofs hold." in first.stdout
    assert "FAILED" not in first.stdout
    assert "SeaweedFS answers at" in first.stdout
    assert "nothing is missing after the loss of the disk" in first.stdout
    assert "the restored engine has the digest of the lost one" in first.stdout
    assert "nothing that the bucket had acknowledged is lost with a node" in first.stdout
    assert "Spark sees every message of the bucket once" in first.stdout
    assert "the engine that Spark restored has the same digest" in first.stdout
    assert Path("tidelog-demo/report.html").stat().st_size > 1000


def test_the_demo_proves_itself_twice(cli: Cli) -> None:
    """All proofs hold, in words and as JSON, and a second run replaces the first."""
    first = cli("demo", "--messages", "2000", "--local")
    assert first.code == 0, first.err
    assert b"All proofs hold." in first.out
    second = cli("demo", "--messages", "2000", "--json", "--local")
    assert (second.code, second.json["is_proven"], second.json["acknowledged_and_lost"]) == (0, True, 0)
    assert second.json["recovered"] >= 2000 + second.json["acknowledged_before_kill"]
    assert len(second.json["proofs"]) == 11
    assert second.json["served"] == 1000
    assert cli("consume", "demo/orders", "-d", "tidelog-demo/live", "-n", "1").lines[0].startswith('{"order": 0')


def test_the_cluster_is_left_out_without_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo says what to install, and goes on."""
    assert demo_cluster.why_not() is None
    monkeypatch.setattr(demo_cluster, "etcd_program", lambda: None)
    assert "tidelog[dev-cluster]" in (demo_cluster.why_not() or "")


def test_the_demo_touches_nothing_else(cli: Cli, tmp_path: Path) -> None:
    """A directory that is not the demo's own is refused and left alone."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "live").touch()
    result = cli("demo", "-d", "mine")
    assert result.code == 2
    assert "was not made by the demo" in result.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["live"]


def test_a_proof_that_fails_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """When an acknowledged message is not there, the demo says so and ends with code 1."""
    honest = demo_steps.crash

    def with_a_lie(root: Path, target: int, on_done: demo_steps.OnDone) -> demo_steps.Crashed:
        crashed = honest(root, target, on_done)
        crashed.acknowledged[10**9] = b"never appended"
        return crashed

    monkeypatch.setattr(demo_steps, "crash", with_a_lie)
    result = cli("demo", "--messages", "200", "--local")
    assert result.code == 1
    assert "FAILED: every message that was acknowledged as synced is there" in result.out.decode()


def test_what_it_proposes_can_be_pasted(cli: Cli) -> None:
    """Every command that it ends with works as it stands, in the directory where the demo ran."""
    told = cli("demo", "--messages", "200", "-d", "my demo", "--local").out.decode()
    *commands, _bench = [line.strip() for line in told.split("Try next:\n")[1].splitlines()]
    assert len(commands) == 6
    for command in commands:
        script = command.replace("1000000", "1000")
        result = subprocess.run(["sh", "-c", script], env=environment(), capture_output=True, timeout=60, check=False)
        assert (result.returncode, b"error" in result.stderr) == (0, False), command


def test_its_help_names_its_own_directory(cli: Cli) -> None:
    """The demo does not work in the usual log directory, and says so."""
    text = cli("demo", "--help").out.decode()
    assert "[default: ./tidelog-demo]" in text
    assert "./data" not in text
