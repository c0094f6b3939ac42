"""The session that stays for later commands: who uses it, who does not, and when it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.pipeline.spark_servers import SOURCES

import tidelog
from tidelog.pipeline.session import kept
from tidelog.pipeline.session.kept import Kept, find_kept, identity, keep, running, stop_kept

LIMIT_SECONDS = 600
ADDRESS = Kept(pid=1, port=9, token="t", master="local[2]", idle_seconds=60.0, identity={})
# A client that has another token.
STRANGER = """
import os, sys
os.environ["SPARK_CONNECT_AUTHENTICATE_TOKEN"] = "another"
from pyspark.sql import SparkSession
try:
    SparkSession.builder.remote(sys.argv[1]).getOrCreate().range(1).count()
except Exception as error:
    print(type(error).__name__, error)
"""
PIPELINE = """
name = "fragile"
places.shop.root = "./data"
[[steps]]
name = "verify"
do = "verify"
"""
OWN_PIPELINE = """
name = "own"
places.shop.root = "./data"
[[steps]]
name = "count"
do = "python"
function = "kept_jobs:count"
"""
# Python runs this when it starts: a run kills the kept session as soon as it has one, with its Java: alone, that takes
# a moment to notice, in which a short step may end.
KILLING = """
import os, signal, sys, threading, time

def kill():
    while not getattr(kept := sys.modules.get("tidelog.pipeline.session.kept"), "_servers", None):
        time.sleep(0.02)
    os.killpg(kept.running().pid, signal.SIGKILL)

if "run" in sys.orig_argv:
    threading.Thread(target=kill, daemon=True).start()
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in kept._OTHERS:
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "cache" / "tidelog" / "spark" / "kept"
    place.mkdir(parents=True)
    return place


def tidelog_pipeline(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), **variables}
    command = [sys.executable, "-m", "tidelog.cli.main", "pipeline", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


def test_without_java_no_server_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error is that of every session: what is missing, and how to get it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tidelog.ConfigError) as told:
        keep("local[1]")
    assert told.value.message == "there is no java on the path"
    assert not (tmp_path / "cache").exists()


def test_commands_use_the_kept_session_until_it_is_stopped(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They work without a Java of their own then; with another environment or master they would need one."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("shop/orders").append_many([b"a", b"b", b"c"], sync=True)
    verify = ("verify", "--root", str(tmp_path / "data"))
    without_java = {"PATH": str(tmp_path)}
    started = tidelog_pipeline("shell", "--keep", "--master", "local[2]")
    try:
        assert started.returncode == 0, started.stderr
        address = msgspec.json.decode((directory / "address.json").read_bytes(), type=Kept)
        assert (directory / "address.json").stat().st_mode & 0o077 == 0
        monkeypatch.setenv("PYTHONPATH", str(SOURCES))  # as that of the command
        assert keep() == address

        done = tidelog_pipeline(*verify, **without_java)
        assert done.returncode == 0, done.stderr
        assert "shop/orders" in done.stdout
        other = tidelog_pipeline(*verify, **without_java, AWS_REGION="elsewhere")
        assert "not used, for it was started with another: AWS_REGION" in other.stderr
        assert "there is no java on the path" in other.stderr
        other = tidelog_pipeline(*verify, "--master", "local[1]", **without_java)
        assert "there is no java on the path" in other.stderr
        (tmp_path / "pipeline.toml").write_text(OWN_PIPELINE)
        (tmp_path / "kept_jobs.py").write_text(
            "def count(spark, context):\n    return {'rows': spark.range(5).count()}\n"
        )
        other = tidelog_pipeline("run", str(tmp_path / "pipeline.toml"), **without_java)
        assert "there is no java on the path" in other.stdout + other.stderr, "workers know a function as it was"

        stranger = [sys.executable, "-c", STRANGER, address.remote]
        said = subprocess.run(stranger, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False).stdout
        assert "authentication token" in said.lower() or "UNAUTHENTICATED" in said, said
    finally:
        ended = tidelog_pipeline("shell", "--stop")
    assert "has ended" in ended.stdout
    assert stop_kept() is False
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address.port))


def test_run_whose_kept_session_is_killed_goes_on_with_its_own(directory: Path, tmp_path: Path) -> None:
    """The client of Spark would ask the dead server for ten minutes; nothing is left of the server."""
    with tidelog.open(tmp_path / "data") as log:
        log.topic("shop/orders").append(b"a")
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    (tmp_path / "sitecustomize.py").write_text(KILLING)
    with_killer = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCES}"}
    started = tidelog_pipeline("shell", "--keep", "--master", "local[2]", **with_killer)
    try:
        assert started.returncode == 0, started.stderr
        done = tidelog_pipeline("run", str(tmp_path / "pipeline.toml"), "--json", **with_killer)
        assert done.returncode == 0, done.stderr
        (step,) = msgspec.json.decode(done.stdout)["steps"]
        assert (step["status"], step["attempts"]) == ("done", 2)
    finally:
        ended = tidelog_pipeline("shell", "--stop")
    assert "there is no kept session" in ended.stdout
    assert running() is None


def test_an_address_that_a_killed_server_has_left_is_not_used(directory: Path) -> None:
    """Its process is gone, and its number may be that of another: nothing is asked, and nothing is killed."""
    (directory / "address.json").write_bytes(msgspec.json.encode(ADDRESS))
    (directory / "lock").touch()
    with (directory / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # another command that looks
        assert running() is None
        assert find_kept(None) is None
        assert stop_kept() is False


def test_a_server_serves_only_those_who_would_start_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another environment, another master, a Spark of somebody else, or a port that nobody answers: it is not taken."""
    monkeypatch.setattr("socket.create_connection", lambda *_: SimpleNamespace(close=lambda: None))
    (directory / "address.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(ADDRESS, identity=identity())))
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_kept(None) == find_kept("local[2]") == running() is not None
        assert find_kept("local[1]") is None
        with monkeypatch.context() as changed:
            changed.chdir(directory)
            assert find_kept(None) is None
        for name in ("AWS_ACCESS_KEY_ID", "TIDELOG_STORE", "SPARK_REMOTE", "PYTHONPATH"):
            with monkeypatch.context() as changed:
                changed.setenv(name, "another")
                assert find_kept(None) is None
        monkeypatch.setenv("TERM", "another")
        assert find_kept(None) is not None
        monkeypatch.setattr("socket.create_connection", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError()))
        assert find_kept(None) is None


def test_an_idle_server_ends_and_a_used_one_stays() -> None:
    """As long as a session is open, or something runs, it is used."""
    uses = [True, True, False, True]
    looks = 0

    def is_used() -> bool:
        nonlocal looks
        looks += 1
        return uses.pop() if uses else False

    sessions = SimpleNamespace(nonEmpty=is_used)
    manager = SimpleNamespace(listActiveSessions=lambda: sessions)
    service = SimpleNamespace(
        sessionManager=lambda: manager, listActiveExecutions=lambda: SimpleNamespace(isRight=lambda: False)
    )
    kept._stay(service, 0.25)
    assert not uses
    assert looks > 4
