"""Parts of very many topics are put together for tasks, and nothing of them is lost, doubled or moved."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidelog
from tidelog.pipeline.location import FilePiece, ReadPart
from tidelog.pipeline.source import planning as open_topics
from tidelog.pipeline.source.options import parse_source_options, source_schema
from tidelog.pipeline.source.planning import Limits, packed
from tidelog.pipeline.source.topics import TopicReader, read_partition

MIB = 1 << 20
TOPICS = 40


def part_of(number: int, size: int, records: int = 5) -> ReadPart:
    """A part of a topic of its own, in one file."""
    piece = FilePiece("wal.log", 0, records, 0, size)
    return ReadPart(topic=f"a/t{number}", start=0, stop=records, cold_stop=0, files=(piece,))


@given(
    sizes=st.lists(st.integers(0, 40 * MIB), max_size=60),
    few=st.integers(1, 20),
    max_records=st.none() | st.integers(1, 40),
    min_parts=st.none() | st.integers(1, 100),
)
def test_parts_stay_as_they_are(sizes: list[int], few: int, max_records: int | None, min_parts: int | None) -> None:
    """In order, each once; no task has more records than allowed, and there are as many tasks as were asked for."""
    parts = [part_of(number, size) for number, size in enumerate(sizes)]
    groups = packed(parts, Limits(32 * MIB, max_records, min_parts), few)
    assert [part for group in groups for part in group] == parts
    assert len(groups) >= min(len(parts), max(few, min_parts or 1))
    assert all(len(group) == 1 or sum(5 for _ in group) <= (max_records or 5 * len(group)) for group in groups)


def test_many_small_parts_are_few_tasks_and_large_ones_stay_alone() -> None:
    """A task for each of ten thousand topics would take minutes for nothing."""
    limits = Limits(128 * MIB)
    assert 128 <= len(packed([part_of(number, 100) for number in range(10_000)], limits)) <= 256
    assert len(packed([part_of(number, 120 * MIB) for number in range(1000)], limits)) == 1000
    assert len(packed([part_of(number, 100) for number in range(128)], limits)) == 128


def test_very_many_topics_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every topic of a pattern, each message once, by fewer tasks than there are topics."""
    monkeypatch.setattr(open_topics, "packed", partial(packed, few_tasks=10))
    with tidelog.open(tmp_path) as log:
        for number in range(TOPICS):
            log.topic(f"shop/t{number}").append_many([b"x"] * 3)
    options = parse_source_options({"root": str(tmp_path), "subscribePattern": "shop/.*", "columns": "topic,offset"})
    schema = source_schema(options.columns)
    partitions = TopicReader(options, schema).partitions()
    batches = [batch for one in partitions for batch in read_partition(one, options, schema)]
    found = Counter((row["topic"], row["offset"]) for batch in batches for row in batch.to_pylist())
    assert found == {(f"shop/t{number}", offset): 1 for number in range(TOPICS) for offset in range(3)}
    assert 10 <= len(partitions) <= 20
