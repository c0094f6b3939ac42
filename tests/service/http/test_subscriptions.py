"""Subscriptions over HTTP: consumers by long poll and WebSocket, positions, and dead letters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from confluent_kafka import Consumer
from tests.service.http.serving import WAIT_SECONDS, Served, eventually, serving
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_socket

from tidelog.service.kafka.partitions import Partition

TOPIC = "/v1/topics/shop/orders"
BILLING = f"{TOPIC}/subscriptions/billing"


def subscribe(served: Served, **options: Any) -> str:
    """The path of a new consumer of `billing`."""
    made = served.ok("POST", f"{BILLING}/consumers", {"lease_seconds": 3600, **options})
    return f"{BILLING}/consumers/{made['id']}"


def values(received: Any) -> list[str]:
    return [one["value"] for one in received["messages"]]


def settled(received: Any) -> dict[str, Any]:
    return {"messages": [[one["partition"], one["offset"]] for one in received["messages"]]}


@contextmanager
def connected(served: Served, subscription: str = "billing", **query: Any) -> Iterator[ClientConnection]:
    text = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
    host, port = served.address
    url = f"ws://{host}:{port}{TOPIC}/subscriptions/{subscription}/connect?{text}"
    with connect_socket(url, open_timeout=WAIT_SECONDS, close_timeout=WAIT_SECONDS) as socket:
        yield socket


def hear(socket: ClientConnection, op: str = "messages") -> Any:
    """The next thing that the server says, which has to be this."""
    said = json.loads(socket.recv(WAIT_SECONDS))
    assert said["op"] == op, said
    return said


def say(socket: ClientConnection, **op: Any) -> None:
    socket.send(json.dumps(op))


class TestLongPoll:
    def test_acknowledged_messages_do_not_return_after_a_close(self, tmp_path: Path) -> None:
        """What was acknowledged is stored by a close; the rest is delivered again, in order, counted."""
        with serving(tmp_path / "data") as served:
            served.produce("shop/orders", *"abcd")
            consumer = subscribe(served)
            first = served.ok("POST", f"{consumer}/receive?limit=3")
            assert (values(first), first["batch"]) == (["a", "b", "c"], 1)
            served.ok("POST", f"{consumer}/ack", {"messages": [[0, 0], [0, 2]]})
            served.ok("DELETE", consumer)
            assert served.call("POST", f"{consumer}/receive").status == 410
        with serving(tmp_path / "data") as served:
            again = served.ok("POST", f"{subscribe(served)}/receive")
            assert values(again) == ["b", "d"]

    def test_ack_after_a_restart_counts(self, tmp_path: Path) -> None:
        """Loss prevented: what a client received before the server was started again came once more after its ack."""
        with serving(tmp_path / "data") as served:
            served.produce("shop/orders", *"abcd")
            idle, busy = subscribe(served), f"{TOPIC}/subscriptions/busy/consumers"
            received = served.ok("POST", f"{idle}/receive?limit=2")
            busy += "/" + served.ok("POST", busy, {})["id"]
            assert values(served.ok("POST", f"{busy}/receive?limit=1")) == ["a"]
        with serving(tmp_path / "data") as served:
            served.ok("POST", f"{idle}/ack", settled(received))
            assert values(served.ok("POST", f"{subscribe(served)}/receive")) == ["c", "d"]
            now = served.ok("POST", busy.rpartition("/")[0], {})["id"]
            served.ok("POST", f"{busy}/ack", {"messages": [[0, 0]]})  # while another consumer is there
            assert values(served.ok("POST", f"{busy.rpartition('/')[0]}/{now}/receive")) == ["b", "c", "d"]
            assert served.call("POST", f"{idle}/receive").status == 410
            assert served.call("POST", f"{idle}/ack", {"messages": [[1, 0]]}).status == 400
            assert served.call("POST", f"{idle}/ack", {"messages": [[0, 9]]}).status == 400

    def test_answer_that_was_lost_comes_again(self, served: Served) -> None:
        """A client that asks with the last batch that it saw gets the next one, however often it asks."""
        served.produce("shop/orders", *"abcd")
        consumer = subscribe(served)
        first = served.ok("POST", f"{consumer}/receive?limit=2&seen=0")
        assert served.ok("POST", f"{consumer}/receive?limit=2&seen=0") == first
        served.ok("POST", f"{consumer}/ack", {"messages": [[0, 0]]})
        assert values(served.ok("POST", f"{consumer}/receive?seen=0")) == ["b"]
        second = served.ok("POST", f"{consumer}/receive?limit=2&seen=1")
        assert (values(second), second["batch"]) == (["c", "d"], 2)
        assert served.call("POST", f"{consumer}/receive?seen=7").status == 400

    def test_receive_waits_for_a_message(self, served: Served) -> None:
        """A long poll answers when a message comes, and with none when the time is up."""
        consumer = subscribe(served)
        assert served.ok("POST", f"{consumer}/receive?wait=0.01")["messages"] == []
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(served.ok, "POST", f"{consumer}/receive?wait=60")
            served.produce("shop/orders", "a")
            assert values(waiting.result(WAIT_SECONDS)) == ["a"]

    def test_lease_that_runs_out_gives_messages_to_others(self, served: Served) -> None:
        """A consumer whose client is gone keeps nothing."""
        served.produce("shop/orders", "a")
        gone = subscribe(served, kind="shared", lease_seconds=1)
        assert values(served.ok("POST", f"{gone}/receive")) == ["a"]
        other = subscribe(served, kind="shared")
        again = served.ok("POST", f"{other}/receive?wait=60")
        assert (values(again), again["messages"][0]["delivery_count"]) == (["a"], 2)
        late = served.call("POST", f"{gone}/ack", settled(again))
        assert (late.status, late.json["error"]) == (410, "ClosedError")

    def test_request_that_waits_keeps_its_lease(self, served: Served) -> None:
        """A long poll may be longer than the lease."""
        waiting_consumer = subscribe(served, kind="shared", lease_seconds=1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(served.ok, "POST", f"{waiting_consumer}/receive?wait=60")

            async def begun() -> None:
                await eventually(lambda: bool(served.node.http.waiters))

            served.in_loop(begun)
            subscribe(served, kind="shared", lease_seconds=1)

            async def one_is_left() -> None:
                await eventually(lambda: len(served.node.http.sessions) == 1)

            served.in_loop(one_is_left)
            served.produce("shop/orders", "a")
            assert values(waiting.result(WAIT_SECONDS)) == ["a"]

    def test_consumer_that_comes_again_takes_its_own_place(self, served: Served) -> None:
        """A client that lost its connection and its id subscribes by its name, and gets what it held."""
        served.produce("shop/orders", "a")
        before = subscribe(served, consumer="till-3")
        assert values(served.ok("POST", f"{before}/receive")) == ["a"]
        refused = served.call("POST", f"{BILLING}/consumers", {"consumer": "till-4"})
        assert (refused.status, refused.json["error"]) == (409, "ConflictError")
        after = subscribe(served, consumer="till-3")
        assert values(served.ok("POST", f"{after}/receive")) == ["a"]
        assert served.call("POST", f"{before}/extend").status == 410
        assert served.call("POST", f"{after}/extend").status == 204

    def test_messages_of_partitions_are_settled_in_their_partition(self, served: Served) -> None:
        """A consumer of several partitions settles by partition and offset."""
        served.ok("PUT", TOPIC, {"partitions": 3})
        for number in range(3):
            served.produce("shop/orders", f"{number}a", f"{number}b", partition=str(number))
        consumer = subscribe(served)
        found: set[tuple[int, int, str]] = set()
        while len(found) < 6:
            received = served.ok("POST", f"{consumer}/receive?wait=60")
            found |= {(one["partition"], one["offset"], one["value"]) for one in received["messages"]}
            served.ok("POST", f"{consumer}/ack", {**settled(received), "flush": True})
        assert found == {(n, o, f"{n}{'ab'[o]}") for n in range(3) for o in range(2)}
        described = served.ok("GET", BILLING)
        assert [part["offset"] for part in described["partitions"]] == [2, 2, 2]

    def test_cumulative_acknowledgement_covers_what_was_before(self, served: Served) -> None:
        """For an ordered subscription one offset says everything."""
        served.produce("shop/orders", *"abc")
        consumer = subscribe(served)
        served.ok("POST", f"{consumer}/receive")
        served.ok("POST", f"{consumer}/ack", {"cumulative": [[0, 1]]})
        described = served.ok("GET", BILLING)
        assert (described["partitions"][0]["offset"], described["lag_messages"]) == (2, 1)

    def test_stopping_answers_a_receive_that_waits(self, tmp_path: Path) -> None:
        """The server does not wait for the time of a long poll."""
        with ThreadPoolExecutor(1) as pool:
            with serving(tmp_path / "data") as served:
                consumer = subscribe(served)
                waiting = pool.submit(served.call, "POST", f"{consumer}/receive?wait=60")

                async def begun() -> None:
                    await eventually(lambda: bool(served.node.http.waiters))

                served.in_loop(begun)
            assert waiting.result(WAIT_SECONDS).json == {"batch": 0, "messages": []}


class TestWebSocket:
    def test_pushed_messages_are_settled_and_stay_settled(self, tmp_path: Path) -> None:
        """Batches come by themselves; after `closed` nothing that was acknowledged comes again."""
        with serving(tmp_path / "data") as served:
            served.produce("shop/orders", *"abcde")
            with connected(served, limit=3) as socket:
                assert hear(socket, "subscribed")["consumer"]
                first, second = hear(socket), hear(socket)
                assert (values(first), values(second)) == (["a", "b", "c"], ["d", "e"])
                say(socket, op="ack", messages=settled(first)["messages"])
                served.produce("shop/orders", "f")
                assert values(hear(socket)) == ["f"]
                say(socket, op="close", id=9)
                assert hear(socket, "closed")["id"] == 9
                with pytest.raises(ConnectionClosed) as closed:
                    socket.recv(WAIT_SECONDS)
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1000
        with serving(tmp_path / "data") as served, connected(served) as socket:
            hear(socket, "subscribed")
            assert values(hear(socket)) == ["d", "e", "f"]

    def test_lost_connection_gives_messages_back(self, served: Served) -> None:
        """The connection is the lease: when it is cut, others get what it held."""
        served.produce("shop/orders", *"ab")
        with connected(served, kind="shared") as other_socket:
            hear(other_socket, "subscribed")
            held = hear(other_socket)
            assert values(held) == ["a", "b"]
            with connected(served, kind="shared") as socket:
                hear(socket, "subscribed")
                other_socket.socket.shutdown(2)
                again = hear(socket)
                assert values(again) == ["a", "b"]
                assert [one["delivery_count"] for one in again["messages"]] == [2, 2]

    def test_window_limits_what_is_with_the_client(self, served: Served) -> None:
        """No more than `window` messages are sent ahead of the acknowledgements; it can be changed."""
        served.produce("shop/orders", *"abcdef")
        with connected(served, window=2) as socket:
            hear(socket, "subscribed")
            first = hear(socket)
            assert values(first) == ["a", "b"]
            say(socket, op="ack", messages=[[0, 0]], id=1)
            ops = [json.loads(socket.recv(WAIT_SECONDS)) for _ in range(2)]
            assert sorted(one["op"] for one in ops) == ["done", "messages"]
            assert [values(one) for one in ops if one["op"] == "messages"] == [["c"]]
            say(socket, op="window", window=10)
            assert values(hear(socket)) == ["d", "e", "f"]

    def test_requests_with_an_id_are_answered(self, served: Served) -> None:
        """What is wrong is told as a problem, and the connection goes on."""
        served.produce("shop/orders", "a")
        with connected(served) as socket:
            hear(socket, "subscribed")
            hear(socket)
            say(socket, op="ack", messages=[[0, 99]], id="x")
            error = hear(socket, "error")
            assert (error["id"], error["problem"]["error"]) == ("x", "InputError")
            say(socket, op="ack", messages=[[3, 0]], id=2)
            assert hear(socket, "error")["id"] == 2
            for hostile in ("{", '{"op":"x"}', '{"op":"ack","messages":[[0,-1]]}', "[" * 3000, '{"op":"nack"}'):
                socket.send(hostile)
                assert hear(socket, "error")["problem"]["status"] == 400
            say(socket, op="flush", id=3)
            assert hear(socket, "done")["id"] == 3

    def test_msgpack_carries_bytes(self, served: Served) -> None:
        """Both sides send msgpack in binary frames."""
        served.ok("POST", f"{TOPIC}/messages", b"\x00\xff", {"content-type": "application/octet-stream"})
        with connected(served, format="msgpack") as socket:
            assert msgspec.msgpack.decode(socket.recv(WAIT_SECONDS))["op"] == "subscribed"  # type: ignore[arg-type]
            pushed = msgspec.msgpack.decode(socket.recv(WAIT_SECONDS))  # type: ignore[arg-type]
            ((message, count),) = pushed["messages"]
            assert (message[0], message[4], count) == (b"\x00\xff", 0, 1)
            socket.send(msgspec.msgpack.encode({"op": "ack", "messages": [[0, 0]], "id": 1}))
            assert msgspec.msgpack.decode(socket.recv(WAIT_SECONDS)) == {"op": "done", "id": 1}  # type: ignore[arg-type]

    def test_consumer_that_connects_again_replaces_its_former_self(self, served: Served) -> None:
        """The old connection is closed and told so; the new one gets what it held."""
        served.produce("shop/orders", "a")
        with connected(served, consumer="till") as old:
            hear(old, "subscribed")
            assert values(hear(old)) == ["a"]
            with connected(served, consumer="till") as new:
                hear(new, "subscribed")
                assert values(hear(new)) == ["a"]
                assert hear(old, "error")["problem"]["error"] == "ConflictError"
                with pytest.raises(ConnectionClosed, match="took the place"):
                    old.recv(WAIT_SECONDS)

    def test_refused_handshake_is_a_problem(self, served: Served) -> None:
        """What is wrong with the query is found before the connection is one."""
        with pytest.raises(InvalidStatus) as refused, connected(served, window=0):
            pass
        assert refused.value.response.status_code == 400
        assert json.loads(refused.value.response.body or b"")["error"] == "InputError"

    def test_stopping_ends_connections(self, tmp_path: Path) -> None:
        """A client learns that the server goes away; what it acknowledged is stored."""
        with serving(tmp_path / "data") as served:
            served.produce("shop/orders", *"ab")
            with connected(served) as socket:
                hear(socket, "subscribed")
                hear(socket)
                say(socket, op="ack", messages=[[0, 0]], id=1)
                hear(socket, "done")
                served.in_loop(served.node.http.begin_to_stop)
                with pytest.raises(ConnectionClosed) as closed:
                    socket.recv(WAIT_SECONDS)
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1001
        with serving(tmp_path / "data") as served:
            assert values(served.ok("POST", f"{subscribe(served)}/receive")) == ["b"]


class TestPositions:
    def test_subscriptions_are_listed_with_their_lag(self, served: Served) -> None:
        """Position, lag and consumers; the age of the oldest message when it is asked for."""
        served.produce("shop/orders", *"abc")
        consumer = subscribe(served, consumer="till")
        served.ok("POST", f"{consumer}/receive?limit=1")
        served.ok("POST", f"{consumer}/ack", {"messages": [[0, 0]]})
        (listed,) = served.ok("GET", f"{TOPIC}/subscriptions")["subscriptions"]
        assert (listed["name"], listed["kind"], listed["lag_messages"]) == ("billing", "exclusive", 2)
        assert (listed["consumers"], listed["is_open"]) == (["till"], True)
        assert listed["partitions"][0]["lag_seconds"] is None
        aged = served.ok("GET", f"{BILLING}?age=true")
        assert aged["partitions"][0]["lag_seconds"] >= 0

    @pytest.mark.parametrize("is_open", [True, False])
    def test_subscription_is_moved(self, served: Served, is_open: bool) -> None:
        """With or without consumers: delivery resumes there."""
        served.produce("shop/orders", *"abc")
        consumer = subscribe(served, kind="shared")
        served.ok("POST", f"{consumer}/receive")
        if not is_open:
            served.ok("DELETE", consumer)
        moved = served.ok("POST", f"{BILLING}/seek", {"position": "1"})
        assert (moved["partitions"][0]["offset"], moved["kind"]) == (1, "shared")
        consumer = consumer if is_open else subscribe(served, kind="shared")
        assert values(served.ok("POST", f"{consumer}/receive")) == ["b", "c"]
        for wrong in ({}, {"position": "x"}, {"offsets": {"4": 0}}, {"offsets": {"x": 0}}, {"position": "99"}):
            assert served.call("POST", f"{BILLING}/seek", wrong).status in (400, 404)

    def test_deleted_subscription_begins_anew(self, served: Served) -> None:
        """Not while it has consumers."""
        served.produce("shop/orders", "a")
        consumer = subscribe(served)
        served.ok("POST", f"{consumer}/ack", settled(served.ok("POST", f"{consumer}/receive")))
        assert served.call("DELETE", BILLING).status == 409
        served.ok("DELETE", consumer)
        served.ok("DELETE", BILLING)
        assert served.call("DELETE", BILLING).status == 404
        assert served.call("GET", BILLING).status == 404
        assert values(served.ok("POST", f"{subscribe(served)}/receive")) == ["a"]


class TestDeadLetters:
    LETTERS = "/v1/topics/shop/orders.billing.dlq/dead-letters"

    def give_up(self, served: Served, *wanted: str) -> None:
        """Has the subscription give up these messages, each with a reason."""
        served.produce("shop/orders", *wanted)
        consumer = subscribe(served, max_deliveries=1)
        received = served.ok("POST", f"{consumer}/receive?wait=60")
        assert values(received) == list(wanted)
        served.ok("POST", f"{consumer}/nack", {**settled(received), "reason": "no such customer"})
        served.ok("DELETE", consumer)

    def test_letters_say_why_and_go_back_once(self, served: Served) -> None:
        """A rejected message is a letter with its reason; sent back it is a new message, and the letter is done."""
        self.give_up(served, "a", "b")
        listed = served.ok("GET", self.LETTERS)["letters"]
        shown = [(one["message"]["value"], one["origin_topic"], one["origin_offset"]) for one in listed]
        assert shown == [("a", "shop/orders", 0), ("b", "shop/orders", 1)]
        assert listed[0]["nack_reason"] == "no such customer"
        second = served.ok("POST", f"{self.LETTERS}/replay", {"offsets": [1]})
        assert second == {"sent": 1, "already_sent": 0, "refused": []}
        assert served.ok("POST", f"{self.LETTERS}/replay", {})["sent"] == 1
        assert served.ok("POST", f"{self.LETTERS}/replay", {})["sent"] == 0
        assert served.ok("GET", self.LETTERS)["letters"] == []
        messages = served.ok("GET", f"{TOPIC}/messages")["messages"]
        assert [one["value"] for one in messages] == ["a", "b", "b", "a"]
        assert messages[2]["headers"] == [["tidelog-replayed-from", "shop/orders.billing.dlq@1"]]

    def test_interrupted_replay_sends_nothing_twice(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        """A crash after a letter was sent, before that was noted, is found by the next run."""
        self.give_up(served, "a")
        with monkeypatch.context() as broken:
            broken.setattr("tidelog.service.http.dead_letters._settle", lambda topic, offsets: None)
            assert served.ok("POST", f"{self.LETTERS}/replay", {})["sent"] == 1
        assert served.ok("POST", f"{self.LETTERS}/replay", {}) == {"sent": 0, "already_sent": 1, "refused": []}
        assert len(served.ok("GET", f"{TOPIC}/messages")["messages"]) == 2
        assert served.ok("GET", self.LETTERS)["letters"] == []

    def test_letters_go_to_a_topic_that_was_deleted_and_created_again(self, served: Served) -> None:
        """What was open for the topic before is opened anew."""
        target = "/v1/topics/shop/again"
        for value in ("a", "b"):
            served.ok("PUT", target, {})
            self.give_up(served, value)
            asked = (served.ok("POST", f"{self.LETTERS}/replay", {"into": "shop/again"}) for _ in range(2))
            assert sum(one["sent"] for one in asked) == 1
            assert [one["value"] for one in served.ok("GET", f"{target}/messages")["messages"]] == [value]
            served.ok("DELETE", target)

    def test_discarded_letters_are_not_listed(self, served: Served) -> None:
        """They stay in their topic; a letter that is not there is refused."""
        self.give_up(served, "a", "b")
        served.ok("POST", f"{self.LETTERS}/discard", {"offsets": [0]})
        assert [one["offset"] for one in served.ok("GET", self.LETTERS)["letters"]] == [1]
        assert served.call("POST", f"{self.LETTERS}/discard", {"offsets": [9]}).status == 404

    def test_letter_without_a_target_is_refused_alone(self, served: Served) -> None:
        """The others are sent, and the answer says which was not."""
        self.give_up(served, "a")
        served.produce("shop/orders.billing.dlq", "no letter")
        replayed = served.ok("POST", f"{self.LETTERS}/replay", {})
        assert (replayed["sent"], [one["offset"] for one in replayed["refused"]]) == (1, [1])
        into = served.ok("POST", f"{self.LETTERS}/replay", {"into": "shop/orders"})
        assert (into["sent"], into["refused"]) == (1, [])


def test_raw_socket_that_is_no_websocket_is_refused(served: Served) -> None:
    """A plain request to the path of a WebSocket says what the path takes."""
    answer = served.call("GET", f"{BILLING}/connect")
    assert (answer.status, answer.json["error"]) == (405, "InputError")
    with closing(served.raw()) as raw:
        raw.sendall(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nupgrade: nonsense\r\nconnection: upgrade\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 404 ")


def test_group_of_kafka_is_moved_while_it_has_no_members(served: Served) -> None:
    """With a member it is a conflict; without one the next consumer goes on where it was moved to."""
    served.produce("shop/orders", "zero", "one", "two", "three")
    broker = served.in_loop(lambda: served.node.http.broker.address)
    options = {"bootstrap.servers": f"{broker.host}:{broker.port}", "group.id": "app", "auto.offset.reset": "earliest"}

    def next_value(consumer: Consumer) -> bytes:
        for _ in range(WAIT_SECONDS):
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                return bytes(message.value() or b"")
        raise AssertionError("no message came")

    consumer = Consumer({**options, "enable.auto.commit": False})
    consumer.subscribe(["shop/orders"])
    assert next_value(consumer) == b"zero"
    consumer.commit(asynchronous=False)
    app = f"{TOPIC}/subscriptions/app"
    refused = served.call("POST", f"{app}/seek", {"offsets": {"0": 3}})
    assert (refused.status, refused.json["error"]) == (409, "ConflictError")
    consumer.close()
    assert served.call("POST", f"{app}/seek", {"offsets": {"0": 5}}).status == 404
    moved = served.ok("POST", f"{app}/seek", {"offsets": {"0": 3}})
    assert (moved["kind"], moved["partitions"][0]["offset"], moved["lag_messages"]) == ("group", 3, 1)
    again = Consumer({**options, "enable.auto.commit": False})
    again.subscribe(["shop/orders"])
    assert next_value(again) == b"three"
    again.close()


def test_consumers_that_are_refused_leave_nothing_behind(served: Served) -> None:
    """One that tries again and again, each time by another name, does not fill the memory."""
    served.produce("shop/orders", "a")
    subscribe(served)
    for _ in range(3):
        assert served.call("POST", f"{TOPIC}/subscriptions/billing/consumers", {}).status == 409
    assert served.in_loop(lambda: len(served.node.http.sessions._opening)) == 0


@pytest.mark.parametrize("is_socket", [False, True])
def test_nothing_is_delivered_that_a_kill_could_take_back(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_socket: bool
) -> None:
    """A client outlives the server: what it acknowledges must not be another message at the same offset."""
    asked, written = Event(), Event()

    async def until_written(partition: Partition, next_offset: int) -> None:
        asked.set()
        await asyncio.to_thread(written.wait, WAIT_SECONDS)

    def receive() -> list[str]:
        if not is_socket:
            return values(served.ok("POST", f"{subscribe(served)}/receive?wait=60"))
        with connect_socket(f"ws://127.0.0.1:{served.address.port}{BILLING}/connect") as socket:
            assert json.loads(socket.recv(WAIT_SECONDS))["op"] == "subscribed"
            return values(json.loads(socket.recv(WAIT_SECONDS)))

    served.produce("shop/orders", "a")
    monkeypatch.setattr(Partition, "until_in_files", until_written)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(receive)
        assert asked.wait(WAIT_SECONDS)
        assert not answer.done()
        written.set()
        assert answer.result(WAIT_SECONDS) == ["a"]
