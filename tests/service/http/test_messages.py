"""Messages over HTTP: append, read from an offset, wait, follow."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.service.http.serving import WAIT_SECONDS, Events, Served, eventually, serving

import tidelog
from tidelog.client.wire import PackedMessage, packed, unpacked
from tidelog.service.http.message_json import NewMessage, to_json, to_message
from tidelog.topics.message import Headers, Message

TOPIC = "/v1/topics/shop/orders"
ORDERS = f"{TOPIC}/messages"
PRODUCER = f"{TOPIC}/producers/app"
APPEND = f"{ORDERS}?producer=app"
ONE = {"messages": [{"value": "x"}]}


def test_appended_messages_are_read_back(served: Served) -> None:
    """Values come back as they were sent: text, base64, JSON and null, with key and headers."""
    messages = [
        {"value": "text", "key": "k", "headers": {"h": "v", "n": None}},
        {"value": "AP8=", "encoding": "base64", "key": "/w=="},
        {"value": {"x": [1, 2]}, "encoding": "json", "headers": [["h", "1"], ["h", "2"]]},
        {"value": None, "key": "k"},
    ]
    assert served.ok("POST", ORDERS, {"messages": messages}) == {"offsets": [0, 1, 2, 3], "partitions": [0] * 4}
    read = served.ok("GET", f"{ORDERS}?encoding=json")
    text, binary, document, null = read["messages"]
    assert (text["value"], text["key"], text["headers"]) == ("text", "k", [["h", "v"], ["n", None]])
    assert (binary["value"], binary["key"], binary["encoding"]) == ("AP8=", "/w==", "base64")
    assert (document["value"], document["headers"]) == ({"x": [1, 2]}, [["h", "1"], ["h", "2"]])
    assert (null["value"], null["key"]) == (None, "k")
    assert read["next_offsets"] == read["end_offsets"] == {"0": 4}


def test_what_was_read_can_be_sent_again(served: Served) -> None:
    """The messages of an answer are a valid request, and become the same messages."""
    first = {"value": "AP8=", "encoding": "base64", "headers": [["a", None], ["a", "eA=="]], "key": ""}
    served.ok("POST", ORDERS, {"messages": [first]})
    read = served.ok("GET", ORDERS)["messages"]
    served.ok("POST", ORDERS, {"messages": read})
    again = served.ok("GET", f"{ORDERS}?offset=1")["messages"]
    assert [{**one, "offset": 0} for one in again] == read


def test_body_can_be_the_value_of_one_message(served: Served) -> None:
    """Bytes and plain text are one message, whose key is in the query."""
    octets = {"content-type": "application/octet-stream"}
    assert served.ok("POST", f"{ORDERS}?key=k", b"\x00\xff", octets)["offsets"] == [0]
    assert served.ok("POST", ORDERS, b"text", {"content-type": "text/plain; charset=utf-8"})["offsets"] == [1]
    first, second = served.ok("GET", ORDERS)["messages"]
    assert (first["value"], first["key"], second["value"]) == ("AP8=", "aw==", "text")
    form = served.call("POST", ORDERS, b"a=b", {"content-type": "application/x-www-form-urlencoded"})
    assert form.status == 415
    assert form.json["detail"] == (
        "the body must be application/json or application/msgpack or application/octet-stream or text/plain; "
        "its content-type is application/x-www-form-urlencoded"
    )
    assert form.json["hint"] == "Name what the body is: with curl, --json or -H 'content-type: text/plain'"


def test_msgpack_goes_both_ways(served: Served) -> None:
    """A client of msgpack sends and gets bytes as they are."""
    sent = [PackedMessage(b"\x00\xff", b"k", {"h": b"v"}), PackedMessage(None, b"k", [("a", None), ("a", b"1")])]
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    answer = served.call("POST", ORDERS, msgspec.msgpack.encode(sent), headers)
    assert msgspec.msgpack.decode(answer.body) == {"offsets": [0, 1], "partitions": [0, 0]}
    read = served.call("GET", ORDERS, headers=headers)
    assert read.headers["content-type"] == "application/msgpack"
    document = msgspec.msgpack.decode(read.body)
    found = msgspec.convert(document["messages"], list[PackedMessage])
    assert [(one.value, one.key, one.headers) for one in found] == [(one.value, one.key, one.headers) for one in sent]
    assert document["next_offsets"] == {"0": 2}


def test_answered_message_is_on_the_disk(tmp_path: Path) -> None:
    """An append is answered when it is synced, unless less is asked for: then it is in a file at least."""
    with serving(tmp_path / "data") as served:
        served.produce("shop/orders", "one")
        described = served.ok("GET", "/v1/topics/shop/orders")["partitions"][0]
        assert described["durable_offset"] == 1
        served.produce("shop/orders", "two", sync="false")
        partition = served.node.http.broker.topics()[0].open[0]
        assert partition.high_watermark == 2
    with tidelog.open(tmp_path / "data") as log:
        assert [one.value for one in log.topic("shop/orders").read()] == [b"one", b"two"]


def test_sync_shipped_without_a_store_is_refused(served: Served) -> None:
    """What the server cannot promise it refuses, and nothing is appended."""
    refused = served.call("POST", f"{ORDERS}?sync=shipped", {"messages": [{"value": "a"}]})
    assert (refused.status, refused.json["error"]) == (422, "NotSupportedError")
    assert served.ok("GET", ORDERS)["messages"] == []


@pytest.mark.parametrize("partitions", [1, 3])
def test_message_sent_again_is_stored_once(tmp_path: Path, partitions: int) -> None:
    """A producer that did not hear an answer sends the same sequence again, also to a server that was started again."""
    body = {"messages": [{"value": "a", "key": "1"}, {"value": "b", "key": "2"}]}
    with serving(tmp_path / "data") as served:
        served.ok("PUT", "/v1/topics/shop/orders", {"partitions": partitions})
        first = served.ok("POST", f"{ORDERS}?producer=app&sequence=7", body)
        assert served.ok("POST", f"{ORDERS}?producer=app&sequence=7", body) == first
    with serving(tmp_path / "data") as served:
        assert served.ok("POST", f"{ORDERS}?producer=app&sequence=7", body) == first
        served.ok("POST", f"{ORDERS}?producer=app&sequence=9", body)
        values = sorted(one["value"] for one in served.ok("GET", ORDERS)["messages"])
    assert values == ["a", "a", "b", "b"]


def test_sequence_without_a_producer_is_refused(served: Served) -> None:
    """A sequence alone says nothing about who counts."""
    refused = served.call("POST", f"{ORDERS}?sequence=1", {"messages": [{"value": "a"}]})
    assert (refused.status, refused.json["hint"]) == (400, "Add producer=NAME")


def test_messages_of_partitions_are_read_by_number_or_together(served: Served) -> None:
    """A partition has its own offsets; all of them are merged by time, and the answer says where to go on in each."""
    served.ok("PUT", "/v1/topics/shop/orders", {"partitions": 2})
    for number, value in enumerate("abcd"):
        served.produce("shop/orders", value, partition=str(number % 2))
    second = served.ok("GET", f"{ORDERS}?partition=1")
    assert [one["value"] for one in second["messages"]] == ["b", "d"]
    part = served.ok("GET", f"{ORDERS}?limit=3")
    assert [one["value"] for one in part["messages"]] == ["a", "b", "c"]
    assert part["next_offsets"] == {"0": 2, "1": 1}
    rest = served.ok("GET", f"{ORDERS}?offsets={quote(json.dumps(part['next_offsets']))}")
    assert [one["value"] for one in rest["messages"]] == ["d"]


def test_positions_have_several_forms(served: Served) -> None:
    """An offset, the beginning, the end, the newest ones, and a time."""
    served.produce("shop/orders", *"abcde")
    third = served.ok("GET", f"{ORDERS}?offset=2&limit=1")["messages"][0]
    when = quote(third["timestamp"])

    def read(position: str) -> str:
        return "".join(one["value"] for one in served.ok("GET", f"{ORDERS}?offset={position}")["messages"])

    assert (read("2"), read("earliest"), read("latest"), read("-2"), read("-99")) == ("cde", "abcde", "", "de", "abcde")
    assert "cde" in read(when)
    for wrong, status in (("6", 404), ("yesterday", 400), ("2026-01-01T00:00:00", 400)):
        assert served.call("GET", f"{ORDERS}?offset={wrong}").status == status


def test_limits_of_a_read_cut_it_where_it_can_go_on(served: Served) -> None:
    """Reading in small steps, by number or by bytes, finds every message once."""
    served.produce("shop/orders", *(f"{number:04}" for number in range(50)))
    for limit in ("limit=7", "max_bytes=300", "limit=1&max_bytes=1"):
        values: list[str] = []
        offset = 0
        while offset < 50:
            step = served.ok("GET", f"{ORDERS}?offset={offset}&{limit}")
            assert step["messages"]
            values += [one["value"] for one in step["messages"]]
            offset = step["next_offsets"]["0"]
        assert values == [f"{number:04}" for number in range(50)]


def test_long_poll_waits_for_a_message(served: Served) -> None:
    """A read at the end with `wait` answers when a message comes; without one it answers with none."""
    served.produce("shop/orders", "before")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.ok, "GET", f"{ORDERS}?offset=latest&wait=60")
        served.in_loop(lambda: _waits(served))
        served.produce("shop/orders", "after")
        assert [one["value"] for one in waiting.result(WAIT_SECONDS)["messages"]] == ["after"]
    assert served.ok("GET", f"{ORDERS}?offset=latest&wait=0.01")["messages"] == []


async def _waits(served: Served) -> None:
    await eventually(lambda: bool(served.node.http.waiters))


def test_client_that_goes_away_leaves_nothing_waiting(served: Served) -> None:
    """A long poll ends with its connection."""
    served.produce("shop/orders", "before")
    connection = served.connect()
    connection.request("GET", f"{ORDERS}?offset=latest&wait=60")
    served.in_loop(lambda: _waits(served))
    connection.close()

    async def ended() -> None:
        await eventually(lambda: not served.node.http.waiters)

    served.in_loop(ended)


def test_tail_follows_and_resumes(served: Served) -> None:
    """Server-sent events follow the topic; a client that comes again with the last id misses nothing."""
    served.produce("shop/orders", "old")
    events = Events(served, "/v1/topics/shop/orders/tail")
    with closing(events):
        events.wait_until_following()
        served.produce("shop/orders", "one", "two")
        first = events.next()
        assert (first["event"], json.loads(first["data"])["value"], first["id"]) == ("message", "one", "0:2")
    again = Events(served, "/v1/topics/shop/orders/tail", {"Last-Event-ID": first["id"]})
    with closing(again):
        assert json.loads(again.next()["data"])["value"] == "two"
        served.produce("shop/orders", "three")
        assert json.loads(again.next()["data"])["value"] == "three"


def test_tail_with_a_rate_says_what_it_left_out(served: Served) -> None:
    """A busy topic is thinned out for somebody who only looks."""
    served.produce("shop/orders", *(str(number) for number in range(100)))
    events = Events(served, "/v1/topics/shop/orders/tail?offset=earliest&max_per_second=10")
    with closing(events):
        skipped = json.loads(events.next()["data"])["count"]
        assert skipped == 90
        assert json.loads(events.next()["data"])["value"] == "90"


@pytest.mark.parametrize("breaks", ["\n\n", "\r\r", "\r\n"])
def test_message_with_line_breaks_is_one_event(served: Served, breaks: str) -> None:
    """JSON that was stored with line breaks does not end an event early."""
    headers = {"content-type": "application/octet-stream"}
    served.ok("POST", ORDERS, f'{{"a":{breaks}1}}'.encode(), headers)
    events = Events(served, "/v1/topics/shop/orders/tail?offset=earliest&encoding=json")
    with closing(events):
        data = events.next()["data"]
    assert (json.loads(data)["value"], "\r" in data) == ({"a": 1}, False)


def test_stopping_ends_streams_and_long_polls(tmp_path: Path) -> None:
    """A server that stops answers those who wait, and ends those who follow."""
    with ThreadPoolExecutor(2) as pool:
        with serving(tmp_path / "data") as served:
            served.produce("shop/orders", "one")
            events = Events(served, "/v1/topics/shop/orders/tail")
            events.wait_until_following()
            waiting = pool.submit(served.call, "GET", f"{ORDERS}?offset=latest&wait=60")

            async def both() -> None:
                await eventually(lambda: len(served.node.http.waiters) == 2)

            served.in_loop(both)
        assert waiting.result(WAIT_SECONDS).json["messages"] == []
        with closing(events):
            assert all(line in (b"\n", b": still here\n") for line in events.response.readlines())


def test_topic_is_created_by_the_first_message_unless_that_is_off(tmp_path: Path) -> None:
    """As with Kafka's producers."""
    with serving(tmp_path / "data", auto_create_topics=False) as served:
        refused = served.call("POST", ORDERS, {"messages": [{"value": "a"}]})
        assert (refused.status, refused.json["error"]) == (404, "NotFoundError")
        served.ok("PUT", "/v1/topics/shop/orders", {})
        assert served.produce("shop/orders", "a") == [0]


_BYTES = st.one_of(st.binary(max_size=20), st.text(max_size=10).map(lambda text: text.encode()), st.just(b'{"a": [1]}'))
_HEADERS = st.lists(st.tuples(st.text(max_size=5), st.one_of(st.none(), _BYTES)), max_size=4)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(st.none(), _BYTES), st.one_of(st.none(), _BYTES), _HEADERS, st.sampled_from(["auto", "base64", "json"])
)
def test_any_message_survives_json_and_msgpack(
    value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]], encoding: str
) -> None:
    """Whatever bytes a message has, what a client reads can be sent again and is the same message."""
    clock = datetime(2026, 11, 17, tzinfo=UTC)
    message = Message(value, key, Headers(headers), clock, 3)
    shown = msgspec.json.encode(to_json(message, encoding))  # type: ignore[arg-type]
    names = {"value", "key", "headers", "encoding", "timestamp"}
    sent = {
        name: part for name, part in msgspec.json.decode(shown, type=dict[str, msgspec.Raw]).items() if name in names
    }
    again = to_message(msgspec.json.decode(msgspec.json.encode(sent), type=NewMessage))
    assert (again.value, again.key, again.header_list) == (value, key, message.header_list)
    wire = msgspec.msgpack.encode(packed([message]))
    (back,) = unpacked(msgspec.msgpack.decode(wire, type=list[PackedMessage]))
    assert (back.value, back.key, back.header_list) == (value, key, message.header_list)


class TestOpenedProducers:
    """A name that several processes open: the newest has it."""

    def test_restarted_server_refuses_the_older_one(self, tmp_path: Path) -> None:
        """The epoch outlives the server, also of a producer that has stored nothing yet."""
        with serving(tmp_path / "data") as served:
            opened = [served.ok("POST", PRODUCER) for _ in range(2)]
            assert opened == [{"last_sequence": None, "epoch": 1}, {"last_sequence": None, "epoch": 2}]
        with serving(tmp_path / "data") as served:
            refused = served.call("POST", f"{APPEND}&epoch=1&sequence=0", ONE)
            assert (refused.status, refused.json["error"]) == (409, "FencedError")
            assert served.ok("POST", f"{APPEND}&epoch=2&sequence=0", ONE)["offsets"] == [0]
            assert served.call("POST", f"{APPEND}&sequence=1", ONE).status == 409
            assert served.ok("POST", PRODUCER) == {"last_sequence": 0, "epoch": 3}
            assert served.call("POST", f"{TOPIC}/messages?epoch=3", ONE).status == 400

    def test_opening_ends_what_is_on_its_way(self, served: Served) -> None:
        """Loss prevented: a message of the older one that was stored after the newer one had asked where to go on took
        the sequence of the newer one's first message, which counted as stored then."""
        served.ok("POST", PRODUCER)
        stored: list[int] = []

        def append_until_fenced() -> None:
            for sequence in range(100_000):
                answer = served.call("POST", f"{APPEND}&epoch=1&sequence={sequence}&sync=false", ONE)
                if answer.status == 409:
                    return
                stored.append(sequence)

        older = Thread(target=append_until_fenced)
        older.start()
        try:
            while len(stored) < 20:
                assert older.is_alive()
                time.sleep(0.001)
        finally:
            opened = served.ok("POST", PRODUCER)
            older.join(WAIT_SECONDS)
        assert opened["last_sequence"] == stored[-1]
        first = opened["last_sequence"] + 1
        assert served.ok("POST", f"{APPEND}&epoch=2&sequence={first}", ONE)["offsets"] == [first]
