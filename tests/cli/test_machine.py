"""`tidelog doctor` and `tidelog bench`."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Cli, Spawn

from tidelog.cli import doctor as doctor_checks
from tidelog.cli.doctor import check_java, check_permissions, check_spark, file_system_kind, nearest_directory


def test_doctor_checks_everything(cli: Cli) -> None:
    """Every check has a verdict, and whatever is not ok comes with a fix."""
    result = cli("doctor", "--json")
    checks = {check["check"]: check for check in result.json}
    expected = {
        "python",
        "native code",
        "java",
        "spark",
        "weed",
        "directory",
        "free space",
        "file system",
        "sync time",
        "clock",
    }
    assert checks.keys() == expected | {"open files"}
    assert all(check["fix"] for check in checks.values() if check["status"] != "ok")
    assert result.code == int(any(check["status"] == "fail" for check in checks.values()))
    assert list(Path().iterdir()) == []


def test_doctor_fails_where_no_log_can_be(cli: Cli, tmp_path: Path) -> None:
    """A failed check is exit code 1, after all checks were shown."""
    (tmp_path / "file").touch()
    result = cli("doctor", "-d", "file")
    assert result.code == 1
    assert "directory\tfail\tfile is not a directory\tName another one with --dir" in result.lines


def test_doctor_goes_on_after_a_check_that_cannot_be_made(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that may not be looked into is a failed check among the others."""

    def refuse(place: Path) -> doctor_checks.Check:
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    monkeypatch.setattr(doctor_checks, "check_free_space", refuse)
    result = cli("doctor", "--json")
    checks = {check["check"]: check["status"] for check in result.json}
    assert (result.code, checks["free space"], len(checks)) == (1, "fail", 11)


def test_doctor_sees_a_file_in_the_way(tmp_path: Path) -> None:
    """A log cannot be made below a file."""
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "log"
    assert check_permissions(root, nearest_directory(root)).status == "fail"


def test_permissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be written fails; one that can be made is fine."""
    assert check_permissions(tmp_path / "new" / "er", nearest_directory(tmp_path / "new" / "er")).status == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert check_permissions(tmp_path, tmp_path).status == "fail"


def test_java_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without Java, or with an old one, all but the pipeline works: a warning that says how to get it."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert check_java()[:2] == ("java", "warn")
    assert "no bin/java" in check_java().detail
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    assert check_java().status == "warn"
    assert "JAVA_HOME" in check_java().fix


def test_spark_is_no_duty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Spark's packages nothing is wrong; with half of them the pipeline would not run."""
    installed = {"pyspark": "4.3.0", "pyarrow": "26.0.1"}
    monkeypatch.setattr(doctor_checks, "_version_of", installed.get)
    assert check_spark() == ("spark", "ok", "pyspark 4.3.0, pyarrow 26.0.1", "")
    del installed["pyarrow"]
    assert check_spark()[:3] == ("spark", "warn", "pyarrow is not installed")
    del installed["pyspark"]
    assert (check_spark().status, "tidelog[spark]" in check_spark().detail) == ("ok", True)


@pytest.mark.parametrize(("kind", "status"), [("nfs4", "warn"), ("tmpfs", "warn"), ("overlay", "warn"), ("ext4", "ok")])
def test_file_systems_that_do_not_keep_data(
    kind: str, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Network, memory and container file systems are warned about."""
    monkeypatch.setattr(doctor_checks, "file_system_kind", lambda path: kind)
    assert doctor_checks.check_file_system(tmp_path).status == status


def test_the_innermost_mount_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kind of a path is that of the mount closest to it."""
    inner = tmp_path / "with blank"
    inner.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(inner).replace(" ", "\\040")
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\n")
    monkeypatch.setattr("tidelog.cli.doctor._MOUNTS", mounts)
    assert file_system_kind(inner) == "nfs4"
    assert file_system_kind(tmp_path) == "ext4"
    monkeypatch.setattr("tidelog.cli.doctor._MOUNTS", tmp_path / "none")
    assert file_system_kind(inner) is None


@pytest.mark.parametrize("options", [(), ("--appenders", "4"), ("--mode", "tasks", "--appenders", "3")])
def test_bench_append(cli: Cli, options: tuple[str, ...]) -> None:
    """Appends are measured in a directory that is gone afterwards."""
    result = cli("bench", "append", "-n", "500", "--size", "50", "--json", *options)
    assert result.code == 0
    figures = result.json
    assert figures["messages"] == 500
    assert 0 < figures["p50_us"] <= figures["p99_us"] <= figures["p999_us"] <= figures["max_us"]
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("mode", ["threads", "tasks"])
def test_bench_append_synced(cli: Cli, mode: str) -> None:
    """Synced appends are measured against what write and fdatasync alone can do."""
    figures = cli("bench", "append", "-n", "300", "--sync", "--appenders", "8", "--mode", mode, "--json").json
    assert figures["ratio"] == pytest.approx(figures["messages_per_second"] / figures["ceiling_messages_per_second"])


def test_bench_read(cli: Cli) -> None:
    """Reading is measured next to the bare scan, beside a log directory that stays as it is."""
    cli("produce", "a/b", stdin=b"x\n")
    before = sorted(Path("data").rglob("*"))
    result = cli("bench", "read", "-n", "2500", "--json")
    assert result.code == 0
    assert result.json["read_us_per_message"] > 0
    header_bytes = 36  # of the one file
    assert result.json["total_bytes"] == header_bytes + 2500 * 150  # header, envelope and mark of a batch: 50 bytes
    assert sorted(Path("data").rglob("*")) == before
    assert [path.name for path in Path().iterdir()] == ["data"]


@pytest.mark.parametrize("mode", ["threads", "tasks"])
def test_ctrl_c_ends_a_bench_quietly(spawn: Spawn, tmp_path: Path, mode: str) -> None:
    """However many append at once, none of them complains, and nothing is left behind."""
    bench = spawn("bench", "append", "--sync", "--mode", mode, "-n", "64000000")
    limit = time.monotonic() + 120
    while not any(path.stat().st_size for path in tmp_path.glob(".tidelog-bench-*/log/*/*/wal.*.log")):
        assert time.monotonic() < limit
        time.sleep(0.01)
    bench.send_signal(signal.SIGINT)
    out, err = bench.communicate(timeout=120)
    assert (bench.returncode, out, err) == (130, b"", b"")
    assert list(tmp_path.iterdir()) == []
