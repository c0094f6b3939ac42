"""Two brokers for the benchmarks of Kafka's protocol: `tidelog serve`, and a real Kafka (scripts/run-kafka)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from measuring import MissingPeerError

RUN_KAFKA = Path(__file__).resolve().parents[1] / "scripts" / "run-kafka"
# Where jars are kept between runs: they are fetched once.
CLIENTS = Path(__file__).resolve().parents[1] / "build" / "clients"
JARS = CLIENTS / "kafka" / "jars"
_TICKS = os.sysconf("SC_CLK_TCK")


class Broker:
    """A process that speaks Kafka's protocol."""

    name: str
    address: str
    pid: int

    def cpu_seconds(self) -> float:
        """What the process has used so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def resident_bytes(self) -> int:
        """Its memory now."""
        line = next(
            line for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if line.startswith("VmRSS")
        )
        return int(line.split()[1]) * 1024

    def threads(self) -> int:
        """How many threads it has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class Tidelog(Broker):
    """`tidelog serve` on a directory."""

    name = "tidelog"

    def __init__(self, directory: Path, *options: str) -> None:
        command = [sys.executable, "-m", "tidelog.cli.main", "serve", "--dir", str(directory)]
        command += ["--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[1]
        self.pid = self._process.pid

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Kafka(Broker):
    """A real Kafka; `jars` is where its jars are kept."""

    name = "kafka"

    def __init__(self, base: Path, jars: Path, port: int, *properties: str) -> None:
        base.mkdir(parents=True)
        jars.mkdir(parents=True, exist_ok=True)
        (base / "jars").symlink_to(jars.resolve())
        self._environment = {
            **os.environ,
            "KAFKA_BASE": str(base),
            "KAFKA_PORT": str(port),
            "KAFKA_PROPERTIES": "\n".join(properties),
        }
        started = subprocess.run(
            [str(RUN_KAFKA), "start"], env=self._environment, stdout=subprocess.DEVNULL, check=False
        )
        if started.returncode:
            raise MissingPeerError("a real Kafka does not start here: it needs java, and mvn for its jars")
        self.address = f"127.0.0.1:{port}"
        self.pid = int((base / "data" / "pid").read_text())

    def tool(self, name: str, *arguments: str) -> str:
        """What one of Kafka's tools says."""
        command = [str(RUN_KAFKA), "tool", f"org.apache.kafka.tools.{name}", *arguments]
        done = subprocess.run(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
        return done.stdout

    def stop(self) -> None:
        subprocess.run([str(RUN_KAFKA), "stop"], env=self._environment, check=True)


def maven_jars(directory: Path, artifacts: Sequence[str]) -> list[Path]:
    """The jars of these artifacts (group:name:version), fetched with mvn unless they are there."""
    paths = [directory / f"{name}-{version}.jar" for _, name, version in (one.split(":") for one in artifacts)]
    for artifact, path in zip(artifacts, paths, strict=True):
        if path.exists():
            continue
        goal = ["dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={directory}"]
        try:
            subprocess.run(["mvn", "-q", "-B", *goal], stdout=subprocess.DEVNULL, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise MissingPeerError(f"mvn does not get {artifact}") from error
    return paths
