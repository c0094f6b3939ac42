"""Offsets of a group whose log has lost its tail, with a server in this process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.service.kafka.test_server import PRODUCE, Client, Running, play, produce_request, produced

from tidelog.service.kafka.codec import wire

TOPIC, GROUP = "shop.orders", "billing"
OFFSET_COMMIT, OFFSET_FETCH = 8, 9


async def commit(client: Client, offset: int) -> None:
    module = wire(OFFSET_COMMIT)
    partition = module.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    topic = module.OffsetCommitRequestTopic(name=TOPIC, partitions=[partition])
    found = await client.call(OFFSET_COMMIT, 8, module.OffsetCommitRequest(group_id=GROUP, topics=[topic]))
    assert found.topics[0].partitions[0].error_code == 0


async def committed(client: Client) -> int:
    module = wire(OFFSET_FETCH)
    topic = module.OffsetFetchRequestTopic(name=TOPIC, partition_indexes=[0])
    found: Any = await client.call(OFFSET_FETCH, 7, module.OffsetFetchRequest(group_id=GROUP, topics=[topic]))
    offset: int = found.topics[0].partitions[0].committed_offset
    return offset


async def append(client: Client, count: int) -> int:
    """Appends so many messages; the offset of the last one."""
    offset = -1
    for number in range(count):
        error, offset = produced(await client.call(PRODUCE, 9, produce_request(b"%d" % number)))
        assert error == 0
    return offset


def test_group_goes_on_at_the_end_of_a_log_that_lost_its_tail(tmp_path: Path) -> None:
    """A group that had read further would pass over the messages that get those offsets now."""
    served, kept = tmp_path / "served", tmp_path / "kept"
    log_files = served / "shop" / "orders"

    async def fill(server: Running) -> None:
        assert await append(await server.client(), 6) == 5

    async def read_further(server: Running) -> None:
        client = await server.client()
        assert await append(client, 4) == 9
        await commit(client, 10)
        assert await committed(client) == 10

    async def lost(server: Running) -> None:
        client = await server.client()
        assert await append(client, 1) == 6
        assert await committed(client) == 6

    async def later(server: Running) -> None:
        client = await server.client()
        assert await committed(client) == 6
        assert await append(client, 8) == 14
        assert await committed(client) == 6

    play(served, fill)
    shutil.copytree(log_files, kept)
    play(served, read_further)
    shutil.rmtree(log_files)
    shutil.copytree(kept, log_files)
    play(served, lost)
    play(served, later)
