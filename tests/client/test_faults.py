"""A network that is cut in the middle of anything, and a server that is killed: nothing twice, nothing lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from tests.client.conftest import url_of
from tests.client.cutting import CuttingProxy
from tests.clients.conftest import Service
from tests.fault_proxy import FULL, LOSE_ANSWER, RESET_ANSWER, RESET_REQUEST, TRUNCATE, UNAVAILABLE, FaultProxy
from tests.service.http.serving import Served

import tidelog
from tidelog.client.transport import Http, parse_server

WAIT_SECONDS = 60


@pytest.fixture
def proxy(served: Served) -> Iterator[CuttingProxy]:
    with CuttingProxy((served.address.host, served.address.port)) as made:
        yield made


def wait_for_copies(sub: tidelog.Consumer, count: int) -> list[int]:
    """The offsets of what arrived again, not shown yet."""
    deadline = time.monotonic() + WAIT_SECONDS
    while len(sub._copies) < count and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.01)
    return sorted(offset for _, offset in sub._copies)  # type: ignore[attr-defined]


def values(topic: tidelog.RemoteTopic) -> list[bytes | None]:
    return [message.value for message in topic.read()]


class TestProducing:
    @pytest.mark.parametrize("fault", [UNAVAILABLE, FULL, RESET_REQUEST, RESET_ANSWER, TRUNCATE, LOSE_ANSWER])
    def test_append_is_stored_once_whatever_the_network_does(self, served: Served, fault: str) -> None:
        """Loss prevented: a retried append that the server had stored already was in the topic twice."""
        with FaultProxy(url_of(served)) as proxy, tidelog.connect(proxy.endpoint) as log:
            topic = log.topic("shop/orders")
            proxy.misbehave(fault, every=2)
            offsets = [topic.append(b"%d" % number) for number in range(6)]
            offsets += topic.append_many([b"6", b"7"], sync=True)
            assert proxy.met[fault] > 0
            proxy.heal()
            assert offsets == list(range(8))
            assert values(topic) == [b"%d" % number for number in range(8)]

    def test_cut_at_any_byte_stores_an_append_once(self, proxy: CuttingProxy) -> None:
        """A connection that ends after so many bytes, of the request or of the answer, changes nothing."""
        with tidelog.connect(proxy.url) as log:
            topic = log.topic("shop/orders")
            for number, size in enumerate((1, 100, 400, 450, 500, 520, 550, 600)):
                proxy.cut()
                proxy.cut_after(size)
                assert topic.append(b"%d" % number * 40) == number
            proxy.cut_after()
            assert values(topic) == [b"%d" % number * 40 for number in range(8)]

    def test_threads_and_tasks_share_a_topic(self, proxy: CuttingProxy) -> None:
        """Each message is stored once, and those of one thread in its order, over connections that are cut."""
        with tidelog.connect(proxy.url, timeout=WAIT_SECONDS) as log:
            topic = log.topic("shop/orders")

            def append(writer: int) -> None:
                for number in range(30):
                    if number == 10:
                        proxy.cut()
                    topic.append(b"%d %d" % (writer, number))

            async def append_async() -> None:
                for number in range(30):
                    await topic.append_async(b"4 %d" % number)

            with ThreadPoolExecutor(5) as pool:
                writing = [pool.submit(append, writer) for writer in range(4)]
                writing.append(pool.submit(lambda: asyncio.run(append_async())))
                for one in writing:
                    one.result(WAIT_SECONDS)
            found = [tuple(map(int, (value or b"").split())) for value in values(topic)]
            assert sorted(found) == [(writer, number) for writer in range(5) for number in range(30)]
            for writer in range(5):
                assert [number for one, number in found if one == writer] == list(range(30))

    def test_unreachable_server_is_named(self, served: Served) -> None:
        """After the timeout the error says which server and what to do; the client works again with the server."""
        address = (served.address.host, served.address.port)
        with CuttingProxy(address) as proxy, tidelog.connect(proxy.url, timeout=WAIT_SECONDS) as log:
            topic = log.topic("shop/orders")
            proxy.turn_to(("127.0.0.1", 1))
            log._http.timeout_seconds = 0.2
            with pytest.raises(tidelog.ServerUnavailableError, match=proxy.url) as refused:
                topic.append(b"lost")
            assert refused.value.hint is not None
            assert "tidelog serve" in refused.value.hint
            log._http.timeout_seconds = WAIT_SECONDS
            proxy.turn_to(address)
            topic.append(b"again")
            assert b"again" in values(topic)


class TestReading:
    def test_reader_gets_each_message_once_over_many_connections(self, proxy: CuttingProxy) -> None:
        """A page that did not arrive is asked for again."""
        with tidelog.connect(proxy.url) as log:
            topic = log.topic("shop/orders")
            for start in range(0, 30_000, 10_000):
                topic.append_many([b"%d" % number for number in range(start, start + 10_000)])
            proxy.cut()
            proxy.cut_after(1000, 200_000, 50_000, 7)
            assert [int(value or b"") for value in values(topic)] == list(range(30_000))


class TestConsuming:
    def test_cut_connection_delivers_again_what_was_not_acknowledged(self, proxy: CuttingProxy) -> None:
        """Nothing that was acknowledged before or during the cut comes again."""
        with tidelog.connect(proxy.url) as log:
            topic = log.topic("shop/orders")
            topic.append_many([b"%d" % number for number in range(10)])
            with topic.subscribe("billing") as sub:
                first = [sub.receive(WAIT_SECONDS) for _ in range(4)]
                sub.ack_many([message for message in first[:2] if message is not None])
                proxy.cut()
                assert first[2] is not None
                sub.ack(first[2])  # on a connection that is gone
                found: list[int] = []
                while 9 not in found:
                    message = sub.receive(WAIT_SECONDS)
                    assert message is not None
                    found.append(message.offset)
                    sub.ack(message)
                assert set(range(4, 10)) <= set(found)
                assert not {0, 1, 2} & set(found)
                assert first[3] is not None
                sub.ack(first[3])
                sub.flush()
                assert sub.lag.messages == 0

    def test_connection_cut_again_and_again_loses_nothing(self, proxy: CuttingProxy) -> None:
        """Every message is acknowledged in the end, however often the network fails in the middle of it."""
        with tidelog.connect(proxy.url, prefetch=20) as log:
            topic = log.topic("shop/orders")
            topic.append_many([b"%d" % number for number in range(300)])
            proxy.cut_after(2000, 3000, 1500, 5000, 2500)
            seen: set[int] = set()
            with topic.subscribe("billing") as sub:
                while len(seen) < 300:
                    messages = sub.receive_many(10, WAIT_SECONDS)
                    seen |= {message.offset for message in messages}
                    sub.ack_many(messages)
                sub.flush()
                assert sub.lag.messages == 0
            with topic.subscribe("billing") as again:
                assert again.receive(0.05) is None

    def test_taken_over_consumer_is_told(self, served: Served) -> None:
        """A second client by the same consumer name takes its place; the first does not fight for it."""
        with tidelog.connect(url_of(served)) as one, tidelog.connect(url_of(served)) as two:
            old = one.topic("shop/orders").subscribe("billing", consumer="till")
            with two.topic("shop/orders").subscribe("billing", consumer="till") as new:
                with pytest.raises(tidelog.ConflictError, match="took the place"):
                    old.receive(WAIT_SECONDS)
                two.topic("shop/orders").append(b"a")
                message = new.receive(WAIT_SECONDS)
                assert message is not None
                assert message.value == b"a"
            old.close()


class TestServerKilled:
    def test_killed_server_costs_nothing(self, tmp_path: Path) -> None:
        """Appends and a consumer go on with the next server: each message once in the topic, none unseen."""
        service = Service(tmp_path / "data").start()
        with CuttingProxy(_address(service)) as proxy, tidelog.connect(proxy.url, timeout=WAIT_SECONDS) as log:
            try:
                topic = log.topic("shop/orders")
                with topic.subscribe("billing") as sub:
                    offsets = [topic.append(b"%d" % number) for number in range(5)]
                    first = sub.receive(WAIT_SECONDS)
                    assert first is not None
                    sub.ack(first)
                    sub.flush()
                    service.kill()
                    service.start()
                    proxy.turn_to(_address(service))
                    offsets += [topic.append(b"%d" % number) for number in range(5, 10)]
                    found: set[int] = {first.offset}
                    while len(found) < 10:
                        message = sub.receive(WAIT_SECONDS)
                        assert message is not None
                        assert message.offset != first.offset
                        found.add(message.offset)
                        sub.ack(message)
                assert offsets == list(range(10))
                assert values(topic) == [b"%d" % number for number in range(10)]
                with topic.subscribe("billing") as again:
                    assert again.receive(0.05) is None
            finally:
                service.close()

    def test_ack_after_a_restart_counts(self, tmp_path: Path) -> None:
        """Loss prevented: a message in hand while the server was started again came once more after its ack."""
        service = Service(tmp_path / "data").start()
        with CuttingProxy(_address(service)) as proxy, tidelog.connect(proxy.url, timeout=WAIT_SECONDS) as log:
            try:
                topic = log.topic("shop/orders")
                topic.append_many([b"%d" % number for number in range(5)])
                with topic.subscribe("billing") as sub:
                    in_hand = sub.receive_many(3, WAIT_SECONDS)
                    assert [message.offset for message in in_hand] == [0, 1, 2]
                    service.kill()
                    service.start()
                    proxy.turn_to(_address(service))
                    waiting = wait_for_copies(sub, 5)
                    assert waiting == [0, 1, 2, 3, 4]
                    sub.ack(in_hand[2])
                    sub.ack_cumulative(in_hand[1])
                    assert [message.offset for message in sub.receive_many(10, WAIT_SECONDS)] == [3, 4]
            finally:
                service.close()

    def test_messages_of_a_killed_consumer_go_to_another(self, served: Served) -> None:
        """A consumer process that dies holds nothing back."""
        program = (
            "import sys, tidelog\n"
            "log = tidelog.connect(sys.argv[1])\n"
            "sub = log.topic('shop/orders').subscribe('work', 'shared')\n"
            "print(sub.receive().offset, flush=True)\n"
            "sys.stdin.read()\n"
        )
        with tidelog.connect(url_of(served)) as log:
            topic = log.topic("shop/orders")
            topic.append_many([b"a", b"b"])
            command = [sys.executable, "-c", program, url_of(served)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "0\n"
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_SECONDS)
            process.stdin.close()
            process.stdout.close()
            with topic.subscribe("work", "shared") as sub:
                messages = [sub.receive(WAIT_SECONDS), sub.receive(WAIT_SECONDS)]
                assert [None if one is None else one.value for one in messages] == [b"a", b"b"]


class TestUse:
    def test_example_of_the_guide_runs(self, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
        """A user who pastes the first block of the guide sees the message."""
        guide = Path(__file__).parents[2] / "docs" / "how-to" / "remote.md"
        example = guide.read_text("utf-8").partition("```python remote\n")[2].partition("```")[0]
        exec(example.replace("http://127.0.0.1:8080", url_of(served)), {})
        assert capsys.readouterr().out == "0 b'created'\n"

    def test_nobody_there_is_said_at_once(self) -> None:
        """A wrong address does not wait for the timeout."""
        with pytest.raises(tidelog.ServerUnavailableError, match=r"127\.0\.0\.1:1"):
            tidelog.connect("http://127.0.0.1:1")

    @pytest.mark.parametrize(
        "url", ["127.0.0.1:8080", "ftp://host", "http://", "http://user:secret@host", "http://h:x"]
    )
    def test_bad_url_is_refused_without_repeating_it(self, url: str) -> None:
        """A URL may hold a password: the error does not show it."""
        with pytest.raises(tidelog.InputError, match="must be a URL") as refused:
            tidelog.connect(url)
        assert "secret" not in str(refused.value)

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_client_does_not_survive_a_fork(self, served: Served) -> None:
        """A child that uses the client of its parent gets an error, and does not hang."""
        with tidelog.connect(url_of(served)) as log:
            topic = log.topic("shop/orders")
            child = os.fork()
            if child == 0:
                try:
                    topic.append(b"a")
                except tidelog.ClosedError:
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert topic.append(b"b") == 0


class TestUploads:
    """Bodies that are sent as they come, to servers that do not take them."""

    @pytest.mark.parametrize(
        ("said", "error", "text"),
        [
            (b"", tidelog.ServerUnavailableError, "no answer in time"),
            (b"409 Conflict", tidelog.ConflictError, "the server answered 409"),
            (b"307 Temporary Redirect", tidelog.ServerUnavailableError, "another node does"),
        ],
    )
    @pytest.mark.parametrize("pieces", [1, 1000])
    def test_body_that_the_server_does_not_read_ends_with_its_answer_or_the_timeout(
        self, said: bytes, error: type[tidelog.TidelogError], text: str, pieces: int
    ) -> None:
        """Whether it is all sent, or waits for room: nobody waits for ever for a server that is stuck."""

        async def body() -> AsyncIterator[bytes]:
            for _ in range(pieces):
                yield bytes(1 << 20)

        async def upload(url: str) -> None:
            http = Http(parse_server(url), None, None, timeout_seconds=1.0, max_connections=1)
            async with asyncio.timeout(WAIT_SECONDS):
                await http.upload("/v1/engines/main", {}, body(), "/v1/engines/main")

        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
            ended = Event()
            serving = threads.submit(_answer_and_read_no_more, listener, said, ended)
            try:
                with pytest.raises(error, match=text):
                    asyncio.run(upload(f"http://127.0.0.1:{listener.getsockname()[1]}"))
            finally:
                ended.set()
                serving.result(WAIT_SECONDS)


def _answer_and_read_no_more(listener: socket.socket, said: bytes, ended: Event) -> None:
    """A server that reads the head of one request, says something and gets stuck, with the connection open."""
    connection, _ = listener.accept()
    with connection:
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        if said:
            connection.sendall(b"HTTP/1.1 " + said + b"\r\ncontent-length: 0\r\n\r\n")
        assert ended.wait(2 * WAIT_SECONDS)


def _address(service: Service) -> tuple[str, int]:
    host, _, port = service.http.removeprefix("http://").rpartition(":")
    return host, int(port)
