"""Parquet files in any store, as file objects for Arrow: a bucket needs neither a jar nor a file system."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.errors import InputError, NotFoundError
from tidelog.store.object_store import ObjectStore, ObjectWriter
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

_KEPT_STORES = 16
_BUFFER_BYTES = 1 << 20
_GROUP_ROWS = 131_072
_GROUP_BYTES = 64 << 20


class FilePointer(Protocol):
    """Where the files of a table are; workers open it too, so it can be pickled."""

    def writing(self, key: str) -> AbstractContextManager[pa.NativeFile]:
        """A file that appears whole when the block ends, and not at all when it ends by an exception."""
        ...

    def reading(self, key: str) -> pa.NativeFile:
        """A file to read from anywhere in it."""
        ...

    def path_of(self, key: str) -> str | None:
        """Where it is on a file system; None where it is in none."""
        ...


class TableLocation(msgspec.Struct, frozen=True):
    """A store that is the directory of a Parquet table."""

    url: str
    settings: StoreSettings

    def open(self) -> ObjectStore:
        """The store, kept open in this process; a directory that was removed since then is made again."""
        path = self.path_of("")
        if path is not None and not os.path.isdir(path):
            _opened.cache_clear()
        return _opened(self)

    def open_existing(self) -> ObjectStore:
        """The same to read from: a directory that is not there is not made."""
        path = self.path_of("")
        if path is not None and not os.path.exists(path):
            raise NotFoundError(f"there is no table in {self.url}", hint="`tidelog pipeline table` creates one")
        return self.open()

    @contextmanager
    def writing(self, key: str) -> Iterator[pa.NativeFile]:
        with self.open().open_writer(key) as writer:
            sink = pa.PythonFile(_Sink(writer), mode="w")
            yield sink
            sink.flush()

    def reading(self, key: str) -> pa.NativeFile:
        store = self.open()
        stored = _Stored(store, key, store.head(key).size)
        return pa.PythonFile(io.BufferedReader(stored, _BUFFER_BYTES), mode="r")

    def path_of(self, key: str) -> str | None:
        return local_path(f"{self.url.rstrip('/')}/{key}") if self.url.startswith("file:") else None


def table_location(path: str | os.PathLike[str], settings: StoreSettings | None = None) -> TableLocation:
    """The place of a Parquet table: a directory, or a store URL with the settings of its store."""
    text = os.fspath(path)
    if not text:
        raise InputError(
            "the location of the table is empty", hint="Name a directory, or a store such as s3://bucket/table"
        )
    if "://" not in text:
        return TableLocation(Path(text).expanduser().absolute().as_uri(), StoreSettings())
    is_local = text.startswith("file:")
    return TableLocation(text, StoreSettings() if is_local or settings is None else settings)


def local_path(url: str) -> str:
    """The path that a file:// URL names."""
    return unquote(urlsplit(url).path)


@lru_cache(_KEPT_STORES)
def _opened(place: TableLocation) -> ObjectStore:
    return open_store(place.url, place.settings)


def write_batches(sink: pa.NativeFile, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Writes a whole file, in row groups of a good size for readers. Returns how many bytes it has."""
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for group in _groups(batches):
            writer.write_table(pa.Table.from_batches(group, schema))
    return int(sink.tell())


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


class _Sink(io.RawIOBase):
    """An object being written to a store. Closing it does nothing: only its writer knows whether all is well."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]  # Arrow passes a buffer
        self._writer.write(view)
        return view.nbytes

    def tell(self) -> int:
        return self._writer.bytes_written


class _Stored(io.RawIOBase):
    """An object read by ranges."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        length = min(len(view), max(0, self._size - self._position))
        if length == 0:
            return 0
        data = self._store.read_range(self._key, self._position, length)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
