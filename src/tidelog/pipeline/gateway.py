"""Starts the Java side of a Spark session, and listens to what it says on its standard error.

Invariants: whatever Java says reaches the standard error of this process, except for the one line that every start of
Spark prints; when Java does not start, what it said is in the error. No Java outlives a start that was interrupted.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidelog.errors import ConfigError
from tidelog.pipeline.java import JAVA_HINT

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkConf

# Spark's launcher always asks for this module, and Java always says so.
_NOISE = (b"WARNING: Using incubator modules: jdk.incubator.vector",)
_STDERR = 2
_PIPE_BYTES = 1 << 20
_SHOWN_BYTES = 2000


class GatewayError(ConfigError):
    """Java ended before Spark was there."""


def start_gateway(conf: SparkConf) -> JavaGateway:
    """A running Java with Spark in it; GatewayError with its last words where it does not run."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    ours, theirs = os.pipe()
    try:
        _enlarge(ours)
        with _interrupt_later() as interrupts:
            gateway = launch_gateway(conf, {"stderr": theirs})  # type: ignore[no-untyped-call]
            if interrupts:
                gateway.proc.stdin.close()  # by this Java knows that it is not needed any more
    except PySparkRuntimeError as error:
        os.close(theirs)
        said = _rest_of(ours)
        raise GatewayError(f"Java did not start Spark: {said}", operation="start Spark", hint=JAVA_HINT) from error
    except BaseException:
        os.close(theirs)
        os.close(ours)
        raise
    os.close(theirs)
    threading.Thread(target=_pass_on, args=(ours,), name="tidelog-spark-stderr", daemon=True).start()
    return gateway


@contextmanager
def _interrupt_later() -> Iterator[list[int]]:
    """Ctrl-C counts when Java is up: before that, Spark's launcher would leave a Java that waits for ever.

    A second Ctrl-C counts at once.
    """
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # Python interrupts the main thread alone
        return
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, _: Any) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, usual)
    if interrupts:
        signal.raise_signal(signal.SIGINT)


def _enlarge(pipe: int) -> None:
    """Nobody reads before Java is up, so all that it says until then has to fit. (A thread now would be forked.)"""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _rest_of(pipe: int) -> str:
    with os.fdopen(pipe, "rb") as lines:
        said = b"".join(line for line in lines if not line.startswith(_NOISE))
    return said[-_SHOWN_BYTES:].decode("utf-8", "replace").strip() or "it said nothing"


def _pass_on(pipe: int) -> None:
    """Until Java and its Python workers have ended, or this process has."""
    with os.fdopen(pipe, "rb") as lines:
        for line in lines:
            if not line.startswith(_NOISE):
                _write_all(line)


def _write_all(line: bytes) -> None:
    try:
        while line:
            line = line[os.write(_STDERR, line) :]
    except OSError:
        return  # a closed standard error loses the line; the pipe must be read on, or Java waits for it
