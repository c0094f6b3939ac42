"""Produce and the disk: what shares a sync, what is answered meanwhile, and what when the disk fails or hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from tests.service.kafka.test_server import (
    FETCH,
    PRODUCE,
    WAIT_SECONDS,
    Running,
    fetch_request,
    fetched,
    play,
    produce_request,
    produced,
)

import tidelog
from tidelog.errors import LogFailedError
from tidelog.log.writer import ActiveFile
from tidelog.service.kafka.broker import Broker
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.produce import Produce


class Disk:
    """Syncs wait while it is held, and fail once it is broken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs = 0
        self.is_broken = False
        self._free = threading.Event()
        self._free.set()
        sync = ActiveFile.sync

        def gated(active: ActiveFile) -> None:
            self.syncs += 1
            assert self._free.wait(WAIT_SECONDS)
            if self.is_broken:
                raise LogFailedError("the disk failed to sync")
            sync(active)

        monkeypatch.setattr(ActiveFile, "sync", gated)

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.release()


async def until_appended(server: Running, next_offset: int) -> None:
    """Until the log has accepted so much."""
    topic = server.node._directory.topic("shop/orders")
    async with asyncio.timeout(WAIT_SECONDS):
        while topic.next_offset < next_offset:
            await asyncio.sleep(0.001)


def test_requests_that_come_during_a_sync_are_appended_and_share_the_next_one(tmp_path: Path, disk: Disk) -> None:
    """Of one connection and of several; their answers come in order."""

    async def work(server: Running) -> None:
        client, other = await server.client(), await server.client()
        assert produced(await client.call(PRODUCE, 9, produce_request(b"first"))) == (0, 0)
        disk.hold()
        before = disk.syncs
        for one in (client, other):
            await one.send(b"".join(one.request(PRODUCE, 9, produce_request(b"%d" % n)) for n in range(10)))
        await until_appended(server, 21)
        disk.release()
        offsets = [[produced((await one.answer(PRODUCE, 9))[1])[1] for _ in range(10)] for one in (client, other)]
        assert offsets == [sorted(part) for part in offsets]
        assert sorted(offsets[0] + offsets[1]) == list(range(1, 21))
        assert disk.syncs - before <= 2  # the one that was held has what came before it, the next one all the rest

    play(tmp_path, work)


def test_a_disk_that_hangs_is_answered_as_a_timeout(tmp_path: Path, disk: Disk) -> None:
    """The request after it has its own time, and is answered once the disk goes on."""

    def impatient(value: bytes) -> Any:
        request = produce_request(value)
        request.timeout_ms = 20
        return request

    async def work(server: Running) -> None:
        client = await server.client()
        assert produced(await client.call(PRODUCE, 9, produce_request(b"first"))) == (0, 0)
        disk.hold()
        for _ in range(2):
            assert produced(await client.call(PRODUCE, 9, impatient(b"late"))) == (ErrorCode.REQUEST_TIMED_OUT, -1)
        await client.send(client.request(PRODUCE, 9, produce_request(b"patient")))
        await until_appended(server, 4)
        disk.release()
        assert produced((await client.answer(PRODUCE, 9))[1]) == (0, 3)

    play(tmp_path, work)


def test_a_sync_that_fails_refuses_all_that_waited_for_it(tmp_path: Path, disk: Disk) -> None:
    """None of them hangs, and none is told that it is safe."""
    answers = list[tuple[int, int]]()

    async def work(server: Running) -> None:
        client = await server.client()
        assert produced(await client.call(PRODUCE, 9, produce_request(b"first"))) == (0, 0)
        disk.hold()
        await client.send(b"".join(client.request(PRODUCE, 9, produce_request(b"lost")) for _ in range(3)))
        await until_appended(server, 4)
        disk.is_broken = True
        disk.release()
        answers.extend([produced((await client.answer(PRODUCE, 9))[1]) for _ in range(3)])

    with pytest.raises(LogFailedError):  # stopping says it, too
        play(tmp_path, work)
    assert answers == [(ErrorCode.KAFKA_STORAGE_ERROR, -1)] * 3


def test_log_that_failed_is_opened_again_by_the_next_request(tmp_path: Path, disk: Disk) -> None:
    """Without a restart of the server. It has what was on the disk, and goes on behind that."""

    async def work(server: Running) -> None:
        client = await server.client()
        assert produced(await client.call(PRODUCE, 9, produce_request(b"kept"))) == (0, 0)
        disk.is_broken = True
        assert produced(await client.call(PRODUCE, 9, produce_request(b"lost"))) == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
        disk.is_broken = False
        error, offset = produced(await client.call(PRODUCE, 9, produce_request(b"again")))
        assert error == ErrorCode.NONE
        response = await client.call(FETCH, 12, fetch_request(0))
        assert fetched(response).high_watermark == offset + 1

    play(tmp_path, work)
    with tidelog.open(tmp_path) as log:
        values = [message.value for message in log.topic("shop/orders").read()]
        assert (values[0], values[-1]) == (b"kept", b"again")


def test_a_request_whose_time_has_come_disturbs_no_other() -> None:
    """With uvloop a Produce request failed, and its connection with it, when another one was due in that moment."""

    class Pending:
        def __init__(self, deadline: float) -> None:
            self.deadline = deadline
            self.is_over = asyncio.Event()

        def time_out(self) -> None:
            self.is_over.set()

    async def test() -> None:
        handler = Produce(cast("Broker", None))
        now = asyncio.get_running_loop().time()
        pending = [Pending(now + seconds) for seconds in (0.0, 0.001, -1.0)]
        for one in pending:
            handler.watch(one)
        async with asyncio.timeout(60):
            for one in pending:
                await one.is_over.wait()

    uvloop.run(test())
