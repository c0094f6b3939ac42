"""The machines of a campaign: three members of etcd, one SeaweedFS, three nodes; all real processes on loopback.

    <directory>/etcd/  s3/           as in `tidelog cluster dev`
    <directory>/<node>/disk/data     the log directory, on a small file system of its own, where one may be mounted
    <directory>/<node>/clock         by how much its clock is off
    <directory>/<node>.log           what it said, over all its lives

Invariants
- Nodes reach etcd and the bucket, and are reached, only through the network of the campaign.
- Members of etcd are stopped and paused, never killed: this version may not start again after that.
- Leaving `with` ends every process and unmounts every file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tests.cluster.chaos import node as node_program
from tests.cluster.chaos.network import HOST, Network
from tests.cluster.chaos.network import Path as NetworkPath

from tidelog.cli.cluster.dev import EtcdMembers, node_environment
from tidelog.cli.dev_s3 import SeaweedServer
from tidelog.cluster.operations import ClusterOperations
from tidelog.errors import StoreUnavailableError
from tidelog.store.keys import DEFAULT_ROOT
from tidelog.store.metadata.open import open_metadata_store

Answer = TypeVar("Answer")

NODES = ("n1", "n2", "n3")
MEMBERS = 3
DISK_BYTES = 512 << 20
WAIT_SECONDS = 240.0
BUCKET = "bucket"
_START_ATTEMPTS = 10


class Disk:
    """A file system that can be filled; a plain directory (`can_fill` is false) where nothing may be mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"
        path.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tidelog-chaos", str(path)]
        try:
            self.can_fill = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            self.can_fill = False

    def fill(self) -> None:
        """Not one more byte fits."""
        piece = b"\0" * (1 << 20)
        with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(piece)

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.can_fill:
            subprocess.run(["umount", "--lazy", str(self.path)], check=False)


class Machine:
    """A node, over all its lives."""

    def __init__(self, name: str, directory: Path, options: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.directory = directory
        self.disk = Disk(directory / "disk")
        self.log = directory.with_name(f"{name}.log")
        self.process: subprocess.Popen[bytes] | None = None
        self.kafka = self.http = 0
        self.unexpected = 0
        self._clock = directory / "clock"
        self._options = options
        self._environment = environment
        self.set_clock(0.0)

    @property
    def data(self) -> Path:
        return self.disk.path / "data"

    def set_clock(self, seconds: float) -> None:
        """So far off from now on."""
        data = node_program.OFFSET.pack(int(seconds * 1_000_000))
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(data)

    def start(self) -> None:
        """Returns when it serves. One that ends instead is started again, as a supervisor does: etcd may have been out
        of reach for a moment. RuntimeError when that does not help."""
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            try:
                self._start()
                break
            except RuntimeError:
                if not attempts_left:
                    raise

    def _start(self) -> None:
        program = [sys.executable, node_program.__file__, str(self._clock), "serve", "--dir", str(self.data)]
        command = [*program, "--node", self.name, "--kafka", f"{HOST}:0", "--http", f"{HOST}:0", *self._options]
        self.forget()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().decode().split() for _ in range(2)]
        if [len(line) for line in lines] != [2, 2]:
            raise RuntimeError(f"{self.name} did not start; what it said is in {self.log}")
        self.kafka, self.http = (int(line[1].rpartition(":")[2].strip("/")) for line in lines)

    def forget(self) -> None:
        """The life that has ended."""
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.is_running:
            self.process.send_signal(number)

    def kill(self) -> None:
        """At once; nothing is finished."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def stop(self) -> None:
        """Lets it hand over."""
        self.signal(signal.SIGTERM)
        if self.process is None:
            return
        try:
            self.process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"{self.name} does not stop; what it said is in {self.log}") from None


class Etcd(EtcdMembers):
    """Members of which each can be stopped, and started again."""

    def stop_member(self, number: int) -> None:
        self._processes[number].terminate()
        self._processes[number].wait()

    def start_member(self, number: int) -> None:
        before = self._processes[number]
        with (self._directories[number] / "etcd.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                before.args,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directories[number],
                start_new_session=True,
            )

    def addresses(self) -> list[tuple[str, int]]:
        return [(HOST, port) for port in self._ports[::3]]


class Machines:
    """All of them, and the network between them."""

    def __init__(self, directory: Path, lease_seconds: float) -> None:
        self.directory = directory
        self.lease_seconds = lease_seconds
        self.nodes: dict[str, Machine] = {}
        self.network = Network(self._processes)
        self.etcd = Etcd(directory / "etcd", MEMBERS)
        self.store = SeaweedServer(directory / "s3")

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.store.start()
            self.etcd.start()
            self.operations = ClusterOperations(open_metadata_store(self.etcd.url), DEFAULT_ROOT)
            for name in NODES:
                self.nodes[name] = self._machine(name)
            for machine in self.nodes.values():
                machine.start()
            undo.pop_all()
        return self

    @property
    def can_fill(self) -> bool:
        """Whether disks can be filled here."""
        return all(machine.disk.can_fill for machine in self.nodes.values())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Whatever state they are in."""
        for machine in self.nodes.values():
            machine.signal(signal.SIGCONT)
            machine.signal(signal.SIGTERM)
        for machine in self.nodes.values():
            with contextlib.suppress(RuntimeError):
                machine.stop()
            machine.forget()
        for pid in self.etcd.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.etcd.stop()
        self.store.stop()
        self.network.close()
        for machine in self.nodes.values():
            machine.disk.close()

    def _processes(self) -> dict[str, int]:
        return {name: one.process.pid for name, one in self.nodes.items() if one.process is not None}

    def _machine(self, name: str) -> Machine:
        members = self.etcd.addresses()
        ports = [
            self.network.listen(name, f"etcd-{number}", lambda number=number: members[number])  # type: ignore[misc]
            for number in range(MEMBERS)
        ]
        store = (HOST, int(self.store.endpoint.rpartition(":")[2]))
        bucket = self.network.listen(name, BUCKET, lambda: store)
        kafka = self.network.listen(None, name, lambda: (HOST, self.nodes[name].kafka))
        http = self.network.listen(None, name, lambda: (HOST, self.nodes[name].http))
        self.fronts = {**getattr(self, "fronts", {}), name: (kafka, http)}
        environment = node_environment(f"http://{HOST}:{bucket}", self.store.keys, self.lease_seconds)
        environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), environment.get("PYTHONPATH", "")])
        environment["PYTHONFAULTHANDLER"] = "1"  # what ends a node is in its log
        metadata = "etcd://" + ",".join(f"{HOST}:{port}" for port in ports)
        options = ["--store", self.store.url, "--metadata", metadata, "--zone", f"z-{name}"]
        options += ["--advertise-kafka", f"{HOST}:{kafka}", "--advertise-http", f"http://{HOST}:{http}"]
        return Machine(name, self.directory / name, options, environment)

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{HOST}:{kafka}" for kafka, _ in self.fronts.values())

    def url(self, name: str) -> str:
        """Where clients of HTTP reach a node."""
        return f"http://{HOST}:{self.fronts[name][1]}"

    def name_of(self, port: int) -> str:
        """The node whose front has this port."""
        return next((name for name, ports in self.fronts.items() if port in ports), "")

    # Paths that a fault cuts

    def to_etcd(self, name: str) -> list[NetworkPath]:
        return [NetworkPath(name, f"etcd-{number}") for number in range(MEMBERS)]

    def to_bucket(self, name: str) -> list[NetworkPath]:
        return [NetworkPath(name, BUCKET)]

    def between(self, one: str, other: str) -> list[NetworkPath]:
        return [NetworkPath(one, other), NetworkPath(other, one)]

    def is_whole(self) -> bool:
        """Whether every node is a member, and every partition and engine has one."""
        status = patiently(self.operations.status)
        return bool(status.nodes == len(NODES) and status.unassigned == 0 and status.unassigned_engines == 0)

    def keep_logs(self, directory: Path) -> None:
        """Copies what the nodes said to where the report is."""
        for machine in self.nodes.values():
            shutil.copy(machine.log, directory)

    def said(self, *words: str) -> dict[str, list[str]]:
        """The lines of each node's log that have one of these words."""
        logs = {name: machine.log.read_text("utf-8", "replace") for name, machine in self.nodes.items()}
        return {
            name: [line for line in log.splitlines() if any(word in line for word in words)]
            for name, log in logs.items()
        }


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Asks again while etcd does not answer: a member of it may be stopped at the same time, or the machine be busy."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return ask()
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def until(is_so: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
    """Waits for it; whether it happened in time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
