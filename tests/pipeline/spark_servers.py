"""Spark's own servers for the tests: a standalone master with two workers, and a Spark Connect server.

They run on the jars of the installed PySpark, on ports that are free, and know nothing of tidelog unless they are told.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

from tidelog.cli.dev_s3 import free_ports

HOST = "127.0.0.1"
# For a machine that has much else to do.
START_SECONDS = 120
DRIVER_SECONDS = 500
SHOWN_LOG_LINES = 30
SOURCES = Path(__file__).resolve().parents[2] / "src"
# They are small and live for seconds.
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"


class RunningServer:
    """A server, and the file with what it says."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def wait_for_port(self, port: int) -> None:
        """Until it listens there; what it said where it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not is_open(port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text("utf-8", "replace").splitlines()[-SHOWN_LOG_LINES:]
                raise RuntimeError("\n".join([f"nobody listens on port {port}", *said]))
            time.sleep(0.2)


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def standalone_cluster(directory: Path, workers: int = 2) -> Iterator[str]:
    """The URL of a master with workers of one core each; what they say is in the directory."""
    (port,) = free_ports(1)
    url = f"spark://{HOST}:{port}"
    with ExitStack() as stack:
        master = ["spark-class", MASTER, "--host", HOST, "--port", str(port), "--webui-port", "0"]
        stack.enter_context(_running(directory / "master", master)).wait_for_port(port)
        for number in range(workers):
            place = directory / f"worker-{number}"
            worker = ["spark-class", WORKER, "--host", HOST, "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            stack.enter_context(_running(place, [*worker, "--work-dir", str(place / "work"), url]))
        yield url


@contextmanager
def connect_server(directory: Path) -> Iterator[str]:
    """The URL of a Spark Connect server with two cores, on which tidelog is installed."""
    (port,) = free_ports(1)
    settings = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.driver.host": HOST,
        "spark.connect.grpc.binding.address": HOST,
        "spark.connect.grpc.binding.port": str(port),
    }
    told = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = ["spark-submit", "--driver-java-options", JAVA_OPTIONS, *told, "--class", CONNECT, "spark-internal"]
    with _running(directory / "connect", command, PYTHONPATH=str(SOURCES), SPARK_DAEMON_MEMORY="1g") as server:
        server.wait_for_port(port)
        yield f"sc://{HOST}:{port}"


@contextmanager
def _running(directory: Path, command: list[str], **variables: str) -> Iterator[RunningServer]:
    """A program of Spark in a process group of its own."""
    directory.mkdir()
    log = directory / "log"
    program = str(Path(_find_spark_home(), "bin", command[0]))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [program, *command[1:]],
            env=_environment() | variables,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield RunningServer(process, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment() -> dict[str, str]:
    """Without the path to tidelog that the tests run with."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("SPARK_")}
    return kept | {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": HOST,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
    }


def run_driver(program: str, *arguments: str, **variables: str) -> str:
    """What a driver of its own prints: a process has one context of Spark, and that of the tests is the shared one."""
    return _output_of([sys.executable, "-c", program, *arguments], **variables)


def run_submit(master: str, archives: str, settings: dict[str, str], *program: str) -> str:
    """What a program prints that spark-submit runs."""
    told = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    submit = str(Path(_find_spark_home(), "bin", "spark-submit"))
    command = [submit, "--master", master, "--archives", archives, *told, *program]
    return _output_of(command, PYSPARK_PYTHON=sys.executable)


def _output_of(command: list[str], **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
