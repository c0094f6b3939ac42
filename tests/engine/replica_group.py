"""Replicas that share a store: engines on disks of their own, one of which ships, driven by one list of entries."""

from __future__ import annotations

from typing import Any, Self

from tests.engine.engines import assert_state
from tests.engine.model import Model
from tests.engine.stations import DIRECTORY, KEYS, EngineNode

from tidelog.cold.catalog import Catalog
from tidelog.engine.cold.shared_store import SharedStore
from tidelog.engine.core import Core
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Entry
from tidelog.engine.recovery.restore import Restore
from tidelog.engine.recovery.takeover import commit_takeover, finish_takeover, prepare_takeover
from tidelog.engine_wiring import is_owned_elsewhere
from tidelog.errors import NotFoundError
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.store.scheduler import Threads

WAIT_SECONDS = 60.0


class Replica(EngineNode):
    """An engine that ships, or follows the one that does."""

    def open_shared(self) -> Self:
        """As `open_engine(shares_store=True)` does, over disks and stores that fail when they are told to."""
        finish_takeover(self.files, DIRECTORY)
        metadata = BucketMetadataStore(self.objects, proves_late=True)
        if not is_owned_elsewhere(self.files, DIRECTORY, Catalog(metadata, KEYS), WAIT_SECONDS):
            return self.open()
        core = Core.open(DIRECTORY, self.settings, self.files, self.clock)
        threads = Threads()
        self.shared = SharedStore(core, self.objects, metadata, KEYS, threads=threads, node=self.name)
        self._engine = Engine(core, self.shared.reader, self.shared, threads=threads, runs_in_background=False)
        return self

    def take_over(self) -> None:
        """As `Engine.take_over` does."""
        copy = prepare_takeover(self.files, DIRECTORY)
        Restore(
            *(copy, self.objects, BucketMetadataStore(self.objects, proves_late=True)),
            keys=KEYS,
            node=self.name,
            settings=self.settings,
            files=self.files,
            clock=self.clock,
            take_over=True,
            renews_lease=False,
        ).run()
        self.close()
        commit_takeover(self.files, DIRECTORY)
        self.open_shared()
        assert not self.engine.is_follower

    def kill(self) -> None:
        """The process is gone."""
        engine = self._engine
        if engine is None:
            return
        if engine.is_follower:
            self.shared.stop()
            engine._core.close()
            self._engine = None
        else:
            self.crash()

    @property
    def is_open(self) -> bool:
        return self._engine is not None


class Log:
    """What drives them: entries in order, a model of the state after each, and the mark up to which they are final."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Entry]] = []
        self.model = Model()
        self.low_water_mark = 0

    @property
    def last_seq(self) -> int:
        return self.entries[-1][0] if self.entries else 0

    def add(self, entries: list[tuple[int, Entry]]) -> None:
        for seq, entry in entries:
            self.entries.append((seq, entry))
            self.model.apply(seq, entry)

    def cut(self, seq: int) -> None:
        """Entries after a seq were not final, and are thrown away."""
        self.entries = [one for one in self.entries if one[0] <= seq]
        self.model.roll_back(seq)

    def drive(self, replica: Replica, up_to: int) -> None:
        """Gives a replica the entries that it lacks up to a seq."""
        some = [one for one in self.entries if replica.engine.applied_seq < one[0] <= up_to]
        if some:
            replica.engine.apply_many(some)

    def check(self, replica: Replica, seqs: list[int]) -> None:
        """A replica has what the entries have led to, at its newest seq and at others that it keeps."""
        engine = replica.engine
        for seq in {engine.applied_seq, *(one for one in seqs if one <= engine.applied_seq)}:
            try:
                assert_state(engine, self.model, seq)
            except NotFoundError:
                # Only a state before the start of history may not be found, and a read may learn of that start. The
                # owner's may be after the newest state of a replica that was restored and has not caught up.
                if seq >= engine._kept_from():
                    raise


def settings_of(**more: Any) -> dict[str, Any]:
    """Everything leaves the disk as soon as it may."""
    return {"local_retention_bytes": 0, "rotate_max_bytes": 4 << 10, "inline_value_bytes": 0, **more}
