"""`tidelog dev-s3`: a real SeaweedFS, started, used, stopped, started again, and everything that keeps it from that."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Cli, Spawn

from tidelog.cli import dev_s3
from tidelog.cli import doctor as doctor_checks
from tidelog.cli.dev_s3 import SeaweedDirectory, SeaweedServer, free_ports
from tidelog.errors import DataError, InputError, RetryError, StoreUnavailableError
from tidelog.store.metadata.open import open_metadata_store
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import open_store

STOP_SECONDS = 60


def told_by(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The one JSON document that it writes when it is ready."""
    assert process.stdout is not None
    text = b""
    while not text.endswith(b"\n}\n"):
        line = process.stdout.readline()
        assert line, "it ended before it was ready"
        text += line
    return dict(json.loads(text))


def store_of(told: dict[str, Any]) -> ObjectStore:
    """The store that somebody gets who pasted what was shown."""
    return open_store(told["store"], environment=told["environment"])


def ended_by(process: subprocess.Popen[bytes], number: int) -> tuple[int, bytes, bytes]:
    process.send_signal(number)
    out, err = process.communicate(timeout=STOP_SECONDS)
    return process.returncode, out, err


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def fake_weed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program in the place of weed, for servers that fail."""
    program = tmp_path / "weed"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(dev_s3, "weed_program", lambda: str(program))


def test_it_is_used_stopped_and_started_again(spawn: Spawn, cli: Cli, tmp_path: Path) -> None:
    """Data and keys are there the next time; it listens on this machine only.

    When the command was killed and its server runs on, a second one on the same data is refused.
    """
    port = free_ports(1)[0]
    arguments = ("dev-s3", "--json", "--data", "s3", "--port", port, "--bucket", "my-bucket")
    first = spawn(*arguments)
    told = told_by(first)
    assert told["endpoint"] == f"http://127.0.0.1:{port}"
    store = store_of(told)
    etag = store.put("a", b"hello")
    with open_metadata_store("bucket", store) as metadata:
        metadata.put("key", b"value")
    assert addresses_of(told["pid"]) == {"127.0.0.1"}
    code, out, err = ended_by(first, signal.SIGINT)
    assert (code, out, err) == (130, b"", b"")
    assert not is_running(told["pid"])

    second = spawn(*arguments)
    again = told_by(second)
    second.kill()
    second.wait()
    with ended_at_last(again["pid"]):
        assert again["environment"] == told["environment"]
        assert store_of(again).get("a") == (b"hello", etag)
        assert {info.key for info in store_of(again).list()} == {"a", "key"}
        assert sorted(path.name for path in (tmp_path / "s3").iterdir()) == ["data", "lock", "s3.json", "seaweedfs.log"]
        result = cli("dev-s3", "--data", "s3", "--port", free_ports(1)[0])
        assert (result.code, result.out) == (4, b"")
        assert f"is used by another server (process {again['pid']})" in result.err
        assert "--data" in result.err


@contextlib.contextmanager
def ended_at_last(pid: int) -> Iterator[None]:
    """A server whose command is gone runs on, and is ended with its sockets."""
    ports = re.findall(rb"port(?:\.grpc)?=(\d+)", Path(f"/proc/{pid}/cmdline").read_bytes())
    try:
        assert is_running(pid)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        for left in (path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port.decode()}.sock")):
            left.unlink()


def test_what_it_shows_can_be_pasted(spawn: Spawn, tmp_path: Path) -> None:
    """The lines for the shell give a program all that it needs, and one for Python shows how to open a log.

    SIGTERM ends it and its server.
    """
    process = spawn("dev-s3", "--port", free_ports(1)[0])
    assert process.stdout is not None
    lines = iter(process.stdout.readline, b"")
    shown = []
    for line in lines:
        shown.append(line.decode())
        if "tidelog.open(" in shown[-1]:
            break
    assert shown[0].startswith("SeaweedFS is ready at http://127.0.0.1:")
    assert shown[-1] == '  log = tidelog.open("./data", store="s3://tidelog/demo", metadata="bucket")\n'
    exports = "".join(line for line in shown if line.startswith("  export "))
    program = (
        "from tidelog.store.urls import open_store; s = open_store('s3://tidelog/demo'); "
        "s.put('a', b'pasted'); print(s.get('a').data.decode())"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "PROGRAM": program}
    script = f'{exports}\nexec {sys.executable} -c "$PROGRAM"'
    done = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("pasted\n", "")
    assert (tmp_path / "tidelog-s3" / "data").is_dir()
    assert ended_by(process, signal.SIGTERM)[0] == 0
    os.close(SeaweedDirectory(tmp_path / "tidelog-s3").take())  # which nobody has any more


def test_a_server_that_ends_by_itself_is_reported(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it said last, and with an exit code that is not success."""
    fake_weed(tmp_path, monkeypatch, "echo 'F1 the disk is gone'; kill -9 $$")
    monkeypatch.setattr(SeaweedServer, "_works", lambda self: True)
    result = cli("dev-s3", "--json", "--data", "s3", "--port", free_ports(1)[0])
    assert result.code == 4
    assert "SeaweedFS said last:\n  F1 the disk is gone\n" in result.err
    assert "SeaweedFS ended by itself with exit code -9" in result.err


def test_a_port_that_is_taken_is_refused(cli: Cli) -> None:
    """At once, with what to do about it."""
    with taken_port() as port:
        result = cli("dev-s3", "--data", "s3", "--port", port)
    assert (result.code, result.out) == (4, b"")
    assert f"error: port {port} is taken" in result.err
    assert "--port" in result.err


def test_a_missing_program_is_named_with_its_package(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint can be pasted; doctor says the same."""
    monkeypatch.setattr(dev_s3, "weed_program", lambda: None)
    monkeypatch.setattr(doctor_checks, "weed_program", lambda: None)
    result = cli("dev-s3", "--data", "s3")
    assert (result.code, result.out) == (2, b"")
    assert "hint: pip install 'tidelog[dev-s3]'" in result.err
    check = doctor_checks.check_weed()
    assert check.status == "ok"
    assert "pip install 'tidelog[dev-s3]'" in check.detail


def test_doctor_finds_the_program() -> None:
    """Where it is installed, it says where."""
    program = dev_s3.weed_program()
    assert program is not None
    assert program in doctor_checks.check_weed().detail


def test_a_server_that_dies_at_its_start_is_shown(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words are there, and its directory can be used by the next."""
    fake_weed(tmp_path, monkeypatch, "echo 'F1 no room on this disk'; exit 3")
    for _ in range(2):
        result = cli("dev-s3", "--data", "s3", "--port", free_ports(1)[0])
        assert (result.code, result.out) == (4, b"")
        assert "  F1 no room on this disk\n" in result.err
        assert "error: SeaweedFS ended at its start with exit code 3" in result.err


def test_a_server_that_never_works_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its process is gone."""
    fake_weed(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    monkeypatch.setattr(dev_s3, "_START_SECONDS", 0.5)
    with pytest.raises(StoreUnavailableError, match=r"does not work 0\.5 s after its start"):
        SeaweedServer(tmp_path / "s3").start()
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_an_inner_port_that_was_taken_meanwhile_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others look for free ports too: it is started again on other ones, three times at most."""
    script = f"echo x >> {tmp_path}/starts; echo 'listen tcp 127.0.0.1:1: bind: address already in use'; exit 1"
    fake_weed(tmp_path, monkeypatch, script)
    with pytest.raises(StoreUnavailableError):
        SeaweedServer(tmp_path / "s3").start()
    assert (tmp_path / "starts").read_text() == "x\n" * 3


def test_a_program_that_cannot_be_run_is_said_so(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a traceback."""
    monkeypatch.setattr(dev_s3, "weed_program", lambda: str(tmp_path))
    result = cli("dev-s3", "--data", "s3", "--port", free_ports(1)[0])
    assert result.code == 2
    assert "cannot be run" in result.err


def test_a_directory_that_cannot_be_used_is_refused(cli: Cli, tmp_path: Path) -> None:
    """With its path in the error."""
    (tmp_path / "file").touch()
    result = cli("dev-s3", "--data", "file/s3")
    assert (result.code, result.out) == (2, b"")
    assert str(tmp_path / "file" / "s3") in result.err


@pytest.mark.parametrize("name", ["", "ab", "a" * 64, "Upper", "dots.in.it", "-edge", "../up", "a b c", "ümlaut"])
def test_names_that_no_bucket_has_are_refused(cli: Cli, name: str) -> None:
    """Before anything is started or written."""
    result = cli("dev-s3", "--bucket", name)
    assert result.code == 2
    assert "is not the name of a bucket" in result.err
    assert list(Path().iterdir()) == []


class TestKeys:
    """Made once for each directory, and for nobody else's eyes."""

    def test_they_are_made_once_and_closed_to_others(self, tmp_path: Path) -> None:
        """Whatever the umask is; another directory has others."""
        before = os.umask(0)
        try:
            first = SeaweedDirectory(tmp_path / "a").keys()
            other = SeaweedDirectory(tmp_path / "b").keys()
        finally:
            os.umask(before)
        assert SeaweedDirectory(tmp_path / "a").keys() == first
        assert first.secret_access_key != other.secret_access_key
        assert first.secret_access_key.reveal() not in repr(first)
        for path, mode in ((tmp_path / "a", 0o700), (tmp_path / "a" / "s3.json", 0o600)):
            assert stat.S_IMODE(path.stat().st_mode) == mode

    def test_a_file_that_was_opened_to_others_is_closed_again(self, tmp_path: Path) -> None:
        """As after copying it about."""
        directory = SeaweedDirectory(tmp_path)
        directory.keys()
        directory.config.chmod(0o644)
        directory.keys()
        assert stat.S_IMODE(directory.config.stat().st_mode) == 0o600

    @pytest.mark.parametrize(
        "content",
        [
            *(b"", b"{", b"[]", b"\xff", b'{"identities": []}', b'{"identities": [{"credentials": [7]}]}'),
            b'{"identities": [{"credentials": [{"accessKey": "", "secretKey": ""}]}]}',
        ],
    )
    def test_a_damaged_file_is_not_replaced(self, tmp_path: Path, content: bytes) -> None:
        """New keys would lock out who has the old ones: it is for a person to decide."""
        directory = SeaweedDirectory(tmp_path)
        directory.config.write_bytes(content)
        with pytest.raises(DataError):
            directory.keys()
        assert directory.config.read_bytes() == content


class TestDirectories:
    """One server at a time."""

    def test_a_directory_has_one_server(self, tmp_path: Path) -> None:
        """The second is refused until the first has gone."""
        directory = SeaweedDirectory(tmp_path)
        lock = directory.take()
        with pytest.raises(RetryError, match="another server"):
            SeaweedDirectory(tmp_path).take()
        os.close(lock)
        os.close(directory.take())

    def test_directory_in_use_names_the_option_of_the_command(self, tmp_path: Path) -> None:
        """That of another command was named: `cluster dev` has no --data."""
        descriptor = SeaweedDirectory(tmp_path).take()
        with pytest.raises(RetryError) as raised:
            SeaweedServer(tmp_path, option="--dir").directory.take()
        os.close(descriptor)
        assert str(raised.value).endswith("name another directory with --dir")

    def test_a_long_log_is_begun_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that is started every day does not fill the disk with what it says."""
        monkeypatch.setattr("tidelog.cli.dev_s3._LOG_BYTES", 10)
        directory = SeaweedDirectory(tmp_path)
        for _ in range(3):
            descriptor = directory.open_log()
            os.write(descriptor, b"eight by")
            os.close(descriptor)
        assert directory.log.read_bytes() == b"eight by"


def test_ports_that_need_rights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error of ours, with what the system says."""

    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(InputError, match="port 80 cannot be used: Permission denied"):
        dev_s3.check_port(80)


def test_variables_that_would_be_in_the_way_are_unset(tmp_path: Path) -> None:
    """A session token of another account would spoil the keys that are shown."""
    server = SeaweedServer(tmp_path, port=8333)
    lines = dev_s3.shell_lines(server, {"AWS_SESSION_TOKEN": "x", "HOME": "/"})
    assert lines[:2] == ["unset AWS_SESSION_TOKEN", "export AWS_ENDPOINT_URL=http://127.0.0.1:8333"]
    assert dev_s3.shell_lines(server, {}) == lines[1:]


def addresses_of(pid: int) -> set[str]:
    """Where a process listens, by what the system knows of its sockets."""
    own = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1].partition(":")[0])
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address for address in found}
