"""Keys go to the partitions that Kafka's clients choose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.service.kafka.kafka_python import murmur2

from tidelog.topics.partitioned import partition_of


@given(key=st.binary(max_size=70), count=st.integers(1, 1000))
def test_a_client_and_the_library_choose_the_same_partition(key: bytes, count: int) -> None:
    """Otherwise the messages of a key would not be in order."""
    assert partition_of(key, count) == (murmur2(key) & 0x7FFFFFFF) % count
