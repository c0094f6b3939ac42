"""Fetch sessions: what a consumer has to say and is told, and which sessions go when there are too many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.kafka.test_server import (
    FETCH,
    PRODUCE,
    WAIT_SECONDS,
    Client,
    Running,
    play,
    produce_request,
)

from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.fetch_sessions import FetchSession, FetchSessions

ME = "User:ANONYMOUS"
A, B = "shop.a", "shop.b"
INITIAL, FINAL = 0, -1


def request(
    session_id: int = 0,
    epoch: int = INITIAL,
    offsets: dict[str, int] | None = None,
    forgotten: tuple[str, ...] = (),
    *,
    wait_ms: int = 0,
) -> Any:
    """Partition 0 of topics, from offsets on."""
    module = wire(FETCH)
    topics = [
        module.FetchRequestTopic(
            topic=topic,
            partitions=[module.FetchRequestPartition(partition=0, fetch_offset=at, partition_max_bytes=1 << 20)],
        )
        for topic, at in (offsets or {}).items()
    ]
    gone = [module.FetchRequestForgottenTopic(topic=topic, partitions=[0]) for topic in forgotten]
    return module.FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=1 << 24,
        session_id=session_id,
        session_epoch=epoch,
        topics=topics,
        forgotten_topics_data=gone,
    )


def told(response: Any) -> dict[str, tuple[int, int, bool]]:
    """By topic: error, high watermark, whether there are records."""
    return {
        topic.topic: (part.error_code, part.high_watermark, bool(part.records))
        for topic in response.responses
        for part in topic.partitions
    }


async def both_topics(server: Running) -> Client:
    client = await server.client()
    for topic in (A, B):
        await client.call(PRODUCE, 9, produce_request(b"first", topic=topic))
    return client


@pytest.mark.parametrize("version", [7, 11, 12])
def test_incremental_answers_have_only_what_is_new(tmp_path: Path, version: int) -> None:
    """Nothing has to be named again, and a topic without news is not answered for."""

    async def work(server: Running) -> None:
        client = await both_topics(server)
        full = await client.call(FETCH, version, request(offsets={A: 0, B: 1}))
        assert full.session_id > 0
        assert told(full) == {A: (0, 1, True), B: (0, 1, False)}
        moved = await client.call(FETCH, version, request(full.session_id, 1, {A: 1}))
        assert (moved.error_code, moved.session_id, told(moved)) == (0, full.session_id, {})
        await client.call(PRODUCE, 9, produce_request(b"second", topic=B))
        news = await client.call(FETCH, version, request(full.session_id, 2, wait_ms=WAIT_SECONDS * 1000))
        assert told(news) == {B: (0, 2, True)}
        forgotten = await client.call(FETCH, version, request(full.session_id, 3, {A: 0}, (B,)))
        assert told(forgotten) == {A: (0, 1, True)}

    play(tmp_path, work)


def test_errors_are_told_until_they_are_over(tmp_path: Path) -> None:
    """A position beyond the end each time; the high watermark once more after it."""

    async def work(server: Running) -> None:
        client = await both_topics(server)
        full = await client.call(FETCH, 12, request(offsets={A: 1, B: 1}))
        for epoch, at in ((1, {A: 9}), (2, {})):
            wrong = await client.call(FETCH, 12, request(full.session_id, epoch, at))
            assert told(wrong)[A][0] == ErrorCode.OFFSET_OUT_OF_RANGE
            assert B not in told(wrong)
        right = await client.call(FETCH, 12, request(full.session_id, 3, {A: 1}))
        assert told(right) == {A: (0, 1, False)}
        assert told(await client.call(FETCH, 12, request(full.session_id, 4))) == {}

    play(tmp_path, work)


def test_epochs_and_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """The client then begins again with a full request, which ends the old session."""

    async def work(server: Running) -> None:
        client = await both_topics(server)
        full = await client.call(FETCH, 12, request(offsets={A: 1}))
        for session_id, epoch, code in (
            (full.session_id, 2, ErrorCode.INVALID_FETCH_SESSION_EPOCH),
            (full.session_id + 1, 1, ErrorCode.FETCH_SESSION_ID_NOT_FOUND),
        ):
            answer = await client.call(FETCH, 12, request(session_id, epoch))
            assert (answer.error_code, answer.responses) == (code, [])
        again = await client.call(FETCH, 12, request(full.session_id, INITIAL, {A: 1}))
        assert again.session_id not in (0, full.session_id)
        ended = await client.call(FETCH, 12, request(again.session_id, FINAL, {A: 0}))
        assert (ended.session_id, told(ended)) == (0, {A: (0, 1, True)})
        for gone in (full.session_id, again.session_id):
            answer = await client.call(FETCH, 12, request(gone, 1))
            assert answer.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND

    play(tmp_path, work)


def test_without_a_session_nothing_is_kept(tmp_path: Path) -> None:
    """As librdkafka asks."""

    async def work(server: Running) -> None:
        client = await both_topics(server)
        answer = await client.call(FETCH, 12, request(0, FINAL, {A: 0}))
        assert (answer.session_id, told(answer)) == (0, {A: (0, 1, True)})
        answer = await client.call(FETCH, 6, request(0, FINAL, {A: 0}))
        assert told(answer) == {A: (0, 1, True)}

    play(tmp_path, work)


# The sessions of a broker, with a clock of their own


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(sessions: FetchSessions, *topics: str) -> FetchSession:
    found = sessions.make(ME, request(offsets=dict.fromkeys(topics, 0)))
    assert found is not None
    return found


def test_a_session_is_its_principal_s() -> None:
    """To others it does not exist, and they do not end it."""
    sessions = FetchSessions(Clock())
    own = made(sessions, A)
    for epoch in (1, INITIAL, FINAL):
        expected = ErrorCode.FETCH_SESSION_ID_NOT_FOUND if epoch == 1 else None
        assert sessions.begin("User:mallory", request(own.id, epoch)) is expected
    assert sessions.begin(ME, request(own.id, 1)) is own


def test_a_session_answers_one_request_at_a_time() -> None:
    """Two at once could be told in another order than they were asked."""
    sessions = FetchSessions(Clock())
    own = made(sessions, A)
    own.is_in_use = True
    assert sessions.begin(ME, request(own.id, 1)) is ErrorCode.INVALID_FETCH_SESSION_EPOCH


def test_the_session_that_was_silent_longest_goes() -> None:
    """After its time; until then there is no room for another one, unless it is larger than an old one."""
    clock = Clock()
    sessions = FetchSessions(clock, max_sessions=2, eviction_seconds=10)
    first, second = made(sessions, A), made(sessions, A, B)
    assert sessions.make(ME, request(offsets={A: 0, B: 0})) is None
    clock.now += 9
    assert sessions.begin(ME, request(first.id, 1)) is first
    clock.now += 1
    third = made(sessions, A)
    assert sessions.begin(ME, request(second.id, 1)) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    clock.now += 5
    assert sessions.begin(ME, request(first.id, 2)) is first
    assert sessions.begin(ME, request(third.id, 1)) is third
    assert sessions.make(ME, request(offsets={A: 0})) is None
    larger = made(sessions, A, B)  # the first is 15 s old, and has one partition
    assert sessions.begin(ME, request(first.id, 3)) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert sessions.begin(ME, request(larger.id, 1)) is larger
    assert (len(sessions), sessions.evicted) == (2, 2)


def test_epochs_begin_again_after_the_largest() -> None:
    """With 1: 0 asks for a new session."""
    sessions = FetchSessions(Clock())
    own = made(sessions, A)
    own.next_epoch = (1 << 31) - 1
    assert sessions.begin(ME, request(own.id, (1 << 31) - 1)) is own
    assert sessions.begin(ME, request(own.id, 1)) is own


def test_partitions_with_records_go_behind_the_others() -> None:
    """So that one that always has more does not starve them."""
    sessions = FetchSessions(Clock())
    own = made(sessions, A, B)
    module = wire(FETCH)
    part = module.FetchResponsePartitionData
    topic = module.FetchResponseFetchableTopicResponse(topic=A, partitions=[part(partition_index=0, records=[b"x"])])
    own.answered([topic], is_full=False)
    assert [name for name, _ in own.asked()] == [B, A]


changes = st.tuples(st.sampled_from([A, B, "shop.c"]), st.sampled_from(["ask", "forget", "append", "nothing"]))


@given(st.lists(changes, max_size=30))
def test_a_consumer_with_a_session_knows_what_one_without_knows(steps: list[tuple[str, str]]) -> None:
    """Whatever it asks for and forgets: what it was told last is what a full answer would tell."""
    module = wire(FETCH)
    sessions = FetchSessions(Clock())
    own = made(sessions, A)
    high = dict.fromkeys([A, B, "shop.c"], 0)
    wanted, known, epoch = {A}, dict[str, int](), 1
    for topic, step in steps:
        asks = {topic: 0} if step == "ask" else {}
        forgets = (topic,) if step == "forget" else ()
        wanted |= set(asks)
        wanted -= set(forgets)
        high[topic] += step == "append"
        assert sessions.begin(ME, request(own.id, epoch, asks, forgets)) is own
        epoch += 1
        assert {name for name, _ in own.asked()} == wanted
        full = [
            module.FetchResponseFetchableTopicResponse(
                topic=name,
                partitions=[
                    module.FetchResponsePartitionData(partition_index=0, high_watermark=high[name], records=[])
                ],
            )
            for name, _ in own.asked()
        ]
        known |= {one.topic: one.partitions[0].high_watermark for one in own.answered(full, is_full=False)}
        assert {name: known[name] for name in wanted} == {name: high[name] for name in wanted}
