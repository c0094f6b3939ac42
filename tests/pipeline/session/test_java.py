"""Which Java is found, and the archive of classes that makes it start faster."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home

import tidelog
from tidelog.pipeline.session import java as session_java
from tidelog.pipeline.session.java import Java, find_java

JAVA = Java("/usr/bin/java", 17, 'openjdk version "17.0.1"')
SUBMIT = Path(_find_spark_home(), "bin", "spark-submit")
JARS = Path(_find_spark_home(), "jars")


def fake_java(home: Path, body: str) -> Path:
    """A program that is found as Java."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
    program.chmod(0o755)
    return program


def run_java(options: list[str]) -> subprocess.CompletedProcess[bytes]:
    """A short program of Spark with these options."""
    told = " ".join(["-Xlog:disable", "-XX:+UseSerialGC", *options])
    command = [str(SUBMIT), "--driver-java-options", told, "--version"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False)


def make_older(directory: Path, seconds: float) -> None:
    for path in directory.iterdir():
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_the_java_of_java_home_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JAVA_HOME goes before the path, as in Spark's own launcher."""
    program = fake_java(tmp_path, """echo 'openjdk version "21.0.4" 2024-07-16' >&2""")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert (find_java().program, find_java().version) == (str(program), 21)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("""echo 'java version "1.8.0_402"' >&2""", "is version 8, older than 17"),
        ("echo what >&2", "is version unknown"),
        (None, "no bin/java in it"),
    ],
)
def test_a_java_that_will_not_do_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str | None, complaint: str
) -> None:
    """The error says which Java it is, what is wrong with it, and how to get another."""
    if body is not None:
        fake_java(tmp_path, body)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(tidelog.ConfigError, match=complaint) as caught:
        find_java()
    assert str(tmp_path) in str(caught.value)
    assert "apt-get install openjdk-17-jre-headless" in str(caught.value)


def test_no_java_at_all_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without JAVA_HOME and without java on the path there is nothing to start."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tidelog.ConfigError, match="there is no java on the path"):
        find_java()


@pytest.mark.long
def test_an_archive_is_made_and_used_and_damage_does_no_harm(tmp_path: Path) -> None:
    """The first program writes it and the next runs on it; with flipped bytes, or cut short, it is done without."""
    java = find_java()
    making = session_java.archive_options(java, JARS, {}, tmp_path)
    assert [option.partition("=")[0] for option in making] == ["-XX:ArchiveClassesAtExit"]
    assert run_java(making).returncode == 0
    make_older(tmp_path, 10)

    using = session_java.archive_options(java, JARS, {}, tmp_path)
    assert [option.partition("=")[0] for option in using] == ["-XX:SharedArchiveFile", "-XX:+VerifySharedSpaces"]
    assert run_java([*using, "-Xshare:on"]).returncode == 0  # this Java refuses to run without

    (archive,) = tmp_path.iterdir()
    whole = archive.read_bytes()
    archive.chmod(0o600)
    archive.write_bytes(whole[:100_000] + bytes(byte ^ 0xFF for byte in whole[100_000:110_000]) + whole[110_000:])
    assert session_java.archive_options(java, JARS, {}, tmp_path) == using
    assert run_java(using).returncode == 0
    archive.write_bytes(whole[: len(whole) // 2])
    assert session_java.archive_options(java, JARS, {}, tmp_path)[0].startswith("-XX:ArchiveClassesAtExit")


def test_two_that_start_at_once_write_two_files(tmp_path: Path) -> None:
    """Nobody writes into what another one writes or runs on; an unfinished file is not taken."""
    jars = tmp_path / "jars"
    jars.mkdir()
    cache = tmp_path / "cache"
    made = [session_java.archive_options(JAVA, jars, {}, cache)[0] for _ in range(2)]
    files = [Path(*shlex.split(option.partition("=")[2])) for option in made]
    assert files[0] != files[1]
    files[0].write_bytes(bytes(100))
    files[1].write_bytes(session_java._MAGIC + bytes(100))
    assert session_java.archive_options(JAVA, jars, {}, cache)[0].startswith("-XX:ArchiveClassesAtExit"), "too fresh"
    make_older(cache, 10)
    assert session_java.archive_options(JAVA, jars, {}, cache)[0].startswith("-XX:SharedArchiveFile")
    assert files[0].exists()
    files[1].write_bytes(session_java._MAGIC + bytes(200))
    make_older(cache, 10)
    session_java.archive_options(JAVA, jars, {}, cache)
    assert not files[1].exists(), "one is enough"
    assert len(list(cache.glob("*.jsa"))) == 1
    make_older(cache, 40 * 86400)
    session_java.archive_options(JAVA, jars, {"spark.driver.memory": "9g"}, cache)
    assert list(cache.iterdir()) == [], "what nobody uses is cleared away"


def test_another_java_or_other_jars_want_another_archive(tmp_path: Path) -> None:
    """The name tells apart all that Java would refuse."""
    jars = tmp_path / "jars"
    jars.mkdir()
    names = set()
    for java, settings in ((JAVA, {}), (JAVA._replace(told="21"), {}), (JAVA, {"spark.driver.memory": "9g"})):
        names.add(session_java._identity(java, jars, settings))
    (jars / "spark.jar").write_bytes(b"1")
    names.add(session_java._identity(JAVA, jars, {}))
    assert len(names) == 4


def test_a_cache_that_cannot_be_used_is_done_without(tmp_path: Path) -> None:
    """No archive where others may write, where it cannot be made, or where the caller has decided."""
    jars = tmp_path / "jars"
    jars.mkdir()
    (tmp_path / "file").write_bytes(b"")
    assert session_java.archive_options(JAVA, jars, {}, tmp_path / "file" / "cache") == []
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert session_java.archive_options(JAVA, jars, {}, tmp_path / "open") == []
    own = {"spark.driver.extraJavaOptions": "-Xshare:off"}
    assert session_java.archive_options(JAVA, jars, own, tmp_path / "cache") == []
