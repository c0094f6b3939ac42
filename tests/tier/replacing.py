"""A compaction in one process, step by step, as the tests of it play it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.tier.published import KEYS, TIME_FIELD, PublishedTopic

from tidelog.testing import FaultyMetadata, FaultyStore
from tidelog.testing.faults import Call
from tidelog.tier.catalog import Catalog
from tidelog.tier.descriptor import Codec
from tidelog.tier.history import History as Cold
from tidelog.tier.replacement import Replacement, ReplacementState, read_state
from tidelog.tier.replacement_build import Built, build_object
from tidelog.tier.replacement_cleanup import CleanupReport, apply_cleanup, plan_cleanup
from tidelog.tier.replacement_plan import Run, plan_merges
from tidelog.tier.replacement_switch import Replacing, begin
from tidelog.tier.sweep import SweepPlan, plan_sweep
from tidelog.topics.columns import frames_digest

MIB = 1 << 20
HOUR = 3600


def plan_of(topic: PublishedTopic, target_bytes: int = MIB) -> list[Run]:
    return plan_merges(topic.catalog, target_bytes=target_bytes).runs


def build(topic: PublishedTopic, run: Run, generation: int, codec: Codec = "none") -> Built:
    return build_object(
        *(topic.store, KEYS, run.descriptors, generation), codec=codec, digest=frames_digest, time_field=TIME_FIELD
    )


def built(topic: PublishedTopic, work: Replacing, runs: Sequence[Run], codec: Codec = "none") -> list[Replacement]:
    return [
        Replacement(descriptor=build(topic, run, work.generation, codec).descriptor, replaced=run.replaced)
        for run in runs
    ]


def compact(topic: PublishedTopic, *, codec: Codec = "none", target_bytes: int = MIB) -> list[Replacement]:
    """What a job does, in one process."""
    work = begin(topic.catalog, topic.store, topic.clock)
    return work.switch(built(topic, work, plan_of(topic, target_bytes), codec))


def clean_up(topic: PublishedTopic) -> CleanupReport:
    return apply_cleanup(plan_cleanup(topic.catalog, topic.clock.now_us(), HOUR), topic.catalog, topic.store)


def read_all(topic: PublishedTopic, catalog: Catalog | None = None) -> list[tuple[int, bytes]]:
    """All that history has, through a catalog that may remember an older one."""
    with ThreadPoolExecutor(2) as executor:
        catalog = catalog or topic.catalog
        reader = Cold(catalog, topic.store, executor).read(catalog.start_offset(), catalog.next_offset())
        found: list[tuple[int, bytes]] = []
        while (batch := reader.next_batch()) is not None:
            found += enumerate(batch.payloads(), batch.first_offset)
        return found


def state_of(topic: PublishedTopic) -> ReplacementState:
    return read_state(topic.catalog)[0]


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


def sweep_plan(topic: PublishedTopic) -> SweepPlan:
    return plan_sweep(topic.catalog, topic.store, None, topic.clock.now_us())


def tell(plan: SweepPlan) -> dict[str, int]:
    kinds = ("left_over", "orphans", "uncovered", "pending", "replaced", "newer", "lost", "damaged")
    return {kind: len(found) for kind in kinds if (found := getattr(plan, kind))}
