"""What is kept of the batches that consumers have fetched."""

from __future__ import annotations

from tidelog.service.kafka.partition_reader import EncodedBatches, Fetched


def test_encoded_batches_of_all_partitions_have_one_bound() -> None:
    """Those that were used longest ago go; one that would take most of the room is not kept at all."""
    kept, one, other = EncodedBatches(100), object(), object()
    for number in range(4):
        kept.keep(one, number, number + 1, Fetched(bytes(25), number + 1))
    assert kept.find(one, 0, 1) == Fetched(bytes(25), 1)
    kept.keep(other, 0, 1, Fetched(bytes(40), 1))
    assert [kept.find(one, number, number + 1) is not None for number in range(4)] == [True, False, False, True]
    assert kept.kept_bytes == 90
    kept.keep(other, 1, 2, Fetched(bytes(51), 2))
    assert kept.find(other, 1, 2) is None
    kept.keep(other, 0, 1, Fetched(bytes(30), 1))  # another consumer has encoded the same
    assert kept.kept_bytes == 80


def test_encoded_batches_of_a_closed_partition_are_forgotten() -> None:
    """Those of the others stay."""
    kept, one, other = EncodedBatches(100), object(), object()
    for reader in (one, other):
        kept.keep(reader, 0, 1, Fetched(bytes(10), 1))
    kept.forget(one)
    assert (kept.find(one, 0, 1), kept.find(other, 0, 1), kept.kept_bytes) == (None, Fetched(bytes(10), 1), 10)
