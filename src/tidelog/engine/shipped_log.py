"""The shipped part of an engine's log, read backwards by objects: for whoever looks for something old in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from tidelog.engine.core import ShippedPieces
from tidelog.log.frame import Frames
from tidelog.tier.catalog import Catalog
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.history import History
from tidelog.tier.keys import EngineKeys
from tidelog.tier.metadata.open import BUCKET, open_metadata_store
from tidelog.tier.object_store import ObjectStore

_FETCHING_THREADS = 2


def shipped_pieces_of(objects: ObjectStore, keys: EngineKeys) -> ShippedPieces:
    """The log of an engine in a store, below an LSN, newest object first. The store is asked when it is called."""

    def pieces(below_lsn: int) -> Iterator[Iterator[Frames]]:
        fetchers = DaemonPool(_FETCHING_THREADS, "tidelog-shipped")
        try:
            with open_metadata_store(BUCKET, objects, read_only=True) as metadata:
                catalog = Catalog(metadata, keys)
                history = History(catalog, objects, fetchers)
                for descriptor in reversed(list(catalog.between(catalog.start_offset(), below_lsn))):
                    yield _frames(history, descriptor.start_offset, min(descriptor.next_offset, below_lsn))
        finally:
            fetchers.shutdown(wait=False, cancel_futures=True)

    return pieces


def _frames(history: History, first_lsn: int, stop_lsn: int) -> Iterator[Frames]:
    with closing(history.read(first_lsn, stop_lsn)) as reader:
        while (batch := reader.next_batch()) is not None:
            assert batch.frames is not None
            yield batch.frames.slice(batch.start, batch.stop)
