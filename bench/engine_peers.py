"""The embedded stores that the engine is compared with: the same durable batches, the same reads.

Each of them syncs every batch: RocksDB with `sync`, LMDB by its default, SQLite in WAL mode with `synchronous=FULL`,
SlateDB by waiting for each write to be durable in a local directory.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Pair = tuple[str, bytes]


class Peer(Protocol):
    """A store of keys and values."""

    def put_batch(self, pairs: Sequence[Pair]) -> None: ...

    def get(self, key: str) -> bytes: ...

    def listed(self) -> int:
        """Makes a list of all keys and sizes, in order; how many."""

    def close(self) -> None: ...


class RocksPeer:
    """RocksDB through rocksdict."""

    def __init__(self, directory: Path) -> None:
        from rocksdict import Options, Rdict, WriteBatch, WriteOptions

        self._batch = WriteBatch
        self._database = Rdict(str(directory), Options(raw_mode=True))
        self._options = WriteOptions()
        self._options.sync = True

    def put_batch(self, pairs: Sequence[Pair]) -> None:
        batch = self._batch(raw_mode=True)
        for key, value in pairs:
            batch.put(key.encode(), value)
        self._database.write(batch, self._options)

    def get(self, key: str) -> bytes:
        return bytes(self._database[key.encode()])

    def listed(self) -> int:
        return len([(key.decode(), len(value)) for key, value in self._database.items()])

    def scanned(self) -> int:
        return sum(1 for key, value in self._database.items() if key.decode() and value)

    def close(self) -> None:
        self._database.close()


class LmdbPeer:
    """LMDB, one write transaction a batch."""

    def __init__(self, directory: Path) -> None:
        import lmdb

        self._environment = lmdb.open(str(directory), map_size=16 << 30)

    def put_batch(self, pairs: Sequence[Pair]) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, value in pairs:
                transaction.put(key.encode(), value)

    def get(self, key: str) -> bytes:
        with self._environment.begin() as transaction:
            return bytes(transaction.get(key.encode()))

    def listed(self) -> int:
        with self._environment.begin(buffers=True) as transaction:
            return len([(bytes(key).decode(), len(value)) for key, value in transaction.cursor()])

    def close(self) -> None:
        self._environment.close()


class SqlitePeer:
    """SQLite, one transaction a batch."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._database = sqlite3.connect(directory / "peer.db", isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("CREATE TABLE objects (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID")

    def put_batch(self, pairs: Sequence[Pair]) -> None:
        self._database.execute("BEGIN")
        self._database.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?)", pairs)
        self._database.execute("COMMIT")

    def get(self, key: str) -> bytes:
        return bytes(self._database.execute("SELECT value FROM objects WHERE key = ?", (key,)).fetchone()[0])

    def listed(self) -> int:
        return len(self._database.execute("SELECT key, length(value) FROM objects ORDER BY key").fetchall())

    def close(self) -> None:
        self._database.close()


class SlatePeer:
    """SlateDB's own Python binding, over a directory."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._open(directory))

    async def _open(self, directory: Path) -> None:
        from slatedb.uniffi import DbBuilder, ObjectStore, WriteBatch

        directory.mkdir()
        self._batch = WriteBatch
        self._database = await DbBuilder(str(directory).lstrip("/"), ObjectStore.resolve("file:///")).build()

    def put_batch(self, pairs: Sequence[Pair]) -> None:
        batch = self._batch()
        for key, value in pairs:
            batch.put(key.encode(), value)
        self._loop.run_until_complete(self._database.write(batch))

    def get(self, key: str) -> bytes:
        value = self._loop.run_until_complete(self._database.get(key.encode()))
        assert value is not None
        return bytes(value)

    def listed(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        self._loop.run_until_complete(self._database.shutdown())
        self._loop.close()
