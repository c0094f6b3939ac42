"""Real servers for the tests: one SeaweedFS (S3) and one etcd a session, started when the first test asks for them.

Ports are whatever is free. A test may kill a server and start it again: it comes back on its ports with its data. What
a server said stays in its directory, which pytest keeps for the last sessions, and is shown with a test that failed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from tidelog.cli.dev_s3 import S3Keys, SeaweedServer, free_ports
from tidelog.secret import Secret
from tidelog.store.metadata.etcd_client import Endpoint
from tidelog.store.settings import StoreSettings

START_SECONDS = 120
START_ATTEMPTS = 3
SHOWN_LOG_LINES = 40
BUCKET = "tidelog-tests"
ACCESS_KEY_ID = "test-key"
SECRET_ACCESS_KEY = "test-secret"


def _is_stopped(task: Path) -> bool:
    """Whether a thread is stopped, or gone."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in ("T", "t", "Z", "X")
    except OSError:
        return True


class Server(ABC):
    """A process and its directory."""

    name: str

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    def begin(self) -> None:
        """The first start. Another process may take a free port before the server does: then with other ports."""

    @abstractmethod
    def start(self) -> None:
        """Starts it on the ports of the first start and waits until it works."""

    @abstractmethod
    def kill(self) -> None:
        """As a crash would: at once, nothing is finished."""

    @abstractmethod
    def tail(self) -> str:
        """The last that it said."""

    def pause(self) -> None:
        """It keeps its connections and answers nobody. Its threads stop one by one; all have when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + START_SECONDS
        while not all(_is_stopped(task) for task in Path(f"/proc/{self.pid}/task").iterdir()):
            assert time.monotonic() < deadline, f"{self.name} goes on although it was stopped"
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class S3Server(Server):
    """SeaweedFS as `tidelog dev-s3` runs it, with keys that tests know."""

    name = "seaweedfs"

    def __init__(self, directory: Path) -> None:
        keys = S3Keys(ACCESS_KEY_ID, Secret(SECRET_ACCESS_KEY))
        self._server = SeaweedServer(directory, bucket=BUCKET, keys=keys)

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    def settings(self, **changes: object) -> StoreSettings:
        """How to reach it, with little patience."""
        given: dict[str, object] = {
            "store_request_timeout_ms": 10_000,
            "store_max_retries": 2,
            "store_retry_timeout_seconds": 5,
        }
        return msgspec.structs.replace(self._server.settings(), **(given | changes))

    def url(self, prefix: str) -> str:
        return f"{self._server.url}/{prefix}"

    def begin(self) -> None:
        self.start()

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def tail(self) -> str:
        return "\n".join([f"(all of it: {self._server.directory.log})", *self._server.last_lines(SHOWN_LOG_LINES)])


class ServerEndedError(Exception):
    """It ended while it was being started."""


class EtcdServer(Server):
    """A cluster of one, or a member of one of several (`EtcdCluster`). `options` are more of the program's own."""

    name = "etcd"

    def __init__(
        self, directory: Path, *, member: str = "default", scheme: str = "http", options: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.log = directory / "etcd.log"
        self.member = member
        self.cluster = ""
        self.ports: list[int] = []
        self._scheme = scheme
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.ports[0])

    @property
    def url(self) -> str:
        return f"etcd{'s' if self._scheme == 'https' else ''}://{self.endpoint}"

    @property
    def peers(self) -> str:
        """How it is named in a cluster."""
        return f"{self.member}=http://127.0.0.1:{self.ports[1]}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def begin(self) -> None:
        for attempt in range(START_ATTEMPTS):
            self.choose_ports()
            self.cluster = self.peers
            try:
                self.start()
            except ServerEndedError:
                if attempt + 1 == START_ATTEMPTS:
                    raise
            else:
                return

    def choose_ports(self) -> None:
        """For clients, for peers, and for those who ask whether it is well, without TLS."""
        self.ports = free_ports(3)

    def start(self) -> None:
        self.launch()
        self.wait()

    def launch(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=subprocess.STDOUT, cwd=self.directory, start_new_session=True
            )

    def wait(self) -> None:
        """Until it works."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not self.works():
            if self._process.poll() is not None:
                raise ServerEndedError(f"{self.name} ended with {self._process.returncode}\n{self.tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{self.name} does not work after {START_SECONDS} s\n{self.tail()}")
            time.sleep(0.05)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def tail(self) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log.exists() else []
        return "\n".join([f"(all of it: {self.log})", *lines[-SHOWN_LOG_LINES:]])

    def command(self) -> list[str]:
        clients = f"{self._scheme}://127.0.0.1:{self.ports[0]}"
        peers = f"http://127.0.0.1:{self.ports[1]}"
        return [
            program("etcd"),
            f"--name={self.member}",
            f"--data-dir={self.directory / 'data'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster={self.cluster}",
            f"--listen-metrics-urls=http://127.0.0.1:{self.ports[2]}",
            "--log-level=warn",
            *self._options,
        ]

    def works(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/health", timeout=2) as answer:
                return bool(json.load(answer).get("health") == "true")
        except (OSError, ValueError):
            return False


class EtcdCluster:
    """Three members, of which one may be killed. They choose a new leader within two seconds."""

    def __init__(self, directory: Path) -> None:
        self.members = [EtcdServer(directory / name, member=name) for name in ("m1", "m2", "m3")]
        for member in self.members:
            member.directory.mkdir()

    @property
    def endpoints(self) -> list[Endpoint]:
        return [member.endpoint for member in self.members]

    def start(self) -> None:
        for member in self.members:
            member.choose_ports()
        for member in self.members:
            member.cluster = ",".join(one.peers for one in self.members)
            member.launch()
        for member in self.members:
            member.wait()

    def kill(self) -> None:
        for member in self.members:
            member.kill()


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
