"""As much of Google's storage API as conditional writes need, for want of the real one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Stored(NamedTuple):
    generation: int
    data: bytes


class Storage(ThreadingHTTPServer):
    """Etags are all the same there: a client that takes them for conditions is found out."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Api)
        self.objects: dict[str, Stored] = {}
        self.generations = iter(range(1000, 10_000))


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Storage

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        wanted = self.headers.get("x-goog-if-generation-match")
        found = self.server.objects.get(self.path)
        if wanted is not None and int(wanted) != (found.generation if found else 0):
            self.answer(412, None, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        stored = self.server.objects[self.path] = Stored(next(self.server.generations), data)
        self.answer(200, stored.generation)

    def do_GET(self) -> None:
        found = self.server.objects.get(self.path)
        if found is None:
            self.answer(404, None, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.answer(200, found.generation, found.data)

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, status: int, generation: int | None, body: bytes = b"") -> None:
        self.send_response(status)
        if generation is not None:
            self.send_header("ETag", '"same"')
            self.send_header("x-goog-generation", str(generation))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing on the terminal."""


@contextlib.contextmanager
def google_storage() -> Iterator[str]:
    """Its address, while it runs."""
    with Storage() as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()
