"""What the tests of the log share: payloads that can be told apart, waiting for a condition, holding up the writer."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tidelog.errors import CorruptionError, TidelogError
from tidelog.log import Log
from tidelog.log.binding import BINDING_BYTES, MAGIC
from tidelog.log.directory import wal_files
from tidelog.log.frame import Frames, Stop, scan
from tidelog.log.reader import Reader
from tidelog.log.view import LogView
from tidelog.testing import Call, FaultyFiles

DIRECTORY = Path("/log")
WAL_FILES = "wal.*.log"
LIMIT_SECONDS = 120.0
SOURCES = Path(__file__).resolve().parents[2] / "src"


def payload(number: int, size: int = 20) -> bytes:
    """A payload that says its number, padded to a size."""
    return f"{number}:".encode().ljust(size, b"-")


def payloads(count: int, size: int = 20, first: int = 0) -> list[bytes]:
    return [payload(number, size) for number in range(first, first + count)]


def everything(reader: Reader) -> list[tuple[int, bytes]]:
    """All that a reader gives, as (offset, payload)."""
    return [entry for batch in reader for entry in enumerate(batch.payloads(), batch.first_offset)]


def until_damage(reader: Reader) -> tuple[list[tuple[int, bytes]], CorruptionError]:
    """All that a reader gives before it raises, and what it raises."""
    found: list[tuple[int, bytes]] = []
    try:
        for batch in reader:
            found += enumerate(batch.payloads(), batch.first_offset)
    except CorruptionError as error:
        return found, error
    raise AssertionError(f"no damage met, {len(found)} messages read")


def contents(log: Log | LogView) -> list[tuple[int, bytes]]:
    """All that is in a log now."""
    return everything(log.read("earliest"))


def numbered(count: int, size: int = 20, first: int = 0) -> list[tuple[int, bytes]]:
    """What a log holds when payload n was appended at offset n."""
    return list(enumerate(payloads(count, size, first), first))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Looks again until the condition holds; fails only after a time that no busy machine needs."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def open_below(directory: Path) -> list[str]:
    """The open files of this process that are below a directory."""
    names = []
    for link in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(f"/proc/self/fd/{link}"))
    return [name for name in names if name.startswith(str(directory))]


def assert_nothing_leaks(use: Callable[[], None], times: int) -> None:
    """Hundreds of calls leave no more memory behind than a few. Threads of other tests may take some meanwhile: what
    leaks does so every time."""
    tracemalloc.start()
    try:
        for _ in range(20):
            use()
        assert any(_leaves_nothing(use, times) for _ in range(5))
    finally:
        tracemalloc.stop()


def _leaves_nothing(use: Callable[[], None], times: int) -> bool:
    gc.collect()
    before, references = tracemalloc.get_traced_memory()[0], sys.getrefcount(None)
    for _ in range(times):
        use()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before < 4096 and abs(sys.getrefcount(None) - references) < 100


def wal_paths(directory: Path) -> list[Path]:
    """The WAL files on a real disk, oldest first."""
    return [directory / name for _, name in wal_files(sorted(os.listdir(directory)))]


def frames_in(data: bytes, first_offset: int) -> Frames:
    """The frames of a file, which must hold nothing else but the header of one that is bound to its log."""
    result = scan(data[BINDING_BYTES:] if data.startswith(MAGIC) else data, 0, first_offset)
    assert result.stop is Stop.END
    return result.frames


def flip_bit(path: Path, byte: int, bit: int = 0) -> None:
    """In the frames of a file that is bound to its log."""
    data = bytearray(path.read_bytes())
    data[BINDING_BYTES + byte] ^= 1 << bit
    path.write_bytes(data)


def calls_of(files: FaultyFiles, operation: str, ending: str = ".log") -> list[Call]:
    return [call for call in files.calls if call.operation == operation and call.path.endswith(ending)]


def disk_with(files_by_name: dict[str, bytes], directory: Path = DIRECTORY) -> FaultyFiles:
    """A disk on which the log's directory holds these files, all of it durable."""
    files = FaultyFiles()
    files.make_directories(directory)
    for name, content in files_by_name.items():
        file = files.create(directory / name)
        file.write_at(0, content)
        file.sync()
        file.close()
    files.sync_directory(directory)
    return files


def files_of(files: FaultyFiles, directory: Path = DIRECTORY) -> dict[str, bytes]:
    """The files right in the log's directory by name, without the lock."""
    found = {}
    for path, content in files.tree().items():
        name = path.rpartition("/")[2]
        if content is not None and path == f"{directory}/{name}" and name != "lock":
            found[name] = content
    return found


def kill(files: FaultyFiles, log: Log) -> None:
    """The process dies now; its writer thread must not outlive the test."""
    files.crash()
    with contextlib.suppress(TidelogError):
        log.close()


class Gate:
    """Holds whoever makes a kind of call (the writer thread) until it is opened; leaving the block opens it."""

    def __init__(self, files: FaultyFiles, operation: str = "write_at", ending: str = ".log") -> None:
        self.reached = threading.Event()
        self._may_pass = threading.Event()
        self._operation = operation
        self._ending = ending
        files.faults.on_call = self._on_call

    def open(self) -> None:
        self._may_pass.set()

    def wait_until_reached(self) -> None:
        assert self.reached.wait(LIMIT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.open()

    def _on_call(self, call: Call) -> None:
        if call.operation == self._operation and call.path.endswith(self._ending):
            self.reached.set()
            assert self._may_pass.wait(LIMIT_SECONDS)


class Threads:
    """Runs functions on threads of their own; leaving the block waits for them and raises what one of them raised."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, action: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001  # raised again where the test waits
                self._errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.join(LIMIT_SECONDS)
        if error is None:
            assert not any(thread.is_alive() for thread in self._threads), "a thread hangs"
            for raised in self._errors:
                raise raised


def python(program: str, *arguments: str | Path) -> list[str]:
    """The command that runs a program in a Python of its own."""
    return [sys.executable, "-c", program, *map(str, arguments)]


def python_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCES)}


def run_python(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    return subprocess.run(
        python(program, *arguments),
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def start_python(program: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Starts it, with its standard output and input in our hands."""
    return subprocess.Popen(
        python(program, *arguments),
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.rstrip("\n")
