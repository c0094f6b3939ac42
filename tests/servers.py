"""Real servers for the tests: one SeaweedFS (S3) and one etcd a session, started when the first test asks for them.

Ports are whatever is free. A test may kill a server and start it again: it comes back on its ports with its data. What
a server said stays in its directory, which pytest keeps for the last sessions, and is shown with a test that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import obstore
import pytest
from obstore.store import S3Store

from tidelog.secret import Secret
from tidelog.tier.store_settings import StoreSettings

START_SECONDS = 60
START_ATTEMPTS = 3
SHOWN_LOG_LINES = 40
BUCKET = "tidelog-tests"
ACCESS_KEY_ID = "test-key"
SECRET_ACCESS_KEY = "test-secret"


class Server(ABC):
    """A process, its directory and its ports."""

    name: str
    port_count: int

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / f"{self.name}.log"
        self.ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """The first start. Another process may take a free port before the server does: then with other ports."""
        for attempt in range(START_ATTEMPTS):
            self.ports = free_ports(self.port_count)
            try:
                self.start()
            except ServerEndedError:
                if attempt + 1 == START_ATTEMPTS:
                    raise
            else:
                return

    def start(self) -> None:
        """Starts it and waits until it works."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=subprocess.STDOUT, cwd=self.directory, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.works():
            if self._process.poll() is not None:
                raise ServerEndedError(f"{self.name} ended with {self._process.returncode}\n{self.tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{self.name} does not work after {START_SECONDS} s\n{self.tail()}")
            time.sleep(0.1)

    def kill(self) -> None:
        """As a crash would: at once, nothing is finished."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def pause(self) -> None:
        """It keeps its connections and answers nobody."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def tail(self) -> str:
        """The last that it said."""
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log.exists() else []
        return "\n".join([f"(all of it: {self.log})", *lines[-SHOWN_LOG_LINES:]])

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def works(self) -> bool:
        """Whether it does what the tests need."""


class ServerEndedError(Exception):
    """It ended while it was being started."""


class S3Server(Server):
    """SeaweedFS with its S3 gateway, one bucket and one key."""

    name = "seaweedfs"
    port_count = 8

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def settings(self, **changes: object) -> StoreSettings:
        """How to reach it, with little patience."""
        given: dict[str, object] = {
            "store_endpoint": self.endpoint,
            "store_access_key_id": ACCESS_KEY_ID,
            "store_secret_access_key": Secret(SECRET_ACCESS_KEY),
            "store_request_timeout_ms": 10_000,
            "store_max_retries": 2,
            "store_retry_timeout_seconds": 5,
        }
        return StoreSettings(**(given | changes))  # type: ignore[arg-type]

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def command(self) -> list[str]:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        names = ("s3", "s3.port.grpc", "master", "master.port.grpc", "volume", "volume.port.grpc", "filer")
        flags = [name if "." in name else f"{name}.port" for name in (*names, "filer.port.grpc")]
        return [
            program("weed"),
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{flag}={port}" for flag, port in zip(flags, self.ports, strict=True)),
            "-filer",
            "-s3",
            f"-s3.config={self._write_config()}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-volume.max=20",
            "-master.volumeSizeLimitMB=256",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",  # after a crash it waits this long for a leader that is not there
        ]

    def kill(self) -> None:
        super().kill()
        for port in self.ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def _write_config(self) -> Path:
        path = self.directory / "s3.json"
        credentials = [{"accessKey": ACCESS_KEY_ID, "secretKey": SECRET_ACCESS_KEY}]
        everything = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "tests", "credentials": credentials, "actions": everything}
        path.write_text(json.dumps({"identities": [identity]}), "utf-8")
        return path

    def works(self) -> bool:
        """A bucket can be made and an object written: its parts find each other one after the other."""
        client = S3Store(
            BUCKET,
            config={"endpoint": self.endpoint, "region": "us-east-1"},
            access_key_id=ACCESS_KEY_ID,
            secret_access_key=SECRET_ACCESS_KEY,
            client_options={"allow_http": True, "timeout": "5s", "connect_timeout": "1s"},
            retry_config={"max_retries": 0},
        )
        address = obstore.sign(client, "PUT", "", timedelta(minutes=1))
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="PUT"), timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 409:  # it is there from before
                return False
        except OSError:
            return False
        with contextlib.suppress(obstore.exceptions.BaseError, OSError):
            obstore.put(client, "works", b"yes")
            return True
        return False


class EtcdServer(Server):
    """A cluster of one."""

    name = "etcd"
    port_count = 2

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.ports[0]}"

    def command(self) -> list[str]:
        clients, peers = (f"http://127.0.0.1:{port}" for port in self.ports)
        return [
            program("etcd"),
            f"--data-dir={self.directory / 'data'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--log-level=warn",
        ]

    def works(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[0]}/health", timeout=2) as answer:
                return bool(json.load(answer).get("health") == "true")
        except (OSError, ValueError):
            return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different because they are held until all are found."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def program(name: str) -> str:
    """Where the program of a package is: beside the Python that runs the tests, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is not installed; tidelog[test] brings it"
    return found


AnyServer = TypeVar("AnyServer", bound=Server)
_running: list[Server] = []


def _serve(server: AnyServer) -> Iterator[AnyServer]:
    server.begin()
    _running.append(server)
    yield server
    _running.remove(server)
    server.kill()  # its data goes with the session; a clean end of SeaweedFS takes ten seconds


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS, for all tests together: use a prefix of your own."""
    yield from _serve(S3Server(tmp_path_factory.mktemp("seaweedfs")))


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """etcd, for all tests together: use a prefix of your own."""
    yield from _serve(EtcdServer(tmp_path_factory.mktemp("etcd")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a test that failed: what the running servers said last."""
    report = yield
    if report.failed:
        report.sections.extend((f"{server.name} said last", server.tail()) for server in _running)
    return report
