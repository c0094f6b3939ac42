"""A real `tidelog serve` for clients of Kafka: one a test, on ports of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_START_SECONDS = 120
_STOP_SECONDS = 120


class Service:
    """`tidelog serve` as a process. It keeps its port when it is started again."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._options = options
        self._port = 0
        self.kafka = ""
        self.http = ""
        self._process: subprocess.Popen[str] | None = None
        self._log = directory.with_name(f"{directory.name}.log")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Service:
        command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--dir", str(self.directory)]
        command += ["--kafka", f"127.0.0.1:{self._port}", "--http", "127.0.0.1:0", *self._options]
        environment = {**os.environ, "TIDELOG_LOG": "info"}
        with self._log.open("ab") as said:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment)
        self.kafka, self.http = self._addresses(self._process)
        self._port = int(self.kafka.rpartition(":")[2])
        return self

    def _addresses(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        late = threading.Timer(_START_SECONDS, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().split() for _ in range(2)]
        finally:
            late.cancel()
        assert [line[:1] for line in lines] == [["kafka"], ["http"]], f"it said {lines}, and {self.said}"
        return lines[0][1], lines[1][1]

    @property
    def said(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text()

    def kill(self) -> None:
        """As a crash does."""
        assert self._process is not None
        self._process.kill()
        self._ended()

    def stop(self) -> int:
        """As SIGTERM does; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._ended()

    def _ended(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        code = self._process.wait(_STOP_SECONDS)
        self._process.stdout.close()
        return code

    def close(self) -> None:
        """Leaves no process behind."""
        if self._process is not None:
            self.kill()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts `tidelog serve` with further options."""
    started: list[Service] = []

    def start(*options: str, directory: Path | None = None) -> Service:
        service = Service(directory or tmp_path / "served", *options)
        started.append(service)
        return service.start()

    yield start
    for service in started:
        service.close()


@pytest.fixture
def service(serve: Callable[..., Service]) -> Service:
    """One server on a new directory."""
    return serve()
