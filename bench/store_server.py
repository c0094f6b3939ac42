"""The S3 server that benchmarks of the cold tier use: a SeaweedFS of their own, or one that runs already.

`run.py --scale` with small scales is a test of the benchmarks, which has a server for all of them: its address comes in
an environment variable, and everything goes below a prefix that nobody else has.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tidelog.secret import Secret
from tidelog.store.settings import StoreSettings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, S3Server

RUNNING = "BENCH_S3"


class Store(Protocol):
    """What a benchmark needs of a server."""

    @property
    def endpoint(self) -> str: ...

    def url(self, prefix: str) -> str: ...

    def settings(self) -> StoreSettings: ...


class RunningStore:
    """A server that somebody else started and will stop."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._own = f"bench-{uuid.uuid4().hex}"

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{self._own}/{prefix}"

    def settings(self) -> StoreSettings:
        return StoreSettings(
            store_endpoint=self.endpoint,
            store_access_key_id=ACCESS_KEY_ID,
            store_secret_access_key=Secret(SECRET_ACCESS_KEY),
        )


@contextmanager
def store_server(scratch: Path) -> Iterator[Store]:
    """A server with an empty place in it; its own data goes below `scratch`."""
    endpoint = os.environ.get(RUNNING)
    if endpoint:
        yield RunningStore(endpoint)
        return
    directory = scratch / "s3"
    directory.mkdir()
    server = S3Server(directory)
    server.begin()
    try:
        yield server
    finally:
        server.kill()
