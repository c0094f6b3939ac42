"""A compaction in one process, step by step, as the tests of it play it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.cold.published import KEYS, TIME_FIELD, PublishedTopic

from tidelog.cold.catalog import Catalog, Codec
from tidelog.cold.gc import Collector, Plan, ReplacedObjects, Report
from tidelog.cold.reader import History as Cold
from tidelog.cold.rewrite import Built, Run, build_object, plan_merges
from tidelog.cold.rewrite_commit import Rewrite, RewriteCommit, RewriteState, begin, read_state
from tidelog.testing import FaultyMetadata, FaultyStore
from tidelog.testing.faults import Call
from tidelog.topics.columns import frames_digest

MIB = 1 << 20
HOUR = 3600


def plan_of(topic: PublishedTopic, target_bytes: int = MIB) -> list[Run]:
    return plan_merges(topic.catalog, target_bytes=target_bytes).runs


def build(topic: PublishedTopic, run: Run, generation: int, codec: Codec = "none") -> Built:
    return build_object(
        *(topic.store, KEYS, run.descriptors, generation), codec=codec, digest=frames_digest, time_field=TIME_FIELD
    )


def built(topic: PublishedTopic, work: RewriteCommit, runs: Sequence[Run], codec: Codec = "none") -> list[Rewrite]:
    return [
        Rewrite(descriptor=build(topic, run, work.generation, codec).descriptor, replaced=run.replaced) for run in runs
    ]


def compact(topic: PublishedTopic, *, codec: Codec = "none", target_bytes: int = MIB) -> list[Rewrite]:
    """What a job does, in one process."""
    work = begin(topic.catalog, topic.store, topic.clock)
    return work.switch(built(topic, work, plan_of(topic, target_bytes), codec))


def cleanup_of(topic: PublishedTopic) -> Collector:
    """What deletes replaced objects after their grace period, and nothing else."""
    now_us = topic.clock.now_us()
    return Collector(topic.catalog, topic.store, now_us, grace_seconds=HOUR, rules=[ReplacedObjects])


def clean_up(topic: PublishedTopic) -> Report:
    collector = cleanup_of(topic)
    return collector.apply(collector.plan())


def read_all(topic: PublishedTopic, catalog: Catalog | None = None) -> list[tuple[int, bytes]]:
    """All that history has, through a catalog that may remember an older one."""
    with ThreadPoolExecutor(2) as executor:
        catalog = catalog or topic.catalog
        reader = Cold(catalog, topic.store, executor).read(catalog.start_offset(), catalog.next_offset())
        found: list[tuple[int, bytes]] = []
        while (batch := reader.next_batch()) is not None:
            found += enumerate(batch.payloads(), batch.first_offset)
        return found


def state_of(topic: PublishedTopic) -> RewriteState:
    return read_state(topic.catalog)


class Watched:
    """A topic of which somebody takes a look before every change of its metadata."""

    def __init__(self, kind: str) -> None:
        self.look: object = None
        self.looks = 0
        store = FaultyStore(on_call=self._on_call if kind == "bucket" else None)
        metadata = None if kind == "bucket" else FaultyMetadata(on_call=self._on_call, multi_key=kind == "multi-key")
        self.topic = PublishedTopic(kind, store, metadata)

    def _on_call(self, call: Call) -> None:
        look, self.look = self.look, None
        if callable(look):
            self.looks += 1
            look()
        self.look = look


def sweeping(topic: PublishedTopic) -> Collector:
    """What anybody may remove who does not own the topic."""
    return Collector(topic.catalog, topic.store, topic.clock.now_us())


def tell(plan: Plan) -> dict[str, int]:
    """How many a plan has found, by action and reason."""
    return dict(Counter(f"{one.action} {one.reason}" for one in plan.found))
