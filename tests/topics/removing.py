"""Takes messages out of a topic's history, as a compaction by key does, for tests of what reads it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import tidelog
from tidelog.clock import SystemClock
from tidelog.cold.rewrite import RemovedOffsets, build_object, plan_rewrites
from tidelog.cold.rewrite_commit import Rewrite, begin
from tidelog.topics.columns import frames_digest
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.topic import Topic

NAME = "shop/prices"


class Shop:
    """One topic in a store, on one node after the other: each begins with an empty disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nodes = 0

    def open(self, **settings: Any) -> tidelog.LogDirectory:
        """On a new node, so that all that is read of the past comes from the store."""
        self._nodes += 1
        return self.open_again(**settings)

    def open_again(self, **settings: Any) -> tidelog.LogDirectory:
        """On the last node."""
        return tidelog.open(self.directory, store=f"file://{self._path}/store", metadata="bucket", **settings)

    @property
    def directory(self) -> Path:
        """The disk of the last node."""
        return self._path / f"node-{self._nodes}"

    def ship(self, *fill: Callable[[Topic], object]) -> None:
        """Ships what each of them appends, as one object each, and one more, which is never touched."""
        with self.open() as log:
            topic = log.topic(NAME)
            for append in fill:
                append(topic)
                topic.ship()
            topic.append(b"last", key=b"last")
            topic.ship()

    def remove(self, offsets: Collection[int]) -> None:
        """Removes these messages from the store."""
        with self.open_reading() as log:
            assert log._tier is not None
            catalog, objects, clock = log._tier.catalog("shop", "prices"), log._tier.objects, SystemClock()
            bits = sum(1 << offset for offset in offsets).to_bytes(max(offsets) // 8 + 1, "little")
            work = begin(catalog, objects, clock)
            made = []
            for run in plan_rewrites(catalog, lambda one: True, target_bytes=1 << 20).runs:
                built = build_object(
                    *(objects, catalog.keys, run.descriptors, work.generation),
                    codec="zstd",
                    digest=frames_digest,
                    time_field=TIMESTAMP_FIELD,
                    removed=RemovedOffsets(0, bits),
                )
                made.append(Rewrite(descriptor=built.descriptor, replaced=run.replaced))
            work.switch(made)

    def open_reading(self) -> tidelog.LogDirectory:
        """For a compaction: a directory of its own, which owns nothing."""
        return tidelog.open(self._path / "aside", store=f"file://{self._path}/store", metadata="bucket")
