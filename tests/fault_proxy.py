"""A proxy in front of a server that speaks HTTP: what goes wrong on a network, on demand.

It passes requests on as they are, signatures included, with one connection to the server for each of a client's. While
it misbehaves, every so many requests one of `FAULTS` is met, one kind after the other; `met` counts them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Event, Lock, Thread
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self
from urllib.parse import urlsplit

UNAVAILABLE = "503"
FULL = "507"
RESET_REQUEST = "reset in the middle of the request"
RESET_ANSWER = "reset in the middle of the answer"
TRUNCATE = "answer cut short"
LOSE_ANSWER = "answer lost"
STALL = "no answer"
FAULTS = (UNAVAILABLE, FULL, RESET_REQUEST, RESET_ANSWER, TRUNCATE, LOSE_ANSWER, STALL)

_PIECE_BYTES = 64 << 10
_HOST = "127.0.0.1"
_RESET = struct.pack("ii", 1, 0)  # closing with unsent data thrown away is a reset
_REFUSALS = {UNAVAILABLE: ("Service Unavailable", "SlowDown"), FULL: ("Insufficient Storage", "InsufficientStorage")}


class Head(NamedTuple):
    """The first lines of a request or of an answer, as they came."""

    raw: bytes

    @property
    def words(self) -> list[str]:
        """Of the first line."""
        return self.raw.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)

    def field(self, name: str) -> str | None:
        """The value of a header."""
        for line in self.raw.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None


class _HangupError(Exception):
    """One side has closed its connection."""


class _CutError(Exception):
    """This exchange ends here, on purpose."""

    def __init__(self, *, by_reset: bool) -> None:
        self.by_reset = by_reset


class _Side:
    """One end of a connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a head and its body are sent one by one
        self._file: BinaryIO = link.makefile("rb")

    def head(self) -> Head:
        lines = [self._line()]
        while lines[-1] != b"\r\n":
            lines.append(self._line())
        return Head(b"".join(lines))

    def body(self, head: Head) -> Iterator[bytes]:
        """Piece by piece, chunk marks included."""
        if (head.field("transfer-encoding") or "").lower() == "chunked":
            yield from self._chunks()
        else:
            yield from self._counted(int(head.field("content-length") or 0))

    def _chunks(self) -> Iterator[bytes]:
        while True:
            mark = self._line()
            yield mark
            size = int(mark.split(b";")[0], 16)
            yield from self._counted(size)
            yield self._line()
            if not size:
                return

    def _counted(self, count: int) -> Iterator[bytes]:
        while count:
            piece = self._file.read(min(count, _PIECE_BYTES))
            if not piece:
                raise _HangupError
            count -= len(piece)
            yield piece

    def _line(self) -> bytes:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise _HangupError
        return line

    def close(self, *, by_reset: bool) -> None:
        with contextlib.suppress(OSError):
            if by_reset:
                self.link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._file.close()
            self.link.close()


class FaultProxy:
    """In front of `endpoint`, on a port of its own. Good until `misbehave` is called; `heal` ends that."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        assert address.hostname is not None
        assert address.port is not None
        self.met: Counter[str] = Counter()
        self._target = (address.hostname, address.port)
        self._listener = socket.create_server((_HOST, 0), backlog=64)
        self._guard = Lock()
        self._faults: Sequence[str] = ()
        self._every = 1
        self._requests = 0
        self._is_healed = Event()
        self._is_closed = False
        Thread(target=self._accept, name="fault-proxy", daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Where clients reach it."""
        return f"http://{_HOST}:{self._listener.getsockname()[1]}"

    def misbehave(self, *faults: str, every: int = 1) -> None:
        """From now on every so many requests one of these faults is met, in this order and again from the first."""
        with self._guard:
            self._faults, self._every, self._requests = faults, every, 0
            self._is_healed.clear()

    def heal(self) -> None:
        """From now on everything goes through; what has stalled ends without an answer."""
        with self._guard:
            self._faults = ()
            self._is_healed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.heal()
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # One connection

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._serve, args=(link,), name="fault-proxy connection", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        client, by_reset = _Side(link), False
        try:
            server = _Side(socket.create_connection(self._target, timeout=60))
        except OSError:
            client.close(by_reset=True)
            return
        try:
            while True:
                self._exchange(client, server)
        except _CutError as cut:
            by_reset = cut.by_reset
        except (OSError, _HangupError):
            by_reset = False
        finally:
            client.close(by_reset=by_reset)
            server.close(by_reset=by_reset)

    def _exchange(self, client: _Side, server: _Side) -> None:
        request = client.head()
        fault = self._next_fault()
        if fault == STALL:
            self._is_healed.wait()
            raise _CutError(by_reset=False)
        if fault in _REFUSALS:
            self._refuse(client, request, fault)
            return
        _pass_on(request, client, server, cut=_CutError(by_reset=True) if fault == RESET_REQUEST else None)
        answer = server.head()
        if fault == LOSE_ANSWER:
            _drain(server, answer, request)
            raise _CutError(by_reset=True)
        cuts = {RESET_ANSWER: _CutError(by_reset=True), TRUNCATE: _CutError(by_reset=False)}
        _pass_on(answer, server, client, cut=cuts.get(fault or ""), has_body=_has_body(answer, request))

    def _next_fault(self) -> str | None:
        with self._guard:
            self._requests += 1
            turn, rest = divmod(self._requests, self._every)
            if not self._faults or rest:
                return None
            fault = self._faults[turn % len(self._faults)]
            self.met[fault] += 1
            return fault

    def _refuse(self, client: _Side, request: Head, fault: str) -> None:
        for _ in client.body(request):
            pass
        phrase, code = _REFUSALS[fault]
        body = f"<Error><Code>{code}</Code><Message>{phrase}</Message></Error>".encode()
        head = f"HTTP/1.1 {fault} {phrase}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        client.link.sendall(head.encode() + (b"" if request.words[0] == "HEAD" else body))


def _pass_on(head: Head, source: _Side, target: _Side, *, cut: _CutError | None, has_body: bool = True) -> None:
    """Head and body from one side to the other; with a `cut` about half of it."""
    pieces = source.body(head) if has_body else iter(())
    first = next(pieces, None)
    if cut is not None and first is None:
        target.link.sendall(head.raw[: len(head.raw) // 2])
        raise cut
    target.link.sendall(head.raw)
    if cut is not None and first is not None:
        _pass_on_half(int(head.field("content-length") or 0), first, pieces, target)
        raise cut
    if first is not None:
        target.link.sendall(first)
    for piece in pieces:
        target.link.sendall(piece)


def _pass_on_half(size: int, first: bytes, pieces: Iterator[bytes], target: _Side) -> None:
    if len(first) > size // 2:
        target.link.sendall(first[: len(first) // 2])
        return
    target.link.sendall(first)
    sent = len(first)
    while sent < size // 2 and (piece := next(pieces, None)) is not None:
        target.link.sendall(piece)
        sent += len(piece)


def _drain(server: _Side, answer: Head, request: Head) -> None:
    if _has_body(answer, request):
        for _ in server.body(answer):
            pass


def _has_body(answer: Head, request: Head) -> bool:
    return request.words[0] != "HEAD" and answer.words[1] not in ("204", "304") and not answer.words[1].startswith("1")
